"""Live memory of a vision tower by image tokens, measured on the meta device like the decoder's.

Towers that take flat patches and a grid are run, and so are those named here; others decide by values, which meta tensors do
not have, and are estimated from their widths. Tokens are image tokens of one request: what the decoder gets. Saliency is
planned for at any number of tokens, since a request may ask for fewer visual tokens at any time.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.load.live_memory import META, FusedAttention, LiveMemory, all_chosen, forwards_replaced, one_expert_for_all
from vismoe.models.visual.saliency import saliency_bytes
from vismoe.planning.needs import Curve

FEW_TOKENS = 4
# Families that take a square of pixels per image token, and its patches a side.
SQUARES = {"inkling_mm_model": 1, "inkling2": 2, "inkling2_loop": 2}
PICTURES = {"deepseek_ocr2", "llama4", "unlimited_ocr"}  # families that take whole pictures of one size
TILES = "images_spatial_crop"  # of families that take pictures of one size: how many form an image
OPTIONS = ("vision_feature_select_strategy",)  # what their encoders ask for beside the pixels
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")
CHANNELS = 3
PATCHES_PER_TOKEN = {"aria": 20, "diffusion_gemma": 9, "gemma4": 9, "step3p7": 16}  # of the estimated; the others merge 2 x 2


@dataclass(frozen=True)
class VisionMemory:
    """Peak while the tower runs, and what stays through the prefill: pixels and features."""

    encode: Curve
    held_token_bytes: int  # per image token


NONE = VisionMemory(Curve(()), 0)


def vision_memory(model: Any, image_tokens: int) -> VisionMemory:
    """Memory for up to `image_tokens` image tokens in one request; an empty curve for a model without a vision tower."""
    config = getattr(model.config, "vision_config", None)
    encoder = next((part for part in model.modules() if hasattr(part, "get_image_features")), None)
    if config is None or encoder is None:
        return NONE
    tower = _tower_memory(model, encoder, config, image_tokens)
    listening_bytes = saliency_bytes(model, image_tokens)
    points = tuple((tokens, nbytes + listening_bytes) for tokens, nbytes in tower.encode.points)
    return VisionMemory(Curve(points), tower.held_token_bytes)


def _tower_memory(model: Any, encoder: Any, config: Any, image_tokens: int) -> VisionMemory:
    """The same for the tower alone."""
    gridded = "image_grid_thw" in inspect.signature(encoder.get_image_features).parameters and _merge(config)
    if not (gridded or _takes_pictures(model, encoder) or model.config.model_type in SQUARES):
        return _estimate(model, config, image_tokens)
    few = _encode(model, encoder, _request(model, encoder, min(FEW_TOKENS, image_tokens), pictures=1))
    most = _encode(model, encoder, _request(model, encoder, image_tokens, pictures=-(-image_tokens // few.tokens)))
    points = {run.tokens: run.peak_bytes for run in (few, most)}
    return VisionMemory(Curve(tuple(sorted(points.items()))), -(-most.kept_bytes // most.tokens))


def _takes_pictures(model: Any, encoder: Any) -> bool:
    return model.config.model_type in PICTURES or TILES in inspect.signature(encoder.get_image_features).parameters


@dataclass(frozen=True)
class _Run:
    """What encoding took: image tokens made, peak, and bytes that stay."""

    tokens: int
    peak_bytes: int
    kept_bytes: int


def _request(model: Any, encoder: Any, tokens: int, pictures: int) -> dict[str, Any]:
    """Arguments of `get_image_features` on meta: one picture of about `tokens` image tokens, or whole `pictures`."""
    config, asked = model.config.vision_config, inspect.signature(encoder.get_image_features).parameters
    rows = math.isqrt(tokens)
    columns = -(-tokens // rows)
    more = {name: getattr(config, name) for name in OPTIONS if name in asked}
    dtype = torch.float32
    if _takes_pictures(model, encoder):
        dtype = torch.float32 if TILES in asked else model.dtype  # the other towers cast nothing
        side = getattr(config, "image_size", None) or config.sam_config.image_size
        if TILES in asked:  # a whole view and one tile of each
            more[TILES] = torch.ones(pictures, 2, dtype=torch.int64)
        shape: tuple[int, ...] = (pictures * (1 + (TILES in asked)), CHANNELS, side, side)
    elif model.config.model_type in SQUARES:
        side = SQUARES[model.config.model_type] * config.patch_size
        shape = (rows * columns, side, side, CHANNELS)
        if "image_grid_thw" in asked:
            more["image_grid_thw"] = torch.tensor([[1, rows, columns]])
        else:
            shape = (rows * columns, config.temporal_patch_size, *shape[1:])
    else:
        merge = _merge(config)
        shape = (rows * columns * merge**2, _patch_width(encoder, config))
        more["image_grid_thw"] = torch.tensor([[1, rows * merge, columns * merge]])
    return dict(pixel_values=torch.empty(shape, dtype=dtype, device=META), **more)


def _encode(model: Any, encoder: Any, request: dict[str, Any]) -> _Run:
    replaced = forwards_replaced([module for _, module in expert_modules(encoder)], one_expert_for_all)
    with torch.no_grad(), all_chosen(), LiveMemory() as memory, FusedAttention(memory), replaced:
        memory.count(request["pixel_values"])
        output = encoder.get_image_features(**request)
        features = getattr(output, "pooler_output", None)
        if features is None:
            features = getattr(output, "last_hidden_state", output)
        tokens = sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(features))
        kept_bytes = memory.live_bytes
    kept_bytes += tokens * model.config.get_text_config().hidden_size * model.dtype.itemsize
    return _Run(tokens, memory.peak_bytes, kept_bytes)


def _merge(config: Any) -> int:
    """Patches along a side of an image token; 0 for a tower that does not say."""
    merge: int = getattr(config, "spatial_merge_size", 0) or getattr(config, "merge_size", 0)
    return merge


def patch_pixels(config: Any) -> int:
    """Pixels of one patch; some configurations give its height and its width."""
    size = getattr(config, "patch_size", 16)
    return math.prod(size) if isinstance(size, list | tuple) else size**2


def _patch_width(encoder: Any, config: Any) -> int:
    """Numbers of one flat patch: what the first projection of a whole number of frames takes."""
    frame = CHANNELS * patch_pixels(config)
    matrices = (weight for name, weight in encoder.named_parameters() if weight.ndim > 1 and is_vision(name.rpartition(".")[0]))
    widths = (math.prod(weight.shape[1:]) for weight in matrices)
    return next(width for width in widths if width % frame == 0)


def tower_of(model: nn.Module) -> nn.Module | None:
    """The vision tower, by the names that families give it; None: there is none."""
    return next((module for name, module in model.named_modules() if name.rpartition(".")[2] in TOWERS), None)


def patch_numbers(tower: nn.Module, config: Any) -> int:
    """How many numbers live at once for a patch, about: twelve rows of the tower's width and two of its widest layer."""
    widest = max((module.weight.shape[0] for module in tower.modules() if isinstance(module, nn.Linear)), default=0)
    hidden: int = getattr(config, "hidden_size", widest)
    return 12 * hidden + 2 * widest


def _estimate(model: Any, config: Any, image_tokens: int) -> VisionMemory:
    """From the tower's widths, in float32."""
    patches = PATCHES_PER_TOKEN.get(model.config.model_type, 4)
    token_bytes = patches * patch_numbers(tower_of(model) or model, config) * torch.float32.itemsize
    pixels_bytes = patches * CHANNELS * patch_pixels(config) * torch.float32.itemsize
    features_bytes = model.config.get_text_config().hidden_size * torch.float32.itemsize
    points = ((0, 0), (image_tokens, image_tokens * (token_bytes + pixels_bytes)))
    return VisionMemory(Curve(points), pixels_bytes + features_bytes)
