"""What the machine can still provide: free memory of the device and the host, and cores. Inspects, allocates nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from vismoe.errors import ConfigError
from vismoe.planning.needs import Hardware
from vismoe.ranges import shown

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 2**60  # cgroup version 1 reports a number near 2**63 if there is no limit


def probe(device: str | torch.device | None = None) -> Hardware:
    """Free memory now, within control group limits; `device` None selects a GPU if there is one.

    Raises ConfigError for a device that does not exist.
    """
    kind = torch_device(device)
    free_host, total_host = host_memory()
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if kind.type == "cpu":
        return Hardware("cpu", free_host, total_host, free_host, cores(), ranks, total_host)
    free, total = torch.cuda.mem_get_info(kind)
    return Hardware("cuda", free, total, free_host, cores(), ranks, total_host, torch.cuda.memory_reserved(kind))


def torch_device(device: str | torch.device | None) -> torch.device:
    """The device to run on, a GPU always with its index, by which tensors are compared: `cuda` is this process's GPU.

    None selects a GPU if there is one. Raises ConfigError for an unknown or missing device.
    """
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if device is not None and not isinstance(device, str | torch.device):
        raise ConfigError(f"device={shown(device)} is not a device; choose cpu, cuda or e.g. cuda:1. Fix: device={usual!r}")
    try:
        kind = torch.device(usual if device is None else device)
    except (RuntimeError, ValueError) as error:  # ValueError: half a surrogate pair
        raise ConfigError(
            f"device={shown(device)} is not a device; choose cpu, cuda or e.g. cuda:1. Fix: device={usual!r}"
        ) from error
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(device)!r}: choose cpu or cuda")
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r}: torch {torch.__version__} sees no GPU; choose cpu")
    if kind == torch.device("cuda"):
        kind = torch.device("cuda", _own_gpu())
    if kind.type == "cuda" and kind.index >= torch.cuda.device_count():
        raise ConfigError(f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs. Fix: device='cuda'")
    return kind


def _own_gpu() -> int:
    """The index of the GPU of this process: that of its rank where several processes have one each, otherwise torch's own."""
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and int(rank) < torch.cuda.device_count() else torch.cuda.current_device()


def cores() -> int:
    """Cores whose time this process may use: its affinity, limited by what control groups grant."""
    quota = cpu_quota()
    return affinity_cores() if quota is None else max(1, min(affinity_cores(), int(quota)))


def affinity_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(groups: Path = CGROUPS, self_file: Path = SELF) -> float | None:
    """Processor time in cores that the tightest control group (version 1 or 2) grants; None without a limit."""
    granted = [quota for folder, _ in _groups("cpu", groups, self_file) if (quota := _quota(folder)) is not None]
    return min(granted, default=None)


def _groups(controller: str, groups: Path, self_file: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of this process's group in every hierarchy with that controller, and of the groups
    that contain it."""
    for line in self_file.read_text().splitlines() if self_file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = groups
        elif controller in controllers.split(","):
            root = next((groups / name for name in (controller, controllers) if (groups / name).is_dir()), groups)
        else:
            continue
        here = root / path.lstrip("/")
        yield from ((folder, controllers == "") for folder in (here, *here.parents) if folder == root or root in folder.parents)


def _quota(folder: Path) -> float | None:
    together, apart = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if together.exists():  # version 2: "max 100000" or "150000 100000"
        quota, period = together.read_text().split()
    elif apart.exists():
        quota, period = apart.read_text().strip(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def host_memory() -> tuple[int, int]:
    """(free, total) bytes of RAM within the tightest control group limit; page cache counts as free."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in group_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def group_limits(groups: Path = CGROUPS, self_file: Path = SELF) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every limited memory control group that contains this process."""
    limits = []
    for folder, is_second in _groups("memory", groups, self_file):
        names = ("memory.max", "memory.current", "inactive_file")
        limits += _limit(
            folder, *(names if is_second else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
        )
    return limits


def _limit(folder: Path, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    limit_file, used_file = folder / limit_name, folder / used_name
    if not (limit_file.exists() and used_file.exists()):
        return []
    text = limit_file.read_text().strip()
    if text == "max" or int(text) >= UNLIMITED_BYTES:
        return []
    stat = folder / "memory.stat"
    counters = dict(line.split(" ", 1) for line in stat.read_text().splitlines()) if stat.exists() else {}
    return [(int(text), max(0, int(used_file.read_text()) - int(counters.get(cache_name, 0))))]
