"""Prints statistics as tables; `--json` prints the same numbers unformatted.

Input is the object of `Stats.to_json()`: seconds, bytes and counts. A rate whose time is zero is left out.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vismoe.app.options import served_name
from vismoe.config import format_bytes
from vismoe.words import draft_words, share_words

if TYPE_CHECKING:
    from vismoe.engine.engine import Engine
    from vismoe.metrics import Snapshot


def print_plan(console: Console, plan: Any) -> None:
    """Prints the memory plan as a table."""
    console.print(Text(plan.table()), soft_wrap=True, highlight=False)


def load_line(engine: "Engine") -> str:
    """One line about the loaded model: its name, its memory, and how many of its experts are resident."""
    plan, name = engine.plan, served_name(engine.name)
    resident = f"{plan.resident_experts} of {plan.total_experts} experts in memory"
    size = " of ".join(dict.fromkeys((format_bytes(plan.total_bytes), format_bytes(plan.budget_bytes))))
    return f"{name} on the {plan.device}: {resident}, {size}, context {plan.context}"


def print_backends(console: Console, backends: dict[str, str]) -> None:
    """Prints the chosen backends, with the reasons."""
    for name, choice in backends.items():
        console.print(Text(f"{name}: {choice}", style="dim"), soft_wrap=True)


def rate(count: float, seconds: float, unit: str) -> str:
    """`12.3 tokens/s`; empty for no time."""
    return f"{count / seconds:.1f} {unit}/s" if seconds > 0 else ""


def hit_rate(counts: dict[str, Any]) -> str:
    """The share of demands that were hits, in words."""
    demanded = counts["hits"] + counts["misses"]
    return f"{counts['hits'] / demanded:.1%} hits" if demanded else "nothing demanded"


def experts_did(engine: "Engine", counters: "Snapshot") -> dict[str, Any]:
    """What an evaluation reports about experts: the plan, cache statistics, the formats in which they were computed, and how
    requests shared passes."""
    running, shares = engine.precision, counters.shares(engine.format_names)
    precision = asdict(running) if running is not None else None
    did = {"plan": engine.plan.to_json(), "cache": counters.to_json(), "formats": shares, "precision": precision}
    return {**did, "passes": engine.backends["passes"]}


def experts_lines(did: Mapping[str, Any]) -> str:
    """The same in two lines."""
    cache = did["cache"]
    computed = f", computed in {share_words(did['formats'])} by {did['precision']['policy']}" if did["precision"] else ""
    return (
        f"memory {did['plan']['memory']}: {hit_rate(cache)}, {format_bytes(cache['bytes_read'])} read{computed}\n{did['passes']}"
    )


def figure_rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, details) rows for one answer."""
    encode, prefill, decode, cache = (figures[name] for name in ("encode", "prefill", "decode", "cache"))
    rows = []
    if encode["images"]:
        rows.append(("encode", f"{encode['seconds']:.2f} s", f"{encode['images']} image{'s' * (encode['images'] > 1)}"))
    speed = rate(prefill["tokens"], prefill["seconds"], "tokens")
    visual = f"{prefill['visual_tokens']} visual"
    if prefill["kept_visual_tokens"] < prefill["visual_tokens"]:
        visual += f", {prefill['kept_visual_tokens']} of them kept"
    rows.append(("prefill", f"{prefill['seconds']:.2f} s", f"{prefill['tokens']} tokens, {visual}; {speed}"))
    speed = rate(decode["tokens"], decode["seconds"], "tokens")
    rows.append(("decode", f"{decode['seconds']:.2f} s", f"{decode['tokens']} tokens; {speed}"))
    counts = f"{cache['hits']:,} hits, {cache['misses']:,} misses ({cache['late']:,} late), {cache['evictions']:,} evictions"
    rows.append(("experts", hit_rate(cache), counts))
    if cache["computed_on_host"]:
        nbytes = format_bytes(cache["bytes_computed_on_host"])
        rows.append(("on the CPU", f"{cache['computed_on_host']:,}", f"misses computed in host memory, {nbytes}"))
    if figures["precision"] or len(figures["formats"]) > 1:
        policy = figures["precision"]["policy"] if figures["precision"] else "exact"
        rows.append(("computed", policy, share_words(figures["formats"])))
    if drafts := figures["drafts"]:
        rows.append(("drafts", f"{drafts['rounds']:,}", draft_words(drafts)))
    rows.append(("read", format_bytes(cache["bytes_read"]), f"stalled {cache['stall_seconds']:.2f} s"))
    if cache["prefetched_bytes"]:
        rows.append(
            ("prefetched", format_bytes(cache["prefetched_bytes"]), f"{format_bytes(cache['wasted_prefetch_bytes'])} wasted")
        )
    if cache["streamed"]:
        reasons = ("unmeasured", "small_pool", "no_gain")
        others = ", ".join(f"{cache[f'unstreamed_{why}']:,} {why.replace('_', ' ')}" for why in reasons)
        rows.append(("streamed", f"{cache['streamed']:,}", f"times a layer, not: {others}"))
    return rows


def print_figures(console: Console, figures: dict[str, Any]) -> None:
    """Prints where the time of one answer went, and the cache statistics of the experts."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in figure_rows(figures):
        table.add_row(*row)
    console.print(table)


def print_layers(console: Console, figures: dict[str, Any]) -> None:
    """Prints the counters of each MoE layer, prefill and decode separately."""
    table = Table(title="experts by MoE layer", title_justify="left", box=None)
    for name in ("layer", "phase", "hits", "misses", "late", "read", "stalled"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for row in figures["cache"]["per_layer"]:
        for phase, counts in row.items():
            if phase != "layer":
                values = [f"{counts[name]:,}" for name in ("hits", "misses", "late")]
                read, stalled = format_bytes(counts["bytes_read"]), f"{counts['stall_seconds'] * 1000:.1f} ms"
                table.add_row(str(row["layer"]), phase, *values, read, stalled)
    console.print(table)


def print_accuracy(console: Console, result: dict[str, Any]) -> None:
    """Prints accuracy by kind of question with its confidence interval, and how evenly each MoE layer used its experts."""
    table = Table(title=f"held-out scenes, seed {result['seed']}", title_justify="left", box=None)
    for name in ("kind", "right", "95% interval", "questions"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, row in result["kinds"].items():
        table.add_row(kind, f"{row['mean']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}", str(row["questions"]))
    console.print(table)
    table = Table(title="experts by MoE layer", title_justify="left", box=None)
    for name in ("layer", "used", "busy", "share of the hottest quarter"):
        table.add_column(name, justify="right")
    for row in result["routing"]:
        used = f"{row['experts_used']} of {row['experts']}"
        table.add_row(str(row["layer"]), used, str(row["busy_experts"]), f"{row['hot_quarter_share']:.1%}")
    console.print(table)
