"""Memory limits and cold files: a control group per worker, and weights dropped from the page cache.

A group is made inside the group of this process (control groups version 1 or 2), so that limits above it go on holding; where
that is not allowed, systemd makes a scope. A group counts the page cache that its members fill, so a limit also bounds what the
kernel may keep of a mapped or buffered file. Under version 1 a cached page stays charged to the group that read it first, and
costs the next one nothing: hence files are dropped before each worker.
"""

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from vismoe.config import format_bytes
from vismoe.errors import ConfigError

__all__ = ["GroupReport", "Groups", "MemoryGroup", "cached_bytes", "drop_caches", "imports_bytes"]

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
ENTER = 'echo $$ > "$0" && exec "$@"'  # sh: join the group, then become the command
REMOVAL_S = 5.0  # a group can be busy for a moment after its last process has ended
PAGE_BYTES = mmap.PAGESIZE
AMPLE_BYTES = 2**40
# Prints what the group of a process that has planned counts, page cache that can be taken back apart; all it holds without one.
PLANS = f"""
from vismoe.bench import contestants
from vismoe.bench.process import peak_rss_bytes
from vismoe.config import Settings
from vismoe.machine.hardware import group_limits
from vismoe.models.family.checkpoint_files import demo_model
from vismoe.models.load.preview import preview
preview(demo_model(), Settings(memory="100%", context=64), device="cpu")
print(next((used for limit, used in group_limits() if limit == {AMPLE_BYTES}), peak_rss_bytes()))
"""


@dataclass(frozen=True)
class GroupReport:
    """What a group saw: the most memory charged at once, and processes killed at the limit; None where that is not known."""

    peak_bytes: int | None
    kills: int | None


class MemoryGroup(Protocol):
    """A limit for one process and its children."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside."""

    def report(self) -> GroupReport: ...

    def remove(self) -> None:
        """After its processes have ended."""


class Unlimited:
    """No group."""

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def report(self) -> GroupReport:
        return GroupReport(None, None)

    def remove(self) -> None:
        pass


@dataclass(frozen=True)
class Version:
    """The files of one version of control groups."""

    limit: str
    swap: str  # absent where the kernel does not count swap
    swap_allows_bytes: bool  # version 1 bounds memory and swap together, version 2 swap alone
    peak: str
    events: str  # holds a line `oom_kill N`


V1 = Version("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", True, "memory.max_usage_in_bytes", "memory.oom_control")
V2 = Version("memory.max", "memory.swap.max", False, "memory.peak", "memory.events")


class FolderGroup:
    """A control group made by hand. Raises OSError where that is not allowed; then nothing is left behind."""

    def __init__(self, parent: Path, version: Version, limit_bytes: int, name: str):
        self.folder, self._version = parent / name, version
        self.folder.mkdir()
        try:
            (self.folder / version.limit).write_text(str(limit_bytes))
            if (self.folder / version.swap).exists():
                (self.folder / version.swap).write_text(str(limit_bytes if version.swap_allows_bytes else 0))
        except BaseException:
            self.remove()
            raise

    def command(self, argv: Sequence[str]) -> list[str]:
        return ["/bin/sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *argv]

    def report(self) -> GroupReport:
        peak, events = self.folder / self._version.peak, self.folder / self._version.events
        counts = dict(line.split() for line in events.read_text().splitlines()) if events.exists() else {}
        kills = int(counts["oom_kill"]) if "oom_kill" in counts else None
        return GroupReport(int(peak.read_text()) if peak.exists() else None, kills)

    def remove(self) -> None:
        until_s = time.monotonic() + REMOVAL_S
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)


class Scope:
    """A transient unit of the user's systemd; it vanishes with its last process, so nothing can be read from it afterwards."""

    def __init__(self, limit_bytes: int, name: str):
        self._prefix = ["systemd-run", "--user", "--scope", "--quiet", "--collect", f"--unit={name}"]
        self._prefix += ["-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0", "--"]

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._prefix, *argv]

    def report(self) -> GroupReport:
        return GroupReport(None, None)

    def remove(self) -> None:
        pass


