"""From which decoder layer on visual tokens can be dropped: the shallowest depth whose routing predicts the deeper layers'
demand.

Criterion: for every visual token the marginal expansion (VisMMoE eq. 2: the share of its experts that no core token uses),
computed from the layers before P and from the layers from P on. If both rank the tokens of an image alike, a choice by the early
layers also suits the deeper layers. `prune_layer` is the shallowest P whose rank correlation (Spearman, mean over images) reaches
90% of the best depth's. Here the core is every fifth token, because traces have no saliency, and the measure concerns depth.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vismoe.trace.files import Trace
from vismoe.types import Phase, TokenKind

CORE_EVERY = 5
SHARE_OF_BEST = 0.9
FEWEST_TOKENS = 16  # least tokens of an image that counts
MOST_IMAGES = 300


@dataclass(frozen=True)
class Depth:
    """How well the layers before decoder layer `prune_layer` predict the demand of the later ones."""

    prune_layer: int
    correlation: float


def depth_curve(trace: Trace) -> list[Depth]:
    """The curve over the decoder layers with MoE layers before and after them, from images without dropped tokens."""
    numbers = [_decoder_number(layer.path, layer.index) for layer in trace.inventory.layers]
    cuts = [cut for cut in range(1, len(numbers)) if numbers[cut] > numbers[cut - 1]]
    found: dict[int, list[float]] = {cut: [] for cut in cuts}
    for routing in itertools.islice(_images(trace), MOST_IMAGES):
        for cut in cuts:
            correlation = rank_correlation(expansion(routing[:cut]), expansion(routing[cut:]))
            if correlation is not None:
                found[cut].append(correlation)
    return [Depth(numbers[cut], float(np.mean(values))) for cut, values in found.items() if values]


def shallowest(curve: Sequence[Depth], least: int = 1) -> int | None:
    """The first depth, from `least` on, that reaches 90% of the best one; None without a curve."""
    best = max((depth.correlation for depth in curve), default=0.0)
    good = [depth.prune_layer for depth in curve if depth.correlation >= SHARE_OF_BEST * best]
    return max(least, min(good)) if good else None


def expansion(routing: Sequence[np.ndarray]) -> np.ndarray:
    """For each token, the share of its (layer, expert) pairs that no core token uses, `[T]`, from the choices `[T, K]` of some
    layers."""
    new = total = np.zeros(len(routing[0]))
    for chosen in routing:
        known = np.isin(chosen, chosen[::CORE_EVERY])
        new, total = new + (~known).sum(1), total + chosen.shape[1]
    outside = np.arange(len(new)) % CORE_EVERY != 0
    return (new / total)[outside]


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's correlation, ties at their mean rank; None if one of the two is constant."""
    one, other = _ranks(first), _ranks(second)
    if not one.std() or not other.std():
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[group]


def _images(trace: Trace) -> Iterator[list[np.ndarray]]:
    """The choices `[T, K]` per MoE layer for every run of visual tokens, in prompts of one sequence whose layers all got all
    tokens."""
    for step in trace:
        whole = all(routing.kept is None for routing in step.layers) and len(step.layers) == len(trace.inventory.layers)
        if step.phase is not Phase.PREFILL or len(step.kinds) != 1 or not whole:
            continue
        visual = np.concatenate([[False], step.kinds[0] == TokenKind.VISUAL, [False]])
        for start, end in np.flatnonzero(visual[1:] != visual[:-1]).reshape(-1, 2):
            if end - start >= FEWEST_TOKENS:
                yield [routing.expert_ids[start:end] for routing in step.layers]


def _decoder_number(path: str, index: int) -> int:
    """The number of the decoder layer that contains an MoE layer."""
    numbers = [int(part) for part in path.split(".") if part.isdecimal()]
    return numbers[0] if numbers else index
