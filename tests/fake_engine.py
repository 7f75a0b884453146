"""An engine without a model: it answers by a script, so that the command line and the page can be tested in milliseconds.

Its plan, figures and selections are the real ones' types, so that they cannot drift apart.
"""

import contextlib
import dataclasses
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vismoe.config import Settings
from vismoe.engine.stats import Figures, PassFigures, PrecisionInfo
from vismoe.errors import BudgetError
from vismoe.metrics import Metrics
from vismoe.models.inputs.responses import Reasoning
from vismoe.options import RequestOptions
from vismoe.planning.needs import Hardware
from vismoe.planning.parts import PlanPart
from vismoe.planning.plan import Plan
from vismoe.types import Phase
from vismoe.vision.selection import KeptImage, Pruning, Selection

LAYERS, EXPERTS = 2, 4
SIDE = 4  # visual tokens of an image, down and across
PROMPT_TOKENS = 40


class FakePlan(Plan):
    def table(self) -> str:
        return "the plan\n  experts  8 KiB"


PLAN = FakePlan(
    family="scripted", dtype="float32", device="cpu", memory="100%", context=4096, budget_bytes=10000, minimum_bytes=4000,
    parts=(PlanPart("attention", 1808, "a <note>"), PlanPart("expert pool", 8192), PlanPart("a detail", 100, inside="attention")),
    host_parts=(), pinned_layers=0, slabs=(8,), host_slabs=(), resident_experts=8, total_experts=8, io_threads=2, experts="raw",
)  # fmt: skip


class FakeReply:
    """Yields the pieces of an answer; stops within one piece after `cancel`. A piece may be an error, or something to call."""

    def __init__(self, engine: "FakeEngine", pieces: Any, images: list, options: dict):
        self.engine, self._script, self.images, self.options = engine, pieces, images, options
        self.cancelled, self.said, self.answer, self.text, self.figures, self.error = False, [], "", "", None, None
        self.reasoning = ""

    def __iter__(self):
        return (piece for piece in self.pieces() if isinstance(piece, str))

    def pieces(self):
        before = self.engine.metrics.snapshot()
        for piece in self._script:
            if self.cancelled:
                break
            if isinstance(piece, Exception):
                raise piece
            if callable(piece):  # something that happens in the middle of an answer
                piece(self)
                continue
            self.engine.work()
            self.said.append(piece)
            if isinstance(piece, Reasoning):
                self.reasoning += piece.text
            else:
                self.answer += piece
                self.text += piece
            yield piece
        self.figures = self._figures(self.engine.metrics.snapshot() - before)

    def deliver_to(self, put) -> None:
        """The pieces come from another thread, as the real engine's do."""
        threading.Thread(target=self._deliver, args=[put], daemon=True).start()

    def _deliver(self, put) -> None:
        try:
            for piece in self.pieces():
                put(piece)
        except Exception as error:
            self.error = error
        put(None)

    def cancel(self) -> None:
        self.cancelled = True

    def _figures(self, counters) -> Figures:
        keep = self.options.get("keep") or self.engine.settings.keep
        tokens, kept = SIDE * SIDE, np.arange(max(1, int(keep * SIDE * SIDE)))
        pruned = keep < 1 and bool(self.images)
        running = self.engine.precision
        if running and self.options.get("retention"):
            running = dataclasses.replace(running, retention=self.options["retention"])
        return Figures(
            answer=self.answer,
            finish="cancelled" if self.cancelled else "stop",
            plan=PLAN,
            images=len(self.images),
            encode_seconds=0.25 * len(self.images),
            prompt_tokens=PROMPT_TOKENS,
            visual_tokens=tokens * len(self.images),
            prefill_seconds=0.5,
            decode_tokens=len(self.said),
            decode_seconds=0.1 * len(self.said),
            capacity={"slabs": 8, "experts": 8, "bytes": 8192},
            backends=self.engine.backends,
            counters=counters,
            pruning=Pruning(keep=keep) if pruned else None,
            kept=tuple(KeptImage(0, 0, (SIDE, SIDE), Selection(kept), tokens) for _ in self.images) if pruned else (),
            pictures=tuple(self.images),
            answer_tokens=len(self.said) + 1,
            encoded_images=len(self.images),
            passes=tuple(self._passes()),
            formats=counters.shares(self.engine.format_names),
            precision=running,
        )

    def _passes(self):
        prefill_s = 0.25 * len(self.images) + 0.5
        yield PassFigures(Phase.PREFILL, 0.0, prefill_s, PROMPT_TOKENS, 0.1, 2, 6, 6144, 0)
        for number in range(len(self.said)):
            yield PassFigures(Phase.DECODE, prefill_s + 0.1 * number, 0.1, 1, 0.02, 3, 1, 1024, 0)


