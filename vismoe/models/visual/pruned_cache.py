"""The key-value cache of a layer that sees fewer tokens than the sequence has.

A slot holds one token and its position in the sequence, or is a pad slot (position -1) that gives the rows of a batch equal
length. The layer reports logical lengths, so that masks and positions are correct whichever layer transformers uses for them;
tokens after the dropped ones take one slot each, without further calls.
"""

import copy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from vismoe.errors import InputError
from vismoe.models.visual.growing_cache import GrowingLayer

PAD = -1


def left_padded(keep: torch.Tensor) -> torch.Tensor:
    """Indices of the true columns of each row of `keep` `[B, N]`: int64 `[B, most]`, ascending; shorter rows begin with -1."""
    counts = keep.sum(1)
    most = int(counts.max())
    order = torch.argsort(keep.to(torch.uint8), dim=1, stable=True)[:, keep.shape[1] - most :]  # true columns come last
    pads = torch.arange(most, device=keep.device) < (most - counts)[:, None]
    return order.masked_fill(pads, PAD)


class PrunedLayer(GrowingLayer):
    """Keys and values of kept tokens `[B, heads, slots, D]`; slots after those with known positions hold consecutive tokens.

    `window`: size of a sliding attention window, which a sequence cannot exceed, since the cache counts slots and not positions.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window, self.is_sliding = window, window is not None
        self.padded = False  # there is a pad slot
        self._known: torch.Tensor | None = None  # int64 [B, n]: positions of the first n slots
        self._covered = 0  # number of tokens of the sequence that the known slots cover
        self._incoming: tuple[torch.Tensor, int] | None = None

    @classmethod
    def of(cls, layer: DynamicLayer) -> "PrunedLayer":
        """A layer that takes over the content of `layer`."""
        pruned = cls(getattr(layer, "sliding_window", None))
        if layer.is_initialized and layer.get_seq_length():
            pruned.lazy_initialization(layer.keys, layer.values)
            pruned.keys, pruned.values = layer.keys, layer.values
            pruned._know(_consecutive(0, layer.keys), layer.keys.shape[-2])
        return pruned

    def expect(self, positions: torch.Tensor, tokens: int) -> None:
        """The next update adds slots at `positions` int64 `[B, Q]`, which cover the next `tokens` of the sequence."""
        self._incoming = positions, tokens

    def positions(self) -> torch.Tensor:
        """int64 `[B, slots]`: which token of the sequence each slot holds; -1: none."""
        known = self._known
        assert known is not None, "an empty cache layer has no positions"
        following = _consecutive(self._covered, self.keys[..., known.shape[1] :, :])
        return torch.cat([known, following], dim=1) if following.shape[1] else known

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add slots; raises InputError if the sequence would exceed a sliding window."""
        before, length = self.positions() if self._known is not None else None, self.get_seq_length()
        result = super().update(key_states, value_states)
        if self._incoming is not None:
            new, tokens = self._incoming
            self._incoming = None
            self._know(new if before is None else torch.cat([before, new], dim=1), length + tokens)
        elif self._known is None:
            self._know(_consecutive(0, self.keys[..., :0, :]), 0)
        self._refuse_beyond_window()
        return result

    def has_room(self, tokens: int) -> bool:
        return self._grows_by_tokens and super().has_room(tokens)

    def make_room(self, tokens: int) -> bool:
        return self._grows_by_tokens and super().make_room(tokens)

    @property
    def _grows_by_tokens(self) -> bool:
        return self.window is None and self._incoming is None and self._known is not None

    def _know(self, positions: torch.Tensor, covered: int) -> None:
        self._known, self._covered, self.padded = positions, covered, bool((positions < 0).any())

    def _refuse_beyond_window(self) -> None:
        if self.window is not None and self.get_seq_length() > self.window:
            raise InputError(
                f"{self.get_seq_length()} tokens are more than the {self.window} of this model's sliding window. Visual "
                "tokens were dropped, so its layers cannot tell which tokens have left the window. Fix: keep=1 (leave --keep out)"
            )

    def get_seq_length(self) -> int:
        """The logical length: tokens of the sequence, dropped ones included."""
        if not self.is_initialized or self._known is None:
            return 0
        return self._covered + self.keys.shape[-2] - self._known.shape[1]

    def reset(self) -> None:
        self.keys = self.values = self._known = self._incoming = self._held = None
        self.is_initialized, self.padded, self._covered = False, False, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of the sequence (older releases: all but the first `tokens_to_remove`)."""
        length = self.get_seq_length()
        left = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        if left == length:
            return
        if left <= 0:  # no slot remains that could show the number of sequences
            self.reset()
            return
        if left >= self._covered:
            self.keys, self.values = self.keys[..., : left - length, :], self.values[..., : left - length, :]
            return
        positions = self.positions()
        slots = left_padded((positions >= 0) & (positions < left))
        self.keys, self.values = _gather(self.keys, slots), _gather(self.values, slots)
        self._know(positions.gather(1, slots.clamp(min=0)).masked_fill(slots < 0, PAD), left)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._known is not None:
            self._known = self._known.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self._known is not None:
            self._known = self._known[indices.to(self._known.device)]


def _consecutive(first: int, states: torch.Tensor) -> torch.Tensor:
    """Positions int64 `[B, n]` of `states` `[B, heads, n, D]`, counted from `first`."""
    return torch.arange(first, first + states.shape[-2], device=states.device).expand(states.shape[0], -1)


def _gather(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`states` `[B, heads, n, D]` at `slots` `[B, m]`; undefined values at pad slots."""
    index = slots.clamp(min=0)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


# -- the first tokens of a cache, for a request that begins like an earlier one
GOING_ON = (DynamicLayer, GrowingLayer, PrunedLayer, DynamicSlidingWindowLayer)  # and layers with a running state
DIVISIBLE = (
    DynamicLayer,
    GrowingLayer,
    PrunedLayer,
)  # one slot per token; sliding windows and running states have dropped earlier tokens


def can_go_on(cache: Any) -> bool:
    """Whether a longer prompt can continue this cache; not if an index chooses tokens in each pass."""
    return isinstance(cache, DynamicCache) and all(
        type(layer) in GOING_ON or isinstance(layer, LinearAttentionLayer) for layer in cache.layers
    )


def beginning(cache: Any, tokens: int, shared: bool) -> Any:
    """A cache of the first `tokens` tokens; None if this kind of cache cannot be divided.

    `shared`: `cache` must not change. The slots are shared until the new cache grows, which copies them.
    """
    length = cache.get_seq_length()
    if tokens == length and not shared:
        return cache
    if any(type(layer) not in DIVISIBLE for layer in cache.layers):
        return None
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    if tokens < length:
        for layer in part.layers:
            layer.crop(tokens - length)
    return part
