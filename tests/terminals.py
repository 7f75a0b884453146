"""Programs on a pseudo terminal, as a person at one sees and types them."""

import os
import pty
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Terminal:
    def __init__(self, command: list[str], kind: str):
        """kind: what TERM says."""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": kind, "COLUMNS": "200"},
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self.master, False)
        self.text = ""

    def wait_for(self, text: str) -> str:
        """What came until `text` did."""
        end = time.monotonic() + 90
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.text}"
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except (BlockingIOError, OSError):
                time.sleep(0.01)
        seen, _, self.text = self.text.partition(text)
        return seen

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())


@contextmanager
def terminals() -> Iterator[Callable[[list[str], str], Terminal]]:
    """Starts a command on a terminal of a kind; all are gone at the end."""
    started = []

    def start(command: list[str], kind: str = "dumb") -> Terminal:
        started.append(Terminal(command, kind))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)
