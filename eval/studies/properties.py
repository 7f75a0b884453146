"""Whether a model could show what the papers claim: `python -m vismoe.eval.studies.properties`.

Four properties that a model has before any token is dropped and any expert changed, so that they favour no selection:

- skew: the share of a prompt's assignments that the most used quarter of a layer's experts takes;
- text: the share of a layer's experts that a prompt's text alone uses, which dropping visual tokens can never spare;
- prefix: how well a visual token's expansion in the layers before the pruning tells its expansion behind it (the correlation of
  the two over the tokens outside a random core of a fifth of them, equation 2 of VisMMoE);
- formats: the accuracy that is lost when every expert is int2.

Prints a table with what each should be, then one JSON object on the last line.
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vismoe.eval.paired import ratio_of_sums, spread
from vismoe.eval.questions import KINDS
from vismoe.eval.report import run_on_questions
from vismoe.eval.studies import formats
from vismoe.eval.studies.expert_demand import alone, recorded
from vismoe.eval.studies.pruning import Engines, PruningContestant
from vismoe.eval.studies.routing import LayerLoad, active_experts, coverage, expansions, load, most, prompt_layers
from vismoe.flags import SuggestingParser
from vismoe.types import Format
from vismoe.vision.selection import Pruning

QUESTIONS = 180
CORE_SHARE = 0.2  # of the visual tokens
FOLDER = Path(tempfile.gettempdir()) / "vismoe-properties"
WANTED = {  # (meaning, at least or at most, how much)
    "skew": ("assignments of a prompt to its top quarter of the experts", ">=", 0.85),
    "text": ("experts that the text alone uses", "<=", 0.40),
    "prefix": ("correlation of expansion before and behind the pruning", ">=", 0.50),
    "int2": ("accuracy lost with every expert in int2", ">=", 0.05),
}


def measure(model_path: str, per_kind: int, seed: int, world: str, folder: Path) -> dict[str, Any]:
    """All results, as the object that is printed last."""
    engines = Engines(model_path)
    try:
        everything = PruningContestant(Pruning(), engines.prune_layer)
        traces = [recorded(engines, everything, kind, per_kind, seed, world, folder / "routing") for kind in KINDS]
        steps = [step for trace in traces for step in alone(trace)]
        experts = engines.inventory.layers[0].num_experts
        before = sum(decoder_layer(layer.path) < engines.prune_layer for layer in engines.inventory.layers)
    finally:
        engines.close()
    random = np.random.default_rng(seed)
    prompts = [of_prompt(prompt_layers(step), before, experts, random) for step in steps]
    means = {name: asdict(ratio_of_sums([row[name] for row in prompts], np.ones(len(prompts)))) for name in prompts[0]}
    coarse = formats.measure(model_path, [Format.INT2], per_kind, seed, world, folder / "formats")["contestants"]["int2"]
    lost = {name: -value for name, value in coarse["accuracy"]["all"]["difference"].items()}
    means["int2"] = lost | {"low": lost["high"], "high": lost["low"]}
    return {
        "model": model_path,
        "world": world,
        "seed": seed,
        "questions": per_kind * len(KINDS),
        "properties": {
            name: means[name] | {"wanted": f"{sign} {bound:g}", "reached": reached(means[name]["value"], sign, bound)}
            for name, (_, sign, bound) in WANTED.items()
        },
        "visual": means["visual"],
        "wider": means["wider"],
        "int2": coarse,
    }


def decoder_layer(path: str) -> int:
    """The decoder layer of an experts module, from its path such as `model.language_model.layers.3.mlp.experts`."""
    return int(path.split(".layers.")[-1].split(".")[0])


def of_prompt(layers: Sequence[LayerLoad], before: int, experts: int, random: np.random.Generator) -> dict[str, float]:
    """The properties of one prompt's routing; `visual`: the share of the experts that its visual tokens use, `wider`: how much
    more than its text uses."""
    loads = [load(layer, experts) for layer in layers]
    used = {
        name: float(np.mean([active_experts(load(layer.only(layer.visual == visual), experts)) for layer in layers]) / experts)
        for name, visual in (("text", False), ("visual", True))
    }
    visual = [layer.only(layer.visual) for layer in layers]
    core = random.random(len(visual[0].tokens)) < CORE_SHARE
    prefix, deep = (expansions(part, core, experts)[~core] for part in (visual[:before], visual[before:]))
    varied = prefix.std() > 0 and deep.std() > 0
    return used | {
        "wider": used["visual"] - used["text"],
        "skew": float(np.mean([coverage(each, most(each, experts // 4)) for each in loads])),
        "prefix": float(np.corrcoef(prefix, deep)[0, 1]) if varied else 0.0,
    }


def reached(value: float, sign: str, bound: float) -> bool:
    return value >= bound if sign == ">=" else value <= bound


def print_summary(console: Console, result: dict[str, Any]) -> None:
    table = Table("property", "measured", "wanted", "reached")
    for name, row in result["properties"].items():
        table.add_row(WANTED[name][0], spread(row, ".3f"), row["wanted"], "yes" if row["reached"] else "no")
    console.print(table)
    console.print(
        f"{result['questions']:,} held-out prompts of the world {result['world']}, means over the MoE layers, 95% intervals. "
        f"Visual tokens use {result['visual']['value']:.1%} of a layer's experts"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="python -m vismoe.eval.studies.properties", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=QUESTIONS, metavar="N", help=f"questions in all (default: {QUESTIONS})")

    def measured(chosen: Namespace, model: str, per_kind: int) -> dict[str, Any]:
        return measure(model, per_kind, chosen.seed, chosen.world, chosen.work)

    return run_on_questions(parser, arguments, FOLDER, measured, print_summary, width=120)


if __name__ == "__main__":
    raise SystemExit(main())
