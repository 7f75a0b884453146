"""Images that say how large they are to be, on their way through the server: in parts, in `vismoe`, and as Qwen's documentation
writes whole conversations."""

import base64
import io
import json

import pytest

for needed in ("fastapi", "httpx", "openai", "uvicorn"):
    pytest.importorskip(needed)

from hostile_images import png_of  # noqa: E402
from PIL import Image  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402
from served import served  # noqa: E402

import vismoe  # noqa: E402
from vismoe.app.options import served_name  # noqa: E402
from vismoe.models.inputs.qwen_images import QwenImages  # noqa: E402

PICTURE = Image.linear_gradient("L").convert("RGB").resize((200, 120))
FILE = io.BytesIO()
PICTURE.save(FILE, "PNG")
URI = "data:image;base64," + base64.b64encode(FILE.getvalue()).decode()
TEXT = {"type": "text", "text": "What is in the picture?"}
IMAGE = {"type": "image_url", "image_url": {"url": URI}}
QWEN = {"type": "image", "image": URI}
SMALL = {"min_pixels": 4096, "max_pixels": 128 * 96}
TOKENS = {"image_tokens": [1, 6]}
EXACT = {"resized_height": 96, "resized_width": 128}


def turn(*parts):
    return [{"role": "user", "content": [*parts, TEXT]}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    PICTURE.save(folder / "a.png")
    engine = ScriptedEngine()
    with served(engine, image_folder=folder) as server:
        server.engine = engine
        server.file = (folder / "a.png").as_uri()
        yield server


def reached(server) -> list:
    """The parts that the engine got, their pictures as their sizes."""
    messages, _ = server.engine.calls.pop()
    return [part | {"image": part["image"].size} if "image" in part else part for part in messages[-1]["content"]]


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ({"messages": turn(IMAGE)}, [{}]),
        ({"messages": turn(IMAGE | SMALL)}, [SMALL]),
        ({"messages": turn(IMAGE | EXACT, IMAGE)}, [EXACT, {}]),
        ({"messages": turn(IMAGE | TOKENS, IMAGE), "vismoe": {"images": [None, TOKENS]}}, [TOKENS, TOKENS]),
        ({"messages": turn(IMAGE, IMAGE), "vismoe": {"images": [None, SMALL]}}, [{}, SMALL]),
        ({"messages": turn(IMAGE | SMALL, IMAGE), "vismoe": {"images": [{}, EXACT]}}, [SMALL, EXACT]),
        ({"vismoe": {"messages": turn(QWEN | SMALL, QWEN)}}, [SMALL, {}]),
        ({"messages": [], "vismoe": {"messages": turn(QWEN, IMAGE | EXACT)}}, [{}, EXACT]),
        ({"vismoe": {"messages": turn(QWEN), "images": [SMALL]}}, [SMALL]),
        ({"vismoe": {"messages": turn({"type": "image", "image": "FILE"} | EXACT)}}, [EXACT]),
    ],
)
def test_sizes_reach_the_engine_with_their_images(scripted, body, sizes):
    body = json.loads(json.dumps(body).replace("FILE", scripted.file))
    response = scripted.post(body)
    assert response.status_code == 200, response.text
    assert reached(scripted) == [*({"type": "image", "image": PICTURE.size, **size} for size in sizes), TEXT]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": turn(QWEN)}, "messages[0].content[0].type", ""),
        ({"messages": turn(IMAGE | {"min_pixels": 9, "max_pixels": 8})}, "messages[0].content[0]", "min_pixels=9 is more than"),
        ({"messages": turn(IMAGE | {"resized_height": 9})}, "messages[0].content[0]", "belong together"),
        ({"messages": turn(IMAGE | {"max_pixels": "9"})}, "messages[0].content[0].max_pixels", ""),
        ({"messages": turn(IMAGE | {"max_pixels": 0})}, "messages[0].content[0]", "whole number of pixels"),
        ({"messages": turn(IMAGE | {"image_tokens": [9, 8]})}, "messages[0].content[0]", "least and most"),
        ({"messages": turn(IMAGE | {"image_tokens": [9]})}, "messages[0].content[0]", "least and most"),
        ({"messages": turn(IMAGE | TOKENS | EXACT)}, "messages[0].content[0]", "leave one out"),
        ({"messages": turn(IMAGE | {"nframes": 4})}, "messages[0].content[0]", "no other"),
        ({"messages": turn(TEXT | SMALL)}, "messages[0].content[0]", "no other"),
        ({"messages": turn(IMAGE), "vismoe": {"images": [SMALL, SMALL]}}, "vismoe.images", "2 sizes for 1 images"),
        ({"messages": turn(IMAGE), "vismoe": {"images": []}}, "vismoe.images", "0 sizes for 1 images"),
        ({"messages": turn(IMAGE | SMALL), "vismoe": {"images": [EXACT]}}, "vismoe.images", "two sizes"),
        ({"messages": turn(IMAGE), "vismoe": {"images": [{"fps": 1}]}}, "vismoe.images[0].fps", ""),
        ({"messages": turn(), "vismoe": {"messages": turn()}}, "vismoe.messages", "leave one out"),
        ({"vismoe": {"messages": []}}, "vismoe.messages", ""),
        ({"vismoe": {"keep": 0.5}}, "messages", "no message"),
        ({"vismoe": {"messages": turn({"type": "video", "video": URI})}}, "messages", "not a video"),
        ({"vismoe": {"messages": turn({"type": "image", "image": "/etc/passwd"})}}, "messages", "no image file"),
        ({"vismoe": {"messages": turn({"type": "image", "image": "http://127.0.0.1/"})}}, "messages", "does not download"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_an_image_is_opened(scripted, body, param, says):
    response = scripted.post(body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and says in error["message"]
    assert not scripted.engine.calls


def test_the_answer_is_the_engines_own_and_too_many_tokens_are_a_client_error():
    with vismoe.load(memory="100%", device="cpu", lookahead="none") as engine, served(engine) as server:
        for body in ({"messages": turn(IMAGE | SMALL)}, {"vismoe": {"messages": turn(QWEN | SMALL)}}):
            answer = server.client().chat.completions.create(
                model=served_name(engine.name),
                messages=body.get("messages", []),
                max_tokens=4,
                extra_body={"vismoe": body.get("vismoe")},
            )
            reply = engine.chat(turn(QWEN | SMALL), max_tokens=4)
            assert answer.choices[0].message.content == "".join(reply)
            assert answer.vismoe["visual_tokens"] == reply.figures.visual_tokens == 8
        least, most = QwenImages.of(engine.processor).limits
        large = "data:image;base64," + base64.b64encode(png_of(1200, 900, bytes(1201 * 900))).decode()
        for size, detail, tokens, meant in (
            ({}, "low", None, {"min_pixels": least, "max_pixels": 512 * 512}),
            ({}, "low", [4, 20], {"image_tokens": [4, 20]}),
            ({}, "high", None, {"min_pixels": least, "max_pixels": most}),
            ({}, "high", [4, 20], {"image_tokens": [4, 20]}),
            ({}, "auto", None, {}),
            (SMALL, "high", None, SMALL),
            (TOKENS, None, [4, 20], TOKENS),
        ):
            part = {"type": "image_url", "image_url": {"url": large, "detail": detail}, **size}
            whole = server.post({"messages": turn(part), "vismoe": {"image_tokens": tokens}, "max_tokens": 1}).json()
            reply = engine.chat(turn({"type": "image", "image": large} | meant), max_tokens=1)
            list(reply)
            seen = whole["usage"]["prompt_tokens_details"]["image_tokens"]
            assert seen == reply.figures.visual_tokens, (detail, tokens)
            assert seen <= (size or meant).get("image_tokens", (1, 10**6))[1]
        huge = {"min_pixels": 4096 * 1024, "max_pixels": 16384 * 1024}
        response = server.post({"messages": turn(IMAGE | huge)})
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
