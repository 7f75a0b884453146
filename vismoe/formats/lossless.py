"""The lossless format: bfloat16 with packed exponents. Every one of the 65,536 bit patterns is restored exactly.

Trained weights use few exponents: seven of 256 cover about 97% of them. A weight is stored as one byte (sign and mantissa) and a
3-bit code: one of the section's seven commonest exponents, or 7 (an escape: the exponent is in a list). That is about 0.70 of
bfloat16, and decoding is a table lookup in registers.

This module defines the bytes; `vismoe/kernels/lossless.py` writes and reads them.

An encoded record; all integers are little-endian, gaps are zero:

    uint64 [1 + sections, 3]   (MAGIC, content_bytes, sections), then for each section (kind, offset_bytes, escapes)
    sections                   each at a multiple of 64; kind STORED: the section's own bytes; kind PACKED: below
    zeros                      TAIL_BYTES, so that a vector load at the last escape stays inside; content_bytes ends here
    zeros                      up to whole blocks of BLOCK_BYTES

A section is packed if it is bfloat16 and packing makes it smaller. Of n weights, in chunks of 64 and blocks of 64 chunks:

    uint8  [8]                 the seven commonest exponents, commonest first, ties to the smaller one; 0
    uint32 [blocks]            how many escapes lie before each block: with it, every block can be decoded on its own
    zeros                      up to a multiple of 64
    uint8  [chunks, 64]        sign << 7 | mantissa
    uint64 [chunks, 3]         the codes' bits: bit i of word p is bit p of the code of the weight stored at i
    uint8  [escapes]           exponents of the weights with code 7, in stored order

The last chunk is padded with positive powers of two of the commonest exponent. Weights of a chunk are stored in the order that
SIMD unpacking, which interleaves bytes within 128 bits, restores: weight 32 h + 8 l + j (j below 8) stands at 16 l + 8 h + j.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.codec import Codec
from vismoe.types import BLOCK_BYTES, Format, RecordLayout, Section, aligned

TAIL_BYTES = 64
FAULTS = {
    1: "its header is not that of a lossless record of this geometry",
    2: "a section reaches beyond the record",
    3: "the number of escapes of a block does not match its codes",
}


@dataclass(frozen=True)
class Lossless(Codec):
    """Codec of one geometry in format lossless. Raises ConfigError where no section is bfloat16."""

    raw: RecordLayout
    format = Format.LOSSLESS

    def __post_init__(self) -> None:
        assert all(section.nbytes < 2**33 for section in self.raw.sections), "escapes are counted in 32 bits"
        if not any(map(packable, self.raw.sections)):
            types = ", ".join(sorted({str(section.dtype).removeprefix("torch.") for section in self.raw.sections}))
            raise ConfigError(f"The lossless format packs bfloat16 weights, and these experts are {types}. Fix: use format raw")

    @property
    def fixed_bytes(self) -> None:
        return None

    @cached_property
    def most_bytes(self) -> int:
        stored = sum(aligned(section.nbytes) for section in self.raw.sections)
        return aligned(header_bytes(self.raw) + stored + TAIL_BYTES, BLOCK_BYTES)


def packable(section: Section) -> bool:
    return section.dtype == torch.bfloat16


def header_bytes(raw: RecordLayout) -> int:
    return aligned((1 + len(raw.sections)) * 3 * 8)


def content_bytes(encoded: Tensor) -> int:
    """Bytes of an encoded record before it is rounded up to whole blocks."""
    return int(encoded[8:16].numpy().view("<u8")[0])


def check(fault: int) -> None:
    """Raises CheckpointError for a fault number, a key of FAULTS; 0 means no fault."""
    if fault:
        raise CheckpointError(
            f"An expert record in the lossless format is damaged: {FAULTS[fault]}. "
            "Fix: delete the store and pack again; vismoe pack --verify names the bad records"
        )
