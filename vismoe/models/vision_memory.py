"""Live memory of a vision tower by image tokens, measured on the meta device like the decoder's.

Towers that take packed patches and a grid (`image_grid_thw`) are run; others are estimated from their widths, and say so.
Tokens are image tokens of one request: what the tower hands to the decoder.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vismoe.memory.needs import Curve
from vismoe.models.live_memory import META, FusedAttention, LiveMemory

FEW_TOKENS = 4
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
MERGED_PATCHES = 4  # patches per image token assumed where the tower does not say


@dataclass(frozen=True)
class VisionMemory:
    """Peak while the tower runs, and what stays through the prefill: pixels and features."""

    encode: Curve
    held_token_bytes: int  # per image token


NONE = VisionMemory(Curve(()), 0)


def vision_memory(model: Any, image_tokens: int) -> VisionMemory:
    """Memory for up to `image_tokens` image tokens in one request; an empty curve for a model without a vision tower."""
    config = getattr(model.config, "vision_config", None)
    if config is None or not hasattr(model, "get_image_features"):
        return NONE
    if "image_grid_thw" not in inspect.signature(model.get_image_features).parameters:
        return _estimate(model, config, image_tokens)
    points, held = [], 0
    for tokens in sorted({min(FEW_TOKENS, image_tokens), image_tokens}):
        rows = math.isqrt(tokens)
        columns = -(-tokens // rows)
        peak, kept = _encode(model, config, rows, columns)
        points.append((tokens, peak))
        held = -(-kept // (rows * columns))
    return VisionMemory(Curve(tuple(points)), held)


def _encode(model: Any, config: Any, rows: int, columns: int) -> tuple[int, int]:
    """(peak, kept) bytes of an image of rows x columns image tokens."""
    merge = config.spatial_merge_size
    patch_embed = next(module for name, module in model.named_modules() if name.endswith("patch_embed"))
    width = math.prod(next(patch_embed.parameters()).shape[1:])  # numbers of one patch, whatever its layers are
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    with torch.no_grad(), LiveMemory() as memory, FusedAttention():
        pixels = torch.empty(rows * columns * merge * merge, width, dtype=torch.float32, device=META)
        features = model.get_image_features(pixels, image_grid_thw=grid)
        kept = memory.live_bytes
        del features
        return memory.peak_bytes, kept + rows * columns * model.config.get_text_config().hidden_size * model.dtype.itemsize


def _estimate(model: Any, config: Any, image_tokens: int) -> VisionMemory:
    """From the tower's widths: twelve rows of its width and two of its widest layer per patch, in float32."""
    tower = next((module for name, module in model.named_modules() if name.rpartition(".")[2] in TOWERS), model)
    widest = max((module.out_features for module in tower.modules() if isinstance(module, nn.Linear)), default=0)
    hidden = getattr(config, "hidden_size", widest)
    token_bytes = MERGED_PATCHES * (12 * hidden + 2 * widest) * torch.float32.itemsize
    pixels = 3 * getattr(config, "patch_size", 16) ** 2 * MERGED_PATCHES * torch.float32.itemsize
    return VisionMemory(Curve(((0, 0), (image_tokens, image_tokens * (token_bytes + pixels)))), pixels + 4 * hidden)
