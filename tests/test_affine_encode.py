"""Encoding in C++ against the torch oracle: the same codes, scales and offsets, but for ties that the order of sums decides."""

import pytest
import torch
from format_oracles import Affine
from hypothesis import given
from hypothesis import strategies as st

from vismoe.errors import CheckpointError, ConfigError
from vismoe.kernels import affine as kernels
from vismoe.kernels.affine import FastAffine
from vismoe.kernels.cpu import available
from vismoe.types import Format, RecordLayout

INTEGERS = [Format.INT8, Format.INT4, Format.INT2]
ROWS = 32


def layout(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> RecordLayout:
    shapes = {"up_proj": (outputs, inputs), "down_proj": (inputs, outputs), "up_proj_bias": (outputs,)}
    return RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))


def record_of(raw: RecordLayout, seed: int, power: int = 1, size: float = 0.02) -> torch.Tensor:
    """Weights with tails that get heavier with `power`, an odd number."""
    generator = torch.Generator().manual_seed(seed)
    record = torch.zeros(raw.record_bytes, dtype=torch.uint8)
    for view in raw.views(record).values():
        view.copy_(torch.randn(view.shape, generator=generator) ** power * size)
    return record


def errors(codec: Affine, encoded: torch.Tensor, record: torch.Tensor) -> torch.Tensor:
    """Sums of squared errors of each section, float64."""
    restored = torch.zeros_like(record)
    codec.restore(encoded, restored)
    pairs = zip(codec.raw.views(restored).values(), codec.raw.views(record).values())
    return torch.stack([(a.double() - b.double()).square().sum() for a, b in pairs])


@pytest.mark.parametrize("format", INTEGERS)
@given(
    shape=st.tuples(st.integers(1, 9), st.sampled_from([1, 5, 63, 64, 65, 127, 128, 129, 200, 256, 300])),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    transposed=st.sampled_from([frozenset(), frozenset({"up_proj", "down_proj"})]),
    seed=st.integers(0, 2**32 - 1),
    power=st.sampled_from([1, 3]),
    size=st.sampled_from([0.0, 1e-6, 0.02, 1e4]),
)
def test_rounding_to_nearest_gives_the_oracles_bytes_and_no_fit_is_worse(format, shape, dtype, transposed, seed, power, size):
    raw = layout(*shape, dtype)
    record = record_of(raw, seed, power, size if dtype != torch.float16 else min(size, 1.0))
    nearest = Affine(format, raw, transposed, nearest=True).encode(record)
    assert torch.equal(FastAffine(format, raw, transposed, nearest=True).encode(record), nearest)
    codec = FastAffine(format, raw, transposed)
    fitted = codec.encode(record)
    if dtype == torch.float32:  # in other types rounding what was restored can turn the order round
        assert (errors(codec, fitted, record) <= errors(codec, nearest, record) * 1.001 + 1e-30).all()


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("format", INTEGERS)
def test_fits_are_the_oracles_but_for_ties(format, power):
    raw = layout(ROWS, 1000)
    record = record_of(raw, power, power)
    oracle, fast = Affine(format, raw, frozenset()), FastAffine(format, raw, frozenset())
    one, other = oracle.encode(record), fast.encode(record)
    assert (one != other).double().mean() < 0.005
    assert torch.allclose(errors(fast, other, record), errors(oracle, one, record), rtol=0.005)
    stored, expected = fast.slab.views(other), oracle.slab.views(one)
    assert torch.equal(stored["up_proj_bias"], expected["up_proj_bias"])


@pytest.mark.parametrize("format", INTEGERS)
def test_all_instruction_sets_give_the_same_bytes(format):
    raw = layout(ROWS, 333)
    record = record_of(raw, 1, 3)
    first, *rest = (FastAffine(format, raw, frozenset(), isa=isa).encode(record) for isa in available())
    assert all(torch.equal(first, each) for each in rest)


@pytest.mark.parametrize("format", INTEGERS)
def test_weights_that_no_scale_fits_are_refused_as_the_oracle_does(format):
    raw = layout(4, 100)
    record = record_of(raw, 0)
    raw.views(record)["down_proj"][3, 2] = float("inf")
    with pytest.raises(CheckpointError, match="down_proj: 1 weights are infinite"):
        FastAffine(format, raw, frozenset()).encode(record)


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: ("portable",))
    with pytest.raises(ConfigError, match="'avx2' is not available"):
        FastAffine(Format.INT4, layout(4, 4), frozenset(), isa="avx2")
