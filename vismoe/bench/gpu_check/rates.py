"""Rates and delays of a GPU: copies from three kinds of host memory, launches, waits, readbacks."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from vismoe.machine.rates import MIB, link_rates
from vismoe.pools.cuda_copies import SEVERAL, driver_function
from vismoe.pools.pool import SlabPool
from vismoe.types import RecordLayout

KINDS = ("registered", "cudaMallocHost", "pageable")
SIZES_BYTES = (MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STREAMS = (1, 2, 4)
COPIES = 8  # different records of a round
MOST_BYTES = 512 * MIB  # of a round
POINT_S = 0.03
CALLS = 2000


def measure_rates(options: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`copies`: rows of kind, request bytes, streams and bytes per second; `link`: the doctor's rates; delays in microseconds."""
    device, copies = options["device"], list[dict[str, Any]]()
    for kind, request_bytes in itertools.product(KINDS, SIZES_BYTES):
        pool, there = _host(kind, request_bytes), _there(request_bytes, device)
        for streams in STREAMS:
            rate = _copying(pool, there, streams)
            copies.append({"kind": kind, "request_bytes": request_bytes, "streams": streams, "bytes_per_s": rate})
        keep({"copies": copies})
    keep({"link": dataclasses.asdict(link_rates(device))})
    keep({"batch_copy": f"the driver {'has no' if driver_function(SEVERAL) is None else 'has'} {SEVERAL}"})
    return {"delays_us": delays_us(device)}


def _records(request_bytes: int) -> int:
    return max(1, min(COPIES, MOST_BYTES // request_bytes))


def _host(kind: str, request_bytes: int) -> list[torch.Tensor]:
    """Records in host memory of one kind, all touched."""
    count = _records(request_bytes)
    if kind == "cudaMallocHost":
        buffer = torch.empty(count, request_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)
        return list(buffer)
    pool = SlabPool(RecordLayout((), request_bytes), count, page_locked=kind == "registered")
    pool.buffer.fill_(1)
    return _Owned(pool.buffer, pool)


class _Owned(list[torch.Tensor]):
    """Records that keep their pool: without it they would be unregistered."""

    def __init__(self, records: torch.Tensor, pool: SlabPool):
        super().__init__(records)
        self.pool = pool


def _there(request_bytes: int, device: str) -> list[torch.Tensor]:
    return list(torch.empty(_records(request_bytes), request_bytes, dtype=torch.uint8, device=device))


def _copying(host: list[torch.Tensor], there: list[torch.Tensor], streams: int) -> float:
    """Bytes per second of copying all records, spread over the streams, again and again for POINT_S."""
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    began_s, copied = time.perf_counter(), 0
    while copied == 0 or time.perf_counter() - began_s < POINT_S:  # a busy machine may interrupt before the first
        for number, (source, target) in enumerate(zip(host, there, strict=True)):
            with torch.cuda.stream(lanes[number % streams]):
                target.copy_(source, non_blocking=True)
            copied += source.numel()
        torch.cuda.synchronize()
    return copied / (time.perf_counter() - began_s)


def delays_us(device: str) -> dict[str, float]:
    """Microseconds: queueing a launch, a launch that is waited for, an event between two streams, reading one number back."""
    one, other = torch.ones(1, device=device), torch.cuda.Stream()
    landing = torch.empty(1, pin_memory=True)

    def across() -> None:
        other.wait_event(torch.cuda.current_stream().record_event())

    def read_pinned() -> None:
        landing.copy_(one, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()

    def waited() -> None:
        one.add_(1)
        torch.cuda.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: one.add_(1), "launch and wait": waited, "event between streams": across,
        "readback, pageable": one.item, "readback, page-locked": read_pinned,
    }  # fmt: skip
    return {name: _us(call) for name, call in calls.items()}


def _us(call: Callable[[], object]) -> float:
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began_s) / CALLS
