"""The memory plan: a pure function of what a model needs, what was asked for and what the machine has.

Every byte that serving will hold is a `Part`; the parts of a plan add up to at most its budget. What cannot work raises
`BudgetError` with the numbers and a setting that works. Nothing here looks at a device, a file or a clock.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vismoe.config import UNMEASURED_IO_THREADS, Budget, Settings, format_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.memory.apportion import Division, fill, least_slabs, most_pinned, prefix_bytes, record_bytes, safe_slabs
from vismoe.memory.host_tier import host_tier
from vismoe.memory.needs import CacheLayer, Curve, Footprint, Hardware
from vismoe.memory.parts import Part, expert_parts, fixed_parts, image_cache_part, staging_part, total
from vismoe.memory.sizes import percent_up, size_down, size_up

__all__ = ["CacheLayer", "Curve", "Footprint", "Hardware", "Part", "Plan", "plan"]

AUTO_SHARE = 0.8  # of the free device memory that memory="auto" takes at most


@dataclass(frozen=True)
class Plan:
    """Who gets which memory; frozen, printed before anything is loaded."""

    family: str
    dtype: str
    device: str
    memory: str  # as asked for
    context: int
    budget_bytes: int  # of this rank; the parts never exceed it
    minimum_bytes: int  # the smallest `memory` in bytes that works with these settings
    parts: tuple[Part, ...]  # on the device, inside the budget
    host_parts: tuple[Part, ...]  # in host memory, outside the budget
    pinned_layers: int
    slabs: tuple[int, ...]  # dynamic pool, per geometry
    host_slabs: tuple[int, ...]  # records of the host tier per geometry; empty where there is none
    resident_experts: int  # pinned and slabs together
    total_experts: int
    io_threads: int
    experts: str = ""  # their format and where it is read; filled in by who opens the store, as are these:
    kernels: str = ""  # who computes them
    reading: tuple[str, ...] = ()  # what stays on disk and how it is read, with the reasons; filled in by who arranges it

    @property
    def total_bytes(self) -> int:
        return total(self.parts)

    @property
    def host_bytes(self) -> int:
        return total(self.host_parts)

    def bytes_of(self, name: str) -> int:
        """Bytes of the part with this name, 0 where the plan has none."""
        return sum(part.bytes for part in (*self.parts, *self.host_parts) if part.name == name)

    def to_json(self) -> dict[str, Any]:
        """The whole plan with numbers in bytes, for `--json` and the page."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes, "host_bytes": self.host_bytes}

    def table(self) -> str:
        """The plan as text: part, size, note; details in brackets under the part that counts them."""
        rows = list(self._rows())
        sized = [row for row in rows if row[1]]  # others are sentences
        name_width, size_width = (max(len(row[column]) for row in sized) for column in (0, 1))
        resident = f"{self.resident_experts} of {self.total_experts} experts resident"
        head = f"{self.family}, {self.dtype}, context {self.context}: {resident}"
        return "\n".join([head, *(f"{name:<{name_width}}  {size:>{size_width}}  {note}".rstrip() for name, size, note in rows)])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield f"on the {self.device}", "", ""
        yield from self._part_rows(self.parts)
        yield "  total", format_bytes(self.total_bytes), f"of {format_bytes(self.budget_bytes)}, asked for: {self.memory}"
        if self.host_parts:
            yield "in host memory", "", ""
            yield from self._part_rows(self.host_parts)
            yield "  total", format_bytes(self.host_bytes), "outside the budget"
        if self.experts:
            yield f"experts: {self.experts}; computed by {self.kernels}", "", ""
        if self.reading:
            yield "on disk", "", ""
            yield from (("  " + sentence, "", "") for sentence in self.reading)

    @staticmethod
    def _part_rows(parts: tuple[Part, ...]) -> Iterator[tuple[str, str, str]]:
        for part in parts:
            size = format_bytes(part.bytes)
            yield (f"    {part.name}", f"({size})", part.note) if part.inside else (f"  {part.name}", size, part.note)


