"""The life of a request: admit, read and check it, open its images, start the engine's reply, and answer whole or in events.

Nothing blocks the event loop: a few threads parse bodies and build prompts, and pieces of text come from the engine's thread
through a queue. If a request ends early (the client left, the server closes, an error), its reply is cancelled.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from vismoe.app.answers import AnswerChoices, AnswerForm, tokens_of
from vismoe.app.api_errors import ApiError, api_error_of
from vismoe.app.callers import Caller, Callers
from vismoe.app.costs import (
    BASE_BYTES,
    PictureCost,
    body_bytes,
    held_bytes,
    parsing_bytes,
    prompts_bytes,
    text_bytes,
)
from vismoe.app.images import Asked, AskedDocument, AskedImage, AskedVideo, ImageIntake
from vismoe.app.messages import CountRequest, MessagesRequest
from vismoe.app.options import ServeOptions
from vismoe.app.request_memory import LARGE_BODY_BYTES, MemoryKind, MemoryShare
from vismoe.app.responses import ResponsesRequest
from vismoe.app.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Sampling,
    TokenizeRequest,
    Translated,
    count_values,
    parse,
)
from vismoe.errors import ContextError, InputError
from vismoe.models.inputs.prompts import Prompt
from vismoe.models.inputs.responses import Piece
from vismoe.options import INT64, RequestOptions

PREPARERS = 4  # prompts that are built at the same time; decoded images are large
BEAT_S = 15.0  # between two keep-alive events while there is no text yet, because proxies close silent connections
BEAT = b": still at it\n\n"
CHARACTERS_OF_A_TOKEN = 256  # the most in one token; runs of blanks are the longest
EMPTY = ContentPart(type="text", text="")  # content of an assistant message without text
REQUEST_ID = "X-Request-ID"
STEP_BYTES = 2**20  # buffer growth for a body of unknown length

Call = Callable[..., Any]  # starts and returns the engine's reply, whose seed may be given by name; or makes a prompt
Placed = tuple[int, Piece]  # a piece, of which answer
Named = Callable[[ApiError], ApiError]
Result = TypeVar("Result")


class Completions:
    """Answers requests with an engine, under the name `model`."""

    def __init__(self, engine: Any, options: ServeOptions, model: str, callers: Callers, intake: ImageIntake):
        self._engine, self._options, self._model = engine, options, model
        self._callers, self._intake = callers, intake
        self._model_samples = bool(engine.model.generation_config.do_sample)
        self._threads = CapacityLimiter(PREPARERS)

    async def chat(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(http, ChatRequest)

    async def text(self, http: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(http, CompletionRequest)

    async def responses(self, http: Request) -> Response:
        """POST /v1/responses."""
        return await self._answer(http, ResponsesRequest)

    async def messages(self, http: Request) -> Response:
        """POST /v1/messages, of the Anthropic API."""
        return await self._answer(http, MessagesRequest)

    async def count_of_messages(self, http: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        return JSONResponse({"input_tokens": len(await self._ids(http, CountRequest))})

    async def count_of_responses(self, http: Request) -> Response:
        """POST /v1/responses/input_tokens."""
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(await self._ids(http, ResponsesRequest))})

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize, in vLLM's form."""
        ids = await self._ids(http, TokenizeRequest)
        return JSONResponse({"count": len(ids), "max_model_len": self._engine.plan.context, "tokens": ids})

    async def _ids(self, http: Request, kind: type[Body]) -> list[int]:
        """The tokens of the prompt of a request."""
        caller = self._callers.enter()
        try:
            (built,), wish = await self._asked(http, caller, kind, building=True)
            with naming(wish.named):
                prompt: Prompt = await self._in_thread(built)
            ids: list[int] = prompt.inputs["input_ids"][0].tolist()
            return ids
        finally:
            self._callers.ends(caller)

    async def _answer(self, http: Request, kind: type[Body]) -> Response:
        caller = self._callers.enter()
        try:
            calls, wish = await self._asked(http, caller, kind)
            caller.memory.shrink(MemoryKind.LARGE_BODY, 0)  # the body and its parsed form are released
            caller.memory.shrink(MemoryKind.BODY, BASE_BYTES + wish.held_bytes)
            with naming(wish.named):
                replies = await self._in_thread(unless_left, caller, calls, wish)
            del calls  # releases the pictures
            said = Said(replies, caller.memory)
            caller.memory.is_built()
            caller.takes(replies)
            answer = AnswerChoices([form(self._model) for form in wish.forms for _ in range(wish.n)], wish.n)
            if wish.stream:
                pieces = said.pieces(BEAT_S)
                if wish.change:  # a change may be impossible, so the response waits until that is known
                    pieces = await begun(pieces)
                return EventStream(answer, replies, pieces, caller, partial(self._callers.ends, caller))
            whole: list[list[Piece]] = [[] for _ in replies]
            async for place, piece in said.pieces():
                whole[place].append(piece)
            caller.check()
        except BaseException:
            self._callers.ends(caller)
            raise
        self._callers.ends(caller)
        return JSONResponse(answer.whole(whole, [reply.figures for reply in replies]), headers={REQUEST_ID: answer.id})

    async def _asked(self, http: Request, caller: Caller, kind: type[Body], building: bool = False) -> tuple[list[Call], "Wish"]:
        """The calls to the engine for a request, one for each prompt, and the form of the answers. Body and text are released
        when this returns. building: the calls make prompts and ask for no answer."""
        share = caller.memory
        await share.grow(MemoryKind.BODY, BASE_BYTES)
        body = await body_of(http, share)
        values = await self._in_thread(count_values, body)
        await share.grow(MemoryKind.BODY, await self._in_thread(parsing_bytes, body, values))
        request, wish = await self._in_thread(understood, kind, body)
        del body
        await share.grow(MemoryKind.BODY, wish.held_bytes)
        self._check_model(request.model)
        caller.watch(http.receive)
        self._callers.expect(caller, max(1, wish.answers))
        if isinstance(request, CompletionRequest):
            return await self._of_texts(request, share, building), wish
        assert isinstance(request, ChatRequest)
        with naming(wish.named):
            options = self._chat_options(request)
            messages = await self._messages(request, share, options.image_tokens)
        task = self._engine.prompt_of if building else self._engine.chat
        return [partial(task, messages, options, **request.of_template)], wish

    async def _of_texts(self, request: CompletionRequest, share: MemoryShare, building: bool) -> list[Call]:
        options, texts = self._request_options(request), [prompt for prompt in request.prompts if isinstance(prompt, str)]
        self._check_length(max(map(len, texts), default=0), "prompt")
        await share.grow(MemoryKind.PICTURES, of_text := text_bytes(texts))
        share.decoded(0, of_text)
        if building:
            return [partial(self._engine.prompts.build_text, prompt) for prompt in request.prompts]
        return [partial(self._engine.complete, prompt, options) for prompt in request.prompts]

    def _check_model(self, asked: str | None) -> None:
        if asked not in (None, self._model):
            message = f"there is no model of this name. Fix: use {self._model}"
            raise ApiError(404, message, "model", "model_not_found")

    def _check_length(self, characters: int, param: str) -> None:
        """Refuses text that is certainly too long before tokenizing it, which takes long."""
        most = CHARACTERS_OF_A_TOKEN * self._engine.plan.context
        if characters > most:
            message = f"{characters:,} characters are more than a context of {self._engine.plan.context:,} tokens can hold"
            raise ApiError(400, message, param, "context_length_exceeded")

    async def _messages(
        self, request: ChatRequest, share: MemoryShare, image_tokens: tuple[int, int] | None
    ) -> list[dict[str, Any]]:
        """The conversation in the engine's form, with opened images."""
        messages = request.conversation
        texts = [part.text for message in messages for part in message.content or () if part.text]
        texts += [json.dumps(message.further) for message in messages if message.further]
        texts += [
            json.dumps(given) for given in (request.model_dump(include={"tools"})["tools"], request.chat_template_kwargs) if given
        ]
        self._check_length(sum(map(len, texts)), "messages")
        parts = iter(await self._opened(request, share, image_tokens, text_bytes(texts)))
        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": [
                    made
                    for part in message.content or [EMPTY]
                    for made in ([{"type": "text", "text": part.text}] if part.source is None else next(parts))
                ],
                **message.further,
            }
            for message in messages
        ]

    async def _opened(
        self, request: ChatRequest, share: MemoryShare, image_tokens: tuple[int, int] | None, of_text: int
    ) -> list[list[dict[str, Any]]]:
        """The engine's message parts of each image, video and document of a request."""
        context, tokens = self._engine.plan.context, 0

        def told(cost: PictureCost) -> None:
            nonlocal tokens
            tokens += cost.tokens
            if tokens >= context:
                message = f"the images need at least {tokens:,} tokens, the planned context is {context:,}. Fix: smaller images"
                raise ApiError(400, message, "messages", "context_length_exceeded")

        try:
            asked = [self._wanted(part, size, image_tokens) for part, size in zip(request.pictures, request.sizes)]
            opened = iter(await self._intake.open_all([one for _, these in asked for one in these], share, of_text, told))
        except InputError as error:
            code = "context_length_exceeded" if isinstance(error, ContextError) else "invalid_image"
            raise ApiError(400, str(error), "messages", code) from error
        made = []
        for (options, these), part in zip(asked, request.pictures):
            kind, given = options["type"], [next(opened) for _ in these]
            pages = given[0] if isinstance(given[0], list) else [given if isinstance(part.source, list) else given[0]]
            made.append([options | {kind: page} for page in pages])
        return made

    def _wanted(
        self, part: ContentPart, size: dict[str, Any], image_tokens: tuple[int, int] | None
    ) -> tuple[dict[str, Any], list[Asked]]:
        """(the options of the engine's message part, what is opened for it) of an image, a video or a document."""
        prompts, source, most = self._engine.prompts, part.source, self._options.max_images
        if part.is_video:
            videos, options = prompts.videos(image_tokens, self._engine.plan.context), {**part.video_options(), **size}
            if not isinstance(source, list):
                return {"type": "video", **options}, [AskedVideo(str(source), videos, options)]
            look = videos.look(len(source), options)
            return {"type": "video", **options}, [AskedImage(frame, look, number > 0) for number, frame in enumerate(source)]
        options = size or (prompts.low_detail(image_tokens) if part.low_detail else {})
        look, url = prompts.look(image_tokens, options), str(source)
        return {"type": "image", **options}, [AskedImage(url, look) if part.file is None else AskedDocument(url, look, most)]

    def _chat_options(self, request: ChatRequest) -> RequestOptions:
        options, context = self._request_options(request, self._options.image_tokens), self._engine.plan.context
        if (tokens := options.image_tokens) and tokens[1] > context:
            raise ApiError(400, f"image_tokens up to {tokens[1]} exceed the context of {context} tokens", "vismoe.image_tokens")
        return options

    def _request_options(self, request: Sampling, image_tokens: tuple[int, int] | None = None) -> RequestOptions:
        """The engine options of a request of either kind. Raises ApiError."""
        ours, serve = request.vismoe, self._options
        if ours and ours.change and serve.fixed_policy:
            message = "this server runs one policy with one pair of formats (--fixed-policy). Fix: leave it out"
            raise ApiError(403, message, f"vismoe.{ours.change}", "policy_is_fixed")
        usual = RequestOptions(max_tokens=serve.max_tokens, image_tokens=image_tokens, reuse=not serve.no_reuse)
        return request.options(usual, self._model_samples)

    async def _in_thread(self, task: Callable[..., Result], *arguments: Any) -> Result:
        return await to_thread.run_sync(task, *arguments, limiter=self._threads)


