"""Quantised checkpoints: what they encode beside the experts stays encoded or is restored once; no code is taken for a weight."""

import pytest
import quantised_checkpoints as quantised
import torch

from vismoe.models.load.quantizer import VisMoEConfig


def logits(model, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 500, (1, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids).logits


def load(folder, cls, **settings):
    return cls.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=VisMoEConfig(**settings), output_loading_info=True
    )


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_logits_with_torch_are_those_of_restored_weights(kind, tmp_path):
    expected = quantised.write(tmp_path, kind, backbone=True)
    expected.set_experts_implementation("eager")
    loaded, report = load(tmp_path, type(expected), kernels="torch")
    assert not any(report.values()), report
    assert torch.equal(logits(loaded), logits(expected))
