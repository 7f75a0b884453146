"""Prints the report of a benchmark as tables. The input is the object of `--json`."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vismoe.bench.job import BITS_PER_WEIGHT, PROGRAMS
from vismoe.config import format_bytes

NOTHING = "-"
SPEED_LEGEND = """
medians, in brackets the extremes over processes.
first answer: importing, loading and the cold prefill; files are dropped in between, so pages cached by loading are read again"""
SPEED_COLUMNS = ("contestant", "state", "first answer", "encode", "prefill tokens/s", "decode tokens/s", "experts/layer")
EXPERTS_LEGEND = "experts/layer: the routed experts alone, per MoE layer and token, in prefill, decode; without the router"
PARALLEL_LEGEND = "\nrequests that decode at once: tokens/s of all together"
PARALLEL_COLUMNS = ("contestant", "requests", "tokens/s", "by turns", "times", "storage/token", "streamed")
TOKEN_LEGEND = """
where a decoded token's time goes, in a further request: parts with their own Python; between: transformers' Python and torch's
small operations; timing: what measuring this added, which is not in the token"""
TOKEN_COLUMNS = ("contestant", "part", "ms", "of it", "calls", "bytes", "rate", "memory")
RATIO_LEGEND = "\nhow many times as fast VisMoE is in prefill, decode; in brackets: only the other keeps every bit"
RATIO_COLUMNS = ("ours", "against", "cold", "warm", "experts alone")
TRAFFIC_COLUMNS = tuple("contestant phase memory disk storage/token fetched/token hits stalled wasted control/layer".split())


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Prints conditions, speeds, sources of bytes, whether all contestants computed the same, and notes."""
    for line in _head(report):
        console.print(Text(line), soft_wrap=True, highlight=False)
    console.print(SPEED_LEGEND, soft_wrap=True)
    timed = any(row["moe_us"] for row in report["contestants"].values())
    if timed:
        console.print(EXPERTS_LEGEND, soft_wrap=True)
    console.print(_speeds(report, timed))
    if any(row["parallel"] for row in report["contestants"].values()):
        console.print(PARALLEL_LEGEND, soft_wrap=True)
        console.print(_parallel(report))
    if any(row["token_ms"] for row in report["contestants"].values()):
        console.print(TOKEN_LEGEND, soft_wrap=True)
        console.print(_tokens(report))
    if any(row.get("times_as_fast_as") for row in report["contestants"].values()):
        console.print(RATIO_LEGEND, soft_wrap=True)
        console.print(_ratios(report, timed))
    console.print(
        "\nshares of the ceilings; bytes from storage and of copied experts, per token; Python's control path, per MoE layer",
        soft_wrap=True,
    )
    console.print(_traffic(report))
    console.print()
    if report["control"]:
        control = report["control"]
        ours = f"{control['control_us_per_layer']:.0f} us of this for control (synthetic: all experts resident and tiny)"
        console.print(f"Python: {control['us_per_layer']:.0f} us per MoE layer and token, {ours}", highlight=False)
        for part, us in control["parts"].items():
            console.print(f"  {part}: {us:.0f} us", highlight=False)
    for line in _notes(report):
        console.print(Text(line), soft_wrap=True, highlight=False)


def _head(report: dict[str, Any]) -> list[str]:
    model, conditions, ceilings = report["model"], report["conditions"], report["ceilings"]
    limit = conditions["limit_bytes"]
    limited = f"limit {format_bytes(limit)} ({conditions['limited_by']})" if limit else "no limit"
    rates = [f"{what} {format_bytes(rate)}/s" for what in ("memory", "disk", "link") if (rate := ceilings[f"{what}_bytes_per_s"])]
    most = ceilings["decode_tokens_per_s_at_most"]
    if disk := ceilings["disk_beside"]:
        median, least, greatest = (f"{format_bytes(disk[which])}/s" for which in ("median", "min", "max"))
        rates.append(f"disk beside the runs {median} ({least} to {greatest})")
    return [
        f"{model['name']}: {model['family']}, {model['dtype']}, {format_bytes(model['weights_bytes'])} of weights, "
        f"{format_bytes(model['expert_bytes'])} of them experts",
        f"memory {format_bytes(conditions['memory_bytes'])}, "
        f"{limited}, "
        f"{conditions['threads']} threads, {conditions['prompt']}, {conditions['new_tokens']} new tokens, "
        f"{conditions['repeats']} repeats of 1 cold and {conditions['warm_requests']} warm requests",
        f"ceilings: {', '.join(rates)} ({ceilings['how']})" + (f"; memory allows {most:.1f} tokens/s" if most else ""),
    ]


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number < 2)
    return table


