"""Positioned reads from files, through the page cache or past it (O_DIRECT).

Past the page cache, whole blocks go straight into memory that has the alignment of their place in the file, as far as the disk
cares: 4 bytes for NVMe, often 512 for others (`memory_bytes`). Blocks at the edges of what is read, which hold bytes of others
too, go through the thread's bounce buffer. On its way to other memory everything does, and a core copies it from there. That is
cheaper than churning the page cache when the files do not fit in it, and than filling it with what is read once.

Promises: no mapped memory is touched (a truncated file is an error, not a dead process); every byte that was requested, as it was
when the file was opened, or CheckpointError. So the file's state is checked after each read, which shows a write before or during
it.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vismoe.errors import CheckpointError, ClosedError
from vismoe.kernels.read import CHANGED, ENDED_EARLY, MOST_BYTES, File, FileAccess, Stretch, memory_alignment, piece_of, read
from vismoe.pools.advice import block_buffer, buffer_bytes
from vismoe.store.file_state import FileChangedError, FileState, examined
from vismoe.store.page_cache import cached_bytes
from vismoe.store.safetensors_header import AGAIN
from vismoe.types import BLOCK_BYTES

LOGICAL_BLOCK_BYTES = 512  # the smallest; O_DIRECT reads return a multiple of it, except at the end of a file
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)  # the error of a filesystem without O_DIRECT
MOST_BOUNCE_BYTES = 4 * 2**20  # of one read: large enough for the disk, small enough to be copied from CPU caches


def bounce_bytes(stretch_bytes: int) -> int:
    """Bytes of the bounce buffer of a thread that reads stretches of up to `stretch_bytes` past the page cache."""
    return buffer_bytes(min(MOST_BOUNCE_BYTES, -(-stretch_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES))


class ThreadBuffer(threading.local):
    """Memory of each thread, made at its first use."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    @cached_property
    def memory(self) -> Any:
        return self._make()


class FileOnDisk(Protocol):
    """A file, its size when it was examined, and its whole state then (None: the state when it is opened counts)."""

    @property
    def path(self) -> Path: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def state(self) -> FileState | None: ...


