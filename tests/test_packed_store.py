"""Reading a packed store: one read straight into the slab; what is not as it was packed is an error that says what to do."""

import dataclasses
import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import system_reads
import torch
from small_checkpoints import Small, slab_for, small

from vismoe.errors import CheckpointError, ClosedError
from vismoe.pools.advice import buffer_bytes
from vismoe.pools.pool import SlabPool
from vismoe.store import index as indexing
from vismoe.store import unfinished
from vismoe.store.index import index_path, read_index
from vismoe.store.pack import pack, verify
from vismoe.store.packed import STORE_FOLDER, PackedStore, find_store, formats_in, refuse_other
from vismoe.types import BLOCK_BYTES, ExpertId, Format

FORMATS = [Format.RAW, Format.LOSSLESS, Format.INT4]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Small:
    return small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def packed(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unfinished, "SHARD_BYTES", 40 * 1024)
        for format in FORMATS:
            pack(checkpoint.source, folder, checkpoint.contents(format))
    return folder


@pytest.fixture
def own_copy(packed, tmp_path) -> Path:
    """The same store, which a test may damage."""
    return shutil.copytree(packed, tmp_path / "store")


@pytest.fixture(params=FORMATS)
def format(request) -> Format:
    return request.param


def slabs_of(store: PackedStore) -> dict[ExpertId, torch.Tensor]:
    found = {expert: slab_for(store, expert.layer) for expert in store.contents.experts}
    for expert, slab in found.items():
        assert store.read(expert, slab) > 0
    return found


def assert_equal(store: PackedStore, expected: dict[ExpertId, torch.Tensor]) -> None:
    assert all(torch.equal(slab, expected[expert]) for expert, slab in slabs_of(store).items())


def past_cache(store: PackedStore) -> None:
    refused = store.read_past_cache()
    if refused:
        pytest.skip(refused)


# ------------------------------------------------------------------ reading
def test_reads_past_the_page_cache_give_the_same_slabs(checkpoint, packed, format):
    expected = slabs_of(checkpoint.open(packed, format))
    store = checkpoint.open(packed, format)
    past_cache(store)
    assert_equal(store, expected)


def test_a_fixed_size_is_read_by_one_request_straight_into_a_slab_of_a_pool(checkpoint, packed, monkeypatch):
    store = checkpoint.open(packed, Format.INT4)
    past_cache(store)
    assert store.scratch_bytes == store.bounce_bytes == 0
    pools = [SlabPool(layout, 2) for layout in store.inventory.layouts]
    preadv, reads = os.preadv, []

    def seen(descriptor, buffers, offset):
        reads.append((torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr(), len(buffers[0]), offset % BLOCK_BYTES))
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, seen)
    for expert in store.contents.experts:
        pool = pools[store.inventory.layers[expert.layer].geometry]
        record = pool.record(1)
        assert store.read(expert, record) == pool.layout.record_bytes
        assert reads == [(record.data_ptr(), pool.layout.record_bytes, 0)]
        reads.clear()


def test_a_lossless_record_goes_through_the_buffer_that_the_plan_counts(checkpoint, packed):
    store = checkpoint.open(packed, Format.LOSSLESS)
    assert store.scratch_bytes == buffer_bytes(max(record.nbytes for record in read_index(packed, Format.LOSSLESS).records))
    assert store.stored_bytes < checkpoint.open(packed, Format.RAW).stored_bytes


@pytest.mark.parametrize("direct", [False, True])
def test_a_store_may_leave_records_encoded_and_reads_them_straight_into_a_slab_of_a_pool(checkpoint, packed, direct):
    decoding = checkpoint.open(packed, Format.LOSSLESS)
    store = decoding.encoded()
    if direct:
        past_cache(store)
    assert store.scratch_bytes == 0 and store.inventory == decoding.inventory
    pools, sizes = [SlabPool(layout, 2) for layout in store.encoded_layouts], {0: 0, 1: 0}
    expected = slabs_of(checkpoint.open(packed, Format.RAW))
    for expert in store.contents.experts:
        geometry, codec = store.inventory.layers[expert.layer].geometry, store.contents.codec(expert.layer)
        record, slab = pools[geometry].record(1), slab_for(store, expert.layer)
        nbytes = store.read(expert, record)
        codec.decode(record, slab)
        both = codec.slab.views(slab), codec.slab.views(expected[expert])
        assert all(torch.equal(both[0][name], weights) for name, weights in both[1].items())
        sizes[geometry] = max(sizes[geometry], nbytes)
    assert [pool.layout.record_bytes for pool in pools] == list(sizes.values())
    decoding.close()
    with pytest.raises(ClosedError):
        store.read(expert, record)


