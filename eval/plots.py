"""One style for every figure in the documentation: panels of lines or bars, written as small PNGs.

Colours are Okabe and Ito's, which people with any colour vision can distinguish; series also differ in marker and dash, so a grey
print is readable. Files have at most 256 colours and no date: the same data gives the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from PIL import Image

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "x")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "--")
PANEL_INCHES = (4.0, 3.0)
DPI = 130
FEW_POINTS = 12
LABEL_LETTERS = 40  # letters of all bar labels together that fit side by side
STYLE: dict[Any, Any] = {  # the type of its keys differs between versions of matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True)
class Series:
    """One line, or the bars of one colour: `y` at each `x`, and the ends of its interval if known."""

    name: str  # in the legend; the same name has the same colour in every panel
    x: Sequence[float | str]  # words if the axis has categories
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    @classmethod
    def of(cls, name: str, x: Sequence[float | str], found: Sequence[Mapping[str, float]], middle: str = "value") -> "Series":
        """Estimates with the ends of their intervals, as plain values; `middle` is the name of the estimate."""
        return cls(name, x, *([each[end] for each in found] for end in (middle, "low", "high")))


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    title: str = ""
    kind: Literal["lines", "bars"] = "lines"
    percent: bool = False  # the y values are shares of 1
    y_limits: tuple[float | None, float | None] = (None, None)


def grid_figure(path: str | Path, panels: Sequence[Panel], columns: int = 2) -> Path:
    """Panels row by row, with one legend below all; returns the path of the PNG file, whose folder is created if missing."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    assert len(names) <= len(COLOURS), f"{len(names)} series: no more than {len(COLOURS)} can be told apart"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1]), dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, panels):
            _draw(axis, panel, names)
        for axis in axes[len(panels) :]:
            axis.remove()
        if len(names) > 1:
            handles = {
                name: handle
                for axis in axes[: len(panels)]
                for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            drawn = [name for name in names if name in handles]
            figure.legend(
                [handles[name] for name in drawn], drawn, loc="outside lower center", ncols=min(len(drawn), 3 * columns)
            )
        canvas.draw()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_small_png(Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))))
    return path


def _draw(axis: Any, panel: Panel, names: Sequence[str]) -> None:
    from matplotlib.ticker import PercentFormatter

    for index, series in enumerate(panel.series):
        look = names.index(series.name)
        if panel.kind == "bars":
            _draw_bars(axis, series, index, len(panel.series), look)
        else:
            _draw_line(axis, series, look)
    if panel.kind == "bars":
        labels = [str(x) for x in panel.series[0].x]
        turned = dict(rotation=30, ha="right", rotation_mode="anchor") if sum(map(len, labels)) > LABEL_LETTERS else {}
        axis.set_xticks(range(len(labels)), labels, **turned)
        axis.grid(False, axis="x")
    if panel.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    axis.set_ylim(*panel.y_limits)


def _draw_line(axis: Any, series: Series, look: int) -> None:
    """Intervals are bars at few points, a band at many."""
    colour, few = COLOURS[look], len(series.x) <= FEW_POINTS
    every = max(1, len(series.x) // FEW_POINTS)
    axis.plot(series.x, series.y, color=colour, marker=MARKERS[look], markevery=every, linestyle=DASHES[look], label=series.name)
    if series.low is None or series.high is None:
        return
    if few:
        axis.errorbar(series.x, series.y, yerr=_lengths(series), fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)
    else:
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _draw_bars(axis: Any, series: Series, index: int, count: int, look: int) -> None:
    width = 0.8 / count
    places = [place + (index - (count - 1) / 2) * width for place in range(len(series.x))]
    axis.bar(
        places, series.y, width, color=COLOURS[look], edgecolor="white", hatch=HATCHES[look], linewidth=0.5, label=series.name
    )
    if series.low is not None and series.high is not None:
        axis.errorbar(places, series.y, yerr=_lengths(series), fmt="none", ecolor="#333333", elinewidth=0.8, capsize=1.5)


def _lengths(series: Series) -> list[list[float]]:
    """Lengths of an interval's two arms, never below zero."""
    assert series.low is not None and series.high is not None
    return [
        [max(0.0, y - low) for y, low in zip(series.y, series.low)],
        [max(0.0, high - y) for y, high in zip(series.y, series.high)],
    ]


def _small_png(picture: Image.Image) -> bytes:
    out = BytesIO()
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
