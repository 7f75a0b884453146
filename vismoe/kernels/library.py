"""The compiled kernels: one shared library with a plain C interface, beside this package, loaded with ctypes.

A call through ctypes releases the interpreter lock. Installing the package builds the library (CMakeLists.txt).
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import vismoe.kernels
from vismoe.errors import ConfigError

Name = TypeVar("Name", bound=str)

FILE = "vismoe_kernels.so"
INTERFACE = 22  # as in csrc/interface.cpp
FIX = "Fix: pip install . (or make demo) with a C++ compiler installed"


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises ConfigError if this installation has none, or one that was built from other sources."""
    folders = [Path(folder) for folder in vismoe.kernels.__path__]
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if file is None:
        raise ConfigError(f"{FILE} is missing from {' and '.join(map(str, folders))}: only the sources were imported. {FIX}")
    loaded = ctypes.CDLL(str(file))
    if getattr(loaded, "vismoe_interface", lambda: 0)() != INTERFACE:
        raise ConfigError(f"{file} was built from other sources: the sources have changed since the installation. {FIX}")
    return loaded


def function(name: str, arguments: Sequence[Any], result: Any = None) -> Callable[[], Callable[..., Any]]:
    """Finds the library's function of this name at the first call; `arguments` and `result` are ctypes."""

    @cache
    def found() -> Callable[..., Any]:
        native = getattr(library(), name)
        native.argtypes, native.restype = arguments, result
        return native

    return found


def instruction_sets(names: tuple[Name, ...], present: int) -> tuple[Name, ...]:
    """Those of `names` whose bit is set in `present`."""
    return tuple(name for bit, name in enumerate(names) if present >> bit & 1)


def refuse_missing(isa: str | None, available: Callable[[], Sequence[str]]) -> None:
    """Raises ConfigError for an instruction set that is not available; None: whichever is best."""
    if isa is not None and isa not in available():
        raise ConfigError(f"isa={isa!r} is not available here; available: {', '.join(available())}. Fix: one of them, or None")
