"""Which visual tokens of one image are kept: pure functions of saliency and routing, deterministic.

N visual tokens, A experts that a token uses in the layers before the pruning (all layers together), D numbers in a hidden state.
`affinity` is algorithm 1 of VisMMoE; the alternatives are `saliency`, `distinct` (the same, if the caller passes distinctness as
saliency), `visionzip`, `uniform` and `random`. All keep floor(keep * N) tokens, at least one. Of equal tokens the first is
preferred; saliency that is the same everywhere counts as 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vismoe.errors import ConfigError, InputError
from vismoe.vision.layout import TokenLayout

# Without a calibration. Not the paper's `affinity`, which spares experts only where tokens keep theirs in all layers: with
# half of the tokens the demo model loses 19.7 points of printed text by it, 0.1 by `distinct` (docs/visual-tokens.md).
DEFAULT_SELECTION = "distinct"
ROUNDING = 1e-9  # tolerance of share * N, so that 0.29 of 100 is 29 although the floating-point product is slightly smaller
CONTEXTUAL_SHARE = 10 / 64  # share of contextual tokens that VisionZip keeps: 54 dominant and 10 contextual ones of 64


@dataclass(frozen=True)
class Pruning:
    """How visual tokens are selected. Raises ConfigError for invalid values."""

    keep: float = 1.0  # beta: share of the visual tokens that are kept; 1.0 is exact
    selection: str = DEFAULT_SELECTION
    core_share: float = 0.2  # alpha: share of all tokens that affinity keeps for their saliency alone, at most `keep`
    expansion_weight: float = 2.0  # lambda: weight of a token's new experts against its saliency (affinity)
    seed: int = 0  # of `random`

    def __post_init__(self) -> None:
        if self.selection not in RULES:
            raise ConfigError(f"selection={self.selection!r}: choose one of {', '.join(SELECTIONS)}")
        numbers = (self.keep, self.core_share, self.expansion_weight)
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise ConfigError(f"keep, core_share and expansion_weight are numbers, not {', '.join(map(repr, numbers))}")
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep}: the share of visual tokens to keep must be above 0 and at most 1, e.g. 0.5")
        if not 0 <= self.core_share <= 1:
            raise ConfigError(f"core_share={self.core_share}: must be between 0 and 1, e.g. 0.2")
        if not 0 <= self.expansion_weight < math.inf:
            raise ConfigError(f"expansion_weight={self.expansion_weight}: must be a number of at least 0, e.g. 2.0")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}: must be a whole number of at least 0")


@dataclass(frozen=True)
class Selection:
    """The tokens of one image that are kept, and the effect on demanded experts.

    The expansion of a token (equation 2) is the share of its experts that no token of the core uses. Expansion and `coverage` are
    measured for every selection against affinity's core; they are None if no routing is known or everything is kept.
    """

    kept: np.ndarray  # int64 [K], ascending: indices within the image
    coverage: float | None = None  # share of all (layer, expert) pairs before the pruning that the core's tokens use
    mean_expansion: float | None = None  # over the tokens outside the core
    kept_expansion: float | None = None  # over the kept tokens outside the core
    merged_into: np.ndarray | None = None  # int64 [N], visionzip: index into `kept` of the token whose average it joins; -1: none


@dataclass(frozen=True)
class KeptImage:
    """One image of a prompt, and its kept tokens."""

    row: int  # of the batch
    start: int  # position of its first token in the sequence
    grid: tuple[int, int] | None  # rows and columns of tokens, if the tower received them
    selection: Selection
    tokens: int
    layout: TokenLayout | None = None  # where its tokens are no plain grid

    @property
    def cells(self) -> np.ndarray | None:
        """The cells of the grid that kept tokens show, int64; None if tokens have no place in the image."""
        if self.grid is None:
            return None
        return self.selection.kept if self.layout is None else self.layout.cells(self.selection.kept)


def kept_count(share: float, tokens: int) -> int:
    """floor(share * tokens), computed as if share were its exact decimal number."""
    return math.floor(share * tokens + ROUNDING)


def select(
    pruning: Pruning, saliency: np.ndarray, active: np.ndarray, pairs: int, features: np.ndarray | None = None
) -> Selection:
    """The tokens of one image to keep.

    `saliency` float [N]; `active` int [N, A] holds addresses (MoE layer * most experts + expert), -1 for none, and A is 0 if no
    routing is known; `pairs` is the number of addresses; only `visionzip` needs `features` float [N, D]. Raises InputError for
    saliency that is not finite.
    """
    tokens = len(saliency)
    if pruning.keep == 1.0 or tokens == 0:
        return Selection(np.arange(tokens))
    case = _Case.of(pruning, saliency, active, pairs)
    rule = RULES[pruning.selection]
    dominant, contextual = rule.chosen(case)
    kept, merged_into = np.sort(np.concatenate([dominant, contextual])), None
    if rule.merges:
        assert features is not None and len(features) == tokens, f"{pruning.selection} needs the features of every token"
        merged_into = _merged(dominant, contextual, kept, features)
    if not active.shape[1]:
        return Selection(kept, merged_into=merged_into)
    outside = np.setdiff1d(np.arange(tokens), case.core)
    kept_outside = np.intersect1d(outside, kept)
    return Selection(
        kept,
        coverage=case.core_pairs / pairs,
        mean_expansion=_mean(case.expansion[outside]),
        kept_expansion=_mean(case.expansion[kept_outside]),
        merged_into=merged_into,
    )


@dataclass(frozen=True)
class _Case:
    """One image to select from."""

    pruning: Pruning
    salient: np.ndarray  # float64 [N], 0 to 1
    expansion: np.ndarray  # float64 [N], equation 2; 0 for a token without experts
    core: np.ndarray  # int64, most salient first
    core_pairs: int  # (layer, expert) pairs that the core's tokens use
    count: int  # tokens to keep

    @classmethod
    def of(cls, pruning: Pruning, saliency: np.ndarray, active: np.ndarray, pairs: int) -> "_Case":
        salient = _normalised(saliency)
        core = _top(salient, kept_count(min(pruning.core_share, pruning.keep), len(salient)))
        covered = np.zeros(pairs + 1, bool)  # the last element is for the address -1
        covered[active[core]] = True
        covered[-1] = True
        used = np.sort(active, axis=1)
        distinct = used >= 0
        distinct[:, 1:] &= used[:, 1:] != used[:, :-1]
        expansion = (distinct & ~covered[used]).sum(axis=1) / np.maximum(distinct.sum(axis=1), 1)
        count = max(1, kept_count(pruning.keep, len(salient)))
        return cls(pruning, salient, expansion, core, int(covered[:-1].sum()), count)


def _affinity(case: _Case) -> np.ndarray:
    """Algorithm 1: the core, then the salient tokens that demand few experts which the core does not use."""
    score = case.salient - case.pruning.expansion_weight * case.expansion
    score[case.core] = np.inf
    return _top(score, len(score))


def _saliency(case: _Case) -> np.ndarray:
    return _top(case.salient, len(case.salient))


def _uniform(case: _Case) -> np.ndarray:
    """Evenly over the image's tokens in their order."""
    return _spread(len(case.salient), case.count)


