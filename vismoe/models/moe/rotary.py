"""Lets the kernels turn queries and keys by their positions, on a CPU or a GPU: one call, where torch takes sixteen operations.

The kernels round where torch does and give the same bits. Attention modules of transformers call a function of their file for it,
`apply_rotary_pos_emb`. Where that function equals the known form bit for bit, as tried on the CPU, the module object gets a
`forward` of the same code that calls ours instead.
"""

import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from vismoe.kernels import rows
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.components import is_vision
from vismoe.models.family.forms import wave
from vismoe.models.moe import row_kernels
from vismoe.models.moe.own_forward import give_forward, was_given, with_names

NAME = "apply_rotary_pos_emb"
RENAMING = "transformers.utils.deprecation"  # what wraps methods for older names of arguments, since 5.24 those of the cache
PROBE_TYPES = (torch.float32, torch.bfloat16)


def serve_rotations(model: nn.Module) -> int:
    """Make the kernels turn the queries and keys of the decoder; returns of how many attention modules."""
    return give_forward(_attentions(model), _forward)


def is_served(attention: nn.Module) -> bool:
    """Whether it is one of those that `serve_rotations` has found."""
    return was_given(attention, _forward)


def _attentions(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for path, module in model.named_modules():
        own: Any = type(module).forward
        while isinstance(own, types.FunctionType) and own.__globals__["__name__"] == RENAMING:
            own = own.__wrapped__  # type: ignore[attr-defined]  # functools.wraps leaves it
        if "forward" in module.__dict__ or is_vision(path) or not isinstance(own, types.FunctionType):
            continue
        turn = own.__globals__.get(NAME) if NAME in own.__code__.co_names else None
        if turn is not None and is_known(turn):
            yield module, with_names(own, {NAME: partial(_turned, turn)})


@cache
def is_known(turn: Callable[..., Any]) -> bool:
    """Whether the function equals `rows.rotate` bit for bit: with angles of all numbers, and of half of them if it takes such."""
    return _equals(turn, 16) is True and _equals(turn, 8) is not False


@torch.no_grad()
def _equals(turn: Callable[..., Any], turned: int) -> bool | None:
    """None: it does not take such angles."""
    numbers = wave(2 * 3 * 16 * 8)
    for dtype in PROBE_TYPES:
        queries, keys = (numbers[: 2 * 3 * n * 16].view(2, 3, n, 16).to(dtype).transpose(1, 2) for n in (4, 2))
        cos, sin = (numbers[first : first + 6 * turned].view(2, 3, turned).to(dtype).contiguous() for first in (5, 200))
        try:
            theirs = turn(queries, keys, cos, sin)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        ours = rows.rotate(queries, keys, cos, sin)
        typed = isinstance(theirs, tuple) and [part.dtype for part in theirs] == [dtype, dtype]
        if not typed or not all(map(torch.equal, theirs, ours)):
            return False
    return True


def _turned(turn: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The known form takes queries, keys, cosines and sines; some families call theirs otherwise, too."""
    kernels = None
    if not named and len(given) == 4 and not torch.is_grad_enabled() and _fits(*given):
        kernels = row_kernels.kernels_of(given[0])
    return turn(*given, **named) if kernels is None else kernels.rotate(*given)


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    alike = all(row_kernels.alike(q, other) for other in (k, cos, sin))
    if not alike or not rows.by_token(q) or not rows.by_token(k) or not cos.is_contiguous() or not sin.is_contiguous():
        return False
    angles = (q.shape[0], q.shape[2], cos.shape[-1])
    return cos.shape == angles and sin.shape == angles and angles[2] <= q.shape[3] == k.shape[3]


def _forward(reference: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    module = reference()
    older_name = CACHE not in kwargs and cache_in(kwargs) is not None
    return type(module).forward(module, *args, **kwargs) if older_name else forward(module, *args, **kwargs)