def test_an_encoded_record_is_as_it_was_packed_or_refused(checkpoint, own_copy):
    """Its checksum is compared, and what a GPU would follow without a second look."""
    with index_path(own_copy, Format.LOSSLESS).with_name("experts.lossless.00001.bin").open("r+b") as file:
        file.seek(24 + 8)  # where its first section begins
        file.write(bytes([0xFF] * 4))
    record = torch.empty(2**16, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"expert 0 of MoE layer 0: .* checksum"):
        checkpoint.open(own_copy, Format.LOSSLESS).encoded().read(ExpertId(0, 0), record)
    store = checkpoint.open(own_copy, Format.LOSSLESS).encoded()
    store._verified[:] = True
    with pytest.raises(CheckpointError, match=r"expert 0 of MoE layer 0: .* a section reaches beyond the record"):
        store.read(ExpertId(0, 0), record)


@pytest.mark.parametrize("direct", [False, True])
def test_memory_that_no_block_begins_in_is_filled_all_the_same(checkpoint, packed, format, direct):
    expected = slabs_of(checkpoint.open(packed, format))
    store = checkpoint.open(packed, format)
    if direct:
        past_cache(store)
    for expert, slab in expected.items():
        memory = torch.zeros(len(slab) + 2 * BLOCK_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % BLOCK_BYTES + 64
        store.read(expert, memory[start : start + len(slab)])
        layout = store.inventory.layout(expert.layer)
        read, wanted = layout.views(memory[start:]), layout.views(slab)
        assert all(torch.equal(read[name], wanted[name]) for name in wanted)
        assert not memory[:start].any() and not memory[start + len(slab) :].any()


def test_a_filesystem_without_o_direct_is_named_and_read_through_the_page_cache(checkpoint, packed, format, monkeypatch):
    expected, opened = slabs_of(checkpoint.open(packed, format)), os.open

    def no_direct(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", no_direct)
    store = checkpoint.open(packed, format)
    assert store.read_past_cache() == f"the filesystem of {packed} has no O_DIRECT"
    assert_equal(store, expected)


def test_many_threads_read_at_the_same_time(checkpoint, packed, format):
    expected = slabs_of(checkpoint.open(packed, format))
    store = checkpoint.open(packed, format)

    def check(seed: int) -> bool:
        for expert in random.Random(seed).sample(list(expected), len(expected)):
            slab = slab_for(store, expert.layer)
            store.read(expert, slab)
            assert torch.equal(slab, expected[expert])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(24)))


def test_a_closed_store_refuses_to_read_and_a_running_read_ends_well(checkpoint, packed, format, monkeypatch):
    expected = slabs_of(checkpoint.open(packed, format))
    store, expert = checkpoint.open(packed, format), ExpertId(1, 3)
    entered, go, preadv = threading.Event(), threading.Event(), os.preadv

    def slow(*arguments):
        entered.set()
        go.wait(5)
        return preadv(*arguments)

    system_reads.replace(monkeypatch, slow)
    slab = slab_for(store, expert.layer)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, expert, slab)
        entered.wait(5)
        store.close()
        go.set()
        reading.result(5)
    assert torch.equal(slab, expected[expert])
    for use in (lambda: store.read(expert, slab), lambda: store.check(expert)):
        with pytest.raises(ClosedError):
            use()
    store.close()  # twice is fine


def test_a_record_is_verified_once(checkpoint, own_copy, format, monkeypatch):
    store = checkpoint.open(own_copy, format)
    expected, summed, crc32c = slabs_of(store), [], indexing.crc32c
    monkeypatch.setattr("vismoe.store.packed.crc32c", lambda data: summed.append(1) or crc32c(data))
    assert_equal(store, expected)
    assert not summed


