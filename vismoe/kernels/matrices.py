"""Where the matrices of an expert lie in its record: what every kernel for experts has to know."""

from typing import NamedTuple

import torch

from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout, Section

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Matrix(NamedTuple):
    """One matrix of a record: offsets in bytes from its beginning, -1 for what it does not have."""

    codes: int  # of the weights or their codes
    scale: int
    offset: int
    bias: int
    rows: int  # outputs
    inputs: int
    row_bytes: int
    groups: int  # of inputs that share a scale and an offset, per row
    encoding: torch.dtype | Format  # the type of raw weights, or the integer format
    bias_dtype: torch.dtype | None


def matrices(format: Format, raw: RecordLayout, slab: RecordLayout, form: ExpertForm) -> tuple[Matrix, Matrix] | str:
    """(up, down) of experts of layout `raw` that lie in slabs of layout `slab` in `format`; a string says why no kernel can
    compute them."""
    sections = {section.name: section for section in raw.sections}
    unknown = set(sections) - {form.up, form.down, f"{form.up}_bias", f"{form.down}_bias"}
    if unknown:
        return f"its experts also have {', '.join(sorted(unknown))}, which the fast kernels do not know"
    if form.gate is Gate.NONE and form.activation is Activation.CLAMPED_SWIGLU:
        return f"its experts have no gate, and {form.activation} needs one"
    encoding: torch.dtype | Format = format
    if format.exact:
        encoding = sections[form.up].dtype
        if encoding not in SIXTEEN_BITS or sections[form.down].dtype != encoding:
            return f"raw weights are {encoding}; the fast kernels read bfloat16 and float16"
    lying = {section.name: section for section in slab.sections}
    up = _matrix(form.up, sections[form.up], form.transposed, encoding, lying)
    down = _matrix(form.down, sections[form.down], form.transposed, encoding, lying)
    ups = down.inputs if form.gate is Gate.NONE else 2 * down.inputs
    if up.rows != ups or up.inputs != down.rows:
        return f"{form.up} {up.rows} x {up.inputs} and {form.down} {down.rows} x {down.inputs} do not fit a {form.gate} gate"
    return up, down


def _matrix(name: str, section: Section, transposed: bool, encoding: torch.dtype | Format, lying: dict[str, Section]) -> Matrix:
    rows, inputs = reversed(section.shape) if transposed else section.shape
    bias = lying.get(f"{name}_bias")
    at, dtype = (bias.offset_bytes, bias.dtype) if bias else (-1, None)
    if f"{name}.codes" in lying:
        codes, scale, offset = (lying[f"{name}.{part}"] for part in ("codes", "scale", "offset"))
        places = (codes.offset_bytes, scale.offset_bytes, offset.offset_bytes, at)
        return Matrix(*places, rows, inputs, codes.shape[1], scale.shape[1], encoding, dtype)
    codes = lying[name]
    return Matrix(codes.offset_bytes, -1, -1, at, rows, inputs, inputs * codes.dtype.itemsize, 0, encoding, dtype)
