"""How fast a filesystem reads the way VisMoE reads: several threads, `preadv` at random offsets, one expert at a time.

Bounded in time. The scratch file has no name, so nothing remains, however the process ends.
"""

import contextlib
import itertools
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from vismoe.config import format_bytes
from vismoe.errors import InputError
from vismoe.machine.hardware import cores
from vismoe.machine.rates import FULL, MIB, QUICK, DiskRate, DiskRates, Effort
from vismoe.pools.advice import LEAST_HUGE_BYTES, block_buffer
from vismoe.types import BLOCK_BYTES

LEAST_SCRATCH_BYTES = 64 * MIB
LEAST_EXISTING_BYTES = 256 * MIB  # an existing file of at least this size is measured instead of a scratch file
WEIGHTS = ("*.safetensors", "*.gguf")
SCRATCH_SHARE = 4  # a scratch file takes at most one part in this many of the free disk
WRITE_S = 4.0  # a slow disk gets a smaller scratch file
CACHED_BYTES = 256 * MIB


def filesystem_key(path: str | os.PathLike[str]) -> str:
    """A name of the filesystem on which `path` lies, or would lie; it survives a restart if the filesystem has an id."""
    folder = nearest_folder(path)
    found = os.statvfs(folder)
    return f"fsid-{found.f_fsid:x}" if found.f_fsid else f"dev-{os.stat(folder).st_dev:x}"


