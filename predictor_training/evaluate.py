"""How well lookaheads predict experts, on prompts that were not used in training: `vismoe eval predictor TRACE...`.

Hot recall per layer in decode, token-weighted coverage in prefill, at 1.25, 2.5 and 3.75 times top-k experts, for random,
frequency, present-in-LRU, gate, the paper's index-merged form, learned without the visual summary, and learned; on held-out
prompts of the trained kinds and of another kind. Trains the compared networks, except the learned one if `--predictor` gives it.
Prints tables, then one JSON object on the last line; `--figures FOLDER` writes plots like figures 10 and 11.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vismoe.errors import InputError
from vismoe.eval.paired import Interval, paired_difference
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.report import study_parser, told
from vismoe.lookahead.network import PARTS, Folded, load
from vismoe.predictor_training.collect import progress_bar
from vismoe.predictor_training.recall import Recall, Scorer, by_frequency, by_gate, by_learned, by_lru, by_nothing, hot_recall
from vismoe.predictor_training.samples import Samples, read_samples
from vismoe.predictor_training.train import TrainingRecipe, add_training_flags, recipe_of, refuse_device, train
from vismoe.trace.files import Trace
from vismoe.types import Phase

RANDOM = "random"
LEARNED, WITHOUT, MERGED, GATE = "learned", "learned, no visual summary", "learned, merged by index", "gate"
UNASKED, BLIND = "learned, no routers", "learned, no routers, no visual"
GROUPS = {"held-out": "held-out prompts", "unseen": "a kind not used in training"}


@dataclass(frozen=True)
class Judgement:
    """All predictors on the samples of one phase and one group of prompts."""

    phase: Phase
    group: str
    passes: int
    requests: int  # answers
    prompts: int
    recalls: dict[str, Recall]
    differences: dict[str, Interval]  # of prompts' means at the smallest budget

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "group": self.group,
            "passes": self.passes,
            "requests": self.requests,
            "prompts": self.prompts,
            "budgets": list(next(iter(self.recalls.values())).budgets),
            "predictors": {
                name: {
                    "next_layer": recall.next_layer(),
                    "window": recall.window(),
                    "by_layer": np.round(recall.by_layer[:, 0, 1:], 4).tolist(),
                }
                for name, recall in self.recalls.items()
            },
            "differences": {name: asdict(interval) for name, interval in self.differences.items()},
        }


def trained_variants(
    samples: dict[Phase, Samples],
    recipe: TrainingRecipe,
    report: Callable[[str, int], None],
    device: str = "cpu",
    given: dict[str, Folded] | None = None,
    only: Sequence[str] = (),
) -> dict[Phase, dict[str, Folded]]:
    """Per phase: the learned network (`given`, or trained here), those with fewer inputs, and the paper's merged form; or `only`
    some of them."""
    recipes = {
        LEARNED: recipe,
        WITHOUT: replace(recipe, parts=tuple(part for part in PARTS if part != "visual")),
        MERGED: replace(recipe, merged=True),
        UNASKED: replace(recipe, parts=tuple(part for part in PARTS if part != "gate")),
        BLIND: replace(recipe, parts=("history", "hidden")),
    }
    variants: dict[Phase, dict[str, Folded]] = {}
    for phase, of in samples.items():
        learn = of.where(begins_with("train"))
        variants[phase] = {}
        for name, how in recipes.items():
            if only and name not in only:
                continue
            if name == LEARNED and given is not None:
                variants[phase][name] = given[phase]
                continue
            title = f"{phase}: {name}"
            variants[phase][name] = train(learn, how, lambda epoch, *losses, title=title: report(title, epoch), device)
    return variants


def begins_with(group: str) -> Callable[[str], bool]:
    """Whether a request is of the group, by its name."""
    return lambda name: name.startswith(f"{group}/")


def judge(samples: dict[Phase, Samples], variants: dict[Phase, dict[str, Folded]], top_k: int) -> list[Judgement]:
    """Every predictor on every group of prompts that was not used in training."""
    judged = []
    for phase, of in samples.items():
        training = of.where(begins_with("train"))
        for group in GROUPS:
            held = of.where(begins_with(group))
            if len(held):
                judged.append(_judge(phase, group, held, training, variants[phase], top_k))
    return judged


def _judge(phase: Phase, group: str, held: Samples, training: Samples, networks: dict[str, Folded], top_k: int) -> Judgement:
    scorers: dict[str, Scorer] = {
        RANDOM: by_nothing(held),
        "frequency": by_frequency(held, training),
        "present in LRU": by_lru(held),
    }
    if held.expected is not None:
        scorers[GATE] = by_gate(held)
    scorers |= {name: by_learned(held, networks[name]) for name in (MERGED, BLIND, UNASKED, WITHOUT, LEARNED) if name in networks}
    recalls = {name: hot_recall(held, scorer, top_k) for name, scorer in scorers.items()}
    requests = np.unique(held.request)
    prompts = [held.requests[request] for request in requests]
    of_prompt = {name: by_prompt(prompts, recall.of_request[0]) for name, recall in recalls.items()}
    ours, others = of_prompt[LEARNED], [name for name in (RANDOM, GATE, WITHOUT) if name in recalls]
    differences = {f"{LEARNED} - {name}": paired_difference(of_prompt[name], ours) for name in others}
    return Judgement(phase, group, len(held), requests.size, len(ours), recalls, differences)


def by_prompt(requests: Sequence[str], values: np.ndarray) -> list[float]:
    """Mean value of each prompt, because its answers at several keeps are not independent."""
    _, prompt = np.unique([name.split("@")[0] for name in requests], return_inverse=True)
    return (np.bincount(prompt, values) / np.bincount(prompt)).tolist()


def print_judgements(console: Console, judged: Sequence[Judgement]) -> None:
    """One table per phase and group: recall one layer ahead, and the mean over the window."""
    for judgement in judged:
        what = "hot recall" if judgement.phase is Phase.DECODE else "token-weighted coverage"
        counts = f"{judgement.prompts} prompts, {judgement.requests} answers, {judgement.passes} passes"
        title = f"{judgement.phase}, {GROUPS[judgement.group]}: {what} ({counts})"
        table = Table(title=title, title_justify="left")
        budgets = next(iter(judgement.recalls.values())).budgets
        table.add_column("the best so many", no_wrap=True)
        for name in ("next", "window"):
            for budget in budgets:
                table.add_column(f"{name} {budget}", justify="right")
        for name, recall in judgement.recalls.items():
            table.add_row(name, *(f"{value:.1%}" for value in (*recall.next_layer(), *recall.window())))
        console.print(table)
        for name, interval in judgement.differences.items():
            console.print(
                f"  {name}, best {budgets[0]}, per prompt: {interval.value:+.2%} ({interval.low:+.2%} .. {interval.high:+.2%})"
            )


def plot(judged: Sequence[Judgement], folder: Path) -> list[Path]:
    """Figures 10 (recall per layer, each group) and 11 (the gain from the visual summary) as PNG files."""
    decode = [judgement for judgement in judged if judgement.phase is Phase.DECODE]
    shown = {
        "predictor-recall": (RANDOM, "frequency", "present in LRU", GATE, LEARNED),
        "predictor-visual-summary": (BLIND, UNASKED, WITHOUT, LEARNED),
    }
    return [
        grid_figure(folder / f"{name}.png", [_panel(judgement, b, names) for judgement in decode for b in range(3)], columns=3)
        for name, names in shown.items()
    ]


def _panel(judgement: Judgement, budget: int, names: Sequence[str]) -> Panel:
    there = {name: judgement.recalls[name] for name in names if name in judgement.recalls}
    budgets = next(iter(there.values())).budgets
    series = []
    for name, recall in there.items():
        by_layer = recall.by_layer[budget, 0, 1:].tolist()
        series.append(Series(name, list(range(1, len(by_layer) + 1)), by_layer))
    title = f"{GROUPS[judgement.group]}, best {budgets[budget]}"
    return Panel(series, "MoE layer", "hot recall, one layer ahead", title, percent=True, y_limits=(0, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser("vismoe eval predictor", __doc__.split("\n\n")[1])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="folders that vismoe calibrate --work, or collect, recorded")
    parser.add_argument("--predictor", metavar="FILE", help="file of the learned predictor (default: train it)")
    parser.add_argument("--figures", metavar="FOLDER", help="folder for plots (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    add_training_flags(parser)
    given = parser.parse_args(arguments)

    def study() -> dict[str, Any]:
        refuse_device(given.train_device)
        traces = [Trace.open(path) for path in given.traces]
        samples = read_samples(traces)
        if not any(name.startswith("held-out/") for name in samples[Phase.DECODE].requests):
            raise InputError("these traces have no held-out prompt. Fix: collect more prompts")
        with progress_bar() as bar:
            tasks: dict[str, Any] = {}

            def report(title: str, epoch: int) -> None:
                if title not in tasks:
                    tasks[title] = bar.add_task(f"training, {title}", total=given.epochs)
                bar.update(tasks[title], completed=epoch)

            learned = load(given.predictor) if given.predictor else None
            variants = trained_variants(samples, recipe_of(given), report, given.train_device, learned)
        judged = judge(samples, variants, traces[0].inventory.layers[0].top_k)
        written = plot(judged, Path(given.figures)) if given.figures else []
        if not given.json:
            print_judgements(Console(), judged)
        return {"judgements": [judgement.to_json() for judgement in judged], "figures": [str(path) for path in written]}

    return told(study)


if __name__ == "__main__":
    sys.exit(main())
