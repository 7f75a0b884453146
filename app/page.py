"""What the chat page does, without a widget in it: questions to the engine, streamed answers, live figures as HTML.

One request runs at a time, as in the engine; others queue. Answers are kept apart by session, histories belong to the caller.
"""

import base64
import html
import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from vismoe.cli_conversation import user_message
from vismoe.cli_print import figure_rows
from vismoe.config import format_bytes
from vismoe.engine import Engine
from vismoe.errors import InputError
from vismoe.generate import Reply
from vismoe.metrics import Snapshot
from vismoe.models.images import open_image
from vismoe.types import Phase

__all__ = ["History", "Page", "tiles"]

REFRESH_S = 0.1  # between two updates of the page; an update for every token would take the model's time
MAP_PIXELS = 320  # side of the picture of kept tokens
LEAVE_S = 60.0  # a cancelled answer ends within a token, and the first token may be a long prefill away

History = list[dict[str, Any]]


def tiles(counters: Snapshot | None, tokens_per_s: float | None) -> str:
    """The four live figures as HTML; a dash for what is not known yet."""
    hit_rate = counters.hit_rate() if counters else None
    values = {
        "tokens/s": f"{tokens_per_s:.1f}" if tokens_per_s else "-",
        "hit rate": f"{hit_rate:.1%}" if hit_rate is not None else "-",
        "read from disk": format_bytes(counters.total("bytes_read")) if counters else "-",
        "stalled": f"{counters.total('stall_seconds'):.2f} s" if counters else "-",
    }
    return f'<div class="tiles">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in values.items())}</div>'


def details(figures: dict[str, Any]) -> str:
    """All figures of a finished answer as an HTML table."""
    cells = (f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in figure_rows(figures))
    return f'<table class="details">{"".join(cells)}</table>'


def kept_pictures(maps: list[Image.Image]) -> str:
    """What the deeper layers saw of each image, as HTML; nothing where nothing was dropped."""
    if not maps:
        return ""
    pictures = []
    for picture in maps:
        picture.thumbnail((MAP_PIXELS, MAP_PIXELS))
        encoded = io.BytesIO()
        picture.save(encoded, "JPEG", quality=85)
        source = base64.b64encode(encoded.getvalue()).decode()
        pictures.append(f'<img alt="kept visual tokens" src="data:image/jpeg;base64,{source}">')
    return f'<div class="maps"><p>Kept of the image</p>{"".join(pictures)}</div>'


@dataclass
class Running:
    """An answer that is being written. `dropped`: its conversation was left, so it must not enter the history."""

    reply: Reply
    dropped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class Page:
    """The page's logic, without a widget in it: what the handlers do with the engine."""

    engine: Engine
    max_tokens: int = 256
    image_tokens: tuple[int, int] | None = None
    running: dict[str, Running] = field(default_factory=dict)  # by session

    def answer(
        self, question: str, files: list[str], history: History, session: str, keep: float | None = None
    ) -> Iterator[tuple[str, History, str]]:
        """Yields (answer so far, history, figures as HTML), at most every REFRESH_S; the last one is complete.

        history: engine messages so far; the yielded one has this turn in it once the answer is complete.
        keep: share of the visual tokens that deeper layers see; None: as loaded.
        """
        if not question.strip():
            raise InputError("there is no question; write one beside the picture" if files else "there is no question")
        message = user_message(question, [open_image(file) for file in files])
        before = self.engine.metrics.snapshot()
        reply = self.engine.chat([*history, message], max_tokens=self.max_tokens, image_tokens=self.image_tokens, keep=keep)
        running = self.running[session] = Running(reply)
        first_s = shown_s = 0.0
        try:
            yield "", history, tiles(None, None)  # the question was accepted
            for _ in reply:
                now_s = time.perf_counter()
                first_s = first_s or now_s
                if now_s - shown_s >= REFRESH_S and not running.dropped:
                    shown_s = now_s
                    counters = self.engine.metrics.snapshot() - before
                    yield reply.answer, history, tiles(counters, self._tokens_per_s(counters, now_s - first_s))
            if not running.dropped:
                yield self._finished(reply, history, message, before)
        finally:
            reply.cancel()  # also when the page was closed in the middle of an answer
            self.running.pop(session, None)
            running.ended.set()

    def _finished(self, reply: Reply, history: History, message: dict[str, Any], before: Snapshot) -> tuple[str, History, str]:
        figures, maps = reply.figures.to_json(), kept_pictures(reply.figures.kept_maps())
        if reply.answer:
            history = [*history, message, {"role": "assistant", "content": reply.answer}]
        decode = figures["decode"]
        speed = decode["tokens"] / decode["seconds"] if decode["seconds"] else None
        return reply.answer, history, tiles(self.engine.metrics.snapshot() - before, speed) + details(figures) + maps

    @staticmethod
    def _tokens_per_s(counters: Snapshot, seconds: float) -> float | None:
        """Decode steps so far over the time since the first piece of text."""
        layers = counters.values.shape[1]
        return counters.total("steps", Phase.DECODE) / layers / seconds if seconds and layers else None

    def stop(self, session: str) -> None:
        """Ends the answer of this session within a token; what was said so far stays."""
        if running := self.running.get(session):
            running.reply.cancel()

    def leave(self, session: str) -> None:
        """Ends the answer of this session and waits until its last update is out: none may come once the page is empty."""
        if running := self.running.get(session):
            running.dropped = True
            running.reply.cancel()
            running.ended.wait(LEAVE_S)
