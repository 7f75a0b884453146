"""Many questions at once: their order, who shares passes with whom, and what is left of them when the asking is left."""

import signal
from functools import partial

import pytest

import vismoe
from vismoe.engine.shared_pass import SharedPasses
from vismoe.errors import InputError
from vismoe.eval.accuracy import ask, evaluate
from vismoe.eval.answer_file import questions
from vismoe.eval.asking import answered

LOADED = dict(memory="100%", device="cpu", context=2048, parallel=3)
TALKS = dict(enumerate([*questions("text", range(4), 5), *questions("exists", range(3), 5)]))


@pytest.fixture(scope="module", params=[False, True], ids=["as they end", "in groups"])
def engine(request):
    with vismoe.load(**LOADED, deterministic=request.param) as engine:
        yield engine
        engine.check_integrity()


def asked(engine, talks=TALKS):
    return ((number, partial(ask, engine, talk)) for number, talk in talks.items())


@pytest.mark.budget(6)
def test_everybody_is_answered_as_alone_and_no_more_than_so_many_run(engine, monkeypatch):
    alone = {number: "".join(ask()) for number, ask in asked(engine)}
    rows, run = [], SharedPasses.run
    monkeypatch.setattr(SharedPasses, "run", lambda *given: rows.append(len(given[1])) or run(*given))
    together, groups = {}, []
    for number, reply in answered(engine, asked(engine), 1):  # a pass of the engine has more rows
        together[number] = reply.text
        groups.append(number // 3)
    assert together == alone and max(rows) == 3
    assert not engine.settings.deterministic or groups == sorted(groups)


def test_a_deterministic_engine_has_the_same_company_in_every_run(engine, monkeypatch):
    runs, run = [], SharedPasses.run

    def noted(passes, loops, *given):
        runs[-1].append([len(loop.ids[0]) for loop in loops])
        return run(passes, loops, *given)

    monkeypatch.setattr(SharedPasses, "run", noted)
    for _ in range(2):
        runs.append([])
        list(answered(engine, asked(engine), 3))
    assert all(runs) and (runs[0] == runs[1] or not engine.settings.deterministic)


@pytest.mark.parametrize("how", ["left", "Ctrl-C", "an error"])
def test_when_it_is_left_what_runs_is_cancelled(engine, how):
    def many():
        yield from asked(engine)
        if how == "an error":
            raise InputError("the next question cannot be asked")

    before = engine.load
    for _ in range(10):  # answers that share passes may all have ended when the first of them is there
        with pytest.raises((KeyboardInterrupt, InputError, StopIteration)):
            for _ in answered(engine, many(), 3 if how != "an error" else 99):
                if how == "left":
                    raise StopIteration
                if how == "Ctrl-C":
                    signal.raise_signal(signal.SIGINT)
        if engine.load.cancelled > before.cancelled:
            break
    assert len(list(answered(engine, asked(engine, {0: TALKS[0]}), 1))) == 1
    assert engine.load.failed == before.failed
    assert engine.load.cancelled > before.cancelled


def test_an_evaluation_asks_all_its_questions_and_reports_each_and_the_routing(engine):
    seen = []
    found = evaluate(engine, 5, 3, ("text", "exists"), 3, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]
    assert [(row["kind"], row["question"]) for row in found["answers"]] == [
        (kind, talk.turns[-1].question) for kind in ("text", "exists") for talk in questions(kind, range(3), 5)
    ]
    assert found["kinds"]["text"]["questions"] == 3 and all(row["experts_used"] > 1 for row in found["routing"])
