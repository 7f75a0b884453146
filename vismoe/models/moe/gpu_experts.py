"""The arithmetic of one MoE layer by the GPU kernels: a few launches per layer, whatever the number of experts.

Experts that are resident are launched at once, others as they arrive. Each pair of a token and an expert has a result of its own,
in float32; they are added in ascending expert id and rounded once. So hits, misses and the order of arrival never change a bit.
Where slabs hold encoded records, those of the experts that are computed next are decoded into a ring of raw ones, and read there.
Shapes: hidden `[T, H]`, routing and factors `[T, K]`; P pairs, sorted by expert.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from vismoe.errors import UnsupportedModelError
from vismoe.kernels import cpu
from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.gpu.lossless import DecodingRing
from vismoe.models.moe.compute import FastExperts, FastWork
from vismoe.paging.lent import Group, Lending
from vismoe.paging.pager import Pager
from vismoe.types import ExpertInventory

PAIRS_PER_CALL = 4096  # of a prompt: bounds the results that are kept before they are added


def refuse_type(kernel: gpu.GpuKernel, hidden: torch.Tensor) -> None:
    """Raises UnsupportedModelError for hidden states of another type than the kernel reads, as autocast makes them."""
    if hidden.dtype != kernel.dtype:
        raise UnsupportedModelError(
            f"the experts got {hidden.dtype}, and their GPU kernels were made for {kernel.dtype}. "
            "Fix: run the model without torch.autocast, or load it with kernels='torch' (--kernels torch)"
        )


class Parts(NamedTuple):
    """On the device: what a layer's pairs add, float32 `[P, H]`, in the order of the choices; and what `gpu.arrange` made."""

    parts: torch.Tensor
    tiles: torch.Tensor
    sums: torch.Tensor


