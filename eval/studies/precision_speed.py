"""The time that each part of dynamic precision saves (DyMoE, table 3): `python -m vismoe.eval.studies.precision_speed`.

Rows: `load on demand` has as many slabs as a token's experts of one layer, so nothing stays until the next layer; `cache` has the
budget, waits for every miss and predicts nothing; `+ prefetch` runs the next routers ahead (`gate`); these three keep all experts
in the better format. `+ dynamic` lets importance choose between two formats, without predictions; `all` predicts the critical
experts; `all, skip` skips the others. `everything there` has room for all experts: the time of computing alone.

Two setups. `demo`: the bundled model in 16 and 4 bits, on held-out questions (its records of int4 and int2 have the same size, so
that pair would move no fewer bytes). `generated`: a checkpoint of larger experts in 4 and 2 bits with random weights. Links are
emulated: a copy ends as late as over a link of that rate. Results are medians of turns, each with a freshly loaded model. With
--keep-in an interrupted run continues. The last line is one JSON object.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypedDict

from vismoe.bench.turns import KeptTurns
from vismoe.config import format_bytes, parse_bytes, parse_formats
from vismoe.engine.engine import load
from vismoe.eval.accuracy import messages
from vismoe.eval.answer_file import questions
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.questions import KINDS
from vismoe.eval.report import add_several, folder_of, study_parser, told
from vismoe.eval.scoring import score
from vismoe.eval.studies.timed import Run, TokenRequests, ask_scenes, ask_tokens, generated_checkpoint, held_out
from vismoe.models.load.preview import experts_in_place
from vismoe.planning.pair_split import paired
from vismoe.simulate.replay import aligned_columns
from vismoe.store.pack import pack
from vismoe.store.packed import contents_of
from vismoe.types import Format, Phase

RETENTION = 0.75
BUDGETS = (0.5, 0.85)  # shares of all experts in the better format: those of Mixtral-8x7B in 4 bits that fit 16 and 24 GB
LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 64, 8, 1024, 512
VOCABULARY = 8192
ALONE, CACHE, PREFETCH, DYNAMIC, ALL, SKIP = "load on demand", "cache", "+ prefetch", "+ dynamic", "all", "all, skip"
BOUND = "everything there"
ACCURACY_SEED, ACCURACY_TOKENS = 11, 64

Turn = dict[str, Any]


@dataclass(frozen=True)
class SpeedSetup:
    """A setup in which the rows are compared. Bytes are of one expert; `ask` runs one turn with the given settings."""

    name: str
    formats: str  # the pair
    links_bytes_per_s: tuple[float, ...]
    settings: dict[str, Any]  # of every row
    ask: Callable[[Mapping[str, Any]], Run]
    asked: list[Any]  # identifies the requests
    requests: int
    experts: int
    top_k: int
    raw_bytes: int
    high_bytes: int
    low_bytes: int
    uniform: str  # the setting `format` for the better format
    judge: Callable[[Mapping[str, Any], int], float] | None = None  # the share of correct answers, for so many questions per kind

    def memory(self, slabs: float) -> str:
        """The memory setting that holds so many experts in the better format."""
        return f"{100 * slabs * self.high_bytes / self.raw_bytes / self.experts:.6f}%"


def rows(place: SpeedSetup, budget: float) -> dict[str, dict[str, Any]]:
    """Settings of the rows that have `budget`, a share of all experts in the better format."""
    high = place.formats.partition("/")[0]
    memory = {"memory": place.memory(budget * place.experts)}
    uniform = memory | {"format": place.uniform, "lookahead": "none"}
    dynamic = memory | {"policy": "importance", "retention": RETENTION, "lookahead": "none"}
    return {
        CACHE: uniform,
        PREFETCH: uniform | {"lookahead": "gate"},
        DYNAMIC: dynamic | {"formats": place.formats},
        ALL: dynamic | {"formats": place.formats, "lookahead": "gate"},
        SKIP: dynamic | {"formats": f"{high}/0", "lookahead": "gate"},
    }


def variants(place: SpeedSetup, link: float, budgets: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Settings of all variants that are timed over one link, by name; `@` precedes the budget."""
    fixed = {"format": place.uniform, "lookahead": "none"}
    found = {ALONE: fixed | {"memory": place.memory(place.top_k + 0.5)}}
    for budget in budgets:
        found |= {f"{name} @ {budget:g}": settings for name, settings in rows(place, budget).items()}
    found[BOUND] = fixed | {"memory": place.memory(place.experts)}
    common = place.settings | {"kernels": "fast", "misses": "wait", "pinned_layers": 0, "emulated_link_bytes_per_s": link}
    return {name: common | settings for name, settings in found.items()}


