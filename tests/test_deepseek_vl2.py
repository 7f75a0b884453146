"""DeepSeek-VL2 against the original implementation, and against itself with experts paged and visual tokens dropped.

tests/oracles/deepseek_vl2 holds what the original computed: logits and tower features of three random models in published files,
token ids of conversations, and how pictures are cut. Language models: plain attention (tiny), latent attention (small), latent
attention with sigmoid routing and a bias (base).
"""

import base64
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import deepseek_vl2 as checkpoints
import numpy as np
import pytest
import torch
from deepseek_vl2 import BEGIN, CANDIDATES, IMAGE_TOKEN, KINDS
from PIL import Image, ImageOps
from prune_reference import unseen
from safetensors import safe_open
from safetensors.torch import load_file
from served import served
from test_prune import Told
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, DeepseekV2Config, DeepseekV3Config, DynamicCache
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

import vismoe
from vismoe import VisMoEConfig
from vismoe.app.page import Page, PageTurn
from vismoe.app.pictures import seen_pictures
from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.bench.prompt import model_inputs, picture_tokens
from vismoe.cli.main import main
from vismoe.errors import ContextError, InputError, UnsupportedModelError
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.deepseek_vl2.configuration import ORIGINAL, DeepseekVLV2Config
from vismoe.models.family.deepseek_vl2.processing import GROUNDING
from vismoe.models.family.deepseek_vl2.tiles import Tiling, token_layout, tokens_of
from vismoe.models.inputs.image_sizes import most_reduction
from vismoe.models.load.preview import read_config
from vismoe.models.visual.prune import VisualPruner
from vismoe.vision.overlay import kept_map
from vismoe.vision.saliency import filled_rows, merged
from vismoe.vision.selection import Pruning

ORACLES = Path(__file__).parent / "oracles" / "deepseek_vl2"
ORACLE_IMAGE_TOKEN = 299
TEXT_CLASSES = {"tiny": DeepseekOcr2TextConfig, "small": DeepseekV2Config, "base": DeepseekV3Config}
RULE = Tiling(CANDIDATES, patch_size=14, downsample_ratio=2)
SMALL, PUBLISHED = 42, 384  # sides of a view in pixels
SMALL_RULE = Tiling.of(checkpoints.candidates(SMALL), patch_size=14, downsample_ratio=2)
ONE_TILE = 421  # the least visual tokens of a picture
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(kind="small", dtype=torch.float32, side=SMALL):
        if (kind, dtype, side) not in made:
            made[kind, dtype, side] = checkpoints.save(kind, tmp_path_factory.mktemp(kind), dtype, side)
        return made[kind, dtype, side]

    return of


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder(side=PUBLISHED))


@pytest.fixture(scope="module")
def small_processor(folder):
    return AutoProcessor.from_pretrained(folder())


@pytest.fixture(scope="module")
def engine(folder):
    with vismoe.load(folder(side=PUBLISHED), memory="1GiB", context=8192, image_cache="64MiB") as engine:
        yield engine


def picture(width, height, seed=0):
    """Blurred noise, so that every part of it differs."""
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def loaded(folder, dtype=torch.float32, **settings):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, quantization_config=VisMoEConfig(**settings))
    return model.eval()


def eager(folder, dtype=torch.float32):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def batch(processor, *texts_and_pictures, dtype=torch.float32):
    """Inputs of conversations with one turn each, padded on the left."""
    texts, pictures = [], []
    for text, seen in texts_and_pictures:
        content = [{"type": "image"}] * len(seen) + [{"type": "text", "text": text}]
        texts.append(
            processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
        )
        pictures += seen
    inputs = processor(text=texts, images=pictures, return_tensors="pt")
    return inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}


