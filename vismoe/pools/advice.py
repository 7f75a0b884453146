"""What the system is told about memory: which it shall back with huge pages, give pages now, or take pages from.

A page of 2 MiB has one entry in the processor's address cache where 512 pages of 4 KiB have 512, and prefetchers end at the end
of a page: a core reads large weights 1.2 to 1.4 times as fast from huge pages (docs/benchmark.md). A disk is given one address
for each contiguous piece of memory, and a virtual disk may serve each piece apart: O_DIRECT into huge pages was five times as
fast.
"""

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

DONTNEED, HUGEPAGE, NOHUGEPAGE, PAGEOUT, POPULATE_WRITE = 4, 14, 15, 21, 23  # Linux's numbers; the last two since 5.4 and 5.14
FEWEST_BYTES = 4 * 2**20  # of memory that is worth an entry of its own in the system's list
HUGE_PAGE_BYTES = 2 * 2**20
LEAST_HUGE_BYTES = 2**18  # of a buffer for reading that is worth a huge page


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(begin, end) of the whole pages within this memory; equal where there are none."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    return first, max(first, (address + nbytes) // page * page)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Advise about the whole pages within this memory; whether the system took the advice."""
    first, end = whole_pages(address, nbytes)
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    return madvise is not None and end > first and madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) == 0


def in_huge_pages(memory: "Tensor") -> "Tensor":
    """The same memory, to which nothing was written yet: the system backs it with huge pages from now on, where it has them."""
    if memory.device.type == "cpu" and memory.nbytes >= FEWEST_BYTES:
        advise(memory.data_ptr(), memory.nbytes, HUGEPAGE)
    return memory


def _page_bytes(buffer_bytes: int) -> int:
    """Bytes of the pages that a buffer for reading is made of."""
    return HUGE_PAGE_BYTES if buffer_bytes >= LEAST_HUGE_BYTES else mmap.PAGESIZE


def buffer_bytes(nbytes: int) -> int:
    """What `block_buffer` takes for so many bytes."""
    page = _page_bytes(nbytes)
    return -(-nbytes // page) * page


def block_buffer(nbytes: int) -> np.ndarray:
    """uint8 `[nbytes]` that starts on a page, as O_DIRECT requires; large ones in huge pages where the system has them."""
    page, taken = _page_bytes(nbytes), buffer_bytes(nbytes)
    addresses = mmap.mmap(-1, taken + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is not written takes no memory
    memory = np.frombuffer(addresses, dtype=np.uint8)
    address: int = memory.__array_interface__["data"][0]
    start = -address % page
    if page == HUGE_PAGE_BYTES:
        advise(address + start, taken, HUGEPAGE)
    return memory[start : start + nbytes]
