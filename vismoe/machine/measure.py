"""Measures this machine for some seconds: memory, one filesystem, and the links of GPUs. Writes no cache file."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from vismoe.machine.disk import disk_rates
from vismoe.machine.facts import facts, machine_key
from vismoe.machine.profile import Profile
from vismoe.machine.rates import FULL, QUICK, DiskRates, dram_rates, link_rates, lossless_rate, packed_extra


def measure(path: str | os.PathLike[str], quick: bool = True, progress: bool = False) -> Profile:
    """The profile of this machine with the filesystem of `path` (a folder, or a large file that is only read).

    About 3 s when quick, 20 s otherwise. `progress` draws a bar on stderr. Raises InputError where `path` cannot be measured.
    """
    effort, found = QUICK if quick else FULL, facts()
    devices = [f"cuda:{index}" for index in range(len(found.gpus))]
    with _bar(progress, 1 + effort.disk_points + len(devices)) as advance:
        disk = disk_rates(path, effort, advance)
        dram = dram_rates(found.usable_cores, effort.dram_bytes)
        lossless = lossless_rate(found.usable_cores, effort.dram_bytes // 4)
        extra = packed_extra(effort.dram_bytes // 2)
        advance()
        links = []
        for device in devices:
            links.append(link_rates(device))
            advance()
    return Profile(
        machine_key(found),
        time.time(),
        found,
        dram,
        (disk,),
        tuple(links),
        lossless_bytes_per_s=lossless,
        packed_extra_s_per_byte=extra,
    )


def measure_disk(path: str | os.PathLike[str], quick: bool = True, progress: bool = False) -> DiskRates:
    """The rates of the filesystem of `path` alone; arguments as for `measure`."""
    effort = QUICK if quick else FULL
    with _bar(progress, effort.disk_points) as advance:
        return disk_rates(path, effort, advance)


@contextlib.contextmanager
def _bar(shown: bool, steps: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("measuring", total=steps)
        yield lambda: bar.advance(task)
