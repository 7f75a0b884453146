"""Heavy hitters: attention received against float64 arithmetic and against the weights of each family's own eager attention.

For every family: which MoE layers are listened to, or why none is. For some of each kind: listening changes no bit of the model's
output and leaves nothing behind; batches with padding, chunks on top of a cache, sliding windows, layers that see kept tokens.
"""

import re
import sys

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from family_zoo import families, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from tiny_models import OVERRIDES
from transformers import DynamicCache, StaticCache

from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.family.families import expert_modules
from vismoe.models.load.live_memory import META, LiveMemory
from vismoe.models.moe import attended
from vismoe.models.moe.adapters import adapt
from vismoe.models.moe.attended import attention_received, last_real
from vismoe.models.moe.attention import group_queries
from vismoe.models.moe.heavy_hitters import QUERIES, HeavyHitters, hitters_bytes
from vismoe.models.visual.prune import VisualPruner
from vismoe.types import MoELayer
from vismoe.vision.selection import Pruning

pytestmark = pytest.mark.usefixtures("one_thread")
PARTLY = {  # MoE layers whose decoder layer attends, that take the nearest one before them, and that have none
    "granitemoehybrid": (1, 1, 1),
    "lara_mini": (2, 0, 1),
    "lfm2_moe": (1, 1, 0),
    "minimax": (1, 2, 0),
    "nemotron_h": (0, 1, 1),
    "qwen3_5_moe": (2, 0, 1),
    "qwen3_next": (2, 0, 1),
    "qwen4_exp": (2, 0, 1),
}
REFUSED = {"deepseek_v4": "summaries of several tokens"}
HEARD = (
    "afmoe",  # the mask by its name
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # asks for the name of the implementation, and masks by it
    "gpt_oss",  # eager, with sinks and sliding windows
    "inkling_mm_model",  # a bias of positions
    "minimax_m3_vl",  # a mask for every head
    "nemotron_h",  # attention and experts in layers of their own
    "qwen3_moe",
    "qwen3_next",  # linear attention
    *(["inkling2"] if Version(transformers.__version__) >= Version("5.23") else []),  # sinks of its own
)


# -- arithmetic
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.integers(1, 2000), st.integers(0, 2**16),
    st.booleans(), st.sampled_from([None, "head", "query"]),
)  # fmt: skip
def test_received_is_the_mean_over_heads_and_over_the_queries_that_see(
    key_heads, groups, new, past, at_once_bytes, seed, biased, sunk
):
    heads, keys, generator = key_heads * groups, past + new, torch.Generator().manual_seed(seed)
    queries = int(torch.randint(1, new + 1, (1,), generator=generator))
    query, key = (torch.randn(n, rows, 4, generator=generator) for n, rows in ((heads, queries), (key_heads, keys)))
    shared = int(torch.randint(0, 2, (1,), generator=generator))
    allowed = torch.rand(1 if shared else heads, queries, keys, generator=generator) < 0.7
    bias = torch.randn(heads, queries, keys, generator=generator) if biased else None
    sinks = torch.randn(heads, queries if sunk == "query" else 1, 1, generator=generator) if sunk else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attended, "SCORES_BYTES", at_once_bytes)
        received = attention_received(query, key, allowed, new, bias, sinks)
    weights, seen = np.zeros((heads, queries, keys)), allowed.expand(heads, -1, -1).numpy()
    for head, asking in np.ndindex(heads, queries):
        products = key[head // groups].double().numpy() @ query[head, asking].double().numpy()
        products = np.exp(products + (0 if bias is None else bias[head, asking].double().numpy()))
        nothing = 0 if sinks is None else np.exp(float(sinks.expand(-1, queries, -1)[head, asking, 0]))
        if seen[head, asking].any():
            weights[head, asking] = products * seen[head, asking] / ((products * seen[head, asking]).sum() + nothing)
    expected = by_definition(weights, seen, np.arange(queries), new)
    assert received.dtype == torch.float32
    np.testing.assert_allclose(received.numpy(), expected, rtol=1e-4, atol=1e-6)


def by_definition(weights, seen, asking, new):
    """Of one sequence: weights and who sees whom [heads, queries, keys], which queries count: float64 [new]."""
    received = np.zeros(new)
    for place in range(new):
        column = weights.shape[2] - new + place
        weight = sum(weights[:, query, column].mean() for query in asking)
        received[place] = weight / max(1, sum(seen[:, query, column].mean() for query in asking))
    return received


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(1, 5))
def test_the_last_real_queries_ask(real, most):
    assert [rows.tolist() for rows in last_real(np.array(real), most)] == [
        [place for place in range(4) if row[place]][-most:] for row in real
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [100, 3000, 300000])
def test_memory_is_what_was_said(dtype, tokens):
    query, key = (torch.empty(1, heads, tokens, 64, dtype=dtype, device=META) for heads in (16, 4))
    mask = torch.empty(1, 1, tokens, tokens, dtype=dtype, device=META)
    model = tiny_models.build("qwen3_moe").to(dtype)
    model.config.update(dict(num_attention_heads=16, head_dim=64))
    hitters = HeavyHitters.of(model, layers_of(model))
    with LiveMemory() as memory:
        hitters.hear("", query, key, mask, True, {})
    said = hitters_bytes(model, tokens)
    assert 0.5 * said < memory.peak_bytes <= said
    assert said <= 1.6 * max(attended.SCORES_BYTES, 16 * 4 * tokens) + 64 * tokens * 16 + 2**20


