"""One request on its way from a prompt to an answer and its figures, a forward pass at a time, on the model's thread.

Requests that decode can take their steps together, as rows of one pass (`Request.step_with`, shared_pass.py).

What several requests share is `SharedModel`: the model with all that lives on it and belongs to one of them at a time (rotary
offsets, the lookahead's memory, how visual tokens are dropped), and what earlier requests left (keys and values, encoded images).
"""

import contextlib
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, LogitsProcessorList

from vismoe.engine.drafting import Drafted, Drafter, Drafts
from vismoe.engine.generate import MessageParts, Reply, TextPieces, TokenLoop
from vismoe.engine.grammar import GrammarMask, ReasoningLimit, Thought
from vismoe.engine.pace import Pace
from vismoe.engine.penalties import Penalties
from vismoe.engine.prefix_cache import Prefix, PrefixCache
from vismoe.engine.shared_pass import SharedPasses
from vismoe.engine.stats import Clock, Figures, Finish, PrecisionInfo
from vismoe.errors import ConfigError
from vismoe.metrics import Snapshot
from vismoe.models.inputs.prompts import Prompt, PromptBuilder, without_pixels
from vismoe.models.load.opening import Configuration
from vismoe.models.load.runtime import Runtime
from vismoe.models.moe.step_context import Interrupted
from vismoe.models.visual.image_cache import ImageCache
from vismoe.models.visual.pruned_cache import can_go_on
from vismoe.options import RequestOptions
from vismoe.planning.needs import mask_bytes
from vismoe.planning.plan import Plan
from vismoe.trace.files import TraceWriter
from vismoe.types import Phase
from vismoe.vision.selection import KeptImage, Pruning

FIRST_TOKENS = 256  # that an answer of unknown length begins with
RETENTION_STEPS = 10_000  # that tell two retentions apart


@dataclass
class Belongings:
    """What a request leaves on the model between two passes."""

    rope_deltas: list[Any] = field(default_factory=list)  # of each module that has them; none: it begins
    memory: Any = None  # of the lookahead


@dataclass
class Company:
    """Requests that decode together hold the model as one. The lookahead's memory is theirs together."""

    precision: PrecisionInfo | None = None
    belongings: Belongings = field(default_factory=Belongings)
    clock: Clock | None = None

    @staticmethod
    def cancelled() -> bool:
        """A row that is cancelled ends before the next pass; the others go on."""
        return False


