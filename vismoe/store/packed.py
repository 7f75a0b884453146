"""Reads experts from a packed store: one positioned read for each, straight into the slab where the format has a fixed size, or
where records stay encoded.

Promises: a store that is incomplete, cut off, or packed from another checkpoint is refused when it is opened. The first read of a
record in this process verifies its checksum, and a file that was written to is not read any more. A read returns every byte that
was requested, or raises CheckpointError with the expert, the file and the offset.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vismoe.errors import CheckpointError
from vismoe.kernels.checksum import crc32c
from vismoe.kernels.read import Stretch
from vismoe.pools.advice import block_buffer, buffer_bytes
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import StoreOnDisk, naming_expert
from vismoe.store.file_state import FileState
from vismoe.store.files import OpenFiles, ThreadBuffer
from vismoe.store.gguf_header import GGUF, PART
from vismoe.store.index import Contents, Index, StoredRecord, index_path, read_index, remedy, shard_path
from vismoe.types import ExpertId, ExpertInventory, Format, RecordLayout

STORE_FOLDER = "vismoe-store"  # inside the checkpoint's folder


def store_beside(file: Path) -> Path:
    """The store of a checkpoint, by any of its files. Every GGUF file has its own, `NAME.vismoe-store`: a folder may hold several
    that were made of one model."""
    if file.suffix != GGUF:
        return file.parent / STORE_FOLDER
    part = PART.fullmatch(file.name)
    return file.with_name(f"{part['stem'] if part else file.stem}.{STORE_FOLDER}")


def find_store(file: Path) -> Path | None:
    """The same if a format is completely packed there."""
    folder = store_beside(file)
    return folder if formats_in(folder) else None


def formats_in(folder: Path) -> tuple[Format, ...]:
    """Formats that are completely packed; empty for a folder that is not a store."""
    return tuple(format for format in Format if index_path(folder, format).is_file())


def contents_of(source: CheckpointStore, format: Format, transposed: tuple[frozenset[str], ...]) -> Contents:
    """The contents of a store of this checkpoint in `format`; `transposed` names, per geometry, sections that are [in, out]."""
    inventory = source.inventory
    return Contents(format, source.fingerprint, inventory.layers, inventory.raw_layouts, transposed)


class _Shard(NamedTuple):
    path: Path
    file_bytes: int
    state: FileState | None = None  # the state when the store is opened


class PackedStore(StoreOnDisk):
    """An ExpertStore over the files of one format. `open` also checks that the store belongs to the checkpoint.

    `encoded` gives a store whose reads leave records as they are stored; their layouts are `encoded_layouts`. The files may hold
    more layers than the model has, behind its own: the one that drafts (`--draft mtp`), where it is loaded without.
    """

    def __init__(self, folder: Path, index: Index, contents: Contents | None = None):
        """`contents`: of the model; None: all that is packed."""
        self.contents = contents = contents or index.contents
        self.format, self.fingerprint = contents.format, contents.fingerprint
        own = index.records[: len(contents.experts)]
        self.stored_bytes = sum(index.file_bytes) if len(own) == len(index.records) else sum(record.nbytes for record in own)
        self.inventory = ExpertInventory(contents.layers, tuple(codec.slab for codec in contents.codecs), contents.raw)
        largest_bytes = max(record.nbytes for record in own)
        self.scratch_bytes = 0 if all(codec.fixed_bytes for codec in contents.codecs) else buffer_bytes(largest_bytes)
        self.stretch_bytes = largest_bytes
        self.bounce_bytes = 0  # slabs and records both begin on a block
        self._folder, self._index = folder, index
        self._encoded_from = len(contents.layers)  # the first layer whose records stay encoded: none
        self._verified = np.zeros(len(index.records), dtype=bool)
        self._scratch = ThreadBuffer(partial(block_buffer, largest_bytes))  # for encoded records
        self._shards = [_Shard(shard_path(folder, self.format, file), size) for file, size in enumerate(index.file_bytes)]
        super().__init__(self._shards, self._remedy)
        for shard in self._shards:
            if (size := os.stat(shard.path).st_size) != shard.file_bytes:
                raise CheckpointError(f"{shard.path} has {size} bytes, its index says {shard.file_bytes}. Fix: {self._remedy}")

    @classmethod
    def open(cls, folder: Path, source: CheckpointStore, format: Format, transposed: tuple[frozenset[str], ...]) -> "PackedStore":
        """The store in `folder` that was packed from `source`. Raises CheckpointError for a damaged store or one of another
        checkpoint."""
        index, wanted = read_index(folder, format), contents_of(source, format, transposed)
        refuse_other(folder, index.contents, wanted)
        return cls(folder, index, wanted)

    def encoded(self, first: int = 0, inventory: ExpertInventory | None = None) -> "PackedStore":
        """The same store and the same open files, but reads leave the records of MoE layers from `first` on encoded. Closing one
        closes both. inventory: of the slabs or records that are filled so, where their geometries are others."""
        other = copy.copy(self)
        other._encoded_from, other.scratch_bytes = first, self.scratch_bytes if first else 0
        other.inventory = inventory or self.inventory
        return other

    @property
    def encoded_layouts(self) -> tuple[RecordLayout, ...]:
        """Per geometry, of its largest encoded record."""
        largest = [0] * len(self.contents.codecs)
        for expert in self.contents.experts:
            geometry = self.contents.layers[expert.layer].geometry
            largest[geometry] = max(largest[geometry], self._index.records[self._index.position(expert)].nbytes)
        return tuple(RecordLayout((), nbytes) for nbytes in largest)

    @property
    def _remedy(self) -> str:
        return remedy(self._folder, self.format)

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU, 64-byte aligned) with a slab's content, or with the encoded record and
        whatever was behind it; return the bytes read from disk.

        If `record` begins on a block and is whole blocks long, the read goes straight into it, also past the page cache.
        """
        codec = self.contents.codec(expert.layer)
        stored, files = self._index.records[self._index.position(expert)], self._files.hold()
        encoded = expert.layer >= self._encoded_from
        least_bytes = stored.nbytes if encoded else codec.slab.record_bytes
        assert record.dtype is torch.uint8 and record.is_contiguous() and record.numel() >= least_bytes, record.shape
        try:
            if encoded or codec.fixed_bytes is not None:
                self._fetch(files, expert, stored, record.numpy()[: stored.nbytes])
                codec.check_header(record[: stored.nbytes])
            else:
                scratch = self._scratch.memory[: stored.nbytes]
                self._fetch(files, expert, stored, scratch)
                codec.decode(torch.from_numpy(scratch), record)
        except CheckpointError as error:
            raise naming_expert(expert, error) from error
        return stored.nbytes

    def check(self, expert: ExpertId) -> int:
        """Read a record and compare its checksum; return its bytes. Raises as `read` does."""
        position = self._index.position(expert)
        stored = self._index.records[position]
        self._verified[position] = False
        try:
            self._fetch(self._files.hold(), expert, stored, self._scratch.memory[: stored.nbytes])
        except CheckpointError as error:
            raise naming_expert(expert, error) from error
        return stored.nbytes

    def _stretches(self, expert: ExpertId) -> Sequence[Stretch]:
        if expert.layer < self._encoded_from and self.contents.codec(expert.layer).fixed_bytes is None:
            return ()  # it is decoded
        stored = self._index.records[self._index.position(expert)]
        return [Stretch(stored.file, stored.offset_bytes, [(0, stored.nbytes)])]

    @property
    def _derived_as(self) -> int:
        return self._encoded_from

    def _may_skip(self, expert: ExpertId) -> bool:
        return bool(self._verified[self._index.position(expert)])

    def _fetch(self, files: OpenFiles, expert: ExpertId, stored: StoredRecord, into: np.ndarray) -> None:
        files.fill(stored.file, stored.offset_bytes, into)
        position = self._index.position(expert)
        if self._verified[position]:
            return
        found = crc32c(into)
        if found != stored.checksum:
            raise CheckpointError(
                f"{self._shards[stored.file].path}: the {stored.nbytes} bytes at offset {stored.offset_bytes} are not what was "
                f"packed: their checksum is {found:08x}, the index says {stored.checksum:08x}. Fix: {self._remedy}; "
                f"vismoe pack --verify {self._folder} checks every record"
            )
        self._verified[position] = True


