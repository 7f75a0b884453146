"""The experts of the running layer, lent out inside a `with`: what is here at once, what is missing as it arrives.

They come in groups, each computed by one call; the slabs of a group stay protected until the next group is asked for, and the
books are settled once per group. Two orders. By arrival (decode): residents first, then whatever has arrived; the caller combines
by expert id itself. By id (prefill): the caller can add results as it goes, while later ids are on their way.
With everything resident a layer is one group. Demands larger than the pool are served in waves: groups of one, so that a slab is
taken again as soon as its expert was computed. Two slabs suffice.
Where there are other ways than waiting (miss.py), some of the missing experts are lent straight from the host tier: as a group of
their own, after what lies on the device, so that work launched there runs beside. They take no slab.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from vismoe.errors import ClosedError, TransferError
from vismoe.paging.below import Below
from vismoe.paging.lent import Group
from vismoe.paging.miss import Ways
from vismoe.paging.page_table import RESIDENT, Room
from vismoe.paging.transfer import Ticket
from vismoe.types import ExpertId

if TYPE_CHECKING:
    from vismoe.paging.pager import Pager

__all__ = ["Demand"]


class Demand:
    """Made by `Pager.demand`; used once."""

    def __init__(
        self,
        pager: "Pager",
        layer: int,
        experts: Sequence[int],
        keep: Collection[int] | None,
        counted: Collection[int] | None,
        tokens: Sequence[int] | None,
        ways: Ways | None,
    ):
        self._pager, self._layer, self._keep = pager, layer, keep
        self._table = pager.table_of[layer]
        self._base = self._table.base[layer]
        self._todo = list(experts)  # not computed yet, ascending
        self._absent: list[int] = []  # waiting for a slab, ascending
        self._tickets: dict[int, Ticket] = {}  # waiting for a copy
        self._below = Below(pager, layer)
        self._all_slabs: np.ndarray | None = None  # of the demand, where all of it is resident
        self._counted, self._tokens, self._ways = counted, tokens, ways
        self._compute_s = self._stall_s = self._began_s = 0.0
        self._copies = 0  # that it asked for
        self._guess: Ticket | None = None  # what was on its way, undemanded, when this demand came

    def __enter__(self) -> "Demand":
        pager, table = self._pager, self._table
        with pager.lock:
            pager.open_demand(self._layer)
            table.enter_layer(self._layer)
            if pager.tickets:
                self._guess, self._began_s = pager.guess_on_the_way(), time.perf_counter()
            slabs = self._slabs(self._todo)
            present = slabs >= 0
            if not present.all():
                self._absent = [expert for expert, here in zip(self._todo, present.tolist()) if not here]
            here = slabs[present] if self._absent else slabs
            stays: bool | np.ndarray = True
            if self._keep is not None:
                stays = np.array([e in self._keep for e, p in zip(self._todo, present.tolist()) if p], dtype=bool)
            guesses = table.enter_demand(here, stays)
            if guesses:
                pager.ledger.used(guesses, guesses * table.pool.layout.record_bytes)
            late = [] if not pager.tickets else [e for e in self._todo if ExpertId(self._layer, e) in pager.tickets]
            for expert in late:
                self._tickets[expert] = pager.tickets[ExpertId(self._layer, expert)]
            self._count(late)
            if not self._absent and not late:
                self._all_slabs = slabs
            elif self._ways is not None:
                self._choose_below(self._ways)
            if self._absent:
                pager.ledger.displaced(int(np.count_nonzero(table.displaced[np.add(self._absent, self._base)])))
                self._issue()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing of this demand stays protected; copies under way end as ordinary residents.

        An interrupt (Ctrl-C) may have struck between any two changes: then the books are put in order.
        """
        pager = self._pager
        with pager.lock:
            if kind is not None and not issubclass(kind, Exception):
                pager.repair()
            elif self._todo:  # the loop over the experts was left early
                slabs = self._slabs(self._todo)
                self._leave(slabs[slabs >= 0])
                if pager.host is not None:
                    pager.host.let_go()
            else:
                self._settle_stall()
            pager.metrics.add("compute_seconds", pager.phase, self._layer, self._compute_s)
            pager.close_demand()

    def _settle_stall(self) -> None:
        """What waiting says about the cost of a miss, and about the guess it waited behind."""
        if self._copies or self._guess is not None:
            ended_s = (self._guess.ended_s or time.perf_counter()) if self._guess is not None else 0.0
            self._pager.ledger.waited(self._stall_s, self._copies, ended_s - self._began_s)

    @property
    def computes_below(self) -> bool:
        """Some of its misses will be lent from the host tier."""
        return bool(self._below.experts)

    def groups(self, in_order: bool) -> Iterator[Group]:
        """What can be computed now, until every expert was; by ascending id if `in_order`, else by arrival.

        Weights and addresses are good until the next group is asked for. A group is never empty.
        """
        while self._todo:
            with self._pager.lock:
                group = self._lend(in_order)
                if not group and self._below.experts:
                    group = self._lend_below(in_order)
                if not group and self._absent:
                    self._issue(must=in_order and self._todo[0] not in self._tickets)
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
        with self._pager.lock:
            self._take_back(group.experts, group.on_host)

    # -- the books; under the lock
    def _slabs(self, experts: list[int]) -> np.ndarray:
        """int32 `[n]`: where each expert is or will be, -1 for nowhere."""
        if self._all_slabs is not None:  # then nobody asks for a part of them
            return self._all_slabs
        return self._table.slab_of[np.add(experts, self._base)] if experts else np.empty(0, dtype=np.int32)

    def _count(self, late: list[int]) -> None:
        pager, counted = self._pager, self._counted
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
            if in_order and not resident.all():
                resident[resident.argmin() :] = False
            experts, slabs = [e for e, here in zip(experts, resident.tolist()) if here], slabs[resident]
            if self._absent:  # somebody waits for a slab: one at a time
                experts, slabs = experts[:1], slabs[:1]
        return Group(experts, self._table.pool, slabs)

    def _leave(self, slabs: np.ndarray) -> None:
        self._pager.transfer.released(self._pager.inventory.layers[self._layer].geometry, slabs)
        self._table.leave_demand(slabs)

    def _take_back(self, computed: list[int], on_host: bool) -> None:
        """These experts were computed; their slabs protect themselves by what they are worth from now on."""
        slabs = self._slabs(computed)
        if on_host:
            self._below.take_back(computed, self._counted)
            self._leave(slabs[slabs >= 0])
        else:
            self._leave(slabs)
            self._table.used(slabs, self._pager.tick)
        if len(computed) == len(self._todo):
            self._todo = []
        else:
            done = set(computed)
            self._todo = [expert for expert in self._todo if expert not in done]
        if self._absent:
            self._issue()

    # -- misses that are computed below the device; under the lock
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

    # -- copies; under the lock
    def _issue(self, must: bool = False) -> None:
        """Start copies for absent experts, in id order, as far as slabs can be taken.

        With `must`, when nothing of the pool can be taken and nothing is on its way, give up the demanded resident that is
        computed last: it is read twice, which only the smallest pools ever see.
        """
        pager = self._pager
        while self._absent:
            expert = self._absent[0]
            streaming = self._keep is not None and expert not in self._keep
            room = pager.make_room(self._layer, streaming)
            if room is None and must and not pager.tickets:
                room = pager.make_room(self._layer, streaming, must=True) or self._give_up_last(streaming)
            if room is None:
                return
            must = False
            self._copies += 1
            self._absent.pop(0)
            self._tickets[expert] = pager.start_load(ExpertId(self._layer, expert), room)

    def _give_up_last(self, streaming: bool) -> Room | None:
        table = self._table
        for expert in reversed(self._todo[1:]):
            slab = table.slab_of[self._base + expert]
            if slab >= 0 and table.demanded[slab] and not table.pinned[slab]:
                table.demanded[slab] = False
                room = self._pager.make_room(self._layer, streaming, must=True)
                assert room is not None, "a resident that was given up makes room"
                if expert not in self._below.experts:
                    self._absent = sorted([*self._absent, expert])
                return room
        return None

    def _wait(self, tickets: list[Ticket]) -> None:
        """Until one of `tickets`, or if there are none any copy at all, has ended; a failed one raises TransferError."""
        pager = self._pager
        with pager.lock:
            waiting = tickets or list(pager.tickets.values())
            if not waiting:  # the last copy ended between two looks; now there is a slab
                self._issue(must=True)
                assert self._tickets or self._lend(in_order=False), "no slab can be taken: the pool is too small"
                return
        began_s = time.perf_counter()
        pager.transfer.wait_any(waiting)
        ended_s = time.perf_counter()
        if pager.timeline is not None:
            pager.timeline.span("stall", f"layer {self._layer}", began_s, ended_s)
        with pager.lock:
            self._stall_s += ended_s - began_s
            pager.metrics.add("stall_seconds", pager.phase, self._layer, ended_s - began_s)
            for expert, ticket in list(self._tickets.items()):
                if not ticket.done:
                    continue
                del self._tickets[expert]
                slab = self._table.slab_of[self._base + expert]
                if ticket.error is None or (slab >= 0 and self._table.state[slab] == RESIDENT):
                    continue
                if isinstance(ticket.error, ClosedError):
                    raise ticket.error
                if not ticket.speculative:
                    raise TransferError(
                        f"expert {expert} of MoE layer {self._layer} could not be brought in: {ticket.error}. "
                        "This request failed; the engine can go on with the next one."
                    ) from ticket.error
                self._absent.append(expert)  # a failed guess: ask for it properly
                self._absent.sort()
            self._issue()
