"""The origin of results: versions, commit, and the ceilings from the machine profile."""

import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from vismoe.bench.report import Ceilings
from vismoe.config import Settings
from vismoe.errors import InputError
from vismoe.machine.measure import measure, measure_disk
from vismoe.machine.profile import Profile, load_profile, merged, save_profile


def commit() -> str | None:
    """The commit of this package's checkout, with `+changes` if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    named = "git describe --always --exclude=* --abbrev=40 --dirty=+changes".split()
    try:
        done = subprocess.run(named, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def ceilings_of(path: Path, device: str, settings: Settings, progress: bool) -> Ceilings:
    """Ceilings for weights at `path` on `device`: from the machine profile (`vismoe doctor`), or measured now and stored."""
    profile, how, doubts = _profile_of(path, progress)
    link = profile.link(device)
    memory = link.device_read_bytes_per_s if link else profile.dram_bytes_per_s
    over_link = settings.emulated_link_bytes_per_s or (link.best_bytes_per_s(page_locked=True) if link else None)
    load, usable = profile.facts.load_average, profile.facts.usable_cores
    if load is not None and load > usable:
        doubts += (f"ceilings were measured on a busy machine (load {load:.1f} on {usable} cores), so they may be too low",)
    return Ceilings(memory, profile.best_disk_bytes_per_s(path), over_link, how, doubts)


def _profile_of(path: Path, progress: bool) -> tuple[Profile, str, tuple[str, ...]]:
    """(the profile, where it comes from, what it lacks and why)."""
    kept = load_profile()
    if kept is not None and kept.best_disk_bytes_per_s(path):
        return kept, f"machine profile, measured {_age(time.time() - kept.measured_unix_s)} ago", ()
    try:
        new = replace(kept, disks=(measure_disk(path, progress=progress),)) if kept else measure(path, progress=progress)
    except InputError as error:
        doubt = f"the disk of {path} has no ceiling: {error}"
        if kept is not None:
            return kept, f"machine profile, measured {_age(time.time() - kept.measured_unix_s)} ago", (doubt,)
        return measure(tempfile.gettempdir(), progress=progress), "measured quickly before the first run", (doubt,)
    profile, what = (merged(kept, new), "machine profile, its disk") if kept else (new, "machine profile,")
    how = f"{what} measured quickly before the first run"
    try:
        save_profile(profile)
    except OSError as error:
        return profile, how, (f"the ceilings could not be stored: {error.strerror}",)
    return profile, how, ()


def _age(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours" if hours >= 2 else f"{seconds / 60:.0f} minutes"
