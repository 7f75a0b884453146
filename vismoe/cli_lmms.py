"""`vismoe eval --lmms TASK[,TASK]`: tasks of lmms-eval, through its own harness in this process."""

from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from vismoe.cli_options import at_least_one, given_settings, load_engine, one_model, print_json
from vismoe.cli_print import hit_rate
from vismoe.config import format_bytes
from vismoe.errors import InputError

__all__ = ["add_lmms_arguments", "run_lmms"]


def add_lmms_arguments(parser: ArgumentParser) -> None:
    """What `--lmms` takes besides the flags of every evaluation."""
    group = parser.add_argument_group("with --lmms")
    group.add_argument("--limit", type=at_least_one, metavar="N", help="only the first N documents of each task")
    group.add_argument("--offset", type=int, default=0, metavar="N", help="leave out the first N documents (default: 0)")


def run_lmms(arguments: Namespace) -> int:
    """Runs the tasks on one engine; prints their scores, and what the experts' cache did meanwhile."""
    model = one_model(arguments)
    given_settings(arguments)
    tasks = [name for name in arguments.lmms.split(",") if name]
    if not tasks:
        raise InputError("--lmms names no task. Fix: e.g. --lmms scenes_pope,scenes_ocr")
    if arguments.trace or arguments.kinds or arguments.seed:
        raise InputError("--trace, --kinds and --seed belong to --scenes. Fix: leave them out; --offset asks other documents")
    if find_spec("lmms_eval") is None:
        raise InputError('--lmms needs lmms-eval, which is not installed. Fix: pip install "vismoe[eval]"')
    from vismoe.eval.lmms_run import run_tasks

    with load_engine(arguments, model) as engine:
        before = engine.metrics.snapshot()
        result = run_tasks(engine, tasks, arguments.limit, arguments.offset, arguments.batch)
        cache = (engine.metrics.snapshot() - before).to_json()
        plan = engine.plan.to_json()
    if arguments.json:
        print_json(arguments, {**result, "plan": plan, "cache": cache})
    else:
        print_scores(Console(), result)
        print(f"memory {plan['memory']}: {hit_rate(cache)}, {format_bytes(cache['bytes_read'])} read")
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
