"""Answers in the OpenAI API's form, as JSON objects, with statistics in the field `vismoe`. Pure.

tests/test_serve.py checks them with the types of the `openai` package, which takes a third of a second and 22 MiB to import.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from vismoe.app.api_errors import ApiError, error_body
from vismoe.models.inputs.responses import Piece, Reasoning
from vismoe.models.inputs.tools import CallPart, ToolCall
from vismoe.types import Phase

if TYPE_CHECKING:
    from vismoe.engine.logprobs import TokenLogprob
    from vismoe.engine.stats import Figures, PrecisionInfo

Finish = Literal["stop", "length", "tool_calls"]
Json = dict[str, Any]
AnswerForm = Callable[[str], Any]  # makes an answer, of the model's name


OF_FIGURES = (  # what `vismoe_of` takes over from `Figures`
    "images", "encoded_images", "visual_tokens", "kept_visual_tokens", "reused_tokens", "queue_seconds", "encode_seconds",
    "prefill_seconds", "decode_seconds", "decode_tokens_per_s", "grammar_seconds",
)  # fmt: skip


def vismoe_of(figures: "Figures") -> Json:
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
        "drafts": asdict(figures.drafts) if figures.drafts else None,  # None: nothing was to guess tokens
    }


def served_model(name: str, context_tokens: int) -> Json:
    """The model as /v1/models lists it; other servers use `max_model_len`, too."""
    return dict(id=name, created=int(time.time()), object="model", owned_by="vismoe", max_model_len=context_tokens)


def listed(model: Json, precision: "PrecisionInfo | None", fixed: bool) -> Json:
    """The model in /v1/models, with `Engine.precision`; `fixed`: requests cannot change that."""
    running = {"policy": precision.policy, "pair": precision.formats, "retention": precision.retention} if precision else {}
    exact = {"policy": "exact", "pair": None, "retention": None}
    return {**model, "vismoe": {**exact, **running, "fixed_policy": fixed}}


def usage_of(figures: "Figures") -> Json:
    return dict(
        completion_tokens=figures.answer_tokens,
        prompt_tokens=figures.prompt_tokens,
        total_tokens=figures.prompt_tokens + figures.answer_tokens,
        prompt_tokens_details=dict(cached_tokens=figures.reused_tokens, image_tokens=figures.visual_tokens),
        completion_tokens_details=dict(reasoning_tokens=figures.reasoning_tokens),
    )


def finish_of(figures: "Figures") -> Finish:
    return "length" if figures.finish == "length" else "stop"


LEAST_LOGPROB = -9999.0  # of what is impossible; JSON has no infinity


def text_of(pieces: Sequence[Piece]) -> str:
    """Without reasoning and calls."""
    return "".join(piece for piece in pieces if isinstance(piece, str))


def tokens_of(pieces: Sequence[Piece]) -> "list[TokenLogprob]":
    """The tokens that these pieces bring, where their log probabilities were asked for."""
    return [token for piece in pieces for token in getattr(piece, "logprobs", ())]


def _entry(token: "TokenLogprob") -> Json:
    return dict(token=token.text, bytes=list(token.bytes), logprob=max(token.logprob, LEAST_LOGPROB))


def encoded_event(event: Json) -> bytes:
    """One event that is named by its type, in ASCII, because some clients break lines at characters of Unicode."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def entry_of(token: "TokenLogprob") -> Json:
    """A token with its chances and those of likelier ones."""
    return _entry(token) | {"top_logprobs": list(map(_entry, token.top))}


