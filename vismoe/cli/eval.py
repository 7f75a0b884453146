"""`vismoe eval`: questions with known answers, tasks of lmms-eval, the papers' tables, and comparisons of saved results.

Each of these has its own flags. A flag of another one is refused, never ignored.
"""

import argparse
import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vismoe import flags
from vismoe.cli.print import experts_did, experts_lines, print_accuracy
from vismoe.cli.study import study_list
from vismoe.errors import InputError
from vismoe.eval.lmms_arguments import BATCH_SIZE
from vismoe.eval.suite_rows import EVAL_BATCH, SUITE_FLAGS, SUITES, add_suite_arguments

QUESTIONS: dict[str, Any] = {"seed": 0, "n": 50, "batch": EVAL_BATCH}
FLAGS: dict[str, dict[str, Any]] = {  # of each evaluation, by the name of its own flag, with their defaults
    "scenes": {**QUESTIONS, "kinds": None, "world": "demo", "trace": None},
    "lmms": {"batch": EVAL_BATCH, "limit": None, "offset": 0, "max_tokens": None},
    "suite": {**QUESTIONS, **SUITE_FLAGS},
    "compare": {},
}


def eval_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe eval`; those of one evaluation are absent where they are not given."""
    flags.add_one_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    flags.add(what, "--scenes", "ask questions about generated scenes of the demo world")
    flags.add(what, "--lmms TASKS", "run tasks of lmms-eval in its harness, e.g. scenes_pope,scenes_ocr")
    what.add_argument("--suite", choices=SUITES, help="paper: make the papers' tables of this model, in Markdown, JSON and plots")
    what.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="compare two saved results, or FOLDER#ROW of a suite, question by question"
    )

    none = argparse.SUPPRESS
    flags.add(parser, "--seed S", "seed of the held-out scenes (default: 0)", int, none)
    flags.add(parser, "--n N", "questions of each kind (default: 50)", flags.at_least_one, none)
    flags.add(parser, "--kinds KIND", "with --scenes: only these kinds of question, e.g. count where", None, none, nargs="+")
    flags.add(
        parser,
        "--world WORLD",
        "with --scenes: the pictures; demo (default), gallery (eight visual domains), or one domain, e.g. maps",
        None,
        none,
    )
    rows = f"questions asked at once, and rows of a pass (default: {EVAL_BATCH})"
    flags.add(parser, "--batch B", rows, flags.checked(BATCH_SIZE.read), none)
    flags.add(parser, "--trace FOLDER", "with --scenes: record the routing, a question at a time, for vismoe replay", None, none)
    flags.add(parser, "--json", "one JSON object with all results")
    add_suite_arguments(parser)
    group = parser.add_argument_group("with --lmms")
    flags.add(group, "--limit N", "only the first N documents of each task", flags.at_least_one, none)
    flags.add(group, "--offset N", "skip the first N documents (default: 0)", int, none)
    flags.add_request_options(group, "max_tokens")
    flags.add_model_flags(parser)
    flags.add_settings(parser)


def settled(arguments: Namespace) -> str:
    """Which evaluation to run; sets the defaults of its flags. Raises InputError for flags of another one."""
    asked = next(name for name in FLAGS if getattr(arguments, name))
    own = FLAGS[asked]
    for name in dict.fromkeys(name for known in FLAGS.values() for name in known):
        if name in arguments and name not in own:
            others = " and ".join(f"--{other}" for other, known in FLAGS.items() if name in known)
            raise InputError(f"--{name.replace('_', '-')} goes with {others}, not with --{asked}. Fix: leave it out")
    if asked == "compare" and (
        arguments.words or arguments.model or flags.model_options(arguments) or flags.given_settings(arguments)
    ):
        raise InputError("--compare reads two saved results and runs no model. Fix: leave out the model and its settings")
    for name, value in own.items():
        if name not in arguments:
            setattr(arguments, name, value)
    return asked


def run_eval(arguments: Namespace) -> int:
    """Runs questions, a suite of them, or a comparison of saved results."""
    asked = settled(arguments)
    if asked == "compare":
        from vismoe.eval.compare import run_compare

        return run_compare(arguments)
    if asked == "suite":
        with flags.quick_imports():
            from vismoe.eval.suite import run_suite

        return run_suite(arguments)
    return run_lmms(arguments) if asked == "lmms" else run_scenes(arguments)


def run_scenes(arguments: Namespace) -> int:
    """Asks the questions, as many at a time as were asked for and fit the planned context."""
    model = flags.one_model(arguments)
    flags.given_settings(arguments)
    with flags.quick_imports():
        from vismoe.eval.accuracy import evaluate
        from vismoe.eval.questions import FORMS, KINDS
        from vismoe.eval.scenes import WORLDS

    if arguments.world not in WORLDS:
        raise InputError(f"no such world: {arguments.world}. Fix: choose among {', '.join(WORLDS)}")
    if unknown := set(arguments.kinds or ()) - set(KINDS + FORMS):
        raise InputError(f"no such kind of question: {', '.join(sorted(unknown))}. Fix: choose among {', '.join(KINDS + FORMS)}")

    def scenes(engine: Any) -> dict[str, Any]:
        if not hasattr(engine.processor, "image_processor"):
            raise InputError(
                f"{engine.name} is a text model; the questions are about pictures. Fix: choose a vision-language model"
            )
        recording = engine.record(arguments.trace) if arguments.trace else contextlib.nullcontext()
        with Progress(console=Console(stderr=True), transient=True) as bar, recording:
            task = bar.add_task("questions", total=None)
            return evaluate(
                engine,
                arguments.seed,
                arguments.n,
                arguments.kinds or KINDS + FORMS,
                together=arguments.batch,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                world=arguments.world,
            )

    return reported(arguments, model, scenes, print_accuracy)


def run_lmms(arguments: Namespace) -> int:
    """Runs tasks of lmms-eval through its own harness in this process."""
    model = flags.one_model(arguments)
    flags.given_settings(arguments)
    tasks = [name for name in arguments.lmms.split(",") if name]
    if not tasks:
        raise InputError("--lmms names no task. Fix: e.g. --lmms scenes_pope,scenes_ocr")
    if find_spec("lmms_eval") is None:
        raise InputError('--lmms needs lmms-eval, which is not installed. Fix: pip install "vismoe[eval]"')
    with flags.quick_imports():
        from vismoe.eval.lmms_run import run_tasks

    given = (tasks, arguments.limit, arguments.offset, arguments.batch, arguments.max_tokens)
    return reported(arguments, model, lambda engine: run_tasks(engine, *given), print_scores)


def reported(
    arguments: Namespace, model: str | None, evaluate: Callable[[Any], Any], show: Callable[[Console, Any], None]
) -> int:
    """Evaluates on one engine; prints the result, and the cache statistics of the experts."""
    with flags.load_engine(arguments, model, {"parallel": arguments.batch}) as engine:
        before = engine.metrics.snapshot()
        result = evaluate(engine)
        did = experts_did(engine, engine.metrics.snapshot() - before)
    if arguments.json:
        flags.print_json(arguments, {**result, **did})
    else:
        show(Console(), result)
        print(experts_lines(did))
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


EVAL = flags.Command(
    "measure accuracy on questions with known answers; run the studies of the tables in docs/",
    eval_arguments,
    run_eval,
    f"""\
  vismoe eval --scenes --n 100                                   the demo model on held-out scenes
  vismoe eval --scenes --memory 25% --json                       the same under a budget: the same answers
  vismoe eval --lmms scenes_pope,scenes_ocr --limit 40 --json    lmms-eval's own harness, offline
  vismoe eval --scenes --policy importance --formats 4/2         critical experts in int4, others in int2 (run vismoe pack first)
  vismoe eval --suite paper --out results                        accuracy, speed and memory by keep, selection, formats and memory
  vismoe eval --compare results#int4 results#exact               which questions int4 loses, and whether chance explains it
studies, each with its own flags (vismoe eval STUDY --help):
{study_list()}""",
)
