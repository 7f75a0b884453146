"""Reads what a person types or pastes at the prompt of a conversation: a pasted text is one question, however many lines it has.

Terminals mark a pasted text with brackets, and readline then returns it as one text. If a terminal does not, further lines that
are available right after a line was read belong to the same paste, since people do not type that fast. Each line of a pipe or a
file is a question.
"""

import contextlib
import select
import sys

PASTE_S = 0.05  # a terminal may hand over a long paste in several pieces


def with_line_editing() -> None:
    """Gives `input()` editing, history and pasted texts as a whole, if readline is available."""
    with contextlib.suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")


def next_input(prompt: str) -> str:
    """One line, or all lines of a pasted text; raises EOFError at the end of the input, KeyboardInterrupt for Ctrl-C."""
    if not sys.stdin.isatty():
        return input()
    lines = [_line(prompt)]
    while _more_waits(sys.stdin.fileno()):
        try:
            lines.append(_line(""))
        except EOFError:
            break
    return "\n".join(lines)


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # a file gets only answers
    return input()


def _more_waits(terminal: int) -> bool:
    """Whether more input is available, even an incomplete line, which a terminal in its usual mode does not report."""
    import termios

    before = termios.tcgetattr(terminal)
    by_letters = [*before]
    by_letters[3] &= ~termios.ICANON
    termios.tcsetattr(terminal, termios.TCSANOW, by_letters)
    try:
        return bool(select.select([terminal], [], [], PASTE_S)[0])
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
