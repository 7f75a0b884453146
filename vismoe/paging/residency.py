"""The residency core: decides which experts are lent, copied, evicted and promoted, and counts it. No lock, no thread, no clock.

Whatever drives it says what has happened, one event at a time, and does what it answers:

    begin_step, end_request                     a forward pass begins, a request is over
    at_once.take, computed                      one token wants experts whose copies a device queues (paging/at_once.py)
    Demand.open, next_group, computed,          a layer wants experts: which can be computed now, which copies it waits for
        waited, close                           (paging/demand.py)
    look_ahead                                  what the next layers will probably want
    fill                                        experts that nothing has demanded shall come too, where all have a slab
    begin_drafting, promise, begin_verifying,   a round of drafted tokens: what their verification will demand (promises.py)
    end_drafting
    stream_after                                a router has spoken in a streamed pass: what the next layer lacks can be copied
    retarget                                    which experts belong in the more precise format
    next_copy                                   a copy can begin: the answer is a ticket whose slab is taken, or None
    ended                                       a ticket's copy is complete, has failed, or was called back
    repair                                      an interrupt tore a change

Two drivers: the pager (paging/pager.py) is this core, a lock and threads that copy; the replay (simulate/virtual_pager.py) is
this core and a virtual clock. Seconds are arguments. Choices among experts are pure functions (`eviction`, `speculation`, `miss`,
`vismoe.precision.rules`); where each expert is, the page tables alone say.
"""

import bisect
import collections
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vismoe.errors import ClosedError
from vismoe.metrics import Metrics
from vismoe.paging.miss import CpuPace, Upgrades, Ways
from vismoe.paging.page_table import LOADING, NO_EXPERT, RESIDENT, RING_MOST, PageTable, Room
from vismoe.paging.promises import COUNTERS, Promises, Stage
from vismoe.paging.speculation import Ledger, Wanted, prefetch_order
from vismoe.paging.streaming import Streaming
from vismoe.paging.tickets import Moved, Ticket
from vismoe.paging.transitions import Transitions
from vismoe.pools.pool import SlabPool
from vismoe.store.expert_store import NativeRead
from vismoe.types import HIGH, ExpertId, ExpertInventory, Phase

logger = logging.getLogger(__name__)


class Queued(NamedTuple):
    """Copies that a device has queued: when the link begins with them and ends, as far as the host can know, and their bytes."""

    began_s: float
    ended_s: float
    nbytes: int


class Link:
    """What carries out copies: it asks for `next_copy` whenever it can carry one more, and says when one has `ended`. This one
    need not be told anything."""

    @property
    def bytes_per_s(self) -> float | None:
        """As measured on the way; None: not known."""
        return None

    def wake(self) -> None:
        """There may be something to copy now."""

    def queue(self, ticket: Ticket) -> bool:
        """Hand a demanded copy to a device that lets what reads the slab wait: it has ended for all that the host decides. False:
        whoever copies has to be told, and waited for."""
        return False

    def reading(self, ticket: Ticket) -> NativeRead | None:
        """How native threads make a demanded copy while experts are computed; None: they do not."""
        return None

    def can_queue(self, geometry: int, experts: np.ndarray | None = None) -> bool:
        """Whether `queue_all` takes these experts `[n]` (flat); None: some of the geometry's."""
        return False

    def queue_all(self, geometry: int, experts: np.ndarray, slabs: np.ndarray) -> Queued:
        """Hand demanded copies of experts `[n]` (flat) of one layer into these slabs to a device. What is queued there next waits
        for them, and for all that was queued before. Raises TransferError; then none of them is under way."""
        raise AssertionError("`can_queue` says that it takes none")

    def arrive(self, geometry: int, slabs: np.ndarray) -> None:
        """What is queued on the device from now on sees what was queued to be copied into these slabs."""

    def finished(self, ticket: Ticket) -> None:
        """A copy has ended that was not made by what carries out copies."""

    def released(self, geometry: int, slabs: np.ndarray) -> None:
        """The computation that used these slabs was queued; a copy into one of them must wait for it."""


class HostRecords(Protocol):
    """The tier below the device, as far as misses are computed there."""

    @property
    def pools(self) -> Sequence[SlabPool]: ...  # by geometry

    def has(self, experts: Iterable[ExpertId]) -> list[bool]: ...

    def hold(self, experts: Iterable[ExpertId]) -> dict[ExpertId, int]: ...

    def let_go(self) -> None: ...

    def places_for_good(self, geometry: int, experts: np.ndarray) -> np.ndarray | None: ...  # of flat ones; None: some may leave


