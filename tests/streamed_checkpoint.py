"""A checkpoint of any size, written tensor by tensor with bounded memory: random bfloat16 weights of a qwen3_vl_moe model."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers as T

BLOCK_VALUES = 2**24  # 32 MiB of random weights, written again and again from changing offsets

TEXT: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    moe_intermediate_size=456,
    num_experts=64,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10], mrope_interleaved=True),
)
VISION: dict[str, Any] = dict(
    depth=4,
    hidden_size=256,
    intermediate_size=640,
    num_heads=8,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=1024,
    num_position_embeddings=256,
    deepstack_visual_indexes=[1, 2, 3],
)
TOKENS = dict(image_token_id=4000, video_token_id=4001, vision_start_token_id=4002, vision_end_token_id=4003)


def config() -> T.PreTrainedConfig:
    return T.Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, dtype="bfloat16", **TOKENS)


def write(folder: Path, shards: int = 3) -> int:
    """Write the model of `config()`, its tensors dealt out over the shards by name; return bytes of all tensors."""
    with torch.device("meta"):
        model = T.Qwen3VLMoeForConditionalGeneration(config())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    saved = config()
    saved.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    saved.save_pretrained(folder)
    block = (torch.randn(BLOCK_VALUES, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().view(torch.uint8).numpy()
    names = sorted(shapes)
    files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for file, members in files.items():
        _write_shard(folder / file, {name: shapes[name] for name in members}, memoryview(block))
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    weight_map = {name: file for file, members in files.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: memoryview) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for shape in shapes.values():
            left = 2 * math.prod(shape)
            start = (start + 999_998) % len(block)  # other tensors begin elsewhere in the block
            while left:
                piece = block[start : start + left]
                file.write(piece)
                left -= len(piece)
                start = (start + len(piece)) % len(block)
