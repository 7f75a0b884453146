"""From raw runs to results: medians with extremes, cold and warm separate, shares of the ceilings, agreement of answers. Pure.

Runs are those of `run.BenchOutcome`. Rates are tokens per second, sizes bytes, times seconds; unknown values are None.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vismoe.bench.job import COLD, EXACT, OURS, WARM, Contestant
from vismoe.config import format_bytes
from vismoe.planning.needs import decode_read_bytes
from vismoe.types import ExpertInventory

STATES = (COLD, WARM)
REFERENCES = ("transformers-eager", "transformers", "accelerate", OURS)  # the others are compared with the first that ran
# With the reference's logits; another model has none.
LEAST_CORRELATION = {EXACT: 0.9, "int8": 0.9, "int4": 0.8, "int2": 0.2, "q8_0": 0.9, "q4_k": 0.8, "q4_0": 0.8}
PHASES = ("prefill", "decode")
PRECISIONS = (EXACT, "int8", "q8_0", "int4", "q4_k", "q4_0", "int2")  # in the order of a report
MOST_CACHED_SHARE = 0.05  # most share of the weight files that may be in the page cache when a cold request begins
LEAST_READ_SHARE = 0.5  # least share of the prompt's weights that a cold request must read from storage


@dataclass(frozen=True)
class Ceilings:
    """The greatest possible speeds of the machine, and their source."""

    memory_bytes_per_s: float | None  # of the memory next to the computing device
    disk_bytes_per_s: float | None  # the best of all sizes and depths; for a run, what was measured before and after it
    link_bytes_per_s: float | None  # between the tiers; None without a real or emulated device
    how: str
    doubts: tuple[str, ...] = ()  # reasons why a ceiling is unknown or may be wrong

    def beside(self, run: Mapping[str, Any]) -> "Ceilings":
        """Those of one run."""
        return replace(self, disk_bytes_per_s=run.get("disk_bytes_per_s") or self.disk_bytes_per_s)


@dataclass(frozen=True)
class Work:
    """The least bytes of weights that each phase must read: the whole prompt, and one decoded token."""

    prefill_bytes: float | None  # None: routing is not uniform and was not counted
    decode_bytes: float
    backbone_bytes: float  # of both phases
    expert_bytes: float  # of one routed expert; the mean if they differ

    @classmethod
    def of(cls, backbone: Sequence[tuple[str, int]], inventory: Any, prompt_tokens: int, uniform: bool) -> "Work":
        fixed = decode_read_bytes(backbone)
        prefill = fixed + expert_read_bytes(inventory, prompt_tokens) if uniform else None
        experts = sum(layer.num_experts for layer in inventory.layers)
        return cls(prefill, fixed + expert_read_bytes(inventory, 1), fixed, inventory.total_bytes / experts)

    def with_experts_of(self, share: float) -> "Work":
        """The same work, if experts have `share` of their bytes."""

        def smaller(nbytes: float) -> float:
            return self.backbone_bytes + share * (nbytes - self.backbone_bytes)

        prefill = None if self.prefill_bytes is None else smaller(self.prefill_bytes)
        return Work(prefill, smaller(self.decode_bytes), self.backbone_bytes, share * self.expert_bytes)

    def with_backbone_of(self, nbytes: float) -> "Work":
        """The same work, if what is not an expert has so many bytes."""
        more = nbytes - self.backbone_bytes
        prefill = None if self.prefill_bytes is None else self.prefill_bytes + more
        return Work(prefill, self.decode_bytes + more, nbytes, self.expert_bytes)


def expert_read_bytes(inventory: ExpertInventory, tokens: int) -> float:
    """Expected bytes of the experts that `tokens` tokens of one step choose, if routing is uniform."""
    return sum(
        layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** tokens) * inventory.layout(layer.index).payload_bytes
        for layer in inventory.layers
    )


def share(nbytes: float | None, seconds: float | None, ceiling_bytes_per_s: float | None) -> float | None:
    """The share of the ceiling that `nbytes` in `seconds` reach; None if one of them is unknown."""
    if not nbytes or not seconds or not ceiling_bytes_per_s:
        return None
    return nbytes / seconds / ceiling_bytes_per_s


def observed(work: Work, runs: Sequence[Mapping[str, Any]]) -> Work:
    """`work` with the number of experts that VisMoE counted for the prompt, if it ran: routing is the same for all
    contestants."""
    counters = [request["counters"]["prefill"] for run in runs for request in run.get("requests", ()) if request["counters"]]
    if not counters:
        return work
    demanded = statistics.median(one["hits"] + one["misses"] for one in counters)
    return replace(work, prefill_bytes=work.backbone_bytes + demanded * work.expert_bytes)


def measures(request: Mapping[str, Any], work: Work, ceilings: Ceilings) -> dict[str, float | None]:
    """The results of one request."""
    tokens = {"prefill": request["prompt_tokens"], "decode": request["decode_tokens"]}
    needed = {"prefill": work.prefill_bytes, "decode": work.decode_bytes * tokens["decode"]}
    found: dict[str, float | None] = {"encode_s": request["encode_s"] or None, "prefill_s": request["prefill_s"]}
    for phase in PHASES:
        seconds, read = request[f"{phase}_s"], request[f"{phase}_disk_bytes"]
        counters = (request["counters"] or {}).get(phase)
        found |= {
            f"{phase}_tokens_per_s": tokens[phase] / seconds,
            f"{phase}_disk_bytes_per_token": None if read is None else read / tokens[phase],
            f"{phase}_memory_share": share(needed[phase], seconds, ceilings.memory_bytes_per_s),
            f"{phase}_disk_share": share(read, seconds, ceilings.disk_bytes_per_s),
        }
        if counters:  # control: the experts function without waiting and arithmetic
            control_s = counters["layer_seconds"] - counters["stall_seconds"] - counters["compute_seconds"]
            found |= {
                f"{phase}_hit_rate": _hit_rate(counters),
                f"{phase}_bytes_read_per_token": counters["bytes_read"] / tokens[phase],
                f"{phase}_bytes_copied_per_token": counters["bytes_copied"] / tokens[phase],
                f"{phase}_stall_share": counters["stall_seconds"] / seconds,
                f"{phase}_control_us_per_layer": 1e6 * control_s / counters["steps"] if counters["steps"] else None,
                f"{phase}_wasted_prefetch_bytes_per_token": counters["wasted_prefetch_bytes"] / tokens[phase],
                f"{phase}_link_share": share(counters["bytes_copied"], seconds, ceilings.link_bytes_per_s),
            }
    return found


def _hit_rate(counters: Mapping[str, float]) -> float | None:
    demanded = counters["hits"] + counters["misses"]
    return counters["hits"] / demanded if demanded else None


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """`{"median", "min", "max", "n"}` of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "n": len(known)}


