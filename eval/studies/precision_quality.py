"""The quality of choosing experts' precision while a model runs: `python -m vismoe.eval.studies.precision_quality`.

On one model (the bundled demo model unless another is named), with plain transformers and only the routed experts replaced; the
decisions are those of `vismoe.precision`, the computation is not the engine's. `--study`:

ppl        the share of each layer's experts that are in the low format, demoted coldest first, at random, or uniformly (DynaExq,
           figure 4): divergence from 16 bit and perplexity over the tokens of true answers
retention  the share of critical experts, chosen by importance or at random, by depth or equal in all layers (DyMoE, table 2,
           figures 3 and 11): also accuracy
hitters    the share of a prompt's tokens that are heavy hitters, at the least retention
layers     one layer's experts in int2, or skipped, all others in 16 bit (DyMoE, figure 5)

Answers are kept in a folder, one file per contestant and a line per question, so that an interrupted run continues. Prints
tables, then one JSON object on the last line.
"""

import hashlib
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText

import vismoe.precision.depth
import vismoe.precision.importance
from vismoe.config import parse_formats
from vismoe.errors import ConfigError
from vismoe.eval import accuracy, scoring, world
from vismoe.eval import questions as asking
from vismoe.eval.answer_file import AnswerFile, answer_all, program_digest
from vismoe.eval.report import run_on_questions, study_parser
from vismoe.eval.studies import format_quality, precision_judge, precision_model, precision_rules
from vismoe.eval.studies.precision_judge import COUNTS, HOTNESS, RANDOM, JudgedAnswer, judged, orders_of
from vismoe.eval.studies.precision_model import MixedExperts
from vismoe.eval.studies.precision_rules import ALIKE, Demoted, Everywhere, InOneLayer, PrecisionContestant, Retained, RuleInputs
from vismoe.eval.studies.precision_tables import Comparison, TableLine, draw, print_summary, summary
from vismoe.models.inputs.processor import load_processor
from vismoe.pair import BITS, FormatPair
from vismoe.precision.importance import HEAVY_SHARE
from vismoe.types import Format

BATCH = 50  # questions answered together
CALIBRATION = 20  # questions of each kind that define the orders of experts
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
RETENTIONS = (0.5, 0.6, 0.75, 0.9)
HITTERS = (0.05, 0.1, HEAVY_SHARE, 0.4, 1.0)
DRAWS = (1, 2, 3)  # random orders
HEAVY, EVERYBODY = "heavy hitters", "every token"
BY_DEPTH, WEIGHTS_LEFT = "importance, by depth", "by depth, weights left"
WIDTH = 240  # of tables in a file, columns
FOLDER = Path(tempfile.gettempdir()) / "vismoe-precision"

PROGRAM = (
    accuracy, format_quality, asking, scoring, world, precision_judge, precision_model, precision_rules,
    vismoe.precision.depth, vismoe.precision.importance,
)  # fmt: skip


@dataclass(frozen=True)
class QualityStudy:
    """What is compared: the lines of a pair of formats in a model of so many MoE layers, and their comparisons."""

    lines: Callable[[FormatPair, int], list[TableLine]]
    comparisons: Sequence[Comparison]
    axis: str
    formats: str  # pairs, unless the user names others
    questions: int
    answered: bool = True  # whether answers are generated, for accuracy
    trends: bool = False  # whether the trend of lines is computed


def named(pair: FormatPair) -> str:
    return f"{BITS[pair.high]}/{BITS[pair.low]}"


def demoted(pair: FormatPair, _: int) -> list[TableLine]:
    if pair.low is None:
        raise ConfigError(
            f"{named(pair)}: study ppl computes demoted experts in the low format, and with 0 bits there is none. "
            "Fix: name a pair such as 4/2 with --formats"
        )
    low = Everywhere(pair.low)

    def line(order: str, seeds: Sequence[int] = (0,)) -> TableLine:
        between = {share: [Demoted(pair, share, order, seed) for seed in seeds] for share in SHARES}
        return TableLine(named(pair), order, {0.0: [Everywhere(pair.high)], **between, 1.0: [low]})

    return [line(HOTNESS), line(COUNTS), line(RANDOM, DRAWS), line(ALIKE)]


def retained(pair: FormatPair, _: int) -> list[TableLine]:
    def line(name: str, *how: Any) -> TableLine:
        below = {share: [Retained(pair, share, *how)] for share in RETENTIONS}
        return TableLine(named(pair), name, {**below, 1.0: [Everywhere(pair.high)]})

    lines = [
        line(BY_DEPTH),
        line("importance, equal", "importance", "equal"),
        line("random, by depth", "random"),
        line("random, equal", "random", "equal"),
    ]
    return lines if pair.low else [*lines, line(WEIGHTS_LEFT, "importance", "cosine", False)]


def hitting(pair: FormatPair, _: int) -> list[TableLine]:
    shares = {share: [Retained(pair, min(RETENTIONS), hitters=share)] for share in HITTERS}
    everybody = {share: [Retained(pair, min(RETENTIONS), hitters=1.0)] for share in shares}
    return [TableLine(named(pair), HEAVY, shares), TableLine(named(pair), EVERYBODY, everybody)]


