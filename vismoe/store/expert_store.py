"""What every store promises: any one expert, read into a record, without touching another expert's bytes."""

from typing import Protocol

import torch

from vismoe.types import ExpertId, ExpertInventory

__all__ = ["ExpertStore"]


class ExpertStore(Protocol):
    """Records on disk. Reading is thread-safe, and a read that is running when the store is closed still ends well."""

    @property
    def inventory(self) -> ExpertInventory:
        """The experts in it; record layouts are in the model's own orientation and in the dtype the model computes in."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Bounce buffer that one reading thread needs; 0 if every read goes straight into the record."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the checkpoint's files were when the store was opened; equal for equal files."""

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU memory, 64-byte aligned) with one expert; return bytes read from disk.

        Alignment gaps between sections are left as they are. Raises CheckpointError or ClosedError.
        """
        ...

    def close(self) -> None:
        """Release the files; reading afterwards raises ClosedError."""
        ...
