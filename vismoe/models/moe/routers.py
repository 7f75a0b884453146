"""Lets the kernels compute routers: on the CPU those of as many rows as linear layers, the product by the linears' kernel, and if
they know it the choice, too; on a GPU the choice behind torch's product, by one launch instead of eight.

A router whose choice is that of the largest softmax is computed in two calls. Any other runs its own code, in which the product
alone is ours: there `F.linear` and the router's weight are stand-ins, and casts of the weight, which torch would make for each
token, do nothing. Either is compared with what the router makes of some vectors; one that differs stays torch's. The change is a
`forward` on the module object.
"""

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vismoe.kernels import rows
from vismoe.kernels.gpu import rows as gpu_rows
from vismoe.lookahead.gate import biases_of
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.family.forms import wave
from vismoe.models.moe.linears import HALVES, product, served
from vismoe.models.moe.own_forward import give_forward, was_given, with_names
from vismoe.models.moe.row_kernels import alike

Router = Callable[..., Any]  # (module, hidden_states, ...) -> what the module returns
PROBE_ROWS, PROBE_LOGIT = 8, 4.0  # how many vectors, and their largest logit
TOLERANCE = 0.05  # of 16-bit logits of that size, and of weights that follow from them
ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def serve_routers(model: nn.Module) -> int:
    """Make the kernels compute the routers of the decoder's experts for as many rows as linears; returns how many these are."""
    return give_forward(_routers(model), _forward)


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, Router]]:
    for path, _ in expert_modules(model):
        block = model.get_submodule(path.rpartition(".")[0])
        for module in block.children() if not is_vision(path) else ():
            if "forward" in module.__dict__ or type(module) is nn.Linear:
                continue
            if (router := router_of(module, biases_of(block, module))) is not None:
                yield module, router


def router_of(module: nn.Module, biases: dict[str, torch.Tensor]) -> Router | None:
    """What computes the same as a router with the kernels; None for modules that are none, or differ. biases: the arguments
    beside the hidden states."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or weight.dtype not in HALVES or not weight.is_contiguous():
        return None
    on_gpu = weight.is_cuda
    if on_gpu:  # compared on the CPU
        weight, module = nn.Parameter(weight.detach().cpu(), requires_grad=False), copy.copy(module)
        module.__dict__["_parameters"] = {**module._parameters, "weight": weight}
    elif not weight.is_cpu:
        return None
    with torch.no_grad():
        rows = wave(PROBE_ROWS * weight.shape[1]).view(PROBE_ROWS, -1)
        largest = float((rows @ weight.float().T).abs().max())
        x = (rows * (PROBE_LOGIT / largest) if largest > 0 else rows).to(weight.dtype)
        try:
            made = _parts(type(module).forward(module, x, **biases))
            for router in _candidates(module, made):
                if on_gpu and router.func is not _largest_softmax:
                    continue
                if _agree(made, _parts(router(module, x, **biases))):
                    return router
        except ERRORS:
            pass
    return None


def chosen_by(module: nn.Module) -> tuple[int, bool, torch.dtype] | None:
    """(how many experts, whether their weights are normalised, the weights' type) of a served router of the largest softmax; None
    of any other module."""
    router = vars(module)["forward"].args[1] if was_given(module, _forward) else None
    return router.args if isinstance(router, partial) and router.func is _largest_softmax else None


def _candidates(module: nn.Module, made: list[torch.Tensor]) -> Iterator["partial[Any]"]:
    own: Any = type(module).forward
    alone = len(module._parameters) == 1 and not module._buffers and len(inspect.signature(own).parameters) == 2
    if alone and len(made) == 3:
        _, weights, ids = made
        if weights.dtype in rows.NUMBER_OF and weights.shape == ids.shape and 0 < ids.shape[-1] <= made[0].shape[-1]:
            for normalised in (True, False):
                yield partial(_largest_softmax, ids.shape[-1], normalised, weights.dtype)
    if isinstance(own, types.FunctionType):
        names = own.__globals__.items()
        stand_ins = {name: stand_in for name, value in names for real, stand_in in STAND_INS if value is real}
        yield partial(_own_code, with_names(own, stand_ins))


def _parts(made: Any) -> list[torch.Tensor]:
    parts = list(made) if isinstance(made, tuple) else [made]
    if not all(isinstance(part, torch.Tensor) and len(part) == PROBE_ROWS for part in parts):
        raise TypeError("a router returns a tensor of each row")
    return parts


def _agree(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
    """Whether these are the same numbers, but for rows (fewer than half) whose ids differ: rounding moves a tie. Chosen experts
    with equal logits may come in either order."""
    theirs, ours = _by_id(theirs), _by_id(ours)
    if [(part.shape, part.dtype) for part in theirs] != [(part.shape, part.dtype) for part in ours]:
        return False
    same = torch.ones(PROBE_ROWS, dtype=torch.bool)
    for their, our in zip(theirs, ours):
        if not their.is_floating_point():
            same &= (their == our).reshape(PROBE_ROWS, -1).all(-1)
    floats = [(their[same].float(), our[same].float()) for their, our in zip(theirs, ours) if their.is_floating_point()]
    near = all(torch.allclose(their, our, rtol=TOLERANCE, atol=TOLERANCE * float(their.abs().max())) for their, our in floats)
    return bool(same.sum() > PROBE_ROWS / 2) and near


def _by_id(made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits, weights and ids of a choice, in ascending ids; other results as they are."""
    if len(made) != 3 or made[1].shape != made[2].shape or made[2].is_floating_point():
        return made
    order = made[2].argsort(-1)
    return [made[0], *(part.gather(-1, order) for part in made[1:])]


# ------------------------------------------------------------------ the two ways
def _largest_softmax(top_k: int, normalised: bool, dtype: torch.dtype, module: Any, hidden_states: torch.Tensor) -> Any:
    """(logits `[T, E]`, weights `[T, K]`, ids `[T, K]`)."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    if flat.is_cuda:
        logits = functional.linear(flat, module.weight)
        return (logits, *gpu_rows.choose(logits, top_k, normalised, dtype))
    logits = product(flat, module.weight)
    return (logits, *rows.choose(logits, top_k, normalised, dtype))


def _own_code(own: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    return own(_StandIn(module), *args, **kwargs)


class _Weight:
    """Stands for a router's weight; its casts are not needed, since the kernels read it in its type."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.dtype = weight, weight.dtype

    def to(self, dtype: torch.dtype) -> "_Weight":
        return self

    type = to

    def float(self) -> "_Weight":
        return self


class _StandIn:
    """Stands for a router in its own code."""

    def __init__(self, module: Any):
        self._module, self.weight = module, _Weight(module.weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, _Weight):
        return functional.linear(x, weight, bias)
    return product(x.reshape(-1, x.shape[-1]), weight.weight, bias).view(*x.shape[:-1], -1)


_FUNCTIONAL = types.SimpleNamespace(**vars(functional) | {"linear": _linear})
STAND_INS = ((functional, _FUNCTIONAL), (nn, types.SimpleNamespace(**vars(nn) | {"functional": _FUNCTIONAL})))


def _forward(reference: Any, router: Router, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
    module = reference()
    weight = module.weight
    count = hidden_states.numel() // weight.shape[1]
    fits = (weight.is_cuda or served(count)) and alike(hidden_states, weight)
    if not fits or torch.is_grad_enabled():
        return type(module).forward(module, hidden_states, *more, **named)
    return router(module, hidden_states, *more, **named)
