"""Advice on what would make this machine faster: one sentence each, with the numbers and the remedy. Pure."""

from collections.abc import Iterator

from vismoe.config import format_bytes
from vismoe.machine.choices import format_rate
from vismoe.machine.facts import Facts
from vismoe.machine.profile import Profile
from vismoe.machine.rates import DiskRates

SLOW_DISK_BYTES_PER_S = 1e9
MUCH_FASTER = 1.5
SLOW_LINK_BYTES_PER_S = 6e9  # PCIe 3.0 with 8 lanes; a GPU in a suitable slot reaches more
STOLEN_SHARE = 0.02
SWAP_BYTES = 256 * 2**20  # less than this is in swap on many machines anyway
BUSY_SHARE = 0.5  # share of the usable cores that other programs used while rates were measured


def advise(facts: Facts, profile: Profile | None, disk: DiskRates | None) -> tuple[str, ...]:
    """Advice from the machine's facts, its rates, and the rates of the disk that holds a checkpoint."""
    others = tuple(other for other in profile.disks if disk is None or other.key != disk.key) if profile else ()
    return (
        *_about_memory(facts),
        *_about_cores(facts),
        *_about_gpus(facts, profile),
        *(_about_disk(disk, others) if disk else ()),
        *(_about_measuring(profile) if profile else ()),
    )


def _about_memory(facts: Facts) -> Iterator[str]:
    if facts.ram_total_bytes < facts.ram_bytes:
        yield (
            f"A control group limits memory to {format_bytes(facts.ram_total_bytes)} of {format_bytes(facts.ram_bytes)}: "
            "raise it (docker run --memory, systemd MemoryMax=), so that more experts stay resident."
        )
    if facts.swap_used_bytes > SWAP_BYTES:
        yield (
            f"{format_bytes(facts.swap_used_bytes)} are in swap: each swapped-out expert costs a write and a read. "
            "Close other programs, or set a smaller --memory."
        )
    if facts.huge_pages == "never":
        yield (
            "Transparent huge pages are off (never), so large weights use 4 KiB pages: "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled."
        )


def _about_cores(facts: Facts) -> Iterator[str]:
    if facts.quota_cores is not None and facts.quota_cores < facts.affinity_cores:
        yield (
            f"A control group grants {facts.quota_cores:g} of {facts.affinity_cores} cores' time: raise it (docker run --cpus), "
            f"or set OMP_NUM_THREADS={facts.usable_cores}, because the group suspends threads beyond its grant."
        )
    elif facts.affinity_cores < facts.machine_cores:
        yield (
            f"This process may run on {facts.affinity_cores} of {facts.machine_cores} cores: "
            "see taskset -p, or docker run --cpuset-cpus."
        )
    if facts.omp_threads and facts.omp_threads.isdecimal() and int(facts.omp_threads) != facts.usable_cores:
        many = int(facts.omp_threads) > facts.usable_cores
        yield (
            f"OMP_NUM_THREADS={facts.omp_threads}, but {facts.usable_cores} cores are usable: "
            f"{'threads that share a core wait for each other' if many else 'the others are idle'}; unset it."
        )
    if facts.steal_share > STOLEN_SHARE:
        yield (
            f"Other virtual machines took {facts.steal_share:.0%} of the processor time since boot: so timings will vary; "
            "a host with dedicated cores would help."
        )


def _about_gpus(facts: Facts, profile: Profile | None) -> Iterator[str]:
    if facts.nvidia_driver and facts.cuda_build is None:
        yield (
            f"An NVIDIA driver is there, but torch {facts.versions.get('torch', '')} is a build without CUDA: install torch from "
            "https://download.pytorch.org/whl/ for your CUDA version."
        )
    elif facts.nvidia_driver and not facts.gpus:
        yield "An NVIDIA driver is there, but torch sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES."
    for link in profile.links if profile else ():
        best = link.best_bytes_per_s(page_locked=True)
        if link.page_lock_refused:
            limit = facts.memory_lock_limit_bytes
            yield (
                f"Page-locked memory was refused for {link.device} ({link.page_lock_refused}): copies to it stay slow"
                + (f"; the memory lock limit is {format_bytes(limit)}: ulimit -l unlimited." if limit is not None else ".")
            )
        elif best is not None and best < SLOW_LINK_BYTES_PER_S:
            yield f"The link to {link.device} copies {format_rate(best)}: a slot with more PCIe lanes would copy experts faster."


def _about_disk(disk: DiskRates, others: tuple[DiskRates, ...]) -> Iterator[str]:
    best = disk.best()
    if best is None or best.bytes_per_s >= SLOW_DISK_BYTES_PER_S:
        return
    slow = f"The disk of {disk.folder} reads {format_rate(best.bytes_per_s)}"
    rivals = [(rate.bytes_per_s, other.folder) for other in others if (rate := other.best())]
    fastest_bytes_per_s, folder = max(rivals, default=(0.0, ""))
    if fastest_bytes_per_s >= MUCH_FASTER * best.bytes_per_s:
        yield f"{slow}: move the checkpoint to {folder}, which reads {format_rate(fastest_bytes_per_s)}."
    else:
        yield (
            f"{slow}, so every miss is expensive: an NVMe disk reads several GB/s "
            "(vismoe doctor --path FOLDER measures another one)."
        )


def _about_measuring(profile: Profile) -> Iterator[str]:
    load, usable = profile.facts.load_average, profile.facts.usable_cores
    if load is not None and load > BUSY_SHARE * usable:
        yield (
            f"The machine was busy when it was measured (load {load:.1f} on {usable} usable cores), so its rates may be too low: "
            "run vismoe doctor --refresh when it is idle."
        )
