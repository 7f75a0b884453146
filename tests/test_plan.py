"""The memory plan, checked against its promises: parts add up to at most the budget, refusals name what works, eq. 10 holds."""

import dataclasses
import json
import shlex

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as runs
from hypothesis import strategies as st

from vismoe.config import Settings
from vismoe.errors import BudgetError, ConfigError
from vismoe.planning.apportion import prefix_bytes, record_bytes, safe_slabs
from vismoe.planning.needs import CacheLayer, Curve
from vismoe.planning.plan import Footprint, Hardware, Plan, plan
from vismoe.planning.sizes import percent_up, size_down, size_up
from vismoe.types import ExpertInventory, MoELayer, RecordLayout

GIB, MIB = 2**30, 2**20
AMPLE = Hardware("cpu", 2**50, 2**50, 2**50)


def inventory(layers: list[tuple[int, int, int]], widths: list[int]) -> ExpertInventory:
    """layers: (experts, top_k, geometry); one record layout per width."""
    layouts = tuple(RecordLayout.of({"up": (width, 64)}, {"up": torch.bfloat16}) for width in widths)
    return ExpertInventory(tuple(MoELayer(i, f"layers.{i}", n, k, g) for i, (n, k, g) in enumerate(layers)), layouts)


def footprint(experts: ExpertInventory, backbone_bytes: int = 200 * MIB, token_bytes: int = 2048) -> Footprint:
    return Footprint(
        family="test",
        dtype="bfloat16",
        inventory=experts,
        backbone=(("attention", backbone_bytes // 2), ("embeddings", backbone_bytes - backbone_bytes // 2)),
        cache_layers=tuple(CacheLayer(0, token_bytes, None, token_bytes // 2) for _ in experts.layers),
        prefill=Curve(((4, 10_000), (65_536, 160_000_000))),
        decode=Curve(((4, 1_000), (65_536, 1_000_000))),
        padding=Curve(((4, 8), (65_536, 2**31))),
        encode=Curve(((4, 50_000), (65_536, 800_000_000))),
        image_token_bytes=30_000,
        max_image_tokens=16_384,
        logits_bytes=1_000_000,
        combine_token_bytes=16_384,
        scratch_bytes=3 * MIB,
    )


@st.composite
def inventories(draw: st.DrawFn) -> ExpertInventory:
    widths = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=3, unique=True))
    layer = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, len(widths) - 1))
    layers = draw(st.lists(layer, min_size=len(widths), max_size=8))
    layers += [(4, 2, geometry) for geometry in range(len(widths))]  # no geometry without a layer
    return inventory([(n, min(k, n), g) for n, k, g in layers], widths)


def with_fix(settings: Settings, fix: str) -> Settings:
    """The settings after typing what a BudgetError proposes."""
    words = shlex.split(fix)
    assert len(words) % 2 == 0 and all(name.startswith("--") for name in words[::2]), fix
    changes = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {name: int(value) if name in ("context", "pinned_layers") else value for name, value in changes.items()}
    return dataclasses.replace(settings, **numbers)


def experts_planned(made: Plan) -> int:
    return sum(part.bytes for part in made.parts if part.name.startswith(("pinned", "expert pool")))


@runs(deadline=None, max_examples=60)
@given(inventories(), st.integers(1, 3 * GIB), st.sampled_from([0, 1, 3]), st.integers(1, 40_000))
def test_parts_never_exceed_a_byte_budget_and_a_refusal_names_a_setting_that_works(experts, budget, pinned, context):
    pinned = min(pinned, len(experts.layers))
    settings = Settings(memory=budget, pinned_layers=pinned, context=context)
    need = footprint(experts)
    try:
        made = plan(need, settings, AMPLE)
    except BudgetError as refused:
        made = plan(need, with_fix(settings, refused.fix), AMPLE)
    assert made.total_bytes == sum(part.bytes for part in made.parts if not part.inside) <= made.budget_bytes
    for geometry, slabs in enumerate(made.slabs):
        dynamic = sum(layer.num_experts for layer in experts.layers[made.pinned_layers :] if layer.geometry == geometry)
        assert min(2, dynamic) <= slabs <= dynamic
    assert experts_planned(made) == prefix_bytes(experts, made.pinned_layers) + record_bytes(experts, made.slabs)


