"""Restores encoded matrices in C++, at memory speed: bit for bit what `Encoding.restored` makes of them with torch.

An integer format (`AffineMatrix`) differs in the last bit at most, because its product and sum round once here.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vismoe.formats.encoded import Encoded
from vismoe.formats.encodings import Encoding, Int4, restore_in_pieces, row_blocks
from vismoe.kernels import cpu
from vismoe.kernels.library import function

_restore = function("vismoe_restore", [ctypes.c_void_p] * 2 + [ctypes.c_int32] * 2 + [ctypes.c_void_p], ctypes.c_int32)


def restore(encoding: Encoding, parts: Mapping[str, Tensor], into: Tensor) -> None:
    """Fill `into` `[out, in]` with the weights in its type. Torch does so on other devices, and for parts and types that the
    kernels do not read."""
    known = into.dtype in cpu.DTYPES and all(part.is_contiguous() for part in parts.values())
    if not known or into.device.type != "cpu" or cpu.why_no_linear(encoding, parts, into.shape[1]) is not None:
        return restore_in_pieces(encoding, parts, into)
    if not into.is_contiguous():
        for rows in row_blocks(into):
            piece = torch.empty(into[rows].shape, dtype=into.dtype)
            restore(encoding, {name: part[rows] for name, part in parts.items()}, piece)
            into[rows] = piece
        return None
    cpu.setup()
    matrix, base = cpu.matrix_of(encoding.name, parts, into.shape[1])
    via = cpu.DTYPES.index(parts["scale"].dtype if isinstance(encoding, Int4) else torch.float32)
    if into.numel():
        cpu.refuse(_restore()(ctypes.byref(matrix), base, via, cpu.DTYPES.index(into.dtype), into.data_ptr()))
    return None


@dataclass(frozen=True)
class FastEncoded(Encoded):
    """Codec of one geometry as the checkpoint encodes it."""

    def _restore_matrix(self, encoding: Encoding, parts: Mapping[str, Tensor], into: Tensor) -> None:
        restore(encoding, parts, into)
