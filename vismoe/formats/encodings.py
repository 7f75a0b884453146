"""How published checkpoints encode a matrix in fewer than 16 bits: FP8, 4-bit integers, MXFP4, NVFP4, and the blocks of GGUF.

An encoded matrix `[out, in]` lies in a record as sections `NAME.ENCODING` (codes uint8 `[out, row_bytes]`) and, where an encoding
has them, `NAME.scale`, `NAME.zero` and `NAME.factor`. The codes are the checkpoint's own numbers. `values` says what they mean:
the float32 result of the format's public dequantiser, bit for bit. Rounded once to the model's type, it is what torch computes
with, and the GPU kernels; the CPU kernels compute with the unrounded values. `docs/formats.md` has a table.

Shapes: o outputs (rows), i inputs; g inputs share a scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vismoe.errors import CheckpointError

Parts = Mapping[str, Tensor]  # "codes", "scale", "zero", "factor" of one matrix
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 .. 7; 8 .. 15 are their negatives
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl
PIECE_WEIGHTS = 2**18  # processed together; fewer cost more calls, more of them more cache misses and memory
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Encoding(ABC):
    """One encoding of matrices; `name` is that of its section of codes."""

    name: str

    @abstractmethod
    def row_bytes(self, inputs: int) -> int:
        """Bytes of the codes of a row. Raises CheckpointError where rows of so many inputs cannot be encoded."""

    @abstractmethod
    def values(self, parts: Parts, inputs: int) -> Tensor:
        """What the sections mean: float32 `[o, i]`."""

    def restored(self, parts: Parts, inputs: int, into: Tensor) -> None:
        """The same as the model's own weights, rounded to the type of `into` `[o, i]`, which may have strides."""
        into.copy_(self.values(parts, inputs))


def _whole(encoding: Encoding, inputs: int, group: int) -> int:
    """The number of groups in a row, which must be whole."""
    if inputs % group:
        raise CheckpointError(
            f"a matrix in {encoding.name} has rows of {inputs} inputs, and this format needs multiples of {group}. "
            "Fix: check that the files belong to their config.json"
        )
    return inputs // group


@dataclass(frozen=True)
class Scaled(Encoding):
    """A code per weight times a scale per group: fp8 (E4M3), w8 (int8). scale `[o, groups]` bfloat16, float16 or float32, of 128
    inputs each (the last group may be shorter) or of the whole row."""

    def row_bytes(self, inputs: int) -> int:
        return inputs

    def values(self, parts: Parts, inputs: int) -> Tensor:
        kind = torch.float8_e4m3fn if self.name == "fp8" else torch.int8
        return parts["codes"].view(kind).float() * spread(parts["scale"].float(), inputs)


@dataclass(frozen=True)
class Int4(Encoding):
    """Integers of 4 bits: w4, awq, gptq. Byte b of a row holds inputs 2b (its low half) and 2b + 1. w = scale (code - zero).

    scale `[o, i / g]` bfloat16, float16 or float32; zero uint8 of the same shape; without it all zeros are 8. The public
    dequantisers compute in the type of the scales, so a weight is rounded to it before it is rounded to the model's type.
    """

    def row_bytes(self, inputs: int) -> int:
        return _whole(self, inputs, 32) * 16

    def values(self, parts: Parts, inputs: int) -> Tensor:
        zero = spread(parts["zero"].float(), inputs) if "zero" in parts else 8.0
        return (nibbles(parts["codes"]).float() - zero) * spread(parts["scale"].float(), inputs)

    def restored(self, parts: Parts, inputs: int, into: Tensor) -> None:
        into.copy_(self.values(parts, inputs).to(parts["scale"].dtype))


@dataclass(frozen=True)
class MxFp4(Encoding):
    """E2M1 numbers times a power of two: gpt-oss. Bytes as in `Int4`; scale uint8 `[o, i / 32]`, w = code 2^(scale - 127)."""

    def row_bytes(self, inputs: int) -> int:
        return _whole(self, inputs, 32) * 16

    def values(self, parts: Parts, inputs: int) -> Tensor:
        exponents = spread(parts["scale"].int() - 127, inputs)
        return torch.ldexp(e2m1(parts["codes"]), exponents)


