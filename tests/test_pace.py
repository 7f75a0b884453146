"""Passes as fitted from what they took, and the rows that a latency allows, with a clock that only scripted passes move."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import AMPLE, footprint, inventory

import vismoe
from vismoe.config import Settings
from vismoe.engine.pace import HALF_LIFE_PASSES, Line, Pace
from vismoe.engine.scheduler import Scheduler
from vismoe.planning.plan import plan
from vismoe.planning.throughput import MachineRates

EXPERT_BYTES = 2**19
PLAN = plan(
    footprint(inventory([(128, 8, 0)] * 4, [4096])),
    Settings(memory="50%", context=16_384, parallel=16),
    AMPLE,
    MachineRates(missing_bytes_per_s=1e9),
)


@given(st.floats(0, 10), st.floats(0, 1), st.lists(st.integers(1, 64), min_size=2, max_size=40))
def test_a_line_through_points_of_a_line_is_this_line(start, slope, rows):
    line = Line([(x, start + slope * x) for x in (1, 64)])
    for x in rows:
        line.add(x, start + slope * x)
    assert all(line(x) == pytest.approx(start + slope * x, abs=1e-6) for x in rows)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), min_size=1, max_size=40))
def test_a_line_is_never_below_zero_and_never_falls(points):
    line = Line(points)
    assert 0 <= line(1) <= line(2) * (1 + 1e-9) + 1e-12 and line(2) <= line(64) * (1 + 1e-9) + 1e-12


def test_what_passes_take_replaces_what_the_plan_expected():
    pace = Pace(PLAN, EXPERT_BYTES)
    assert pace.expected(16).seconds == pytest.approx(PLAN.passes[1].seconds)
    assert pace.achieved_tokens_per_s == 0
    for _ in range(6 * HALF_LIFE_PASSES):
        for rows in (2, 8):  # computing takes 0.1 s and 0.02 a row, and stalls come on top
            pace.passed(rows, 0.1 + 0.02 * rows + 0.05, 0.05, misses=0)
    found = pace.expected(8)
    assert found.compute_seconds == pytest.approx(0.26, rel=0.02) and found.reading_seconds < 1e-3 and found.bound == "compute"
    assert pace.rho(8) > 100
    assert pace.achieved_rows == pytest.approx(5, abs=0.1)
    assert pace.achieved_tokens_per_s == pytest.approx(10 / 0.5, rel=0.05)


def test_passes_that_wait_for_the_disk_all_the_time_say_what_a_miss_takes():
    pace = Pace(PLAN, EXPERT_BYTES)
    for _ in range(6 * HALF_LIFE_PASSES):
        pace.passed(4, 1.0, 0.9, misses=100)  # 10 ms each, not half a millisecond
    found = pace.expected(4)
    assert found.reading_seconds == pytest.approx(1.0, rel=0.02) and found.compute_seconds == pytest.approx(0.1, rel=0.05)
    assert found.seconds == found.reading_seconds and pace.rho(4) == pytest.approx(0.1, rel=0.06)


def test_what_a_miss_takes_is_not_learnt_from_passes_that_compute_meanwhile():
    """Nor from those that wait for something else: less than half of their time is a stall."""
    pace, before = Pace(PLAN, EXPERT_BYTES), Pace(PLAN, EXPERT_BYTES)
    for _ in range(2 * HALF_LIFE_PASSES):
        pace.passed(4, 1.0, 0.4, misses=100)
        before.passed(4, 1.0, 0.0, misses=100)
    assert pace.expected(4).reading_seconds == pytest.approx(before.expected(4).reading_seconds)


def test_where_nothing_overlaps_a_pass_takes_the_sum_and_a_miss_its_stall():
    rates = dataclasses.replace(PLAN.rates, overlaps=False)
    pace = Pace(dataclasses.replace(PLAN, rates=rates), EXPERT_BYTES)
    for _ in range(6 * HALF_LIFE_PASSES):
        pace.passed(4, 1.0, 0.6, misses=100)
    found = pace.expected(4)
    assert found.reading_seconds == pytest.approx(0.6, rel=0.02) and found.compute_seconds == pytest.approx(0.4, rel=0.05)
    assert found.seconds == found.reading_seconds + found.compute_seconds


class Row:
    """A request whose steps move the clock, alone or with others."""

    unwanted, grows, may_give_up, tokens, company = False, 0, False, 1, "all"

    def __init__(self, steps, world):
        self.left, self.world, self.ended, self.times = steps, world, threading.Event(), []

    def step(self):
        return self.step_with([])[0]

    def step_with(self, others):
        rows = [self, *others]
        self.world.passed(len(rows))
        for row in rows:
            row.left -= 1
            row.times.append(self.world.now_s)
        return [row.left > 0 for row in rows]

    def finish(self):
        self.ended.set()

    def fail(self, error):
        raise AssertionError(error)


class World:
    """Passes of B rows take 0.1 s and 0.05 s a row."""

    def __init__(self, pace):
        self.pace, self.now_s, self.sizes, self.gate = pace, 0.0, [], threading.Event()

    def passed(self, rows):
        self.gate.wait(20)
        seconds = 0.1 + 0.05 * rows
        self.now_s += seconds
        self.sizes.append(rows)
        self.pace.passed(rows, seconds, 0.0, misses=0)


@pytest.mark.parametrize(("latency", "most"), [(None, 16), (0.31, 4), (0.05, 1)])
def test_passes_and_admission_come_to_keep_the_latency(latency, most):
    world = World(Pace(PLAN, EXPERT_BYTES))

    def between(scheduler):
        scheduler.most_rows = world.pace.most_rows(latency)
        if latency is not None:
            scheduler.most_running = scheduler.most_rows

    scheduler = Scheduler(10_000, most_rows=16, between=between)
    rows = [Row(200, world) for _ in range(24)]
    for row in rows:
        scheduler.ask(row)
    world.gate.set()
    for row in rows:
        assert row.ended.wait(20)
    scheduler.close()
    late = world.sizes[len(world.sizes) // 2 :]
    assert max(late) == most  # and no fewer: what the latency allows is used
    last = [later - earlier for row in rows[-3:] for earlier, later in zip(row.times[100:], row.times[101:])]
    if most > 1 and latency is not None:
        assert max(last) <= latency + 1e-9


def test_a_server_says_what_it_expects_and_what_came():
    with vismoe.load(None, memory="50%", context=2048, latency=1e-6) as engine:
        planned = {one.rows: one for one in engine.plan.passes}
        assert engine.plan.rows == 1 and engine.pace.tokens_per_s == 0  # no pass is so short: the shortest there is
        assert engine.pace.expected_tokens_per_s == pytest.approx(planned[1].tokens_per_s)
        replies = [engine.chat([{"role": "user", "content": "Hello!"}], max_tokens=6) for _ in range(3)]
        assert all(list(reply) for reply in replies)
        now = engine.pace
        assert now.planned_rows == now.most_rows == 1 and now.rows == 1
        assert now.tokens_per_s > 0 and now.expected_tokens_per_s > 0
        assert all(one.rows == 1 for reply in replies for one in reply.figures.passes)
