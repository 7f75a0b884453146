"""How many bytes may be fetched on a guess: a cap that follows what guessing has won and lost, in seconds.

Others measured that uncapped predictive prefetch halves throughput although its recall was 66-88%: what is wrong competes with
demands for the link. So speculation pays its own way. A guess that was there when it was demanded has saved the stall of a miss;
what demands waited for guesses, the experts that had to leave for them, and the time of asking the lookahead are the costs. The
cap is what remains: bytes that may lie unused in a forward step. It grows with what was saved and shrinks with what was lost. A
small share of the running time is given to it as well, so that a closed cap goes on trying, at a bounded cost, and notices when
guesses begin to pay. A guess that was used does not count against it.

`SpeculationCap` and `prefetch_order` are pure; a `Ledger` is what the residency core writes down during one step, whatever the
clock of its driver; `Wanted` is what may be copied next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vismoe.types import ExpertId, ExpertInventory, Phase

TRIAL_SHARE = 0.015  # of the running time that guessing may lose for good: what trying costs where nothing can be predicted
FIRST_UNITS = 4  # experts that may lie unused in the first step, before anything was measured; small losses add up to that debt
WASTE_PRICE = 0.125  # of a miss, for a guess that was not used: what moving it cost where no demand waited
NEWEST_SHARE = 0.125  # of the newest measurement in the mean cost of a miss


@dataclass(frozen=True)
class SpeculationCap:
    """Bytes of prefetch that may lie unused per forward step, between 0 and `most_bytes`."""

    most_bytes: int
    unit_bytes: int  # one expert
    credit_bytes: float  # what guessing may lose, as bytes of copies; below one expert the cap is closed

    @classmethod
    def open(cls, most_bytes: int, unit_bytes: int) -> "SpeculationCap":
        return cls(most_bytes, unit_bytes, min(FIRST_UNITS * unit_bytes, most_bytes))

    @property
    def bytes_per_step(self) -> int:
        return int(self.credit_bytes) if self.credit_bytes >= self.unit_bytes else 0

    def after_step(self, seconds: float, balance_s: float, miss_s: float) -> "SpeculationCap":
        """The cap for the next step.

        seconds: how long this one took; balance_s: what guessing won (or, below zero, lost) in it; miss_s: what one miss costs,
        0 while that is not known.
        """
        if miss_s <= 0:
            return self
        earned = (balance_s + TRIAL_SHARE * seconds) / miss_s * self.unit_bytes
        deepest = min(-FIRST_UNITS * self.unit_bytes, self.credit_bytes, earned)  # a step that lost more is paid for in full
        credit = min(max(self.credit_bytes + earned, deepest), self.most_bytes)
        return replace(self, credit_bytes=credit)


class Ledger:
    """What guessing won and lost in the running step, in seconds of the pager's own clock, and the cap that follows from it.

    Prefill and decode have a cap each: what can be predicted, and what a miss costs, differ between them.
    """

    def __init__(self, inventory: ExpertInventory, sizes: Sequence[int]):
        """`sizes`: bytes of the copy of an expert, per geometry."""
        per_token = sum(layer.top_k * sizes[layer.geometry] for layer in inventory.layers)
        self.sizes = tuple(sizes)
        self.unit_bytes, self._least_bytes = max(sizes), min(sizes)
        self.caps = {phase: SpeculationCap.open(per_token, self.unit_bytes) for phase in Phase}
        self.miss_s = dict.fromkeys(Phase, 0.0)  # mean stall that one more missing expert causes; 0 until one was waited for
        self.phase = Phase.PREFILL
        self.allowance_bytes = 0  # what may still be fetched in this step
        self._balance_s = 0.0

    def begin_step(self, phase: Phase, last_step_s: float) -> None:
        """Settle the step before, which took `last_step_s`, and begin one of `phase`."""
        before = self.phase
        self.caps[before] = self.caps[before].after_step(last_step_s, self._balance_s, self.miss_s[before])
        self._balance_s, self.phase = 0.0, phase
        self.allowance_bytes = self.caps[phase].bytes_per_step

    @property
    def may_guess(self) -> bool:
        return self.allowance_bytes >= self._least_bytes

    def started(self, nbytes: int) -> None:
        self.allowance_bytes -= nbytes

    def used(self, guesses: int, nbytes: int) -> None:
        """`guesses`, of `nbytes` together, were there or on their way when they were demanded."""
        self.allowance_bytes = min(self.allowance_bytes + nbytes, self.caps[self.phase].bytes_per_step)
        self._balance_s += guesses * self.miss_s[self.phase]

    def wasted(self) -> None:
        """A guess left, or the request ended, before a layer demanded it."""
        self._balance_s -= WASTE_PRICE * self.miss_s[self.phase]

    def displaced(self, misses: int) -> None:
        """Missing now, because they were evicted for guesses that were not used."""
        self._balance_s -= misses * self.miss_s[self.phase]

    def asked(self, seconds: float, misses: int) -> None:
        """The lookahead took that long; behind the copies of `misses` demanded experts it is hidden."""
        self._balance_s -= max(0.0, seconds - misses * self.miss_s[self.phase])

    def waited(self, stall_s: float, misses: int, behind_s: float) -> None:
        """A demand stalled for `misses` copies of its own; a prefetch, of whichever expert, was in flight for the
        first `behind_s` seconds."""
        mean = self.miss_s[self.phase]
        if behind_s > 0:
            self._balance_s -= min(behind_s, max(0.0, stall_s - misses * mean))
        elif misses:
            newest = stall_s / misses
            self.miss_s[self.phase] = newest if mean == 0 else mean + NEWEST_SHARE * (newest - mean)


def prefetch_order(scores: np.ndarray, absent: np.ndarray, count: int, decay: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    """The experts worth fetching next, best first.

    scores `[W, E]`: lookahead priorities of the next W MoE layers, 0 where nothing is predicted; absent `[W, E]` bool.
    A nearer layer counts more: `decay ** distance` (VisMMoE eq. 9). Returns (distance 0-based `[n]`, expert `[n]`), n <= count.
    """
    weighted = np.where(absent, scores * decay ** np.arange(len(scores), dtype=np.float32)[:, None], 0)
    flat = weighted.ravel()
    count = min(count, flat.size)
    best = np.argpartition(-flat, count - 1)[:count] if count < flat.size else np.arange(flat.size)
    best = best[np.lexsort((best, -flat[best]))]
    return np.divmod(best[flat[best] > 0], scores.shape[1])


class Wanted:
    """Guesses worth copying, by priority. Only what a step still wants: it begins empty. What drafted tokens will demand in a
    later step is promised (promises.py)."""

    def __init__(self) -> None:
        self._best_last: list[tuple[ExpertId, float]] = []

    def __bool__(self) -> bool:
        return bool(self._best_last)

    def replace(self, best_first: Sequence[tuple[ExpertId, float]]) -> None:
        """From now on these are worth it: (expert, its priority)."""
        self._best_last = list(best_first[::-1])

    def pop(self) -> tuple[ExpertId, float]:
        return self._best_last.pop()

    def put_back(self, expert: ExpertId, priority: float) -> None:
        """It was popped, and cannot be copied yet."""
        self._best_last.append((expert, priority))
