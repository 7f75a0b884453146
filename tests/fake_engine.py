"""An engine without a model: it answers by a script, so that the command line and the page can be tested in milliseconds."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

from PIL import Image

from vismoe.config import Settings
from vismoe.metrics import Metrics
from vismoe.types import Phase

LAYERS = 2


class FakeFigures:
    def __init__(self, answer: str, images: int, tokens: int, cache: dict):
        self.answer, self.images, self.tokens, self.cache = answer, images, tokens, cache

    def kept_maps(self) -> list:
        return [Image.new("RGB", (8, 8), "grey")] * self.images

    def to_json(self) -> dict:
        return {
            "answer": self.answer,
            "plan": {"budget_bytes": 1000},
            "encode": {"images": self.images, "seconds": 0.25 * self.images},
            "prefill": {"tokens": 40, "visual_tokens": 30 * self.images, "kept_visual_tokens": 15 * self.images, "seconds": 0.5},
            "decode": {"tokens": self.tokens, "seconds": 0.1 * self.tokens},
            "cache": {"capacity": {"slabs": 8, "bytes": 8192}, **self.cache},
        }


class FakeReply:
    """Yields the pieces of an answer; stops within one piece after `cancel`."""

    def __init__(self, engine: "FakeEngine", pieces: list, images: int):
        self.engine, self.pieces, self.images = engine, pieces, images
        self.cancelled, self.said, self.answer, self.figures = False, [], "", None

    def __iter__(self):
        before = self.engine.metrics.snapshot()
        for piece in self.pieces:
            if self.cancelled:
                break
            if callable(piece):  # something that happens in the middle of an answer
                piece(self)
                continue
            self.engine.metrics.add("hits", Phase.DECODE, 0, 3)
            self.engine.metrics.add("misses", Phase.DECODE, 1, 1)
            self.engine.metrics.add("bytes_read", Phase.DECODE, 1, 1024)
            self.said.append(piece)
            self.answer += piece
            yield piece
        cache = (self.engine.metrics.snapshot() - before).to_json()
        self.figures = FakeFigures(self.answer, self.images, len(self.said), cache)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeEngine:
    """What `vismoe.engine.load` would return. `script`: per question, the pieces of its answer or an error to raise."""

    script: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # (messages, options) of every chat
    recorded: list = field(default_factory=list)
    replies: list = field(default_factory=list)
    closed: bool = False
    backends: dict = field(default_factory=lambda: {"kernels": "torch (the only one)"})
    name: str = "a scripted engine"
    can_prune: bool = True
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self):
        self.metrics = Metrics(LAYERS)
        self.plan = SimpleNamespace(table=lambda: "the plan\n  experts  8 KiB", to_json=lambda: {"budget_bytes": 1000})

    def chat(self, messages, **options):
        self.calls.append((messages, options))
        answer = self.script.pop(0) if self.script else ["one", " two"]
        if isinstance(answer, Exception):
            raise answer
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        self.replies.append(FakeReply(self, answer, sum(part["type"] == "image" for part in parts)))
        return self.replies[-1]

    @contextlib.contextmanager
    def record(self, path):
        self.recorded.append(path)
        yield

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
