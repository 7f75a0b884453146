"""The quality after dropping visual tokens: `python -m vismoe.eval.studies.pruning`.

On one model (the bundled demo model unless another is named), with `deterministic=True` and every expert in memory: accuracy per
kind of held-out question, printed text separately, of each selection of tokens at each share kept, paired with keeping all on the
same questions; also the coverage of the salient core and the mean expansion (equation 2 of VisMMoE). `--study` sweeps one setting
instead. Answers are decoded greedily; `random` draws anew for every batch of questions.

Answers are kept in a folder, one file per contestant and a line per question, so that an interrupted run continues. Prints a
table, then one JSON object on the last line.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

import vismoe
from vismoe.engine.engine import Engine
from vismoe.errors import ConfigError
from vismoe.eval import accuracy, pruned_answers, scoring
from vismoe.eval.answer_file import AnswerFile, Key, answer_all, program_digest
from vismoe.eval.paired import beside, points
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.pruned_answers import draw_of
from vismoe.eval.questions import KINDS, Conversation
from vismoe.eval.report import run_on_questions
from vismoe.eval.scoring import GROUPS, OTHERS, TEXT
from vismoe.flags import SuggestingParser
from vismoe.models.load.runtime import runtime_of
from vismoe.models.visual.prune import VisualPruner
from vismoe.vision.selection import CONTROLS, KeptImage, Pruning

QUESTIONS = 900
WIDTH = 170  # of tables in a file, columns
BATCH = 25  # questions answered together
CONTEXT_TOKENS = 1024  # planned for each question
MASK_MEMORY = "64MiB"  # of a batch about several pictures of 256 tokens each
KEEPS = (0.7, 0.5, 0.3)
WEIGHTS = (0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0)
SELECTIONS = ("affinity", "saliency", "distinct", "visionzip", "random", "uniform")
FOLDER = Path(tempfile.gettempdir()) / "vismoe-pruning"
ALL = "all tokens"
RANDOM = "random"


@dataclass(frozen=True)
class PruningContestant:
    """A treatment of visual tokens."""

    pruning: Pruning
    prune_layer: int
    visual_top_k: int | None = None  # experts of a visual token in prefill; None: as many as the model uses

    def __str__(self) -> str:
        """Shows alpha and lambda only if they differ from the defaults."""
        parts = (
            [ALL]
            if self.pruning.keep == 1
            else [f"{self.pruning.selection} {self.pruning.keep:.0%}", f"layer {self.prune_layer}"]
        )
        for name, value, usual in (
            ("alpha", self.pruning.core_share, Pruning.core_share),
            ("lambda", self.pruning.expansion_weight, Pruning.expansion_weight),
            ("top", self.visual_top_k, None),
        ):
            parts += [f"{name} {value:g}"] if value != usual else []
        return ", ".join(parts)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "PruningContestant":
        """The contestant of a row of a result."""
        return cls(Pruning(**row["pruning"]), row["prune_layer"], row["visual_top_k"])


def controls_of(contestant: PruningContestant) -> dict[str, PruningContestant]:
    """The selections with which one is compared, with the same share kept at the same layer: by saliency alone, a control by its
    own kind of saliency too, and by chance.
    """
    own = contestant.pruning.selection
    names = ("saliency", RANDOM, *((own.removeprefix("affinity-"),) if own in CONTROLS else ()))
    return {name: replace(contestant, pruning=Pruning(contestant.pruning.keep, name)) for name in names}


def labelled(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The contestants of a result under shorter names for tables: the layer only if it differs from the model's default."""
    return {name.replace(f", layer {result['prune_layer']}", ""): row for name, row in result["contestants"].items()}


def program_of(contestant: PruningContestant) -> str:
    """The digest of the code that produces a contestant's answers."""
    return program_digest(
        [*pruned_answers.PROGRAM, *(pruned_answers.FEWER_EXPERTS if contestant.visual_top_k is not None else ())]
    )


