"""PDF documents: pages against the pictures they were made of, and through the command line and every door of the server."""

import base64
import functools
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from served import served

import vismoe
from vismoe.app.decoding import Decoder
from vismoe.app.page import PageTurn
from vismoe.cli import main as cli
from vismoe.engine.engine import demo_model
from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.documents import MOST_PAGES, is_document, open_pages, opened_document

pypdfium2 = pytest.importorskip("pypdfium2", reason='PDF documents need pypdfium2: pip install "vismoe[pdf]"')

MOST = 10**7  # pixels
QUESTION = "What is in the picture?"
PICTURES = sorted((demo_model().parent / "images").glob("*.png"))[:3]


@functools.cache
def pdf(pages: int = 3, dpi: int = 144) -> bytes:
    """The bundled pictures, each on a page of its size."""
    file, (first, *more) = io.BytesIO(), [Image.open(path).convert("RGB") for path in PICTURES[:pages]]
    first.save(file, "PDF", save_all=True, append_images=more, resolution=dpi, quality=95)
    return file.getvalue()


def pages_of(data: bytes, most: int = MOST) -> list[Image.Image]:
    with opened_document(data, "paper", most) as document:
        return [document.page(number) for number in range(len(document.pages))]


def uri(data: bytes) -> str:
    return "data:application/pdf;base64," + base64.b64encode(data).decode()


# -- reading
def test_pages_are_the_pictures_that_they_were_made_of():
    for page, path in zip(pages_of(pdf()), PICTURES, strict=True):
        picture = Image.open(path).convert("RGB")
        assert page.size == picture.size and page.mode == "RGB"
        assert np.abs(np.asarray(page, np.int16) - np.asarray(picture, np.int16)).mean() < 6, "JPEG inside, else the same"


def test_a_page_is_never_drawn_larger_than_allowed():
    """An inch of the picture became ten: at the usual resolution each page would have 100 times the pixels."""
    for most in (2000, 10**5, 10**6):
        with opened_document(pdf(dpi=14), "paper", most) as document:
            for number, (width, height) in enumerate(document.pages):
                assert 0 < width * height <= most and document.page(number).size == (width, height)
                small = document.page(number, 2)
                assert (small.width, small.height) == pytest.approx((width / 2, height / 2), abs=1)


@given(st.data())
@settings(max_examples=25)
def test_damage_is_an_error_or_pages_and_never_another_exception(data):
    whole = bytearray(pdf())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=20)):
        whole[place] = data.draw(st.integers(0, 255))
    try:
        assert all(
            page.width * page.height <= 10**6 for page in pages_of(bytes(whole[: data.draw(st.integers(0, len(whole)))]), 10**6)
        )
    except InputError as error:
        assert "paper: " in str(error) and "Fix: " in str(error)


def test_pages_are_chosen_and_wrong_ones_refused(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf())
    name = f"{tmp_path}/a.pdf"
    sizes = [page.size for page in pages_of(pdf())]
    for chosen, wanted in (("", sizes), ("#page=2", sizes[1:2]), ("#page=2-3", sizes[1:]), ("#page=1-3", sizes)):
        assert [page.size for page in open_pages(name + chosen, MOST)] == wanted
    for chosen in ("#page=0", "#page=4", "#page=3-4", "#page=3-2", "#page=x", "#page=-1", "#page=1-x"):
        with pytest.raises(InputError, match=r"pages 1 to 3\. Fix: "):
            open_pages(name + chosen, MOST)
    assert open_pages(str(PICTURES[0]), MOST) is None
    (tmp_path / "b.pdf").write_bytes(b"no document")
    for source, words in ((tmp_path / "b.pdf", "not a PDF"), (tmp_path / "none.pdf", "no such file"), (tmp_path, None)):
        if words is None:
            assert open_pages(source, MOST) is None
            continue
        with pytest.raises(InputError, match=rf"{words}.*Fix: "):
            open_pages(source, MOST)
    assert is_document(b"\x00" * 20 + b"%PDF-1.7") and not is_document(b"\x89PNG")


