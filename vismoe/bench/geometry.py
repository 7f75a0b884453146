"""The table of published geometries: the configuration that a benchmark needs when the values of weights do not matter.

Each row holds the values of the model's config.json that shape the computation, under the names of transformers' configuration
class. `geometry_config` makes a configuration from them, optionally with fewer layers; everything else stays as published. The
table itself does not need transformers: `vismoe bench --help` prints its names.
"""

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vismoe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelGeometry:
    """One published model: its family and the values of its config.json."""

    family: str  # the name of its transformers classes, without their endings
    values: Mapping[str, Any]  # arguments of config_class; the number of decoder layers is in the part for text if there is one
    least_layers: int = 1  # the fewest decoder layers with one layer of every kind

    @property
    def config_class(self) -> str:
        return f"{self.family}Config"

    @property
    def model_class(self) -> str:
        return self.family + ("ForConditionalGeneration" if "vision_config" in self.values else "ForCausalLM")

    @property
    def layers(self) -> int:
        """Decoder layers as published."""
        return text_of(self.values)["num_hidden_layers"]


def geometry_config(name: str, layers: int | None = None) -> "PreTrainedConfig":
    """The configuration of a published geometry with `layers` decoder layers (None: all).

    Dense layers at the beginning (deepseek, glm-4.5) count and remain: deepseek-v2-lite with 4 layers has one dense and three MoE
    layers. Raises ConfigError for an unknown name or an impossible number of layers.
    """
    geometry = _geometry(name)
    layers = geometry.layers if layers is None else layers
    if not geometry.least_layers <= layers <= geometry.layers:
        raise ConfigError(
            f"layers={layers}: {name} has {geometry.layers} decoder layers as published; with fewer than {geometry.least_layers} "
            f"a kind of layer would be missing. Fix: a number from {geometry.least_layers} to {geometry.layers}"
        )
    from vismoe.models.family import class_named

    values = copy.deepcopy(dict(geometry.values))
    text_of(values)["num_hidden_layers"] = layers
    config = class_named(geometry.config_class)(**values, dtype="bfloat16")
    config.architectures = [geometry.model_class]
    return config


def model_class_of(name: str) -> "type[PreTrainedModel]":
    """The model class of a published geometry; raises ConfigError for an unknown name."""
    from vismoe.models.family import class_named

    return class_named(_geometry(name).model_class)


def text_of(values: Mapping[str, Any]) -> Any:
    """The values of the language model among those of a config.json."""
    return values.get("text_config") or values.get("language_config") or values


def _geometry(name: str) -> ModelGeometry:
    if name not in GEOMETRIES:
        near = difflib.get_close_matches(name, GEOMETRIES, n=3, cutoff=0.4)
        raise ConfigError(f"no such geometry: {name!r}. Fix: {', '.join(near) or 'one of ' + ', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=theta, **more)


def _yarn(theta: float, factor: float, **more: Any) -> dict[str, Any]:
    fixed = dict(rope_type="yarn", beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096)
    return dict(rope_theta=theta, factor=factor, **fixed, **more)


def _text(**values: Any) -> dict[str, Any]:
    """The language part: the values that most models share, replaced and completed by `values`."""
    return dict(rms_norm_eps=1e-6, tie_word_embeddings=False) | values


def _with_vision(text: dict[str, Any], image_token: int, start_token: int, **vision: Any) -> dict[str, Any]:
    """A Qwen3-VL model: the token of a video follows that of an image, the token of an end that of a start."""
    tokens = dict(image_token_id=image_token, video_token_id=image_token + 1)
    marks = dict(vision_start_token_id=start_token, vision_end_token_id=start_token + 1)
    fixed = dict(patch_size=16, temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=text["hidden_size"])
    return dict(text_config=text, vision_config=fixed | vision, tie_word_embeddings=False) | tokens | marks


def _deepseek_vl2(language: dict[str, Any]) -> dict[str, Any]:
    """A DeepSeek-VL2 model, with the names of its published config.json."""
    fixed = dict(num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=None)
    vision = dict(layers=27, mlp_ratio=3.7362, patch_size=14, width=1152)
    projector = dict(n_embed=language["hidden_size"])
    return dict(
        language_config=fixed | dict(max_position_embeddings=4096) | language, vision_config=vision, projector_config=projector
    )


QWEN_TOKENS = dict(bos_token_id=151643, eos_token_id=151645)
QWEN3_MOE = (
    _text(vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48)
    | dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, rope_parameters=_rope(1e6))
    | dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, **QWEN_TOKENS)
)
QWEN3_MOE_LARGE = QWEN3_MOE | dict(
    hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64
)
QWEN3_VL_ROPE = dict(
    rope_parameters=_rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True), max_position_embeddings=262144
)
QWEN3_VL_VISION = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, num_position_embeddings=2304)
QWEN3_VL_DEEPSTACK = QWEN3_VL_VISION | dict(deepstack_visual_indexes=[8, 16, 24])
TINY_VISION = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, num_position_embeddings=64) | dict(
    deepstack_visual_indexes=[0, 1]
)
LINEAR_ATTENTION = dict(num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_conv_kernel_dim=4) | dict(
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32
)
GPT_OSS = (  # published in MXFP4; written here in bf16 like all others
    _text(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, max_position_embeddings=131072)
    | dict(num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128, rms_norm_eps=1e-5)
    | dict(num_local_experts=32, num_experts_per_tok=4, rope_parameters=_yarn(150000.0, 32.0, truncate=False))
    | dict(eos_token_id=200002, pad_token_id=199999)
)

