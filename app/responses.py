"""The OpenAI API's responses: its requests as chat requests, and the answers as items.

Nothing is stored: the client sends the whole conversation in `input`, and what refers to something stored is refused by name.
"""

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from vismoe.app.answers import AnswerForm, Json, encoded_event, entry_of, tokens_of, usage_of, vismoe_of
from vismoe.app.api_errors import ApiError
from vismoe.app.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    ChatRequest,
    JsonSchema,
    Nulls,
    OpenaiBody,
    Strict,
    Translated,
    Unused,
    VismoeRequest,
)
from vismoe.models.inputs.responses import Piece, Reasoning
from vismoe.models.inputs.tools import CallPart, ToolCall
from vismoe.options import MOST_TOP, AnswerTokens
from vismoe.ranges import Range

if TYPE_CHECKING:
    from vismoe.engine.logprobs import TokenLogprob
    from vismoe.engine.stats import Figures

NOT_STORED = "nothing is stored, the conversation goes into input"
EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # the nearest that chat templates know
NAMES = (  # fields of a chat request, or of one that could not be read, as this door has them
    (r"^messages$", "input"),
    (r"(?<=\])\.(?:message|reasoning|function_call(?:_output)?|(?:in|out)put_\w+|\w+_text|refusal)(?=[.\[]|$)", ""),  # types
    (r"\.(?:[A-Z]\w*|literal\[.*\])", ""),
    (r"\.image_url\.(?:url|(detail))$", lambda found: ".detail" if found[1] else ".image_url"),
    (r"\.file\.file_data$", ".file_data"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^max_(?:completion_)?tokens$", "max_output_tokens"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^response_format(?:\.json_schema)?", "text.format"),
)
NOT_CUT = "a conversation that is too long is refused"


class InputText(Nulls):
    """annotations, logprobs: of an earlier answer; they say nothing to the model."""

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    def part(self) -> Json:
        return {"type": "text", "text": self.text}


class InputImage(Nulls):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: None = None  # nothing is stored
    detail: str | None = None

    def part(self) -> Json:
        detail = "high" if self.detail == "original" else self.detail
        return {"type": "image_url", "image_url": {"url": self.image_url or "", "detail": detail}}


class InputFile(Nulls):
    """A PDF document. filename, detail: taken, and not used."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    file_id: None = None  # nothing is stored
    filename: str | None = None
    detail: str | None = None

    def part(self) -> Json:
        return {"type": "file", "file": {"file_data": self.file_data or self.file_url or ""}}


class RefusalPart(Nulls):
    type: Literal["refusal"]
    refusal: str

    def part(self) -> Json:
        return {"type": "text", "text": self.refusal}


Content = Annotated[InputText | InputImage | InputFile | RefusalPart, Field(discriminator="type")]


def _as_content(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Contents = Annotated[list[Content], Field(max_length=MAX_PARTS), BeforeValidator(_as_content)]


class InputItem(Nulls):
    """id, status, phase: of an answer that comes back; taken, and not used."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(InputItem):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents
    phase: str | None = None

    def message(self) -> Json:
        return {"role": self.role, "content": [content.part() for content in self.content]}


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def message(self) -> Json:
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"role": "assistant", "tool_calls": [call]}


class OutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: Contents

    def message(self) -> Json:
        return {"role": "tool", "tool_call_id": self.call_id, "content": [content.part() for content in self.output] or ""}


class ReasoningItem(InputItem):
    """encrypted_content: nothing here is encrypted, what the model thought is in `content`."""

    type: Literal["reasoning"]
    summary: Contents = []
    content: Contents = []
    encrypted_content: str | None = None

    def message(self) -> Json:
        thought = "".join(content.part().get("text", "") for content in self.content or self.summary)
        return {"role": "assistant", "reasoning_content": thought}


def _with_type(item: Any) -> Any:
    """A message needs not say that it is one."""
    return {**item, "type": item.get("type") or "message"} if isinstance(item, dict) and "role" in item else item


