"""The progress of a suite: one bar over all kinds of work, with the remaining time."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PACKING, QUESTION, TURN = "packing", "question", "turn"
GUESSES_S = {PACKING: 10.0, QUESTION: 0.06, TURN: 8.0}  # per unit of work, until some are done


class Outlook:
    """Estimates the remaining time: for each kind of work from its time so far, before that from a guess."""

    def __init__(self, counts: Mapping[str, float]):
        self._left = dict(counts)
        self._done: dict[str, tuple[float, float]] = {}  # (number done, seconds)

    def done(self, kind: str, count: float, seconds: float) -> None:
        before, before_s = self._done.get(kind, (0.0, 0.0))
        self._done[kind] = before + count, before_s + seconds
        self._left[kind] -= count

    def skipped(self, kind: str, count: float) -> None:
        self._left[kind] -= count

    def left_s(self) -> float:
        return sum(max(0.0, count) * self._each_s(kind) for kind, count in self._left.items())

    def _each_s(self, kind: str) -> float:
        count, seconds = self._done.get(kind, (0.0, 0.0))
        return seconds / count if count else GUESSES_S[kind]


class SuiteBar:
    """One bar over everything on stderr, with the remaining time; prints a line for finished work."""

    def __init__(self, outlook: Outlook):
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.outlook = outlook
        self._task = self.progress.add_task("", total=None, left="")
        self._began_s = time.monotonic()

    def doing(self, what: str) -> None:
        self.progress.update(self._task, description=what)
        self._draw()

    def done(self, kind: str, count: float, seconds: float) -> None:
        self.outlook.done(kind, count, seconds)
        self._draw()

    def say(self, line: str) -> None:
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        spent_s, left_s = time.monotonic() - self._began_s, self.outlook.left_s()
        left = f"about {left_s / 60:.0f} min left" if left_s > 90 else f"about {left_s:.0f} s left"
        self.progress.update(self._task, completed=spent_s, total=spent_s + left_s, left=left)
