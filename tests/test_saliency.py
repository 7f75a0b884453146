"""Saliency: attention that patches receive against float64 softmax and against the weights of transformers' own eager attention.

For every family with images: which block is listened to, or why none is; that a token's saliency is the mean over just those
patches whose change changes this token; and that listening changes no bit of the model's output.
"""

import inspect
import sys

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from tiny_models import SELECTED, WITH_IMAGES

from vismoe.models.load.live_memory import META, LiveMemory
from vismoe.models.visual.saliency import ALTERNATIVE, VisualSaliency, saliency_bytes
from vismoe.vision import saliency
from vismoe.vision.saliency import attention_received, distinctness, merged, received_bytes, squares

LAST = {  # the last attention of each family's tower, by its name there; of two it is the first that is listened to unasked
    **dict.fromkeys(("dots3_note", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "qwen3_5_moe"), "blocks.1.attn"),
    **dict.fromkeys(("qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp"), "blocks.1.attn"),
    **dict.fromkeys(("inkling2", "inkling2_loop", "minimax_m3_vl", "step3p7"), "layers.1.self_attn"),
    **dict.fromkeys(("diffusion_gemma", "gemma4"), "encoder.layers.1.self_attn"),
    "llama4": "model.layers.1.self_attn",
    "mistral_large4": "transformer.layers.1.attention",
}
NONE = {  # and why a family's is not
    "aria": "attends to all patches again",
    "deepseek_ocr2": "extra queries and a separator",
    "hy_v4_vl": "line ends",
    "inkling_mm_model": "no attention",
    "muse_spark": "order of windows",
    "unlimited_ocr": "line ends",
}
ATTEND_ACROSS = ["minimax_m3_vl"] if transformers.__version__.startswith("5.17") else []  # its images attend to each other
OVERLAPPING = ["step3p7"]  # its convolutions: a patch counts for the first of the tokens that it changes
HEARD = [family for family in WITH_IMAGES if family in LAST]


def received_by(query, key, scaling, allowed=None):
    """The same in float64, with the whole matrix."""
    key = key.repeat_interleave(len(query) // len(key), 0)
    scores = query.double() @ key.double().transpose(1, 2) * scaling
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)[:, allowed.any(0)]
    return scores.softmax(-1).mean((0, 1))


def query_and_key(heads, key_heads, patches, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, patches, width, generator=generator) * 2 for n in (heads, key_heads))


@pytest.mark.parametrize(("heads", "key_heads", "patches"), [(4, 4, 1), (4, 4, 49), (6, 2, 100), (2, 1, 256)])
@pytest.mark.parametrize("at_once_bytes", [1, 5000, 2**23])
def test_attention_received_is_the_mean_over_heads_and_queries(monkeypatch, heads, key_heads, patches, at_once_bytes):
    monkeypatch.setattr(saliency, "SCORES_BYTES", at_once_bytes)
    query, key = query_and_key(heads, key_heads, patches)
    received = attention_received(query, key, 0.3)
    assert received.dtype == torch.float32 and received.sum() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(received.double(), received_by(query, key, 0.3), rtol=1e-4, atol=1e-8)


def test_masks_part_images_and_padding_does_not_ask():
    query, key = query_and_key(4, 4, 12)
    images = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).bool()
    received = attention_received(query, key, 0.3, images)
    own = [received_by(query[:, part], key[:, part], 0.3) * share for part, share in ((slice(5), 5 / 12), (slice(5, 12), 7 / 12))]
    torch.testing.assert_close(received.double(), torch.cat(own), rtol=1e-4, atol=1e-8)
    padded = attention_received(query, key, 0.3, (torch.arange(12) < 9).expand(12, 12))
    torch.testing.assert_close(padded.double()[:9], received_by(query[:, :9], key[:, :9], 0.3), rtol=1e-4, atol=1e-8)
    assert (padded[9:] == 0).all()


