"""A timeline: spans on named tracks, kept in memory and written in Chrome's trace format (chrome://tracing, Perfetto).

While a timeline is attached, the pager and the experts function record copies, computation and stalls in it; without one they pay
one comparison. Appending is safe from any thread. For each phase of a request the file also says which share of the time copies
and experts took.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE, PHASE = "compute", "phase"  # tracks: of experts that are computed, of the phases of a request
COPIES = ("copy", "prefetch")  # names of spans, on the track of the thread that copies
MOST_SPANS = 2_000_000  # about 500 MB of objects; later spans are dropped, which the file says


class Span(NamedTuple):
    """A span of time; seconds are those of `time.perf_counter`."""

    track: str
    name: str
    began_s: float
    ended_s: float
    details: dict[str, Any]


class Occupancy(NamedTuple):
    """Of a time: the shares in which something was copied, in which experts were computed, in which both and neither was done;
    the seconds, and the bytes of the copies that ended within it."""

    copying: float
    computing: float
    both: float
    neither: float
    seconds: float
    copied_bytes: int


class Timeline:
    """Collects spans until it is written."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self._origin_s = time.perf_counter()

    def span(self, track: str, name: str, began_s: float, ended_s: float, **details: Any) -> None:
        """Record work that took from `began_s` to `ended_s` on `track` (a thread, or a kind of work)."""
        if len(self.spans) < MOST_SPANS:
            self.spans.append(Span(track, name, began_s, ended_s, details))
        else:
            self.dropped += 1

    def shares(self, began_s: float, ended_s: float) -> Occupancy:
        """Of the time from `began_s` to `ended_s`."""
        within = [span for span in list(self.spans) if span.began_s < ended_s and span.ended_s > began_s]
        copies = [span for span in within if span.name in COPIES]
        computed = [span for span in within if span.track == COMPUTE]
        copying, computing, either = (_covered_s(some, began_s, ended_s) for some in (copies, computed, copies + computed))
        seconds = ended_s - began_s
        copied = sum(span.details["bytes"] for span in copies if span.ended_s <= ended_s)
        scale = 1 / seconds if seconds else 0.0
        both, neither = copying + computing - either, seconds - either
        return Occupancy(copying * scale, computing * scale, both * scale, neither * scale, seconds, copied)

    def write(self, path: str | Path) -> None:
        """Write all spans as one JSON object; tracks in the order of their first span."""
        spans = list(self.spans)  # other threads may go on appending
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span.track for span in spans))}
        names = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events = [
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.track],
                "name": span.name,
                "ts": round(1e6 * (span.began_s - self._origin_s), 3),
                "dur": round(1e6 * (span.ended_s - span.began_s), 3),
                "args": span.details,
            }
            for span in spans
        ]
        phases = {span.name: self.shares(span.began_s, span.ended_s)._asdict() for span in spans if span.track == PHASE}
        more = {"dropped_spans": self.dropped, "phases": phases}
        Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": more}))


def _covered_s(spans: Sequence[Span], began_s: float, ended_s: float) -> float:
    """For how long at least one of the spans lasted, from `began_s` to `ended_s`."""
    covered_s, until_s = 0.0, began_s
    for span in sorted(spans, key=lambda span: span.began_s):
        covered_s += max(0.0, min(span.ended_s, ended_s) - max(span.began_s, until_s))
        until_s = max(until_s, min(span.ended_s, ended_s))
    return covered_s
