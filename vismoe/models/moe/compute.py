"""The arithmetic of one MoE layer over lent experts, by torch or by the CPU kernels.

Both compute experts as they arrive, keep one result per (token, choice), and add in ascending expert id, so that hits, misses and
the order of arrival never change a bit. `TorchExperts` follows eager exactly (eager.py). `FastExperts` computes directly from
slab records with float32 accumulation and rounds the result once.
Shapes: hidden `[T, H]`, routing `[T, K]`, factors `[T, K]`; P pairs of a token and one of its experts.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from vismoe.formats.codec import Codec
from vismoe.kernels import cpu
from vismoe.models.family.families import accumulator_dtype
from vismoe.models.moe.eager import BLOCK_ROWS, ExpertRows, OneRow, block_rows, expert_output
from vismoe.paging.lent import Group, Lending, Lent
from vismoe.types import ExpertInventory

PAIRS_PER_CALL = 1024  # bounds the intermediate results between an expert's two products
LONG_PROMPT = 32  # tokens of each expert, on average, from which the CPU kernels for long prompts are the quicker ones
Call = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Records(NamedTuple):
    """Addresses of experts' records, int64 `[n]`, and their formats, uint8 `[n]` (None: there is one format)."""

    experts: list[int]
    addresses: np.ndarray
    precisions: np.ndarray | None = None


class TorchExperts:
    """Eager's arithmetic; experts in other formats are restored to the model's type, one at a time."""

    def __init__(
        self,
        inventory: ExpertInventory,
        codecs: Sequence[Sequence[Codec]],
        device: torch.device,
        host: "FastExperts | None" = None,
    ):
        """`codecs`: by precision, for each geometry."""
        self.inventory, self.codecs, self.host = inventory, codecs, host
        self._restored = [
            torch.empty(0 if not any(c.restores for c in pair) else pair[0].raw.record_bytes, dtype=torch.uint8, device=device)
            for pair in zip(*codecs, strict=True)
        ]

    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> "_TorchWork":
        return _TorchWork(self, layer, module, routing, hidden, factors)

    def weights(self, layer: int, lent: Lent) -> dict[str, torch.Tensor]:
        """The expert in the model's type and orientation, valid until the next call."""
        geometry = self.inventory.layers[layer].geometry
        codec, buffer = self.codecs[lent.precision][geometry], self._restored[geometry]
        if not codec.restores:
            return lent.weights
        codec.restore(_record(lent, codec.slab.record_bytes), buffer)
        return codec.raw.views(buffer)


def _record(lent: Lent, record_bytes: int) -> torch.Tensor:
    """The whole record, uint8 `[record_bytes]`, that begins with the expert's first section."""
    first = next(iter(lent.weights.values()))
    at_bytes = first.storage_offset() * first.element_size()
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage(), at_bytes, (record_bytes,), (1,))


class _TorchWork:
    def __init__(
        self, parent: TorchExperts, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor
    ):
        self._parent, self._layer, self._module, self._hidden = parent, layer, module, hidden
        self._accumulator = accumulator_dtype(module, hidden, factors)
        self._rows: ExpertRows | OneRow = ExpertRows.of(routing, module.num_experts, hidden, factors)
        self._routing, self._factors = routing, factors
        self.experts = self._rows.experts

    @property
    def tokens(self) -> list[int]:
        """Number of tokens that chose each of `experts`, which ascend."""
        return self._rows.tokens

    def run(self, lease: Lending, in_order: bool) -> torch.Tensor:
        """The layer's output `[T, H]` in the hidden states' type. `in_order`: add while experts arrive, in ascending id."""
        out = torch.zeros_like(self._hidden, dtype=self._accumulator)
        parts: dict[int, torch.Tensor] = {}
        if lease.computes_on_host:
            _ = self._below  # copies its inputs from the device now, before work is queued there
        for group in lease.groups(in_order):
            for lent in group:
                if in_order:
                    self._rows.add(out, lent.expert, self._part(lent))
                else:
                    parts[lent.expert] = self._part(lent)
        for expert in parts and self.experts:
            self._rows.add(out, expert, parts[expert])
        return out.to(self._hidden.dtype)

    @cached_property
    def _below(self) -> "FastWork":
        """The same layer for the kernels, which compute in host memory; created only when an expert is lent from there."""
        host = self._parent.host
        assert host is not None, "experts are lent from host memory only if there are kernels"
        return host.begin(self._layer, self._module, self._routing, self._hidden.cpu(), self._factors.cpu())

    def _part(self, lent: Lent) -> torch.Tensor:
        """One expert's rows `[n, H]`, multiplied by the routing weights."""
        if lent.on_host:
            return self._rows.arranged(lent.expert, self._below.part(lent).to(self._hidden))
        rows = self._rows.inputs(lent.expert)
        most = block_rows(rows.dtype, rows.device.type) if len(rows) > BLOCK_ROWS else None
        output = expert_output(self._module, self._parent.weights(self._layer, lent), rows, most)
        return self._rows.weigh(lent.expert, output)


