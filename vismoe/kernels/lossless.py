"""The codec of the lossless format in C++, at memory speed.

A call uses one core and releases the interpreter lock; several threads may encode and decode at the same time, different records
or parts of one record.
"""

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vismoe.formats.lossless import Lossless, check, packable
from vismoe.kernels.library import function, instruction_sets, library, refuse_missing

Isa = Literal["portable", "avx2", "avx512"]  # in the order of csrc/lossless.cpp, later ones preferred; avx512 needs VBMI2
EMPTY = 2**40  # so many parts are more than the bytes of a section: the first one is empty, and nothing is written
ISAS: tuple[Isa, ...] = get_args(Isa)
_encode = function(
    "vismoe_lossless_encode", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p], ctypes.c_uint64
)
_decode = function(
    "vismoe_lossless_decode",
    [*[ctypes.c_void_p, ctypes.c_uint64] * 2, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int],
    ctypes.c_int,
)


@cache
def available() -> tuple[Isa, ...]:
    """The instruction sets that this machine has and the library was built for, best last."""
    return instruction_sets(ISAS, library().vismoe_lossless_isas())


@dataclass(frozen=True)
class FastLossless(Lossless):
    """Codec of one geometry in format lossless. `isa` forces the decoder's instruction set; None selects the best available."""

    isa: Isa | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_missing(self.isa, available)

    def encode(self, record: Tensor) -> Tensor:
        encoded = torch.empty(self.most_bytes, dtype=torch.uint8)
        source, sections = _address(record, self.raw.record_bytes), self._sections
        written = _encode()(source, sections.ctypes.data, len(sections), encoded.data_ptr())
        return encoded[:written]

    def decode(self, encoded: Tensor, slab: Tensor, part: int = 0, parts: int = 1) -> None:
        """Fills `part` (from 0) of `parts` equal parts of the slab, so that several threads can decode one record.

        Raises CheckpointError for bytes that `encode` cannot have written for this geometry, as far as this part reads them.
        """
        assert 0 <= part < parts, f"part {part} of {parts}"
        self._decode_part(encoded, _address(slab, self.raw.record_bytes), part, parts)

    def check_header(self, encoded: Tensor) -> None:
        self._decode_part(encoded, _address(encoded, 0), 0, EMPTY)

    def _decode_part(self, encoded: Tensor, target: int, part: int, parts: int) -> None:
        source, sections = _address(encoded, 0), self._sections
        isa = ISAS.index(self.isa or available()[-1])
        check(_decode()(source, encoded.numel(), sections.ctypes.data, len(sections), target, part, parts, isa))

    @cached_property
    def _sections(self) -> NDArray[np.uint64]:
        """(offset_bytes, bytes, packable) of each section, in the form that csrc/lossless.cpp reads."""
        return np.array([(s.offset_bytes, s.nbytes, packable(s)) for s in self.raw.sections], np.uint64)


def _address(data: Tensor, least_bytes: int) -> int:
    """The address of `data`: contiguous bytes in this process's memory, at least `least_bytes`."""
    if data.device.type != "cpu" or data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() < least_bytes:
        raise ValueError(
            f"expected uint8 {list(data.shape)} on the CPU without strides, at least {least_bytes} bytes; "
            f"got {data.dtype} with strides {data.stride()} on {data.device}"
        )
    return data.data_ptr()
