"""Tiny checkpoints in the layouts of published quantised ones, and the weights that their public formulas restore.

Written from the formats' own descriptions, not with the code under test: each kind has a function that turns a weight `[o, i]`
into the tensors of a checkpoint and the restored weight in bfloat16.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]  # tensors by suffix of the module's name, the restored weight
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 256, 192, 6, 2  # 192: one and a half blocks of FP8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def blocks(scale: Tensor, rows: int, columns: int, size: int = 128) -> Tensor:
    return scale.float().repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]


def fp8(w: Tensor, scale_name: str = ".weight_scale_inv", dtype: torch.dtype = torch.bfloat16) -> Made:
    rows, columns = w.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = w.float()
    scale = (padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)).clamp(min=1e-12) / 448).to(dtype)
    codes = (w.float() / blocks(scale, rows, columns)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, scale_name: scale}, (codes.float() * blocks(scale, rows, columns)).bfloat16()


def fp8_channel(w: Tensor) -> Made:
    scale = (w.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (w.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale}, (codes.float() * scale.float()).bfloat16()


def fp8_tensor(w: Tensor) -> Made:
    scale = w.float().abs().amax() / 448
    codes = (w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(1.0)}
    return tensors, (codes.float() * scale).bfloat16()


def int8_channel(w: Tensor) -> Made:
    scale = (w.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (w.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, (codes.float() * scale.float()).bfloat16()


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes of 4 bits `[n, 8 m]` -> int32 `[n, m]`; half byte k of a word is the code at `order[k]`."""
    eights = codes.long().unflatten(1, (-1, 8))
    packed = sum(eights[..., order[k]] << (4 * k) for k in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def grid(w: Tensor, group: int, dtype: torch.dtype, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes 0 .. 15 `[o, i]`, scale, zero 0 .. 15, both `[o, i / group]`)."""
    groups = w.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).to(dtype)
        zero = torch.full(scale.shape, 8)
    else:
        scale = ((high - low) / 15).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, 15).long()
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).long().flatten(1)
    return codes, scale, zero


def restored(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    group = codes.shape[1] // scale.shape[1]
    return (codes - zero.repeat_interleave(group, 1)).float() * scale.float().repeat_interleave(group, 1)


def w4(w: Tensor, group: int = 32, symmetric: bool = True) -> Made:
    codes, scale, zero = grid(w, group, torch.bfloat16, symmetric)
    tensors = {".weight_packed": words(codes), ".weight_scale": scale, ".weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        tensors[".weight_zero_point"] = words(zero.T).T
    return tensors, restored(codes, scale, zero).bfloat16()


def awq(w: Tensor) -> Made:
    codes, scale, zero = grid(w, 64, torch.float16, False)
    tensors = {".qweight": words(codes.T, AWQ_ORDER), ".qzeros": words(zero.T, AWQ_ORDER), ".scales": scale.T}
    return tensors, restored(codes, scale, zero).half().bfloat16()


def gptq(w: Tensor, version: int = 1) -> Made:
    codes, scale, zero = grid(w, 64, torch.float16, False)
    stored = words(zero.T - (1 if version == 1 else 0))
    tensors = {".qweight": words(codes).T, ".qzeros": stored, ".scales": scale.T}
    tensors[".g_idx"] = (torch.arange(w.shape[1]) // 64).int()
    return tensors, restored(codes, scale, zero).half().bfloat16()


def nearest_e2m1(values: Tensor) -> Tensor:
    return (values[..., None] - E2M1).abs().argmin(-1)


def pairs(codes: Tensor) -> Tensor:
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def nvfp4(w: Tensor, divided: bool = True) -> Made:
    whole = 448 * 6 / w.float().abs().max()
    groups = w.float().unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    if divided:
        each, tensors = scale.float() / whole, {".weight_scale": scale, ".weight_global_scale": whole.view(1)}
    else:
        each = scale.float() * (1 / whole)
        tensors = {".weight_scale": scale, ".weight_scale_2": 1 / whole, ".input_scale": torch.tensor(1.0)}
    codes = nearest_e2m1(groups / each[..., None].clamp(min=1e-20)).flatten(1)
    tensors[".weight_packed" if divided else ".weight"] = pairs(codes)
    return tensors, (E2M1[codes].unflatten(1, (-1, 16)) * each[..., None]).flatten(1).bfloat16()


KINDS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "fp8": (fp8, dict(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"])),
    "fp8 float32 scales": (lambda w: fp8(w, dtype=torch.float32), dict(quant_method="fp8", weight_block_size=[128, 128])),
    "fp8 per channel": (fp8_channel, dict(quant_method="compressed-tensors", format="float-quantized")),
    "fp8 per tensor": (fp8_tensor, dict(quant_method="modelopt", quant_algo="FP8")),
    "int8 per channel": (int8_channel, dict(quant_method="compressed-tensors", format="int-quantized")),
    "w4": (w4, dict(quant_method="compressed-tensors", format="pack-quantized")),
    "w4 with zero points": (lambda w: w4(w, 64, False), dict(quant_method="compressed-tensors", format="pack-quantized")),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=64, zero_point=True, version="gemm")),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=False)),
    "gptq v2": (lambda w: gptq(w, 2), dict(quant_method="gptq", bits=4, group_size=64, checkpoint_format="gptq_v2")),
    "nvfp4": (nvfp4, dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized")),
    "nvfp4 of modelopt": (lambda w: nvfp4(w, False), dict(quant_method="modelopt", quant_algo="NVFP4")),
}
BASE = dict(
    vocab_size=512, hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=EXPERTS, num_experts_per_tok=2,
    max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
VISION = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=HIDDEN, num_position_embeddings=64)


def config_of(family: str) -> Any:
    if family == "qwen3_moe":
        return T.Qwen3MoeConfig(**BASE)
    text = dict(BASE, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10]))
    return T.Qwen3VLMoeConfig(text_config=text, vision_config=dict(VISION, deepstack_visual_indexes=[0]), dtype="bfloat16")


CLASSES = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"}


def write(folder: Path, kind: str, family: str = "qwen3_moe", backbone: bool = False, seed: int = 0) -> Any:
    """Save a random model in `folder` with its experts (and attention, if `backbone`) in `kind`; returns the model with restored
    weights, in bfloat16."""
    config, make = config_of(family), KINDS[kind][0]
    torch.manual_seed(seed)
    model = getattr(T, CLASSES[family])._from_config(config, dtype=torch.bfloat16).eval()
    state: dict[str, Tensor] = {}

    def put(name: str, weight: Tensor) -> Tensor:
        tensors, values = make(weight.detach())
        state.update({name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()})
        return values

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                for e, w in enumerate(p):
                    gate, up = (
                        put(name.replace("gate_up_proj", f"{e}.{half}_proj"), x) for half, x in zip(("gate", "up"), w.chunk(2))
                    )
                    w.copy_(torch.cat((gate, up)))
            elif name.endswith("experts.down_proj"):
                for e, w in enumerate(p):
                    w.copy_(put(name.replace("down_proj", f"{e}.down_proj"), w))
            elif backbone and "self_attn" in name and name.endswith("_proj.weight"):
                p.copy_(put(name.removesuffix(".weight"), p))
            else:
                state[name] = p.detach().clone()
    values = config.to_dict() | {"architectures": [CLASSES[family]], "quantization_config": KINDS[kind][1]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return model


def encode(folder: Path, names: str, kind: str = "fp8") -> dict[str, Tensor]:
    """Encode the weights whose names match, and mark the checkpoint as quantised; returns all of its tensors with restored
    weights."""
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if re.search(names, name) and tensor.ndim == 2 and tensor.dtype == torch.bfloat16:
            parts, weights[name] = KINDS[kind][0](tensor)
            tensors |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
        else:
            tensors[name] = weights[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": KINDS[kind][1]}))
    return weights