@dataclass(frozen=True)
class PrunedAnswer:
    """One contestant's answer to one question. Coverage and expansions are means over its images, None where unknown."""

    answer: str
    score: float
    visual_tokens: int
    kept_tokens: int
    coverage: float | None = None
    mean_expansion: float | None = None
    kept_expansion: float | None = None


def _pruner_of(engine: Engine) -> VisualPruner:
    pruner = runtime_of(engine.model).pruner
    assert pruner is not None, "Engines loads only what can drop visual tokens"
    return pruner


class Engines:
    """One engine for each loading that contestants need; all experts resident, no lookahead."""

    def __init__(self, model_path: str):
        self._path = model_path
        first = self._load("auto", None)
        self.prune_layer = _pruner_of(first).prune_layer
        self.fingerprint = runtime_of(first.model).store.fingerprint
        self.inventory = runtime_of(first.model).store.inventory
        self.processor = first.processor
        self._loaded: dict[tuple[int, int | None], Engine] = {(self.prune_layer, None): first}

    def _load(self, prune_layer: int | str, visual_top_k: int | None) -> Engine:
        engine = vismoe.load(
            self._path,
            memory="100%",
            context=BATCH * CONTEXT_TOKENS,
            mask_memory=MASK_MEMORY,
            store="none",
            lookahead="none",
            deterministic=True,
            prune_layer=prune_layer,
            visual_top_k=visual_top_k,
        )
        if not engine.can_prune:
            raise ConfigError(f"{self._path}: {engine.backends['visual tokens']}. Fix: name a model that allows it")
        assert runtime_of(engine.model).context.visual_top_k == visual_top_k, "the setting is in force"
        return engine

    def of(self, contestant: PruningContestant) -> Engine:
        """The engine that is loaded as a contestant needs it."""
        key = contestant.prune_layer, contestant.visual_top_k
        if key not in self._loaded:
            self._loaded[key] = self._load(*key)
        return self._loaded[key]

    def answers(
        self, contestant: PruningContestant, inputs: Any, seed: int, most_tokens: int = accuracy.MAX_ANSWER_TOKENS
    ) -> tuple[list[str], list[KeptImage]]:
        """Greedy answers to a batch of prompts, and the kept tokens of their images; `seed` is for `random`."""
        engine = self.of(contestant)
        pruner = _pruner_of(engine)
        pruner.begin_request()
        pruner.pruning = replace(contestant.pruning, seed=seed)
        return accuracy.decoded(engine.model, engine.processor, inputs, most_tokens), list(pruner.kept)

    def close(self) -> None:
        for engine in self._loaded.values():
            engine.close()


@dataclass(frozen=True)
class PruningStudy:
    """Contestants beside keeping all tokens, for a model whose pruning begins at a given layer; and how to plot them."""

    contestants: Callable[[int], list[PruningContestant]]
    axis: str
    x: Callable[[PruningContestant], float]
    line: Callable[[PruningContestant], str] = lambda contestant: contestant.pruning.selection


def by_affinity(**weights: Any) -> Pruning:
    return Pruning(0.5, "affinity", **weights)


STUDIES = {
    "selection": PruningStudy(
        lambda layer: [PruningContestant(Pruning(keep, selection), layer) for selection in SELECTIONS for keep in KEEPS],
        "visual tokens kept, %",
        lambda contestant: 100 * contestant.pruning.keep,
    ),
    "core-share": PruningStudy(  # at 0.5 the whole budget goes to the core: selection by saliency
        lambda layer: [PruningContestant(by_affinity(core_share=share), layer) for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)],
        "core share (alpha), half of the tokens kept",
        lambda contestant: contestant.pruning.core_share,
    ),
    "expansion-weight": PruningStudy(  # at 0 routing does not count: selection by saliency
        lambda layer: [PruningContestant(by_affinity(expansion_weight=each), layer) for each in WEIGHTS],
        "expansion weight (lambda), half of the tokens kept",
        lambda contestant: contestant.pruning.expansion_weight,
    ),
    "prune-layer": PruningStudy(
        lambda _: [
            PruningContestant(Pruning(0.5, name), deep) for name in ("affinity", "saliency", "random") for deep in range(1, 7)
        ],
        "prune layer, half of the tokens kept",
        lambda contestant: contestant.prune_layer,
    ),
    "controls": PruningStudy(  # algorithm 1 on each kind of saliency, beside the same saliency alone
        lambda layer: [PruningContestant(Pruning(0.5, name), layer) for name in (*SELECTIONS, *CONTROLS)],
        "half of the tokens kept",
        lambda contestant: 0,
    ),
    "visual-top-k": PruningStudy(
        lambda layer: [PruningContestant(pruning, layer, top) for pruning in (Pruning(), by_affinity()) for top in (3, 2, 1)],
        "experts of a visual token",
        lambda contestant: contestant.visual_top_k or 0,
        lambda contestant: f"{contestant.pruning.keep:.0%} of the tokens kept",
    ),
}


