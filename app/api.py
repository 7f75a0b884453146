"""The OpenAI-compatible server as an ASGI application: its routes and their handlers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from vismoe.app.allocator import give_back_memory
from vismoe.app.answers import listed, served_model
from vismoe.app.api_errors import ApiError, api_error_of, error_response
from vismoe.app.callers import Callers
from vismoe.app.completions import REQUEST_ID, Completions
from vismoe.app.guard import Guard
from vismoe.app.images import ImageIntake, ImageLimits
from vismoe.app.known_hosts import KnownHosts
from vismoe.app.options import ServeOptions, is_loopback, served_name
from vismoe.app.prometheus import metrics_text
from vismoe.app.request_memory import RequestMemory
from vismoe.config import SERVER_DEFAULTS, parse_bytes

NOT_FOUND = (
    "there is no such address. Fix: use /v1/chat/completions, /v1/responses, /v1/completions, /v1/messages, /v1/models, /tokenize"
)


def create_app(engine: Any, options: ServeOptions) -> FastAPI:
    """The application. The caller closes the engine after running it; `app.state.callers.drain` ends it gently.

    The engine's setting `request_memory`, which its plan includes, bounds the memory of requests; for an engine loaded without
    it, `SERVER_DEFAULTS` bounds that memory outside the plan. Raises ConfigError if `options` name a folder that does not exist.
    """
    model_name = options.served_model_name or served_name(engine.name)
    model = served_model(model_name, engine.plan.context)
    planned = engine.settings.request_memory_bytes or parse_bytes(SERVER_DEFAULTS["request_memory"])
    memory = RequestMemory(planned, options.memory_timeout_s)
    callers = Callers(engine, options.max_waiting, memory)
    intake = ImageIntake(ImageLimits.of(options))
    completions = Completions(engine, options, model_name, callers, intake)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        giving_back = asyncio.create_task(give_back_memory())
        yield
        giving_back.cancel()
        intake.close()

    app = FastAPI(title="VisMoE", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.callers = callers
    app.add_middleware(Guard, options=options)
    app.add_middleware(
        KnownHosts,
        host=options.host,
        fix="vismoe serve --allow-host NAME",
        further=options.allow_hosts,
        any_name=bool(options.api_keys) and not is_loopback(options.host),
        any_address=not is_loopback(options.host),
    )
    if options.allow_origins:
        # outside the gate, because browsers send preflight requests without a key and must be able to read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_api_route("/v1/chat/completions", completions.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/messages", completions.messages, methods=["POST"], response_model=None)
    app.add_api_route("/v1/messages/count_tokens", completions.count_of_messages, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses/input_tokens", completions.count_of_responses, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", completions.responses, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", completions.text, methods=["POST"], response_model=None)
    app.add_api_route("/tokenize", completions.tokenize, methods=["POST"], response_model=None)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [listed(model, engine.precision, options.fixed_policy)]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != model_name:
            raise ApiError(404, f"there is no model of this name. Fix: use {model_name}", "model", "model_not_found")
        return JSONResponse(listed(model, engine.precision, options.fixed_policy))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        held = {"bytes": memory.total_bytes, "used_bytes": memory.used_bytes, "waiting": memory.waiting}
        status, code = ("closing", 503) if callers.draining else ("ok", 200)
        return JSONResponse({"status": status, "request_memory": held}, code)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await to_thread.run_sync(metrics_text, engine, memory), media_type=CONTENT_TYPE_LATEST)

    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    described = api_error_of(error)
    if described.status == 404:
        described = ApiError(404, NOT_FOUND, code="unknown_url")
    return error_response(described, request.url.path)