# -- configuration
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_configuration_becomes_that_of_transformers_and_is_saved_as_such(kind, tmp_path):
    config = AutoConfig.from_pretrained(ORACLES / kind)
    assert type(config) is DeepseekVLV2Config and type(config.text_config) is TEXT_CLASSES[kind]
    assert (config.vision_config.hidden_size, config.vision_config.intermediate_size) == (32, int(32 * 3.7362))
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (
        again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
        and type(again.text_config) is TEXT_CLASSES[kind]
    )


def test_what_a_published_file_leaves_out_is_filled_with_the_original_defaults():
    published = dict(GEOMETRIES["deepseek-vl2"].values)
    language = {
        name: value for name, value in published["language_config"].items() if "heads" not in name and "layers" not in name
    }
    config = DeepseekVLV2Config(**{**published, "language_config": language})
    text = config.text_config
    assert (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (30, 32, 32)
    assert text.rope_parameters["rope_theta"] == ORIGINAL["rope_theta"] and text.rms_norm_eps == 1e-6 and text.kv_lora_rank == 512
    assert config.image_token_id == 128815 and len(config.candidate_resolutions) == 23
    assert geometry_config("deepseek-vl2-small").image_token_id == 100003


@pytest.mark.parametrize(
    ("language", "words"),
    [
        (dict(scoring_func="sigmoid"), "no such language model"),
        (dict(use_mla=False, topk_method="noaux_tc", scoring_func="sigmoid"), "no such language model"),
        (dict(moe_layer_freq=2), "moe_layer_freq"),
        (dict(rope_scaling={"type": "yarn"}), "rope_scaling"),
    ],
)
def test_a_language_model_that_never_was_is_refused(language, words, tmp_path):
    published = checkpoints.published("small")
    published["language_config"] = published["language_config"] | language
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(vismoe.VisMoEError, match=words):
        read_config(tmp_path)


def test_deepseek_ocr_which_names_the_same_type_is_refused_by_name(tmp_path):
    towers = {"clip-l-14-224": {"width": 1024}, "sam_vit_b": {"width": 768}}
    published = checkpoints.published("tiny") | {"vision_config": {"width": towers, "image_size": 1024, "mlp_ratio": 3.7362}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(UnsupportedModelError, match=r"DeepSeek-OCR .* two other vision towers.* Instead: DeepSeek-OCR-2"):
        vismoe.load(tmp_path, memory="1GiB")


@pytest.mark.parametrize(
    ("name", "published_bytes"), [("deepseek-vl2-tiny", 6.74e9), ("deepseek-vl2-small", 32.30e9), ("deepseek-vl2", 54.96e9)]
)
def test_the_published_sizes_have_the_published_bytes(name, published_bytes):
    """The files also hold the tower's pooling head, which the model does not compute: 12 matrices' worth of its width."""
    with torch.device("meta"):
        model = model_class_of(name)._from_config(geometry_config(name), dtype=torch.bfloat16)
    width, wide = model.config.vision_config.hidden_size, model.config.vision_config.intermediate_size
    unused = 4 * width**2 + 2 * width * wide
    assert 2 * (sum(p.numel() for p in model.parameters()) + unused) == pytest.approx(published_bytes, rel=1e-3)


# -- arithmetic
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_original_implementation(kind, tmp_path):
    expected = load_file(ORACLES / kind / "expected.safetensors")
    model, report = AutoModelForImageTextToText.from_pretrained(
        ORACLES / kind, dtype=torch.float32, image_token_id=ORACLE_IMAGE_TOKEN, output_loading_info=True
    )
    assert not any(report.values()), "names of tensors were not understood"
    inputs = {name: expected[name] for name in ("input_ids", "pixel_values", "images_spatial_crop")}
    torch.testing.assert_close(model(**inputs).logits, expected["logits"], rtol=0, atol=1e-5)
    features = model.model.vision_tower(expected["pixel_values"]).last_hidden_state
    torch.testing.assert_close(
        features, expected["features"], rtol=0, atol=1e-5
    )  # torch's bits differ from processor to processor
    model.save_pretrained(tmp_path)
    names = [set(safe_open(where / "model.safetensors", "pt").keys()) for where in (ORACLES / kind, tmp_path)]
    assert names[1] == {name for name in names[0] if "attn_pool" not in name}
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.budget(4)
@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, [torch.bfloat16, torch.float32, torch.bfloat16]))
def test_paged_experts_compute_the_bits_of_eager_ones(kind, dtype, folder, small_processor):
    where = folder(kind, dtype)
    two = picture(300, 800), picture(90, 90, 1)
    inputs = batch(small_processor, ("What?", [picture(500, 200)]), ("And those two?", two), dtype=dtype)
    alone = batch(small_processor, ("What?", [picture(300, 300)]), dtype=dtype)
    ways = ({}, dict(num_beams=3), dict(prompt_lookup_num_tokens=2))
    reference = eager(where, dtype)
    expected = reference(**inputs).logits
    said = [reference.generate(**alone, max_new_tokens=4, min_new_tokens=4, do_sample=False, **way) for way in ways]
    beams = reference.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=2)
    two_slabs = f"{100 * 2 / 16 + 1e-6}%"
    for memory in (two_slabs, "25%", "50%", "100%"):
        model = loaded(where, dtype, memory=memory, kernels="torch", pinned_layers=0, context=4096)
        assert torch.equal(model(**inputs).logits, expected), memory
        if memory != "100%":
            assert vismoe.runtime_of(model).pager.metrics.snapshot().total("evictions") > 0
        if memory in (two_slabs, "100%"):
            for way, words in zip(ways, said, strict=True):
                assert torch.equal(model.generate(**alone, max_new_tokens=4, min_new_tokens=4, do_sample=False, **way), words), (
                    way
                )
            again = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=2)
            assert torch.equal(again, beams)
        vismoe.runtime_of(model).pager.close()


