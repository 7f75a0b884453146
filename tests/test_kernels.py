"""The CPU kernels against float64 oracles (reference.py), and what their results must not depend on."""

import ctypes
import dataclasses
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from expert_records import DTYPES, FORMATS, FORMS, Batch, Experts, on_every_set, rms, typical
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor

from vismoe.errors import ConfigError
from vismoe.kernels import cpu
from vismoe.kernels.codecs import codec_of
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

PAIRS = tuple(itertools.combinations(FORMATS, 2))


@pytest.fixture(params=cpu.available())
def isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


def tolerance(isa: str, experts: Experts, hidden: Tensor) -> float:
    """Of the root mean square error: products of bfloat16 round weights and intermediate results to 8 bits, words round inputs to
    16 bits of the largest of 128, all others to 24."""
    codes = any(kind.codec.format is not Format.RAW for kind in experts.kinds or [experts])
    if isa in ("avx2", "avx512") and hidden.dtype == torch.bfloat16 and codes:
        return 2e-4
    fp16 = any(weights["up_proj"].dtype == torch.float16 for weights in experts.weights)
    return 1.2e-2 if isa in ("avx512bf16", "amx") and hidden.dtype == torch.bfloat16 and not fp16 else 3e-6


# ------------------------------------------------------------------ right numbers
@pytest.mark.parametrize("formats", [*zip(FORMATS), *PAIRS], ids="/".join)
@settings(max_examples=examples(20), deadline=None)
@given(
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 300),
    counts=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 13, 64, 70]), min_size=1, max_size=4),
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_instruction_set_computes_what_the_oracle_does(
    formats, hidden, intermediate, counts, form, dtype, transposed, seed
):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    weights_dtype = torch.bfloat16 if Format.RAW in formats and dtype == torch.float32 else dtype
    transposed = transposed and Format.RAW not in formats
    kinds = [Experts.of(format, weights_dtype, hidden, intermediate, len(counts), form, transposed) for format in formats]
    experts = kinds[0] if len(kinds) == 1 else Experts.mixed(kinds, np.random.randint(len(kinds), size=len(counts)))
    batch = Batch.of(counts, hidden, dtype)
    on_every_set(experts, batch, lambda isa: tolerance(isa, experts, batch.hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES[:2])
def test_a_linear_is_what_the_oracle_says(isa, dtype, weight_dtype):
    torch.manual_seed(1)
    sizes = ((1, 1, 1), (1, 2048, 1000), (3, 130, 259), (7, 127, 4), (16, 384, 66), (70, 33, 129), (300, 2100, 19))
    for (rows, inputs, outputs), long in itertools.product(sizes, (False, True)):
        x, drawn = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) * inputs**-0.5).to(weight_dtype)
        guarded = Guarded(drawn.view(torch.uint8).flatten())  # no byte behind the last row is read
        weight = guarded.bytes.view(weight_dtype).view(outputs, inputs)
        for bias in (None, torch.randn(outputs).to(dtype)):
            result, oracle = cpu.linear(x, weight, bias, long), reference.linear(x, weight, bias)
            assert result.dtype == dtype and result.shape == (rows, outputs)
            for some in (slice(1), slice(rows // 2, rows)):  # whatever the company
                assert torch.equal(cpu.linear(x[some], weight, bias, long), result[some])
            assert rms(result - oracle) <= {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", ["qwen", "gpt-oss"])
def test_the_error_is_at_most_that_of_torch_in_bfloat16(isa, format, form):
    """Both against float64 on the weights that the format means; torch has them rounded to bfloat16."""
    torch.manual_seed(2)
    np.random.seed(2)
    experts, batch = Experts.of(format, hidden=512, intermediate=256, count=2, form=form), Batch.of([32, 32], 512)
    oracle = batch.oracle(experts)
    rounded = [{name: weight.bfloat16() for name, weight in weights.items()} for weights in experts.weights]
    tokens, ones = torch.from_numpy(batch.tokens).long(), torch.ones(64)
    eager = reference.parts(experts.form, rounded, [0, 32, 64], tokens, ones, batch.hidden, torch.bfloat16).double()
    eager *= torch.from_numpy(batch.factors)[:, None]
    for parts in (batch.parts(experts), batch.in_a_prompt(experts), batch.in_a_prompt(experts, long=True)):
        assert rms(parts - oracle) <= 1.05 * rms(eager - oracle)


def of_one_number(form: ExpertForm, x: torch.Tensor, down: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What an expert of one input and one output makes of x [N, 1], and its weights: those of the first matrix are 1."""
    shapes = {"up_proj": (2 if form.gate is Gate.CONCATENATED else 1, 1), "down_proj": (1, 1)}
    raw = RecordLayout.of(shapes, dict.fromkeys(shapes, torch.bfloat16))
    kernel = cpu.ExpertKernel.of(Format.RAW, raw, raw, form)
    record = torch.zeros(raw.record_bytes, dtype=torch.uint8)
    weights = raw.views(record)
    weights["up_proj"].fill_(1.0)
    weights["down_proj"].fill_(down)
    count, out = len(x), torch.empty(len(x), 1)
    starts, tokens = np.array([0, count], np.int32), np.arange(count, dtype=np.int32)
    kernel.parts(np.array([record.data_ptr()], np.uint64), starts, tokens, np.ones(count, np.float32), x, out)
    return out, weights


@pytest.mark.parametrize("activation", Activation)
def test_activations_are_accurate_over_their_whole_range(isa, activation):
    """Only the activation is left."""
    gate = Gate.CONCATENATED if activation is Activation.CLAMPED_SWIGLU else Gate.NONE
    form = ExpertForm("up_proj", "down_proj", False, gate, activation, alpha=1.702, limit=7.0)
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.logspace(-20, 4, 200), -torch.logspace(-20, 4, 200)])[:, None]
    out, weights = of_one_number(form, x, down=1.0)
    oracle = reference.expert(form, weights, x)
    assert ((out - oracle).abs() <= 3e-6 * oracle.abs() + 2e-7 * x.abs()).all()


def test_no_sigmoid_is_a_denormal_number(isa):
    """A core multiplies those a hundred times as slowly."""
    x = torch.linspace(-120, -60, 601)[:, None]
    out, _ = of_one_number(ExpertForm("up_proj", "down_proj", False, Gate.NONE, Activation.SILU), x, down=2.0**100)
    assert (out / (x * 2.0**100) >= torch.finfo(torch.float32).tiny).all()


# ------------------------------------------------------------------ what results do not depend on
@pytest.mark.parametrize("hidden", [330, 2200])
@pytest.mark.parametrize("format", FORMATS)
def test_a_result_depends_on_its_own_token_and_expert_only(isa, format, hidden):
    """Not on threads, on other experts in the call, or on the other tokens of the expert: the same bits. Nor on how many inputs
    or tokens a kernel takes at a time."""
    torch.manual_seed(3)
    np.random.seed(3)
    experts, batch = Experts.of(format, hidden=hidden, intermediate=190, count=5), Batch.of([1, 270, 0, 9, 5], hidden, tokens=280)
    together, prompts = batch.parts(experts), [batch.in_a_prompt(experts, long) for long in (False, True)]
    size = typical(experts, batch)
    others = {"portable": [False, False], "amx": [True, True]}.get(isa, [False, True])  # have kernels of their own
    assert [not torch.equal(prompt, together) for prompt in prompts] == others
    for parts in (together, *prompts):
        assert rms(parts - batch.oracle(experts)) <= tolerance(isa, experts, batch.hidden) * size
    for threads in (1, 3):
        cpu.start(threads, isa)
        assert torch.equal(batch.parts(experts), together)
        for long in (False, True):
            assert torch.equal(batch.in_a_prompt(experts, long), prompts[long])
    for pair in (0, 1, 37, 256, 257, 270, 271, 280, 284):
        expert = int(np.searchsorted(batch.starts, pair, side="right")) - 1
        alone = torch.empty(1, hidden)
        records, starts = experts.records()[expert : expert + 1], np.array([0, 1], np.int32)
        token, factor = batch.tokens[pair : pair + 1], batch.factors[pair : pair + 1]
        experts.kernel.parts(records, starts, token, factor, batch.hidden, alone)
        assert torch.equal(alone[0], together[pair])
        for long in (False, True):
            call = records, starts, np.zeros(1, np.int32), factor, batch.hidden[token], alone.zero_()
            experts.kernel.parts(*call, adding=True, long=long)
            assert torch.equal(alone[0], prompts[long][pair])


@pytest.mark.parametrize("formats", PAIRS, ids="/".join)
def test_experts_of_two_formats_in_one_call_are_those_of_calls_by_format(isa, formats):
    """To the bit, and added in the experts' order, whichever format comes next; by one thread or three, in turn."""
    torch.manual_seed(5)
    np.random.seed(5)
    cpu.start(3 if (PAIRS.index(formats) + cpu.available().index(isa)) % 2 else 1, isa)
    precisions = [0, 1, 1, 0, 1, 0]
    kinds = [Experts.of(format, hidden=330, intermediate=190, count=6, form="gpt-oss") for format in formats]
    experts, batch = Experts.mixed(kinds, precisions), Batch.of([5, 3, 0, 0, 70, 2], 330, tokens=80)
    alone = torch.stack([batch.parts(kind) for kind in kinds])
    of_pair = torch.from_numpy(np.repeat(precisions, np.diff(batch.starts)))
    parts = batch.parts(experts)
    assert torch.equal(parts, alone[of_pair, torch.arange(80)])
    for long in (True, False):
        alone_in_prompts = torch.stack([batch.in_a_prompt(kind, long) for kind in kinds])
        begun, added = torch.randn(80, 330), batch.in_a_prompt(experts, long)
        assert torch.equal(added, alone_in_prompts[of_pair, torch.arange(80)])
    expected = begun.clone()
    reference.add(added, torch.from_numpy(batch.tokens), expected)
    assert torch.equal(batch.added(experts, begun), expected)
    assert torch.equal(batch.parts(dataclasses.replace(experts, slabs=kinds[0].slabs, precisions=None)), alone[0])


@pytest.mark.skipif("avx512bf16" not in cpu.available(), reason="elsewhere all formats take inputs in float32 there")
@pytest.mark.parametrize("format", FORMATS[1:])
def test_formats_beside_float16_weights_take_inputs_in_float32_too(format):
    kinds = [Experts.of(Format.RAW, torch.float16, count=4), Experts.of(format, count=4)]
    batch = Batch.of([2, 3, 70, 1])
    for order, precisions in itertools.product((kinds, kinds[::-1]), ([0, 1, 1, 0], [1, 1, 1, 1])):
        results = []
        for isa in ("avx512", "avx512bf16"):
            cpu.start(2, isa)
            results.append(batch.parts(Experts.mixed(order, precisions)))
        assert torch.equal(*results)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_add_and_combine_are_the_sums_of_the_parts_in_their_order(isa, threads):
    torch.manual_seed(4)
    np.random.seed(4)
    cpu.start(threads, isa)
    experts, batch = Experts.of(hidden=200, intermediate=300, count=6), Batch.of([5, 0, 3, 9, 2, 8], 200, tokens=11)
    parts, tokens = batch.parts(experts), torch.from_numpy(batch.tokens)
    added = torch.randn(11, 200)
    expected = added.clone()
    reference.add(batch.in_a_prompt(experts), tokens, expected)
    assert torch.equal(batch.added(experts, added), expected)
    for dtype in DTYPES:
        combined, expected = torch.full((12, 200), torch.nan, dtype=dtype), torch.empty(12, 200, dtype=dtype)
        cpu.combine(parts, batch.tokens, combined)
        reference.combine(parts, tokens, expected)
        assert torch.equal(combined, expected)  # the last token has no parts: zeros


def test_combine_rounds_every_float16_as_torch_does(isa):
    values = torch.cat([torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()])
    values = values[values.isfinite()]
    between = torch.cat(
        [values, values * 1.0003, values * 0.9997, values + 2e-8, torch.tensor([65519.9, 65520.0, 1e9, torch.inf])]
    )
    out = torch.empty(1, len(between), dtype=torch.float16)
    cpu.combine(between[None], np.zeros(1, np.int32), out)
    assert torch.equal(out[0], (between + 0.0).half())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_poisoned_token_poisons_itself_only(isa, format, poison):
    experts, batch = Experts.of(format, count=2), Batch.of([9, 9])
    clean = batch.parts(experts)
    batch.hidden[4, 7] = poison
    poisoned = batch.parts(experts)
    theirs = batch.tokens == 4
    assert torch.equal(poisoned[~theirs], clean[~theirs])
    assert not poisoned[theirs].isfinite().any()


def test_nothing_is_written_beside_the_output(isa):
    experts, batch = Experts.of(hidden=67, intermediate=35, count=2), Batch.of([3, 7], 67)
    before = experts.slabs.clone()
    guarded = torch.full((12, 67), 1234.5)
    experts.kernel.parts(experts.records(), batch.starts, batch.tokens, batch.factors, batch.hidden, guarded[1:11])
    assert torch.equal(guarded[1:11], batch.parts(experts))
    assert (guarded[[0, 11]] == 1234.5).all()
    assert torch.equal(experts.slabs, before)


# ------------------------------------------------------------------ threads and memory
def test_calls_from_two_threads_take_turns(isa):
    experts, batches = Experts.of(hidden=400, intermediate=200, count=3), [Batch.of([3, 9, 1], 400), Batch.of([8, 1, 20], 400)]
    expected = [batch.parts(experts) for batch in batches]
    wrong = []

    def calls(which):
        wrong.extend(which for _ in range(60) if not torch.equal(batches[which].parts(experts), expected[which]))

    callers = [threading.Thread(target=calls, args=(which,)) for which in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_starts_threads_of_its_own():
    cpu.start(2)
    experts, batch = Experts.of(hidden=400, intermediate=200), Batch.of([3, 9, 1], 400)
    expected = batch.parts(experts)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(batch.parts(experts), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="asks Linux what threads are doing")
def test_workers_sleep_between_calls():
    def states():
        stats = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
        return [stat.rpartition(")")[2].split()[0] for stat in stats]

    cpu.start(1)
    before = len(states())
    cpu.start(3)
    experts, batch = Experts.of(hidden=400, intermediate=200), Batch.of([3, 9, 1], 400)
    batch.parts(experts)
    assert len(states()) == before + 2
    deadline = time.monotonic() + 20
    while set(states()) != {"S"}:
        assert time.monotonic() < deadline, states()
        time.sleep(0.01)
    cpu.start()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.bfloat16, torch.float16)], ids=len)
def test_the_workspace_takes_what_the_plan_says(dtypes):
    setup = cpu.start(2)
    kinds = [Experts.of(dtype=dtype, hidden=3000, intermediate=100) for dtype in dtypes]
    experts, batch = Experts.mixed(kinds, [0, 0, 0]), Batch.of([150, 0, 40], 3000)
    planned = cpu.workspace_bytes(experts.kernel, 190, torch.bfloat16, setup.threads, setup.isa)
    batch.parts(experts)
    assert cpu.held_bytes() == planned
    Batch.of([15, 0, 4], 3000).parts(experts)
    assert cpu.held_bytes() == planned


# ------------------------------------------------------------------ refusals
def test_settings_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="threads=0"):
        cpu.start(0)
    with pytest.raises(ConfigError, match=r"avx1024.*not available"):
        cpu.start(1, "avx1024")
    monkeypatch.setattr(cpu, "available", lambda: ("portable",))
    with pytest.raises(ConfigError, match="have portable"):
        cpu.start(1, "avx2")
    assert cpu.start(1).isa == "portable"
    monkeypatch.undo()
    assert cpu.start().isa == cpu.available()[-1]


def kernel_or_why(shapes, dtype, form, format=Format.RAW):
    raw = RecordLayout.of(shapes, dict.fromkeys(shapes, dtype))
    slab = raw if format is Format.RAW else codec_of(format, raw, frozenset()).slab
    return cpu.ExpertKernel.of(format, raw, slab, form)


def test_forms_without_a_kernel_say_why():
    shapes = {"up_proj": (64, 32), "down_proj": (32, 64)}
    form = ExpertForm("up_proj", "down_proj", False, Gate.NONE, Activation.SILU)
    assert isinstance(kernel_or_why(shapes, torch.bfloat16, form), cpu.ExpertKernel)
    assert "float32" in kernel_or_why(shapes, torch.float32, form)
    assert isinstance(kernel_or_why(shapes, torch.float32, form, Format.INT4), cpu.ExpertKernel)
    assert "[in, out]" in kernel_or_why(shapes, torch.bfloat16, dataclasses.replace(form, transposed=True))
    assert "norm" in kernel_or_why(shapes | {"norm": (32,)}, torch.bfloat16, form)
    assert "do not fit" in kernel_or_why(shapes, torch.bfloat16, dataclasses.replace(form, gate=Gate.CONCATENATED))
    assert "gate" in kernel_or_why(shapes, torch.bfloat16, dataclasses.replace(form, activation=Activation.CLAMPED_SWIGLU))


def test_misuse_is_refused_before_memory_is_touched():
    experts, batch = Experts.of(count=2), Batch.of([2, 3])
    with pytest.raises(AssertionError, match="one geometry"):
        cpu.ExpertKernel.mixed([experts.kernel, Experts.of(Format.INT4, intermediate=81).kernel])
    out = torch.empty(5, 96)
    good = dict(
        records=experts.records(), starts=batch.starts, tokens=batch.tokens, factors=batch.factors, hidden=batch.hidden, out=out
    )
    experts.kernel.parts(**good)
    for bad in (
        dict(out=out.bfloat16()),
        dict(out=out[:4]),
        dict(out=torch.empty(96, 5).T),
        dict(hidden=batch.hidden[:, :95]),
        dict(hidden=batch.hidden.double()),
        dict(tokens=batch.tokens + 1),
        dict(tokens=batch.tokens.astype(np.int64)),
        dict(starts=np.array([0, 2, 4], np.int32)),
        dict(starts=np.array([0, 7, 5], np.int32)),
        dict(records=experts.records()[:1]),
        dict(factors=batch.factors[:4]),
        dict(precisions=np.array([0, 1], np.uint8)),
        dict(precisions=np.array([0], np.uint8)),
        dict(precisions=np.array([0, 0])),
    ):
        with pytest.raises(AssertionError):
            experts.kernel.parts(**(good | bad))


def test_the_structures_are_those_of_the_library():
    """Eight 64-bit numbers and five 32-bit ones, the last one padded; the library is built from csrc/kernels.h."""
    assert ctypes.sizeof(cpu._Matrix) == 88
    assert ctypes.sizeof(cpu._Expert) == 2 * 88 + 24
