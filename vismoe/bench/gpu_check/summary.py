"""What the report of `vismoe gpu-check` means: shares of measured ceilings, ratios with goals, and the printed tables. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from vismoe.bench.roofline import table

CONTESTS = ("contest", "resident", "whole", "policies", "image")
QUARTER, FULL = "vismoe raw 25%", "vismoe raw 100%"
WAITS = ", misses wait"  # for their copies: what a row's name ends with
WAITING = QUARTER + WAITS
NOTHING = "-"
COLUMNS = (
    "stage", "row", "decode tokens/s", "quartiles", "first token", "hits", "link/token", "CPU/token",
    "of ceiling", "peak reserved", "over plan",
)  # fmt: skip


def summarise(report: dict[str, Any]) -> None:
    """Adds to the rows of contests their `ceiling_share` and `bytes_over_plan`, and to the report `goals`."""
    found = {row["stage"]: row["result"] for row in report["stages"]}
    link = found.get("rates", {}).get("link")
    context = found.get("facts", {}).get("context_bytes")
    for row in (row for name in CONTESTS for row in found.get(name, {}).get("rows", ())):
        row["ceiling_share"] = _ceiling_share(row, link)
        known = None not in (context, row.get("peak_reserved_bytes"), row.get("planned_bytes"))
        row["bytes_over_plan"] = row["peak_reserved_bytes"] + context - row["planned_bytes"] if known else None
    report["goals"] = list(_goals(found, link))


def _ceiling_share(row: Mapping[str, Any], link: Mapping[str, Any] | None) -> float | None:
    """Decode rate over what link and device memory allow at their measured rates, for the bytes of this row."""
    rate = row.get("decode_tokens_per_s")
    if not rate or not link or row["decode_bytes"] is None:
        return None
    best = _best(link)
    over_link = row.get("link_bytes_per_token", 0) / best if best else 0
    least_s: float = max(row["decode_bytes"] / link["device_read_bytes_per_s"], over_link)
    return rate["median"] * least_s


def _goals(found: Mapping[str, Mapping[str, Any]], link: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Ratios with goals, of the stages contest and resident; `reached` None where a row is missing."""
    rows = {(stage, row["name"]): row for stage in CONTESTS for row in found.get(stage, {}).get("rows", ())}

    def decode(stage: str, name: str) -> float | None:
        return (rows.get((stage, name), {}).get("decode_tokens_per_s") or {}).get("median")

    ours, accelerate = rows.get(("contest", QUARTER), {}), rows.get(("contest", "accelerate"), {})
    prompt = max(accelerate.get("first_token_s") or (), key=int, default="")
    mine_s, theirs_s = ((row.get("first_token_s") or {}).get(prompt) for row in (ours, accelerate))
    ways = [decode("resident", name) for name in ("transformers", "transformers-compiled")]
    theirs_best = max(filter(None, ways), default=None)
    best = _best(link)
    crossing = (rows.get(("contest", WAITING), {}).get("link_bytes_per_token") or 0) * (decode("contest", WAITING) or 0) or None
    asked: tuple[tuple[str, float | None, float | None, float, bool], ...] = (
        (f"{QUARTER}: decode over accelerate's", decode("contest", QUARTER), decode("contest", "accelerate"), 20.0, True),
        (f"{QUARTER}: first token over accelerate's", mine_s, theirs_s, 0.25, False),
        (f"{QUARTER}: decode over our own at 100%", decode("contest", QUARTER), decode("contest", FULL), 0.4, True),
        (f"{WAITING}: bytes over the link while decoding, over its rate", crossing, best, 0.85, True),
        ("resident: decode over the better of transformers", decode("resident", FULL), theirs_best, 0.9, True),
        ("resident: decode of int4 over bfloat16", decode("resident", "vismoe int4 100%"), decode("resident", FULL), 1.5, True),
    )  # fmt: skip
    for name, mine, theirs, goal, at_least in asked:
        ratio = mine / theirs if mine and theirs else None
        reached = None if ratio is None else (ratio >= goal if at_least else ratio <= goal)
        yield {"name": name, "ratio": ratio, "goal": f"{'>=' if at_least else '<='} {goal:g}", "reached": reached}


