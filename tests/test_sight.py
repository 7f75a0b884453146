"""What a model sees of a picture is known from its sides, and a picture that is made smaller before stays the same to it."""

import numpy as np
import pytest
from hostile_images import encoded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from searching import examples
from test_qwen_images import BUILDERS
from transformers import BatchFeature

from vismoe.app.costs import KEPT_BYTES, picture_cost
from vismoe.engine.engine import demo_model
from vismoe.errors import InputError
from vismoe.models.inputs.image_sizes import area_look, most_reduction
from vismoe.models.inputs.images import look_at, open_image
from vismoe.models.inputs.processor import load_processor
from vismoe.models.inputs.qwen_images import QwenImages, asked_size

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


# -- Qwen's families, as the server asks before it decodes: what is seen against what is built
FAMILIES = ["demo", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe"]  # the two in the middle resize once more
LIMIT = st.integers(1, 300 * 32 * 32)
PART = st.one_of(
    st.just({}),
    st.fixed_dictionaries({}, optional={"min_pixels": LIMIT, "max_pixels": LIMIT}),
    st.fixed_dictionaries({"resized_height": st.integers(1, 500), "resized_width": st.integers(1, 500)}),
)
TOKENS = st.none() | st.tuples(st.integers(1, 90), st.integers(1, 300)).map(sorted).map(tuple)


def built(builder, image: Image.Image, part: dict, tokens: tuple[int, int] | None):
    asked = [{"role": "user", "content": [{"type": "image", "image": image, **part}]}]
    return builder.build(asked, lambda image: image, tokens)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(20))
@given(width=st.integers(1, 700), height=st.integers(1, 700), part=PART, tokens=TOKENS)
@example(width=560, height=28, part={"max_pixels": 4000}, tokens=None)
@example(width=100, height=100, part={"min_pixels": 784, "max_pixels": 784}, tokens=None)  # below the checkpoint's least
@example(width=100, height=100, part={"min_pixels": 28 * 28, "max_pixels": 28 * 28}, tokens=(40, 80))
def test_what_is_seen_of_a_picture_is_what_a_prompt_is_built_of(family, width, height, part, tokens):
    builder = BUILDERS[family]
    try:
        prompt = built(builder, Image.new("RGB", (width, height)), part, tokens)
    except InputError:
        with pytest.raises(InputError, match="Fix"):
            asked_size(part)
            assert builder.look(tokens, part)(width, height).tokens
        return
    seen = builder.look(tokens, part)(width, height)
    _, high, wide = prompt.inputs["image_grid_thw"][0].tolist()
    patch = builder.processor.image_processor.patch_size
    assert seen.tokens == prompt.visual_tokens == high * wide // 4
    assert seen.pixels >= high * wide * patch**2
    if not (QwenImages.of(builder.processor).again and tokens is None):
        assert (seen.width, seen.height) == (wide * patch, high * patch)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(15))
@given(
    width=st.integers(200, 1600), height=st.integers(200, 1600), part=PART, tokens=TOKENS,
    turned=st.integers(1, 8), kind=st.sampled_from(["PNG", "JPEG"]),
)  # fmt: skip
@example(width=1600, height=400, part={"resized_height": 64, "resized_width": 512}, tokens=None, turned=6, kind="JPEG")
def test_a_picture_that_is_turned_upright_is_never_made_smaller_than_it_is_seen(
    family, width, height, part, tokens, turned, kind
):
    """As the server does: the sides that the file has decide by how much it is reduced, and then it is turned."""
    builder, exif = BUILDERS[family], Image.Exif()
    exif[0x0112] = turned
    data = encoded(Image.new("RGB", (width, height), "teal"), kind, exif=exif)
    header, whole = look_at(data, 10**9), open_image(data)
    try:
        asked_size(part)
        cost = picture_cost(header, builder.look(tokens, part))
        wanted = built(builder, whole, part, tokens)
    except InputError:
        return
    small, seen = open_image(data, 10**9, cost.reduce), builder.look(tokens, part)(*whole.size)
    assert cost.reduce == 1 or (small.width >= seen.width and small.height >= seen.height)
    found = built(builder, small, part, tokens)
    assert found.visual_tokens == wanted.visual_tokens == cost.tokens
    assert found.inputs["image_grid_thw"].tolist() == wanted.inputs["image_grid_thw"].tolist()
    assert small.width * small.height * KEPT_BYTES <= cost.kept
