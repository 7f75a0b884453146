"""Pages for memory ahead of the first write to it.

Memory gets its pages when it is first written: while an expert is read, or computed. In a virtual machine whose host had taken
free memory back, a GB takes 0.5 to 1.5 s of a core (docs/benchmark.md). Cores that are idle while a model's other weights load
can do it before.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator

import torch

from vismoe.machine.hardware import cores
from vismoe.pools.advice import POPULATE_WRITE, advise

LEAST_BYTES = 64 * 2**20  # of memory that is worth the threads
PIECE_BYTES = 4 * 2**20
MOST_THREADS = 4


class Backing:
    """Threads that let `memory`, uint8 `[nbytes]` in host memory, have its pages, from its first byte on.

    They end with this object, and at once where the system cannot do this.
    """

    def __init__(self, memory: torch.Tensor):
        self._stopped = threading.Event()
        weakref.finalize(self, self._stopped.set)
        work = weakref.ref(memory), itertools.count(0, PIECE_BYTES), self._stopped
        self._threads = [
            threading.Thread(target=_back, args=work, name="vismoe-backing", daemon=True)
            for _ in range(min(MOST_THREADS, max(1, cores() - 1)) if memory.nbytes >= LEAST_BYTES else 0)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """When this returns no more memory gets pages ahead."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Until all memory has pages."""
        for thread in self._threads:
            thread.join()


def _back(memory: "weakref.ref[torch.Tensor]", begins: Iterator[int], stopped: threading.Event) -> None:
    for begin in begins:
        held = memory()
        if stopped.is_set() or held is None or begin >= held.nbytes:
            return
        if not advise(held.data_ptr() + begin, min(PIECE_BYTES, held.nbytes - begin), POPULATE_WRITE):
            return
        del held
