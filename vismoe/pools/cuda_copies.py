"""Copies to a GPU that the CUDA driver's own functions queue: to make another stream the current one and back, torch would take
as long as the link needs for 2 MB."""

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vismoe.errors import TransferError
from vismoe.pools.cuda_memory import Location

logger = logging.getLogger(__name__)

IN_STREAM_ORDER, INVALID_VALUE, NOT_SUPPORTED = 1, 1, 801  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CUDA_ERROR_
ONE, SEVERAL = "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2"  # the second one since CUDA 13


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: when the source is read, and hints that are not given."""

    _fields_ = [("source_order", ctypes.c_int), ("source", Location), ("target", Location), ("flags", ctypes.c_uint)]


def driver_function(name: str) -> Any | None:
    """A function of the CUDA driver; None where it has none of this name, or there is no driver by its usual name."""
    try:
        return ctypes.CDLL("libcuda.so.1")[name]
    except (OSError, AttributeError):
        return None


def copier(stream: torch.cuda.Stream) -> Callable[[np.ndarray, np.ndarray, int], None] | None:
    """Queues copies of so many bytes to device addresses int64 `[n]` from page-locked ones of the host, on a stream; by one call
    where the driver takes several. None where there is no driver to be called. Raises TransferError."""
    put, batch, handle = driver_function(ONE), driver_function(SEVERAL), ctypes.c_void_p(stream.cuda_stream)
    if put is None:
        return None
    put.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    attributes, of_copies_from = CopyAttributes(IN_STREAM_ORDER), (ctypes.c_size_t * 1)(0)

    def copy(there: np.ndarray, here: np.ndarray, nbytes: int) -> None:
        nonlocal batch
        if batch is not None and len(there) > 1:
            sizes = np.full(len(there), nbytes, dtype=np.uint64)
            places = (ctypes.c_void_p(array.__array_interface__["data"][0]) for array in (there, here, sizes))
            kinds = ctypes.byref(attributes), of_copies_from, ctypes.c_size_t(1)
            status = batch(*places, ctypes.c_size_t(len(there)), *kinds, handle)
            if not status:
                return
            if status not in (INVALID_VALUE, NOT_SUPPORTED):
                raise TransferError(f"{len(there)} copies of {nbytes} bytes to the GPU were refused: CUDA error {status}")
            logger.warning("copies to the GPU are queued one by one: CUDA error %d for several", status)
            batch = None
        for to, source in zip(there.tolist(), here.tolist()):
            status = put(to, source, nbytes, handle)
            if status:
                raise TransferError(f"a copy of {nbytes} bytes to the GPU was refused: CUDA error {status}")

    return copy
