"""The tensors of a checkpoint as a model means them: an encoded matrix with its scales is one.

What a quantised checkpoint has is decided by the tensors that are present, by their names, types and shapes; config.json settles
what they do not show. Companions (scales, zero points, shapes, scales of activations) do not appear as tensors of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.formats.encodings import AWQ, FLOATS, FP8, GPTQ, MXFP4, NVFP4, NVFP4_DIVIDED, W4, W8, Encoding
from vismoe.store.arrangement import (
    AWQ_ORDER,
    AWQ_WORDS,
    GPTQ_ONES,
    GPTQ_WORDS,
    SAME,
    TRANSPOSED,
    Arrangement,
    NaturalOrder,
    RowsRepeated,
    ZeroPoints,
)
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry

Entries = Mapping[str, tuple[int, TensorEntry]]  # name -> (file, entry)
CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
BLOCK_ROWS = GROUP = 128  # of FP8's blocks
IGNORED = (  # of activations and caches, and shapes that the tensors have themselves
    "input_scale", "input_scale_inv", "input_global_scale", "activation_scale", "qscale_act", "weight_shape",
    "q_scale", "k_scale", "v_scale", "output_scale",
)  # fmt: skip
METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4", "awq", "gptq")  # whose tensors mean what is written here
GPTQ_LAYOUTS, AWQ_LAYOUTS = ("none", "gptq", "gptq_v2"), ("none", "gemm", "exllama")  # exllama's files are those of gemm
ORIGINAL = "Instead: the original checkpoint of the model, or one in a format of docs/formats.md"


class TensorPart(NamedTuple):
    """A contiguous tensor on disk; the parts of a section are concatenated along dim 0."""

    file: int  # index into the store's files
    offset_bytes: int
    shape: tuple[int, ...]  # on disk
    dtype: torch.dtype  # on disk
    arrangement: Arrangement = SAME

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def result(self) -> tuple[int, ...]:
        """The shape in the record."""
        return self.arrangement.shape(self.shape)

    def row(self, index: int) -> "TensorPart":
        """One of the tensors that are stacked along dim 0."""
        shape = self.shape[1:]
        nbytes = math.prod(shape) * self.dtype.itemsize
        return self._replace(offset_bytes=self.offset_bytes + index * nbytes, shape=shape)

    def bytes_as(self, *shape: int) -> "TensorPart":
        """The same bytes as uint8."""
        assert math.prod(shape) == self.nbytes, (self, shape)
        return self._replace(shape=shape, dtype=torch.uint8)


@dataclass(frozen=True)
class EncodedTensor:
    """A matrix `[o, i]`, or `[E, o, i]` stacked, that the checkpoint holds in an encoding; parts as `Encoding` has them.

    order: of its inputs, read with the parts to see that it is the natural one.
    """

    encoding: Encoding
    shape: tuple[int, ...]
    parts: Mapping[str, TensorPart]
    order: TensorPart | None = None

    @property
    def result(self) -> tuple[int, ...]:
        return self.shape

    def read_for(self, part: str) -> tuple[TensorPart, ...]:
        """What is read to have a part: the order of the inputs with the codes."""
        return (self.parts[part],) if part != "codes" or self.order is None else (self.parts[part], self.order)

    def row(self, index: int) -> "EncodedTensor":
        return EncodedTensor(self.encoding, self.shape[1:], {name: part.row(index) for name, part in self.parts.items()})


Tensors = dict[str, TensorPart | EncodedTensor]


def tensors_of(headers: Sequence[SafetensorsHeader], quantization: Mapping[str, Any] | None = None) -> Tensors:
    """All tensors of a checkpoint by name; an encoded one by the name that its weight would have.

    quantization: what config.json says under `quantization_config`. It settles only what tensors do not show: whether the method
    is a known one, the bits and the order of packed integers, and GPTQ's version. Raises UnsupportedModelError for an encoding
    that VisMoE does not read, CheckpointError for parts that are missing or do not fit.
    """
    entries = {name: (index, entry) for index, header in enumerate(headers) for name, entry in header.tensors.items()}
    found: Tensors = {}
    used: set[str] = set()
    leaves: dict[str, list[str]] = {}  # of each module
    for name in entries:
        module, _, leaf = name.rpartition(".")
        leaves.setdefault(module, []).append(leaf)
    for name in entries:
        group = _group_of(name, entries, quantization or {})
        if group is not None:
            weight, found[weight] = group.tensor()
            group.refuse_unknown(leaves[name.rpartition(".")[0]])
            used |= group.used
    for name, (index, entry) in entries.items():
        if name not in used and name.rpartition(".")[2] not in IGNORED and entry.dtype is not None:
            found[name] = TensorPart(index, entry.offset_bytes, entry.shape, entry.dtype)
    return found


def _group_of(name: str, entries: Entries, quantization: Mapping[str, Any]) -> "_Group | None":
    """The group whose codes are the tensor `name`; None for a tensor that stands for itself."""
    for first in ("weight_packed", "qweight", "_blocks"):
        if name.endswith(first):
            return _Group(name.removesuffix(first), first, entries, quantization)
    entry = entries[name][1]
    if entry.dtype not in CODES or len(entry.shape) < 2:
        return None
    first = "weight" if name.endswith(".weight") else ""
    group = _Group(name.removesuffix(first), first, entries, quantization)
    return group if group.part(*group.scales) is not None else None


class _Group:
    """The tensors that make up one weight; each is called `stem` and a suffix, the codes `stem` and `first`."""

    def __init__(self, stem: str, first: str, entries: Entries, quantization: Mapping[str, Any]):
        self.stem, self.first, self._entries, self._quantization = stem, first, entries, quantization
        self.used: set[str] = set()
        self._names: dict[tuple[int, int], str] = {}  # by file and offset
        scales = ("weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight")
        self.scales = scales if first else tuple(f"_{suffix}" for suffix in scales)

    def part(self, *suffixes: str) -> TensorPart | None:
        """The first of these tensors that is there."""
        for suffix in suffixes:
            index, entry = self._entries.get(self.stem + suffix, (0, None))
            if entry is not None and entry.dtype is not None:
                self.used.add(self.stem + suffix)
                self._names[index, entry.offset_bytes] = self.stem + suffix
                return TensorPart(index, entry.offset_bytes, entry.shape, entry.dtype)
        return None

    def tensor(self) -> tuple[str, EncodedTensor]:
        """(the name of the weight, what it is)."""
        codes = self._need(self.first)
        method = str(self._quantization.get("quant_method") or METHODS[0])
        if not method.startswith(METHODS):
            raise self._unsupported(f"config.json says that it is quantised by {method}, which VisMoE does not know")
        if self.first == "_blocks":
            return self.stem, self._mxfp4(codes)
        if self.first == "qweight":
            tensor = self._transposed_words(codes)
        elif self.first == "weight_packed" and codes.dtype == torch.int32:
            tensor = self._words(codes)
        elif self._in_powers_of_two(codes):
            tensor = self._microscaled(codes)
        elif codes.dtype == torch.uint8:
            tensor = self._nvfp4(codes)
        else:
            tensor = self._scaled(codes)
        return f"{self.stem}weight" if self.first else self.stem, tensor

    def refuse_unknown(self, leaves: Sequence[str]) -> None:
        """Refuse tensors beside the codes that VisMoE does not know; they may change what the codes mean."""
        module, _, matrix = self.stem.rpartition(".")
        for leaf in leaves:
            suffix = leaf.removeprefix(matrix).removeprefix("_")
            known = f"{module}.{leaf}".removeprefix(".") in self.used or suffix in IGNORED or suffix.endswith("bias")
            if leaf.startswith(matrix) and not known:
                raise self._unsupported(f"VisMoE does not know what {leaf} beside it means")

    def _need(self, *suffixes: str) -> TensorPart:
        part = self.part(*suffixes)
        if part is None:
            raise CheckpointError(
                f"{self.stem}{self.first}: the checkpoint has no {self.stem}{suffixes[0]}, without which its numbers mean "
                "nothing. Fix: check that all files of the model are there, or download them again"
            )
        return part

    def _unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.stem}{self.first}: {why}. {ORIGINAL}")

    def _fitting(self, codes: TensorPart, beside: TensorPart, fits: bool) -> None:
        if not fits:
            raise CheckpointError(
                f"{self.stem}{self.first} is {codes.dtype} of shape {codes.shape}, and {self._names[beside[:2]]} is "
                f"{beside.dtype} of {beside.shape}: they do not fit each other in any format that VisMoE reads. {ORIGINAL}"
            )

    def _four_bits(self) -> None:
        """Refuse packed integers of another width."""
        groups = self._quantization.get("config_groups")
        groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
        weights = [self._quantization, *(group["weights"] for group in groups if isinstance(group.get("weights"), dict))]
        stated = {str(bits) for each in weights for bits in (each.get("bits"), each.get("num_bits")) if bits}
        if stated and "4" not in stated:
            raise self._unsupported(f"its integers are packed with {', '.join(sorted(stated))} bits, and 4 are read")

    def _stated(self, setting: str, known: tuple[str, ...]) -> str:
        """What config.json says about a layout; refused where it is not one of `known`."""
        value = str(self._quantization.get(setting)).lower()
        if value not in known:
            raise self._unsupported(f"its integers are arranged for {value} ({setting} in config.json)")
        return value

    # ---------------------------------------------------------------- the formats
    def _scaled(self, codes: TensorPart) -> EncodedTensor:
        """FP8 and int8 with a scale for a block of 128 x 128, an output, or the tensor."""
        *stack, rows, inputs = codes.shape
        scale = self._need(*self.scales)
        if scale.dtype == torch.uint8:
            scale = scale._replace(dtype=torch.float8_e8m0fnu)
        if scale.dtype not in (*FLOATS, torch.float8_e8m0fnu):
            raise self._unsupported(f"its scale is {scale.dtype}")
        shape = scale.shape
        if len(shape) != len(codes.shape) or list(shape[:-2]) != stack:  # one number per tensor or per output
            count = math.prod(shape) // max(1, math.prod(stack))
            shape = (*stack, count, 1)
            self._fitting(codes, scale, count in (1, rows) and math.prod(shape) == math.prod(scale.shape))
        blocks, groups = shape[-2:]
        each = rows // blocks if blocks in (1, rows) else BLOCK_ROWS
        halves = stack and (blocks, groups) == (2, 1) and inputs > GROUP and rows % 2 == 0  # a scale for gate and one for up
        in_blocks = -(-rows // each) == blocks and groups == -(-inputs // GROUP)
        self._fitting(codes, scale, in_blocks or bool(halves) or (groups == 1 and blocks in (1, rows)))
        each = rows // 2 if halves else each
        scale = scale._replace(shape=shape, arrangement=SAME if each == 1 else RowsRepeated(each, rows))
        encoding = FP8 if codes.dtype == torch.float8_e4m3fn else W8
        return EncodedTensor(encoding, codes.shape, {"codes": codes.bytes_as(*codes.shape), "scale": scale})

    def _words(self, codes: TensorPart) -> EncodedTensor:
        """compressed-tensors, pack-quantized: eight inputs in a word."""
        self._four_bits()
        scale, zero, order = self._need("weight_scale"), self.part("weight_zero_point"), self.part("weight_g_idx")
        if order is not None:
            raise self._unsupported("its inputs are in another order (weight_g_idx)")
        if len(codes.shape) != 2:
            raise self._unsupported(f"it is packed as a tensor of shape {codes.shape}")
        rows, inputs = codes.shape[0], 8 * codes.shape[1]
        fits = len(scale.shape) == 2 and scale.shape[0] == rows and inputs % (32 * scale.shape[1]) == 0
        self._fitting(codes, scale, fits and scale.dtype in FLOATS)
        parts = {"codes": codes.bytes_as(rows, inputs // 2), "scale": scale}
        if zero is not None:
            self._fitting(codes, zero, zero.dtype == torch.int32 and zero.shape == (-(-rows // 8), scale.shape[1]))
            parts["zero"] = zero._replace(arrangement=ZeroPoints(0, rows))
        return EncodedTensor(W4, (rows, inputs), parts)

    def _transposed_words(self, codes: TensorPart) -> EncodedTensor:
        """AWQ: eight outputs in a word; GPTQ: eight inputs. Scales and zero points are [groups, o]."""
        self._four_bits()
        scale, zero, order = self._need("scales"), self._need("qzeros"), self.part("g_idx")
        if len(codes.shape) != 2 or len(scale.shape) != 2 or codes.dtype != torch.int32:
            raise self._unsupported(f"qweight is {codes.dtype} of shape {codes.shape}")
        rows = scale.shape[1]
        if order is None and self._quantization.get("desc_act"):
            raise self._unsupported("config.json says desc_act, and no g_idx is there that tells the order of its inputs")
        if codes.shape[1] == rows:
            inputs, encoding = 8 * codes.shape[0], GPTQ
            plus = 0 if self._stated("checkpoint_format", GPTQ_LAYOUTS) == "gptq_v2" else GPTQ_ONES
            zeros = ZeroPoints(1, rows, plus=plus)
        else:
            self._stated("version", AWQ_LAYOUTS)
            inputs, encoding = codes.shape[0], AWQ
            zeros = ZeroPoints(1, rows, AWQ_ORDER)
            self._fitting(codes, scale, 8 * codes.shape[1] == rows)
        self._fitting(codes, scale, inputs % (32 * scale.shape[0]) == 0 and scale.dtype in FLOATS)
        self._fitting(codes, zero, zero.dtype == torch.int32 and zero.shape == (scale.shape[0], -(-rows // 8)))
        parts = {
            "codes": codes._replace(arrangement=GPTQ_WORDS if encoding is GPTQ else AWQ_WORDS),
            "scale": scale._replace(arrangement=TRANSPOSED),
            "zero": zero._replace(arrangement=zeros),
        }
        if order is not None:
            self._fitting(codes, order, order.dtype == torch.int32 and order.shape == (inputs,))
            natural = NaturalOrder(f"{self.stem}g_idx", inputs // scale.shape[0], encoding.row_bytes(inputs))
            order = order._replace(arrangement=natural)
        return EncodedTensor(encoding, (rows, inputs), parts, order)

    def _mxfp4(self, codes: TensorPart) -> EncodedTensor:
        """gpt-oss: blocks `[.., o, i / 32, 16]`, scales `[.., o, i / 32]`."""
        scale = self._need("_scales")
        bytes_only = codes.dtype == scale.dtype == torch.uint8
        self._fitting(codes, scale, bytes_only and codes.shape[-1] == 16 and codes.shape[:-1] == scale.shape)
        *outer, groups = scale.shape
        return EncodedTensor(MXFP4, (*outer, 32 * groups), {"codes": codes.bytes_as(*outer, 16 * groups), "scale": scale})

    def _in_powers_of_two(self, codes: TensorPart) -> bool:
        """Whether the codes are pairs of 4 bits with a power of two for 32 inputs."""
        scale = self.part(*self.scales)
        bytes_only = scale is not None and codes.dtype.itemsize == 1 and scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        return bytes_only and scale is not None and scale.shape == (*codes.shape[:-1], codes.shape[-1] // 16)

    def _microscaled(self, codes: TensorPart) -> EncodedTensor:
        """MXFP4 of compressed-tensors and of DeepSeek: codes `[.., o, i / 2]`, scales `[.., o, i / 32]`."""
        scale = self._need(*self.scales)
        parts = {"codes": codes.bytes_as(*codes.shape), "scale": scale.bytes_as(*scale.shape)}
        return EncodedTensor(MXFP4, (*codes.shape[:-1], 2 * codes.shape[-1]), parts)

    def _nvfp4(self, codes: TensorPart) -> EncodedTensor:
        """`weight_packed` with `weight_global_scale`, by which compressed-tensors divides, or `weight` with `weight_scale_2`, by
        which modelopt multiplies."""
        scale, factor = self._need(*self.scales), self.part("weight_global_scale")
        encoding = NVFP4 if factor is None else NVFP4_DIVIDED
        others = {"weight_packed": "weight_global_scale", "weight": "weight_scale_2"}
        factor = factor or self._need(others.get(self.first, "_weight_scale_2"))
        *stack, rows, half = codes.shape
        self._fitting(codes, scale, scale.dtype == torch.float8_e4m3fn and scale.shape == (*stack, rows, half // 8))
        per_tensor = factor.dtype == torch.float32 and math.prod(factor.shape) == math.prod(stack)
        self._fitting(codes, factor, per_tensor)
        factor = factor._replace(shape=(*stack, 1, 1), arrangement=RowsRepeated(rows, rows))
        parts = {"codes": codes, "scale": scale.bytes_as(*scale.shape), "factor": factor}
        return EncodedTensor(encoding, (*stack, rows, 2 * half), parts)
