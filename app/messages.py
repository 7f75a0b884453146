"""The Anthropic API's messages: its requests as those of the OpenAI API, and the answers in its own form.

What is known and not done here is refused by name, as there; hints that ask for nothing (`cache_control`, `metadata`) are taken.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from vismoe.app.answers import AnswerForm, Json, encoded_event, vismoe_of
from vismoe.app.api_errors import ApiError, error_of_messages
from vismoe.app.schemas import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest, Nulls, Strict, Translated, as_parts
from vismoe.models.inputs.responses import Piece, Reasoning
from vismoe.models.inputs.tools import CallPart, ToolCall
from vismoe.options import AnswerTokens

if TYPE_CHECKING:
    from vismoe.engine.stats import Figures


class Hinted(Nulls):
    """cache_control: taken, and not used: prompts are reused by themselves."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Hinted):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] = []

    def parts(self) -> list[Json]:
        return [{"type": "text", "text": self.text}]


class ImageSource(Strict):
    """media_type: does not count, the content decides what it is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Hinted):
    type: Literal["image"]
    source: ImageSource

    def parts(self) -> list[Json]:
        url = self.source.url if self.source.type == "url" else f"data:image;base64,{self.source.data or ''}"
        return [{"type": "image_url", "image_url": {"url": url or ""}}]


class DocumentSource(Strict):
    """Of type text: the text itself; otherwise a PDF."""

    type: Literal["base64", "url", "text"]
    media_type: Literal["application/pdf", "text/plain"] | None = None
    data: str | None = None
    url: str | None = None


class DocumentBlock(Hinted):
    """title, context: given to the model before the document."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: dict[Literal["enabled"], Literal[False]] | None = None

    def parts(self) -> list[Json]:
        source, about = self.source, [TextBlock(type="text", text=f"{text}\n") for text in (self.title, self.context) if text]
        if source.type == "text":
            return _parts([*about, TextBlock(type="text", text=source.data or "")])
        data = source.url if source.type == "url" else f"data:application/pdf;base64,{source.data or ''}"
        return [*_parts(about), {"type": "file", "file": {"file_data": data or ""}}]


Visible = TextBlock | ImageBlock | DocumentBlock
Shown = Annotated[Visible, Field(discriminator="type")]


class ToolUse(Hinted):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResult(Hinted):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Shown] | None, BeforeValidator(as_parts)] = None
    is_error: bool | None = None

    def message(self) -> Json:
        failed = TextBlock(type="text", text="Error: " if self.is_error else "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _parts([failed, *(self.content or ())])}


class Thinking(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Strict):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[Visible | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_PARTS), BeforeValidator(as_parts)]

    def messages(self) -> Iterator[Json]:
        """Tool results come before what the user says. Raises ApiError for a block that belongs to another role."""
        blocks = self.content
        of_role = {"assistant": (TextBlock, ToolUse, Thinking, RedactedThinking), "system": (TextBlock,)}
        allowed = of_role.get(self.role, (Visible, ToolResult))
        for block in blocks:
            if not isinstance(block, allowed):
                raise ApiError(400, f"a block of type {block.type} does not belong to the role {self.role}", "messages")
        yield from (block.message() for block in blocks if isinstance(block, ToolResult))
        shown = _parts([block for block in blocks if isinstance(block, Visible)])
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks
            if isinstance(block, ToolUse)
        ]
        thought = "".join(block.thinking for block in blocks if isinstance(block, Thinking))
        further: Json = {"tool_calls": calls} if calls else {}
        further |= {"reasoning_content": thought} if thought else {}
        if shown or further or not blocks:
            yield {"role": self.role, "content": shown or None, **further}


def _parts(blocks: Sequence[Visible]) -> list[Json]:
    return [part for block in blocks for part in block.parts()]


class OwnTool(Hinted):
    """A tool of the client's own. Those that a vendor runs are refused: they have another type."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def tool(self) -> Json:
        about = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.input_schema}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def given(self) -> Json:
        named = {"type": "function", "function": {"name": self.name or ""}}
        choice = named if self.type == "tool" else {"any": "required"}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class ThinkingWish(Strict):
    """adaptive: as the model was trained to. display: taken, what the model thinks is always told."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high"] | None = None
    format: OutputFormat | None = None


