"""Compares eviction orders, lookaheads, the pinned prefix and the prefetch limit: `python -m vismoe.eval.studies.orchestrator`.

The routing of the bundled model is recorded on held-out questions, once with each lookahead (the routing is the same, the scores
differ), and replayed in virtual time at several cache sizes and link rates, prefill and decode separately. `--trace NAME=FOLDER`
replays recorded traces of any model instead. `--timed` checks the results on the real engine over an emulated link, in
alternating turns. Tables go to the terminal, plots to --figures, and the last line is one JSON object.

Virtual seconds are exact for a link of that rate and layers with the given compute time; they include no measurement.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from vismoe.config import format_bytes, parse_bytes
from vismoe.engine.engine import demo_model
from vismoe.errors import InputError
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.report import add_several, folder_of, study_parser, told
from vismoe.eval.studies.timed import Run, ask_scenes, held_out, medians, take_turns
from vismoe.lookahead.calibration import FOLDER, Calibration
from vismoe.simulate.demands import Demands
from vismoe.simulate.pinned import PinnedPoint, best_depth, format_curves, pinned_curve
from vismoe.simulate.replay import Order, aligned_columns, replay
from vismoe.trace.files import Trace
from vismoe.types import Phase

SHARES = ("12.5%", "25%", "50%", "75%")
ORDERS: tuple[Order, ...] = ("lru", "lfu")
LINKS_BYTES_PER_S = (15e6, 60e6, 240e6)  # an expert of the bundled model takes 4.9, 1.2 and 0.3 ms
LAYER_S, TOKEN_S = 6e-4, 2e-5  # compute time of one decoder layer of the bundled model, and its increase per prompt token
ASKING_S = 5e-5  # time of the model's thread for the lookahead's snapshot
PHASES = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True)
class Combination:
    """One replay; the lookahead `none` prefetches nothing."""

    trace: str
    share: str
    link_bytes_per_s: float
    lookahead: str
    order: Order
    prefill_s: float
    decode_s: float
    prefill_bytes: int
    decode_bytes: int
    wasted_bytes: int

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


def combinations(
    traces: dict[str, dict[str, Demands]], shares: Sequence[str], links: Sequence[float], **layer: Any
) -> list[Combination]:
    """Every order with every lookahead at every size and rate, and the oracle without lookahead. traces: name -> lookahead ->
    demands."""
    wanted = []
    for name, by_lookahead in traces.items():
        anyone = next(iter(by_lookahead.values()))
        for lookahead, demands in {"none": anyone, **by_lookahead}.items():
            orders = (*ORDERS, "oracle") if lookahead == "none" else ORDERS
            wanted += [(name, s, link, lookahead, order, demands) for s in shares for link in links for order in orders]
    found = []
    for name, share, link, lookahead, order, demands in track(wanted, "replays", console=Console(stderr=True), transient=True):
        prefetch: dict[str, Any] = {} if lookahead == "none" else {"prefetch": True, "lookahead_s": ASKING_S}
        result = replay(demands, share, order, link_bytes_per_s=link, **layer, **prefetch)
        prefill_s, decode_s = map(result.phase_s, PHASES)
        prefill_bytes, decode_bytes = (int(result.counters.total("bytes_read", phase)) for phase in PHASES)
        moved = prefill_bytes, decode_bytes, int(result.counters.total("wasted_prefetch_bytes"))
        found.append(Combination(name, share, link, lookahead, order, prefill_s, decode_s, *moved))
    return found


def combination_tables(found: Sequence[Combination]) -> Iterator[str]:
    """A table per trace and link rate, with a line per order and lookahead; for each share, seconds of decode and prefill."""
    for name, link in dict.fromkeys((c.trace, c.link_bytes_per_s) for c in found):
        here = [c for c in found if (c.trace, c.link_bytes_per_s) == (name, link)]
        shares = list(dict.fromkeys(c.share for c in here))
        head = ["lookahead", "order", *(f"{share} {what}" for share in shares for what in ("prefill s", "decode s", "read"))]
        lines = [head]
        for lookahead, order in dict.fromkeys((c.lookahead, c.order) for c in here):
            cells = [lookahead, order]
            for share in shares:
                c = next(c for c in here if (c.lookahead, c.order, c.share) == (lookahead, order, share))
                cells += [f"{c.prefill_s:.2f}", f"{c.decode_s:.2f}", format_bytes(c.prefill_bytes + c.decode_bytes)]
            lines.append(cells)
        yield f"{name}, {link / 1e6:g} MB/s, virtual time\n{aligned_columns(lines, left=2)}"


def winners(found: Sequence[Combination]) -> dict[str, float]:
    """For each order with each lookahead, its time divided by the best one's in the same replays, on average."""
    ratios: dict[str, list[float]] = {}
    for place in dict.fromkeys((c.trace, c.share, c.link_bytes_per_s) for c in found):
        here = [c for c in found if (c.trace, c.share, c.link_bytes_per_s) == place and c.order != "oracle"]
        best_s = min(c.seconds for c in here)
        for c in here:
            ratios.setdefault(f"{c.order}, {c.lookahead}", []).append(c.seconds / best_s)
    return dict(sorted(((name, sum(each) / len(each)) for name, each in ratios.items()), key=lambda item: item[1]))


