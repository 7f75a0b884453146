"""At which rates misses and passes are weighed, and whether misses can be computed below the device, in host memory.

The rates are the link's and host memory's, as `vismoe doctor` measured them, or nominal ones without that. Beside a GPU both
ways of a miss are measured when a model begins to serve: nominal rates were wrong by six times (docs/gpu.md), and what the CPU
computes rounds otherwise than the GPU. `deterministic` takes the nominal ones always: a choice then depends on bytes and tokens
alone.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from vismoe.config import Settings
from vismoe.errors import ConfigError, TransferError
from vismoe.kernels import cpu
from vismoe.kernels.lossless import available as lossless_isas
from vismoe.machine.choices import format_rate, read_bytes_per_s
from vismoe.machine.hardware import cores, host_memory
from vismoe.machine.profile import Profile, disk_of, load_profile
from vismoe.machine.rates import TOKENS, expert_rates, link_rate
from vismoe.paging.miss import Miss, Rates, Way, Ways
from vismoe.planning.hierarchy import LOSSLESS_SHARE, PackedRates, record_bytes_of
from vismoe.planning.needs import Footprint, Hardware
from vismoe.planning.throughput import (
    NOMINAL_CPU_BYTES_PER_S,
    NOMINAL_CPU_FLOP_PER_S,
    NOMINAL_DISK_BYTES_PER_S,
    NOMINAL_GPU_BYTES_PER_S,
    NOMINAL_GPU_FLOP_PER_S,
    NOMINAL_LINK_BYTES_PER_S,
    MachineRates,
)
from vismoe.store.expert_store import Reads
from vismoe.types import ExpertInventory, RecordLayout

# Of one thread with 32 tokens in an expert, as measured on Zen 5 (docs/benchmark.md).
FLOP_PER_S = {"portable": 2e9, "avx2": 33e9, "avx512": 70e9, "avx512bf16": 225e9, "amx": 225e9}
# A layer's way from a GPU to the CPU kernels and back, beside their reading: two readbacks, a copy, and launches one by one of
# what a graph replays otherwise (docs/gpu.md).
CPU_CALL_S = 1.4e-3
# The CPU is asked where it saves at least this share of a layer's time: the rates are measured with nothing beside them.
CPU_SAVES = 0.4
# The same where a token's layer is served in one step: threads are woken, rows are sent, and two graphs replayed instead of one.
STEP_CALL_S, STEP_SAVES = 0.1e-3, 0.2
MEASURED_BYTES = 512 * 2**20  # of experts, more than caches hold
MOST_COPIED_BYTES = 64 * 2**20  # at once; larger copies are not faster
DECODE_BYTES_PER_S = {"portable": 1e9, "avx2": 4e9, "avx512": 8e9}  # of bfloat16, by one thread, from lossless records


def ways_for(settings: Settings, device: torch.device, raw: Sequence[RecordLayout], why_no_kernels: str | None) -> Ways | None:
    """What may be done about misses of experts with these `raw` layouts, by rates that were not measured here; None where they
    wait.

    `why_no_kernels`: what keeps ours from computing them. Raises ConfigError for misses='cpu' where that cannot be.
    """
    why_not = why_no_kernels
    if "hotness" in settings.policy:
        why_not = f"policy={settings.policy!r} keeps every expert on the device, so nothing misses"
    if device.type == "cpu" and settings.emulated_link_bytes_per_s is None:
        why_not = "there is no host memory below the device here: the experts are in RAM or on disk"
    if why_not and settings.misses == "cpu":
        raise ConfigError(f"misses='cpu': {why_not}. Fix: misses='auto' (--misses auto)")
    if why_not or settings.misses == "wait":
        return None
    return Ways(settings.misses, tuple(_rates(settings, device, layout) for layout in raw), settings.deterministic)


def ways_here(
    ways: Ways | None,
    inventory: ExpertInventory,
    kernels: Sequence[cpu.ExpertKernel] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Ways | None, str]:
    """(What is done about misses when a model serves, None: they wait; the same for people.) Where there is a choice beside a
    GPU, both ways are measured. If the CPU would compute none that are demanded, these wait: nothing has to be decided then while
    the link rests, and prompts may stream. Layers of single tokens that are served in one step may ask it all the same."""
    if ways is None:
        return None, "wait"
    measured = device.type == "cuda" and kernels is not None and ways.policy == "auto" and not ways.deterministic
    if measured:
        assert kernels is not None
        each = zip(ways.rates, kernels, inventory.layouts, strict=True)
        rates = tuple(_measured(*of_geometry, device, dtype) for of_geometry in each)
        of_steps = tuple(replace(of, cpu_call_s=STEP_CALL_S, cpu_saves=STEP_SAVES) for of in rates)
        ways = replace(ways, rates=rates, step_rates=of_steps)
    link, by_cpu = (format_rate(rate) for rate in (ways.rates[0].link_bytes_per_s, ways.rates[0].cpu_bytes_per_s))
    about = f"{'measured: ' if measured else ''}the link brings experts at {link}, the CPU computes them at {by_cpu}"
    kinds = {(layer.geometry, layer.top_k, layer.num_experts) for layer in inventory.layers}
    sized = [(*kind, inventory.layouts[kind[0]].record_bytes) for kind in kinds]
    if not measured or any(_is_asked(ways, *kind) for kind in sized):
        return ways, f"{ways.policy} ({about})"
    if not any(ways.in_step(geometry, top_k, nbytes) for geometry, top_k, _, nbytes in sized):
        return None, f"wait ({about})"
    return replace(ways, in_steps_only=True), f"{ways.policy} for single tokens, else wait ({about})"


def _is_asked(ways: Ways, geometry: int, top_k: int, experts: int, nbytes: int) -> bool:
    """Whether the CPU gets any of so many misses of a token, or of a prompt's."""
    of_prompt = sorted({experts, *(2**power for power in range(experts.bit_length()))})
    numbers = [(1, count) for count in range(1, top_k + 1)] + [(TOKENS, count) for count in of_prompt]
    return any(Way.CPU in ways.choose(geometry, [Miss(nbytes, tokens)] * count, 0.0) for tokens, count in numbers)


