"""What the commands of studies have in common: parsers, folders, and the result as one JSON object on the last line of
stdout, or an error on stderr.
"""

import json
import sys
import tempfile
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from vismoe.errors import VisMoEError
from vismoe.eval.questions import KINDS
from vismoe.eval.scenes import WORLDS
from vismoe.flags import SuggestingParser


def study_parser(program: str | None, about: str) -> SuggestingParser:
    """A parser whose help shows `about` as it is written."""
    return SuggestingParser(prog=program, description=about, formatter_class=RawDescriptionHelpFormatter)


def add_several(
    parser: SuggestingParser, flag: str, default: Sequence[Any], metavar: str, meaning: str, read: Callable[[str], Any] = str
) -> None:
    """A flag with one or more values."""
    parser.add_argument(flag, nargs="+", type=read, default=list(default), metavar=metavar, help=meaning)


def told(study: Callable[[], dict[str, Any]]) -> int:
    """Prints the result of `study`; returns the exit code of the command."""
    try:
        print(json.dumps(study()))
    except VisMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """`kept`, created if missing; without it, a temporary folder."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="vismoe-study-") as folder:
        yield Path(folder)


def run_on_questions(
    parser: SuggestingParser,
    arguments: Sequence[str] | None,
    work: Path,
    measure: Callable[[Namespace, str, int], dict[str, Any]],
    print_summary: Callable[[Console, dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], Any] | None = None,
    *,
    usual: Callable[[Namespace], int] | None = None,
    work_help: str = "folder for answers",
    too_few: str = "--questions must be at least 1",
    width: int | None = None,
) -> int:
    """The command of a study of answers, whose `parser` has --questions: parse, measure, plot, print; returns the exit code.

    `measure` gets the arguments, the model, and the number of questions of each kind; `usual`: how many questions there are if
    none are given; `width`: columns of tables in a file.
    """
    from vismoe.engine.engine import demo_model  # with torch, which not every command needs

    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name (default: the bundled demo model)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the held-out scenes (default: 0)")
    parser.add_argument("--world", choices=WORLDS, default="demo", help="the pictures of the questions (default: demo)")
    parser.add_argument("--work", type=Path, default=work, metavar="DIR", help=f"{work_help} (default: {work})")
    if draw is not None:
        parser.add_argument("--figures", type=Path, metavar="DIR", help="folder for the plots")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    chosen = parser.parse_args(arguments)
    asked = usual(chosen) if usual is not None and chosen.questions is None else chosen.questions
    if asked < 1:
        parser.error(too_few)
    try:
        result = measure(chosen, str(chosen.model or demo_model()), -(-asked // len(KINDS)))
    except VisMoEError as error:
        print(error, file=sys.stderr)
        return 1
    if draw is not None and chosen.figures:
        draw(result, chosen.figures)
    if not chosen.json:
        print_summary(Console(width=None if width is None or sys.stdout.isatty() else width), result)
    print(json.dumps(result))
    return 0
