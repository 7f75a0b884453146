"""One answer: `TokenLoop` computes its tokens, `TextPieces` makes text of them, `Reply` hands the text to the caller.

The loop over tokens is transformers' own, cut into single passes, so that one thread can run many requests by turns: `generate()`
itself prepares everything before the first pass (cache, logits processors, stopping criteria, positions).
"""

import contextlib
import copy
import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.streamers import TextStreamer
from transformers.modeling_outputs import CausalLMOutput

from vismoe.engine.logprobs import Chances, ScoredText, TokenBytes, TokenLogprob, split_at
from vismoe.engine.stats import Figures
from vismoe.errors import UnsupportedModelError
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.inputs.prompts import TOKEN_KINDS, is_pixels
from vismoe.models.inputs.responses import MessageParser, Piece, Reasoning
from vismoe.models.inputs.tools import CallPart, ToolCall
from vismoe.models.visual.growing_cache import grow_in_place

__all__ = ["Figures", "Reply", "StopStrings", "TextPieces", "TokenLoop", "refuse_own_loop"]


ENCODED = "mm_encoder_outputs"  # what newer releases make of them before the first pass


@dataclass
class Prepared:
    """What `generate()` hands to a decoding method. `kwargs` are the model's own arguments; they change from pass to pass."""

    ids: torch.Tensor  # int64 [1, S]
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> "Prepared":
        prepared: Prepared = model.generate(**inputs, **options, custom_generate=cls._keep)
        return prepared

    @staticmethod
    def _keep(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> "Prepared":
        return Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)


def refuse_own_loop(kind: type[Any], name: str) -> None:
    """Raises UnsupportedModelError for a class of models that does not answer token by token."""
    if kind.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(
            f"{kind.__name__} answers by a loop of its own, which cannot be cut into tokens. Fix: load it by "
            f"{kind.__name__}.from_pretrained({name!r}, quantization_config=VisMoEConfig(...)), and call its generate()"
        )