def _best(link: Mapping[str, Any] | None) -> float | None:
    """Bytes per second of page-locked copies."""
    rates = link["rates"] if link else ()
    return max((one["bytes_per_s"] for one in rates if one["page_locked"]), default=None)


# ------------------------------------------------------------------ printed
def printed(report: Mapping[str, Any]) -> str:
    """The tables of a report."""
    parts = [table(("stage", "status", "seconds", "found"), [_stage(row) for row in report["stages"]])]
    copies = _result(report, "rates").get("copies", ())
    if copies:
        best: dict[tuple[str, int], float] = {}
        for one in copies:
            key = (one["kind"], one["request_bytes"])
            best[key] = max(best.get(key, 0.0), one["bytes_per_s"])
        sizes = sorted({size for _, size in best})
        kinds = list(dict.fromkeys(kind for kind, _ in best))
        head = ("GB/s", *(f"{size / 1024:g} KiB" if size < 2**20 else f"{size / 2**20:g} MiB" for size in sizes))
        parts.append(table(head, [[kind, *(_number(best.get((kind, size)), 1e9) for size in sizes)] for kind in kinds]))
    if delays := _result(report, "rates").get("delays_us"):
        parts.append(table(("delay", "us"), [[name, f"{us:.1f}"] for name, us in delays.items()]))
    rows = [_contest_row(name, row) for name in CONTESTS for row in _result(report, name).get("rows", ())]
    if rows:
        parts.append(table(COLUMNS, rows))
    if known := [goal for goal in report.get("goals", ()) if goal["ratio"] is not None]:
        words = [[one["name"], f"{one['ratio']:.2f}", one["goal"], "reached" if one["reached"] else "missed"] for one in known]
        parts.append(table(("ratio", "is", "goal", ""), words))
    if report.get("not_done"):
        parts.append("\n".join(["Not done:", *(f"- {line}" for line in report["not_done"])]))
    return "\n\n".join(parts)


def _result(report: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    return next((row["result"] for row in report["stages"] if row["stage"] == stage), {})


def _stage(row: Mapping[str, Any]) -> tuple[str, ...]:
    result = row["result"]
    if row["failed"]:
        words = row["failed"].splitlines()[0][:150]
    elif "passed" in result:
        why = f": {'; '.join(result['reasons'])[:150]}" if result["reasons"] else ""
        words = f"{result['passed']} passed, {result['skipped']} skipped{why}"
    elif "rows" in result:
        words = f"{len(result['rows'])} rows of {result.get('layers', '?')} MoE layers"
    elif "machine" in result:
        gpus = ", ".join(gpu["name"] for gpu in result["machine"]["gpus"]) or "no GPU that torch sees"
        locks = result.get("page_lock_s_per_gib")
        lock = "; page-locking takes " + ", ".join(f"{s:.2f} s/GiB {name}" for name, s in locks.items()) if locks else ""
        context = result.get("context_bytes")
        words = gpus + (f"; a context takes {context / 2**20:.0f} MiB" if context else "") + lock
    else:
        words = result.get("batch_copy", NOTHING)
    return row["stage"], row["status"], f"{row['seconds']:.0f}", words


def _contest_row(stage: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["failed"]:
        return (stage, row["name"], "failed", *[NOTHING] * (len(COLUMNS) - 3))
    rate = row["decode_tokens_per_s"]
    return (
        stage,
        row["name"],
        _number(rate and rate["median"]),
        f"{rate['low']:.1f}-{rate['high']:.1f}" if rate else NOTHING,
        ", ".join(f"{seconds:.2f} s ({tokens})" for tokens, seconds in row["first_token_s"].items()),
        NOTHING if row.get("hits") is None else f"{row['hits']:.0%}",
        _number(row.get("link_bytes_per_token"), 1e9, " GB"),
        _number(row.get("cpu_bytes_per_token"), 1e9, " GB"),
        NOTHING if row.get("ceiling_share") is None else f"{row['ceiling_share']:.0%}",
        _number(row.get("peak_reserved_bytes"), 1e9, " GB"),
        _number(row.get("bytes_over_plan"), 1e9, " GB"),
    )


def _number(value: float | None, unit: float = 1.0, word: str = "") -> str:
    return NOTHING if value is None else f"{value / unit:.2f}{word}"
