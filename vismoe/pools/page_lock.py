"""Page-locked host memory: ordinary memory, registered with CUDA in pieces.

torch's own page-locked allocator rounds up to a power of two, which would be up to twice the plan. Registering memory that was
never touched gives it its pages first, in one thread; here several threads do that for the next pieces meanwhile, with huge pages
where the kernel has them.
"""

import contextlib
import math
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tqdm.auto import tqdm

from vismoe.errors import TransferError
from vismoe.pools.advice import POPULATE_WRITE, advise

PIECE_BYTES = 2**30
THREADS = 8


def page_lock(records: torch.Tensor, owner: object) -> None:
    """Register `records`, uint8 `[S, record_bytes]` from the start of a page, until `owner` is gone.

    Raises TransferError where CUDA refuses; nothing stays registered then.
    """
    cuda, locked = torch.cuda.cudart(), list[int]()
    finalizer = weakref.finalize(owner, _unlock, cuda, locked)
    try:
        with (
            ThreadPoolExecutor(THREADS, "vismoe-page-lock") as threads,
            tqdm(total=records.numel(), desc="Page-locking host memory", unit="B", unit_scale=True, delay=1, disable=None) as bar,
        ):
            for piece in threads.map(_give_pages, _pieces(records)):
                status = int(cuda.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
                if status != 0:
                    _clear_last_error()
                    raise TransferError(_refused(status, records.numel(), piece.data_ptr() - records.data_ptr()))
                locked.append(piece.data_ptr())
                bar.update(piece.numel())
    except BaseException:
        finalizer()
        raise


def _pieces(records: torch.Tensor) -> list[torch.Tensor]:
    """Cuts of about PIECE_BYTES at starts of pages and of records: a page is registered once, and CUDA copies a record out of one
    registration."""
    record_bytes = records.shape[1]
    least = mmap.PAGESIZE // math.gcd(record_bytes, mmap.PAGESIZE)
    return [piece for piece in records.split(least * max(1, PIECE_BYTES // (least * record_bytes))) if piece.numel()]


def _give_pages(piece: torch.Tensor) -> torch.Tensor:
    """The piece, all of whose pages exist now."""
    if not advise(piece.data_ptr(), -(-piece.numel() // mmap.PAGESIZE) * mmap.PAGESIZE, POPULATE_WRITE):  # the last page, too
        piece.view(-1)[:: mmap.PAGESIZE].fill_(0)
    return piece


def _clear_last_error() -> None:
    """CUDA keeps the error of a refused registration, and torch's check behind this thread's next kernel would raise it. Its
    Python bindings have no cudaGetLastError; that check itself forgets the error."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _refused(status: int, wanted: int, locked: int) -> str:
    return (
        f"{wanted} bytes of host memory could not be page-locked: CUDA error {status} after {locked} bytes. "
        "Fix: a smaller host_memory (--host-memory), or raise the limit of locked memory (ulimit -l)"
    )


def _unlock(cuda: Any, locked: list[int]) -> None:
    while locked:
        cuda.cudaHostUnregister(locked.pop())
