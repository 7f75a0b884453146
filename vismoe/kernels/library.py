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


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises ConfigError where this installation has none."""
    folders = [Path(folder) for folder in vismoe.kernels.__path__]
    for folder in folders:
        if (folder / FILE).is_file():
            return ctypes.CDLL(str(folder / FILE))
    raise ConfigError(
        f"{FILE} is missing from {' and '.join(map(str, folders))}: only the sources were imported. "
        "Fix: pip install . (or make demo) with a C++ compiler at hand"
    )
