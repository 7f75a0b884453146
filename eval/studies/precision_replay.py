"""Chooses the numbers of the precision policies by replay: `python -m vismoe.eval.studies.precision_replay`.

Requests to the bundled model are recorded once (in --work, where an interrupted recording continues) and replayed as streams:
mixed, with a shift half-way, in turns, and one long synthetic answer. Studies: `decay` (alpha and T of hotness), `hysteresis`
(and the threshold), `shift` (how soon hot sets follow), `pools` (how importance divides its memory). Shares are of expert
computations in the better format, prompts and decoding separately; bytes are those of experts of 2048 x 768, as a share of the
size of a token's experts. Nothing is timed: the same trace gives the same results. Tables go to the terminal, plots to --figures,
and the last line is one JSON object.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vismoe.config import Settings
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.report import study_parser, told
from vismoe.eval.studies.precision_workloads import Stream, record, streams, synthetic
from vismoe.planning.pair_split import divide, paired
from vismoe.precision.controller import Precision
from vismoe.precision.hotness import Hotness
from vismoe.precision.policy import Policy
from vismoe.precision.schedule import Schedule
from vismoe.simulate.precision import HotnessReplay, Pass, read, replay_hotness, replay_importance
from vismoe.types import ExpertInventory, RecordLayout

FOLDER = Path("precision-replay")
STUDIES = ("decay", "hysteresis", "shift", "pools")
QUOTAS = (0.125, 0.25, 0.5)  # shares of the experts that may be hot
DECAYS = (0.98, 0.99, 0.995, 0.998)
PERIODS = (8, 16, 32, 64)
HYSTERESES = (1.0, 1.1, 1.25, 1.5, 2.0)
MOST_BYTES = 0.0025  # share of the bytes of a token's experts: 5% of the time of a link 20 times slower than memory
NEARLY = 0.0025  # shares this close count as equal; then fewer updates decide, which save the controller's time
LARGE: dict[str, tuple[int, ...]] = {"gate_up_proj": (2 * 768, 2048), "down_proj": (2048, 768)}  # an expert of Qwen3-VL-30B-A3B
POOL_REQUESTS = 12
BUDGETS = (0.125, 0.25, 0.5, 0.75)  # shares of all experts in the better format
SPLITS = (0.25, 0.5, 0.625, 0.75, 0.875, 1.0)
WINDOW_TOKENS = 250
SHOWN_TOKENS = (-1000, 3000)  # of a shift, in the figure
FOLLOWED = 0.95


@dataclass(frozen=True)
class World:
    """The replayed streams, and the experts of their routing."""

    inventory: ExpertInventory
    streams: Sequence[Stream]

    @property
    def most(self) -> int:
        return max(layer.num_experts for layer in self.inventory.layers)

    def sized(self, pair_settings: Settings) -> ExpertInventory:
        """The inventory with records as large as those of a large model."""
        assert pair_settings.pair is not None
        raw = RecordLayout.of(LARGE, dict.fromkeys(LARGE, torch.bfloat16))
        large = dataclasses.replace(self.inventory, layouts=(raw,) * len(self.inventory.layouts))
        return paired(large, pair_settings.pair, [])

    def quotas(self, share: float) -> np.ndarray:
        return np.array([round(share * layer.num_experts) for layer in self.inventory.layers])

    def token_bytes(self, inventory: ExpertInventory) -> int:
        """Bytes of a token's experts in the better format."""
        return sum(layer.top_k * inventory.layout(layer.index).record_bytes for layer in inventory.layers)


HOTNESS = Settings(policy="hotness", formats="4/2")


@dataclass(frozen=True)
class Point:
    """One replay. Shares of expert computations in the better format; bytes as shares of those of a token's experts."""

    stream: str
    quota: float
    prompts: float
    decoding: float
    oracle_prompts: float
    oracle_decoding: float
    swaps: float  # per 1000 tokens
    moved: float  # bytes moved by swaps

    @property
    def mean(self) -> float:
        """The mean of both phases; a stream without prompts has one phase."""
        return self.decoding if not self.oracle_prompts else (self.prompts + self.decoding) / 2


@dataclass(frozen=True)
class Variant:
    """One choice of numbers, and all its replays."""

    name: str
    decay: float
    period_tokens: int
    hysteresis: float
    points: list[Point]

    def average(self, figure: str, stream: str | None = None) -> float:
        """The mean over quotas and streams, or one of these; for prompts, over streams that have any."""
        its = [point for point in self.points if stream in (None, point.stream)]
        return float(np.mean([getattr(point, figure) for point in its if point.oracle_prompts or "prompts" not in figure]))


