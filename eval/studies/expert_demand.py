"""How dropping visual tokens changes expert demand: `python -m vismoe.eval.studies.expert_demand`.

One model (the bundled demo model unless another is named) prefills prompts about held-out scenes, with every expert in memory and
the routing recorded, for each selection of visual tokens and each share kept. Selections with the same share keep the same number
of tokens of every image, so `random` shows the effect of fewer tokens alone; the *ceiling* is what a selection that keeps nothing
would spare, at the routing that the text has beside all tokens. Results over the MoE layers after the pruning:
active experts, the share of assignments to the most used quarter of the experts, how similarly consecutive layers route
(`routing.py`), and how much of the next layer's load falls on the quarter of its experts that this layer's load predicts. The
prefills are also replayed one after another with a quarter of the experts in memory, to count loaded experts.

Traces are kept in a folder, one for each contestant and kind of question, so that an interrupted run continues. Intervals are the
bootstrap over prompts, 95%; differences are paired. Prints tables, then one JSON object on the last line.
"""

import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from vismoe.eval.accuracy import prompts
from vismoe.eval.answer_file import questions
from vismoe.eval.paired import ratio_of_sums, spread
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.questions import KINDS
from vismoe.eval.studies.pruning import (
    ALL,
    RANDOM,
    STUDIES,
    Engines,
    PruningContestant,
    PruningStudy,
    controls_of,
    draw_of,
    labelled,
    program_of,
    run,
)
from vismoe.eval.studies.routing import (
    LayerLoad,
    LoadTransitions,
    active_experts,
    coverage,
    coverage_curve,
    index_similarity,
    load,
    most,
    prompt_layers,
    structure_similarity,
)
from vismoe.eval.studies.timed import recording
from vismoe.metrics import Snapshot
from vismoe.models.load.runtime import runtime_of
from vismoe.simulate.demands import Conditions, Demands, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.files import Trace, TraceWriter
from vismoe.trace.steps import LayerRouting, TraceStep
from vismoe.trace.synthetic import SyntheticTrace
from vismoe.types import Phase, TokenKind
from vismoe.vision.selection import Pruning

QUESTIONS = 180
BATCH = 10  # prompts in one prefill
BUDGET = "25%"  # of the experts, for the replay
FOLDER = Path(tempfile.gettempdir()) / "vismoe-expert-demand"
TOKENS: dict[str, Callable[[LayerLoad], np.ndarray]] = {  # the tokens whose routing is measured
    "all": lambda layer: np.ones(len(layer.tokens), bool),
    "visual": lambda layer: layer.visual,
    "text": lambda layer: ~layer.visual,
}
PER_LAYER = {"active_experts": "active experts", "coverage": "coverage"}
PER_PAIR = {
    "index_similarity": "by index",
    "structure_similarity": "structure",
    "predicted_coverage": "predicted",
    "popular_coverage": "by popularity",
}
CEILING = {"active_experts": "active experts", "loads": "loads"}
OF_PREFILL = {"loads": "loads", "loaded_bytes": "KiB", "hit_rate": "hits"}
DRAWN = ("affinity", "saliency", RANDOM)

Prompts = Sequence[Sequence[LayerLoad]]  # [prompts][MoE layers]
Values = dict[str, np.ndarray]  # by measure


def measure(model_path: str, study: str, per_kind: int, seed: int, world: str, folder: Path) -> dict[str, Any]:
    """All results, as the object that is printed last."""
    engines = Engines(model_path)
    try:
        studied = STUDIES[study].contestants(engines.prune_layer)
        compared = [rival for contestant in studied for rival in rivals(contestant).values() if rival.pruning.keep < 1]
        contestants = list(dict.fromkeys([PruningContestant(Pruning(), engines.prune_layer), *studied, *compared]))
        traces = {contestant: SyntheticTrace(engines.inventory, []) for contestant in contestants}
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("prompts", total=len(contestants) * len(KINDS) * per_kind)
            for contestant, kind in itertools.product(contestants, KINDS):
                traces[contestant].steps.extend(alone(recorded(engines, contestant, kind, per_kind, seed, world, folder)))
                bar.advance(task, per_kind)
    finally:
        engines.close()
    return {
        "model": model_path,
        "study": study,
        "seed": seed,
        "world": world,
        "questions": per_kind * len(KINDS),
        "prune_layer": engines.prune_layer,
        "budget": BUDGET,
        "contestants": summary(traces),
        "ceilings": ceilings(traces),
    }


