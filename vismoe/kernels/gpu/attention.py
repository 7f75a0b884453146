"""Attention of the latest token of each sequence on a GPU, over keys and values where they lie; the programs are Triton's
(`attention_programs`).

Two launches: the first computes a part of the result for every CHUNK tokens of a sequence (Dao et al. 2023, Flash-Decoding), the
second combines the parts. Chunks begin at multiples of CHUNK whatever the number of tokens, the room behind them and the other
sequences, and nothing is added by atomics: a head's result depends on its query and its tokens only.

Sums, softmax and parts are float32; the result is rounded once. Triton is imported where it is first needed.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor

from vismoe.kernels.matrices import SIXTEEN_BITS

CHUNK = 64  # tokens of a part: few enough that 2,000 tokens of 4 groups occupy the 132 processors of an H100
ROWS = 16  # heads that share keys in one program: the fewest that a matrix instruction takes
PARTS = 32  # that are combined at once
MOST_COLUMNS = 256  # of a head
ALIGNED = 8  # numbers of 16 bytes, which are loaded at once
BEHIND = 4  # float32 behind the sums of a part: its largest score, its sum of weights, and two that align the next part
LOADING = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}  # fused or not would depend on the compiler


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend` computes these, on the CPU or a GPU; for a GPU, ask `experts.missing` first whether programs run there."""
    if not (query.is_cuda or (query.is_cpu and _interpreted())) or not query.ndim == keys.ndim == values.ndim == 4:
        return False
    batch, heads, new, columns = query.shape
    groups, tokens, wide = values.shape[1:]
    return (
        new == 1
        and query.dtype in SIXTEEN_BITS
        and keys.dtype is query.dtype is values.dtype
        and keys.device == query.device == values.device
        and keys.shape == (batch, groups, tokens, columns)
        and len(values) == batch
        and min(batch, groups, tokens, columns, wide) > 0
        and heads % groups == columns % ALIGNED == wide % ALIGNED == 0
        and max(columns, wide) <= MOST_COLUMNS
        and query.stride(3) == 1
        and _reads(keys)
        and _reads(values)
    )


def _reads(x: Tensor) -> bool:
    strides = (stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    return x.stride(3) == 1 and x.data_ptr() % (ALIGNED * x.element_size()) == 0 and not any(s % ALIGNED for s in strides)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`[B, 1, heads, E]` in the type of query `[B, heads, 1, D]`: softmax(scale query keys^T) values, with keys
    `[B, groups, S, D]` and values `[B, groups, S, E]`, each group of which `heads / groups` heads in a row share. `takes` says
    what is possible.

    B, S and the strides of the keys' and values' sequences and heads change from call to call without a program being compiled
    again.
    """
    programs, how = _programs()
    batch, heads, _, columns = query.shape
    groups, tokens, wide = values.shape[1:]
    sizes, chunks = _sizes(heads, groups, columns, wide), -(-tokens // CHUNK)
    query_row, query_head, _, _ = query.stride()
    key_row, key_head, key_token, _ = keys.stride()
    value_row, value_head, value_token, _ = values.stride()
    parts, out = _parts(query, chunks, sizes), query.new_empty(batch, 1, heads, wide)
    with torch.cuda.device_of(query):
        programs.attend[chunks, groups * -(-heads // groups // ROWS), batch](
            query, keys, values, key_row, key_head, value_row, value_head, tokens, scale * math.log2(math.e), parts,
            QUERY_ROW=query_row, QUERY_HEAD=query_head, KEY_TOKEN=key_token, VALUE_TOKEN=value_token, **sizes, **how,
        )  # fmt: skip
        _combine(programs, parts, tokens, None, out, how)
    return out


def attend_in_place(
    query: Tensor, new_key: Tensor, new_value: Tensor, places: Tensor, row: int, length: Tensor, most_tokens: int, scale: float
) -> Tensor:
    """`attend` for one sequence whose latest token is not stored yet: stores its key `[1, groups, 1, D]` and value
    `[1, groups, 1, E]` behind the `length` tokens that are, and returns `[1, 1, heads, E]` with the bits of `attend` over all.

    places int64 `[layers, 4]`, on the device; of its `row`: the addresses of the keys and of the values, multiples of 16 bytes;
    the numbers from one head to the next in each, multiples of 8. A token's numbers lie behind those of the one before it.
    length int64 `[1]`, on the device, is below `most_tokens`. The host does not read either, so a graph may hold the launches.
    """
    programs, how = _programs()
    batch, heads, _, columns = query.shape
    groups, wide = new_value.shape[1], new_value.shape[3]
    assert batch == 1 and heads % groups == columns % ALIGNED == wide % ALIGNED == 0, (query.shape, groups, wide)
    assert max(columns, wide) <= MOST_COLUMNS, (columns, wide)
    sizes, chunks = _sizes(heads, groups, columns, wide), -(-most_tokens // CHUNK)
    parts, out = _parts(query, chunks, sizes), query.new_empty(1, 1, heads, wide)
    with torch.cuda.device_of(query):
        programs.attend_in_place[chunks, groups * -(-heads // groups // ROWS)](
            query, new_key, new_value, places, row, length, scale * math.log2(math.e), parts,
            QUERY_HEAD=query.stride(1), NEW_KEY_HEAD=new_key.stride(1), NEW_VALUE_HEAD=new_value.stride(1), **sizes, **how,
        )  # fmt: skip
        _combine(programs, parts, 0, length, out, how)
    return out


def _sizes(heads: int, groups: int, columns: int, wide: int) -> dict[str, int]:
    """Constants of the programs that compute parts."""
    shared = heads // groups
    return {
        "HEADS": heads,
        "SHARED": shared,
        "COLUMNS": columns,
        "WIDE": wide,
        "D": _fitting(columns),
        "E": _fitting(wide),
        "PART": wide + BEHIND,
        "ROWS": ROWS,
        "CHUNK": CHUNK,
    }


def _fitting(columns: int) -> int:
    """The power of two that holds so many columns and is enough for a matrix instruction."""
    return max(16, 1 << (columns - 1).bit_length())


def _parts(query: Tensor, chunks: int, sizes: dict[str, int]) -> Tensor:
    """Float32 `[chunks, B, heads, PART]`: for each head WIDE sums, the largest score, the sum of weights, and two unused."""
    return torch.empty(chunks, *query.shape[:2], sizes["PART"], dtype=torch.float32, device=query.device)


def _combine(programs: Any, parts: Tensor, tokens: int, length: Tensor | None, out: Tensor, how: dict[str, Any]) -> None:
    batch, _, heads, wide = out.shape
    block = {"PART": wide + BEHIND, "E": _fitting(wide), "CHUNK": CHUNK, "PARTS": PARTS}
    programs.combine[heads, batch](parts, tokens, length, out, HEADS=heads, WIDE=wide, **block, **how)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _programs() -> tuple[Any, dict[str, Any]]:
    """(the programs, how to launch them)."""
    from vismoe.kernels.gpu import attention_programs

    return attention_programs, {"INTERPRETED": _interpreted(), **LOADING}