class SharedModel:
    """The model, lent to one request at a time. `retention`: of importance, of requests that ask for none."""

    def __init__(
        self,
        model: Any,
        runtime: Runtime,
        prompts: PromptBuilder,
        images: ImageCache | None,
        retention: Callable[[], float],
        passes: SharedPasses,
        drafts: Drafts,
    ):
        self.model, self.runtime, self.prompts, self.images, self._retention = model, runtime, prompts, images, retention
        self.passes, self.drafts, self.company = passes, drafts, Company()
        self.prefix_cache = PrefixCache()
        self.ended = Counter[str]()  # requests by their end: stop, length, cancelled, failed
        self._counted = runtime.metrics.snapshot()  # what passes so far have accounted for
        self._pace = self._pace_of(runtime.configuration)
        self._rotating = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._holder: Request | Company | None = None
        self._numbers = itertools.count()

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def pace(self) -> Pace:
        """Of passes under the plan that holds now."""
        if self._pace.plan is not self.plan:
            self._pace = self._pace_of(self.runtime.configuration)
        return self._pace

    @staticmethod
    def _pace_of(configuration: Configuration) -> Pace:
        plan = configuration.plan
        return Pace(plan, configuration.experts.inventory.slab_bytes / plan.total_experts)

    @property
    def clock(self) -> Clock | None:
        """Of the request that holds the model."""
        return self._holder.clock if self._holder is not None else None

    def lend(self, holder: "Request | Company | None") -> None:
        """From now on the model is this request's, or several requests'; None: no request's."""
        before, self._holder = self._holder, holder
        if before is holder:
            return
        left = Belongings([module.rope_deltas for module in self._rotating])
        belongings, precision, cancelled = Belongings(), None, Company.cancelled
        if holder is not None:
            belongings, precision, cancelled = holder.belongings, holder.precision, holder.cancelled
        self._rotate(belongings)
        retention = precision.retention if precision is not None else self._retention()
        left.memory = self.runtime.context.switch(belongings.memory, retention, cancelled)
        if before is not None:
            before.belongings = left

    def _rotate(self, belongings: Belongings) -> None:
        for module, deltas in zip(self._rotating, belongings.rope_deltas or [None] * len(self._rotating), strict=True):
            module.rope_deltas = deltas

    def lend_together(self, requests: "Sequence[Request]") -> list[dict[str, Any]]:
        """From now on the model is theirs together -> what it would get of each in a pass of its own."""
        self.company.precision = requests[0].precision
        self.lend(self.company)
        inputs = []
        for request in requests:
            self._rotate(request.belongings)
            inputs.append(request.loop.inputs())
        return inputs

    def forget(self, request: "Request") -> None:
        """It has left in the middle of its answer."""
        if self._holder is request:
            self.lend(None)

    def forget_what_experts_made(self) -> None:
        """Other formats: what requests have left was computed in those of before."""
        self.prefix_cache.clear()
        if self.images is not None and self.runtime.context.encodes_with_experts:
            self.images.clear()

    def refuse_other(self, asked: PrecisionInfo | None) -> None:
        """Raises ConfigError where experts are not served as a request asks: the change that it waited for was not made."""
        served = PrecisionInfo.of(self.runtime.configuration.settings)
        wanted, running = ((one.policy, one.formats) if one is not None else None for one in (asked, served))
        if wanted != running:
            why = self.runtime.refused or "another change came between"
            raise ConfigError(f"policy and formats could not be changed: {why}")

    def begin_request(self, alone: bool) -> None:
        """A request begins with its first pass; `alone`: no other one runs. What happened while none ran counts for none."""
        if alone:
            self.count()
        if isinstance(self.runtime.context.recorder, TraceWriter):
            self.runtime.context.recorder.request(str(next(self._numbers)))

    def decoded(self, rows: int, began_s: float, happened: Snapshot) -> None:
        """A decode pass of `rows` is over."""
        seconds, stall_s = time.perf_counter() - began_s, happened.total("stall_seconds", Phase.DECODE)
        self.pace.passed(rows, seconds, stall_s, int(happened.total("misses", Phase.DECODE)))

    def count(self) -> Snapshot:
        """What happened since it was last asked."""
        now = self.runtime.metrics.snapshot()
        happened, self._counted = now - self._counted, now
        return happened


