"""A real server in a thread, for tests: `with served(engine, max_waiting=1) as server: server.client().chat...`"""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from vismoe.app.api import create_app
from vismoe.app.options import ServeOptions
from vismoe.app.serving import Server, listening

PATIENCE_S = 20


@dataclass
class Served:
    port: int
    server: Server
    thread: threading.Thread
    app: Any
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        usual = {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=self.http, **(usual | options))

    def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return self.http.post(self.url + path, headers=headers, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def stop(self) -> None:
        """As SIGTERM would."""
        self.server.handle_exit(15, None)


def wait_until(fact: Any) -> None:
    """Fails when `fact()` has not become true in time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def served(engine: Any, **options: Any):
    chosen = ServeOptions(**{"port": 0, "drain_s": 0.0} | options)
    with listening(chosen) as listener:
        port = listener.getsockname()[1]
        app = create_app(engine, chosen)
        server = Server(app, chosen, app.state.callers)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            with httpx.Client(verify=False, timeout=PATIENCE_S, trust_env=False) as http:  # certificates take time to load
                yield Served(port, server, thread, app, http)
        finally:
            server.handle_exit(15, None)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
