"""Forms of a conversation and of a file of keys that clients have elsewhere: system alone, names, an answer to go on with."""

from argparse import ArgumentParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

for needed in ("fastapi", "uvicorn", "openai", "prometheus_client"):  # extras
    pytest.importorskip(needed)

from scripted_engine import ScriptedEngine  # noqa: E402
from served import served  # noqa: E402

import vismoe  # noqa: E402
from vismoe.cli.serve import SERVE, serve_options  # noqa: E402
from vismoe.engine.engine import demo_model  # noqa: E402
from vismoe.errors import ConfigError, InputError  # noqa: E402

PICTURE = str(demo_model().parent / "images" / "demo.png")


def turn(role, *parts, **more):
    return {"role": role, "content": [{"type": "text", "text": part} for part in parts], **more}


QUESTION = {"role": "user", "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What is in the picture?"}]}


@pytest.fixture(scope="module")
def engine():
    with vismoe.load(memory="25%", device="cpu", context=1024) as engine:
        yield engine


def written(engine, messages) -> str:
    """The prompt as the model reads it."""
    ids = engine.prompts.build(messages, Image.open).inputs["input_ids"][0]
    return engine.tokenizer.decode(ids)


@pytest.mark.parametrize("begun", ["There", "There is a", "It shows "])
def test_a_last_message_of_the_assistant_is_gone_on_with(engine, begun):
    text = written(engine, [QUESTION, turn("assistant", begun)])
    assert text.endswith("assistant\n" + begun) and text.count("assistant\n") == 1
    reply = engine.chat([QUESTION, turn("assistant", begun)], max_tokens=4)
    assert "".join(reply) and not reply.answer.startswith(begun), "what was there is not said again"


def test_going_on_with_a_part_of_an_answer_gives_the_rest_of_it(engine):
    whole = "".join(engine.chat([QUESTION], max_tokens=30))
    words = whole.split(" ")
    for place in (1, len(words) // 2):
        begun = " ".join(words[:place])
        rest = "".join(engine.chat([QUESTION, turn("assistant", begun)], max_tokens=30))
        assert (begun + rest).startswith(whole)


@pytest.mark.parametrize("last", [{"role": "assistant", "content": [{"type": "text", "text": ""}]}, turn("assistant", "", "")])
def test_an_empty_message_of_the_assistant_is_where_the_answer_begins(engine, last):
    assert written(engine, [QUESTION, last]) == written(engine, [QUESTION])


def test_an_earlier_message_of_the_assistant_stays_one(engine):
    text = written(engine, [QUESTION, turn("assistant", "A cat."), turn("user", "Where?")])
    assert "A cat.<|im_end|>" in text and text.endswith("assistant\n")


def test_a_system_message_alone_is_answered(engine):
    assert written(engine, [turn("system", "Say hello.")]).endswith("assistant\n")
    assert "".join(engine.chat([turn("system", "Say hello.")], max_tokens=2))
    with pytest.raises(InputError, match="no message"):
        engine.chat([])


def test_a_template_that_refuses_a_conversation_is_an_error_with_its_words(engine, monkeypatch):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('users come first') }}{% endif %}"
    monkeypatch.setattr(engine.processor, "chat_template", template)
    with pytest.raises(InputError, match="users come first"):
        engine.chat([turn("system", "Say hello.")])
    monkeypatch.setattr(
        engine.processor, "chat_template", "{% for message in messages %}{{ message.role }}{% endfor %}{# content #}"
    )
    with pytest.raises(InputError, match="cannot continue"):
        engine.chat([turn("user", "Hello"), turn("assistant", "Well, ")])


def test_the_server_takes_all_of_these(engine):
    with served(engine) as server:
        for messages in (
            [turn("system", "Say hello.")],
            [turn("developer", "Say hello.", name="anna")],
            [turn("user", "Hello", name="bert"), turn("assistant", "Well,", name="vismoe")],
        ):
            answer = server.post({"messages": messages, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
        refused = server.post({"messages": [turn("user", "Hello", name=5)]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[0].name"


def test_the_whole_conversation_reaches_the_engine():
    engine = ScriptedEngine()
    with served(engine) as server:
        assert server.post({"messages": [turn("user", "Hello"), turn("assistant", "Well,")]}).status_code == 200
    ((messages, options),) = engine.calls
    assert [message["role"] for message in messages] == ["user", "assistant"] and options["max_tokens"] is None


# -- files of keys
def keys_of(path, text) -> tuple[str, ...]:
    path.write_text(text, "utf-8")
    parser = ArgumentParser()
    SERVE.add_arguments(parser)
    return serve_options(parser.parse_args(["--api-key-file", str(path)])).api_keys


KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20).filter(lambda key: key[0] != "#")
NO_KEYS = st.sampled_from(["", "   ", "# a comment", "#", "  # key-like", "\t"])


@given(st.lists(st.tuples(KEYS, NO_KEYS), min_size=1, max_size=5))
def test_comments_and_blank_lines_are_no_keys(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "keys.txt"
    text = "".join(f"{between}\n {key} \n" for key, between in lines)
    for written in (text, "\ufeff" + text, text.replace("\n", "\r\n")):
        assert keys_of(path, written) == tuple(key for key, _ in lines)


@given(st.lists(KEYS, max_size=3), st.sampled_from(["two words", "caf\u00e9", "secret # mine", "\x7fkey", "s\x00x"]))
def test_a_bad_line_is_named_by_its_number_and_never_told(tmp_path_factory, before, bad):
    path = tmp_path_factory.getbasetemp() / "bad.txt"

    def told(*lines: str) -> str:
        with pytest.raises(ConfigError, match=f"line {2 + len(before)}:") as refused:
            keys_of(path, "\n".join(["# keys", *lines, "good"]))
        return str(refused.value).replace(str(path), "")

    said = told(*before, bad)
    assert said == told(*["other"] * len(before), bad), "what is said does not depend on the good keys"
    assert not any(word in said for word in bad.split() if len(word) > 3)


@pytest.mark.parametrize("text", ["", "# only a comment\n\n"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="no API key"):
        keys_of(tmp_path / "keys.txt", text)
