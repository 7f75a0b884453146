"""How each contestant on transformers loads a model and answers one prompt, with the times of encode, prefill and decode.

All share one loop: `generate()` with a streamer that records times, so that only the compared parts differ. This module runs in a
worker. llama.cpp has its own file, which imports neither torch nor transformers.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from vismoe.bench.job import LOGITS, OURS, WARM, BenchRequest, Job, ParallelAnswers, TokenTime
from vismoe.bench.process import difference, disk_bytes
from vismoe.bench.prompt import model_inputs
from vismoe.bench.token_time import token_timer
from vismoe.config import ENGINE_DEFAULTS, Settings
from vismoe.engine.drafting import Drafter, Drafts
from vismoe.engine.generate import TokenLoop
from vismoe.engine.shared_pass import SharedPasses
from vismoe.machine.hardware import host_memory
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.inputs.prompts import VISION_TOWERS
from vismoe.models.load.gguf import GgufWeights, load_gguf
from vismoe.models.load.preview import model_class, read_config, torch_dtype
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import runtime_of
from vismoe.timeline import PHASE, Timeline


@dataclass
class Stamps:
    """A streamer for generate(): records when tokens arrive, and the bytes read until the first one."""

    token_ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    first_disk_bytes: int | None = None
    _prompt_seen: bool = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrived_s.append(time.perf_counter())
            if not self.token_ids:
                self.first_disk_bytes = disk_bytes()
            self.token_ids += value.flatten().tolist()
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersRunner:
    """A model of transformers, with or without VisMoE."""

    def __init__(self, job: Job, model: Any, notes: dict[str, Any]):
        self.model, self.notes, self._job = model.eval(), notes, job
        self.logits: tuple[float, ...] = ()  # of the first new token, at most LOGITS of them; empty before the first request
        self._inputs = {name: value.to(job.device) for name, value in model_inputs(model, job.token_ids, job.picture).items()}
        model.generation_config = GenerationConfig(  # exactly this number: no token ends the answer early
            do_sample=False, min_new_tokens=job.new_tokens, max_new_tokens=job.new_tokens, pad_token_id=0
        )
        self._encode_s = self.began_s = 0.0
        self._at_logits: Callable[[], None] = lambda: None
        tower = next((module for path, module in model.named_modules() if path.rpartition(".")[2] in VISION_TOWERS), None)
        if tower is not None:
            tower.register_forward_pre_hook(lambda *_: self._encoding(-time.perf_counter()))
            tower.register_forward_hook(lambda *_: self._encoding(time.perf_counter()))

    def _encoding(self, signed_s: float) -> None:
        if self._job.device != "cpu":
            torch.cuda.synchronize()
        self._encode_s += signed_s

    def request(self, state: str, tokens: int | None = None) -> BenchRequest:
        """Answers the job's prompt, or so many of its first `tokens` (of a prompt without a picture), with `new_tokens` greedy
        tokens."""
        stamps, self._encode_s = Stamps(), 0.0
        inputs = self._inputs if tokens is None else {name: value[:, :tokens] for name, value in self._inputs.items()}
        ids = inputs["input_ids"][0]
        disk, self.began_s = disk_bytes(), time.perf_counter()
        with torch.inference_mode(), self._looking():
            self._answer(inputs, stamps)
        if self._job.device != "cpu":
            self.notes["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        first_s, last_s = stamps.arrived_s[0], stamps.arrived_s[-1]
        return BenchRequest(
            state=state,
            encode_s=self._encode_s,
            prefill_s=first_s - self.began_s - self._encode_s,
            prompt_tokens=len(ids),
            visual_tokens=int((ids == self.model.config.image_token_id).sum()) if self._job.picture else 0,
            decode_s=last_s - first_s,
            decode_tokens=len(stamps.token_ids) - 1,
            token_ids=tuple(stamps.token_ids),
            prefill_disk_bytes=difference(stamps.first_disk_bytes, disk),
            decode_disk_bytes=difference(disk_bytes(), stamps.first_disk_bytes),
            token_s=tuple(later - earlier for earlier, later in itertools.pairwise(stamps.arrived_s)),
        )

    def _answer(self, inputs: dict[str, Any], stamps: Stamps) -> None:
        self.model.generate(**inputs, streamer=stamps)

    def parallel(self, rows: int) -> ParallelAnswers:
        """So many prompts in a batch of generate()."""
        stamps, ids = Stamps(), torch.tensor(self._job.prompts[:rows], device=self._job.device)
        with torch.inference_mode():
            self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=stamps)
        read = difference(disk_bytes(), stamps.first_disk_bytes)
        return ParallelAnswers(rows, len(stamps.token_ids) - rows, stamps.arrived_s[-1] - stamps.arrived_s[0], read)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Keeps some of the logits of the first pass, which reads the whole prompt. A logits processor would be in the way of
        every token: transformers reads its signature each time, which took 0.5 ms (Zen 4)."""

        def look(model: Any, args: Any, output: Any) -> None:
            watch.remove()
            self._at_logits()
            logits = output.logits[0, -1]
            self.logits = self.logits or tuple(logits[:: -(-len(logits) // LOGITS)].float().tolist())

        watch = self.model.register_forward_hook(look)
        try:
            yield
        finally:
            watch.remove()

    def moe_s(self) -> dict[str, float]:
        """Seconds in the routed experts of all MoE layers during one more request, by phase, without the router."""
        spans: list[tuple[int, float]] = []  # (tokens, time) of entering and leaving, alternating

        def note(module: Any, args: tuple[Any, ...], *output: Any) -> None:
            spans.append((len(args[0]), time.perf_counter()))

        hooks = []
        for path, module in expert_modules(self.model):
            if not is_vision(path):
                hooks += [module.register_forward_pre_hook(note), module.register_forward_hook(note)]
        self.request(WARM)
        for hook in hooks:
            hook.remove()
        found = {"prefill": 0.0, "decode": 0.0}
        for (tokens, entered_s), (_, left_s) in zip(spans[::2], spans[1::2], strict=True):
            found["decode" if tokens == 1 else "prefill"] += left_s - entered_s
        return found


class VisMoERunner(TransformersRunner):
    """VisMoE: the same loop, or one of rounds where something drafts, with the pager's counters, and optionally a timeline."""

    @functools.cached_property
    def _drafts(self) -> Drafts:
        runtime = runtime_of(self.model)
        return Drafts(self.model, runtime, runtime.configuration.settings, ())

    def _answer(self, inputs: dict[str, Any], stamps: Stamps) -> None:
        runtime, tokens = runtime_of(self.model), self._job.new_tokens
        kind = runtime.configuration.settings.draft
        if kind == "none":
            return super()._answer(inputs, stamps)
        loop = TokenLoop(self.model, inputs, {})
        drafter, before = Drafter(self._drafts, kind), runtime.metrics.snapshot()
        stamps.put(loop.ids)
        with runtime.context.reading_prompt():
            stamps.put(torch.tensor(loop.step()[0]))
        drafter.passed(0, loop.ids.shape[1] - 1, self._drafts.take_hidden())
        loop.reserve(loop.ids.shape[1] + tokens)
        while (left := tokens - len(stamps.token_ids)) > 0:
            drafted = drafter.draft(loop, left - 1, frozenset())
            verified = drafter.verify(loop, drafted)
            while verified.goes_on:
                stamps.put(torch.tensor(verified.take()[0]))
            drafter.ended()
        figures = drafter.figures(runtime.metrics.snapshot() - before)
        self.notes["drafts"] = dataclasses.asdict(figures) if figures is not None else None

    def request(self, state: str, tokens: int | None = None) -> BenchRequest:
        pager = runtime_of(self.model).pager
        before = pager.metrics.snapshot()
        request = super().request(state, tokens)
        pager.end_request()
        return dataclasses.replace(request, counters=(pager.metrics.snapshot() - before).to_json()["per_phase"])

    @torch.inference_mode()
    def parallel(self, rows: int) -> ParallelAnswers:
        """So many sequences in shared passes, and after that by turns."""
        steps, context = self._job.new_tokens - 1, runtime_of(self.model).context
        longest = 2 * self._job.new_tokens
        loops = []
        for prompt in self._job.prompts[:rows]:
            ids = torch.tensor([prompt], device=self._job.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            loops.append(TokenLoop(self.model, inputs, {"max_new_tokens": longest, "min_new_tokens": longest}))
            with context.reading_prompt():
                loops[-1].step()
            loops[-1].reserve(len(prompt) + longest)
        passes = SharedPasses(self.model, max(2, rows), exactly=False)
        passes.tried(loops, [loop.inputs() for loop in loops], frozenset())
        metrics = runtime_of(self.model).pager.metrics
        before, disk, began_s = metrics.snapshot(), disk_bytes(), time.perf_counter()
        for _ in range(steps):
            outputs, _ = passes.run(loops, [loop.inputs() for loop in loops], frozenset())
            for loop, output in zip(loops, outputs, strict=True):
                loop.take(output)
        turned_s, read, counted = time.perf_counter(), difference(disk_bytes(), disk), metrics.snapshot() - before
        for _ in range(steps):
            for loop in loops:
                loop.step()
        by_turns_s = time.perf_counter() - turned_s
        streamed = counted.total("streamed") / max(1.0, counted.total("steps"))
        return ParallelAnswers(rows, steps * rows, turned_s - began_s, read, by_turns_s, streamed)

    def token_time(self) -> TokenTime:
        """The parts of decoding, in one more request."""
        with token_timer(self.model) as timer:
            self._at_logits = timer.begin  # with those of the prompt decoding begins
            request = self.request(WARM)
        return timer.result(request.decode_tokens, request.decode_s)

    def trace(self, path: str) -> None:
        """Write the timeline of a further request."""
        pager = runtime_of(self.model).pager
        pager.timeline = timeline = Timeline()
        request = self.request(WARM)
        pager.timeline = None
        first_s = self.began_s + request.encode_s + request.prefill_s
        timeline.span(PHASE, "prefill", self.began_s, first_s, tokens=request.prompt_tokens, encode_s=request.encode_s)
        timeline.span(PHASE, "decode", first_s, first_s + request.decode_s, tokens=request.decode_tokens)
        timeline.write(path)


def _loaded(job: Job, **options: Any) -> Any:
    config = read_config(job.model, revision=job.revision)
    return model_class(config).from_pretrained(
        job.model, revision=job.revision or "main", dtype=torch_dtype(config, job.dtype), **options
    )


def load_vismoe(job: Job) -> VisMoERunner:
    """VisMoE, with the settings of the job."""
    settings = Settings.of(**{**ENGINE_DEFAULTS, **job.settings})
    options = dict(
        device_map=job.device if job.device != "cpu" else None, quantization_config=VisMoEConfig(**dataclasses.asdict(settings))
    )
    if settings.gguf is None:
        model = _loaded(job, **options)
    else:
        config = read_config(job.model, revision=job.revision)
        weights = GgufWeights(job.model, config, settings, [])
        model = load_gguf(weights, model_class(config), torch_dtype(config, job.dtype), job.revision, **options)
    runtime = runtime_of(model)
    notes = {"backends": runtime.backends, "plan": runtime.plan.to_json(), "settings": job.settings}
    return VisMoERunner(job, model, notes)


def load_transformers(job: Job, experts: str | None = None) -> TransformersRunner:
    """All weights on the device. `experts` None leaves the implementation to transformers."""
    options = {} if experts is None else {"experts_implementation": experts}
    place = job.device if job.device != "cpu" else None
    return _transformers_runner(job, _loaded(job, device_map=place, **options))


def load_compiled(job: Job) -> TransformersRunner:
    """The same with a static cache, for which transformers compiles the model's decode passes on a GPU."""
    runner = load_transformers(job)
    runner.model.generation_config.cache_implementation = "static"
    return runner


def load_accelerate(job: Job) -> TransformersRunner:
    """As many weights in memory as VisMoE's plan has, the rest in `offload_folder`; beside a GPU, free RAM comes in between."""
    place = torch.device(job.device)
    memory = {"cpu": job.held_bytes} if place.type == "cpu" else {place.index or 0: job.held_bytes, "cpu": host_memory()[0]}
    model = _loaded(job, device_map="auto", max_memory=memory, offload_folder=job.offload_folder)
    runner = _transformers_runner(job, model)
    places = list(map(str, getattr(model, "hf_device_map", {"": job.device}).values()))
    runner.notes |= {"max_memory": {str(name): nbytes for name, nbytes in memory.items()}}
    runner.notes |= {"modules": {where: places.count(where) for where in sorted(set(places))}}
    return runner


def _transformers_runner(job: Job, model: Any) -> TransformersRunner:
    config = model.config.get_text_config()
    return TransformersRunner(job, model, {"experts": config._experts_implementation, "attention": config._attn_implementation})


LOADERS: dict[str, Callable[[Job], TransformersRunner]] = {
    OURS: load_vismoe,
    "transformers": load_transformers,
    "transformers-eager": functools.partial(load_transformers, experts="eager"),
    "transformers-compiled": load_compiled,
    "accelerate": load_accelerate,
}
