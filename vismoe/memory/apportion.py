"""How expert memory is divided: pinned prefix first, then slabs per geometry. Pure arithmetic on an inventory."""

from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.types import ExpertInventory, MoELayer

LEAST_SLABS = 2  # per geometry: one computing, one arriving


@dataclass(frozen=True)
class Division:
    """Who gets the expert memory: whole layers that never leave, and slabs of the dynamic pools."""

    pinned_layers: int
    slabs: tuple[int, ...]  # per geometry, without the pinned experts


def experts_of(layers: Sequence[MoELayer], geometries: int) -> list[int]:
    """Experts per geometry in these layers."""
    counts = [0] * geometries
    for layer in layers:
        counts[layer.geometry] += layer.num_experts
    return counts


def record_bytes(inventory: ExpertInventory, counts: Sequence[int]) -> int:
    """Bytes of `counts` records, one count per geometry."""
    return sum(count * layout.record_bytes for count, layout in zip(counts, inventory.layouts, strict=True))


def least_slabs(inventory: ExpertInventory, pinned_layers: int = 0, least: int = LEAST_SLABS) -> list[int]:
    """Slabs per geometry without which the dynamic layers cannot run."""
    return [min(least, n) for n in experts_of(inventory.layers[pinned_layers:], len(inventory.layouts))]


def safe_slabs(inventory: ExpertInventory, pinned_layers: int, window: int) -> list[int]:
    """C_safe of vismmoe eq. 10 in slabs: what the W + 1 hungriest neighbouring dynamic layers demand for one token."""
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
    """Slabs per geometry for `expert_bytes`, in proportion to expert bytes; never fewer than `least`, never more than experts.

    Slabs are handed out in one fixed order (the geometry with the smallest share first), so more memory never takes a slab away.
    """
    dynamic = experts_of(inventory.layers[pinned_layers:], len(inventory.layouts))
    slabs = list(least)
    left = expert_bytes - record_bytes(inventory, slabs)
    order = sorted((k / n, g) for g, n in enumerate(dynamic) for k in range(least[g] + 1, n + 1))
    for _, geometry in order:
        left -= inventory.layouts[geometry].record_bytes
        if left < 0:
            break
        slabs[geometry] += 1
    return tuple(slabs)
