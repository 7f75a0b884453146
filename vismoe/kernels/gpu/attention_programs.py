"""The Triton programs of `attention`: parts of the attention of one new token, and their combination.

A program computes the part of one chunk of tokens, for up to ROWS heads that share keys. Products have 16 rows, for which
every GPU from compute capability 8.0 on has `mma.sync`: its order of additions does not depend on how the numbers came to the
program. Weights of tokens are powers of two: `scale` has log2(e) as a factor.

Importing this module needs Triton. Interpreted (TRITON_INTERPRET=1), it runs on the CPU.
"""

import triton
import triton.language as tl

from vismoe.kernels.gpu.programs import _dot, _rounded


@triton.jit
def _in_memory(memory, stored, token, column, TOKEN: tl.constexpr, COLUMNS: tl.constexpr):
    """`[tokens, columns]` of one group; 0 from token `stored` on, where nothing is read."""
    at = memory + token[:, None].to(tl.int64) * TOKEN + column[None, :]
    return tl.load(at, mask=(token < stored)[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _part(
    query, keys, values, new_key, new_value, stored, scale, parts,
    QUERY_HEAD: tl.constexpr, KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention over one chunk, not divided by the sum of its weights: each is 2 ** (score - largest score of the chunk).

    query and parts are those of the group's first head; keys, values, new_key and new_value those of the group.
    """
    kind = query.dtype.element_ty
    head = tl.program_id(1) % tl.cdiv(SHARED, ROWS) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    d, e = tl.arange(0, D), tl.arange(0, E)
    real = head < SHARED
    v = _in_memory(values, stored, token, e, VALUE_TOKEN, WIDE)  # first, so that it arrives while scores are computed
    q = tl.load(query + head[:, None] * QUERY_HEAD + d[None, :], mask=real[:, None] & (d < COLUMNS)[None, :], other=0.0)
    k = _in_memory(keys, stored, token, d, KEY_TOKEN, COLUMNS)
    there = token < stored
    if new_key is not None:
        new = token == stored
        there = there | new
        last_value = tl.load(new_value + e, mask=e < WIDE, other=0.0)
        k = tl.where(new[:, None], tl.load(new_key + d, mask=d < COLUMNS, other=0.0)[None, :], k)
    scores = _dot(q, tl.trans(k), tl.zeros((ROWS, CHUNK), tl.float32), INTERPRETED) * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores - largest[:, None])
    # In two numbers of 16 bits, which are as good as float32 here: rounded to one, weights add as much error as the result's
    # own rounding.
    high = _rounded(weights, kind, INTERPRETED)
    low = _rounded(weights - high.to(tl.float32), kind, INTERPRETED)
    if new_key is not None:
        v = tl.where(new[:, None], last_value[None, :], v)
    sums = _dot(high, v, _dot(low, v, tl.zeros((ROWS, E), tl.float32), INTERPRETED), INTERPRETED)
    tl.store(parts + head[:, None] * PART + e[None, :], sums, mask=real[:, None] & (e < WIDE)[None, :])
    tl.store(parts + head * PART + WIDE, largest, mask=real)
    tl.store(parts + head * PART + WIDE + 1, tl.sum(weights, 1), mask=real)


@triton.jit(do_not_specialize=["key_row", "key_head", "value_row", "value_head", "tokens"])
def attend(
    query, keys, values, key_row: tl.int64, key_head: tl.int64, value_row: tl.int64, value_head: tl.int64, tokens: tl.int64,
    scale, parts,
    QUERY_ROW: tl.constexpr, QUERY_HEAD: tl.constexpr, KEY_TOKEN: tl.constexpr, VALUE_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """parts float32 `[chunks, B, HEADS, PART]` of query `[B, HEADS, 1, COLUMNS]` with keys `[B, groups, tokens, COLUMNS]` and
    values `[B, groups, tokens, WIDE]`. Grid (chunks, groups * SHARED / ROWS, B)."""
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) // tl.cdiv(SHARED, ROWS)).to(tl.int64)
    first = group * SHARED
    keys = tl.multiple_of(keys + row * key_row + group * key_head, 16)
    values = tl.multiple_of(values + row * value_row + group * value_head, 16)
    _part(
        query + row * QUERY_ROW + first * QUERY_HEAD, keys, values, None, None, tokens, scale,
        parts + ((chunk * tl.num_programs(2) + row) * HEADS + first) * PART,
        QUERY_HEAD, KEY_TOKEN, VALUE_TOKEN, SHARED, COLUMNS, WIDE, D, E, PART, ROWS, CHUNK, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row"])
def attend_in_place(
    query, new_key, new_value, places, row: tl.int64, length, scale, parts,
    QUERY_HEAD: tl.constexpr, NEW_KEY_HEAD: tl.constexpr, NEW_VALUE_HEAD: tl.constexpr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """parts float32 `[chunks, HEADS, PART]` as `attend` makes them, over the tokens in memory and a new one, which is stored
    behind them. places int64 `[layers, 4]`, of whose `row`: addresses of keys and values, numbers from one head of each to the
    next. length int64 `[1]`: tokens in memory. Grid (most chunks, groups * SHARED / ROWS), of which those
    behind the new token do nothing.

    No program reads what another one stores: the new token's numbers are taken from `new_key` and `new_value`.
    """
    kind = query.dtype.element_ty
    stored, chunk = tl.load(length), tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) // tl.cdiv(SHARED, ROWS)).to(tl.int64)
    first = group * SHARED
    place = places + row * 4
    keys = tl.multiple_of(tl.load(place).to(tl.pointer_type(kind)) + group * tl.load(place + 2), 16)
    values = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(kind)) + group * tl.load(place + 3), 16)
    new_key += group * NEW_KEY_HEAD
    new_value += group * NEW_VALUE_HEAD
    if chunk * CHUNK <= stored:
        _part(
            query + first * QUERY_HEAD, keys, values, new_key, new_value, stored, scale, parts + (chunk * HEADS + first) * PART,
            QUERY_HEAD, COLUMNS, WIDE, SHARED, COLUMNS, WIDE, D, E, PART, ROWS, CHUNK, INTERPRETED,
        )  # fmt: skip
        if (chunk == stored // CHUNK) & (tl.program_id(1) % tl.cdiv(SHARED, ROWS) == 0):
            d, e = tl.arange(0, D), tl.arange(0, E)
            tl.store(keys + stored * COLUMNS + d, tl.load(new_key + d, mask=d < COLUMNS), mask=d < COLUMNS)
            tl.store(values + stored * WIDE + e, tl.load(new_value + e, mask=e < WIDE), mask=e < WIDE)


@triton.jit(do_not_specialize=["tokens"])
def combine(
    parts, tokens: tl.int64, length, out,
    HEADS: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out `[B, 1, HEADS, WIDE]` from parts float32 `[chunks, B, HEADS, PART]`, PARTS chunks at once, in ascending order. Grid
    (HEADS, B). length int64 `[1]`: tokens before the latest one; None: there are `tokens`, the latest one included."""
    if length is not None:
        tokens = tl.load(length) + 1
    chunks = (tokens + CHUNK - 1) // CHUNK
    row = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    e = tl.arange(0, E)
    ok = e < WIDE
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((E,), tl.float32)
    start = tl.zeros((), tl.int64)
    while start < chunks:
        chunk = start + tl.arange(0, PARTS)
        there = chunk < chunks
        at = parts + (chunk * (tl.num_programs(1) * HEADS) + row) * PART
        score = tl.load(at + WIDE, mask=there, other=float("-inf"))
        weight = tl.load(at + WIDE + 1, mask=there, other=0.0)
        part = tl.load(at[:, None] + e[None, :], mask=there[:, None] & ok[None, :], other=0.0)
        before, largest = largest, tl.maximum(largest, tl.max(score, 0))
        factor, kept = tl.exp2(score - largest), tl.exp2(before - largest)
        total = total * kept + tl.sum(weight * factor, 0)
        sums = sums * kept + tl.sum(part * factor[:, None], 0)
        start += PARTS
    tl.store(out + row * WIDE + e, _rounded(sums / total, out.dtype.element_ty, INTERPRETED), mask=ok)
