"""Attention of the latest token of each sequence, over keys and values where they lie.

One call for any number of sequences, each with as many keys as it has; a sequence's result depends on that sequence only, not on
the number of threads. Sums are float32 and the result is rounded once.
"""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from vismoe.kernels import cpu
from vismoe.kernels.library import function
from vismoe.kernels.rows import NUMBER_OF

_SIZE, _PLACE, _NUMBER, _FLOAT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
_attend = function("vismoe_attend", [_PLACE, *[_SIZE] * 5, _FLOAT, _NUMBER, _NUMBER], _NUMBER)
MASKS = {**NUMBER_OF, torch.bool: 3}
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
            and (mask is None or _masks(mask, heads, keys.shape[2]))
            for keys, values, mask in sequences
        )
    )


def _reads(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_cpu and x.stride(3) == 1 and x.shape[3] % COLUMNS == 0


def _masks(mask: Tensor, heads: int, tokens: int) -> bool:
    shape = mask.shape
    fits = len(shape) == 4 and shape[0] == shape[2] == 1 and shape[1] in (1, heads) and shape[3] == tokens
    return fits and mask.dtype in MASKS and mask.is_cpu and (mask.stride(3) == 1 or tokens == 1)


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
