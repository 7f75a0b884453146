"""The pager: brings the experts that a layer demands into slabs, lends them out one at a time, and fetches ahead under a cap.

It is the residency core (residency.py, demand.py), which decides, behind one lock (changes.py), with worker threads that copy
(transfer.py). One thread at a time runs the model and makes demands. Nothing here allocates tensors.
"""

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from vismoe.errors import BusyError
from vismoe.kernels.read import wait_for_reading
from vismoe.locks import RunningCall, under
from vismoe.paging import at_once
from vismoe.paging.changes import whole
from vismoe.paging.demand import Demand
from vismoe.paging.lent import Computation, Group
from vismoe.paging.page_table import PageTable
from vismoe.paging.residency import Residency
from vismoe.paging.tickets import Ticket, arrivals_of
from vismoe.paging.transfer import Mover, Transfer
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.timeline import COMPUTE, Timeline
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase

REST_S = 1.0  # for which passes that find all their experts let threads of low priority leave the cores to requests
Given = ParamSpec("Given")
Made = TypeVar("Made")
Computed = tuple[Any, Sequence[int]]  # a layer's result, and the experts that it wanted


class Use(NamedTuple):
    """What a use of an expert counts, and when it is."""

    weight: float
    tick: int


def _in_core(event: Callable[Concatenate[Residency, Given], None]) -> Callable[Concatenate["Pager", Given], None]:
    """An event of the core, in one change."""

    @functools.wraps(event)
    def made(pager: "Pager", *given: Given.args, **named: Given.kwargs) -> None:
        pager.changes.make(event, pager.core, *given, **named)

    return made


