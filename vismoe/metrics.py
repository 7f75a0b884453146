"""Counters of the pager, per phase and MoE layer: updated where the event happens, read as differences of snapshots.

Each event has one rule. A hit or a miss is one (expert, layer step), without experts that only padding demanded. An expert that
is resident when demanded is a hit. A prefetch that is still in progress when the expert is demanded is a miss and `late`. A
prefetched expert is wasted if it is evicted, or the request ends, before it was demanded. A miss that host memory computes is
still a miss.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vismoe.types import Phase

PHASES = tuple(Phase)
COUNTERS = (
    "hits",
    "misses",
    "late",
    "computed_on_host",  # misses that the CPU computed from the host tier instead of the device
    "evictions",
    "bytes_read",  # from disk
    "bytes_copied",  # over the link between host and device tiers
    "bytes_computed_on_host",  # records of the misses that the CPU computed from the host tier
    "stall_seconds",  # waiting for copies
    "compute_seconds",  # experts' arithmetic (on a GPU: launching it)
    "layer_seconds",  # the whole experts function: stall, compute, and the control path
    "prefetched_bytes",
    "wasted_prefetch_bytes",
    "promised",  # experts that draft passes named, once per round (paging/promises.py)
    "foreseen",  # promised experts that verification demanded
    "promised_bytes",  # copied for promises, whatever became of them
    "wasted_promised_bytes",  # of these, copied for promises that verification did not demand, or that had left by then
    "steps",  # times the layer ran
    "computed_high",  # computations (an expert for a token) in the only format, or in the more precise of two
    "computed_low",
    "skipped",  # computations that a policy skipped
    "served_lower",  # experts that needed the more precise format but served in the other
    "promotions",  # experts that hotness moved to the more precise format
    "demotions",
    "failed_transitions",
    "streamed",  # times that the layer ran in a streamed pass (paging/streaming.py), or for which reason it did not
    "unstreamed_unmeasured",
    "unstreamed_small_pool",
    "unstreamed_no_gain",
)
RESIDENT = ("steps", "hits", "computed_high", "compute_seconds", "layer_seconds")  # what changes where nothing is missing


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment, `[phase, layer, counter]` float64."""

    values: np.ndarray

    def __sub__(self, earlier: "Snapshot") -> "Snapshot":
        return Snapshot(self.values - earlier.values)

    def __add__(self, other: "Snapshot") -> "Snapshot":
        return Snapshot(self.values + other.values)

    def split(self, shares: int) -> list["Snapshot"]:
        """Equal shares that add up to this; of a count that does not divide, the first ones have one more."""
        whole, left = np.divmod(self.values, shares)
        seconds = [index for index, name in enumerate(COUNTERS) if name.endswith("seconds")]
        parts = [Snapshot(whole + (number < left)) for number in range(shares)]
        for part in parts:
            part.values[..., seconds] = self.values[..., seconds] / shares
        return parts

    def total(self, counter: str, phase: Phase | None = None) -> float:
        values = self.values[:, :, COUNTERS.index(counter)]
        return float(values.sum() if phase is None else values[PHASES.index(phase)].sum())

    def computed_in(self, formats: Sequence[str], phase: Phase | None = None) -> dict[str, int]:
        """Expert computations (an expert for a token) by format name, skipped ones as `skip`, without zeros; `formats` by
        precision."""
        counts = dict(zip(formats, (self.total("computed_high", phase), self.total("computed_low", phase)), strict=False))
        counts["skip"] = self.total("skipped", phase)
        return {name: int(count) for name, count in counts.items() if count}

    def shares(self, formats: Sequence[str]) -> dict[str, float]:
        """The same as shares of all computations."""
        counts = self.computed_in(formats)
        return {name: count / sum(counts.values()) for name, count in counts.items()}

    def hit_rate(self, phase: Phase | None = None) -> float | None:
        """Hits divided by demands; None if there were no demands."""
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
    """The live counters of one engine. Threads that copy write under the pager's lock; the one that runs the model also writes
    its own counters without it."""

    def __init__(self, layers: int, experts: int = 0):
        """`experts`: the most in any layer; `demanded` and `missed` are int64 `[layers, experts]`, padding tokens included."""
        self._values = np.zeros((len(PHASES), layers, len(COUNTERS)))
        self.demanded, self.missed = (np.zeros((layers, experts), np.int64) for _ in range(2))
        self._column = {name: i for i, name in enumerate(COUNTERS)}
        self._steps, self._hits = self._column["steps"], self._column["hits"]
        self._resident = [self._column[name] for name in RESIDENT]
        self._row = {phase: i for i, phase in enumerate(PHASES)}
        self._formats: tuple[str, ...] = ()
        self._deferred: list[Callable[[], None]] = []
        self._deferred_by = 0
        self._named_from, self._named_before = self.snapshot(), Counter[tuple[Phase, str]]()

    def name_formats(self, formats: Sequence[str]) -> None:
        """From now on, computations are counted in these formats, ordered by precision."""
        self._named_before, self._formats = self.computed_in, tuple(formats)
        self._named_from = self.snapshot()

    @property
    def computed_in(self) -> Counter[tuple[Phase, str]]:
        """Expert computations by phase and format since the start, including formats of earlier times."""
        since = self.snapshot() - self._named_from
        now = {(phase, name): n for phase in Phase for name, n in since.computed_in(self._formats, phase).items()}
        return self._named_before + Counter(now)

    def add(self, counter: str, phase: Phase, layer: int, amount: float = 1) -> None:
        self._values[self._row[phase], layer, self._column[counter]] += amount

    def count_demand(self, phase: Phase, layer: int, hits: int, misses: int, late: int) -> None:
        """Counts one layer step."""
        values = self._values[self._row[phase], layer]
        values[self._steps] += 1
        values[self._hits] += hits
        if misses:
            values[self._column["misses"]] += misses
            values[self._column["late"]] += late

    def count_experts(self, layer: int, demanded: list[int], absent: list[int]) -> None:
        """Counts the demanded and absent experts of one layer step."""
        self.demanded[layer, demanded] += 1
        if absent:
            self.missed[layer, absent] += 1

    def count_resident(self, phase: Phase, layers: Sequence[int], amounts: Sequence[tuple[float, ...]] | np.ndarray) -> None:
        """Counts one step of each of these layers, which found all experts resident: amounts [n, RESIDENT], but `demanded`."""
        self._values[self._row[phase], np.array(layers)[:, None], self._resident] += amounts

    def count_hits(self, phase: Phase, layers: np.ndarray, demanded: np.ndarray) -> None:
        """Counts one step of several layers, int `[n]`, which found all experts demanded bool `[n, E]` resident."""
        values = self._values[self._row[phase]]
        values[layers, self._steps] += 1
        values[layers, self._hits] += demanded.sum(axis=1)
        self.demanded[layers] += demanded

    def defer(self, count: Callable[[], None]) -> None:
        """Let `count` count later, when what it reads from a device is there: when this thread settles, or takes a snapshot."""
        self._deferred.append(count)
        self._deferred_by = threading.get_ident()

    def settle(self, of_all_threads: bool = False) -> None:
        """Count what was deferred, by this thread or by any. The thread may wait for a device."""
        while self._deferred and (of_all_threads or self._deferred_by == threading.get_ident()):
            try:
                count = self._deferred.pop(0)
            except IndexError:  # another thread was sooner
                return
            count()

    def snapshot(self) -> Snapshot:
        """The counters now; in other threads than the model's they may lack the last pass."""
        self.settle()
        return Snapshot(self._values.copy())
