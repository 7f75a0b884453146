"""Reading experts in place: bit for bit what transformers loads, only the expert's own bytes, errors that say what to do."""

import ctypes
import fcntl
import mmap
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import system_reads
import tiny_models
import torch
from searching import SEARCHING

from vismoe.bench.limits import cached_bytes, drop_caches
from vismoe.errors import CheckpointError, ClosedError
from vismoe.kernels.read import read_at_once
from vismoe.models.load.locate import locate_experts
from vismoe.models.moe.adapters import adapt
from vismoe.pools import advice
from vismoe.pools.advice import HUGE_PAGE_BYTES, LEAST_HUGE_BYTES
from vismoe.store import files, page_cache
from vismoe.store.checkpoint import CheckpointStore, TensorPart
from vismoe.store.safetensors_header import SafetensorsHeader, read_header
from vismoe.store.tensor_reads import read_part
from vismoe.types import ExpertId, ExpertInventory, MoELayer, RecordLayout

# tests/test_families.py reads the experts of every family; one here has interleaved rows
SOME = sorted({*tiny_models.FAMILIES[::4], "inkling_mm_model"} & {*tiny_models.FAMILIES})
FAMILIES = tiny_models.FAMILIES if SEARCHING else SOME


def on_meta(folder, dtype=torch.float32):
    """The model of a checkpoint without any weights."""
    model_class = tiny_models.model_class(folder)
    with torch.device("meta"):
        model = model_class._from_config(model_class.config_class.from_pretrained(folder), dtype=dtype)
    adapt(model)
    return model


def store_of(folder, dtype=torch.float32) -> CheckpointStore:
    return locate_experts(on_meta(folder, dtype), sorted(folder.glob("*.safetensors")), dtype)


def every_expert(store):
    return [ExpertId(layer.index, e) for layer in store.inventory.layers for e in range(layer.num_experts)]


def record_for(store, expert) -> torch.Tensor:
    return torch.zeros(store.inventory.layout(expert.layer).record_bytes, dtype=torch.uint8)


def read(store, expert) -> dict[str, torch.Tensor]:
    record = record_for(store, expert)
    store.read(expert, record)
    return store.inventory.layout(expert.layer).views(record)


def past_cache(store) -> None:
    refused = store.read_past_cache()
    if refused:
        pytest.skip(refused)


def assert_equal_to(reference, store):
    """Every section of every expert is the row of the reference's parameter, in value and in type."""
    adapt(reference)
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for expert in every_expert(store):
        path = store.inventory.layers[expert.layer].path
        for name, value in read(store, expert).items():
            row = parameters[f"{path}.{name}"][expert.expert]
            seen.add(f"{path}.{name}")
            assert value.dtype == row.dtype and torch.equal(value, row), (expert, name)
    assert seen == {name for name, p in parameters.items() if ".experts." in name and "shared" not in name and p.ndim > 1}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """qwen3_moe in float32, one tensor per expert and projection."""
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def own_copy(qwen, tmp_path):
    """A copy of the same checkpoint that a test may damage."""
    return shutil.copytree(qwen, tmp_path / "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_equals_the_row_of_the_eager_parameter(family, tmp_path):
    tiny_models.save(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):  # as stored, and cast once on load
        store = store_of(tmp_path, dtype)
        assert_equal_to(tiny_models.reference(tmp_path, dtype), store)
        assert (store.scratch_bytes == 0) == (dtype is torch.float32 and "inkling" not in family)  # which stores interleaved rows


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "ernie4_5_vl_moe", "gpt_oss"])
def test_reading_past_the_page_cache_gives_the_same_experts(family, tmp_path):
    tiny_models.save(family, tmp_path, dtype=torch.bfloat16, max_shard_size="30KB")  # many ends of files
    for dtype in (torch.bfloat16, torch.float32):
        store = store_of(tmp_path, dtype)
        past_cache(store)
        assert_equal_to(tiny_models.reference(tmp_path, dtype), store)


