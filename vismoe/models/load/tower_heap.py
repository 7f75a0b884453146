"""Lets a vision tower on a CPU keep what it frees until a picture is encoded (pools/malloc.py)."""

from typing import Any

import torch
from torch import nn

from vismoe.models.load.vision_memory import CHANNELS, patch_numbers, patch_pixels, tower_of
from vismoe.models.moe.step_context import StepContext


def watch_tower(model: Any, context: StepContext) -> None:
    """Note when the tower of this model begins and ends, and its blocks between; nothing for a model without one."""
    config, tower, freed = getattr(model.config, "vision_config", None), tower_of(model), context.freed
    if config is None or tower is None:
        return
    patch = CHANNELS * patch_pixels(config) * (getattr(config, "temporal_patch_size", None) or 1)
    patch_bytes = patch_numbers(tower, config) * model.dtype.itemsize

    def begin(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or context.now_serving is None:
            return
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_floating_point()]
        patches = max((value.numel() for value in given), default=0) // patch
        freed.begin(patches * patch_bytes, context.now_serving.plan.bytes_of("activations"))

    def check(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            freed.check()

    def end(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            freed.end()

    tower.register_forward_pre_hook(begin, with_kwargs=True)
    tower.register_forward_hook(end, always_call=True)
    for blocks in tower.modules():
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            block.register_forward_hook(check)