class OpenFiles:
    """Open descriptors; they are closed when the last reference to this object is gone. Reading is thread-safe.

    Reference counts instead of locks: a thread that is interrupted at any moment leaves no lock or descriptor behind.
    `cached`: the same files through the page cache, where these are read past it. They serve what the page cache holds, and what
    is read a second time, so that it is there from then on. `threads`: that read a large piece at the same time; `most_bytes`:
    of one call of the system.
    """

    def __init__(
        self,
        files: Sequence[FileOnDisk],
        flags: int,
        bounce_bytes: int = 0,
        again: str = AGAIN,
        states: Sequence[FileState | None] | None = None,
        cached: "OpenFiles | None" = None,
        threads: int = 1,
        most_bytes: int = MOST_BYTES,
    ):
        self.files, self._again = tuple(files), again
        self._cached, self._seen = cached, set[tuple[int, int]]()  # (file, offset) of what was read past the page cache
        self._threads = ThreadPoolExecutor(threads, "vismoe-load") if threads > 1 else None
        self._bounce_bytes = bounce_bytes  # 0: through the page cache
        self._most_bytes = most_bytes
        self._bounce = ThreadBuffer(partial(block_buffer, bounce_bytes))
        self._descriptors: list[int] = []
        for file in self.files:
            self._descriptors.append(os.open(file.path, flags | os.O_CLOEXEC))
        found = [examined(descriptor) for descriptor in self._descriptors]
        known = states or [file.state for file in self.files]
        self.states = [before or now for before, now in zip(known, found, strict=True)]
        for number in range(len(self.files)):
            self.refuse_changed(number)
        self._native = (File * len(self.files))(
            *(
                File(descriptor, state.file_bytes, state.mtime_ns, state.ctime_ns, state.inode, state.device)
                for descriptor, state in zip(self._descriptors, self.states)
            )
        )

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # held: when Python ends, modules go first
        for descriptor in self._descriptors:
            close(descriptor)

    def fill(self, file: int, offset_bytes: int, into: np.ndarray) -> int:
        """Fill `into` (uint8, contiguous) with what the file has at `offset_bytes`; returns its bytes. Raises CheckpointError."""
        return self.fill_all([Stretch(file, offset_bytes, [piece_of(into)])])

    def fill_all(self, stretches: Sequence[Stretch]) -> int:
        """As `fill`, for pieces of memory that stay while they are filled."""
        left = list(stretches)
        if self._cached is not None:
            cached = [one for one in stretches if self._is_cached(one)]
            left = [one for one in stretches if one not in cached]
            self._seen.update(map(_place, stretches))
            self._cached._read(cached)
        self._read(left)
        return sum(one.nbytes for one in stretches)

    def fill_large(self, file: int, offset_bytes: int, into: np.ndarray) -> None:
        """As `fill`, for one large piece, which the threads share."""
        each, end_bytes = MOST_BOUNCE_BYTES, offset_bytes + len(into)
        if self._threads is None or len(into) <= each:
            self.fill(file, offset_bytes, into)
            return

        def fill(start: int) -> None:
            begin, end = max(start, offset_bytes), min(start + each, end_bytes)
            self.fill(file, begin, into[begin - offset_bytes : end - offset_bytes])

        starts = range(offset_bytes // each * each, end_bytes, each)  # so that a piece is one read of whole blocks
        list(self._threads.map(fill, starts))  # raises what a thread raised

    def fill_rows(self, file: int, offsets: Sequence[int], rows: np.ndarray) -> None:
        """As `fill`, for rows uint8 `[n, bytes]` from `offsets`, through the page cache."""
        self._read([Stretch(file, offset, [piece_of(row)]) for offset, row in zip(offsets, rows, strict=True)])

    def refuse_changed(self, file: int) -> None:
        """Raises FileChangedError for a file that has changed since it was opened."""
        known, status = self.states[file], os.fstat(self._descriptors[file])
        if (status.st_ctime_ns, status.st_mtime_ns, status.st_size) == (known.ctime_ns, known.mtime_ns, known.file_bytes) and (
            status.st_ino == known.inode and status.st_dev == known.device
        ):
            return
        raise FileChangedError(
            f"{self.files[file].path} has changed since it was opened: {known.difference(FileState.of(status))}. VisMoE no "
            f"longer reads it. Fix: load the model again; if the file was damaged, first {self._again}"
        )

    def serving(self, stretches: Sequence[Stretch]) -> "OpenFiles | None":
        """What native threads read these from now: these files, or the same through the page cache; None: some from either."""
        if self._cached is None:
            return self
        cached = [self._is_cached(one) for one in stretches]
        if any(cached) and not all(cached):
            return None
        self._seen.update(map(_place, stretches))
        return self._cached if all(cached) else self

    def are_on_disk(self, stretches: Sequence[Stretch]) -> bool:
        """Whether the disk writes all of these to memory, past the page cache."""
        return self.past_cache and not (self._cached is not None and any(map(self._is_cached, stretches)))

    def _is_cached(self, stretch: Stretch) -> bool:
        """Whether the page cache holds most of this, or shall, since it was read before."""
        assert self._cached is not None
        if _place(stretch) in self._seen:
            return True
        try:
            file, nbytes = self._cached._descriptors[stretch.file], stretch.nbytes
            return 2 * cached_bytes(file, stretch.offset_bytes, nbytes) > nbytes
        except OSError:  # a filesystem that cannot tell
            return True

    @property
    def for_more(self) -> "OpenFiles":
        """What reads that were made before are made through from now on."""
        return self._cached or self

    def expect(self, file: int, offsets: Sequence[int], nbytes: int) -> None:
        """Announce reads of `nbytes` at each of `offsets`, so that the disk can begin with all of them. Past the page cache it
        cannot."""
        if hasattr(os, "posix_fadvise") and not self._bounce_bytes:
            for offset in offsets:
                os.posix_fadvise(self._descriptors[file], offset, nbytes, os.POSIX_FADV_WILLNEED)

    def probe(self) -> None:
        """Read a block of every non-empty file; raises OSError (`NO_DIRECT`) where this way of reading does not work."""
        block = block_buffer(BLOCK_BYTES)  # not the bounce buffer: this thread may never need one
        for file, descriptor in enumerate(self._descriptors):
            try:
                os.preadv(descriptor, [block.data], 0)
            except OSError as error:
                if error.errno in NO_DIRECT:
                    raise
                raise self._failed(file, 0, BLOCK_BYTES, error) from error

    def _read(self, stretches: Sequence[Stretch]) -> None:
        if not stretches:
            return
        ended, number = read(self.way, stretches, self._bounce.memory if self._bounce_bytes else None)
        if ended:
            failed = stretches[number]
            raise self.error_of(ended, failed.file, failed.offset_bytes, failed.nbytes)

    @property
    def way(self) -> FileAccess:
        """How native code reads these files, which this object must outlive."""
        blocks = BLOCK_BYTES, LOGICAL_BLOCK_BYTES, self.memory_bytes or BLOCK_BYTES
        return FileAccess.of(self._native, self._bounce_bytes, *blocks, self._most_bytes)

    @cached_property
    def memory_bytes(self) -> int:
        """To what memory is aligned that the disk can write to, a power of two; 0: the system does not say."""
        found = [memory_alignment(one) for one in self._descriptors]
        return max(found) if all(found) else 0

    @property
    def past_cache(self) -> bool:
        """These files are read past the page cache, what is read the first time at least."""
        return self._bounce_bytes > 0

    def error_of(self, ended: int, file: int, offset_bytes: int, nbytes: int) -> CheckpointError:
        """What ended a read of so many bytes early."""
        if ended == CHANGED:
            try:
                self.refuse_changed(file)
            except CheckpointError as error:
                return error
        if ended in (CHANGED, ENDED_EARLY):
            return self._ended_early(file, offset_bytes, nbytes)
        return self._failed(file, offset_bytes, nbytes, OSError(ended, os.strerror(ended)))

    def _failed(self, file: int, offset_bytes: int, wanted_bytes: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.files[file].path}: reading {wanted_bytes} bytes at offset {offset_bytes} failed: "
            f"{error.strerror}. Fix: check the disk, then load the model again"
        )

    def _ended_early(self, file: int, offset_bytes: int, wanted_bytes: int) -> CheckpointError:
        known, size = self.files[file], os.fstat(self._descriptors[file]).st_size
        if size >= known.file_bytes:
            return CheckpointError(
                f"{known.path}: reading {wanted_bytes} bytes at offset {offset_bytes} ended early, although the file still has "
                f"{size} bytes. Fix: check the disk, then load the model again"
            )
        return CheckpointError(
            f"{known.path} was truncated after loading: {wanted_bytes} bytes at offset {offset_bytes} are needed, "
            f"the file has {size} now and had {known.file_bytes}. Fix: {self._again}, then load the model again"
        )


