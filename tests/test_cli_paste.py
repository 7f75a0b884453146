"""Texts pasted into a conversation on a pseudo terminal: with brackets around them, as lines that come at once, and as typed."""

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.cli_conversation import COMMANDS, commands_and_question

PROGRAM = """\
import json, sys, types
sys.path.insert(0, "tests")
from fake_engine import FakeEngine
from vismoe.cli import main
engine = FakeEngine()
sys.modules["vismoe.engine"] = types.SimpleNamespace(load=lambda *a, **k: engine)
code = main(["chat"])
print("asked", json.dumps([messages[-1]["content"][-1]["text"] for messages, _ in engine.calls]), "end", file=sys.stderr)
sys.exit(code)
"""
PASTED = "Tell me:\n\n  is `a < b`\nor not"


class Terminal:
    """A conversation with a scripted engine on a pseudo terminal."""

    def __init__(self, kind: str):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": kind, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(__file__).parent.parent, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self.master, False)
        self.text = ""

    def read_until(self, text: str) -> str:
        end = time.monotonic() + 60
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

    def asked(self) -> list[str]:
        """The questions so far, once it has been left."""
        self.read_until("> ")
        self.write("/quit\r")
        self.read_until("asked ")
        asked = json.loads(self.read_until(" end"))
        assert self.process.wait(30) == 0
        return asked


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Terminal]]:
    started = []

    def start(kind: str) -> Terminal:
        started.append(Terminal(kind))
        started[-1].read_until("> ")
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


def test_a_text_that_the_terminal_brackets_is_one_question(terminal):
    chat = terminal("xterm")
    chat.write(f"\x1b[200~{PASTED}\x1b[201~")
    chat.write("\r")
    chat.read_until("one two")
    assert chat.asked() == [PASTED]


@pytest.mark.parametrize("ends", ["\r", ""])
def test_lines_that_come_at_once_are_one_question_also_without_a_last_line_end(terminal, ends):
    chat = terminal("dumb")
    chat.write(PASTED.replace("\n", "\r") + ends)
    if not ends:
        time.sleep(0.5)  # the person looks at what is there, and presses Enter
        chat.write("\r")
    chat.read_until("one two")
    assert chat.asked() == [PASTED]


def test_lines_that_are_typed_are_questions_of_their_own_and_commands_before_a_text_are_obeyed(terminal):
    chat = terminal("dumb")
    for line in ("First", "Second"):
        chat.write(f"{line}\r")
        chat.read_until("one two")
        chat.read_until("> ")
    chat.write("/retention 0.9\r/reset\rThird\rin two lines\r")
    chat.read_until("90% of the demanded")
    chat.read_until("a new conversation")
    chat.read_until("one two")
    assert chat.asked() == ["First", "Second", "Third\nin two lines"]


WORDS = st.text(alphabet="ab /\n\t", max_size=12)
NAMES = (*COMMANDS, "/quit")
LINES = st.lists(st.sampled_from(NAMES).flatmap(lambda name: WORDS.map(lambda rest: f"{name} {rest}")) | WORDS)


@given(LINES)
def test_no_word_of_a_pasted_text_is_lost_and_commands_are_single_lines(lines):
    text = "\n".join(lines).strip()
    parts = list(commands_and_question(text))
    assert " ".join(parts).split() == text.split()
    assert all("\n" not in part and part.split()[0] in NAMES for part in parts[:-1])
    assert not parts or parts[-1] == parts[-1].strip() != ""
