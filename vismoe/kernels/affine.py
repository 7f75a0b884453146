"""The encoder of the integer formats: scales, offsets and codes of groups of weights, from the weights alone, in C++.

Rounding to nearest spreads the codes over a group's range. The fit is half-quadratic (Badri and Shaji, Half-Quadratic
Quantization of Large Machine Learning Models, 2023): a sparse auxiliary variable absorbs large errors under the penalty |error|^p
with p = 1/2, and scale and offset follow in closed form. It differs from the paper where that measured better on the demo model.
It fits the scale as well as the offset, and starts from the best of several clipped ranges. It also keeps the gain of each group:
least squares shortens groups, |restored|^2 = |weights|^2 - |error|^2, and three such matrices in a row shrink an expert's output
by a quarter at 2 bits, which costs more divergence than the smaller error saves. So it chooses codes on the least-squares grid
and restores them on a grid that is longer by the same factor. A group whose squared error would exceed that of rounding to
nearest is rounded to nearest.

All instruction sets give the same bytes. A call uses one core and releases the interpreter lock.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from vismoe.errors import CheckpointError
from vismoe.formats.affine import Affine
from vismoe.kernels.cpu import ISAS, Isa, available
from vismoe.kernels.library import function, refuse_missing

KEPT_RANGES = {  # shares of a group's range that the codes span when fitting starts, by bits
    2: (1.0, 0.8, 0.65, 0.5),
    4: (1.0, 0.92, 0.84, 0.76, 0.68),
    8: (1.0,),
}
STEPS = 2  # rounds of removing errors and refitting; a third lowers the error of expert outputs by another 0.5% at 2 bits
SHRINK_CODES = 1.0  # errors below one code are not removed
SMALLEST_RANGE = 2.0**-100  # below it a group is a constant: scales would leave the range of normal numbers


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


_function = function("vismoe_affine_encode", [ctypes.c_int32, ctypes.POINTER(_Rows), ctypes.POINTER(_Search), ctypes.c_int32])


@dataclass(frozen=True)
class FastAffine(Affine):
    """Codec of one geometry in int8, int4 or int2. `isa` forces an instruction set; None selects the best available."""

    isa: Isa | None = None

    def __post_init__(self) -> None:
        refuse_missing(self.isa, available)

    def _encode_rows(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.isfinite(rows).all():
            raise CheckpointError(
                f"{name}: {int((~torch.isfinite(rows)).sum())} weights are infinite or not a number, which {self.format} "
                "cannot hold. Fix: check the checkpoint, or use the raw or lossless format"
            )
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
