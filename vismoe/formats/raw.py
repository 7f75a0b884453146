"""The raw format: the model's own type and orientation, unchanged."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vismoe.formats.fixed_size import FixedSize, in_blocks
from vismoe.types import Format, RecordLayout

__all__ = ["Raw"]


@dataclass(frozen=True)
class Raw(FixedSize):
    """Codec of one geometry in format raw."""

    raw: RecordLayout

    @property
    def format(self) -> Format:
        return Format.RAW

    @cached_property
    def slab(self) -> RecordLayout:
        return in_blocks(self.raw)

    def encode(self, record: Tensor) -> Tensor:
        encoded = torch.zeros(self.slab.record_bytes, dtype=torch.uint8)
        self.restore(record, encoded)
        return encoded

    def restore(self, slab: Tensor, record: Tensor) -> None:
        for section in self.raw.sections:
            payload = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
            record[payload].copy_(slab[payload])
