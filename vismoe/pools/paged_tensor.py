"""One virtual range for all experts of a kind, with blocks of memory bound under it where an expert is there.

Code of others wants an `[E, ...]` tensor; slabs lie anywhere. `PagedTensor.window(layer)` is such a tensor: the bytes of expert e
are those of the block that is bound to it, and a block may be bound to several places. Our own kernels take addresses instead,
which costs nothing (docs/paging.md has the figures).

Two backends with one interface. `HostMemory` maps a memfd with MAP_FIXED; it is the double that the other one is tested against.
`CudaMemory` (cuda_memory.py) uses CUDA's virtual memory management.
"""

import ctypes
import mmap
import os
from typing import Protocol

import torch

from vismoe.errors import TransferError

MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_POPULATE = 1, 2, 0x10, 0x20, 0x4000, 0x8000  # Linux's
PROT_NONE, PROT_READ_WRITE = 0, 3


class VirtualMemory(Protocol):
    """Blocks of memory, and a range of addresses to map them into. Offsets and sizes are multiples of `granularity`."""

    granularity: int  # bytes

    def reserve(self, nbytes: int, blocks: int, block_bytes: int) -> int:
        """Reserve a range of addresses -> its first one, and make the blocks. Once."""

    def map(self, offset: int, block: int) -> None:
        """The block appears at this offset of the range, where nothing is mapped."""

    def unmap(self, offset: int) -> None:
        """Nothing is mapped there any more; the block keeps its bytes."""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` over the range, which must not outlive this. Only what is mapped may be touched."""

    def close(self) -> None:
        """Give the range and the blocks back; may be called twice."""


class HostMemory:
    """Blocks of a memfd, mapped by MAP_FIXED. Linux."""

    def __init__(self) -> None:
        self.granularity = mmap.PAGESIZE
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._start = self._bytes = self._block_bytes = 0
        self._file = -1

    def reserve(self, nbytes: int, blocks: int, block_bytes: int) -> int:
        self._file = os.memfd_create("vismoe-blocks")
        os.ftruncate(self._file, blocks * block_bytes)
        self._bytes, self._block_bytes = nbytes, block_bytes
        self._start = self._mmap(0, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        return self._start

    def map(self, offset: int, block: int) -> None:
        flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE
        self._mmap(self._start + offset, self._block_bytes, PROT_READ_WRITE, flags, self._file, block * self._block_bytes)

    def unmap(self, offset: int) -> None:
        """By reserving the addresses again, so that nothing else comes to lie there."""
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._mmap(self._start + offset, self._block_bytes, PROT_NONE, flags, -1, 0)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(self._start + offset), dtype=torch.uint8)

    def close(self) -> None:
        if self._file >= 0:
            self._libc.munmap(ctypes.c_void_p(self._start), ctypes.c_size_t(self._bytes))
            os.close(self._file)
            self._file = -1

    def _mmap(self, address: int, nbytes: int, access: int, flags: int, file: int, offset: int) -> int:
        found: int = self._libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access, flags, file, ctypes.c_int64(offset)
        )
        if found in (None, ctypes.c_void_p(-1).value):
            why = os.strerror(ctypes.get_errno())
            raise TransferError(f"{nbytes} bytes could not be mapped: {why}. Fix: raise vm.max_map_count, or use slabs")
        return found


class PagedTensor:
    """`layers` x `experts` places of `nbytes` each in one range, and `blocks` of memory for some of them.

    A place is a whole number of granules, so `window` has gaps between experts where `nbytes` is none; `place_bytes` says how far
    they are apart. Raises TransferError where the system refuses.
    """

    def __init__(self, layers: int, experts: int, nbytes: int, blocks: int, memory: VirtualMemory):
        self.layers, self.experts, self.nbytes, self.blocks, self._memory = layers, experts, nbytes, blocks, memory
        self.place_bytes = -(-nbytes // memory.granularity) * memory.granularity
        self.address = memory.reserve(layers * experts * self.place_bytes, blocks, self.place_bytes)
        self._bound: dict[tuple[int, int], int] = {}

    def bind(self, layer: int, expert: int, block: int) -> None:
        """The expert's bytes are those of this block from now on. The block may be bound to other experts too."""
        assert 0 <= layer < self.layers and 0 <= expert < self.experts and 0 <= block < self.blocks, (layer, expert, block)
        if (layer, expert) in self._bound:
            self.unbind(layer, expert)
        self._memory.map(self._offset(layer, expert), block)
        self._bound[layer, expert] = block

    def unbind(self, layer: int, expert: int) -> None:
        """The expert is not there any more; its block keeps its bytes."""
        del self._bound[layer, expert]
        self._memory.unmap(self._offset(layer, expert))

    def bound(self, layer: int, expert: int) -> int | None:
        """The block of an expert."""
        return self._bound.get((layer, expert))

    def window(self, layer: int) -> torch.Tensor:
        """uint8 `[E, nbytes]` with the experts of a layer, while this is open; touching one that is not bound crashes. Take
        views of it for other types: `window(layer).view(torch.bfloat16).unflatten(1, (rows, columns))`."""
        whole = self._memory.tensor(self._offset(layer, 0), self.experts * self.place_bytes)
        return whole.view(self.experts, self.place_bytes)[:, : self.nbytes]

    def close(self) -> None:
        """Give everything back; may be called twice. No window may be used afterwards."""
        for place in list(self._bound):
            self.unbind(*place)
        self._memory.close()

    def _offset(self, layer: int, expert: int) -> int:
        return (layer * self.experts + expert) * self.place_bytes
