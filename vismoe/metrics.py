"""Counters of the pager: per phase and MoE layer, updated where the event happens, read as differences of snapshots.

Counting (one rule each): a hit or a miss is one (expert, layer step), excluding experts that only padding asked for;
resident when demanded is a hit; a prefetch still under way when demanded is a miss and `late`; a prefetched expert is wasted
when it leaves, or the request ends, before anyone demanded it. A miss that was computed in host memory is a miss all the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vismoe.types import Phase

PHASES = tuple(Phase)
COUNTERS = (
    "hits",
    "misses",
    "late",
    "computed_on_host",  # misses that the CPU computed from the host tier, beside the device
    "evictions",
    "bytes_read",  # from disk
    "bytes_copied",  # over the link between host and device tiers
    "bytes_computed_on_host",  # records of the misses computed there
    "stall_seconds",  # waiting for copies
    "compute_seconds",  # experts' arithmetic (on a GPU: launching it)
    "layer_seconds",  # the whole experts function: stall, compute, and the control path
    "prefetched_bytes",
    "wasted_prefetch_bytes",
    "steps",  # times the layer ran
    "computed_high",  # expert computations (an expert for a token) in the only format, or the more precise of two
    "computed_low",
    "skipped",  # those that a policy left out
    "served_lower",  # experts that were to be in the more precise format, and served in the other
    "promotions",  # experts that moved to the more precise format unasked
    "demotions",
    "failed_transitions",
)


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment, `[phase, layer, counter]` float64."""

    values: np.ndarray

    def __sub__(self, earlier: "Snapshot") -> "Snapshot":
        return Snapshot(self.values - earlier.values)

    def __add__(self, other: "Snapshot") -> "Snapshot":
        return Snapshot(self.values + other.values)

    def total(self, counter: str, phase: Phase | None = None) -> float:
        values = self.values[:, :, COUNTERS.index(counter)]
        return float(values.sum() if phase is None else values[PHASES.index(phase)].sum())

    def computed_in(self, formats: Sequence[str], phase: Phase | None = None) -> dict[str, int]:
        """Expert computations (an expert for a token) by the name of their format, what was skipped as `skip`; `formats` by
        precision. Only what there was any of."""
        counts = dict(zip(formats, (self.total("computed_high", phase), self.total("computed_low", phase)), strict=False))
        counts["skip"] = self.total("skipped", phase)
        return {name: int(count) for name, count in counts.items() if count}

    def shares(self, formats: Sequence[str]) -> dict[str, float]:
        """The same as shares of all."""
        counts = self.computed_in(formats)
        return {name: count / sum(counts.values()) for name, count in counts.items()}

    def hit_rate(self, phase: Phase | None = None) -> float | None:
        """Hits over demands, or None when nothing was demanded."""
        hits, misses = self.total("hits", phase), self.total("misses", phase)
        return hits / (hits + misses) if hits + misses else None

    def to_json(self) -> dict[str, Any]:
        """Totals, per phase, and per layer; counts and bytes as integers."""

        def row(values: np.ndarray) -> dict[str, float | int]:
            return {name: float(v) if name.endswith("seconds") else int(v) for name, v in zip(COUNTERS, values, strict=True)}

        per_phase = {phase: row(self.values[i].sum(axis=0)) for i, phase in enumerate(PHASES) if self.values[i].any()}
        per_layer = [
            {
                "layer": layer,
                **{phase: row(self.values[i, layer]) for i, phase in enumerate(PHASES) if self.values[i, layer].any()},
            }
            for layer in range(self.values.shape[1])
        ]
        return {**row(self.values.sum(axis=(0, 1))), "per_phase": per_phase, "per_layer": per_layer}


class Metrics:
    """The live counters of one engine. Written under the pager's lock."""

    def __init__(self, layers: int, experts: int = 0):
        """`experts`: the most that a layer has; `demanded` and `missed` are int64 `[layers, experts]`, pad tokens included."""
        self._values = np.zeros((len(PHASES), layers, len(COUNTERS)))
        self.demanded, self.missed = (np.zeros((layers, experts), np.int64) for _ in range(2))
        self._column = {name: i for i, name in enumerate(COUNTERS)}
        self._steps, self._hits = self._column["steps"], self._column["hits"]
        self._row = {phase: i for i, phase in enumerate(PHASES)}
        self._formats: tuple[str, ...] = ()
        self._named_from, self._named_before = self.snapshot(), Counter[tuple[Phase, str]]()

    def name_formats(self, formats: Sequence[str]) -> None:
        """From now on these are the formats, by precision, that computations are counted in."""
        self._named_before, self._formats = self.computed_in, tuple(formats)
        self._named_from = self.snapshot()

    @property
    def computed_in(self) -> Counter[tuple[Phase, str]]:
        """Expert computations by phase and format since the start, whatever the formats were at the time."""
        since = self.snapshot() - self._named_from
        now = {(phase, name): n for phase in Phase for name, n in since.computed_in(self._formats, phase).items()}
        return self._named_before + Counter(now)

    def add(self, counter: str, phase: Phase, layer: int, amount: float = 1) -> None:
        self._values[self._row[phase], layer, self._column[counter]] += amount

    def count_demand(self, phase: Phase, layer: int, hits: int, misses: int, late: int) -> None:
        """One layer step."""
        values = self._values[self._row[phase], layer]
        values[self._steps] += 1
        values[self._hits] += hits
        if misses:
            values[self._column["misses"]] += misses
            values[self._column["late"]] += late

    def count_experts(self, layer: int, demanded: list[int], absent: list[int]) -> None:
        """Which experts a layer step was about."""
        self.demanded[layer, demanded] += 1
        if absent:
            self.missed[layer, absent] += 1

    def snapshot(self) -> Snapshot:
        return Snapshot(self._values.copy())
