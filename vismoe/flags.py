"""Command-line flags: every field of `Settings` becomes one flag, and those of `RequestOptions` that a command takes.

A flag that was not given is not passed on, so that the engine's own defaults hold. Nothing here imports torch.
"""

import argparse
import contextlib
import difflib
import functools
import gc
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from vismoe.after_import import after_import
from vismoe.config import ENGINE_DEFAULTS, READ_AHEAD_BY, READ_AHEAD_OPTIONS, SETTINGS, Settings, parse_bytes
from vismoe.errors import BudgetError, ConfigError, InputError, VisMoEError
from vismoe.options import OPTIONS
from vismoe.ranges import PATH_BEGINNINGS, Rule, file_name, shown

if TYPE_CHECKING:
    from vismoe.engine.engine import Engine


@dataclass(frozen=True)
class Command:
    """One subcommand: a line about it, what reads its arguments, what it does (returning the exit code), and examples."""

    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    examples: str


NO_FURTHER: Mapping[str, str] = {}
FLAG = re.compile(r"-[^\d.\s]\S*$")  # and no number
INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C
DTYPES = ("bfloat16", "float16", "float32")
SAMPLED = 8  # files of many that tell whether these are in memory
DIGITS = 18  # of a number that is read: what 64 bits hold
IMPORT_UTILS = "transformers.utils.import_utils"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_and_question(words: list[str], model: str | None) -> tuple[str | None, str | None]:
    """(model, question) among the words of `vismoe chat`; `model` is that of `--model`, which leaves only the question.

    Two words are MODEL and QUESTION. One word is a model when it looks like one: an existing folder, a path, a .gguf file, or a
    hub name such as Qwen/Qwen3-VL-30B-A3B-Instruct. Anything with a blank or a question mark in it, and any other word, is a
    question.
    """
    if len(words) > (1 if model else 2):
        raise InputError(f'{len(words)} separate words: put the question in quotes, e.g. vismoe chat "{" ".join(words)}"')
    if len(words) == 2:
        return _expanded(words[0]), words[1]
    if not words or model:
        return _expanded(model), words[0] if words else None
    word = words[0]
    is_question = any(letter.isspace() for letter in word) or "?" in word
    names_a_model = word.startswith(PATH_BEGINNINGS) or HUB_NAME.fullmatch(word) or os.path.isdir(word) or word.endswith(".gguf")
    return (_expanded(word), None) if names_a_model and not is_question else (None, word)


def _expanded(model: str | None) -> str | None:
    """A quoted `~/model` as the shell would have expanded it. Raises ConfigError."""
    return str(file_name(model).expanduser()) if model and model.startswith("~") else model


def add(
    parser: Any, spec: str, meaning: str, read: Callable[[str], Any] | None = None, default: Any = None, **options: Any
) -> None:
    """Adds the flag `--name VALUE`, or the switch `--name`, to a parser or a group of one."""
    name, _, value = spec.partition(" ")
    options |= {"metavar": value, "type": read, "default": default} if value else {"action": "store_true"}
    parser.add_argument(name, help=meaning, **options)


def add_model_flags(parser: ArgumentParser) -> None:
    """`--model` and how to load it."""
    group = parser.add_argument_group("model")
    add(group, "--model MODEL", "hub name or folder (default: the bundled demo model)")
    add(group, "--revision REV", "branch, tag or commit of a hub model")
    add(group, "--device DEVICE", "cpu, cuda or cuda:1 (default: cuda where there is one)", device_name)
    group.add_argument("--dtype", choices=DTYPES, help="what to compute in (default: the checkpoint's own)")


