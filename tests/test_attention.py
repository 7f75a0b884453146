"""Attention: the kernels against float64 and torch, and which attention of models is theirs."""

import pytest
import tiny_models
import torch
from expert_records import DTYPES, rms
from torch.nn.functional import scaled_dot_product_attention as of_torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vismoe.kernels import attention, cpu
from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.moe.attention import group_queries, grouped_attention, of_prompt, of_sequences
from vismoe.models.moe.linears import serve_linears
from vismoe.models.moe.norms import serve_norms
from vismoe.models.moe.rows import RowsCache, shared_pass

SHAPES = (  # heads, key heads, numbers of a key and of a value, tokens
    (32, 4, 128, 128, 300),
    (3, 3, 64, 64, 1),
    (14, 2, 80, 48, 131),
    (5, 1, 256, 16, 2000),
)


@pytest.fixture(params=cpu.available())
def isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


class Module:
    num_key_value_groups = 4
    is_causal = True


def sequence(key_heads: int, columns: int, wide: int, tokens: int, dtype: torch.dtype, masked: torch.dtype | None = None):
    """Keys and values as a cache with room for more holds them, or with the heads of each token together; and a mask."""
    keys = torch.randn(1, key_heads, tokens + 50, columns).to(dtype)[:, :, :tokens]
    values = torch.randn(1, tokens, key_heads, wide).to(dtype).transpose(1, 2)
    if masked is None:
        return keys, values, None
    seen = torch.rand(1, 1, 1, tokens) > 0.4
    seen[..., -1] = True
    return keys, values, seen if masked is torch.bool else torch.zeros(seen.shape, dtype=masked).masked_fill(~seen, -torch.inf)


def exact(query: torch.Tensor, one, scale: float) -> torch.Tensor:
    keys, values, mask = one
    keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = scale * query.double() @ keys.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


# ------------------------------------------------------------------ the kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_as_near_to_float64_as_torchs(isa, dtype):
    torch.manual_seed(1)
    ours, theirs = 0.0, 0.0
    for heads, key_heads, columns, wide, tokens in SHAPES:
        for masked in (None, torch.bool, dtype):
            query, one = torch.randn(1, heads, 1, columns).to(dtype), sequence(key_heads, columns, wide, tokens, dtype, masked)
            scale = 1.5 * columns**-0.5
            wanted, made = exact(query, one, scale), attention.attend(query, [one], scale)
            keys, values, mask = (x if x is None else x.contiguous() for x in one)
            rows = query.view(1, key_heads, -1, columns)
            their = of_torch(rows, keys, values, mask, scale=scale).reshape(made.shape)
            assert made.dtype is dtype and made.shape == (1, 1, heads, wide)
            assert rms(made - wanted) <= 1.05 * rms(their - wanted) + 2e-8
            ours, theirs = ours + rms(made - wanted), theirs + rms(their - wanted)
    assert 0 < ours <= 1.05 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_depends_on_itself_only(isa, dtype):
    query = torch.randn(4, 8, 1, 32).to(dtype)
    all_of_them = [
        sequence(2, 32, 48, tokens, dtype, masked) for tokens, masked in ((700, None), (9, torch.bool), (300, None), (1, None))
    ]
    together = attention.attend(query, all_of_them, 0.2)
    for threads in (2, 1):
        cpu.start(threads, isa)
        for b, one in enumerate(all_of_them):
            assert torch.equal(together[b : b + 1], attention.attend(query[b : b + 1], [one], 0.2))


@pytest.mark.parametrize("masked", [torch.bool, torch.float32])
def test_what_is_hidden_counts_for_nothing(isa, masked):
    query, (keys, values, _) = torch.randn(1, 4, 1, 16), sequence(2, 16, 16, 300, torch.float32)
    seen = torch.arange(300).view(1, 1, 1, -1).expand(1, 4, 1, -1) >= torch.tensor([0, 40, 299, 300]).view(1, 4, 1, 1)
    mask = seen.contiguous() if masked is torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    before = attention.attend(query, [(keys, values, mask)], 1.0)
    assert not before[0, 0, 3].any(), "nothing is visible to the last head"
    keys[:, :, :40], values[:, :, :40] = 100.0, 1e6
    after = attention.attend(query, [(keys, values, mask)], 1.0)
    assert torch.equal(before[0, 0, 1:], after[0, 0, 1:]) and not torch.equal(before[0, 0, 0], after[0, 0, 0])
    keys[:, :, 299] = torch.nan
    assert attention.attend(query, [(keys, values, mask)], 1.0)[0, 0, :3].isnan().all()


