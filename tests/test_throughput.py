"""How many rows a pass should have: the planner's choice against brute force over the formulas, and the bounds it keeps to."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from test_plan import AMPLE, GIB, MIB, footprint, inventory

from vismoe.config import Settings
from vismoe.planning.case import Case
from vismoe.planning.needs import CacheLayer
from vismoe.planning.plan import plan
from vismoe.planning.throughput import ExpectedPass, MachineRates, PassLayer, best_of, best_rows, expected, wanted_share

RATES = st.builds(
    MachineRates,
    weights_bytes_per_s=st.floats(1e8, 1e12),
    flop_per_s=st.floats(1e9, 1e14),
    missing_bytes_per_s=st.floats(1e7, 1e11),
    overlaps=st.booleans(),
    layer_s=st.floats(0, 1e-3),
    row_s=st.floats(0, 1e-3),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The numbers of the formulas, in bytes: S(B) = (M - fixed - B row) / slab."""

    memory: int
    fixed: int
    row: int  # what a row needs, its keys and values included
    slab: int
    layers: int
    experts: int
    top_k: int

    def share(self, rows: int) -> float:
        return min(1.0, max(0, self.memory - self.fixed - rows * self.row) / self.slab / (self.layers * self.experts))

    def loads(self, rows: int) -> list[PassLayer] | None:
        if self.memory - self.fixed - rows * self.row < 2 * self.slab and rows > 1:
            return None
        return [PassLayer(self.experts, self.top_k, self.slab, self.share(rows), 10 * MIB, 1e8)] * self.layers

    def tokens_per_s(self, rows: int, rates: MachineRates) -> float:
        """X(B), written down once more from the formulas."""
        seconds = 0.0
        for _ in range(self.layers):
            wanted_bytes = self.experts * (1 - (1 - self.top_k / self.experts) ** rows) * self.slab
            compute = (10 * MIB + wanted_bytes) / rates.weights_bytes_per_s
            compute += rates.layer_s + rows * (rates.row_s + 1e8 / rates.flop_per_s)
            reading = wanted_bytes * (1 - self.share(rows)) / rates.missing_bytes_per_s
            seconds += max(compute, reading) if rates.overlaps else compute + reading
        return rows / seconds


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    experts, layers, slab = draw(st.integers(2, 128)), draw(st.integers(1, 48)), draw(st.integers(1, 20)) * MIB
    top_k, fixed = draw(st.integers(1, experts)), draw(st.integers(0, 4 * GIB))
    memory = fixed + int(slab * experts * layers * draw(st.floats(0.02, 1.2)))
    return Machine(memory, fixed, draw(st.integers(0, 600)) * MIB, slab, layers, experts, top_k)


@runs(deadline=None, max_examples=150)
@given(machines(), RATES, st.integers(1, 64))
def test_the_choice_is_the_argmax_that_brute_force_finds(machine, rates, most):
    chosen = best_rows(most, machine.loads, rates, None)
    possible = [rows for rows in range(1, most + 1) if machine.loads(rows) is not None]
    best = max(machine.tokens_per_s(rows, rates) for rows in possible)
    assert chosen.rows in possible and machine.tokens_per_s(chosen.rows, rates) == pytest.approx(best)
    assert chosen.tokens_per_s == pytest.approx(best)


@runs(deadline=None, max_examples=100)
@given(machines(), RATES, st.floats(1e-4, 10.0))
def test_a_latency_caps_the_step_and_costs_nothing_where_it_is_kept_anyway(machine, rates, latency_s):
    free, capped = (best_rows(32, machine.loads, rates, cap) for cap in (None, latency_s))
    passes = [expected(rows, layers, rates) for rows in range(1, 33) if (layers := machine.loads(rows)) is not None]
    if free.seconds <= latency_s:
        assert capped == free
    elif capped.seconds <= latency_s:
        assert capped.tokens_per_s == max(one.tokens_per_s for one in passes if one.seconds <= latency_s)
    else:
        assert capped.seconds == min(one.seconds for one in passes)


@runs(deadline=None, max_examples=100)
@given(machines(), RATES, st.integers(1, 32), st.floats(1.0, 10.0))
def test_more_memory_or_a_faster_disk_never_makes_a_pass_slower(machine, rates, rows, times):
    if (layers := machine.loads(rows)) is None:
        return
    before = expected(rows, layers, rates)
    larger = dataclasses.replace(machine, memory=int(machine.memory * times)).loads(rows)
    assert expected(rows, larger, rates).seconds <= before.seconds
    faster = dataclasses.replace(rates, missing_bytes_per_s=rates.missing_bytes_per_s * times)
    assert expected(rows, layers, faster).seconds <= before.seconds


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_the_wanted_share_grows_from_the_choices_of_one_row_to_all_experts(rows, experts, top_k):
    share = wanted_share(rows, experts, top_k)
    assert wanted_share(1, experts, top_k) == pytest.approx(min(1.0, top_k / experts))
    assert 0 < share <= wanted_share(rows + 1, experts, top_k) <= 1


def test_of_equal_speeds_the_fewest_rows_are_chosen():
    passes = [ExpectedPass(rows, rows * 0.1, 0.0, rows * 0.1) for rows in (1, 2, 4)]
    assert best_of(passes).rows == 1


