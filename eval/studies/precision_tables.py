"""Lines of contestants over a swept setting: results with intervals over questions, comparisons of lines, tables, plots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vismoe.eval.paired import Interval, beside, paired_difference, points, ratio_of_sums, spread
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.questions import KINDS
from vismoe.eval.studies.precision_judge import JudgedAnswer
from vismoe.eval.studies.precision_rules import Everywhere, PrecisionContestant

ALL = "all"
RESAMPLES = 1000
EQUAL_LOW = 0.02  # by at most this do shares of low computations differ that count as equal


@dataclass(frozen=True)
class TableLine:
    """One line of one panel: at each x, the contestants whose mean it shows, several if there were several random draws."""

    panel: str
    name: str
    points: Mapping[float, Sequence[PrecisionContestant]]


@dataclass(frozen=True)
class Comparison:
    """Two lines of the same panel, by name."""

    own: str
    rival: str


@dataclass(frozen=True)
class Column:
    """Results of contestants on the same questions, the mean if there are several contestants; arrays over questions."""

    tokens: np.ndarray
    divergence: np.ndarray
    surprise: np.ndarray
    score: np.ndarray | None  # None: no answers were generated

    @classmethod
    def of(cls, rows: Sequence[Sequence[JudgedAnswer]]) -> "Column":
        def mean(name: str) -> np.ndarray:
            return np.mean([[getattr(row, name) for row in its] for its in rows], axis=0)

        return cls(mean("tokens"), mean("divergence"), mean("surprise"), None if rows[0][0].score is None else mean("score"))

    def among(self, chosen: np.ndarray) -> "Column":
        """The column for some questions: bool [questions]."""
        score = None if self.score is None else self.score[chosen]
        return Column(self.tokens[chosen], self.divergence[chosen], self.surprise[chosen], score)

    def figures(self, base: "Column") -> dict[str, Any]:
        """Its numbers, with accuracy compared with that of `base`."""
        surprise = ratio_of_sums(self.surprise, self.tokens)
        found = {
            "divergence": asdict(ratio_of_sums(self.divergence, self.tokens)),
            "perplexity": {end: exp(getattr(surprise, end)) for end in ("value", "low", "high")},
        }
        if self.score is not None and base.score is not None:
            found["accuracy"] = beside(base.score.tolist(), self.score.tolist())
        return found

    def against(self, rival: "Column") -> dict[str, Any]:
        found = {
            "divergence_ratio": asdict(ratio_of_sums(self.divergence, rival.divergence)),
            "surprise_difference": asdict(ratio_of_sums(self.surprise - rival.surprise, self.tokens)),
        }
        if self.score is not None and rival.score is not None:
            found["accuracy_difference"] = asdict(paired_difference(rival.score.tolist(), self.score.tolist()))
        return found


class Summary:
    """Summarises contestants' results on questions whose kinds are `kinds`, as plain values."""

    def __init__(self, table: Mapping[PrecisionContestant, Sequence[JudgedAnswer]], kinds: Sequence[str]):
        self._table = table
        its = {kind: np.array(kinds) == kind for kind in KINDS if kind in kinds}
        self._groups = {ALL: np.full(len(kinds), True)} | its

    def _column(self, contestants: Sequence[PrecisionContestant]) -> Column:
        return Column.of([self._table[contestant] for contestant in contestants])

    def line(self, line: TableLine, base: Everywhere) -> dict[str, Any]:
        """The results at each point for all questions and per kind, with accuracies compared with those of `base`."""
        its = [{"x": x, **self._point(contestants, base)} for x, contestants in line.points.items()]
        own = {"name": str(base), **self._point([base], base)}
        return {"panel": line.panel, "name": line.name, "base": own, "points": its}

    def _low(self, contestants: Sequence[PrecisionContestant], base: Everywhere) -> list[float]:
        """Share of the computations that are not in the format of `base`: of prompts, and of answers."""
        outcomes = [row for contestant in contestants for row in self._table[contestant]]
        high = [[computed.get(base.format, 0) for computed in (row.prompt, row.decoded)] for row in outcomes]
        return (1 - np.mean(high, axis=0)).tolist()

    def _point(self, contestants: Sequence[PrecisionContestant], base: Everywhere) -> dict[str, Any]:
        column, rival = self._column(contestants), self._column([base])
        draws = [self._column([contestant]).figures(rival) for contestant in contestants]
        prompt_low, decoded_low = self._low(contestants, base)
        return {
            "prompt_low": prompt_low,
            "decoded_low": decoded_low,
            "draws": [{name: draw[name]["value"] for name in ("divergence", "perplexity")} for draw in draws],
            **{group: column.among(chosen).figures(rival.among(chosen)) for group, chosen in self._groups.items()},
        }

    def compared(self, own: TableLine, rival: TableLine, base: Everywhere) -> dict[str, Any]:
        """The comparison at each x where both lines have different contestants, and over all of these together; `matched`: of
        every two places, at any x, where both compute equal shares in the low format."""
        shared = [x for x in own.points if x in rival.points and own.points[x] != rival.points[x]]
        first, second = (self._column([one for x in shared for one in line.points[x]]) for line in (own, rival))
        pairs = [(x, self._column(own.points[x]), self._column(rival.points[x])) for x in shared]
        return {
            "panel": own.panel,
            "own": own.name,
            "rival": rival.name,
            "points": [{"x": x, ALL: mine.against(its)} for x, mine, its in pairs],
            "matched": list(self._matched(own, rival, base)),
            **{group: first.among(chosen).against(second.among(chosen)) for group, chosen in self._groups.items()},
        }

    def _matched(self, own: TableLine, rival: TableLine, base: Everywhere) -> Iterator[dict[str, Any]]:
        low = [{x: self._low(contestants, base) for x, contestants in line.points.items()} for line in (own, rival)]
        for (x, here), (rival_x, there) in product(low[0].items(), low[1].items()):
            if own.points[x] != rival.points[rival_x] and np.abs(np.subtract(here, there)).max() < EQUAL_LOW:
                mine, its = self._column(own.points[x]), self._column(rival.points[rival_x])
                yield {"x": x, "rival_x": rival_x, "low": here, "rival_low": there, ALL: mine.against(its)}

    def trend(self, line: TableLine) -> dict[str, Any]:
        """Whether the divergence grows (1) or falls (-1) along a line, for all questions and per kind."""
        losses = np.array([self._column(contestants).divergence for contestants in line.points.values()])
        its = {group: asdict(rank_correlation(losses[:, chosen])) for group, chosen in self._groups.items()}
        return {"panel": line.panel, "name": line.name, **its}


