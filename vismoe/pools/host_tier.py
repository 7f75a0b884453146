"""The middle tier: records in host memory, page-locked if a GPU copies from them. Bounded, filled lazily, LRU.

The tier includes the device tier: an expert on the device may also be here. If the tier is smaller than all experts, it evicts
the least recently used record that no thread leases or holds, and a later lease reads the disk again.

Threads that copy *lease* a record; the lease reads it from disk if needed. The thread that runs the model *holds* records while
it computes from them. Ctrl-C may interrupt that thread anywhere, so `let_go` releases all that it holds, and may be called
repeatedly.
"""

import collections
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from vismoe.errors import ClosedError
from vismoe.locks import under
from vismoe.pools.pool import SlabPool
from vismoe.store.expert_store import ExpertStore
from vismoe.types import ExpertId, RecordLayout


@dataclass(frozen=True)
class HostLease:
    pool: SlabPool
    slab: int
    disk_bytes: int  # 0 if the record was here already


class HostTier:
    """`slabs[g]` records of each geometry: at least one more than the number of threads that lease at the same time.

    `layouts`: of the records that the store reads; those of its inventory unless it leaves them encoded.
    """

    def __init__(
        self, store: ExpertStore, slabs: tuple[int, ...], page_locked: bool, layouts: Sequence[RecordLayout] | None = None
    ):
        self._store = store
        layouts = layouts or store.inventory.layouts
        self.pools = tuple(SlabPool(layout, n, page_locked=page_locked) for layout, n in zip(layouts, slabs, strict=True))
        counts = collections.Counter(layer.geometry for layer in store.inventory.layers for _ in range(layer.num_experts))
        self._holds_all = [n >= counts[geometry] for geometry, n in enumerate(slabs)]
        layers = store.inventory.layers
        self._named = [
            [
                ExpertId(layer.index, expert)
                for layer in layers
                if layer.geometry == geometry
                for expert in range(layer.num_experts)
            ]
            for geometry in range(len(slabs))
        ]
        self._places = [np.full(len(named), -1, dtype=np.int64) for named in self._named]  # of records that never leave
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Least recently used first.
        self._slab_of: tuple[collections.OrderedDict[ExpertId, int], ...] = tuple(collections.OrderedDict() for _ in slabs)
        self._leases: collections.Counter[ExpertId] = collections.Counter()
        self._loading: set[ExpertId] = set()
        self._held: set[ExpertId] = set()
        self._closed = False

    @contextmanager
    def lease(self, expert: ExpertId) -> Iterator[HostLease]:
        """The expert's record, read from the store if it is not here; it is not evicted inside the `with`."""
        geometry = self._geometry(expert)
        pool, slab_of = self.pools[geometry], self._slab_of[geometry]
        with self._lock:
            while expert in self._loading:
                self._changed.wait()
            slab = slab_of.get(expert)
            absent = slab is None
            if slab is None:
                slab = self._room(geometry)
                self._loading.add(expert)
            self._leases[expert] += 1
            slab_of[expert] = slab
            slab_of.move_to_end(expert)
        disk_bytes = 0
        try:
            if absent:
                try:
                    disk_bytes = self._store.read(expert, pool.record(slab))
                except BaseException:
                    with self._lock:
                        del slab_of[expert]
                        pool.give_back(slab)
                    raise
                finally:
                    with self._lock:
                        self._loading.discard(expert)
                        self._changed.notify_all()
            yield HostLease(pool, slab, disk_bytes)
        finally:
            with self._lock:
                self._leases[expert] -= 1
                if not self._leases[expert]:
                    del self._leases[expert]
                self._changed.notify_all()

    def _room(self, geometry: int) -> int:
        """A slab to read into; waits while every record is leased or held."""
        pool, slab_of = self.pools[geometry], self._slab_of[geometry]
        while True:
            slab = pool.take()
            if slab is not None:
                return slab
            for expert in slab_of:
                if not self._leases[expert] and expert not in self._held:
                    return slab_of.pop(expert)
            if self._closed:
                raise ClosedError("the engine was closed while an expert waited for room in host memory")
            self._changed.wait()

    def lease_for_good(self, expert: ExpertId) -> HostLease | None:
        """The record of an expert that is here and never leaves, as nothing does where all of a geometry fit; else None."""
        geometry = self._geometry(expert)
        if not self._holds_all[geometry]:
            return None
        slab = under(self._lock, self._slab, expert)
        return None if slab is None else HostLease(self.pools[geometry], slab, 0)

    def keeps(self, geometry: int) -> bool:
        """Whether what is here of a geometry never leaves: all its experts fit."""
        return self._holds_all[geometry]

    def places_for_good(self, geometry: int, experts: np.ndarray) -> np.ndarray | None:
        """The slabs int64 `[n]` of these experts of a geometry, numbered by layer and id, if all are here and never leave; else
        None."""
        if not self._holds_all[geometry]:
            return None
        places = self._places[geometry]
        if int(places[experts].min(initial=0)) < 0:  # what came since they were looked up
            named = self._named[geometry]
            for flat in experts[places[experts] < 0].tolist():
                slab = under(self._lock, self._slab, named[flat])
                if slab is None:
                    return None
                places[flat] = slab
        return places[experts]

    def has(self, experts: Iterable[ExpertId]) -> list[bool]:
        """For each expert, whether its complete record is here."""
        return under(self._lock, lambda: [self._slab(expert) is not None for expert in experts])

    def hold(self, experts: Iterable[ExpertId]) -> dict[ExpertId, int]:
        """Slabs (in the pool of the expert's geometry) of the experts that are here; not evicted until `let_go`. For one
        thread."""
        return under(self._lock, self._hold, experts)

    def _hold(self, experts: Iterable[ExpertId]) -> dict[ExpertId, int]:
        held = {}
        for expert in experts:
            slab = self._slab(expert)
            if slab is not None:
                self._held.add(expert)
                self._slab_of[self._geometry(expert)].move_to_end(expert)
                held[expert] = slab
        return held

    def let_go(self) -> None:
        """Release all held records. The holding thread, or its successor, may call this at any time."""
        under(self._lock, self._let_go)

    def _let_go(self) -> None:
        self._held.clear()
        self._changed.notify_all()

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """Of its records, per geometry."""
        return tuple(pool.layout for pool in self.pools)

    @property
    def records(self) -> tuple[int, ...]:
        """Of each geometry, how many it has room for."""
        return tuple(pool.capacity for pool in self.pools)

    def go_on_with(self, store: ExpertStore) -> None:
        """Serve again after `close`, with what is here. `store` has the same records as the one before."""
        self._store, self._closed = store, False
        self.let_go()

    def close(self) -> None:
        """Makes every wait for room, now or later, raise ClosedError."""
        under(self._lock, self._close)

    def _close(self) -> None:
        self._closed = True
        self._changed.notify_all()

    def _geometry(self, expert: ExpertId) -> int:
        return self._store.inventory.layers[expert.layer].geometry

    def _slab(self, expert: ExpertId) -> int | None:
        return None if expert in self._loading else self._slab_of[self._geometry(expert)].get(expert)

    def check_integrity(self) -> None:
        with self._lock:
            for pool, slab_of in zip(self.pools, self._slab_of, strict=True):
                pool.check_integrity()
                assert len(slab_of) + pool.free == pool.capacity and len(set(slab_of.values())) == len(slab_of)
            assert all(self._slab(expert) is not None for expert in self._held), "a held record was evicted"
