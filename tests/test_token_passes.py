"""Passes of one token straight through a model: the bits that transformers' code gives, and where that runs."""

import copy
import gc
import inspect
import weakref
from functools import partial

import pytest
import tiny_models
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from test_decoder_layers import serve
from test_resident import FAMILY, Twin, assert_same, load
from torch import nn
from torch.nn.modules import module as everywhere

from vismoe.formats.encodings import ENCODINGS
from vismoe.kernels import cpu, rows
from vismoe.kernels.decoder_layer import Ending, LayerChain, RowNorm, Weight
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.moe import straight_layers
from vismoe.models.moe.token_passes import TokenPasses, serve_token_passes
from vismoe.models.visual import growing_cache
from vismoe.models.visual.growing_cache import GrowingLayer, grow_in_place, release_room
from vismoe.timeline import Timeline
from vismoe.types import Format

pytestmark = pytest.mark.skipif(cpu.available() == ("portable",), reason="this processor has no attention kernel")


@pytest.fixture
def straight(monkeypatch) -> list[bool]:
    """For each pass of a served model whether transformers' code between the modules was left out."""
    passes, run, watched = [], TokenPasses.run, TokenPasses._watched

    def watch(*given):
        passes[-1] = None
        return watched(*given)

    def note(*given):
        passes.append(True)
        made = run(*given)
        passes[-1] = passes[-1] is not None and made is not None
        return made

    monkeypatch.setattr(TokenPasses, "run", note)
    monkeypatch.setattr(TokenPasses, "_watched", watch)
    return passes


def next_token(model, cache, token: int, **given):
    given = {"position_ids": torch.tensor([[cache.get_seq_length()]]), CACHE: cache} | given
    return model(torch.tensor([[token]]), use_cache=True, **given)


# ------------------------------------------------------------------ with paged experts
def served_twins(folder, family: str = FAMILY, **more) -> tuple[Twin, Twin]:
    """One whose passes go straight where they may, and one whose never do."""
    tiny_models.without_windows(tiny_models.save(family, folder, dtype=torch.bfloat16))
    settings = {"memory": "100%", "lookahead": "none", "context": 600} | more
    return tuple(Twin(folder, True, True, straight, **settings) for straight in (True, False))