# -- families
def layers_of(model):
    return tuple(MoELayer(index, path, module.num_experts, 2, 0) for index, (path, module) in enumerate(expert_modules(model)))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_which_layers_are_heard(family):
    with torch.device("meta"):
        model = families()[family].model_class(tiny_config(family, OVERRIDES.get(family, {})))
        adapt(model)
    layers = tuple(layer for layer in layers_of(model) if "vision_tower" not in layer.path)
    hitters = HeavyHitters.of(model, layers_of(model))
    if family in REFUSED:
        assert isinstance(hitters, str) and REFUSED[family] in hitters
        return
    own, near, none = PARTLY.get(family, (len(layers), 0, 0))
    source = f"attention received from the last 64 queries in {own} of {len(layers)} MoE layers"
    source += f"; {near} use the attention of the nearest layer before them" if near else ""
    assert hitters.source == source + (f"; the first {none} have no such layer" if none else "")


class Eager(dict):
    """By module and call: weights [B, heads, S, n] and who may see whom, as the family's own eager attention has them."""

    def __init__(self, model, monkeypatch):
        self.names = {module: name for name, module in model.named_modules()}
        for file in {sys.modules[type(module).__module__] for module in model.modules() if hasattr(module, "config")}:
            if hasattr(file, "eager_attention_forward"):
                monkeypatch.setattr(file, "eager_attention_forward", self.remembering(file.eager_attention_forward))

    def remembering(self, own):
        def eager(module, query, key, value, *args, **options):
            out, weights = own(module, query, key, value, *args, **options)
            mask = args[0] if args else options["attention_mask"]
            seen = torch.ones_like(weights) if mask is None else mask.expand(weights.shape) > -1e30
            if hasattr(module, "layer_idx"):  # it attends to tokens, not to outputs of earlier layers
                self[self.names[module]] = weights.double().numpy(), seen.numpy()
            return out, weights

        return eager

    def received(self, path, real):
        """By the definition, for the experts at `path`, of the nearest attention up to their layer: float64 [B * S], or None."""
        stack, place = re.match(r"(.*?layers)\.(\d+)\.", path).groups()
        places = {int(name[len(stack) + 1 :].split(".")[0]): name for name in self if name.startswith(f"{stack}.")}
        before = [name for own, name in sorted(places.items()) if own <= int(place)]
        if not before:
            return None
        rows = []
        for weights, seen, own in zip(*self[before[-1]], real, strict=True):
            rows.append(by_definition(weights, seen, np.flatnonzero(own)[-QUERIES:], own.size) * own)
        return np.concatenate(rows)


def heard(model, hitters, run):
    """What `run` returns, and what was received when each MoE layer's experts ran."""
    received = {}
    hooks = [
        module.register_forward_pre_hook(lambda *_, layer=layer: received.update({layer: hitters.received(layer)}))
        for layer, (_, module) in enumerate(expert_modules(model))
    ]
    result = run()
    for hook in hooks:
        hook.remove()
    return result, [received[layer] for layer in sorted(received)]


