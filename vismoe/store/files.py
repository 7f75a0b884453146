"""Positioned reads from a checkpoint's files, through the page cache or past it (O_DIRECT).

Past the page cache, an aligned superset is read into a bounce buffer of the reading thread and copied from there: nothing in a
checkpoint is aligned as O_DIRECT wants it. That copy is cheaper than churning the page cache when the files do not fit it.
Promises: never mmap (a truncated file is an error, not a dead process); every byte asked for, or CheckpointError.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from vismoe.errors import CheckpointError, ClosedError
from vismoe.store.safetensors_header import AGAIN, SafetensorsHeader
from vismoe.types import BLOCK_BYTES

__all__ = ["CheckpointFiles", "OpenFiles", "bounce_bytes"]

LOGICAL_BLOCK_BYTES = 512  # the smallest: what O_DIRECT returns is a multiple of it, but for the end of a file
MOST_BOUNCE_BYTES = 4 * 2**20  # of one request: large enough for the disk, small enough to be copied out of the caches


def bounce_bytes(stretch_bytes: int) -> int:
    """The bounce buffer of one thread that reads stretches of up to `stretch_bytes` past the page cache."""
    return min(MOST_BOUNCE_BYTES, -(-stretch_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)


class OpenFiles:
    """Descriptors, closed when nobody holds this object any more. Reading is thread-safe.

    References count, not locks: a thread that is interrupted at any moment leaves nothing behind.
    """

    def __init__(self, headers: Sequence[SafetensorsHeader], flags: int, bounce_bytes: int = 0):
        self.headers = tuple(headers)
        self._bounce_bytes = bounce_bytes  # 0: through the page cache
        self._bounce = threading.local()
        self._descriptors: list[int] = []
        for header in self.headers:
            self._descriptors.append(os.open(header.path, flags | os.O_CLOEXEC))

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def fill(self, file: int, offset_bytes: int, pieces: list[np.ndarray]) -> int:
        """Read from `offset_bytes` until all `pieces` (uint8, 1-D) are full; returns their bytes."""
        return self._fill_past_cache(file, offset_bytes, pieces) if self._bounce_bytes else self._fill(file, offset_bytes, pieces)

    def expect(self, file: int, offsets: Sequence[int], nbytes: int) -> None:
        """`nbytes` at each of `offsets` will be read soon, through the page cache: let the disk begin with all of them."""
        if hasattr(os, "posix_fadvise"):
            for offset in offsets:
                os.posix_fadvise(self._descriptors[file], offset, nbytes, os.POSIX_FADV_WILLNEED)

    def probe(self) -> None:
        """Read a block of every file, unless it is empty; OSError where this way of reading does not work."""
        for descriptor in self._descriptors:
            os.preadv(descriptor, [self._buffer()[:BLOCK_BYTES].data], 0)

    def _fill(self, file: int, offset_bytes: int, pieces: list[np.ndarray]) -> int:
        wanted = sum(map(len, pieces))
        left = [piece.data for piece in pieces]
        done = 0
        while True:
            done += (count := self._read(file, left, offset_bytes + done, wanted))
            if done == wanted:
                return wanted
            if count == 0:
                raise self._truncated(file, offset_bytes, wanted)
            while count >= len(left[0]):
                count -= len(left.pop(0))
            left[0] = left[0][count:]

    def _fill_past_cache(self, file: int, offset_bytes: int, pieces: list[np.ndarray]) -> int:
        buffer, left = self._buffer(), list(pieces)
        begin, end = offset_bytes, offset_bytes + sum(map(len, pieces))
        at = begin // BLOCK_BYTES * BLOCK_BYTES
        while at < end:
            size = min(len(buffer), -(-(end - at) // BLOCK_BYTES) * BLOCK_BYTES)
            got = self._read(file, [buffer[:size].data], at, end - begin)
            if got == 0 or (got % LOGICAL_BLOCK_BYTES and at + got < end):
                raise self._truncated(file, offset_bytes, end - begin)
            read = buffer[max(begin - at, 0) : min(got, end - at)]
            while len(read):
                count = min(len(read), len(left[0]))
                left[0][:count] = read[:count]  # without the interpreter lock
                read, left[0] = read[count:], left[0][count:]
                if not len(left[0]):
                    left.pop(0)
            at += got
        return end - begin

    def _buffer(self) -> np.ndarray:
        """This thread's bounce buffer, page-aligned as O_DIRECT wants it."""
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None:
            private = mmap.mmap(-1, self._bounce_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = self._bounce.buffer = np.frombuffer(private, dtype=np.uint8)
        return buffer

    def _read(self, file: int, into: list[memoryview], offset_bytes: int, wanted_bytes: int) -> int:
        """EINTR is retried by Python itself (PEP 475)."""
        try:
            return os.preadv(self._descriptors[file], into, offset_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{self.headers[file].path}: reading {wanted_bytes} bytes at offset {offset_bytes} failed: "
                f"{error.strerror}. Fix: check the disk, then load the model again"
            ) from error

    def _truncated(self, file: int, offset_bytes: int, wanted_bytes: int) -> CheckpointError:
        header, size = self.headers[file], os.fstat(self._descriptors[file]).st_size
        return CheckpointError(
            f"{header.path} was truncated after loading: {wanted_bytes} bytes at offset {offset_bytes} are needed, "
            f"the file has {size} now and had {header.file_bytes}. Fix: {AGAIN}, then load the model again"
        )


class CheckpointFiles:
    """The files of one checkpoint, until they are closed."""

    def __init__(self, headers: Sequence[SafetensorsHeader]):
        self.headers = tuple(headers)
        try:
            self._open: OpenFiles | None = OpenFiles(headers, os.O_RDONLY)
        except OSError as error:
            raise _cannot_open(error) from error

    def read_past_cache(self, stretch_bytes: int) -> str | None:
        """Read past the page cache from now on, stretches of up to `stretch_bytes`; or say why this filesystem cannot."""
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return "this system has no O_DIRECT"
        try:
            direct = OpenFiles(self.headers, os.O_RDONLY | flag, bounce_bytes(stretch_bytes))
            direct.probe()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise _cannot_open(error) from error
            return f"the filesystem of {self.headers[0].path.parent} has no O_DIRECT"
        self._open = direct
        return None

    def hold(self) -> OpenFiles:
        """The open files, for as long as the caller keeps them. Raises ClosedError."""
        files = self._open
        if files is None:
            raise ClosedError("the expert store was closed")
        return files

    def close(self) -> None:
        """Refuse further reads; the files are closed when the last read that is running has ended."""
        self._open = None


def _cannot_open(error: OSError) -> CheckpointError:
    return CheckpointError(f"{error.filename} cannot be opened: {error.strerror}. Fix: {AGAIN}")
