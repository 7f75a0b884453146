"""One format of a store while it is being packed: shards under temporary names, and a journal of the records that are durable.

Records are appended in their final order, so the finished ones are a prefix. Promises: the journal names a record only after its
bytes were synced; a process that dies loses at most the records since the last sync, and the next attempt continues from there;
the files get their final names only when all records are in them, and the index, which makes them a store, is written after that.

Journal, `experts.FORMAT.journal`: a line of JSON with the contents and the size of shards, then for each record a line [file,
offset_bytes, nbytes, checksum]. Everything after the last valid line is dropped.
"""

import errno
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import psutil

from vismoe.config import format_bytes
from vismoe.errors import CheckpointError, ConfigError
from vismoe.kernels.checksum import crc32c
from vismoe.store.index import (
    Contents,
    Index,
    StoredRecord,
    files_of,
    plausible,
    remedy,
    shard_path,
    sync_folder,
    write_index,
)
from vismoe.types import Format

SHARD_BYTES = 8 * 2**30  # most bytes of a file; a larger record gets its own file
SYNC_BYTES = 256 * 2**20  # a sync happens after so many bytes
SYNC_S = 5.0  # or seconds, whichever comes first
RECHECKED_RECORDS = 32  # the last ones in a journal, which a failing machine is most likely to have damaged


def journal_path(folder: Path, format: Format) -> Path:
    return folder / f"experts.{format}.journal"