@pytest.fixture(scope="module", params=[("100%", "none"), ("60%", "none"), ("60%", "gate")], ids="-".join)
def twins(request, tmp_path_factory) -> tuple[Twin, Twin]:
    memory, lookahead = request.param
    return served_twins(tmp_path_factory.mktemp("token-passes"), memory=memory, lookahead=lookahead)


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(1, 2), st.integers(1, 12), st.lists(st.sampled_from([1, 1, 1, 1, 4]), max_size=12), st.integers(0, 2**31))
def test_logits_and_counters_are_those_of_transformers_code(twins, batch, tokens, steps, seed):
    prompts = torch.randint(3, 500, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    ours, theirs = twins
    assert all(map(torch.equal, ours.passes(prompts, steps), theirs.passes(prompts, steps)))
    if ours.context.lookahead_inputs.lookahead is None:  # guesses are made as long as they win time, which differs
        assert_same(ours.state(), theirs.state())


def test_passes_go_straight_once_one_was_watched(twins, straight):
    ours, theirs = twins
    ours.passes(torch.arange(3, 60)[None], [1] * 5)
    assert straight == [False, False, False, True, True, True]  # a prompt, one that makes room, one that is watched
    assert "none of transformers' code" in ours.runtime.backends["layers"]
    straight.clear()
    theirs.passes(torch.arange(3, 60)[None], [1] * 5)
    assert not straight


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe", "glm4v_moe", "granitemoe", "olmoe"])
def test_what_generate_answers_with_a_picture_or_without_one(tmp_path, family, straight):
    ours, theirs = served_twins(tmp_path, family)
    inputs = tiny_models.prompt(family, dtype=torch.bfloat16)
    answers = [tiny_models.greedy(twin.model, inputs, 9) for twin in (ours, theirs)]
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert all(map(torch.equal, answers[0].logits, answers[1].logits))
    assert_same(ours.state(), theirs.state())
    assert straight == [False, False] + [True] * 7  # a prompt, and one that is watched


def test_generate_knows_the_arguments_of_a_served_model(tmp_path):
    ours, theirs = served_twins(tmp_path)
    assert inspect.signature(ours.model.forward) == inspect.signature(theirs.model.forward)
    with pytest.raises(ValueError, match="no_such_argument"):
        ours.model.generate(torch.arange(3, 9)[None], max_new_tokens=2, no_such_argument=1)


@torch.inference_mode()
def test_two_sequences_by_turns_and_one_that_parts(tmp_path, straight):
    ours, theirs = served_twins(tmp_path)
    logits = []
    for twin in (ours, theirs):
        caches = [cache_in(twin.model(prompt[None], use_cache=True)) for prompt in (torch.arange(3, 30), torch.arange(40, 60))]
        of_twin = []
        for step in range(8):
            if step == 5:
                caches.append(copy.deepcopy(caches[0]))
            for cache in caches:
                of_twin.append(next_token(twin.model, cache, 7 + step).logits)
        logits.append(of_twin)
    assert all(map(torch.equal, *logits)) and straight.count(True) >= 13


def with_memory_of_its_own(layer):
    layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def back_by_two(cache):
    cache.crop(-2)


def all_anew(cache):
    for layer in cache.layers:
        with_memory_of_its_own(layer)


def one_anew(cache):
    with_memory_of_its_own(cache.layers[1])


def in_memory_that_is_full(cache):
    release_room(cache)


def with_other_numbers(cache):
    cache.layers[2].keys[:, :, 0].zero_()


@pytest.mark.parametrize("move", [back_by_two, all_anew, one_anew, in_memory_that_is_full, with_other_numbers])
@torch.inference_mode()
def test_keys_and_values_are_read_where_they_lie(twins, move, straight, monkeypatch):
    monkeypatch.setattr(growing_cache, "GROWTH_TOKENS", 5)  # room is made for so many at a time
    logits = []
    for twin in twins:
        cache = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
        of_twin = []
        for step in range(24):
            if step in (9, 17):
                move(cache)
                gc.collect()
            of_twin.append(next_token(twin.model, cache, 7 + step).logits)
        logits.append(of_twin)
    assert all(map(torch.equal, *logits)) and straight.count(True) >= 18


def test_passes_with_misses_in_and_out_of_inference_mode(tmp_path, straight):
    twins = served_twins(tmp_path, memory="60%")
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        logits = []
        for twin in twins:
            with mode():
                cache = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
                logits.append([next_token(twin.model, cache, 7 + step).logits for step in range(8)])
        assert all(map(torch.equal, *logits))
    assert straight.count(True) >= 15 and twins[0].pager.metrics.snapshot().total("misses") > 0


@torch.inference_mode()
def test_a_cache_holds_nothing_of_experts_that_no_longer_serve(tmp_path, straight):
    ours, _ = served_twins(tmp_path)
    cache = cache_in(ours.model(torch.arange(3, 30)[None], use_cache=True))
    for step in range(5):
        next_token(ours.model, cache, 7 + step)
    pool = weakref.ref(ours.pager.tables[0].pool)
    ours.context._short = ours.pager = None
    ours.context.stop_serving()
    gc.collect()
    assert straight[-1] and cache is not None and pool() is None


@torch.inference_mode()
def test_an_interrupted_pass_is_computed_again(tmp_path, monkeypatch):
    logits, own = [], GrowingLayer.one_more
    for twin in served_twins(tmp_path):
        cache = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
        of_twin = [next_token(twin.model, cache, 7 + step).logits for step in range(5)]
        for place in (0, 1):  # the layer whose token is not counted any more
            layers = list(cache.layers)

            def interrupted(layer, after=layers[place]):
                if layer is after:
                    raise KeyboardInterrupt
                own(layer)

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(GrowingLayer, "one_more", interrupted)
                next_token(twin.model, cache, 20)
            for layer in layers[:place]:  # what a caller does who goes on: to the tokens before
                layer.crop(-1)
            of_twin += [next_token(twin.model, cache, 20 + step).logits for step in range(4)]
        logits.append(of_twin)
    assert all(map(torch.equal, *logits))


@torch.inference_mode()
def test_more_sequences_by_turns_than_chains_are_kept(twins, monkeypatch):
    monkeypatch.setattr(straight_layers, "MOST_CHAINS", 2)
    logits = []
    for twin in twins:
        caches = [cache_in(twin.model(torch.arange(3, 30 + n)[None], use_cache=True)) for n in range(3)]
        logits.append([next_token(twin.model, cache, 7 + step).logits for step in range(6) for cache in caches])
    assert all(map(torch.equal, *logits)) and len(twins[0].context._short.chains) <= 2


@torch.inference_mode()
def test_a_timeline_hears_of_every_layer(tmp_path, straight):
    ours, theirs = served_twins(tmp_path)
    for twin in (ours, theirs):
        twin.passes(torch.arange(3, 30)[None], [1] * 5)
        twin.pager.timeline = Timeline()
        twin.passes(torch.arange(3, 30)[None], [1] * 5)
    heard = [sum(span.name == "layer 1" for span in twin.pager.timeline.spans) for twin in (ours, theirs)]
    assert straight[-1] and heard[0] == heard[1] > 5


def test_a_model_ends_with_its_last_reference(tmp_path, straight):
    tiny_models.save(FAMILY, tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path)
    inputs = tiny_models.prompt(FAMILY)
    answer = tiny_models.greedy(model, inputs, 6)
    held = [weakref.ref(model), weakref.ref(model.model.norm.weight)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [found() for found in held] == [None, None]
    finally:
        gc.enable()
    assert straight.count(True) == 4 and cache_in(answer) is not None


# ------------------------------------------------------------------ when transformers' code runs
class Pair:
    """The same model with passes that go straight and without, behind the same tokens."""

    def __init__(self, family: str = "qwen2_moe"):
        self.models = [tiny_models.build(family).to(torch.bfloat16).eval() for _ in range(2)]
        for model in self.models:
            serve(model)
            for module in model.modules():  # experts compute as they do without a pager
                module.__dict__.pop("_vismoe_layer", None)
        assert serve_token_passes(self.models[0])
        self.caches = []
        for model in self.models:
            self.caches.append(cache_in(model(torch.arange(3, 11)[None], use_cache=True)))
            grow_in_place(self.caches[-1], 64)

    def passes(self, count: int = 3, **given) -> list[list]:
        return [
            [next_token(model, cache, 5 + n, **given) for n in range(count)] for model, cache in zip(self.models, self.caches)
        ]

    def assert_same(self, count: int = 3, **given) -> None:
        for ours, theirs in zip(*self.passes(count, **given), strict=True):
            assert type(ours) is type(theirs)
            ours, theirs = (out if isinstance(out, tuple) else out.to_tuple() for out in (ours, theirs))
            tensors = [[part for part in out if isinstance(part, torch.Tensor)] for out in (ours, theirs)]
            assert tensors[0] and all(map(torch.equal, *tensors))
        assert self.caches[0].get_seq_length() == self.caches[1].get_seq_length()


@pytest.fixture
def pair(straight):
    with torch.no_grad():
        pair = Pair()
        pair.assert_same(4)
        assert straight == [False, False, True, True, True]
        straight.clear()
        yield pair


def hear(heard, module, *given):
    heard.append(module)


PLACES = ["model", "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.1", "model.layers.1.mlp"]
PLACES += ["model.layers.1.self_attn.k_proj", "model.layers.2.mlp.experts"]


@pytest.mark.parametrize("place", PLACES)
def test_a_listener_hears_every_pass(pair, place, straight):
    for before in (True, False):
        heard = []
        for model in pair.models:
            module = model.get_submodule(place)
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            model.hook = register(partial(hear, heard))
        pair.assert_same()
        assert len(heard) == 6 and [any(heard[n] is one for one in pair.models[n // 3].modules()) for n in range(6)] == [True] * 6
        for model in pair.models:
            model.hook.remove()
        assert not any(straight) or place.endswith((".mlp", ".experts"))  # which are called, as a shared expert is there
        straight.clear()
        pair.assert_same()
        assert straight == [True] * 3
        straight.clear()


def test_a_listener_to_all_modules_hears_every_pass(pair):
    heard = []
    hook = everywhere.register_module_forward_hook(partial(hear, heard))
    pair.assert_same()
    hook.remove()
    ours = sum(any(module is one for one in pair.models[0].modules()) for module in heard)
    assert 2 * ours == len(heard) > 6 * 20


def with_another_head(model):
    model.lm_head = nn.Linear(64, 512, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.lm_head.weight, 0.01)


def with_a_forward_of_its_own(model):
    norm = model.model.norm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)


def with_a_decoder_of_its_own(model):
    decoder, own = model.model, model.model.forward

    def forward(**given):
        out = own(**given)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    decoder.forward = forward


def with_an_adapted_layer(model):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x, **given):
            return self.base(x * 2, **given)

    model.model.layers[1] = Adapted(model.model.layers[1])


def with_a_layer_less(model):
    model.model.layers = model.model.layers[:2]


def with_another_order(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def with_other_embeddings(model):
    model.model.embed_tokens = nn.Embedding.from_pretrained(model.model.embed_tokens.weight * 2)


def with_a_changed_weight(model):
    model.model.norm.weight.data = model.model.norm.weight * 2


CHANGES = [with_another_head, with_a_forward_of_its_own, with_a_decoder_of_its_own, with_an_adapted_layer, with_a_layer_less]
CHANGES += [with_another_order, with_other_embeddings, with_a_changed_weight]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_takes_effect_at_once(pair, change, straight):
    (before, *_), _ = pair.passes(1)
    straight.clear()
    for model in pair.models:
        change(model)
    pair.assert_same()
    assert any(straight) == (change is with_a_changed_weight)
    (after, *_), _ = pair.passes(1)
    assert not torch.equal(before.logits, after.logits)


def test_a_model_that_changes_what_the_modules_make_is_never_passed_straight(straight):
    class Scaled(transformers.Qwen2MoeModel):
        def forward(self, **given):
            out = super().forward(**given)
            out.last_hidden_state = out.last_hidden_state * 2
            return out

    with torch.inference_mode():
        pair = Pair()
        for model in pair.models:
            model.model.__class__ = Scaled
        pair.assert_same(5)
    assert not any(straight)


OPTIONS = {
    "hidden states": {"output_hidden_states": True},
    "router logits": {"output_router_logits": True},
    "no dictionary": {"return_dict": False},
    "some logits": {"logits_to_keep": 1},
    "other positions": {"position_ids": torch.tensor([[40]])},
    "no positions": {"position_ids": None},
    "a list": {"unknown": [torch.ones(2)]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_other_arguments_are_understood(pair, option, straight):
    pair.assert_same(2, **OPTIONS[option])
    assert any(straight) == (option == "other positions")
    pair.assert_same(2)


@pytest.mark.parametrize("setting", ["output_hidden_states", "output_router_logits"])
def test_a_setting_of_the_model_is_followed_at_once(pair, setting, straight):
    for model in pair.models:
        setattr(model.config, setting, True)
    pair.assert_same(2)
    assert not any(straight)
    ours, theirs = (out[-1] for out in pair.passes(1))
    assert ours.keys() == theirs.keys() > {"logits", CACHE}


PLACED = [torch.tensor([[40]]), torch.tensor([[[40]]]), torch.full((3, 1, 1), 40), torch.full((4, 1, 1), 40), None]


@pytest.mark.parametrize("first", range(4))
@torch.inference_mode()
def test_positions_of_other_kinds_than_those_watched(tmp_path_factory, first, straight):
    """Of a model that has positions of text, time, height and width, behind a prompt with a picture."""
    family, logits = "qwen3_vl_moe", []
    inputs = tiny_models.prompt(family, dtype=torch.bfloat16)
    for twin in served_twins(tmp_path_factory.mktemp("positions"), family):
        cache, of_twin = cache_in(twin.model(**inputs, use_cache=True)), []
        for positions in [PLACED[first]] * 4 + PLACED + [PLACED[first]] * 2:
            of_twin.append(next_token(twin.model, cache, 7, position_ids=positions).logits)
        logits.append(of_twin)
    assert all(map(torch.equal, *logits)) and straight[-2:] == [True, True] and straight.count(True) >= 5


@pytest.mark.parametrize("hidden", [True, False])
def test_a_mask_that_hides_a_token(pair, hidden, straight):
    for _ in range(2):
        mask = torch.ones(1, int(pair.caches[0].get_seq_length()) + 1, dtype=torch.long)
        mask[:, 2] = not hidden
        pair.assert_same(1, attention_mask=mask)
    assert straight == [not hidden] * 2


def test_transformers_code_runs_where_gradients_are_recorded(pair, straight):
    with torch.enable_grad():
        pair.assert_same(1)
    assert straight == [False]


def test_more_tokens_than_there_is_room_for(straight):
    with torch.inference_mode():
        pair = Pair()
        pair.assert_same(70)  # of 64
    assert straight.count(True) > 40 and straight[-1] is False


# ------------------------------------------------------------------ with the norm and the head behind paged experts
@pytest.fixture
def endings(monkeypatch) -> list[bool]:
    """For each call of a chain whether it made logits."""
    made, run = [], LayerChain.run

    def note(*given):
        out = run(*given)
        made.append(out[2] is not None)
        return out

    monkeypatch.setattr(LayerChain, "run", note)
    return made


@pytest.mark.parametrize("memory", ["100%", "60%"])
@torch.inference_mode()
def test_norm_and_head_are_part_of_the_call_where_no_expert_is_missing(tmp_path, memory, straight, endings, monkeypatch):
    heads, own = [], cpu._linear_of
    monkeypatch.setattr(cpu, "_linear_of", lambda x, *given: heads.append(len(x)) or own(x, *given))
    ours, _ = served_twins(tmp_path, memory=memory)
    ours.model(torch.arange(3, 403)[None])  # wants every expert
    cache = cache_in(ours.model(torch.arange(3, 30)[None], use_cache=True))
    held, before, hits = [], [], 0
    for step in range(24):
        heads.clear()
        endings.clear()
        missed = ours.pager.metrics.snapshot().total("misses")
        held.append(next_token(ours.model, cache, 7 + 97 * step % 450).logits)
        before.append(held[-1].clone())
        if step > 2:
            hit = ours.pager.metrics.snapshot().total("misses") == missed
            assert straight[-1] and any(endings) == hit and (hit or heads) and not (hit and heads)
            hits += hit
    assert all(map(torch.equal, held, before))  # logits lie in memory of their own
    assert hits == 21 if memory == "100%" else 0 < hits < 21


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_ending_has_the_bits_of_its_norm_and_its_head(dtype):
    chance, inputs, outputs = torch.Generator().manual_seed(0), 192, 700

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=chance).to(dtype)

    hidden, weight, bias = numbers(1, 1, inputs), numbers(inputs), numbers(outputs)
    normed, raw, q8_0 = rows.norm(hidden, weight, 1e-6, 1.0)[0], {"codes": numbers(outputs, inputs)}, ENCODINGS["q8_0"]
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 34), dtype=torch.uint8, generator=chance)
    blocks[..., :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    encoded = {"codes": blocks.view(outputs, -1)}
    for kind, parts, more, expected in (
        (Format.RAW, raw, None, cpu.linear(normed, raw["codes"])),
        (Format.RAW, raw, bias, cpu.linear(normed, raw["codes"], bias)),
        (q8_0.name, encoded, None, cpu.encoded_linear(normed, q8_0, encoded, inputs)),
    ):
        head = Weight(*cpu.matrix_of(kind, parts, inputs, more), tuple(parts.values()))
        ending = Ending(RowNorm(weight, 1e-6, 1.0, inputs), head, dtype)
        assert torch.equal(ending.logits(hidden)[0], expected)


def with_a_changed_head(model):
    model.lm_head.weight.data = model.lm_head.weight * 2


def with_a_head_changed_in_place(model):
    model.lm_head.weight.mul_(2)


def with_a_bias_behind_the_head(model):
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.lm_head.out_features, dtype=torch.bfloat16))


def with_a_shorter_head(model):
    model.lm_head.weight.data = model.lm_head.weight.data[:-8]


def with_a_norm_of_other_eps(model):
    model.model.norm.variance_epsilon = 1e-4  # which the kernels do not hear of


def with_another_norm(model):
    norm = type(model.model.norm)(len(model.model.norm.weight), 1e-3).to(torch.bfloat16)
    norm.weight.copy_(model.model.norm.weight * 2)
    model.model.norm = norm


def with_a_heard_head(model):
    model.heard = model.lm_head.register_forward_hook(lambda module, given, out: out * 2)


def with_a_head_that_is_heard(model):
    model.heard = model.lm_head.register_forward_hook(lambda module, given, out: out[..., :100])


CHANGES_BEHIND = [with_another_head, with_a_changed_head, with_a_head_changed_in_place, with_a_bias_behind_the_head]
CHANGES_BEHIND += [with_a_shorter_head, with_another_norm, with_a_changed_weight, with_a_heard_head, with_a_forward_of_its_own]


@pytest.mark.parametrize("change", CHANGES_BEHIND)
@torch.inference_mode()
def test_a_change_behind_the_layers_takes_effect_at_once(tmp_path, change, endings):
    logits = []
    for twin in served_twins(tmp_path):
        twin.model(torch.arange(3, 403)[None])  # after which no expert is missing
        cache = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
        of_twin = [next_token(twin.model, cache, 7).logits for _ in range(6)]
        assert endings[:4] == [True] * 4  # of the first twin
        change(twin.model)
        of_twin += [next_token(twin.model, cache, 7).logits for _ in range(6)]
        further = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
        of_twin += [next_token(twin.model, further, 7).logits for _ in range(6)]
        logits.append(of_twin)
    assert all(map(torch.equal, *logits)) and not torch.equal(logits[0][5], logits[0][6])


@pytest.mark.parametrize("change", [with_a_head_that_is_heard, with_a_norm_of_other_eps])
@torch.inference_mode()
def test_what_was_changed_before_the_first_pass(tmp_path, change):
    logits = []
    for twin in served_twins(tmp_path):
        change(twin.model)
        cache = cache_in(twin.model(torch.arange(3, 30)[None], use_cache=True))
        logits.append([next_token(twin.model, cache, 7).logits for _ in range(6)])
    assert all(map(torch.equal, *logits))
