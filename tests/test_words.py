"""Errors about what people get wrong: each names the one thing it is about, and what to write in its place."""

import base64
import dataclasses
import io
import json
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from PIL import Image
from test_plan import GIB, MIB, footprint, inventories
from test_plan_advice import followed

from vismoe import load
from vismoe.app.page import PageTurn
from vismoe.cli import main as cli
from vismoe.config import Settings
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, CheckpointError, ConfigError, ContextError, InputError
from vismoe.models.inputs.image_addresses import address_error
from vismoe.models.inputs.images import open_image
from vismoe.models.load.preview import read_config
from vismoe.planning.plan import Hardware, plan


# ------------------------------------------------------------------ too long
@pytest.fixture(scope="module")
def engine():
    with load(memory="50%", context=256) as engine:
        yield engine


@pytest.mark.parametrize("pictures", [0, 1])
@pytest.mark.parametrize("words", [300, 9000])  # more than the plan has, and than the model has
def test_a_text_that_is_too_long_is_advised_to_be_shorter_and_a_picture_to_be_smaller(engine, pictures, words):
    image = {"type": "image", "image": Image.new("RGB", (64, 64))}
    content = [*[image] * pictures, {"type": "text", "text": "word " * words}]
    with pytest.raises(ContextError) as said:
        engine.chat([{"role": "user", "content": content}])
    message = str(said.value)
    assert ("image" in message, "visual" in message, "shorten the text" in message) == (pictures > 0, pictures > 0, not pictures)
    larger = re.search(r"load with context=(\d+)", message)
    tokens = int(re.search(r"has (\d+) tokens", message)[1])
    assert (larger is not None) == (words == 300), "a context that the model does not have is no advice"
    assert larger is None or tokens < int(larger[1]) <= 4096


@runs(deadline=None, max_examples=50)
@given(inventories(), st.integers(1, 20), st.integers(0, 8), st.integers(256 * MIB, 4 * GIB))
def test_no_context_is_offered_that_the_model_does_not_have(inventory, power, further, free_bytes):
    positions = 2**power + further
    need = dataclasses.replace(footprint(inventory), positions=positions)
    hardware = Hardware("cpu", free_bytes, free_bytes, free_bytes, 4)
    asked = Settings(context=2**24)
    with pytest.raises(BudgetError, match=rf"context 16777216 \(the model itself has {positions}\)") as said:
        plan(need, asked, hardware)
    offered = re.search(r"--context (\d+)", said.value.fix)
    if offered:
        assert int(offered[1]) <= positions
        plan(need, *followed(asked, hardware, said.value.fix))