@runs(deadline=None, max_examples=40)
@given(inventories(), st.integers(0, 2 * GIB), st.integers(0, GIB))
def test_more_memory_never_takes_a_slab_away(experts, extra, more):
    need = footprint(experts)
    least = plan(need, Settings(memory="100%", pinned_layers=0), AMPLE).minimum_bytes
    small, large = (plan(need, Settings(memory=least + bytes_, pinned_layers=0), AMPLE) for bytes_ in (extra, extra + more))
    assert all(a <= b for a, b in zip(small.slabs, large.slabs, strict=True))


@runs(deadline=None, max_examples=40)
@given(inventories(), st.sampled_from([0, 1, 2]))
def test_the_stated_minimum_works_and_one_byte_less_is_refused(experts, pinned):
    need = footprint(experts)
    settings = Settings(memory="100%", pinned_layers=min(pinned, len(experts.layers)))
    least = plan(need, settings, AMPLE).minimum_bytes
    made = plan(need, dataclasses.replace(settings, memory=least), AMPLE)
    assert made.total_bytes == least
    below = dataclasses.replace(settings, memory=least - 1)
    with pytest.raises(BudgetError) as refused:
        plan(need, below, AMPLE)
    plan(need, with_fix(below, refused.value.fix), AMPLE)


@runs(deadline=None, max_examples=40)
@given(inventories(), st.integers(1, 10_000))
def test_a_percentage_is_prefix_and_pools_floored_to_slabs(experts, hundredths):
    settings = Settings(memory=f"{hundredths / 100:g}%", pinned_layers=0)
    need = footprint(experts)
    try:
        made = plan(need, settings, AMPLE)
    except BudgetError as refused:
        settings = with_fix(settings, refused.fix)
        made = plan(need, settings, AMPLE)
    share = int(experts.total_bytes * (float(str(settings.memory)[:-1]) / 100))
    assert experts_planned(made) <= share
    if made.resident_experts < made.total_experts:  # not one slab more would have fitted
        assert share - experts_planned(made) < max(layout.record_bytes for layout in experts.layouts)
    assert made.budget_bytes == made.total_bytes


def test_one_geometry_takes_exactly_the_floor_of_its_share():
    experts = inventory([(32, 4, 0)] * 8, [288])
    made = plan(footprint(experts), Settings(memory="25%"), AMPLE)
    assert made.resident_experts == 64 and made.pinned_layers == 0 and made.slabs == (64,)
    assert plan(footprint(experts), Settings(memory="26.5%"), AMPLE).resident_experts == 67
    assert plan(footprint(experts), Settings(memory="100%"), AMPLE).resident_experts == 256


@pytest.mark.parametrize(("slabs", "pinned"), [(55, 0), (56, 1), (87, 1), (88, 2), (115, 2), (116, 3)])
def test_the_prefix_follows_equation_10(slabs, pinned):
    """8 layers x 32 experts, top-4, W = 5: S_layer = 32 slabs, C_safe = 24, and 20 once five layers are left."""
    experts = inventory([(32, 4, 0)] * 8, [288])
    assert safe_slabs(experts, 1, window=5) == [24]
    memory = f"{100 * slabs / 256}%"
    assert plan(footprint(experts), Settings(memory=memory, pinned_layers=pinned), AMPLE).pinned_layers == pinned
    with pytest.raises(BudgetError, match=f"at most {pinned} of 8 MoE layers") as refused:
        plan(footprint(experts), Settings(memory=memory, pinned_layers=pinned + 1), AMPLE)
    assert refused.value.fix == f"--pinned-layers {pinned}"