def _rates(settings: Settings, device: torch.device, raw: RecordLayout) -> Rates:
    setup = cpu.setup()
    weights = sum(math.prod(section.shape) for section in raw.sections if len(section.shape) == 2)
    token_s = 2 * weights / (FLOP_PER_S[setup.isa] * setup.threads)
    profile = _profile(settings)
    beside = (CPU_CALL_S, CPU_SAVES) if device.type == "cuda" else ()
    return Rates(settings.emulated_link_bytes_per_s or _link_rate(profile, device), _cpu_rate(profile), token_s, *beside)


def _measured(rates: Rates, kernel: cpu.ExpertKernel, slab: RecordLayout, device: torch.device, dtype: torch.dtype) -> Rates:
    """The link's rate and the CPU's, in some tenths of a second; `rates` stay where nothing can be measured."""
    with contextlib.suppress(TransferError, torch.OutOfMemoryError):  # no pages are locked, or memory is short
        rates = replace(rates, link_bytes_per_s=link_rate(str(device), min(slab.record_bytes, MOST_COPIED_BYTES)))
        torch.cuda.empty_cache()
    there = expert_rates(kernel, slab, dtype, min(MEASURED_BYTES, host_memory()[0] // 8)) if slab.sections else None
    return replace(rates, cpu_bytes_per_s=there[0], cpu_s_per_token=there[1]) if there else rates


def upgrade_rates(settings: Settings, device: torch.device) -> Rates:
    """Of what an upgrade comes over, and of computing beside it."""
    profile = _profile(settings)
    if device.type == "cuda":
        return Rates(_link_rate(profile, device), NOMINAL_GPU_BYTES_PER_S)
    return Rates(settings.emulated_link_bytes_per_s or NOMINAL_DISK_BYTES_PER_S, _cpu_rate(profile))


def read_rate(settings: Settings, inventory: ExpertInventory, reads: Reads, direct: bool, cached: bool) -> float | None:
    """Bytes of experts per second: past the page cache (`direct`), or from it where it holds them all (`cached`); None: not
    measured."""
    profile = _profile(settings)
    disk = disk_of(profile, reads.folder) if profile else None
    return read_bytes_per_s(disk, max(layout.record_bytes for layout in inventory.layouts), direct, cached)


def machine_rates(
    needs: Footprint,
    settings: Settings,
    hardware: Hardware,
    stored_bytes: int,
    stored_bytes_per_s: float | None,
    cached: bool,
    host_share: float,
) -> MachineRates:
    """What the plan expects passes by. stored_bytes: of all experts as they are read; stored_bytes_per_s: of reading them, as
    measured, `cached` from the page cache; host_share: of the experts, that the tier below a GPU holds."""
    profile, assumed, inventory = _profile(settings), list[str](), needs.inventory

    def rate(measured: float | None, nominal: float, what: str) -> float:
        if not measured:
            assumed.append(f"{what} at {format_rate(nominal)}")
        return measured or nominal

    on_gpu, link = hardware.device == "cuda", profile.link("cuda") if profile else None
    if on_gpu:
        weights = rate(link.device_read_bytes_per_s if link else None, NOMINAL_GPU_BYTES_PER_S, "the GPU's memory")
    else:
        weights = rate(profile.dram_bytes_per_s if profile else None, NOMINAL_CPU_BYTES_PER_S, "memory")
    if cached:
        stored = rate(stored_bytes_per_s, weights / 4, "the page cache")
    else:
        stored = rate(stored_bytes_per_s, NOMINAL_DISK_BYTES_PER_S, "the disk")
    missing = stored  # of a pair, in whichever format; of one format, as many bytes of slabs as those on disk fill
    if not inventory.low_layouts:
        missing *= inventory.slab_bytes / max(1, stored_bytes)
    if settings.emulated_link_bytes_per_s is not None:
        missing = settings.emulated_link_bytes_per_s
    elif on_gpu:
        link_rate = rate(_link_rate(profile, torch.device("cuda")) if link else None, NOMINAL_LINK_BYTES_PER_S, "the link")
        if needs.encoded:
            link_rate *= inventory.slab_bytes / record_bytes_of(inventory, needs.encoded)
        missing = 1 / (host_share / link_rate + (1 - host_share) / missing)
    flop = NOMINAL_GPU_FLOP_PER_S if on_gpu else NOMINAL_CPU_FLOP_PER_S
    if needs.by_kernels and not on_gpu:
        setup = cpu.setup()
        flop = FLOP_PER_S[setup.isa] * setup.threads
    # On a CPU the cores that compute also read, and only a layer's hits are computed meanwhile: measured, it is the sum.
    overlaps = on_gpu or settings.emulated_link_bytes_per_s is not None
    return MachineRates(weights, flop, missing, overlaps=overlaps, assumed=tuple(assumed))


def packed_rates(settings: Settings, device: torch.device) -> PackedRates:
    """How fast lossless records are decoded here, and what computing from them costs, if that was measured."""
    profile = _profile(settings)
    if device.type == "cuda":  # the copy stream decodes beside the kernels; for the ring a record is read, and written, once more
        link = profile.link("cuda") if profile else None
        rate = link.device_read_bytes_per_s if link else NOMINAL_GPU_BYTES_PER_S
        return PackedRates((1 + LOSSLESS_SHARE) / rate, math.inf, () if link else ("the GPU's memory",))
    decode = profile.lossless_bytes_per_s if profile else None
    nominal = DECODE_BYTES_PER_S[lossless_isas()[-1]] * cores()
    extra = profile.packed_extra_s_per_byte if profile else None
    unmeasured = tuple(what for what, rate in (("decoding", decode), ("computing", extra)) if rate is None)
    return PackedRates(1 / (decode or nominal) if extra is None else extra, decode or nominal, unmeasured)


def _profile(settings: Settings) -> Profile | None:
    return None if settings.deterministic else load_profile()


def _link_rate(profile: Profile | None, device: torch.device) -> float:
    """Of page-locked copies to the GPU."""
    rates = profile.link(str(device)) if profile else None
    measured = rates.best_bytes_per_s(page_locked=rates.page_lock_refused is None) if rates else None
    return measured or NOMINAL_LINK_BYTES_PER_S


def _cpu_rate(profile: Profile | None) -> float:
    return profile.dram_bytes_per_s if profile else NOMINAL_CPU_BYTES_PER_S
