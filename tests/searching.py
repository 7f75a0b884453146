"""What the suite tries, and what more where somebody searches (HYPOTHESIS_PROFILE=searching): examples of fuzzers, long tests."""

import os
from importlib.metadata import version

import pytest
from packaging.version import Version

MORE = 20
SEARCHING = os.environ.get("HYPOTHESIS_PROFILE") == "searching"
long = pytest.mark.skipif(not SEARCHING, reason="takes long: HYPOTHESIS_PROFILE=searching")


OLDEST = "5.17"


def is_oldest() -> bool:
    """Whether the installed transformers is the oldest supported one."""
    return Version(version("transformers")).release[:2] == Version(OLDEST).release


def examples(usual: int) -> int:
    return usual * MORE if SEARCHING else usual
