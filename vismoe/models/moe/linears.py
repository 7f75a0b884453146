"""Linear layers served by our kernels when few rows are computed: attention projections and the language model head at decode.

A product with a handful of rows reads every weight once and does little with it, so it runs at the memory's speed or slower; the
kernels of the experts come closer to that speed than torch's. The change is a `forward` on the module object and can be undone.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from vismoe.kernels import cpu
from vismoe.models.family.components import is_vision

__all__ = ["restore_linears", "serve_linears"]

MOST_ROWS = 16
HALVES = (torch.bfloat16, torch.float16)


def serve_linears(model: nn.Module) -> int:
    """Let the kernels compute the decoder's linear layers up to MOST_ROWS rows; returns how many layers there are."""
    modules = list(_linears(model))
    for module in modules:
        module.forward = partial(_forward, weakref.ref(module))  # type: ignore[method-assign]  # no cycle: freed with the model
    return len(modules)


def restore_linears(model: nn.Module) -> None:
    """Give the modules their own `forward` back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), partial) and module.__dict__["forward"].func is _forward:
            del module.__dict__["forward"]


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    for path, module in model.named_modules():
        plain = type(module) is nn.Linear and "forward" not in module.__dict__
        if plain and not is_vision(path) and module.weight.device.type == "cpu" and module.weight.dtype in HALVES:
            yield module


def _forward(reference: Any, x: torch.Tensor) -> torch.Tensor:
    module = reference()
    weight, bias = module.weight, module.bias
    rows = x.numel() // weight.shape[1]
    if not 0 < rows <= MOST_ROWS or x.dtype is not weight.dtype or x.device.type != "cpu" or torch.is_grad_enabled():
        return nn.functional.linear(x, weight, bias)
    return cpu.linear(x.reshape(rows, -1), weight, bias).view(*x.shape[:-1], -1)
