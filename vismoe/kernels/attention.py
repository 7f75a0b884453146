"""Attention of the latest token of each sequence, and of prompts, over keys and values where they lie.

`attend` is one call for any number of sequences, each with as many keys as it has; a sequence's result depends on that sequence
only, not on the number of threads. Sums are float32 and the result is rounded once. `attend_prompt` computes consecutive tokens
of a sequence over blocks of keys at fixed places. In bfloat16, where the instruction set has products of it, weights are rounded
to bfloat16, as in torch; otherwise all is float32, and the result is rounded once.
"""

import ctypes
from array import array
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from vismoe.kernels import cpu
from vismoe.kernels.library import function
from vismoe.kernels.rows import NUMBER_OF

_SIZE, _PLACE, _NUMBER, _FLOAT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
_attend = function("vismoe_attend", [_PLACE, *[_SIZE] * 5, _FLOAT, _NUMBER, _NUMBER], _NUMBER)
_attend_prompt = function("vismoe_attend_prompt", [_PLACE], _NUMBER)
_STEPS = tuple((name, step) for name in ("query", "key", "value", "mask") for step in ("head", "token"))
MASKS = {**NUMBER_OF, torch.bool: 3}
PROMPTS = (torch.bfloat16, torch.float16)  # torch's sums of long heads in float32 are more precise than these
COLUMNS = 16  # of which the size of a head is a multiple
Sequenced = tuple[Tensor, Tensor, Tensor | None]  # keys [1, groups, S, D], values [1, groups, S, E], mask [1, 1 or heads, 1, S]


def takes(query: Tensor, sequences: Sequence[Sequenced]) -> bool:
    """Whether `attend` computes these: query `[B, heads, 1, D]`, and the keys, values and mask of each of B sequences."""
    batch, heads, tokens, columns = query.shape
    dtype, first = query.dtype, sequences[0]
    if batch != len(sequences) or tokens != 1 or dtype not in NUMBER_OF or not _reads(query):
        return False
    groups, wide = first[0].shape[1], first[1].shape[3]
    masks = {mask.dtype for _, _, mask in sequences if mask is not None}
    return (
        heads % groups == 0
        and len(masks) < 2
        and all(
            keys.shape == (1, groups, keys.shape[2], columns)
            and values.shape == (1, groups, keys.shape[2], wide)
            and keys.shape[2] > 0
            and keys.dtype is dtype is values.dtype
            and _reads(keys)
            and _reads(values)
            and (mask is None or _masks(mask, (1, heads, 1, keys.shape[2]), MASKS))
            for keys, values, mask in sequences
        )
    )


def _reads(x: Tensor) -> bool:
    return _places(x) and x.shape[3] % COLUMNS == 0


def _places(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_cpu and x.stride(3) == 1


def _masks(mask: Tensor, shape: tuple[int, int, int, int], dtypes: Collection[torch.dtype]) -> bool:
    fits = mask.ndim == 4 and mask.shape[3] == shape[3] and all(n in (1, wanted) for n, wanted in zip(mask.shape, shape))
    return fits and mask.dtype in dtypes and mask.is_cpu and (mask.stride(3) == 1 or shape[3] == 1)


class _Prompt(ctypes.Structure):
    """csrc/kernels.h: PromptAttention."""

    _fields_ = (
        *((name, _PLACE) for name in ("query", "keys", "values", "mask", "out")),
        *((name, _SIZE) for name in ("groups", "heads", "tokens", "all", "columns", "value_columns", "visible")),
        *((f"{name}_{step}", _SIZE) for name, step in _STEPS),
        ("scale", _FLOAT),
        ("dtype", _NUMBER),
    )


def attend(query: Tensor, sequences: Sequence[Sequenced], scale: float) -> Tensor:
    """`[B, 1, heads, E]` in the type of query `[B, heads, 1, D]`: softmax(scale query keys^T + mask) values of each sequence, its
    heads in groups of equal size that share keys (Vaswani et al. 2017, equation 1). What a mask of bool hides counts for nothing;
    where it hides all, the result is 0. `takes` says what is possible."""
    cpu.setup()
    batch, heads, _, columns = query.shape
    groups, wide, masked = sequences[0][0].shape[1], sequences[0][1].shape[3], 0
    out = query.new_empty(batch, 1, heads, wide)
    query_at, (query_row, query_head, _, _), size = query.data_ptr(), query.stride(), query.element_size()
    rows = array("q")
    for b, (keys, values, mask) in enumerate(sequences):
        masked = masked if mask is None else MASKS[mask.dtype]
        _, key_head, key_token, _ = keys.stride()
        _, value_head, value_token, _ = values.stride()
        rows.extend(
            (
                query_at + b * query_row * size,
                keys.data_ptr(),
                values.data_ptr(),
                0 if mask is None else mask.data_ptr(),
                out.data_ptr() + b * heads * wide * size,
                keys.shape[2],
                *(query_head, key_head, key_token, value_head, value_token),
                0 if mask is None or mask.shape[1] == 1 else mask.stride(1),
            )
        )
    sizes = batch, groups, heads // groups, columns, wide
    cpu.refuse(_attend()(rows.buffer_info()[0], *sizes, scale, NUMBER_OF[query.dtype], masked))
    return out


def takes_prompt(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend_prompt` computes this."""
    dtype = query.dtype
    if dtype not in PROMPTS or any(x.dtype is not dtype or not _places(x) for x in (query, keys, values)):
        return False
    batch, heads, tokens, columns = query.shape
    groups, count = keys.shape[1:3]
    return (
        0 < batch == len(keys)
        and keys.shape[3] == columns
        and values.shape[:3] == keys.shape[:3]
        and tokens > 0 < count
        and heads % groups == 0
        and (mask is None or _masks(mask, (batch, heads, tokens, count), {torch.bool}))
    )


def attend_prompt(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """`[B, T, heads, E]` of queries `[B, heads, T, D]`, keys `[B, groups, S, D]` and values `[B, groups, S, E]`, in 16 bits.

    mask: bool `[1 or B, 1 or heads, 1 or T, S]`. causal: of the keys, the last T are those of the tokens, each of which sees none
    behind its own; no more tokens than keys. A token's result has the same bits however many tokens are computed at once, and
    whatever follows them, as long as the first key is the same. `takes_prompt` says what is possible.
    """
    cpu.setup()
    batch, heads, tokens, columns = query.shape
    groups, count, wide = keys.shape[1], keys.shape[2], values.shape[3]
    out = query.new_empty(batch, tokens, heads, wide)
    masks = None if mask is None else mask.expand(batch, heads, tokens, count)
    visible = count - tokens + 1 if causal else count
    assert visible > 0, "more tokens than keys"
    for b in range(batch):
        of_mask = (0, 0) if masks is None else masks[b].stride()[:2]
        steps = *query[b].stride()[:2], *keys[b].stride()[:2], *values[b].stride()[:2], *of_mask
        places = (None if x is None else x[b].data_ptr() for x in (query, keys, values, masks, out))
        sizes = groups, heads // groups, tokens, count, columns, wide, visible
        cpu.refuse(_attend_prompt()(ctypes.byref(_Prompt(*places, *sizes, *steps, scale, NUMBER_OF[query.dtype]))))
    return out
