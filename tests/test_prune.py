"""Dropping visual tokens in Qwen3-VL-MoE: conversations, batches, beams, chunks, caches, against prune_reference.py.

Tiny random models in float32. A conversation is a list of turns, a turn one forward pass over sequences of text and images; then
follow greedy steps. Positions are given (the text's), so that a turn means the same with and without what was dropped before.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from family_zoo import zoo
from packaging.version import Version
from PIL import Image
from prune_reference import unseen
from tiny_models import IMAGE_TOKEN
from transformers import AttentionInterface, AutoModelForImageTextToText, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

import vismoe
from vismoe import VisMoEConfig
from vismoe.engine.engine import demo_model
from vismoe.errors import InputError, UnsupportedModelError
from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.inputs.processor import load_processor
from vismoe.models.visual import prune
from vismoe.models.visual.encoded import EncodedImage, share_out
from vismoe.models.visual.kept_rows import KeptRows
from vismoe.models.visual.prune import VisualPruner
from vismoe.trace.files import Trace, TraceWriter
from vismoe.types import TokenKind
from vismoe.vision.selection import Pruning, Selection

STEPS = 3
pytestmark = pytest.mark.usefixtures("one_thread")
HALF = Pruning(0.5, "affinity")
Turn = dict[str, torch.Tensor]


def build(attention: str = "sdpa") -> Any:
    model = tiny_models.build("qwen3_vl_moe")
    model.config.text_config.sliding_window = None  # as every real one
    model.set_attn_implementation({"text_config": attention})
    return model


def pruner_of(model: Any, prune_layer: int = 1) -> VisualPruner:
    pruner = VisualPruner.of(model, prune_layer)
    assert isinstance(pruner, VisualPruner), pruner
    return pruner


def turn(*rows: Sequence[Any], seed: int = 0) -> Turn:
    """Inputs for sequences of stretches: a number of text tokens, or (rows, columns) of an image's tokens; left-padded."""
    generator = torch.Generator().manual_seed(seed)
    sequences, grids = [], []
    for row in rows:
        parts = []
        for part in row:
            if isinstance(part, int):
                parts.append(torch.randint(5, 490, (part,), generator=generator))
            else:
                parts.append(torch.full((part[0] * part[1],), IMAGE_TOKEN))
                grids.append((1, 2 * part[0], 2 * part[1]))
        sequences.append(torch.cat(parts))
    longest = max(map(len, sequences))
    ids = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in sequences])
    lengths = torch.tensor([len(ids) for ids in sequences])
    inputs = dict(input_ids=ids, attention_mask=(torch.arange(longest) >= longest - lengths[:, None]).long())
    inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    if grids:
        patches = sum(rows * columns for _, rows, columns in grids)
        inputs |= dict(pixel_values=torch.randn(patches, 3 * 2 * 16**2, generator=generator), image_grid_thw=torch.tensor(grids))
    return inputs


def converse(model: Any, turns: list[Turn], steps: int = STEPS, cache: Any = None) -> list[torch.Tensor]:
    """Logits of every turn `[B, S, vocabulary]` and of every greedy step `[B, 1, vocabulary]`."""
    cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
    logits, mask, past = [], torch.empty(len(turns[0]["input_ids"]), 0, dtype=torch.long), 0
    for number in range(len(turns) + steps):
        ids = turns[number]["input_ids"] if number < len(turns) else logits[-1][:, -1:].argmax(-1)
        inputs = dict(turns[number]) if number < len(turns) else dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        mask = torch.cat([mask, inputs["attention_mask"]], dim=1)
        positions = torch.arange(past, past + ids.shape[1]).expand(3, len(ids), -1)
        inputs |= dict(attention_mask=mask, position_ids=positions, **{CACHE: cache})
        logits.append(model(**inputs).logits)
        past += ids.shape[1]
    return logits


class Told:
    """What a pruner says that it keeps, pass by pass."""

    def __init__(self, pruner: VisualPruner):
        self.passes: list[np.ndarray] = []
        tell = pruner.on_pruned
        pruner.on_pruned = lambda kept: self.passes.append(kept) or (tell and tell(kept))

    def rows(self, turns: list[Turn]) -> list[torch.Tensor]:
        """Per turn which of its tokens are kept, bool `[B, S]`."""
        told, kept = iter(self.passes), []
        for inputs in turns:
            keep = inputs["attention_mask"].bool()
            if "pixel_values" in inputs:
                keep = torch.zeros(keep.numel(), dtype=torch.bool)
                flat = next(told)
                keep[flat[flat >= 0]] = True
            kept.append(keep.view(inputs["input_ids"].shape))
        assert next(told, None) is None
        return kept


