"""The figures of one answer: what it took, and where the time and the bytes went. Frozen, and complete when the answer is."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from PIL import Image

from vismoe.config import Settings
from vismoe.metrics import Snapshot
from vismoe.models.inputs.tools import ToolCall
from vismoe.planning.plan import Plan
from vismoe.types import Phase
from vismoe.vision.overlay import kept_map
from vismoe.vision.selection import KeptImage, Pruning

# The model's own end or a stop string; as long as it may be; cancelled by its reader.
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class PassFigures:
    """One forward pass of a request; one with new images encodes them too. Copies that end between two passes count later."""

    phase: Phase
    began_s: float  # since the request began
    seconds: float
    tokens: int  # that went through the model
    stall_seconds: float
    hits: int
    misses: int
    bytes_read: int
    bytes_copied: int
    rows: int = 1  # requests that shared it; counters are this one's share
    streamed: bool = False  # experts passed through a ring beside a fixed set (paging/streaming.py), in some layers at least


@dataclass(frozen=True)
class DraftFigures:
    """What drafting came to in one answer. A round drafts tokens and verifies them in one pass; other passes had none."""

    rounds: int
    drafted: int  # tokens, in all rounds
    accepted: int  # of these: the model said the same
    promised: int  # experts that drafts have routed to, each once per round
    foreseen: int  # of these, what verification demanded
    draft_seconds: float
    verify_seconds: float
    lengths: dict[str, list[int]] = field(default_factory=dict)  # by what drafted: how many rounds drafted 1, 2, ... tokens


@dataclass(frozen=True)
class Figures:
    """What one answer took. Seconds are wall time; encode, prefill and decode do not overlap."""

    answer: str
    finish: Finish
    plan: Plan
    images: int
    encode_seconds: float
    prompt_tokens: int
    visual_tokens: int
    prefill_seconds: float
    decode_tokens: int  # of the answer but for the first, which comes out of prefill
    decode_seconds: float
    capacity: dict[str, int]  # of prefix and pools: slabs, bytes
    backends: dict[str, str]  # what was chosen at start, and why
    counters: Snapshot
    pruning: Pruning | None = None  # how visual tokens were dropped; None: they were not
    kept: tuple[KeptImage, ...] = ()  # what was kept of each image; empty where nothing was dropped
    pictures: tuple[Image.Image, ...] = ()  # the images of the conversation, upright
    answer_tokens: int = 0  # generated, the one that ends the answer included
    reasoning_tokens: int = 0  # that the text of its reasoning has; marks around it are none
    reused_tokens: int = 0  # of the prompt, whose keys and values were there from an earlier request
    encoded_images: int = 0  # that went through the vision tower; others came with the reused tokens or were kept encoded
    queue_seconds: float = 0.0  # from the request's arrival to its beginning
    passes: tuple[PassFigures, ...] = ()
    formats: dict[str, float] = field(default_factory=dict)  # share of its expert computations in each, `skip` among them
    precision: "PrecisionInfo | None" = None  # what chose them; None: exact, all experts are in one format
    drafts: DraftFigures | None = None  # None: nothing was to draft
    stopped_by: str | None = None  # the stop string that ended it
    reasoning: str = ""  # before the answer
    tool_calls: tuple[ToolCall, ...] = ()
    grammar_seconds: float | None = None  # that following its schema or grammar took, within decode; None: it had none

    @property
    def cancelled(self) -> bool:
        return self.finish == "cancelled"

    @property
    def kept_visual_tokens(self) -> int:
        return self.visual_tokens - sum(image.tokens - len(image.selection.kept) for image in self.kept)

    def kept_maps(self) -> list[Image.Image]:
        """The images with what was dropped greyed out; empty where nothing was, or where a token has no place in an image."""
        maps = [kept_map(*pair) for pair in zip(self.pictures, self.kept, strict=False)]
        found = [each for each in maps if each is not None]
        return found if len(found) == len(self.pictures) else []

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The object that `vismoe chat --json` prints."""
        cache = self.counters.to_json()
        rates = {"hit_rate": self.counters.hit_rate(), "decode_hit_rate": self.counters.hit_rate(Phase.DECODE)}
        return {
            "answer": self.answer,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": [call.function for call in self.tool_calls]} if self.tool_calls else {}),
            "finish": self.finish,
            "cancelled": self.cancelled,
            "plan": self.plan.to_json(),
            "backends": self.backends,
            "queue": {"seconds": self.queue_seconds},
            "encode": {"images": self.images, "encoded": self.encoded_images, "seconds": self.encode_seconds},
            "prefill": {
                "tokens": self.prompt_tokens,
                "reused_tokens": self.reused_tokens,
                "visual_tokens": self.visual_tokens,
                "kept_visual_tokens": self.kept_visual_tokens,
                "pruning": self._pruning_to_json(),
                "seconds": self.prefill_seconds,
            },
            "decode": {
                "tokens": self.decode_tokens,
                "answer_tokens": self.answer_tokens,
                "reasoning_tokens": self.reasoning_tokens,
                "seconds": self.decode_seconds,
            },
            "grammar": {"seconds": self.grammar_seconds} if self.grammar_seconds is not None else None,
            "cache": {"capacity": self.capacity, **rates, **cache},
            "formats": self.formats,
            "precision": asdict(self.precision) if self.precision is not None else None,
            "drafts": asdict(self.drafts) if self.drafts is not None else None,
            "passes": [asdict(one) for one in self.passes],
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


@dataclass(frozen=True)
class PrecisionInfo:
    """The policy that chooses formats while the model runs, and between which."""

    policy: str
    formats: str  # the pair, e.g. int4/int2
    retention: float  # of importance

    @classmethod
    def of(cls, settings: Settings) -> "PrecisionInfo | None":
        """None: exact, experts are in one format."""
        pair = settings.pair
        return None if pair is None else cls(settings.policy, str(pair), settings.retention)


@dataclass
class Clock:
    """Times of one request, and its forward passes; the vision tower's share is measured by hooks."""

    asked_s: float = field(default_factory=time.perf_counter)
    began_s: float = 0.0
    encode_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens: int = 0
    passes: list[PassFigures] = field(default_factory=list)

    def token(self) -> None:
        """A token of the answer is there."""
        self.last_token_s = time.perf_counter()
        self.tokens += 1
        self.first_token_s = self.first_token_s or self.last_token_s

    def passed(
        self, phase: Phase, tokens: int, pass_began_s: float, counters: Snapshot, rows: int = 1, streamed: bool = False
    ) -> None:
        """A forward pass is over; `counters` of what happened in it, this request's share where it was one of several `rows`."""
        began_s, seconds, stall_s = (
            pass_began_s - self.began_s,
            time.perf_counter() - pass_began_s,
            counters.total("stall_seconds"),
        )
        counted = {name: int(counters.total(name)) for name in ("hits", "misses", "bytes_read", "bytes_copied")}
        self.passes.append(PassFigures(phase, began_s, seconds, tokens, stall_s, rows=rows, streamed=streamed, **counted))
