"""Pages for memory ahead of the first write to it.

Memory gets its pages when it is first written: while an expert is read, or computed. In a virtual machine whose host had taken
free memory back, a GB takes 0.5 to 2.3 s of a core (docs/benchmark.md). Cores that are idle while libraries are imported and a
model's other weights load can do it before; what is left, they do beside the first requests. Even threads of low priority slow
those down, though: where two threads compute together, one waits for the other. So they rest while requests find what they want.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vismoe.errors import ConfigError
from vismoe.kernels.pages import give_pages
from vismoe.machine.hardware import cores, host_memory
from vismoe.pools.advice import HUGEPAGE, advise
from vismoe.pools.paged_tensor import MAP_ANONYMOUS, MAP_NORESERVE, MAP_PRIVATE

LEAST_BYTES = 64 * 2**20  # of memory that is worth the threads
PIECE_BYTES = 32 * 2**20  # between two pieces a thread looks at how much memory is free
SPARE_BYTES = 2**28  # of free memory that stay: what loading takes for a moment is in no plan
MOST_THREADS = 4
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
NICE = 10  # such a thread takes an idle core, and a tenth of one that others want
LOOK_S = 0.02  # between two looks of a thread that rests whether it still should


class _Pages:
    """What the threads of a `Backing` share, which they do not keep alive."""

    def __init__(self) -> None:
        self.stopped, self.rests_until_s = False, 0.0
        self.halted = ctypes.c_int32()  # not 0: what gives pages returns, since one of these two has changed
        self.there: dict[int, int] = {}  # bytes with pages, by the begin of their piece
        self.changed, self.threads = threading.Condition(), 0  # that have not ended

    def stop(self) -> None:
        self.stopped, self.halted.value = True, 1

    def rest(self, until_s: float) -> None:
        self.rests_until_s = until_s
        if until_s:
            self.halted.value = 1

    def rest_left_s(self) -> float:
        return self.rests_until_s - time.perf_counter()

    def may_go_on(self) -> bool:
        """Once they may, after a rest; False: they are to end."""
        while not self.stopped:
            if (left_s := self.rest_left_s()) > 0:
                time.sleep(min(left_s, LOOK_S))
                continue
            self.halted.value = 0
            if not self.stopped and self.rest_left_s() <= 0:
                return True
            self.halted.value = 1  # one of the two has changed since the look above
        return False


class Backing:
    """Threads that let `nbytes` of host memory, from the start of a page, have their pages, from the first one on.

    They end when this object goes, when `owner` does, with which the memory goes, and where hardly any memory is free.
    """

    def __init__(self, owner: Any, address: int, nbytes: int):
        self._pages, self._nbytes = _Pages(), nbytes
        weakref.finalize(self, _Pages.stop, self._pages)
        begins = iter(range(0, nbytes if nbytes >= LEAST_BYTES else 0, PIECE_BYTES))
        work = weakref.ref(owner), address, nbytes, begins, self._pages
        self._threads: list[threading.Thread] = []
        for _ in range(min(MOST_THREADS, cores()) if nbytes >= LEAST_BYTES else 0):
            thread = threading.Thread(target=_back, args=work, name="vismoe-backing", daemon=True)
            with self._pages.changed:
                try:
                    thread.start()
                except RuntimeError:  # no more threads may be started: fewer do it
                    break
                self._pages.threads += 1
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads: when this returns, no page is allocated ahead any more."""
        self._pages.stop()
        self.wait()

    def rest(self, until_s: float) -> None:
        """The threads give no pages until then, in seconds of `time.perf_counter`; a new time replaces the one before."""
        self._pages.rest(until_s)

    @property
    def rests(self) -> bool:
        """The end of a rest is still to come."""
        return self._pages.rest_left_s() > 0

    def wait(self) -> None:
        """Until the threads have ended, usually because all memory has pages."""
        for thread in self._threads:
            thread.join()

    def wait_for(self, begin: int, nbytes: int) -> bool:
        """Whether these bytes have their pages, once they do or the threads have ended."""
        end, there = begin + nbytes, self._pages.there

        def have_pages() -> bool:
            first = begin // PIECE_BYTES * PIECE_BYTES
            return all(there.get(piece, 0) >= min(PIECE_BYTES, end - piece) for piece in range(first, end, PIECE_BYTES))

        with self._pages.changed:
            self._pages.changed.wait_for(lambda: not self._pages.threads or have_pages())
            return have_pages()

    @property
    def gives(self) -> bool:
        """The threads have not ended."""
        return self._pages.threads > 0

    @property
    def has_given(self) -> bool:
        """All pages, where it is worth the threads. Else they were stopped, found no memory free, or have not ended."""
        return self._nbytes < LEAST_BYTES or self.backed_bytes() >= self._nbytes

    def backed_bytes(self) -> int:
        """Of memory that has its pages; exact once the threads have ended."""
        return sum(list(self._pages.there.values()))