def variant(world: World, policy: Policy, name: str = "", controller: type[Precision] = Precision) -> Variant:
    """Replays every stream at every quota."""
    inventory, points = world.sized(HOTNESS), []
    swap = (inventory.layouts[0].record_bytes + inventory.low_layouts[0].record_bytes) / 1000 / world.token_bytes(inventory)
    for stream in world.streams:
        for share in QUOTAS:
            quotas = world.quotas(share)
            found = replay_hotness(stream.passes, inventory, policy, quotas, controller=controller)
            shares = (found.share(decoding=False), found.share(decoding=True), *stream.oracle(quotas, world.most))
            points.append(Point(stream.name, share, *shares, found.swaps_per_1000_tokens, found.swaps_per_1000_tokens * swap))
    return Variant(name, policy.decay, policy.period_tokens, policy.hysteresis, points)


def chosen(variants: Sequence[Variant]) -> Variant:
    """The highest mean share of prompts and decoding among variants that move little enough; of nearly equal ones the one with
    the rarest updates."""
    still = [each for each in variants if each.average("moved") <= MOST_BYTES]
    best = max(each.average("mean") for each in still)
    near = [each for each in still if each.average("mean") >= best - NEARLY]
    return max(near, key=lambda each: (each.period_tokens, each.average("mean")))


def decay_study(world: World, policy: Policy) -> list[Variant]:
    pairs = [(decay, period) for period in PERIODS for decay in DECAYS]
    return [
        variant(world, replace(policy, decay=decay, period_tokens=period), f"T {period}, alpha {decay}")
        for decay, period in _tracked(pairs, "decay")
    ]


# -- hysteresis and threshold
class PaperThreshold(Precision):
    """With the threshold of DynaExq 3.5: the score of the last expert that fits, after the warm-up, never changed."""

    def _update(self, hotness: Hotness) -> Schedule:
        if self._threshold is None:
            ranked = -np.sort(-hotness.scores, axis=1)
            self._threshold = np.take_along_axis(ranked, self._quotas[:, None] - 1, axis=1)[:, 0]
        return super()._update(hotness)


class NoThreshold(Precision):
    """The hottest experts are hot, however cold they are."""

    def _update(self, hotness: Hotness) -> Schedule:
        self._threshold = np.zeros(len(hotness.scores))
        return super()._update(hotness)


def hysteresis_study(world: World, policy: Policy) -> list[Variant]:
    found = [
        variant(world, replace(policy, hysteresis=factor), f"hysteresis {factor:g}")
        for factor in _tracked(HYSTERESES, "hysteresis")
    ]
    return [
        *found,
        variant(world, policy, "threshold of the paper", PaperThreshold),
        variant(world, policy, "no threshold", NoThreshold),
    ]


def print_variants(console: Console, title: str, variants: Sequence[Variant], best: Variant | None) -> None:
    names = list(dict.fromkeys(point.stream for point in variants[0].points))
    table = Table(title=title, title_justify="left")
    for head in ("", "prompts", "decoding", "mean", "swaps/1000 tokens", "moved", *names, "swaps in turns"):
        table.add_column(head, justify="right" if head else "left")
    for each in variants:
        cells = [f"{each.average(figure):.1%}" for figure in ("prompts", "decoding", "mean")]
        cells += [f"{each.average('swaps'):.1f}", f"{each.average('moved'):.3%}"]
        cells += [f"{each.average('mean', name):.1%}" for name in names]
        mark = " *" if each is best else ""
        table.add_row(each.name + mark, *cells, f"{each.average('swaps', 'in turns'):.1f}")
    first = variants[0]
    oracle = [f"{first.average(figure):.1%}" for figure in ("oracle_prompts", "oracle_decoding")]
    table.add_row("best set of each segment", *oracle, *[""] * (table.row_count and len(names) + 4))
    console.print(table)


