"""Eager's arithmetic: the rows of each expert, one expert's output, and the order of additions.

Outputs are bit-identical to eager experts on fresh memory: one matrix product per expert over exactly the rows that eager uses
(padding rows included), weights in the model's own orientation, additions in ascending expert id, rounded in the output's type.
If blocks give the same bits, more than BLOCK_ROWS rows are computed in blocks, which bounds the memory of an expert that many
tokens choose. Shapes: hidden `[T, H]`, routing `[T, K]`, factors (the routing weights) `[T, K]`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

BLOCK_ROWS = 2048
PROBED = (1024, 64)  # width and outputs of the products that block_rows tries: 20 to 60 ms


class ExpertRows:
    """Which (token, choice) pairs go to which expert, in eager's order: by choice, then by token.

    `experts`: ascending ids; ids from `num_experts` on are sentinels and are not computed.
    """

    def __init__(self, routing: np.ndarray, num_experts: int, hidden: torch.Tensor, factors: torch.Tensor):
        self._hidden, self._factors = hidden, factors
        flat = routing.T.ravel()  # [K * T], choice-major, as eager's torch.where over [K, T] walks it
        order = np.argsort(flat, kind="stable")
        ids, starts = np.unique(flat[order], return_index=True)
        known = int(np.searchsorted(ids, num_experts))
        self.experts: list[int] = ids[:known].tolist()
        ends = [*starts[1:].tolist(), flat.size]
        self._range = {e: slice(int(starts[i]), ends[i]) for i, e in enumerate(self.experts)}
        self.tokens = [end - int(start) for start, end in zip(starts[:known], ends)]
        choice, token = np.divmod(order, len(routing))
        self._token, self._choice = torch.from_numpy(token).to(hidden.device), torch.from_numpy(choice).to(hidden.device)

    @staticmethod
    def of(routing: np.ndarray, num_experts: int, hidden: torch.Tensor, factors: torch.Tensor) -> "ExpertRows | OneRow":
        """The rows of a routing `[T, K]`; a single token takes a shorter way to the same numbers."""
        if len(routing) == 1:
            row = OneRow(routing[0].tolist(), num_experts, hidden, factors)
            if row.distinct:
                return row
        return ExpertRows(routing, num_experts, hidden, factors)

    def inputs(self, expert: int) -> torch.Tensor:
        """The hidden states `[n, H]` of one expert's tokens, in fresh memory."""
        return self._hidden[self._token[self._range[expert]]]

    def arranged(self, expert: int, part: torch.Tensor) -> torch.Tensor:
        """The expert's rows `[n, H]`, given by token, in the order of `inputs`."""
        by_token = torch.argsort(self._token[self._range[expert]], stable=True)
        return torch.empty_like(part).index_copy_(0, by_token, part)

    def weigh(self, expert: int, output: torch.Tensor) -> torch.Tensor:
        """The expert's output `[n, H]` times the routing weights."""
        rows = self._range[expert]
        return output * self._factors[self._token[rows], self._choice[rows], None]

    def add(self, out: torch.Tensor, expert: int, part: torch.Tensor) -> None:
        """Add one expert's part to the layer's output, rounded in its type."""
        out.index_add_(0, self._token[self._range[expert]], part.to(out.dtype))


class OneRow:
    """As `ExpertRows` for one token: no index tensors, one copy of the input for all experts."""

    def __init__(self, chosen: list[int], num_experts: int, hidden: torch.Tensor, factors: torch.Tensor):
        self._choice = {expert: choice for choice, expert in enumerate(chosen) if expert < num_experts}
        self.distinct = len(self._choice) == sum(expert < num_experts for expert in chosen)
        self.experts = sorted(self._choice)
        self.tokens = [1] * len(self.experts)
        self._row = hidden.clone(memory_format=torch.contiguous_format)
        self._factors = factors.unbind(1)

    def inputs(self, expert: int) -> torch.Tensor:
        return self._row

    def arranged(self, expert: int, part: torch.Tensor) -> torch.Tensor:
        return part

    def weigh(self, expert: int, output: torch.Tensor) -> torch.Tensor:
        return output * self._factors[self._choice[expert]]

    def add(self, out: torch.Tensor, expert: int, part: torch.Tensor) -> None:
        out += part.to(out.dtype)


def expert_output(module: Any, weights: dict[str, torch.Tensor], rows: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """One expert on its rows `[n, H]`, before the routing weight; the activation is the model's own.

    most: the most rows computed at once; the output of more rows overwrites `rows`.
    """
    if most is not None and len(rows) > most:
        for block in _blocks(rows, most):
            block.copy_(expert_output(module, weights, block))
        return rows
    if hasattr(module, "page_expert"):  # a family with its own arithmetic (adapters.py)
        return module.page_expert(weights, rows)
    up = _linear(module, rows, weights, "gate_up_proj" if module.has_gate else "up_proj")
    activated = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    down = _linear(module, activated, weights, "down_proj")
    return module.post_expert_norm(down) if getattr(module, "has_post_expert_norm", False) else down  # since transformers 5.23


def _linear(module: Any, rows: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight, bias = weights[name], weights.get(f"{name}_bias")
    if not module.is_transposed:
        return nn.functional.linear(rows, weight, bias)
    return rows @ weight if bias is None else rows @ weight + bias


def _blocks(rows: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Views of at most `most` rows each, of nearly equal size, since torch has separate kernels for products of a few rows."""
    size = -(-len(rows) // -(-len(rows) // most))
    return (rows[start : start + size] for start in range(0, len(rows), size))


@functools.cache
def block_rows(dtype: torch.dtype, device: str) -> int | None:
    """The number of rows of an expert that are computed at once; None: all, because blocks may give other bits here.

    Tested once for a type on this CPU, with products whose sums cancel, so that another order of additions changes most bits.
    That was observed in bfloat16 with AVX-512 but without its bfloat16 instructions, where bits depend on which thread computes a
    row.
    """
    if device != "cpu":
        return None
    width, outputs = PROBED
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(width, generator=generator, device="cpu")
    half, weight = (torch.randn(n, width // 2, generator=generator, device="cpu") for n in (2 * BLOCK_ROWS + 777, outputs))
    rows, weight = torch.cat((half, half), 1)[:, order].to(dtype), torch.cat((weight, -weight), 1)[:, order].to(dtype)
    for count in (BLOCK_ROWS + 1, BLOCK_ROWS + 63, 2 * BLOCK_ROWS + 1, len(rows)):
        blocks = [nn.functional.linear(block, weight) for block in _blocks(rows[:count], BLOCK_ROWS)]
        if not nn.functional.linear(rows[:count], weight).equal(torch.cat(blocks)):
            return None
    return BLOCK_ROWS