def agree(model, received, eager, real):
    assert len(received) == len(layers_of(model)) and any(values is not None for values in received)
    for layer, values in zip(layers_of(model), received, strict=True):
        expected = eager.received(layer.path, real)
        assert (values is None) == (expected is None)
        if values is not None:
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def attributes(model):
    return [(name, key, id(value)) for name, module in model.named_modules() for key, value in vars(module).items()]


def padded(family, tokens=80):
    """A batch of two, one of them with padding on the left; (inputs, which tokens are real)."""
    inputs = tiny_models.prompt(family, tokens, batch=2)
    inputs["attention_mask"][0, :3] = 0
    return inputs, inputs["attention_mask"].numpy() > 0


@pytest.mark.parametrize("family", HEARD)
def test_a_padded_batch_is_heard_and_no_bit_changes(monkeypatch, family):
    model = tiny_models.build(family)
    inputs, real = padded(family)
    alone, before = model(**inputs)[0], attributes(model)
    hitters = HeavyHitters.of(model, layers_of(model))
    assert attributes(model) == before
    hitters.begin(real.reshape(-1))
    assert attributes(model) != before
    listening, received = heard(model, hitters, lambda: model(**inputs)[0])
    hitters.end()
    assert attributes(model) == before
    assert torch.equal(listening, alone) and torch.equal(model(**inputs)[0], alone)
    model.set_attn_implementation("eager")
    eager = Eager(model, monkeypatch)
    model(**inputs)
    agree(model, received, eager, real)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_chunk_on_top_of_a_cache_is_heard(monkeypatch, family, padding):
    model = tiny_models.build(family)
    inputs, _ = padded(family, 110)
    ids, mask = inputs["input_ids"], torch.ones_like(inputs["input_ids"])
    mask[0, :padding] = 0
    hitters = HeavyHitters.of(model, layers_of(model))

    def chunks(first, listen):
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :first], attention_mask=mask[:, :first], **{CACHE: cache})
        if listen:
            hitters.begin(mask[:, first:].numpy().reshape(-1) > 0)
        return model(input_ids=ids[:, first:], attention_mask=mask, **{CACHE: cache})[0]

    for first in (3, 30, 100):
        logits, received = heard(model, hitters, lambda first=first: chunks(first, True))
        hitters.end()
        assert torch.equal(logits, chunks(first, False))
        with monkeypatch.context() as patch:
            implementation = model.config._attn_implementation
            model.set_attn_implementation("eager")
            eager = Eager(model, patch)
            chunks(first, False)
            model.set_attn_implementation(implementation)
        agree(model, received, eager, mask[:, first:].numpy() > 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [0, 3])
def test_layers_that_see_kept_tokens_only_are_heard(monkeypatch, attention, padding):
    model = tiny_models.build("qwen3_vl_moe")
    model.config.text_config.sliding_window = None
    model.set_attn_implementation({"text_config": attention})
    inputs, _ = padded("qwen3_vl_moe", 90)
    inputs["attention_mask"][0, :padding] = 0
    inputs["attention_mask"][0, padding:3] = 1
    real = inputs["attention_mask"].numpy() > 0
    pruner, hitters = VisualPruner.of(model, 1), HeavyHitters.of(model, layers_of(model))
    pruner.pruning = Pruning(keep=0.5)
    alone = model(**inputs)[0]
    kept = []
    pruner.on_pruned = lambda rows: (kept.append(rows), hitters.narrow(rows))
    hitters.begin(real.reshape(-1))
    logits, received = heard(model, hitters, lambda: model(**inputs)[0])
    assert torch.equal(logits, alone)
    hitters.end()
    pruner.on_pruned = None
    model.set_attn_implementation({"text_config": "eager"})
    eager = Eager(model, monkeypatch)
    model(**inputs)
    left = kept[0].reshape(2, -1) >= 0
    assert left.shape[1] < real.shape[1] and left.all() == (padding == 0)
    for layer, values in zip(layers_of(model), received, strict=True):
        expected = eager.received(layer.path, real if layer.index == 0 else left)
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_what_was_heard_before_follows_the_kept_tokens():
    model = tiny_models.build("lfm2_moe")
    inputs, real = padded("lfm2_moe")
    hitters = HeavyHitters.of(model, layers_of(model))
    hitters.begin(real.reshape(-1))
    _, (own, near) = heard(model, hitters, lambda: model(**inputs))
    assert np.array_equal(own, near)
    kept = np.array([-1, 4, 9, 80, 81, 159], np.int32)
    hitters.narrow(kept)
    assert hitters.received(1).tolist() == [0.0, *own[kept[1:]].tolist()]
    hitters.end()