def test_an_answer_goes_on_in_a_cache_of_ones_own(folder):
    """By whichever name the installed transformers gives it, in `generate` and in a pass."""
    model, ids = eager(folder()), torch.tensor([[5, 6, 7, 8]])
    how, cache = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False), DynamicCache()
    assert torch.equal(model.generate(ids, **{CACHE: cache}, **how), model.generate(ids, **how)) and cache.get_seq_length() == 6
    with torch.no_grad():
        whole, begun = model(ids).logits[:, -1], cache_in(model(ids[:, :3], use_cache=True))
        assert torch.allclose(model(ids[:, 3:], **{CACHE: begun}).logits[:, -1], whole, atol=1e-5)


def test_beams_of_a_batch_see_the_pictures_of_their_own_sequence(folder, small_processor):
    """Rows of one conversation with two pictures and one with none: as each alone, up to what padding rounds."""
    model = eager(folder())
    shown, plain = ("And those two?", [picture(300, 800), picture(90, 90, 1)]), ("Well?", [picture(400, 100)])
    together = model.generate(
        **batch(small_processor, plain, shown), max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=2
    )
    for row, one in enumerate((plain, shown)):
        alone = model.generate(**batch(small_processor, one), max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=2)
        assert torch.equal(together[row, -3:], alone[0, -3:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_kernels_are_as_near_to_float32_as_torch_is(kind, folder, small_processor):
    where = folder(kind, torch.bfloat16)
    inputs = batch(small_processor, ("What?", [picture(500, 200)]), dtype=torch.bfloat16)
    exact = eager(where, torch.float32)(**inputs | {"pixel_values": inputs["pixel_values"].float()}).logits
    errors = []
    for kernels in ("torch", "auto"):
        model = loaded(where, torch.bfloat16, memory="100%", kernels=kernels, context=4096)
        errors.append((model(**inputs).logits.float() - exact).abs().median())
        fast = vismoe.runtime_of(model).backends["kernels"]
        vismoe.runtime_of(model).pager.close()
    assert errors[1] <= 1.05 * errors[0], fast


def test_an_answer_ends_at_the_end_token_which_published_files_name_in_the_language_model_alone(
    folder, small_processor, tmp_path
):
    where = folder()
    assert not (where / "generation_config.json").exists()
    model = eager(where)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (0, 1)
    inputs = batch(small_processor, ("What?", [picture(90, 90)]))
    free = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, -4:].tolist()
    shutil.copytree(where, tmp_path / "other")
    published = json.loads((where / "config.json").read_text())
    published["language_config"]["eos_token_id"] = free[1]  # as if the second token ended texts
    (tmp_path / "other" / "config.json").write_text(json.dumps(published))
    model = eager(tmp_path / "other")
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist() == free[:2]


@pytest.mark.parametrize("tiles", [(3, 2), (1, 3)])
def test_views_become_tokens_in_the_order_that_the_layout_says(tiles, folder, monkeypatch):
    """Tokens are numbered by their view and place before they are put together; two pictures, so that views do not mix."""
    model, side = eager(folder()).model, 2
    across, down = tiles
    views = 2 * (1 + across * down)
    numbered = torch.arange(views * side**2, dtype=torch.float32).view(views, side, side, 1).expand(-1, -1, -1, 64)
    monkeypatch.setattr(model.multi_modal_projector, "forward", lambda features: numbered)
    model.image_newline.data.fill_(-1), model.view_separator.data.fill_(-2)
    crops = torch.tensor([tiles, tiles])
    pictures = model.get_image_features(torch.zeros(views, 3, SMALL, SMALL), crops).pooler_output
    layout = token_layout(tiles, 3, side)
    first_patch = np.array([np.flatnonzero(layout.token_of == token)[:1].tolist() or [-1] for token in range(layout.tokens)])[
        :, 0
    ]
    for number, tokens in enumerate(pictures):
        for token, patch in enumerate(first_patch):
            view, place = divmod(patch, 9)
            expected = ((number * (1 + across * down) + view) * side + place // 3 // 2) * side + place % 3 // 2
            assert tokens[token, 0] == (expected if patch >= 0 else -2 if layout.row_of[token] < 0 else -1)
    with pytest.raises(ValueError, match="views, but the images have"):
        model.get_image_features(torch.zeros(views, 3, SMALL, SMALL), crops[:1])


def test_images_need_their_tokens_and_labels_give_a_loss(folder, small_processor):
    model = eager(folder())
    inputs = batch(small_processor, ("What?", [picture(90, 90)]), ("And?", [picture(500, 200)]))
    output = model(**inputs, labels=inputs["input_ids"])
    logits = output.logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, inputs["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert torch.equal(model(**inputs, return_dict=False)[0], output.logits)
    generated = torch.full((2, 3), IMAGE_TOKEN)  # image tokens behind the prompt show nothing
    longer = {
        "input_ids": torch.cat([inputs["input_ids"], generated], 1),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1),
    }
    assert torch.equal(model(**inputs | longer).logits[:, : output.logits.shape[1]], output.logits)
    inputs["input_ids"][0, inputs["input_ids"][0] == IMAGE_TOKEN] = 9
    with pytest.raises(ValueError, match="image tokens, the images have"):
        model(**inputs)


# -- visual tokens
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_tokens_are_as_if_nobody_saw_them_and_keep_1_drops_none(kind, folder, small_processor):
    model = eager(folder(kind))
    two = picture(300, 800), picture(90, 90, 1)
    inputs = batch(small_processor, ("What?", [picture(500, 200)]), ("And those two?", two))
    whole = model(**inputs, use_cache=True).logits
    pruner = VisualPruner.of(model, 1)
    told, pruner.pruning = Told(pruner), Pruning(keep=0.5)
    logits = model(**inputs, use_cache=True).logits
    sizes = [SMALL_RULE.tokens(SMALL_RULE.best(size)) for size in ((500, 200), (300, 800), (90, 90))]
    assert [image.tokens for image in pruner.kept] == sizes and all(image.layout is not None for image in pruner.kept)
    assert [len(image.selection.kept) for image in pruner.kept] == [tokens // 2 for tokens in sizes]
    pruner.pruning = Pruning(keep=1.0)
    assert torch.equal(model(**inputs, use_cache=True).logits, whole)
    pruner.remove()
    (kept,) = told.rows([inputs])
    hidden = ~kept & inputs["attention_mask"].bool()
    decoder = model.model.language_model
    with unseen(decoder, decoder.layers, 1, hidden):
        expected = model(**inputs).logits
    for got, wanted, keep in zip(logits, expected, kept, strict=True):
        torch.testing.assert_close(got[-int(keep.sum()) :], wanted[keep], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiles", [(1, 1), (3, 2), (1, 4)])
def test_every_token_lies_where_its_patches_are(tiles):
    """Against loops over rows, columns and views, in the order of the published token sequence."""
    across, down = tiles
    layout, patches, side = token_layout(tiles, 27, 14), 27, 14
    order: list[tuple[str, int, int] | None] = []  # what each token shows: a view's patches (view, rows, columns), or nothing
    for row in range(side):
        order += [("whole", row, column) for column in range(side)] + [None]
    order.append(None)
    for row in range(down * side):
        order += [("large", row, column) for column in range(across * side)] + [None]
    assert len(order) == layout.tokens == tokens_of(tiles, side) == RULE.tokens((384 * across, 384 * down))
    number = {place: token for token, place in enumerate(order) if place}
    expected = []
    for view in range(1 + across * down):
        first_row, first_column = ((view - 1) // across * side, (view - 1) % across * side) if view else (0, 0)
        for row in range(patches):
            for column in range(patches):
                expected.append(number["large" if view else "whole", first_row + row // 2, first_column + column // 2])
    assert layout.token_of.tolist() == expected
    assert layout.grid == (down * side, across * side)
    for token, place in enumerate(order):
        cell = place[1] * across * side + place[2] if place and place[0] == "large" else -1
        assert layout.cell_of[token] == cell
    assert set(np.flatnonzero(layout.row_of < 0)) == {side * (side + 1)}, "only the separator is of no row"


def test_the_end_of_a_row_is_as_salient_as_the_best_of_the_row():
    layout = token_layout((2, 1), 3, 2)
    received = torch.rand(len(layout.token_of), generator=torch.Generator().manual_seed(0))
    token_of, row_of = torch.from_numpy(layout.token_of), torch.from_numpy(layout.row_of)
    saliency = filled_rows(merged(received, token_of, layout.tokens), token_of, row_of)
    plain = merged(received, token_of, layout.tokens)
    ends, separator = [2, 5, 11, 16], 6
    assert [int(token) for token in np.flatnonzero(np.isin(np.arange(17), layout.token_of, invert=True))] == sorted(
        [*ends, separator]
    )
    for end, row in zip(ends, ([0, 1], [3, 4], [7, 8, 9, 10], [12, 13, 14, 15]), strict=True):
        assert saliency[end] == plain[row].max()
    assert saliency[separator] == plain.max()


# -- conversations and pictures
def parts_of(text):
    """A published message, with `<image>` and a line end where a picture is shown, as message parts."""
    first, *others = text.split("<image>\n")
    pieces = [first, *(part for other in others for part in (None, other))]
    return [{"type": "image"} if piece is None else {"type": "text", "text": piece} for piece in pieces if piece != ""]


def ids_of(runs):
    return [token for run in runs for token in ([run] if isinstance(run, int) else [run[0]] * run[1])]


CONVERSATIONS = json.loads((ORACLES / "processor.json").read_text())["conversations"]


@pytest.mark.parametrize("known", CONVERSATIONS, ids=[str(number) for number in range(len(CONVERSATIONS))])
def test_conversations_become_the_ids_of_the_original_processor(known, processor):
    messages = [{"role": role, "content": parts_of(text) if role == "user" else text} for role, text in known["messages"]]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[Image.new("RGB", tuple(size)) for size in known["sizes"]], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ids_of(known["ids"])
    assert inputs.get("images_spatial_crop", torch.empty(0)).tolist() == known["tiles"]


def test_pictures_are_cut_as_the_original_processor_cuts_them(processor):
    for width, height, *best in json.loads((ORACLES / "processor.json").read_text())["best"]:
        assert list(RULE.best((width, height))) == best
    wide = picture(1003, 417)
    made = processor.image_processor([wide], return_tensors="np")
    large = ImageOps.pad(wide, (1152, 768), color=(127,) * 3)
    views = [
        ImageOps.pad(wide, (384, 384), color=(127,) * 3),
        *(large.crop((x, y, x + 384, y + 384)) for y in (0, 384) for x in (0, 384, 768)),
    ]
    expected = np.stack([(np.asarray(view, np.float32).transpose(2, 0, 1) / np.float32(255) - 0.5) / 0.5 for view in views])
    assert np.array_equal(made["pixel_values"], expected) and made["images_spatial_crop"].tolist() == [[3, 2]]


def test_the_processor_is_saved_as_published_and_its_tokenizer_keeps_spaces_and_boxes(processor, folder, tmp_path):
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    settings = ("candidate_resolutions", "patch_size", "downsample_ratio", "image_mean", "image_std", "normalize")
    published = json.loads(json.dumps(checkpoints.PROCESSOR))
    assert saved == {name: published[name] for name in (*settings, "image_token", "processor_class")}
    text = "  two  spaces, a\ttab <|ref|>it<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>"
    for each in (processor, AutoProcessor.from_pretrained(tmp_path)):
        ids = each.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert each.tokenizer.decode([0, *ids, 1], skip_special_tokens=True) == text
        assert each.tokenizer.padding_side == "left" and len(each.tokenizer) == len(processor.tokenizer)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["special"] = True  # as a published file may have it
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    marked = AutoProcessor.from_pretrained(tmp_path).tokenizer
    assert marked.decode([0, *marked(text, add_special_tokens=False)["input_ids"], 1], skip_special_tokens=True) == text
    assert [marked.convert_tokens_to_ids(token) for token in GROUNDING] == list(range(IMAGE_TOKEN + 1, IMAGE_TOKEN + 6))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "has to be the first"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image"}]}], "only a user shows images"),
        ([{"role": "tool", "content": "a"}], "unknown role"),
    ],
)
def test_the_template_refuses_what_it_cannot_say(messages, words, processor):
    with pytest.raises(Exception, match=words):
        processor.apply_chat_template(messages, tokenize=False)


def test_numbers_of_pictures_and_places_have_to_agree(processor):
    text = f"{BEGIN}<|User|>: <image>\nWhat?\n\n<|Assistant|>:"
    with pytest.raises(ValueError, match="1 places for images, but 2 were given"):
        processor(text=[text], images=[picture(9, 9)] * 2)
    nested = processor(text=[text, text], images=[[picture(9, 9)], [picture(9, 9)]], return_tensors="pt")
    assert len(nested["images_spatial_crop"]) == 2


def test_pictures_come_as_files_addresses_and_arrays_too(processor, tmp_path):
    wide = picture(700, 300)
    wide.save(tmp_path / "wide.png")
    text = f"{BEGIN}<|User|>: <image>\nWhat?\n\n<|Assistant|>:"
    expected = processor(text=text, images=wide, return_tensors="pt")
    for same in (str(tmp_path / "wide.png"), np.asarray(wide), [wide]):
        assert torch.equal(processor(text=text, images=same, return_tensors="pt")["pixel_values"], expected["pixel_values"])
    content = [{"type": "image", "path": str(tmp_path / "wide.png")}, {"type": "text", "text": "What?"}]
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert processor(text="ok", padding="max_length", max_length=20, return_tensors="pt")["input_ids"].shape == (1, 20)
    with pytest.raises(TypeError, match="truncation"):
        processor(text="ok", truncation=True)
    with pytest.raises(ValueError, match="a picture of 3000 x 1 is less than a pixel wide"):
        processor(text=text, images=picture(3000, 1))


def test_the_processor_is_found_where_nothing_but_vismoe_was_imported(folder):
    program = (
        "import gc, sys; gc.disable(); import vismoe; from transformers import AutoProcessor; "
        "print(type(AutoProcessor.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder())], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["DeepseekVLV2Processor"], done.stderr


# -- the engine, the server, the page
def asking(text, *pictures):
    return {"role": "user", "content": [*({"type": "image", "image": each} for each in pictures), {"type": "text", "text": text}]}


def said(engine, *messages, **options):
    """The finished reply."""
    reply = engine.chat(list(messages), max_tokens=6, **{"reuse": True} | options)
    list(reply)
    return reply


def test_a_third_picture_changes_how_all_are_cut_and_nothing_old_is_taken_for_new(engine):
    one, two, three = picture(900, 300), picture(500, 700, 1), picture(384, 384, 2)
    first = said(engine, asking("What?", one, two))
    tiled = [RULE.tokens(RULE.best(each.size)) for each in (one, two)]
    assert first.figures.visual_tokens == sum(tiled) > 2 * ONE_TILE and first.figures.encoded_images == 2
    so_far = [asking("What?", one, two), {"role": "assistant", "content": first.answer or "."}]
    second = said(engine, *so_far, asking("And here?", three))
    assert second.figures.visual_tokens == 3 * ONE_TILE and second.figures.encoded_images == 3
    assert second.figures.reused_tokens < 10, "tokens of another cutting were reused"
    fresh = said(engine, *so_far, asking("And here?", three), reuse=False)
    assert second.answer == fresh.answer and second.figures.prompt_tokens == fresh.figures.prompt_tokens
    third = said(engine, *so_far, asking("And here?", three), {"role": "assistant", "content": "."}, asking("Well?"))
    assert third.figures.encoded_images == 0 and third.figures.reused_tokens > 3 * ONE_TILE
    again = said(engine, asking("What is it?", one, two))
    assert again.figures.visual_tokens == sum(tiled) and again.figures.encoded_images == 0, "the first two were known in tiles"


def test_image_tokens_choose_among_the_ways_of_cutting(engine):
    wide = picture(2000, 400)
    free, bounded = (said(engine, asking("What?", wide), image_tokens=tokens) for tokens in (None, (421, 700)))
    assert free.figures.visual_tokens == RULE.tokens((5 * 384, 384)) and bounded.figures.visual_tokens == RULE.tokens((768, 384))
    with pytest.raises(
        InputError, match=r"no way of cutting a picture gives 64 to 256 visual tokens; they give 421, .* or 2,?101"
    ):
        said(engine, asking("What?", wide), image_tokens=(64, 256))
    with pytest.raises(InputError, match="the smaller number must come first"):
        said(engine, asking("What?", wide), image_tokens=(700, 421))
    three = said(engine, asking("What?", wide, wide, wide), image_tokens=(600, 2200))
    assert three.figures.visual_tokens == 3 * ONE_TILE, "more than two pictures are never cut"


def test_pictures_beyond_the_context_are_refused_before_they_are_cut(engine, monkeypatch):
    monkeypatch.setattr(type(engine.prompts.processor), "__call__", lambda *args, **kwargs: pytest.fail("pixels were made"))
    messages = [asking("What?", picture(1200, 1200), picture(1200, 1200, 1))]
    with pytest.raises(ContextError, match=r"images have 4,0\d\d visual tokens"):
        engine.prompts.build(messages, lambda source: source, None, 2048)


def test_a_text_without_a_template_begins_with_the_begin_token(engine):
    assert engine.prompts.build_text("hi").inputs["input_ids"][0, 0] == 0
    assert engine.prompts.build([asking("hi")], None).inputs["input_ids"][0].tolist().count(0) == 1


def test_a_large_photograph_may_be_decoded_smaller(engine):
    look = engine.prompts.look(None, {})
    seen = look(6708, 4472)  # 30 megapixels
    assert (seen.width, seen.height) == RULE.best((6708, 4472)) and seen.tokens == RULE.tokens(RULE.best((6708, 4472)))
    assert most_reduction(look, 6708, 4472) > 1


def test_what_was_kept_is_drawn_on_the_picture_as_the_tiles_show_it(engine):
    wide = picture(900, 500)
    reply = said(engine, asking("What?", wide), keep=0.5)
    (kept,) = reply.figures.kept
    assert "attention received in the vision tower" in engine.backends["visual tokens"]
    assert kept.tokens == RULE.tokens((1152, 768)) and kept.grid == (28, 42) and len(kept.selection.kept) == kept.tokens // 2
    assert kept.layout.token_of[0] == 0 and set(kept.cells) <= set(range(28 * 42))
    shown = kept_map(wide, kept)
    assert shown.size == (900, 600), "with the border that the large picture has"
    pixels = np.asarray(shown).astype(int)
    for cell in (0, 28 * 42 - 1, 15 * 42 + 20):
        row, column = divmod(cell, 42)
        place = pixels[round((row + 0.5) * 600 / 28), round((column + 0.5) * 900 / 42)]
        assert (len(set(place.tolist())) > 1 or place[0] == 127) == (cell in kept.cells), "dropped cells are grey and dim"
    html = seen_pictures(reply.figures)
    assert f"{kept.tokens // 2} of {kept.tokens} tokens kept, {len(kept.cells)} of them among these 1176" in html


@pytest.mark.parametrize("kind", KINDS)
def test_command_server_and_page_answer_as_the_engine_does(kind, folder, tmp_path, capsys):
    file, shown = tmp_path / "wide.png", picture(700, 300)
    shown.save(file)
    address = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "What?"}]
    where = folder(kind)
    with vismoe.load(where, memory="50%", context=2048) as engine:
        expected = said(engine, asking("What?", shown))
        assert expected.figures.visual_tokens == SMALL_RULE.tokens(SMALL_RULE.best(shown.size))
        with served(engine) as server:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
            answer = server.post(body).json()
        assert answer["choices"][0]["message"]["content"] == expected.answer
        assert answer["vismoe"]["visual_tokens"] == expected.figures.visual_tokens
        page = Page(engine)
        half = dataclasses.replace(page.options, keep=0.5, max_tokens=6)
        *_, last = page.answer(PageTurn.of("What?", [str(file)]), (), "me", half)
        assert "tokens kept," in last.finished.pictures and "data:image/jpeg" in last.finished.pictures
    capsys.readouterr()  # the server spoke of its address
    limits = ["--memory", "50%", "--context", "2048"]
    assert main(["chat", str(where), *limits, "--max-tokens", "6", "--json", "--image", str(file), "What?"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == expected.answer


def test_packing_and_planning_work_from_the_folder(folder, tmp_path, capsys):
    where = folder("base", torch.bfloat16)
    assert main(["pack", str(where), "--formats", "int4", "--out", str(tmp_path)]) == 0
    assert main(["plan", str(where), "--memory", "50%", "--context", "2048", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["family"] == "deepseek_vl_v2"


def test_the_benchmark_writes_the_family_and_shows_it_a_picture(tmp_path):
    config = DeepseekVLV2Config(**checkpoints.published("base"))
    config.architectures = ["DeepseekVLV2ForConditionalGeneration"]
    written = write_checkpoint(config, model_class_of("deepseek-vl2"), tmp_path / "made", progress=False)
    model = loaded(written.folder, torch.bfloat16, memory="100%", context=4096)
    inputs = model_inputs(model, (7, 8, 9), (500, 200))
    assert inputs["input_ids"].shape == (1, 3 + picture_tokens(model.config, (500, 200)))
    assert model(**inputs).logits.isfinite().all()
    vismoe.runtime_of(model).pager.close()