def model_options(arguments: Namespace) -> dict[str, Any]:
    """How to load the model, as far as it was given."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "revision") if getattr(arguments, name)}


def add_one_model(parser: ArgumentParser, meaning: str = "hub name or folder (default: the bundled demo model)") -> None:
    """The model as a positional argument; `one_model` reads it."""
    parser.add_argument("words", nargs="*", metavar="[MODEL]", help=meaning)


def one_model(arguments: Namespace) -> str | None:
    """The model of a command that takes no question: positional or `--model`, None for the demo model."""
    names = [*arguments.words, *filter(None, [arguments.model])]
    if len(names) > 1:
        raise InputError(f"one model at a time, not {len(names)}: {' '.join(names)}")
    return _expanded(names[0]) if names else None


def add_settings(parser: ArgumentParser, further: Mapping[str, str] = NO_FURTHER, without: Sequence[str] = ()) -> None:
    """One flag for each field of Settings, in its order, with its default in the help: `further` holds those that differ;
    `without`: fields that get none."""
    defaults = {**ENGINE_DEFAULTS, **further}
    group = parser.add_argument_group("memory and paging")
    for name, rule in ((name, rule) for name, rule in SETTINGS.items() if name not in without):
        default = defaults.get(name, "none" if rule.default is None else rule.default)
        names_none = rule.placeholder.endswith("|none")  # a value of its own; the meaning says what holds without the flag
        add_option(group, rule, "" if names_none else f" (default: {default})")


def add_request_options(parser: Any, *names: str) -> None:
    """A flag for each of these fields of RequestOptions."""
    for name in names:
        add_option(parser, OPTIONS[name])


def add_option(group: Any, rule: Rule, further: str = "") -> None:
    """The flag of one option; `further`: a text behind its meaning."""
    options: dict[str, Any] = {"help": f"{rule.meaning}{further}".replace("%", "%%"), "default": argparse.SUPPRESS}
    if rule.choices:
        options["choices"] = rule.choices
    elif isinstance(rule.default, bool):
        options["action"] = "store_true"
    else:
        options |= {"type": READERS.get(rule.name) or checked(rule.read), "metavar": rule.placeholder}
    group.add_argument(f"--{rule.name.replace('_', '-')}", **options)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for a flag: argparse reports its ConfigError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from error

    return read


size = checked(parse_bytes)
bytes_per_s = checked(lambda text: float(parse_bytes(text)))


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """The settings that were given as flags, checked; raises ConfigError."""
    given = {name: getattr(arguments, name) for name in SETTINGS if name in arguments}
    Settings.of(**given)
    return given


def given_options(arguments: Namespace) -> dict[str, Any]:
    """The options of requests that were given as flags."""
    return {name: getattr(arguments, name) for name in OPTIONS.keys() - SETTINGS.keys() if name in arguments}


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or len(text) > DIGITS or int(text) < 1:
        raise ArgumentTypeError(f"{shown(text)} is not a whole number of at least 1, with at most {DIGITS} digits")
    return int(text)


def device_name(text: str) -> str:
    """`cpu`, `cuda` or `cuda:N`."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ArgumentTypeError(f"{text!r} is no device; choose cpu, cuda or e.g. cuda:1")
    return text


def image_token_range(text: str) -> tuple[int, int]:
    """`64..1024` -> (64, 1024)."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    least, most = (int(number[:DIGITS]) for number in match.groups()) if match else (0, 0)
    if not OPTIONS["image_tokens"].holds((least, most)) or least > most:
        raise ArgumentTypeError(f"{shown(text)} is not MIN..MAX, e.g. 64..1024 visual tokens for each image")
    return least, most


def text_or_file(text: str) -> str:
    """`@FILE` -> its text."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{text[1:]} cannot be read: {error}") from error


READERS = {  # of what is not typed as it is meant
    "emulated_link_bytes_per_s": bytes_per_s,
    "image_tokens": image_token_range,
    "json_schema": text_or_file,
    "grammar": text_or_file,
}


@contextlib.contextmanager
def signals_call(handler: Callable[[int, Any], Any], *numbers: int) -> Iterator[None]:
    """Within, these signals call `handler`."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def ctrl_c_exits(arguments: Namespace) -> Iterator[None]:
    """Within, Ctrl-C ends the process at once. While libraries are imported and a model is read there is nothing to put in order,
    and a KeyboardInterrupt could be lost in a library's destructor or arrive wrapped in an ImportError.
    """

    def leave(number: int, frame: Any) -> None:
        print("\ninterrupted", file=sys.stderr, flush=True)
        if getattr(arguments, "json", False):
            print_json(arguments, {"error": {"type": "Interrupted", "message": "Ctrl-C while loading"}})
        os._exit(INTERRUPTED)

    with signals_call(leave, signal.SIGINT):
        yield


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Within, torch and transformers are imported in two thirds of the time, in a process that is ours.

    They make a million objects that stay. The garbage collector sleeps meanwhile, and never looks through these objects later:
    not while tokens are made, and not when the process ends. scipy is imported when its function is called. transformers reads
    its 2,600 files once to find what they define: it asks twice, and remembers the answers for 128 of its 500 folders. Where
    the page cache lacks them, the disk begins with all while torch is imported.
    """
    if "transformers" in sys.modules:
        yield
        return
    gc.disable()
    with contextlib.suppress(RuntimeError):  # no more threads may be started
        threading.Thread(target=_expect_sources, name="vismoe-expect", daemon=True).start()
    after_import(IMPORT_UTILS, _remember_all_folders)
    try:
        with _scipy_later():
            yield
    finally:
        gc.freeze()
        gc.enable()


