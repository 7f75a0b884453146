"""How to read experts from disk: a profile and a few numbers in, a choice with reasons out."""

import os
from dataclasses import dataclass

from vismoe.config import UNMEASURED_IO_THREADS, format_bytes
from vismoe.machine.profile import Profile, disk_of
from vismoe.machine.rates import DiskRate, DiskRates

MOST_THREADS = 8
UNMEASURED_DIRECT_BYTES = 2**20  # reading one such expert keeps a disk busy, and would churn the page cache
PAGE_CACHE_MARGIN = 1.1  # RAM beyond the plan counts as holding the experts if it has this many times their bytes
GOOD_ENOUGH = 0.9  # share of the best rate that suffices: for fewer threads, and for a way of reading that saves a copy
NOT_MEASURED = "this disk is not measured; run vismoe doctor"


@dataclass(frozen=True)
class Choices:
    """How a store reads. `reasons` has a sentence for `direct_reads` and one for `io_threads`."""

    direct_reads: bool  # O_DIRECT, past the page cache
    cold_direct: bool  # the same, at least for what the page cache lacks when it is read the first time
    io_threads: int  # 1 to 8
    reasons: dict[str, str]


def choose(
    profile: Profile | None,
    *,
    expert_bytes: int,
    checkpoint_bytes: int,
    spare_bytes: int,
    cores: int,
    device: str,
    path: str | os.PathLike[str],
) -> Choices:
    """How to read experts of `expert_bytes` from the filesystem of `path` for `device` (`cpu`, `cuda`, `cuda:1`).

    `checkpoint_bytes` is the size of all experts on disk; `spare_bytes` the RAM that is free beyond the plan, which may be
    negative; `cores` the number that this process may use. A filesystem that `profile` lacks is treated as without a profile.
    """
    disk = disk_of(profile, path) if profile else None
    copies = fits_page_cache(checkpoint_bytes, spare_bytes)  # after the first read of each, the processor copies it
    cold_direct, why_direct = _cold_direct(disk, expert_bytes, checkpoint_bytes, spare_bytes)
    link = profile.link(device) if profile else None
    link_bytes_per_s = link.best_bytes_per_s(page_locked=link.page_lock_refused is None) if link else None
    most = max(1, cores) if copies else MOST_THREADS
    threads, why_threads = _threads(disk, cold_direct, expert_bytes, most, link_bytes_per_s)
    return Choices(cold_direct and not copies, cold_direct, threads, {"direct_reads": why_direct, "io_threads": why_threads})


def fits_page_cache(checkpoint_bytes: int, spare_bytes: int) -> bool:
    """Whether the page cache can hold all experts, so that only the first read of each accesses the disk."""
    return spare_bytes >= checkpoint_bytes * PAGE_CACHE_MARGIN


def read_bytes_per_s(disk: DiskRates | None, expert_bytes: int, direct: bool, cached: bool) -> float | None:
    """How fast experts of this size come from `disk`, or from the page cache that holds them all (`cached`); None: unmeasured."""
    if disk is None:
        return None
    if cached:
        return disk.cached_bytes_per_s
    best = disk.best(direct=direct, request_bytes=expert_bytes)
    return best.bytes_per_s if best else None


def format_rate(bytes_per_s: float) -> str:
    """`2.4e9` -> `2.4 GB/s`."""
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _cold_direct(disk: DiskRates | None, expert_bytes: int, checkpoint_bytes: int, spare_bytes: int) -> tuple[bool, str]:
    """(cold_direct, why); what does not fit the page cache is cold again whenever it is read."""
    room = f"the {format_bytes(max(0, spare_bytes))} of RAM beyond the plan"
    past, through = (disk.best(direct=direct, request_bytes=expert_bytes) if disk else None for direct in (True, False))
    if fits_page_cache(checkpoint_bytes, spare_bytes):
        rate = f", which copies {format_rate(disk.cached_bytes_per_s)} when warm" if disk else ""
        why = f"page cache: the experts ({format_bytes(checkpoint_bytes)}) fit {room}{rate}"
        if disk is None:
            return expert_bytes >= UNMEASURED_DIRECT_BYTES, why
        if past is None or (through is not None and not _past_is_as_good(past, through)):
            return False, why
        return True, f"{why}; what it lacks is read past it the first time: {_compared(past, through)}"
    unfit = f"the experts ({format_bytes(checkpoint_bytes)}) do not fit {room}"
    if disk is None:
        direct = expert_bytes >= UNMEASURED_DIRECT_BYTES
        compared = "at least" if direct else "less than"
        way = "O_DIRECT" if direct else "page cache"
        size = f"an expert ({format_bytes(expert_bytes)}) has {compared} {format_bytes(UNMEASURED_DIRECT_BYTES)}"
        return direct, f"{way}: {size}, and {unfit}; {NOT_MEASURED}"
    if past is None:
        return False, f"page cache: {disk.direct_refused or 'no O_DIRECT rate was measured'}; {unfit}"
    if through is None or _past_is_as_good(past, through):
        return True, f"{_compared(past, through)}; {unfit}"
    return False, f"page cache: {_reached(through)} when cold, against {format_rate(past.bytes_per_s)} with O_DIRECT; {unfit}"


def _past_is_as_good(past: DiskRate, through: DiskRate) -> bool:
    """Reading past the page cache saves a copy, and new memory for the page cache."""
    return past.bytes_per_s >= GOOD_ENOUGH * through.bytes_per_s


def _compared(past: DiskRate, through: DiskRate | None) -> str:
    against = f", against {format_rate(through.bytes_per_s)} through the page cache" if through is not None else ""
    return f"O_DIRECT: {_reached(past)}{against}"


def _reached(rate: DiskRate) -> str:
    return f"{format_rate(rate.bytes_per_s)} at {format_bytes(rate.request_bytes)} and depth {rate.depth}"


def _threads(
    disk: DiskRates | None, direct: bool, expert_bytes: int, most: int, link_bytes_per_s: float | None
) -> tuple[int, str]:
    """The fewest threads, up to `most`, with nearly the best rate."""
    curve = disk.curve(direct=direct, request_bytes=expert_bytes) if disk else ()
    if not curve:
        return UNMEASURED_IO_THREADS, f"{UNMEASURED_IO_THREADS} threads: {NOT_MEASURED}"
    most = min(most, MOST_THREADS)
    useful = [rate for rate in curve if rate.depth <= most] or curve[:1]
    best = max(rate.bytes_per_s for rate in useful)
    enough = GOOD_ENOUGH * min(best, link_bytes_per_s or best)
    chosen = next(rate for rate in useful if rate.bytes_per_s >= enough)
    threads = min(chosen.depth, MOST_THREADS)
    copies = direct and threads == 1  # from its bounce buffer; meanwhile a single thread would leave the disk idle
    threads += copies
    plural = "s" if threads > 1 else ""
    reached = f"{format_rate(chosen.bytes_per_s)} at {format_bytes(chosen.request_bytes)}"
    bound = f"the best of up to {most} is {format_rate(best)}"
    if link_bytes_per_s and link_bytes_per_s < best:
        bound = f"the GPU's link copies {format_rate(link_bytes_per_s)}"
    why = "; a second thread reads while the first copies" if copies else ""
    return threads, f"{threads} thread{plural}: {reached}, and {bound}{why}"
