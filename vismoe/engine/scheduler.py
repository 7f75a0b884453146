"""One thread runs many requests, a step of each in turn, and tasks that want the model for themselves.

Requests of an equal `company` take their steps together, as rows of one pass; they enter and leave it with every round.

A request enters when its tokens fit beside those of the requests that run. Requests enter in the order of arrival and none is
overtaken, so none starves. One request enters per round: its first step is a whole prompt, and the others wait for it.

A request whose length is not known holds a part of what it may need, and asks for more (`grows`). If no places are free, the
latest growing request gives up its places and waits in front of all others to begin again; if no later request grows, this one
waits. So the earliest request always goes on, and none waits for ever.

In a hurry (`hurry`) only the request that is nearest to its end takes steps, so that as many as possible end in the time left.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from vismoe.errors import ClosedError

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """A request, as the scheduler sees it."""

    tokens: int  # of the context that it holds

    @property
    def left(self) -> int:
        """Steps to its end at most, or to where it asks for more."""

    @property
    def grows(self) -> int:
        """Tokens that it asks for beside those it holds, before its next step; 0: none."""

    @property
    def may_give_up(self) -> bool:
        """Whether it is one that grows, and so may be told to begin again."""

    def give_up(self) -> None:
        """Leave; it takes the steps that it has done once more when it begins again."""

    @property
    def unwanted(self) -> bool:
        """Whether its answer was cancelled."""

    @property
    def company(self) -> Hashable:
        """Requests with an equal one may take the next step together; None: it takes it alone."""

    def step(self) -> bool:
        """Does the next step; False when there is none left."""

    def step_with(self, others: Sequence[Any]) -> list[bool | BaseException]:
        """Does the next step of this one and of others of its company; what each step would return, or raise."""

    def finish(self) -> None:
        """It has done its last step, and left."""

    def fail(self, error: BaseException) -> None:
        """It has ended by this error, and left."""


@dataclass(frozen=True)
class Task:
    """Runs when no request does."""

    run: Callable[[], Any]
    result: "Future[Any]"


class Scheduler:
    """`context_tokens` bounds the tokens of all requests that run, `most_rows` those that take a step together, `most_running`
    all of them; `alone` says whether only one may run, at this moment. `between` is called before each round, on the model's
    thread, with this, and may set the bounds anew.

    The thread lives while there is work; the next request or task starts another one.
    """

    def __init__(
        self,
        context_tokens: int,
        alone: Callable[[], bool] = lambda: False,
        most_rows: int = 1,
        between: "Callable[[Scheduler], None]" = lambda _: None,
    ):
        self.context_tokens, self.most_rows, self.most_running = context_tokens, most_rows, sys.maxsize
        self._alone, self._between = alone, between
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # None: there is no work
        self._waiting: deque[Steps | Task] = deque()
        self._running: list[Steps] = []  # in the order of arrival
        self._task: Task | None = None  # that runs
        self._short: list[Steps] = []  # requests that ask for more than there is: none enters before them
        self._closed = self._stopped = self._hurried = False

    @property
    def running(self) -> tuple[Steps, ...]:
        with self._changed:
            return tuple(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -- in any thread
    def run_alone(self, task: Callable[[], Any]) -> "Future[Any]":
        """Queue a task that runs between requests. Raises ClosedError."""
        queued = Task(task, Future())
        self.ask(queued)
        return queued.result

    def ask(self, work: Steps | Task) -> None:
        """Queue a request, or a task. Raises ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError("the engine is closed; load the model again to go on")
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vismoe-model")
                self._thread.start()

    def hurry(self) -> None:
        """From now on the request that is nearest to its end goes first, alone."""
        self._hurried = True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests or tasks; whether all have done their last step in time. In a hurry, if there is a time."""
        if timeout_s is not None:
            self.hurry()
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not (self._running or self._waiting or self._task), timeout_s)

    def close(self) -> None:
        """End the thread when the round is over; requests that run or wait then fail."""
        with self._changed:
            self._closed = self._stopped = True
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._changed:
            left, self._running, self._waiting = (*self._running, *self._waiting), [], deque()
            self._changed.notify_all()
        error = ClosedError("the engine was closed before the request ended")
        for work in left:
            work.result.set_exception(error) if isinstance(work, Task) else work.fail(error)

    # -- on the model's thread
    def _run(self) -> None:
        """The loop: one request enters, then every request that runs takes a step."""
        while self._has_work():
            self._between(self)
            self._admit()
            for together in self._round():
                self._step(together)
                del together  # the traceback of an error holds this frame

    def _has_work(self) -> bool:
        """Whether the thread goes on. It does not when the program ends around it."""
        with self._changed:
            if (self._running or self._waiting) and not self._stopped and threading.main_thread().is_alive():
                return True
            self._thread = None
            return False

    def _admit(self) -> None:
        """The first in line enters if it fits; in a hurry all that fit, so that the one nearest to its end is among them."""
        while (entered := self._next()) is not None:
            if isinstance(entered, Task):
                self._run_task(entered)
            if not self._hurried:
                return

    def _next(self) -> Steps | Task | None:
        """What enters now."""
        with self._changed:
            first = self._waiting[0] if self._waiting else None
            if first is None or (self._running and not self._fits(first)):
                return None
            self._waiting.popleft()
            if isinstance(first, Task):
                self._task = first
            else:
                self._running.append(first)
            return first

    def _fits(self, first: Steps | Task) -> bool:
        """Beside requests that run."""
        if isinstance(first, Task) or self._alone() or self._short or len(self._running) >= self.most_running:
            return False
        return first.tokens <= self.free

    @property
    def waits_for_places(self) -> bool:
        """Whether the next request would enter, or one that runs go on, if there were more places. On the model's thread."""
        with self._changed:
            first = self._waiting[0] if self._waiting and self._running else None
        if first is None or isinstance(first, Task) or self._alone() or len(self._running) >= self.most_running:
            return False
        return bool(self._short) or first.tokens > self.free

    @property
    def free(self) -> int:
        """Tokens that no request holds."""
        return self.context_tokens - sum(request.tokens for request in self._running)

    def _run_task(self, task: Task) -> None:
        try:
            task.result.set_result(task.run())
        except BaseException as error:  # the future's reader gets it
            task.result.set_exception(error)
        with self._changed:
            self._task = None
            self._changed.notify_all()

    def _round(self) -> Iterator[list[Steps]]:
        """The requests that take a step before the next one enters, those together that can: all that run, the latest first,
        since its prompt has waited for a step of the others, or in a hurry the one nearest to its end."""
        done: list[Steps] = []
        for request in self._running[::-1]:
            self._drop_unwanted()
            if self._hurried:
                break
            if request in self._running and request not in done:  # and was not put back since
                together = self._company(request, done)
                done += together
                yield together
        if self._hurried and self._running:
            able = [request for request in self._running if request not in self._short] or self._running
            yield [min(able, key=lambda request: 0 if request.unwanted else request.left)]  # the first of equal ones

    def _company(self, request: Steps, done: Sequence[Steps]) -> list[Steps]:
        """This request, and others that take their step with it."""
        company = request.company
        if company is None:
            return [request]
        others = [other for other in self._running if other is not request and other not in done and other.company == company]
        return [request, *others[: self.most_rows - 1]]

    def _step(self, together: list[Steps]) -> None:
        able = [request for request in together if request.unwanted or self._has_room(request)]
        able = [request for request in able if request in self._running]  # one may have been put back for another
        del together
        results = _stepped(able)
        while able:  # an error's traceback leads to this frame, which is to hold neither it nor its request
            self._settle(able.pop(0), results.pop(0))

    def _settle(self, request: Steps, result: bool | BaseException) -> None:
        """Its step is done; unless another one follows, it leaves."""
        if result is True:
            return
        with self._changed:
            self._running.remove(request)
            self._changed.notify_all()
        self._note_short(request, False)
        self._end(request, None if result is False else result)

    def _has_room(self, request: Steps) -> bool:
        """Whether it has what its next step needs, if need be from requests that came later."""
        more = request.grows
        while more > self.free and (later := self._latest_behind(request)) is not None:
            self._put_back(later)
        enough = more <= self.free
        if enough:
            request.tokens += more
        self._note_short(request, not enough)
        return enough

    def _note_short(self, request: Steps, short: bool) -> None:
        """Note whether it waits for more than there is."""
        self._short = [other for other in self._short if other is not request] + ([request] if short else [])

    def _latest_behind(self, request: Steps) -> Steps | None:
        """Of the running requests that may begin again, the one that came last, after this one."""
        behind = self._running[self._running.index(request) + 1 :]
        return next((later for later in reversed(behind) if later.may_give_up), None)

    def _put_back(self, request: Steps) -> None:
        """It stops, and waits in front of all others."""
        request.give_up()
        self._note_short(request, False)
        with self._changed:
            self._running.remove(request)
            self._waiting.appendleft(request)

    def _drop_unwanted(self) -> None:
        """Requests that were cancelled while they waited leave the queue."""
        with self._changed:
            gone = [work for work in self._waiting if not isinstance(work, Task) and work.unwanted]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            self._end(request, None)
        if gone:
            with self._changed:
                self._changed.notify_all()

    @staticmethod
    def _end(request: Steps, failed: BaseException | None) -> None:
        try:
            if failed is None:
                request.finish()
        except BaseException as error:  # of its last figures
            failed = error
        try:
            if failed is not None:
                request.fail(failed)
        except BaseException:  # of a reader that is told the end; the other requests go on
            logger.exception("a request's end could not be told")


def _stepped(together: Sequence[Steps]) -> list[bool | BaseException]:
    """What the steps of these requests return, or raise."""
    try:
        return together[0].step_with(together[1:]) if len(together) > 1 else [request.step() for request in together]
    except BaseException as error:  # the requests' boundary: the readers of their replies get it
        return [error] * len(together)
