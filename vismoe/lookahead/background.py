"""Where a lookahead is evaluated: off the critical path in a worker thread, or inline if requested.

The model's thread passes a snapshot and continues; the worker evaluates only the newest snapshot, and a result that arrives after
the next layer was demanded is dropped. With `inline` (deterministic runs, recordings) the result is ready before the layer is
computed. An error in the worker is raised on the model's thread at the next layer: predictions may be wrong, but never silently
missing.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from vismoe.lookahead.lookahead import Lookahead, Seen

logger = logging.getLogger(__name__)

Tell = Callable[[int, int, np.ndarray], None]  # (tick of the demand, MoE layer, scores)


class _Asked(NamedTuple):
    tick: int
    layer: int
    request: int
    snapshot: Any
    made: Any  # the event behind the snapshot on the model's stream; None on a CPU


class BackgroundLookahead:
    """Evaluates a lookahead for the model's thread; calls `tell` with the result, in the thread that computed it.

    `charge` is called with the seconds of a core that each evaluation of the worker took. `gpu`: where snapshots lie; the worker
    evaluates on a stream of its own there, behind what makes the snapshot and ahead of what the model has queued. None: the CPU.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        tell: Tell,
        inline: bool,
        charge: Callable[[float], None] = lambda core_s: None,
        gpu: torch.device | None = None,
    ):
        self._lookahead, self._tell, self.inline, self._charge = lookahead, tell, inline, charge
        self._gpu = gpu
        self._stream = torch.cuda.Stream(gpu, priority=-1) if gpu is not None and not inline else None
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._request = 0
        self._failed: tuple[int, Exception] | None = None  # (request, error)
        self._worker: threading.Thread | None = None
        self._closed = False

    def begin_request(self) -> None:
        """From now on, late errors of earlier evaluations belong to a finished request."""
        self._request += 1

    def ask(self, seen: Seen, tick: int) -> None:
        """Scores of the layers after `seen`, computed now or by the worker."""
        if self._failed is not None:
            (request, failed), self._failed = self._failed, None
            if request == self._request:
                raise RuntimeError(f"the lookahead failed in its worker thread: {failed}") from failed
            logger.warning("the lookahead failed for a request that had already ended: %s", failed)
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
        if self._worker is None:  # started by the first miss; a model that fits in memory never has one
            worker = threading.Thread(target=self._work, name="vismoe-lookahead", daemon=True)
            worker.start()
            self._worker = worker
        made = torch.cuda.current_stream(self._gpu).record_event() if self._stream is not None else None
        self._waiting.put(_Asked(tick, seen.layer, self._request, snapshot, made))

    def close(self) -> None:
        """Ends the worker thread; may be called twice."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            self._waiting.put(None)
            if worker is not threading.current_thread():  # this thread may be the worker, if it frees the model
                worker.join()

    def _work(self) -> None:
        _torch_alone_here()
        while (newest := self._newest()) is not None:
            began_s = time.thread_time()
            try:
                scores = self._evaluated(newest)
                if scores is not None:
                    self._tell(newest.tick, newest.layer, scores)
                self._charge(time.thread_time() - began_s)
            except Exception as error:  # the worker's boundary; the model's thread raises the error
                self._failed = newest.request, error
        self._waiting.put(None)  # ends another worker, in case an interrupt or a second thread started one

    def _evaluated(self, asked: "_Asked") -> np.ndarray | None:
        """The scores. Reading them back ends all use of the snapshot, whose memory the model's stream may get next."""
        if self._stream is None:
            return self._lookahead.evaluate(asked.snapshot)
        self._stream.wait_event(asked.made)
        with torch.cuda.stream(self._stream):
            return self._lookahead.evaluate(asked.snapshot)

    def _newest(self) -> "_Asked | None":
        """The latest snapshot; None to end."""
        newest = self._waiting.get()
        while newest is not None and not self._waiting.empty():
            newest = self._waiting.get()
        return newest


def _torch_alone_here() -> None:
    """Makes torch's products in this thread start no workers, which would compete with the model's for cores.

    `set_num_threads` also affects threads that have not used torch yet; the end of this thread restores that.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(others,))
    back.start()
    back.join()
