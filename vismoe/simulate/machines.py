"""Machines that one does not have, put together from a table of parts (`machines.toml`, or an edited copy of it).

In `rtx4060-8gb, ddr5-5600 64GB, pcie4x8, nvme 5GB/s` a part has its name in the table, and behind it what differs. A kind (`gpu`,
`ram`, `link`, `disk`) with its own figures is a part as well: `gpu 24GB 1000GB/s`. `here` stands for this machine's RAM, disk and
processor, as `vismoe doctor` measured them.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vismoe.errors import ConfigError
from vismoe.kernels import cpu
from vismoe.machine.hardware import cores, host_memory
from vismoe.machine.profile import disk_of, load_profile
from vismoe.models.load.host_rates import FLOP_PER_S
from vismoe.planning.needs import Hardware
from vismoe.planning.throughput import UNMEASURED

TABLE = Path(__file__).with_name("machines.toml")
KINDS = ("gpu", "ram", "link", "disk", "cpu")
SYSTEM_BYTES = 2 * 2**30  # of RAM that other programs hold: an assumption
CONTEXT_BYTES = 2**29  # of a GPU's memory that its context and a desktop hold: an assumption
RAM_SIZES_GB = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # that are sold
FIGURE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b(/s)?", re.I)
DECODE_SHARE = 0.75  # of the rate at which a processor reads memory, what the matrices of a token reach (docs/simulate.md)
COPY_SHARE = 0.5  # of the rate at which a page cache is copied for a while, what copies reach beside a layer's computing
READ_SHARE = 0.75  # of a disk's rate, what the reads of a pass reach: nothing is read between two layers' misses
REQUEST_BYTES = 8 * 2**20  # an expert in 16 bits, about: at this size the measured rate of a disk is looked up
UNIT_GB = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


@dataclass(frozen=True)
class HardwarePart:
    """One part. Rates in 10^9 bytes and 10^12 operations per second, as published, or measured on this machine."""

    kind: str
    name: str
    gb_per_s: float = 0.0
    memory_gb: float = 0.0  # of 2^30 bytes
    tflops: float = 0.0
    cores: int = 1
    link: str = ""  # of a GPU: the name of its own link
    price: float | None = None  # None: it is not for sale
    measured: bool = False
    cached_gb_per_s: float = 0.0  # of a disk: from the page cache, where that was measured

    def __str__(self) -> str:
        size = f" {self.memory_gb:g}GB" if self.kind == "ram" else ""
        return self.name + size


@dataclass(frozen=True)
class VirtualMachine:
    """Parts, and the rates that are expected of them. Without a GPU, a link is an emulated one: everything lies behind it."""

    ram: HardwarePart
    disk: HardwarePart
    cpu: HardwarePart
    gpu: HardwarePart | None = None
    link: HardwarePart | None = None
    efficiency: tuple[tuple[str, float], ...] = ()
    assumed: tuple[str, ...] = ()  # parts that were not named, for people
    layer_s: float = UNMEASURED.layer_s  # of a layer beside its arithmetic, as in the plan's expectation
    row_s: float = UNMEASURED.row_s

    def __str__(self) -> str:
        return ", ".join(str(part) for part in self.parts)

    @property
    def parts(self) -> tuple[HardwarePart, ...]:
        return tuple(part for part in (self.gpu, self.ram, self.link, self.disk, self.cpu) if part is not None)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.gpu is None else "cuda"

    def _reached(self, part: HardwarePart) -> float:
        """Bytes per second."""
        share = 1.0 if part.measured else dict(self.efficiency).get(part.kind, 1.0)
        return part.gb_per_s * 1e9 * share

    @property
    def weights_bytes_per_s(self) -> float:
        """Of weights in the memory of the device, to compute with them."""
        return self._reached(self.gpu) if self.gpu is not None else self.host_bytes_per_s

    @property
    def host_bytes_per_s(self) -> float:
        """Of weights in RAM, for the processor to compute with them."""
        return self._reached(self.ram) * DECODE_SHARE

    @property
    def disk_bytes_per_s(self) -> float:
        """Of experts that miss."""
        return self._reached(self.disk) * READ_SHARE

    @property
    def cached_bytes_per_s(self) -> float:
        """Of what the page cache holds: a copy, which reads and writes, and is read again."""
        return self.disk.cached_gb_per_s * 1e9 * COPY_SHARE or self._reached(self.ram) / 4

    @property
    def link_bytes_per_s(self) -> float | None:
        """None: experts come from disk or page cache, straight into memory."""
        return self._reached(self.link) if self.link is not None else None

    @property
    def flop_per_s(self) -> float:
        return self.cpu.tflops * 1e12 if self.gpu is None else self.gpu.tflops * 1e12 * dict(self.efficiency).get("tflops", 1.0)

    def hardware(self) -> Hardware:
        """What would be free on it."""
        ram = int(self.ram.memory_gb * 2**30)
        host = max(1, ram - SYSTEM_BYTES)
        if self.gpu is None:
            return Hardware("cpu", host, ram, host, self.cpu.cores, total_host_bytes=ram)
        memory = int(self.gpu.memory_gb * 2**30)
        return Hardware("cuda", max(1, memory - CONTEXT_BYTES), memory, host, self.cpu.cores, total_host_bytes=ram)


@dataclass(frozen=True)
class Upgrade:
    """One part in the place of another, or a first GPU."""

    machine: VirtualMachine
    part: HardwarePart
    price: float

    def __str__(self) -> str:
        return f"{self.part} (about {self.price:.0f} dollars)"


def here(path: str | Path) -> list[HardwarePart]:
    """RAM, processor and the disk of `path`, as `vismoe doctor` measured them. Raises ConfigError without that."""
    profile = load_profile()
    disk = disk_of(profile, path) if profile is not None else None
    best = disk.best(request_bytes=REQUEST_BYTES) if disk is not None else None
    if profile is None or disk is None or best is None:
        raise ConfigError(f"machine 'here': the disk of {path} is not measured. Fix: vismoe doctor --path {path}")
    kernels = cpu.setup()
    flop = FLOP_PER_S[kernels.isa] * kernels.threads
    memory_gb = host_memory()[1] / 2**30
    return [
        HardwarePart("ram", "here", profile.dram_bytes_per_s / 1e9, memory_gb, measured=True),
        HardwarePart("disk", "disk", best.bytes_per_s / 1e9, measured=True, cached_gb_per_s=disk.cached_bytes_per_s / 1e9),
        HardwarePart("cpu", "processor", tflops=flop / 1e12, cores=cores(), measured=True),
    ]


class PartsTable:
    """The parts of a file in the form of `machines.toml`."""

    def __init__(self, path: str | Path | None = None):
        """Raises ConfigError for a file that cannot be read, or whose entries are not as in `machines.toml`."""
        self.path = Path(path) if path is not None else TABLE
        try:
            values = tomllib.loads(self.path.read_text())
            self.usual: dict[str, Any] = values["usual"]
            self.routing: dict[str, dict[str, Any]] = values["routing"]
            self.efficiency = tuple((name, float(share)) for name, share in values["efficiency"].items())
            self.parts = {name: self._part(kind, name, entry) for kind in KINDS for name, entry in values[kind].items()}
            self._gb_prices = {name: entry.get("price_per_gb") for name, entry in values["ram"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{self.path} is no table of parts: {type(error).__name__}: {error}. Fix: edit a copy of {TABLE}"
            ) from error

    @staticmethod
    def _part(kind: str, name: str, entry: dict[str, Any]) -> HardwarePart:
        return HardwarePart(kind, name, **{key: value for key, value in entry.items() if key != "price_per_gb"})

    def machine(self, text: str, folder: str | Path = ".") -> VirtualMachine:
        """The machine that `text` describes; the disk of `here` is that of `folder`. Raises ConfigError."""
        chosen: dict[str, HardwarePart] = {}
        for word in filter(None, (each.strip() for each in text.split(","))):
            for part in here(folder) if word == "here" else [self._read(word)]:
                if part.kind in chosen:
                    raise ConfigError(f"machine {text!r}: {chosen[part.kind].name} and {part.name} are both a {part.kind}")
                chosen[part.kind] = part
        if not chosen:
            raise ConfigError(f"machine {text!r} names no part. Fix: e.g. --machine 'rtx4060-8gb, ddr5-5600 32GB, nvme'")
        assumed = [str(chosen.setdefault(kind, self.parts[self.usual[kind]])) for kind in ("disk", "cpu") if kind not in chosen]
        ram = chosen.get("ram", self.parts[self.usual["ram"]])
        if not ram.memory_gb:
            ram = dataclasses.replace(ram, memory_gb=float(self.usual["ram_gb"]))
            assumed.append(str(ram))
        price = self._gb_prices.get(ram.name)  # none for one with figures of its own
        chosen["ram"] = dataclasses.replace(ram, price=price * ram.memory_gb if price is not None else None)
        gpu = chosen.get("gpu")
        if gpu is not None:
            chosen["link"] = self._link(gpu, chosen.get("link"))
        return VirtualMachine(
            chosen["ram"], chosen["disk"], chosen["cpu"], gpu, chosen.get("link"), self.efficiency, tuple(assumed)
        )

    def _link(self, gpu: HardwarePart, slot: HardwarePart | None) -> HardwarePart:
        """The slower of the card's own link and the slot's."""
        own = self.parts.get(gpu.link)
        links = [link for link in (slot, own) if link is not None]
        if not links:
            raise ConfigError(f"machine: {gpu.name} names no link. Fix: add one, e.g. pcie4x8 or 'link 12GB/s'")
        return min(links, key=lambda link: link.gb_per_s)

    def _read(self, word: str) -> HardwarePart:
        name, _, rest = word.partition(" ")
        part = self.parts.get(name.lower())
        if name.lower() in KINDS:
            part = HardwarePart(name.lower(), word.lower(), tflops=20.0 if name.lower() == "gpu" else 0.0)
        if part is None:
            near = difflib.get_close_matches(name.lower(), self.parts, n=3, cutoff=0.5)
            known = "; ".join(f"{kind}: {', '.join(n for n, p in self.parts.items() if p.kind == kind)}" for kind in KINDS)
            meant = f" (did you mean {', '.join(near)}?)" if near else ""
            raise ConfigError(f"no such part: {name!r}{meant}. Known: {known}; here; {self.path} has their figures")
        figures = FIGURE.findall(rest)
        if FIGURE.sub("", rest).strip():
            raise ConfigError(f"{word!r}: behind a part stand sizes and rates only. Fix: e.g. '{name} 32GB', '{name} 5GB/s'")
        for number, unit, rate in figures:
            value = float(number) * UNIT_GB[unit.lower()]
            told = (
                part.name
                if (part.kind == "ram" and not rate) or part.name == word.lower()
                else f"{part.name} {number}{unit}B{rate}"
            )
            changed: dict[str, Any] = {"name": told, "gb_per_s" if rate else "memory_gb": value}
            part = dataclasses.replace(part, **changed)
        if part.kind == "cpu" and figures:
            raise ConfigError(f"{word!r}: a processor has neither size nor rate here. Fix: a name from {self.path}")
        if part.kind in ("disk", "link") and part.memory_gb:
            raise ConfigError(f"{word!r}: a {part.kind} has a rate and no size here. Fix: e.g. '{name} 5GB/s'")
        missing = [w for w, v in (("rate", part.gb_per_s), ("size", part.memory_gb or part.kind != "gpu")) if not v]
        if missing and part.kind != "cpu":
            raise ConfigError(f"{word!r} has no {' and no '.join(missing)}. Fix: e.g. 'gpu 24GB 1000GB/s', 'link 12GB/s'")
        if name.lower() == "cpu":
            raise ConfigError(f"{word!r}: a processor is named. Fix: {', '.join(n for n in self.parts if n.startswith('cpu'))}")
        return part

    def upgrades(self, machine: VirtualMachine) -> Iterator[Upgrade]:
        """Every other part that this machine could have, the cheapest first: at its full price, the old one is not sold."""
        found = [change for change in self._changes(machine) if change.part.price is not None]
        yield from sorted(found, key=lambda change: (change.price, change.part.name))

    def _changes(self, machine: VirtualMachine) -> Iterator[Upgrade]:
        for part in self.parts.values():
            if part.kind == "gpu" and part.name != (machine.gpu.name if machine.gpu else ""):
                slot = machine.link if machine.gpu is None or machine.link is None else None
                if machine.gpu is not None and machine.link is not None and machine.link.name != machine.gpu.link:
                    slot = machine.link  # it was narrower than the card's own
                changed = dataclasses.replace(machine, gpu=part, link=self._link(part, slot))
                yield Upgrade(changed, part, part.price or 0.0)
            if part.kind == "disk" and part.gb_per_s > machine.disk.gb_per_s:
                yield Upgrade(dataclasses.replace(machine, disk=part), part, part.price or 0.0)
        each = self._gb_prices.get(machine.ram.name)
        for size in RAM_SIZES_GB:
            if each is not None and size > machine.ram.memory_gb:
                ram = dataclasses.replace(machine.ram, memory_gb=float(size), price=each * size)
                yield Upgrade(dataclasses.replace(machine, ram=ram), ram, each * size)
