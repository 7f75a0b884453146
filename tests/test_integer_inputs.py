"""Inputs that AVX2, AVX-512 without BF16, and AMX round to integers of 16 bits: outliers, sizes far apart, and numbers that fit
in no scale; on every set."""

import itertools

import pytest
import reference
import torch
from encoded_parts import encoded_experts, random_parts
from expert_records import FORMS, Batch, Experts, dequantised, rms
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples

from vismoe.formats.affine import GRIDS
from vismoe.formats.encodings import ENCODINGS
from vismoe.kernels import cpu
from vismoe.types import Format

KINDS = (Format.INT8, Format.INT4, Format.INT2, "w8", "w4", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_xs")


@pytest.fixture(params=cpu.available())
def isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


def experts_of(kind, hidden, intermediate, form="qwen") -> tuple[Experts, list[dict[str, torch.Tensor]]]:
    """Experts, and the weights that torch has for them."""
    if isinstance(kind, Format):
        experts = Experts.of(kind, hidden=hidden, intermediate=intermediate, count=1, form=form)
        return experts, experts.weights
    experts = encoded_experts(kind, kind, hidden, intermediate, 1, form)
    record = torch.empty(experts.raw.record_bytes, dtype=torch.uint8)
    experts.codec.restore(experts.slabs[0], record)
    return experts, [experts.raw.views(record)]


def linear_of(rows: int, inputs: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix in int4, and its weights."""
    groups = GRIDS[Format.INT4].groups(inputs)
    parts = {"codes": torch.randint(256, (rows, GRIDS[Format.INT4].row_bytes(inputs)), dtype=torch.uint8)}
    parts |= {part: ((torch.rand(rows, groups) + 0.5) / 64).bfloat16() for part in ("scale", "offset")}
    return parts, dequantised(Format.INT4, *parts.values(), inputs)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(6), deadline=None)
@given(
    within=st.sampled_from([1.0, 30.0, 1000.0]),
    across=st.sampled_from([1.0, 1000.0]),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 2**31),
)
def test_rounded_inputs_keep_the_error_contract(kind, within, across, form, seed):
    """As near to float64 as torch is, with outliers among numbers that share a scale and beside them."""
    torch.manual_seed(seed)
    experts, weights = experts_of(kind, 512, 256, form)
    batch = Batch.of([32], 512)
    hidden = batch.hidden.float() / max(1.0, within * across / 100)
    hidden[:, torch.randint(128, (3,))] *= within
    hidden[:, 256:384] *= across
    batch = Batch(hidden.bfloat16(), batch.starts, batch.tokens, batch.factors)
    oracle = batch.oracle(experts)
    rounded = [{name: weight.bfloat16() for name, weight in each.items()} for each in weights]
    tokens, ones = torch.from_numpy(batch.tokens).long(), torch.ones(32)
    eager = reference.parts(experts.form, rounded, [0, 32], tokens, ones, batch.hidden, torch.bfloat16).double()
    eager *= torch.from_numpy(batch.factors)[:, None]
    for isa in cpu.available():
        cpu.start(2, isa)
        for parts in (batch.parts(experts), batch.in_a_prompt(experts, long=True)):
            assert rms(error := parts - oracle) <= 1.05 * rms(eager - oracle), (isa, rms(error))
    cpu.start()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("inputs", [1, 100, 130, 640])
def test_a_power_of_two_scales_results_to_the_bit(isa, inputs, long):
    """So every row has scales of its own, whatever its size."""
    torch.manual_seed(1)
    parts, _ = linear_of(9, inputs)
    x = torch.randn(5, inputs).bfloat16()
    result = cpu.encoded_linear(x, Format.INT4, parts, inputs, long=long)
    for power in (-80, -20, -1, 3, 40, 100):
        scaled = cpu.encoded_linear((x.double() * 2.0**power).bfloat16(), Format.INT4, parts, inputs, long=long)
        assert torch.equal(scaled, (result.double() * 2.0**power).bfloat16())
    if isa in ("avx512bf16", "amx"):
        return  # whose instructions make zeros of what is below 2^-126, minima times inputs, too
    weights = {part: numbers if part == "codes" else (numbers.double() * 2.0**-104).bfloat16() for part, numbers in parts.items()}
    scaled = cpu.encoded_linear((x.double() * 2.0**-20).bfloat16(), Format.INT4, weights, inputs, long=long)
    normal = result.abs() > 0.25
    assert torch.equal(scaled[normal], (result.double() * 2.0**-124).bfloat16()[normal])


@pytest.mark.parametrize("long", [False, True])
def test_units_of_very_different_sizes_stay_exact_and_finite(isa, long):
    """128 inputs that are far smaller or larger than those before them, or zero."""
    torch.manual_seed(2)
    parts, weights = linear_of(8, 1024)
    sizes = torch.tensor([[0, 120, -120, 0, 60, -100, -126, 0], [-126, -126, 0, 100, -30, 100, 0, 120]]).double()
    units = torch.randn(2, 8, 128).double() * 2.0 ** sizes[..., None]
    units[:, 3] = 0
    x = units.flatten(1).bfloat16()
    oracle = x.double() @ weights.double().T
    size = (x.double() ** 2 @ weights.double().T ** 2).sqrt()
    assert ((cpu.encoded_linear(x, Format.INT4, parts, 1024, long=long) - oracle).abs() <= 1e-2 * size + 1e-37).all()
    assert not cpu.encoded_linear(torch.zeros(2, 1024).bfloat16(), Format.INT4, parts, 1024, long=long).any()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("encoding", ["q4_k", "q6_k", "mxfp4", "w4", "w8", "fp8", "iq4_xs", "q4_1"])
def test_what_is_not_finite_poisons_its_own_row(isa, encoding, poison, long):
    """Wherever it stands: in the first or last of the units, before and behind zeros."""
    torch.manual_seed(3)
    parts, x = random_parts(ENCODINGS[encoding], 8, 512), torch.randn(6, 512).bfloat16()
    clean = cpu.encoded_linear(x, ENCODINGS[encoding], parts, 512, long=long)
    x[1, 0], x[3, 511], x[4, 200], x[4, 256:] = poison, poison, poison, 0
    poisoned = cpu.encoded_linear(x, ENCODINGS[encoding], parts, 512, long=long)
    theirs = torch.tensor([1, 3, 4])
    assert torch.equal(poisoned[[0, 2, 5]], clean[[0, 2, 5]])
    assert not poisoned[theirs].isfinite().all(1).any()


@pytest.mark.parametrize("tokens", [1, 3, 13])
@pytest.mark.parametrize(("kind", "scale", "least"), [("q6_k", slice(192, 208), -32 * -128), ("iq4_xs", slice(2, 8), -127 * -32)])
def test_the_largest_products_of_codes_and_their_scales_fit_in_a_sum(isa, kind, scale, least, tokens):
    """The lowest code times the lowest scale, with factor 1, everywhere: of K-quants these have the most bits."""
    encoding, rows, inputs = ENCODINGS[kind], 5, 512
    blocks = torch.zeros(rows * inputs // 256, encoding.block_bytes, dtype=torch.uint8)
    blocks[:, scale] = 0x80 if kind == "q6_k" else 0
    at = 208 if kind == "q6_k" else 0
    blocks[:, at : at + 2] = torch.ones(1).half().view(torch.uint8)
    parts = {"codes": blocks.view(rows, -1)}
    assert (encoding.values(parts, inputs) == least).all()
    largest = 255 / 128  # of which bfloat16 has all bits
    for sign, long in itertools.product((1, -1), (False, True)):
        x = torch.full((tokens, inputs), sign * largest).bfloat16()
        result = cpu.encoded_linear(x, encoding, parts, inputs, long=long)
        assert torch.equal(result, torch.full_like(result, sign * largest * least * inputs))


@pytest.mark.parametrize("following", [0.0, 2.0**-80])
@pytest.mark.parametrize("encoding", ["mxfp4", "mxfp4_block"])
def test_large_scales_and_small_inputs_stay_finite_where_codes_are_multiplied_as_they_lie(isa, encoding, following):
    """Weights near 2^127 and inputs near 2^-40, before others that are far smaller."""
    ways = {"avx2": (True,), "avx512": (True,)}.get(isa, (False, True))  # sums of words are in the scale of inputs there
    torch.manual_seed(4)
    kind, x = ENCODINGS[encoding], torch.zeros(3, 512)
    parts = random_parts(kind, 8, 512)
    if encoding == "mxfp4":
        parts["scale"].fill_(252)
    else:
        parts["codes"].view(8, -1, 17)[..., 0] = 252
    x[:, :128], x[:, 128:] = torch.randn(3, 128) * 2.0**-40, following
    x = x.bfloat16()
    oracle = x.double() @ kind.values(parts, 512).double().T
    for long in ways:  # of short prompts scales of weights have a limit on these sets (docs/exactness.md)
        assert (cpu.encoded_linear(x, kind, parts, 512, long=long) - oracle).abs().max() <= 1e-2 * rms(oracle)
