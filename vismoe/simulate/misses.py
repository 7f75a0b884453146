"""Ways to serve a miss on a recorded trace, over emulated links in virtual time: always copy, always the CPU, or the sooner.

The choice is the pager's own (`paging/miss.py`). The *crossover* is the link rate above which always copying takes less time than
always computing on the CPU. Nothing here was timed on a machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from vismoe.simulate.demands import Demands, Routing
from vismoe.simulate.replay import ReplayResult, aligned_columns, replay

LINKS_BYTES_PER_S = (4e9, 12e9, 25e9, 50e9)
CROSSOVER_WITHIN = 1.02  # the ratio of two rates between which it lies when the search ends
FARTHEST = 2**10  # times the CPU's rate, up or down, that is looked at


@dataclass(frozen=True)
class MissRow:
    """Virtual seconds of the whole trace at one size and link rate."""

    slots: str  # as asked for
    slabs: int
    link_bytes_per_s: float
    wait_s: float  # every miss waits for its copy
    cpu_s: float  # every miss is computed on the CPU
    auto_s: float  # what the chooser does
    auto_cpu_share: float  # of the chooser's misses that the CPU computed

    @property
    def over_best(self) -> float:
        """The chooser's time over that of the better of the other two."""
        return self.auto_s / min(self.wait_s, self.cpu_s)


@dataclass(frozen=True)
class MissComparison:
    rows: tuple[MissRow, ...]
    cpu_bytes_per_s: float
    crossover_bytes_per_s: dict[str, float | None]  # by slots; None: one of them is faster at every rate

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [{**asdict(row), "over_best": row.over_best} for row in self.rows],
            "cpu_bytes_per_s": self.cpu_bytes_per_s,
            "crossover_bytes_per_s": self.crossover_bytes_per_s,
        }


def compare_misses(
    trace: Routing,
    slots: Sequence[int | str],
    links_bytes_per_s: Sequence[float] = LINKS_BYTES_PER_S,
    *,
    cpu_bytes_per_s: float,
    show_progress: bool = True,
    **conditions: Any,
) -> MissComparison:
    """All three ways at every size and link rate, and the crossover of each size. `conditions` are other fields of Conditions."""
    demands = Demands.of(trace)
    rows, crossovers = [], {}
    with Progress(console=Console(stderr=True), transient=True, disable=not show_progress) as progress:

        def run(size: int | str, way: Literal["wait", "cpu", "auto"], rate: float) -> ReplayResult:
            return replay(
                demands, size, progress=progress, misses=way, link_bytes_per_s=rate, cpu_bytes_per_s=cpu_bytes_per_s, **conditions
            )

        for size in slots:
            for rate in links_bytes_per_s:
                wait, cpu, auto = (run(size, way, rate) for way in ("wait", "cpu", "auto"))
                share = auto.counters.total("computed_on_host") / auto.misses if auto.misses else 0.0
                rows.append(MissRow(str(size), sum(auto.slabs), rate, wait.seconds, cpu.seconds, auto.seconds, share))

            def copying_wins(rate: float, size: int | str = size) -> bool:
                return run(size, "wait", rate).seconds < run(size, "cpu", rate).seconds

            crossovers[str(size)] = _crossover(copying_wins, cpu_bytes_per_s)
    return MissComparison(tuple(rows), cpu_bytes_per_s, crossovers)


def _crossover(copying_wins: Callable[[float], bool], start_bytes_per_s: float) -> float | None:
    """The rate at which copying begins to win, by doubling away from a start and halving in between, within a factor."""
    low = high = start_bytes_per_s
    if copying_wins(start_bytes_per_s):
        while copying_wins(low := low / 2):
            if low * FARTHEST < start_bytes_per_s:
                return None
        high = 2 * low
    else:
        while not copying_wins(high := 2 * high):
            if high > FARTHEST * start_bytes_per_s:
                return None
        low = high / 2
    while high > CROSSOVER_WITHIN * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if copying_wins(middle) else (middle, high)
    return math.sqrt(low * high)


def format_misses(compared: MissComparison) -> str:
    """The comparison as aligned text, and a line for each crossover."""
    table = [["slots", "slabs", "link GB/s", "wait s", "cpu s", "auto s", "auto / best", "auto on CPU"]]
    for row in compared.rows:
        seconds = [f"{value:.3f}" for value in (row.wait_s, row.cpu_s, row.auto_s)]
        shares = [f"{row.over_best:.2f}", f"{row.auto_cpu_share:.0%}"]
        table.append([row.slots, str(row.slabs), f"{row.link_bytes_per_s / 1e9:g}", *seconds, *shares])
    cpu = f"the CPU at {compared.cpu_bytes_per_s / 1e9:g} GB/s"
    lines = [f"virtual time over emulated links; {cpu}", aligned_columns(table, left=1)]
    for slots, rate in compared.crossover_bytes_per_s.items():
        where = "at no rate looked at" if rate is None else f"above {rate / 1e9:.1f} GB/s"
        lines.append(f"crossover at {slots} slots: copying every miss beats {cpu} {where}")
    return "\n".join(lines)
