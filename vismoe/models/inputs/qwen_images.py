"""Images of the Qwen families at the sizes that Qwen's own package, qwen-vl-utils, decides.

A message part may set the size of its image, as Qwen's documentation describes: `min_pixels` and `max_pixels`, or
`resized_height` and `resized_width`. Missing values are the package's defaults. An image without size options keeps within the
request's number of visual tokens, or else within the pixels of the checkpoint's processor.

Promises: size and pixels equal those of the package's `process_vision_info`. The package only receives opened pictures, so it
reads no file and requests no URL. Sizes are pixels, (height, width) in this order.
"""

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.image_sizes import Sight
from vismoe.models.inputs.images import MAX_PIXELS
from vismoe.ranges import shown

SIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
TOKENS_KEY = "image_tokens"  # the least and most visual tokens of one image
LOW_DETAIL_PIXELS = 512 * 512  # what OpenAI's API makes of an image with `detail` low
VIDEO_KEYS = frozenset("nframes fps min_frames max_frames total_pixels video_start video_end sample_fps raw_fps".split())
MOST = 2**53  # the largest size: a float holds every whole number up to this
# The processors of families, and whether the call that Qwen documents lets them resize once more, to the checkpoint's limits.
RESIZES_AGAIN = {
    "Qwen2VLProcessor": True,
    "Qwen2_5_VLProcessor": True,
    "Qwen2_5OmniProcessor": True,
    "Qwen3OmniMoeProcessor": True,
    "Qwen3VLProcessor": False,
}


@dataclass(frozen=True)
class Picture:
    """An image of a conversation; `size`: the size options of its message part, as `asked_size` reads them."""

    image: Any  # an image, or a Moment of a video, which is sized already
    size: Mapping[str, Any] = field(default_factory=dict)


def image_source(part: Mapping[str, Any]) -> Any:
    """The image source in a message part; None if the part is not an image."""
    kind = part.get("type") or next((name for name in ("image", "image_url") if part.get(name) is not None), None)
    if kind == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    return part.get("image") if kind == "image" else None


def asked_size(part: Mapping[str, Any]) -> dict[str, Any]:
    """The size options of an image's message part. Raises InputError for invalid ones."""
    given = {name: value for name, value in part.items() if value is not None}
    if film := sorted(given.keys() & VIDEO_KEYS):
        raise InputError(f"{', '.join(film)}: options of a video, not of an image. Fix: leave it out")
    if unknown := sorted(map(str, given.keys() - {"type", "image", "image_url", TOKENS_KEY, *SIZE_KEYS})):
        words = ", ".join((TOKENS_KEY, *SIZE_KEYS))
        raise InputError(f"an image has no option {', '.join(unknown)[:200]}. Fix: leave it out; sizes are {words}")
    if TOKENS_KEY in given:
        return {TOKENS_KEY: _tokens(given[TOKENS_KEY], given.keys() & SIZE_KEYS)}
    size = {name: _pixels(name, given[name]) for name in SIZE_KEYS if name in given}
    if ("resized_height" in size) != ("resized_width" in size):
        raise InputError("resized_height and resized_width belong together. Fix: give both, or only max_pixels")
    if size.get("min_pixels", 0) > size.get("max_pixels", MOST):
        least, most = size["min_pixels"], size["max_pixels"]
        raise InputError(f"min_pixels={least:,} is more than max_pixels={most:,}. Fix: exchange them")
    return size


def _tokens(value: Any, beside: Collection[str]) -> tuple[int, int]:
    if beside:
        raise InputError(f"{TOKENS_KEY} and {', '.join(sorted(beside))} say the size of one image. Fix: leave one out")
    numbers = list(value) if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(type(number) is int for number in numbers) or not 1 <= numbers[0] <= numbers[1] <= MOST:
        raise InputError(f"{TOKENS_KEY}: the least and most visual tokens, not {shown(value)}. Fix: e.g. [64, 1024]")
    return numbers[0], numbers[1]


def _pixels(name: str, value: Any) -> int:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if is_number and 1 <= value <= MOST and value == int(value):
        return int(value)
    given = f"{value:g}" if is_number and abs(value) <= MOST else type(value).__name__
    raise InputError(f"{name}: a whole number of pixels from 1 to {MOST:,}, not {given}")


