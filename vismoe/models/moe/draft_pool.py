"""A copy of the decoder's experts in a low format, out of which draft passes compute (MoE-SpeQ 3.2: the quantised draft model).

All of it is resident for good: it needs no page table and no demand, and nothing in it is counted by expert. A pass comes out bit
for bit as that of the model loaded in this format.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vismoe.config import format_bytes
from vismoe.kernels.resident import LayerArrays, ResidentLayer
from vismoe.models.family.components import is_vision
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.lent import Group
from vismoe.paging.page_table import RESIDENT
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertInventory, Format, MoELayer


def drafted_layers(inventory: ExpertInventory) -> tuple[MoELayer, ...]:
    """The MoE layers of the decoder: a vision tower sees no drafts."""
    return tuple(layer for layer in inventory.layers if not is_vision(layer.stack))


def first_slabs(inventory: ExpertInventory) -> tuple[dict[int, int], list[int]]:
    """(by MoE layer, the slab of its expert 0, which the others follow; by geometry, the number of slabs)."""
    first, taken = dict[int, int](), [0] * len(inventory.layouts)
    for layer in drafted_layers(inventory):
        first[layer.index] = taken[layer.geometry]
        taken[layer.geometry] += layer.num_experts
    return first, taken


class DraftPool:
    """`pools`: per geometry, filled with the experts of `inventory` as `first_slabs` says. `backend` computes them."""

    def __init__(
        self,
        inventory: ExpertInventory,
        pools: Sequence[SlabPool],
        backend: TorchExperts | FastExperts | GpuExperts,
        format: Format,
        computed_by: str,
    ):
        self.inventory, self.pools, self.format = inventory, tuple(pools), format
        self.about = f"{format}: {format_bytes(self.nbytes)} beside the experts; computed by {computed_by}"
        self._backend, (self._first, _) = backend, first_slabs(inventory)
        self._short: dict[int, ResidentLayer] = {}
        if isinstance(backend, FastExperts):
            arrays = [_ResidentArrays(pool) for pool in pools]
            for layer in drafted_layers(inventory):
                of_layer = arrays[layer.geometry].of_layer(self._first[layer.index], layer.num_experts)
                self._short[layer.index] = ResidentLayer(backend.kernels[layer.geometry], of_layer, RESIDENT, by_tick=False)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def compute(
        self,
        layer: int,
        module: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        factors: torch.Tensor,
        routing: np.ndarray,
    ) -> torch.Tensor:
        """The output `[T, H]` of a layer for hidden `[T, H]`, index and factors `[T, K]`; routing is index int64 on the host."""
        short = self._short.get(layer)
        if short is not None and short.takes(hidden, index, factors):
            made = short.run(hidden, index, factors, weight=0.0, tick=0)
            if made is not None:
                return made[0]
        work = self._backend.begin(layer, module, routing, hidden, factors)
        return work.run(_AllThere(work.experts, self.pools[self.inventory.layers[layer].geometry], self._first[layer]), False)


class _ResidentArrays:
    """What a page table of a pool would say in which everything is resident; the counts are read by nothing."""

    def __init__(self, pool: SlabPool):
        self._pool, slabs = pool, pool.capacity
        self._state, self._speculative = np.full(slabs, RESIDENT, np.uint8), np.zeros(slabs, np.bool_)
        self._worth = np.zeros(slabs)

    def of_layer(self, first: int, experts: int) -> LayerArrays:
        return LayerArrays(
            slab_of=np.arange(first, first + experts, dtype=np.int32),
            state=self._state,
            speculative=self._speculative,
            addresses=self._pool.addresses,
            uses=np.zeros(experts),
            worth=self._worth,
            demanded=np.zeros(experts, np.int64),
        )


class _AllThere:
    """Experts of one layer as one group; `first` is the slab of expert 0."""

    computes_on_host = False

    def __init__(self, experts: list[int], pool: SlabPool, first: int):
        self._experts, self._pool, self._first = experts, pool, first

    def groups(self, in_order: bool) -> Iterator[Group]:
        """All at once: they ascend."""
        if self._experts:
            yield Group(self._experts, self._pool, np.array(self._experts) + self._first)
