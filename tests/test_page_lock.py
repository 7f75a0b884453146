"""Host memory is registered piece by piece with a made-up CUDA: each page once, after it exists, and all or none."""

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from vismoe.errors import TransferError
from vismoe.pools import page_lock
from vismoe.pools.pool import SlabPool
from vismoe.types import RecordLayout

PAGE = mmap.PAGESIZE
OUT_OF_MEMORY = 2


class MadeUpCuda:
    """`most`: registrations that succeed."""

    def __init__(self, most: int = 10**6):
        self.most = most
        self.registered: dict[int, int] = {}
        self.not_there = 0  # pages that did not exist when they were registered
        self.mincore = ctypes.CDLL(None).mincore

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.registered) == self.most:
            return OUT_OF_MEMORY
        assert nbytes > 0
        there = (ctypes.c_ubyte * -(-nbytes // PAGE))()
        assert self.mincore(ctypes.c_void_p(address // PAGE * PAGE), ctypes.c_size_t(nbytes), there) == 0
        self.not_there += sum(not page & 1 for page in there)
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Owner:
    """Of a registration."""


def cuda_with(monkeypatch, most: int = 10**6, piece_bytes: int = 16 * PAGE) -> MadeUpCuda:
    cuda = MadeUpCuda(most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", piece_bytes)
    return cuda


def untouched(records: int, record_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, records * record_bytes), dtype=torch.uint8).view(records, record_bytes)


@pytest.mark.parametrize("record_bytes", [3 * PAGE, PAGE // 2 + 64, 64])
@pytest.mark.parametrize("advises", [True, False], ids=["the kernel gives pages when asked", "pages are touched"])
def test_pieces_are_whole_pages_and_whole_records_and_their_pages_exist_before(record_bytes, advises, monkeypatch):
    cuda = cuda_with(monkeypatch)
    if not advises:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=lambda *place: -1))
    records, owner = untouched(-(-100 * PAGE // record_bytes), record_bytes), Owner()
    page_lock.page_lock(records, owner)
    start = end = records.data_ptr()
    for address, nbytes in cuda.registered.items():
        assert address == end and (address - start) % PAGE == 0 == (address - start) % record_bytes
        end = address + nbytes
    assert end - start == records.numel() and len(cuda.registered) > 1 and cuda.not_there == 0
    del owner
    assert not cuda.registered


def test_a_pool_starts_on_a_page_and_gives_its_registration_back(monkeypatch):
    cuda = cuda_with(monkeypatch)
    layout = RecordLayout.of({"w": (9,)}, {"w": torch.int64})
    pool = SlabPool(layout, 3000, page_locked=True)
    assert sum(cuda.registered.values()) == pool.nbytes and next(iter(cuda.registered)) == pool.addresses[0]
    assert not any(address % PAGE for address in cuda.registered)
    SlabPool(layout, 0, page_locked=True)
    del pool
    assert not cuda.registered


def test_what_was_registered_before_a_refusal_is_given_back_and_cudas_error_is_forgotten(monkeypatch):
    cuda, kernels = cuda_with(monkeypatch, most=2), []

    def kernel(*size, device):
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")  # torch's check behind a launch finds, and clears, the error

    monkeypatch.setattr(torch, "ones", kernel)
    layout = RecordLayout.of({"w": (PAGE,)}, {"w": torch.uint8})
    with pytest.raises(TransferError, match=rf"{100 * PAGE} bytes .* error 2 after {32 * PAGE} bytes.*--host-memory"):
        SlabPool(layout, 100, page_locked=True)
    assert not cuda.registered and kernels == ["cuda"]
