"""How experts are divided over raw, packed and disk: the small program against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.planning.hierarchy import PackedRates, Shares, divide, in_one_format

GRID = 40
NUMBERS = st.floats(0, 1.2), st.floats(0.05, 0.99), st.floats(0, 2), st.floats(0.01, 2)  # m, rho, d, k


def fits(shares: Shares, memory: float, rho: float) -> bool:
    return shares.raw + rho * shares.packed <= memory


@given(*NUMBERS)
def test_no_other_division_is_cheaper(memory, rho, decode_s, read_s):
    found = divide(memory, rho, decode_s, read_s)
    assert all(share >= 0 for share in found) and sum(found) == pytest.approx(1) and fits(found, memory + 1e-9, rho)
    for raw in range(GRID + 1):
        for packed in range(GRID + 1 - raw):
            other = Shares(raw / GRID, packed / GRID, (GRID - raw - packed) / GRID)
            assert not fits(other, memory, rho) or found.cost(decode_s, read_s) <= other.cost(decode_s, read_s) + 1e-9


@given(*NUMBERS)
def test_slabs_of_one_format_are_all_raw_or_all_packed_whichever_is_cheaper(memory, rho, decode_s, read_s):
    found = in_one_format(memory, rho, decode_s, read_s)
    assert sum(found) == pytest.approx(1) and fits(found, memory + 1e-9, rho) and not (found.raw and found.packed)
    raw, packed = Shares(min(1, memory), 0, max(0, 1 - memory)), Shares(0, min(1, memory / rho), max(0, 1 - memory / rho))
    assert found.cost(decode_s, read_s) <= raw.cost(decode_s, read_s) + 1e-9
    if decode_s < (1 - rho) * read_s and memory < 1:
        assert found.cost(decode_s, read_s) <= packed.cost(decode_s, read_s) + 1e-9
    else:
        assert found.packed == 0, "everything fits, or a packed expert saves less than the raw one in whose place it is"


@pytest.mark.parametrize(
    ("memory", "divided", "one_format"),
    [
        (0.35, (0, 0.5, 0.5), (0, 0.5, 0.5)),
        (0.7, (0, 1, 0), (0, 1, 0)),
        (0.85, (0.5, 0.5, 0), (0, 1, 0)),
        (0.97, (0.9, 0.1, 0), (0.97, 0, 0.03)),
        (1.0, (1, 0, 0), (1, 0, 0)),
        (1.5, (1, 0, 0), (1, 0, 0)),
    ],
)
def test_divisions_at_a_disk_of_a_gigabyte_per_second(memory, divided, one_format):
    assert divide(memory, 0.7, 0.5, 5.5) == pytest.approx(divided)
    assert in_one_format(memory, 0.7, 0.5, 5.5) == pytest.approx(one_format)
    assert divide(memory, 0.7, 1.66, 5.5).packed == 0, "d > (1 - rho) k"


def test_rates_say_where_they_are_from():
    rates = PackedRates(16e9, 2e9, ("decoding",))
    assert rates.seconds(160, 10) == pytest.approx((1e-8, 5e-9))
    assert rates.says(Shares(0.0, 0.71, 0.29)) == (
        "experts: 0% raw, 71% packed, 29% disk; decoding 16.0 GB/s, reading 2.0 GB/s (decoding not measured; run vismoe doctor)"
    )
    assert PackedRates(16e9, 2e9).says(Shares(1.0, 0.0, 0.0)).endswith("(measured)")
