"""The choice of a way for each miss, against every possible division and against what must follow from more of something."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import ConfigError
from vismoe.paging.miss import CpuPace, Miss, Rates, Upgrades, Way, Ways, choose_ways
from vismoe.pair import HIGH, LOW, Format, FormatPair
from vismoe.precision.policy import Policy
from vismoe.precision.rules import serve
from vismoe.types import Phase

BYTES = 1000
rates = st.builds(Rates, st.floats(0.5, 100), st.floats(0.5, 100), st.floats(0, 1000))
misses = st.lists(st.builds(Miss, st.just(BYTES), st.integers(1, 64), st.booleans()), max_size=8)
queued = st.floats(0, 20 * BYTES)


def finished_s(ways, misses, rates, ahead_bytes):
    """When link and CPU are both done: written down independently of the chooser."""
    waiting = [miss for miss, way in zip(misses, ways, strict=True) if way is Way.WAIT]
    copied = sum(not miss.on_its_way for miss in waiting)
    link_s = (ahead_bytes + copied * BYTES) / rates.link_bytes_per_s if waiting else 0.0
    below = [miss for miss, way in zip(misses, ways, strict=True) if way is Way.CPU]
    return max(link_s, sum(max(BYTES / rates.cpu_bytes_per_s, miss.tokens * rates.cpu_s_per_token) for miss in below))


@settings(max_examples=300)
@given(misses, rates, queued)
def test_no_division_of_a_layers_misses_is_done_sooner(misses, rates, ahead):
    chosen = choose_ways(misses, rates, ahead)
    divisions = itertools.product((Way.WAIT, Way.CPU), repeat=len(misses))
    best = min(finished_s(division, misses, rates, ahead) for division in divisions)
    assert finished_s(chosen, misses, rates, ahead) <= best * (1 + 1e-9)


def by_cpu(misses, rates, ahead=0.0, cpu_ahead_s=0.0):
    return choose_ways(misses, rates, ahead, cpu_ahead_s).count(Way.CPU)


@given(misses, rates, queued, st.floats(1, 50))
def test_the_cpu_never_gets_less_by_a_longer_queue_a_slower_link_or_a_faster_cpu(misses, rates, ahead, more):
    before = by_cpu(misses, rates, ahead)
    assert by_cpu(misses, rates, ahead + more * BYTES) >= before
    assert by_cpu(misses, Rates(rates.link_bytes_per_s / more, rates.cpu_bytes_per_s, rates.cpu_s_per_token), ahead) >= before
    faster = Rates(rates.link_bytes_per_s, rates.cpu_bytes_per_s * more, rates.cpu_s_per_token / more)
    assert by_cpu(misses, faster, ahead) >= before
    assert by_cpu(misses, rates, ahead, cpu_ahead_s=more * BYTES / rates.cpu_bytes_per_s) <= before


def test_the_experts_with_the_fewest_tokens_are_computed_and_ties_go_by_position_and_to_copies():
    rates = Rates(10.0, 10.0, cpu_s_per_token=50.0)
    assert choose_ways([Miss(BYTES, 4), Miss(BYTES, 1), Miss(BYTES, 3)], rates) == [Way.WAIT, Way.CPU, Way.WAIT]
    assert choose_ways([Miss(BYTES), Miss(BYTES)], rates) == [Way.CPU, Way.WAIT]
    assert choose_ways([Miss(BYTES)], rates) == [Way.WAIT]
    assert choose_ways([], rates, link_ahead_bytes=5.0) == []


def test_what_is_on_its_way_is_waited_for_while_the_cpu_could_not_be_sooner():
    rates = Rates(10.0, 10.0)
    assert choose_ways([Miss(BYTES, on_its_way=True)], rates, 0.9 * BYTES) == [Way.WAIT]
    assert choose_ways([Miss(BYTES, on_its_way=True)], rates, 1.1 * BYTES) == [Way.CPU]


def test_deterministic_ways_do_not_look_at_the_queue_and_cpu_means_always():
    two, rates = [Miss(BYTES), Miss(BYTES)], (Rates(10.0, 9.0),)
    assert Ways("auto", rates).choose(0, two, 1e9) == [Way.CPU, Way.CPU]
    assert Ways("auto", rates, deterministic=True).choose(0, two, 1e9) == Ways("auto", rates).choose(0, two, 0.0)
    assert Ways("cpu", (Rates(1e9, 1.0),)).choose(0, two, 0.0) == [Way.CPU, Way.CPU]


def test_the_cpu_is_asked_only_where_that_saves_a_share_of_the_time():
    """Here it would take one of two misses, and save half."""
    two = [Miss(BYTES), Miss(BYTES)]
    assert choose_ways(two, Rates(10.0, 10.0, cpu_saves=0.5)) == [Way.CPU, Way.WAIT]
    assert choose_ways(two, Rates(10.0, 10.0, cpu_saves=0.51)) == [Way.WAIT, Way.WAIT]


def test_a_cpu_that_took_longer_than_its_rates_say_is_asked_less_until_that_is_forgotten():
    ways, pace = Ways("auto", (Rates(10.0, 10.0),)), CpuPace()
    misses = [Miss(BYTES)] * 4

    def asked(phase=Phase.DECODE):
        return ways.choose(0, misses, 0.0, None, pace.slowness(phase)).count(Way.CPU)

    assert asked() == 2
    pace.took(Phase.DECODE, 0.1, 1.0)
    assert asked() == 2, "sooner than expected is as expected"
    for _ in range(8):
        pace.took(Phase.DECODE, 8.0, 1.0)
    assert pace.slowness(Phase.DECODE) == 8.0 and asked() == 0 and asked(Phase.PREFILL) == 2
    assert (ways.in_step(0, 4, BYTES, None, 8.0), ways.in_step(0, 4, BYTES, None, 1.0), ways.in_step(0, 0, BYTES)) == (0, 2, 0)
    of_steps = replace(ways, step_rates=(Rates(10.0, 30.0, cpu_call_s=BYTES / 10),))
    assert of_steps.in_step(0, 4, BYTES) == 2 and of_steps.step_s(0, 3, BYTES) == pytest.approx(2 * BYTES / 10)
    passes = 0
    while not asked() and passes < 200:
        pace.begin_pass(Phase.DECODE)
        passes += 1
    assert 20 < passes < 100


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (1, 1, -1.0), (float("nan"), 1)])
def test_rates_that_cannot_be_are_refused(bad):
    with pytest.raises(ConfigError, match="above zero"):
        Rates(*bad)


@pytest.mark.parametrize("copied_bytes, in_time", [(700, True), (701, False)])
def test_an_upgrade_is_as_late_as_what_crosses_the_link_for_it(copied_bytes, in_time):
    """Not as the slab that is decoded from it."""
    policy = Policy(FormatPair(Format.LOSSLESS, Format.INT4), True, True)
    found = Upgrades(policy, (Rates(100.0, 1e9),)).choose(
        0, [3], copied_bytes, 1000, others_s=9.0, queued_bytes=200, borrowable=1
    )
    assert found == {3: serve(LOW, HIGH, policy, in_time)} and serve(LOW, HIGH, policy, True) != serve(LOW, HIGH, policy, False)
