"""What every store promises: it reads any one expert into a record, without touching another expert's bytes."""

from pathlib import Path
from typing import Protocol

import torch

from vismoe.errors import CheckpointError
from vismoe.types import ExpertId, ExpertInventory

__all__ = ["ExpertStore", "StoreOnDisk", "naming_expert"]


def naming_expert(expert: ExpertId, error: CheckpointError) -> CheckpointError:
    """The same error, with a message that begins with the expert that was being read."""
    return type(error)(f"expert {expert.expert} of MoE layer {expert.layer}: {error}")


class ExpertStore(Protocol):
    """Reads the records of experts. Reading is thread-safe, and a read that is running when the store is closed still succeeds.

    If a file changes after it was opened, every read of it is an error until the store is opened again.
    """

    @property
    def inventory(self) -> ExpertInventory:
        """The experts of this store; record layouts are those of slabs."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the state of the checkpoint's files when the store was opened; equal for equal files."""

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU memory, 64-byte aligned) with one expert; return bytes read from disk.

        Gaps between sections have undefined content afterwards. Raises CheckpointError, which names the expert, or ClosedError.
        """
        ...

    def close(self) -> None:
        """Release the files; reading afterwards raises ClosedError."""
        ...


class StoreOnDisk(ExpertStore, Protocol):
    """A store over files: what loading needs to know about reading them."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the bounce buffer that one reading thread needs; 0 if every read goes straight into the record."""
        ...

    @property
    def bounce_bytes(self) -> int:
        """Bytes that one reading thread needs beside `scratch_bytes` to read past the page cache."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts on disk."""
        ...

    @property
    def paths(self) -> list[Path]:
        """The files that hold the records."""
        ...

    def read_past_cache(self) -> str | None:
        """Read with O_DIRECT from now on; returns the reason if this filesystem cannot. Reads in progress end as they began."""
        ...
