"""What a recorded trace would have met under `hotness` and `importance`: without a byte moved.

Under `hotness`, which experts would have been in the better format, and what moved for it; under `importance`, what would have
been loaded for any number of slabs of each format. The controller and the residency core are those that serve
(`precision/controller.py`, `paging/residency.py`), over slabs that hold nothing. In these replays copies take no time, as with
`deterministic=True`: those of `hotness` serve from the next pass on. `decided` gives the demands to a replay with a clock, too.
Routing is what was recorded: what a lossy format would have changed in it is not seen. Traces say nothing about attention, so
every token of a prompt is a heavy hitter.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vismoe.precision.controller import Precision
from vismoe.precision.policy import Policy
from vismoe.simulate.demands import Conditions, Moves, RecordedDemand, Routing
from vismoe.simulate.virtual_pager import TwoFormats, VirtualPager
from vismoe.types import HIGH, ExpertId, ExpertInventory, Phase

UNTIMED = Conditions(streams=False)


@dataclass(frozen=True)
class Layer:
    """What a MoE layer's router chose for the T tokens that reached it."""

    index: int
    routing: np.ndarray  # int64 [T, K]
    weights: np.ndarray  # float32 [T, K]
    real: np.ndarray | None  # bool [T]; None: all
    sequence: np.ndarray | None  # int64 [T]; None: one
    last: np.ndarray  # int64: the experts of each sequence's last token


@dataclass(frozen=True)
class Pass:
    """One forward pass of a trace."""

    request: str
    phase: Phase
    tokens: int  # real ones
    layers: tuple[Layer, ...]
    computed: np.ndarray  # int64 [n]: layer * E + expert of each computation of a real token; E: of the layer that has most


def read(trace: Routing) -> list[Pass]:
    """The passes of a trace, in order."""
    experts = [layer.num_experts for layer in trace.inventory.layers]
    found = []
    for step in trace:
        layers, computed = [], [np.empty(0, np.int64)]
        for routing in step.layers:
            real, ids = step.real(routing), routing.expert_ids.astype(np.int64)
            chosen = ids[real]
            computed.append(chosen[(chosen >= 0) & (chosen < experts[routing.layer])] + routing.layer * max(experts))
            tokens = np.arange(step.kinds.size) if routing.kept is None else routing.kept
            sequence = None if len(step.kinds) == 1 else tokens // step.kinds.shape[1]
            last = step.demand(routing, experts[routing.layer])[2]
            weights = routing.weights.astype(np.float32)
            layers.append(Layer(routing.layer, ids, weights, None if real.all() else real, sequence, last))
        reached = max((len(each.routing) if each.real is None else int(each.real.sum()) for each in layers), default=0)
        found.append(Pass(step.request, step.phase, reached, tuple(layers), np.concatenate(computed)))
    return found


# -- hotness
@dataclass(frozen=True)
class Update:
    """What the controller decided after a pass."""

    after: int  # the pass
    promote: tuple[ExpertId, ...]
    demote: tuple[ExpertId, ...]


@dataclass(frozen=True)
class HotnessReplay:
    """Figures of every pass, arrays `[N]`, and all updates."""

    decoding: np.ndarray  # bool
    tokens: np.ndarray
    computed: np.ndarray  # expert computations
    high: np.ndarray  # of those in the better format
    moved_bytes: np.ndarray  # copies that arrived after it
    updates: list[Update]

    def share(self, decoding: bool | None = None, passes: slice = slice(None)) -> float:
        """Share of the expert computations in the better format, of all passes or those of one phase."""
        chosen = np.zeros(len(self.tokens), bool)
        chosen[passes] = True
        if decoding is not None:
            chosen &= self.decoding == decoding
        return float(self.high[chosen].sum() / max(1, self.computed[chosen].sum()))

    @property
    def swaps_per_1000_tokens(self) -> float:
        """Promotions, those of the first update left out: they fill the pool."""
        return 1000 * sum(len(update.promote) for update in self.updates[1:]) / max(1, int(self.tokens.sum()))


def replay_hotness(
    passes: Iterable[Pass],
    inventory: ExpertInventory,
    policy: Policy,
    quotas: np.ndarray,
    *,
    transient: int = 2,
    controller: type[Precision] = Precision,
) -> HotnessReplay:
    """Replays passes under a policy with hotness; quotas int `[L]`: how many experts may be hot. `inventory` has a second format.

    controller: what decides; transient: slabs of the better format beyond the quotas, in each geometry.
    """
    precision = controller(policy, [layer.num_experts for layer in inventory.layers], quotas)
    formats = _Formats(inventory, policy, quotas, transient)
    rows, updates = list[tuple[int, ...]](), list[Update]()
    for number, each in enumerate(passes):
        served = int(formats.high.ravel()[each.computed].sum())
        for layer in each.layers:
            precision.at_layer(layer.index, each.phase is Phase.DECODE, layer.routing, layer.weights, real=layer.real)
        moved_bytes = 0
        moves = precision.end_step(each.tokens)
        if moves is not None:
            updates.append(Update(number, tuple(moves.promote), tuple(moves.demote)))
            moved_bytes = formats.move(precision.targets, updates[-1])
        rows.append((each.phase is Phase.DECODE, each.tokens, len(each.computed), served, moved_bytes))
    decoding, tokens, computed, high, copied = np.array(rows, np.int64).reshape(-1, 5).T
    return HotnessReplay(decoding.astype(bool), tokens, computed, high, copied, updates)


