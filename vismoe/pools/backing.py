"""Pages for memory ahead of the first write to it.

Memory gets its pages when it is first written: while an expert is read, or computed. In a virtual machine whose host had taken
free memory back, a GB takes 0.5 to 1.5 s of a core (docs/benchmark.md). Cores that are idle while a model's other weights load
can do it before; what is left, they do beside the first requests.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator

import torch

from vismoe.machine.hardware import cores, host_memory
from vismoe.pools.advice import POPULATE_WRITE, advise

LEAST_BYTES = 64 * 2**20  # of memory that is worth the threads
PIECE_BYTES = 4 * 2**20  # between two pieces other threads can change the process's memory
SPARE_BYTES = 2**28  # of free memory that stay: what loading takes for a moment is in no plan
MOST_THREADS = 4


class Backing:
    """Threads that have the system allocate the pages of `memory`, in host memory, from its first byte on.

    They end when this object goes, where the system refuses, and where hardly any memory is free.
    """

    def __init__(self, memory: torch.Tensor):
        self._stopped = threading.Event()
        weakref.finalize(self, self._stopped.set)
        work = weakref.ref(memory), itertools.count(0, PIECE_BYTES), self._stopped
        self._threads: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):  # no more threads may be started: fewer do it
            for _ in range(min(MOST_THREADS, max(1, cores() - 1)) if memory.nbytes >= LEAST_BYTES else 0):
                thread = threading.Thread(target=_back, args=work, name="vismoe-backing", daemon=True)
                thread.start()
                self._threads.append(thread)

    def stop(self) -> None:
        """End the threads: when this returns, no page is allocated ahead any more."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Until the threads have ended, usually because all memory has pages."""
        for thread in self._threads:
            thread.join()


def _back(memory: "weakref.ref[torch.Tensor]", begins: Iterator[int], stopped: threading.Event) -> None:
    for begin in begins:
        held = memory()
        if stopped.is_set() or held is None or begin >= held.nbytes or host_memory()[0] < SPARE_BYTES:
            return
        if not advise(held.data_ptr() + begin, min(PIECE_BYTES, held.nbytes - begin), POPULATE_WRITE):
            return
        del held
