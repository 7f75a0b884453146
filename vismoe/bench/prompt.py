"""Prompts of a benchmark: seeded random token ids or a user's text, and a synthetic picture. All pure except the pixels.

A generated checkpoint has no tokenizer, so prompts are token ids. A picture has random pixels, because the time of a vision tower
does not depend on the content.
"""

import math
from typing import Any

import torch

from vismoe.errors import InputError


def random_ids(config: Any, count: int, seed: int) -> tuple[int, ...]:
    """`count` ids of the text vocabulary, none of them special."""
    text = config.get_text_config()
    values = [value for part in (config, text) for name, value in part.to_dict().items() if name.endswith("_token_id")]
    special = {token for value in values for token in (value if isinstance(value, list) else [value])}
    allowed = torch.tensor([token for token in range(text.vocab_size) if token not in special])
    chosen = torch.randint(len(allowed), (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(allowed[chosen].tolist())


def picture_grid(config: Any, picture: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of patches of a picture of `picture` = (width, height) pixels.

    Raises InputError for a model without pictures, or with another form of input than packed patches and a grid.
    """
    vision: Any = getattr(config, "vision_config", None)
    merge = getattr(vision, "spatial_merge_size", None)
    if not merge or getattr(config, "image_token_id", None) is None:
        kind = "cannot see pictures" if vision is None else "needs pictures in a form that vismoe bench cannot generate"
        raise InputError(f"--image: {config.model_type} {kind}. Fix: leave out --image, or a model such as qwen3-vl-30b-a3b")
    side = vision.patch_size * merge
    width, height = picture
    return max(1, round(height / side)) * merge, max(1, round(width / side)) * merge


def picture_tokens(config: Any, picture: tuple[int, int] | None) -> int:
    """Tokens that a picture adds to the prompt, including its start and end marks; 0 without one."""
    if picture is None:
        return 0
    if hasattr(config, "tiling"):
        visual: int = config.tiling.tokens(config.tiling.best(picture))
        return visual
    visual = math.prod(picture_grid(config, picture)) // config.vision_config.spatial_merge_size**2
    return visual + len(_mark(config, "start")) + len(_mark(config, "end"))


def _mark(config: Any, which: str) -> list[int]:
    """The token before (`start`) or after (`end`) a picture, if the family has one."""
    names = (f"vision_{which}_token_id", f"image_{which}_token_id")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None][:1]


def model_inputs(model: Any, token_ids: tuple[int, ...], picture: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """Arguments of generate(): ids `[1, T]`, and for a picture its pixels `[patches, patch numbers]` and grid `[1, 3]`, or its
    views `[views, 3, H, W]` and tiles `[1, 2]`."""
    config = model.config
    if picture is None:
        ids = torch.tensor([token_ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    random = torch.Generator().manual_seed(0)
    if hasattr(config, "tiling"):
        across, down = config.tiling.tiles(config.tiling.best(picture))
        ids = torch.tensor([[config.image_token_id] * picture_tokens(config, picture) + list(token_ids)])
        pixels = torch.randn(1 + across * down, 3, config.tiling.side, config.tiling.side, generator=random).to(model.dtype)
        crop = torch.tensor([[across, down]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "images_spatial_crop": crop}
    rows, columns = picture_grid(config, picture)
    visual = [config.image_token_id] * (rows * columns // config.vision_config.spatial_merge_size**2)
    ids = torch.tensor([[*_mark(config, "start"), *visual, *_mark(config, "end"), *token_ids]])
    patch_embed = next(module for name, module in model.named_modules() if name.endswith("patch_embed"))
    width = math.prod(next(patch_embed.parameters()).shape[1:])  # values of one patch, whatever its layers are
    pixels = torch.randn(rows * columns, width, generator=random).to(model.dtype)
    kinds = (ids == config.image_token_id).int()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kinds,
        **({"moe_mm_token_type_ids": kinds} if config.model_type.startswith("ernie") else {}),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }
