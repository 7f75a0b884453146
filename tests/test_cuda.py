"""The same code on a GPU: page-locked host tier, copy stream, events. Skipped, and saying so, where there is none."""

import numpy as np
import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("host_memory", [None, "1MiB"], ids=["host holds all", "host smaller than the experts"])
@pytest.mark.parametrize("share", ["100%", "25%"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_on_the_gpu_are_those_of_resident_experts(dtype, share, host_memory, tmp_path):
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=dtype)
    reference = tiny_models.reference(tmp_path, dtype).to("cuda")
    settings = VisMoEConfig(memory=share, host_memory=host_memory)
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, dtype=dtype, device_map="cuda", quantization_config=settings
    )
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_vl_moe", dtype=dtype, batch=2).items()}
    with torch.inference_mode():
        assert torch.equal(reference(**inputs).logits, model(**inputs).logits)
        expected = reference.generate(**inputs, do_sample=False, max_new_tokens=24, min_new_tokens=24)
        assert torch.equal(expected, model.generate(**inputs, do_sample=False, max_new_tokens=24, min_new_tokens=24))
    runtime = vismoe.runtime_of(model)
    counts = runtime.pager.metrics.snapshot()
    assert counts.total("bytes_copied") > 0 and runtime.backends["mover"] == "DeviceMover"
    assert share == "100%" or counts.total("evictions") > 0
    runtime.pager.check_integrity()
    runtime.pager.close()


def test_a_slab_is_not_overwritten_while_a_kernel_still_reads_it(tmp_path):
    """Write after read: many steps with two slabs, where every copy reuses memory that a queued kernel may still be reading."""
    tiny_models.save("qwen3_moe", tmp_path)
    reference = tiny_models.reference(tmp_path).to("cuda")
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, device_map="cuda", quantization_config=VisMoEConfig(memory="12%")
    )
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_moe").items()}
    with torch.inference_mode():
        expected = reference.generate(**inputs, do_sample=False, max_new_tokens=100, min_new_tokens=100)
        assert torch.equal(expected, model.generate(**inputs, do_sample=False, max_new_tokens=100, min_new_tokens=100))
    vismoe.runtime_of(model).pager.close()


@pytest.mark.parametrize("misses", ["cpu", "auto"])
def test_misses_that_the_cpu_computes_beside_the_gpu_change_logits_by_rounding_only(misses, tmp_path):
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16)
    reference = tiny_models.reference(tmp_path, torch.bfloat16).to("cuda")
    settings = VisMoEConfig(memory="25%", kernels="auto", misses=misses)
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="cuda", quantization_config=settings
    )
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_vl_moe", dtype=torch.bfloat16, batch=2).items()}
    with torch.inference_mode():
        for _ in range(3):  # at first nothing is in host memory
            logits = model(**inputs).logits
        torch.testing.assert_close(logits, reference(**inputs).logits, rtol=0.05, atol=0.1)
    pager = vismoe.runtime_of(model).pager
    assert pager.metrics.snapshot().total("computed_on_host") > 0
    pager.check_integrity()
    pager.host.check_integrity()
    pager.close()


@pytest.mark.parametrize("policy", ["hotness", "importance", "hotness+importance"])
def test_policies_choose_on_the_gpu_what_they_choose_on_the_cpu(policy, tmp_path):
    """The same formats for the same tokens, and transitions between slabs of two formats that leave the books right."""
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16)
    assert main(["pack", str(tmp_path), "--formats", "int4,int2"]) == 0
    inputs = tiny_models.prompt("qwen3_vl_moe", dtype=torch.bfloat16)
    computed = {}
    for device in ("cpu", "cuda"):
        settings = VisMoEConfig(memory="60%", policy=policy, formats="16/2", deterministic=True, hotness_period=4)
        model = tiny_models.model_class(tmp_path).from_pretrained(
            tmp_path, dtype=torch.bfloat16, device_map=device, quantization_config=settings
        )
        forced = {k: v.to(device) for k, v in inputs.items()}
        with torch.inference_mode():
            model.generate(**forced, do_sample=False, max_new_tokens=24, min_new_tokens=24)
        pager = vismoe.runtime_of(model).pager
        pager.check_integrity()
        assert np.isin(pager.precisions(), (0, 1, 2)).all()
        counts = pager.metrics.snapshot()
        assert (counts.total("promotions") > 0) == ("hotness" in policy)
        computed[device] = counts.shares(("high", "low"))
        pager.close()
    assert computed["cuda"]["high"] == pytest.approx(computed["cpu"]["high"], abs=0.1)  # tokens may differ by a rounding
