"""Rules that choose the format of each choice of a token: those of DynaExq and DyMoE, and those with which they are compared.

Contestants are plain values that decide. Random draws depend on the seed, the prompt, the layer and the position, never on the
batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vismoe.eval.studies.precision_model import SKIP, LayerCall, Served
from vismoe.pair import FormatPair
from vismoe.precision.depth import ratios_of
from vismoe.precision.importance import HEAVY_SHARE, by_chance, by_gate, by_load, heavy_hitters, skipped
from vismoe.types import Format

ALIKE = "alike"  # each computation has the same probability of the low format, whatever its expert


@dataclass(frozen=True)
class RuleInputs:
    """Inputs of contestants beside the call: the available formats, and orders of experts."""

    formats: Sequence[Format]
    orders: Mapping[tuple[str, int], np.ndarray]  # by (order, seed): scores [L, E], the lowest are demoted first

    def place(self, format: Format | None) -> int:
        return SKIP if format is None else self.formats.index(format)

    def serve(self, call: LayerCall, high: np.ndarray, pair: FormatPair) -> Served:
        """The better format of `pair` where `high` [T, K] is true."""
        return Served(np.where(high, self.place(pair.high), self.place(pair.low)), call.weights)


class _OfPair:
    pair: FormatPair

    @property
    def used(self) -> tuple[Format, ...]:
        """The formats from which it chooses."""
        return self.pair.resident


@dataclass(frozen=True)
class Everywhere:
    """One format for all experts."""

    format: Format

    def __str__(self) -> str:
        return "16 bit" if self.format is Format.RAW else str(self.format)

    @property
    def used(self) -> tuple[Format, ...]:
        return (self.format,)

    def serve(self, call: LayerCall, facts: RuleInputs) -> Served:
        return Served(np.full_like(call.routing, facts.place(self.format)), call.weights)


@dataclass(frozen=True)
class InOneLayer(_OfPair):
    """All experts of one layer in the low format, those of other layers in the high one (figure 5 of DyMoE)."""

    layer: int
    pair: FormatPair

    def __str__(self) -> str:
        return f"{self.pair} layer {self.layer}"

    def serve(self, call: LayerCall, facts: RuleInputs) -> Served:
        return facts.serve(call, np.full(call.routing.shape, call.layer != self.layer), self.pair)


@dataclass(frozen=True)
class Demoted(_OfPair):
    """The share `low` of each layer's experts is in the low format, the first ones of an order (figure 4 of DynaExq)."""

    pair: FormatPair
    low: float
    order: str  # one of the orders in RuleInputs, or ALIKE
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.pair} {self.low:.1%} {self.order}{f' {self.seed}' if self.seed else ''}"

    def demotes(self, facts: RuleInputs) -> np.ndarray:
        """bool [L, E]: experts in the low format, if the order depends on the expert."""
        return coldest(facts.orders[self.order, self.seed], self.low)

    def serve(self, call: LayerCall, facts: RuleInputs) -> Served:
        if self.order != ALIKE:
            return facts.serve(call, ~self.demotes(facts)[call.layer][call.routing], self.pair)
        high = np.zeros(call.routing.shape, bool)
        for rows, chance in units(call, self.seed):
            high[rows] = chance.random(call.routing[rows].shape) >= self.low
        return facts.serve(call, high, self.pair)


@dataclass(frozen=True)
class Retained(_OfPair):
    """The share `retention` of the experts that a prompt or a token demands is critical; the others are in the low format."""

    pair: FormatPair
    retention: float
    ranking: Literal["importance", "random"] = "importance"
    schedule: Literal["cosine", "equal"] = "cosine"
    renormalise: bool = True  # scale the remaining weights if others are skipped
    hitters: float = HEAVY_SHARE

    def __str__(self) -> str:
        parts = [f"{self.pair} {self.retention:.0%} {self.ranking}", self.schedule]
        parts += [] if self.renormalise else ["weights left"]
        parts += [] if self.hitters == HEAVY_SHARE else [f"hitters {self.hitters:.0%}"]
        return ", ".join(parts)

    def serve(self, call: LayerCall, facts: RuleInputs) -> Served:
        critical = self._critical(call)
        served = facts.serve(call, critical, self.pair)
        if self.pair.low is not None:
            return served
        _, weights = skipped(call.routing, call.weights, critical, call.experts, self.renormalise)
        return Served(served.formats, weights)

    def _critical(self, call: LayerCall) -> np.ndarray:
        """bool [T, K]: the chosen expert is critical for the token's prompt, or in decode for the token."""
        ratio = ratios_of(call.layers, self.retention, self.schedule)[call.layer]
        if self.ranking == "random":
            return drawn(call, ratio)
        if call.decoding:
            return by_gate(call.routing, call.weights, call.experts, ratio)
        hitters = heavy_hitters(call.received(), None, call.sequence, self.hitters)
        return by_load(call.routing, call.weights, hitters, call.experts, ratio, call.sequence)


# A way to choose formats. Its text is its name in tables and files.
PrecisionContestant = Everywhere | InOneLayer | Demoted | Retained


def coldest(scores: np.ndarray, share: float) -> np.ndarray:
    """bool [L, E]: of each layer the round(share * E) experts with the lowest scores [L, E], ties by id."""
    ranks = scores.argsort(axis=1, kind="stable").argsort(axis=1)
    return ranks < round(share * scores.shape[1])


def drawn(call: LayerCall, ratio: float) -> np.ndarray:
    """bool [T, K]: as many critical experts as under importance, drawn from those that the prompt, or the token, demands."""
    critical = np.zeros(call.routing.shape, bool)
    for rows, chance in units(call):
        critical[rows] = by_chance(call.routing[rows], call.experts, ratio, chance)
    return critical


def units(call: LayerCall, seed: int = 0) -> Iterator[tuple[np.ndarray, np.random.Generator]]:
    """Groups of tokens that are decided together (a prompt's, or one of an answer), each with its own random generator."""
    unit = np.arange(len(call.routing)) if call.decoding else call.sequence
    for one in np.unique(unit):
        rows = np.flatnonzero(unit == one)
        first = rows[0]
        yield rows, np.random.default_rng([seed, call.prompts[call.sequence[first]], call.layer, int(call.position[first])])
