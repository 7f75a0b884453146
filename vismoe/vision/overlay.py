"""A picture of the kept tokens: the image, with the squares of dropped visual tokens grey and dim."""

import numpy as np
from PIL import Image

from vismoe.vision.selection import KeptImage

DIMMED = 0.35  # factor of a dropped token's brightness
LINE = (255, 255, 255)
LINE_OPACITY = 0.35
BORDER = (127, 127, 127)
SMALLEST_SQUARE = 6  # pixels; between smaller squares, lines would hide the picture


def kept_map(picture: Image.Image, kept: KeptImage) -> Image.Image | None:
    """The overlay of what was kept of a picture; None if its tokens have no place in it."""
    if kept.grid is None or kept.cells is None:
        return None
    return kept_overlay(picture, kept.grid, kept.cells, kept.layout is not None and kept.layout.letterboxed)


def kept_overlay(image: Image.Image, grid: tuple[int, int], kept: np.ndarray, letterboxed: bool = False) -> Image.Image:
    """`image` as RGB in its own size; `grid` is (rows, columns) of visual tokens, `kept` the indices of those that were kept.

    A token covers a rows-th of the height and a columns-th of the width, in whole pixels. The image is first turned upright, as
    for encoding; `letterboxed`: and gets a border that gives it the grid's proportions. Raises ValueError for an index outside
    the grid.
    """
    rows, columns = grid
    if letterboxed:
        image = _with_border(image.convert("RGB"), columns / rows)
    kept = np.asarray(kept, dtype=np.int64)
    if kept.size and not 0 <= kept.min() <= kept.max() < rows * columns:
        raise ValueError(f"kept tokens {kept.min()} to {kept.max()} are not all in a grid of {rows} x {columns}")
    tokens = np.zeros(rows * columns, bool)
    tokens[kept] = True
    pixels = np.asarray(image.convert("RGB"))
    down, across = _cuts(pixels.shape[0], rows), _cuts(pixels.shape[1], columns)
    shown = np.repeat(np.repeat(tokens.reshape(grid), np.diff(down), axis=0), np.diff(across), axis=1)
    grey = np.asarray(image.convert("L"))[..., None] * DIMMED
    out = np.where(shown[..., None], pixels, grey)
    lines = np.zeros_like(shown)
    for cuts, along in ((down, lines), (across, lines.T)):
        if np.diff(cuts).min() >= SMALLEST_SQUARE:
            along[cuts[1:-1]] = True
    out[lines] = out[lines] * (1 - LINE_OPACITY) + np.array(LINE) * LINE_OPACITY
    return Image.fromarray(out.round().astype(np.uint8))


def _with_border(image: Image.Image, proportion: float) -> Image.Image:
    """The image in the middle of the smallest canvas whose width is `proportion` times its height."""
    width, height = max(image.width, round(image.height * proportion)), max(image.height, round(image.width / proportion))
    canvas = Image.new("RGB", (width, height), BORDER)
    canvas.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return canvas


def _cuts(pixels: int, parts: int) -> np.ndarray:
    """First pixel of each of `parts` stretches, and one past the last: int64 `[parts + 1]`; a pixel belongs where its middle
    lies."""
    return -((parts - 2 * np.arange(parts + 1) * pixels) // (2 * parts))
