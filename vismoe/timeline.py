"""A timeline: spans on named tracks, kept in memory and written in Chrome's trace format (chrome://tracing, Perfetto).

While a timeline is attached, the pager and the experts function record copies, computation and stalls in it; without one they pay
one comparison. Appending is safe from any thread.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

MOST_SPANS = 2_000_000  # about 500 MB of objects; later spans are dropped, which the file says


class Span(NamedTuple):
    """A span of time; seconds are those of `time.perf_counter`."""

    track: str
    name: str
    began_s: float
    ended_s: float
    details: dict[str, Any]


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
        text = json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"dropped_spans": self.dropped}})
        Path(path).write_text(text)