class EventStream(Response):
    """An answer as server-sent events. Calls `ends` after the last event, or when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: AnswerChoices,
        replies: Sequence[Any],
        pieces: AsyncIterator[Placed],
        caller: Caller,
        ends: Callable[[], None],
    ):
        super().__init__(headers={REQUEST_ID: answer.id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer, self._replies, self._pieces, self._caller, self._ends = answer, replies, pieces, caller, ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._ends()

    async def _events(self) -> AsyncIterator[bytes]:
        encoded = self._answer.encoded
        try:
            for chunk in self._answer.opening():
                yield encoded(chunk)
            async for place, piece in self._pieces:
                if not piece and not tokens_of([piece]):
                    yield BEAT
                    continue
                for chunk in self._answer.piece(place, piece):
                    yield encoded(chunk)
            self._caller.check()
            for chunk in self._answer.closing([reply.figures for reply in self._replies]):
                yield encoded(chunk)
            if self._answer.end:
                yield self._answer.end
        except ClientDisconnect:
            raise
        except Exception as error:  # the boundary of a request whose answer has begun, which can only end with an event
            yield self._answer.error(api_error_of(error))


def unless_left(caller: Caller, calls: Sequence[Call], wish: "Wish") -> list[Any]:
    """Starts the replies, unless the client left while other prompts were built. Those of a prompt have seeds of their own."""
    replies = list[Any]()
    try:
        for call, place in product(calls, range(wish.n)):
            caller.check()
            replies.append(call(**({} if wish.seed is None else {"seed": (wish.seed + place + INT64) % (2 * INT64) - INT64})))
    except BaseException:
        for reply in replies:
            reply.cancel()
        raise
    return replies


@dataclass(frozen=True)
class Wish:
    """How a client wants the answers, and how many."""

    stream: bool
    change: bool  # the request changes policy or formats
    n: int  # answers to each prompt
    seed: int | None  # of the first one
    forms: Sequence[AnswerForm]  # for each prompt
    held_bytes: int  # of the request, until its answers have ended
    named: Named  # an error in the names of the request's door

    @property
    def answers(self) -> int:
        return self.n * len(self.forms)

    @classmethod
    def of(cls, request: Sampling, forms: Sequence[AnswerForm], held: int, named: Named) -> "Wish":
        change, n = bool(request.vismoe and request.vismoe.change), request.n or 1
        return cls(bool(request.stream), change, n, request.seed, forms, n * held, named)


def understood(kind: type[Body], body: bytearray) -> tuple[Sampling, Wish]:
    """A request in our form, and how its answers are wanted. Takes long where the body is large."""
    with naming(kind.named):
        parsed = parse(kind, body)
    named = partial(kind.named, parsed=parsed)
    with naming(named):
        request = parsed.translated() if isinstance(parsed, Translated) else parsed
    assert isinstance(request, Sampling)
    prompts = prompts_bytes(request.prompts) if isinstance(request, CompletionRequest) else 0
    return request, Wish.of(request, parsed.forms(), held_bytes(parsed.repeated) + prompts, named)


@contextmanager
def naming(named: Named) -> Iterator[None]:
    """Errors about a request are told in the names of its door."""
    try:
        yield
    except (ApiError, InputError, ValidationError) as error:
        raise named(api_error_of(error)) from error


class Said:
    """The text of replies as it arrives. The replies and their caller hold `share` until all of them have ended."""

    def __init__(self, replies: Sequence[Any], share: MemoryShare):
        arrived = asyncio.Queue[tuple[int, Piece | None]]()
        self._replies, self._arrived = replies, arrived
        share.users += len(replies)
        loop = asyncio.get_running_loop()

        def arrive(place: int, piece: Piece | None) -> None:
            arrived.put_nowait((place, piece))
            if piece is None:
                share.let_go()

        def put(place: int, piece: Piece | None) -> None:  # runs on the model's thread
            with suppress(RuntimeError):  # the loop was closed, so there is no reader
                loop.call_soon_threadsafe(arrive, place, piece)

        for place, reply in enumerate(replies):
            reply.deliver_to(partial(put, place))

    async def pieces(self, beat_s: float | None = None) -> AsyncIterator[Placed]:
        """Yields the text, and an empty piece whenever `beat_s` passed without any. Raises the first error of a reply."""
        running = len(self._replies)
        while running:
            try:
                async with asyncio.timeout(beat_s):
                    place, piece = await self._arrived.get()
            except TimeoutError:
                yield 0, ""
                continue
            if piece is not None:
                yield place, piece
                continue
            running -= 1
            if self._replies[place].error is not None:
                raise self._replies[place].error


async def body_of(http: Request, share: MemoryShare) -> bytearray:
    """Reads the body, after `share` holds memory for it. Raises ApiError."""
    announced = int(http.headers.get("content-length", 0))  # the gate has checked it
    kind = MemoryKind.LARGE_BODY if announced > LARGE_BODY_BYTES or "transfer-encoding" in http.headers else MemoryKind.BODY
    held = body_bytes(announced)
    await share.grow(kind, held)
    body = bytearray()
    async for chunk in http.stream():
        if (more := body_bytes(len(body) + len(chunk)) - held) > 0:  # a body without an announced length
            await share.grow(kind, more + STEP_BYTES)
            held += more + STEP_BYTES
        body += chunk
    return body


async def begun(pieces: AsyncIterator[Placed]) -> AsyncIterator[Placed]:
    """The same pieces, after the first piece or keep-alive arrived. Raises the error that came instead."""
    first = await anext(pieces, None)

    async def all_of_them() -> AsyncIterator[Placed]:
        if first is not None:
            yield first
        async for piece in pieces:
            yield piece

    return all_of_them()
