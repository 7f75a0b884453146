"""What the system is told about memory: which it shall back with huge pages, give pages now, or take pages from.

A page of 2 MiB has one entry in the processor's address cache where 512 pages of 4 KiB have 512, and prefetchers end at the end
of a page: a core reads large weights 1.2 to 1.4 times as fast from huge pages (docs/benchmark.md).
"""

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DONTNEED, HUGEPAGE, NOHUGEPAGE, PAGEOUT, POPULATE_WRITE = 4, 14, 15, 21, 23  # Linux's numbers; the last two since 5.4 and 5.14
FEWEST_BYTES = 4 * 2**20  # of memory that is worth an entry of its own in the system's list


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
