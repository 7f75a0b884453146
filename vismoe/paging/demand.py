"""The experts of the running layer, lent out inside a `with`: what is here at once, what is missing as it arrives.

They come in groups, each computed by one call; the slabs of a group stay protected until the next group is asked for, and the
books are settled once per group. Two orders. By arrival (decode): residents first, then whatever has arrived; the caller combines
by expert id itself. By id (prefill): the caller can add results as it goes, while later ids are on their way.
With everything resident a layer is one group. Demands larger than the pool are served in waves: groups of one, so that a slab is
taken again as soon as its expert was computed. Two slabs suffice.
Where there are other ways than waiting (miss.py), some of the missing experts are lent straight from the host tier: as a group of
their own, after what lies on the device, so that work launched there runs beside. They take no slab.
Where slabs hold two formats, what is there in more precision than demanded serves; what is there in less is waited for, borrowed
or taken as it is (upgrades.py).
"""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType

import numpy as np

from vismoe.errors import ClosedError, TransferError
from vismoe.locks import RunningCall
from vismoe.paging.host_compute import Below
from vismoe.paging.lender import Lender
from vismoe.paging.lent import Group
from vismoe.paging.miss import Ways
from vismoe.paging.page_table import READY, RESIDENT, Room
from vismoe.paging.transfer import Ticket
from vismoe.precision.rules import Serve
from vismoe.types import HIGH, LOW, ExpertId

__all__ = ["Demand"]


