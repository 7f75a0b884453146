"""How much of a file the page cache holds, and which files this process has mapped, asked from the kernel without reading any."""

import ctypes
import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
SMAPS = Path("/proc/self/smaps")
PASSING = threading.Lock()  # held while a file is mapped for a moment: its addresses may be another's memory at once
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+\s+(/.*)")  # first line of a mapping in smaps


def cached_bytes(descriptor: int, offset_bytes: int, nbytes: int) -> int:
    """Bytes of the pages of a part of an open file that are in the page cache, by mincore; 0 for what lies behind its end.

    The kernel says that all of it is there to a process that neither owns the file nor may write to it. Raises OSError.
    """
    first = offset_bytes // PAGE_BYTES * PAGE_BYTES
    nbytes += offset_bytes - first
    resident = np.empty(-(-nbytes // PAGE_BYTES), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    with PASSING:
        try:
            mapped = mmap.mmap(descriptor, max(1, nbytes), prot=mmap.PROT_READ, offset=first)  # its memory is not touched
        except ValueError:  # the file is shorter
            return 0
        pages = np.frombuffer(mapped, np.uint8)
        failed = libc.mincore(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data))
        del pages  # the mapping cannot be closed while an array refers to it
        mapped.close()
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return int((resident & 1).sum()) * PAGE_BYTES


class Mapping(NamedTuple):
    """A mapped file: addresses, and the offset in the file where they begin. has_copies: pages were written, and so differ from
    the file."""

    start: int
    end: int
    offset_bytes: int
    path: str
    has_copies: bool


def mappings() -> Iterator[Mapping]:
    """Every file that this process has mapped; none where the system does not say. Those of `cached_bytes` pass: who writes to
    addresses, or gives up what lies there, holds PASSING meanwhile."""
    begun: re.Match[str] | None = None
    for line in SMAPS.read_text().splitlines() if SMAPS.exists() else []:
        if found := MAPPING.fullmatch(line):
            begun = found
        elif line.startswith("Anonymous:") and begun is not None:
            start, end, offset = (int(begun[number], 16) for number in (1, 2, 3))
            yield Mapping(start, end, offset, begun[4], int(line.split()[1]) > 0)
            begun = None
