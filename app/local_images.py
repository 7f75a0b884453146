"""Images by path, from one folder and its subfolders only.

Every component of a path is opened relative to its parent and never as a symbolic link, so no time passes between check and use
in which a path could change its meaning: an opened file is certainly below the folder. Links are refused even if they point
inside the folder. Only regular files are read, and opening never blocks (a FIFO is not an image). Every refusal has the same
text, so that clients cannot find out which files exist elsewhere.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote

from vismoe.errors import ConfigError, InputError

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_THERE = "there is no image file of this name in the server's image folder. Fix: use the name of a file in it, or a data: URI"


class LocalImages:
    """Reads image files below `folder`. Raises ConfigError if that is not a folder."""

    def __init__(self, folder: Path):
        self._given = PurePosixPath(os.path.abspath(folder))
        self._folder = Path(os.path.realpath(folder))
        if not self._folder.is_dir():
            raise ConfigError(f"image folder {folder}: not a folder. Fix: name one that exists")

    def read(self, name: str, max_bytes: int) -> bytes:
        """The bytes of a file named by a path in the folder, an absolute path into it, or a file:// URL.

        Raises InputError for a file that does not exist, is outside the folder, or is larger than `max_bytes`.
        """
        with self._file(name, max_bytes) as file:
            return file.read(max_bytes)

    def size(self, name: str, max_bytes: int) -> int:
        """The number of bytes that `read` would return. Raises InputError as it does."""
        with self._file(name, max_bytes) as file:
            return os.fstat(file.fileno()).st_size

    @contextlib.contextmanager
    def _file(self, name: str, max_bytes: int) -> Iterator[IO[bytes]]:
        try:
            with open(self._open(self._components(name)), "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes > max_bytes:
                    raise InputError(f"the image file has {size_bytes:,} bytes, the limit is {max_bytes:,}. Fix: scale it down")
                yield file
        except (OSError, ValueError) as error:  # ValueError: a null byte, or text that is not UTF-8
            raise InputError(NOT_THERE) from error

    def _components(self, name: str) -> tuple[str, ...]:
        """The names from the folder down to the file."""
        path = PurePosixPath(_path_of(name))
        for root in (self._given, self._folder):
            if path.is_relative_to(root):
                path = path.relative_to(root)
        if path.is_absolute() or not path.parts or ".." in path.parts:
            raise InputError(NOT_THERE)
        return path.parts

    def _open(self, components: tuple[str, ...]) -> int:
        """A descriptor of a regular file. Raises OSError."""
        *folders, file = components
        parent = os.open(self._folder, FOLDER_FLAGS)
        try:
            for folder in folders:
                child = os.open(folder, FOLDER_FLAGS, dir_fd=parent)
                os.close(parent)
                parent = child
            descriptor = os.open(file, FILE_FLAGS, dir_fd=parent)
        finally:
            os.close(parent)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise FileNotFoundError("not a regular file")


def _path_of(name: str) -> str:
    """The path in a file:// URL (percent-decoded once); a plain path is returned unchanged."""
    if name[:7].lower() != "file://":
        return name
    host, slash, path = name[7:].partition("/")
    if host.lower() not in ("", "localhost"):
        raise InputError(NOT_THERE)
    return unquote(slash + path, errors="strict")