@dataclass
class FakeEngine:
    """What `vismoe.engine.engine.load` would return. `script`: per question, the pieces of its answer or an error to raise."""

    script: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # (messages, options) of every chat
    recorded: list = field(default_factory=list)
    replies: list = field(default_factory=list)
    closed: bool = False
    backends: dict = field(default_factory=lambda: {"kernels": "torch (the only one)"})
    name: str = "a scripted engine"
    hardware: Hardware | None = None  # that plans count on
    can_prune: bool = True
    drafts: tuple = ("none",)
    settings: Settings = field(default_factory=Settings)
    packed: set = field(default_factory=lambda: {"lossless", "16", "int8", "8", "4", "2", "0"})

    def __post_init__(self):
        self.metrics, self.plan = Metrics(LAYERS), PLAN
        self.metrics.name_formats(self.format_names)
        self.changes = []  # arguments of every `change`
        self._hits, self._misses = np.zeros((2, LAYERS, EXPERTS), np.int64)

    def work(self) -> None:
        """What one token does: three experts of layer 0 are there, one of layer 1 is fetched."""
        self.metrics.add("hits", Phase.DECODE, 0, 3)
        self.metrics.add("misses", Phase.DECODE, 1, 1)
        self.metrics.add("bytes_read", Phase.DECODE, 1, 1024)
        self._hits[0, :3] += 1
        self._misses[1, 2] += 1
        self.metrics.add("computed_high", Phase.DECODE, 0, 3 if self.settings.pair else 4)
        if self.settings.pair:
            self.metrics.add("skipped" if self.settings.pair.low is None else "computed_low", Phase.DECODE, 1, 1)

    @property
    def format_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.settings.pair.resident)) if self.settings.pair else ("raw",)

    @property
    def precision(self) -> PrecisionInfo | None:
        settings = self.settings
        return PrecisionInfo(settings.policy, str(settings.pair), settings.retention) if settings.pair else None

    def change(self, policy=None, formats=None, retention=None):
        self.changes.append((policy, formats, retention))
        asked = {"policy": policy, "formats": formats, "retention": retention}
        changed = dataclasses.replace(self.settings, **{name: value for name, value in asked.items() if value is not None})
        if formats == "16/8":
            raise BudgetError("memory=100%: int8 takes 51.6% of 16 bit", "--formats 4/2")
        self.settings = changed
        self.metrics.name_formats(self.format_names)
        return self.plan

    def why_not(self, policy, formats=None) -> str | None:
        if policy == "exact" or set(formats.split("/")) <= self.packed:
            return None
        return f"format='{formats}' needs packed experts. Fix: vismoe pack MODEL"

    def formats(self) -> np.ndarray:
        """Expert 2 of layer 0 is in the lesser format, where there are two."""
        return np.array([[1, 1, 2 if self.settings.pair else 1, 0], [0, 1, 0, 255]], np.uint8)

    def residency(self) -> np.ndarray:
        return np.array([[2, 1, 1, 0], [0, 1, 0, 255]], np.uint8)

    def heat(self) -> tuple[np.ndarray, np.ndarray]:
        return self._hits.copy(), self._misses.copy()

    def chat(self, messages, options=RequestOptions(), **given):
        options = vars(dataclasses.replace(options, **given))
        self.calls.append((messages, options))
        answer = self.script.pop(0) if self.script else ["one", " two"]
        if isinstance(answer, Exception):
            raise answer
        changed = {name: options[name] for name in ("policy", "formats") if options.get(name)}
        if changed:
            self.change(**changed)
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = [part["image"] for part in parts if part["type"] == "image"]
        self.replies.append(FakeReply(self, answer, images, options))
        return self.replies[-1]

    @contextlib.contextmanager
    def record(self, path):
        self.recorded.append(path)
        yield

    def alone(self, task):
        return task()

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
