"""Positioned reads from files without the interpreter lock: in one call, or by native threads while experts are computed.

What is promised, and why there is a bounce buffer, says `vismoe/store/files.py`.
"""

import copy
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vismoe.kernels.library import function

ENDED_EARLY, CHANGED = -1, -2  # what ends a read beside an error's number; 0: all is there
MOST_BYTES = 2**30  # of one call, unless less is asked for; Linux reads up to twice as much

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


class FileAccess(ctypes.Structure):
    """How files are read: past the page cache by a bounce buffer of so many bytes, whole blocks, or (0) through it. Reads past it
    return a multiple of a logical block, except at the end of a file. They go straight to where memory has the alignment
    `memory_bytes` that their place in the file has, but for the blocks at their edges. One call of the system reads up to
    `most_bytes`, whole blocks: other reads of the disk wait until it has made what was asked before them."""

    _fields_ = (
        ("files", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("bounce_bytes", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("logical_block_bytes", ctypes.c_int64),
        ("memory_bytes", ctypes.c_int64),
        ("most_bytes", ctypes.c_int64),
    )

    @classmethod
    def of(
        cls,
        files: "ctypes.Array[File]",
        bounce_bytes: int,
        block_bytes: int,
        logical_block_bytes: int,
        memory_bytes: int,
        most_bytes: int = MOST_BYTES,
    ) -> "FileAccess":
        """`files` must stay."""
        spoiled = system_read and ctypes.cast(system_read, ctypes.c_void_p)
        blocks = block_bytes, logical_block_bytes
        return cls(ctypes.addressof(files), spoiled, bounce_bytes, *blocks, memory_bytes, most_bytes)


class _OnDisk(ctypes.Structure):
    _fields_ = (
        ("way", FileAccess),
        ("stretches", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("first_stretch", ctypes.c_void_p),
        ("first_piece", ctypes.c_void_p),
    )


class Arrival(ctypes.Structure):
    """A record that native threads read; csrc/read.h. `at`: which of a call's records."""

    _fields_ = (
        ("of", ctypes.c_void_p),
        ("expert", ctypes.c_int64),
        ("record", ctypes.c_void_p),
        ("at", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("begun", ctypes.c_int64),
        ("left", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("began_s", ctypes.c_double),
        ("ended_s", ctypes.c_double),
    )

    @property
    def has_begun(self) -> bool:
        """Native threads read it, or have."""
        return self.left > 0 or self.begun > 0


# (descriptor, address of iovecs, how many, offset) -> bytes, or an error's number below zero.
SystemRead = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
system_read: Any = None  # a SystemRead in place of the system's, to test what happens when it fails

_PLACE = ctypes.c_void_p
_read = function("vismoe_read", [ctypes.POINTER(FileAccess), _PLACE, ctypes.c_int64, _PLACE, _PLACE, _PLACE], ctypes.c_int64)
_memory_alignment = function("vismoe_memory_alignment", [ctypes.c_int64], ctypes.c_int64)
_begin_reading = function("vismoe_begin_reading", [_PLACE, ctypes.c_size_t], ctypes.c_int32)
_read_at_once = function("vismoe_read_at_once", [ctypes.POINTER(Arrival)], ctypes.c_int32)
_wait_for_reading = function("vismoe_wait_for_reading", [_PLACE, ctypes.c_size_t])
_start_readers = function("vismoe_start_readers", [ctypes.c_size_t])


def piece_of(memory: np.ndarray) -> Piece:
    """All of a contiguous array, which stays while it is filled."""
    return memory.__array_interface__["data"][0], memory.nbytes


def read(way: FileAccess, stretches: Sequence[Stretch], bounce: np.ndarray | None) -> tuple[int, int]:
    """Fill the pieces of all stretches -> (what ended it, the stretch that failed). The files' states are compared after the last
    read. `bounce`: uint8, of the way's size, on a block."""
    whereabouts = np.array([(one.file, one.offset_bytes, len(one.pieces)) for one in stretches], np.int64)
    pieces = np.array([piece for one in stretches for piece in one.pieces], np.uint64)
    failed = ctypes.c_int64()
    places = whereabouts.ctypes.data, len(stretches), pieces.ctypes.data, None if bounce is None else bounce.ctypes.data
    return _read()(ctypes.byref(way), *places, ctypes.byref(failed)), failed.value


def memory_alignment(descriptor: int) -> int:
    """To what memory has to be aligned that this file is read into past the page cache; 0: the system does not say."""
    return _memory_alignment()(descriptor)


def begin_reading(arrivals: Sequence[Arrival]) -> None:
    """Native threads begin with these, and share the stretches of each. They must stay until they are done."""
    _refuse(_begin_reading()(places_of(arrivals), len(arrivals)))


def read_at_once(arrival: Arrival) -> None:
    """The same for one; returns when it is done. Ctrl-C cannot come while it is being read."""
    _refuse(_read_at_once()(ctypes.byref(arrival)))


def wait_for_reading(arrivals: Sequence[Arrival]) -> None:
    """Return when all of these, which have begun, are done."""
    _wait_for_reading()(places_of(arrivals), len(arrivals))


def start_readers(threads: int) -> None:
    """So many native threads at least read what arrives from now on."""
    _start_readers()(threads)


class OnDisk:
    """Where experts lie in files, for native threads: `stretches` of each expert, whose pieces are (begin in the record, bytes).
    No stretches: that expert is not read so."""

    def __init__(self, way: FileAccess, stretches: Sequence[Sequence[Stretch]], keep: Any):
        """`keep`: what the way's files belong to."""
        self._keep = keep
        self.stretches = stretches
        every = [stretch for of_expert in stretches for stretch in of_expert]
        self._arrays = (
            np.array([(one.file, one.offset_bytes, len(one.pieces)) for one in every], np.int64),
            np.array([piece for one in every for piece in one.pieces], np.int64),
            np.cumsum([0, *map(len, stretches)]),
            np.cumsum([0, *(sum(len(one.pieces) for one in of_expert) for of_expert in stretches)]),
        )
        self._read_by(way)

    def _read_by(self, way: FileAccess) -> None:
        self._native = _OnDisk(way, *(array.ctypes.data for array in self._arrays))
        self._at = ctypes.addressof(self._native)

    def by(self, way: FileAccess, keep: Any) -> "OnDisk":
        """The same experts, of files that are read in another way."""
        other = copy.copy(self)
        other._keep = keep
        other._read_by(way)
        return other

    def arrival(self, expert: int, record: int) -> Arrival:
        """Of an expert, by its number here, in the record at this address. This table must stay until it is done."""
        return Arrival(self._at, expert, record)


def _refuse(failed: int) -> None:
    if failed:
        raise MemoryError("there is no memory for a list of what native threads are to read, or none for a thread")


def places_of(arrivals: Sequence[Arrival]) -> "ctypes.Array[ctypes.c_void_p]":
    """Their addresses, for a native call."""
    return (ctypes.c_void_p * len(arrivals))(*map(ctypes.addressof, arrivals))
