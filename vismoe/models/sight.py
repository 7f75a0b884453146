"""What a family's processor makes of a picture of some size: known from its sides, before a pixel of it is decoded. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

__all__ = ["Sight", "most_reduction", "sight_of"]


@dataclass(frozen=True)
class Sight:
    """A picture as the model sees it: sides in pixels, and the tokens that it takes."""

    width: int
    height: int
    tokens: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def sight_of(processor: Any, width: int, height: int, limits: Mapping[str, int] | None = None) -> Sight | None:
    """What an image processor makes of a picture; None where its family has another rule than a least and a most of pixels.

    limits: `shortest_edge` and `longest_edge` in place of the processor's own; pixels of an area, despite their names.
    """
    size = dict(limits or getattr(processor, "size", None) or {})
    patch, merge = getattr(processor, "patch_size", None), getattr(processor, "merge_size", None)
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    counts = getattr(processor, "get_number_of_image_patches", None)
    if not (isinstance(patch, int) and isinstance(merge, int) and least and most and counts):
        return None
    try:
        high, wide = smart_resize(height, width, patch * merge, least, most)
        patches = counts(height, width, {"min_pixels": least, "max_pixels": most, "size": size})
    except ValueError:  # a shape that the processor refuses
        return None
    if patches != (high // patch) * (wide // patch):
        return None
    return Sight(wide, high, patches // merge**2)


def most_reduction(
    processor: Any, width: int, height: int, limits: Mapping[str, int] | None = None, possible: Callable[[int], bool] = bool
) -> int:
    """By how much a picture's sides may be divided before the processor gets it, of the `possible` numbers; 1 if not known.

    What is left is nowhere smaller than what the processor makes of it, and it makes the same sides and tokens of it. A number
    that divides both sides is taken before a larger one, by up to a half, that does not and so moves edges a little.
    """
    seen = sight_of(processor, width, height, limits)
    if seen is None:
        return 1
    fitting = [
        factor
        for factor in range(min(width // seen.width, height // seen.height), 1, -1)
        if possible(factor) and sight_of(processor, -(-width // factor), -(-height // factor), limits) == seen
    ]
    largest = fitting[0] if fitting else 1
    even = (factor for factor in fitting if width % factor == height % factor == 0 and 3 * factor >= 2 * largest)
    return next(even, largest)
