"""Tiny checkpoints in the layouts of published quantised ones, and the weights that their public formulas restore.

Written from the formats' own descriptions, not with the code under test: each kind has a function that turns a weight `[o, i]`
into the tensors of a checkpoint and the restored weight in bfloat16.
"""

import json
import re
from collections.abc import Callable, Mapping
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


def mxfp4(w: Tensor) -> Made:
    groups = w.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 6).log2().ceil().int() + 127
    each = torch.ldexp(torch.ones(scale.shape), scale - 127)[..., None]
    codes = nearest_e2m1(groups / each)
    tensors = {"_blocks": pairs(codes.flatten(1)).unflatten(1, (-1, 16)), "_scales": scale.to(torch.uint8)}
    return tensors, (E2M1[codes] * each).flatten(1).bfloat16()


def mxfp4_per_expert(w: Tensor, deepseek: bool = False) -> Made:
    """As compressed-tensors writes it, or DeepSeek."""
    made, values = mxfp4(w)
    codes, scale = made["_blocks"].flatten(1), made["_scales"]
    if deepseek:
        return {".weight": codes.view(torch.int8), ".scale": scale.view(torch.float8_e8m0fnu)}, values
    return {".weight_packed": codes, ".weight_scale": scale}, values


def fp8_halves(w: Tensor) -> Made:
    """A scale for gate and one for up, as transformers has it for stacked experts without blocks."""
    halves = [fp8_tensor(half) for half in w.chunk(2)]
    codes = torch.cat([made[".weight"].view(torch.uint8) for made, _ in halves]).view(torch.float8_e4m3fn)
    scale = torch.stack([made[".weight_scale"].float() for made, _ in halves])[:, None]
    return {".weight": codes, ".weight_scale_inv": scale}, torch.cat([values for _, values in halves])


def fp8_by_powers_of_two(w: Tensor, scale_name: str = ".scale", as_bytes: bool = True) -> Made:
    """DeepSeek's `scale_fmt: ue8m0`."""
    made, _ = fp8(w, dtype=torch.float32)
    exponent = made[".weight_scale_inv"].log2().ceil()
    each = blocks(exponent.exp2(), *w.shape)
    codes = (w.float() / each).to(torch.float8_e4m3fn)
    scale = (exponent + 127).to(torch.uint8)
    tensors = {".weight": codes, scale_name: scale if as_bytes else scale.view(torch.float8_e8m0fnu)}
    return tensors, (codes.float() * each).bfloat16()


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return dict(quant_method="compressed-tensors", format=format, config_groups=groups, ignore=["lm_head"])


KINDS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "fp8": (fp8, dict(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"])),
    "fp8 float32 scales": (lambda w: fp8(w, dtype=torch.float32), dict(quant_method="fp8", weight_block_size=[128, 128])),
    "fp8 per channel": (fp8_channel, compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8 per tensor": (fp8_tensor, dict(quant_method="modelopt", quant_algo="FP8", exclude_modules=["lm_head"])),
    "int8 per channel": (int8_channel, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "w4": (w4, compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)),
    "w4 with zero points": (
        lambda w: w4(w, 64, False),
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False),
    ),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=64, zero_point=True, version="gemm")),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=64, desc_act=False, sym=False)),
    "gptq v2": (
        lambda w: gptq(w, 2),
        dict(quant_method="gptq", bits=4, group_size=64, desc_act=False, checkpoint_format="gptq_v2"),
    ),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "mxfp4 of compressed-tensors": (
        mxfp4_per_expert,
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "mxfp4 of deepseek": (lambda w: mxfp4_per_expert(w, True), dict(quant_method="fp8", scale_fmt="ue8m0")),
    "fp8 per half": (fp8_halves, dict(quant_method="fp8")),
    "mxfp4": (mxfp4, dict(quant_method="mxfp4")),
    "fp8 ue8m0": (fp8_by_powers_of_two, dict(quant_method="fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")),
    "nvfp4 of modelopt": (lambda w: nvfp4(w, False), dict(quant_method="modelopt", quant_algo="NVFP4", exclude_modules=["lm*"])),
}
PER_EXPERT = [kind for kind in KINDS if kind not in ("mxfp4", "fp8 per half")]  # the others are stacked
BASE = dict(
    vocab_size=512, hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=EXPERTS, num_experts_per_tok=2,
    max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
VISION = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=HIDDEN, num_position_embeddings=64)


