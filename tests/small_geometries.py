"""Every published geometry made small: the same family and positions, a few layers of a few hundred columns and few experts."""

import copy
from typing import Any

import transformers as T

from vismoe.bench.geometry import GEOMETRIES, text_of
from vismoe.models.family import class_named
from vismoe.models.family.families import EXPERT_COUNTS

VOCABULARY, EXPERTS = 2048, 32
ALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=192,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
OTHERS: dict[str, Any] = dict(head_dim=32, moe_intermediate_size=48, shared_expert_intermediate_size=96)
LATENT = dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
LINEAR = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32)
SECTIONS = {"qwen3_vl_moe": [8, 4, 4], "qwen3_5_moe": [2, 1, 1]}
VISION = dict(depth=2, hidden_size=64, intermediate_size=64, num_heads=4, out_hidden_size=256)
TOKENS = dict(image_token_id=2000, video_token_id=2001, vision_start_token_id=2002, vision_end_token_id=2003)


def small_config(name: str) -> T.PreTrainedConfig:
    """The geometry `name` with three layers, or four where a kind of layer comes every fourth."""
    geometry = GEOMETRIES[name]
    values = copy.deepcopy(dict(geometry.values))
    text = text_of(values)
    small = ALL | LINEAR | LATENT | OTHERS
    if text["num_key_value_heads"] == text["num_attention_heads"]:
        small |= dict(num_key_value_heads=ALL["num_attention_heads"])
    text.update({key: value for key, value in small.items() if key in text or key in ALL})
    text |= {name: min(EXPERTS, text[name]) for name in EXPERT_COUNTS if name in text}
    text["num_hidden_layers"] = max(3, geometry.least_layers)
    config_class = class_named(geometry.config_class)
    if config_class.model_type in SECTIONS:
        text["rope_parameters"] |= dict(mrope_section=SECTIONS[config_class.model_type])
    if "projector_config" in values:  # DeepSeek-VL2, with other names
        values["vision_config"] |= dict(width=64, layers=2, heads=4)
        values["projector_config"] |= dict(input_dim=64, n_embed=ALL["hidden_size"])
        values["image_token_id"] = TOKENS["image_token_id"]
    elif "vision_config" in values:
        values["vision_config"] |= VISION
        values |= TOKENS
        if "deepstack_visual_indexes" in values["vision_config"]:
            values["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    return config_class(**values)
