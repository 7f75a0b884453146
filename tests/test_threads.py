"""torch's workers are asked to sleep before torch is there, and nobody's own decision is overruled."""

import os
import subprocess
import sys

import pytest

NO_DECISION = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
REPORT = """
from vismoe.threads import waiting, without_us
import os
print(os.environ.get("GOMP_SPINCOUNT"), waiting().settled, waiting().why)
rival = without_us(os.environ)
print(rival.get("OMP_WAIT_POLICY"), rival.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("before", "environment", "expected", "rivals"),
    [
        ("import vismoe", {}, "2000 True they spin for some microseconds", "None 300000"),
        ("import torch, vismoe", {}, "None False they spin: torch was imported before vismoe. Fix: ", "None 300000"),
        ("import vismoe", {"OMP_WAIT_POLICY": "ACTIVE"}, "None True OMP_WAIT_POLICY=ACTIVE is set", "ACTIVE None"),
        ("import vismoe", {"GOMP_SPINCOUNT": "7"}, "7 True GOMP_SPINCOUNT=7 is set", "None 7"),
    ],
)
def test_waiting_is_decided_once_when_the_package_is_imported(before, environment, expected, rivals):
    code = [sys.executable, "-c", before + REPORT]
    out = subprocess.run(code, env=NO_DECISION | environment, capture_output=True, text=True, check=True).stdout
    ours, rival = out.splitlines()
    assert ours.startswith(expected) and rival == rivals