AnyItem = Annotated[
    Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")], BeforeValidator(_with_type)
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(Nulls):
    """A function of the client's. Tools that the vendor runs have another type, and are refused."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Strict):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Nulls):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Nulls):
    """summary: taken; what the model thinks is told whole."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Translated, OpenaiBody):
    """The body of /v1/responses, and of /v1/responses/input_tokens."""

    unused: ClassVar[Unused] = {
        "background": ((False,), "answers are waited for"),
        "store": ((False,), NOT_STORED),
        "previous_response_id": ((), NOT_STORED),
        "conversation": ((), NOT_STORED),
        "prompt": ((), "there are no stored prompts"),
        "max_tool_calls": ((), "this server runs no tools itself"),
        "truncation": (("disabled",), NOT_CUT),
        "context_management": (([],), NOT_CUT),
        "service_tier": (("auto", "default"), "there is one tier"),
        "stream_options": (({}, {"include_obfuscation": False}), "events are not padded"),
    }

    input: Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_as_items)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Range(0, MOST_TOP)] | None = None
    max_output_tokens: AnswerTokens | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    vismoe: VismoeRequest | None = None

    def translated(self) -> ChatRequest:
        names = self.model_fields_set & ChatRequest.model_fields.keys() - {"tools", "tool_choice"}
        given: Json = {name: getattr(self, name) for name in names}
        given |= {"messages": [message for _, message in self._turns], "max_tokens": self.max_output_tokens}
        if self.tools:
            given["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        if isinstance(self.tool_choice, ChosenTool):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            schema = self.text.format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
            given["response_format"] = {"type": self.text.format.type, "json_schema": schema or None}
        if self.reasoning is not None:
            given["reasoning_effort"] = EFFORTS.get(self.reasoning.effort or "", self.reasoning.effort)
        given["logprobs"] = self._logprobs or None
        return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})

    @cached_property
    def _turns(self) -> Sequence[tuple[str, Json]]:
        """The messages, and where each of them is in this request."""
        system = [("instructions", {"role": "system", "content": self.instructions})] if self.instructions else []
        return [*system, *_joined((f"input[{place}]", item.message()) for place, item in enumerate(self.input))]

    @classmethod
    def named(cls, error: ApiError, parsed: "Body | None" = None) -> ApiError:
        if error.param is None:
            return error
        turns = [place for place, _ in parsed._turns] if isinstance(parsed, cls) else []
        name = re.sub(r"^messages\[(\d+)\]", lambda found: turns[int(found[1])] if turns else found[0], error.param)
        for pattern, other in NAMES:
            name = re.sub(pattern, other, name)
        begin, colon, reason = error.message.partition(": ")
        return replace(error, param=name, message=f"{name}: {reason}" if begin == error.param and colon else error.message)

    @property
    def _logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @cached_property
    def repeated(self) -> Json:
        names = ("temperature", "top_p", "max_output_tokens", "metadata", "top_logprobs")
        of_request: Json = {name: getattr(self, name) for name in names}
        choice = self.tool_choice
        of_request |= {
            "instructions": self.instructions,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, ChosenTool) else choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in self.tools or ()],
            "reasoning": self.reasoning and self.reasoning.model_dump(),
            "text": {"format": {"type": "text"}, **(self.text.model_dump(exclude_none=True, by_alias=True) if self.text else {})},
        }
        return of_request

    def forms(self) -> Sequence[AnswerForm]:
        return [partial(ResponsesAnswer, self.repeated, self._logprobs)]


def _joined(messages: Iterator[tuple[str, Json]]) -> Iterator[tuple[str, Json]]:
    """Items of one turn of the assistant as one message, as chat templates expect it, at the place of its content."""
    begun, turn = "", dict[str, Any]()
    for place, message in messages:
        if message["role"] != "assistant" or not turn or "reasoning_content" in message:
            if turn:
                yield begun, turn
            begun, turn = place, {}
        if message["role"] != "assistant":
            yield place, message
            continue
        begun = place if "content" in message else begun
        for name, value in message.items():
            turn[name] = turn[name] + value if isinstance(value, list) and name in turn else value
    if turn:
        yield begun, turn


