"""How the misses of one layer are served: by a copy, or by the CPU from host memory. (A resident lower format is no miss of this
kind: `Upgrades` asks `vismoe.precision.rules` when it serves.)

Choices are pure functions of bytes, tokens, rates and what is queued; the pager and the replay call the same ones. A copy needs
the link, and afterwards the expert is on the device; the CPU needs neither link nor slab and works beside both. So a layer is
done when the later of the two has finished, and the misses are divided such that this is as early as it can be.

Only experts whose record lies in the host tier are asked about: reading one from the disk takes the same time either way.
"""

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from vismoe.errors import ConfigError
from vismoe.pair import HIGH, LOW
from vismoe.precision.policy import Policy
from vismoe.precision.rules import Serve, serve, upgrades_in_time
from vismoe.types import Phase

PACE_SHARE = 0.25  # of the newest measurement in what is known of the CPU's pace
PACE_MOST = 16.0  # times as long as expected: more is taken for this, since the first call makes what later ones find
PACE_KEPT = 0.98  # of that from pass to pass


class Way(enum.Enum):
    """What is done about one missing expert."""

    WAIT = "wait"  # for its copy
    CPU = "cpu"  # compute it where it lies


class Miss(NamedTuple):
    """One missing expert of the layer."""

    nbytes: int  # of its record, in the format that was demanded
    tokens: int = 1  # that chose it
    on_its_way: bool = False  # a copy began before it was demanded; it needs no more of the link


@dataclass(frozen=True)
class Rates:
    """Of one geometry, measured or nominal."""

    link_bytes_per_s: float
    cpu_bytes_per_s: float  # of weights that the kernels read from host memory, at one token
    cpu_s_per_token: float = 0.0  # arithmetic of one token in one expert, which decides where there are many
    cpu_call_s: float = 0.0  # for what goes there and comes back, once a layer
    cpu_saves: float = 0.0  # the share of the time without the CPU that it must save

    def __post_init__(self) -> None:
        if not (self.link_bytes_per_s > 0 and self.cpu_bytes_per_s > 0 and self.cpu_s_per_token >= 0 <= self.cpu_saves < 1):
            raise ConfigError(f"{self}: rates lie above zero, and what the CPU must save between 0 and 1")

    def copy_s(self, nbytes: float) -> float:
        return nbytes / self.link_bytes_per_s

    def with_measured(self, link_bytes_per_s: float | None, cpu_slowness: float) -> "Rates":
        """As measured since: the link's rate, where it is known, and how many times as long as it should the CPU took."""
        return replace(
            self,
            link_bytes_per_s=link_bytes_per_s or self.link_bytes_per_s,
            cpu_bytes_per_s=self.cpu_bytes_per_s / cpu_slowness,
            cpu_s_per_token=self.cpu_s_per_token * cpu_slowness,
        )

    def cpu_s(self, expert_bytes: int, tokens: int) -> float:
        """The weights are read once, whatever the number of tokens."""
        return max(expert_bytes / self.cpu_bytes_per_s, tokens * self.cpu_s_per_token)


def choose_ways(misses: Sequence[Miss], rates: Rates, link_ahead_bytes: float = 0.0, cpu_ahead_s: float = 0.0) -> list[Way]:
    """A way for each of a layer's misses, such that the later of link and CPU finishes as early as possible.

    `link_ahead_bytes` are on the link before any of these, those on their way included; `cpu_ahead_s` of work wait for the CPU.
    The CPU gets those whose computation takes least of their copy's time: every number of them is tried. Where all have the same
    size, which they have in one format, these are the ones with the fewest tokens, and no division is done sooner; with two
    formats it is the usual approximation. Ties by position, and in favour of copies, which stay on the device; it gets none where
    that would not save the share `rates.cpu_saves` of the time.
    """

    def on_cpu_s(miss: Miss) -> float:
        return rates.cpu_s(miss.nbytes, miss.tokens)

    ways = [Way.WAIT] * len(misses)
    fresh = [i for i, miss in enumerate(misses) if not miss.on_its_way]
    coming = [i for i, miss in enumerate(misses) if miss.on_its_way]
    fresh.sort(key=lambda i: on_cpu_s(misses[i]) / misses[i].nbytes)
    by_cpu = fresh + coming  # in this order; those that come by themselves all together or not at all
    ahead_s = cpu_ahead_s + rates.cpu_call_s
    cpu_s = list(itertools.accumulate((on_cpu_s(misses[i]) for i in by_cpu), initial=ahead_s))
    copied = [link_ahead_bytes + sum(misses[i].nbytes for i in fresh[count:]) for count in range(len(fresh) + 1)]

    def finished_s(count: int) -> float:
        """When all is done, if the first `count` of `by_cpu` are computed there."""
        link_s = rates.copy_s(copied[min(count, len(fresh))]) if count < len(by_cpu) else 0.0
        return max(link_s, cpu_s[count] if count else 0.0)

    counts = [*range(len(fresh) + 1), len(by_cpu)]
    best = min(counts, key=finished_s)
    if finished_s(best) <= (1 - rates.cpu_saves) * finished_s(0):
        for i in by_cpu[:best]:
            ways[i] = Way.CPU
    return ways


