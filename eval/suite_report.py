"""A suite's results as one JSON object, as Markdown and as plots. Pure except for writing the files.

Differences are paired with the exact row's answers to the same questions, printed text separately. Bytes, seconds, shares of one.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from vismoe.config import format_bytes
from vismoe.eval.paired import beside, points
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.scoring import OTHERS, TEXT
from vismoe.eval.suite_rows import EXACT, REPORT, REQUESTS, Answered, SpeedTurn
from vismoe.words import share_words

Key = tuple[str, int]
MARKDOWN = "suite.md"
ACCURACY_NOTE = """\
Accuracy: {questions} {asked}, the same for every row, greedy, `deterministic`.
*against exact*: the paired difference in points with its 95% interval (Newcombe's for right or wrong, the bootstrap over
questions for scores between, such as those of printed text, by character). *changed*: answers worded differently from exact.
*computed in*: the share of expert computations (an expert for a token) in each format."""
SPEED_NOTE = """\
Speed: medians of {turns} turns of every row, each in a separate process that loads the model, over {requests} requests with
one picture. *first token*: encoding and prefill. *read*: bytes of experts read or copied per decoded token. *hits*: in decode.
*experts*: memory for experts. *plan*: all planned memory, for prompts of the whole context. *grew*: the most memory of the
process beyond that after bare imports."""


def accuracy_of(
    rows: Mapping[Key, Answered], exact: Mapping[Key, Answered], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Scores of each group of questions, compared with the exact row if it has all of them, and the number of changed answers."""
    has_exact = rows.keys() <= exact.keys()
    base = exact if has_exact else rows
    found = {}
    for group, kinds in groups.items():
        if keys := [key for key in rows if key[0] in kinds]:
            found[group] = beside([base[key].score for key in keys], [rows[key].score for key in keys])
            if not has_exact:
                del found[group]["difference"]
    changed = sum(row.answer != base[key].answer for key, row in rows.items()) if has_exact else None
    return {"questions": len(rows), "changed": changed, "formats": shares_of(rows.values()), "groups": found}


def shares_of(rows: Iterable[Answered]) -> dict[str, float]:
    """The share of the expert computations for these answers in each format."""
    computed = Counter[str]()
    for row in rows:
        computed.update(row.computed)
    return {name: count / computed.total() for name, count in computed.items()}


def speed_of(turns: Sequence[SpeedTurn]) -> dict[str, Any]:
    """The median of each number over the turns that have it; None if none has it."""
    known = {
        item.name: [value for turn in turns if (value := getattr(turn, item.name)) is not None] for item in fields(SpeedTurn)
    }
    return {"turns": len(turns), **{name: median(values) if values else None for name, values in known.items()}}


def markdown(result: Mapping[str, Any]) -> str:
    """Every table with its paper, then explanations of the numbers."""
    rows, about = result["rows"], result["about"]
    parts = [f"# {result['suite']} suite: {about['model']}"]
    for table in result["tables"]:
        mixed = any("policy" in rows[name]["settings"] for name in table["rows"])
        lines = [_line(rows[name], name == EXACT.name, mixed) for name in table["rows"]]
        failed = [f"{rows[name]['label']}: {rows[name]['failed']}" for name in table["rows"] if rows[name]["failed"]]
        parts.append(f"## {table['title']}\n\nAfter {table['paper']}.\n\n{_aligned([HEAD, *lines])}")
        parts += [f"Not measured: {' '.join(reason.split())}" for reason in failed]
    exact = rows[EXACT.name]
    turns = max((row["speed"]["turns"] for row in rows.values() if row["speed"]), default=0)
    questions = exact["accuracy"]["questions"] if exact["accuracy"] else 0
    machine, versions = about["machine"], ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts.append(ACCURACY_NOTE.format(questions=questions, asked=result["questions"]["asked"]))
    if turns:
        parts.append(SPEED_NOTE.format(turns=turns, requests=REQUESTS))
    parts.append(f"{machine['cores']} cores of {machine['cpu']}{''.join(f', {gpu}' for gpu in machine['gpus'])}; {versions}.")
    parts.append(f"`{result['command']}`")
    return "\n\n".join(parts) + "\n"


HEAD = (
    "", OTHERS, "against exact", f"printed {TEXT}", "against exact", "changed", "computed in",
    "first token", "prefill", "decode", "read", "hits", "experts", "plan", "grew",
)  # fmt: skip


def _line(row: Mapping[str, Any], is_exact: bool, mixed: bool) -> tuple[str, ...]:
    """Cells of one row; empty if something was not measured. mixed: rows of its table differ in their formats."""
    shares = share_words(row["accuracy"]["formats"]) if mixed and row["accuracy"] else ""
    return (row["label"], *_accuracy_cells(row["accuracy"], is_exact), shares, *_speed_cells(row["speed"]))


