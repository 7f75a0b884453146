"""How close the CPU kernels come to memory speed: `python -m vismoe.eval.studies.kernels [--json]`.

Measures whole experts of Qwen3-30B-A3B's geometry in every format and at several batch sizes, the two kinds of linear that a
decoded token uses (the language model head, and attention projections, also for the 256 rows of a prompt), its attention over
some numbers of keys, and that of prompts and pictures. They are compared with torch's own operators on weights of the same
precision. Every working set but the last is above 1 GiB and is read in random order (that of attention, and the experts of
prompts, in turn), so that no cache holds a weight.

Summing the same bytes, in turn with both contestants, measures the memory's rate: on a shared machine it changes from one second
to the next, and only rates measured together are comparable. Results are medians over rounds: GB/s of weights read (in their
format), their share of the memory's rate in the same round, weights per second, GFLOP/s, and the speed of VisMoE's kernels
divided by torch's. The last line on stdout is one JSON object; `--json` prints only that.

"prompt": a layer of 128 experts, of which each token of a prompt wants eight, some of them more often than others. VisMoE's calls
add the experts up, for which AMX and AVX-512 BF16 have kernels of their own; torch picks the tokens of each expert and computes
its products. "tokens" are those of an expert, on average.

torch has no operators for the encodings of published checkpoints (`--weights fp8 q4_k`). For prompts its product of weights that
were restored to bfloat16 before is their contestant; single tokens and small batches have none.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vismoe.errors import ConfigError
from vismoe.flags import SuggestingParser
from vismoe.formats.encodings import ENCODINGS
from vismoe.kernels import cpu
from vismoe.kernels.attention import PROMPTS as ATTENDED
from vismoe.kernels.attention import attend, attend_prompt
from vismoe.kernels.codecs import codec_of
from vismoe.models.moe.compute import LONG_PROMPT, cuts
from vismoe.pools.advice import in_huge_pages
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

FORM = ExpertForm("gate_up_proj", "down_proj", False, Gate.CONCATENATED, Activation.SILU)
EXPERTS_OF_A_CALL = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (16, 32, 64, 128, 256)  # tokens of an expert, on average
EXPERTS_OF_A_LAYER, CHOICES, SKEW = 128, 8, 0.5  # the last: Zipf's exponent
ROUND_S = 0.05  # least time of each contestant
WEIGHTS = {
    "bfloat16": (Format.RAW, torch.bfloat16),
    "float16": (Format.RAW, torch.float16),
    "int8": (Format.INT8, torch.bfloat16),
    "int4": (Format.INT4, torch.bfloat16),
    "int2": (Format.INT2, torch.bfloat16),
    "linear": (Format.RAW, torch.bfloat16),
    "attention": (Format.RAW, torch.bfloat16),
}
CONTEXTS = (256, 3_000, 16_000)
PROMPT_TOKENS, PATCHES = (256, 512, 2_048, 4_096), (1_024, 4_096)
VISION_HEADS = (16, 16, 72)  # of Qwen3-VL's tower

ENCODED = ("fp8", "w8", "w4", "mxfp4", "nvfp4", "q8_0", "q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "iq4_xs")

Call = Callable[[], object]


@dataclass(frozen=True)
class KernelShape:
    """The shapes of the weights."""

    hidden: int = 2048
    intermediate: int = 768
    vocabulary: int = 151936
    projections: tuple[tuple[int, int], ...] = ((4096, 2048), (512, 2048), (512, 2048), (2048, 4096))  # q, k, v, o
    heads: tuple[int, int, int] = (32, 4, 128)  # of queries, of keys, and the numbers of each


@dataclass(frozen=True)
class KernelContest:
    """Two ways to do the same work."""

    name: str
    tokens: int  # per expert, of the linear, queries that share keys, or of the prompt that is attended to
    flop: int  # of one call
    ours: Iterator[Call]
    our_bytes: int  # weights that one call of VisMoE's kernels reads
    torch: Iterator[Call] | None  # None: torch has no such operator
    torch_bytes: int


@dataclass(frozen=True)
class Speed:
    """One contest, medians over rounds."""

    name: str
    tokens: int
    bytes_per_s: float
    share_of_memory: float
    weights_per_s: float  # read once for all tokens
    flop_per_s: float
    torch_bytes_per_s: float | None
    torch_flop_per_s: float | None
    times_torch: float | None  # calls per second of VisMoE's kernels, divided by torch's


# ------------------------------------------------------------------ measuring
def measure(contest: KernelContest, working_set: Tensor, threads: int, rounds: int) -> Speed:
    """Rounds of: the memory's rate, VisMoE's kernels, torch."""
    ours, theirs, shares = [], [], []
    calls_per_s(contest.ours, 0.0)  # the first call starts threads and allocates the workspace
    for _ in range(rounds):
        memory = read_bytes_per_s(working_set, threads)
        ours.append(calls_per_s(contest.ours, ROUND_S))
        shares.append(ours[-1] * contest.our_bytes / memory)
        if contest.torch:
            theirs.append(calls_per_s(contest.torch, ROUND_S))
    rate = statistics.median(ours)
    torch_rate = statistics.median(theirs) if theirs else None
    return Speed(
        contest.name,
        contest.tokens,
        rate * contest.our_bytes,
        statistics.median(shares),
        rate * contest.flop / (2 * contest.tokens),
        rate * contest.flop,
        torch_rate and torch_rate * contest.torch_bytes,
        torch_rate and torch_rate * contest.flop,
        statistics.median(a / b for a, b in zip(ours, theirs)) if theirs else None,
    )


def calls_per_s(calls: Iterator[Call], at_least_s: float) -> float:
    start, count = time.perf_counter(), 0
    while True:
        next(calls)()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least_s:
            return count / elapsed


def read_bytes_per_s(memory: Tensor, threads: int) -> float:
    """Sums the memory, each thread its own share."""
    shares = np.array_split(memory.numpy().view(np.int64), threads)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.sum, shares))
    return memory.numel() / (time.perf_counter() - start)


# ------------------------------------------------------------------ whole experts
def expert_contests(
    geometry: KernelShape, format: Format, dtype: torch.dtype, working_set: Tensor, encoding: str = ""
) -> Iterator[KernelContest]:
    """The contests of one format, or of raw weights in an encoding; fills `working_set` uint8 with its records."""
    hidden, intermediate = geometry.hidden, geometry.intermediate
    shapes = {FORM.up: (2 * intermediate, hidden), FORM.down: (hidden, intermediate)}
    raw = RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))
    slab = encoded_layout(shapes, encoding) if encoding else codec_of(format, raw, frozenset()).slab
    kernel = cpu.ExpertKernel.of(format, raw, slab, FORM)
    assert isinstance(kernel, cpu.ExpertKernel), kernel
    slabs = working_set[: working_set.numel() // slab.record_bytes * slab.record_bytes].view(-1, slab.record_bytes)
    fill(slabs, slab)
    of_torch = (Format.RAW, restored_slabs(raw, working_set.numel())) if encoding else (format, slabs)
    theirs = torch_experts(*of_torch, raw)
    name = encoding or (dtype_name(dtype) if format is Format.RAW else str(format))
    for tokens in BATCHES:
        x = torch.randn(tokens, hidden).to(dtype)
        rival = None if encoding else theirs
        yield KernelContest(
            name,
            tokens,
            6 * hidden * intermediate * tokens * EXPERTS_OF_A_CALL,
            our_calls(kernel, slabs, x),
            slab.payload_bytes * EXPERTS_OF_A_CALL,
            rival.calls(x) if rival else None,
            rival.bytes_of_one * EXPERTS_OF_A_CALL if rival else 0,
        )
    for tokens in PROMPTS:
        prompt = RoutedPrompt.of(tokens * EXPERTS_OF_A_LAYER // CHOICES)
        x = torch.randn(len(prompt), hidden).to(dtype)
        yield KernelContest(
            f"{name}, prompt",
            tokens,
            6 * hidden * intermediate * len(prompt.tokens),
            prompt.calls(kernel, slabs, x),
            slab.payload_bytes * len(prompt.experts),
            theirs.calls_for(prompt, x) if theirs else None,
            theirs.bytes_of_one * len(prompt.experts) if theirs else 0,
        )


@cache
def restored_slabs(raw: RecordLayout, nbytes: int) -> Tensor:
    """Records uint8 [N, record bytes] of bfloat16 weights in about `nbytes` of memory."""
    slabs = in_huge_pages(torch.empty(nbytes // raw.record_bytes, raw.record_bytes, dtype=torch.uint8))
    fill_with_normal(slabs.view(-1))
    return slabs


def fill(slabs: Tensor, layout: RecordLayout) -> None:
    """Records uint8 [N, record bytes] of small codes and scales, whose products are no denormal numbers: a processor takes a
    hundred times as long for these, and no published checkpoint has them."""
    slabs.random_(0, 50)
    for section in layout.sections:
        places = slabs[:, section.offset_bytes : section.offset_bytes + section.nbytes].view(section.dtype)
        if section.dtype.is_floating_point:
            places.copy_((torch.rand(places.shape[1]) + 0.5) / 100)
        elif section.name.endswith(".scale"):
            places.fill_(120)


def fill_with_normal(memory: Tensor) -> None:
    """The same for bfloat16 alone: memory uint8 gets numbers of a normal distribution."""
    some = torch.randn(2**16).bfloat16().view(torch.uint8)
    for part in memory.split(len(some)):
        part.copy_(some[: len(part)])


def encoded_layout(shapes: dict[str, tuple[int, int]], encoding: str) -> RecordLayout:
    """A record of matrices in one encoding; the bfloat16 scales of fp8, w8 and w4 belong to 128 inputs."""
    sections: dict[str, tuple[tuple[int, int], torch.dtype]] = {}
    for name, (rows, inputs) in shapes.items():
        sections[f"{name}.{encoding}"] = (rows, ENCODINGS[encoding].row_bytes(inputs)), torch.uint8
        if encoding in ("mxfp4", "nvfp4"):
            sections[f"{name}.scale"] = (rows, inputs // (16 if encoding == "nvfp4" else 32)), torch.uint8
        if encoding == "nvfp4":
            sections[f"{name}.factor"] = (rows, 1), torch.float32
        if encoding in ("fp8", "w8", "w4"):
            sections[f"{name}.scale"] = (rows, inputs // 128), torch.bfloat16
    return RecordLayout.of({n: shape for n, (shape, _) in sections.items()}, {n: dtype for n, (_, dtype) in sections.items()})


def our_calls(kernel: cpu.ExpertKernel, slabs: Tensor, x: Tensor) -> Iterator[Call]:
    """Calls that give all tokens to each expert of a group."""
    tokens, addresses = len(x), addresses_of(slabs)
    starts = np.arange(EXPERTS_OF_A_CALL + 1, dtype=np.int32) * np.int32(tokens)
    pairs = np.tile(np.arange(tokens, dtype=np.int32), EXPERTS_OF_A_CALL)
    factors, out = np.ones(len(pairs), np.float32), torch.zeros(len(pairs), x.shape[1])
    for group in random_groups(len(slabs)):
        yield partial(kernel.parts, addresses[group], starts, pairs, factors, x, out)


def addresses_of(slabs: Tensor) -> np.ndarray:
    return slabs.data_ptr() + np.arange(len(slabs), dtype=np.uint64) * np.uint64(slabs.shape[1])


@dataclass(frozen=True)
class RoutedPrompt:
    """The experts of a layer that a prompt wants, and the tokens of each, one expert after the other."""

    experts: list[int]
    starts: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, tokens: int) -> "RoutedPrompt":
        trace = skewed_trace(1, EXPERTS_OF_A_LAYER, CHOICES, prompt_tokens=tokens, tokens=0, skew=SKEW, zipf=True)
        routing = trace.steps[0].layers[0].expert_ids.astype(np.int64)
        experts, starts, of_expert, _places = cpu.route(routing, EXPERTS_OF_A_LAYER)
        return cls(list(experts), starts, of_expert)

    def __len__(self) -> int:
        return len(self.tokens) // CHOICES

    def calls(self, kernel: cpu.ExpertKernel, slabs: Tensor, x: Tensor) -> Iterator[Call]:
        """Calls that add the experts up as a layer does."""
        addresses, factors, out = addresses_of(slabs), np.ones(len(self.tokens), np.float32), torch.zeros(x.shape)
        long = len(self.tokens) / EXPERTS_OF_A_LAYER >= LONG_PROMPT

        def call(records: np.ndarray) -> None:
            for pairs, experts, starts in cuts(self.starts):
                group = addresses[records[experts]], starts, self.tokens[pairs], factors[pairs]
                kernel.parts(*group, x, out, adding=True, long=long)

        return (partial(call, records) for records in self.places(len(slabs)))

    def places(self, count: int) -> Iterator[np.ndarray]:
        """Which of `count` records are the experts, for successive calls: the next ones."""
        for first in itertools.count(0, len(self.experts)):
            yield np.arange(first, first + len(self.experts)) % count

    def of_experts(self) -> list[Tensor]:
        return [torch.from_numpy(self.tokens[first:last]) for first, last in zip(self.starts, self.starts[1:])]


def random_groups(count: int) -> Iterator[np.ndarray]:
    """Endless groups of experts for successive calls; every expert occurs once before one occurs twice."""
    if count < EXPERTS_OF_A_CALL:
        raise ConfigError(
            f"the working set holds {count} experts, but a call computes {EXPERTS_OF_A_CALL}. Fix: a larger --working-set"
        )
    random = np.random.default_rng(0)
    while True:
        yield from random.permutation(count)[: count // EXPERTS_OF_A_CALL * EXPERTS_OF_A_CALL].reshape(-1, EXPERTS_OF_A_CALL)


@dataclass(frozen=True)
class TorchContestant:
    """The same experts with torch's operators."""

    count: int
    bytes_of_one: int
    product: Callable[[int, str, Tensor], Tensor]  # of an expert's matrix, by section name

    def calls(self, x: Tensor) -> Iterator[Call]:
        return (partial(self.run_all, group.tolist(), x) for group in random_groups(self.count))

    def run_all(self, experts: list[int], x: Tensor) -> None:
        for expert in experts:
            self.run(expert, x)

    def run(self, expert: int, x: Tensor) -> None:
        gate, up = self.product(expert, FORM.up, x).chunk(2, dim=-1)
        self.product(expert, FORM.down, functional.silu(gate) * up)

    def calls_for(self, prompt: RoutedPrompt, x: Tensor) -> Iterator[Call]:
        return (partial(self.run_routed, records.tolist(), prompt.of_experts(), x) for records in prompt.places(self.count))

    def run_routed(self, records: list[int], tokens: list[Tensor], x: Tensor) -> None:
        for record, picked in zip(records, tokens):
            self.run(record, x[picked])


