"""Pictures that visitors of the chat page uploaded: kept in a private folder while their conversation exists.

gradio stores an upload under the hash of its content, so two conversations may share a file, which is deleted with the last of
them. A file that was attached but never asked about has no known conversation; it is deleted after an hour, or when the last page
is closed. The folder is deleted with the process; after a kill, the next process deletes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "vismoe-ui-"
LOCK = "in-use"
MOST_FILE_BYTES = 64 * 2**20
UNASKED_S = 3600.0


@contextlib.contextmanager
def uploads_folder() -> Iterator["Uploads"]:
    """A folder that only this user can read, where gradio keeps its files; removed at the end with its content."""
    _remove_left_behind(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True))
        lock = stack.enter_context((Path(folder) / LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = os.environ.get("GRADIO_TEMP_DIR")
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            yield Uploads(Path(folder))
        finally:
            os.environ.pop("GRADIO_TEMP_DIR")
            if before is not None:
                os.environ["GRADIO_TEMP_DIR"] = before


def _remove_left_behind(folder: Path) -> None:
    """Removes the folders of killed processes, whose locks are free."""
    for left in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or already gone
            if left.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            with (left / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)


@dataclass
class Uploads:
    """Which conversation uses which files below `folder`."""

    folder: Path
    _own: set[Path] = field(default_factory=set)  # files that the page itself shows
    _used: dict[str, dict[Path, int]] = field(default_factory=dict)  # by session: file and time of writing, in ns
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep_what_is_there(self) -> None:
        """Marks the existing files as the page's own: copies of the bundled pictures."""
        self._own = set(self._files())

    def enter(self, session: str) -> None:
        """A page was opened."""
        with self._lock:
            self._used.setdefault(session, {})

    def use(self, session: str, files: Iterable[str]) -> None:
        """A question of this session uses these files."""
        with self._lock:
            used = self._used.setdefault(session, {})
            for file in map(Path, files):
                if file.is_relative_to(self.folder) and file.exists():
                    used[file] = file.stat().st_mtime_ns
            self._sweep()

    def add(self, session: str, name: str, data: bytes) -> str:
        """A picture of a conversation that this session opens; stored where gradio stores the same bytes as an upload."""
        from gradio.processing_utils import hash_bytes

        file = self.folder / hash_bytes(data) / name
        with self._lock:
            file.parent.mkdir(exist_ok=True)
            if not file.exists():
                file.write_bytes(data)
            self._used.setdefault(session, {})[file] = file.stat().st_mtime_ns
        return str(file)

    def forget(self, session: str) -> None:
        """A conversation begins anew: removes the files that only it used."""
        with self._lock:
            if session in self._used:
                self._release(self._used[session])
                self._used[session] = {}

    def leave(self, session: str) -> None:
        """A page was closed. With the last page all files are removed."""
        with self._lock:
            self._release(self._used.pop(session, {}))
            self._sweep()

    def _files(self) -> Iterator[Path]:
        return (file for file in self.folder.rglob("*") if file.is_file() and file.name != LOCK)

    def _release(self, used: dict[Path, int]) -> None:
        """Removes files, except those of other conversations and those that a visitor has uploaded again for a next question."""
        for file, written_ns in used.items():
            shared = sum(file in others for others in self._used.values() if others is not used)
            with contextlib.suppress(FileNotFoundError):
                if not shared and file not in self._own and file.stat().st_mtime_ns == written_ns:
                    file.unlink()

    def _sweep(self) -> None:
        """Removes files that no conversation uses or will use."""
        until_s = time.time() - UNASKED_S if self._used else float("inf")
        used = self._own.union(*self._used.values())
        for file in [file for file in self._files() if file not in used]:
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < until_s:
                    file.unlink()
