"""Copies in flight: threads, tickets, and the only place where they, CUDA streams and events are touched.

On a CPU native threads read the files. What a demand of a decode pass lacks they read for the call that computes (demand.py),
anything else for a worker, which waits for them.
A worker asks the residency core for the next copy: demands first, in the order they were issued; while none is queued the
prefetch that is worth most at that moment, so a guess never waits in a queue and never ages.
A thread that waits for a demand runs queued demands itself instead of sleeping.
On a device no thread waits for a demand whose record lies in host memory for good: the thread that runs the model queues the copy
the moment it is demanded, its expert counts as resident from then on, and the device lets what reads it wait.

The core's state changes under one lock (`Changes`), which is never held during a copy.
"""

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch

from vismoe.errors import ClosedError, TransferError
from vismoe.formats.lossless import content_bytes
from vismoe.kernels.read import read_at_once
from vismoe.locks import under
from vismoe.paging.changes import Changes, whole
from vismoe.paging.residency import Link, Queued, Residency
from vismoe.paging.tickets import Moved, Ticket
from vismoe.pools.cuda_copies import copier
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.store.expert_store import ExpertStore, NativeRead
from vismoe.types import HIGH

logger = logging.getLogger(__name__)

EVENT_EVERY = 4  # queued copies: so many at most are waited for beside those that are needed
MEASURE_EVERY_S = 0.25
FILLING_S = 0.05  # between two looks whether slabs may be filled, of a thread that has nothing else to do
NEVER: tuple[int, Any] = (0, None)  # of a slab that nothing has read


class Mover(Protocol):
    """Brings one record into one slab; called without locks from any thread.

    `hosts`: the tiers below the device, one for each format that slabs hold; empty where there are none. `by_demander`: the
    thread that waits for a copy may make it itself. Not where a copy holds more than its own ticket: that thread can be
    interrupted (Ctrl-C) anywhere.
    """

    by_demander: bool
    hosts: tuple[HostTier, ...]

    def move(self, ticket: Ticket, pool: Slabs) -> Moved: ...

    @property
    def bytes_per_s(self) -> float | None:
        """Of the link, as measured on the way; None: not known."""
        return None

    def queue(self, ticket: Ticket, pool: Slabs) -> Moved | None:
        """Queue a copy on the device and return, by the thread that runs the model; the ticket gets the time that the link needs
        for it. None: not possible, `move` it."""
        return None

    def reading(self, ticket: Ticket, pool: Slabs) -> NativeRead | None:
        """How native threads make this copy while experts are computed on the CPU; None: `move` it."""
        return None

    def can_queue(self, geometry: int, experts: np.ndarray | None = None) -> bool:
        """Whether `queue_all` takes these experts `[n]` (flat) of a geometry; None: some of them."""
        return False

    def queue_all(self, geometry: int, experts: np.ndarray, slabs: np.ndarray, pool: Slabs) -> Queued:
        """Queue copies of experts `[n]` (flat) into these slabs, by the thread that runs the model: what it queues from now on
        sees these, and all that was queued before."""
        raise AssertionError("`can_queue` says that it takes none")

    def arrive(self, geometry: int, slabs: np.ndarray) -> None:
        """What this thread queues on the device from now on sees what was queued to be copied into these slabs."""
        return

    def begin_pass(self) -> None:
        """A pass of the model begins; it sees all that was queued to be copied before."""
        return

    def wait(self) -> None:
        """Return when all that was queued to be copied is there."""
        return

    def released(self, geometry: int, slabs: np.ndarray) -> None:
        """The computation that used these slabs was queued; a copy into one of them must wait for it. Nothing to do where it is
        over when it returns, as on a CPU."""
        return


