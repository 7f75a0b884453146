"""Attention through transformers' attention interface: by the kernels where they can.

Where they cannot for one token on the CPU, grouped queries become rows of one head. transformers passes every query head with a
single row to torch and lets torch repeat the keys' heads, with which its bfloat16 attention takes nine times as long (1,880
against 210 us for 32 query heads, 4 key heads of 128 and 300 tokens, on two cores). The arithmetic is the same.
"""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from vismoe.kernels import cpu
from vismoe.kernels.attention import PROMPTS, Sequenced, attend, attend_prompt, takes, takes_prompt
from vismoe.kernels.gpu import attention as gpu_attention
from vismoe.models.family.components import OUR_ATTENTION, is_vision
from vismoe.models.moe.captured_pass import captured_pass
from vismoe.models.moe.rows import by_row, rows_mask

ASKS_FOR_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)|==\s*\S*_attn_implementation")


def grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """query `[B, heads, T, D]`, key and value `[B, key heads, S, D]` -> `[B, T, heads, D]`, as transformers' own function."""
    if query.shape[2] != 1 or not _plain(options):
        prompt = of_prompt(module, query, key, value, attention_mask, options)
        if prompt is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return prompt, None
    captured = captured_pass()
    if captured is not None and (attended := captured.attend(module, query, key, value, options)) is not None:
        return attended, None
    if attention_mask is None and not torch.is_grad_enabled() and gpu_attention.takes(query, key, value):
        return gpu_attention.attend(query, key, value, _scale(query, options)), None
    if query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    out = of_sequences(query, _sequences(key, value, attention_mask), options)
    if out is not None:
        return out, None
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows = query.reshape(len(query), key.shape[1], groups, query.shape[3])
    out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, scale=options.get("scaling"))
    return out.reshape(len(query), 1, query.shape[1], out.shape[3]), None


def of_sequences(query: torch.Tensor, sequences: Sequence[Sequenced], options: Mapping[str, Any]) -> torch.Tensor | None:
    """Attention `[B, 1, heads, D]` of one token `[B, heads, 1, D]` of each sequence by the kernels; None: they do not compute it.

    It has the bits of each sequence alone.
    """
    if torch.is_grad_enabled() or not _plain(options) or cpu.setup().isa == "portable" or not takes(query, sequences):
        return None
    return attend(query, sequences, _scale(query, options))


def of_prompt(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """Attention of several tokens by the kernels; None: they do not compute it."""
    if torch.is_grad_enabled() or not _plain(options):
        return None
    if not attends_prompts(query.device, query.dtype) or not takes_prompt(query, key, value, mask):
        return None
    given = options.get("is_causal")
    causal: bool = mask is None and (getattr(module, "is_causal", True) if given is None else given)
    if causal and query.shape[2] != key.shape[2]:
        return None  # torch's and ours differ in which tokens the keys belong to
    return attend_prompt(query, key, value, mask, causal, _scale(query, options))


def _scale(query: torch.Tensor, options: Mapping[str, Any]) -> float:
    scale: float | None = options.get("scaling")
    return query.shape[3] ** -0.5 if scale is None else scale


def _plain(options: Mapping[str, Any]) -> bool:
    """Whether it is softmax(scale query keys^T + mask) values."""
    get = options.get
    unlike = get("dropout") or get("softcap") or get("output_attentions")
    return not unlike and get("position_bias") is None and get("cache") is None


def _sequences(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> list[Sequenced]:
    if len(key) == 1:
        return [(key, value, mask)]
    masks = [None] * len(key) if mask is None else mask.expand(len(key), *mask.shape[1:]).split(1)
    return list(zip(key.split(1), value.split(1), masks, strict=True))


def group_queries(model: Any) -> str | None:
    """Make the decoder and a vision tower attend by `grouped_attention`; returns None, or the reason if they keep transformers'
    own function.

    Families whose code checks the implementation's name (for a sparse mask, for example) would behave differently under another
    name.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return f"attention is {config._attn_implementation}"
    modules = {type(module).__module__ for module in model.modules()}
    for name in sorted(modules):
        if name.startswith("transformers.models.") and ASKS_FOR_NAME.search(inspect.getsource(sys.modules[name])):
            return f"{name.rpartition('.')[2]} asks which attention is used"
    config._attn_implementation = OUR_ATTENTION
    for path, module in model.named_modules():
        own = module.__dict__.get("config")  # a projector's may be the whole model's
        if is_vision(path) and own is not None and own._attn_implementation == "sdpa" and not own.sub_configs:
            own._attn_implementation = OUR_ATTENTION
    return None


def attends_prompts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compute attention of several tokens here."""
    return device.type == "cpu" and dtype in PROMPTS and cpu.setup().isa != "portable"


AttentionInterface.register(OUR_ATTENTION, by_row(grouped_attention, of_sequences))
AttentionMaskInterface.register(OUR_ATTENTION, rows_mask)
