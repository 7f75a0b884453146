"""Locks and turns that Ctrl-C cannot leave taken.

An interrupt is an exception that a signal handler raises in the main thread, between two bytecodes of whatever runs there: after
a lock was taken and before the block that gives it back, or inside the `__enter__` of a context manager whose `__exit__` then
never runs. So a lock is given back by a second look (`under`), and a call that is under way is looked up, not remembered
(`RunningCall`): a call
that was interrupted is no longer on its thread's stack.
"""

import inspect
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

__all__ = ["RunningCall", "under"]

Given = ParamSpec("Given")
Made = TypeVar("Made")


def under(lock: Any, change: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
    """`change` under `lock` (a `threading.RLock`), which this thread holds afterwards only if it did before."""
    if lock._is_owned():
        return change(*given, **named)
    try:
        with lock:
            return change(*given, **named)
    finally:  # `with` is safe at every bytecode at which CPython looks for signals, and not between any two of them
        if lock._is_owned():
            lock.release()


class RunningCall(NamedTuple):
    """A call that is under way in some thread."""

    thread: int
    frame: FrameType

    @classmethod
    def of(cls, frame: FrameType) -> "RunningCall":
        """The innermost function of this thread that contains `frame`, and is no generator: those come and go."""
        while frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
            frame = frame.f_back
        return cls(threading.get_ident(), frame)

    @property
    def ended(self) -> bool:
        """It has returned, or was left by an exception. Then it gives up what it still refers to."""
        try:
            self.frame.clear()
        except RuntimeError:  # it is being executed
            return False
        return True
