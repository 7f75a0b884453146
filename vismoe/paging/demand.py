"""What the running layer wants, while it is served: which of its experts can be computed now, and which copies it waits for.

Experts come in groups, each computed by one call; the slabs of a group stay protected until it was computed, and state is settled
once per group. Two orders. By arrival (decode): residents first, then whatever has arrived; the caller combines by expert id
itself. By id (prefill): the caller can add results as it goes, while later ids are on their way.
With everything resident a layer is one group. Where an expert waits for a slab, groups are of one, or in a prompt of a quarter
of the ring, so that a slab is taken again soon after its expert was computed. Two slabs suffice. In a streamed pass
(streaming.py) what stays of the layer is fixed, and only what passes through the ring waits for slabs.
Where there are other ways than waiting (miss.py), some of the missing experts are lent straight from the host tier
(host_compute.py): as a group of their own, after what lies on the device, so that work launched there runs beside. They take no
slab. Where slabs hold two formats, a resident copy that is more precise than demanded is used; for a less precise one the demand
waits, borrows a better copy, or uses it (upgrading.py).
"""

import threading
from collections.abc import Collection, Sequence

import numpy as np

from vismoe.errors import ClosedError, TransferError
from vismoe.kernels.read import begin_reading, wait_for_reading
from vismoe.paging.host_compute import HostCompute
from vismoe.paging.lent import Group
from vismoe.paging.miss import Ways
from vismoe.paging.page_table import RESIDENT, Room
from vismoe.paging.residency import Residency
from vismoe.paging.tickets import Ticket, arrivals_of
from vismoe.paging.upgrading import Upgrading
from vismoe.types import HIGH, ExpertId

RING_GROUPS = 4  # in which a full ring is computed: one has its slabs back while copies go on into those of the others


