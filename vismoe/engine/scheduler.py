"""Whose turn it is: one thread runs many requests, a step of each in turn, and tasks that want the model for themselves.

A request enters when its tokens fit beside those of the requests that run, in the order of arrival: nobody is overtaken, so none
starves. One request enters per round, since its first step is a whole prompt and the others wait for it.

Who cannot say how long it gets holds a part of what it may need, and asks for more (`grows`). Where there is no more, those who
grow and came later give up their places, the latest first, and wait in front of everybody to begin again; where only such
are left as hold all that they need, it waits for them. So the earliest always goes on, and nobody waits for ever.

In a hurry (`hurry`) turns are no longer equal: only the request that is nearest to its end takes steps, so that as many as
possible end in whatever time is left.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from vismoe.errors import ClosedError

logger = logging.getLogger(__name__)

__all__ = ["Scheduler", "Steps"]


class Steps(Protocol):
    """A request, seen by who gives out turns."""

    tokens: int  # of the context that it holds

    @property
    def left(self) -> int:
        """Steps to its end at most, or to where it asks for more."""

    @property
    def grows(self) -> int:
        """Tokens that it asks for beside those it holds, before its next step; 0: none."""

    @property
    def may_give_up(self) -> bool:
        """Whether it is one that grows, and so may be asked to begin again."""

    def give_up(self) -> None:
        """Leave; it takes the steps that it has done once more when it begins again."""

    @property
    def unwanted(self) -> bool:
        """Nobody waits for it any more."""

    def step(self) -> bool:
        """Does the next step; False when there is none left."""

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
    """`context_tokens` bounds the tokens of all requests that run; `alone` says whether only one may, at this moment."""

    def __init__(self, context_tokens: int, alone: Callable[[], bool] = lambda: False):
        self.context_tokens, self._alone = context_tokens, alone
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vismoe-model")  # its queue holds the turns to come
        self._changed = threading.Condition()
        self._waiting: deque[Steps | Task] = deque()
        self._running: list[Steps] = []
        self._task: Task | None = None  # that runs
        self._in_turn: deque[Steps] = deque()  # who runs, next one first; the model's thread's own
        self._admitting = self._closed = self._hurried = False
        self._short: list[Steps] = []  # who ask for more than there is: nobody enters before them
        self._spare_turns = 0  # queued for requests that were put back

    @property
    def running(self) -> tuple[Steps, ...]:
        with self._changed:
            return tuple(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, request: Steps) -> None:
        """Queue a request. Raises ClosedError."""
        self._enqueue(request)

    def run_alone(self, task: Callable[[], Any]) -> "Future[Any]":
        """Queue a task that runs between requests. Raises ClosedError."""
        queued = Task(task, Future())
        self._enqueue(queued)
        return queued.result

    def hurry(self) -> None:
        """From now on whoever is nearest to its end goes first, alone."""
        self._hurried = True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests or tasks; whether all have done their last step in time. In a hurry, if there is a time."""
        if timeout_s is not None:
            self.hurry()
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not (self._running or self._waiting or self._task), timeout_s)

    def close(self) -> None:
        """Ends the thread; requests that still run do their next step first, and those that wait fail."""
        with self._changed:
            self._closed = True
        self._thread.shutdown(wait=True)
        with self._changed:
            left, self._running, self._waiting = (*self._running, *self._waiting), [], deque()
            self._changed.notify_all()
        for request in left:
            self._refuse(request)

    # -- in any thread
    def _enqueue(self, what: Steps | Task) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError("the engine is closed; load the model again to go on")
            self._waiting.append(what)
        self._open_door()

    def _open_door(self) -> None:
        """Somebody who waits may be able to enter."""
        with self._changed:
            if self._admitting or not self._waiting:
                return
            self._admitting = True
        with contextlib.suppress(RuntimeError):  # shut down: `close` refuses who is left
            self._thread.submit(self._admit)

    # -- on the model's thread
    def _admit(self) -> None:
        entered = self._next()
        while (
            self._hurried and entered is not None and not isinstance(entered, Task)
        ):  # all who fit, so that the nearest to its end is found among them
            self._go_on(entered)
            entered = self._next()
        if entered is None:
            return
        if isinstance(entered, Task):
            self._run(entered)
        else:
            self._go_on(entered)
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._admit)

    def _next(self) -> Steps | Task | None:
        """Who enters now."""
        with self._changed:
            first = self._waiting[0] if self._waiting else None
            if first is None or (self._running and not self._fits(first)):
                self._admitting = False
                return None
            self._waiting.popleft()
            if isinstance(first, Task):
                self._task = first
            else:
                self._running.append(first)
            return first

    def _fits(self, first: Steps | Task) -> bool:
        """Beside requests that run."""
        if isinstance(first, Task) or self._alone() or self._short:
            return False
        return first.tokens <= self._free

    @property
    def _free(self) -> int:
        """Tokens that no request holds."""
        return self.context_tokens - sum(request.tokens for request in self._running)

    def _run(self, task: Task) -> None:
        try:
            task.result.set_result(task.run())
        except BaseException as error:  # whoever asked gets it
            task.result.set_exception(error)
        with self._changed:
            self._task = None
            self._changed.notify_all()

    def _turn(self) -> None:
        if self._spare_turns:
            self._spare_turns -= 1
            return
        self._send_home()
        request = self._next_in_turn()  # no argument: the executor's frame would hold it
        failed = None
        try:
            if not request.unwanted and not self._has_room(request):
                self._go_on(request)
                return
            if request.step():
                self._go_on(request)
                return
        except BaseException as error:  # the request's boundary: whoever reads its reply gets it
            failed = error
        with self._changed:
            self._running.remove(request)
            self._changed.notify_all()
        self._is_short(request, False)
        self._end(request, failed)
        del request, failed  # the error's traceback holds this frame
        self._open_door()

    def _next_in_turn(self) -> Steps:
        if not self._hurried:
            return self._in_turn.popleft()
        able = [request for request in self._in_turn if request not in self._short] or list(self._in_turn)
        nearest = min(able, key=lambda request: 0 if request.unwanted else request.left)  # the first of equal ones
        self._in_turn.remove(nearest)
        return nearest

    def _has_room(self, request: Steps) -> bool:
        """Whether it has what its next step needs, if need be from those who came later."""
        more = request.grows
        while more > self._free and (later := self._latest_behind(request)) is not None:
            self._put_back(later)
        enough = more <= self._free
        if enough:
            request.tokens += more
        self._is_short(request, not enough)
        return enough

    def _is_short(self, request: Steps, short: bool) -> None:
        """Note whether it waits for more than there is."""
        self._short = [other for other in self._short if other is not request] + ([request] if short else [])

    def _latest_behind(self, request: Steps) -> Steps | None:
        """Of those who run and may begin again, the one that came last, after this one."""
        behind = self._running[self._running.index(request) + 1 :]
        return next((later for later in reversed(behind) if later.may_give_up), None)

    def _put_back(self, request: Steps) -> None:
        """Out of its turn, and in front of all who wait."""
        request.give_up()
        self._in_turn.remove(request)
        self._spare_turns += 1
        self._is_short(request, False)
        with self._changed:
            self._running.remove(request)
            self._waiting.appendleft(request)

    def _send_home(self) -> None:
        """Those who wait and whom nobody waits for leave the queue."""
        with self._changed:
            gone = [left for left in self._waiting if not isinstance(left, Task) and left.unwanted]
            for left in gone:
                self._waiting.remove(left)
        for left in gone:
            self._end(left, None)
        if gone:
            with self._changed:
                self._changed.notify_all()
            self._open_door()  # who stood behind them may fit

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
        except BaseException:  # of who is told its end; the others go on
            logger.exception("a request's end could not be told")

    def _go_on(self, request: Steps) -> None:
        with contextlib.suppress(RuntimeError):  # shut down: `close` refuses who is left
            self._in_turn.append(request)
            self._thread.submit(self._turn)

    @staticmethod
    def _refuse(left: Steps | Task) -> None:
        error = ClosedError("the engine was closed before the request ended")
        if isinstance(left, Task):
            left.result.set_exception(error)
        else:
            left.fail(error)
