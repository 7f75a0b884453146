"""Experts that move between the two formats of a pair while the model runs: which is next, and what has become of it.

Where every expert is resident in one format or the other (`all_resident`), none is evicted: a promotion takes a free slab of the
more precise format, its old copy serves until the new one is registered and leaves its slab to a demotion, which leaves its own
to the next promotion. So the slabs beyond one for each expert bound the promotions in flight, and a transition that fails changes
nothing: it is tried again with the next targets (DynaExq 3.3, 3.4).
All methods are called under the pager's lock and never block.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from vismoe.metrics import Metrics
from vismoe.paging.page_table import PageTable
from vismoe.paging.tickets import Ticket
from vismoe.types import HIGH, LOW, ExpertId, Phase

logger = logging.getLogger(__name__)


class Transitions:
    """`table_of[layer]`: its page table. `high`: which experts belong in the more precise format, bool `[L, E]`."""

    def __init__(self, table_of: Sequence[PageTable], metrics: Metrics):
        self._table_of, self._metrics = table_of, metrics
        self._pools = list({id(table): table.pool for table in table_of}.values())
        self.all_resident = False
        self.high = np.zeros(metrics.demanded.shape, dtype=bool)
        self._waiting: tuple[deque[ExpertId], deque[ExpertId]] = (deque(), deque())  # for HIGH, for LOW; first come first

    def begin(self, high: np.ndarray) -> None:
        """Every expert is going to be resident, in the format that `high` bool `[L, E]` says."""
        self.all_resident = True
        self.high[:] = high
        for table in self._table_of:
            table.may_evict = False

    def retarget(self, high: np.ndarray, promote: Iterable[ExpertId], demote: Iterable[ExpertId]) -> None:
        """From now on `high` bool `[L, E]` says which experts belong where; those named move first, in this order, then all
        others that are not where they belong."""
        self.high[:] = high
        for precision, order in ((HIGH, promote), (LOW, demote)):
            self._waiting[precision].clear()
            self._waiting[precision].extend(dict.fromkeys([*order, *self._misplaced(precision)]))

    def _misplaced(self, precision: int) -> list[ExpertId]:
        """Which experts belong in this format, and are, or soon will be, in the other one."""
        found = []
        for layer, table in enumerate(self._table_of):
            bound_for = table.bound_for(layer)
            wanted = self.high[layer, : len(bound_for)] == (precision == HIGH)
            found += [ExpertId(layer, int(e)) for e in np.flatnonzero(wanted & (bound_for == 1 + _other(precision)))]
        return found

    def next(self) -> tuple[ExpertId, int] | None:
        """(the expert that moves next, the slab taken for it), or None: nothing can be moved now."""
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
                return expert, slab
        return None

    def ended(self, ticket: Ticket, phase: Phase) -> None:
        """A transition's copy is complete, or has failed: then the old copy goes on serving."""
        table = self._table_of[ticket.expert.layer]
        if ticket.error is not None:
            self._metrics.add("failed_transitions", phase, ticket.expert.layer)
            logger.warning("%s stays in its format: %s", ticket.expert, ticket.error)
        else:
            counter = "promotions" if table.pool.precision_of(ticket.slab) == HIGH else "demotions"
            self._metrics.add(counter, phase, ticket.expert.layer)


def _other(precision: int) -> int:
    return LOW if precision == HIGH else HIGH
