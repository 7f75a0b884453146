"""Reads `--model_args` of lmms-eval, `name=value,name=value`, into arguments of the model class, with the readers of the
flags.
"""

import dataclasses
import typing
from argparse import ArgumentParser
from typing import Any, NoReturn

from vismoe.config import MOST_ROWS, Settings
from vismoe.errors import ConfigError
from vismoe.flags import add_model_flags, add_option, add_request_options, add_settings
from vismoe.ranges import Range, Rule, ValueKind

BATCH_SIZE = Rule("batch_size", (ValueKind(int, Range(1, MOST_ROWS, "requests")),), 1)

SWITCHES = {name for name, hint in typing.get_type_hints(Settings).items() if hint is bool}
OF_VIDEOS = {"fps": float, "max_num_frames": int}  # as the harness's own models name them
NAMES = ("pretrained", "device", "dtype", "revision", "batch_size", "max_new_tokens", "image_tokens", *OF_VIDEOS)
FLAGS = {"pretrained": "model", "max_new_tokens": "max_tokens"}  # names that differ on the command line


class _Reader(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"model_args: {message}")


def model_arguments(text: str) -> dict[str, Any]:
    """`"memory=25%,keep=0.5,batch_size=4"` -> `{"memory": "25%", "keep": 0.5, "batch_size": 4}`; only the given names.

    Raises ConfigError for a part without `=`, an unknown name, a repeated name, and an invalid value.
    """
    parts = [part.strip().split("=", 1) for part in text.split(",") if part.strip()]
    settings = tuple(field.name for field in dataclasses.fields(Settings))
    for part in parts:
        if len(part) == 1:
            raise ConfigError(f"model_args: {part[0]!r} has no value. Fix: name=value,name=value, e.g. memory=25%,keep=0.5")
        if part[0] not in (*NAMES, *settings):
            raise ConfigError(f"model_args: unknown name {part[0]!r}. Fix: use one of {', '.join((*NAMES, *sorted(settings)))}")
    given = dict(parts)
    if len(given) < len(parts):
        raise ConfigError(f"model_args: a name is given twice in {text!r}")
    read = vars(_reader().parse_args(_flags(given)))
    return {name: read[FLAGS.get(name, name)] for name in given if given[name].lower() != "false" or name not in SWITCHES}


def _reader() -> ArgumentParser:
    parser = _Reader(add_help=False, allow_abbrev=False, exit_on_error=True)
    add_model_flags(parser)
    add_request_options(parser, "max_tokens", "image_tokens")
    add_option(parser, BATCH_SIZE)
    for name, kind in OF_VIDEOS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    add_settings(parser)
    return parser


def _flags(given: dict[str, str]) -> list[str]:
    flags = []
    for name, value in given.items():
        flag = f"--{FLAGS.get(name, name).replace('_', '-')}"
        if name not in SWITCHES:
            flags.append(f"{flag}={value}")
        elif value.lower() == "true":
            flags.append(flag)
        elif value.lower() != "false":
            raise ConfigError(f"model_args: {name}={value}: choose true or false")
    return flags
