"""The papers' claims beside what two models show: `python -m vismoe.eval.studies.claims`.

Runs the studies behind the claims on the small demo model in its world and on the larger one in the gallery, or on the models
that are named, and reads one figure for each claim from their results. Its sign:

- as claimed: the whole interval is on the claimed side of the bound; 95% of what other questions would give, or for what is
  timed or replayed the least and the most of its turns and settings;
- opposite: all of it is on the other side;
- not seen: the bound is inside the interval;
- cannot show: not seen, and the model lacks the property that the claim builds on (`properties`).

Runs of time need a machine with nothing beside them.
Results of studies are kept in a folder, so that an interrupted run continues. Prints a table, then one JSON object on the last
line; `--page FILE` writes the table as Markdown.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vismoe.config import parse_formats
from vismoe.errors import VisMoEError
from vismoe.eval.paired import spread
from vismoe.eval.questions import KINDS
from vismoe.eval.report import folder_of, study_parser
from vismoe.eval.scenes import WORLDS
from vismoe.eval.scoring import OTHERS, TEXT
from vismoe.eval.studies import claim_runs, expert_demand, precision_quality, precision_speed, properties, pruning
from vismoe.eval.studies.precision_judge import HOTNESS, RANDOM
from vismoe.eval.studies.precision_quality import BY_DEPTH
from vismoe.eval.studies.precision_tables import ALL
from vismoe.eval.world import assets_folder
from vismoe.simulate.pinned import WORTH_PINNING

QUESTIONS = 180
MODELS = (("demo-model", "demo"), ("gallery-model", "gallery"))  # folders of assets/, and their worlds
FOLDER = Path(tempfile.gettempdir()) / "vismoe-claims"
WIDTH = 200

Result = dict[str, Any]
Interval = dict[str, float]


def precision(study: str, *pairs: str) -> Callable[[str, int, int, str, Path], Result]:
    """The study of precision with these pairs of formats."""
    return lambda model, *rest: precision_quality.measure(model, study, [parse_formats(pair) for pair in pairs], *rest)


RUNS: dict[str, Callable[[str, int, int, str, Path], Result]] = {  # (model, questions of a kind, seed, world, folder)
    "properties": properties.measure,
    "demand": lambda model, *rest: expert_demand.measure(model, "selection", *rest),
    "pruning": lambda model, *rest: pruning.measure(model, "selection", *rest),
    "ppl": precision("ppl", "16/2"),
    "retention": precision("retention", "4/2", "4/0"),
    "layers": precision("layers", "16/2"),
    **claim_runs.RUNS,
}


@dataclass(frozen=True)
class Claim:
    """What a paper says, its figure, and how to read ours from the result of a study: larger is more as claimed."""

    where: str
    says: str
    theirs: str
    study: str
    read: Callable[[Result], Interval]
    bound: float = 0.0
    scale: float = 100  # of the printed figure
    unit: str = "points"
    builds_on: tuple[str, ...] = ()  # properties of a model without which the claim could not be seen


def row_of(result: Result, selection: str, keep: float) -> Result:
    return next(
        row
        for row in result["contestants"].values()
        if row["pruning"]["selection"] == selection and row["pruning"]["keep"] == keep
    )


def demanded(rival: str, measure: str, sign: int = 1) -> Callable[[Result], Interval]:
    """How a measure of demand differs when affinity keeps half of the tokens."""
    return lambda result: turned(row_of(result, "affinity", 0.5)["against"][rival][measure], sign)


def lost(group: str, keep: float) -> Callable[[Result], Interval]:
    """The accuracy that affinity gains over all tokens; a loss is negative."""
    return lambda result: row_of(result, "affinity", keep)["accuracy"][group]["difference"]


def compared(own: str, rival: str, formats: str) -> Callable[[Result], Interval]:
    """The share of the rival's divergence that a line of a precision study avoids."""

    def read(result: Result) -> Interval:
        names = (formats, own, rival)
        found = next(each for each in result["comparisons"] if (each["panel"], each["own"], each["rival"]) == names)
        ratio = found[ALL]["divergence_ratio"]
        return {"value": 1 - ratio["value"], "low": 1 - ratio["high"], "high": 1 - ratio["low"]}

    return read


def saved(rung: str) -> Callable[[Result], Interval]:
    """The share of the time of the rung before that this one saves."""
    return lambda result: result["saved"][rung]


def retained(formats: str, share: float) -> Callable[[Result], Interval]:
    """The accuracy that keeping this share of the experts in the high format, by depth, gains over keeping all."""

    def read(result: Result) -> Interval:
        line = next(each for each in result["lines"] if (each["panel"], each["name"]) == (formats, BY_DEPTH))
        return next(point for point in line["points"] if point["x"] == share)[ALL]["accuracy"]["difference"]

    return read


