"""Memory limits and cold files: a control group per worker, and weights dropped from the page cache.

A group is created inside the group of this process (control groups version 1 or 2), so that limits above it still hold; if that
is not allowed, systemd creates a scope. A group counts the page cache that its members fill, so a limit also bounds what the
kernel may cache of a mapped or buffered file. Under version 1 a cached page stays charged to the group that read it first and
costs the next group nothing, so files are dropped before each worker.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.store import page_cache

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
ENTER = 'echo $$ > "$0" && exec "$@"'  # sh: join the group, then become the command
REMOVAL_S = 5.0  # a group can be busy for a moment after its last process has ended
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
    """What a group recorded: the most memory at once, and processes killed at the limit; None if unknown."""

    peak_bytes: int | None
    kills: int | None


class MemoryGroup:
    """A memory limit for one process and its children; this one has none, and records nothing."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside the group."""
        return list(argv)

    def report(self) -> GroupReport:
        return GroupReport(None, None)

    def remove(self) -> None:
        """Removes the group after its processes have ended."""


@dataclass(frozen=True)
class Version:
    """The files of one version of control groups."""

    limit: str
    swap: str  # missing if the kernel does not count swap
    swap_allows_bytes: bool  # version 1 bounds memory and swap together, version 2 swap alone
    peak: str
    events: str  # contains a line `oom_kill N`


V1 = Version("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", True, "memory.max_usage_in_bytes", "memory.oom_control")
V2 = Version("memory.max", "memory.swap.max", False, "memory.peak", "memory.events")


class FolderGroup(MemoryGroup):
    """A control group made through the file system. Raises OSError if that is not allowed, and then leaves nothing behind."""

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


class Scope(MemoryGroup):
    """A transient unit of the user's systemd; it vanishes with its last process, so its record cannot be read afterwards."""

    def __init__(self, limit_bytes: int, name: str):
        self._prefix = ["systemd-run", "--user", "--scope", "--quiet", "--collect", f"--unit={name}"]
        self._prefix += ["-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0", "--"]

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._prefix, *argv]


class Groups:
    """Creates a fresh group for each worker, in the first way that works here. Raises ConfigError if none works."""

    def __init__(self, limit_bytes: int | None, root: Path = CGROUPS, self_file: Path = SELF):
        self.limit_bytes = limit_bytes
        self.how = "no limit"
        self._make: Callable[[str], MemoryGroup] = lambda name: MemoryGroup()
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
            f"--limit {format_bytes(limit_bytes)} cannot be enforced here: {'; '.join(failures)}. "
            "Fix: run as root, in a container that may create control groups, or on a system where systemd-run --user works"
        )

    def make(self) -> MemoryGroup:
        """A new, empty group."""
        self._made += 1
        return self._make(f"vismoe-bench-{os.getpid()}-{self._made}")

    def _failure(self) -> str | None:
        """Why a group cannot run a process; None if it can."""
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
    """(name, function that creates a group with a given name) of every way to limit memory, the most direct first."""
    for folder, version in homes(root, self_file):
        name = f"memory control group version {1 if version is V1 else 2}"
        yield name, partial(FolderGroup, folder, version, limit_bytes)
    yield "systemd user scope", partial(Scope, limit_bytes)


def homes(root: Path = CGROUPS, self_file: Path = SELF) -> Iterator[tuple[Path, Version]]:
    """(folder, version) of the groups in which a new group could be created, nearest first."""
    for line in self_file.read_text().splitlines() if self_file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/"), V1
        elif controllers == "":
            here = root / path.lstrip("/")
            for folder in (here, here.parent):  # a group with processes cannot have limited children; then beside it
                control = folder / "cgroup.subtree_control"
                if control.exists() and "memory" in control.read_text().split():
                    yield folder, V2


@functools.cache
def imports_bytes() -> int:
    """What a limit must leave beside VisMoE's budget: what a worker holds when it plans, torch and transformers imported.

    Measured once, in a process and a group of its own, since it follows from what is installed and from which pages of libraries
    are in memory already; 300 MiB with a torch for CPUs. Later workers load other models and may differ: an eighth is added,
    where a twelfth was seen. Most of it comes back: a plan lies above the real growth. Raises ConfigError where that process
    fails.
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
    return found + found // 8


def drop_caches(paths: Iterable[str | Path]) -> int:
    """Write back and drop the cached pages of these files; returns the bytes that remain in the page cache nevertheless (pages
    that another process has mapped).
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
    """Bytes of a file in the page cache."""
    with open(path, "rb") as file:
        return page_cache.cached_bytes(file.fileno(), 0, os.path.getsize(path))
