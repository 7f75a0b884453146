"""Lets the CPU kernels compute linear layers with few rows: attention projections and the language model head at decode.

A product with a handful of rows reads every weight once and computes little, so memory speed bounds it; the expert kernels come
closer to that speed than torch's. The change is a `forward` on the module object.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from vismoe.kernels import cpu
from vismoe.models.family.components import is_vision

MOST_ROWS = 16
HALVES = (torch.bfloat16, torch.float16)


def serve_linears(model: nn.Module) -> int:
    """Make the kernels compute the decoder's linear layers for up to MOST_ROWS rows; returns the number of these layers."""
    modules = list(_linears(model))
    for module in modules:
        module.forward = partial(_forward, weakref.ref(module))  # type: ignore[method-assign]  # avoids a reference cycle, so it is freed with the model
    return len(modules)


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
