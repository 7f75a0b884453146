"""The controller of formats: which experts of a layer need the high format, and, after a forward pass, which experts move.

One thread calls it, once per MoE layer and once per forward pass. It uses no clock, so the same calls give the same answers. T
tokens, K choices, L MoE layers, E experts of a layer; ids outside 0 ... E - 1 are sentinels: no expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vismoe.precision.depth import ratios_of
from vismoe.precision.hotness import Hotness
from vismoe.precision.importance import by_gate, by_load, heaviest, skipped
from vismoe.precision.policy import Policy
from vismoe.precision.schedule import Schedule, schedule, threshold


class Choice(NamedTuple):
    """What one layer of one forward pass needs. Treat the arrays as read-only: some belong to the controller or the caller."""

    routing: np.ndarray  # int64 [T, K]; E in place of skipped choices
    weights: np.ndarray  # float32 [T, K]
    high: np.ndarray | None = None  # bool [E], experts that need the high format; None: all
    upgrades: tuple[int, ...] = ()  # needed high by these tokens, although not in `high`; the most important first


class Precision:
    """The controller of one engine: `at_layer` in every MoE layer, `end_step` after every forward pass.

    experts: number in each layer; quotas int `[L]`: how many of each layer may be hot, required by hotness. A profile that is
    already `warm` (from a file, or from before a re-plan) sets `targets` at once.
    """

    def __init__(
        self,
        policy: Policy,
        experts: Sequence[int],
        quotas: np.ndarray | None = None,
        hotness: Hotness | None = None,
        deep: Sequence[bool] | None = None,
    ):
        """`deep`: the MoE layers that belong to a decoder; the share of critical experts falls with their depth (None: all)."""
        self.policy, self._experts, most = policy, list(experts), max(experts)
        self._deep = list(deep) if deep is not None else [True] * len(self._experts)
        self.retention = policy.retention
        self.targets = np.zeros((len(experts), most), bool)  # [L, E] experts that hotness wants in the high format
        self._targets = [row[:count] for row, count in zip(self.targets, experts)]
        self.hotness: Hotness | None = None
        if policy.hotness:
            assert quotas is not None, "hotness needs quotas"
            self.hotness = hotness or Hotness(experts, policy.decay, policy.period_tokens)
            self._quotas = quotas
            self._threshold: np.ndarray | None = None  # [L], set by the first update
            if self.hotness.warm:
                self._update(self.hotness)

    @property
    def retention(self) -> float:
        """Mean share of the demanded experts that are critical; may be changed between two forward passes."""
        return self._retention

    @retention.setter
    def retention(self, mean: float) -> None:
        self._retention = mean
        by_depth = iter(ratios_of(sum(self._deep), mean, "cosine"))
        self.ratios = [next(by_depth) if deep else 1.0 for deep in self._deep]

    def at_layer(
        self,
        layer: int,
        decoding: bool,
        routing: np.ndarray,
        weights: np.ndarray,
        hitters: np.ndarray | None = None,
        sequence: np.ndarray | None = None,
        real: np.ndarray | None = None,
    ) -> Choice:
        """What the layer needs for these tokens: routing int64 and weights float32 `[T, K]`, which must not change afterwards.

        hitters bool `[T]`: heavy hitters, needed in prefill where importance decides; sequence int `[T]` from 0 (None: one);
        real bool `[T]` (None: all).
        """
        if self.hotness is not None:
            self.hotness.observe(layer, routing, weights, real)
        if not self.policy.importance:
            return Choice(routing, weights, self._targets[layer])
        if self.ratios[layer] >= 1.0 and self.hotness is None:
            return Choice(routing, weights)
        if decoding and len(routing) == 1 and real is None:
            ids = routing[0].tolist()
            best = heaviest(ids, weights[0].tolist(), self._experts[layer], self.ratios[layer])
            if self.policy.pair.low is None:
                return self._skipping(layer, routing, weights, np.array([[expert in best for expert in ids]]))
        else:
            critical = self._critical(layer, decoding, routing, weights, hitters, sequence, real)
            if self.policy.pair.low is None:
                return self._skipping(layer, routing, weights, critical)
            best = self._by_mass(layer, routing[critical], weights[critical])
        if self.hotness is None:
            return Choice(routing, weights, self._marked(layer, best))
        hot = self._targets[layer]
        return Choice(routing, weights, hot, tuple([expert for expert in best if not hot[expert]]))

    def end_step(self, tokens: int) -> Schedule | None:
        """Ends the forward pass over `tokens` real tokens. -> the moves, if an update was due; `targets` is updated
        accordingly."""
        if self.hotness is None or not self.hotness.end_step(tokens):
            return None
        return self._update(self.hotness)

    def _critical(
        self,
        layer: int,
        decoding: bool,
        routing: np.ndarray,
        weights: np.ndarray,
        hitters: np.ndarray | None,
        sequence: np.ndarray | None,
        real: np.ndarray | None,
    ) -> np.ndarray:
        """The critical choices, bool `[T, K]`."""
        experts, ratio = self._experts[layer], self.ratios[layer]
        if decoding:
            return by_gate(routing, weights, experts, ratio, real)
        assert hitters is not None, "importance in a prefill needs hitters"
        return by_load(routing, weights, hitters, experts, ratio, sequence, real)

    def _by_mass(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> list[int]:
        """The experts in `ids` `[n]`, ordered by their sum of weights `[n]`, largest first; ties by id."""
        mass = np.bincount(ids, weights, minlength=self._experts[layer])
        demanded = np.flatnonzero(np.bincount(ids, minlength=len(mass)))
        best: list[int] = demanded[np.argsort(-mass[demanded], kind="stable")].tolist()
        return best

    def _marked(self, layer: int, ids: list[int]) -> np.ndarray:
        """bool `[E]`, True for `ids`."""
        marked = np.zeros(self._experts[layer], bool)
        marked[ids] = True
        return marked

    def _skipping(self, layer: int, routing: np.ndarray, weights: np.ndarray, critical: np.ndarray) -> Choice:
        """A choice with the critical experts only, all of them high."""
        return Choice(*skipped(routing, weights, critical, self._experts[layer], renormalise=True))

    def _update(self, hotness: Hotness) -> Schedule:
        """The moves, every T tokens; the first update (the warm-up) sets the threshold, which stays."""
        if self._threshold is None:
            self._threshold = threshold(hotness.scores, self._quotas)
        moves = schedule(hotness.scores, self.targets, self._quotas, self._threshold, self.policy.hysteresis)
        for expert in moves.promote:
            self.targets[expert] = True
        for expert in moves.demote:
            self.targets[expert] = False
        return moves
