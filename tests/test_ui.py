"""The chat page, first its logic alone, then the running page driven by gradio's own client; a scripted engine answers."""

import importlib.util
import threading
import time

import pytest
from fake_engine import FakeEngine
from PIL import Image

from vismoe.app import page as page_module
from vismoe.app import ui
from vismoe.app.page import Page
from vismoe.errors import ConfigError, ContextError, InputError, TransferError

pytestmark = pytest.mark.filterwarnings("ignore:.*:Warning:gradio.queueing")  # pandas deprecations
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason='gradio is missing: pip install "vismoe[serve]"'
)


@pytest.fixture
def picture(tmp_path) -> str:
    Image.new("RGB", (32, 16), "red").save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


# ------------------------------------------------------------------ the logic
def test_an_answer_streams_and_ends_with_all_figures(picture, monkeypatch):
    monkeypatch.setattr(page_module, "REFRESH_S", 0.0)
    updates = list(Page(FakeEngine()).answer("What is this?", [picture], [], "me"))
    assert [text for text, _, _ in updates] == ["", "one", "one two", "one two"]
    assert "75.0%" in updates[-1][2]
    assert "prefill" in updates[-1][2]
    (question, answer) = updates[-1][1]
    assert [part["type"] for part in question["content"]] == ["image", "text"]
    assert answer == {"role": "assistant", "content": "one two"}
    assert updates[-2][1] == []


def test_keep_goes_to_the_engine_and_what_was_kept_is_shown(picture):
    engine = FakeEngine()
    *_, (_, _, shown) = Page(engine).answer("What is this?", [picture], [], "me", keep=0.5)
    assert engine.calls[0][1]["keep"] == 0.5
    assert shown.count('alt="kept visual tokens" src="data:image/jpeg;base64,') == 1
    *_, (_, _, shown) = Page(engine).answer("And without?", [], [], "me")
    assert "kept visual tokens" not in shown


def test_updates_are_few_however_many_tokens_come(picture):
    engine = FakeEngine(script=[["x"] * 5000])
    updates = list(Page(engine).answer("Go", [], [], "me"))
    assert len(updates) < 20
    assert updates[-1][0] == "x" * 5000


def test_stop_ends_the_answer_of_that_session_only(monkeypatch):
    monkeypatch.setattr(page_module, "REFRESH_S", 0.0)
    page = Page(FakeEngine(script=[["one", " two", " three"]]))
    answer = page.answer("Count", [], [], "me")
    assert [next(answer)[0], next(answer)[0]] == ["", "one"]
    page.stop("somebody else")
    assert next(answer)[0] == "one two"
    page.stop("me")
    text, history, _ = list(answer)[-1]
    assert text == "one two"
    assert history[-1]["content"] == "one two"
    assert page.running == {}


def test_closing_the_page_cancels_the_answer():
    page = Page(FakeEngine())
    answer = page.answer("Count", [], [], "me")
    next(answer)
    reply = page.running["me"].reply
    answer.close()
    assert reply.cancelled
    assert page.running == {}


@pytest.mark.parametrize(
    ("question", "files", "message"),
    [("", [], "no question"), ("  ", ["red.png"], "beside the picture"), ("What?", ["/no/such.png"], "no such file")],
)
def test_what_cannot_be_asked_is_said_before_the_engine_is_troubled(question, files, message):
    engine = FakeEngine()
    with pytest.raises(InputError, match=message):
        list(Page(engine).answer(question, files, [], "me"))
    assert engine.calls == []


def test_a_missing_gradio_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "vismoe\[serve\]"'):
        ui.require_gradio()


# ------------------------------------------------------------------ the running page
@pytest.fixture(scope="module")
def running():
    """(engine, client) of a page that is being served."""
    pytest.importorskip("gradio", reason='gradio is missing: pip install "vismoe[serve]"')
    from gradio_client import Client

    engine = FakeEngine()
    blocks = ui.build(Page(engine))
    _, address, _ = blocks.launch(server_name=ui.ADDRESS, prevent_thread_lock=True, quiet=True)
    yield engine, Client(address, verbose=False, analytics_enabled=False)
    blocks.close()


@needs_gradio
def test_a_question_with_an_image_is_answered_through_the_page(running, picture):
    from gradio_client import handle_file

    engine, client = running
    _, chat, figures = client.predict({"text": "What is this?", "files": [handle_file(picture)]}, [], 1.0, api_name="/ask")
    assert "one two" in str(chat[-1])
    assert "75.0%" in figures
    ((*_, message), _) = engine.calls[-1]
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][0]["image"].size == (32, 16)


@needs_gradio
def test_the_history_of_a_session_is_kept_and_forgotten_on_reset(running):
    engine, client = running
    client.predict(api_name="/reset")
    client.predict({"text": "One", "files": []}, [], 1.0, api_name="/ask")
    client.predict({"text": "Two", "files": []}, [], 1.0, api_name="/ask")
    assert [message["role"] for message in engine.calls[-1][0]] == ["user", "assistant", "user"]
    client.predict(api_name="/reset")
    client.predict({"text": "Three", "files": []}, [], 1.0, api_name="/ask")
    assert len(engine.calls[-1][0]) == 1


@needs_gradio
@pytest.mark.parametrize("error", [ContextError("5000 tokens, planned for 4096"), TransferError("the disk is gone")])
def test_our_errors_reach_the_page_as_their_message(running, error):
    engine, client = running
    engine.script = [error]
    with pytest.raises(Exception, match=str(error)):
        client.predict({"text": "Hi", "files": []}, [], 1.0, api_name="/ask")


def slow_words():
    """An answer of four seconds, and an event that is set at its first word."""
    started = threading.Event()

    def words():
        for _ in range(200):
            yield "word "
            started.set()
            time.sleep(0.02)

    return words(), started


@needs_gradio
def test_the_stop_button_works_while_an_answer_is_streaming(running):
    engine, client = running
    words, started = slow_words()
    engine.script = [words]
    job = client.submit({"text": "Talk", "files": []}, [], 1.0, api_name="/ask")
    assert started.wait(20)
    client.predict(api_name="/stop")
    job.result(timeout=20)
    said = engine.replies[-1].said
    assert 0 < len(said) < 150


@needs_gradio
def test_a_new_conversation_during_an_answer_starts_empty(running):
    engine, client = running
    words, started = slow_words()
    engine.script = [words, ["fine"]]
    client.submit({"text": "Talk", "files": []}, [], 1.0, api_name="/ask")
    assert started.wait(20)
    client.predict(api_name="/reset")
    client.predict({"text": "Hello", "files": []}, [], 1.0, api_name="/ask")
    assert len(engine.calls[-1][0]) == 1
    assert len(engine.replies[-2].said) < 200


@needs_gradio
def test_the_page_listens_on_this_machine_only_and_a_taken_port_is_said(running):
    _, client = running
    port = int(client.src.rstrip("/").rsplit(":", 1)[1])
    assert client.src.startswith("http://127.0.0.1:")
    with pytest.raises(ConfigError, match=rf"port {port} .*--port {port + 1}"):
        ui.serve(FakeEngine(), port)