def _accuracy_cells(accuracy: Mapping[str, Any] | None, is_exact: bool) -> list[str]:
    if accuracy is None:
        return ["", "", "", "", ""]
    cells = []
    for group in (OTHERS, TEXT):
        row = accuracy["groups"].get(group)
        known = row is not None and "difference" in row and not is_exact
        cells += ["" if row is None else f"{row['mean']:.1%}", points(row["difference"]) if known else ""]
    return [*cells, "" if accuracy["changed"] is None or is_exact else str(accuracy["changed"])]


def _speed_cells(speed: Mapping[str, Any] | None) -> list[str]:
    if speed is None:
        return [""] * 8
    shown = {
        "first_token_s": _seconds,
        "prefill_s": _seconds,
        "decode_tokens_per_s": lambda rate: f"{rate:.1f} tokens/s",
        "decode_bytes_per_token": format_bytes,
        "decode_hit_rate": lambda share: f"{share:.1%}",
        "expert_bytes": format_bytes,
        "planned_bytes": format_bytes,
        "grown_bytes": format_bytes,
    }
    return ["" if speed[name] is None else write(speed[name]) for name, write in shown.items()]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also aligned in a terminal; columns without numbers are left out."""
    used = [column for column in range(len(lines[0])) if column == 0 or any(line[column] for line in lines[1:])]
    lines = [[line[column] for column in used] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
    head, *body = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])


def write_report(folder: Path, result: Mapping[str, Any]) -> list[Path]:
    """Writes suite.json and suite.md, and plots if matplotlib is installed; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / REPORT: json.dumps(result, indent=1) + "\n", folder / MARKDOWN: markdown(result)}
    for path, text in written.items():
        path.write_text(text)
    return [*written, *(draw(result, folder) if find_spec("matplotlib") else ())]


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """suite-tokens, suite-precision, suite-formats and suite-memory (.png), each if its tables have measured rows."""
    tables = {table["name"]: [result["rows"][name] for name in table["rows"]] for table in result["tables"]}
    asked = max((row["accuracy"]["questions"] for row in result["rows"].values() if row["accuracy"]), default=0)
    scored = {
        name: [row for row in rows if row["accuracy"] and row["accuracy"]["questions"] == asked] for name, rows in tables.items()
    }
    timed = {name: [row for row in rows if row["speed"]] for name, rows in tables.items()}
    panels = {
        "tokens": [*_kept(scored.get("keep", [])), *_scores(scored.get("selection", []), "selection, half of the tokens kept")],
        "precision": _decided(scored.get("precision", [])),
        "formats": [
            *_scores(scored.get("formats", []), "format of the experts"),
            *_speeds(timed.get("formats", []), "format of the experts", ("decode_tokens_per_s",)),
        ],
        "memory": _speeds(
            timed.get("memory", []), "experts in memory", ("decode_tokens_per_s", "decode_bytes_per_token", "decode_hit_rate")
        ),
    }
    return [grid_figure(folder / f"suite-{name}.png", drawn, columns=3) for name, drawn in panels.items() if drawn]


def _kept(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    if len(rows) < 2:
        return []
    shares = [100 * row["settings"]["keep"] for row in rows]
    return [Panel(_series(rows, shares), "visual tokens kept, %", "accuracy", percent=True)]


def _decided(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """One format for all experts compared with hotness, and importance by its retention r."""
    kept = [row for row in rows if "retention" in row["settings"]]
    others = [row for row in rows if row not in kept]
    return [*_scores(others, "one format, or by hotness"), *_scores([*others[:1], *kept], "by importance")]


def _scores(rows: Sequence[Mapping[str, Any]], axis: str) -> list[Panel]:
    if len(rows) < 2:
        return []
    names = [row["label"] for row in rows]
    return [Panel(_series(rows, names), axis, "accuracy", kind="bars", percent=True)]


def _series(rows: Sequence[Mapping[str, Any]], x: Sequence[float | str]) -> list[Series]:
    """The accuracies of the groups that all rows have."""
    found = {group: [row["accuracy"]["groups"].get(group) for row in rows] for group in (OTHERS, TEXT)}
    return [Series.of(group, x, each, "mean") for group, each in found.items() if all(each)]


SPEEDS = {  # figure: (axis, unit, whether it is a share)
    "decode_tokens_per_s": ("decoded tokens/s", 1.0, False),
    "decode_bytes_per_token": ("read for a token, MiB", 2.0**20, False),
    "decode_hit_rate": ("hits in decode", 1.0, True),
}


def _speeds(rows: Sequence[Mapping[str, Any]], axis: str, figures: Sequence[str]) -> list[Panel]:
    """A panel for each of the `figures` that all rows have."""
    known = [name for name in figures if len(rows) > 1 and all(row["speed"][name] is not None for row in rows)]
    names = [row["label"] for row in rows]
    panels = []
    for name in known:
        label, unit, share = SPEEDS[name]
        bars = Series("speed", names, [row["speed"][name] / unit for row in rows])
        panels.append(Panel([bars], axis, label, kind="bars", percent=share))
    return panels