def test_a_stretch_larger_than_the_bounce_buffer_is_read_in_several_requests(qwen, monkeypatch):
    monkeypatch.setattr(files, "MOST_BOUNCE_BYTES", files.BLOCK_BYTES)
    store = store_of(qwen)
    past_cache(store)
    sizes = []
    preadv = os.preadv
    system_reads.replace(monkeypatch, lambda d, buffers, at: sizes.append(sum(map(len, buffers))) or preadv(d, buffers, at))
    assert_equal_to(tiny_models.reference(qwen), store)
    assert set(sizes) == {files.BLOCK_BYTES} and len(sizes) > len(every_expert(store))


@pytest.mark.parametrize("nbytes", [1, 5000, LEAST_HUGE_BYTES - 1, LEAST_HUGE_BYTES, 3 * 2**20, 2 * HUGE_PAGE_BYTES])
def test_buffers_for_reading_begin_on_a_page_and_large_ones_are_whole_huge_pages(nbytes, monkeypatch):
    told = []
    monkeypatch.setattr(advice, "advise", lambda *what: told.append(what))
    buffer = advice.block_buffer(nbytes)
    address = buffer.__array_interface__["data"][0]
    assert len(buffer) == nbytes <= advice.buffer_bytes(nbytes)
    is_large = nbytes >= LEAST_HUGE_BYTES
    page = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
    assert address % page == 0 and advice.buffer_bytes(nbytes) == -(-nbytes // page) * page
    assert told == ([(address, advice.buffer_bytes(nbytes), advice.HUGEPAGE)] if is_large else [])
    buffer.fill(1)
    ctypes.memset(address, 2, advice.buffer_bytes(nbytes))  # all of it is there
    assert buffer[-1] == 2


def test_a_plan_counts_the_pages_of_the_bounce_buffer_and_a_thread_that_reads_nothing_takes_none(own_copy):
    (path,) = own_copy.glob("*.safetensors")
    opened = files.CheckpointFiles([read_header(path)])
    if refused := opened.read_past_cache(2**20):
        pytest.skip(refused)
    held, byte = opened.hold(), np.empty(1, np.uint8)
    assert "memory" not in vars(held._bounce)
    held.fill(0, 5, byte)
    assert held._bounce.memory.nbytes == files.bounce_bytes(2**20) == HUGE_PAGE_BYTES and byte[0] == path.read_bytes()[5]


def test_a_file_truncated_while_reading_past_the_page_cache_is_the_same_error(own_copy):
    (file,) = own_copy.glob("*.safetensors")
    store, size = store_of(own_copy), file.stat().st_size
    past_cache(store)
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=rf"truncated after loading.*has 4096 now and had {size}"):
        store.read(ExpertId(2, 5), record_for(store, ExpertId(2, 5)))


