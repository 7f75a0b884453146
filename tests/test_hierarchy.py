"""How experts are divided over raw slabs, packed slabs and disk: the planner's choice against every other division."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from test_plan import AMPLE, MIB, footprint, inventory, with_fix

from vismoe.config import Settings
from vismoe.errors import BudgetError
from vismoe.planning.case import Case
from vismoe.planning.hierarchy import PackedRates, Packing, Shares, packed_from
from vismoe.planning.needs import Hardware
from vismoe.planning.plan import plan
from vismoe.planning.throughput import MachineRates, expected
from vismoe.types import RecordLayout

RATES = st.builds(
    MachineRates,
    missing_bytes_per_s=st.sampled_from([2e8, 2e9, 2e10]),
    weights_bytes_per_s=st.just(3e10),
    overlaps=st.booleans(),
)
PACKED = st.builds(
    PackedRates, extra_s_per_byte=st.sampled_from([0.0, 1e-11, 1e-10, 1e-9]), decode_bytes_per_s=st.sampled_from([2e9, 2e10])
)
LAYERS = inventory([(16, 4, 0), (32, 2, 1), (16, 4, 0), (32, 2, 1), (16, 4, 0)], [4096, 8192])

ALIKE = inventory([(16, 4, 0)] * 5, [4096])


def packable(experts, rates, must=False, rho=0.7):
    """The needs of a model whose records take `rho` of the experts' bytes."""
    layouts = tuple(RecordLayout((), int(rho * layout.record_bytes)) for layout in experts.layouts)
    packing = Packing(layouts, rates, must=must, workspace_bytes=MIB, scratch_bytes=MIB)
    return dataclasses.replace(footprint(experts), packing=packing, scratch_bytes=MIB)


@runs(deadline=None, max_examples=150)
@given(st.integers(20, 110), RATES, PACKED, st.integers(1, 32), st.booleans())
def test_no_other_division_is_quicker(percent, rates, packed, rows, must):
    layers = LAYERS if rates.overlaps else ALIKE  # a sum has its solution at a corner where all layers want alike
    need = packable(layers, packed, must)
    settings = Settings(memory=f"{min(percent, 100)}%", parallel=rows, context=4096)
    made = plan(need, settings, AMPLE, rates)
    found = next(one for one in made.passes if one.rows == rows)
    case = Case(need, dataclasses.replace(settings, pinned_layers=0), AMPLE)
    everything = percent >= 100
    assert made.packed_from is None if everything else not must or made.packed_from is not None
    for first in (None, *range(len(layers.layers))):
        if first is None and must and not everything:
            continue
        other = dataclasses.replace(case, need=need.holding(first))
        if must and first and other.expert_bytes < other.need.inventory.slab_bytes:
            continue  # always: packed, but for raw layers beside which nothing is missing
        if other.has_room() and not (everything and first is not None):
            assert expected(rows, other.loads(), rates).seconds >= (1 - 1e-9) * found.seconds, first
    assert made.total_bytes <= made.budget_bytes and made.minimum_bytes <= made.budget_bytes
    shares = made.shares(layers)
    assert sum(shares) == pytest.approx(1) and all(share >= 0 for share in shares)
    if shares.raw and shares.packed and not rates.overlaps:
        assert shares.disk == 0, "layers are raw beside packed ones only where every expert has a slab"


