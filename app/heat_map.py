"""The experts as a picture: one row for each MoE layer, one cell for each expert, as inline SVG. Pure.

The colour of a cell shows hits and misses of an expert in one answer, its brightness how often it was demanded, its size whether
it is in memory now, and its height the format. Cells are strokes of a few paths, so that 48 x 128 experts take some tens of
kilobytes; colours come from the page's style.
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from vismoe.paging.page_table import NO_EXPERT, ON_DEVICE, PINNED
from vismoe.pair import LOW

LEVELS = 3  # of brightness
LEAST_ROW_PIXELS, MOST_ROW_PIXELS, FIGURE_PIXELS = 7.0, 22.0, 360.0
LARGE, SMALL = 0.86, 0.42  # sides of a cell: in memory, and not in memory
HALF = LARGE / 2  # height of a cell whose expert has the second of two formats
LEGEND = (
    ("hit", "only hits: it was in memory whenever it was needed"),
    ("most", "more hits than misses: fetched, then used again"),
    ("some", "more misses than hits"),
    ("miss", "only misses: it had to be fetched each time"),
    ("idle", "in memory, but not needed"),
    ("gone", "small: no longer in memory"),
    ("pinned", "pinned: always in memory"),
)


def heat_map(residency: np.ndarray, hits: np.ndarray, misses: np.ndarray, formats: np.ndarray, held: Sequence[str]) -> str:
    """HTML of the map; all four arrays are `[L, E]`: residency uint8 from `Engine.residency()`, hits and misses of one answer as
    integers, formats uint8 from `Engine.formats()`. held: the formats that resident experts can have, from `Engine.format_names`.
    """
    layers, experts = residency.shape
    low = formats == 1 + LOW
    row_pixels = min(MOST_ROW_PIXELS, max(LEAST_ROW_PIXELS, FIGURE_PIXELS / layers))
    height = f"{layers * row_pixels:.0f}px"
    two = [("half", f"half height: in {escape(held[1])}, others in {escape(held[0])}")] if len(held) > 1 else []
    legend = "".join(f'<li><i class="vm-{name}"></i>{words}</li>' for name, words in (*LEGEND, *two))
    experts_in_all = int((residency != NO_EXPERT).sum())
    return (
        f'<p class="vm-note">{in_memory(residency).sum()} of {experts_in_all} experts are in memory now. '
        f"Their format: {escape(_held(residency, low, held))}.</p>"
        f'<div class="vm-heat" role="img" aria-label="{_summary(residency, hits, misses)}">'
        f'<div class="vm-y"><span>layer 0</span><span>{layers - 1}</span></div>'
        f'<svg class="vm-cells" viewBox="0 0 {experts} {layers}" preserveAspectRatio="none" style="height:{height}">'
        f"{_cells(residency, hits, misses, low)}{_rows(residency, hits, misses, low, held)}</svg>"
        f'<svg class="vm-rates" viewBox="0 0 1 {layers}" preserveAspectRatio="none" style="height:{height}">'
        f"{_rates(hits, misses)}</svg>"
        f'<div class="vm-x vm-experts"><span>expert 0</span><span>{experts - 1}</span></div>'
        '<div class="vm-x">hit rate</div></div>'
        f'<ul class="vm-legend">{legend}</ul>'
    )


def in_memory(residency: np.ndarray) -> np.ndarray:
    """Which experts are in memory, bool."""
    return (residency == ON_DEVICE) | (residency == PINNED)


def _summary(residency: np.ndarray, hits: np.ndarray, misses: np.ndarray) -> str:
    asked = hits + misses
    return (
        f"Experts of {len(residency)} layers: {in_memory(residency).sum()} in memory; in this answer {int((asked > 0).sum())} "
        f"were needed, {int(hits.sum())} times in memory and {int(misses.sum())} times fetched."
    )


def _held(residency: np.ndarray, low: np.ndarray, held: Sequence[str]) -> str:
    """How many experts have which format, if there are two."""
    if len(held) == 1:
        return held[0]
    here = in_memory(residency)
    return f"{(here & ~low).sum()} in {held[0]}, {(here & low).sum()} in {held[1]}"


def _cells(residency: np.ndarray, hits: np.ndarray, misses: np.ndarray, low: np.ndarray) -> str:
    here = in_memory(residency)
    asked = hits + misses
    level = np.minimum(LEVELS - 1, (LEVELS * np.log1p(asked) / np.log1p(max(1, asked.max()) + 1)).astype(int))
    kinds = {
        "hit": (asked > 0) & (misses == 0),
        "most": (misses > 0) & (hits >= misses),
        "some": (hits > 0) & (hits < misses),
        "miss": (asked > 0) & (hits == 0),
    }
    paths = _here("vm-idle", here & (asked == 0), low)
    for kind, cells in kinds.items():
        for step in range(LEVELS):
            paths += _here(f"vm-{kind} vm-l{step}", cells & here & (level == step), low)
            paths.append(_strokes(f"vm-{kind} vm-l{step}", cells & ~here & (level == step), SMALL))
    paths.append(_strokes("vm-pinned", residency == PINNED, LARGE, thick=0.14, down=0.9))
    return "".join(paths)


def _here(names: str, where: np.ndarray, low: np.ndarray) -> list[str]:
    """The cells of experts that are in memory."""
    return [_strokes(names, where & ~low, LARGE), _strokes(names, where & low, LARGE, thick=HALF)]


def _strokes(names: str, where: np.ndarray, side: float, thick: float | None = None, down: float = 0.5) -> str:
    """A path with one horizontal stroke for each true cell, centred horizontally, at `down` of its height."""
    rows, columns = np.nonzero(where)
    if not len(rows):
        return ""
    moves = "".join(f"M{column} {row}h{side}" for row, column in zip(rows.tolist(), columns.tolist(), strict=True))
    return (
        f'<path class="{names}" stroke-width="{thick or side}" transform="translate({(1 - side) / 2:.2f},{down})" d="{moves}"/>'
    )


def _rows(residency: np.ndarray, hits: np.ndarray, misses: np.ndarray, low: np.ndarray, held: Sequence[str]) -> str:
    """The tooltip of each row."""
    experts = residency.shape[1]
    return "".join(
        f'<rect x="0" y="{layer}" width="{experts}" height="1"><title>{_row_title(layer, *row, held)}</title></rect>'
        for layer, row in enumerate(zip(residency, hits, misses, low, strict=True))
    )


def _row_title(
    layer: int, residency: np.ndarray, hits: np.ndarray, misses: np.ndarray, low: np.ndarray, held: Sequence[str]
) -> str:
    demands = int(hits.sum() + misses.sum())
    rate = f" ({hits.sum() / demands:.0%} hits)" if demands else ""
    here, experts = in_memory(residency).sum(), int((residency != NO_EXPERT).sum())
    two = f" ({escape(_held(residency, low, held))})" if len(held) > 1 else ""
    return f"layer {layer}: {here} of {experts} in memory{two}; this answer: {hits.sum()} hits, {misses.sum()} misses{rate}"


def _rates(hits: np.ndarray, misses: np.ndarray) -> str:
    """A bar for each layer: hits divided by demands."""
    demands = (hits + misses).sum(axis=1)
    rates = hits.sum(axis=1) / np.maximum(demands, 1)
    full = "".join(f"M0 {layer}h1" for layer in range(len(hits)))
    bars = "".join(f"M0 {layer}h{rate:.3f}" for layer, rate in enumerate(rates.tolist()) if rate)
    return (
        f'<path class="vm-track" stroke-width="{LARGE}" transform="translate(0,.5)" d="{full}"/>'
        f'<path class="vm-hit" stroke-width="{LARGE}" transform="translate(0,.5)" d="{bars}"/>'
    )
