"""How an experts module uses its weights, found by inspecting the module instead of a table of families.

A form suffices to compute an expert outside the module (`kernels/cpu.py`) or to convert its matrices (`formats/`). The activation
is recognised by comparing the module's output with each known activation on numbers that distinguish them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vismoe.models.family.families import expert_modules
from vismoe.types import Activation, ExpertForm, ExpertInventory, Gate, RecordLayout

PROBE_WIDTH = 64
PROBE_SIZES = (12.0, 1000.0)  # scale of the probe: where activations bend, and beyond any limit
TOLERANCE = 1e-5  # of float32 activations; known ones differ from each other by more than 1e-3 somewhere on the probe


def form_of(module: Any, layout: RecordLayout) -> ExpertForm | str:
    """The form of one experts module; a string gives the reason if it is unknown."""
    name = type(module).__name__
    if hasattr(module, "page_expert"):
        return f"{name} has arithmetic of its own"
    if getattr(module, "has_post_expert_norm", False):
        return f"{name} normalises each expert's output"
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {section.name for section in layout.sections}
    if not {up, "down_proj"} <= names <= {up, "down_proj", f"{up}_bias", "down_proj_bias"}:
        return f"{name} has weights of an unknown kind: {', '.join(sorted(names))}"
    for form in _candidates(module, up):
        if _acts_like(module, form):
            return form
    return f"{name} has an activation other than {', '.join(Activation)}"


def forms_of(model: nn.Module, inventory: ExpertInventory) -> tuple[ExpertForm | str, ...]:
    """The form of each geometry; a sentence if its layers have none, or differ."""
    found: list[ExpertForm | str | None] = [None] * len(inventory.layouts)
    for layer, (_, module) in zip(inventory.layers, expert_modules(model), strict=True):
        known = found[layer.geometry]
        if isinstance(known, str) or (known is not None and _is_of_form(module, known)):
            continue
        form = form_of(module, inventory.raw_layouts[layer.geometry])
        found[layer.geometry] = form if known is None else f"{type(module).__name__} differs between layers"
    return tuple(form or "no layer has this geometry" for form in found)


def transposed_sections(model: nn.Module, inventory: ExpertInventory) -> tuple[frozenset[str], ...]:
    """Per geometry, the names of the matrices that the model stores as [in, out]."""
    found = [frozenset[str]()] * len(inventory.layouts)
    for layer, (_, module) in zip(inventory.layers, expert_modules(model), strict=True):
        own = getattr(module, "transposed_matrices", None)  # a family with its own arithmetic (adapters.py)
        matrices = [section.name for section in inventory.raw_layouts[layer.geometry].sections if len(section.shape) == 2]
        found[layer.geometry] = own if own is not None else frozenset(matrices if module.is_transposed else ())
    return tuple(found)


def _candidates(module: Any, up: str) -> Iterator[ExpertForm]:
    gates = (Gate.CONCATENATED, Gate.INTERLEAVED) if module.has_gate else (Gate.NONE,)
    alpha, limit = _number(module, "alpha"), _number(module, "limit")
    for gate, activation in itertools.product(gates, Activation):
        plain = ExpertForm(up, "down_proj", module.is_transposed, gate, activation)
        if activation is not Activation.CLAMPED_SWIGLU:
            yield plain
        if gate is Gate.NONE or limit is None:
            continue
        if activation is Activation.SILU:
            yield replace(plain, limit=limit)
        elif activation is Activation.CLAMPED_SWIGLU and alpha is not None:
            yield replace(plain, alpha=alpha, limit=limit)


def _number(module: Any, name: str) -> float | None:
    """A parameter of the activation, under one of its names in families."""
    values = (getattr(module, prefix + name, None) for prefix in ("", "swiglu_"))
    return next((float(value) for value in values if isinstance(value, float | int)), None)


def _is_of_form(module: Any, form: ExpertForm) -> bool:
    return any(candidate == form for candidate in _candidates(module, form.up)) and _acts_like(module, form)


@cache
def wave(count: int) -> torch.Tensor:
    """float32 `[count]` on the CPU, from -1 to 1, no two alike: modules and functions are compared on it. It must not be written
    to."""
    return torch.sin(torch.arange(count, dtype=torch.float32, device="cpu") * 2.3)


def _acts_like(module: Any, form: ExpertForm) -> bool:
    """Whether the module's activation equals that of the form, for small and large numbers in random order."""
    width = PROBE_WIDTH * (1 if form.gate is Gate.NONE else 2)
    with torch.no_grad(), torch.device("cpu"):
        product = torch.cat([size * wave(4 * width).view(4, width) for size in PROBE_SIZES])
        try:
            own = module._apply_gate(product.clone()) if module.has_gate else module.act_fn(product.clone())
        except (RuntimeError, NotImplementedError):  # an activation with weights, which are not loaded yet
            return False
        ours = activated(form, product)
        return own.shape == ours.shape and torch.allclose(own.float(), ours, rtol=TOLERANCE, atol=TOLERANCE)


def activated(form: ExpertForm, products: Tensor) -> Tensor:
    """The activation between the two products of an expert: `[n, 2I]` or, without a gate, `[n, I]` -> `[n, I]`."""
    half = products.shape[1] // 2
    gate, up = {
        Gate.NONE: (products, None),
        Gate.CONCATENATED: (products[:, :half], products[:, half:]),
        Gate.INTERLEAVED: (products[:, ::2], products[:, 1::2]),
    }[form.gate]
    if form.activation in (Activation.SILU, Activation.CLAMPED_SWIGLU):
        gate = gate.clamp(max=form.limit)
        up = None if up is None else up.clamp(-form.limit, form.limit)
    if form.activation is Activation.CLAMPED_SWIGLU:
        assert up is not None, "clamped_swiglu has a gate"
        return gate * torch.sigmoid(form.alpha * gate) * (up + 1)
    function = {
        Activation.SILU: functional.silu,
        Activation.GELU_TANH: lambda g: functional.gelu(g, approximate="tanh"),
        Activation.GELU_ERF: functional.gelu,
        Activation.RELU_SQUARED: lambda g: functional.relu(g).square(),
    }[form.activation]
    return function(gate) if up is None else function(gate) * up
