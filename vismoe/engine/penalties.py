"""Penalties as the OpenAI API has them, which transformers does not."""

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Of one answer: a token that it has n times loses presence + n * frequency. Computed from the tokens behind the prompt each
    time, so that a sequence may come back shorter than before: drafts that were not accepted."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float):
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 `[1, S]`, scores float32 `[1, V]`."""
        tokens, counts = input_ids[0, self._prompt_tokens :].unique(return_counts=True)
        return scores.index_add(1, tokens, -(self._presence + self._frequency * counts)[None])