def plan(footprint: Footprint, settings: Settings, hardware: Hardware) -> Plan:
    """Divide the memory. Raises BudgetError, with a setting that works, when budget or machine are too small."""
    if settings.pinned_layers == "auto":
        settings = dataclasses.replace(settings, pinned_layers=_calibrated_prefix(footprint, settings, hardware))
    case = _Case(footprint, settings, hardware)
    inventory = footprint.inventory
    division = case.division()
    parts = (*case.fixed_parts(), *expert_parts(inventory, division, settings.emulated_link_bytes_per_s is not None))
    host_slabs, host_parts = host_tier(footprint, settings, hardware, case.io_threads)
    resident = sum(division.slabs) + sum(layer.num_experts for layer in inventory.layers[: division.pinned_layers])
    return Plan(
        family=footprint.family,
        dtype=footprint.dtype,
        device=hardware.device,
        memory=str(settings.memory),
        context=settings.context,
        budget_bytes=total(parts) if case.is_share else case.budget_bytes,
        minimum_bytes=case.minimum_bytes,
        parts=parts,
        host_parts=host_parts,
        pinned_layers=division.pinned_layers,
        slabs=division.slabs,
        host_slabs=host_slabs,
        resident_experts=resident,
        total_experts=sum(layer.num_experts for layer in inventory.layers),
        io_threads=case.io_threads,
    )


def _calibrated_prefix(footprint: Footprint, settings: Settings, hardware: Hardware) -> int:
    """MoE layers worth pinning at the nearest calibrated share of the experts in memory, as far as they fit; else 0."""
    case = _Case(footprint, dataclasses.replace(settings, pinned_layers=0), hardware)
    if not footprint.pinned_by_share or not case.works():
        return 0
    share = case.expert_bytes / footprint.inventory.slab_bytes
    _, layers = min(footprint.pinned_by_share, key=lambda tried: abs(tried[0] - share))
    return min(layers, most_pinned(footprint.inventory, case.expert_bytes, settings.window))


