"""How torch's worker threads wait for work. OpenMP reads the setting once, when torch is imported.

By default they spin for about a millisecond. While experts are copied, the copying threads need those cores: on two cores a
product whose workers spin took ten times as long. Workers that sleep at once must be woken for every product. A short spin, then
sleep, is as good as sleeping while experts are copied, and 1.5 times as fast in a resident prefill (docs/benchmark.md).
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SPINS = "GOMP_SPINCOUNT"
VARIABLES = (SPINS, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # a user's own setting is respected
SHORT_SPINS = "2000"  # some microseconds
DEFAULT_SPINS = {SPINS: "300000"}  # libgomp's default


@dataclass(frozen=True)
class Waiting:
    """How worker threads wait, and why."""

    settled: bool  # set by VisMoE or by the user, before torch was imported
    ours: bool
    why: str


_waiting = Waiting(settled=False, ours=False, why="vismoe was not imported as a package")


def waiting() -> Waiting:
    """How the workers of this process wait."""
    return _waiting


def let_workers_sleep() -> None:
    """Make OpenMP's workers sleep soon, unless the user has set this or torch is imported already; called when vismoe is
    imported."""
    global _waiting
    decided = next((name for name in VARIABLES if name in os.environ), None)
    if decided:
        _waiting = Waiting(True, False, f"{decided}={os.environ[decided]} is set")
    elif "torch" in sys.modules:
        why = f"they spin: torch was imported before vismoe. Fix: import vismoe first, or set {SPINS}={SHORT_SPINS}"
        _waiting = Waiting(False, False, why)
    else:
        os.environ[SPINS] = SHORT_SPINS
        _waiting = Waiting(True, True, "they spin for some microseconds, then sleep")


def without_us(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process whose workers wait as they would without this package."""
    theirs = {name: value for name, value in environment.items() if not (name == SPINS and _waiting.ours)}
    return theirs if any(name in theirs for name in VARIABLES) else theirs | DEFAULT_SPINS
