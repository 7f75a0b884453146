"""The slabs of one geometry under one numbering: one pool for each of their formats, the more precise format first.

An expert lies in a slab of either format; code that has a slab's number need not know which. With a single format this is the
same as its pool.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vismoe.pools.pool import SlabPool
from vismoe.types import HIGH


class Slabs:
    """S slabs. `precision` uint8 `[S]` gives the format of each; None if there is only one format."""

    def __init__(self, pools: Sequence[SlabPool]):
        assert len({pool.aliased for pool in pools}) == 1
        self.pools = tuple(pools)
        counts = [pool.capacity for pool in pools]
        self.first = np.cumsum([0, *counts]).tolist()
        self.capacity = self.first[-1]
        self.record_bytes = tuple(pool.layout.record_bytes for pool in pools)
        self.precision = np.repeat(np.arange(len(pools), dtype=np.uint8), counts) if len(pools) > 1 else None
        self.addresses = np.concatenate([pool.addresses for pool in pools])  # int64 [S]
        for pool, start, end in zip(pools, self.first, self.first[1:], strict=False):
            pool.addresses = self.addresses[start:end]  # so that changes by a pool appear here
        self._places = [(pool, slab) for pool in pools for slab in range(pool.capacity)]

    @classmethod
    def of(cls, pools: "SlabPool | Sequence[SlabPool] | Slabs") -> "Slabs":
        if isinstance(pools, Slabs):
            return pools
        return cls((pools,) if isinstance(pools, SlabPool) else pools)

    @property
    def formats(self) -> int:
        """Number of formats."""
        return len(self.pools)

    @property
    def free(self) -> int:
        """Number of free slabs, of all formats."""
        return sum(pool.free for pool in self.pools)

    def free_of(self, precision: int) -> int:
        """Number of free slabs of one format."""
        return self.pools[precision].free

    def capacity_of(self, precision: int) -> int:
        return self.pools[precision].capacity

    def precision_of(self, slab: int) -> int:
        return HIGH if self.precision is None else int(self.precision[slab])

    def bytes_of(self, slab: int) -> int:
        """Bytes of a slab's record."""
        return self.record_bytes[self.precision_of(slab)]

    def take(self, precision: int = HIGH) -> int | None:
        """The index of a free slab of this format, which is then taken; None if all are taken."""
        slab = self.pools[precision].take()
        return None if slab is None else self.first[precision] + slab

    @property
    def gets_pages(self) -> bool:
        """As `SlabPool.gets_pages`, of any of them."""
        return any(pool.gets_pages for pool in self.pools)

    @property
    def has_pages(self) -> bool:
        """As `SlabPool.has_pages`, of all of them."""
        return all(pool.has_pages for pool in self.pools)

    def rest(self, until_s: float) -> None:
        """As `SlabPool.rest`, of all of them."""
        for pool in self.pools:
            pool.rest(until_s)

    @property
    def rests(self) -> bool:
        """As `SlabPool.rests`, of any of them."""
        return any(pool.rests for pool in self.pools)

    def give_back(self, slab: int) -> None:
        pool, place = self._places[slab]
        pool.give_back(place)

    @property
    def elastic(self) -> bool:
        """Slabs of the one format can give their memory back."""
        return self.precision is None and self.pools[HIGH].elastic

    def free_only(self, slabs: Sequence[int]) -> None:
        """Make exactly these slabs free; repairs the pools after an interrupt."""
        for pool, start, end in zip(self.pools, self.first, self.first[1:], strict=False):
            pool.free_only([slab - start for slab in slabs if start <= slab < end])

    def place(self, slab: int, begins: Callable[[], int]) -> None:
        """As `SlabPool.place`, where that slab's layout has room: `begins` gives the byte."""
        pool, place = self._places[slab]
        if pool.layout.room_bytes:
            pool.place(place, begins())

    def record(self, slab: int) -> torch.Tensor:
        """As `SlabPool.record`."""
        pool, place = self._places[slab]
        return pool.record(place)

    def weights(self, slab: int) -> dict[str, torch.Tensor]:
        """Typed views of the slab's sections."""
        pool, place = self._places[slab]
        return pool.weights(place)

    def alias(self, slab: int, other: SlabPool, others_slab: int) -> None:
        """Make a slab of aliased pools show another pool's record."""
        pool, place = self._places[slab]
        pool.alias(place, other, others_slab)

    def check_integrity(self) -> None:
        for pool in self.pools:
            pool.check_integrity()
