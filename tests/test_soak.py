"""The soak: its judgement of made-up runs, and seconds of a real one."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):  # extras
    pytest.importorskip(needed)

from vismoe.eval.studies import soak  # noqa: E402
from vismoe.eval.studies.soak_clients import WholeAnswer  # noqa: E402

MIB = 2**20
CALM = soak.Sample(at_s=0.0, memory_bytes=500 * MIB, files=10, threads=8, running=0, waiting=0, context_tokens=0)


def run(*memory_mib: float) -> list[soak.Sample]:
    return [dataclasses.replace(CALM, at_s=float(at), memory_bytes=int(mib * MIB)) for at, mib in enumerate(memory_mib)]


@pytest.mark.parametrize("seed", range(5))
def test_caches_that_fill_in_the_first_third_are_no_growth(seed):
    noise = random.Random(seed)
    samples = run(*(500 + noise.uniform(-20, 20) - max(0, 60 - 2 * at) for at in range(90)))
    assert not list(soak._of_server(CALM, samples, CALM))


@given(st.floats(1.5, 20))
def test_a_leak_is_seen(mib_per_sample):
    samples = run(*(500 + mib_per_sample * at for at in range(90)))
    assert soak.growth_bytes(samples) == pytest.approx(30 * mib_per_sample * MIB, rel=0.01)
    assert len(list(soak._of_server(CALM, samples, CALM))) == 1


@pytest.mark.parametrize("left", [{"running": 1}, {"waiting": 1}, {"context_tokens": 7}, {"files": 99}, {"threads": 99}])
def test_what_is_left_at_the_end_is_seen(left):
    assert len(list(soak._of_server(CALM, run(500), dataclasses.replace(CALM, **left)))) == 1


def test_what_clients_and_metrics_say_is_judged():
    good = {"answered": 5, "cancelled": 2, "refused": 1, "wrong": 0, "first_wrong": []}
    assert not list(soak._of_clients(good))
    assert len(list(soak._of_clients(good | {"wrong": 1, "first_wrong": ["APIError: no"]}))) == 1
    assert list(soak._of_clients(good | {"cancelled": 0})) and list(soak._of_clients(None))
    total = "vismoe_requests_total []"
    assert not list(soak._of_metrics([{total: 1.0}, {total: 3.0}], 3))
    assert len(list(soak._of_metrics([{total: 4.0}, {total: 3.0}], 3))) == 1
    assert len(list(soak._of_metrics([{total: 1.0}, {total: 3.0}], 2))) == 1


@pytest.mark.parametrize(
    ("said", "same"),
    [
        (WholeAnswer("A cat and a dog.", "stop"), True),
        (WholeAnswer("A cat a", "length"), True),
        (WholeAnswer("A cat and a dog.", "length"), True),
        (WholeAnswer("A cat a", "stop"), False),
        (WholeAnswer("A cow", "length"), False),
    ],
)
def test_an_answer_that_was_cut_is_compared_up_to_there(said, same):
    assert said.goes_on_as(WholeAnswer("A cat and a dog.", "stop")) == same


def test_some_clients_for_some_seconds_leave_nothing_behind():
    for minutes in (0.05, 0.25, 1.0):  # a busy machine answers few requests in three seconds
        figures = soak.study(clients=6, minutes=minutes, seed=1, memory="25%", context=2048, image_cache="1MiB")
        told = figures["told"]
        if told["requests_alone"] and told["called"]:
            break
    assert told["answered"] and told["called"] and told["compared"] >= told["requests_alone"] > 0 == told["wrong"]
    assert figures["requests"]["requests"] >= told["answered"] + told["requests_alone"]
    assert [failure for failure in figures["failures"] if "not every kind" not in failure] == []
