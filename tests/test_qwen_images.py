"""Images of the Qwen families: messages in the form of Qwen's documentation, against qwen-vl-utils and transformers' processor
called the way that documentation calls them."""

import base64
import io
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from searching import SEARCHING

import vismoe
from vismoe.engine.engine import demo_model
from vismoe.errors import ContextError, InputError
from vismoe.models.inputs import images, qwen_images, remote_images
from vismoe.models.inputs.images import open_image
from vismoe.models.inputs.processor import load_processor
from vismoe.models.inputs.prompts import PromptBuilder
from vismoe.models.inputs.qwen_images import SIZE_KEYS, QwenImages, vision_process

SEEDS = np.random.default_rng(0)
NOISE = Image.fromarray(SEEDS.integers(0, 256, (700, 700, 3), dtype=np.uint8))
# On the hub: patch, least and most pixels; the demo model's are its own.
ON_THE_HUB = {"qwen2_vl": (14, 3136, 12845056), "qwen2_5_vl": (14, 3136, 12845056), "qwen3_vl_moe": (16, 65536, 16777216)}


def images_only(kind: type, *given):
    """A processor without a video processor, which needs torchvision: its constructor names none."""

    class ImagesOnly(kind):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)

    return ImagesOnly(*given)


def built(family: str) -> PromptBuilder:
    import transformers  # its processors, behind vismoe: they import torchvision, which may have to be mended

    demo = load_processor(str(demo_model()))
    if family == "demo":
        return PromptBuilder(demo, demo.image_token_id)
    patch, least, most = ON_THE_HUB[family]
    limits = {"shortest_edge": least, "longest_edge": most}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=patch, size=limits, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl_moe": "Qwen3VLProcessor"}[family]
    processor = images_only(getattr(transformers, name), images, demo.tokenizer, demo.chat_template)
    return PromptBuilder(processor, demo.image_token_id)


BUILDERS = {family: built(family) for family in (*ON_THE_HUB, "demo")}


