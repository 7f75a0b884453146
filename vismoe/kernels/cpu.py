"""The CPU kernels: they compute whole experts from their records in place, sums of expert outputs, and linears.

One call computes all experts of a layer for one batch, in one format or in several. A kernel decodes weights in registers and
reads them once for up to 64 tokens of an expert, of long prompts 256; sums are float32. The result for a token depends on the
weights, that token, whether it is one of a prompt, or of a long one, and the formats of the kernel: not on the number of threads,
the other experts of a call, or the other tokens. Calls from several Python threads run one after another.

With bfloat16 inputs on AVX-512 BF16, products are of bfloat16 pairs: the kernel rounds the weights of the integer formats to
bfloat16 after scaling, rounds the activation's result once, and treats denormals as zero. (That set also asks for VBMI and GFNI.
Cooper Lake, which lacks them, is served as AVX-512 without BF16.)

With bfloat16 inputs on AVX2, or on AVX-512 without BF16, weights that are integers (the integer formats, and all encodings but
fp8) are multiplied as such: the kernel rounds inputs, and the activation's result, to integers of 16 bits with a scale for each
128 of a row. This is exact for bfloat16 numbers down to 2^-7 of the largest of the 128, and off by at most 2^-15 of it elsewhere.
Sums of up to 128 products are integers, and are added in float32. Where the processor has AMX, decoded tokens are computed so in
the encodings for which that is faster than AVX-512 BF16 (csrc/kernels_amx.cpp); the activation's result is rounded to bfloat16
first. Everywhere else all arithmetic is float32.

Where the processor has AMX, bfloat16 inputs that are added up over all experts, as in prompts (`parts` with `adding`), go through
its products of matrices. These round the restored weights of every format to bfloat16 and add in another order: the bits differ
from those of the same token elsewhere, and still depend on that token and the weights only.

Matrices in the encodings of published checkpoints (formats/encodings.py) are computed from their codes, which are exact in every
type: the kernel sums the products of a group of inputs, and multiplies the sum by the group's scale. For the tokens of
prompts, AVX-512 BF16 restores such weights and rounds them to bfloat16 first, which needs half of the instructions per token.
For long prompts (`parts` with `long`) AVX-512 BF16 does so with weights in every format, and adds in the order of the inputs.
AVX-512 without BF16, and AVX2, add in that order, too, also in a linear with `long`; they restore weights to float32. With
bfloat16 inputs AVX2 multiplies integers as integers, and those of which fewer than 32 share a scale as it does elsewhere.
Weights in float16 have the kernels of other tokens everywhere.

Shapes: hidden `[T, H]`, pairs of a token and an expert `[P]`, grouped by expert.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vismoe.errors import BudgetError, CheckpointError, ConfigError
from vismoe.formats.encodings import NVFP4, NVFP4_DIVIDED, Encoding
from vismoe.kernels.library import function, instruction_sets, library
from vismoe.kernels.matrices import Matrix, Part, matrices, of_parts
from vismoe.kernels.read import Arrival, places_of
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

Isa = Literal["portable", "avx2", "avx512", "avx512bf16", "amx"]  # in the order of csrc/kernels.h, later ones preferred
ISAS: tuple[Isa, ...] = get_args(Isa)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the numbers of csrc/kernels.h, as are the numbers below
NUMBERS = (*DTYPES, torch.uint8)
ENCODINGS: tuple[torch.dtype | str, ...] = (
    *(torch.bfloat16, torch.float16),
    *(Format.INT8, Format.INT4, Format.INT2),
    *("fp8", "w8", "w4", "w4 of narrow groups", "mxfp4", "nvfp4"),
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4_block", "q4_k", "q5_k", "q6_k"),
    *("q2_k", "q3_k", "iq4_xs"),
)
GATES = (Gate.NONE, Gate.CONCATENATED, Gate.INTERLEAVED)
ACTIVATIONS = (
    Activation.SILU,
    Activation.GELU_TANH,
    Activation.GELU_ERF,
    Activation.RELU_SQUARED,
    Activation.CLAMPED_SWIGLU,
)


DAMAGED = 2  # what `_experts` returns for a lossless record that is none

_SIZE, _PLACE, _NUMBER = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32
_start = function("vismoe_start", [_SIZE, _NUMBER])
_rouse = function("vismoe_rouse", [], _NUMBER)
_experts = function("vismoe_experts", [_PLACE, _SIZE, _SIZE, *[_PLACE] * 6, _NUMBER, _PLACE, _NUMBER], _NUMBER)
_experts_begin = function("vismoe_experts_begin", [_PLACE, _SIZE, *[_PLACE] * 5, _NUMBER, _PLACE], _NUMBER)
_experts_end = function("vismoe_experts_end", [_PLACE, _PLACE], _NUMBER)
_experts_arriving = function(
    "vismoe_experts_arriving", [_PLACE, _SIZE, _SIZE, *[_PLACE] * 6, _NUMBER, *[_PLACE] * 2, _SIZE, *[_PLACE] * 3], _NUMBER
)
_workspace_bytes = function("vismoe_workspace_bytes", [_PLACE, _SIZE, _SIZE, _NUMBER, _SIZE, _NUMBER], _SIZE)
_held_bytes = function("vismoe_held_bytes", [], _SIZE)
_route = function("vismoe_route", [_PLACE, *[_SIZE] * 3, *[_PLACE] * 4], _SIZE)
_combine = function("vismoe_combine", [_PLACE, _PLACE, _SIZE, _SIZE, _PLACE, _NUMBER, _SIZE], _NUMBER)
_linear = function("vismoe_linear", [_PLACE, _PLACE, _PLACE, _NUMBER, _SIZE, _PLACE, _NUMBER], _NUMBER)


# ------------------------------------------------------------------ the process's threads
@dataclass(frozen=True)
class KernelSetup:
    """The threads and instruction set that the kernels use, set by `start`."""

    isa: Isa
    threads: int
    why: str


_setup: KernelSetup | None = None


def start(threads: int | None = None, isa: Isa | Literal["auto"] = "auto") -> KernelSetup:
    """Set the instruction set and the threads of this process's kernels; a later call replaces them.

    `threads` None: as many as torch uses, at most the cores that this process may run on. Threads are created by the first call
    that needs them, and sleep between calls. Raises ConfigError for an instruction set that this machine does not have.
    """
    global _setup
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is None:
        threads = min(torch.get_num_threads(), cores)
    if threads < 1:
        raise ConfigError(f"threads={threads} is not a number of compute threads. Fix: 1 or more, or None for {cores}")
    present = available()
    if isa == "auto":
        chosen, why = present[-1], f"the best of {', '.join(present)}"
    elif isa in present:
        chosen, why = isa, "asked for"
    else:
        raise ConfigError(
            f"isa={isa!r} is not available: this machine and build have {', '.join(present)}. Fix: one of them, or 'auto'"
        )
    _start()(threads, ISAS.index(chosen))
    _setup = KernelSetup(chosen, threads, why)
    return _setup


def available() -> tuple[Isa, ...]:
    """The instruction sets that this machine has and the library was built for, best last."""
    return instruction_sets(ISAS, library().vismoe_isas())


def setup() -> KernelSetup:
    """What `start` set; without an earlier call, starts with the defaults."""
    return _setup or start()


# ------------------------------------------------------------------ how an expert lies in its record
class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("codes", "scale", "offset", "bias", "rows", "inputs", "row_bytes", "groups")),
        *((name, ctypes.c_int32) for name in ("encoding", "bias_dtype", "scale_dtype", "group_inputs", "divides")),
    ]

    @classmethod
    def of(cls, matrix: Matrix) -> "_Matrix":
        *places, encoding, bias_dtype, scale_dtype, group_inputs = matrix
        if encoding in ("w4", "awq", "gptq"):
            encoding = "w4 of narrow groups" if group_inputs % 128 else "w4"
        divides = encoding == NVFP4_DIVIDED.name
        encoding = NVFP4.name if divides else encoding
        numbers = (-1 if dtype is None else NUMBERS.index(dtype) for dtype in (bias_dtype, scale_dtype))
        return cls(*places, ENCODINGS.index(encoding), *numbers, group_inputs, divides)


class _Expert(ctypes.Structure):
    _fields_ = [
        ("up", _Matrix),
        ("down", _Matrix),
        ("gate", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up_section", ctypes.c_int32),
        ("down_section", ctypes.c_int32),
    ]


@dataclass(frozen=True, eq=False)
class ExpertKernel:
    """Computes experts of one geometry, in one format (`of`) or in several (`mixed`).

    Inputs are packed once for all formats. If one of the formats is raw float16, all formats compute in float32 and give the
    results that they give alone with float32 inputs.
    """

    formats: tuple[Format, ...]  # by precision
    hidden: int
    intermediate: int
    _experts: "ctypes.Array[_Expert]"  # one per format

    @classmethod
    def of(cls, format: Format, raw: RecordLayout, slab: RecordLayout, form: ExpertForm) -> "ExpertKernel | str":
        """The kernel for slabs of layout `slab` that hold experts of layout `raw` in `format`; a string gives the reason for
        none."""
        found = matrices(format, raw, slab if slab.sections else raw, form)
        if isinstance(found, str):
            return found
        if form.transposed and any(isinstance(matrix.encoding, torch.dtype) for matrix in found):
            return "its raw weights are stored [in, out]; the fast kernels read [out, in], as the integer formats hold them"
        up, down = (_Matrix.of(matrix) for matrix in found)
        gate, activation, sections = GATES.index(form.gate), ACTIVATIONS.index(form.activation), (-1, -1)
        if not slab.sections:  # encoded records
            names = [section.name for section in raw.sections]
            sections = names.index(form.up), names.index(form.down)
            if why_not := _undecodable(found, names):
                return why_not
        expert = _Expert(up, down, gate, activation, form.alpha, form.limit, *sections)
        return cls((format,), found[0].inputs, found[1].inputs, (_Expert * 1)(expert))

    @classmethod
    def mixed(cls, kernels: Sequence["ExpertKernel"]) -> "ExpertKernel":
        """The kernel for calls whose experts are in the formats of `kernels`, numbered in their order; all of one geometry."""
        hidden, intermediate = kernels[0].hidden, kernels[0].intermediate
        assert all((k.hidden, k.intermediate) == (hidden, intermediate) for k in kernels), "kernels of one geometry only"
        experts = [expert for kernel in kernels for expert in kernel._experts]
        formats = tuple(format for kernel in kernels for format in kernel.formats)
        return cls(formats, hidden, intermediate, (_Expert * len(experts))(*experts))

    def parts(
        self,
        records: np.ndarray,
        starts: np.ndarray,
        tokens: np.ndarray,
        factors: np.ndarray,
        hidden: Tensor,
        out: Tensor,
        precisions: np.ndarray | None = None,
        adding: bool = False,
        long: bool = False,
        coming: Sequence[Arrival] = (),
    ) -> tuple[list[tuple[float, float]], float]:
        """out float32 `[P, H]` = factor * expert(hidden[token]), for every pair.

        records: uint64 `[n]`, addresses of records; starts: int32 `[n + 1]`, pairs starts[i] .. starts[i + 1] belong to expert i;
        tokens: int32 `[P]`; factors: float32 `[P]`; hidden `[T, H]` contiguous, bfloat16, float16 or float32;
        precisions: uint8 `[n]`, the index in `formats` of each record's format; None: all in the first.
        adding: the same is added to out float32 `[T, H]` instead: experts in order, and the pairs of each in order; `long`: by
        functions that are quicker where every expert has many tokens, and may round otherwise.
        coming: records that native threads have begun to read; each is computed when it is there. They say how that ended, and
        their order in time changes no bit. Then -> (when each part was computed, in seconds of `time.perf_counter`; seconds
        waited).
        """
        setup()
        pairs = len(tokens)
        _check_array(records, np.uint64, len(records))
        _check_array(starts, np.int32, len(records) + 1)
        _check_array(tokens, np.int32, pairs)
        _check_array(factors, np.float32, pairs)
        _check_rows(hidden, hidden.shape[0], self.hidden, DTYPES)
        _check_rows(out, hidden.shape[0] if adding else pairs, self.hidden, (torch.float32,))
        assert starts[0] == 0 and starts[-1] == pairs and (starts[1:] >= starts[:-1]).all(), starts
        if precisions is not None:
            _check_array(precisions, np.uint8, len(records))
        if pairs == 0:
            return [], 0.0
        assert tokens.min() >= 0 and tokens.max() < hidden.shape[0], "a pair names a token outside hidden"
        assert precisions is None or precisions.max() < len(self.formats), "a precision is not an index of formats"
        call = (
            self._experts,
            len(self._experts),
            len(records),
            records.ctypes.data,
            None if precisions is None else precisions.ctypes.data,
            starts.ctypes.data,
            tokens.ctypes.data,
            factors.ctypes.data,
            hidden.data_ptr(),
            DTYPES.index(hidden.dtype),
            out.data_ptr(),
        )
        if not coming:
            refuse(_experts()(*call, adding + (adding and long)))  # Outcome in csrc/kernels.h
            return [], 0.0
        assert not adding, "experts are added in order, whenever they come"
        spans, calls, waited_s = (ctypes.c_double * (2 * len(coming) + 2))(), ctypes.c_int64(), ctypes.c_double()
        refuse(_experts_arriving()(*call, places_of(coming), len(coming), spans, ctypes.byref(calls), ctypes.byref(waited_s)))
        return [(spans[2 * i], spans[2 * i + 1]) for i in range(calls.value)], waited_s.value


class TokenExperts:
    """Experts of one token, of inputs that always lie in the same memory: hidden `[1, H]`, of a type that `ExpertKernel.parts`
    takes. `records` uint64 `[K]`, `factors` and `rows` float32 `[K]` and `[K, H]` are its own. The other compute threads work
    between `begin` and `end`, as this thread goes on; it has the memory of its caches to itself then."""

    def __init__(self, kernel: ExpertKernel, hidden: Tensor, most: int):
        self._end, self._rows_at = _experts_end(), 0
        self._memory: object = None
        setup()
        _check_rows(hidden, 1, kernel.hidden, DTYPES)
        assert len(kernel.formats) == 1, "of one format"
        self.records, self.factors = np.zeros(most, np.uint64), np.zeros(most, np.float32)
        self.rows = np.zeros((most, kernel.hidden), np.float32)
        self._held = kernel, hidden, np.arange(most + 1, dtype=np.int32), np.zeros(most, np.int32)
        _, _, starts, tokens = self._held
        self._rows_at = self.rows.ctypes.data
        self._call = (
            self.records.ctypes.data,
            starts.ctypes.data,
            tokens.ctypes.data,
            self.factors.ctypes.data,
            hidden.data_ptr(),
            DTYPES.index(hidden.dtype),
            self._rows_at,
        )

    def begin(self, count: int, memory: object) -> None:
        """The first `count` rows will be factor * expert(hidden) of as many records, which lie in this memory."""
        self._memory = memory
        refuse(_experts_begin()(self._held[0]._experts, count, *self._call))

    def end(self) -> float:
        """They are, or nothing was begun -> since when, in seconds of `time.perf_counter`. May be called twice."""
        ended_s = ctypes.c_double()
        refuse(self._end(self._rows_at, ctypes.addressof(ended_s)))
        return ended_s.value

    def __del__(self) -> None:
        self._end(self._rows_at, None)  # an interrupt may have come between: nothing may write into what is freed now


def rouse() -> None:
    """Wake the compute threads, which then spin for a while: experts are to be computed soon. A sleeping thread would be as late
    as an expert takes, and waking many takes a while."""
    setup()
    refuse(_rouse()())


def _undecodable(found: Sequence[Matrix], sections: Sequence[str]) -> str:
    """Why lossless records of these matrices cannot be computed as they are; empty: they can."""
    if len(sections) > len(found):
        return "its experts have biases, which the fast kernels do not look for in lossless records"
    return "" if found[0].encoding == torch.bfloat16 else f"lossless records of {found[0].encoding} weights are not packed"


def workspace_bytes(kernel: ExpertKernel, pairs: int, dtype: torch.dtype, threads: int, isa: Isa) -> int:
    """Bytes of workspace for calls with up to `pairs` pairs and inputs of type `dtype`; one workspace serves all kernels."""
    formats = len(kernel._experts)
    return int(_workspace_bytes()(kernel._experts, formats, pairs, DTYPES.index(dtype), threads, ISAS.index(isa)))


def held_bytes() -> int:
    """Bytes of the workspace now: those of the largest call so far."""
    return int(_held_bytes()())


# ------------------------------------------------------------------ routing
def route(routing: np.ndarray, num_experts: int) -> tuple[list[int], np.ndarray, np.ndarray, np.ndarray]:
    """(experts, starts, tokens, places) of a routing int64 `[T, K]`, for `parts`.

    experts: ascending; starts int32 `[n + 1]`; tokens int32 `[P]`; places int32 `[P]`: the index of each pair among the `T * K`
    choices.
    Pairs of one expert come in the order of the routing. Ids outside `0 .. num_experts` are sentinels and are left out.
    """
    assert routing.dtype == np.int64 and routing.flags.c_contiguous, (routing.dtype, routing.strides)
    pairs = routing.size
    room = np.empty(4 * pairs + 1, dtype=np.int32)
    at = room.__array_interface__["data"][0]
    count = _route()(
        routing.__array_interface__["data"][0],
        pairs,
        routing.shape[1],
        num_experts,
        at,
        at + 4 * pairs,
        at + 4 * (2 * pairs + 1),
        at + 4 * (3 * pairs + 1),
    )
    starts = room[pairs : pairs + count + 1]
    end = int(starts[count])
    return room[:count].tolist(), starts, room[2 * pairs + 1 :][:end], room[3 * pairs + 1 :][:end]


# ------------------------------------------------------------------ sums and linears
def combine(parts: Tensor, tokens: np.ndarray, out: Tensor) -> None:
    """out `[T, H]` = for every token the sum of its rows of parts float32 `[P, H]`, in pair order.

    Sums are float32 and rounded once, to out's type: bfloat16, float16 or float32. tokens: int32 `[P]`.
    """
    setup()
    pairs, columns = parts.shape
    _check_rows(parts, pairs, columns, (torch.float32,))
    _check_rows(out, out.shape[0], columns, DTYPES)
    _check_array(tokens, np.int32, pairs)
    assert pairs == 0 or (tokens.min() >= 0 and tokens.max() < out.shape[0]), "a pair names a token outside out"
    if out.numel() == 0:
        return
    places = (parts.data_ptr(), tokens.ctypes.data)
    refuse(_combine()(*places, pairs, columns, out.data_ptr(), DTYPES.index(out.dtype), out.shape[0]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, long: bool = False, out: Tensor | None = None) -> Tensor:
    """x `[n, in]` times weight `[out, in]` transposed, plus bias `[out]`, in the type of x; `out` `[n, out]`: where it goes.

    x: bfloat16, float16 or float32; weight: bfloat16 or float16, contiguous; bias: any of these. For few rows, as in decoding;
    with `long` by the kernels for long prompts and pictures, where the processor has such, and with other bits.
    """
    rows, inputs = weight.shape
    _check_rows(weight, rows, inputs, DTYPES[:2])
    return _linear_of(x, Format.RAW, {"codes": weight}, inputs, bias, long, out)


def encoded_linear(
    x: Tensor,
    encoding: Encoding | Format,
    parts: Mapping[str, Tensor],
    inputs: int,
    bias: Tensor | None = None,
    long: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The same, for any number of rows, of a weight `[out, inputs]` in an encoding of a checkpoint or an integer format.

    parts: the tensors that the encoding has, "codes" among them (formats/encodings.py); of an integer format codes, scale and
    offset (formats/affine.py). All contiguous. Raises ConfigError for groups that the kernels cannot read.
    """
    for part in parts.values():
        _check_rows(part, parts["codes"].shape[0], part.shape[1], NUMBERS)
    return _linear_of(x, encoding if isinstance(encoding, Format) else encoding.name, parts, inputs, bias, long, out)


