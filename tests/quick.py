"""What `make test` leaves out of the suite, so that it takes minutes; `make test-all` runs everything.

A test may take BUDGET_S with all its cases. Of one that takes longer, as many cases run as fit, drawn by a hash of their names;
one of which not even a case fits is left out. The mark `budget` gives a test more: `@pytest.mark.budget(20)`. How long tests
take stands in `seconds.json`, which `make QUICK= test PYTEST_ARGS=--store-seconds` writes; tests that are not in it run whole.

What a fixture takes is counted where it is made first. So a test that is short only because other tests of its file had a
parametrized fixture made is marked with the fixture's name, `@pytest.mark.joins("specimen")`: its cases are drawn from those of
which another test's case runs anyway.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

BUDGET_S = 0.8  # or what `--budget` says
STORED = Path(__file__).parent / "seconds.json"
LEAST_S = 1.0  # what is stored


def name_of(nodeid: str) -> str:
    """A test without its case: `test_pager.py::test_a[1-b]`, wherever the suite was started, -> `test_pager.py::test_a`."""
    return nodeid.partition("[")[0].rpartition("/")[2]


def taken(cases: Sequence[str], seconds: float, budget_s: float) -> set[str]:
    """The cases of a test that run where it may take so long, if all of them take `seconds`."""
    running = len(cases) if seconds <= budget_s else int(budget_s / (seconds / len(cases)))
    return set(sorted(cases, key=lambda name: crc32(name.encode()))[:running])


def made_for(item: Any, fixture: str) -> tuple[str, Any]:
    """Cases with the same share what the parametrized fixture makes."""
    call = getattr(item, "callspec", None)
    return name_of(item.nodeid).partition("::")[0], call and call.params.get(fixture)


def leave_out(items: list[Any], budget_s: float = BUDGET_S) -> list[Any]:
    """Take the tests out of `items` that are too long for `make test`; returns them."""
    seconds = json.loads(STORED.read_text())
    tests = defaultdict(list)
    for item in items:
        tests[name_of(item.nodeid)].append(item)
    running: set[str] = set()
    for name, cases in sorted(tests.items(), key=lambda test: test[1][0].get_closest_marker("joins") is not None):
        budget, joins = (cases[0].get_closest_marker(mark) for mark in ("budget", "joins"))
        whole = len(cases)
        if joins:
            assert all(joins.args[0] in item.callspec.params for item in cases), f"{name} takes no {joins.args[0]}"
            made = {made_for(item, joins.args[0]) for item in items if item.nodeid in running}
            cases = [case for case in cases if made_for(case, joins.args[0]) in made] or cases
        takes_s = seconds.get(name, 0.0) * len(cases) / whole
        running |= taken([case.nodeid for case in cases], takes_s, budget.args[0] if budget else budget_s)
    left_out = [item for item in items if item.nodeid not in running]
    items[:] = [item for item in items if item.nodeid in running]
    return left_out


class Stopwatch:
    """Sums up how long tests take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "teardown":  # with the fixtures that it is the first to ask for
            self.seconds[name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Stores what ran, and keeps what did not."""
        stored = json.loads(STORED.read_text()) | self.seconds
        rounded = {name: round(seconds, 1) for name, seconds in sorted(stored.items()) if seconds >= LEAST_S}
        STORED.write_text(json.dumps(rounded, indent=0) + "\n")
