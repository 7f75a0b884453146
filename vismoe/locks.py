"""Locks that Ctrl-C cannot leave locked, and a way to see whether a call is still running.

Ctrl-C is an exception that a signal handler raises in the main thread between two bytecodes: possibly after a lock was acquired
and before the block that releases it, or inside the `__enter__` of a context manager whose `__exit__` then never runs. So `under`
releases a lock after checking its owner, and `RunningCall` inspects whether a call is still on its thread's stack instead of
recording its end.
"""

import inspect
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")


def under(lock: Any, change: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
    """Calls `change` under `lock` (a `threading.RLock`); this thread holds the lock afterwards only if it did before."""
    if lock._is_owned():
        return change(*given, **named)
    try:
        with lock:
            return change(*given, **named)
    finally:  # `with` alone is not safe against an interrupt between any two bytecodes
        if lock._is_owned():
            lock.release()


class RunningCall(NamedTuple):
    """A call in some thread, which may still be running."""

    thread: int
    frame: FrameType

    @classmethod
    def of(cls, frame: FrameType) -> "RunningCall":
        """The innermost function of this thread that contains `frame` and is not a generator, since generators are suspended."""
        while frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
            frame = frame.f_back
        return cls(threading.get_ident(), frame)

    @property
    def ended(self) -> bool:
        """True if the call has returned or raised. Then its frame also releases its references."""
        try:
            self.frame.clear()
        except RuntimeError:  # the frame is still executing
            return False
        return True