# ------------------------------------------------------------------ what is not as it was packed
@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_anywhere_is_found_by_the_first_read_and_by_verify(checkpoint, own_copy, format, seed):
    chance = random.Random(seed)
    index = read_index(own_copy, format)
    expert = chance.choice(index.contents.experts)
    stored = index.records[index.position(expert)]
    path = own_copy / f"experts.{format}.{stored.file + 1:05}.bin"
    flip(path, stored.offset_bytes + chance.randrange(stored.nbytes), chance.randrange(8))
    store = checkpoint.open(own_copy, format)
    where = rf"expert {expert.expert} of MoE layer {expert.layer}: .*{path.name}.* at offset {stored.offset_bytes} "
    remedy = rf"Fix: delete .*experts\.{format}\.\* and run vismoe pack MODEL --formats {format} --out {own_copy}"
    for _ in range(2):  # a bad record stays bad
        with pytest.raises(CheckpointError, match=where + f".*{remedy}"):
            store.read(expert, slab_for(store, expert.layer))
    (found,) = verify(checkpoint.open(own_copy, format))
    assert found.startswith(f"expert {expert.expert} of MoE layer {expert.layer}")
    others = [other for other in index.contents.experts if other != expert]
    assert all(store.read(other, slab_for(store, other.layer)) for other in others)


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_in_an_index_is_refused(checkpoint, own_copy, seed):
    chance, path = random.Random(seed), index_path(own_copy, Format.LOSSLESS)
    flip(path, chance.randrange(path.stat().st_size), chance.randrange(8))
    with pytest.raises(CheckpointError, match=r"Fix: .*delete .*experts\.lossless\.\*"):
        checkpoint.open(own_copy, Format.LOSSLESS)


def test_a_file_that_is_written_to_while_open_is_read_no_more(checkpoint, own_copy, format):
    store = checkpoint.open(own_copy, format)
    expected, path = slabs_of(store), store.paths[0]
    whole, before = path.read_bytes(), path.stat()
    damage = [flip_in_place(path), lambda: os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns)), flip_in_place(path)]
    for change in damage:  # the last one repairs it
        change()
        with pytest.raises(
            CheckpointError, match=rf"{path} has changed since it was opened: .*Fix: load the model again.*delete "
        ):
            store.read(ExpertId(0, 0), slab_for(store, 0))
    assert path.read_bytes() == whole
    assert_equal(checkpoint.open(own_copy, format), expected)


def flip_in_place(path: Path) -> Callable[[], None]:
    def flip() -> None:
        with path.open("r+b") as file:
            data = bytearray(file.read(1))
            file.seek(0)
            file.write(bytes([data[0] ^ 1]))

    return flip


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("left_bytes", [0, 100, 4096])
def test_a_file_truncated_while_open_is_an_error_with_expert_offset_and_sizes(checkpoint, own_copy, format, direct, left_bytes):
    store = checkpoint.open(own_copy, format)
    if direct:
        past_cache(store)
    size = store.paths[0].stat().st_size
    os.truncate(store.paths[0], left_bytes)
    where = r"expert 0 of MoE layer 0: .*00001\.bin was truncated after loading: \d+ bytes at offset \d+ are needed"
    with pytest.raises(CheckpointError, match=rf"{where}, the file has {left_bytes} now and had {size}\. Fix: delete"):
        store.read(ExpertId(0, 0), slab_for(store, 0))


