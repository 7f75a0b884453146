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

Finish = Literal["stop", "length"]


OF_FIGURES = (  # what `vismoe_of` takes over from `Figures`
    "images", "encoded_images", "visual_tokens", "kept_visual_tokens", "reused_tokens", "queue_seconds", "encode_seconds",
    "prefill_seconds", "decode_seconds", "decode_tokens_per_s",
)  # fmt: skip


def vismoe_of(figures: "Figures") -> dict[str, Any]:
    """Statistics of an answer: the field `vismoe` of a response. Seconds are wall time, bytes those of experts."""
    counters, pruning, steps, precision = figures.counters, figures.pruning, figures.decode_tokens, figures.precision

    def per_token(counter: str) -> float | None:
        return counters.total(counter, Phase.DECODE) / steps if steps else None

    return {
        "policy": precision.policy if precision else "exact",  # that chose the formats of experts; exact: none
        "pair": precision.formats if precision else None,  # from which it chose; None: every expert had the same format
        "retention": precision.retention if precision and "importance" in precision.policy else None,
        "formats": figures.formats,  # share of the expert computations in each format
        "keep": pruning.keep if pruning else 1.0,  # share of the visual tokens that were kept; 1: all
        "selection": pruning.selection if pruning else None,  # how they were chosen; None: all were kept
        **{name: getattr(figures, name) for name in OF_FIGURES},
        "hit_rate": counters.hit_rate(),  # experts that were in memory, over those that were needed
        "prefill_hit_rate": counters.hit_rate(Phase.PREFILL),
        "decode_hit_rate": counters.hit_rate(Phase.DECODE),
        "stall_seconds": counters.total("stall_seconds"),  # waiting for experts
        "bytes_read": int(counters.total("bytes_read")),  # from disk
        "bytes_copied": int(counters.total("bytes_copied")),  # over the link to the device
        "bytes_read_per_token": per_token("bytes_read"),  # while decoding
        "bytes_copied_per_token": per_token("bytes_copied"),
    }


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


class TextAnswer:
    """The answer to a completion request, whole or in chunks, which have the same form."""

    kind = "cmpl"  # the beginning of its id

    def __init__(self, model: str, include_usage: bool = False):
        self.id = f"{self.kind}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, text: str, figures: "Figures") -> BaseModel:
        return self._part(text, finish_of(figures), usage=usage_of(figures), vismoe=vismoe_of(figures))

    def opening(self) -> list[BaseModel]:
        """Chunks before the first piece of text."""
        return []

    def piece(self, text: str) -> BaseModel:
        return self._part(text)

    def closing(self, figures: "Figures") -> list[BaseModel]:
        """Chunks after the last piece of text; the very last one has the statistics."""
        extras = {"vismoe": vismoe_of(figures)}
        if not self._include_usage:
            return [self._part(None, finish_of(figures), **extras)]
        return [self._part(None, finish_of(figures)), self._chunk([], usage=usage_of(figures), **extras)]

    def _part(self, text: str | None, finish: Finish | None = None, **extras: Any) -> BaseModel:
        """One chunk; `text` None: it has no text."""
        # A chunk has no finish_reason yet, but the package's type is for whole completions.
        choice = CompletionChoice.construct(index=0, text=text or "", finish_reason=finish, logprobs=None)
        return self._chunk([choice], **extras)

    def _chunk(self, choices: list[Any], **extras: Any) -> BaseModel:
        return Completion.construct(**self._head, object="text_completion", choices=choices, **extras)


class ChatAnswer(TextAnswer):
    """The answer to a chat request, whole or in chunks."""

    kind = "chatcmpl"

    def whole(self, text: str, figures: "Figures") -> BaseModel:
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        choice = Choice(index=0, message=message, finish_reason=finish_of(figures), logprobs=None)
        further: dict[str, Any] = {"usage": usage_of(figures), "vismoe": vismoe_of(figures)}
        return ChatCompletion(**self._head, object="chat.completion", choices=[choice], **further)

    def opening(self) -> list[BaseModel]:
        return [self._delta(ChoiceDelta(role="assistant", content=""))]

    def _part(self, text: str | None, finish: Finish | None = None, **extras: Any) -> BaseModel:
        return self._delta(ChoiceDelta() if text is None else ChoiceDelta(content=text), finish, **extras)

    def _delta(self, delta: ChoiceDelta, finish: Finish | None = None, **extras: Any) -> BaseModel:
        choice = ChunkChoice(index=0, delta=delta, finish_reason=finish, logprobs=None)
        return self._chunk([choice], **({"usage": None} if self._include_usage else {}), **extras)

    def _chunk(self, choices: list[Any], **extras: Any) -> BaseModel:
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=choices, **extras)
