"""Changes of the pager's books, which page tables, tickets and queue make up: one at a time, and each of them whole.

Ctrl-C may tear a change of the thread that runs the model between any two bytecodes. Then whoever makes the next one, in
whichever thread, puts the books in order first. So nobody ever decides by books that are half changed, and nobody waits for the
thread that was interrupted.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vismoe.errors import VisMoEError
from vismoe.locks import under

__all__ = ["Changes", "whole"]

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
    """`repair()` puts the books in order, from whatever state; it may be interrupted as well, and is then called again."""

    def __init__(self, repair: Callable[[], None]):
        self.lock = threading.RLock()
        self._repair, self._torn = repair, False
        self._asleep: list[threading.Lock] = []

    def make(self, change: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
        """What `change` returns, called under the lock with books that are in order; it may make further ones.

        Errors of our own tree are raised between the steps of a change and leave the books in order; nothing else does.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return change(*given, **named)
        return under(self.lock, self._make, functools.partial(change, *given, **named))

    def _make(self, change: Callable[[], Made]) -> Made:
        if self._torn:
            self._repair()
        self._torn = True
        try:
            made = change()
        except VisMoEError:
            self._torn = False
            raise
        self._torn = False
        return made

    def waiter(self) -> threading.Lock:
        """For whoever sleeps until something changes: made in a change, to be acquired after it."""
        waiter = threading.Lock()
        waiter.acquire()
        self._asleep.append(waiter)
        return waiter

    def wake(self) -> None:
        """Whoever sleeps looks again. Called in a change."""
        for waiter in self._asleep:
            if waiter.locked():  # it is not, where this loop was interrupted before
                waiter.release()
        self._asleep.clear()
