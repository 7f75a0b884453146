"""Checkpoints that do not fit together: refused with the file, numbers and a fix, before a library trips over them.

The demo model with one file changed. What comes out is an error of ours, from `vismoe.load` as from `vismoe plan`.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as runs
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from searching import examples

import vismoe
from vismoe.config import Settings
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, CheckpointError, ConfigError, UnsupportedModelError, VisMoEError
from vismoe.models.family import checkpoint_files as checked
from vismoe.models.load.preview import preview
from vismoe.precision.hotness import Hotness

CONFIG = json.loads((demo_model() / "config.json").read_text())
VOCABULARY = CONFIG["text_config"]["vocab_size"]
BROKEN = {"empty": "", "cut": '{"a": [1, ', "a list": "[]", "null": "null", "bytes": "\x00\x01", "deep": "[" * 100_000}
FILES = ["config.json", "generation_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json"]
INDEX = "model.safetensors.index.json"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path):
    """The demo model, of which a test may replace a file."""
    copied = tmp_path / "model"
    copied.mkdir()
    for file in demo_model().iterdir():
        if file.is_file():
            (copied / file.name).symlink_to(file)
    return copied


def put(folder: Path, name: str, content) -> Path:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def config_with(path: str, value) -> dict:
    changed = copy.deepcopy(CONFIG)
    owner = changed
    *outer, name = path.split(".")
    for key in outer:
        owner = owner[key]
    owner[name] = value
    return changed


def load(folder):
    return vismoe.load(folder, memory="50%", device="cpu", context=64)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", [*FILES, INDEX])
def test_a_file_that_is_no_json_object_is_named(folder, name, how):
    file = put(folder, name, BROKEN[how])
    with pytest.raises(CheckpointError, match="Fix: ") as refused:
        load(folder)
    said = str(refused.value)
    assert str(file) in said and (str(len(BROKEN[how])) in said or "holds a JSON" in said)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_plan_says_so_too(folder, name):
    file = put(folder, name, "{")
    with pytest.raises(CheckpointError) as refused:
        preview(folder, Settings())
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}, "metadata": {}}, "a weight_map that is {}"),
        ({"weight_map": 5, "metadata": {}}, "a weight_map that is 5"),
        ({"weight_map": {"a": 5}, "metadata": {}}, "a weight_map that is"),
        ({"weight_map": {"a": "model.safetensors"}}, "no metadata"),
        ({"weight_map": {"a": "../model.safetensors"}, "metadata": {}}, "not a .safetensors file beside it"),
        ({"weight_map": {"a": "x.safetensors"}, "metadata": {}}, "lacks 1 of 1 weight files, first x.safetensors"),
        ({"weight_map": {"a": "x.safetensors", "b": "model.safetensors"}, "metadata": {}}, "lacks 1 of 2 weight files"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(folder, index, says):
    put(folder, INDEX, index)
    with pytest.raises(CheckpointError, match="Fix: ") as refused:
        load(folder)
    assert says in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("text_config.num_experts_per_tok", 33, "a token uses 33 experts at .*experts, but there are 32"),
        (
            "text_config.vocab_size",
            1 << 20,
            rf"embed_tokens.weight has the shape \(1048576, 192\) here, but \({VOCABULARY}, 192\)",
        ),
        ("text_config.vocab_size", VOCABULARY - 42, "."),
        ("text_config.num_attention_heads", 3, "has the shape .* here, but .* in the files of weights"),
        ("text_config.num_hidden_layers", 9, "."),
        ("text_config.hidden_act", "nope", "nope"),
        ("text_config.rope_parameters", 5, "no qwen3_vl_moe can have"),
        ("image_token_id", 10**9, "image_token_id is 1000000000, but the tokenizer has"),
        ("architectures", [5], "do not match"),
    ],
)
def test_a_configuration_of_other_weights_is_refused(folder, path, value, says):
    put(folder, "config.json", config_with(path, value))
    with pytest.raises(CheckpointError, match=says) as refused:
        load(folder)
    assert str(folder) in str(refused.value) and "Fix: " in str(refused.value)


def test_a_model_type_that_nobody_knows_is_not_called_a_broken_file(folder):
    put(folder, "config.json", config_with("model_type", "nope"))
    with pytest.raises(UnsupportedModelError, match=r"does not know this model \(model_type='nope'\).*newer transformers"):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(folder):
    tokenizer = json.loads((demo_model() / "tokenizer.json").read_text())
    last = max(tokenizer["added_tokens"], key=lambda token: token["id"])
    tokenizer["added_tokens"] += [
        {**last, "id": last["id"] + more, "content": f"<one more {more}>"} for more in range(1, VOCABULARY - last["id"] + 3)
    ]
    file = put(folder, "tokenizer.json", tokenizer)
    with pytest.raises(
        CheckpointError, match=rf"has the id {VOCABULARY} \('<one more .*embeddings for {VOCABULARY:,} ids.*Fix: "
    ) as refused:
        load(folder)
    assert str(file) in str(refused.value)


def test_weights_that_no_file_has_are_not_made_up(folder):
    tensors = load_file(demo_model() / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[gone]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no file has the weights of 1 parameters, first {gone}") as refused:
        load(folder)
    assert str(folder) in str(refused.value)


PARTS = {"": CONFIG, "text_config.": CONFIG["text_config"], "vision_config.": CONFIG["vision_config"]}
NUMBERS = [f"{part}{name}" for part, values in PARTS.items() for name, value in values.items() if isinstance(value, int)]


@runs(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NUMBERS), st.sampled_from([-1, 0, 1, 3, 7, 64, None, "x", 2.5, [], {}, True]))
def test_any_number_of_a_configuration_may_be_another_one(folder, path, value):
    """A plan is made, or an error of ours comes out: reading files of others never ends otherwise."""
    put(folder, "config.json", config_with(path, value))
    try:
        preview(folder, Settings(context=64, memory="50%"))
    except VisMoEError as error:
        assert len(str(error)) < 3000


def test_memory_that_runs_out_while_a_model_is_read_is_said(monkeypatch):
    for error in (MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: you")):
        with pytest.raises(BudgetError, match="memory ran out"), checked.reading_checkpoint("a-model"):
            raise error


@pytest.mark.parametrize("how", ["no folder", "a folder", "a long name"])
def test_a_state_of_hotness_that_cannot_be_written_is_refused_before_loading(tmp_path, how, monkeypatch):
    file = {"no folder": tmp_path / "none" / "state", "a folder": tmp_path, "a long name": tmp_path / ("x" * 250)}[how]
    with pytest.raises(ConfigError, match=r"hotness_state: .* cannot be written: .*Fix: .*--hotness-state"):
        vismoe.load(memory="50%", device="cpu", context=64, hotness_state=str(file))
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_whole_and_holds_something_else_is_refused(tmp_path):
    from vismoe.precision import hotness

    hot = Hotness((4, 3), 0.9, 4)
    hot.save(tmp_path / "state", "a model")
    head, _, numbers = (tmp_path / "state").read_bytes()[4:].partition(b"\n")
    wrong = (b"{" + numbers, b"[]\n" + numbers, head + b"\n" + numbers[:-8], head + b"\n" + b"\xff" * len(numbers))
    for state in (*wrong, head.replace(b"false", b"7") + b"\n" + numbers):
        (tmp_path / "state").write_bytes(hotness._checksum(state) + state)
        with pytest.raises(CheckpointError, match="Fix: delete it"):
            Hotness((4, 3), 0.9, 4).load(tmp_path / "state", "a model")
