"""What stays on disk and how it is read: what was asked for, what was measured on this machine, and what the plan leaves free."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vismoe.config import Settings, format_bytes
from vismoe.errors import BudgetError, ConfigError
from vismoe.machine.choices import Choices, choose, fits_page_cache
from vismoe.machine.profile import load_profile
from vismoe.models.load.host_rates import machine_rates, read_rate
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.plan import Plan, plan
from vismoe.planning.throughput import UNMEASURED, MachineRates
from vismoe.store.expert_store import Reads, Stores

WORTHWHILE_TABLE_BYTES = 16 * 2**20  # smaller embeddings are held: a read for every token is not worth them


@dataclass(frozen=True)
class Reading:
    """The plan, which says how experts and embeddings are read and why, and what follows from it for loading."""

    plan: Plan
    past_cache: bool
    cold_past_cache: bool  # the same, or what the page cache lacks when it is read the first time; so is what is loaded
    embeddings_on_disk: bool
    bytes_per_s: float | None = None  # of reading experts so; None: not measured

    @property
    def chosen(self) -> Literal["auto", "cached", "direct"]:
        """The value of `Settings.reads` that leads here again."""
        return "direct" if self.past_cache else "auto" if self.cold_past_cache else "cached"


def settle_reading(needs: Footprint, settings: Settings, hardware: Hardware, reads: Reads, table_bytes: int) -> Reading:
    """Plan with everything that is settled before loading.

    `table_bytes`: token embeddings that could stay on disk, 0 where they cannot.
    Raises what `plan` raises, and ConfigError.
    """
    buffers = 2 if hardware.device == "cpu" else 1  # beside each thread that copies a native one reads (kernels/read.py)
    past_cache = dataclasses.replace(needs, scratch_bytes=needs.scratch_bytes + buffers * reads.bounce_bytes)
    draft = _draft(needs, past_cache, settings, hardware, reads, table_bytes)
    held_bytes = (draft.total_bytes if hardware.device == "cpu" else 0) + draft.host_bytes
    spare_bytes = hardware.free_host_bytes - held_bytes * hardware.local_world_size
    choices = _choose(needs, settings, hardware, spare_bytes, reads)
    if choices.cold_direct:
        needs = past_cache
    host_share = min(1.0, sum(draft.host_slabs) / max(1, draft.total_experts))
    cached = hardware.device == "cpu" and not choices.direct_reads and fits_page_cache(reads.stored_bytes, spare_bytes)
    bytes_per_s = read_rate(settings, needs.inventory, reads, choices.direct_reads, cached)
    rates = machine_rates(needs, settings, hardware, reads.stored_bytes, bytes_per_s, cached, host_share)
    settled = dataclasses.replace(settings, io_threads=choices.io_threads)
    memory, on_disk = place_table(needs, settled, hardware, table_bytes, rates)
    sentences = [choices.reasons["direct_reads"], choices.reasons["io_threads"]]
    if memory.io_threads != choices.io_threads:
        sentences[1] += f"; {memory.io_threads} in each of {hardware.local_world_size} processes"
    if on_disk:
        sentences.append(f"embeddings: {format_bytes(table_bytes)} stay on disk, a token reads its row")
    settled_plan = dataclasses.replace(memory, reading=tuple(sentences))
    return Reading(settled_plan, choices.direct_reads, choices.cold_direct, on_disk, bytes_per_s)


def _draft(
    needs: Footprint, past_cache: Footprint, settings: Settings, hardware: Hardware, reads: Reads, table_bytes: int
) -> Plan:
    """The plan without what reading past the page cache takes, which is chosen by this plan. If it is refused, the fix has to be
    enough however experts will be read."""
    try:
        return place_table(needs, settings, hardware, table_bytes)[0]
    except BudgetError as error:
        refused = error
    if settings.reads != "cached":
        threads = _choose(needs, settings, hardware, hardware.free_host_bytes, reads).io_threads
        place_table(past_cache, dataclasses.replace(settings, io_threads=threads), hardware, table_bytes)
    raise refused


def start_reading(stores: Stores, reading: Reading, settings: Settings) -> Reading:
    """Tell the stores how to read; returns what is true where the filesystem cannot. Raises ConfigError."""
    refused = stores.read_past_cache(only_cold=not reading.past_cache) if reading.cold_past_cache else None
    if refused is None:
        return reading
    if settings.reads == "direct":
        raise ConfigError(f"reads='direct': {refused}. Fix: reads='cached' (--reads cached)")
    sentences = (f"page cache: {refused}", *reading.plan.reading[1:])
    plan = dataclasses.replace(reading.plan, reading=sentences)
    return dataclasses.replace(reading, plan=plan, past_cache=False, cold_past_cache=False)


def place_table(
    needs: Footprint, settings: Settings, hardware: Hardware, table_bytes: int, rates: MachineRates = UNMEASURED
) -> tuple[Plan, bool]:
    """(the plan, whether the embeddings stay on disk): `auto` leaves them there where that makes room for experts."""
    asked = settings.embeddings
    if asked == "disk" and not table_bytes:
        raise ConfigError(
            "embeddings='disk': the embeddings of this model are tied to another weight, encoded, or not one plain table in a "
            "checkpoint. Fix: embeddings='auto' (--embeddings auto)"
        )
    if asked == "memory" or (asked == "auto" and table_bytes < WORTHWHILE_TABLE_BYTES):
        return plan(needs, settings, hardware, rates), False
    backbone = tuple((name, nbytes - (table_bytes if name == "embeddings" else 0)) for name, nbytes in needs.backbone)
    lean = plan(dataclasses.replace(needs, backbone=backbone), settings, hardware, rates)
    if asked == "disk":
        return lean, True
    try:
        held = plan(needs, settings, hardware, rates)
    except BudgetError:
        return lean, True
    if (lean.resident_experts, sum(lean.slabs)) > (held.resident_experts, sum(held.slabs)):  # of all, or in more precision
        return lean, True
    return dataclasses.replace(held, minimum_bytes=lean.minimum_bytes), False


def _choose(needs: Footprint, settings: Settings, hardware: Hardware, spare_bytes: int, reads: Reads) -> Choices:
    """How to read, from the machine's profile; what a setting names is not chosen. spare_bytes: of RAM, beyond the plan."""
    choices = choose(
        load_profile(),
        expert_bytes=max(layout.record_bytes for layout in needs.inventory.layouts),
        checkpoint_bytes=reads.stored_bytes,
        spare_bytes=spare_bytes,
        cores=hardware.cores,
        device=hardware.device,
        path=reads.folder,
    )
    reasons = dict(choices.reasons)
    if settings.reads != "auto":
        reasons["direct_reads"] = f"{'O_DIRECT' if settings.reads == 'direct' else 'page cache'}: asked for"
    if isinstance(settings.io_threads, int):
        reasons["io_threads"] = f"{settings.io_threads} thread{'s' if settings.io_threads > 1 else ''}: asked for"
    asked = settings.reads == "direct"
    direct, cold = (choices.direct_reads, choices.cold_direct) if settings.reads == "auto" else (asked, asked)
    threads = settings.io_threads if isinstance(settings.io_threads, int) else choices.io_threads
    return dataclasses.replace(choices, direct_reads=direct, cold_direct=cold, io_threads=threads, reasons=reasons)
