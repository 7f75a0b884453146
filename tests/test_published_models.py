"""What docs/models.md says about published models: the plan is made for each from its published dimensions."""

import pytest
from models_page import PAGE
from published_models import HEAD, MODELS, Described

LISTED = {
    name: (family, *cells)
    for name, family, *cells in (line.split(" | ") for line in PAGE.read_text().partition(HEAD)[2].strip("| \n").split(" |\n| "))
}


def test_the_page_lists_the_table():
    assert {name: row[0] for name, row in LISTED.items()} == {model.name: f"`{model.family}`" for model in MODELS}


@pytest.mark.budget(4)
@pytest.mark.parametrize("published", MODELS, ids=lambda model: model.name)
def test_the_plan_accepts_the_smallest_memory_and_hardly_less(published):
    _, *cells = LISTED[published.name]
    memory = cells[-1].strip("`")
    described = Described.of(published)
    assert described.parameters / 1e9 == pytest.approx(published.billions, rel=0.02), "these are not the published dimensions"
    assert described.cells(memory) == cells
    least_gib = described.plan(memory).minimum_bytes / 2**30
    assert float(memory.removesuffix("GiB")) - 0.2 < least_gib
