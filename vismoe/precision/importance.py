"""Which experts of a layer are critical for the current computation: DyMoE, equations 2, 3 and 5 to 8.

Arrays of one MoE layer, on the host: T tokens, K choices, E experts. An id outside 0 ... E - 1 is a sentinel: no expert. A token
that is not real (padding) demands nothing and none of its choices is critical. Every token of a decode step and every sequence of
a prefill is considered separately, so that a request gets the same result in any batch; a batch demands the union. Pure
functions; docstrings say how ties are broken, finally by the smaller id or position.
"""

from collections.abc import Sequence

import numpy as np

from vismoe.precision.depth import critical_count, critical_counts

HEAVY_SHARE = 0.2  # share of a sequence's tokens that are heavy hitters; the paper gives no number


def heaviest(ids: list[int], weights: list[float], experts: int, ratio: float) -> list[int]:
    """The critical experts of one token, the heaviest first: `by_gate` for the simple case, in a tenth of its time."""
    order = sorted([(-weight, expert) for expert, weight in zip(ids, weights) if 0 <= expert < experts])
    return [expert for _, expert in order[: critical_count(ratio, len(order))]]


def by_gate(routing: np.ndarray, weights: np.ndarray, experts: int, ratio: float, real: np.ndarray | None = None) -> np.ndarray:
    """Critical choices, bool `[T, K]`: each token's ceil(ratio * its experts) heaviest ones (equation 3). Ties by smaller id.

    routing int64 `[T, K]`, weights float32 `[T, K]`, real bool `[T]` (None: all).
    """
    chosen = _chosen(routing, experts, real)
    order = np.lexsort((routing, -weights, ~chosen), axis=1)
    counts = critical_counts(ratio, chosen.sum(axis=1))
    critical = np.zeros(routing.shape, bool)
    np.put_along_axis(critical, order, np.arange(routing.shape[1]) < counts[:, None], axis=1)
    return critical


def by_load(
    routing: np.ndarray,
    weights: np.ndarray,
    hitters: np.ndarray,
    experts: int,
    ratio: float,
    sequence: np.ndarray | None = None,
    real: np.ndarray | None = None,
) -> np.ndarray:
    """Critical choices, bool `[T, K]`. Of the M experts that a sequence demands, the ceil(ratio * M) to which most of its heavy
    hitters go are critical (equation 2). Ties: more tokens of the sequence, the larger sum of weights, the smaller id.

    routing int64 and weights float32 `[T, K]`, hitters bool `[T]`, sequence int `[T]` from 0 (None: one), real bool `[T]`.
    """
    chosen, demand = _chosen(routing, experts, real), _Demand(routing, experts, sequence)
    load = demand.count(chosen & hitters[:, None])
    tokens = demand.count(chosen)
    mass = demand.count(chosen, weights)
    return demand.best(ratio, tokens, (-mass, -tokens, -load)) & chosen


def by_chance(
    routing: np.ndarray,
    experts: int,
    ratio: float,
    generator: np.random.Generator,
    sequence: np.ndarray | None = None,
    real: np.ndarray | None = None,
) -> np.ndarray:
    """As many critical choices as `by_load`, of random experts: the baseline of figure 3. A sequence may be one token."""
    chosen, demand = _chosen(routing, experts, real), _Demand(routing, experts, sequence)
    tokens = demand.count(chosen)
    return demand.best(ratio, tokens, (generator.random(tokens.shape),)) & chosen


def _chosen(routing: np.ndarray, experts: int, real: np.ndarray | None) -> np.ndarray:
    """The choices that are experts of real tokens, bool `[T, K]`."""
    chosen = (routing >= 0) & (routing < experts)
    return chosen if real is None else chosen & real[:, None]


