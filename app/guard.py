"""The gate before every route: which clients are allowed, how much they may send and how slowly, and the access log.

Keys and sizes are checked before a byte of a body is read; `known_hosts` runs before this gate. Every exception of a route
becomes one error response.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vismoe.app.api_errors import ApiError, api_error_of, error_response
from vismoe.app.known_hosts import MAX_LOGGED_CHARACTERS
from vismoe.app.options import ServeOptions

log = logging.getLogger("vismoe.serve")

OPEN = ("/health",)  # needs no key, because load balancers have none
PAUSE_S = 10.0  # most seconds between two pieces of a body: a stalled body holds memory that other requests need
CLIENT_LEFT = 499  # the status in logs for a client that disconnected; it is never sent


class KeyCheck:
    """Whether a request is allowed; without keys every request is.

    Keys are stored as SHA-256 digests, and a candidate's digest is compared with every one of them in constant time, so that the
    time of an answer reveals neither the length of a key, nor how much of it was correct, nor which key it was.
    """

    def __init__(self, keys: Sequence[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        """Whether the server requires a key."""
        return bool(self._digests)

    def allows(self, headers: Mapping[str, str]) -> bool:
        """headers: by lower-case name, as starlette's are. Accepts `Authorization: Bearer KEY` or `x-api-key: KEY`."""
        if not self._digests:
            return True
        candidate = _digest(_key_in(headers))
        return sum(hmac.compare_digest(candidate, digest) for digest in self._digests) > 0  # sum compares all, unlike any


def _key_in(headers: Mapping[str, str]) -> str:
    """The key in a request's headers; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, options: ServeOptions):
        self._app, self._options, self._keys = app, options, KeyCheck(options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began_s, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._bounded(receive), noting)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except Exception as error:  # the boundary of every request
            if status:  # too late for another answer: the connection is closed
                raise
            await error_response(api_error_of(error), scope["path"])(scope, receive, noting)
        finally:
            address = quote(scope["path"][:MAX_LOGGED_CHARACTERS])
            log.info("%s %s %d %.2f s", scope["method"], address, status, time.perf_counter() - began_s)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN and not self._keys.allows(headers):
            message = "the API key is missing or wrong. Fix: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] != "POST":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a foreign web page cannot send this type without a preflight request
            raise ApiError(415, "the body must be JSON. Fix: send the header Content-Type: application/json")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy may use one and this server the other
            message = "the request has both Content-Length and Transfer-Encoding. Fix: send one of them"
            raise ApiError(400, message, headers={"Connection": "close"})
        if not length.isdecimal():
            raise ApiError(
                400, "Content-Length is not a number. Fix: send the number of bytes of the body", headers={"Connection": "close"}
            )
        if int(length) > self._options.max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, while the body stays within its limits of size and time."""
        size_bytes, complete, deadline_s = 0, False, 0.0

        async def bounded() -> Message:
            nonlocal size_bytes, complete, deadline_s
            if complete:
                return await receive()
            now_s = asyncio.get_running_loop().time()
            deadline_s = deadline_s or now_s + self._options.body_timeout_s  # starts here, not while the request waits for memory
            try:
                async with asyncio.timeout_at(min(deadline_s, now_s + PAUSE_S)):
                    message = await receive()
            except TimeoutError as error:
                text = f"the body did not arrive within {self._options.body_timeout_s:g} s, or paused for {PAUSE_S:g} s"
                raise ApiError(408, f"{text}. Fix: send it faster, or send less", code="body_timeout") from error
            size_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size_bytes > self._options.max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        message = (
            f"the body is larger than {self._options.max_body_bytes:,} bytes. Fix: send less text, or fewer and smaller images"
        )
        return ApiError(413, message, code="body_too_large")
