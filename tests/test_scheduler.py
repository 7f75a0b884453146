"""Turns: everybody advances at the same pace, nobody is overtaken, and what runs together fits. Against scripted requests."""

import threading
import time
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.engine.scheduler import Scheduler
from vismoe.errors import ClosedError


class Scripted:
    """A request of some steps, which writes down what happens to it."""

    def __init__(self, name, tokens, steps, log, fails_at=None, gate=None):
        self.name, self.tokens, self.left, self.log, self.fails_at, self.gate = name, tokens, steps, log, fails_at, gate
        self.ended, self.unwanted = threading.Event(), False
        self.grows, self.may_give_up, self.company = 0, False, None

    def step(self):
        if self.gate is not None:
            self.gate.wait(20)
        self.log.append(self.name)
        self.left -= 1
        if self.left == self.fails_at:
            raise ValueError(self.name)
        return self.left > 0

    def finish(self):
        self.log.append((self.name, "finished"))
        self.ended.set()

    def fail(self, error):
        self.log.append((self.name, type(error)))
        self.ended.set()


def gated(log):
    """A request that holds the thread until its gate is opened, so that others can be queued behind it."""
    return Scripted("gate", 1, 1, log, gate=threading.Event())


def run_all(scheduler, requests, log):
    first = gated(log)
    scheduler.ask(first)
    for request in requests:
        scheduler.ask(request)
    first.gate.set()
    for request in (first, *requests):
        assert request.ended.wait(20)


def test_requests_that_fit_together_advance_by_turns():
    scheduler, log = Scheduler(100), []
    run_all(scheduler, [Scripted(name, 10, 3, log) for name in "abc"], log)
    scheduler.close()
    steps = [entry for entry in log if isinstance(entry, str)][1:]
    assert "".join(steps) == "abacbacbc", "each enters with its first step, before the others', then all take turns"


def test_who_does_not_fit_waits_and_is_not_overtaken():
    scheduler, log = Scheduler(100), []
    run_all(scheduler, [Scripted("large", 60, 3, log), Scripted("larger", 90, 1, log), Scripted("small", 5, 1, log)], log)
    scheduler.close()
    assert log[2:] == [
        "large",
        "large",
        "large",
        ("large", "finished"),
        "larger",
        ("larger", "finished"),
        "small",
        ("small", "finished"),
    ]


@given(sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 6)), min_size=1, max_size=12), capacity=st.integers(50, 120))
def test_whatever_is_asked_for_fits_and_is_done(sizes, capacity):
    scheduler, log, together = Scheduler(capacity), [], []

    class Watched(Scripted):
        def step(self):
            together.append([(other.tokens, other.name) for other in scheduler.running])
            return super().step()

    requests = [Watched(number, tokens, steps, log) for number, (tokens, steps) in enumerate(sizes)]
    run_all(scheduler, requests, log)
    scheduler.close()
    assert all(sum(tokens for tokens, _ in running) <= capacity for running in together if len(running) > 1)
    assert [log.count(number) for number in range(len(sizes))] == [steps for _, steps in sizes]
    first = [log.index(number) for number in range(len(sizes))]
    assert first == sorted(first), "in the order of arrival"
    for number, request in enumerate(requests):  # nobody takes two turns while another who runs takes none
        turns_of = [place for place, entry in enumerate(log) if entry == number]
        for begin, end in pairwise(turns_of):
            between = [entry for entry in log[begin + 1 : end] if isinstance(entry, int)]
            assert len(set(between)) == len(between), request.name


def test_a_failure_is_of_one_request():
    scheduler, log = Scheduler(100), []
    run_all(scheduler, [Scripted("a", 10, 3, log, fails_at=1), Scripted("b", 10, 3, log)], log)
    assert ("a", ValueError) in log and log.count("a") == 2 and ("b", "finished") in log and not scheduler.running
    scheduler.close()