class TokenLoop:
    """Greedy decoding or sampling of one sequence, a forward pass at a time: what `GenerationMixin._sample` does.

    `generator`: where sampling draws from; None: torch's own.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], options: dict[str, Any], generator: torch.Generator | None = None):
        self._model, self._generator = model, generator
        self._prepared = Prepared.of(model, inputs, options)
        self._prefilled, self._reserved = False, 0
        mask = inputs.get("attention_mask")
        self.padded = mask is not None and not bool(mask.all())
        self.watched: list[torch.Tensor] | None = None  # gets each pass's logits float32 [1, V]; None: they are not kept
        self.logprobs: int | None = None  # how many of the most likely tokens `chances` has; None: there are none
        self.chances: Chances | None = None  # of the latest token

    @property
    def ids(self) -> torch.Tensor:
        """The sequence so far, int64 `[1, S]`."""
        return self._prepared.ids

    @property
    def room(self) -> int:
        """Tokens that it may have before more are asked for."""
        return self._reserved

    @property
    def cache(self) -> Any:
        """Keys and values of the sequence so far but for the last token; None where the model keeps none."""
        return cache_in(self._prepared.kwargs)

    def read(self, until: int, images: dict[str, Any], of_images: Sequence[str]) -> None:
        """A pass of the prompt's next tokens up to `until`, which is not its end; `images` as in `take_over`, of these tokens."""
        at, model = self._prepared, self._model
        config = copy.copy(at.generation_config)
        config._mask_length = until  # newer releases leave out a mask that hides nothing
        kwargs = {name: value for name, value in at.kwargs.items() if name not in (*of_images, ENCODED)} | images
        past = self.cache.get_seq_length()
        for name in (*TOKEN_KINDS, "position_ids", "attention_mask"):
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., 0 if name == "attention_mask" else past : until]
        model._prefill(at.ids[:, :until], config, kwargs, is_first_iteration=True)

    def begin_with(self, cache: Any) -> None:
        """Go on from the keys and values of the first tokens."""
        self._prepared.kwargs[CACHE] = cache

    def take_over(self, images: dict[str, Any], of_images: Sequence[str]) -> None:
        """Before the pass of the prompt's last tokens, behind others that are in the cache.

        `images`: the image inputs of these tokens, in place of those named `of_images`, which are about all of the prompt.
        """
        kept = {name: value for name, value in self._prepared.kwargs.items() if name not in (*of_images, ENCODED)}
        self._prepared.kwargs = kept | images
        past = self.cache.get_seq_length()
        for name in TOKEN_KINDS:
            if name in self._prepared.kwargs:  # older releases hand some of them on at full length
                self._prepared.kwargs[name] = self._prepared.kwargs[name][..., past:]

    def reserve(self, tokens: int) -> None:
        """The sequence may have so many tokens; its cache grows in place up to there. Passes of a prompt may add or replace parts
        of the cache: after them it is to be said again."""
        if tokens != self._reserved or not self._prefilled:
            self._reserved = tokens
            grow_in_place(self.cache, tokens)

    def ends_with(self, token: int) -> bool:
        """Whether it is one with which the model ends an answer."""
        ends = self._prepared.generation_config._eos_token_tensor
        return ends is not None and bool((ends == token).any())

    def step(self, said: int | None = None) -> tuple[int, bool]:
        """The next token, and whether it is the last one. The first pass takes the whole prompt. said: the token, if known."""
        at, model = self._prepared, self._model
        if self._prefilled:
            return self.take(model(**self.inputs(), return_dict=True), said)
        outputs = model._prefill(at.ids, at.generation_config, at.kwargs, is_first_iteration=True)
        # as large as the prompt's images, and not used again
        at.kwargs = {name: value for name, value in at.kwargs.items() if name != ENCODED and not is_pixels(name)}
        self._prefilled, self._reserved = True, 0
        return self.take(outputs, said)

    def take_logits(self, logits: torch.Tensor) -> tuple[int, bool]:
        """The same as `take` for logits `[1, 1, V]` that something else than a pass of the model has said."""
        return self.take(CausalLMOutput(logits=logits))

    def ahead(self) -> "TokenLoop":
        """The same sequence, to go on without changing this one but for its cache, which both have."""
        other = copy.copy(self)
        other._prepared = dataclasses.replace(self._prepared, kwargs=dict(self._prepared.kwargs))
        other.watched = other.logprobs = None
        return other

    @contextlib.contextmanager
    def drawing_again(self) -> Iterator[None]:
        """What is drawn within is drawn once more afterwards, with the same numbers (common random numbers)."""
        sampling, device = self._prepared.generation_config.do_sample, self.ids.device
        if self._generator is not None:
            generator = self._generator
        else:
            generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        before = generator.get_state() if sampling else None
        try:
            yield
        finally:
            if before is not None:
                generator.set_state(before)

    def add(self, token: int) -> None:
        """The sequence goes on with this token, whatever the model says."""
        at = self._prepared
        at.kwargs = self._model._update_model_kwargs_for_generation({}, at.kwargs, is_encoder_decoder=False)
        at.ids = torch.cat([at.ids, at.ids.new_tensor([[token]])], dim=-1)

    def inputs_of(self, drafted: Sequence[int]) -> list[dict[str, Any]]:
        """`inputs` of the next pass, and of those that would follow if these tokens were said."""
        ahead = self.ahead()
        inputs = [ahead.inputs()]
        for token in drafted:
            ahead.add(token)
            inputs.append(ahead.inputs())
        return inputs

    def inputs(self) -> dict[str, Any]:
        """What the model gets in a pass after the first: the latest token, its position, the cache."""
        at = self._prepared
        new = 1 if at.kwargs["use_cache"] else None
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(at.ids, next_sequence_length=new, **at.kwargs)
        return inputs

    def take(self, outputs: Any, said: int | None = None) -> tuple[int, bool]:
        """The token that a pass of this sequence leads to, and whether it is the last one. said: the token, if known."""
        at, model = self._prepared, self._model
        at.kwargs = model._update_model_kwargs_for_generation(outputs, at.kwargs, is_encoder_decoder=False)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=at.ids.device)
        if self.watched is not None:
            self.watched.append(logits)
        logprobs = logits[0].log_softmax(-1) if self.logprobs is not None and said is None else None
        scores = at.logits_processor(at.ids, logits.clone() if self.watched is not None else logits)
        token = self._drawn(scores) if at.generation_config.do_sample else torch.argmax(scores, dim=-1)
        if said is not None:
            token = torch.full_like(token, said)
        if logprobs is not None and self.logprobs is not None:
            self.chances = Chances.of(logprobs, int(token), self.logprobs)
        at.ids = torch.cat([at.ids, token[:, None]], dim=-1)
        return int(token), bool(at.stopping_criteria(at.ids, None).all())

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        chances = torch.nn.functional.softmax(scores, dim=-1)
        return torch.multinomial(chances, num_samples=1, generator=self._generator).squeeze(1)