def cuts(starts: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """(pairs, their experts, where the pairs of each start) of calls with at most PAIRS_PER_CALL pairs."""
    count = int(starts[-1])
    if count <= PAIRS_PER_CALL:
        yield slice(None), slice(None), starts
        return
    for begin in range(0, count, PAIRS_PER_CALL):
        end = min(begin + PAIRS_PER_CALL, count)
        first, last = np.searchsorted(starts, begin, "right") - 1, np.searchsorted(starts, end, "left")
        yield slice(begin, end), slice(first, last), (np.clip(starts[first : last + 1], begin, end) - begin).astype(np.int32)


class FastExperts:
    """The CPU kernels. One call computes all resident experts of a layer."""

    def __init__(self, inventory: ExpertInventory, kernels: Sequence[cpu.ExpertKernel]):
        self.inventory, self.kernels = inventory, kernels

    def begin(self, layer: int, module: Any, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor) -> "FastWork":
        kernel = self.kernels[self.inventory.layers[layer].geometry]
        return FastWork(kernel, module.num_experts, routing, hidden, factors)


class FastWork:
    """P pairs sorted by expert, then token: pairs `starts[i] .. starts[i + 1]` belong to `experts[i]`."""

    def __init__(
        self, kernel: cpu.ExpertKernel, num_experts: int, routing: np.ndarray, hidden: torch.Tensor, factors: torch.Tensor
    ):
        self._kernel, self._type, self._hidden = kernel, hidden.dtype, hidden.contiguous()
        self._average = routing.size / num_experts  # tokens of an expert
        self.sequences = 1  # of the batch, which have equally many tokens: how each is computed depends on its own only
        self.experts, self._starts, self._tokens, places = cpu.route(routing, num_experts)
        self._factors = factors.detach().float().numpy().ravel()[places]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        return np.diff(self._starts).tolist()

    @cached_property
    def _index(self) -> dict[int, int]:
        return {expert: i for i, expert in enumerate(self.experts)}

    def run(self, lease: Lending, in_order: bool) -> torch.Tensor:
        return self._added(lease) if in_order else self._combined(lease)

    def part(self, lent: Lent) -> torch.Tensor:
        """One expert's rows `[n, H]` float32, multiplied by the routing weights."""
        address = np.array([next(iter(lent.weights.values())).data_ptr()])  # a record begins with its first section
        precisions = np.array([lent.precision], np.uint8) if len(self._kernel.formats) > 1 else None
        return self._parts(Records([lent.expert], address, precisions), self._pairs([lent.expert]))

    def parts_of(self, group: Group) -> torch.Tensor:
        """The rows float32 `[n, H]` of a group's experts, expert by expert."""
        records = Records(group.experts, group.addresses, group.precisions)
        return self._parts(records, self._pairs(group.experts), group)

    def _added(self, lease: Lending) -> torch.Tensor:
        out, long = torch.zeros(self._hidden.shape, dtype=torch.float32), self._average / self.sequences >= LONG_PROMPT
        for group in lease.groups(in_order=True):
            records = Records(group.experts, group.addresses, group.precisions)
            for _, call, precisions in self._calls(records, self._pairs(group.experts)):
                self._kernel.parts(*call, self._hidden, out, precisions, adding=True, long=long)
        return out.to(self._type)

    def _combined(self, lease: Lending) -> torch.Tensor:
        parts: torch.Tensor | None = None
        for group in lease.groups(in_order=False):
            made, pairs = self.parts_of(group), self._pairs(group.experts)
            if pairs is None:
                parts = made
                continue
            if parts is None:
                parts = torch.empty(len(self._tokens), self._hidden.shape[1], dtype=torch.float32)
            parts[torch.from_numpy(pairs)] = made
        if parts is None:  # every choice was a sentinel
            return torch.zeros(self._hidden.shape, dtype=self._type)
        out = torch.empty(self._hidden.shape, dtype=self._type)
        cpu.combine(parts, self._tokens, out)
        return out

    def _parts(self, records: Records, pairs: np.ndarray | None, group: Group | None = None) -> torch.Tensor:
        """`group`: whose records they are, of which some may be coming; then all take one call."""
        count = len(self._tokens) if pairs is None else len(pairs)
        out = torch.empty(count, self._hidden.shape[1], dtype=torch.float32)
        for rows, call, precisions in self._calls(records, pairs):
            coming = () if group is None else group.coming
            timed = self._kernel.parts(*call, self._hidden, out[rows], precisions, coming=coming)
            if group is not None:
                group.spans, group.waited_s = timed
        return out

    def _pairs(self, experts: list[int]) -> np.ndarray | None:
        """The pairs of some experts, expert by expert; None for all experts, whose pairs are in ascending order."""
        if len(experts) == len(self.experts):
            return None
        at = [self._index[expert] for expert in experts]
        return np.concatenate([np.arange(self._starts[i], self._starts[i + 1]) for i in at])

    def _calls(self, lying: Records, pairs: np.ndarray | None) -> Iterator[tuple[slice, Call, np.ndarray | None]]:
        """(slice of the pairs, the call for them, the formats of its records); results do not depend on the cuts."""
        records, starts, tokens, factors = self._call(lying.experts, lying.addresses, pairs)
        for rows, experts, cut in cuts(starts):
            precisions = None if lying.precisions is None else lying.precisions[experts]
            yield rows, (records[experts], cut, tokens[rows], factors[rows]), precisions

    def _call(self, experts: list[int], addresses: np.ndarray, pairs: np.ndarray | None) -> Call:
        """(record addresses `[n]`, starts `[n + 1]`, tokens, factors) of some experts."""
        records = addresses.view(np.uint64)
        if pairs is None:
            return records, self._starts, self._tokens, self._factors
        at = np.array([self._index[expert] for expert in experts])
        starts = np.concatenate([[0], np.cumsum(self._starts[at + 1] - self._starts[at])]).astype(np.int32)
        return records, starts, self._tokens[pairs], self._factors[pairs]
