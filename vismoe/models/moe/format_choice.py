"""The policy of a running model: takes the routers' choices and tells the pager the format of each needed expert.

`vismoe.precision` decides; this module provides the facts: routing and weights on the host, which tokens are real, and which
tokens of a prompt received most attention. One thread calls.
"""

import logging

import numpy as np

from vismoe.models.moe.heavy_hitters import HeavyHitters
from vismoe.paging.pager import Pager
from vismoe.precision.controller import Choice, Precision
from vismoe.precision.importance import critical_ahead, heavy_hitters
from vismoe.types import ExpertInventory, Phase

logger = logging.getLogger(__name__)


class FormatChooser:
    """`hitters`: measures the attention in a prompt; a string is the reason if it cannot, and then every prompt token counts."""

    def __init__(self, precision: Precision, inventory: ExpertInventory, hitters: HeavyHitters | str, deterministic: bool):
        self.precision = precision
        self._hitters = None if isinstance(hitters, str) else hitters
        self._layers, self._deterministic = inventory.layers, deterministic
        self._tokens = 0  # real tokens of the current step
        self._unheard: set[int] = set()  # layers with a logged warning
        self.about = ""  # a clause that says how the importance of a prompt's tokens is known
        if precision.policy.importance:
            heard = f"all tokens count: {hitters}" if isinstance(hitters, str) else hitters.source
            self.about = f"; importance in prefill by {heard}"

    def begin_step(self, pager: Pager, decoding: bool, tokens: int, real: np.ndarray | None) -> None:
        """Begins a forward pass over `tokens` rows, `real` bool `[tokens]` (None: all); uses what the previous pass showed."""
        self.end_step(pager)
        self._tokens = tokens if real is None else int(real.sum())
        if self._hitters is not None:
            if decoding:
                self._hitters.end()
            else:
                self._hitters.begin(real)

    def narrow(self, kept: np.ndarray) -> None:
        """From now on the layers of this pass see `kept` int32 `[T]` of its tokens, -1 for pad slots."""
        if self._hitters is not None:
            self._hitters.narrow(kept)

    def end_step(self, pager: Pager) -> None:
        """Ends the forward pass: experts that became hot or cold begin to move."""
        tokens, self._tokens = self._tokens, 0
        moves = self.precision.end_step(tokens) if tokens else None
        if moves is None:
            return
        pager.retarget(self.precision.targets, moves.promote, moves.demote)
        if self._deterministic:
            pager.settle()

    def at_layer(
        self, layer: int, phase: Phase, sequences: int, real: np.ndarray | None, routing: np.ndarray, weights: np.ndarray
    ) -> Choice:
        """What the layer needs; routing int64 and weights float32 `[T, K]`: T rows, of B sequences one after the other, of which
        `real` bool `[T]` are not padding (None: all). Patches in a vision tower are served in the resident format."""
        if phase is Phase.ENCODE and not self.precision.policy.hotness:
            return Choice(routing, weights)
        decoding = phase is Phase.DECODE
        sequence = np.repeat(np.arange(sequences), len(routing) // sequences) if sequences > 1 else None
        hitters = None
        if self.precision.policy.importance and not decoding:
            hitters = self._heavy_hitters(layer, len(routing), sequence, real)
        return self.precision.at_layer(layer, decoding, routing, weights, hitters, sequence, real)

    def _heavy_hitters(self, layer: int, tokens: int, sequence: np.ndarray | None, real: np.ndarray | None) -> np.ndarray:
        if self._hitters is None:
            return np.ones(tokens, bool)
        received = self._hitters.received(layer)
        if layer == self._layers[-1].index:
            self._hitters.end()
        if received is not None and len(received) == tokens:
            return heavy_hitters(received, real, sequence)
        if layer not in self._unheard:
            self._unheard.add(layer)
            logger.warning(
                "MoE layer %d: the attention to its %d rows is unknown, so all of them count as important", layer, tokens
            )
        return np.ones(tokens, bool)

    def ahead(self, layer: int, scores: np.ndarray, decoding: bool) -> np.ndarray:
        """Which of the experts that are predicted after `layer` will be critical: bool `[W, E]` from scores `[W, E]`."""
        ahead = self._layers[layer + 1 : layer + 1 + len(scores)]
        beyond = [0] * (len(scores) - len(ahead))
        ratios = [*self.precision.ratios[layer + 1 : layer + 1 + len(ahead)], *beyond]
        most = [*(self._tokens * moe.top_k for moe in ahead), *beyond]
        return critical_ahead(scores, ratios, most if decoding else None)

    def close(self) -> None:
        """Undo the changes to the model."""
        if self._hitters is not None:
            self._hitters.end()