class UnfinishedFormat:
    """Continues an earlier attempt, or begins. The caller ensures that only one exists in a folder.

    Raises CheckpointError if the folder belongs to another checkpoint, ConfigError if the disk is full or fails.
    """

    def __init__(self, folder: Path, contents: Contents):
        self.folder, self.contents = folder, contents
        self._head = (json.dumps({**contents.to_json(), "shard_bytes": SHARD_BYTES}) + "\n").encode()
        self._shards: dict[int, int] = {}  # descriptors of shards written to since the last sync
        self._unsafe: list[StoredRecord] = []  # appended since the last sync
        self._synced_s = time.monotonic()
        path = journal_path(folder, contents.format)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        begun = bool(lines) and lines[0].endswith(b"\n")
        if begun and lines[0] != self._head:
            raise CheckpointError(
                f"{path} belongs to another checkpoint, or to this one before it changed. "
                f"Fix: {remedy(folder, contents.format)}, or choose another folder (--out)"
            )
        self._safe: list[StoredRecord] = []
        self._journal = -1
        try:
            self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._resume(lines[1:]) if begun else self._begin()
        except OSError as error:
            self.close()
            raise self._failed(error) from error

    @property
    def done(self) -> int:
        """Number of appended records: the next one is that of `contents.experts[done]`."""
        return len(self._safe) + len(self._unsafe)

    def append(self, encoded: np.ndarray) -> None:
        """Write one record, uint8 `[whole blocks]`."""
        file, offset_bytes = self._next(len(encoded))
        try:
            if file not in self._shards:
                self._shards[file] = os.open(self._partial(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            left, at = encoded.data, offset_bytes
            while left:
                written = os.pwrite(self._shards[file], left, at)
                left, at = left[written:], at + written
            self._unsafe.append(StoredRecord(file, offset_bytes, len(encoded), crc32c(encoded)))
            unsafe_bytes = sum(record.nbytes for record in self._unsafe)
            if unsafe_bytes >= SYNC_BYTES or time.monotonic() - self._synced_s >= SYNC_S:
                self._sync()
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> Index:
        """Give the shards their final names and write the index, which makes them a store."""
        assert self.done == len(self.contents.experts), "not every record was appended"
        try:
            self._sync()
            index = Index(self.contents, tuple(self._safe))
            for file in range(len(index.file_bytes)):
                os.replace(self._partial(file), self._final(file))
            sync_folder(self.folder)
            write_index(self.folder, index)
            journal_path(self.folder, self.contents.format).unlink()
        except OSError as error:
            raise self._failed(error) from error
        return index

    def close(self) -> None:
        """Discard records that were not synced."""
        self._close_shards()
        if self._journal >= 0:
            os.close(self._journal)

    def _sync(self) -> None:
        """Make every record durable, then name it in the journal."""
        for descriptor in self._shards.values():
            os.fsync(descriptor)
        sync_folder(self.folder)
        self._write(b"".join(map(_line, self._unsafe)))
        self._close_shards()
        self._safe += self._unsafe
        self._unsafe, self._synced_s = [], time.monotonic()

    def _begin(self) -> None:
        """Write the journal with its first line; delete files that belong to no index or journal."""
        os.ftruncate(self._journal, 0)
        for path in files_of(self.folder, self.contents.format):
            if path != journal_path(self.folder, self.contents.format):
                path.unlink()
        self._write(self._head)
        sync_folder(self.folder)

    def _resume(self, lines: list[bytes]) -> None:
        """Continue after the last record that is certainly intact; cut off what follows it."""
        for path in files_of(self.folder, self.contents.format):
            if path.suffix == ".bin":  # an attempt that died in `finish` has renamed some shards
                os.replace(path, path.with_name(f"{path.name}.partial"))
        self._safe = self._intact(lines)
        os.ftruncate(self._journal, len(self._head) + sum(len(_line(record)) for record in self._safe))
        ends = dict(zip(map(self._partial, itertools.count()), Index(self.contents, tuple(self._safe)).file_bytes))
        for path in files_of(self.folder, self.contents.format):
            if path in ends:
                os.truncate(path, ends[path])
            elif path.suffix == ".partial":
                path.unlink()

    def _write(self, lines: bytes) -> None:
        while lines:
            lines = lines[os.write(self._journal, lines) :]
        os.fsync(self._journal)

    def _next(self, nbytes: int) -> tuple[int, int]:
        """(file, offset_bytes) of the next record."""
        if not self.done:
            return 0, 0
        last = (self._unsafe or self._safe)[-1]
        end = last.offset_bytes + last.nbytes
        return (last.file, end) if end + nbytes <= SHARD_BYTES else (last.file + 1, 0)

    def _final(self, file: int) -> Path:
        return shard_path(self.folder, self.contents.format, file)

    def _partial(self, file: int) -> Path:
        final = self._final(file)
        return final.with_name(f"{final.name}.partial")

    def _close_shards(self) -> None:
        for descriptor in self._shards.values():
            os.close(descriptor)
        self._shards = {}

    def _intact(self, lines: list[bytes]) -> list[StoredRecord]:
        """The records that a journal names, up to the first invalid line or damaged record."""
        records: list[StoredRecord] = []
        for line in lines:
            if (record := _record(line)) is None:
                break
            records.append(record)
        del records[plausible(self.contents, records) :]
        del records[self._within_files(records) :]
        while True:
            last = range(max(0, len(records) - RECHECKED_RECORDS), len(records))
            bad = next((at for at in last if not self._is_there(records[at])), None)
            if bad is None:
                return records
            del records[bad:]

    def _within_files(self, records: list[StoredRecord]) -> int:
        """The number of records, from the first, that lie within their file: a file may have been cut short or lost."""
        sizes = {file: self._partial_bytes(file) for file in {record.file for record in records}}
        ends = (record.offset_bytes + record.nbytes <= sizes[record.file] for record in records)
        return sum(itertools.takewhile(bool, ends))

    def _partial_bytes(self, file: int) -> int:
        """Bytes of an unfinished shard; 0 if there is none."""
        try:
            return self._partial(file).stat().st_size
        except FileNotFoundError:
            return 0

    def _is_there(self, record: StoredRecord) -> bool:
        try:
            with open(self._partial(record.file), "rb") as file:
                return crc32c(os.pread(file.fileno(), record.nbytes, record.offset_bytes)) == record.checksum
        except OSError:
            return False

    def _failed(self, error: OSError) -> ConfigError:
        """The error for a failed write."""
        safe = f"{len(self._safe)} of {len(self.contents.experts)} experts are safe in {self.folder}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ConfigError(
                f"{self.folder} cannot be written: {error.strerror or error}; {safe}. "
                "Fix: check the disk and its permissions, then run the same command again: it continues from there"
            )
        free, stored = psutil.disk_usage(str(self.folder)).free, sum(record.nbytes for record in self._safe)
        left = (stored / len(self._safe)) * (len(self.contents.experts) - len(self._safe)) if self._safe else 0
        about = f", and the others need about {format_bytes(left)}" if left else ""
        return ConfigError(
            f"The disk of {self.folder} is full: {format_bytes(free)} are free{about}; {safe}. "
            "Fix: free some space and run the same command again, which continues from there; or choose another disk (--out)"
        )


def _line(record: StoredRecord) -> bytes:
    """A record as a line of the journal."""
    return f"{json.dumps(record)}\n".encode()


def _record(line: bytes) -> StoredRecord | None:
    """The record of a line that `_line` wrote; None for anything else."""
    try:
        record = StoredRecord(*json.loads(line))
    except (TypeError, ValueError):
        return None
    return record if _line(record) == line and all(type(part) is int for part in record) else None
