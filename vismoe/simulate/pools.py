"""What `importance` would have loaded from a recorded trace, for any number of slabs of each format: without a byte moved.

The controller and the residency core are those that serve. Copies take no time, what is there is computed first, and nothing is
fetched ahead. Traces say nothing about attention, so every token of a prompt is a heavy hitter.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vismoe.paging.demand import Demand
from vismoe.paging.miss import Rates
from vismoe.paging.residency import Residency
from vismoe.paging.tickets import Moved
from vismoe.paging.upgrades import Upgrades
from vismoe.pools.pool import SlabPool
from vismoe.precision.controller import Choice, Precision
from vismoe.precision.policy import Policy
from vismoe.simulate.precision import Layer, Pass
from vismoe.types import ExpertInventory, Phase

__all__ = ["Loaded", "replay_importance"]


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
    pools = [
        [SlabPool(high, n, aliased=True), SlabPool(low, m, aliased=True)]
        for high, low, n, m in zip(inventory.layouts, inventory.low_layouts, high_slabs, low_slabs, strict=True)
    ]
    upgrades = Upgrades(policy, (Rates(1.0, 1.0),) * len(pools))  # under importance alone no rate decides
    core = Residency(inventory, pools, upgrades=upgrades, deterministic=True)
    for each in passes:
        core.begin_step(each.phase, 0.0)
        decoding = each.phase is Phase.DECODE
        for layer in each.layers:
            choice, experts = _chosen(precision, layer, decoding, inventory.layers[layer.index].num_experts)
            keep = None if decoding else set(layer.last.tolist())
            _serve(core, Demand(core, layer.index, experts, keep, high=choice.high))
    loaded = core.metrics.snapshot()
    return Loaded(*(int(loaded.total("bytes_read", phase)) for phase in (Phase.PREFILL, Phase.DECODE)))


def _chosen(precision: Precision, layer: Layer, decoding: bool, experts: int) -> tuple[Choice, list[int]]:
    """What the layer needs, and the ascending ids of its experts that real tokens demand."""
    hitters = None if decoding else np.ones(len(layer.routing), bool)
    choice = precision.at_layer(layer.index, decoding, layer.routing, layer.weights, hitters, layer.sequence, layer.real)
    routing = choice.routing if layer.real is None else choice.routing[layer.real]
    return choice, np.unique(routing[(routing >= 0) & (routing < experts)]).tolist()


def _serve(core: Residency, demand: Demand) -> None:
    """Compute what is there, and copy only where nothing is."""
    demand.open(0.0)
    while demand.todo:
        if group := demand.next_group(in_order=False):
            demand.computed(group)
            continue
        waiting = demand.awaited(in_order=False) or demand.any_copies()
        while waiting and not any(ticket.done for ticket in waiting):
            ticket = core.queue.popleft()
            ticket.done, ticket.moved = True, Moved(core.tables[ticket.geometry].pool.bytes_of(ticket.slab))
            core.ended(ticket)
        demand.waited(0.0)
    demand.close(0.0)
