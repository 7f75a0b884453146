"""`vismoe ui` without a model, in headless Chromium: how a model is chosen, planned, loaded, changed, and what is said if not."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_cache import copy_of_demo, put
from test_browser import DESKTOP, PHONE, browser, pytestmark, visit  # noqa: F401  # fixtures, and where they cannot run

from vismoe.app.page import Page

DEMO, COPY = "The demo model", "acme/Copy"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    put(folder, COPY, copy_of_demo)
    return folder


@pytest.fixture
def address(checkpoints, tmp_path, monkeypatch) -> Iterator[str]:
    """The page of a machine with one checkpoint in its cache, and no model loaded."""
    from vismoe.app.ui_serving import served

    shutil.copytree(checkpoints, tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path))  # where no vismoe doctor of another test has been
    monkeypatch.setattr("vismoe.app.on_disk.gguf_folders", list)  # nor what other programs keep on this one
    page = Page()
    with served(page) as address:
        yield address
    if page.engine is not None:
        page.engine.close()


def model(me, name: str):
    return me.page.locator("#models label", has_text=name)


def plan(me, name: str) -> str:
    """The plan of a model, once it is chosen and shown."""
    model(me, name).click()
    me.page.locator("#load-plan h3", has_text=name).wait_for()
    return me.page.locator("#load-plan").inner_text()


def load(me) -> None:
    me.page.locator("#load").click()
    me.box.wait_for()


def at_most(me, size: str) -> None:
    me.page.get_by_role("radio", name="At most a size").check()
    me.page.locator("#size textarea, #size input").fill(size)
    me.page.keyboard.press("Enter")


def test_models_are_listed_planned_loaded_asked_and_changed(visit):  # noqa: F811
    me, you = visit(), visit()
    assert re.search(r"memory free, .*disk not measured", me.page.locator("#here").inner_text())
    assert not me.page.locator("#load").is_enabled() and me.page.get_by_role("tab").all_inner_texts() == ["Model and settings"]
    assert not me.page.locator("#size").is_visible() and not me.page.locator("#other").is_visible()
    model(me, COPY).filter(has_text="Fits whole").wait_for()
    entries = me.page.locator("#models label").all_inner_texts()
    assert [entry.split("\n")[0].strip() for entry in entries] == [DEMO, COPY, "Another model"]
    said = plan(me, DEMO)
    assert "Sees pictures. Fits whole; about" in said and "on the cpu" in said
    assert "no model is loaded" in me.page.inner_text("#top")
    load(me)
    you.box.wait_for()  # who looks at the page sees what is loaded
    me.page.get_by_role("button", name="What does the sign say?").click()
    assert me.tell(contains="OPEN") == 'It says "OPEN".'

    me.page.get_by_role("button", name="Change model or settings").click()
    assert model(me, DEMO).locator("input").is_checked()
    at_most(me, "25%")
    me.page.locator("#load-plan", has_text="25% of its experts fit").wait_for()
    load(me)
    me.page.locator("#top", has_text="memory 25%").wait_for()
    you.page.locator("#top", has_text="memory 25%").wait_for()
    assert me.page.get_by_test_id("bot").count() == 1, "the conversation stays"
    me.ask("Is there a dog?")
    me.tell(number=2)
    me.reload()
    assert me.tell(number=2) and "memory 25%" in me.page.inner_text("#top")


def test_a_refusal_is_shown_and_mended(visit):  # noqa: F811
    me = visit()
    plan(me, DEMO)
    at_most(me, "lots")
    me.page.locator("#load-plan [role=alert]", has_text="is not a size; write e.g. 8GiB").wait_for()
    at_most(me, "300MiB")
    me.page.locator("#load-plan [role=alert]", has_text="is too small").wait_for()
    assert not me.page.locator("#load").is_enabled()
    me.page.get_by_role("button", name="Use memory").click()
    me.page.locator("#load-plan", has_text=re.compile("experts fit in memory|Fits whole")).wait_for()
    assert me.page.locator("#load").is_enabled() and not me.page.locator("#mend").is_visible()
    me.page.locator("#size textarea, #size input").fill("30%")  # Enter was not pressed: its plan was never shown
    me.page.locator("#load").click()
    me.page.get_by_text("The settings have changed: look at the plan").wait_for()
    me.page.locator("#load-plan", has_text="% of its experts fit in memory").wait_for()
    assert "no model is loaded" in me.page.inner_text("#top")
    model(me, "Another model").click()
    me.page.locator("#other textarea, #other input").fill("/no/such/model")
    me.page.keyboard.press("Enter")
    me.page.locator("#load-plan [role=alert]", has_text="/no/such/model is neither a folder here").wait_for()


def test_what_cannot_be_loaded_is_said_and_the_earlier_model_is_offered(visit, tmp_path):  # noqa: F811
    me = visit()
    plan(me, DEMO)
    load(me)
    me.page.get_by_role("button", name="Change model or settings").click()
    plan(me, COPY)
    (lost,) = (tmp_path / "hub").rglob("tokenizer.json")
    lost.write_text("{")  # behind the back of the plan
    me.page.locator("#load").click()
    me.page.locator("#status [role=alert]", has_text=f"{COPY} was not loaded: ").wait_for()
    me.page.get_by_role("button", name=f"Load {DEMO} again").click()
    me.box.wait_for()
    me.page.get_by_role("button", name="What does the sign say?").click()
    assert me.tell(contains="OPEN") == 'It says "OPEN".'


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")])
def test_everything_has_a_name_fits_and_is_reached_by_keyboard(visit, size, scheme):  # noqa: F811
    me = visit(size)
    me.page.emulate_media(color_scheme=scheme)
    if scheme == "dark":
        me.page.locator("body.dark").wait_for()
    me.page.get_by_role("button", name="More").click()
    me.page.locator("#context").wait_for()
    assert me.fits() and me.nameless(least=5) == []
    letters, behind = (
        me.page.locator("#models label span").first.evaluate(f"span => getComputedStyle({what}")
        for what in ("span).color", "document.body).backgroundColor")
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (letters, behind)]
    assert abs(light[0] - light[1]) > 80, "letters can be told from what is behind them"
    me.page.locator("#models input").first.focus()
    me.page.keyboard.press("Space")
    me.page.locator("#load:enabled").wait_for()
    wanted, reached = {"#memory", "#load", "#context"}, set()
    for _ in range(20):
        reached |= {name for name in wanted if me.page.locator(f"{name}:is(:focus, :focus-within)").count()}
        if "#load" in reached:
            break
        me.page.keyboard.press("Tab")
    assert reached == wanted
    me.page.keyboard.press("Enter")
    me.box.wait_for()
    assert me.fits() and me.nameless() == []
