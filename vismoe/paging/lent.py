"""What the pager hands out: experts that can be computed now, by their weights or by the addresses of their records."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from vismoe.kernels.read import Arrival
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.types import HIGH

Made = TypeVar("Made", covariant=True)


class Lent(NamedTuple):
    """One expert of a group."""

    expert: int
    weights: dict[str, torch.Tensor]  # the record's sections
    on_host: bool  # it lies in the host tier, below the device that the others lie on
    precision: int = HIGH  # which format of a pair it is in


class Group:
    """Experts of one layer that lie in the slabs of one geometry, good until the next group is asked for. Iterate for their
    weights. `precision`: which format of a pair all of a pool of one format are in; None: there is no pair, or the pool knows."""

    __slots__ = ("_pool", "_precision", "coming", "experts", "on_host", "slabs", "spans", "waited_s")

    def __init__(
        self, experts: list[int], pool: SlabPool | Slabs, slabs: np.ndarray, on_host: bool = False, precision: int | None = None
    ):
        self.experts, self._pool, self.slabs, self.on_host, self._precision = experts, pool, slabs, on_host, precision
        self.coming: Sequence[Arrival] = ()  # what is read while the others are computed
        self.spans: list[tuple[float, float]] = []  # when such a group, or one on the host, was computed, in parts
        self.waited_s = 0.0  # for it, while nothing was there to compute

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[Lent]:
        precisions = [HIGH] * len(self.experts) if self.precisions is None else self.precisions.tolist()
        for expert, slab, precision in zip(self.experts, self.slabs.tolist(), precisions):
            yield Lent(expert, self._pool.weights(slab), self.on_host, precision)

    def one_by_one(self) -> "Iterator[Group]":
        """Groups of one expert each."""
        for i, expert in enumerate(self.experts):
            yield Group([expert], self._pool, self.slabs[i : i + 1], self.on_host, self._precision)

    @property
    def computed_s(self) -> float:
        """Seconds of its `spans`."""
        return sum(ended_s - began_s for began_s, ended_s in self.spans)

    @property
    def nbytes(self) -> int:
        """Of all its records."""
        return sum(map(self._pool.bytes_of, self.slabs.tolist()))

    @property
    def addresses(self) -> np.ndarray:
        """int64 `[n]`: where each expert's record begins."""
        return self._pool.addresses[self.slabs]

    @property
    def precisions(self) -> np.ndarray | None:
        """uint8 `[n]`: which format of the pair each expert is in; None where there is one format."""
        if self._precision is not None:
            return np.full(len(self.slabs), self._precision, np.uint8)
        return None if self._pool.precision is None else self._pool.precision[self.slabs]


class Computation(Protocol[Made]):
    """Of one token's experts of a layer, in one step (`Pager.at_once`)."""

    def begin_on_host(self, below: Group) -> None:
        """The CPU begins with these, from host memory. After `end` their `spans` say when it did, and ended."""

    def begin(self, group: Group) -> None:
        """Queue what the device computes: the others."""

    def end(self) -> Made:
        """The result, once the CPU has ended."""

    def abandon(self) -> None:
        """There will be no result: the CPU has ended when this returns. Whether or not it had begun."""


class Lending(Protocol):
    """The experts of one layer of a pass, as a backend gets them to compute: the pager's lease, or all of them at once."""

    @property
    def computes_on_host(self) -> bool:
        """Some of them will be lent from the host tier."""

    def groups(self, in_order: bool) -> Iterator[Group]:
        """What can be computed now, until every expert was; by ascending id if `in_order`."""