class Demand:
    """Used once: `open`; then, while there is anything `todo`, `next_group` and `computed`, or where
    that group is empty, wait for one of the copies `awaited` (none: of `any_copies`) and say `waited`; `close`.
    """

    def __init__(
        self,
        core: Residency,
        layer: int,
        experts: Sequence[int],
        keep: Collection[int] | None = None,
        counted: Collection[int] | None = None,
        tokens: Sequence[int] | None = None,
        high: np.ndarray | None = None,
        first: Sequence[int] = (),
        ways: Ways | None = None,
        by_reading: bool = False,
    ):
        """`experts` (ascending ids) of `layer`. `ways`: what else than waiting may be done about misses; the others as of
        `Pager.demand`."""
        self._core, self._layer, self._keep, self._counted = core, layer, None if keep is None else set(keep), counted
        self._table = table = core.table_of[layer]
        self._base = table.base[layer]
        self.todo = list(experts)  # not computed yet, ascending
        self.absent: list[int] = []  # waiting for a slab, ascending
        self.tickets: dict[int, Ticket] = {}  # waiting for a copy
        self._asked: set[Ticket] = set()  # copies that it asked for itself; only their failure is its own
        self.all_slabs: np.ndarray | None = None  # of the demand, where all of it is resident
        self._tokens = dict(zip(self.todo, tokens)) if tokens is not None else {}  # that chose each; else one
        self._upgrading = Upgrading(core, layer, high, first) if table.pool.precision is not None else None
        wanted_in = self._upgrading.precision if self._upgrading is not None else None
        self.host_compute = HostCompute(core, layer, ways, wanted_in) if ways is not None else None
        one_format = self._upgrading is None and ways is None
        self._by_reading = by_reading and one_format and keep is None and not core.copies_ahead
        self.reading: list[Ticket] = []  # copies that native threads make, its own and guesses, which are lent as `coming`
        self._stall_s = self._began_s = 0.0
        self._streaming = core.streaming[core.inventory.layers[layer].geometry]
        self._instead: set[int] = set()  # of a prompt, what takes slabs that others of the layer leave
        self._guess: Ticket | None = None  # what was on its way, undemanded, when this demand came
        self._beside_promises = False  # promises were

    # -- events
    def open(self, now_s: float) -> None:
        """The layer begins: protect what is here, count, and take slabs for what is not."""
        core, table = self._core, self._table
        core.enter(self._layer, self.todo)
        if self._keep is not None and self._streaming.possible:
            lacking = table.lacking(self._layer)
            self._streaming.lacks(int(np.count_nonzero(lacking)), int(np.count_nonzero(lacking[self.todo])))
        if self._streaming.on:
            table.fix_instead(self._layer, self._keep or ())
            self._keep = set(np.flatnonzero(table.fixed_of(self._layer)).tolist())
        table.enter_layer(self._layer)
        if core.tickets:
            self._guess, self._began_s = core.guess_on_the_way(), now_s
            self._beside_promises = any(ticket.promised for ticket in core.tickets.values())
        slabs = table.slab_of[np.array(self.todo, dtype=np.intp) + self._base]
        present = slabs >= 0
        if self._upgrading is not None:
            present &= ~self._upgrading.lacking(self.todo, slabs, self._tokens, self._start_load)
        if not present.all():
            self.absent = [expert for expert, here in zip(self.todo, present.tolist()) if not here]
        here = slabs[present] if self.absent else slabs
        if self._keep is not None and table.fills_by_shares:
            self._let_in(self._keep, slabs)
        stays: bool | np.ndarray = True
        if self._keep is not None:
            stays = np.array([e in self._keep for e, p in zip(self.todo, present.tolist()) if p], dtype=bool)
        guesses = table.enter_demand(here, stays)
        if guesses and not core.copies_ahead:
            core.ledger.used(guesses, guesses * core.copied_bytes(core.inventory.layers[self._layer].geometry))
        late = self._late() if core.tickets else []
        for expert in late:
            self.tickets[expert] = core.tickets[ExpertId(self._layer, expert)]
        missing = self.absent + late
        if not (self.absent or self.tickets):
            self.all_slabs = slabs
        elif self.host_compute is not None:
            self._choose_on_host(self.host_compute)
        if self.absent:
            core.ledger.displaced(int(np.count_nonzero(table.displaced[np.add(self.absent, self._base)])))
            self._issue()
        if missing and self._by_reading:
            self._begin_reading()
        self._by_reading = False  # what is asked for from now on would not be lent as `coming`
        if self._counted != ():  # else no token asked: experts that are brought in at the start
            core.count(self._layer, self.todo, missing, len(late), self._counted)
        if core.copies_ahead:
            core.stream_after(self._layer)

    def next_group(self, in_order: bool) -> Group:
        """What can be computed now; empty: nothing, before a copy has arrived."""
        group = self._lend(in_order)
        if not group and self.host_compute is not None and self.host_compute.experts:
            group = self._lend_on_host(self.host_compute, in_order)
        if not group and self.absent:
            self._issue(must=in_order and self.todo[0] not in self.tickets)
        return group

    def with_coming(self) -> Group:
        """What can be computed now, and the copies that native threads are making; once, before `next_group`."""
        here = self._lend(in_order=False)
        slab_of = {ticket.expert.expert: ticket.slab for ticket in self.reading}
        slab_of.update(zip(here.experts, here.slabs.tolist()))
        experts = sorted(slab_of)
        group = Group(experts, self._table.pool, np.array([slab_of[expert] for expert in experts], dtype=np.int32))
        group.coming = arrivals_of(self.reading)
        for ticket, arrival in zip(self.reading, group.coming):
            arrival.at = experts.index(ticket.expert.expert)
        return group

    def read(self, group: Group) -> None:
        """A group with what was coming was computed, but for what could not be read: for that, raises as `waited`."""
        failed, waited_s = self._end_reading(), group.waited_s
        if failed:
            there = [i for i, expert in enumerate(group.experts) if expert not in failed]
            group = Group([group.experts[i] for i in there], self._table.pool, group.slabs[there])
        self.computed(group)
        self.waited(waited_s)

    def _end_reading(self) -> set[int]:
        """Native threads have read -> the experts that are not there."""
        reading, self.reading = self.reading, []
        if not reading:
            return set()
        arrivals = arrivals_of(reading)
        wait_for_reading(arrivals)  # the demand may be left early
        for ticket, arrival in zip(reading, arrivals):
            if not ticket.done and (ticket in self._asked or not arrival.ended):  # a guess that failed is its worker's
                self._core.read(ticket)
        self._core.link.wake()
        return {ticket.expert.expert for ticket in reading if not ticket.done or ticket.error is not None}

    def computed(self, group: Group, seconds: float | None = None) -> None:
        """A group, or a part of one, was computed; its slabs protect themselves by what they are worth from now on. seconds: what
        that took the host, if measured."""
        if self._upgrading is not None and self._counted != ():
            self._upgrading.count(group, self._tokens)
        if group.on_host:
            assert self.host_compute is not None
            self.host_compute.computed(group.experts, self._counted, seconds)
            slabs = self._table.slab_of[np.add(group.experts, self._base)]
            self._leave(slabs[slabs >= 0])
        else:
            self._table.used(group.slabs, self._core.tick)
            self._leave(group.slabs)
            if self._upgrading is not None:
                self._upgrading.give_back(group.experts)
        if len(group) == len(self.todo):
            self.todo = []
        else:
            done = set(group.experts)
            self.todo = [expert for expert in self.todo if expert not in done]
        if self.absent:
            self._issue()

    def awaited(self, in_order: bool) -> list[Ticket]:
        """The copies of which one must arrive before anything can be computed; none: any copy that makes room does."""
        first = self.todo[:1] if in_order else self.todo
        return [self.tickets[expert] for expert in first if expert in self.tickets]

    def any_copies(self) -> list[Ticket]:
        """Copies in flight, whose slabs this demand can take once they are here."""
        found = list(self._core.tickets.values())
        if not found:  # the last copy ended between two looks; now there is a slab
            self._issue(must=True)
            assert self.tickets or self._lend(in_order=False), "no slab can be taken: the pool is too small"
        return found

    def waited(self, seconds: float) -> None:
        """Some copies have ended; the next ones are asked for. Raises TransferError for a failed one that this demand asked for,
        ClosedError for one that was dropped."""
        self._stall_s += seconds
        self._streaming.stall_s += seconds
        self._core.metrics.add("stall_seconds", self._core.phase, self._layer, seconds)
        for expert, ticket in list(self.tickets.items()):
            if not ticket.done:
                continue
            del self.tickets[expert]
            slab = self._table.slab_of[self._base + expert]
            if slab >= 0 and self._table.state[slab] == RESIDENT:
                if self._upgrading is not None and self._upgrading.is_wanted_still(expert, ticket, ticket in self._asked):
                    self._absent_again(expert)
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
            self._absent_again(expert)  # a failed guess, or a copy that a failed request left behind: ask for it now
        self._issue()

    def close(self, now_s: float) -> None:
        """The layer is computed, or its demand was left early: nothing stays protected, and copies under way end as ordinary
        residents. What waiting says about the cost of a miss, and about the guess it waited behind, goes into the ledger, unless
        promises were under way too."""
        self._end_reading()
        if self.todo:
            self._leave_early()
            return
        queued = [ticket.ended_s - ticket.began_s for ticket in self._asked if ticket.queued]  # the device waits for these
        self._streaming.stall_s += sum(queued)
        unknown = not all(queued)  # before the link's rate was measured
        if not unknown and (self._asked or self._guess is not None) and not (self._core.copies_ahead or self._beside_promises):
            ended_s = (self._guess.ended_s or now_s) if self._guess is not None else 0.0
            self._core.ledger.waited(self._stall_s + sum(queued), len(self._asked), ended_s - self._began_s)

    def _let_in(self, keep: set[int], slabs: np.ndarray) -> None:
        """Which experts of a prompt's layer stay, beside `keep`: while slabs are free, those that most tokens chose, within the
        layer's share; after that, what comes takes the place of others of the layer. slabs `[n]`: of what is demanded."""
        table, layer = self._table, self._layer
        passing = {expert for expert, passes in zip(self.todo, ((slabs < 0) | table.ring[slabs]).tolist()) if passes}
        coming = sorted(keep & passing)
        more = table.fill_share(layer) - len(coming)
        if more > 0:
            others = sorted(passing.difference(coming), key=lambda expert: (-self._tokens.get(expert, 1), expert))
            keep.update(others[:more])
        elif more < 0 and self.host_compute is None:  # else they may be computed below, and not come
            self._instead.update(coming[: table.leave_instead(layer, -more, keep)])

    # -- what is here, and what it is lent as
    def _late(self) -> list[int]:
        """Which experts are on their way, and not there in a copy that serves."""
        tickets = self._core.tickets
        late = [expert for expert in self.todo if ExpertId(self._layer, expert) in tickets]
        return late if self._upgrading is None else self._upgrading.late(late)

    def _lend(self, in_order: bool) -> Group:
        """What lies on the device and can be computed now; in order: only up to the first expert that does not."""
        table, experts = self._table, self.todo
        slabs = self.all_slabs
        if slabs is None or len(slabs) != len(experts):
            slabs = table.slab_of[np.add(experts, self._base)] if experts else np.empty(0, dtype=np.int32)
            resident = (slabs >= 0) & (table.state[slabs] == RESIDENT)
            if self._upgrading is not None:
                slabs, resident = self._upgrading.lendable(experts, slabs, resident, (self.tickets, self.absent))
            if in_order and not resident.all():
                resident[resident.argmin() :] = False
            experts, slabs = [e for e, here in zip(experts, resident.tolist()) if here], slabs[resident]
            if self.absent:  # an expert waits for a slab
                experts, slabs = self._giving_back(experts, slabs, in_order)
        return Group(experts, table.pool, slabs)

    def _giving_back(self, experts: list[int], slabs: np.ndarray, in_order: bool) -> tuple[list[int], np.ndarray]:
        """Those to compute first, so that slabs are free again soon: one, in a prompt a part of the ring; in a streamed decode
        pass all that pass through."""
        if in_order or not self._streaming.on:
            ring = 0 if self._keep is None else self._table.streamed_ring or min(self._table.ring_limits)
            few = max(1, ring // RING_GROUPS)
            return experts[:few], slabs[:few]
        through = self._table.ring[slabs]
        return ([e for e, t in zip(experts, through.tolist()) if t], slabs[through]) if through.any() else (experts, slabs)

    def _leave(self, slabs: np.ndarray) -> None:
        self._core.link.released(self._core.inventory.layers[self._layer].geometry, slabs)
        if self._table.leave_demand(slabs) or self._core.wants_slabs:
            self._core.link.wake()  # an expert may come there

    def _leave_early(self) -> None:
        """What was not computed is left. What comes for it becomes resident, and what was borrowed is given back."""
        table, flat = self._table, np.add(self.todo, self._base)
        slabs = np.concatenate([table.slab_of[flat], table.incoming[flat]])
        self._leave(slabs[slabs >= 0])
        if self._upgrading is not None:
            self._upgrading.leave_early(self.todo)
        for host in self._core.hosts:
            host.let_go()

    # -- misses that are computed below the device
    def _choose_on_host(self, host_compute: HostCompute) -> None:
        missing = sorted([*self.absent, *self.tickets])
        if self._upgrading is not None:  # for more precision than is there, the policy decides whether to wait
            missing = [expert for expert in missing if not self._upgrading.waits_for(expert)]
        host_compute.choose(missing, self.tickets, self._tokens)
        self.absent = [expert for expert in self.absent if expert not in host_compute.experts]
        self.tickets = {expert: ticket for expert, ticket in self.tickets.items() if expert not in host_compute.experts}

    def _lend_on_host(self, host_compute: HostCompute, in_order: bool) -> Group:
        group, gone = host_compute.lend(self.todo, in_order)
        for expert in gone:
            ticket = self._core.tickets.get(ExpertId(self._layer, expert))
            if ticket is not None:
                self.tickets[expert] = ticket
            elif self._table.slab_of[self._base + expert] < 0:
                self._absent_again(expert)
        return group

    # -- copies
    def _begin_reading(self) -> None:
        """Native threads begin with its copies, while the rest of the layer's control follows. Guesses that they have begun with
        are lent as `coming`, too."""
        for ticket in self.reading:
            ticket.runner = threading.get_ident()
        begin_reading(arrivals_of(self.reading))
        guesses = [ticket for ticket in self.tickets.values() if ticket not in self._asked and ticket.reading is not None]
        self.reading += [ticket for ticket, arrival in zip(guesses, arrivals_of(guesses)) if arrival.has_begun]

    def _absent_again(self, expert: int) -> None:
        self.absent = sorted([*self.absent, expert])

    def _issue(self, must: bool = False) -> None:
        """Start copies for absent experts, in id order, as far as slabs of their format can be taken.

        With `must`, when nothing of the pool can be taken and nothing is on its way, give up the demanded resident that is
        computed last: it is read twice, which only the smallest pools ever see.
        """
        core, full = self._core, set[int]()
        for expert in tuple(self.absent):
            precision = HIGH if self._upgrading is None else self._upgrading.precision(expert)
            if precision in full:
                continue
            streaming = self._keep is not None and expert not in self._keep
            through = streaming or self._streaming.on or expert in self._instead
            room = core.make_room(self._layer, through, precision=precision)
            if room is None and must and not core.tickets:
                room = core.make_room(self._layer, streaming, True, precision) or self._give_up_last(streaming, precision)
            must = False
            if room is None:
                full.add(precision)
                if len(full) == self._table.pool.formats:
                    return
                continue
            self.absent.remove(expert)
            self._start_load(expert, room._replace(ring=room.ring and streaming))

    def _start_load(self, expert: int, room: Room, borrowed: bool = False) -> None:
        ticket = self._core.start_load(ExpertId(self._layer, expert), room, borrowed, self._by_reading)
        self.tickets[expert] = ticket
        self._asked.add(ticket)
        if ticket.reading is not None:
            self.reading.append(ticket)

    def _give_up_last(self, streaming: bool, precision: int) -> Room | None:
        table = self._table
        for expert in reversed(self.todo[1:]):
            slab = table.slab_of[self._base + expert]
            if slab >= 0 and table.demanded[slab] and not table.pinned[slab] and table.pool.precision_of(slab) == precision:
                table.demanded[slab] = False
                room = self._core.make_room(self._layer, streaming, True, precision)
                assert room is not None, "a resident that was given up makes room"
                if self.host_compute is None or expert not in self.host_compute.experts:
                    self._absent_again(expert)
                return room
        return None
