"""What the chat page does, without widgets: questions to the engine, streamed answers, live statistics as HTML.

The engine interleaves requests, so conversations run in parallel; each writes one answer at a time. Running answers are stored
per session; the caller holds the histories.
"""

import dataclasses
import html
import io
import itertools
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vismoe.app.heat_map import heat_map
from vismoe.app.memory_view import head, memory_plan
from vismoe.app.pictures import seen_pictures
from vismoe.app.tiers import tiers
from vismoe.app.time_line import time_line
from vismoe.config import format_bytes
from vismoe.engine.engine import Engine
from vismoe.engine.generate import Reply
from vismoe.engine.stats import Figures
from vismoe.errors import BusyError, ClosedError, InputError
from vismoe.metrics import Snapshot
from vismoe.models.inputs.documents import MOST_PAGES, is_document, opened_document
from vismoe.models.inputs.images import MAX_PIXELS, open_image
from vismoe.models.inputs.message_files import user_message
from vismoe.models.inputs.responses import Piece
from vismoe.models.inputs.videos import SIGNATURE_BYTES, opened_video, video_format
from vismoe.options import RequestOptions
from vismoe.planning.plan import Plan
from vismoe.types import Phase

REFRESH_S = 0.1  # between two updates of the text; one per token would take time from the model
MACHINE_REFRESH_S = 0.5  # between two updates of the heat map, which is larger
TILES = {  # name, and tooltip
    "tokens/s": "how fast the answer is written",
    "hit rate": "share of needed experts that were in memory",
    "fetched/token": "bytes of experts that came from disk or over the link for each token of the answer",
    "stalled": "time spent waiting for experts",
    "better format": "share of the experts' computations in the more precise format of the pair",
}
NO_MODEL = '<p class="vm-note">No model is loaded.</p>'
NO_FIGURES = '<p class="vm-note">Speed and memory traffic of an answer are shown here.</p>'
LEAVE_S = 60.0  # a cancelled answer ends within a token, but a long prefill may come before the first token


def chosen(usual: RequestOptions, widgets: Mapping[str, Any]) -> RequestOptions:
    """What the widgets of the page ask for. Formats and retention are left out where the policy has no use for them; 0 is the
    end of the context, greedy decoding, the model's own top-p, and no seed. Raises InputError or ConfigError."""
    policy, temperature = widgets["policy"], widgets["temperature"]
    return dataclasses.replace(
        usual,
        keep=widgets["keep"],
        selection=widgets["selection"] or None,
        policy=policy,
        formats=widgets["formats"] if policy != "exact" else None,
        retention=widgets["retention"] if "importance" in policy else None,
        draft=widgets["draft"],
        max_tokens=int(widgets["max_tokens"]) or None,
        sample=temperature > 0,
        temperature=temperature or None,
        top_p=widgets["top_p"] or None if temperature > 0 else None,
        seed=int(widgets["seed"] or 0) or None,
    )


@dataclass(frozen=True)
class PageTurn:
    """A question with its pictures, videos and documents, as files to show and opened for the engine, and its answer."""

    question: str
    files: tuple[str, ...]
    images: tuple[Any, ...]
    answer: str = ""
    reasoning: str = ""  # before it

    def answered(self, reply: Reply) -> "PageTurn":
        """With what was said so far."""
        return dataclasses.replace(self, answer=reply.text, reasoning=reply.reasoning)

    @classmethod
    def of(cls, question: str, files: list[str]) -> "PageTurn":
        """Opens the pictures; raises InputError for an empty question or a bad picture."""
        if not question.strip():
            raise InputError("there is no question; write one with the picture" if files else "there is no question")
        return cls(question, tuple(files), tuple(itertools.chain.from_iterable(map(_opened, files))))

    def asked_as(self, question: str) -> "PageTurn":
        """The same pictures with another question and no answer yet; raises InputError for an empty question."""
        if not question.strip():
            raise InputError("there is no question")
        return dataclasses.replace(self, question=question, answer="", reasoning="")

    def messages(self) -> list[dict[str, Any]]:
        """Messages for the engine; without an answer, only the question."""
        answer = [{"role": "assistant", "content": self.answer}] if self.answer else []
        return [user_message(self.question, list(self.images)), *answer]


def _opened(file: str) -> list[Any]:
    """What an uploaded file shows; its InputError has the visitor's file name, and no path of this machine."""
    name = Path(file).name
    if not Path(file).exists():
        raise InputError(f"{name}: the picture is no longer stored. Fix: attach it again")
    try:
        return opened(Path(file).read_bytes(), name)
    except InputError as error:
        raise InputError(str(error).replace("the image", name)) from error