def message(*parts, text="What is in the picture?"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def picture(width: int, height: int) -> Image.Image:
    return NOISE.resize((width, height), Image.Resampling.NEAREST)


def documented(builder: PromptBuilder, messages, **more):
    """What Qwen's documentation does with messages: for Qwen3-VL with patches of 16 and without another resize."""
    images = builder.processor.image_processor
    resize = {} if images.patch_size == 14 else {"do_resize": False}
    text = builder.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures, _ = vision_process().process_vision_info(messages, image_patch_size=images.patch_size)
    return builder.processor(text=[text], images=pictures, return_tensors="pt", **resize, **more)


def assert_same(prompt, wanted):
    assert set(prompt.inputs) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(prompt.inputs[name], value), name
    assert prompt.tokens == wanted["input_ids"].shape[1]


SIDES = st.integers(1, 700)
LIMIT = st.integers(1, 400 * 32 * 32)
SIZES = st.one_of(
    st.fixed_dictionaries({}, optional={"min_pixels": LIMIT, "max_pixels": LIMIT}),
    st.fixed_dictionaries({"resized_height": SIDES, "resized_width": SIDES}, optional={"min_pixels": LIMIT}),
)


@pytest.mark.parametrize("family", BUILDERS)
@given(asked=st.lists(st.tuples(SIDES, SIDES, SIZES.filter(bool)), min_size=1, max_size=3))
@settings(max_examples=25)
@example(
    asked=[
        (300, 200, {"max_pixels": 50176}),
        (64, 64, {"min_pixels": 50176}),
        (40, 600, {"resized_height": 96, "resized_width": 128}),
    ]
)
@example(asked=[(199, 1, {"max_pixels": 4096})])
@example(asked=[(201, 1, {"max_pixels": 4096})])
def test_pixels_grids_and_tokens_are_those_of_its_own_pipeline(family, asked):
    builder = BUILDERS[family]
    messages = message(*({"type": "image", "image": picture(width, height), **size} for width, height, size in asked))
    try:
        wanted = documented(builder, messages)
    except (ValueError, AssertionError):  # its own words for no size at all
        with pytest.raises(InputError, match="Fix"):
            builder.build(messages, open_image)
        return
    if any(
        vision_process().IMAGE_MIN_TOKEN_NUM > 0 and size.get("min_pixels", 0) > size.get("max_pixels", 2**53)
        for *_, size in asked
    ):
        return  # refused here, and taken by the package where a resized size makes both moot
    assert_same(builder.build(messages, open_image), wanted)


@pytest.mark.parametrize("family", BUILDERS)
@given(width=SIDES, height=SIDES)
@settings(max_examples=25)
def test_an_image_that_says_nothing_gets_the_size_of_the_checkpoints_processor(family, width, height):
    """Through the package with the checkpoint's limits; the processor alone gives the same grid, and pixels within 2 of 255."""
    builder = BUILDERS[family]
    side = builder.processor.image_processor.patch_size * 2
    if min(width, height) <= side / 2:
        return  # a side that rounds to nothing: the two formulas differ
    least, most = QwenImages.of(builder.processor).limits
    messages = message({"type": "image", "image": picture(width, height)})
    prompt = builder.build(messages, open_image)
    sized = message({"type": "image", "image": picture(width, height), "min_pixels": least, "max_pixels": most})
    assert_same(prompt, documented(builder, sized))
    alone = builder.processor(text=[builder.processor.image_token], images=[picture(width, height)], return_tensors="pt")
    assert torch.equal(prompt.inputs["image_grid_thw"], alone["image_grid_thw"])
    assert (prompt.inputs["pixel_values"] - alone["pixel_values"]).abs().max() <= 2.01 / 127.5, "torchvision's bicubic"
    assert prompt.pictures[0].size == (width, height), "what people are shown is the picture they sent"


@pytest.mark.parametrize("family", BUILDERS)
@given(width=SIDES, height=SIDES, bounds=st.tuples(st.integers(1, 90), st.integers(1, 90)).map(sorted))
@settings(max_examples=15)
def test_image_tokens_are_its_least_and_most_pixels(family, width, height, bounds):
    builder = BUILDERS[family]
    side = builder.processor.image_processor.patch_size * 2
    least, most = bounds
    limits = {"min_pixels": least * side**2, "max_pixels": most * side**2}
    sized = message({"type": "image", "image": picture(width, height), **limits})
    plain = message({"type": "image", "image": picture(width, height)})
    try:
        pictures, _ = vision_process().process_vision_info(sized, image_patch_size=side // 2)
    except ValueError:
        with pytest.raises(InputError, match="Fix"):
            builder.build(plain, open_image, tuple(bounds))
        return
    text = builder.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    wanted = builder.processor(text=[text], images=pictures, do_resize=False, return_tensors="pt")
    prompt = builder.build(plain, open_image, tuple(bounds))
    assert_same(prompt, wanted)
    own = message({"type": "image", "image": picture(width, height), "image_tokens": bounds})
    assert_same(builder.build(own, open_image), wanted)
    assert builder.look(None, {"image_tokens": bounds})(width, height).tokens == prompt.visual_tokens
    exempt = builder.build(
        message({"type": "image", "image": picture(96, 96), "resized_height": 96, "resized_width": 96}), open_image, (1, 1)
    )
    assert exempt.visual_tokens == round(96 / side) ** 2, "what a part says of itself comes first"


# -- through the engine
@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="100%", device="cpu", lookahead="none") as engine:
        yield engine


@pytest.fixture
def only_our_guards(monkeypatch):
    """The package may neither open a file nor ask for a URL."""

    def never(*given, **named):
        raise AssertionError(f"the package fetched {given}")

    package = vision_process()
    monkeypatch.setattr(package.requests, "get", never)
    monkeypatch.setattr(package, "Image", type("Image", (), {"Image": Image.Image, "new": Image.new, "open": never}))


PICTURE = picture(200, 120)


def png(image: Image.Image = PICTURE) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


OF_A_PART = ({}, {"min_pixels": 50176, "max_pixels": 50176}, {"resized_height": 280, "resized_width": 420})
FORMS = {
    "path": lambda folder, uri: {"type": "image", "image": str(folder / "a b.png")},
    "file URL": lambda folder, uri: {"type": "image", "image": f"file://{folder}/a b.png"},
    "file URL, percent-encoded": lambda folder, uri: {"type": "image", "image": (folder / "a b.png").as_uri()},
    "base64": lambda folder, uri: {"type": "image", "image": f"data:image;base64,{uri}"},
    "PIL": lambda folder, uri: {"type": "image", "image": PICTURE},
    "URL": lambda folder, uri: {"type": "image", "image": "https://pictures.example/a.png"},
    "without a type": lambda folder, uri: {"image": PICTURE},
    "image_url": lambda folder, uri: {"type": "image_url", "image_url": str(folder / "a b.png")},
    "image_url, as OpenAI has it": lambda folder, uri: {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{uri}"},
    },
}


@pytest.mark.usefixtures("only_our_guards")
@pytest.mark.parametrize(
    ("form", "size"), list(itertools.product(FORMS, OF_A_PART) if SEARCHING else zip(FORMS, itertools.cycle(OF_A_PART)))
)
def test_messages_of_the_documentation_run_unchanged(engine, tmp_path, monkeypatch, form, size):
    asked = []
    monkeypatch.setattr(remote_images, "download", lambda url: asked.append(url) or png())
    (tmp_path / "a b.png").write_bytes(png())
    part = FORMS[form](tmp_path, base64.b64encode(png()).decode())
    reply = engine.chat(message({**part, **size}), max_tokens=3)
    "".join(reply)
    limits = size or dict(zip(SIZE_KEYS, QwenImages.of(engine.processor).limits))
    monkeypatch.undo()
    wanted = documented(engine.prompts, message({"type": "image", "image": PICTURE, **limits}))
    assert reply.figures.visual_tokens == int((wanted["input_ids"] == engine.prompts.image_token_id).sum())
    assert asked == (["https://pictures.example/a.png"] if form == "URL" else [])
    assert reply.answer == "".join(engine.chat(message({"type": "image", "image": PICTURE, **limits}), max_tokens=3))


def test_whole_numbers_of_every_kind_are_sizes():
    for number in (4096, 4096.0, np.int64(4096), np.float32(4096)):
        assert qwen_images.asked_size({"image": PICTURE, "min_pixels": number, "max_pixels": None}) == {"min_pixels": 4096}


def test_a_url_of_this_machine_is_refused_by_our_guard(engine):
    for url in ("http://127.0.0.1/a.png", "http://localhost/a.png", "https://[::1]/a.png", "http://169.254.169.254/latest"):
        with pytest.raises(InputError, match=r"not allowed.*Fix: a URL of a public server, or save the file"):
            engine.chat(message({"type": "image", "image": url}))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "audio", "audio": "a.mp3"}, "no audio"),
        ({"type": "video", "video": ["a.png", "b.png"], "fps": 2.0, "max_pixels": 50176}, "no option fps"),
        ({"image": PICTURE, "fps": 1.0}, "fps: options of a video"),
        ({"image": PICTURE, "nframes": 4, "fps": 1}, "fps, nframes: options of a video"),
        ({"image": PICTURE, "max_pixel": 50176}, "an image has no option max_pixel. Fix"),
        ({"image": PICTURE, "min_pixels": 9000, "max_pixels": 8000}, "min_pixels=9,000 is more than max_pixels=8,000"),
        ({"image": PICTURE, "max_pixels": 1}, "at least 4,096 .* and at most 1 pixels"),
        ({"image": PICTURE, "min_pixels": 2**40}, "at least .* at most"),
        ({"image": PICTURE, "resized_height": 64}, "belong together"),
        ({"image": PICTURE, "image_tokens": (4, 8), "max_pixels": 9000}, "image_tokens and max_pixels say"),
        *[
            ({"image": PICTURE, "image_tokens": value}, "image_tokens: the least and most visual tokens, not ")
            for value in (4, [4], [4, 3], [0, 4], [1, 2.0], [True, 2], "ab", {}, [1, 2**60], [1, 10**5000])
        ],
        *[
            ({"image": PICTURE, name: value}, f"{name}: a whole number of pixels")
            for name in SIZE_KEYS
            for value in (0, -1, 1.5, True, "50176", [1], {}, 2**60, float("nan"), float("inf"), 10**400, 10**5000, 1j)
        ],
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_what_cannot_be_asked_of_an_image_is_refused(engine, part, says):
    with pytest.raises(InputError, match=says):
        engine.chat(message(part))


