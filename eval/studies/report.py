"""The end of a study: its result as one JSON object on the last line of stdout, or an error on stderr."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vismoe.errors import VisMoEError

__all__ = ["folder_of", "told"]


def told(study: Callable[[], dict[str, Any]]) -> int:
    """Prints the result of `study`; returns the exit code of the command."""
    try:
        print(json.dumps(study()))
    except VisMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """`kept`, created if missing; without it, a temporary folder."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="vismoe-study-") as folder:
        yield Path(folder)
