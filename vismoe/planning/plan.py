"""The memory plan: a pure function of what a model needs, the settings and what the machine has.

Every byte that serving will hold belongs to a `PlanPart`; the parts of a plan add up to at most its budget. Settings that cannot
work raise `BudgetError` with the numbers and a setting that works. Nothing here reads a file or a clock.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vismoe.config import Settings, format_bytes
from vismoe.errors import ConfigError
from vismoe.planning.apportion import most_pinned, resident_experts
from vismoe.planning.case import AUTO_SHARE, Case, FittingPair, fitting_pairs
from vismoe.planning.hierarchy import Shares
from vismoe.planning.host_size import host_tier
from vismoe.planning.needs import CacheLayer, Curve, Footprint, Hardware
from vismoe.planning.parts import PlanPart, expert_parts, mask_room, total
from vismoe.planning.throughput import UNMEASURED, ExpectedPass, MachineRates, PassLayer, best_rows, expected
from vismoe.types import ExpertInventory

__all__ = [
    "AUTO_SHARE",
    "CacheLayer",
    "Curve",
    "FittingPair",
    "Footprint",
    "Hardware",
    "Plan",
    "PlanPart",
    "fitting_pairs",
    "plan",
]


@dataclass(frozen=True)
class Plan:
    """The division of memory; frozen, and printed before anything is loaded."""

    family: str
    dtype: str
    device: str
    memory: str  # as in the settings
    context: int
    budget_bytes: int  # of this rank; the parts never exceed it
    minimum_bytes: int  # the smallest `memory` in bytes that works with these settings
    parts: tuple[PlanPart, ...]  # on the device, inside the budget
    host_parts: tuple[PlanPart, ...]  # in host memory, outside the budget
    pinned_layers: int
    slabs: tuple[int, ...]  # dynamic pool, per geometry
    host_slabs: tuple[int, ...]  # records of the host tier per geometry; empty where there is none
    resident_experts: int  # pinned and slabs together
    total_experts: int
    io_threads: int
    rows: int = 1  # the most requests that decode in one pass
    passes: tuple[ExpectedPass, ...] = ()  # expected of one row, and of `rows`
    checks: tuple[ExpectedPass, ...] = ()  # of 1, 2, ... rows of one sequence, where tokens are drafted
    rates: MachineRates = UNMEASURED  # behind that
    packed_from: int | None = None  # the first MoE layer whose slabs hold lossless records as they are
    mask_bytes: int = 0  # the most that explicit attention masks may take
    low_slabs: tuple[int, ...] = ()  # slabs of a pair's second format, as in Division; `slabs` are those of the better one
    hot_quota: tuple[int, ...] = ()
    transient: tuple[int, ...] = ()
    low_host_slabs: tuple[int, ...] = ()  # records of the second format in the host tier
    experts: str = ""  # their format and its source; the code that opens the store sets this and the next:
    kernels: str = ""  # the backend that computes experts
    rest: str = ""  # what a quantised checkpoint encodes beside the experts, and what becomes of it
    reading: tuple[str, ...] = ()  # what stays on disk and how it is read, with reasons; set after the plan is made

    @property
    def total_bytes(self) -> int:
        return total(self.parts)

    @property
    def host_bytes(self) -> int:
        return total(self.host_parts)

    def shares(self, inventory: ExpertInventory) -> Shares:
        """Of the experts of this inventory, which slabs hold raw, packed, or not at all."""
        unpacked = sum(layer.num_experts for layer in inventory.layers[: self.packed_from])
        raw, resident = (min(count, self.resident_experts) / self.total_experts for count in (unpacked, self.total_experts))
        return Shares(raw, resident - raw, 1 - resident)

    def bytes_of(self, name: str) -> int:
        """Bytes of the part with this name; 0 if the plan has none."""
        return sum(part.bytes for part in (*self.parts, *self.host_parts) if part.name == name)

    def to_json(self) -> dict[str, Any]:
        """The whole plan with numbers in bytes, for `--json` and the page."""
        passes = [{**dataclasses.asdict(one), "tokens_per_s": one.tokens_per_s, "bound": one.bound} for one in self.passes]
        totals = {"total_bytes": self.total_bytes, "host_bytes": self.host_bytes}
        return dataclasses.asdict(self) | {"passes": passes} | totals

    def table(self) -> str:
        """The plan as text: part, size, note; details in brackets under the part that includes them."""
        rows = list(self._rows())
        sized = [row for row in rows if row[1]]  # other rows are sentences
        name_width, size_width = (max(len(row[column]) for row in sized) for column in (0, 1))
        resident = f"{self.resident_experts} of {self.total_experts} experts resident"
        head = f"{self.family}, {self.dtype}, context {self.context}: {resident}"
        return "\n".join([head, *(f"{name:<{name_width}}  {size:>{size_width}}  {note}".rstrip() for name, size, note in rows)])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield f"on the {self.device}", "", ""
        yield from self._part_rows(self.parts)
        yield "  total", format_bytes(self.total_bytes), f"of {format_bytes(self.budget_bytes)}, memory={self.memory}"
        if self.host_parts:
            yield "in host memory", "", ""
            yield from self._part_rows(self.host_parts)
            yield "  total", format_bytes(self.host_bytes), "outside the budget"
        if self.experts:
            yield f"experts: {self.experts}; computed by {self.kernels}", "", ""
        if self.rest:
            yield f"the rest: {self.rest}", "", ""
        for number, one in enumerate(self.passes):
            rows = "one request" if one.rows == 1 else f"{one.rows} requests in a pass"
            speed = f"{one.tokens_per_s:.3g} tokens/s of {rows}, {one.seconds:.3g} s a pass, bound by {one.bound}"
            yield f"{'  ' if number else 'expected: '}{speed}", "", ""
        if self.rates.assumed:
            yield f"  assumed, not measured (vismoe doctor): {', '.join(self.rates.assumed)}", "", ""
        if self.reading:
            yield "on disk", "", ""
            yield from (("  " + sentence, "", "") for sentence in self.reading)

    @staticmethod
    def _part_rows(parts: tuple[PlanPart, ...]) -> Iterator[tuple[str, str, str]]:
        for part in parts:
            size = format_bytes(part.bytes)
            yield (f"    {part.name}", f"({size})", part.note) if part.inside else (f"  {part.name}", size, part.note)


def plan(footprint: Footprint, settings: Settings, hardware: Hardware, rates: MachineRates = UNMEASURED) -> Plan:
    """Divide the memory between experts and requests, by these `rates` where the requests of a pass are not given.

    Raises BudgetError, with a setting that works, if budget or machine are too small.
    """
    inventory = footprint.inventory
    if settings.pair is not None:
        settings = _unpinned(inventory, settings)
    elif settings.pinned_layers == "auto":
        settings = dataclasses.replace(settings, pinned_layers=_calibrated_prefix(footprint, settings, hardware))
    least = case = Case(footprint, settings, hardware)
    if settings.parallel == "auto":
        case = dataclasses.replace(case, settings=dataclasses.replace(settings, parallel=_best_rows(case, rates)))
    case = case.quickest(rates)
    footprint, inventory = case.need, case.need.inventory
    division = case.division()
    emulated = settings.emulated_link_bytes_per_s is not None
    parts = (*case.fixed_parts(), *expert_parts(inventory, division, settings.pair, emulated))
    host = host_tier(footprint, settings, hardware, case.io_threads)
    checked = range(1, 1 + settings.checked_rows) if settings.draft != "none" else ()
    return Plan(
        family=footprint.family,
        dtype=footprint.dtype,
        device=hardware.device,
        memory=str(settings.memory),
        context=settings.context,
        budget_bytes=total(parts) if case.is_share else case.budget_bytes,
        minimum_bytes=min(dataclasses.replace(least, need=least.need.holding(first)).minimum_bytes for first in (None, 0)),
        parts=parts,
        host_parts=host.parts,
        pinned_layers=division.pinned_layers,
        slabs=division.slabs,
        host_slabs=host.slabs,
        resident_experts=resident_experts(inventory, division),
        total_experts=sum(layer.num_experts for layer in inventory.layers),
        io_threads=case.io_threads,
        rows=case.rows,
        passes=tuple(expected(rows, case.loads(), rates) for rows in dict.fromkeys((1, case.rows))),
        checks=tuple(expected(rows, case.loads(), rates) for rows in checked),
        rates=case.rates_of_slabs(rates),
        packed_from=footprint.packed_from,
        mask_bytes=mask_room(footprint, settings.context, settings.mask_bytes),
        low_slabs=division.low_slabs,
        hot_quota=division.hot_quota,
        transient=division.transient,
        low_host_slabs=host.low_slabs,
    )


def _best_rows(case: Case, rates: MachineRates) -> int:
    """The requests that a pass should have, of a case that leaves it open and may be one that does not work."""

    def loads(rows: int) -> list[PassLayer] | None:
        tried = dataclasses.replace(case, settings=dataclasses.replace(case.settings, parallel=rows))
        found = tried.quickest(rates)
        return found.loads() if rows == 1 or found.has_room() else None

    return best_rows(case.settings.rows, loads, rates, case.settings.latency).rows


def _unpinned(inventory: ExpertInventory, settings: Settings) -> Settings:
    """The settings without a pinned prefix, since pinned experts could not change their format."""
    pair = settings.pair
    assert pair is not None and bool(inventory.low_layouts) == (pair.low is not None), "inventory and settings have other formats"
    if settings.pinned_layers not in ("auto", 0):
        raise ConfigError(
            f"pinned_layers={settings.pinned_layers}: with policy={settings.policy!r} every expert may change its format. "
            "Fix: leave it out, or use policy='exact' (--policy exact)"
        )
    return dataclasses.replace(settings, pinned_layers=0)


def _calibrated_prefix(footprint: Footprint, settings: Settings, hardware: Hardware) -> int:
    """MoE layers worth pinning at the nearest calibrated share of the experts in memory, if they fit; otherwise 0."""
    case = Case(footprint, dataclasses.replace(settings, pinned_layers=0), hardware)
    if not footprint.pinned_by_share or not case.works():
        return 0
    share = case.expert_bytes / footprint.inventory.slab_bytes
    _, layers = min(footprint.pinned_by_share, key=lambda tried: abs(tried[0] - share))
    return min(layers, most_pinned(footprint.inventory, case.expert_bytes, settings.window))