def _back(owner: "weakref.ref[Any]", address: int, nbytes: int, begins: Iterator[int], pages: _Pages) -> None:
    give_way()
    try:
        for begin in begins:
            given, size = 0, min(PIECE_BYTES, nbytes - begin)
            while given < size:
                if not pages.may_go_on() or (held := owner()) is None or host_memory()[0] < SPARE_BYTES:
                    return
                given += give_pages(address + begin + given, size - given, pages.halted)
                with pages.changed:
                    pages.there[begin] = given
                    pages.changed.notify_all()
                del held
    except ConfigError:  # the kernels are not built, or from other sources: loading says so
        return
    finally:
        with pages.changed:
            pages.threads -= 1
            pages.changed.notify_all()


def give_way() -> None:
    """This thread takes idle cores only, from now on."""
    thread = os.PRIO_PROCESS, threading.get_native_id()  # Linux counts a thread as a process here
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(*thread, max(NICE, os.getpriority(*thread)))


def addresses_are_free() -> bool:
    """Whether to reserve addresses takes nothing from others: no limit counts them. Linux."""
    strict = OVERCOMMIT.is_file() and OVERCOMMIT.read_text().strip() == "2"
    return not strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


class EarlyMemory:
    """Addresses for `most_bytes` of host memory, of which the first `wanted_bytes` get their pages, before it is known how many
    are needed."""

    def __init__(self, most_bytes: int, wanted_bytes: int):
        """Raises OSError where the system has no addresses."""
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
        self._memory: mmap.mmap | None = mmap.mmap(-1, most_bytes, flags=flags)  # which takes no memory until it is written
        first = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(first)
        del first  # or the addresses could not be given back
        advise(self.address, most_bytes, HUGEPAGE)
        self._backing = Backing(self._memory, self.address, wanted_bytes)

    def backed_bytes(self) -> int:
        """Of memory that has pages, if it was not taken; exact once it gets no more."""
        return self._backing.backed_bytes() if self._memory is not None else 0

    def stop(self) -> None:
        """It gets no more pages, until it is taken."""
        self._backing.stop()

    def wait_for_pages(self, begin: int, nbytes: int) -> bool:
        """Whether these bytes have their pages, once they do or get none any more. A disk that writes where there are none makes
        imports wait for their memory."""
        return self._backing.wait_for(begin, nbytes)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """uint8 `[nbytes]` from the start of a page, once, with the rest given back. None, and all stays as it is, where there
        are fewer, or none, or the rest cannot be given back."""
        self.stop()
        memory = self._memory
        if memory is None or nbytes > len(memory):
            return None
        try:
            memory.resize(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, BufferError):  # too many mappings; a debugger holds it
            return None
        self._memory = None
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def free(self) -> None:
        """Give all of it back that was not taken."""
        self.stop()
        self._memory = None
