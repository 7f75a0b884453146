"""Which experts of consecutive MoE layers serve the same tokens: the "cross-layer activation correlations" of DynaExq 3.3.

L MoE layers, E experts of the layer that has most, K choices of a token.
"""

import numpy as np

__all__ = ["Correlation"]

HALVING_TOKENS = 4096  # after so many, what was seen before counts half: who follows whom is the model's, more than the load's


class Correlation:
    """How the weight of tokens moves from the experts of one layer to those of the next.

    It is shown the forward passes of one token (decode): one costs (L - 1) K^2 additions, and a prompt nothing.
    """

    def __init__(self, layers: int, experts: int):
        self._pairs = np.zeros((layers - 1, experts, experts), np.float32)  # sums of w_i w_j
        self._first = np.arange(layers - 1)[:, None, None] * experts * experts  # address of each layer's first pair
        self._row = np.int64(experts)
        self._tokens = 0

    def observe(self, routing: np.ndarray, weights: np.ndarray) -> None:
        """One token's choices in every layer: ids and float32 weights `[L, K]`, all of them experts."""
        address = self._first + routing[:-1, :, None] * self._row + routing[1:, None, :]
        self._pairs.reshape(-1)[address.ravel()] += (weights[:-1, :, None] * weights[1:, None, :]).ravel()
        self._tokens += 1
        if self._tokens % HALVING_TOKENS == 0:
            self._pairs *= 0.5

    def flow(self, gains: np.ndarray) -> np.ndarray:
        """What the layer before says that each expert gains, `[L, E]`, 0 in the first layer. gains `[L, E]`, none below 0.

        An expert's gain is divided among those of the next layer as the weights of its tokens were.
        """
        flow = np.zeros_like(gains)
        sums = self._pairs @ np.ones(self._pairs.shape[1:2], np.float32)
        shares = np.divide(gains[:-1], sums, out=np.zeros_like(gains[:-1]), where=sums > 0).astype(np.float32)
        flow[1:] = (shares[:, None, :] @ self._pairs)[:, 0]
        return flow