def recorded(
    engines: Engines, contestant: PruningContestant, kind: str, count: int, seed: int, world: str, folder: Path
) -> Trace:
    """The routing of one contestant's prefills of `count` questions of one kind; recorded unless the folder has it."""
    belongs_to = [engines.fingerprint, program_of(contestant), asdict(contestant), kind, count, seed, world]
    digest = hashlib.sha256(json.dumps(belongs_to).encode()).hexdigest()
    path = folder / f"{str(contestant).replace(', ', '-').replace(' ', '-')}-{kind}-{digest[:16]}"
    if path.exists():
        return Trace.open(path)
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    writer = TraceWriter(partial, engines.inventory, fingerprint=engines.fingerprint)
    with recording(runtime_of(engines.of(contestant).model), writer):
        for first in range(0, count, BATCH):
            writer.request(f"{kind} {first}")
            talks = questions(kind, range(first, min(count, first + BATCH)), seed, world)
            engines.answers(contestant, prompts(engines.processor, talks), draw_of((kind, first)), most_tokens=1)
    return Trace.open(partial.rename(path))


def alone(steps: Iterable[TraceStep]) -> Iterator[TraceStep]:
    """Recorded batches as if each sequence were a separate request."""
    for step in steps:
        sequences, tokens = step.kinds.shape
        for row in range(sequences):
            layers = [of_sequence(routing, row * tokens, (row + 1) * tokens) for routing in step.layers]
            yield TraceStep(f"{step.request} {row}", step.phase, step.kinds[row : row + 1], layers)


def of_sequence(routing: LayerRouting, begin: int, end: int) -> LayerRouting:
    """The choices for the tokens from `begin` to `end` of a batch."""
    if routing.kept is None:
        return replace(routing, expert_ids=routing.expert_ids[begin:end], weights=routing.weights[begin:end])
    mine = (begin <= routing.kept) & (routing.kept < end)
    return replace(routing, expert_ids=routing.expert_ids[mine], weights=routing.weights[mine], kept=routing.kept[mine] - begin)


def summary(traces: dict[PruningContestant, SyntheticTrace]) -> dict[str, dict[str, Any]]:
    """Results of each contestant, and differences from all tokens, `random` and `saliency` at the same share and layer."""
    routed = {contestant: list(map(prompt_layers, trace)) for contestant, trace in traces.items()}
    deep = deepest({c.prune_layer: prompts for c, prompts in routed.items() if c.pruning.keep < 1})
    out, values = {}, {}
    counted = track(traces.items(), "replayed", console=Console(stderr=True), transient=True)
    for contestant, trace in counted:
        experts = [layer.num_experts for layer in trace.inventory.layers]
        found, by_layer = {}, {}
        for name, chosen in TOKENS.items():
            some = [[layer.only(chosen(layer)) for layer in layers] for layers in routed[contestant]]
            found[name], by_layer[name] = shape(some, experts, deep[contestant.prune_layer])
        loaded = prefill_loads(trace)
        values[contestant] = found["all"] | loaded
        out[contestant] = {
            **asdict(contestant),
            "deep_layers": deep[contestant.prune_layer],
            "prompt_tokens": float(np.mean([len(layers[-1].tokens) for layers in routed[contestant]])),
            **{name: means(measures) for name, measures in found.items()},
            "prefill": means(loaded),
            "by_layer": by_layer,
        }
    for contestant, row in out.items():
        row["against"] = {
            name: means(differences(values[contestant], values[rival]))
            for name, rival in rivals(contestant).items()
            if rival in values and rival != contestant
        }
    return {str(contestant): row for contestant, row in out.items()}


