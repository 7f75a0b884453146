"""What every lookahead offers, and what it is shown: the contract between the experts function and those who guess.

A lookahead is asked in two halves. `snapshot` runs on the model's thread and copies the little it needs; `evaluate` may run in
any thread and computes the scores. `ahead.py` decides where. Nothing a lookahead does can change an output: it says what to
fetch early.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["PREFILL_LAYERS", "Lookahead", "Seen", "rows_of"]

PREFILL_LAYERS = 1  # ahead, of a prompt: nearly all experts of every layer are wanted, and looking farther fetches too early
PREFILL_ROWS = 256  # tokens of a prompt that routers are asked about, spread evenly


@dataclass(frozen=True)
class Seen:
    """One MoE layer about to be computed. T tokens reach it; padding is among them where `real` says so."""

    layer: int
    decoding: bool
    chosen: np.ndarray  # [T, K] experts, as the router chose
    hidden: torch.Tensor  # [T, H] what the experts are given
    real: np.ndarray | None = None  # [T] bool; None: all
    visual: np.ndarray | None = None  # [T] bool: visual tokens (the kept ones, where tokens were dropped); None: none
    summary: np.ndarray | None = None  # [H] float32: mean of the request's kept visual embeddings; None: no image


class Lookahead(Protocol):
    """Who says which experts the next layers will want."""

    remembers: bool  # whether it wants to be shown every layer, also those that nobody asks about
    memory: Any  # what it remembers of the request that runs; set to None for one that begins

    def begin_request(self) -> None:
        """Nothing of what was seen before belongs to the next forward pass."""

    def observe(self, layer: int, chosen: np.ndarray) -> None:
        """Runs at every layer, also where nobody asks: the choices `[T, K]` of the real tokens, to be kept at no cost."""

    def snapshot(self, seen: Seen) -> Any | None:
        """What `evaluate` needs, copied; None where nothing can be said."""

    def evaluate(self, snapshot: Any) -> np.ndarray | None:
        """`[W, E]` float32 for the MoE layers after the snapshot's, fewer rows at the end; 0 where an expert is not expected.

        Not decayed by distance: the pager does that. Any thread, one at a time.
        """


def rows_of(tensor: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Copies of the real tokens' rows of a `[T, H]` tensor: all of them in decode, at most PREFILL_ROWS of a prompt."""
    if seen.real is None and len(tensor) <= PREFILL_ROWS:
        return tensor.clone()
    real = np.arange(len(tensor)) if seen.real is None else np.flatnonzero(seen.real)
    if not seen.decoding and len(real) > PREFILL_ROWS:
        real = real[np.linspace(0, len(real) - 1, PREFILL_ROWS).astype(np.int64)]
    return tensor[torch.from_numpy(real).to(tensor.device)]
