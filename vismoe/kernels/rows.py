"""What a decoder computes row by row beside its products: root-mean-square norms, rotary embeddings and routers' choices.

One call each, for any number of rows; a row's result depends on that row only. Numbers are bfloat16, float16 or float32 and
contiguous; sums are float32 and rounded once, but for the rotation, which rounds as torch's operations do and equals them bit for
bit.
"""

import ctypes

import torch
from torch import Tensor

from vismoe.kernels import cpu
from vismoe.kernels.library import function

_SIZE, _PLACE, _NUMBER, _FLOAT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
_norm = function("vismoe_norm", [*[_PLACE] * 3, _SIZE, _SIZE, _FLOAT, _FLOAT, _NUMBER, _PLACE, _PLACE], _NUMBER)
_rotate = function(
    "vismoe_rotate", [_PLACE, _SIZE, _PLACE, _PLACE, _SIZE, _PLACE, _PLACE, _PLACE, *[_SIZE] * 3, _NUMBER], _NUMBER
)
_choose = function("vismoe_choose", [_PLACE, _NUMBER, *[_SIZE] * 3, _NUMBER, _PLACE, _NUMBER, _PLACE], _NUMBER)
NUMBER_OF = {dtype: number for number, dtype in enumerate(cpu.DTYPES)}


def norm(x: Tensor, weight: Tensor | None, eps: float, unit: float = 0.0) -> Tensor:
    """x `[..., n]` / sqrt(mean of its squares + eps) * (unit + weight `[n]`), in the type of x, which is the weight's (Zhang and
    Sennrich 2019, equation 4). Without a weight, that factor is 1."""
    cpu.setup()
    columns = x.shape[-1]
    x = x.contiguous()
    if weight is not None:
        assert weight.dtype is x.dtype and weight.shape == (columns,) and weight.is_contiguous(), (weight.dtype, weight.shape)
    out = torch.empty_like(x)
    if x.numel():
        at = None if weight is None else weight.data_ptr()
        rows = x.numel() // columns
        cpu.refuse(_norm()(x.data_ptr(), at, out.data_ptr(), rows, columns, eps, unit, NUMBER_OF[x.dtype], None, None))
    return out


def rotate(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, heads, S, D]` and keys `[B, key heads, S, D]`, each token's heads side by side in memory, turned by the angles
    `[B, S, R]` of their tokens; R <= D, and the numbers from R on stay (Su et al. 2021, equation 34, with halves as pairs)."""
    cpu.setup()
    batch, query_heads, tokens, columns = queries.shape
    turned, key_heads = cos.shape[-1], keys.shape[1]
    assert keys.shape == (batch, key_heads, tokens, columns) and turned <= columns and turned % 2 == 0, (
        queries.shape,
        keys.shape,
    )
    assert cos.shape == sin.shape == (batch, tokens, turned) and cos.is_contiguous() and sin.is_contiguous(), cos.shape
    assert by_token(queries) and by_token(keys), (queries.stride(), keys.stride())
    assert queries.dtype is keys.dtype is cos.dtype is sin.dtype, (queries.dtype, keys.dtype, cos.dtype)
    out = torch.empty_like(queries), torch.empty_like(keys)
    if queries.numel():
        places = queries.data_ptr(), query_heads, out[0].data_ptr(), keys.data_ptr(), key_heads, out[1].data_ptr()
        angles = cos.data_ptr(), sin.data_ptr()
        cpu.refuse(_rotate()(*places, *angles, batch * tokens, columns, turned, NUMBER_OF[queries.dtype]))
    return out


def by_token(x: Tensor) -> bool:
    """Whether the heads of each token of `[B, heads, S, D]` lie side by side, without gaps."""
    return x.ndim == 4 and x.transpose(1, 2).is_contiguous()


def choose(logits: Tensor, count: int, normalised: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weights `[T, count]` in `dtype`, ids int64 `[T, count]`) of the largest logits `[T, E]`, the largest first, of equal ones
    the lowest id: their softmax over all logits, or with `normalised` over the chosen ones."""
    cpu.setup()
    rows, experts = logits.shape
    assert logits.is_contiguous() and 0 < count <= experts, (logits.stride(), count, experts)
    weights, ids = torch.empty(rows, count, dtype=dtype), torch.empty(rows, count, dtype=torch.int64)
    if rows:
        places = logits.data_ptr(), NUMBER_OF[logits.dtype], rows, experts, count, normalised
        cpu.refuse(_choose()(*places, weights.data_ptr(), NUMBER_OF[dtype], ids.data_ptr()))
    return weights, ids
