"""Re-laying the 4-bit codes of AWQ and GPTQ checkpoints as rows of outputs, as `formats/encodings.py: Int4` has them.

One thread per call; a call releases the interpreter lock.
"""

import ctypes

import torch
from torch import Tensor

from vismoe.kernels.library import function

_ARGUMENTS = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
_awq = function("vismoe_relay_awq", _ARGUMENTS)
_gptq = function("vismoe_relay_gptq", _ARGUMENTS)


def relay_awq(qweight: Tensor, into: Tensor) -> None:
    """qweight int32 `[i, o / 8]` of AWQ's "gemm" version -> into uint8 `[o, i / 2]`; both contiguous, i even."""
    inputs, words = qweight.shape
    _check(qweight, into, 8 * words, inputs)
    _awq()(qweight.data_ptr(), inputs, words, into.data_ptr())


def relay_gptq(qweight: Tensor, into: Tensor) -> None:
    """qweight int32 `[i / 8, o]` -> into uint8 `[o, i / 2]`; both contiguous. Inputs keep their order: g_idx is trivial."""
    words, outputs = qweight.shape
    _check(qweight, into, outputs, 8 * words)
    _gptq()(qweight.data_ptr(), words, outputs, into.data_ptr())


def _check(qweight: Tensor, into: Tensor, outputs: int, inputs: int) -> None:
    assert inputs % 2 == 0, f"{inputs} inputs are not whole bytes"
    for tensor, dtype in ((qweight, torch.int32), (into, torch.uint8)):
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.dtype, tensor.stride())
    assert into.shape == (outputs, inputs // 2), (tuple(into.shape), outputs, inputs)
