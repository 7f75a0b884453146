"""Experts that move between the two formats of a pair while the model runs: who is next, and what has become of them.

Where every expert is resident in one format or the other (`everybody`), nobody is evicted: a promotion takes a free slab of the
more precise format, its old copy serves until the new one is registered and leaves its slab to a demotion, which leaves its own
to the next promotion. So the slabs beyond one for each expert bound the promotions in flight, and a transition that fails changes
nothing: it is tried again with the next targets (DynaExq 3.3, 3.4).
A copy of who is likely to be promoted soon may lie ready in a slab that no promotion wants; it serves nobody before that.
All methods are called under the pager's lock and never block.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from vismoe.metrics import Metrics
from vismoe.paging.page_table import PageTable
from vismoe.paging.transfer import Ticket
from vismoe.types import HIGH, LOW, ExpertId, Phase

__all__ = ["Transitions"]

logger = logging.getLogger(__name__)


class Transitions:
    """`table_of[layer]`: its page table. `high`: who belongs in the more precise format, bool `[L, E]`."""

    def __init__(self, table_of: Sequence[PageTable], metrics: Metrics):
        self._table_of, self._metrics = table_of, metrics
        self._pools = list({id(table): table.pool for table in table_of}.values())
        self.everybody = False
        self.high = np.zeros(metrics.demanded.shape, dtype=bool)
        self._waiting: tuple[deque[ExpertId], deque[ExpertId]] = (deque(), deque())  # for HIGH, for LOW; first come first
        self._likely: deque[ExpertId] = deque()
        self._ahead: ExpertId | None = None  # whose copy lies ready, or is on its way, before anybody asked for it

    def begin(self, high: np.ndarray) -> None:
        """Every expert is going to be resident, in the format that `high` bool `[L, E]` says."""
        self.everybody = True
        self.high[:] = high
        for table in self._table_of:
            table.may_evict = False

    def retarget(
        self,
        high: np.ndarray,
        promote: Iterable[ExpertId],
        demote: Iterable[ExpertId],
        likely: Iterable[ExpertId],
        phase: Phase,
    ) -> None:
        """From now on `high` bool `[L, E]` says who belongs where; those named move first, in this order, then everybody else who
        is not where it belongs."""
        self.high[:] = high
        for precision, order in ((HIGH, promote), (LOW, demote)):
            self._waiting[precision].clear()
            self._waiting[precision].extend(dict.fromkeys([*order, *self._misplaced(precision)]))
        self._likely.clear()
        self._likely.extend(likely)
        self._settle_ahead(phase)

    def _misplaced(self, precision: int) -> list[ExpertId]:
        """Who belongs in this format, and is, or soon will be, in the other one."""
        found = []
        for layer, table in enumerate(self._table_of):
            bound_for = table.bound_for(layer)
            wanted = self.high[layer, : len(bound_for)] == (precision == HIGH)
            found += [ExpertId(layer, int(e)) for e in np.flatnonzero(wanted & (bound_for == 1 + _other(precision)))]
        return found

    def next(self) -> tuple[ExpertId, int, bool] | None:
        """(who moves next, the slab taken for it, whether it only lies ready there), or None: nothing can be moved now."""
        for precision in (LOW, HIGH):
            waiting, not_yet, slab = self._waiting[precision], list[ExpertId](), None
            if not any(pool.free_of(precision) for pool in self._pools):
                continue
            while waiting and slab is None:
                expert = waiting.popleft()
                table = self._table_of[expert.layer]
                if not table.pool.free_of(precision) or table.is_coming(table.flat(expert)):
                    not_yet.append(expert)
                elif self.high[expert] == (precision == HIGH) and table.there_in(table.flat(expert), _other(precision)):
                    slab = table.pool.take(precision)
            waiting.extendleft(reversed(not_yet))
            if slab is not None:
                return expert, slab, False
        return self._next_likely()

    def _next_likely(self) -> tuple[ExpertId, int, bool] | None:
        """One copy at a time, in a slab that is not the last free one."""
        while self._likely and self._ahead is None:
            expert = self._likely.popleft()
            table = self._table_of[expert.layer]
            flat = table.flat(expert)
            if table.is_coming(flat) or not table.there_in(flat, LOW) or table.pool.free_of(HIGH) < 2:
                continue
            slab = table.pool.take(HIGH)
            assert slab is not None
            self._ahead = expert
            return expert, slab, True
        return None

    def _settle_ahead(self, phase: Phase) -> None:
        """The copy that came ahead is registered where its expert is promoted now, and given back otherwise."""
        expert, self._ahead = self._ahead, None
        if expert is None:
            return
        table = self._table_of[expert.layer]
        flat = table.flat(expert)
        if not table.lends(flat):
            return  # forgotten after an interrupt
        if self.high[expert]:
            if table.is_ready(flat):
                self._metrics.add("promotions", phase, expert.layer)
            table.keep_borrowed(flat)
        elif table.is_ready(flat):
            table.give_back_borrowed(flat)

    def ended(self, ticket: Ticket, phase: Phase) -> None:
        """A transition's copy is complete, or has failed: then the old copy goes on serving."""
        table = self._table_of[ticket.expert.layer]
        if ticket.error is not None:
            self._metrics.add("failed_transitions", phase, ticket.expert.layer)
            if self._ahead == ticket.expert:
                self._ahead = None
            logger.warning("%s stays in its format: %s", ticket.expert, ticket.error)
        elif table.borrowed[ticket.slab]:
            if self._ahead != ticket.expert:  # targets have changed meanwhile
                table.give_back_borrowed(table.flat(ticket.expert))
        else:
            counter = "promotions" if table.pool.precision_of(ticket.slab) == HIGH else "demotions"
            self._metrics.add(counter, phase, ticket.expert.layer)


def _other(precision: int) -> int:
    return LOW if precision == HIGH else HIGH
