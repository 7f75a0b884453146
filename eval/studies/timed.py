"""Timed runs of the real engine: the same requests under several settings that take turns within one process.

Every turn loads the model anew, sends one request that is not counted, and then the counted ones; the results of a variant are
medians over its turns. With an emulated link, bytes are those over the link; otherwise those from the disk.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from vismoe.bench.checkpoint import Written, write_checkpoint
from vismoe.bench.geometry import geometry_config, model_class_of
from vismoe.bench.turns import KeptTurns
from vismoe.engine.engine import load
from vismoe.eval.accuracy import figures_of
from vismoe.metrics import Snapshot
from vismoe.models.load.quantizer import VisMoEConfig
from vismoe.models.load.runtime import Runtime, runtime_of
from vismoe.predictor_training.prompts import CalibrationPrompt, scene_prompts
from vismoe.trace.files import TraceWriter
from vismoe.types import Phase

GEOMETRY, SKEW = "qwen3-vl-30b-a3b", 1.0  # of generated checkpoints


@dataclass(frozen=True)
class Run:
    """All counted requests of one turn together."""

    prefill_s: float  # until the first tokens, without the encoding of pictures
    decode_s: float
    decode_tokens: int
    counters: Snapshot

    def figures(self) -> dict[str, float]:
        total, found = self.counters.total, {"prefill_s": self.prefill_s, "decode_s": self.decode_s}
        moved = "bytes_copied" if total("bytes_copied") else "bytes_read"
        for phase in (Phase.PREFILL, Phase.DECODE):
            found[f"{phase}_bytes"] = total(moved, phase)
            found[f"{phase}_hit_rate"] = self.counters.hit_rate(phase) or 0.0
        return found


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each number; `seconds` is that of prefill and decode together."""
    each = [run.figures() | {"seconds": run.prefill_s + run.decode_s} for run in runs]
    return {name: median(figures[name] for figures in each) for name in each[0]}


def take_turns(variants: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Runs every variant once per round, in an order that is reversed every other round; shows progress on stderr."""
    return KeptTurns().take({name: (None, turn) for name, turn in variants.items()}, rounds)


# -- the bundled model, asked about scenes
def held_out(count: int, world: str = "demo") -> list[CalibrationPrompt]:
    """Questions of every kind about scenes that were not used in training."""
    return [prompt for prompt in scene_prompts(0, count, world=world) if prompt.group == "held-out"][:count]


def ask_scenes(
    settings: Mapping[str, Any],
    prompts: Sequence[CalibrationPrompt],
    max_tokens: int,
    model: str | None = None,
    trace: Path | None = None,
) -> Run:
    """One turn of an engine with these settings; with `trace` it also records the routing, which costs time."""
    with load(model, **settings) as engine:
        figures_of(engine, prompts[0].messages(), max_tokens)
        before = engine.metrics.snapshot()
        with engine.record(trace) if trace is not None else nullcontext():
            figures = [figures_of(engine, prompt.messages(), max_tokens) for prompt in prompts]
        return Run(
            sum(f.prefill_seconds for f in figures),
            sum(f.decode_seconds for f in figures),
            sum(f.decode_tokens for f in figures),
            engine.metrics.snapshot() - before,
        )


# -- a generated checkpoint without a tokenizer: random pictures between random tokens
def generated_checkpoint(folder: Path, layers: int, vocabulary: int, vision_depth: int, **text_sizes: int) -> Written:
    """Qwen3-VL-30B-A3B with random weights and other sizes, without tokens that end an answer; the special ones come last."""
    config = geometry_config(GEOMETRY, layers)
    text, vision = config.text_config, config.vision_config
    text.bos_token_id = text.eos_token_id = None
    for name, size in {**text_sizes, "vocab_size": vocabulary}.items():
        setattr(text, name, size)
    vision.depth, vision.deepstack_visual_indexes, vision.out_hidden_size = vision_depth, [vision_depth - 1], text.hidden_size
    config.image_token_id, config.video_token_id = vocabulary - 4, vocabulary - 3
    config.vision_start_token_id, config.vision_end_token_id = vocabulary - 2, vocabulary - 1
    return write_checkpoint(config, model_class_of(GEOMETRY), folder, skew=SKEW)


@dataclass(frozen=True)
class TokenRequests:
    """`count` requests with one square picture of `side` pixels and `text_tokens` of text, answered by `new_tokens` tokens."""

    count: int = 2
    side: int = 512
    text_tokens: int = 48
    new_tokens: int = 32

    def inputs(self, config: Any) -> list[dict[str, torch.Tensor]]:
        """Inputs for a Qwen3-VL-MoE configuration; equal for equal fields."""
        vision, random = config.vision_config, torch.Generator().manual_seed(0)
        patches = self.side // vision.patch_size
        grid = torch.tensor([[1, patches, patches]])
        features = 3 * vision.temporal_patch_size * vision.patch_size**2
        visual = patches**2 // vision.spatial_merge_size**2
        ordinary = min(config.image_token_id, config.vision_start_token_id)
        requests = []
        for _ in range(self.count):
            text = torch.randint(0, ordinary, (self.text_tokens,), generator=random)
            picture = [config.vision_start_token_id, *[config.image_token_id] * visual, config.vision_end_token_id]
            ids = torch.cat([text[:8], torch.tensor(picture), text[8:]])[None]
            pixels = torch.randn(patches**2, features, generator=random)
            kinds = (ids == config.image_token_id).int()
            requests.append(dict(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds))
        return requests


class _Clock:
    """A streamer that records the times of the prompt and of tokens."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...


def ask_tokens(folder: Path, settings: Mapping[str, Any], requests: TokenRequests, trace: Path | None = None) -> Run:
    """One turn of a plain transformers model with these settings. Prefill includes the vision tower."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", quantization_config=VisMoEConfig(**settings)).eval()
    runtime = runtime_of(model)
    try:
        inputs = requests.inputs(model.config)
        generated(model, inputs[0], 2)
        before = runtime.pager.metrics.snapshot()
        store = runtime.store
        writer = trace and TraceWriter(trace, store.inventory, fingerprint=store.fingerprint)
        with recording(runtime, writer) if writer else nullcontext():
            times = [generated(model, each, requests.new_tokens) for each in inputs]
        prefill_s, decode_s = (sum(part) for part in zip(*times, strict=True))
        tokens = requests.count * (requests.new_tokens - 1)
        return Run(prefill_s, decode_s, tokens, runtime.pager.metrics.snapshot() - before)
    finally:
        runtime.pager.close()
        runtime.store.close()


@contextmanager
def recording(runtime: Runtime, trace: TraceWriter) -> Iterator[TraceWriter]:
    """Within it, the trace gets the routing of a model that nothing else uses."""
    with trace:
        runtime.context.record_to(trace)
        try:
            yield trace
        finally:
            runtime.context.record_to(None)


def generated(model: Any, inputs: Mapping[str, torch.Tensor], new_tokens: int) -> tuple[float, float]:
    """(seconds until the first token, seconds of the other tokens)."""
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            **inputs, streamer=clock, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
    asked_s, first_s, *_, last_s = clock.times_s
    runtime_of(model).pager.end_request()
    return first_s - asked_s, last_s - first_s
