"""Reads past the page cache straight into where experts lie, and through the bounce buffer at their edges: every byte, no other
one, by a disk that is strict about addresses."""

import dataclasses
import errno
import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
import system_reads
import torch
from expert_records import FORMATS, Batch, Experts
from hypothesis import given
from hypothesis import strategies as st
from test_engine import ask, copied_model  # noqa: F401
from test_store import every_expert, past_cache, store_of

import vismoe
from vismoe.kernels import read
from vismoe.kernels.read import FileAccess, Stretch, memory_alignment
from vismoe.models.load import opening
from vismoe.pools.advice import block_buffer
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.store.files import OpenFiles
from vismoe.types import BLOCK_BYTES, RecordLayout

FILE_BYTES = 20 * BLOCK_BYTES + 1234
GUARD = 0xA5


def address_of(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


class StrictDisk:
    """A file in memory that is read as O_DIRECT allows it; torn reads end on a block that memory is aligned to."""

    refusal = errno.EINVAL

    def __init__(self, memory_bytes: int, torn: random.Random | None = None):
        self.content = np.random.default_rng(0).integers(0, 256, FILE_BYTES, np.uint8).tobytes()
        self.memory_bytes, self._torn = memory_bytes, torn
        self.places: list[tuple[int, int]] = []  # (address, bytes) of what it wrote
        self.asked: list[int] = []  # bytes of each call

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        unit = max(512, self.memory_bytes)
        if offset % unit or any(address_of(buffer) % self.memory_bytes or len(buffer) % unit for buffer in buffers):
            raise OSError(self.refusal, os.strerror(self.refusal))
        left = sum(len(buffer) for buffer in buffers)
        self.asked.append(left)
        if self._torn is not None and left > unit:
            left = unit * self._torn.randint(1, left // unit)
        done = 0
        for buffer in buffers:
            got = self.content[offset + done : offset + done + min(len(buffer), left - done)]
            buffer[: len(got)] = got
            self.places.append((address_of(buffer), len(got)))
            done += len(got)
        return done


@given(
    memory_bytes=st.sampled_from([4, 16, 64, 512, 4096]),
    begin=st.integers(0, 3 * BLOCK_BYTES),
    sizes=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 5 * BLOCK_BYTES)), min_size=1, max_size=5),
    apart=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    aligned=st.booleans(),
    torn=st.one_of(st.none(), st.builds(random.Random, st.integers(0, 99))),
    most_bytes=st.one_of(st.just(read.MOST_BYTES), st.integers(1, 5).map(lambda blocks: blocks * BLOCK_BYTES)),
)
def test_every_byte_arrives_and_no_other_one_changes(memory_bytes, begin, sizes, apart, aligned, torn, most_bytes):
    disk = StrictDisk(memory_bytes, torn)
    sizes = [size for size, end in zip(sizes, np.cumsum(sizes)) if begin + end <= FILE_BYTES] or [FILE_BYTES - begin]
    memory = block_buffer(64 * BLOCK_BYTES)
    memory[:] = GUARD
    expected, address = memory.copy(), memory.__array_interface__["data"][0]
    at, place, pieces = begin, begin % memory_bytes, []
    for size, gap in zip(sizes, apart):
        place += (gap * memory_bytes) if aligned else 64 * gap  # else most pieces lie where this disk cannot write
        pieces.append((address + place, size))
        expected[place : place + size] = np.frombuffer(disk.content[at : at + size], np.uint8)
        at, place = at + size, place + size
    bounce = block_buffer(8 * BLOCK_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        system_reads.replace(patch, disk.read)
        files = (read.File * 1)(read.File(-1))
        way = FileAccess.of(files, bounce.nbytes, BLOCK_BYTES, 512, memory_bytes, most_bytes)
        ended, _ = read.read(way, [Stretch(0, begin, pieces)], bounce)
    assert ended == errno.EBADF, "all was read, and then it was asked whether the file has changed, which there is not"
    assert np.array_equal(memory, expected) and max(disk.asked) <= most_bytes
    straight = sum(size for there, size in disk.places if address <= there < address + memory.nbytes)
    whole = sum(
        max(0, (at + size) // BLOCK_BYTES * BLOCK_BYTES - -(-at // BLOCK_BYTES) * BLOCK_BYTES)
        for at, size in zip(np.cumsum([begin, *sizes]).tolist(), sizes)
    )
    edges = -(-(begin + sum(sizes)) // BLOCK_BYTES) * BLOCK_BYTES - begin // BLOCK_BYTES * BLOCK_BYTES - whole
    if aligned and torn is None and edges <= min(bounce.nbytes, sum(sizes) // 2):
        assert straight == whole, "blocks of one piece alone go straight to it"


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EIO])
def test_a_disk_that_wants_more_than_the_system_says_is_read_through_the_buffer(refusal, monkeypatch):
    disk, memory, bounce = StrictDisk(512), block_buffer(8 * BLOCK_BYTES), block_buffer(8 * BLOCK_BYTES)
    disk.refusal = refusal
    system_reads.replace(monkeypatch, disk.read)
    files = (read.File * 1)(read.File(-1))
    way = FileAccess.of(files, bounce.nbytes, BLOCK_BYTES, 512, 4)
    address = memory.__array_interface__["data"][0] + 8
    ended, _ = read.read(way, [Stretch(0, 400, [(address, 6 * BLOCK_BYTES)])], bounce)
    assert ended == errno.EBADF and memory[8:][: 6 * BLOCK_BYTES].tobytes() == disk.content[400:][: 6 * BLOCK_BYTES]


def test_the_system_says_how_memory_is_aligned(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * BLOCK_BYTES))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    found = memory_alignment(descriptor)
    assert found == 0 or (found <= BLOCK_BYTES and found & (found - 1) == 0)
    os.close(descriptor)
    assert memory_alignment(descriptor) == 0, "nothing is known about a file that is closed"


def test_records_begin_where_the_disk_can_write_them(copied_model, monkeypatch):  # noqa: F811
    """As much of every expert as has whole blocks goes straight into its slab, wherever its file begins."""
    monkeypatch.setattr(OpenFiles, "memory_bytes", 512)
    store = store_of(copied_model, torch.bfloat16)
    room = store.room_bytes()
    assert all(store.begins(expert) == 0 for expert in every_expert(store)), "through the page cache nothing is aligned"
    past_cache(store)
    begins = {store.begins(expert) for expert in every_expert(store)}
    assert room == BLOCK_BYTES and begins != {0}, "the tensors of the demo model begin somewhere in a block"
    pools = Slabs([SlabPool(layout.with_room(room), 3) for layout in store.inventory.layouts])
    preadv, places = os.preadv, list[tuple[int, int]]()

    def seen(descriptor, buffers, offset):
        places.extend((address_of(buffer), len(buffer)) for buffer in buffers)
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, seen)
    store.read_past_cache()  # anew, with the system's read replaced
    slab, straight = pools.take(), 0
    for expert in every_expert(store)[:20]:
        pools.place(slab, lambda expert=expert: store.begins(expert))
        record = pools.record(slab)
        assert record.data_ptr() == pools.addresses[slab]
        record.fill_(GUARD)
        store.read(expert, record)
        assert max(places, key=lambda place: place[1])[0] % BLOCK_BYTES == 0, "a disk writes to the start of a page"
        straight += sum(size for there, size in places if record.data_ptr() <= there < record.data_ptr() + record.numel())
        places.clear()
        elsewhere = SlabPool(store.inventory.layouts[0], 1)
        store.read(expert, elsewhere.record(0))
        places.clear()
        for name, value in elsewhere.weights(0).items():
            assert np.array_equal(pools.weights(slab)[name].view(-1).float(), value.view(-1).float())
    assert straight > 20 * store.inventory.layouts[0].record_bytes // 2