def test_longer_documents_than_can_be_read_are_refused_at_the_command_line_and_on_the_page(tmp_path):
    with pypdfium2.PdfDocument.new() as made:
        for _ in range(MOST_PAGES + 1):
            made.new_page(72, 72)
        made.save(tmp_path / "long.pdf")
    name = str(tmp_path / "long.pdf")
    with pytest.raises(InputError, match=rf"^{name}: 65 pages, at most 64 are read at once\. Fix: {name}#page=1-64$"):
        open_pages(name, MOST)
    assert len(open_pages(f"{name}#page=1-64", MOST)) == 64
    with pytest.raises(InputError, match=r"^long\.pdf: 65 pages, at most 64 .*Fix: a PDF with the first 64"):
        PageTurn.of(QUESTION, [name])


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pypdfium2", None)
    with pytest.raises(ConfigError, match=r"Fix: pip install \"vismoe\[pdf\]\""):
        opened_document(pdf(), "paper", MOST).__enter__()


def test_another_process_draws_the_same_pages_and_refuses_the_same():
    decoder = Decoder()
    try:
        for source in (pdf(), uri(pdf())):
            assert decoder.look_at_document(source, MOST, 30) == [page.size for page in pages_of(pdf())]
            drawn = decoder.pages(source, MOST, 30, [1, 1, 1])
            assert [page.tobytes() for page in drawn] == [page.tobytes() for page in pages_of(pdf())]
        with pytest.raises(InputError, match=r"damaged|not a PDF"):
            decoder.look_at_document(pdf()[:200], MOST, 30)
        assert decoder.look(PICTURES[0].read_bytes(), MOST, 30).width == Image.open(PICTURES[0]).width
    finally:
        decoder.close()


# -- the doors
@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    (folder / "a.pdf").write_bytes(pdf(2))
    with vismoe.load(memory="35%", context=1024) as engine, served(engine, image_folder=folder, max_images=2) as server:
        server.engine = engine
        yield server


def wanted(engine) -> str:
    pages = [{"type": "image", "image": page} for page in pages_of(pdf(2))]
    reply = engine.chat([{"role": "user", "content": [*pages, {"type": "text", "text": QUESTION}]}], max_tokens=6)
    return "".join(reply)


def chat(server, part, **more):
    content = [part, {"type": "text", "text": QUESTION}]
    return server.post({"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, **more})


def test_every_door_answers_about_the_pages_as_the_engine_does(server):
    said = wanted(server.engine)
    for data in (uri(pdf(2)), "a.pdf"):
        got = chat(server, {"type": "file", "file": {"file_data": data, "filename": "a.pdf"}}).json()
        assert got["choices"][0]["message"]["content"] == said and got["vismoe"]["images"] == 2
    part = {"type": "input_file", "filename": "a.pdf", "file_data": uri(pdf(2))}
    items = [{"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}]
    answer = server.client().responses.create(model="demo-model", input=items, max_output_tokens=16, temperature=0)
    assert answer.output_text.startswith(said)
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(pdf(2)).decode()}
    import anthropic  # its thousand modules take every other worker seconds

    client = anthropic.Anthropic(base_url=server.url, api_key="unused", http_client=None)
    content = [{"type": "document", "source": source}, {"type": "text", "text": QUESTION}]
    asked = dict(model="demo-model", max_tokens=6, messages=[{"role": "user", "content": content}])
    message = client.messages.create(**asked, extra_body={"temperature": 0})
    assert message.content[0].text == said
    plain = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "A red cat."}}
    tokens = client.messages.count_tokens(model="demo-model", messages=[{"role": "user", "content": [plain]}]).input_tokens
    texts = [{"type": "text", "text": "Notes\n"}, {"type": "text", "text": "A red cat."}]
    assert tokens == client.messages.count_tokens(model="demo-model", messages=[{"role": "user", "content": texts}]).input_tokens


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"file_data": uri(pdf(3))}, "3 pages, but the limit is 2"),
        ({"file_data": uri(b"%PDF-1.7 nothing")}, "damaged"),
        ({"file_data": "data:image/png;base64,AAAA"}, "holds a picture"),
        ({"file_data": "missing.pdf"}, "no image file of this name"),
        ({"file_id": "file-1"}, "file_data"),
        ({"file_data": uri(pdf(1)), "more": 1}, "more"),
    ],
)
def test_the_server_refuses_with_the_reason(server, file, words):
    refused = chat(server, {"type": "file", "file": file})
    assert refused.status_code == 400 and words in refused.text


def test_the_command_line_takes_pages_as_images(capsys, tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf())
    assert cli.main(["chat", "--image", f"{tmp_path}/a.pdf#page=2", "--max-tokens", "4", "--json", QUESTION]) == 0
    assert '"images": 1' in capsys.readouterr().out.replace("\n", "")
    assert cli.main(["chat", "--image", f"{tmp_path}/a.pdf#page=9", QUESTION]) == 2
    assert "pages 1 to 3" in capsys.readouterr().err