def ceilings(traces: dict[PruningContestant, SyntheticTrace]) -> dict[int, dict[str, Any]]:
    """By prune layer: demand when no visual token reaches the layers behind it, and the difference from all tokens."""
    everything = next(iter(traces.values()))
    experts = [layer.num_experts for layer in everything.inventory.layers]
    pruned: dict[int, Prompts] = {
        each.prune_layer: [prompt_layers(next(iter(trace)))] for each, trace in traces.items() if each.pruning.keep < 1
    }
    out = {}
    for at, deep in deepest(pruned).items():
        measured = []
        for trace in (everything, SyntheticTrace(everything.inventory, [without_visual(step, deep) for step in everything])):
            loads = [[active_experts(load(layer, count)) for layer, count in zip(prompt_layers(step), experts)] for step in trace]
            measured.append({"active_experts": np.array(loads)[:, deep].mean(axis=1), **prefill_loads(trace)})
        whole, text = measured
        out[at] = means(text) | {"against": {ALL: means(differences(text, whole))}}
    return out


def without_visual(step: TraceStep, layers: Sequence[int]) -> TraceStep:
    """The step of one prompt that kept all tokens, as if its visual ones did not reach these MoE layers."""
    text = np.flatnonzero(step.kinds[0] != TokenKind.VISUAL)
    return replace(
        step,
        layers=[
            replace(each, expert_ids=each.expert_ids[text], weights=each.weights[text], kept=text) if at in layers else each
            for at, each in enumerate(step.layers)
        ],
    )


def rivals(contestant: PruningContestant) -> dict[str, PruningContestant]:
    """The contestants with which one is compared, on the same prompts."""
    if contestant.visual_top_k is not None:
        return {"all experts": replace(contestant, visual_top_k=None)}
    return {ALL: replace(contestant, pruning=Pruning()), **controls_of(contestant)}


def deepest(pruned: dict[int, Prompts]) -> dict[int, list[int]]:
    """The MoE layers after the pruning, by prune layer."""
    return {at: [index for index, layer in enumerate(prompts[0]) if layer.pruned] for at, prompts in pruned.items()}


