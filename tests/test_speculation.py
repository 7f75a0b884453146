"""The prefetch cap and order as pure functions, and the rule they serve, in virtual time: speculation pays or stops."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from searching import SEARCHING

from vismoe.paging.speculation import FIRST_UNITS, TRIAL_SHARE, WASTE_PRICE, Ledger, SpeculationCap, prefetch_order
from vismoe.simulate.demands import Demands
from vismoe.simulate.replay import ReplayResult, replay
from vismoe.trace.synthetic import SyntheticTrace, inventory_of, skewed_trace
from vismoe.types import Phase

UNIT = 10  # bytes of an expert
MISS_S = 2.0


# -- the cap
def test_the_cap_moves_by_what_guessing_won_and_lost():
    cap = SpeculationCap(most_bytes=100 * UNIT, unit_bytes=UNIT, credit_bytes=20.0 * UNIT)
    assert cap.after_step(seconds=0.0, balance_s=3 * MISS_S, miss_s=MISS_S).bytes_per_step == 23 * UNIT
    assert cap.after_step(seconds=0.0, balance_s=-3 * MISS_S, miss_s=MISS_S).bytes_per_step == 17 * UNIT
    assert cap.after_step(seconds=0.0, balance_s=-30 * MISS_S, miss_s=MISS_S).bytes_per_step == 0
    assert cap.after_step(seconds=5.0, balance_s=9.0, miss_s=0.0) == cap, "nobody knows what a miss costs"


def test_a_step_that_lost_much_is_paid_for_in_full_and_small_losses_are_forgiven():
    cap = SpeculationCap(100 * UNIT, UNIT, 0.0)
    for _ in range(9):
        cap = cap.after_step(seconds=0.0, balance_s=-MISS_S, miss_s=MISS_S)
    assert cap.credit_bytes == -FIRST_UNITS * UNIT
    cap = cap.after_step(seconds=0.0, balance_s=-50 * MISS_S, miss_s=MISS_S)
    assert cap.credit_bytes == -50 * UNIT
    cap = cap.after_step(seconds=0.0, balance_s=3 * MISS_S, miss_s=MISS_S)
    assert cap.credit_bytes == -47 * UNIT, "what was lost is not forgiven on the way back"


def test_a_closed_cap_lets_one_expert_through_as_often_as_its_trials_may_cost():
    cap, seconds, opened = SpeculationCap(100 * UNIT, UNIT, 0.0), 4.0, []
    for _ in range(1000):
        cap = cap.after_step(seconds, balance_s=-MISS_S if cap.bytes_per_step else 0.0, miss_s=MISS_S)
        opened.append(cap.bytes_per_step)
    trials = sum(nbytes > 0 for nbytes in opened)
    assert set(opened) == {0, UNIT} and trials == pytest.approx(1000 * TRIAL_SHARE * seconds / MISS_S, abs=1)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(-1e6, 1e6), st.floats(0, 10)), max_size=60),
    st.integers(1, 1000),
    st.integers(1, 50),
)
def test_the_cap_stays_between_zero_and_its_most(steps, most, unit):
    cap = SpeculationCap.open(max(most, unit), unit)
    for seconds, balance_s, miss_s in steps:
        cap = cap.after_step(seconds, balance_s, miss_s)
        assert cap.bytes_per_step == 0 or unit <= cap.bytes_per_step <= cap.most_bytes


# -- the ledger
def ledger_of_known_cost() -> Ledger:
    """Two layers of top 5: at most ten experts of ten bytes a token; a miss costs two seconds in decode."""
    ledger = Ledger(inventory_of(2, 8, 5, record_bytes=UNIT), [UNIT])
    ledger.begin_step(Phase.DECODE, 0.0)
    ledger.waited(stall_s=3 * MISS_S, misses=3, behind_s=0.0)
    return ledger


def credit_after(ledger: Ledger, seconds: float = 0.0) -> float:
    """In experts, beyond what it began with."""
    ledger.begin_step(Phase.DECODE, seconds)
    return ledger.caps[Phase.DECODE].credit_bytes / UNIT - FIRST_UNITS


@pytest.mark.parametrize(
    ("event", "experts"),
    [
        (lambda ledger: ledger.used(3, 3 * UNIT), 3.0),
        (lambda ledger: ledger.wasted(), -WASTE_PRICE),
        (lambda ledger: ledger.displaced(2), -2.0),
        (lambda ledger: ledger.asked(1.0, misses=0), -0.5),
        (lambda ledger: ledger.asked(5.0, misses=2), -0.5),  # four of the five seconds were waited anyway
        (lambda ledger: ledger.asked(1.0, misses=1), 0.0),
        (lambda ledger: ledger.waited(stall_s=5.0, misses=2, behind_s=3.0), -0.5),  # two copies take four seconds
        (lambda ledger: ledger.waited(stall_s=9.0, misses=2, behind_s=3.0), -1.5),  # no more than the guess took
        (lambda ledger: ledger.waited(stall_s=1.0, misses=1, behind_s=3.0), 0.0),
        (lambda ledger: (ledger.used(1, UNIT), ledger.waited(stall_s=0.5, misses=0, behind_s=0.5)), 0.75),  # late
    ],
)
def test_what_happens_in_a_step_is_worth_what_was_worked_out_by_hand(event, experts):
    ledger = ledger_of_known_cost()
    event(ledger)
    assert credit_after(ledger) == pytest.approx(experts)


def test_time_that_passes_is_credit_too():
    assert credit_after(ledger_of_known_cost(), seconds=100.0) == pytest.approx(TRIAL_SHARE * 100.0 / MISS_S)


def test_only_unused_bytes_count_against_the_allowance():
    ledger = ledger_of_known_cost()
    for _ in range(FIRST_UNITS):
        assert ledger.may_guess
        ledger.started(UNIT)
    assert not ledger.may_guess
    ledger.used(1, UNIT)
    assert ledger.may_guess and ledger.allowance_bytes == UNIT


def test_prefill_and_decode_have_a_cap_each():
    ledger = ledger_of_known_cost()
    ledger.displaced(FIRST_UNITS)
    ledger.begin_step(Phase.PREFILL, 0.0)
    assert ledger.allowance_bytes == FIRST_UNITS * UNIT
    ledger.begin_step(Phase.DECODE, 0.0)
    assert ledger.allowance_bytes == 0 and ledger.miss_s[Phase.PREFILL] == 0.0


# -- speculation pays or stops
LAYERS, EXPERTS, COMPUTE_S = 8, 24, 0.01
RECORD_BYTES = 1024


def recorded(noise: float = 0.1, prompt_tokens: int = 0) -> SyntheticTrace:
    """The same routing whatever the noise of the lookahead's scores."""
    return skewed_trace(
        LAYERS, EXPERTS, 3, tokens=70, requests=2, prompt_tokens=prompt_tokens, window=4, skew=0.9, score_noise=noise, seed=3
    )


