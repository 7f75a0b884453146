"""Settings on a machine, and what follows for the memory: whether they work, how memory is divided, and if not, why and what
would.

Every refusal names a setting that works. `vismoe.planning.plan` makes the plan of a case that works.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from vismoe.config import UNMEASURED_IO_THREADS, Budget, Settings, format_bytes, parse_formats
from vismoe.errors import BudgetError, ConfigError
from vismoe.pair import BITS, FormatPair
from vismoe.planning import pair_split as pairs
from vismoe.planning.apportion import (
    Division,
    division_bytes,
    fill,
    least_slabs,
    most_pinned,
    prefix_bytes,
    record_bytes,
    safe_slabs,
)
from vismoe.planning.hierarchy import corners, record_bytes_of
from vismoe.planning.needs import Footprint, Hardware, decode_read_bytes
from vismoe.planning.parts import PlanPart, draft_part, fixed_parts, image_cache_part, request_part, staging_part, total
from vismoe.planning.sizes import percent_up, size_down, size_up
from vismoe.planning.throughput import MachineRates, PassLayer, expected

SHORT_CONTEXT = 512  # tokens: the least context that a machine should serve
AUTO_SHARE = 0.8  # the most of the free device memory that memory="auto" takes


@dataclass(frozen=True)
class Case:
    """The three arguments of `plan`, with the pinned prefix decided."""

    need: Footprint
    settings: Settings
    hardware: Hardware

    @property
    def prefix(self) -> int:
        """The number of pinned layers, once it is decided."""
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

    @property
    def rows(self) -> int:
        """Requests that a pass has memory for: until the plan has chosen, one."""
        return 1 if self.settings.parallel == "auto" else self.settings.parallel

    def fixed_parts(self) -> list[PlanPart]:
        staging = []
        if self.hardware.device == "cpu":
            staging = [*staging_part(self.need, self.io_threads), *request_part(self.settings.request_memory_bytes)]
        settings, images = self.settings, image_cache_part(self.need, self.settings.image_cache_bytes)
        drafts = draft_part(self.need)
        rows = self.rows, settings.checked_rows
        fixed = fixed_parts(self.need, settings.context, self.hardware.device, settings.mask_bytes, *rows)
        return [*fixed, *staging, *images, *drafts]

    @property
    def is_share(self) -> bool:
        return self.settings.memory != "auto" and Budget.parse(self.settings.memory).expert_share is not None

    @property
    def budget_bytes(self) -> int:
        """This rank's budget; a percentage is taken of the experts, and everything else is added."""
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
        """The least expert memory that works: two slabs per geometry, the requested prefix and C_safe, or what a pair needs."""
        inventory, prefix = self.need.inventory, self.prefix
        if inventory.low_layouts:
            return pairs.least_bytes(inventory, self.settings)
        least = safe_slabs(inventory, prefix, self.settings.window) if prefix else least_slabs(inventory)
        return prefix_bytes(inventory, prefix) + record_bytes(inventory, least)

    @property
    def minimum_bytes(self) -> int:
        return (total(self.fixed_parts()) + self.least_expert_bytes) * self.ranks

    def split(self) -> Division:
        """The division, if `expert_bytes` hold at least the minimum."""
        inventory, window, prefix = self.need.inventory, self.settings.window, self.prefix
        if inventory.low_layouts:
            return pairs.divide(inventory, self.settings, self.expert_bytes)
        least = safe_slabs(inventory, prefix, window) if prefix else least_slabs(inventory)
        return Division(prefix, fill(inventory, prefix, self.expert_bytes - prefix_bytes(inventory, prefix), least))

    def planned_bytes(self) -> int:
        return total(self.fixed_parts()) + division_bytes(self.need.inventory, self.split())

    def works(self) -> bool:
        return self.expert_bytes >= self.least_expert_bytes and self.planned_bytes() <= self.free_bytes

    def has_room(self) -> bool:
        """`works`, without dividing what the experts get."""
        held = min(self.expert_bytes, self.need.inventory.slab_bytes)
        return self.expert_bytes >= self.least_expert_bytes and total(self.fixed_parts()) + held <= self.free_bytes

    def loads(self) -> list[PassLayer]:
        """What each MoE layer of a decode pass computes and reads; of a pair as if all experts were in the second format."""
        inventory, prefix = self.need.inventory, self.prefix
        slabs = inventory.low_layouts or inventory.layouts
        by_layer = [layer.num_experts * slabs[layer.geometry].record_bytes for layer in inventory.layers]
        pinned, dynamic = sum(by_layer[:prefix]), sum(by_layer[prefix:])
        share = min(1.0, max(0, self.expert_bytes - pinned) / dynamic) if dynamic else 1.0
        other_bytes = decode_read_bytes(self.need.backbone) // max(1, len(inventory.layers))
        item = 4 if self.need.dtype == "float32" else 2
        loads = []
        for layer in inventory.layers:
            raw = inventory.raw_layouts[layer.geometry].payload_bytes
            packed = self.need.packed_from is not None and layer.index >= self.need.packed_from
            slab_bytes = (inventory.raw_layouts if packed else slabs)[layer.geometry].record_bytes
            decode_s, restore_s = self._decoding(slab_bytes, packed)
            loads.append(
                PassLayer(
                    experts=layer.num_experts,
                    top_k=layer.top_k,
                    expert_bytes=slab_bytes,
                    decode_s=decode_s,
                    restore_s=restore_s,
                    resident=1.0 if layer.index < prefix else share,
                    other_bytes=other_bytes,
                    row_flop=2 * (other_bytes + layer.top_k * raw) / item,  # a multiplication and an addition for each weight
                )
            )
        return loads

    def _decoding(self, raw_bytes: int, packed: bool) -> tuple[float, float]:
        """Seconds of an expert of lossless records: while it is computed, while it is read."""
        packing = self.need.packing
        if packing is None:
            return 0.0, 0.0
        if packed:
            return raw_bytes * packing.rates.extra_s_per_byte, 0.0
        return 0.0, raw_bytes / packing.rates.decode_bytes_per_s

    def quickest(self, rates: MachineRates) -> "Case":
        """The case in which slabs hold lossless experts raw, packed or both, whichever passes of its rows take the shortest
        time."""
        packing = self.need.packing
        if packing is None or self.expert_bytes >= self.need.inventory.slab_bytes:
            return self
        held = [
            dataclasses.replace(self, need=self.need.holding(first))
            for first in corners(self.need.inventory, packing.layouts, self._mixed_bytes, packing.must, rates.overlaps)
        ]
        there = [case for case in held if case.has_room()] or [min(held, key=lambda case: case.minimum_bytes)]
        return min(there, key=lambda case: expected(self.rows, case.loads(), rates).seconds)

    def rates_of_slabs(self, rates: MachineRates) -> MachineRates:
        """The same in bytes of slabs as they are held, where `rates` are of raw ones; a miss of these is also decoded."""
        packing, inventory = self.need.packing, self.need.inventory
        if packing is None:
            return rates
        seconds = 1 / rates.missing_bytes_per_s
        if self.need.packed_from != 0:
            seconds += 1 / packing.rates.decode_bytes_per_s
        share = inventory.slab_bytes / record_bytes_of(inventory, inventory.raw_layouts)
        return dataclasses.replace(rates, missing_bytes_per_s=share / seconds)

    @property
    def _mixed_bytes(self) -> int:
        """The most that `expert_bytes` can be, if slabs hold both."""
        mixed = dataclasses.replace(self, need=self.need.holding(1))
        if self.settings.memory == "auto":  # which takes no more than one division needs
            return int(self.free_bytes * AUTO_SHARE) - total(mixed.fixed_parts())
        return mixed.expert_bytes

    def division(self) -> Division:
        """The division; raises the refusal if there is none."""
        asked, layers = self.prefix, len(self.need.inventory.layers)
        if asked > layers:
            raise ConfigError(f"pinned_layers={asked}: the model has {layers} MoE layers. Fix: pinned_layers='auto'")
        self.refuse_prefix()
        if self.expert_bytes < self.least_expert_bytes:
            self.refuse_budget()
        if self.planned_bytes() > self.free_bytes:
            self.refuse_machine()
        return self.split()

    # ------------------------------------------------------------------ refusals
    def refuse_prefix(self) -> None:
        """Refuse a prefix that does not fit, if a shorter one would."""
        asked, layers, window = self.prefix, self.need.inventory.layers, self.settings.window
        most = most_pinned(self.need.inventory, self.expert_bytes, window)
        if asked > most and self.changed(pinned_layers=most).works():
            raise BudgetError(
                f"pinned_layers={asked} does not fit: {format_bytes(self.expert_bytes)} for experts hold at most {most} of "
                f"{len(layers)} MoE layers beside the slabs that {window + 1} layers need at once",
                f"--pinned-layers {most}",
            )

    def refuse_budget(self) -> None:
        least, experts = self.least_expert_bytes, self.need.inventory.total_bytes
        enough = {"memory": percent_up(least, experts) if self.is_share and least <= experts else size_up(self.minimum_bytes)}
        context, longest = self.settings.context, self.need.positions
        at = f"context {context}" + (f" (the model itself has {longest})" if longest is not None and longest < context else "")
        if self.is_share:
            message = (
                f"memory={self.settings.memory} of {format_bytes(experts)} of experts is {format_bytes(self.expert_bytes)}, "
                f"but {self.least_of_all} need {format_bytes(least)}"
            )
        else:
            message = (
                f"memory={self.settings.memory} ({format_bytes(self.budget_bytes)}) is too small: everything but experts needs "
                f"{format_bytes(total(self.fixed_parts()))} at {at}, and {self.least_of_all} need "
                f"{format_bytes(least)}"
            )
        if self.settings.pair is None:
            raise BudgetError(message, self.fix(enough))
        fitting = fitting_pairs(self.need, self.settings, self.hardware)
        message += f". Pairs that fit: {', '.join(map(str, fitting)) or 'none'}; {self.settings.formats} needs {flags(enough)}"
        raise BudgetError(message, self.fix({"formats": fitting[0].formats} if fitting else enough))

    @property
    def least_of_all(self) -> str:
        """What needs `least_expert_bytes`, in words."""
        pair, policy = self.settings.pair, self.settings.policy
        if pair is None or pair.low is None:
            return f"{self.prefix} pinned layers and the slabs beside them" if self.prefix else "two slabs per expert geometry"
        if policy == "importance":
            return "two slabs per expert geometry and format"
        everyone = f"all {sum(layer.num_experts for layer in self.need.inventory.layers)} experts in {pair.low}"
        return everyone + (f" and two slabs of {pair.high} per geometry" if policy == "hotness+importance" else "")

    def refuse_machine(self) -> None:
        """Refuse a plan that fits the budget if the budget does not fit the machine."""
        message = (
            f"memory={self.settings.memory} takes {format_bytes(self.planned_bytes())} of this {self.hardware.device}'s memory, "
            f"of which {format_bytes(self.free_bytes)} are free"
        )
        raise BudgetError(message, self.fix({"memory": self.everything}))

    @property
    def everything(self) -> str:
        return size_down(max(1, self.free_bytes * self.ranks))

    def changed(self, **change: Any) -> "Case":
        """The case with other settings; other formats have slabs of other sizes."""
        settings = dataclasses.replace(self.settings, **change)
        need = self.need
        if settings.pair is not None and settings.formats != self.settings.formats:
            inventory = pairs.paired(need.inventory, settings.pair, need.transposed)
            need = dataclasses.replace(need, inventory=inventory)
        return Case(need, settings, self.hardware)

    def fix(self, first: dict[str, Any]) -> str:
        """The first change of settings that works: `first`, else no drafts, else also a smaller context, else also all free
        memory, else also another pair of formats."""
        context = self.settings.context
        limit = min(context, self.need.positions or context)  # never advise more than the model has
        shorter = [2**k for k in range(limit.bit_length() - 1, -1, -1) if 2**k < limit]
        shorter = [limit, *shorter] if limit < context else shorter
        everything = {"memory": self.everything}
        undrafted = [{"draft": "none"}, {**everything, "draft": "none"}] if self.need.draft_bytes else []
        changes = [first, *undrafted, *({"context": c} for c in shorter), *({**everything, "context": c} for c in shorter)]
        for change in changes:
            if self.changed(**change).works():
                return flags(change)
        if self.settings.pair is not None:
            roomier = dataclasses.replace(self.settings, memory=self.everything)
            for fit in fitting_pairs(self.need, roomier, self.hardware):
                return flags({"memory": self.everything, "formats": fit.formats})
        device = "GPU " if self.hardware.device == "cuda" else ""
        context = min(limit, SHORT_CONTEXT)
        needed = size_up(self.changed(context=context).minimum_bytes)
        asked = flags({"memory": needed, "context": context})
        return f"a machine with {needed} of free {device}memory and {asked}, or a smaller model"