def torch_experts(format: Format, slabs: Tensor, raw: RecordLayout) -> TorchContestant | None:
    """torch's operators for a format; integer weights are packed again, because torch has its own layouts."""
    if format is Format.RAW:
        weights = [raw.views(slab) for slab in slabs]
        return TorchContestant(len(slabs), raw.payload_bytes, lambda e, name, x: functional.linear(x, weights[e][name]))
    shapes = {section.name: section.shape for section in raw.sections}
    count = slabs.numel() // raw.payload_bytes * (2 if format is Format.INT8 else 4)
    if format is Format.INT8:
        codes = [{name: torch.full(shape, 3, dtype=torch.int8) for name, shape in shapes.items()} for _ in range(count)]
        scales = {name: torch.full((shape[0],), 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
        nbytes = raw.payload_bytes // 2
        return TorchContestant(count, nbytes, lambda e, name, x: torch._weight_int8pack_mm(x, codes[e][name], scales[name]))
    if format is Format.INT4:
        operators: Any = torch.ops.aten
        one = {
            name: operators._convert_weight_to_int4pack_for_cpu(torch.full(shape, 3, dtype=torch.int32), 1)
            for name, shape in shapes.items()
        }
        packed = [{name: weight.clone() for name, weight in one.items()} for _ in range(count)]
        zeros = {name: torch.full((shape[1] // 128, shape[0], 2), 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
        nbytes = sum(weight.nbytes for weight in one.values()) + sum(zero.nbytes for zero in zeros.values())
        return TorchContestant(
            count, nbytes, lambda e, name, x: operators._weight_int4pack_mm_for_cpu(x, packed[e][name], 128, zeros[name])
        )
    return None


# ------------------------------------------------------------------ linears
def linear_contests(geometry: KernelShape, working_set: Tensor) -> Iterator[KernelContest]:
    """Weights and inputs in bfloat16."""
    shapes = {"head": ((geometry.vocabulary, geometry.hidden),), "attention": geometry.projections}
    fill_with_normal(working_set)
    for name, matrices in shapes.items():
        sizes = [rows * inputs for rows, inputs in matrices]
        sets = working_set.numel() // (2 * sum(sizes))
        weights = [
            [part.view(shape) for part, shape in zip(each.split(sizes), matrices)]
            for each in working_set[: 2 * sets * sum(sizes)].view(torch.bfloat16).view(sets, -1)
        ]
        for tokens in (1, 4, 16) if name == "head" else (1, 4, 16, 256):
            inputs = [torch.randn(tokens, shape[1]).bfloat16() for shape in matrices]
            nbytes, flop = 2 * sum(sizes), 2 * tokens * sum(sizes)
            ours, theirs = (linear_calls(function, inputs, weights) for function in (cpu.linear, functional.linear))
            yield KernelContest(name, tokens, flop, ours, nbytes, theirs, nbytes)


def linear_calls(function: Callable[..., Tensor], inputs: list[Tensor], weights: list[list[Tensor]]) -> Iterator[Call]:
    def products(matrices: list[Tensor]) -> None:
        for x, weight in zip(inputs, matrices):
            function(x, weight)

    return (partial(products, matrices) for matrices in itertools.cycle(weights))


# ------------------------------------------------------------------ attention of one token
def attention_contests(geometry: KernelShape, working_set: Tensor) -> Iterator[KernelContest]:
    """Queries, keys and values in bfloat16; for torch the queries of a group are rows of one head."""
    (heads, groups, columns), scale = geometry.heads, 0.1
    fill_with_normal(working_set)
    query = torch.randn(1, heads, 1, columns).bfloat16()
    rows = query.view(1, groups, heads // groups, columns)
    for context in CONTEXTS:
        size = groups * context * columns
        sets = (
            working_set[: working_set.numel() // (4 * size) * 4 * size]
            .view(torch.bfloat16)
            .view(-1, 2, 1, groups, context, columns)
        )

        def ours(keys: Tensor, values: Tensor) -> None:
            attend(query, [(keys, values, None)], scale)

        def theirs(keys: Tensor, values: Tensor) -> None:
            functional.scaled_dot_product_attention(rows, keys, values, scale=scale)

        flop = 4 * heads * context * columns
        calls = attention_calls(ours, sets), attention_calls(theirs, sets)
        yield KernelContest(f"keys {context}", heads // groups, flop, calls[0], 4 * size, calls[1], 4 * size)


def attention_calls(function: Callable[[Tensor, Tensor], None], sets: Tensor) -> Iterator[Call]:
    return (partial(function, keys, values) for keys, values in itertools.cycle(sets))


def prompt_contests(geometry: KernelShape) -> Iterator[KernelContest]:
    """Attention of a prompt, where each token sees those before it, and of a picture's patches, which see all."""
    if cpu.setup().isa == "portable":
        return  # torch serves there
    cases = [("prompt", geometry.heads, n) for n in PROMPT_TOKENS] + [("picture", VISION_HEADS, n) for n in PATCHES]
    for dtype, (name, (heads, groups, columns), tokens) in itertools.product(ATTENDED, cases):
        query, keys, values = (torch.randn(1, tokens, n, columns).to(dtype).transpose(1, 2) for n in (heads, groups, groups))
        causal, scale = name == "prompt", columns**-0.5
        ours: Call = partial(attend_prompt, query, keys, values, None, causal, scale)
        of_torch = partial(functional.scaled_dot_product_attention, is_causal=causal, scale=scale, enable_gqa=heads != groups)
        theirs: Call = partial(of_torch, query, keys, values)
        flop, nbytes = (2 if causal else 4) * heads * tokens**2 * columns, 4 * groups * tokens * columns
        name = f"{name} {dtype_name(dtype)}"
        yield KernelContest(name, tokens, flop, itertools.repeat(ours), nbytes, itertools.repeat(theirs), nbytes)


# ------------------------------------------------------------------ printing
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def line(speed: Speed) -> str:
    weights = f"{speed.bytes_per_s / 1e9:9.1f} {speed.share_of_memory:8.0%} {speed.weights_per_s / 1e9:10.1f}"
    ours = f"{weights} {speed.flop_per_s / 1e9:9.0f}"
    if speed.times_torch is None or speed.torch_bytes_per_s is None or speed.torch_flop_per_s is None:
        return f"{speed.name:16} {speed.tokens:6} {ours}"
    theirs = f"{speed.torch_bytes_per_s / 1e9:9.1f} {speed.torch_flop_per_s / 1e9:9.0f} {speed.times_torch:8.2f}"
    return f"{speed.name:16} {speed.tokens:6} {ours}   {theirs}"


OURS = f"{'GB/s':>9} {'of DRAM':>8} {'Gweights/s':>10} {'GFLOP/s':>9}"
HEADER = f"{'weights':16} {'tokens':>6} {OURS}   {'torch':>9} {'GFLOP/s':>9} {'ours/it':>8}"


def main() -> None:
    parser = SuggestingParser(prog="python -m vismoe.eval.studies.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the last line")
    parser.add_argument("--isa", default="auto", help="instruction set of VisMoE's kernels: " + ", ".join(cpu.available()))
    parser.add_argument("--threads", type=int, help="threads of both contestants (default: as many as torch uses)")
    parser.add_argument("--rounds", type=int, default=7)
    kinds = [*WEIGHTS, *ENCODED]
    parser.add_argument("--weights", nargs="+", default=kinds, choices=kinds, help="weights to measure")
    parser.add_argument("--working-set", type=float, default=1.25, metavar="GIB")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    backend = cpu.start(arguments.threads, arguments.isa)
    geometry, nbytes = KernelShape(), int(arguments.working_set * 2**30) // 64 * 64
    working_set = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8)).zero_()  # as slabs and weights lie
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{backend.isa}, {backend.threads} threads; torch {torch.__version__}\n{HEADER}", file=out)
    contests = (
        linear_contests(geometry, working_set)
        if weights == "linear"
        else itertools.chain(attention_contests(geometry, working_set), prompt_contests(geometry))
        if weights == "attention"
        else expert_contests(
            geometry, *WEIGHTS.get(weights, WEIGHTS["bfloat16"]), working_set, weights if weights in ENCODED else ""
        )
        for weights in arguments.weights
    )
    speeds = []
    for contest in itertools.chain.from_iterable(contests):
        speeds.append(measure(contest, working_set, backend.threads, arguments.rounds))
        print(line(speeds[-1]), file=out, flush=True)
    print(json.dumps({**asdict(backend), "torch": torch.__version__, "speeds": [asdict(speed) for speed in speeds]}))


if __name__ == "__main__":
    main()
