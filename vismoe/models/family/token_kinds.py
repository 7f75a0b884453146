"""Which tokens of a call are visual, text or padding, as far as the arguments of the outermost model show."""

from typing import Any

import torch

from vismoe.types import TokenKind

PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def token_kinds(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """uint8 `[B, S]` of TokenKind for a call of a model with this configuration; None if it has no token ids, or one for each
    sequence. That one is text: a visual token never comes alone, and the host would wait for a GPU to say so."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] == 1:
        return None
    kinds = torch.full(ids.shape, TokenKind.TEXT, dtype=torch.uint8, device=ids.device)
    for name in PLACEHOLDERS:
        token = getattr(config, name, None)
        if token is not None:
            kinds[ids == token] = TokenKind.VISUAL
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        kinds[mask[:, -ids.shape[1] :] == 0] = TokenKind.PAD
    return kinds
