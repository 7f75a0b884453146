"""Where a lookahead is evaluated: off the critical path, in one worker thread beside the model, or in line where asked.

The model's thread hands over a snapshot and goes on; only the newest snapshot is evaluated, and a result that comes after the
next layer was demanded is dropped. With `inline` (deterministic runs, recordings) the result is there before the layer is
computed. An error in the worker is raised on the model's thread at the next layer: guesses may be wrong, but never silently
missing.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vismoe.lookahead.lookahead import Lookahead, Seen

__all__ = ["BackgroundLookahead"]

logger = logging.getLogger(__name__)

Tell = Callable[[int, int, np.ndarray], None]  # (tick of the demand, MoE layer, scores)


class BackgroundLookahead:
    """Asks a lookahead for the model's thread; `tell` is called with what it says, in whatever thread found it out.

    `charge` is told how many seconds of a core each evaluation of the worker took.
    """

    def __init__(self, lookahead: Lookahead, tell: Tell, inline: bool, charge: Callable[[float], None] = lambda core_s: None):
        self._lookahead, self._tell, self.inline, self._charge = lookahead, tell, inline, charge
        self._waiting: queue.SimpleQueue[tuple[int, int, Any] | None] = queue.SimpleQueue()
        self._request = 0
        self._failed: tuple[int, Exception] | None = None  # in which request
        self._worker: threading.Thread | None = None
        self._closed = False

    def begin_request(self) -> None:
        """What fails late from here on belongs to a request that is over."""
        self._request += 1

    def ask(self, seen: Seen, tick: int) -> None:
        """Scores of the layers after `seen`, told at once or by the worker."""
        if self._failed is not None:
            (request, failed), self._failed = self._failed, None
            if request == self._request:
                raise RuntimeError(f"the lookahead failed beside the model: {failed}") from failed
            logger.warning("the lookahead failed beside a request that had ended: %s", failed)
        if self._closed:
            return
        snapshot = self._lookahead.snapshot(seen)
        if snapshot is None:
            return
        if self.inline:
            scores = self._lookahead.evaluate(snapshot)
            if scores is not None:
                self._tell(tick, seen.layer, scores)
            return
        if self._worker is None:  # started by the first miss; a model that fits never has one
            worker = threading.Thread(target=self._work, name="vismoe-lookahead", daemon=True)
            worker.start()
            self._worker = worker
        self._waiting.put((tick, seen.layer, (self._request, snapshot)))

    def close(self) -> None:
        """Ends the worker; may be called twice."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            self._waiting.put(None)
            if worker is not threading.current_thread():  # which may be the one that frees the model
                worker.join()

    def _work(self) -> None:
        _torch_alone_here()
        while (newest := self._newest()) is not None:
            tick, layer, (request, snapshot) = newest
            began_s = time.thread_time()
            try:
                scores = self._lookahead.evaluate(snapshot)
                if scores is not None:
                    self._tell(tick, layer, scores)
                self._charge(time.thread_time() - began_s)
            except Exception as error:  # the worker's boundary: the model's thread raises it
                self._failed = request, error
        self._waiting.put(None)  # for another worker, should an interrupt or a second thread have started one

    def _newest(self) -> tuple[int, int, Any] | None:
        """The snapshot handed over last; None to end."""
        newest = self._waiting.get()
        while newest is not None and not self._waiting.empty():
            newest = self._waiting.get()
        return newest


def _torch_alone_here() -> None:
    """Torch's products in this thread start no workers of their own, which would fight the model's for the cores.

    `set_num_threads` also sets what threads that have not used torch yet will take; a thread that ends puts that back.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(others,))
    back.start()
    back.join()
