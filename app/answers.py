"""Answers in the OpenAI API's form, built with the `openai` package's own types, with statistics in the field `vismoe`. Pure."""

import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from vismoe.types import Phase

if TYPE_CHECKING:
    from vismoe.engine.stats import Figures, PrecisionInfo

__all__ = ["ChatAnswer", "TextAnswer", "VismoeFigures", "listed", "served_model"]

Finish = Literal["stop", "length"]


class VismoeFigures(BaseModel):
    """Statistics of an answer: the field `vismoe` of a response. Seconds are wall time, bytes those of experts."""

    policy: str  # that chose the formats of experts; exact: none
    pair: str | None  # the pair from which it chose, e.g. int4/int2; None: every expert had the same format
    retention: float | None  # mean share of the demanded experts in the better format, if the policy includes importance
    formats: dict[str, float]  # share of the expert computations in each format
    keep: float  # share of the visual tokens that were kept; 1: all
    selection: str | None  # how they were chosen; None: all were kept
    images: int
    encoded_images: int  # encoded for this request; the others were cached
    visual_tokens: int
    kept_visual_tokens: int
    reused_tokens: int  # of the prompt, reused from an earlier request
    queue_seconds: float
    encode_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_s: float | None
    hit_rate: float | None  # experts that were in memory, over those that were needed
    prefill_hit_rate: float | None
    decode_hit_rate: float | None
    stall_seconds: float  # waiting for experts
    bytes_read: int  # from disk
    bytes_copied: int  # over the link to the device
    bytes_read_per_token: float | None  # while decoding
    bytes_copied_per_token: float | None

    @classmethod
    def of(cls, figures: "Figures") -> "VismoeFigures":
        counters, pruning, steps = figures.counters, figures.pruning, figures.decode_tokens
        precision = figures.precision

        def per_token(counter: str) -> float | None:
            return counters.total(counter, Phase.DECODE) / steps if steps else None

        return cls(
            policy=precision.policy if precision else "exact",
            pair=precision.formats if precision else None,
            retention=precision.retention if precision and "importance" in precision.policy else None,
            formats=figures.formats,
            keep=pruning.keep if pruning else 1.0,
            selection=pruning.selection if pruning else None,
            images=figures.images,
            encoded_images=figures.encoded_images,
            visual_tokens=figures.visual_tokens,
            kept_visual_tokens=figures.kept_visual_tokens,
            reused_tokens=figures.reused_tokens,
            queue_seconds=figures.queue_seconds,
            encode_seconds=figures.encode_seconds,
            prefill_seconds=figures.prefill_seconds,
            decode_seconds=figures.decode_seconds,
            decode_tokens_per_s=figures.decode_tokens_per_s,
            hit_rate=counters.hit_rate(),
            prefill_hit_rate=counters.hit_rate(Phase.PREFILL),
            decode_hit_rate=counters.hit_rate(Phase.DECODE),
            stall_seconds=counters.total("stall_seconds"),
            bytes_read=int(counters.total("bytes_read")),
            bytes_copied=int(counters.total("bytes_copied")),
            bytes_read_per_token=per_token("bytes_read"),
            bytes_copied_per_token=per_token("bytes_copied"),
        )


def served_model(name: str, context_tokens: int) -> Model:
    """The model as /v1/models lists it; other servers use `max_model_len`, too."""
    fields = dict(id=name, created=int(time.time()), object="model", owned_by="vismoe", max_model_len=context_tokens)
    return Model.model_validate(fields)


def listed(model: Model, precision: "PrecisionInfo | None", fixed: bool) -> dict[str, Any]:
    """The model in /v1/models, with `Engine.precision`; `fixed`: requests cannot change that."""
    running = {"policy": precision.policy, "pair": precision.formats, "retention": precision.retention} if precision else {}
    exact = {"policy": "exact", "pair": None, "retention": None}
    return {**model.to_dict(), "vismoe": {**exact, **running, "fixed_policy": fixed}}


def usage_of(figures: "Figures") -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.answer_tokens,
        total_tokens=figures.prompt_tokens + figures.answer_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=figures.reused_tokens, image_tokens=figures.visual_tokens),
    )


def finish_of(figures: "Figures") -> Finish:
    return "length" if figures.finish == "length" else "stop"


def extras_of(figures: "Figures") -> dict[str, Any]:
    return {"vismoe": VismoeFigures.of(figures).model_dump()}


class ChatAnswer:
    """The answer to a chat request, whole or in chunks."""

    def __init__(self, model: str, include_usage: bool = False):
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, text: str, figures: "Figures") -> ChatCompletion:
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        choice = Choice(index=0, message=message, finish_reason=finish_of(figures), logprobs=None)
        usage, extras = usage_of(figures), extras_of(figures)
        return ChatCompletion(**self._head, object="chat.completion", choices=[choice], usage=usage, **extras)

    def opening(self) -> list[ChatCompletionChunk]:
        """Chunks before the first piece of text."""
        return [self._chunk(ChoiceDelta(role="assistant", content=""))]

    def piece(self, text: str) -> ChatCompletionChunk:
        return self._chunk(ChoiceDelta(content=text))

    def closing(self, figures: "Figures") -> list[ChatCompletionChunk]:
        """Chunks after the last piece of text; the very last one has the statistics."""
        extras = extras_of(figures)
        if not self._include_usage:
            return [self._chunk(ChoiceDelta(), finish_of(figures), **extras)]
        usage = ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=[], usage=usage_of(figures), **extras)
        return [self._chunk(ChoiceDelta(), finish_of(figures)), usage]

    def _chunk(self, delta: ChoiceDelta, finish: Finish | None = None, **extras: Any) -> ChatCompletionChunk:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=finish, logprobs=None)
        if self._include_usage:
            extras["usage"] = None
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=[choice], **extras)


class TextAnswer:
    """The answer to a completion request; its chunks have the form of the whole answer."""

    def __init__(self, model: str, include_usage: bool = False):
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, text: str, figures: "Figures") -> Completion:
        return self._completion(text, finish_of(figures), usage=usage_of(figures), **extras_of(figures))

    def opening(self) -> list[Completion]:
        return []

    def piece(self, text: str) -> Completion:
        return self._completion(text, None)

    def closing(self, figures: "Figures") -> list[Completion]:
        extras = extras_of(figures)
        if not self._include_usage:
            return [self._completion("", finish_of(figures), **extras)]
        usage = Completion(**self._head, object="text_completion", choices=[], usage=usage_of(figures), **extras)
        return [self._completion("", finish_of(figures)), usage]

    def _completion(self, text: str, finish: Finish | None, **extras: Any) -> Completion:
        # A chunk has no finish_reason yet, but the package's type is for whole completions.
        choice = CompletionChoice.construct(index=0, text=text, finish_reason=finish, logprobs=None)
        return Completion.construct(**self._head, object="text_completion", choices=[choice], **extras)
