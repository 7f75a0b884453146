"""`vismoe eval --lmms TASK[,TASK]`: tasks of lmms-eval, through its own harness in this process."""

import argparse
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from vismoe.cli.print import experts_did, experts_line
from vismoe.errors import InputError
from vismoe.flags import add, add_request_options, at_least_one, given_settings, load_engine, one_model, print_json

__all__ = ["LMMS_FLAGS", "add_lmms_arguments", "run_lmms"]

LMMS_FLAGS: dict[str, Any] = {"limit": None, "offset": 0, "max_tokens": None}  # with their defaults


def add_lmms_arguments(parser: ArgumentParser) -> None:
    """Adds the flags that `--lmms` has besides those of every evaluation."""
    group = parser.add_argument_group("with --lmms")
    none = argparse.SUPPRESS
    add(group, "--limit N", "only the first N documents of each task", at_least_one, none)
    add(group, "--offset N", "skip the first N documents (default: 0)", int, none)
    add_request_options(group, "max_tokens")


def run_lmms(arguments: Namespace) -> int:
    """Runs the tasks on one engine; prints their scores, and the cache statistics of the experts."""
    model = one_model(arguments)
    given_settings(arguments)
    tasks = [name for name in arguments.lmms.split(",") if name]
    if not tasks:
        raise InputError("--lmms names no task. Fix: e.g. --lmms scenes_pope,scenes_ocr")
    if find_spec("lmms_eval") is None:
        raise InputError('--lmms needs lmms-eval, which is not installed. Fix: pip install "vismoe[eval]"')
    from vismoe.eval.lmms_run import run_tasks

    with load_engine(arguments, model) as engine:
        before = engine.metrics.snapshot()
        result = run_tasks(engine, tasks, arguments.limit, arguments.offset, arguments.batch, arguments.max_tokens)
        did = experts_did(engine, engine.metrics.snapshot() - before)
    if arguments.json:
        print_json(arguments, {**result, **did})
    else:
        print_scores(Console(), result)
        print(experts_line(did))
    return 0


def print_scores(console: Console, result: dict[str, Any]) -> None:
    """A line per task and metric, with the standard error that lmms-eval gives."""
    table = Table(box=None)
    for name in ("task", "documents", "metric", "score", "standard error"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for task, scores in result["tasks"].items():
        documents = sum(answer["task"] == task for answer in result["answers"])
        for metric, score in scores.items():
            if "_stderr" not in metric:
                error = scores.get(f"{metric}_stderr")
                table.add_row(task, str(documents), metric, f"{score:.4g}", "" if error is None else f"{error:.2g}")
    console.print(table)
