"""`/metrics`: what Prometheus' own parser reads there is what the engine's counters say."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.engine.engine import Load, PaceNow
from vismoe.engine.stats import PrecisionInfo
from vismoe.metrics import COUNTERS, PHASES, Metrics
from vismoe.planning.parts import PlanPart
from vismoe.planning.throughput import ExpectedPass
from vismoe.types import Phase

pytest.importorskip("prometheus_client")  # an extra
from prometheus_client.parser import text_string_to_metric_families

from vismoe.app.prometheus import PAGER_COUNTERS, metrics_text

MEMORY = SimpleNamespace(total_bytes=2**29, used_bytes=2**20, waiting=3)
COMPUTED = {"computed_high", "computed_low", "skipped"}  # which are there by format


def engine(metrics: Metrics) -> SimpleNamespace:
    plan = SimpleNamespace(
        family="qwen3_vl_moe",
        dtype="bfloat16",
        device="cpu",
        budget_bytes=1000,
        context=2048,
        resident_experts=64,
        total_experts=256,
        parts=(PlanPart("experts", 700), PlanPart("KV cache", 200), PlanPart("its copy", 20, inside="KV cache")),
        host_parts=(PlanPart("host tier", 5000),),
        passes=(ExpectedPass(1, 0.1, 0.2, 0.2), ExpectedPass(16, 0.4, 0.8, 0.8)),
    )
    load = Load(**{field.name: 101 + place for place, field in enumerate(dataclasses.fields(Load))})
    return SimpleNamespace(
        plan=plan,
        metrics=metrics,
        backends={"kernels": 'fast "AVX2"\n(on /this/machine)'},
        load=load,
        pace=PaceNow(
            planned_rows=16,
            most_rows=8,
            rows=7.5,
            tokens_per_s=15.5,
            context_tokens=2500,
            released_bytes=9,
            expected_tokens_per_s=17.5,
        ),
        precision=PrecisionInfo("hotness", "int4/int2", 0.75),
        format_names=("int4", "int2"),
        formats=lambda: np.array([[0, 1, 2, 2], [2, 0, 1, 255]], np.uint8),
    )


def samples(text: str) -> dict[tuple, float]:
    """(name, sorted labels) -> value; a name twice with the same labels is an error."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


EVENTS = st.tuples(st.sampled_from(COUNTERS), st.sampled_from(PHASES), st.integers(0, 2), st.integers(0, 2**50))


@given(st.lists(EVENTS, max_size=20))
def test_every_counter_of_the_pager_is_there_per_phase(events):
    metrics = Metrics(3)
    for counter, phase, layer, amount in events:
        metrics.add(counter, phase, layer, amount)
    found, snapshot = samples(metrics_text(engine(metrics), MEMORY)), metrics.snapshot()
    assert set(COUNTERS) == PAGER_COUNTERS.keys() | COMPUTED
    for counter in PAGER_COUNTERS:
        for phase in PHASES:
            name = PAGER_COUNTERS[counter][0] + "_total"
            assert found.pop((name, ("phase", str(phase)))) == snapshot.total(counter, phase)


def test_every_field_of_the_load_and_every_part_of_the_plan_is_there():
    found = samples(metrics_text(engine(Metrics(1)), MEMORY))
    assert {value for value in found.values() if 101 <= value < 150} == {*dataclasses.astuple(engine(Metrics(1)).load)}
    assert found["vismoe_requests_total",] == 106
    assert found["vismoe_requests_running",] == 101
    planned = {key[1:]: value for key, value in found.items() if key[0] == "vismoe_plan_bytes"}
    assert planned == {
        (("part", "experts"), ("tier", "device")): 700,
        (("part", "KV cache"), ("tier", "device")): 200,  # with its copy, which is therefore no part of its own
        (("part", "host tier"), ("tier", "host")): 5000,
    }
    assert found["vismoe_backend_info", ("backend", "kernels"), ("choice", 'fast "AVX2"')] == 1
    assert found["vismoe_model_info", ("device", "cpu"), ("dtype", "bfloat16"), ("family", "qwen3_vl_moe")] == 1


def test_what_the_plan_expects_of_passes_is_beside_what_came():
    found = samples(metrics_text(engine(Metrics(1)), MEMORY))
    assert found["vismoe_plan_tokens_per_second", ("rows", "1")] == 5
    assert found["vismoe_plan_tokens_per_second", ("rows", "16")] == 20
    assert (found["vismoe_plan_rows",], found["vismoe_decode_rows_limit",], found["vismoe_decode_rows",]) == (16, 8, 7.5)
    came, expected = found["vismoe_decode_tokens_per_second",], found["vismoe_decode_expected_tokens_per_second",]
    assert (came, expected) == (15.5, 17.5)
    assert (found["vismoe_context_tokens_limit",], found["vismoe_expert_lent_bytes",]) == (2500, 9)


def test_computations_keep_the_format_they_were_counted_in_when_formats_are_changed():
    metrics = Metrics(2)
    metrics.name_formats(["raw"])
    metrics.add("computed_high", Phase.PREFILL, 0, 7)
    metrics.name_formats(["int4", "int2"])
    metrics.add("computed_high", Phase.PREFILL, 1, 5)
    metrics.add("computed_low", Phase.DECODE, 0, 3)
    metrics.add("skipped", Phase.DECODE, 0, 2)
    found = samples(metrics_text(engine(metrics), MEMORY))
    counted = {key[1:]: value for key, value in found.items() if key[0] == "vismoe_expert_computations_total"}
    expected = {("prefill", "raw"): 7, ("prefill", "int4"): 5, ("decode", "int2"): 3, ("decode", "skip"): 2}
    assert counted == {(("format", name), ("phase", phase)): count for (phase, name), count in expected.items()}
    assert found["vismoe_experts_resident", ("format", "int4")] == 2 and found["vismoe_experts_resident", ("format", "int2")] == 3
    assert found["vismoe_precision_info", ("formats", "int4/int2"), ("policy", "hotness")] == 1


def test_the_hit_rate_can_be_derived():
    metrics = Metrics(2)
    metrics.count_demand(Phase.DECODE, 0, hits=3, misses=1, late=0)
    metrics.count_demand(Phase.DECODE, 1, hits=2, misses=2, late=1)
    found = samples(metrics_text(engine(metrics), MEMORY))
    hits, misses = (found[f"vismoe_expert_{what}_total", ("phase", "decode")] for what in ("hits", "misses"))
    assert hits / (hits + misses) == metrics.snapshot().hit_rate(Phase.DECODE)


def test_scrapes_are_independent_and_names_follow_the_conventions():
    one = engine(Metrics(1))
    first = metrics_text(one, MEMORY)
    assert metrics_text(one, MEMORY) == first  # no registry remembers the engine
    for family in text_string_to_metric_families(first):
        assert family.name.startswith("vismoe_")
        assert family.documentation
        assert not family.name.endswith(("_kib", "_mib", "_ms"))
