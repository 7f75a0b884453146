"""Facts about a GPU and its host that plans assume: what a context takes, how long page-locking lasts, where the link is."""

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vismoe.machine.facts import PCI_DEVICES, facts
from vismoe.pools.pool import SlabPool
from vismoe.types import RecordLayout

GIB = 2**30
NODES = Path("/sys/devices/system/node")
QUERY = (
    "driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,pci.bus_id,memory.used"
)


def facts_of_gpu(options: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The machine's facts, and with a GPU: driver and link, NUMA nodes, `context_bytes`, seconds to page-lock a GiB."""
    before = _nvidia_smi()  # before this process has a context
    keep({"machine": dataclasses.asdict(facts()), "numa_nodes": len(list(NODES.glob("node[0-9]*")))})
    if not torch.cuda.is_available():
        return {}
    keep({"nvidia_smi": before or "nvidia-smi is not there"})
    torch.ones(1, device=options["device"])
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    used, after = total - free, _nvidia_smi()
    counted = [one["memory.used"] for one in (before, after) if one and one["memory.used"].isdecimal()]
    mine = int(counted[1]) - int(counted[0]) if len(counted) == 2 else None
    keep({
        "numa_node": _numa_node(before), "device_used_bytes": used, "total_bytes": total,
        "context_bytes": None if mine is None else mine * 2**20,
    })  # fmt: skip
    return {"page_lock_s_per_gib": _page_lock_s()}


def _nvidia_smi() -> dict[str, str] | None:
    """What nvidia-smi says about the first GPU, in MiB; None without that program."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--id=0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return dict(zip(QUERY.split(","), map(str.strip, done.stdout.split(",")), strict=True)) if done.returncode == 0 else None


def _numa_node(smi: dict[str, str] | None) -> int | None:
    """The memory node next to the GPU; -1 where the system does not say."""
    address = smi["pci.bus_id"].lower()[4:] if smi else ""
    file = PCI_DEVICES / address / "numa_node"
    return int(file.read_text()) if smi and file.exists() else None


def _page_lock_s() -> dict[str, float]:
    """Seconds to page-lock a GiB: in one call, of pages untouched before and of pages that are there; as the pager does it."""
    layout, cuda, found = RecordLayout((), GIB), torch.cuda.cudart(), {}
    for name, touched in (("untouched", False), ("touched", True)):
        pool = SlabPool(layout, 1)
        if touched:
            pool.buffer.fill_(1)
        began_s = time.perf_counter()
        status = int(cuda.cudaHostRegister(pool.buffer.data_ptr(), pool.buffer.numel(), 0))
        found[name] = time.perf_counter() - began_s
        if status:
            raise RuntimeError(f"1 GiB of host memory was not page-locked (CUDA error {status}). Fix: ulimit -l unlimited")
        cuda.cudaHostUnregister(pool.buffer.data_ptr())
        del pool
    began_s = time.perf_counter()
    SlabPool(layout, 1, page_locked=True)
    return found | {"by the pager": time.perf_counter() - began_s}