def turn_of(run: Run, requests: int) -> Turn:
    """Results of one turn: seconds and bytes per request (prefill) and per token (decode), shares by precision."""
    total, tokens = run.counters.total, run.decode_tokens
    return {
        "first_token_s": run.prefill_s / requests,
        "token_s": run.decode_s / tokens,
        "prefill_bytes": total("bytes_copied", Phase.PREFILL) / requests,
        "token_bytes": total("bytes_copied", Phase.DECODE) / tokens,
        "prefill_hits": run.counters.hit_rate(Phase.PREFILL),
        "decode_hits": run.counters.hit_rate(Phase.DECODE),
        "link_bytes_per_s": total("bytes_copied") / (run.prefill_s + run.decode_s),
        "prefill_shares": shares(run, Phase.PREFILL),
        "decode_shares": shares(run, Phase.DECODE),
    }


def shares(run: Run, phase: Phase) -> dict[str, float]:
    """Shares of expert computations in the better format, in the other, and skipped."""
    counts = run.counters.computed_in(("high", "low"), phase)
    return {name: counts.get(name, 0) / sum(counts.values()) for name in ("high", "low", "skip")}


def medians_of(turns: Sequence[Turn]) -> Turn:
    """The median of each number; shares by name."""
    found: Turn = {}
    for name, first in turns[0].items():
        if isinstance(first, dict):
            found[name] = {part: median(turn[name].get(part, 0.0) for turn in turns) for part in first}
        else:
            found[name] = median(turn[name] or 0.0 for turn in turns)
    return found


def compare(place: SpeedSetup, link: float, budgets: Sequence[float], rounds: int, kept: KeptTurns) -> dict[str, Any]:
    """Measures and prints everything over one link; returns JSON."""
    jobs = {
        name: ([place.asked, settings], lambda settings=settings: turn_of(place.ask(settings), place.requests))
        for name, settings in variants(place, link, budgets).items()
    }
    turns = kept.take(jobs, rounds)
    found = {name: medians_of(each) for name, each in turns.items()}
    spread = {name: [turn["token_s"] for turn in each] for name, each in turns.items()}
    bound_s, alone = found[BOUND]["token_s"], found[ALONE]
    ratio = alone["token_bytes"] / link / bound_s
    print(f"\n{place.name}, {place.formats}, emulated link of {link / 1e6:g} MB/s, medians of {rounds} turns; without a cache a")
    print(f"token's experts occupy the link {ratio:.1f} times as long as computing takes ({1e3 * bound_s:.2f} ms)")
    print(table(found, link))
    return {
        "place": place.name,
        "formats": place.formats,
        "link_bytes_per_s": link,
        "rounds": rounds,
        "link_over_compute": ratio,
        "rows": {name: row | {"token_s_of_turns": spread[name]} for name, row in found.items()},
    }


def table(found: Mapping[str, Turn], link: float) -> str:
    """A line per row; times relative to those of loading on demand."""
    lines = [
        ["", "first token s", "times", "token ms", "times", "MiB/prompt", "MiB/token", "hits", "in decode", "of the link"]
        + ["prompt in high, low, skip", "decode in high, low, skip"]
    ]
    alone = found[ALONE]
    for name, row in found.items():
        first, token = (f"{alone[key] / row[key]:.2f}" for key in ("first_token_s", "token_s"))
        moved = [f"{row[key] / 2**20:.2f}" for key in ("prefill_bytes", "token_bytes")]
        hits = [f"{row[key]:.1%}" for key in ("prefill_hits", "decode_hits")]
        shares = [", ".join(f"{share:.0%}" for share in row[key].values()) for key in ("prefill_shares", "decode_shares")]
        reached = f"{row['link_bytes_per_s'] / link:.0%}"
        lines.append(
            [name, f"{row['first_token_s']:.3f}", first, f"{1e3 * row['token_s']:.2f}", token, *moved, *hits, reached, *shares]
        )
    return aligned_columns(lines, left=1)


