"""The chat page's server, by real requests: who may call it, how long uploads stay, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_engine import FakeEngine
from PIL import Image

httpx = pytest.importorskip("httpx", reason='httpx is missing: pip install "vismoe[serve]"')

from vismoe.app import ui_serving  # noqa: E402
from vismoe.app import uploads as uploads_module  # noqa: E402
from vismoe.app.page import Page  # noqa: E402
from vismoe.app.ui_serving import free_port, serve, served  # noqa: E402
from vismoe.app.uploads import Uploads, uploads_folder  # noqa: E402
from vismoe.cli import main as cli  # noqa: E402
from vismoe.errors import ConfigError  # noqa: E402

MISSING = [package for package in ("gradio", "gradio_client") if find_spec(package) is None]  # not imported by every worker
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason='gradio is missing: pip install "vismoe[serve]"'),
    pytest.mark.filterwarnings("ignore:.*:Warning:gradio.queueing"),  # pandas deprecations
]
SETTINGS = (256, 0.0, "", 0, 0, 1.0, "", "exact", "4/2", 0.75, "none")  # as the page's widgets stand at first


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Takes the place of /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def address(temporary) -> Iterator[str]:
    with served(Page(FakeEngine())) as address:
        yield address


@pytest.fixture
def picture(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (32, 16), "red").save(file)
    return str(file)


def pictures_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.name == "red.png")


def soon(true: Callable[[], object]) -> bool:
    """Whether it becomes so; a busy machine is not a failure."""
    until_s = time.monotonic() + 30
    while not (now := true()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(now)


def upload(address: str, picture: str, **headers: str) -> "httpx.Response":
    with open(picture, "rb") as file:
        return httpx.post(f"{address}gradio_api/upload", files={"files": file}, headers=headers)


@contextlib.contextmanager
def open_page(address: str, session: str) -> Iterator[None]:
    """What keeps a session alive: the browser's connection, as long as its page is open."""
    with httpx.stream("GET", f"{address}gradio_api/heartbeat/{session}") as connection:
        lines = connection.iter_lines()
        next(lines)
        yield


def ask(address: str, session: str, files: list[str], question: str = "What?") -> str:
    """The event stream of an answered question, with a session that is chosen here."""
    sent = [{"path": file, "meta": {"_type": "gradio.FileData"}} for file in files]
    called = next(fn for fn in httpx.get(f"{address}config").json()["dependencies"] if fn["api_name"] == "ask")
    values = [{"text": question, "files": sent}, *SETTINGS]
    widgets = iter(values)
    states = {part["id"] for part in httpx.get(f"{address}config").json()["components"] if part["type"] == "state"}
    data = [None if part in states else next(widgets) for part in called["inputs"]]
    body = {"data": data, "fn_index": called["id"], "session_hash": session}
    httpx.post(f"{address}gradio_api/queue/join", json=body).raise_for_status()
    return httpx.get(f"{address}gradio_api/queue/data", params={"session_hash": session}, timeout=60).text


# ------------------------------------------------------------------ who may call
FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:7860",
    "10.0.0.7:7860",
    "127.0.0.1.evil.example",
    "",
    "[::1",
    "localhost.evil.example",
)
FOREIGN_ORIGINS = ("http://evil.example", "https://evil.example:7860", "null", "http://localhost:1", "http://127.0.0.1:1", "")
ROUTES = (("GET", ""), ("GET", "config"), ("POST", "gradio_api/queue/join"), ("POST", "gradio_api/upload"), ("GET", "no/such"))


def test_a_page_under_another_name_is_refused_at_every_address(address):
    for method, route in ROUTES:
        for host in FOREIGN_HOSTS:
            refused = httpx.request(method, address + route, headers={"Host": host})
            assert refused.status_code == 421 and "open http://127.0.0.1:" in refused.json()["error"]["message"]


def test_a_page_of_another_origin_is_refused_and_leaves_nothing(address, picture, temporary):
    for method, route in ROUTES:
        for origin in FOREIGN_ORIGINS:
            assert httpx.request(method, address + route, headers={"Origin": origin}).status_code == 403
    for origin in FOREIGN_ORIGINS:
        assert upload(address, picture, Origin=origin).status_code == 403
    assert pictures_in(temporary) == []


def test_the_pages_own_requests_and_those_without_an_origin_are_answered(address, picture, temporary):
    port = urlsplit(address).port
    for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "localhost:9999"):  # the last one forwarded by ssh
        assert httpx.get(address, headers={"Host": name, "Origin": f"http://{name}"}).status_code == 200
        assert upload(address, picture, Host=name, Origin=f"http://{name}").status_code == 200
    assert upload(address, picture).status_code == 200
    assert len(pictures_in(temporary)) == 1


# ------------------------------------------------------------------ how long uploads stay
def test_uploads_lie_where_only_this_user_can_read_them(address, picture, temporary):
    (stored,) = upload(address, picture).json()
    (folder,) = temporary.glob("vismoe-ui-*")
    assert Path(stored).is_relative_to(folder) and folder.stat().st_mode & 0o077 == 0


