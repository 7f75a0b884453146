"""Statistics of the experts that one prompt's tokens choose: how many, how concentrated, how similar from layer to layer. Pure.

T tokens, K choices of a token, E experts of a layer. Experts of different layers have only their numbers in common, so the
similarity of layers is measured in ways that do not depend on numbering. The index-wise cosine, which does, is included because
it is closest to VisMMoE's figure 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vismoe.trace.steps import TraceStep
from vismoe.types import TokenKind


@dataclass(frozen=True)
class LayerLoad:
    """The routing of one prompt at one MoE layer."""

    experts: np.ndarray  # [T, K] int: the choices of the tokens that reached the layer; E and above: no expert
    tokens: np.ndarray  # [T] int, ascending: their indices in the prompt
    visual: np.ndarray  # [T] bool
    pruned: bool  # tokens were dropped before this layer

    def only(self, chosen: np.ndarray) -> "LayerLoad":
        """The tokens where `chosen` [T] is true."""
        return LayerLoad(self.experts[chosen], self.tokens[chosen], self.visual[chosen], self.pruned)


def prompt_layers(step: TraceStep) -> list[LayerLoad]:
    """A recorded prefill of one sequence, layer by layer, without padding."""
    assert len(step.kinds) == 1, f"{len(step.kinds)} sequences in one step: statistics are of single prompts"
    kinds = step.kinds[0]
    layers = []
    for routing in step.layers:
        tokens = np.arange(len(kinds)) if routing.kept is None else routing.kept
        layer = LayerLoad(routing.expert_ids, tokens, kinds[tokens] == TokenKind.VISUAL, routing.kept is not None)
        layers.append(layer.only(kinds[tokens] != TokenKind.PAD))
    return layers


def load(layer: LayerLoad, num_experts: int) -> np.ndarray:
    """[E]: the number of tokens that chose each expert."""
    return np.bincount(layer.experts[layer.experts < num_experts], minlength=num_experts)


def active_experts(loads: np.ndarray) -> int:
    """Experts that at least one token chose."""
    return int((loads > 0).sum())


def coverage_curve(loads: np.ndarray) -> np.ndarray:
    """[E]: share of the assignments that the 1, 2, ... E most used experts take."""
    return np.sort(loads)[::-1].cumsum() / max(loads.sum(), 1)


def coverage(loads: np.ndarray, chosen: np.ndarray) -> float:
    """Share of the assignments that go to the `chosen` experts."""
    return float(loads[chosen].sum() / max(loads.sum(), 1))


def index_similarity(here: np.ndarray, next_one: np.ndarray) -> float:
    """Cosine of two layers' loads, expert by number."""
    return float((here * next_one).sum() / max(np.sqrt((here**2).sum() * (next_one**2).sum()), 1e-12))


def structure_similarity(here: LayerLoad, next_one: LayerLoad, num_experts: int) -> float:
    """Do tokens that share experts at one layer share them at the next? Correlation over pairs of tokens, -1 to 1.

    For each pair of tokens that reached the second layer, the number of experts that both chose is counted at either layer. A
    token is not paired with itself, so few tokens do not raise the result. 0 if all pairs are equal at one of the layers.
    """
    shared = []
    for layer in (here.only(np.isin(here.tokens, next_one.tokens)), next_one):
        chose = _choices(layer, num_experts)
        shared.append((chose @ chose.T)[np.triu_indices(len(chose), 1)])
    first, second = (pairs - pairs.mean() if len(pairs) else pairs for pairs in shared)
    spread = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / spread) if spread > 0 else 0.0


def expansions(layers: Sequence[LayerLoad], core: np.ndarray, num_experts: int) -> np.ndarray:
    """[T]: the share of a token's experts, over these layers, that no token of the core `[T]` uses (equation 2 of VisMMoE)."""
    new = np.zeros(len(core))
    for layer in layers:
        used = np.zeros(max(num_experts, layer.experts.max() + 1), bool)
        used[layer.experts[core]] = True
        new += (~used[layer.experts]).mean(axis=1)
    return new / len(layers)


class LoadTransitions:
    """Predicts the load of the next layer from that of one layer, learned from other prompts: E x E counts, plus one each."""

    def __init__(self, prompts: Sequence[tuple[LayerLoad, LayerLoad]], num_experts: int):
        """`prompts`: the two layers of every prompt to learn from."""
        self._from = np.ones((num_experts, num_experts))
        self.popular = np.zeros(num_experts)  # the next layer's load over all prompts
        for here, next_one in prompts:
            here = here.only(np.isin(here.tokens, next_one.tokens))
            self._from += _choices(here, num_experts).T @ _choices(next_one, num_experts)
            self.popular += load(next_one, num_experts)
        self._from /= self._from.sum(axis=1, keepdims=True)

    def expected(self, loads: np.ndarray) -> np.ndarray:
        """[E]: the next layer's load, predicted from this layer's."""
        return loads @ self._from


def _choices(layer: LayerLoad, num_experts: int) -> np.ndarray:
    """int [T, E]: 1 where a token chose an expert. Integer products stay on one thread, which is faster at this size."""
    chose = np.zeros((len(layer.tokens), num_experts + 1), np.int64)
    np.put_along_axis(chose, np.minimum(layer.experts, num_experts).astype(np.int64), 1, axis=1)
    return chose[:, :num_experts]


def most(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values; of equal ones the first."""
    return np.argsort(-values, kind="stable")[:count]