class _Formats:
    """The format of every expert, `high` bool `[L, E]`, and the transitions between two of them."""

    def __init__(self, inventory: ExpertInventory, policy: Policy, quotas: np.ndarray, transient: int):
        self.high = hot_at_first(inventory, quotas)
        hot = [sum(int(quotas[layer.index]) for layer in inventory.layers_of(g)) for g in range(len(inventory.layouts))]
        experts = [sum(layer.num_experts for layer in inventory.layers_of(g)) for g in range(len(inventory.layouts))]
        formats = TwoFormats(policy, tuple(n - h for n, h in zip(experts, hot, strict=True)), self.high)
        self._core = VirtualPager(inventory, tuple(h + transient for h in hot), "lfu", UNTIMED, formats).core

    def move(self, targets: np.ndarray, update: Update) -> int:
        """Make the transitions that an update asks for. -> the bytes copied."""
        self._core.retarget(targets, update.promote, update.demote)
        moved_bytes = 0
        while (ticket := self._core.next_copy()) is not None:
            self._core.ended(ticket)
            pool = self._core.tables[ticket.geometry].pool
            moved_bytes += pool.bytes_of(ticket.slab)
            self.high[ticket.expert] = pool.precision_of(ticket.slab) == HIGH
        return moved_bytes


def hot_at_first(inventory: ExpertInventory, quotas: np.ndarray) -> np.ndarray:
    """bool `[L, E]`: which experts begin in the better format, where nothing is known of them: as many as quotas int `[L]`."""
    return np.arange(max(layer.num_experts for layer in inventory.layers)) < quotas[:, None]


def best_static(passes: Sequence[Pass], quotas: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(computations in the better format, all computations), int64 `[2]`: in prompts and in decoding, with the one set of experts
    that would have served most of them had the future been known. quotas int `[L]`; most: experts of the layer that has most."""
    counts = np.zeros((2, len(quotas), most), np.int64)
    for phase, row in ((Phase.PREFILL, 0), (Phase.DECODE, 1)):
        its = [each.computed for each in passes if each.phase is phase]
        if its:
            counts[row] = np.bincount(np.concatenate(its), minlength=counts[row].size).reshape(counts[row].shape)
    order = np.argsort(-counts.sum(axis=0), axis=1, kind="stable")
    ranked = np.take_along_axis(counts, order[None], axis=2)
    return np.where(np.arange(most) < quotas[:, None], ranked, 0).sum(axis=(1, 2)), counts.sum(axis=(1, 2))


# -- importance
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
    pager = VirtualPager(inventory, tuple(high_slabs), "lfu", UNTIMED, TwoFormats(policy, tuple(low_slabs)))
    for demand in decided(passes, inventory, precision):
        pager.run(demand)
    loaded = pager.metrics.snapshot()
    return Loaded(*(int(loaded.total("bytes_read", phase)) for phase in (Phase.PREFILL, Phase.DECODE)))


# -- both
def decided(passes: Iterable[Pass], inventory: ExpertInventory, precision: Precision) -> Iterator[RecordedDemand]:
    """What passes demand under a policy, and in which format. All follows from the routing, whatever is resident."""
    request, name, moves = 0, None, None
    for number, each in enumerate(passes):
        request += name is not None and each.request != name
        name, decoding = each.request, each.phase is Phase.DECODE
        for layer in each.layers:
            hitters = None if decoding else np.ones(len(layer.routing), bool)
            told = layer.weights, hitters, layer.sequence, layer.real
            choice = precision.at_layer(layer.index, decoding, layer.routing, *told)
            routing = choice.routing if layer.real is None else choice.routing[layer.real]
            experts = inventory.layers[layer.index].num_experts
            tokens = np.bincount(routing[(routing >= 0) & (routing < experts)], minlength=experts)
            demanded = np.flatnonzero(tokens)
            high = choice.high.copy() if choice.high is not None else None  # targets change
            if high is not None:
                high[list(choice.upgrades)] = True
            last = demanded if decoding else layer.last
            yield RecordedDemand(
                number, request, each.phase, layer.index, demanded, tokens[demanded], last, None, high, choice.upgrades, moves,
                len(layer.routing) if layer.real is None else int(layer.real.sum()),
            )  # fmt: skip
            moves = None
        update = precision.end_step(each.tokens)
        if update is not None:
            moves = Moves(precision.targets.copy(), tuple(update.promote), tuple(update.demote))
