"""How the planner divides expert memory: pinned prefix first, then slabs per geometry. Pure arithmetic on an inventory."""

from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.types import ExpertInventory, MoELayer, RecordLayout

LEAST_SLABS = 2  # per geometry: one computing, one arriving


@dataclass(frozen=True)
class Division:
    """The division of expert memory: whole layers that always stay in memory, and slabs of the dynamic pools."""

    pinned_layers: int
    slabs: tuple[int, ...]  # per geometry, without the pinned experts; with a pair, of the better format, transient ones included
    low_slabs: tuple[int, ...] = ()  # per geometry, of a pair's second format; empty without one
    hot_quota: tuple[int, ...] = ()  # hotness: most experts per MoE layer in the better format; otherwise empty
    transient: tuple[int, ...] = ()  # hotness: slabs of `slabs` that only copies in flight use, per geometry; otherwise empty

    @property
    def high_experts(self) -> int:
        """Number of experts that can stay in the slabs of `slabs`."""
        return sum(self.slabs) - sum(self.transient)


def experts_of(layers: Sequence[MoELayer], geometries: int) -> list[int]:
    """Experts per geometry in these layers."""
    counts = [0] * geometries
    for layer in layers:
        counts[layer.geometry] += layer.num_experts
    return counts


def record_bytes(inventory: ExpertInventory, counts: Sequence[int]) -> int:
    """Bytes of `counts` records, with one count per geometry."""
    return sum(count * layout.record_bytes for count, layout in zip(counts, inventory.layouts, strict=True))


def division_bytes(inventory: ExpertInventory, division: Division) -> int:
    """Bytes of the pinned prefix and of all slabs."""
    low = sum(n * layout.record_bytes for n, layout in zip(division.low_slabs, inventory.low_layouts, strict=True))
    return prefix_bytes(inventory, division.pinned_layers) + record_bytes(inventory, division.slabs) + low


def resident_experts(inventory: ExpertInventory, division: Division) -> int:
    """Experts that can be in memory at the same time, pinned ones included."""
    geometries = len(inventory.layouts)
    none = (0,) * geometries
    slabs = zip(division.slabs, division.low_slabs or none, division.transient or none, strict=True)
    dynamic = experts_of(inventory.layers[division.pinned_layers :], geometries)
    pinned = sum(layer.num_experts for layer in inventory.layers[: division.pinned_layers])
    return pinned + sum(min(n, high + low - copies) for n, (high, low, copies) in zip(dynamic, slabs, strict=True))


def least_slabs(inventory: ExpertInventory, pinned_layers: int = 0, least: int = LEAST_SLABS) -> list[int]:
    """The least slabs per geometry with which the dynamic layers can run."""
    return [min(least, n) for n in experts_of(inventory.layers[pinned_layers:], len(inventory.layouts))]


def safe_slabs(inventory: ExpertInventory, pinned_layers: int, window: int) -> list[int]:
    """C_safe of vismmoe eq. 10 in slabs: the most that any W + 1 neighbouring dynamic layers demand for one token."""
    geometries = len(inventory.layouts)
    dynamic = inventory.layers[pinned_layers:]
    needed = [0] * geometries
    for start in range(len(dynamic)):
        demand = [0] * geometries
        for layer in dynamic[start : start + window + 1]:
            demand[layer.geometry] += min(layer.top_k, layer.num_experts)
        needed = [max(a, b) for a, b in zip(needed, demand, strict=True)]
    return [min(max(LEAST_SLABS, want), n) for want, n in zip(needed, experts_of(dynamic, geometries), strict=True)]


def prefix_bytes(inventory: ExpertInventory, pinned_layers: int) -> int:
    """Bytes of all experts of the first `pinned_layers` MoE layers."""
    return record_bytes(inventory, experts_of(inventory.layers[:pinned_layers], len(inventory.layouts)))


def most_pinned(inventory: ExpertInventory, expert_bytes: int, window: int) -> int:
    """The largest L with `L * S_layer <= M_avail - C_safe` (vismmoe eq. 10), for layers of unequal size."""
    for pinned in range(len(inventory.layers), 0, -1):
        if prefix_bytes(inventory, pinned) + record_bytes(inventory, safe_slabs(inventory, pinned, window)) <= expert_bytes:
            return pinned
    return 0


def fill(inventory: ExpertInventory, pinned_layers: int, expert_bytes: int, least: Sequence[int]) -> tuple[int, ...]:
    """Slabs per geometry for `expert_bytes`, in proportion to expert bytes; never fewer than `least`, never more than experts."""
    return hand_out(experts_of(inventory.layers[pinned_layers:], len(inventory.layouts)), inventory.layouts, expert_bytes, least)


def hand_out(experts: Sequence[int], layouts: Sequence[RecordLayout], nbytes: int, least: Sequence[int]) -> tuple[int, ...]:
    """Records per layout for `nbytes`, the same share of the experts in each; never fewer than `least`, never more than experts.

    They are given out in one fixed order, always to the layout with the smallest share, so more memory never takes one away.
    """
    records = list(least)
    left = nbytes - sum(n * layout.record_bytes for n, layout in zip(records, layouts, strict=True))
    order = sorted((k / n, index) for index, n in enumerate(experts) for k in range(least[index] + 1, n + 1))
    for _, index in order:
        left -= layouts[index].record_bytes
        if left < 0:
            break
        records[index] += 1
    return tuple(records)
