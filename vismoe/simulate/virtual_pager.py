"""The residency core in virtual time, over slabs that hold nothing.

What is lent, copied and evicted is decided by the core that the pager drives (paging/residency.py, paging/demand.py). What is
simpler here is time: one link that carries demands before guesses and finishes what it began, and a layer that computes when its
last expert has arrived, so copies do not overlap with the computing of their own layer (unless `overlaps`, in decode): first its
experts one by one, as long as the tokens take, then a fixed time for the rest of a decoder layer. What the CPU computes below the
device takes as long as its rates say, beside the link. Without a link rate copies take no time. A pass that drafts a token takes
a given time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vismoe.errors import ConfigError
from vismoe.paging.demand import Demand
from vismoe.paging.lent import Group
from vismoe.paging.miss import Rates, Upgrades, Ways
from vismoe.paging.residency import Residency
from vismoe.paging.tickets import Moved, Ticket
from vismoe.pools.pool import SlabPool
from vismoe.precision.policy import Policy
from vismoe.simulate.demands import Conditions, RecordedDemand
from vismoe.trace.steps import Routed
from vismoe.types import HIGH, LOW, ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout


class _AllInHostMemory:
    """A tier below the device that holds every record."""

    def __init__(self, layouts: Iterable[RecordLayout]):
        self.pools = tuple(SlabPool(layout, 1, aliased=True) for layout in layouts)

    def has(self, experts: Iterable[ExpertId]) -> list[bool]:
        return [True for _ in experts]

    def hold(self, experts: Iterable[ExpertId]) -> dict[ExpertId, int]:
        return dict.fromkeys(experts, 0)

    def let_go(self) -> None: ...

    def places_for_good(self, geometry: int, experts: np.ndarray) -> np.ndarray | None:
        return np.zeros(len(experts), np.int64)


@dataclass(frozen=True)
class TwoFormats:
    """What a policy needs that moves experts between two formats; `inventory.low_layouts` are those of the second one."""

    policy: Policy
    low_slabs: tuple[int, ...]  # of the second format, by geometry
    high: np.ndarray | None = None  # bool [L, E]: hotness has every expert resident, and begins with these in the first format
    rates: Rates | None = None  # which decide only where hotness and importance are combined

    def upgrades(self, geometries: int) -> Upgrades:
        return Upgrades(self.policy, (self.rates or Rates(1.0, 1.0),) * geometries)


class VirtualPager:
    """Feed it demands in order with `run` and `run_round`, then `end_request`; figures are in `metrics` and `now_s`."""

    def __init__(
        self,
        inventory: ExpertInventory,
        slabs: tuple[int, ...],
        order: str,
        conditions: Conditions,
        formats: TwoFormats | None = None,
    ):
        self.inventory, self.conditions = inventory, conditions
        rates, ways = conditions.rates(), None
        if rates is not None and conditions.misses != "wait":
            ways = Ways(conditions.misses, (rates,) * len(inventory.layouts))
        kinds = [(inventory.layouts, slabs)]
        if formats is not None:
            kinds.append((inventory.low_layouts, formats.low_slabs))
        pools = [[SlabPool(layout, n, aliased=True) for layout, n in zip(*kind, strict=True)] for kind in kinds]
        self.core = Residency(
            inventory,
            list(zip(*pools, strict=True)),
            order=order,
            window=conditions.window,
            ways=ways,
            hosts=[_AllInHostMemory(layouts) for layouts, _ in kinds] if ways is not None else [],
            upgrades=formats.upgrades(len(inventory.layouts)) if formats is not None else None,
            may_stream=conditions.streams,
        )
        self.tables, self.metrics = self.core.tables, self.core.metrics
        self.now_s = self._step_began_s = self._step_ended_s = self._link_idle_at_s = 0.0
        self.computed_bytes = 0  # of the experts that the device computed
        self._s_per_byte = 1 / conditions.link_bytes_per_s if conditions.link_bytes_per_s else 0.0
        self._on_link: Ticket | None = None  # until the link is idle
        self._last: RecordedDemand | None = None
        for layer in inventory.layers[: conditions.pinned_layers]:
            self._pin(layer)
        if formats is not None and formats.high is not None:
            self._bring_in(formats.high)

    def run(self, recorded: RecordedDemand) -> None:
        """One MoE layer of one step: serve the demand, refresh the lookahead, compute while the link prefetches."""
        self._go_on_to(recorded)
        if self._last is None or recorded.step != self._last.step:
            self._begin_step(recorded)
        self._last, began_s, in_order = recorded, self.now_s, recorded.phase is not Phase.DECODE
        keep = set(recorded.last.tolist()) if in_order else None
        demand = Demand(
            self.core, recorded.layer, recorded.experts.tolist(), keep, tokens=recorded.tokens.tolist(), high=recorded.high,
            first=recorded.first, ways=self.core.ways,
        )  # fmt: skip
        demand.open(began_s)
        come = () if in_order else {*demand.absent, *demand.tickets}  # and are computed after what is here
        asked_s = self._look_ahead(recorded)
        cpu_s = demand.host_compute.seconds() if demand.host_compute is not None else 0.0
        tokens_s = self._tokens(recorded) * self.conditions.compute_s_per_token
        expert_s = (tokens_s + int(recorded.tokens.sum()) * self.conditions.compute_s_per_choice) / max(1, len(demand.todo))
        if self.conditions.overlaps and come:
            self._compute_here(demand, come, expert_s)
        while demand.absent:  # larger than the pool, or streaming: slabs are taken again as soon as they are computed
            group = demand.next_group(in_order)
            if seconds := sum(self._seconds(one, expert_s) for one in group.one_by_one()):
                if self.conditions.overlaps:
                    self._use_link_until(self.now_s + seconds)
                else:
                    self.now_s += seconds
            if group:
                self._computed(demand, group)
            else:
                self._wait(demand, in_order, began_s + cpu_s)
        while demand.tickets:
            self._wait(demand, in_order, began_s + cpu_s)
        self._use_link_until(began_s + cpu_s)
        self.now_s = max(self.now_s, began_s + asked_s)  # asked while copies were under way
        self._compute(demand, in_order, come, expert_s)
        self._use_link_until(self.now_s + self.conditions.compute_s_per_layer)
        demand.close(self.now_s)
        self._step_ended_s = self.now_s
        self.metrics.add("compute_seconds", recorded.phase, recorded.layer, cpu_s)
        self.metrics.add("layer_seconds", recorded.phase, recorded.layer, self.now_s - began_s)

    def run_round(
        self, drafts: Sequence[Sequence[Routed]], draft_s: float, verified: Sequence[RecordedDemand], promises: bool = True
    ) -> int:
        """A round: draft passes of `draft_s` seconds each, which route a token at every layer, then the pass that verifies.
        Without `promises` drafts only take their time. Returns how many layers that verify found all experts resident."""
        self._go_on_to(verified[0])
        if promises:
            self.core.begin_drafting()
        for layers in drafts:
            for layer, (experts, weights) in enumerate(layers):
                self.core.promise(layer, experts, weights)
                self._use_link_until(self.now_s + draft_s / len(layers))
        self.core.begin_verifying()
        covered = 0
        for demand in verified:
            self.run(demand)
            covered += not self.core.misses_this_layer
        self.core.end_drafting()
        return covered

    def end_request(self) -> None:
        """Guesses that were not used by now were wasted; what is resident stays."""
        self._land()
        self.core.end_request()

    def _go_on_to(self, recorded: RecordedDemand) -> None:
        if self._last is not None and recorded.request != self._last.request:
            self.end_request()
            self._last = None

    def _begin_step(self, first: RecordedDemand) -> None:
        if first.moves is not None:
            self.core.retarget(first.moves.high, first.moves.promote, first.moves.demote)
        self.core.begin_step(first.phase, self._step_ended_s - self._step_began_s, int(self._tokens(first)))
        self._step_began_s = self.now_s
        if self.conditions.prefetch_bytes_per_step is not None:
            self.core.ledger.allowance_bytes = self.conditions.prefetch_bytes_per_step

    def _tokens(self, recorded: RecordedDemand) -> float:
        """Real tokens of a layer."""
        if recorded.reached is not None:
            return recorded.reached
        return int(recorded.tokens.sum()) / self.inventory.layers[recorded.layer].top_k

    def _pin(self, layer: MoELayer) -> None:
        """Every expert of the layer is here from the start; not counted."""
        pool = self.core.table_of[layer.index].pool
        for expert in range(layer.num_experts):
            slab = pool.take()
            if slab is None or pool.free < 2:
                raise ConfigError(
                    f"{self.conditions.pinned_layers} pinned layers leave less than two of {pool.capacity} slabs; "
                    "pin fewer layers, or give more slots"
                )
            self.core.place(ExpertId(layer.index, expert), slab, pinned=True)

    def _bring_in(self, high: np.ndarray) -> None:
        """Every expert is here from the start, in the format that `high` bool `[L, E]` says, as far as there are slabs of it."""
        self.core.transitions.begin(high)
        for table in self.tables:
            for expert in table.id_of:
                wanted = (HIGH, LOW) if high[expert] else (LOW, HIGH)
                slab = next(slab for precision in wanted if (slab := table.pool.take(precision)) is not None)
                self.core.place(expert, slab)

    def _look_ahead(self, recorded: RecordedDemand) -> float:
        """Recorded scores become priorities and guesses; returns the seconds of asking. Off while nothing misses, and where
        nothing may be guessed."""
        core = self.core
        missing = core.misses_last_step or core.misses_this_step
        if recorded.scores is None or not (self.conditions.prefetch and missing and core.may_guess):
            return 0.0
        core.look_ahead(recorded.layer, recorded.scores.astype(np.float32))
        core.asked(self.conditions.lookahead_s)
        return self.conditions.lookahead_s

    def _wait(self, demand: Demand, in_order: bool, cpu_done_s: float) -> None:
        """Until a copy that the demand needs has arrived: the link finishes what it carries, then demands in their order."""
        waiting, began_s = demand.awaited(in_order) or demand.any_copies(), max(self.now_s, cpu_done_s)
        if not waiting:
            return
        self.now_s = max(self.now_s, self._link_idle_at_s)
        self._land()
        while not any(ticket.done for ticket in waiting):
            self._carry(self.core.queue.popleft())
            self.now_s = self._link_idle_at_s
            self._land()
        demand.waited(max(0.0, self.now_s - began_s))

    def _compute_here(self, demand: Demand, come: Collection[int], expert_s: float) -> None:
        """What does not have to `come`, while the link carries what was demanded."""
        on_host = demand.host_compute.experts if demand.host_compute is not None else ()
        here = [expert for expert in demand.todo if expert not in come and expert not in on_host]
        ones = [one for one in demand.next_group(False).one_by_one() if one.experts[0] in here] if here else []
        self._use_link_until(self.now_s + sum(self._seconds(one, expert_s) for one in ones))
        for one in ones:
            self._computed(demand, one)

    def _compute(self, demand: Demand, in_order: bool, come: Collection[int], expert_s: float) -> None:
        """Those that are on the device: in decode what was here in one call, and what had to `come` one by one after it,
        otherwise all one by one; the link is free meanwhile."""
        while demand.todo:
            ones = sorted(demand.next_group(in_order).one_by_one(), key=lambda one: one.experts[0] in come)
            here = () if in_order else [one for one in ones if not one.on_host and one.experts[0] not in come]
            self._use_link_until(self.now_s + sum(self._seconds(one, expert_s) for one in here))
            for one in ones:
                if not one.on_host and one not in here:
                    self._use_link_until(self.now_s + self._seconds(one, expert_s))
                self._computed(demand, one)

    def _seconds(self, one: Group, expert_s: float) -> float:
        """Of computing an expert on the device, whose tokens take `expert_s` beside what reading it takes."""
        rate = self.conditions.weights_bytes_per_s
        if one.on_host:
            return 0.0
        return expert_s + (one.nbytes / rate if rate is not None else 0.0)

    def _computed(self, demand: Demand, group: Group) -> None:
        self.computed_bytes += 0 if group.on_host else group.nbytes
        demand.computed(group)

    # -- the link
    def _use_link_until(self, end_s: float) -> None:
        """Time passes; whenever the link is idle, it carries what is worth most of all that nothing has demanded."""
        while self._link_idle_at_s < end_s:
            self._land()
            ticket = self.core.next_copy()
            if ticket is None:
                break
            self._carry(ticket)
        self.now_s = max(self.now_s, end_s)
        if self._link_idle_at_s <= self.now_s:
            self._land()

    def _carry(self, ticket: Ticket) -> None:
        """The link begins to copy."""
        self._on_link = ticket
        ticket.moved = Moved(disk_bytes=self.tables[ticket.geometry].pool.bytes_of(ticket.slab))
        ticket.began_s = max(self._link_idle_at_s, self.now_s)
        self._link_idle_at_s = ticket.began_s + ticket.moved.disk_bytes * self._s_per_byte

    def _land(self) -> None:
        """What is on the link, if anything, has arrived."""
        if self._on_link is not None:
            ticket, self._on_link = self._on_link, None
            ticket.done, ticket.ended_s = True, self._link_idle_at_s
            self.core.ended(ticket)


class TieredPager(VirtualPager):
    """The virtual pager above a host tier that may lack experts: LRU, and the device's experts are in it (pools/host_tier.py).

    host: records of each format that it holds.
    """

    def __init__(
        self,
        inventory: ExpertInventory,
        slabs: tuple[int, ...],
        order: str,
        conditions: Conditions,
        host: Sequence[int],
        disk_s_per_byte: float,
        formats: TwoFormats | None = None,
    ):
        super().__init__(inventory, slabs, order, conditions, formats)
        everyone = [ExpertId(layer.index, e) for layer in inventory.layers for e in range(layer.num_experts)]
        self._host = [OrderedDict.fromkeys(everyone[:records]) for records in host]
        self._records, self._disk_s_per_byte, self.disk_bytes = host, disk_s_per_byte, 0

    def _carry(self, ticket: Ticket) -> None:
        super()._carry(ticket)
        precision = self.tables[ticket.geometry].pool.precision_of(ticket.slab)
        nbytes, host = ticket.moved.disk_bytes, self._host[precision]
        there = ticket.expert in host
        host[ticket.expert] = None
        host.move_to_end(ticket.expert)
        if not there:
            self.disk_bytes += nbytes
            self._link_idle_at_s = ticket.began_s + nbytes * max(self._s_per_byte, self._disk_s_per_byte)
            if len(host) > self._records[precision]:
                host.popitem(last=False)
