"""A layer's experts between two graphs of a decoder: brought in, and computed by a graph of their own where they come together.

Where the pager lets the CPU compute some of a token's misses from host memory, two graphs are replayed instead of one: the first
computes the experts on the device, behind their copies; meanwhile the CPU computes the others; the second adds all of them up, in
ascending id as ever. What the CPU reads was left in page-locked memory by the graph of the decoder, in its order.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from vismoe.kernels import cpu
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.gpu_experts import Parts
from vismoe.paging.lent import Group

logger = logging.getLogger(__name__)


class Graph(Protocol):
    """Launches that are queued again by one call."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


def page_locked_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory that a device reads and writes, for as much as this tensor has."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(eq=False)
class OnHost:
    """What the CPU computes of a layer, and the graphs beside it: `before` computes the others into `parts`, `behind` sends what
    the CPU has computed, rows float32 `[K, H]` in the order of the choices, and adds all up. factors `[1, K]` of the host."""

    experts: cpu.TokenExperts
    factors: torch.Tensor
    rows: torch.Tensor
    before: Graph
    behind: Graph
    parts: Parts  # the memory of `before`
    _begun: tuple[list[int], float] = ([], 0.0)  # which choices, and when

    def begin(self, group: Group, ids: np.ndarray) -> None:
        """The CPU begins with this group's experts, of the choices int64 `[K]`, and the device with the others."""
        began_s, count, wanted = time.perf_counter(), len(group), ids.tolist()
        at = [wanted.index(expert) for expert in group.experts]
        self.experts.records[:count] = group.addresses
        self.experts.factors[:count] = self.factors.float().numpy()[0, at]
        self.experts.begin(count)
        self._begun = at, began_s
        self.before.replay()

    def end(self, group: Group) -> None:
        """The layer's output, of both."""
        at, began_s = self._begun
        self.experts.end()
        self.rows.numpy()[at] = self.experts.rows[: len(at)]
        group.spans = [(began_s, time.perf_counter())]
        self.behind.replay()


@dataclass(eq=False)
class ExpertsCall:
    """A layer's experts: of what the graph before has left, into what the one behind reads.

    `graph` computes them from records whose addresses int64 `[E]` the host has `told`; None: launches do, because they have two
    formats, or because what the graph first computed had other bits than what launches did. `ids`, of the host, are the choices.
    `follows` is the next graph of the decoder.
    """

    paged: PagedLayer
    module: Any
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, index, factors
    out: torch.Tensor
    graph: Graph | None
    told: torch.Tensor
    ids: torch.Tensor
    on_host: OnHost | None  # None: nothing is computed there
    follows: Graph
    trusted: bool = False  # it was compared
    made: list[torch.Tensor] = field(default_factory=list)  # to be compared

    def compute(self) -> bool:
        """Bring the experts in, and compute them by the graph if they come together; returns whether what follows was replayed
        too: the host has things to note, which the device need not wait for."""
        if self.trusted and self.graph is not None:
            by_cpu = self.on_host is not None
            if self.paged.at_once(self.ids.numel(), self._chosen, self._begin, by_cpu) is not None:
                return True
        self.paged.whole = self.whole if self.graph is not None else None
        try:
            out = self.paged.computed(self.module, *self.given)
        finally:
            self.paged.whole = None
        if self.made:
            self.trusted = all(torch.equal(out, made) for made in self.made)
            self.made.clear()
            if not self.trusted:
                logger.warning("the graph of MoE layer %d's experts has other bits than launches: these serve", self.paged.layer)
                self.graph = None
        if out is not self.out:
            self.out.copy_(out)
        return False

    def _chosen(self) -> np.ndarray:
        """The choices of the pass under way, int64 `[K]`; all that it left in host memory is there."""
        if self.on_host is not None:
            cpu.rouse()  # while the device computes
        if self.out.is_cuda:
            torch.cuda.current_stream(self.out.device).synchronize()
        return self.ids.numpy()[0]

    def _begin(self, group: Group, below: Group | None) -> Callable[[], torch.Tensor]:
        """A `Compute`. What follows is replayed as soon as it can be."""
        end = self.begun(group, below)
        if below is not None:
            return functools.partial(self._end, end)
        out = self._end(end)
        return lambda: out

    def _end(self, end: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = end()
        self.follows.replay()
        return out

    def whole(self, group: Group) -> torch.Tensor | None:
        """The output, of a group that has all experts of the pass; None: launches must compute it."""
        out = self.begun(group)()
        if self.trusted:
            return out
        self.made.append(out.clone())
        if self.on_host is not None:
            self.on_host.before.replay()
            self.on_host.behind.replay()
            self.made.append(out.clone())
        return None

    def begun(self, group: Group, below: Group | None = None) -> Callable[[], torch.Tensor]:
        """Begins with the output, by the graph; by two where `below` is computed on the host. What this returns ends it."""
        assert self.graph is not None
        told, addresses = self.told.numpy(), group.addresses
        told[group.experts] = addresses  # the graph of the pass before has read it: its routing was read since
        if below is None:
            self.graph.replay()
            return lambda: self.out
        assert self.on_host is not None
        told[below.experts] = -addresses[0]
        self.on_host.begin(below, self.ids.numpy()[0])
        return functools.partial(self._added, self.on_host, below)

    def _added(self, on_host: OnHost, below: Group) -> torch.Tensor:
        on_host.end(below)
        return self.out
