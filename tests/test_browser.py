"""`vismoe ui` with the demo model in headless Chromium: what a person does with the page, and what they see.

A quarter of the experts in memory and an emulated link that is slow enough to watch. No page may report an error on its console,
or ask another machine for anything.
"""

import contextlib
import importlib.util
import json
import queue
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clips import clip
from fake_engine import FakeEngine
from PIL import Image

from vismoe.cli import main as cli
from vismoe.engine.engine import demo_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [package for package in ("playwright", "gradio") if importlib.util.find_spec(package) is None]
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian, Ubuntu: sudo apt-get install chromium)"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}; pip install -e '.[dev]'"),
    pytest.mark.filterwarnings("ignore:.*:Warning:gradio.queueing"),  # pandas deprecations
]
IMAGES = Path(__file__).parent.parent / "assets" / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-features=SpareRendererForSitePerProcess"]  # a process that waits for a page which nobody opens
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
USED = {"button", "combobox", "link", "listbox", "searchbox", "slider", "spinbutton", "tab", "textbox"}
WAIT_MS = 60_000  # a busy machine is not a failure
WHOLE = json.loads((IMAGES / "pictures.json").read_text())["demo.png"]["answer"]
PUT = """(box, [event, name, bytes]) => {
    const carried = new DataTransfer();
    carried.items.add(new File([new Uint8Array(bytes)], name, {type: "image/png"}));
    const details = {bubbles: true, cancelable: true};
    return !box.dispatchEvent(event === "paste" ? new ClipboardEvent(event, {...details, clipboardData: carried})
                                                : new DragEvent(event, {...details, dataTransfer: carried}));
}"""  # whether somebody has taken it; else the browser does with it what browsers do


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Where `vismoe ui` serves, in a thread of this process; test_ui_serving.py says how one of its own ends."""
    from vismoe.app import ui_serving

    over, told = threading.Event(), queue.SimpleQueue[str]()

    def serve(page, port, catalog) -> int:
        with ui_serving.served(page, port, catalog) as address:
            told.put(address)
            over.wait()
        page.engine.close()
        return 0

    store = str(tmp_path_factory.mktemp("store"))
    assert cli.main(["pack", "--formats", "int4", "--out", store]) == 0
    slow = ["--memory", "25%", "--emulated-link-bytes-per-s", "16MB", "--misses", "wait"]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as other:
        patch.setattr(ui_serving, "serve", serve)
        patch.setattr("vismoe.flags.ctrl_c_exits", lambda arguments: contextlib.nullcontext())  # only a main thread hears signals
        ended = other.submit(cli.main, ["ui", str(demo_model()), "--port", "0", "--store", store, *slow])
        ended.add_done_callback(lambda done: told.put(""))
        try:
            address = told.get()
            assert address, "vismoe ui ended"
            yield address
        finally:
            over.set()
        assert ended.result(30) == 0


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield Profiles(browser)
        browser.close()


class Profiles:
    """Profiles of a browser. A visitor gets one that an earlier one has left, empty: only the page's compiled code, three of the
    four seconds of a visit, is still there."""

    def __init__(self, browser):
        self._browser, self._left = browser, {DESKTOP["width"]: [], PHONE["width"]: []}

    def take(self, size: dict[str, int]):
        left = self._left[size["width"]]
        return left.pop() if left else self._browser.new_context(viewport=size, has_touch=size is PHONE)

    def leave(self, context, size: dict[str, int], address: str) -> None:
        for page in context.pages:
            page.close()
        page = context.new_page()
        origin = {"origin": address.rstrip("/"), "storageTypes": "all"}
        context.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
        page.close()
        self._left[size["width"]].append(context)


class Visitor:
    """A person with a browser of their own at the page."""

    def __init__(self, browser: Profiles, address: str, size: dict[str, int]):
        self.context, self.size = browser.take(size), size
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked_back: list[str] = []  # what the page wants confirmed, or answered
        self.agrees, self.answers_with = True, ""
        self.address = address
        self.watched(self.page)
        self.page.goto(address)
        self.box = self.page.locator("#question textarea")
        self.page.locator("#question textarea:visible, #models:visible").first.wait_for()

    def watched(self, page):
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", self._reply)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self._local(asked.url, self.address))
        return page

    def _local(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.complaints.append(f"asked for {url}")

    def _reply(self, dialog) -> None:
        self.asked_back.append(dialog.message)
        dialog.accept(self.answers_with) if self.agrees else dialog.dismiss()

    def reload(self) -> None:
        self.page.reload()
        self.box.wait_for()
        self._without_leaving()

    def leave(self) -> None:
        """For a server that ends before its visitor."""
        self.page.goto("about:blank")
        self._without_leaving()

    def _without_leaving(self) -> None:
        """gradio complains about its connection when its page is left."""
        left = ("AbortError", "Connection errored out")
        self.complaints[:] = [said for said in self.complaints if not any(word in said for word in left)]

    def titles(self) -> list[str]:
        return self.page.locator("#shelf li").all_inner_texts()

    def nameless(self, least: int = 11) -> list[str]:
        """What a screen reader cannot name, of all that can be used."""
        inspector = self.context.new_cdp_session(self.page)
        nodes = inspector.send("Accessibility.getFullAXTree")["nodes"]
        used = [node for node in nodes if node.get("role", {}).get("value") in USED]
        assert len(used) >= least
        bare = [node["backendDOMNodeId"] for node in used if not node.get("name", {}).get("value", "").strip()]
        return [inspector.send("DOM.getOuterHTML", {"backendNodeId": node})["outerHTML"][:300] for node in bare]

    def attach(self, name: str) -> None:
        self.page.locator("#question input[type=file]").set_input_files(IMAGES / name)
        self.page.locator("#question .thumbnail-item img, #question img").first.wait_for()

    def ask(self, question: str) -> None:
        self.box.fill(question)
        self.box.press("Enter")

    def tell(self, *, contains: str = "", number: int = 1) -> str:
        """The answer with this number, once it has this in it and, without a condition, once it is complete."""
        answer = self.page.get_by_test_id("bot").nth(number - 1)
        if contains:
            answer.filter(has_text=contains).wait_for()
        else:
            answer.wait_for()
            self.page.get_by_test_id("submit-button").wait_for()
        return answer.inner_text().strip()

    def machine(self, words: str) -> str:
        """The page of the machine, once these words are on it."""
        self.page.get_by_role("tab", name="The machine at work").click()
        panel = self.page.locator(".vm-panel", has_text=re.compile(words)).first
        panel.wait_for()
        text = panel.inner_text()
        self.page.get_by_role("tab", name="Chat").click()
        return text

    def unfold(self, fold: str) -> None:
        self.page.get_by_role("button", name=fold).click()

    def keep(self, share: str) -> None:
        """Types it until it stays: gradio writes the first value into a field once more, soon after its fold was opened."""
        number = self.page.get_by_label("number input for Picture detail")
        for _ in range(20):
            number.fill(share)
            number.press("Tab")
            self.page.wait_for_timeout(500)
            if number.input_value() == share:
                return
        raise AssertionError(f"the field does not keep {share}: {number.input_value()}")

    def choose(self, setting: str, option: str) -> None:
        self.page.locator(f"#{setting} input").click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def shows(self, setting: str, option: str) -> None:
        self.page.wait_for_function(f"document.querySelector('#{setting} input').value == '{option}'")

    def fits(self) -> bool:
        return self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def visit(browser, address):
    """Makes visitors, of another page if they are given its address; at the end none of them may have had a complaint."""
    visitors = []

    def make(size=DESKTOP, at=address) -> Visitor:
        visitors.append(Visitor(browser, at, size))
        return visitors[-1]

    yield make
    complaints = [list(visitor.complaints) for visitor in visitors]
    for visitor in visitors:
        browser.leave(visitor.context, visitor.size, visitor.address)
    assert complaints == [[]] * len(visitors)


@pytest.mark.budget(60)
def test_a_picture_is_uploaded_asked_about_followed_up_and_looked_at_again_with_fewer_patches(visit):
    me = visit()
    me.attach("demo.png")
    me.ask("What is in the picture?")
    assert me.tell() == WHOLE
    assert "1 of 1 images had to be encoded" in me.machine("ended by the model")
    assert "all 64 visual tokens" in me.machine("visual tokens")

    me.ask("What does the sign say?")
    assert me.tell(number=2) == 'It says "MENU".'
    said = me.machine("0 of 1 images had to be encoded")
    known, all_of_it = map(int, re.search(r"(\d+) of (\d+) tokens of the question were cached", said).groups())
    assert 64 < known < all_of_it

    me.unfold("Quality and speed")
    me.keep("0.5")
    me.page.get_by_role("button", name="Answer again").click()
    assert "32 of 64 patches kept" in me.machine("32 of 64")
    assert "MENU" in me.tell(number=2)
    assert me.page.get_by_test_id("bot").count() == 2

    me.page.get_by_role("button", name="New conversation").click()
    me.page.get_by_test_id("bot").first.wait_for(state="detached")
    assert "No image" in me.machine("No image")


def test_who_decides_formats_is_chosen_for_the_next_question_and_what_cannot_be_is_said(visit):
    me = visit()
    me.unfold("Quality and speed")
    formats, retention = me.page.locator("#formats"), me.page.locator("#retention")
    me.page.locator("#policy").wait_for()
    assert formats.count() == retention.count() == 0, "there is nothing to choose"
    me.choose("policy", "better where the question needs it")
    me.shows("formats", "unchanged, the rest 4 bit")  # in place of a pair that cannot serve
    retention.wait_for()
    me.choose("formats", "4 bit, the rest left out")
    me.choose("policy", "the same for all")
    formats.wait_for(state="detached")
    me.choose("policy", "better where the question needs it")
    me.shows("formats", "4 bit, the rest left out")  # a pair that can serve stays
    me.choose("formats", "unchanged, the rest 4 bit")
    me.page.get_by_role("button", name="What does the sign say?").click()
    assert me.tell(contains="OPEN") == 'It says "OPEN".'
    assert re.search(r"\d% raw, [\d.]+% int4 \(importance: raw/int4, 75% of", me.machine("experts were computed"))
    assert re.search(r"\d+ in raw, \d+ in int4", me.machine("half height: in int4, others in raw"))

    me.page.locator("#formats input").click()
    assert [option.strip("\n ✓") for option in me.page.locator("[role=option]").all_inner_texts()] == [
        "unchanged, the rest 4 bit",
        "4 bit, the rest left out",
    ]  # int4 is packed
    me.page.keyboard.press("Escape")


def test_an_error_is_read_below_a_conversation_that_stays(visit):
    me = visit()
    assert me.page.get_by_role("button", name="Answer again").is_disabled()
    me.page.get_by_role("button", name="What does the sign say?").click()
    assert me.tell(contains="OPEN") == 'It says "OPEN".'
    me.page.get_by_role("button", name="Answer again", disabled=False).wait_for()  # it becomes so after the answer's last word
    long = "word " * 4000
    me.ask(long)
    notice = me.page.locator("#notice", has_text="the model's own limit is 4096")
    notice.wait_for()
    assert me.box.input_value() == long and me.page.get_by_test_id("bot").count() == 1
    assert me.page.get_by_test_id("bot").is_visible() and not me.page.locator("#conversation .error").is_visible()
    below = notice.bounding_box()["y"] >= me.page.locator("#conversation").bounding_box()["y"]
    assert below and "smaller images" in notice.inner_text(), "the sign is in the conversation"
    me.ask("What does the sign say?")
    assert me.tell(number=2) == 'It says "OPEN".' and notice.count() == 0


def test_a_picture_dropped_or_pasted_anywhere_is_attached_and_the_browser_stays(visit, address):
    me = visit()
    picture = list((IMAGES / "sign.png").read_bytes())
    for number, where in enumerate(["#conversation", "h1", "#temperature", "#max-tokens input", "body"]):
        for event in ("dragenter", "dragover", "drop"):
            assert me.page.locator(where).first.evaluate(PUT, [event, "dropped.png", picture]), "the browser would open it"
        me.page.locator("#question img").nth(number).wait_for()
    me.page.get_by_role("tab", name="The machine at work").click()
    me.page.locator(".vm-panel:visible").first.evaluate(PUT, ["drop", "dropped.png", picture])
    me.page.locator("#question img").nth(5).wait_for()  # where it can be seen
    assert me.page.locator("h1").evaluate(PUT, ["paste", "pasted.png", picture])
    me.page.locator("#question img").nth(6).wait_for()
    me.page.locator("h1").evaluate(
        "box => box.dispatchEvent(new DragEvent('drop', {bubbles: true, dataTransfer: new DataTransfer()}))"
    )
    me.page.get_by_text("what was dropped is not a file").wait_for()
    assert me.page.url == address and me.page.locator("#question img").count() == 7


def test_a_file_that_is_refused_is_said_before_any_answer(visit, tmp_path):
    me = visit()
    (tmp_path / "large.png").write_bytes(bytes(64 * 2**20 + 1))
    choose = me.page.locator("#question input[type=file]")
    choose.set_input_files(tmp_path / "large.png")
    refused = me.page.locator("#refused", has_text="large.png is larger than 64 MiB")
    refused.wait_for()
    me.ask("What is in the picture?")
    me.page.locator("#refused", has_text="Not sent, because nothing was attached").wait_for()
    assert me.page.get_by_test_id("user").count() == 0 and me.box.input_value() == "What is in the picture?"
    choose.set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"})
    refused.wait_for(state="detached")
    me.ask("What is this?")
    me.page.get_by_text("notes.txt: not an image that can be read").wait_for()
    assert me.page.get_by_test_id("bot").count() == 0 and me.box.input_value() == "What is this?"


def test_nothing_is_asked_while_a_file_is_on_its_way_or_after_it_was_lost(visit):
    me = visit()
    waiting = []
    me.page.route("**/upload?*", lambda route: waiting.append(route))
    me.page.locator("#question input[type=file]").set_input_files(IMAGES / "sign.png")
    me.ask("What does the sign say?")
    me.page.locator("#refused", has_text="Waiting for the upload").wait_for()
    assert me.page.get_by_test_id("user").count() == 0
    waiting.pop().continue_()
    assert me.tell(contains="OPEN") == 'It says "OPEN".'

    me.page.unroute("**/upload?*")
    me.page.route("**/upload?*", lambda route: route.fulfill(status=507, body="no room"))
    me.page.locator("#question input[type=file]").set_input_files(IMAGES / "many.png")
    me.page.locator("#refused", has_text="the page's server refused it (HTTP 507)").wait_for()
    me.ask("How many dogs are there?")
    me.page.locator("#refused", has_text="Not sent, because").wait_for()
    assert me.page.get_by_test_id("bot").count() == 1
    me.box.press("Enter")  # who has read it may ask without the file
    me.tell(number=2)
    assert me.page.locator("#refused", has_text="Not sent").count() == 0
    me.complaints[:] = [said for said in me.complaints if "507" not in said]


def test_a_long_answer_is_watched_and_stopped(visit):
    me = visit()
    me.page.get_by_role("button", name="What is in the picture?").click()
    assert "Now" in me.machine(r"\d%\s*hit rate")  # while it is being read
    me.tell(contains="There is")
    me.page.get_by_role("button", name="Stop").click()
    said = me.tell()
    assert WHOLE.startswith(said) and len(said) < len(WHOLE)
    assert "stopped" in me.machine("stopped")


def test_esc_stops_an_answer_and_nothing_else(visit):
    me = visit()
    me.page.keyboard.press("Escape")
    me.page.get_by_role("button", name="What is in the picture?").click()
    me.tell(contains="There is")
    me.page.keyboard.press("Escape")
    said = me.tell()
    assert WHOLE.startswith(said) and len(said) < len(WHOLE)
    me.box.fill("And now?")
    me.page.keyboard.press("Escape")
    assert me.box.input_value() == "And now?" and me.page.get_by_test_id("bot").count() == 1


def test_a_conversation_is_cleared_after_a_confirmation_only(visit):
    me = visit()
    me.page.get_by_role("button", name="What does the sign say?").click()
    me.tell(contains="OPEN")
    me.page.get_by_test_id("submit-button").wait_for()
    me.agrees = False
    me.page.get_by_role("button", name="Clear").click()
    assert len(me.asked_back) == 1 and me.page.get_by_test_id("bot").count() == 1
    me.agrees = True
    me.page.get_by_role("button", name="Clear").click()
    me.page.get_by_test_id("bot").first.wait_for(state="detached")
    me.page.keyboard.press("Control+Shift+O")
    assert len(me.asked_back) == 2, "there is nothing to lose"


def test_conversations_are_listed_reopened_with_their_pictures_after_a_reload_and_deleted(visit):
    me = visit()
    me.attach("demo.png")
    me.ask("What does the sign say?")
    assert me.tell() == 'It says "MENU".'
    me.page.locator("#shelf [aria-current]", has_text="What does the sign say?").wait_for()
    me.page.get_by_role("button", name="New conversation").click()
    me.page.get_by_test_id("bot").first.wait_for(state="detached")
    assert me.asked_back == [], "it is kept"
    me.page.get_by_role("button", name="How many dogs are there?").click()
    me.tell(contains="Three")
    me.page.locator("#shelf [aria-current]", has_text="How many dogs are there?").wait_for()
    assert me.titles() == ["How many dogs are there?", "What does the sign say?"]

    me.reload()
    assert me.tell(contains="Three") == "Three.", "the page shows again what it showed"
    me.page.locator("#shelf li").nth(1).click()
    assert me.tell(contains="MENU") == 'It says "MENU".'
    me.page.locator("#conversation .user img").wait_for()
    me.ask("What is in the picture?")
    assert me.tell(number=2) == WHOLE, "it is asked on about the same picture"
    me.page.wait_for_function("document.querySelector('#shelf li').innerText.includes('sign')")

    me.page.get_by_role("button", name="Delete").click()
    me.page.get_by_test_id("bot").first.wait_for(state="detached")
    me.page.wait_for_function("document.querySelectorAll('#shelf li').length == 1")
    me.reload()
    me.box.wait_for()
    me.page.locator("#shelf li").first.wait_for()
    assert me.titles() == ["How many dogs are there?"] and len(me.asked_back) == 1


def test_a_video_and_a_document_are_asked_about_and_come_back_after_a_reload(visit, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(clip(frames=8))
    Image.open(IMAGES / "demo.png").convert("RGB").save(tmp_path / "page.pdf", "PDF", resolution=144)
    me = visit()
    me.page.locator("#question input[type=file]").set_input_files([tmp_path / "clip.mp4", tmp_path / "page.pdf"])
    me.page.wait_for_function("document.querySelectorAll('#question [role=listitem]').length == 2")
    me.ask("What is in the picture?")
    assert me.tell()
    me.machine("visual tokens were kept")
    assert me.page.locator(".vm-pictures figure").count() == 3, "two moments, and a page"
    me.page.locator("#conversation .user video").wait_for()
    me.page.locator("#shelf [aria-current]").wait_for()
    me.reload()
    me.page.locator("#conversation .user video").wait_for()
    me.ask("Why?")
    assert me.tell(number=2)


def test_a_conversation_is_renamed_and_saved_as_files(visit):
    me = visit()
    me.page.get_by_role("button", name="What does the sign say?").click()
    me.tell(contains="OPEN")
    me.answers_with = "A sign"
    me.page.get_by_role("button", name="Rename").click()
    me.page.locator("#shelf li", has_text="A sign").wait_for()
    with me.page.expect_download() as saved:
        me.page.get_by_role("button", name="Save as JSON").click()
    assert saved.value.suggested_filename == "A-sign.json"
    whole = json.loads(Path(saved.value.path()).read_text())
    (turn,) = whole["turns"]
    assert (whole["title"], turn["question"], turn["answer"]) == ("A sign", "What does the sign say?", 'It says "OPEN".')
    assert turn["pictures"][0]["data"].startswith("data:image/png;base64,")
    with me.page.expect_download() as saved:
        me.page.get_by_role("button", name="Save as Markdown").click()
    text = Path(saved.value.path()).read_text()
    assert text.startswith("# A sign\n") and 'It says "OPEN".' in text and "Picture: sign.png" in text


def test_two_windows_do_not_overwrite_each_other(visit):
    me = visit()
    me.page.get_by_role("button", name="What does the sign say?").click()
    me.tell(contains="OPEN")
    me.page.locator("#shelf li").wait_for()
    first, me.page = me.page, me.watched(me.context.new_page())
    me.box = me.page.locator("#question textarea")
    me.page.goto(first.url)
    me.page.locator("#shelf li").click()
    me.tell(contains="OPEN")
    me.ask("Is there a cat?")
    me.tell(number=2)
    me.page.wait_for_function("document.querySelectorAll('#shelf li').length == 1")
    first.locator("#question textarea").fill("Is there a dog?")
    first.locator("#question textarea").press("Enter")
    first.wait_for_function("document.querySelectorAll('#shelf li').length == 2")
    me.page.wait_for_function("document.querySelectorAll('#shelf li').length == 2")
    me.page.locator("#shelf li").first.click()
    me.page.get_by_test_id("user").filter(has_text="Is there a dog?").wait_for()
    me.page.locator("#shelf li").last.click()
    me.page.get_by_test_id("user").filter(has_text="Is there a cat?").wait_for()


def test_what_was_written_of_an_answer_is_there_after_a_reload(visit, monkeypatch):
    from vismoe.app.page import Page
    from vismoe.app.ui_serving import served

    monkeypatch.setattr("vismoe.app.ui.KEEP_S", 0.0)
    goes_on = threading.Event()
    with served(Page(FakeEngine(script=[["Half of ", lambda reply: goes_on.wait(), "an answer."], ["Whole."]]))) as at:
        me = visit(at=at)
        me.ask("What is it?")
        me.page.locator("#shelf [aria-current]", has_text="What is it?").wait_for()
        me.reload()
        assert me.tell(contains="Half") == "Half of"
        goes_on.set()
        me.ask("Go on")
        assert me.tell(number=2) == "Whole."
        me.leave()


def test_a_broken_record_is_an_error_and_not_a_broken_page(visit):
    me = visit()
    me.page.get_by_role("button", name="What does the sign say?").click()
    me.tell(contains="OPEN")
    me.page.locator("#shelf li").wait_for()
    me.page.get_by_role("button", name="New conversation").click()
    me.page.get_by_test_id("bot").first.wait_for(state="detached")
    me.page.evaluate(
        """() => new Promise(done => {
            indexedDB.open("vismoe").onsuccess = ({target}) => {
                const change = target.result.transaction("records", "readwrite"), records = change.objectStore("records");
                records.getAll().onsuccess = ({target}) => {
                    target.result[0].turns[0].pictures[0].data = "/etc/hostname";
                    records.put(target.result[0]);
                };
                change.oncomplete = done;
            };
        })"""
    )
    me.page.locator("#shelf li button").click()
    me.page.locator("#notice", has_text="this kept conversation cannot be read").wait_for()
    me.ask("What does the sign say?")
    me.tell()
    me.page.wait_for_function("document.querySelectorAll('#shelf li').length == 2")


def test_the_theme_is_chosen_and_kept(visit):
    me = visit()
    body, theme = me.page.locator("body"), me.page.get_by_label("Theme")
    me.page.emulate_media(color_scheme="light")
    assert not body.evaluate("body => body.classList.contains('dark')")
    theme.select_option("dark")
    me.page.locator("body.dark").wait_for()
    me.reload()
    me.page.locator("body.dark #question").wait_for()
    me.page.wait_for_function("document.querySelector('#theme').value == 'dark'")
    theme.select_option("system")
    me.page.locator("body:not(.dark)").wait_for()
    me.page.emulate_media(color_scheme="dark")
    me.page.locator("body.dark").wait_for()


def test_all_that_can_be_used_has_a_name_and_is_reached_by_keyboard(visit):
    me = visit()
    assert me.nameless() == []
    me.attach("sign.png")
    me.page.wait_for_function("document.querySelectorAll('#question [role=listitem]').length == 1")
    assert me.nameless() == []
    me.ask("What does the sign say?")
    me.tell(contains="OPEN")
    for fold in ("More", "Quality and speed"):
        me.unfold(fold)
    me.page.locator("#policy").wait_for()
    assert me.nameless() == []
    wanted = {"#theme", "#forget", "#again", "#question textarea", "#max-tokens input", "#temperature input", "#seed input"}
    reached = set()
    me.page.locator("#theme").focus()
    for _ in range(60):
        reached |= {where for where in wanted if me.page.locator(f"{where}:focus").count()}
        me.page.keyboard.press("Tab")
    assert reached == wanted


def test_an_edited_question_is_answered_anew_about_the_same_picture(visit):
    me = visit()
    me.attach("wide.png")
    me.ask("Is there a cat?")
    me.tell()
    me.page.get_by_role("button", name="Edit").click()
    me.page.locator("#conversation textarea").fill("Where is the cat?")
    me.page.locator("#conversation").get_by_role("button", name="Submit").click()
    assert me.tell(contains="right") == "On the right."
    assert me.page.get_by_test_id("bot").count() == 1


def test_two_conversations_at_once_stay_apart_and_each_has_one_answer_at_a_time(visit):
    me, you = visit(), visit()
    me.page.get_by_role("button", name="What is in the picture?").click()
    me.page.get_by_role("button", name="Stop").wait_for()
    me.ask("And now?")
    me.page.get_by_text("still being written").wait_for()
    assert me.box.input_value() == "And now?"
    you.page.get_by_role("button", name="What does the sign say?").click()
    assert you.tell(contains="OPEN") == 'It says "OPEN".'
    assert me.tell() == WHOLE
    assert [visitor.page.get_by_test_id("bot").count() for visitor in (me, you)] == [1, 1]


def test_pictures_are_pasted_and_dropped_and_a_missing_question_is_said(visit):
    me = visit()
    picture = list((IMAGES / "sign.png").read_bytes())
    me.box.evaluate(PUT, ["paste", "pasted.png", picture])
    me.page.locator("#question img").nth(0).wait_for()
    me.page.locator("#question .full-container").evaluate(PUT, ["drop", "dropped.png", picture])
    me.page.locator("#question img").nth(1).wait_for()
    me.box.press("Enter")
    me.page.get_by_text("write one with the picture").wait_for()
    assert me.page.locator("#question img").count() == 2


def test_what_an_answer_shows_cannot_make_the_browser_ask_another_machine(visit):
    """Text of a model may hold a picture's address: asking for it would tell a stranger what was said."""
    me = visit()
    stranger = "https://example.com/a.png"
    with me.page.expect_event("requestfailed", lambda request: request.url == stranger) as failed:
        me.page.evaluate("url => document.body.append(Object.assign(new Image(), {src: url}))", stranger)
    assert failed.value.failure == "csp"
    me.complaints[:] = [said for said in me.complaints if stranger not in said]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_and_tables_of_an_answer_are_drawn(visit, size, scheme):
    from vismoe.app.page import Page
    from vismoe.app.ui_serving import served

    code = "def area(width):\n    return width  # " + "a long comment " * 20
    table = "| animal | where it lives |\n|---|---|\n| snail | at home |\n\n<b onclick='x()'>end</b>"
    said = [f"```python\n{code}\n```\n\n", table]
    with served(Page(FakeEngine(script=[said]))) as at:
        me = visit(size, at)
        me.page.emulate_media(color_scheme=scheme)
        me.ask("Show me")
        assert "snail" in me.tell(contains="end")
        answer = me.page.get_by_test_id("bot")
        assert answer.locator("pre code").inner_text().strip() == code.strip() and answer.locator("[onclick]").count() == 0
        cell = answer.locator("td", has_text="at home")
        line, letters = (cell.evaluate(f"cell => getComputedStyle(cell).{what}") for what in ("borderTopWidth", "color"))
        assert line == "1px" and (min(map(int, re.findall(r"\d+", letters)[:3])) > 128) == (scheme == "dark")
        edge = "part => part.getBoundingClientRect().right"
        parts = [answer.locator(part).first.evaluate(edge) for part in ("pre", "table")]
        assert me.fits() and max(parts) <= me.page.locator("#conversation").evaluate(edge)
        me.leave()


def test_everything_fits_a_phone(visit):
    me = visit(PHONE)
    assert me.fits()
    me.page.locator("#shelf summary").click()
    me.page.locator("#shelf nav").wait_for()
    me.page.locator("#shelf summary").click()
    me.page.get_by_role("button", name="How many dogs are there?").click()
    assert me.tell(contains="Three") == "Three."
    assert me.fits()
    me.page.get_by_role("tab", name="The machine at work").click()
    for section in ("Memory plan", "Choices at start"):
        me.page.get_by_role("button", name=section).click()
    me.page.get_by_text("expert pool").wait_for()
    assert me.fits()
