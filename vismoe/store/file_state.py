"""Detects whether a file has changed, by its size and times; the time of change (ctime) cannot be set back.

Every write sets the ctime before its bytes can be read; so does a change of mode, owner or links, and renaming, replacing or
deleting the file. Reading does not set it, nor does renaming a folder above. Not detected: writes through a memory mapping that
was written to before the file was opened, because file systems do not date those.
"""

import os
import time
from typing import NamedTuple

from vismoe.errors import CheckpointError

TICK_S = 0.011  # longer than a tick of the clock that dates changes


class FileChangedError(CheckpointError):
    """A file has changed since it was opened."""


class FileState(NamedTuple):
    """Identity, size and times of a file; two states are equal as long as the file has not changed."""

    file_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    def difference(self, now: "FileState") -> str:
        """A sentence that says how the file differs in state `now`."""
        if (self.device, self.inode) != (now.device, now.inode):
            return "another file is in its place"
        if self.file_bytes != now.file_bytes:
            return f"it had {self.file_bytes} bytes and has {now.file_bytes}"
        if self.mtime_ns != now.mtime_ns:
            return f"its {now.file_bytes} bytes were written to {_apart(self.mtime_ns, now.mtime_ns)}"
        return (
            f"it was changed {_apart(self.ctime_ns, now.ctime_ns)} but its time of writing was kept or set back: it was written "
            "to, moved, replaced or deleted, or its mode, owner or links were changed"
        )


def _apart(before_ns: int, now_ns: int) -> str:
    return f"{abs(now_ns - before_ns) / 1e9:.3f} s {'later' if now_ns > before_ns else 'earlier by its date'}"


def examined(descriptor: int) -> FileState:
    """The state of an open file. Waits a tick if the file has just changed, so that any later write gives another state."""
    age_s = time.time() - os.fstat(descriptor).st_ctime
    if age_s < TICK_S:
        time.sleep(min(TICK_S, TICK_S - age_s))
    return FileState.of(os.fstat(descriptor))
