"""Tiny models as GGUF files with blocks of any type, and the weights that gguf-py restores of them.

Blocks are random bytes with scales of ordinary size: the bytes are the truth. Names are those of gguf-py's own table.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import quantised_checkpoints as quantised
import torch
import transformers as T
from safetensors.torch import save_file

from vismoe.bench.llama_cpp import ARCHITECTURES

SCALES = {  # where a block has float16 scales
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_XS": (0,), "IQ3_S": (0,),
}  # fmt: skip
MOST = {  # of a code times what is beside the float16
    "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "IQ4_NL": 127, "Q4_K": 945, "Q5_K": 1953, "Q6_K": 4096,
    "Q2_K": 45, "Q3_K": 128, "IQ4_XS": 4064, "IQ3_S": 465,
}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")
EDGES = (0.0, -0.0, 1.0, -2.5, 6e-8, 65504.0)  # scales: zeros, the smallest subnormal number, the largest number


def blocks(kind: str, count: int, rng: np.random.Generator, scales: tuple[float, ...] = ()) -> np.ndarray:
    """uint8 `[count, block_bytes]`; without `scales`, weights of about 0.1."""
    import gguf

    raw = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), dtype=np.uint8)
    for at in SCALES[kind]:
        values = rng.choice(scales, count) if scales else 0.2 / MOST[kind] * rng.uniform(0.5, 1, count)
        raw[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(0, 255, count) if scales else rng.integers(119, 122, count)
    return raw


def stored(kind: str, values: torch.Tensor, rng: np.random.Generator) -> tuple[np.ndarray, torch.Tensor]:
    """(what a file holds for a tensor like `values`, the float32 values that it means)."""
    import gguf

    if kind == "F16":
        halves = values.half()
        return halves.numpy(), halves.float()
    if kind == "BF16":
        return values.bfloat16().view(torch.uint8).numpy(), values.bfloat16().float()
    if kind == "F32":
        return values.float().numpy(), values.float()
    number = gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[number]
    raw = blocks(kind, values.numel() // size, rng).reshape(*values.shape[:-1], values.shape[-1] // size * nbytes)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, number).reshape(values.shape).copy())


def split(name: str, tensor: torch.Tensor, fused: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name for gguf-py, tensor) of one parameter of a model: experts' gate and up apart, unless `fused`."""
    if name.endswith("experts.gate_up_proj") and not fused:
        for half, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield name.replace("gate_up_proj", f"{half}_proj"), part
    else:
        yield name, tensor


def model_of(family: str, **changes: Any) -> Any:
    config = quantised.config_of(family)
    text = config.get_text_config()
    for key, value in (dict(moe_intermediate_size=256) | changes).items():
        setattr(text, key, value)
    return getattr(T, quantised.CLASSES[family])._from_config(config, dtype=torch.bfloat16).eval()


def write(
    folder: Path,
    family: str,
    kind_of: Callable[[str], str],
    *,
    fused: bool = False,
    left_out: str = "",
    seed: int = 0,
    **changes: Any,
) -> Any:
    """Save a random model in `folder`: `model.gguf` with a tensor's type by its name, config.json, and safetensors of a vision
    tower. Returns the model with the weights that the file means, in bfloat16. `left_out`: a tensor that the file lacks.
    `changes` are those of the configuration."""
    import gguf

    torch.manual_seed(seed)
    model, rng = model_of(family, **changes), np.random.default_rng(seed)
    architecture = ARCHITECTURES[model.config.model_type]
    known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(known, quantised.LAYERS)
    folder.mkdir(parents=True, exist_ok=True)
    writer, vision = gguf.GGUFWriter(folder / "model.gguf", architecture.name), {}
    writer.add_array("tokenizer.ggml.tokens", ["token"] * 512)
    writer.add_embedding_length(model.config.get_text_config().hidden_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual." in name:
                vision[name] = parameter.detach().clone()
                continue
            parts = []
            for part, values in split(name.replace("language_model.", ""), parameter, fused):
                if ".experts." in part:
                    target = re.sub(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)_proj$", r"blk.\1.ffn_\2_exps.weight", part)
                else:
                    target = names.get_name(part, try_suffixes=(".weight", ".bias"))
                kind = "F32" if values.ndim == 1 or "ffn_gate_inp" in target else kind_of(target)
                raw, means = stored(kind, values, rng)
                if target != left_out:
                    number = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
                    writer.add_tensor(target, raw, raw_dtype=number)
                parts.append(means)
            parameter.copy_(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if vision:
        save_file(vision, folder / "model.safetensors", metadata={"format": "pt"})
    values = model.config.to_dict() | {"architectures": [quantised.CLASSES[family]]}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return model


def write_mmproj(file: Path, model: Any, kind: str = "F32", projector: str = "qwen3vl_merger") -> None:
    """The vision tower of a qwen3_vl_moe as llama.cpp's converter writes it."""
    import gguf

    config, tensors = model.config.vision_config, gguf.MODEL_TENSOR
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, config.depth)
    after = {"norm": tensors.V_DS_NORM, "linear_fc1": tensors.V_DS_FC1, "linear_fc2": tensors.V_DS_FC2}
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_clip_projector_type(projector)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.out_hidden_size)
    writer.add_vision_image_size(round(config.num_position_embeddings**0.5) * config.patch_size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_embedding_length(config.hidden_size)
    writer.add_vision_feed_forward_length(config.intermediate_size)
    writer.add_vision_block_count(config.depth)
    writer.add_vision_head_count(config.num_heads)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(config.spatial_merge_size)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_is_deepstack_layers([layer in config.deepstack_visual_indexes for layer in range(config.depth)])
    for name, parameter in model.model.visual.named_parameters():
        path, _, suffix = name.rpartition(".")
        found = names.get_name(f"visual.{path}")
        if path.startswith("deepstack_merger_list"):
            _, number, part = path.split(".")
            found = gguf.TENSOR_NAMES[after[part]].format(bid=config.deepstack_visual_indexes[int(number)])
        elif path.startswith("merger"):
            found = merger[path.partition(".")[2]]
        pieces = {f"{found}.{suffix}": parameter.detach()}
        if parameter.ndim == 5:  # a convolution over two frames
            pieces = {f"{found}.{suffix}{end}": parameter.detach()[:, :, frame] for frame, end in enumerate(("", ".1"))}
        for target, values in pieces.items():
            values = values.float().numpy()
            halved = kind == "F16" and values.ndim > 1 and "position" not in target
            writer.add_tensor(target, values.astype(np.float16) if halved else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