def turned(interval: Interval, sign: int) -> Interval:
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    return {"value": value, "low": low, "high": high} if sign > 0 else {"value": -value, "low": -high, "high": -low}


ALL_TOKENS = pruning.ALL
CLAIMS = (
    Claim("VisMMoE, fig. 1", "pictures use more of a layer's experts than text", "text compact, pictures scattered", "properties",
          lambda result: result["wider"]),
    Claim("VisMMoE, fig. 3a", "pruning raises the coverage of the top quarter", "+32% relative", "demand",
          demanded(ALL_TOKENS, "coverage"), builds_on=("prefix",)),
    Claim("", "more than dropping as many tokens at random", "no such control", "demand",
          demanded(RANDOM, "coverage"), builds_on=("prefix",)),
    Claim("VisMMoE, fig. 3b", "pruning leaves more experts of a layer inactive", "inactive ones nearly double", "demand",
          demanded(ALL_TOKENS, "active_experts", -1), scale=1, unit="experts", builds_on=("text", "prefix")),
    Claim("", "more than dropping as many tokens at random", "no such control", "demand",
          demanded(RANDOM, "active_experts", -1), scale=1, unit="experts", builds_on=("text", "prefix")),
    Claim("VisMMoE, fig. 4", "pruning makes consecutive layers route alike", "similarity rises", "demand",
          demanded(ALL_TOKENS, "structure_similarity"), unit="hundredths"),
    Claim("", "more than dropping as many tokens at random", "no such control", "demand",
          demanded(RANDOM, "structure_similarity"), unit="hundredths"),
    Claim("VisMMoE, table 3", "with 70% of the tokens, at most 3.4 points are lost", "-0.1 to 3.4", "pruning",
          lost(OTHERS, 0.7), bound=-0.034),
    Claim("", "and of printed text (OCRBench)", "3.4", "pruning", lost(TEXT, 0.7), bound=-0.034),
    Claim("", "with 50%, better than random", "+0.9 to +18%", "pruning",
          lambda result: row_of(result, "affinity", 0.5)["against"][RANDOM][OTHERS]),
    Claim("", "and of printed text", "+26%", "pruning", lambda result: row_of(result, "affinity", 0.5)["against"][RANDOM][TEXT]),
    Claim("VisMMoE, table 4", "compression alone loads fewer experts (a quarter in memory)", "12% and 5% of the time", "demand",
          demanded(ALL_TOKENS, "loads", -1), scale=1, unit="loads a prompt", builds_on=("text", "prefix")),
    Claim("", "more than dropping as many tokens at random", "no such control", "demand",
          demanded(RANDOM, "loads", -1), scale=1, unit="loads a prompt", builds_on=("text", "prefix")),
    Claim("DynaExq, fig. 4", "demoting the coldest experts costs less than demoting any", "flatter curves", "ppl",
          compared(HOTNESS, RANDOM, "16/2"), unit="% of the KL"),
    Claim("DyMoE, figs. 3, 11", "keeping the experts of critical tokens beats random ones", "better at every r", "retention",
          compared("importance, equal", "random, equal", "4/0"), unit="% of the KL"),
    Claim("", "keeping more in shallow layers beats equal shares", "better at every r", "retention",
          compared(BY_DEPTH, "importance, equal", "4/0"), unit="% of the KL"),
    Claim("DyMoE, table 2", "int4 with a quarter of the experts skipped loses at most 2.6 points", "+2.4 to -2.6", "retention",
          retained("4/0", 0.75), bound=-0.026),
    Claim("", "with that quarter in int2 at most 1.7 points", "+1.8 to -1.7", "retention",
          retained("4/2", 0.75), bound=-0.017, builds_on=("int2",)),
    Claim("DyMoE, fig. 5", "shallow layers are more sensitive to low precision", "falls with depth", "layers",
          lambda result: turned(result["trends"][0][ALL], -1), scale=1, unit="rank correlation"),
    Claim("VisMMoE, fig. 10", "the predictor finds more of the next experts than chance", "64% against 8% among 10 of 128",
          "prediction", lambda result: result["differences"][claim_runs.RANDOM]),
    Claim("VisMMoE, fig. 11", "visual features make prediction better", "recall drops markedly without", "prediction",
          lambda result: result["differences"][claim_runs.WITHOUT]),
    Claim("VisMMoE, fig. 12", "some pinned layers save time", "8 to 12 of 48 are best", "placement",
          lambda result: result["saved"], bound=WORTH_PINNING, unit="% of the time"),
    Claim("VisMMoE, table 4", "compression saves time", "5 to 12%", "parts", saved("+ compression"), unit="% of the time"),
    Claim("", "prediction saves more", "yes", "parts", saved("+ prediction"), unit="% of the time"),
    Claim("", "the orchestrator (here: LFU for LRU) saves more", "yes", "parts", saved("+ orchestrator"), unit="% of the time"),
    Claim("DynaExq, table 1", "hot experts in 16 bits, others in few: at most 1.6 points lost", "64.4 to 65.2 of 66.0", "formats",
          lambda result: result["hotness"]["difference"], bound=-0.016, builds_on=("int2",)),
    Claim("DyMoE, table 3", "a cache saves time", "1.9 times as fast", "speed", saved(precision_speed.CACHE),
          unit="% of a token"),
    Claim("", "prefetch saves more", "1.13 times", "speed", saved(precision_speed.PREFETCH), unit="% of a token"),
    Claim("", "two formats save more", "1.14 to 1.6 times", "speed", saved(precision_speed.ALL), unit="% of a token"),
)  # fmt: skip


