"""One range for all experts, against a dictionary of what should be where; CUDA's calls against a double of its driver."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import TransferError
from vismoe.pools.cuda_memory import Access, AllocationProperties, CudaMemory
from vismoe.pools.paged_tensor import HostMemory, PagedTensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and MAP_FIXED are Linux's")
LAYERS, EXPERTS, BLOCKS = 2, 5, 3
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
PLACES = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
STEPS = st.lists(st.tuples(st.sampled_from(["bind", "unbind", "write"]), PLACES, st.integers(0, BLOCKS - 1)), max_size=40)


class Driver:
    """libcuda, as far as it is documented: mappings do not overlap, cover whole handles, are inside a reservation and accessible
    only once that was asked for; a handle lives until it is released and unmapped, a reservation until it is empty."""

    GRANULARITY = 2**21

    def __init__(self, memory_bytes=2**40):
        self.left, self.handles, self.reserved, self.mapped, self.open = memory_bytes, {}, {}, {}, set()
        self._next = 1

    def cuMemGetAllocationGranularity(self, granularity, properties, option):
        asked = ctypes.cast(properties, ctypes.POINTER(AllocationProperties)).contents
        assert (asked.type, asked.location.type, option) == (1, 1, 0)
        ctypes.cast(granularity, ctypes.POINTER(ctypes.c_size_t))[0] = self.GRANULARITY
        return 0

    def cuMemAddressReserve(self, address, nbytes, alignment, wanted, flags):
        if nbytes.value % self.GRANULARITY or not nbytes.value:
            return INVALID_VALUE
        start = 2**40 * self._number()
        self.reserved[start] = nbytes.value
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = start
        return 0

    def cuMemCreate(self, handle, nbytes, properties, flags):
        if nbytes.value % self.GRANULARITY:
            return INVALID_VALUE
        if nbytes.value > self.left:
            return OUT_OF_MEMORY
        self.left -= nbytes.value
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint64))[0] = number = self._number()
        self.handles[number] = nbytes.value
        return 0

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        start, size = address.value, nbytes.value
        inside = any(first <= start and start + size <= first + length for first, length in self.reserved.items())
        overlaps = any(start < other + length and other < start + size for other, (length, _) in self.mapped.items())
        if not inside or overlaps or offset.value or self.handles.get(handle.value) != size:
            return INVALID_VALUE
        self.mapped[start] = size, handle.value
        return 0

    def cuMemSetAccess(self, address, nbytes, access, count):
        asked = ctypes.cast(access, ctypes.POINTER(Access)).contents
        if self.mapped.get(address.value, (0,))[0] != nbytes.value or (asked.flags, count.value) != (3, 1):
            return INVALID_VALUE
        self.open.add(address.value)
        return 0

    def cuMemUnmap(self, address, nbytes):
        if self.mapped.get(address.value, (0,))[0] != nbytes.value:
            return INVALID_VALUE
        del self.mapped[address.value]
        self.open.discard(address.value)
        return 0

    def cuMemRelease(self, handle):
        if handle.value not in self.handles:
            return INVALID_VALUE
        self.left += self.handles.pop(handle.value)
        return 0

    def cuMemAddressFree(self, address, nbytes):
        if self.mapped or self.reserved.get(address.value) != nbytes.value:
            return INVALID_VALUE
        del self.reserved[address.value]
        return 0

    def cuGetErrorName(self, status, text):
        names = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = names[status]
        return 0

    def _number(self):
        self._next += 1
        return self._next


def walk(tensor, steps, write=lambda place, value: None, check=lambda bound: None):
    """Bind, unbind and write by `steps`; `check` gets what should be bound where."""
    bound, value = {}, 0
    for step, place, block in steps:
        if step == "bind":
            tensor.bind(*place, block)
            bound[place] = block
        elif place in bound:
            if step == "unbind":
                tensor.unbind(*place)
                del bound[place]
            else:
                value = value % 255 + 1
                write(place, value)
        places = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        assert {where: tensor.bound(*where) for where in places if tensor.bound(*where) is not None} == bound
        check(bound)


@settings(deadline=None, max_examples=40)
@given(STEPS, st.integers(1, 3 * mmap.PAGESIZE))
def test_what_an_expert_shows_is_the_block_that_is_bound_to_it(steps, nbytes):
    tensor = PagedTensor(LAYERS, EXPERTS, nbytes, BLOCKS, HostMemory())
    windows, held = [tensor.window(layer) for layer in range(LAYERS)], [0] * BLOCKS
    assert all(window.shape == (EXPERTS, nbytes) and window.data_ptr() % mmap.PAGESIZE == 0 for window in windows)

    def write(place, value):
        windows[place[0]][place[1]] = value
        held[tensor.bound(*place)] = value

    def check(bound):
        for (layer, expert), block in bound.items():
            shown = windows[layer][expert]
            assert int(shown[0]) == int(shown[-1]) == held[block]

    walk(tensor, steps, write, check)
    tensor.close()
    tensor.close()


def test_addresses_of_what_is_not_bound_stay_reserved_and_cannot_be_touched():
    tensor = PagedTensor(1, 3, mmap.PAGESIZE, 2, HostMemory())
    tensor.bind(0, 0, 0)
    tensor.bind(0, 1, 1)
    tensor.unbind(0, 1)
    assert [access_at(tensor.address + expert * mmap.PAGESIZE) for expert in range(3)] == ["rw-s", "---p", "---p"]
    tensor.close()
    assert access_at(tensor.address) is None


def access_at(address):
    """What the kernel allows there, e.g. rw-s; None where nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    return None


