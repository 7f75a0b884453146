"""Changes of the residency core's state (page tables, tickets, queue): one at a time, and each of them whole.

Ctrl-C may tear a change of the thread that runs the model between any two bytecodes. Then the thread that makes the next change
repairs the state first. So no decision is made by state that is half changed, and no thread waits for the one that was
interrupted.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vismoe.errors import VisMoEError
from vismoe.locks import under

Given = ParamSpec("Given")
Made = TypeVar("Made")


def whole(method: Callable[Concatenate[Any, Given], Made]) -> Callable[Concatenate[Any, Given], Made]:
    """A method that is one change of `self.changes`."""

    @functools.wraps(method)
    def made(self: Any, *given: Given.args, **named: Given.kwargs) -> Made:
        changes: Changes = self.changes
        return changes.make(method, self, *given, **named)

    return made


class Changes:
    """`repair()` makes the state whole, whatever it is; it may be interrupted as well, and is then called again."""

    def __init__(self, repair: Callable[[], None]):
        self.lock = threading.RLock()
        self._repair, self._torn = repair, False
        self._asleep: list[threading.Lock] = []

    def make(self, change: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
        """What `change` returns, called under the lock with state that is whole; it may make further ones.

        Errors of our own tree are raised between the steps of a change and leave the state whole; nothing else does.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return change(*given, **named)
        return under(self.lock, self._make, change, *given, **named)

    def _make(self, change: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._torn:
            self._repair()
        self._torn = True
        try:
            made = change(*given, **named)
        except VisMoEError:
            self._torn = False
            raise
        self._torn = False
        return made

    def waiter(self) -> threading.Lock:
        """For a thread that sleeps until something changes: made in a change, to be acquired after it."""
        waiter = threading.Lock()
        waiter.acquire()
        self._asleep.append(waiter)
        return waiter

    def wake(self) -> None:
        """The threads that sleep look again. Called in a change."""
        for waiter in self._asleep:
            if waiter.locked():  # it is not, where this loop was interrupted before
                waiter.release()
        self._asleep.clear()
