"""What requests may hold outside the model's own plan: one pool of bytes, from the first byte of a body to the last pixel.

A request asks for bytes before they are there, waits for a while, and is told to come back (429) when they do not get free; one
that could never have them is told so (413). It works without deadlock because there is an order: bodies have at most half of the
pool, and who has a body asks once for all that its pictures take, at most the other half. So the first one who waits for pictures
waits for requests that wait for no memory any more. Of the half for bodies, large ones leave a quarter to small ones.
Bytes that were freed count until the allocator has given them back to the system. All of it lives on the event loop's thread.
"""

import asyncio
import ctypes
import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from vismoe.app.api_errors import ApiError
from vismoe.app.decoding import PROCESS_BYTES
from vismoe.config import format_bytes
from vismoe.errors import ConfigError
from vismoe.planning.sizes import size_up

__all__ = ["DECODERS", "MemoryKind", "MemoryShare", "RequestMemory"]

DECODERS = 2  # processes
LEAST_BYTES = DECODERS * PROCESS_BYTES + 64 * 2**20
LARGE_BODY_BYTES = 2**20


class MemoryKind(IntEnum):
    """What bytes are for; who has some of one kind may wait for those of a later one."""

    LARGE_BODY = 0
    BODY = 1
    PICTURES = 2


class RequestMemory:
    """`total_bytes` for all requests and decoders; `wait_s`: how long a request waits. `give_back`: see `allocator`."""

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
        self._freed = 0  # and perhaps not given back yet
        self._shares: set[MemoryShare] = set()
        self._queues: dict[MemoryKind, deque[tuple[int, asyncio.Future[None]]]] = {kind: deque() for kind in MemoryKind}
        self._trimming: asyncio.Task[None] | None = None

    @property
    def most_of_one(self) -> int:
        """Bytes that one request can have for its pictures."""
        return self._room // 2

    @property
    def used_bytes(self) -> int:
        """Promised to requests, and the decoders' own."""
        return self.total_bytes - self._room + sum(self._held.values()) + self._at_most_once()

    @property
    def waiting(self) -> int:
        """Requests that wait for bytes."""
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
        """Raises ApiError, or what `stop_waiting` was told."""
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
        """Promise bytes to those who wait, in the order of arrival within a kind."""
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
            f"{what} {format_bytes(nbytes)} while they are read, one request can have {format_bytes(most)}. Fix: send fewer or "
            f"smaller ones, or start the server with --request-memory {size_up(enough)}"
        )
        return ApiError(413, message, code="request_memory")


class MemoryShare:
    """What one request holds. `users` hold it together (its caller and its reply): the last one to let go gives it back."""

    def __init__(self, pool: RequestMemory):
        self._pool, self.users = pool, 1
        self.held = dict.fromkeys(MemoryKind, 0)
        self.once = 0  # beside that: what no two requests take at the same time
        self._kept = self._building = 0
        self.waits_for: asyncio.Future[None] | None = None

    async def grow(self, kind: MemoryKind, nbytes: int, most_s: float = math.inf) -> None:
        """Hold so many bytes more; waits for them, up to `most_s`. Raises ApiError: 413, or 429."""
        if nbytes > 0:
            await self._pool._take(self, kind, nbytes, min(most_s, self._pool.wait_s))

    def shrink(self, kind: MemoryKind, nbytes: int) -> None:
        """Hold no more than so many bytes of a kind."""
        freed = max(0, self.held[kind] - nbytes)
        self.held[kind] -= freed
        self._pool._release(kind, freed)

    def decoded(self, kept: int, building: int) -> None:
        """Its pictures are there, and take `kept` until it ends, and `building` more while a prompt is made of them."""
        self.shrink(MemoryKind.PICTURES, kept + building)
        self._kept, self._building = kept, building

    def is_built(self) -> None:
        """The engine has its prompt. Where that waits, it is made once more when its turn comes, so one after the other."""
        self.once = self._building
        self.shrink(MemoryKind.PICTURES, self._kept)

    def let_go(self) -> None:
        """One user less."""
        self.users -= 1
        if not self.users:
            self._pool._shares.discard(self)
            for kind, nbytes in self.held.items():
                self.held[kind] = 0
                self._pool._release(kind, nbytes)

    def stop_waiting(self, why: BaseException) -> None:
        """Nobody wants it any more: what waits here raises this."""
        if self.waits_for is not None and not self.waits_for.done():
            self.waits_for.set_exception(why)


def trim() -> None:
    """Give what is free back to the system. glibc only; other C libraries have no such call, and need none."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