def opened(data: bytes, name: str) -> list[Any]:
    """The picture in a file's bytes, the pages of a document, or the message part of a video, which the model's family opens.
    Raises InputError and ConfigError."""
    if is_document(data):
        with opened_document(data, name, MAX_PIXELS) as document:
            return list[Any](document.drawn(range(len(document.pages)), f"a PDF with the first {MOST_PAGES} of its pages"))
    if video_format(data[:SIGNATURE_BYTES]) is not None:
        with opened_video(io.BytesIO(data), name, MAX_PIXELS):  # that it can be read
            return [{"type": "video", "video": data}]
    return [open_image(data)]


History = tuple[PageTurn, ...]


def shown(history: History) -> list[dict[str, Any]]:
    """The messages of each turn in the form of gradio's chat: one for each picture, the question, the answer."""
    messages = list[dict[str, Any]]()
    for turn in history:
        waiting = "*Looking at the picture ...*" if turn.files else "*Reading ...*"
        messages += [{"role": "user", "content": {"path": file}} for file in turn.files]
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": _thought(turn) + turn.answer or waiting})
    return messages


def _thought(turn: PageTurn) -> str:
    """What the model thinks: open until the answer begins."""
    if not turn.reasoning:
        return ""
    opened = "" if turn.answer else " open"
    return f"<details{opened}><summary>Thinking</summary>\n\n{html.escape(turn.reasoning)}\n\n</details>\n\n"


def turn_at(history: History, message: int) -> int:
    """The index of the turn to which a shown message belongs; `len(history)` for a turn that is being written."""
    ends = itertools.accumulate(len(turn.files) + 2 for turn in history)
    return next((number for number, end in enumerate(ends) if message < end), len(history))


@dataclass(frozen=True)
class Finished:
    """HTML that is known once an answer has ended."""

    pictures: str
    time_line: str
    tiers: str
    plan: str
    head: str


@dataclass(frozen=True)
class PageUpdate:
    """An update of the page. None: unchanged."""

    history: History
    tiles: str
    heat: str | None = None
    finished: Finished | None = None


Updates = Generator[PageUpdate, None, PageUpdate | None]


def tiles(counters: Snapshot | None = None, decoded: float = 0, seconds: float = 0) -> str:
    """The live statistics as HTML, of known values only. `decoded`: tokens that were decoded in `seconds`."""
    if counters is None:
        return NO_FIGURES
    values = {"stalled": f"{counters.total('stall_seconds'):.2f} s"}
    if decoded:  # bytes copied over a link were read from disk before, or were in host memory
        fetched = max(counters.total(name, Phase.DECODE) for name in ("bytes_read", "bytes_copied"))
        values["fetched/token"] = format_bytes(fetched / decoded)
    if decoded and seconds:
        values["tokens/s"] = f"{decoded / seconds:.1f}"
    if (hit_rate := counters.hit_rate()) is not None:
        values["hit rate"] = f"{hit_rate:.1%}"
    if shares := counters.shares(("better", "other")):
        values["better format"] = f"{shares.get('better', 0):.1%}"
    cells = (f'<div title="{what}"><b>{values[name]}</b>{name}</div>' for name, what in TILES.items() if name in values)
    return f'<div class="vm-tiles">{"".join(cells)}</div>'


@dataclass
class RunningAnswer:
    """An answer that is being written. `dropped`: the visitor left the conversation, so it must not enter the history."""

    reply: Reply | None = None
    cancelled: bool = False
    dropped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def begin(self, reply: Reply) -> None:
        self.reply = reply
        if self.cancelled:
            reply.cancel()

    def cancel(self) -> None:
        self.cancelled = True
        if self.reply is not None:
            self.reply.cancel()


class Baseline:
    """The engine's counters when a request began; later changes belong to it and to requests that ran at the same time."""

    def __init__(self, engine: Engine):
        self._engine, self._before, self._heat = engine, engine.metrics.snapshot(), engine.heat()

    def tiles(self, seconds: float) -> str:
        """The live statistics, `seconds` after the first word."""
        counters = self._engine.metrics.snapshot() - self._before
        layers = counters.values.shape[1]
        return tiles(counters, counters.total("steps", Phase.DECODE) / layers if layers else 0, seconds)

    def heat(self) -> str:
        engine, (hits, misses) = self._engine, self._engine.heat()
        asked = hits - self._heat[0], misses - self._heat[1]
        return heat_map(engine.residency(), *asked, engine.formats(), engine.format_names)