@pytest.mark.parametrize(
    "size", [{"min_pixels": 4096 * 1024, "max_pixels": 16384 * 1024}, {"resized_height": 4000, "resized_width": 4000}]
)
def test_more_visual_tokens_than_the_context_are_refused_before_there_are_pixels(engine, monkeypatch, size):
    monkeypatch.setattr(vision_process(), "process_vision_info", lambda *given, **named: pytest.fail("resized"))
    with pytest.raises(ContextError, match=r"visual tokens, the planned context is 4,096\. Fix: .*max_pixels"):
        engine.chat(message({"type": "image", "image": PICTURE, **size}))


def test_an_image_without_end_is_refused_where_no_context_is_known():
    with pytest.raises(InputError, match="the limit 64,000,000 pixels"):
        BUILDERS["demo"].build(message({"image": PICTURE, "min_pixels": 10**9, "max_pixels": 10**9}), open_image)


def test_another_size_is_another_image_to_both_caches(engine):
    def asked(**size):
        reply = engine.chat(message({"type": "image", "image": PICTURE, **size}), max_tokens=2, reuse=True)
        "".join(reply)
        return reply.figures

    large, small = {"max_pixels": 160 * 128}, {"max_pixels": 128 * 96}
    first = asked(**large)
    again = asked(**large)
    other = asked(**small)
    back = asked(**large)
    assert first.encoded_images == 1 and again.encoded_images == 0 and again.reused_tokens > first.visual_tokens
    assert other.encoded_images == 1 and other.reused_tokens <= first.prompt_tokens - first.visual_tokens
    assert other.visual_tokens < first.visual_tokens == back.visual_tokens
    assert back.answer == again.answer == first.answer and back.encoded_images == 0
    fresh = engine.chat(message({"type": "image", "image": PICTURE, **small}), max_tokens=2)
    assert "".join(fresh) == other.answer