@dataclass(frozen=True)
class FittingPair:
    """A pair of formats that fits a budget, and how many experts can be in its better format."""

    formats: str  # as a user types it
    pair: FormatPair
    high_experts: int  # experts that have a slab of the better format

    def __str__(self) -> str:
        return f"{self.formats} ({self.high_experts} experts in {self.pair.high})"


def fitting_pairs(footprint: Footprint, settings: Settings, hardware: Hardware) -> tuple[FittingPair, ...]:
    """The pairs that fit these settings' memory under their policy, without pairs that cannot hold the model's type.

    The best one first: by the bits of every expert's lower format, then by the number of experts in the better format.
    """
    asked, found = Case(footprint, dataclasses.replace(settings, pinned_layers=0), hardware), []
    for formats in pairs.typed_pairs(settings, bool(footprint.inventory.own_layouts)):
        try:
            case = asked.changed(formats=formats)
        except ConfigError:
            continue
        if case.works():
            found.append(FittingPair(formats, parse_formats(formats), case.split().high_experts))
    return tuple(sorted(found, key=lambda fit: (-BITS[fit.pair.low], -fit.high_experts)))


def flags(change: dict[str, Any]) -> str:
    """Settings as command line flags."""
    return " ".join(f"--{name} {value}" for name, value in change.items())