def single(pair: FormatPair, layers: int) -> list[TableLine]:
    return [TableLine(named(pair), "one layer", {layer: [InOneLayer(layer, pair)] for layer in range(layers)})]


STUDIES = {
    "ppl": QualityStudy(
        demoted,
        [Comparison(HOTNESS, RANDOM), Comparison(HOTNESS, ALIKE), Comparison(COUNTS, RANDOM), Comparison(HOTNESS, COUNTS)],
        "share of low-precision experts",
        "16/4,16/2,4/2",
        225,
        answered=False,
    ),
    "retention": QualityStudy(
        retained,
        [
            *(Comparison(BY_DEPTH, rival) for rival in ("importance, equal", "random, by depth", WEIGHTS_LEFT)),
            Comparison("importance, equal", "random, equal"),
        ],
        "retention",
        "4/2,4/0",
        450,
    ),
    "hitters": QualityStudy(hitting, [Comparison(HEAVY, EVERYBODY)], "share of heavy hitters", "4/2,4/0", 450),
    "layers": QualityStudy(single, [], "layer", "16/2,16/0", 450, trends=True),
}


def measure(
    model_path: str, study: str, pairs: Sequence[FormatPair], per_kind: int, seed: int, world: str, folder: Path
) -> dict[str, Any]:
    """All results, as the object that is printed last."""
    chosen = STUDIES[study]
    model = AutoModelForImageTextToText.from_pretrained(
        model_path, dtype="auto", experts_implementation="eager", attn_implementation="eager"
    ).eval()
    processor = load_processor(model_path)
    resident = {format for pair in pairs for format in pair.resident} | {Format.RAW}
    experts = MixedExperts(model, [format for format in Format if format in resident])
    lines = [(line, Everywhere(pair.high)) for pair in pairs for line in chosen.lines(pair, len(experts.experts))]
    contestants = list(dict.fromkeys(contestants_of(lines)))
    ordered = any(isinstance(contestant, Demoted) for contestant in contestants)
    orders = orders_of(experts, processor, seed, world, CALIBRATION, DRAWS) if ordered else {}
    facts = RuleInputs(experts.formats, orders)
    belongs_to = {"program": program_digest(PROGRAM), "seed": seed, "world": world, "batch": BATCH, "answered": chosen.answered}

    def file_of(contestant: PrecisionContestant) -> AnswerFile[JudgedAnswer]:
        its = {
            "weights": experts.digest(contestant.used),
            "contestant": asdict(contestant),
            "demoted": digest_of_demoted(contestant, facts),
        }
        return AnswerFile(folder / study, str(contestant).replace("/", "-"), belongs_to | its, JudgedAnswer)

    kept = {contestant: file_of(contestant) for contestant in contestants}

    kinds, table = answer_all(
        kept,
        per_kind,
        BATCH,
        seed,
        world,
        lambda _, talks, missing: judged(experts, processor, talks, missing, facts, chosen.answered),
    )
    return {
        "model": model_path,
        "study": study,
        "seed": seed,
        "world": world,
        "questions": len(kinds),
        "axis": chosen.axis,
        **summary(lines, chosen.comparisons, chosen.trends, table, kinds),
    }


def digest_of_demoted(contestant: PrecisionContestant, facts: RuleInputs) -> str | None:
    """Digest of which experts are in the low format, for a contestant that follows an order."""
    if not isinstance(contestant, Demoted) or contestant.order == ALIKE:
        return None
    return hashlib.sha256(contestant.demotes(facts).tobytes()).hexdigest()


def contestants_of(lines: Sequence[tuple[TableLine, Everywhere]]) -> Iterator[PrecisionContestant]:
    """The contestants of the lines, and those with which they are compared."""
    for line, base in lines:
        yield base
        for contestants in line.points.values():
            yield from contestants


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("python -m vismoe.eval.studies.precision_quality", __doc__)
    parser.add_argument("--study", choices=STUDIES, default="retention", help="what to compare (default: retention)")
    parser.add_argument("--formats", metavar="PAIRS", help="comma-separated pairs, such as 4/2,4/0 (default: the study's own)")
    parser.add_argument("--questions", type=int, metavar="N", help="questions in all (default: the study's own number)")

    def measured(chosen: Namespace, model: str, per_kind: int) -> dict[str, Any]:
        pairs = [parse_formats(text) for text in (chosen.formats or STUDIES[chosen.study].formats).split(",")]
        return measure(model, chosen.study, pairs, per_kind, chosen.seed, chosen.world, chosen.work)

    def drawn(result: dict[str, Any], folder: Path) -> None:
        draw(result, folder / f"precision-{result['study']}.png")

    def usual(chosen: Namespace) -> int:
        return STUDIES[chosen.study].questions

    return run_on_questions(parser, arguments, FOLDER, measured, print_summary, drawn, usual=usual, width=WIDTH)


if __name__ == "__main__":
    raise SystemExit(main())
