"""Calibrates a model by running it: traces, the predictor, and the results of replay, installed beside the model's files.

1. collect    answers of real prompts, recorded at keep 1 and 0.5 (an interrupted run continues)
2. prune      from which decoder layer on visual tokens can be dropped: the curve, and how many answers change at each layer;
              which selection of kept tokens costs answers least there
   drafts     how well copies of the experts in few bits draft, of the formats that are packed
3. train      the networks of the learned lookahead
4. evaluate   recall on prompts that were not used in training
5. replay     which lookahead is best in virtual time, how many layers are worth pinning, what passes of several tokens fetch
6. install    calibration.json and predictor.safetensors
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vismoe.engine.engine import Engine
from vismoe.errors import ConfigError
from vismoe.lookahead.calibration import Calibration, geometry_of, router_digest
from vismoe.lookahead.network import PARTS, Folded
from vismoe.models.load.runtime import runtime_of
from vismoe.models.visual.prune import VisualPruner
from vismoe.models.visual.settings import default_prune_layer, joined_layers
from vismoe.predictor_training.collect import ANSWER_TOKENS, collect
from vismoe.predictor_training.drafts import SHARES, fidelities, missing_experts
from vismoe.predictor_training.evaluate import LEARNED, WITHOUT, Judgement, judge
from vismoe.predictor_training.prompts import CalibrationPrompt, is_validation
from vismoe.predictor_training.prune_depth import Depth, depth_curve, shallowest
from vismoe.predictor_training.replayed import ReplayContest, contest, pinned_by_share, with_scores
from vismoe.predictor_training.samples import Samples, read_samples
from vismoe.predictor_training.selections import SelectionCost, by_turns, cheapest, costs_of, scorer
from vismoe.predictor_training.train import TrainingRecipe, refuse_too_few, train
from vismoe.speculate.worth import DraftCurves
from vismoe.trace.files import Trace
from vismoe.types import Phase

DIVERGENCE_KEEP = 0.5
DIVERGENCE_PROMPTS = 32
CONTEST_REQUESTS = 40  # requests of each trace, from the validation split

Told = Callable[[str, int, int | None], None]  # (activity, amount done, total)


@dataclass(frozen=True)
class Changed:
    """How dropping half of the visual tokens from one layer on changes greedy answers."""

    prune_layer: int
    same_answers: float  # share of answers equal to those at keep 1, word by word
    same_beginning: float  # share of an answer's characters before the first difference, mean


@dataclass(frozen=True)
class Calibrated:
    """The result, and the measurements behind it."""

    calibration: Calibration
    networks: dict[str, Folded]
    depths: list[Depth]
    changed: list[Changed]
    costs: list[SelectionCost]
    judged: list[Judgement]
    contest: ReplayContest
    drafts_left_out: dict[str, str]  # draft formats that were not measured, and why
    validation_loss: dict[str, float]
    recorded_with: tuple[int, str] | None  # layer and selection of the training answers at keep 0.5; None: no such answers

    @property
    def recorded_otherwise(self) -> str | None:
        """A sentence if training answers dropped visual tokens in another way than the calibrated one; otherwise None."""
        c = self.calibration
        if self.recorded_with is None or self.recorded_with == (c.prune_layer, c.selection or self.recorded_with[1]):
            return None
        layer, selection = self.recorded_with
        return (
            f"the answers at keep {DIVERGENCE_KEEP:g} used in training dropped visual tokens from decoder layer {layer} on "
            f"({selection}), not from {c.prune_layer} on ({c.selection or selection}) as from now on. To record them that way: "
            f"vismoe calibrate --prune-layer {c.prune_layer} --selection {c.selection or selection}"
        )

    def to_json(self) -> dict[str, Any]:
        c = self.calibration
        return {
            "folder": str(c.folder),
            "lookahead": c.lookahead,
            "least_probability": c.least_probability,
            "prune_layer": c.prune_layer,
            "selection": c.selection,
            "recorded_otherwise": self.recorded_otherwise,
            "pinned_layers": c.pinned_layers,
            "depths": [vars(depth) for depth in self.depths],
            "changed": [vars(changed) for changed in self.changed],
            "selections": [vars(cost) for cost in self.costs],
            "judgements": [judgement.to_json() for judgement in self.judged],
            "drafts": {"left_out": self.drafts_left_out} | ({} if c.drafts is None else asdict(c.drafts)),
            "replay": {"relative_seconds": self.contest.relative_s, "cells": self.contest.cells, "time": "virtual"},
        }


def refuse_unwritable(folder: Path) -> None:
    """Raises ConfigError if the result could not be installed, before hours are spent on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}. "
            "Fix: name another folder with --out, and load with --calibration FOLDER"
        ) from error