CONVERSATIONS = {
    "one image": [turn([4, (2, 3), 5])],
    "two images, one after the other": [turn([3, (2, 3), (2, 2), 4])],
    "images of different sizes in a padded batch": [turn([2, (2, 3), 3], [1, (4, 4), 1, (1, 3), 2], [9])],
    "a batch of one length that keeps different numbers": [turn([2, (2, 3), 3], [1, (4, 2), 2])],
    "different numbers, then as many": [
        turn([2, (2, 3), 3], [1, (4, 2), 2]),
        turn([1, (2, 2), 2], [2, (2, 2), 1], seed=1),
    ],
    "text, then an image": [turn([6]), turn([2, (2, 3), 3], seed=1)],
    "an image, then text": [turn([2, (2, 3), 3]), turn([5], seed=1)],
    "an image, then an image": [turn([2, (2, 3), 3]), turn([1, (3, 3), 2], seed=1)],
    "a batch, then images": [turn([2, (2, 3), 3], [1, (4, 4), 1]), turn([4, (2, 2), 1], [1, (3, 3), 2], seed=1)],
}


def attention_of_flat_masks(module, query, key, value, attention_mask, **options):
    """As flash attention: causal from the end, a mask `[B, keys]` of what is padding; slow, and on any machine."""
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(len(query), 1, -1, -1)
    if attention_mask is not None:
        assert attention_mask.shape == (len(query), keys)
        seen = seen & attention_mask.bool()[:, None, None]
    return sdpa_attention_forward(module, query, key, value, seen, **options)


