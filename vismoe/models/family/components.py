"""The component of a model that each tensor belongs to, by transformers' naming conventions; unknown tensors are `other`."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vismoe.models.family.families import expert_modules, expert_parameters

# (component, pattern over one dotted name); the first match wins
VISION = r"visual|vision\w*|vit\w*|image_encoder|resampler\w*|multi_modal_projector|mm_projector|embed_vision|aligner"
EMBEDDINGS = r"embed_tokens\w*|embeddings|wte|wpe|word_embeddings|embed_positions|tok_embeddings"
MIXERS = r"\w*attn\w*|\w*attention\w*|mixer|mamba\w*|conv\w*|kda|ssm|temporal_block"
COMPONENTS = tuple(
    (component, re.compile(pattern))
    for component, pattern in (
        ("vision tower", rf"(^|\.)({VISION})\."),
        ("audio tower", r"(^|\.)(audio\w*|embed_audio|talker|token2wav|code2wav|code_predictor)\."),
        ("lm head", r"(^|\.)(lm_head|output_projection|score)\."),
        ("embeddings", rf"(^|\.)({EMBEDDINGS})\."),
        ("dense and shared MLPs", r"\.shared_\w+\."),
        ("norms and routers", r"\.(gate|router|moe_statics)\.|\.(e_score_correction_bias|expert_bias)$"),
        ("attention", rf"\.(?!\w*norm)({MIXERS})\."),  # includes the norms inside it, not those around it
        ("norms and routers", r"(^|\.)\w*norm\w*\.|\.layer_scalar$"),
        ("dense and shared MLPs", r"\.(mlp|feed_forward|feedforward|ffn|moe|block_sparse_moe)\."),
    )
)
OTHER = "other"
OUR_ATTENTION = "vismoe_sdpa"  # what transformers calls it (moe/attention.py)


def component_of(name: str) -> str:
    """The component that owns the parameter or buffer `name`."""
    return next((component for component, pattern in COMPONENTS if pattern.search(name)), OTHER)


def is_vision(path: str) -> bool:
    """Whether the module at `path` is a vision tower or a part of one."""
    return component_of(f"{path}.") == "vision tower"


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another's memory -> that other's name. The dictionary is the model's own: to untie a weight
    before weights are loaded, take it out."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def pass_over(model: Any, patterns: Iterable[str]) -> None:
    """Have transformers' loader neither read tensors of a checkpoint whose names match, nor report them as unexpected."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def exactly(name: str) -> str:
    """A pattern of this name alone."""
    return f"^{re.escape(name)}$"


def backbone_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer except the routed experts' weights; tied ones once."""
    experts = {f"{path}.{name}" for path, module in expert_modules(model) for name in expert_parameters(module)}
    tied = tied_weights(model)
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name not in experts and name not in tied and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def backbone_bytes(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """(component, bytes) in a fixed order; the sum is that of `backbone_tensors`."""
    sums = dict.fromkeys([*dict.fromkeys(component for component, _ in COMPONENTS), OTHER], 0)
    for name, tensor in backbone_tensors(model):
        sums[component_of(name)] += tensor.numel() * tensor.element_size()
    return tuple((component, nbytes) for component, nbytes in sums.items() if nbytes)
