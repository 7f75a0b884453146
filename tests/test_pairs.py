"""The memory of two formats, checked against what the papers demand (dynaexq 3.5, dymoe 4.4.2) and slow references."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from test_plan import AMPLE, GIB, MIB, footprint, with_fix

from vismoe.config import Settings, parse_formats
from vismoe.errors import BudgetError, ConfigError
from vismoe.kernels.codecs import codec_of
from vismoe.planning.apportion import experts_of
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.pair_split import ladder, least_bytes, paired, quotas, typed_pairs
from vismoe.planning.plan import Plan, fitting_pairs, plan
from vismoe.types import ExpertInventory, Format, MoELayer, RecordLayout

POLICIES = ("hotness", "importance", "hotness+importance")
PAIRS = ("lossless/int8", "16/4", "8/4", "8/2", "4/2", "16/2")
QWEN = {"gate_up_proj": (1536, 2048), "down_proj": (2048, 768)}  # an expert of Qwen3-VL-30B-A3B


def layout(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> RecordLayout:
    return RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))


def raw_inventory(layers: list[tuple[int, int, int]], layouts: list[RecordLayout]) -> ExpertInventory:
    """layers: (experts, top_k, geometry)."""
    return ExpertInventory(tuple(MoELayer(i, f"layers.{i}", n, k, g) for i, (n, k, g) in enumerate(layers)), tuple(layouts))


def need_of(raw: ExpertInventory, settings: Settings, **change: Any) -> Footprint:
    return dataclasses.replace(footprint(in_formats(raw, settings)), **change)


def in_formats(raw: ExpertInventory, settings: Settings) -> ExpertInventory:
    return paired(raw, settings.pair, ()) if settings.pair else raw


DEMO = raw_inventory([(32, 4, 0)] * 8, [layout({"gate_up_proj": (256, 256), "down_proj": (256, 128)})])


@st.composite
def raw_inventories(draw: st.DrawFn) -> ExpertInventory:
    widths = draw(st.lists(st.integers(8, 400), min_size=1, max_size=3, unique=True))
    layer = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, len(widths) - 1))
    layers = draw(st.lists(layer, max_size=6)) + [(draw(st.integers(1, 9)), 2, g) for g in range(len(widths))]
    shapes = [layout({"gate_up_proj": (2 * width, 128), "down_proj": (128, width)}) for width in widths]
    return raw_inventory([(n, min(k, n), g) for n, k, g in layers], shapes)


@st.composite
def pair_settings(draw: st.DrawFn) -> Settings:
    retention = draw(st.sampled_from([0.5, 0.6, 0.75, 1.0]))
    return Settings(policy=draw(st.sampled_from(POLICIES)), formats=draw(st.sampled_from(PAIRS)), retention=retention)


def pool_bytes(made: Plan) -> int:
    return sum(part.bytes for part in made.parts if part.name.startswith("expert pool"))


def check(made: Plan, experts: ExpertInventory, settings: Settings) -> None:
    """What every plan of a pair promises."""
    assert made.total_bytes == sum(part.bytes for part in made.parts if not part.inside) <= made.budget_bytes
    pools = zip(made.slabs + made.low_slabs, experts.layouts + experts.low_layouts, strict=True)
    assert pool_bytes(made) == sum(slabs * record.record_bytes for slabs, record in pools)
    assert made.pinned_layers == 0
    numbers = experts_of(experts.layers, len(experts.layouts))
    if not experts.low_layouts:  # skip was proposed
        assert all(min(2, n) <= slabs <= n for n, slabs in zip(numbers, made.slabs, strict=True))
        return
    if settings.policy == "importance":
        assert made.hot_quota == made.transient == ()
        for n, high, low in zip(numbers, made.slabs, made.low_slabs, strict=True):
            assert (high, low) == (n, 0) or (min(high, low) >= min(2, n) and high + low <= max(n, 4))
        return
    assert made.resident_experts == made.total_experts
    for geometry, (n, high, low, transient) in enumerate(zip(numbers, made.slabs, made.low_slabs, made.transient, strict=True)):
        assert high - transient + low == n and high <= n
        assert transient >= 1 or not 0 < low < n  # whoever can become hot finds a slab to be copied into
        quota = [made.hot_quota[layer.index] for layer in experts.layers_of(geometry)]
        assert sum(quota) == high - transient
        assert all(0 <= q <= layer.num_experts for q, layer in zip(quota, experts.layers_of(geometry), strict=True))


@runs(deadline=None, max_examples=80)
@given(raw_inventories(), pair_settings(), st.integers(1, GIB) | st.integers(1, 10_000).map(lambda n: f"{n / 100:g}%"))
def test_plans_of_pairs_keep_their_promises_and_a_refusal_names_a_setting_that_works(raw, settings, memory):
    settings = dataclasses.replace(settings, memory=memory, context=512)
    try:
        made = plan(need_of(raw, settings), settings, AMPLE)
    except BudgetError as refused:
        settings = with_fix(settings, refused.fix)
        made = plan(need_of(raw, settings), settings, AMPLE)
    check(made, in_formats(raw, settings), settings)


@runs(deadline=None, max_examples=60)
@given(raw_inventories(), pair_settings(), st.integers(0, 40 * MIB), st.integers(0, 10 * MIB))
def test_more_memory_never_takes_a_slab_of_the_better_format_away(raw, settings, extra, more):
    need = need_of(raw, settings)
    least = plan(need, settings, AMPLE).minimum_bytes
    small, large = (plan(need, dataclasses.replace(settings, memory=least + n), AMPLE) for n in (extra, extra + more))
    assert all(a <= b for a, b in zip(small.slabs, large.slabs, strict=True))
    hot = [[a - b for a, b in zip(made.slabs, made.transient or made.slabs, strict=True)] for made in (small, large)]
    assert all(a <= b for a, b in zip(*hot, strict=True))


@runs(deadline=None, max_examples=60)
@given(raw_inventories(), pair_settings())
def test_the_stated_minimum_works_and_one_byte_less_is_refused(raw, settings):
    need = need_of(raw, settings)
    least = plan(need, settings, AMPLE).minimum_bytes
    check(plan(need, dataclasses.replace(settings, memory=least), AMPLE), need.inventory, settings)
    with pytest.raises(BudgetError, match=f"{settings.formats} needs --memory"):
        plan(need, dataclasses.replace(settings, memory=least - 1), AMPLE)


@runs(deadline=None, max_examples=40)
@given(raw_inventories(), pair_settings(), st.integers(1, 5000))
def test_fitting_pairs_fit_and_the_others_do_not(raw, settings, hundredths):
    settings = dataclasses.replace(settings, memory=f"{hundredths / 100:g}%")
    fitting = {fit.formats: fit for fit in fitting_pairs(need_of(raw, settings), settings, AMPLE)}
    for formats in typed_pairs(settings):
        other = dataclasses.replace(settings, formats=formats)
        if formats in fitting:
            made = plan(need_of(raw, other), other, AMPLE)
            assert fitting[formats].high_experts == sum(made.slabs) - sum(made.transient)
        else:
            with pytest.raises(BudgetError):
                plan(need_of(raw, other), other, AMPLE)


@pytest.mark.parametrize("memory", ["20%", "27%", "33%", "40%", "60%", "99%", "100%"])
def test_hotness_has_as_many_hot_experts_as_equation_of_dynaexq_3_5_allows(memory):
    settings = Settings(policy="hotness", formats="16/4", memory=memory)
    need = need_of(DEMO, settings)
    high, low = need.inventory.layouts[0].record_bytes, need.inventory.low_layouts[0].record_bytes
    budget = int(DEMO.total_bytes * float(memory[:-1]) / 100)
    most = max(
        (n for n in range(257) if (n + min(2, n, 256 - n)) * high + (256 - n) * low <= budget),
        default=None,
    )
    if most is None:
        with pytest.raises(BudgetError, match="all 256 experts in int4 need"):
            plan(need, settings, AMPLE)
        return
    made = plan(need, settings, AMPLE)
    assert made.slabs[0] - made.transient[0] == most and made.low_slabs == (256 - most,)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 9, 64])
def test_every_rung_of_hotness_has_one_slab_per_expert_and_transient_ones_where_they_are_of_use(experts):
    """All cold slabs are taken: a promotion into a transient slab frees the cold one that the demotion needs."""
    alone, combined = (ladder(experts, 4, Settings(policy=policy)) for policy in ("hotness", "hotness+importance"))
    for steps in (alone, combined):
        assert (steps.high - steps.transient + steps.low == experts).all()
        assert (np.diff(steps.high) >= 0).all() and (steps.high <= experts).all()
        assert (steps.high[-1], steps.low[-1], steps.transient[-1]) == (experts, 0, 0)
    hot = alone.high - alone.transient
    assert hot.tolist() == list(range(experts + 1))  # nobody has to be hot
    assert (alone.transient == np.minimum(np.minimum(hot, alone.low), 2)).all()
    assert combined.transient[0] == min(2, experts) and combined.low[0] == experts
    some_hot = combined.high > combined.transient
    assert (combined.transient[some_hot] == np.minimum(combined.low[some_hot], 4)).all()


def test_importance_shares_slabs_by_retention_until_every_expert_has_one():
    """256 experts at r = 0.75: 15 of 16 slabs are of the better format up to 240 + 16, then the others are exchanged."""
    steps = ladder(256, 4, Settings(policy="importance"))
    pairs = list(zip(steps.high.tolist(), steps.low.tolist(), strict=True))
    assert pairs[:4] == [(2, 2), (3, 2), (4, 2), (5, 2)] and pairs[-3:] == [(253, 3), (254, 2), (256, 0)]
    shared = [pair for pair in pairs if 32 <= sum(pair) < 256]
    assert all(abs(high - 15 / 16 * (high + low)) <= 0.5 for high, low in shared)
    assert (240, 16) in pairs and (241, 15) in pairs and max(map(sum, pairs)) == 256
    assert ladder(256, 4, Settings(policy="importance", retention=1.0)).low.max() == 2


def test_a_small_geometry_is_held_whole_where_two_slabs_per_format_would_take_more():
    for experts in (1, 2, 3):
        raw = raw_inventory([(experts, 1, 0)], list(DEMO.layouts))
        settings = Settings(policy="importance", formats="16/8", memory="100%")
        made = plan(need_of(raw, settings), settings, AMPLE)
        assert (made.slabs, made.low_slabs, made.resident_experts) == ((experts,), (0,), experts)
        both = least_bytes(in_formats(raw, settings), settings)
        assert both <= experts * raw.layouts[0].record_bytes


def test_the_combination_has_a_transient_slab_for_each_expert_a_token_chooses_and_at_least_two():
    settings = Settings(policy="hotness+importance", memory="20%")
    need = need_of(DEMO, settings)
    made = plan(need, settings, AMPLE)
    assert made.transient == (4,) and plan(need, dataclasses.replace(settings, policy="hotness"), AMPLE).transient == (2,)
    least = plan(need, dataclasses.replace(settings, memory=made.minimum_bytes), AMPLE)
    assert (least.slabs, least.low_slabs, least.transient, set(least.hot_quota)) == ((2,), (256,), (2,), {0})
    one = need_of(raw_inventory([(32, 1, 0)] * 8, list(DEMO.layouts)), settings)
    assert plan(one, settings, AMPLE).transient == (2,)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_for_all_experts_in_the_better_format_needs_no_other_slab(policy):
    for memory in ("100%", "auto"):
        settings = Settings(policy=policy, formats="8/2", memory=memory)
        made = plan(need_of(DEMO, settings), settings, AMPLE)
        assert made.slabs == (256,) and made.low_slabs == (0,) and not any(made.transient) and made.resident_experts == 256
        assert not [part for part in made.parts if part.name == "expert pool int2"]


def test_quotas_are_even_with_the_rest_to_the_first_layers_and_in_proportion_where_layers_differ():
    assert quotas(DEMO, [19]) == (3, 3, 3, 2, 2, 2, 2, 2)
    mixed = raw_inventory([(10, 1, 0), (30, 1, 0), (8, 1, 1), (8, 1, 1)], [layout({"up": (8, 8)}), layout({"up": (9, 8)})])
    assert quotas(mixed, [10, 3]) == (3, 7, 2, 1)  # 2.5 and 7.5 of the first geometry, 1.5 and 1.5 of the second
    assert quotas(mixed, [40, 16]) == (10, 30, 8, 8)


def test_geometries_have_the_same_share_of_hot_experts():
    shapes = [layout({"gate_up_proj": (2 * width, 256), "down_proj": (256, width)}) for width in (512, 64)]
    raw = raw_inventory([(64, 4, 0), (64, 4, 1)] * 6, shapes)
    settings = Settings(policy="hotness", formats="16/4", memory="50%")
    made = plan(need_of(raw, settings), settings, AMPLE)
    assert abs(made.slabs[0] - made.slabs[1]) <= 1 and made.transient == (2, 2)


def test_sizes_are_those_of_the_slabs_scales_included():
    """The figures of the design: 26.6% of 16 bit for int4, 15.6% for int2, 51.6% for int8, in either orientation."""
    raw = layout(QWEN)
    turned = layout({name: shape[::-1] for name, shape in QWEN.items()})
    for format, percent in ((Format.INT8, 51.6), (Format.INT4, 26.6), (Format.INT2, 15.6)):
        for record, names in ((raw, frozenset[str]()), (turned, frozenset(QWEN))):
            assert round(100 * codec_of(format, record, names).slab.record_bytes / raw.record_bytes, 1) == percent
    experts = raw_inventory([(128, 8, 0)] * 48, [raw])
    assert experts.total_bytes == 54 * GIB
    for formats, percent in (("16/4", "26.57%"), ("16/8", "51.57%"), ("16/2", "15.63%")):
        settings = Settings(policy="hotness", formats=formats, memory="10%")
        with pytest.raises(BudgetError, match="Pairs that fit: none") as refused:
            plan(need_of(experts, settings), settings, AMPLE)
        assert refused.value.fix == f"--memory {percent}"


def test_orientation_counts_where_a_pair_that_is_not_loaded_is_priced():
    """Groups lie along the inputs: a matrix of 96 inputs and 512 outputs has other scales than one of 512 inputs."""
    raw = raw_inventory([(16, 2, 0)] * 4, [layout({"up_proj": (96, 512)})])
    settings = Settings(policy="hotness", formats="16/4", memory="25%")
    needs = [
        dataclasses.replace(footprint(paired(raw, parse_formats("16/4"), names)), transposed=names)
        for names in ((), (frozenset({"up_proj"}),))
    ]
    high = [{fit.formats: fit.high_experts for fit in fitting_pairs(need, settings, AMPLE)}["4/2"] for need in needs]
    for counted, need in zip(high, needs, strict=True):
        other = dataclasses.replace(settings, formats="4/2")
        made = plan(footprint(paired(raw, parse_formats("4/2"), need.transposed)), other, AMPLE)
        assert counted == sum(made.slabs) - sum(made.transient)
    assert high[0] > high[1] > 0


def test_a_refusal_says_what_is_missing_which_pairs_fit_and_what_the_asked_one_needs():
    settings = Settings(policy="hotness", formats="16/4", memory="20%")
    with pytest.raises(BudgetError) as refused:
        plan(need_of(raw_inventory([(128, 8, 0)] * 48, [layout(QWEN)]), settings), settings, AMPLE)
    message = str(refused.value)
    assert "memory=20% of 54.00 GiB of experts is 10.80 GiB, but all 6144 experts in int4 need 14.34 GiB" in message
    assert "Pairs that fit: 4/2 (2452 experts in int4), 8/2 (745 experts in int8), 16/2 (316 experts in raw)" in message
    assert "16/4 needs --memory 26.57%" in message and refused.value.fix == "--formats 4/2"


def test_formats_that_cannot_hold_the_models_type_are_not_offered():
    raw = raw_inventory([(16, 2, 0)] * 4, [layout({"up_proj": (64, 64)}, torch.float8_e4m3fn)])
    settings = Settings(policy="importance", formats="16/0")
    assert [fit.formats for fit in fitting_pairs(need_of(raw, settings), settings, AMPLE)] == ["16/0"]


def test_with_skip_there_is_one_pool_as_with_one_format():
    settings = Settings(policy="importance", formats="4/0", memory="12%")
    need = need_of(DEMO, settings)
    made = plan(need, settings, AMPLE)
    assert made.slabs == plan(need, Settings(memory="12%"), AMPLE).slabs
    assert made.low_slabs == made.hot_quota == made.transient == made.low_host_slabs == ()
    assert "others are skipped" in made.table()


def test_a_pair_has_no_pinned_prefix():
    settings = Settings(policy="hotness", memory="60%")
    need = need_of(DEMO, settings, pinned_by_share=((0.6, 3),))
    assert plan(need, settings, AMPLE).pinned_layers == 0
    with pytest.raises(ConfigError, match=r"pinned_layers=2: .* Fix: leave it out"):
        plan(need, dataclasses.replace(settings, pinned_layers=2), AMPLE)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_machine_that_is_too_small_is_refused_with_a_setting_that_fits_it(policy):
    raw = raw_inventory([(64, 4, 0)] * 12, [layout({"gate_up_proj": (1024, 512), "down_proj": (512, 512)})])  # 1.1 GiB
    for free, memory, context in ((900 * MIB, "100GiB", 512), (850 * MIB, "100%", 512), (900 * MIB, "100%", 32_768)):
        settings, machine = (
            Settings(policy=policy, formats="16/4", memory=memory, context=context),
            Hardware("cpu", free, free, free),
        )
        with pytest.raises(BudgetError) as refused:
            plan(need_of(raw, settings), settings, machine)
        fixed = with_fix(settings, refused.value.fix)
        made = plan(need_of(raw, fixed), fixed, machine)
        assert made.total_bytes <= free


def test_a_pair_is_the_last_resort_on_a_machine_whose_memory_holds_no_shorter_context_either():
    raw = raw_inventory([(64, 4, 0)] * 12, [layout({"gate_up_proj": (1024, 1024), "down_proj": (1024, 512)})])  # 2.25 GiB
    settings, machine = Settings(policy="hotness", formats="16/8", context=1), Hardware("cpu", GIB, GIB, GIB)
    with pytest.raises(BudgetError) as refused:
        plan(need_of(raw, settings), settings, machine)
    assert "--formats" in refused.value.fix
    fixed = with_fix(settings, refused.value.fix)
    assert plan(need_of(raw, fixed), fixed, machine).total_bytes <= GIB


def test_the_printed_plan_names_each_pool_by_its_format():
    settings = Settings(policy="hotness", formats="4/2", memory="20%")
    made = plan(need_of(DEMO, settings), settings, AMPLE)
    lines = {part.name: part for part in made.parts}
    high, low, transient = (lines[name] for name in ("expert pool int4", "expert pool int2", "transient buffer"))
    hot = made.slabs[0] - 2
    size = f"{codec_of(Format.INT4, DEMO.layouts[0], frozenset()).slab.record_bytes / 1024:.1f} KiB"
    whose = f"the hottest {hot // 8} to {hot // 8 + 1} experts of each layer"
    assert high.note == f"{hot + 2} slabs of {size} for {whose}" and low.note.endswith("for the others")
    assert transient.inside == high.name and transient.bytes * made.slabs[0] == 2 * high.bytes
    assert set(made.hot_quota) == {hot // 8, hot // 8 + 1}
    assert json.loads(json.dumps(made.to_json()))["low_slabs"] == [256 - hot]


def test_an_emulated_link_keeps_all_experts_in_both_formats():
    settings = Settings(policy="importance", formats="4/2", memory="10%", emulated_link_bytes_per_s=1e9)
    need = need_of(DEMO, settings)
    made = plan(need, settings, AMPLE)
    assert made.host_slabs == made.low_host_slabs == (256,)
    each = need.inventory.layouts[0].record_bytes + need.inventory.low_layouts[0].record_bytes
    assert made.bytes_of("host tier (emulated link)") == 256 * each
    assert "in both formats" in made.table() and "aliasing the host tier" in made.table()


@runs(deadline=None, max_examples=30)
@given(raw_inventories(), pair_settings(), st.integers(0, 30 * MIB))
def test_host_memory_below_a_gpu_holds_the_same_share_of_both_formats(raw, settings, extra):
    machine = Hardware("cuda", 64 * GIB, 64 * GIB, 64 * GIB)
    need = need_of(raw, settings)
    whole = plan(need, settings, machine)
    assert whole.host_slabs == whole.low_host_slabs == tuple(experts_of(raw.layers, len(raw.layouts)))
    with pytest.raises(BudgetError) as refused:
        plan(need, dataclasses.replace(settings, host_memory=1), machine)
    least = plan(need, with_fix(settings, refused.value.fix), machine).host_bytes
    made = plan(need, dataclasses.replace(settings, host_memory=least + extra), machine)
    assert made.host_bytes <= least + extra
    numbers = np.array(experts_of(raw.layers, len(raw.layouts)) * 2)
    records = np.array(made.host_slabs + made.low_host_slabs)
    assert (records >= np.minimum(numbers, 2 + made.io_threads)).all() and (records <= numbers).all()
    grown = records > np.minimum(numbers, 2 + made.io_threads)
    if grown.any():  # whoever has more than the least has no larger share than anybody would have with one record more
        assert (records[grown] / numbers[grown]).max() <= ((records + 1) / numbers).min() + 1e-9


def test_pairs_are_named_as_a_user_types_them():
    assert typed_pairs(Settings(policy="hotness")) == ["16/8", "16/4", "16/2", "8/4", "8/2", "4/2"]
    assert typed_pairs(Settings(policy="importance", formats="lossless/int8"))[:4] == [f"lossless/{low}" for low in "8420"]
