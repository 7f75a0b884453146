"""What is read from disk while libraries are imported: large tensors beside the routed experts, until loading asks for one."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import tiny_models
import torch
from hub_cache import put
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import vismoe
from vismoe import flags
from vismoe.cli.main import command_parser, main
from vismoe.config import READ_AHEAD_BY, Settings
from vismoe.errors import BudgetError, ConfigError
from vismoe.kernels.read import Stretch
from vismoe.models.load import opening, quantizer
from vismoe.models.load.gguf import GgufWeights, load_gguf
from vismoe.models.load.preview import read_config
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.paging.page_table import ABSENT, NO_EXPERT, ON_DEVICE
from vismoe.paging.pager import Pager
from vismoe.planning.needs import Hardware
from vismoe.pools import backing
from vismoe.store import early_experts, read_ahead
from vismoe.store.early_experts import EarlyRecords, early_records, evenly
from vismoe.store.files import CheckpointFiles
from vismoe.store.read_ahead import WeightFiles, backed_bytes, forget, headers_of, held_bytes, is_reading, reading_ahead, take
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry, read_header
from vismoe.store.tensor_reads import read_new
from vismoe.types import BLOCK_BYTES

MB = 2**20
NEEDED = ["model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
EXPERTS = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(2)]
OTHERS = [
    *EXPERTS,
    "model.embed_tokens.weight",
    "mtp.fc.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.1.shared_head.weight",
]


@pytest.fixture
def checkpoint(tmp_path):
    """A file of tensors of 1 MB, each of one number, and others, beside a configuration of one layer in bfloat16."""
    tensors = {name: torch.full((MB,), index, dtype=torch.uint8) for index, name in enumerate([*NEEDED, *OTHERS])}
    tensors |= {"model.norm.weight": torch.zeros(64), "layers.0.input_linear.weight": torch.zeros(4, 512, 512, dtype=torch.uint8)}
    tensors |= {"layers.0.float32.weight": torch.zeros(512, 512), "layers.0.half.weight": torch.zeros(1024, 512).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": {"num_hidden_layers": 1}}))
    return tmp_path / "model.safetensors"


def finished():
    """Waits until everything is read."""
    reading = read_ahead._READING.get()
    for threads in (reading._threads, reading._filling):  # those start these
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def ahead(checkpoint, most_bytes=10 * MB):
    return reading_ahead(WeightFiles.of(str(checkpoint.parent)), most_bytes)


def numbers_of(names):
    return {[*NEEDED, *OTHERS].index(name) for name in names}


def test_large_tensors_beside_routed_experts_are_read_once_and_are_the_files(checkpoint, monkeypatch):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", MB // 3)
    header = read_header(checkpoint)
    with ahead(checkpoint):
        finished()
        assert held_bytes() == 3 * MB
        files, found = CheckpointFiles([header]).hold(), set()
        for name in NEEDED:
            entry = header.tensors[name]
            tensor = take(files.states[0], entry.offset_bytes, entry.nbytes)
            assert tensor.dtype == torch.uint8 and tensor.data_ptr() % 64 == 0 and len(tensor.unique()) == 1
            found.add(int(tensor[0]))
            assert take(files.states[0], entry.offset_bytes, entry.nbytes) is None, "it is its taker's"
        assert found == numbers_of(NEEDED) and held_bytes() == 0
    assert held_bytes() == 0 and not is_reading() and take(files.states[0], entry.offset_bytes, entry.nbytes) is None


def names_of(files, most_bytes=2**40):
    headers = [header for path in files.paths for header in headers_of(path)]
    places = {(file, entry.offset_bytes): name for file, one in enumerate(headers) for name, entry in one.tensors.items()}
    return [places[file, entry.offset_bytes] for file, entry in files.large_tensors(headers, most_bytes)]


def test_which_tensors_and_how_many(checkpoint):
    folder = str(checkpoint.parent)
    found = names_of(WeightFiles.of(folder))
    assert sorted(found) == sorted(NEEDED), "no experts, whatever their name, nothing small, cast, or of no layer"
    assert names_of(WeightFiles.of(folder), 3 * MB - 1) == found[:2] and names_of(WeightFiles.of(folder), 0) == []
    assert set(names_of(WeightFiles.of(folder, dtype="float16"))) == {*NEEDED, "layers.0.half.weight"}
    assert set(names_of(WeightFiles.of(folder, dtype="float32"))) == {*NEEDED, "layers.0.float32.weight"}


def test_what_does_not_fit_is_passed_over(tmp_path):
    save_file(
        {"a": torch.zeros(4, MB, dtype=torch.uint8), "b": torch.zeros(2, MB, dtype=torch.uint8)}, tmp_path / "a.safetensors"
    )
    files = WeightFiles((tmp_path / "a.safetensors",))
    assert names_of(files) == ["a", "b"] and names_of(files, 3 * MB) == ["b"]


def loaded(files, open_it):
    """(the model that `open_it` loads while large tensors of the files were read ahead, how many of these it took, how many
    it left)."""
    with reading_ahead(files, 2**30):
        finished()
        before, left = len(read_ahead._READING.get()._found), []
        real = quantizer.forget
        try:
            quantizer.forget = lambda: left.append(len(read_ahead._READING.get()._found)) or real()
            model = open_it()
        finally:
            quantizer.forget = real
        assert held_bytes() == 0, "what it left is free"
        return model, before - left[0], left[0]


@pytest.fixture
def of_any_size(monkeypatch):
    """Tensors of tiny models count as large."""
    monkeypatch.setattr(read_ahead, "LARGE_BYTES", 1)
    monkeypatch.setattr("vismoe.models.load.stripping.LARGE_BYTES", 1)


def opened(folder):
    config = VisMoEConfig(memory="25%", kernels="torch", context=256)
    return tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gpt_oss"])
def test_a_model_is_loaded_from_what_was_read_ahead(family, tmp_path, of_any_size):
    expected = tiny_models.reference(tiny_models.save(family, tmp_path, dtype=torch.bfloat16), torch.bfloat16).state_dict()
    model, taken, left = loaded(WeightFiles.of(str(tmp_path)), lambda: opened(tmp_path))
    assert taken >= 8 and left == 0
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_tensors_that_loading_casts_are_left_to_it(tmp_path, of_any_size):
    """The model is in the type of config.json, whatever the files have; what was read in vain is forgotten."""
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    assert names_of(WeightFiles.of(str(tmp_path))) == []
    model, taken, left = loaded(WeightFiles((file,)), lambda: opened(tmp_path))
    assert taken == 0 and left > 8 and model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q6_K"])
def test_a_gguf_file_is_loaded_from_what_was_read_ahead(kind, tmp_path, of_any_size):
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q4_K" if "exps" in name else kind)
    file, config = tmp_path / "model.gguf", read_config(tmp_path)
    settings = Settings.of(memory="25%", kernels="torch", gguf=file)

    def opened():
        weights, quantization = GgufWeights(str(tmp_path), config, settings, []), VisMoEConfig(**vars(settings))
        return load_gguf(weights, tiny_models.model_class(tmp_path), torch.bfloat16, None, quantization_config=quantization)

    model, taken, left = loaded(WeightFiles.of(str(tmp_path), gguf=str(file)), opened)
    (header,) = headers_of(file)
    assert taken == sum("_exps" not in name for name in header.tensors) and left == 0
    expected = opened().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_what_was_not_read_ahead_is_read_and_nothing_is_read_ahead_any_more(checkpoint, monkeypatch):
    """The first tensor that loading asks for ends it, once the one under way is there."""
    header, begun, go_on = read_header(checkpoint), threading.Event(), threading.Event()
    fill = read_ahead.OpenFiles.fill

    def slow(files, *what):
        if threading.current_thread().name == "vismoe-read-ahead":
            begun.set()
            assert go_on.wait(60)
        return fill(files, *what)

    monkeypatch.setattr(read_ahead, "THREADS", 1)
    monkeypatch.setattr(read_ahead.OpenFiles, "fill", slow)
    with ahead(checkpoint):
        assert begun.wait(60)
        threading.Timer(0.05, go_on.set).start()
        assert held_bytes() == MB and not any(thread.is_alive() for thread in read_ahead._READING.get()._threads)
        files = CheckpointFiles([header]).hold()
        for name in NEEDED:
            entry = header.tensors[name]
            assert set(read_new(files, 0, entry.offset_bytes, entry.nbytes).tolist()) == numbers_of([name])


def test_who_leaves_does_not_wait_for_a_large_tensor(checkpoint, monkeypatch):
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def slow(files, *what):
        calls.append(what)
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(read_ahead, "PIECE_BYTES", MB // 4)
    monkeypatch.setattr(read_ahead, "THREADS", 1)
    monkeypatch.setattr(read_ahead.OpenFiles, "fill", slow)
    with ahead(checkpoint):
        assert begun.wait(60)
        reading = read_ahead._READING.get()
        threading.Timer(0.05, go_on.set).start()
    assert len(calls) == 1 and not reading._found


def test_a_small_tensor_is_read_without_asking_what_the_page_cache_holds(checkpoint, monkeypatch):
    header = read_header(checkpoint)
    files = CheckpointFiles([header]).for_loading(True, 1)
    if not files.past_cache:
        pytest.skip("the filesystem has no O_DIRECT")
    asked = []
    monkeypatch.setattr("vismoe.store.files.cached_bytes", lambda *given: asked.append(given) or 0)
    for name, numbers in ((NEEDED[0], numbers_of(NEEDED[:1])), ("model.norm.weight", {0})):
        entry = header.tensors[name]
        assert set(read_new(files, 0, entry.offset_bytes, entry.nbytes).tolist()) == numbers
    assert len(asked) == 1


@pytest.mark.parametrize(("cached_bytes", "on_disk"), [(0, True), (MB // 2, True), (MB // 2 + 1, False), (MB, False)])
def test_a_disk_writes_to_memory_what_the_page_cache_lacks(cached_bytes, on_disk, checkpoint, monkeypatch):
    opened = CheckpointFiles([read_header(checkpoint)])
    files, stretches = opened.for_loading(True, 1), [Stretch(0, 0, [(0, MB)])]
    if not files.past_cache:
        pytest.skip("the filesystem has no O_DIRECT")
    monkeypatch.setattr("vismoe.store.files.cached_bytes", lambda *given: cached_bytes)
    assert files.are_on_disk(stretches) == on_disk and not opened.hold().are_on_disk(stretches)


def test_a_file_that_has_changed_since_is_read_anew(checkpoint):
    with ahead(checkpoint):
        finished()
        entry = read_header(checkpoint).tensors[NEEDED[0]]
        time.sleep(0.02)
        with open(checkpoint, "r+b") as file:
            file.seek(entry.offset_bytes)
            file.write(bytes([77]) * entry.nbytes)
        files = CheckpointFiles([read_header(checkpoint)]).hold()
        assert set(read_new(files, 0, entry.offset_bytes, entry.nbytes).tolist()) == {77}


@pytest.mark.parametrize("damage", ["missing", "truncated", "cut while it is read", "no memory", "no thread"])
def test_what_is_wrong_is_left_to_loading(checkpoint, damage, monkeypatch):
    """Nothing is raised or printed, here or in a thread."""
    files, said = WeightFiles.of(str(checkpoint.parent)), []
    monkeypatch.setattr(threading, "excepthook", said.append)
    if damage == "missing":
        checkpoint.unlink()
    elif damage == "truncated":
        os.truncate(checkpoint, 100)
    elif damage == "cut while it is read":
        made = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *given, **named: os.truncate(checkpoint, 5000) or made(*given, **named))
    elif damage == "no memory":
        monkeypatch.setattr(read_ahead, "in_huge_pages", _no_memory)
    else:
        monkeypatch.setattr(threading.Thread, "start", _no_memory)
    with reading_ahead(files, 10 * MB):
        assert is_reading()
        finished()
        assert held_bytes() == 0
    assert said == []


def _no_memory(*given):
    raise RuntimeError("not enough memory, or threads")


def test_another_context_gets_nothing(checkpoint):
    """Two models that are loaded at a time in one process have nothing to do with each other."""
    other = copy_context()
    with ahead(checkpoint):
        finished()
        assert held_bytes() == 3 * MB and other.run(held_bytes) == 0
        forget()
        assert held_bytes() == 0


def test_what_was_read_ahead_is_free_memory_to_the_plan(tmp_path, of_any_size):
    """As far as it can be part of what is needed beside the experts."""
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    needs = runtime_of(opened(tmp_path)).configuration.needs
    backbone_bytes = sum(nbytes for _, nbytes in needs.backbone)
    with reading_ahead(WeightFiles.of(str(tmp_path)), 10 * MB):
        finished()
        held = held_bytes()
        assert 0 < held <= backbone_bytes
        free = Hardware("cpu", 10 * MB, 20 * MB, 10 * MB)
        counted = opening._with_read_ahead(free, needs, held, 3 * MB)
        assert counted.free_bytes == counted.free_host_bytes == 10 * MB + held + 3 * MB
        counted = opening._with_read_ahead(free, needs, 2 * backbone_bytes, 0)  # of another file, say
        assert counted.free_bytes == 10 * MB + backbone_bytes
        on_gpu = Hardware("cuda", 10 * MB, 20 * MB, 10 * MB)
        assert opening._with_read_ahead(on_gpu, needs, held, 3 * MB) == on_gpu


def slab_bytes(checkpoint, tensors_mb=0, free_mb=1000, **settings):
    """(most, wanted) MB of memory for the slabs of 2 MB of experts in one file and 1 MB in a tensor of three dimensions."""
    files = WeightFiles.of(str(checkpoint.parent), **settings)
    most, wanted = files.slab_bytes([read_header(checkpoint)], tensors_mb * MB, free_mb * MB)
    return most / MB, wanted / MB


def test_how_much_memory_slabs_will_want(checkpoint, monkeypatch):
    monkeypatch.setattr(read_ahead, "BESIDE_BYTES", MB // 2)
    room = read_ahead.ROOM
    assert slab_bytes(checkpoint) == (3 * room, 3), "all experts"
    assert slab_bytes(checkpoint, memory="50%") == (1.5 * room, 1.5)
    assert slab_bytes(checkpoint, format="int4") == (0.75 * room, 0.75)
    assert slab_bytes(checkpoint, memory="50%", format="int4") == (0.75 * room, 0.75), "a share of what the file holds"
    assert slab_bytes(checkpoint, memory="25%", format="lossless") == (0.75 * room, 0.75)
    for memory in ("3MiB", str(3 * MB), 3 * MB):
        assert slab_bytes(checkpoint, tensors_mb=1, memory=memory) == (3, 1.5), "beside other tensors"
    assert slab_bytes(checkpoint, tensors_mb=4, memory="3MiB") == (3, 0)
    assert slab_bytes(checkpoint, free_mb=2) == (int(1.6 * MB) / MB, int(1.1 * MB) / MB), "what a plan takes"
    assert slab_bytes(checkpoint, free_mb=1, memory="3MiB") == (1, 0.5), "loading says that it is too much"
    for wrong in ({"memory": "much"}, {"memory": "0%"}, {"format": "int3"}):
        assert slab_bytes(checkpoint, **wrong) == (0, 0)


@pytest.fixture
def small_pools(monkeypatch):
    """Slabs of tiny models are worth pages ahead; whether such a pool took memory that had them."""
    if sys.platform != "linux":
        pytest.skip("memory gets no pages ahead here")
    monkeypatch.setattr(read_ahead, "LEAST_BYTES", 1)
    monkeypatch.setattr(backing, "LEAST_BYTES", 1)
    monkeypatch.setattr(read_ahead, "cores", lambda: 2)
    taken, real = [], backing.EarlyMemory.take

    def take(self, nbytes):
        backed_bytes, found = self.backed_bytes(), real(self, nbytes)
        taken.append((backed_bytes / nbytes, found is not None))
        return found

    monkeypatch.setattr(backing.EarlyMemory, "take", take)
    return taken


@pytest.mark.parametrize("memory", ["25%", "100%", "1GiB"])
def test_a_model_pages_experts_into_memory_that_had_its_pages(memory, tmp_path, of_any_size, small_pools):
    folder = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    config = VisMoEConfig(memory=memory, kernels="torch", context=256)
    ids = torch.arange(1, 20)[None]
    with reading_ahead(WeightFiles.of(str(tmp_path), memory=memory)):
        finished()
        read_ahead._READING.get()._slabs._backing.wait()
        model = tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config).eval()
        expected = tiny_models.reference(folder, torch.bfloat16)
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, expected(ids).logits)
        ((backed, took),) = small_pools
        assert took and backed > 0.5 and backed_bytes() == 0
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits), "it is the pool's memory now"


def reading_and_loading(folder, meanwhile=lambda: None, gguf=None, **settings):
    """(the pager of a model that was loaded while its experts were read ahead, its logits, and those of one without)."""
    ids = torch.arange(1, 20)[None]
    settings = Settings.of(**{"memory": "100%", "kernels": "torch", "context": 256, "gguf": gguf} | settings)

    def opened():
        quantization = VisMoEConfig(**vars(settings))
        if gguf is None:
            model = tiny_models.model_class(folder).from_pretrained(folder, quantization_config=quantization)
        else:
            weights = GgufWeights(str(folder), read_config(folder), settings, [])
            kind = tiny_models.model_class(folder)
            model = load_gguf(weights, kind, torch.bfloat16, None, quantization_config=quantization)
        with torch.inference_mode():
            return runtime_of(model).pager, model.eval()(ids).logits

    told = {name: getattr(settings, name) for name in READ_AHEAD_BY}
    with reading_ahead(WeightFiles.of(str(folder), **told)):
        finished()
        meanwhile()
        pager, logits = opened()
    return pager, logits, opened()[1]


def was_read(pager):
    """Bytes that the pager has read itself."""
    return pager.metrics.snapshot().total("bytes_read")


FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_vl_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_read_ahead_are_resident_from_the_start(family, tmp_path, of_any_size, small_pools):
    tiny_models.save(family, tmp_path, dtype=torch.bfloat16)
    pager, logits, expected = reading_and_loading(tmp_path)
    assert small_pools[0][1] and was_read(pager) == 0 and torch.equal(logits, expected)
    pager.check_integrity()


@pytest.mark.parametrize(("kind", "memory"), [("Q4_K", "100%"), ("Q8_0", "100%"), ("BF16", "100%"), ("Q4_K", "50%")])
def test_experts_of_a_gguf_file_are_read_ahead_into_slabs_with_room(
    kind, memory, tmp_path, of_any_size, small_pools, monkeypatch
):
    monkeypatch.setattr(opening, "LEAST_ROOMY_BYTES", 0)
    monkeypatch.setattr(early_experts, "LEAST_ROOMY_BYTES", 0)
    monkeypatch.setattr(read_ahead, "RECORDS_BYTES", 2**16)  # a few at a time
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: kind if "exps" in name else "F32")
    pager, logits, expected = reading_and_loading(tmp_path, gguf=str(tmp_path / "model.gguf"), kernels="auto", memory=memory)
    of_all = was_read(pager) / pager.inventory.total_bytes
    assert of_all == 0 if memory == "100%" else 0 < of_all < 0.8
    assert torch.equal(logits, expected)
    pager.check_integrity()


def test_experts_of_several_sizes_are_read_ahead_where_most_of_them_lie(tmp_path, of_any_size, small_pools):
    """The others are read when they are demanded."""
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: ("Q6_K" if "blk.0." in name else "Q4_K") if "exps" in name else "F32")
    pager, logits, expected = reading_and_loading(tmp_path, gguf=str(tmp_path / "model.gguf"))
    sizes = [len(pager.inventory.layers_of(geometry)) * pager.inventory.layouts[geometry].record_bytes for geometry in (0, 1)]
    assert 0 < was_read(pager) <= 12 * min(sizes) and torch.equal(logits, expected)


def evenly_spread(pager, share):
    """Whether each layer has this share of its experts, those of the lowest numbers, as far as whole experts add up to it."""
    counts = [int(np.count_nonzero(layer != ABSENT)) for layer in pager.residency()]
    lowest = all((layer[:count] != ABSENT).all() for layer, count in zip(pager.residency(), counts, strict=True))
    return lowest and all(abs(count - share * pager.inventory.layers[0].num_experts) < 1 for count in counts)


@pytest.mark.parametrize("settings", [{"memory": "50%"}, {"memory": "50%", "pinned_layers": 1}, {"memory": "30%"}], ids=str)
def test_where_not_all_experts_fit_a_part_of_each_layer_is_read_ahead(settings, tmp_path, of_any_size, small_pools, monkeypatch):
    folder, began, real = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16), [], Pager.start_with

    def start_with(pager, found):
        real(pager, found)
        began.append(evenly_spread(pager, len(found) / np.count_nonzero(pager.residency() != NO_EXPERT)))

    monkeypatch.setattr(Pager, "start_with", start_with)
    pager, logits, expected = reading_and_loading(folder, **settings)
    assert began == [True] and torch.equal(logits, expected)
    pager.check_integrity()


def test_a_part_of_each_layer_saves_its_reads_and_outlives_a_plan_of_fewer_slabs(tmp_path, of_any_size, small_pools, monkeypatch):
    """Of what was read, the slabs that there are hold the first."""
    folder, real = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16), WeightFiles.slab_bytes
    without = was_read(reading_and_loading(folder, memory="50%", deterministic=True)[0])
    pager, logits, expected = reading_and_loading(folder, memory="50%")
    assert was_read(pager) < 0.8 * without and torch.equal(logits, expected)
    monkeypatch.setattr(WeightFiles, "slab_bytes", lambda *given: tuple(nbytes * 2 for nbytes in real(*given)))
    pager, logits, expected = reading_and_loading(folder, memory="40%")
    assert torch.equal(logits, expected)
    pager.check_integrity()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0, 1))
def test_a_share_is_that_of_each_layer_and_adds_up(counts, share):
    layers = [layer for layer, count in enumerate(counts) for _ in range(count)]
    kept = evenly(layers, share)
    assert len(kept) == int(share * len(layers))
    for layer, count in enumerate(counts):
        mine, first = [number for number in kept if layers[number] == layer], sum(counts[:layer])
        assert mine == [*range(first, first + len(mine))] and abs(len(mine) - share * count) < 1


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"reads": "cached"}, {"format": "int8"}], ids=str)
def test_experts_are_not_read_ahead_where_it_is_not_known_that_they_stay(settings, tmp_path, of_any_size, small_pools):
    folder = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    if "format" in settings:
        assert main(["pack", str(folder), "--formats", settings["format"]]) == 0
    filled = []
    pager, logits, expected = reading_and_loading(folder, lambda: filled.append(read_ahead._READING.get()._filled), **settings)
    assert filled == [{}] and was_read(pager) > 0 and torch.equal(logits, expected)


def swapped(records):
    """A guess that takes down for gate."""
    return replace(records, experts=[one[::-1] for one in records.experts])


def larger(records):
    return replace(records, layout=records.layout.with_room(2 * BLOCK_BYTES))


@pytest.mark.parametrize("wrong", [swapped, larger])
def test_what_was_read_to_another_place_than_it_belongs_is_read_again(wrong, tmp_path, of_any_size, small_pools, monkeypatch):
    folder, real = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16), read_ahead.early_records
    monkeypatch.setattr(read_ahead, "early_records", lambda *given: wrong(real(*given)))
    filled = []
    pager, logits, expected = reading_and_loading(folder, lambda: filled.append(len(read_ahead._READING.get()._filled)))
    assert filled[0] > 0 and was_read(pager) > 0 and torch.equal(logits, expected)


def test_experts_of_a_file_that_has_changed_since_are_read_again(tmp_path, of_any_size, small_pools):
    folder = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    (file,) = tmp_path.glob("*.safetensors")

    def changed():
        time.sleep(0.05)
        tensors = {name: tensor * 2 if ".experts." in name else tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})

    pager, logits, expected = reading_and_loading(folder, changed)
    assert was_read(pager) > 0 and torch.equal(logits, expected)


def test_slabs_go_on_being_filled_while_weights_load_and_take_no_memory_then(tmp_path, of_any_size, small_pools, monkeypatch):
    """Only such as have their pages: free memory is measured meanwhile."""
    folder = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    begun, go_on, asked, real = threading.Event(), threading.Event(), [], EarlyRecords.stretches
    monkeypatch.setattr(read_ahead, "RECORDS_BYTES", 1)  # one at a time
    monkeypatch.setattr(read_ahead, "THREADS", 1)

    def stretches(records, slabs, slabs_at):
        begun.set()
        assert go_on.wait(60)
        return real(records, slabs, slabs_at)

    monkeypatch.setattr(EarlyRecords, "stretches", stretches)
    there = backing.EarlyMemory.wait_for_pages

    def the_first_three(memory, *place):
        asked.append(there(memory, *place))
        return len(asked) < 4

    monkeypatch.setattr(backing.EarlyMemory, "wait_for_pages", the_first_three)
    with reading_ahead(WeightFiles.of(str(tmp_path), memory="100%")):
        reading = read_ahead._READING.get()
        assert begun.wait(60)
        assert backed_bytes() > 0 and not reading._filled, "it does not wait for them"
        go_on.set()
        finished()
        assert len(reading._filled) == 3 and len(asked) >= 4 and all(asked[:3])
        filled, config = len(reading._filled), VisMoEConfig(memory="100%", kernels="torch", context=256)
        runtime = runtime_of(tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config))
        assert np.count_nonzero(runtime.pager.residency() == ON_DEVICE) == filled
        assert runtime.backends["reads"].endswith(f"{filled} experts were read while libraries were imported")


@pytest.mark.parametrize("on_disk", [True, False])
def test_threads_that_copy_what_the_page_cache_has_leave_the_cores_to_imports(on_disk, tmp_path, small_pools, monkeypatch):
    """Where the disk writes to memory, they hardly need one, and it must not wait for them."""
    folder = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    given_way, real = set[threading.Thread](), read_ahead.give_way
    monkeypatch.setattr(read_ahead, "give_way", lambda: given_way.add(threading.current_thread()) or real())
    monkeypatch.setattr(read_ahead.OpenFiles, "are_on_disk", lambda files, stretches: on_disk)
    with reading_ahead(WeightFiles.of(str(folder), memory="100%")):
        reading = read_ahead._READING.get()
        finished()
        assert reading._filled and reading._threads[0] in given_way
        assert given_way.isdisjoint(reading._filling) == on_disk


@pytest.mark.parametrize("slabs", [2**30, 1], ids=["more than there are addresses for", "fewer than experts"])
def test_slabs_that_are_not_those_are_filled_no_more(slabs, tmp_path, of_any_size, small_pools, monkeypatch):
    folder, begun, real = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16), threading.Event(), EarlyRecords.stretches
    monkeypatch.setattr(read_ahead, "RECORDS_BYTES", 1)

    def stretches(records, slabs, slabs_at):
        begun.set()
        time.sleep(0.02)
        return real(records, slabs, slabs_at)

    monkeypatch.setattr(EarlyRecords, "stretches", stretches)
    with reading_ahead(WeightFiles.of(str(folder), memory="100%")):
        reading = read_ahead._READING.get()
        assert begun.wait(60)
        slab_bytes = reading._records.layout.record_bytes
        taken = reading.take_memory(slabs * slab_bytes, slab_bytes)
        assert not any(thread.is_alive() for thread in reading._filling)
        assert len(reading._filled) < len(reading._records.experts), "they were told to end"
        filled = len(reading._filled)
        assert taken is None if slabs > 1 else len(taken[0]) == slab_bytes and len(taken[1]()) == filled > 0
        assert reading._slabs._memory is None


def test_of_which_tensors_records_are_made(tmp_path):
    def records(tensors, dtype="bfloat16", layers=None, slabs_bytes=MB):
        save_file({name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in tensors.items()}, tmp_path / "m.safetensors")
        return early_records([read_header(tmp_path / "m.safetensors")], dtype, layers, 0, slabs_bytes)

    bf16, at = torch.bfloat16, "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    one = {at.format(layer, e, m): ((64, 32), bf16) for layer in (0, 1) for e in (0, 1) for m in ("gate", "up", "down")}
    found = records(one)
    assert len(found.experts) == 4 and found.layout.record_bytes == 3 * 4096
    assert [len(records(one, slabs_bytes=4 * 3 * 4096 - less).experts) for less in (0, 1)] == [4, 3], "of all or a part"
    assert len(records(one, layers=1).experts) == 2, "a layer that drafts lies behind the others"
    assert len(records(one | {"mtp." + name: of for name, of in one.items()}).experts) == 4
    assert records(one, dtype="float32") is None, "they are cast"
    assert records(one | {"model.layers.0.mlp.experts.0.gate_proj.bias": ((64,), bf16)}) is None
    assert records({"model.layers.0.mlp.shared_experts.up_proj.weight": ((64, 32), bf16)}) is None
    shapes = {"gate_up_proj": (4, 64, 32), "down_proj": (4, 32, 32)}
    fused = {f"model.layers.0.mlp.experts.{name}": (shape, bf16) for name, shape in shapes.items()}
    assert [len(matrices) for matrices in records(fused).experts] == [2] * 4
    assert sorted(read.pieces for read in records(fused).stretches([0], 100)) == [[(100, 4096)], [(100 + 4096, 2048)]]
    up, down = (records(fused).stretches([1, 2], 0)[place].pieces for place in (1, 0))  # as the file has them: by name
    assert up == [(6144, 4096), (2 * 6144, 4096)] and down == [(6144 + 4096, 2048), (2 * 6144 + 4096, 2048)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.experts.up_proj", (10**12, 0, 1)),
        ("blk.0.ffn_up_exps.weight", ()),
        (f"model.layers.{'9' * 5000}.mlp.experts.0.up_proj.weight", (64, 32)),
        (".layers.1." * 10**5 + ".experts." * 10**5, (64, 32)),
        ("model.layers.0.mlp.experts.0.w1_blocks", (64, 32)),
    ],
    ids=["no bytes", "no shape", "a layer of 5,000 digits", "a long name", "another matrix"],
)
def test_of_tensors_that_are_no_matrices_of_experts_no_records_are_made(name, shape):
    nbytes = 2 * math.prod(shape)
    header = SafetensorsHeader(Path("m"), nbytes, 0, {name: TensorEntry(0, nbytes, shape, torch.bfloat16)}, "")
    assert early_records([header], "bfloat16", 1, 512, MB) is None


def test_a_load_that_failed_keeps_no_slabs_and_the_next_one_reads_its_own(tmp_path, of_any_size, small_pools, monkeypatch):
    folder, real = tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16), quantizer.own_memory

    def opened():
        config = VisMoEConfig(memory="100%", kernels="torch", context=256)
        return tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config)

    def fails(*given):
        raise KeyboardInterrupt

    with reading_ahead(WeightFiles.of(str(folder), memory="100%")):
        reading = read_ahead._READING.get()
        finished()
        monkeypatch.setattr(quantizer, "own_memory", fails)
        with pytest.raises(KeyboardInterrupt):
            opened()
        assert reading._taken is not None
        monkeypatch.setattr(quantizer, "own_memory", real)
        runtime = runtime_of(opened())
        assert reading._taken is None and (runtime.pager.residency() == 0).all() and "read while" not in runtime.backends["reads"]


@pytest.mark.parametrize(("ranks", "cores"), [("2", 2), ("1", 1)])
def test_processes_that_share_the_memory_and_a_core_alone_reserve_none(ranks, cores, tmp_path, small_pools, monkeypatch):
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(read_ahead, "cores", lambda: cores)
    with reading_ahead(WeightFiles.of(str(tmp_path), memory="100%")):
        finished()
        assert read_ahead._READING.get()._slabs is None and backed_bytes() == 0


def test_memory_for_slabs_is_given_back_where_loading_fails_or_takes_none(tmp_path, of_any_size, small_pools):
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    with pytest.raises(BudgetError), reading_ahead(WeightFiles.of(str(tmp_path), memory="100%")):
        finished()
        reading = read_ahead._READING.get()
        reading._slabs._backing.wait()
        assert backed_bytes() > 0
        tiny_models.model_class(tmp_path).from_pretrained(tmp_path, quantization_config=VisMoEConfig(memory=1000))
    assert not small_pools and reading.backed_bytes() == 0 and reading._slabs._memory is None
    with reading_ahead(WeightFiles.of(str(tmp_path), memory="100%")):
        finished()
        reading = read_ahead._READING.get()
        aliased = VisMoEConfig(memory="25%", context=256, emulated_link_bytes_per_s=10**9)
        tiny_models.model_class(tmp_path).from_pretrained(tmp_path, quantization_config=aliased)
        assert not small_pools and reading._slabs._memory is None


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ([], True),
        (["--memory", "1GiB"], True),
        (["--gguf", "m.gguf", "--dtype", "float32"], True),
        (["--backbone", "int8"], False),
        (["--revision", "other"], True),
    ],
)
def test_a_command_reads_ahead_what_loading_will_hold(given, begins, checkpoint, tmp_path, monkeypatch):
    """Unless other numbers than those of the files are held. Who encloses the imports before it begins then."""
    seen = []

    def load(model, **given):
        seen.append(read_ahead._READING.get())
        raise ConfigError("enough")

    monkeypatch.setattr("vismoe.engine.engine.load", load)
    arguments = command_parser("chat").parse_intermixed_args([str(tmp_path), "Hello?", "--device", "cpu", *given])
    with pytest.raises(ConfigError, match="enough"):
        flags.load_engine(arguments, str(tmp_path))
    assert (seen[0] is not None) == begins and not is_reading()
    with pytest.raises(ConfigError, match="enough"), flags.reading_ahead(arguments, str(tmp_path)):
        outer = read_ahead._READING.get()
        flags.load_engine(arguments, str(tmp_path))
    assert seen[1] is outer and (outer is not None) == begins and not is_reading()
    assert not any("read-ahead" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"memory": "1GiB", "format": "lossless"}, {"memory": "1GiB", "format": "lossless"}),
        ({"dtype": torch.float16}, {"dtype": "float16"}),
        ({"backbone": "int8"}, None),
        ({"gguf": "m.gguf"}, {"gguf": "m.gguf"}),
    ],
)
def test_load_reads_ahead_what_it_will_hold(given, expected, checkpoint, monkeypatch):
    """Of what its settings say; within, the model is loaded as it was asked for."""
    begun, asked = [], []
    real = read_ahead.ReadAhead

    def load(model, **given):
        asked.append((model, given))
        raise ConfigError("enough")

    monkeypatch.setattr("vismoe.engine.engine.load", load)
    monkeypatch.setattr(read_ahead, "ReadAhead", lambda files, most_bytes: begun.append(files) or real(files, most_bytes))
    with pytest.raises(ConfigError, match="enough"):
        vismoe.load(checkpoint.parent, device="cpu", **given)
    assert begun == ([] if expected is None else [WeightFiles.of(str(checkpoint.parent), **expected)]) and not is_reading()
    assert asked == [(checkpoint.parent, {"device": "cpu", "dtype": "auto", "revision": None, **given})]
    with pytest.raises(ConfigError, match="enough"):
        vismoe.load(10**5000, device="cpu", dtype=10**5000)  # what is wrong is said where it is used
    for wrong in ({"memory": "much"}, {"device": "tpu"}, {"colour": "red"}):
        with pytest.raises(ConfigError):
            vismoe.load(checkpoint.parent, **wrong)


def test_load_imports_nothing_heavy_before_it_is_called():
    program = (
        "import sys, vismoe; vismoe.load; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_where_the_weights_are(checkpoint, tmp_path, monkeypatch):
    """Those that loading takes: an index or the usual name, not whatever else lies there."""
    folder, cache = str(tmp_path), tmp_path / "hub"
    (tmp_path / "consolidated.safetensors").touch()
    assert WeightFiles.of(None) == WeightFiles()
    assert WeightFiles.of(folder) == WeightFiles((checkpoint,), "bfloat16", 1)
    assert WeightFiles.of(folder, dtype="float32").dtype == "float32"
    assert WeightFiles.of(folder, device="cuda") == WeightFiles.of(folder, backbone="int8") == WeightFiles()
    assert [file.name for file in WeightFiles.of(folder, gguf="m.gguf", mmproj="v.gguf").paths] == ["m.gguf", "v.gguf"]
    assert [file.name for file in WeightFiles.of("m.gguf").paths] == ["m.gguf"]
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in WeightFiles.of(folder).paths] == ["model-1.safetensors", "model-2.safetensors"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = put(cache, "us/model", lambda into: (into / "config.json").write_text('{"torch_dtype": "float16"}'))
    assert WeightFiles.of("us/model") == WeightFiles((snapshot / "model.safetensors",), "float16", None)


@pytest.mark.parametrize("name", ["us/other", "not a name", "x" * 300, "a\0b", "\udc80"])
@pytest.mark.parametrize(
    "config", ["", "[]", '{"text_config": 3}', "[" * 100_000, "{}"], ids=["empty", "list", "number", "deep", "none"]
)
def test_a_name_or_a_configuration_that_means_nothing_is_left_to_loading(name, config, tmp_path):
    assert WeightFiles.of(name).paths == ()
    assert WeightFiles.of(None, gguf="~nobody-of-this-name/m.gguf").paths == ()
    (tmp_path / "config.json").write_text(config)
    assert WeightFiles.of(str(tmp_path)) == (WeightFiles((tmp_path / "model.safetensors",)) if config == "{}" else WeightFiles())
