"""The short way of a decode pass through layers whose experts are all resident: one native call and no demand.

Counters, the page table and the results come out as those of a demand (experts.py), which every layer goes back to that misses
something. `of` makes it for what it fits: the CPU kernels, slabs of one format, no tier below.
"""

import time
from collections.abc import Sequence

import torch

from vismoe.kernels.resident import LayerArrays, ResidentLayer
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.page_table import RESIDENT
from vismoe.paging.pager import Pager
from vismoe.types import Phase


class ResidentLayers:
    """Made by `of`; the layers of one plan."""

    def __init__(self, pager: Pager, layers: Sequence[ResidentLayer]):
        self._pager, self._layers = pager, layers

    @classmethod
    def of(cls, pager: Pager, backend: TorchExperts | FastExperts | GpuExperts) -> "ResidentLayers | None":
        formats = {table.pool.formats for table in pager.tables}
        if not isinstance(backend, FastExperts) or pager.hosts or pager.ways is not None or formats != {1}:
            return None
        layers = []
        for layer in pager.inventory.layers:
            table = pager.tables[layer.geometry]
            experts = slice(table.base[layer.index], table.base[layer.index] + layer.num_experts)
            arrays = LayerArrays(
                slab_of=table.slab_of[experts],
                state=table.state,
                speculative=table.speculative,
                addresses=table.pool.addresses,
                uses=table.uses[experts],
                worth=table.worth,
                demanded=pager.metrics.demanded[layer.index],
            )
            layers.append(ResidentLayer(backend.kernels[layer.geometry], arrays, RESIDENT, table.order == "lru"))
        return cls(pager, layers)

    def run(
        self, phase: Phase, layer: int, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor | None:
        """The output `[T, H]` of a layer of a decode pass, or of one that drafts; None: its experts must be demanded."""
        resident, pager = self._layers[layer], self._pager
        if torch.is_grad_enabled() or not resident.takes(hidden, index, factors):
            return None
        began_s = time.perf_counter()
        timed: list[float] = []

        def compute(weight: float, tick: int) -> tuple[torch.Tensor, list[int]] | None:
            timed.append(time.perf_counter())
            made = resident.run(hidden, index, factors, weight, tick)
            timed.append(time.perf_counter())
            return None if made is None else (made[0], resident.demanded(made[1]))

        made = pager.without_demand(layer, compute)
        if made is None:
            return None
        out, experts = made
        ended_s = time.perf_counter()
        pager.metrics.count_resident(phase, layer, len(experts), index.numel(), timed[1] - timed[0], ended_s - began_s)
        if pager.timeline is not None:
            pager.timeline.span("compute", f"layer {layer}", *timed, experts=experts)
            pager.timeline.span("layers", f"layer {layer}", began_s, ended_s, tokens=hidden.shape[0])
        return out
