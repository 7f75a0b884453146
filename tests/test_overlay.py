"""The picture of what was kept: kept squares are the image itself, dropped ones grey and dim, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vismoe.vision.overlay import DIMMED, SMALLEST_SQUARE, kept_overlay


def picture(width, height, mode="RGB"):
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels, mode)


@st.composite
def cases(draw):
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    width, height = draw(st.integers(columns, 60)), draw(st.integers(rows, 60))
    return (width, height), (rows, columns), draw(st.sets(st.integers(0, rows * columns - 1)))


@given(cases())
def test_every_pixel_is_the_images_own_or_grey(case):
    """A pixel belongs to the token in whose stretch its middle lies; those on a line are left out."""
    size, (rows, columns), kept = case
    image = picture(*size)
    shown = np.asarray(kept_overlay(image, (rows, columns), np.array(sorted(kept), int)))
    original, grey = np.asarray(image), np.asarray(image.convert("L"))
    assert shown.shape == original.shape
    down = [int((row + 0.5) * rows / size[1]) for row in range(size[1])]
    across = [int((column + 0.5) * columns / size[0]) for column in range(size[0])]
    for y, row in enumerate(down):
        for x, column in enumerate(across):
            if (y and down[y - 1] != row) or (x and across[x - 1] != column):
                continue  # where a line may be
            if row * columns + column in kept:
                assert (shown[y, x] == original[y, x]).all()
            else:
                assert (abs(shown[y, x] - grey[y, x] * DIMMED) <= 0.5).all()


def test_lines_part_the_tokens_where_there_is_room():
    black = Image.new("RGB", (40, 30))
    lined = np.asarray(kept_overlay(black, (3, 4), np.arange(12)))[..., 0]
    assert set(np.flatnonzero(lined[5])) == {10, 20, 30} and set(np.flatnonzero(lined[:, 5])) == {10, 20}
    assert 0 < lined.max() < 128
    small = SMALLEST_SQUARE - 1
    assert not np.asarray(kept_overlay(Image.new("RGB", (3 * small, 3 * small)), (3, 3), np.arange(9))).any()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_pictures_of_any_mode_and_the_given_one_stays_as_it_was(mode):
    image = picture(20, 20, mode)
    before = image.tobytes()
    shown = kept_overlay(image, (2, 2), np.array([0]))
    assert shown.mode == "RGB" and shown.size == image.size and image.tobytes() == before


def test_tokens_outside_the_grid_are_refused():
    for kept in ([4], [-1], [0, 7]):
        with pytest.raises(ValueError, match="2 x 2"):
            kept_overlay(picture(8, 8), (2, 2), np.array(kept))
