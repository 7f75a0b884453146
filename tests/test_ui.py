"""The chat page without a browser: its logic, its drawings, then the running page driven by gradio's own client."""

import dataclasses
import importlib.util
import re
import threading
import time
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_engine import PLAN, FakeEngine
from PIL import Image

from vismoe import load
from vismoe.app import page as page_module
from vismoe.app import ui, widgets
from vismoe.app.heat_map import heat_map
from vismoe.app.memory_view import backends_table, memory_plan
from vismoe.app.page import Page, PageTurn, chosen, shown, turn_at
from vismoe.app.tiers import sources
from vismoe.app.time_line import time_line
from vismoe.engine.stats import PassFigures
from vismoe.errors import BusyError, ConfigError, ContextError, InputError, TransferError
from vismoe.types import Phase

pytestmark = pytest.mark.filterwarnings("ignore:.*:Warning:gradio.queueing")  # pandas deprecations
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason='gradio is missing: pip install "vismoe[serve]"'
)
AGAIN = ui._again
SETTINGS = (256, 0.0, "", 0, 0, 1.0, "", "exact", "4/2", 0.75, "none")  # as the page's widgets stand at first


NAMES = ("max_tokens", "temperature", "system", "top_p", "seed", *"keep selection policy formats retention draft".split())


@pytest.fixture
def picture(tmp_path) -> str:
    Image.new("RGB", (32, 16), "red").save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def slow_words(count=200):
    """An answer of some seconds, and an event that is set at its first word."""
    started = threading.Event()

    def words():
        for _ in range(count):
            yield "word "
            started.set()
            time.sleep(0.02)

    return words(), started


# ------------------------------------------------------------------ the logic
def test_an_answer_streams_and_ends_with_all_that_is_drawn(picture, monkeypatch):
    monkeypatch.setattr(page_module, "REFRESH_S", 0.01)
    engine = FakeEngine(script=[slow_words(10)[0]])
    first, *between, last = Page(engine).answer(PageTurn.of("What is this?", [picture]), (), "me")
    assert first.history[0].answer == "" and first.finished is None
    said = [update.history[0].answer for update in between]
    assert said == sorted(said, key=len) and len(set(said)) > 3
    assert last.history[0].answer == "word " * 10
    assert "75.0%" in last.tiles and "hits" in last.finished.tiers and "<svg" in last.finished.time_line
    assert "data:image/jpeg" in last.finished.pictures


def test_what_the_model_thinks_is_shown_folded_once_it_answers():
    turn = PageTurn("Why?", (), (), reasoning="<b>hm</b>")
    thinking, answered = (shown((each,))[-1]["content"] for each in (turn, dataclasses.replace(turn, answer="So.")))
    assert thinking.startswith("<details open>") and "&lt;b&gt;hm" in thinking
    assert answered.startswith("<details><summary>") and answered.endswith("So.") and turn.messages() == [turn.messages()[0]]


def asked_for(**widgets):
    """What a question asks for, with these values in widgets that otherwise stand as they do at first."""
    return chosen(Page(FakeEngine()).options, {**dict(zip(NAMES, SETTINGS, strict=True)), **widgets})


