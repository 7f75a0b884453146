"""The vocabulary: experts, layers, phases, records. Plain frozen data, no behaviour beyond arithmetic on itself.

Shape legend used everywhere: T tokens, H hidden, I expert intermediate, E experts per layer, K top-k, L MoE layers,
S slabs, W lookahead window. Units are in names: `_bytes`, `_s`, `_tokens`.
"""

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 64  # of records, sections and slabs: GEMV results in float32 depend on operand alignment


class ExpertId(NamedTuple):
    """One routed feed-forward network. `layer` counts MoE layers (experts modules) from 0 in model order."""

    layer: int
    expert: int


class Phase(enum.StrEnum):
    """What the forward pass is doing; counters are kept apart by it."""

    ENCODE = "encode"  # vision tower only
    PREFILL = "prefill"  # more than one new token per sequence
    DECODE = "decode"


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the record alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Section:
    """One tensor inside a record: `name` is the parameter's own name in the experts module (`gate_up_proj`, ...)."""

    name: str
    offset_bytes: int
    shape: tuple[int, ...]  # of one expert's row, in the model's own orientation
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """How one expert lies in a contiguous, 64-byte aligned record. Equal layouts are one geometry and share a pool."""

    sections: tuple[Section, ...]
    record_bytes: int

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]) -> "RecordLayout":
        """Sections in the given order, each starting on a 64-byte boundary."""
        sections, offset = [], 0
        for name, shape in shapes.items():
            sections.append(Section(name, offset, tuple(shape), dtypes[name]))
            offset = aligned(offset + sections[-1].nbytes)
        return cls(tuple(sections), offset)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of weights, without alignment gaps."""
        return sum(section.nbytes for section in self.sections)

    def views(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of a record's sections, `{name: tensor}`; `record` is uint8 `[record_bytes]` and is not copied."""
        return {s.name: record[s.offset_bytes : s.offset_bytes + s.nbytes].view(s.dtype).view(s.shape) for s in self.sections}


@dataclass(frozen=True)
class MoELayer:
    """One experts module of the model."""

    index: int  # ExpertId.layer
    path: str  # module path, unique: some families have two experts modules in one decoder layer
    num_experts: int
    top_k: int
    geometry: int  # index into ExpertInventory.layouts


@dataclass(frozen=True)
class ExpertInventory:
    """All routed experts of a model: its MoE layers in order and the distinct record layouts (geometries)."""

    layers: tuple[MoELayer, ...]
    layouts: tuple[RecordLayout, ...]

    def layout(self, layer: int) -> RecordLayout:
        return self.layouts[self.layers[layer].geometry]

    def layers_of(self, geometry: int) -> tuple[MoELayer, ...]:
        return tuple(layer for layer in self.layers if layer.geometry == geometry)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all experts as records in the model's dtype: what `memory="100%"` means."""
        return sum(layer.num_experts * self.layout(layer.index).record_bytes for layer in self.layers)
