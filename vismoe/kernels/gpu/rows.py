"""What a decoder computes row by row beside its products, on a GPU: `kernels.rows` has the same for the CPU. One launch each.

A row's result depends on that row only, not on how many there are. Numbers are bfloat16, float16 or float32; sums are float32 and
rounded once, but for the rotation, which rounds as torch's operations do and equals them bit for bit.

Each of these is computed hundreds of times per token, so what can be found once is kept. Triton is imported by the first call.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor

from vismoe.kernels.rows import by_token

NUMBERS = 512  # that the rows of one program have, unless a single row has more
FEWEST_WARPS, MOST_WARPS, NUMBERS_PER_WARP = 4, 16, 1024
ALIGNED_BYTES = 16  # Triton compiles programs apart for memory that begins elsewhere, which might add up in another order


def norm(x: Tensor, weight: Tensor | None, eps: float, unit: float = 0.0) -> Tensor:
    """x `[..., n]` / sqrt(mean of its squares + eps) * (unit + weight `[n]`), in the type of x, which is the weight's (Zhang and
    Sennrich 2019, equation 4). Without a weight, that factor is 1."""
    columns = x.shape[-1]
    x = x.contiguous()
    if x.data_ptr() % ALIGNED_BYTES:
        x = x.clone()
    if weight is not None:
        assert weight.dtype is x.dtype and weight.shape == (columns,) and weight.is_contiguous(), (weight.dtype, weight.shape)
    out = torch.empty_like(x)
    if x.numel():
        count = x.numel() // columns
        rows, constants = norm_constants(columns, eps, unit)
        with torch.cuda.device_of(x):
            _programs().norm[(-(-count // rows),)](x, weight, out, count, **constants)
    return out


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, heads, S, D]` and keys `[B, key heads, S, D]`, each token's heads side by side in memory, turned by the angles
    `[B, S, R]` of their tokens; R <= D, and the numbers from R on stay (Su et al. 2021, equation 34, with halves as pairs)."""
    batch, heads, tokens, columns = queries.shape
    key_heads, turned = keys.shape[1], cos.shape[-1]
    assert keys.shape == (batch, key_heads, tokens, columns) and 0 < turned <= columns and turned % 2 == 0, (
        queries.shape,
        keys.shape,
    )
    assert cos.shape == sin.shape == (batch, tokens, turned) and cos.is_contiguous() and sin.is_contiguous(), cos.shape
    assert by_token(queries) and by_token(keys), (queries.stride(), keys.stride())
    assert queries.dtype is keys.dtype is cos.dtype is sin.dtype, (queries.dtype, keys.dtype, cos.dtype)
    turned_queries, turned_keys = torch.empty_like(queries), torch.empty_like(keys)
    if count := batch * tokens:
        rows, constants = rotate_constants(heads, key_heads, columns, turned)
        grid = (-(-count * heads // rows) - (-count * key_heads // rows),)
        with torch.cuda.device_of(queries):
            _programs().rotate[grid](queries, keys, cos, sin, turned_queries, turned_keys, count, **constants)
    return turned_queries, turned_keys


def choose(logits: Tensor, count: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weights `[T, count]` in `dtype`, ids int64 `[T, count]`) of the largest logits `[T, E]`, the largest first, of equal ones
    the lowest id: their softmax over all logits, or with `normalised` over the chosen ones. No id comes twice, NaN or not."""
    rows, experts = logits.shape
    assert logits.is_contiguous() and 0 < count <= experts, (logits.stride(), count, experts)
    weights = torch.empty(rows, count, dtype=dtype, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _programs().choose[(rows,)](logits, weights, ids, **choose_constants(experts, count, normalised))
    return weights, ids


@functools.cache
def norm_constants(columns: int, eps: float, unit: float) -> tuple[int, dict[str, Any]]:
    """(rows of a program, what else its launch says)."""
    rows, padded = _block(columns)
    return rows, {"COLUMNS": columns, "EPS": eps, "UNIT": unit, "BM": rows, "BN": padded, **_how(padded)}


@functools.cache
def rotate_constants(heads: int, key_heads: int, columns: int, turned: int) -> tuple[int, dict[str, Any]]:
    """(rows of a program, what else its launch says)."""
    rows, padded = _block(turned // 2)
    shape = {"HEADS": heads, "KEY_HEADS": key_heads, "COLUMNS": columns, "TURNED": turned}
    return rows, {**shape, "BM": rows, "BN": padded, "REST": _power_of_two(columns - turned), **_how(padded)}


@functools.cache
def choose_constants(experts: int, count: int, normalised: bool) -> dict[str, Any]:
    """What else its launch says."""
    shape = {"EXPERTS": experts, "CHOSEN": count, "NORMALISED": normalised}
    return {**shape, "BN": _power_of_two(experts), "BK": _power_of_two(count), **_how(experts), "num_warps": 1}


def _block(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program for rows of so many numbers; powers of two."""
    padded = _power_of_two(columns)
    return max(1, NUMBERS // padded), padded


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _how(columns: int) -> dict[str, Any]:
    """Fused multiplications and additions would round otherwise than torch."""
    warps = min(max(columns // NUMBERS_PER_WARP, FEWEST_WARPS), MOST_WARPS)
    return {"INTERPRETED": os.environ.get("TRITON_INTERPRET") == "1", "num_warps": warps, "enable_fp_fusion": False}


@functools.cache
def _programs() -> Any:
    from vismoe.kernels.gpu import row_programs

    return row_programs
