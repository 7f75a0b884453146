"""What `importance` would have loaded from a recorded trace, for any number of slabs of each format: without a byte moved.

The controller, page tables, cache rules and victims are those that serve. What is there is computed first, then what is missing,
one after the other; nothing is fetched ahead. Traces say nothing about attention, so every token of a prompt is a heavy hitter.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vismoe.paging.page_table import PageTable
from vismoe.pools.pool import SlabPool
from vismoe.precision.controller import Precision
from vismoe.precision.policy import Policy
from vismoe.precision.rules import ABSENT, Serve, serve
from vismoe.simulate.precision import Layer, Pass
from vismoe.types import HIGH, LOW, ExpertInventory, Phase

__all__ = ["Loaded", "replay_importance"]

WINDOW = 5  # MoE layers that eviction protects


class Loaded(NamedTuple):
    """Bytes by phase."""

    prefill_bytes: int
    decode_bytes: int


def replay_importance(
    passes: Iterable[Pass], inventory: ExpertInventory, policy: Policy, high_slabs: Sequence[int], low_slabs: Sequence[int]
) -> Loaded:
    """Replays passes under a policy with importance over these slabs of each geometry; `inventory` has a second format.

    At least two slabs of each format, so that a copy can arrive while another one is computed.
    """
    precision = Precision(policy, [layer.num_experts for layer in inventory.layers])
    tables = [
        PageTable(inventory.layers_of(g), [SlabPool(high, n, aliased=True), SlabPool(low, m, aliased=True)], "lfu")
        for g, (high, low, n, m) in enumerate(zip(inventory.layouts, inventory.low_layouts, high_slabs, low_slabs, strict=True))
    ]
    loaded = dict.fromkeys(Phase, 0)
    for each in passes:
        for table in tables:
            table.begin_step()
        for layer in each.layers:
            moe = inventory.layers[layer.index]
            high = _wanted(precision, layer, each.phase is Phase.DECODE, moe.num_experts)
            kept = None if each.phase is Phase.DECODE else set(layer.last.tolist())
            loaded[each.phase] += _serve(tables[moe.geometry], policy, layer.index, high, kept)
    return Loaded(loaded[Phase.PREFILL], loaded[Phase.DECODE])


def _wanted(precision: Precision, layer: Layer, decoding: bool, experts: int) -> dict[int, int]:
    """The format that each demanded expert is wanted in, ids ascending."""
    hitters = None if decoding else np.ones(len(layer.routing), bool)
    choice = precision.at_layer(layer.index, decoding, layer.routing, layer.weights, hitters, layer.sequence, layer.real)
    routing = choice.routing if layer.real is None else choice.routing[layer.real]
    demanded = np.unique(routing[(routing >= 0) & (routing < experts)])
    if choice.high is None:
        return dict.fromkeys(demanded.tolist(), HIGH)
    return dict(zip(demanded.tolist(), np.where(choice.high[demanded], HIGH, LOW).tolist()))


def _serve(table: PageTable, policy: Policy, layer: int, wanted: dict[int, int], kept: set[int] | None) -> int:
    """Bytes loaded by one layer of one pass. `kept`: what may enter the cache (None: all)."""
    base = table.base[layer]
    table.enter_layer(layer)
    missing = [expert for expert, precision in wanted.items() if _is_missing(table, policy, base + expert, precision)]
    there = table.slab_of[[base + expert for expert in wanted.keys() - missing]]
    table.enter_demand(there, stays=True)
    table.leave_demand(there)
    table.used(there, tick=0)
    loaded = 0
    for expert in missing:
        streaming = kept is not None and expert not in kept
        room = table.make_room(layer, WINDOW, streaming, precision=wanted[expert])
        room = room or table.make_room(layer, WINDOW, streaming, must=True, precision=wanted[expert])
        assert room is not None, "two slabs of each format always leave one to take"
        table.begin_load(base + expert, room.slab, ring=room.ring)
        table.end_load(base + expert, succeeded=True)
        loaded += table.pool.bytes_of(room.slab)
        slab = table.slab_of[[base + expert]]
        table.leave_demand(slab)
        table.used(slab, tick=0)
    return loaded


def _is_missing(table: PageTable, policy: Policy, flat: int, precision: int) -> bool:
    slab = int(table.slab_of[flat])
    resident = ABSENT if slab < 0 else table.pool.precision_of(slab)
    return serve(resident, precision, policy) is Serve.WAIT
