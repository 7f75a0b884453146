"""What the pager hands out: experts that can be computed now, by their weights or by the addresses of their records."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from vismoe.memory.pool import SlabPool

__all__ = ["Group", "Lent"]


class Lent(NamedTuple):
    """One expert of a group."""

    expert: int
    weights: dict[str, torch.Tensor]  # the record's sections
    on_host: bool  # it lies in the host tier, below the device that the others lie on


class Group:
    """Experts of one layer that lie in the same pool, good until the next group is asked for. Iterate for their weights."""

    __slots__ = ("_pool", "_slabs", "experts", "on_host")

    def __init__(self, experts: list[int], pool: SlabPool, slabs: np.ndarray, on_host: bool = False):
        self.experts, self._pool, self._slabs, self.on_host = experts, pool, slabs, on_host

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[Lent]:
        for expert, slab in zip(self.experts, self._slabs.tolist()):
            yield Lent(expert, self._pool.weights(slab), self.on_host)

    @property
    def addresses(self) -> np.ndarray:
        """int64 `[n]`: where each expert's record begins."""
        return self._pool.addresses[self._slabs]
