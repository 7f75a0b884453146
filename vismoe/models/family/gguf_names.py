"""What GGUF files call the parameters of a model, and how some of their values differ from transformers'.

`vismoe/bench/llama_cpp.py` writes what is read here. Files of vision towers (mmproj) have tables of their own.
"""

import re
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARCHITECTURES = {  # model_type -> general.architecture
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3_5_moe": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "olmoe": "olmoe",
}
TOWERS = {"qwen3_vl_moe": "qwen3vl_merger"}  # model_type -> clip.projector_type of its mmproj file
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.out_proj": "ssm_out", "linear_attn.norm": "ssm_norm",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
SAME_PLACE = {"ffn_norm": "post_attention_norm"}  # what some architectures call it
OF_TOWER = {
    "patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
}  # fmt: skip
IN_BLOCK = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
AFTER_BLOCK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
BLOCK = re.compile(r"(blocks|deepstack_merger_list)\.(\d+)\.")
VISION = re.compile(r"(?:^|\.)visual\.")


class Source(NamedTuple):
    """The tensors of a file that make up a parameter, and how; without `make`, one tensor as it is."""

    names: tuple[str, ...]
    make: Callable[..., Tensor] | None = None  # float32 tensors -> the parameter's values


def is_vision(parameter: str) -> bool:
    return VISION.search(parameter) is not None


def source_of(parameter: str, config: Any, there: Container[str]) -> Source | None:
    """Which tensors of a GGUF file that has the names `there` make up a parameter outside the experts; None: no such name."""
    if is_vision(parameter):
        return _of_tower(VISION.split(parameter, maxsplit=1)[1], config)
    layer = LAYER.search(parameter)
    module, _, kind = parameter[layer.end() :].rpartition(".") if layer else parameter.rpartition(".")
    table, prefix = (IN_LAYER, f"blk.{layer[1]}.") if layer else (OUTSIDE, "")
    found = table.get(f"{module}.{kind}") if layer else None  # a parameter, not a module
    if found is None:
        found = table.get(module if layer else module.rpartition(".")[2])
        if found is None:
            return None
        if f"{prefix}{found}.{kind}" not in there:
            found = SAME_PLACE.get(found, found)
        found = f"{found}.{kind}"
    return Source((prefix + found,), _change(config.model_type, f"{module}.{kind}", config.get_text_config()))


def _change(model_type: str, name: str, text: Any) -> Callable[[Tensor], Tensor] | None:
    """How values of a GGUF file become those of the parameter `name` of a layer."""
    if name == "mlp.shared_expert_gate.weight":
        return lambda gate: gate.view(1, -1)
    if model_type != "qwen3_5_moe":
        return None
    if name == "linear_attn.A_log":
        return lambda decay: (-_heads_together(decay, 0, 1, text)).log()
    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        return lambda norm: norm - 1
    keys, dim = 2 * text.linear_num_key_heads * text.linear_key_head_dim, text.linear_value_head_dim
    if name in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        shape = (-1, 1, text.linear_conv_kernel_dim) if "conv1d" in name else (-1, text.hidden_size)
        return lambda t: torch.cat((t[:keys], _heads_together(t[keys:], 0, dim, text))).view(shape)
    axis_and_width = {
        "linear_attn.in_proj_z.weight": (0, dim), "linear_attn.in_proj_a.weight": (0, 1), "linear_attn.in_proj_b.weight": (0, 1),
        "linear_attn.dt_bias": (0, 1), "linear_attn.out_proj.weight": (1, dim),
    }  # fmt: skip
    if name in axis_and_width:
        return lambda t: _heads_together(t, *axis_and_width[name], text)
    return None


def _heads_together(tensor: Tensor, axis: int, dim: int, text: Any) -> Tensor:
    """Value heads of width `dim` along `axis`: llama.cpp alternates over the key heads, transformers keeps those of one key head
    together."""
    heads = tensor.unflatten(axis, (-1, text.linear_num_key_heads, dim))
    return heads.transpose(axis, axis + 1).reshape(tensor.shape)


def _of_tower(parameter: str, config: Any) -> Source | None:
    """The same for a vision tower in a file of its own."""
    module, _, kind = parameter.rpartition(".")
    if parameter == "patch_embed.proj.weight":  # a convolution over two frames, one tensor for each
        return Source(("v.patch_embd.weight", "v.patch_embd.weight.1"), lambda *frames: torch.stack(frames, 2))
    block = BLOCK.match(parameter)
    if block is None:
        found = OF_TOWER.get(module)
    elif block[1] == "blocks":
        found = _in(IN_BLOCK, f"v.blk.{block[2]}", module[block.end() :])
    else:
        layer = config.vision_config.deepstack_visual_indexes[int(block[2])]
        found = _in(AFTER_BLOCK, f"v.deepstack.{layer}", module[block.end() :])
    return Source((f"{found}.{kind}",)) if found is not None else None


def _in(table: dict[str, str], prefix: str, module: str) -> str | None:
    return f"{prefix}.{table[module]}" if module in table else None