def calibrate(
    engine: Engine,
    prompts: Sequence[CalibrationPrompt],
    work: Path,
    out: Path,
    recipe: TrainingRecipe,
    told: Told = lambda doing, done, total: None,
    device: str = "cpu",
) -> Calibrated:
    """Runs all six steps, and closes the engine before training, which does not need it. `work`: folder of the traces.

    Prompts that the model refuses are left out of every step. Raises InputError if too few are left for training.
    """
    refuse_unwritable(out)
    refuse_too_few([prompt.name for prompt in prompts])
    pruner = runtime_of(engine.model).pruner
    recorded_with = None if pruner is None or pruner.pruning is None else (pruner.prune_layer, pruner.pruning.selection)
    traces = collect(engine, prompts, work, report=lambda done, total: told("collecting", done, total))
    answered = set.intersection(*(set(trace.requests) for trace in traces))
    prompts = [prompt for prompt in prompts if prompt.name in answered]
    refuse_too_few([prompt.name for prompt in prompts])
    depths, changed, prune_layer = _prune_layer(engine, traces, prompts, told)
    costs: list[SelectionCost] = []
    if prune_layer is not None:
        _begin_at(engine, prune_layer)
        costs = costs_of(by_turns(prompts), scorer(engine), lambda done, total: told("comparing selections", done, total))
    drafts, left_out = fidelities(engine, by_turns(prompts), lambda done, total: told("drafting", done, total))
    inventory = runtime_of(engine.model).store.inventory
    geometry = geometry_of(inventory, engine.model.config.get_text_config().hidden_size)
    digest, name = router_digest(engine.model, inventory), Path(engine.name).name or engine.name
    engine.close()
    samples = read_samples(traces, {prompt.name for prompt in prompts})
    networks, losses = _networks(samples, recipe, told, device)
    told("evaluating", 0, None)
    judged = judge(samples, {phase: {LEARNED: networks[phase]} for phase in samples}, geometry.top_k)
    told("replaying", 0, None)
    scored = _scored(traces, samples, networks, recipe.gamma)
    won = contest(scored)
    calibration = Calibration(
        out,
        name,
        digest,
        geometry,
        won.lookahead,
        prune_layer,
        cheapest(costs),
        pinned_by_share(scored["gate"]),
        won.least_probability,
        recipe.gamma,
        has_predictor=True,
        drafts=DraftCurves(SHARES, missing_experts(inventory, traces[0]), drafts),
        figures={
            "prompts": len(prompts),
            "forward_passes": sum(len(trace) for trace in traces),
            "validation_loss": losses,
            "recall": [{key: of[key] for key in ("phase", "group", "budgets", "predictors")} for of in map(_short, judged)],
            "relative_seconds": won.relative_s,
            "selections": [vars(cost) for cost in costs],
        },
    )
    result = Calibrated(calibration, networks, depths, changed, costs, judged, won, left_out, losses, recorded_with)
    calibration.save(networks)
    return result


def _short(judgement: Judgement) -> dict[str, Any]:
    said = judgement.to_json()
    said["predictors"] = {
        name: {"next_layer": of["next_layer"], "window": of["window"]} for name, of in said["predictors"].items()
    }
    return said