def refuse_other(folder: Path, found: Contents, wanted: Contents) -> None:
    """Raises CheckpointError unless `found` begins as `wanted`, what packing this checkpoint as it is loaded would give."""
    path = index_path(folder, found.format)
    if found.fingerprint != wanted.fingerprint:
        raise CheckpointError(
            f"{path} was packed from another checkpoint, or from this one before its files changed. "
            f"Fix: {remedy(folder, found.format)}; or name the store of this checkpoint (--store)"
        )
    if _beginning(found, wanted) == wanted:
        return
    if _beginning(wanted, found) == found:
        raise CheckpointError(
            f"{path} was packed without the experts of {wanted.layers[len(found.layers)].path}. "
            f"Fix: {remedy(folder, found.format)}"
        )
    if (packed := _types(found)) != (loaded := _types(wanted)):
        raise CheckpointError(
            f"{path} holds experts of {packed}, and the model is loaded as {loaded}. "
            "Fix: load the model without dtype= (--dtype), or read the checkpoint in place (--store none)"
        )
    raise CheckpointError(
        f"{path} names or lays out the experts of this checkpoint differently: another version of vismoe or transformers packed "
        f"it, or it was packed from a GGUF file with another MODEL. Fix: {remedy(folder, found.format)}"
    )


def _beginning(of: Contents, as_long_as: Contents) -> Contents:
    """The first layers, and the geometries that they have."""
    layers, geometries = len(as_long_as.layers), len(as_long_as.raw)
    return replace(of, layers=of.layers[:layers], raw=of.raw[:geometries], transposed=of.transposed[:geometries])


def _types(contents: Contents) -> str:
    types = {str(section.dtype).removeprefix("torch.") for raw in contents.raw for section in raw.sections}
    return ", ".join(sorted(types))
