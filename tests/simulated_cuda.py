"""CUDA's streams and events on a machine without a GPU, to prove in which order copies and kernels may run.

A stream is a queue of operations; one runs when all before it have run and the events it waits for have happened. The scheduler
decides which stream goes on: at random from a seed, or always as late as the program allows for one kind of streams, which shows
a missing dependency every time. A copy is two operations, so that half a copy can be seen.
"""

import contextlib
import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vismoe.pools.pool import SlabPool


class Stream:
    def __init__(self, cuda: "SimulatedCuda", priority: int):
        self.cuda, self.priority = cuda, priority
        self.queue: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()  # (operation, whether it may run)

    def put(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        with self.cuda.lock:
            self.queue.append((run, ready))
            self.cuda.go_on()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.cuda)
        event.done = False
        self.put(event.happen)
        return event

    def wait_event(self, event: "Event") -> None:
        self.put(lambda: None, lambda: event.done)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    def __init__(self, cuda: "SimulatedCuda", enable_timing: bool = False):
        self._cuda, self.done = cuda, False

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, later: "Event") -> float:
        assert self.done and later.done
        return 1.0

    def happen(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        self._cuda.run_until(lambda: self.done)


class SimulatedCuda:
    """One device with a stream for kernels, `compute`, and those that the code under test makes.

    late: "kernels" or "copies" (every other stream) run only when something waits for them, and the others at once; None: what
    runs is drawn from `seed`. meanwhile: called whenever a thread waits for the device: what other threads might do then.
    """

    def __init__(self, seed: int = 0, late: str | None = None):
        self.lock = threading.RLock()
        self.meanwhile: Callable[[], None] = lambda: None
        self.late, self._random, self._here = late, random.Random(seed), threading.local()
        self.streams: list[Stream] = []
        self.compute = self.stream_of()

    def install(self, patch: Any) -> None:
        """Replace torch.cuda's streams, with pytest's monkeypatch."""
        patch.setattr(torch.cuda, "Stream", self.stream_of)
        patch.setattr(torch.cuda, "Event", functools.partial(Event, self))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    def stream_of(self, device: Any = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, priority))
        return self.streams[-1]

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.compute)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        self.current.put(kernel)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        middle = len(to) // 2
        for part in (slice(0, middle), slice(middle, None)):
            self.launch(lambda part=part: to[part].copy_(source[part]))

    def go_on(self) -> None:
        """What the device does by itself after something was queued."""
        steps = self._random.randrange(4) if self.late is None else -1
        while steps and self._step(waited_for=False):
            steps -= 1

    def run_until(self, done: Callable[[], bool]) -> None:
        self.meanwhile()
        with self.lock:
            while not done():
                assert self._step(waited_for=True), "a thread waits for what can never happen"

    def _step(self, waited_for: bool) -> bool:
        """Run one operation; False if none can run, or none that runs before something waits for it."""
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0][1]()]
        if self.late is not None:
            early = [stream for stream in ready if (stream is self.compute) != (self.late == "kernels")]
            ready = early or (ready if waited_for else [])
        if ready:
            self._random.choice(ready).queue.popleft()[0]()
        return bool(ready)


class SimulatedPool(SlabPool):
    """Slabs on the simulated device: whoever writes a record queues a copy on the current stream."""

    def __init__(self, cuda: SimulatedCuda, *args: Any):
        super().__init__(*args)
        self._cuda = cuda

    def record(self, slab: int) -> Any:
        return _Record(self._cuda, super().record(slab))


class SimulatedTensor:
    """What `tensor` will hold when the operations queued so far have run, as a tensor on the simulated device."""

    device = torch.device("cuda", 0)

    def __init__(self, cuda: SimulatedCuda, tensor: torch.Tensor):
        self._cuda, self._tensor = cuda, tensor

    def detach(self) -> "SimulatedTensor":
        return self

    def to(self, place: str, non_blocking: bool) -> torch.Tensor:
        assert place == "cpu" and non_blocking
        host = torch.full_like(self._tensor, -1)
        self._cuda.copy(host, self._tensor)
        return host


class _Record:
    def __init__(self, cuda: SimulatedCuda, record: torch.Tensor):
        self._cuda, self.bytes = cuda, record

    def __getitem__(self, part: slice) -> "_Record":
        return _Record(self._cuda, self.bytes[part])

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking, "a blocking copy would hold up every thread"
        self._cuda.copy(self.bytes, source)