class Pager:
    """The experts of one model, lent to the thread that runs it.

    `options` are those of `Residency`, but for its hosts, which are the mover's. `pinned_layers`: how many leading MoE layers
    `pin_prefix` brings in for good. `threads`: that copy.
    """

    def __init__(
        self,
        inventory: ExpertInventory,
        pools: Sequence[SlabPool | Sequence[SlabPool]],
        mover: Mover,
        *,
        pinned_layers: int = 0,
        threads: int = 2,
        **options: Any,
    ):
        self.inventory, self.pinned_layers = inventory, pinned_layers
        self.hosts: Sequence[HostTier] = mover.hosts
        in_flight = threads + 2 if threads else 0  # with the thread that waits, which copies too, and what is being computed
        self.core = Residency(inventory, pools, hosts=mover.hosts, in_flight=in_flight, **options)
        self.window, self.ways = self.core.window, self.core.ways_of_demands
        self.metrics, self.tables = self.core.metrics, self.core.tables
        self.timeline: Timeline | None = None  # attach one to see copies, computation and stalls
        self._step_began_s = self._step_ended_s = 0.0
        self._found_all = False  # the pass before the running one missed no expert
        self._serving: RunningCall | None = None  # the call that has a demand open
        self.transfer = Transfer(mover, self.core, threads, self._finished, self.repair)
        self.core.link = self.transfer
        self.changes = self.transfer.changes
        self.lock = self.changes.lock

    asked, look_ahead, fill = _in_core(Residency.asked), _in_core(Residency.look_ahead), _in_core(Residency.fill)
    end_request, check_integrity = _in_core(Residency.end_request), _in_core(Residency.check_integrity)
    # a round of drafted tokens (promises.py); where `promises_why_not` says so, these do nothing
    promise, begin_verifying = _in_core(Residency.promise), _in_core(Residency.begin_verifying)
    end_drafting = _in_core(Residency.end_drafting)

    # -- what the model's thread calls
    @whole
    def begin_step(self, phase: Phase, new_sequence: bool = False, tokens: int = 1) -> None:
        """A forward pass over so many `tokens`, of a chunk or one of each row, begins; `new_sequence`: nothing is in its KV cache
        yet."""
        self.core.check_open()
        self._claim()
        if new_sequence:
            self.core.end_request()
        self._found_all = self.core.running_layer >= 0 and not self.core.misses_this_step
        self.core.begin_step(phase, self._step_ended_s - self._step_began_s, tokens)
        self.transfer.begin_pass()
        self._step_began_s = time.perf_counter()
        self._computed(self._step_began_s)

    @whole
    def begin_drafting(self) -> None:
        """A round begins: no layer runs until `begin_verifying`, and all threads copy what is promised meanwhile."""
        self.core.check_open()
        self._claim()
        self.core.begin_drafting()

    @property
    def promises_why_not(self) -> str | None:
        """Why nothing is promised to a round that begins now; None: it is."""
        return self.core.promises_why_not

    def demand(
        self,
        layer: int,
        experts: Sequence[int],
        keep: Collection[int] | None = None,
        counted: Collection[int] | None = None,
        tokens: Sequence[int] | None = None,
        high: np.ndarray | None = None,
        first: Sequence[int] = (),
        by_reading: bool = False,
    ) -> "Lease":
        """Borrow `experts` (ascending ids) of `layer` with `with`. A pass of several rows, of one request or of many, demands
        their union once: `counted` and `tokens` say what the rows asked for, and of which request a row is makes no difference.

        `keep`: None in decode; in prefill the experts that may enter the cache, while the others stream through a small ring. As
        long as slabs are free, those that most tokens chose may enter, too.
        `counted`: the experts that real tokens asked for (None: all); the rest is brought in but not counted.
        `tokens`: how many tokens chose each of `experts` (None: one).
        `high`: bool `[E]`, which are to be computed in the more precise format, where there are two (None: all).
        `first`: which shall have it first where not all can, the most important first.
        `by_reading`: the first group may have experts that are `coming`.
        """
        demand = Demand(self.core, layer, experts, keep, counted, tokens, high, first, self.ways, by_reading)
        return Lease(self, demand, layer)

    def without_demand(self, layers: Sequence[int], compute: Callable[[list[Use]], Sequence[Computed]]) -> Sequence[Computed]:
        """What `compute(uses)` returns, in one change: no copy is under way, and none can begin meanwhile. `compute` gets a use
        for each of these layers that it may compute, and counts the uses of their experts; it returns a result for each of them
        up to the first one of which an expert is missing.

        Fewer results than layers: the next one must `demand`.
        """
        return self.changes.make(self._without_demand, layers, compute)

    def _without_demand(self, layers: Sequence[int], compute: Callable[[list[Use]], Sequence[Computed]]) -> Sequence[Computed]:
        core = self.core
        several = layers[:1] if core.promises else layers  # keeping a promise begins a copy
        free = list(itertools.takewhile(core.nothing_comes, several))
        if not free:
            return ()
        self._claim()
        made = compute([Use(core.table_of[layer].use_weight, core.tick + 1 + i) for i, layer in enumerate(free)])
        for layer, (_, experts) in zip(free, made):
            core.hit(layer, experts)
            self._computed(time.perf_counter())
        return made

    def in_chain(
        self, layers: Sequence[int], of_tables: Sequence[int], compute: Callable[[list[float], int], tuple[Sequence[int], float]]
    ) -> Sequence[int]:
        """As `without_demand` for layers that follow one another, where it is enough to know how many experts each wanted.

        of_tables: one layer for each page table. `compute(weights, tick)` computes as many layers as it can, counts the uses of
        their experts by the weight of their table, in each layer a tick later, and returns how many experts each wanted, and when
        the last of these layers had ended.
        """
        return self.changes.make(self._in_chain, layers, of_tables, compute)

    def _in_chain(
        self, layers: Sequence[int], of_tables: Sequence[int], compute: Callable[[list[float], int], tuple[Sequence[int], float]]
    ) -> Sequence[int]:
        core = self.core
        if core.promises or not all(map(core.nothing_comes, of_tables)):
            return ()
        self._claim()
        wanted, ended_s = compute([core.table_of[layer].use_weight for layer in of_tables], core.tick + 1)
        if len(wanted):
            core.hits(layers, wanted)
            self._computed(ended_s)
        return wanted

    def asks_cpu(self, layer: int, experts: int) -> bool:
        """Whether `at_once` lets the CPU compute any of so many experts, if all are missing."""
        return at_once.asked(self.core, layer, experts) > 0

    def may_serve_at_once(self, layer: int, experts: int, by_cpu: bool = False) -> bool:
        """Whether `at_once` is worth a try: whether so many experts of a layer must not be demanded anyway. by_cpu: what computes
        them can also compute from host memory."""
        return self.timeline is None and at_once.fits(self.core, layer, experts, by_cpu)

    def at_once(self, layer: int, ids: np.ndarray, computation: Computation[Made], began_s: float) -> Made | None:
        """The result of a computation of all experts int64 `[n]` that one token wants of the layer, in one change; None, and
        nothing has changed, where they must be demanded. It raises no error of our own. began_s: when the experts function was
        called."""
        return self.changes.make(self._at_once, layer, ids, computation, began_s)

    def _at_once(self, layer: int, ids: np.ndarray, computation: Computation[Made], began_s: float) -> Made | None:
        core = self.core
        self._claim()
        try:
            step = at_once.take(core, layer, ids, computation.begin_on_host)
            if step is None:
                return None
            queued_s = time.perf_counter()
            computation.begin(Group(step.taken.experts, core.table_of[layer].pool, step.taken.slabs))
            at_once.computed(core, layer, step)
            made = computation.end()
        except BaseException:
            computation.abandon()
            raise
        if step.below is not None:
            at_once.computed_below(core, layer, step.below)
        ended_s = time.perf_counter()
        self.metrics.add("compute_seconds", core.phase, layer, ended_s - queued_s)
        self._count_layer(core.phase, layer, ended_s - began_s, len(ids), 0)
        self._computed(ended_s)
        return made

    @whole
    def start_with(self, found: Mapping[ExpertId, tuple[int, int]]) -> None:
        """These are there from the start: in a slab, and from which byte of its room on. Nothing else is yet."""
        for table in self.tables:
            there = {slab for expert, (slab, _) in found.items() if self.core.table_of[expert.layer] is table}
            table.pool.free_only([slab for slab in range(table.pool.capacity) if slab not in there])
        for expert, (slab, begin) in found.items():
            self.core.place(expert, slab, begin=begin)

    def pin_prefix(self) -> Iterator[ExpertId]:
        """Bring in every expert of the first `pinned_layers` MoE layers and keep them; yields each when it is there."""
        for layer in self.inventory.layers[: self.pinned_layers]:
            for expert in self._bring_in(layer, None):
                self.changes.make(self.core.pin, expert)
                yield expert
        self._step_ended_s = self._step_began_s  # bringing in the prefix is no step of the model

    def bring_in_all(self, high: np.ndarray) -> Iterator[ExpertId]:
        """Bring in every expert in one format or the other (high bool `[L, E]`), from where they only move between formats."""
        self.core.transitions.begin(high)
        for layer in self.inventory.layers:
            yield from self._bring_in(layer, high[layer.index])
        self._step_ended_s = self._step_began_s

    def _bring_in(self, layer: MoELayer, high: np.ndarray | None) -> Iterator[ExpertId]:
        demand = Demand(self.core, layer.index, range(layer.num_experts), counted=(), high=high)
        with Lease(self, demand, layer.index) as lease:
            for lent in itertools.chain.from_iterable(lease.groups(in_order=False)):
                yield ExpertId(layer.index, lent.expert)

    @whole
    def retarget(self, high: np.ndarray, promote: Sequence[ExpertId] = (), demote: Sequence[ExpertId] = ()) -> None:
        """From now on `high` bool `[L, E]` says which experts belong in the more precise format. Those named move first."""
        self._claim()
        self.core.retarget(high, promote, demote)

    def settle(self) -> None:
        """Make all transitions that can be made, and wait for them. Between passes, by the thread that runs the model."""
        self.changes.make(self.serve, RunningCall.of(sys._getframe()))
        while on_their_way := self._moving():
            self.transfer.wait_any(on_their_way)

    @whole
    def lend_memory(self, more: bool) -> int:
        """A slab for each layer gives its memory back, or (more=False) has it again -> bytes that slabs lack now. Between passes,
        by the thread that runs the model."""
        self._claim()
        self.core.release() if more else self.core.take_back()
        return self.core.released_bytes

    @whole
    def _moving(self) -> list[Ticket]:
        """What is on its way, with one more transition where one can be made; when that is nothing, moves are settled."""
        ticket = self.core.next_transition()
        if ticket is not None:
            self.core.submit(ticket)
        elif not self.core.tickets:
            self._serving = None
        return list(self.core.tickets.values())

    def layer_ended(self, phase: Phase, layer: int, began_s: float, tokens: int, choices: int = 0, skipped: int = 0) -> None:
        """The experts function of a layer has returned, or failed. `choices` (a token's of an expert), of which `skipped` were
        not computed; where slabs hold two formats, those that were are counted when they are."""
        ended_s = time.perf_counter()
        self.changes.make(self._count_layer, phase, layer, ended_s - began_s, choices, skipped)
        if self.timeline is not None:
            self.timeline.span("layers", f"layer {layer}", began_s, ended_s, tokens=tokens)

    def _count_layer(self, phase: Phase, layer: int, seconds: float, choices: int, skipped: int) -> None:
        self.metrics.add("layer_seconds", phase, layer, seconds)
        self.metrics.add("skipped", phase, layer, skipped)
        if self.core.table_of[layer].pool.precision is None:
            self.metrics.add("computed_high", phase, layer, choices - skipped)

    def addresses(self) -> list[np.ndarray] | None:
        """By geometry, where the records of all experts lie; None unless all are resident for good (residency.py)."""
        return under(self.lock, self.core.addresses)

    def residency(self) -> np.ndarray:
        """uint8 `[L, E]`: where each expert is (paging/page_table.py); layers with fewer experts than E end in NO_EXPERT."""
        return under(self.lock, self.core.of_all, PageTable.residency)

    def precisions(self) -> np.ndarray:
        """uint8 `[L, E]`: 0 absent, otherwise 1 + the precision that each expert is resident in; NO_EXPERT as in `residency`."""
        return under(self.lock, self.core.of_all, PageTable.precisions)

    def close(self) -> None:
        self.core.closed = True
        for host in self.hosts:
            host.close()
        self.transfer.close()

    @property
    def host(self) -> HostTier | None:
        """The tier below the device, where there is one and slabs hold one format."""
        return self.hosts[0] if self.hosts else None

    # -- which call may decide; in a change
    def _claim(self) -> None:
        """This thread runs the model now. A demand that was interrupted (Ctrl-C) is over, whichever thread's it was."""
        if self._serving is None:
            return
        if self._serving.thread != threading.get_ident() and not self._serving.ended:
            raise BusyError(
                "another thread is in the middle of a forward pass of this model; its experts serve one at a time. "
                "Fix: use Engine.chat, which queues requests, or put a lock around generate()"
            )
        self.repair()
        self._serving = None

    def serve(self, serving: RunningCall) -> None:
        """From now on that call decides about the slabs, until it is `served`."""
        self.core.check_open()
        self._claim()
        self._serving = serving

    def is_served(self, serving: RunningCall) -> bool:
        """Whether it is still this call that decides: one that was interrupted is over."""
        return self._serving is serving

    def served(self, now_s: float) -> None:
        self._serving = None
        self._computed(now_s)

    def _computed(self, ended_s: float) -> None:
        """The running pass has come so far. Once one has found all its experts, nothing takes cores from the next ones that could
        be done later, until an expert is missing; before that, experts and pages of the layers behind are on their way. On a
        device, copies take no core."""
        self._step_ended_s = ended_s
        rests = self._found_all and not self.core.misses_this_step
        for table in () if self.hosts else self.tables:
            table.pool.rest(ended_s + REST_S if rests else 0.0)

    def repair(self) -> None:
        """After an interrupt: keep what is certain. In whichever thread makes the next change."""
        self.transfer.wait_for_queued()  # into slabs that are free from now on, perhaps
        wait_for_reading([arrival for arrival in arrivals_of(self.core.tickets.values()) if arrival.has_begun])
        serving = self._serving  # its call still runs, perhaps, and native threads read for it
        over = serving is not None and (serving.thread == threading.get_ident() or serving.ended)
        interrupted = serving.thread if serving is not None and over else None
        in_flight = self.core.tickets.values()
        self.core.repair([ticket for ticket in in_flight if ticket.runner not in (None, interrupted) and not ticket.done])
        self.transfer.wake()

    def _finished(self, ticket: Ticket) -> None:
        if not self.core.ended(ticket):
            return
        if self.timeline is not None and ticket.began_s:
            self.timeline.span(
                ticket.lane or threading.current_thread().name,
                "prefetch" if ticket.speculative or ticket.fills else "copy",
                ticket.began_s,
                ticket.ended_s,
                layer=ticket.expert.layer,
                expert=ticket.expert.expert,
                bytes=ticket.moved.disk_bytes or ticket.moved.link_bytes,
            )


