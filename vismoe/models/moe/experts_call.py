"""A layer's experts between two graphs of a decoder: brought in, and computed by a graph of their own where they come together.

Where the pager lets the CPU compute some of a token's misses from host memory, two graphs are replayed instead of one: the first
computes the experts on the device, behind their copies; meanwhile the CPU computes the others; the second adds all of them up, in
ascending id as ever. What the CPU reads was left in page-locked memory by the graph of the decoder, in its order.
"""

import logging
import time
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
        """The CPU begins with this group's experts, of the choices int64 `[K]`."""
        began_s, count, wanted = time.perf_counter(), len(group), ids.tolist()
        at = [wanted.index(expert) for expert in group.experts]
        self.experts.records[:count] = group.addresses
        self.experts.factors[:count] = self.factors.float().numpy()[0, at]
        self._begun = at, began_s
        self.experts.begin(count, group)

    def end(self, group: Group) -> None:
        """The layer's output, of what both have computed."""
        at, began_s = self._begun
        ended_s = self.experts.end()
        self.rows.numpy()[at] = self.experts.rows[: len(at)]
        group.spans = [(began_s, ended_s)]
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
    below: Group | None = None  # what the CPU computes of the pass under way

    def compute(self) -> bool:
        """Bring the experts in, and compute them by the graph if they come together; returns whether what follows was replayed
        too: the host has things to note, which the device need not wait for."""
        if self.trusted and self.graph is not None:
            self.below, by_cpu = None, self.on_host is not None
            if self.paged.at_once(self.ids.numel(), self._chosen, self, by_cpu) is not None:
                return True
        self.paged.whole = self.whole if self.graph is not None else None
        self.made.clear()
        try:
            out = self.paged.computed(self.module, *self.given)
        finally:
            self.paged.whole = None
        if self.made:
            self.trusted = all(torch.equal(out, made) for made in self.made)
            if not self.trusted:
                logger.warning("the graph of MoE layer %d's experts has other bits than launches: these serve", self.paged.layer)
                self.graph = None
        if out is not self.out:
            self.out.copy_(out)
        return False

    def _chosen(self) -> np.ndarray:
        """The choices of the pass under way, int64 `[K]`; all that it left in host memory is there."""
        if self.on_host is not None and self.paged.asks_cpu(self.ids.numel()):
            cpu.rouse()  # while the device computes
        if self.out.is_cuda:
            torch.cuda.current_stream(self.out.device).synchronize()
        return self.ids.numpy()[0]

    # -- a Computation; what follows is replayed as soon as it can be
    def begin_on_host(self, below: Group) -> None:
        assert self.on_host is not None
        self.below = below
        self.on_host.begin(below, self.ids.numpy()[0])

    def begin(self, group: Group) -> None:
        assert self.graph is not None
        self._tell(group)
        if self.below is None:
            self.graph.replay()
            self.follows.replay()
        else:
            assert self.on_host is not None
            self.told.numpy()[self.below.experts] = -group.addresses[0]
            self.on_host.before.replay()

    def end(self) -> torch.Tensor:
        if self.below is not None:
            assert self.on_host is not None
            self.on_host.end(self.below)
            self.follows.replay()
        return self.out

    def abandon(self) -> None:
        if self.on_host is not None:
            self.on_host.experts.end()

    def whole(self, group: Group) -> torch.Tensor | None:
        """The output, of a group that has all experts of the pass; None: launches must compute it."""
        assert self.graph is not None
        self._tell(group)
        self.graph.replay()
        if self.trusted:
            return self.out
        self.made.append(self.out.clone())
        if self.on_host is not None:
            self.on_host.before.replay()
            self.on_host.behind.replay()
            self.made.append(self.out.clone())
        return None

    def _tell(self, group: Group) -> None:
        self.told.numpy()[group.experts] = group.addresses  # that of the pass before was read: its routing was read since