def judged(place: SpeedSetup, budgets: Sequence[float], per_kind: int, kept: KeptTurns) -> dict[str, float]:
    """The share of correct answers, for the rows that differ in their computations; printed."""
    if place.judge is None:
        return {}
    judge, jobs = place.judge, {}
    common = place.settings | {"kernels": "fast", "pinned_layers": 0, "deterministic": True}

    def share(settings: Mapping[str, Any]) -> Turn:
        return {"accuracy": judge(settings, per_kind)}

    asked = {CACHE: rows(place, budgets[0])[CACHE]}
    asked |= {f"{name} @ {budget:g}": rows(place, budget)[name] for budget in budgets for name in (DYNAMIC, SKIP)}
    for name, row in asked.items():
        settings = common | row | {"lookahead": "none"}
        jobs[f"accuracy of {name}"] = [place.name, per_kind, settings], partial(share, settings)
    found = {name.removeprefix("accuracy of "): turns[0]["accuracy"] for name, turns in kept.take(jobs, 1).items()}
    print(f"\n{place.name}: accuracy on the same held-out questions")
    print(aligned_columns([["", "accuracy"], *([name, f"{value:.1%}"] for name, value in found.items())], left=1))
    return found


# -- the setups
def pack_experts(model: str | None, folder: Path, formats: Sequence[Format]) -> None:
    """A store of these formats in `folder`; formats that it has are kept."""
    source, transposed = experts_in_place(model)
    with closing(source):
        for each in formats:
            pack(source, folder, contents_of(source, each, transposed))


class ExpertSizes(TypedDict):
    """The fields of SpeedSetup with the sizes of experts."""

    experts: int
    top_k: int
    raw_bytes: int
    high_bytes: int
    low_bytes: int


def sizes(model: str | None, formats: str) -> ExpertSizes:
    """Sizes of the model's experts in 16 bits, and in the two formats of a pair."""
    source, transposed = experts_in_place(model)
    with closing(source):
        inventory = paired(source.inventory, parse_formats(formats), transposed)
        return ExpertSizes(
            experts=sum(layer.num_experts for layer in inventory.layers),
            top_k=max(layer.top_k for layer in inventory.layers),
            raw_bytes=inventory.raw_layouts[0].record_bytes,
            high_bytes=inventory.layouts[0].record_bytes,
            low_bytes=inventory.low_layouts[0].record_bytes,
        )


def demo(arguments: argparse.Namespace, folder: Path) -> SpeedSetup:
    """The demo model in 16 and 4 bits."""
    setup = bundled(None, "demo", folder, arguments.demo_links, arguments.questions, arguments.tokens)
    return replace(setup, judge=share_right)


def bundled(model: str | None, world: str, folder: Path, links: Sequence[float], questions: int, tokens: int) -> SpeedSetup:
    """A model of one of the WORLDS (None: the demo model) in 16 and 4 bits, on so many questions of it."""
    store = folder / f"{world}-store"
    pack_experts(model, store, [Format.INT4])
    prompts = held_out(questions, world)
    return SpeedSetup(
        world,
        "16/4",
        tuple(links),
        {"store": str(store)},
        partial(ask_scenes, prompts=prompts, max_tokens=tokens, model=model),
        [world, questions, tokens],
        len(prompts),
        **sizes(model, "16/4"),
        uniform="raw",
    )


def share_right(settings: Mapping[str, Any], per_kind: int) -> float:
    """The share of correct answers to `per_kind` held-out questions of every kind, one by one."""
    talks = [talk for kind in KINDS for talk in questions(kind, range(per_kind), ACCURACY_SEED)]
    with load(**settings) as engine:
        said = ["".join(engine.chat(messages(talk), max_tokens=ACCURACY_TOKENS)) for talk in talks]
    return mean(score(talk.turns[-1], text) for talk, text in zip(talks, said, strict=True))


