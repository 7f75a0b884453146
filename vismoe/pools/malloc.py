"""What the C library's heap does with memory that is freed: it returns it to the system, or keeps it while a long pass runs.

glibc adapts to freed sizes: after one forward pass it keeps blocks of up to 32 MiB in its heap, where small long-lived blocks
(kernels that oneDNN generated) come to lie between them, so the holes are neither used nor returned. With torch kernels and a
prompt of 3,000 tokens that was 110 to 160 MiB; packing experts of 9 MiB left 380 MiB behind. With fixed thresholds a tensor above
`LARGE_BLOCK_BYTES` is mapped separately and unmapped when it is freed (with a threshold of 64 KiB: +45% processor time).

A pass over a picture or a long prompt, though, makes and frees thousands of such tensors, and the system gives each its pages
again, one fault for 4 KiB: a third of a picture's time, a tenth of a prompt's (docs/benchmark.md). So while such a pass runs,
`FreedBlocks` leaves freed blocks in the heap, and afterwards returns all of them, holes too. Meanwhile the heap holds more than
what is in use, since later blocks leave pieces of earlier ones unused: after 2,048 tokens 1.4 to 1.9 times as much.
"""

import ctypes
import os
import threading
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGE_BLOCK_BYTES = 2**20
TRIM_BYTES = 16 * 2**20  # free memory that the end of the heap keeps
KEPT_BLOCK_BYTES = (2**30, 2**25)  # up to which blocks are kept in a pass; older versions of glibc take the second at most
NEVER = 2**31 - 1
LEAST_PASS_BYTES = 8 * 2**20  # of a pass: below, to return its blocks takes longer than keeping them saves
# A user's own setting is respected.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")

_lock = threading.Lock()
_keepers: set[object] = set()


class FreedBlocks:
    """What the passes of one model free: `begin`, `check` between layers, `end`."""

    def __init__(self) -> None:
        self._returns = False  # at the end of this pass
        self._most_bytes = 0  # that the process may hold; 0: nothing is kept

    def begin(self, pass_bytes: int, room_bytes: int) -> None:
        """A pass begins that takes about `pass_bytes`; by up to `room_bytes`, which are planned for it, the process may grow."""
        self.end()  # of a pass that failed
        held_bytes = _held_bytes()
        if held_bytes is None or pass_bytes < LEAST_PASS_BYTES:
            return
        self._returns = True
        self._most_bytes = held_bytes + room_bytes
        keep_freed_blocks(self)

    def check(self) -> None:
        """If the process has grown by more, return what is free, and keep nothing in the rest of the pass."""
        if self._most_bytes and (_held_bytes() or 0) > self._most_bytes:
            self._most_bytes = 0
            return_freed_blocks(self)

    def end(self) -> None:
        """The pass has ended: return what is free. May be called twice."""
        if self._returns:
            self._returns, self._most_bytes = False, 0
            return_freed_blocks(self)


def return_large_blocks() -> None:
    """Let glibc return large blocks when they are freed, unless the environment sets this. Other C libraries need nothing."""
    libc = _glibc()
    if libc is not None:
        _return_large(libc)


def share_one_heap() -> None:
    """Make no more heaps for threads that start from now on, unless there are many already: all but the first consist of pieces
    of 64 MiB, which large blocks fill badly."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_ARENA_MAX, 1)


def keep_freed_blocks(keeper: object) -> None:
    """Until `return_freed_blocks(keeper)`, the heap keeps what is freed, of all threads."""
    libc = _glibc()
    if libc is None:
        return
    with _lock:
        _keepers.add(keeper)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
        for nbytes in KEPT_BLOCK_BYTES:
            if libc.mallopt(M_MMAP_THRESHOLD, nbytes):
                break


def return_freed_blocks(keeper: object) -> None:
    """What is free goes back to the system now, and what will be freed as well, unless another keeper is left."""
    libc = _glibc()
    if libc is None:
        return
    with _lock:
        _keepers.discard(keeper)
        libc.malloc_trim(0)
        if _keepers:
            return
        _return_large(libc)
        # The end of another heap than the first one is returned when a block above 64 KiB is freed there.
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.free(libc.malloc(LARGE_BLOCK_BYTES // 2))
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def _return_large(libc: Any) -> None:
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def _glibc() -> Any:
    """The C library; None where it is another one, or the environment sets what it does."""
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim") or any(name in os.environ for name in VARIABLES):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def _held_bytes() -> int | None:
    """Of this process, in memory; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE
    except OSError:
        return None
