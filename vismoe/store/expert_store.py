"""What every store promises: it reads any one expert into a record, without touching another expert's bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from vismoe.errors import CheckpointError
from vismoe.kernels.read import Arrival, OnDisk, Stretch
from vismoe.store.file_state import FileState
from vismoe.store.files import CheckpointFiles, FileOnDisk, OpenFiles
from vismoe.store.safetensors_header import AGAIN
from vismoe.types import BLOCK_BYTES, ExpertId, ExpertInventory

LARGEST_NUMBER_BYTES = 8  # a record begins on a multiple of it, so that kernels can read its numbers
LEAST_ROOMY_BYTES = 2**20  # of an expert that gets room in its slab, to be read without a copy
Lies = tuple[tuple[FileState, int, int, int], ...]  # (a file in one state, offset there, offset in a record, bytes), by the last


def lies(stretches: Sequence[Stretch], states: Sequence[FileState]) -> Lies:
    """Which bytes of which files fill a record at address 0. Equal ones are the same bytes at the same places."""
    pieces = list[tuple[int, int, int, int]]()  # (begin in the record, file, offset, bytes)
    for stretch in stretches:
        at = stretch.offset_bytes
        for begin, nbytes in stretch.pieces:
            pieces.append((begin, stretch.file, at, nbytes))
            at += nbytes
    found = list[tuple[FileState, int, int, int]]()
    for begin, file, at, nbytes in sorted(pieces):
        state, offset, before, held = found[-1] if found else (None, 0, 0, 0)
        if state == states[file] and (at, begin) == (offset + held, before + held):
            found.pop()
            at, begin, nbytes = offset, before, held + nbytes
        found.append((states[file], at, begin, nbytes))
    return tuple(found)


def begin_in_block(stretches: Sequence[Stretch]) -> int:
    """At which byte of a block of its slab a record, which these fill from address 0 on, should begin: as far behind a block of
    the disk as most of it lies in its file."""
    largest = max(stretches, key=lambda one: one.nbytes, default=None)
    begin = 0 if largest is None else (largest.offset_bytes - largest.pieces[0][0]) % BLOCK_BYTES
    return 0 if begin % LARGEST_NUMBER_BYTES else begin


def room_for(begins: Iterable[int], boundary: int) -> int:
    """Bytes of a slab beside a record, so that a disk that needs this boundary writes there what is read past the page cache, and
    does so from the start of a page on, which is faster for virtual disks (docs/benchmark.md); 0: records begin there anyway, or
    have to be copied. begins: where each record should begin in a block."""
    return BLOCK_BYTES if 0 < boundary <= BLOCK_BYTES and any(begins) else 0


def naming_expert(expert: ExpertId, error: CheckpointError) -> CheckpointError:
    """The same error, with a message that begins with the expert that was being read."""
    return type(error)(f"expert {expert.expert} of MoE layer {expert.layer}: {error}")


class ExpertStore(Protocol):
    """Reads the records of experts. Reading is thread-safe, and a read that is running when the store is closed still succeeds.

    If a file changes after it was opened, every read of it is an error until the store is opened again.
    """

    @property
    def inventory(self) -> ExpertInventory:
        """The experts of this store; record layouts are those of slabs."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the state of the checkpoint's files when the store was opened; equal for equal files."""

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU memory, 64-byte aligned or as `begins` says) with one expert; return bytes
        read from disk.

        Gaps between sections have undefined content afterwards. Raises CheckpointError, which names the expert, or ClosedError.
        """
        ...

    def reading(self, expert: ExpertId, address: int) -> "NativeRead | None":
        """How a native thread reads an expert into the record at this address; None: by `read` only. Raises ClosedError."""

    def begins(self, expert: ExpertId) -> int:
        """At which byte of a slab with room the expert's record should begin, so that a disk can write most of it there."""

    def close(self) -> None:
        """Release the files; reading afterwards raises ClosedError."""
        ...


@dataclass(frozen=True)
class NativeRead:
    """One expert on its way into a record, by a native thread; `on_disk` must stay until it is there."""

    expert: ExpertId
    on_disk: OnDisk
    files: OpenFiles
    stretches: Sequence[Stretch]
    arrival: Arrival

    @property
    def nbytes(self) -> int:
        return sum(stretch.nbytes for stretch in self.stretches)

    def error(self) -> CheckpointError | None:
        """What ended it early; None: it is there."""
        if not self.arrival.ended:
            return None
        failed = self.stretches[self.arrival.failed]
        error = self.files.error_of(self.arrival.ended, failed.file, failed.offset_bytes, failed.nbytes)
        return naming_expert(self.expert, error)


