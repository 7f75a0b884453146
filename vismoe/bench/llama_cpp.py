"""llama.cpp's form of each architecture: its name, its metadata keys, and how tensors differ from those of transformers.

One row per family, checked against the loaders of the llama.cpp in llama-cpp-python 0.3.36; a test compares logits of both.
Conversions are pure: they run on the meta device to find shapes and on the weights to write them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

__all__ = ["ARCHITECTURES", "Architecture", "Tensors", "metadata"]

Tensors = Iterator[tuple[str, torch.Tensor]]
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's expert gating functions


def _unchanged(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name, tensor


def _nothing(config: Any, text: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """One family in llama.cpp's form; `text` is the configuration of the language model."""

    name: str
    requires: dict[str, Any] = field(default_factory=dict)  # values that llama.cpp assumes
    equal: tuple[str, ...] = ()  # two values that llama.cpp assumes to be equal
    keys: Callable[[Any, Any], dict[str, Any]] = _nothing  # (config, text) -> metadata beside the common keys
    convert: Callable[[str, torch.Tensor, Any], Tensors] = _unchanged  # (name on the hub, tensor, text) -> what to write


def metadata(
    architecture: Architecture, config: PreTrainedConfig, *, experts: int, top_k: int, expert_width: int
) -> dict[str, Any]:
    """All metadata of the model, without the architecture's prefix; `expert_width` is an expert's intermediate size."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = text.rope_parameters
    common = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "vocab_size": text.vocab_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": text.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": experts,
        "expert_used_count": top_k,
        "feed_forward_length": getattr(text, "intermediate_size", expert_width),
        "expert_feed_forward_length": expert_width,
    }
    return common | _rope_scaling(rope) | architecture.keys(config, text)


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }


def _sections(text: Any) -> dict[str, Any]:
    sections = list(text.rope_parameters["mrope_section"])
    return {"rope.dimension_sections": sections + [0] * (4 - len(sections))}


def _qwen3_vl_keys(config: Any, text: Any) -> dict[str, Any]:
    return _sections(text) | {"n_deepstack_layers": len(config.vision_config.deepstack_visual_indexes)}


def _shared_keys(config: Any, text: Any) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": text.shared_expert_intermediate_size}


def _shared_gate(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name, tensor.flatten() if name.endswith("shared_expert_gate.weight") else tensor


def _llama_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    """llama.cpp rotates neighbouring pairs of a head, transformers its halves, so rows of queries and keys are permuted."""
    for part, heads in (("q_proj.weight", text.num_attention_heads), ("k_proj.weight", text.num_key_value_heads)):
        if name.endswith(part):
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _deepseek2_keys(config: Any, text: Any) -> dict[str, Any]:
    """llama.cpp runs latent attention as one key-value head of the latent's width."""
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": text.q_lora_rank or 0,
        "attention.kv_lora_rank": text.kv_lora_rank,
        "attention.key_length": text.kv_lora_rank + text.qk_rope_head_dim,
        "attention.value_length": text.kv_lora_rank,
        "attention.key_length_mla": text.qk_nope_head_dim + text.qk_rope_head_dim,
        "attention.value_length_mla": text.v_head_dim,
        "rope.dimension_count": text.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": 0.1 * text.rope_parameters.get("mscale_all_dim", 0.0),
        "leading_dense_block_count": text.first_k_dense_replace,
        "expert_shared_count": text.n_shared_experts,
        "expert_weights_scale": float(text.routed_scaling_factor),
        "expert_gating_func": SOFTMAX,
    }