# ------------------------------------------------------------------ of several tokens
PROMPTS = (  # heads, key heads, numbers of a key and of a value, tokens, keys
    (8, 1, 128, 128, 70, 300),
    (6, 3, 72, 72, 100, 100),  # as in vision towers
    (4, 4, 96, 64, 33, 515),  # as in latent attention
    (5, 5, 40, 24, 3, 9),
    (4, 2, 64, 272, 130, 256),
)


@pytest.fixture(params=cpu.available())
def prompt_isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


def prompt(heads: int, key_heads: int, columns: int, wide: int, tokens: int, keys: int, batch: int = 1, dtype=torch.bfloat16):
    query = torch.randn(batch, tokens, heads, columns).to(dtype).transpose(1, 2)
    key = torch.randn(batch, key_heads, keys + 50, columns).to(dtype)[:, :, :keys]
    return query, key, torch.randn(batch, keys, key_heads, wide).to(dtype).transpose(1, 2)


def until(tokens: int, keys: int) -> torch.Tensor:
    """What the last `tokens` of so many keys see."""
    return torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)[None, None]


@pytest.mark.parametrize("dtype", attention.PROMPTS)
@pytest.mark.parametrize("seen", ["causal", "all", "some"])
def test_attention_of_prompts_is_as_near_to_float64_as_torchs(prompt_isa, seen, dtype):
    torch.manual_seed(2)
    for shape in PROMPTS:
        query, key, value = prompt(*shape, batch=2, dtype=dtype)
        heads, _, columns, wide, tokens, keys = shape
        causal, scale = seen == "causal", 1.5 * columns**-0.5
        mask = torch.rand(2, 1, tokens, keys) > 0.4 if seen == "some" else None
        shown = until(tokens, keys) if causal else torch.ones(1, 1, 1, keys, dtype=torch.bool) if mask is None else mask
        assert attention.takes_prompt(query, key, value, mask)
        made = attention.attend_prompt(query, key, value, mask, causal, scale)
        their = of_torch(
            query.contiguous(), key, value.contiguous(), shown.expand(2, 1, tokens, keys), scale=scale, enable_gqa=True
        )
        wanted = exact(query, (key, value, shown), scale)
        assert made.shape == (2, tokens, heads, wide) and made.dtype is dtype
        assert 0 < rms(made - wanted) <= 1.05 * rms(their.transpose(1, 2) - wanted)


def test_a_token_of_a_prompt_depends_on_what_it_sees_only(prompt_isa):
    """In pieces at any places, with a mask or without, whatever follows, in a batch, with any number of threads."""
    query, key, value = prompt(8, 2, 64, 64, 700, 700, batch=2)
    whole = attention.attend_prompt(query, key, value, None, True, 0.2)
    for threads in (2, 1, 5):
        cpu.start(threads, prompt_isa)
        for begin, end in ((0, 700), (0, 1), (1, 300), (255, 257), (300, 699), (513, 700)):
            part, keys, values = query[:, :, begin:end], key[:, :, :end], value[:, :, :end]
            wanted = whole[:, begin:end]
            assert torch.equal(attention.attend_prompt(part, keys, values, None, True, 0.2), wanted)
            assert torch.equal(attention.attend_prompt(part, keys, values, until(end - begin, end), False, 0.2), wanted)
            longer = torch.cat((until(end - begin, end), torch.zeros(1, 1, end - begin, 700 - end, dtype=torch.bool)), 3)
            assert torch.equal(attention.attend_prompt(part, key, value, longer, False, 0.2), wanted)
            alone = attention.attend_prompt(part[1:], keys[1:], values[1:], None, True, 0.2)
            assert torch.equal(alone, wanted[1:])


def test_what_is_hidden_from_a_prompt_counts_for_nothing(prompt_isa):
    query, key, value = prompt(4, 2, 32, 48, 40, 600)
    mask = torch.rand(1, 4, 40, 600) > 0.5
    mask[..., :300] = False
    mask[:, 2, 7] = False
    before = attention.attend_prompt(query, key, value, mask, False, 1.0)
    assert not before[0, 7, 2].any(), "nothing is visible to one head of a token"
    key[:, :, :300], value[:, :, :300] = 100.0, 1e6
    assert torch.equal(attention.attend_prompt(query, key, value, mask, False, 1.0), before)
    key[:, 0, 599] = torch.nan
    after = attention.attend_prompt(query, key, value, mask, False, 1.0)
    nan = after.isnan().all(-1)[0]
    assert torch.equal(nan[:, :2], mask[0, :2, :, 599].T) and torch.equal(after[:, :, 2:], before[:, :, 2:])