class Lease:
    """The experts of the running layer, lent out inside a `with`: what is here at once, what is missing as it arrives. Made by
    `Pager.demand`; used once. Which they are is the core's decision (demand.py)."""

    def __init__(self, pager: Pager, demand: Demand, layer: int):
        self._pager, self.demand, self._layer = pager, demand, layer
        self._compute_s = 0.0

    def __enter__(self) -> "Lease":
        self._serving = RunningCall.of(sys._getframe(1))
        self._pager.changes.make(self._open)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pager.changes.make(self._close, kind)
        del self._serving  # a frame that this lease is a local of: its tensors would live until the garbage collector comes

    def _open(self) -> None:
        self._pager.serve(self._serving)
        self.demand.open(time.perf_counter() if self._pager.core.tickets else 0.0)

    def _close(self, kind: type[BaseException] | None) -> None:
        """An interrupt (Ctrl-C) may have struck between any two steps: then state is repaired."""
        pager, core, now_s = self._pager, self._pager.core, time.perf_counter()
        if not pager.is_served(self._serving):
            return  # it was interrupted, and another thread has gone on
        if kind is not None and not issubclass(kind, Exception):
            pager.repair()
        else:
            self.demand.close(now_s)
        core.metrics.add("compute_seconds", core.phase, self._layer, self._compute_s)
        pager.served(now_s)

    @property
    def computes_on_host(self) -> bool:
        """Some of its misses will be lent from the host tier."""
        return self.demand.host_compute is not None and bool(self.demand.host_compute.experts)

    def groups(self, in_order: bool) -> Iterator[Group]:
        """What can be computed now, until every expert was; by ascending id if `in_order`, else by arrival.

        Weights and addresses are good until the next group is asked for. A group is never empty.
        """
        make, demand = self._pager.changes.make, self.demand
        geometry = self._pager.inventory.layers[self._layer].geometry
        if demand.reading:
            group = make(demand.with_coming)
            asked_s = time.perf_counter()
            yield group
            self._read(group, asked_s)
        while demand.todo:
            group = make(demand.next_group, in_order)
            if not group:
                self._wait(demand.awaited(in_order))
                continue
            began_s = time.perf_counter()
            if not group.on_host:
                self._pager.transfer.arrive(geometry, group.slabs)
            yield group
            ended_s = time.perf_counter()
            self._compute_s += ended_s - began_s
            if self._pager.timeline is not None:
                name = f"layer {self._layer}" + (" on host" if group.on_host else "")
                self._pager.timeline.span(COMPUTE, name, began_s, ended_s, experts=group.experts)
            make(demand.computed, group, ended_s - began_s)

    def _read(self, group: Group, asked_s: float) -> None:
        """A group with experts that were coming was computed, as far as they could be read."""
        pager, name = self._pager, f"layer {self._layer}"
        self._compute_s += group.computed_s
        if pager.timeline is not None:
            for began_s, ended_s in group.spans:
                pager.timeline.span(COMPUTE, name, began_s, ended_s, experts=group.experts)
            nothing_there = len(group.coming) == len(group)
            waits = itertools.pairwise([(asked_s, asked_s), *group.spans] if nothing_there else group.spans)
            for (_, began_s), (ended_s, _) in waits:
                pager.timeline.span("stall", name, began_s, ended_s)
        pager.changes.make(self.demand.read, group)

    def _wait(self, tickets: list[Ticket]) -> None:
        """Until one of `tickets`, or if there are none any copy at all, has ended; a failed one raises TransferError."""
        pager = self._pager
        waiting = tickets or pager.changes.make(self.demand.any_copies)
        if not waiting:
            return
        began_s = time.perf_counter()
        pager.transfer.wait_any(waiting)
        ended_s = time.perf_counter()
        if pager.timeline is not None:
            pager.timeline.span("stall", f"layer {self._layer}", began_s, ended_s)
        pager.changes.make(self.demand.waited, ended_s - began_s)
