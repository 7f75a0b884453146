"""The arithmetic of one MoE layer over lent experts: torch's own, or the kernels'.

Both take the experts as they come, keep one result per (token, choice), and add in ascending expert id, so that hits, misses and
the order of arrival never change a bit. `TorchExperts` follows eager exactly (eager.py). `FastExperts` computes straight from
slab records with float32 accumulation; the result is rounded once.
Shapes: hidden `[T, H]`, routing `[T, K]`, factors `[T, K]`; P pairs of a token and one of its experts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from vismoe.formats.codec import Codec
from vismoe.kernels import cpu
from vismoe.models.eager import OneRow, Rows, expert_output
from vismoe.models.families import accumulator_dtype
from vismoe.paging.demand import Demand
from vismoe.paging.lent import Lent
from vismoe.types import ExpertInventory

__all__ = ["FastExperts", "LayerWork", "TorchExperts"]

PAIRS_PER_CALL = 1024  # of a prefill: bounds what the kernels keep between an expert's two products


class LayerWork(Protocol):
    """One MoE layer of one forward pass, ready to be computed."""

    experts: list[int]  # ascending
    tokens: list[int]  # how many of them chose each

    def run(self, demand: Demand, in_order: bool) -> torch.Tensor:
        """The layer's output `[T, H]` in the hidden states' type. `in_order`: add while experts arrive, in ascending id."""
        ...


class Arithmetic(Protocol):
    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> LayerWork: ...


class TorchExperts:
    """Eager's arithmetic; integer formats are restored to the model's type, one expert at a time."""

    def __init__(
        self, inventory: ExpertInventory, codecs: Sequence[Codec], device: torch.device, host: "FastExperts | None" = None
    ):
        self.inventory, self.codecs, self.host = inventory, codecs, host
        self._restored = [
            torch.empty(0 if codec.format.exact else codec.raw.record_bytes, dtype=torch.uint8, device=device) for codec in codecs
        ]

    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> "_TorchWork":
        return _TorchWork(self, layer, module, routing, hidden, factors)

    def weights(self, layer: int, lent: Lent) -> dict[str, torch.Tensor]:
        """The expert in the model's type and orientation, until the next one is asked for."""
        geometry = self.inventory.layers[layer].geometry
        codec, buffer = self.codecs[geometry], self._restored[geometry]
        if codec.format.exact:
            return lent.weights
        codec.restore(_record(lent, codec.slab.record_bytes), buffer)
        return codec.raw.views(buffer)


def _record(lent: Lent, record_bytes: int) -> torch.Tensor:
    """The whole record, uint8 `[record_bytes]`, around its first section."""
    first = next(iter(lent.weights.values()))
    at_bytes = first.storage_offset() * first.element_size()
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage(), at_bytes, (record_bytes,), (1,))


class _TorchWork:
    def __init__(
        self, parent: TorchExperts, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor
    ):
        self._parent, self._layer, self._module, self._hidden = parent, layer, module, hidden
        self._accumulator = accumulator_dtype(module, hidden, factors)
        self._rows: Rows | OneRow = Rows.of(routing, module.num_experts, hidden, factors)
        self._on_host = None
        if parent.host is not None:
            self._on_host = parent.host.begin(layer, module, routing, hidden.cpu(), factors.cpu())
        self.experts, self.tokens = self._rows.experts, self._rows.tokens

    def run(self, demand: Demand, in_order: bool) -> torch.Tensor:
        out = torch.zeros_like(self._hidden, dtype=self._accumulator)
        parts: dict[int, torch.Tensor] = {}
        for group in demand.groups(in_order):
            for lent in group:
                if in_order:
                    self._rows.add(out, lent.expert, self._part(lent))
                else:
                    parts[lent.expert] = self._part(lent)
        for expert in parts and self.experts:
            self._rows.add(out, expert, parts[expert])
        return out.to(self._hidden.dtype)

    def _part(self, lent: Lent) -> torch.Tensor:
        """One expert's rows `[n, H]`, weighed."""
        if lent.on_host and self._on_host is not None:
            return self._on_host.part(lent).to(self._hidden)
        rows = self._rows
        output = expert_output(self._module, self._parent.weights(self._layer, lent), rows.inputs(lent.expert))
        return rows.weigh(lent.expert, output)


class FastExperts:
    """The CPU kernels. One call computes all experts of a layer that are there."""

    def __init__(self, inventory: ExpertInventory, kernels: Sequence[cpu.ExpertKernel]):
        self.inventory, self.kernels = inventory, kernels

    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> "_FastWork":
        kernel = self.kernels[self.inventory.layers[layer].geometry]
        return _FastWork(kernel, module.num_experts, routing, hidden, factors)


