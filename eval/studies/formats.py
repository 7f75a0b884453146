"""The quality of the integer formats: `python -m vismoe.eval.studies.formats`.

On one model (the bundled demo model unless another is named), with plain transformers and only the routed experts replaced: the
error of expert outputs, the divergence from 16 bit and the perplexity over the tokens of true answers, and the accuracy per kind
of question, paired with 16 bit on the same questions. Each format is compared with rounding to nearest.

Answers are kept in a folder, one file per contestant and a line per question, so that an interrupted run continues. Prints
tables, then one JSON object on the last line.
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from vismoe.eval import accuracy, domains, scoring
from vismoe.eval import questions as asking
from vismoe.eval import world as vocabulary
from vismoe.eval.answer_file import AnswerFile, answer_all, program_digest, questions
from vismoe.eval.paired import paired_difference, points, ratio_of_sums, spread
from vismoe.eval.questions import KINDS
from vismoe.eval.report import run_on_questions
from vismoe.eval.studies import format_quality
from vismoe.eval.studies.format_quality import SIXTEEN_BIT, ExpertWeights, FormatContestant, Judged, expert_output_errors, judge
from vismoe.flags import SuggestingParser
from vismoe.models.inputs.processor import load_processor
from vismoe.types import Format

INTEGERS = (Format.INT8, Format.INT4, Format.INT2)
QUESTIONS = 4050
BATCH = 45  # questions answered together
OUTPUT_ERROR_QUESTIONS = 4  # of each kind, for the error of expert outputs
FOLDER = Path(tempfile.gettempdir()) / "vismoe-formats"

PROGRAM = (accuracy, format_quality, asking, scoring, vocabulary, domains)


def measure(model_path: str, formats: Sequence[Format], per_kind: int, seed: int, world: str, folder: Path) -> dict[str, Any]:
    """All results, as the object that is printed last."""
    contestants = [SIXTEEN_BIT, *(FormatContestant(format, nearest) for format in formats for nearest in (False, True))]
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="auto", experts_implementation="eager").eval()
    processor = load_processor(model_path)
    weights = ExpertWeights(model, contestants)
    program = program_digest(PROGRAM)
    kept = {
        contestant: AnswerFile(
            folder,
            str(contestant),
            {"weights": weights.digest(contestant), "program": program, "seed": seed, "world": world},
            Judged,
        )
        for contestant in contestants
    }

    kinds, table = answer_all(
        kept, per_kind, BATCH, seed, world, lambda _, talks, missing: judge(model, processor, weights, talks, missing).items()
    )
    some = [talk for kind in KINDS for talk in questions(kind, range(OUTPUT_ERROR_QUESTIONS), seed, world)]
    errors = expert_output_errors(model, processor, weights, some, contestants)
    return {"model": model_path, "seed": seed, "world": world, "questions": len(kinds), **summary(table, kinds, errors)}


def summary(
    table: dict[FormatContestant, list[Judged]], kinds: Sequence[str], output_errors: dict[FormatContestant, float]
) -> dict[str, Any]:
    """Results per contestant, and of each format against rounding to nearest; `kinds` gives the kind of each question."""
    rows = {
        str(contestant): _row(table[SIXTEEN_BIT], judged, kinds, output_errors[contestant])
        for contestant, judged in table.items()
    }
    against = {
        str(contestant): _against_nearest(judged, table[FormatContestant(contestant.format, nearest=True)])
        for contestant, judged in table.items()
        if not contestant.nearest and contestant != SIXTEEN_BIT
    }
    return {"contestants": rows, "against_nearest": against}


def _row(exact: list[Judged], judged: list[Judged], kinds: Sequence[str], output_error: float) -> dict[str, Any]:
    tokens = [row.tokens for row in judged]
    surprise = ratio_of_sums([row.surprise for row in judged], tokens)
    right = {}
    for kind in (*KINDS, None):
        own, true = ([row.score for row, its in zip(rows, kinds) if kind in (None, its)] for rows in (judged, exact))
        right[kind or "all"] = {"mean": sum(own) / len(own), "difference": asdict(paired_difference(true, own))}
    return {
        "output_error": output_error,
        "divergence": asdict(ratio_of_sums([row.divergence for row in judged], tokens)),
        "perplexity": float(torch.tensor(surprise.value).exp()),
        "accuracy": right,
    }


def _against_nearest(fitted: list[Judged], nearest: list[Judged]) -> dict[str, Any]:
    divergences = ([row.divergence for row in rows] for rows in (fitted, nearest))
    scores = ([row.score for row in rows] for rows in (nearest, fitted))
    return {"divergence_ratio": asdict(ratio_of_sums(*divergences)), "accuracy_difference": asdict(paired_difference(*scores))}


def print_summary(console: Console, result: dict[str, Any]) -> None:
    exact, *_ = result["contestants"]
    table = Table("experts", "output error", "KL, nats/token", "perplexity", "accuracy", "against 16 bit, points")
    for name, row in result["contestants"].items():
        overall, divergence = row["accuracy"]["all"], row["divergence"]
        measured = f"{row['perplexity']:.5f}", f"{overall['mean']:.2%}"
        if name == exact:
            table.add_row(name, "", "", *measured, "")
        else:
            table.add_row(name, f"{row['output_error']:.2%}", spread(divergence, ".6f"), *measured, points(overall["difference"]))
    console.print(table)
    fitted = list(result["against_nearest"])
    kinds = Table("accuracy", exact, *fitted)
    for kind in (*KINDS, "all"):
        cells = [result["contestants"][name]["accuracy"][kind] for name in (exact, *fitted)]
        kinds.add_row(
            kind, f"{cells[0]['mean']:.2%}", *(f"{cell['mean']:.2%}, {points(cell['difference'])}" for cell in cells[1:])
        )
    console.print(kinds)
    for name, row in result["against_nearest"].items():
        ratio, difference = spread(row["divergence_ratio"], ".2f"), points(row["accuracy_difference"])
        console.print(f"{name} against rounding to nearest: {ratio} of its KL, accuracy {difference} points")
    console.print(
        f"{result['questions']:,} held-out questions, the same for all. In brackets 95% intervals: Newcombe's for paired "
        "proportions, the bootstrap over questions for KL, for printed text (judged by character) and for all kinds together"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="python -m vismoe.eval.studies.formats", description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(INTEGERS), help="comma-separated (default: int8,int4,int2)")
    parser.add_argument("--questions", type=int, default=QUESTIONS, metavar="N", help=f"questions in all (default: {QUESTIONS})")
    wrong = f"formats are {', '.join(INTEGERS)}, and questions at least 1"

    def measured(chosen: Namespace, model: str, per_kind: int) -> dict[str, Any]:
        names = chosen.formats.split(",")
        if set(names) - set(INTEGERS):
            parser.error(wrong)
        return measure(model, [Format(name) for name in names], per_kind, chosen.seed, chosen.world, chosen.work)

    return run_on_questions(parser, arguments, FOLDER, measured, print_summary, too_few=wrong)


if __name__ == "__main__":
    raise SystemExit(main())
