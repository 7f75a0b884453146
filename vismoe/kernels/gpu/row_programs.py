"""The Triton programs of what a decoder computes row by row, which `rows` launches: root-mean-square norms, rotary embeddings and
routers' choices.

A program computes a few whole rows. The rows of a program do not meet, and a row is added up in an order that its length alone
decides, so its result depends on that row only. Importing this module needs Triton.
"""

import triton
import triton.language as tl

from vismoe.kernels.gpu.programs import _rounded


@triton.jit(do_not_specialize=["count"])
def norm(
    x, weight, out, count,
    COLUMNS: tl.constexpr, EPS: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out `[count, COLUMNS]` = x / sqrt(mean of its row's squares + EPS) * (UNIT + weight `[COLUMNS]`), in float32 and rounded
    once; without a weight that factor is 1. BN: a power of two >= COLUMNS. Grid (count / BM)."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    at = row.to(tl.int64)[:, None] * COLUMNS + n[None, :]
    ok = (row < count)[:, None] & (n < COLUMNS)[None, :]
    numbers = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, 1) * (1.0 / COLUMNS)
    numbers *= tl.rsqrt(mean + EPS)[:, None]
    if weight is not None:
        numbers *= (UNIT + tl.load(weight + n, mask=n < COLUMNS, other=0.0).to(tl.float32))[None, :]
    tl.store(out + at, _rounded(numbers, out.dtype.element_ty, INTERPRETED), mask=ok)


@triton.jit
def _product(a, b, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 `a * b` as it is in type `kind`."""
    return _rounded(a.to(tl.float32) * b.to(tl.float32), kind, INTERPRETED).to(tl.float32)


@triton.jit
def _turn(
    x, cos, sin, out, block, tokens,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One block of the rows of x `[tokens, HEADS, COLUMNS]`; as `rotate` has it."""
    HALF: tl.constexpr = TURNED // 2
    kind: tl.constexpr = x.dtype.element_ty
    row = block * BM + tl.arange(0, BM)
    there = (row < tokens * HEADS)[:, None]
    rows = row.to(tl.int64)[:, None] * COLUMNS
    n = tl.arange(0, BN)[None, :]
    ok = there & (n < HALF)
    angle = (row // HEADS).to(tl.int64)[:, None] * TURNED + n
    low, high = tl.load(x + rows + n, mask=ok), tl.load(x + rows + HALF + n, mask=ok)
    cos_low, cos_high = tl.load(cos + angle, mask=ok), tl.load(cos + angle + HALF, mask=ok)
    sin_low, sin_high = tl.load(sin + angle, mask=ok), tl.load(sin + angle + HALF, mask=ok)
    turned_low = _product(low, cos_low, kind, INTERPRETED) - _product(high, sin_low, kind, INTERPRETED)
    turned_high = _product(high, cos_high, kind, INTERPRETED) + _product(low, sin_high, kind, INTERPRETED)
    tl.store(out + rows + n, _rounded(turned_low, kind, INTERPRETED), mask=ok)
    tl.store(out + rows + HALF + n, _rounded(turned_high, kind, INTERPRETED), mask=ok)
    if TURNED < COLUMNS:
        n = TURNED + tl.arange(0, REST)[None, :]
        ok = there & (n < COLUMNS)
        tl.store(out + rows + n, tl.load(x + rows + n, mask=ok), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    queries, keys, cos, sin, turned_queries, turned_keys, tokens,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, REST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """turned_queries `[tokens, HEADS, COLUMNS]` and turned_keys `[tokens, KEY_HEADS, COLUMNS]` = the queries and keys turned by
    the angles `[tokens, TURNED]`; products and sums are rounded one by one. Numbers from TURNED on are copied.

    BN and REST: powers of two >= TURNED / 2 and COLUMNS - TURNED. Grid (blocks of BM rows of the queries, then of the keys).
    """
    block = tl.program_id(0)
    blocks = (tokens * HEADS + BM - 1) // BM
    if block < blocks:
        _turn(queries, cos, sin, turned_queries, block, tokens, HEADS, COLUMNS, TURNED, BM, BN, REST, INTERPRETED)
    else:
        _turn(keys, cos, sin, turned_keys, block - blocks, tokens, KEY_HEADS, COLUMNS, TURNED, BM, BN, REST, INTERPRETED)


@triton.jit
def choose(
    logits, weights, ids,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ids int64 `[T, CHOSEN]` of the largest logits `[T, EXPERTS]`, the largest first, of equal ones the lowest id, and weights
    `[T, CHOSEN]`: their softmax over all logits or, NORMALISED, over the chosen ones; float32, rounded once.

    BN and BK: powers of two >= EXPERTS and CHOSEN. Grid (T).
    """
    row = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BN), tl.arange(0, BK)
    values = tl.load(logits + row * EXPERTS + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    taken = tl.full((BN,), -(2**63), tl.int64)
    # Integers in the order of the choice, no two alike: whatever the logits, ids are different ones.
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (EXPERTS - 1 - e).to(tl.int64)
    keys = tl.where(e < EXPERTS, keys, taken)
    chosen = tl.full((BK,), float("-inf"), tl.float32)
    for i in range(CHOSEN):
        best = tl.max(keys, 0)
        tl.store(ids + row * CHOSEN + i, EXPERTS - 1 - (best & 0xFFFFFFFF))
        high = (best >> 32).to(tl.int32)
        chosen = tl.where(k == i, (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), chosen)
        keys = tl.where(keys == best, taken, keys)
    largest = tl.max(values, 0)
    likely = tl.exp(chosen - largest)
    total = tl.sum(likely, 0) if NORMALISED else tl.sum(tl.exp(values - largest), 0)
    tl.store(weights + row * CHOSEN + k, _rounded(likely / total, weights.dtype.element_ty, INTERPRETED), mask=k < CHOSEN)
