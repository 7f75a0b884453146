"""What a format is: how one expert's raw record is encoded for storage, what a slab holds, and how weights are restored.

A codec belongs to one geometry and one format. It is pure: no I/O, no state, and the same bytes for the same record on every
call, with any number of threads. `docs/formats.md` draws the layouts.
"""

from abc import ABC, abstractmethod
from functools import cached_property

from torch import Tensor

from vismoe.types import BLOCK_BYTES, Format, RecordLayout, aligned


class Codec(ABC):
    """One geometry in one format. Unless a format says otherwise, a slab holds the raw record in whole blocks, and what is stored
    is what a slab holds: a reader reads straight into the slab."""

    format: Format
    raw: RecordLayout  # of a raw record, in the model's dtype and orientation

    @cached_property
    def slab(self) -> RecordLayout:
        """Layout of a slab, in whole blocks of BLOCK_BYTES, so that O_DIRECT can read straight into it."""
        return in_blocks(self.raw)

    @property
    def names(self) -> tuple[str, ...]:
        """What slabs hold, for people."""
        return (str(self.format),)

    @property
    def restores(self) -> bool:
        """Whether torch needs the weights restored before it computes with them."""
        return not self.format.exact

    @property
    def fixed_bytes(self) -> int | None:
        """Bytes of an encoded record, in whole blocks; None where they vary."""
        return self.slab.record_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest encoded record, in whole blocks."""
        return self.slab.record_bytes

    @abstractmethod
    def encode(self, record: Tensor) -> Tensor:
        """uint8 `[raw.record_bytes or more]` -> uint8 `[n]`; gaps and the end of the last block are zero."""

    def decode(self, encoded: Tensor, slab: Tensor) -> None:
        """Encoded bytes -> what a slab holds, written into `slab`, uint8 `[slab.record_bytes or more]`."""
        slab[: self.slab.record_bytes].copy_(encoded)

    def check_header(self, encoded: Tensor) -> None:
        """Raises CheckpointError where an encoded record describes itself, and `encode` cannot have written that."""
        return

    def restore(self, slab: Tensor, record: Tensor) -> None:
        """What a slab holds -> weights in the model's dtype and orientation, written into `record`; gaps are not touched."""
        for section in self.raw.sections:
            payload = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
            record[payload].copy_(slab[payload])


def in_blocks(layout: RecordLayout) -> RecordLayout:
    """The same sections, the record rounded up to whole blocks."""
    return RecordLayout(layout.sections, aligned(layout.record_bytes, BLOCK_BYTES))
