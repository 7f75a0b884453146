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
    """What the CPU computes of a layer: of hidden `[1, H]` and factors `[1, K]`, the rows float32 `[K, H]`, by choice; `there`
    they are on the device. `before` computes the others, `parts`, and `behind` adds all up."""

    kernel: cpu.ExpertKernel
    hidden: torch.Tensor
    factors: torch.Tensor
    rows: torch.Tensor
    there: torch.Tensor
    made: torch.Tensor  # rows, expert by expert
    before: Graph | None = None
    behind: Graph | None = None
    parts: Parts | None = None  # a graph's own memory

    @classmethod
    def of(cls, kernel: cpu.ExpertKernel, hidden: torch.Tensor, factors: torch.Tensor, device: torch.device) -> "OnHost":
        shape = (factors.numel(), kernel.hidden)
        there = torch.zeros(shape, dtype=torch.float32, device=device)
        return cls(kernel, hidden, factors, page_locked_like(there), there, torch.empty(shape, dtype=torch.float32))

    def compute(self, group: Group, ids: np.ndarray) -> None:
        """The layer's output; the CPU computes this group's experts, of the choices int64 `[K]`."""
        assert self.before is not None and self.behind is not None
        self.before.replay()
        began_s, count = time.perf_counter(), len(group)
        at = [int(np.flatnonzero(ids == expert)[0]) for expert in group.experts]
        factors = self.factors.reshape(-1).float().numpy()[at]
        starts, tokens = np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32)
        self.kernel.parts(group.addresses.view(np.uint64), starts, tokens, factors, self.hidden, self.made[:count])
        self.rows.numpy()[at] = self.made.numpy()[:count]
        self.there.copy_(self.rows, non_blocking=True)
        group.spans = [(began_s, time.perf_counter())]
        self.behind.replay()


@dataclass(eq=False)
class ExpertsCall:
    """A layer's experts: of what the graph before has left, into what the one behind reads.

    `graph` computes them from records at the addresses of `table` int64 `[E]`, which `told` of the host has; None: launches do,
    because they have two formats, or because what the graph first computed had other bits than what launches did. `ids`, of the
    host, are the choices.
    """

    paged: PagedLayer
    module: Any
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, index, factors
    out: torch.Tensor
    graph: Graph | None
    table: torch.Tensor
    told: torch.Tensor
    ids: torch.Tensor
    on_host: OnHost | None  # None: nothing is computed there
    trusted: bool = False  # it was compared
    made: list[torch.Tensor] = field(default_factory=list)  # to be compared

    def compute(self) -> None:
        """Bring the experts in, and compute them by the graph if they come together."""
        if self.trusted and self.graph is not None:
            by_cpu = self.on_host is not None
            if self.paged.at_once(self.ids.numel(), self._chosen, self.replayed, by_cpu) is not None:
                return
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

    def _chosen(self) -> np.ndarray:
        """The choices of the pass under way, int64 `[K]`; all that it left in host memory is there."""
        if self.out.is_cuda:
            torch.cuda.current_stream(self.out.device).synchronize()
        return self.ids.numpy().reshape(-1)

    def whole(self, group: Group) -> torch.Tensor | None:
        """The output, of a group that has all experts of the pass; None: launches must compute it."""
        out = self.replayed(group)
        if self.trusted:
            return out
        self.made.append(out.clone())
        if (apart := self.on_host) is not None and apart.before is not None and apart.behind is not None:
            apart.before.replay()
            apart.behind.replay()
            self.made.append(out.clone())
        return None

    def replayed(self, group: Group, below: Group | None = None) -> torch.Tensor:
        """The output, by the graph; by two where `below` is computed on the host."""
        assert self.graph is not None
        told, addresses = self.told.numpy(), group.addresses
        told[group.experts] = addresses  # the copy of the pass before has ended: its routing was read since
        if below is not None:
            told[below.experts] = -addresses[0]
        self.table.copy_(self.told, non_blocking=True)
        if below is None:
            self.graph.replay()
        else:
            assert self.on_host is not None
            self.on_host.compute(below, self.ids.numpy().reshape(-1))
        return self.out