def shape(prompts: Prompts, experts: Sequence[int], deep: Sequence[int]) -> tuple[Values, dict[str, list[float]]]:
    """(each measure of each prompt, a mean over the `deep` layers or the pairs of them; its mean over prompts for each layer)."""
    loads = [[load(layer, count) for layer, count in zip(layers, experts)] for layers in prompts]
    pairs = [pair_measures([(layers[at], layers[at + 1]) for layers in prompts], experts[at]) for at in range(len(experts) - 1)]
    table = {
        "active_experts": np.array([[active_experts(each) for each in row] for row in loads], float),
        "coverage": np.array([[coverage(each, most(each, len(each) // 4)) for each in row] for row in loads]),
        **{name: np.stack([pair[name] for pair in pairs], axis=1) for name in PER_PAIR},
    }
    columns = {name: list(deep) if name in PER_LAYER else [at for at in deep if at + 1 in deep] for name in table}
    values = {name: np.mean(found[:, columns[name]], axis=1) for name, found in table.items()}
    by_layer = {name: np.mean(found, axis=0).tolist() for name, found in table.items()}
    curves = [np.mean([coverage_curve(row[at]) for row in loads], axis=0) for at in deep if experts[at] == experts[deep[0]]]
    return values, by_layer | {"coverage_curve": np.mean(curves, axis=0).tolist()}


def pair_measures(prompts: Sequence[tuple[LayerLoad, LayerLoad]], num_experts: int) -> Values:
    """[prompts] of each measure of two consecutive layers with `num_experts` each, over the tokens that reached the second.

    The prediction of the second layer's load from the first's is learned on one half of the prompts and tested on the other.
    """
    out = {name: np.empty(len(prompts)) for name in PER_PAIR}
    for half in (0, 1):
        learned = LoadTransitions(prompts[1 - half :: 2], num_experts)
        for at in range(half, len(prompts), 2):
            here, next_one = prompts[at]
            here = here.only(np.isin(here.tokens, next_one.tokens))
            own, its = load(here, num_experts), load(next_one, num_experts)
            out["index_similarity"][at] = index_similarity(own, its)
            out["structure_similarity"][at] = structure_similarity(here, next_one, num_experts)
            out["predicted_coverage"][at] = coverage(its, most(learned.expected(own), num_experts // 4))
            out["popular_coverage"][at] = coverage(its, most(learned.popular, num_experts // 4))
    return out


def prefill_loads(trace: SyntheticTrace) -> Values:
    """[prompts]: experts that each prefill loads, and its hit rate, with BUDGET of the experts in memory and no lookahead."""
    demands = Demands.of(trace)
    pager = VirtualPager(demands.inventory, slabs_per_geometry(BUDGET, demands.inventory), "lfu", Conditions())
    counts: list[Snapshot] = []
    for _, request in itertools.groupby(demands, lambda demand: demand.request):
        before = pager.metrics.snapshot()
        for demand in request:
            pager.run(demand)
        counts.append(pager.metrics.snapshot() - before)
    return {
        "loads": np.array([each.total("misses", Phase.PREFILL) for each in counts]),
        "loaded_bytes": np.array([each.total("bytes_read", Phase.PREFILL) for each in counts]),
        "hit_rate": np.array([each.hit_rate(Phase.PREFILL) for each in counts], float),
    }


def means(values: Values) -> dict[str, Any]:
    """Means over prompts with their intervals."""
    return {name: asdict(ratio_of_sums(each, np.ones(len(each)))) for name, each in values.items()}


def differences(values: Values, rival: Values) -> Values:
    """The contestant's values minus those of its rival on the same prompts."""
    return {name: each - rival[name] for name, each in values.items()}


def print_summary(console: Console, result: dict[str, Any]) -> None:
    shown = PER_LAYER | PER_PAIR
    table = Table("visual tokens", "tokens", *shown.values(), *OF_PREFILL.values())
    for name, row in labelled(result).items():
        cells = [number(key, row["all"][key]["value"]) for key in shown]
        table.add_row(
            name, f"{row['prompt_tokens']:.0f}", *cells, *(number(key, row["prefill"][key]["value"]) for key in OF_PREFILL)
        )
    console.print(table)
    for rival in dict.fromkeys(rival for row in result["contestants"].values() for rival in row["against"]):
        against = Table(f"against {rival}", *shown.values(), *OF_PREFILL.values())
        for name, row in labelled(result).items():
            if rival in row["against"]:
                against.add_row(name, *(difference(key, row["against"][rival][key]) for key in (*shown, *OF_PREFILL)))
        console.print(against)
    for layer, row in result["ceilings"].items():
        spared = ", ".join(f"{name} {difference(key, row['against'][ALL][key])}" for key, name in CEILING.items())
        console.print(f"ceiling, no visual token from decoder layer {layer} on, against all tokens: {spared}")
    first = next(iter(result["contestants"].values()))
    console.print(
        f"{result['questions']:,} prompts; MoE layers {first['deep_layers'][0]} to {first['deep_layers'][-1]}, all tokens. "
        f"Coverage: by the most used quarter of the experts. Loads: experts per prefill at {result['budget']}. 95% intervals"
    )


def number(measure: str, value: float) -> str:
    if measure in ("active_experts", "loads"):
        return f"{value:.1f}"
    if measure == "loaded_bytes":
        return f"{value / 1024:,.0f}"
    return f"{value:.3f}" if "similarity" in measure else f"{value:.1%}"


def difference(measure: str, interval: dict[str, float]) -> str:
    """A difference with its interval; shares in points."""
    scale = 100 if "coverage" in measure or measure == "hit_rate" else 1 / 1024 if measure == "loaded_bytes" else 1
    digits = 3 if "similarity" in measure else 0 if measure == "loaded_bytes" else 2
    return spread(interval, f"+.{digits}f", scale)


def draw(result: dict[str, Any], folder: Path) -> None:
    """Demand and similarity of layers, like figures 3 and 4 of VisMMoE; for a sweep, demand over the swept setting."""
    rows = {PruningContestant.of(row): row for row in result["contestants"].values()}
    if result["study"] != "selection":
        grid_figure(folder / f"expert-demand-{result['study']}.png", sweep_panels(rows, STUDIES[result["study"]]), columns=3)
        return
    everything = next(iter(rows))
    halved = {name: rows[replace(everything, pruning=Pruning(0.5, name))] for name in DRAWN}
    shown = {ALL: rows[everything], **halved}
    grid_figure(folder / "expert-demand.png", [*demand_panels(shown), loads_panel(rows)], columns=3)
    grid_figure(folder / "layer-similarity.png", similarity_panels(shown), columns=3)


def demand_panels(shown: dict[str, dict[str, Any]]) -> list[Panel]:
    curves = {name: row["by_layer"]["all"]["coverage_curve"] for name, row in shown.items()}
    active = {name: row["by_layer"]["all"]["active_experts"] for name, row in shown.items()}
    return [
        Panel(
            [Series(name, range(1, len(curve) + 1), curve) for name, curve in curves.items()],
            "most used experts of a layer",
            "share of assignments",
            "a: coverage, half of the visual tokens kept",
            percent=True,
        ),
        Panel(
            [Series(name, range(len(each)), each) for name, each in active.items()],
            "MoE layer",
            "active experts",
            "b: active experts, half kept",
        ),
    ]


def loads_panel(rows: dict[PruningContestant, dict[str, Any]]) -> Panel:
    """How many more or fewer experts a prefill loads than with all tokens."""
    everything = next(iter(rows.values()))["prefill"]["loads"]["value"]
    bars = []
    for name in DRAWN:
        line = {
            f"{contestant.pruning.keep:.0%}": row["against"][ALL]["loads"]
            for contestant, row in rows.items()
            if contestant.pruning.keep < 1 and contestant.pruning.selection == name
        }
        bars.append(Series.of(name, list(line), list(line.values())))
    title = f"c: experts loaded at {BUDGET}, against {everything:.0f} with all tokens"
    return Panel(bars, "visual tokens kept", "difference", title, kind="bars")


def similarity_panels(shown: dict[str, dict[str, Any]]) -> list[Panel]:
    everything = shown[ALL]["by_layer"]
    lines = {"text tokens": everything["text"], "visual tokens, all": everything["visual"]} | {
        f"visual tokens, {name} 50%": shown[name]["by_layer"]["visual"] for name in DRAWN
    }
    titles = {
        "index_similarity": "a: cosine by index",
        "structure_similarity": "b: pairs that share experts",
        "predicted_coverage": "c: predicted",
    }
    return [
        Panel(
            [Series(name, range(len(each[measure])), each[measure]) for name, each in lines.items()],
            "MoE layer, and the next",
            PER_PAIR[measure],
            title,
            percent="coverage" in measure,
        )
        for measure, title in titles.items()
    ]


def sweep_panels(rows: dict[PruningContestant, dict[str, Any]], study: PruningStudy) -> list[Panel]:
    """Differences from `saliency` (or from all experts) with their intervals."""
    lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for contestant, row in rows.items():
        for rival in ("saliency", "all experts"):
            if rival in row["against"]:
                line = lines.setdefault(f"{study.line(contestant)}, against {rival}", [])
                line.append((study.x(contestant), row["against"][rival]))
    return [
        Panel(
            [Series.of(name, [x for x, _ in line], [each[measure] for _, each in line]) for name, line in lines.items()],
            study.axis,
            f"{label}, difference",
            percent=measure == "coverage",
        )
        for measure, label in (PER_LAYER | {"loads": "experts loaded"}).items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return run(arguments, "expert_demand", __doc__, QUESTIONS, FOLDER, measure, draw, print_summary)


if __name__ == "__main__":
    raise SystemExit(main())
