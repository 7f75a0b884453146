"""Holds torch to what models may take of a GPU: beyond that it gives cached memory back, and fails if this is not enough.

The limit is the process's: what torch had reserved there before the first of the models, and the budgets of those that are open.
Other tensors of the process count. The driver's context is beside it, as it is in the free memory that plans begin with.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Taken:
    device: torch.device
    held_bytes: int
    budget_bytes: int


_open: dict[object, _Taken] = {}


def limit(owner: object, device: torch.device, held_bytes: int, budget_bytes: int) -> None:
    """`owner` may take `budget_bytes` of a GPU from now on; torch had reserved `held_bytes` there before it took any."""
    _open[owner] = _Taken(device, held_bytes, budget_bytes)
    _apply(device)


def lift(owner: object) -> None:
    """`owner` takes nothing any more. Nothing happens if it has no limit."""
    taken = _open.pop(owner, None)
    if taken is not None:
        _apply(taken.device)


def _apply(device: torch.device) -> None:
    there = [taken for taken in _open.values() if taken.device == device]
    total_bytes = torch.cuda.mem_get_info(device)[1]
    most = min(taken.held_bytes for taken in there) + sum(taken.budget_bytes for taken in there) if there else total_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total_bytes), device)