def test_a_failing_disk_names_expert_path_and_offset(checkpoint, packed, format, monkeypatch):
    store = checkpoint.open(packed, format)
    system_reads.replace(monkeypatch, lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    where = rf"expert 0 of MoE layer 0: .*experts\.{format}\.00001\.bin: reading \d+ bytes at offset \d+ failed"
    with pytest.raises(CheckpointError, match=f"{where}: Input/output error"):
        store.read(ExpertId(0, 0), slab_for(store, 0))


def test_a_disk_that_fails_at_the_first_direct_read_is_named(checkpoint, packed, format, monkeypatch):
    store = checkpoint.open(packed, format)
    past_cache(checkpoint.open(packed, format))
    system_reads.replace(monkeypatch, lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    where = rf"experts\.{format}\.00001\.bin: reading 4096 bytes at offset 0 failed: Input/output error"
    with pytest.raises(CheckpointError, match=rf"{where}\. Fix: check the disk"):
        store.read_past_cache()


@pytest.mark.parametrize("aligned", [False, True])
def test_a_direct_read_that_ends_early_in_a_whole_file_is_not_called_truncated(checkpoint, packed, format, monkeypatch, aligned):
    store, preadv = checkpoint.open(packed, format), os.preadv
    past_cache(store)
    system_reads.replace(monkeypatch, lambda d, buffers, at: preadv(d, buffers, at) - 100)
    nbytes, size = store.inventory.layout(0).record_bytes, store.paths[0].stat().st_size
    memory = torch.zeros(nbytes + 2 * BLOCK_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % BLOCK_BYTES + (0 if aligned else 64)
    with pytest.raises(CheckpointError, match=rf"ended early, although the file still has {size} bytes\. Fix: check the disk"):
        store.read(ExpertId(0, 0), memory[begin : begin + nbytes])


def test_torn_reads_are_continued(checkpoint, packed, format, monkeypatch):
    expected, preadv = slabs_of(checkpoint.open(packed, format)), os.preadv
    store = checkpoint.open(packed, format)
    system_reads.replace(monkeypatch, lambda d, buffers, at: preadv(d, [buffers[0][: -(-len(buffers[0]) // 1024) * 512]], at))
    assert_equal(store, expected)


@pytest.mark.parametrize("change", [-1, 1, -BLOCK_BYTES])
def test_a_file_of_another_size_is_refused_when_it_is_opened(checkpoint, own_copy, format, change):
    path = checkpoint.open(own_copy, format).paths[1]
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(CheckpointError, match=rf"{path.name} has {size + change} bytes, its index says {size}\. Fix: delete"):
        checkpoint.open(own_copy, format)


def test_a_missing_file_is_refused_when_it_is_opened(checkpoint, own_copy, format):
    path = checkpoint.open(own_copy, format).paths[1]
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be opened: No such file.*Fix: delete .*vismoe pack MODEL"):
        checkpoint.open(own_copy, format)


# ------------------------------------------------------------------ another store
def test_a_store_of_another_checkpoint_is_refused(packed, format, tmp_path):
    with pytest.raises(CheckpointError, match=r"another checkpoint, or from this one before its files changed.*Fix.*--store"):
        small(tmp_path, seed=1).open(packed, format)


def test_a_checkpoint_that_changed_after_packing_is_another_one(tmp_path):
    checkpoint = small(tmp_path / "model")
    pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW))
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="before its files changed"):
        small(tmp_path / "model").open(tmp_path / "store", Format.RAW)


@pytest.mark.parametrize(
    ("schema", "words"), [(0, "it is older"), (2, r"it is newer\. Fix: a newer vismoe, or delete"), (None, "it is older")]
)
def test_another_schema_is_refused(checkpoint, own_copy, schema, words):
    path = index_path(own_copy, Format.RAW)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    with pytest.raises(CheckpointError, match=rf"has schema {schema}, and this version of vismoe reads 1: {words}"):
        checkpoint.open(own_copy, Format.RAW)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": 1}', '{"schema": 1, "crc32c": 5}', "\0" * 100])
def test_an_index_that_is_none_is_refused(checkpoint, own_copy, text):
    index_path(own_copy, Format.RAW).write_text(text)
    with pytest.raises(CheckpointError, match=r"Fix: delete .*experts\.raw\.\*"):
        checkpoint.open(own_copy, Format.RAW)


def test_another_type_is_refused_with_the_way_out(checkpoint, packed):
    inventory = checkpoint.source.inventory
    wide = [
        dataclasses.replace(layout, sections=tuple(dataclasses.replace(s, dtype=torch.float32) for s in layout.sections))
        for layout in inventory.layouts
    ]
    contents = dataclasses.replace(checkpoint.contents(Format.RAW), raw=tuple(wide))
    with pytest.raises(CheckpointError, match=r"of bfloat16, and the model is loaded as float32\. Fix: .*--dtype.*--store none"):
        refuse_other(packed, read_index(packed, Format.RAW).contents, contents)


def test_other_names_or_orientations_are_refused(checkpoint, packed):
    with pytest.raises(CheckpointError, match="differently"):
        PackedStore.open(packed, checkpoint.source, Format.INT4, (frozenset(), frozenset()))


def test_stores_are_found_beside_a_checkpoint_once_a_format_is_complete(checkpoint, packed, tmp_path):
    assert find_store(file := tmp_path / "model.safetensors") is None
    shutil.copytree(packed, tmp_path / STORE_FOLDER, ignore=shutil.ignore_patterns("*.json"))
    assert find_store(file) is None and formats_in(tmp_path / STORE_FOLDER) == ()
    shutil.copytree(packed, tmp_path / STORE_FOLDER, dirs_exist_ok=True)
    assert find_store(file) == tmp_path / STORE_FOLDER
    assert formats_in(tmp_path / STORE_FOLDER) == (Format.RAW, Format.LOSSLESS, Format.INT4)
    with pytest.raises(CheckpointError, match=rf"no experts\.int8\.json\. Fix: vismoe pack MODEL --formats int8 --out {packed}"):
        checkpoint.open(packed, Format.INT8)