def measure(model_path: str, study: str, per_kind: int, seed: int, world: str, folder: Path) -> dict[str, Any]:
    """All results, as the object that is printed last."""
    engines = Engines(model_path)
    try:
        everything = PruningContestant(Pruning(), engines.prune_layer)
        contestants = [everything, *STUDIES[study].contestants(engines.prune_layer)]
        belongs_to = {"model": engines.fingerprint, "seed": seed, "world": world, "batch": BATCH}
        kept = {
            each: AnswerFile(folder, str(each), belongs_to | {"program": program_of(each), **asdict(each)}, PrunedAnswer)
            for each in contestants
        }
        kinds, table = answer_all(kept, per_kind, BATCH, seed, world, partial(answer_batch, engines))
        return {
            "model": model_path,
            "study": study,
            "seed": seed,
            "world": world,
            "questions": len(kinds),
            "prune_layer": engines.prune_layer,
            "contestants": summary(table, kinds),
        }
    finally:
        engines.close()


def answer_batch(
    engines: Engines, first: Key, talks: Sequence[Conversation], contestants: Sequence[PruningContestant]
) -> Iterator[tuple[PruningContestant, list[PrunedAnswer]]]:
    """Every contestant on the same batch, which begins with question `first`; prompts and pictures are prepared once."""
    inputs = accuracy.prompts(engines.processor, talks)
    image_token = engines.of(contestants[0]).model.config.image_token_id
    visual = (inputs["input_ids"] == image_token).sum(dim=1).tolist()
    for contestant in contestants:
        texts, images = engines.answers(contestant, inputs, draw_of(first))
        rows = []
        for row, (talk, text) in enumerate(zip(talks, texts, strict=True)):
            mine = [image for image in images if image.row == row]
            rows.append(answered(text, scoring.score(talk.turns[-1], text), visual[row], mine))
        yield contestant, rows


