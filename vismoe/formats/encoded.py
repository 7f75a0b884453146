"""Experts as a quantised checkpoint has them: matrices keep the file's own numbers, and are restored when torch computes.

A slab holds each encoded matrix `[out, in]` in the sections that `encodings.py` describes, and all other sections (biases,
matrices that the checkpoint leaves in 16 bits) as the model has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from vismoe.errors import ConfigError
from vismoe.formats.codec import Codec
from vismoe.formats.encodings import ENCODINGS, Encoding, restore_in_pieces
from vismoe.types import ExpertInventory, Format, RecordLayout, Section

PARTS = ("scale", "zero", "factor")  # beside the codes


@dataclass(frozen=True)
class EncodedMatrix:
    """How one matrix of a record is encoded: its sections by part, "codes" among them."""

    encoding: Encoding
    sections: Mapping[str, Section]

    def parts(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sections' tensors among those of a record."""
        return {part: views[section.name] for part, section in self.sections.items()}


def encoded_matrices(layout: RecordLayout) -> dict[str, EncodedMatrix]:
    """The encoded matrices of a record by name, found by the names of its sections; empty for a raw record."""
    sections = {section.name: section for section in layout.sections}
    found = {}
    for section in layout.sections:
        matrix, _, encoding = section.name.rpartition(".")
        if encoding in ENCODINGS:
            beside = {part: sections[f"{matrix}.{part}"] for part in PARTS if f"{matrix}.{part}" in sections}
            found[matrix] = EncodedMatrix(ENCODINGS[encoding], {"codes": section, **beside})
    return found


def encodings_of(inventory: ExpertInventory) -> list[str]:
    """The names of all encodings of a quantised checkpoint's experts; empty for one in 16 bits."""
    return sorted({m.encoding.name for layout in inventory.own_layouts for m in encoded_matrices(layout).values()})


@dataclass(frozen=True)
class Encoded(Codec):
    """Codec of one geometry as the checkpoint encodes it. `own`: the layout of its records, which slabs have too; `transposed`
    names the matrices that the model keeps as [in, out]."""

    raw: RecordLayout
    own: RecordLayout
    transposed: frozenset[str] = frozenset()
    format = Format.RAW

    @property
    def slab(self) -> RecordLayout:
        return self.own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({matrix.encoding.name for matrix in self._matrices.values()})) or (str(self.format),)

    @property
    def restores(self) -> bool:
        return bool(self._matrices)

    @cached_property
    def _matrices(self) -> dict[str, EncodedMatrix]:
        return encoded_matrices(self.own)

    def encode(self, record: Tensor) -> Tensor:
        raise ConfigError(
            f"experts in {', '.join(self.names)} are read from the checkpoint as they lie there, and cannot be made from others. "
            "Fix: one of int8, int4 and int2 (--formats)"
        )

    def restore(self, slab: Tensor, record: Tensor) -> None:
        weights, stored = self.raw.views(record), self.own.views(slab)
        for section in self.raw.sections:
            matrix, into = self._matrices.get(section.name), weights[section.name]
            if matrix is None:
                into.copy_(stored[section.name])
                continue
            self._restore_matrix(matrix.encoding, matrix.parts(stored), into.T if section.name in self.transposed else into)

    def _restore_matrix(self, encoding: Encoding, parts: Mapping[str, Tensor], into: Tensor) -> None:
        restore_in_pieces(encoding, parts, into)
