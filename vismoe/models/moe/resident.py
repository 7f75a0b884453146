"""The short way of a decode pass through layers whose experts are all resident: one native call and no demand.

Counters, the page table and the results come out as those of a demand (experts.py), which every layer goes back to that misses
something. `of` makes it for what it fits: the CPU kernels, slabs of one format, no tier below.
"""

import time
from collections.abc import Callable, Sequence

import torch

from vismoe.kernels.decoder_layer import Asked, DecoderLayer, NewTokens
from vismoe.kernels.resident import LayerArrays, ResidentLayer
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.page_table import RESIDENT
from vismoe.paging.pager import Computed, Pager
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
        resident = self._layers[layer]
        if torch.is_grad_enabled() or not resident.takes(hidden, index, factors):
            return None

        def compute(weight: float, tick: int) -> tuple[Computed | None, float, float]:
            began_s = time.perf_counter()
            made = resident.run(hidden, index, factors, weight, tick)
            compute_s = time.perf_counter() - began_s
            return None if made is None else (made[0], resident.demanded(made[1])), compute_s, 0.0

        return self._counted(phase, layer, index.numel(), compute)

    def run_layer(
        self,
        phase: Phase,
        layer: int,
        native: DecoderLayer,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        new: NewTokens,
    ) -> tuple[torch.Tensor | None, bool]:
        """(the output `[n, 1, H]` of the whole decoder layer, whether `native` has computed its first half); None for an output:
        the experts must be demanded."""
        resident, ran = self._layers[layer], False

        def compute(weight: float, tick: int) -> tuple[Computed | None, float, float]:
            nonlocal ran
            ran = True
            made = native.run(hidden, *angles, new, Asked(resident, weight, tick))
            first_half_s, experts_s = native.spent_s
            return None if made is None else (made[0], resident.demanded(made[1])), experts_s, first_half_s

        assert native.router is not None
        return self._counted(phase, layer, hidden.shape[0] * native.router.chosen, compute), ran

    def _counted(
        self, phase: Phase, layer: int, choices: int, compute: Callable[[float, int], tuple[Computed | None, float, float]]
    ) -> torch.Tensor | None:
        """What `compute` makes without a demand. It also returns the seconds of the experts, and of what is no part of them."""
        pager, spent_s = self._pager, (0.0, 0.0)

        def timed(weight: float, tick: int) -> Computed | None:
            nonlocal spent_s
            made, *seconds = compute(weight, tick)
            spent_s = seconds[0], seconds[1]
            return made

        began_s = time.perf_counter()
        made = pager.without_demand(layer, timed)
        if made is None:
            return None
        (out, experts), (compute_s, other_s) = made, spent_s
        ended_s = time.perf_counter()
        pager.metrics.count_resident(phase, layer, len(experts), choices, compute_s, ended_s - began_s - other_s)
        if pager.timeline is not None:
            pager.timeline.span("compute", f"layer {layer}", ended_s - compute_s, ended_s, experts=experts)
            pager.timeline.span("layers", f"layer {layer}", began_s + other_s, ended_s, tokens=out.shape[0])
        return out