@dataclass(frozen=True)
class NvFp4(Encoding):
    """E2M1 numbers times an E4M3 scale of 16 inputs, uint8 `[o, i / 16]`, times a factor of the row, float32 `[o, 1]`.

    `divided`: divided by it (compressed-tensors), which rounds otherwise than multiplying by its reciprocal.
    """

    divided: bool = False

    def row_bytes(self, inputs: int) -> int:
        return _whole(self, inputs, 16) * 8

    def values(self, parts: Parts, inputs: int) -> Tensor:
        scale, factor = parts["scale"].view(torch.float8_e4m3fn).float(), parts["factor"]
        scale = scale / factor if self.divided else scale * factor
        return e2m1(parts["codes"]) * spread(scale, inputs)


@dataclass(frozen=True)
class Ggml(Encoding):
    """Blocks of ggml, as they lie in GGUF files: `block_inputs` weights with their scales in `block_bytes`.

    `decode`: uint8 `[n, block_bytes]` -> float32 `[n, block_inputs]`, equal to ggml's `dequantize_row_*`.
    """

    block_inputs: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]

    def row_bytes(self, inputs: int) -> int:
        return _whole(self, inputs, self.block_inputs) * self.block_bytes

    def values(self, parts: Parts, inputs: int) -> Tensor:
        codes = parts["codes"]
        return self.decode(codes.reshape(-1, self.block_bytes)).view(codes.shape[0], inputs)


def restore_in_pieces(encoding: Encoding, parts: Parts, into: Tensor) -> None:
    """As `Encoding.restored`, with little memory beside the result: some rows at a time."""
    for rows in row_blocks(into):
        encoding.restored({name: part[rows] for name, part in parts.items()}, into.shape[1], into[rows])


def row_blocks(matrix: Tensor) -> list[slice]:
    """Rows of a matrix `[out, in]` that are processed together, which bounds temporary copies."""
    rows = max(1, PIECE_WEIGHTS // max(1, matrix.shape[1]))
    return [slice(first, first + rows) for first in range(0, matrix.shape[0], rows)]


# ------------------------------------------------------------------ helpers
def spread(groups: Tensor, inputs: int) -> Tensor:
    """One value per group `[o, groups]` -> one per input `[o, i]`; a last group may be shorter than the others."""
    each = group_inputs(groups.shape[1], inputs)
    return groups.repeat_interleave(each, dim=1)[:, :inputs]


def group_inputs(groups: int, inputs: int) -> int:
    """Inputs of a group: 128 where that explains the number of groups (the last one may be shorter), otherwise an equal share."""
    return 128 if groups == -(-inputs // 128) > 1 else inputs // groups


def nibbles(codes: Tensor) -> Tensor:
    """uint8 `[o, n]` -> uint8 `[o, 2 n]`: the low half of each byte, then the high one."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def e2m1(codes: Tensor) -> Tensor:
    return _table((*E2M1, *(-value for value in E2M1)), nibbles(codes))


def _table(values: tuple[float, ...], codes: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def _f16(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(blocks: Tensor, at: int) -> Tensor:
    """16 bytes as 32 codes: all low halves, then all high ones."""
    codes = blocks[:, at : at + 16]
    return torch.cat((codes & 15, codes >> 4), 1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits, from the least one on, as 16 or 0, uint8 `[n, 32]`."""
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> bits) & 1).flatten(1) << 4


