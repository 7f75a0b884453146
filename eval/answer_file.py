"""Stores one contestant's answers in a file, so that an interrupted evaluation continues.

The file's first line identifies what the answers belong to (weights, settings, questions, the program itself); a file that
belongs to anything else is refused, never mixed. Then comes a line per question.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console
from rich.progress import Progress

from vismoe.errors import InputError
from vismoe.eval.questions import KINDS, Conversation, conversation
from vismoe.eval.scenes import WORLDS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Key = tuple[str, int]  # kind of question, number
Row = TypeVar("Row", bound="DataclassInstance")  # a dataclass of plain values
Contestant = TypeVar("Contestant")


class AnswerFile(Generic[Row]):
    """`rows` holds the stored answers by kind and number; `add` stores more."""

    def __init__(self, folder: Path, contestant: str, belongs_to: dict[str, Any], row_type: type[Row]):
        """Raises InputError for a file that belongs to other weights, settings, questions or another program."""
        self._file = folder / f"{contestant.replace(', ', '-').replace(' ', '-')}.jsonl"
        self.rows: dict[Key, Row] = {}
        if not self._file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(belongs_to) + "\n")
        lines = self._file.read_text().splitlines(keepends=True)
        if json.loads(lines[0]) != belongs_to:
            raise InputError(
                f"{self._file} holds answers of another model, other questions, or another version of vismoe. "
                f"Fix: remove {folder}, or name another folder with --work"
            )
        whole = [line for line in lines if line.endswith("\n")]
        if whole != lines:  # a run stopped in the middle of a line
            self._file.write_text("".join(whole))
        for line in whole[1:]:
            row = json.loads(line)
            key = row.pop("kind"), row.pop("number")
            self.rows[key] = row_type(**row)

    def add(self, rows: dict[Key, Row]) -> None:
        self.rows |= rows
        lines = [json.dumps({"kind": kind, "number": number, **asdict(row)}) for (kind, number), row in rows.items()]
        with self._file.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


def answer_all(
    files: Mapping[Contestant, AnswerFile[Row]],
    per_kind: int,
    size: int,
    seed: int,
    world: str,
    ask: Callable[[Key, list[Conversation], list[Contestant]], Iterable[tuple[Contestant, list[Row]]]],
) -> tuple[list[str], dict[Contestant, list[Row]]]:
    """Asks every contestant the questions that its file lacks, `size` questions together, and stores each answer at once.

    `ask` gets the first question's key, the questions, and who is to answer them. -> (the kind of each question, every
    contestant's rows in their order). Shows a progress bar on stderr.
    """
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("questions", total=per_kind * len(KINDS))
        for keys in batches(per_kind, size):
            missing = [contestant for contestant, file in files.items() if not file.rows.keys() >= set(keys)]
            talks = questions(keys[0][0], [number for _, number in keys], seed, world) if missing else []
            for contestant, rows in ask(keys[0], talks, missing) if missing else ():
                files[contestant].add(dict(zip(keys, rows, strict=True)))
            bar.advance(task, len(keys))
    asked = [key for keys in batches(per_kind, size) for key in keys]
    return [kind for kind, _ in asked], {contestant: [file.rows[key] for key in asked] for contestant, file in files.items()}


def program_digest(modules: Sequence[ModuleType]) -> str:
    """Digest of the code that decides questions, answers and scores; comments and docstrings do not count."""
    return hashlib.sha256("".join(map(_code, modules)).encode()).hexdigest()


def _code(module: ModuleType) -> str:
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def questions(kind: str, numbers: Sequence[int], seed: int, world: str = "demo") -> list[Conversation]:
    """Held-out conversations about pictures of one of the WORLDS; the same seed always gives the same ones."""
    side, difficulty = WORLDS[world]
    return [conversation(kind, "held-out", seed * 1_000_000 + number, (side, side), difficulty) for number in numbers]


def batches(per_kind: int, size: int) -> Iterator[list[Key]]:
    """Keys of `per_kind` questions of every kind, at most `size` together, all of one kind."""
    for kind in KINDS:
        for first in range(0, per_kind, size):
            yield [(kind, number) for number in range(first, min(per_kind, first + size))]
