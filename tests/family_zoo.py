"""Which mixture-of-experts families the installed transformers has, and a tiny configuration for any of them. Nothing is listed.

A family is a folder of transformers whose modeling file puts experts on the experts interface, or whose configuration names a
number of experts. Its key is the model type of its most capable class: with images before text before neither.

A composite is a class that reads images, holds no experts itself, and takes its text model from its configuration, together with
a text model that has experts. Its key names both types. Which pairs publishers make cannot be inspected: `COMBINED` says it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

from vismoe.models.family import class_named
from vismoe.models.family.deepseek_vl2 import configuration as deepseek_vl2
from vismoe.models.family.families import EXPERT_COUNTS

MODELS = Path(transformers.__file__).parent / "models"
LAYERS = 3
WIDTH, TOWER_WIDTH = 64, 32
IMAGE_TOKEN, FIRST_SPECIAL_TOKEN = 500, 501
SPECIAL_TOKEN = re.compile(r"(?!(pad|bos|eos)_)\w+_token_(id|index)$")
USUAL_TEXT = re.compile(r'(?:"text_config": SubConfigSpec\([^)]*model_type=|self\.text_config = CONFIG_MAPPING\[)"(\w+)"')
FROM_CONFIG = re.compile(r"AutoModel(ForCausalLM)?\.from_config\((config=)?config\.text_config\b")
COMBINED = {  # text models with experts that are checked like families, by class, beside those that a class has by default
    "cohere2_vision": ("cohere2_moe",),  # Command A+
    "internvl": ("qwen3_moe", "gpt_oss"),  # InternVL3.5
    "lfm2_vl": ("lfm2_moe",),  # no published model is known
    "llava_onevision": ("qwen3_moe",),  # nor here
    "mistral3": ("mistral4",),  # Mistral Small 4
}
ANY_TEXT = "qwen3_moe"  # for a class whose usual text model has no relative with experts

# Values by field name, for whichever configuration declares the field. 2I != H and I != H for every width of experts.
TEXT: dict[str, Any] = dict(
    vocab_size=512, unpadded_vocab_size=500, hidden_size=WIDTH, num_hidden_layers=LAYERS, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, sep_token_id=3, initializer_range=0.1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=32, sliding_window_size=32,
    swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, swa_v_head_dim=16,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, o_lora_rank=16, o_groups=2,
    intermediate_size=96, moe_intermediate_size=24, shared_expert_intermediate_size=48, shared_experts_intermediate_size=48,
    shared_intermediate_size=48, moe_shared_expert_intermediate_size=24, dense_intermediate_size=80,
    prefix_dense_intermediate_size=80, moe_hidden_size=40, hc_lowrank=8, router_hidden_size=16,
    **dict.fromkeys(EXPERT_COUNTS, 6), **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), 2),
    n_group=1, topk_group=1, num_expert_group=1, first_k_dense_replace=1, num_dense_layers=1, moe_layer_start_index=1,
    num_nextn_predict_layers=0, index_head_dim=16, index_n_heads=2, index_topk=16, index_kpool=4,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_heads=2,
    linear_head_dim=16, use_mamba_kernels=False, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1,
)  # fmt: skip
TOWER: dict[str, Any] = dict(
    depth=2, num_hidden_layers=2, n_layers=2, hidden_size=TOWER_WIDTH, intermediate_size=80, num_heads=4, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, out_hidden_size=WIDTH, text_hidden_size=WIDTH, num_position_embeddings=64,
    deepstack_visual_indexes=[0, 1], initializer_range=0.1, projection_hidden_dim=48,
    projection_intermediate_size=48, n_mel_bins=8,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A mixture-of-experts family of the installed transformers."""

    name: str  # its model type; of a composite both types
    class_name: str
    with_images: bool
    text: str | None = None  # of a composite: the type of its text model

    @property
    def model_class(self) -> type[transformers.PreTrainedModel]:
        return class_named(self.class_name)


@cache
def families() -> dict[str, Family]:
    """Every family by name, found by reading the sources: nothing is imported."""
    found = (_most_capable(source) for source in _sparse_sources().values())
    return {family.name: family for family in found if family}


@cache
def composites() -> dict[str, Family]:
    """Every composite whose text model has experts by default or in a published checkpoint, found in the same way."""
    pairs = [(name, text) for name, texts in COMBINED.items() for text in texts if name in _takers()]
    pairs += [(name, text) for name, text in _takers().items() if _has_experts(text)]
    return {family.name: family for family in map(_composite, pairs)}


@cache
def possible_composites() -> dict[str, Family]:
    """One composite of every other class that takes any text model: with the relative of its usual one that has experts."""
    known = {name for name in _takers() if any(key.startswith(f"{name} + ") for key in composites())}
    pairs = [(name, _relative(text)) for name, text in _takers().items() if name not in known]
    return {family.name: family for family in map(_composite, pairs)}


@cache
def zoo() -> dict[str, Family]:
    """The families and the composites that are checked like them, those of vismoe/models/family included."""
    return families() | composites() | own()