@dataclass
class Page:
    """The page's logic without widgets: what its handlers do with the engine."""

    engine: Engine | None = None  # None: no model is loaded
    options: RequestOptions = RequestOptions(reuse=True)  # of questions that ask for nothing else
    name: str = ""  # of the model, where another one is shown than the engine's
    running: dict[str, RunningAnswer] = field(default_factory=dict)  # by session

    def heat(self) -> str:
        """The current heat map, without demands."""
        engine = self.engine
        return Baseline(engine).heat() if engine is not None else NO_MODEL

    def head(self, plan: Plan | None = None) -> str:
        """The page's first line; `plan`: that of the latest answer."""
        engine = self.engine
        return head(self.name or engine.name, plan or engine.plan) if engine is not None else head("no model is loaded")

    def answer(
        self, turn: PageTurn, history: History, session: str, options: RequestOptions | None = None, system: str = ""
    ) -> Iterator[PageUpdate]:
        """Updates at most every REFRESH_S; the last one is complete. Asks `turn` after the system prompt and `history`.

        Raises BusyError while this session's last answer is being written, and the engine's errors.
        """
        running = RunningAnswer()
        if self.running.setdefault(session, running) is not running:
            raise BusyError("The last answer is still being written: wait until it ends, or stop it.")
        try:
            last = yield from self._answer(turn, history, running, options or self.options, system)
        finally:
            running.cancel()  # also if the page was closed during an answer
            self.running.pop(session, None)
            running.ended.set()
        if last is not None:  # after this update the next question may come
            yield last

    def _answer(self, turn: PageTurn, history: History, running: RunningAnswer, options: RequestOptions, system: str) -> Updates:
        """All updates but the last one, which is returned; None if the visitor left the conversation."""
        engine = self.engine
        if engine is None:
            raise ClosedError("no model is loaded. Fix: load one below Model and settings, and ask again")
        since = Baseline(engine)
        seen = (engine.opened_video(one, options.image_tokens) if isinstance(one, dict) else one for one in turn.images)
        turn = dataclasses.replace(turn, images=tuple(seen), answer="", reasoning="")
        instructions = [{"role": "system", "content": system}] if system.strip() else []
        turns = [message for past in (*history, turn) for message in past.messages()]
        reply = engine.chat(instructions + turns, options)
        running.begin(reply)
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        reply.deliver_to(pieces.put)
        first_s, now_s, machine_s = 0.0, time.perf_counter(), 0.0
        yield PageUpdate((*history, turn), tiles())  # the question was accepted
        while not self._wait(pieces, now_s + REFRESH_S):
            now_s = time.perf_counter()
            first_s = first_s or (now_s if reply.text or reply.reasoning else 0.0)
            if running.dropped:
                continue
            heat = None
            if now_s - machine_s >= MACHINE_REFRESH_S:
                machine_s, heat = now_s, since.heat()
            live = since.tiles(now_s - first_s if first_s else 0.0)
            yield PageUpdate((*history, turn.answered(reply)), live, heat)
        if reply.error is not None:
            raise reply.error
        return None if running.dropped else self._finished(reply, history, turn, since)

    @staticmethod
    def _wait(pieces: "queue.SimpleQueue[Piece | None]", until_s: float) -> bool:
        """Whether the answer has ended; False at `until_s`. The reply's text then has all pieces so far."""
        while (left_s := until_s - time.perf_counter()) > 0:
            try:
                if pieces.get(timeout=left_s) is None:
                    return True
            except queue.Empty:
                break
        return False

    def _finished(self, reply: Reply, history: History, turn: PageTurn, since: Baseline) -> PageUpdate:
        figures: Figures = reply.figures
        after = (*history, turn.answered(reply)) if reply.text else history
        plan = memory_plan(figures.plan), self.head(figures.plan)
        done = Finished(seen_pictures(figures), time_line(figures), tiers(figures), *plan)
        live = tiles(figures.counters, figures.decode_tokens, figures.decode_seconds)
        return PageUpdate(after, live, since.heat(), done)

    def stop(self, session: str) -> None:
        """Ends the answer of this session within a token; the text so far remains."""
        if running := self.running.get(session):
            running.cancel()

    def leave(self, session: str) -> None:
        """Ends the answer of this session and waits for its last update, so that none arrives after the page is emptied."""
        if running := self.running.get(session):
            running.dropped = True
            running.cancel()
            running.ended.wait(LEAVE_S)
