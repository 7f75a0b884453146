"""What a model sees of a picture is known from its sides, and a picture that is made smaller before stays the same to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import BatchFeature

from vismoe.engine import demo_model
from vismoe.models.processor import load_processor
from vismoe.models.qwen_images import area_look
from vismoe.models.sight import most_reduction

PROCESSOR = load_processor(demo_model()).image_processor
SIDES = st.integers(8, 9000)
LIMITS = st.none() | st.tuples(st.integers(1, 64), st.integers(64, 2048)).map(
    lambda tokens: {"shortest_edge": 1024 * tokens[0], "longest_edge": 1024 * tokens[1]}
)


def made(image: Image.Image, limits: dict | None) -> BatchFeature:
    return PROCESSOR(images=[image], return_tensors="pt", **({"size": limits} if limits else {}))


@settings(max_examples=12)
@given(width=st.integers(30, 700), height=st.integers(30, 700), limits=LIMITS)
def test_it_is_what_the_processor_makes(width, height, limits):
    seen = area_look(PROCESSOR, limits)(width, height)
    _, high, wide = made(Image.new("RGB", (width, height)), limits)["image_grid_thw"][0].tolist()
    assert (seen.width, seen.height, seen.tokens) == (16 * wide, 16 * high, wide * high // 4)


@given(width=SIDES, height=SIDES, limits=LIMITS)
def test_what_is_left_is_as_large_as_what_is_seen_and_seen_the_same(width, height, limits):
    factor, seen = most_reduction(area_look(PROCESSOR, limits), width, height), area_look(PROCESSOR, limits)(width, height)
    less_wide, less_high = -(-width // factor), -(-height // factor)
    assert area_look(PROCESSOR, limits)(less_wide, less_high) == seen
    if factor > 1:
        assert less_wide >= seen.width and less_high >= seen.height
    if seen is not None and max(width / seen.width, height / seen.height) < 2:
        assert factor == 1, "a picture that is about as large as what is seen of it stays as it is"


def test_a_flat_picture_looks_the_same_however_it_was_made_smaller():
    factor = most_reduction(area_look(PROCESSOR), 4000, 3000)
    whole, small = Image.new("RGB", (4000, 3000), "teal"), Image.new("RGB", (4000 // factor, 3000 // factor), "teal")
    assert factor == 4 and np.allclose(made(whole, None)["pixel_values"], made(small, None)["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("processor", [None, object()])
def test_a_processor_of_another_kind_is_not_guessed_at(processor):
    assert area_look(processor)(100, 100) is None and most_reduction(area_look(processor), 10_000, 10_000) == 1