def useless(trace: SyntheticTrace) -> SyntheticTrace:
    """As sure of itself as before, of other experts."""
    random = np.random.default_rng(1)

    def shuffled(routing):
        return dataclasses.replace(routing, scores=routing.scores[:, random.permutation(EXPERTS)])

    steps = [dataclasses.replace(step, layers=[shuffled(routing) for routing in step.layers]) for step in trace]
    return SyntheticTrace(trace.inventory, steps)


def turning(first: SyntheticTrace, then: SyntheticTrace, every: int) -> SyntheticTrace:
    """One for `every` steps, the other for as many, and so on."""
    pairs = enumerate(zip(first, then, strict=True))
    return SyntheticTrace(first.inventory, [one if number // every % 2 == 0 else other for number, (one, other) in pairs])


@functools.cache
def predictions() -> dict[str, Demands]:
    good, prompted = recorded(), recorded(prompt_tokens=30)
    wrong, half = useless(good), len(good.steps) // 2
    traces = {
        "good": good,
        "fair": recorded(noise=1.0),
        "useless": wrong,
        "good, then useless": turning(good, wrong, half),
        "useless, then good": turning(wrong, good, half),
        "turning every 20 tokens": turning(good, wrong, 20),
        "useless, with prompts": useless(prompted),
    }
    return {name: Demands.of(trace) for name, trace in traces.items()}


@functools.cache
def run(name: str, slots: str, copies_per_layer: float, lookahead_s: float, prefetch: bool | int = True) -> ReplayResult:
    """`copies_per_layer` pass the link while a layer computes; prefetch: by the cap, not at all, or so many bytes a step."""
    return replay(
        predictions()[name],
        slots,
        prefetch=bool(prefetch),
        prefetch_bytes_per_step=None if prefetch in (True, False) else prefetch,
        link_bytes_per_s=copies_per_layer * RECORD_BYTES / COMPUTE_S,
        compute_s_per_layer=COMPUTE_S,
        compute_s_per_token=COMPUTE_S / 10,
        lookahead_s=lookahead_s * COMPUTE_S,
    )


CONDITIONS = [
    ("12.5%", 0.25, 0.0),
    ("12.5%", 2.0, 0.05),
    ("33%", 1.0, 0.0),
    ("33%", 8.0, 0.2),
    ("66%", 2.0, 0.05),
    ("66%", 40.0, 0.1),
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_prefetch_is_never_three_percent_slower_than_none(condition):
    """Every second prediction under every second condition, the others under the others, unless somebody searches for more."""
    first, every = (0, 1) if SEARCHING else (CONDITIONS.index(condition) % 2, 2)
    for name in list(predictions())[first::every]:
        plain = "useless, with prompts" if "prompts" in name else "good"  # the same routing, and nobody looks at the scores
        ratio = run(name, *condition).seconds / run(plain, *condition, prefetch=False).seconds
        assert ratio <= 1.03, f"{name}: {ratio:.3f}"


@pytest.mark.parametrize(
    ("condition", "least"), [(("12.5%", 2.0, 0.05), 0.82), (("33%", 1.0, 0.0), 0.82), (("66%", 2.0, 0.05), 0.93)]
)
def test_good_prediction_is_clearly_faster_and_the_cap_does_not_stand_in_its_way(condition, least):
    off, on = run("good", *condition, prefetch=False).seconds, run("good", *condition).seconds
    unbounded = run("good", *condition, prefetch=LAYERS * 3 * RECORD_BYTES).seconds
    assert on < least * off and on - unbounded < 0.02 * off
    for name in ("good, then useless", "useless, then good"):
        won = off - run(name, *condition).seconds
        assert won > 0.3 * (off - on), f"{name}: the good half should win half of it"


def test_without_a_cap_useless_prediction_costs_much_and_with_it_hardly_any_bytes():
    condition = ("33%", 1.0, 0.0)
    off, on = run("useless", *condition, prefetch=False), run("useless", *condition)
    unbounded = run("useless", *condition, prefetch=LAYERS * 3 * RECORD_BYTES)
    assert unbounded.seconds > 1.15 * off.seconds
    wasted, without_cap = (result.counters.total("wasted_prefetch_bytes") for result in (on, unbounded))
    assert wasted < 0.1 * without_cap


# -- the order
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 20), st.integers(0, 1000))
def test_prefetch_order_takes_the_best_absent_experts_and_nothing_else(window, experts, count, seed):
    rng = np.random.default_rng(seed)
    scores = rng.random((window, experts)).astype(np.float32) * (rng.random((window, experts)) < 0.5)
    absent = rng.random((window, experts)) < 0.6
    distance, expert = prefetch_order(scores, absent, count)
    value = scores * 0.8 ** np.arange(window)[:, None] * absent
    wanted = np.sort(value[value > 0])[::-1][:count]
    assert np.allclose(value[distance, expert], wanted, rtol=1e-5)
