"""The static visual summary of a request: the mean of the embeddings of its visual tokens, only of kept ones after tokens were
dropped (VisMMoE eq. 6). It stays the same throughout decode; a later prompt with images replaces it.
"""

import numpy as np
import torch


class VisualSummary:
    """`value` is `[H]` float32, or None if the request has no image."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None
        self._waiting: tuple[np.ndarray, torch.Tensor] | None = (
            None  # visual tokens and their embeddings, until tokens are dropped
        )

    def begin_step(self, embeddings: torch.Tensor | None, visual: np.ndarray | None, new_sequence: bool, dropping: bool) -> None:
        """`embeddings` `[.., H]` and `visual` bool, of the same tokens; `dropping`: this pass will drop visual tokens."""
        self._waiting = None
        if new_sequence:
            self.value = None
        if embeddings is None or visual is None or not visual.any():
            return
        tokens = np.flatnonzero(visual)
        found = embeddings.reshape(-1, embeddings.shape[-1])[torch.from_numpy(tokens).to(embeddings.device)]
        self.value = found.mean(0, dtype=torch.float32).cpu().numpy()
        if dropping:
            self._waiting = tokens, found

    def dropped(self, kept: np.ndarray) -> None:
        """Only the tokens `kept` (flat indices of the step) remain. Called at every later layer, acts at the first."""
        if self._waiting is None:
            return
        (tokens, found), self._waiting = self._waiting, None
        stay = np.flatnonzero(np.isin(tokens, kept))
        if stay.size:
            self.value = found[torch.from_numpy(stay).to(found.device)].mean(0, dtype=torch.float32).cpu().numpy()