class StoreOnDisk:
    """What stores over files share; each of them is an ExpertStore."""

    inventory: ExpertInventory
    fingerprint: str
    scratch_bytes: int  # of the bounce buffer that one reading thread needs; 0 if every read goes straight into the record
    bounce_bytes: int  # that one reading thread needs beside these to read past the page cache
    stretch_bytes: int  # of the largest read
    stored_bytes: int  # of all experts on disk

    def __init__(self, files: Sequence[FileOnDisk], again: str = AGAIN):
        """`again`: advice on how to restore a damaged file."""
        self._files = CheckpointFiles(files, again)
        self._begins: dict[ExpertId, int] = {}

    @property
    def paths(self) -> list[Path]:
        """The files that hold the records."""
        return [file.path for file in self._files.files]

    @property
    def states(self) -> tuple[FileState, ...]:
        """Of the files when they were opened. Stores with equal ones have the same records."""
        return self._files.states

    def hold(self) -> OpenFiles:
        """The open files, to read other tensors from. Raises ClosedError."""
        return self._files.hold()

    def for_loading(self, past_cache: bool, threads: int) -> OpenFiles:
        """As `CheckpointFiles.for_loading`."""
        return self._files.for_loading(past_cache, threads)

    def read_past_cache(self, only_cold: bool = False) -> str | None:
        """Read with O_DIRECT from now on, `only_cold`: what the page cache lacks, the first time; returns the reason if this
        filesystem cannot. Reads in progress end as they began."""
        return self._files.read_past_cache(self.stretch_bytes, only_cold)

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """As ExpertStore.read."""
        raise NotImplementedError

    def begins(self, expert: ExpertId) -> int:
        """As ExpertStore.begins."""
        return self._begin(expert) if self._files.hold().past_cache else 0

    def room_bytes(self) -> int:
        """As `room_for`, of slabs of these experts."""
        every = (ExpertId(layer.index, expert) for layer in self.inventory.layers for expert in range(layer.num_experts))
        return room_for((self._begin(expert) for expert in every), self._files.hold().memory_bytes)

    def _begin(self, expert: ExpertId) -> int:
        if expert not in self._begins:
            self._begins[expert] = begin_in_block(self._stretches(expert))
        return self._begins[expert]

    def lies(self, expert: ExpertId) -> Lies:
        """Which bytes of the files fill the expert's record; none where more is to be done than reading."""
        return lies(self._stretches(expert), self.states) if self._may_skip(expert) else ()

    def reading(self, expert: ExpertId, address: int) -> NativeRead | None:
        """As ExpertStore.reading."""
        held = self._files.hold()
        known, tables, first = self._files.derived.get(self._derived_as, (None, {}, ()))
        if known is not held:
            every = [ExpertId(layer.index, e) for layer in self.inventory.layers for e in range(layer.num_experts)]
            tables = {held: OnDisk(held.way, [self._stretches(each) for each in every], held)}
            first = [0, *accumulate(layer.num_experts for layer in self.inventory.layers)]
            self._files.derived[self._derived_as] = held, tables, first
        number = first[expert.layer] + expert.expert
        stretches = tables[held].stretches[number]
        files = held.serving(stretches) if stretches and self._may_skip(expert) else None
        if files is None:
            return None
        if files not in tables:
            tables[files] = tables[held].by(files.way, files)
        return NativeRead(expert, tables[files], files, stretches, tables[files].arrival(number, address))

    def _stretches(self, expert: ExpertId) -> Sequence[Stretch]:
        """Of an expert, whose pieces are (begin in the record, bytes); none where more is to be done than reading."""
        raise NotImplementedError

    @property
    def _derived_as(self) -> int:
        """By which stores over the same files differ in `_stretches`."""
        return 0

    def _may_skip(self, expert: ExpertId) -> bool:
        """Whether nothing is to be done about the expert but to read it."""
        return True

    def close(self) -> None:
        """Refuse further reads with ClosedError; the last running read closes the files."""
        self._files.close()


@dataclass(frozen=True)
class Reads:
    """What reading experts in all their formats takes."""

    scratch_bytes: int  # of the bounce buffer of one reading thread
    bounce_bytes: int  # that one reading thread needs beside it to read past the page cache
    stored_bytes: int  # of all experts on disk
    paths: list[Path]  # of the files that hold the records; empty: they are not on this machine

    @property
    def folder(self) -> Path:
        """By which the disk is known."""
        return self.paths[0].parent if self.paths else Path.cwd()


class Stores:
    """The stores of one model's experts, combined where the format makes no difference.

    `by_precision`: a store for each format that slabs hold, the most precise first; all of the same checkpoint. `draft`: of the
    format that drafts, which is read once.
    """

    def __init__(self, by_precision: Sequence[StoreOnDisk], draft: StoreOnDisk | None = None):
        self.by_precision, self.draft = tuple(by_precision), draft
        self.fingerprint = by_precision[0].fingerprint  # of the checkpoint
        self.reads = Reads(
            max(store.scratch_bytes for store in by_precision),
            max(store.bounce_bytes for store in by_precision),
            sum(store.stored_bytes for store in by_precision),
            [path for store in by_precision for path in store.paths],
        )

    def read_past_cache(self, only_cold: bool = False) -> str | None:
        """As `StoreOnDisk.read_past_cache`; returns the reason if a filesystem cannot."""
        refusals = [store.read_past_cache(only_cold) for store in self.all]
        return next((refused for refused in refusals if refused is not None), None)

    def without_draft(self) -> "Stores":
        """The same without the store of the format that drafts, which is closed."""
        if self.draft is not None:
            self.draft.close()
        return Stores(self.by_precision)

    @property
    def all(self) -> tuple[StoreOnDisk, ...]:
        return self.by_precision if self.draft is None else (*self.by_precision, self.draft)

    def close(self) -> None:
        for store in self.all:
            store.close()