@pytest.mark.parametrize(("memory", "pinned"), [("25%", 0), ("40%", 2), ("90%", 3), ("12%", 0)])
def test_auto_pins_what_was_calibrated_at_the_nearest_share_as_far_as_it_fits(memory, pinned):
    experts = inventory([(32, 4, 0)] * 8, [288])
    assert plan(footprint(experts), Settings(memory=memory), AMPLE).pinned_layers == 0
    need = dataclasses.replace(footprint(experts), pinned_by_share=((0.25, 0), (0.5, 8), (0.75, 3)))
    made = plan(need, Settings(memory=memory), AMPLE)
    assert made.pinned_layers == pinned
    assert plan(need, Settings(memory=memory, pinned_layers=0), AMPLE).pinned_layers == 0


def test_geometries_share_the_memory_in_proportion_to_their_expert_bytes():
    experts = inventory([(64, 4, 0), (64, 4, 1)] * 6, [4000, 1000])
    made = plan(footprint(experts), Settings(memory="50%", pinned_layers=0), AMPLE)
    assert made.slabs == (192, 192)  # half of each, whatever a record weighs


def test_more_pinned_layers_than_there_are_is_a_mistake_in_the_settings():
    with pytest.raises(ConfigError, match="the model has 8 MoE layers"):
        plan(footprint(inventory([(32, 4, 0)] * 8, [288])), Settings(memory="100%", pinned_layers=9), AMPLE)


def test_a_machine_that_is_too_small_is_refused_with_a_budget_or_context_that_fits_it():
    experts = inventory([(64, 4, 0)] * 12, [4000])
    need = footprint(experts)
    for free, settings in (
        (700 * MIB, Settings(memory="100GiB", context=512)),
        (700 * MIB, Settings(memory="100%", context=512)),
        (700 * MIB, Settings(memory="100%", context=32_768)),
        (700 * MIB, Settings(memory="700MiB", context=32_768)),
        (GIB, Settings(memory="auto", context=32_768)),
    ):
        machine = Hardware("cpu", free, free, free)
        with pytest.raises(BudgetError) as refused:
            plan(need, settings, machine)
        assert plan(need, with_fix(settings, refused.value.fix), machine).total_bytes <= free
    with pytest.raises(BudgetError, match="Fix: a machine with"):
        plan(need, Settings(), Hardware("cpu", 100 * MIB, GIB, 100 * MIB))


def test_auto_takes_what_the_model_needs_or_four_fifths_of_what_is_free():
    need = footprint(inventory([(64, 4, 0)] * 12, [4000]))
    everything = plan(need, Settings(), AMPLE)
    assert everything.resident_experts == everything.total_experts and everything.budget_bytes == everything.total_bytes
    scarce = plan(need, Settings(context=512), Hardware("cpu", GIB, 2 * GIB, GIB))
    assert scarce.resident_experts < scarce.total_experts and scarce.budget_bytes == int(0.8 * GIB)


def test_ranks_divide_a_cpu_budget_and_its_threads_but_not_a_gpus():
    need = footprint(inventory([(64, 4, 0)] * 12, [4000]))
    settings = Settings(memory="2GiB", io_threads=4)
    cpu = plan(need, settings, Hardware("cpu", 2**40, 2**40, 2**40, local_world_size=2))
    alone = plan(need, dataclasses.replace(settings, io_threads=2), AMPLE)
    assert cpu.budget_bytes == GIB and cpu.io_threads == 2 and cpu.minimum_bytes == 2 * alone.minimum_bytes
    gpu = plan(need, settings, Hardware("cuda", 2**40, 2**40, 4 * GIB, local_world_size=2))
    assert gpu.budget_bytes == 2 * GIB and gpu.io_threads == 2 and gpu.host_bytes <= (4 * GIB) // 2


