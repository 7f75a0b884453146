"""CRC-32C (Castagnoli), the checksum of records; runs at memory speed on processors with the CRC instruction.

A call releases the interpreter lock and uses one core.
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vismoe.kernels.library import function

_function = function("vismoe_crc32c", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_int], ctypes.c_uint32)

Data = Tensor | NDArray[np.generic] | bytes | bytearray | memoryview


def crc32c(data: Data, before: int = 0, *, portable: bool = False) -> int:
    """The checksum of the bytes of `data`, in this process's memory; `before` is the checksum of the preceding bytes.

    `crc32c(b, crc32c(a)) == crc32c(a + b)`. Data with strides is copied first. `portable` avoids the processor's instruction.
    """
    whole = _bytes(data)
    return _function()(whole.ctypes.data, whole.size, before, portable)


def _bytes(data: Data) -> NDArray[np.uint8]:
    if isinstance(data, Tensor):
        return data.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
