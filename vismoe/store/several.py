"""The stores of one model's experts, one per format that slabs hold, combined into one where the format makes no difference."""

from collections.abc import Sequence
from pathlib import Path

from vismoe.store.expert_store import StoreOnDisk

__all__ = ["Stores"]


class Stores:
    """`by_precision`: a store for each format, the most precise first; all of the same checkpoint."""

    def __init__(self, by_precision: Sequence[StoreOnDisk]):
        self.by_precision = tuple(by_precision)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self.by_precision[0].fingerprint

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the bounce buffer that one reading thread needs."""
        return max(store.scratch_bytes for store in self.by_precision)

    @property
    def bounce_bytes(self) -> int:
        """Bytes that one reading thread needs beside `scratch_bytes` to read past the page cache."""
        return max(store.bounce_bytes for store in self.by_precision)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts on disk, in all formats."""
        return sum(store.stored_bytes for store in self.by_precision)

    @property
    def paths(self) -> list[Path]:
        """The files that hold the records."""
        return [path for store in self.by_precision for path in store.paths]

    def read_past_cache(self) -> str | None:
        """Read with O_DIRECT from now on; returns the reason if a filesystem cannot. Reads in progress end as they began."""
        refusals = [store.read_past_cache() for store in self.by_precision]
        return next((refused for refused in refusals if refused is not None), None)

    def close(self) -> None:
        for store in self.by_precision:
            store.close()