class _FastWork:
    """P pairs sorted by expert, then token: pairs `starts[i] .. starts[i + 1]` belong to `experts[i]`."""

    def __init__(
        self, kernel: cpu.ExpertKernel, num_experts: int, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor
    ):
        self._kernel, self._type = kernel, hidden.dtype
        self._hidden = hidden.contiguous()
        flat = routing.ravel()
        order = np.argsort(flat, kind="stable")
        ids = flat[order]
        end = int(np.searchsorted(ids, num_experts))  # ids from there on are sentinels, with nothing to compute
        begins = np.ones(end, dtype=bool)
        np.not_equal(ids[1:end], ids[: max(end - 1, 0)], out=begins[1:])
        starts = np.flatnonzero(begins)
        self.experts: list[int] = ids[starts].tolist()
        self._starts = np.full(len(starts) + 1, end, dtype=np.int32)
        self._starts[:-1] = starts
        self.tokens: list[int] = np.diff(self._starts).tolist()
        self._tokens = (order[:end] // routing.shape[1]).astype(np.int32)
        self._factors = factors.float().numpy().ravel()[order[:end]]
        self._index = {expert: i for i, expert in enumerate(self.experts)}
        self._all = np.arange(end)

    def run(self, demand: Demand, in_order: bool) -> torch.Tensor:
        return self._added(demand) if in_order else self._combined(demand)

    def part(self, lent: Lent) -> torch.Tensor:
        """One expert's rows `[n, H]` float32, weighed."""
        address = np.array([next(iter(lent.weights.values())).data_ptr()])  # a record begins with its first section
        return self._parts([lent.expert], address, self._pairs([lent.expert]))

    def _added(self, demand: Demand) -> torch.Tensor:
        out = torch.zeros(self._hidden.shape, dtype=torch.float32)
        for group in demand.groups(in_order=True):
            for run in self._bounded(group.experts):
                experts = group.experts[run]
                self._kernel.add(*self._call(experts, group.addresses[run], self._pairs(experts)), self._hidden, out)
        return out.to(self._type)

    def _combined(self, demand: Demand) -> torch.Tensor:
        results, pairs = [], []
        for group in demand.groups(in_order=False):
            pairs.append(self._pairs(group.experts))
            results.append(self._parts(group.experts, group.addresses, pairs[-1]))
        if not results:  # every choice was a sentinel
            return torch.zeros(self._hidden.shape, dtype=self._type)
        parts = results[0]
        if len(results) > 1:
            parts = torch.cat(results)[torch.from_numpy(np.argsort(np.concatenate(pairs)))]
        out = torch.empty(self._hidden.shape, dtype=self._type)
        cpu.combine(parts, self._tokens, out)
        return out

    def _parts(self, experts: list[int], addresses: np.ndarray, pairs: np.ndarray) -> torch.Tensor:
        out = torch.empty(len(pairs), self._hidden.shape[1], dtype=torch.float32)
        self._kernel.parts(*self._call(experts, addresses, pairs), self._hidden, out)
        return out

    def _pairs(self, experts: list[int]) -> np.ndarray:
        """The pairs of some experts, expert by expert."""
        if len(experts) == len(self.experts):  # all at once, so in ascending order
            return self._all
        at = [self._index[expert] for expert in experts]
        return np.concatenate([self._all[self._starts[i] : self._starts[i + 1]] for i in at])

    def _call(
        self, experts: list[int], addresses: np.ndarray, pairs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(record addresses `[n]`, starts `[n + 1]`, tokens, factors) of some experts."""
        records = addresses.view(np.uint64)
        if pairs is self._all:
            return records, self._starts, self._tokens, self._factors
        at = np.array([self._index[expert] for expert in experts])
        starts = np.concatenate([[0], np.cumsum(self._starts[at + 1] - self._starts[at])]).astype(np.int32)
        return records, starts, self._tokens[pairs], self._factors[pairs]

    def _bounded(self, experts: list[int]) -> Iterator[slice]:
        """Runs of at most PAIRS_PER_CALL pairs, or of one expert."""
        begin = pairs = 0
        for at, expert in enumerate(experts):
            i = self._index[expert]
            count = int(self._starts[i + 1] - self._starts[i])
            if at > begin and pairs + count > PAIRS_PER_CALL:
                yield slice(begin, at)
                begin, pairs = at, 0
            pairs += count
        yield slice(begin, len(experts))