# -- shift
def shift_study(world: World, policy: Policy) -> list[dict[str, Any]]:
    """The share after a shift: with hot sets that follow, with those from before, and with the best ones."""
    found = []
    for stream in world.streams:
        if len(stream.segments) != 2:
            continue
        quotas = world.quotas(QUOTAS[1])
        result = replay_hotness(stream.passes, world.sized(HOTNESS), policy, quotas)
        at = stream.shift
        late = slice(at + (len(result.tokens) - at) // 2, None)
        x, y = windowed(result, at)
        level = result.share(passes=late)
        before = [index for index, update in enumerate(result.updates) if update.after < at]
        followed = [tokens for tokens, share in zip(x, y, strict=True) if tokens >= WINDOW_TOKENS and share >= FOLLOWED * level]
        found.append(
            {
                "stream": stream.name,
                "before": result.share(passes=slice(at // 2, at)),
                "level": level,
                "stayed": stayed(stream, result, len(before), quotas, world.most),
                "followed_tokens": followed[0] if followed else None,
                "tokens": x,
                "share": y,
            }
        )
    return found


def windowed(result: HotnessReplay, at: int) -> tuple[list[int], list[float]]:
    """(tokens since pass `at`, share of the last WINDOW_TOKENS tokens before that), about every tenth of a window."""
    ends = np.cumsum(result.tokens)
    computed, high = np.cumsum(result.computed), np.cumsum(result.high)
    shift = ends[at - 1]
    marks = np.arange(WINDOW_TOKENS, ends[-1], WINDOW_TOKENS // 10)
    last, first = np.searchsorted(ends, marks), np.searchsorted(ends, marks - WINDOW_TOKENS)
    last, rows = np.unique(last, return_index=True)
    first = first[rows]
    shares = (high[last] - high[first]) / (computed[last] - computed[first])
    return (ends[last] - shift).tolist(), shares.tolist()


def stayed(stream: Stream, result: HotnessReplay, updates: int, quotas: np.ndarray, most: int) -> float:
    """Share after the shift, with the hot sets from before it."""
    hot = np.arange(most) < quotas[:, None]
    if updates:
        hot[:] = False
    for update in result.updates[:updates]:
        for expert in update.promote:
            hot[expert] = True
        for expert in update.demote:
            hot[expert] = False
    chosen_ones = np.concatenate([each.computed for each in stream.segments[1]])
    return float(hot.ravel()[chosen_ones].mean())


# -- pools of importance
def pools_study(world: World) -> list[dict[str, Any]]:
    """Bytes loaded per token for every split of a budget between the formats, and for the planner's own split."""
    requests = list(dict.fromkeys(each.request for each in world.streams[0].passes))[:POOL_REQUESTS]
    passes = [each for each in world.streams[0].passes if each.request in requests]
    rows = []
    for formats, retention in _tracked([("16/4", 0.75), ("4/2", 0.75), ("4/2", 0.5)], "pools"):
        settings = Settings(policy="importance", formats=formats, retention=retention)
        inventory = world.sized(settings)
        for budget in BUDGETS:
            rows.append(pools_row(world, passes, settings, inventory, budget))
    return rows


def pools_row(
    world: World, passes: Sequence[Pass], settings: Settings, inventory: ExpertInventory, budget: float
) -> dict[str, Any]:
    experts_bytes = sum(layer.num_experts * inventory.layout(layer.index).record_bytes for layer in inventory.layers)
    memory_bytes = int(budget * experts_bytes)
    planned = divide(inventory, settings, memory_bytes)
    tokens, weight = sum(each.tokens for each in passes), world.token_bytes(inventory)

    def loaded(high: int, low: int) -> float:
        return sum(replay_importance(passes, inventory, Policy.of(settings), (high,), (low,))) / tokens / weight

    splits = {}
    for split in SPLITS:
        high, low = slabs_of(split, memory_bytes, inventory)
        splits[split] = {"high": high, "low": low, "loaded": loaded(high, low)}
    ours = {"high": planned.slabs[0], "low": planned.low_slabs[0], "loaded": loaded(planned.slabs[0], planned.low_slabs[0])}
    best = min(row["loaded"] for row in splits.values())
    return {
        "formats": settings.formats,
        "retention": settings.retention,
        "budget": budget,
        "planned": ours,
        "splits": splits,
        "times_best": ours["loaded"] / best if best else 1.0,
    }


def slabs_of(split: float, memory_bytes: int, inventory: ExpertInventory) -> tuple[int, int]:
    """Slabs of the formats of one geometry, split : 1 - split by number, at most one per expert and at least two of each
    format."""
    experts = sum(layer.num_experts for layer in inventory.layers)
    high_bytes, low_bytes = inventory.layouts[0].record_bytes, inventory.low_layouts[0].record_bytes
    slabs = min(experts, int(memory_bytes / (split * high_bytes + (1 - split) * low_bytes)))
    low = max(2, slabs - round(split * slabs))
    return min(experts, (memory_bytes - low * low_bytes) // high_bytes), low


def print_rows(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for head in rows[0]:
        table.add_column(head.replace("_", " "), justify="left" if isinstance(rows[0][head], str) else "right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _tracked(items: Sequence[Any], what: str) -> Iterator[Any]:
    yield from track(items, what, console=Console(stderr=True), transient=True)


def print_pools(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="pools of importance: loaded per token, of what its experts weigh", title_justify="left")
    for head in ("formats", "retention", "budget", *(f"{split:.1%} high" for split in SPLITS), "planned", "of the best"):
        table.add_column(head, justify="right")
    for row in rows:
        cells = [f"{each['loaded']:.1%}" for each in row["splits"].values()]
        ours = f"{row['planned']['loaded']:.1%} ({row['planned']['high']} + {row['planned']['low']})"
        table.add_row(row["formats"], f"{row['retention']:g}", f"{row['budget']:.1%}", *cells, ours, f"{row['times_best']:.2f}")
    console.print(table)


def study(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs and prints the requested studies; returns JSON."""
    trace = record(arguments.work, arguments.questions)
    recorded = streams(read(trace))
    layer = trace.inventory.layers[0]
    long = synthetic(len(trace.inventory.layers), layer.num_experts, layer.top_k, arguments.answer)
    world, policy = World(trace.inventory, [*recorded, long]), Policy.of(HOTNESS)
    result: dict[str, Any] = {"streams": {each.name: sum(p.tokens for p in each.passes) for each in world.streams}}
    figures: dict[str, list[Panel]] = {"decay": [], "streams": []}
    if "decay" in arguments.study:
        variants = decay_study(world, policy)
        best = chosen(variants)
        print_variants(console, "alpha and T, means over streams and quotas of 12.5, 25 and 50%", variants, best)
        result["decay"] = {"chosen": best.name, "variants": [asdict(each) for each in variants]}
        figures["decay"] += decay_panels(variants)
    if "hysteresis" in arguments.study:
        variants = hysteresis_study(world, policy)
        best = chosen(variants[: len(HYSTERESES)])
        print_variants(console, "hysteresis and threshold, means as above", variants, best)
        result["hysteresis"] = {"chosen": best.name, "variants": [asdict(each) for each in variants]}
        figures["streams"] += hysteresis_panels(variants[: len(HYSTERESES)])
    if "shift" in arguments.study:
        shifts = shift_study(world, policy)
        shown = [{name: value for name, value in row.items() if name not in ("tokens", "share")} for row in shifts]
        print_rows(console, f"after a shift, {QUOTAS[1]:.0%} of the experts hot", shown)
        result["shift"] = shifts
        figures["streams"].append(shift_panel(shifts))
    if "pools" in arguments.study:
        rows = pools_study(world)
        print_pools(console, rows)
        result["pools"] = rows
    for name, panels in figures.items():
        if arguments.figures and panels:
            grid_figure(arguments.figures / f"precision-replay-{name}.png", panels)
    return result


def decay_panels(variants: Sequence[Variant]) -> list[Panel]:
    def lines(figure: str) -> list[Series]:
        its = {period: [each for each in variants if each.period_tokens == period] for period in PERIODS}
        return [
            Series(f"T = {period}", [f"{each.decay:g}" for each in row], [100 * each.average(figure) for each in row])
            for period, row in its.items()
        ]

    return [
        Panel(lines("mean"), "alpha", "% of prompts and decoding (mean)", "computed in the better format"),
        Panel(lines("moved"), "alpha", "% of the bytes of its experts", "moved per token", y_limits=(0, None)),
    ]


def hysteresis_panels(variants: Sequence[Variant]) -> list[Panel]:
    names = list(dict.fromkeys(point.stream for point in variants[0].points))
    lines = [
        Series(name, [each.hysteresis for each in variants], [each.average("swaps", name) for each in variants]) for name in names
    ]
    return [Panel(lines[:2] + lines[-2:], "hysteresis", "swaps per 1000 tokens", "thrash", y_limits=(0, None))]


def shift_panel(shifts: Sequence[dict[str, Any]]) -> Panel:
    series = []
    for row in shifts:
        points = [
            point for point in zip(row["tokens"], row["share"], strict=True) if SHOWN_TOKENS[0] <= point[0] <= SHOWN_TOKENS[1]
        ]
        series.append(Series(row["stream"], *zip(*points, strict=True)))
    return Panel(series, "tokens after the shift", "computed in the better format", f"last {WINDOW_TOKENS} tokens", percent=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval precision-replay", __doc__)
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES), help="studies to run (default: all)")
    parser.add_argument(
        "--questions", type=int, default=8, metavar="N", help="questions of each kind and half of the icons (default: 8)"
    )
    parser.add_argument(
        "--answer", type=int, default=1000, metavar="TOKENS", help="length of the synthetic answer (default: 1000)"
    )
    parser.add_argument("--work", type=Path, default=FOLDER, metavar="DIR", help=f"folder for the trace (default: {FOLDER})")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="folder for the plots, e.g. assets/figures")
    arguments = parser.parse_args(argv)
    return told(lambda: study(arguments, Console()))


if __name__ == "__main__":
    sys.exit(main())