def summary(
    runs: Sequence[Mapping[str, Any]],
    contestants: Sequence[Contestant],
    works: Mapping[str, Work],
    ceilings: Ceilings,
    moe_layers: int,
) -> dict[str, dict[str, Any]]:
    """One row with the same keys per contestant that ran, ordered by precision, VisMoE first.

    `cold` and `warm` hold the spread of every measure over processes (empty if nothing was measured), `first_answer_s` the time
    from the start of the process to the cold request's first token, `cold_open` that beside what it reads and computes, `moe_us`
    the time of the routed experts per MoE layer and token by phase (None if it was not requested), `token_ms` where a decoded
    token's time goes (None likewise), `failed` the reason or None, `not_cold` the reason if no cold ratio is given. VisMoE
    rows have `times_as_fast_as`: the ratio of their speed to each rival of equal or full precision, by the rival's name.
    """
    ran = {run["contestant"] for run in runs}
    ordered = sorted((one for one in contestants if one.name in ran), key=lambda one: PRECISIONS.index(one.precision))
    found = {}
    for one in ordered:
        row = _of_one([run for run in runs if run["contestant"] == one.name], works[one.name], ceilings, moe_layers)
        found[one.name] = {**dataclasses.asdict(one), "precision": one.precision, **row}
    agreed = agreement(runs, ordered)
    for name, row in found.items():
        row["agreement"] = agreed.get(name)
    for ours in (one for one in ordered if one.is_ours):
        found[ours.name]["times_as_fast_as"] = {
            rival.name: _compared(found[ours.name], found[rival.name])
            for rival in ordered
            if not rival.is_ours and rival.precision in (ours.precision, EXACT)
        }
    return found


