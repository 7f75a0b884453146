"""Pools of two formats under one numbering, against the pools themselves; and the pages that a pool lies in."""

import ctypes
import gc
import mmap
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.app.allocator import trim
from vismoe.errors import ConfigError
from vismoe.kernels.pages import give_pages
from vismoe.pools import backing
from vismoe.pools.advice import HUGEPAGE, advise
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.types import HIGH, LOW, RecordLayout


def pool(numbers: int, slabs: int, **kw) -> SlabPool:
    return SlabPool(RecordLayout.of({"w": (numbers,)}, {"w": torch.int64}), slabs, **kw)


def test_one_pool_is_itself_under_another_name():
    alone = pool(2, 3)
    slabs = Slabs.of(alone)
    assert slabs.precision is None and slabs.formats == 1 and slabs.capacity == slabs.free == slabs.capacity_of(HIGH) == 3
    assert Slabs.of(slabs) is slabs
    assert sorted(slabs.take() for _ in range(3)) == [0, 1, 2] and slabs.take() is None and alone.free == 0
    assert slabs.addresses.tolist() == alone.addresses.tolist()
    assert slabs.precision_of(2) == HIGH and slabs.bytes_of(2) == alone.layout.record_bytes


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_slabs_are_taken_and_given_back_in_the_format_that_they_hold(high, low, calls):
    pools = pool(4, high), pool(2, low)
    slabs = Slabs(pools)
    assert slabs.precision.tolist() == [HIGH] * high + [LOW] * low
    assert slabs.capacity == high + low and [slabs.capacity_of(p) for p in (HIGH, LOW)] == [high, low]
    before = slabs.addresses.copy()
    held: list[int] = []
    for call, number in calls:
        if call < 2:
            free, slab = slabs.free_of(call), slabs.take(call)
            assert (slab is None) == (free == 0)
            if slab is not None:
                assert slab not in held and slabs.precision_of(slab) == call
                held.append(slab)
        elif held:
            slabs.give_back(held.pop(number % len(held)))
        slabs.check_integrity()
        assert [slabs.free_of(p) for p in (HIGH, LOW)] == [
            n - sum(slabs.precision_of(slab) == p for slab in held) for p, n in ((HIGH, high), (LOW, low))
        ]
        assert slabs.free == slabs.capacity - len(held)
    free = [slab for slab in range(slabs.capacity) if slab not in held]
    slabs.free_only(held)
    slabs.check_integrity()
    assert slabs.free == len(held)
    slabs.free_only(free)
    assert {slabs.take(p) for p in (HIGH, LOW) for _ in range(high + low + 1)} == {*free, None}
    assert (slabs.addresses == before).all()


def test_a_number_means_one_record_whoever_is_asked():
    slabs = Slabs((pool(4, 2), pool(2, 3)))
    for slab in range(slabs.capacity):
        assert slabs.record(slab).numel() == slabs.bytes_of(slab) == slabs.record_bytes[slabs.precision_of(slab)]
        assert slabs.record(slab).data_ptr() == slabs.weights(slab)["w"].data_ptr() == slabs.addresses[slab]
        slabs.weights(slab)["w"].fill_(slab)
    assert [slabs.record(slab).view(torch.int64)[0].item() for slab in range(slabs.capacity)] == list(range(slabs.capacity))


def test_what_is_aliased_into_a_slab_shows_in_its_address_and_its_weights():
    hosts = pool(4, 3), pool(2, 3)
    slabs = Slabs((pool(4, 2, aliased=True), pool(2, 2, aliased=True)))
    for slab, (host, record) in enumerate(((hosts[0], 2), (hosts[0], 0), (hosts[1], 1), (hosts[1], 2))):
        slabs.alias(slab, host, record)
        assert slabs.addresses[slab] == host.addresses[record]
        assert slabs.weights(slab)["w"].data_ptr() == host.record(record).data_ptr()
    assert np.unique(slabs.addresses).size == 4
    with pytest.raises(AssertionError):
        Slabs((pool(4, 2, aliased=True), pool(2, 2)))


def flags_at(address: int) -> set[str]:
    """What the kernel noted about the mapping that holds an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= address < int(found[2], 16)
        elif within and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def test_a_pool_asks_for_huge_pages_and_memory_that_is_lent_gets_small_ones():
    pool = SlabPool(RecordLayout.of({"w": (2**20,)}, {"w": torch.uint8}), 8)
    if not pool.elastic or not advise(int(pool.addresses[7]), 2**20, HUGEPAGE):
        pytest.skip("this system has no huge pages")
    lent, other = pool.take(), pool.take()
    inside = [int(pool.addresses[slab]) + 2**19 for slab in (lent, other)]
    assert all("hg" in flags_at(address) for address in inside)
    pool.record(lent).fill_(1)
    assert pool.unback(lent) and not pool.record(lent).any()
    assert "nh" in flags_at(inside[0]) and "hg" in flags_at(inside[1])


def pages_there(memory: torch.Tensor) -> list[bool]:
    """Of each whole page of `memory`, whether it has a page of its own: one that was only read shows the one of zeros."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE)
    pages = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE - first
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * pages), dtype=np.uint64)
    present, exclusive = entries >> np.uint64(63) & np.uint64(1), entries >> np.uint64(56) & np.uint64(1)
    return (present & exclusive).astype(bool).tolist()


