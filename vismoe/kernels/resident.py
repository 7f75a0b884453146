"""One MoE layer of a few tokens, whose experts are all resident, in one call: from the router's choices to the layer's output.

The call looks the slabs up in the page table's own arrays, computes and adds up as `ExpertKernel.parts` and `combine` do, and
counts what the table and the metrics count. Where anything is missing it changes nothing and says so.
"""

import ctypes
import enum
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vismoe.kernels import cpu
from vismoe.kernels.library import function
from vismoe.kernels.rows import NUMBER_OF

_SIZE, _PLACE, _NUMBER, _DOUBLE = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32, ctypes.c_double
_resident = function(
    "vismoe_resident",
    [_PLACE, _PLACE, _SIZE, _SIZE, _PLACE, _NUMBER, _PLACE, _NUMBER, _NUMBER, _PLACE, _PLACE, _DOUBLE, _DOUBLE, _PLACE],
    _NUMBER,
)
MOST_PAIRS = 1024  # of a token and one of its experts, in one call


class Outcome(enum.IntEnum):
    """How the experts of a token are added up, as in csrc/kernels.h: from a row of each, or as those of prompts."""

    APART = 0
    ADDED = 1


@dataclass(frozen=True)
class LayerArrays:
    """Where the experts of one layer are, and what is counted about them: arrays that live as long as this, by expert `[E]` or by
    slab `[S]`."""

    slab_of: np.ndarray  # int32 [E], -1: absent
    state: np.ndarray  # uint8 [S]
    speculative: np.ndarray  # bool [S]: came on a guess, and nothing has demanded it
    addresses: np.ndarray  # int64 [S]
    uses: np.ndarray  # float64 [E]
    worth: np.ndarray  # float64 [S]
    demanded: np.ndarray  # int64 [E]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("expert", *LayerArrays.__annotations__)),
        ("experts", ctypes.c_int64),
        ("resident", ctypes.c_int32),
        ("by_tick", ctypes.c_int32),
    ]


TYPES = (np.int32, np.uint8, np.bool_, np.int64, np.float64, np.float64, np.int64)


class ResidentLayer:
    """`resident`: the state of a slab that serves. `by_tick`: the tick of its last use is what a slab is worth, not its uses."""

    def __init__(self, kernel: cpu.ExpertKernel, arrays: LayerArrays, resident: int, by_tick: bool):
        assert len(kernel.formats) == 1, "slabs of one format"
        self._kernel, self._arrays = kernel, arrays
        places = [getattr(arrays, name) for name in LayerArrays.__annotations__]
        for array, dtype in zip(places, TYPES, strict=True):
            assert array.dtype == dtype and array.flags.c_contiguous, (array.dtype, dtype, array.strides)
        at = [array.ctypes.data for array in places]
        self._layer = _Layer(ctypes.addressof(kernel._experts), *at, len(arrays.slab_of), resident, by_tick)
        self.at = ctypes.addressof(self._layer)
        self._experts = np.empty(MOST_PAIRS, dtype=np.int32)
        self.experts_at = self._experts.ctypes.data

    def takes(self, hidden: Tensor, index: Tensor, factors: Tensor) -> bool:
        """Whether `run` computes these: hidden `[T, H]`, index int64 and factors `[T, K]`, contiguous and on the CPU."""
        return (
            0 < index.numel() <= MOST_PAIRS
            and index.dtype is torch.int64
            and index.ndim == 2
            and index.shape == factors.shape
            and factors.dtype in NUMBER_OF
            and hidden.shape == (index.shape[0], self._kernel.hidden)
            and hidden.dtype in NUMBER_OF
            and hidden.is_cpu
            and index.is_cpu
            and factors.is_cpu
            and hidden.is_contiguous()
            and index.is_contiguous()
            and factors.is_contiguous()
        )

    def run(
        self, hidden: Tensor, index: Tensor, factors: Tensor, weight: float, tick: int, outcome: Outcome = Outcome.APART
    ) -> tuple[Tensor, int] | None:
        """(the layer's output `[T, H]`, how many experts were demanded), with these counted as demanded and as used, `weight` for
        each use; None where one is not resident, or none was chosen: then nothing has changed. Raises BudgetError."""
        cpu.setup()
        tokens, choices = index.shape
        rows = tokens * choices if outcome is Outcome.APART else tokens
        parts, out = torch.empty(rows, self._kernel.hidden), torch.empty_like(hidden)
        count = _resident()(
            self.at,
            index.data_ptr(),
            tokens,
            choices,
            factors.data_ptr(),
            NUMBER_OF[factors.dtype],
            hidden.data_ptr(),
            NUMBER_OF[hidden.dtype],
            outcome,
            parts.data_ptr(),
            out.data_ptr(),
            weight,
            tick,
            self.experts_at,
        )
        if count == -1:
            return None
        cpu.refuse(max(0, -1 - count))
        return out, count

    def demanded(self, count: int) -> list[int]:
        """The experts of the latest `run`, ascending."""
        return self._experts[:count].tolist()
