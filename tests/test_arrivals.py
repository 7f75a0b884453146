"""Experts that native threads read while others are computed: the same bits in any order, and what becomes of failed reads."""

import errno
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import system_reads
import tiny_models
import torch
from expert_records import Batch, Experts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import ask, copied_model  # noqa: F401
from test_store import every_expert, past_cache, store_of

import vismoe
from vismoe.errors import TransferError
from vismoe.kernels import read
from vismoe.kernels.read import OnDisk, Stretch
from vismoe.paging.pager import Pager
from vismoe.paging.tickets import Ticket, arrivals_of
from vismoe.paging.transfer import DiskMover
from vismoe.pools.pool import SlabPool
from vismoe.store.files import OpenFiles
from vismoe.timeline import Timeline
from vismoe.types import ExpertId, Format, Phase

FAR = 3  # bytes before a record in its file: nothing is aligned


class Written:
    """Records of experts in a file, in two pieces each, and how they are read."""

    def __init__(self, folder: Path, experts: Experts):
        path, nbytes = folder / "records", experts.slabs[0].numel()
        path.write_bytes(b"".join(bytes(FAR) + slab.numpy().tobytes() for slab in experts.slabs))
        self.path, self.file_bytes, self.state = path, path.stat().st_size, None
        self.files = OpenFiles([self], os.O_RDONLY)
        cut, apart = nbytes // 3, FAR + nbytes
        of_each = [
            [
                Stretch(0, FAR + apart * i, [(0, cut)]),
                Stretch(0, FAR + apart * i + cut, [(cut, nbytes - cut)]),
            ]
            for i in range(len(experts.slabs))
        ]
        self.on_disk = OnDisk(self.files.way, of_each, self.files)

    def parts(
        self, experts: Experts, batch: Batch, coming: list[int], all_read: bool = False
    ) -> tuple[torch.Tensor, list[read.Arrival]]:
        """As `Batch.parts`; records that are coming are empty at first. all_read: they are read before the kernels begin."""
        empty = [torch.full_like(slab, 0xFF) if i in coming else slab for i, slab in enumerate(experts.slabs)]
        records = np.array([slab.data_ptr() for slab in empty], np.uint64)
        arrivals = [self.on_disk.arrival(i, int(records[i])) for i in coming]
        for arrival, i in zip(arrivals, coming):
            arrival.at = i
        read.begin_reading(arrivals)
        if all_read:
            read.wait_for_reading(arrivals)
        out = torch.full((len(batch.tokens), experts.kernel.hidden), torch.nan)
        call = records, batch.starts, batch.tokens, batch.factors, batch.hidden, out
        spans, waited_s = experts.kernel.parts(*call, coming=arrivals)
        assert len(spans) <= len(coming) + 1 and waited_s >= 0
        return out, arrivals


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> list[tuple[Experts, Written]]:
    read.start_readers(3)
    made = [Experts.of(format, count=8) for format in (Format.RAW, Format.INT4)]
    return [(experts, Written(tmp_path_factory.mktemp("records"), experts)) for experts in made]


@settings(max_examples=25)
@given(kind=st.integers(0, 1), tokens=st.sampled_from([1, 1, 5, 20]), seed=st.integers(0, 2**31), data=st.data())
def test_no_bit_depends_on_what_comes_and_when(written, kind, tokens, seed, data):
    experts, files = written[kind]
    coming = data.draw(st.lists(st.integers(0, 7), unique=True, min_size=1))
    np.random.seed(seed)
    torch.manual_seed(seed)
    batch, rng = (
        Batch.of([1 if tokens == 1 else random.Random(seed + i).randint(0, tokens) for i in range(8)], tokens=tokens),
        (random.Random(seed)),
    )
    expected, preadv = batch.parts(experts), os.preadv

    def late(descriptor, buffers, offset):
        time.sleep(rng.choice([0, 0.0005, 0.002]))
        return preadv(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        system_reads.replace(patch, late)
        slow = Written(files.path.parent, experts)
        out, asked = slow.parts(experts, batch, coming)
    assert torch.equal(out, expected)
    assert all(arrival.done and not arrival.ended and arrival.began_s <= arrival.ended_s for arrival in asked)


@pytest.mark.parametrize("kind", [0, 1])
@settings(max_examples=10)
@given(coming=st.permutations(range(8)), absent=st.integers(0, 7))
def test_all_of_a_layer_may_have_come_in_any_order(written, kind, coming, absent):
    """For example, a guess is named last, though its expert has the smallest id."""
    experts, files = written[kind]
    files, batch = Written(files.path.parent, experts), Batch.of([2, 1, 3, 1, 1, 2, 1, 4], tokens=5)
    for some in (coming, coming[absent:]):
        out, _ = files.parts(experts, batch, list(some), all_read=True)
        assert torch.equal(out, batch.parts(experts))


def test_what_cannot_be_read_is_said_and_the_others_are_computed(written, monkeypatch):
    experts, files = written[0]
    batch, preadv, broken = Batch.of([1] * 8, tokens=1), os.preadv, files.on_disk.stretches[2][1].offset_bytes

    def fails(descriptor, buffers, offset):
        if offset == broken:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, fails)
    out, asked = Written(files.path.parent, experts).parts(experts, batch, [1, 2, 5])
    assert [arrival.ended for arrival in asked] == [0, errno.EIO, 0] and asked[1].failed == 1
    there = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(out[there], batch.parts(experts)[there])