def generated(arguments: argparse.Namespace, folder: Path) -> SpeedSetup:
    """Random experts of 1024 x 512 in 4 and 2 bits."""
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=INTERMEDIATE)
    attention = dict(hidden_size=HIDDEN, num_attention_heads=8, num_key_value_heads=2)
    written = generated_checkpoint(folder / "generated", LAYERS, VOCABULARY, vision_depth=1, **experts, **attention)
    pack_experts(str(written.folder), written.folder / "vismoe-store", [Format.INT4, Format.INT2])
    print(f"generated: {format_bytes(written.expert_bytes)} of experts in 16 bits")
    requests = TokenRequests(count=2, side=64, text_tokens=60, new_tokens=arguments.tokens)
    return SpeedSetup(
        "generated",
        "4/2",
        tuple(arguments.generated_links),
        {},
        lambda settings: ask_tokens(written.folder, settings, requests),
        ["generated", asdict(requests), LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE],
        requests.count,
        **sizes(str(written.folder), "4/2"),
        uniform="int4",
    )


PLACES = {"demo": demo, "generated": generated}


def study(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs and prints everything; returns JSON."""
    kept, found, accuracies = KeptTurns(arguments.keep_in and folder / "turns.jsonl"), [], {}
    for name in arguments.places:
        place = PLACES[name](arguments, folder)
        low, high, raw = (format_bytes(n) for n in (place.low_bytes, place.high_bytes, place.raw_bytes))
        print(f"{name}: {place.experts} experts of {raw} in 16 bits; {place.formats}: {high} and {low}; top {place.top_k}")
        found += [compare(place, link, arguments.budgets, arguments.rounds, kept) for link in place.links_bytes_per_s]
        accuracies[name] = judged(place, arguments.budgets, arguments.per_kind, kept) if arguments.per_kind else {}
    if arguments.figures:
        draw(found, arguments.budgets, arguments.figures / "precision-speed.png")
    return {"precision_speed": found, "accuracy": accuracies}


def draw(found: Sequence[dict[str, Any]], budgets: Sequence[float], file: Path) -> None:
    """For each setup and link, a panel of the first token's time, and below it one of later tokens."""
    names = [CACHE, PREFETCH, DYNAMIC, ALL, SKIP]
    labels = [name.removeprefix("+ ") for name in names]

    def panel(one: dict[str, Any], key: str, what: str) -> Panel:
        measured = one["rows"]
        series = [
            Series(f"{b:.0%} of the experts fit", labels, [measured[f"{n} @ {b:g}"][key] / measured[ALONE][key] for n in names])
            for b in budgets
        ]
        title = f"{one['place']}, {one['formats']}, {one['link_bytes_per_s'] / 1e6:g} MB/s"
        return Panel(series, "", f"{what}, of load on demand", title, kind="bars", percent=True)

    panels = [panel(one, "first_token_s", "first token") for one in found] + [
        panel(one, "token_s", "each token") for one in found
    ]
    grid_figure(file, panels, columns=len(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval precision-speed", __doc__)
    parser.add_argument("--places", nargs="+", choices=list(PLACES), default=list(PLACES))
    add_several(parser, "--budgets", BUDGETS, "SHARE", "shares of all experts in the better format", float)
    add_several(parser, "--demo-links", [60e6, 240e6], "SIZE", "bytes per second", parse_bytes)
    add_several(parser, "--generated-links", [4e8, 1.6e9], "SIZE", "bytes per second", parse_bytes)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each row (default: 3)")
    parser.add_argument("--questions", type=int, default=9, help="questions to the bundled model in each turn (default: 9)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: 24)")
    parser.add_argument("--per-kind", type=int, default=20, help="questions per kind for accuracy (default: 20)")
    parser.add_argument("--keep-in", type=Path, metavar="FOLDER", help="folder that keeps stores and turns for later runs")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="folder for the plot, e.g. assets/figures")
    arguments = parser.parse_args(argv)
    with folder_of(arguments.keep_in) as folder:
        return told(lambda: study(arguments, folder))


if __name__ == "__main__":
    sys.exit(main())