def _place(stretch: Stretch) -> tuple[int, int]:
    return stretch.file, stretch.offset_bytes


class CheckpointFiles:
    """The files of one checkpoint or packed store, until they are closed. `again` is advice on how to restore a damaged one."""

    def __init__(self, files: Sequence[FileOnDisk], again: str = AGAIN):
        self.files, self._again = tuple(files), again
        self.derived: dict[int, Any] = {}  # what belongs to the open files and holds them; gone when they are closed
        try:
            self._open: OpenFiles | None = OpenFiles(files, os.O_RDONLY, again=again)
        except OSError as error:
            raise self._cannot_open(error) from error
        self.states = tuple(self._open.states)

    def read_past_cache(self, stretch_bytes: int, only_cold: bool = False) -> str | None:
        """Read past the page cache from now on, stretches of up to `stretch_bytes`; returns the reason if this filesystem
        cannot. `only_cold`: what the page cache lacks, the first time that it is read."""
        direct = self._past_cache(stretch_bytes, only_cold)
        if isinstance(direct, str):
            return direct
        self._open = direct
        return None

    def for_loading(self, past_cache: bool, threads: int, most_bytes: int = MOST_BYTES) -> OpenFiles:
        """The open files to read large tensors from, each once, by so many threads: what the page cache lacks past it, at most so
        much in one call of the system, if that is asked for and this filesystem can. Raises ClosedError."""
        held = self.hold()
        direct = self._past_cache(MOST_BOUNCE_BYTES, True, threads, most_bytes) if past_cache else ""
        return held if isinstance(direct, str) else direct

    def _past_cache(self, stretch_bytes: int, only_cold: bool, threads: int = 1, most_bytes: int = MOST_BYTES) -> OpenFiles | str:
        """Files that are read past the page cache, or why this filesystem cannot."""
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return "this system has no O_DIRECT"
        try:
            given = self._again, self.states
            cached = OpenFiles(self.files, os.O_RDONLY, 0, *given, most_bytes=most_bytes) if only_cold else None
            bounce = bounce_bytes(stretch_bytes)
            direct = OpenFiles(self.files, os.O_RDONLY | flag, bounce, *given, cached, threads, most_bytes)
            direct.probe()
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise self._cannot_open(error) from error
            return f"the filesystem of {self.files[0].path.parent} has no O_DIRECT"
        return direct

    def hold(self) -> OpenFiles:
        """The open files, for as long as the caller keeps them. Raises ClosedError."""
        files = self._open
        if files is None:
            raise ClosedError("the expert store was closed")
        return files

    def close(self) -> None:
        """Refuse further reads; the last running read closes the files."""
        self._open = None
        self.derived = {}

    def _cannot_open(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{error.filename} cannot be opened: {error.strerror}. Fix: {self._again}")
