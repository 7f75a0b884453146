"""The process of one stage: `python -m vismoe.bench.gpu_check.stage MODULE:FUNCTION RESULT`, its options as JSON on stdin.

The function gets the options, and a function that keeps a result so far: what a stage had found is there if it is killed.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from vismoe.bench.process import die_with_parent
from vismoe.flags import quick_imports


def main(argv: list[str]) -> int:
    """Exit codes: 0; 1 for an error, which is then in the result as `error`, beside what was kept before it."""
    die_with_parent()
    module, _, function = argv[0].partition(":")
    file, kept = Path(argv[1]), dict[str, Any]()

    def keep(result: dict[str, Any]) -> None:
        kept.update(result)
        unfinished = file.with_name(file.name + ".part")
        unfinished.write_text(json.dumps(kept))
        os.replace(unfinished, file)

    try:
        with quick_imports():
            stage = getattr(importlib.import_module(f"vismoe.bench.gpu_check.{module}"), function)
        keep(stage(json.load(sys.stdin), keep))
    except Exception as error:  # the process boundary; the parent reports the error
        keep({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
