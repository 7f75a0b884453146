"""What `make test` leaves out."""

import json
import re
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from quick import STORED, name_of, taken


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


def test_seconds_are_stored_of_tests_that_there_are():
    missing = [
        name
        for name in json.loads(STORED.read_text())
        if not re.search(
            rf"^def {name.partition('::')[2]}\(", (Path(__file__).parent / name.partition("::")[0]).read_text(), re.M
        )
    ]
    assert not missing, "make QUICK= test PYTEST_ARGS=--store-seconds"