class Demand:
    """Made by `Pager.demand`; used once."""

    def __init__(
        self,
        pager: Lender,
        layer: int,
        experts: Sequence[int],
        keep: Collection[int] | None,
        counted: Collection[int] | None,
        tokens: Sequence[int] | None,
        high: np.ndarray | None,
        ways: Ways | None,
        first: Sequence[int] = (),
    ):
        self._pager, self._layer, self._keep, self._high = pager, layer, keep, high
        self._table = pager.table_of[layer]
        self._base = self._table.base[layer]
        self._todo = list(experts)  # not computed yet, ascending
        self._absent: list[int] = []  # waiting for a slab, ascending
        self._tickets: dict[int, Ticket] = {}  # waiting for a copy
        self._asked: set[Ticket] = set()  # copies that it asked for itself; only their failure is its own
        self._below = Below(pager, layer)
        self._all_slabs: np.ndarray | None = None  # of the demand, where all of it is resident
        self._counted, self._tokens, self._ways = counted, tokens, ways
        self._tokens_of = dict(zip(self._todo, tokens)) if tokens is not None else {}
        self._rank = {expert: rank for rank, expert in enumerate(first)}  # among those that want more precision
        self._upgrading: set[int] = set()  # there in less precision than demanded, and waited for
        self._borrowed: set[int] = set()  # to be computed from a copy of more precision than their resident one
        self._compute_s = self._stall_s = self._began_s = 0.0
        self._guess: Ticket | None = None  # what was on its way, undemanded, when this demand came

    def __enter__(self) -> "Demand":
        self._serving = RunningCall.of(sys._getframe(1))
        self._pager.changes.make(self._open)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing of this demand stays protected; copies under way end as ordinary residents."""
        self._pager.changes.make(self._close, kind)
        del self._serving  # a frame that this demand is a local of: its tensors would live until the garbage collector comes

    def _open(self) -> None:
        pager, table = self._pager, self._table
        pager.open_demand(self._layer, self._serving)
        table.enter_layer(self._layer)
        if pager.tickets:
            self._guess, self._began_s = pager.guess_on_the_way(), time.perf_counter()
        slabs = self._slabs(self._todo)
        present = slabs >= 0
        if table.pool.precision is not None:
            present &= ~self._lacking(slabs, table.pool.precision)
        if not present.all():
            self._absent = [expert for expert, here in zip(self._todo, present.tolist()) if not here]
        here = slabs[present] if self._absent else slabs
        stays: bool | np.ndarray = True
        if self._keep is not None:
            stays = np.array([e in self._keep for e, p in zip(self._todo, present.tolist()) if p], dtype=bool)
        guesses = table.enter_demand(here, stays)
        if guesses:
            pager.ledger.used(guesses, guesses * table.pool.record_bytes[HIGH])
        late = [] if not pager.tickets else self._late()
        for expert in late:
            self._tickets[expert] = pager.tickets[ExpertId(self._layer, expert)]
        self._count(late)
        if not (self._absent or late or self._borrowed):
            self._all_slabs = slabs
        elif self._ways is not None:
            self._choose_below(self._ways)
        if self._absent:
            pager.ledger.displaced(int(np.count_nonzero(table.displaced[np.add(self._absent, self._base)])))
            self._issue()

    def _close(self, kind: type[BaseException] | None) -> None:
        """An interrupt (Ctrl-C) may have struck between any two steps: then the books are put in order."""
        pager = self._pager
        if not pager.is_open(self._serving):
            return  # it was interrupted, and another thread has gone on
        if kind is not None and not issubclass(kind, Exception):
            pager.repair()
        elif self._todo:  # the loop over the experts was left early
            self._leave_early()
        else:
            self._settle_stall()
        pager.metrics.add("compute_seconds", pager.phase, self._layer, self._compute_s)
        pager.close_demand()

    def _lacking(self, slabs: np.ndarray, precision: np.ndarray) -> np.ndarray:
        """Who is demanded in more precision than is there, and waited for: bool `[n]`. Borrowed copies are begun; in `slabs`, who
        has such a copy on its way is where it will be."""
        table, pager, lacking = self._table, self._pager, np.zeros(len(slabs), dtype=bool)
        short = (slabs >= 0) & (precision[slabs] == LOW)
        if self._high is not None:
            short &= self._high[self._todo]
        if not short.any():
            return lacking
        if pager.upgrades is not None and not pager.upgrades.policy.importance:  # nobody waits
            pager.metrics.add("served_lower", pager.phase, self._layer, int(short.sum()))
            return lacking
        chosen = self._upgrades(slabs, short)
        for i in np.flatnonzero(short).tolist():
            expert, resident = self._todo[i], table.state[slabs[i]] == RESIDENT
            if chosen[expert] is Serve.WAIT:
                self._upgrading.add(expert)
                slabs[i] = table.coming(self._base + expert)
                lacking[i] = resident and table.incoming[self._base + expert] < 0
            elif not (chosen[expert] is Serve.BORROW and resident and self._borrow(expert)):
                pager.metrics.add("served_lower", pager.phase, self._layer)
        return lacking

    def _upgrades(self, slabs: np.ndarray, short: np.ndarray) -> dict[int, Serve]:
        """What is done about those that are `short` of precision, bool `[n]`."""
        table, pager = self._table, self._pager
        geometry = pager.inventory.layers[self._layer].geometry
        assert pager.upgrades is not None, "slabs of two formats have a policy"
        rates, others_s = pager.upgrades.rates[geometry], 0.0
        for expert, slab, is_short in zip(self._todo, slabs.tolist(), short.tolist()):
            if slab >= 0 and not is_short:
                others_s += rates.cpu_s(table.pool.bytes_of(slab), self._tokens_of.get(expert, 1))
        wanting = [self._todo[i] for i in np.flatnonzero(short).tolist()]
        wanting.sort(key=lambda expert: (self._rank.get(expert, len(self._rank)), -self._tokens_of.get(expert, 1)))
        borrowable = 0 if table.may_evict else table.pool.free_of(HIGH)
        return pager.upgrades.choose(geometry, wanting, table.pool.record_bytes[HIGH], others_s, pager.queued_bytes(), borrowable)

    def _borrow(self, expert: int) -> bool:
        """Begin to bring a copy of more precision that is given back afterwards; whether there is room for it."""
        slab = self._table.pool.take(HIGH) if self._table.incoming[self._base + expert] < 0 else None
        if slab is None:
            return False
        self._borrowed.add(expert)
        self._start_load(expert, Room(slab, False, None), borrowed=True)
        return True

    def _late(self) -> list[int]:
        """Who is on its way, and is not there in a copy that serves."""
        tickets, table = self._pager.tickets, self._table
        late = [expert for expert in self._todo if ExpertId(self._layer, expert) in tickets and expert not in self._borrowed]
        if table.pool.precision is None:
            return late
        return [e for e in late if e in self._upgrading or table.state[table.slab_of[self._base + e]] != RESIDENT]

    def _settle_stall(self) -> None:
        """What waiting says about the cost of a miss, and about the guess it waited behind."""
        if self._asked or self._guess is not None:
            ended_s = (self._guess.ended_s or time.perf_counter()) if self._guess is not None else 0.0
            self._pager.ledger.waited(self._stall_s, len(self._asked), ended_s - self._began_s)

    @property
    def computes_below(self) -> bool:
        """Some of its misses will be lent from the host tier."""
        return bool(self._below.experts)

    def groups(self, in_order: bool) -> Iterator[Group]:
        """What can be computed now, until every expert was; by ascending id if `in_order`, else by arrival.

        Weights and addresses are good until the next group is asked for. A group is never empty.
        """
        while self._todo:
            group = self._pager.changes.make(self._next_group, in_order)
            if not group:
                first = self._todo[:1] if in_order else self._todo
                self._wait([self._tickets[e] for e in first if e in self._tickets])
                continue
            began_s = time.perf_counter()
            yield group
            self._computed(group, began_s)

    def _computed(self, group: Group, began_s: float) -> None:
        ended_s = time.perf_counter()
        self._compute_s += ended_s - began_s
        if self._pager.timeline is not None:
            name = f"layer {self._layer}" + (" on host" if group.on_host else "")
            self._pager.timeline.span("compute", name, began_s, ended_s, experts=group.experts)
        self._pager.changes.make(self._take_back, group.experts, group.on_host)

    # -- in a change
    def _next_group(self, in_order: bool) -> Group:
        group = self._lend(in_order)
        if not group and self._below.experts:
            group = self._lend_below(in_order)
        if not group and self._absent:
            self._issue(must=in_order and self._todo[0] not in self._tickets)
        return group

    def _slabs(self, experts: list[int]) -> np.ndarray:
        """int32 `[n]`: where each expert is or will be, -1 for nowhere."""
        if self._all_slabs is not None:  # then nobody asks for a part of them
            return self._all_slabs
        if not experts:
            return np.empty(0, dtype=np.int32)
        slabs = self._table.slab_of[np.add(experts, self._base)]
        if self._borrowed:
            slabs = np.where([e in self._borrowed for e in experts], self._table.incoming[np.add(experts, self._base)], slabs)
        return slabs

    def _count(self, late: list[int]) -> None:
        pager, counted = self._pager, self._counted
        if counted == ():
            return  # nobody asked: experts that are brought in at the start
        pager.metrics.count_experts(self._layer, self._todo, self._absent + late)
        misses = len(self._absent) + len(late)
        pager.misses_this_layer = misses
        pager.misses_this_step += misses
        demanded = len(self._todo)
        if counted is not None:
            demanded = sum(expert in counted for expert in self._todo)
            late = [expert for expert in late if expert in counted]
            misses = len(late) + sum(expert in counted for expert in self._absent)
        pager.metrics.count_demand(pager.phase, self._layer, demanded - misses, misses, len(late))

    def _lend(self, in_order: bool) -> Group:
        """What lies on the device and can be computed now; in order: only up to the first expert that does not."""
        experts, slabs = self._todo, self._slabs(self._todo)
        if self._all_slabs is None:
            resident = (slabs >= 0) & (self._table.state[slabs] == RESIDENT)
            if self._upgrading or self._borrowed:
                ready = self._table.state[slabs] == READY
                resident = (resident | ready) & [e not in self._tickets and e not in self._absent for e in experts]
            if in_order and not resident.all():
                resident[resident.argmin() :] = False
            experts, slabs = [e for e, here in zip(experts, resident.tolist()) if here], slabs[resident]
            if self._absent:  # somebody waits for a slab: one at a time
                experts, slabs = experts[:1], slabs[:1]
        return Group(experts, self._table.pool, slabs)

    def _leave_early(self) -> None:
        """Who was not computed is left. What comes for them becomes resident, and what they borrowed is given back."""
        table, flat = self._table, np.add(self._todo, self._base)
        slabs = np.concatenate([table.slab_of[flat], table.incoming[flat]])
        self._leave(slabs[slabs >= 0])
        for expert in self._borrowed.intersection(self._todo):
            if table.is_ready(self._base + expert):
                table.give_back_borrowed(self._base + expert)
        if self._borrowed:
            self._pager.transfer.wake()
        for host in self._pager.hosts:
            host.let_go()

    def _leave(self, slabs: np.ndarray) -> None:
        self._pager.transfer.released(self._pager.inventory.layers[self._layer].geometry, slabs)
        if self._table.leave_demand(slabs):
            self._pager.transfer.wake()  # somebody may move there

    def _give_back(self, computed: list[int]) -> None:
        """Borrowed copies have served; the resident ones, which were kept meanwhile, are left too."""
        table = self._table
        for expert in self._borrowed.intersection(computed):
            table.give_back_borrowed(self._base + expert)
            self._borrowed.discard(expert)
            table.leave_demand(table.slab_of[[self._base + expert]])
        self._pager.transfer.wake()  # somebody may move into the slabs

    def _take_back(self, computed: list[int], on_host: bool) -> None:
        """These experts were computed; their slabs protect themselves by what they are worth from now on."""
        slabs = self._slabs(computed)
        if on_host:
            self._below.take_back(computed, self._counted)
            self._leave(slabs[slabs >= 0])
        else:
            if self._table.pool.precision is not None and self._counted != ():
                self._count_formats(computed, self._table.pool.precision[slabs])
            self._table.used(slabs, self._pager.tick)
            self._leave(slabs)
            if self._borrowed:
                self._give_back(computed)
        if len(computed) == len(self._todo):
            self._todo = []
        else:
            done = set(computed)
            self._todo = [expert for expert in self._todo if expert not in done]
        if self._absent:
            self._issue()

    def _count_formats(self, computed: list[int], precisions: np.ndarray) -> None:
        pager = self._pager
        tokens = np.array([self._tokens_of.get(expert, 1) for expert in computed])
        low = int(tokens[precisions == LOW].sum())
        pager.metrics.add("computed_high", pager.phase, self._layer, int(tokens.sum()) - low)
        pager.metrics.add("computed_low", pager.phase, self._layer, low)

    # -- misses that are computed below the device; in a change
    def _choose_below(self, ways: Ways) -> None:
        missing = sorted([*self._absent, *self._tickets])
        tokens = dict(zip(self._todo, self._tokens)) if self._tokens is not None else {}
        self._below.choose(ways, missing, self._tickets, tokens)
        self._absent = [expert for expert in self._absent if expert not in self._below.experts]
        self._tickets = {expert: ticket for expert, ticket in self._tickets.items() if expert not in self._below.experts}

    def _lend_below(self, in_order: bool) -> Group:
        group, gone = self._below.lend(self._todo, in_order)
        for expert in gone:
            ticket = self._pager.tickets.get(ExpertId(self._layer, expert))
            if ticket is not None:
                self._tickets[expert] = ticket
            elif self._table.slab_of[self._base + expert] < 0:
                self._absent = sorted([*self._absent, expert])
        return group

    # -- copies; in a change
    def _precision(self, expert: int) -> int:
        """In which format an absent expert is brought in."""
        low = self._high is not None and not self._high[expert]
        return LOW if low and self._table.pool.formats > 1 and self._table.pool.capacity_of(LOW) else HIGH

    def _issue(self, must: bool = False) -> None:
        """Start copies for absent experts, in id order, as far as slabs of their format can be taken.

        With `must`, when nothing of the pool can be taken and nothing is on its way, give up the demanded resident that is
        computed last: it is read twice, which only the smallest pools ever see.
        """
        pager, full = self._pager, set[int]()
        for expert in tuple(self._absent):
            precision = self._precision(expert)
            if precision in full:
                continue
            streaming = self._keep is not None and expert not in self._keep
            room = pager.make_room(self._layer, streaming, precision=precision)
            if room is None and must and not pager.tickets:
                room = pager.make_room(self._layer, streaming, True, precision) or self._give_up_last(streaming, precision)
            must = False
            if room is None:
                full.add(precision)
                if len(full) == self._table.pool.formats:
                    return
                continue
            self._absent.remove(expert)
            self._start_load(expert, room)

    def _start_load(self, expert: int, room: Room, borrowed: bool = False) -> None:
        self._tickets[expert] = ticket = self._pager.start_load(ExpertId(self._layer, expert), room, borrowed)
        self._asked.add(ticket)

    def _give_up_last(self, streaming: bool, precision: int) -> Room | None:
        table = self._table
        for expert in reversed(self._todo[1:]):
            slab = table.slab_of[self._base + expert]
            if slab >= 0 and table.demanded[slab] and not table.pinned[slab] and table.pool.precision_of(slab) == precision:
                table.demanded[slab] = False
                room = self._pager.make_room(self._layer, streaming, True, precision)
                assert room is not None, "a resident that was given up makes room"
                if expert not in self._below.experts:
                    self._absent = sorted([*self._absent, expert])
                return room
        return None

    def _arrived(self, expert: int, ticket: Ticket) -> None:
        """There is a copy that can be computed; an upgrade may still be wanted, or have failed: then the old copy serves."""
        failed = ticket.error is not None and ticket in self._asked
        if failed:
            self._borrowed.discard(expert)
            self._pager.metrics.add("served_lower", self._pager.phase, self._layer)
        if expert not in self._upgrading:
            return
        done = failed or self._table.there_in(self._base + expert, HIGH)
        self._table.demanded[self._table.slab_of[self._base + expert]] = done
        if done:
            self._upgrading.discard(expert)
        else:  # what was on its way was the other format, or it failed and this demand has not asked for it
            self._absent = sorted([*self._absent, expert])

    def _wait(self, tickets: list[Ticket]) -> None:
        """Until one of `tickets`, or if there are none any copy at all, has ended; a failed one raises TransferError. Not in a
        change."""
        pager = self._pager
        waiting = tickets or pager.changes.make(self._any_copies)
        if not waiting:
            return
        began_s = time.perf_counter()
        pager.transfer.wait_any(waiting)
        ended_s = time.perf_counter()
        if pager.timeline is not None:
            pager.timeline.span("stall", f"layer {self._layer}", began_s, ended_s)
        pager.changes.make(self._waited, ended_s - began_s)

    def _any_copies(self) -> list[Ticket]:
        waiting = list(self._pager.tickets.values())
        if not waiting:  # the last copy ended between two looks; now there is a slab
            self._issue(must=True)
            assert self._tickets or self._lend(in_order=False), "no slab can be taken: the pool is too small"
        return waiting

    def _waited(self, seconds: float) -> None:
        """Some copies have ended; the next ones are asked for."""
        pager = self._pager
        self._stall_s += seconds
        pager.metrics.add("stall_seconds", pager.phase, self._layer, seconds)
        for expert, ticket in list(self._tickets.items()):
            if not ticket.done:
                continue
            del self._tickets[expert]
            slab = self._table.slab_of[self._base + expert]
            if slab >= 0 and self._table.state[slab] == RESIDENT:
                self._arrived(expert, ticket)
                continue
            if ticket.error is None:
                continue
            if isinstance(ticket.error, ClosedError):
                raise ticket.error
            if ticket in self._asked:
                raise TransferError(
                    f"expert {expert} of MoE layer {self._layer} could not be brought in: {ticket.error}. "
                    "This request failed; the engine can go on with the next one."
                ) from ticket.error
            self._absent.append(expert)  # a failed guess, or a copy that a failed request left behind: ask for it now
            self._absent.sort()
        self._issue()
