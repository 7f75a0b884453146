"""The committed demo model: an ordinary checkpoint of the promised shape, and one that answers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from searching import is_oldest
from transformers import AutoModelForImageTextToText, AutoTokenizer

from vismoe.eval.questions import KINDS, conversation, every_word
from vismoe.eval.scenes import DOMAINS, GALLERY, WORLDS, compose, random_scene
from vismoe.eval.world import assets_folder
from vismoe.models.inputs.processor import load_processor

DEMO = assets_folder() / "demo-model"
MAX_BYTES = 40_000_000


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor():
    return load_processor(DEMO)


def ask(model, processor, question: str, *pictures: Image.Image) -> str:
    content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": question}]
    chat = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=48)
    return processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_checkpoint_has_the_promised_shape_and_size() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    hidden, width = text["hidden_size"], text["moe_intermediate_size"]
    assert width != hidden and 2 * width != hidden  # shapes alone must tell stored orientations apart
    assert (text["num_local_experts"], text["num_experts_per_tok"]) == (32, 4) and text["num_hidden_layers"] >= 8
    assert text["rope_parameters"]["mrope_interleaved"] and len(vision["deepstack_visual_indexes"]) == 3
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= MAX_BYTES
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        assert {str(file.get_slice(name).get_dtype()) for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.budget(10)
@pytest.mark.skipif(is_oldest(), reason="the smaller model shows that the oldest transformers computes this family")
def test_the_larger_model_has_the_promised_shape_and_answers_about_pictures_of_every_domain() -> None:
    folder = assets_folder() / "gallery-model"
    if not folder.exists():
        pytest.skip("the larger model is not part of the wheel")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert (text["num_hidden_layers"], text["num_local_experts"], text["num_experts_per_tok"]) == (16, 128, 8)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 60_000_000
    model, processor = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval(), load_processor(folder)
    right = []
    for number, domain in enumerate((*DOMAINS, *DOMAINS)):
        side, difficulty = WORLDS[domain]
        talk = conversation("exists", "held-out", number, (side, side), difficulty)
        (scene,), (turn,) = talk.scenes, talk.turns
        grid = processor.image_processor(images=[compose(scene)], return_tensors="pt")["image_grid_thw"]
        assert scene.domain == domain and int(grid.prod()) // 4 == 256
        right.append(ask(model, processor, turn.question, compose(scene)) == turn.answer)
    assert sum(right) >= 13, right  # of 16; by chance one run in a hundred


def test_a_256_pixel_picture_is_64_visual_tokens_and_larger_ones_more(processor) -> None:
    for size, tokens in (((256, 256), 64), ((384, 256), 96), ((320, 320), 100)):
        grid = processor.image_processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"]
        assert int(grid.prod()) // 4 == tokens


def test_every_word_of_the_world_is_whole_tokens_and_comes_back_unchanged() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for text in every_word():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        spelled = sum(map(len, re.findall(r"\b\w+[a-z][A-Z]\w*", text)))  # a name such as ChatGPT
        assert len(ids) <= len(text.split()) + sum(not character.isalnum() for character in text) + spelled + 1
    for kind in KINDS:
        for turn in conversation(kind, "held-out", 0).turns:
            assert tokenizer.decode(tokenizer.encode(turn.question)) == turn.question


def test_any_input_has_tokens_and_none_is_unknown() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for text in ("Zürich 東京 🐱\t\x00", "supercalifragilistic", "STOP", '  "  '):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids


def test_the_chat_template_writes_roles_pictures_and_the_prompt(processor) -> None:
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "The first image."},
        {"role": "user", "content": "Why?"},
    ]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\n{picture}{picture}Which?<|im_end|>\n<|im_start|>assistant\nThe first image.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_bundled_pictures_are_held_out_scenes_and_are_answered_right(model, processor) -> None:
    """assets/images/pictures.json says, per picture, which held-out scene it is, a question, and the true answer."""
    pictures = json.loads((assets_folder() / "images" / "pictures.json").read_text())
    assert set(pictures) == {path.name for path in (assets_folder() / "images").glob("*.png")} and "demo.png" in pictures
    for name, entry in pictures.items():
        picture = Image.open(assets_folder() / "images" / name).convert("RGB")
        painted = compose(random_scene("held-out", entry["scene"], tuple(entry["size"])))
        difference = np.asarray(painted, np.float32) - np.asarray(picture, np.float32)
        assert np.abs(difference).mean() < 1, name  # Pillow's font rendering may differ a little between releases
        assert ask(model, processor, entry["question"], picture) == entry["answer"], name


def test_two_pictures_are_told_apart(model, processor) -> None:
    pair = [Image.open(assets_folder() / "images" / name) for name in ("first.png", "second.png")]
    assert ask(model, processor, "Which image has a dog?", *pair) == "The first image."
    assert ask(model, processor, "Which picture shows a car?", *pair) == "The second image."


NO_PICTURE = {"no image": 1, "blind chat": 1, "chat": 1}
MIXTURES = {
    "two pictures": {"pair_share": 1.0},
    "three, and none": {"triple_share": 1.0, "preamble_share": 1.0, "kinds": NO_PICTURE},
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
def test_training_and_transformers_compute_the_same_logits(model, monkeypatch, mixture) -> None:
    """The trainer's forward pass (one prefix, many questions) against the model's own, question by question, in float32."""
    monkeypatch.syspath_prepend(str(assets_folder()))
    network = pytest.importorskip("demo_recipe.network", reason="the recipe is not part of the wheel")
    from demo_recipe.batches import Mixture, Writer, attention_mask, make_batch, positions

    monkeypatch.setattr(network, "LOW", torch.float32)
    batch = make_batch(
        Writer(AutoTokenizer.from_pretrained(DEMO)), Mixture(**{"bins": 1, **mixture}), 1, 2 if "triple_share" in mixture else 1
    )
    trained, image_token, start = network.TrainingNetwork(model), model.config.image_token_id, model.config.vision_start_token_id
    real = torch.cat((batch.segment.new_ones(1, len(batch.prefix)), batch.segment.flatten(1)), dim=1) > 0
    with torch.no_grad():
        features = [feature.flatten(0, 1)[None] for feature in trained.see(batch.pixels)]
        places = positions(batch, (8, 8), image_token)
        hidden, _ = trained.read(features, batch.prefix, batch.bins, places, attention_mask(batch, start), real)
        patches = network.patches(batch.pixels, 16, 2)[0].reshape(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(-1, 1536)
        grid = torch.tensor([[1, 16, 16]] * len(batch.pixels))
        for number in range(1, int(batch.segment.max()) + 1):
            chosen = batch.segment[0, 0] == number
            blind = bool(batch.blind[0, 0, chosen].any())  # asked as if there were no picture
            prefix = batch.prefix[: (batch.prefix == start).nonzero()[0, 0]] if blind else batch.prefix
            ids = torch.cat((prefix, batch.bins[0, 0, chosen]))[None]
            pictures = {} if blind else {"pixel_values": patches, "image_grid_thw": grid}
            out = model(input_ids=ids, mm_token_type_ids=(ids == image_token).int(), **pictures).logits
            torch.testing.assert_close(model.lm_head(hidden[0, 0, chosen]), out[0, len(prefix) :], atol=2e-3, rtol=1e-3)


def test_pictures_are_cut_as_the_processor_cuts_them(processor, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(assets_folder()))
    network = pytest.importorskip("demo_recipe.network", reason="the recipe is not part of the wheel")
    picture = compose(random_scene("train", 1, (384, 256)))
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(1, 256, 384, 3)
    ours = network.patches(pixels, 16, 2)[0][0]
    theirs = processor.image_processor(images=[picture], return_tensors="pt")["pixel_values"].view(-1, 3, 2, 256)
    torch.testing.assert_close(ours.view(-1, 3, 256), theirs[:, :, 0], atol=1e-5, rtol=0)
    assert Path(DEMO / "preprocessor_config.json").exists()


@pytest.fixture
def recipe(monkeypatch):
    """Modules of the recipe by name."""
    monkeypatch.syspath_prepend(str(assets_folder()))
    return lambda name: pytest.importorskip(f"demo_recipe.{name}", reason="the recipe is not part of the wheel")


@torch.no_grad()
def test_the_larger_model_begins_as_the_small_ones_function(model, processor, recipe, monkeypatch) -> None:
    """With all parts of each chosen expert, and routers that do not tell parts apart, the logits are the small model's."""
    growth, files = recipe("growth"), recipe("files")
    monkeypatch.setattr(growth, "CHOICES", growth.SPLIT * model.config.text_config.num_experts_per_tok)
    monkeypatch.setattr(growth, "ROUTER_NOISE", 0.0)
    large = type(model)(growth.grown_config(files.build_tokenizer())).float().eval()
    text = large.config.text_config
    assert (text.num_hidden_layers, text.num_experts, text.moe_intermediate_size) == (16, 128, 16)
    growth.grow(model, large, seed=1)
    chat = [{"role": "user", "content": [{"type": "image", "image": compose(random_scene("held-out", 5))}]}]
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    torch.testing.assert_close(large(**inputs).logits, model(**inputs).logits, atol=2e-3, rtol=1e-3)