def rank_correlation(losses: np.ndarray) -> Interval:
    """Spearman's correlation between positions on a line and the sums of `losses` [places, questions]; bootstrap over
    questions."""
    places, count = losses.shape
    chosen = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    sums = np.concatenate([losses.sum(axis=1)[None], losses[:, chosen].sum(axis=2).T])
    middle = (places - 1) / 2
    ranks, steps = sums.argsort(axis=1).argsort(axis=1) - middle, np.arange(places) - middle
    found = ranks @ steps / (steps @ steps)
    return Interval(float(found[0]), *map(float, np.quantile(found[1:], (0.025, 0.975))))


def summary(
    lines: Sequence[tuple[TableLine, Everywhere]],
    comparisons: Sequence[Comparison],
    trends: bool,
    table: Mapping[PrecisionContestant, Sequence[JudgedAnswer]],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Lines, each with the base of its accuracies; comparisons of lines; with `trends` their growth."""
    found = Summary(table, kinds)
    drawn = [line for line, _ in lines]
    return {
        "lines": [found.line(line, base) for line, base in lines],
        "comparisons": [
            found.compared(own, rival, base)
            for wanted in comparisons
            for own, base in lines
            for rival in drawn
            if (own.name, rival.name) == (wanted.own, wanted.rival) and own.panel == rival.panel
        ],
        "trends": [found.trend(line) for line in drawn] if trends else [],
    }


def print_summary(console: Console, result: dict[str, Any]) -> None:
    """Tables of all lines, of kinds, of the comparisons and of trends."""
    answered = _answered(result)
    columns = ["accuracy", "points of difference"] if answered else []
    table = Table("formats", "line", result["axis"], "low in prompts", "in answers", "KL, nats/token", "perplexity", *columns)
    kinds = Table("accuracy" if answered else "perplexity", "line", result["axis"], *KINDS)
    rows = {}
    for line in result["lines"]:
        rows[line["panel"], line["base"]["name"], ""] = line["base"]
        rows |= {(line["panel"], line["name"], f"{point['x']:g}"): point for point in line["points"]}
    for where, point in rows.items():
        lows, found = (f"{point['prompt_low']:.1%}", f"{point['decoded_low']:.1%}"), point[ALL]
        right = [f"{found['accuracy']['mean']:.2%}", points(found["accuracy"]["difference"])] if answered else []
        table.add_row(*where, *lows, spread(found["divergence"], ".5f"), f"{found['perplexity']['value']:.5f}", *right)
        kinds.add_row(*where, *(_of_kind(point[kind]) for kind in KINDS))
    console.print(table)
    console.print(kinds)
    if result["comparisons"]:
        _print_comparisons(console, result, answered)
    if result["trends"]:
        _print_trends(console, result["trends"])
    bases = ", ".join(dict.fromkeys(f"{line['base']['name']} ({line['panel']})" for line in result["lines"]))
    console.print(
        f"{result['questions']:,} held-out questions, the same for all; differences to {bases}. In brackets 95% intervals: "
        "Newcombe's for paired proportions, otherwise the bootstrap over questions"
    )


def _answered(result: dict[str, Any]) -> bool:
    return "accuracy" in result["lines"][0]["points"][0][ALL]


def _of_kind(found: dict[str, Any]) -> str:
    return f"{found['accuracy']['mean']:.1%}" if "accuracy" in found else f"{found['perplexity']['value']:.4f}"


def _print_comparisons(console: Console, result: dict[str, Any], answered: bool) -> None:
    columns = ["accuracy, points"] if answered else []
    table = Table("formats", "line", "against", result["axis"], "of its KL", "surprise, nats/token", *columns)
    ratios, differences = Table("of its KL", "line", "against", *KINDS), Table("accuracy, points", "line", "against", *KINDS)
    for each in result["comparisons"]:
        names = each["panel"], each["own"], each["rival"]
        places = [
            *((f"{point['x']:g}", point[ALL]) for point in each["points"]),
            *((f"{point['x']:g} against {point['rival_x']:g}, equal shares low", point[ALL]) for point in each["matched"]),
        ]
        for x, found in [*places, (ALL, each[ALL])]:
            right = [points(found["accuracy_difference"])] if answered else []
            table.add_row(
                *names, x, spread(found["divergence_ratio"], ".2f"), spread(found["surprise_difference"], ".5f"), *right
            )
        ratios.add_row(*names, *(spread(each[kind]["divergence_ratio"], ".2f") for kind in KINDS))
        if answered:
            differences.add_row(*names, *(points(each[kind]["accuracy_difference"]) for kind in KINDS))
    for printed in (table, ratios, *([differences] if answered else [])):
        console.print(printed)


def _print_trends(console: Console, trends: Sequence[dict[str, Any]]) -> None:
    table = Table("rank correlation of KL", *(f"{each['panel']}, {each['name']}" for each in trends))
    for group in (ALL, *KINDS):
        table.add_row(group, *(spread(each[group], ".2f") for each in trends))
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """For each pair of formats a panel of the divergence, and below it one of accuracy or else perplexity."""
    panels = list(dict.fromkeys(line["panel"] for line in result["lines"]))
    drawn = [_panel(result, panel, "divergence", "KL from 16 bit, nats per token", (None, None)) for panel in panels]
    if _answered(result):
        least = min(point[ALL]["accuracy"]["low"] for line in result["lines"] for point in line["points"])
        drawn += [_panel(result, panel, "accuracy", "accuracy", (least, 1.0)) for panel in panels]
    else:
        drawn += [_panel(result, panel, "perplexity", "perplexity", (None, None)) for panel in panels]
    grid_figure(path, drawn, columns=len(panels))


def _panel(result: dict[str, Any], panel: str, figure: str, label: str, limits: tuple[float | None, float | None]) -> Panel:
    series = [_series(line, figure) for line in result["lines"] if line["panel"] == panel]
    return Panel(series, result["axis"], label, panel, percent=figure == "accuracy", y_limits=limits)


def _series(line: dict[str, Any], figure: str) -> Series:
    """A plotted line, with intervals of accuracies, and between the extremes of random draws."""
    x, found = [point["x"] for point in line["points"]], [point[ALL][figure] for point in line["points"]]
    if figure == "accuracy":
        return Series.of(line["name"], x, found, "mean")
    draws = [[draw[figure] for draw in point["draws"]] for point in line["points"]]
    ends = [list(map(end, draws)) for end in (min, max)] if any(len(each) > 1 for each in draws) else []
    return Series(line["name"], x, [each["value"] for each in found], *ends)
