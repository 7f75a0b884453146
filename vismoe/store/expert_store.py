"""What every store promises: any one expert, read into a record, without touching another expert's bytes."""

from pathlib import Path
from typing import Protocol

import torch

from vismoe.errors import CheckpointError
from vismoe.types import ExpertId, ExpertInventory

__all__ = ["ExpertStore", "StoreOnDisk", "naming_expert"]


def naming_expert(expert: ExpertId, error: CheckpointError) -> CheckpointError:
    """The same error, which begins with the expert that was being read."""
    return type(error)(f"expert {expert.expert} of MoE layer {expert.layer}: {error}")


class ExpertStore(Protocol):
    """Records. Reading is thread-safe, and a read that is running when the store is closed still ends well.

    A file that has changed since it was opened is not read any more: until it is opened anew, every read of it is an error.
    """

    @property
    def inventory(self) -> ExpertInventory:
        """The experts in it; record layouts are those of slabs."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the checkpoint's files were when the store was opened; equal for equal files."""

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU memory, 64-byte aligned) with one expert; return bytes read from disk.

        Alignment gaps between sections mean nothing afterwards. Raises CheckpointError, which names the expert, or ClosedError.
        """
        ...

    def close(self) -> None:
        """Release the files; reading afterwards raises ClosedError."""
        ...


class StoreOnDisk(ExpertStore, Protocol):
    """A store over files: what loading settles about reading them."""

    @property
    def scratch_bytes(self) -> int:
        """Bounce buffer that one reading thread needs; 0 if every read goes straight into the record."""
        ...

    @property
    def bounce_bytes(self) -> int:
        """What one reading thread needs beside that to read past the page cache."""
        ...

    @property
    def stored_bytes(self) -> int:
        """What all experts take on disk."""
        ...

    @property
    def paths(self) -> list[Path]:
        """The files that hold the records."""
        ...

    def read_past_cache(self) -> str | None:
        """Read with O_DIRECT from now on; or say why this filesystem cannot. Reads under way end as they began."""
        ...