class Residency:
    """Where the experts of one model are, and what happens to them next.

    `pools[g]` has a slab for every pinned expert of geometry g plus the dynamic ones: one pool, or one for each format. `ways`:
    what else than waiting may be done about a miss, where there are `hosts`. `upgrades`: what is done about an expert that is
    there in less precision than was demanded. `deterministic`: nothing is copied unasked. `may_stream`: passes are streamed where
    measured times say that it pays; `in_flight`: slabs that running copies and running computation occupy during a streamed pass,
    beside what waits for the next layer. `ring_most`: slabs that a prompt's experts stream through. `metrics`: to go on counting
    in.
    """

    # Copies in flight of absent experts that a lookahead names. One, for it cannot be called back, and a demand should not wait
    # for several. In a streamed pass the next layer surely wants most of what it lacks: the ring is the only limit. While tokens
    # are drafted there is no demand.
    unasked_at_once = 1

    def __init__(
        self,
        inventory: ExpertInventory,
        pools: Sequence[SlabPool | Sequence[SlabPool]],
        *,
        order: str = "lfu",
        window: int = 5,
        ways: Ways | None = None,
        hosts: Sequence[HostRecords] = (),
        upgrades: Upgrades | None = None,
        deterministic: bool = False,
        may_stream: bool = True,
        in_flight: int = 0,
        ring_most: int = RING_MOST,
        metrics: Metrics | None = None,
    ):
        assert ways is None or hosts, "only what lies in a host tier can be computed there"
        self.inventory, self.window, self.link = inventory, window, Link()
        self.ways, self.hosts, self.upgrades = ways, hosts, upgrades
        self.cpu_pace, self.step_pace = CpuPace(), CpuPace(least=0.5, parts=2)  # of demands, and of layers in one step
        self.deterministic = deterministic or (ways is not None and ways.deterministic)
        most = max((layer.num_experts for layer in inventory.layers), default=0)
        self.metrics = metrics or Metrics(len(inventory.layers), most)
        self.tables = tuple(PageTable(inventory.layers_of(g), pool, order, ring_most) for g, pool in enumerate(pools))
        self.table_of = tuple(self.tables[layer.geometry] for layer in inventory.layers)
        self.filling_at_once = 0  # copies in flight that fill slabs
        self.filling_waits = False  # for memory to get its pages, or for requests
        self.transitions = Transitions(self.table_of, self.metrics)
        self.ledger = Ledger(inventory, [self.copied_bytes(geometry) for geometry in range(len(self.tables))])
        self.wanted = Wanted()
        self.promises = Promises([table.layer_of for table in self.tables], self.ledger.sizes)
        self._first = [part.start for part in self.promises.parts]  # of each table's experts, in the numbering of promises
        for table, part in zip(self.tables, self.promises.parts, strict=True):
            table.promised = self.promises.kept[part]
        freely = may_stream and not (self.deterministic or self.ways_of_demands is not None)
        self.streaming = tuple(
            Streaming(
                inventory.layers_of(geometry),
                freely and table.pool.precision is None and not table.has_room_for_all,
                in_flight,
                prompts_ahead=not hosts,  # on a device the link is queued full as soon as a router has spoken
            )
            for geometry, table in enumerate(self.tables)
        )
        self.ahead: list[int] = []  # absent experts (flat) of the next layer, to be copied ahead of it, the first one last
        self._ahead_of = self._entered = 0  # their layer; the layer that began last
        stacks = [*(layer.stack for layer in inventory.layers), None]  # a vision tower and what drafts have passes of their own
        self._after = [n + 1 if stacks[n] == stacks[n + 1] else 0 for n in range(len(inventory.layers))]
        self._next_layer: dict[tuple[Phase, int], int] = {}  # which layer ran after which
        self._begins_with: dict[Phase, int] = {}  # with which layer passes began
        self.copies_ahead = False  # what the next layer lacks, in the running pass and the layers of some geometry
        self.tickets: dict[ExpertId, Ticket] = {}  # in flight
        self.queue: collections.deque[Ticket] = collections.deque()  # those that were demanded and are not begun, oldest first
        self.tick = 0  # counts steps and demands
        self._none_to_admit_at = -1  # the tick at which no admission was worth its slab
        self.phase, self.running_layer = Phase.PREFILL, -1
        self.misses_this_step = self.misses_last_step = self.misses_this_layer = 0
        self.closed = False  # nothing is copied any more

    @property
    def ways_of_demands(self) -> Ways | None:
        """What else than waiting is done about a miss that is demanded."""
        return None if self.ways is None or self.ways.in_steps_only else self.ways

    # -- steps and requests
    def begin_step(self, phase: Phase, last_step_s: float, tokens: int = 1) -> None:
        """A forward pass over so many `tokens`, of a chunk or one for each row, begins; the one before took `last_step_s`."""
        if self.promises.stage is Stage.DRAFTED and phase is Phase.DECODE:
            self.promises.stage = Stage.VERIFYING
        else:
            self.end_drafting()  # this pass is no part of the round
        self.ledger.begin_step(phase, last_step_s)
        self.phase, self.running_layer = phase, -1
        self.cpu_pace.begin_pass(phase)
        self.step_pace.begin_pass(phase)
        self.misses_last_step, self.misses_this_step = self.misses_this_step, 0
        self.wanted.replace([])
        self.tick += 1  # what a lookahead still says about an earlier step is too late
        compute_s = max(0.0, last_step_s - sum(of.stall_s for of in self.streaming)) / max(1, len(self.inventory.layers))
        for table, streaming in zip(self.tables, self.streaming, strict=True):
            slabs = table.dynamic_slabs if streaming.possible else 0
            ring = streaming.begin_pass(phase, tokens, slabs, table.pool.free == 0, compute_s)
            table.begin_step(ring)
            if ring:
                table.hold_fixed()
            elif phase is Phase.DECODE:
                table.end_ring()
        self.copies_ahead = any(streaming.ahead for streaming in self.streaming)
        if self.copies_ahead:
            self.end_drafting()
        if not (self.copies_ahead and phase is Phase.DECODE):
            self.ahead.clear()
        if phase in self._begins_with and not self.ahead:
            self._stream(self._begins_with[phase])

    def end_request(self) -> None:
        """Guesses that were not used by now were wasted; what is resident stays."""
        self.end_drafting()
        self.wanted.replace([])
        self.ahead.clear()
        for table in self.tables:
            for expert in table.give_up_guesses():
                self.count_wasted(expert)

    # -- rounds of drafted tokens
    @property
    def promises_why_not(self) -> str | None:
        """Why nothing is promised to a round that begins now; None: it is."""
        if self.deterministic:
            return "nothing is copied unasked, for the sake of determinism"
        if any(table.pool.precision is not None for table in self.tables):
            return "slabs hold experts in two formats"
        if self.copies_ahead and self.phase is Phase.DECODE:
            return "passes are streamed"
        if self._all_resident():
            return "every expert is resident"
        return None

    def begin_drafting(self) -> None:
        """A round begins: until `begin_verifying` no layer runs, and nothing is demanded."""
        self.end_drafting()
        if self.promises_why_not is None:
            self.wanted.replace([])
            self.ahead.clear()
            self.copies_ahead, self.running_layer = False, -1  # a prompt may have been
            self.tick += 1  # what a lookahead still says about the pass before is too late
            self.promises.begin()

    def promise(self, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """A draft pass has routed tokens at this layer to `experts` `[T, K]`, with `weights` `[T, K]`. Layers come in order; a
        pass begins where they begin again."""
        if self.promises.stage is not Stage.DRAFTING:
            return
        table = self.table_of[layer]
        if not table.pins(layer):
            self.promises.name(layer, experts + self._numbered(layer), weights)
        self._keep_promises(self.inventory.layers[layer].geometry)

    def begin_verifying(self) -> None:
        """Drafting is over, and the next pass verifies."""
        if self.promises.stage is Stage.DRAFTING:
            self.promises.stage = Stage.DRAFTED
            self.link.wake()

    def end_drafting(self) -> None:
        """The round, if there is one, is over, and its account is settled."""
        if self.promises:
            account = self.promises.end()
            for counter, layer in zip(*np.nonzero(account), strict=True):
                self.metrics.add(COUNTERS[counter], Phase.DECODE, layer, account[counter, layer])

    def _numbered(self, layer: int) -> int:
        """The number that promises have for the first expert of a layer."""
        return self._first[self.inventory.layers[layer].geometry] + self.table_of[layer].base[layer]

    def _keep_promises(self, geometry: int) -> None:
        self.promises.keep(geometry, self.tables[geometry].dynamic_slabs)
        if len(self._absent_promises(geometry)):
            self.link.wake()

    def _absent_promises(self, geometry: int) -> np.ndarray:
        """Those that may be copied now, in the numbering of promises."""
        return self.promises.may_copy(geometry, self.tables[geometry].slab_of < 0)

    @property
    def wants_slabs(self) -> bool:
        """Something that nothing has demanded yet, but surely will be, may wait for a slab."""
        return bool(self.ahead) or (bool(self.promises) and any(len(self._absent_promises(g)) for g in range(len(self.tables))))

    def _next_promise(self) -> Ticket | None:
        """The absent promise of the earliest deadline that may be copied and finds a slab."""
        absent = np.concatenate([self._absent_promises(geometry) for geometry in range(len(self.tables))])
        full = set[int]()  # geometries
        for number in absent[np.argsort(self.promises.deadline(absent))].tolist():
            geometry = bisect.bisect_right(self._first, number) - 1
            table, flat = self.tables[geometry], number - self._first[geometry]
            room = self._settled(table.room_for_promise()) if geometry not in full else None
            if room is not None:
                self.promises.copy_begins(number)
                table.begin_load(flat, room.slab)
                return self._ticket(table.id_of[flat], room.slab, speculative=True, promised=True)
            full.add(geometry)
        return None

    # -- what is copied unasked
    def look_ahead(self, layer: int, scores: np.ndarray, high: np.ndarray | None = None) -> None:
        """Replace what is worth fetching next. scores `[W, E]` for the MoE layers `layer + 1 ...`, 0 = not predicted; high: bool
        `[W, E]`, which of them will be wanted in the more precise format (None: all). Others are not fetched where it is given.
        """
        if self.copies_ahead:
            return
        distance = min(len(scores), len(self.inventory.layers) - 1 - layer)
        absent = np.zeros((distance, scores.shape[1]), dtype=bool)
        for d in range(distance):
            table, ahead = self.table_of[layer + 1 + d], self.inventory.layers[layer + 1 + d]
            start, experts = table.base[ahead.index], ahead.num_experts
            table.priorities[start : start + experts] = scores[d, :experts]
            if table.pool.precision is None:
                absent[d, :experts] = table.slab_of[start : start + experts] < 0
            else:
                absent[d, :experts] = table.precisions(ahead.index) != 1 + HIGH
            if high is not None:
                absent[d, :experts] &= high[d, :experts]
        count = -(-self.ledger.allowance_bytes // self.ledger.unit_bytes)
        ahead_by, chosen = prefetch_order(scores[:distance], absent, count)
        self.wanted.replace([(ExpertId(layer + 1 + int(d), int(e)), float(scores[d, e])) for d, e in zip(ahead_by, chosen)])
        if self.wanted:
            self.link.wake()

    @property
    def may_guess(self) -> bool:
        """Whether anything can still be fetched on a guess in this step."""
        return self.ledger.may_guess and not self.deterministic and not self.copies_ahead

    def asked(self, seconds: float) -> None:
        """Asking the lookahead has held up the model's thread, or taken a core from it, for so long."""
        self.ledger.asked(seconds, self.misses_this_layer)

    def retarget(self, high: np.ndarray, promote: Sequence[ExpertId] = (), demote: Sequence[ExpertId] = ()) -> None:
        """From now on `high` bool `[L, E]` says which experts belong in the more precise format. Those named move first."""
        self.transitions.retarget(high, promote, demote)
        self.link.wake()

    # -- a layer that needs no demand
    def nothing_comes(self, layer: int) -> bool:
        """Whether nothing is copied now, and nothing waits for a slab: a demand of experts that are all resident would change
        nothing but what `hit` says and their worth."""
        return not (self.tickets or self.wanted or self.copies_ahead or self.closed or self.table_of[layer].ring_in_use)

    def hit(self, layer: int, wanted: Sequence[int]) -> None:
        """The layer has found all the `wanted` experts resident, without a demand."""
        self.enter(layer, wanted)
        self.misses_this_layer = 0
        self.demanded(layer, len(wanted), 0)

    def hits(self, layers: Sequence[int], wanted: Sequence[int]) -> None:
        """`hit` for layers that followed one another, which wanted so many experts each, while nothing is promised."""
        for layer, experts in zip(layers, wanted):
            self.enter(layer, ())
            self.demanded(layer, experts, 0)
        self.misses_this_layer = 0

    def demanded(self, layer: int, wanted: int, missed: int) -> None:
        """The layer wants so many experts, of which `missed` are not there."""
        streaming = self.streaming[self.inventory.layers[layer].geometry]
        streaming.demand(wanted, missed)
        if streaming.possible:
            self.metrics.add(streaming.verdict, self.phase, layer)

    def count(self, layer: int, wanted: list[int], missing: list[int], late: int, counted: Collection[int] | None = None) -> None:
        """The layer demands `wanted`; `missing` are not there, the last `late` of which are on their way. counted: those that
        real tokens asked for; None: all."""
        self.metrics.count_experts(layer, wanted, missing)
        self.misses_this_layer = len(missing)
        self.misses_this_step += len(missing)
        self.demanded(layer, len(wanted), len(missing))
        asked = [wanted, missing, missing[len(missing) - late :]]
        if counted is not None:
            asked = [[expert for expert in each if expert in counted] for each in asked]
        demanded, missed, coming = map(len, asked)
        self.metrics.count_demand(self.phase, layer, demanded - missed, missed, coming)

    def enter(self, layer: int, wanted: Sequence[int]) -> None:
        """The layer begins, and its router has spoken."""
        if layer != self._entered:  # else the pass before ended early, or there is one layer
            self._next_layer[self.phase, self._entered] = layer
        if self.running_layer < 0:
            self._begins_with[self.phase] = layer
        self.running_layer = self._entered = layer
        self.tick += 1
        if self.promises:
            self.promises.demand(layer, np.asarray(wanted, np.int64) + self._numbered(layer))
            for geometry in range(len(self.tables)):
                self._keep_promises(geometry)  # there are slabs for later ones now

    # -- copies
    def next_copy(self) -> Ticket | None:
        """What to copy now: the oldest demand, else what is worth most of all that nothing has demanded. A slab for the latter is
        taken now, not earlier."""
        if self.queue:
            return self.queue.popleft()
        if self.closed or self.deterministic:
            return None
        if self.transitions.all_resident:
            return self.next_transition()
        if self.copies_ahead:
            return self._next_ahead()
        unasked = sum(ticket.unasked for ticket in self.tickets.values())
        full = unasked >= self.unasked_at_once
        demanded = any(ticket.without_worker for ticket in self.tickets.values())
        if self.promises and (self.promises.stage is not Stage.VERIFYING or not (full or demanded)):
            promised = self._next_promise()
            if promised is not None:
                return promised
        if full:
            return None if demanded else self._next_to_fill(unasked)
        return self._next_guess() or (None if demanded else self._next_admission() or self._next_to_fill(unasked))

    def next_transition(self) -> Ticket | None:
        """The next expert that belongs in the other format, and a slab for it."""
        found = self.transitions.next()
        if found is None:
            return None
        ticket = self._ticket(*found, transition=True)
        self.table_of[ticket.expert.layer].begin_load(self.table_of[ticket.expert.layer].flat(ticket.expert), ticket.slab)
        return ticket

    def _next_guess(self) -> Ticket | None:
        """The best guess that is still absent, allowed by the cap, and finds a slab."""
        streaming = self.phase is Phase.PREFILL
        while self.wanted:
            expert, priority = self.wanted.pop()
            table = self.table_of[expert.layer]
            nbytes = self.copied_bytes(self.inventory.layers[expert.layer].geometry)
            if expert in self.tickets or expert.layer <= self.running_layer or table.there_in(table.flat(expert), HIGH):
                continue
            if nbytes > self.ledger.allowance_bytes:
                self.wanted.replace([])
                return None
            room = self._settled(table.room_for_guess(self.running_layer, self.window, priority, streaming))
            if room is None:  # nothing may be taken now; later, perhaps
                self.wanted.put_back(expert, priority)
                return None
            self.ledger.started(nbytes)
            self.metrics.add("prefetched_bytes", self.phase, expert.layer, nbytes)
            table.begin_guess(table.flat(expert), room)
            return self._ticket(expert, room.slab, speculative=True)
        return None

    # -- a streamed pass, and a prompt whose next experts are known
    def stream_after(self, layer: int) -> None:
        """The router of `layer` has spoken, and what it wants has slabs or waits for them. What else was to be copied for it is
        dropped; what the next layer lacks comes next: in prefill by id, as it will be computed, otherwise the most used first,
        which it most likely wants. In decode the first layer of the next pass follows the last of this one; in prefill what that
        layer lacks comes when the pass begins."""
        self.ahead.clear()
        for expert in self.table_of[layer].drop_ahead(layer):
            self.count_wasted(expert)
        following = self._next_layer.get((self.phase, layer), self._after[layer])
        if following > layer or (self.phase is Phase.DECODE and following != layer):
            self._stream(following)

    def _stream(self, layer: int) -> None:
        """What this layer lacks is to be copied now, where that is done ahead."""
        table, ahead = self.table_of[layer], self.inventory.layers[layer]
        if not self.streaming[ahead.geometry].ahead:
            return
        self._ahead_of, start = layer, table.base[layer]
        absent = start + np.flatnonzero(table.slab_of[start : start + ahead.num_experts] < 0)
        last_first = np.argsort(table.uses[absent], kind="stable") if self.phase is Phase.DECODE else slice(None, None, -1)
        self.ahead.extend(absent[last_first].tolist())
        self.link.wake()

    def _next_ahead(self) -> Ticket | None:
        """The next absent expert of the layer after the running one, where the ring has a slab."""
        while self.ahead:
            table, flat = self.table_of[self._ahead_of], self.ahead.pop()
            if table.slab_of[flat] >= 0:
                continue
            room = self._settled(table.room_ahead(self.running_layer, self.window))
            if room is None:
                self.ahead.append(flat)  # later, when the ring has a slab
                return None
            expert = table.id_of[flat]
            nbytes = self.copied_bytes(self.inventory.layers[expert.layer].geometry)
            self.metrics.add("prefetched_bytes", self.phase, expert.layer, nbytes)
            ring = not table.fixed[flat] if table.streamed_ring else room.ring
            table.begin_load(flat, room.slab, speculative=True, ring=ring)
            return self._ticket(expert, room.slab, speculative=True)
        return None

    def _next_admission(self) -> Ticket | None:
        """Where misses are computed below: the most used absent expert, if it is worth more than the one it evicts."""
        if self.ways_of_demands is None or self.phase is not Phase.DECODE or self._none_to_admit_at == self.tick:
            return None
        for table in self.tables:
            found = table.admission(self.running_layer, self.window)
            if found is not None:
                flat, room = found
                self._settled(room)
                table.begin_load(flat, room.slab)
                return self._ticket(table.id_of[flat], room.slab, speculative=True)
        self._none_to_admit_at = self.tick
        return None

    def admit_none(self) -> None:
        """Until the next step or demand nothing that was computed below is worth a slab."""
        self._none_to_admit_at = self.tick

    def fill(self, at_once: int) -> None:
        """From now on, where there is a slab for every expert, those that nothing demanded yet are brought in, so many at once,
        while nothing else is to be copied: those of the next layers first. Not while pools rest, nor before the memory has its
        pages, since to get these takes cores from computation, and never where they could not be had."""
        if not self.deterministic and all(table.has_room_for_all for table in self.tables):
            self.filling_at_once = at_once
            self.link.wake()

    def _next_to_fill(self, unasked: int) -> Ticket | None:
        """The first absent expert of the layers behind the running one. unasked: copies in flight that nothing demanded."""
        self.filling_waits = False
        for table in self.tables if unasked < self.filling_at_once else ():
            absent = np.flatnonzero(table.slab_of < 0)
            rests = table.pool.rests
            waits = bool(len(absent)) and (rests or not table.pool.has_pages)
            self.filling_waits |= waits and (rests or table.pool.gets_pages)
            slab = table.pool.take() if len(absent) and not waits else None
            if slab is not None:
                behind = np.searchsorted(table.layer_of[absent], self.running_layer, side="right")
                flat = int(absent[behind % len(absent)])
                expert = table.id_of[flat]
                nbytes = self.copied_bytes(self.inventory.layers[expert.layer].geometry)
                self.metrics.add("prefetched_bytes", self.phase, expert.layer, nbytes)
                table.begin_load(flat, slab)
                return self._ticket(expert, slab, fills=True)
        return None

    def _ticket(
        self,
        expert: ExpertId,
        slab: int,
        speculative: bool = False,
        promised: bool = False,
        transition: bool = False,
        fills: bool = False,
    ) -> Ticket:
        geometry = self.inventory.layers[expert.layer].geometry
        self.tickets[expert] = ticket = Ticket(expert, geometry, slab, speculative, promised, transition, fills)
        return ticket

    def ended(self, ticket: Ticket) -> bool:
        """The copy is complete, or failed with `ticket.error`. False: it was forgotten after an interrupt."""
        if self.tickets.get(ticket.expert) is not ticket:
            return False
        table, layer = self.table_of[ticket.expert.layer], ticket.expert.layer
        table.end_load(table.flat(ticket.expert), succeeded=ticket.error is None)
        if ticket.error is None and not (ticket.queued and ticket.ended_s == ticket.began_s):  # the link's rate is not known yet
            self.streaming[ticket.geometry].copied(ticket.began_s, ticket.ended_s)
        del self.tickets[ticket.expert]
        if ticket.transition:
            self.transitions.ended(ticket, self.phase)
        elif table.borrowed[ticket.slab] and not table.demanded[ticket.slab]:  # the demand that borrowed it is over
            table.give_back_borrowed(table.flat(ticket.expert))
        self.metrics.add("bytes_read", self.phase, layer, ticket.moved.disk_bytes)
        self.metrics.add("bytes_copied", self.phase, layer, ticket.moved.link_bytes)
        if ticket.error is not None and (ticket.speculative or ticket.fills):
            until = ", so no others are read until a token asks for them" if ticket.fills else ""
            logger.warning("prefetch of %s failed%s: %s", ticket.expert, until, ticket.error)
            if ticket.promised:
                self.promises.copy_failed(self._numbered(layer) + ticket.expert.expert)
            self._none_to_admit_at = self.tick
            self.filling_at_once = 0 if ticket.fills else self.filling_at_once
        return True

    def guess_on_the_way(self) -> Ticket | None:
        """The prefetch that is being copied."""
        for ticket in self.tickets.values():
            if self.tables[ticket.geometry].speculative[ticket.slab]:
                return ticket
        return None

    def queued_bytes(self) -> int:
        """Of the copies that are queued or under way."""
        return sum(
            self.copied_bytes(ticket.geometry, self.tables[ticket.geometry].pool.precision_of(ticket.slab))
            for ticket in self.tickets.values()
        )

    def copied_bytes(self, geometry: int, precision: int = HIGH) -> int:
        """Of a copy into a slab of this format: of a record of the tier below, where there is one. Encoded records have various
        sizes, and each counts as the largest."""
        if self.hosts:
            return self.hosts[precision].pools[geometry].layout.record_bytes
        return self.tables[geometry].pool.record_bytes[precision]

    # -- what a demand asks for
    def check_open(self) -> None:
        if self.closed:
            raise ClosedError("the engine is closed; load the model again to go on")

    def make_room(self, layer: int, streaming: bool, must: bool = False, precision: int = HIGH) -> Room | None:
        """A slab for a demand of `layer`, or None when nothing can be taken now."""
        self.check_open()
        return self._settled(self.table_of[layer].make_room(layer, self.window, streaming, must, precision))

    def start_load(self, expert: ExpertId, room: Room, borrowed: bool = False, by_reading: bool = False) -> Ticket:
        """Queue a demanded copy; `by_reading`: where native threads can make it, they begin when the demand lets them."""
        table = self.table_of[expert.layer]
        table.begin_load(table.flat(expert), room.slab, ring=room.ring, demanded=True, borrowed=borrowed)
        ticket = self._ticket(expert, room.slab)
        if by_reading:
            self.check_open()
            ticket.reading = self.link.reading(ticket)
        if ticket.reading is None:
            return self.submit(ticket)
        return ticket

    def read(self, ticket: Ticket) -> None:
        """Native threads have read, or failed, as the arrival says."""
        assert ticket.reading is not None
        reading, arrival = ticket.reading, ticket.reading.arrival
        ticket.began_s, ticket.ended_s, ticket.lane = arrival.began_s, arrival.ended_s, f"vismoe-reader-{arrival.lane}"
        try:
            ticket.error = reading.error()
        except Exception as error:  # as where workers copy: the demand that needs the expert raises it
            ticket.error = error
        if ticket.error is None:
            ticket.moved = Moved(disk_bytes=reading.nbytes)
        ticket.done = True
        self.link.finished(ticket)

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue a copy that something waits for."""
        self.check_open()
        if not self.link.queue(ticket):
            self.queue.append(ticket)
            self.link.wake()
        return ticket

    def _settled(self, room: Room | None) -> Room | None:
        """Count the eviction that made the room."""
        if room is not None and room.evicted is not None:
            self.metrics.add("evictions", self.phase, room.evicted.expert.layer)
            if self.promises:
                self.promises.evicted(self._numbered(room.evicted.expert.layer) + room.evicted.expert.expert)
            if room.evicted.unused_prefetch:
                self.count_wasted(room.evicted.expert)
        return room

    def count_wasted(self, expert: ExpertId) -> None:
        if not self.copies_ahead:  # the cap is about guesses
            self.ledger.wasted()
        nbytes = self.copied_bytes(self.inventory.layers[expert.layer].geometry)
        self.metrics.add("wasted_prefetch_bytes", self.phase, expert.layer, nbytes)

    # -- memory that is lent to keys and values
    @property
    def released_bytes(self) -> int:
        return sum(table.unbacked_bytes for table in self.tables)

    def release(self) -> None:
        """A slab for each layer gives its memory back, where there is one to spare. Between passes."""
        for layer in self.inventory.layers:
            self._settled(self.table_of[layer.index].unback(layer.index))

    def take_back(self) -> None:
        """As many slabs are free again. Between passes."""
        for layer in self.inventory.layers:
            if self.table_of[layer.index].back():
                self.link.wake()

    # -- from the start, after an interrupt, and to look at
    def place(self, expert: ExpertId, slab: int, pinned: bool = False, begin: int = 0) -> None:
        """The expert is there from the start, without a copy: in `slab`, which was taken for it; `begin`: as `SlabPool.place`."""
        table = self.table_of[expert.layer]
        if begin:
            table.pool.place(slab, lambda: begin)
        table.begin_load(table.flat(expert), slab)
        table.end_load(table.flat(expert), succeeded=True)
        table.pinned[slab] = pinned

    def pin(self, expert: ExpertId) -> None:
        """A resident expert never leaves from now on."""
        table = self.table_of[expert.layer]
        table.pinned[table.slab_of[table.flat(expert)]] = True

    def repair(self, running: Collection[Ticket]) -> None:
        """An interrupt may have torn a change: keep what is certainly true. `running`: the copies that go on all the same."""
        self.end_drafting()
        self.queue.clear()
        self.ahead.clear()
        self.tickets = {ticket.expert: ticket for ticket in running}
        for geometry, table in enumerate(self.tables):
            table.repair({ticket.slab for ticket in running if ticket.geometry == geometry})
        for host in self.hosts:
            host.let_go()

    def addresses(self) -> list[np.ndarray] | None:
        """By geometry the addresses int64 `[its experts]` of their records; None unless every expert is resident in the one
        format, so that nothing is copied any more."""
        if self.tickets or any(table.pool.precision is not None for table in self.tables) or not self._all_resident():
            return None
        return [table.pool.addresses[table.slab_of] for table in self.tables]

    def _all_resident(self) -> bool:
        return all((table.slab_of >= 0).all() and (table.state[table.slab_of] == RESIDENT).all() for table in self.tables)

    def of_all(self, read: Callable[[PageTable, int], np.ndarray]) -> np.ndarray:
        """uint8 `[L, E]`: what is read of each layer; layers with fewer experts than E end in NO_EXPERT."""
        found = np.full(self.metrics.demanded.shape, NO_EXPERT, np.uint8)
        for layer in self.inventory.layers:
            found[layer.index, : layer.num_experts] = read(self.table_of[layer.index], layer.index)
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError where page tables, pools, tickets and promises disagree."""
        for table, part in zip(self.tables, self.promises.parts, strict=True):
            table.check_integrity()
            assert table.promised is not None and np.shares_memory(table.promised, self.promises.kept[part])
        self.promises.check_integrity([table.dynamic_slabs for table in self.tables], self.running_layer)
        loading = {(g, int(slab)) for g, table in enumerate(self.tables) for slab in np.flatnonzero(table.state == LOADING)}
        on_the_way = {(ticket.geometry, ticket.slab) for ticket in self.tickets.values()}
        assert loading == on_the_way and len(on_the_way) == len(self.tickets), "tickets and loading slabs disagree"
        assert all(self.tickets.get(ticket.expert) is ticket for ticket in self.queue), "a copy is queued that was forgotten"
