"""Keys and values of conversations that may go on, found by their longest common beginning and bounded in tokens.

A sequence is known by numbers, one per token: its id, or at an image's tokens one that stands for the image and for how its
tokens are selected. So two prompts that differ in an image or in `keep` have in common what comes before that image.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vismoe.models.visual.growing_cache import held_tokens, release_room
from vismoe.models.visual.pruned_cache import beginning
from vismoe.vision.selection import KeptImage

LEAST_TOKENS = 16  # a shorter beginning, such as that of a chat template, is not worth its place


@dataclass(frozen=True, eq=False)
class Prefix:
    """`numbers` int64 `[S]` of the tokens whose keys and values `cache` holds; `kept`: what was kept of their images."""

    numbers: np.ndarray
    cache: Any
    kept: tuple[KeptImage, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.numbers)

    @property
    def held_tokens(self) -> int:
        """With those for which its cache has memory beyond them."""
        return max(self.tokens, held_tokens(self.cache))

    def begins(self, other: "Prefix") -> bool:
        """Whether `other` goes on from this one."""
        return common(self.numbers, other.numbers) == self.tokens


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


class PrefixCache:
    """Used by the model's thread alone."""

    def __init__(self) -> None:
        self._kept: list[Prefix] = []  # least recently used first

    @property
    def tokens(self) -> int:
        return sum(prefix.tokens for prefix in self._kept)

    def take(self, numbers: np.ndarray, room_tokens: int) -> Prefix | None:
        """The longest beginning of a prompt that there is, at least one token shorter than it.

        Leaves at most `room_tokens` in the cache: what was used least recently goes first, and the prefix itself last.
        """
        best = max(self._kept, key=lambda prefix: common(prefix.numbers, numbers), default=None)
        shared = min(common(best.numbers, numbers), len(numbers) - 1) if best is not None else 0
        if best is None or shared < LEAST_TOKENS:
            self.shrink(room_tokens)
            return None
        self._kept.remove(best)
        self._kept.append(best)
        self.shrink(room_tokens)
        cache = beginning(best.cache, shared, shared=best in self._kept)
        if cache is None and shared == best.tokens:  # it can only be handed over whole
            self._kept.remove(best)
            cache = best.cache
        if cache is None:
            return None
        return Prefix(numbers[:shared], cache, tuple(image for image in best.kept if image.start < shared))

    def keep(self, prefix: Prefix) -> None:
        """Keep a sequence for a request that may go on from it, in place of those it went on from."""
        self._kept = [other for other in self._kept if not other.begins(prefix)] + [prefix]

    def shrink(self, most_tokens: int) -> None:
        """Hold memory for so many tokens at most: the room for more tokens goes first, then what was used least recently."""
        for prefix in self._kept:
            if sum(kept.held_tokens for kept in self._kept) > most_tokens:
                release_room(prefix.cache)
        while self.tokens > most_tokens:
            self._kept.pop(0)

    def clear(self) -> None:
        self._kept.clear()