def why_no_linear(encoding: Encoding, parts: Mapping[str, Tensor], inputs: int) -> str | None:
    """Why `encoded_linear` cannot compute weights of such parts, which may lie anywhere; None: it can."""
    places = {name: Part(0, tuple(part.shape), part.dtype) for name, part in parts.items()}
    found = of_parts(encoding.name, places, parts["codes"].shape[0], inputs, None)
    return found if isinstance(found, str) else None


def _linear_of(
    x: Tensor,
    kind: str,
    parts: Mapping[str, Tensor],
    inputs: int,
    bias: Tensor | None,
    long: bool,
    out: Tensor | None,
) -> Tensor:
    setup()
    x, rows = x.contiguous(), parts["codes"].shape[0]
    _check_rows(x, x.shape[0], inputs, DTYPES)
    out = torch.empty(x.shape[0], rows, dtype=x.dtype) if out is None else out
    _check_rows(out, x.shape[0], rows, (x.dtype,))
    if out.numel() == 0:
        return out
    assert bias is None or (bias.shape == (rows,) and bias.is_contiguous() and bias.device.type == "cpu"), bias.shape
    matrix, base = matrix_of(kind, parts, inputs, bias)
    call = (ctypes.addressof(matrix), base, x.data_ptr(), DTYPES.index(x.dtype), x.shape[0], out.data_ptr())
    refuse(_linear()(*call, long))
    return out