@given(one=SIZES, other=SIZES)
@settings(max_examples=30)
def test_images_have_one_name_just_when_the_tower_gets_the_same(one, other):
    builder = BUILDERS["demo"]
    try:
        prompts = [builder.build(message({"image": PICTURE, **size}), open_image) for size in (one, other)]
    except InputError:
        return
    grids, pixels = ([prompt.inputs[name] for prompt in prompts] for name in ("image_grid_thw", "pixel_values"))
    same = torch.equal(*grids) and torch.equal(*pixels)
    assert (prompts[0].image_names == prompts[1].image_names) == same
    for prompt in prompts:
        assert torch.equal(prompt.image_inputs([0])["pixel_values"], prompt.inputs["pixel_values"])
        assert torch.equal(prompt.light().whole()["pixel_values"], prompt.inputs["pixel_values"])


def test_families_of_others_refuse_sizes_and_keep_their_own():
    from transformers import Glm4vImageProcessorPil, Glm4vProcessor

    demo = load_processor(str(demo_model()))
    processor = images_only(Glm4vProcessor, Glm4vImageProcessorPil(), demo.tokenizer, demo.chat_template)
    builder = PromptBuilder(processor, demo.image_token_id)
    assert QwenImages.of(processor) is None and QwenImages.of(demo.tokenizer) is None
    with pytest.raises(InputError, match=r"only Qwen models support.*this one has a .*Fix: leave"):
        builder.build(message({"image": PICTURE, "max_pixels": 50176}), open_image)