class TextAnswer:
    """The answer to a completion request, whole or in chunks, which have the same form."""

    kind = "cmpl"  # the beginning of its id
    object = "text_completion"
    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(self, include_usage: bool, logprobs: bool, echo: str, model: str):
        """echo: what is told before the answer."""
        self.id = f"{self.kind}-{uuid.uuid4().hex}"
        self._made: Json = {"created": int(time.time()), "model": model}
        self._include_usage, self._logprobs, self._echo = include_usage, logprobs, echo

    def whole(self, pieces: Sequence[Piece], figures: "Figures") -> Json:
        text, finish, tokens = self._echo + text_of(pieces), self._finish(figures), tokens_of(pieces)
        return self._part(text, finish, tokens, usage=usage_of(figures), vismoe=vismoe_of(figures))

    @staticmethod
    def encoded(chunk: Json) -> bytes:
        """One event, in ASCII, because some clients break lines at characters that Unicode calls line separators."""
        return f"data: {json.dumps(chunk, separators=(',', ':'), allow_nan=False)}\n\n".encode()

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The event with which an answer ends that fails in its middle."""
        return b"event: error\n" + TextAnswer.encoded(error_body(error))

    def opening(self) -> list[Json]:
        """Chunks before the first piece of text."""
        return [self._part(self._echo)] if self._echo else []

    def piece(self, piece: Piece) -> list[Json]:
        return [self._part(text_of([piece]), None, tokens_of([piece]))]

    def _finish(self, figures: "Figures") -> Finish:
        return finish_of(figures)

    def closing(self, figures: "Figures") -> list[Json]:
        """Chunks after the last piece of text; the very last one has the statistics."""
        ours = vismoe_of(figures)
        if not self._include_usage:
            return [self._part(None, self._finish(figures), vismoe=ours)]
        return [self._part(None, self._finish(figures)), self._chunk([], usage=usage_of(figures), vismoe=ours)]

    def _part(self, text: str | None, finish: Finish | None = None, tokens: "Sequence[TokenLogprob]" = (), **extras: Any) -> Json:
        """One chunk; `text` None: it has no text."""
        logprobs = self._probabilities(tokens) if self._logprobs and text is not None else None
        return self._chunk([dict(finish_reason=finish, index=0, logprobs=logprobs, text=text or "")], **extras)

    def _probabilities(self, tokens: "Sequence[TokenLogprob]") -> Json:
        entries = list(map(_entry, tokens))
        top = [[*map(_entry, token.top[::-1]), entry] for token, entry in zip(tokens, entries)]  # the likelier one of equal texts
        return dict(
            tokens=[entry["token"] for entry in entries],
            token_logprobs=[entry["logprob"] for entry in entries],
            top_logprobs=[{one["token"]: one["logprob"] for one in likely} for likely in top],
            text_offset=[token.offset for token in tokens],
        )

    def _chunk(self, choices: list[Json], **extras: Any) -> Json:
        return dict(id=self.id, choices=choices, **self._made, object=self.object, **extras)


class ChatAnswer(TextAnswer):
    """The answer to a chat request, whole or in chunks."""

    kind = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(self, include_usage: bool, logprobs: bool, model: str):
        super().__init__(include_usage, logprobs, "", model)
        self._ids = list[str]()  # of the calls that were told
        self._called = False  # one of them is whole

    def whole(self, pieces: Sequence[Piece], figures: "Figures") -> Json:
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [call for piece in pieces if isinstance(piece, ToolCall) for call in self._told(piece)]
        message: Json = dict(content=text_of(pieces) or (None if calls else ""), refusal=None, role="assistant")
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = self._probabilities(tokens_of(pieces)) if self._logprobs else None
        choice = dict(finish_reason=self._finish(figures), index=0, logprobs=logprobs, message=message)
        further = dict(usage=usage_of(figures), vismoe=vismoe_of(figures))
        return self._chunk([choice], **further) | {"object": "chat.completion"}

    def piece(self, piece: Piece) -> list[Json]:
        if isinstance(piece, ToolCall | CallPart):
            return [self._delta(dict(tool_calls=[{"index": len(self._ids) - 1, **told}])) for told in self._told(piece)]
        return [self._delta(dict(reasoning_content=piece.text))] if isinstance(piece, Reasoning) else super().piece(piece)

    def _told(self, call: ToolCall | CallPart) -> Iterator[Json]:
        """What it adds to the call of its id."""
        new = call.id not in self._ids[-1:]
        self._called = self._called or (isinstance(call, ToolCall) and call.whole)
        if new:
            self._ids.append(call.id)
            yield dict(id=call.id, type="function", function=dict(name=call.name, arguments=call.arguments))
        elif isinstance(call, CallPart):
            yield dict(function=dict(arguments=call.arguments))

    def _finish(self, figures: "Figures") -> Finish:
        usual = finish_of(figures)
        return "tool_calls" if self._called and usual == "stop" else usual

    def opening(self) -> list[Json]:
        return [self._delta(dict(content="", role="assistant"))]

    def _part(self, text: str | None, finish: Finish | None = None, tokens: "Sequence[TokenLogprob]" = (), **extras: Any) -> Json:
        logprobs = self._probabilities(tokens) if self._logprobs and text is not None else None
        return self._delta({} if text is None else dict(content=text), finish, logprobs, **extras)

    def _probabilities(self, tokens: "Sequence[TokenLogprob]") -> Json:
        return dict(content=list(map(entry_of, tokens)), refusal=None)

    def _delta(self, delta: Json, finish: Finish | None = None, logprobs: Json | None = None, **extras: Any) -> Json:
        choice = dict(delta=delta, index=0, finish_reason=finish, logprobs=logprobs)
        return self._chunk([choice], **({"usage": None} if self._include_usage else {}), **extras)


class AnswerChoices:
    """Answers to one request, as the choices of one answer; a single one is told as it is. n: to each prompt."""

    def __init__(self, answers: Sequence[Any], n: int):
        self._answers, self._n, first = answers, n, answers[0]
        self._several = len(answers) > 1
        self.id, self.encoded, self.error, self.end = first.id, first.encoded, first.error, first.end

    def whole(self, said: Sequence[Sequence[Piece]], figures: "Sequence[Figures]") -> Json:
        """said: the pieces of each."""
        if not self._several:
            one: Json = self._answers[0].whole(said[0], figures[0])
            return one
        wholes = [answer.whole(pieces, of) for answer, pieces, of in zip(self._answers, said, figures, strict=True)]
        return {**self._joined(wholes), **_together(wholes, self._n)}

    def opening(self) -> list[Json]:
        return [self._numbered(place, chunk) for place, answer in enumerate(self._answers) for chunk in answer.opening()]

    def piece(self, place: int, piece: Piece) -> list[Json]:
        return [self._numbered(place, chunk) for chunk in self._answers[place].piece(piece)]

    def closing(self, figures: "Sequence[Figures]") -> list[Json]:
        """The ends of all, then their statistics, which are in the last chunk."""
        if not self._several:
            return list(self._answers[0].closing(figures[0]))
        ends, *usages = zip(*(answer.closing(of) for answer, of in zip(self._answers, figures, strict=True)), strict=True)
        chunks = [self._numbered(place, chunk) for place, chunk in enumerate(ends)]
        statistics = _together(usages[0] if usages else ends, self._n)
        for chunk in chunks:
            chunk.pop("vismoe", None)
        if usages:
            return [*chunks, {**self._joined(usages[0]), **statistics}]
        return [*chunks[:-1], {**chunks[-1], **statistics}]

    def _joined(self, chunks: Sequence[Json]) -> Json:
        numbered = [self._numbered(place, chunk) for place, chunk in enumerate(chunks)]
        return {**numbered[0], "choices": [choice for chunk in numbered for choice in chunk["choices"]]}

    def _numbered(self, place: int, chunk: Json) -> Json:
        if not self._several:
            return chunk
        return {**chunk, "id": self.id, "choices": [{**choice, "index": place} for choice in chunk["choices"]]}


def _together(chunks: Sequence[Json], n: int) -> Json:
    """Statistics of n answers to each prompt, which counts once; `vismoe` of several is a list."""
    found: Json = {"vismoe": [chunk["vismoe"] for chunk in chunks]}
    if "usage" in chunks[0]:
        usages = [chunk["usage"] for chunk in chunks]
        prompts, answers = _summed(usages[::n]), _summed(usages)
        answered = {name: answers[name] for name in ("completion_tokens", "completion_tokens_details")}
        found["usage"] = {**prompts, **answered, "total_tokens": prompts["prompt_tokens"] + answers["completion_tokens"]}
    return found


def _summed(usages: Sequence[Json]) -> Json:
    return {
        name: _summed([usage[name] for usage in usages]) if isinstance(value, dict) else sum(usage[name] for usage in usages)
        for name, value in usages[0].items()
    }
