"""The compiled kernels: one shared library with a plain C interface, beside this package, loaded with ctypes.

A call through ctypes releases the interpreter lock. Installing the package builds the library (CMakeLists.txt).
"""

import ctypes
from functools import cache
from pathlib import Path

import vismoe.kernels
from vismoe.errors import ConfigError

__all__ = ["library"]

FILE = "vismoe_kernels.so"
INTERFACE = 2  # as in csrc/interface.cpp
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
