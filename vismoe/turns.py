"""Whose turn it is: one thread runs many requests, a step of each in turn, and tasks that want the model for themselves.

A request enters when its tokens fit beside those of the requests that run, in the order of arrival: nobody is overtaken, so none
starves. One request enters per round, since its first step is a whole prompt and the others wait for it.
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

__all__ = ["Steps", "Turns"]


class Steps(Protocol):
    """A request, seen by who gives out turns."""

    tokens: int  # of the context that it may take

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


class Turns:
    """`context_tokens` bounds the tokens of all requests that run; `alone` says whether only one may, at this moment."""

    def __init__(self, context_tokens: int, alone: Callable[[], bool] = lambda: False):
        self.context_tokens, self._alone = context_tokens, alone
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vismoe-model")  # its queue holds the turns to come
        self._changed = threading.Condition()
        self._waiting: deque[Steps | Task] = deque()
        self._running: list[Steps] = []
        self._task: Task | None = None  # that runs
        self._in_turn: deque[Steps] = deque()  # who runs, next one first; the model's thread's own
        self._admitting = self._closed = False

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

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests or tasks; whether all have done their last step in time."""
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
        if isinstance(first, Task) or self._alone():
            return False
        return first.tokens + sum(request.tokens for request in self._running) <= self.context_tokens

    def _run(self, task: Task) -> None:
        try:
            task.result.set_result(task.run())
        except BaseException as error:  # whoever asked gets it
            task.result.set_exception(error)
        with self._changed:
            self._task = None
            self._changed.notify_all()

    def _turn(self) -> None:
        self._send_home()
        request = self._in_turn.popleft()  # no argument: the executor's frame would hold it
        failed = None
        try:
            if request.step():
                self._go_on(request)
                return
        except BaseException as error:  # the request's boundary: whoever reads its reply gets it
            failed = error
        with self._changed:
            self._running.remove(request)
            self._changed.notify_all()
        self._end(request, failed)
        del request, failed  # the error's traceback holds this frame
        self._open_door()

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
