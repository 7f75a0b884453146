"""The codec of each format: raw as it is, lossless and the integer formats in C++."""

from collections.abc import Sequence

import torch

from vismoe.errors import ConfigError
from vismoe.formats.codec import Codec
from vismoe.formats.raw import Raw
from vismoe.kernels.affine import FastAffine
from vismoe.kernels.lossless import FastLossless
from vismoe.kernels.restore import FastEncoded
from vismoe.types import ExpertInventory, Format, RecordLayout

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def codecs_of(format: Format, inventory: ExpertInventory, transposed: Sequence[frozenset[str]] = ()) -> tuple[Codec, ...]:
    """The codec of every geometry. `raw` is what the checkpoint has: of a quantised one, its own encoding.

    transposed: per geometry, the matrices that the model keeps as [in, out]; empty: none. Raises ConfigError as `codec_of`.
    """
    names = transposed or [frozenset[str]()] * len(inventory.raw_layouts)
    if format is Format.RAW and inventory.own_layouts:
        return tuple(map(FastEncoded, inventory.raw_layouts, inventory.own_layouts, names))
    return tuple(codec_of(format, raw, stored) for raw, stored in zip(inventory.raw_layouts, names, strict=True))


def codec_of(format: Format, raw: RecordLayout, transposed: frozenset[str]) -> Codec:
    """The codec of `format` for records of layout `raw`; `transposed` names its 2-D sections that are stored [in, out].

    Raises ConfigError where the format cannot hold a section's type.
    """
    if format is Format.RAW:
        return Raw(raw)
    if format is Format.LOSSLESS:
        return FastLossless(raw)
    odd = next((section for section in raw.sections if section.dtype not in FLOATS), None)
    if odd is not None:
        raise ConfigError(
            f"{format} holds bfloat16, float16 and float32 weights, and section {odd.name} is {odd.dtype}. "
            "Fix: load the model with one of these as dtype=, or use the raw format"
        )
    return FastAffine(format, raw, transposed)
