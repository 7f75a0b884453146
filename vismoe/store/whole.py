"""Small files that are there whole or not at all."""

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file at `path` in one step, through a neighbour that is gone when this ends. Raises OSError."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
