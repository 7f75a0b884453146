"""A cache of the hub as `huggingface_hub` keeps it, with checkpoints that a test puts there."""

import shutil
from collections.abc import Callable
from pathlib import Path

from vismoe.engine.engine import demo_model

COMMIT = "a" * 40


def put(cache: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """The snapshot of a repository, which `fill` writes."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    fill(snapshot)
    return snapshot


def copy_of_demo(folder: Path) -> None:
    """The demo model under another name."""
    for file in demo_model().iterdir():
        if file.is_file():
            shutil.copy(file, folder)