GEOMETRIES = {  # by name; behind it the repository on the hub whose config.json the values are from
    "qwen3-vl-30b-a3b": ModelGeometry(  # Qwen/Qwen3-VL-30B-A3B-Instruct
        "Qwen3VLMoe", _with_vision(QWEN3_MOE | QWEN3_VL_ROPE, 151655, 151652, **QWEN3_VL_DEEPSTACK)
    ),
    "qwen3-vl-235b-a22b": ModelGeometry(  # Qwen/Qwen3-VL-235B-A22B-Instruct
        "Qwen3VLMoe", _with_vision(QWEN3_MOE_LARGE | QWEN3_VL_ROPE, 151655, 151652, **QWEN3_VL_DEEPSTACK)
    ),
    "qwen3-30b-a3b": ModelGeometry("Qwen3Moe", QWEN3_MOE),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": ModelGeometry("Qwen3Moe", QWEN3_MOE_LARGE),  # Qwen/Qwen3-235B-A22B
    "qwen3.5-35b-a3b": ModelGeometry(  # Qwen/Qwen3.5-35B-A3B
        "Qwen3_5Moe",
        _with_vision(
            _text(vocab_size=248320, hidden_size=2048, num_hidden_layers=40, max_position_embeddings=262144, eos_token_id=248044)
            | dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512)
            | dict(rope_parameters=_rope(1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True))
            | LINEAR_ATTENTION,
            248056,
            248053,
            **QWEN3_VL_VISION,
        ),
        least_layers=4,
    ),
    "qwen3-next-80b-a3b": ModelGeometry(  # Qwen/Qwen3-Next-80B-A3B-Instruct
        "Qwen3Next",
        _text(vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48, max_position_embeddings=262144)
        | dict(num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, moe_intermediate_size=512)
        | dict(shared_expert_intermediate_size=512, rope_parameters=_rope(1e7, partial_rotary_factor=0.25))
        | dict(**LINEAR_ATTENTION, **QWEN_TOKENS),
        least_layers=4,
    ),
    "qwen1.5-moe-a2.7b": ModelGeometry(  # Qwen/Qwen1.5-MoE-A2.7B
        "Qwen2Moe",
        _text(vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, max_position_embeddings=8192)
        | dict(num_experts=60, num_experts_per_tok=4, norm_topk_prob=False, moe_intermediate_size=1408)
        | dict(shared_expert_intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16, rope_parameters=_rope(1e6))
        | dict(bos_token_id=151643, eos_token_id=151643),
    ),
    "mixtral-8x7b": ModelGeometry(  # mistralai/Mixtral-8x7B-Instruct-v0.1
        "Mixtral",
        _text(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, max_position_embeddings=32768)
        | dict(num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
        | dict(rms_norm_eps=1e-5, rope_parameters=_rope(1e6)),
    ),
    "deepseek-v2-lite": ModelGeometry(  # deepseek-ai/DeepSeek-V2-Lite-Chat
        "DeepseekV2",
        _text(vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, max_position_embeddings=163840)
        | dict(num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, v_head_dim=128)
        | dict(
            qk_nope_head_dim=128, qk_rope_head_dim=64, rope_parameters=_yarn(10000.0, 40.0, mscale=0.707, mscale_all_dim=0.707)
        )
        | dict(
            n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1
        )
        | dict(n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0)
        | dict(bos_token_id=100000, eos_token_id=100001),
        least_layers=2,
    ),
    "deepseek-vl2-tiny": ModelGeometry(  # deepseek-ai/deepseek-vl2-tiny
        "DeepseekVLV2",
        _deepseek_vl2(
            dict(vocab_size=129280, hidden_size=1280, intermediate_size=6848, moe_intermediate_size=896, num_hidden_layers=12)
            | dict(num_attention_heads=10, num_key_value_heads=10, n_routed_experts=64, use_mla=False, kv_lora_rank=None)
            | dict(qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, topk_method="greedy", bos_token_id=0, eos_token_id=1)
        ),
        least_layers=2,
    ),
    "deepseek-vl2-small": ModelGeometry(  # deepseek-ai/deepseek-vl2-small
        "DeepseekVLV2",
        _deepseek_vl2(
            dict(vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27)
            | dict(num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, kv_lora_rank=512, topk_method="greedy")
            | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        ),
        least_layers=2,
    ),
    "deepseek-vl2": ModelGeometry(  # deepseek-ai/deepseek-vl2, with the layers and heads that its file leaves to the defaults
        "DeepseekVLV2",
        _deepseek_vl2(
            dict(vocab_size=129280, hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=30)
            | dict(num_attention_heads=32, num_key_value_heads=32, n_routed_experts=72, kv_lora_rank=512, topk_method="noaux_tc")
            | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, scoring_func="sigmoid", norm_topk_prob=True)
            | dict(routed_scaling_factor=2.0, bos_token_id=0, eos_token_id=1)
        ),
        least_layers=2,
    ),
    "gpt-oss-20b": ModelGeometry("GptOss", GPT_OSS, least_layers=2),  # openai/gpt-oss-20b
    "gpt-oss-120b": ModelGeometry(  # openai/gpt-oss-120b
        "GptOss", GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128), least_layers=2
    ),
    "glm-4.5-air": ModelGeometry(  # zai-org/GLM-4.5-Air
        "Glm4Moe",
        _text(vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, max_position_embeddings=131072)
        | dict(num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True, use_qk_norm=False)
        | dict(n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408)
        | dict(first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0)
        | dict(num_mtp_layers=0)  # published with one; transformers omits its weights
        | dict(rms_norm_eps=1e-5, rope_parameters=_rope(1e6, partial_rotary_factor=0.5))
        | dict(eos_token_id=[151329, 151336, 151338], pad_token_id=151329),
        least_layers=2,
    ),
    "olmoe-1b-7b": ModelGeometry(  # allenai/OLMoE-1B-7B-0924
        "Olmoe",
        _text(vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, max_position_embeddings=4096)
        | dict(num_attention_heads=16, num_key_value_heads=16, rms_norm_eps=1e-5, rope_parameters=_rope(1e4))
        | dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, eos_token_id=50279, pad_token_id=1),
    ),
    "tiny": ModelGeometry(  # not a published model: for tests and quick tries, about 26 MB
        "Qwen3VLMoe",
        _with_vision(
            _text(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, max_position_embeddings=4096)
            | dict(num_attention_heads=8, num_key_value_heads=2, head_dim=32)
            | dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=96)
            | dict(rope_parameters=_rope(1e4, mrope_section=[8, 4, 4], mrope_interleaved=True)),
            4000,
            4002,
            **TINY_VISION,
        ),
    ),
}
