"""`vismoe serve`: the OpenAI-compatible server. Its flags come from `ServeOptions`, which holds every default."""

import argparse
import dataclasses
import importlib.util
import logging
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vismoe.app.options import ServeOptions, is_api_key
from vismoe.cli.ray import add_ray_flags, ray_options, run_on_ray
from vismoe.config import SERVER_DEFAULTS, format_bytes, parse_bytes
from vismoe.errors import ConfigError
from vismoe.flags import (
    Command,
    add_model_flags,
    add_one_model,
    add_request_options,
    add_settings,
    given_options,
    given_settings,
    load_engine,
    one_model,
)

__all__ = ["SERVE"]

PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client", "httpx")
LOG_LEVELS = ("debug", "info", "warning", "error")


def size(text: str) -> int:
    """`20MiB` -> bytes."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error


# The meaning of each option for a user: (placeholder, reader, sentence). A test checks that they match ServeOptions.
MEANINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "host": ("ADDRESS", str, "address to listen on; other machines can only be served with an API key"),
    "port": ("PORT", int, "port to listen on; 0 takes any free port"),
    "no_api_key": ("", bool, "serve other machines without an API key"),
    "served_model_name": ("NAME", str, "model name for clients (default: the name of its folder or repository)"),
    "allow_hosts": ("NAME", str, "a further host name of this server, e.g. of a reverse proxy; repeat for more"),
    "allow_origins": (
        "ORIGIN",
        str,
        "origin of a web page that may call the server, e.g. http://localhost:3000; repeat for more",
    ),
    "allow_remote_images": ("", bool, "download images that requests name by http(s) URL, only from public addresses"),
    "image_folder": ("FOLDER", Path, "requests may name images in this folder by path"),
    "max_body_bytes": ("SIZE", size, "largest request"),
    "max_images": ("N", int, "most images in a request"),
    "max_pixels": ("N", int, "most pixels in an image"),
    "max_image_bytes": ("SIZE", size, "largest encoded image"),
    "image_timeout_s": ("SECONDS", float, "longest time to download a request's images"),
    "no_reuse": (
        "",
        bool,
        "compute every prompt completely: bits do not depend on earlier requests, but the first word takes longer",
    ),
    "fixed_policy": ("", bool, "refuse requests for another policy or other formats, which make all other requests wait"),
    "max_waiting": ("N", int, "most waiting requests; further ones are refused (429)"),
    "memory_timeout_s": (
        "SECONDS",
        float,
        "longest wait of a request for memory that other requests hold (--request-memory), then 429",
    ),
    "body_timeout_s": ("SECONDS", float, "longest time for a request to arrive"),
    "drain_s": ("SECONDS", float, "time at shutdown to finish running answers"),
}
FLAGS = {
    "allow_hosts": "--allow-host",
    "allow_origins": "--allow-origin",
    "max_body_bytes": "--max-body",
    "image_timeout_s": "--image-timeout",
    "memory_timeout_s": "--memory-timeout",
    "body_timeout_s": "--body-timeout",
    "drain_s": "--drain-seconds",
}  # other flags have the names of their fields


def serve_arguments(parser: ArgumentParser) -> None:
    add_one_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="key that clients must send; repeat for more keys"
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file of keys, one a line, # for comments; hides keys from other users"
    )
    for field in dataclasses.fields(ServeOptions):
        if field.name in MEANINGS:
            _add_flag(group, field)
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="info logs a line per request (default: info)")
    add_request_options(parser, "max_tokens", "image_tokens")
    add_model_flags(parser)
    add_settings(parser, SERVER_DEFAULTS)
    add_ray_flags(parser)


def _add_flag(group: Any, field: "dataclasses.Field[Any]") -> None:
    placeholder, reader, meaning = MEANINGS[field.name]
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": meaning}
    if reader is bool:
        options["action"] = "store_true"
    else:
        options |= {"type": reader, "metavar": placeholder}
        default: Any = field.default
        shown = format_bytes(default) if reader is size else default
        if default == ():
            options["action"] = "append"
        elif default is not None:
            options["help"] += f" (default: {shown})"
    group.add_argument(FLAGS.get(field.name, f"--{field.name.replace('_', '-')}"), **options)


def serve_options(arguments: Namespace) -> ServeOptions:
    """The server options from these flags. Raises ConfigError."""
    given = {name: getattr(arguments, name) for name in MEANINGS if name in arguments}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    keys = (*arguments.api_key, *(_keys_in(arguments.api_key_file) if arguments.api_key_file else ()))
    return ServeOptions(api_keys=keys, **{**given, **lists, **given_options(arguments)})


def _keys_in(file: Path) -> list[str]:
    """The keys in a file, one a line, without blank lines and comments. Raises ConfigError, which shows no key."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: API keys cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    for number, key in numbered:
        if not is_api_key(key) or " " in key:
            raise ConfigError(
                f"{file}, line {number}: not an API key. Fix: printable ASCII without blanks, one a line; comments begin with #"
            )
    if not numbered:
        raise ConfigError(f"{file}: the file has no API key. Fix: write one key a line")
    return [key for _, key in numbered]


def require_packages(*further: str) -> None:
    """Raises ConfigError if a package of the server or one of `further` is missing; extras have the names of `further`."""
    missing = [name for name in (*PACKAGES, *further) if importlib.util.find_spec(name) is None]
    if missing:
        extra = further[0] if further else "serve"
        raise ConfigError(
            f'the server needs {", ".join(missing)}, which is not installed. Fix: pip install "vismoe[{extra}]", '
            f'in a checkout: .venv/bin/pip install -e ".[{extra}]"'
        )


def run_serve(arguments: Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; errors in the options are reported before the model is loaded."""
    on_ray = ray_options(arguments)
    require_packages(*(["ray"] if on_ray else []))
    options = serve_options(arguments)
    given_settings(arguments)
    if on_ray:
        return run_on_ray(arguments, options, on_ray)
    from vismoe.app.serving import listening, serve

    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # VisMoE announces the steps itself
    with listening(options) as listener, load_engine(arguments, one_model(arguments), SERVER_DEFAULTS) as engine:
        return serve(engine, options, listener)


SERVE = Command(
    "run an OpenAI-compatible server, by default for this machine only",
    serve_arguments,
    run_serve,
    """\
  vismoe serve                                                   http://127.0.0.1:8000/v1, the bundled demo model
  vismoe serve Qwen/Qwen3-VL-30B-A3B-Instruct --memory 20GiB --keep 0.5
  vismoe serve --host 0.0.0.0 --api-key-file keys.txt            serve other machines, with an API key
  vismoe serve --image-folder ~/pictures --allow-remote-images   images by path and by URL, besides data URIs
  vismoe serve MODEL --ray --replicas 2 --memory 20GiB           two replicas on the Ray cluster of this machine
Needs fastapi, uvicorn and openai: pip install "vismoe[serve]", in a checkout: .venv/bin/pip install -e ".[serve]".""",
)
