"""The size and tokens to which a family's processor resizes a picture, from its sides, before decoding. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vismoe.errors import InputError


@dataclass(frozen=True)
class Sight:
    """A picture as the model sees it: sides in pixels, the most pixels that processing creates, and its tokens."""

    width: int
    height: int
    pixels: int
    tokens: int


Look = Callable[[int, int], Sight | None]  # (width, height) of a picture -> how the model sees it; None: unknown


def area_look(processor: Any, limits: Mapping[str, int] | None = None) -> Look:
    """The look of an image processor that has a least and a most number of pixels; for others the result is unknown.

    limits: `shortest_edge` and `longest_edge` instead of the processor's own; areas in pixels, despite their names.
    """
    size = dict(limits or getattr(processor, "size", None) or {})
    patch, merge = getattr(processor, "patch_size", None), getattr(processor, "merge_size", None)
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    counts = getattr(processor, "get_number_of_image_patches", None)

    def look(width: int, height: int) -> Sight | None:
        if not (isinstance(patch, int) and isinstance(merge, int) and least and most and counts):
            return None
        try:
            high, wide = smart_resize(height, width, patch * merge, least, most)
            patches = counts(height, width, {"min_pixels": least, "max_pixels": most, "size": size})
        except ValueError:  # the processor refuses this shape
            return None
        if patches != (high // patch) * (wide // patch):
            return None
        return Sight(wide, high, wide * high, patches // merge**2)

    return look


def most_reduction(look: Look, width: int, height: int, possible: Callable[[int], bool] = bool) -> int:
    """The largest of the `possible` factors by which a picture's sides may be divided before processing; 1 if unknown.

    The reduced picture is nowhere smaller than the processor's result, upright or turned by a quarter, and gives the same sides
    and tokens. A factor that divides both sides is preferred to a factor up to 1.5 times as large that does not and so moves
    edges a little.
    """
    seen, turned = look(width, height), look(height, width)
    if seen is None or turned is None:
        return 1
    most = min(width // seen.width, height // seen.height, height // turned.width, width // turned.height)
    fitting = [factor for factor in range(most, 1, -1) if possible(factor) and _is_seen_as(seen, look, width, height, factor)]
    largest = fitting[0] if fitting else 1
    even = (factor for factor in fitting if width % factor == height % factor == 0 and 3 * factor >= 2 * largest)
    return next(even, largest)


def _is_seen_as(seen: Sight, look: Look, width: int, height: int, factor: int) -> bool:
    try:
        return look(-(-width // factor), -(-height // factor)) == seen
    except InputError:  # this shape is refused
        return False