@dataclass
class MessageParts:
    """Tells text, reasoning and tool calls of an answer apart on the way to `emit`. It knows nothing of the request: a circle of
    both would keep the tensors of a request that failed.
    """

    parser: MessageParser
    emit: Callable[[Piece], None]
    _scored: tuple[TokenLogprob, ...] = ()  # tokens that wait for the words which they are told with

    def feed(self, text: str) -> None:
        self._scored += getattr(text, "logprobs", ())
        self._tell(self.parser.feed(text))

    def end(self) -> None:
        self._tell(self.parser.end())

    def _tell(self, pieces: Iterable[Piece]) -> None:
        """Tokens with their chances go with the words of the answer that they make; those of reasoning and calls with none."""
        for piece in pieces:
            if self._scored and not isinstance(piece, ToolCall | CallPart):
                tokens, self._scored = split_at(self._scored, piece if isinstance(piece, str) else piece.text)
                piece = ScoredText.of(piece, tokens) if isinstance(piece, str) else piece
            self.emit(piece)


class TextPieces(TextStreamer):
    """Turns generated ids into printable pieces; holds back what may still change (half a character, half a word).

    kept: special tokens that stay in the text. logprobs: gets an entry of each token added with its chances. A piece brings those
    of the tokens whose text ends in it; tokens without text of the answer (its end, what a stop string cuts off) come with none.
    """

    def __init__(
        self,
        tokenizer: Any,
        emit: Callable[[str], None],
        stop: Sequence[str] = (),
        kept: Collection[int] = (),
        logprobs: list[TokenLogprob] | None = None,
    ):
        super().__init__(tokenizer, skip_special_tokens=not kept)
        self._emit, self._stop, self._logprobs = emit, StopStrings(stop), logprobs
        self._left_out = set(tokenizer.all_special_ids) - set(kept) if kept else set[int]()
        self._bytes = TokenBytes(tokenizer) if logprobs is not None else None
        self._length = self._finalized = self._emitted = 0  # characters; each of them is one of those before
        self._brought = 0  # entries

    @property
    def stopped(self) -> str | None:
        """The stop string that came."""
        return self._stop.found

    def add(self, token: int, chances: Chances | None = None) -> None:
        said = [token] if token not in self._left_out else []
        if self._bytes is not None and self._logprobs is not None and chances is not None:
            self._logprobs.append(self._bytes.entry(chances, self._length))
            text = self.tokenizer.decode([*self.token_cache, *said], **self.decode_kwargs)
            self._length = self._finalized - self.print_len + len(text.rstrip("\ufffd"))
        if said:
            self.put(torch.tensor(said))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        piece, tokens = self._stop.before(text, last=stream_end), tuple[TokenLogprob, ...]()
        if self._logprobs is not None:
            self._finalized += len(text)
            self._emitted += len(piece)
            tokens = tuple(self._ripe(self._logprobs, stream_end or self.stopped is not None))
            piece = ScoredText.of(piece, tokens)
        if piece or tokens:
            self._emit(piece)

    def _ripe(self, entries: list[TokenLogprob], last: bool) -> Iterator[TokenLogprob]:
        """The next entries whose text was emitted, or where it goes no further the part of it that there is."""
        while self._brought < len(entries) and entries[self._brought].offset < self._emitted:
            after = self._brought + 1
            if not last and (entries[after].offset if after < len(entries) else self._length) > self._emitted:
                return
            yield entries[self._brought]
            self._brought = after


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string; holds back what may become one."""

    def __init__(self, stop: Sequence[str]):
        self._stop = [string for string in stop if string]
        self._held = ""
        self.found: str | None = None

    def before(self, piece: str, last: bool = False) -> str:
        """What may be said now; nothing any more once a stop string was found. `last`: no piece follows."""
        if self.found:
            return ""
        text = self._held + piece
        places = [(place, string) for string in self._stop if (place := text.find(string)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        held = 0 if last else max((self._overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Characters at the end of `text` with which `string` begins."""
        return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


