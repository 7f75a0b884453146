"""Which comparisons are refused as unfair, which contestants cannot run, and which notes the report needs. Pure.

Fair means: the same weights at the same precision on the same device, with the same memory, page cache included; a rate is only
compared with another of the same state (cold or warm). Threads and tokens are equal because all jobs are copies of one.
Precisions are equal if experts keep every bit, or if VisMoE uses one of its formats and llama.cpp the partner type; other tensors
have the same type in all contestants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.bench.job import BITS_PER_WEIGHT, EXACT, PARTNERS, PROGRAMS, Contestant, ModelProgram
from vismoe.config import format_bytes
from vismoe.planning.sizes import size_up

NOTEWORTHY = 0.1  # share of a limit
CACHE_SIZED_BYTES = 2**28  # weights that may fit wholly or largely in a processor's last-level cache


@dataclass(frozen=True)
class Entry:
    """The weights and the device with which one contestant would run."""

    contestant: Contestant
    dtype: str  # of all weights except quantised experts: bfloat16, ...
    weights_bytes: int  # of all that it loads, experts in their format in memory
    device: str

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def way(self) -> ModelProgram:
        return PROGRAMS[self.contestant.way]


@dataclass(frozen=True)
class FairConditions:
    """Conditions that all contestants share."""

    memory_bytes: int  # of the host, usable by VisMoE: its budget on a CPU, the host tier beside a GPU
    imports_bytes: int  # of the process itself, which a limit must leave beside memory_bytes
    limit_bytes: int | None  # of each worker's control group, page cache included
    ram_bytes: int
    warm_cache: bool  # the user wants a comparison without a limit
    emulated_link: bool
    picture: bool

    @property
    def least_limit_bytes(self) -> int:
        return self.memory_bytes + self.imports_bytes

    @property
    def unused_share(self) -> float:
        """The share of the limit that is neither VisMoE's budget nor needed by its process."""
        return 1 - self.least_limit_bytes / self.limit_bytes if self.limit_bytes else 0.0


def refusals(entries: Sequence[Entry], conditions: FairConditions) -> list[str]:
    """Why these must not be compared, with fixes; empty if the comparison is fair."""
    ours = _ours(entries)
    rivals = [entry for entry in entries if not entry.contestant.is_ours]
    found = [reason for rival in rivals for reason in _differences(ours, rival)]
    found += _without_partner(entries)
    limit = conditions.limit_bytes
    if limit is not None and limit > conditions.ram_bytes:
        found.append(
            f"--limit {format_bytes(limit)} is more than the {format_bytes(conditions.ram_bytes)} of RAM here. "
            f"Fix: a --limit below {format_bytes(conditions.ram_bytes)}"
        )
    if limit is not None and limit < conditions.least_limit_bytes:
        found.append(
            f"--limit {format_bytes(limit)} is less than VisMoE's budget of {format_bytes(conditions.memory_bytes)} and the "
            f"{format_bytes(conditions.imports_bytes)} of an idle process together. "
            f"Fix: --limit {size_up(conditions.least_limit_bytes)}, or a smaller --memory"
        )
    if rivals and conditions.emulated_link:
        found.append("an emulated link slows VisMoE alone. Fix: leave out --emulated-link-bytes-per-s, or --baseline")
    if rivals and limit is None and not conditions.warm_cache and conditions.memory_bytes < ours.weights_bytes:
        found.append(
            f"VisMoE would stay within {format_bytes(conditions.memory_bytes)} of memory, but the page cache could hold all "
            f"{format_bytes(ours.weights_bytes)} of weights for others. Fix: --limit {size_up(conditions.least_limit_bytes)}, "
            "or --warm-cache to allow this comparison"
        )
    return found


def _ours(entries: Sequence[Entry]) -> Entry:
    """The largest of VisMoE's entries: the others may use as much memory."""
    return max((entry for entry in entries if entry.contestant.is_ours), key=lambda entry: entry.weights_bytes)


def _differences(ours: Entry, rival: Entry) -> list[str]:
    found = []
    if rival.dtype != ours.dtype:
        found.append(
            f"{rival.name} has {rival.dtype} weights, vismoe {ours.dtype}. "
            f"Fix: use --gguf with {ours.dtype} weights, or the same --dtype"
        )
    if rival.device != ours.device:
        found.append(f"{rival.name} runs on {rival.device}, vismoe on {ours.device}. Fix: --device {rival.device}")
    return found


def _without_partner(entries: Sequence[Entry]) -> list[str]:
    """Rivals with lossy experts for which no VisMoE entry has a partner. A rival that keeps every bit may be compared with
    any."""
    ours = {entry.contestant.precision for entry in entries if entry.contestant.is_ours} | {EXACT}
    return [
        f"{entry.name} has {entry.contestant.expert_type} experts, but no vismoe contestant has {entry.contestant.precision}. "
        f"Fix: --formats {entry.contestant.precision}"
        for entry in entries
        if entry.contestant.precision not in ours
    ]


def does_not_fit(entry: Entry, conditions: FairConditions) -> str | None:
    """Why a contestant is not started: without a limit it would exhaust the RAM. Under a limit, its control group decides."""
    if not entry.way.needs_all or entry.device != "cpu" or conditions.limit_bytes or entry.weights_bytes <= conditions.ram_bytes:
        return None
    return f"does not fit the RAM: {format_bytes(entry.weights_bytes)} of weights, {format_bytes(conditions.ram_bytes)} of RAM"


def labels(entries: Sequence[Entry], conditions: FairConditions) -> list[str]:
    """Notes that a reader of the results needs."""
    found, ours = [], _ours(entries)
    alone = all(entry.contestant.is_ours for entry in entries)
    if conditions.limit_bytes is None:
        found.append("no memory limit: after the cold request the page cache serves all; not a memory-limited comparison")
    if not alone and conditions.unused_share > NOTEWORTHY:
        found.append(
            f"VisMoE keeps within its budget of {format_bytes(conditions.memory_bytes)}, the others may use the whole limit of "
            f"{format_bytes(conditions.limit_bytes or 0)}, page cache included; without --memory the budget follows the limit"
        )
    if ours.weights_bytes < CACHE_SIZED_BYTES:
        found.append(f"{format_bytes(ours.weights_bytes)} of weights may fit processor caches: shares of DRAM say little")
    if conditions.emulated_link:
        found.append("emulated link: results are for a link that this machine does not have")
    blind = [entry.name for entry in entries if not entry.way.sees_images]
    if conditions.picture and blind:
        found.append(f"{', '.join(blind)}: only the text of the prompt, without the picture, so prefill is not comparable")
    lossy = dict.fromkeys(entry.contestant.precision for entry in entries if entry.contestant.precision != EXACT)
    return found + [_precision_label(precision, entries) for precision in lossy if not alone]


def _precision_label(precision: str, entries: Sequence[Entry]) -> str:
    """A note on what a format is compared with."""
    spent = f"{precision} ({BITS_PER_WEIGHT[precision]:g} bits per expert weight)"
    partners = {entry.contestant.expert_type for entry in entries if entry.contestant.precision == precision} - {precision}
    if not partners:
        why = "" if precision in PARTNERS else ", because llama.cpp's two-bit types are built differently"
        return f"{spent} has no rival of equal precision{why}; comparisons with others are only information"
    partner = partners.pop()
    return f"{spent} is compared with {partner} ({BITS_PER_WEIGHT[partner]:g}); all but the routed experts is the same in both"
