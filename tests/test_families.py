"""The first promise, end to end: with experts paged through a few slabs, every family's logits are those of the full model.

Bit for bit, in float32 and bfloat16, over a prefill (with an image where the family has one) and greedy decode steps; the oracle
is transformers' eager experts with every parameter in fresh memory.
"""

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig

STEPS = 6


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small gain nothing from a second thread and lose much where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def greedy(model, inputs) -> tuple[torch.Tensor, ...]:
    """Logits of the prefill and of each greedy step, through the model's own generate()."""
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.logits


def load_paged(folder, dtype, reference):
    """With two slabs per geometry: fewer than one token's experts in two layers, far fewer than a prefill's in one."""
    experts = [module for module in reference.modules() if hasattr(module, "has_gate") and hasattr(module, "is_transposed")]
    geometries = len({module.down_proj.shape for module in experts})
    share = 2 * geometries / sum(module.num_experts for module in experts)
    settings = VisMoEConfig(memory=f"{100 * share + 1e-6}%", pinned_layers=0)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=settings)
    assert vismoe.runtime_of(model).plan.slabs == (2,) * geometries
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logits_are_bit_identical_to_the_full_model(family, dtype, tmp_path):
    tiny_models.save(family, tmp_path, dtype=dtype)
    inputs = tiny_models.prompt(family, dtype=dtype, batch=2)
    inputs["attention_mask"][0, :2] = 0  # the first row is the shorter one
    reference = tiny_models.reference(tmp_path, dtype)
    model = load_paged(tmp_path, dtype, reference)
    with torch.inference_mode():
        expected, actual = (m(**inputs).logits for m in (reference, model))
    assert torch.equal(expected, actual), f"prefill: off by {(expected - actual).abs().max()}"
    for step, (expected, actual) in enumerate(zip(greedy(reference, inputs), greedy(model, inputs), strict=True)):
        assert torch.equal(expected, actual), f"step {step}: off by {(expected - actual).abs().max()}"
    runtime = vismoe.runtime_of(model)
    counts = runtime.pager.metrics.snapshot()
    assert counts.total("evictions") > 0, "the budget did not bite"
    runtime.pager.check_integrity()