class DiskMover(Mover):
    """Disk to slab; the CPU's only step."""

    by_demander = True
    hosts: tuple[HostTier, ...] = ()

    def __init__(self, *stores: ExpertStore):
        """A store for each format that slabs hold, the more precise first."""
        self._stores = stores

    def reading(self, ticket: Ticket, pool: Slabs) -> NativeRead | None:
        return self._placing(ticket, pool).reading(ticket.expert, int(pool.addresses[ticket.slab]))

    def move(self, ticket: Ticket, pool: Slabs) -> Moved:
        store = self._placing(ticket, pool)
        ticket.reading = reading = store.reading(ticket.expert, int(pool.addresses[ticket.slab]))
        if reading is None:
            return Moved(disk_bytes=store.read(ticket.expert, pool.record(ticket.slab)))
        read_at_once(reading.arrival)
        if (error := reading.error()) is not None:
            raise error
        return Moved(disk_bytes=reading.nbytes)

    def _placing(self, ticket: Ticket, pool: Slabs) -> ExpertStore:
        """The store of the expert, whose slab has a place for its record then."""
        store = self._stores[pool.precision_of(ticket.slab)]
        pool.place(ticket.slab, lambda: store.begins(ticket.expert))
        return store


@dataclass(frozen=True)
class Decoding:
    """How a device decodes the records that the first host tier keeps encoded, in the lossless format.

    staging: on the device, of the largest encoded record, a slab for each copy stream. decoders: per geometry, (encoded record,
    slab's record), queued on the current stream; None: its slabs hold records as they are.
    """

    staging: SlabPool
    decoders: Sequence[Callable[[torch.Tensor, torch.Tensor], None] | None]


