"""The engine: a model with paged experts, its processor, and one thread that runs requests by turns.

A request's way: `chat` makes a prompt of the messages and a `Request` of the prompt, and queues it (`Scheduler.ask`). The
scheduler's loop (`Scheduler._run`) lets it enter when its tokens fit, and calls `Request.step` in turn with the other requests.
A step is one forward pass: of the prompt (`TokenLoop.step`), then of tokens (`Drafter.verify`, or `SharedPasses.run` for several
requests). In each, every MoE layer calls `paged_experts` (models/moe/experts.py).
The token becomes text in the `Reply`, which the caller iterates; `Request.finish` adds the figures.

`close()` (or leaving the `with`) stops copies in flight and gives the files back.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from vismoe.config import ENGINE_DEFAULTS, DraftName, Settings
from vismoe.engine.boundary import Boundary
from vismoe.engine.drafting import Drafts
from vismoe.engine.generate import Reply, refuse_own_loop
from vismoe.engine.grammar import GrammarMask, Grammars
from vismoe.engine.reconfigure import PlanChanges
from vismoe.engine.request import Request, SharedModel
from vismoe.engine.scheduler import Scheduler
from vismoe.engine.shared_pass import SharedPasses
from vismoe.engine.stats import PrecisionInfo
from vismoe.errors import ClosedError, ConfigError, ContextError, InputError
from vismoe.machine.hardware import torch_device
from vismoe.metrics import Metrics
from vismoe.models.family.checkpoint_files import demo_model, folder_or_name, reading_checkpoint, refuse_unfit
from vismoe.models.family.families import positions_of, without_quantization
from vismoe.models.family.mtp import decoder_layers
from vismoe.models.inputs.images import fetch_image
from vismoe.models.inputs.prompts import Prompt, PromptBuilder
from vismoe.models.inputs.tools import Tools
from vismoe.models.inputs.videos import fetch_video_file
from vismoe.models.load.gguf import GgufWeights, load_gguf, with_gguf
from vismoe.models.load.preview import checkpoint_files, model_class, read_config, torch_dtype
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.models.visual.image_cache import ImageCache
from vismoe.models.visual.settings import pruning_of
from vismoe.options import OF_CHAT, OPTIONS, RequestOptions, by_name
from vismoe.paging.pager import Pager
from vismoe.planning.needs import Hardware
from vismoe.planning.plan import Plan
from vismoe.trace.files import TraceWriter
from vismoe.vision.selection import Pruning

Messages = Sequence[dict[str, Any]]
Result = TypeVar("Result")


def load(
    model: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    **settings: Any,
) -> "Engine":
    """As `vismoe.load`, where what is read while libraries are imported was begun before, or nothing is."""
    model, chosen = with_gguf(model, Settings.of(**{**ENGINE_DEFAULTS, **settings}))
    name = str(folder_or_name(model if model is not None else demo_model()))
    place = str(torch_device(device))
    config = without_quantization(read_config(name, revision=revision))
    with reading_checkpoint(name):
        refuse_own_loop(model_class(config), name)
    with reading_checkpoint(name):
        files = checkpoint_files(name, revision=revision, partly=chosen.gguf is not None)
        options = dict(
            device_map=place if place != "cpu" else None,
            quantization_config=VisMoEConfig(**vars(chosen)),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the names that the library only prints
        )
        if chosen.gguf is not None:
            weights = GgufWeights(name, config, chosen, files)
            loaded, found = load_gguf(weights, model_class(config), torch_dtype(config, dtype), revision, **options)
        else:
            kind = dtype if isinstance(dtype, str) and dtype == "auto" else torch_dtype(config, dtype)
            loaded, found = model_class(config).from_pretrained(
                name, config=config, revision=revision or "main", dtype=kind, **options
            )
        refuse_unfit(found, name)
        return Engine(loaded.eval(), PromptBuilder.of(loaded, name, revision), name, chosen)


@dataclass(frozen=True)
class Load:
    """What an engine is doing. Tokens are places in the planned context."""

    running: int
    waiting: int
    context_tokens: int  # that requests which run may take
    reusable_tokens: int  # whose keys and values wait for a conversation to go on
    image_cache_bytes: int
    requests: int  # that have ended, whatever way
    cancelled: int  # of these
    failed: int


@dataclass(frozen=True)
class PaceNow:
    """Decode passes: what is expected of them, and what came."""

    planned_rows: int  # the most requests of one pass
    most_rows: int  # the same, as far as the latency allows by what passes took
    rows: float  # of the latest passes, on average
    tokens_per_s: float  # of all rows of these together
    context_tokens: int  # places for all requests, with those that experts have lent their memory
    released_bytes: int  # that experts have lent
    expected_tokens_per_s: float  # of so many rows, by what passes of any number took; before the first, by the plan


class Engine:
    """A loaded model. Requests run by turns, a token of each at a time; those whose tokens do not fit beside others wait."""

    def __init__(self, model: PreTrainedModel, prompts: PromptBuilder, name: str, settings: Settings):
        self.model, self.name = model, name
        self.prompts = prompts  # from conversations to inputs of the model
        self._runtime = runtime_of(model)
        usual = self._runtime.pruner.pruning if self._runtime.pruner is not None else None
        self._usual_pruning = usual or pruning_of(settings, None)
        self._positions = positions_of(model.config) or self._runtime.plan.context
        listening = self._runtime.pruner.images if self._runtime.pruner is not None else None
        images = ImageCache.of(model, settings.image_cache_bytes, listening)
        rows = self._runtime.plan.rows
        on_cpu = self._runtime.plan.device == "cpu"  # a GPU's products always depend on their rows
        passes = SharedPasses(model, rows, settings.deterministic or (settings.parallel == "auto" and on_cpu))
        drafts = Drafts(model, self._runtime, settings, prompts.stand_ins)
        self._shared = SharedModel(model, self._runtime, prompts, images, lambda: self.settings.retention, passes, drafts)
        self._grammars = Grammars(model, prompts.tokenizer)
        recording = lambda: self._runtime.context.recorder is not None  # noqa: E731
        self._boundary = Boundary(self._runtime)
        self._scheduler = Scheduler(self._runtime.plan.context, recording, rows, self._between)
        self._changes = PlanChanges(self._shared, self._scheduler, settings)
        self._hooks: tuple[RemovableHandle, ...] = ()
        for tower in self.prompts.vision_towers(model):
            self._hooks = (
                tower.register_forward_pre_hook(lambda *_: self._encoding(-time.perf_counter())),
                tower.register_forward_hook(lambda *_: self._encoding(time.perf_counter())),
            )

    @property
    def settings(self) -> Settings:
        """Of requests that ask for nothing else."""
        return self._changes.settings

    @property
    def plan(self) -> Plan:
        return self._runtime.plan

    @property
    def hardware(self) -> Hardware:
        """What the machine had free before the model was loaded."""
        return self._runtime.configuration.hardware

    @property
    def processor(self) -> Any:
        """The family's processor (images and text), or its tokenizer for a text model."""
        return self.prompts.processor

    @property
    def tokenizer(self) -> Any:
        return self.prompts.tokenizer

    @property
    def backends(self) -> dict[str, str]:
        """What was chosen at start, and why."""
        return self._runtime.backends | {"passes": self._shared.passes.about, "drafts": self._shared.drafts.about}

    @property
    def can_prune(self) -> bool:
        """Whether `keep` below 1 works with this model; `backends["visual tokens"]` says why not."""
        return self._runtime.pruner is not None

    @property
    def metrics(self) -> Metrics:
        return self._runtime.metrics

    @property
    def pace(self) -> PaceNow:
        """How fast decode passes are, and are expected to be."""
        pace = self._shared.pace
        rows = round(pace.achieved_rows) or 1
        return PaceNow(
            planned_rows=self.plan.rows,
            most_rows=self._scheduler.most_rows,
            rows=pace.achieved_rows,
            tokens_per_s=pace.achieved_tokens_per_s,
            expected_tokens_per_s=pace.expected(rows).tokens_per_s,
            context_tokens=self._boundary.context_tokens,
            released_bytes=self._boundary.released_bytes,
        )

    @property
    def load(self) -> Load:
        running, images = self._scheduler.running, self._shared.images
        return Load(
            running=len(running),
            waiting=self._scheduler.waiting,
            context_tokens=sum(request.tokens for request in running),
            reusable_tokens=self._shared.prefix_cache.tokens,
            image_cache_bytes=images.nbytes if images is not None else 0,
            requests=self._shared.ended.total(),
            cancelled=self._shared.ended["cancelled"],
            failed=self._shared.ended["failed"],
        )

    @property
    def precision(self) -> PrecisionInfo | None:
        """How formats are chosen for requests that ask for nothing else; None: all experts are in one format (exact)."""
        return PrecisionInfo.of(self.settings)

    @property
    def drafts(self) -> tuple[DraftName, ...]:
        """What a request may ask for to guess its tokens, as the engine was loaded."""
        return self._shared.drafts.kinds

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats that slabs hold now, by precision."""
        return self._runtime.format_names

    def formats(self) -> np.ndarray:
        """uint8 `[L, E]`: 0 absent, otherwise the place in `format_names`, from 1, of the format that an expert is resident in;
        255 where a layer has fewer than E experts. All 0 while memory is divided anew."""
        return self._found(Pager.precisions)

    def residency(self) -> np.ndarray:
        """uint8 `[L, E]`: 0 absent, 1 on the device, 2 pinned; 255 where a layer has fewer than E experts. All 0 while memory is
        divided anew."""
        return self._found(Pager.residency)

    def _found(self, look: Callable[[Pager], np.ndarray]) -> np.ndarray:
        serving = self._runtime.context.now_serving
        return look(serving.pager) if serving is not None else np.zeros(self.metrics.demanded.shape, np.uint8)

    def heat(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each expert was there and was missing when a layer demanded it, since the start: int64 `[L, E]` each."""
        missed = self.metrics.missed.copy()
        return self.metrics.demanded - missed, missed

    @by_name(OPTIONS)
    def chat(
        self,
        messages: Messages,
        options: RequestOptions | None = None,
        tools: Tools | None = None,
        template: Mapping[str, Any] = MappingProxyType({}),
        **given: Any,
    ) -> Reply:
        """Answer a conversation; iterate the Reply for pieces of text. Any number may be asked for at a time, from any thread.

        messages: `[{"role", "content"}]`, content a string or parts `{"type": "text", "text"}` and `{"type": "image", "image"}`
        with a path, file:// or http(s) URL (of a public server), bytes, data URI or PIL image; for Qwen's models also with
        `min_pixels` and `max_pixels`, or `resized_height` and `resized_width`, as qwen-vl-utils takes them; image_tokens is for
        images whose part says nothing of its size. Qwen3-VL's families also see `{"type": "video", "video"}`, a file or a list of
        frames, with the options of `qwen_videos`. keep and selection hold for all images of the conversation. An answer without
        max_tokens holds a part of the context at a time, so that others run beside it. policy, formats, retention: as in
        `change`, for this request only; another policy or pair waits until nothing else runs.
        tools: functions that the model may or must call; calls are in the Reply, and go back as `tool_calls` of the assistant's
        message and messages of role `tool`. template: further variables of the model's chat template.
        Raises InputError or ContextError before anything runs, ConfigError or BudgetError where the policy cannot be.
        """
        options = dataclasses.replace(options or RequestOptions(), **given)
        pruning, settings, mask = self._checked(options)  # before pictures are fetched
        if tools is not None and tools.demanded:
            if mask is not None:
                raise InputError(
                    f"tool_choice={tools.choice!r} with json_schema or grammar: an answer is a call or follows that. "
                    "Fix: leave one out"
                )
            mask = self._grammars.mask_of_calls(self.prompts.spoken, tools)
        if options.reasoning_tokens is not None and self.prompts.around_reasoning is None:
            raise InputError(
                f"reasoning_tokens={options.reasoning_tokens}: where this model's reasoning ends is not known. Fix: leave it out"
            )
        return self._ask(self.prompt_of(messages, options, tools, template), options, pruning, settings, mask)

    def prompt_of(
        self,
        messages: Messages,
        options: RequestOptions | None = None,
        tools: Tools | None = None,
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """The prompt that `chat` would read. Raises what `chat` raises."""
        options = options or RequestOptions()
        template = {**self.prompts.of_reasoning(options.reasoning), **template}
        seen = fetch_image, options.image_tokens, self.plan.context
        return self.prompts.build(messages, *seen, tools, template, fetch_video_file)

    def opened_video(self, part: Mapping[str, Any], image_tokens: tuple[int, int] | None = None) -> dict[str, Any]:
        """A video's message part with the video opened, for several questions about it. Raises InputError."""
        video = self.prompts.video(part, fetch_image, image_tokens, self.plan.context, fetch_video_file)
        return {"type": "video", "video": video}

    @by_name(OPTIONS.keys() - OF_CHAT)
    def complete(self, text: str | Sequence[int], options: RequestOptions | None = None, **given: Any) -> Reply:
        """Go on from `text` as it is, or from ids of tokens, without a chat template; otherwise like `chat`, without images,
        tools and reasoning."""
        options = dataclasses.replace(options or RequestOptions(), **given)
        for name in OF_CHAT:
            if (value := getattr(options, name)) is not None:
                raise InputError(f"{name}={value!r}: a text to go on from has neither images nor reasoning. Fix: leave it out")
        return self.answer(self.prompts.build_text(text), options)

    def answer(self, prompt: Prompt, options: RequestOptions | None = None, draw: int | None = None) -> Reply:
        """Answer a prompt that `prompts` has made; otherwise like `chat`. draw: the seed of the selection `random`."""
        options = options or RequestOptions()
        if options.reasoning is not None:
            raise InputError(
                "reasoning: the prompt has it already. Fix: prompts.build(..., template=prompts.of_reasoning('low'))"
            )
        pruning, settings, mask = self._checked(options)
        if pruning is not None and draw is not None:
            pruning = dataclasses.replace(pruning, seed=draw)
        return self._ask(prompt, options, pruning, settings, mask)

    def _checked(self, options: RequestOptions) -> tuple[Pruning | None, Settings, GrammarMask | None]:
        """What to drop of images, the settings that hold for the request, and what its answer follows."""
        self._shared.drafts.refuse_unloaded(options.draft)
        vocabulary = self.model.config.get_text_config().vocab_size
        if options.logit_bias and (most := max(options.logit_bias)) >= vocabulary:
            raise InputError(f"logit_bias: token {most}, but the vocabulary ends at {vocabulary - 1}. Fix: leave it out")
        pruning, settings = self._pruning(options.keep, options.selection), self._changes.with_options_of(options)
        return pruning, settings, self._grammars.mask_of(options)

    def _ask(
        self, prompt: Prompt, options: RequestOptions, pruning: Pruning | None, settings: Settings, mask: GrammarMask | None
    ) -> Reply:
        pruning = pruning if prompt.images else None
        longest, whose, more = self._longest(prompt, pruning)
        if prompt.tokens >= longest:
            visual = f" ({prompt.visual_tokens} of them visual)" if prompt.visual_tokens else ""
            less = "use smaller images (--image-tokens)" if prompt.visual_tokens else "shorten the text"
            raise ContextError(
                f"the conversation has {prompt.tokens} tokens{visual}, the {whose} {longest}. Fix: {more}{less}, or start anew"
            )
        most_tokens = min(options.max_tokens or longest, longest - prompt.tokens)
        reply = Reply()

        def ask() -> None:
            busy = self._scheduler.running or self._scheduler.waiting
            first = prompt.light() if busy else prompt  # no two hold pixels
            precision = PrecisionInfo.of(settings)
            chosen = pruning, precision, options.draft or settings.draft, mask
            self._scheduler.ask(Request(first, options, most_tokens, *chosen, reply, self._shared, self._others))

        self._changes.behind(settings, ask)
        return reply

    def hurry(self) -> None:
        """From now on the request that is nearest to its end goes first: before the engine is closed."""
        self._scheduler.hurry()

    def change(self, policy: str | None = None, formats: str | None = None, retention: float | None = None) -> Plan:
        """Choose the formats of experts in another way from now on; -> the plan that holds then. None: as it was.

        policy: exact, hotness, importance or hotness+importance; formats: the pair, e.g. 4/2; retention: of importance. Waits for
        requests that run, divides the same memory anew, and goes on; another retention needs no new plan. Raises ConfigError,
        CheckpointError or BudgetError, and leaves everything as it was.
        """
        self._changes.change(self._changes.with_options(policy, formats, retention))
        return self.plan

    def why_not(self, policy: str, formats: str | None = None) -> str | None:
        """Why `change` would refuse this policy, with these formats (None: as they are); None where it would not."""
        return self._changes.why_not(policy, formats)

    def _longest(self, prompt: Prompt, pruning: Pruning | None) -> tuple[int, str, str]:
        """(tokens that prompt and answer can have, whose limit that is, the first thing to do about it)."""
        window = self._runtime.pruner.most_tokens if self._runtime.pruner and pruning and prompt.images else None
        enough = min(2 * prompt.tokens, self._positions)
        larger = f"load with context={enough} (--context), " if enough > prompt.tokens else ""
        limits = [(self._positions, "model's own limit is", ""), (self.plan.context, "planned context is", larger)]
        if window is not None:
            limits.append((window, "sliding window, beyond which no visual token can be dropped, is", "keep=1, "))
        return min(limits, key=lambda limit: limit[0])

    def _pruning(self, keep: float | None, selection: str | None) -> Pruning | None:
        """How this request drops visual tokens; None where it keeps all. Raises InputError."""
        asked = self._usual_pruning
        try:
            asked = dataclasses.replace(
                asked, keep=asked.keep if keep is None else keep, selection=asked.selection if selection is None else selection
            )
        except ConfigError as error:
            raise InputError(str(error)) from error
        if asked.keep == 1:
            return None
        if self._runtime.pruner is None:
            raise InputError(f"keep={asked.keep}: {self.backends['visual tokens']}. Fix: keep=1")
        return asked

    def with_model(self, task: Callable[[PreTrainedModel], Result]) -> Result:
        """What `task` returns, run on the model's thread between requests: for measurements that need more than text."""

        def alone() -> Result:
            self._shared.prefix_cache.clear()  # the whole context is the task's
            try:
                return task(self.model)
            finally:
                self._runtime.pager.end_request()

        result: Result = self._changes.behind(self.settings, lambda: self._scheduler.run_alone(alone)).result()
        return result

    def alone(self, task: Callable[[], Result]) -> Result:
        """What `task` returns, run on the model's thread between requests: for what would disturb them, such as planning another
        model, which changes torch's default type meanwhile. Conversations keep what is cached of them. Raises ClosedError."""
        result: Result = self._scheduler.run_alone(task).result()
        return result

    def _between(self, scheduler: Scheduler) -> None:
        """Before a round, on the model's thread: what passes took says how many requests keep to the latency, and whether experts
        lend memory to those that wait."""
        latency, pace, passes = self.settings.latency, self._shared.pace, self._shared.passes
        scheduler.most_rows = 1 if passes.refused else min(pace.most_rows(latency), passes.most_rows)
        if latency is not None:
            by_turns = int(latency / pace.expected(1).seconds)  # a token of each is a pass of its own
            scheduler.most_running = max(1, by_turns) if passes.refused else scheduler.most_rows
        if not self.settings.deterministic:
            running = scheduler.running
            waits = scheduler.waits_for_places and len(running) < scheduler.most_rows
            before, rho = scheduler.context_tokens, pace.rho(max(1, len(running)))
            scheduler.context_tokens = self._boundary.between(rho, waits, scheduler.free)
            if scheduler.context_tokens < before:
                self._shared.prefix_cache.shrink(scheduler.free)

    def _others(self, request: Request) -> int:
        """Tokens of the other requests that run."""
        return sum(other.tokens for other in self._scheduler.running if other is not request)

    def _encoding(self, signed_s: float) -> None:
        if self._shared.clock is not None:
            self._shared.clock.encode_s += signed_s

    @contextlib.contextmanager
    def record(self, path: str | Path) -> Iterator[None]:
        """Record the routing of everything that runs inside, for `vismoe replay` and predictor training."""
        store = self._runtime.store
        with TraceWriter(path, decoder_layers(store.inventory), model=self.name, fingerprint=store.fingerprint) as writer:
            begin = self._changes.behind(self.settings, lambda: self._scheduler.run_alone(lambda: self._record_to(writer)))
            begin.result()  # between requests, never in the middle of one
            try:
                yield
            finally:
                with contextlib.suppress(ClosedError):
                    self._scheduler.run_alone(lambda: self._record_to(None)).result()

    def _record_to(self, writer: TraceWriter | None) -> None:
        if writer is not None and self._runtime.context.recorder is not None:
            raise ConfigError("this engine records already; one trace at a time")
        self._runtime.context.record_to(writer)

    def check_integrity(self) -> None:
        """Raises AssertionError where the state of the pager, or of what requests hold, is wrong. While nothing runs."""
        self._runtime.pager.check_integrity()
        load = self.load
        assert not load.running and not load.context_tokens, f"{load.running} requests hold {load.context_tokens} tokens"
        places = self._boundary.context_tokens
        assert load.reusable_tokens <= places, f"{load.reusable_tokens} tokens are kept of {places}"
        assert load.image_cache_bytes <= self.settings.image_cache_bytes, f"{load.image_cache_bytes} bytes of images are kept"

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, and wait for those that run or wait; whether all have ended in time."""
        return self._scheduler.drain(timeout_s)

    def close(self) -> None:
        """Stop copies and close the files; may be called twice. Requests that run or wait end with ClosedError."""
        self._runtime.stop()
        self._scheduler.close()
        self._shared.prefix_cache.clear()
        if self._shared.images is not None:
            self._shared.images.remove()
        for hook in self._hooks:
            hook.remove()
        self._runtime.save_hotness()
        self._runtime.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


__all__ = ["Engine", "Load", "demo_model", "load"]