# -- files of the command line
def test_a_conversation_in_a_file_names_its_images_from_there(tmp_path):
    from vismoe.cli.conversation import open_messages
    from vismoe.predictor_training.prompts import folder_prompts

    folder = tmp_path / "talks"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    said = message(
        {"type": "image", "image": "a.png", "max_pixels": 50176}, {"type": "image", "image": (folder / "a.png").as_uri()}
    )
    (folder / "talk.json").write_text(json.dumps(said))
    opened = open_messages(str(folder / "talk.json"))
    first, second, text = opened[0]["content"]
    assert first["max_pixels"] == 50176 and text == said[0]["content"][-1]
    assert all(np.array_equal(np.asarray(part["image"]), np.asarray(PICTURE)) for part in (first, second))
    (folder / "lines.jsonl").write_text(json.dumps({"messages": said, "kind": "talk"}))
    (found,) = [prompt for prompt in folder_prompts(folder) if prompt.kind == "talk"]
    (about,) = [prompt for prompt in folder_prompts(folder) if prompt.kind == "image"]
    assert found.has_images and found.group == about.group, "questions about one image are on one side"
    built = [BUILDERS["demo"].build(messages, open_image) for messages in (found.messages(), opened)]
    assert torch.equal(built[0].inputs["pixel_values"], built[1].inputs["pixel_values"]) and built[0].images == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "5", '["x"]', '{"messages": 5}', "[" * 10**5, b"\xff\xfe\x00"])
def test_a_file_without_a_conversation_says_so(tmp_path, text):
    from vismoe.cli.conversation import open_messages

    file = tmp_path / "talk.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=r"talk\.json: .*Fix: write a list of messages"):
        open_messages(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        open_messages(str(tmp_path))


# -- where packages are missing
WITHOUT = """
import gc, sys
gc.disable()  # importing takes a third longer with it
sys.modules["torchvision"] = sys.modules["qwen_vl_utils"] = None
import vismoe
assert not [name for name in ("torch", "requests") if name in sys.modules]
from PIL import Image
from vismoe.engine.engine import demo_model
from vismoe.errors import ConfigError
from vismoe.models.inputs.images import open_image
from vismoe.models.inputs.processor import load_processor
from vismoe.models.inputs.prompts import PromptBuilder

def modules():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("torchvision", "qwen_vl_utils")}

processor = load_processor(str(demo_model()))
builder = PromptBuilder(processor, processor.image_token_id)
builder.build([{"role": "user", "content": "Hello!"}], open_image)
part = {"type": "image", "image": Image.new("RGB", (300, 200)), "max_pixels": 20480}
try:
    builder.build([{"role": "user", "content": [part]}], open_image)
except ConfigError as error:
    print(error)
del sys.modules["qwen_vl_utils"]
before = modules()
print(builder.build([{"role": "user", "content": [part]}], open_image).inputs["image_grid_thw"].tolist(), modules() == before)
"""


def test_without_torchvision_images_work_and_without_the_package_only_text():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    error, answer = done.stdout.strip().splitlines()[-2:]
    assert error.startswith("images of Qwen models need the package qwen-vl-utils") and "Fix: pip install" in error
    assert answer == "[[1, 6, 10]] True", "sizes are right, and nothing stands in for torchvision afterwards"


def test_downloads_go_through_the_guard_also_within_an_event_loop(monkeypatch):
    import asyncio

    fetched = []

    async def fetch(self, url, max_bytes, timeout_s, hold):
        await hold(len(png()))
        fetched.append((url, max_bytes, timeout_s))
        return png()

    monkeypatch.setattr(remote_images.RemoteImages, "fetch", fetch)

    async def within():
        return images.fetch_image("https://pictures.example/a.png")

    for opened in (asyncio.run(within()), images.fetch_image("https://pictures.example/a.png")):
        assert np.array_equal(np.asarray(opened), np.asarray(PICTURE))
    assert fetched == [("https://pictures.example/a.png", remote_images.MAX_BYTES, remote_images.TIMEOUT_S)] * 2
    monkeypatch.setattr(remote_images, "download", lambda url: b"<html>")
    with pytest.raises(InputError, match=r"https://pictures\.example/a\.png: not an image"):
        images.fetch_image("https://pictures.example/a.png")
