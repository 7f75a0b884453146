"""Models out of GGUF files compute what transformers computes with the weights that gguf-py restores of them."""

import ctypes
import json
import shutil
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import quantised_checkpoints as quantised
import test_gguf_header as header_files
import torch
import transformers as T
from PIL import Image
from safetensors.torch import save_file
from small_geometries import small_config
from test_gguf import FAMILIES, written
from test_quantised import logits

import vismoe
from vismoe.bench.gguf import write_gguf
from vismoe.bench.llama_cpp import ARCHITECTURES as written_as
from vismoe.cli.main import main as run
from vismoe.config import Settings
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from vismoe.formats.encodings import GGML
from vismoe.models.family.checkpoint_files import demo_model
from vismoe.models.family.components import backbone_bytes
from vismoe.models.family.gguf_names import ARCHITECTURES
from vismoe.models.load import gguf as loading
from vismoe.models.load.gguf import GgufWeights, load_gguf, with_gguf
from vismoe.models.load.preview import checkpoint_files, model_class, preview, read_config
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.moe.linears import EncodedEmbedding
from vismoe.store import files, tensor_reads

gguf = pytest.importorskip("gguf")
MIXED = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K", "attn_v": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}
ROUND = [name for name in FAMILIES.values() if small_config(name).model_type in ARCHITECTURES]


def opened(folder: Path, file: Path | None = None, mmproj: Path | None = None, **settings):
    """The model of a folder with the weights of a GGUF file, as `vismoe.load` makes it before it looks for a tokenizer."""
    chosen = Settings.of(**dict(kernels="torch", gguf=file or folder / "model.gguf", mmproj=mmproj) | settings)
    config = read_config(folder)
    weights = GgufWeights(str(folder), config, chosen, checkpoint_files(folder, partly=True))
    options = dict(quantization_config=VisMoEConfig(**vars(chosen)), output_loading_info=True, ignore_mismatched_sizes=True)
    model, found = load_gguf(weights, model_class(config), torch.bfloat16, None, **options)
    assert not any(found.values()), found
    return model


def mixed(name: str) -> str:
    """Types as in a file of Q4_K_M: the experts' down matrices of the first layer in Q6_K."""
    stem = next((stem for stem in MIXED if stem in name), None)
    return "Q4_K" if stem is None or (stem == "down" and "blk.0" not in name) else MIXED[stem]


@pytest.mark.parametrize("kind", GGML)
def test_restored_blocks_are_those_of_gguf_py(kind):
    raw = np.concatenate(
        [gguf_files.blocks(kind, 64, np.random.default_rng(seed), scales) for seed, scales in enumerate(((), gguf_files.EDGES))]
    )
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    found = GGML[kind].values({"codes": torch.from_numpy(raw)}, expected.shape[1])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("memory", ["100%", "40%"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_logits_with_torch_are_those_of_restored_weights(family, memory, tmp_path):
    expected = gguf_files.write(tmp_path, family, mixed)
    expected.set_experts_implementation("eager")
    paged = opened(tmp_path, memory=memory)
    assert torch.equal(logits(paged), logits(expected))
    apart = (".experts.", "embed_tokens.")
    assert set(paged.state_dict()) == {name for name in expected.state_dict() if not any(part in name for part in apart)}
    embeddings = paged.get_input_embeddings()
    assert isinstance(embeddings, EncodedEmbedding) and embeddings.codes.nbytes == 210 * 512, "Q6_K"
    assert torch.equal(embeddings.restored(), expected.get_input_embeddings().weight)
    for name, parameter in paged.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)) and parameter.dtype == torch.bfloat16, name