def nearest_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of `path`, links resolved, or the nearest existing folder above it."""
    path = Path(path).expanduser().resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk_rates(path: str | os.PathLike[str], effort: Effort = FULL, on_point: Callable[[], object] = lambda: None) -> DiskRates:
    """Reads a file at random offsets, at every request size and depth, with O_DIRECT and through an emptied page cache.

    `path` is a large file or a folder. In a folder the largest weights file is read, or, if there is none, a scratch file that
    never has a name. Raises InputError for a folder that is missing, not writable or full.
    """
    folder = nearest_folder(path)
    with _open(path, effort) as opened:
        points = list(itertools.product((True, False), effort.requests_bytes, effort.depths))
        found: dict[tuple[bool, int, int], list[float]] = {point: [] for point in points}
        for point in points * effort.passes:
            rate = opened.cold_rate(*point, effort.point_s)
            found[point] += [] if rate is None else [rate]
            on_point()
        cached = opened.cached_rate(effort.point_s)
    rates = [DiskRate(*point, statistics.median(each)) for point, each in found.items() if each]
    return DiskRates(
        filesystem_key(folder), str(folder), _filesystem(folder), time.time(), tuple(rates), cached, opened.direct_refused
    )


def cached_rate(path: str | os.PathLike[str], limit_s: float = 0.5) -> float:
    """Bytes per second of copying a file, or one in a folder, from the page cache."""
    with _open(path, QUICK) as opened:
        return opened.cached_rate(limit_s)


def rate_past_cache(file: str | os.PathLike[str], request_bytes: int, depth: int, limit_s: float = 0.5) -> float | None:
    """Bytes per second of reading a file at random offsets with O_DIRECT; None where it is small, missing, or not read so."""
    try:
        with _open(file, QUICK) as opened:
            return opened.cold_rate(True, request_bytes, depth, limit_s)
    except (InputError, OSError):
        return None


class _Opened(NamedTuple):
    """A file that is being measured, opened both ways."""

    buffered: int
    direct: int | None
    direct_refused: str | None
    file_bytes: int

    def cold_rate(self, direct: bool, request_bytes: int, depth: int, limit_s: float) -> float | None:
        """Bytes per second; None if this way of reading is not available, or the file is too small."""
        descriptor = self.direct if direct else self.buffered
        slots = self.file_bytes // request_bytes
        if descriptor is None or slots < depth or not hasattr(os, "posix_fadvise"):
            return None
        os.posix_fadvise(self.buffered, 0, 0, os.POSIX_FADV_DONTNEED)
        offsets = [slot * request_bytes for slot in random.Random(0).sample(range(slots), slots)]
        return _reading(descriptor, offsets, request_bytes, depth, limit_s)

    def cached_rate(self, limit_s: float) -> float:
        """Bytes per second of copying from the page cache, with as many threads as this process has cores, to memory that is in
        no processor cache, as slabs are."""
        request_bytes = min(MIB, self.file_bytes)
        offsets = list(range(0, min(CACHED_BYTES, self.file_bytes) - request_bytes + 1, request_bytes))
        depth = min(len(offsets), cores())
        _reading(self.buffered, offsets, request_bytes, depth, math.inf)
        return _reading(self.buffered, offsets, request_bytes, depth, limit_s, places=-(-len(offsets) // depth))


def _reading(descriptor: int, offsets: list[int], request_bytes: int, depth: int, limit_s: float, places: int = 1) -> float:
    """Bytes per second of reading every offset once in `depth` threads, until the time limit; each thread reads into so many
    `places` in turns."""
    buffers = [_places(request_bytes, places) for _ in range(depth)]
    start = time.perf_counter()

    def reads(thread: int) -> int:
        done = 0
        for number, offset in enumerate(offsets[thread::depth]):
            done += os.preadv(descriptor, [buffers[thread][number % places]], offset)
            if time.perf_counter() - start > limit_s:
                break
        return done

    with ThreadPoolExecutor(depth) as pool:
        done = sum(pool.map(reads, range(depth)))
    return done / (time.perf_counter() - start)


def _places(nbytes: int, count: int) -> list[memoryview]:
    """Memory of the kind that experts are read into, touched before the measurement begins."""
    buffer = block_buffer(max(nbytes * count, LEAST_HUGE_BYTES))[: nbytes * count]
    buffer.fill(1)
    return [memory.data for memory in np.split(buffer, count)]


@contextlib.contextmanager
def _open(path: str | os.PathLike[str], effort: Effort) -> Iterator[_Opened]:
    existing = _existing_file(Path(path).expanduser())
    with contextlib.ExitStack() as stack:
        if existing:
            buffered = os.open(existing, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, buffered)
            direct, refused = _open_direct(existing)
        else:
            folder = nearest_folder(path)
            nbytes = _scratch_bytes(folder, effort)
            with _named_scratch(folder) as name:  # unlinked at once, so that no failure leaves it behind
                buffered = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, buffered)
                direct, refused = _open_direct(name)
        if direct is not None:
            stack.callback(os.close, direct)
        if not existing:
            _fill(buffered, nbytes, folder)
        if direct is not None:
            refused = _read_refused(direct)
        yield _Opened(buffered, None if refused else direct, refused, os.fstat(buffered).st_size)


def _existing_file(path: Path) -> Path | None:
    """A file that can be read instead of a scratch file."""
    if path.is_file():
        if path.stat().st_size < LEAST_EXISTING_BYTES:
            size, least = format_bytes(path.stat().st_size), format_bytes(LEAST_EXISTING_BYTES)
            raise InputError(f"{path} has {size}; rates need a file of {least}. Fix: name its folder instead")
        return path
    if not path.is_dir():
        raise InputError(f"{path} is neither a file nor a folder. Fix: name the folder of the checkpoint")
    files = [file for pattern in WEIGHTS for file in path.glob(pattern) if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    return largest if largest and largest.stat().st_size >= LEAST_EXISTING_BYTES else None


def _scratch_bytes(folder: Path, effort: Effort) -> int:
    free = psutil.disk_usage(str(folder)).free
    nbytes = min(effort.scratch_bytes, free // SCRATCH_SHARE)
    least = min(LEAST_SCRATCH_BYTES, effort.scratch_bytes)
    if nbytes < least:
        raise InputError(
            f"{folder} has {format_bytes(free)} of free disk; a scratch file of {format_bytes(least)} may take one part in "
            f"{SCRATCH_SHARE} of it. Fix: --path with a large file (it is only read), or with another folder"
        )
    return nbytes


@contextlib.contextmanager
def _named_scratch(folder: Path) -> Iterator[str]:
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=".vismoe-doctor-")  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"{folder} cannot hold a scratch file: {error.strerror}. Fix: --path with a large file (it is only read), or a "
            "writable folder on the same disk"
        ) from error
    with file:
        yield file.name


def _fill(descriptor: int, nbytes: int, folder: Path) -> None:
    """Writes incompressible bytes through to the disk; stops early on a slow disk."""
    noise = os.urandom(min(nbytes, 4 * MIB))
    start, written = time.perf_counter(), 0
    try:
        while written < nbytes:
            written += os.write(descriptor, noise)
            if written % LEAST_SCRATCH_BYTES == 0:
                os.fsync(descriptor)
                if time.perf_counter() - start > WRITE_S:
                    break
        os.fsync(descriptor)
    except OSError as error:
        raise InputError(
            f"{folder}: a scratch file could not be written beyond {format_bytes(written)}: {error.strerror}. "
            "Fix: --path with another folder"
        ) from error


def _open_direct(name: str | Path) -> tuple[int | None, str | None]:
    """(descriptor, None), or (None, reason)."""
    if not hasattr(os, "O_DIRECT"):
        return None, "this system has no O_DIRECT"
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), None
    except OSError as error:
        return None, f"the filesystem refuses O_DIRECT: {error.strerror}"


def _read_refused(direct: int) -> str | None:
    """The reason if the filesystem refuses to read; some open a file with O_DIRECT and then refuse to read it."""
    try:
        os.preadv(direct, [block_buffer(BLOCK_BYTES).data], 0)
    except OSError as error:
        return f"the filesystem refuses to read with O_DIRECT: {error.strerror}"
    return None


def _filesystem(folder: Path) -> str:
    """`ext4 on /dev/sda1`."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    innermost = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return f"{innermost.fstype} on {innermost.device}" if innermost else "unknown filesystem"
