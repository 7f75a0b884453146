"""How fast the machine reads: the classes of all rates, and measurements of memory and of the link to a GPU.

Rates are in bytes per second, and every measurement is bounded in time. Disks are measured in `disk.py`.
"""

import functools
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from vismoe.errors import TransferError
from vismoe.kernels.cpu import ExpertKernel
from vismoe.kernels.lossless import FastLossless
from vismoe.machine.hardware import host_memory
from vismoe.pools.advice import in_huge_pages
from vismoe.pools.pool import SlabPool
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

MIB = 2**20
ROUNDS = 5
LINK_REQUESTS_BYTES = (MIB, 8 * MIB, 64 * MIB)
LOSSLESS_BYTES = 8 * MIB  # of one expert
HIDDEN, INNER = 2048, 768  # of an expert of Qwen3-30B-A3B
LINK_COPIES = 4  # queued at a time, each of a slab of its own
EXPERTS_AT_ONCE = 8  # that one call computes, as many as a token chooses
MOST_EXPERTS = 64
TOKENS = 32  # of a prompt in each expert
MEASURED_S = 0.25  # for calls of one kind


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    requests_bytes: tuple[int, ...]
    depths: tuple[int, ...]
    point_s: float  # time for one request size and depth, in one pass
    passes: int  # the result is their median
    scratch_bytes: int
    dram_bytes: int

    @property
    def disk_points(self) -> int:
        """The most readings: both ways, every pass."""
        return 2 * self.passes * len(self.requests_bytes) * len(self.depths)


FULL = Effort((64 * 2**10, 256 * 2**10, MIB, 4 * MIB, 16 * MIB), (1, 2, 4, 8), 0.1, 3, 1024 * MIB, 1024 * MIB)
QUICK = Effort((256 * 2**10, 2 * MIB, 8 * MIB), (1, 2, 4, 8), 0.06, 1, 256 * MIB, 512 * MIB)


@dataclass(frozen=True)
class DramRates:
    """Rates of reading memory that is in no cache."""

    buffer_bytes: int
    threads: int
    bytes_per_s: float
    single_thread_bytes_per_s: float


@dataclass(frozen=True)
class DiskRate:
    """Random reads of `request_bytes` in `depth` threads: with O_DIRECT, or through a page cache that is cold for the file."""

    direct: bool
    request_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True)
class DiskRates:
    """One filesystem, measured once."""

    key: str  # `filesystem_key`
    folder: str  # where it was measured
    filesystem: str  # "ext4 on /dev/sda1"
    measured_unix_s: float
    rates: tuple[DiskRate, ...]
    cached_bytes_per_s: float  # copying from a page cache that holds the whole file
    direct_refused: str | None  # the reason if there are no O_DIRECT rates

    def best(self, *, direct: bool | None = None, request_bytes: int | None = None) -> DiskRate | None:
        """The fastest rate of one way of reading (None: both), at the request size nearest to `request_bytes` (None: any)."""
        return max(self.curve(direct=direct, request_bytes=request_bytes), key=lambda rate: rate.bytes_per_s, default=None)

    def curve(self, *, direct: bool | None = None, request_bytes: int | None = None) -> tuple[DiskRate, ...]:
        """The rates of one way of reading, at the measured request size nearest to `request_bytes`, by depth."""
        rates = [rate for rate in self.rates if direct is None or rate.direct == direct]
        if request_bytes is not None and rates:
            nearest = min({rate.request_bytes for rate in rates}, key=lambda size: abs(math.log(size / request_bytes)))
            rates = [rate for rate in rates if rate.request_bytes == nearest]
        return tuple(sorted(rates, key=lambda rate: rate.depth))


@dataclass(frozen=True)
class LinkRate:
    """Copies of `request_bytes` from host memory to a GPU."""

    page_locked: bool
    request_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class LinkRates:
    """The rates of one GPU: of its link, and of its own memory."""

    device: str  # "cuda:0"
    rates: tuple[LinkRate, ...]
    device_read_bytes_per_s: float
    page_lock_refused: str | None  # the reason if there are no page-locked rates
    registered: bool = (
        False  # page-locked memory was registered, as the pager's is; profiles from before allocated it page-locked
    )

    def best_bytes_per_s(self, *, page_locked: bool) -> float | None:
        return max((rate.bytes_per_s for rate in self.rates if rate.page_locked == page_locked), default=None)