def test_the_demo_model_offers_its_own_context(capsys, monkeypatch):
    machine = Hardware("cpu", 20 * 2**30, 32 * 2**30, 20 * 2**30, 2)
    monkeypatch.setattr("vismoe.models.load.preview.probe", lambda device: machine)
    assert cli.main(["plan", "--context", "1000000", "--memory", "5GiB", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fix"] in ("--context 4096", "--context 2048")


# ------------------------------------------------------------------ settings and files
@pytest.mark.parametrize(
    ("flags", "setting", "fix"),
    [
        ("--keep 50", "keep", "0.5"),
        ("--keep 75", "keep", "0.75"),
        ("--keep 0", "keep", "1.0"),
        ("--keep 1000", "keep", "1"),
        ("--core-share 20", "core_share", "0.2"),
        ("--core-share -1", "core_share", "0"),
        ("--expansion-weight -1", "expansion_weight", "0"),
    ],
)
def test_a_share_that_cannot_be_names_one_setting_and_a_value_that_can(capsys, flags, setting, fix):
    assert cli.main(["chat", *flags.split(), "Hi?"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{setting}=" in said and re.search(rf"Fix: {setting}={re.escape(fix)}$", said.strip())
    assert not [other for other in ("keep=", "core_share=", "expansion_weight=") if other in said and other != f"{setting}="]
    Settings(**{setting: float(fix)})


@pytest.mark.parametrize("content", [b"", b'{"model_type": ', b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"3", b'"text"'])
def test_a_broken_configuration_is_said_to_be_broken(tmp_path, content):
    shutil.copytree(demo_model(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "vismoe*"))
    (tmp_path / "model" / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json.* (not JSON|not an object)") as said:
        read_config(tmp_path / "model")
    assert "neither a folder" not in str(said.value) and "download or copy" in str(said.value)


# ------------------------------------------------------------------ images
def encoded(kind: str) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp"])
def test_raw_base64_is_told_what_belongs_before_it_and_works_with_it(kind):
    said = address_error(encoded(kind))
    start = re.search(r"Fix: put (data:image/\w+;base64,) before it", said)[1]
    assert open_image(start + encoded(kind)).size == (20, 20)


@given(st.binary(min_size=160, max_size=400))
def test_base64_of_anything_is_known_as_such(content):
    assert "base64" in address_error(base64.b64encode(content).decode())


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("image/png;base64,iVBORw0KGgo=", "not a complete data URI"),
        ("base64;base64,iVBORw0KGgo=", "not a complete data URI"),
        *(
            (url, "not a complete URL")
            for url in ("http:/a.png", "https:", "http://", "https:///a.png", "http//a.png", "http://[::1")
        ),
        *((url, "not a complete URL") for url in ("https://a b/c.png", "http://a:port/b.png", "https://a:99999/", "http:a.png")),
    ],
)
def test_what_is_no_address_gets_a_sentence_of_its_own(address, says):
    assert says in address_error(address) and "Fix: " in address_error(address)
    with pytest.raises(InputError, match=says):
        open_image(address)


@pytest.mark.parametrize(
    "fine",
    ["a.png", "./photos/b", "/9/a.jpg", "photos/" * 40 + "a.png", "http/a.png.jpg", "https://a.example/b.png", "httpd.png",
     "http://[::1]:80/a", "data:image/png;base64,iVBO", "file:///a.png", "C:\\a.png", "iVBORw0KGgo.png"],
)  # fmt: skip
def test_what_may_be_an_address_is_looked_for(fine):
    assert (address_error(fine) is None) == (not fine.startswith("http/"))


@pytest.mark.parametrize(
    "content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\x00" * 50, b"\x00\x00\x00\x20ftypisom" + b"\x00" * 64]
)
def test_no_path_of_the_server_is_shown_for_an_uploaded_picture(tmp_path, content):
    file = tmp_path / "hash" / "holiday.png"
    file.parent.mkdir()
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(InputError, match=r"^holiday.png: ") as said:
            PageTurn.of("What?", [str(file)])
        assert "/" not in str(said.value).replace("1/1", "").split("%")[0].replace("ffmpeg -i VIDEO", "")
        file.unlink(missing_ok=True)


# ------------------------------------------------------------------ misspelt
FLAGS = {name: [flag for flag in cli.command_parser(name)._option_string_actions if len(flag) > 5] for name in cli.COMMANDS}


@given(st.data())
def test_every_misspelt_flag_of_every_command_is_answered_with_one_that_there_is(data):
    command = data.draw(st.sampled_from(sorted(FLAGS)))
    flag = data.draw(st.sampled_from(FLAGS[command]))
    place = data.draw(st.integers(3, len(flag) - 1))
    wrong = data.draw(st.sampled_from([flag[:place] + flag[place + 1 :], flag[:place] + "q" + flag[place:], flag[1:]]))
    if wrong in FLAGS[command] or wrong.startswith("-h"):  # which is a flag, and has no value
        return
    with pytest.raises(ConfigError, match=r"\(did you mean --[\w-]+\?\)") as said:
        cli.command_parser(command).parse_intermixed_args([wrong])
    meant = re.search(r"did you mean (\S+)\?", str(said.value))[1]
    assert meant in cli.command_parser(command)._option_string_actions


@pytest.mark.parametrize(
    ("line", "meant"),
    [("chta", "chat"), ("caht --json", "chat"), ("benhc", "bench"), ("calibrat", "calibrate"), ("--verson", "--version"),
     ("eval prunning", "pruning"), ("eval precision-sped --n 3", "precision-speed"), ("eval ladde --json", "ladder")],
)  # fmt: skip
def test_a_misspelt_command_or_study_is_answered_with_the_one_that_was_meant(line, meant, capsys):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    said = json.loads(out)["error"]["message"] if "--json" in line else err
    assert f"(did you mean {meant}?)" in said and "Traceback" not in said


def test_what_is_near_to_nothing_gets_no_guess(capsys):
    assert cli.main(["xyzzy"]) == 2
    said = capsys.readouterr().err
    assert "xyzzy: no such command. Fix: one of chat, ui" in said
    assert cli.main(["chat", "--xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_every_choice_of_every_flag_is_a_word_that_can_be_typed():
    for name in cli.COMMANDS:
        for action in cli.command_parser(name)._actions:
            assert all(re.fullmatch(r"[\w+-]+", choice) for choice in action.choices or ()), (name, action.option_strings)
