"""How fast decode passes are, by their rows: fitted from what they took, against what the plan expected. No thread, no clock.

T_c, what a pass computes, is its time without its stalls; T_l, what it reads, is its misses by the time of one. Both are lines
over the rows B, t0 + t1 B, which begin with the plan's expectations of one row and of the most and forget old passes.
"""

from collections.abc import Sequence

from vismoe.planning.plan import Plan
from vismoe.planning.throughput import ExpectedPass, best_of

HALF_LIFE_PASSES = 64
LEARNT = 1 / 8  # of the difference between what a miss took and what was believed
READING_BOUND = 0.5  # share of a pass in stalls from which on reading never pauses, so that its time is that of its misses


class Line:
    """A line t0 + t1 x by least squares, neither of them below 0, where x > 0 and y >= 0. A point counts half after
    HALF_LIFE_PASSES further ones."""

    def __init__(self, points: Sequence[tuple[float, float]]):
        self._sums = [0.0] * 5  # of 1, x, y, x x, x y
        for x, y in points:
            self._add(x, y, 1.0)

    def add(self, x: float, y: float) -> None:
        self._add(x, y, 0.5 ** (1 / HALF_LIFE_PASSES))

    def _add(self, x: float, y: float, kept: float) -> None:
        self._sums = [kept * old + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]

    def __call__(self, x: float) -> float:
        n, sx, sy, sxx, sxy = self._sums
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 1e-9 * n * n else 0.0
        slope = min(max(0.0, slope), sy / sx)
        return (sy - slope * sx) / n + slope * x


class Pace:
    """Of one engine. miss_s: what a miss takes, until passes that are bound by reading say it."""

    def __init__(self, plan: Plan, expert_bytes: float):
        self.plan = plan
        self._miss_s = expert_bytes / plan.rates.missing_bytes_per_s
        self._compute = Line([(one.rows, one.compute_seconds) for one in plan.passes])
        self._reading = Line([(one.rows, one.reading_seconds) for one in plan.passes])
        self._seconds = self._tokens = self._passes = 0.0  # of the latest passes, older ones counting less

    def passed(self, rows: int, seconds: float, stall_s: float, misses: int) -> None:
        """A decode pass of `rows` is over."""
        kept = 0.5 ** (1 / HALF_LIFE_PASSES)
        if misses and stall_s > READING_BOUND * seconds:
            self._miss_s += LEARNT * ((seconds if self.plan.rates.overlaps else stall_s) / misses - self._miss_s)
        self._compute.add(rows, max(0.0, seconds - stall_s))
        self._reading.add(rows, misses * self._miss_s)
        self._seconds, self._tokens = kept * self._seconds + seconds, kept * self._tokens + rows
        self._passes = kept * self._passes + 1

    def expected(self, rows: int) -> ExpectedPass:
        """A pass of `rows`, by what passes took."""
        compute, reading = self._compute(rows), self._reading(rows)
        return ExpectedPass(rows, compute, reading, max(compute, reading) if self.plan.rates.overlaps else compute + reading)

    def rho(self, rows: int) -> float:
        """T_c / T_l of a pass of `rows`: above 1 memory for experts is worth less than rows."""
        one = self.expected(rows)
        return one.compute_seconds / max(one.reading_seconds, 1e-12)

    def most_rows(self, latency_s: float | None) -> int:
        """Of those that were planned, as many as give the most tokens per second in passes of at most `latency_s`."""
        if latency_s is None:
            return self.plan.rows
        return best_of([self.expected(rows) for rows in range(1, self.plan.rows + 1)], latency_s).rows

    @property
    def achieved_rows(self) -> float:
        """Rows of the latest passes, on average; 0 before the first."""
        return self._tokens / self._passes if self._passes else 0.0

    @property
    def achieved_tokens_per_s(self) -> float:
        """Of all rows of the latest passes together; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0
