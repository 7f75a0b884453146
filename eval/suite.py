"""`vismoe eval --suite paper`: the papers' tables for one model in one command.

Every row of every table answers the same held-out questions; then the rows' speed is measured in turns, with a fresh process for
each. Answers and timings are stored at once, so that an interrupted suite continues; a row that cannot run (a refused budget, a
killed process) appears in the tables with the reason, and the next run tries it again.
"""

import contextlib
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vismoe.bench.turns import reversing
from vismoe.config import NO_STORE, Budget
from vismoe.errors import InputError
from vismoe.eval.answer_file import AnswerFile, Key
from vismoe.eval.scoring import OTHERS, TEXT
from vismoe.eval.suite_data import Data, Scenes, Tasks
from vismoe.eval.suite_process import JobFailed, Worker
from vismoe.eval.suite_progress import PACKING, QUESTION, TURN, Outlook, SuiteBar
from vismoe.eval.suite_report import accuracy_of, markdown, speed_of, write_report
from vismoe.eval.suite_rows import (
    ANSWERS,
    EXACT,
    MAX_TOKENS,
    REQUESTS,
    SPEED,
    TABLES,
    WORK,
    Answered,
    Axes,
    PaperTable,
    SpeedTurn,
    SuiteRow,
    packed_formats,
    paper_tables,
    refuse_varied,
    rows_of,
)
from vismoe.flags import INTERRUPTED, given_settings, model_options, one_model, print_json

STORE, LOCK = "store", "pack.lock"


@dataclass(frozen=True)
class SuiteOptions:
    """The options of the suite."""

    name: str
    model: str | None
    options: Mapping[str, str]  # device, dtype, revision
    given: Mapping[str, Any]  # settings of every row
    axes: Axes
    tables: tuple[PaperTable, ...]
    data: Data
    rounds: int
    out: Path
    work: Path

    @classmethod
    def of(cls, arguments: Namespace) -> "SuiteOptions":
        """Raises InputError or ConfigError for options that a suite does not support."""
        if arguments.data and arguments.seed:
            raise InputError("--seed chooses generated scenes, but --data chooses documents of tasks. Fix: leave one of them out")
        given = given_settings(arguments)
        refuse_varied(given)
        memory = str(given.pop("memory", Axes.memory))
        axes = Axes(memory=memory, budgets=tuple(arguments.budgets), hot_budgets=tuple(arguments.hot_budgets))
        for size in (*axes.budgets, *axes.hot_budgets):
            Budget.parse(size)
        return cls(
            name=arguments.suite,
            model=one_model(arguments),
            options=model_options(arguments),
            given=given,
            axes=axes,
            tables=paper_tables(axes, arguments.tables),
            data=Tasks(tuple(dict.fromkeys(arguments.data.split(","))), arguments.n, arguments.batch)
            if arguments.data
            else Scenes(arguments.seed, arguments.n, arguments.batch),
            rounds=arguments.rounds,
            out=arguments.out,
            work=(arguments.work or arguments.out / WORK).resolve(),
        )

    @property
    def rows(self) -> tuple[SuiteRow, ...]:
        return rows_of(self.tables)

    def settings(self, row: SuiteRow) -> dict[str, Any]:
        """The settings of a row, without the folder of packed experts."""
        return {**self.given, "memory": self.axes.memory, "keep": 1.0, "format": "raw", **row.settings}

    @property
    def command(self) -> str:
        """The command that gives the same results."""
        flags = {**self.data.flags, "rounds": self.rounds, "memory": self.axes.memory}
        settings = {name.replace("_", "-"): value for name, value in {**flags, **self.options, **self.given}.items()}
        model = [self.model] if self.model else []
        words = [word for name, value in settings.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]
        tables = ["--tables", *(table.name for table in self.tables)] if len(self.tables) < len(TABLES) else []
        sizes = {"--budgets": self.axes.budgets, "--hot-budgets": self.axes.hot_budgets}
        usual = {"--budgets": Axes.budgets, "--hot-budgets": Axes.hot_budgets}
        budgets = [word for flag, given in sizes.items() if given != usual[flag] for word in (flag, *given)]
        return shlex.join(["vismoe", "eval", "--suite", self.name, *model, *words, *budgets, *tables])


