"""An engine without a model, for tests of the server: it answers by a script, one piece of text a step, and keeps the engine's
promises to callers: threads, cancelling, load, errors.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from vismoe.config import Settings
from vismoe.errors import ClosedError
from vismoe.metrics import Metrics
from vismoe.models.inputs.qwen_videos import QwenVideos
from vismoe.options import RequestOptions
from vismoe.types import Phase

LAYERS = 2
PATIENCE_S = 10


def figures(answer: str, finish: str, precision: SimpleNamespace | None) -> SimpleNamespace:
    """What the server reads of `vismoe.engine.generate.Figures`."""
    metrics = Metrics(LAYERS)
    metrics.add("hits", Phase.DECODE, 0, 3)
    metrics.add("misses", Phase.DECODE, 0, 1)
    metrics.add("bytes_read", Phase.DECODE, 0, 1000)
    return SimpleNamespace(
        answer=answer,
        finish=finish,
        prompt_tokens=11,
        answer_tokens=5,
        reused_tokens=7,
        reasoning_tokens=2,
        stopped_by=None,
        images=1,
        encoded_images=0,
        visual_tokens=8,
        kept_visual_tokens=4,
        queue_seconds=0.1,
        encode_seconds=0.2,
        prefill_seconds=0.3,
        decode_seconds=0.4,
        decode_tokens=4,
        decode_tokens_per_s=10.0,
        pruning=SimpleNamespace(keep=0.5, selection="affinity"),
        drafts=None,
        grammar_seconds=None,
        counters=metrics.snapshot(),
        precision=precision,
        formats={"raw": 1.0} if precision is None else dict(zip(precision.formats.split("/"), (0.75, 0.25), strict=True)),
    )


class ScriptedReply:
    """Says its pieces from a thread of its own. A piece that is an exception ends it, a callable is called on the way."""

    def __init__(self, engine: "ScriptedEngine", pieces: Iterable, retention: float | None = None):
        self._engine, self._pieces, self._retention = engine, pieces, retention
        self._put, self._said, self._lock = None, [], threading.Lock()
        self.cancelled = threading.Event()
        self.figures, self.error = None, None

    def cancel(self) -> None:
        self.cancelled.set()

    def deliver_to(self, put) -> None:
        with self._lock:
            for piece in self._said:
                put(piece)
            self._put = put

    def _say(self, piece) -> None:
        with self._lock:
            self._said.append(piece)
            if self._put is not None:
                self._put(piece)

    def run(self) -> None:
        try:
            for piece in self._pieces:
                if self.cancelled.is_set() or self._engine.closed:
                    break
                if isinstance(piece, Exception):
                    raise piece
                piece() if callable(piece) else self._say(piece)
            if self._engine.closed:
                raise ClosedError("the engine was closed")
            precision = self._engine.precision
            if precision and self._retention:
                precision = SimpleNamespace(**vars(precision) | {"retention": self._retention})
            finish = "cancelled" if self.cancelled.is_set() else self._engine.finish
            said = "".join(piece for piece in self._said if isinstance(piece, str))
            self.figures = figures(said, finish, precision)
        except Exception as error:
            self.error = error
        self._engine.ended(self)
        self._say(None)


@dataclass
class ScriptedEngine:
    """`script`: for each request its pieces, or an exception that `chat` raises. Without one, it says `Hello, world`."""

    script: list = field(default_factory=list)
    calls: list = field(default_factory=list)  # (what was asked, options)
    replies: list = field(default_factory=list)
    running: set = field(default_factory=set)
    cancelled: int = 0
    waiting: int = 0
    closed: bool = False
    finish: str = "stop"
    settings: Settings = field(default_factory=Settings)
    name: str = "example/scripted"
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(generation_config=SimpleNamespace(do_sample=True)))
    door: threading.Event = field(default_factory=threading.Event)  # closed: `chat` waits

    def __post_init__(self):
        self.plan = SimpleNamespace(context=4096)
        self.prompts = SimpleNamespace(
            look=lambda *asked: lambda *sides: None,
            low_detail=lambda image_tokens: {},
            videos=lambda image_tokens, context: QwenVideos(32, context, image_tokens),
        )
        self.door.set()

    @property
    def load(self) -> SimpleNamespace:
        return SimpleNamespace(running=len(self.running), waiting=self.waiting, cancelled=self.cancelled)

    def chat(self, messages, options=RequestOptions(), tools=None, template=None, **given) -> ScriptedReply:
        options = vars(replace(options, **given))
        if self.closed:
            raise ClosedError("the engine is closed")
        self.calls.append((messages, options))
        self.door.wait(PATIENCE_S)
        answer = self.script.pop(0) if self.script else ["Hello", ", ", "world"]
        if isinstance(answer, Exception):
            raise answer
        asked = {name: options[name] for name in ("policy", "formats") if options.get(name)}
        self.settings = replace(self.settings, **asked)
        reply = ScriptedReply(self, answer, options.get("retention"))
        self.replies.append(reply)
        self.running.add(reply)
        threading.Thread(target=reply.run, daemon=True).start()
        return reply

    complete = chat

    @property
    def precision(self) -> SimpleNamespace | None:
        held = self.settings
        return SimpleNamespace(policy=held.policy, formats=str(held.pair), retention=held.retention) if held.pair else None

    def ended(self, reply: ScriptedReply) -> None:
        self.cancelled += reply.cancelled.is_set()
        self.running.remove(reply)

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
