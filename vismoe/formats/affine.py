"""The integer formats: groups of inputs of one row share a scale and an offset, w = scale * (q - 2^(bits - 1)) + offset.

Matrices are held [out, in], whatever the model's orientation. For each one a slab has three sections: `NAME.codes` uint8
`[out, row_bytes]`, `NAME.scale` and `NAME.offset` bfloat16 `[out, groups]`. One-dimensional sections (biases) are unchanged.
Codes are interleaved for the kernels: each bit lane of a 32-byte load holds one input per byte, and lanes are 32 inputs apart.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from vismoe.formats.codec import Codec, in_blocks
from vismoe.formats.encodings import Encoding, Parts, row_blocks
from vismoe.types import Format, RecordLayout, Section

LOAD_BYTES = 32  # bytes of codes that a kernel widens at once


@dataclass(frozen=True)
class Grid:
    """Group size, padding and code width of one integer format."""

    bits: int
    group_inputs: int  # inputs that share a scale and an offset
    chunk_inputs: int  # rows of codes are padded to whole chunks

    @property
    def lanes(self) -> int:
        """Codes in one byte."""
        return 8 // self.bits

    @property
    def middle(self) -> int:
        """The code that stands for the offset itself."""
        return 1 << (self.bits - 1)

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group_inputs)

    def row_inputs(self, inputs: int) -> int:
        """Inputs of one row of codes, padding included."""
        return -(-inputs // self.chunk_inputs) * self.chunk_inputs

    def row_bytes(self, inputs: int) -> int:
        return self.row_inputs(inputs) // self.lanes


GRIDS = {Format.INT8: Grid(8, 128, 64), Format.INT4: Grid(4, 128, 64), Format.INT2: Grid(2, 64, 128)}


@dataclass(frozen=True)
class Affine(Codec):
    """Codec of one geometry in int8, int4 or int2; `vismoe/kernels/affine.py` computes the codes.

    `nearest` turns off the optimisation of scales and offsets.
    """

    format: Format
    raw: RecordLayout
    transposed: frozenset[str]
    nearest: bool = False

    @property
    def grid(self) -> Grid:
        return GRIDS[self.format]

    @cached_property
    def slab(self) -> RecordLayout:
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for section in self.raw.sections:
            if len(section.shape) == 1:
                shapes[section.name], dtypes[section.name] = section.shape, section.dtype
                continue
            outputs, inputs = self.shape(section)
            groups = (outputs, self.grid.groups(inputs))
            shapes |= {f"{section.name}.codes": (outputs, self.grid.row_bytes(inputs))}
            shapes |= {f"{section.name}.scale": groups, f"{section.name}.offset": groups}
            dtypes |= {f"{section.name}.codes": torch.uint8}
            dtypes |= {f"{section.name}.scale": torch.bfloat16, f"{section.name}.offset": torch.bfloat16}
        return in_blocks(RecordLayout.of(shapes, dtypes))

    def shape(self, section: Section) -> tuple[int, int]:
        """(outputs, inputs) of a matrix of the raw layout."""
        rows, columns = section.shape
        return (columns, rows) if section.name in self.transposed else (rows, columns)

    def encode(self, record: Tensor) -> Tensor:
        """Raises CheckpointError for weights that are not finite: no scale fits a group that contains one."""
        encoded = torch.zeros(self.slab.record_bytes, dtype=torch.uint8)
        weights, stored = self.raw.views(record), self.slab.views(encoded)
        for section in self.raw.sections:
            if len(section.shape) == 1:
                stored[section.name].copy_(weights[section.name])
                continue
            matrix = self._matrix(section, weights[section.name])
            codes, scale, offset = (stored[f"{section.name}.{part}"] for part in ("codes", "scale", "offset"))
            for rows in row_blocks(matrix):
                codes[rows], scale[rows], offset[rows] = self._encode_rows(matrix[rows].float(), section.name)
        return encoded

    def restore(self, slab: Tensor, record: Tensor) -> None:
        weights, stored = self.raw.views(record), self.slab.views(slab)
        for section in self.raw.sections:
            if len(section.shape) == 1:
                weights[section.name].copy_(stored[section.name])
                continue
            matrix = self._matrix(section, weights[section.name])
            codes, scale, offset = (stored[f"{section.name}.{part}"] for part in ("codes", "scale", "offset"))
            bounds = torch.finfo(matrix.dtype)
            for rows in row_blocks(matrix):
                restored = self._restore_rows(codes[rows], scale[rows], offset[rows], matrix.shape[1])
                matrix[rows] = restored.clamp_(bounds.min, bounds.max)

    def _matrix(self, section: Section, weights: Tensor) -> Tensor:
        """A view [out, in] of a section's weights."""
        return weights.T if section.name in self.transposed else weights

    @abstractmethod
    def _encode_rows(self, rows: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [rows, in] -> codes [rows, row_bytes], scale and offset [rows, groups]; `name` is the section's, for errors."""

    def _restore_rows(self, codes: Tensor, scale: Tensor, offset: Tensor, inputs: int) -> Tensor:
        """Codes [rows, row_bytes], scale and offset [rows, groups] -> float32 [rows, inputs]."""
        return restore_rows(self.grid, codes, scale, offset, inputs)


@dataclass(frozen=True)
class AffineMatrix(Encoding):
    """One matrix by itself; its parts are codes, scale and offset. `name`: an integer format."""

    @property
    def grid(self) -> Grid:
        return GRIDS[Format(self.name)]

    def row_bytes(self, inputs: int) -> int:
        return self.grid.row_bytes(inputs)

    def values(self, parts: Parts, inputs: int) -> Tensor:
        return restore_rows(self.grid, parts["codes"], parts["scale"], parts["offset"], inputs)


def restore_rows(grid: Grid, codes: Tensor, scale: Tensor, offset: Tensor, inputs: int) -> Tensor:
    """Codes [rows, row_bytes], scale and offset [rows, groups] -> float32 [rows, inputs]."""
    centred = unpack(codes, grid)
    groups = functional.pad(centred, (0, scale.shape[1] * grid.group_inputs - centred.shape[1]))
    groups = groups.view(*scale.shape, grid.group_inputs)
    return groups.mul_(scale.float()[..., None]).add_(offset.float()[..., None]).flatten(1)[:, :inputs]


def unpack(codes: Tensor, grid: Grid) -> Tensor:
    """Bytes uint8 [rows, row_bytes] -> codes minus the middle, float32 [rows, row_inputs]."""
    if grid.lanes == 1:
        return codes.view(torch.int8).float()
    loads = codes.unflatten(1, (-1, LOAD_BYTES))
    lanes = [(loads >> (lane * grid.bits)) & (2 * grid.middle - 1) for lane in range(grid.lanes)]
    return torch.stack(lanes, dim=2).flatten(1).float().sub_(grid.middle)
