"""README.md and docs/: short enough, no dead link, and results with their data beside them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
DATA = sorted((DOCS / "data").glob("*.json"))
LONGEST = {"README.md": 1500, "architecture.md": 2000}  # words
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchor(heading: str) -> str:
    """The address of a heading on its page, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.M)}


@pytest.mark.parametrize(("name", "words"), LONGEST.items())
def test_a_page_that_everybody_reads_is_short(name, words):
    page = next(page for page in PAGES if page.name == name)
    assert len(page.read_text().split()) <= words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not place or place in anchors(target), link


def test_every_page_can_be_reached_from_the_readme():
    assert {page.name for page in PAGES[1:]} <= {Path(link).name for link in LINK.findall(PAGES[0].read_text())}


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_data_says_how_when_and_on_what_it_was_measured(file):
    found = json.loads(file.read_text())
    assert all(found[key] for key in ("machine", "software", "date", "tables"))
    assert f"data/{file.name}" in (ROOT / found["page"]).read_text(), "its page does not name it"
    names = [table["name"] for table in found["tables"]]
    assert len(names) == len(set(names))
    for table in found["tables"]:
        assert table["about"] and table["command"]
        assert len(set(table["columns"])) == len(table["columns"])
        assert table["rows"] and all(len(row) == len(table["columns"]) for row in table["rows"]), table["name"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    lines = page.read_text().splitlines()
    for above, below in pairwise(lines):
        if above.startswith("|") and below.startswith("|"):
            assert cells(above) == cells(below), below


def cells(row: str) -> int:
    """Of a row of a table; a bar within code is part of a cell."""
    return re.sub(r"`[^`]*`", "", row).count("|")
