"""What every lookahead provides and receives: the contract between the experts function and predictors.

A lookahead runs in two halves. `snapshot` runs on the model's thread and copies the little data it needs; `evaluate` may run in
any thread and computes the scores. `background.py` chooses the thread. A lookahead can never change an output: it only says what
to prefetch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

# Layers ahead for a prompt, which uses nearly all experts of every layer: looking farther prefetches too early.
PREFILL_LAYERS = 1
PREFILL_ROWS = 256  # tokens of a prompt for which routers run, spread evenly


@dataclass(frozen=True)
class Seen:
    """The input at one MoE layer. T tokens reach the layer; `real` marks those that are not padding."""

    layer: int
    decoding: bool
    chosen: np.ndarray  # [T, K] experts, as the router chose
    hidden: torch.Tensor  # [T, H] the experts' input
    real: np.ndarray | None = None  # [T] bool; None: all
    visual: np.ndarray | None = None  # [T] bool: visual tokens (only kept ones, if tokens were dropped); None: none
    summary: np.ndarray | None = None  # [H] float32: mean of the request's kept visual embeddings; None: no image


class Lookahead(Protocol):
    """Predicts which experts the next layers will use."""

    remembers: bool  # whether `observe` must run at every layer, also at those without a prediction
    memory: Any  # its state for the running request; set to None for a new one

    def begin_request(self) -> None:
        """Discard what belongs to the previous forward pass."""

    def observe(self, layer: int, chosen: np.ndarray) -> None:
        """Runs at every layer, also without a prediction, with the choices `[T, K]` of the real tokens; must be cheap."""

    def snapshot(self, seen: Seen) -> Any | None:
        """A copy of the data that `evaluate` needs; None if no prediction is possible."""

    def evaluate(self, snapshot: Any) -> np.ndarray | None:
        """`[W, E]` float32 for the MoE layers after the snapshot's, fewer rows at the end; 0 for an expert that is not predicted.

        Not decayed by distance, which the pager does. Runs in any thread, one call at a time.
        """


def rows_of(tensor: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Copies of the real tokens' rows of a `[T, H]` tensor: all in decode, at most PREFILL_ROWS of a prompt."""
    if seen.real is None and len(tensor) <= PREFILL_ROWS:
        return tensor.clone()
    real = np.arange(len(tensor)) if seen.real is None else np.flatnonzero(seen.real)
    if not seen.decoding and len(real) > PREFILL_ROWS:
        real = real[np.linspace(0, len(real) - 1, PREFILL_ROWS).astype(np.int64)]
    return tensor[torch.from_numpy(real).to(tensor.device)]
