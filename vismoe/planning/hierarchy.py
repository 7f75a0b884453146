"""How slabs hold experts that are stored lossless: decoded (raw), or as the record is (packed), which takes 0.70 of the bytes.

FluxMoE's rule (its equation 8: by bandwidth) holds only while no place is full. Here memory is, so a small program is solved.
Of all experts, x are raw, y packed and z on disk:

    minimise y d + z k    with    x + y + z = 1,  x + rho y <= m

m is what memory holds of all raw experts, rho a packed record's bytes over a raw one's, d the seconds by which computing from a
packed record takes longer, and k the seconds of reading one, and of decoding it where slabs are raw. If all experts are wanted
alike, its solution is at a corner: raw and disk, packed and disk, or, where all fit packed, raw and packed. `corners` gives those
that memory has room for, and the planner takes the one whose passes take the shortest time, for every number of rows (case.py).

Raw beside packed means whole layers: the first ones are raw. Time is a sum over layers, in which it makes no difference which
experts are packed, if all are wanted alike; a layer in one format needs no table of formats, and changes none.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from vismoe.types import ExpertInventory, MoELayer, RecordLayout

TRIED = 16  # numbers of raw layers, of a model with many
LOSSLESS_SHARE = 0.70  # of bfloat16's bytes: rho, where records are not there to be looked at (docs/formats.md)


class Shares(NamedTuple):
    """Of all experts."""

    raw: float
    packed: float
    disk: float


@dataclass(frozen=True)
class PackedRates:
    """By which it is decided, in bytes of raw experts. `unmeasured`: which of them are nominal."""

    extra_s_per_byte: float  # of computing an expert for one token from its record, over computing it from raw weights
    decode_bytes_per_s: float  # of decoding records into raw slabs while they are read; infinite where nothing waits for that
    unmeasured: tuple[str, ...] = ()

    def says(self, shares: Shares) -> str:
        """What was decided, and by which rates."""
        parts = ", ".join(f"{share:.0%} {name}" for name, share in shares._asdict().items())
        costs = f"computing packed ones takes {self.extra_s_per_byte * 1e12:.1f} us per MB longer"
        if math.isfinite(self.decode_bytes_per_s):
            costs += f", decoding raw ones runs at {self.decode_bytes_per_s / 1e9:.1f} GB/s"
        source = f"{' and '.join(self.unmeasured)} not measured; run vismoe doctor" if self.unmeasured else "measured"
        return f"experts: {parts}; {costs} ({source})"


@dataclass(frozen=True)
class Packing:
    """How slabs could hold records as they are stored."""

    layouts: tuple[RecordLayout, ...]  # per geometry, of the largest record
    rates: PackedRates
    must: bool = False  # wherever not all experts fit raw
    workspace_bytes: int = 0  # of the backend that computes them, and raw ones beside them
    scratch_bytes: int = 0  # of a reading thread, which decodes records for raw slabs alone
    ring_bytes: int = 0  # on a GPU: of raw records that are decoded just before they are computed


def packed_from(
    inventory: ExpertInventory, layouts: tuple[RecordLayout, ...], first: int
) -> tuple[ExpertInventory, tuple[int, ...]]:
    """(the same experts, with packed slabs from MoE layer `first` on; the former geometry of each geometry).

    layouts: per geometry, of packed slabs. A geometry whose layers are divided becomes two, the raw one first.
    """
    kinds = sorted({(layer.index >= first, layer.geometry) for layer in inventory.layers})
    raw = [inventory.raw_layouts[geometry] for _, geometry in kinds]
    own = [inventory.own_layouts[geometry] for _, geometry in kinds] if inventory.own_layouts else []
    slabs = [layouts[geometry] if packed else inventory.layouts[geometry] for packed, geometry in kinds]

    def moved(layer: MoELayer) -> MoELayer:
        return dataclasses.replace(layer, geometry=kinds.index((layer.index >= first, layer.geometry)))

    changed = dataclasses.replace(
        inventory,
        layers=tuple(moved(layer) for layer in inventory.layers),
        layouts=tuple(slabs),
        model_layouts=tuple(raw),
        own_layouts=tuple(own),
    )
    return changed, tuple(geometry for _, geometry in kinds)


def corners(
    inventory: ExpertInventory, layouts: tuple[RecordLayout, ...], expert_bytes: int, must: bool, overlaps: bool = False
) -> list[int | None]:
    """Where the program can have its solution, if not all experts fit raw: the first layer with packed slabs; None: no layer.

    must: only those with packed slabs. overlaps: reading goes on while experts are computed, so that
    a layer takes the longer of both; then the solution may lie between the corners, and more numbers of raw layers are given.
    """
    found: list[int | None] = [0] if must else [None, 0]
    saved = [raw.record_bytes - packed.record_bytes for raw, packed in zip(inventory.layouts, layouts, strict=True)]
    spare, first = expert_bytes - record_bytes_of(inventory, layouts), 0
    for layer in inventory.layers:
        spare -= layer.num_experts * saved[layer.geometry]
        if spare < 0:
            break
        first += 1
    between = range(0, len(inventory.layers), -(-len(inventory.layers) // TRIED)) if overlaps and not must else ()
    return [*found, *sorted({first, *between} - {0})]


def record_bytes_of(inventory: ExpertInventory, layouts: tuple[RecordLayout, ...]) -> int:
    """Bytes of all experts in slabs of these layouts."""
    return sum(layer.num_experts * layouts[layer.geometry].record_bytes for layer in inventory.layers)