def _expect_sources() -> None:
    """Announce reads of the sources of transformers' models, unless they are in the page cache, as far as a few of them tell."""
    with contextlib.suppress(OSError, ValueError):  # imports say what is wrong
        spec = importlib.util.find_spec("transformers")
        if spec is None or spec.origin is None or not hasattr(os, "RWF_NOWAIT"):
            return
        folders = sorted(os.listdir(models := os.path.join(os.path.dirname(spec.origin), "models")))
        paths = [os.path.join(models, folder, "__init__.py") for folder in folders[:: len(folders) // SAMPLED or 1]]
        if not all(_is_in_memory(path) for path in paths if os.path.isfile(path)):
            for folder, _, names in os.walk(models):
                for name in names:
                    if name.endswith(".py"):
                        with open(os.path.join(folder, name), "rb", buffering=0) as file:
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _is_in_memory(path: str) -> bool:
    """Whether reading the beginning of this file needs no disk."""
    with open(path, "rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) >= 0
        except BlockingIOError:
            return False
        except OSError:  # a filesystem that does not tell, as one in memory
            return True


def _remember_all_folders() -> None:
    utils: Any = sys.modules[IMPORT_UTILS]
    read: Any = getattr(utils, "create_import_structure_from_path", None)
    if hasattr(read, "__wrapped__"):
        utils.create_import_structure_from_path = functools.cache(read.__wrapped__)


class _Later(ModuleType):
    """Stands in for a module; other names than those it was given are those of the module, which is then imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _scipy_later() -> Iterator[None]:
    """Within, `scipy.optimize` has the one function that losses of transformers take from it when they are imported."""
    name, function = "scipy.optimize", "linear_sum_assignment"

    def called(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(name), function)(*args, **kwargs)

    module = _Later(name)
    setattr(module, function, called)
    if name not in sys.modules and importlib.util.find_spec("scipy"):
        sys.modules[name] = module
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


@contextlib.contextmanager
def reading_ahead(arguments: Namespace, model: str | None, further: Mapping[str, Any] = NO_FURTHER) -> Iterator[None]:
    """Within, `load_engine` and the imports before it: meanwhile threads read what the model will hold, on the CPU. Ctrl-C
    ends the process. Imports torch."""
    with ctrl_c_exits(arguments):
        with quick_imports():
            from vismoe.machine.hardware import torch_device
            from vismoe.store import read_ahead

        if read_ahead.is_reading():
            yield
            return
        given, options = {**further, **given_settings(arguments)}, model_options(arguments)
        told = ((READ_AHEAD_BY, given), (READ_AHEAD_OPTIONS, options))
        about = {name: source[name] for names, source in told for name in names if source.get(name) is not None}
        device = torch_device(options.get("device")).type
        with read_ahead.reading_ahead(read_ahead.WeightFiles.of(model, device=device, **about)):
            yield


def load_engine(
    arguments: Namespace, model: str | None, further: Mapping[str, Any] = NO_FURTHER, quiet: bool = False
) -> "Engine":
    """The engine these flags ask for; `further` settings hold where they say nothing. torch is imported here and not before.

    `quiet`: without transformers' progress bar, which is about what is not an expert and takes seconds.
    """
    given = {**further, **given_settings(arguments)}
    with reading_ahead(arguments, model, further):
        with quick_imports():
            from vismoe.engine.engine import load

        if quiet and (transformers := sys.modules.get("transformers")):
            transformers.utils.logging.disable_progress_bar()
        return load(model, **model_options(arguments), **given)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean --memory?)` where one of the known words is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


class SuggestingParser(ArgumentParser):
    """Names the flag that was probably meant beside one that there is not, before anything else that is wrong."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def parse_known_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.given = sys.argv[1:] if args is None else args
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(self.suggesting(message))

    def suggesting(self, message: str) -> str:
        flags = self._option_string_actions
        words = (word.partition("=")[0] for word in itertools.takewhile("--".__ne__, self.given) if FLAG.match(word))
        unknown = [
            word for word in words if not any(flag.startswith(word) if self.allow_abbrev else flag == word for flag in flags)
        ]
        named = " ".join(word + did_you_mean(word, flags) for word in unknown)
        return f"unrecognized arguments: {named}" if unknown else message


def print_json(arguments: Namespace, value: dict[str, Any]) -> None:
    """The one JSON object of a `--json` run; `arguments.stdout` is the real stdout, since stray prints are sent to stderr."""
    print(json.dumps(value), file=arguments.stdout, flush=True)


def error_report(error: VisMoEError) -> dict[str, Any]:
    """An error as the JSON object that `--json` prints."""
    fix = {"fix": error.fix} if isinstance(error, BudgetError) else {}
    return {"error": {"type": type(error).__name__, "message": str(error), **fix}}
