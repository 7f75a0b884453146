"""Memory that ends where a page ends, before one that nobody can read."""

import ctypes
import mmap

import torch


class Guarded:
    """Bytes that end where readable memory ends: one byte too far is a segmentation fault."""

    def __init__(self, content: torch.Tensor):
        size = max(1, -(-content.numel() // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(whole.data_ptr() + size), mmap.PAGESIZE, 0)
        assert not failed, ctypes.get_errno()
        self.bytes = whole[size - content.numel() : size]
        self.bytes.copy_(content)