def test_a_task_runs_when_no_request_does_and_those_behind_it_wait():
    scheduler, log = Scheduler(100), []
    first = gated(log)
    scheduler.ask(first)
    done = scheduler.run_alone(lambda: log.append("task") or len(scheduler.running))
    later = Scripted("later", 1, 1, log)
    scheduler.ask(later)
    first.gate.set()
    assert done.result(20) == 0 and later.ended.wait(20)
    assert log == ["gate", ("gate", "finished"), "task", "later", ("later", "finished")]
    with pytest.raises(ZeroDivisionError):
        scheduler.run_alone(lambda: 1 // 0).result(20)
    scheduler.close()


def test_draining_lets_everybody_end_and_nobody_in():
    scheduler, log = Scheduler(100), []
    first = gated(log)
    scheduler.ask(first)
    waiting = Scripted("waiting", 100, 2, log)
    scheduler.ask(waiting)
    assert not scheduler.drain(0.01)
    with pytest.raises(ClosedError):
        scheduler.ask(Scripted("late", 1, 1, log))
    first.gate.set()
    assert scheduler.drain(20) and waiting.ended.wait(20) and ("waiting", "finished") in log
    scheduler.close()


def test_who_waits_and_is_unwanted_leaves_and_lets_others_by():
    scheduler, log = Scheduler(100), []
    long = Scripted("long", 60, 10**9, log)
    waiting, small = Scripted("waiting", 90, 1, log), Scripted("small", 5, 1, log)
    for request in (long, waiting, small):
        scheduler.ask(request)
    waiting.unwanted = True
    assert waiting.ended.wait(20) and small.ended.wait(20) and not long.ended.is_set()
    assert ("waiting", "finished") in log and "waiting" not in log and scheduler.waiting == 0
    scheduler.close()


@pytest.mark.parametrize("method", ["finish", "fail"])
def test_an_end_that_cannot_be_told_stops_nobody_else(method, caplog):
    scheduler, log = Scheduler(100), []

    class Deaf(Scripted):
        def finish(self):
            raise ValueError("nobody there")

        fail = finish if method == "fail" else Scripted.fail

    run_all(scheduler, [Scripted("a", 50, 2, log)], log)
    deaf, later = Deaf("deaf", 100, 1, log), Scripted("later", 100, 1, log)
    scheduler.ask(deaf)
    scheduler.ask(later)
    assert later.ended.wait(20)
    assert ("deaf", ValueError) in log or "could not be told" in caplog.text
    scheduler.close()


def test_draining_waits_for_tasks_and_ends_when_somebody_closes():
    scheduler, gate = Scheduler(100), threading.Event()
    done = scheduler.run_alone(lambda: gate.wait(20))
    assert not scheduler.drain(0.05)
    gate.set()
    assert scheduler.drain(20) and done.result(1)
    scheduler, log = Scheduler(100), []
    scheduler.ask(Scripted("endless", 50, 10**9, log))
    drained = threading.Thread(target=scheduler.drain)
    drained.start()
    scheduler.close()
    drained.join(20)
    assert not drained.is_alive() and ("endless", ClosedError) in log


def test_closing_fails_who_is_left():
    scheduler, log = Scheduler(100), []
    endless = Scripted("endless", 50, 10**9, log)
    waiting = Scripted("waiting", 100, 1, log)
    scheduler.ask(endless)
    scheduler.ask(waiting)
    while "endless" not in log:
        time.sleep(0.001)
    task = scheduler.run_alone(lambda: None)
    scheduler.close()
    assert ("endless", ClosedError) in log and ("waiting", ClosedError) in log
    with pytest.raises(ClosedError):
        task.result(1)
    scheduler.close()


# -- those that cannot say how long they get
class Growing(Scripted):
    """Holds `tokens` of context, one a step, and asks for as many again when they are used up, until `most`."""

    def __init__(self, name, tokens, steps, log, most):
        super().__init__(name, tokens, steps, log)
        self.steps, self.most, self.may_give_up, self.done = steps, most, True, 0

    left = property(lambda self: self.tokens - self.done, lambda self, value: None)
    grows = property(
        lambda self: min(self.tokens, self.most - self.tokens) if self.done == self.tokens else 0, lambda self, value: None
    )

    def give_up(self):
        self.log.append((self.name, "gave up"))
        self.done = 0

    def step(self):
        assert self.done < self.tokens, "a step without room"
        self.log.append(self.name)
        self.done += 1
        return self.done < self.steps


@given(st.data())
def test_requests_that_grow_all_end_and_never_hold_more_than_there_is(data):
    capacity, log, held, requests = data.draw(st.integers(20, 60)), [], [], []
    scheduler = Scheduler(capacity)
    for number in range(data.draw(st.integers(1, 8))):
        steps = data.draw(st.integers(1, capacity))
        if data.draw(st.booleans()):
            requests.append(Growing(number, data.draw(st.integers(1, 8)), steps, log, capacity))
        else:
            requests.append(Scripted(number, steps, steps, log))

        def step(inner=requests[-1].step):
            held.append(sum(running.tokens for running in scheduler.running))
            return inner()

        requests[-1].step = step
    wanted = [request.steps if isinstance(request, Growing) else request.left for request in requests]
    if data.draw(st.booleans()):
        scheduler.hurry()
    run_all(scheduler, requests, log)
    scheduler.close()
    assert max(held) <= capacity
    for number, steps in enumerate(wanted):
        before = log[: log.index((number, "finished"))]
        again = [place for place, entry in enumerate(before) if entry == (number, "gave up")]
        assert before[again[-1] if again else 0 :].count(number) == steps, "all of its steps, since it began the last time"
    assert (0, "gave up") not in log, "the earliest goes on"


def test_one_that_may_need_everything_lets_others_in():
    scheduler, log = Scheduler(100), []
    run_all(scheduler, [Growing("endless", 10, 100, log, most=100), Scripted("short", 20, 3, log)], log)
    scheduler.close()
    assert log.index(("short", "finished")) < log.index(("endless", "finished"))


def test_who_came_later_gives_up_its_place_and_is_the_next_to_enter():
    scheduler, log = Scheduler(30), []
    first, second = (Growing(name, 10, 25, log, most=30) for name in ("first", "second"))
    run_all(scheduler, [first, second, Scripted("third", 15, 1, log)], log)
    scheduler.close()
    assert ("second", "gave up") in log and ("first", "gave up") not in log
    behind = log[log.index(("second", "gave up")) :]
    assert behind.index(("first", "finished")) < behind.index("second") < behind.index("third")


# -- in a hurry
def ended_after(scheduler, requests, log):
    """{name: steps of all that were done when it ended}, where the hurry begins with none of them begun."""
    scheduler.hurry()
    run_all(scheduler, requests, log)
    scheduler.close()
    steps, ended = 0, {}
    for entry in log[2:]:
        if isinstance(entry, int):
            steps += 1
        else:
            ended[entry[0]] = steps
    return ended


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), budget=st.integers(0, 60))
def test_in_a_hurry_as_many_end_within_a_number_of_steps_as_the_shortest_first_give(lengths, budget):
    log = []
    ended = ended_after(Scheduler(10**6), [Scripted(number, 1, steps, log) for number, steps in enumerate(lengths)], log)
    shortest_first = accumulate(sorted(lengths))
    assert sum(steps <= budget for steps in ended.values()) == sum(steps <= budget for steps in shortest_first)