@dataclass(frozen=True)
class QwenImages:
    """The sizes of a Qwen family's processor: the side of a visual token, and the least and most pixels of an image."""

    side: int
    limits: tuple[int, int]
    again: bool  # as in RESIZES_AGAIN

    @classmethod
    def of(cls, processor: Any) -> "QwenImages | None":
        """None for the processor of another family."""
        again = next((RESIZES_AGAIN[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in RESIZES_AGAIN), None)
        if again is None:
            return None
        images = processor.image_processor
        limits = images.size["shortest_edge"], images.size["longest_edge"]
        return cls(images.patch_size * images.merge_size, limits, again)

    def asked(self, size: Mapping[str, Any], image_tokens: tuple[int, int] | None) -> dict[str, int]:
        """The size options of an image with message part options `size`, in the package's names; image_tokens: the request's
        limits."""
        if size and TOKENS_KEY not in size:
            return dict(size)
        tokens = size.get(TOKENS_KEY, image_tokens)
        least, most = [number * self.side**2 for number in tokens] if tokens else self.limits
        return {"min_pixels": least, "max_pixels": most}

    def low_detail(self, image_tokens: tuple[int, int] | None) -> dict[str, int]:
        """The size options of an image with OpenAI's `detail` low, within image_tokens or the processor's limits."""
        return {name: min(pixels, LOW_DETAIL_PIXELS) for name, pixels in self.asked({}, image_tokens).items()}

    def fitted(self, width: int, height: int, asked: Mapping[str, int]) -> tuple[int, int]:
        """(height, width) to which an image is resized. Raises InputError if no size is possible."""
        package = vision_process()
        if "resized_height" in asked:
            height, width, asked = asked["resized_height"], asked["resized_width"], {}
        least = asked.get("min_pixels", package.IMAGE_MIN_TOKEN_NUM * self.side**2)
        most = asked.get("max_pixels", package.IMAGE_MAX_TOKEN_NUM * self.side**2)
        if least > most:
            raise InputError(
                f"no image can have at least {least:,} (min_pixels) and at most {most:,} pixels (max_pixels). "
                f"Fix: give both; a visual token has {self.side**2:,} pixels"
            )
        try:
            fitted: tuple[int, int] = package.smart_resize(height, width, self.side, least, most)
        except ValueError as error:  # an image two hundred times as wide as it is high
            raise InputError(f"an image of {width} x {height} pixels: {error}. Fix: crop or resize the image") from error
        if not 0 < fitted[0] * fitted[1] <= MAX_PIXELS:
            raise InputError(
                f"{width} x {height} pixels would become {fitted[1]:,} x {fitted[0]:,}; the least side is {self.side}, "
                f"and the limit {MAX_PIXELS:,} pixels. Fix: other limits (max_pixels, min_pixels, --image-tokens), or crop it"
            )
        return fitted

    def look(self, asked: Mapping[str, int], again: bool) -> Callable[[int, int], Sight]:
        """How the model sees an image with these size options, from its sides; again: the processor resizes once more, to its own
        limits. Raises InputError if no size is possible."""

        def look(width: int, height: int) -> Sight:
            high, wide = self.fitted(width, height, asked)
            try:
                last_high, last_wide = smart_resize(high, wide, self.side, *self.limits) if again else (high, wide)
            except ValueError as error:  # the first resizing changed its aspect ratio a little
                raise InputError(f"an image of {width} x {height} pixels: {error}. Fix: crop or resize the image") from error
            return Sight(wide, high, max(high * wide, last_high * last_wide), last_high * last_wide // self.side**2)

        return look

    def resized(self, image: Image.Image, asked: Mapping[str, int]) -> Image.Image:
        """The RGB picture at that size; the same object if it has the size already."""
        package = vision_process()
        part = {"type": "image", "image": image, **asked}
        side = self.side / package.SPATIAL_MERGE_SIZE
        (picture,), _ = package.process_vision_info([{"role": "user", "content": [part]}], image_patch_size=side)
        return image if picture.size == image.size and image.mode == "RGB" else picture


_importing = threading.Lock()
_package: list[ModuleType] = []


def vision_process() -> ModuleType:
    """`qwen_vl_utils.vision_process`, imported at its first use. Raises ConfigError if it is not installed.

    It imports torchvision, which it needs for videos only; if torchvision does not work, a stand-in replaces it during the
    import.
    """
    from vismoe.models.inputs.processor import torchvision_works  # this imports transformers

    with _importing:
        if not _package:
            with nullcontext() if torchvision_works() else _torchvision_standing_in():
                _package.append(_imported())
    return _package[0]


def _imported() -> ModuleType:
    try:
        package = importlib.import_module("qwen_vl_utils.vision_process")
    except ImportError as error:
        raise ConfigError(
            f"images of Qwen models need the package qwen-vl-utils, which cannot be imported ({error}). "
            "Fix: pip install 'qwen-vl-utils>=0.0.14'"
        ) from error
    package.logger.setLevel(logging.ERROR)  # it warns of each number of frames that a short video does not reach
    return package


@contextmanager
def _torchvision_standing_in() -> Iterator[None]:
    """Within it, the names of torchvision that the package imports exist as stand-ins. Afterwards they are removed, and so is the
    package that imported them: a later import of either gets the real one, or the real error."""
    before = {name: module for name, module in list(sys.modules.items()) if _is_one_of_both(name)}
    top, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
    for module in (top, transforms):
        module.__spec__ = ModuleSpec(module.__name__, None)
    vars(top).update(io=None, transforms=transforms)
    vars(transforms).update(InterpolationMode=None)
    sys.modules.update({module.__name__: module for module in (top, transforms)})
    try:
        yield
    finally:
        for name in filter(_is_one_of_both, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)


def _is_one_of_both(name: str) -> bool:
    return name.partition(".")[0] in ("torchvision", "qwen_vl_utils")
