"""`vismoe serve`: the OpenAI-compatible server. Its flags come from `ServeOptions`, which holds every default."""

import argparse
import contextlib
import importlib.util
import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from vismoe import flags
from vismoe.app.options import ServeOptions, is_api_key
from vismoe.cli.ray import add_ray_flags, ray_options, run_on_ray
from vismoe.config import SERVER_DEFAULTS, format_bytes
from vismoe.errors import ConfigError
from vismoe.ranges import Rule, Several, rules_of

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "httpx")
LOG_LEVELS = ("debug", "info", "warning", "error")


OPTIONS = {name: rule for name, rule in rules_of(ServeOptions).items() if rule.meaning}  # others have flags of their own
# Other flags have the names of their fields.
FLAGS = {
    "allow_hosts": "--allow-host",
    "allow_origins": "--allow-origin",
    "max_body_bytes": "--max-body",
    "image_timeout_s": "--image-timeout",
    "video_timeout_s": "--video-timeout",
    "memory_timeout_s": "--memory-timeout",
    "body_timeout_s": "--body-timeout",
    "drain_s": "--drain-seconds",
}


def serve_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe serve`."""
    flags.add_one_model(parser)
    group = parser.add_argument_group("server")
    flags.add(group, "--api-key KEY", "key that clients must send; repeat for more keys", default=[], action="append")
    flags.add(group, "--api-key-file FILE", "file of keys, one a line, # for comments; hides keys from other users", Path)
    for rule in OPTIONS.values():
        _add_flag(group, rule)
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="info logs a line per request (default: info)")
    flags.add_request_options(parser, "max_tokens", "image_tokens")
    flags.add_model_flags(parser)
    flags.add_settings(parser, SERVER_DEFAULTS)
    add_ray_flags(parser)


def _add_flag(group: Any, rule: Rule) -> None:
    kind, default = rule.kinds[0], rule.default
    options: dict[str, Any] = {"dest": rule.name, "default": argparse.SUPPRESS, "help": rule.meaning}
    if isinstance(kind, Several):
        options |= {"action": "append", "metavar": rule.placeholder}
    elif kind.type is bool:
        options["action"] = "store_true"
    else:
        in_bytes = kind.range.unit == "bytes"
        options |= {"type": flags.size if in_bytes else kind.type, "metavar": rule.placeholder}
        if default is not None:
            options["help"] += f" (default: {format_bytes(default) if in_bytes else default})"
    group.add_argument(FLAGS.get(rule.name, f"--{rule.name.replace('_', '-')}"), **options)


def serve_options(arguments: Namespace) -> ServeOptions:
    """The server options from these flags. Raises ConfigError."""
    given = {name: getattr(arguments, name) for name in OPTIONS if name in arguments}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    keys = (*arguments.api_key, *(_keys_in(arguments.api_key_file) if arguments.api_key_file else ()))
    return ServeOptions(api_keys=keys, **{**given, **lists, **flags.given_options(arguments)})


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
    flags.given_settings(arguments)
    if on_ray:
        return run_on_ray(arguments, options, on_ray)
    model = flags.one_model(arguments)
    with contextlib.ExitStack() as stack:
        with flags.reading_ahead(arguments, model, SERVER_DEFAULTS):
            with flags.quick_imports():
                import vismoe.engine.engine  # noqa: F401  # which `load_engine` needs
                from vismoe.app.serving import listening, serve

            logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # VisMoE announces the steps itself
            listener = stack.enter_context(listening(options))
            engine = stack.enter_context(flags.load_engine(arguments, model, SERVER_DEFAULTS))
        return serve(engine, options, listener)


SERVE = flags.Command(
    "run an OpenAI-compatible server, by default for this machine only",
    serve_arguments,
    run_serve,
    """\
  vismoe serve                                                   http://127.0.0.1:8000/v1, the bundled demo model
  vismoe serve Qwen/Qwen3-VL-30B-A3B-Instruct --memory 20GiB --keep 0.5
  vismoe serve --host 0.0.0.0 --api-key-file keys.txt            serve other machines, with an API key
  vismoe serve --image-folder ~/pictures --allow-remote-images   images by path and by URL, besides data URIs
  vismoe serve MODEL --ray --replicas 2 --memory 20GiB           two replicas on the Ray cluster of this machine
Needs fastapi, uvicorn and prometheus_client: pip install "vismoe[serve]", in a checkout: .venv/bin/pip install -e ".[serve]".""",
)