def own() -> dict[str, Family]:
    """DeepSeek-VL2, with each of its language models."""
    pairs = [(deepseek_vl2.MODEL_TYPE, kind.model_type) for kind in deepseek_vl2.TEXT_CLASSES]
    return {" + ".join(pair): Family(" + ".join(pair), "DeepseekVLV2ForConditionalGeneration", True, pair[1]) for pair in pairs}


def _composite(pair: tuple[str, str]) -> Family:
    name, text = pair
    return Family(" + ".join(pair), modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name], True, text)


@cache
def _sparse_sources() -> dict[Path, str]:
    """The modeling files with experts."""
    counts = re.compile(rf"^    ({'|'.join(EXPERT_COUNTS)}):", re.MULTILINE)
    found = {}
    for source in sorted(MODELS.glob("*/modeling_*.py")):
        configuration = source.with_name(source.name.replace("modeling", "configuration", 1))
        text = source.read_text()
        if "use_experts_implementation" in text or (configuration.is_file() and counts.search(configuration.read_text())):
            found[source] = text
    return found


@cache
def _takers() -> dict[str, str]:
    """Classes that read images, hold no experts and take any text model: (their model type, that of their usual text model)."""
    found = {}
    for name, class_name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        folder = name.replace("-", "_")
        modeling, configuration = (MODELS / folder / f"{kind}_{folder}.py" for kind in ("modeling", "configuration"))
        if modeling.is_file() and modeling not in _sparse_sources():
            source, usual = modeling.read_text(), USUAL_TEXT.search(configuration.read_text())
            if usual and FROM_CONFIG.search(source) and f"class {class_name}(" in source:
                found[name] = usual[1]
    return found


@cache
def _has_experts(text: str) -> bool:
    """Whether text models of this type have experts."""
    class_name = modeling_auto.MODEL_MAPPING_NAMES.get(text)
    return any(f"class {class_name}(" in source for source in _sparse_sources().values())


def _relative(text: str) -> str:
    """lfm2_moe for lfm2, qwen3_5_moe_text for qwen3_5_text."""
    named = f"{text.removesuffix('_text')}_moe{'_text' * text.endswith('_text')}"
    return named if _has_experts(named) else ANY_TEXT


def _most_capable(source: str) -> Family | None:
    """None for a backbone, which is a part of other models."""
    classes = set(re.findall(r"^class (\w+)\(", source, re.MULTILINE))
    for task in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        for name, class_name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if class_name in classes:
                return Family(name, class_name, "get_image_features" in source)
    for name, class_name in modeling_auto.MODEL_MAPPING_NAMES.items():
        if class_name in classes:
            return Family(name, class_name, False)
    return None


def tiny_config(family: str, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """A small configuration with at least two MoE layers; `overrides` of sub-configurations are dicts under their names."""
    found = (zoo() | possible_composites())[family]
    if found.text:
        overrides = {**overrides, "text_config": {"model_type": found.text} | overrides.get("text_config", {})}
    config_class = found.model_class.config_class
    return config_class(**_shrunk(config_class, TEXT, overrides))


def _shrunk(config_class: type[PreTrainedConfig], sizes: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    default = config_class()
    declared = vars(default)
    other = set(EXPERT_COUNTS) if set(EXPERT_COUNTS) & overrides.keys() else set()  # names of the same number
    values: dict[str, Any] = {name: value for name, value in sizes.items() if name in declared and name not in other}
    if "kv_lora_rank" in declared:  # latent attention has as many key heads as heads
        values["num_key_value_heads"] = sizes["num_attention_heads"]
        if declared.get("head_dim") == declared["qk_rope_head_dim"]:
            values["head_dim"] = sizes["qk_rope_head_dim"]
    depth = getattr(default, "num_hidden_layers", None)
    for name, value in declared.items():
        if isinstance(value, list) and len(value) == depth and "num_hidden_layers" not in overrides:
            values[name] = _few(value, sizes["num_hidden_layers"])
    specials = [name for name in declared if SPECIAL_TOKEN.match(name) and "image_token" not in name]
    values |= {name: FIRST_SPECIAL_TOKEN + i for i, name in enumerate(specials)}
    values |= {name: IMAGE_TOKEN for name in ("image_token_id", "image_token_index") if name in declared}
    for name, part in default.sub_configs.items():
        own = dict(overrides.get(name, {}))
        present, model_type = getattr(default, name), own.pop("model_type", None)
        if present is None and "audio" in name:
            continue
        if part is AutoConfig:
            part = CONFIG_MAPPING[model_type] if model_type else type(present)
        values[name] = part(**_shrunk(part, sizes if "text" in name else TOWER, own))
    return values | {name: value for name, value in overrides.items() if name not in default.sub_configs}


def _few(values: list[Any], layers: int) -> list[Any]:
    """`layers` values of a list with one per layer: each distinct one in order of appearance, then the last one again."""
    distinct = list({repr(value): value for value in values}.values())[:layers]
    return distinct + [distinct[-1]] * (layers - len(distinct))
