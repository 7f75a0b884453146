"""Positioned reads from files in one call: a thread that reads an expert takes the interpreter lock once, not once a request.

What is promised, and why there is a bounce buffer, says `vismoe/store/files.py`.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vismoe.kernels.library import function

ENDED_EARLY, CHANGED = -1, -2  # what a call may return beside an error's number; 0: all was read

Piece = tuple[int, int]  # address and bytes of memory to fill


class Stretch(NamedTuple):
    """Bytes contiguous in a file that fill these pieces, in their order."""

    file: int
    offset_bytes: int
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.pieces)


class File(ctypes.Structure):
    """An open file, and its state when it was opened."""

    _fields_ = (
        ("descriptor", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("mtime_ns", ctypes.c_int64),
        ("ctime_ns", ctypes.c_int64),
        ("inode", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
    )


class _Read(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_void_p),
        ("stretches", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("bounce", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bounce_bytes", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("logical_block_bytes", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("read", ctypes.c_void_p),
    )


# (descriptor, address of iovecs, how many, offset) -> bytes, or an error's number below zero.
SystemRead = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
system_read: Any = None  # a SystemRead in place of the system's, to test what happens when it fails

_read = function("vismoe_read", [ctypes.POINTER(_Read)], ctypes.c_int64)


def piece_of(memory: np.ndarray) -> Piece:
    """All of a contiguous array, which stays while it is filled."""
    return memory.__array_interface__["data"][0], memory.nbytes


def read(
    files: "ctypes.Array[File]",
    stretches: Sequence[Stretch],
    bounce: np.ndarray | None,
    block_bytes: int,
    logical_block_bytes: int,
) -> tuple[int, int]:
    """Fill the pieces of all stretches -> (what ended it, the stretch that failed).

    `bounce`: uint8, on a block and whole blocks long, where the files are read past the page cache. `logical_block_bytes`: of
    which such a read returns a multiple, except at the end of a file. The files' states are compared after the last read.
    """
    whereabouts = np.array([(one.file, one.offset_bytes, len(one.pieces)) for one in stretches], np.int64)
    pieces = np.array([piece for one in stretches for piece in one.pieces], np.uint64)
    given = _Read(
        ctypes.addressof(files),
        whereabouts.ctypes.data,
        pieces.ctypes.data,
        None if bounce is None else bounce.ctypes.data,
        len(stretches),
        0 if bounce is None else len(bounce),
        block_bytes,
        logical_block_bytes,
        0,
        system_read and ctypes.cast(system_read, ctypes.c_void_p),
    )
    return _read()(ctypes.byref(given)), given.failed