@pytest.mark.skipif(cpu.available() == ("portable",), reason="only torch computes attention of prompts here")
@torch.no_grad()
def test_which_attention_of_prompts_is_ours():
    query, key, value = prompt(8, 2, 64, 64, 20, 20)

    def ours(query=query, key=key, value=value, mask=None, module=Module, **options):
        return of_prompt(module, query, key, value, mask, options) is not None

    assert ours() and ours(is_causal=False) and ours(mask=until(20, 20))
    assert ours(query[:, :, 3:], is_causal=False) and not ours(query[:, :, 3:]), "whose are the keys?"
    assert not any(ours(**{name: 0.1}) for name in ("dropout", "softcap", "output_attentions", "position_bias", "cache"))
    assert not ours(query.float(), key.float(), value.float()) and not ours(key=key.float())
    assert not ours(mask=until(20, 20).float()) and not ours(mask=until(20, 19))
    assert not ours(value=value[:, :, 1:]) and not ours(key=key.mT.contiguous().mT)
    with torch.enable_grad():
        assert not ours()
    assert ours(query.half(), key.half(), value.half())
    cpu.start(2, "portable")
    assert not ours()
    cpu.start()


# ------------------------------------------------------------------ in models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [16, 24])
@torch.no_grad()
def test_outputs_are_those_of_transformers(dtype, tokens, masked, size):
    query, key, value = (torch.randn(2, heads, n, size).to(dtype) for heads, n in ((8, tokens), (2, 33), (2, 33)))
    mask = torch.rand(2, 1, tokens, 33) > 0.3 if masked else None
    ours, _ = grouped_attention(Module(), query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Module(), query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_what_is_no_plain_attention_stays_torchs():
    query, (keys, values, mask) = torch.randn(1, 8, 1, 32), sequence(2, 32, 32, 40, torch.float32, torch.bool)

    def ours(**options):
        return of_sequences(query, [(keys, values, mask)], options) is not None

    assert ours() and ours(scaling=0.1, sliding_window=8)
    assert not any(ours(**{name: 0.1}) for name in ("dropout", "softcap", "output_attentions", "position_bias", "cache"))
    with torch.enable_grad():
        assert not ours()
    others = ((keys.half(), values.half(), mask), (keys[..., :24], values, mask), (keys, values, mask[..., :-1]))
    assert not any(attention.takes(query, [one]) for one in (*others, (keys.mT, values, mask), (keys[:, :, :0], values, mask)))
    assert not attention.takes(query[..., :24], [(keys[..., :24], values, mask)])


@torch.inference_mode()
def test_rows_of_a_shared_pass_are_one_call(monkeypatch):
    model = tiny_models.build("qwen3_moe").to(torch.bfloat16).eval()
    serve_linears(model), serve_norms(model), group_queries(model)
    sequences, attend = [], attention.attend
    monkeypatch.setattr(
        "vismoe.models.moe.attention.attend", lambda q, of, scale: sequences.append(len(of)) or attend(q, of, scale)
    )
    caches, ids = [DynamicCache(config=model.config) for _ in range(2)], torch.tensor([[3], [4]])
    for length, cache in zip((5, 300), caches, strict=True):
        model(torch.arange(length)[None] % 50, **{CACHE: cache})
    places = torch.tensor([[5], [300]])
    with shared_pass(model, rows := RowsCache(caches, kept=False)):
        model(ids, **{CACHE: rows}, position_ids=places)
    assert sequences == [2] * len(model.model.layers)


def test_a_decoder_attends_by_groups_of_queries():
    model = tiny_models.build("qwen3_moe")
    model.set_attn_implementation("sdpa")
    assert group_queries(model) is None and model.config._attn_implementation == OUR_ATTENTION


def test_a_family_that_asks_for_the_name_is_left_alone():
    model = tiny_models.build("deepseek_v32")
    model.set_attn_implementation("sdpa")
    assert "asks which attention is used" in str(group_queries(model))
    assert model.config._attn_implementation == "sdpa"


def test_other_implementations_are_left_alone():
    model = tiny_models.build("qwen3_moe")
    model.set_attn_implementation("eager")
    assert group_queries(model) == "attention is eager"
