"""Pages for memory ahead of the first use, without the interpreter lock.

The system can be asked for pages (`MADV_POPULATE_WRITE`), but it keeps a lock of the whole process for a request: every library
that is imported meanwhile waits for it, which made importing transformers 1.9 to 2.9 times as long. A write to each page takes
that lock for one page, and since Linux 6.4 not at all.
"""

import ctypes
import mmap

from vismoe.kernels.library import function

_arguments = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
_function = function("vismoe_give_pages", _arguments, ctypes.c_size_t)


def give_pages(address: int, nbytes: int, stopped: "ctypes.c_int32 | None" = None) -> int:
    """Let all pages of this memory exist, which keeps its bytes, whoever writes to them meanwhile. Ends early once `stopped` is
    not 0; returns the bytes whose pages are there."""
    return int(_function()(address, nbytes, mmap.PAGESIZE, ctypes.byref(stopped if stopped is not None else ctypes.c_int32())))
