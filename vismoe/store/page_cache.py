"""How much of a file the page cache holds, asked from the kernel without reading anything."""

import ctypes
import mmap

import numpy as np

PAGE_BYTES = mmap.PAGESIZE


def cached_bytes(descriptor: int, offset_bytes: int, nbytes: int) -> int:
    """Bytes of the pages of a part of an open file that are in the page cache, by mincore; 0 for what lies behind its end.

    The kernel says that all of it is there to a process that neither owns the file nor may write to it. Raises OSError.
    """
    first = offset_bytes // PAGE_BYTES * PAGE_BYTES
    nbytes += offset_bytes - first
    try:
        mapped = mmap.mmap(descriptor, max(1, nbytes), prot=mmap.PROT_READ, offset=first)  # its memory is not touched
    except ValueError:  # the file is shorter
        return 0
    resident = np.empty(-(-nbytes // PAGE_BYTES), np.uint8)
    pages = np.frombuffer(mapped, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data))
    del pages  # the mapping cannot be closed while an array refers to it
    mapped.close()
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((resident & 1).sum()) * PAGE_BYTES