def _deepseek2_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    heads = tensor.unflatten(0, (text.num_attention_heads, -1))  # [heads, nope + v, latent]
    keys, values = heads.split((text.qk_nope_head_dim, text.v_head_dim), 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _glm4_keys(config: Any, text: Any) -> dict[str, Any]:
    return {
        "leading_dense_block_count": text.first_k_dense_replace,
        "expert_shared_count": text.n_shared_experts,
        "expert_weights_scale": float(text.routed_scaling_factor),
        "expert_weights_norm": text.norm_topk_prob,
        "expert_gating_func": SIGMOID,
    }


def _glm4_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _gpt_oss_keys(config: Any, text: Any) -> dict[str, Any]:
    return {"attention.sliding_window": text.sliding_window}


def _gpt_oss_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name + ".weight" if name.endswith("sinks") else name, tensor


def _linear_attention_keys(config: Any, text: Any) -> dict[str, Any]:
    return _shared_keys(config, text) | {
        "ssm.conv_kernel": text.linear_conv_kernel_dim,
        "ssm.state_size": text.linear_key_head_dim,
        "ssm.group_count": text.linear_num_key_heads,
        "ssm.time_step_rank": text.linear_num_value_heads,
        "ssm.inner_size": text.linear_value_head_dim * text.linear_num_value_heads,
        "full_attention_interval": text.layer_types.index("full_attention") + 1,
    }


def _qwen3_5_keys(config: Any, text: Any) -> dict[str, Any]:
    return _linear_attention_keys(config, text) | _sections(text)


def _linear_attention_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    """qwen3_next: norms without their implied one, decay as a factor, and q, k, v separated from the gate z of one projection."""
    if name.endswith("A_log"):
        tensor = -tensor.float().exp()
    elif name.endswith("dt_bias"):
        name = name.removesuffix("dt_bias") + "dt_proj.bias"
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor.float() + 1
    if not name.endswith("in_proj_qkvz.weight"):
        yield from _shared_gate(name, tensor, text)
        return
    wide = text.linear_num_value_heads // text.linear_num_key_heads * text.linear_value_head_dim
    sizes = (text.linear_key_head_dim, text.linear_key_head_dim, wide, wide)
    *qkv, z = tensor.unflatten(0, (text.linear_num_key_heads, sum(sizes))).split(sizes, 1)
    yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
    yield name.replace("qkvz", "z"), z.flatten(0, 1)


def _qwen3_5_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    """qwen3_5 stores value heads next to their key head; llama.cpp alternates over the key heads instead."""
    keys, dim = 2 * text.linear_num_key_heads * text.linear_key_head_dim, text.linear_value_head_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = torch.cat((tensor[:keys], _round_robin(tensor[keys:], 0, dim, text)))
    elif name.endswith("in_proj_z.weight"):
        tensor = _round_robin(tensor, 0, dim, text)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = _round_robin(tensor, 0, 1, text)
    elif name.endswith("linear_attn.out_proj.weight"):
        tensor = _round_robin(tensor, 1, dim, text)
    yield from _linear_attention_convert(name, tensor, text)


def _round_robin(tensor: torch.Tensor, axis: int, dim: int, text: Any) -> torch.Tensor:
    """Value heads of width `dim` along `axis`, `[key heads, value heads per key head]` to its transpose."""
    heads = tensor.unflatten(axis, (text.linear_num_key_heads, -1, dim))
    return heads.transpose(axis, axis + 1).reshape(tensor.shape)


LINEAR_WIDTHS = ("linear_value_head_dim", "linear_key_head_dim")
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
ARCHITECTURES = {  # by model_type
    "mixtral": Architecture("llama", {"sliding_window": None}, convert=_llama_convert),
    "qwen2_moe": Architecture("qwen2moe", {"norm_topk_prob": False, **EVERY_LAYER}, keys=_shared_keys, convert=_shared_gate),
    "qwen3_moe": Architecture("qwen3moe", {"norm_topk_prob": True, **EVERY_LAYER}),
    "qwen3_vl_moe": Architecture("qwen3vlmoe", EVERY_LAYER, keys=_qwen3_vl_keys),
    "qwen3_next": Architecture(
        "qwen3next",
        {"norm_topk_prob": True, **EVERY_LAYER},
        equal=LINEAR_WIDTHS,
        keys=_linear_attention_keys,
        convert=_linear_attention_convert,
    ),
    "qwen3_5_moe": Architecture("qwen35moe", equal=LINEAR_WIDTHS, keys=_qwen3_5_keys, convert=_qwen3_5_convert),
    "deepseek_v2": Architecture("deepseek2", {"topk_method": "greedy"}, keys=_deepseek2_keys, convert=_deepseek2_convert),
    "glm4_moe": Architecture("glm4moe", {"n_group": 1}, keys=_glm4_keys, convert=_glm4_convert),
    "gpt_oss": Architecture("gpt-oss", keys=_gpt_oss_keys, convert=_gpt_oss_convert),
    "olmoe": Architecture(
        "olmoe", {"norm_topk_prob": False, "clip_qkv": None}, equal=("num_key_value_heads", "num_attention_heads")
    ),
}
