"""The middle tier: records in host memory, page-locked where a GPU will copy from them. Bounded, filled lazily, LRU.

Inclusive of the device tier: what is on the device may also be here. When it is smaller than all experts, the least recently
used record that nobody leases makes room, and the disk is read again.
"""

import collections
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vismoe.memory.pool import SlabPool
from vismoe.store.expert_store import ExpertStore
from vismoe.types import ExpertId


@dataclass(frozen=True)
class HostLease:
    record: torch.Tensor  # uint8 [record_bytes], host memory
    weights: dict[str, torch.Tensor]
    disk_bytes: int  # 0 when it was here already


class HostTier:
    """`slabs[g]` records of each geometry. At least one more than there are threads that lease at the same time."""

    def __init__(self, store: ExpertStore, slabs: tuple[int, ...], page_locked: bool):
        self._store = store
        self.pools = tuple(
            SlabPool(layout, n, page_locked=page_locked) for layout, n in zip(store.inventory.layouts, slabs, strict=True)
        )
        self._changed = threading.Condition()
        self._slab_of: tuple[collections.OrderedDict[ExpertId, int], ...] = tuple(
            collections.OrderedDict() for _ in slabs
        )  # LRU first
        self._leases: collections.Counter[ExpertId] = collections.Counter()
        self._loading: set[ExpertId] = set()

    @contextmanager
    def lease(self, expert: ExpertId) -> Iterator[HostLease]:
        """The expert's record, read from the store when it is not here; stays put inside the `with`."""
        geometry = self._store.inventory.layers[expert.layer].geometry
        pool, slab_of = self.pools[geometry], self._slab_of[geometry]
        with self._changed:
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
                    with self._changed:
                        del slab_of[expert]
                        pool.give_back(slab)
                    raise
                finally:
                    with self._changed:
                        self._loading.discard(expert)
                        self._changed.notify_all()
            yield HostLease(pool.record(slab), pool.weights(slab), disk_bytes)
        finally:
            with self._changed:
                self._leases[expert] -= 1
                if not self._leases[expert]:
                    del self._leases[expert]
                self._changed.notify_all()

    def _room(self, geometry: int) -> int:
        """A slab to read into; waits while every record is leased."""
        pool, slab_of = self.pools[geometry], self._slab_of[geometry]
        while True:
            slab = pool.take()
            if slab is not None:
                return slab
            for expert in slab_of:
                if not self._leases[expert]:
                    return slab_of.pop(expert)
            self._changed.wait()

    def check_integrity(self) -> None:
        with self._changed:
            for pool, slab_of in zip(self.pools, self._slab_of, strict=True):
                pool.check_integrity()
                assert len(slab_of) + pool.free == pool.capacity and len(set(slab_of.values())) == len(slab_of)