@pytest.mark.parametrize("memory_bytes, room_bytes", [(0, 0), (4, BLOCK_BYTES), (512, BLOCK_BYTES), (2 * BLOCK_BYTES, 0)])
def test_slabs_have_room_where_the_system_says_that_it_helps(memory_bytes, room_bytes, copied_model, monkeypatch):  # noqa: F811
    monkeypatch.setattr(OpenFiles, "memory_bytes", memory_bytes)
    store = store_of(copied_model, torch.bfloat16)
    monkeypatch.setattr(store, "_begin", lambda expert: 24)
    assert store.room_bytes() == room_bytes
    monkeypatch.setattr(store, "_begin", lambda expert: 0)
    assert store.room_bytes() == 0


def test_a_place_is_within_the_room_of_a_slab_and_its_pages_are_those_of_the_slab():
    layout = RecordLayout.of({"w": (1000,)}, {"w": torch.int64}).with_room(512)
    assert layout.room_bytes == 512 and layout.record_bytes == 8192 + 512
    pool = SlabPool(layout, 3)
    start, slab, pages = int(pool.addresses[1]), pool.take(), pool.page_bytes(1)
    with pytest.raises(AssertionError):
        pool.place(slab, 512)
    assert slab == 0 and pool.take() == 1
    pool.place(1, 504)
    assert pool.addresses.tolist() == [start - 8704, start + 504, start + 8704] and pool.page_bytes(1) == pages
    assert pool.record(1).numel() == 8704 - 504 and pool.weights(1)["w"].nbytes == 8000
    with pytest.raises(AssertionError):
        pool.place(2, 0)  # it was not taken


