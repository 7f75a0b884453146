"""What config.json says about a quantised checkpoint that is not here: the fields of published ones, and what an expert takes."""

import json

import pytest
import quantised_checkpoints as quantised
import torch
import transformers as T

from vismoe.errors import UnsupportedModelError
from vismoe.models.load.configured import as_configured
from vismoe.models.load.locate import inventory_of, locate_experts
from vismoe.models.load.preview import describe


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


def on_meta():
    config = T.Qwen3MoeConfig(num_hidden_layers=1, hidden_size=2048, moe_intermediate_size=2048, num_experts=2, vocab_size=64)
    with torch.device("meta"):
        return T.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("repository", PUBLISHED)
def test_an_expert_takes_the_bits_of_the_published_format(repository):
    quantization, bits = PUBLISHED[repository]
    inventory = as_configured(inventory_of(on_meta(), torch.bfloat16), [frozenset()], quantization)
    assert inventory.total_bytes * 8 / (2 * 3 * 2048 * 2048) == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "awq", "gptq"])
def test_the_files_agree_with_what_config_json_says(kind, tmp_path):
    quantised.write(tmp_path, kind)
    model, files = describe(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    there = locate_experts(model, files, torch.bfloat16)
    there.close()
    assert as_configured(inventory_of(model, torch.bfloat16), [frozenset()], stated) == there.inventory


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
        as_configured(inventory_of(on_meta(), torch.bfloat16), [frozenset()], quantization)
