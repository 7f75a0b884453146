"""What pruning visual tokens must compute, done the slow way: nothing is dropped, but in the deeper layers nobody sees it.

Independent of vismoe/models: hooks hand the deeper layers an additive mask of their own, full length, built from positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vismoe.models.family.caches import cache_in

Hidden = torch.Tensor  # bool [B, tokens]: which are dropped, of all turns


@contextmanager
def unseen(decoder: nn.Module, layers: nn.ModuleList, prune_layer: int, hidden: Hidden) -> Iterator[None]:
    """Inside, layers from `prune_layer` on do not see the `hidden` tokens of the sequences."""
    total = 0

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal total
        tokens = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        cache = cache_in(kwargs)
        total = tokens.shape[1] + (int(cache.get_seq_length()) if cache is not None else 0)

    def mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        return args, {**kwargs, "attention_mask": without(kwargs.get("attention_mask"), states.shape[1], total, hidden)}

    hooks = [decoder.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [layer.register_forward_pre_hook(mask, with_kwargs=True) for layer in layers[prune_layer:]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def without(mask: torch.Tensor | None, queries: int, total: int, hidden: Hidden) -> torch.Tensor:
    """Additive float32 `[B, 1, queries, keys]`; without a mask, causal attention is meant."""
    least = torch.finfo(torch.float32).min
    if mask is None:
        place = torch.arange(total)
        mask = (place[None, :] <= place[total - queries :, None])[None, None]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, least)
    columns = torch.zeros(len(hidden), total, dtype=torch.bool)
    columns[:, : hidden.shape[1]] = hidden[:, :total]
    return mask.expand(len(hidden), -1, -1, -1).masked_fill(columns[:, None, None, total - mask.shape[-1] :], least)
