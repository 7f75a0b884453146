"""What is read from disk while libraries are imported: large tensors beside the routed experts, until loading asks for one."""

import os
import threading
import time
from contextvars import copy_context

import gguf_files
import pytest
import tiny_models
import torch
from hub_cache import put
from safetensors.torch import save_file

from vismoe import flags
from vismoe.cli.main import command_parser
from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.models.load import opening
from vismoe.models.load.gguf import GgufWeights, load_gguf
from vismoe.models.load.preview import read_config
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.planning.needs import Hardware
from vismoe.store import read_ahead
from vismoe.store.files import CheckpointFiles
from vismoe.store.read_ahead import headers_of, held_bytes, large_tensors, reading_ahead, take, weights_here
from vismoe.store.safetensors_header import read_header
from vismoe.store.tensor_reads import read_new

MB = 2**20
NEEDED = ["model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
EXPERTS = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(2)]
OTHERS = [*EXPERTS, "model.embed_tokens.weight", "mtp.fc.weight"]


@pytest.fixture
def checkpoint(tmp_path):
    """A file of tensors of 1 MB, each of one number, and a small one."""
    tensors = {name: torch.full((MB,), index, dtype=torch.uint8) for index, name in enumerate([*NEEDED, *OTHERS])}
    tensors |= {"model.norm.weight": torch.zeros(64), "layers.0.input_linear.weight": torch.zeros(4, 512, 512, dtype=torch.uint8)}
    tensors |= {"layers.0.float32.weight": torch.zeros(512, 512)}
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def finished():
    """Waits until everything is read."""
    reading = read_ahead._READING.get()
    for thread in reading._threads:
        thread.join(60)
        assert not thread.is_alive()


def numbers_of(names):
    return {[*NEEDED, *OTHERS].index(name) for name in names}


def test_large_tensors_beside_routed_experts_are_read_once_and_are_the_files(checkpoint):
    header = read_header(checkpoint)
    with reading_ahead([checkpoint], 10 * MB):
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
    assert held_bytes() == 0 and take(files.states[0], entry.offset_bytes, entry.nbytes) is None


def test_which_tensors_and_how_many(checkpoint):
    header = read_header(checkpoint)

    def names(most_bytes):
        places = {entry.offset_bytes: name for name, entry in header.tensors.items()}
        return [places[entry.offset_bytes] for _, entry in large_tensors([header], most_bytes)]

    assert sorted(names(3 * MB)) == sorted(NEEDED), "no embeddings, no experts, whatever their name, nothing small or cast"
    assert names(3 * MB - 1) == names(3 * MB)[:2] and names(0) == []