class Suite:
    """A running suite: the results of every row, and the measurements that are missing."""

    def __init__(self, order: SuiteOptions):
        self.order, self.rows = order, order.rows
        self.failed: dict[str, str] = {}
        order.work.mkdir(parents=True, exist_ok=True)
        self._log = order.work / "worker.log"
        self._worker = Worker(self._log)
        try:
            self.about = self._ask(self._worker, "describe", data=order.data.job["data"])
            self._answers, self._turns = self._files()
        except BaseException as error:
            self.close()
            if isinstance(error, JobFailed):
                raise InputError(str(error)) from error
            raise

    def _files(self) -> tuple[dict[str, AnswerFile[Answered]], dict[str, AnswerFile[SpeedTurn]]]:
        """The stored results of every row. Raises InputError if they belong to something else."""
        order, answers, turns = self.order, {}, {}
        fixed = {"model": self.about["fingerprint"], "program": self.about["program"], "options": dict(order.options)}
        timed = {"requests": REQUESTS, "tokens": MAX_TOKENS}
        for row in self.rows:
            settings = fixed | {"settings": order.settings(row)}
            answers[row.name] = AnswerFile(order.work / ANSWERS, row.name, settings | order.data.job, Answered)
            turns[row.name] = AnswerFile(order.work / SPEED, row.name, settings | timed, SpeedTurn)
        return answers, turns

    # -- stored and missing results
    def answered(self, row: SuiteRow) -> dict[Key, Answered]:
        kept = self._answers[row.name].rows
        return {key: kept[key] for keys in self.order.data.batches() for key in keys if key in kept}

    def turns(self, row: SuiteRow) -> list[SpeedTurn]:
        kept = self._turns[row.name].rows
        return [kept[TURN, number] for number in range(self.order.rounds) if (TURN, number) in kept]

    def unasked(self, row: SuiteRow) -> list[list[Key]]:
        """Unanswered batches, as whole batches, because grouping affects bits. With hotness all batches, since it learns from
        each."""
        data, kept = self.order.data, self._answers[row.name].rows
        missing = [keys for keys in data.batches() if not data.is_done(keys, kept)]
        return data.batches() if missing and "hotness" in row.settings.get("policy", "") else missing

    def unpacked(self) -> list[str]:
        """Formats that rows need and that are not packed."""
        rows = [row for row in self.rows if self.unasked(row) or len(self.turns(row)) < self.order.rounds]
        needed = [formats for row in rows if not self._is_packed(formats := packed_formats(self.order.settings(row)))]
        return list(dict.fromkeys(format for formats in needed for format in formats))

    def _is_packed(self, formats: Sequence[str]) -> bool:
        """Whether the store beside the checkpoint has all of them."""
        return set(formats) <= set(self.about["packed"])

    def outlook(self) -> Outlook:
        return Outlook(
            {
                PACKING: len(self.unpacked()),
                QUESTION: sum(len(keys) for row in self.rows for keys in self.unasked(row)),
                TURN: sum(self.order.rounds - len(self.turns(row)) for row in self.rows),
            }
        )

    # -- measuring
    def run(self, bar: SuiteBar) -> None:
        """Measures everything that is missing; rows that fail are in `failed`."""
        for format in self.unpacked():
            self._pack(format, bar)
        for row in self.rows:
            if row.name not in self.failed and self.unasked(row):
                self._answer(row, bar)
        self.close()
        for number, row in reversing(self.rows, self.order.rounds):
            if row.name not in self.failed and (TURN, number) not in self._turns[row.name].rows:
                self._turn(row, number, bar)

    def _ask(self, worker: Worker, do: str, on_part: Callable[[Any], None] = lambda part: None, **job: Any) -> dict[str, Any]:
        return worker.ask(do, on_part, model=self.order.model, options=dict(self.order.options), **job)

    def _pack(self, format: str, bar: SuiteBar) -> None:
        bar.doing(f"packing {format}")
        began_s, done = time.monotonic(), 0.0

        def tell(share: float) -> None:
            nonlocal began_s, done
            bar.done(PACKING, share - done, time.monotonic() - began_s)
            began_s, done = time.monotonic(), share

        try:
            self._ask(self._worker, "pack", tell, format=format, folder=str(self._store))
        except JobFailed as error:
            bar.outlook.skipped(PACKING, 1 - done)
            for row in self.rows:
                formats = packed_formats(self.order.settings(row))
                if format in formats and not self._is_packed(formats):
                    self._fail(row, str(error), bar)

    def _answer(self, row: SuiteRow, bar: SuiteBar) -> None:
        bar.doing(f"asking: {row.name}")
        began_s = time.monotonic()

        def keep(part: list[Any]) -> None:
            nonlocal began_s
            self._answers[row.name].add({(kind, number): Answered(**fields) for kind, number, fields in part})
            bar.done(QUESTION, len(part), time.monotonic() - began_s)
            began_s = time.monotonic()

        try:
            self._ask(
                self._worker, "answer", keep, settings=self._settings(row), data=self.order.data.job, batches=self.unasked(row)
            )
        except JobFailed as error:
            self._fail(row, str(error), bar)
        else:
            groups = self._accuracy(row)["groups"]
            means = ", ".join(f"{group} {groups[group]['mean']:.1%}" for group in (OTHERS, TEXT) if group in groups)
            bar.say(f"{row.name}: {means}")

    def _turn(self, row: SuiteRow, number: int, bar: SuiteBar) -> None:
        bar.doing(f"timing {number + 1} of {self.order.rounds}: {row.name}")
        began_s = time.monotonic()
        try:
            with Worker(self._log) as fresh:
                found = self._ask(fresh, "speed", settings=self._settings(row), requests=REQUESTS, max_tokens=MAX_TOKENS)
        except JobFailed as error:
            self._fail(row, str(error), bar)
        else:
            self._turns[row.name].add({(TURN, number): SpeedTurn(**found)})
            bar.done(TURN, 1, time.monotonic() - began_s)

    def _fail(self, row: SuiteRow, reason: str, bar: SuiteBar) -> None:
        self.failed[row.name] = reason
        bar.outlook.skipped(QUESTION, sum(map(len, self.unasked(row))))
        bar.outlook.skipped(TURN, self.order.rounds - len(self.turns(row)))
        bar.say(f"{row.name}: not measured: {reason}")

    @property
    def _store(self) -> Path:
        return self.order.work / STORE

    def _settings(self, row: SuiteRow) -> dict[str, Any]:
        """The row's settings, with the folder of packed experts."""
        settings = self.order.settings(row)
        formats = packed_formats(settings)
        where = NO_STORE if not formats else self.about["store"] if self._is_packed(formats) else str(self._store)
        return {**settings, "store": where}

    # -- results
    def result(self) -> dict[str, Any]:
        """Everything measured so far, as suite.json."""
        order, rows = self.order, {}
        for row in self.rows:
            turns = self.turns(row)
            rows[row.name] = {
                "label": row.label,
                "settings": order.settings(row),
                "accuracy": self._accuracy(row) if self.answered(row) else None,
                "speed": speed_of(turns) if turns else None,
                "failed": self.failed.get(row.name),
            }
        tables = [{**asdict(table), "rows": [row.name for row in table.rows]} for table in order.tables]
        asked = {**order.data.job, "asked": order.data.sentence}
        found = {"suite": order.name, "command": order.command, "work": str(order.work), "about": self.about, "questions": asked}
        return {**found, "tables": tables, "rows": rows}

    def _accuracy(self, row: SuiteRow) -> dict[str, Any]:
        return accuracy_of(self.answered(row), self.answered(EXACT), self.order.data.groups)

    def remove_store(self) -> None:
        """Deletes what this suite packed, and the folder if it is then empty."""
        for file in (*self._store.glob("experts.*"), self._store / LOCK):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._store.rmdir()

    def close(self) -> None:
        self._worker.close()


