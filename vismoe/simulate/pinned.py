"""How many leading MoE layers to pin: replay at every depth that leaves a cache (VisMMoE 3.4.1 and figure 12).

A pinned prefix never misses and gives prefetches a head start, but takes its slabs from the other layers. What it costs and wins
depends on the model's routing, the memory and the link, so it is replayed and not believed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.planning.apportion import most_pinned, record_bytes
from vismoe.simulate.demands import Conditions, Demands, Routing, slabs_per_geometry
from vismoe.simulate.replay import Order, aligned_columns, replay
from vismoe.types import Phase

PHASES = (Phase.PREFILL, Phase.DECODE)
WORTH_PINNING = 0.01  # a prefix is chosen only where it saves this share of the time, or of the bytes


@dataclass(frozen=True)
class PinnedPoint:
    """One depth of the prefix. Without a link rate all seconds are those of computation."""

    pinned_layers: int
    prefill_s: float
    decode_s: float
    prefill_bytes: int  # fetched; the prefix itself is there from the start
    decode_bytes: int

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def fetched_bytes(self) -> int:
        return self.prefill_bytes + self.decode_bytes


def _deepest(demands: Demands, slots: int | str, conditions: Conditions) -> int:
    """What a plan would allow (equation 10), short of all layers."""
    inventory = demands.inventory
    expert_bytes = record_bytes(inventory, slabs_per_geometry(slots, inventory))
    return min(most_pinned(inventory, expert_bytes, conditions.window), len(inventory.layers) - 1)


def pinned_curve(
    trace: Routing | Demands, slots: int | str, *, most: int | None = None, order: Order = "lfu", **conditions: Any
) -> list[PinnedPoint]:
    """Virtual time and bytes with 0 ... `most` pinned layers (None: as many as a plan allows); `slots` are slabs or a share.

    `conditions` are the other fields of Conditions: the link's rate, the prefetch. Raises ConfigError for an order without slabs.
    """
    if order == "oracle" or "pinned_layers" in conditions:
        raise ConfigError("a curve over pinned layers sets them itself, and the oracle pins nothing. Fix: leave them out")
    demands = trace if isinstance(trace, Demands) else Demands.of(trace)
    deepest = _deepest(demands, slots, Conditions(**conditions))
    deepest = deepest if most is None else min(most, deepest)
    points = []
    for depth in range(deepest + 1):
        result = replay(demands, slots, order, pinned_layers=depth, **conditions)
        prefill_s, decode_s = map(result.phase_s, PHASES)
        prefill_bytes, decode_bytes = (int(result.counters.total("bytes_read", phase)) for phase in PHASES)
        points.append(PinnedPoint(depth, prefill_s, decode_s, prefill_bytes, decode_bytes))
    return points


def format_curves(curves: Mapping[str, Sequence[PinnedPoint]], timed: bool) -> str:
    """A line per size and depth as aligned text; seconds only where a link rate was given."""
    table = [["slots", "pinned", "prefill read", "decode read", *(["prefill s", "decode s", "total s"] if timed else [])]]
    for slots, points in curves.items():
        for p in points:
            seconds = [f"{value:.3f}" for value in (p.prefill_s, p.decode_s, p.seconds)] if timed else []
            table.append([slots, str(p.pinned_layers), format_bytes(p.prefill_bytes), format_bytes(p.decode_bytes), *seconds])
    return aligned_columns(table, left=1)


def best_depth(points: Sequence[PinnedPoint], timed: bool) -> int:
    """The depth of a curve with the least time, or the fewest bytes, if it saves at least 1% over every shallower one."""
    best = points[0]
    for point in points[1:]:
        cost, least = (point.seconds, best.seconds) if timed else (point.fetched_bytes, best.fetched_bytes)
        if cost < (1 - WORTH_PINNING) * least:
            best = point
    return best.pinned_layers


def best_pinned(
    trace: Routing | Demands, slots: int | str, *, most: int | None = None, order: Order = "lfu", **conditions: Any
) -> int:
    """The number of pinned layers with the least virtual time, or without a link rate the fewest fetched bytes.

    A prefix must save at least 1% over the shallower choice; otherwise memory stays with the pool, which serves every layer.
    """
    points = pinned_curve(trace, slots, most=most, order=order, **conditions)
    return best_depth(points, timed=conditions.get("link_bytes_per_s") is not None)
