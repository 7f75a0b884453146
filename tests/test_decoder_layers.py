"""Decoder layers of single tokens in one call: the bits, caches and counters that their modules give, and who computes when."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_models
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from test_resident import FAMILY, Twin, assert_same, with_all_experts
from torch import nn
from transformers import DynamicCache

from vismoe.kernels import cpu, decoder_layer
from vismoe.kernels.decoder_layer import MOST_TOKENS, PARTS, Cached
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.moe import linears
from vismoe.models.moe.attention import group_queries
from vismoe.models.moe.decoder_layers import ServedLayer, serve_decoder_layers, served_layers
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.linears import serve_linears
from vismoe.models.moe.norms import serve_norms
from vismoe.models.moe.rotary import serve_rotations
from vismoe.models.moe.routers import serve_routers
from vismoe.models.moe.rows import RowsCache, shared_pass
from vismoe.models.visual import growing_cache
from vismoe.models.visual.growing_cache import GrowingLayer, grow_in_place
from vismoe.models.visual.prune import VisualPruner
from vismoe.models.visual.pruned_cache import PrunedLayer

pytestmark = pytest.mark.skipif(cpu.available() == ("portable",), reason="this processor has no attention kernel")


@pytest.fixture
def ran(monkeypatch) -> list[bool]:
    """For each call of a served layer whether it computed the layer."""
    calls, own = [], ServedLayer.run

    def run(*given):
        made = own(*given)
        calls.append(made is not None)
        return made

    monkeypatch.setattr(ServedLayer, "run", run)
    return calls


# ------------------------------------------------------------------ with paged experts
@pytest.fixture(scope="module", params=[("100%", "none"), ("60%", "none"), ("60%", "gate")], ids="-".join)
def twins(request, tmp_path_factory) -> tuple[Twin, Twin]:
    memory, lookahead = request.param
    folder = tmp_path_factory.mktemp("decoder-layers")
    tiny_models.save(FAMILY, folder, dtype=torch.bfloat16)
    return tuple(Twin(folder, True, whole, memory=memory, lookahead=lookahead, context=600) for whole in (True, False))


@settings(max_examples=examples(6), deadline=None)
@given(
    st.integers(1, 2),
    st.integers(1, 12) | st.integers(120, 140),
    st.lists(st.sampled_from([1, 1, 1, 1, 4, 11]), max_size=12),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_everything_comes_out_as_by_the_modules(twins, batch, tokens, steps, begun, seed):
    prompts = torch.randint(3, 500, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    whole, apart = twins
    for ours, theirs in zip(whole.passes(prompts, steps, begun), apart.passes(prompts, steps, begun), strict=True):
        assert torch.equal(ours, theirs)
    if whole.context.lookahead_inputs.lookahead is None:  # guesses are made as long as they win time, which differs
        assert_same(whole.state(), apart.state())


def test_one_call_computes_the_layers_of_a_token_from_the_first_one_on(twins, ran):
    whole, apart = twins
    layers = list(served_layers(whole.model))
    assert len(layers) == len(whole.pager.inventory.layers) and all(layer.experts is not None for layer in layers)
    assert not list(served_layers(apart.model)) and f"in {len(layers)} decoder" in whole.runtime.backends["layers"]
    whole.passes(torch.arange(3, 60)[None], [1])
    ran.clear()
    whole.passes(torch.arange(3, 60)[None], [1] * 5)
    assert ran == [False] * len(layers) + [True] * 5 * len(layers)  # the prompt has no cache to begin with
    spent = layers[0].native.spent()
    assert spent.keys() == set(PARTS) and spent["norms"][1] == 4 * spent["attention"][1] > 0
    assert all(seconds > 0 for part, (seconds, _, _) in spent.items() if part != "experts")
    assert spent["linears"][2] % sum(weight.held[0].nbytes for weight in layers[0].native._linears) == 0


@torch.inference_mode()
@pytest.mark.parametrize("steps", [[1] * 40, [1, 2] * 20])
def test_a_cache_whose_memory_is_full_gets_more(twins, steps, ran, monkeypatch):
    monkeypatch.setattr(growing_cache, "GROWTH_TOKENS", 7)  # room is made for so many at a time
    logits = [twin.passes(torch.arange(3, 9)[None], steps) for twin in twins]
    assert all(map(torch.equal, *logits))
    layers = len(twins[0].pager.inventory.layers)
    assert ran == [False] * layers + [True] * len(steps) * layers


@torch.inference_mode()
@pytest.mark.parametrize(("tokens", "following"), [(2, 3), (57, 16), (MOST_TOKENS, 1), (MOST_TOKENS + 1, 1)])
def test_one_call_computes_a_layer_of_a_short_prompt(twins, tokens, following, ran, monkeypatch):
    """From its first token on, and behind others, where a mask says that each token sees all before it."""
    served, demands, demand = linears.served(tokens), [], twins[0].pager.demand
    prompt, layers = torch.arange(3, 3 + tokens)[None], len(twins[0].pager.inventory.layers)
    monkeypatch.setattr(twins[0].pager, "demand", lambda layer, *args: demands.append(layer) or demand(layer, *args))
    all_stay = twins[0].pager.tables[0].has_room_for_all
    if all_stay:
        with_all_experts(twins[0])
    for _ in range(2):
        ran.clear()
        demands.clear()
        logits = [twin.passes(prompt, [following, 1, 1], begun=True) for twin in twins]
        assert all(map(torch.equal, *logits))
        of_prompt = [served] * layers if tokens <= MOST_TOKENS else []
        assert ran == of_prompt + [True] * 3 * layers and bool(demands) != all_stay
    assert {layer.native._rooms.room.tokens for layer in served_layers(twins[0].model)} == {(1, 1)}  # a prompt's was given up


@pytest.mark.parametrize("following", [1, 30, MOST_TOKENS + 1])
def test_what_was_read_in_inference_mode_goes_on_outside_of_it(plain, following, ran):
    logits = []
    for served in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not served:
                patch.setattr(ServedLayer, "run", lambda *given: None)
            given = {"use_cache": True, CACHE: begun(plain)}
            with torch.inference_mode():
                plain(torch.arange(3, 23)[None], **given)
            assert {layer.tokens for layer in given[CACHE].layers} == {20}
            with torch.no_grad():
                logits.append(plain(torch.arange(30, 30 + following)[None], **given).logits)
    assert torch.equal(*logits)
    calls = [tokens for tokens in (20, following) if tokens <= MOST_TOKENS]
    assert ran == [linears.served(tokens) for tokens in calls for _ in range(3)]


@torch.inference_mode()
def test_a_prompt_that_shall_not_attend_causally_any_longer_is_the_modules(plain, ran, monkeypatch):
    for layer in plain.model.layers:
        monkeypatch.setattr(layer.self_attn, "is_causal", False)
    plain(torch.arange(3, 9)[None], use_cache=True, **{CACHE: begun(plain)})
    assert len(ran) == 0
    plain(torch.arange(3, 4)[None], use_cache=True, **{CACHE: (cache := begun(plain))})
    plain(torch.arange(3, 4)[None], use_cache=True, **{CACHE: cache})
    assert ran == [False] * 3 + [True] * 3  # one token sees all


@pytest.mark.parametrize("of_prompts", [True, False])
@torch.inference_mode()
def test_prompts_of_modules_that_do_not_attend_as_the_call_are_theirs(plain, of_prompts, monkeypatch):
    """Single tokens would not show it."""
    layer = plain.model.layers[1]
    monkeypatch.setattr(layer.self_attn, "is_causal", of_prompts)
    found = ServedLayer.of(layer)
    assert found is not None and found.of_prompts == of_prompts


def with_others_in_float32(cache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()


def with_half_of_the_columns(cache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., ::2].contiguous(), layer.values[..., ::2].contiguous()


def with_more_heads(cache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(1, 2, 1, 1), layer.values.repeat(1, 2, 1, 1)


@pytest.mark.parametrize("change", [with_others_in_float32, with_half_of_the_columns, with_more_heads])
@pytest.mark.parametrize("with_room", [False, True])
@torch.inference_mode()
def test_a_cache_of_another_model_goes_to_the_modules(plain, change, with_room, ran):
    """They convert it, or refuse it."""
    found = []
    for served in (True, False):
        cache = cache_in(plain(torch.arange(3, 11)[None], use_cache=True))
        change(cache)
        grow_in_place(cache, 64)
        for layer in cache.layers if with_room else ():
            assert layer.make_room(1)
        with pytest.MonkeyPatch.context() as patch:
            if not served:
                patch.setattr(ServedLayer, "run", lambda *given: None)
            try:
                found.append(plain(torch.tensor([[5]]), use_cache=True, **{CACHE: cache}).logits)
            except RuntimeError as error:
                found.append(error)
        assert not any(ran)
    assert type(found[0]) is type(found[1]) and (isinstance(found[0], RuntimeError) or torch.equal(*found))


@torch.inference_mode()
def test_a_token_behind_a_copied_beginning_has_the_bits_of_the_modules(tmp_path):
    """As where all of a prompt but its last token is known."""
    twins, logits = resident_twins(tmp_path), []
    for twin in twins:
        cache, ids = cache_in(twin.model(torch.arange(3, 19)[None], use_cache=True)), torch.tensor([[19]])
        before = [layer.keys.clone() for layer in cache.layers]
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        given = {"position_ids": torch.tensor([[16]]), "use_cache": True, CACHE: other}
        with twin.context.reading_prompt():
            logits.append(twin.model(ids, **given).logits)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before))
        assert {layer.get_seq_length() for layer in other.layers} == {17}
    assert torch.equal(*logits)
    assert_same(twins[0].state(), twins[1].state())


# ------------------------------------------------------------------ several layers in one call
@pytest.fixture
def at_once(monkeypatch) -> list[int]:
    """For each native call how many layers it was for."""
    counts, own = [], decoder_layer._decoder_layers()

    def call(calls, count, *given):
        counts.append(count)
        return own(calls, count, *given)

    monkeypatch.setattr(decoder_layer, "_decoder_layers", lambda: call)
    return counts


def decoder_layers(twin: Twin) -> list[nn.Module]:
    return list(twin.model.model.layers)


def resident_twins(folder, family: str = FAMILY) -> tuple[Twin, Twin]:
    tiny_models.save(family, folder, dtype=torch.bfloat16)
    return tuple(Twin(folder, True, whole, memory="100%", lookahead="none", context=600) for whole in (True, False))


def test_one_call_computes_all_layers_whose_experts_are_resident(twins, at_once):
    whole, _ = twins
    layers = len(decoder_layers(whole))
    whole.passes(torch.arange(3, 60)[None], [1] * 8)
    assert sum(at_once) >= 7 * layers
    assert at_once[-4:] == [layers] * 4 or (whole.pager.tables[0].slab_of < 0).any()


PROMPTS, STEPS = torch.arange(3, 60)[None], [1] * 6


@torch.inference_mode()
def test_layers_behind_which_visual_tokens_may_be_dropped_are_computed_at_once_too(tmp_path, at_once):
    folder = tiny_models.without_windows(tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16))
    whole = Twin(folder, True, True, memory="100%", lookahead="none", context=600)
    assert isinstance(whole.context.pruner, VisualPruner)
    for _ in range(2):  # the first one brings the experts in
        whole.passes(PROMPTS, STEPS)
    assert at_once[-1] == len(list(served_layers(whole.model))) > 1


def doubled(layer, twin):
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))


def doubled_in_place(layer, twin):
    layer.register_forward_hook(lambda module, given, out: out.mul_(2))


def with_other_keys(layer, twin):
    def change(module, given, named):
        if given[0].shape[1] == 1:
            named[CACHE].layers[2].keys[:, :, 0].zero_()

    decoder_layers(twin)[2].register_forward_pre_hook(change, with_kwargs=True)


def with_weights_that_come_and_go(layer, twin):
    weight = decoder_layers(twin)[2].input_layernorm.weight
    kept = weight.detach().clone()

    def brings(value):
        def hook(*given):
            weight.data.copy_(value)

        return hook

    layer.register_forward_hook(brings(kept * 2))
    decoder_layers(twin)[2].register_forward_hook(brings(kept))


def in_a_wrapper(layer, twin):
    own = layer.forward
    layer.forward = lambda hidden_states, **named: own(hidden_states * 2, **named)


def with_a_mask(layer, twin):
    def change(module, given, named):
        if given[0].shape[1] == 1:
            tokens = named[CACHE].get_seq_length(1) + 1
            return given, named | {"attention_mask": torch.zeros(1, 1, 1, tokens, dtype=torch.bfloat16)}
        return None

    layer.register_forward_pre_hook(change, with_kwargs=True)


BETWEEN = (doubled, doubled_in_place, with_other_keys, with_weights_that_come_and_go, in_a_wrapper, with_a_mask)


@pytest.mark.parametrize("change", BETWEEN)
@torch.inference_mode()
def test_a_call_ends_where_something_comes_between_two_layers(tmp_path, change, at_once):
    whole, apart = resident_twins(tmp_path)
    plain = whole.passes(PROMPTS, STEPS)
    assert all(map(torch.equal, plain, apart.passes(PROMPTS, STEPS))) and at_once[-1] == len(decoder_layers(whole))
    for twin in (whole, apart):
        change(decoder_layers(twin)[1], twin)
    logits = [twin.passes(PROMPTS, STEPS) for twin in (whole, apart)]
    assert all(map(torch.equal, *logits)) and (change is with_a_mask) == torch.equal(logits[0][-1], plain[-1])
    assert max(at_once[-4:]) < len(decoder_layers(whole))
    assert_same(whole.state(), apart.state())


@torch.inference_mode()
def test_layers_with_other_angles_are_soon_computed_for_themselves(tmp_path, at_once, ran):
    """Here every third layer turns by angles of its own, and a plain cache does not tell it from the others."""
    whole, apart = resident_twins(tmp_path, "mellum")
    caches = [transformers.DynamicCache() for _ in range(2)]
    for twin, cache in zip((whole, apart), caches):
        twin.model(PROMPTS, use_cache=True, **{CACHE: cache})
        grow_in_place(cache, 100)
    counts = []
    for token in range(3, 13):
        at_once.clear()
        ran.clear()
        both = [twin.model(torch.tensor([[token]]), use_cache=True, **{CACHE: c}) for twin, c in zip((whole, apart), caches)]
        assert torch.equal(both[0].logits, both[1].logits)
        counts.append((sum(at_once), ran.count(True)))
    assert counts[-1][0] == counts[-1][1] > 0 and any(computed > used for computed, used in counts)


@torch.inference_mode()
def test_a_pass_that_ends_early_leaves_no_memory_of_its_request(tmp_path, at_once):
    whole, _ = resident_twins(tmp_path)
    whole.passes(PROMPTS, STEPS)
    out = whole.model(PROMPTS, use_cache=True)
    cache = cache_in(out)
    whole.model(torch.tensor([[5]]), use_cache=True, **{CACHE: cache})
    layer, at_once[:] = decoder_layers(whole)[0].self_attn, []
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:

        def interrupted(*given):
            raise KeyboardInterrupt

        patch.setattr(PagedLayer, "computed_short", interrupted)
        whole.model(torch.tensor([[5]]), use_cache=True, **{CACHE: cache})
    assert at_once == [3] and layer.layer_idx == 0 and cache.get_seq_length() == PROMPTS.shape[1] + 2
    assert cache.layers[1].get_seq_length() == PROMPTS.shape[1] + 1
    held = [weakref.ref(layer._held[0]) for layer in cache.layers]
    del out, cache
    gc.collect()
    assert [found() for found in held] == [None] * 3
    assert all(map(torch.equal, whole.passes(PROMPTS, STEPS), whole.passes(PROMPTS, STEPS)))


@torch.inference_mode()
def test_a_pass_within_a_pass_disturbs_neither(tmp_path, monkeypatch):
    twin, _ = resident_twins(tmp_path)
    inner, due, shortly = [], [], PagedLayer.computed_short
    alone, other = twin.passes(PROMPTS, STEPS), twin.passes(PROMPTS + 9, STEPS)

    def between(self, read):
        shortly(self, read)
        if due:
            due.clear()
            inner.append(twin.passes(PROMPTS + 9, STEPS))

    monkeypatch.setattr(PagedLayer, "computed_short", between)
    out = twin.model(PROMPTS, use_cache=True)
    logits, cache = [out.logits], cache_in(out)
    for _ in STEPS:
        due.append(True)
        logits.append(twin.model(logits[-1][:, -1:].argmax(-1), use_cache=True, **{CACHE: cache}).logits)
    assert all(map(torch.equal, alone, logits)) and len(inner) == len(STEPS)
    assert all(torch.equal(*both) for passes in inner for both in zip(passes, other))


# ------------------------------------------------------------------ families, without paging
def serve(model: nn.Module) -> tuple[int, int]:
    for part in (serve_linears, serve_routers, serve_norms, serve_rotations, group_queries):
        part(model)
    return serve_decoder_layers(model)


def tokens_of(model: nn.Module, prompt: torch.Tensor, steps: int, **given) -> list[torch.Tensor]:
    out = model(prompt, use_cache=True)
    cache, logits = cache_in(out), [out.logits]
    grow_in_place(cache, 64)
    for _ in range(steps):
        logits.append(model(logits[-1][:, -1:].argmax(-1), use_cache=True, **{CACHE: cache}, **given).logits)
    return logits


FAMILIES = {  # layers that one call computes, of 3
    "qwen2_moe": 3,  # biases
    "glm4_moe": 3,  # a part of each head turns; a dense layer
    "minimax_m2": 3,  # norms of all heads of a token
    "granitemoe": 3,
    "exaone_moe": 1,  # and that one's window has a cache of its own
    "olmoe": 3,
    "afmoe": 0,  # four norms
    "qwen3_next": 0,  # a gate behind attention
    "gpt_oss": 0,
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_of_a_family_have_the_bits_of_their_modules(family, ran):
    model = tiny_models.build(family).to(torch.bfloat16).eval()
    served, with_experts = serve(model)
    assert served == FAMILIES[family] and (with_experts > 0) == (family == "olmoe")
    for module in model.modules():  # experts compute as they do without a pager
        module.__dict__.pop("_vismoe_layer", None)
    layers = list(served_layers(model))
    for layer in layers:
        if layer.experts is not None:
            layer.experts.register_forward_pre_hook(lambda *given: None)  # somebody listens: the module is called
    prompt = torch.arange(3, 11)[None]
    ours = tokens_of(model, prompt, 5)
    assert ran.count(True) == (0 if family == "exaone_moe" else 5 * served)
    for module in model.modules():
        if module.__dict__.get("forward") and "ServedLayer" in repr(module.__dict__["forward"]):
            del module.forward
    assert not list(served_layers(model))
    assert all(map(torch.equal, ours, tokens_of(model, prompt, 5)))


# ------------------------------------------------------------------ when the modules compute
def in_training(model):
    model.model.layers[1].train()


def with_eager_attention(model):
    model.set_attn_implementation("eager")


def with_a_listener(model):
    model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda *given: None)


def with_another_weight(model):
    projection = model.model.layers[1].self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight * 2, requires_grad=False)


def with_moved_memory(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight.data = norm.weight * 2


def with_an_adapter(model):
    attention = model.model.layers[1].self_attn

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + x.mean()

    attention.v_proj = Adapted(attention.v_proj)


def with_another_block(model):
    model.model.layers[1].mlp = nn.Identity()


def with_another_forward(model):
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x)


def with_another_scale(model):
    model.model.layers[1].self_attn.scaling = 0.5


def with_a_computed_weight(model):
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    nn.utils.parametrize.register_parametrization(model.model.layers[1].self_attn.k_proj, "weight", Halved())


MORE = (with_another_block, with_another_forward, with_another_scale, with_a_computed_weight)
CHANGES = (*MORE, in_training, with_eager_attention, with_a_listener, with_another_weight, with_moved_memory, with_an_adapter)


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_after_a_change_of_the_modules_these_compute(change, ran):
    model = tiny_models.build("qwen2_moe" if change is not with_a_listener else "qwen3_moe").to(torch.bfloat16).eval()
    assert serve(model)[0] == 3
    for layer in served_layers(model):
        if layer.experts is not None:
            layer.experts.register_forward_pre_hook(lambda *given: None)
    prompt = torch.arange(3, 11)[None]
    before = tokens_of(model, prompt, 3)
    assert ran.count(True) == 9
    change(model)
    ran.clear()
    after = tokens_of(model, prompt, 3)
    assert not any(ran)
    plain = tiny_models.build("qwen2_moe" if change is not with_a_listener else "qwen3_moe").to(torch.bfloat16).eval()
    for part in (serve_linears, serve_routers, serve_norms, serve_rotations, group_queries):
        part(plain)
    change(plain)
    assert all(map(torch.equal, after, tokens_of(plain, prompt, 3)))
    same = change in (in_training, with_a_listener, with_another_forward)
    assert same == all(map(torch.equal, before, after)) or change is with_eager_attention


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    model = tiny_models.build("qwen2_moe").to(torch.bfloat16).eval()
    assert serve(model)[0] == 3
    return model


def begun(model: nn.Module) -> DynamicCache:
    """A cache with no token that grows in place."""
    cache = DynamicCache(config=model.config)
    grow_in_place(cache, 600)
    return cache


def masked(cache, tokens: int = 1) -> dict:
    mask = torch.ones(1, int(cache.get_seq_length()) + tokens, dtype=torch.long)
    mask[:, 0] = 0
    return {"attention_mask": mask}


KINDS = {
    "router logits": lambda cache: {"output_router_logits": True},
    "a mask": masked,
    "two tokens and a mask": lambda cache: {"input_ids": torch.arange(3, 5)[None]} | masked(cache, 2),
    "no cache": lambda cache: {CACHE: None, "use_cache": False},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_passes_go_to_the_modules_and_the_next_one_does_not(plain, kind, ran):
    cache = cache_in(plain(torch.arange(3, 11)[None], use_cache=True))
    grow_in_place(cache, 64)
    usual = {"input_ids": torch.tensor([[5]]), "use_cache": True, CACHE: cache}
    for more, computed in (({}, True), (KINDS[kind](cache), False), ({}, True)):
        ran.clear()
        plain(**usual | more)
        assert (ran.count(True) == 3) == computed and any(ran) == computed


@torch.no_grad()
def test_gradients_and_listeners_of_all_modules_go_to_the_modules(plain, ran):
    cache, heard = cache_in(plain(torch.arange(3, 11)[None], use_cache=True)), []
    grow_in_place(cache, 64)
    usual = {"input_ids": torch.tensor([[5]]), "use_cache": True, CACHE: cache}
    plain(**usual)
    ran.clear()
    with torch.enable_grad():
        plain(**usual)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *given: heard.append(type(module).__name__))
    plain(**usual)
    hook.remove()
    assert not any(ran) and any("Attention" in name for name in heard)
    plain(**usual)
    assert ran.count(True) == 3


@torch.no_grad()
def test_what_a_layer_has_returned_is_its_own(plain, ran):
    cache, outputs, copies = cache_in(plain(torch.arange(3, 11)[None], use_cache=True)), [], []
    grow_in_place(cache, 64)
    hooks = [layer.register_forward_hook(lambda module, args, out: outputs.append(out)) for layer in plain.model.layers]
    for token in (5, 6, 7):
        plain(torch.tensor([[token]]), use_cache=True, **{CACHE: cache})
        copies += [out.clone() for out in outputs[len(copies) :]]
    for hook in hooks:
        hook.remove()
    assert ran.count(True) == 9 and len(outputs) == 9 and all(map(torch.equal, outputs, copies))


@torch.no_grad()
def test_threads_with_sequences_of_their_own_do_not_meet(plain):
    def logits(start: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            return tokens_of(plain, torch.arange(start, start + 8)[None], 12)

    alone = [logits(start) for start in (3, 30)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            both = list(threads.map(logits, (3, 30)))
            assert all(map(torch.equal, alone[0], both[0])) and all(map(torch.equal, alone[1], both[1]))


@torch.inference_mode()
def test_rows_with_one_position_for_all_go_to_the_modules(plain, ran):
    caches = [cache_in(plain(torch.arange(3, 11)[None], use_cache=True)) for _ in range(3)]
    for cache in caches:
        grow_in_place(cache, 64)  # the pass makes room
    alone, said = caches.pop(), []
    of_one = plain(torch.tensor([[5]]), use_cache=True, **{CACHE: alone}).logits
    for positions, computed in (([[8], [8]], True), ([[9]], False)):
        rows = RowsCache(caches)
        ran.clear()
        with shared_pass(plain, rows):
            given = {"position_ids": torch.tensor(positions), "use_cache": True, CACHE: rows}
            said.append(plain(torch.tensor([[5], [5]]), **given).logits)
        assert any(ran) == computed and torch.equal(said[-1][0], said[-1][1])
    assert torch.equal(said[0][:1], of_one)


@torch.inference_mode()
def test_tokens_of_one_sequence_get_room_together(plain, ran):
    """A draft right behind a prompt, of which the first token is kept."""
    caches = [cache_in(plain(torch.arange(3, 11)[None], use_cache=True)) for _ in range(2)]
    for cache in caches:
        grow_in_place(cache, 64)
    ran.clear()
    rows = RowsCache(caches[:1] * 3)
    with shared_pass(plain, rows):
        given = {"position_ids": torch.tensor([[8], [9], [10]]), "use_cache": True, CACHE: rows}
        together = plain(torch.tensor([[5], [6], [7]]), **given).logits
    assert ran.count(True) == 3
    alone = [plain(torch.tensor([[token]]), use_cache=True, **{CACHE: caches[1]}).logits for token in (5, 6, 7)]
    assert all(torch.equal(together[row : row + 1], one) for row, one in enumerate(alone))
    rows.back_to(0)
    following = [plain(torch.tensor([[9]]), use_cache=True, **{CACHE: caches[0]}).logits]
    caches[1].crop(-2)
    following.append(plain(torch.tensor([[9]]), use_cache=True, **{CACHE: caches[1]}).logits)
    assert torch.equal(*following)


# ------------------------------------------------------------------ the cache
ACTIONS = ["one", "two", "make room", "update", "crop", "copy", "look", "back", "reset"]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=30), st.booleans())
def test_a_cache_that_grows_by_one_more_holds_what_was_written(actions, pruned):
    chance = torch.Generator().manual_seed(len(actions))

    def numbers(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(1, 2, tokens, 4, generator=chance) for _ in range(2))

    layer, left = PrunedLayer() if pruned else GrowingLayer(), None
    layer.room = 40
    expected = numbers(3)
    layer.update(*expected)
    for action in actions:
        if action in ("one", "two") and layer.has_room(2):
            new = numbers(1 if action == "one" else 2)
            for later in range(new[0].shape[2]):
                *memories, tokens = layer.place(later)
                assert tokens == expected[0].shape[2] + 1 + later
                for memory, part in zip(memories, new):
                    memory[:, :, tokens - 1] = part[:, :, later]
            for _ in range(new[0].shape[2]):
                layer.one_more()
            expected = tuple(torch.cat(both, dim=2) for both in zip(expected, new))
        elif action == "make room":
            assert layer.make_room(2) == layer.has_room(2) == (0 < expected[0].shape[2] <= 38)
        elif action == "reset":
            layer.reset()
            assert not layer.has_room(1)
            left = None
            if layer.keys is None:
                layer.update(*(expected := numbers(3)))
            else:  # older releases keep as many zeros
                expected = layer.keys, layer.values
        elif action == "update" and expected[0].shape[2] < 38:
            new = numbers(2)
            layer.update(*new)
            expected = tuple(torch.cat(both, dim=2) for both in zip(expected, new))
        elif action == "crop" and expected[0].shape[2] > 2:
            layer.crop(-1)
            expected = tuple(part[:, :, :-1] for part in expected)
        elif action == "copy":
            other = copy.copy(layer)
            assert not other.has_room(1) and torch.equal(other.keys, expected[0])
            layer = other
            left = None
        elif action == "look":
            assert torch.equal(layer.keys, expected[0]) and torch.equal(layer.values, expected[1])
            assert layer.get_seq_length() == expected[0].shape[2]
        elif action == "back":  # as rows that give up later tokens
            if left is None:
                left = vars(layer).copy(), expected
            else:
                vars(layer).update(left[0])
                expected, left = left[1], None
        if left is not None and expected[0].shape[2] < left[1][0].shape[2]:
            left = None  # what it would go back to has been written over
    assert torch.equal(layer.keys, expected[0]) and torch.equal(layer.values, expected[1])


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("comes", [True, False])
def test_a_cache_that_was_begun_takes_what_comes_or_something_else(sequences, tokens, comes):
    """As where a call fails, and modules compute."""
    layer, empty = GrowingLayer(), torch.empty(1, 2, 0, 4)
    assert not layer.begin(empty, empty, 2)  # nothing says how many it may have
    layer.room = 8
    assert not layer.begin(empty, empty, 9) and layer.begin(empty, empty, 2) and not layer.begin(empty, empty, 2)
    assert layer.get_seq_length() == 0 and not layer.has_room(1) and not layer.make_room(1)
    if comes:
        keys, values, count = layer.place(1)
        assert count == 2 and keys.shape == values.shape == (1, 2, 8, 4)
        keys[:, :, :2], values[:, :, :2] = 5, 7
        layer.more(2)
        assert layer.get_seq_length() == 2 and layer.has_room(6) and (layer.keys == 5).all() and (layer.values == 7).all()
        return
    states = torch.randn(sequences, 2, tokens, 4)
    layer.update(states, states)
    assert torch.equal(layer.keys, states) and torch.equal(layer.values, states) and layer.get_seq_length() == tokens


def test_caches_without_memory_of_their_own_have_no_room():
    layer = GrowingLayer()
    assert not layer.has_room(1)
    layer.room = 8
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert layer.has_room(5) and not layer.has_room(6)
    layer.batch_repeat_interleave(2)
    assert not layer.has_room(1)
    sliding = PrunedLayer(window=100)
    sliding.room = 8
    sliding.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    held = sliding._held
    assert not sliding.has_room(1) and not sliding.make_room(1) and sliding._held is held


@torch.inference_mode()
def test_no_cache_outlives_its_request():
    model = tiny_models.build("qwen2_moe").to(torch.bfloat16).eval()
    serve(model)
    out = model(torch.arange(3, 11)[None], use_cache=True)
    cache = cache_in(out)
    grow_in_place(cache, 64)
    for _ in range(3):
        model(torch.tensor([[5]]), use_cache=True, **{CACHE: cache})
    held = weakref.ref(cache), weakref.ref(cache.layers[0]._held[0])
    angles = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, given: angles.extend(map(weakref.ref, given["position_embeddings"])), with_kwargs=True
    )
    model(torch.arange(3, 4 + MOST_TOKENS)[None], use_cache=True)
    del out, cache
    gc.collect()
    assert [found() for found in (*held, *angles)] == [None] * 4  # nor do the angles of a long prompt


def test_a_call_is_told_where_keys_and_values_lie_whenever_they_move():
    """Memory is known by its tensors, weakly: it ends with a request, and another one's may have its place."""
    room = decoder_layer._Room(0, (2, 1), 8, None, torch.float32)
    memory = [(torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 3)) for tokens in (5, 6, 7)]
    for tokens, (one, other) in enumerate([(0, 1), (0, 1), (1, 0), (1, 2), (1, 1), (0, 1)], 1):
        places = [Cached(*memory[each], tokens + each) for each in (one, other)]
        room.say(places, None)
        for row, (keys, values, count) in zip(room.rows, places, strict=True):
            assert (row.keys, row.values, row.tokens) == (keys.data_ptr(), values.data_ptr(), count)
            assert (row.key_head, row.value_head) == (keys.stride(1), values.stride(1))
    ended = weakref.ref(memory.pop(0)[0])
    del places, keys, values
    assert ended() is None
