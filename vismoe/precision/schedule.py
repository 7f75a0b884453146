"""Which experts should be in the high format: DynaExq, algorithm 1 in every layer, with hysteresis. Pure functions of hotness.

L MoE layers, E experts of the largest layer; `hot` bool `[L, E]` marks the experts that are, or are about to be, in the high
format; quotas int `[L]` bounds their number per layer and follows from the memory plan.
"""

from dataclasses import dataclass, field

import numpy as np

from vismoe.types import ExpertId


@dataclass(frozen=True)
class Schedule:
    """The changes of one update of the high set."""

    promote: list[ExpertId] = field(default_factory=list)  # to the high format, the hottest first
    demote: list[ExpertId] = field(default_factory=list)  # to the low format, the coldest first


def threshold(scores: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Least score of a hot expert, float64 `[L]`: the score of the quota-th hottest of the layer (3.5), infinite for a quota of
    0.

    At most the mean of the layer's scores: the paper keeps the threshold fixed after the warm-up, and with a small quota no
    expert would reach it any more once use spreads more evenly. scores `[L, E]` after a warm-up, quotas int `[L]`.
    """
    ascending, last = np.sort(scores, axis=1), scores.shape[1] - np.maximum(quotas, 1)
    of_last = np.take_along_axis(ascending, last[:, None], axis=1)[:, 0]
    return np.where(quotas > 0, np.minimum(of_last, scores.mean(axis=1)), np.inf)


def schedule(
    scores: np.ndarray, hot: np.ndarray, quotas: np.ndarray, threshold: np.ndarray | None, hysteresis: float
) -> Schedule:
    """Algorithm 1 in every layer: which experts leave and join those that are `hot` bool `[L, E]`, at most quotas int `[L]`.

    An expert joins from a score of `threshold` float `[L]` on (None: any above 0) if there is room, or if it is more than
    `hysteresis` times as hot as the coldest member, whose place it takes. A member whose score falls below the threshold stays
    until its place is needed; a smaller quota takes effect at once. Ties by smaller id.
    """
    least = np.zeros(len(scores)) if threshold is None else threshold
    room = quotas - hot.sum(axis=1)
    newcomer = ~hot & (scores >= least[:, None])
    hottest = np.where(newcomer, scores, 0.0).max(axis=1)
    coldest = np.where(hot, scores, np.inf).min(axis=1)
    rows = np.flatnonzero((room < 0) | ((hottest > 0) & ((room > 0) | (hottest > hysteresis * coldest))))
    if not rows.size:
        return Schedule()
    room = room[rows, None]
    joins, join_scores = _ranked(scores[rows], newcomer[rows], hottest_first=True)
    leaves, leave_scores = _ranked(scores[rows], hot[rows], hottest_first=False)
    rank = np.arange(scores.shape[1])
    displaced = rank - room  # rank of the member whose place a newcomer takes; below 0: a free place
    to_beat = np.take_along_axis(leave_scores, np.clip(displaced, 0, rank[-1]), axis=1)
    joining = (join_scores > 0) & ((displaced < 0) | (join_scores > hysteresis * to_beat))
    leaving = rank < joining.sum(axis=1, keepdims=True) - room
    return Schedule(
        promote=_experts(rows, joins, join_scores, joining, hottest_first=True),
        demote=_experts(rows, leaves, leave_scores, leaving, hottest_first=False),
    )


def _ranked(scores: np.ndarray, members: np.ndarray, hottest_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """(expert ids, their scores) of every row, sorted; non-members come last, with a score of 0 or infinity."""
    sign = -1 if hottest_first else 1
    scores = np.where(members, scores, 0.0 if hottest_first else np.inf)
    ids = np.argsort(sign * scores, axis=1, kind="stable")
    return ids, np.take_along_axis(scores, ids, axis=1)


def _experts(rows: np.ndarray, ids: np.ndarray, scores: np.ndarray, taken: np.ndarray, hottest_first: bool) -> list[ExpertId]:
    """The taken experts of all rows, by score; ties by layer and expert. `rows`: the layer of each row."""
    row, rank = np.nonzero(taken)
    layer, expert, score = rows[row], ids[row, rank], scores[row, rank]
    order = np.lexsort((expert, layer, -score if hottest_first else score))
    return [ExpertId(*pair) for pair in zip(layer[order].tolist(), expert[order].tolist())]