def test_queries_are_sub_sampled_evenly():
    query, key = query_and_key(4, 4, 100)
    some = attention_received(query, key, 0.3, most_queries=20)
    asked = sorted({int((i * (5**0.5 - 1) / 2) % 1 * 100) for i in range(20)})
    assert max(np.diff(asked)) <= 10 and len(asked) >= 18
    scores = (query[:, asked].double() @ key.double().transpose(1, 2) * 0.3).softmax(-1)
    torch.testing.assert_close(some.double(), scores.mean((0, 1)), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patches", [16, 1000, 70000])
def test_memory_is_what_was_said_and_never_patches_squared(dtype, patches):
    query, key = (torch.empty(patches, 16, 8, dtype=dtype, device=META).transpose(0, 1) for _ in range(2))
    with LiveMemory() as memory:
        received = attention_received(query, key, 0.3)
        merged(received, torch.arange(patches, device=META) // 4, patches // 4)
    said = received_bytes(16, 8, patches, dtype.itemsize)
    queries_bytes = 16 * 64 * 8 * 4
    assert 0.7 * said < memory.peak_bytes <= said + queries_bytes
    per_patch_bytes = saliency.PATCH_BYTES + 16 * 8 * dtype.itemsize
    assert said - per_patch_bytes * patches <= max(1.5 * saliency.SCORES_BYTES, 16 * patches * 6)


def test_squares_of_patches_make_tokens():
    rows, columns = torch.arange(20) // 5, torch.arange(20) % 5
    token_of = squares(rows, columns, width=5, side=2)
    assert token_of.tolist() == [0, 0, 1, 1, -1] * 2 + [2, 2, 3, 3, -1] * 2
    assert merged(torch.arange(20.0), token_of, 4).tolist() == [3.0, 5.0, 13.0, 15.0]
    assert squares(columns, rows, width=4, side=2).reshape(4, 5).T.flatten().tolist()[:4] == [0, 0, 1, 1]


def test_distinctness_is_the_distance_from_the_mean():
    assert distinctness(torch.tensor([[0.0, 0.0], [6.0, 8.0]])).tolist() == [5.0, 5.0]
    assert distinctness(torch.ones(3, 4, dtype=torch.bfloat16)).tolist() == [0.0] * 3


def pictures(family):
    """Two pictures; where a family takes pictures of any shape, of two shapes, one of them padded."""
    values = tiny_models.picture(family, 2, torch.float32, torch.Generator().manual_seed(3))
    if "image_sizes" in values:
        return values | dict(image_sizes=torch.tensor([(64, 32), (32, 64)]))
    if "image_position_ids" in values:
        places = values["image_position_ids"]
        raster = torch.cartesian_prod(torch.arange(3), torch.arange(6)).flip(-1)  # (column, row)
        places[1] = torch.cat((raster, torch.full((18, 2), -1)))
    return values


def encode(model, values):
    """Visual tokens of all pictures as the family makes them, [tokens, width]."""
    encoder = next(part for part in model.modules() if hasattr(part, "get_image_features")).get_image_features
    wanted = {
        name: getattr(model.config.vision_config, name) for name in inspect.signature(encoder).parameters if name == SELECTED
    }
    with torch.no_grad():
        output = encoder(**values, **wanted)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.flatten(0, -2) for part in parts])


def listened_to(model, family):
    tower = next(part for part in model.modules() if type(getattr(part, "config", None)) is type(model.config.vision_config))
    return tower.get_submodule(LAST[family])


def eager_weights(model, family, values, monkeypatch):
    """Attention received per patch in that module, from the whole weights of the family's own eager attention: [rows]."""
    attention = listened_to(model, family)
    file, seen = sys.modules[type(attention).__module__], []
    name = next(name for name in ("vision_eager_attention_forward", "eager_attention_forward") if hasattr(file, name))
    own = getattr(file, name)

    def remember(module, query, key, value, attention_mask=None, **options):
        output, weights = own(module, query, key, value, attention_mask, **options)
        if module is attention:
            seen.append(weights)
        return output, weights

    monkeypatch.setattr(file, name, remember)
    model.config.vision_config._attn_implementation = attention.config._attn_implementation = "eager"
    encode(model, values)
    real = values.get("image_position_ids", torch.zeros(1, 1, 2))[..., 0] >= 0
    if len(real) > 1:  # padding asks nothing
        return torch.cat([weights[0, :, asks].mean((0, 1)) for weights, asks in zip(seen[0].split(1), real, strict=True)])
    return torch.cat([image.mean((0, 1)) for weights in seen for image in weights])


def patches_of_tokens(model, family, values):
    """Bool [tokens, rows]: a change of a row that leaves the last attention changes this token. No later layer mixes rows."""
    attention, plain, changed = listened_to(model, family), encode(model, values), []

    def change(module, args, output, row):
        first = output[0] if isinstance(output, tuple) else output
        first = first.clone()
        first.view(-1, first.shape[-1])[row, 0] += 1  # of all numbers alike, a norm would take it out again
        return (first, *output[1:]) if isinstance(output, tuple) else first

    rows = []
    attention.register_forward_hook(lambda _, args, out: rows.append((out[0] if isinstance(out, tuple) else out)[..., 0].numel()))
    encode(model, values)
    for row in range(rows[0]):
        handle = attention.register_forward_hook(lambda module, args, output, row=row: change(module, args, output, row))
        changed.append((encode(model, values) - plain).abs().amax(-1) > 1e-6)
        handle.remove()
    return torch.stack(changed, 1)


