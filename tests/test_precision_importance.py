"""Who is critical, against examples worked by hand and against DyMoE's equations written as loops over tokens and experts."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.precision.depth import critical_count, critical_counts, ratios_of, retention_of
from vismoe.precision.importance import (
    by_chance,
    by_gate,
    by_load,
    critical_ahead,
    heaviest,
    heavy_hitters,
    skipped,
)

EXPERTS = 6
RATIOS = (0.0, 0.25, 0.5, 0.6, 0.75, 0.9, 1.0)


# ------------------------------------------------------------------ how many (equations 4 and 5)
def test_the_first_layer_keeps_all_the_last_lambda_and_the_middle_the_mean():
    assert [retention_of(layer, 5, 0.75) for layer in (0, 2, 4)] == pytest.approx([1.0, 0.75, 0.5])
    assert retention_of(1, 5, 0.75) == pytest.approx(0.5 * (math.cos(math.pi / 4) + 1) / 2 + 0.5)


@given(layers=st.integers(1, 94), mean=st.floats(0.5, 1.0))
def test_retention_falls_with_depth_and_has_the_mean_that_was_asked_for(layers, mean):
    ratios = ratios_of(layers, mean, "cosine")
    assert sum(ratios) / layers == pytest.approx(mean)
    assert all(early >= late for early, late in pairwise(ratios)) and max(ratios) <= 1 and min(ratios) >= -1e-12
    assert ratios_of(layers, mean, "equal") == [mean] * layers


@given(numerator=st.integers(0, 100), demanded=st.integers(0, 300))
def test_the_count_is_the_ceiling_of_the_decimal_ratio_whatever_floating_point_makes_of_it(numerator, demanded):
    exact = math.ceil(Fraction(numerator, 100) * demanded)
    assert critical_count(numerator / 100, demanded) == exact
    assert critical_counts(numerator / 100, np.array([demanded])).tolist() == [exact]


def test_counts_at_which_the_product_lies_just_above_a_whole_number():
    assert 0.07 * 100 > 7 and critical_count(0.07, 100) == 7 and critical_counts(0.07, np.array([100])).tolist() == [7]
    assert critical_count(0.75, 4) == 3 and critical_count(1.0, 8) == 8 and critical_count(0.01, 8) == 1


# ------------------------------------------------------------------ one layer's routing
@st.composite
def layers(draw, most_tokens=8):
    """Routing of a batch: sequences, padding, sentinels above and below, and weights with ties."""
    tokens, top_k = draw(st.integers(0, most_tokens)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    routing = rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :top_k].astype(np.int64)
    routing[rng.random(routing.shape) < 0.15] = EXPERTS
    routing[rng.random(routing.shape) < 0.05] = -1
    weights = (rng.integers(1, 5, routing.shape) / 8).astype(np.float32)
    sequence = np.sort(rng.integers(0, draw(st.integers(1, 3)), tokens))
    real = rng.random(tokens) < 0.8
    hitters = real & (rng.random(tokens) < 0.5)
    return routing, weights, hitters, sequence, real


def slow_by_gate(routing, weights, ratio, real):
    critical = np.zeros(routing.shape, bool)
    for token in np.flatnonzero(real):
        own = [k for k, expert in enumerate(routing[token]) if 0 <= expert < EXPERTS]
        own.sort(key=lambda k: (-weights[token, k], routing[token, k]))
        critical[token, own[: critical_count(ratio, len(own))]] = True
    return critical


def slow_by_load(routing, weights, hitters, ratio, sequence, real):
    critical = np.zeros(routing.shape, bool)
    for one in set(sequence.tolist()):
        rows = [token for token in range(len(routing)) if sequence[token] == one and real[token]]
        experts = {expert for token in rows for expert in routing[token].tolist() if 0 <= expert < EXPERTS}

        def worth(expert, rows=rows):
            users = [token for token in rows if expert in routing[token]]
            mass = sum(float(weights[token][routing[token] == expert].sum()) for token in users)
            return (-sum(bool(hitters[token]) for token in users), -len(users), -mass, expert)

        best = sorted(experts, key=worth)[: critical_count(ratio, len(experts))]
        for token in rows:
            critical[token] = np.isin(routing[token], best)
    return critical


def test_a_token_keeps_its_heaviest_experts_in_decode():
    routing = np.array([[4, 1, 3, 0], [2, 5, 0, 1]])
    weights = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.1, 0.4]], np.float32)
    assert by_gate(routing, weights, EXPERTS, 0.75).tolist() == [[True, True, True, False], [False, True, True, True]]
    assert by_gate(routing, weights, EXPERTS, 0.5).tolist() == [[True, True, False, False], [False, True, False, True]]
    assert heaviest(routing[1].tolist(), weights[1].tolist(), EXPERTS, 0.75) == [1, 5, 0]


def test_in_prefill_the_experts_of_heavy_hitters_are_critical_however_few_tokens_they_have():
    routing = np.array([[0, 1], [0, 1], [0, 2], [3, 2]])
    weights = np.full((4, 2), 0.5, np.float32)
    hitters = np.array([False, False, False, True])  # the last token alone: experts 3 and 2
    critical = by_load(routing, weights, hitters, EXPERTS, 0.5, None, None)
    assert critical.tolist() == [[False, False], [False, False], [False, True], [True, True]]


def test_ties_of_the_load_go_to_more_tokens_then_weight_then_the_smaller_id():
    routing = np.array([[5, 4], [5, 3], [2, 1]])
    weights = np.array([[0.125, 0.25], [0.125, 0.5], [0.25, 0.25]], np.float32)
    nobody = np.zeros(3, bool)
    order = [5, 3, 1, 2, 4]  # two tokens, however light; 0.5; then 0.25 each
    for count in range(1, 6):
        critical = by_load(routing, weights, nobody, EXPERTS, count / 5)
        assert set(routing[critical].tolist()) == set(order[:count])


@given(layer=layers(), ratio=st.sampled_from(RATIOS))
def test_both_orders_are_the_equations_written_as_loops(layer, ratio):
    routing, weights, hitters, sequence, real = layer
    gate = by_gate(routing, weights, EXPERTS, ratio, real)
    assert np.array_equal(gate, slow_by_gate(routing, weights, ratio, real))
    load = by_load(routing, weights, hitters, EXPERTS, ratio, sequence, real)
    assert np.array_equal(load, slow_by_load(routing, weights, hitters, ratio, sequence, real))
    for token in np.flatnonzero(real):
        alone = heaviest(routing[token].tolist(), weights[token].tolist(), EXPERTS, ratio)
        assert set(alone) == set(routing[token][gate[token]].tolist())
        assert sorted(alone, key=lambda e: (-weights[token][routing[token] == e][0], e)) == alone


@given(layer=layers(), ratio=st.sampled_from(RATIOS))
def test_company_changes_nothing_for_a_sequence_or_a_token(layer, ratio):
    routing, weights, hitters, sequence, real = layer
    load = by_load(routing, weights, hitters, EXPERTS, ratio, sequence, real)
    for one in set(sequence.tolist()):
        rows = (sequence == one) & real
        alone = by_load(routing[rows], weights[rows], hitters[rows], EXPERTS, ratio)
        assert np.array_equal(load[rows], alone)
    gate = by_gate(routing, weights, EXPERTS, ratio, real)
    for token in np.flatnonzero(real):
        assert np.array_equal(gate[token : token + 1], by_gate(routing[[token]], weights[[token]], EXPERTS, ratio))


@given(layer=layers(), ratio=st.sampled_from(RATIOS), seed=st.integers(0, 99))
def test_sentinels_and_padding_are_never_critical_and_demand_nothing(layer, ratio, seed):
    routing, weights, hitters, sequence, real = layer
    chance = by_chance(routing, EXPERTS, ratio, np.random.default_rng(seed), sequence, real)
    load = by_load(routing, weights, hitters, EXPERTS, ratio, sequence, real)
    for critical in (load, chance, by_gate(routing, weights, EXPERTS, ratio, real)):
        assert not critical[~real].any() and not critical[(routing < 0) | (routing >= EXPERTS)].any()
    for one in set(sequence.tolist()):  # by chance: as many experts as by load, all or none of an expert's choices
        rows = (sequence == one) & real
        assert len(set(routing[rows][chance[rows]])) == len(set(routing[rows][load[rows]]))
        assert not set(routing[rows][chance[rows]]) & set(routing[rows][~chance[rows] & (routing[rows] < EXPERTS)]) - {-1}


def test_by_chance_every_expert_is_critical_as_often():
    routing, rng = np.array([[0, 1, 2, 3]]), np.random.default_rng(0)
    times = sum(by_chance(routing, EXPERTS, 0.5, rng)[0].astype(int) for _ in range(2000))
    assert times.sum() == 4000 and np.all(np.abs(times - 1000) < 100)


# ------------------------------------------------------------------ heavy hitters
def test_a_fifth_of_the_tokens_are_heavy_hitters_and_ties_go_to_the_first():
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.2, 0.1])
    assert np.flatnonzero(heavy_hitters(scores)).tolist() == [1, 2]  # ceil(0.2 * 6)
    assert np.flatnonzero(heavy_hitters(scores[:5])).tolist() == [1]


@given(scores=st.lists(st.integers(0, 4), max_size=20), share=st.sampled_from([0.05, 0.2, 0.5, 1.0]), seed=st.integers(0, 99))
def test_heavy_hitters_are_those_of_each_sequence_by_itself(scores, share, seed):
    rng, scores = np.random.default_rng(seed), np.array(scores, np.float32)
    sequence, real = rng.integers(0, 4, len(scores)), rng.random(len(scores)) < 0.7
    expected = np.zeros(len(scores), bool)
    for one in range(4):
        rows = [i for i in range(len(scores)) if sequence[i] == one and real[i]]
        best = sorted(rows, key=lambda i: (-scores[i], i))
        expected[best[: math.ceil(share * len(rows) - 1e-9)]] = True
    assert np.array_equal(heavy_hitters(scores, real, sequence, share), expected)
    assert all(expected[(sequence == one) & real].any() for one in set(sequence[real]))  # at least one of each


# ------------------------------------------------------------------ skipping
def test_what_remains_of_a_token_is_scaled_to_the_sum_of_all_before():
    routing = np.array([[4, 1, 3, 0], [2, EXPERTS, 5, 1]])
    weights = np.array([[0.4, 0.3, 0.2, 0.1], [0.2, 9.0, 0.6, 0.4]], np.float32)
    critical = np.array([[True, True, False, False], [False, False, True, True]])
    ids, scaled = skipped(routing, weights, critical, EXPERTS, renormalise=True)
    assert ids.tolist() == [[4, 1, EXPERTS, EXPERTS], [EXPERTS, EXPERTS, 5, 1]]
    assert scaled.tolist() == [pytest.approx([4 / 7, 3 / 7, 0, 0]), pytest.approx([0, 0, 0.72, 0.48])]
    assert skipped(routing, weights, critical, EXPERTS, renormalise=False)[1].tolist() == [
        pytest.approx([0.4, 0.3, 0, 0]),
        pytest.approx([0, 0, 0.6, 0.4]),
    ]
    assert routing[0, 2] == 3 and weights[0, 3] == np.float32(0.1)


def test_a_token_of_which_nothing_remains_adds_nothing():
    routing, weights = np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32)
    ids, left = skipped(routing, weights, np.zeros((1, 2), bool), EXPERTS, renormalise=True)
    assert ids.tolist() == [[EXPERTS, EXPERTS]] and left.tolist() == [[0, 0]]


@given(layer=layers(), ratio=st.sampled_from(RATIOS), renormalise=st.booleans())
def test_skipping_keeps_ids_types_and_each_tokens_proportions(layer, ratio, renormalise):
    routing, weights, *_ = layer
    critical = by_gate(routing, weights, EXPERTS, ratio)
    ids, left = skipped(routing, weights, critical, EXPERTS, renormalise)
    assert ids.dtype == np.int64 and left.dtype == np.float32
    assert np.array_equal(ids[critical], routing[critical]) and not ((ids >= 0) & (ids < EXPERTS) & ~critical).any()
    for token in range(len(routing)):
        kept, experts = critical[token], (routing[token] >= 0) & (routing[token] < EXPERTS)
        if kept.any():
            factor = weights[token][experts].sum() / weights[token][kept].sum() if renormalise else 1.0
            assert left[token][kept] == pytest.approx(weights[token][kept] * factor, rel=1e-6)


# ------------------------------------------------------------------ the next layers (equations 6 to 8)
def test_of_the_expected_experts_the_best_are_critical():
    scores = np.array([[0.0, 1.9, 1.2, 0.0, 1.2, 1.5], [0.0, 0.0, 1.5, 0.0, 0.0, 0.0]], np.float32)
    critical = critical_ahead(scores, [0.75, 0.5], [4, 4])
    assert np.flatnonzero(critical[0]).tolist() == [1, 2, 5] and np.flatnonzero(critical[1]).tolist() == [2]


def test_in_decode_no_more_count_as_demanded_than_a_token_can_choose_in_prefill_all_do():
    scores = np.array([[0.6, 0.5, 0.4, 0.3, 0.2, 0.1]], np.float32)
    assert critical_ahead(scores, [0.5], [2]).sum() == 1
    assert critical_ahead(scores, [0.5]).sum() == 3


@given(seed=st.integers(0, 999), ratio=st.sampled_from(RATIOS), most=st.integers(1, 8))
def test_nobody_unexpected_is_critical_and_nobody_better_is_left_out(seed, ratio, most):
    rng = np.random.default_rng(seed)
    scores = np.maximum(rng.integers(-3, 5, (3, EXPERTS)), 0).astype(np.float32)
    critical = critical_ahead(scores, [ratio] * 3, [most] * 3)
    for row, marked in zip(scores, critical):
        order = sorted(range(EXPERTS), key=lambda e: (-row[e], e))
        expected = min(most, int((row > 0).sum()))
        assert set(np.flatnonzero(marked)) == set(order[: critical_count(ratio, expected)])
