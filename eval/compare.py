"""`vismoe eval --compare A B`: two saved results on the same questions, paired question by question.

A result is the JSON object of `vismoe eval --scenes --json` or of `--lmms --json`, a file of answers (.jsonl) that a study
stores, or a row of a suite, FOLDER#ROW. Results of other questions are refused with the first difference.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vismoe.errors import InputError
from vismoe.eval.paired import p_value, paired_difference
from vismoe.eval.suite_rows import ANSWERS, work_folder
from vismoe.flags import print_json

ALL = "all"
SHAPES = "the JSON of vismoe eval --scenes --json or --lmms --json, an answer file (.jsonl), or FOLDER#ROW of a suite"
SURE = 0.05


@dataclass(frozen=True)
class ComparedQuestion:
    """One question as its file describes it, and the score of the answer."""

    kind: str
    number: int | str
    score: float
    about: Mapping[str, Any]  # what distinguishes it: seed, question, truth

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True)
class Result:
    """All questions to one contestant with their scores, in the order of its file."""

    name: str
    rows: tuple[ComparedQuestion, ...]


def read_result(where: str) -> Result:
    """Raises InputError for anything else than SHAPES."""
    folder, sharp, row = where.partition("#")
    file = _answers_of_row(Path(folder).expanduser(), row) if sharp else Path(where).expanduser()
    try:
        text = file.read_text()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}. Fix: name {SHAPES}") from error
    try:
        rows = _answer_file(text) if file.suffix == ".jsonl" else _saved(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} has no answers to compare ({type(error).__name__}: {error}). Fix: name {SHAPES}") from error
    if not rows:
        raise InputError(f"{file} has no answers. Fix: name {SHAPES}")
    return Result(where, tuple(rows))


def _answers_of_row(folder: Path, row: str) -> Path:
    """The answer file of a suite's row."""
    answers = work_folder(folder) / ANSWERS
    file = answers / f"{row}.jsonl"
    if file.is_file():
        return file
    there = sorted(path.stem for path in answers.glob("*.jsonl"))
    if not there:
        raise InputError(f"{folder} is not the folder of a suite. Fix: name the --out folder of vismoe eval --suite")
    raise InputError(f"{folder} has no row {row!r}. Fix: one of {', '.join(there)}")


def _answer_file(text: str) -> list[ComparedQuestion]:
    """Reads a first line that says what the answers belong to, then a line per question; an incomplete last line is left out.

    If a question was answered twice, the last answer counts.
    """
    header, *lines = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    found = {}
    for row in lines:
        about = {"seed": header.get("seed")} | {name: row.get(name) for name in ("question", "truth")}
        found[row["kind"], row["number"]] = ComparedQuestion(row["kind"], row["number"], float(row["score"]), _known(about))
    return list(found.values())


def _saved(result: Mapping[str, Any]) -> list[ComparedQuestion]:
    if "tasks" in result:
        return [_of_task(row) for row in result["answers"]]
    rows, asked = [], dict.fromkeys((row["kind"] for row in result["answers"]), 0)
    for row in result["answers"]:
        about = {"seed": result["seed"], "question": row["question"], "truth": row["truth"]}
        rows.append(ComparedQuestion(row["kind"], asked[row["kind"]], float(row["score"]), about))
        asked[row["kind"]] += 1
    return rows


def _of_task(row: Mapping[str, Any]) -> ComparedQuestion:
    """An answer to a document of an lmms-eval task, scored by the task."""
    if row["score"] is None:
        raise ValueError(f"{row['task']} scores its answers together, not one by one")
    about = {"question": row.get("question"), "truth": row.get("target")}
    return ComparedQuestion(row["task"], row["document"], float(row["score"]), _known(about))


def _known(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if value is not None}