class DeviceMover(Mover):
    """Disk to page-locked host tier to device slab, on two streams: what was demanded does not queue behind what was not.

    Orders kept (FluxMoE, algorithm 1). Made before the slabs: what is queued by now may still use the memory that they get, so
    both streams wait for it. Write after read: a copy's stream waits for the event that the compute stream recorded when what
    used the slab let go of it, or for a later one of them; a pass on another stream begins behind the newest. Read after
    write: a ticket that a worker has moved is done only after its copy's event was waited for on the host; one that was
    queued is done at once, and the compute stream waits for an event behind the copy before it reads the slab, or the demand
    lets go of it. A host record stays leased until its copy has ended; only those of a tier that never evicts are queued.
    With `decoding` a copy goes to the staging slab of its stream and is decoded from there on the same stream: after the
    copy, and before the next one, which no other thread may queue between the two.
    """

    by_demander = False

    def __init__(self, *hosts: HostTier, device: torch.device, decoding: Decoding | None = None):
        self.hosts, self._device, self._decoding = hosts, device, decoding
        self._demanded, self._unasked = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)  # lower is sooner
        queued = torch.cuda.current_stream(device).record_event()
        for stream in (self._demanded, self._unasked):
            stream.wait_event(queued)
        self._queueing = threading.RLock(), threading.RLock()  # on a stream, by one thread at a time
        self._last_read: dict[tuple[int, int], tuple[int, Any]] = {}  # by slab, the number and the event of its last release
        self._reads = 0
        self._newest_read: torch.cuda.Event | None = None
        self._queued = self._seen = 0  # copies queued so far; up to which of them the compute stream waits
        self._coming: dict[tuple[int, int], int] = {}  # by slab, the number of the copy that was queued last
        self._behind: collections.deque[tuple[int, torch.cuda.Event]] = collections.deque()  # (a copy's number, the event behind)
        self._compute: torch.cuda.Stream | None = None
        self._clock = LinkClock()

    @functools.cached_property
    def _put(self) -> Callable[[np.ndarray, np.ndarray, int], None] | None:
        """Queues copies by the driver's own functions, which are looked up when the first one is queued."""
        return copier(self._demanded) if self._device.type == "cuda" else None

    @property
    def bytes_per_s(self) -> float | None:
        return self._clock.bytes_per_s

    def move(self, ticket: Ticket, pool: Slabs) -> Moved:
        stream = self._unasked if ticket.unasked else self._demanded
        with self.hosts[pool.precision_of(ticket.slab)].lease(ticket.expert) as lease:
            with self._queueing[ticket.unasked], torch.cuda.stream(stream):
                nbytes = self._copy(ticket.geometry, ticket.slab, pool, lease.pool.record(lease.slab), stream)
                copied = stream.record_event()
            copied.synchronize()
        return Moved(disk_bytes=lease.disk_bytes, link_bytes=nbytes)

    def queue(self, ticket: Ticket, pool: Slabs) -> Moved | None:
        lease = self.hosts[pool.precision_of(ticket.slab)].lease_for_good(ticket.expert) if not ticket.transition else None
        if lease is None:
            return None
        nbytes = self._put_all(ticket.geometry, pool, [ticket.slab], lease.pool, [lease.slab])
        ticket.began_s, ticket.ended_s = self._clock.times(nbytes)
        self._coming[ticket.geometry, ticket.slab] = self._queued
        if self._queued % EVENT_EVERY == 0:
            self._behind.append((self._queued, self._demanded.record_event()))
        return Moved(link_bytes=nbytes)

    def can_queue(self, geometry: int, experts: np.ndarray | None = None) -> bool:
        if len(self.hosts) != 1 or not self.hosts[HIGH].keeps(geometry):
            return False
        return experts is None or self.hosts[HIGH].places_for_good(geometry, experts) is not None

    def queue_all(self, geometry: int, experts: np.ndarray, slabs: np.ndarray, pool: Slabs) -> Queued:
        host, places = self.hosts[HIGH].pools[geometry], self.hosts[HIGH].places_for_good(geometry, experts)
        assert places is not None, "the caller has asked"
        lying = places.tolist()
        nbytes = self._put_all(geometry, pool, slabs.tolist(), host, lying)
        self._wait_behind(self._queued, torch.cuda.current_stream(self._device))
        return Queued(*self._clock.times(nbytes), nbytes)

    def _put_all(self, geometry: int, pool: Slabs, slabs: list[int], host: SlabPool, lying: list[int]) -> int:
        """Queue copies of the records that lie there into these slabs, behind all that were demanded before -> bytes over the
        link."""
        nbytes = under(self._queueing[False], self._put_each, geometry, pool, slabs, host, lying)
        self._queued += len(slabs)
        return nbytes

    def _put_each(self, geometry: int, pool: Slabs, slabs: list[int], host: SlabPool, lying: list[int]) -> int:
        stream, put = self._demanded, self._put
        if put is None or self._decoding is not None or torch.cuda.current_device() != self._device.index:
            records = [host.record(place) for place in lying]
            size = len(slabs) * pool.bytes_of(slabs[0]) if self._decoding is None else sum(map(content_bytes, records))
            with torch.cuda.stream(stream), self._clock.timing(stream, size):
                return sum(self._copy(geometry, slab, pool, record, stream) for slab, record in zip(slabs, records))
        nbytes = pool.bytes_of(slabs[0])  # as `_copy`, without torch's way to another stream
        last = max((self._last_read.get((geometry, slab), NEVER) for slab in slabs), key=itemgetter(0))
        if last is not NEVER:
            stream.wait_event(last[1])  # those before it are on the same stream
        with self._clock.timing(stream, nbytes * len(slabs)):
            put(pool.addresses[slabs], host.addresses[lying], nbytes)
        return nbytes * len(slabs)

    def _copy(self, geometry: int, slab: int, pool: Slabs, record: torch.Tensor, stream: torch.cuda.Stream) -> int:
        """Queue a copy on the current stream, which is this one -> bytes over the link."""
        decoding = self._decoding if pool.precision_of(slab) == HIGH else None
        there, (_, event) = pool.record(slab), self._last_read.get((geometry, slab), NEVER)
        decoder = decoding.decoders[geometry] if decoding is not None else None
        nbytes = pool.bytes_of(slab) if decoding is None else content_bytes(record)
        if decoding is not None and decoder is not None:
            staged = decoding.staging.record(int(stream is self._unasked))[:nbytes]
            staged.copy_(record[:nbytes], non_blocking=True)
        if event is not None:
            stream.wait_event(event)
        if decoder is not None:
            decoder(staged, there)
        else:
            there[:nbytes].copy_(record[:nbytes], non_blocking=True)
        return nbytes

    def arrive(self, geometry: int, slabs: np.ndarray) -> None:
        if not self._coming:
            return
        newest = max((self._coming.pop((geometry, slab), 0) for slab in slabs.tolist()), default=0)
        if newest > self._seen:
            self._wait_behind(newest, torch.cuda.current_stream(self._device))

    def _wait_behind(self, number: int, stream: torch.cuda.Stream) -> None:
        """Let the compute stream wait for that copy and those before it: they end in the order they were queued."""
        behind = self._behind
        while behind and behind[0][0] < number:
            behind.popleft()
        self._seen, event = behind.popleft() if behind else (self._queued, self._demanded.record_event())
        stream.wait_event(event)

    def begin_pass(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._compute and self._newest_read is not None:
            stream.wait_event(self._newest_read)
        if self._queued and (self._coming or stream != self._compute):
            self._behind.clear()
            self._coming.clear()
            self._wait_behind(self._queued, stream)
        self._compute = stream

    def wait(self) -> None:
        try:
            self._demanded.synchronize()
        except RuntimeError as error:  # of the device; whatever uses it next raises it too
            logger.error("copies to the GPU failed: %s", error)

    def released(self, geometry: int, slabs: np.ndarray) -> None:
        self.arrive(geometry, slabs)  # what was not computed may still be on its way
        self._reads += 1
        self._newest_read = torch.cuda.current_stream(self._device).record_event()
        read = self._reads, self._newest_read
        self._last_read.update(dict.fromkeys(((geometry, slab) for slab in slabs.tolist()), read))


class LinkClock:
    """When queued copies run, as far as the host can know: one after another, at the rate of those that have ended.

    Events around a copy measure the rate, now and then.
    """

    def __init__(self) -> None:
        self._s_per_byte = 0.0  # 0: no copy has ended yet
        self._idle_at_s = self._next_s = 0.0
        self._measured: tuple[torch.cuda.Event, torch.cuda.Event, int] | None = None  # before and behind a copy, its bytes

    @property
    def bytes_per_s(self) -> float | None:
        return 1 / self._s_per_byte if self._s_per_byte else None

    @contextlib.contextmanager
    def timing(self, stream: torch.cuda.Stream, nbytes: int) -> Iterator[None]:
        """Within, a copy is queued."""
        now_s = time.perf_counter()
        if now_s < self._next_s or (self._measured is not None and not self._measured[1].query()):
            yield
            return
        if self._measured is not None:
            began, ended, size = self._measured
            self._s_per_byte = began.elapsed_time(ended) / 1e3 / size
            self._next_s = now_s + MEASURE_EVERY_S
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(stream)
        yield
        ended.record(stream)
        self._measured = began, ended, nbytes

    def times(self, nbytes: int) -> tuple[float, float]:
        """When a copy that was queued now begins and ends, in seconds of `time.perf_counter`."""
        began_s = max(time.perf_counter(), self._idle_at_s)
        self._idle_at_s = began_s + nbytes * self._s_per_byte
        return began_s, self._idle_at_s


class EmulatedLinkMover(Mover):
    """A link of a given rate on a machine without a device: the slab aliases the host record and the ticket completes late.

    Transfers queue on one link: each completes `record_bytes / rate` after the one before it. Nothing is copied, so the link may
    be faster than this machine could copy. Figures made with it are emulated and must be labelled so.
    """

    by_demander = False

    def __init__(self, *hosts: HostTier, bytes_per_s: float):
        self.hosts, self._rate = hosts, bytes_per_s
        self._lock = threading.Lock()
        self._idle_at_s = 0.0

    def move(self, ticket: Ticket, pool: Slabs) -> Moved:
        nbytes = pool.bytes_of(ticket.slab)
        with self.hosts[pool.precision_of(ticket.slab)].lease(ticket.expert) as lease:
            with self._lock:
                self._idle_at_s = max(self._idle_at_s, time.perf_counter()) + nbytes / self._rate
                done_at_s = self._idle_at_s
            pool.alias(ticket.slab, lease.pool, lease.slab)  # the host tier holds every expert, so the record stays
            time.sleep(max(0.0, done_at_s - time.perf_counter()))
        return Moved(disk_bytes=lease.disk_bytes, link_bytes=nbytes)


class Transfer(Link):
    """Worker threads that carry out a core's copies (its `Link`). Without threads, call `take` and `run`.

    `finished(ticket)` hands a copy that has ended to the core; `repair()` repairs state after an interrupt. They belong to the
    pager, and are called in a change.
    """

    def __init__(
        self, mover: Mover, core: Residency, threads: int, finished: Callable[[Ticket], None], repair: Callable[[], None]
    ):
        self.changes = Changes(repair)
        self._mover, self._core, self._finished = mover, core, finished
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"vismoe-transfer-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be something to copy. Called in a change."""
        self.changes.wake()

    def queue(self, ticket: Ticket) -> bool:
        try:
            moved = self._mover.queue(ticket, self._core.tables[ticket.geometry].pool)
        except Exception as error:  # as in `run`: the demand that needs the expert raises it
            moved, ticket.error = Moved(), error
        if moved is None:
            return False
        ticket.moved, ticket.queued, ticket.done = moved, True, True
        self._finished(ticket)
        return True

    @property
    def bytes_per_s(self) -> float | None:
        return self._mover.bytes_per_s

    def reading(self, ticket: Ticket) -> NativeRead | None:
        return self._mover.reading(ticket, self._core.tables[ticket.geometry].pool)

    def can_queue(self, geometry: int, experts: np.ndarray | None = None) -> bool:
        return self._mover.can_queue(geometry, experts)

    def queue_all(self, geometry: int, experts: np.ndarray, slabs: np.ndarray) -> Queued:
        try:
            return self._mover.queue_all(geometry, experts, slabs, self._core.tables[geometry].pool)
        except Exception as error:
            self._mover.wait()  # some may be under way, into slabs that are free now
            raise TransferError(
                f"{len(experts)} experts could not be brought in: {error}. "
                "This request failed; the engine can go on with the next one."
            ) from error

    def finished(self, ticket: Ticket) -> None:
        self._finished(ticket)

    def arrive(self, geometry: int, slabs: np.ndarray) -> None:
        self._mover.arrive(geometry, slabs)

    def begin_pass(self) -> None:
        self._mover.begin_pass()

    def wait_for_queued(self) -> None:
        self._mover.wait()

    def released(self, geometry: int, slabs: np.ndarray) -> None:
        self._mover.released(geometry, slabs)

    def wait_any(self, tickets: Collection[Ticket]) -> None:
        """Return when one of `tickets` is done; run queued demands meanwhile. Not called in a change."""
        while (found := self._done_or_taken(tickets)) is not None:
            if isinstance(found, Ticket):
                self.run(found)
            else:
                found.acquire()

    @whole
    def _done_or_taken(self, tickets: Collection[Ticket]) -> "Ticket | threading.Lock | None":
        """None when one of `tickets` is done; else a queued demand for this thread to run, or what to wait at."""
        if any(ticket.done for ticket in tickets):
            return None
        if self._closed:
            raise ClosedError("the engine was closed while an expert was on its way")
        if self._core.queue and self._mover.by_demander:
            return self.take()
        return self.changes.waiter()

    @whole
    def take(self) -> Ticket | None:
        """The next copy, for this thread to `run`, or None."""
        ticket = self._core.next_copy()
        if ticket is not None:
            ticket.runner, ticket.began_s = threading.get_ident(), time.perf_counter()
        return ticket

    @whole
    def _next(self) -> "Ticket | threading.Lock | None":
        """What a worker runs now, or waits at; None when it shall end."""
        return None if self._closed else self.take() or self.changes.waiter()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            if isinstance(found, Ticket):
                self.run(found)
            else:
                found.acquire(timeout=FILLING_S if self._core.filling_waits else -1)

    def run(self, ticket: Ticket) -> None:
        """Copy, then settle. An error belongs to the ticket: the demand that needs the expert raises it; the thread lives on."""
        try:
            ticket.moved = self._mover.move(ticket, self._core.tables[ticket.geometry].pool)
        except Exception as error:
            ticket.error = error
        except BaseException as error:  # Ctrl-C in the thread that waits: settle first, then let it through
            ticket.error = error
            raise
        finally:
            self._settle(ticket)

    @whole
    def _settle(self, ticket: Ticket) -> None:
        ticket.done, ticket.ended_s = True, time.perf_counter()
        self._finished(ticket)
        self.changes.wake()

    @whole
    def _drop_queue(self) -> None:
        while self._core.queue:
            ticket = self._core.queue.popleft()
            ticket.error = ClosedError("the engine was closed before the copy began")
            self._settle(ticket)
        self.changes.wake()

    def close(self) -> None:
        """Drop what is queued, let running copies end, stop the threads. May be called twice."""
        self._closed = True
        self._drop_queue()
        if threading.current_thread() in self._threads:
            return  # a finalizer that ran on a worker: its siblings end by themselves
        for thread in self._threads:
            thread.join()
        self._mover.wait()
