"""The questions of a suite: about generated scenes, or documents of lmms-eval's tasks. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vismoe.eval.answer_file import Key, batches
from vismoe.eval.scoring import GROUPS, OTHERS, TEXT

READING = ("ocr", "textvqa", "docvqa")  # parts of the names of tasks about printed text


@dataclass(frozen=True)
class Scenes:
    """`per_kind` held-out questions of every kind. A key is a kind and a number."""

    seed: int
    per_kind: int
    batch: int

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Kinds whose scores are averaged, by the name of the average; the tables show OTHERS and TEXT."""
        return GROUPS

    @property
    def sentence(self) -> str:
        """A description of the questions and of how they are asked."""
        return (
            f"held-out questions about generated scenes (seed {self.seed}, {self.per_kind} of each kind, {self.batch} at a time)"
        )

    @property
    def job(self) -> dict[str, Any]:
        """The data for the worker's job; answers belong to it."""
        return {"data": "scenes", "seed": self.seed, "batch": self.batch}

    @property
    def flags(self) -> dict[str, Any]:
        """The command line flags that select these questions."""
        return {"seed": self.seed, "n": self.per_kind, "batch": self.batch}

    def batches(self) -> list[list[Key]]:
        """All questions in batches of one kind each; a batch is answered together."""
        return list(batches(self.per_kind, self.batch))

    def is_done(self, batch: Sequence[Key], kept: Collection[Key]) -> bool:
        """Whether `kept` has the answers to a batch."""
        return all(key in kept for key in batch)


@dataclass(frozen=True)
class Tasks:
    """The first `limit` documents of each task, scored by the task's own code."""

    tasks: tuple[str, ...]
    limit: int
    batch: int

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        text = tuple(task for task in self.tasks if any(word in task for word in READING))
        return {OTHERS: tuple(task for task in self.tasks if task not in text), TEXT: text} | {
            task: (task,) for task in self.tasks
        }

    @property
    def sentence(self) -> str:
        return f"documents of lmms-eval's {', '.join(self.tasks)} (the first {self.limit} of each, {self.batch} at a time)"

    @property
    def job(self) -> dict[str, Any]:
        return {"data": "tasks", "tasks": list(self.tasks), "limit": self.limit, "batch": self.batch}

    @property
    def flags(self) -> dict[str, Any]:
        return {"data": ",".join(self.tasks), "n": self.limit, "batch": self.batch}

    def batches(self) -> list[list[Key]]:
        return [[(task, document) for document in range(self.limit)] for task in self.tasks]

    def is_done(self, batch: Sequence[Key], kept: Collection[Key]) -> bool:
        """A task is run as a whole, and may have fewer documents."""
        return any(key in kept for key in batch)


Data = Scenes | Tasks
