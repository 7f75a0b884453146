"""`vismoe serve`: the application on a socket, ended gently by signals.

On the first SIGTERM or Ctrl-C the server accepts no new requests (and /health says so), lets running answers finish for a while,
ends the others, and exits with success; the second signal ends all of them at once.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vismoe.app.api import create_app
from vismoe.app.api_errors import ApiError, error_response
from vismoe.app.callers import Callers
from vismoe.app.options import ServeOptions, is_loopback
from vismoe.errors import ConfigError

if TYPE_CHECKING:
    from vismoe.engine.engine import Engine

MAX_CONNECTIONS = 1024
IDLE_S = 30  # a connection without a request is closed
CLOSE_S = 2  # for connections to close when the server ends
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses to listen on, and to use from this machine


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[socket.socket]:
    """A bound socket, opened before minutes of loading. Raises ConfigError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host.strip("[]"), options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        where = f"{options.host}, port {options.port}, cannot be used ({error.strerror})"
        raise ConfigError(f"{where}. Fix: another --port, or a --host of this machine") from error
    with listener:
        yield listener


def serve(engine: "Engine", options: ServeOptions, listener: socket.socket) -> int:
    """Serves until a signal; returns the exit code."""
    app = create_app(engine, options)
    Server(app, options, app.state.callers).run(sockets=[listener])
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, with a gentle end."""

    def __init__(self, app: Any, options: ServeOptions, callers: Callers):
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,  # the gate writes it
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._options, self._callers = options, callers
        self._signals = 0
        self._leaving: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            print(welcome(self._options, *listener.getsockname()[:2]), flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._leaving is None:
            if here := len(self._callers):
                print(f"\nclosing; {here} running requests have {self._options.drain_s:g} s. Press Ctrl-C again to end them")
            self._leaving = asyncio.create_task(self._leave())
        if self._signals > 1:
            self._callers.send_away()
        return await super().on_tick(counter)

    async def _leave(self) -> None:
        await self._callers.drain(self._options.drain_s)
        self.should_exit = True


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a time limit: closes a connection without a new request for a while, even if it sends single bytes."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look(object())

    def send_400_response(self, msg: str) -> None:
        """Answers a message that is not HTTP with an error in the API's form."""
        response = error_response(ApiError(400, "this is not an HTTP request", code="invalid_http"))
        head = h11.Response(status_code=400, headers=[*response.raw_headers, (b"connection", b"close")], reason=b"Bad Request")
        events = head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _look(self, seen: Any) -> None:
        """Closes the connection if its last request is still the one of the previous check, and is answered."""
        if self.transport.is_closing():
            return
        if self.cycle is seen and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(IDLE_S, self._look, self.cycle)


def welcome(options: ServeOptions, host: str, port: int) -> str:
    """The server's address, and an example request."""
    name = f"[{host}]" if ":" in host else host
    local = ANY.get(host, host)
    reach = "this machine only" if is_loopback(host) else "other machines too"
    key = '-H "Authorization: Bearer $KEY" ' if options.api_keys else ""
    local = f"[{local}]" if ":" in local else local
    return (
        f"VisMoE is at http://{name}:{port} ({reach}); Ctrl-C stops it\n"
        f"  curl http://{local}:{port}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n"
        """       -d '{"messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
