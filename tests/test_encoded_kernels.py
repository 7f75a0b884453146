"""The CPU kernels on matrices as published checkpoints encode them, against float64 of the values that the encodings define."""

import ctypes
import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import reference
import torch
from encoded_parts import BLOCK_SCALES, RAW, WHOLE, encoded_experts, random_parts
from expert_records import DTYPES, FORMATS, FORMS, Batch, Experts, dequantised, on_every_set, rms, typical
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples

from vismoe.errors import ConfigError
from vismoe.formats.affine import GRIDS
from vismoe.formats.encodings import ENCODINGS, Encoding, Ggml
from vismoe.kernels import cpu, relay
from vismoe.kernels.gpu.experts import GpuKernel
from vismoe.kernels.library import function
from vismoe.kernels.restore import restore
from vismoe.types import Format

ONCE = [name for name in ENCODINGS if name not in ("awq", "gptq")]  # these lie as w4 does
MINIMA = ("w4", "awq", "gptq", "q4_1", "q5_1", "q4_k", "q5_k", "q2_k")  # values are differences
# AVX-512 BF16 or AMX multiplies these as they lie.
IN_ORDER = tuple("q4_k q5_k q6_k w4 awq gptq mxfp4 nvfp4 iq4_xs iq4_nl q4_0 q4_1 mxfp4_block fp8".split())
each_encoding = pytest.mark.parametrize("encoding", ONCE)


@pytest.fixture(params=cpu.available())
def isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


def tolerance(isa: str, dtype: torch.dtype) -> float:
    """Codes are exact: with bfloat16 inputs only the activation's result is rounded to 8 bits, or inputs to words."""
    if isa in ("avx2", "avx512") and dtype == torch.bfloat16:
        return 2e-4
    return 4e-3 if isa in ("avx512bf16", "amx") and dtype == torch.bfloat16 else 3e-6


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


