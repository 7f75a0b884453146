"""The lossless format: bfloat16 with packed exponents. Every one of the 65,536 bit patterns is restored exactly.

Trained weights use few exponents: seven of 256 cover about 97% of them. A weight is stored as one byte (sign and mantissa) and a
3-bit code: one of the section's seven commonest exponents, or 7 (an escape: the exponent is in a list). That is about 0.70 of
bfloat16, and decoding is a table lookup in registers.

This module defines the bytes and is the oracle of `vismoe/kernels/lossless.py`, which writes the same bytes faster.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.fixed_size import in_blocks
from vismoe.types import BLOCK_BYTES, Format, RecordLayout, Section, aligned

__all__ = ["Lossless", "check", "content_bytes"]

MAGIC = int.from_bytes(b"vismoeL1", "little")
STORED, PACKED = 0, 1
ESCAPE = 7  # the code of a weight whose exponent is not in the table
CHUNK_WEIGHTS = 64
BLOCK_CHUNKS = 64
TAIL_BYTES = 64
FAULTS = {
    1: "its header is not that of a lossless record of this geometry",
    2: "a section reaches beyond the record",
    3: "the number of escapes of a block does not match its codes",
}

Words = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Lossless:
    """Codec of one geometry in format lossless. Raises ConfigError where no section is bfloat16."""

    raw: RecordLayout

    def __post_init__(self) -> None:
        assert all(section.nbytes < 2**33 for section in self.raw.sections), "escapes are counted in 32 bits"
        if not any(map(packable, self.raw.sections)):
            types = ", ".join(sorted({str(section.dtype).removeprefix("torch.") for section in self.raw.sections}))
            raise ConfigError(f"The lossless format packs bfloat16 weights, and these experts are {types}. Fix: use format raw")

    @property
    def format(self) -> Format:
        return Format.LOSSLESS

    @cached_property
    def slab(self) -> RecordLayout:
        return in_blocks(self.raw)

    @property
    def fixed_bytes(self) -> None:
        return None

    @cached_property
    def most_bytes(self) -> int:
        stored = sum(aligned(section.nbytes) for section in self.raw.sections)
        return aligned(header_bytes(self.raw) + stored + TAIL_BYTES, BLOCK_BYTES)

    def encode(self, record: Tensor) -> Tensor:
        source = record.numpy()
        rows, parts, end_bytes = [], [], header_bytes(self.raw)
        for section in self.raw.sections:
            payload = source[section.offset_bytes : section.offset_bytes + section.nbytes]
            kind, escapes, part = _pack(payload.view(np.uint16)) if packable(section) else (STORED, 0, payload)
            rows.append((kind, end_bytes, escapes))
            parts.append(part)
            end_bytes = aligned(end_bytes + part.size)
        end_bytes += TAIL_BYTES
        encoded = np.zeros(aligned(end_bytes, BLOCK_BYTES), np.uint8)
        header = np.array([(MAGIC, end_bytes, len(rows)), *rows], "<u8")
        encoded[: header.nbytes] = header.view(np.uint8).reshape(-1)
        for (_, offset_bytes, _), part in zip(rows, parts):
            encoded[offset_bytes : offset_bytes + part.size] = part
        return torch.from_numpy(encoded)

    def decode(self, encoded: Tensor, slab: Tensor) -> None:
        """Raises CheckpointError for bytes that `encode` cannot have written for this geometry."""
        source, target = encoded.numpy(), slab.numpy()
        for section, row in zip(self.raw.sections, _rows(source, self.raw)):
            target[section.offset_bytes : section.offset_bytes + section.nbytes] = _unpack(source, section, *row)

    def restore(self, slab: Tensor, record: Tensor) -> None:
        for section in self.raw.sections:
            payload = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
            record[payload].copy_(slab[payload])


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


def _pack(words: Words) -> tuple[int, int, Bytes]:
    """(kind, escapes, bytes) of one section."""
    exponents = (words >> 7 & 255).astype(np.uint8)
    table = np.argsort(-np.bincount(exponents, minlength=256), kind="stable")[:ESCAPE].astype(np.uint8)
    code_of = np.full(256, ESCAPE, np.uint8)
    code_of[table] = np.arange(ESCAPE)

    filled = np.full(_chunks(words.size) * CHUNK_WEIGHTS, int(table[0]) << 7, np.uint16)
    filled[: words.size] = words
    stored = filled.reshape(-1, 2, 4, 8).swapaxes(1, 2).reshape(-1, CHUNK_WEIGHTS)
    exponents = (stored >> 7 & 255).astype(np.uint8)
    codes = code_of[exponents]
    escapes = exponents[codes == ESCAPE]
    if packed_bytes(words.size, escapes.size) >= words.nbytes:
        return STORED, 0, words.view(np.uint8)

    head = np.zeros(_head_bytes(words.size), np.uint8)
    before = _escapes_before(codes).astype("<u4").view(np.uint8)
    head[:ESCAPE] = table
    head[8 : 8 + before.size] = before
    mantissas = (stored >> 8 & 0x80 | stored & 0x7F).astype(np.uint8)
    bits = np.packbits(codes[:, None, :] >> np.arange(3, dtype=np.uint8)[:, None] & 1, axis=-1, bitorder="little")
    return PACKED, escapes.size, np.concatenate([head, mantissas.reshape(-1), bits.reshape(-1), escapes])


def packed_bytes(weights: int, escapes: int) -> int:
    """Bytes of a packed section."""
    return _head_bytes(weights) + _chunks(weights) * (CHUNK_WEIGHTS + 3 * 8) + escapes


def _chunks(weights: int) -> int:
    return -(-weights // CHUNK_WEIGHTS)


def _head_bytes(weights: int) -> int:
    """Bytes of the table of exponents and the escape counts before each block."""
    return aligned(8 + 4 * -(-_chunks(weights) // BLOCK_CHUNKS))


def _escapes_before(codes: Bytes) -> NDArray[np.int64]:
    """Codes [chunks, 64] -> number of escapes before each block."""
    through = np.cumsum((codes == ESCAPE).sum(axis=1))
    return np.concatenate([[0], through[BLOCK_CHUNKS - 1 : -1 : BLOCK_CHUNKS]]) if len(codes) else through


def _rows(source: Bytes, raw: RecordLayout) -> list[tuple[int, int, int, int]]:
    """(kind, offset_bytes, escapes, content_bytes) of each section."""
    sections = len(raw.sections)
    if source.size < header_bytes(raw):
        check(1)
    header = source[: (1 + sections) * 3 * 8].view("<u8").reshape(-1, 3).tolist()
    magic, content, count = header[0]
    if magic != MAGIC or count != sections:
        check(1)
    if content > source.size:
        check(2)
    return [(*row, content) for row in header[1:]]


def _unpack(source: Bytes, section: Section, kind: int, offset_bytes: int, escapes: int, content: int) -> Bytes:
    """The bytes of one section."""
    if kind == STORED:
        if offset_bytes + section.nbytes > content:
            check(2)
        return source[offset_bytes : offset_bytes + section.nbytes]
    if kind != PACKED or not packable(section):
        check(1)
    weights = section.nbytes // 2
    if offset_bytes + packed_bytes(weights, escapes) + TAIL_BYTES > content:
        check(2)

    head, chunks = _head_bytes(weights), _chunks(weights)
    part = source[offset_bytes : offset_bytes + packed_bytes(weights, escapes)]
    table = np.append(part[:ESCAPE], 0).astype(np.uint16)
    mantissas, bits, escaped = np.split(part[head:], [chunks * CHUNK_WEIGHTS, chunks * (CHUNK_WEIGHTS + 3 * 8)])
    planes = np.unpackbits(bits.reshape(-1, 3, 8), axis=-1, bitorder="little")
    codes = (planes[:, 0] | planes[:, 1] << 1 | planes[:, 2] << 2).astype(np.uint8)
    before = _escapes_before(codes)
    if (codes == ESCAPE).sum() != escapes or (part[8 : 8 + 4 * len(before)].view("<u4") != before).any():
        check(3)

    exponents = table[codes]
    exponents[codes == ESCAPE] = escaped
    rest = mantissas.reshape(-1, CHUNK_WEIGHTS).astype(np.uint16)
    stored = (rest & 0x80) << 8 | exponents << 7 | rest & 0x7F
    words = stored.reshape(-1, 4, 2, 8).swapaxes(1, 2).reshape(-1)[:weights]
    return words.view(np.uint8)
