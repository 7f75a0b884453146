"""The short way of a decode pass, or of a short prompt, through layers whose experts are all resident: native calls, no demand.

Counters, the page table and the results come out as those of a demand (experts.py), which every layer goes back to that misses
something. `of` makes it for what it fits: the CPU kernels, slabs of one format, no tier below.
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from vismoe.kernels.decoder_layer import Asked, Cached, CalledLayer, DecoderLayer, Ending, LayerChain, run_layers
from vismoe.kernels.resident import LayerArrays, Outcome, ResidentLayer
from vismoe.models.moe.compute import LONG_PROMPT, FastExperts, TorchExperts
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.page_table import RESIDENT
from vismoe.paging.pager import Computed, Pager, Use
from vismoe.timeline import COMPUTE
from vismoe.types import Phase


class Ran(NamedTuple):
    """A layer that wanted these experts: when it began, when its experts did, when it ended."""

    layer: int
    experts: Sequence[int]
    choices: int  # of all tokens
    began_s: float
    computing_s: float
    ended_s: float


@dataclass(frozen=True, eq=False)
class Chain:
    """Decoder layers that one call computes for the next token of a sequence, as long as its cache notes `mark`."""

    calls: LayerChain
    layers: list[int]  # their numbers among the MoE layers
    choices: np.ndarray  # int64 [layers]: of a token
    of_tables: list[int]  # one layer for each page table
    mark: object = field(default_factory=object)  # what the layers of its cache note


class ResidentLayers:
    """Made by `of`; the layers of one plan."""

    def __init__(self, pager: Pager, layers: Sequence[ResidentLayer]):
        self._pager, self._layers = pager, layers
        self.chains: weakref.WeakKeyDictionary[Any, Chain] = weakref.WeakKeyDictionary()  # by the cache whose layers note them

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
        """The output `[T, H]` of a layer of any pass of few tokens; None: its experts must be demanded."""
        resident, outcome = self._layers[layer], self._outcome(phase, layer, index.numel())
        if torch.is_grad_enabled() or outcome is None or not resident.takes(hidden, index, factors):
            return None

        compute_s = 0.0

        def compute(uses: list[Use]) -> list[Computed]:
            nonlocal compute_s
            began_s = time.perf_counter()
            made = resident.run(hidden, index, factors, *uses[0], outcome)
            compute_s = time.perf_counter() - began_s
            return [] if made is None else [(made[0], resident.demanded(made[1]))]

        began_s = time.perf_counter()
        made = self._pager.without_demand([layer], compute)
        if not made:
            return None
        ((out, experts),) = made
        ended_s = time.perf_counter()
        self._count(phase, [Ran(layer, experts, index.numel(), began_s, ended_s - compute_s, ended_s)], len(hidden))
        return cast(torch.Tensor, out)

    def run_layers(
        self,
        phase: Phase,
        layers: Sequence[tuple[int, DecoderLayer, Sequence[Cached]]],
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[list[torch.Tensor], bool]:
        """(the outputs of the first of these decoder layers, which follow one another, shaped as hidden `[n, 1, H]` or
        `[1, n, H]`, whether the first half of the next one was computed, whose experts must be demanded)."""
        begun, tokens, (first, native, _) = False, hidden.shape[0] * hidden.shape[1], layers[0]
        assert native.router is not None and (len(layers) == 1 or hidden.shape[1] == 1)
        outcome = self._outcome(phase, first, tokens * native.router.chosen)  # of the others, too: single tokens are few
        if outcome is None:
            return [], begun

        def compute(uses: list[Use]) -> list[Computed]:
            nonlocal begun
            called = layers[: len(uses)]
            asked = [Asked(self._layers[layer], *use, outcome) for (layer, _, _), use in zip(called, uses, strict=True)]
            calls = [CalledLayer(native, places, ask) for (_, native, places), ask in zip(called, asked, strict=True)]
            made, begun = run_layers(calls, hidden, *angles)
            return [(out, ask.layer.demanded(count)) for (out, count), ask in zip(made, asked)]

        at_s = time.perf_counter()
        made = self._pager.without_demand([layer for layer, _, _ in layers], compute)
        if not made:
            return [], begun
        spent = [native.spent_s for _, native, _ in layers[: len(made) + begun]]
        next_s = spent.pop()[0] if begun else 0.0
        control_s = (time.perf_counter() - at_s - next_s - sum(map(sum, spent))) / len(made)
        ran = []
        for (layer, native, _), (_, experts), (first_half_s, experts_s) in zip(layers, made, spent):
            assert native.router is not None
            began_s = at_s + first_half_s
            at_s = began_s + control_s + experts_s
            ran.append(Ran(layer, experts, tokens * native.router.chosen, began_s, at_s - experts_s, at_s))
        self._count(phase, ran, tokens)
        return [out for out, _ in made], begun

    def _outcome(self, phase: Phase, layer: int, pairs: int) -> Outcome | None:
        """How so many pairs of a token and an expert are added up in such a pass, as `FastWork` does; None: perhaps by the
        kernels for long prompts, which the one call does not use."""
        if phase is not Phase.PREFILL:
            return Outcome.APART
        long = pairs >= LONG_PROMPT * self._pager.inventory.layers[layer].num_experts
        return None if long else Outcome.ADDED

    def chain(self, layers: Sequence[tuple[int, DecoderLayer]], places: Sequence[Cached]) -> Chain:
        """Of these decoder layers, which follow one another, for tokens of one sequence behind these places."""
        numbers, tables = [layer for layer, _ in layers], self._pager.core.table_of
        of_tables = list({id(tables[layer]): layer for layer in numbers}.values())
        table_of = [[tables[other] for other in of_tables].index(tables[layer]) for layer in numbers]
        return Chain(
            calls=LayerChain([(native, self._layers[layer]) for layer, native in layers], places, table_of),
            layers=numbers,
            choices=np.array([native.router.chosen for _, native in layers if native.router is not None]),
            of_tables=of_tables,
        )

    def may_chain(self, phase: Phase) -> bool:
        """Whether nothing wants to hear of each layer of such a pass."""
        return phase is not Phase.PREFILL and self._pager.timeline is None

    def run_chain(
        self,
        phase: Phase,
        chain: Chain,
        first: int,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        tokens: int,
        ending: Ending | None,
    ) -> tuple[int, bool, torch.Tensor | None]:
        """As `LayerChain.run`; the layers that have an output count as `run_layers` counts them."""
        calls, begun, logits, ending_s = chain.calls, False, None, 0.0

        def compute(weights: list[float], tick: int) -> tuple[list[int], float]:
            nonlocal begun, logits, ending_s
            made, begun, logits = calls.run(first, hidden, angles, tokens, weights, tick, ending)
            ending_s = 0.0 if ending is None else ending.seconds
            found: list[int] = calls.found[first : first + made].tolist()
            return found, time.perf_counter() - ending_s

        began_s, layers = time.perf_counter(), chain.layers[first:]
        wanted = self._pager.in_chain(layers, chain.of_tables, compute)
        made = len(wanted)
        if made:
            spent = calls.seconds[first : first + made]
            next_s = calls.seconds[first + made, 0] if begun else 0.0
            control_s = (time.perf_counter() - began_s - next_s - ending_s - spent.sum()) / made
            experts_s = spent[:, 1]
            amounts = np.array([np.ones(made), wanted, chain.choices[first : first + made], experts_s, experts_s + control_s])
            self._pager.metrics.count_resident(phase, layers[:made], amounts.T)
        return made, begun, logits

    def _count(self, phase: Phase, ran: Sequence[Ran], tokens: int) -> None:
        pager = self._pager
        amounts = [(1, len(one.experts), one.choices, one.ended_s - one.computing_s, one.ended_s - one.began_s) for one in ran]
        pager.metrics.count_resident(phase, [one.layer for one in ran], amounts)
        if pager.timeline is not None:
            for one in ran:
                name = f"layer {one.layer}"
                pager.timeline.span(COMPUTE, name, one.computing_s, one.ended_s, experts=one.experts)
                pager.timeline.span("layers", name, one.began_s, one.ended_s, tokens=tokens)
