"""Formats of experts, and pairs of formats between which a policy chooses. Imports nothing heavy."""

import enum
from dataclasses import dataclass


class Format(enum.StrEnum):
    """How an expert's numbers are encoded."""

    RAW = "raw"  # the checkpoint's own type, the model's own orientation
    LOSSLESS = "lossless"  # bf16 with packed exponents, on disk only; memory holds the decoded weights
    INT8 = "int8"  # the integer formats: a scale and an offset per group of inputs
    INT4 = "int4"
    INT2 = "int2"

    @property
    def exact(self) -> bool:
        """Whether the format keeps every bit of the weights."""
        return self in (Format.RAW, Format.LOSSLESS)


HIGH, LOW = 0, 1  # an expert's precision: the first or the second format of a pair
BITS = {Format.RAW: 16, Format.LOSSLESS: 16, Format.INT8: 8, Format.INT4: 4, Format.INT2: 2, None: 0}


@dataclass(frozen=True)
class FormatPair:
    """The two formats between which a policy moves experts, the more precise first; `low` None: skip, 0 bits, not computed."""

    high: Format
    low: Format | None

    def __str__(self) -> str:
        return f"{self.high}/{self.low or 'skip'}"

    @property
    def resident(self) -> tuple[Format, ...]:
        """The formats that slabs hold, ordered by precision."""
        return (self.high,) if self.low is None else (self.high, self.low)
