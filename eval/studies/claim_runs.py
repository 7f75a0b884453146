"""The runs behind claims about prediction, placement, the engine's formats and time, of any model in one of the WORLDS.

Each is called as the other studies are, `(model, questions of a kind, seed, world, folder)`. What is timed, or replayed at
several settings, has no 95% interval: there, `low` and `high` are the least and the most of its turns or settings.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from vismoe.engine.engine import load
from vismoe.errors import InputError
from vismoe.eval.accuracy import messages
from vismoe.eval.answer_file import questions
from vismoe.eval.paired import beside
from vismoe.eval.questions import KINDS
from vismoe.eval.scoring import score
from vismoe.eval.studies import ladder, precision_speed
from vismoe.eval.studies.orchestrator import ASKING_S, LAYER_S, LINKS_BYTES_PER_S, TOKEN_S
from vismoe.eval.studies.timed import ask_scenes, held_out, take_turns
from vismoe.models.load.runtime import runtime_of
from vismoe.pair import Format
from vismoe.predictor_training.collect import collect
from vismoe.predictor_training.evaluate import LEARNED, RANDOM, WITHOUT, judge, trained_variants
from vismoe.predictor_training.prompts import scene_prompts
from vismoe.predictor_training.samples import read_samples
from vismoe.predictor_training.train import TrainingRecipe
from vismoe.simulate.demands import Demands
from vismoe.simulate.pinned import pinned_curve
from vismoe.trace.files import Trace
from vismoe.types import Phase

TRAINING_SHARE = 3  # prompts that a predictor is trained on, for each that it is judged by
PINNED_SHARES = ("25%", "50%", "75%")
MEMORY, LINK, TURNS, ANSWER_TOKENS = "25%", 60e6, 3, 20  # of timed runs: an expert takes about as long as a layer computes
RECORDED, TIMED = 36, 18  # questions of a recording, and of a turn, at most
JUDGED_TOKENS, HOT_SHARE = 64, 0.2
EPOCHS = TrainingRecipe.epochs
STEPS = (precision_speed.CACHE, precision_speed.PREFETCH, precision_speed.ALL)  # of DyMoE's table 3

Result = dict[str, Any]


def prediction(model: str, per_kind: int, seed: int, world: str, folder: Path) -> Result:
    """What a predictor trained on this world finds of the next layers' experts, over chance and over one without pictures."""
    asked = per_kind * len(KINDS)
    prompts = scene_prompts(TRAINING_SHARE * asked, asked, world=world)
    with load(model, memory="50%", lookahead="gate", calibration="none") as engine:
        top_k = runtime_of(engine.model).store.inventory.layers[0].top_k
        traces = collect(engine, prompts, folder / "traces", keeps=(1.0,))
    samples = {Phase.DECODE: read_samples(traces)[Phase.DECODE]}
    variants = trained_variants(
        samples, TrainingRecipe(seed=seed, epochs=EPOCHS), lambda title, epoch: None, only=(LEARNED, WITHOUT)
    )
    judged = next(one for one in judge(samples, variants, top_k) if one.group == "held-out")
    differences = {rival: asdict(judged.differences[f"{LEARNED} - {rival}"]) for rival in (RANDOM, WITHOUT)}
    recalls = {name: recall.next_layer() for name, recall in judged.recalls.items()}
    return {"differences": differences, "next_layer": recalls, "prompts": judged.prompts}


def placement(model: str, per_kind: int, seed: int, world: str, folder: Path) -> Result:
    """The share of virtual time that the best number of pinned layers saves, at several sizes and links."""
    trace = folder / "trace"
    shutil.rmtree(trace, ignore_errors=True)  # of a run that was interrupted
    settings = dict(memory="50%", kernels="torch", deterministic=True, lookahead="gate")
    ask_scenes(settings, held_out(min(RECORDED, per_kind * len(KINDS)), world), ANSWER_TOKENS, model, trace)
    demands, saved = Demands.of(Trace.open(trace)), {}
    layer: dict[str, Any] = dict(compute_s_per_layer=LAYER_S, compute_s_per_token=TOKEN_S, lookahead_s=ASKING_S)
    for share in PINNED_SHARES:
        for link in LINKS_BYTES_PER_S:
            none, *pinned = pinned_curve(demands, share, link_bytes_per_s=link, prefetch=True, **layer)
            if pinned:
                saved[f"{share}, {link / 1e6:g} MB/s"] = 1 - min(point.seconds for point in pinned) / none.seconds
    if not saved:
        raise InputError(
            f"{model}: no layer can be pinned at {', '.join(PINNED_SHARES)} of the experts. Fix: a model with more layers"
        )
    return {"saved": with_extremes(list(saved.values())), "settings": saved}


