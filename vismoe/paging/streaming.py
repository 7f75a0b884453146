"""Whether the layers of a pass are streamed, which experts stay then, and how many slabs the others pass through.

A streamed pass keeps a fixed set of experts of every layer. The others pass through a ring of slabs: while a layer computes, the
absent experts of the next one are copied, as far as the ring reaches; those that its router does not choose are dropped from what
is to be copied. So the link does not wait for the layer, and no expert leaves that the next pass wants as much as the one that
came. A layer takes the longer of its computation T_c and its copies, instead of one after the other (FluxMoE, 3.1). Unlike there,
the ring is not two whole layers: where the link is slow it holds what is copied within T_c, and the slabs that this saves hold
experts.

A prompt that is not streamed copies ahead, too, but only as far as a prompt's small ring reaches, and while nearly all that its
layers lack is wanted.

`StreamEstimate` and `fixed_residents` are pure. `Streaming` is what the residency core notes about the passes of one geometry.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vismoe.types import MoELayer, Phase

GAIN = 0.9  # of demand paging's time, below which streaming begins; it ends where it takes longer than demand paging
STAYS = 1.5  # how much more than a resident expert an absent one must have been used to take its place for good
RING_SHARE = 0.5  # of the slabs that the ring may take
IN_TURN = 4  # slabs of the ring in a prompt, at least, whose experts wait for their turn, since they are computed by id
SURE = 0.97  # of a layer's absent experts, the share that prompts want from which on they are copied before the layer's turn
MOSTLY = 0.5  # wanted share, below which what comes unasked is more often in vain than not
NEWEST_SHARE = 0.25  # of the newest pass in what is known about passes of its size


class Verdict(enum.StrEnum):
    """What was decided about a pass; each is a counter of `vismoe.metrics`."""

    STREAMED = "streamed"
    UNMEASURED = "unstreamed_unmeasured"  # no pass of about as many tokens has run by demand paging yet
    SMALL_POOL = "unstreamed_small_pool"  # the ring would take more than half of the slabs
    NO_GAIN = "unstreamed_no_gain"  # it would not be clearly sooner


@dataclass(frozen=True)
class StreamEstimate:
    """A pass over `layers` layers of `experts` experts each, in `slabs` slabs. Seconds are those of one layer."""

    layers: int
    experts: float
    slabs: int
    copy_s: float  # of one expert
    compute_s: float  # of everything but waiting
    wanted: float  # share of a layer's experts that the pass demands
    missed: float  # share of a layer's experts that demand paging copies
    waited: float = 1.0  # share of that copying that layers wait for; the rest lies behind their computation
    in_flight: int = 0  # slabs of the ring that are being filled, or computed, while the others wait for the next layer

    @property
    def ring(self) -> int:
        """Slabs that the others pass through: what is copied while a layer computes, at most two layers' absent experts. Each
        costs a copy per pass, since it holds no expert for the next one."""
        absent = math.ceil(max(0.0, self.experts - self.slabs / self.layers))
        return min(2 * absent, max(1, self._copied_meanwhile + self.in_flight))

    @property
    def _copied_meanwhile(self) -> int:
        return math.ceil(min(self.compute_s / self.copy_s, self.experts))

    @property
    def streamed_s(self) -> float:
        """Of a streamed layer: what it wants and lacks is copied, and of the rest what begins before its router has spoken."""
        absent = max(0.0, self.experts - (self.slabs - self.ring) / self.layers)
        in_vain = (1 - self.wanted) * min(absent, self._copied_meanwhile)
        return max(self.compute_s, (self.wanted * absent + in_vain) * self.copy_s)

    @property
    def demanded_s(self) -> float:
        """Of a layer by demand paging."""
        return self.compute_s + self.waited * self.missed * self.experts * self.copy_s

    def verdict(self, streaming: bool) -> Verdict:
        """`streaming`: passes of this size are streamed already."""
        if self.ring > RING_SHARE * self.slabs:
            return Verdict.SMALL_POOL
        least = self.demanded_s * (1.0 if streaming else GAIN)
        return Verdict.STREAMED if self.wanted >= MOSTLY and self.streamed_s < least else Verdict.NO_GAIN


def fixed_residents(uses: np.ndarray, resident: np.ndarray, sizes: Sequence[int], slabs: int) -> np.ndarray:
    """Which experts stay, bool `[F]`: of every layer the same share, those with the most `uses` `[F]`, where a `resident` one
    (bool `[F]`) has precedence. `sizes`: experts of each layer, F in all; `slabs`: how many stay."""
    worth = np.where(resident, STAYS, 1.0) * uses
    fixed = np.zeros(len(uses), dtype=bool)
    start = given = 0
    for size in sizes:
        end = start + size
        share = slabs * end // len(uses) - given  # so that they add up
        order = np.lexsort((~resident[start:end], -worth[start:end]))
        fixed[start + order[:share]] = True
        start, given = end, given + share
    return fixed


@dataclass
class Passes:
    """What passes of about as many tokens were like; means of which newer ones have a larger share."""

    wanted: float  # share of a layer's experts
    compute_s: float | None = None  # of a layer, everything but waiting
    missed: float | None = None  # share of a layer's experts, by demand paging
    waited: float = 1.0  # share of their copying that layers waited for, by demand paging
    streamed: bool = False  # the newest one was
    wanted_absent: float = 1.0  # share of the experts that a layer lacks, or were copied for it unasked


class Streaming:
    """The passes over the layers of one geometry: what they took, and whether the running one is streamed."""

    def __init__(self, layers: Sequence[MoELayer], possible: bool, in_flight: int = 0, prompts_ahead: bool = False):
        """`possible`: experts in one format are evicted for others, and what nothing demanded may be copied. `in_flight`: as of
        `StreamEstimate`. `prompts_ahead`: prompts that are not streamed may copy for the next layer, too."""
        self.possible, self._in_flight, self._prompts_ahead = possible, in_flight, possible and prompts_ahead
        self.verdict = Verdict.UNMEASURED
        self.demanded = self.missed = 0  # experts, in the running pass
        self.stall_s = 0.0  # in the running pass
        self._layers, self._top_k = len(layers), max(layer.top_k for layer in layers)
        self._experts = sum(layer.num_experts for layer in layers) / len(layers)
        self._copy_s = 0.0  # of an expert, while the link is busy
        self._copies, self._busy_s, self._busy_until_s = 0, 0.0, 0.0
        self._known: dict[tuple[Phase, int], Passes] = {}
        self._running: Passes | None = None
        self._ran = 0  # layers of the running pass that demanded
        self._typical = self._sure = False
        self._lacked = self._wanted_absent = 0  # experts, in the running pass

    @property
    def on(self) -> bool:
        """The running pass is streamed."""
        return self.verdict is Verdict.STREAMED

    @property
    def ahead(self) -> bool:
        """In the running pass, what the next layer lacks is copied before its router speaks."""
        return self.on or self._sure

    def lacks(self, experts: int, wanted: int) -> None:
        """A layer lacked so many experts, or got them unasked, and wants so many of them."""
        self._lacked += experts
        self._wanted_absent += wanted

    def demand(self, wanted: int, missed: int) -> None:
        """A layer of the running pass demands `wanted` experts, of which `missed` are not there."""
        self._ran += 1
        self.demanded += wanted
        self.missed += missed

    def copied(self, began_s: float, ended_s: float, copies: int = 1) -> None:
        """An expert was copied, or so many one after the other. Copies overlap: what counts is how long the link was busy."""
        self._copies += copies
        self._busy_s += max(0.0, ended_s - max(began_s, self._busy_until_s))
        self._busy_until_s = max(self._busy_until_s, ended_s)

    def begin_pass(self, phase: Phase, tokens: int, slabs: int, full: bool, compute_s: float) -> int:
        """Settle the pass before, whose layers took `compute_s` each beside waiting, and decide about one of `tokens`; returns
        the slabs of its ring, 0 where it is not streamed. `slabs`: that are not pinned, where it is possible; `full`: none of
        them is free."""
        self._settle(compute_s)
        self._typical, self._running, self.verdict, self._sure = full, None, Verdict.UNMEASURED, False
        if not self.possible or phase in (Phase.ENCODE, Phase.DRAFT):
            return 0
        size = phase, tokens.bit_length()
        if size not in self._known:
            wanted = 1 - (1 - self._top_k / self._experts) ** tokens
            self._known[size] = Passes(wanted, wanted_absent=wanted)
        self._running = known = self._known[size]
        self._sure = self._prompts_ahead and phase is Phase.PREFILL and known.wanted_absent >= SURE
        if known.missed is None or known.compute_s is None or self._copy_s <= 0:
            return 0
        seconds = self._copy_s, known.compute_s
        shares = known.wanted, known.missed, known.waited
        in_flight = self._in_flight if phase is Phase.DECODE else max(self._in_flight, IN_TURN)
        estimate = StreamEstimate(self._layers, self._experts, slabs, *seconds, *shares, in_flight)
        self.verdict = estimate.verdict(known.streamed)
        known.streamed = self.on
        return estimate.ring if self.on else 0

    def _settle(self, compute_s: float) -> None:
        """What is known after a pass; nothing of one that filled the pool, for it wrote to memory for the first time."""
        if self._typical and self._copies:
            self._copy_s = _mean(self._copy_s or None, self._busy_s / self._copies)
        known = self._running
        if known is not None and self._lacked:
            known.wanted_absent = _mean(known.wanted_absent, self._wanted_absent / self._lacked)
        if self._typical and self._ran and known is not None:
            known.wanted = _mean(known.wanted, self.demanded / (self._ran * self._experts))
            known.compute_s = _mean(known.compute_s, compute_s)
            if not self.on:
                if self.missed and self._copy_s > 0:
                    share = min(1.0, self.stall_s / (self.missed * self._copy_s))
                    known.waited = share if known.missed is None else _mean(known.waited, share)
                known.missed = _mean(known.missed, self.missed / (self._layers * self._experts))
        self.demanded = self.missed = self._ran = self._copies = self._lacked = self._wanted_absent = 0
        self.stall_s = self._busy_s = 0.0


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEWEST_SHARE * (newest - before)