@dataclass
class Reply:
    """Iterate it for pieces of text; then `answer` and `figures` are there. An error of the request is raised while iterating.

    `pieces` has what the model thinks and the calls that it asks for as well, which are in `reasoning` and, where they are whole,
    in `tool_calls`.
    """

    answer: str = ""  # what was iterated so far
    text: str = ""  # what was generated so far
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    error: BaseException | None = None  # what ended it, once it has ended
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of every token that was generated; where they were asked for
    flag: threading.Event = field(default_factory=threading.Event)  # set: stop
    _figures: Figures | None = None
    _ended: bool = False  # the iterator has seen the end
    _pieces: "queue.SimpleQueue[Piece | None]" = field(default_factory=queue.SimpleQueue)
    _put: Callable[[Piece | None], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[str]:
        yield from (piece for piece in self.pieces() if isinstance(piece, str))

    def pieces(self) -> Iterator[Piece]:
        """Text, Reasoning and ToolCall, as they come; a ToolCall may come behind the CallParts that it is made of."""
        while not self._ended:
            piece = self._pieces.get()
            if piece is None:
                self._ended = True
            else:
                self.answer += piece if isinstance(piece, str) else ""
                yield piece
        if self.error is not None:
            raise self.error

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on."""
        calls = [{"id": call.id, "type": "function", "function": call.function} for call in self.tool_calls]
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought, **({"tool_calls": calls} if calls else {})}

    def deliver_to(self, put: Callable[[Piece | None], None]) -> None:
        """Instead of iterating: `put` gets every piece so far, now, and those to come on the model's thread, then None.

        It must not wait, nor close the engine. After None there are `figures`, or an `error`.
        """
        with self._lock:
            while not self._pieces.empty():
                put(self._pieces.get())
            self._put = put

    def cancel(self) -> None:
        """Stop within a token; what was said so far stays. From any thread, also from a signal handler."""
        self.flag.set()

    @property
    def figures(self) -> Figures:
        if self._figures is None:
            raise RuntimeError("figures are there once a reply was iterated to its end; a failed one has none") from self.error
        return self._figures

    # -- the model thread's side
    def emit(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self.text += piece
        elif isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, ToolCall) and piece.whole:
            self.tool_calls.append(piece)
        self._deliver(piece)

    def end(self, figures: Figures | None = None, error: BaseException | None = None) -> None:
        self._figures = figures
        self.error = error
        self._deliver(None)

    def _deliver(self, piece: Piece | None) -> None:
        with self._lock:
            (self._put or self._pieces.put)(piece)