# ------------------------------------------------------------------ right numbers
@each_encoding
@settings(max_examples=examples(4), deadline=None)
@given(
    down=st.sampled_from([*ONCE, *RAW]),
    sizes=st.tuples(st.integers(1, 330), st.integers(1, 330)),
    counts=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 64, 70]), min_size=1, max_size=3),
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    swapped=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_instruction_set_computes_what_the_oracle_does(
    encoding, down, sizes, counts, form, dtype, transposed, swapped, seed
):
    """Both matrices in any encodings, or one of them in 16 bits."""
    seeded(seed)
    kinds = (down, encoding) if swapped else (encoding, down)
    hidden, intermediate = (-(-size // (whole := WHOLE.get(kind, 32))) * whole for size, kind in zip(sizes, kinds))
    experts = encoded_experts(*kinds, hidden, intermediate, len(counts), form, transposed and not RAW.keys() & {*kinds})
    batch = Batch.of(counts, hidden, dtype)
    on_every_set(experts, batch, lambda isa: tolerance(isa, torch.float16 if "float16" in kinds else dtype))


def grouped(name: str, inputs: int, rows: int) -> tuple[Encoding | Format, dict[str, torch.Tensor]]:
    """An encoding with one scale for 128 inputs, of a type that the name may have behind a colon, and zeros where it has them."""
    name, _, scales = name.partition(":")
    if name not in ENCODINGS:
        grid = GRIDS[Format(name)]
        parts = {"codes": torch.randint(256, (rows, grid.row_bytes(inputs)), dtype=torch.uint8)}
        return Format(name), parts | {part: torch.rand(rows, grid.groups(inputs)).bfloat16() for part in ("scale", "offset")}
    encoding = ENCODINGS[name]
    parts = random_parts(encoding, rows, inputs)
    if scales:
        parts["scale"] = torch.rand(rows, inputs // 128).to(getattr(torch, scales))
    if name.startswith("w4"):
        parts["zero"] = torch.randint(17, parts["scale"].shape, dtype=torch.uint8)
    return encoding, parts


@pytest.mark.parametrize(
    "kind",
    [
        *ONCE,
        *(f"{name}:{scales}" for name in ("w4", "w8") for scales in ("bfloat16", "float16", "float32")),
        "int8",
        "int4",
        "int2",
    ],
)
def test_no_byte_behind_the_page_of_a_section_is_read(isa, kind):
    """Each section ends where readable memory does. Sections of scales have as many in a row as fill no vector, where the
    encoding allows it."""
    seeded(7)
    inputs, rows = 256 * 3 if WHOLE.get(kind, 32) == 256 else 128 * 5, 9
    encoding, parts = grouped(kind, inputs, rows)
    kept = {name: Guarded(part.contiguous().view(torch.uint8).flatten()) for name, part in parts.items()}
    guarded = {name: kept[name].bytes.view(part.dtype).view(part.shape) for name, part in parts.items()}
    x = torch.randn(20, inputs).bfloat16()
    for count, long in itertools.product((1, 3, 12, 13, 20), (False, True)):
        expected = cpu.encoded_linear(x[:count], encoding, parts, inputs, long=long)
        assert torch.equal(cpu.encoded_linear(x[:count], encoding, guarded, inputs, long=long), expected)


@each_encoding
def test_the_error_is_at_most_that_of_torch_in_bfloat16(isa, encoding):
    """torch computes with the weights that `restore` gives it; both against float64 on the encoding's own values."""
    seeded(2)
    experts, batch = encoded_experts(encoding, encoding, 512, 256, 2), Batch.of([32, 32], 512)
    oracle, rounded = batch.oracle(experts), []
    for slab in experts.slabs:
        record = torch.empty(experts.raw.record_bytes, dtype=torch.uint8)
        experts.codec.restore(slab, record)
        rounded.append(experts.raw.views(record))
    tokens, ones = torch.from_numpy(batch.tokens).long(), torch.ones(64)
    eager = reference.parts(experts.form, rounded, [0, 32, 64], tokens, ones, batch.hidden, torch.bfloat16).double()
    eager *= torch.from_numpy(batch.factors)[:, None]
    for parts in (batch.parts(experts), batch.in_a_prompt(experts), batch.in_a_prompt(experts, long=True)):
        assert rms(parts - oracle) <= 1.05 * rms(eager - oracle)


@pytest.mark.parametrize("encoding", [*IN_ORDER, "q8_0"])
@settings(max_examples=examples(8), deadline=None)
@given(
    spans=st.integers(2, 9),
    rows=st.sampled_from([1, 15, 16, 17, 47, 64, 200, 530]),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 12, 13, 16, 17, 40]),
    largest=st.sampled_from([1, 300, 1e20, 1e-20]),
    seed=st.integers(0, 2**31),
)
def test_rows_of_whole_spans_have_one_result_in_any_company(encoding, spans, rows, tokens, largest, seed):
    """Few tokens (up to 4 or 12) meet codes in registers, and more meet a tile: other rows, other tokens and the number of
    threads change no bit."""
    seeded(seed)
    kind, inputs = ENCODINGS[encoding], 256 * spans
    parts, x = random_parts(kind, rows, inputs), torch.randn(tokens, inputs)
    x[:, :: inputs // 8 + 1] *= largest  # others of their 128 are small beside it, or it is small beside them
    x = x.bfloat16()
    values, few = kind.values(parts, inputs).double(), {name: part[: -(-rows // 3)] for name, part in parts.items()}
    oracle, size = x.double() @ values.T, x.double().norm(dim=1)[:, None] * values.square().mean(dim=1).sqrt()
    for isa, long in itertools.product(cpu.available(), (False, True)):
        cpu.start(2, isa)
        linear = partial(cpu.encoded_linear, encoding=kind, inputs=inputs, long=long)
        together = linear(x, parts=parts)
        assert ((together - oracle).abs() <= 2**-8 * oracle.abs() + 1e-3 * size).all(), isa  # rounded once, to 8 bits
        assert torch.equal(linear(x, parts=few), together[:, : -(-rows // 3)]), isa
        for token in (0, tokens // 2, tokens - 1):
            assert torch.equal(linear(x[token : token + 1], parts=parts)[0], together[token]), isa
        cpu.start(1, isa)
        assert torch.equal(linear(x, parts=parts), together), isa
    cpu.start()


@pytest.mark.parametrize("form", ["qwen", "gpt-oss", "gelu"])  # two halves, gates and ups in turn, no gates
@pytest.mark.parametrize("kinds", [("q4_k", "w4"), ("mxfp4", "q5_k")])
def test_large_tasks_have_the_results_of_small_ones(isa, kinds, form):
    """One thread takes hundreds of rows at once, of more tokens than fit in one pass; each token alone gets the same bits."""
    seeded(6)
    experts, batch = encoded_experts(*kinds, 512, 2048, 2, form), Batch.of([70, 9], 512)
    at_once, oracle = batch.parts(experts), batch.oracle(experts)
    assert rms(at_once - oracle) <= tolerance(isa, torch.bfloat16) * max(typical(experts, batch), rms(oracle))
    cpu.start(1, isa)
    assert torch.equal(batch.parts(experts), at_once)
    for pair in (0, 33, 69, 70, 78):
        token, starts = batch.tokens[pair], np.array([0, pair < 70, 1], dtype=np.int32)
        alone = Batch(batch.hidden[token : token + 1], starts, np.zeros(1, np.int32), batch.factors[pair : pair + 1])
        assert torch.equal(alone.parts(experts)[0], at_once[pair])


def test_one_call_for_several_matrices_is_one_for_each(isa):
    """In encodings that a set multiplies as words, as bfloat16, and in both."""
    seeded(5)

    class Product(ctypes.Structure):
        _fields_ = [("matrix", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("out", ctypes.c_void_p)]

    kinds, inputs = ("mxfp4", "q5_k", "fp8", "iq4_xs", "q3_k", "q4_k", "q6_k", "mxfp4", "w4", "awq", "q2_k", "q4_k"), 768
    parts = [random_parts(ENCODINGS[kind], 96, inputs) for kind in kinds]
    outs = torch.empty(len(kinds), 3, 96, dtype=torch.bfloat16)
    matrices = [cpu.matrix_of(kind, each, inputs) for kind, each in zip(kinds, parts)]
    products = [Product(ctypes.addressof(m), base, out.data_ptr()) for (m, base), out in zip(matrices, outs)]
    number, size, place = ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p
    linears = function("vismoe_linears", [place, size, place, number, size, number], number)
    for _ in range(2):  # other inputs come to the same place
        x = torch.randn(3, inputs).bfloat16()
        call = (Product * len(kinds))(*products), len(kinds), x.data_ptr(), cpu.DTYPES.index(x.dtype), 3, 0
        assert linears()(*call) == 0
        for kind, each, out in zip(kinds, parts, outs):
            assert torch.equal(out, cpu.encoded_linear(x, ENCODINGS[kind], each, inputs)), kind


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_codes_and_scales_mean_what_the_encoding_says(isa, encoding):
    """One input is 1 and the others are 0, so a result is one weight: every code, scales of zero, denormal and not finite."""
    seeded(3)
    kind, rows, inputs = ENCODINGS[encoding], 8, 512
    parts = random_parts(kind, rows, inputs)
    scale = parts.get("scale")
    if encoding == "fp8":
        parts["codes"][:2] = torch.arange(256, dtype=torch.uint8).repeat(2)
    if isinstance(kind, Ggml):
        blocks = parts["codes"].view(rows, -1, kind.block_bytes)
        at = BLOCK_SCALES.get(encoding, (0,))[0]
        for row, value in enumerate((torch.inf, torch.nan, 0.0, 6e-8)):
            blocks[row + 2, 0, at : at + 2] = torch.tensor([value]).half().view(torch.uint8)
        if encoding == "mxfp4_block":
            blocks[2:6, 0, 0] = torch.tensor([0, 1, 2, 255])
    elif scale.dtype == torch.uint8:
        scale[2:6, 0] = torch.tensor([0, 1, 0x7F, 0xFF])  # of nvfp4 these are zero, a denormal and NaN
    else:
        scale[2:5, 0] = torch.tensor([torch.inf, torch.nan, 0.0]).to(scale.dtype)
    values = kind.values(parts, inputs)
    for dtype, long in itertools.product(DTYPES[::2], (False, True)):
        products = torch.eye(inputs).double() @ values.double().T  # of zero and infinity, too
        restored = long and isa != "portable" and (dtype == torch.float32 or isa == "avx512")  # weights, not sums, are scaled
        by_codes = "mxfp4" in encoding and not restored  # whose scales are finite where a value is not
        oracle = (values.T if by_codes else products).to(dtype)
        result = cpu.encoded_linear(torch.eye(inputs, dtype=dtype), kind, parts, inputs, long=long)
        assert torch.equal(result.isfinite(), oracle.isfinite()) and oracle.isfinite().any(0)[[0, 6, 7]].any()
        if encoding in MINIMA:
            close = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
            usual = oracle[:, 6:].abs().max()
            assert ((result - oracle)[oracle.isfinite()].abs() <= close * usual).all()
        else:
            assert torch.equal(result.nan_to_num(0, 0, 0), oracle.nan_to_num(0, 0, 0))


@each_encoding
def test_long_prompts_have_sums_of_their_own_where_lanes_gain(isa, encoding):
    """In the numbers before any is rounded to the type of hidden states. Sums of MXFP4 are exact in words, in any order."""
    seeded(5)
    experts, batch = encoded_experts(encoding, encoding, 512), Batch.of([40, 40, 40], 512)
    same = ("nvfp4", "nvfp4_divided", "q6_k", "q2_k", "q3_k", "mxfp4", "mxfp4_block")
    gains = {"avx2": encoding not in same, "avx512": True, "avx512bf16": True}
    for numbers, differs in ((batch.hidden, gains.get(isa, False)), (batch.hidden.float(), isa != "portable")):
        short, long = (dataclasses.replace(batch, hidden=numbers).in_a_prompt(experts, long) for long in (False, True))
        assert torch.equal(short, long) != differs


@pytest.mark.parametrize("kind", [*ENCODINGS, *FORMATS[1:]])
def test_a_linear_is_what_the_oracle_says(isa, kind):
    """For any number of rows, with and without bias."""
    seeded(4)
    sizes = ((1, 256, 67), (7, 512, 4), (70, 256, 33), (9, 4352, 3))
    for (rows, inputs, outputs), long in itertools.product(sizes, (False, True)):
        if kind in FORMATS:
            per_byte = {Format.INT8: 1, Format.INT4: 2, Format.INT2: 4}[kind]
            groups = inputs // (64 if kind is Format.INT2 else 128)
            parts = {"codes": torch.randint(256, (outputs, inputs // per_byte), dtype=torch.uint8)}
            parts |= {part: (torch.rand(outputs, groups) * 0.02).bfloat16() for part in ("scale", "offset")}
            encoding, values = kind, dequantised(kind, *parts.values(), inputs)
        else:
            encoding = ENCODINGS[kind]
            parts = random_parts(encoding, outputs, inputs)
            values = encoding.values(parts, inputs)
        for dtype in DTYPES:
            x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
            oracle, size = x.double() @ values.double().T, (x.double() ** 2 @ values.double().T ** 2).mean().sqrt()
            close = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            assert rms(cpu.encoded_linear(x, encoding, parts, inputs, None, long) - oracle) <= close * size
            result = cpu.encoded_linear(x, encoding, parts, inputs, bias, long)
            assert result.dtype == dtype and rms(result - oracle - bias) <= close * (size + 1)


# ------------------------------------------------------------------ what results do not depend on
@each_encoding
def test_a_result_depends_on_its_own_token_and_expert_only(isa, encoding):
    """Not on threads, on other experts in the call, or on the other tokens of the expert: the same bits, in prompts too."""
    seeded(5)
    hidden = 320 if WHOLE.get(encoding, 32) <= 32 else 512
    counts = [1, 70, 0, 2, 5, 64, 3, 4, 13]  # around what a block of tokens and a pass take
    experts, batch = encoded_experts(encoding, encoding, hidden, count=9), Batch.of(counts, hidden, tokens=80)
    together, prompts = batch.parts(experts), [batch.in_a_prompt(experts, long) for long in (False, True)]
    for threads in (1, 3):
        cpu.start(threads, isa)
        assert torch.equal(batch.parts(experts), together)
        for long in (False, True):
            assert torch.equal(batch.in_a_prompt(experts, long), prompts[long])
    for pair in (0, 1, 37, 70, 71, 73, 77, 78, 141, 142, 145, 149, 161):
        expert = int(np.searchsorted(batch.starts, pair, side="right")) - 1
        alone = torch.empty(1, hidden)
        records, starts = experts.records()[expert : expert + 1], np.array([0, 1], np.int32)
        token, factor = batch.tokens[pair : pair + 1], batch.factors[pair : pair + 1]
        experts.kernel.parts(records, starts, token, factor, batch.hidden, alone)
        assert torch.equal(alone[0], together[pair])
        for long in (False, True):
            call = records, starts, np.zeros(1, np.int32), factor, batch.hidden[token], alone.zero_()
            experts.kernel.parts(*call, adding=True, long=long)
            assert torch.equal(alone[0], prompts[long][pair])


@pytest.mark.parametrize("encodings", [("fp8", "fp8"), ("q4_k", "q6_k"), ("bfloat16", "nvfp4")], ids="/".join)
def test_experts_in_two_formats_in_one_call_are_those_of_calls_by_format(isa, encodings):
    seeded(6)
    precisions = [0, 1, 1, 0]
    kinds = [encoded_experts(*encodings, count=4), Experts.of(Format.INT4, hidden=256, intermediate=256, count=4)]
    experts, batch = Experts.mixed(kinds, precisions), Batch.of([5, 1, 70, 0], 256)
    of_pair = torch.from_numpy(np.repeat(precisions, np.diff(batch.starts)))
    for compute in (batch.parts, batch.in_a_prompt, partial(batch.in_a_prompt, long=True)):
        alone = torch.stack([compute(kind) for kind in kinds])
        assert torch.equal(compute(experts), alone[of_pair, torch.arange(76)])


# ------------------------------------------------------------------ refusals
def test_what_the_kernels_cannot_read_is_refused_with_a_reason():
    raw = encoded_experts("fp8", "bfloat16", transposed=True)
    found = cpu.ExpertKernel.of(Format.RAW, raw.raw, raw.codec.slab, raw.model_form)
    assert isinstance(found, str) and "[in, out]" in found
    half = encoded_experts("fp8", "float16")
    found = GpuKernel.of(Format.RAW, half.raw, half.codec.slab, half.model_form, torch.bfloat16)
    assert isinstance(found, str) and "raw weights are torch.float16, hidden states torch.bfloat16" in found
    for name, inputs, groups, why in (
        ("fp8", 256, 4, "4 scales of 64"),
        ("w4", 512, 32, "32 scales of 16"),
        ("fp8", 257, 2, "2 scales of 128"),
    ):
        with pytest.raises(ConfigError, match=why):
            codes = torch.zeros(4, ENCODINGS[name].row_bytes(inputs), dtype=torch.uint8)
            cpu.encoded_linear(torch.ones(1, inputs), ENCODINGS[name], {"codes": codes, "scale": torch.ones(4, groups)}, inputs)
    with pytest.raises(AssertionError, match="256 bytes"):
        cpu.encoded_linear(
            torch.ones(1, 256), ENCODINGS["fp8"], {"codes": torch.zeros(4, 96).byte(), "scale": torch.ones(4, 2)}, 256
        )


# ------------------------------------------------------------------ AWQ and GPTQ
@pytest.mark.parametrize("inputs, words", [(2, 3), (8, 1), (130, 17), (136, 16), (1000, 33)])
def test_codes_of_awq_and_gptq_are_laid_as_rows_of_outputs(inputs, words):
    def nibbles(qweight):
        return torch.stack([(qweight >> 4 * k).bitwise_and(15).byte() for k in range(8)], -1)

    def rows(codes):
        return codes.T[:, ::2] | codes.T[:, 1::2] << 4

    torch.manual_seed(7)
    qweight, into = torch.randint(-(2**31), 2**31, (inputs, words), dtype=torch.int32), torch.empty(8 * words, inputs // 2).byte()
    relay.relay_awq(qweight, into)
    assert torch.equal(into, rows(nibbles(qweight)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)))  # by output
    into = torch.empty(words, 4 * inputs, dtype=torch.uint8)
    relay.relay_gptq(qweight, into)
    assert torch.equal(into, rows(nibbles(qweight).transpose(1, 2).reshape(8 * inputs, words)))
    for call in (relay.relay_awq, relay.relay_gptq):
        for wrong in (into[:, :-1], into.int(), into.T):
            with pytest.raises(AssertionError):
                call(qweight, wrong)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_are_restored_bit_for_bit_as_with_torch(isa, encoding):
    """Random bytes: codes and scales of every kind, numbers that are not finite among them; [out, in] and [in, out]."""
    seeded(5)
    kind = ENCODINGS[encoding]
    for inputs in (WHOLE.get(encoding, 32) * 3, 512):
        parts = random_parts(kind, 70, inputs)
        if isinstance(kind, Ggml) or encoding == "fp8":
            parts["codes"] = torch.randint(256, parts["codes"].shape, dtype=torch.uint8)
        for dtype in DTYPES:
            expected, found = torch.empty(2, 70, inputs, dtype=dtype)
            transposed = torch.empty(inputs, 70, dtype=dtype)
            kind.restored(parts, inputs, expected)
            restore(kind, parts, found)
            restore(kind, parts, transposed.T)
            for made in (found, transposed.T):
                assert torch.equal(made.isnan(), expected.isnan())
                assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))