@pytest.mark.budget(2)
@pytest.mark.parametrize("memory_bytes", [0, 4, 16, 512, BLOCK_BYTES])
def test_answers_are_the_same_however_experts_were_read(memory_bytes, copied_model, monkeypatch):  # noqa: F811
    with vismoe.load(copied_model, memory="25%", device="cpu", reads="cached") as engine:
        expected = "".join(engine.chat(ask(), max_tokens=12))
    monkeypatch.setattr(OpenFiles, "memory_bytes", memory_bytes)
    monkeypatch.setattr(opening, "LEAST_ROOMY_BYTES", 0)
    buffers_of_reads, preadv = set[int](), os.preadv

    def seen(descriptor, buffers, offset):
        buffers_of_reads.add(len(buffers))
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, seen)
    try:
        engine = vismoe.load(copied_model, memory="25%", device="cpu", reads="direct")
    except vismoe.errors.ConfigError as error:
        pytest.skip(str(error))
    with engine:
        layout = engine._runtime.pager.inventory.layouts[0]
        assert layout.room_bytes == (BLOCK_BYTES if memory_bytes else 0)
        assert "".join(engine.chat(ask(), max_tokens=12)) == expected
        assert not memory_bytes or max(buffers_of_reads) > 1, "no read went to a slab and, at its edges, to the buffer"
        engine._runtime.pager.check_integrity()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_no_bit_depends_on_where_a_record_begins(format, tokens):
    experts, batch = Experts.of(format), Batch.of([tokens] * 3, tokens=tokens)
    expected = batch.parts(experts)
    for begin in (8, 40):
        memory = torch.full((len(experts.slabs), experts.slabs[0].numel() + 64), 0xFF, dtype=torch.uint8)
        slabs = [record[-record.data_ptr() % 64 + begin :][: experts.slabs[0].numel()] for record in memory]
        for slab, record in zip(slabs, experts.slabs):
            slab.copy_(record)
        assert all(slab.data_ptr() % 64 == begin for slab in slabs)
        assert torch.equal(batch.parts(dataclasses.replace(experts, slabs=slabs)), expected)