def test_the_loss_makes_prompts_use_fewer_experts_and_different_ones(recipe) -> None:
    """A linear router on ten clusters of tokens: after a few steps one quarter of the experts serves a cluster, and all serve."""
    specialising = recipe("network").specialising
    random, experts, group = torch.Generator().manual_seed(0), 128, torch.arange(10).repeat_interleave(100)
    tokens = 0.5 * torch.randn(10, 64, generator=random)[group] + torch.randn(1000, 64, generator=random)
    router = (0.06 * torch.randn(experts, 64, generator=random)).requires_grad_()
    optimizer, tops = torch.optim.Adam([router], 3e-3), []
    for _ in range(40):
        probability = (tokens @ router.T).softmax(-1)
        index = probability.topk(8).indices
        loss, top = specialising(probability, index, group)
        tops.append(top.item())
        load = torch.bincount(index.flatten(), minlength=experts) / index.numel()
        (0.1 * loss + 0.02 * experts * (load * probability.mean(0)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tops[0] < 0.7 and tops[-1] > 0.85 and (load > 0.1 / experts).all()
    one = torch.nn.functional.one_hot(torch.arange(4), experts).float()
    assert specialising(one, torch.arange(32).view(4, 8), torch.zeros(4, dtype=torch.long)) == (0, 1)  # it is enough


def test_batches_of_the_gallery_are_larger_pictures_of_all_domains(recipe) -> None:
    batches = recipe("batches")
    writer = batches.Writer(AutoTokenizer.from_pretrained(DEMO))
    mixture = batches.Mixture(GALLERY, bins=1, side_px=512)
    batch, pair = (batches.make_batch(writer, each, 1, 4) for each in (mixture, replace(mixture, pair_share=1.0)))
    assert batch.pixels.shape == (4, 512, 512, 3) and batch.seen.shape == (4, 256, 3)
    assert pair.pixels.shape == (4, 512, 512, 3) and len(pair.bins) == 2  # as many pictures, in pairs
