"""Keys and values that grow without copying what they hold.

transformers' layers make both anew for every token. With 3,000 tokens that takes half as long as attention itself. Here they are
views of memory with room for more tokens; what reads them sees the same numbers in the same order.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

GROWTH_TOKENS = 256  # for which room is made at once


def _settled(name: str) -> Any:
    """A property of a GrowingLayer that is this attribute, with all tokens."""

    def get(layer: "GrowingLayer") -> Any:
        layer._settle()
        return layer.__dict__[name]

    def put(layer: "GrowingLayer", states: Any) -> None:
        layer._settle()
        layer.__dict__[name] = states
        layer.noted = None
        if name == "_keys":
            layer.tokens = 0 if states is None or states.ndim < 4 else states.shape[2]

    return property(get, put)


class GrowingLayer(DynamicLayer):
    """Keys and values `[B, heads, S, D]`, views of `[B, heads, room, D]`: what was read is written over where tokens are given up
    and others come.

    `room`: tokens that it may ever hold, None: no more than it has, and growing copies. A copy (`copy.copy`) shares what is there
    and gets memory of its own when it grows. `noted`: set by whoever has noted where its memory is; None since that changed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.room: int | None = None
        self.noted: object | None = None
        self.tokens = 0  # those behind `_keys` are in `_held`: views are made when they are asked for
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values with room
        self._keys: Any = None  # None before the first update
        self._values: Any = None
        super().__init__(*args, **kwargs)

    keys, values = _settled("_keys"), _settled("_values")

    def _settle(self) -> None:
        if self.tokens and self._held is not None and self.tokens > self._keys.shape[2]:
            self._keys, self._values = (held.narrow(2, 0, self.tokens) for held in self._held)

    def __copy__(self) -> "GrowingLayer":
        self._settle()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._held = other.noted = None
        return other

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self._held or (None, None)
        keys, key_room = _grown(self.keys, key_states, held[0], self.room)
        values, value_room = _grown(self.values, value_states, held[1], self.room)
        self.keys, self.values = keys, values
        self._held = None if key_room is None or value_room is None else (key_room, value_room)
        return keys, values

    def begin(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> bool:
        """Before the first update: have the types and shapes of keys `[1, heads, 0, D]` and values `[1, heads, 0, E]`, and memory
        for so many tokens, at `place(tokens - 1)`, if it may have that."""
        if self.is_initialized or self.room is None or self.room < tokens:
            return False
        self.lazy_initialization(keys, values)
        room = min(self.room, tokens + GROWTH_TOKENS)
        held = _memory(keys, room), _memory(values, room)
        self.keys, self.values = (part.narrow(2, 0, 0) for part in held)
        self._held = held
        return True

    def has_room(self, tokens: int) -> bool:
        """Whether so many can be added at `place`: to the tokens of one sequence, with memory for more."""
        if self._held is None or self._keys is None:
            return False
        (keys, values), shape = self._held, self._keys.shape
        fits = shape[0] == 1 and self.tokens + tokens <= keys.shape[2]
        return fits and self._keys.data_ptr() == keys.data_ptr() and self._values.data_ptr() == values.data_ptr()

    def make_room(self, tokens: int) -> bool:
        """The same, with more memory if it may have more; for at most GROWTH_TOKENS."""
        if self.has_room(tokens):
            return True
        if tokens > GROWTH_TOKENS:
            return False
        keys, values = self.keys, self.values
        if keys is None or not keys.numel() or len(keys) != 1 or self.room is None or self.room < keys.shape[2] + tokens:
            return False
        self.keys, key_room = _grown(keys[..., :0, :], keys, None, self.room)
        self.values, value_room = _grown(values[..., :0, :], values, None, self.room)
        self._held = None if key_room is None or value_room is None else (key_room, value_room)
        return self.has_room(tokens)

    def place(self, later: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(memory of the keys and of the values, `[1, heads, room, D]`, the tokens in it) with one more, or `later` more than
        that, which the caller writes as the last one and then counts by `one_more` or `more`."""
        assert self._held is not None
        return *self._held, self.tokens + 1 + later

    def next_at(self, later: int = 0) -> tuple[int, int]:
        """By which `place(later)` is known as long as this layer grows only by tokens, without holding its memory."""
        return id(self._held), self.tokens + 1 + later

    def one_more(self) -> None:
        """The token behind the last one has been written."""
        self.tokens += 1

    def more(self, tokens: int) -> None:
        """So many behind the last one have been written, or the first ones."""
        self.tokens += tokens
        if not self._keys.numel():
            self._settle()

    def reset(self) -> None:
        super().reset()
        self._held = self.noted = None


def _grown(
    now: torch.Tensor, new: torch.Tensor, held: torch.Tensor | None, room: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(`now` and then `new`, the memory with room that they are in)."""
    before = now.shape[-2] if now.numel() else 0
    tokens = before + new.shape[-2]
    fits = (
        held is not None and now.data_ptr() == held.data_ptr() and now.shape[:-2] == held.shape[:-2] and tokens <= held.shape[-2]
    )
    if not fits:
        if room is None or room < tokens:
            return torch.cat([now, new] if before else [new], dim=-2), None
        held = _memory(new, min(room, tokens + GROWTH_TOKENS))
        if before:
            held[..., :before, :] = now
    assert held is not None
    held[..., before:tokens, :] = new
    return held[..., :tokens, :], held


def _memory(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Memory for so many tokens of such keys or values, which passes may write into in inference mode and outside of it."""
    with torch.inference_mode(False):
        return states.new_empty(*states.shape[:-2], tokens, states.shape[-1])


def held_tokens(cache: Any) -> int:
    """For how many tokens the layers of a cache that grow in place have memory; 0 if none does."""
    held = [layer._held for layer in getattr(cache, "layers", ()) if isinstance(layer, GrowingLayer)]
    return max((keys.shape[-2] for keys, _ in filter(None, held)), default=0)


def release_room(cache: Any) -> None:
    """Let the layers of a cache that grow in place hold no more memory than their tokens need; copies one layer after another."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, GrowingLayer) and layer._held is not None:
            layer.keys, layer.values, layer._held = layer.keys.clone(), layer.values.clone(), None


def grow_in_place(cache: Any, room: int) -> None:
    """Let the plain layers of a cache grow in place, up to `room` tokens."""
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer:
            cache.layers[index] = growing = GrowingLayer()
            growing.__dict__.update({name: value for name, value in vars(layer).items() if name not in ("keys", "values")})
            if layer.is_initialized:
                growing.keys, growing.values = layer.keys, layer.values
        if isinstance(cache.layers[index], GrowingLayer):
            cache.layers[index].room = room
