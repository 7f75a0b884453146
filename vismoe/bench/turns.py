"""Timed rounds: in every round each contestant takes one turn. The order changes from round to round, so that no contestant is
always first, or always after the same one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

Name = TypeVar("Name")
Result = TypeVar("Result")


def rotating(names: Sequence[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """(round, name) in the order of running: each round begins with another name."""
    for number in range(rounds):
        first = number % len(names)
        yield from ((number, name) for name in (*names[first:], *names[:first]))


def reversing(names: Sequence[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """(round, name) in the order of running: every other round runs backwards."""
    for number in range(rounds):
        yield from ((number, name) for name in (names if number % 2 == 0 else reversed(names)))


class KeptTurns:
    """Measured turns; with a file, each is also a line of JSON in it, written as it finishes, and is not taken again."""

    def __init__(self, file: Path | None = None):
        self._file, self._turns = file, dict[str, Any]()
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                kept = json.loads(line)
                self._turns[json.dumps(kept["of"], sort_keys=True)] = kept["turn"]

    def take(self, jobs: Mapping[str, tuple[Any, Callable[[], Result]]], rounds: int) -> dict[str, list[Result]]:
        """The results of every job, run once per round in `reversing` order; jobs: name -> (identity, function). Shows progress
        on stderr."""
        found: dict[str, list[Result]] = {name: [] for name in jobs}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("turns", total=rounds * len(jobs))
            for number, name in reversing(list(jobs), rounds):
                identity, job = jobs[name]
                progress.update(task, description=name)
                found[name].append(self._kept({"name": name, "round": number, "identity": identity}, job))
                progress.advance(task)
        return found

    def _kept(self, of: Any, job: Callable[[], Result]) -> Result:
        key = json.dumps(of, sort_keys=True)
        if key not in self._turns:
            self._turns[key] = job()
            if self._file is not None:
                with self._file.open("a") as lines:
                    lines.write(json.dumps({"of": of, "turn": self._turns[key]}) + "\n")
        result: Result = self._turns[key]
        return result
