"""The arguments of decoder layers after tokens were dropped: the same tensors, with only the kept rows and mask columns.

B sequences; S tokens of the current pass, Q of them kept (pad slots on the left give the rows of a batch equal length); N slots
in the caches of the narrowed layers after this pass. No query sees a pad slot, except the pad slot itself.
"""

from collections.abc import Callable
from typing import Any

import torch

from vismoe.models.visual.pruned_cache import PAD


class KeptRows:
    """One forward pass, as the narrowed layers see it.

    `rows` int64 `[B, Q]`: which of the pass's S tokens are kept, -1 for pad slots; None: all of them, but the cache lacks dropped
    tokens of earlier passes. `past`: tokens of the sequence before this pass. `cached` int64 `[B, N - Q]`: positions of the slots
    in the caches. `padded`: there is a pad slot. `flat`: masks are `[B, keys]` and causality is implied, as in flash attention.
    """

    def __init__(
        self, shape: tuple[int, int], past: int, rows: torch.Tensor | None, cached: torch.Tensor, padded: bool, flat: bool
    ):
        self.batch, self.tokens = shape
        self.past, self.rows, self.padded, self.flat = past, rows, padded, flat
        every = torch.arange(past, past + self.tokens, device=cached.device).expand(self.batch, -1)
        self.positions = every if rows is None else torch.where(rows < 0, PAD, rows + past)  # [B, Q], in the sequence
        self._slots = torch.cat([cached, self.positions], dim=1)  # [B, N]
        self._narrowed: dict[int, tuple[Any, Any]] = {}  # by id of the original, which the value keeps alive

    def take(self, value: Any) -> Any:
        """A layer's argument with its rows narrowed; an argument without a dimension of S tokens is not changed."""
        if isinstance(value, tuple):
            return tuple(self.take(part) for part in value)
        if not isinstance(value, torch.Tensor) or self.rows is None:
            return value
        return self._once(value, self._take)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """An attention mask (None, `[B, keys]`, or `[B, heads, S, keys]` of bool or additive) for the slots of the caches."""
        if mask is None and not self.padded:
            return None
        return self._once(mask, self._causal if mask is None else self._over_slots)

    def _once(self, value: Any, narrow: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Narrows each argument once per pass, since layers share their arguments."""
        if id(value) not in self._narrowed:
            self._narrowed[id(value)] = value, narrow(value)
        return self._narrowed[id(value)][1]

    def _take(self, value: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None
        rows, sequences = self.rows.clamp(min=0), torch.arange(self.batch, device=self.rows.device)[:, None]
        if value.ndim >= 2 and value.shape[1] == self.tokens and value.shape[0] in (1, self.batch):
            return value.expand(self.batch, *value.shape[1:])[sequences, rows]
        if value.ndim >= 3 and value.shape[2] == self.tokens and value.shape[1] in (1, self.batch):  # [axes, B, S, ...]
            return value.expand(-1, self.batch, *value.shape[2:])[:, sequences, rows]
        return value

    def _causal(self, _: None) -> torch.Tensor:
        """bool `[B, 1, Q, N]`, or `[B, N]`: the mask that None stands for, without pad slots."""
        if self.flat:
            return self._slots >= 0
        seen = (self._slots[:, None, :] >= 0) & (self._slots[:, None, :] <= self.positions[:, :, None])
        return self._pads_see_themselves(seen[:, None])

    def _over_slots(self, mask: torch.Tensor) -> torch.Tensor:
        columns = self._slots - (self.past + self.tokens - mask.shape[-1])  # a mask may begin after the beginning of the sequence
        absent, columns = (self._slots < 0) | (columns < 0), columns.clamp(min=0)
        if mask.ndim == 2:
            return mask.expand(self.batch, -1).gather(1, columns).masked_fill(absent, 0)
        mask = mask.expand(self.batch, -1, -1, -1)
        if self.rows is not None:
            mask = mask.gather(2, self.rows.clamp(min=0)[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        mask = mask.gather(3, columns[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))
        return self._pads_see_themselves(mask.masked_fill(absent[:, None, None, :], _hidden(mask)))

    def _pads_see_themselves(self, mask: torch.Tensor) -> torch.Tensor:
        """Lets pad slots see themselves; the queries' own slots are the last columns of `mask` `[B, heads, Q, N]`."""
        if self.rows is None:  # no query is a pad slot
            return mask
        row, query = (self.positions < 0).nonzero(as_tuple=True)
        mask[row, :, query] = _hidden(mask)
        mask[row, :, query, mask.shape[3] - mask.shape[2] + query] = True if mask.dtype == torch.bool else 0.0
        return mask


def _hidden(mask: torch.Tensor) -> float:
    """The mask value of this type for invisible keys."""
    return False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
