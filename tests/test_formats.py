"""Raw and integer formats: sizes, the layout of codes bit by bit, error bounds, degenerate groups, refusals."""

import math

import pytest
import torch
from format_oracles import Affine
from half_quadratic import fit, round_to_nearest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.affine import GRIDS
from vismoe.kernels.codecs import codec_of
from vismoe.types import BLOCK_BYTES, Format, RecordLayout

INTEGERS = (Format.INT8, Format.INT4, Format.INT2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEVER = frozenset[str]()


def layout_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> RecordLayout:
    shapes = {"up": (rows, columns), "up_bias": (rows,)}
    return RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))


def record_of(layout: RecordLayout, seed: int = 0, spread: float = 0.02) -> torch.Tensor:
    """A record of Gaussian weights with an outlier here and there; its gaps are not zero."""
    random = torch.Generator().manual_seed(seed)
    record = torch.full((layout.record_bytes,), 0xAB, dtype=torch.uint8)
    for view in layout.views(record).values():
        weights = torch.randn(view.shape, generator=random) * spread
        weights[torch.rand(view.shape, generator=random) < 0.01] *= 10
        view.copy_(weights)
    return record


def restored_by(codec, record: torch.Tensor) -> torch.Tensor:
    encoded = codec.encode(record)
    slab = torch.full((codec.slab.record_bytes,), 0xCD, dtype=torch.uint8)
    codec.decode(encoded, slab)
    out = torch.full((codec.raw.record_bytes,), 0xEF, dtype=torch.uint8)
    codec.restore(slab, out)
    return out


def code_at(row: torch.Tensor, index: int, format: Format) -> int:
    """The centred code of input `index`, read from one row of bytes as docs/formats.md describes it."""
    data = row.tolist()
    if format is Format.INT8:
        return data[index] - 256 if data[index] > 127 else data[index]
    chunk, bits = (64, 4) if format is Format.INT4 else (128, 2)
    start, inside = divmod(index, chunk)
    lane, byte = divmod(inside, 32)
    return (data[start * 32 + byte] >> (lane * bits)) % 2**bits - 2 ** (bits - 1)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(INTEGERS), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99))
