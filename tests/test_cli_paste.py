"""Texts pasted into a conversation on a pseudo terminal: with brackets around them, as lines that come at once, and as typed."""

import json
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminals import Terminal, terminals

from vismoe.cli.conversation import COMMANDS, commands_and_question

PROGRAM = """\
import json, sys, types
sys.path.insert(0, "tests")
from fake_engine import FakeEngine
from vismoe.cli.main import main
engine = FakeEngine()
sys.modules["vismoe.engine.engine"] = types.SimpleNamespace(load=lambda *a, **k: engine)
code = main(["chat"])
print("asked", json.dumps([messages[-1]["content"][-1]["text"] for messages, _ in engine.calls]), "end", file=sys.stderr)
sys.exit(code)
"""
PASTED = "Tell me:\n\n  is `a < b`\nor not"


class Chat:
    """A conversation with a scripted engine."""

    def __init__(self, terminal: Terminal):
        self.process, self.wait_for, self.write = terminal.process, terminal.wait_for, terminal.write
        self.wait_for("> ")

    def asked(self) -> list[str]:
        """The questions so far, once it has been left."""
        self.wait_for("> ")
        self.write("/quit\r")
        self.wait_for("asked ")
        asked = json.loads(self.wait_for(" end"))
        assert self.process.wait(30) == 0
        return asked


@pytest.fixture
def terminal() -> Iterator[Callable[[str], Chat]]:
    with terminals() as start:
        yield lambda kind: Chat(start([sys.executable, "-c", PROGRAM], kind))


def test_a_text_that_the_terminal_brackets_is_one_question(terminal):
    chat = terminal("xterm")
    chat.write(f"\x1b[200~{PASTED}\x1b[201~")
    chat.write("\r")
    chat.wait_for("one two")
    assert chat.asked() == [PASTED]


@pytest.mark.parametrize("ends", ["\r", ""])
def test_lines_that_come_at_once_are_one_question_also_without_a_last_line_end(terminal, ends):
    chat = terminal("dumb")
    chat.write(PASTED.replace("\n", "\r") + ends)
    if not ends:
        time.sleep(0.5)  # the person looks at what is there, and presses Enter
        chat.write("\r")
    chat.wait_for("one two")
    assert chat.asked() == [PASTED]


def test_lines_that_are_typed_are_questions_of_their_own_and_commands_before_a_text_are_obeyed(terminal):
    chat = terminal("dumb")
    for line in ("First", "Second"):
        chat.write(f"{line}\r")
        chat.wait_for("one two")
        chat.wait_for("> ")
    chat.write("/retention 0.9\r/reset\rThird\rin two lines\r")
    chat.wait_for("90% of the demanded")
    chat.wait_for("a new conversation")
    chat.wait_for("one two")
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