def test_a_picture_goes_with_the_last_conversation_that_is_about_it(address, picture, temporary):
    import gradio_client

    mine, yours = (gradio_client.Client(address, verbose=False, analytics_enabled=False) for _ in range(2))
    asked = {"text": "What?", "files": [gradio_client.handle_file(picture)]}
    for client in (mine, yours):
        client.predict(asked, *SETTINGS, api_name="/ask")
    assert soon(lambda: len(pictures_in(temporary)) == 1)  # gradio moves what it has received
    mine.predict(api_name="/forget")
    assert len(pictures_in(temporary)) == 1
    yours.predict(api_name="/forget")
    assert pictures_in(temporary) == []


def test_what_a_closed_page_had_uploaded_is_removed(address, picture, temporary):
    stored = upload(address, picture).json()
    with open_page(address, "me"):
        assert "one two" in ask(address, "me", stored)
        assert len(pictures_in(temporary)) == 1
    assert soon(lambda: not pictures_in(temporary))


def test_with_the_last_page_goes_what_nobody_asked_about_but_not_the_pages_own_pictures(address, picture, temporary):
    own = set(temporary.rglob("*.png"))
    upload(address, picture)
    with open_page(address, "me"):
        ask(address, "me", [])
        assert len(pictures_in(temporary)) == 1
    assert soon(lambda: not pictures_in(temporary))
    assert own and set(temporary.rglob("*.png")) == own


def test_a_picture_that_was_attached_again_stays_and_one_that_was_left_alone_goes_after_an_hour(tmp_path):
    uploads, files = Uploads(tmp_path), [tmp_path / f"{name}.png" for name in "ab"]
    for file in files:
        file.touch()
    uploads.enter("me")
    uploads.use("me", [str(files[0]), "/etc/hostname"])
    os.utime(files[0], ns=(1, files[0].stat().st_mtime_ns + 1))  # uploaded once more, in another window
    uploads.forget("me")
    assert all(file.exists() for file in files)
    os.utime(files[1], (0, time.time() - uploads_module.UNASKED_S - 1))
    uploads.use("me", [])
    assert files[0].exists() and not files[1].exists()
    uploads.leave("me")
    assert not files[0].exists()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the page of the demo model, with its temporary files below `folder`."""
    where = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vismoe.cli", "ui", "--port", "0", "--memory", "50%"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where)
    try:
        for line in process.stdout:
            if " is at " in line:
                break
        yield process, line.split(" is at ")[1].split()[0] + "/"
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_ends_the_command_well_and_nothing_stays(tmp_path, picture):
    with running(tmp_path) as (process, address), open_page(address, "me"):
        upload(address, picture)
        assert len(pictures_in(tmp_path)) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and "stopped" in process.stdout.read()
    assert list(tmp_path.glob("vismoe-ui-*")) == []


def test_sigterm_ends_the_server_as_ctrl_c_does(temporary, picture, monkeypatch, capsys):
    found = []

    def visit(address: str) -> None:
        with open_page(address, "me"):
            upload(address, picture)
            found.append(pictures_in(temporary))
            os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def visited(page: Page, port: int, catalog: None) -> Iterator[str]:
        with served(page, port) as address:
            visitor = threading.Thread(target=visit, args=(address,))
            visitor.start()
            yield address
            visitor.join()

    monkeypatch.setattr(ui_serving, "served", visited)
    before = signal.getsignal(signal.SIGTERM)
    assert serve(Page(FakeEngine()), 0) == 0 and "stopped" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(found[0]) == 1 and list(temporary.glob("vismoe-ui-*")) == []


def test_what_a_killed_server_left_goes_when_the_next_one_starts_and_what_is_in_use_stays(temporary):
    left, strange = temporary / "vismoe-ui-killed", temporary / "vismoe-ui-strange"
    for folder in (left, strange):
        (folder / "hash").mkdir(parents=True)
        (folder / "hash" / "red.png").touch()
    (left / uploads_module.LOCK).touch()  # the system lets go of a lock when its process ends, however that ends
    with uploads_folder() as first:
        assert not left.exists() and strange.exists()
        (first.folder / "red.png").touch()
        with uploads_folder():
            assert (first.folder / "red.png").exists()


# ------------------------------------------------------------------ the port
def test_a_port_that_cannot_be_is_said_in_one_sentence_of_ours():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for use in (free_port, lambda port: serve(Page(FakeEngine()), port)):
            with pytest.raises(ConfigError, match=rf"^127.0.0.1, port {port}, cannot be used \(.*\)\. Fix: .*--port 0") as said:
                use(port)
            assert "GRADIO" not in str(said.value) and "launch" not in str(said.value)
    for port in (-1, 65536, 10**9):
        with pytest.raises(ConfigError, match=f"port={port}: must be from 0"):
            free_port(port)


def test_a_taken_port_is_said_before_the_model_is_loaded(capsys):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert cli.main(["ui", "--model", "/no/such/model", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert "cannot be used" in said and "no/such" not in said


def test_gradios_port_settings_do_not_move_the_page(temporary, monkeypatch):
    monkeypatch.setenv("GRADIO_SERVER_PORT", "1")
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    with served(Page(FakeEngine())) as address:
        assert address.startswith("http://127.0.0.1:")
        assert json.loads(httpx.get(f"{address}config").text)["title"] == "VisMoE"


def test_the_queue_that_the_page_slows_down_is_gradios():
    import gradio as gr

    with gr.Blocks() as blocks:
        assert 0 < blocks._queue.sleep_when_free < ui_serving.QUEUE_S
