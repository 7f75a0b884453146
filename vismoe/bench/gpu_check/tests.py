"""Runs files of the checkout's tests; without a checkout, or where a file is missing, it says so."""

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vismoe
from vismoe.machine.hardware import cores

TESTS = Path(vismoe.__file__).resolve().parents[1] / "tests"
MOST_WORKERS = 8  # processes that share the GPU
MOST_FAILURES = 20  # named in the report
NOTHING_TO_RUN = 5  # pytest's exit code, also where a whole file skips itself


def run_tests(options: dict[str, Any], keep: Callable[[dict[str, Any]], None], folder: Path = TESTS) -> dict[str, Any]:
    """Numbers of tests that passed, failed and were skipped, with reasons; `missing` files; `failures` by name.

    Raises RuntimeError if pytest could not run them.
    """
    files = [folder / name for name in options["files"]]
    missing = [file.name for file in files if not file.exists()]
    found: dict[str, Any] = {"missing": missing, "passed": 0, "failed": 0, "skipped": 0, "reasons": [], "failures": []}
    present = [str(file) for file in files if file.exists()]
    if not present or importlib.util.find_spec("pytest") is None:
        return found | {"reasons": [_why_none(folder, missing)]}
    workers = min(cores(), MOST_WORKERS)
    spread = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    with tempfile.TemporaryDirectory(prefix="vismoe-gpu-check-") as scratch:
        junit = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, f"--junitxml={junit}", *present]
        done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
        found |= _counted(ElementTree.parse(junit).getroot()) if junit.exists() else {}
    if done.returncode not in (0, NOTHING_TO_RUN) and not found["failed"]:
        last = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: {' '.join(last)}")
    return found


def _why_none(folder: Path, missing: list[str]) -> str:
    if not folder.is_dir():
        return f"there is no checkout at {folder.parent}: an installed package has no tests"
    return f"{', '.join(missing)} is not in {folder}" if missing else "pytest is not installed: pip install 'vismoe[dev]'"


def _counted(root: Any) -> dict[str, Any]:
    """What a JUnit report says."""
    failures, reasons, passed = [], dict[str, None](), 0
    skipped = 0
    for case in root.iter("testcase"):
        broken = [part for part in case if part.tag in ("failure", "error")]
        if broken:
            first = (broken[0].get("message") or "").strip().splitlines()[:1]
            failures.append(": ".join([case.get("name", "?"), *first]))
        elif (why := case.find("skipped")) is not None:
            skipped += 1
            of_file = (why.text or "").partition("'Skipped: ")[2].rstrip("')")  # pytest's words where a whole file was skipped
            reasons[of_file or why.get("message") or ""] = None
        else:
            passed += 1
    counts = {"passed": passed, "failed": len(failures), "skipped": skipped}
    return counts | {"reasons": list(reasons), "failures": failures[:MOST_FAILURES]}