def test_in_a_hurry_equal_requests_end_one_after_the_other():
    log = []
    ended = ended_after(Scheduler(1000), [Scripted(number, 10, 5, log) for number in range(24)], log)
    assert ended == {number: 5 * (number + 1) for number in range(24)}, "and none is late because of the others"


def test_a_hurry_may_begin_in_the_middle():
    scheduler, log = Scheduler(100), []
    reached = threading.Event()
    lengths = {"a": 40, "b": 10, "c": 20}
    requests = [Scripted(name, 10, steps, log) for name, steps in lengths.items()]

    def step(inner=requests[0].step):
        if log.count("a") == 5:
            scheduler.hurry()
            reached.set()
        return inner()

    requests[0].step = step
    run_all(scheduler, requests, log)
    scheduler.close()
    assert reached.is_set() and [entry[0] for entry in log if entry[1:] == ("finished",)][1:] == ["b", "c", "a"]


def test_in_a_hurry_who_is_unwanted_leaves_at_once():
    scheduler, log = Scheduler(100), []
    long, other = Scripted("long", 10, 10**9, log), Scripted("other", 10, 10**9, log)
    for request in (long, other):
        request.step = lambda inner=request.step, request=request: not request.unwanted and inner()
        scheduler.ask(request)
    scheduler.hurry()
    other.unwanted = True
    assert other.ended.wait(20) and not long.ended.is_set()
    long.unwanted = True
    assert long.ended.wait(20)
    scheduler.close()
