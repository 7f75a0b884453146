"""How many examples a fuzzer tries: few in the suite, many where somebody searches (HYPOTHESIS_PROFILE=searching)."""

import os

MORE = 20


def examples(usual: int) -> int:
    return usual * MORE if os.environ.get("HYPOTHESIS_PROFILE") == "searching" else usual
