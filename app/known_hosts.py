"""Which names a server answers to, and which web pages may call it: one gate for the API and for the chat page.

A page of somebody else can make its visitor's browser call a server on the visitor's machine: under a host name of its own that
it points there (DNS rebinding), or across origins, which needs nobody's leave for a form or an upload. Both are told by headers
that browsers write themselves, and are refused before a byte of the body is read.
"""

import ipaddress
import logging
from collections.abc import Collection
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vismoe.app.api_errors import ApiError, error_response
from vismoe.app.options import is_loopback

__all__ = ["MAX_LOGGED_CHARACTERS", "KnownHosts"]

log = logging.getLogger("vismoe.serve")

MAX_LOGGED_CHARACTERS = 120


class KnownHosts:
    """ASGI middleware. This machine's own names, `host` and `further` are known, and `any_name` where a key keeps strangers out.

    `any_address`: so is a host that is given as a number: no name server was asked, so none can have lied.
    `own_pages_only`: no page of another origin may call. Whoever accepts JSON only can do without it, since browsers ask for
    leave before they send that. `fix` is what to do about an unknown name.
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
            return await send({"type": "websocket.close", "code": 1008, "reason": "not for pages of another site"})
        await error_response(refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        name = _name_of(headers.get("host", ""))
        if not (self._any_name or name in self._names or is_loopback(name) or (self._any_address and _is_address(name))):
            return ApiError(421, f"this server is not known as {name[:100]!r}. Fix: {self._fix}")
        origin = headers.get("origin")
        if self._own_pages_only and origin is not None and origin.partition("://")[2] != headers.get("host"):
            return ApiError(403, f"{origin[:100]!r} is another site. Fix: use the page that this server shows")
        return None


def _name_of(host: str) -> str:
    """The name of a Host header without its port, in lower case; empty for what is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