def test_restored_weights_are_what_the_documented_bits_say(shape, format, dtype, transposed, nearest, seed):
    layout = layout_of(*shape, dtype)
    codec = Affine(format, layout, frozenset({"up"} if transposed else ()), nearest)
    record = record_of(layout, seed)
    encoded, views = codec.encode(record), layout.views(restored_by(codec, record))
    matrix = views["up"].T if transposed else views["up"]
    parts, group = codec.slab.views(encoded), GRIDS[format].group_inputs
    for output in range(matrix.shape[0]):
        for index in range(matrix.shape[1]):
            scale, offset = (parts[f"up.{part}"][output, index // group].float() for part in ("scale", "offset"))
            expected = (code_at(parts["up.codes"][output], index, format) * scale + offset).to(dtype)
            assert torch.equal(matrix[output, index], expected)
        for index in range(matrix.shape[1], GRIDS[format].row_inputs(matrix.shape[1])):
            assert code_at(parts["up.codes"][output], index, format) == 0
    assert torch.equal(views["up_bias"], layout.views(record)["up_bias"])


@pytest.mark.parametrize("format", [Format.RAW, *INTEGERS])
def test_encoded_records_are_whole_blocks_with_nothing_left_from_the_input_in_their_gaps(format):
    layout = layout_of(3, 65, torch.bfloat16)
    codec = codec_of(format, layout, NEVER)
    encoded = codec.encode(record_of(layout))
    assert len(encoded) == codec.fixed_bytes == codec.most_bytes == codec.slab.record_bytes
    assert len(encoded) % BLOCK_BYTES == 0
    held = torch.zeros(len(encoded), dtype=torch.bool)
    for section in codec.slab.sections:
        assert section.offset_bytes % 64 == 0
        held[section.offset_bytes : section.offset_bytes + section.nbytes] = True
    assert not encoded[~held].any()


@pytest.mark.parametrize("format", [Format.RAW, *INTEGERS])
def test_restoring_leaves_the_gaps_of_a_record_alone_and_encoding_leaves_the_record_alone(format):
    layout = layout_of(3, 65, torch.bfloat16)
    record = record_of(layout)
    before = record.clone()
    out = restored_by(codec_of(format, layout, NEVER), record)
    assert torch.equal(record, before)
    up, bias = layout.sections
    assert set(out[up.offset_bytes + up.nbytes : bias.offset_bytes].tolist()) == {0xEF}
    if format is Format.RAW:
        assert all(torch.equal(a, b) for a, b in zip(layout.views(out).values(), layout.views(record).values()))


def test_sections_come_in_the_order_of_the_raw_layout_codes_then_scale_then_offset():
    slab = codec_of(Format.INT4, layout_of(6, 130, torch.float16), frozenset({"up"})).slab
    found = [(section.name, section.shape, section.dtype) for section in slab.sections]
    assert found == [
        ("up.codes", (130, 32), torch.uint8),
        ("up.scale", (130, 1), torch.bfloat16),
        ("up.offset", (130, 1), torch.bfloat16),
        ("up_bias", (6,), torch.float16),
    ]


@pytest.mark.parametrize(("format", "share"), [(Format.INT8, 0.516), (Format.INT4, 0.266), (Format.INT2, 0.156)])
def test_an_expert_of_the_30b_geometry_takes_its_share_of_16_bit(format, share):
    shapes = {"gate_up_proj": (1536, 2048), "down_proj": (2048, 768)}
    raw = RecordLayout.of(shapes, dict.fromkeys(shapes, torch.bfloat16))
    assert codec_of(format, raw, NEVER).fixed_bytes / raw.record_bytes == pytest.approx(share, abs=0.0005)


groups_of_any_kind = st.builds(
    lambda rows, inputs, seed, scale, shift: (
        torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 10.0**scale + shift
    ),
    st.integers(1, 4),
    st.integers(1, 130),
    st.integers(0, 999),
    st.integers(-30, 30),
    st.sampled_from((0.0, 1.0, -1e4)),
)


def values(quantised) -> torch.Tensor:
    return quantised.codes.double() * quantised.scale.double()[:, None] + quantised.offset.double()[:, None]


@settings(max_examples=150, deadline=None)
@given(groups_of_any_kind, st.sampled_from((8, 4, 2)))
def test_rounding_to_nearest_is_within_half_a_scale(groups, bits):
    quantised = round_to_nearest(groups, bits)
    slack = 1e-5 * (quantised.scale.double() + groups.double().abs().amax(1)) + 2.0**-90  # float32 sums; the smallest range
    assert ((values(quantised) - groups.double()).abs().amax(1) <= quantised.scale.double() / 2 + slack).all()


@settings(max_examples=150, deadline=None)
@given(groups_of_any_kind, st.sampled_from((8, 4, 2)))
def test_no_group_is_worse_fitted_than_rounded_to_nearest(groups, bits):
    fitted, nearest = ((values(how(groups, bits)) - groups.double()).square().sum(1).sqrt() for how in (fit, round_to_nearest))
    assert (fitted <= nearest * (1 + 1e-5) + 1e-6 * groups.double().abs().amax(1) + 2.0**-90).all()


@settings(max_examples=100, deadline=None)
@given(groups_of_any_kind, st.sampled_from((8, 4, 2)))
def test_scales_and_offsets_are_bfloat16_and_codes_are_in_range(groups, bits):
    for quantised in (fit(groups, bits), round_to_nearest(groups, bits)):
        for part in (quantised.scale, quantised.offset):
            assert torch.equal(part, part.bfloat16().float())
        assert torch.equal(quantised.codes, quantised.codes.round())
        assert -(2 ** (bits - 1)) <= quantised.codes.min() and quantised.codes.max() < 2 ** (bits - 1)
        assert (quantised.scale >= 0).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 130), st.integers(0, 999), st.sampled_from((8, 4, 2)), st.sampled_from((fit, round_to_nearest)))
def test_restored_groups_that_use_the_outer_codes_are_quantised_to_the_same(inputs, seed, bits, how):
    groups = torch.randn(8, inputs, generator=torch.Generator().manual_seed(seed)) * 0.02
    first = how(groups, bits)
    second = how(first.codes * first.scale[:, None] + first.offset[:, None], bits)
    outer = (first.codes.amin(1) == -(2 ** (bits - 1))) & (first.codes.amax(1) == 2 ** (bits - 1) - 1)
    assert torch.equal(first.codes[outer], second.codes[outer]) and torch.equal(first.scale[outer], second.scale[outer])
    # restoring rounds in float32 at the size of the weights, where an offset near zero has more digits
    off = (first.offset - second.offset).abs()
    assert (off <= torch.maximum(first.offset.abs() * 2**-8, groups.abs().amax(1) * 2**-20))[outer].all()


@pytest.mark.parametrize("bits", [2, 4])
def test_fitting_lowers_the_error_and_keeps_the_length_of_gaussian_weights(bits):
    groups = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    fitted, nearest = (values(how(groups, bits)) for how in (fit, round_to_nearest))
    errors = [(out - groups).norm() / groups.norm() for out in (fitted, nearest)]
    assert errors[0] < (0.8 if bits == 2 else 0.95) * errors[1]
    gain = (fitted * groups).sum() / groups.double().square().sum()
    assert gain == pytest.approx(1, abs=0.01)  # least squares alone: 0.89 at 2 bits