def parts(model: str, per_kind: int, seed: int, world: str, folder: Path) -> Result:
    """The share of its time that each rung of the ladder saves over the one before, over an emulated link."""
    setup = ladder.LadderSetup(
        "emulated link",
        {"memory": MEMORY, "kernels": "fast", "emulated_link_bytes_per_s": LINK},
        partial(ask_scenes, prompts=held_out(min(TIMED, per_kind * len(KINDS)), world), max_tokens=ANSWER_TOKENS, model=model),
        lookahead="gate",
        has_host_tier=False,
        link_bytes_per_s=LINK,
    )
    settings = ladder.rungs(setup, keep=0.5, pinned_layers=0)
    turns = take_turns({name: partial(setup.turn, each) for name, each in settings.items()}, TURNS)
    seconds = {name: [run.prefill_s + run.decode_s for run in runs] for name, runs in turns.items()}
    return {"seconds": seconds, "saved": saved_over_the_one_before(seconds)}


def formats(model: str, per_kind: int, seed: int, world: str, folder: Path) -> Result:
    """Accuracy of the engine in 16 bits, and with hot experts in 16 and the others in 2 bits: in what all take in 2 bits, and a
    fifth of the rest."""
    store, size = folder / "store", precision_speed.sizes(model, "16/2")
    precision_speed.pack_experts(model, store, [Format.INT2])
    memory = HOT_SHARE + (1 - HOT_SHARE) * size["low_bytes"] / size["raw_bytes"]
    talks = [talk for kind in KINDS for talk in questions(kind, range(per_kind), seed, world)]

    def scores(**settings: Any) -> list[float]:
        with load(model, store=str(store), kernels="fast", deterministic=True, lookahead="none", **settings) as engine:
            said = ["".join(engine.chat(messages(talk), max_tokens=JUDGED_TOKENS)) for talk in talks]
        return [score(talk.turns[-1], text) for talk, text in zip(talks, said, strict=True)]

    exact, hot = scores(memory="100%"), scores(memory=f"{100 * memory:.2f}%", policy="hotness", formats="16/2")
    return {"exact": sum(exact) / len(exact), "memory": memory, "hotness": beside(exact, hot)}


def speed(model: str, per_kind: int, seed: int, world: str, folder: Path) -> Result:
    """The share of a token's time that a cache, then prefetch, then two formats save (DyMoE, table 3)."""
    setup = precision_speed.bundled(model, world, folder, (LINK,), min(TIMED, per_kind * len(KINDS)), ANSWER_TOKENS)
    rungs = precision_speed.variants(setup, LINK, [0.5])
    chosen = [precision_speed.ALONE, *(f"{name} @ 0.5" for name in STEPS)]
    turns = take_turns({name: partial(setup.ask, rungs[name]) for name in chosen}, TURNS)
    seconds = {name.partition(" @")[0]: [run.decode_s / run.decode_tokens for run in runs] for name, runs in turns.items()}
    return {"seconds": seconds, "saved": saved_over_the_one_before(seconds)}


def saved_over_the_one_before(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By name, the share of the time of the one before that each saves, turn by turn."""
    names = list(seconds)
    return {
        name: with_extremes([1 - own / rival for own, rival in zip(seconds[name], seconds[before], strict=True)])
        for before, name in pairwise(names)
    }


def with_extremes(values: Sequence[float]) -> dict[str, float]:
    """The median with the least and the most."""
    return {"value": median(values), "low": min(values), "high": max(values)}


RUNS: dict[str, Callable[[str, int, int, str, Path], Result]] = {
    "prediction": prediction,
    "placement": placement,
    "parts": parts,
    "formats": formats,
    "speed": speed,
}
