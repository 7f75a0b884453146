"""The `vismoe` command: `chat`, `ui`, `serve`, `plan`, `pack`, `eval`, `replay`, `simulate`, `calibrate`,
`doctor`, `bench`, `gpu-check`.

Exit codes: 0; 2 for an error that the user can fix, reported in one message without a traceback; 130 after Ctrl-C. With `--json`
stdout is exactly one JSON object, `{"error": ...}` for an error. Heavy imports happen after the arguments are parsed.
"""

import argparse
import contextlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from vismoe.cli.bench import BENCH
from vismoe.cli.calibrate import CALIBRATE
from vismoe.cli.chat import CHAT, UI
from vismoe.cli.doctor import DOCTOR
from vismoe.cli.eval import EVAL
from vismoe.cli.gpu_check import GPU_CHECK
from vismoe.cli.measure import PLAN, REPLAY
from vismoe.cli.pack import PACK
from vismoe.cli.serve import SERVE
from vismoe.cli.simulate import SIMULATE
from vismoe.cli.study import STUDIES, run_study
from vismoe.errors import ConfigError, VisMoEError
from vismoe.flags import INTERRUPTED, SuggestingParser, did_you_mean, error_report, print_json

REFUSED = 2
EVALUATIONS = ("--scenes", "--lmms", "--suite", "--compare")  # the evaluations of a model by `vismoe eval`

OVERVIEW = """\
examples:
  vismoe chat --image photo.jpg "What is in the picture?"       the bundled demo model
  vismoe chat Qwen/Qwen3-VL-30B-A3B-Instruct --memory 20GiB     a conversation, in at most 20 GiB of memory
  vismoe plan Qwen/Qwen3-VL-30B-A3B-Instruct --memory 8GiB      how memory would be divided; downloads no weights
  vismoe COMMAND --help                                         more about one command"""
COMMANDS = {
    "chat": CHAT,
    "ui": UI,
    "serve": SERVE,
    "plan": PLAN,
    "pack": PACK,
    "calibrate": CALIBRATE,
    "eval": EVAL,
    "replay": REPLAY,
    "simulate": SIMULATE,
    "doctor": DOCTOR,
    "bench": BENCH,
    "gpu-check": GPU_CHECK,
}


class CommandParser(SuggestingParser):
    """Reports errors like the rest of the command: one message, exit code 2, with `--json` as a JSON object."""

    def error(self, message: str) -> NoReturn:
        message = self.suggesting(message)
        raise ConfigError(message if "Fix: " in message else f"{message}. Fix: {self.prog} --help lists all arguments")


def command_parser(name: str) -> ArgumentParser:
    """The parser of one subcommand."""
    command = COMMANDS[name]
    parser = CommandParser(
        prog=f"vismoe {name}",
        description=command.summary,
        epilog=f"examples:\n{command.examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser


def overview_parser() -> ArgumentParser:
    """The parser of the word behind `vismoe`."""
    commands = "\n".join(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        prog="vismoe",
        description="Vision-language mixture-of-experts models under a memory budget.",
        epilog=f"commands:\n{commands}\n\n{OVERVIEW}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    return parser


def refuse_unknown_command(name: str) -> None:
    """Raises ConfigError, with the most similar command."""
    known = (*COMMANDS, "--help", "--version")
    if name not in (*known, "-h"):
        raise ConfigError(f"{name}: no such command{did_you_mean(name, known)}. Fix: one of {', '.join(COMMANDS)}")


def refuse_unknown_study(argv: Sequence[str]) -> None:
    """Raises ConfigError if the word after `vismoe eval` is probably a misspelt study rather than a model."""
    word = argv[0] if argv and not argv[0].startswith("-") else ""
    asked = any(flag.partition("=")[0] in EVALUATIONS for flag in argv)
    if not asked and (meant := did_you_mean(word, STUDIES)):
        raise ConfigError(f"{word}: no such study{meant}. Fix: vismoe eval --help lists the studies")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"vismoe {version('vismoe')}"
    except PackageNotFoundError:
        return "vismoe, not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        overview_parser().print_help()
        return REFUSED
    wants_json = "--json" in argv[1:]
    arguments = argparse.Namespace(stdout=sys.stdout)
    try:
        refuse_unknown_command(argv[0])
        name = overview_parser().parse_args(argv[:1]).command
        if name == "eval" and argv[1:2] and argv[1] in STUDIES:
            return run_study(argv[1], argv[2:])
        if name == "eval":
            refuse_unknown_study(argv[1:])
        command_parser(name).parse_intermixed_args(argv[1:], arguments)
        with contextlib.redirect_stdout(sys.stderr) if wants_json else contextlib.nullcontext():
            return COMMANDS[name].run(arguments)
    except VisMoEError as error:
        if wants_json:
            print_json(arguments, error_report(error))
        else:
            print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output closed it, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