# -- the pinned prefix
def prefix(demands: Demands, shares: Sequence[str], link: float, **layer: Any) -> dict[str, list[PinnedPoint]]:
    """Figure 12: a point for every number of pinned layers that each share of the experts allows."""
    options = dict(link_bytes_per_s=link, prefetch=demands.have_scores, lookahead_s=ASKING_S, **layer)
    return {share: pinned_curve(demands, share, **options) for share in shares}


def draw(
    folder: Path, found: Sequence[Combination], curves: dict[str, list[PinnedPoint]], timed: dict[int, float], share: str
) -> None:
    """Draws orchestrator-combinations.png and pinned-layers.png."""
    trace = found[0].trace
    panels = []
    for link in dict.fromkeys(c.link_bytes_per_s for c in found):
        here = [c for c in found if (c.trace, c.link_bytes_per_s) == (trace, link)]
        plain = {c.share: c.decode_s for c in here if (c.lookahead, c.order) == ("none", "lru")}
        series = []
        for lookahead, order in dict.fromkeys((c.lookahead, c.order) for c in here):
            mine = [c for c in here if (c.lookahead, c.order) == (lookahead, order)]
            name = order if lookahead == "none" else f"{order} + {lookahead}"
            series.append(Series(name, [c.share for c in mine], [c.decode_s / plain[c.share] for c in mine]))
        panels.append(Panel(series, "experts in memory", "decode, of LRU alone", f"{link / 1e6:g} MB/s", percent=True))
    grid_figure(folder / "orchestrator-combinations.png", panels, columns=len(panels))
    lines = [
        Series(name, [str(p.pinned_layers) for p in points], [p.seconds / points[0].seconds for p in points])
        for name, points in curves.items()
    ]
    if timed:
        lines.append(Series(f"{share}, timed", list(map(str, timed)), [seconds / timed[0] for seconds in timed.values()]))
    read = [
        Series(name, [str(p.pinned_layers) for p in points], [p.fetched_bytes / points[0].fetched_bytes for p in points])
        for name, points in curves.items()
    ]
    panels = [
        Panel(lines, "pinned MoE layers", "time, of none pinned", percent=True),
        Panel(read, "pinned MoE layers", "bytes read, of none pinned", percent=True),
    ]
    grid_figure(folder / "pinned-layers.png", panels)


# -- the bundled model
def recorded(
    lookaheads: Sequence[str], keeps: Sequence[float], questions: int, tokens: int, folder: Path
) -> dict[str, dict[str, Demands]]:
    """The bundled model's routing on held-out questions, with the scores of each lookahead."""
    prompts = held_out(questions)
    traces: dict[str, dict[str, Demands]] = {}
    for keep in keeps:
        for lookahead in lookaheads:
            target = folder / f"keep-{keep:g}-{lookahead}"
            settings = dict(memory="50%", kernels="torch", deterministic=True, keep=keep, lookahead=lookahead)
            ask_scenes(settings, prompts, tokens, trace=target)
            traces.setdefault(f"keep {keep:g}", {})[lookahead] = Demands.of(Trace.open(target))
    return traces


def lookaheads_of_bundled() -> list[str]:
    """`learned` if a predictor is bundled with the model."""
    found = Calibration.read(demo_model() / FOLDER)
    return ["gate", "learned"] if found is not None and found.has_predictor else ["gate"]


def timed_runs(
    arguments: argparse.Namespace, lookaheads: Sequence[str], depths: int
) -> tuple[dict[str, list[Run]], dict[int, list[Run]]]:
    """(orders and lookaheads, numbers of pinned layers), each run on the real engine over an emulated link."""
    common: dict[str, Any] = dict(
        memory=arguments.timed_share, kernels="fast", misses="wait", emulated_link_bytes_per_s=arguments.timed_link
    )
    prompts = held_out(arguments.questions)

    def turn(**settings: Any) -> Any:
        return partial(ask_scenes, common | settings, prompts, arguments.tokens)

    choices = [(order, lookahead) for lookahead in ("none", *lookaheads) for order in ORDERS]
    orders = {f"{order}, {lookahead}": turn(eviction=order, lookahead=lookahead) for order, lookahead in choices}
    pinned = {str(depth): turn(pinned_layers=depth) for depth in range(depths)}
    first = take_turns(orders, arguments.timed)
    return first, {int(depth): runs for depth, runs in take_turns(pinned, arguments.timed).items()}