def matrix_of(kind: str, parts: Mapping[str, Tensor], inputs: int, bias: Tensor | None = None) -> tuple[_Matrix, int]:
    """(a weight `[out, inputs]` whose parts may lie anywhere, the address from which its places count). Raises ConfigError."""
    base, rows = min(part.data_ptr() for part in (*parts.values(), *([] if bias is None else [bias]))), parts["codes"].shape[0]
    places = tuple((name, Part(part.data_ptr() - base, tuple(part.shape), part.dtype)) for name, part in parts.items())
    return _matrix(kind, places, rows, inputs, None if bias is None else Part(bias.data_ptr() - base, (rows,), bias.dtype)), base


@lru_cache(4096)  # those of a large model; weights of one shape with nothing beside them are one
def _matrix(kind: str, places: tuple[tuple[str, Part], ...], rows: int, inputs: int, bias: Part | None) -> _Matrix:
    found = of_parts(kind, dict(places), rows, inputs, bias)
    if isinstance(found, str):
        raise ConfigError(f"a linear in {kind} has no fast kernel: {found}. Fix: --kernels torch")
    return _Matrix.of(found)


# ------------------------------------------------------------------ checks of arguments
def _check_array(array: np.ndarray, dtype: type, count: int) -> None:
    assert array.dtype == dtype and array.shape == (count,) and array.flags.c_contiguous, (array.dtype, array.shape, count)


def _check_rows(tensor: Tensor, rows: int, columns: int, dtypes: Sequence[torch.dtype]) -> None:
    assert tensor.shape == (rows, columns) and tensor.is_contiguous(), (tuple(tensor.shape), rows, columns, tensor.stride())
    assert tensor.dtype in dtypes and tensor.device.type == "cpu", (tensor.dtype, tensor.device)


def refuse(failed: int) -> None:
    if failed == DAMAGED:
        raise CheckpointError("an expert in memory is no lossless record any more. Fix: load the model again")
    if failed:
        raise BudgetError("the CPU kernels got no memory for their workspace, or no threads", "fewer tokens at a time")
