"""What codecs share whose encoded records are what a slab holds."""

from abc import ABC, abstractmethod

from torch import Tensor

from vismoe.types import BLOCK_BYTES, RecordLayout, aligned

__all__ = ["FixedSize", "in_blocks"]


class FixedSize(ABC):
    """Every encoded record has the slab's size: a reader reads straight into the slab."""

    @property
    @abstractmethod
    def slab(self) -> RecordLayout:
        """As in Codec."""

    @property
    def fixed_bytes(self) -> int:
        return self.slab.record_bytes

    @property
    def most_bytes(self) -> int:
        return self.slab.record_bytes

    def decode(self, encoded: Tensor, slab: Tensor) -> None:
        slab[: self.slab.record_bytes].copy_(encoded)


def in_blocks(layout: RecordLayout) -> RecordLayout:
    """The same sections, the record rounded up to whole blocks."""
    return RecordLayout(layout.sections, aligned(layout.record_bytes, BLOCK_BYTES))