def test_a_file_that_changed_or_was_cut_off_is_found_out(tmp_path):
    experts = Experts.of(count=2)
    files, batch = Written(tmp_path, experts), Batch.of([1, 1], tokens=1)
    os.utime(files.path, ns=(0, 12345))
    _, asked = files.parts(experts, batch, [1])
    assert asked[0].ended == read.CHANGED and "has changed since" in str(files.files.error_of(read.CHANGED, 0, 0, 1))
    os.truncate(files.path, files.file_bytes - 10)
    _, asked = files.parts(experts, batch, [1])
    assert (asked[0].ended, asked[0].failed) == (read.ENDED_EARLY, 1)


@pytest.mark.parametrize("past", [False, True])
def test_a_store_says_how_its_experts_are_read(tmp_path, past):
    store = store_of(tiny_models.save("qwen3_moe", tmp_path))
    if past:
        past_cache(store)
    for expert in every_expert(store)[:5]:
        record, mine = (torch.zeros(store.inventory.layout(expert.layer).record_bytes, dtype=torch.uint8) for _ in range(2))
        nbytes = store.read(expert, record)
        reading = store.reading(expert, mine.data_ptr())
        assert reading is not None and reading.nbytes == nbytes
        moved = [Stretch(s.file, s.offset_bytes, [(mine.data_ptr() + at, n) for at, n in s.pieces]) for s in reading.stretches]
        reading.files.fill_all(moved)
        for name, value in store.inventory.layout(expert.layer).views(record).items():
            assert torch.equal(store.inventory.layout(expert.layer).views(mine)[name], value)
    cast = store_of(tmp_path, torch.bfloat16)
    assert cast.reading(ExpertId(0, 0), 0) is None, "its weights are cast when they are read"


