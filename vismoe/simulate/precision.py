"""Which experts a recorded trace would have found in the better format under `hotness`, and what moved for it: in virtual time.

The controller, page tables and order of transitions are those that serve (`precision/controller.py`, `paging/transitions.py`),
over slabs that hold nothing. What is simpler is time: one link carries one copy after the other, passes take as long as is given,
and what has arrived serves from the next pass on. Without a link rate copies take no time, as with `deterministic=True`. Routing
is what was recorded: what a lossy format would have changed in it is not seen.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vismoe.memory.pool import SlabPool
from vismoe.metrics import Metrics
from vismoe.paging.page_table import PageTable
from vismoe.paging.transfer import Ticket
from vismoe.paging.transitions import Transitions
from vismoe.precision.controller import Precision
from vismoe.precision.policy import Policy
from vismoe.precision.schedule import Schedule
from vismoe.simulate.demands import Routing
from vismoe.types import HIGH, LOW, ExpertId, ExpertInventory, Phase

__all__ = ["Forecast", "HotnessReplay", "Pass", "Update", "best_static", "read", "replay_hotness"]

Forecast = Callable[[Precision, Schedule], Sequence[ExpertId]]  # after an update: who is likely to be promoted by the next one


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
    likely: tuple[ExpertId, ...]  # who the forecast says the next update will promote


@dataclass(frozen=True)
class HotnessReplay:
    """Figures of every pass, arrays `[N]`, and all updates."""

    decoding: np.ndarray  # bool
    tokens: np.ndarray
    computed: np.ndarray  # expert computations
    high: np.ndarray  # of those in the better format
    moved_bytes: np.ndarray  # copies that arrived after it
    updates: list[Update]
    waited_tokens: list[float] = field(default_factory=list)  # of each promotion: from the decision until the copy serves
    ready: int = 0  # promotions whose copy lay ready already
    ahead: int = 0  # copies that were begun before anybody was promoted

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

    @property
    def bytes_per_token(self) -> float:
        return float(self.moved_bytes.sum() / max(1, self.tokens.sum()))


def replay_hotness(
    passes: Iterable[Pass],
    inventory: ExpertInventory,
    policy: Policy,
    quotas: np.ndarray,
    *,
    transient: int = 2,
    controller: type[Precision] = Precision,
    forecast: Forecast | None = None,
    link_bytes_per_s: float | None = None,
    compute_s_per_layer: float = 0.0,
    compute_s_per_token: float = 0.0,
) -> HotnessReplay:
    """Replays passes under a policy with hotness; quotas int `[L]`: how many experts may be hot. `inventory` has a second format.

    controller: who decides; transient: slabs of the better format beyond the quotas, in each geometry; forecast: None makes no
    copies ahead. A pass takes, for each layer, compute_s_per_layer and compute_s_per_token for each of its tokens.
    """
    precision = controller(policy, [layer.num_experts for layer in inventory.layers], quotas)
    link = _Link(inventory, quotas, transient, link_bytes_per_s)
    rows, updates, now_s, clock_tokens = list[tuple[int, ...]](), list[Update](), 0.0, 0
    for number, each in enumerate(passes):
        served = int(link.high.ravel()[each.computed].sum())
        for layer in each.layers:
            precision.at_layer(layer.index, each.phase is Phase.DECODE, layer.routing, layer.weights, real=layer.real)
        now_s += len(each.layers) * (compute_s_per_layer + each.tokens * compute_s_per_token)
        clock_tokens += each.tokens
        link.run_until(now_s, clock_tokens)
        moves = precision.end_step(each.tokens)
        if moves is not None:
            likely = () if forecast is None else tuple(forecast(precision, moves))
            updates.append(Update(number, tuple(moves.promote), tuple(moves.demote), likely))
            link.retarget(precision.targets, updates[-1], clock_tokens)
            link.run_until(now_s, clock_tokens)
        rows.append((each.phase is Phase.DECODE, each.tokens, len(each.computed), served, link.take_moved_bytes()))
    decoding, tokens, computed, high, moved_bytes = np.array(rows, np.int64).reshape(-1, 5).T
    waited, ready, ahead = link.waited_tokens, link.ready, link.ahead
    return HotnessReplay(decoding.astype(bool), tokens, computed, high, moved_bytes, updates, waited, ready, ahead)


class _Link:
    """Transitions between two formats over one link that carries one copy after the other. `high` bool `[L, E]`: who is where."""

    def __init__(self, inventory: ExpertInventory, quotas: np.ndarray, transient: int, bytes_per_s: float | None):
        most = max(layer.num_experts for layer in inventory.layers)
        self.high = np.arange(most) < quotas[:, None]
        self.waited_tokens, self.ready, self.ahead = list[float](), 0, 0
        tables = [_table(inventory, geometry, quotas, transient) for geometry in range(len(inventory.layouts))]
        self._table_of = [tables[layer.geometry] for layer in inventory.layers]
        self._inventory = inventory
        self._transitions = Transitions(self._table_of, Metrics(len(inventory.layers), most))
        self._transitions.begin(self.high)
        for table in tables:
            for flat, expert in enumerate(table.id_of):
                slab = table.pool.take(HIGH if self.high[expert] else LOW)
                assert slab is not None
                table.begin_load(flat, slab)
                table.end_load(flat, succeeded=True)
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._carried: Ticket | None = None
        self._idle_at_s, self._moved_bytes = 0.0, 0
        self._asked_tokens: dict[ExpertId, int] = {}  # when a promotion that is not there yet was decided
        self._guess: ExpertId | None = None

    def retarget(self, targets: np.ndarray, update: Update, clock_tokens: int) -> None:
        """The controller's decisions of this moment."""
        self._asked_tokens = {e: t for e, t in self._asked_tokens.items() if targets[e]}
        self._asked_tokens |= {expert: clock_tokens for expert in update.promote if not self.high[expert]}
        guess, self._guess = self._guess, None
        self._transitions.retarget(targets, update.promote, update.demote, update.likely, Phase.DECODE)
        if guess is not None and self._look(guess, clock_tokens):
            self.ready += 1

    def run_until(self, now_s: float, clock_tokens: int) -> None:
        """Whenever the link is idle before `now_s`, it carries who moves next."""
        while True:
            if self._carried is not None:
                if self._idle_at_s > now_s:
                    return
                self._arrive(self._carried, clock_tokens)
            found = self._transitions.next()
            if found is None:
                self._carried = None
                self._idle_at_s = max(self._idle_at_s, now_s)
                return
            expert, slab, is_guess = found
            table = self._table_of[expert.layer]
            table.begin_load(table.flat(expert), slab, borrowed=is_guess)
            if is_guess:
                self._guess, self.ahead = expert, self.ahead + 1
            self._carried = Ticket(expert, self._inventory.layers[expert.layer].geometry, slab, transition=True)
            self._idle_at_s += table.pool.bytes_of(slab) * self._s_per_byte

    def take_moved_bytes(self) -> int:
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    def _arrive(self, ticket: Ticket, clock_tokens: int) -> None:
        table = self._table_of[ticket.expert.layer]
        self._moved_bytes += table.pool.bytes_of(ticket.slab)
        table.end_load(table.flat(ticket.expert), succeeded=True)
        self._transitions.ended(ticket, Phase.DECODE)
        self._look(ticket.expert, clock_tokens)

    def _look(self, expert: ExpertId, clock_tokens: int) -> bool:
        """Which format it is in now; whether that ended the wait of a promotion."""
        table = self._table_of[expert.layer]
        self.high[expert] = table.there_in(table.flat(expert), HIGH)
        asked = self._asked_tokens.pop(expert, None) if self.high[expert] else None
        if asked is not None:
            self.waited_tokens.append(clock_tokens - asked)
        return asked is not None


def _table(inventory: ExpertInventory, geometry: int, quotas: np.ndarray, transient: int) -> PageTable:
    """With a slab for every expert, and the transient ones."""
    layers = inventory.layers_of(geometry)
    hot = sum(int(quotas[layer.index]) for layer in layers)
    slabs = (hot + transient, sum(layer.num_experts for layer in layers) - hot)
    layouts = (inventory.layouts[geometry], inventory.low_layouts[geometry])
    return PageTable(layers, [SlabPool(layout, n, aliased=True) for layout, n in zip(layouts, slabs)], "lfu")


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
