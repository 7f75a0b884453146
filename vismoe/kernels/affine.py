"""The encoder of the integer formats in C++: does what `vismoe/formats/affine.py` does, in a fraction of the time.

It sums in another order than torch does, so a group with two equally good grids may get the other one. All instruction sets give
the same bytes. A call uses one core and releases the interpreter lock.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vismoe.errors import ConfigError
from vismoe.formats.affine import Affine
from vismoe.formats.half_quadratic import KEPT_RANGES, SHRINK_CODES, SMALLEST_RANGE, STEPS
from vismoe.kernels.cpu import ISAS, Isa, available
from vismoe.kernels.library import library

__all__ = ["FastAffine"]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in ("rows", "inputs", "group_inputs", "row_bytes")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "offset")),
    ]


class _Search(ctypes.Structure):
    _fields_ = [
        ("kept_ranges", ctypes.c_void_p),
        ("kept_count", ctypes.c_size_t),
        ("steps", ctypes.c_size_t),
        ("shrink_codes", ctypes.c_double),
        ("smallest_range", ctypes.c_double),
        ("nearest", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class FastAffine(Affine):
    """Codec of one geometry in int8, int4 or int2. `isa` forces an instruction set; None selects the best available."""

    isa: Isa | None = None

    def __post_init__(self) -> None:
        if self.isa not in (None, *available()):
            raise ConfigError(
                f"isa={self.isa!r} is not available here; available: {', '.join(available())}. Fix: one of them, or None"
            )

    def _encode_rows(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.isfinite(rows).all():
            return super()._encode_rows(rows, name)  # which raises the error
        rows = rows.contiguous()
        count, inputs = rows.shape
        codes = torch.empty(count, self.grid.row_bytes(inputs), dtype=torch.uint8)
        scale, offset = torch.empty(2, count, self.grid.groups(inputs), dtype=torch.bfloat16)
        kept = (ctypes.c_float * len(KEPT_RANGES[self.grid.bits]))(*KEPT_RANGES[self.grid.bits])
        search = _Search(ctypes.addressof(kept), len(kept), STEPS, SHRINK_CODES, SMALLEST_RANGE, self.nearest)
        places = (part.data_ptr() for part in (codes, scale, offset))
        into = _Rows(rows.data_ptr(), count, inputs, self.grid.group_inputs, codes.shape[1], *places)
        isa = ISAS.index(self.isa or available()[-1])
        _function()(self.grid.bits, ctypes.byref(into), ctypes.byref(search), isa)
        return codes, scale, offset


@cache
def _function() -> Callable[..., None]:
    function = library().vismoe_affine_encode
    function.argtypes = [ctypes.c_int32, ctypes.POINTER(_Rows), ctypes.POINTER(_Search), ctypes.c_int32]
    function.restype = None
    return function