def sign(interval: Interval, bound: float) -> str:
    """What an interval says about a claim that the value is above the bound."""
    if interval["low"] > bound:
        return "as claimed"
    return "opposite" if interval["high"] < bound else "not seen"


def measure(models: Sequence[tuple[str, str]], per_kind: int, seed: int, folder: Path) -> Result:
    """Every claim for every (model, world), as the object that is printed last."""
    told = {
        model: {
            name: kept(folder, name, (model, per_kind, seed, world)) for name in dict.fromkeys(claim.study for claim in CLAIMS)
        }
        for model, world in models
    }
    return {
        "models": [{"model": model, "world": world} for model, world in models],
        "seed": seed,
        "questions": per_kind * len(KINDS),
        "claims": [
            {
                "where": claim.where,
                "says": claim.says,
                "paper": claim.theirs,
                "unit": claim.unit,
                "models": [shown(claim, results) for results in told.values()],
            }
            for claim in CLAIMS
        ],
        "properties": {model: results["properties"]["properties"] for model, results in told.items()},
    }


def shown(claim: Claim, results: Mapping[str, Result]) -> dict[str, Any]:
    """A model's figure for a claim, its sign, and the properties that the model lacks for it; `results` by study."""
    found, properties = turned(claim.read(results[claim.study]), 1), results["properties"]["properties"]
    lacks = [name for name in claim.builds_on if not properties[name]["reached"]]
    said = sign(found, claim.bound)
    said = "cannot show" if said == "not seen" and lacks else said
    return {name: value * claim.scale for name, value in found.items()} | {"sign": said, "lacks": lacks}


def kept(folder: Path, name: str, asked: tuple[str, int, int, str]) -> Result:
    """The result of a study, from the folder if it is there."""
    model, per_kind, seed, world = asked
    place = folder / Path(model).name
    path = place / f"{name}-{world}-{per_kind}-{seed}.json"
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        result = RUNS[name](model, per_kind, seed, world, place / path.stem)
        path.write_text(json.dumps(result))
    found: Result = json.loads(path.read_text())
    return found


def lines(result: Result) -> list[list[str]]:
    """The table, its heading first."""
    names = [Path(each["model"]).name for each in result["models"]]
    table = [["paper", "claim", "its figure", *(cell for name in names for cell in (name, "sign"))]]
    for claim in result["claims"]:
        digits = "+.2f" if claim["unit"] in ("rank correlation", "experts", "loads a prompt") else "+.1f"
        cells = [cell for each in claim["models"] for cell in (f"{spread(each, digits)} {claim['unit']}", each["sign"])]
        table.append([claim["where"], claim["says"], claim["paper"], *cells])
    return table


def markdown(table: Sequence[Sequence[str]]) -> str:
    heading, *rows = table
    return "".join(f"| {' | '.join(row)} |\n" for row in (heading, ["---"] * len(heading), *rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("python -m vismoe.eval.studies.claims", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL=WORLD", help="models and their worlds (default: both bundled ones)")
    parser.add_argument("--questions", type=int, default=QUESTIONS, metavar="N", help=f"questions in all (default: {QUESTIONS})")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the held-out scenes (default: 0)")
    parser.add_argument("--work", type=Path, default=FOLDER, metavar="DIR", help=f"folder for results (default: {FOLDER})")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the table there, as Markdown")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    chosen = parser.parse_args(arguments)
    named = [tuple(each.rpartition("=")[::2]) for each in chosen.models]
    if chosen.questions < 1 or any(not model or world not in WORLDS for model, world in named):
        parser.error(f"--questions is at least 1, and models are MODEL=WORLD with a world among {', '.join(WORLDS)}")
    models = named or [(str(assets_folder() / name), world) for name, world in MODELS]
    try:
        with folder_of(chosen.work) as folder:
            result = measure(models, -(-chosen.questions // len(KINDS)), chosen.seed, folder)
    except VisMoEError as error:
        print(error, file=sys.stderr)
        return 1
    table = lines(result)
    if chosen.page:
        chosen.page.write_text(markdown(table))
    if not chosen.json:
        drawn = Table(*table[0])
        for row in table[1:]:
            drawn.add_row(*row)
        Console(width=None if sys.stdout.isatty() else WIDTH).print(drawn)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
