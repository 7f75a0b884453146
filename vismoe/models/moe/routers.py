"""Lets the CPU kernels compute routers of few rows: the product by the linears' kernel, then softmax and choice in one call.

A router is known by its numbers: what it makes of some vectors is compared with the known form. Others stay torch's. The change
is a `forward` on the module object, and serves as many rows as that of a linear.
"""

import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vismoe.kernels import cpu, rows
from vismoe.models.family.families import expert_modules
from vismoe.models.moe.linears import HALVES, MOST_ROWS

PROBE_ROWS = 8
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of logits' size, and of weights


class RouterForm(NamedTuple):
    """Logits rounded to the weight's type; `top_k` of their softmax in `dtype`, `normalised` to the sum 1 or not."""

    top_k: int
    normalised: bool
    dtype: torch.dtype


def serve_routers(model: nn.Module) -> int:
    """Make the kernels compute the routers of the decoder's experts for up to MOST_ROWS rows; returns how many these are."""
    found = list(_routers(model))
    for module, form in found:
        module.forward = partial(_forward, weakref.ref(module), form)  # type: ignore[method-assign]  # as of linears
    return len(found)


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, RouterForm]]:
    for path, _ in expert_modules(model):
        for module in model.get_submodule(path.rpartition(".")[0]).children():
            if "forward" not in module.__dict__ and (form := router_form(module)) is not None:
                yield module, form


def router_form(module: nn.Module) -> RouterForm | None:
    """The form of a module that returns (logits, weights, ids), None of any other."""
    own = [*module.named_parameters(), *module.named_buffers()]
    if [name for name, _ in own] != ["weight"] or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    weight = own[0][1]
    if weight.ndim != 2 or weight.device.type != "cpu" or weight.dtype not in HALVES or not weight.is_contiguous():
        return None
    with torch.no_grad():
        x = torch.sin(torch.arange(PROBE_ROWS * weight.shape[1], dtype=torch.float32) * 2.3).view(PROBE_ROWS, -1).to(weight.dtype)
        try:
            made = type(module).forward(module, x)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
        if not _is_routing(made, weight):
            return None
        logits, weights, ids = made
        for normalised in (True, False):
            form = RouterForm(ids.shape[1], normalised, weights.dtype)
            if _acts_like(form, x, weight, logits, weights, ids):
                return form
    return None


def _is_routing(made: Any, weight: torch.Tensor) -> bool:
    if not isinstance(made, tuple) or len(made) != 3 or not all(isinstance(part, torch.Tensor) for part in made):
        return False
    logits, weights, ids = made
    chosen = weights.shape == ids.shape and ids.ndim == 2 and len(ids) == PROBE_ROWS and ids.dtype is torch.int64
    return (
        chosen and weights.dtype in rows.NUMBER_OF and logits.dtype is weight.dtype and logits.shape == (PROBE_ROWS, len(weight))
    )


def _acts_like(
    form: RouterForm, x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> bool:
    """Whether the form makes these of x: the logits, and of the router's own logits the weights and, but for ties, the ids."""
    exact = x.double() @ weight.double().T
    near = (logits.double() - exact).abs().max() <= TOLERANCES[weight.dtype] * max(float(exact.abs().max()), 1e-6)
    ours, chosen = rows.choose(logits.contiguous(), *form)
    same = torch.equal(logits.gather(1, chosen), logits.gather(1, ids))
    return bool(near) and same and torch.allclose(ours.float(), weights.float(), rtol=TOLERANCES[form.dtype], atol=0)


def _forward(reference: Any, form: RouterForm, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits `[T, E]`, weights `[T, K]`, ids `[T, K]`)."""
    module = reference()
    weight = module.weight
    count = hidden_states.numel() // weight.shape[1]
    fits = 0 < count <= MOST_ROWS and hidden_states.dtype is weight.dtype and hidden_states.is_cpu and weight.is_cpu
    if not fits or torch.is_grad_enabled():
        return type(module).forward(module, hidden_states)
    logits = cpu.linear(hidden_states.reshape(count, -1), weight)
    return (logits, *rows.choose(logits, *form))