@pytest.fixture
def roomy(monkeypatch) -> RecordLayout:
    """Of slabs of 1 MiB, of which a few are worth pages ahead. What earlier tests have freed has no pages left."""
    trim()
    monkeypatch.setattr(backing, "LEAST_BYTES", 2**20)
    monkeypatch.setattr(backing, "PIECE_BYTES", 2**18)
    return RecordLayout.of({"w": (2**20,)}, {"w": torch.uint8})


def slowly(monkeypatch, counted=None):
    """Pages are given a piece at a time, with a pause."""
    real = backing.give_pages

    def slow(*place):
        time.sleep(0.002)
        given = real(*place)
        if counted is not None:
            counted.append(place)
        return given

    monkeypatch.setattr(backing, "give_pages", slow)


def test_a_pool_has_its_pages_before_they_are_written_and_loses_nothing(roomy):
    pool = SlabPool(roomy, 40)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    held = [pool.take() for _ in range(40)]
    for slab in held[::-3]:
        pool.record(slab).fill_(slab)  # meanwhile
    pool._backing.wait()
    assert all(pages_there(pool.buffer)) and pool._backing.backed_bytes() == 40 * 2**20
    assert [int(pool.record(slab).max()) for slab in held] == [slab if slab in held[::-3] else 0 for slab in held]


def test_memory_that_is_lent_gets_no_pages_ahead(roomy, monkeypatch):
    slowly(monkeypatch)
    pool = SlabPool(roomy, 200)
    if not pool.elastic:
        pytest.skip("memory is not lent here")
    lent = [pool.take() for _ in range(200)][-1]
    assert pool.unback(lent)
    pool._backing.wait()
    assert not any(pages_there(pool.buffer[lent])[1:-1]), "neighbours may share a page at its ends"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pool_that_rests_gets_no_pages_until_the_rest_is_over(roomy, monkeypatch, threads):
    """Not the rest of a piece that is under way either."""
    begun, goes_on, real = threading.Semaphore(0), threading.Semaphore(0), backing.give_pages

    def gated(*place):
        begun.release()
        assert goes_on.acquire(timeout=60)
        return real(*place)

    monkeypatch.setattr(backing, "give_pages", gated)
    monkeypatch.setattr(backing, "MOST_THREADS", threads)
    monkeypatch.setattr(backing, "cores", lambda: threads)
    pool = SlabPool(roomy, 40)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    for _ in range(3):
        assert begun.acquire(timeout=60)
        goes_on.release()
    for _ in range(threads):
        assert begun.acquire(timeout=60)  # three pieces have pages, and each thread would begin another one
    pool.rest(time.perf_counter() + 1000)
    assert pool.rests and pool.gets_pages
    goes_on.release(1000)
    assert not begun.acquire(timeout=2.5 * backing.LOOK_S) and pool._backing.backed_bytes() == 3 * 2**18
    pool.rest(0.0)
    assert not pool.rests
    pool._backing.wait()
    assert pool.has_pages and all(pages_there(pool.buffer))


