"""The requests being served: how many may wait, what happens when a client disconnects, and how the server ends them.

All of this runs on the event loop's thread, so no locks are needed. When a client disconnects, its reply is cancelled, even if
the reply starts later; the engine stops it within a token.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from vismoe.app.api_errors import ApiError
from vismoe.app.request_memory import MemoryShare, RequestMemory

POLL_S = 0.05
LAST_WORDS_S = 5.0  # time for clients to receive the reason when requests are ended


class Caller:
    """One request from its admission to the last byte of its answer."""

    def __init__(self, memory: MemoryShare) -> None:
        self.memory = memory  # its share of the request memory
        self.sent_away: ApiError | None = None  # why the server ended it
        self.left = False
        self.waits = 1  # answers that have not been requested from the engine yet
        self._replies: Sequence[Any] = ()
        self._watch: asyncio.Task[None] | None = None

    def watch(self, receive: Receive) -> None:
        """Leave as soon as the connection closes; call this after the body was read."""
        self._watch = asyncio.get_running_loop().create_task(self._leave_when_gone(receive))

    def takes(self, replies: Sequence[Any]) -> None:
        self.waits = 0
        self._replies = replies
        if self.left:
            self._cancel()

    def _cancel(self) -> None:
        for reply in self._replies:
            reply.cancel()

    def check(self) -> None:
        """Raises what ended this request early: the server's ApiError, or ClientDisconnect."""
        if self.left:
            raise self.sent_away or ClientDisconnect

    def leave(self, sent_away: ApiError | None = None) -> None:
        """Cancel the answer; may be called twice, and after its end."""
        self.left = True
        self.sent_away = self.sent_away or sent_away
        watch, self._watch = self._watch, None  # breaks a reference cycle through the task
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        self.memory.stop_waiting(self.sent_away or ClientDisconnect())
        self._cancel()

    def forget(self) -> None:
        """Release the replies, whose pictures are large."""
        self._replies = ()

    async def _leave_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()


class Callers:
    """All requests being served. The engine reports those that wait inside it (`load`); this object counts those before it."""

    def __init__(self, engine: Any, max_waiting: int, memory: RequestMemory):
        self._engine, self._max_waiting, self._memory = engine, max_waiting, memory
        self._here: set[Caller] = set()
        self.draining = self._closed = False

    def __len__(self) -> int:
        return len(self._here)

    @property
    def waiting(self) -> int:
        """Requests that are not running yet."""
        return sum(caller.waits for caller in self._here) + self._engine.load.waiting

    def enter(self) -> Caller:
        """Admits a request. Raises ApiError if the server is closing, or if too many requests wait."""
        if self.draining:
            raise ApiError.closing()
        if self.waiting >= self._max_waiting:
            raise ApiError.too_many(self.waiting)
        caller = Caller(self._memory.enter())
        self._here.add(caller)
        return caller

    def expect(self, caller: Caller, answers: int) -> None:
        """A request turns out to ask for so many answers. Raises ApiError if too many wait."""
        if answers > self._max_waiting:
            message = f"{answers} answers (n for each prompt), but up to {self._max_waiting} may wait (--max-waiting)"
            raise ApiError(400, f"{message}. Fix: ask for fewer at a time", "n")
        if self.waiting + answers - caller.waits > self._max_waiting:
            raise ApiError.too_many(self.waiting - caller.waits)
        caller.waits = answers

    def ends(self, caller: Caller) -> None:
        """Ends a request. Its memory is released after its reply has ended, too."""
        caller.leave()
        caller.forget()
        if caller in self._here:
            self._here.remove(caller)
            caller.memory.let_go()

    async def drain(self, timeout_s: float) -> None:
        """Admits no new requests, waits for the current ones, and ends the rest after `timeout_s`.

        Meanwhile the engine prefers the requests nearest to their end; taking turns would make all of them late.
        """
        self.draining = True
        self._engine.hurry()
        await self._until(lambda: not self._here or self._closed, timeout_s)
        self.send_away()
        await self._until(lambda: not self._here, LAST_WORDS_S)

    def send_away(self) -> None:
        """Cancels every running answer; clients receive the reason."""
        self.draining = self._closed = True
        for caller in list(self._here):
            caller.leave(ApiError.closing())

    async def _until(self, fact: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not fact():
                    await asyncio.sleep(POLL_S)