def test_torn_reads_past_the_page_cache_are_continued(qwen, monkeypatch):
    store = store_of(qwen)
    past_cache(store)
    preadv, random = os.preadv, torch.Generator().manual_seed(0)

    def torn(descriptor, buffers, offset):
        (buffer,) = buffers
        count = 512 * int(torch.randint(1, max(2, len(buffer) // 512 + 1), (1,), generator=random))
        return preadv(descriptor, [buffer[:count]], offset)

    system_reads.replace(monkeypatch, torn)
    assert_equal_to(tiny_models.reference(qwen), store)


@pytest.fixture
def ways(monkeypatch) -> list[bool]:
    """Whether each read goes past the page cache, as they are made."""
    found, preadv = [], os.preadv

    def seen(descriptor, buffers, offset):
        found.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, seen)
    return found


def cold(file):
    """The file itself, of which the page cache holds nothing."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    if drop_caches([file]):
        pytest.skip(f"{file} cannot be made cold here")
    return file


def test_what_the_page_cache_lacks_is_read_past_it_once(own_copy, ways):
    (file,) = own_copy.glob("*.safetensors")
    reference = tiny_models.reference(own_copy)
    store = store_of(own_copy)
    if refused := store.read_past_cache(only_cold=True):
        pytest.skip(refused)
    cold(file)
    for past in (True, False, False):  # the second reading of an expert leaves it in the page cache
        ways.clear()
        assert_equal_to(reference, store)
        assert set(ways) == {past} and (cached_bytes(file) == 0) == past
    warm = store_of(own_copy)
    warm.read_past_cache(only_cold=True)
    ways.clear()
    assert_equal_to(reference, warm)
    assert set(ways) == {False}


def test_native_threads_read_past_the_page_cache_what_it_lacks_once(own_copy, ways, monkeypatch):
    (file,) = own_copy.glob("*.safetensors")
    reference = tiny_models.reference(own_copy)
    store = store_of(own_copy)
    if refused := store.read_past_cache(only_cold=True):
        pytest.skip(refused)

    def by_native_thread(expert, record):
        reading = store.reading(expert, record.data_ptr())
        read_at_once(reading.arrival)
        assert reading.error() is None

    cold(file)
    here, there = (store._stretches(ExpertId(0, expert)) for expert in (0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(files, "cached_bytes", lambda file, offset, nbytes: nbytes * (offset == here[0].offset_bytes))
        assert store.hold().serving([*here, *there]) is None, "the page cache holds a part, which is copied from there"
    monkeypatch.setattr(store, "read", by_native_thread)
    for past in (True, False):
        ways.clear()
        assert_equal_to(reference, store)
        assert set(ways) == {past} and (cached_bytes(file) == 0) == past


def test_where_the_page_cache_cannot_be_asked_it_is_used(qwen, ways, monkeypatch):
    def unknown(*arguments):
        raise OSError(19, "No such device")

    store = store_of(qwen)
    if refused := store.read_past_cache(only_cold=True):
        pytest.skip(refused)
    monkeypatch.setattr(files, "cached_bytes", unknown)
    ways.clear()
    assert_equal_to(tiny_models.reference(qwen), store)
    assert set(ways) == {False}


def test_the_pages_of_a_part_of_a_file_that_are_cached_are_counted(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(64 * 4096 + 5))
    cold(file)
    page = page_cache.PAGE_BYTES
    with file.open("rb") as opened:
        number = opened.fileno()
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        assert page_cache.cached_bytes(number, 0, 65 * 4096) == 0
        os.pread(number, 100, 3 * page + 50)
        assert page_cache.cached_bytes(number, 0, 3 * page) == page_cache.cached_bytes(number, 4 * page, page) == 0
        assert page_cache.cached_bytes(number, 3 * page + 4000, 1) == page_cache.cached_bytes(number, 100, 5 * page) == page
        assert page_cache.cached_bytes(number, 0, 2**40) == page_cache.cached_bytes(number, 2**40, 5) == 0, "behind its end"


@pytest.mark.parametrize("past", [True, False])
def test_a_large_tensor_is_read_by_several_threads_and_a_truncated_file_is_an_error_of_all(past, own_copy, ways, monkeypatch):
    monkeypatch.setattr(files, "MOST_BOUNCE_BYTES", 2 * files.BLOCK_BYTES)
    (file,) = own_copy.glob("*.safetensors")
    opened = files.CheckpointFiles([read_header(file)])
    size, expected = file.stat().st_size, torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    cold(file)
    reading, part = opened.for_loading(past, 3), TensorPart(0, 7, (size - 7,), torch.uint8)
    ways.clear()
    assert torch.equal(read_part(reading, part), expected[7:])
    assert (cached_bytes(file) == 0) == past, "nothing is read twice"
    assert ways == [past] * (-(-size // (2 * files.BLOCK_BYTES)) if past else 1)
    os.truncate(file, size // 2)
    with pytest.raises(CheckpointError, match=r"truncated after loading|has changed since it was opened"):
        read_part(reading, part)


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_filesystem_without_o_direct_is_said_and_the_store_goes_on(where, qwen, monkeypatch):
    store = store_of(qwen)
    openat = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(path))
        return openat(path, flags, *more)

    def fail(*arguments):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, where, refuse if where == "open" else fail)
    assert "has no O_DIRECT" in store.read_past_cache() and "has no O_DIRECT" in store.read_past_cache(only_cold=True)
    assert store.for_loading(past_cache=True, threads=2) is store.hold()
    monkeypatch.undo()
    assert_equal_to(tiny_models.reference(qwen), store)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_in_the_layout_of_transformers_itself_are_read_too(family, tmp_path):
    model = tiny_models.build(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert_equal_to(model, store_of(tmp_path))


@pytest.mark.parametrize(("stored", "wanted"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str)
def test_one_sixteen_bit_type_is_cast_to_the_other_and_not_reinterpreted(stored, wanted, tmp_path):
    tiny_models.save("qwen3_moe", tmp_path, dtype=stored)
    assert_equal_to(tiny_models.reference(tmp_path, wanted), store_of(tmp_path, wanted))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "ernie4_5_vl_moe", "gpt_oss"])
def test_experts_spread_over_many_files_are_found(family, tmp_path):
    tiny_models.save(family, tmp_path, dtype=torch.bfloat16, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert_equal_to(tiny_models.reference(tmp_path, torch.bfloat16), store_of(tmp_path, torch.bfloat16))


def test_the_transposed_layout_of_the_hub_is_turned_while_reading(tmp_path):
    tiny_models.save("qwen3_vl_moe", tmp_path / "native")
    tiny_models.save("qwen3_vl_moe", tmp_path / "hub", transposed=True)
    reference = tiny_models.reference(tmp_path / "native")
    for dtype in (torch.float32, torch.bfloat16):
        store = store_of(tmp_path / "hub", dtype)
        assert_equal_to(reference.to(dtype), store)
        assert store.scratch_bytes == 64 * 48 * 4  # [H, 2I] float32 on disk


def test_parameters_that_transformers_keeps_in_float32_stay_so(tmp_path, monkeypatch):
    tiny_models.save("qwen3_moe", tmp_path)
    monkeypatch.setattr(tiny_models.model_class(tmp_path), "_keep_in_fp32_modules_strict", ["experts.down_proj"])
    reference, store = tiny_models.reference(tmp_path, torch.bfloat16), store_of(tmp_path, torch.bfloat16)
    assert [section.dtype for section in store.inventory.layouts[0].sections] == [torch.bfloat16, torch.float32]
    assert_equal_to(reference, store)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "ernie4_5_vl_moe", "gpt_oss", "granitemoe"])
def test_no_byte_of_another_expert_is_read(family, tmp_path, monkeypatch):
    tiny_models.save(family, tmp_path)
    store = store_of(tmp_path)
    ranges: list[tuple[int, int, int]] = []
    preadv = os.preadv

    def spy(descriptor, buffers, offset):
        ranges.append((store._files.hold()._descriptors.index(descriptor), offset, offset + sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset)

    system_reads.replace(monkeypatch, spy)
    for expert in every_expert(store):
        ranges.clear()
        nbytes = store.read(expert, record_for(store, expert))
        own = [(p.file, p.offset_bytes, p.nbytes) for parts in store.locators[expert.layer][expert.expert] for p in parts]
        assert nbytes == sum(stop - start for _, start, stop in ranges) == sum(size for *_, size in own)
        assert all(any(f == g and start <= at and at + size <= stop for g, start, stop in ranges) for f, at, size in own)


def test_an_expert_does_not_change_when_all_others_are_overwritten(own_copy):
    expected = {expert: read(store_of(own_copy), expert) for expert in [ExpertId(1, 0), ExpertId(2, 5)]}
    (file,) = own_copy.glob("*.safetensors")
    kept = [p for e in expected for parts in store_of(own_copy).locators[e.layer][e.expert] for p in parts]
    raw = bytearray(file.read_bytes())
    header_bytes = min(entry.offset_bytes for entry in read_header(file).tensors.values())
    poisoned = raw[:header_bytes] + b"\xff" * (len(raw) - header_bytes)
    for part in kept:
        poisoned[part.offset_bytes : part.offset_bytes + part.nbytes] = raw[part.offset_bytes : part.offset_bytes + part.nbytes]
    file.write_bytes(poisoned)
    store = store_of(own_copy)
    for expert, sections in expected.items():
        assert all(torch.equal(value, sections[name]) for name, value in read(store, expert).items())
    assert read(store, ExpertId(0, 0))["down_proj"].isnan().all()


def test_experts_that_lie_together_on_disk_take_one_system_call(qwen, monkeypatch):
    store = store_of(qwen)
    calls = []
    preadv = os.preadv
    system_reads.replace(monkeypatch, lambda *arguments: calls.append(arguments) or preadv(*arguments))
    store.read(ExpertId(0, 3), record_for(store, ExpertId(0, 3)))
    assert len(calls) == 1  # down, gate, up follow each other; the record has gate, up, down


def test_offsets_that_follow_each_other_in_different_files_are_two_reads(tmp_path):
    values = [torch.randn(32) for _ in range(2)]
    headers = []
    for i, value in enumerate(values):
        (tmp_path / f"{i}").write_bytes(value.numpy().tobytes())
        headers.append(SafetensorsHeader(tmp_path / f"{i}", 128, 0, {}, ""))
    layout = RecordLayout.of({"up": (32,)}, {"up": torch.float32})
    parts = (TensorPart(0, 0, (16,), torch.float32), TensorPart(1, 64, (16,), torch.float32))
    store = CheckpointStore(headers, ExpertInventory((MoELayer(0, "x", 1, 1, 0),), (layout,)), [[(parts,)]])
    assert torch.equal(read(store, ExpertId(0, 0))["up"], torch.cat((values[0][:16], values[1][16:])))


def test_short_reads_are_continued(qwen, monkeypatch):
    store, reference = store_of(qwen), tiny_models.reference(qwen)

    def short(descriptor, buffers, offset):
        return os.pread(descriptor, 1, offset) and _copy(descriptor, buffers, offset, 1000)

    def _copy(descriptor, buffers, offset, limit):
        data = os.pread(descriptor, limit, offset)
        done = 0
        for buffer in buffers:
            piece = data[done : done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    system_reads.replace(monkeypatch, short)
    assert_equal_to(reference, store)


@pytest.mark.parametrize("transposed", [False, True])
def test_many_threads_read_the_same_bytes_as_one(tmp_path, transposed):
    tiny_models.save("qwen3_vl_moe", tmp_path, transposed=transposed)
    store = store_of(tmp_path)
    expected = {expert: read(store, expert) for expert in every_expert(store)}

    def check(seed):
        for i in torch.randperm(len(expected), generator=torch.Generator().manual_seed(seed)).tolist():
            expert = list(expected)[i]
            assert all(torch.equal(value, expected[expert][name]) for name, value in read(store, expert).items())
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(24)))


def test_a_file_truncated_while_serving_is_an_error_with_the_sizes(own_copy):
    (file,) = own_copy.glob("*.safetensors")
    store, size = store_of(own_copy), file.stat().st_size
    raw = file.read_bytes()
    os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match=rf"truncated after loading.*has 4096 now and had {size}.*load the model again"):
        store.read(ExpertId(2, 5), record_for(store, ExpertId(2, 5)))
    file.write_bytes(raw)  # the same bytes again, as far as anybody can tell: whoever opens the file anew reads them
    with pytest.raises(CheckpointError, match=rf"{file} has changed since it was opened.*Fix: load the model again"):
        store.read(ExpertId(2, 5), record_for(store, ExpertId(2, 5)))
    assert_equal_to(tiny_models.reference(own_copy), store_of(own_copy))


def test_a_failing_disk_is_an_error_with_path_and_offset(qwen, monkeypatch):
    store = store_of(qwen)

    def fail(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    system_reads.replace(monkeypatch, fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: reading \d+ bytes at offset \d+ failed: Input/output error"):
        store.read(ExpertId(0, 0), record_for(store, ExpertId(0, 0)))


def test_a_closed_store_refuses_to_read_and_a_running_read_ends_well(qwen, monkeypatch):
    store = store_of(qwen)
    entered, go = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(*arguments):
        entered.set()
        go.wait(5)
        return preadv(*arguments)

    system_reads.replace(monkeypatch, slow)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, store, ExpertId(0, 0))
        entered.wait(5)
        (descriptor,) = store._files.hold()._descriptors
        store.close()
        os.fstat(descriptor)  # still open
        go.set()
        expected = tiny_models.reference(qwen).model.layers[0].mlp.experts.down_proj[0]
        assert torch.equal(reading.result(5)["down_proj"], expected)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(ClosedError):
        read(store, ExpertId(0, 0))
    store.close()  # twice is fine


def test_the_fingerprint_changes_with_config_and_files_only(own_copy):
    first = store_of(own_copy).fingerprint
    assert store_of(own_copy, torch.bfloat16).fingerprint == first
    (file,) = own_copy.glob("*.safetensors")
    os.utime(file, ns=(0, 12345))
    second = store_of(own_copy).fingerprint
    config = own_copy / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size":  512'))
    assert len({first, second, store_of(own_copy).fingerprint}) == 3
