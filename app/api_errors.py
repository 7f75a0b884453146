"""Errors in the form of OpenAI's API: a status, and `{"error": {message, type, param, code}}`. All errors are mapped here.

A client's error is described in one sentence; an internal error goes to the log under an id, and the client receives the id.
"""

import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vismoe.errors import BudgetError, ClosedError, ConfigError, ContextError, InputError

log = logging.getLogger("vismoe.serve")

MAX_MESSAGE_CHARACTERS = 500
FOLDERS = re.compile(r"(?<![\w/])/(?:[^\s/'\":,]+/)+")  # the folders of an absolute path
RETRY_S = 5
OF_MESSAGES = {  # types of errors of the Anthropic API, by status
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


@dataclass
class ApiError(Exception):
    """An error for the client. `param`: the field of the request that it is about, e.g.
    `messages[0].content[1].image_url.url`."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @classmethod
    def too_many(cls, waiting: int) -> "ApiError":
        message = f"{waiting} requests are waiting already. Fix: try again later"
        return cls(429, message, None, "rate_limit_exceeded", "rate_limit_error", {"Retry-After": str(RETRY_S)})

    @classmethod
    def no_memory(cls, waited_s: float) -> "ApiError":
        message = f"other requests hold the memory for bodies and pictures (waited {waited_s:.3g} s). Fix: try again later"
        return cls(429, message, None, "request_memory", "rate_limit_error", {"Retry-After": str(RETRY_S)})

    @classmethod
    def closing(cls) -> "ApiError":
        headers = {"Retry-After": str(RETRY_S), "Connection": "close"}
        return cls(503, "the server is shutting down", None, "shutting_down", "server_error", headers)


def api_error_of(error: BaseException) -> ApiError:
    """The ApiError for any exception; internal errors go to the log with an id."""
    match error:
        case ApiError():
            return error
        case ContextError():
            return ApiError(400, _short(str(error)), "messages", "context_length_exceeded")
        case InputError():
            return ApiError(400, _short(str(error)))
        case ConfigError() | BudgetError():  # in a request: the store or memory does not allow its policy or formats
            return ApiError(400, FOLDERS.sub("", str(error)), "vismoe", "cannot_be_planned")
        case ClosedError():
            return ApiError.closing()
        case ValidationError():
            return _invalid(error)
        case HTTPException():
            return ApiError(error.status_code, f"{error.detail}", headers=error.headers or {})
    mark = uuid.uuid4().hex[:12]
    log.error("internal error %s", mark, exc_info=error)
    return ApiError(500, f"internal error; the server's log has it as {mark}", None, "internal_error", "server_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error."""
    return {"error": dict(code=error.code, message=error.message, param=error.param, type=error.type)}


def error_of_messages(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error, in the form of the Anthropic API."""
    return {"type": "error", "error": {"type": OF_MESSAGES.get(error.status, "api_error"), "message": error.message}}


def error_response(error: ApiError, path: str = "") -> JSONResponse:
    """path: of the request, which has the form of its door."""
    body = error_of_messages(error) if path.startswith("/v1/messages") else error_body(error)
    return JSONResponse(body, error.status, dict(error.headers))


def _invalid(error: ValidationError) -> ApiError:
    """The first error in a request, without the request's values."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    reason = {"missing": "is missing", "extra_forbidden": "is not a parameter of this server. Fix: leave it out"}
    message = f"{param or 'the request'}: {reason.get(first['type'], first['msg'])}"
    return ApiError(400, _short(message), _short(param) or None)


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 3] + "..."
