"""The GPU kernels: they compute whole experts from their slabs, found by address; the programs are Triton's (`programs`).

A pair is one token and one of its experts. Pairs are sorted by expert, then token, and cut into tiles of one expert. Two launches
compute the pairs of a group of experts, and one adds them up: their number does not depend on how many experts there are.

The result of a pair depends on its token and its expert only: not on the other tokens, nor on which experts were resident. So
every tile uses the same instructions: neither its pairs nor, where it is transposed, its rows of weights reach 64, from which on
Hopper and Blackwell would use instructions that add up in another order.

Inputs and activated values are bfloat16 or float16, sums are float32. Triton is imported where it is first needed.
"""

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vismoe.formats.affine import GRIDS
from vismoe.formats.encodings import ENCODINGS, FLOATS, Ggml
from vismoe.kernels.matrices import SIXTEEN_BITS, Matrix, matrices
from vismoe.types import ExpertForm, Format, RecordLayout

ONE_TOKEN, FEW_ROWS, MANY_ROWS = 8, 16, 32  # pairs of a tile: where an expert has at most 8, at most 16, or more
SUM_COLUMNS = 256
MOST_ARRANGED = 127  # pairs that one program arranges
STAGES = 4


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on this GPU with hidden states of this type; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the GPU kernels need Triton, which is not installed"
    if dtype not in SIXTEEN_BITS:
        return f"the model computes in {dtype}; the GPU kernels compute in bfloat16 and float16"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}; the GPU kernels need 8.0"
    return _failure(device)


@functools.cache
def _failure(device: torch.device) -> str | None:
    """What goes wrong with the smallest program: Triton needs the machine's C compiler, and a disk to keep what it made."""
    try:
        with torch.cuda.device(device):
            arrange(torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device), 1)
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever Triton, the compiler or the driver raise
        return f"Triton cannot run here: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return None


