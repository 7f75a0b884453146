"""The tier below the device: how many records host memory keeps. Pure; nothing on a CPU unless a link is emulated."""

from vismoe.config import Settings, format_bytes, parse_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.memory.apportion import LEAST_SLABS, experts_of, fill, least_slabs, record_bytes
from vismoe.memory.needs import Footprint, Hardware
from vismoe.memory.parts import Part, staging_part, total, workspace_part
from vismoe.memory.sizes import size_down, size_up

RESERVE_BYTES = 2**30  # of a GPU machine's free RAM, left for everything else


def host_tier(
    need: Footprint, settings: Settings, hardware: Hardware, io_threads: int
) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    """(records per geometry, parts in host memory). `host_memory` bounds records and staging together, for all ranks.

    Raises BudgetError below two records per geometry and one per reading thread.
    """
    inventory = need.inventory
    experts = experts_of(inventory.layers, len(inventory.layouts))
    workspace = workspace_part(need.host_workspace_bytes)
    if hardware.device == "cpu":
        if settings.host_memory is not None:
            raise ConfigError("host_memory bounds the tier between disk and GPU, and this runs on the CPU. Fix: leave it out")
        if settings.emulated_link_bytes_per_s is None:
            return (), ()
        note = "all experts; the device's slabs alias them, and this is outside the budget"
        return tuple(experts), (Part("host tier (emulated link)", inventory.slab_bytes, note), *workspace)
    ranks = hardware.local_world_size
    asked, free = settings.host_memory, hardware.free_host_bytes
    bound = max(0, free - RESERVE_BYTES) if asked is None else parse_bytes(asked)
    staging = [*staging_part(need, io_threads), *workspace]
    least = least_slabs(inventory, least=LEAST_SLABS + io_threads)
    needed = (record_bytes(inventory, least) + total(staging)) * ranks
    if bound < needed:
        given = f"{format_bytes(bound)} " + ("are free beside the reserve" if asked is None else "were given")
        message = f"the page-locked host tier needs at least {format_bytes(needed)}, {given}"
        if needed > free:
            raise BudgetError(f"{message}; {format_bytes(free)} of RAM are free", f"a machine with {size_up(needed)} of free RAM")
        raise BudgetError(message, f"--host-memory {size_up(needed)}")
    if bound > free:
        raise BudgetError(
            f"host_memory={asked} is more than the {format_bytes(free)} of RAM that are free", f"--host-memory {size_down(free)}"
        )
    records = fill(inventory, 0, bound // ranks - total(staging), least)
    rest = "" if sum(records) == sum(experts) else "; the others stay on disk"
    note = f"page-locked, {sum(records)} of {sum(experts)} experts{rest}"
    return records, (Part("host tier", record_bytes(inventory, records), note), *staging)
