"""The prefetch cap and order, as pure functions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vismoe.paging.speculation import PROBE_STEPS, SpeculationCap, prefetch_order


def test_the_cap_closes_itself_when_guesses_are_wasted_and_opens_again_when_they_pay():
    cap = SpeculationCap.open(most_bytes=32, unit_bytes=1)
    for _ in range(6):
        cap = cap.after_step(used=1, wasted=9)
    assert cap.bytes_per_step == 0
    let_through = 0
    for _ in range(PROBE_STEPS):
        cap = cap.after_step(used=0, wasted=0)
        let_through += cap.bytes_per_step
        if cap.bytes_per_step:
            break
    assert let_through == 1, "a closed cap probes with one expert"
    for _ in range(40):
        cap = cap.after_step(used=9, wasted=1)
    assert cap.bytes_per_step == cap.most_bytes


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=80), st.integers(1, 1000), st.integers(1, 50))
def test_the_cap_stays_between_zero_and_its_most(steps, most, unit):
    cap = SpeculationCap.open(max(most, unit), unit)
    for used, wasted in steps:
        cap = cap.after_step(used, wasted)
        assert 0 <= cap.bytes_per_step <= cap.most_bytes


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 20), st.integers(0, 1000))
def test_prefetch_order_takes_the_best_absent_experts_and_nothing_else(window, experts, count, seed):
    rng = np.random.default_rng(seed)
    scores = rng.random((window, experts)).astype(np.float32) * (rng.random((window, experts)) < 0.5)
    absent = rng.random((window, experts)) < 0.6
    distance, expert = prefetch_order(scores, absent, count)
    value = scores * 0.8 ** np.arange(window)[:, None] * absent
    wanted = np.sort(value[value > 0])[::-1][:count]
    assert np.allclose(value[distance, expert], wanted, rtol=1e-5)
