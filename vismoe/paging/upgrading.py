"""The experts of one demand in slabs of two formats: which wait for more precision, borrow a copy of it, or serve as they are."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from vismoe.paging.lent import Group
from vismoe.paging.page_table import READY, RESIDENT, Room
from vismoe.paging.residency import Residency
from vismoe.paging.tickets import Ticket
from vismoe.precision.rules import Serve
from vismoe.types import HIGH, LOW


class Upgrading:
    """`high`: bool `[E]`, which are wanted in the more precise format (None: all);
    `first`: which get it first where not all can."""

    def __init__(self, core: Residency, layer: int, high: np.ndarray | None, first: Sequence[int]):
        self._core, self._layer, self._high = core, layer, high
        self._table = core.table_of[layer]
        self._base = self._table.base[layer]
        self._rank = {expert: rank for rank, expert in enumerate(first)}
        self._waiting: set[int] = set()  # there in less precision than demanded, and waited for
        self._borrowed: set[int] = set()  # to be computed from a copy of more precision than their resident one

    def precision(self, expert: int) -> int:
        """In which format an absent expert is brought in."""
        low = self._high is not None and not self._high[expert]
        return LOW if low and self._table.pool.capacity_of(LOW) else HIGH

    def waits_for(self, expert: int) -> bool:
        """It is there in less precision than was demanded, and its copy of more is waited for."""
        return expert in self._waiting

    def lacking(
        self, todo: Sequence[int], slabs: np.ndarray, tokens: Mapping[int, int], start_load: Callable[[int, Room, bool], None]
    ) -> np.ndarray:
        """Which of `todo` are demanded in more precision than is there, and waited for: bool `[n]`. Borrowed copies are begun; in
        `slabs` `[n]`, one that has such a copy on its way is where it will be."""
        table, core, lacking = self._table, self._core, np.zeros(len(slabs), dtype=bool)
        assert table.pool.precision is not None
        short = (slabs >= 0) & (table.pool.precision[slabs] == LOW)
        if self._high is not None:
            short &= self._high[todo]
        if not short.any():
            return lacking
        if core.upgrades is not None and not core.upgrades.policy.importance:  # nothing is waited for
            core.metrics.add("served_lower", core.phase, self._layer, int(short.sum()))
            return lacking
        chosen = self._choose(todo, slabs, short, tokens)
        for i in np.flatnonzero(short).tolist():
            expert, resident = todo[i], table.state[slabs[i]] == RESIDENT
            if chosen[expert] is Serve.WAIT:
                self._waiting.add(expert)
                slabs[i] = table.coming(self._base + expert)
                lacking[i] = resident and table.incoming[self._base + expert] < 0
            elif not (chosen[expert] is Serve.BORROW and resident and self._borrow(expert, start_load)):
                core.metrics.add("served_lower", core.phase, self._layer)
        return lacking

    def _choose(self, todo: Sequence[int], slabs: np.ndarray, short: np.ndarray, tokens: Mapping[int, int]) -> dict[int, Serve]:
        """What is done about those that are `short` of precision, bool `[n]`."""
        table, core = self._table, self._core
        geometry = core.inventory.layers[self._layer].geometry
        assert core.upgrades is not None, "slabs of two formats have a policy"
        rates, others_s = core.upgrades.rates[geometry], 0.0
        for expert, slab, is_short in zip(todo, slabs.tolist(), short.tolist()):
            if slab >= 0 and not is_short:
                others_s += rates.cpu_s(table.pool.bytes_of(slab), tokens.get(expert, 1))
        wanting = [todo[i] for i in np.flatnonzero(short).tolist()]
        wanting.sort(key=lambda expert: (self._rank.get(expert, len(self._rank)), -tokens.get(expert, 1)))
        borrowable = 0 if table.may_evict else table.pool.free_of(HIGH)
        nbytes = core.copied_bytes(geometry), table.pool.record_bytes[HIGH]
        return core.upgrades.choose(geometry, wanting, *nbytes, others_s, core.queued_bytes(), borrowable)

    def _borrow(self, expert: int, start_load: Callable[[int, Room, bool], None]) -> bool:
        """Begin to bring a copy of more precision that is given back afterwards; whether there is room for it."""
        slab = self._table.pool.take(HIGH) if self._table.incoming[self._base + expert] < 0 else None
        if slab is None:
            return False
        self._borrowed.add(expert)
        start_load(expert, Room(slab), True)
        return True

    def late(self, coming: Sequence[int]) -> list[int]:
        """Which of `coming` (on their way) are not there in a copy that serves."""
        state, slab_of = self._table.state, self._table.slab_of
        return [
            expert
            for expert in coming
            if expert in self._waiting or (expert not in self._borrowed and state[slab_of[self._base + expert]] != RESIDENT)
        ]

    def lendable(
        self, experts: Sequence[int], slabs: np.ndarray, resident: np.ndarray, unready: Sequence[Collection[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(slabs, bool: it can be computed from there), both `[n]`, given where the resident copies are. `unready`: experts that
        wait for a copy, or for a slab."""
        if not (self._waiting or self._borrowed):
            return slabs, resident
        borrowed = np.array([expert in self._borrowed for expert in experts], dtype=bool)
        slabs = np.where(borrowed, self._table.incoming[np.add(experts, self._base)], slabs)
        there = np.isin(self._table.state[slabs], (RESIDENT, READY)) & (slabs >= 0)
        return slabs, there & np.array([not any(expert in each for each in unready) for expert in experts], dtype=bool)

    def is_wanted_still(self, expert: int, ticket: Ticket, asked: bool) -> bool:
        """A copy has ended, and the expert is there. Returns whether to ask for the upgrade again. If this demand's own copy
        failed (`asked`), the old copy serves."""
        failed = ticket.error is not None and asked
        if failed:
            self._borrowed.discard(expert)
            self._core.metrics.add("served_lower", self._core.phase, self._layer)
        if expert not in self._waiting:
            return False
        done = failed or self._table.there_in(self._base + expert, HIGH)
        self._table.demanded[self._table.slab_of[self._base + expert]] = done
        if done:
            self._waiting.discard(expert)
        return not done  # what was on its way was the other format, or it failed and this demand has not asked for it

    def give_back(self, computed: Sequence[int]) -> None:
        """Borrowed copies have served; the resident ones, which were kept meanwhile, are left too."""
        if not self._borrowed:
            return
        table = self._table
        for expert in self._borrowed.intersection(computed):
            table.give_back_borrowed(self._base + expert)
            self._borrowed.discard(expert)
            table.leave_demand(table.slab_of[[self._base + expert]])
        self._core.link.wake()  # an expert may move into the slabs

    def leave_early(self, left: Sequence[int]) -> None:
        """`left` are not going to be computed."""
        for expert in self._borrowed.intersection(left):
            if self._table.is_ready(self._base + expert):
                self._table.give_back_borrowed(self._base + expert)
        if self._borrowed:
            self._core.link.wake()

    def count(self, group: Group, tokens: Mapping[int, int]) -> None:
        """Computations by format."""
        core, precisions = self._core, group.precisions
        assert precisions is not None
        of_each = np.array([tokens.get(expert, 1) for expert in group.experts])
        low = int(of_each[precisions == LOW].sum())
        core.metrics.add("computed_high", core.phase, self._layer, int(of_each.sum()) - low)
        core.metrics.add("computed_low", core.phase, self._layer, low)
