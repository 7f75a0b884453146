"""Statistics of a difference between two contestants on the same questions: 95% intervals, and a test."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

from vismoe.eval.scoring import accuracy

RESAMPLES = 2000
SIGN_FLIPS, FLIPS_AT_ONCE = 10_000, 500
FEW_CHANGES = 12  # up to this number, every assignment of signs is tried


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """mean(second) - mean(first), scores of the same questions in the same order.

    Newcombe's interval for paired proportions (Statistics in Medicine 17, 1998, method 10) if all scores are 0 or 1. Otherwise
    the percentile bootstrap over questions with a fixed seed, but at least 3 / n to either side: if few or no questions differ,
    that says little about questions that were not asked (the rule of three).
    """
    if {*first, *second} <= {0.0, 1.0}:
        return _newcombe(first, second)
    differences = np.subtract(second, first)
    value, least = float(differences.mean()), 3 / len(differences)
    low, high = map(float, np.quantile(differences[_resampled(len(differences))].mean(axis=1), (0.025, 0.975)))
    return Interval(value, min(low, value - least), max(high, value + least))


def beside(base: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """The accuracy of `own` with its interval, and its paired difference from `base`, as plain values."""
    return {**asdict(accuracy(own)), "difference": asdict(paired_difference(base, own))}


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Probability that chance alone separates two equally good contestants at least this far, two-sided.

    McNemar's exact test if all scores are 0 or 1: of the changed questions, how many improved. Otherwise the sign-flip test of
    the mean difference: exact up to FEW_CHANGES changed questions, above that with SIGN_FLIPS draws and a fixed seed.
    """
    changes = np.subtract(second, first)
    changes = changes[changes != 0]
    count = len(changes)
    if {*first, *second} <= {0.0, 1.0}:
        fewer = int(min((changes > 0).sum(), (changes < 0).sum()))
        return min(1.0, 2 * sum(comb(count, better) for better in range(fewer + 1)) / 2**count)
    if count <= FEW_CHANGES:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return float((np.abs(signs @ changes) >= np.abs(changes.sum()) - 1e-12).mean())
    random = np.random.default_rng(0)
    times = range(SIGN_FLIPS // FLIPS_AT_ONCE)
    drawn = np.concatenate([random.choice((-1, 1), size=(FLIPS_AT_ONCE, count)) @ changes for _ in times])
    return float((1 + (np.abs(drawn) >= np.abs(changes.sum()) - 1e-12).sum()) / (1 + SIGN_FLIPS))


def ratio_of_sums(numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray) -> Interval:
    """sum(numerators) / sum(denominators), both per question; percentile bootstrap over questions with a fixed seed."""
    above, below = np.asarray(numerators), np.asarray(denominators)
    chosen = _resampled(len(above))
    ratios = above[chosen].sum(axis=1) / below[chosen].sum(axis=1)
    return Interval(float(above.sum() / below.sum()), *map(float, np.quantile(ratios, (0.025, 0.975))))


def spread(interval: dict[str, float], form: str, scale: float = 1) -> str:
    """An estimate and its interval, as a dict, each times `scale` in the format `form`: "0.42 (0.30 to 0.44)"."""
    value, low, high = (f"{scale * interval[name]:{form}}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def points(interval: dict[str, float]) -> str:
    """An interval as a dict, of a difference between shares, in percentage points: "-0.42 (-1.30 to +0.44)"."""
    return spread(interval, "+.2f", 100)


def _resampled(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _newcombe(first: Sequence[float], second: Sequence[float]) -> Interval:
    pairs = list(zip(first, second, strict=True))
    both, lost, won, neither = (pairs.count(pair) for pair in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)))
    before, after = accuracy(first), accuracy(second)
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    correlation = _agreement(both * neither - lost * won, len(pairs)) / sqrt(margins) if margins else 0.0
    down, up = after.mean - after.low, before.high - before.mean
    below = sqrt(max(0.0, down**2 - 2 * correlation * down * up + up**2))
    up, down = after.high - after.mean, before.mean - before.low
    above = sqrt(max(0.0, up**2 - 2 * correlation * up * down + down**2))
    difference = after.mean - before.mean
    return Interval(difference, difference - below, difference + above)


def _agreement(product: int, count: int) -> float:
    """Newcombe's correction: does not count association that could be chance."""
    return max(product - count / 2, 0.0) if product > 0 else float(product)
