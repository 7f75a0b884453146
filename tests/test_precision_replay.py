"""Replays of precision policies against hand-worked traces, the controller on its own and brute force; the study's figures."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.eval.studies import precision_replay
from vismoe.eval.studies.precision_replay import chosen, slabs_of, windowed
from vismoe.eval.studies.precision_workloads import prompts, streams
from vismoe.pair import Format, FormatPair
from vismoe.precision.controller import Precision
from vismoe.precision.policy import Policy
from vismoe.simulate.precision import HotnessReplay, best_static, read, replay_hotness, replay_importance
from vismoe.trace.steps import LayerRouting, TraceStep
from vismoe.trace.synthetic import SyntheticTrace, inventory_of, skewed_trace
from vismoe.types import ExpertId, Phase, RecordLayout, TokenKind

HIGH_BYTES, LOW_BYTES = 4096, 1024
HOTNESS = Policy(FormatPair(Format.INT4, Format.INT2), hotness=True, importance=False, decay=0.5, period_tokens=2)
IMPORTANCE = dataclasses.replace(HOTNESS, hotness=False, importance=True, retention=0.5)


def two_formats(inventory):
    return dataclasses.replace(inventory, layouts=(RecordLayout((), HIGH_BYTES),), low_layouts=(RecordLayout((), LOW_BYTES),))


def trace_of(steps, layers=1, experts=4):
    """Steps as (request, phase, ids [T][K] of every layer, weights of each choice)."""
    found = []
    for request, phase, ids, weights in steps:
        ids = np.array(ids, np.int16)
        routing = [LayerRouting(n, ids, np.array([weights] * len(ids), np.float16)) for n in range(layers)]
        shape = (len(ids), 1) if phase is Phase.DECODE else (1, len(ids))
        found.append(TraceStep(request, phase, np.full(shape, TokenKind.TEXT, np.uint8), routing))
    return SyntheticTrace(inventory_of(layers, experts, top_k=len(steps[0][2][0])), found)


def one_after_the_other(*experts):
    return trace_of([("r", Phase.DECODE, [[expert]], [1.0]) for expert in experts])


# -- hotness
def test_a_promotion_serves_from_the_pass_after_the_update_and_costs_one_copy_each_way():
    trace = one_after_the_other(3, 3, 3, 3, 0, 3)
    found = replay_hotness(read(trace), two_formats(trace.inventory), HOTNESS, np.array([1]))
    assert found.high.tolist() == [0, 0, 1, 1, 0, 1]  # expert 0 begins; 3 is hot after T = 2 tokens
    assert found.moved_bytes.tolist() == [0, HIGH_BYTES + LOW_BYTES, 0, 0, 0, 0]
    assert [update.after for update in found.updates] == [1, 3, 5] and found.updates[0].promote == (ExpertId(0, 3),)
    assert found.share() == 3 / 6 and found.share(passes=slice(2, 4)) == 1.0
    assert found.swaps_per_1000_tokens == 0.0  # the first update fills the pool


def of_the_controller_alone(passes, inventory, policy, quotas):
    """(by pass: computations by experts that the controller wants in the better format, whether it uses all quotas)."""
    precision, found = Precision(policy, [layer.num_experts for layer in inventory.layers], quotas), []
    for each in passes:
        wanted = sum(int(precision.targets[layer.index][layer.routing].sum()) for layer in each.layers)
        found.append((wanted, bool((precision.targets.sum(axis=1) == quotas).all())))
        for layer in each.layers:
            precision.at_layer(layer.index, each.phase is Phase.DECODE, layer.routing, layer.weights)
        precision.end_step(each.tokens)
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), quota=st.integers(1, 7), period=st.integers(1, 9), prompt=st.integers(0, 20))
def test_experts_are_where_the_controller_wants_them(seed, quota, period, prompt):
    trace = skewed_trace(3, 8, 2, requests=2, prompt_tokens=prompt, tokens=30, seed=seed)
    policy, quotas = dataclasses.replace(HOTNESS, period_tokens=period, decay=0.9), np.full(3, quota)
    passes = read(trace)
    found = replay_hotness(passes, two_formats(trace.inventory), policy, quotas)
    alone = of_the_controller_alone(passes, trace.inventory, policy, quotas)
    for high, (wanted, full) in zip(found.high, alone, strict=True):
        assert high == wanted if full else high >= wanted
    assert any(full for _, full in alone)
    assert found.computed.sum() == sum(step.kinds.size * 2 * 3 for step in trace.steps)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99))
def test_every_copy_is_counted(seed):
    trace = skewed_trace(2, 8, 2, tokens=60, seed=seed)
    found = replay_hotness(read(trace), two_formats(trace.inventory), HOTNESS, np.full(2, 3))
    promoted = sum(len(update.promote) for update in found.updates)
    assert found.moved_bytes.sum() <= promoted * (HIGH_BYTES + LOW_BYTES)  # no demotion without a promotion
    assert found.moved_bytes.sum() >= (promoted - 2 * 3) * HIGH_BYTES > 0  # as many may have begun in the better format


def test_padding_and_sentinels_are_nobodys_computations_and_each_sequence_has_a_last_token():
    kinds = np.array([[TokenKind.PAD, TokenKind.TEXT], [TokenKind.VISUAL, TokenKind.TEXT]], np.uint8)
    routing = LayerRouting(1, np.array([[0, 1], [1, 2], [2, 4], [3, 0]], np.int16), np.ones((4, 2), np.float16))
    trace = SyntheticTrace(inventory_of(2, 4, 2), [TraceStep("r", Phase.PREFILL, kinds, [routing])])
    (only,) = read(trace)
    assert only.computed.tolist() == [4 + 1, 4 + 2, 4 + 2, 4 + 3, 4 + 0] and only.tokens == 3
    layer = only.layers[0]
    assert layer.real.tolist() == [False, True, True, True] and layer.sequence.tolist() == [0, 0, 1, 1]
    assert layer.last.tolist() == [0, 1, 2, 3]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), quota=st.integers(0, 4))
def test_no_other_set_would_have_served_more_than_the_best_static_one(seed, quota):
    trace = skewed_trace(2, 5, 2, prompt_tokens=7, tokens=9, seed=seed)
    passes = read(trace)
    high, computed = best_static(passes, np.full(2, quota), 5)
    best = 0
    for layer in range(2):
        chosen_ones = np.concatenate([each.computed for each in passes]) - 5 * layer
        best += max(int(np.isin(chosen_ones, some).sum()) for some in itertools.combinations(range(5), quota))
    assert high.sum() == best and computed.tolist() == [7 * 2 * 2, 9 * 2 * 2]


# -- importance
def test_importance_loads_what_is_missing_and_reuses_the_better_copy():
    steps = [([0, 1], "0 high, 1 low"), ([0, 1], "nothing"), ([1, 0], "1 high"), ([0, 1], "nothing: 1 is better than wanted")]
    inventory, loaded = two_formats(inventory_of(1, 4, 2)), []
    for count in range(1, len(steps) + 1):
        trace = trace_of([("r", Phase.DECODE, [ids], [0.7, 0.3]) for ids, _ in steps[:count]])
        loaded.append(sum(replay_importance(read(trace), inventory, IMPORTANCE, (2,), (2,))))
    first = HIGH_BYTES + LOW_BYTES
    assert loaded == [first, first, first + HIGH_BYTES, first + HIGH_BYTES]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), high=st.integers(2, 16), low=st.integers(2, 16), retention=st.sampled_from([0.5, 0.75, 1.0]))
def test_importance_loads_each_expert_at_least_once_and_only_once_where_all_fit(seed, high, low, retention):
    trace = skewed_trace(2, 8, 3, prompt_tokens=5, tokens=20, seed=seed)
    passes, policy = read(trace), dataclasses.replace(IMPORTANCE, retention=retention)
    inventory = two_formats(trace.inventory)
    loaded = replay_importance(passes, inventory, policy, (high,), (low,))
    distinct = len(np.unique(np.concatenate([each.computed for each in passes])))
    assert sum(loaded) >= distinct * LOW_BYTES and loaded.prefill_bytes > 0
    everything = replay_importance(passes, inventory, policy, (18,), (18,))
    assert sum(everything) <= distinct * (HIGH_BYTES + LOW_BYTES)
    if retention == 1.0:
        assert sum(everything) == distinct * HIGH_BYTES


# -- the study
def test_shares_over_a_window_are_of_the_tokens_before_its_end(monkeypatch):
    monkeypatch.setattr(precision_replay, "WINDOW_TOKENS", 10)
    high = np.repeat([0, 1], 20)
    found = HotnessReplay(high == 0, np.ones(40, np.int64), np.ones(40, np.int64), high, 0 * high, [])
    tokens, shares = windowed(found, 20)
    at = dict(zip(tokens, shares, strict=True))
    assert at[0] == 0.0 and at[10] == 1.0 and at[5] == 0.5 and min(at) < 0


@pytest.mark.parametrize("split", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("budget", [8, 20, 31, 60])
def test_any_split_of_a_budget_fits_it(split, budget):
    inventory = two_formats(inventory_of(2, 8, 2))
    high, low = slabs_of(split, budget * HIGH_BYTES, inventory)
    assert high * HIGH_BYTES + low * LOW_BYTES <= budget * HIGH_BYTES and low >= 2 and 2 <= high <= 16
    assert high == 16 or (high + 1) * HIGH_BYTES + low * LOW_BYTES > budget * HIGH_BYTES  # nothing is left over


def test_streams_are_made_of_all_sorts_of_requests_and_shift_half_way():
    asked = [prompt.name for prompt in prompts(2)]
    assert len(set(asked)) == len(asked)
    steps = [(name, Phase.DECODE, [[0]], [1.0]) for name in asked]
    found = {stream.name: stream for stream in streams(read(trace_of(steps)))}
    sort = {name: [{each.request.split("/")[0] for each in part} for part in found[name].segments] for name in found}
    assert sort["mixed"] == [{"first icons", "second icons"}]
    assert sort["other icons"] == [{"first icons"}, {"second icons"}] and sort["then text"] == [{"first icons"}, {"text only"}]
    assert sort["in turns"][:3] == [{"first icons"}, {"text only"}, {"first icons"}]
    assert found["other icons"].passes[found["other icons"].shift].request.startswith("second icons")


def test_all_studies_run_and_the_last_line_is_one_json_object(monkeypatch, tmp_path, capsys):
    trace = skewed_trace(2, 8, 2, requests=12, prompt_tokens=12, tokens=12)
    names = [f"{group}/{n}/x" for n in range(4) for group in ("first icons", "second icons", "text only")]
    steps = [dataclasses.replace(each, request=names[int(each.request.split("-")[1])]) for each in trace.steps]
    monkeypatch.setattr(precision_replay, "record", lambda *_: SyntheticTrace(trace.inventory, steps))
    monkeypatch.setattr(precision_replay, "WINDOW_TOKENS", 20)
    for name, few in {
        "DECAYS": (0.9, 0.98),
        "PERIODS": (8, 16),
        "HYSTERESES": (1.0, 1.5),
        "SPLITS": (0.5, 1.0),
        "BUDGETS": (0.5,),
    }.items():
        monkeypatch.setattr(precision_replay, name, few)
    monkeypatch.setattr(precision_replay, "MOST_BYTES", 10.0)
    assert precision_replay.main(["--answer", "60", "--work", str(tmp_path), "--figures", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert list(result) == ["streams", *precision_replay.STUDIES]
    assert len(result["decay"]["variants"]) == 4 and len(result["hysteresis"]["variants"]) == 4
    assert all(row["times_best"] > 0 for row in result["pools"]) and len(list(tmp_path.glob("precision-replay-*.png"))) == 2


def test_the_best_is_chosen_among_those_that_move_little_and_of_equals_the_one_with_fewer_updates():
    def some(name, mean, moved, period_tokens=8):
        point = precision_replay.Point("s", 0.25, mean, mean, 1.0, 1.0, 1.0, moved)
        return precision_replay.Variant(name, 0.9, period_tokens, 1.0, [point])

    found = [some("restless", 0.9, 1.0), some("best", 0.8, 0.001), some("idle", 0.7, 0.0, 64)]
    assert chosen(found).name == "best"
    assert chosen([*found, some("rare", 0.799, 0.001, 16)]).name == "rare"


@pytest.mark.parametrize(
    ("controller", "promoted"), [(precision_replay.PaperThreshold, []), (precision_replay.NoThreshold, [ExpertId(0, 2)])]
)
def test_with_the_threshold_of_the_paper_nobody_becomes_hot_once_use_is_spread_more_evenly(controller, promoted):
    steps = [[[0, 1]]] * 2 + [[[2, 3]]] * 8
    weights = [[0.9, 0.1]] * 2 + [[0.4, 0.35]] * 8
    trace = trace_of([("r", Phase.DECODE, ids, each) for ids, each in zip(steps, weights, strict=True)])
    inventory, quotas = two_formats(trace.inventory), np.array([1])
    found = replay_hotness(read(trace), inventory, HOTNESS, quotas, controller=controller)
    assert found.updates[0].promote == (ExpertId(0, 0),)
    assert [expert for update in found.updates[1:] for expert in update.promote] == promoted