def loaded(folder, open_it):
    """(the weights of the model that `open_it` loads while large tensors of `folder` were read ahead, how many of these it took,
    how many are left)."""
    with reading_ahead(sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")), 2**30):
        finished()
        found = read_ahead._READING.get()._found
        before = len(found)
        state = open_it().state_dict()
        return state, before - len(found), len(found)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gpt_oss"])
def test_a_model_is_loaded_from_what_was_read_ahead(family, tmp_path, monkeypatch):
    monkeypatch.setattr(read_ahead, "LARGE_BYTES", 1)
    monkeypatch.setattr("vismoe.models.load.stripping.LARGE_BYTES", 1)
    expected = tiny_models.reference(tiny_models.save(family, tmp_path, dtype=torch.bfloat16), torch.bfloat16).state_dict()
    config = VisMoEConfig(memory="25%", kernels="torch", context=256)
    cls = tiny_models.model_class(tmp_path)
    state, taken, left = loaded(tmp_path, lambda: cls.from_pretrained(tmp_path, quantization_config=config))
    assert taken >= 8 and left == 0
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_gguf_file_is_loaded_from_what_was_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(read_ahead, "LARGE_BYTES", 1)
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q4_K" if "exps" in name else "BF16")
    file, config = tmp_path / "model.gguf", read_config(tmp_path)
    settings = Settings.of(memory="25%", kernels="torch", gguf=file)

    def opened():
        weights, quantization = GgufWeights(str(tmp_path), config, settings, []), VisMoEConfig(**vars(settings))
        return load_gguf(weights, tiny_models.model_class(tmp_path), torch.bfloat16, None, quantization_config=quantization)

    state, taken, left = loaded(tmp_path, opened)
    (header,) = headers_of(file)
    assert taken == sum("_exps" not in name and entry.dtype == torch.bfloat16 for name, entry in header.tensors.items())
    assert left == 0
    expected = opened().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_what_was_read_ahead_is_free_memory_to_the_plan(checkpoint):
    for device, found in (("cpu", (13 * MB, 13 * MB)), ("cuda", (10 * MB, 10 * MB + 3 * MB))):
        hardware = Hardware(device, 10 * MB, 20 * MB, 10 * MB)
        with reading_ahead([checkpoint], 10 * MB):
            finished()
            counted = opening._with_read_ahead(hardware)
        assert (counted.free_bytes, counted.free_host_bytes) == found


@pytest.mark.parametrize(
    "given, begins",
    [
        ([], True),
        (["--memory", "1GiB"], True),
        (["--gguf", "m.gguf", "--dtype", "float32"], True),
        (["--dtype", "float32"], False),
        (["--backbone", "int8"], False),
    ],
)
def test_a_command_reads_ahead_what_loading_will_hold(given, begins, checkpoint, tmp_path, monkeypatch):
    """On the CPU, unless other numbers than those of the files are held."""
    seen = []

    def load(model, **given):
        seen.append(read_ahead._READING.get())
        raise ConfigError("enough")

    monkeypatch.setattr("vismoe.engine.engine.load", load)
    parser = command_parser("chat")
    arguments = parser.parse_intermixed_args([str(tmp_path), "Hello?", "--device", "cpu", *given])
    with pytest.raises(ConfigError, match="enough"):
        flags.load_engine(arguments, str(tmp_path))
    assert (seen[0] is not None) == begins
    assert read_ahead._READING.get() is None and not any("read-ahead" in thread.name for thread in threading.enumerate())


def test_what_was_not_read_ahead_is_read_and_nothing_is_read_ahead_any_more(checkpoint, monkeypatch):
    """The first tensor that loading asks for ends it, once the one under way is there."""
    header, begun, go_on = read_header(checkpoint), threading.Event(), threading.Event()
    fill = read_ahead.OpenFiles.fill_all

    def slow(files, stretches):
        if threading.current_thread().name == "vismoe-read-ahead":
            begun.set()
            assert go_on.wait(60)
        return fill(files, stretches)

    monkeypatch.setattr(read_ahead, "THREADS", 1)
    monkeypatch.setattr(read_ahead.OpenFiles, "fill_all", slow)
    with reading_ahead([checkpoint], 10 * MB):
        assert begun.wait(60)
        threading.Timer(0.05, go_on.set).start()
        files = CheckpointFiles([header]).hold()
        for name in NEEDED:
            entry = header.tensors[name]
            assert set(read_new(files, 0, entry.offset_bytes, entry.nbytes).tolist()) <= numbers_of([name])
        assert held_bytes() in (0, MB) and not any(thread.is_alive() for thread in read_ahead._READING.get()._threads)


def test_a_file_that_has_changed_since_is_read_anew(checkpoint):
    with reading_ahead([checkpoint], 10 * MB):
        finished()
        entry = read_header(checkpoint).tensors[NEEDED[0]]
        time.sleep(0.02)
        with open(checkpoint, "r+b") as file:
            file.seek(entry.offset_bytes)
            file.write(bytes([77]) * entry.nbytes)
        files = CheckpointFiles([read_header(checkpoint)]).hold()
        assert set(read_new(files, 0, entry.offset_bytes, entry.nbytes).tolist()) == {77}


@pytest.mark.parametrize("damage", ["missing", "truncated", "cut while it is read", "no memory", "no file at all"])
def test_what_is_wrong_is_left_to_loading(checkpoint, damage, monkeypatch):
    files = [checkpoint]
    if damage == "missing":
        checkpoint.unlink()
    elif damage == "truncated":
        os.truncate(checkpoint, 100)
    elif damage == "cut while it is read":
        made = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *given, **named: os.truncate(checkpoint, 5000) or made(*given, **named))
    elif damage == "no memory":
        monkeypatch.setattr(read_ahead, "in_huge_pages", lambda tensor: _no_memory())
    else:
        files = []
    with reading_ahead(files, 10 * MB):
        if files:
            finished()
        assert held_bytes() == 0


def _no_memory():
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def test_another_context_gets_nothing(checkpoint):
    """Two models that are loaded at a time in one process have nothing to do with each other."""
    other = copy_context()
    with reading_ahead([checkpoint], 10 * MB):
        finished()
        assert held_bytes() == 3 * MB and other.run(held_bytes) == 0


def test_where_the_weights_are(checkpoint, tmp_path, monkeypatch):
    folder, cache = str(tmp_path), tmp_path / "hub"
    assert weights_here(None, None, None, None) == []
    assert weights_here(folder, None, None, None) == [checkpoint]
    assert [file.name for file in weights_here(folder, None, "m.gguf", "v.gguf")] == ["m.gguf", "v.gguf"]
    assert [file.name for file in weights_here("m.gguf", None, None, None)] == ["m.gguf"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = put(cache, "us/model", lambda into: [(into / name).touch() for name in ("config.json", "b.safetensors")])
    assert weights_here("us/model", None, None, None) == [snapshot / "b.safetensors"]
    assert weights_here("us/other", None, None, None) == weights_here("not a name", None, None, None) == []
