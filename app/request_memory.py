"""Memory of requests outside the model's own plan: one pool of bytes, from the first byte of a body to the last pixel.

A request reserves bytes before it allocates them. It waits for a while, and is refused (429) if they do not become free; a
request that could never get them is refused at once (413). An order prevents deadlock: bodies get at most half of the pool, and a
request with a body reserves memory for all its pictures at once, from the other half. So the first request that waits for
pictures waits only for requests that need no further memory. Of the half for bodies, large ones leave a quarter to small ones.
Freed bytes stay reserved until the allocator has returned them to the system. All of this runs on the event loop's thread.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from vismoe.app.allocator import trim
from vismoe.app.api_errors import ApiError
from vismoe.app.decoding import PROCESS_BYTES
from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.planning.sizes import size_up

DECODERS = 2  # processes
LEAST_BYTES = DECODERS * PROCESS_BYTES + 64 * 2**20
LARGE_BODY_BYTES = 2**20


class MemoryKind(IntEnum):
    """The purpose of bytes; a request that holds some of one kind may wait for those of a later kind."""

    LARGE_BODY = 0
    BODY = 1
    PICTURES = 2


class RequestMemory:
    """`total_bytes` for all requests and decoders; a request waits up to `wait_s`. `give_back`: see `allocator`."""

    def __init__(self, total_bytes: int, wait_s: float, give_back: Callable[[], None] | None = None):
        if total_bytes < LEAST_BYTES:
            raise ConfigError(
                f"request_memory={format_bytes(total_bytes)}: {DECODERS} processes that decode pictures and small requests need "
                f"{format_bytes(LEAST_BYTES)}. Fix: --request-memory {size_up(LEAST_BYTES)}"
            )
        self.total_bytes, self.wait_s = total_bytes, wait_s
        self._give_back = give_back or trim
        self._room = total_bytes - DECODERS * PROCESS_BYTES
        self._most = {
            MemoryKind.LARGE_BODY: self._room * 3 // 8,
            MemoryKind.BODY: self._room // 2,
            MemoryKind.PICTURES: self._room,
        }
        self._held = dict.fromkeys(MemoryKind, 0)
        self._freed = 0  # freed bytes that may not have been returned yet
        self._shares: set[MemoryShare] = set()
        self._queues: dict[MemoryKind, deque[tuple[int, asyncio.Future[None]]]] = {kind: deque() for kind in MemoryKind}
        self._trimming: asyncio.Task[None] | None = None

    @property
    def most_of_one(self) -> int:
        """The most bytes that one request can reserve for its pictures."""
        return self._room // 2

    @property
    def used_bytes(self) -> int:
        """Bytes reserved for requests, and those of the decoders."""
        return self.total_bytes - self._room + sum(self._held.values()) + self._at_most_once()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for bytes."""
        return sum(map(len, self._queues.values()))

    def enter(self) -> "MemoryShare":
        share = MemoryShare(self)
        self._shares.add(share)
        return share

    def _at_most_once(self) -> int:
        return max((share.once for share in self._shares), default=0)

    def _fits(self, kind: MemoryKind, nbytes: int, freed: int) -> bool:
        return all(
            sum(self._held[below] for below in MemoryKind if below <= level)
            + nbytes
            + (self._at_most_once() + freed if level is MemoryKind.PICTURES else 0)
            <= self._most[level]
            for level in MemoryKind
            if level >= kind
        )

    async def _take(self, share: "MemoryShare", kind: MemoryKind, nbytes: int, wait_s: float) -> None:
        """Raises ApiError, or the exception passed to `stop_waiting`."""
        most = self.most_of_one if kind is MemoryKind.PICTURES else self._most[kind]
        if share.held[kind] + nbytes > most:
            raise self._never(kind, share.held[kind] + nbytes, most)
        granted = asyncio.get_running_loop().create_future()
        self._queues[kind].append((nbytes, granted))
        share.waits_for = granted
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                await granted
        except TimeoutError as error:
            raise ApiError.no_memory(wait_s) from error
        finally:
            share.waits_for = None
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                share.held[kind] += nbytes
            else:
                granted.cancel()
                self._serve()

    def _serve(self) -> None:
        """Reserve bytes for waiting requests, in order of arrival within a kind."""
        for kind, queue in self._queues.items():
            while queue and (queue[0][1].done() or self._fits(kind, queue[0][0], self._freed)):
                nbytes, granted = queue.popleft()
                if not granted.done():
                    self._held[kind] += nbytes
                    granted.set_result(None)
            if queue and self._freed and self._trimming is None and self._fits(kind, queue[0][0], 0):
                self._trimming = asyncio.get_running_loop().create_task(self._trim())

    def _release(self, kind: MemoryKind, nbytes: int) -> None:
        self._held[kind] -= nbytes
        self._freed += nbytes
        self._serve()

    async def _trim(self) -> None:
        freed = self._freed
        await asyncio.to_thread(self._give_back)
        self._freed -= freed
        self._trimming = None
        self._serve()

    def _never(self, kind: MemoryKind, nbytes: int, most: int) -> ApiError:
        what = "the pictures and texts of this request take" if kind is MemoryKind.PICTURES else "the body of this request takes"
        enough = self.total_bytes - self._room + -(-nbytes * self._room // most)
        message = (
            f"{what} {format_bytes(nbytes)} while they are read; a request can have {format_bytes(most)}. Fix: send fewer or "
            f"smaller images, or start the server with --request-memory {size_up(enough)}"
        )
        return ApiError(413, message, code="request_memory")


class MemoryShare:
    """The reserved bytes of one request. `users` (its caller and its reply) share it; the last one to let go releases it."""

    def __init__(self, pool: RequestMemory):
        self._pool, self.users = pool, 1
        self.held = dict.fromkeys(MemoryKind, 0)
        self.once = 0  # further bytes that only one request at a time uses
        self._kept = self._building = 0
        self.waits_for: asyncio.Future[None] | None = None

    async def grow(self, kind: MemoryKind, nbytes: int, most_s: float = math.inf) -> None:
        """Reserve more bytes; waits for them, up to `most_s`. Raises ApiError: 413, or 429."""
        if nbytes > 0:
            await self._pool._take(self, kind, nbytes, min(most_s, self._pool.wait_s))

    def shrink(self, kind: MemoryKind, nbytes: int) -> None:
        """Reduce the reserved bytes of a kind to `nbytes`."""
        freed = max(0, self.held[kind] - nbytes)
        self.held[kind] -= freed
        self._pool._release(kind, freed)

    def decoded(self, kept: int, building: int) -> None:
        """Its pictures are decoded: they take `kept` until it ends, and `building` more while a prompt is built from them."""
        self.shrink(MemoryKind.PICTURES, kept + building)
        self._kept, self._building = kept, building

    def is_built(self) -> None:
        """The engine has its prompt. A prompt that waits is built again at its turn, so one after another."""
        self.once = self._building
        self.shrink(MemoryKind.PICTURES, self._kept)

    def let_go(self) -> None:
        """Remove one user."""
        self.users -= 1
        if not self.users:
            self._pool._shares.discard(self)
            for kind, nbytes in self.held.items():
                self.held[kind] = 0
                self._pool._release(kind, nbytes)

    def stop_waiting(self, why: BaseException) -> None:
        """Cancel the waiting calls of this share, which raise `why`."""
        if self.waits_for is not None and not self.waits_for.done():
            self.waits_for.set_exception(why)
