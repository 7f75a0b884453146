"""What a format is: how one expert's raw record is encoded for storage, what a slab holds, and how weights are restored.

A codec belongs to one geometry and one format. It is pure: no I/O, no state, and the same bytes for the same record on every
call, with any number of threads. `docs/formats.md` draws the layouts.
"""

from typing import Protocol

import torch
from torch import Tensor

from vismoe.errors import ConfigError
from vismoe.types import Format, RecordLayout

__all__ = ["Codec", "codec_of"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Codec(Protocol):
    """One geometry in one format."""

    @property
    def format(self) -> Format: ...

    @property
    def raw(self) -> RecordLayout:
        """Layout of a raw record, in the model's dtype and orientation."""

    @property
    def slab(self) -> RecordLayout:
        """Layout of a slab, in whole blocks of BLOCK_BYTES, so that O_DIRECT can read straight into it."""

    @property
    def fixed_bytes(self) -> int | None:
        """Bytes of an encoded record, in whole blocks; None where they vary."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest encoded record, in whole blocks."""

    def encode(self, record: Tensor) -> Tensor:
        """uint8 `[raw.record_bytes or more]` -> uint8 `[n]`; gaps and the end of the last block are zero."""

    def decode(self, encoded: Tensor, slab: Tensor) -> None:
        """Encoded bytes -> what a slab holds, written into `slab`, uint8 `[slab.record_bytes or more]`."""

    def restore(self, slab: Tensor, record: Tensor) -> None:
        """What a slab holds -> weights in the model's dtype and orientation, written into `record`; gaps are not touched."""


def codec_of(format: Format, raw: RecordLayout, transposed: frozenset[str]) -> Codec:
    """The codec of `format` for records of layout `raw`; `transposed` names its 2-D sections that are stored [in, out].

    Raises ConfigError where the format cannot hold a section's type.
    """
    if format is Format.RAW:
        from vismoe.formats.raw import Raw

        return Raw(raw)
    if format is Format.LOSSLESS:
        from vismoe.formats.lossless import Lossless

        return Lossless(raw)
    from vismoe.formats.affine import Affine

    odd = next((section for section in raw.sections if section.dtype not in FLOATS), None)
    if odd is not None:
        raise ConfigError(
            f"{format} holds bfloat16, float16 and float32 weights, and section {odd.name} is {odd.dtype}. "
            "Fix: load the model with one of these as dtype=, or use the raw format"
        )
    return Affine(format, raw, transposed)