def _networks(
    samples: dict[Phase, Samples], recipe: TrainingRecipe, told: Told, device: str
) -> tuple[dict[str, Folded], dict[str, float]]:
    """For each phase, the better of the networks with and without the visual summary, by validation loss; and all losses."""
    networks, losses = {}, {}
    for phase, of in samples.items():
        learn = of.where(lambda name: name.startswith("train/"))
        found: dict[str, tuple[float, Folded]] = {}
        pictures = bool(learn.visual_of.any())
        for variant, parts in ((LEARNED, PARTS), (WITHOUT, tuple(part for part in PARTS if part != "visual"))):
            if variant == LEARNED and not pictures:
                continue
            best = [float("inf")]

            def report(
                epoch: int, loss: float, validation: float, what: str = f"training, {phase}: {variant}", best: list[float] = best
            ) -> None:
                best[0] = min(best[0], validation)
                told(what, epoch, recipe.epochs)

            network = train(learn, replace(recipe, parts=parts), report, device)
            found[variant] = best[0], network
            losses[f"{phase}: {variant}"] = best[0]
        networks[phase] = min(found.values(), key=lambda pair: pair[0])[1]
    return {str(phase): network for phase, network in networks.items()}, losses


def _scored(traces: Sequence[Trace], samples: dict[Phase, Samples], networks: dict[str, Folded], gamma: float) -> Any:
    """The demands of validation requests of the last trace (the one with fewest visual tokens), with all lookaheads' scores."""
    trace = traces[-1]
    there = {
        name.rpartition("@")[0]
        for name in samples[Phase.PREFILL].requests
        if name.endswith(trace.path.name.replace("keep-", "@"))
    }
    wanted = sorted(name for name in there if is_validation(name) and name.startswith("train/"))[:CONTEST_REQUESTS]
    return with_scores(trace, samples, trace.path.name.replace("keep-", "@"), set(wanted), networks, gamma)


def _prune_layer(
    engine: Engine, traces: Sequence[Trace], prompts: Sequence[CalibrationPrompt], told: Told
) -> tuple[list[Depth], list[Changed], int | None]:
    """(the curve of depths, the changes of answers there, the layer): empty if visual tokens cannot be dropped."""
    if not engine.can_prune:
        return [], [], None
    depths = depth_curve(traces[0])
    config = engine.model.config
    found = shallowest(depths, least=max(1, joined_layers(config)))
    chosen = default_prune_layer(config) if found is None else found
    pictures = [prompt for prompt in prompts if prompt.group != "train" and prompt.has_images]
    return depths, _changes(engine, depths, pictures[:DIVERGENCE_PROMPTS], told), chosen


def _changes(engine: Engine, depths: Sequence[Depth], prompts: Sequence[CalibrationPrompt], told: Told) -> list[Changed]:
    """Answers at keep 0.5 compared with those at keep 1, for every layer of the curve that can prune."""
    if not prompts:
        return []
    whole = [_answer(engine, prompt, 1.0) for prompt in prompts]
    changed = []
    for number, depth in enumerate(depths):
        told("dropping visual tokens", number, len(depths))
        if _begin_at(engine, depth.prune_layer) != depth.prune_layer:
            continue
        half = [_answer(engine, prompt, DIVERGENCE_KEEP) for prompt in prompts]
        pairs = list(zip(whole, half, strict=True))
        same = sum(one == other for one, other in pairs) / len(pairs)
        changed.append(Changed(depth.prune_layer, same, sum(map(_same_beginning, whole, half)) / len(pairs)))
    return changed


def _begin_at(engine: Engine, prune_layer: int) -> int:
    """Makes dropping begin at a layer, or at the next possible one, or leaves it; -> the layer at which it begins."""
    runtime = runtime_of(engine.model)
    before = runtime.pruner
    assert before is not None
    before.remove()
    pruner = VisualPruner.of(engine.model, prune_layer)
    if isinstance(pruner, str):
        pruner = VisualPruner.of(engine.model, before.prune_layer)
    assert isinstance(pruner, VisualPruner)
    runtime.context.prune_by(pruner)
    return pruner.prune_layer


def _answer(engine: Engine, prompt: CalibrationPrompt, keep: float) -> str:
    return "".join(engine.chat(prompt.messages(), max_tokens=ANSWER_TOKENS, keep=keep))


def _same_beginning(one: str, other: str) -> float:
    same = next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return same / max(len(one), len(other), 1)
