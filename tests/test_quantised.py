"""Quantised checkpoints: their experts, paged as they lie, compute what transformers computes with restored ones."""

import pytest
import quantised_checkpoints as quantised
import torch

from vismoe.models.load.quantizer import VisMoEConfig


def logits(model, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 500, (1, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("memory", ["100%", "40%"])
@pytest.mark.parametrize("kind", quantised.KINDS)
def test_logits_with_torch_are_those_of_restored_weights(kind, memory, tmp_path):
    expected = quantised.write(tmp_path, kind)
    expected.set_experts_implementation("eager")
    paged = type(expected).from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=VisMoEConfig(memory=memory, kernels="torch")
    )
    assert torch.equal(logits(paged), logits(expected))