def test_the_optimum_is_not_the_largest_batch():
    """Qwen3-30B-A3B, lossless, in 45 GB with 4,096 tokens of keys and values in each row: rows take the room of experts that they
    share."""
    machine = Machine(45 * 10**9, 4 * 10**9, 4096 * 98_304, int(6.3 * MIB), 48, 128, 8)
    rates = MachineRates(20e9, 4e11, 1.8e9)
    chosen = best_rows(64, machine.loads, rates, None)
    assert 8 <= chosen.rows <= 40 and chosen.bound == "reading"
    assert chosen.tokens_per_s > 1.3 * expected(64, machine.loads(64), rates).tokens_per_s


QWEN = inventory([(128, 8, 0)] * 8, [4096])  # records of 512 KiB


def test_auto_chooses_the_rows_that_memory_is_worth_and_the_plan_says_what_it_expects():
    need = dataclasses.replace(footprint(QWEN), logits_bytes=8 * MIB)  # of each row: as much as sixteen experts
    rates = MachineRates(weights_bytes_per_s=20e9, missing_bytes_per_s=1e9, assumed=("the disk at 1.0 GB/s",))
    least = plan(need, Settings(memory="10%", context=16_384, parallel=1), AMPLE).total_bytes
    settings = Settings(memory=least + 200 * MIB, context=16_384)
    made = plan(need, settings, AMPLE, rates)
    speeds = {}
    for rows in range(1, 65):
        case = Case(need, dataclasses.replace(settings, parallel=rows, pinned_layers=0), AMPLE)
        if case.works():
            speeds[rows] = expected(rows, case.loads(), rates).tokens_per_s
    assert len(speeds) < 64 and speeds[made.rows] == max(speeds.values())
    one, chosen = made.passes
    assert (one.rows, chosen.rows) == (1, made.rows) and chosen.tokens_per_s == speeds[made.rows]
    assert made.total_bytes <= made.budget_bytes and made.minimum_bytes < made.total_bytes
    said = json.loads(json.dumps(made.to_json()))
    assert said["passes"][1]["tokens_per_s"] == chosen.tokens_per_s and said["passes"][1]["bound"] == chosen.bound
    table = made.table()
    assert f"{chosen.tokens_per_s:.3g} tokens/s of {made.rows} requests" in table and "the disk at 1.0 GB/s" in table


def test_the_experts_of_a_pass_have_what_the_rows_leave():
    need = footprint(QWEN)
    case = Case(need, Settings(memory=1200 * MIB, context=4096, pinned_layers=2), AMPLE)
    one, many = (case.changed(parallel=rows) for rows in (1, 64))
    for tried in (one, many):
        layer_bytes = 128 * QWEN.layouts[0].record_bytes
        share = (tried.expert_bytes - 2 * layer_bytes) / (6 * layer_bytes)
        assert [load.resident for load in tried.loads()] == [1.0, 1.0, *[pytest.approx(share)] * 6]
    smaller = case.changed(memory=1000 * MIB, pinned_layers=0).loads()[0]
    assert 0 < smaller.resident < 1 and smaller.other_bytes == 200 * MIB // 8  # no head of its own: the embeddings are it
    assert smaller.row_flop == smaller.other_bytes + 8 * QWEN.layouts[0].payload_bytes


def test_rows_keep_to_the_context_the_setting_and_the_latency():
    need, rates = footprint(QWEN), MachineRates(missing_bytes_per_s=1e9)
    assert plan(need, Settings(memory="50%", context=1024), AMPLE, rates).rows == 4  # one for each 256 tokens
    assert plan(need, Settings(memory="50%", context=256), AMPLE, rates).rows == 1
    assert plan(need, Settings(memory="50%", context=1024, parallel=9), AMPLE, rates).rows == 9  # as was asked for
    free = plan(need, Settings(memory="50%", context=16_384), AMPLE, rates)
    capped = plan(need, Settings(memory="50%", context=16_384, latency=free.passes[-1].seconds / 2), AMPLE, rates)
    assert 1 < capped.rows < free.rows and capped.passes[-1].seconds <= free.passes[-1].seconds / 2


def test_a_budget_for_one_request_only_is_planned_for_one():
    need = dataclasses.replace(footprint(QWEN), logits_bytes=8 * MIB)
    settings = Settings(memory="10%", context=4096)
    least = plan(need, settings, AMPLE).minimum_bytes
    assert plan(need, dataclasses.replace(settings, memory=least), AMPLE).rows == 1
    assert plan(need, dataclasses.replace(settings, memory=least + 3 * 8 * MIB), AMPLE).rows > 1


def test_rows_have_states_and_windows_of_their_own():
    need = dataclasses.replace(footprint(QWEN), cache_layers=(CacheLayer(1000, 10, 64), CacheLayer(0, 7)))
    assert need.cache_bytes(1000) == 1000 + 64 * 10 + 7000
    assert need.cache_bytes(1000, rows=4) == 4000 + 4 * 64 * 10 + 7000
    assert need.cache_bytes(1000, rows=64) == 64_000 + 1000 * 10 + 7000  # all tokens, and no more
