"""Every example that the project prints: blocks and inline commands of README.md and docs/, `--help`, the server's greeting.

A block of commands has a command in every line; in a block of output those after `$ ` are commands. Other languages than these
are somebody else's: whoever adds one says so in ELSEWHERE.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vismoe.app.options import ServeOptions
from vismoe.app.serving import welcome
from vismoe.cli import main as cli
from vismoe.cli.study import study_list

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = ("", "bash", "sh")
ELSEWHERE = ("nginx",)  # another program's settings
PROGRAM = re.compile(r"(?:\.venv/bin/)?(?:vismoe|python|lmms-eval|make|pip|curl)(?= )")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    place: str
    text: str  # a command on one line, or a program

    def __str__(self) -> str:
        return f"{self.place}: {self.text.splitlines()[0]}"


def blocks(languages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(file name, content) of every block in these languages."""
    for page in PAGES:
        yield from ((page.name, block[2]) for block in FENCE.finditer(page.read_text()) if block[1] in languages)


def languages() -> set[str]:
    return {block[1] for page in PAGES for block in FENCE.finditer(page.read_text())}


def commands() -> list[Example]:
    """Those that stand on lines of their own."""
    found = [Example(place, line) for place, block in blocks(COMMANDS) for line in lines(block)]
    found += [Example(place, line) for place, block in blocks(("text",)) for line in lines(block, "$ ")]
    helps = {
        "vismoe --help": cli.OVERVIEW,
        **{f"vismoe {name} --help": command.examples for name, command in cli.COMMANDS.items()},
    }
    found += [
        Example(place, line) for place, text in helps.items() for line in lines(text.replace(study_list(), ""), "  vismoe ", 2)
    ]
    greeting = welcome(ServeOptions(), "127.0.0.1", 8000)
    return [*found, *(Example("vismoe serve", line) for line in lines(greeting, "  curl ", 2))]


def inline() -> list[Example]:
    """Those in sentences and table cells."""
    found = []
    for page in PAGES:
        prose = FENCE.sub("", page.read_text())
        found += [Example(page.name, code) for code in re.findall(r"(?<!`)`([^`\n]+)`", prose) if PROGRAM.match(code)]
    return list(dict.fromkeys(found))


def programs() -> list[Example]:
    return [Example(place, block) for place, block in blocks(("python",))]


def lines(block: str, prefix: str = "", indent: int | None = None) -> list[str]:
    """The commands of a block without what is said about them; with a prompt in the block, those behind one."""
    joined = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    prefix = prefix or ("$ " if any(line.startswith("$ ") for line in joined) else "")
    indent = len(prefix) if indent is None else indent
    wanted = (line[indent:] for line in joined if line.strip() and line.startswith(prefix))
    return [re.split(r"\s{2,}|\s+#\s", line, maxsplit=1)[0].removeprefix(".venv/bin/") for line in wanted]
