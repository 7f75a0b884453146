"""What decoder layers are handed after tokens were dropped: the same tensors, with the rows and mask columns that are left.

B sequences; S tokens of the running pass, Q of them kept (rows of a batch are evened out by pad slots on the left); N slots in
the caches of the narrowed layers once this pass's are in. A pad slot is seen by nobody, and itself sees only itself.
"""

from collections.abc import Callable
from typing import Any

import torch

from vismoe.models.visual.pruned_cache import PAD

__all__ = ["KeptRows"]


class KeptRows:
    """One forward pass, as the narrowed layers see it.

    `rows` int64 `[B, Q]`: which of the pass's S tokens are kept, -1 for pad slots; None: all of them, on top of a cache in which
    earlier ones were dropped. `past`: tokens of the sequence before this pass. `cached` int64 `[B, N - Q]`: positions of the
    slots that the caches hold of them. `padded`: some slot is a pad slot. `flat`: masks are `[B, keys]`, and causality goes
    without saying, as flash attention wants it.
    """

    def __init__(
        self, shape: tuple[int, int], past: int, rows: torch.Tensor | None, cached: torch.Tensor, padded: bool, flat: bool
    ):
        self.batch, self.tokens = shape
        self.past, self.rows, self.padded, self.flat = past, rows, padded, flat
        every = torch.arange(past, past + self.tokens, device=cached.device).expand(self.batch, -1)
        self.positions = every if rows is None else torch.where(rows < 0, PAD, rows + past)  # [B, Q], in the sequence
        self._slots = torch.cat([cached, self.positions], dim=1)  # [B, N]
        self._narrowed: dict[int, tuple[Any, Any]] = {}  # by id of the original, which is kept alive beside it

    def take(self, value: Any) -> Any:
        """A layer's argument with its rows narrowed; what has no dimension of S tokens stays as it is."""
        if isinstance(value, tuple):
            return tuple(self.take(part) for part in value)
        if not isinstance(value, torch.Tensor) or self.rows is None:
            return value
        return self._once(value, self._take)

    def mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """An attention mask (None, `[B, keys]`, or `[B, heads, S, keys]` of bool or additive) over the slots that there are."""
        if mask is None and not self.padded:
            return None
        return self._once(mask, self._causal if mask is None else self._over_slots)

    def _once(self, value: Any, narrow: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Layers share their arguments: each is narrowed once per pass."""
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
        """bool `[B, 1, Q, N]`, or `[B, N]`: what goes without a mask where there are no pad slots."""
        if self.flat:
            return self._slots >= 0
        seen = (self._slots[:, None, :] >= 0) & (self._slots[:, None, :] <= self.positions[:, :, None])
        return self._pads_see_themselves(seen[:, None])

    def _over_slots(self, mask: torch.Tensor) -> torch.Tensor:
        columns = self._slots - (self.past + self.tokens - mask.shape[-1])  # a mask may begin later than the sequence
        absent, columns = (self._slots < 0) | (columns < 0), columns.clamp(min=0)
        if mask.ndim == 2:
            return mask.expand(self.batch, -1).gather(1, columns).masked_fill(absent, 0)
        mask = mask.expand(self.batch, -1, -1, -1)
        if self.rows is not None:
            mask = mask.gather(2, self.rows.clamp(min=0)[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        mask = mask.gather(3, columns[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))
        return self._pads_see_themselves(mask.masked_fill(absent[:, None, None, :], _hidden(mask)))

    def _pads_see_themselves(self, mask: torch.Tensor) -> torch.Tensor:
        """The queries' own slots are the last columns of `mask` `[B, heads, Q, N]`."""
        if self.rows is None:  # nobody's query is a pad slot
            return mask
        row, query = (self.positions < 0).nonzero(as_tuple=True)
        mask[row, :, query] = _hidden(mask)
        mask[row, :, query, mask.shape[3] - mask.shape[2] + query] = True if mask.dtype == torch.bool else 0.0
        return mask


def _hidden(mask: torch.Tensor) -> float:
    """What a mask of this type holds where nothing may be seen."""
    return False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