def _speeds(report: dict[str, Any], timed: bool) -> Table:
    table, precision = _table(SPEED_COLUMNS if timed else SPEED_COLUMNS[:-1]), None
    for name, row in report["contestants"].items():
        if precision not in (None, row["precision"]):
            table.add_row("")
        precision = row["precision"]
        if row["failed"]:
            table.add_row(name, Text("failed", style="red"))
        for state in ("cold", "warm"):
            if figures := row[state]:
                table.add_row(
                    name,
                    state,
                    _value(row["first_answer_s"] if state == "cold" else None, "{:.1f} s".format),
                    _value(figures.get("encode_s"), "{:.2f} s".format),
                    _range(figures["prefill_tokens_per_s"]),
                    _range(figures["decode_tokens_per_s"]),
                    *([_experts(row["moe_us"]) if state == "warm" else NOTHING] if timed else []),
                )
    return table


def _experts(moe_us: dict[str, Any] | None) -> str:
    return ", ".join(_value(one, lambda us: f"{_number(us)} us") for one in moe_us.values()) if moe_us else NOTHING


def _parallel(report: dict[str, Any]) -> Table:
    table = _table(PARALLEL_COLUMNS)
    for name, row in report["contestants"].items():
        for rows, found in row["parallel"].items():
            both, turns = found["tokens_per_s"], found["by_turns_tokens_per_s"]
            times = f"{both['median'] / turns['median']:.2f}x" if turns else NOTHING
            stored = _value(found["disk_bytes_per_token"], format_bytes)
            streamed = _value(found["streamed_share"], "{:.0%}".format)
            table.add_row(name, rows, _range(both), _range(turns) if turns else NOTHING, times, stored, streamed)
    return table


def _tokens(report: dict[str, Any]) -> Table:
    table = _table(TOKEN_COLUMNS)
    for name, row in report["contestants"].items():
        parts = row["token_ms"] or {}
        for part, found in parts.items():
            rate, of_memory = found["bytes_per_s"], found["memory_share"]
            table.add_row(
                name,
                part,
                f"{found['ms']:.2f}",
                f"{found['ms'] / parts['token']['ms']:.0%}",
                f"{found['calls']:.0f}" if found["calls"] else NOTHING,
                format_bytes(found["bytes"]) if found["bytes"] else NOTHING,
                f"{format_bytes(rate)}/s" if rate else NOTHING,
                f"{of_memory:.0%}" if of_memory else NOTHING,
            )
    return table


def _ratios(report: dict[str, Any], timed: bool) -> Table:
    table = _table(RATIO_COLUMNS if timed else RATIO_COLUMNS[:-1])
    for name, row in report["contestants"].items():
        for rival, found in row.get("times_as_fast_as", {}).items():
            times = [_faster(found[kind]) for kind in ("cold", "warm", *(["moe"] if timed else []))]
            table.add_row(name, rival, *(times if found["same_precision"] else [f"({one})" for one in times]))
    return table


