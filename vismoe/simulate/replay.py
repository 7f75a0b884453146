"""What a recorded trace would have fetched under each eviction order, and with the oracle: in virtual time, without a byte moved.

The orders run on the pager's own page table and victim choice (`virtual_pager.py`), so what is compared here is what serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import Progress

from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.metrics import Metrics, Snapshot
from vismoe.simulate.demands import Conditions, Demands, Routing, slabs_per_geometry
from vismoe.simulate.oracle import oracle_misses
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.types import Phase

Order = Literal["lru", "lfu", "oracle"]
ORDERS = get_args(Order)


@dataclass(frozen=True)
class ReplayResult:
    """Figures of one order at one size, counted as the metrics of a running engine are."""

    order: Order
    slabs: tuple[int, ...]  # of each geometry
    slab_bytes: int
    counters: Snapshot  # bytes_read: fetched, for demands and prefetches
    seconds: float  # virtual time of the whole trace

    @property
    def fetched_bytes(self) -> int:
        return int(self.counters.total("bytes_read"))

    @property
    def misses(self) -> int:
        return int(self.counters.total("misses"))

    @property
    def stall_s(self) -> float:
        return self.counters.total("stall_seconds")

    def phase_s(self, phase: Phase) -> float:
        """Virtual time of one phase."""
        return self.counters.total("layer_seconds", phase)

    def hit_rate(self, phase: Phase | None = None) -> float | None:
        """Hits over demands, None when nothing was demanded in that phase."""
        return self.counters.hit_rate(phase)

    def to_json(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "slabs": list(self.slabs),
            "slab_bytes": self.slab_bytes,
            "seconds": self.seconds,
            **self.counters.to_json(),
        }


def replay(
    trace: Routing | Demands, slots: int | str, order: Order = "lfu", *, progress: Progress | None = None, **conditions: Any
) -> ReplayResult:
    """Replays a trace with `slots` slabs: a number, or a share of all experts such as "25%".

    `conditions` are the fields of Conditions. Raises ConfigError for what cannot be, and for prefetch without recorded scores.
    """
    if order not in ORDERS:
        raise ConfigError(f"order={order!r}: choose one of {', '.join(ORDERS)}")
    demands = trace if isinstance(trace, Demands) else Demands.of(trace)
    settings = Conditions(**conditions)
    slabs = slabs_per_geometry(slots, demands.inventory)
    if order == "oracle":
        return _oracle(demands, slabs, settings)
    if settings.prefetch and not demands.have_scores:
        raise ConfigError("prefetch needs lookahead scores, which this trace has not; record it with lookahead='gate'")
    pager = VirtualPager(demands.inventory, slabs, order, settings)
    for demand in demands if progress is None else progress.track(demands, description=f"{order}, {sum(slabs)} slabs"):
        pager.run(demand)
    pager.end_request()
    return ReplayResult(order, slabs, _slab_bytes(demands, slabs), pager.metrics.snapshot(), pager.now_s)


def _oracle(demands: Demands, slabs: tuple[int, ...], conditions: Conditions) -> ReplayResult:
    """The fewest possible fetches of each geometry; nothing is prefetched, every transfer waits for its demand."""
    inventory, metrics, seconds = demands.inventory, Metrics(len(demands.inventory.layers)), 0.0
    first_flat = [0, *accumulate(layer.num_experts for layer in inventory.layers)]
    for geometry, (layout, capacity) in enumerate(zip(inventory.layouts, slabs, strict=True)):
        mine = [demand for demand in demands if inventory.layers[demand.layer].geometry == geometry]
        misses = oracle_misses([demand.experts + first_flat[demand.layer] for demand in mine], capacity)
        for demand, missed in zip(mine, misses, strict=True):
            nbytes = missed * layout.record_bytes
            stall_s = nbytes / conditions.link_bytes_per_s if conditions.link_bytes_per_s else 0.0
            where = (demand.phase, demand.layer)
            metrics.add("hits", *where, len(demand.experts) - missed)
            metrics.add("misses", *where, missed)
            metrics.add("bytes_read", *where, nbytes)
            metrics.add("stall_seconds", *where, stall_s)
            metrics.add("layer_seconds", *where, stall_s + conditions.compute_s_per_layer)
            metrics.add("steps", *where)
            seconds += stall_s + conditions.compute_s_per_layer
    return ReplayResult("oracle", slabs, _slab_bytes(demands, slabs), metrics.snapshot(), seconds)


def _slab_bytes(demands: Demands, slabs: tuple[int, ...]) -> int:
    return sum(n * layout.record_bytes for n, layout in zip(slabs, demands.inventory.layouts, strict=True))


@dataclass(frozen=True)
class Row:
    """One line of the comparison. Rates are shares of demands, None where nothing was demanded."""

    slots: str  # as asked for
    slabs: int
    order: Order
    prefill_hit_rate: float | None
    decode_hit_rate: float | None
    fetched_bytes: int
    times_oracle: float  # fetched bytes over the oracle's
    prefetched_bytes: int
    wasted_prefetch_bytes: int
    stall_s: float | None  # None without a link rate, and so are the others
    prefill_s: float | None
    decode_s: float | None
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def compare(
    trace: Routing,
    slots: Sequence[int | str],
    orders: Sequence[Order] = ORDERS,
    *,
    show_progress: bool = True,
    **conditions: Any,
) -> list[Row]:
    """Every order at every size, sizes as given, the oracle last. Progress bars go to stderr and vanish."""
    demands = Demands.of(trace)
    wanted: list[Order] = [*(order for order in orders if order != "oracle"), "oracle"]
    rows = []
    with Progress(console=Console(stderr=True), transient=True, disable=not show_progress) as progress:
        for size in slots:
            results = [replay(demands, size, order, progress=progress, **conditions) for order in wanted]
            fewest = results[-1].fetched_bytes
            timed = conditions.get("link_bytes_per_s") is not None
            rows += [_row(str(size), result, fewest, timed) for result in results]
    return rows


def _row(slots: str, result: ReplayResult, fewest_bytes: int, timed: bool) -> Row:
    return Row(
        slots,
        sum(result.slabs),
        result.order,
        result.hit_rate(Phase.PREFILL),
        result.hit_rate(Phase.DECODE),
        result.fetched_bytes,
        result.fetched_bytes / fewest_bytes if fewest_bytes else 1.0,
        int(result.counters.total("prefetched_bytes")),
        int(result.counters.total("wasted_prefetch_bytes")),
        *([result.stall_s, *map(result.phase_s, (Phase.PREFILL, Phase.DECODE)), result.seconds] if timed else [None] * 4),
    )


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as aligned text; time columns only when a link rate was given."""
    timed = any(row.stall_s is not None for row in rows)
    head = ["slots", "slabs", "order", "prefill hits", "decode hits", "fetched", "x oracle"]
    table = [head + (["prefetched", "wasted", "stall s", "prefill s", "decode s", "total s"] if timed else [])]
    for row in rows:
        cells = [row.slots, str(row.slabs), row.order, _percent(row.prefill_hit_rate), _percent(row.decode_hit_rate)]
        cells += [format_bytes(row.fetched_bytes), f"{row.times_oracle:.2f}"]
        if timed:
            cells += [format_bytes(row.prefetched_bytes), format_bytes(row.wasted_prefetch_bytes)]
            cells += [f"{value:.3f}" for value in (row.stall_s, row.prefill_s, row.decode_s, row.seconds)]
        table.append(cells)
    return aligned_columns(table, left=3)


def aligned_columns(table: Sequence[Sequence[str]], left: int) -> str:
    """Rows of cells as text; the first `left` columns are names."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        for cells in table
    )
    return "\n".join(line.rstrip() for line in lines)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