def test_stock_code_computes_over_a_window_whose_experts_lie_in_any_blocks():
    rows, columns = 8, mmap.PAGESIZE // 16
    tensor = PagedTensor(1, 4, rows * columns * 4, 4, HostMemory())
    weights = torch.randn(4, rows, columns)
    for expert, block in enumerate((2, 0, 3, 1)):
        tensor.bind(0, expert, block)
    window = tensor.window(0).view(torch.float32).unflatten(1, (rows, columns))
    window.copy_(weights)
    inputs = torch.randn(4, 3, columns)
    assert torch.equal(torch.bmm(inputs, window.transpose(1, 2)), torch.bmm(inputs, weights.transpose(1, 2)))
    tensor.bind(0, 1, 2)  # the block of expert 0 at a second address
    assert torch.equal(window[1], weights[0]) and torch.equal(window[0], weights[0])
    tensor.close()


def test_a_system_that_refuses_says_what_it_refused():
    with pytest.raises(TransferError, match="could not be mapped"):
        PagedTensor(1, 1, 2**62, 1, HostMemory())


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(1, 2**23))
def test_cuda_maps_whole_blocks_inside_the_range_and_gives_everything_back(steps, nbytes):
    driver = Driver()
    tensor = PagedTensor(LAYERS, EXPERTS, nbytes, BLOCKS, CudaMemory(driver=driver))
    assert tensor.place_bytes % Driver.GRANULARITY == 0 and tensor.place_bytes - nbytes < Driver.GRANULARITY
    assert list(driver.handles.values()) == [tensor.place_bytes] * BLOCKS
    numbers = list(driver.handles)

    def check(bound):
        where = {tensor.address + (layer * EXPERTS + e) * tensor.place_bytes: block for (layer, e), block in bound.items()}
        assert {start: numbers.index(handle) for start, (_, handle) in driver.mapped.items()} == where
        assert driver.open == where.keys()

    walk(tensor, steps, check=check)
    tensor.close()
    assert not (driver.mapped or driver.handles or driver.reserved) and driver.left == 2**40
    tensor.close()


def test_a_gpu_without_enough_memory_keeps_none_of_it():
    driver = Driver(5 * Driver.GRANULARITY)
    with pytest.raises(TransferError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        PagedTensor(1, 8, Driver.GRANULARITY, 6, CudaMemory(driver=driver))
    assert not (driver.handles or driver.reserved) and driver.left == 5 * Driver.GRANULARITY


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA's virtual memory by its own driver")
def test_on_a_gpu_a_window_shows_the_blocks_that_are_bound():
    torch.zeros(1, device="cuda")  # makes the context current
    tensor = PagedTensor(1, 3, 1000, 2, CudaMemory())
    for expert, block in enumerate((1, 0, 1)):
        tensor.bind(0, expert, block)
    window = tensor.window(0)
    window[0], window[1] = 5, 7
    torch.cuda.synchronize()
    assert window[:, 0].tolist() == window[:, -1].tolist() == [5, 7, 5]
    del window
    tensor.close()
