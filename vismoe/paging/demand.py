"""The experts of the running layer, lent out one at a time inside a `with`.

Two orders. `as_ready` (decode): residents first, then whatever arrives; the caller combines by expert id itself.
`in_order` (prefill): ascending id, so that the caller can add results as it goes, while later ids are on their way.
Demands larger than the pool are served in waves: a slab is taken again as soon as its expert was computed. Two slabs suffice.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from vismoe.errors import ClosedError, TransferError
from vismoe.paging.page_table import LOADING, RESIDENT, Room
from vismoe.paging.transfer import Ticket
from vismoe.types import ExpertId

if TYPE_CHECKING:
    from vismoe.paging.pager import Pager

Weights = dict[str, torch.Tensor]


class Demand:
    """Made by `Pager.demand`; used once."""

    def __init__(
        self, pager: "Pager", layer: int, experts: Sequence[int], keep: Collection[int] | None, counted: Collection[int] | None
    ):
        self._pager, self._layer, self._keep = pager, layer, keep
        self._table = pager.table_of[layer]
        self._base = self._table.base[layer]
        self._todo = list(experts)  # not computed yet, ascending
        self._absent: list[int] = []  # no slab yet, ascending
        self._tickets: dict[int, Ticket] = {}
        self._counted = counted
        self._lent: tuple[int, int] | None = None  # (expert, slab)

    def __enter__(self) -> "Demand":
        pager, table = self._pager, self._table
        with pager.lock:
            pager.check_open()
            pager.open_demand()
            pager.running_layer = self._layer
            table.enter_layer(self._layer)
            pager.tick += 1
            pager.metrics.add("steps", pager.phase, self._layer)
            for expert in self._todo:
                slab = int(table.slab_of[self._base + expert])
                resident = slab >= 0 and table.state[slab] == RESIDENT
                late = slab >= 0 and table.state[slab] == LOADING
                if slab >= 0:
                    if table.enter_demand(slab, stays=self._keep is None or expert in self._keep):
                        pager.count_use_of_guess()
                    if late:
                        self._tickets[expert] = pager.tickets[ExpertId(self._layer, expert)]
                else:
                    self._absent.append(expert)
                if self._counted is None or expert in self._counted:
                    pager.metrics.add("hits" if resident else "misses", pager.phase, self._layer)
                    if late:
                        pager.metrics.add("late", pager.phase, self._layer)
                if not resident:
                    pager.misses_this_step += 1
            self._issue()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing of this demand stays leased or protected; copies under way end as ordinary residents."""
        self._take_back(computed=False)
        with self._pager.lock:
            self._absent.clear()
            for expert in self._todo:
                slab = self._table.slab_of[self._base + expert]
                if slab >= 0:
                    self._table.leave_demand(slab)
            self._pager.close_demand()

    def as_ready(self) -> Iterator[tuple[int, Weights]]:
        """(expert, weights) in the order of arrival; the weights are leased until the next one is asked for."""
        while self._todo:
            with self._pager.lock:
                expert = next((e for e in self._todo if self._is_resident(e)), None)
                if expert is None:
                    self._issue()
            if expert is None:
                self._wait([self._tickets[e] for e in self._todo if e in self._tickets])
            else:
                yield from self._lend(expert)

    def in_order(self) -> Iterator[tuple[int, Weights]]:
        """(expert, weights) by ascending id; the weights are leased until the next one is asked for."""
        while self._todo:
            expert = self._todo[0]
            with self._pager.lock:
                resident = self._is_resident(expert)
                if not resident and expert not in self._tickets:
                    self._issue(must=True)
            if resident:
                yield from self._lend(expert)
            else:
                self._wait([self._tickets[expert]] if expert in self._tickets else [])

    # -- one lease
    def _lend(self, expert: int) -> Iterator[tuple[int, Weights]]:
        with self._pager.lock:
            slab = int(self._table.slab_of[self._base + expert])
            assert self._table.state[slab] == RESIDENT
            self._table.leases[slab] += 1
            self._lent = (expert, slab)
        yield expert, self._table.pool.weights(slab)
        self._take_back(computed=True)

    def _take_back(self, computed: bool) -> None:
        """End the lease, if there is one. Also called when the loop over the experts was left early."""
        pager, table = self._pager, self._table
        with pager.lock:
            if self._lent is None:
                return
            (expert, slab), self._lent = self._lent, None
            pager.transfer.released(pager.inventory.layers[self._layer].geometry, slab)
            table.leases[slab] -= 1
            table.leave_demand(slab)
            if computed:
                table.used(slab, pager.tick)
                self._todo.remove(expert)
                self._issue()

    def _is_resident(self, expert: int) -> bool:
        slab = self._table.slab_of[self._base + expert]
        return slab >= 0 and self._table.state[slab] == RESIDENT

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
            self._absent.pop(0)
            self._tickets[expert] = pager.start_load(ExpertId(self._layer, expert), room)

    def _give_up_last(self, streaming: bool) -> Room | None:
        table = self._table
        for expert in reversed(self._todo[1:]):
            slab = table.slab_of[self._base + expert]
            if slab >= 0 and table.demanded[slab] and not table.pinned[slab] and not table.leases[slab]:
                table.demanded[slab] = False
                self._absent.append(expert)
                self._absent.sort()
                return self._pager.make_room(self._layer, streaming, must=True)
        return None

    def _wait(self, tickets: list[Ticket]) -> None:
        """Until one of `tickets`, or if there are none any copy at all, has ended; a failed one raises TransferError."""
        pager = self._pager
        with pager.lock:
            waiting = tickets or list(pager.tickets.values())
            if not waiting:  # the last copy ended between two looks; now there is a slab
                self._issue(must=True)
                assert self._tickets or any(self._is_resident(e) for e in self._todo), (
                    "no slab can be taken: the pool is too small"
                )
                return
        began_s = time.perf_counter()
        pager.transfer.wait_any(waiting)
        with pager.lock:
            pager.metrics.add("stall_seconds", pager.phase, self._layer, time.perf_counter() - began_s)
            for expert, ticket in list(self._tickets.items()):
                if not ticket.done:
                    continue
                del self._tickets[expert]
                if ticket.error is None or self._is_resident(expert):
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
