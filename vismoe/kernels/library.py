"""The compiled kernels: one shared library with a plain C interface, found beside this package and loaded with ctypes.

A call through ctypes releases the interpreter lock. The library is built when the package is installed (CMakeLists.txt).
"""

import ctypes
from functools import cache
from pathlib import Path

import vismoe.kernels
from vismoe.errors import ConfigError

__all__ = ["library"]

FILE = "vismoe_kernels.so"
INTERFACE = 2  # of csrc/interface.cpp
FIX = "Fix: pip install . (or make demo) with a C++ compiler at hand"


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises ConfigError where this installation has none, or one that was built from other sources."""
    folders = [Path(folder) for folder in vismoe.kernels.__path__]
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if file is None:
        raise ConfigError(f"{FILE} is missing from {' and '.join(map(str, folders))}: only the sources were imported. {FIX}")
    loaded = ctypes.CDLL(str(file))
    if getattr(loaded, "vismoe_interface", lambda: 0)() != INTERFACE:
        raise ConfigError(f"{file} was built from other sources than these: they changed since it was installed. {FIX}")
    return loaded
