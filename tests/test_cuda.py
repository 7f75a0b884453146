"""The same code on a GPU: page-locked host tier, copy stream, events. Skipped, and saying so, where there is none."""

import numpy as np
import pytest
import tiny_models
import torch
from test_packed_slabs import folder as folder

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import TransferError
from vismoe.models.load import host_rates
from vismoe.paging.miss import Rates
from vismoe.pools import page_lock
from vismoe.pools.pool import SlabPool
from vismoe.pools.readback import on_host
from vismoe.types import RecordLayout

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
        tmp_path, device_map={"": "cuda"}, quantization_config=VisMoEConfig(memory="12%")
    )
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_moe").items()}
    with torch.inference_mode():
        expected = reference.generate(**inputs, do_sample=False, max_new_tokens=100, min_new_tokens=100)
        assert torch.equal(expected, model.generate(**inputs, do_sample=False, max_new_tokens=100, min_new_tokens=100))
    vismoe.runtime_of(model).pager.close()


@pytest.mark.parametrize("host_memory", [None, "1MiB"], ids=["host holds all", "host smaller than the experts"])
@pytest.mark.parametrize("share", ["100%", "12%"])
def test_lossless_records_cross_the_link_encoded_and_change_no_bit(share, host_memory, tmp_path):
    pytest.importorskip("triton")
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    assert main(["pack", str(tmp_path), "--formats", "lossless"]) == 0
    reference = tiny_models.reference(tmp_path, torch.bfloat16).to("cuda")
    settings = VisMoEConfig(memory=share, host_memory=host_memory, misses="wait")
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="cuda", quantization_config=settings
    )
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_moe", dtype=torch.bfloat16).items()}
    with torch.inference_mode():
        expected = reference.generate(**inputs, do_sample=False, max_new_tokens=50, min_new_tokens=50)
        assert torch.equal(expected, model.generate(**inputs, do_sample=False, max_new_tokens=50, min_new_tokens=50))
        assert torch.equal(reference(**inputs).logits, model(**inputs).logits)
    runtime = vismoe.runtime_of(model)
    copies, encoded = runtime.pager.metrics.snapshot(), runtime.configuration.experts.encoded
    assert runtime.pager.hosts[0].layouts == encoded and "the GPU decodes" in runtime.backends["kernels"]
    assert copies.total("bytes_copied") > 0 and (share == "100%" or copies.total("evictions") > 0)
    runtime.pager.close()


@pytest.mark.parametrize("memory", ["50%", "90%"], ids=["packed", "raw beside packed"])
def test_packed_slabs_have_the_bits_of_decoded_ones(memory, folder):
    pytest.importorskip("triton")
    inputs, logits = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_moe", batch=2).items()}, []
    for packed in ("always", "never"):
        settings = VisMoEConfig(memory=memory, kernels="auto", misses="wait", packed_slabs=packed)
        model = tiny_models.model_class(folder).from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cuda", quantization_config=settings
        )
        with torch.inference_mode():
            model.generate(**inputs, do_sample=False, max_new_tokens=50, min_new_tokens=50)
            logits.append(model(**inputs).logits)
        pager = vismoe.runtime_of(model).pager
        assert (vismoe.runtime_of(model).plan.packed_from is None) == (packed == "never")
        pager.check_integrity(), pager.close()
    assert torch.equal(*logits)


@pytest.mark.parametrize("misses", ["cpu", "auto"])
def test_misses_that_the_cpu_computes_beside_the_gpu_change_logits_by_rounding_only(misses, tmp_path, monkeypatch):
    monkeypatch.setattr(host_rates, "_measured", lambda *given: Rates(1e6, 4e10))  # these experts are copied sooner
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16)
    reference = tiny_models.reference(tmp_path, torch.bfloat16).to("cuda")
    settings = VisMoEConfig(memory="25%", kernels="auto", misses=misses)
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="auto", quantization_config=settings
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


def test_values_come_back_through_page_locked_memory_with_one_wait():
    tensors = [torch.arange(12, device="cuda").view(3, 4), torch.rand(3, 4, device="cuda"), torch.tensor([True], device="cuda")]
    for found, tensor in zip(on_host(*tensors), tensors, strict=True):
        assert found.dtype == tensor.cpu().numpy().dtype and (found == tensor.cpu().numpy()).all()
    assert tensors[0].to("cpu", non_blocking=True).is_pinned()


def test_records_of_several_registrations_are_copied_to_the_gpu(monkeypatch):
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 2**16)
    pool = SlabPool(RecordLayout.of({"w": (375,)}, {"w": torch.int64}), 1000, page_locked=True)
    for slab in range(pool.capacity):
        pool.weights(slab)["w"].fill_(slab)
    locked = [torch.cuda.cudart().cudaHostRegister(pool.record(slab).data_ptr(), 1, 0) for slab in range(pool.capacity)]
    assert all(map(int, locked)), "a page that was not registered"
    page_lock._clear_last_error()
    copies = [pool.weights(slab)["w"].to("cuda", non_blocking=True) for slab in range(pool.capacity)]
    assert torch.equal(torch.stack(copies)[:, 0].cpu(), torch.arange(pool.capacity))
    assert all(bool((copy == copy[0]).all()) for copy in copies)


def test_a_refused_registration_leaves_no_error_behind():
    pool = SlabPool(RecordLayout.of({"w": (512,)}, {"w": torch.int64}), 8, page_locked=True)
    with pytest.raises(TransferError, match="CUDA error"):
        page_lock.page_lock(pool.buffer, pool)  # it is registered already
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_change_of_policy_keeps_registrations_and_torch_keeps_to_the_budget(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    assert main(["pack", str(tmp_path), "--formats", "int4"]) == 0
    settings = {"memory": "70%", "policy": "hotness", "formats": "16/4"}
    with torch.inference_mode():
        model = tiny_models.model_class(tmp_path).from_pretrained(
            tmp_path, dtype=torch.bfloat16, device_map="cuda", quantization_config=VisMoEConfig(**settings)
        )
    runtime = vismoe.runtime_of(model)
    before, total = list(runtime.pager.hosts), torch.cuda.mem_get_info()[1]
    most = runtime.configuration.hardware.held_bytes + runtime.plan.budget_bytes
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(min(1, most / total))
    asked = Settings.of(**{**settings, "policy": "importance"})
    runtime.reconfigure(model, runtime.configuration.with_settings(model, asked))
    assert list(runtime.pager.hosts) == before
    inputs = {k: v.to("cuda") for k, v in tiny_models.prompt("qwen3_moe", dtype=torch.bfloat16).items()}
    model.generate(**inputs, do_sample=False, max_new_tokens=8)
    runtime.pager.check_integrity()
    runtime.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1