@dataclass(frozen=True, eq=False)
class GpuKernel:
    """Computes experts of one geometry in one format."""

    format: Format
    dtype: torch.dtype  # of hidden states
    hidden: int
    intermediate: int
    _up: dict[str, Any]  # constants of the programs
    _down: dict[str, Any]

    @classmethod
    def of(cls, format: Format, raw: RecordLayout, slab: RecordLayout, form: ExpertForm, dtype: torch.dtype) -> "GpuKernel | str":
        """The kernel for slabs of layout `slab` that hold experts of layout `raw` in `format`, with hidden states of type
        `dtype`; a string gives the reason for none."""
        found = matrices(format, raw, slab, form)
        if isinstance(found, str):
            return found
        up, down = found
        for matrix in found:
            if isinstance(matrix.encoding, torch.dtype) and matrix.encoding != dtype:
                return f"raw weights are {matrix.encoding}, hidden states {dtype}; the GPU kernels compute in one type"
        activation = {
            "GATE": str(form.gate),
            "ACTIVATION": str(form.activation),
            "ALPHA": form.alpha,
            "LIMIT": form.limit if form.limit < float("inf") else 0.0,
        }
        shape = {"HIDDEN": up.inputs, "WIDTH": down.inputs}
        kernels = (_constants(matrix, form.transposed) for matrix in (up, down))
        return cls(format, dtype, up.inputs, down.inputs, {**shape, **activation, **next(kernels)}, {**shape, **next(kernels)})

    def parts(
        self, x: Tensor, places: Tensor, factors: Tensor, tiles: Tensor, rows: int, activated: Tensor, parts: Tensor
    ) -> None:
        """parts float32 `[P, H]` = routing weight times expert(x), for the pairs in `tiles`; other rows are left as they are.

        x `[T, H]`; factors `[T, K]`; places int32 `[P]`: the index of each pair in factors; tiles int64 `[3, n]` as made by
        `tiles_of` with `rows` pairs at most (of more than three rows the others are not read); activated `[P, I]` of x's type is
        overwritten. All on one device, contiguous.
        """
        assert x.dtype == self.dtype, "raw weights are read as the type of the hidden states"
        programs, interpreted = _programs()
        count = tiles.shape[1]
        if not count:
            return
        up, down = (block(rows, interpreted, gated) for gated in (self._up["GATE"] != "none", False))
        top_k = factors.shape[1]
        grid = (count, -(-self.intermediate // up["BN"]))
        programs.up[grid](x, places, tiles, count, activated, TOP_K=top_k, **self._up, **up)
        grid = (count, -(-self.hidden // down["BN"]))
        programs.down[grid](activated, places, factors, tiles, count, parts, **self._down, **down)

    def workspace_bytes(self, pairs: int) -> int:
        """Bytes of `activated` and `parts` for so many pairs."""
        return pairs * (2 * self.intermediate + 4 * self.hidden)


def tiles_of(addresses: np.ndarray, starts: np.ndarray, ends: np.ndarray, rows: int) -> np.ndarray:
    """Tiles int64 `[3, n]` (record, first pair, pairs) of at most `rows` pairs each; expert i at `addresses[i]` has the pairs
    `starts[i] .. ends[i]`."""
    counts = -(-(ends - starts) // rows)
    which = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[which] + nth * rows
    return np.stack([addresses[which], first, np.minimum(ends[which] - first, rows)]).astype(np.int64)


def block(rows: int, interpreted: bool, gated: bool = False) -> dict[str, Any]:
    """Of a program whose tiles have so many pairs: its columns (of a gated one twice as many rows of weights), the inputs of raw
    weights that are loaded at once, and how it is compiled. Measured on an H200 for one token of the 30B model (docs/gpu.md)."""
    few = rows < FEW_ROWS
    shape = {"BM": rows, "BN": 16 if few and gated else 32, "BK": 256 if few else 128, "INTERPRETED": interpreted}
    return {**shape, "num_warps": 2 if few else 4, "num_stages": STAGES, "enable_fp_fusion": False}


def tile_rows(most_pairs: int) -> int:
    """Pairs of a tile for experts with at most `most_pairs` pairs."""
    return next((rows for rows in (ONE_TOKEN, FEW_ROWS) if most_pairs <= rows), MANY_ROWS)


def sums_of(tokens: np.ndarray, count: int | None = None) -> tuple[int, np.ndarray]:
    """(number of sums, int32 `[2 n + 1 + P]`) for `combine`: the pairs of each token, in their order. tokens `[P]`: each pair's
    token. `count`: sums for the tokens 0 .. count, with or without pairs; None: for those that have pairs."""
    order = np.argsort(tokens, kind="stable")
    ordered = tokens[order]
    if count is None:
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        rows, starts = ordered[first], np.append(first, len(tokens))
    else:
        rows = np.arange(count)
        starts = np.searchsorted(ordered, np.arange(count + 1))
    return len(rows), np.concatenate([rows, starts, order]).astype(np.int32)


def combine(
    parts: Tensor, sums: Tensor, count: int, out: Tensor, adding: bool = False, below: tuple[Tensor, Tensor] | None = None
) -> None:
    """out `[T, H]` = the sums of parts float32 `[P, H]` that `sums_of` lists, in float32, rounded once to out's type.

    adding: on top of what is there, which is float32. below: (the parts float32 `[P, H]` of pairs that were computed elsewhere,
    the tiles that `arrange` made, which say of which).
    """
    programs, interpreted = _programs()
    hidden = out.shape[1]
    assert not adding or out.dtype == torch.float32, "sums that go on are float32"
    if count:
        grid = (count, -(-hidden // SUM_COLUMNS))
        block = {"BN": SUM_COLUMNS, "INTERPRETED": interpreted}
        others = (None, None, 0) if below is None else (*below, len(below[0]))
        programs.combine[grid](parts, sums, count, out, *others, HIDDEN=hidden, ADDING=adding, **block, enable_fp_fusion=False)


def arrange(ids: Tensor, addresses: Tensor, experts: int, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tiles int64 `[3, T * K]` of one pair each, sums int32 of T tokens) on the device, from ids int64 `[T, K]`; by one launch.

    addresses int64 `[E]`: of the records of a layer's experts that are resident; where one is computed elsewhere, the negative of
    any of these. With slots int64 `[T * K or more]`, addresses, the tiles lie in these slots, each expert in one of them, and a
    fourth row says which record belongs into each slot; 0: none.
    """
    programs, _ = _programs()
    tokens, top_k = ids.shape
    pairs = ids.numel()
    assert 0 < pairs <= MOST_ARRANGED and (slots is None or pairs <= len(slots)), (tokens, top_k)
    tiles = torch.empty(3 if slots is None else 4, pairs, dtype=torch.int64, device=ids.device)
    sums = torch.empty(2 * tokens + 1 + pairs, dtype=torch.int32, device=ids.device)
    fitting = 1 << pairs.bit_length()  # more than the pairs: where the last sum ends is written too
    programs.arrange[(1,)](ids, addresses, slots, tiles, sums, tokens, pairs, EXPERTS=experts, TOP_K=top_k, PAIRS=fitting)
    return tiles, sums


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of one type on the device, by one copy that the host does not wait for."""
    joined = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return [part.view(array.shape) for part, array in zip(joined.split([array.size for array in arrays]), arrays, strict=True)]


def _constants(matrix: Matrix, transposed: bool) -> dict[str, Any]:
    """What the programs have to know of a matrix. transposed: raw weights are `[in, out]`; encoded ones never are."""
    grid = GRIDS[matrix.encoding] if isinstance(matrix.encoding, Format) else None
    kind = None if grid or isinstance(matrix.encoding, torch.dtype) else ENCODINGS[matrix.encoding]
    scales = matrix.scale_dtype if kind and matrix.scale_dtype in FLOATS else None
    return {
        "BITS": grid.bits if grid else 0 if kind else 16,
        "KIND": kind.name if kind else "",
        "BLOCK": kind.block_bytes if isinstance(kind, Ggml) else 0,
        "AT": matrix.codes,
        "SCALE_AT": matrix.scale,
        "SCALE_TYPE": _triton_type(scales) if scales else None,
        "OFFSET_AT": matrix.offset,
        "BIAS_AT": matrix.bias,
        "BIAS_TYPE": _triton_type(matrix.bias_dtype) if matrix.bias_dtype else None,
        "ROWS": matrix.rows,
        "INPUTS": matrix.inputs,
        "ROW_BYTES": matrix.row_bytes,
        "GROUPS": matrix.groups,
        "GROUP": grid.group_inputs if grid else max(1, matrix.group_inputs),
        "TRANSPOSED": transposed and isinstance(matrix.encoding, torch.dtype),
    }


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def _programs() -> tuple[Any, bool]:
    from vismoe.kernels.gpu import programs

    return programs, os.environ.get("TRITON_INTERPRET") == "1"
