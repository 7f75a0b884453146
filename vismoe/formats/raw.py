"""The raw format: the model's own type and orientation, unchanged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vismoe.formats.codec import Codec
from vismoe.types import Format, RecordLayout


@dataclass(frozen=True)
class Raw(Codec):
    """Codec of one geometry in format raw."""

    raw: RecordLayout
    format = Format.RAW

    def encode(self, record: Tensor) -> Tensor:
        encoded = torch.zeros(self.slab.record_bytes, dtype=torch.uint8)
        self.restore(record, encoded)
        return encoded