class CountRequest(Translated, Hinted):
    """The body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[list[TextBlock] | None, BeforeValidator(as_parts)] = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: OutputConfig | None = None
    vismoe: dict[str, Any] | None = None

    def translated(self) -> ChatRequest:
        system = [{"role": "system", "content": _parts(self.system)}] if self.system else []
        messages = [*system, *(message for turn in self.messages for message in turn.messages())]
        given: Json = {"model": self.model, "messages": messages, "vismoe": self.vismoe, **self._of_answer()}
        if self.tools:
            given["tools"] = [tool.tool() for tool in self.tools]
        if self.tool_choice is not None:
            given |= self.tool_choice.given()
        if self.thinking is not None and self.thinking.type != "adaptive":
            given["reasoning_effort"] = "none" if self.thinking.type == "disabled" else "high"
            if self.thinking.budget_tokens is not None:
                given["vismoe"] = {"reasoning_tokens": self.thinking.budget_tokens, **(self.vismoe or {})}
        if self.output_config is not None and self.output_config.effort is not None:
            given["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})

    def forms(self) -> Sequence[AnswerForm]:
        return [MessagesAnswer]

    def _of_answer(self) -> Json:
        return {}


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: AnswerTokens
    temperature: float | int | None = None
    top_p: float | int | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def _of_answer(self) -> Json:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return {**{name: getattr(self, name) for name in names}, "stop": self.stop_sequences}


class MessagesAnswer:
    """The answer to a request to /v1/messages, whole or in events: blocks one after the other, of one kind each."""

    end = b""

    def __init__(self, model: str):
        self.id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._block: str | None = None  # the type of the block that is open
        self._blocks, self._called = 0, False
        self._call = ""  # the id of the latest call

    encoded = staticmethod(encoded_event)

    @staticmethod
    def error(error: ApiError) -> bytes:
        return encoded_event(error_of_messages(error))

    def whole(self, pieces: Sequence[Piece], figures: "Figures") -> Json:
        content, said = list[Json](), list[list[str]]()  # of each block
        for event in (event for piece in pieces for event in self.piece(piece)):
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
                said.append([])
            elif event["type"] == "content_block_delta":
                said[-1] += [text for name, text in event["delta"].items() if name != "type"]
        for block, texts in zip(content, said, strict=True):
            text, kind = "".join(texts), block["type"]
            block |= {"input": from_json(text or "{}", allow_partial=True)} if kind == "tool_use" else {kind: text}
        content = content or [{"type": "text", "text": ""}]
        usage = usage_of(figures)
        return {**self._message(content), **self._stop(figures), "usage": usage, "vismoe": vismoe_of(figures)}

    def opening(self) -> Iterator[Json]:
        """Events before the first piece."""
        nothing = {"input_tokens": 0, "output_tokens": 0}
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": nothing}
        yield {"type": "message_start", "message": start}

    def piece(self, piece: Piece) -> Iterator[Json]:
        if isinstance(piece, ToolCall | CallPart):
            if new := piece.id != self._call:
                self._call = piece.id
                yield from self._opened("tool_use", _begun(piece))
            if piece.arguments and (new or isinstance(piece, CallPart)):
                yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
            self._called = self._called or (isinstance(piece, ToolCall) and piece.whole)
        elif isinstance(piece, Reasoning):
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})
        else:
            yield from self._opened("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece})

    def closing(self, figures: "Figures") -> Iterator[Json]:
        """Events after the last piece."""
        if self._blocks == 0:
            yield from self._opened("text", {"type": "text", "text": ""})
        yield from self._closed()
        yield {
            "type": "message_delta",
            "delta": self._stop(figures),
            "usage": usage_of(figures),
            "vismoe": vismoe_of(figures),
        }
        yield {"type": "message_stop"}

    def _message(self, content: list[Json]) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _stop(self, figures: "Figures") -> Json:
        stopped, whole = figures.stopped_by, "tool_use" if self._called else "end_turn"
        reason = "max_tokens" if figures.finish == "length" else "stop_sequence" if stopped is not None else whole
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _opened(self, kind: str, block: Json) -> Iterator[Json]:
        if self._block == kind != "tool_use":
            return
        yield from self._closed()
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
        self._block, self._blocks = kind, self._blocks + 1

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _closed(self) -> Iterator[Json]:
        if self._block is not None:
            yield {"type": "content_block_stop", "index": self._blocks - 1}


def _begun(call: ToolCall | CallPart) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def usage_of(figures: "Figures") -> Json:
    """Reused tokens are apart from the others."""
    return {
        "input_tokens": figures.prompt_tokens - figures.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": figures.reused_tokens,
        "output_tokens": figures.answer_tokens,
    }
