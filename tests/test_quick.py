"""What `make test` leaves out."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quick
from hypothesis import example, given
from hypothesis import strategies as st
from quick import STORED, leave_out, name_of, taken


@given(cases=st.integers(1, 400), seconds=st.floats(0, 500), budget_s=st.floats(0.1, 100))
@example(cases=8, seconds=8.0, budget_s=1.0)
def test_as_many_cases_run_as_fit(cases, seconds, budget_s):
    names = [f"test_a.py::test_b[{case}]" for case in range(cases)]
    running, each_s = taken(names, seconds, budget_s), seconds / cases
    assert running <= set(names) and (seconds > budget_s or len(running) == cases)
    assert each_s * len(running) <= budget_s * (1 + 1e-9)
    assert len(running) == cases or each_s * (len(running) + 1) > budget_s * (1 - 1e-9)


def test_of_cases_that_alternate_both_kinds_run():
    names = [f"test_a.py::test_b[{case}-{dtype}]" for case in range(50) for dtype in ("float32", "bfloat16")]
    running = taken(names, seconds=100.0, budget_s=25.0)
    assert 5 < sum("bfloat16" in name for name in running) < 20


def test_a_test_is_named_without_its_case_and_wherever_the_suite_was_started():
    assert name_of("tests/test_a.py::test_b[../c.md: vismoe chat]") == name_of("test_a.py::test_b") == "test_a.py::test_b"


@dataclass
class Item:
    nodeid: str
    params: dict[str, Any]
    marks: dict[str, Any] = field(default_factory=dict)

    @property
    def callspec(self):
        return SimpleNamespace(params=self.params)

    def get_closest_marker(self, name):
        return SimpleNamespace(args=(self.marks[name],)) if name in self.marks else None


@pytest.mark.parametrize("seconds, joined", [(0.0, 5), (5.0, 2)], ids=["short", "long"])
def test_who_joins_has_cases_of_which_another_test_has_one(seconds, joined, tmp_path, monkeypatch):
    """Of other ones only if there are none of those, and no more than fit."""
    monkeypatch.setattr(quick, "STORED", tmp_path / "seconds.json")
    quick.STORED.write_text(json.dumps({"test_a.py::test_long": 10.0, "test_a.py::test_joins": seconds}))
    joins = {"joins": "made"}
    items = [Item(f"test_a.py::test_joins[{n}]", {"made": n}, joins) for n in range(10)]
    items += [Item(f"test_a.py::test_long[{n}]", {"made": n}, {"budget": 5.0}) for n in range(10)]
    items += [Item(f"test_b.py::test_joins_nobody[{n}]", {"made": n}, joins) for n in range(10)]
    left_out = leave_out(items, budget_s=1.0)
    running = {
        name: {item.params["made"] for item in items if f"::{name}[" in item.nodeid} for name in ("test_long", "test_joins")
    }
    assert len(running["test_long"]) == 5 and len(running["test_joins"]) == joined and len(left_out) == 10 - 5 + 10 - joined
    assert running["test_joins"] <= running["test_long"]


def test_seconds_are_stored_of_tests_that_there_are():
    missing = [
        name
        for name in json.loads(STORED.read_text())
        if not re.search(
            rf"^def {name.partition('::')[2]}\(", (Path(__file__).parent / name.partition("::")[0]).read_text(), re.M
        )
    ]
    assert not missing, "make QUICK= test PYTEST_ARGS=--store-seconds"