def test_weights_that_are_read_past_the_page_cache_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BOUNCE_BYTES", files.BLOCK_BYTES)  # tensors are large that have more
    monkeypatch.setattr(tensor_reads, "LARGE_BYTES", 1)
    expected = gguf_files.write(tmp_path, "qwen3_moe", mixed)
    expected.set_experts_implementation("eager")
    expects, taken = [], files.OpenFiles.fill_large
    monkeypatch.setattr(files.OpenFiles, "fill_large", lambda self, *what: expects.append(self) or taken(self, *what))
    if (said := runtime_of(paged := opened(tmp_path, reads="direct", io_threads=3)).plan.reading[0]) != "O_DIRECT: asked for":
        pytest.skip(said)
    assert torch.equal(logits(paged), logits(expected))
    assert all(one._cached is not None and one._threads._max_workers == 3 for one in expects) and len(expects) > 10


def test_a_model_without_a_vision_tower_opens_no_safetensors_file(tmp_path, monkeypatch):
    """Which may be large, beside a GGUF file of the same model."""
    gguf_files.write(tmp_path, "qwen3_moe", mixed)
    monkeypatch.setattr(GgufWeights, "_beside", lambda weights: pytest.fail("opened"))
    opened(tmp_path)


@pytest.mark.parametrize("kind", [*gguf_files.PLAIN, *GGML])
def test_every_type_is_read(kind, tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_moe", lambda name: kind)
    expected.set_experts_implementation("eager")
    assert torch.equal(logits(opened(tmp_path, memory="60%")), logits(expected))


@pytest.mark.parametrize("name", ROUND)
def test_what_was_written_for_llama_cpp_is_read_as_it_was(name, tmp_path):
    """Every family: names, values that llama.cpp has otherwise, gate and up that alternate, transposed experts."""
    folder = written(name, tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", progress=False)
    expected = model_class(read_config(folder)).from_pretrained(folder, dtype=torch.bfloat16)
    expected.set_experts_implementation("eager")
    paged = opened(folder, tmp_path / "model.gguf", memory="50%")
    for parameter, value in paged.named_parameters():
        assert torch.equal(value, expected.get_parameter(parameter)), parameter
    assert torch.equal(logits(paged), logits(expected))


def test_the_table_of_families_is_that_of_the_writer():
    assert all(written_as[kind].name == name for kind, name in ARCHITECTURES.items())
    assert {small_config(name).model_type for name in ROUND} == set(ARCHITECTURES)


def test_encoded_gate_and_up_of_gpt_oss_alternate_as_its_own_do(tmp_path):
    """Its file has gate and up one after the other, and [out, in]; the model alternates them, in [in, out]."""
    folder = written("gpt-oss-20b", tmp_path, intermediate_size=64)
    write_gguf(folder, tmp_path / "model.gguf", experts="q8_0", progress=False)
    expected = model_class(read_config(folder)).from_pretrained(folder, dtype=torch.bfloat16)
    expected.set_experts_implementation("eager")
    said = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(said))  # as in the repository of the model
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    with torch.no_grad():
        for number, layer in enumerate(expected.model.layers):
            gate, up, down = (
                torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16().transpose(1, 2)
                for tensor in (stored[f"blk.{number}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
            )
            layer.mlp.experts.gate_up_proj[..., ::2], layer.mlp.experts.gate_up_proj[..., 1::2] = gate, up
            layer.mlp.experts.down_proj.copy_(down)
    assert torch.equal(logits(opened(folder, tmp_path / "model.gguf", memory="50%")), logits(expected))


def test_fused_gate_and_up_are_read(tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q5_K", fused=True)
    expected.set_experts_implementation("eager")
    assert torch.equal(logits(opened(tmp_path)), logits(expected))


def test_the_kernels_compute_with_the_blocks_as_they_lie(tmp_path):
    gguf_files.write(tmp_path, "qwen3_moe", mixed)
    exact, fast = opened(tmp_path), opened(tmp_path, kernels="fast", memory="50%")
    plan = runtime_of(fast).plan
    assert plan.experts == "q4_k and q6_k, in place from the checkpoint" and plan.kernels.startswith("fast")
    assert "linear layers in q4_k as the checkpoint has them" in plan.rest
    assert torch.cosine_similarity(logits(fast).float(), logits(exact).float(), dim=-1).min() > 0.999


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_a_tied_head_has_the_bytes_of_the_embeddings(kind, tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_moe", lambda name: kind, tie_word_embeddings=True)
    expected.set_experts_implementation("eager")
    exact, fast = opened(tmp_path), opened(tmp_path, kernels="fast")
    assert exact.lm_head.weight is exact.model.embed_tokens.weight
    assert torch.equal(logits(exact), logits(expected))
    assert fast.lm_head.codes.data_ptr() == fast.model.embed_tokens.codes.data_ptr()
    in_bfloat16, in_float64 = logits(expected).float(), logits(expected.double()).float()
    tie = torch.cosine_similarity(in_bfloat16, in_float64, dim=-1) <= 0.999  # eager takes another expert for one token
    assert tie.sum() <= 1
    assert ((torch.cosine_similarity(logits(fast).float(), in_float64, dim=-1) > 0.999) | tie).all()
    plan = runtime_of(fast).plan
    assert f"token embeddings in {kind.lower()}, restored by row, the head on the same bytes" in plan.rest
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in (*fast.parameters(), *fast.buffers())}
    components = dict(backbone_bytes(fast))
    assert sum(held.values()) == sum(components.values()) == sum(part.bytes for part in plan.parts if part.name in components)
    assert plan.bytes_of("embeddings") == fast.lm_head.codes.nbytes < runtime_of(exact).plan.bytes_of("embeddings") / 1.8


# ------------------------------------------------------------------ vision towers
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_vision_tower_is_read_from_its_mmproj_file(kind, tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_vl_moe", lambda name: "Q8_0")
    (tmp_path / "model.safetensors").unlink()
    gguf_files.write_mmproj(tmp_path / "mmproj.gguf", expected, kind)
    paged = opened(tmp_path, mmproj=tmp_path / "mmproj.gguf")
    for name, value in expected.model.visual.named_parameters():
        means = value.half().bfloat16() if kind == "F16" and value.ndim > 1 and name != "pos_embed.weight" else value
        assert torch.equal(paged.model.visual.get_parameter(name), means), name


def test_shards_of_the_model_that_are_not_here_are_not_missed(tmp_path):
    """The one with the vision tower is enough."""
    expected = gguf_files.write(tmp_path, "qwen3_vl_moe", lambda name: "Q8_0")
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    index = {name: "model-00002-of-00002.safetensors" for name, _ in expected.named_parameters() if "visual." in name}
    index |= {"lm_head.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    name = "visual.pos_embed.weight"
    assert torch.equal(opened(tmp_path).model.get_parameter(name), expected.model.get_parameter(name))
    assert "q8_0" in preview(tmp_path, Settings(gguf=tmp_path / "model.gguf"), device="cpu").experts


def test_a_vision_tower_in_codes_is_refused(tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_vl_moe", lambda name: "Q8_0")
    tower = {f"model.visual.{name}": value.detach().clone() for name, value in expected.model.visual.named_parameters()}
    tower["model.visual.blocks.0.attn.qkv.weight"] = tower["model.visual.blocks.0.attn.qkv.weight"].to(torch.float8_e4m3fn)
    save_file(tower, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"qkv.weight is stored as F8_E4M3.*--mmproj"):
        opened(tmp_path)


def test_of_two_vision_towers_the_one_that_was_named_is_used(tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_vl_moe", lambda name: "Q8_0")
    with torch.no_grad():
        expected.model.visual.pos_embed.weight.zero_()
    gguf_files.write_mmproj(tmp_path / "mmproj.gguf", expected)
    assert opened(tmp_path).model.visual.pos_embed.weight.any()
    assert not opened(tmp_path, mmproj=tmp_path / "mmproj.gguf").model.visual.pos_embed.weight.any()


# ------------------------------------------------------------------ which model a file belongs to
def test_a_file_in_the_place_of_the_model_is_used_with_the_folder_around_it(tmp_path):
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q8_0")
    file = str(tmp_path / "model.gguf")
    assert with_gguf(file, Settings()) == (str(tmp_path), Settings(gguf=file))
    assert with_gguf(None, Settings(gguf=file)) == (str(tmp_path), Settings(gguf=file))
    assert with_gguf(tmp_path, Settings(gguf=file)) == (tmp_path, Settings(gguf=file))
    assert with_gguf(tmp_path, Settings()) == (tmp_path, Settings())


@pytest.mark.parametrize("key", ["general.source.huggingface.repository", "general.base_model.1.repo_url"])
def test_a_file_is_used_with_the_repository_that_it_names(key, tmp_path, monkeypatch):
    """The first base model is of another kind, as a file of a fine-tuned model may say."""
    gguf_files.write(tmp_path / "model", "qwen3_moe", lambda name: "Q8_0")
    gguf_files.write(tmp_path / "other", "qwen3_vl_moe", lambda name: "Q8_0")
    folders = {"org/the-model": tmp_path / "model", "org/other": tmp_path / "other"}
    monkeypatch.setattr(loading, "config_file", lambda name, revision: folders[name] / "config.json")
    said = {
        "general.architecture": "qwen3moe",
        "general.base_model.0.repo_url": "https://huggingface.co/org/other",
        "general.repo_url": "https://example.org/somewhere/else/entirely",
        key: "https://huggingface.co/org/the-model",
    }
    entries = [header_files.entry(name, 8, header_files.text(value)) for name, value in said.items()]
    entries.append(header_files.entry("general.base_model.count", 4, bytes([2, 0, 0, 0])))
    file = header_files.write(tmp_path / "alone.gguf", entries=entries)
    assert with_gguf(file, Settings(memory="25%")) == ("org/the-model", Settings(memory="25%", gguf=file))


def test_a_file_that_names_no_model_needs_one(tmp_path):
    entries = [header_files.entry("general.architecture", 8, header_files.text("qwen3moe"))]
    file = header_files.write(tmp_path / "alone.gguf", entries=entries)
    with pytest.raises(CheckpointError, match=r"does not name it. Fix: name the model: vismoe chat MODEL --gguf .*alone.gguf"):
        with_gguf(file, Settings())


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("a.gguf", dict(gguf="b.gguf"), "two GGUF files"),
        ("model", dict(mmproj="b.gguf"), "vision tower belongs to a language model"),
        ("model", dict(gguf="b.gguf", backbone="int8"), "in the types that they have there"),
    ],
)
def test_settings_that_contradict_a_gguf_file_are_refused(model, settings, message):
    with pytest.raises(ConfigError, match=rf"{message}.*Fix: "):
        with_gguf(model, Settings(**settings))


# ------------------------------------------------------------------ packed formats beside a file
@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(folder of a model in Q8_0 with int4 packed beside it and two that are not its file, the model with restored weights)."""
    folder = tmp_path_factory.mktemp("packed")
    model = gguf_files.write(folder, "qwen3_moe", lambda name: "Q8_0")
    model.set_experts_implementation("eager")
    for name in ("model-Q8_0.gguf", "other.gguf"):
        shutil.copy(folder / "model.gguf", folder / name)
    (folder / "model.gguf").unlink()
    assert run(["pack", str(folder), "--gguf", str(folder / "model-Q8_0.gguf"), "--formats", "int4"]) == 0
    return folder, model


def test_a_store_beside_a_gguf_file_holds_its_restored_weights(packed, tmp_path, capsys):
    """The same integers as those packed from a 16-bit checkpoint with the restored weights."""
    folder, model = packed
    model.save_pretrained(tmp_path)
    assert run(["pack", str(tmp_path), "--formats", "int4"]) == 0
    found = sorted(folder.glob("model-Q8_0.vismoe-store/experts.int4.*.bin"))
    expected = sorted(tmp_path.glob("vismoe-store/experts.int4.*.bin"))
    assert found and [path.read_bytes() for path in found] == [path.read_bytes() for path in expected]
    assert run(["pack", str(folder / "model-Q8_0.gguf"), "--formats", "int4"]) == 0
    assert "int4: was complete" in capsys.readouterr().out
    assert run(["pack", "--verify", str(folder / "model-Q8_0.gguf")]) == 0
    assert "all 12 records are intact" in capsys.readouterr().out
    plain = model_class(read_config(tmp_path)).from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=VisMoEConfig(memory="50%", format="int4", kernels="torch")
    )
    low = opened(folder, folder / "model-Q8_0.gguf", memory="50%", format="int4")
    assert torch.equal(logits(low), logits(plain)) and not torch.equal(logits(low), logits(model))
    assert runtime_of(low).format_names == ("int4",)


@pytest.mark.parametrize("policy", ["importance", "hotness"])
def test_a_policy_takes_the_types_of_the_file_for_the_better_format(policy, packed):
    folder, model = packed
    file = folder / "model-Q8_0.gguf"
    every_high = dict(retention=1.0) if policy == "importance" else {}
    paged = opened(folder, file, memory="100%", policy=policy, formats="own/4", **every_high)
    assert runtime_of(paged).format_names == ("q8_0", "int4")
    assert "q8_0, in place" in runtime_of(paged).plan.experts and "int4, packed" in runtime_of(paged).plan.experts
    assert torch.equal(logits(paged), logits(model))
    low = opened(folder, file, memory="70%", policy=policy, formats="own/4", kernels="auto")
    assert runtime_of(low).plan.total_experts == quantised.EXPERTS * quantised.LAYERS
    found = logits(low)
    assert not torch.equal(found, logits(model)) and torch.cosine_similarity(found, logits(model), dim=-1).min() > 0.9


def test_blocks_of_256_are_the_better_format_of_own_2(tmp_path):
    """Two geometries, gate and up in Q4_K, down in Q6_K and Q4_K."""
    model = gguf_files.write(tmp_path, "qwen3_moe", mixed)
    model.set_experts_implementation("eager")
    assert run(["pack", str(tmp_path / "model.gguf"), "--formats", "int2"]) == 0
    paged = opened(tmp_path, memory="100%", policy="importance", formats="own/2", retention=1.0)
    assert runtime_of(paged).format_names == ("q4_k+q6_k", "int2")
    assert torch.equal(logits(paged), logits(model))
    half = preview(tmp_path, Settings(gguf=tmp_path / "model.gguf", memory="50%", store="none"), device="cpu")
    assert half.resident_experts == half.total_experts // 2
    with pytest.raises(ConfigError, match=r"formats='raw/int8'.*own/2"):
        opened(tmp_path, policy="importance", formats="own/8")


def test_a_store_serves_only_the_file_that_it_was_made_of(packed, tmp_path):
    folder, _ = packed
    with pytest.raises(ConfigError, match=r"beside .*other.gguf.*vismoe pack MODEL --gguf .*other.gguf --formats int4"):
        opened(folder, folder / "other.gguf", format="int4")
    with pytest.raises(CheckpointError, match="was packed from another checkpoint"):
        opened(folder, folder / "other.gguf", format="int4", store=str(folder / "model-Q8_0.vismoe-store"))
    values = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="with another MODEL"):
        opened(tmp_path, folder / "model-Q8_0.gguf", format="int4")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "in q8_0 already"), (["--formats", "lossless"], "in q8_0 already"), (["--backbone", "int8"], "leave out --backbone")],
)
def test_packing_what_the_file_has_already_is_refused(arguments, says, packed, capsys):
    folder, _ = packed
    assert run(["pack", str(folder), "--gguf", str(folder / "other.gguf"), *arguments]) != 0
    assert says in capsys.readouterr().err and not (folder / "other.vismoe-store").exists()


def test_a_plan_says_what_the_file_encodes_before_it_is_loaded(tmp_path):
    gguf_files.write(tmp_path, "qwen3_moe", mixed)
    plan = preview(tmp_path, Settings(gguf=tmp_path / "model.gguf", memory="50%"), device="cpu")
    assert plan.experts == "q4_k and q6_k, in place from the checkpoint"


# ------------------------------------------------------------------ llama.cpp itself
QUANTISED = {"F16": 1, "Q8_0": 7, "Q4_K_M": 15, "IQ4_NL": 25}  # llama.cpp's numbers of kinds of files


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    write_gguf(demo_model(), path, progress=False)
    return path


@pytest.fixture
def llama_cpp(monkeypatch):
    module = pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source")
    defaults = module.llama_cpp.llama_model_default_params

    def as_mapped():
        parameters = defaults()
        parameters.use_extra_bufts = False  # or this version crashes in quantised linear layers
        return parameters

    monkeypatch.setattr(module.llama_cpp, "llama_model_default_params", as_mapped)
    return module


@pytest.mark.parametrize("kind", [None, *QUANTISED])
def test_the_demo_model_answers_as_in_llama_cpp(kind, demo_file, tmp_path, llama_cpp):
    """Files that llama.cpp quantised itself; the model's narrow rows make Q4_K_M a mixture of Q5_0 and Q8_0."""
    file = demo_file
    if kind is not None:
        file, asked = tmp_path / "small.gguf", llama_cpp.llama_model_quantize_default_params()
        asked.ftype, asked.nthread = QUANTISED[kind], 1
        assert llama_cpp.llama_model_quantize(str(demo_file).encode(), str(file).encode(), ctypes.byref(asked)) == 0
    llama = llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, n_gpu_layers=0, verbose=False)
    with vismoe.load(demo_model(), gguf=file, memory="40%", kernels="torch", device="cpu") as engine:
        for question in ("Which animals do you know?", "Count to ten."):
            ids = prompt_of(engine, [{"type": "text", "text": question}])
            with torch.no_grad():
                ours = engine.model.generate(input_ids=torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()
            llama.reset()
            steps = llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
            assert [int(token) for token, _ in zip(steps, ours[len(ids) :])] == ours[len(ids) :]
    llama.close()


def test_the_demo_model_sees_a_picture_as_llama_cpp_does(demo_file, tmp_path, llama_cpp):
    """Through the same mmproj file. The picture's sides are whole blocks of 32, so that neither of the two resizes it."""
    picture, mmproj = demo_model().parent / "images" / "demo.png", tmp_path / "mmproj.gguf"
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": "What is in the picture?"}]
    with vismoe.load(demo_model(), memory="40%", device="cpu") as engine:
        gguf_files.write_mmproj(mmproj, engine.model, "F16")
    with vismoe.load(demo_model(), gguf=demo_file, mmproj=mmproj, memory="40%", kernels="torch", device="cpu") as engine:
        ours = "".join(engine.chat([{"role": "user", "content": content}], max_tokens=48))
        ids, place = prompt_of(engine, content), engine.model.config.image_token_id
        tokenizer, end = engine.prompts.tokenizer, engine.model.generation_config.eos_token_id
    llama = llama_cpp.Llama(str(demo_file), n_ctx=256, n_threads=1, n_gpu_layers=0, verbose=False)
    before, after = ids[: ids.index(place)], ids[ids.index(place) + 1 :]
    at = tokens_evaluated(llama_cpp, llama, before, 0)
    at = picture_evaluated(llama, Image.open(picture).convert("RGB"), mmproj, at)
    at, answer = tokens_evaluated(llama_cpp, llama, after, at), []
    while len(answer) < 48 and end not in answer:
        logits = llama_cpp.llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        answer.append(int(np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).argmax()))
        at = tokens_evaluated(llama_cpp, llama, answer[-1:], at)
    llama.close()
    assert tokenizer.decode(answer, skip_special_tokens=True) == ours


def prompt_of(engine, content: list[dict[str, str]]) -> list[int]:
    """Token ids, one for a picture."""
    return engine.prompts.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )


def tokens_evaluated(llama_cpp, llama, ids: list[int], at: int) -> int:
    """Put tokens into llama.cpp's context from position `at` on; returns the next position."""
    batch = llama_cpp.llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for index, token in enumerate(ids):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, at + index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, index == len(ids) - 1
    assert llama_cpp.llama_cpp.llama_decode(llama.ctx, batch) == 0
    llama_cpp.llama_cpp.llama_batch_free(batch)
    return at + len(ids)


def picture_evaluated(llama, image: Image.Image, mmproj: Path, at: int) -> int:
    """The same for a picture, with llama.cpp's own preprocessing."""
    from llama_cpp import mtmd_cpp as mtmd

    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.print_timings, options.warmup = False, 1, False, False
    context = mtmd.mtmd_init_from_file(str(mmproj).encode(), llama._model.model, options)
    pixels = (ctypes.c_uint8 * (image.width * image.height * 3)).from_buffer_copy(image.tobytes())
    bitmap, chunks = mtmd.mtmd_bitmap_init(image.width, image.height, pixels), mtmd.mtmd_input_chunks_init()
    marker = mtmd.mtmd_get_marker(context)
    text = mtmd.mtmd_input_text(marker, len(marker), False, True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1) == 0
    found = [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
    (chunk,) = (chunk for chunk in found if mtmd.mtmd_input_chunk_get_type(chunk) == 1)
    after = ctypes.c_int32(0)
    assert mtmd.mtmd_helper_eval_chunk_single(context, llama.ctx, chunk, at, 0, 256, False, ctypes.byref(after)) == 0
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(context)
    return after.value


# ------------------------------------------------------------------ refusals
def test_files_that_do_not_fit_are_refused_with_the_fix(tmp_path):
    types = {"a": "Q4_K", "up": "Q5_K"}
    gguf_files.write(tmp_path / "mixed", "qwen3_moe", lambda name: types["up" if "ffn_up" in name else "a"])
    with pytest.raises(
        UnsupportedModelError, match=r"0\.ffn_gate_exps.weight is in Q4_K and blk\.0\.ffn_up_exps\.weight in Q5_K"
    ):
        opened(tmp_path / "mixed")
    gguf_files.write(tmp_path / "wide", "qwen3_moe", lambda name: "Q4_K", moe_intermediate_size=512)
    gguf_files.write(tmp_path / "vision", "qwen3_vl_moe", lambda name: "Q4_K")
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps.weight has shape \(6, 512, 256\), the model wants \(6, 256, 256\)"):
        opened(tmp_path / "mixed", tmp_path / "wide" / "model.gguf")
    with pytest.raises(CheckpointError, match=r"holds a 'qwen3vlmoe', but the model's config.json describes a qwen3_moe"):
        opened(tmp_path / "mixed", tmp_path / "vision" / "model.gguf")
    (tmp_path / "vision" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"vision tower .*--mmproj FILE"):
        opened(tmp_path / "vision")
    with pytest.raises(CheckpointError, match="is not the vision tower of a qwen3_vl_moe"):
        opened(tmp_path / "vision", mmproj=tmp_path / "vision" / "model.gguf")
    with pytest.raises(ConfigError, match=r"vismoe.load"):
        T.Qwen3MoeForCausalLM.from_pretrained(
            None,
            config=read_config(tmp_path / "mixed"),
            state_dict={},
            dtype=torch.bfloat16,
            quantization_config=VisMoEConfig(gguf=tmp_path / "mixed" / "model.gguf"),
        )


@pytest.mark.parametrize("name", ["blk.1.ffn_down_exps.weight", "blk.1.attn_v.weight"])
def test_a_type_that_is_not_read_is_refused_by_tensor_and_type(name, tmp_path):
    gguf_files.write(tmp_path, "qwen3_moe", lambda tensor: "IQ3_S" if tensor == name else "Q8_0")
    with pytest.raises(UnsupportedModelError, match=rf"{name} is in IQ3_S, which VisMoE does not read.*Q4_K_M"):
        opened(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q8_0", left_out="blk.1.attn_k.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor blk.1.attn_k.weight"):
        opened(tmp_path)


def test_a_file_that_changed_while_it_was_loaded_is_refused(tmp_path, monkeypatch):
    gguf_files.write(tmp_path, "qwen3_moe", lambda name: "Q8_0")
    fill = GgufWeights.fill

    def filled(self, *how):
        fill(self, *how)
        with open(tmp_path / "model.gguf", "ab") as file:
            file.write(b"more")

    monkeypatch.setattr(GgufWeights, "fill", filled)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        opened(tmp_path)