def _traffic(report: dict[str, Any]) -> Table:
    linked = report["ceilings"]["link_bytes_per_s"] is not None
    columns = (*TRAFFIC_COLUMNS[:4], "link", *TRAFFIC_COLUMNS[4:]) if linked else TRAFFIC_COLUMNS
    table = _table(columns)
    for name, row in report["contestants"].items():
        for state in ("cold", "warm"):
            for phase in ("prefill", "decode"):
                figures = {key.removeprefix(f"{phase}_"): value for key, value in row[state].items()}
                if figures:
                    tiers = ("memory", "disk", "link") if linked else ("memory", "disk")
                    table.add_row(
                        name,
                        f"{state} {phase}",
                        *(_value(figures.get(f"{tier}_share"), "{:.0%}".format) for tier in tiers),
                        _value(figures.get("disk_bytes_per_token"), format_bytes),
                        _value(figures.get("bytes_read_per_token"), format_bytes),
                        _value(figures.get("hit_rate"), "{:.1%}".format),
                        _value(figures.get("stall_share"), "{:.0%}".format),
                        _value(figures.get("wasted_prefetch_bytes_per_token"), format_bytes),
                        _value(figures.get("control_us_per_layer") if phase == "decode" else None, "{:,.0f} us".format),
                    )
    return table


def _faster(times: dict[str, float | None]) -> str:
    return ", ".join(f"{one:.2f}x" for one in times.values() if one) or NOTHING


def _value(spread: dict[str, float] | None, form: Callable[[float], str]) -> str:
    return form(spread["median"]) if spread else NOTHING


def _range(spread: dict[str, float]) -> str:
    median, least, most = (_number(spread[name]) for name in ("median", "min", "max"))
    return f"{median} ({least}-{most})" if spread["n"] > 1 else median


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _notes(report: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in report["contestants"].items():
        experts = row["notes"].get("experts")
        lines.append(f"{name}: {PROGRAMS[row['way']].what}" + (f" ({experts})" if experts else ""))
        if row["repeats"]:
            import_s, load_s = (row[name]["median"] for name in ("import_s", "load_s"))
            lines[-1] += f"; imports {import_s:.1f} s, loading {load_s:.1f} s, peak memory {format_bytes(row['peak_bytes'])}"
        if opened := row["cold_open"]:
            lines[-1] += (
                f"; {opened['seconds']['median']:.1f} s to the first token, {opened['ratio']['median']:.2f} times what reading "
                f"{format_bytes(int(opened['bytes']['median']))} at the disk's rate and computing would take"
            )
        if row["failed"]:
            lines[-1] += f": {row['failed']}"
        same = row["agreement"]
        if same and same["with"] != name and same["equal_tokens"] is not None:
            lines[-1] += f"; the first {same['equal_tokens']} of {same['tokens']} new tokens equal those of {same['with']}"
            if same["correlation"] is not None:
                lines[-1] += f", its first logits correlate by {same['correlation']:.4f}"
        if row["cached_bytes"]:
            lines.append(f"  {format_bytes(row['cached_bytes'])} of its weight files stayed in the page cache")
        if row["not_cold"]:
            lines.append(f"  no cold ratio: {row['not_cold']}")
    rate = report["ceilings"]["disk_bytes_per_s"]
    for phase, part in (report["timeline"] or {}).items():
        if not part["seconds"]:  # one new token
            continue
        copied = part["copied_bytes"] / part["seconds"]
        lines.append(
            f"timeline, {phase}: experts were copied for {part['copying']:.0%} of {part['seconds']:.2f} s and computed for "
            f"{part['computing']:.0%}, both at once for {part['both']:.0%}, neither for {part['neither']:.0%}; "
            f"copies moved {format_bytes(int(copied))}/s" + (f", {copied / rate:.0%} of the disk's rate" if rate else "")
        )
    for store in report["stores"]:
        took = f"packed in {store['packed_s']:.0f} s" if store["packed_s"] else "packed before"
        took += ", rounded to nearest" if store["format"] in BITS_PER_WEIGHT else ""
        size = f"{format_bytes(store['stored_bytes'])}, {store['bits_per_weight']:.2f} bits per expert weight on disk"
        lines.append(f"{store['format']}: {size}, {took}; packing is not part of any time")
    lines += [label if label.startswith("warning: ") else f"note: {label}" for label in report["labels"]]
    return [*lines, "interrupted: some measurements are missing"] if report["interrupted"] else lines
