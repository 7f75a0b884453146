"""Replaces the system's positioned read, to see and to spoil what is read."""

import ctypes
import os
from collections.abc import Callable

import numpy as np

from vismoe.kernels import read


def replace(monkeypatch, reading: Callable[[int, list[memoryview], int], int]) -> None:
    """`reading` reads as `os.preadv` does: (descriptor, buffers, offset) -> bytes; it may raise OSError."""

    def called(descriptor: int, pieces: int, count: int, offset: int) -> int:
        iovecs = np.frombuffer((ctypes.c_uint64 * (2 * count)).from_address(pieces), np.uint64).reshape(count, 2).tolist()
        buffers = [memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B") for address, nbytes in iovecs]
        try:
            return reading(descriptor, buffers, offset)
        except OSError as error:
            return -error.errno

    monkeypatch.setattr(read, "system_read", read.SystemRead(called))
    monkeypatch.setattr(os, "preadv", reading)  # of the first block, by which a filesystem is tried
