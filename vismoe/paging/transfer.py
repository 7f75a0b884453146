"""Copies in flight: threads, tickets, and the only place where they, CUDA streams and events are touched.

A worker asks the residency core for the next copy: demands first, in the order they were issued; while none is queued the
prefetch that is worth most at that moment, so a guess never waits in a queue and never ages.
A thread that waits for a demand runs queued demands itself instead of sleeping.

The core's state changes under one lock (`Changes`), which is never held during a copy.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vismoe.errors import ClosedError
from vismoe.formats.lossless import content_bytes
from vismoe.paging.changes import Changes, whole
from vismoe.paging.residency import Link, Residency
from vismoe.paging.tickets import Moved, Ticket
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.store.expert_store import ExpertStore
from vismoe.types import HIGH


class Mover(Protocol):
    """Brings one record into one slab; called without locks from any thread.

    `hosts`: the tiers below the device, one for each format that slabs hold; empty where there are none. `by_demander`: the
    thread that waits for a copy may make it itself. Not where a copy holds more than its own ticket: that thread can be
    interrupted (Ctrl-C) anywhere.
    """

    by_demander: bool
    hosts: tuple[HostTier, ...]

    def move(self, ticket: Ticket, pool: Slabs) -> Moved: ...

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

    def move(self, ticket: Ticket, pool: Slabs) -> Moved:
        store = self._stores[pool.precision_of(ticket.slab)]
        return Moved(disk_bytes=store.read(ticket.expert, pool.record(ticket.slab)))


@dataclass(frozen=True)
class Decoding:
    """How a device decodes the records that the first host tier keeps encoded, in the lossless format.

    staging: on the device, of the largest encoded record, a slab for each copy stream. decoders: per geometry, (encoded record,
    slab's record), queued on the current stream; None: its slabs hold records as they are.
    """

    staging: SlabPool
    decoders: Sequence[Callable[[torch.Tensor, torch.Tensor], None] | None]


class DeviceMover:
    """Disk to page-locked host tier to device slab, on two streams: what was demanded does not queue behind what was not.

    Orders kept (FluxMoE, algorithm 1). Made before the slabs: what is queued by now may still use the memory that they get, so
    both streams wait for it. Write after read: a copy's stream waits for the event recorded on the compute stream when
    the demand that used the slab let go of it. Read after write: a ticket is done only after its copy's event was waited for on
    the host, so no kernel that was launched later can see the old bytes, and no copy of the other stream can take the slab. The
    host record stays leased until then. With `decoding` a copy goes to the staging slab of its stream and is decoded from there
    on the same stream: after the copy, and before the next one, which no other thread may queue between the two.
    """

    by_demander = False

    def __init__(self, *hosts: HostTier, device: torch.device, decoding: Decoding | None = None):
        self.hosts, self._device, self._decoding = hosts, device, decoding
        self._demanded, self._unasked = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)  # lower is sooner
        queued = torch.cuda.current_stream(device).record_event()
        for stream in (self._demanded, self._unasked):
            stream.wait_event(queued)
        self._queueing = threading.Lock(), threading.Lock()  # on a stream, by one thread at a time
        self._last_read: dict[tuple[int, int], torch.cuda.Event] = {}

    def move(self, ticket: Ticket, pool: Slabs) -> Moved:
        precision, unasked = pool.precision_of(ticket.slab), ticket.speculative or ticket.transition
        decoding = self._decoding if precision == HIGH else None
        with self.hosts[precision].lease(ticket.expert) as lease:
            record, there = lease.pool.record(lease.slab), pool.record(ticket.slab)
            event = self._last_read.get((ticket.geometry, ticket.slab))
            stream = self._unasked if unasked else self._demanded
            decoder = decoding.decoders[ticket.geometry] if decoding is not None else None
            nbytes = pool.bytes_of(ticket.slab) if decoding is None else content_bytes(record)
            with self._queueing[unasked], torch.cuda.stream(stream):
                if decoding is not None and decoder is not None:
                    staged = decoding.staging.record(int(unasked))[:nbytes]
                    staged.copy_(record[:nbytes], non_blocking=True)
                if event is not None:
                    stream.wait_event(event)
                if decoder is not None:
                    decoder(staged, there)
                else:
                    there[:nbytes].copy_(record[:nbytes], non_blocking=True)
                copied = stream.record_event()
            copied.synchronize()
        return Moved(disk_bytes=lease.disk_bytes, link_bytes=nbytes)

    def released(self, geometry: int, slabs: np.ndarray) -> None:
        event = torch.cuda.current_stream(self._device).record_event()
        for slab in slabs.tolist():
            self._last_read[geometry, slab] = event


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
                found.acquire()

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