@dataclass(frozen=True)
class _Case:
    """The three arguments of `plan` and what follows from them, refusals included."""

    need: Footprint
    settings: Settings
    hardware: Hardware

    @property
    def prefix(self) -> int:
        """Pinned layers, once they are settled."""
        assert self.settings.pinned_layers != "auto"
        return self.settings.pinned_layers

    @property
    def io_threads(self) -> int:
        asked = self.settings.io_threads
        return max(1, (asked if isinstance(asked, int) else UNMEASURED_IO_THREADS) // self.hardware.local_world_size)

    @property
    def ranks(self) -> int:
        """Ranks that share the budget: a CPU's memory is divided, a GPU's is each rank's own."""
        return self.hardware.local_world_size if self.hardware.device == "cpu" else 1

    @property
    def free_bytes(self) -> int:
        return self.hardware.free_bytes // self.ranks

    def fixed_parts(self) -> list[Part]:
        staging = staging_part(self.need, self.io_threads) if self.hardware.device == "cpu" else []
        images = image_cache_part(self.need, self.settings.image_cache_bytes)
        return [*fixed_parts(self.need, self.settings.context, self.hardware.device), *staging, *images]

    @property
    def is_share(self) -> bool:
        return self.settings.memory != "auto" and Budget.parse(self.settings.memory).expert_share is not None

    @property
    def budget_bytes(self) -> int:
        """This rank's budget; for a percentage, what its experts and everything else come to."""
        experts = self.need.inventory.total_bytes
        if self.settings.memory == "auto":
            return min(total(self.fixed_parts()) + self.need.inventory.slab_bytes, int(self.free_bytes * AUTO_SHARE))
        budget = Budget.parse(self.settings.memory)
        if budget.expert_share is not None:
            return total(self.fixed_parts()) + int(experts * budget.expert_share)
        assert budget.total_bytes is not None, budget
        return budget.total_bytes // self.ranks

    @property
    def expert_bytes(self) -> int:
        """M_avail of vismmoe eq. 10; may be negative."""
        return self.budget_bytes - total(self.fixed_parts())

    @property
    def least_expert_bytes(self) -> int:
        """The least expert memory that works: two slabs per geometry, or the asked-for prefix and C_safe."""
        inventory, prefix = self.need.inventory, self.prefix
        least = safe_slabs(inventory, prefix, self.settings.window) if prefix else least_slabs(inventory)
        return prefix_bytes(inventory, prefix) + record_bytes(inventory, least)

    @property
    def minimum_bytes(self) -> int:
        return (total(self.fixed_parts()) + self.least_expert_bytes) * self.ranks

    def split(self) -> Division:
        """The division, where `expert_bytes` hold the least."""
        inventory, window, prefix = self.need.inventory, self.settings.window, self.prefix
        least = safe_slabs(inventory, prefix, window) if prefix else least_slabs(inventory)
        return Division(prefix, fill(inventory, prefix, self.expert_bytes - prefix_bytes(inventory, prefix), least))

    def planned_bytes(self) -> int:
        division = self.split()
        experts = prefix_bytes(self.need.inventory, division.pinned_layers) + record_bytes(self.need.inventory, division.slabs)
        return total(self.fixed_parts()) + experts

    def works(self) -> bool:
        return self.expert_bytes >= self.least_expert_bytes and self.planned_bytes() <= self.free_bytes

    def division(self) -> Division:
        """The division, or a refusal."""
        asked, layers = self.prefix, len(self.need.inventory.layers)
        if asked > layers:
            raise ConfigError(f"pinned_layers={asked}: the model has {layers} MoE layers")
        self.refuse_prefix()
        if self.expert_bytes < self.least_expert_bytes:
            self.refuse_budget()
        if self.planned_bytes() > self.free_bytes:
            self.refuse_machine()
        return self.split()

    # ------------------------------------------------------------------ refusals
    def refuse_prefix(self) -> None:
        """Refuse a prefix that does not fit, where a shorter one would."""
        asked, layers, window = self.prefix, self.need.inventory.layers, self.settings.window
        most = most_pinned(self.need.inventory, self.expert_bytes, window)
        if asked > most and self.changed(pinned_layers=most).works():
            raise BudgetError(
                f"pinned_layers={asked} does not fit: {format_bytes(self.expert_bytes)} for experts hold at most {most} of "
                f"{len(layers)} MoE layers beside the slabs that {window + 1} layers demand",
                f"--pinned-layers {most}",
            )

    def refuse_budget(self) -> None:
        least, experts = self.least_expert_bytes, self.need.inventory.total_bytes
        what = f"{self.prefix} pinned layers and the slabs beside them" if self.prefix else "two slabs per expert geometry"
        if self.is_share:
            message = (
                f"memory={self.settings.memory} of {format_bytes(experts)} of experts is {format_bytes(self.expert_bytes)}, "
                f"but {what} need {format_bytes(least)}"
            )
            raise BudgetError(message, self.fix({"memory": percent_up(least, experts)}))
        message = (
            f"memory={self.settings.memory} ({format_bytes(self.budget_bytes)}) is too small: everything but experts needs "
            f"{format_bytes(total(self.fixed_parts()))} at context {self.settings.context}, and {what} need {format_bytes(least)}"
        )
        raise BudgetError(message, self.fix({"memory": size_up(self.minimum_bytes)}))

    def refuse_machine(self) -> None:
        """The plan fits the budget, but the budget does not fit the machine."""
        message = (
            f"memory={self.settings.memory} takes {format_bytes(self.planned_bytes())} of this {self.hardware.device}'s memory, "
            f"of which {format_bytes(self.free_bytes)} are free"
        )
        raise BudgetError(message, self.fix({"memory": self.everything}))

    @property
    def everything(self) -> str:
        return size_down(max(1, self.free_bytes * self.ranks))

    def changed(self, **change: Any) -> "_Case":
        return _Case(self.need, dataclasses.replace(self.settings, **change), self.hardware)

    def fix(self, first: dict[str, Any]) -> str:
        """The first change of settings that works: the given one, then a smaller context, then that with all free memory."""
        shorter = [2**k for k in range(self.settings.context.bit_length() - 1, -1, -1) if 2**k < self.settings.context]
        changes = [first, *({"context": c} for c in shorter), *({"memory": self.everything, "context": c} for c in shorter)]
        for change in changes:
            if self.changed(**change).works():
                return " ".join(f"--{name} {value}" for name, value in change.items())
        device = "GPU " if self.hardware.device == "cuda" else ""
        return f"a machine with {size_up(self.changed(context=1).minimum_bytes)} of free {device}memory, or a smaller model"