def test_a_few_outliers_do_not_take_the_codes_from_the_other_weights():
    groups = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    groups[:, 0] = 12.0
    fitted, nearest = ((values(how(groups, 4)) - groups)[:, 1:].square().mean() for how in (fit, round_to_nearest))
    assert fitted < nearest


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -0.375, 2.0**-120, 3.0e38, -65504.0, 1e-45])
def test_constant_groups_come_back_as_near_as_bfloat16_is(format, nearest, constant):
    layout = layout_of(2, 130)
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    layout.views(record)["up"].fill_(constant)
    out = layout.views(restored_by(Affine(format, layout, NEVER, nearest), record))["up"]
    assert ((out - constant).abs() <= abs(constant) * 2.0**-8 + 1e-40).all()
    if constant == torch.tensor(constant).bfloat16().item():
        assert (out == constant).all()


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_weights_of_a_type_stay_finite(format, dtype, nearest):
    layout = layout_of(2, 64, dtype)
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    most = torch.finfo(dtype).max
    layout.views(record)["up"].copy_(torch.tensor([most, -most, 0.0, most / 2]).repeat(2, 16))
    out = layout.views(restored_by(Affine(format, layout, NEVER, nearest), record))["up"]
    weights = layout.views(record)["up"]
    assert torch.isfinite(out).all()
    assert ((out.double() - weights.double()).abs() <= 0.35 * most).all()  # half a step of int2 over the whole range


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_weights_that_are_no_numbers_are_refused_by_the_name_of_their_section(format, bad):
    layout = layout_of(3, 70, torch.bfloat16)
    record = record_of(layout)
    layout.views(record)["up"][2, 69] = bad
    with pytest.raises(CheckpointError, match=r"^up: 1 weights are infinite or not a number"):
        codec_of(format, layout, NEVER).encode(record)


def test_types_without_an_integer_form_are_refused():
    with pytest.raises(ConfigError, match=r"section up is torch.float64"):
        codec_of(Format.INT4, layout_of(2, 8, torch.float64), NEVER)


@pytest.mark.parametrize("format", INTEGERS)
def test_the_bytes_do_not_depend_on_the_number_of_threads_or_on_the_other_rows(format):
    layout = layout_of(700, 400, torch.bfloat16)
    record, threads = record_of(layout), torch.get_num_threads()
    try:
        encoded = []
        for count in (1, 2):
            torch.set_num_threads(count)
            encoded.append(codec_of(format, layout, NEVER).encode(record))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*encoded)
    few = layout_of(5, 400, torch.bfloat16)
    part = torch.zeros(few.record_bytes, dtype=torch.uint8)
    few.views(part)["up"].copy_(layout.views(record)["up"][-5:])
    codec, whole = codec_of(format, few, NEVER), codec_of(format, layout, NEVER).slab.views(encoded[0])
    for name, section in codec.slab.views(codec.encode(part)).items():
        assert name == "up_bias" or torch.equal(section, whole[name][-5:])


@pytest.mark.parametrize("format", INTEGERS)
def test_a_transposed_matrix_is_stored_as_if_it_were_not(format):
    plain, turned = layout_of(70, 130, torch.bfloat16), layout_of(130, 70, torch.bfloat16)
    record, other = record_of(plain), torch.zeros(turned.record_bytes, dtype=torch.uint8)
    turned.views(other)["up"].copy_(plain.views(record)["up"].T)
    straight, across = codec_of(format, plain, NEVER), codec_of(format, turned, frozenset({"up"}))
    stored = (codec.slab.views(codec.encode(its)) for codec, its in ((straight, record), (across, other)))
    assert all(torch.equal(a, b) for (name, a), b in zip(next(stored).items(), next(stored).values()) if name != "up_bias")
    out = turned.views(restored_by(across, other))["up"]
    assert torch.equal(out.T, plain.views(restored_by(straight, record))["up"])


def test_a_slab_on_another_device_is_restored_there():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    layout = layout_of(70, 130, torch.bfloat16)
    codec, record = codec_of(Format.INT4, layout, NEVER), record_of(layout)
    out = torch.zeros(layout.record_bytes, dtype=torch.uint8, device="cuda")
    codec.restore(codec.encode(record).cuda(), out)
    there, here = (layout.views(its)["up"] for its in (out.cpu(), restored_by(codec, record)))
    assert torch.equal(there, here)