def answered(text: str, score: float, visual_tokens: int, images: Sequence[KeptImage]) -> PrunedAnswer:
    """An answer with the kept tokens of its images; without images nothing was dropped."""
    dropped = sum(image.tokens - len(image.selection.kept) for image in images)
    selections = [image.selection for image in images]
    return PrunedAnswer(
        text,
        score,
        visual_tokens,
        visual_tokens - dropped,
        mean_of(selection.coverage for selection in selections),
        mean_of(selection.mean_expansion for selection in selections),
        mean_of(selection.kept_expansion for selection in selections),
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def summary(table: dict[PruningContestant, list[PrunedAnswer]], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Results per contestant; `kinds` gives the kind of each question.

    Differences are from keeping all tokens, and from the selections of `controls_of`, if the table has them.
    """
    everything = next(rows for contestant, rows in table.items() if str(contestant) == ALL)
    out = {}
    for contestant, rows in table.items():
        rivals = {name: table[rival] for name, rival in controls_of(contestant).items() if rival in table and rival != contestant}
        out[str(contestant)] = {
            **asdict(contestant),
            "accuracy": {group: _accuracy(rows, everything, kinds, GROUPS[group]) for group in GROUPS},
            "against": {
                name: {group: _accuracy(rows, rival, kinds, GROUPS[group])["difference"] for group in (OTHERS, TEXT)}
                for name, rival in rivals.items()
            },
            "kept": sum(row.kept_tokens for row in rows) / sum(row.visual_tokens for row in rows),
            **{name: mean_of(getattr(row, name) for row in rows) for name in ("coverage", "mean_expansion", "kept_expansion")},
        }
    return out


def _accuracy(
    rows: Sequence[PrunedAnswer], base: Sequence[PrunedAnswer], kinds: Sequence[str], group: Sequence[str]
) -> dict[str, Any]:
    its, own = ([row.score for row, kind in zip(chosen, kinds, strict=True) if kind in group] for chosen in (base, rows))
    return beside(its, own)


def print_summary(console: Console, result: dict[str, Any]) -> None:
    table = Table(
        "visual tokens", "kept", OTHERS, "against all tokens", TEXT, "against all tokens", "coverage", "expansion", "of the kept"
    )
    for name, row in labelled(result).items():
        cells = [row["accuracy"][group] for group in (OTHERS, TEXT)]
        differences = ["" if name == ALL else points(cell["difference"]) for cell in cells]
        accuracies = [f"{cell['mean']:.2%}" for cell in cells]
        shares = ["" if row[key] is None else f"{row[key]:.1%}" for key in ("coverage", "mean_expansion", "kept_expansion")]
        table.add_row(name, f"{row['kept']:.1%}", accuracies[0], differences[0], accuracies[1], differences[1], *shares)
    console.print(table)
    kinds = Table("accuracy", *KINDS)
    for name, row in labelled(result).items():
        kinds.add_row(name, *(f"{row['accuracy'][kind]['mean']:.1%}" for kind in KINDS))
    console.print(kinds)
    for name, row in labelled(result).items():
        for rival, found in row["against"].items():
            against = ", ".join(f"{group} {points(interval)}" for group, interval in found.items())
            console.print(f"{name} against {rival}: {against} points")
    console.print(
        f"{result['questions']:,} held-out questions, the same for all. In brackets 95% intervals of paired differences, in "
        "points: Newcombe's for right or wrong, the bootstrap over questions for printed text, which is judged by character"
    )


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy over the swept setting, printed text separately."""
    study = STUDIES[result["study"]]
    everything, *others = ((PruningContestant.of(row), row["accuracy"]) for row in result["contestants"].values())
    lines: dict[str, list[tuple[PruningContestant, Any]]] = {}
    for contestant, found in others:
        lines.setdefault(study.line(contestant), [everything] if result["study"] == "selection" else []).append(
            (contestant, found)
        )
    panels = []
    for group in (OTHERS, TEXT):
        series = [
            Series.of(name, [study.x(contestant) for contestant, _ in line], [found[group] for _, found in line], "mean")
            for name, line in lines.items()
        ]
        panels.append(
            Panel(series, study.axis, "accuracy", f"{group}; all tokens: {everything[1][group]['mean']:.1%}", percent=True)
        )
    grid_figure(folder / f"pruning-{result['study']}.png", panels)


def run(
    arguments: Sequence[str] | None,
    program: str,
    about: str,
    asked: int,
    folder: Path,
    measure: Callable[[str, str, int, int, str, Path], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
    print_summary: Callable[[Console, dict[str, Any]], None],
) -> int:
    """The command line of a study of contestants in STUDIES; returns the exit code."""
    parser = SuggestingParser(prog=f"python -m vismoe.eval.{program}", description=about.splitlines()[0])
    parser.add_argument("--study", choices=STUDIES, default="selection", help="what to compare (default: selection)")
    parser.add_argument("--questions", type=int, default=asked, metavar="N", help=f"questions in all (default: {asked})")

    def measured(chosen: Namespace, model: str, per_kind: int) -> dict[str, Any]:
        return measure(model, chosen.study, per_kind, chosen.seed, chosen.world, chosen.work)

    work_help = "folder for answers, from which a run continues"
    return run_on_questions(parser, arguments, folder, measured, print_summary, draw, work_help=work_help, width=WIDTH)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(arguments, "pruning", __doc__, QUESTIONS, FOLDER, measure, draw, print_summary)


if __name__ == "__main__":
    raise SystemExit(main())
