"""The measured rates of this machine, and the file that stores them.

There is one JSON file per machine key under `$VISMOE_CACHE`, `$XDG_CACHE_HOME/vismoe` or `~/.cache/vismoe`, so a home that
several machines share holds one each. A file that is cut off, older or of another machine is ignored with a logged warning.
"""

import dataclasses
import json
import logging
import os
import tempfile
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismoe.machine.disk import filesystem_key
from vismoe.machine.facts import Facts, facts, machine_key
from vismoe.machine.rates import DiskRates, DramRates, LinkRates

SCHEMA = 2  # 1: the page cache was copied to memory that processors cached
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """The rates of one machine. `disks` holds every measured filesystem, each with its own time."""

    machine: str  # `machine_key`
    measured_unix_s: float
    facts: Facts  # at the time of the measurement
    dram: DramRates
    disks: tuple[DiskRates, ...]
    links: tuple[LinkRates, ...]
    schema: int = SCHEMA
    lossless_bytes_per_s: float | None = None  # of bfloat16 that all usable cores decode; None: by an earlier version
    packed_extra_s_per_byte: float | None = None  # of an expert in bfloat16: how much longer its lossless record is computed

    @property
    def dram_bytes_per_s(self) -> float:
        """Rate of reading memory with all usable cores, or with one if other programs kept the rest busy."""
        return max(self.dram.bytes_per_s, self.dram.single_thread_bytes_per_s)

    def best_disk_bytes_per_s(self, path: str | os.PathLike[str]) -> float | None:
        """The fastest cold rate, of both ways of reading, of the filesystem of `path`; None if it was not measured."""
        disk = disk_of(self, path)
        best = disk.best() if disk else None
        return best.bytes_per_s if best else None

    def link(self, device: str) -> LinkRates | None:
        """The rates of a GPU's link (`cuda` is `cuda:0`)."""
        name = "cuda:0" if device == "cuda" else device
        return next((link for link in self.links if link.device == name), None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Profile":
        """Raises ValueError for JSON that `to_json` did not write."""
        if isinstance(value, dict) and value.get("schema") != SCHEMA:
            raise ValueError(f"schema {value.get('schema')!r}, not {SCHEMA}")
        return typing.cast("Profile", _decode(cls, value, cls.__name__))


def disk_of(profile: Profile, path: str | os.PathLike[str]) -> DiskRates | None:
    """The rates of the filesystem on which `path` lies, or would lie; None if it was not measured."""
    key = filesystem_key(path)
    return next((disk for disk in profile.disks if disk.key == key), None)


def merged(old: Profile, new: Profile) -> Profile:
    """`new`, plus the filesystems that only `old` has."""
    known = {disk.key for disk in new.disks}
    return dataclasses.replace(new, disks=(*new.disks, *(disk for disk in old.disks if disk.key not in known)))


def profile_file(machine: str) -> Path:
    """The file for the profile of a machine key."""
    base = os.environ.get("VISMOE_CACHE")
    folder = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vismoe"
    return folder / f"machine-{machine}.json"


def load_profile() -> Profile | None:
    """The stored profile of this machine; None without a valid file."""
    machine = machine_key(facts())
    file = profile_file(machine)
    try:
        profile = Profile.from_json(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("The rates in %s are not used: %s. Fix: vismoe doctor --refresh", file, error)
        return None
    if profile.machine != machine:
        logger.warning("The rates in %s are not used: they were measured on another machine. Fix: vismoe doctor --refresh", file)
        return None
    return profile


def save_profile(profile: Profile) -> Path:
    """Replaces the file in one step; returns its path. Raises OSError if the folder cannot be written."""
    file = profile_file(profile.machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.stem, suffix=".new", delete=False) as new:
        try:
            json.dump(profile.to_json(), new, indent=1)
            new.close()
            os.replace(new.name, file)
        except BaseException:
            os.unlink(new.name)
            raise
    return file


def _decode(kind: Any, value: Any, where: str) -> Any:
    """A value of type `kind` from the result of json.loads; fields have their types, and exist unless they have a default."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
        if not isinstance(value, dict) or not needed <= value.keys() <= hints.keys():
            raise ValueError(f"{where} has other fields than {', '.join(hints)}")
        return kind(**{name: _decode(hints[name], given, f"{where}.{name}") for name, given in value.items()})
    if origin is types.UnionType:
        return None if value is None else _decode(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(inner[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {str(name): _decode(inner[1], item, where) for name, item in value.items()}
    if type(value) is kind:
        return value
    raise ValueError(f"{where} is {value!r}")