def _random(case: _Case) -> np.ndarray:
    tokens = len(case.salient)
    return np.random.default_rng((case.pruning.seed, tokens)).permutation(tokens)


@dataclass(frozen=True)
class SelectionRule:
    """How a selection chooses."""

    order: Callable[[_Case], np.ndarray]  # int64: at least the tokens that are kept, those to keep first
    by_distinctness: bool = False  # a token is salient that is unlike the mean of its image, instead of one that is attended to
    merges: bool = False  # as in VisionZip: a share of the kept tokens averages those that are not in the order's beginning

    def chosen(self, case: _Case) -> tuple[np.ndarray, np.ndarray]:
        """The kept tokens: the first of the order (dominant), and contextual ones evenly over the rest."""
        dominant = self.order(case)[: case.count - (round(CONTEXTUAL_SHARE * case.count) if self.merges else 0)]
        others = np.setdiff1d(np.arange(len(case.salient)), dominant)
        return dominant, others[_spread(len(others), case.count - len(dominant))]


SELECTIONS = {
    "affinity": SelectionRule(_affinity),
    "saliency": SelectionRule(_saliency),
    "distinct": SelectionRule(_saliency, by_distinctness=True),
    "visionzip": SelectionRule(_saliency, merges=True),
    "uniform": SelectionRule(_uniform),
    "random": SelectionRule(_random),
}
CONTROLS = {  # what studies ask for beside them: algorithm 1 on what the other selections build on
    "affinity-distinct": SelectionRule(_affinity, by_distinctness=True),
    "affinity-visionzip": SelectionRule(_affinity, merges=True),
}
RULES = SELECTIONS | CONTROLS


def _merged(dominant: np.ndarray, contextual: np.ndarray, kept: np.ndarray, features: np.ndarray) -> np.ndarray:
    """int64 [N]: every token that is not dominant joins the contextual token that it resembles most (cosine)."""
    merged = np.full(len(features), -1)
    if not len(contextual):
        return merged
    others = np.setdiff1d(np.arange(len(features)), dominant)
    directions = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    nearest = contextual[np.argmax(directions[others] @ directions[contextual].T, axis=1)]
    merged[others] = np.searchsorted(kept, nearest)
    merged[contextual] = np.searchsorted(kept, contextual)
    return merged


def _normalised(saliency: np.ndarray) -> np.ndarray:
    """Min-max scaled to float64 between 0 and 1; all 0 if all are equal."""
    finite = np.isfinite(saliency)
    if not finite.all():
        raise InputError(
            f"the saliency of {(~finite).sum()} of {len(saliency)} visual tokens is not a finite number. "
            "Fix: run without pruning (keep=1.0), or load the model with dtype=bfloat16 or float32"
        )
    values = saliency.astype(np.float64)
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _top(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first; of equal ones the first."""
    return np.argsort(-values, kind="stable")[:count]


def _spread(tokens: int, count: int) -> np.ndarray:
    """`count` different indices, evenly over `tokens`."""
    return (2 * np.arange(count) + 1) * tokens // (2 * max(count, 1))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
