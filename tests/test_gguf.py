"""GGUF files against transformers: the same bytes in llama.cpp's places, and llama.cpp's logits for the same tokens.

llama.cpp keeps activations in other types than transformers, so a router's near tie can choose another expert; such a position is
far off and its neighbours are not. Hence medians and shares of positions, not maxima.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers as T
from small_geometries import small_config

from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.gguf import gguf_refusal, write_gguf
from vismoe.bench.llama_cpp import ARCHITECTURES
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError

# One geometry of every family; the others of the table differ in sizes only.
UNKNOWN = ("deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2")  # to llama.cpp's converter
FAMILIES = {geometry.config_class: name for name, geometry in reversed(GEOMETRIES.items()) if name not in (*UNKNOWN, "tiny")}
CHANGES: dict[str, dict[str, Any]] = {"deepseek-v2-lite": dict(q_lora_rank=48)}  # as its larger sister has


def written(name: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint of a small geometry."""
    config = small_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return write_checkpoint(config, model_class_of(name), folder / "checkpoint", skew=0.5, progress=False).folder


def transformers_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tiny_models.reference(folder)(input_ids=ids[None]).logits[0]


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in FAMILIES.values()), *CHANGES.items()])
def test_llama_cpp_computes_the_same_logits(name, changes, tmp_path):
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source")
    folder = written(name, tmp_path, **changes)
    write_gguf(folder, tmp_path / "model.gguf", progress=False)
    ids = torch.randint(300, 1900, (40,), generator=torch.Generator().manual_seed(0))
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    llama.eval(ids.tolist())
    theirs = torch.from_numpy(np.array(llama.scores[: len(ids)])).float()
    llama.close()
    ours = transformers_logits(folder, ids)
    cosine = torch.cosine_similarity(ours, theirs, dim=-1)
    assert cosine.median() > 0.9999, cosine
    assert (cosine > 0.999).float().mean() >= 0.8, cosine
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.8


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_only_the_experts_are_quantised_and_as_the_library_does_it(name, kind, tmp_path):
    """gpt-oss keeps its experts transposed, gate and up in every other column, and has biases."""
    gguf = pytest.importorskip("gguf")
    folder = written(name, tmp_path, moe_intermediate_size=64, intermediate_size=64)
    for experts in ("bf16", kind):
        write_gguf(folder, tmp_path / f"{experts}.gguf", experts=experts, progress=False)
    plain, small = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / f"{experts}.gguf").tensors} for experts in ("bf16", kind)
    )
    assert list(plain) == list(small)
    changed = {name for name in plain if plain[name].tensor_type != small[name].tensor_type}
    assert changed == {name for name in plain if name.endswith("_exps.weight")} and changed
    for tensor in plain:
        data = plain[tensor].data
        if tensor in changed:
            values = torch.from_numpy(data.copy()).view(torch.bfloat16).float().numpy()
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
            assert small[tensor].tensor_type.name.lower() == kind
        assert np.array_equal(small[tensor].data, data), tensor


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_llama_cpp_reads_quantised_experts_and_answers_nearly_the_same(kind, tmp_path):
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source")
    folder = written("qwen3-30b-a3b", tmp_path, moe_intermediate_size=64)
    write_gguf(folder, tmp_path / "model.gguf", experts=kind, progress=False)
    ids = torch.randint(300, 1900, (40,), generator=torch.Generator().manual_seed(0))
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    llama.eval(ids.tolist())
    theirs = torch.from_numpy(np.array(llama.scores[: len(ids)])).float()
    llama.close()
    cosine = torch.cosine_similarity(transformers_logits(folder, ids), theirs, dim=-1)
    assert {"q8_0": 0.999, "q4_0": 0.95}[kind] < cosine.median() < 0.99999, cosine


def test_rows_that_are_not_whole_blocks_are_refused(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(UnsupportedModelError, match="rows of 48 weights, but q4_0 needs blocks of 32"):
        write_gguf(written("qwen3-30b-a3b", tmp_path), tmp_path / "model.gguf", experts="q4_0", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_experts_lie_in_stacked_tensors_and_vectors_and_routers_are_float32(tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = written("qwen3-30b-a3b", tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", progress=False)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    model = tiny_models.reference(folder, torch.bfloat16)
    experts = model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for part, weight in (("gate", gate), ("up", up), ("down", experts.down_proj)):
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert tuple(tensor.shape) == tuple(reversed(weight.shape))
        assert torch.equal(torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).view(weight.shape), weight)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        name for name in kinds if "norm" in name or "ffn_gate_inp" in name
    }
    assert len(tensors) == 3 + 3 * 12


def test_a_vision_tower_is_left_out(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(written("qwen3-vl-30b-a3b", tmp_path), tmp_path / "model.gguf", progress=False)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert not [tensor.name for tensor in reader.tensors if not tensor.name.startswith(("blk.", "output", "token_embd"))]
    assert reader.fields["general.architecture"].contents() == "qwen3vlmoe"


def test_an_unfinished_file_never_bears_the_name(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from vismoe.store.checkpoint import CheckpointStore

    folder = written("mixtral-8x7b", tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"older")

    def broken(self, expert, record):
        raise CheckpointError("truncated")

    monkeypatch.setattr(CheckpointStore, "read", broken)
    with pytest.raises(CheckpointError, match="truncated"):
        write_gguf(folder, tmp_path / "model.gguf", progress=False)
    assert (tmp_path / "model.gguf").read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "model.gguf"}


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    folder, usage = written("mixtral-8x7b", tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match="1000 B free"):
        write_gguf(folder, tmp_path / "model.gguf", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_a_checkpoint_in_another_type_is_refused(tmp_path):
    pytest.importorskip("gguf")
    tiny_models.save("qwen2_moe", tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="not in bf16"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", progress=False)


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_every_architecture_is_compared():
    assert {small_config(name).model_type for name in FAMILIES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_of_the_table_can_be_written_or_is_refused_by_name(name):
    refusal = gguf_refusal(geometry_config(name))
    assert "deepseek_vl_v2 is not supported" in refusal if name in UNKNOWN else refusal is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T.JambaConfig(), "jamba is not supported"),
        (geometry_config("qwen3-vl-30b-a3b", 3), "more layers than the 3 with visual features, but this model has 3"),
        (T.Qwen3MoeConfig(norm_topk_prob=False), "assumes norm_topk_prob=True"),
        (T.Qwen3MoeConfig(norm_topk_prob=True, mlp_only_layers=[0]), r"this model has \[0\]"),
        (
            T.OlmoeConfig(num_key_value_heads=4),
            "assumes num_key_value_heads = num_attention_heads, but this model has 4 and 16",
        ),
        (T.OlmoeConfig(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "'linear'"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused_by_name(config, reason):
    refusal = gguf_refusal(config)
    assert refusal is not None and re.search(reason, refusal)


def test_writing_a_refused_model_is_an_error(tmp_path):
    pytest.importorskip("gguf")
    tiny_models.save("jamba", tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="jamba is not supported"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
