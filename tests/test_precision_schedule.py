"""Who is promoted and who demoted, against algorithm 1 of DynaExq as the paper writes it, and under loads that shift."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.precision.schedule import Schedule, schedule, threshold
from vismoe.types import ExpertId


def algorithm_1(scores, hot, quota, least):
    """Lines 14 to 22 for one layer: (upgrades, downgrades)."""
    by_score = sorted(range(len(scores)), key=lambda expert: -scores[expert])
    high = {expert for expert in by_score[:quota] if scores[expert] >= least}
    return high - set(np.flatnonzero(hot)), set(np.flatnonzero(hot)) - high


def one_by_one(scores, hot, quota, least, hysteresis):
    """One layer of ours: the hottest newcomer against the coldest that is hot, as long as it wins."""
    hot, joined, left = set(np.flatnonzero(hot).tolist()), [], []
    while len(hot) > quota:
        left.append(min(hot, key=lambda expert: (scores[expert], expert)))
        hot.remove(left[-1])
    incumbents = set(hot)
    newcomers = [e for e in range(len(scores)) if e not in hot and e not in left and scores[e] >= least and scores[e] > 0]
    for expert in sorted(newcomers, key=lambda e: (-scores[e], e)):
        if len(hot) == quota:
            coldest = min(incumbents, key=lambda e: (scores[e], e), default=None)
            if coldest is None or scores[expert] <= hysteresis * scores[coldest]:
                break
            hot.remove(coldest)
            incumbents.remove(coldest)
            left.append(coldest)
        hot.add(expert)
        joined.append(expert)
    return joined, left


def apply(hot, moves):
    hot = hot.copy()
    for expert in moves.promote:
        assert not hot[expert]
        hot[expert] = True
    for expert in moves.demote:
        assert hot[expert]
        hot[expert] = False
    return hot


@st.composite
def states(draw, ties=True):
    """Scores, who is hot (perhaps more than the quota allows), quotas."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    scores = rng.integers(0, 5, (layers, experts)) / 8 if ties else rng.permuted(np.arange(1.0, layers * experts + 1))
    scores = scores.reshape(layers, experts)
    return scores, rng.random((layers, experts)) < rng.random(), rng.integers(0, experts + 1, layers)


# ------------------------------------------------------------------ examples
def test_the_hottest_take_the_free_places_and_then_those_of_the_coldest():
    scores = np.array([[0.1, 0.4, 0.3, 0.15, 0.05]])
    hot = np.array([[True, False, False, True, False]])
    moves = schedule(scores, hot, np.array([3]), None, 1.25)
    assert moves == Schedule(promote=[ExpertId(0, 1), ExpertId(0, 2)], demote=[ExpertId(0, 0)])


def test_a_challenger_must_be_clearly_hotter():
    hot, quotas = np.array([[True, False]]), np.array([1])
    assert schedule(np.array([[0.2, 0.25]]), hot, quotas, None, 1.25) == Schedule()
    assert schedule(np.array([[0.2, 0.26]]), hot, quotas, None, 1.25).promote == [ExpertId(0, 1)]


def test_below_the_threshold_nobody_joins_and_nobody_has_to_leave():
    scores, hot = np.array([[0.01, 0.02, 0.05, 0.3]]), np.array([[True, False, False, True]])
    assert schedule(scores, hot, np.array([3]), np.array([0.04]), 1.25) == Schedule(promote=[ExpertId(0, 2)])
    assert schedule(scores, hot, np.array([2]), np.array([0.06]), 1.25) == Schedule()


def test_moves_of_all_layers_are_in_order_of_hotness():
    scores = np.array([[0.2, 0.6, 0.1], [0.5, 0.0, 0.05], [0.3, 0.9, 0.3]])
    hot = np.array([[True, False, False], [False, True, False], [True, False, True]])
    moves = schedule(scores, hot, np.array([1, 1, 1]), None, 1.25)
    assert moves.promote == [ExpertId(2, 1), ExpertId(0, 1), ExpertId(1, 0)]
    assert moves.demote == [ExpertId(1, 1), ExpertId(0, 0), ExpertId(2, 0), ExpertId(2, 2)]


def test_the_threshold_is_the_score_of_the_last_that_fits_and_at_most_the_mean():
    scores = np.array([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05], [0.25] * 4, [1.0, 0, 0, 0]])
    assert threshold(scores, np.array([3, 1, 2, 0])).tolist() == pytest.approx([0.15, 0.25, 0.25, np.inf])