@pytest.mark.parametrize("family", HEARD)
def test_a_tokens_saliency_is_the_mean_of_the_eager_weights_of_its_patches(family, monkeypatch):
    model, values = tiny_models.build(family), pictures(family)
    heard = VisualSaliency.of(model, -1)
    heard.begin()
    tokens = len(encode(model, values))
    counts = heard.segments()
    found = heard.take(counts)
    assert len(counts) == (1 if family in ATTEND_ACROSS else 2)
    assert sum(counts) == tokens and [len(part) for part in found] == counts
    makes = patches_of_tokens(model, family, values)
    if family in OVERLAPPING:
        makes &= makes.cumsum(0) == 1
    makes = makes.float()
    expected = (makes @ eager_weights(model, family, values, monkeypatch)) / makes.sum(1)
    start = 0
    for part in found:
        assert part.dtype == np.float32 and (np.ptp(part) > 0 or len(part) == 1)
        own = expected[start : start + len(part)].numpy()
        np.testing.assert_allclose(part / part.mean(), own / own.mean(), rtol=2e-4)
        start += len(part)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_every_family_says_what_its_saliency_is_and_listening_changes_no_bit(family):
    model = tiny_models.build(family)
    inputs = tiny_models.prompt(family, batch=2)
    heard = VisualSaliency.of(model)
    if family in LAST:
        assert heard.source == f"attention received in the vision tower's {LAST[family].replace('.1.', '.0.')}"
    else:
        assert heard.source.startswith(ALTERNATIVE) and NONE[family] in heard.source
    configs = [id(module.config) for module in model.modules() if hasattr(module, "config")]
    with torch.no_grad():
        plain = model(**inputs).logits
        heard.begin()
        listened = model(**inputs).logits
        found = heard.take([tiny_models.image_tokens(family)] * 2)
        after = model(**inputs).logits
    assert (found is not None) == (family in LAST)
    assert torch.equal(plain, listened) and torch.equal(plain, after)
    assert configs == [id(module.config) for module in model.modules() if hasattr(module, "config")]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert (saliency_bytes(model, 64) in {received_bytes(4, 8, 64 * patches, 4) for patches in (4, 9, 16)}) == (family in LAST)


def test_two_eager_towers_are_listened_to_alike_and_flash_attention_is_not():
    model, values = tiny_models.build("qwen3_vl_moe"), pictures("qwen3_vl_moe")
    found = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        plain = encode(model, values)
        heard = VisualSaliency.of(model)
        heard.begin()
        assert torch.equal(plain, encode(model, values))
        found.append(np.concatenate(heard.take([6, 6])))
    np.testing.assert_allclose(*found, rtol=1e-4)
    listened_to(model, "qwen3_vl_moe").config._attn_implementation_internal = "flash_attention_2"
    assert "attends by flash_attention_2" in VisualSaliency.of(model).source


def test_any_block_can_be_listened_to_and_one_that_is_not_there_cannot():
    model, values = tiny_models.build("qwen3_vl_moe"), pictures("qwen3_vl_moe")
    parts = []
    for block in (None, -1):
        heard = VisualSaliency.of(model, block)
        heard.begin()
        encode(model, values)
        parts.append(heard.take([6, 6])[0])
    assert heard.source.endswith("blocks.1.attn")
    assert np.abs(parts[0] - parts[1]).max() > 1e-5
    with pytest.raises(IndexError):
        VisualSaliency.of(model, 2)


def test_what_does_not_fit_is_none_and_begin_forgets():
    model, values = tiny_models.build("qwen3_vl_moe"), pictures("qwen3_vl_moe")
    heard = VisualSaliency.of(model)
    assert heard.segments() is None and heard.take([6]) is None
    heard.begin()
    encode(model, values)
    assert heard.segments() == [6, 6] and len(heard.take([6, 6])) == 2
    assert all(heard.take(counts) is None for counts in ([12], [6], [6, 7], [6, 6, 6], [5, 7], []))
    heard.begin()
    assert heard.segments() is None and heard.take([6, 6]) is None
    encode(model, values)  # nobody listens
    assert heard.segments() is None


def test_a_tower_that_failed_in_the_middle_is_given_back():
    model, values = tiny_models.build("gemma4"), pictures("gemma4")
    heard, attention = VisualSaliency.of(model, -1), listened_to(model, "gemma4")
    plain, config = encode(model, values), attention.config
    handle = attention.register_forward_hook(lambda *_: 1 / 0)
    heard.begin()
    with pytest.raises(ZeroDivisionError):
        encode(model, values)
    handle.remove()
    heard.begin()
    assert torch.equal(encode(model, values), plain) and heard.segments() == [4, 2]
    heard.remove()
    assert attention.config is config and heard.segments() is None


def test_a_text_model_has_no_saliency_and_says_so():
    heard = VisualSaliency.of(tiny_models.build("qwen3_moe"))
    heard.begin()
    assert "no vision tower" in heard.source and heard.take([]) is None
