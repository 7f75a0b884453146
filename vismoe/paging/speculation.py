"""How many bytes may be fetched on a guess: a cap that opens while guesses are used and closes itself when they are not.

Others measured that uncapped predictive prefetch halves throughput although its recall was 66-88%: what is wrong competes with
demands for the link. Pure functions; the pager keeps the state.
"""

from dataclasses import dataclass, replace

import numpy as np

USEFUL_SHARE = 0.5  # of settled guesses that must have been used for the cap to open
PROBE_STEPS = 32  # a closed cap lets one expert through this often, to notice when guesses begin to pay again


@dataclass(frozen=True)
class SpeculationCap:
    """Bytes of prefetch that may be started per forward step, between 0 and `most_bytes`."""

    most_bytes: int
    unit_bytes: int  # one expert
    bytes_per_step: int
    closed_steps: int = 0

    @classmethod
    def open(cls, most_bytes: int, unit_bytes: int) -> "SpeculationCap":
        return cls(most_bytes, unit_bytes, bytes_per_step=max(unit_bytes, most_bytes // 2))

    def after_step(self, used: int, wasted: int) -> "SpeculationCap":
        """The cap for the next step; `used` and `wasted` count the guesses settled in this one."""
        settled = used + wasted
        if self.bytes_per_step == 0:
            if self.closed_steps + 1 < PROBE_STEPS:
                return replace(self, closed_steps=self.closed_steps + 1)
            return replace(self, bytes_per_step=self.unit_bytes, closed_steps=0)
        if not settled:
            return self
        if used >= USEFUL_SHARE * settled:
            grown = min(self.most_bytes, self.bytes_per_step + max(self.unit_bytes, self.bytes_per_step // 4))
            return replace(self, bytes_per_step=grown)
        shrunk = self.bytes_per_step // 2
        return replace(self, bytes_per_step=shrunk if shrunk >= self.unit_bytes else 0)


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
