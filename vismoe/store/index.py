"""The index of a packed store: one file per format, written last, so that a format without an index does not exist.

Files of a format in a store: `experts.FORMAT.json` (this index) and `experts.FORMAT.00001.bin`, ... (records one after another,
each on a multiple of BLOCK_BYTES). While a format is being packed, its files have other names (`unfinished.py`). docs/formats.md
describes every field. Promises: an index that `read_index` returns is whole (it has its own checksum), has this schema, and
agrees with the codecs of this version.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.codec import Codec
from vismoe.kernels.checksum import crc32c
from vismoe.kernels.codecs import codec_of
from vismoe.store.whole import write_whole
from vismoe.types import BLOCK_BYTES, ExpertId, Format, MoELayer, RecordLayout, Section

SCHEMA = 1  # raise this whenever the meaning of the bytes of an index or record changes
CHECKSUM = "crc32c"
# Errors that values of wrong types and sizes cause where they are looked up, counted and laid out.
IMPOSSIBLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError, ConfigError)


def index_path(folder: Path, format: Format) -> Path:
    return folder / f"experts.{format}.json"


def shard_path(folder: Path, format: Format, file: int) -> Path:
    """The path of shard `file`, which counts from 0; the names count from 1."""
    return folder / f"experts.{format}.{file + 1:05}.bin"


def files_of(folder: Path, format: Format) -> list[Path]:
    """All files of one format, finished or not."""
    return sorted(folder.glob(f"experts.{format}.*"))


def remedy(folder: Path, format: Format) -> str:
    """Advice on how to restore a damaged format."""
    return f"delete {folder / f'experts.{format}.*'} and run {command(folder, format)}"


def command(folder: Path, format: Format) -> str:
    """The command that packs one format into this folder."""
    return f"vismoe pack MODEL --formats {format} --out {shlex.quote(str(folder))}"


class StoredRecord(NamedTuple):
    """Where one expert's record lies, and its checksum."""

    file: int
    offset_bytes: int
    nbytes: int  # whole blocks
    checksum: int  # crc32c of these bytes


@dataclass(frozen=True)
class Contents:
    """What a store holds in one format, apart from the records."""

    format: Format
    fingerprint: str  # of the checkpoint
    layers: tuple[MoELayer, ...]
    raw: tuple[RecordLayout, ...]  # per geometry: the model's own type and orientation
    transposed: tuple[frozenset[str], ...]  # per geometry: sections that the model keeps as [in, out]

    @cached_property
    def codecs(self) -> tuple[Codec, ...]:
        """One per geometry. Raises ConfigError where the format cannot hold a type."""
        return tuple(codec_of(self.format, raw, names) for raw, names in zip(self.raw, self.transposed, strict=True))

    @cached_property
    def experts(self) -> tuple[ExpertId, ...]:
        """All experts, in the order of their records."""
        return tuple(ExpertId(layer.index, expert) for layer in self.layers for expert in range(layer.num_experts))

    def codec(self, layer: int) -> Codec:
        return self.codecs[self.layers[layer].geometry]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "format": str(self.format),
            "fingerprint": self.fingerprint,
            "geometries": [
                {
                    "record_bytes": codec.fixed_bytes,
                    "raw": layout_to_json(raw),
                    "slab": layout_to_json(codec.slab),
                    "transposed": sorted(names),
                }
                for raw, codec, names in zip(self.raw, self.codecs, self.transposed, strict=True)
            ],
            "layers": [
                {"path": layer.path, "num_experts": layer.num_experts, "top_k": layer.top_k, "geometry": layer.geometry}
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Contents":
        """Raises KeyError, TypeError or ValueError for JSON that `to_json` did not write, or wrote with another version's
        codecs."""
        geometries = value["geometries"]
        if not all(type(layer["geometry"]) is int and 0 <= layer["geometry"] < len(geometries) for layer in value["layers"]):
            raise ValueError("a layer names a geometry that the index does not have")
        contents = cls(
            Format(value["format"]),
            str(value["fingerprint"]),
            tuple(MoELayer(index, **layer) for index, layer in enumerate(value["layers"])),
            tuple(layout_from_json(geometry["raw"]) for geometry in geometries),
            tuple(frozenset(geometry["transposed"]) for geometry in geometries),
        )
        if _text(contents.to_json()) != _text(value):  # compared as text, because 1, 1.0 and true compare equal in Python
            raise ValueError("its record layouts are not those of this version")
        return contents


@dataclass(frozen=True)
class Index:
    """A complete format: its contents, and the place of each record."""

    contents: Contents
    records: tuple[StoredRecord, ...]  # one for each of `contents.experts`

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each file: a file ends with its last record."""
        ends: dict[int, int] = {}
        for record in self.records:
            ends[record.file] = max(ends.get(record.file, 0), record.offset_bytes + record.nbytes)
        return tuple(ends[file] for file in range(len(ends)))

    @cached_property
    def _first(self) -> tuple[int, ...]:
        return (0, *accumulate(layer.num_experts for layer in self.contents.layers))

    def position(self, expert: ExpertId) -> int:
        """The index in `records` of an expert's record."""
        return self._first[expert.layer] + expert.expert

    def to_json(self) -> dict[str, Any]:
        return {
            **self.contents.to_json(),
            "files": list(self.file_bytes),
            "records": [list(record) for record in self.records],
        }


def checksum_of(value: dict[str, Any]) -> int:
    """The checksum of a JSON object, independent of its whitespace."""
    return crc32c(_text(value).encode())


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def write_index(folder: Path, index: Index) -> None:
    """Write the index durably, in one step; after that the format exists."""
    value = index.to_json()
    content = json.dumps({**value, CHECKSUM: checksum_of(value)})
    write_whole(index_path(folder, index.contents.format), content.encode())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(folder: Path, format: Format) -> Index:
    """Raises CheckpointError for an index that is missing, damaged, or of another schema."""
    path = index_path(folder, format)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {path.name}. Fix: {command(folder, format)}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Fix: check that it is a readable file") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: {error}. Fix: {remedy(folder, format)}") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        raise CheckpointError(
            f"{path} has schema {schema!r}, and this version of vismoe reads {SCHEMA}: it is {'newer' if newer else 'older'}. "
            f"Fix: {'a newer vismoe, or ' if newer else ''}{remedy(folder, format)}"
        )
    try:
        return _index(value, format)
    except IMPOSSIBLE as error:
        raise CheckpointError(f"{path} is corrupt: {type(error).__name__}: {error}. Fix: {remedy(folder, format)}") from error