def run_suite(arguments: Namespace) -> int:
    """Measures, writes and prints; returns the exit code."""
    order = SuiteOptions.of(arguments)
    forget(order, arguments.again)
    suite, interrupted = Suite(order), False
    bar = SuiteBar(suite.outlook())
    try:
        with bar.progress:
            suite.run(bar)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        suite.close()
    result = suite.result()
    files = write_report(order.out, result)
    if interrupted:
        kept = f"what was measured is kept in {order.work}, and the same command continues from there"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        if arguments.json:
            print_json(arguments, {"error": {"type": "Interrupted", "message": f"Ctrl-C: {kept}"}})
        return INTERRUPTED
    if not arguments.keep_store:
        suite.remove_store()
    if len(suite.failed) == len(suite.rows):
        raise InputError(f"no row could be measured. The first: {suite.failed[EXACT.name]}")
    if arguments.json:
        print_json(arguments, result)
    else:
        print(markdown(result))
        print(f"written: {', '.join(map(str, files))}", file=sys.stderr)
        if not any(file.suffix == ".png" for file in files):
            print("no plots: matplotlib is not installed. Fix: pip install 'vismoe[eval]'", file=sys.stderr)
    return 0


def forget(order: SuiteOptions, what: str | None) -> None:
    """Deletes a suite's stored results: the speed, or the answers as well."""
    folders = {None: [], "speed": [order.work / SPEED], "all": [order.work / SPEED, order.work / ANSWERS]}
    for folder in folders[what]:
        for row in order.rows:
            (folder / f"{row.name}.jsonl").unlink(missing_ok=True)