AttentionInterface.register("flat masks", attention_of_flat_masks)
AttentionMaskInterface.register("flat masks", flash_attention_mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flat masks", OUR_ATTENTION])
@pytest.mark.parametrize("prune_layer", [1, 2])
@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_kept_tokens_compute_what_they_would_if_nobody_saw_the_rest(turns, prune_layer, attention):
    """Deepstack features join after layers 0 and 1: with prune_layer 1, kept rows of them must follow."""
    model = build(attention)
    pruner = pruner_of(model, prune_layer)
    told, pruner.pruning = Told(pruner), HALF
    actual = converse(model, turns)
    pruner.remove()
    kept = told.rows(turns)
    hidden = ~torch.cat(kept, dim=1) & torch.cat([inputs["attention_mask"].bool() for inputs in turns], dim=1)
    assert hidden.any()
    model.set_attn_implementation({"text_config": "eager" if attention == "eager" else "sdpa"})
    with unseen(model.model.language_model, model.model.language_model.layers, prune_layer, hidden):
        expected = converse(model, turns)
    for got, wanted, keep in zip(actual, expected, kept, strict=False):
        for one, other, places in zip(got, wanted, keep, strict=True):
            torch.testing.assert_close(one[-int(places.sum()) :], other[places], rtol=0, atol=1e-5)
    for got, wanted in zip(actual[len(turns) :], expected[len(turns) :], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_nothing_happens_without_pruning_and_to_text(monkeypatch):
    model, pictures, text = build(), CONVERSATIONS["an image, then text"], [turn([3], [5])]
    expected = [converse(model, turns) for turns in (pictures, text)]
    pruner = pruner_of(model)
    pruner.on_pruned = lambda kept: pytest.fail("nothing is to be dropped")
    caches = [DynamicCache() for _ in range(3)]
    for pruning, turns, cache, logits in (
        (None, pictures, caches[0], expected[0]),
        (Pruning(keep=1.0), pictures, caches[1], expected[0]),
        (HALF, text, caches[2], expected[1]),
    ):
        pruner.pruning = pruning
        assert all(map(torch.equal, converse(model, turns, cache=cache), logits))
        assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"} and not pruner.kept


def test_a_family_that_marks_visual_tokens_needs_no_ids():
    model, inputs = build(), turn([2, (2, 3), 3], [1, (3, 3), 1])
    pruner = pruner_of(model)
    pruner.pruning, inputs["position_ids"] = HALF, torch.arange(11).expand(3, 2, -1)
    expected = model(**inputs).logits
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert expected.shape[1] < 11 and torch.equal(model(**inputs).logits, expected)


def test_removal_gives_the_model_back():
    def hooks() -> list[int]:
        return [len(module._forward_pre_hooks) for module in model.modules()]

    model = build()
    before, turns = hooks(), CONVERSATIONS["one image"]
    expected = converse(model, turns)
    pruner = pruner_of(model)
    pruner.pruning = HALF
    assert not torch.equal(converse(model, turns)[-1], expected[-1])
    pruner.remove()
    assert hooks() == before and "_deepstack_process" not in vars(model.model.language_model)
    assert all(map(torch.equal, converse(model, turns), expected))


def test_only_passes_with_dropped_tokens_are_listened_to_behind_prune_layer():
    model, turns = build(), CONVERSATIONS["one image"]
    pruner, layers = pruner_of(model), model.model.language_model.layers
    for pruning in (None, HALF, None):
        pruner.pruning = pruning
        converse(model, turns)
        assert [bool(layer._forward_pre_hooks) for layer in layers] == [pruning is HALF and n > 0 for n in range(len(layers))]


def test_the_images_of_a_pass_that_failed_are_not_taken_for_the_next_ones():
    model, first, second = build(), turn([2, (2, 3), 3], seed=1), turn([2, (2, 3), 3], seed=2)
    pruner = pruner_of(model)
    pruner.pruning = HALF
    model(**second)
    expected = pruner.kept[0].selection.kept
    failing = model.model.language_model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**first)
    failing.remove()
    model(**second)
    assert pruner.kept[0].grid == (2, 3) and np.array_equal(pruner.kept[0].selection.kept, expected)


def test_a_cache_that_has_not_come_to_a_layer_has_none():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    assert prune._layer_of(cache, 0) is cache.layers[0]
    assert prune._layer_of(cache, 1) is None and prune._layer_of(None, 0) is None


def test_a_model_has_one_pruner_at_a_time():
    model = build()
    first = pruner_of(model)
    assert "another pruner" in VisualPruner.of(model, 1)
    first.remove()
    pruner_of(model).remove()


def test_images_without_known_places_are_refused():
    model = tiny_models.build("glm4v_moe")
    pruner = pruner_of(model)
    pruner.pruning, inputs = HALF, tiny_models.prompt("glm4v_moe")
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(InputError, match=r"without input_ids .*Fix: call the model with input_ids"):
        model(**inputs)


@pytest.mark.parametrize(
    ("edges", "runs", "fit"),
    [
        ([0, 6, 12], [0, 6, 12], True),
        ([0, 3, 6], [0, 6], True),  # adjacent images
        ([0, 12], [0, 4, 8, 12], True),  # an image whose rows are apart
        ([0, 8, 14, 20], [0, 6, 12, 20], False),  # a video was told before an image, and encoded behind it
        ([0, 4, 12], [0, 6, 12], False),
    ],
)
def test_what_the_tower_saw_fits_runs_of_tokens_or_is_not_believed(edges, runs, fit):
    assert prune._fit(edges, runs) == fit


def test_the_selection_gets_what_the_routers_chose_and_the_tower_found(monkeypatch):
    model, inputs, seen, chosen = build(), turn([2, (2, 3), 3], [1, (4, 4), 1, (2, 2), 2]), [], []
    pruner = pruner_of(model, 2)
    pruner.pruning = HALF
    monkeypatch.setattr(prune, "select", lambda *args: seen.append(args) or Selection(np.arange(2)))
    for layer in model.model.language_model.layers[:2]:
        layer.mlp.gate.register_forward_hook(lambda gate, args, result: chosen.append(result[2]))
    model(**inputs)
    places = [(row, place) for row, place in (inputs["input_ids"] == IMAGE_TOKEN).nonzero().tolist()]
    width, experts = inputs["input_ids"].shape[1], model.config.text_config.num_experts
    active = np.concatenate([args[2] for args in seen])
    assert [len(args[1]) for args in seen] == [6, 16, 4] and all(args[3] == 2 * experts for args in seen)
    for (row, place), addresses in zip(places, active, strict=True):
        assert set(addresses) == {layer * experts + int(e) for layer in (0, 1) for e in chosen[layer][row * width + place]}
    assert all(abs(float(args[1].sum()) - 1 / 4) < 1e-5 for args in seen), "attention received, mean over a token's four patches"
    assert [(kept.row, kept.start, kept.grid, kept.tokens) for kept in pruner.kept] == [
        (0, width - 9, (2, 3), 6),
        (1, width - 23, (4, 4), 16),
        (1, width - 6, (2, 2), 4),
    ]


def test_merged_tokens_become_the_average_of_those_that_join_them(monkeypatch):
    model, inputs, states = build(), turn([2, (2, 3), 3]), []
    pruner = pruner_of(model, 2)
    # Behind the pruner's own hook, which comes before any other.
    model.model.language_model.layers[2].register_forward_pre_hook(lambda layer, args: states.append(args[0][0]))
    into = np.array([1, -1, 1, 1, 2, -1])
    monkeypatch.setattr(prune, "select", lambda *args: Selection(np.array([1, 2, 4]), merged_into=into))
    pruner.pruning = Pruning(keep=0.5, selection="visionzip")
    model(**inputs)
    pruner.remove()
    model(**inputs)
    narrow, whole = states
    expected = torch.cat([whole[:2], whole[3:4], whole[[2, 4, 5]].mean(0, keepdim=True), whole[6:7], whole[8:]])
    torch.testing.assert_close(narrow, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_beams_drafts_and_running_without_a_cache_choose_the_same_tokens(rows):
    model = build()
    stretches = [[2, (2, 3), 3], [1, (4, 4), 2]][:rows]
    inputs = turn(*stretches)
    image = inputs["input_ids"] == IMAGE_TOKEN
    before = image.roll(-1, 1) & ~image
    inputs["input_ids"][before] = model.config.vision_start_token_id  # older releases count images by it
    pruner = pruner_of(model)
    pruner.pruning = HALF
    greedy = tiny_models.greedy(model, inputs, 5).sequences
    kept = [image.selection.kept.tolist() for image in pruner.kept]
    uncached = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(greedy, uncached)
    assert [image.selection.kept.tolist() for image in pruner.kept] == kept
    if rows == 1:
        drafted = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2)
        assert torch.equal(greedy, drafted)
    one = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=3)
    beams = [image.selection.kept.tolist() for image in pruner.kept]
    assert beams == [of_row for of_row in kept for _ in range(3)] and one.shape == greedy.shape


