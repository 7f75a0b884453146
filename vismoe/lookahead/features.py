"""The inputs of the learned lookahead, as plain arrays: the same code makes them from a recorded trace and in a running model.

At MoE layer l (VisMMoE, section 3.3.1): the routing history (which experts the tokens of this layer chose, and the decayed use of
the next W layers' experts in this request), the residual stream after attention, pooled (prefill: over the kept visual tokens, or
all real tokens if there are none; decode: the current token), a static visual summary (mean of the kept visual embeddings, zeros
if there are none), and what the routers of the next W layers predict from the current residual stream. Shapes: L MoE layers, E
experts (of the largest layer), W window, H hidden, T tokens, K top-k.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

STEP_DECAY = 0.8  # of an expert's use, per forward pass
REMEMBERED = 32
LARGEST = 6e4  # limit of float16; single channels of a residual stream can exceed it


@dataclass(frozen=True)
class FeatureSizes:
    """The sizes for which a predictor is made."""

    layers: int  # L
    experts: int  # E
    hidden: int  # H of the pooled hidden state
    visual: int  # H of the visual summary, as of the embeddings
    window: int  # W


@dataclass(frozen=True)
class Features:
    """The inputs at one layer, float32; rows of the window past the last layer are zeros."""

    present: np.ndarray  # [E] share of the tokens that chose each expert of this layer
    use: np.ndarray  # [W, E] decayed use of the next layers' experts in this request
    hidden: np.ndarray  # [H]
    visual: np.ndarray  # [H]
    expected: np.ndarray | None  # [2, W, E]: share of tokens for which the router would choose the expert now, mean probability


def half(array: np.ndarray) -> np.ndarray:
    """As float16, with values clipped to its range."""
    return np.clip(array, -LARGEST, LARGEST).astype(np.float16)


def share_of_tokens(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Share of the tokens that chose each expert, float32 `[E]`, from the choices `[T, K]`, without sentinels (ids from E up)."""
    counts = np.bincount(chosen.ravel(), minlength=experts)[:experts]
    return counts.astype(np.float32) / max(1, len(chosen))


class History:
    """How much each expert was used in the current request: `use <- 0.8 use + 0.2 share` at every forward pass.

    `observe` runs at every layer of every token and only stores its argument; the arithmetic runs when the use is read, possibly
    in another thread. Up to `REMEMBERED` passes are stored until then; older ones weigh less than 0.1%.
    """

    def __init__(self, sizes: FeatureSizes):
        self._sizes = sizes
        self._use = np.zeros((sizes.layers, sizes.experts), np.float32)
        self._observed = [deque[np.ndarray](maxlen=REMEMBERED) for _ in range(sizes.layers)]

    def observe(self, layer: int, chosen: np.ndarray) -> None:
        """`chosen` [T, K]: the choices of the real tokens; the array must not change afterwards."""
        self._observed[layer].append(chosen if len(chosen) == 1 else share_of_tokens(chosen, self._sizes.experts))

    def of(self, layer: int) -> np.ndarray:
        """Use of the experts of `layer`, `[E]`."""
        self._settle(layer)
        return self._use[layer]

    def ahead(self, layer: int) -> np.ndarray:
        """Use of the experts of the W layers after `layer`, `[W, E]`."""
        use = np.zeros((self._sizes.window, self._sizes.experts), np.float32)
        last = min(layer + 1 + self._sizes.window, self._sizes.layers)
        for ahead in range(layer + 1, last):
            self._settle(ahead)
        use[: last - layer - 1] = self._use[layer + 1 : last]
        return use

    def _settle(self, layer: int) -> None:
        waiting = self._observed[layer]
        while waiting:
            seen = waiting.popleft()
            share = share_of_tokens(seen, self._sizes.experts) if seen.ndim == 2 else seen
            self._use[layer] = STEP_DECAY * self._use[layer] + (1 - STEP_DECAY) * share


def targets(shares: np.ndarray, seen: np.ndarray, layer: int, window: int, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Soft targets of the window after `layer` (VisMMoE eq. 9 with one row per layer instead of the maximum), and a mask of valid
    rows.

    shares `[N, L, E]` in 0..1: in decode 1 for used experts, in prefill the share of the tokens that chose each; seen `[N, L]`:
    recorded layers. -> (`gamma ** (d - 1) * shares[layer + d]` `[N, W, E]`, mask `[N, W]`).
    """
    count, layers, experts = shares.shape
    wanted, mask = np.zeros((count, window, experts), np.float32), np.zeros((count, window), bool)
    for distance in range(min(window, layers - 1 - layer)):
        wanted[:, distance] = gamma**distance * shares[:, layer + 1 + distance]
        mask[:, distance] = seen[:, layer + 1 + distance]
    return wanted, mask
