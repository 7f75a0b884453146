"""Exact by default: logits equal eager experts bit for bit at every budget, in prefill and decode, alone and in a padded batch.

Oracle: transformers' eager experts, every parameter cloned into fresh memory.
"""

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig

FAMILY, STEPS = "qwen3_vl_moe", 12


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    tiny_models.save(FAMILY, folder, dtype=request.param)
    return folder, request.param, tiny_models.reference(folder, request.param)


def padded(inputs, pad: int):
    """The same prompts, the first `pad` tokens of every sequence but the last masked out."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[:-1, :pad] = 0
    return {**inputs, "attention_mask": mask}


@pytest.mark.budget(3)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("share", ["100%", "50%", "25%", "least"])
def test_logits_and_tokens_are_eagers_at_every_budget(checkpoint, share, batch):
    folder, dtype, reference = checkpoint
    experts = sum(m.num_experts for m in reference.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed"))
    memory = f"{200 / experts + 1e-6}%" if share == "least" else share
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=VisMoEConfig(memory=memory))
    runtime = vismoe.runtime_of(model)
    inputs = tiny_models.prompt(FAMILY, dtype=dtype, batch=batch)
    if batch > 1:
        inputs = padded(inputs, 3)
    assert torch.equal(reference(**inputs).logits, model(**inputs).logits), "prefill"
    expected, actual = (tiny_models.greedy(which, inputs, STEPS) for which in (reference, model))
    assert torch.equal(expected.sequences, actual.sequences)
    for step, (one, other) in enumerate(zip(expected.logits, actual.logits, strict=True)):
        assert torch.equal(one, other), f"step {step}"
    counts = runtime.pager.metrics.snapshot()
    assert counts.total("misses") > 0
    if share != "100%":
        assert counts.total("evictions") > 0, "the budget did not bite"
    else:
        assert counts.total("evictions") == 0
    if share == "least":
        assert runtime.plan.slabs == (2,)
    runtime.pager.check_integrity()
    runtime.pager.close()
