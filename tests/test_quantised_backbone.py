"""Quantised checkpoints: what they encode beside the experts stays encoded or is restored once; no code is taken for a weight."""

import os
import re
import shutil
from pathlib import Path

import pytest
import quantised_checkpoints as quantised
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from vismoe.formats import encodings
from vismoe.models.family.components import backbone_bytes
from vismoe.models.load.preview import linears_in_place, preview
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.moe.linears import EncodedLinear, EncodedModule
from vismoe.store import packed_linears, tensor_reads

QUERY = "model.layers.0.self_attn.q_proj.weight"


def logits(model, tokens: int = 24, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 500, (1, tokens), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids).logits


def load(folder, **settings):
    config = VisMoEConfig(**settings)
    cls = tiny_models.model_class(folder)
    return cls.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config, output_loading_info=True)


def rms(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=quantised.PER_EXPERT)
def made(request, tmp_path_factory):
    """(folder of a checkpoint with experts and attention in a kind, the model with restored weights)."""
    folder = tmp_path_factory.mktemp("kind")
    model = quantised.write(folder, request.param, backbone=True)
    model.set_experts_implementation("eager")
    return folder, model


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A checkpoint with experts, attention and head in FP8; never changed."""
    folder = tmp_path_factory.mktemp("fp8") / "checkpoint"
    quantised.write(folder, "fp8", backbone=True)
    quantised.encode(folder, "lm_head")
    return folder


def changed(fp8: Path, folder: Path, change) -> Path:
    """A copy of the checkpoint whose tensors `change` has changed in place."""
    shutil.copytree(fp8, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logits_with_torch_are_those_of_restored_weights(made, monkeypatch):
    folder, expected = made
    monkeypatch.setattr(tensor_reads, "PIECE_BYTES", 5000)  # as large weights are read: in several pieces
    monkeypatch.setattr(encodings, "PIECE_WEIGHTS", 2000)
    loaded, report = load(folder, kernels="torch")
    assert not any(report.values()), report
    assert not any(isinstance(module, EncodedLinear) for module in loaded.modules())
    assert torch.equal(logits(loaded), logits(expected))


@torch.inference_mode()
def test_kernels_compute_a_linear_as_near_to_float64_as_torch_with_restored_weights(made):
    folder, expected = made
    loaded, report = load(folder, kernels="auto")
    assert not any(report.values()), report
    layer, restored = loaded.model.layers[1].self_attn.q_proj, expected.model.layers[1].self_attn.q_proj.weight
    assert isinstance(layer, EncodedLinear)
    assert torch.equal(layer.weight + 0, restored)
    weight = layer.encoding.values(layer.parts, layer.in_features).double()
    for rows in (1, 7, 40):
        x = torch.randn(1, rows, layer.in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
        exact = x.double() @ weight.T
        ours = layer(x)
        assert ours.shape == exact.shape and ours.dtype == x.dtype
        assert rms(ours - exact) <= 1.05 * rms(nn.functional.linear(x, restored) - exact)


@torch.inference_mode()
def test_logits_are_as_near_to_float64_with_unrounded_weights_as_those_of_restored_ones(fp8):
    loaded, _ = load(fp8, kernels="auto")
    assert isinstance(loaded.lm_head, EncodedLinear)
    tensors = load_file(fp8 / "model.safetensors")
    scales = {name.removesuffix("_scale_inv"): tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    unrounded = {name: t.double() for name, t in tensors.items() if not name.endswith("_scale_inv")}
    unrounded |= {
        name: unrounded[name] * quantised.blocks(scale, *unrounded[name].shape).double() for name, scale in scales.items()
    }
    exact, torchs = (tiny_models.build_from(fp8, unrounded, dtype) for dtype in (torch.float64, torch.bfloat16))
    seeds = range(1, 81)  # of prompts: one alone has 0.7 to 2.8 times torch's error, by which experts its routers chose
    right = [logits(exact, 400, seed) for seed in seeds]
    ours, theirs = (
        rms(torch.stack([logits(model, 400, seed) - of for seed, of in zip(seeds, right, strict=True)]))
        for model in (loaded, torchs)
    )
    assert 0 < ours <= 1.05 * theirs


def test_the_plan_counts_what_is_loaded_and_says_what_is_encoded(fp8):
    loaded, _ = load(fp8, kernels="auto", context=64)
    plan = runtime_of(loaded).plan
    assert preview(fp8, Settings(kernels="auto", context=64), device="cpu").parts == plan.parts
    planned = sum(part.bytes for part in plan.parts if part.name in dict(backbone_bytes(loaded)))
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in (*loaded.parameters(), *loaded.buffers())}
    assert planned == sum(nbytes for _, nbytes in backbone_bytes(loaded)) == sum(held.values())
    assert re.search(r"9 linear layers in fp8 as the checkpoint has them; [\d.]+ KiB less than in 16 bits", plan.table())
    slow = preview(fp8, Settings(kernels="torch", context=64), device="cpu")
    assert "9 weights restored from fp8 to bfloat16" in slow.table()
    assert sum(part.bytes for part in slow.parts[:5]) > sum(part.bytes for part in plan.parts[:5])


def test_experts_by_single_names_and_scales_of_all_kinds_are_no_surprise_but_other_tensors_are(tmp_path):
    quantised.write(tmp_path / "checkpoint", "nvfp4", "qwen3_vl_moe", backbone=True)
    name = "model.language_model.layers.0.self_attn.q_proj"

    def change(tensors):
        tensors |= {key: torch.ones(3) for key in unexpected}

    unexpected = {f"{name.rpartition('.')[0]}.whatever", "model.language_model.layers.9.self_attn.q_proj.weight"}
    folder = changed(tmp_path / "checkpoint", tmp_path / "changed", change)
    loaded, report = load(folder)
    assert set(report.pop("unexpected_keys")) == unexpected and not any(report.values())
    assert loaded.config.quantization_config.quant_method == "vismoe"


def test_types_and_shapes_of_an_encoded_weight_cost_nothing(fp8, monkeypatch):
    loaded, _ = load(fp8, kernels="auto")
    layer, restored = loaded.lm_head, EncodedLinear.restored
    calls = []
    monkeypatch.setattr(EncodedLinear, "restored", lambda self: calls.append(1) or restored(self))
    weight = layer.weight
    assert (weight.dtype, weight.device.type, tuple(weight.shape)) == (torch.bfloat16, "cpu", (512, quantised.HIDDEN))
    assert weight.numel() == 512 * quantised.HIDDEN and not calls
    assert torch.equal(nn.functional.linear(torch.eye(quantised.HIDDEN).bfloat16(), weight).T, restored(layer)) and calls
    assert loaded.to(torch.float16).lm_head.codes.dtype == torch.uint8


def test_gradients_flow_through_encoded_layers(fp8):
    layer = load(fp8, kernels="auto")[0].lm_head
    x = torch.randn(2, quantised.HIDDEN).bfloat16().requires_grad_()
    layer(x).float().sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(nn.functional.linear(x, layer.restored()).float().sum(), x)[0])


# ------------------------------------------------------------------ what is restored
@pytest.mark.parametrize(
    ("family", "names", "linears"),
    [
        ("minimax_m3_vl", r"(shared_experts|mlp)\.(gate|up|down)_proj", {"down_proj"}),  # gate and up are one parameter
        ("qwen2_moe", r"embed_tokens|(q|o)_proj", {"embed_tokens", "lm_head", "q_proj", "o_proj"}),  # a tied head, biases
        ("qwen3_vl_moe", r"visual\.blocks.*(qkv|linear_fc)", set()),
    ],
)
def test_other_weights_are_restored_as_transformers_would_load_them(family, names, linears, tmp_path, monkeypatch):
    if family == "qwen2_moe":
        monkeypatch.setitem(tiny_models.OVERRIDES, family, {"tie_word_embeddings": True, "qkv_bias": True})
    folder = tiny_models.save(family, tmp_path / "encoded", dtype=torch.bfloat16)
    shutil.copytree(folder, tmp_path / "restored")
    save_file(quantised.encode(folder, names), next((tmp_path / "restored").glob("*.safetensors")), metadata={"format": "pt"})
    expected = tiny_models.reference(tmp_path / "restored", torch.bfloat16)
    for kernels in ("torch", "auto"):
        loaded, report = load(folder, kernels=kernels)
        assert not any(report.values()), report
        state = expected.state_dict()
        same = {name: torch.equal(value, state[name]) for name, value in loaded.state_dict().items()}
        assert all(same.values()), same
        if family == "qwen2_moe":
            head, table = loaded.lm_head, loaded.model.embed_tokens
            assert head.weight is table.weight if kernels == "torch" else head.scale is table.scale
        kept = {path.rpartition(".")[2] for path, module in loaded.named_modules() if isinstance(module, EncodedModule)}
        assert kept == (linears if kernels == "auto" else set())
        if kernels == "torch":
            inputs = tiny_models.prompt(family, dtype=torch.bfloat16)
            with torch.no_grad():
                assert torch.equal(loaded(**inputs).logits, expected(**inputs).logits)


# ------------------------------------------------------------------ linear layers that are packed in int8
@pytest.fixture(scope="module")
def sixteen_bits(tmp_path_factory):
    """A checkpoint in bfloat16 whose linear layers are packed in int8 beside its experts."""
    folder = tiny_models.save("qwen2_moe", tmp_path_factory.mktemp("int8") / "checkpoint", dtype=torch.bfloat16)
    assert main(["pack", str(folder), "--formats", "raw", "--backbone", "int8"]) == 0
    return folder


@torch.inference_mode()
def test_packed_linears_are_taken_when_asked_for_and_are_called_lossy(sixteen_bits, capsys):
    assert main(["pack", str(sixteen_bits), "--formats", "raw", "--backbone", "int8"]) == 0
    assert re.search(r"linear layers in int8: was complete, \d+ in .*lossy", capsys.readouterr().out)
    assert main(["pack", "--verify", str(sixteen_bits)]) == 0 and "10 are intact" in capsys.readouterr().out
    own, _ = load(sixteen_bits, kernels="auto")
    assert not any(isinstance(module, EncodedLinear) for module in own.modules())
    loaded, report = load(sixteen_bits, kernels="auto", backbone="int8", context=64)
    assert not any(report.values()), report
    plan = runtime_of(loaded).plan
    assert re.search(r"\d+ linear layers in int8, packed \(lossy\); [\d.]+ KiB less than in 16 bits", plan.table())
    assert preview(sixteen_bits, Settings(kernels="auto", backbone="int8", context=64), device="cpu").parts == plan.parts
    layers = {path: module for path, module in loaded.named_modules() if isinstance(module, EncodedLinear)}
    assert {path.rpartition(".")[2] for path in layers} == {"q_proj", "o_proj", "lm_head", "down_proj"}, "of 64 outputs"
    for path, layer in layers.items():
        weight = own.get_submodule(path).weight
        values = layer.encoding.values(layer.parts, weight.shape[1])
        assert 0 < rms(values - weight) <= 0.01 * rms(weight), path
        x = torch.randn(20, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        exact = nn.functional.linear(x.double(), values.double(), None if layer.bias is None else layer.bias.double())
        assert rms(layer(x) - exact) <= 1.05 * rms(nn.functional.linear(x, layer.restored(), layer.bias) - exact)


@pytest.mark.parametrize("harm", ["absent", "header", "weights", "another checkpoint", "cut"])
def test_packed_linears_that_do_not_fit_are_refused_with_the_command(harm, sixteen_bits, tmp_path, capsys):
    folder = tmp_path / "changed"
    shutil.copytree(sixteen_bits, folder, copy_function=shutil.copy2)  # with times, which are in the fingerprint
    file = folder / "vismoe-store" / "linears.int8.safetensors"
    whole = bytearray(file.read_bytes())
    if harm == "absent":
        file.unlink()
    elif harm == "another checkpoint":
        os.utime(folder / "model.safetensors", (1, 1))
        shutil.rmtree(folder / "vismoe-store")
        file.parent.mkdir()
        file.write_bytes(whole)
    else:
        whole[100 if harm == "header" else -100] ^= 1
        file.write_bytes(whole[: -64 if harm == "cut" else None])
    before = open_files()
    with pytest.raises((CheckpointError, ConfigError), match=r"Fix: .*vismoe pack MODEL --backbone int8"):
        load(folder, kernels="auto", backbone="int8")
    assert open_files() == before
    if harm != "absent":
        assert main(["pack", "--verify", str(folder)]) != 0
        assert "pack MODEL" in capsys.readouterr().err
    if harm == "another checkpoint":
        assert main(["pack", str(folder), "--formats", "raw", "--backbone", "int8"]) != 0
    with pytest.raises(ConfigError, match="--kernels auto"):
        load(sixteen_bits, kernels="torch", backbone="int8")


def test_packing_linears_that_is_interrupted_leaves_no_file(sixteen_bits, tmp_path, monkeypatch):
    source, linears = linears_in_place(sixteen_bits)
    monkeypatch.setattr(packed_linears, "PIECE_WEIGHTS", 64 * 16)
    with pytest.raises(KeyboardInterrupt):
        packed_linears.pack_linears(source, tmp_path, linears, on_bytes=lambda nbytes: _interrupt(nbytes > 30_000))
    assert {path.name for path in tmp_path.iterdir()} == {"pack.lock"}
    packed_linears.pack_linears(source, tmp_path, linears)
    assert (tmp_path / packed_linears.FILE).read_bytes() == (sixteen_bits / "vismoe-store" / packed_linears.FILE).read_bytes(), (
        "whatever the size of the pieces"
    )
    source.close()


def test_a_checkpoint_without_linears_in_16_bits_packs_none(fp8, tmp_path, capsys):
    assert main(["pack", str(fp8), "--formats", "int4", "--backbone", "int8", "--out", str(tmp_path / "store")]) != 0
    assert "leave out --backbone" in capsys.readouterr().err


def _interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


# ------------------------------------------------------------------ what is refused
def without_scale(tensors):
    del tensors[QUERY + "_scale_inv"]


def another_scale(tensors):
    tensors[QUERY + "_scale_inv"] = torch.ones(5, 2)


def another_shape(tensors):
    tensors[QUERY] = tensors[QUERY][:128]
    tensors[QUERY + "_scale_inv"] = tensors[QUERY + "_scale_inv"][:1]


def bitsandbytes(tensors):
    without_scale(tensors)
    tensors[QUERY], tensors[QUERY + ".absmax"] = torch.zeros(2**15, 1, dtype=torch.uint8), torch.ones(2**9)


def plain_int8(tensors):
    without_scale(tensors)
    tensors[QUERY], tensors[QUERY.replace("weight", "SCB")] = torch.zeros(256, 256, dtype=torch.int8), torch.ones(256)


def other_order(tensors):
    tensors[QUERY.replace("weight", "g_idx")] = tensors[QUERY.replace("weight", "g_idx")].flip(0)


def test_inputs_of_a_linear_layer_in_another_order_are_refused(tmp_path):
    quantised.write(tmp_path / "gptq", "gptq", backbone=True)
    for kernels in ("torch", "auto"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.g_idx: input 0 is in group 3, not in 0"):
            load(changed(tmp_path / "gptq", tmp_path / kernels, other_order), kernels=kernels)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (without_scale, UnsupportedModelError, r"is stored as float8_e4m3fn with nothing beside it.*Instead"),
        (another_scale, CheckpointError, r"do not fit"),
        (another_shape, CheckpointError, r"shape \(128, 256\).*wants \(256, 256\)"),
        (bitsandbytes, UnsupportedModelError, r"is stored as uint8 with nothing beside it.*Instead"),
        (plain_int8, UnsupportedModelError, r"is stored as int8 with nothing beside it.*Instead"),
    ],
)
def test_weights_that_mean_nothing_by_themselves_are_refused_by_name(change, error, says, fp8, tmp_path):
    folder = changed(fp8, tmp_path / "changed", change)
    before = open_files()
    with pytest.raises(error, match=f"{re.escape(QUERY)}.*{says}"):
        load(folder)
    with pytest.raises(error, match=re.escape(QUERY)):
        preview(folder, Settings(), device="cpu")
    assert open_files() == before


def test_a_file_that_is_cut_while_the_model_loads_is_refused(fp8, tmp_path, monkeypatch):
    folder = changed(fp8, tmp_path / "changed", lambda tensors: None)
    file, before = folder / "model.safetensors", open_files()
    from vismoe.models.load import quantizer

    own = quantizer.own_memory
    monkeypatch.setattr(quantizer, "own_memory", lambda *of: (own(*of), os.truncate(file, file.stat().st_size // 2)))
    with pytest.raises(CheckpointError, match=f"{file.name} .*(truncated|changed)"):
        load(folder)
    assert open_files() == before


def open_files() -> list[str]:
    """Those of checkpoints that this process holds open."""
    if not Path("/proc/self/fd").exists():
        return []
    import gc

    gc.collect()
    names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name) for name in names if os.path.islink(name) and "changed" in os.readlink(name))