def timed_table(rows: dict[str, dict[str, float]]) -> str:
    lines = [["", "seconds", "prefill s", "decode s", "read", "prefill hits", "decode hits"]]
    for name, row in rows.items():
        seconds = [f"{row[key]:.2f}" for key in ("seconds", "prefill_s", "decode_s")]
        hits = [f"{row[key]:.1%}" for key in ("prefill_hit_rate", "decode_hit_rate")]
        lines.append([name, *seconds, format_bytes(row["prefill_bytes"] + row["decode_bytes"]), *hits])
    return aligned_columns(lines, left=1)


def study(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs and prints everything; returns JSON."""
    layer = dict(compute_s_per_layer=arguments.layer_seconds, compute_s_per_token=arguments.token_seconds)
    lookaheads = arguments.lookaheads or lookaheads_of_bundled()
    if arguments.trace:
        traces = {name: {"recorded": Demands.of(Trace.open(path))} for name, path in map(_named, arguments.trace)}
    else:
        traces = recorded(lookaheads, arguments.keeps, arguments.questions, arguments.tokens, folder)
    found = combinations(traces, arguments.shares, arguments.links, **layer)
    for text in combination_tables(found):
        print(f"\n{text}")
    ratios = winners(found)
    print("\ntime over the best combination's, mean of all replays")
    print(
        aligned_columns([["order, lookahead", "times best"], *([name, f"{value:.3f}"] for name, value in ratios.items())], left=1)
    )
    demands = list(next(iter(traces.values())).values())[-1]
    link = arguments.links[len(arguments.links) // 2]
    curves = prefix(demands, arguments.shares, link, **layer)
    best = {share: best_depth(points, timed=True) for share, points in curves.items()}
    print(f"\npinned prefix at {link / 1e6:g} MB/s, virtual time; chosen: {best}\n{format_curves(curves, timed=True)}")
    result: dict[str, Any] = {
        "combinations": [vars(c) for c in found],
        "times_best": ratios,
        "pinned": {share: [vars(p) for p in points] for share, points in curves.items()},
        "best_pinned": best,
    }
    timed: dict[int, float] = {}
    if arguments.timed:
        orders, pinned = timed_runs(arguments, lookaheads, len(curves.get(arguments.timed_share, [None])))
        rows = {name: medians(runs) for name, runs in orders.items()}
        depths = {depth: medians(runs) for depth, runs in pinned.items()}
        place = f"{arguments.timed_share} of the experts, emulated link of {arguments.timed_link / 1e6:g} MB/s"
        print(f"\ntimed: {place}, {arguments.timed} turns\n{timed_table(rows)}")
        print(f"\npinned layers\n{timed_table({str(depth): row for depth, row in depths.items()})}")
        timed = {depth: row["seconds"] for depth, row in depths.items()}
        result["timed"] = {
            "share": arguments.timed_share,
            "link_bytes_per_s": arguments.timed_link,
            "orders": rows,
            "pinned": depths,
        }
    if arguments.figures:
        draw(arguments.figures, found, curves, timed, arguments.timed_share)
    return result


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        raise InputError(f"--trace {text}: not NAME=FOLDER. Fix: --trace NAME=FOLDER")
    return name, path


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval orchestrator", __doc__)
    parser.add_argument("--trace", nargs="+", metavar="NAME=FOLDER", help="replay these instead of recording the bundled model")
    add_several(parser, "--shares", SHARES, "SHARE", "shares of the experts in memory")
    add_several(parser, "--links", LINKS_BYTES_PER_S, "SIZE", "bytes per second of the links", parse_bytes)
    parser.add_argument(
        "--lookaheads", nargs="+", choices=("gate", "learned"), help="lookaheads to compare (default: those of the bundled model)"
    )
    add_several(parser, "--keeps", [1.0, 0.5], "SHARE", "shares of the visual tokens to keep", float)
    parser.add_argument("--layer-seconds", type=float, default=LAYER_S, metavar="S", help="compute time of one decoder layer")
    parser.add_argument("--token-seconds", type=float, default=TOKEN_S, metavar="S", help="further compute time per token")
    parser.add_argument("--questions", type=int, default=36, help="questions to the bundled model (default: 36)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: 24)")
    parser.add_argument("--timed", type=int, default=0, metavar="ROUNDS", help="turns of the real engine (default: none)")
    parser.add_argument("--timed-share", default="25%", help="share of the experts in memory for --timed (default: 25%%)")
    parser.add_argument(
        "--timed-link",
        type=parse_bytes,
        default=LINKS_BYTES_PER_S[1],
        metavar="SIZE",
        help="rate of the emulated link for --timed",
    )
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="folder for the plots, e.g. assets/figures")
    arguments = parser.parse_args(argv)
    with folder_of(None) as folder:
        return told(lambda: study(arguments, folder))


if __name__ == "__main__":
    sys.exit(main())
