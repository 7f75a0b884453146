"""The lossless and the integer formats in numpy and torch: the oracles of the C++ codecs."""

import numpy as np
import torch
from half_quadratic import fit, round_to_nearest
from numpy.typing import NDArray
from torch import Tensor

from vismoe.errors import CheckpointError
from vismoe.formats import affine, lossless
from vismoe.formats.affine import LOAD_BYTES, Grid
from vismoe.formats.lossless import TAIL_BYTES, check, header_bytes, packable
from vismoe.types import BLOCK_BYTES, RecordLayout, Section, aligned

MAGIC = int.from_bytes(b"vismoeL1", "little")
STORED, PACKED = 0, 1
ESCAPE = 7  # the code of a weight whose exponent is not in the table
CHUNK_WEIGHTS = 64
BLOCK_CHUNKS = 64

Words = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


class Affine(affine.Affine):
    def _encode_rows(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [rows, in] -> codes [rows, row_bytes], scale and offset [rows, groups]."""
        if not torch.isfinite(rows).all():
            raise CheckpointError(
                f"{name}: {int((~torch.isfinite(rows)).sum())} weights are infinite or not a number, which {self.format} "
                "cannot hold. Fix: check the checkpoint, or use the raw or lossless format"
            )
        count, inputs = rows.shape
        grid = self.grid
        centred = rows.new_zeros(count, grid.row_inputs(inputs))
        scale, offset = rows.new_empty(2, count, grid.groups(inputs))
        whole = inputs - inputs % grid.group_inputs
        for columns in (slice(0, whole), slice(whole, inputs)):
            if width := columns.stop - columns.start:
                group_inputs = min(width, grid.group_inputs)
                weights = rows[:, columns].reshape(-1, group_inputs)
                found = round_to_nearest(weights, grid.bits) if self.nearest else fit(weights, grid.bits)
                first = columns.start // grid.group_inputs
                groups = slice(first, first + width // group_inputs)
                centred[:, columns], scale[:, groups], offset[:, groups] = (part.view(count, -1) for part in found)
        return _packed(centred, grid), scale.bfloat16(), offset.bfloat16()


class Lossless(lossless.Lossless):
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


def _packed(centred: Tensor, grid: Grid) -> Tensor:
    """Codes minus the middle, [rows, row_inputs] -> bytes uint8 [rows, row_bytes]."""
    if grid.lanes == 1:
        return centred.to(torch.int8).view(torch.uint8)
    lanes = (centred + grid.middle).to(torch.uint8).unflatten(1, (-1, grid.lanes, LOAD_BYTES))
    packed = lanes[:, :, 0].clone()
    for lane in range(1, grid.lanes):
        packed |= lanes[:, :, lane] << (lane * grid.bits)
    return packed.flatten(1)


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