def config_of(family: str) -> Any:
    if family == "qwen3_moe":
        return T.Qwen3MoeConfig(**BASE)
    if family == "gpt_oss":
        sizes = dict(BASE, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, layer_types=["full_attention"] * LAYERS)
        return T.GptOssConfig(
            **{name: value for name, value in sizes.items() if name not in ("num_experts", "moe_intermediate_size")}
        )
    text = dict(BASE, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10]))
    return T.Qwen3VLMoeConfig(text_config=text, vision_config=dict(VISION, deepstack_visual_indexes=[0]), dtype="bfloat16")


CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}  # fmt: skip
NAMES = {  # of one expert's matrix: in most checkpoints, and in modelopt's of Qwen3-VL
    "expert first": "{expert}.{matrix}", "matrix first": "{matrix}.{expert}",
}  # fmt: skip


def write(
    folder: Path,
    kind: str,
    family: str = "qwen3_moe",
    backbone: bool = False,
    seed: int = 0,
    names: str = "expert first",
    layers: Mapping[int, str | None] = {},
) -> Any:
    """Save a random model in `folder` with its experts (and attention, if `backbone`) in `kind`; returns the model with restored
    weights, in bfloat16.

    names: one of NAMES, or "stacked" for one tensor of all experts, always [experts, out, in]. layers: those of another kind,
    None for 16 bits.
    """
    config, make = config_of(family), KINDS[kind][0]
    torch.manual_seed(seed)
    model = getattr(T, CLASSES[family])._from_config(config, dtype=torch.bfloat16).eval()
    state: dict[str, Tensor] = {}

    def put(name: str, weight: Tensor, make: Callable[[Tensor], Made] = make) -> Tensor:
        tensors, values = make(weight.detach())
        state.update({name + suffix: tensor.contiguous() for suffix, tensor in tensors.items()})
        return values

    def put_experts(name: str, p: Tensor, matrix: str) -> None:
        halves = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        own = next((own for layer, own in layers.items() if f"layers.{layer}." in name), kind)
        for e, w in enumerate(p):
            parts = []
            for half, x in zip(halves, w.chunk(len(halves))):
                at = NAMES[names].format(expert=e, matrix=half)
                encode = KINDS[own][0] if own is not None else lambda w: ({".weight": w.clone()}, w.clone())
                parts.append(put(name.removesuffix(matrix) + at, x, encode))
            w.copy_(torch.cat(parts))

    def put_stacked(name: str, p: Tensor) -> None:
        made = [make(w.T if family == "gpt_oss" else w) for w in p]
        for suffix in made[0][0]:
            end = {".weight": "", ".weight_scale_inv": "_scale_inv"}.get(suffix, suffix.replace(".", "_"))
            state[name + end] = torch.stack([tensors[suffix] for tensors, _ in made])
        p.copy_(torch.stack([values.T if family == "gpt_oss" else values for _, values in made]))

    with torch.no_grad():
        for name, p in model.named_parameters():
            matrix = name.rpartition(".")[2]
            if ".experts." in name and matrix in ("gate_up_proj", "down_proj"):
                put_stacked(name, p) if names == "stacked" else put_experts(name, p, matrix)
            elif backbone and "self_attn" in name and name.endswith("_proj.weight"):
                p.copy_(put(name.removesuffix(".weight"), p))
            else:
                state[name] = p.detach().clone()
    values = config.to_dict() | {"architectures": [CLASSES[family]], "quantization_config": KINDS[kind][1]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return model


EXPERT = re.compile(r"experts\.\d+\.\w+\.weight$")


def requantise(folder: Path, make: Callable[[Tensor], Made], into: Path) -> None:
    """Encode the experts of a checkpoint saved in `folder`, whatever its family, into another one; `folder` keeps the restored
    weights in 16 bits."""
    into.mkdir()
    for path in folder.glob("*.json"):
        (into / path.name).write_bytes(path.read_bytes())
    encoded = 0
    for path in folder.glob("*.safetensors"):
        restored, state = load_file(path), {}
        for name, weight in restored.items():
            if EXPERT.search(name):
                tensors, restored[name] = make(weight)
                state |= {name.removesuffix(".weight") + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
                encoded += 1
            else:
                state[name] = weight
        save_file(restored, path, metadata={"format": "pt"})
        save_file(state, into / path.name, metadata={"format": "pt"})
    assert encoded, "no expert has a tensor of its own"
    config = json.loads((into / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", weight_block_size=[128, 128])
    (into / "config.json").write_text(json.dumps(config))


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