def _index(value: dict[str, Any], format: Format) -> Index:
    if value.pop(CHECKSUM) != checksum_of(value):
        raise ValueError("its checksum is wrong")
    records = tuple(StoredRecord(*record) for record in value.pop("records"))
    if not records or not all(type(number) is int and number >= 0 for record in records for number in record):
        raise ValueError("its records have impossible offsets or sizes")
    if sum(layer["num_experts"] for layer in value["layers"]) != len(records):
        raise ValueError(f"it has {len(records)} records, but its layers have another number of experts")
    file_bytes = value.pop("files")
    index = Index(Contents.from_json(value), records)
    whole = plausible(index.contents, records) == len(records) == len(index.contents.experts)
    if not whole or list(index.file_bytes) != file_bytes or index.contents.format is not format:
        raise ValueError("its fields contradict each other")
    return index


def plausible(contents: Contents, records: Sequence[StoredRecord]) -> int:
    """The number of leading records that have a possible size and begin right after the one before, or begin the next file."""
    previous = StoredRecord(0, 0, 0, 0)
    for count, (expert, record) in enumerate(zip(contents.experts, records)):
        codec = contents.codec(expert.layer)
        sized = 0 < record.nbytes <= codec.most_bytes and codec.fixed_bytes in (None, record.nbytes)
        follows = record[:2] in ((previous.file, previous.offset_bytes + previous.nbytes), (previous.file + 1, 0))
        if not sized or not follows or record.nbytes % BLOCK_BYTES:
            return count
        previous = record
    return min(len(records), len(contents.experts))


def layout_to_json(layout: RecordLayout) -> dict[str, Any]:
    sections = [
        {
            "name": section.name,
            "offset_bytes": section.offset_bytes,
            "shape": list(section.shape),
            "dtype": str(section.dtype).removeprefix("torch."),
        }
        for section in layout.sections
    ]
    return {"record_bytes": layout.record_bytes, "sections": sections}


def layout_from_json(value: dict[str, Any]) -> RecordLayout:
    sections = tuple(
        Section(section["name"], section["offset_bytes"], tuple(section["shape"]), getattr(torch, section["dtype"]))
        for section in value["sections"]
    )
    return RecordLayout(sections, value["record_bytes"])
