"""Where the matrices of an expert lie in its record: what every kernel for experts has to know."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vismoe.formats.affine import GRIDS
from vismoe.formats.encoded import encoded_matrices
from vismoe.formats.encodings import ENCODINGS, NVFP4_DIVIDED, group_inputs
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout, Section

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Matrix(NamedTuple):
    """One matrix of a record: offsets in bytes from its beginning, -1 for what it does not have."""

    codes: int  # of the weights or their codes
    scale: int
    offset: int  # also of zeros (w4) and of a factor per row (nvfp4)
    bias: int
    rows: int  # outputs
    inputs: int
    row_bytes: int
    groups: int  # of inputs that share a scale and an offset, per row; 0 without scales beside the codes
    encoding: torch.dtype | str  # the type of raw weights, an integer Format, or the name of an encoding of a checkpoint
    bias_dtype: torch.dtype | None
    scale_dtype: torch.dtype | None = None
    group_inputs: int = 0


class Part(NamedTuple):
    """Codes, scales or the like of a matrix: where they begin and what they are."""

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, section: Section) -> "Part":
        return cls(section.offset_bytes, section.shape, section.dtype)


def matrices(format: Format, raw: RecordLayout, slab: RecordLayout, form: ExpertForm) -> tuple[Matrix, Matrix] | str:
    """(up, down) of experts of layout `raw` that lie in slabs of layout `slab` in `format`; a string says why no kernel can
    compute them."""
    sections = {section.name: section for section in raw.sections}
    unknown = set(sections) - {form.up, form.down, f"{form.up}_bias", f"{form.down}_bias"}
    if unknown:
        return f"its experts also have {', '.join(sorted(unknown))}, which the fast kernels do not know"
    if form.gate is Gate.NONE and form.activation is Activation.CLAMPED_SWIGLU:
        return f"its experts have no gate, and {form.activation} needs one"
    encoded = encoded_matrices(slab)
    raw_types = {sections[name].dtype for name in (form.up, form.down) if format.exact and name not in encoded}
    if not raw_types <= set(SIXTEEN_BITS) or len(raw_types) > 1:
        return f"raw weights are {' and '.join(sorted(map(str, raw_types)))}; the fast kernels read bfloat16 and float16"
    lying, found = {section.name: section for section in slab.sections}, []
    for name in (form.up, form.down):
        shape, bias = sections[name].shape, lying.get(f"{name}_bias")
        rows, inputs = reversed(shape) if form.transposed else shape
        if name in encoded:
            kind, of = encoded[name].encoding.name, encoded[name].sections
        else:
            names = {"codes": name} if format.exact else {part: f"{name}.{part}" for part in ("codes", "scale", "offset")}
            kind, of = Format.RAW if format.exact else format, {part: lying[section] for part, section in names.items()}
        parts = {part: Part.of(section) for part, section in of.items()}
        matrix = of_parts(kind, parts, rows, inputs, Part.of(bias) if bias else None)
        if isinstance(matrix, str):
            return f"{name}: {matrix}"
        found.append(matrix)
    up, down = found
    ups = down.inputs if form.gate is Gate.NONE else 2 * down.inputs
    if up.rows != ups or up.inputs != down.rows:
        return f"{form.up} {up.rows} x {up.inputs} and {form.down} {down.rows} x {down.inputs} do not fit a {form.gate} gate"
    return up, down


def of_parts(kind: str, parts: Mapping[str, Part], rows: int, inputs: int, bias: Part | None) -> Matrix | str:
    """One matrix `[rows, inputs]` of its parts, "codes" and what else `kind` has: an integer Format, the name of an encoding, or
    Format.RAW, whose codes are the weights. A string says why no kernel can compute it."""
    codes, scale = parts["codes"], parts.get("scale")
    beside = next((parts[name].at for name in ("offset", "zero", "factor") if name in parts), -1)
    bias_at, bias_dtype = (bias.at, bias.dtype) if bias else (-1, None)
    places, row_bytes = (scale.at if scale else -1, beside, bias_at, rows, inputs), codes.shape[1] * codes.dtype.itemsize
    if kind == Format.RAW:
        return Matrix(codes.at, *places, inputs * codes.dtype.itemsize, 0, codes.dtype, bias_dtype)
    if kind == NVFP4_DIVIDED.name:
        return f"the fast kernels do not read {kind}"
    if kind in ENCODINGS:
        needed = ENCODINGS[kind].row_bytes(inputs)
        assert codes.shape == (rows, needed), f"codes {codes.shape} of a matrix in {kind} are not {rows} x {needed} bytes"
    if scale is None:
        return Matrix(codes.at, *places, row_bytes, 0, kind, bias_dtype)
    groups = scale.shape[1]
    each = GRIDS[Format(kind)].group_inputs if kind not in ENCODINGS else group_inputs(groups, inputs)
    read = {"fp8": (128, inputs), "w8": (128, inputs), "mxfp4": (32,), "nvfp4": (16,)}.get(kind, range(32, inputs + 128, 32))
    if each not in read or not inputs <= each * groups < inputs + each:
        return f"a row of {inputs} inputs has {groups} scales of {each} inputs each, which the fast kernels do not read in {kind}"
    return Matrix(codes.at, *places, row_bytes, groups, kind, bias_dtype, scale.dtype, each)
