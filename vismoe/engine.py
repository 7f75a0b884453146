"""The engine: a model with paged experts, its processor, and one thread that runs it. `load` builds it, `chat` uses it.

Owns the lifetime of everything below it; `close()` (or leaving the `with`) stops copies in flight and gives the files back.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, set_seed

from vismoe.config import ENGINE_DEFAULTS, Settings
from vismoe.errors import CheckpointError, ClosedError, ConfigError, ContextError, InputError
from vismoe.generate import Cancelled, Clock, Figures, Reply, TokenStream
from vismoe.memory.hardware import torch_device
from vismoe.memory.plan import Plan
from vismoe.models.experts import Interrupted
from vismoe.models.families import refuse_prequantized
from vismoe.models.images import open_image
from vismoe.models.loading import VisMoEConfig, runtime_of
from vismoe.models.preview import model_class, read_config, torch_dtype
from vismoe.models.prompts import Prompt, PromptBuilder
from vismoe.models.visual import pruning_of
from vismoe.simulate.trace import TraceWriter
from vismoe.vision.selection import Pruning

Messages = Sequence[dict[str, Any]]
Result = TypeVar("Result")


def demo_model() -> Path:
    """The small trained model that ships with the package."""
    here = Path(__file__).parent
    for assets in (here / "assets", here.parent / "assets"):
        if (assets / "demo-model" / "config.json").is_file():
            return assets / "demo-model"
    raise CheckpointError("the bundled demo model is missing from this installation; reinstall vismoe, or name a model")


def load(
    model: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    **settings: Any,
) -> "Engine":
    """An engine for a hub name or folder (None: the bundled demo model).

    `settings` are those of `vismoe.config.Settings`, e.g. `memory="20GiB"` or `memory="25%"`; kernels default to `auto` here.
    `device` None takes a GPU where there is one. Raises UnsupportedModelError, CheckpointError, BudgetError or ConfigError.
    """
    chosen = Settings.of(**{**ENGINE_DEFAULTS, **settings})
    name = str(model if model is not None else demo_model())
    config = read_config(name, revision=revision)
    refuse_prequantized(config)
    place = str(torch_device(device))
    try:
        loaded = model_class(config).from_pretrained(
            name,
            revision=revision or "main",
            dtype=dtype if dtype == "auto" else torch_dtype(config, dtype),
            device_map=place if place != "cpu" else None,
            quantization_config=VisMoEConfig(**vars(chosen)),
        )
    except OSError as error:
        raise CheckpointError(f"{name} could not be loaded: {error}. Fix: check that all of its files are there") from error
    return Engine(loaded.eval(), PromptBuilder.of(loaded, name, revision), name, chosen)


class Engine:
    """A loaded model. One request runs at a time; further ones queue."""

    def __init__(self, model: PreTrainedModel, prompts: PromptBuilder, name: str, settings: Settings):
        self.model, self.name, self.settings = model, name, settings
        self._prompts = prompts
        self._runtime = runtime_of(model)
        self._clock = Clock()
        usual = self._runtime.pruner.pruning if self._runtime.pruner is not None else None
        self._usual_pruning = usual or pruning_of(settings, None)
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or self._runtime.plan.context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vismoe-model")
        self._requests = itertools.count()
        self._closed = False
        self._hooks: tuple[RemovableHandle, ...] = ()
        for tower in self._prompts.vision_towers(model):
            self._hooks = (
                tower.register_forward_pre_hook(lambda *_: self._encoding(-time.perf_counter())),
                tower.register_forward_hook(lambda *_: self._encoding(time.perf_counter())),
            )

    @property
    def plan(self) -> Plan:
        return self._runtime.plan

    @property
    def processor(self) -> Any:
        """The family's processor (images and text), or its tokenizer for a text model."""
        return self._prompts.processor

    @property
    def backends(self) -> dict[str, str]:
        """What was chosen at start, and why."""
        return self._runtime.backends

    @property
    def can_prune(self) -> bool:
        """Whether `keep` below 1 works with this model; `backends["visual tokens"]` says why not."""
        return self._runtime.pruner is not None

    @property
    def metrics(self) -> Any:
        return self._runtime.pager.metrics

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int = 256,
        sample: bool = False,
        seed: int | None = None,
        image_tokens: tuple[int, int] | None = None,
        keep: float | None = None,
        selection: str | None = None,
    ) -> Reply:
        """Answer a conversation; iterate the Reply for pieces of text.

        messages: `[{"role", "content"}]`, content a string or parts `{"type": "text", "text"}` and `{"type": "image", "image"}`
        with a path, bytes, data URI or PIL image. Decoding is greedy unless `sample`, which takes the model's generation config.
        image_tokens: least and most visual tokens per image. keep: share of the visual tokens that deeper layers see, and
        selection: which ones, both as loaded unless given; they hold for all images of the conversation.
        Raises InputError or ContextError before anything runs.
        """
        if self._closed:
            raise ClosedError("the engine is closed; load the model again to go on")
        if max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens}: an answer has at least one token")
        pruning = self._pruning(keep, selection)
        prompt = self._prompts.build(messages, open_image, image_tokens)
        longest, whose, more = self._longest(prompt, pruning)
        if prompt.tokens >= longest:
            raise ContextError(
                f"the conversation has {prompt.tokens} tokens ({prompt.visual_tokens} of them visual), the {whose} {longest}. "
                f"Fix: {more}use smaller images (--image-tokens), or start anew"
            )
        reply = Reply()
        options: dict[str, Any] = {"max_new_tokens": min(max_tokens, longest - prompt.tokens), "do_sample": sample}
        if not sample:
            options |= {"temperature": None, "top_p": None, "top_k": None}
        self._on_model_thread(self._answer, reply, prompt, options, seed, pruning if prompt.images else None)
        return reply

    def _longest(self, prompt: Prompt, pruning: Pruning | None) -> tuple[int, str, str]:
        """(tokens that prompt and answer can have, whose limit that is, the first thing to do about it)."""
        window = self._runtime.pruner.most_tokens if self._runtime.pruner and pruning and prompt.images else None
        limits = [
            (self._positions, "model's own limit is", ""),
            (self.plan.context, "planned context is", f"load with context={2 * prompt.tokens} (--context), "),
        ]
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
            try:
                return task(self.model)
            finally:
                self._runtime.pager.end_request()

        return self._on_model_thread(alone).result()

    def _on_model_thread(self, task: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        try:
            return self._thread.submit(task, *arguments)
        except RuntimeError as error:  # closed since
            raise ClosedError("the engine is closed; load the model again to go on") from error

    def _answer(self, reply: Reply, prompt: Prompt, options: dict[str, Any], seed: int | None, pruning: Pruning | None) -> None:
        """On the model thread: generate, and settle the reply whatever happens."""
        try:
            reply.end(self._generate(reply, prompt, options, seed, pruning))
        except BaseException as error:  # the request's boundary: whoever iterates the reply gets it
            reply.end(error=error)
        finally:
            self._runtime.pager.end_request()

    def _generate(
        self, reply: Reply, prompt: Prompt, options: dict[str, Any], seed: int | None, pruning: Pruning | None
    ) -> Figures:
        self._clock = clock = Clock(began_s=time.perf_counter())
        if isinstance(self._runtime.recorder, TraceWriter):
            self._runtime.recorder.request(str(next(self._requests)))
        if seed is not None:
            set_seed(seed)
        pruner = self._runtime.pruner
        if pruner is not None:
            pruner.begin_request()
            pruner.pruning = pruning
        before = self.metrics.snapshot()
        stream = TokenStream(self._prompts.tokenizer, clock, reply.emit)
        inputs, criteria = prompt.inputs.to(self.model.device), [Cancelled(reply.flag)]
        self._runtime.cancelled = reply.flag.is_set
        try:
            with torch.inference_mode(), contextlib.suppress(Interrupted):
                self.model.generate(**inputs, **options, streamer=stream, stopping_criteria=criteria)
        finally:
            self._runtime.cancelled = lambda: False
            if pruner is not None:
                pruner.pruning = self._usual_pruning
        self._runtime.pager.end_request()
        if not clock.tokens:  # cancelled before the first token
            clock.first_token_s = clock.last_token_s = time.perf_counter()
        prefill_s = clock.first_token_s - clock.began_s - clock.encode_s
        return Figures(
            answer=reply.text,
            plan=self.plan,
            images=prompt.images,
            encode_seconds=clock.encode_s,
            prompt_tokens=prompt.tokens,
            visual_tokens=prompt.visual_tokens,
            prefill_seconds=prefill_s,
            decode_tokens=max(0, clock.tokens - 1),
            decode_seconds=clock.last_token_s - clock.first_token_s,
            cancelled=reply.flag.is_set(),
            capacity={
                "slabs": self.plan.resident_experts,
                "experts": self.plan.total_experts,
                "bytes": sum(table.pool.capacity * table.pool.layout.record_bytes for table in self._runtime.pager.tables),
            },
            backends=self.backends,
            counters=self.metrics.snapshot() - before,
            pruning=pruning,
            kept=tuple(pruner.kept) if pruner is not None and pruning is not None else (),
            pictures=prompt.pictures,
        )

    def _encoding(self, signed_s: float) -> None:
        self._clock.encode_s += signed_s

    @contextlib.contextmanager
    def record(self, path: str | Path) -> Iterator[None]:
        """Record the routing of everything that runs inside, for `vismoe replay` and predictor training."""
        store = self._runtime.store
        with TraceWriter(path, store.inventory, model=self.name, fingerprint=store.fingerprint) as writer:
            self._on_model_thread(self._record_to, writer).result()  # between requests, never in the middle of one
            try:
                yield
            finally:
                with contextlib.suppress(ClosedError):
                    self._on_model_thread(self._record_to, None).result()

    def _record_to(self, writer: TraceWriter | None) -> None:
        if writer is not None and self._runtime.recorder is not None:
            raise ConfigError("this engine records already; one trace at a time")
        self._runtime.recorder = writer

    def close(self) -> None:
        """Stop copies and close the files; may be called twice. A request that runs ends with ClosedError."""
        self._closed = True
        self._runtime.pager.close()
        self._thread.shutdown(wait=True)
        self._runtime.foresight.close()
        for hook in self._hooks:
            hook.remove()
        self._runtime.store.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


__all__ = ["Engine", "demo_model", "load"]
