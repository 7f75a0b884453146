"""What the suite tries, and what more where somebody searches (HYPOTHESIS_PROFILE=searching): examples of fuzzers, long tests."""

import os

import pytest

MORE = 20
SEARCHING = os.environ.get("HYPOTHESIS_PROFILE") == "searching"
long = pytest.mark.skipif(not SEARCHING, reason="takes long: HYPOTHESIS_PROFILE=searching")


def examples(usual: int) -> int:
    return usual * MORE if SEARCHING else usual
