"""Experts with random weights as records in every format, batches for them, and how large their errors may be."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import reference
import torch
from torch import Tensor

from vismoe.formats.affine import GRIDS
from vismoe.formats.codec import Codec
from vismoe.formats.encoded import Encoded
from vismoe.kernels import cpu
from vismoe.kernels.codecs import codec_of
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

FORMATS = (Format.RAW, Format.INT8, Format.INT4, Format.INT2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = {
    "qwen": (Gate.CONCATENATED, Activation.SILU, True),
    "gpt-oss": (Gate.INTERLEAVED, Activation.CLAMPED_SWIGLU, True),
    "gemma": (Gate.CONCATENATED, Activation.GELU_TANH, False),
    "gelu": (Gate.NONE, Activation.GELU_ERF, True),
    "nemotron": (Gate.NONE, Activation.RELU_SQUARED, False),
}


@dataclasses.dataclass(frozen=True)
class Experts:
    """Some experts with random weights: as records, and as the matrices that the records stand for."""

    raw: RecordLayout
    codec: Codec
    model_form: ExpertForm
    slabs: Sequence[Tensor]  # uint8 [record_bytes] each, every gap full of NaN patterns
    weights: list[dict[str, Tensor]]
    precisions: np.ndarray | None = None
    kinds: Sequence["Experts"] = ()  # by precision, where there are several

    @classmethod
    def of(cls, format=Format.RAW, dtype=torch.bfloat16, hidden=96, intermediate=80, count=3, form="qwen", transposed=False):
        gate, activation, biased = FORMS[form]
        ups = intermediate if gate is Gate.NONE else 2 * intermediate
        shapes = {"up_proj": (ups, hidden), "down_proj": (hidden, intermediate)}
        if transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        if biased:
            shapes |= {"up_proj_bias": (ups,), "down_proj_bias": (hidden,)}
        raw = RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))
        codec = codec_of(format, raw, frozenset({"up_proj", "down_proj"} if transposed else ()))
        expert_form = ExpertForm("up_proj", "down_proj", transposed, gate, activation, alpha=1.702, limit=1.5)
        slabs = torch.full((count, codec.slab.record_bytes), 0xFF, dtype=torch.uint8)
        weights = [cls._fill(codec, slab, expert_form) for slab in slabs]
        return cls(raw, codec, expert_form, slabs, weights)

    @property
    def form(self) -> ExpertForm:
        """Of `weights`."""
        return dataclasses.replace(self.model_form, transposed=False)

    def rounded(self) -> "Experts":
        """With weights that are rounded to bfloat16; what is not a matrix stays."""
        weights = [{name: w.bfloat16() if w.ndim == 2 else w for name, w in each.items()} for each in self.weights]
        return dataclasses.replace(self, weights=weights)

    def rounded_in_prompts(self, isa: str, dtype: torch.dtype, long: bool) -> bool:
        """Whether this instruction set has sums of their own, of weights that it rounds to bfloat16, for the tokens of a (long)
        prompt; float16 is for another set."""
        kinds = self.kinds or (self,)
        fp16 = any(matrix.dtype == torch.float16 for kind in kinds for each in kind.weights for matrix in each.values())
        encoded = any(isinstance(kind.codec, Encoded) for kind in kinds)
        return dtype == torch.bfloat16 and not fp16 and (isa == "amx" or (isa == "avx512bf16" and (long or encoded)))

    def in_another_order(self, isa: str, dtype: torch.dtype, long: bool) -> bool:
        """Whether this instruction set adds in another order for the tokens of a long prompt: weights in all formats but float16,
        except codes that AVX2 multiplies as integers, if 16 inputs share a scale. The sets with BF16 have another for float32."""
        found = {cpu.ENCODINGS[matrix.encoding] for each in self.kernel._experts for matrix in (each.up, each.down)}
        in_float32 = dtype != torch.bfloat16 or torch.float16 in found
        integers = {"nvfp4", "q6_k", "q2_k", "q3_k"} if isa == "avx2" and not in_float32 else set()
        there = isa in ("avx2", "avx512") or (isa in ("avx512bf16", "amx") and in_float32)
        return there and long and bool(found - {torch.float16} - integers)

    @cached_property
    def kernel(self) -> cpu.ExpertKernel:
        if self.kinds:
            return cpu.ExpertKernel.mixed([kind.kernel for kind in self.kinds])
        kernel = cpu.ExpertKernel.of(self.codec.format, self.raw, self.codec.slab, self.model_form)
        assert isinstance(kernel, cpu.ExpertKernel), kernel
        return kernel

    @classmethod
    def mixed(cls, kinds: Sequence["Experts"], precisions: Sequence[int]) -> "Experts":
        """Expert i as kinds[precisions[i]] has it."""
        slabs = [kinds[precision].slabs[i] for i, precision in enumerate(precisions)]
        weights = [kinds[precision].weights[i] for i, precision in enumerate(precisions)]
        first = kinds[0]
        return cls(first.raw, first.codec, first.model_form, slabs, weights, np.array(precisions, np.uint8), kinds)

    @staticmethod
    def _fill(codec, slab: Tensor, form: ExpertForm) -> dict[str, Tensor]:
        """Random numbers into one slab; returns the weights that they mean, matrices [out, in]."""
        views, weights = codec.slab.views(slab), {}
        transposed = (form.up, form.down) if form.transposed else ()
        for section in codec.raw.sections:
            if section.name in views:
                spread = section.shape[-1] ** -0.5 if len(section.shape) == 2 else 0.1
                weight = views[section.name].copy_(torch.randn(section.shape) * spread)
                weights[section.name] = weight.T if section.name in transposed else weight
                continue
            codes, scale, offset = (views[f"{section.name}.{part}"] for part in ("codes", "scale", "offset"))
            inputs = codec.shape(section)[1]
            codes.copy_(torch.randint(256, codes.shape))
            spread = inputs**-0.5 / GRIDS[codec.format].middle
            scale.copy_((torch.rand(scale.shape) + 0.5) * spread)
            offset.copy_(torch.randn(offset.shape) * spread)
            weights[section.name] = dequantised(codec.format, codes, scale, offset, inputs)
        return weights

    def records(self) -> np.ndarray:
        return np.array([slab.data_ptr() for slab in self.slabs], np.uint64)


def dequantised(format: Format, codes: Tensor, scale: Tensor, offset: Tensor, inputs: int) -> Tensor:
    """float32 [out, in], input by input as docs/formats.md says."""
    out = torch.empty(codes.shape[0], inputs)
    group = GRIDS[format].group_inputs
    for i in range(inputs):
        if format is Format.INT8:
            centred = codes[:, i].view(torch.int8).int()
        elif format is Format.INT4:
            centred = (codes[:, i // 64 * 32 + i % 32].int() >> (4 * (i % 64 // 32)) & 15) - 8
        else:
            centred = (codes[:, i // 128 * 32 + i % 32].int() >> (2 * (i % 128 // 32)) & 3) - 2
        out[:, i] = centred * scale[:, i // group].float() + offset[:, i // group].float()
    return out


@dataclasses.dataclass(frozen=True)
class Batch:
    """Hidden states and who wants which of them."""

    hidden: Tensor
    starts: np.ndarray
    tokens: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, counts, hidden=96, dtype=torch.bfloat16, tokens=None):
        tokens = tokens or max(1, *counts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        which = np.concatenate([np.sort(np.random.permutation(tokens)[:n]) for n in counts]).astype(np.int32)
        factors = np.random.rand(len(which)).astype(np.float32)
        return cls(torch.randn(tokens, hidden).to(dtype), starts, which, factors)

    def parts(self, experts: Experts) -> Tensor:
        out = torch.full((len(self.tokens), experts.kernel.hidden), torch.nan)
        call = experts.records(), self.starts, self.tokens, self.factors, self.hidden, out
        experts.kernel.parts(*call, precisions=experts.precisions)
        return out

    def added(self, experts: Experts, out: Tensor, long: bool = False) -> Tensor:
        call = experts.records(), self.starts, self.tokens, self.factors, self.hidden, out
        experts.kernel.parts(*call, precisions=experts.precisions, adding=True, long=long)
        return out

    def apart(self) -> "Batch":
        """The same with a token of its own for every pair: what `added` adds to zeros are then the parts."""
        pairs = np.arange(len(self.tokens), dtype=np.int32)
        return Batch(self.hidden[torch.from_numpy(self.tokens).long()], self.starts, pairs, self.factors)

    def in_a_prompt(self, experts: Experts, long: bool = False) -> Tensor:
        """The parts as `added` computes them."""
        return self.apart().added(experts, torch.zeros(len(self.tokens), experts.kernel.hidden), long)

    def oracle(self, experts: Experts) -> Tensor:
        tokens, factors = torch.from_numpy(self.tokens).long(), torch.from_numpy(self.factors)
        return reference.parts(experts.form, experts.weights, self.starts.tolist(), tokens, factors, self.hidden)


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def typical(experts: Experts, batch: Batch) -> float:
    """The root mean square that outputs have where nothing cancels: errors are measured in it."""
    squares = []
    gated = experts.form.gate is not Gate.NONE
    for weights, first, last in zip(experts.weights, batch.starts, batch.starts[1:]):
        x = batch.hidden[batch.tokens[first:last]].double()
        bias, up = weights.get("up_proj_bias", torch.zeros(())).double(), weights["up_proj"].double()
        product = (x.square() @ up.square().T + bias.square()).mean(dim=1, keepdim=True)
        middle = product * (product + 1) if experts.form.activation is Activation.CLAMPED_SWIGLU else product
        middle = product**2 if gated and middle is product else middle
        if experts.form.activation is Activation.RELU_SQUARED:  # one of few numbers may be most of the sum
            middle = torch.maximum(product**2, (x @ up.T + bias).relu() ** 4)
        bias, down = weights.get("down_proj_bias", torch.zeros(())).double(), weights["down_proj"].double().square()
        out = (middle @ down.T if middle.shape[1] == down.shape[1] else middle * down.sum(dim=1)) + bias.square()
        squares.append(out * torch.from_numpy(batch.factors[first:last, None]).double() ** 2)
    return torch.cat(squares).mean().sqrt().item()


def on_every_set(experts: Experts, batch: Batch, tolerance: Callable[[str], float]) -> None:
    """Every instruction set computes what the oracle does, within its own tolerance of the typical result."""
    if not len(batch.tokens):
        assert batch.parts(experts).shape == (0, batch.hidden.shape[1])
        return
    oracle = batch.oracle(experts)
    size = max(typical(experts, batch), rms(oracle))  # of a few gates, too, one may be most of the sum
    for isa in cpu.available():
        cpu.start(2, isa)
        few = 2 if oracle.numel() < 16 else 1  # numbers to average over
        assert rms((parts := batch.parts(experts)) - oracle) <= few * tolerance(isa) * size, isa
        for long in (False, True):
            added = batch.in_a_prompt(experts, long)
            if experts.rounded_in_prompts(isa, batch.hidden.dtype, long):
                assert rms(added - batch.oracle(experts.rounded())) <= few * tolerance(isa) * size
            elif experts.in_another_order(isa, batch.hidden.dtype, long):
                assert rms(added - oracle) <= few * tolerance(isa) * size
            else:
                assert torch.equal(added, parts), isa