# ------------------------------------------------------------------ ggml's blocks
def _q8_0(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * (_halves(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * _halves(blocks, 4).float() + _f16(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * ((_halves(blocks, 6) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * (_halves(blocks, 8) | _fifth_bits(blocks, 4)).float() + _f16(blocks, 2)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _f16(blocks, 0) * _table(IQ4_NL, _halves(blocks, 2))


def _mxfp4(blocks: Tensor) -> Tensor:
    """ggml halves the power of two and doubles the codes, which are integers there: zero has one sign."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, torch.full_like(exponent, 0x200000) << exponent.clamp(max=1), (exponent - 1) << 23)
    doubled = tuple(2 * value for value in E2M1)
    return bits.view(torch.float32) * _table((*doubled, *(0.0 - value for value in doubled)), _halves(blocks, 1))


def _six_bit_pairs(blocks: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes, float32 `[n, 8, 1]`."""
    low, high, both = blocks[:, at : at + 4], blocks[:, at + 4 : at + 8], blocks[:, at + 8 : at + 12]
    scales = torch.cat((low & 63, (both & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((high & 63, (both >> 4) | ((high >> 2) & 48)), 1)
    return scales.float()[..., None], minima.float()[..., None]


def _affine_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """codes uint8 `[n, 8, 32]` -> d scale code - dmin minimum."""
    scales, minima = _six_bit_pairs(blocks, 4)
    d, dmin = _f16(blocks, 0)[..., None], _f16(blocks, 2)[..., None]
    return (d * scales * codes.float() - dmin * minima).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    quarters = blocks[:, 16:].unflatten(1, (4, 1, 32))
    return _affine_k(blocks, torch.cat((quarters & 15, quarters >> 4), 2).flatten(1, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    quarters = blocks[:, 48:].unflatten(1, (4, 1, 32))
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> bits) & 1) << 4
    return _affine_k(blocks, torch.cat((quarters & 15, quarters >> 4), 2).flatten(1, 2) | fifth)


def _two_bits(blocks: Tensor, at: int) -> Tensor:
    """64 bytes as 256 codes: of 32 bytes the lowest two bits first, uint8 `[n, 8, 32]`."""
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    return ((blocks[:, at : at + 64].unflatten(1, (2, 1, 32)) >> shifts) & 3).flatten(1, 2)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, codes = blocks[:, :16], _two_bits(blocks, 16).flatten(1).unflatten(1, (16, 16)).float()
    scale, minimum = _f16(blocks, 80) * (scales & 15).float(), _f16(blocks, 82) * (scales >> 4).float()
    return (scale[..., None] * codes - minimum[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    third = ((blocks[:, None, :32] >> bits) & 1) << 2
    codes = (_two_bits(blocks, 32) | third).flatten(1).unflatten(1, (16, 16)).float() - 4
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    fours = torch.cat((low & 15, low >> 4), 1) | torch.cat([((high >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], 1)
    return ((_f16(blocks, 108) * (fours.float() - 32))[..., None] * codes).flatten(1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1) << 4
    scales = _f16(blocks, 0) * ((nibbles(blocks[:, 4:8]) | high).float() - 32)
    codes = blocks[:, 8:].unflatten(1, (8, 16))
    return (scales[..., None] * _table(IQ4_NL, torch.cat((codes & 15, codes >> 4), 2))).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].unflatten(1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), 2).unflatten(3, (2, 32)).flatten(1, 3)  # [n, 8, 32]
    codes = (low | (_two_bits(blocks, 128) << 4)).flatten(1).float() - 32
    scales = _f16(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales[..., None] * codes.unflatten(1, (16, 16))).flatten(1)


FP8, W8 = Scaled("fp8"), Scaled("w8")
W4, AWQ, GPTQ = Int4("w4"), Int4("awq"), Int4("gptq")
MXFP4, NVFP4, NVFP4_DIVIDED = MxFp4("mxfp4"), NvFp4("nvfp4"), NvFp4("nvfp4_divided", divided=True)
GGML = {  # by ggml's names of types
    "Q4_0": Ggml("q4_0", 32, 18, _q4_0),
    "Q4_1": Ggml("q4_1", 32, 20, _q4_1),
    "Q5_0": Ggml("q5_0", 32, 22, _q5_0),
    "Q5_1": Ggml("q5_1", 32, 24, _q5_1),
    "Q8_0": Ggml("q8_0", 32, 34, _q8_0),
    "IQ4_NL": Ggml("iq4_nl", 32, 18, _iq4_nl),
    "MXFP4": Ggml("mxfp4_block", 32, 17, _mxfp4),
    "Q4_K": Ggml("q4_k", 256, 144, _q4_k),
    "Q5_K": Ggml("q5_k", 256, 176, _q5_k),
    "Q6_K": Ggml("q6_k", 256, 210, _q6_k),
    "Q2_K": Ggml("q2_k", 256, 84, _q2_k),
    "Q3_K": Ggml("q3_k", 256, 110, _q3_k),
    "IQ4_XS": Ggml("iq4_xs", 256, 136, _iq4_xs),
}
ENCODINGS: dict[str, Encoding] = {e.name: e for e in (FP8, W8, W4, AWQ, GPTQ, MXFP4, NVFP4, NVFP4_DIVIDED, *GGML.values())}