# ------------------------------------------------------------------ memory
def dram_rates(threads: int, nbytes: int) -> DramRates:
    """Rates of summing memory in `threads` threads, each over its share of `nbytes` (less if little is free), and in one."""
    nbytes = min(nbytes, host_memory()[0] // 8)
    return DramRates(nbytes, threads, _summing(threads, nbytes), _summing(1, nbytes))


def _summing(threads: int, nbytes: int) -> float:
    """Bytes per second, the median of several rounds."""
    words = max(1, nbytes // threads // 8)
    together = threading.Barrier(threads)

    def rounds(_: int) -> list[tuple[float, float]]:
        mine = in_huge_pages(torch.empty(words, dtype=torch.int64)).numpy()  # as slabs and weights lie
        mine.fill(1)  # first touched by the thread that reads it, so it lies on that thread's memory node
        spans = []
        for _round in range(ROUNDS + 1):
            together.wait()
            start = time.perf_counter()
            mine.sum()
            spans.append((start, time.perf_counter()))
        return spans[1:]

    with ThreadPoolExecutor(threads) as pool:
        spans = list(zip(*pool.map(rounds, range(threads)), strict=True))
    return threads * words * 8 / statistics.median(max(e for _, e in span) - min(s for s, _ in span) for span in spans)


def lossless_rate(threads: int, nbytes: int) -> float:
    """Bytes of bfloat16 per second that `threads` decode together from lossless records in memory, the best of several rounds;
    `nbytes` of records and slabs, in no cache."""
    layout = RecordLayout.of({"w": (LOSSLESS_BYTES // 2,)}, {"w": torch.bfloat16})
    codec, weights = FastLossless(layout), torch.empty(LOSSLESS_BYTES, dtype=torch.uint8)
    weights.view(torch.bfloat16).normal_(0, 0.02)
    encoded = codec.encode(weights)
    records = [encoded.clone() for _ in range(max(1, nbytes // 2 // LOSSLESS_BYTES))]
    slabs = [weights.clone() for _ in records]
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _round in range(ROUNDS):
            began = time.perf_counter()
            list(pool.map(codec.decode, records, slabs))
            best = min(best, time.perf_counter() - began)
    return len(records) * LOSSLESS_BYTES / best


def packed_extra(nbytes: int) -> float:
    """By how many seconds per byte of an expert in bfloat16 the CPU kernels take longer to compute it for one token from its
    lossless record than from its weights, 0 where they do not; `nbytes` of weights and records, in no cache."""
    raw = RecordLayout.of({"up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}, dict.fromkeys(("up", "down"), torch.bfloat16))
    codec, weights = FastLossless(raw), torch.empty(raw.record_bytes, dtype=torch.uint8)
    weights.view(torch.bfloat16).normal_(0, 0.02)
    encoded, form = codec.encode(weights), ExpertForm("up", "down", False, Gate.CONCATENATED, Activation.SILU)
    hidden, count = torch.randn(1, HIDDEN).bfloat16(), max(1, nbytes // 2 // raw.record_bytes)
    out, tokens, starts = torch.empty(count, HIDDEN), np.zeros(count, np.int32), np.arange(count + 1, dtype=np.int32)
    ways = []
    for format, record, slab in ((Format.RAW, weights, raw), (Format.LOSSLESS, encoded, RecordLayout((), codec.most_bytes))):
        kernel, pool = ExpertKernel.of(format, raw, slab, form), SlabPool(slab, count)
        assert not isinstance(kernel, str), kernel
        for number in range(count):
            pool.record(number)[: len(record)] = record
        ways.append((kernel, pool, pool.addresses.view(np.uint64)))
    spans: tuple[list[float], ...] = ([], [])
    for _round in range(3 * ROUNDS):  # a difference needs more than a rate
        for (kernel, _, addresses), seconds in zip(ways, spans, strict=True):
            began = time.perf_counter()
            kernel.parts(addresses, starts, tokens, np.ones(count, np.float32), hidden, out)
            seconds.append(time.perf_counter() - began)
    from_weights, from_records = map(min, spans)
    return max(0.0, from_records - from_weights) / (count * raw.record_bytes)


def expert_rates(kernel: ExpertKernel, slab: RecordLayout, dtype: torch.dtype, nbytes: int) -> tuple[float, float] | None:
    """(bytes of experts per second at one token, seconds for each of TOKENS tokens in one expert) of this kernel, with inputs of
    this type: medians of calls that compute EXPERTS_AT_ONCE experts, or fewer large ones. At most `nbytes` of experts, in no
    cache, and about half a second; None where not even one fits."""
    count = min(MOST_EXPERTS, nbytes // slab.record_bytes)
    at_once = min(EXPERTS_AT_ONCE, count)
    if not count:
        return None
    pool = SlabPool(slab, count)
    pool.buffer.zero_()  # else all of it would be one page
    records, hidden = pool.addresses.view(np.uint64), torch.zeros(TOKENS, kernel.hidden, dtype=dtype)
    spans = {1: list[float](), TOKENS: list[float]()}
    for tokens, seconds in spans.items():
        pairs = at_once * tokens
        starts = np.arange(0, pairs + 1, tokens, dtype=np.int32)
        chosen, factors = np.tile(np.arange(tokens, dtype=np.int32), at_once), np.ones(pairs, np.float32)
        out = torch.empty(pairs, kernel.hidden, dtype=torch.float32)  # the default type is the model's while that is loaded
        for first in [0, *range(0, count - at_once + 1, at_once)]:  # the first call makes the workspace
            began_s = time.perf_counter()
            kernel.parts(records[first : first + at_once], starts, chosen, factors, hidden, out)
            seconds.append((time.perf_counter() - began_s) / at_once)
            if len(seconds) > 1 and at_once * sum(seconds) > MEASURED_S:
                break
    one, many = (statistics.median(seconds[1:]) for seconds in spans.values())
    return slab.record_bytes / one, many / TOKENS


# ------------------------------------------------------------------ a GPU and its link
def link_rate(device: str, request_bytes: int) -> float:
    """Bytes per second of page-locked copies of this size to `device` (a GPU), as the misses of a layer are queued.

    Raises TransferError if the system locks no pages.
    """
    layout = RecordLayout((), request_bytes)
    host = SlabPool(layout, LINK_COPIES, page_locked=True)
    copies = functools.partial(_queue_copies, SlabPool(layout, LINK_COPIES, device), host)
    copies()
    return LINK_COPIES * request_bytes / _gpu_seconds(copies, device, at_least_s=0.005)


def link_rates(device: str) -> LinkRates:
    """Copies from host memory to `device` (a GPU), pageable and page-locked, and reads of its own memory.

    The page-locked memory is what the pager copies from: slabs of ordinary memory that were registered. Copies of different slabs
    are queued on one stream, as the misses of a layer are.
    """
    rates, refused = [], None
    for page_locked, request_bytes in itertools.product((False, True), LINK_REQUESTS_BYTES):
        layout = RecordLayout((), request_bytes)
        try:
            host = SlabPool(layout, LINK_COPIES, page_locked=page_locked)
        except TransferError as error:
            refused = str(error).partition(". Fix: ")[0]
            break
        host.buffer.fill_(1)  # otherwise all pages that are not locked would be one page of zeros
        copies = functools.partial(_queue_copies, SlabPool(layout, LINK_COPIES, device), host)
        rates.append(LinkRate(page_locked, request_bytes, LINK_COPIES * request_bytes / _gpu_seconds(copies, device)))
    nbytes = min(1024 * MIB, torch.cuda.mem_get_info(device)[0] // 8)
    words = torch.ones(nbytes // 8, dtype=torch.int64, device=device)
    return LinkRates(device, tuple(rates), words.nbytes / _gpu_seconds(words.sum, device), refused, registered=True)


def _queue_copies(there: SlabPool, host: SlabPool) -> None:
    for slab in range(host.capacity):
        there.record(slab).copy_(host.record(slab), non_blocking=True)


def _gpu_seconds(work: Callable[[], object], device: str, at_least_s: float = 0.05) -> float:
    """Seconds of one call: calls are queued back to back until the GPU has been busy for `at_least_s`."""
    calls = 1
    while True:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
        if elapsed >= at_least_s:
            return elapsed / calls
        calls *= 2
