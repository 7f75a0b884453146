"""Images that were encoded already: a model that gets them from the cache computes the same, bit for bit, in every family."""

import pytest
import tiny_models
import torch
import transformers
from models_page import KEEPS_ALL
from packaging.version import Version

from vismoe.models.image_cache import ImageCache
from vismoe.models.prune import VisualPruner
from vismoe.vision.selection import Pruning

pytestmark = pytest.mark.usefixtures("one_thread")
WHOLE = {"aria", "llama4", "inkling_mm_model"}  # what their towers give does not come apart by images: always encoded anew
if Version(transformers.__version__) < Version("5.18"):
    WHOLE.add("minimax_m3_vl")
FAMILIES = [family for family in tiny_models.WITH_IMAGES if family != "diffusion_gemma"]


def logits(model, inputs):
    return torch.stack(tiny_models.greedy(model, inputs, 2).logits)


def never(numbers):
    raise AssertionError(f"images {numbers} were asked for")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_encoded_once_and_nothing_else_changes(family):
    model, inputs = tiny_models.build(family), tiny_models.prompt(family)
    wanted = logits(model, inputs)
    cache = ImageCache.of(model, 10**9, None)
    for times in (1, 2, 3):
        cache.expect(["a"], never)
        assert torch.equal(logits(model, inputs), wanted)
        assert cache.encoded == (times if family in WHOLE else 1)
    assert torch.equal(logits(model, inputs), wanted), "a call that nobody announced"
    cache.remove()
    assert "get_image_features" not in vars(model.base_model) and torch.equal(logits(model, inputs), wanted)


def two_images():
    """(inputs of two rows with an image each; a function that gives the image inputs of some of them)."""
    inputs = tiny_models.prompt("qwen3_vl_moe", batch=2)
    patches = len(inputs["pixel_values"]) // 2

    def some(numbers):
        rows = torch.cat([torch.arange(number * patches, (number + 1) * patches) for number in numbers])
        return {"pixel_values": inputs["pixel_values"][rows], "image_grid_thw": inputs["image_grid_thw"][numbers]}

    return inputs, some


def test_only_what_is_new_goes_through_the_tower():
    model, (inputs, some) = tiny_models.build("qwen3_vl_moe"), two_images()
    wanted = logits(model, inputs)
    cache, patches = ImageCache.of(model, 10**9, None), []
    model.base_model.visual.register_forward_pre_hook(lambda module, args, kwargs: patches.append(len(args[0])), with_kwargs=True)
    one = {name: value[:1] for name, value in inputs.items() if name not in some([0])} | some([0])
    cache.expect(["first"], never)
    logits(model, one)
    cache.expect(["first", "second"], some)
    torch.testing.assert_close(logits(model, inputs), wanted, rtol=0, atol=1e-5)
    cache.expect(["second", "first"], never)
    swapped = {**inputs, **some([1, 0])}
    both = logits(model, swapped)
    assert cache.encoded == 2 and patches == [len(inputs["pixel_values"]) // 2] * 2
    cache.remove()
    torch.testing.assert_close(both, logits(model, swapped), rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KEEPS_ALL and family not in WHOLE])
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