class Request:
    """Made in any thread; `step`, `finish` and `fail` run on the model's.

    most_tokens: of the answer. pruning: how visual tokens are dropped; None: they are not. precision: what chooses formats; None:
    exact. draft: what may draft. others: tokens of the other requests that run. An answer whose length was not said holds places
    for a part of `most_tokens`, and then for twice as many.
    """

    def __init__(
        self,
        prompt: Prompt,
        options: RequestOptions,
        most_tokens: int,
        pruning: Pruning | None,
        precision: PrecisionInfo | None,
        draft: str,
        mask: GrammarMask | None,
        reply: Reply,
        shared: SharedModel,
        others: Callable[["Request"], int],
    ):
        self.prompt, self.options, self.most_tokens = prompt, options, most_tokens
        self.pruning, self.precision = pruning, precision
        self.reply, self._shared, self._others = reply, shared, others
        self.tokens = prompt.tokens + (min(FIRST_TOKENS, most_tokens) if self.may_give_up else most_tokens)
        self._said: list[int] = []  # tokens of the answer
        self._again = 0  # of these that are computed once more, after it had to give up its place
        self.clock, self.belongings = Clock(), Belongings()
        parser = prompt.parser() if prompt.parser is not None else None
        self._parts = MessageParts(parser, reply.emit) if parser is not None else None
        kept = shared.prompts.kept_specials if parser is not None else frozenset[int]()
        logprobs = reply.logprobs if options.logprobs is not None else None
        emit = reply.emit if self._parts is None else self._parts.feed
        self._text = TextPieces(shared.prompts.tokenizer, emit, options.stop, kept, logprobs)
        self._drafter, self._mask = Drafter(shared.drafts, draft), mask
        self._limit: ReasoningLimit | None = None
        if parser is not None and (around := shared.prompts.around_reasoning) is not None:
            thought = partial(Thought, shared.prompts.tokenizer, *around, parser.thinking)
            if mask is not None and parser.thinking:
                mask.thought = thought()
            if options.reasoning_tokens is not None:
                self._limit = ReasoningLimit(thought(), options.reasoning_tokens)
        self._loop: TokenLoop | None = None
        self._cuts: list[int] = []  # ends of the pieces of the prompt that are still to be read
        self._numbers: np.ndarray | None = None
        self._counters: Snapshot | None = None
        self._kept: tuple[KeptImage, ...] = ()
        self._reused_tokens = self._encoded_images = 0
        self._finish: Finish | None = None  # until the answer ends by itself

    @property
    def unwanted(self) -> bool:
        """Whether its reader has cancelled it."""
        return self.cancelled()

    def cancelled(self) -> bool:
        return self.reply.flag.is_set()

    @property
    def loop(self) -> TokenLoop:
        """Of its tokens, once its prompt was read."""
        assert self._loop is not None
        return self._loop

    @property
    def company(self) -> Hashable:
        """Requests that decode can share a pass where the experts' formats are chosen alike."""
        if self._loop is None or self._cuts or not self._shared.passes.takes(self._loop):
            return None
        return "decode", self.precision

    @property
    def left(self) -> int:
        """Passes to its end at most, or to where it asks for more tokens."""
        return self._room - self._computed

    @property
    def grows(self) -> int:
        """Tokens that it asks for before the next pass: as many again as its answer has had."""
        return 0 if self.left else min(self._room, self.most_tokens - self._room)

    @property
    def may_give_up(self) -> bool:
        return self.options.max_tokens is None

    @property
    def _room(self) -> int:
        """Tokens of the answer that it holds places for."""
        return self.tokens - self.prompt.tokens

    @property
    def _computed(self) -> int:
        """Tokens of the answer since it began, the last time."""
        return len(self._said) - self._again

    def give_up(self) -> None:
        """Leave the model and its places. It will begin anew, and say nothing until it is where it was: each token is computed
        in a pass of its own as before, so the bits are the same."""
        self._shared.forget(self)
        self._loop, self._cuts, self.belongings = None, [], Belongings()
        self._drafter.begin_anew()
        self._again = len(self._said)
        self._kept = ()

    def step(self) -> bool:
        """One forward pass, of the prompt, of a piece of it or of one token; whether there is a next one."""
        if self.unwanted:
            return False
        self._shared.lend(self)
        began_s, prefilling, read = time.perf_counter(), self._loop is None or bool(self._cuts), self._read_tokens
        if self._loop is None:
            self._shared.refuse_other(self.precision)
            self._shared.begin_request(alone=not self._others(self))
            self.clock.began_s = self.clock.began_s or began_s
        self._make_room()
        going_on, drafted = False, Drafted()
        try:
            with torch.inference_mode(), contextlib.suppress(Interrupted):
                if not prefilling:
                    drafted = self._draft()
                    began_s = time.perf_counter()
                going_on = self._read_on() if prefilling else self._verify(drafted)
        finally:
            self._drafter.ended()
            tokens = 1 + len(drafted.tokens)
            if prefilling:
                tokens = max(0, self._read_tokens - max(read, self._reused_tokens))  # 0: interrupted
                self._drafter.passed(self._read_tokens - tokens, tokens, self._shared.drafts.take_hidden())
            happened = self._shared.count()
            if not prefilling and not drafted.tokens:
                self._shared.decoded(1, began_s, happened)
            self._passed(Phase.PREFILL if prefilling else Phase.DECODE, tokens, began_s, [happened])
        return going_on

    def _draft(self) -> Drafted:
        """Tokens for the next pass to verify, where something drafts and that pays."""
        began_s = time.perf_counter()
        if not self._drafter.offers or self._repeated is not None:  # what is repeated has passes of one token, as before
            return Drafted()
        drafted = self._drafter.draft(self.loop, self.left - 1, self._of_images([self]))
        happened = self._shared.count()
        if drafted.kind in ("self", "mtp"):
            self._passed(Phase.DRAFT, len(drafted.tokens), began_s, [happened])
        else:
            self._count(happened)  # of a trial
        return drafted

    def _verify(self, drafted: Drafted) -> bool:
        """One pass over the latest token and what was drafted; whether a token is wanted after those that it leads to."""
        verified = self._drafter.verify(self.loop, drafted)
        going_on = self._answer(*verified.take(self._repeated))
        while going_on and verified.goes_on and not self.unwanted:
            going_on = self._answer(*verified.take())
        return going_on

    def step_with(self, others: "Sequence[Request]") -> list[bool | BaseException]:
        """One forward pass for the next token of this request and of others of its company."""
        wanted = [request for request in (self, *others) if not request.unwanted]
        if len(wanted) < 2:
            done = [_attempt(request.step) for request in wanted]
        elif self._shared.passes.wants_trial(len(wanted)):
            done = self._tried(wanted)
        else:
            done = self._together(wanted)
        results = dict(zip(wanted, done, strict=True))
        return [results.get(request, False) for request in (self, *others)]

    def _together(self, requests: "Sequence[Request]") -> "list[bool | BaseException]":
        shared, began_s, rows = self._shared, time.perf_counter(), len(requests)
        for request in requests:
            request._make_room()
        try:
            with torch.inference_mode():
                inputs, loops = shared.lend_together(requests), [request.loop for request in requests]
                outputs, _ = shared.passes.run(loops, inputs, self._of_images(requests))
                hidden = shared.drafts.take_hidden()
                for row, request in enumerate(requests):
                    of_row = hidden[row : row + 1].clone() if hidden is not None else None
                    request._drafter.passed(request.loop.ids.shape[1] - 1, 1, of_row)
        except BaseException as error:  # it leaves each row's keys and values incomplete
            shared.count()
            return [error] * rows
        results = [_attempt(partial(request._taken, output)) for request, output in zip(requests, outputs, strict=True)]
        happened = shared.count()
        shared.decoded(rows, began_s, happened)
        shares = happened.split(rows)
        for number, request in enumerate(requests):
            request._passed(Phase.DECODE, 1, began_s, shares, number)
        return results

    @torch.inference_mode()
    def _taken(self, output: Any) -> bool:
        """The row of a shared pass leads to a token; whether another one is wanted."""
        return self._answer(*self.loop.take(output, self._repeated))

    def _tried(self, requests: "Sequence[Request]") -> "list[bool | BaseException]":
        """Each takes its step alone; what a shared pass would have computed is compared with that."""
        shared = self._shared
        with torch.inference_mode():
            inputs, loops = shared.lend_together(requests), [request.loop for request in requests]
            tried = shared.passes.tried(loops, inputs, self._of_images(requests))
        for request, happened in zip(requests, shared.count().split(len(requests)), strict=True):
            request._count(happened)
        for loop in loops:
            loop.watched = []
        results = [_attempt(request.step) for request in requests]
        alone = [logits for loop in loops for logits in loop.watched or ()]
        for loop in loops:
            loop.watched = None
        if tried is not None and len(alone) == len(tried):
            shared.passes.judge(tried, torch.cat(alone))
        return results

    @staticmethod
    def _of_images(requests: "Sequence[Request]") -> frozenset[str]:
        return frozenset(name for request in requests for name in request.prompt.image_input_names)

    def _make_room(self) -> None:
        """Its keys and values get room for the tokens that it holds; what waits for others in the planned context gives way."""
        if self._loop is not None:
            self._loop.reserve(self.tokens)
        if self.may_give_up:
            self._shared.prefix_cache.shrink(self._shared.plan.context - self.tokens - self._others(self))

    def _count(self, happened: Snapshot) -> None:
        self._counters = happened if self._counters is None else self._counters + happened

    def _passed(self, phase: Phase, tokens: int, began_s: float, shares: Sequence[Snapshot], mine: int = 0) -> None:
        """`shares` of what happened, one for each request of the pass, `mine` this one's."""
        self._count(shares[mine])
        streamed = any(share.total("streamed") for share in shares)
        self.clock.passed(phase, tokens, began_s, shares[mine], len(shares), streamed)

    def finish(self) -> None:
        """Settle the reply with its figures, and leave what a later request can use."""
        self._text.end()
        if self._parts is not None:
            self._parts.end()
        figures = self._figures()
        self._leave()
        self._shared.ended[figures.finish] += 1
        self.reply.end(figures)

    def fail(self, error: BaseException) -> None:
        """It has ended by this error, and left."""
        self._loop = None  # a pass that failed leaves keys and values of some layers only
        _clear_frames(error)  # which hold them, and all tensors of the pass
        self._leave()
        self._shared.ended["failed"] += 1
        self.reply.end(error=error)

    # -- the passes
    @property
    def _repeated(self) -> int | None:
        """The token that the next pass comes to, where that was said before it had to give up its place."""
        return self._said[self._computed] if self._again else None

    @property
    def _read_tokens(self) -> int:
        """Of the prompt, with those that an earlier request had read."""
        return self.loop.cache.get_seq_length() if self._cuts else self.prompt.tokens if self._loop is not None else 0

    def _read_on(self) -> bool:
        """Read the prompt, or its next piece; whether there is a next pass."""
        try:
            if self._loop is None:
                prefix, cuts = self._beginning()
                loop = self._token_loop(prefix, cuts)
                if loop is None:
                    with self._images_prepared(list(range(self.prompt.images))):
                        self._loop = self._new_loop(self.prompt.whole())
                        self._loop.reserve(self.tokens)
                        first = self._loop.step(self._repeated)
                    self.prompt = self.prompt.light()
                    return self._answer(*first)
                self._loop, self._cuts, self.prompt = loop, cuts, self.prompt.light()
                loop.reserve(self.tokens)
            read = self._read_piece()
        except Interrupted:
            self._loop, self._cuts = None, []  # some layers have keys and values of this piece, and others do not
            raise
        return read is None or self._answer(*read)

    def _read_piece(self) -> tuple[int, bool] | None:
        """Read the next piece of the prompt -> after the last one the first token, and whether it is the last one."""
        loop, prompt, end = self.loop, self.prompt, self._cuts[0]
        images = [n for n, (begin, _) in enumerate(prompt.places) if loop.cache.get_seq_length() <= begin < end]
        of_piece = dict(prompt.image_inputs(images).to(self._shared.model.device)) if images else {}
        first = None
        with self._images_prepared(images):
            if len(self._cuts) > 1:
                loop.read(end, of_piece, prompt.image_input_names)
            else:
                loop.take_over(of_piece, prompt.image_input_names)
                first = loop.step(self._repeated)
        self._cuts = self._cuts[1:]
        return first

    def _token_loop(self, prefix: Prefix | None, cuts: list[int]) -> TokenLoop | None:
        """Of a prompt that is not read in one piece from its start; None for one that is.

        generate() gets the sizes of all images, for the positions of their tokens, and no pixels.
        """
        if prefix is None and len(cuts) == 1:
            return None
        loop = self._new_loop(without_pixels(self.prompt.inputs))
        if prefix is not None:
            loop.begin_with(prefix.cache)
            self._kept, self._reused_tokens = prefix.kept, prefix.tokens
        return loop if can_go_on(loop.cache) else None

    def _new_loop(self, inputs: BatchFeature) -> TokenLoop:
        model, seed = self._shared.model, self.options.seed
        generator = torch.Generator(model.device).manual_seed(seed) if seed is not None else None
        how, processors = self.options.for_generate(self.most_tokens), LogitsProcessorList()
        presence, frequency = self.options.presence_penalty or 0.0, self.options.frequency_penalty or 0.0
        if presence or frequency:
            processors.append(Penalties(inputs["input_ids"].shape[1], presence, frequency))
        # the last ones before sampling: what may not follow stays without a chance
        processors.extend(one.restart() for one in (self._limit, self._mask) if one is not None)
        loop = TokenLoop(model, inputs.to(model.device), {**how, "logits_processor": processors}, generator)
        loop.logprobs = self.options.logprobs
        return loop

    def _beginning(self) -> tuple[Prefix | None, list[int]]:
        """(what an earlier request has left of this prompt, the ends of the pieces in which the rest is read).

        If the inputs of single images cannot be separated, the prompt is read whole, without a prefix.
        """
        prompt, prefix = self.prompt, self._prefix()
        if self._again and not self._reused_tokens:  # it had none the first time
            prefix = None
        first = prefix.tokens if prefix is not None else 0
        cuts, images = self._cuts_behind(first), prompt.images_behind(first)
        whole = prefix is None and (len(cuts) == 1 or not self._masks_fit(first, cuts))
        told_apart = images == [] or (
            images is not None and set(without_pixels(prompt.image_inputs(images))) == set(prompt.image_input_names)
        )
        return (None, [prompt.tokens]) if whole or not told_apart else (prefix, cuts)

    def _cuts_behind(self, first: int) -> list[int]:
        runtime, prompt = self._shared.runtime, self.prompt
        chunk = runtime.configuration.settings.prefill_chunk
        whole = chunk is None or runtime.context.recorder is not None  # a trace is of whole prompts
        return prompt.cuts(first, prompt.tokens if whole or chunk is None else chunk)

    def _masks_fit(self, first: int, cuts: list[int]) -> bool:
        """Whether the plan has memory for the masks of these pieces. The first piece of a prompt needs no mask."""
        plan, begins = self._shared.plan, (first, *cuts)
        pieces = [(end - begin, end) for begin, end in zip(begins, cuts) if begin]
        return all(mask_bytes(1, new, together, plan.dtype) <= plan.mask_bytes for new, together in pieces)

    def _prefix(self) -> Prefix | None:
        """The longest beginning of the prompt that an earlier request has left, and room in the planned context for this one."""
        shared, prompt = self._shared, self.prompt
        room_tokens = shared.plan.context - self.tokens - self._others(self)  # that may stay for others
        if not self.options.reuse or shared.runtime.context.recorder is not None:  # a trace is of whole prompts
            shared.prefix_cache.shrink(room_tokens)
            return None
        self._numbers = prompt.numbers(shared.prompts.image_token_id, self.pruning)
        if self.precision is not None and len(self._numbers):  # other formats, other keys and values
            self._numbers[0] += (1 + round(RETENTION_STEPS * self.precision.retention)) << 32
        prefix = shared.prefix_cache.take(self._numbers, room_tokens)
        if prefix is None:
            return None
        return prefix if self._masks_fit(prefix.tokens, self._cuts_behind(prefix.tokens)) else None

    @contextlib.contextmanager
    def _images_prepared(self, images: list[int]) -> Iterator[None]:
        """Within, these images of the prompt are encoded, unless they are still there, and their tokens dropped as was asked."""
        prompt, cache, pruner = self.prompt, self._shared.images, self._shared.runtime.pruner
        usual = pruner.pruning if pruner is not None else None
        if pruner is not None:
            pruner.pruning = self.pruning if prompt.images else None
            pruner.begin_request()
        encoded = cache.encoded if cache is not None else 0
        if cache is not None and images:
            names = [prompt.image_names[number] for number in images]
            cache.expect(names, lambda numbers: prompt.image_inputs([images[number] for number in numbers]))
        try:
            with self._shared.runtime.context.reading_prompt():
                yield
            self._encoded_images += cache.encoded - encoded if cache is not None else len(images)
            if pruner is not None and self.pruning is not None:
                self._kept += tuple(pruner.kept)
        finally:
            if cache is not None:
                cache.forget()
            if pruner is not None:
                pruner.pruning = usual

    def _answer(self, token: int, last: bool) -> bool:
        """A token of the answer is there; whether another one is wanted."""
        assert self._loop is not None
        if self._again:
            self._again -= 1
            return True
        self._said.append(token)
        self.clock.token()
        self._text.add(token, self._loop.chances)
        if self._text.stopped or self._loop.ends_with(token):
            self._finish = "stop"
        elif last:
            self._finish = "length"
        return self._finish is None

    # -- the end
    def _leave(self) -> None:
        """Give up the model, and everything but what a later request can go on from."""
        self._shared.lend(None)
        loop, self._loop = self._loop, None
        cache = loop.cache if loop is not None else None
        if loop is None or cache is None or self._numbers is None or not can_go_on(cache):
            return
        generated = loop.ids[0, len(self._numbers) :].cpu().numpy()
        numbers = np.concatenate([self._numbers, generated])[: cache.get_seq_length()]
        self._shared.prefix_cache.keep(Prefix(numbers, cache, self._kept))

    def _figures(self) -> Figures:
        shared, clock, prompt, pager = self._shared, self.clock, self.prompt, self._shared.runtime.pager
        if not self._others(self):
            pager.end_request()
        happened = shared.count()
        if not clock.tokens:  # cancelled before the first token
            clock.first_token_s = clock.last_token_s = time.perf_counter()
            clock.began_s = clock.began_s or clock.first_token_s
        counters = happened if self._counters is None else self._counters + happened
        tokenizer, thought = shared.prompts.tokenizer, self.reply.reasoning
        return Figures(
            answer=self.reply.text,
            stopped_by=self._text.stopped,
            reasoning=thought,
            tool_calls=tuple(self.reply.tool_calls),
            finish="stop" if self._text.stopped else self._finish or "cancelled",
            plan=shared.plan,
            images=prompt.images,
            encode_seconds=clock.encode_s,
            prompt_tokens=prompt.tokens,
            visual_tokens=prompt.visual_tokens,
            prefill_seconds=clock.first_token_s - clock.began_s - clock.encode_s,
            decode_tokens=max(0, clock.tokens - 1),
            decode_seconds=clock.last_token_s - clock.first_token_s,
            capacity={
                "slabs": shared.plan.resident_experts,
                "experts": shared.plan.total_experts,
                "bytes": sum(pool.capacity * pool.layout.record_bytes for table in pager.tables for pool in table.pool.pools),
            },
            backends=shared.runtime.backends,
            counters=counters,
            formats=counters.shares(shared.runtime.format_names),
            precision=self.precision,
            drafts=self._drafter.figures(counters),
            grammar_seconds=self._mask.seconds if self._mask is not None else None,
            pruning=self.pruning,
            kept=self._kept,
            pictures=prompt.pictures,
            answer_tokens=clock.tokens,
            reasoning_tokens=min(clock.tokens, len(tokenizer.encode(thought, add_special_tokens=False))) if thought else 0,
            reused_tokens=self._reused_tokens,
            encoded_images=self._encoded_images,
            queue_seconds=clock.began_s - clock.asked_s,
            passes=tuple(clock.passes),
        )


def _attempt(step: Callable[[], bool]) -> bool | BaseException:
    """What a step returns, or raises."""
    try:
        return step()
    except BaseException as error:  # of one request; the others go on
        return error


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames of its traceback hold, and those that have called them and ended since."""
    traceback.clear_frames(error.__traceback__)
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    with contextlib.suppress(RuntimeError):  # of the first one that still runs
        while frame is not None:
            frame.clear()
            frame = frame.f_back
