"""Which expert is evicted when a slab is needed: a function of a page table's arrays, in kernels/csrc/eviction.cpp.

The order (VisMMoE 3.4.2): *streamed* (read for one prefill chunk and used up), then *expired* (its layer is not among the
next W MoE layers, whichever token brought it in), then *speculative* (in the window, prefetched,
not yet demanded), then *window-protected* (in the window and demanded before), farthest layer first. Within a class the
lowest worth goes first; ties by slab index. The window does not wrap over the end of the model.

An expert that is promised to the running round (promises.py) leaves only when a demand finds no other, farthest layer first.

Never taken: free slabs (there is nothing in them), loading or pinned ones, and what the running layer still has to compute.
A prefetch may take only the first three classes, and a speculative slab only from a lower priority than its own; never what is
promised.
"""

import ctypes
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from vismoe.kernels.library import function
from vismoe.types import HIGH

_PLACE, _NUMBER, _COUNT, _DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_victim = function("vismoe_victim", [_PLACE, _NUMBER, _NUMBER, _NUMBER, _DOUBLE, _COUNT], _NUMBER)
_take_slabs = function("vismoe_take_slabs", [_PLACE, _PLACE, *[_NUMBER] * 5, *[_PLACE] * 4], _NUMBER)
MOST_AT_ONCE = 64  # experts of one `take`


@dataclass(frozen=True)
class TableArrays:
    """Of a page table, which says what they mean; they are changed in place only. By slab `[S]`, then by expert `[F]`."""

    expert_in: np.ndarray  # int32
    layer_in: np.ndarray  # int32
    left_for: np.ndarray  # int32
    state: np.ndarray  # uint8
    pinned: np.ndarray  # this and the next five: bool
    demanded: np.ndarray
    ring: np.ndarray
    streamed: np.ndarray
    speculative: np.ndarray
    borrowed: np.ndarray
    worth: np.ndarray  # float64
    slab_of: np.ndarray  # int32
    incoming: np.ndarray  # int32
    promised: np.ndarray  # bool
    displaced: np.ndarray  # bool
    priorities: np.ndarray  # float32
    uses: np.ndarray  # float64


TYPES = "iiiB??????dii??fd"


class _Table(ctypes.Structure):
    _fields_ = [
        *((field.name, ctypes.c_void_p) for field in fields(TableArrays)),
        ("precision", ctypes.c_void_p),
        ("slabs", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("resident", "loading", "by_tick")),
    ]


class Taken(NamedTuple):
    """Slabs of all experts that a layer demands."""

    experts: list[int]  # ascending
    slabs: np.ndarray  # int32 [n], where each is or will be
    missing: list[int]  # indices in `experts` of those that are to be copied
    evicted: list[int]  # the experts (flat) whose slabs these get, in that order
    unused: list[int]  # those of `evicted` that came on a guess which nothing demanded


class Eviction:
    """Of one page table. `precision` uint8 `[S]`: the format of each slab, None if there is one; resident, loading: states;
    by_tick: what a slab is worth is its last use."""

    def __init__(self, arrays: TableArrays, precision: np.ndarray | None, resident: int, loading: int, by_tick: bool):
        self._arrays, self._precision = arrays, precision  # the native side has their addresses
        found = [getattr(arrays, field.name) for field in fields(TableArrays)]
        for array, dtype in zip(found, TYPES, strict=True):
            assert array.dtype == np.dtype(dtype) and array.flags.c_contiguous, (array.dtype, dtype)
        places = [array.ctypes.data for array in found]
        kinds = None if precision is None else precision.ctypes.data
        self._table = _Table(*places, kinds, len(arrays.state), resident, loading, by_tick)
        self._at = ctypes.addressof(self._table)
        self._room = np.empty((4, MOST_AT_ONCE), dtype=np.int32)
        self._room_at = [row.ctypes.data for row in self._room]

    def reads(self, table: object) -> bool:
        """Whether these are still its arrays."""
        return all(getattr(table, field.name) is getattr(self._arrays, field.name) for field in fields(TableArrays))

    def victim(
        self, running_layer: int, window: int, priority: float | None = None, precision: int = HIGH, free: int = 0
    ) -> int | None:
        """The slab of this format to take next; None when none may be taken.

        `running_layer` is the MoE layer being computed (-1 before the first); layers `running_layer + 1 .. + window` are
        protected. `priority` is None for a demand; for a prefetch it is that of the expert that wants in, and one slab is left
        that a demand can take: one of the `free` ones, or another.
        """
        slab: int = _victim()(self._at, running_layer, window, precision, math.nan if priority is None else priority, free)
        return None if slab < 0 else slab

    def take(self, ids: np.ndarray, base: int, experts: int, running_layer: int, window: int) -> Taken | None:
        """Slabs for what one token demands of the running layer, where slabs have one format and none is free: int64 `[n]`
        different ids of its `experts`, the first of which has the flat index `base`. What is missing is loading afterwards, and
        all is demanded. None, and nothing has changed, where more is to be done: an expert is on its way, is a guess or left for
        one, or too few slabs can be taken.
        """
        count = len(ids)
        assert ids.dtype == np.int64 and ids.flags.c_contiguous and count <= MOST_AT_ONCE, (ids.dtype, ids.shape)
        at = ids.__array_interface__["data"][0]
        lacking = _take_slabs()(self._at, at, count, base, experts, running_layer, window, *self._room_at)
        if lacking < 0:
            return None
        wanted, slabs, missing, evicted = self._room
        left = evicted[:lacking].tolist()
        unused = [-2 - flat for flat in left if flat < 0]
        left = [flat if flat >= 0 else -2 - flat for flat in left]
        return Taken(wanted[:count].tolist(), slabs[:count].copy(), missing[:lacking].tolist(), left, unused)