def test_a_gpu_has_a_host_tier_bounded_by_host_memory_and_staging_beside_it():
    experts = inventory([(64, 4, 0)] * 12, [4000])
    need, machine = footprint(experts), Hardware("cuda", 64 * GIB, 64 * GIB, 64 * GIB)
    whole = plan(need, Settings(memory="25%"), machine)
    assert whole.host_slabs == (768,) and whole.bytes_of("staging") == 3 * need.scratch_bytes
    assert "staging" not in [part.name for part in whole.parts]
    part = plan(need, Settings(memory="25%", host_memory="100MiB"), machine)
    assert part.host_bytes <= 100 * MIB and part.host_slabs[0] == (100 * MIB - 9 * MIB) // experts.layouts[0].record_bytes
    owned = dataclasses.replace(machine, total_host_bytes=400 * MIB)
    assert plan(need, Settings(memory="25%"), owned).host_bytes == pytest.approx(
        0.7 * 400 * MIB, abs=experts.layouts[0].record_bytes
    )
    more = plan(need, Settings(memory="25%", host_memory="300MiB"), owned)
    assert 0.7 * 400 * MIB < more.host_bytes <= 300 * MIB
    for asked in ("1MiB", "100GiB"):
        settings = Settings(memory="25%", host_memory=asked)
        with pytest.raises(BudgetError) as refused:
            plan(need, settings, machine)
        plan(need, with_fix(settings, refused.value.fix), machine)


def test_host_memory_holds_more_records_where_they_stay_encoded_and_the_gpu_has_room_to_decode_them():
    experts = inventory([(64, 4, 0)] * 12, [4000])
    need, machine = footprint(experts), Hardware("cuda", 64 * GIB, 64 * GIB, 64 * GIB)
    encoded = dataclasses.replace(need, encoded=(RecordLayout((), experts.layouts[0].record_bytes // 2),))
    settings = Settings(memory="1GiB", context=1024, host_memory="100MiB", io_threads=2)
    decoded, made = (plan(each, settings, machine) for each in (need, encoded))
    assert made.host_slabs[0] == pytest.approx(2 * decoded.host_slabs[0], abs=1) and made.host_bytes <= 100 * MIB
    assert made.bytes_of("encoded copies") == experts.layouts[0].record_bytes and decoded.bytes_of("encoded copies") == 0
    assert made.total_bytes == decoded.total_bytes + made.bytes_of("encoded copies")


def test_an_emulated_link_keeps_all_experts_in_host_memory_outside_the_budget():
    experts = inventory([(64, 4, 0)] * 12, [4000])
    made = plan(footprint(experts), Settings(memory="25%", emulated_link_bytes_per_s=1e9), AMPLE)
    assert made.host_slabs == (768,) and made.bytes_of("host tier (emulated link)") == experts.total_bytes
    assert "outside the budget" in made.table()


def test_the_table_and_the_json_say_the_same_numbers():
    made = plan(footprint(inventory([(64, 4, 0)] * 12, [4000])), Settings(memory="1GiB", context=1024, pinned_layers=1), AMPLE)
    numbers = json.loads(json.dumps(made.to_json()))
    assert numbers["total_bytes"] == sum(part["bytes"] for part in numbers["parts"] if not part["inside"])
    table = made.table()
    details = ("KV cache's copy while it grows", "vision", "combine buffer")
    for name in (*details, "KV cache", "logits", "attention masks", "staging", "pinned prefix", "expert pool"):
        assert name in table and any(part["name"] == name for part in numbers["parts"])


@given(st.integers(1, 2**45))
def test_typed_sizes_round_to_the_safe_side(nbytes):
    from vismoe.config import parse_bytes

    assert parse_bytes(size_down(nbytes)) <= nbytes <= parse_bytes(size_up(nbytes))


@given(st.integers(1, 2**45), st.integers(1, 2**45))
def test_typed_percentages_hold_what_they_must(part, whole):
    assume(part <= whole)
    assert int(whole * (float(percent_up(part, whole)[:-1]) / 100)) >= part


def test_a_curve_is_exact_at_its_points_and_linear_between_and_beyond():
    curve = Curve(((4, 100), (8, 300), (16, 1000)))
    assert [curve(tokens) for tokens in (1, 4, 6, 8, 12, 16, 24)] == [100, 100, 200, 300, 650, 1000, 1700]
    assert Curve(())(9) == 0