def test_cropping_and_going_on_is_as_if_the_rest_had_never_been():
    model, first = build(), turn([2, (2, 3), 3], [1, (4, 4), 2])
    pruner = pruner_of(model)
    pruner.pruning = HALF
    cache, untouched = DynamicCache(), DynamicCache()
    converse(model, [first], steps=0, cache=untouched)
    converse(model, [first], steps=4, cache=cache)
    cache.crop(-4)
    ids, mask = torch.tensor([[7], [8]]), torch.cat([first["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
    positions = torch.full((3, 2, 1), first["input_ids"].shape[1])
    results = [
        model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: which}).logits for which in (cache, untouched)
    ]
    assert torch.equal(*results)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23.dev0"), reason="chunked prefill of images is broken there")
def test_a_chunked_prefill_keeps_the_same_tokens_and_never_cuts_an_image():
    model, inputs = build(), turn([2, (2, 3), 4, (2, 2), 3])
    pruner = pruner_of(model)
    pruner.pruning = HALF
    whole = tiny_models.greedy(model, inputs, 4)
    kept = [(image.start, image.grid, image.selection.kept.tolist()) for image in pruner.kept]
    assert [start for start, *_ in kept] == [2, 12]
    for chunk in (10, 12):
        pruner.begin_request()
        chunked = tiny_models.greedy(model, {**inputs, "prefill_chunk_size": chunk}, 4)
        assert [(image.start, image.grid, image.selection.kept.tolist()) for image in pruner.kept] == kept
        assert torch.equal(whole.sequences, chunked.sequences)
        torch.testing.assert_close(torch.stack(whole.logits), torch.stack(chunked.logits), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"ends at token 5.*Fix: use a larger prefill_chunk_size"):
        tiny_models.greedy(model, {**inputs, "prefill_chunk_size": 5}, 4)


def test_what_cannot_be_pruned_is_refused():
    model, inputs = build(), turn([2, (2, 3), 3])
    assert "prune_layer=0" in VisualPruner.of(model, 0) and "prune_layer=3" in VisualPruner.of(model, 3)
    assert "no image tokens" in VisualPruner.of(tiny_models.build("qwen3_moe"), 1)
    pruner = pruner_of(model)
    pruner.pruning = HALF
    with pytest.raises(UnsupportedModelError, match=r"StaticCache .*Fix: generate with the default cache"):
        model(**inputs, **{CACHE: StaticCache(config=model.config.text_config, max_cache_len=32)})
    config, gemma = tiny_models.build("gemma4").config, zoo()["gemma4"].model_class
    config.text_config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    sliding = gemma(config).eval()
    pruner_of(sliding).pruning = HALF
    with pytest.raises(InputError, match="more than the 32 of this model's sliding window"):
        tiny_models.greedy(sliding, tiny_models.prompt("gemma4", 27), 3)
    config.text_config.num_kv_shared_layers = 1
    assert "decoder layer 2 has no plain cache" in VisualPruner.of(gemma(config), 1)


@pytest.mark.parametrize(("family", "kind"), [("qwen3_5_moe", "linear_attention"), ("lfm2_vl + lfm2_moe", "conv")])
def test_a_layer_with_a_running_state_sees_kept_tokens_only_and_is_no_place_to_begin(family, kind):
    """The reference hands the linear layer the kept rows alone and puts its output back between the others."""
    config = tiny_models.build(family).config
    config.text_config.layer_types = ["full_attention", kind, "full_attention", kind]
    config.text_config.num_hidden_layers = 4
    torch.manual_seed(0)
    model = zoo()[family].model_class(config).eval()
    decoder, inputs = model.model.language_model, tiny_models.prompt(family)
    pruner = pruner_of(model)
    assert pruner.prune_layer == 2, "layer 1 has no cache"
    told, pruner.pruning = Told(pruner), HALF
    actual = tiny_models.greedy(model, inputs, 4)
    [kept] = told.rows([inputs])
    with pytest.raises(UnsupportedModelError, match="one sequence at a time"):
        two = tiny_models.prompt(family, batch=2)
        two["attention_mask"][0, :2] = 0
        model(**two)
    pruner.remove()
    linear, forward = decoder.layers[3], decoder.layers[3].forward

    def on_kept_rows(hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        if hidden.shape[1] == 1:
            return forward(hidden, **arguments)
        out = hidden.clone()
        out[kept] = forward(hidden[kept][None], **{**arguments, "attention_mask": None})
        return out

    linear.forward = on_kept_rows
    full = torch.nn.ModuleList([decoder.layers[2]])
    with unseen(decoder, full, 0, ~kept):
        expected = tiny_models.greedy(model, inputs, 4)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def paged(tmp_path_factory):
    """(a model with experts in two slabs, its runtime, the same model with experts of transformers, and a pruner of that one)."""
    folder = tiny_models.save("qwen3_vl_moe", tmp_path_factory.mktemp("paged"))
    settings = VisMoEConfig(memory="12%", context=256, prune_layer=1)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    assert vismoe.runtime_of(model).plan.slabs == (2,)
    plain = tiny_models.reference(folder)
    return model, vismoe.runtime_of(model), plain, pruner_of(plain)


@pytest.mark.parametrize("rows", [1, 2])
def test_paging_experts_changes_nothing(paged, rows):
    model, runtime, plain, pruner = paged
    inputs = turn(*[[2, (2, 3), 3], [1, (3, 3), 1]][:rows])
    runtime.pruner.pruning = pruner.pruning = HALF
    expected, actual = (tiny_models.greedy(which, inputs, 4) for which in (plain, model))
    assert torch.equal(expected.sequences, actual.sequences)
    for one, other in zip(pruner.kept, runtime.pruner.kept, strict=True):
        assert one.selection.kept.tolist() == other.selection.kept.tolist() and one.grid == other.grid
    for one, other in zip(expected.logits, actual.logits, strict=True):  # pad slots share products of plain experts
        assert torch.equal(one, other) if rows == 1 else torch.allclose(one, other, rtol=0, atol=1e-5)
    runtime.pager.check_integrity()


def test_deeper_layers_demand_and_record_kept_tokens_only(paged, tmp_path, monkeypatch):
    model, runtime, _, _ = paged
    inputs = turn([2, (2, 3), 3], [1, (4, 4), 2], [4])
    runtime.pruner.pruning = HALF
    chosen, demanded = {}, {}
    for number, layer in enumerate(model.model.language_model.layers):

        def route(gate: Any, args: Any, result: Any, number: int = number) -> Any:
            """Expert 5 is for pad slots, and nobody else's."""
            index = result[2].clamp(max=4)
            if runtime.context.step.kept is not None:
                index[runtime.context.step.kept < 0] = 5
            chosen[number] = index.numpy()
            return *result[:2], index

        monkeypatch.setattr(layer.mlp.gate, "_forward_hooks", OrderedDict())
        layer.mlp.gate.register_forward_hook(route)
    demand = runtime.pager.demand
    monkeypatch.setattr(runtime.pager, "demand", lambda layer, *args: demanded.update({layer: args[0]}) or demand(layer, *args))
    with TraceWriter(tmp_path / "trace", runtime.store.inventory) as writer:
        runtime.context.record_to(writer)
        told = Told(runtime.pruner)
        model(**inputs)
        runtime.context.record_to(None)
    [flat], [step] = told.passes, Trace.open(tmp_path / "trace")
    real = flat >= 0
    assert not real.all() and real.sum() == (2 + 3 + 3) + (1 + 8 + 2) + 4
    assert [routing.kept is None for routing in step.layers] == [True, False, False]
    for routing in step.layers[1:]:
        assert routing.kept.tolist() == flat[real].tolist()
        assert np.array_equal(routing.expert_ids, chosen[routing.layer][real])
        assert demanded[routing.layer] == sorted(set(chosen[routing.layer][real].ravel().tolist()))
    assert runtime.context.step.kinds.tolist() == np.where(real, step.kinds.ravel()[flat], TokenKind.PAD).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_demo_model_does_as_the_reference_does(attention):
    model = AutoModelForImageTextToText.from_pretrained(
        demo_model(), dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    )
    picture = Image.open(demo_model().parent / "images" / "wide.png").convert("RGB")
    question = [{"type": "image"}, {"type": "text", "text": "what is at the top ?"}]
    processor = load_processor(str(demo_model()))
    text = processor.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    pruner = pruner_of(model, 3)
    told, pruner.pruning = Told(pruner), Pruning(keep=0.4)
    actual = tiny_models.greedy(model, inputs, 6)
    pruner.remove()
    [kept] = told.rows([inputs])
    [image] = pruner.kept
    assert 0 < image.selection.coverage <= 1 and image.grid == (8, 12) and (~kept).sum() == 96 - 38
    with unseen(model.model.language_model, model.model.language_model.layers, 3, ~kept):
        expected = tiny_models.greedy(model, inputs, 6)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-5, atol=2e-5)


def test_images_are_shared_out_to_rows():
    a, b, c = EncodedImage(6), EncodedImage(4), EncodedImage(2)
    assert share_out([10], [a, b, c]) == [[a, b]], "the third one comes in a later chunk"
    assert share_out([6, 0, 6], [a, b, c]) == [[a], [], [b, c]]
    assert share_out([10, 10, 2, 2], [a, b, c]) == [[a, b], [a, b], [c], [c]], "beams repeat rows"
    assert share_out([6, 4], [a, b, c]) is None, "several rows use all images up"
    assert share_out([7], [a, b]) is None and share_out([6], []) is None


@pytest.mark.parametrize("given", ["none", "bool", "additive"])
def test_a_mask_shows_kept_tokens_to_those_that_saw_them_and_a_pad_slot_only_itself(given):
    """Sequences of 3 earlier and 4 new tokens; of the first, tokens 1, 3, 6 are left, of the second 0, 2, 3, 4, 6."""
    cached, rows = torch.tensor([[-1, 1], [0, 2]]), torch.tensor([[-1, 0, 3], [0, 1, 3]])
    kept = KeptRows((2, 4), 3, rows, cached, padded=True, flat=False)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()[3:].expand(2, 1, -1, -1).clone()
    if given != "none":
        seen[0, 0, 3, 1] = False  # something beside causality
    masks = {"none": None, "bool": seen, "additive": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)}
    mask = kept.mask(masks[given])
    mask = mask if mask.dtype == torch.bool else mask == 0
    slots = [[-1, 1, -1, 3, 6], [0, 2, 3, 4, 6]]
    for row in range(2):
        for query, place in enumerate([rows[row, i].item() for i in range(3)]):
            own = [slot == 2 + query for slot in range(5)]
            looks = [slot >= 0 and bool(seen[row, 0, place, slot]) for slot in slots[row]]
            assert mask[row, 0, query].tolist() == (own if place < 0 else looks)
