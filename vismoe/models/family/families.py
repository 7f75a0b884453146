"""Which modules hold routed experts, how many experts a token uses, and which families are refused.

Experts are found through transformers' experts interface (the attributes that its decorator sets), not by family; only families
that differ need a row here. A model whose experts VisMoE cannot page is refused, never run silently without VisMoE.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vismoe.errors import UnsupportedModelError

ON_INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts")
ROUTERS = ("gate", "router")
TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "topk")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_num", "num_moe_experts")


@dataclass(frozen=True)
class Refusal:
    """Why a family cannot run under VisMoE, and what its user can do."""

    reason: str
    instead: str


RESIDENT = "load it without VisMoE, or with device_map='auto', which moves whole layers"
REFUSED = {
    "jetmoe": Refusal("its attention consists of experts too, and its loops need sizes that only a real run shows", RESIDENT),
    "doge": Refusal("its experts are rows of an embedding, too small to page", RESIDENT),
    "switch_transformers": Refusal("its experts are separate modules in an encoder-decoder", RESIDENT),
    "nllb-moe": Refusal("its experts are separate modules in an encoder-decoder", RESIDENT),
    "qwen3_omni_moe": Refusal(
        "it chains a thinker, a talker and a voice, and has no forward pass of its own",
        "its thinker, which reads images and writes text: Qwen3OmniMoeThinkerForConditionalGeneration, from the same checkpoint",
    ),
    "openai_privacy_filter": Refusal("it classifies tokens in float32, and generates no text", RESIDENT),
}
# Eager experts sum a token's experts in the type of the hidden states, except these classes:
SUMS_IN_FLOAT32 = {"Inkling2Experts", "Inkling2LoopExperts"}
SUMS_IN_ROUTING_TYPE = {"NemotronHExperts"}  # in the type of the routing weights, usually float32


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`(path, module)` of every module on the experts interface, in model order, which numbers the MoE layers."""
    for path, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in ON_INTERFACE):
            yield path, module


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of experts: the module's own parameters with one row per expert, `{name: [E, ...]}`.

    Parameters of child modules (a norm after each expert) are shared by the experts and remain with the model.
    """
    return {name: p for name, p in module.named_parameters(recurse=False) if p.ndim and p.shape[0] == module.num_experts}


def top_k_of(model: nn.Module, path: str) -> int:
    """Experts per token at the experts module `path`: from its router, its block, or its configuration."""
    block = model.get_submodule(path.rpartition(".")[0])
    experts = model.get_submodule(path)
    routers = [getattr(block, name) for name in ROUTERS if hasattr(block, name)]
    for owner in (*routers, block, experts, experts.config):
        for name in TOP_K:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise UnsupportedModelError(
        f"{_family(model)}: the number of experts per token at {path} is unknown (none of {', '.join(TOP_K)} is set). "
        "Fix: set num_experts_per_tok in the checkpoint's config.json"
    )


def accumulator_dtype(module: nn.Module, hidden: torch.Tensor, routing_weights: torch.Tensor) -> torch.dtype:
    """The type in which eager sums a token's experts before casting the sum to the type of the hidden states."""
    name = type(module).__name__
    if name in SUMS_IN_FLOAT32:
        return torch.float32
    return routing_weights.dtype if name in SUMS_IN_ROUTING_TYPE else hidden.dtype


def unmark_quantized(model: nn.Module) -> None:
    """Remove transformers' marks of a quantized model: some families (jamba) would otherwise compute differently."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_is_quantized"):
            del config._is_quantized


def without_quantization(config: Any) -> Any:
    """A copy of a model's configuration that does not say how its checkpoint is quantised: the tensors say it, and transformers
    would warn of methods that it does not know."""
    config = copy.deepcopy(config)
    for part in configs(config):
        vars(part).pop("quantization_config", None)
    return config


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedModelError, with the family and an alternative, unless VisMoE can page all routed experts."""
    config = getattr(model, "config", None)
    paths = [path for path, _ in expert_modules(model)]
    foreign = _foreign_experts(model, paths)
    family = _family(model)
    row = REFUSED.get(family)
    if paths and not foreign and not row:
        return
    count = max((_expert_count(part) for part in configs(config)), default=0)
    if row and (paths or foreign or count > 1):
        raise UnsupportedModelError(f"{family}: {row.reason}. Instead: {row.instead}")
    if foreign:
        raise UnsupportedModelError(
            f"{family}: the experts at {foreign[0]} ({len(foreign)} modules) are not on transformers' experts interface, so they "
            f"cannot be paged. Instead: {RESIDENT}, or try a newer transformers"
        )
    if count > 1:
        raise UnsupportedModelError(
            f"{family}: its configuration has {count} experts, but none of its modules is on transformers' experts interface. "
            f"Instead: {RESIDENT}, or try a newer transformers"
        )
    raise UnsupportedModelError(f"{family} is a dense model: it has no routed experts to page. Instead: load it without VisMoE")


def _foreign_experts(model: nn.Module, on_interface: list[str]) -> list[str]:
    """Paths of modules that hold several experts but are not on the experts interface."""
    found: list[str] = []
    holders, around = set(on_interface), {above for path in on_interface for above in _paths_above(path)}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        inside = path in holders or not holders.isdisjoint(_paths_above(path))
        if inside or path in around or "shared" in name:  # shared experts are dense
            continue
        stacked = any(p.ndim == 3 and p.shape[0] > 1 for p in module.parameters(recurse=False))
        if name.endswith("experts") or (stacked and "expert" in type(module).__name__.lower()):
            found.append(path)
            holders.add(path)
    return found


def _paths_above(path: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`."""
    return [path[:at] for at, letter in enumerate(path) if letter == "."]


def _family(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)


def configs(config: Any) -> Iterator[Any]:
    """A configuration and its sub-configurations."""
    if config is None:
        return
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        yield from configs(getattr(config, name, None))


def positions_of(config: Any) -> int | None:
    """The longest context of a model in tokens, if its configuration gives one."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _expert_count(config: Any) -> int:
    counts = (getattr(config, name, None) for name in EXPERT_COUNTS)
    return max((count for count in counts if isinstance(count, int)), default=0)
