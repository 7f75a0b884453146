"""The header of a safetensors file: which tensor lies where, checked against the size of the file before anything is read.

Format (github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian header length N, N bytes of JSON `{name:
{"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, which the tensors cover completely, without holes. Offsets in
the results of this module are absolute, in bytes from the beginning of the file.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from vismoe.errors import CheckpointError
from vismoe.store.file_state import FileState

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # a checkpoint may contain them; VisMoE does not read them
AGAIN = "download or copy the file again (for example `hf download MODEL FILE --force-download`)"


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    offset_bytes: int  # absolute
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: a sub-byte type


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a file, with its size and times at that moment."""

    path: Path
    file_bytes: int
    mtime_ns: int
    tensors: dict[str, TensorEntry]
    sha256: str  # of the header
    state: FileState | None = None  # of the whole file; None: not known


def read_header(path: str | Path) -> SafetensorsHeader:
    """Parse and check the header of one file; raises CheckpointError with expected and actual sizes."""
    path = Path(path)
    with opened(path, f"but the checkpoint needs it. Fix: {AGAIN}") as (file, state):
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or state.file_bytes < 8 + length or length > MAX_HEADER_BYTES:
            raise CheckpointError(_too_short(path, state.file_bytes, length))
        text = file.read(length)
    tensors = _parse(path, text)
    _check_cover(path, tensors, 8 + length, state.file_bytes)
    return SafetensorsHeader(path, state.file_bytes, state.mtime_ns, tensors, hashlib.sha256(text).hexdigest(), state)


@contextlib.contextmanager
def opened(path: Path, missing: str) -> Iterator[tuple[BinaryIO, FileState]]:
    """The file, to read its header, and what it is now. Raises CheckpointError; `missing` says what to do without the file."""
    try:
        with open(path, "rb") as file:
            yield file, FileState.of(os.fstat(file.fileno()))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, {missing}") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Fix: check that it is a readable file"
        ) from error


def refuse_changed(headers: Iterable[SafetensorsHeader], doing: str, fix: str) -> None:
    """Raises CheckpointError if a file changed after its header was read; `doing` is the activity that the message names."""
    for header in headers:
        try:
            now = FileState.of(os.stat(header.path))
        except OSError as error:
            why = f"{header.path} disappeared while it was being {doing}: {error.strerror}"
            raise CheckpointError(f"{why}. Fix: {AGAIN}, then {fix}") from error
        if header.state is not None and now != header.state:
            raise CheckpointError(f"{header.path} changed while it was being {doing}. Fix: {fix}")


def _too_short(path: Path, file_bytes: int, header_bytes: int) -> str:
    if file_bytes < 8:
        return f"{path} has {file_bytes} bytes; a safetensors file begins with 8 bytes of header length. Fix: {AGAIN}"
    if header_bytes > MAX_HEADER_BYTES:
        return (
            f"{path} is not a safetensors file or is corrupt: its first 8 bytes give a header of {header_bytes} bytes, "
            f"more than the format's {MAX_HEADER_BYTES}. Fix: {AGAIN}"
        )
    return f"{path} is truncated: its header alone needs {8 + header_bytes} bytes, the file has {file_bytes}. Fix: {AGAIN}"


def _parse(path: Path, text: bytes) -> dict[str, TensorEntry]:
    """Entries by name, offsets absolute."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: its header is not JSON ({error}). Fix: {AGAIN}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is corrupt: its header is a JSON {type(raw).__name__}, not an object. Fix: {AGAIN}")
    raw.pop("__metadata__", None)
    return {name: _entry(path, name, value, 8 + len(text)) for name, value in raw.items()}


def _entry(path: Path, name: str, value: Any, data_start_bytes: int) -> TensorEntry:
    """One checked entry: known dtype, plausible shape, offsets that agree with both."""
    try:
        dtype_name, shape, (begin, end) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt: the header entry of {name!r} is {value!r:.200}. Fix: {AGAIN}") from error
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{path} is corrupt: {name!r} has shape {shape} and offsets {[begin, end]}. Fix: {AGAIN}")
    dtype = DTYPES.get(dtype_name)
    if dtype is None and dtype_name not in SUB_BYTE_BITS:
        raise CheckpointError(
            f"{path}: {name!r} has the type {dtype_name!r}, which VisMoE does not know. Fix: use a checkpoint in BF16, F16 or F32"
        )
    bits = dtype.itemsize * 8 if dtype is not None else SUB_BYTE_BITS[dtype_name]
    nbytes = -(-math.prod(shape) * bits // 8)
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path} is corrupt: {name!r} ({dtype_name}, shape {shape}) needs {nbytes} bytes, "
            f"its offsets {[begin, end]} span {end - begin}. Fix: {AGAIN}"
        )
    return TensorEntry(data_start_bytes + begin, nbytes, shape, dtype)


def _check_cover(path: Path, tensors: dict[str, TensorEntry], data_start_bytes: int, file_bytes: int) -> None:
    """The tensors cover the data exactly: no overlap, no hole, nothing missing at the end."""
    position, previous = data_start_bytes, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].nbytes)):
        if entry.offset_bytes != position:
            kind = "overlaps" if entry.offset_bytes < position else "leaves a hole after"
            raise CheckpointError(
                f"{path} is corrupt: {name!r} begins at byte {entry.offset_bytes} and {kind} {previous!r}, "
                f"which ends at {position}. Fix: {AGAIN}"
            )
        position, previous = entry.offset_bytes + entry.nbytes, name
    if position != file_bytes:
        state = "truncated" if file_bytes < position else "corrupt (longer than its tensors)"
        raise CheckpointError(f"{path} is {state}: expected {position} bytes by its header, found {file_bytes}. Fix: {AGAIN}")
