"""The content of a suite: rows, the papers' tables that contain them, and the flags that choose them.

A row is one way to run the model, described by its differences from the exact row, which keeps every bit of the experts and all
visual tokens, in the memory of the other rows. Rows of the same name in several tables are one row. Pure; imports nothing heavy.
"""

import json
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vismoe.config import Settings
from vismoe.errors import InputError
from vismoe.pair import Format

EVAL_BATCH = 8  # questions answered together; with two pictures each they fit the default context
SUITES = ("paper",)
TABLES = ("keep", "selection", "formats", "precision", "memory", "steps")
AGAIN = ("speed", "all")
VARIED = (  # settings that rows vary
    "memory", "keep", "selection", "format", "policy", "formats", "retention", "store", "lookahead", "eviction", "deterministic",
)  # fmt: skip
ROUNDS = 3
REQUESTS, MAX_TOKENS = 4, 48  # per turn: counted requests, and the most tokens of their answers
FOLDER = "vismoe-suite"
WORK, REPORT = "work", "suite.json"
ANSWERS, SPEED = "answers", "speed"  # folders in the working folder, with a file for each row
HALF = 0.5


@dataclass(frozen=True)
class SuiteRow:
    """One way to run the model. `name` is also the name of its files, and of --compare FOLDER#NAME."""

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # differences from the exact row, by the names of Settings


EXACT = SuiteRow("exact", "exact")


@dataclass(frozen=True)
class PaperTable:
    """Rows to be compared, the exact one first."""

    name: str
    title: str
    paper: str  # the table that it follows, and its columns
    rows: tuple[SuiteRow, ...]


@dataclass(frozen=True)
class Axes:
    """The varied settings beside the exact row; `memory` applies to every row except those of the tables memory and steps."""

    memory: str = "100%"
    keeps: tuple[float, ...] = (0.7, 0.5, 0.3)
    selections: tuple[str, ...] = ("affinity", "saliency", "distinct", "visionzip", "random", "uniform")
    formats: tuple[str, ...] = ("lossless", "int8", "int4", "int2")
    hot_formats: tuple[str, ...] = ("16/4", "16/2")
    hot_budgets: tuple[str, ...] = ("60%", "40%")  # for rows with hotness, where every expert is in one of two formats
    kept_formats: tuple[str, ...] = ("4/2", "4/0")
    kept_memory: str = "12.5%"  # for rows with importance alone: little, so that uncritical experts rarely have a better copy
    retentions: tuple[float, ...] = (0.9, 0.75)
    budgets: tuple[str, ...] = ("100%", "50%", "25%", "12.5%")
    step_memory: str = "25%"


def paper_tables(axes: Axes, names: Iterable[str] = TABLES) -> tuple[PaperTable, ...]:
    """The tables of these names, in the order of TABLES."""
    made = {
        "keep": PaperTable(
            "keep",
            "Visual tokens kept",
            "VisMMoE, table 3: its columns Vanilla and VisMMoE",
            tuple(SuiteRow(f"keep-{keep:g}", f"{keep:.0%} kept", {"keep": keep}) for keep in axes.keeps),
        ),
        "selection": PaperTable(
            "selection",
            f"Which {HALF:.0%} of the visual tokens are kept",
            "VisMMoE, table 3: its columns Random, Zip and VisMMoE at 50%",
            tuple(SuiteRow(f"{name}-{HALF:g}", name, {"keep": HALF, "selection": name}) for name in axes.selections),
        ),
        "formats": PaperTable(
            "formats",
            "Formats of the experts",
            "DynaExq, table 1, and DyMoE, table 1: their uniform formats",
            tuple(SuiteRow(name, name, {"format": name}) for name in axes.formats),
        ),
        "precision": PaperTable(
            "precision",
            "Formats that are decided while the model runs, beside one format for all",
            "DynaExq, table 1 (hotness), and DyMoE, table 2 (importance by retention r)",
            (*(SuiteRow(name, name, {"format": name}) for name in axes.formats[1:]), *_hot(axes), *_important(axes)),
        ),
        "memory": PaperTable(
            "memory",
            "Share of the experts in memory",
            "DyMoE, table 3: first token and decode by memory; MoE-SpeQ, table 3: hit rate by cache size",
            tuple(SuiteRow(f"memory-{size}", size, {"memory": size}) for size in axes.budgets if size != axes.memory),
        ),
        "steps": PaperTable(
            "steps",
            f"One part after the other, with {axes.step_memory} of the experts in memory",
            "VisMMoE, table 4 (integer formats beside it)",
            _steps(axes.step_memory),
        ),
    }
    return tuple(replace(table, rows=(EXACT, *table.rows)) for name, table in made.items() if name in set(names))


def _dynamic(policy: str, formats: str, memory: str, retention: float | None = None) -> SuiteRow:
    """A row in which each expert has one of two formats."""
    settings = {"policy": policy, "formats": formats, "memory": memory, "format": "auto"}
    short = "both" if "+" in policy else policy
    words = [short, formats.replace("/", "-"), memory, *([f"{retention:g}"] if retention else [])]
    label = f"{policy} {formats} in {memory}" + (f", r {retention:g}" if retention else "")
    return SuiteRow("-".join(words), label, settings | ({"retention": retention} if retention else {}))


def _hot(axes: Axes) -> tuple[SuiteRow, ...]:
    return tuple(_dynamic("hotness", formats, memory) for formats in axes.hot_formats for memory in axes.hot_budgets)


