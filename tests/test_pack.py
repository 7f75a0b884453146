"""Packing: every record is what its codec made of the checkpoint, with any number of threads; what cannot be done is refused."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import tempfile
import types
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import Geometry, Small, files_in, slab_for, small

from vismoe.errors import CheckpointError, ConfigError
from vismoe.store import pack as packing
from vismoe.store import unfinished
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.index import Contents, StoredRecord, index_path, read_index
from vismoe.store.pack import memory_bound_bytes, pack, refuse_small_disk, verify, workers_for
from vismoe.store.packed import formats_in
from vismoe.store.safetensors_header import read_header
from vismoe.types import BLOCK_BYTES, ExpertInventory, Format, MoELayer, RecordLayout

FORMATS = list(Format)
SIZES = st.integers(1, 40)
GEOMETRIES = st.builds(
    lambda hidden, inner, bias, dtype, transposed: Geometry(
        (
            ("up_proj", (hidden, 2 * inner) if transposed else (2 * inner, hidden)),
            *([("up_proj_bias", (2 * inner,))] if bias else []),
            ("down_proj", (inner, hidden) if transposed else (hidden, inner)),
        ),
        dtype,
        transposed,
    ),
    SIZES,
    SIZES,
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def small_files(monkeypatch):
    """Several shards even for a few small experts."""
    monkeypatch.setattr(unfinished, "SHARD_BYTES", 64 * 1024)


# ------------------------------------------------------------------ what is packed
@settings(max_examples=40)
@given(
    geometries=st.lists(GEOMETRIES, min_size=1, max_size=3, unique=True),
    layers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    format=st.sampled_from(FORMATS),
    shard_bytes=st.sampled_from([1, 3 * BLOCK_BYTES, 2**30]),
    workers=st.integers(1, 3),
)
def test_every_slab_is_what_the_codec_makes_of_the_weights(geometries, layers, format, shard_bytes, workers):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(unfinished, "SHARD_BYTES", shard_bytes)
        checkpoint, folder = small(Path(name), tuple(geometries), tuple(layers)), Path(name) / "store"
        if format is Format.LOSSLESS and any(geometry.dtype != torch.bfloat16 for geometry in geometries):
            with pytest.raises(ConfigError, match=r"packs bfloat16 weights.*Fix: use format raw"):
                pack(checkpoint.source, folder, checkpoint.contents(format), workers=workers)
            return
        packed = pack(checkpoint.source, folder, checkpoint.contents(format), workers=workers)
        store = checkpoint.open(folder, format)
        assert packed.records == len(checkpoint.weights) == len(store.contents.experts)
        assert packed.stored_bytes == store.stored_bytes == sum(path.stat().st_size for path in store.paths)
        assert all(path.name.startswith(f"experts.{format}.") for path in store.paths)
        for expert, weights in checkpoint.weights.items():
            raw = checkpoint.source.inventory.layout(expert.layer)
            codec = store.contents.codec(expert.layer)
            assert store.inventory.layout(expert.layer) == codec.slab and codec.slab.record_bytes % BLOCK_BYTES == 0
            record, expected = torch.zeros(raw.record_bytes, dtype=torch.uint8), slab_for(store, expert.layer)
            for section, value in weights.items():
                raw.views(record)[section].copy_(value)
            codec.decode(codec.encode(record), expected)
            slab = slab_for(store, expert.layer)
            store.read(expert, slab)
            assert torch.equal(slab, expected)
            if format.exact:
                assert all(torch.equal(codec.slab.views(slab)[section], value) for section, value in weights.items())
        assert verify(store) == []


@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_threads_packs_the_same_bytes(checkpoint, tmp_path, format, small_files):
    for workers in (1, 3):
        pack(checkpoint.source, tmp_path / str(workers), checkpoint.contents(format), workers=workers)
    assert files_in(tmp_path / "1") == files_in(tmp_path / "3")
    assert len(files_in(tmp_path / "1")) > 2


def test_records_lie_on_blocks_and_files_are_bounded(checkpoint, tmp_path, small_files):
    pack(checkpoint.source, tmp_path, checkpoint.contents(Format.LOSSLESS))
    index = json.loads(index_path(tmp_path, Format.LOSSLESS).read_text())
    assert all(offset % BLOCK_BYTES == nbytes % BLOCK_BYTES == 0 for _, offset, nbytes, _ in index["records"])
    assert len(index["files"]) > 1 and max(index["files"]) <= unfinished.SHARD_BYTES
    assert len({nbytes for _, _, nbytes, _ in index["records"]}) > 1


def test_progress_counts_the_bytes_of_the_model(checkpoint, tmp_path):
    seen: list[int] = []
    pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW), on_bytes=seen.append)
    assert seen[0] == 0 and seen[-1] == checkpoint.source.inventory.total_bytes and seen == sorted(seen)
    read: list[int] = []
    store = checkpoint.open(tmp_path, Format.RAW)
    verify(store, on_bytes=read.append)
    assert read[-1] == store.stored_bytes


def test_a_complete_format_is_left_as_it_is_and_others_join_it(checkpoint, tmp_path):
    first = pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW))
    assert again == dataclasses.replace(first, resumed_records=first.records)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    pack(checkpoint.source, tmp_path, checkpoint.contents(Format.LOSSLESS))
    assert formats_in(tmp_path) == (Format.RAW, Format.LOSSLESS)


# ------------------------------------------------------------------ memory
def test_memory_stays_within_the_stated_bound(tmp_path, monkeypatch):
    """128 experts of 1 MiB with two threads; what the process holds is looked at after each of them."""
    monkeypatch.setattr(packing, "SPARE_BYTES", 10 * 2**20)
    monkeypatch.setattr(packing, "WORKER_BYTES", 2**20)
    layout = RecordLayout.of({"up_proj": (512, 1024)}, {"up_proj": torch.bfloat16})
    inventory = ExpertInventory((MoELayer(0, "experts", 128, 1, 0),), (layout,))
    source = types.SimpleNamespace(inventory=inventory, headers=[], read=lambda expert, record: record.fill_(expert.expert))
    contents = Contents(Format.RAW, "none", inventory.layers, inventory.layouts, (frozenset(),))
    bound = memory_bound_bytes(contents, 2)
    assert 5 * bound < inventory.total_bytes

    held: list[int] = []
    pack(source, tmp_path, contents, workers=2, on_bytes=lambda done_bytes: held.append(anonymous_bytes()))
    growth = max(held) - held[0]
    assert len(held) == 129 and growth < bound, (growth, bound)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def test_huge_experts_get_fewer_threads_and_never_none(monkeypatch):
    monkeypatch.setattr(packing, "cores", lambda: 16)
    for rows, least, most in ((768, 16, 16), (16384, 2, 8), (2**17, 1, 1)):
        layout = RecordLayout.of({"up_proj": (rows, 2048)}, {"up_proj": torch.bfloat16})
        contents = Contents(Format.RAW, "none", (MoELayer(0, "experts", 8, 1, 0),), (layout,), (frozenset(),))
        workers = workers_for(contents)
        assert least <= workers <= most
        assert workers == 1 or memory_bound_bytes(contents, workers) <= packing.MEMORY_BYTES


# ------------------------------------------------------------------ disks
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(checkpoint, tmp_path, monkeypatch):
    wanted = [checkpoint.contents(Format.RAW), checkpoint.contents(Format.LOSSLESS)]
    refuse_small_disk(checkpoint.source, tmp_path / "store", wanted)
    free = packing.SPARE_DISK_BYTES + 200_000
    monkeypatch.setattr(psutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    refuse_small_disk(checkpoint.source, tmp_path / "store", wanted[:1])
    with pytest.raises(ConfigError, match=r"256.2 MiB of free disk; packing needs 3\d\d.\d KiB \(raw .*, lossless .*\).*--out"):
        refuse_small_disk(checkpoint.source, tmp_path / "store", wanted)
    assert not (tmp_path / "store").exists()
    pack(checkpoint.source, tmp_path / "store", wanted[0])  # what is there is not asked for again
    refuse_small_disk(checkpoint.source, tmp_path / "store", wanted)


@pytest.mark.parametrize("format", [Format.RAW, Format.LOSSLESS])
def test_a_disk_that_fills_up_is_an_error_with_numbers_and_the_same_command_goes_on(checkpoint, tmp_path, monkeypatch, format):
    pack(checkpoint.source, tmp_path / "undisturbed", checkpoint.contents(format))
    monkeypatch.setattr(unfinished, "SYNC_BYTES", 1)
    pwrite, writes = os.pwrite, []

    def full(descriptor, data, offset):
        writes.append(offset)
        if len(writes) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[:5000] if len(writes) == 2 else data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match=r"is full: .* are free, and the others need about .*; \d of 10 experts are safe"):
            pack(checkpoint.source, tmp_path / "store", checkpoint.contents(format))
    assert formats_in(tmp_path / "store") == ()
    done = pack(checkpoint.source, tmp_path / "store", checkpoint.contents(format))
    assert 0 < done.resumed_records < done.records
    assert files_in(tmp_path / "store") == files_in(tmp_path / "undisturbed")


def test_a_failing_disk_is_an_error_with_its_reason(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(ConfigError, match="cannot be written: Input/output error; 0 of 10 experts are safe"):
        pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW))


@pytest.mark.parametrize("left_bytes", [None, 0, 5000, 40_000])
def test_a_shard_that_was_lost_or_cut_short_is_packed_again(checkpoint, tmp_path, monkeypatch, left_bytes):
    """The first of at least three, which no recheck of the last records looks into."""
    for name, value in (("SHARD_BYTES", 64 * 1024), ("SYNC_BYTES", 1), ("RECHECKED_RECORDS", 2)):
        monkeypatch.setattr(unfinished, name, value)
    contents, store = checkpoint.contents(Format.RAW), tmp_path / "store"
    pack(checkpoint.source, tmp_path / "undisturbed", contents)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(unfinished.UnfinishedFormat, "finish", interrupt)
        pack(checkpoint.source, store, contents)
    first, *others = sorted(store.glob("*.partial"))
    assert len(others) >= 2 and first.stat().st_size > 40_000
    first.unlink() if left_bytes is None else os.truncate(first, left_bytes)
    done = pack(checkpoint.source, store, contents)
    assert done.resumed_records == sum(record.offset_bytes + record.nbytes <= (left_bytes or 0) for record in first_file(store))
    assert files_in(store) == files_in(tmp_path / "undisturbed") and verify(checkpoint.open(store, Format.RAW)) == []


def first_file(store: Path) -> list[StoredRecord]:
    return [record for record in read_index(store, Format.RAW).records if record.file == 0]


def test_a_folder_that_cannot_be_made_is_an_error(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*--out"):
        pack(checkpoint.source, tmp_path / "file" / "store", checkpoint.contents(Format.RAW))


# ------------------------------------------------------------------ others
def test_a_second_pack_at_the_same_time_is_refused(checkpoint, tmp_path):
    def second(done_bytes: int) -> None:
        with pytest.raises(ConfigError, match="Another process is packing into"):
            pack(checkpoint.source, tmp_path, checkpoint.contents(Format.INT8))

    pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW), on_bytes=second)
    pack(checkpoint.source, tmp_path, checkpoint.contents(Format.LOSSLESS))  # the lock is free again


@pytest.mark.parametrize("format", [Format.RAW, Format.LOSSLESS])
def test_a_store_of_another_checkpoint_is_refused_and_left_alone(checkpoint, tmp_path, format):
    other = small(tmp_path / "other", seed=1)
    pack(other.source, tmp_path / "store", other.contents(Format.RAW))
    before = files_in(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"another checkpoint.*Fix: delete .*experts\.raw\.\*"):
        pack(checkpoint.source, tmp_path / "store", checkpoint.contents(format))
    assert files_in(tmp_path / "store") == before


def test_an_unfinished_pack_of_another_checkpoint_is_refused(checkpoint, tmp_path, monkeypatch):
    other = small(tmp_path / "other", seed=1)
    with pytest.raises(KeyboardInterrupt):
        pack(other.source, tmp_path / "store", other.contents(Format.RAW), on_bytes=interrupt)
    with pytest.raises(CheckpointError, match=r"journal belongs to another checkpoint.*Fix: delete .*--out"):
        pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW))


def interrupt(*ignored: object) -> None:
    raise KeyboardInterrupt


def test_a_checkpoint_that_changes_meanwhile_does_not_become_a_store_and_the_fix_packs_the_new_one(tmp_path):
    checkpoint, store = small(tmp_path / "model"), tmp_path / "store"
    file = checkpoint.source.paths[0]
    fix = rf"changed while it was being packed\. Fix: delete {store}/experts\.raw\.\* and run vismoe pack .* --out {store}$"
    with pytest.raises(CheckpointError, match=fix):
        pack(checkpoint.source, store, checkpoint.contents(Format.RAW), on_bytes=lambda nbytes: os.utime(file))
    assert formats_in(store) == ()
    for path in store.glob("experts.raw.*"):
        path.unlink()
    changed = small(tmp_path / "model", seed=1)
    assert pack(changed.source, store, changed.contents(Format.RAW)).resumed_records == 0
    assert verify(changed.open(store, Format.RAW)) == []


def test_a_checkpoint_that_goes_away_meanwhile_is_an_error_with_the_file(tmp_path):
    checkpoint = small(tmp_path / "model")
    file = checkpoint.source.paths[0]

    def lose(done_bytes: int) -> None:
        file.unlink(missing_ok=True)

    with pytest.raises(CheckpointError, match=rf"{file} disappeared while it was being packed: No such file.*Fix: download"):
        pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW), on_bytes=lose)
    assert formats_in(tmp_path / "store") == ()


def test_a_filesystem_without_locks_is_an_error_with_the_fix(checkpoint, tmp_path, monkeypatch):
    def no_locks(*ignored: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot be locked against a second process: No locks available\. Fix: --out with"):
        pack(checkpoint.source, tmp_path, checkpoint.contents(Format.RAW))


def test_an_unreadable_checkpoint_names_the_expert(tmp_path):
    checkpoint = small(tmp_path / "model")
    os.truncate(checkpoint.source.paths[0], 4096)
    with pytest.raises(CheckpointError, match=r"expert \d of MoE layer \d: .*model\.safetensors was truncated"):
        pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW))


def reopened(checkpoint: Small) -> Small:
    """With its file as it is now."""
    source = checkpoint.source
    opened = CheckpointStore([read_header(path) for path in source.paths], source.inventory, source.locators, b"{}")
    return dataclasses.replace(checkpoint, source=opened)


def test_weights_that_no_integer_can_hold_name_the_expert(tmp_path):
    checkpoint = small(tmp_path / "model")
    part = checkpoint.source.locators[1][2][0][0]
    with open(checkpoint.source.paths[0], "r+b") as file:
        file.seek(part.offset_bytes)
        file.write(b"\x80\x7f")  # infinity in bfloat16
    checkpoint = reopened(checkpoint)
    with pytest.raises(CheckpointError, match=r"expert 2 of MoE layer 1: up_proj: 1 weights are infinite"):
        pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.INT8))


def test_what_nobody_can_use_is_removed_when_a_format_is_deleted_by_its_index_alone(checkpoint, tmp_path, small_files):
    pack(checkpoint.source, tmp_path / "undisturbed", checkpoint.contents(Format.RAW))
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "store")
    index_path(tmp_path / "store", Format.RAW).unlink()
    (tmp_path / "store" / "experts.raw.00099.bin").write_bytes(b"left over")
    shard = tmp_path / "store" / "experts.raw.00001.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert pack(checkpoint.source, tmp_path / "store", checkpoint.contents(Format.RAW)).resumed_records == 0
    assert files_in(tmp_path / "store") == files_in(tmp_path / "undisturbed")
