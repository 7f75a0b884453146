"""What config.json says about a quantised checkpoint that is not here: the fields of published ones, and what an expert takes."""

import dataclasses
import json

import pytest
import quantised_checkpoints as quantised
import torch
import transformers as T

from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import UnsupportedModelError
from vismoe.models.load import reading
from vismoe.models.load.configured import as_stated
from vismoe.models.load.preview import preview


def groups(**weights) -> dict:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "quant_method": "compressed-tensors"}


PUBLISHED = {  # repository -> (its quantization_config, without what is not read here; bits of a weight)
    "Qwen/Qwen3-VL-30B-A3B-Instruct-FP8": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        8 + 16 / 128,
    ),
    "zai-org/GLM-4.5-Air-FP8": (
        groups(num_bits=8, type="float", strategy="channel", group_size=None, symmetric=True, dynamic=False),
        8 + 16 / 2048,
    ),
    "RedHatAI/Qwen3-30B-A3B-FP8-dynamic": (groups(num_bits=8, type="float", strategy="channel", symmetric=True), 8 + 16 / 2048),
    "RedHatAI/Qwen3-30B-A3B-quantized.w4a16": (
        groups(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True),
        4 + 16 / 128,
    ),
    "cpatonn/Qwen3-VL-30B-A3B-Instruct-AWQ-4bit": (
        groups(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        4 + 24 / 32,
    ),
    "RedHatAI/Qwen3-30B-A3B-NVFP4": (
        groups(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True),
        4.5 + 32 / 2048,
    ),
    "nvidia/Qwen3-30B-A3B-FP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 4.5 + 32 / 2048),
    "openai/gpt-oss-20b": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, 4.25),
    "QuantTrio/Qwen3-VL-30B-A3B-Instruct-AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        4 + 24 / 128,
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "desc_act": False, "sym": True},
        4 + 24 / 128,
    ),
}


WRITTEN = ("fp8", "fp8 per channel", "fp8 per tensor", "w4", "w4 with zero points", "awq", "gptq", "nvfp4", "nvfp4 of modelopt",
           "mxfp4 of compressed-tensors")  # fmt: skip


def on_meta(quantization: dict, **changes):
    sizes = dict(num_hidden_layers=1, hidden_size=2048, moe_intermediate_size=2048, num_experts=2, vocab_size=64) | changes
    config = T.Qwen3MoeConfig(**sizes)
    config.quantization_config = quantization
    with torch.device("meta"):
        return T.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("repository", PUBLISHED)
def test_an_expert_takes_the_bits_of_the_published_format(repository):
    quantization, bits = PUBLISHED[repository]
    inventory = as_stated(on_meta(quantization)).inventory
    assert inventory.total_bytes * 8 / (2 * 3 * 2048 * 2048) == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize(("kind", "kernels"), [*((kind, "auto") for kind in (*WRITTEN, "mxfp4")), ("fp8", "torch")])
def test_a_plan_before_the_download_is_the_one_after_it(kind, kernels, tmp_path, monkeypatch):
    """Parts, bounce buffers among them, experts that fit, and what is said about the rest."""
    choose = reading.choose
    monkeypatch.setattr(reading, "choose", lambda *of, **how: dataclasses.replace(choose(*of, **how), cold_direct=True))
    family, names = ("gpt_oss", "stacked") if kind == "mxfp4" else ("qwen3_moe", "expert first")
    quantised.write(tmp_path, kind, family, backbone=kind != "mxfp4", names=names)
    before, after = before_and_after(tmp_path, kernels=kernels)
    assert before == after
    assert ("linear layers" in before.rest) == (kind != "mxfp4" and kernels == "auto")


@pytest.mark.parametrize("policy", [dict(policy="importance", formats="own/4"), dict(policy="hotness", formats="own/2")])
def test_so_is_that_of_a_vision_language_model_under_a_policy(policy, tmp_path):
    """But for the name of the store."""
    quantised.write(tmp_path, "fp8", "qwen3_vl_moe", backbone=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [
        "lm_head",
        "model.visual",
        "model.language_model.layers.0.mlp.gate",
    ]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["pack", str(tmp_path), "--formats", "int4,int2"]) == 0
    before, after = before_and_after(tmp_path, kernels="auto", **policy)
    assert before == dataclasses.replace(after, experts=before.experts) and "8 linear layers in fp8" in before.rest
    assert before.experts == f"fp8, in place from the checkpoint and int{policy['formats'][-1]}, not packed yet"


def before_and_after(folder, **settings):
    """The plans before and after the download, but for what is said about the disk."""
    chosen = Settings(**dict(context=64, memory="60%") | settings)
    after = preview(folder, chosen, device="cpu")
    (folder / "model.safetensors").unlink()
    before = preview(folder, chosen, device="cpu")
    return before, dataclasses.replace(after, reading=before.reading)


@pytest.mark.parametrize(
    ("quantization", "encoded"),
    [
        (dict(quant_method="fp8", weight_block_size=[128, 128]), "k_proj o_proj q_proj v_proj"),
        (dict(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["model.layers.0.self_attn.q_proj"]),
         "k_proj lm_head o_proj v_proj"),
        (dict(quant_method="awq", bits=4, group_size=64, modules_to_not_convert=["self_attn"]), ""),
        (dict(quant_method="gptq", bits=4, group_size=64, dynamic={"-:.*k_proj": {}}), "o_proj q_proj v_proj"),
        (groups(num_bits=4, type="int", group_size=128) | {"ignore": ["re:.*self_attn.*"]}, "lm_head"),
        (dict(quant_method="modelopt", quant_algo="FP8", exclude_modules=["lm_head", "*.v_proj"]),
         "k_proj o_proj q_proj"),
        (dict(quant_method="mxfp4"), ""),
    ],
)  # fmt: skip
def test_modules_that_are_left_in_16_bits_are_respected(quantization, encoded):
    model = on_meta(quantization, hidden_size=256, moe_intermediate_size=256)
    assert " ".join(sorted(name.split(".")[-2] for name in as_stated(model).others.sources)) == encoded


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    ],
    ids=lambda q: q["quant_method"],
)
def test_other_methods_are_refused_by_name(quantization):
    with pytest.raises(UnsupportedModelError, match=f"quantised with {quantization['quant_method']}.*Instead: "):
        as_stated(on_meta(quantization))
