"""How many guesses should be under way at once, on links with a latency: `python -m vismoe.eval.studies.in_flight [TRACE ...]`.

The pager copies one guess at a time: a copy under way cannot be called back, and a demand waits behind it. On a fast link
a copy is short, and the time until its first byte moves (`latency`: waking a thread, queuing, the bus) is a larger part of it;
several copies on their way hide that. Here, in virtual time only: copies wait out their latency side by side and then pass the
link one after the other, demands and guesses alike, in the order in which they were asked for.

Recorded traces with scores, or generated ones. One JSON object: decode time over that of one guess at a time.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vismoe.eval.report import study_parser, told
from vismoe.eval.studies.wrapping import GENERATED, LAYER_S, decoded
from vismoe.paging.demand import Demand
from vismoe.paging.tickets import Moved, Ticket
from vismoe.simulate.demands import Conditions, Demands, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.files import Trace
from vismoe.trace.synthetic import skewed_trace

COPIES = (1, 4, 16)  # of experts that the link does while a layer computes
LATENCIES = (0.0, 0.05, 0.2, 1.0)  # over the time of a copy
AT_ONCE = (1, 2, 4, 16)
COLUMNS = ("routing", "experts in memory", "copies per layer's compute", "latency, of a copy", *(f"{n} at once" for n in AT_ONCE))


class OverlappingPager(VirtualPager):
    """A VirtualPager whose copies overlap in what passes before their first byte moves; `at_once` of them may be guesses."""

    def __init__(
        self, demands: Demands, slabs: tuple[int, ...], order: str, conditions: Conditions, latency_s: float, at_once: int
    ):
        super().__init__(demands.inventory, slabs, order, conditions)
        self.core.unasked_at_once = at_once
        self._latency_s = latency_s
        self._under_way: list[Ticket] = []  # by their end

    def _carry(self, ticket: Ticket) -> None:
        """The copy begins now, and passes the link behind those before it."""
        ticket.moved = Moved(disk_bytes=self.tables[ticket.geometry].pool.bytes_of(ticket.slab))
        ticket.began_s = self.now_s
        arrives_s = max(self.now_s + self._latency_s, self._link_idle_at_s) + ticket.moved.disk_bytes * self._s_per_byte
        ticket.ended_s = self._link_idle_at_s = arrives_s
        self._under_way.append(ticket)

    def _land(self) -> None:
        """What has arrived by now."""
        while self._under_way and self._under_way[0].ended_s <= self.now_s:
            ticket = self._under_way.pop(0)
            ticket.done = True
            self.core.ended(ticket)

    def _use_link_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self._begin_copies()
            self.now_s = min(end_s, self._under_way[0].ended_s if self._under_way else end_s)
            self._land()

    def _begin_copies(self) -> None:
        while (ticket := self.core.next_copy()) is not None:
            self._carry(ticket)

    def _wait(self, demand: Demand, in_order: bool, cpu_done_s: float) -> None:
        waiting, began_s = demand.awaited(in_order) or demand.any_copies(), max(self.now_s, cpu_done_s)
        while waiting and not any(ticket.done for ticket in waiting):
            while self.core.queue:
                self._carry(self.core.queue.popleft())
            self.now_s = max(self.now_s, self._under_way[0].ended_s)
            self._land()
        if waiting:
            demand.waited(max(0.0, self.now_s - began_s))

    def end_request(self) -> None:
        self.now_s = max(self.now_s, self._link_idle_at_s)
        super().end_request()


def rows_of(name: str, demands: Demands) -> Iterator[list[Any]]:
    """COLUMNS."""
    record_bytes = demands.inventory.layouts[0].record_bytes
    for share in ("25%", "50%"):
        slabs = slabs_per_geometry(share, demands.inventory)
        for copies in COPIES:
            link = copies * record_bytes / LAYER_S
            conditions = Conditions(prefetch=True, link_bytes_per_s=link, compute_s_per_layer=LAYER_S, streams=False)
            for latency in LATENCIES:
                latency_s = latency * record_bytes / link
                pagers = (OverlappingPager(demands, slabs, "lfu", conditions, latency_s, n) for n in AT_ONCE)
                seconds = [decoded(pager, demands)[0] for pager in pagers]
                yield [name, share, copies, latency, *(round(each / seconds[0], 3) for each in seconds)]


def best(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """By latency: (latency, number at once, least, mean and most of its time over one at a time's)."""
    found = []
    for latency in LATENCIES:
        times = list(zip(*(row[4:] for row in rows if row[3] == latency), strict=True))
        for at_once, of in zip(AT_ONCE, times, strict=True):
            found.append([latency, at_once, min(of), round(math.fsum(of) / len(of), 3), max(of)])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(None, __doc__ or "")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="recorded with scores (default: two that are generated)")
    asked = parser.parse_args(arguments)

    def study() -> dict[str, Any]:
        recorded = {path: Demands.of(Trace.open(path)) for path in asked.traces}
        made = recorded or {
            f"synthetic, {layers} x {experts}, top-{top_k}": Demands.of(
                skewed_trace(
                    layers, experts, top_k, requests=4, prompt_tokens=30, tokens=80, window=5, score_noise=1.0, zipf=False
                )
            )
            for layers, experts, top_k in GENERATED
        }
        rows = [row for name, demands in made.items() for row in rows_of(name, demands)]
        return {"columns": COLUMNS, "rows": rows, "by latency": best(rows)}

    return told(study)


if __name__ == "__main__":
    sys.exit(main())
