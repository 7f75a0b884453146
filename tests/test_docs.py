"""README.md and docs/: short enough, no dead link, and results with their data beside them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from test_layers import ROWS

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
def test_the_first_pages_are_short(name, words):
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_acting_part_is_named(page):
    """Experts, bytes and requests are not persons."""
    assert not re.findall(r"\b(?:nobody|somebody|anybody|everybody|whoever|whom)\b", page.read_text(), re.I)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_is_named_is_there(page):
    """`paging/eviction.py: choose_victims` too: a file of the repository or of the package `vismoe`."""
    for name, function in re.findall(r"`([\w/]+/\w+\.py)(?:: (\w+))?`", page.read_text()):
        file = next((root / name for root in (ROOT, ROOT / "vismoe") if (root / name).exists()), None)
        assert file is not None, name
        assert not function or re.search(rf"^(def|class) {function}\b", file.read_text(), re.M), (name, function)


def test_the_architecture_has_a_row_for_every_part():
    """As `tests/test_layers.py` holds them."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+)\|", (DOCS / "architecture.md").read_text(), re.M)
    written = {name: int(row) for row, names in rows for name in re.findall(r"`(\w+)`", names)}
    roots = (ROOT, ROOT / "vismoe")
    there = {name for name in ROWS for root in roots if (root / name).is_dir() or (root / f"{name}.py").exists()}
    assert written == {name: row for name, row in ROWS.items() if name in there}


def cells(row: str) -> int:
    """Of a row of a table; a bar within code is part of a cell."""
    return re.sub(r"`[^`]*`", "", row).count("|")
