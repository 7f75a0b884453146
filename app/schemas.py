"""Requests as the OpenAI API writes them, and what of it we do: everything else is refused by name, never left out in silence.

Numbers are numbers and strings are strings (no coercion), unknown fields are refused, and parameters that are known but not done
here are taken only with the value that means "not used".
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vismoe.app.answers import AnswerForm, ChatAnswer, TextAnswer
from vismoe.app.api_errors import ApiError
from vismoe.config import DraftName, Kept, PolicyName, Retention, Selection, Tokens, parse_formats
from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.qwen_images import SIZE_KEYS, TOKENS_KEY, asked_size
from vismoe.models.inputs.qwen_videos import MOST_FRAMES, VIDEO_OPTIONS, asked_video
from vismoe.models.inputs.tools import Tools
from vismoe.options import (
    COLDEST,
    HOTTEST,
    MOST_STOPS,
    MOST_TOKENS,
    MOST_TOP,
    OF_SAMPLING,
    OPTIONS,
    AnswerTokens,
    Bias,
    GrammarText,
    MinP,
    Penalty,
    ReasoningEffort,
    RepetitionPenalty,
    RequestOptions,
    Seed,
    StopText,
    TopK,
)
from vismoe.ranges import Range

MAX_MESSAGES = 10_000
MAX_PARTS = 1_000  # of a message
MOST_ANSWERS = 8  # to one prompt
MOST_PROMPTS = 128
MAX_TOOLS = 1_000
MAX_VALUES = 10**6  # of a body: pictures are few long strings, and many short values take far more memory than their text


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Nulls(Strict):
    """Fields that are null ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class ImageSize(Strict):
    """How large an image is to be, for Qwen's models: `image_tokens` (the least and most), or `min_pixels` and `max_pixels`, or
    `resized_height` and `resized_width`."""

    image_tokens: list[int] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @property
    def size(self) -> dict[str, Any]:
        """What it says."""
        return {name: value for name in (TOKENS_KEY, *SIZE_KEYS) if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _is_a_size(self) -> "ImageSize":
        try:
            asked_size(self.size)
        except InputError as error:
            raise PydanticCustomError("size", "{reason}", {"reason": str(error)}) from error
        return self


class ImageUrl(Strict):
    """url: a data URI, http(s) where the server allows it, or a path into its image folder. detail: low is for Qwen's
    models; the others ask for nothing."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class VideoUrl(Strict):
    """As for an image."""

    url: str


class FileData(Strict):
    """file_data: a data URI, or a path into the image folder, of a PDF document. filename: taken, and not used."""

    file_data: str
    filename: str | None = None


class ContentPart(ImageSize):
    """One part of a message: text, an image, a document or a video, with options of `qwen_videos`."""

    type: Literal["text", "image_url", "video_url", "file"]
    text: str | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None
    file: FileData | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    total_pixels: int | None = None

    @property
    def source(self) -> str | list[str] | None:
        """Where the image, video or document is, or where its frames are; None: it is text."""
        named = self.image_url or self.video_url
        return named.url if named is not None else self.file.file_data if self.file is not None else None

    @property
    def is_video(self) -> bool:
        return self.type.startswith("video")

    def video_options(self) -> dict[str, Any]:
        """The options of a video, checked. Raises InputError."""
        return asked_video(self._of_video, isinstance(self.source, list))

    @property
    def _of_video(self) -> dict[str, Any]:
        return {name: value for name in VIDEO_OPTIONS if (value := getattr(self, name, None)) is not None}

    @property
    def low_detail(self) -> bool:
        return self.image_url is not None and self.image_url.detail == "low"

    @model_validator(mode="after")
    def _holds_what_it_says(self) -> "ContentPart":
        sources = ("text", "image_url", "image", "video_url", "video", "file")
        given = {name for name in sources if getattr(self, name, None) is not None}
        film = self._of_video.keys() - self.size.keys()
        if given != {self.type} or (self.size and self.type == "text") or (film and not self.is_video):
            raise PydanticCustomError("part", "a part of type {kind} has the field {kind} and no other", {"kind": self.type})
        if self.is_video:
            try:
                self.video_options()
            except InputError as error:
                raise PydanticCustomError("video", "{reason}", {"reason": str(error)}) from error
        return self


def as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Returned(Strict):
    """What a client got and sends back. provider_specific_fields: LiteLLM's copy of it; taken, and not used."""

    provider_specific_fields: dict[str, Any] | None = Field(None, exclude=True)


class CalledFunction(Returned):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class MessageCall(Returned):
    """A call of an assistant's turn, as the client got it."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Strict):
    """strict: taken, and not used: calls that are demanded always follow their schema, others are the model's own."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class Message(Returned):
    """One turn. Assistant turns may be empty, as clients send them back. name: given to the template, where it uses it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[ContentPart] | None, Field(max_length=MAX_PARTS), BeforeValidator(as_parts)] = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = Field(None, max_length=MAX_PARTS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def further(self) -> dict[str, Any]:
        """What it has beside role and content."""
        return self.model_dump(include={"name", "tool_calls", "tool_call_id", "reasoning_content"}, exclude_none=True)

    @model_validator(mode="after")
    def _has_what_its_role_can_have(self) -> "Message":
        if not self.content and self.role != "assistant":
            raise PydanticCustomError("content", "a {role} message has content", {"role": self.role})
        if self.role not in ("user", "tool") and any(part.source is not None for part in self.content or ()):
            raise PydanticCustomError("content", "images belong to user and tool messages, not to {role}", {"role": self.role})
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("tool_call_id", "tool messages have a tool_call_id, and no others")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise PydanticCustomError("tool_calls", "tool_calls and reasoning_content belong to assistant messages")
        return self


class QwenPart(ContentPart):
    """A part as Qwen's documentation writes it: an image is named by `image`, a video by `video`, which may be a list of frames;
    both may be in the API's form as well."""

    type: Literal["text", "image_url", "video_url", "file", "image", "video"]  # type: ignore[assignment]
    image: str | None = None
    video: str | Annotated[list[str], Field(min_length=1, max_length=MOST_FRAMES)] | None = None
    sample_fps: float | None = None
    raw_fps: float | None = None

    @property
    def source(self) -> str | list[str] | None:
        named = self.image if self.image is not None else self.video
        return named if named is not None else super().source


class QwenMessage(Message):
    content: Annotated[list[QwenPart] | None, Field(max_length=MAX_PARTS), BeforeValidator(as_parts)] = None  # type: ignore[assignment]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _a_pair(text: str) -> str:
    try:
        parse_formats(text)
    except ConfigError as error:
        raise PydanticCustomError("formats", "two formats with a slash between, the better one first, e.g. 4/2") from error
    return text


class JsonSchema(Strict):
    """name, description, strict: taken, and not used: an answer always follows the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Strict):
    """What form an answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_text(self) -> str | None:
        """The schema that an answer follows; None: it is any text."""
        if self.type == "text":
            return None
        return json.dumps({"type": "object"} if self.json_schema is None else self.json_schema.schema_ or {})

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", "json_schema goes with type json_schema, and type json_schema with it")
        return self


class PrecisionRequest(Strict):
    """Ours: what decides the formats of experts, from which pair, and how large a share of those demanded gets the better one.

    reuse: whether keys and values of an earlier request are taken over, and left for later ones. draft: what guesses the next
    tokens, of what the server was started with. grammar: what the answer follows, in llguidance's form of Lark.
    reasoning_tokens: how long the model thinks at most.
    """

    policy: PolicyName | None = None
    formats: Annotated[str, Field(max_length=32), AfterValidator(_a_pair)] | None = None
    retention: Retention | None = None
    reuse: bool | None = None
    draft: DraftName | None = None
    grammar: GrammarText | None = None
    reasoning_tokens: Tokens | None = None

    @property
    def change(self) -> str | None:
        """The first field that may ask for another plan of the memory."""
        return "policy" if self.policy is not None else "formats" if self.formats is not None else None


class VismoeRequest(PrecisionRequest):
    """And what images may cost. keep: share of the visual tokens that deeper layers see; selection: which ones.

    image_tokens: least and most visual tokens of each image. images: the size of each image, null where nothing is said of it.
    messages: the conversation in the form of Qwen's documentation, in place of the request's own.
    """

    keep: Kept | None = None
    selection: Selection | None = None
    image_tokens: list[Tokens] | None = Field(None, min_length=2, max_length=2)
    images: list[ImageSize | None] | None = Field(None, max_length=MAX_PARTS)
    messages: list[QwenMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)

    @model_validator(mode="after")
    def _least_first(self) -> "VismoeRequest":
        if self.image_tokens and self.image_tokens[0] > self.image_tokens[1]:
            raise PydanticCustomError("image_tokens", "image_tokens: the least number comes first, e.g. [64, 1024]")
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(value: Any) -> Any:
    """Keys of JSON are strings."""
    if not isinstance(value, dict):
        return value
    if not all(re.fullmatch("0|[1-9][0-9]{0,17}", key) for key in value):
        raise PydanticCustomError("logit_bias", 'keys are ids of tokens, e.g. {{"42": -100}}')
    return {int(key): bias for key, bias in value.items()}


Unused = dict[str, tuple[tuple[Any, ...], str]]  # values that ask for nothing, and what to do about any other


class Body(Strict):
    """The body of a request."""

    unused: ClassVar[Unused] = {}  # parameters of its API that are not done here

    def forms(self) -> Sequence[AnswerForm]:
        """Of the answer to each prompt."""
        raise NotImplementedError

    @classmethod
    def named(cls, error: ApiError, parsed: "Body | None" = None) -> ApiError:
        """The error in the names of this door. parsed: the request, where it could be read."""
        return error

    @cached_property
    def repeated(self) -> Any:
        """What the answer holds of the request."""
        return None


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]
ANSWERS_ONLY = "this server answers with text only"
UNUSED: Unused = {
    "functions": (([],), "they are called tools now"),
    "function_call": (("none", "auto"), "it is called tool_choice now"),
    "modalities": ((["text"],), ANSWERS_ONLY),
    "audio": ((), ANSWERS_ONLY),
    "prediction": ((), "predicted outputs are not used"),
    "verbosity": (("medium",), "say in the prompt how long an answer should be"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "web_search_options": ((), "nothing is searched"),
    "best_of": ((1,), "one answer a request"),
    "suffix": (("",), "text is continued at its end only"),
}
UNUSED_IN_MESSAGES: Unused = {
    "refusal": ((), ANSWERS_ONLY),
    "annotations": (([],), ANSWERS_ONLY),
    "audio": ((), ANSWERS_ONLY),
    "function_call": ((), "it is called tool_calls now"),
}


class OpenaiBody(Body):
    """What all of OpenAI's requests have. `user`, `metadata`, `safety_identifier`, `prompt_cache_key` are taken and not used."""

    model: str | None = None
    temperature: Annotated[float, Range(0, HOTTEST)] | None = None  # 0: greedy
    top_p: Kept | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Annotated[list[StopText] | None, Field(max_length=MOST_STOPS), BeforeValidator(_as_list)] = None
    stream: bool | None = None
    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Sampling(OpenaiBody):
    """What both kinds of request to the older API have."""

    unused: ClassVar[Unused] = UNUSED

    max_tokens: AnswerTokens | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None  # llama.cpp's name of it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias] | None, BeforeValidator(_by_token)] = None
    n: Annotated[int, Range(1, MOST_ANSWERS)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    vismoe: PrecisionRequest | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Sampling":
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options goes with stream=true", "stream_options")
        return self

    @model_validator(mode="after")
    def _one_repetition_penalty(self) -> "Sampling":
        if len({self.repetition_penalty, self.repeat_penalty} - {None}) > 1:
            both = f"repetition_penalty={self.repetition_penalty} and repeat_penalty={self.repeat_penalty}"
            raise ApiError(400, f"{both} differ. Fix: give one of them", "repeat_penalty")
        return self

    def options(self, usual: RequestOptions, model_samples: bool) -> RequestOptions:
        """What it asks of the engine; `usual`: where it says nothing. Temperature 0, or nearly 0, is greedy; without temperature,
        top_p, top_k and min_p the model's generation config decides.

        model_samples: whether it says `do_sample`.
        """
        given = {**_options_in(self), **(_options_in(self.vismoe) if self.vismoe else {})}
        sample = self.temperature is None or self.temperature >= COLDEST
        if all(getattr(self, name) is None for name in OF_SAMPLING):
            sample = model_samples
        if not sample:
            given |= dict.fromkeys(OF_SAMPLING)
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        given["logprobs"] = self.most_likely
        reuse = usual.reuse and given.get("reuse", True)
        return replace(usual, **{**given, "sample": sample, "reuse": reuse, "max_tokens": self.length or usual.max_tokens})

    @property
    def json_schema(self) -> str | None:
        """What the answer follows, as text."""
        return self.response_format.schema_text if self.response_format else None

    @property
    def most_likely(self) -> int | None:
        """Tokens whose log probabilities come with each one of the answer; None: not even its own."""
        return None

    @property
    def length(self) -> int | None:
        """Of the answer at most, in tokens."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _options_in(given: Strict) -> dict[str, Any]:
    """The options that an object of a body gives."""
    values = {name: getattr(given, name, None) for name in OPTIONS}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None}


class Translated(Body, Nulls):
    """A request of another API, which can be said in ours."""

    def translated(self) -> "ChatRequest | CompletionRequest":
        """The same request of ours. Raises ApiError and pydantic's ValidationError."""
        raise NotImplementedError


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[Message] | None = Field(None, max_length=MAX_MESSAGES)
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Range(0, MOST_TOP)] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    vismoe: VismoeRequest | None = None

    @property
    def most_likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def reasoning(self) -> str | None:
        """The option."""
        return self.reasoning_effort

    @property
    def of_template(self) -> dict[str, Any]:
        """What else the engine is to tell the model: tools, and variables of its chat template. Raises InputError."""
        given: dict[str, Any] = {"template": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
            functions = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
            given["tools"] = Tools(functions, named or "auto", self.parallel_tool_calls is not False)
        return given

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def forms(self) -> Sequence[AnswerForm]:
        return [partial(ChatAnswer, self.include_usage, bool(self.logprobs))]

    @property
    def conversation(self) -> Sequence[Message]:
        """The messages, in either form."""
        return (self.vismoe.messages if self.vismoe else None) or self.messages or ()

    @property
    def pictures(self) -> list[ContentPart]:
        """The parts that are images, videos or documents, in order."""
        return [part for message in self.conversation for part in message.content or () if part.source is not None]

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """What is said of the size of each image or video, by its part or in `vismoe`."""
        ours = self.vismoe.images if self.vismoe else None
        return [
            part.size or (size.size if size else {}) for part, size in zip(self.pictures, ours or [None] * len(self.pictures))
        ]

    @model_validator(mode="after")
    def _one_conversation(self) -> "ChatRequest":
        if not self.conversation:
            raise ApiError(400, "there is no message", "messages")
        if self.messages and self.vismoe and self.vismoe.messages:
            raise ApiError(400, "there are messages here and in the request. Fix: leave one out", "vismoe.messages")
        return self

    @model_validator(mode="after")
    def _one_size_for_each_image(self) -> "ChatRequest":
        ours = self.vismoe.images if self.vismoe else None
        if ours is not None and len(ours) != len(self.pictures):
            message = f"{len(ours)} sizes for {len(self.pictures)} images. Fix: one for each, null for none"
            raise ApiError(400, message, "vismoe.images")
        if any(part.size and size and size.size for part, size in zip(self.pictures, ours or ())):
            raise ApiError(400, "an image has two sizes, one of them in its part. Fix: leave one out", "vismoe.images")
        return self

    @model_validator(mode="after")
    def _logprobs_of_something(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} goes with logprobs=true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> "ChatRequest":
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            both = f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens}"
            raise ApiError(400, f"{both} differ. Fix: give one of them", "max_completion_tokens")
        return self


def _as_prompts(prompt: Any) -> Any:
    """A text, ids of tokens, or a list of these."""
    one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int)
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
        raise PydanticCustomError("prompt", "a text, ids of tokens, or a list of these, none of them empty")
    return prompts


