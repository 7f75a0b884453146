"""The stores of one model's experts, one per format that slabs hold, combined into one where the format makes no difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vismoe.store.expert_store import StoreOnDisk

__all__ = ["Reads", "Stores"]


@dataclass(frozen=True)
class Reads:
    """What reading experts in all their formats takes."""

    scratch_bytes: int  # of the bounce buffer of one reading thread
    bounce_bytes: int  # that one reading thread needs beside it to read past the page cache
    stored_bytes: int  # of all experts on disk
    paths: list[Path]  # of the files that hold the records; empty: they are not on this machine


class Stores:
    """`by_precision`: a store for each format, the most precise first; all of the same checkpoint."""

    def __init__(self, by_precision: Sequence[StoreOnDisk]):
        self.by_precision = tuple(by_precision)
        self.fingerprint = by_precision[0].fingerprint  # of the checkpoint
        self.reads = Reads(
            max(store.scratch_bytes for store in by_precision),
            max(store.bounce_bytes for store in by_precision),
            sum(store.stored_bytes for store in by_precision),
            [path for store in by_precision for path in store.paths],
        )

    def read_past_cache(self) -> str | None:
        """Read with O_DIRECT from now on; returns the reason if a filesystem cannot. Reads in progress end as they began."""
        refusals = [store.read_past_cache() for store in self.by_precision]
        return next((refused for refused in refusals if refused is not None), None)

    def close(self) -> None:
        for store in self.by_precision:
            store.close()
