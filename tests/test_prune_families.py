"""Dropping visual tokens, for every family with images that transformers has: kept tokens see what an independent reference sees.

Conformance by inspection: `VisualPruner.of` makes a pruner of a family, or its row in `models_page.KEEPS_ALL` says why not; a
family on neither side fails here. The reference (prune_reference.py) runs the model at full length and hides the dropped tokens
from everybody in the deeper layers. Float32; logits of a padded batch in prefill, and of greedy steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from family_zoo import zoo
from models_page import KEEPS_ALL, PREFILL_ONLY
from prune_reference import unseen
from torch import nn

import vismoe
from vismoe import VisMoEConfig
from vismoe.models.visual import prune
from vismoe.models.visual.prune import VisualPruner
from vismoe.vision.selection import Pruning, Selection

pytestmark = pytest.mark.usefixtures("one_thread")
PRUNE_LAYER, STEPS = 1, 3
OFF_INTERFACE = ("llama4", "step3p7")  # VisMoE puts their experts on the interface, where their routing can be read
FAMILIES = [name for name in tiny_models.ZOO if zoo()[name].with_images]


def models(family: str, folder: Path) -> tuple[Any, VisualPruner | str, Any]:
    """(the model to prune, its pruner, the model of the reference)."""
    if family not in OFF_INTERFACE:
        model = tiny_models.build(family)
        return model, VisualPruner.of(model, PRUNE_LAYER), model
    tiny_models.save(family, folder)
    settings = VisMoEConfig(memory="100%", context=256, prune_layer=PRUNE_LAYER)
    paged = tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    return paged, vismoe.runtime_of(paged).pruner, tiny_models.reference(folder)


def keep_everything(pruning: Pruning, saliency: np.ndarray, *_: Any) -> Selection:
    return Selection(np.arange(len(saliency)))


def rows_of(kept: np.ndarray, tokens: int) -> list[torch.Tensor]:
    """Which of its tokens each of two sequences keeps, from what `on_pruned` is told."""
    places = torch.from_numpy(kept.astype(np.int64)).view(2, -1)
    return [row[row >= 0] - number * tokens for number, row in enumerate(places)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_computes_what_it_would_if_nobody_saw_the_rest(family, tmp_path, monkeypatch):
    model, pruner, reference = models(family, tmp_path)
    if family in KEEPS_ALL:
        assert isinstance(pruner, str) and KEEPS_ALL[family][0] in pruner
        return
    assert isinstance(pruner, VisualPruner), f"{pruner}. If so, it wants a row in KEEPS_ALL of tests/models_page.py"
    inputs = tiny_models.prompt(family, batch=2)
    tokens = inputs["input_ids"].shape[1]
    tell, told = pruner.on_pruned, []
    pruner.on_pruned = lambda kept: (told.append(kept), tell and tell(kept))

    whole = model(**inputs).logits
    with monkeypatch.context() as patch:
        patch.setattr(prune, "select", keep_everything)
        pruner.pruning = Pruning(keep=0.99)
        assert torch.equal(model(**inputs).logits, whole), "to keep everything, the long way, changes something"
        assert len(told) == 1 and told.pop().tolist() == list(range(2 * tokens))

    inputs["attention_mask"][0, :2] = 0  # the first row is the shorter one
    pruner.pruning = Pruning(keep=0.5)
    actual = model(**inputs).logits
    kept = rows_of(told[0], tokens)
    visual = int((inputs["input_ids"][0] == tiny_models.IMAGE_TOKEN).sum())
    assert [len(row) for row in kept] == [tokens - 2 - visual + visual // 2, tokens - visual + visual // 2]
    generates = family not in PREFILL_ONLY
    steps = tiny_models.greedy(model, inputs, STEPS) if generates else None
    decoder = same_place(model, reference, pruner._decoder)
    pruner.remove()
    hidden = torch.ones(2, tokens, dtype=torch.bool)
    for row, places in zip(hidden, kept, strict=True):
        row[places] = False
    with unseen(decoder, decoder.layers, PRUNE_LAYER, hidden):
        expected = reference(**inputs).logits
        slow = tiny_models.greedy(reference, inputs, STEPS) if generates else None
    for row, places in enumerate(kept):
        torch.testing.assert_close(actual[row, -len(places) :], expected[row, places], rtol=0, atol=1e-5)
    assert (whole[1, kept[1]] - expected[1, kept[1]]).abs().max() > 0.01, "to drop tokens changes nothing"
    if steps and slow:
        assert torch.equal(steps.sequences, slow.sequences)
        torch.testing.assert_close(torch.stack(steps.logits), torch.stack(slow.logits), rtol=0, atol=1e-5)


def same_place(model: nn.Module, other: nn.Module, module: nn.Module) -> Any:
    """The module of `other` that lies where `module` lies in `model`."""
    return other.get_submodule(next(path for path, candidate in model.named_modules() if candidate is module))
