"""The header of a GGUF file: which tensor lies where and in which type, checked before anything is read.

Format (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian: magic, version, number of tensors and of
metadata entries; the entries; for each tensor name, dimensions (the innermost first), type and offset; then, at the next multiple
of the alignment, the data, tensors one after the other, each padded to the alignment. Large files may be split into numbered
parts with a header each. Offsets in the results of this module are absolute, in bytes from the beginning of the file.
"""

import hashlib
import math
import re
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vismoe.errors import CheckpointError
from vismoe.store.file_state import TICK_S, FileState
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry, opened
from vismoe.types import aligned

GGUF = ".gguf"
AGAIN = "download or copy the file again"
MAX_HEADER_BYTES = 2**28  # vocabularies of published models take up to 20 MB
MOST_DIMENSIONS = 4
MOST_ALIGNMENT_BYTES = 2**20
KEPT_ELEMENTS = 64  # of an array of numbers in the metadata; longer ones are skipped, as all arrays of texts
PIECE_BYTES = 2**20
TYPES = {  # ggml's number of a type -> (name, weights in a block, bytes of a block)
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # types of metadata
TEXT, ARRAY = 8, 9
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufHeader(SafetensorsHeader):
    """The same of a GGUF file: shapes have the outermost dimension first, `dtype` is None for blocks."""

    types: dict[str, str] = field(default_factory=dict)  # of each tensor, by ggml's name
    metadata: dict[str, Any] = field(default_factory=dict)  # numbers, texts and short arrays of numbers


_KNOWN: dict[Path, tuple[FileState, GgufHeader]] = {}  # one load asks three times, and a vocabulary takes 20 ms


def read_gguf_headers(path: str | Path) -> list[GgufHeader]:
    """The headers of a GGUF file, or of all parts of a split one when `path` is any of them; raises CheckpointError."""
    path = Path(path)
    match = PART.fullmatch(path.name)
    if match is None:
        header = read_gguf_header(path)
        count = header.metadata.get("split.count", 0)
        if count not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {count} parts, and its name does not say which. "
                f"Fix: give the parts their own names, such as {path.stem}-00001-of-{count:05}.gguf"
            )
        return [header]
    count = int(match["count"])
    names = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [name for name in names if not name.is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{path} is one of {count} parts, and {len(missing)} of them are missing, first {(missing or [path])[0]}. "
            "Fix: download all parts into one folder"
        )
    headers = [read_gguf_header(name) for name in names]
    for number, header in enumerate(headers):
        said = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
        if said != (number, count):
            raise CheckpointError(
                f"{header.path} says that it is part {said[0]} of {said[1]}, counted from 0; by its name it is part {number} of "
                f"{count}. Fix: {AGAIN}"
            )
    tensors = headers[0].metadata.get("split.tensors.count")
    names_of = [name for header in headers for name in header.tensors]
    if len(set(names_of)) != len(names_of) or tensors not in (None, len(names_of)):
        raise CheckpointError(
            f"{path} and its other parts have {len(set(names_of))} different tensors among {len(names_of)}, the first part says "
            f"{tensors}. Fix: download all parts of one model again"
        )
    return headers


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Parse and check the header of one file; raises CheckpointError with the numbers."""
    path = Path(path)
    with opened(path, "and no other file can take its place. Fix: check the path of the GGUF file") as (file, state):
        known = _KNOWN.get(path)
        if known is not None and known[0] == state:
            return known[1]
        header = _Reader(path, file, state).header()
    if time.time() - state.ctime_ns / 1e9 > TICK_S:  # else the next write could leave this state
        _KNOWN[path] = state, header
    return header


class _Reader:
    """Reads a header from its beginning, piece by piece, and never past its end."""

    def __init__(self, path: Path, file: BinaryIO, state: FileState):
        self.path, self._file, self._state = path, file, state
        self._read, self._at = bytearray(), 0

    def header(self) -> GgufHeader:
        tensor_count, entry_count = self._beginning()
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            name = self._text()
            value = self._value(self._number("I"))
            if value is not None:
                metadata[name] = value
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MOST_ALIGNMENT_BYTES or alignment & (alignment - 1):
            raise self._corrupt(f"its alignment is {alignment!r:.50}, not a power of two up to {MOST_ALIGNMENT_BYTES}")
        infos = [self._tensor() for _ in range(tensor_count)]
        start = position = aligned(self._at, alignment)
        tensors, types = {}, {}
        for name, shape, kind, nbytes, offset in infos:
            if start + offset != position:
                how = "overlaps the one before it" if start + offset < position else "leaves a hole before it"
                raise self._corrupt(f"{name!r} begins at byte {start + offset} instead of {position} and {how}")
            if name in tensors:
                raise self._corrupt(f"it has two tensors {name!r}")
            tensors[name], types[name] = TensorEntry(position, nbytes, shape, DTYPES.get(kind)), kind
            end, position = position + nbytes, aligned(position + nbytes, alignment)
            if end > self._state.file_bytes:
                raise CheckpointError(
                    f"{self.path} is truncated: {name!r} ends at byte {end}, the file has {self._state.file_bytes}. Fix: {AGAIN}"
                )
        sha256 = hashlib.sha256(self._read[: self._at]).hexdigest()
        size, mtime_ns = self._state.file_bytes, self._state.mtime_ns
        return GgufHeader(self.path, size, mtime_ns, tensors, sha256, self._state, types, metadata)

    def _beginning(self) -> tuple[int, int]:
        """(number of tensors, number of metadata entries)."""
        if self._state.file_bytes < 24:
            raise CheckpointError(f"{self.path} has {self._state.file_bytes} bytes, a GGUF file more than 24. Fix: {AGAIN}")
        magic, version = self._bytes(4), self._number("I")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {magic!r}. Fix: check the path, or {AGAIN}")
        if version not in (2, 3):
            what = "in big-endian order" if version & 0xFFFF == 0 else f"of version {version}"
            raise CheckpointError(
                f"{self.path} is a GGUF file {what}; versions 2 and 3 in little-endian order are read. "
                "Fix: download the model in a current version"
            )
        counts = self._number("Q"), self._number("Q")
        for count, least, what in zip(counts, (24, 13), ("tensors", "metadata entries"), strict=True):
            if count * least > self._state.file_bytes:
                raise self._corrupt(f"it says that it has {count} {what}, more than its {self._state.file_bytes} bytes can hold")
        return counts

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        """(name, shape, type, bytes, offset from the beginning of the data)."""
        name, dimensions = self._text(), self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise self._corrupt(f"{name!r} has {dimensions} dimensions, more than {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            raise CheckpointError(
                f"{self.path}: {name!r} has ggml's type {number}, which VisMoE does not know. "
                "Fix: a file with other types, e.g. Q4_K_M or Q8_0, or a newer vismoe"
            )
        kind, block, block_bytes = TYPES[number]
        if shape and shape[-1] % block:
            raise self._corrupt(f"{name!r} ({kind}) has rows of {shape[-1]} weights, not whole blocks of {block}")
        return name, shape, kind, math.prod(shape) // block * block_bytes, offset

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A value of the metadata; None for what is not kept."""
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == TEXT:
            return self._text()
        if kind != ARRAY or depth > 2:
            raise self._corrupt(f"a metadata entry before byte {self._at} has type {kind}")
        element, count = self._number("I"), self._number("Q")
        if element == TEXT:
            return self._skip_texts(count)
        if element not in NUMBERS:
            self._possible(count * 8)
            for _ in range(count):
                self._value(element, depth + 1)
            return None
        letters = NUMBERS[element]
        if count > KEPT_ELEMENTS:
            return self._skip(count * struct.calcsize(letters))
        return list(struct.unpack(f"<{count}{letters}", self._bytes(count * struct.calcsize(letters))))

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode(errors="replace")

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(letter)))[0]

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return bytes(self._read[start : self._at])

    def _skip(self, count: int) -> None:
        self._possible(count)
        self._at += count
        while len(self._read) < self._at:
            piece = self._file.read(PIECE_BYTES)
            if not piece:
                raise CheckpointError(f"{self.path} is truncated: its header ends after {len(self._read)} bytes. Fix: {AGAIN}")
            self._read += piece

    def _skip_texts(self, count: int) -> None:
        """Skip a vocabulary, in a tenth of the time of `_text`."""
        self._possible(count * 8)
        at, read, length_at = self._at, self._read, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(read):
                self._at = at
                self._skip(8)
            at += 8 + length_at(read, at)[0]
        self._at = at
        self._skip(0)

    def _possible(self, count: int) -> None:
        """Refuse to go on for `count` bytes where the file, or any header, is shorter."""
        end, most = self._at + count, min(self._state.file_bytes, MAX_HEADER_BYTES)
        if end > most:
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: its header goes on to byte {end}, and "
                f"{'the file has' if most == self._state.file_bytes else 'a header has at most'} {most}. Fix: {AGAIN}"
            )

    def _corrupt(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {why}. Fix: {AGAIN}")
