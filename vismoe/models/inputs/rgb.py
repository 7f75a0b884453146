"""Converts decoded pixels of any kind to 8-bit RGB, and to fewer pixels: transparency over white, wider numbers scaled to 8 bits.

Works on bands of rows, so that memory never holds a large picture in several forms. Before decoding, `Header` and `Reduction`
give the size of the result, and `decoding_bytes` the memory that decoding needs. Sizes are pixels and bytes.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

BAND_PIXELS = 2**18  # of a band of rows, or one row
BAND_BYTES = 48  # most bytes per pixel of a band during any conversion: float64 copies of 32-bit grey
DRAFTS = (8, 4, 2, 1)  # factors by which JPEG decoding can reduce
JPEG = ("JPEG", "MPO")
PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}  # in Pillow, by mode; 4 in all others
CODEC_BYTES = {"WEBP": 16, "AVIF": 14, "JPEG2000": 24, "TIFF": 8, "ICO": 8, "GIF": 6}  # further bytes per pixel, by format
SCANS_BYTES = 8  # per pixel of a JPEG in several scans: its coefficients stay until the last scan


@dataclass(frozen=True)
class Header:
    """What is known of a picture before it is decoded; sides as stored, not yet upright."""

    width: int
    height: int
    format: str  # Pillow's name
    mode: str
    scans: bool = False  # a JPEG in several scans


@dataclass(frozen=True)
class Reduction:
    """Divides each side by `draft` while a JPEG is decoded, and then by `factor`, taking means of squares of pixels."""

    draft: int
    factor: int

    @classmethod
    def of(cls, format: str | None, most: int) -> "Reduction":
        """The largest reduction by at most `most`. The first step of a JPEG is a power of two, without steps between."""
        draft = next(draft for draft in DRAFTS if draft <= max(1, most)) if format in JPEG else 1
        return cls(draft, max(1, most) // draft)

    @property
    def total(self) -> int:
        return self.draft * self.factor

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the result; partial squares at the edges count."""
        return _divided(width, height, self.total)


def decoding_bytes(header: Header, most: int) -> int:
    """The most memory that decoding needs in its process, beside the encoded bytes. most: as for `Reduction.of`."""
    reduction = Reduction.of(header.format, most)
    (width, height), (less_wide, less_high) = (
        _divided(header.width, header.height, reduction.draft),
        reduction.size(header.width, header.height),
    )
    codec = SCANS_BYTES if header.format in JPEG and header.scans else CODEC_BYTES.get(header.format, 0)
    decoded = width * height * PIXEL_BYTES.get(header.mode, 4) + header.width * header.height * codec
    band = BAND_BYTES * max(BAND_PIXELS, width * reduction.factor)
    return decoded + 2 * 4 * less_wide * less_high + band  # twice: while it is turned upright


def rgb_of(image: Image.Image, factor: int = 1) -> Image.Image:
    """8-bit RGB of a loaded picture, each side divided by `factor`, rounded up. Raises errors of Pillow and numpy."""
    width, height = image.size
    if image.mode == "RGB" and factor == 1 and "transparency" not in image.info:
        return image.convert("RGB")
    rows = factor * max(1, BAND_PIXELS // (width * factor))
    bands = [(0, top, width, min(height, top + rows)) for top in range(0, height, rows)]
    limits = _limits(image, bands) if _is_wide(image) else None
    rgb = Image.new("RGB", _divided(width, height, factor))
    for box in bands:
        band = _rgb(image.crop(box), limits)
        rgb.paste(band.reduce(factor) if factor > 1 else band, (0, box[1] // factor))
    return rgb


def _divided(width: int, height: int, factor: int) -> tuple[int, int]:
    return -(-width // factor), -(-height // factor)


def _is_wide(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;")


def _rgb(image: Image.Image, limits: tuple[float, float] | None) -> Image.Image:
    if limits is not None:
        return _eight_bit(image, *limits).convert("RGB")
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _limits(image: Image.Image, bands: list[tuple[int, int, int, int]]) -> tuple[float, float]:
    """The values of black and white for wide integers and floats: white is 1 (floats), 255 or 65535, the least that covers all
    values; otherwise they are the minimum and maximum."""
    found = []
    for box in bands:
        values = np.asarray(image.crop(box)).astype(np.float64)
        finite = values[np.isfinite(values)]
        if finite.size:
            found += [float(finite.min()), float(finite.max())]
    if not found:
        raise ValueError("no finite pixel")
    low, high = min(found), max(found)
    whites = {"F": (1, 255, 65535), "I": (255, 65535)}.get(image.mode, (65535,))
    if low >= 0 and high <= whites[-1]:
        low, high = 0, min(white for white in whites if high <= white)
    return low, high


def _eight_bit(image: Image.Image, low: float, high: float) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    shares = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / max(high - low, 1e-12)
    return Image.fromarray((shares * 255).round().astype(np.uint8))