def _is_prompt(prompt: Any) -> bool:
    ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token <= MOST_TOKENS for token in prompt)
    return bool(prompt) and (ids or isinstance(prompt, str))


class CompletionRequest(Sampling):
    """The body of /v1/completions: prompts as texts or ids of tokens. echo: a prompt is told before its answer."""

    prompts: Annotated[list[Any], Field(min_length=1, max_length=MOST_PROMPTS, alias="prompt"), BeforeValidator(_as_prompts)]
    logprobs: Annotated[int, Range(0, 5)] | None = None
    echo: bool | None = None

    @property
    def most_likely(self) -> int | None:
        return self.logprobs

    @cached_property
    def repeated(self) -> Any:
        return self.prompts if self.echo else None

    def forms(self) -> Sequence[AnswerForm]:
        echoes = [prompt if self.echo and isinstance(prompt, str) else "" for prompt in self.prompts]
        return [partial(TextAnswer, self.include_usage, self.logprobs is not None, echo) for echo in echoes]

    @model_validator(mode="after")
    def _echo_of_text(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            reason = "of a prompt only the last token's logits are computed, as memory for all is not planned"
            raise ApiError(400, f"echo with logprobs: {reason}. Fix: leave one of them out", "echo")
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ApiError(400, "echo with ids of tokens: there is no text. Fix: leave it out", "echo")
        return self


class TokenizeRequest(Translated):
    """The body of /tokenize: a text, or a conversation."""

    unused: ClassVar[Unused] = {
        "add_generation_prompt": ((True,), "a conversation is what is answered"),
        "continue_final_message": ((False,), "a last message of the assistant is gone on with"),
        "return_token_strs": ((False,), "tokens are told by their ids"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    add_special_tokens: bool | None = None

    def translated(self) -> ChatRequest | CompletionRequest:
        given = self.model_dump(exclude_unset=True, exclude={"add_special_tokens"})
        usual = self.messages is None  # a chat template writes them itself
        if self.add_special_tokens not in (None, usual):
            usually = str(usual).lower()
            raise ApiError(400, f"add_special_tokens: only {usually} is done here. Fix: leave it out", "add_special_tokens")
        return checked(CompletionRequest, given) if usual else checked(ChatRequest, given)

    def forms(self) -> Sequence[AnswerForm]:
        return ()


Request = TypeVar("Request", bound=Body)


def count_values(body: bytes | bytearray) -> int:
    """How many values a JSON text has at most, before it is parsed. Raises ApiError for too many."""
    values = sum(map(body.count, (b"{", b"[", b",")))
    if values > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES:,} values", code="invalid_json")
    return values


def parse(kind: type[Request], body: bytes | bytearray) -> Request:
    """A checked request. Raises ApiError or pydantic's ValidationError, both without the request's values."""
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body is a JSON object", code="invalid_json")
    return checked(kind, given)


def checked(kind: type[Request], given: dict[str, Any]) -> Request:
    """A checked request. Raises as `parse` does."""
    given = _without_unused(given, kind.unused, "")
    if issubclass(kind, Sampling) and isinstance(given.get("messages"), list):
        given["messages"] = [
            _without_unused(message, UNUSED_IN_MESSAGES, f"messages[{place}].") if isinstance(message, dict) else message
            for place, message in enumerate(given["messages"])
        ]
    return kind.model_validate(given)


def _without_unused(given: dict[str, Any], unused: Unused, path: str) -> dict[str, Any]:
    """`given` without the parameters that ask for nothing. Raises ApiError for those that ask for something."""
    for name in given.keys() & unused.keys():
        neutral, advice = unused[name]
        if given[name] is not None and given[name] not in neutral:
            raise ApiError(400, f"{path}{name}: {advice}. Fix: leave it out", path + name, "unsupported_parameter")
    return {name: value for name, value in given.items() if name not in unused}