class ResponsesAnswer:
    """The answer to a request to /v1/responses, whole or in events: items one after the other, of one kind each.

    of_request: what the response repeats of its request.
    """

    end = b""
    PARTS: ClassVar[dict[str, str]] = {"message": "output_text", "reasoning": "reasoning_text"}  # types of an item's one part

    def __init__(self, of_request: Json, logprobs: bool, model: str):
        self.id = f"resp_{uuid.uuid4().hex}"
        fixed = {"object": "response", "created_at": int(time.time()), "model": model, "store": False, "background": False}
        self._made: Json = {"id": self.id, **fixed, **of_request, "truncation": "disabled", "previous_response_id": None}
        self._logprobs = logprobs
        self._items = list[Json]()  # those that have ended
        self._item: Json = {}  # the one that is open
        self._texts, self._tokens = list[str](), list[Json]()  # of it
        self._number = -1  # of the last event

    encoded = staticmethod(encoded_event)

    def error(self, error: ApiError) -> bytes:
        return self.encoded(self._event("error", code=error.code, message=error.message, param=error.param))

    def whole(self, pieces: Sequence[Piece], figures: "Figures") -> Json:
        for piece in pieces:
            for _ in self.piece(piece):
                pass
        *_, last = self.closing(figures)
        response: Json = last["response"]
        return response

    def opening(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def piece(self, piece: Piece) -> Iterator[Json]:
        if isinstance(piece, ToolCall | CallPart):
            yield from self._called(piece)
            return
        kind, text = ("reasoning", piece.text) if isinstance(piece, Reasoning) else ("message", str(piece))
        yield from self._begun(kind)
        self._texts.append(text)
        yield self._at(f"{self.PARTS[kind]}.delta", content_index=0, delta=text, **self._scored(kind, tokens_of([piece])))

    def _called(self, call: ToolCall | CallPart) -> Iterator[Json]:
        """A call that is not whole ends as an item that is incomplete."""
        if new := self._item.get("call_id") != call.id:
            yield from self._closed("completed")
            yield from self._opened("function_call", "fc", {"call_id": call.id, "name": call.name, "arguments": ""})
        if call.arguments and (new or isinstance(call, CallPart)):
            yield self._at("function_call_arguments.delta", delta=call.arguments)
        if isinstance(call, ToolCall):
            self._item["arguments"] = call.arguments
            if call.whole:
                yield self._at("function_call_arguments.done", arguments=call.arguments, name=call.name)
            yield from self._closed("completed" if call.whole else "incomplete")

    def closing(self, figures: "Figures") -> Iterator[Json]:
        if not self._items and not self._item:
            yield from self._begun("message")
        cut = figures.finish == "length"
        status = "incomplete" if cut else "completed"
        yield from self._closed(status)
        response = self._response(status, incomplete_details={"reason": "max_output_tokens"} if cut else None)
        usage = usage_of(figures)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": figures.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": figures.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
        yield self._event(f"response.{status}", response={**response, "vismoe": vismoe_of(figures)})

    def _response(self, status: str, **further: Any) -> Json:
        nothing: Json = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._made, **nothing, "status": status, "output": list(self._items), **further}

    def _event(self, kind: str, **further: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **further}

    def _at(self, kind: str, **further: Any) -> Json:
        """An event of the item that is open."""
        return self._event(f"response.{kind}", item_id=self._item["id"], output_index=len(self._items), **further)

    def _opened(self, kind: str, mark: str, further: Json) -> Iterator[Json]:
        self._item = {"id": f"{mark}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **further}
        yield self._event("response.output_item.added", output_index=len(self._items), item=dict(self._item))

    def _begun(self, kind: str) -> Iterator[Json]:
        """A message or reasoning is open."""
        if self._item.get("type") == kind:
            return
        yield from self._closed("completed")
        self._texts, self._tokens = [], []
        if kind == "message":
            yield from self._opened(kind, "msg", {"role": "assistant", "content": []})
        else:
            yield from self._opened(kind, "rs", {"summary": [], "content": []})
        yield self._at("content_part.added", content_index=0, part=self._part(kind))

    def _closed(self, status: str) -> Iterator[Json]:
        """The open item is told whole."""
        if not self._item:
            return
        kind = self._item["type"]
        if kind in self.PARTS:
            part = self._part(kind)
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._at(f"{self.PARTS[kind]}.done", content_index=0, **told)
            yield self._at("content_part.done", content_index=0, part=part)
            self._item["content"] = [part]
        self._item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items), item=self._item)
        self._items.append(self._item)
        self._item = {}

    def _part(self, kind: str) -> Json:
        further: Json = {"annotations": [], "logprobs": list(self._tokens)} if kind == "message" else {}
        return {"type": self.PARTS[kind], "text": "".join(self._texts), **further}

    def _scored(self, kind: str, tokens: "Sequence[TokenLogprob]") -> Json:
        """The field `logprobs` of a piece of text."""
        entries = list(map(entry_of, tokens)) if self._logprobs else []
        self._tokens += entries
        return {"logprobs": entries} if kind == "message" else {}