def test_the_engine_is_asked_with_the_history_and_the_settings_of_this_question(picture):
    engine = FakeEngine()
    page = Page(engine)
    options = asked_for(keep=0.5, selection="uniform", max_tokens=7, temperature=0.5)
    *_, first = page.answer(PageTurn.of("One", [picture]), (), "me", options)
    messages, options = engine.calls[-1]
    assert [part["type"] for part in messages[0]["content"]] == ["image", "text"]
    asked = {name: options[name] for name in ("keep", "selection", "max_tokens", "sample", "temperature", "reuse")}
    assert asked == {"keep": 0.5, "selection": "uniform", "max_tokens": 7, "sample": True, "temperature": 0.5, "reuse": True}
    list(page.answer(PageTurn.of("Two", []), first.history, "me"))
    messages, options = engine.calls[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert options["keep"] is None and not options["sample"]


@pytest.mark.parametrize(
    ("asked", "reaches"),
    [
        (None, (None, None, None)),
        (asked_for(policy="exact", formats="4/2", retention=0.8), ("exact", None, None)),
        (asked_for(policy="hotness", formats="16/4", retention=0.8), ("hotness", "16/4", None)),
        (asked_for(policy="hotness+importance", formats="8/2", retention=0.8), ("hotness+importance", "8/2", 0.8)),
    ],
)
def test_of_the_settings_of_precision_those_count_that_the_policy_asks_for(asked, reaches):
    engine = FakeEngine()
    *_, last = Page(engine).answer(PageTurn.of("Hi", []), (), "me", asked)
    _, options = engine.calls[-1]
    assert (options["policy"], options["formats"], options["retention"]) == reaches
    two = engine.format_names
    shares = f"75.0% {two[0]}, 25.0% {two[1]} (" if len(two) == 2 else "100.0% raw (exact"
    assert f"experts were computed: {shares}" in last.finished.tiers
    assert ("75.0%</b>better format" if len(two) == 2 else "100.0%</b>better format") in last.tiles
    assert "expert pool" in last.finished.plan and "8 of 8" in last.finished.head, "another plan may have been made for it"


def test_sampling_is_asked_for_with_a_temperature_only():
    cold, hot = asked_for(top_p=0.5, seed=3), asked_for(top_p=0.5, seed=3, temperature=0.5)
    assert (cold.sample, cold.top_p, hot.sample, hot.top_p, hot.seed) == (False, None, True, 0.5, 3)
    assert asked_for(temperature=0.5).top_p is None and asked_for(temperature=0.5).seed is None


def test_a_system_prompt_comes_first_and_an_empty_one_is_left_out():
    engine = FakeEngine()
    for system in ("Be brief.", " "):
        list(Page(engine).answer(PageTurn.of("Hi", []), (), "me", system=system))
    assert [[message["role"] for message in messages] for messages, _ in engine.calls] == [["system", "user"], ["user"]]


def test_an_answer_is_asked_for_again_without_the_old_one(picture):
    engine = FakeEngine(script=[["first"], ["second"]])
    page = Page(engine)
    *_, before = page.answer(PageTurn.of("One", [picture]), (), "me")
    *_, after = page.answer(before.history[-1], before.history[:-1], "me")
    assert len(engine.calls[-1][0]) == 1
    assert [turn.answer for turn in after.history] == ["second"]


def test_fewer_patches_are_bright_with_a_smaller_keep(picture):
    *_, all_kept = Page(FakeEngine()).answer(PageTurn.of("What?", [picture]), (), "me", asked_for(keep=1.0))
    *_, half = Page(FakeEngine()).answer(PageTurn.of("What?", [picture]), (), "me", asked_for(keep=0.5))
    assert "all 16 visual tokens" in all_kept.finished.pictures
    assert 'alt="8 of 16 patches kept"' in half.finished.pictures
    *_, none = Page(FakeEngine()).answer(PageTurn.of("No picture?", []), (), "me")
    assert "No image" in none.finished.pictures


def test_updates_are_few_however_many_tokens_come():
    engine = FakeEngine(script=[["x"] * 5000])
    updates = list(Page(engine).answer(PageTurn.of("Go", []), (), "me"))
    assert len(updates) < 20
    assert updates[-1].history[0].answer == "x" * 5000


def test_the_page_follows_a_long_prefill(monkeypatch):
    """Nothing is said yet, and still the figures move, so a closed page is noticed too."""
    monkeypatch.setattr(page_module, "REFRESH_S", 0.01)
    updates = list(Page(FakeEngine(script=[[lambda reply: time.sleep(0.3), "done"]])).answer(PageTurn.of("Go", []), (), "me"))
    assert len([update for update in updates if update.history[0].answer == ""]) > 5


def test_stop_ends_the_answer_of_that_session_only():
    engine = FakeEngine(script=[slow_words()[0]])
    page = Page(engine)
    answer = page.answer(PageTurn.of("Count", []), (), "me")
    while not next(answer).history[0].answer:
        pass
    page.stop("somebody else")
    assert not engine.replies[0].cancelled
    page.stop("me")
    *_, last = answer
    assert 0 < len(engine.replies[0].said) < 200
    assert last.history[0].answer == engine.replies[0].answer
    assert "stopped" in last.finished.time_line
    assert page.running == {}


def test_closing_the_page_cancels_the_answer():
    engine = FakeEngine(script=[slow_words()[0]])
    page = Page(engine)
    answer = page.answer(PageTurn.of("Count", []), (), "me")
    next(answer)
    answer.close()
    assert engine.replies[0].cancelled
    assert page.running == {}


def test_a_second_question_of_a_session_is_refused_and_others_are_answered():
    page = Page(FakeEngine(script=[slow_words()[0]]))
    answer = page.answer(PageTurn.of("Count", []), (), "me")
    next(answer)
    with pytest.raises(BusyError, match="still being written"):
        next(page.answer(PageTurn.of("And?", []), (), "me"))
    *_, last = page.answer(PageTurn.of("Hello?", []), (), "you")
    assert last.history[0].answer == "one two"
    page.stop("me")
    assert list(answer)[-1].finished is not None


def test_an_error_in_the_middle_of_an_answer_is_raised():
    page = Page(FakeEngine(script=[["one", TransferError("the disk is gone")]]))
    with pytest.raises(TransferError, match="the disk is gone"):
        list(page.answer(PageTurn.of("Count", []), (), "me"))
    assert page.running == {}


@pytest.mark.parametrize(
    ("question", "files", "message"),
    [
        ("", [], "no question"),
        ("  ", ["red.png"], "with the picture"),
        ("What?", ["/no/such.png"], "^such.png: the picture is no longer stored"),
    ],
)
def test_what_cannot_be_asked_is_said(question, files, message):
    with pytest.raises(InputError, match=message):
        PageTurn.of(question, files)
    with pytest.raises(InputError, match="no question"):
        PageTurn("What?", (), ()).asked_as(" ")


def test_every_shown_message_belongs_to_its_turn():
    history = (PageTurn("One", ("a.png", "b.png"), (), "1"), PageTurn("Two", (), (), "2"), PageTurn("Three", ("c.png",), ()))
    messages = shown(history)
    assert [turn_at(history, number) for number in range(len(messages))] == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert [message["content"] for message in messages[2:6]] == ["One", "1", "Two", "2"]
    assert turn_at(history[:2], len(messages) - 1) == 2


def test_a_missing_gradio_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "vismoe\[serve\]"'):
        ui.require_gradio()


# ------------------------------------------------------------------ the drawings
def strokes(drawing: str, kind: str, large: bool, low: bool | None = None) -> set[tuple[int, int]]:
    """(layer, expert) of every cell of a kind in a heat map; `large`: those in memory now; `low`: in the second format."""
    paths = re.findall(r'<path class="(vm-\w+)[^"]*" stroke-width="([\d.]+)"[^>]* d="([^"]*)"', drawing.split("vm-rates")[0])
    cells = [path for name, height, path in paths if name == f"vm-{kind}" and low in (None, float(height) < 0.5)]
    found = [cell for path in cells for cell in re.findall(r"M(\d+) (\d+)h([\d.]+)", path)]
    return {(int(row), int(column)) for column, row, width in found if (float(width) > 0.5) == large}


def test_a_heat_map_puts_every_expert_where_it_belongs():
    rng = np.random.default_rng(0)
    residency = rng.choice([0, 1, 2, 255], (5, 9), p=[0.5, 0.3, 0.1, 0.1]).astype(np.uint8)
    hits, misses = rng.poisson(1.0, (2, 5, 9)) * (residency != 255)
    drawing = heat_map(residency, hits, misses, (residency != 0).astype(np.uint8), ["raw"])
    here = np.isin(residency, (1, 2))
    asked = hits + misses > 0
    share = hits / np.maximum(1, hits + misses)
    kinds = {"hit": share == 1, "most": (share >= 0.5) & (share < 1), "some": (share > 0) & (share < 0.5), "miss": share == 0}
    for kind, cells in ((kind, cells & asked) for kind, cells in kinds.items()):
        assert strokes(drawing, kind, large=True) == set(map(tuple, np.argwhere(cells & here).tolist()))
        assert strokes(drawing, kind, large=False) == set(map(tuple, np.argwhere(cells & ~here).tolist()))
    assert strokes(drawing, "idle", large=True) == set(map(tuple, np.argwhere(here & ~asked).tolist()))
    assert strokes(drawing, "pinned", large=True) == set(map(tuple, np.argwhere(residency == 2).tolist()))
    assert f"{here.sum()} of {(residency != 255).sum()} experts are in memory now. Their format: raw" in drawing


def test_a_heat_map_shows_which_of_two_formats_an_expert_is_in():
    residency = np.array([[1, 1, 0, 2], [1, 0, 1, 255]], np.uint8)
    formats = np.array([[1, 2, 0, 2], [2, 0, 1, 255]], np.uint8)
    hits = np.array([[1, 1, 0, 0], [0, 0, 0, 0]])
    drawing = heat_map(residency, hits, np.zeros_like(hits), formats, ["int4", "<2>"])
    assert strokes(drawing, "hit", large=True, low=False) == {(0, 0)}
    assert strokes(drawing, "hit", large=True, low=True) == {(0, 1)}
    assert strokes(drawing, "idle", large=True, low=True) == {(0, 3), (1, 0)}
    assert strokes(drawing, "idle", large=True, low=False) == {(1, 2)}
    assert "half height: in &lt;2&gt;, others in int4" in drawing and "2 in int4, 3 in &lt;2&gt;" in drawing
    assert "3 of 4 in memory (1 in int4, 2 in &lt;2&gt;)" in drawing
    assert "half height" not in heat_map(residency, hits, hits, (formats > 0).astype(np.uint8), ["int8"])


def test_a_heat_map_of_a_large_model_is_light():
    residency = np.ones((48, 128), np.uint8)
    hits = np.random.default_rng(0).poisson(1.0, (48, 128))
    assert len(heat_map(residency, hits, hits.T.reshape(48, 128), 1 + (hits > 1), ["int4", "int2"])) < 120_000


@pytest.fixture
def figures(picture):
    engine = FakeEngine(script=[["a"] * 10])
    *_, _ = Page(engine).answer(PageTurn.of("What is this?", [picture]), (), "me")
    return engine.replies[0].figures


def test_a_time_line_has_a_bar_for_everything_in_order(figures):
    drawing = time_line(figures)
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", drawing)[0])
    bars = [group.findall("rect")[0] for group in svg.findall("g")]
    assert [bar.get("class") for bar in bars] == ["vm-encode", "vm-prefill", *["vm-decode"] * 10]
    ends = [float(bar.get("x")) + float(bar.get("width")) for bar in bars]
    assert ends[:-1] == pytest.approx([float(bar.get("x")) for bar in bars[1:]], abs=0.2) and ends[-1] == pytest.approx(1000)
    feet = [group.findall("rect")[1].get("height") for group in svg.findall("g")[1:]]
    assert feet == ["20"] * 11  # a fifth of each pass was stalled
    assert "encode 250 ms, prefill 500 ms, decode 1.00 s, stall 300 ms" in drawing
    assert "1 of 1 images had to be encoded" in drawing and "ended by the model" in drawing


def test_a_long_answer_has_as_many_bars_as_can_be_seen():
    engine = FakeEngine(script=[["a"] * 3000])
    list(Page(engine).answer(PageTurn.of("Go", []), (), "me"))
    drawing = time_line(engine.replies[0].figures)
    assert 100 < drawing.count("<g>") <= 401
    assert "tokens 2 to 9:" in drawing and "3001" in drawing


def test_sources_add_up_the_passes_of_a_phase():
    passes = [PassFigures(phase, 0.0, 0.5, 2, 0.1, 3, 4, 50, 60) for phase in (Phase.PREFILL, Phase.DECODE, Phase.DECODE)]
    found = sources(passes, Phase.DECODE)
    assert (found.tokens, found.hits, found.misses, found.bytes_read, found.bytes_copied) == (4, 6, 8, 100, 120)
    assert (found.seconds, found.stall_seconds) == pytest.approx((1.0, 0.2))


def test_what_was_settled_at_start_is_shown_and_escaped():
    drawing = memory_plan(PLAN)
    assert "9.8 KiB" in drawing and "expert pool" in drawing and "a &lt;note&gt;" in drawing
    assert "a detail" not in drawing  # its bytes are counted already
    assert "&lt;b&gt;" in backends_table({"kernels": "<b>fast</b>"})


# ------------------------------------------------------------------ the running page
@pytest.fixture(scope="module")
def running():
    """(engine, client) of a page that is being served."""
    pytest.importorskip("gradio", reason='gradio is missing: pip install "vismoe[serve]"')
    from gradio_client import Client

    from vismoe.app.ui_serving import served

    engine = FakeEngine()
    with served(Page(engine)) as address:
        yield engine, Client(address, verbose=False, analytics_enabled=False)


def last(job):
    """What an answer ends with, before the update that changes nothing."""
    *_, outputs, behind = job
    assert all(one["__type__"] == "update" and "value" not in one for one in behind), (
        "gradio sends it again, perhaps into another conversation"
    )
    return outputs


def spoken(outputs) -> list[str]:
    return [message["content"][0].get("text") for message in outputs[1]]


@needs_gradio
def test_a_question_with_an_image_is_answered_and_repeated_through_the_page(running, picture):
    from gradio_client import handle_file

    engine, client = running
    client.predict(api_name="/forget")
    asked = {"text": "What is this?", "files": [handle_file(picture)]}
    outputs = last(client.submit(asked, *SETTINGS, api_name="/ask"))
    assert spoken(outputs) == [None, "What is this?", "one two"]
    assert "75.0%" in str(outputs)
    engine.script = [["three"]]
    outputs = last(client.submit(9, 0.0, "Be brief.", 0.5, 3, 0.5, "", "importance", "8/2", 0.9, "none", api_name="/again"))
    assert spoken(outputs) == [None, "What is this?", "three"]
    ((system, message), options) = engine.calls[-1]
    assert system == {"role": "system", "content": "Be brief."} and (options["top_p"], options["seed"]) == (None, 3)
    assert message["content"][0]["image"].size == (32, 16) and options["keep"] == 0.5 and options["max_tokens"] == 9
    assert (options["policy"], options["formats"], options["retention"]) == ("importance", "8/2", 0.9)
    assert "75.0% int8, 25.0% int2" in str(outputs) and "half height: in int2" in str(outputs)


@needs_gradio
def test_the_history_of_a_session_is_kept_and_forgotten(running):
    engine, client = running
    client.predict(api_name="/forget")
    for question in ("One", "Two"):
        client.predict({"text": question, "files": []}, *SETTINGS, api_name="/ask")
    assert [message["role"] for message in engine.calls[-1][0]] == ["user", "assistant", "user"]
    client.predict(api_name="/forget")
    client.predict({"text": "Three", "files": []}, *SETTINGS, api_name="/ask")
    assert len(engine.calls[-1][0]) == 1


@needs_gradio
@pytest.mark.parametrize(
    ("script", "says"),
    [
        (ContextError("5000 tokens, planned for <4096>"), "5000 tokens, planned for &lt;4096&gt;"),
        (["some", TransferError("the disk is gone")], "the disk is gone"),
        (ValueError("a secret of ours"), "internal error of the chat page (ValueError)"),
    ],
)
def test_an_error_is_told_below_a_conversation_that_stays_and_the_question_is_not_lost(running, script, says):
    engine, client = running
    client.predict(api_name="/forget")
    engine.script = [["fine"], script, ["again"]]
    client.predict({"text": "Hello", "files": []}, *SETTINGS, api_name="/ask")
    outputs = last(client.submit({"text": "Hi", "files": []}, *SETTINGS, api_name="/ask"))
    box, _, notice, *_ = outputs
    assert "Hi" in str(box) and says in notice and 'role="alert"' in notice and "secret" not in notice
    assert spoken(outputs) == ["Hello", "fine"]
    first, *rest = client.submit({"text": "Hi", "files": []}, *SETTINGS, api_name="/ask")
    outputs = last(rest)
    assert first[2] == "" and spoken(outputs) == ["Hello", "fine", "Hi", "again"]


@needs_gradio
def test_a_file_that_is_no_picture_is_named_and_nothing_is_answered(running, tmp_path):
    from gradio_client import handle_file

    engine, client = running
    client.predict(api_name="/forget")
    asked = len(engine.calls)
    (tmp_path / "notes.txt").write_text("hello")
    outputs = last(
        client.submit({"text": "What?", "files": [handle_file(str(tmp_path / "notes.txt"))]}, *SETTINGS, api_name="/ask")
    )
    assert outputs[2].startswith('<p class="vm-error" role="alert">notes.txt: not an image') and outputs[1] == []
    assert len(engine.calls) == asked


@needs_gradio
def test_answer_again_is_active_once_there_is_an_answer_and_no_longer_than_it(monkeypatch):
    """gradio's client does not see buttons: what the handlers give to this one."""
    given = []
    monkeypatch.setattr(ui, "_again", lambda history: given.append(len(history)) or AGAIN(history))
    from gradio_client import Client

    from vismoe.app.ui_serving import served

    engine = FakeEngine(script=[ContextError("too long"), ["fine"], TransferError("the disk is gone")])
    with served(Page(engine)) as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        for _ in range(3):
            client.submit({"text": "Hi", "files": []}, *SETTINGS, api_name="/ask").result()
        client.predict(api_name="/forget")
    assert given == [0, 1, 1, 0]
    assert [AGAIN(history).interactive for history in ((), (PageTurn("Hi", (), (), "fine"),))] == [False, True]


def settings_of(engine):
    import gradio as gr

    with gr.Blocks():
        return widgets._settings(Page(engine))[1]


@needs_gradio
def test_only_policies_that_can_serve_are_offered_with_the_pairs_that_they_can_serve():
    every = widgets.offers(FakeEngine())
    assert list(every) == ["exact", "hotness", "importance", "hotness+importance"] and "4/2" in every["importance"]
    some = widgets.offers(FakeEngine(packed={"16", "4"}))
    assert some == {"exact": [], **{policy: ["16/4"] for policy in every if policy != "exact"}}
    none = FakeEngine(packed=set())
    shown_now = settings_of(none)
    assert not any(shown_now[name].visible for name in ("policy", "formats", "retention", "draft"))
    assert shown_now["keep"].visible


@needs_gradio
def test_without_packed_experts_no_policy_is_offered():
    with load(memory="100%", context=256, store="none") as engine:
        assert widgets.offers(engine) == {"exact": []}
        names = [value for _, value in settings_of(engine)["selection"].choices]
    assert names == ["", "affinity", "saliency", "distinct", "visionzip", "uniform", "random"]


@needs_gradio
def test_a_new_conversation_during_an_answer_starts_empty(running):
    engine, client = running
    words, started = slow_words()
    engine.script = [words, ["fine"]]
    client.submit({"text": "Talk", "files": []}, *SETTINGS, api_name="/ask")
    assert started.wait(20)
    client.predict(api_name="/forget")
    client.predict({"text": "Hello", "files": []}, *SETTINGS, api_name="/ask")
    assert len(engine.calls[-1][0]) == 1
    assert len(engine.replies[-2].said) < 200