class Groups:
    """Makes a fresh group for each worker, in the first way that works here. Raises ConfigError where none does."""

    def __init__(self, limit_bytes: int | None, root: Path = CGROUPS, self_file: Path = SELF):
        self.limit_bytes = limit_bytes
        self.how = "no limit"
        self._make: Callable[[str], MemoryGroup] = lambda name: Unlimited()
        self._made = 0
        if limit_bytes is None:
            return
        failures = []
        for self.how, self._make in ways(limit_bytes, root, self_file):
            failure = self._failure()
            if failure is None:
                return
            failures.append(f"{self.how}: {failure}")
        raise ConfigError(
            f"--limit {format_bytes(limit_bytes)} cannot be honoured here: {'; '.join(failures)}. "
            "Fix: run as root, in a container that may make control groups, or where systemd-run --user works"
        )

    def make(self) -> MemoryGroup:
        """A new, empty group."""
        self._made += 1
        return self._make(f"vismoe-bench-{os.getpid()}-{self._made}")

    def _failure(self) -> str | None:
        """Why no process can be run in a group, or None."""
        try:
            group = self.make()
            try:
                done = subprocess.run(group.command([sys.executable, "-c", ""]), capture_output=True, text=True)
            finally:
                group.remove()
        except OSError as error:
            return error.strerror or str(error)
        return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


def ways(limit_bytes: int, root: Path, self_file: Path) -> Iterator[tuple[str, Callable[[str], MemoryGroup]]]:
    """(name, what makes a group of a given name) of every way to limit memory, the most direct first."""
    for folder, version in homes(root, self_file):
        name = f"memory control group version {1 if version is V1 else 2}"
        yield name, partial(FolderGroup, folder, version, limit_bytes)
    yield "systemd user scope", partial(Scope, limit_bytes)


def homes(root: Path = CGROUPS, self_file: Path = SELF) -> Iterator[tuple[Path, Version]]:
    """(folder, version) of the groups in which ours could be made, nearest first."""
    for line in self_file.read_text().splitlines() if self_file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/"), V1
        elif controllers == "":
            here = root / path.lstrip("/")
            for folder in (here, here.parent):  # a group that holds processes cannot have limited children: then beside it
                control = folder / "cgroup.subtree_control"
                if control.exists() and "memory" in control.read_text().split():
                    yield folder, V2


@functools.cache
def imports_bytes() -> int:
    """What a limit must leave beside VisMoE's budget: what a worker holds when it plans, torch and transformers imported.

    Measured once, in a process and a group of its own, since it follows from what is installed and from which pages of libraries
    are in memory already; 300 MiB with a torch for CPUs. A sixteenth more is what later workers may differ by. Most of it comes
    back: a plan lies above the real growth. Raises ConfigError where that process fails.
    """
    try:
        groups = Groups(AMPLE_BYTES)
    except ConfigError:
        groups = Groups(None)
    group = groups.make()
    try:
        done = subprocess.run(group.command([sys.executable, "-c", PLANS]), capture_output=True, text=True)
    finally:
        group.remove()
    if done.returncode:
        raise ConfigError(f"what a worker imports cannot be measured here: {done.stderr.strip()}")
    found = int(done.stdout.splitlines()[-1])
    return found + found // 16


def drop_caches(paths: Iterable[str | Path]) -> int:
    """Write back and drop the cached pages of these files; returns how many bytes stayed in the page cache nevertheless
    (pages that another process has mapped).
    """
    return sum(_drop(Path(path)) for path in paths)


def _drop(path: Path) -> int:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return cached_bytes(path)


def cached_bytes(path: str | Path) -> int:
    """Bytes of a file that are in the page cache, by mincore."""
    nbytes = os.path.getsize(path)
    if not nbytes:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    resident = np.zeros(-(-nbytes // PAGE_BYTES), np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        failed = libc.mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data))
        del pages  # the mapping cannot be closed while an array looks into it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((resident & 1).sum()) * PAGE_BYTES
