"""An image is encoded by itself and kept: whatever its company, and whichever images were known, it has the same bits."""

import functools
import inspect

import pytest
import tiny_models
import torch
from family_zoo import composites, own
from models_page import KEEPS_ALL
from searching import SEARCHING

from vismoe.models.visual.image_cache import ImageCache
from vismoe.models.visual.prune import VisualPruner
from vismoe.vision.selection import Pruning

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = [family for family in (*tiny_models.WITH_IMAGES, *composites(), *own()) if family != "diffusion_gemma"]


def logits(model, inputs):
    return torch.stack(tiny_models.greedy(model, inputs, 2).logits)


def never(numbers):
    raise AssertionError(f"images {numbers} were asked for")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_encoded_once_and_nothing_else_changes(family):
    model, inputs = tiny_models.build(family), tiny_models.prompt(family)
    wanted = logits(model, inputs)
    cache = ImageCache.of(model, 10**9, None)
    for _ in range(3):
        cache.expect(["a"], never)
        assert torch.equal(logits(model, inputs), wanted)
        assert cache.encoded == 1
    assert torch.equal(logits(model, inputs), wanted), "a call that nobody announced"
    cache.remove()
    assert "get_image_features" not in vars(model.base_model) and torch.equal(logits(model, inputs), wanted)


TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def two_images(family):
    """(inputs of two rows with an image each, which differ; a function that gives the image inputs of some of them)."""
    inputs = tiny_models.prompt(family, batch=2)
    images = {name: value for name, value in inputs.items() if name not in TOKENS}
    half = len(inputs["pixel_values"]) // 2
    inputs["pixel_values"] = inputs["pixel_values"].clone()
    inputs["pixel_values"][half:] = inputs["pixel_values"][half:].flip(-1) * 0.7

    def some(numbers):
        parts = {name: (inputs[name] if name == "pixel_values" else value).chunk(2) for name, value in images.items()}
        return {name: torch.cat([halves[number] for number in numbers]) for name, halves in parts.items()}

    return inputs, some


@pytest.mark.parametrize("family", FAMILIES if SEARCHING else FAMILIES[::2])
def test_an_images_features_do_not_depend_on_its_company_nor_on_what_was_known(family):
    """Two images in every order, each known or not: the features of each alone."""
    model, (inputs, some) = tiny_models.build(family), two_images(family)
    inner, calls = model.base_model, []
    parameters = list(inspect.signature(inner.get_image_features).parameters)

    @functools.wraps(inner.get_image_features)
    def noted(*args, _features=inner.get_image_features, **kwargs):
        calls.append((args, kwargs))
        return _features(*args, **kwargs)

    inner.get_image_features = noted
    logits(model, inputs)
    inner.__dict__.pop("get_image_features")
    (args, kwargs), *_ = calls
    cache = ImageCache.of(model, 10**9, None)

    def features(names):
        numbers = ["ab".index(name) for name in names]
        cache.expect(list(names), lambda wanted: some([numbers[number] for number in wanted]))
        given = some(numbers)
        positional = (given.get(name, value) for name, value in zip(parameters, args, strict=False))
        with torch.no_grad():
            output = inner.get_image_features(*positional, **{name: given.get(name, value) for name, value in kwargs.items()})
        return next(output[name] for name in ("pooler_output", "last_hidden_state") if output.get(name) is not None)

    def by_image(value, images):
        return value.chunk(images) if isinstance(value, torch.Tensor) else value

    for known in ("", "a", "b"):
        alone = {}
        for name in "ab":
            cache.clear()
            (alone[name],) = by_image(features(name), 1)
        for asked in ("ab", "ba", "aa"):
            cache.clear()
            for name in known:
                features(name)
            for name, found in zip(asked, by_image(features(asked), 2), strict=True):
                assert torch.equal(found.reshape(alone[name].shape), alone[name]), (known, asked, name)


@pytest.mark.parametrize("family", FAMILIES if SEARCHING else FAMILIES[1::2])
def test_logits_do_not_depend_on_which_images_were_known(family):
    model, (inputs, some) = tiny_models.build(family), two_images(family)
    cache, found = ImageCache.of(model, 10**9, None), []
    for known in ([], [0], [1], [0, 1]):
        cache.clear()
        for number in known:  # in a request of its own
            row = {name: value[number : number + 1] for name, value in inputs.items() if name in TOKENS}
            cache.expect(["ab"[number]], never)
            logits(model, row | some([number]))
        encoded = cache.encoded
        cache.expect(["a", "b"], some)
        found.append(logits(model, inputs))
        assert cache.encoded - encoded == 2 - len(known)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_the_bound_holds_and_the_least_used_image_goes_first():
    model, inputs = tiny_models.build("qwen3_vl_moe"), tiny_models.prompt("qwen3_vl_moe")
    cache = ImageCache.of(model, 10**9, None)
    cache.expect(["a"], never)
    logits(model, inputs)
    size = cache.nbytes
    assert size > 0
    cache.most_bytes = 2 * size + 1
    for name in ("b", "a", "c", "a", "b"):
        cache.expect([name], never)
        logits(model, inputs)
        assert cache.nbytes <= cache.most_bytes
    assert cache.encoded == 4, "b made room for c, and c for b; a was always there"
    cache.most_bytes = size - 1
    for _ in range(2):
        cache.expect(["d"], never)
        logits(model, inputs)
    assert cache.encoded == 6 and cache.nbytes == 2 * size, "what can never be kept makes nobody go"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KEEPS_ALL])
def test_a_pruner_hears_of_an_image_what_the_tower_told_when_it_was_encoded(family):
    model, inputs = tiny_models.build(family), tiny_models.prompt(family)
    pruner = VisualPruner.of(model, 1)
    if isinstance(pruner, str):  # only with VisMoE's adapter
        return
    cache = ImageCache.of(model, 10**9, pruner.images)

    def kept(listening):
        pruner.pruning = Pruning(keep=0.5, selection="saliency") if listening else None
        pruner.begin_request()
        cache.expect(["a"], never)
        return logits(model, inputs), [(image.grid, image.selection.kept.tolist()) for image in pruner.kept]

    kept(listening=False)
    first = kept(listening=True)
    assert cache.encoded == 2, "nobody had listened"
    again = kept(listening=True)
    assert cache.encoded == 2 and torch.equal(first[0], again[0]) and first[1] == again[1] != []