@pytest.mark.parametrize("grouped_first", [False, True])
def test_grouped_queries_are_heard_whichever_comes_first(monkeypatch, grouped_first):
    model = tiny_models.build("qwen3_moe")
    if grouped_first:
        group_queries(model)
    hitters = HeavyHitters.of(model, layers_of(model))
    if not grouped_first:
        group_queries(model)
    inputs, real = padded("qwen3_moe")
    alone = model(**inputs)[0]
    hitters.begin(real.reshape(-1))
    listening, received = heard(model, hitters, lambda: model(**inputs)[0])
    assert torch.equal(listening, alone)
    hitters.end()
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {OUR_ATTENTION}
    model.set_attn_implementation("eager")
    eager = Eager(model, monkeypatch)
    model(**inputs)
    agree(model, received, eager, real)


def test_a_prompt_without_a_mask_is_heard_and_the_last_pass_is_forgotten():
    model = tiny_models.build("qwen3_moe")
    ids = tiny_models.prompt("qwen3_moe", 80)["input_ids"]
    hitters = HeavyHitters.of(model, layers_of(model))
    hitters.begin(np.ones(80, bool))
    _, masked = heard(model, hitters, lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids)))
    hitters.begin()
    assert hitters.received(2) is None
    _, without = heard(model, hitters, lambda: model(input_ids=ids))
    assert all(np.array_equal(one, other) and one.all() for one, other in zip(masked, without, strict=True))
    assert hitters.received(2) is not None and hitters.received(1) is None  # what counts is the latest attention
    hitters.begin(np.ones(79, bool))  # of another pass
    _, other = heard(model, hitters, lambda: model(input_ids=ids))
    assert other == [None] * 3
    hitters.end()


def test_free_slots_of_a_cache_behind_the_new_tokens():
    model = tiny_models.build("qwen3_moe")
    ids = tiny_models.prompt("qwen3_moe", 20)["input_ids"]
    hitters = HeavyHitters.of(model, layers_of(model))
    hitters.begin()
    _, without = heard(model, hitters, lambda: model(input_ids=ids))
    cache = StaticCache(config=model.config, max_cache_len=64)
    _, with_slots = heard(model, hitters, lambda: model(input_ids=ids, **{CACHE: cache}))
    assert all(np.array_equal(one, other) for one, other in zip(without, with_slots, strict=True))
    hitters.begin()
    _, later = heard(model, hitters, lambda: model(input_ids=ids, **{CACHE: cache}))
    assert [values is None for values in later] == [True] * 3  # where the new tokens lie is not known
    hitters.end()


def test_two_models_are_heard_at_the_same_time():
    models = [tiny_models.build("qwen3_moe", seed) for seed in (0, 1)]
    ids = tiny_models.prompt("qwen3_moe", 20)["input_ids"]
    both = [HeavyHitters.of(model, layers_of(model)) for model in models]
    before, alone = [attributes(model) for model in models], []
    for model, hitters in zip(models, both, strict=True):
        hitters.begin()
        alone.append(heard(model, hitters, lambda model=model: model(input_ids=ids))[1])
        hitters.end()
    for hitters in both:
        hitters.begin()
    together = [
        heard(model, hitters, lambda model=model: model(input_ids=ids))[1] for model, hitters in zip(models, both, strict=True)
    ]
    both[0].end()
    assert attributes(models[0]) == before[0] and attributes(models[1]) != before[1]
    both[1].end()
    assert attributes(models[1]) == before[1]
    assert np.array_equal(np.array(together), np.array(alone)) and not np.array_equal(together[0], together[1])


def test_attention_that_keeps_its_masks_to_itself_is_refused():
    model = tiny_models.build("qwen3_moe")
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in HeavyHitters.of(model, layers_of(model))
