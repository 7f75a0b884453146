"""Which host names a server accepts, and which web pages may call it: one gate for the API and for the chat page.

A foreign web page can make its visitor's browser call a server on the visitor's machine: under a host name of its own that it
points there (DNS rebinding), or across origins, which a browser allows for forms and uploads. Headers that the browser itself
writes reveal both cases, and the gate refuses them before a byte of the body is read.
"""

import logging
from collections.abc import Collection
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vismoe.app.api_errors import ApiError, error_response
from vismoe.app.options import address_of, is_loopback

log = logging.getLogger("vismoe.serve")

MAX_LOGGED_CHARACTERS = 120


class KnownHosts:
    """ASGI middleware. Known names are those of this machine, `host` and `further`; with `any_name` all are, because a key is
    required.

    `any_address`: hosts given as numbers are known, too, since no name server is involved. `own_pages_only`: refuse pages of
    other origins. An application that accepts only JSON does not need this, since browsers send a preflight request before JSON.
    `fix` is the advice for an unknown name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        fix: str,
        further: Collection[str] = (),
        any_name: bool = False,
        any_address: bool = False,
        own_pages_only: bool = False,
    ):
        self._app, self._fix = app, fix
        self._names = {"localhost", host.lower(), *map(str.lower, further)}
        self._any_name, self._any_address, self._own_pages_only = any_name, any_address, own_pages_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (refusal := self._refusal(Headers(scope=scope))) is None:
            return await self._app(scope, receive, send)
        log.info("%s %s %d", scope.get("method", "-"), quote(scope["path"][:MAX_LOGGED_CHARACTERS]), refusal.status)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": "pages of other sites are refused"})
        await error_response(refusal, scope["path"])(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        name = _name_of(headers.get("host", ""))
        if not (self._any_name or name in self._names or is_loopback(name) or (self._any_address and address_of(name))):
            return ApiError(421, f"unknown host name {name[:100]!r} for this server. Fix: {self._fix}")
        origin = headers.get("origin")
        if self._own_pages_only and origin is not None and origin.partition("://")[2] != headers.get("host"):
            return ApiError(403, f"{origin[:100]!r} is another site, whose pages are refused. Fix: use this server's own page")
        return None


def _name_of(host: str) -> str:
    """The name in a Host header without its port, in lower case; empty if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
