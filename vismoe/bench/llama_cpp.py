"""llama.cpp's form of each architecture: its name, its metadata keys, and how tensors differ from those of transformers.

One row per family, checked against the loaders of the llama.cpp in llama-cpp-python 0.3.36; a test compares logits of both.
Conversions are pure: they run on the meta device to find shapes and on the weights to write them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

Tensors = Iterator[tuple[str, torch.Tensor]]
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's expert gating functions


Key = str | Callable[[Any, Any], Any]  # an attribute of the language model's configuration, or (config, text) -> value


def _unchanged(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name, tensor


@dataclass(frozen=True)
class Architecture:
    """One family in llama.cpp's form; `text` is the configuration of the language model."""

    name: str
    requires: dict[str, Any] = field(default_factory=dict)  # values that llama.cpp assumes
    equal: tuple[str, ...] = ()  # two values that llama.cpp assumes to be equal
    keys: dict[str, Key] = field(default_factory=dict)  # metadata beside the common keys
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
    keys = (YARN if rope["rope_type"] == "yarn" else {}) | architecture.keys
    return common | {key: getattr(text, of) if isinstance(of, str) else of(config, text) for key, of in keys.items()}


def _sections(config: Any, text: Any) -> list[int]:
    sections = list(text.rope_parameters["mrope_section"])
    return sections + [0] * (4 - len(sections))


YARN: dict[str, Key] = {
    "rope.scaling.type": lambda config, text: "yarn",
    "rope.scaling.factor": lambda config, text: float(text.rope_parameters["factor"]),
    "rope.scaling.original_context_length": lambda config, text: text.rope_parameters["original_max_position_embeddings"],
    "rope.scaling.yarn_beta_fast": lambda config, text: float(text.rope_parameters["beta_fast"]),
    "rope.scaling.yarn_beta_slow": lambda config, text: float(text.rope_parameters["beta_slow"]),
}
SECTIONS: dict[str, Key] = {"rope.dimension_sections": _sections}
DEEPSTACK: dict[str, Key] = {"n_deepstack_layers": lambda config, text: len(config.vision_config.deepstack_visual_indexes)}
SHARED_EXPERT: dict[str, Key] = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DENSE_FIRST: dict[str, Key] = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": lambda config, text: float(text.routed_scaling_factor),
}
LATENT: dict[str, Key] = {  # llama.cpp runs latent attention as one key-value head of the latent's width
    "attention.head_count_kv": lambda config, text: 1,
    "attention.q_lora_rank": lambda config, text: text.q_lora_rank or 0,
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": lambda config, text: text.kv_lora_rank + text.qk_rope_head_dim,
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": lambda config, text: text.qk_nope_head_dim + text.qk_rope_head_dim,
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": lambda config, text: 0.1 * text.rope_parameters.get("mscale_all_dim", 0.0),
}
DEEPSEEK2 = LATENT | DENSE_FIRST | {"expert_gating_func": lambda config, text: SOFTMAX}
GLM4 = DENSE_FIRST | {"expert_weights_norm": "norm_topk_prob", "expert_gating_func": lambda config, text: SIGMOID}
LINEAR_ATTENTION = SHARED_EXPERT | {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config, text: text.linear_value_head_dim * text.linear_num_value_heads,
    "full_attention_interval": lambda config, text: text.layer_types.index("full_attention") + 1,
}


def _shared_gate(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name, tensor.flatten() if name.endswith("shared_expert_gate.weight") else tensor


def _llama_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    """llama.cpp rotates neighbouring pairs of a head, transformers its halves, so rows of queries and keys are permuted."""
    for part, heads in (("q_proj.weight", text.num_attention_heads), ("k_proj.weight", text.num_key_value_heads)):
        if name.endswith(part):
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _deepseek2_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    heads = tensor.unflatten(0, (text.num_attention_heads, -1))  # [heads, nope + v, latent]
    keys, values = heads.split((text.qk_nope_head_dim, text.v_head_dim), 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _glm4_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _gpt_oss_convert(name: str, tensor: torch.Tensor, text: Any) -> Tensors:
    yield name + ".weight" if name.endswith("sinks") else name, tensor


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
    "qwen2_moe": Architecture("qwen2moe", {"norm_topk_prob": False, **EVERY_LAYER}, keys=SHARED_EXPERT, convert=_shared_gate),
    "qwen3_moe": Architecture("qwen3moe", {"norm_topk_prob": True, **EVERY_LAYER}),
    "qwen3_vl_moe": Architecture("qwen3vlmoe", EVERY_LAYER, keys=SECTIONS | DEEPSTACK),
    "qwen3_next": Architecture(
        "qwen3next",
        {"norm_topk_prob": True, **EVERY_LAYER},
        equal=LINEAR_WIDTHS,
        keys=LINEAR_ATTENTION,
        convert=_linear_attention_convert,
    ),
    "qwen3_5_moe": Architecture("qwen35moe", equal=LINEAR_WIDTHS, keys=LINEAR_ATTENTION | SECTIONS, convert=_qwen3_5_convert),
    "deepseek_v2": Architecture("deepseek2", {"topk_method": "greedy"}, keys=DEEPSEEK2, convert=_deepseek2_convert),
    "glm4_moe": Architecture("glm4moe", {"n_group": 1}, keys=GLM4, convert=_glm4_convert),
    "gpt_oss": Architecture("gpt-oss", keys={"attention.sliding_window": "sliding_window"}, convert=_gpt_oss_convert),
    "olmoe": Architecture(
        "olmoe", {"norm_topk_prob": False, "clip_qkv": None}, equal=("num_key_value_heads", "num_attention_heads")
    ),
}