def _important(axes: Axes) -> tuple[SuiteRow, ...]:
    """Importance alone, and finally with hotness in the least memory that allows it."""
    pairs = [(formats, retention) for formats in axes.kept_formats for retention in axes.retentions]
    alone = [_dynamic("importance", formats, axes.kept_memory, retention) for formats, retention in pairs]
    return (*alone, _dynamic("hotness+importance", axes.hot_formats[0], axes.hot_budgets[-1], axes.retentions[-1]))


def _steps(memory: str) -> tuple[SuiteRow, ...]:
    """Each row adds one part to the row before."""
    parts: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("base", "base: LRU, no lookahead", {"memory": memory, "lookahead": "none", "eviction": "lru"}),
        ("compression", f"+ compression: {HALF:.0%} of the visual tokens", {"keep": HALF}),
        ("prediction", "+ prediction: the default lookahead", {"lookahead": "auto"}),
        ("orchestrator", "+ orchestrator: the default eviction", {"eviction": "lfu"}),
        ("int4", "+ experts in int4", {"format": "int4"}),
    )
    rows = []
    settings: dict[str, Any] = {}
    for number, (name, label, changed) in enumerate(parts):
        settings = settings | changed
        rows.append(SuiteRow(f"step-{number}-{name}", label, settings))
    return tuple(rows)


@dataclass(frozen=True)
class Answered:
    """One answer, and its question."""

    question: str
    truth: str
    answer: str
    score: float
    computed: Mapping[str, float]  # expert computations by format, its share of those of the batch


@dataclass(frozen=True)
class SpeedTurn:
    """One freshly loaded model on the same few requests, the first of them not counted. None if unknown."""

    load_s: float
    first_token_s: float  # encoding the picture and prefill; the median over requests, as for the next field
    prefill_s: float
    decode_tokens_per_s: float | None
    prefill_bytes: float  # of experts read or copied, per request
    decode_bytes_per_token: float | None
    prefill_hit_rate: float | None
    decode_hit_rate: float | None
    expert_bytes: int  # memory for experts
    planned_bytes: int  # all memory of the plan
    grown_bytes: int | None  # the most beyond the process after bare imports; on a GPU the memory that torch held


def packed_formats(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Formats that must be packed for a row: its format, or both of a policy; never raw, which the checkpoint has."""
    pair = Settings.of(**settings).pair
    formats = map(str, pair.resident) if pair else (settings["format"],)
    return tuple(name for name in formats if name != Format.RAW)


def rows_of(tables: Sequence[PaperTable]) -> tuple[SuiteRow, ...]:
    """Every row once, the exact one first."""
    return tuple({row.name: row for table in tables for row in table.rows}.values())


def work_folder(folder: Path) -> Path:
    """The working folder of the suite that wrote into `folder`, from its report."""
    report = folder / REPORT
    return Path(json.loads(report.read_text())["work"]) if report.is_file() else folder / WORK


SUITE_FLAGS: dict[str, Any] = {  # beside those of an evaluation, with their defaults
    "out": Path(FOLDER), "data": None, "work": None, "tables": TABLES, "budgets": Axes.budgets, "hot_budgets": Axes.hot_budgets,
    "rounds": ROUNDS, "again": None, "keep_store": False,
}  # fmt: skip


def add_suite_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of a suite beside those of an evaluation; a flag that is not given does not appear in the namespace."""
    group = parser.add_argument_group(
        "suite",
        "Every row of the tables answers the same questions, each with its own model; then speed is measured in turns,\n"
        "in separate processes. Results are stored at once: after Ctrl-C the same command continues.",
    )

    def flag(name: str, meaning: str, **options: Any) -> None:
        group.add_argument(name, help=meaning, default=SUPPRESS, **options)

    folder = {"type": Path, "metavar": "FOLDER"}
    flag("--out", f"folder for suite.md, suite.json and plots (default: {FOLDER})", **folder)
    meaning = "use the first --n documents of these tasks of lmms-eval instead of generated scenes, e.g. pope,ocrbench"
    flag("--data", meaning, metavar="TASKS")
    flag("--work", f"folder for answers, timings, packed experts (default: {WORK} in --out)", **folder)
    flag("--tables", f"tables to measure: {', '.join(TABLES)} (default: all)", nargs="+", choices=TABLES, metavar="TABLE")
    sizes = {"nargs": "+", "metavar": "SIZE"}
    flag("--budgets", f"memory of the rows of the table memory (default: {_in_help(Axes.budgets)})", **sizes)
    flag("--hot-budgets", f"memory of rows with hotness in the table precision (default: {_in_help(Axes.hot_budgets)})", **sizes)
    meaning = f"measurements of every row's speed; 0: none (default: {ROUNDS})"
    flag("--rounds", meaning, type=whole_number, metavar="R")
    flag("--again", "delete the stored speed, or all stored results, and measure again", choices=AGAIN)
    flag("--keep-store", "keep the packed experts in --work at the end", action="store_true")


def _in_help(sizes: Sequence[str]) -> str:
    return " ".join(sizes).replace("%", "%%")


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def refuse_varied(given: Mapping[str, Any]) -> None:
    """Raises InputError for a setting that the tables vary, except `memory`, from which they start."""
    if clash := [name for name in VARIED if name in given and name != "memory"]:
        flags = ", ".join(f"--{name}" for name in clash)
        raise InputError(
            f"{flags}: the tables of a suite vary this setting themselves. Fix: leave it out, or run vismoe eval --scenes with it"
        )
