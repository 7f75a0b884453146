"""Conversations that come back from a browser: what was kept is read again, and whatever else comes is one clear error."""

import base64
import copy
import io
import json

import pytest
from clips import clip
from PIL import Image

from vismoe.app.conversations import MOST_CHARACTERS, MOST_PICTURES, MOST_TURNS, read_record, record
from vismoe.app.page import PageTurn
from vismoe.app.uploads import Uploads
from vismoe.errors import InputError

NUMBER = "0123456789abcdef" * 2


def uri(kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def turn(**given):
    return {"question": "What?", "answer": "Red.", "reasoning": "", "pictures": [{"name": "red.png", "data": uri()}], **given}


def kept(**given):
    return {"id": NUMBER, "system": "", "turns": [turn()], **given}


def test_what_the_browser_kept_is_read_again():
    history = (PageTurn("What?", (), (), "Red.", "hm"), PageTurn("And?", (), (), "Blue."))
    sent = json.loads(record(NUMBER, "Be brief.", history))
    sent["turns"] = [{**{name: turn[name] for name in turn if name != "files"}, "pictures": []} for turn in sent["turns"]]
    number, system, read = read_record(sent)
    assert (number, system, [turn for turn, _ in read]) == (NUMBER, "Be brief.", list(history))
    ((turn_read, ((name, data),)),) = read_record(kept())[2]
    assert turn_read.images[0].size == (20, 10) and name == "red.png" and data.startswith(b"\x89PNG")


def test_videos_and_documents_come_back_as_what_they_were():
    paper = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(paper, "PDF", save_all=True, append_images=[Image.new("RGB", (20, 10), "blue")])
    sent = [("a.mov", "video/quicktime", clip()), ("b.pdf", "application/pdf", paper.getvalue())]
    pictures = [{"name": name, "data": f"data:{kind};base64,{base64.b64encode(data).decode()}"} for name, kind, data in sent]
    ((read, stored),) = read_record(kept(turns=[turn(pictures=pictures)]))[2]
    assert [name for name, _ in stored] == ["a.mp4", "b.pdf"]
    film, *pages = read.images
    assert film == {"type": "video", "video": clip()} and [page.size for page in pages] == [(40, 20)] * 2
    broken = {"name": "a.mp4", "data": "data:video/mp4;base64," + base64.b64encode(clip()[:300]).decode()}
    with pytest.raises(InputError, match=r"cannot be read: a picture: .*damaged.*Fix: "):
        read_record(kept(turns=[turn(pictures=[broken])]))


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("../../etc/passwd", "____.jpeg"),
        ("/a/b.html", "_a_b.jpeg"),
        ("..", "_.jpeg"),
        ("a b.png", "a_b.jpeg"),
        ("", "picture.jpeg"),
    ],
)
def test_a_pictures_name_names_no_other_place_and_ends_as_its_bytes_are(name, stored, tmp_path):
    pytest.importorskip("gradio", reason='gradio is missing: pip install "vismoe[serve]"')
    pictures = [{"name": name, "data": uri("JPEG")}]
    ((_, (picture,)),) = read_record(kept(turns=[turn(pictures=pictures)]))[2]
    assert picture[0] == stored
    uploads = Uploads(tmp_path)
    uploads.enter("me")
    (file,) = [uploads.add("me", *picture) for _ in range(2)][:1]
    assert [str(path) for path in tmp_path.rglob("*.jpeg")] == [file]
    uploads.forget("me")
    assert list(tmp_path.rglob("*.jpeg")) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        *((other, "id is missing") for other in (None, [], "text", 3, {})),
        (kept(id="../../x"), "hexadecimal"),
        (kept(id=3), "id is missing"),
        (kept(turns=[]), "0 questions"),
        (kept(turns=[turn()] * (MOST_TURNS + 1)), "questions"),
        (kept(turns=["text"]), "pictures is missing"),
        (kept(system=None), "system is missing"),
        (kept(turns=[turn(question=" ")]), "question is empty"),
        (kept(turns=[turn(answer=None)]), "answer is missing"),
        (kept(turns=[turn(answer="a" * (MOST_CHARACTERS + 1))]), "characters"),
        (kept(turns=[turn(pictures=[turn()["pictures"][0]] * (MOST_PICTURES + 1))]), "pictures"),
        *((kept(turns=[turn(pictures=[{"name": "a.png", "data": data}])]), "a picture") for data in (
            "/etc/passwd", "file:///etc/passwd", "http://example.com/a.png", "data:text/html;base64,PGI+",
            "data:image/png;base64,*",
            "data:image/png;base64,", "data:image/png,abc", "data:image/svg+xml;base64,PHN2Zy8+", uri()[:-40] + "AAAA",
        )),
        (kept(turns=[turn(pictures=["/etc/passwd"])]), "data is missing"),
    ],
)  # fmt: skip
def test_anything_else_is_one_clear_error(given, says):
    before = copy.deepcopy(given)
    with pytest.raises(InputError, match=rf"cannot be read: .*{says}.*Fix: "):
        read_record(given)
    assert given == before
