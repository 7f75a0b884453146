"""What the machine has, found by inspection: nothing is measured or allocated. Sizes in bytes.

On Linux the facts come from /proc and /sys; elsewhere facts that cannot be read are None, empty or zero.
"""

import functools
import hashlib
import os
import platform
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from vismoe.machine.hardware import affinity_cores, cpu_quota, host_memory

# Features that VisMoE's kernels, or the libraries below torch, have separate code for: the name in /proc/cpuinfo, and the usual
# name.
FEATURES = {
    name: name
    for name in (
        "avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_vbmi avx512_vbmi2 gfni avx512_bf16 avx512_fp16 avx_vnni "
        "amx_tile amx_int8 amx_bf16 sve sve2 bf16 i8mm"
    ).split()
} | {"asimd": "neon", "asimddp": "dotprod", "asimdhp": "fp16", "neon": "neon"}
ARM_MAKERS = {"0x41": "ARM", "0x48": "HiSilicon", "0x4e": "NVIDIA", "0x51": "Qualcomm", "0x61": "Apple", "0xc0": "Ampere"}
PACKAGES = ("vismoe", "torch", "transformers", "numpy")
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    memory_bytes: int
    compute_capability: str  # "9.0"
    pci_link: str | None  # "32.0 GT/s x16", as negotiated now: an idle GPU may have lowered it


@dataclass(frozen=True)
class Facts:
    """The state of the machine, as this process sees it at one moment."""

    system: str
    cpu: str
    features: tuple[str, ...]
    machine_cores: int  # logical
    affinity_cores: int  # cores that this process may run on
    quota_cores: float | None  # processor time that a control group grants, in cores
    ram_bytes: int  # of the machine
    ram_total_bytes: int  # that a control group allows
    ram_free_bytes: int  # page cache counts as free
    swap_used_bytes: int
    memory_lock_limit_bytes: int | None
    huge_pages: str | None  # transparent ones: always, madvise or never
    steal_share: float  # of processor time since boot, taken by other virtual machines
    load_average: float | None  # processes that ran or waited to run, over the last minute
    omp_threads: str | None  # OMP_NUM_THREADS
    libc: str
    allocator: str | None  # a preloaded library that replaces libc's allocator
    gpus: tuple[Gpu, ...]
    cuda_build: str | None  # of torch; None for a build without CUDA
    nvidia_driver: bool
    versions: dict[str, str]

    @property
    def usable_cores(self) -> int:
        """Threads that can run at the same time without being throttled."""
        quota = self.affinity_cores if self.quota_cores is None else int(self.quota_cores)
        return max(1, min(self.affinity_cores, quota))


def facts() -> Facts:
    """The facts now."""
    cpu, features = cpu_of(CPUINFO.read_text()) if CPUINFO.exists() else (None, ())
    free, total = host_memory()
    lock_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    times = psutil.cpu_times()
    return Facts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu or platform.processor() or platform.machine(),
        features=features,
        machine_cores=os.cpu_count() or 1,
        affinity_cores=affinity_cores(),
        quota_cores=cpu_quota(),
        ram_bytes=psutil.virtual_memory().total,
        ram_total_bytes=total,
        ram_free_bytes=free,
        swap_used_bytes=psutil.swap_memory().used,
        memory_lock_limit_bytes=None if lock_limit == resource.RLIM_INFINITY else lock_limit,
        huge_pages=chosen_of(HUGE_PAGES.read_text()) if HUGE_PAGES.exists() else None,
        steal_share=getattr(times, "steal", 0.0) / max(sum(times), 1.0),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        libc=_libc(),
        allocator=os.environ.get("LD_PRELOAD") or os.environ.get("DYLD_INSERT_LIBRARIES"),
        gpus=tuple(gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else (),
        cuda_build=torch.version.cuda,
        nvidia_driver=DRIVER.exists(),
        versions={"python": platform.python_version(), **package_versions(PACKAGES), "torch": torch.__version__},
    )


def cpu_of(cpuinfo: str) -> tuple[str | None, tuple[str, ...]]:
    """(model name, relevant features) from the text of /proc/cpuinfo, for x86 and ARM."""
    first: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    flags = set(first.get("flags", first.get("Features", "")).split())
    features = tuple(dict.fromkeys(ours for flag, ours in FEATURES.items() if flag in flags))
    if "model name" in first:
        return first["model name"], features
    if "CPU part" not in first:
        return None, features
    maker = first.get("CPU implementer", "?")
    return f"{ARM_MAKERS.get(maker, maker)} core, part {first['CPU part']}", features


def chosen_of(text: str) -> str | None:
    """`always [madvise] never` -> `madvise`."""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def gpu(index: int) -> Gpu:
    found: Any = torch.cuda.get_device_properties(index)
    # Not in every build of torch.
    address: list[Any] = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    link = None if None in address else pci_link(PCI_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*address))
    return Gpu(found.name, found.total_memory, f"{found.major}.{found.minor}", link)


def pci_link(folder: Path) -> str | None:
    """`32.0 GT/s x16` of a PCI device's folder in /sys; None where it is not readable."""
    speed, width = folder / "current_link_speed", folder / "current_link_width"
    if not (speed.exists() and width.exists()):
        return None
    return f"{speed.read_text().strip().removesuffix(' PCIe')} x{width.read_text().strip()}"


def machine_key(found: Facts) -> str:
    """Identifies the machine as this process may use it: rates measured under another key are not valid here."""
    disk = os.statvfs("/")
    parts = (
        found.cpu,
        f"{found.machine_cores} cores, {found.usable_cores} usable",
        f"{round(found.ram_bytes / 2**30)} GiB",
        f"{disk.f_fsid:x} {disk.f_blocks * disk.f_frsize}",
        *(gpu.name for gpu in found.gpus),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package."""
    return {package: _version(package) for package in packages}


@functools.cache  # platform looks through the interpreter's file
def _libc() -> str:
    return " ".join(platform.libc_ver()).strip() or "unknown"


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