@dataclass(frozen=True, eq=False)  # choices are remembered by it, for every layer of a token
class Ways:
    """What a pager with a host tier may do about misses. Without it, they wait."""

    policy: Literal["cpu", "auto"]  # cpu: compute every miss there; auto: whatever is done sooner
    rates: tuple[Rates, ...]  # by geometry
    deterministic: bool = False  # decide by bytes and tokens only: nothing is copied unasked, and what is queued does not count
    # Where a token's layer is served in one step (at_once.py), the way to the CPU and back is shorter; empty: it is not.
    step_rates: tuple[Rates, ...] = ()
    in_steps_only: bool = False  # what is demanded waits

    def choose(
        self,
        geometry: int,
        misses: Sequence[Miss],
        link_ahead_bytes: float,
        link_bytes_per_s: float | None = None,
        cpu_slowness: float = 1.0,
    ) -> list[Way]:
        """A way for each of a layer's misses. link_bytes_per_s, cpu_slowness: as of `Rates.with_measured`."""
        if self.policy == "cpu":
            return [Way.CPU] * len(misses)
        if self.deterministic:
            return choose_ways(misses, self.rates[geometry])
        return choose_ways(misses, self.rates[geometry].with_measured(link_bytes_per_s, cpu_slowness), link_ahead_bytes)

    def in_step(
        self, geometry: int, misses: int, nbytes: int, link_bytes_per_s: float | None = None, cpu_slowness: float = 1.0
    ) -> int:
        """How many of so many misses of one token the CPU gets, in a step (at_once.py) with nothing else on the link."""
        return _in_step(self, geometry, misses, nbytes, link_bytes_per_s, cpu_slowness)

    def step_s(self, geometry: int, experts: int, nbytes: int) -> float:
        """What the CPU takes for so many experts of a step, by the rates that are not measured on the way."""
        rates = (self.step_rates or self.rates)[geometry]
        return rates.cpu_call_s + experts * rates.cpu_s(nbytes, 1)


@functools.lru_cache(maxsize=256)
def _in_step(ways: Ways, geometry: int, misses: int, nbytes: int, *measured: Any) -> int:
    of_step = replace(ways, rates=ways.step_rates or ways.rates)
    return of_step.choose(geometry, [Miss(nbytes)] * misses, 0.0, *measured).count(Way.CPU)


class CpuPace:
    """How many times as long as its rates say the CPU takes, by phase: other work shares its cores and its memory, or did when
    the rates were measured, and these may be nominal ones. What was measured is forgotten in the course of some dozens of passes,
    so that the CPU is tried again. least: times as long as expected; less is taken for this. parts: of a doubling, that are told
    apart."""

    def __init__(self, least: float = 1.0, parts: int = 1) -> None:
        self._least, self._parts = least, parts
        self._logs: dict[Phase, float] = {}  # to the base of 2

    def slowness(self, phase: Phase) -> float:
        """In steps, so that choices can be remembered."""
        return float(2.0 ** (round(self._parts * self._logs.get(phase, 0.0)) / self._parts))

    def took(self, phase: Phase, seconds: float, expected_s: float) -> None:
        """Experts were computed, which the rates said takes `expected_s`."""
        before = self._logs.get(phase, 0.0)
        times = min(max(seconds / expected_s, self._least), PACE_MOST)
        self._logs[phase] = before + PACE_SHARE * (math.log2(times) - before)

    def begin_pass(self, phase: Phase) -> None:
        if phase in self._logs:
            self._logs[phase] *= PACE_KEPT


@dataclass(frozen=True)
class Upgrades:
    """What a policy does about experts that a layer wants in more precision than they are there in: which are waited for,
    borrowed, or taken as they are. `rates` by geometry: of what copies come over, and of computing."""

    policy: Policy
    rates: tuple[Rates, ...]
    deterministic: bool = False  # what is queued does not count

    def choose(
        self,
        geometry: int,
        wanting: Sequence[int],
        copied_bytes: int,
        high_bytes: int,
        others_s: float,
        queued_bytes: int,
        borrowable: int,
    ) -> dict[int, Serve]:
        """What is done about each of `wanting`, the most important first. copied_bytes: of a copy in the more precise format, and
        high_bytes of its slab; others_s: what the layer's other experts take; queued_bytes: on their way before any of these;
        borrowable: slabs that a copy could be borrowed in.
        """
        rates = self.rates[geometry]
        in_time: set[int] = set()
        if self.policy.hotness and self.policy.importance:
            first = wanting[:borrowable]
            ahead = 0 if self.deterministic else queued_bytes
            compute_s = rates.cpu_s(high_bytes, 1)
            there = upgrades_in_time([copied_bytes] * len(first), rates.link_bytes_per_s, ahead, others_s, compute_s)
            in_time = {expert for expert, is_there in zip(first, there, strict=True) if is_there}
        return {expert: serve(LOW, HIGH, self.policy, expert in in_time) for expert in wanting}
