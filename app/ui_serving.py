"""The chat page on a socket of this machine, and the signals that end it.

Only this server's own pages may call it, and uploads are deleted when it ends (`known_hosts`, `uploads`). gradio provides the
server, which listens in its own thread.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from vismoe.app.choosing import Catalog
from vismoe.app.known_hosts import KnownHosts
from vismoe.app.loaded import LOADING
from vismoe.app.page import Page
from vismoe.app.ui import build
from vismoe.app.uploads import MOST_FILE_BYTES, uploads_folder
from vismoe.app.widgets import pictures_folder
from vismoe.errors import ConfigError
from vismoe.flags import signals_call

if TYPE_CHECKING:
    import gradio as gr

ADDRESS = "127.0.0.1"
MOST_PORTS = 65535
ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # what ends a process; raises KeyboardInterrupt here, so that resources are closed
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "DejaVu Sans", "sans-serif"]
FIXED_FONTS = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
QUEUE_S = 0.02  # between two looks of gradio at its empty queue
SCRIPTS = ("ui.js", "ui_keys.js", "ui_conversations.js")
SAME_ORIGIN = (  # whatever an answer links to, the browser only contacts this server
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:\">"
)


def free_port(port: int) -> int:
    """`port`, or any free one for 0. Raises ConfigError if it cannot be used; checked before minutes of loading."""
    if not 0 <= port <= MOST_PORTS:
        raise ConfigError(f"port={port}: must be from 0 (any free port) to {MOST_PORTS}")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ADDRESS, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        message = f"{ADDRESS}, port {port}, cannot be used ({error.strerror}). Fix: another --port, or --port 0 for any free one"
        raise ConfigError(message) from error


@contextlib.contextmanager
def served(page: Page, port: int = 0, catalog: Catalog | None = None) -> Iterator[str]:
    """Serves `page` within the block and gives its address; then stops its answers and deletes its files. Raises ConfigError."""
    with uploads_folder() as uploads:
        blocks = build(page, uploads, catalog or Catalog())
        try:
            address = _launch(blocks, free_port(port))
            uploads.keep_what_is_there()
            yield address
        finally:
            for session in list(page.running):
                page.stop(session)
            blocks.close(verbose=False)


def _launch(blocks: "gr.Blocks", port: int) -> str:
    """Starts the page's server and returns its address."""
    import gradio as gr

    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio checks over HTTP whether it is up
    blocks._queue.sleep_when_free = QUEUE_S  # looked at 1,000 times a second, a page that nobody uses takes a tenth of a core
    gate = Middleware(KnownHosts, host=ADDRESS, fix=f"open http://{ADDRESS}:{port}", own_pages_only=True)
    try:
        _, address, _ = blocks.launch(
            server_name=ADDRESS,
            server_port=port,
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            ssr_mode=False,
            theme=gr.themes.Default(primary_hue="teal", neutral_hue="slate", font=FONTS, font_mono=FIXED_FONTS),
            css_paths=Path(__file__).with_name("ui.css"),
            head=SAME_ORIGIN + "".join(f"<script>{Path(__file__).with_name(name).read_text()}</script>" for name in SCRIPTS),
            footer_links=[],
            max_file_size=MOST_FILE_BYTES,
            allowed_paths=[str(pictures_folder())],
            app_kwargs={"middleware": [gate]},
        )
    except OSError as error:  # taken since it was checked
        raise ConfigError(f"{ADDRESS}, port {port}, cannot be used. Fix: another --port, or --port 0 for any free one") from error
    return str(address)


def serve(page: Page, port: int, catalog: Catalog | None = None) -> int:
    """Serves the page on this machine until Ctrl-C, SIGTERM or the end of the terminal, and closes its engine; returns the exit
    code."""
    ending = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    try:
        with signals_call(signal.default_int_handler, *ending), served(page, port, catalog) as address:
            print(f"VisMoE is at {address.rstrip('/')} (this machine only); Ctrl-C stops it", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                print("\nstopped", flush=True)
    finally:
        if any(thread.name == LOADING for thread in threading.enumerate()):
            os._exit(0)  # a model is being read: nothing is to be put in order, and its thread cannot be stopped
        if page.engine is not None:
            page.engine.close()
    return 0
