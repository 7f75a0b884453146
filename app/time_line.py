"""The time line of one request as inline SVG: waiting, encoding, prefill, each token, and how much of each was stalled. Pure."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vismoe.config import format_bytes
from vismoe.types import Phase

MOST_BARS = 400  # further passes share a bar: thinner ones could not be seen
TICKS = 6  # about this many
LAST_TICK = 0.95  # of the width; a label further right would leave the page
WIDTH, HEIGHT = 1000, 100  # of the drawing, which is stretched to the page
THINNEST = 1.0  # in units of WIDTH, so that a short pass is visible
WORDS = {
    "queue": "waiting for its turn",
    Phase.ENCODE: "encode: the vision tower looks at the images",
    Phase.PREFILL: "prefill: the question is read",
    Phase.DECODE: "decode: one bar for each token of the answer",
    "stall": "stalled: waiting for experts to be fetched",
}
ENDS = {"stop": "ended by the model", "length": "cut at the length that was allowed", "cancelled": "stopped"}
NOTHING = '<p class="vm-note">Nothing ran.</p>'


@dataclass(frozen=True)
class TimelineBar:
    """A stretch of the request. Seconds count from the beginning of the request."""

    kind: str
    began_s: float
    seconds: float
    stall_s: float
    title: str


def time_line(figures: Any) -> str:
    """HTML of a finished request's time line; `figures` are its `Figures`."""
    bars = [*_before(figures), *_passes(figures)]
    total_s = max((bar.began_s + bar.seconds for bar in bars), default=0.0)
    if not total_s:
        return NOTHING
    drawn = "".join(_draw(bar, total_s) for bar in bars)
    seconds = {kind: sum(bar.seconds for bar in bars if bar.kind == kind) for kind in WORDS}
    seconds["stall"] = sum(bar.stall_s for bar in bars)
    legend = "".join(
        f'<li><i class="vm-{kind}"></i><b>{_time(seconds[kind])}</b> {words}</li>'
        for kind, words in WORDS.items()
        if seconds[kind]
    )
    spoken = ", ".join(f"{kind} {_time(spent)}" for kind, spent in seconds.items() if spent)
    return (
        f'<p class="vm-note">{_in_words(figures)}</p>'
        f'<div class="vm-line" role="img" aria-label="The request took {_time(total_s)}: {spoken}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{drawn}</svg>'
        f'<div class="vm-ticks">{_ticks(total_s)}</div></div><ul class="vm-legend">{legend}</ul>'
    )


def _in_words(figures: Any) -> str:
    """A sentence about how it ended, and what was cached from earlier turns."""
    words = [f"{figures.answer_tokens} tokens of answer, {ENDS[figures.finish]}."]
    if figures.images:
        words.append(f"{figures.encoded_images} of {figures.images} images had to be encoded.")
    if figures.reused_tokens:
        words.append(f"{figures.reused_tokens} of {figures.prompt_tokens} tokens of the question were cached.")
    return " ".join(words)


def _before(figures: Any) -> Iterator[TimelineBar]:
    """Bars before the first pass: the request waits, and the pass begins with encoding."""
    if figures.queue_seconds:
        yield TimelineBar("queue", 0.0, figures.queue_seconds, 0.0, f"waiting: {_time(figures.queue_seconds)}")
    if figures.encode_seconds and figures.passes:
        began_s = figures.queue_seconds + figures.passes[0].began_s
        images = f"{figures.encoded_images} image{'s' * (figures.encoded_images != 1)}"
        yield TimelineBar(
            Phase.ENCODE, began_s, figures.encode_seconds, 0.0, f"encode: {images} in {_time(figures.encode_seconds)}"
        )


def _passes(figures: Any) -> Iterator[TimelineBar]:
    """One bar for each pass; neighbouring decode passes share a bar if there are too many."""
    together = math.ceil(len(figures.passes) / MOST_BARS)
    token, before_s = itertools.count(2), figures.encode_seconds
    for phase, run in itertools.groupby(figures.passes, key=lambda one: one.phase):
        passes, size = list(run), together if phase == Phase.DECODE else 1
        for group in (passes[start : start + size] for start in range(0, len(passes), size)):
            first, last = group[0], group[-1]
            began_s = first.began_s + before_s
            seconds, stall_s = last.began_s + last.seconds - began_s, sum(one.stall_seconds for one in group)
            counts = f"{sum(one.hits for one in group)} hits, {sum(one.misses for one in group)} misses"
            read = format_bytes(sum(one.bytes_read for one in group))
            if phase == Phase.DECODE:
                numbers = [next(token) for _ in group]
                what = f"token {numbers[0]}" if len(numbers) == 1 else f"tokens {numbers[0]} to {numbers[-1]}"
            else:
                what = f"prefill of {sum(one.tokens for one in group)} tokens"
            title = f"{what}: {_time(seconds)}, {_time(stall_s)} of it stalled; {counts}, {read} read"
            yield TimelineBar(phase, figures.queue_seconds + began_s, seconds, stall_s, title)
            before_s = 0.0


def _draw(bar: TimelineBar, total_s: float) -> str:
    """The bar, and at its foot the share that was stalled."""
    x, width = WIDTH * bar.began_s / total_s, max(THINNEST, WIDTH * bar.seconds / total_s)
    stalled = HEIGHT * min(1.0, bar.stall_s / bar.seconds) if bar.seconds else 0.0
    place = f'x="{x:.1f}" width="{width:.1f}"'
    foot = f'<rect class="vm-stall" {place} y="{HEIGHT - stalled:.0f}" height="{stalled:.0f}"/>' if stalled >= 1 else ""
    return f'<g><title>{bar.title}</title><rect class="vm-{bar.kind}" {place} y="0" height="{HEIGHT}"/>{foot}</g>'


def _ticks(total_s: float) -> str:
    step = _nice(total_s / TICKS)
    marks = (number * step for number in range(int(LAST_TICK * total_s / step) + 1))
    return "".join(f'<span style="left:{100 * mark / total_s:.2f}%">{_time(mark)}</span>' for mark in marks)


def _nice(seconds: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(seconds))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= seconds), 10 * power)


def _time(seconds: float) -> str:
    """`0.0123` -> `12 ms`, `1.5` -> `1.50 s`."""
    if seconds == 0:
        return "0"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms" if seconds < 1 else f"{seconds:.2f} s"