class _Demand:
    """The demand of each of B sequences for a layer's experts."""

    def __init__(self, routing: np.ndarray, experts: int, sequence: np.ndarray | None):
        tokens = len(routing)
        self._shape = (1 if sequence is None or not tokens else int(sequence.max()) + 1, experts)
        first = 0 if sequence is None else sequence[:, None] * experts
        self._address = np.clip(routing, 0, experts - 1) + first  # [T, K]; meaningless for a sentinel

    def count(self, chosen: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Number of choices, or the sum of their weights, per sequence and expert, `[B, E]`."""
        size = self._shape[0] * self._shape[1]
        heavy = None if weights is None else weights[chosen]
        return np.bincount(self._address[chosen], heavy, minlength=size).reshape(self._shape)

    def best(self, ratio: float, tokens: np.ndarray, keys: tuple[np.ndarray, ...]) -> np.ndarray:
        """bool `[T, K]`: choices of the first ceil(ratio * M) of the sequence's M experts, sorted by keys, the last key first."""
        demanded = tokens > 0
        order = np.lexsort((*keys, ~demanded), axis=1)
        counts = critical_counts(ratio, demanded.sum(axis=1))
        critical = np.zeros(self._shape, bool)
        np.put_along_axis(critical, order, np.arange(self._shape[1]) < counts[:, None], axis=1)
        return critical.ravel()[self._address]


def heavy_hitters(
    scores: np.ndarray, real: np.ndarray | None = None, sequence: np.ndarray | None = None, share: float = HEAVY_SHARE
) -> np.ndarray:
    """bool `[T]`: the ceil(share * n) of each sequence's n real tokens with the highest scores (equation 1). Ties by position.

    scores float `[T]`: attention received; real bool `[T]` (None: all); sequence int `[T]` from 0 (None: one).
    """
    hitters = np.zeros(len(scores), bool)
    rows = np.arange(len(scores)) if real is None else np.flatnonzero(real)
    if not len(rows):
        return hitters
    groups = np.zeros(len(rows), np.int64) if sequence is None else sequence[rows]
    order = np.lexsort((-scores[rows], groups))
    sizes = np.bincount(groups)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a token within its sequence, best first
    hitters[rows[order[place < np.repeat(critical_counts(share, sizes), sizes)]]] = True
    return hitters


def skipped(
    routing: np.ndarray, weights: np.ndarray, critical: np.ndarray, none: int, renormalise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(routing, weights) without the choices that are not critical: their id becomes `none`, the first id that no expert has.

    With `renormalise` a token's remaining weights are scaled to the sum of all its weights before, so a family that normalises
    that sum to 1, or does not, keeps its convention. A token without remaining choices adds nothing to the residual stream. The
    arguments are not changed.
    """
    dropped = ~critical
    if not dropped.any():
        return routing, weights
    left = np.where(critical, weights, 0).astype(weights.dtype)
    if renormalise:
        before = np.where((routing >= 0) & (routing < none), weights, 0).sum(axis=1, keepdims=True)
        remaining = left.sum(axis=1, keepdims=True)
        left *= np.divide(before, remaining, out=np.ones_like(before), where=remaining != 0)
    return np.where(dropped, none, routing), left


def critical_ahead(scores: np.ndarray, ratios: Sequence[float], most: Sequence[int] | None = None) -> np.ndarray:
    """bool `[W, E]`: which of the experts that a lookahead predicts for the next W layers will be critical (equations 6 to 8).

    scores float `[W, E]`, 0 for an expert that is not predicted; ratios `[W]` of those layers. Of M predicted experts, the
    ceil(ratio * M) with the best scores; ties by smaller id. In prefill scores are frequencies (equation 7) and `most` is None;
    in decode M is at most `most` `[W]`, the number that the tokens can choose (equation 8: top_k for one token).
    """
    expected = (scores > 0).sum(axis=1)
    counts = critical_counts(np.array(ratios), expected if most is None else np.minimum(expected, most))
    critical = np.zeros(scores.shape, bool)
    order = np.argsort(-scores, axis=1, kind="stable")
    np.put_along_axis(critical, order, np.arange(scores.shape[1]) < counts[:, None], axis=1)
    return critical
