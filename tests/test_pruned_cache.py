"""A cache layer with fewer slots than tokens, against a list of what each sequence should hold, whatever happens to it."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from vismoe.errors import InputError
from vismoe.models.visual.pruned_cache import PrunedLayer, left_padded

HEADS, WIDTH = 2, 3


@dataclass
class Model:
    """What the layer stands for: per sequence, the positions that it holds and the number that was stored for each."""

    length: int = 0
    rows: list[dict[int, float]] = field(default_factory=lambda: [{}, {}])


def states(numbers: torch.Tensor) -> torch.Tensor:
    """`[B, HEADS, n, WIDTH]` that hold one number per sequence and slot."""
    return numbers[:, None, :, None].expand(-1, HEADS, -1, WIDTH).clone()


def check(layer: PrunedLayer, model: Model) -> None:
    assert layer.get_seq_length() == model.length
    assert layer.get_mask_sizes(1) == (model.length + 1, 0)
    if not model.length:
        return
    positions = layer.positions()
    assert layer.padded or not (positions < 0).any()
    assert layer.keys.shape[-2] == layer.values.shape[-2] == positions.shape[1]
    for row, slots, keys, values in zip(model.rows, positions, layer.keys, layer.values, strict=True):
        held = {int(slot): float(key) for slot, key in zip(slots, keys[0, :, 0], strict=True) if slot >= 0}
        assert held == row
        assert [int(slot) for slot in slots if slot >= 0] == sorted(held), "slots are in the order of the sequence"
        assert torch.equal(values, -keys)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple]:
    steps = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["pruned", "plain", "plain", "crop", "select", "repeat", "reorder", "reset"]))
        if kind == "pruned":
            tokens = draw(st.integers(1, 6))
            keeps = [draw(st.sets(st.integers(0, tokens - 1), min_size=1)) for _ in range(4)]
            steps.append((kind, tokens, keeps))
        elif kind == "reset":
            steps.append((kind, draw(st.integers(0, 3)) == 0))
        else:
            steps.append((kind, draw(st.integers(1, 5))))
    return steps


@settings(max_examples=80)
@given(histories())
def test_a_layer_holds_what_its_history_says(history):
    layer, model, number = PrunedLayer(), Model(), 0.0
    for kind, argument, *rest in history:
        batch = len(model.rows)
        if kind in ("pruned", "plain"):
            keep = torch.ones(batch, argument, dtype=torch.bool)
            if kind == "pruned":
                keep = torch.tensor([[place in rest[0][row % 4] for place in range(argument)] for row in range(batch)])
            slots = left_padded(keep)
            numbers = torch.where(slots < 0, 0.0, slots + number + 100.0 * torch.arange(batch)[:, None])
            if kind == "pruned":
                layer.expect(torch.where(slots < 0, -1, slots + model.length), argument)
            layer.update(states(numbers), -states(numbers))
            for row, (kept, stored) in enumerate(zip(slots.tolist(), numbers.tolist(), strict=True)):
                model.rows[row] |= {model.length + place: value for place, value in zip(kept, stored, strict=True) if place >= 0}
            model.length, number = model.length + argument, number + argument
        elif kind == "crop":
            fewer = min(argument, model.length)
            layer.crop(-fewer)
            model.length -= fewer
            model.rows = [{place: value for place, value in row.items() if place < model.length} for row in model.rows]
        elif kind == "reset":
            if argument:
                layer.reset()
                model = Model()
        elif kind == "repeat" and batch <= 2:
            layer.batch_repeat_interleave(2)
            model.rows = [dict(row) for row in model.rows for _ in range(2)]
        elif kind in ("select", "reorder"):
            chosen = torch.arange(batch).roll(argument) if kind == "reorder" else torch.tensor([argument % batch])
            (layer.reorder_cache if kind == "reorder" else layer.batch_select_indices)(chosen)
            model.rows = [dict(model.rows[row]) for row in chosen.tolist()]
        if not any(model.rows):  # cropped to nothing
            model = Model(model.length, [{} for _ in model.rows])
        check(layer, model)


def test_it_takes_over_what_a_plain_layer_holds():
    plain = DynamicLayer()
    plain.update(states(torch.arange(6.0).view(2, 3)), -states(torch.arange(6.0).view(2, 3)))
    layer = PrunedLayer.of(plain)
    layer.expect(torch.tensor([[4, 5], [-1, 3]]), 3)
    layer.update(states(torch.tensor([[7.0, 8.0], [0.0, 9.0]])), -states(torch.tensor([[7.0, 8.0], [0.0, 9.0]])))
    check(layer, Model(6, [{0: 0, 1: 1, 2: 2, 4: 7, 5: 8}, {0: 3, 1: 4, 2: 5, 3: 9}]))
    cache = DynamicCache()
    cache.layers = [layer]
    assert cache.get_seq_length() == 6 and cache.get_mask_sizes(2, 0) == (8, 0)


def test_a_sliding_window_is_not_exceeded():
    layer = PrunedLayer.of(DynamicSlidingWindowLayer(sliding_window=4))
    assert layer.is_sliding
    layer.expect(torch.tensor([[0, 2]]), 3)
    layer.update(states(torch.zeros(1, 2)), states(torch.zeros(1, 2)))
    layer.update(states(torch.zeros(1, 1)), states(torch.zeros(1, 1)))
    with pytest.raises(InputError, match=r"5 tokens are more than the 4 .*Fix: keep=1"):
        layer.update(states(torch.zeros(1, 1)), states(torch.zeros(1, 1)))