# ------------------------------------------------------------------ against the slow ones
@settings(max_examples=300)
@given(state=states(), hysteresis=st.sampled_from([1.0, 1.25, 2.0]), least=st.sampled_from([None, 0.125, 0.3]))
def test_all_layers_at_once_is_one_newcomer_after_the_other(state, hysteresis, least):
    scores, hot, quotas = state
    limit = None if least is None else np.full(len(scores), least)
    moves = schedule(scores, hot, quotas, limit, hysteresis)
    for layer in range(len(scores)):
        joined, left = one_by_one(scores[layer], hot[layer], quotas[layer], least or 0.0, hysteresis)
        assert {e.expert for e in moves.promote if e.layer == layer} == set(joined)
        assert {e.expert for e in moves.demote if e.layer == layer} == set(left)
    assert [scores[e] for e in moves.promote] == sorted((scores[e] for e in moves.promote), reverse=True)
    assert [scores[e] for e in moves.demote] == sorted(scores[e] for e in moves.demote)


@settings(max_examples=200)
@given(state=states(ties=False), least=st.sampled_from([None, 3.5, 8.5]))
def test_without_hysteresis_it_is_algorithm_1_but_who_is_cold_stays_while_nobody_needs_the_place(state, least):
    scores, hot, quotas = state
    limit = None if least is None else np.full(len(scores), least)
    after = apply(hot, schedule(scores, hot, quotas, limit, 1.0))
    for layer in range(len(scores)):
        up, down = algorithm_1(scores[layer], hot[layer], quotas[layer], least or 0.0)
        paper = (set(np.flatnonzero(hot[layer])) | up) - down
        ours = set(np.flatnonzero(after[layer]))
        assert paper <= ours
        assert ours - paper <= set(np.flatnonzero(hot[layer])) and all(scores[layer, e] < (least or 0) for e in ours - paper)
        if least is None:
            assert ours == paper


# ------------------------------------------------------------------ what always holds
@settings(max_examples=200)
@given(state=states(), hysteresis=st.sampled_from([1.0, 1.25, 2.0]), warm=st.booleans())
def test_quotas_hold_nobody_moves_twice_and_demotions_are_those_that_make_room(state, hysteresis, warm):
    scores, hot, quotas = state
    moves = schedule(scores, hot, quotas, threshold(scores, quotas) if warm else None, hysteresis)
    after = apply(hot, moves)
    assert not set(moves.promote) & set(moves.demote)
    for layer in range(len(scores)):
        joined = sum(expert.layer == layer for expert in moves.promote)
        left = sum(expert.layer == layer for expert in moves.demote)
        assert after[layer].sum() <= quotas[layer]
        assert left == max(0, hot[layer].sum() + joined - quotas[layer])
    again = schedule(scores, after, quotas, threshold(scores, quotas) if warm else None, hysteresis)
    assert again == Schedule()  # the same scores move nobody a second time


@settings(max_examples=200)
@given(state=states(), hysteresis=st.sampled_from([1.0, 1.25, 2.0]))
def test_a_clear_winner_is_never_kept_out(state, hysteresis):
    scores, hot, quotas = state
    after = apply(hot, schedule(scores, hot, quotas, None, hysteresis))
    for layer in range(len(scores)):
        inside, outside = scores[layer, after[layer]], scores[layer, ~after[layer]]
        if len(inside) and len(outside):
            assert outside.max() <= hysteresis * inside.min()
        if after[layer].sum() < quotas[layer]:
            assert not (outside > 0).any()


def test_hysteresis_swaps_less_under_a_load_that_alternates():
    rng = np.random.default_rng(0)
    taste = rng.random((4, 32)) ** 3

    def swaps(hysteresis):
        hot, moved = np.zeros(taste.shape, bool), 0
        noise = np.random.default_rng(1)
        for _ in range(50):
            moves = schedule(taste * noise.uniform(0.9, 1.1, taste.shape), hot, np.full(4, 8), None, hysteresis)
            hot, moved = apply(hot, moves), moved + len(moves.promote)
        return moved - 32  # without the first ones

    assert swaps(1.0) > 20 and swaps(1.25) <= 2


@pytest.mark.parametrize(("hysteresis", "swaps"), [(1.0, 20), (1.5, 0)])
def test_two_loads_that_alternate_swap_nobody_unless_they_differ_clearly(hysteresis, swaps):
    hot, moved = np.array([[True, False]]), 0
    for update in range(20):
        scores = np.array([[0.5, 0.6]] if update % 2 == 0 else [[0.6, 0.5]])
        moves = schedule(scores, hot, np.array([1]), None, hysteresis)
        hot, moved = apply(hot, moves), moved + len(moves.promote)
    assert moved == swaps
    assert schedule(np.array([[0.5, 0.8]]), np.array([[True, False]]), np.array([1]), None, hysteresis).promote


def test_a_small_quota_follows_a_load_that_becomes_even():
    """With the threshold of one dominant expert nobody would be promoted any more."""
    quotas, before = np.array([1]), np.array([[0.97, 0.01, 0.01, 0.01]])
    least = threshold(before, quotas)
    hot = apply(np.zeros((1, 4), bool), schedule(before, np.zeros((1, 4), bool), quotas, least, 1.25))
    assert hot[0].tolist() == [True, False, False, False]
    assert schedule(np.array([[0.01, 0.36, 0.33, 0.3]]), hot, quotas, least, 1.25).promote == [ExpertId(0, 1)]
