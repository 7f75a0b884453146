"""Facts about a worker's own process: bytes read from storage, the most memory it held, files that it has mapped.

Linux reports them in /proc; elsewhere, values are None or the nearest that the system has. Imports nothing heavy.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

from vismoe.pools.advice import DONTNEED, PAGEOUT, advise
from vismoe.store.page_cache import PASSING, mappings

PROC = Path("/proc/self")
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, however that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def disk_bytes() -> int | None:
    """Bytes that this process has read from storage so far, including page faults in mapped files; None if not counted."""
    if not (PROC / "io").exists():
        return None
    return int(dict(line.split(": ") for line in (PROC / "io").read_text().splitlines())["read_bytes"])


def difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def peak_rss_bytes() -> int:
    """The most memory this program held at once. getrusage would include memory from before the process executed this program."""
    if (PROC / "status").exists():
        line = next(line for line in (PROC / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_mapped(paths: Iterable[str | Path]) -> None:
    """Release the pages of these files that mappings of this process hold, so that they can leave the page cache.

    A mapping without private copies reads its file again when it is accessed; one with copies keeps those.
    """
    wanted = {os.path.realpath(path) for path in paths}
    with PASSING:
        for one in sorted(mappings(), key=attrgetter("has_copies")):  # a page that is mapped twice is not paged out
            if one.path in wanted:
                advise(one.start, one.end - one.start, PAGEOUT if one.has_copies else DONTNEED)
