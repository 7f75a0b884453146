"""Linear layers beside the experts in int8: one file in a store, written by `vismoe pack --backbone int8`.

It is a safetensors file with `NAME.codes`, `NAME.scale` and `NAME.offset` for each weight (formats/affine.py). Promises: memory
for some rows of one layer; a file that exists is whole; it belongs to one checkpoint, by fingerprint; every weight has a
checksum, which is compared when it is read.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from vismoe.config import format_bytes
from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.affine import GRIDS, AffineMatrix
from vismoe.kernels.checksum import crc32c
from vismoe.kernels.codecs import codec_of
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.files import OpenFiles
from vismoe.store.index import sync_folder
from vismoe.store.pack import SPARE_DISK_BYTES, alone, naming_changes, refuse_foreign_folder
from vismoe.store.safetensors_header import SafetensorsHeader, read_header
from vismoe.store.tensor_reads import read_encoded, read_part
from vismoe.store.tensors import EncodedTensor, TensorPart
from vismoe.types import Format, RecordLayout

FILE = "linears.int8.safetensors"
SCHEMA = "1"  # raise this whenever the meaning of the bytes changes
PIECE_WEIGHTS = 2**22  # encoded at once
PARTS = {"codes": torch.uint8, "scale": torch.bfloat16, "offset": torch.bfloat16}
NONE = "0" * 8  # in place of a checksum that is not known yet


def remedy(folder: Path) -> str:
    """Advice on how to restore a damaged file."""
    return f"delete {folder / FILE} and run vismoe pack MODEL --backbone int8 --out {shlex.quote(str(folder))}"


@dataclass(frozen=True)
class PackedLinears:
    """The open description of such a file; its weights are not read yet."""

    header: SafetensorsHeader
    tensors: dict[str, EncodedTensor]  # by the weight's name in the model
    checksums: dict[str, str]

    @classmethod
    def open(cls, folder: Path, source: CheckpointStore | None) -> "PackedLinears":
        """Raises ConfigError where there is none, CheckpointError for a damaged one or one that does not belong to `source`."""
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(
                f"backbone='int8': {folder} has no {FILE}. Fix: vismoe pack MODEL --backbone int8, the folder that has one "
                "(--store FOLDER), or backbone='own' (--backbone own)"
            )
        about = _about(path)
        try:
            header = read_header(path)
        except CheckpointError as error:
            raise CheckpointError(f"{str(error).partition(' Fix:')[0]} Fix: {remedy(folder)}") from error
        if source is not None and about["fingerprint"] != source.fingerprint:
            raise CheckpointError(
                f"{path} belongs to another checkpoint, or to this one before its files changed. Fix: {remedy(folder)}"
            )
        checksums = json.loads(about["crc32c"])
        return cls(header, {name: _tensor(path, name, header) for name in checksums}, checksums)

    @property
    def stored_bytes(self) -> int:
        return self.header.file_bytes

    def reader(self) -> Callable[[str], dict[str, Tensor]]:
        """What reads the parts of a weight, by name. Raises CheckpointError for one that is not as it was packed."""
        files = OpenFiles([self.header], os.O_RDONLY, again=remedy(self.header.path.parent))

        def parts_of(name: str) -> dict[str, Tensor]:
            parts = read_encoded(files, self.tensors[name])
            if _joined([crc32c(part) for part in parts.values()]) != self.checksums[name]:
                path = self.header.path
                raise CheckpointError(f"{path}: {name} is not as it was packed (checksum). Fix: {remedy(path.parent)}")
            return parts

        return parts_of


def pack_linears(
    source: CheckpointStore,
    folder: Path,
    linears: Mapping[str, TensorPart],
    on_bytes: Callable[[int], object] = lambda nbytes: None,
) -> tuple[PackedLinears, bool]:
    """(the file that holds these weights of `source`, by name, in int8; whether it was there already).

    `on_bytes` receives the bytes that are done, in the checkpoint's type. Raises CheckpointError for a checkpoint that cannot be
    read or changes meanwhile, and for a folder of another one; ConfigError for a full disk or a folder that cannot be written.
    """
    if not linears:
        raise ConfigError(
            f"{source.paths[0].parent} has no linear layers in 16 or 32 bits that int8 would make smaller. "
            "Fix: leave out --backbone"
        )
    with alone(folder):
        refuse_foreign_folder(folder, source.fingerprint)
        if (folder / FILE).exists():
            there = PackedLinears.open(folder, source)
            if set(there.tensors) != set(linears):
                raise CheckpointError(f"{folder / FILE} was packed by another version of vismoe. Fix: {remedy(folder)}")
            return there, True
        partial = folder / f"{FILE}.partial"
        try:
            with naming_changes(source, remedy(folder)):
                _write(source, partial, linears, on_bytes)
            partial.replace(folder / FILE)
            sync_folder(folder)
        finally:
            partial.unlink(missing_ok=True)
        return PackedLinears.open(folder, source), False


def _write(source: CheckpointStore, path: Path, linears: Mapping[str, TensorPart], on_bytes: Callable[[int], object]) -> None:
    entries, end = dict[str, Any](), 0
    for name, part in linears.items():
        rows, inputs = part.shape
        groups = GRIDS[Format.INT8].groups(inputs)
        for kind, columns in zip(PARTS, (GRIDS[Format.INT8].row_bytes(inputs), groups, groups)):
            nbytes = rows * columns * PARTS[kind].itemsize
            dtype = "U8" if kind == "codes" else "BF16"
            entries[f"{name}.{kind}"] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [end, end + nbytes]}
            end += nbytes
    free = psutil.disk_usage(str(path.parent)).free
    if free < end + SPARE_DISK_BYTES:
        raise ConfigError(
            f"{path.parent} has {format_bytes(free)} of free disk; the layers in int8 need {format_bytes(end)}, and "
            f"{format_bytes(SPARE_DISK_BYTES)} stay free. Fix: another disk (--out), or free space"
        )
    checksums = dict.fromkeys(linears, NONE)
    about = {"schema": SCHEMA, "fingerprint": source.fingerprint, "crc32c": json.dumps(checksums)}
    begin, done_bytes, files = len(_header(entries, about)), 0, source.hold()
    with path.open("wb") as file:
        for name, part in linears.items():
            sums = dict.fromkeys(PARTS, 0)
            at = {kind: begin + entries[f"{name}.{kind}"]["data_offsets"][0] for kind in PARTS}
            for piece in _pieces(part):
                for kind, values in _encoded(name, read_part(files, piece)).items():
                    sums[kind] = crc32c(values, sums[kind])
                    file.seek(at[kind])
                    at[kind] += file.write(values.view(torch.uint8).numpy().tobytes())
                on_bytes(done_bytes := done_bytes + piece.nbytes)
            checksums[name] = _joined(sums.values())
        about["crc32c"] = json.dumps(checksums)
        file.seek(0)
        file.write(_header(entries, about))
        file.flush()
        os.fsync(file.fileno())


def _pieces(part: TensorPart) -> list[TensorPart]:
    """The rows of a matrix, some at a time."""
    rows, inputs = part.shape
    row_bytes, each = inputs * part.dtype.itemsize, max(1, PIECE_WEIGHTS // max(1, inputs))
    return [
        part._replace(offset_bytes=part.offset_bytes + first * row_bytes, shape=(min(each, rows - first), inputs))
        for first in range(0, rows, each)
    ]


def _encoded(name: str, rows: Tensor) -> dict[str, Tensor]:
    """The parts of these rows. Raises CheckpointError for weights that are not finite."""
    raw = RecordLayout.of({name: tuple(rows.shape)}, {name: rows.dtype})
    record = torch.zeros(raw.record_bytes, dtype=torch.uint8)
    raw.views(record)[name].copy_(rows)
    codec = codec_of(Format.INT8, raw, frozenset())
    stored = codec.slab.views(codec.encode(record))
    return {kind: stored[f"{name}.{kind}"] for kind in PARTS}


def _header(entries: dict[str, Any], about: dict[str, str]) -> bytes:
    """The beginning of the file, its own checksum included; as long for any checksums."""
    text = json.dumps({"__metadata__": {**about, "check": NONE}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    text = text.replace(f'"check": "{NONE}"'.encode(), f'"check": "{crc32c(text):08x}"'.encode(), 1)
    return len(text).to_bytes(8, "little") + text


def _about(path: Path) -> dict[str, str]:
    """What the header says about the file. Raises CheckpointError for one that was not written here, or is damaged."""
    try:
        with path.open("rb") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
        about: dict[str, str] = json.loads(text)["__metadata__"]
        whole = text.replace(f'"check": "{about["check"]}"'.encode(), f'"check": "{NONE}"'.encode(), 1)
        if about["schema"] != SCHEMA or f"{crc32c(whole):08x}" != about["check"]:
            raise ValueError(f"its schema is {about['schema']}, or its header is damaged")
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}. Fix: {remedy(path.parent)}") from error
    return about


def _tensor(path: Path, name: str, header: SafetensorsHeader) -> EncodedTensor:
    places = {kind: header.tensors[f"{name}.{kind}"] for kind in PARTS}
    parts = {kind: TensorPart(0, place.offset_bytes, place.shape, PARTS[kind]) for kind, place in places.items()}
    return EncodedTensor(AffineMatrix(str(Format.INT8)), parts["codes"].shape, parts)


def _joined(sums: Iterable[int]) -> str:
    """One checksum of those of the parts."""
    return f"{crc32c(repr(list(sums)).encode()):08x}"