@pytest.mark.parametrize("at_rest", [False, True])
def test_a_pool_that_rests_still_ends_its_threads(roomy, monkeypatch, at_rest):
    slowly(monkeypatch)
    pool = SlabPool(roomy, 400)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    pool.rest(time.perf_counter() + 1000)
    if at_rest:
        time.sleep(2 * backing.LOOK_S)
    stopping = threading.Thread(target=pool._backing.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive() and not pool.gets_pages and not pool.has_pages


def test_threads_that_give_pages_end_with_the_pool_and_leave_cores_to_others(roomy, monkeypatch):
    asked, nice, before = [], [], os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    slowly(monkeypatch, asked)
    real = backing.host_memory
    monkeypatch.setattr(
        backing,
        "host_memory",
        lambda: nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) or real(),
    )
    pool = SlabPool(roomy, 4000)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    threads = pool._backing._threads
    del pool
    for thread in threads:
        thread.join(60)
    assert threads and not any(thread.is_alive() for thread in threads) and len(asked) < 16000
    assert set(nice) == {max(backing.NICE, before)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before, "of these threads alone"


@pytest.fixture
def early(roomy):
    if sys.platform != "linux":
        pytest.skip("memory gets no pages ahead here")
    return lambda most, wanted: backing.EarlyMemory(most * 2**20, wanted * 2**20)


def test_a_pool_takes_memory_that_has_pages_and_the_rest_is_given_back(roomy, early):
    memory = early(64, 24)
    memory._backing.wait()
    assert memory.backed_bytes() == 24 * 2**20
    pool = SlabPool(roomy, 40, early=lambda nbytes, slab_bytes: (memory.take(nbytes), dict))
    assert all(pages_there(pool.buffer[:23]))
    pool._backing.wait()
    assert all(pages_there(pool.buffer))
    end = pool._first + pool.nbytes + mmap.PAGESIZE
    assert flags_at(end - 1) and not mapped(end + 2**21), "behind it there is no memory"
    pool.buffer.fill_(7)
    assert memory.backed_bytes() == 0 and memory.take(1) is None, "it was taken"
    memory.free()
    assert pool.buffer.unique().tolist() == [7], "it is the pool's"
    first = pool._first
    del pool
    gc.collect()
    assert not mapped(first)


def test_who_waits_for_pages_learns_when_they_are_there_and_when_they_will_not_be(early, monkeypatch):
    more, real = threading.Semaphore(0), backing.give_pages
    monkeypatch.setattr(backing, "give_pages", lambda *place: more.acquire(timeout=60) and real(*place))
    monkeypatch.setattr(backing, "PIECE_BYTES", 2**20)
    monkeypatch.setattr(backing, "MOST_THREADS", 1)
    memory, found = early(64, 24), []

    def waits(first_mb, mb):
        thread = threading.Thread(target=lambda: found.append(memory.wait_for_pages(first_mb * 2**20 + 5, mb * 2**20)))
        thread.start()
        return thread

    thread = waits(1, 2)
    more.release(3)
    thread.join(0.05)
    assert thread.is_alive() and not found, "it needs a page of the fourth piece, too"
    more.release()
    thread.join(60)
    assert found == [True]
    thread = waits(7, 2)
    memory._backing._pages.stop()
    more.release()
    thread.join(60)
    assert found == [True, False] and memory.wait_for_pages(0, 3 * 2**20) and not memory.wait_for_pages(23 * 2**20, 2**20)


@pytest.mark.parametrize("how", ["too little", "freed", "forgotten"])
def test_memory_that_is_not_taken_is_given_back(roomy, early, monkeypatch, how):
    slowly(monkeypatch)
    memory = early(64, 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory._memory))
    assert mapped(address)
    if how == "too little":
        assert memory.take(2**26 + 1) is None
    elif how == "freed":
        memory.free()
    threads = memory._backing._threads
    del memory
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not mapped(address + 2**25)


def test_no_addresses_are_reserved_where_others_would_lack_them(tmp_path, monkeypatch):
    monkeypatch.setattr(backing, "OVERCOMMIT", tmp_path / "overcommit_memory")
    monkeypatch.setattr(backing.resource, "getrlimit", lambda what: (limits[what], -1))
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY}
    assert backing.addresses_are_free()
    backing.OVERCOMMIT.write_text("0\n")
    assert backing.addresses_are_free()
    backing.OVERCOMMIT.write_text("2\n")
    assert not backing.addresses_are_free()
    backing.OVERCOMMIT.unlink()
    limits[resource.RLIMIT_AS] = 2**40
    assert not backing.addresses_are_free()


@pytest.mark.parametrize("wrong", ["forbidden", "not built"])
def test_threads_that_cannot_give_pages_end_quietly(roomy, monkeypatch, wrong, capfd):
    def refuse(*given):
        raise PermissionError if wrong == "forbidden" else ConfigError("not built")

    monkeypatch.setattr(*((os, "setpriority") if wrong == "forbidden" else (backing, "give_pages")), refuse)
    pool = SlabPool(roomy, 40)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    pool._backing.wait()
    assert all(pages_there(pool.buffer)) == (wrong == "forbidden") and capfd.readouterr().err == ""


def mapped(address: int) -> bool:
    """Whether there is memory at this address."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in spans)


def test_pages_are_given_under_the_hands_of_writers():
    """Whatever is written meanwhile stays, and a stop ends it."""
    memory, ended = np.zeros(2**22, np.uint8), threading.Event()

    def give():
        while not ended.is_set():
            give_pages(memory.ctypes.data, memory.nbytes)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        for turn in range(300):
            memory[:: mmap.PAGESIZE] = turn % 251  # the very bytes that are written to
            assert (memory[:: mmap.PAGESIZE] == turn % 251).all()
    finally:
        ended.set()
        thread.join()
    fresh = mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
    assert give_pages(address, 2**20, ctypes.c_int32(1)) == 0
    assert not any(pages_there(torch.frombuffer(fresh, dtype=torch.uint8)))
    assert give_pages(address, 2**20) == 2**20
    assert all(pages_there(torch.frombuffer(fresh, dtype=torch.uint8)))


def test_no_pages_are_taken_ahead_of_the_last_free_memory(roomy, monkeypatch):
    monkeypatch.setattr(backing, "host_memory", lambda: (backing.SPARE_BYTES - 1, 2**40))
    pool = SlabPool(roomy, 40)
    if not pool.elastic:
        pytest.skip("memory gets no pages ahead here")
    pool._backing.wait()
    assert not any(pages_there(pool.buffer))
