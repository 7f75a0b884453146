"""CUDA's virtual memory management behind a `PagedTensor`, through the driver's C interface (CUDA driver API, section 6.14).

One granule-aligned handle per block; a block is mapped wherever an expert shows it, and one handle may be mapped at many
addresses. Mapping and unmapping do not wait for kernels, so the caller lets those end that may touch the place. Never run on a
GPU so far: the tests drive it with a library that keeps to the documented rules.
"""

import ctypes
from typing import Any

import torch

from vismoe.errors import TransferError

PINNED, DEVICE, MINIMUM, READ_WRITE = 1, 1, 0, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, _GRANULARITY_, _ACCESS_


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags"""

    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", AllocationFlags),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class CudaMemory:
    """Blocks on the GPU `device`, whose primary context torch has made current. `driver`: libcuda, or a double of it.

    Raises TransferError with the driver's own name of an error.
    """

    def __init__(self, device: int = 0, driver: Any = None):
        self._driver = driver if driver is not None else ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._location = Location(DEVICE, device)
        self._properties = AllocationProperties(type=PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), MINIMUM)
        self.granularity = granularity.value
        self._start = self._bytes = self._block_bytes = 0
        self._handles: list[int] = []
        self._mapped: set[int] = set()

    def reserve(self, nbytes: int, blocks: int, block_bytes: int) -> int:
        start = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), *[ctypes.c_uint64(0)] * 2
        )
        self._start, self._bytes, self._block_bytes = start.value, nbytes, block_bytes
        try:
            for _ in range(blocks):
                handle = ctypes.c_uint64()
                size = ctypes.c_size_t(block_bytes)
                self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
                self._handles.append(handle.value)
        except TransferError:
            self.close()
            raise
        return self._start

    def map(self, offset: int, block: int) -> None:
        place, size = ctypes.c_uint64(self._start + offset), ctypes.c_size_t(self._block_bytes)
        handle = ctypes.c_uint64(self._handles[block])
        self._call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._mapped.add(offset)
        access = Access(self._location, READ_WRITE)
        try:
            self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        except TransferError:
            self.unmap(offset)
            raise

    def unmap(self, offset: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(self._start + offset), ctypes.c_size_t(self._block_bytes))
        self._mapped.discard(offset)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        about = {"shape": (nbytes,), "typestr": "|u1", "data": (self._start + offset, False), "version": 3}
        holder = type("Range", (), {"__cuda_array_interface__": about})()
        return torch.as_tensor(holder, device=f"cuda:{self._device}")

    def close(self) -> None:
        for offset in sorted(self._mapped):
            self.unmap(offset)
        while self._handles:
            self._call("cuMemRelease", ctypes.c_uint64(self._handles.pop()))
        if self._bytes:
            self._call("cuMemAddressFree", ctypes.c_uint64(self._start), ctypes.c_size_t(self._bytes))
            self._start = self._bytes = 0

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            what = text.value.decode() if text.value else f"error {status}"
            raise TransferError(f"{name}: {what}. Fix: fewer blocks, or slabs in place of a paged tensor")
