"""Images of the Qwen families at the sizes that Qwen's own package, qwen-vl-utils, decides.

A message's part may say how large its image is to be, as Qwen's documentation writes it: `min_pixels` and `max_pixels`, or
`resized_height` and `resized_width`. What a part leaves out is the package's default; an image that says nothing keeps within the
visual tokens that the request gave, and without those within the pixels that the checkpoint's processor gives.

Promises: size and pixels are those of the package's `process_vision_info`. It only gets pictures that were opened here, so it
reads no file and asks for no URL. Sizes are pixels, (height, width) in this order.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
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

__all__ = ["SIZE_KEYS", "Picture", "QwenImages", "asked_size", "image_source"]

SIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
VIDEO_KEYS = frozenset("nframes fps min_frames max_frames total_pixels video_start video_end sample_fps raw_fps".split())
MOST = 2**53  # of a size: a float holds every whole number up to here
# The processor of a family, and whether the call that Qwen documents lets it resize once more, to the checkpoint's own limits.
RESIZES_AGAIN = {
    "Qwen2VLProcessor": True,
    "Qwen2_5_VLProcessor": True,
    "Qwen2_5OmniProcessor": True,
    "Qwen3OmniMoeProcessor": True,
    "Qwen3VLProcessor": False,
}


@dataclass(frozen=True)
class Picture:
    """An image of a conversation; `size`: what its part says about that, as `asked_size` reads it."""

    image: Image.Image
    size: Mapping[str, int] = field(default_factory=dict)


def image_source(part: Mapping[str, Any]) -> Any:
    """What a part of a message names as its image; None: it is not about an image."""
    kind = part.get("type") or next((name for name in ("image", "image_url") if part.get(name) is not None), None)
    if kind == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    return part.get("image") if kind == "image" else None


def asked_size(part: Mapping[str, Any]) -> dict[str, int]:
    """What an image's part says about its size. Raises InputError for what it cannot say."""
    given = {name: value for name, value in part.items() if value is not None}
    if film := sorted(given.keys() & VIDEO_KEYS):
        raise InputError(f"{', '.join(film)}: of a video, and only images can be asked about (no video). Fix: leave it out")
    if unknown := sorted(map(str, given.keys() - {"type", "image", "image_url", *SIZE_KEYS})):
        raise InputError(f"an image has no {', '.join(unknown)[:200]}. Fix: leave it out; its size is in {', '.join(SIZE_KEYS)}")
    size = {name: _pixels(name, given[name]) for name in SIZE_KEYS if name in given}
    if ("resized_height" in size) != ("resized_width" in size):
        raise InputError("resized_height and resized_width go together. Fix: give both, or max_pixels")
    if size.get("min_pixels", 0) > size.get("max_pixels", MOST):
        least, most = size["min_pixels"], size["max_pixels"]
        raise InputError(f"min_pixels={least:,} is more than max_pixels={most:,}. Fix: the other way round")
    return size


def _pixels(name: str, value: Any) -> int:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if is_number and 1 <= value <= MOST and value == int(value):
        return int(value)
    shown = f"{value:g}" if is_number and abs(value) <= MOST else type(value).__name__
    raise InputError(f"{name}: a whole number of pixels from 1 to {MOST:,}, not {shown}")


@dataclass(frozen=True)
class QwenImages:
    """What a Qwen family's processor says about sizes: the side of a visual token and the least and most pixels of an image."""

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

    def asked(self, size: Mapping[str, int], image_tokens: tuple[int, int] | None) -> dict[str, int]:
        """The size of an image whose part says `size`, in the package's words; image_tokens: least and most of the request."""
        least, most = [tokens * self.side**2 for tokens in image_tokens] if image_tokens else self.limits
        return dict(size) or {"min_pixels": least, "max_pixels": most}

    def fitted(self, width: int, height: int, asked: Mapping[str, int]) -> tuple[int, int]:
        """(height, width) that an image gets. Raises InputError where no size is possible."""
        package = vision_process()
        if "resized_height" in asked:
            height, width, asked = asked["resized_height"], asked["resized_width"], {}
        least = asked.get("min_pixels", package.IMAGE_MIN_TOKEN_NUM * self.side**2)
        most = asked.get("max_pixels", package.IMAGE_MAX_TOKEN_NUM * self.side**2)
        if least > most:
            raise InputError(
                f"an image of {least:,} pixels at least (min_pixels) and {most:,} at most (max_pixels). "
                f"Fix: give both; a visual token has {self.side**2:,} pixels"
            )
        try:
            fitted: tuple[int, int] = package.smart_resize(height, width, self.side, least, most)
        except ValueError as error:  # an image two hundred times as wide as it is high
            raise InputError(f"an image of {width} x {height} pixels: {error}. Fix: crop or resize the image") from error
        if not 0 < fitted[0] * fitted[1] <= MAX_PIXELS:
            raise InputError(
                f"an image of {width} x {height} pixels would get {fitted[1]:,} x {fitted[0]:,}; the least side is {self.side}, "
                f"and the limit {MAX_PIXELS:,} together. Fix: other limits (max_pixels, min_pixels, --image-tokens), or crop it"
            )
        return fitted

    def look(self, asked: Mapping[str, int], again: bool) -> Callable[[int, int], Sight]:
        """How an image of this size is seen, from its sides; again: the processor resizes once more, as `again` says of the
        family, to its own limits. Raises InputError where no size is possible."""

        def look(width: int, height: int) -> Sight:
            high, wide = self.fitted(width, height, asked)
            try:
                last_high, last_wide = smart_resize(high, wide, self.side, *self.limits) if again else (high, wide)
            except ValueError as error:  # the first time made it a little wider for its height
                raise InputError(f"an image of {width} x {height} pixels: {error}. Fix: crop or resize the image") from error
            return Sight(wide, high, max(high * wide, last_high * last_wide), last_high * last_wide // self.side**2)

        return look

    def resized(self, image: Image.Image, asked: Mapping[str, int]) -> Image.Image:
        """The RGB picture at that size; the very same where it has it already."""
        package = vision_process()
        part = {"type": "image", "image": image, **asked}
        side = self.side / package.SPATIAL_MERGE_SIZE
        (picture,), _ = package.process_vision_info([{"role": "user", "content": [part]}], image_patch_size=side)
        return image if picture.size == image.size and image.mode == "RGB" else picture


_importing = threading.Lock()
_package: list[ModuleType] = []


def vision_process() -> ModuleType:
    """`qwen_vl_utils.vision_process`, imported when an image first asks for it. Raises ConfigError where it is not installed.

    It imports torchvision, which it needs for videos only; where that does not work, something of its name stands in meanwhile.
    """
    from vismoe.models.inputs.processor import torchvision_works  # transformers comes with it

    with _importing:
        if not _package:
            with nullcontext() if torchvision_works() else _torchvision_standing_in():
                _package.append(_imported())
    return _package[0]


def _imported() -> ModuleType:
    try:
        return importlib.import_module("qwen_vl_utils.vision_process")
    except ImportError as error:
        raise ConfigError(
            f"images of Qwen models need the package qwen-vl-utils, which cannot be imported ({error}). "
            "Fix: pip install 'qwen-vl-utils>=0.0.14'"
        ) from error


@contextmanager
def _torchvision_standing_in() -> Iterator[None]:
    """Within, the names of torchvision that the package imports, with nothing behind them. After it there is no trace of them,
    nor of the package that saw them: whoever imports either later gets the real one, or the real error."""
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