def paired(first: Result, second: Result) -> list[tuple[ComparedQuestion, ComparedQuestion]]:
    """Both results' rows for the same questions, in the order of the first.

    Raises InputError with the first difference between the questions.
    """
    others = {(row.kind, row.number): row for row in second.rows}
    fix = "Fix: compare results of the same --seed, --n and --kinds (or --lmms task and --limit)"
    for row in first.rows:
        its = others.get((row.kind, row.number))
        if its is None:
            raise InputError(f"not the same questions: {first.name} has {row.name}, {second.name} does not. {fix}")
        for name in row.about.keys() & its.about.keys():
            if row.about[name] != its.about[name]:
                difference = f"the {name} is {row.about[name]!r} in {first.name} and {its.about[name]!r} in {second.name}"
                raise InputError(f"not the same questions: for {row.name}, {difference}. {fix}")
    known = {(row.kind, row.number) for row in first.rows}
    if more := next((row for row in second.rows if (row.kind, row.number) not in known), None):
        raise InputError(f"not the same questions: {second.name} has {more.name}, {first.name} does not. {fix}")
    return [(row, others[row.kind, row.number]) for row in first.rows]


def compared(first: Result, second: Result) -> dict[str, Any]:
    """For each kind of question and for all: scores, the difference B - A with its 95% interval, p, and changes each way."""
    pairs = paired(first, second)
    kinds = dict.fromkeys(row.kind for row, _ in pairs)
    table = {kind: _figures([pair for pair in pairs if pair[0].kind == kind]) for kind in kinds}
    return {"a": first.name, "b": second.name, "kinds": table, ALL: _figures(pairs)}


def _figures(pairs: Sequence[tuple[ComparedQuestion, ComparedQuestion]]) -> dict[str, Any]:
    before, after = ([row.score for row in side] for side in zip(*pairs, strict=True))
    return {
        "questions": len(pairs),
        "a": sum(before) / len(pairs),
        "b": sum(after) / len(pairs),
        "difference": asdict(paired_difference(before, after)),
        "better": sum(b > a for a, b in zip(before, after)),
        "worse": sum(b < a for a, b in zip(before, after)),
        "p": p_value(before, after),
    }


def print_compared(console: Console, result: Mapping[str, Any]) -> None:
    console.print(f"A: {result['a']}\nB: {result['b']}", soft_wrap=True, highlight=False, markup=False)
    table = Table(box=None)
    for name in ("", "n", "A", "B", "B - A", "95% interval", "+", "-", "p"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for kind, row in [*result["kinds"].items(), (ALL, result[ALL])]:
        value, low, high = (100 * row["difference"][end] for end in ("value", "low", "high"))
        interval = f"{value:+.2f}", f"{low:+.1f} to {high:+.1f}"
        p = f"{row['p']:.3f}" if row["p"] >= 0.001 else "< 0.001"
        shares = f"{row['a']:.1%}", f"{row['b']:.1%}"
        table.add_row(kind, str(row["questions"]), *shares, *interval, str(row["better"]), str(row["worse"]), p)
    console.print(table)
    console.print(_verdict(result), soft_wrap=True, highlight=False)


def _verdict(result: Mapping[str, Any]) -> str:
    row, kinds = result[ALL], len(result["kinds"])
    if not row["better"] and not row["worse"]:
        said = "No score differs."
    elif row["p"] < SURE:
        said = f"Over all questions B is {'better' if row['difference']['value'] > 0 else 'worse'}."
    else:
        said = "Over all questions chance alone can explain the difference."
    several = f" Of {kinds} kinds, one in {round(1 / SURE)} has p below {SURE} by chance." if kinds > 1 else ""
    return (
        f"{said}{several}\nB - A in points; +, -: questions whose score rose, fell. Right or wrong: Newcombe's interval, "
        "McNemar's exact test. Scores between: the bootstrap over questions, the sign-flip test."
    )


def run_compare(arguments: Namespace) -> int:
    """Reads both results and prints the comparison; returns the exit code."""
    result = compared(*map(read_result, arguments.compare))
    if arguments.json:
        print_json(arguments, result)
    else:
        print_compared(Console(), result)
    return 0
