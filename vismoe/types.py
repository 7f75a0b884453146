"""The vocabulary: experts, layers, phases, records. Plain frozen data, no behaviour beyond arithmetic on itself.

Shape legend used everywhere: T tokens, H hidden, I expert intermediate, E experts per layer, K top-k, L MoE layers,
S slabs, W lookahead window. Units are in names: `_bytes`, `_s`, `_tokens`.
"""

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vismoe.pair import BITS as BITS
from vismoe.pair import HIGH as HIGH
from vismoe.pair import LOW as LOW
from vismoe.pair import Format as Format
from vismoe.pair import FormatPair as FormatPair

BLOCK_BYTES = 4096  # a multiple of every disk's logical block; O_DIRECT requires offsets, sizes and memory aligned to it
ALIGNMENT_BYTES = 64  # of records, sections and slabs: GEMV results in float32 depend on operand alignment


class ExpertId(NamedTuple):
    """One routed feed-forward network. `layer` counts MoE layers (experts modules) from 0 in model order."""

    layer: int
    expert: int


class Phase(enum.StrEnum):
    """The kind of forward pass; counters are separate for each."""

    ENCODE = "encode"  # vision tower only
    PREFILL = "prefill"  # more than one new token per sequence
    DECODE = "decode"
    DRAFT = "draft"  # guesses at the next tokens, with experts out of the draft pool; a pass of decode checks them


class TokenKind(enum.IntEnum):
    """The kind of a row of the router's input."""

    TEXT = 0
    VISUAL = 1
    PAD = 2  # recorded in the trace, but demands no experts


@dataclass(frozen=True)
class Evidence:
    """The input of a learned lookahead at one MoE layer beside the routing (`vismoe.lookahead.features` computes it)."""

    hidden: np.ndarray  # [H] float16: the residual stream, pooled
    visual: np.ndarray | None  # [H] float16: the visual summary, if it changed within this request
    expected: np.ndarray | None  # [2, W, E] float16: predictions of the next routers; None: not available for the family


class Gate(enum.StrEnum):
    """How the first product of an expert holds gate and up."""

    NONE = "none"  # there is only up
    CONCATENATED = "concatenated"  # rows 0 .. I of the first matrix are the gate, I .. 2I are up
    INTERLEAVED = "interleaved"  # even rows are the gate, odd ones are up


class Activation(enum.StrEnum):
    """What an expert computes between its two products; `g` is the gate, `u` is up (u alone without a gate)."""

    SILU = "silu"  # silu(g) * u, with g clamped to at most `limit` and u to between -`limit` and `limit`
    GELU_TANH = "gelu_tanh"  # 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) * u
    GELU_ERF = "gelu_erf"  # 0.5 g (1 + erf(g / sqrt(2))) * u
    RELU_SQUARED = "relu_squared"  # relu(g)^2 * u
    CLAMPED_SWIGLU = "clamped_swiglu"  # g sigmoid(alpha g) * (u + 1), clamped likewise; gpt-oss


@dataclass(frozen=True)
class ExpertForm:
    """How an experts module uses the sections of its records: enough to compute an expert without the module."""

    up: str  # section of the first matrix, `gate_up_proj` or `up_proj`; its bias, if any, is `<up>_bias`
    down: str
    transposed: bool  # matrices are [in, out] in the model; [out, in] otherwise
    gate: Gate
    activation: Activation
    alpha: float = 1.0  # of clamped_swiglu
    limit: float = math.inf  # of silu and clamped_swiglu


def aligned(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """`nbytes` rounded up to the alignment of records, or to another one."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


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
    """How one expert lies in a contiguous, 64-byte aligned record. Equal layouts are one geometry and share a pool.

    room_bytes: a part of record_bytes, 0 or a power of two. In a slab the sections begin at any byte below it (`SlabPool.place`).
    """

    sections: tuple[Section, ...]
    record_bytes: int
    room_bytes: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> "RecordLayout":
        """Sections in the given order, each starting on a 64-byte boundary."""
        sections, offset = [], 0
        for name, shape in shapes.items():
            sections.append(Section(name, offset, tuple(shape), dtypes[name]))
            offset = aligned(offset + sections[-1].nbytes)
        return cls(tuple(sections), offset)

    def with_room(self, room_bytes: int) -> "RecordLayout":
        """The same for slabs that begin on multiples of `room_bytes`."""
        return RecordLayout(self.sections, aligned(self.record_bytes, room_bytes) + room_bytes, room_bytes)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of weights, without alignment gaps."""
        return sum(section.nbytes for section in self.sections)

    def views(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of a record's sections, `{name: tensor}`; `record` is uint8 `[record_bytes]` and is not copied."""
        return {s.name: record[s.offset_bytes : s.offset_bytes + s.nbytes].view(s.dtype).view(s.shape) for s in self.sections}


def stack_of(path: str) -> str:
    """The path of the model whose layers hold the experts at `path`: `model` for `model.layers.3.mlp.experts`."""
    return re.split(r"\.?\w+\.\d+\.", path, maxsplit=1)[0]


def decoder_layer_of(path: str) -> str:
    """The path of the layer that holds the experts at `path`: `model.layers.3` for `model.layers.3.mlp.experts`."""
    found = re.match(r".*?\w+\.\d+(?=\.)", path)
    return found.group() if found is not None else path


@dataclass(frozen=True)
class MoELayer:
    """One experts module of the model."""

    index: int  # ExpertId.layer
    path: str  # module path, unique: some families have two experts modules in one decoder layer
    num_experts: int
    top_k: int
    geometry: int  # index into ExpertInventory.layouts

    @property
    def stack(self) -> str:
        """The path of the model whose layers this one is of."""
        return stack_of(self.path)


@dataclass(frozen=True)
class ExpertInventory:
    """All routed experts of a model: its MoE layers in order and the distinct record layouts (geometries)."""

    layers: tuple[MoELayer, ...]
    layouts: tuple[RecordLayout, ...]  # of records in slabs
    model_layouts: tuple[RecordLayout, ...] = ()  # in the model's dtype and orientation, if slabs hold another format
    low_layouts: tuple[RecordLayout, ...] = ()  # of slabs in the second format of a pair; `layouts` are then those of the first
    own_layouts: tuple[RecordLayout, ...] = ()  # as the checkpoint encodes them, if it is quantised

    @property
    def raw_layouts(self) -> tuple[RecordLayout, ...]:
        """Layouts in the model's dtype and orientation, by geometry."""
        return self.model_layouts or self.layouts

    def layout(self, layer: int) -> RecordLayout:
        return self.layouts[self.layers[layer].geometry]

    def layers_of(self, geometry: int) -> tuple[MoELayer, ...]:
        return tuple(layer for layer in self.layers if layer.geometry == geometry)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all experts as the checkpoint encodes them, or in the model's dtype: what `memory="100%"` means."""
        both = zip(self.layouts, self.own_layouts or self.raw_layouts, strict=True)  # they may be stored in whole blocks
        as_held = [slab if slab.sections == own.sections else own for slab, own in both]
        return sum(layer.num_experts * as_held[layer.geometry].record_bytes for layer in self.layers)

    @cached_property
    def slab_bytes(self) -> int:
        """Bytes of slabs for all experts, in the format that slabs hold."""
        return sum(layer.num_experts * self.layout(layer.index).record_bytes for layer in self.layers)
