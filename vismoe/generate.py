"""One answer: an iterator of text pieces that can be cancelled within a token, and the figures of how it was made.

Generation is transformers' own `generate()`, run on the engine's single model thread, so requests queue and never interleave.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers import StoppingCriteria
from transformers.generation.streamers import TextStreamer

from vismoe.memory.plan import Plan
from vismoe.metrics import Snapshot
from vismoe.models.prune import KeptImage
from vismoe.types import Phase
from vismoe.vision.overlay import kept_overlay
from vismoe.vision.selection import Pruning


@dataclass(frozen=True)
class Figures:
    """What one answer took. Seconds are wall time; encode, prefill and decode do not overlap."""

    answer: str
    plan: Plan
    images: int
    encode_seconds: float
    prompt_tokens: int
    visual_tokens: int
    prefill_seconds: float
    decode_tokens: int  # forward passes after prefill; the first token of the answer comes out of prefill
    decode_seconds: float
    cancelled: bool
    capacity: dict[str, int]  # of prefix and pools: slabs, bytes
    backends: dict[str, str]  # what was chosen at start, and why
    counters: Snapshot
    pruning: Pruning | None = None  # how visual tokens were dropped; None: they were not
    kept: tuple[KeptImage, ...] = ()  # what was kept of each image; empty where nothing was dropped
    pictures: tuple[Image.Image, ...] = ()  # the images of the conversation, upright

    @property
    def kept_visual_tokens(self) -> int:
        return self.visual_tokens - sum(image.tokens - len(image.selection.kept) for image in self.kept)

    def kept_maps(self) -> list[Image.Image]:
        """The images with what was dropped greyed out; empty where nothing was, or where a token has no place in an image."""
        grids = [image.grid for image in self.kept]
        if len(grids) != len(self.pictures) or None in grids:
            return []
        return [
            kept_overlay(picture, grid, image.selection.kept)
            for picture, grid, image in zip(self.pictures, grids, self.kept, strict=True)
            if grid is not None
        ]

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The object that `vismoe chat --json` prints."""
        cache = self.counters.to_json()
        rates = {"hit_rate": self.counters.hit_rate(), "decode_hit_rate": self.counters.hit_rate(Phase.DECODE)}
        return {
            "answer": self.answer,
            "cancelled": self.cancelled,
            "plan": self.plan.to_json(),
            "backends": self.backends,
            "encode": {"images": self.images, "seconds": self.encode_seconds},
            "prefill": {
                "tokens": self.prompt_tokens,
                "visual_tokens": self.visual_tokens,
                "kept_visual_tokens": self.kept_visual_tokens,
                "pruning": self._pruning_to_json(),
                "seconds": self.prefill_seconds,
            },
            "decode": {"tokens": self.decode_tokens, "seconds": self.decode_seconds},
            "cache": {"capacity": self.capacity, **rates, **cache},
        }

    def _pruning_to_json(self) -> dict[str, Any] | None:
        if self.pruning is None:
            return None
        images = [
            {
                "tokens": image.tokens,
                "kept": len(image.selection.kept),
                "coverage": image.selection.coverage,
                "mean_expansion": image.selection.mean_expansion,
                "kept_expansion": image.selection.kept_expansion,
            }
            for image in self.kept
        ]
        return {**asdict(self.pruning), "images": images}


@dataclass
class Clock:
    """Times of one request: the vision tower's share is measured by hooks, the rest by the tokens' arrival."""

    began_s: float = 0.0
    encode_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens: int = 0


class TokenStream(TextStreamer):
    """Turns generated ids into printable pieces; holds back what may still change (half a character, half a word)."""

    def __init__(self, tokenizer: Any, clock: Clock, emit: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._clock, self._emit, self._prompt_seen = clock, emit, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._clock.last_token_s = time.perf_counter()
            self._clock.tokens += value.numel()
            if not self._clock.first_token_s:
                self._clock.first_token_s = self._clock.last_token_s
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._emit(text)


class Cancelled(StoppingCriteria):
    """Stops generation after the token under way."""

    def __init__(self, flag: threading.Event):
        self._flag = flag

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._flag.is_set(), dtype=torch.bool, device=input_ids.device)


@dataclass
class Reply:
    """Iterate it for pieces of text; then `answer` and `figures` are there. An error of the request is raised while iterating."""

    answer: str = ""  # what was iterated so far
    _figures: Figures | None = None
    _error: BaseException | None = None
    _ended: bool = False
    _pieces: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    flag: threading.Event = field(default_factory=threading.Event)  # set: stop
    text: str = ""  # what was generated so far

    def __iter__(self) -> Iterator[str]:
        while not self._ended:
            piece = self._pieces.get()
            if isinstance(piece, str):
                self.answer += piece
                yield piece
            else:
                self._ended = True
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop within a token; what was said so far stays. From any thread, also from a signal handler."""
        self.flag.set()

    @property
    def figures(self) -> Figures:
        if self._figures is None:
            raise RuntimeError("figures are there once a reply was iterated to its end; a failed one has none") from self._error
        return self._figures

    # -- the model thread's side
    def emit(self, piece: str) -> None:
        self.text += piece
        self._pieces.put(piece)

    def end(self, figures: Figures | None = None, error: BaseException | None = None) -> None:
        self._figures = figures
        self._error = error
        self._pieces.put(None)