def _on(device: torch.device) -> Any:
    """Within, launches are for this device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class GpuExperts:
    """`kernels`: per geometry, by precision. `host` computes what is lent from host memory. `ring`: given where slabs of some
    geometries hold encoded records; their kernels read raw ones."""

    def __init__(
        self,
        inventory: ExpertInventory,
        kernels: Sequence[Sequence[gpu.GpuKernel]],
        host: FastExperts | None = None,
        ring: DecodingRing | None = None,
    ):
        assert ring is None or all(len(of) == 1 for of in kernels), "experts of a pair of formats are not decoded here"
        self.inventory, self.kernels, self.host, self._ring = inventory, kernels, host, ring
        self._lying: list[np.ndarray] = []  # by geometry, the addresses of all experts when all were resident
        self._tables: list[torch.Tensor] = []  # by layer, the same on the device
        self._places: dict[torch.device, torch.Tensor] = {}  # of pairs in the order of the choices

    def all_resident(self, pager: Pager, device: torch.device) -> bool:
        """Whether a pass can go without the pager: every expert is in a slab, for good."""
        lying = pager.addresses()
        if lying is None:
            return False
        if not self._lying or not all(map(np.array_equal, lying, self._lying)):
            taken, places = [0] * len(lying), []
            for layer in self.inventory.layers:
                first = taken[layer.geometry]
                taken[layer.geometry] += layer.num_experts
                places.append(lying[layer.geometry][first : taken[layer.geometry]])
            self._tables, self._lying = gpu.upload(places, device), lying
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # later passes may be on other streams
        return True

    def ring_of(self, layer: int) -> DecodingRing | None:
        """Where the experts of a layer are decoded before they are computed; None: their slabs hold them decoded."""
        ring = self._ring
        return ring if ring is not None and ring.decodes(self.inventory.layers[layer].geometry) else None

    def one_format(self, layer: int) -> bool:
        """Whether all experts of a layer are in one format."""
        return len(self.kernels[self.inventory.layers[layer].geometry]) == 1

    def few_enough(self, layer: int, index: torch.Tensor) -> bool:
        """Whether there are few enough pairs (token, choice) to give each a tile of its own, which reads its expert by itself,
        and a slot, where experts are decoded first."""
        pairs, ring = index.numel(), self.ring_of(layer)
        most = gpu.MOST_ARRANGED if ring is None else min(gpu.MOST_ARRANGED, ring.slots)
        return pairs <= min(most, max(index.shape[1], self.inventory.layers[layer].num_experts))

    def of_residents(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """A layer's output `[T, H]` after `all_resident`, where `few_enough`; see `of_table`."""
        return self.of_table(layer, hidden, index, factors, self._tables[layer])

    def of_table(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """A layer's output `[T, H]`, where `few_enough`, from experts at the addresses of table int64 `[E]`, on the device: four
        launches, or five where experts are decoded first, and the host reads nothing.

        The bits are those of `begin` and `run`. index `[T, K]` int64.
        """
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self.sum_of(self.parts_of_table(layer, hidden, index, factors, table), out)
        return out

    def parts_of_table(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor, table: torch.Tensor
    ) -> "Parts":
        """What `of_table` adds up. Where `table` has the negative of another expert's address, nothing is computed."""
        geometry, experts = self.inventory.layers[layer].geometry, self.inventory.layers[layer].num_experts
        (kernel,), ring = self.kernels[geometry], self.ring_of(layer)
        hidden, factors = hidden.contiguous(), factors.contiguous()
        pairs, device = index.numel(), hidden.device
        refuse_type(kernel, hidden)
        parts = torch.empty(pairs, kernel.hidden, dtype=torch.float32, device=device)
        activated = torch.empty(pairs, kernel.intermediate, dtype=hidden.dtype, device=device)
        with _on(device):
            slots = None if ring is None else ring.addresses_there
            tiles, sums = gpu.arrange(index.contiguous(), table, experts, slots)
            if ring is not None:
                ring.decode(geometry, tiles[3])
            kernel.parts(hidden, self.in_order(device), factors, tiles, gpu.ONE_TOKEN, activated, parts)
        return Parts(parts, tiles, sums)

    def sum_of(self, parts: "Parts", out: torch.Tensor, below: torch.Tensor | None = None) -> None:
        """Their sums into out `[T, H]`. below float32 `[P, H]`: those that were not computed there."""
        with _on(out.device):
            gpu.combine(parts.parts, parts.sums, len(out), out, below=None if below is None else (below, parts.tiles))

    def on_host(self, layer: int) -> cpu.ExpertKernel | None:
        """What computes a layer's experts in host memory, where they lie in one format; None: nothing does."""
        if self.host is None or not self.one_format(layer):
            return None
        return self.host.kernels[self.inventory.layers[layer].geometry]

    def in_order(self, device: torch.device) -> torch.Tensor:
        """Places int32 of pairs that lie in the order of the choices. Made by the first call, which no graph may hold: what a
        graph makes is there when that graph has been replayed, and the graph of another layer's experts may be the first."""
        if device not in self._places:
            self._places[device] = torch.arange(gpu.MOST_ARRANGED, dtype=torch.int32, device=device)
        return self._places[device]

    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> "GpuWork":
        return GpuWork(self, layer, module, routing, hidden, factors)


class GpuWork:
    """The experts of one layer of a pass; made by `begin`."""

    def __init__(
        self, parent: GpuExperts, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor
    ):
        self._parent, self._layer, self._module, self._routing = parent, layer, module, routing
        self._geometry = parent.inventory.layers[layer].geometry
        self._kernels, self._ring = parent.kernels[self._geometry], parent.ring_of(layer)
        refuse_type(self._kernels[0], hidden)
        self._hidden, self._factors = hidden.contiguous(), factors.contiguous()
        self.experts, starts, self._tokens, self._places = cpu.route(routing, module.num_experts)
        self._starts = starts.astype(np.int64)
        self._rows = gpu.tile_rows(int(np.diff(self._starts).max(initial=0)))
        self.whole: Callable[[Group], torch.Tensor | None] | None = None  # computes a group that has all experts of the pass

    @property
    def tokens(self) -> list[int]:
        """Number of tokens that chose each of `experts`, which ascend."""
        return np.diff(self._starts).tolist()

    @cached_property
    def _index(self) -> dict[int, int]:
        return {expert: i for i, expert in enumerate(self.experts)}

    @cached_property
    def _below(self) -> FastWork:
        """The same layer for the CPU kernels; created only when an expert is lent from host memory."""
        host = self._parent.host
        assert host is not None, "experts are lent from host memory only if there are kernels"
        return host.begin(self._layer, self._module, self._routing, self._hidden.cpu(), self._factors.cpu())

    def run(self, lease: Lending, in_order: bool) -> torch.Tensor:
        """The layer's output `[T, H]` in the hidden states' type. `in_order`: add while experts arrive, in ascending id."""
        with _on(self._hidden.device):
            if lease.computes_on_host:
                _ = self._below  # copies its inputs from the device now, before work is queued there
            return self._added(lease) if in_order else self._combined(lease)

    def _combined(self, lease: Lending) -> torch.Tensor:
        hidden, pairs = self._hidden, len(self._tokens)
        out, count = torch.empty_like(hidden) if pairs else torch.zeros_like(hidden), 0
        for group in lease.groups(in_order=False):
            alone = len(group) == len(self.experts) and not group.on_host and group.precisions is None
            if self.whole is not None and alone and (made := self.whole(group)) is not None:
                out = made
                continue
            if not count:
                count, sums = gpu.sums_of(self._tokens, len(hidden))
                places, sums_there = gpu.upload([self._places, sums], hidden.device)
                parts, activated = self._room(pairs)
            at = np.array([self._index[expert] for expert in group.experts])
            if group.on_host:
                rows = np.concatenate([np.arange(self._starts[i], self._starts[i + 1]) for i in at])
                parts.index_copy_(0, *(self._sent(rows) for rows in (torch.from_numpy(rows), self._below.parts_of(group))))
            else:
                self._compute(group, at, slice(0, pairs), places, parts, activated)
        if count:
            gpu.combine(parts, sums_there, count, out)
        return out

    def _added(self, lease: Lending) -> torch.Tensor:
        hidden, pairs = self._hidden, len(self._tokens)
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        parts, activated = self._room(min(pairs, PAIRS_PER_CALL))
        for group in lease.groups(in_order=True):
            for some in group.one_by_one() if group.on_host else (group,):  # what host memory computes is held whole
                self._add(some, parts, activated, out)
        return out.to(hidden.dtype)

    def _add(self, group: Group, parts: torch.Tensor, activated: torch.Tensor, out: torch.Tensor) -> None:
        """Add the results of a group to out float32 `[T, H]`, as many at a time as `parts` has rows."""
        first = self._index[group.experts[0]]
        at = np.arange(first, first + len(group))  # in order, a group is a run of the experts
        begin, end = int(self._starts[first]), int(self._starts[at[-1] + 1])
        below = self._below.parts_of(group) if group.on_host else None
        for start in range(begin, end, PAIRS_PER_CALL):
            some = slice(start, min(start + PAIRS_PER_CALL, end))
            count, sums = gpu.sums_of(self._tokens[some])
            places, sums_there = gpu.upload([self._places[some], sums], out.device)
            if below is not None:
                parts[: some.stop - start] = self._sent(below[start - begin : some.stop - begin])
            else:
                self._compute(group, at, some, places, parts, activated)
            gpu.combine(parts, sums_there, count, out, adding=True)

    def _room(self, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 `[P, H]` for results, `[P, I]` for what is between an expert's two products."""
        hidden, kernel = self._hidden, self._kernels[0]
        parts = torch.empty(pairs, kernel.hidden, dtype=torch.float32, device=hidden.device)
        return parts, torch.empty(pairs, kernel.intermediate, dtype=hidden.dtype, device=hidden.device)

    def _compute(
        self, group: Group, at: np.ndarray, pairs: slice, places: torch.Tensor, parts: torch.Tensor, activated: torch.Tensor
    ) -> None:
        """These pairs of a group's experts, into rows of `parts` from 0; `places` are theirs. `at`: the experts' indices."""
        starts, ends = (np.clip(self._starts[i], pairs.start, pairs.stop) - pairs.start for i in (at, at + 1))
        if self._ring is not None:
            for records, there in self._runs(self._ring, group.addresses, starts, ends):
                self._ring.decode(self._geometry, records)
                self._kernels[0].parts(self._hidden, places, self._factors, there, self._rows, activated, parts)
            return
        precisions = np.zeros(len(at), np.uint8) if group.precisions is None else group.precisions
        for precision, kernel in enumerate(self._kernels):
            mine = precisions == precision
            tiles = gpu.tiles_of(group.addresses[mine], starts[mine], ends[mine], self._rows)
            if tiles.shape[1]:
                (there,) = gpu.upload([tiles], parts.device)
                kernel.parts(self._hidden, places, self._factors, there, self._rows, activated, parts)

    def _runs(
        self, ring: DecodingRing, addresses: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(addresses of encoded records, tiles that read what these were decoded to) on the device, of as many experts each as
        there are slots."""
        busy = np.flatnonzero(ends > starts)  # a part of a prompt's pairs may have none of some experts
        runs = [busy[first : first + ring.slots] for first in range(0, len(busy), ring.slots)]
        tiles = [gpu.tiles_of(ring.addresses[: len(run)], starts[run], ends[run], self._rows) for run in runs]
        there = gpu.upload([*(addresses[run] for run in runs), *tiles], self._hidden.device) if runs else []
        return list(zip(there[: len(runs)], there[len(runs) :], strict=True))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, on the device, by a copy that the host does not wait for."""
        device = self._hidden.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