def warnings(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Reasons to doubt the results in `summary`."""
    found = []
    for name, row in figures.items():
        same = row["agreement"]
        if same and same["equal_tokens"] == 0 and same["correlation"] is None:
            found.append(
                f"warning: {name} has no new token in common with {same['with']}: another model, or a near tie at the start"
            )
        least = LEAST_CORRELATION[row["precision"]]
        if same and same["correlation"] is not None and same["correlation"] < least:
            found.append(
                f"warning: the first logits of {name} correlate with those of {same['with']} by {same['correlation']:.3f}, and "
                f"at least {least:g} is expected: another model, or a wrong answer"
            )
        if same and not same["same_every_time"]:
            found.append(f"warning: {name} did not give the same tokens every time")
        above = [
            f"{state} {measure.replace('_', ' ')} {spread['max']:.0%}"
            for state in STATES
            for measure, spread in row[state].items()
            if spread and measure.endswith(("memory_share", "disk_share", "link_share")) and spread["max"] > 1
        ]
        if above:
            found.append(f"warning: {name} is above a ceiling ({', '.join(above)}): caches served it, or the ceiling is too low")
    return found


def _of_one(runs: Sequence[Mapping[str, Any]], work: Work, ceilings: Ceilings, moe_layers: int) -> dict[str, Any]:
    done = [run for run in runs if "failed" not in run]
    row: dict[str, Any] = {
        "repeats": len(done),
        "import_s": spread(run["import_s"] for run in done),
        "load_s": spread(run["load_s"] for run in done),
        "first_answer_s": spread(_first_answer_s(run, cold) for run in done for cold in _colds(run)),
        "cold_open": _cold_open(done, ceilings),
        "peak_bytes": max((run["peak_bytes"] or run["peak_rss_bytes"] for run in done), default=None),
        "cached_bytes": max((run["cached_bytes"] for run in done), default=None),
        "not_cold": next((reason for run in done if (reason := _not_cold(run, work))), None),
        "moe_us": _moe_us(done, moe_layers),
        "token_ms": _token_ms(done, work, ceilings),
        "parallel": _parallel(done),
        "notes": done[-1]["notes"] if done else {},
        "failed": next((run["failed"] for run in runs if "failed" in run), None),
    }
    for state in STATES:
        processes = [
            _medians([measures(request, work, ceilings.beside(run)) for request in run["requests"] if request["state"] == state])
            for run in done
        ]
        names = dict.fromkeys(name for one in processes for name in one)
        row[state] = {name: spread(one.get(name) for one in processes) for name in names}
    return row


def _colds(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [request for request in run["requests"] if request["state"] == COLD]


def _first_answer_s(run: Mapping[str, Any], cold: Mapping[str, Any]) -> float:
    seconds: float = run["import_s"] + run["load_s"] + cold["encode_s"] + cold["prefill_s"]
    return seconds


def _cold_open(runs: Sequence[Mapping[str, Any]], ceilings: Ceilings) -> dict[str, dict[str, float] | None] | None:
    """Of a start to the first token, all files cold: seconds, bytes read, seconds that a prompt takes beside waiting for experts
    (the least of all requests), and how many times as long it took as these bytes at the disk's rate and that. None where the
    system or the contestant does not count them."""
    found = []
    for run in runs:
        rate = ceilings.beside(run).disk_bytes_per_s
        read, prefills = run.get("load_disk_bytes"), [one for one in run["requests"] if (one["counters"] or {}).get("prefill")]
        for cold in _colds(run):
            if not (rate and prefills) or read is None or cold["prefill_disk_bytes"] is None:
                continue
            seconds, nbytes = _first_answer_s(run, cold), read + cold["prefill_disk_bytes"]
            compute_s = min(one["encode_s"] + one["prefill_s"] - one["counters"]["prefill"]["stall_seconds"] for one in prefills)
            ratio = seconds / (nbytes / rate + compute_s)
            found.append({"seconds": seconds, "bytes": nbytes, "compute_s": compute_s, "ratio": ratio})
    return {name: spread(one[name] for one in found) for name in found[0]} if found else None


def _medians(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Each measure of one process: the median over its requests."""
    spreads = {name: spread(one.get(name) for one in figures) for name in dict.fromkeys(name for one in figures for name in one)}
    return {name: found["median"] if found else None for name, found in spreads.items()}


def _not_cold(run: Mapping[str, Any], work: Work) -> str | None:
    """Why the cold request of a process is not compared with others: memory served part of it."""
    if run["cached_bytes"] > MOST_CACHED_SHARE * run["files_bytes"]:
        return f"{format_bytes(run['cached_bytes'])} of {format_bytes(run['files_bytes'])} of weights stayed in the page cache"
    for cold in _colds(run):
        if cold["prefill_disk_bytes"] is None:
            return "bytes read from storage are not counted here"
        read = cold["prefill_disk_bytes"] + cold["decode_disk_bytes"]
        if work.prefill_bytes is not None and read < LEAST_READ_SHARE * work.prefill_bytes:
            needs = f"the {format_bytes(work.prefill_bytes)} of weights that the request needs"
            return f"its cold request read {format_bytes(read)} of {needs} from storage; the rest was in memory after loading"
    return None


def _moe_us(runs: Sequence[Mapping[str, Any]], moe_layers: int) -> dict[str, dict[str, float] | None] | None:
    """Microseconds per MoE layer and token, by phase."""
    timed = [run for run in runs if run["moe_s"]]
    if not timed:
        return None
    tokens = {phase: timed[0]["requests"][0][count] for phase, count in zip(PHASES, ("prompt_tokens", "decode_tokens"))}
    return {phase: spread(1e6 * run["moe_s"][phase] / moe_layers / tokens[phase] for run in timed) for phase in PHASES}


def _token_ms(runs: Sequence[Mapping[str, Any]], work: Work, ceilings: Ceilings) -> dict[str, dict[str, Any]] | None:
    """Of each part of decoding, and of what lies between them: milliseconds, calls and bytes read per token, their rate, and its
    share of the memory's; medians over processes, of which `timing` is what timing adds."""
    timed = [run["token_time"] for run in runs if run.get("token_time")]
    if not timed:
        return None

    def median(values: Iterable[float]) -> float:
        return statistics.median(value / one["tokens"] for one, value in zip(timed, values))

    names, found = sorted({name for one in timed for name in one["parts"]}), {}
    for name in names:
        sums = [one["parts"].get(name, {"calls": 0, "seconds": 0.0, "bytes": 0}) for one in timed]
        calls, seconds, nbytes = (median(part[figure] for part in sums) for figure in ("calls", "seconds", "bytes"))
        found[name] = _of_part(seconds, calls, work.decode_bytes - work.backbone_bytes if name == "experts" else nbytes, ceilings)
    found = dict(sorted(found.items(), key=lambda one: -one[1]["ms"]))
    whole = median(one["seconds"] - one["timing_s"] for one in timed)
    between = whole - median(sum(part["seconds"] for part in one["parts"].values()) for one in timed)
    read = sum(part["bytes"] for part in found.values())
    found["between"] = _of_part(between, None, None, ceilings)
    found["timing"] = _of_part(median(one["timing_s"] for one in timed), None, None, ceilings)
    return found | {"token": _of_part(whole, None, read, ceilings)}


def _of_part(seconds: float, calls: float | None, nbytes: float | None, ceilings: Ceilings) -> dict[str, Any]:
    rate = nbytes / seconds if nbytes and seconds else None
    of_memory = share(nbytes, seconds, ceilings.memory_bytes_per_s)
    return {"ms": 1e3 * seconds, "calls": calls, "bytes": nbytes, "bytes_per_s": rate, "memory_share": of_memory}


def _parallel(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each number of requests that decode at once: tokens per second of all together, and by turns; bytes read per token."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for one in run.get("parallel", ()):
            found.setdefault(str(one["rows"]), []).append(one)
    return {
        rows: {
            "tokens_per_s": spread(one["tokens"] / one["seconds"] for one in several),
            "by_turns_tokens_per_s": spread(
                None if one["by_turns_s"] is None else one["tokens"] / one["by_turns_s"] for one in several
            ),
            "disk_bytes_per_token": spread(
                None if one["disk_bytes"] is None else one["disk_bytes"] / one["tokens"] for one in several
            ),
            "streamed_share": spread(one["streamed"] for one in several),
        }
        for rows, several in found.items()
    }


def _compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as fast VisMoE is, by state and phase, and for the routed experts alone; None if one contestant did not run,
    or was not really cold."""

    def ratio(state: str, phase: str) -> float | None:
        mine, other = (row[state].get(f"{phase}_tokens_per_s") for row in (ours, theirs))
        if not (mine and other) or (state == COLD and (ours["not_cold"] or theirs["not_cold"])):
            return None
        return mine["median"] / other["median"]

    def moe_ratio(phase: str) -> float | None:
        mine, other = ((row["moe_us"] or {}).get(phase) for row in (ours, theirs))
        return other["median"] / mine["median"] if mine and other else None

    found = {state: {phase: ratio(state, phase) for phase in PHASES} for state in STATES}
    same = ours["precision"] == theirs["precision"]
    return {"same_precision": same, **found, "moe": {phase: moe_ratio(phase) for phase in PHASES}}


def agreement(runs: Sequence[Mapping[str, Any]], contestants: Sequence[Contestant]) -> dict[str, dict[str, Any]]:
    """Whether the contestants computed the same model: how many new tokens, from the first on, each has in common with the
    reference, and how its first logits correlate with those of the reference; None if it had another prompt.

    Bit-identity is tested elsewhere; half-precision sums in another order make two greedy answers differ sooner or later.
    """
    answers: dict[str, list[tuple[int, Any]]] = {}
    for run in runs:
        for request in run.get("requests", ()):
            answers.setdefault(run["contestant"], []).append((request["prompt_tokens"], tuple(request["token_ids"])))
    exact = sorted(
        (one for one in contestants if one.precision == EXACT and one.way in REFERENCES),
        key=lambda one: REFERENCES.index(one.way),
    )
    reference = next((one.name for one in (*exact, *contestants) if one.name in answers), None)
    if reference is None:
        return {}
    logits = {run["contestant"]: run["logits"] for run in runs if run.get("logits")}
    prompt_tokens, expected = answers[reference][0]
    return {
        name: {
            "with": reference,
            "equal_tokens": _common(ids[0][1], expected) if ids[0][0] == prompt_tokens else None,
            "correlation": _correlation(logits.get(name), logits.get(reference)) if ids[0][0] == prompt_tokens else None,
            "tokens": len(expected),
            "same_every_time": len(set(ids)) == 1,
        }
        for name, ids in answers.items()
    }


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def _correlation(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    return statistics.correlation(ours, theirs) if ours and theirs else None


def ceilings_json(ceilings: Ceilings, work: Work, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ceilings, the disk's rate beside the runs, and the highest rates that they allow."""
    return {
        **dataclasses.asdict(ceilings),
        **dataclasses.asdict(work),
        "disk_beside": spread(run.get("disk_bytes_per_s") for run in runs),
        "decode_tokens_per_s_at_most": ceilings.memory_bytes_per_s and ceilings.memory_bytes_per_s / work.decode_bytes,
    }
