"""Lets the kernels compute the decoder's root-mean-square norms, on a CPU or a GPU: one call, where torch takes six operations.

A norm is known by its numbers: its module's output is compared with that of each known form. The result for a row does not depend
on the other rows, so it is ours for any number of them; it is rounded once, where many modules round twice. The change is a
`forward` on the module object.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from vismoe.kernels import cpu
from vismoe.models.family.components import is_vision
from vismoe.models.family.forms import wave
from vismoe.models.moe import row_kernels
from vismoe.models.moe.own_forward import give_forward, was_given

PROBE_SIZES = (1e-3, 1.0, 30.0)  # of rows: where eps weighs, and where it does not
MEMORIES = ("cpu", "cuda")  # whose kernels there are
TOLERANCE = 1e-5  # of float32; the forms differ by far more on the probe
MOST_EPS = 0.1


class NormForm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * (unit + weight)."""

    eps: float
    unit: float


def serve_norms(model: nn.Module) -> int:
    """Make the kernels compute the decoder's norms; returns how many these are."""
    return give_forward(_norms(model), _forward)


def served_form(module: nn.Module) -> NormForm | None:
    """The form by which the kernels compute this norm; None: they do not."""
    return vars(module)["forward"].args[1] if was_given(module, _forward) else None


def _norms(model: nn.Module) -> Iterator[tuple[nn.Module, NormForm]]:
    for path, module in model.named_modules():
        if "forward" not in module.__dict__ and not is_vision(path) and (form := norm_form(module)) is not None:
            yield module, form


def norm_form(module: nn.Module) -> NormForm | None:
    """The form of a module that is a root-mean-square norm over its last dimension, None of any other."""
    own, name = dict(module.named_parameters()), type(module).__name__
    weight = own.get("weight")
    alone = (
        len(own) == (weight is not None) and not any(True for _ in module.buffers()) and not any(True for _ in module.children())
    )
    if not alone or (weight is None and "norm" not in name.lower()) or len(_arguments(module)) != 1:
        return None
    if weight is not None and (weight.ndim != 1 or weight.device.type not in MEMORIES or weight.dtype not in cpu.DTYPES):
        return None
    near = None if weight is None else weight.detach().cpu()
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value <= MOST_EPS}
    for eps in sorted(epsilons):
        for unit in (0.0, 1.0) if weight is not None else (0.0,):
            if _acts_like(module, near, NormForm(eps, unit)):
                return NormForm(eps, unit)
    return None


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


@torch.no_grad()
def _acts_like(module: nn.Module, weight: torch.Tensor | None, form: NormForm) -> bool:
    """Whether the module computes the form: in float32 with weights of a wave, and in its own type, which must be that of its
    result. On the CPU, with its weight as it is there."""
    width = 64 if weight is None else weight.shape[0]
    rows = wave(4 * width).view(4, width)
    x = torch.stack([size * row for size, row in zip(PROBE_SIZES, rows)])
    twin, typed_twin = _with_weight(module, 0.5 + rows[3]), _with_weight(module, weight)
    factor = 1.0 if weight is None else form.unit + 0.5 + rows[3].double()
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + form.eps).rsqrt() * factor
    dtype = torch.bfloat16 if weight is None else weight.dtype
    try:
        result, typed = type(module).forward(twin, x.clone()), type(module).forward(typed_twin, x.to(dtype))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    if not isinstance(result, torch.Tensor) or not isinstance(typed, torch.Tensor) or typed.dtype is not dtype:
        return False
    return result.shape == x.shape and torch.allclose(result.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _with_weight(module: nn.Module, weight: torch.Tensor | None) -> nn.Module:
    """A copy of a module that has one parameter at most, with another weight in its place."""
    twin = copy.copy(module)
    if weight is not None and module._parameters.get("weight") is not None:
        twin.__dict__["_parameters"] = {"weight": nn.Parameter(weight)}
    return twin


def _forward(reference: Any, form: NormForm, x: torch.Tensor) -> torch.Tensor:
    module = reference()
    weight = module._parameters.get("weight")
    kernels = None if torch.is_grad_enabled() else row_kernels.kernels_of(x)
    if kernels is None or not (weight is None or row_kernels.alike(x, weight)):
        return type(module).forward(module, x)
    return kernels.norm(x, weight, *form)
