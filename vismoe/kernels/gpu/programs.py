"""The Triton programs: products of tokens with experts that lie in slabs, and ordered sums, which `experts` launches; and the
decoders of lossless records, which `lossless` launches.

A product's program computes one tile: up to BM pairs of one expert, times BN columns. The expert's record is found by its
address, so one launch serves experts anywhere in the pool. Weights are decoded in registers to the type of the inputs, as torch
restores them; products are summed in float32, along the inputs in one fixed order, whatever the shape of the tile. Nothing is
added by atomics. So the result of a pair depends on its token and its expert only. Tiles of less than 16 pairs are transposed:
the instruction that multiplies takes 16 rows from its left side, which weights can fill, and 8 columns from its right side.

A tile is described by three rows of `tiles` int64 `[3, n]`: the record's address, the tile's first pair, the number of its pairs.
Importing this module needs Triton. Interpreted (TRITON_INTERPRET=1), it runs on the CPU, in float32 where `tl.dot` would
misread bfloat16.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from vismoe.formats.encodings import E2M1, IQ4_NL

# Whether these are aligned decides nothing: one compilation suffices.
SMALL = ["places", "factors", "tiles", "sums_of", "ids", "records"]
LOAD_BYTES = tl.constexpr(32)  # of codes that hold one input per byte and lane (formats/affine.py)
SPAN = tl.constexpr(32)  # inputs of a checkpoint's encoding that are decoded at once: parts of all blocks begin there


def _packed(values: Sequence[float]) -> tl.constexpr:
    """Eight integers, as the bytes of one."""
    return tl.constexpr(int.from_bytes(bytes(int(value) & 255 for value in values), "little", signed=True))


E2M1_DOUBLED, E2M1_NEGATIVE = _packed([2 * value for value in E2M1]), _packed([-2 * value for value in E2M1])
IQ4_LOW, IQ4_HIGH = _packed(IQ4_NL[:8]), _packed(IQ4_NL[8:])


@triton.jit
def _inputs(x_rows, k, x_ok, INPUTS: tl.constexpr):
    return tl.load(x_rows[:, None] + k[None, :], mask=x_ok[:, None] & (k < INPUTS)[None, :], other=0.0)


@triton.jit
def _rounded(values, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 values in another type; the interpreter cuts bfloat16 off."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        values = (bits & -65536).to(tl.float32, bitcast=True)
    return values.to(kind)


@triton.jit
def _dot(a, b, sums, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums)


@triton.jit
def _added(x, w, sums, SWAPPED: tl.constexpr, INTERPRETED: tl.constexpr):
    """sums plus x `[BM, K]` times w, `[K, COLUMNS]`; swapped, w is `[COLUMNS, K]` and sums are `[COLUMNS, BM]`."""
    if SWAPPED:
        return _dot(w, tl.trans(x), sums, INTERPRETED)
    else:
        return _dot(x, w, sums, INTERPRETED)


@triton.jit
def _columns(values, SWAPPED: tl.constexpr):
    """Values of columns, as the tile of weights lies."""
    if SWAPPED:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def _rows(values, SWAPPED: tl.constexpr):
    """Values of inputs, as the tile of weights lies."""
    if SWAPPED:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def _of_group(numbers, r, group, known, GROUPS: tl.constexpr):
    """Float32 scales or offsets of one group of rows `r`, of bfloat16 `numbers`. Two are loaded where that is possible: loads of
    4 bytes are made ahead, those of 2 are waited for."""
    if GROUPS % 2 == 0:
        two = tl.load(numbers.to(tl.pointer_type(tl.int32)) + r * (GROUPS // 2) + group // 2, mask=known, other=0)
        return ((two >> (group % 2 * 16)) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(numbers.to(tl.pointer_type(tl.bfloat16)) + r * GROUPS + group, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _bytes(memory, at, ok):
    return tl.load(memory + at, mask=ok, other=0).to(tl.int32)


@triton.jit
def _signed(memory, at, ok):
    return ((_bytes(memory, at, ok) ^ 128) - 128).to(tl.float32)


@triton.jit
def _numbers(memory, at, ok, kind: tl.constexpr):
    """Float32 values of the numbers from this place on, of which one has the index `at`."""
    return tl.load(memory.to(tl.pointer_type(kind)) + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _of_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _in_table(code, low: tl.constexpr, high: tl.constexpr):
    """Float32 values of codes of 4 bits: of the eight bytes of `low`, then those of `high`."""
    byte = (tl.where(code < 8, low, high) >> (code % 8 * 8).to(tl.int64)).to(tl.int32) & 255
    return ((byte ^ 128) - 128).to(tl.float32)


@triton.jit
def _with_sign(value, negative):
    """By a product: a difference from zero would make zero positive."""
    return value * tl.where(negative, -1.0, 1.0)


@triton.jit
def _e4m3(code):
    magnitude = code & 127
    normal = _of_bits(tl.where(magnitude == 127, 0x7FC00000, (magnitude << 20) + (120 << 23)))
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # denormal: times 2^-9
    return _with_sign(value, code > 127)


@triton.jit
def _doubled(code):
    """Twice the value of a code of E2M1."""
    return _with_sign(_in_table(code & 7, E2M1_DOUBLED, E2M1_DOUBLED), code > 7)


@triton.jit
def _half_power(exponent):
    """2^(exponent - 128), of E8M0; down to the denormal 2^-128."""
    return _of_bits(tl.where(exponent < 2, 0x200000 << exponent % 2, (exponent - 1) << 23))


@triton.jit
def _in_blocks_of_32(codes, block, j, ok, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """As `_decoded`, of ggml's blocks of 32 inputs: 16 bytes at their end hold four bits of each."""
    nibble = block * 0
    if KIND != "q8_0":
        nibble = _bytes(codes, block + (BLOCK - 16) + j % 16, ok) >> j // 16 * 4 & 15
    if KIND == "q5_0" or KIND == "q5_1":
        nibble |= (_bytes(codes, block + (BLOCK - 20) + j // 8, ok) >> j % 8 & 1) << 4
    if KIND == "mxfp4_block":
        w = _half_power(_bytes(codes, block, ok)) * _in_table(nibble, E2M1_DOUBLED, E2M1_NEGATIVE)  # ggml's zero has one sign
    elif KIND == "q8_0":
        w = _numbers(codes, block // 2, ok, tl.float16) * _signed(codes, block + 2 + j, ok)
    elif KIND == "iq4_nl":
        w = _numbers(codes, block // 2, ok, tl.float16) * _in_table(nibble, IQ4_LOW, IQ4_HIGH)
    elif KIND == "q4_1" or KIND == "q5_1":
        w = _numbers(codes, block // 2, ok, tl.float16) * nibble.to(tl.float32) + _numbers(codes, block // 2 + 1, ok, tl.float16)
    else:
        tl.static_assert(KIND == "q4_0" or KIND == "q5_0")
        w = _numbers(codes, block // 2, ok, tl.float16) * (nibble - (8 if KIND == "q4_0" else 16)).to(tl.float32)
    return w


@triton.jit
def _in_blocks_of_256(codes, block, j, ok, s, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """As `_decoded`, of the part `s` of 32 inputs of ggml's blocks of 256."""
    sixteen = 2 * s + j // 16  # which part of 16 inputs
    if KIND == "q4_k" or KIND == "q5_k":
        low, high = _bytes(codes, block + 4 + s % 4, ok), _bytes(codes, block + 8 + s % 4, ok)
        both = _bytes(codes, block + 12 + s % 4, ok)
        scale = tl.where(s < 4, low & 63, (both & 15) | ((low >> 2) & 48)).to(tl.float32)
        minimum = tl.where(s < 4, high & 63, (both >> 4) | ((high >> 2) & 48)).to(tl.float32)
        code = _bytes(codes, block + (BLOCK - 128) + s // 2 * 32 + j, ok) >> s % 2 * 4 & 15
        if KIND == "q5_k":
            code |= (_bytes(codes, block + 16 + j, ok) >> s & 1) << 4
        d, dmin = _numbers(codes, block // 2, ok, tl.float16), _numbers(codes, block // 2 + 1, ok, tl.float16)
        w = d * scale * code.to(tl.float32) - dmin * minimum
    elif KIND == "q6_k":
        low = _bytes(codes, block + s // 4 * 64 + s % 2 * 32 + j, ok) >> s % 4 // 2 * 4 & 15
        high = _bytes(codes, block + 128 + s // 4 * 32 + j, ok) >> s % 4 * 2 & 3
        scale = _numbers(codes, block // 2 + 104, ok, tl.float16) * _signed(codes, block + 192 + sixteen, ok)
        w = scale * ((low | high << 4) - 32).to(tl.float32)
    elif KIND == "q2_k":
        code = _bytes(codes, block + 16 + s // 4 * 32 + j, ok) >> s % 4 * 2 & 3
        both = _bytes(codes, block + sixteen, ok)
        scale = _numbers(codes, block // 2 + 40, ok, tl.float16) * (both & 15).to(tl.float32)
        w = scale * code.to(tl.float32) - _numbers(codes, block // 2 + 41, ok, tl.float16) * (both >> 4).to(tl.float32)
    elif KIND == "q3_k":
        code = _bytes(codes, block + 32 + s // 4 * 32 + j, ok) >> s % 4 * 2 & 3
        code |= (_bytes(codes, block + j, ok) >> s & 1) << 2
        low = _bytes(codes, block + 96 + sixteen % 8, ok) >> sixteen // 8 * 4 & 15
        high = _bytes(codes, block + 104 + sixteen % 4, ok) >> sixteen // 4 * 2 & 3
        scale = _numbers(codes, block // 2 + 54, ok, tl.float16) * ((low | high << 4) - 32).to(tl.float32)
        w = scale * (code - 4).to(tl.float32)
    else:
        tl.static_assert(KIND == "iq4_xs")
        low = _bytes(codes, block + 4 + s // 2, ok) >> s % 2 * 4 & 15
        high = _bytes(codes, block + 2 + s // 4, ok) >> s % 4 * 2 & 3
        scale = _numbers(codes, block // 2, ok, tl.float16) * ((low | high << 4) - 32).to(tl.float32)
        w = scale * _in_table(_bytes(codes, block + 8 + s * 16 + j % 16, ok) >> j // 16 * 4 & 15, IQ4_LOW, IQ4_HIGH)
    return w


@triton.jit
def _decoded(
    record, r, j, ok, start,
    KIND: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr, OFFSET_AT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Float32 weights of the inputs start + j, with j below `SPAN`, of rows `r` in a checkpoint's encoding: what
    `Encoding.restored` rounds to the model's type (formats/encodings.py). r and ok are a column and j is a row, or the other way
    round."""
    memory = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 64)
    codes, row, group, there = memory + AT, r * ROW_BYTES, r * GROUPS + start // GROUP, ok & (start + j < INPUTS)
    if BLOCK > 64:
        w = _in_blocks_of_256(codes, row + start // 256 * BLOCK, j, ok, start // 32 % 8, KIND, BLOCK)
    elif BLOCK > 0:
        w = _in_blocks_of_32(codes, row + start // 32 * BLOCK, j, ok, KIND, BLOCK)
    elif KIND == "fp8":
        w = _e4m3(_bytes(codes, row + start + j, there)) * _numbers(memory + SCALE_AT, group, ok, SCALE_TYPE)
    elif KIND == "w8":
        w = _signed(codes, row + start + j, there) * _numbers(memory + SCALE_AT, group, ok, SCALE_TYPE)
    else:
        nibble = _bytes(codes, row + (start + j) // 2, there) >> (start + j) % 2 * 4 & 15
        if KIND == "mxfp4":
            w = _half_power(_bytes(memory + SCALE_AT, group, ok)) * _doubled(nibble)
        elif KIND == "nvfp4" or KIND == "nvfp4_divided":
            scale = _e4m3(_bytes(memory + SCALE_AT, r * GROUPS + (start + j) // 16, there))
            factor = _numbers(memory + OFFSET_AT, r, ok, tl.float32)
            w = 0.5 * _doubled(nibble) * (tl.div_rn(scale, factor) if KIND == "nvfp4_divided" else scale * factor)
        else:
            tl.static_assert(KIND == "w4" or KIND == "awq" or KIND == "gptq")
            zero = _bytes(memory + OFFSET_AT, group, ok).to(tl.float32) if OFFSET_AT >= 0 else 8.0
            w = (nibble.to(tl.float32) - zero) * _numbers(memory + SCALE_AT, group, ok, SCALE_TYPE)
            w = _rounded(w, SCALE_TYPE, INTERPRETED).to(tl.float32)
    return w


@triton.jit
def _product(
    record, x_rows, x_ok, r, r_ok,
    BITS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, OFFSET_AT: tl.constexpr, BIAS_AT: tl.constexpr, BIAS_TYPE: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, COLUMNS: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Float32 `[BM, COLUMNS]`, or `[COLUMNS, BM]` where BM is below 16: inputs at `x_rows` times rows `r` of the matrix, plus its
    bias."""
    kind = x_rows.dtype.element_ty
    SWAPPED: tl.constexpr = BM < 16
    sums = tl.zeros((COLUMNS, BM) if SWAPPED else (BM, COLUMNS), tl.float32)
    if BITS == 16:
        weights = tl.multiple_of(record.to(tl.pointer_type(kind)), 64) + AT // 2
        for start in range(0, INPUTS, BK):
            k = start + tl.arange(0, BK)
            if TRANSPOSED:
                at = _rows(k * ROWS, SWAPPED) + _columns(r, SWAPPED)
            else:
                at = _columns(r * INPUTS, SWAPPED) + _rows(k, SWAPPED)
            w = tl.load(weights + at, mask=_rows(k < INPUTS, SWAPPED) & _columns(r_ok, SWAPPED), other=0.0)
            sums = _added(_inputs(x_rows, k, x_ok, INPUTS), w, sums, SWAPPED, INTERPRETED)
    elif BITS == 0:
        j = tl.arange(0, SPAN)
        for start in range(0, INPUTS, SPAN):
            w = _decoded(
                record, _columns(r, SWAPPED), _rows(j, SWAPPED), _columns(r_ok, SWAPPED), start,
                KIND, BLOCK, AT, SCALE_AT, OFFSET_AT, SCALE_TYPE, INPUTS, ROW_BYTES, GROUPS, GROUP, INTERPRETED,
            )  # fmt: skip
            x = _inputs(x_rows, start + j, x_ok, INPUTS)
            sums = _added(x, _rounded(w, kind, INTERPRETED), sums, SWAPPED, INTERPRETED)
    else:
        LANES: tl.constexpr = 8 // BITS
        codes = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 64) + AT
        scales, offsets = tl.multiple_of(record + SCALE_AT, 16), tl.multiple_of(record + OFFSET_AT, 16)
        STEP: tl.constexpr = 64 if BITS > 2 else LOAD_BYTES  # bytes, whose inputs of one lane are in one group
        for start in range(0, ROW_BYTES, STEP):
            at = start + tl.arange(0, STEP)
            there = _rows(at < ROW_BYTES, SWAPPED) & _columns(r_ok, SWAPPED)
            bytes = tl.load(codes + (_columns(r * ROW_BYTES, SWAPPED) + _rows(at, SWAPPED)), mask=there, other=0).to(tl.uint32)
            for lane in tl.static_range(LANES):
                k = at // LOAD_BYTES * (LOAD_BYTES * LANES) + lane * LOAD_BYTES + at % LOAD_BYTES
                group = (start * LANES + lane * LOAD_BYTES) // GROUP
                known = r_ok & (group < GROUPS)
                scale = _columns(_of_group(scales, r, group, known, GROUPS), SWAPPED)
                offset = _columns(_of_group(offsets, r, group, known, GROUPS), SWAPPED)
                number = bytes ^ 0x80 if BITS == 8 else (bytes >> (lane * BITS)) & ((1 << BITS) - 1)
                code = (number | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))  # 2^23 + number
                w = code * scale + offset
                if kind == tl.float16:
                    w = tl.clamp(w, -65504.0, 65504.0)
                x = _inputs(x_rows, k, x_ok, INPUTS)
                sums = _added(x, _rounded(w, kind, INTERPRETED), sums, SWAPPED, INTERPRETED)
    if BIAS_AT >= 0:
        bias = tl.load((record + BIAS_AT).to(tl.pointer_type(BIAS_TYPE)) + r, mask=r_ok, other=0.0)
        sums += bias.to(tl.float32)[:, None] if SWAPPED else bias.to(tl.float32)[None, :]
    return sums


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activated(g, u, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """What an expert computes between its products; `types.Activation` has the formulas. LIMIT 0: none."""
    if LIMIT > 0 and (ACTIVATION == "silu" or ACTIVATION == "clamped_swiglu"):
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    if ACTIVATION == "silu":
        return g * _sigmoid(g) * u
    elif ACTIVATION == "gelu_tanh":
        return g * _sigmoid(2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g)) * u
    elif ACTIVATION == "gelu_erf":
        return 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif ACTIVATION == "relu_squared":
        positive = tl.where(g < 0, 0.0, g)
        return positive * positive * u
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        return g * _sigmoid(ALPHA * g) * (u + 1.0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=SMALL)
def up(
    x, places, tiles, count, activated,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, OFFSET_AT: tl.constexpr, BIAS_AT: tl.constexpr, BIAS_TYPE: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """activated `[P, WIDTH]` = activation(gate, up) of the pairs of each tile. x `[T, HIDDEN]`. places int32 `[P]`: the index of
    a pair among the `T * TOP_K` choices. Grid (tiles, WIDTH / BN)."""
    tile = tl.program_id(0)
    record = tl.load(tiles + tile)
    first = tl.load(tiles + count + tile)
    m = tl.arange(0, BM)
    m_ok = m < tl.load(tiles + 2 * count + tile)
    token = tl.load(places + first + m, mask=m_ok, other=0) // TOP_K
    GATED: tl.constexpr = GATE != "none"
    COLUMNS: tl.constexpr = BN * 2 if GATED else BN
    j = tl.arange(0, COLUMNS)
    n = tl.program_id(1) * BN + (j // 2 if GATED else j)
    if GATE == "concatenated":
        r = n + (j % 2) * WIDTH
    elif GATE == "interleaved":
        r = 2 * n + j % 2
    else:
        r = n
    sums = _product(
        record, x + token.to(tl.int64) * HIDDEN, m_ok, r, n < WIDTH,
        BITS, KIND, BLOCK, AT, SCALE_AT, SCALE_TYPE, OFFSET_AT, BIAS_AT, BIAS_TYPE, ROWS, INPUTS, ROW_BYTES, GROUPS, GROUP,
        TRANSPOSED,
        BM, COLUMNS, BK, INTERPRETED,
    )  # fmt: skip
    if BM < 16:
        sums = tl.trans(sums)
    if GATED:
        gate, linear = tl.split(tl.reshape(sums, (BM, BN, 2)))
        h = _activated(gate, linear, ACTIVATION, ALPHA, LIMIT)
    else:
        h = _activated(sums, 1.0, ACTIVATION, ALPHA, 0.0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    at = (first + m)[:, None] * WIDTH + column[None, :]
    h = _rounded(h, activated.dtype.element_ty, INTERPRETED)
    tl.store(activated + at, h, mask=m_ok[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=SMALL)
def down(
    activated, places, factors, tiles, count, parts,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, OFFSET_AT: tl.constexpr, BIAS_AT: tl.constexpr, BIAS_TYPE: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """parts float32 `[P, HIDDEN]` = routing weight * (down times activated). factors `[T * K]`, of any type. Grid (tiles,
    HIDDEN / BN)."""
    tile = tl.program_id(0)
    record = tl.load(tiles + tile)
    first = tl.load(tiles + count + tile)
    m = tl.arange(0, BM)
    m_ok = m < tl.load(tiles + 2 * count + tile)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = _product(
        record, activated + (first + m) * WIDTH, m_ok, n, n < HIDDEN,
        BITS, KIND, BLOCK, AT, SCALE_AT, SCALE_TYPE, OFFSET_AT, BIAS_AT, BIAS_TYPE, ROWS, INPUTS, ROW_BYTES, GROUPS, GROUP,
        TRANSPOSED,
        BM, BN, BK, INTERPRETED,
    )  # fmt: skip
    place = tl.load(places + first + m, mask=m_ok, other=0)
    weight = tl.load(factors + place, mask=m_ok, other=0.0).to(tl.float32)
    if BM < 16:
        sums = tl.trans(sums)
    at = (first + m)[:, None] * HIDDEN + n[None, :]
    tl.store(parts + at, sums * weight[:, None], mask=m_ok[:, None] & (n < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["count", "pairs"], do_not_specialize_on_alignment=SMALL)
def combine(
    parts, sums_of, count, out, below, tiles, pairs,
    HIDDEN: tl.constexpr, ADDING: tl.constexpr, BN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out `[T, HIDDEN]` = for each of `count` tokens the sum of its parts, in float32 and in the order of its pairs. Grid (count,
    HIDDEN / BN).

    ADDING: on top of what is there. sums_of int32: the tokens `[count]`, where the pairs of each start `[count + 1]`, the pairs.
    below float32 `[pairs, HIDDEN]` or None: the parts of pairs whose tile, as `arrange` makes them, is empty.
    """
    row = tl.program_id(0)
    token = tl.load(sums_of + row).to(tl.int64)
    start, end = tl.load(sums_of + count + row), tl.load(sums_of + count + row + 1)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = n < HIDDEN
    total = tl.zeros((BN,), tl.float32)
    if ADDING:
        total = tl.load(out + token * HIDDEN + n, mask=ok, other=0.0).to(tl.float32)
    i = start
    while i < end:
        pair = tl.load(sums_of + 2 * count + 1 + i).to(tl.int64)
        if below is None:
            total += tl.load(parts + pair * HIDDEN + n, mask=ok, other=0.0)
        else:
            here = tl.load(tiles + 2 * pairs + pair) > 0
            part = tl.load(parts + pair * HIDDEN + n, mask=ok & here, other=0.0)
            total += tl.where(here, part, tl.load(below + pair * HIDDEN + n, mask=ok & (here == 0), other=0.0))
        i += 1
    tl.store(out + token * HIDDEN + n, _rounded(total, out.dtype.element_ty, INTERPRETED), mask=ok)


@triton.jit(do_not_specialize=["tokens", "pairs"], do_not_specialize_on_alignment=SMALL)
def arrange(
    ids, addresses, slots, tiles, sums_of, tokens, pairs,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """tiles and sums_of for `up`, `down` and `combine`, from ids int64 `[tokens, TOP_K]` and the addresses int64 `[EXPERTS]` of a
    layer whose experts are all resident. Each pair is a tile, in the order of the choices.

    Ids below 0 or from EXPERTS on are sentinels: their tiles are empty, and no sum has them. A negative address is that of some
    other record: the pair is computed elsewhere; its tile is empty, and sums have it. PAIRS: a power of two > `pairs`. One
    program.

    slots int64 `[pairs]` or None: where records will have been decoded. A tile then has the address of the slot of the first pair
    with its expert, and a fourth row of `tiles` what `decode_many` shall read for each slot: 0 for those that no tile reads.
    """
    p = tl.arange(0, PAIRS)
    q = tl.arange(0, PAIRS)
    mine, other = tl.load(ids + p, mask=p < pairs, other=EXPERTS), tl.load(ids + q, mask=q < pairs, other=EXPERTS)
    real, real_other = (mine >= 0) & (mine < EXPERTS), (other >= 0) & (other < EXPERTS)
    record = tl.load(addresses + tl.where(real, mine, 0))
    here = real & (record >= 0)
    record = tl.abs(record)
    if slots is not None:
        first = tl.min(tl.where(other[None, :] == mine[:, None], q[None, :], PAIRS), 1)
        tl.store(tiles + 3 * pairs + p, tl.where(here & (first == p), record, 0), mask=p < pairs)
        record = tl.load(slots + first, mask=p < pairs, other=0)
    tl.store(tiles + p, record, mask=p < pairs)
    tl.store(tiles + pairs + p, p.to(tl.int64), mask=p < pairs)
    tl.store(tiles + 2 * pairs + p, here.to(tl.int64), mask=p < pairs)
    token, token_of_other = p // TOP_K, q // TOP_K
    before_in_row = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (q[None, :] < p[:, None]))
    earlier = (token_of_other[None, :] < token[:, None]) | ((token_of_other[None, :] == token[:, None]) & before_in_row)
    place = tl.sum((earlier & real_other[None, :]).to(tl.int32), 1)
    tl.store(sums_of + 2 * tokens + 1 + place, p, mask=real)
    starts = tl.sum(((token_of_other[None, :] < p[:, None]) & real_other[None, :]).to(tl.int32), 1)
    tl.store(sums_of + p, p, mask=p < tokens)
    tl.store(sums_of + tokens + p, starts, mask=p <= tokens)


@triton.jit
def _ones(bytes):
    """How many bits of each byte are set."""
    pairs = bytes - ((bytes >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F


@triton.jit
def _copy_words(source, out, nbytes, block):
    """One block of a section that is stored as it is."""
    at = block * 1024 + tl.arange(0, 1024)
    ok = at < (nbytes + 63) // 64 * 8
    words = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=ok)
    tl.store(out.to(tl.pointer_type(tl.int64)) + at, words, mask=ok)


@triton.jit
def _unpack(source, out, nbytes, escapes, block):
    """One block of a packed section with so many `escapes`."""
    blocks, chunks = (nbytes + 8191) // 8192, (nbytes + 127) // 128
    mantissas = source + (8 + 4 * blocks + 63) // 64 * 64
    codes = mantissas + chunks * 64
    table = source.to(tl.pointer_type(tl.int32))
    common, rare = tl.load(table), tl.load(table + 1)  # four exponents each; the last one belongs to no code
    before = tl.load((source + 8).to(tl.pointer_type(tl.uint32)) + block).to(tl.int64)
    row, i = tl.arange(0, 512), tl.arange(0, 8)[None, :]  # of eight weights, whose codes are a byte of each of three words
    chunk, byte = block * 64 + row // 8, row % 8
    there = chunk < chunks
    at = codes + chunk * 24 + byte
    low = tl.load(at, mask=there, other=0).to(tl.int32)
    middle = tl.load(at + 8, mask=there, other=0).to(tl.int32)
    high = tl.load(at + 16, mask=there, other=0).to(tl.int32)
    escaped = low & middle & high
    counts = _ones(escaped)
    before += tl.cumsum(counts, 0) - counts
    code = ((low[:, None] >> i) & 1) | (((middle[:, None] >> i) & 1) << 1) | (((high[:, None] >> i) & 1) << 2)
    rank = before[:, None] + _ones(escaped[:, None] & ((1 << i) - 1))
    exponent = (tl.where(code < 4, common, rare) >> ((code & 3) * 8)) & 0xFF
    escape = tl.load(codes + chunks * 24 + rank, mask=(code == 7) & (rank < escapes), other=0).to(tl.int32)
    exponent = tl.where(code == 7, escape, exponent)
    rest = tl.load(mantissas + (chunk * 64 + byte * 8)[:, None] + i, mask=there[:, None], other=0).to(tl.int32)
    word = ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)
    weight = chunk * 64 + byte % 2 * 32 + byte // 2 * 8
    inside = weight < (nbytes + 63) // 64 * 32
    tl.store(out.to(tl.pointer_type(tl.int16)) + weight[:, None] + i, word.to(tl.int16), mask=inside[:, None])


@triton.jit
def _decode_block(encoded, out, sections, block, SECTIONS: tl.constexpr):
    """One block, counted over all sections, of the record at `encoded` into that at `out`; both uint8, on 64 bytes.

    sections int64 `[3, SECTIONS]`: where each begins when decoded, its bytes, how many blocks are before it. What is left of a
    section's last 64 bytes is overwritten: no other section has a part of them.
    """
    s = 0
    for i in tl.static_range(1, SECTIONS):
        s += (block >= tl.load(sections + 2 * SECTIONS + i)).to(tl.int32)
    nbytes = tl.load(sections + SECTIONS + s)
    block -= tl.load(sections + 2 * SECTIONS + s)
    row = encoded.to(tl.pointer_type(tl.int64)) + 3 * (1 + s)  # kind, offset, escapes
    source = encoded + tl.multiple_of(tl.load(row + 1), 64)
    out += tl.multiple_of(tl.load(sections + s), 64)
    if tl.load(row) == 0:
        _copy_words(source, out, nbytes, block)
    else:
        _unpack(source, out, nbytes, tl.load(row + 2), block)


@triton.jit
def decode(encoded, slab, sections, SECTIONS: tl.constexpr):
    """slab uint8 = what the lossless record `encoded` uint8 holds; sections as `_decode_block` has them. Grid (blocks of all)."""
    _decode_block(encoded, slab, sections, tl.program_id(0).to(tl.int64), SECTIONS)


@triton.jit(do_not_specialize_on_alignment=SMALL)
def decode_many(records, ring, sections, SECTIONS: tl.constexpr, SLOT_BYTES: tl.constexpr):
    """Slot i of ring uint8 `[slots, SLOT_BYTES]` = what the lossless record at the address `records[i]` holds; 0: as it was.

    records int64 `[n]`; sections as `_decode_block` has them. Grid (blocks of all, n).
    """
    slot = tl.program_id(1).to(tl.int64)
    record = tl.load(records + slot)
    if record != 0:
        encoded = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 64)
        out = ring + tl.multiple_of(slot * SLOT_BYTES, 64)
        _decode_block(encoded, out, sections, tl.program_id(0).to(tl.int64), SECTIONS)
