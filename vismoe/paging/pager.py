"""The pager: brings the experts a layer demands into slabs, lends them out one at a time, and fetches ahead under a cap.

One thread at a time runs the model and makes demands; worker threads copy. Every decision is a pure function (`eviction`,
`speculation`, `vismoe.precision.rules`); the page tables are the only truth; nothing here allocates tensors.
Where slabs hold two formats, experts also move between them (`transitions`).
"""

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from vismoe.errors import BusyError, ClosedError
from vismoe.locks import RunningCall, under
from vismoe.metrics import Metrics
from vismoe.paging.changes import whole
from vismoe.paging.demand import Demand
from vismoe.paging.miss import Ways
from vismoe.paging.page_table import LOADING, NO_EXPERT, PageTable, Room
from vismoe.paging.speculation import Ledger, prefetch_order
from vismoe.paging.transfer import Mover, Ticket, Transfer
from vismoe.paging.transitions import Transitions
from vismoe.paging.upgrades import Upgrades
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.timeline import Timeline
from vismoe.types import HIGH, ExpertId, ExpertInventory, MoELayer, Phase

logger = logging.getLogger(__name__)


class Pager:
    """Residency of all experts of one model.

    `pools[g]` has a slab for every pinned expert of geometry g plus the dynamic ones: one pool, or one for each format. `ways`:
    what else than waiting may be done about a miss, where the mover has a host tier. `upgrades`: what is done about an expert
    that is there in less precision than was demanded. `deterministic`: nothing is copied unasked. `metrics`: to go on
    counting in.
    """

    def __init__(
        self,
        inventory: ExpertInventory,
        pools: Sequence[SlabPool | Sequence[SlabPool]],
        mover: Mover,
        *,
        order: str = "lfu",
        window: int = 5,
        pinned_layers: int = 0,
        threads: int = 2,
        ways: Ways | None = None,
        upgrades: Upgrades | None = None,
        deterministic: bool = False,
        metrics: Metrics | None = None,
    ):
        assert ways is None or mover.hosts, "only what lies in a host tier can be computed there"
        self.inventory, self.window, self.pinned_layers = inventory, window, pinned_layers
        self.ways, self.hosts, self.upgrades = ways, mover.hosts, upgrades
        self.deterministic = deterministic or (ways is not None and ways.deterministic)
        slabs = tuple(Slabs.of(pool) for pool in pools)
        most = max((layer.num_experts for layer in inventory.layers), default=0)
        self.metrics = metrics or Metrics(len(inventory.layers), most)
        self.timeline: Timeline | None = None  # attach one to see copies, computation and stalls
        self.tables = tuple(PageTable(inventory.layers_of(g), pool, order) for g, pool in enumerate(slabs))
        self.table_of = tuple(self.tables[layer.geometry] for layer in inventory.layers)
        self.ledger = Ledger(inventory)
        self._step_began_s = self._step_ended_s = 0.0
        self._wanted_ahead: list[tuple[ExpertId, float]] = []  # best last
        self.tick = 0
        self._none_to_admit_at = -1  # the tick at which no admission was worth its slab
        self.phase, self.running_layer = Phase.PREFILL, -1
        self.misses_this_step = self.misses_last_step = self.misses_this_layer = 0
        self.tickets: dict[ExpertId, Ticket] = {}
        self._serving: RunningCall | None = None  # who has a demand open
        self._closed = False
        self.transitions = Transitions(self.table_of, self.metrics)
        self.transfer = Transfer(mover, slabs, threads, self._next_prefetch, self._finished, self.repair)
        self.changes = self.transfer.changes
        self.lock = self.changes.lock

    # -- what the model's thread calls
    @whole
    def begin_step(self, phase: Phase, new_sequence: bool = False) -> None:
        """A forward pass over one chunk or one token begins; `new_sequence`: nothing is in its KV cache yet."""
        self.check_open()
        self._claim()
        if new_sequence:
            self.end_request()
        self.ledger.begin_step(phase, self._step_ended_s - self._step_began_s)
        self._step_began_s = self._step_ended_s = time.perf_counter()
        self.phase, self.running_layer = phase, -1
        self.misses_last_step, self.misses_this_step = self.misses_this_step, 0
        self._wanted_ahead.clear()
        self.tick += 1  # what a lookahead still says about an earlier step is too late
        for table in self.tables:
            table.begin_step()

    def demand(
        self,
        layer: int,
        experts: Sequence[int],
        keep: Collection[int] | None = None,
        counted: Collection[int] | None = None,
        tokens: Sequence[int] | None = None,
        high: np.ndarray | None = None,
        first: Sequence[int] = (),
    ) -> Demand:
        """Borrow `experts` (ascending ids) of `layer` with `with`.

        `keep`: None in decode; in prefill the experts that may enter the cache, while the others stream through a small ring.
        `counted`: the experts that real tokens asked for (None: all); the rest is brought in but not counted.
        `tokens`: how many tokens chose each of `experts` (None: one).
        `high`: bool `[E]`, who is to be computed in the more precise format, where there are two (None: everybody).
        `first`: who shall have it first where not all can, the most important first.
        """
        return Demand(self, layer, experts, keep, counted, tokens, high, self.ways, first)

    @whole
    def asked(self, seconds: float) -> None:
        """Asking the lookahead has held up the model's thread, or taken a core from it, for so long."""
        self.ledger.asked(seconds, self.misses_this_layer)

    @whole
    def look_ahead(self, layer: int, scores: np.ndarray, high: np.ndarray | None = None) -> None:
        """Replace what is worth fetching next. scores `[W, E]` for the MoE layers `layer + 1 ...`, 0 = not predicted; high: bool
        `[W, E]`, whom they will want in the more precise format (None: everybody). Others are not fetched where `high` is given.
        """
        distance = min(len(scores), len(self.inventory.layers) - 1 - layer)
        absent = np.zeros((distance, scores.shape[1]), dtype=bool)
        for d in range(distance):
            table, ahead = self.table_of[layer + 1 + d], self.inventory.layers[layer + 1 + d]
            start, experts = table.base[ahead.index], ahead.num_experts
            table.scores[start : start + experts] = scores[d, :experts]
            if table.pool.precision is None:
                absent[d, :experts] = table.slab_of[start : start + experts] < 0
            else:
                absent[d, :experts] = table.precisions(ahead.index) != 1 + HIGH
            if high is not None:
                absent[d, :experts] &= high[d, :experts]
        count = -(-self.ledger.allowance_bytes // self.ledger.unit_bytes)
        ahead_by, chosen = prefetch_order(scores[:distance], absent, count)
        best_last = zip(ahead_by[::-1], chosen[::-1], strict=True)
        self._wanted_ahead = [(ExpertId(layer + 1 + int(d), int(e)), float(scores[d, e])) for d, e in best_last]
        if self._wanted_ahead:
            self.transfer.wake()

    @property
    def may_guess(self) -> bool:
        """Whether anything can still be fetched on a guess in this step."""
        return self.ledger.may_guess and not self.deterministic

    def pin_prefix(self) -> Iterator[ExpertId]:
        """Bring in every expert of the first `pinned_layers` MoE layers and keep them; yields each when it is there."""
        for layer in self.inventory.layers[: self.pinned_layers]:
            for expert in self._bring_in(layer, None):
                self._pin(expert)
                yield expert
        self._step_ended_s = self._step_began_s  # bringing in the prefix is no step of the model

    @whole
    def _pin(self, expert: ExpertId) -> None:
        table = self.table_of[expert.layer]
        table.pinned[table.slab_of[table.flat(expert)]] = True

    def bring_in_all(self, high: np.ndarray) -> Iterator[ExpertId]:
        """Bring in every expert in one format or the other (high bool `[L, E]`), from where they only move between formats."""
        self.transitions.begin(high)
        for layer in self.inventory.layers:
            yield from self._bring_in(layer, high[layer.index])
        self._step_ended_s = self._step_began_s

    def _bring_in(self, layer: MoELayer, high: np.ndarray | None) -> Iterator[ExpertId]:
        experts = range(layer.num_experts)
        with Demand(self, layer.index, experts, None, counted=(), tokens=None, high=high, ways=None) as demand:
            for lent in itertools.chain.from_iterable(demand.groups(in_order=False)):
                yield ExpertId(layer.index, lent.expert)

    @whole
    def retarget(self, high: np.ndarray, promote: Sequence[ExpertId] = (), demote: Sequence[ExpertId] = ()) -> None:
        """From now on `high` bool `[L, E]` says which experts belong in the more precise format. Those named move first."""
        self._claim()
        self.transitions.retarget(high, promote, demote)
        self.transfer.wake()

    def settle(self) -> None:
        """Make all transitions that can be made, and wait for them. Between passes, by the thread that runs the model."""
        self.changes.make(self._serve, RunningCall.of(sys._getframe()))
        while on_their_way := self._moving():
            self.transfer.wait_any(on_their_way)

    @whole
    def _moving(self) -> list[Ticket]:
        """What is on its way, with one more transition where one can be made; when that is nothing, moves are settled."""
        ticket = self._next_transition()
        if ticket is not None:
            self.transfer.submit(ticket)
        elif not self.tickets:
            self._serving = None
        return list(self.tickets.values())

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
        if self.table_of[layer].pool.precision is None:
            self.metrics.add("computed_high", phase, layer, choices - skipped)

    @whole
    def end_request(self) -> None:
        """Guesses nobody used by now were wasted."""
        self._wanted_ahead.clear()
        for table in self.tables:
            for expert in table.give_up_guesses():
                self._count_wasted(expert)

    def residency(self) -> np.ndarray:
        """uint8 `[L, E]`: where each expert is (paging/page_table.py); layers with fewer experts than E end in NO_EXPERT."""
        return under(self.lock, self._of_all, lambda table, layer: table.residency(layer.index, layer.num_experts))

    def precisions(self) -> np.ndarray:
        """uint8 `[L, E]`: 0 absent, otherwise 1 + the precision that each expert is resident in; NO_EXPERT as in `residency`."""
        return under(self.lock, self._of_all, lambda table, layer: table.precisions(layer.index))

    def _of_all(self, read: Callable[[PageTable, MoELayer], np.ndarray]) -> np.ndarray:
        found = np.full(self.metrics.demanded.shape, NO_EXPERT, np.uint8)
        for layer in self.inventory.layers:
            found[layer.index, : layer.num_experts] = read(self.table_of[layer.index], layer)
        return found

    def close(self) -> None:
        self._closed = True
        for host in self.hosts:
            host.close()
        self.transfer.close()

    @whole
    def check_integrity(self) -> None:
        for table in self.tables:
            table.check_integrity()
        loading = {(g, int(slab)) for g, table in enumerate(self.tables) for slab in np.flatnonzero(table.state == LOADING)}
        on_the_way = {(ticket.geometry, ticket.slab) for ticket in self.tickets.values()}
        assert loading == on_the_way and len(on_the_way) == len(self.tickets), "tickets and loading slabs disagree"

    # -- who may serve; in a change
    def check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed; load the model again to go on")

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

    def _serve(self, serving: RunningCall) -> None:
        """From now on that call decides about the slabs, until `_serving` is None again."""
        self.check_open()
        self._claim()
        self._serving = serving

    def repair(self) -> None:
        """After an interrupt: keep what is certain. In whichever thread makes the next change."""
        interrupted = self._serving.thread if self._serving is not None else None
        running = self.transfer.forget_interrupted(list(self.tickets.values()), interrupted)
        self.tickets = {ticket.expert: ticket for ticket in running}
        for geometry, table in enumerate(self.tables):
            table.repair({ticket.slab for ticket in running if ticket.geometry == geometry})
        for host in self.hosts:
            host.let_go()
        self.transfer.wake()

    def open_demand(self, layer: int, serving: RunningCall) -> None:
        self._serve(serving)
        self.running_layer = layer
        self.tick += 1

    def is_open(self, serving: RunningCall) -> bool:
        """Whether it is still this call that serves: one that was interrupted is over."""
        return self._serving is serving

    def close_demand(self) -> None:
        self._serving = None
        self._step_ended_s = time.perf_counter()

    # -- slabs and tickets; in a change
    @property
    def host(self) -> HostTier | None:
        """The tier below the device, where there is one and slabs hold one format."""
        return self.hosts[0] if self.hosts else None

    def make_room(self, layer: int, streaming: bool, must: bool = False, precision: int = HIGH) -> Room | None:
        """A slab for a demand of `layer`, or None when nothing can be taken now."""
        self.check_open()
        return self._settled(self.table_of[layer].make_room(layer, self.window, streaming, must, precision))

    def start_load(self, expert: ExpertId, room: Room, borrowed: bool = False) -> Ticket:
        """Queue a demanded copy."""
        table = self.table_of[expert.layer]
        ticket = Ticket(expert, self.inventory.layers[expert.layer].geometry, room.slab)
        table.begin_load(table.flat(expert), room.slab, ring=room.ring, demanded=True, borrowed=borrowed)
        self.tickets[expert] = ticket
        self.transfer.submit(ticket)
        return ticket

    def guess_on_the_way(self) -> Ticket | None:
        """The prefetch that is being copied."""
        for ticket in self.tickets.values():
            if self.tables[ticket.geometry].speculative[ticket.slab]:
                return ticket
        return None

    def queued_bytes(self) -> int:
        """Of the copies that are queued or under way."""
        return sum(self.tables[ticket.geometry].pool.bytes_of(ticket.slab) for ticket in self.tickets.values())

    def _settled(self, room: Room | None) -> Room | None:
        """Count the eviction that made the room."""
        if room is not None and room.evicted is not None:
            self.metrics.add("evictions", self.phase, room.evicted.expert.layer)
            if room.evicted.unused_prefetch:
                self._count_wasted(room.evicted.expert)
        return room

    def _count_wasted(self, expert: ExpertId) -> None:
        self.ledger.wasted()
        self.metrics.add("wasted_prefetch_bytes", self.phase, expert.layer, self.inventory.layout(expert.layer).record_bytes)

    def _next_prefetch(self) -> Ticket | None:
        """What is worth most of all that nobody has demanded; a slab is taken now, not earlier.

        One such copy at a time: it cannot be called back, and a demand should not have to wait for several.
        """
        if self._closed or self.deterministic:
            return None
        if self.transitions.everybody:
            return self._next_transition()
        if any(ticket.speculative for ticket in self.tickets.values()):
            return None
        return self._next_guess() or self._next_admission()

    def _next_transition(self) -> Ticket | None:
        """The next expert that belongs in the other format, and a slab for it."""
        found = self.transitions.next()
        if found is None:
            return None
        expert, slab = found
        table, geometry = self.table_of[expert.layer], self.inventory.layers[expert.layer].geometry
        ticket = Ticket(expert, geometry, slab, transition=True)
        table.begin_load(table.flat(expert), slab)
        self.tickets[expert] = ticket
        return ticket

    def _next_admission(self) -> Ticket | None:
        """Where misses are computed below: the most used absent expert, if it is worth more than who leaves."""
        if self.ways is None or self.phase is not Phase.DECODE or self._none_to_admit_at == self.tick:
            return None
        for geometry, table in enumerate(self.tables):
            found = table.admission(self.running_layer, self.window)
            if found is not None:
                flat, room = found
                self._settled(room)
                ticket = Ticket(table.id_of[flat], geometry, room.slab, speculative=True)
                table.begin_load(flat, room.slab)
                self.tickets[ticket.expert] = ticket
                return ticket
        self._none_to_admit_at = self.tick
        return None

    def _next_guess(self) -> Ticket | None:
        """The best guess that is still absent, allowed by the cap, and finds a slab."""
        streaming = self.phase is Phase.PREFILL
        while self._wanted_ahead:
            expert, priority = self._wanted_ahead.pop()
            table = self.table_of[expert.layer]
            nbytes = table.pool.record_bytes[HIGH]
            flat = table.flat(expert)
            if expert in self.tickets or expert.layer <= self.running_layer or table.there_in(flat, HIGH):
                continue
            if nbytes > self.ledger.allowance_bytes:
                self._wanted_ahead.clear()
                return None
            room = self._settled(table.room_for_guess(self.running_layer, self.window, priority, streaming))
            if room is None:  # nothing may be taken now; later, perhaps
                self._wanted_ahead.append((expert, priority))
                return None
            self.ledger.started(nbytes)
            ticket = Ticket(expert, self.inventory.layers[expert.layer].geometry, room.slab, speculative=True)
            table.begin_guess(flat, room)
            self.tickets[expert] = ticket
            self.metrics.add("prefetched_bytes", self.phase, expert.layer, nbytes)
            return ticket
        return None

    def _finished(self, ticket: Ticket) -> None:
        if self.tickets.get(ticket.expert) is not ticket:
            return  # forgotten after an interrupt
        table = self.table_of[ticket.expert.layer]
        table.end_load(table.flat(ticket.expert), succeeded=ticket.error is None)
        del self.tickets[ticket.expert]
        if ticket.transition:
            self.transitions.ended(ticket, self.phase)
        elif table.borrowed[ticket.slab] and not table.demanded[ticket.slab]:  # whoever borrowed it has gone
            table.give_back_borrowed(table.flat(ticket.expert))
        self.metrics.add("bytes_read", self.phase, ticket.expert.layer, ticket.moved.disk_bytes)
        self.metrics.add("bytes_copied", self.phase, ticket.expert.layer, ticket.moved.link_bytes)
        if self.timeline is not None and ticket.began_s:
            self.timeline.span(
                threading.current_thread().name,
                "prefetch" if ticket.speculative else "copy",
                ticket.began_s,
                time.perf_counter(),
                layer=ticket.expert.layer,
                expert=ticket.expert.expert,
                bytes=ticket.moved.disk_bytes or ticket.moved.link_bytes,
            )
        if ticket.error is not None and ticket.speculative:
            logger.warning("prefetch of %s failed: %s", ticket.expert, ticket.error)
            self._none_to_admit_at = self.tick