@given(st.integers(0, 5))
def test_a_divided_geometry_becomes_two_and_nothing_else_changes(first):
    packed = tuple(RecordLayout((), layout.record_bytes // 2) for layout in LAYERS.layouts)
    made, origin = packed_from(LAYERS, packed, first)
    for before, after in zip(LAYERS.layers, made.layers, strict=True):
        assert dataclasses.replace(after, geometry=before.geometry) == before
        assert origin[after.geometry] == before.geometry
        assert made.layout(after.index) == (packed if after.index >= first else LAYERS.layouts)[before.geometry]
        assert made.raw_layouts[after.geometry] == LAYERS.layouts[before.geometry]
    assert made.total_bytes == LAYERS.total_bytes, "percentages mean the same"


@pytest.mark.parametrize(
    ("memory", "divided"),
    [
        ("35%", (0, 0.5, 0.5)),
        ("70%", (0, 1, 0)),
        ("85%", (0.5, 0.5, 0)),
        ("97%", (0.875, 0.125, 0)),
        ("100%", (1, 0, 0)),
    ],
)
def test_divisions_at_a_disk_of_a_gigabyte_per_second(memory, divided):
    layers, rates = inventory([(128, 8, 0)] * 8, [9 * MIB]), MachineRates(missing_bytes_per_s=1.4e9, overlaps=False)
    settings = Settings(memory=memory, parallel=1, context=512)
    made = plan(packable(layers, PackedRates(1e-11, 2e10)), settings, AMPLE, rates)
    assert made.shares(layers) == pytest.approx(divided, abs=0.01)
    slow = PackedRates(1e-9, 2e10)  # d > (1 - rho) k
    assert plan(packable(layers, slow), settings, AMPLE, rates).packed_from is None


def test_all_free_memory_is_divided_as_if_it_were_asked_for_in_bytes():
    layers, rates = inventory([(128, 8, 0)] * 8, [9 * MIB // 128]), MachineRates(missing_bytes_per_s=1.4e9, overlaps=False)
    need = packable(layers, PackedRates(1e-11, 2e10))
    for share in (0.5, 0.8, 0.9, 0.97, 1.0):
        asked = plan(need, Settings(memory=f"{share:.0%}", context=512, parallel=1), AMPLE, rates)
        free = int((asked.total_bytes + 4096) / 0.8)
        given = Hardware("cpu", free, free, free)
        made = plan(need, Settings(memory="auto", context=512, parallel=1), given, rates)
        assert made.packed_from == asked.packed_from and made.resident_experts >= asked.resident_experts, share


def test_where_only_packed_slabs_fit_rows_are_counted_with_them():
    layers, rates = inventory([(128, 8, 0)] * 8, [9 * MIB // 128]), MachineRates(missing_bytes_per_s=1.4e9, overlaps=False)
    settings = Settings(memory="70%", pinned_layers=6, context=16_384)
    made = plan(packable(layers, PackedRates(1e-11, 2e10)), settings, AMPLE, rates)
    assert made.packed_from == 0 and made.rows == 64 and made.minimum_bytes <= made.total_bytes


@pytest.mark.parametrize("must", [False, True])
def test_packed_slabs_without_room_for_what_they_need_are_refused_where_they_were_asked_for(must):
    need = packable(LAYERS, PackedRates(1e-11, 2e10), must)
    memory = plan(need, Settings(memory="50%", context=512, parallel=1), AMPLE).total_bytes
    large = dataclasses.replace(need, packing=dataclasses.replace(need.packing, workspace_bytes=2 * memory))
    settings = Settings(memory=memory, context=512, parallel=1)
    if not must:
        assert plan(large, settings, AMPLE).packed_from is None
        return
    with pytest.raises(BudgetError) as refused:
        plan(large, settings, AMPLE)
    assert plan(large, with_fix(settings, refused.value.fix), AMPLE), "its advice works"


def test_a_miss_into_a_raw_slab_is_read_and_decoded():
    layers = inventory([(128, 8, 0)] * 8, [9 * MIB // 128])
    for decode_bytes_per_s in (2e10, 4e9):
        need, rates = (
            packable(layers, PackedRates(1e-9, decode_bytes_per_s)),
            MachineRates(missing_bytes_per_s=1e10, overlaps=False),
        )
        made = plan(need, Settings(memory="50%", context=512, parallel=1), AMPLE, rates)
        assert made.packed_from is None
        missing = made.passes[0].reading_seconds / (9 * MIB / made.rates.missing_bytes_per_s)
        assert missing == pytest.approx(8 * 8 * 0.5, rel=0.01)


def test_rows_and_shares_are_chosen_together():
    """More rows take the memory in which raw experts lay: the pass of that many has to be judged with the shares it leaves."""
    need = packable(LAYERS, PackedRates(1e-11, 2e10))
    rates = MachineRates(missing_bytes_per_s=1e9, overlaps=False)
    need = dataclasses.replace(need, logits_bytes=need.inventory.slab_bytes // 40)
    settings = Settings(memory=plan(need, Settings(memory="100%", context=16_384, parallel=1), AMPLE).total_bytes, context=16_384)
    made, best = plan(need, settings, AMPLE, rates), 0.0
    for rows in range(1, 65):
        for first in (None, *range(len(LAYERS.layers))):
            asked = dataclasses.replace(settings, parallel=rows, pinned_layers=0)
            case = Case(need.holding(first), asked, AMPLE)
            if case.has_room() and (first in (None, 0) or case.expert_bytes >= case.need.inventory.slab_bytes):
                best = max(best, expected(rows, case.loads(), rates).tokens_per_s)
    assert made.rows > 1 and made.packed_from is not None
    assert made.passes[-1].tokens_per_s == pytest.approx(best)


def test_rates_say_where_they_are_from():
    rates = PackedRates(8e-12, 2e10, ("computing",))
    assert rates.says(Shares(0.0, 0.71, 0.29)) == (
        "experts: 0% raw, 71% packed, 29% disk; computing packed ones takes 8.0 us per MB longer, decoding raw ones runs at "
        "20.0 GB/s (computing not measured; run vismoe doctor)"
    )
    assert PackedRates(8e-12, 2e9).says(Shares(1.0, 0.0, 0.0)).endswith("(measured)")
