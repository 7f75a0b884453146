"""The smallest memory, and the cheapest upgrade, that reach a wanted speed: by simulating."""

from dataclasses import dataclass, replace
from typing import Any

from vismoe.config import Settings
from vismoe.errors import BudgetError
from vismoe.simulate.machines import PartsTable, Upgrade, VirtualMachine
from vismoe.simulate.predict import Described, Prediction, Workload, planned, predict

WITHIN = 1.03  # the found memory over the smallest


@dataclass(frozen=True)
class Found:
    """memory_bytes: None where all memory of the machine is too slow; upgrade: then the cheapest part that is fast enough."""

    now: Prediction  # with all memory
    memory_bytes: int | None
    upgrade: Upgrade | None = None
    upgraded: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        change = {"part": str(self.upgrade.part), "price": self.upgrade.price} if self.upgrade else None
        told = self.upgraded.to_json() if self.upgraded else None
        return {
            "simulated": True,
            "now": self.now.to_json(),
            "memory_bytes": self.memory_bytes,
            "upgrade": change,
            "upgraded": told,
        }


def find(
    model: Described, machine: VirtualMachine, table: PartsTable, settings: Settings, workload: Workload, wanted: float
) -> Found:
    """wanted: tokens per second of all rows. Raises what `predict` raises."""
    everything = replace(settings, memory="auto")
    now = predict(model, machine, everything, workload)
    if now.tokens_per_s >= wanted:
        return Found(now, _smallest(model, machine, settings, workload, wanted, now.memory_bytes))
    for upgrade in table.upgrades(machine):
        try:
            told = predict(model, upgrade.machine, everything, workload)
        except BudgetError:
            continue
        if told.tokens_per_s >= wanted:
            return Found(now, None, upgrade, told)
    return Found(now, None)


def _smallest(
    model: Described, machine: VirtualMachine, settings: Settings, workload: Workload, wanted: float, enough: int
) -> int:
    """By halving between the least that works and `enough`; speed grows with memory but for the noise of one trace."""
    least, *_ = planned(model, machine, replace(settings, memory="auto"))
    low = least.minimum_bytes

    def reaches(memory: int) -> bool:
        return predict(model, machine, replace(settings, memory=str(memory)), workload).tokens_per_s >= wanted

    if reaches(low):
        return low
    while enough > WITHIN * low:
        middle = (low + enough) // 2
        low, enough = (low, middle) if reaches(middle) else (middle, enough)
    return enough
