"""The tier below the device: how many records host memory keeps. Pure; a CPU has no such tier unless a link is emulated."""

from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.config import Settings, format_bytes, parse_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.planning.apportion import LEAST_SLABS, experts_of, hand_out, least_slabs
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.parts import PlanPart, request_part, staging_part, total, workspace_part
from vismoe.planning.sizes import size_down, size_up
from vismoe.types import RecordLayout

RESERVE_BYTES = 2**30  # of a GPU machine's free RAM, not used by the tier
MOST_SHARE = 0.7  # of a GPU machine's RAM, page-locked unless more is asked for: the page cache needs some, and so do others


@dataclass(frozen=True)
class HostDivision:
    """Host memory below a device; empty without such a tier."""

    slabs: tuple[int, ...] = ()  # records per geometry; of a pair's better format
    low_slabs: tuple[int, ...] = ()  # of a pair's second format
    parts: tuple[PlanPart, ...] = ()


def host_tier(need: Footprint, settings: Settings, hardware: Hardware, io_threads: int) -> HostDivision:
    """Records and plan parts in host memory. `host_memory` bounds records, staging and what requests hold together, for all
    ranks.

    With a pair, the tier keeps records of both formats for the same share of the experts: an expert that changes its format is
    read in the other one, and a byte of either format saves equally many bytes of reading. Raises BudgetError below two records
    per geometry and format plus one per reading thread.
    """
    inventory = need.inventory
    layouts = (*(need.encoded or inventory.layouts), *inventory.low_layouts)
    geometries = len(inventory.layouts)
    formats = len(layouts) // geometries
    experts = experts_of(inventory.layers, geometries) * formats
    workspace = workspace_part(need.host_workspace_bytes)
    if hardware.device == "cpu":
        if settings.host_memory is not None:
            raise ConfigError("host_memory bounds the tier between disk and GPU, which the CPU does not have. Fix: leave it out")
        if settings.emulated_link_bytes_per_s is None:
            return HostDivision()
        both = " in both formats" if inventory.low_layouts else ""
        note = f"all experts{both}; the device's slabs alias them; outside the budget"
        part = PlanPart("host tier (emulated link)", _bytes(layouts, experts), note)
        return HostDivision(tuple(experts[:geometries]), tuple(experts[geometries:]), (part, *workspace))
    ranks = hardware.local_world_size
    asked, free = settings.host_memory, hardware.free_host_bytes
    usual = max(0, min(free - RESERVE_BYTES, int(hardware.total_host_bytes * MOST_SHARE)))
    bound = usual if asked is None else parse_bytes(asked)
    staging = [*staging_part(need, io_threads), *workspace, *request_part(settings.request_memory_bytes)]
    least = least_slabs(inventory, least=LEAST_SLABS + io_threads) * formats
    needed = (_bytes(layouts, least) + total(staging)) * ranks
    if bound < needed:
        given = f"{format_bytes(bound)} " + ("may be taken unasked" if asked is None else "were given")
        message = f"the page-locked host tier needs at least {format_bytes(needed)}, {given}"
        if needed > free:
            raise BudgetError(f"{message}; {format_bytes(free)} of RAM are free", f"a machine with {size_up(needed)} of free RAM")
        typed = size_up(needed) if parse_bytes(size_up(needed)) <= free else str(needed)
        raise BudgetError(message, f"--host-memory {typed}")
    if bound > free:
        raise BudgetError(
            f"host_memory={asked} is more than the {format_bytes(free)} of RAM that are free", f"--host-memory {size_down(free)}"
        )
    records = hand_out(experts, layouts, bound // ranks - total(staging), least)
    what = "records of both formats" if inventory.low_layouts else "experts"
    rest = "" if sum(records) == sum(experts) else "; the others stay on disk"
    how = ", lossless ones encoded" if need.encoded else ""
    part = PlanPart("host tier", _bytes(layouts, records), f"page-locked, {sum(records)} of {sum(experts)} {what}{how}{rest}")
    return HostDivision(tuple(records[:geometries]), tuple(records[geometries:]), (part, *staging))


def _bytes(layouts: Sequence[RecordLayout], counts: Sequence[int]) -> int:
    return sum(count * layout.record_bytes for count, layout in zip(counts, layouts, strict=True))