class SlowDisk:
    """Reads wait until they may, but not for longer; `under_way`: how many do. `fails`: the first one, in the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False, longest_s: float = 20):
        self._longest_s = longest_s
        self.may, self.under_way, self._preadv, self._fails = threading.Event(), 0, os.preadv, fails
        system_reads.replace(monkeypatch, self._read)

    def _read(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.under_way += 1
        fails, self._fails = self._fails, False
        self.may.wait(self._longest_s)
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        got = self._preadv(descriptor, buffers, offset)
        self.under_way -= 1
        return got

    def goes_on_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.may.set).start()


def paged(folder: Path) -> Pager:
    store = store_of(tiny_models.save("qwen3_moe", folder))
    pager = Pager(store.inventory, [SlabPool(layout, 6) for layout in store.inventory.layouts], DiskMover(store), threads=1)
    pager.begin_step(Phase.DECODE)
    return pager


def until(reached: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.mark.parametrize("left_by", [RuntimeError, KeyboardInterrupt])
def test_a_demand_that_is_left_early_waits_for_what_native_threads_read(tmp_path, monkeypatch, left_by):
    disk, pager = SlowDisk(monkeypatch), paged(tmp_path)
    with pytest.raises(left_by), pager.demand(0, [1, 3], by_reading=True) as lease:
        assert len(lease.demand.reading) == 2 and not pager.core.queue
        until(lambda: disk.under_way)
        disk.goes_on_in(0.05)
        raise left_by
    assert disk.may.is_set() and not disk.under_way, "slabs may get other experts now"
    assert not pager.core.tickets and (pager.residency()[0, [1, 3]] != 0).all() == (left_by is RuntimeError)
    pager.check_integrity()
    pager.close()


def test_ctrl_c_at_any_line_of_a_copy_leaves_nothing_being_read(tmp_path, monkeypatch):
    SlowDisk(monkeypatch, longest_s=0.02)
    pager = paged(tmp_path)
    pool, mover, left = pager.core.tables[0].pool, DiskMover(store_of(tmp_path)), 0

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "/vismoe/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return at_line

    slab, before = pool.take(), sys.gettrace()
    assert slab is not None
    mover.move(Ticket(ExpertId(0, 1), 0, slab), pool)  # where experts lie is worked out once
    for lines in itertools.count():
        left = lines
        sys.settrace(at_line)
        try:
            mover.move(ticket := Ticket(ExpertId(0, 1), 0, slab), pool)
            break
        except KeyboardInterrupt:
            arrivals = arrivals_of([ticket])
            assert all(arrival.done or not arrival.has_begun for arrival in arrivals), f"after {lines} lines"
        finally:
            sys.settrace(before)
    assert lines > 10
    pager.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_guess_on_its_way_is_computed_with_what_its_layer_demands(tmp_path, monkeypatch, fails):
    disk, pager = SlowDisk(monkeypatch, fails), paged(tmp_path)
    scores = np.zeros((1, pager.inventory.layers[1].num_experts), np.float32)
    scores[0, 2] = 1.5
    pager.changes.make(pager.core.look_ahead, 0, scores)
    until(lambda: disk.under_way)
    with pager.demand(1, [2, 3], by_reading=True) as lease:
        assert {ticket.expert.expert for ticket in lease.demand.reading} == {2, 3}
        disk.goes_on_in(0.05)
        lent = []
        for group in lease.groups(in_order=False):
            lent.append(group.experts)
            read.wait_for_reading(group.coming)  # as the kernels do
    assert lent == ([[2, 3], [2]] if fails else [[2, 3]]), "a guess that failed is read again"
    decode = pager.metrics.snapshot().to_json()["per_phase"]["decode"]
    assert decode["bytes_read"] == sum(pager.core.tables[0].pool.record_bytes) * 2 and decode["wasted_prefetch_bytes"] == 0
    pager.check_integrity()
    pager.close()


def test_what_waits_for_a_slab_is_left_to_those_who_copy(tmp_path):
    store = store_of(tiny_models.save("qwen3_moe", tmp_path))
    pager = Pager(store.inventory, [SlabPool(layout, 2) for layout in store.inventory.layouts], DiskMover(store), threads=1)
    pager.begin_step(Phase.DECODE)
    for wanted in ([0, 1], [0, 1, 2]):
        with pager.demand(0, wanted, by_reading=wanted == [0, 1, 2]) as lease:
            assert not lease.demand.reading
            assert sorted(expert for group in lease.groups(in_order=False) for expert in group.experts) == wanted
    pager.check_integrity()
    pager.close()


def test_closing_a_store_closes_its_files_although_native_threads_have_read(tmp_path):
    store = store_of(tiny_models.save("qwen3_moe", tmp_path))
    assert store.reading(ExpertId(0, 0), 64) is not None
    descriptors = store._files.hold()._descriptors
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


@pytest.mark.parametrize("reads", ["cached", "direct"])
def test_decode_reads_by_native_threads_and_a_failing_disk_fails_one_request_only(copied_model, reads, monkeypatch):  # noqa: F811
    readers, failing, preadv = set[str](), threading.Event(), os.preadv

    def seen(descriptor, buffers, offset):
        native = isinstance(threading.current_thread(), threading._DummyThread)
        readers.add("native" if native else "own")
        if failing.is_set() and native:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, seen)
    with vismoe.load(copied_model, memory="25%", device="cpu", reads=reads) as engine:
        readers.clear()  # a filesystem is tried, and the backbone read, by Python's own threads
        expected = "".join(engine.chat(ask(), max_tokens=12))
        assert readers == {"native"}
        with pytest.raises(TransferError, match=r"expert \d+ of MoE layer \d+ could not be brought in: .*Input/output error"):
            for _ in engine.chat(ask(), max_tokens=12):
                failing.set()  # from the first token on
        engine._runtime.pager.check_integrity()
        with pytest.raises(TransferError, match=r"expert \d+ of MoE layer \d+ could not be brought in: .*Input/output error"):
            list(engine.chat(ask(), max_tokens=12))
        engine._runtime.pager.check_integrity()
        failing.clear()
        engine._runtime.pager.timeline = timeline = Timeline()
        assert "".join(engine.chat(ask(), max_tokens=12)) == expected
        lanes = {span.track for span in timeline.spans if span.name == "copy"}
        assert any(lane.startswith("vismoe-reader-") for lane in lanes) and any(
            span.track == "compute" for span in timeline.spans
        )
        engine._runtime.pager.check_integrity()
