"""Slab pools: one allocation, cut into fixed-size blocks at start; taking and freeing a slab is O(1) and never allocates.

A slab holds one record (one expert in one format) and starts on a 64-byte boundary, which float32 GEMV needs to give the same
bits as freshly allocated weights. A pool in host memory starts on a disk block's boundary, so that O_DIRECT can read into slabs
of whole blocks. Where the layout has room, a record begins in its slab where a disk can write it to (`place`), for kernels that
compute from any address. The page table, not the pool, knows which expert a slab holds.
"""

import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vismoe.pools.advice import DONTNEED, NOHUGEPAGE, advise, in_huge_pages, whole_pages
from vismoe.pools.backing import Backing
from vismoe.pools.page_lock import page_lock
from vismoe.types import BLOCK_BYTES, RecordLayout

Filled = dict[Any, tuple[int, int]]  # by what a record holds: its slab, and from which byte of its room on


class SlabPool:
    """`slabs` blocks of one record layout on one device; `page_locked` host memory for fast copies to a GPU.

    With `aliased=True` the pool owns no bytes: each slab shows a record that was aliased into it (an emulated device tier on a
    machine without a device, where slabs are the host tier's records). `early` may have memory of so many bytes, in host memory,
    for slabs of so many, whose first pages are there already, and records in some: before any is used, `filled` says in which.
    """

    precision: np.ndarray | None = None  # None: one format in all slabs; `Slabs` combines pools of several formats

    def __init__(
        self,
        layout: RecordLayout,
        slabs: int,
        device: torch.device | str = "cpu",
        page_locked: bool = False,
        aliased: bool = False,
        early: Callable[[int, int], tuple[torch.Tensor, Callable[[], Filled]] | None] | None = None,
    ):
        self.layout, self.capacity, self.aliased = layout, slabs, aliased
        nbytes = 0 if aliased else slabs * layout.record_bytes
        boundary = max(BLOCK_BYTES, mmap.PAGESIZE)  # pages are locked
        taken = early(nbytes + boundary, layout.record_bytes) if early is not None and nbytes else None
        self.filled: Callable[[], Filled] = dict
        memory = None
        if taken is not None:
            memory, self.filled = taken
        if memory is None:
            memory = in_huge_pages(torch.empty(nbytes + boundary, dtype=torch.uint8, device=device))
        start = -memory.data_ptr() % boundary
        assert taken is None or start == 0, "it begins on a page"
        self.buffer = memory[start : start + nbytes].view(-1, layout.record_bytes)
        if page_locked:
            page_lock(self.buffer, self)
        # Slabs of ordinary memory can give their pages back, and get empty ones with the next write.
        on_host = self.buffer.device.type == "cpu" and not (page_locked or aliased)
        self.elastic = on_host and sys.platform == "linux"
        self._first = memory.data_ptr() + start  # where the first slab begins
        self._backing = Backing(self.buffer, self._first, nbytes if self.elastic else 0)
        self.addresses = self._first + layout.record_bytes * np.arange(slabs)  # int64 [S], of records, on the pool's device
        self._views: list[dict[str, torch.Tensor]] = [{} for _ in range(slabs)]
        if not (aliased or layout.room_bytes):
            self._views = [layout.views(record) for record in self.buffer]
        self._free = list(range(slabs - 1, -1, -1))
        self._is_free = [True] * slabs

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    @property
    def free(self) -> int:
        """Number of free slabs."""
        return len(self._free)

    def take(self) -> int | None:
        """The index of a free slab, which is then taken; None if all are taken."""
        if not self._free:
            return None
        slab = self._free.pop()
        self._is_free[slab] = False
        return slab

    @property
    def gets_pages(self) -> bool:
        """Threads are giving its memory pages ahead of the first write."""
        return self._backing.gives

    @property
    def has_pages(self) -> bool:
        """They have, for all of it, or none have to."""
        return self._backing.has_given

    def rest(self, until_s: float) -> None:
        """Until then, in seconds of `time.perf_counter`, it `rests`, and gets no pages ahead: the cores are for requests. A new
        time replaces the one before."""
        self._backing.rest(until_s)

    @property
    def rests(self) -> bool:
        """Nothing shall be brought in that nothing wants."""
        return self._backing.rests

    def give_back(self, slab: int) -> None:
        assert not self._is_free[slab], f"slab {slab} was freed twice"
        self._is_free[slab] = True
        self._free.append(slab)

    def page_bytes(self, slab: int) -> int:
        """Of the pages that lie in this slab alone."""
        first, end = whole_pages(self._start(slab), self.layout.record_bytes)
        return end - first

    def unback(self, slab: int) -> bool:
        """Give the pages of a taken slab, and what is in them, back to the system; whether it took them. Where transparent huge
        pages are always on, the kernel may give small slabs pages again by itself."""
        assert self.elastic and not self._is_free[slab], f"slab {slab} is free, or its memory is not ours to give"
        place = self._start(slab), self.layout.record_bytes
        self._backing.stop()  # or it would give the slab new pages
        advise(*place, NOHUGEPAGE)  # or the kernel would make the huge pages whole again that this tears apart
        return advise(*place, DONTNEED)

    def free_only(self, slabs: list[int]) -> None:
        """Make exactly these slabs free; repairs the pool after an interrupt."""
        self._free = sorted(slabs, reverse=True)
        self._is_free = [False] * self.capacity
        for slab in slabs:
            self._is_free[slab] = True

    def bytes_of(self, slab: int) -> int:
        """Bytes of a slab's record."""
        return self.layout.record_bytes

    def _start(self, slab: int) -> int:
        return self._first + slab * self.layout.record_bytes

    def place(self, slab: int, begin: int) -> None:
        """Let the record of a taken slab, which holds none yet, begin at this byte of the layout's room."""
        assert 0 <= begin < self.layout.room_bytes and not self._is_free[slab], (slab, begin)
        self.addresses[slab] = self._start(slab) + begin

    def record(self, slab: int) -> torch.Tensor:
        """The bytes of the slab's record, uint8 `[record_bytes]`; where it begins in a room, those up to the slab's end."""
        return self.buffer[slab, int(self.addresses[slab]) - self._start(slab) :] if self.layout.room_bytes else self.buffer[slab]

    def weights(self, slab: int) -> dict[str, torch.Tensor]:
        """Typed views of the slab's sections, created once where records do not move."""
        return self.layout.views(self.record(slab)) if self.layout.room_bytes else self._views[slab]

    def alias(self, slab: int, other: "SlabPool", others_slab: int) -> None:
        """Make an aliased pool's slab show another pool's record."""
        assert self.aliased
        self._views[slab], self.addresses[slab] = other._views[others_slab], other.addresses[others_slab]

    def check_integrity(self) -> None:
        assert len(self._free) == len(set(self._free)) == sum(self._is_free), "free list and free flags disagree"
        assert all(self._is_free[slab] for slab in self._free)
