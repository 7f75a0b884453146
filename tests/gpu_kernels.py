"""Run by test_gpu_kernels.py: what the Triton programs compute, and what their results must not depend on.

The last part runs a whole model. Without a GPU its experts are served on the CPU, but computed by the interpreted programs.
"""

import dataclasses
import itertools
import time
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import quantised_checkpoints
import reference
import tiny_models
import torch
import triton
import triton.language as tl
from encoded_parts import WHOLE, encoded_experts, random_parts
from expert_records import FORMATS, FORMS, Batch, Experts, rms, typical
from searching import SEARCHING
from simulated_cuda import SimulatedCuda
from test_lossless import FILL, kinds, layout, record_of

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.errors import UnsupportedModelError
from vismoe.formats.encodings import ENCODINGS, Int4, Scaled
from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.gpu import programs
from vismoe.kernels.gpu.lossless import DecodingRing, GpuDecoder, ring_bytes, ring_slots
from vismoe.kernels.lossless import FastLossless
from vismoe.kernels.matrices import Matrix, Part, of_parts
from vismoe.models.family.families import expert_modules
from vismoe.models.family.forms import forms_of
from vismoe.models.load import opening
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.lent import Group
from vismoe.paging.pager import Pager
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertInventory, Format, MoELayer, Phase, RecordLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"


def kernel_of(experts: Experts, dtype=torch.bfloat16) -> gpu.GpuKernel:
    codec = experts.codec
    kernel = gpu.GpuKernel.of(codec.format, experts.raw, codec.slab, experts.model_form, dtype)
    assert isinstance(kernel, gpu.GpuKernel), kernel
    return kernel


def parts(experts: Experts, batch: Batch, rows=None, only=None) -> torch.Tensor:
    """Float32 `[P, H]`, NaN where nothing was computed; `only`: of these experts."""
    kernel, slabs = kernel_of(experts, batch.hidden.dtype), [slab.to(DEVICE) for slab in experts.slabs]
    which = np.arange(len(slabs)) if only is None else np.array(only)
    addresses = np.array([slab.data_ptr() for slab in slabs])[which]
    starts, ends = batch.starts[:-1][which].astype(np.int64), batch.starts[1:][which].astype(np.int64)
    rows = rows or gpu.tile_rows(int((ends - starts).max()))
    (tiles,) = gpu.upload([gpu.tiles_of(addresses, starts, ends, rows)], DEVICE)
    tokens, pairs = len(batch.hidden), len(batch.tokens)
    top_k = len(batch.starts)  # as many choices as there can be; a pair's place is one of its token's
    seen, places = np.zeros(tokens, np.int32), np.empty(pairs, np.int32)
    for i, token in enumerate(batch.tokens):
        places[i], seen[token] = token * top_k + seen[token], seen[token] + 1
    factors = torch.full((tokens, top_k), torch.nan)
    factors.view(-1)[torch.from_numpy(places).long()] = torch.from_numpy(batch.factors)
    activated = torch.full((pairs, kernel.intermediate), torch.nan, dtype=batch.hidden.dtype, device=DEVICE)
    out = torch.full((pairs, kernel.hidden), torch.nan, device=DEVICE)
    x = batch.hidden.to(DEVICE)
    kernel.parts(x, torch.from_numpy(places).to(DEVICE), factors.to(DEVICE), tiles, rows, activated, out)
    return out.cpu()


@pytest.fixture(autouse=True)
def seeds():
    torch.manual_seed(0)
    np.random.seed(0)


@triton.jit
def _written(
    record, out,
    KIND: tl.constexpr, BLOCK: tl.constexpr, AT: tl.constexpr, SCALE_AT: tl.constexpr, OFFSET_AT: tl.constexpr,
    SCALE_TYPE: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, SWAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out float32 `[ROWS, INPUTS]` = the weights of a matrix, 16 rows a program."""
    rows, inputs = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, programs.SPAN)
    r, j = programs._columns(rows, SWAPPED), programs._rows(inputs, SWAPPED)
    for start in range(0, INPUTS, programs.SPAN):
        w = programs._decoded(
            tl.load(record), r, j, r < ROWS, start,
            KIND, BLOCK, AT, SCALE_AT, OFFSET_AT, SCALE_TYPE, INPUTS, ROW_BYTES, GROUPS, GROUP, INTERPRETED,
        )  # fmt: skip
        tl.store(out + r * INPUTS + start + j, w, mask=(r < ROWS) & (start + j < INPUTS))


@pytest.mark.budget(6)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ENCODINGS)
def test_encoded_weights_are_those_that_torch_restores_bit_for_bit(name, swapped):
    """Of any codes, and of scales that are denormal, infinite or no numbers; in both signs of zero. Where types of scales, sizes
    of groups and zeros may differ, they do."""
    encoding, seen = ENCODINGS[name], set()
    for seed in range(12 if isinstance(encoding, Scaled | Int4) else 2):
        np.random.seed(seed)
        inputs = (WHOLE.get(name, 32) * 3, 256)[seed % 2] if WHOLE.get(name) != 1 else (333, 256)[seed % 2]
        parts = random_parts(encoding, 21, inputs)
        seen.add((parts["scale"].dtype, parts["scale"].shape[1] > 1, "zero" in parts) if "scale" in parts else None)
        if seed % 4 == 1:
            for part in parts.values():
                part.view(torch.uint8).random_(0, 256)
        memory, at = torch.full((2**20,), 0xFF, dtype=torch.uint8), {}
        start = -memory.data_ptr() % 64
        for n, (part, tensor) in enumerate(parts.items()):
            at[part] = Part(n * 2**16, tuple(tensor.shape), tensor.dtype)
            there = memory[start + n * 2**16 :][: tensor.nbytes]
            there.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        matrix = of_parts(name, at, 21, inputs, None)
        assert isinstance(matrix, Matrix), matrix
        constants = gpu._constants(matrix, False)
        given = {key: constants[key] for key in _written.arg_names if key in constants}
        out, record = torch.full((21, inputs), torch.nan, device=DEVICE), memory[start:].to(DEVICE)
        _written[(2,)](torch.tensor([record.data_ptr()], device=DEVICE), out, **given, SWAPPED=swapped, INTERPRETED=INTERPRETED)
        expected = encoding.values(parts, inputs)
        if isinstance(encoding, Int4):
            expected = expected.to(parts["scale"].dtype).float()
        found, real = out.cpu(), ~expected.isnan()
        assert torch.equal(found.isnan(), ~real)
        assert torch.equal(found[real].view(torch.int32), expected[real].view(torch.int32))
    if isinstance(encoding, Scaled | Int4):
        types, groups, zeros = (set(found) for found in zip(*seen))
        assert len(types) == 3 and groups == {False, True} and (zeros == {False, True} or isinstance(encoding, Scaled))


def cases() -> list[tuple]:
    """Every format with every form, with shapes that divide the tiles and shapes that do not."""
    shapes = itertools.cycle([(128, 64), (130, 33), (96, 80), (257, 31)])
    counts = itertools.cycle([[1], [2, 0, 3], [17, 1], [1, 40], [33]])
    dtypes, transposed = itertools.cycle([torch.bfloat16, torch.float16, torch.bfloat16]), itertools.cycle([False, True])
    return [
        (format, form, next(shapes), next(counts), next(dtypes), next(transposed))
        for format, form in itertools.product(FORMATS, FORMS)
    ]


@pytest.mark.budget(4)
@pytest.mark.parametrize("format, form, shape, counts, dtype, transposed", cases())
def test_parts_are_those_of_the_oracle(format, form, shape, counts, dtype, transposed):
    hidden, intermediate = shape
    experts = Experts.of(format, dtype, hidden, intermediate, len(counts), form, transposed)
    batch = Batch.of(counts, hidden, dtype)
    oracle, size = batch.oracle(experts), typical(experts, batch)
    bound = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}[dtype]
    few = 2 if form == "nemotron" else 1  # squares have twice the error
    assert rms(parts(experts, batch) - oracle) <= few * bound * size


@pytest.mark.parametrize(("up", "down", "form", "transposed"), [
    ("q4_k", "q6_k", "qwen", False), ("q8_0", "bfloat16", "qwen", False), ("mxfp4", "mxfp4", "gpt-oss", True),
    ("fp8", "fp8", "qwen", False), ("w4", "gptq", "gemma", False), ("nvfp4", "nvfp4_divided", "nemotron", False),
    ("iq4_xs", "q5_0", "gelu", True),
])  # fmt: skip
def test_parts_of_encoded_experts_are_those_of_the_oracle(up, down, form, transposed):
    """Rows of one block and of several, fp8 of no whole span."""
    hidden = 333 if up == "fp8" else 512
    experts = encoded_experts(up, down, hidden, 256, 2, form, transposed)
    for counts in ([1, 0], [3, 5], [20, 40]):
        batch = Batch.of(counts, hidden)
        oracle, size = batch.oracle(experts), typical(experts, batch)
        assert rms(parts(experts, batch) - oracle) <= (2 if form == "nemotron" else 1) * 1.2e-2 * max(size, rms(oracle))


@pytest.mark.parametrize(
    "format, form", [*itertools.product(FORMATS, ["qwen", "gpt-oss"]), *itertools.product(ENCODINGS, ["qwen"])]
)
def test_the_error_is_at_most_that_of_torch_in_bfloat16(format, form):
    """torch computes with the weights rounded to bfloat16; of checkpoints' encodings with what it restores."""
    if format in ENCODINGS:
        experts, batch = encoded_experts(format, format, 256, 256, 1, form), Batch.of([16], 256)
    else:
        experts, batch = Experts.of(format, hidden=256, intermediate=128, count=1, form=form), Batch.of([16], 256)
    oracle = batch.oracle(experts)
    rounded = [{name: weight.bfloat16() for name, weight in weights.items()} for weights in experts.weights]
    tokens, ones = torch.from_numpy(batch.tokens).long(), torch.ones(16)
    eager = reference.parts(experts.form, rounded, [0, 16], tokens, ones, batch.hidden, torch.bfloat16).double()
    eager *= torch.from_numpy(batch.factors)[:, None]
    assert rms(parts(experts, batch) - oracle) <= 1.05 * rms(eager - oracle)


@pytest.mark.parametrize("format", FORMATS)
def test_a_result_depends_on_its_own_token_and_expert_only(format):
    """Not on the other experts of a launch nor on the other tokens, one of which is poisoned; rows of others are left alone."""
    experts, batch = Experts.of(format, hidden=130, intermediate=40), Batch.of([3, 12, 1], 130, tokens=12)
    whole = parts(experts, batch)
    some = parts(experts, batch, only=[1])
    assert torch.equal(some[3:15], whole[3:15])
    assert some[:3].isnan().all() and some[15:].isnan().all()
    batch.hidden[batch.tokens[5]] = torch.nan
    mine = torch.from_numpy(batch.tokens == batch.tokens[5])
    poisoned = parts(experts, batch)
    assert poisoned[mine].isnan().all() and torch.equal(poisoned[~mine], whole[~mine])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter multiplies matrices with the CPU's BLAS")
@pytest.mark.parametrize("format", FORMATS)
def test_the_shape_of_a_tile_does_not_change_a_bit(format):
    experts, batch = Experts.of(format, hidden=2048, intermediate=768), Batch.of([1, 40, 16], 2048)
    few, *others = (parts(experts, batch, rows=rows) for rows in (gpu.ONE_TOKEN, gpu.FEW_ROWS, gpu.MANY_ROWS))
    assert all(torch.equal(few, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("adding", [False, True])
def test_sums_are_those_of_the_oracle_bit_for_bit(adding, dtype):
    """Also for a token without pairs, which gets zeros, or stays as it is."""
    if adding and dtype != torch.float32:
        pytest.skip("sums that go on are float32")
    values, tokens = torch.randn(7, 1030), np.array([0, 2, 2, 4, 0, 2, 4])
    start = torch.randn(5, 1030) if adding else torch.full((5, 1030), torch.nan)
    expected = start.clone() if adding else torch.zeros(5, 1030)
    reference.add(values, torch.from_numpy(tokens), expected)
    count, sums = gpu.sums_of(tokens, None if adding else 5)
    out = start.to(dtype).to(DEVICE)
    gpu.combine(values.to(DEVICE), torch.from_numpy(sums).to(DEVICE), count, out, adding)
    assert count == (3 if adding else 5) and torch.equal(out.cpu(), expected.to(dtype))


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (1, 8), (3, 5), (8, 8)])
def test_the_device_arranges_the_choices_as_the_host_does(tokens, top_k):
    """With sentinels and an expert that one token chose twice."""
    experts = 9
    ids = torch.randint(0, experts + 2, (tokens, top_k))
    ids[-1, -1] = ids[-1, 0]
    if tokens > 1:
        ids[0, 0] = -1
    addresses = torch.arange(experts) * 64
    tiles, sums = gpu.arrange(ids.to(DEVICE), addresses.to(DEVICE), experts)
    flat, places = ids.flatten(), torch.arange(tokens * top_k)
    real = (flat >= 0) & (flat < experts)
    assert torch.equal(tiles[0].cpu()[real], flat[real] * 64) and torch.isin(tiles[0].cpu(), addresses).all()
    assert torch.equal(tiles[1].cpu(), places) and torch.equal(tiles[2].cpu(), real.long())
    by_expert = sorted(places[real].tolist(), key=lambda place: (flat[place], place))
    count, expected = gpu.sums_of(np.array(by_expert, np.int64) // top_k, tokens)
    head, pairs = expected[: 2 * tokens + 1], [by_expert[pair] for pair in expected[2 * tokens + 1 :]]
    assert count == tokens and sums.tolist()[: 2 * tokens + 1] == head.tolist()
    assert sums.tolist()[2 * tokens + 1 :][: len(pairs)] == pairs


@pytest.mark.parametrize("ring", [False, True])
def test_pairs_that_are_computed_elsewhere_have_empty_tiles_and_are_added(ring):
    """The address of their expert is the negative of another one's; a ring gets no record for them."""
    ids, hidden = torch.tensor([[5, 2, 7, 2, 0]]), 1030
    addresses = torch.arange(1, 9) * 64
    addresses[[2, 7]] = -addresses[5]
    slots = torch.arange(5) * 4096 + 2**20 if ring else None
    tiles, sums = gpu.arrange(ids.to(DEVICE), addresses.to(DEVICE), 8, None if slots is None else slots.to(DEVICE))
    here = torch.tensor([1, 0, 0, 0, 1])
    assert torch.equal(tiles[2].cpu(), here)
    if ring:
        assert torch.equal(tiles[3].cpu(), addresses[ids[0]] * here)
    else:
        assert torch.equal(tiles[0].cpu(), addresses[ids[0]].abs())
    rows = torch.randn(5, hidden)
    parts, below = (torch.where(here[:, None] == one, rows, torch.nan).to(DEVICE) for one in (1, 0))
    expected = torch.zeros(1, hidden)
    for pair in (4, 1, 3, 0, 2):  # by ascending expert, then by place
        expected += rows[pair]
    out = torch.full((1, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    gpu.combine(parts, sums, 1, out, below=(below, tiles))
    assert torch.equal(out.cpu(), expected.bfloat16())


def test_every_pair_is_in_one_tile():
    starts, ends = np.array([0, 0, 5, 40]), np.array([0, 5, 40, 41])
    tiles = gpu.tiles_of(np.arange(4) * 64, starts, ends, 16)
    assert tiles.tolist() == [[64, 128, 128, 128, 192], [0, 5, 21, 37, 40], [5, 16, 16, 3, 1]]


def test_what_cannot_be_computed_is_said():
    experts = Experts.of(Format.RAW, torch.float16, 64, 32)
    found = gpu.GpuKernel.of(Format.RAW, experts.raw, experts.raw, experts.model_form, torch.bfloat16)
    assert found == "raw weights are torch.float16, hidden states torch.bfloat16; the GPU kernels compute in one type"


# ------------------------------------------------------------------ lossless records
def decoded(raw: RecordLayout, record: torch.Tensor) -> tuple[list[int], dict[str, torch.Tensor]]:
    """(how each section was encoded, the sections as the GPU's decoder restores them); nothing behind the slab is written."""
    encoded = FastLossless(raw).encode(record)
    there = torch.empty(encoded.numel() + 64, dtype=torch.uint8, device=DEVICE)
    there = there[-there.data_ptr() % 64 :][: encoded.numel()].copy_(encoded)
    pool = SlabPool(raw, 2, DEVICE)
    pool.buffer.fill_(FILL)
    GpuDecoder(raw, DEVICE)(there, pool.record(0))
    assert (pool.record(1) == FILL).all()
    return kinds(encoded), {name: view.cpu() for name, view in pool.weights(0).items()}


def bits(weights: torch.Tensor) -> torch.Tensor:
    return weights.flatten().view(torch.uint8)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2], ids="{} of the weights are random bits".format)
def test_lossless_records_come_back_bit_for_bit(noise):
    """Lengths at the edges of chunks and blocks, sections that are stored as they are between packed ones."""
    raw = layout(4095, 200, 8193, 1, 4096, 0, 6000, bias=torch.float32, half=torch.float16)
    record = record_of(raw, 1, noise=noise)
    raw.views(record)["w6"].copy_(torch.randint(-(2**15), 2**15, (6000,), dtype=torch.int16).view(torch.bfloat16))
    found, sections = decoded(raw, record)
    assert set(found) == {0, 1} and found[6:] == [0, 0, 0], "the last ones are noise or have other types"
    for name, weights in raw.views(record).items():
        assert torch.equal(bits(sections[name]), bits(weights)), name


def test_every_pattern_of_bfloat16_comes_back():
    patterns = torch.cat([torch.arange(-(2**15), 2**15), torch.full((2**16,), 0x3C01)]).short()
    raw = layout(patterns.numel())
    record = patterns[torch.randperm(patterns.numel())].view(torch.uint8)
    found, sections = decoded(raw, record)
    assert found == [1] and torch.equal(bits(sections["w0"]), record)


# ------------------------------------------------------------------ the decoding ring
NAN = 0xFF  # every type's bytes of a NaN


def in_slabs(raw: RecordLayout, records: list[torch.Tensor]) -> SlabPool:
    """Slabs that hold raw records encoded, NaN behind them."""
    encoded = [FastLossless(raw).encode(record) for record in records]
    pool = SlabPool(RecordLayout((), max(each.numel() for each in encoded)), len(records), DEVICE)
    pool.buffer.fill_(NAN)
    for slab, each in enumerate(encoded):
        pool.record(slab)[: each.numel()].copy_(each)
    return pool


def poisoned(raw: list[RecordLayout | None], slots: int) -> DecodingRing:
    ring = DecodingRing(raw, slots, DEVICE)
    assert ring.nbytes == ring_bytes(raw, slots) and ring.addresses.tolist() == ring.addresses_there.tolist()
    assert not (ring.addresses % 64).any()
    ring._buffer.fill_(NAN)
    return ring


def test_a_ring_decodes_records_as_the_processor_does_and_leaves_the_slots_of_sentinels_alone():
    """Two geometries share the slots; lengths at the edges of chunks and blocks, of which some are stored as they are."""
    raws = [layout(4095, 200, 8193, 1, 0, bias=torch.float32, half=torch.float16), layout(65, 12345)]
    ring = poisoned([raws[0], None, raws[1]], 5)
    assert [ring.decodes(geometry) for geometry in range(3)] == [True, False, True]
    for geometry, raw in ((0, raws[0]), (2, raws[1])):
        records = [record_of(raw, seed, noise=noise) for seed, noise in enumerate((0.0, 0.03, 0.2, 1.0))]
        pool = in_slabs(raw, records)
        found = {kind for slab in range(4) for kind in kinds(pool.record(slab).cpu())}
        assert found == {0, 1}, "both kinds of sections are decoded"
        ring._buffer.fill_(NAN)
        ring.decode(geometry, torch.tensor([pool.addresses[3], 0, pool.addresses[0], pool.addresses[2]]).to(DEVICE))
        slots = ring._buffer.cpu()
        for slot, slab in ((0, 3), (2, 0), (3, 2)):
            expected, encoded = torch.empty(raw.record_bytes, dtype=torch.uint8), pool.record(slab).cpu()
            FastLossless(raw).decode(encoded, expected)
            for section in raw.sections:
                there = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
                assert torch.equal(slots[slot][there], expected[there]), (slot, section)
            assert (slots[slot][raw.record_bytes :] == NAN).all(), "nothing behind the record is written"
        assert (slots[[1, 4]] == NAN).all()


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (1, 8), (3, 5), (8, 8)])
def test_the_device_arranges_choices_for_a_ring(tokens, top_k):
    """As without one, but each expert is decoded once, into the slot of the first pair that has it, and read there."""
    experts = 9
    ids = torch.randint(-1, experts + 2, (tokens, top_k))
    ids[-1, -1] = ids[-1, 0]
    addresses, slots = torch.arange(1, experts + 1) * 64, torch.arange(100, 164) * 64
    plain, sums = gpu.arrange(ids.to(DEVICE), addresses.to(DEVICE), experts)
    tiles, same = gpu.arrange(ids.to(DEVICE), addresses.to(DEVICE), experts, slots.to(DEVICE))
    first = [ids.flatten().tolist().index(expert) for expert in ids.flatten().tolist()]
    assert torch.equal(tiles[1:3], plain[1:3]) and torch.equal(tiles[0].cpu(), slots[first])
    own = (torch.arange(tokens * top_k) == torch.tensor(first)) & (plain[2].cpu() == 1)
    assert torch.equal(tiles[3].cpu(), torch.where(own, plain[0].cpu(), 0))
    heads = 2 * tokens + 1
    used = heads + int(sums[heads - 1])
    assert torch.equal(same[:used], sums[:used])


class _Lease:
    """The chosen experts of a layer in groups of so many."""

    computes_on_host = False

    def __init__(self, experts: list[int], pool: SlabPool, size: int):
        self._experts, self._pool, self._size = experts, pool, size

    def groups(self, in_order: bool):
        groups = [self._experts[first : first + self._size] for first in range(0, len(self._experts), self._size)]
        for experts in groups if in_order else groups[::-1]:
            yield Group(experts, self._pool, self._pool.capacity - 1 - np.array(experts))


class Layers:
    """Three layers of one geometry each, of which a ring decodes the first two; `slots` is None: all are in slabs as they are."""

    kinds = (("gpt-oss", 66, 33, 9, True), ("qwen", 64, 48, 12, False), ("nemotron", 96, 40, 3, False))

    def __init__(self, slots: int | None):
        self.experts, self.pools = [], []
        for geometry, (form, hidden, intermediate, count, transposed) in enumerate(self.kinds):
            torch.manual_seed(geometry)
            these = Experts.of(Format.RAW, torch.bfloat16, hidden, intermediate, count, form, transposed)
            self.experts.append(these)
            if slots is not None and geometry < 2:
                pool = in_slabs(these.raw, list(these.slabs.flip(0)))
            else:
                pool = SlabPool(these.codec.slab, count, DEVICE)
                pool.buffer.copy_(these.slabs.flip(0))
            self.pools.append(pool)
        of = [MoELayer(g, f"layers.{g}.experts", kind[3], 2, g) for g, kind in enumerate(self.kinds)]
        inventory = ExpertInventory(tuple(of), tuple(pool.layout for pool in self.pools))
        raw = [these.raw if geometry < 2 else None for geometry, these in enumerate(self.experts)]
        self.ring = poisoned(raw, slots) if slots is not None else None
        self.backend = GpuExperts(inventory, [(kernel_of(these),) for these in self.experts], ring=self.ring)
        lying = [pool.addresses[::-1].copy() for pool in self.pools]
        assert self.backend.all_resident(SimpleNamespace(addresses=lambda: lying), DEVICE)

    def run(self, layer: int, ids: torch.Tensor, in_order: bool, size: int) -> torch.Tensor:
        hidden, factors = inputs_of(layer, *ids.shape)
        module = SimpleNamespace(num_experts=self.kinds[layer][3])
        work = self.backend.begin(layer, module, ids.numpy(), hidden, factors)
        return work.run(_Lease(work.experts, self.pools[layer], size), in_order)

    def of_residents(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        assert self.backend.few_enough(layer, ids)
        hidden, factors = inputs_of(layer, *ids.shape)
        return self.backend.of_residents(layer, hidden, ids.to(DEVICE), factors)


@cache
def inputs_of(layer: int, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, factors) on the device."""
    generator = torch.Generator().manual_seed(layer)
    hidden = torch.randn(tokens, Layers.kinds[layer][1], generator=generator).bfloat16()
    return hidden.to(DEVICE), torch.rand(tokens, top_k, generator=generator).to(DEVICE)


decoded_slabs, ring_of_four = cache(lambda: Layers(None)), cache(lambda: Layers(4))


@pytest.mark.budget(2)
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("in_order", [False, True], ids=["as they come", "in order"])
@pytest.mark.parametrize("tokens, top_k", [(1, 1), (1, 8), (9, 3)])
def test_a_ring_changes_no_bit(layer, in_order, tokens, top_k, monkeypatch):
    """With groups of more experts than there are slots, choices of no expert, and an expert that one token chose twice."""
    experts, generator = Layers.kinds[layer][3], torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts + 1, (tokens, top_k), generator=generator)
    ids[-1, -1] = ids[-1, 0] = 1
    plain, ours = decoded_slabs(), ring_of_four()
    expected = plain.run(layer, ids, in_order=False, size=experts)
    assert expected.isfinite().all() and expected.any()
    for size in (experts, 5):
        ours.ring._buffer.fill_(NAN)
        assert torch.equal(ours.run(layer, ids, in_order, size), expected), size
    if in_order and tokens > 1:
        monkeypatch.setattr("vismoe.models.moe.gpu_experts.PAIRS_PER_CALL", 7)  # cuts through groups and experts
        assert torch.equal(ours.run(layer, ids, in_order, experts), expected)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("ids", [[[3]], [[2, 0, 7, 1]], [[4, 4]], [[5, 2], [2, 5]], [[-1, 3], [3, 100]], [[-1, 100]]], ids=str)
def test_few_pairs_of_residents_have_the_same_bits_with_a_ring(layer, ids):
    plain, ours, there = decoded_slabs(), ring_of_four(), torch.tensor(ids)
    ours.ring._buffer.fill_(NAN)
    found = ours.of_residents(layer, there)
    assert torch.equal(found, plain.of_residents(layer, there))
    assert torch.equal(found, ours.run(layer, there.where(there >= 0, 100), in_order=False, size=9))
    assert found.isfinite().all()


def test_residents_take_hidden_states_that_do_not_lie_in_rows():
    """The output does, whatever a product of the decoder has left."""
    backend, ids = decoded_slabs().backend, torch.tensor([[5, 2], [2, 5]], device=DEVICE)
    hidden, factors = inputs_of(1, *ids.shape)
    found = backend.of_residents(1, hidden.t().contiguous().t(), ids, factors)
    assert torch.equal(found, backend.of_residents(1, hidden, ids, factors)) and found.is_contiguous()


def test_a_ring_decodes_an_expert_of_several_tokens_once():
    ours = ring_of_four()
    ours.ring._buffer.fill_(NAN)
    ours.of_residents(1, torch.tensor([[5, 2], [2, 5]]))
    assert [bool((slot != NAN).any()) for slot in ours.ring._buffer] == [True, True, False, False]


def test_pairs_that_a_ring_has_no_slots_for_are_computed_in_runs():
    plain, ours = decoded_slabs().backend, ring_of_four().backend
    for layer, ring_decodes in enumerate((True, True, False)):
        experts = Layers.kinds[layer][3]
        assert plain.few_enough(layer, torch.zeros(1, experts)) and ours.few_enough(layer, torch.zeros(1, min(4, experts)))
        assert ours.few_enough(layer, torch.zeros(1, 5)) is not ring_decodes and not ours.few_enough(layer, torch.zeros(5, 1))


def test_a_ring_has_slots_for_the_experts_of_a_token():
    def slots(*kinds: tuple[int, int]) -> int:
        return ring_slots(MoELayer(i, "", experts, top_k, 0) for i, (experts, top_k) in enumerate(kinds))

    assert [slots((128, 8)), slots((8, 2)), slots((256, 22)), slots((8, 2), (64, 6))] == [16, 8, 22, 16]


def test_a_ring_is_for_slabs_of_one_format():
    kernels = [(kernel_of(these),) * 2 for these in decoded_slabs().experts]
    with pytest.raises(AssertionError, match="a pair of formats"):
        GpuExperts(decoded_slabs().backend.inventory, kernels, ring=ring_of_four().ring)


def test_a_pass_on_another_stream_waits_for_the_one_that_reads_the_slots(monkeypatch):
    cuda, order = SimulatedCuda(late="kernels"), []
    ring = DecodingRing([layout(64)], 1, torch.device("cpu"))
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ring._stream, other = cuda.compute, cuda.stream_of()
    cuda.launch(lambda: order.append("read"))
    with cuda.on(other):
        ring._behind_the_last()
        cuda.launch(lambda: order.append("decode"))
        cuda.current.synchronize()
    assert order == ["read", "decode"] and ring._stream is other


# ------------------------------------------------------------------ a whole model
FAMILY = "qwen3_moe"
DEMAND = Pager.demand


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch):
    """The interpreter takes its time for each program."""
    if DEVICE.type == "cpu":
        block = gpu.block
        monkeypatch.setattr(gpu, "block", lambda *given: block(*given) | {"BN": 64})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    tiny_models.save(FAMILY, folder, dtype=torch.bfloat16)
    assert main(["pack", str(folder), "--formats", "int4,int2"]) == 0
    return folder


def load(folder, **settings):
    """The model, its experts computed by the GPU kernels."""
    kernels = "fast" if DEVICE.type == "cuda" or "misses" in settings else "torch"
    model = tiny_models.model_class(folder).from_pretrained(
        folder, dtype=torch.bfloat16, device_map=DEVICE.type, quantization_config=VisMoEConfig(kernels=kernels, **settings)
    )
    context = vismoe.runtime_of(model).context
    if not isinstance(context.serving.backend, GpuExperts):
        experts = vismoe.runtime_of(model).configuration.experts
        forms = forms_of(model, experts.inventory)
        kernels = opening._gpu_kernels(forms, experts.inventory, experts.formats, torch.bfloat16)
        host = context.serving.backend if "misses" in settings else None
        backend = GpuExperts(experts.inventory, kernels, host)
        context.now_serving = dataclasses.replace(context.serving, backend=backend)
    return model


@torch.inference_mode()
def logits(model, tokens=4, batch=1) -> torch.Tensor:
    """Of a prefill and greedy steps, `[B, steps, vocabulary]`."""
    inputs = {name: t.to(DEVICE) for name, t in tiny_models.prompt(FAMILY, tokens, dtype=torch.bfloat16, batch=batch).items()}
    return torch.stack(tiny_models.greedy(model, inputs, 2).logits, dim=1).cpu()


@pytest.mark.budget(4)
@torch.inference_mode()
def test_logits_are_as_near_to_float64_as_eager_experts(checkpoint):
    inputs = tiny_models.prompt(FAMILY, tokens=40, dtype=torch.bfloat16, batch=3)
    exact = tiny_models.reference(checkpoint, torch.bfloat16).double()(**inputs).logits
    there = {name: t.to(DEVICE) for name, t in inputs.items()}
    eager = tiny_models.reference(checkpoint, torch.bfloat16).to(DEVICE)(**there).logits.cpu()
    ours = load(checkpoint, memory="100%")(**there).logits.cpu()
    errors, eagers = ((found - exact).square().mean(dim=2).sqrt() for found in (ours, eager))
    # Token by token: the few that change their experts, whose errors are large, are others on each processor.
    assert 0 < (errors / eagers).median() <= 1.05


@pytest.mark.budget(8)
@pytest.mark.parametrize(("kind", "family"), [("fp8", "qwen3_moe"), ("awq", "qwen3_moe"), ("mxfp4", "gpt_oss")])
@torch.inference_mode()
def test_a_quantised_checkpoint_is_as_near_to_float64_as_its_restored_weights_are(kind, family, tmp_path):
    """And a budget changes no bit. Slabs hold what the file has."""
    names = "stacked" if kind == "mxfp4" else "expert first"
    restored = quantised_checkpoints.write(tmp_path, kind, family, names=names).to(DEVICE)
    restored.set_experts_implementation("eager")
    ids = torch.randint(5, 490, (1, 20), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    eager = restored(input_ids=ids).logits.cpu()
    exact = restored.double()(input_ids=ids).logits.cpu()
    full, small = load(tmp_path, memory="100%"), load(tmp_path, memory="30%")
    ours = full(input_ids=ids).logits.cpu()
    errors, eagers = ((found - exact).square().mean(dim=2).sqrt() for found in (ours, eager))
    assert 0 < (errors / eagers).median() <= 1.05
    assert torch.equal(small(input_ids=ids).logits.cpu(), ours)
    assert vismoe.runtime_of(small).format_names == (kind,)
    tokens = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first, *others = (model.generate(ids[:, :3], **tokens).logits[1] for model in (full, small))
    assert torch.equal(first, others[0])


@pytest.mark.budget(5)
@pytest.mark.parametrize("format", ["raw", "int4"])
def test_a_budget_changes_no_bit(checkpoint, format, monkeypatch):
    full, small = logits(load(checkpoint, memory="100%", format=format)), load(checkpoint, memory="12%", format=format)
    assert torch.equal(logits(small), full)
    assert vismoe.runtime_of(small).pager.metrics.snapshot().total("evictions") > 0
    monkeypatch.setattr("vismoe.models.moe.gpu_experts.PAIRS_PER_CALL", 1)  # cuts through experts
    assert torch.equal(logits(small), full)


@pytest.mark.parametrize("format", ["raw", "int4"] if SEARCHING else ["raw"])
def test_a_pass_without_the_pager_has_the_same_bits_and_counts(checkpoint, format, monkeypatch):
    """As with the pager and few slabs."""
    resident, small = (load(checkpoint, memory=memory, format=format) for memory in ("100%", "12%"))
    runtime = vismoe.runtime_of(resident)
    runtime.pager.fill(1)  # as it is with a GPU
    full = logits(resident)
    while runtime.pager.addresses() is None:
        time.sleep(0.01)
    logits(small)  # as many passes for both follow
    before = [vismoe.runtime_of(model).metrics.snapshot() for model in (resident, small)]
    asked = vismoe.runtime_of(resident).metrics.demanded.copy(), vismoe.runtime_of(small).metrics.demanded.copy()
    with monkeypatch.context() as patch:
        patch.setattr(Pager, "demand", refused_in_decode)
        assert torch.equal(logits(resident), full)
    assert torch.equal(logits(small), full)
    counts = [vismoe.runtime_of(model).metrics.snapshot() - then for model, then in zip((resident, small), before)]
    for name in ("steps", "computed_high"):
        assert counts[0].total(name) == counts[1].total(name) > 0
    assert counts[0].total("hits") == sum(counts[1].total(name) for name in ("hits", "misses")) and counts[0].total("misses") == 0
    demanded = (vismoe.runtime_of(model).metrics.demanded - then for model, then in zip((resident, small), asked))
    assert np.array_equal(*demanded)


def test_hidden_states_of_another_type_are_refused(checkpoint):
    model = load(checkpoint, memory="100%")
    backend = vismoe.runtime_of(model).context.serving.backend
    layer = vismoe.runtime_of(model).pager.inventory.layers[0]
    hidden = torch.zeros(1, backend.kernels[layer.geometry][0].hidden, device=DEVICE)
    module = next(module for _, module in expert_modules(model))
    with pytest.raises(UnsupportedModelError, match=r"torch\.float32.*made for torch\.bfloat16.*Fix: run the model without"):
        backend.begin(0, module, np.zeros((1, 1), np.int64), hidden, hidden[:, :1])


def test_more_choices_than_experts_go_through_the_pager(checkpoint):
    """Each expert is read once then, not once for each of its pairs."""
    model = load(checkpoint, memory="100%")
    backend, experts = (
        vismoe.runtime_of(model).context.serving.backend,
        vismoe.runtime_of(model).pager.inventory.layers[0].num_experts,
    )
    assert backend.few_enough(0, torch.zeros(1, experts)) and backend.few_enough(0, torch.zeros(experts, 1))
    assert not backend.few_enough(0, torch.zeros(experts + 1, 1)) and not backend.few_enough(0, torch.zeros(64, 2))


def refused_in_decode(pager, *asked, **named):
    assert pager.core.phase is not Phase.DECODE, "the pager was asked although every expert is resident"
    return DEMAND(pager, *asked, **named)


def test_two_formats_in_one_layer_are_computed_together(checkpoint):
    """What importance chose differs from all experts in either format, and a budget without evictions changes nothing."""
    found = {}
    for formats in ("16/2", "16/4"):
        model = load(checkpoint, memory="60%", policy="importance", formats=formats, deterministic=True)
        found[formats] = logits(model)
        shares = vismoe.runtime_of(model).pager.metrics.snapshot().shares(("high", "low"))
        assert shares["high"] > 0 and shares["low"] > 0
    raw = logits(load(checkpoint, memory="100%", format="raw"))
    assert 0 < rms(found["16/4"][:, 0] - raw[:, 0]) < rms(found["16/2"][:, 0] - raw[:, 0])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="test_cuda.py has it on a GPU")
def test_misses_that_the_cpu_computes_change_logits_by_rounding_only(checkpoint):
    model = load(checkpoint, memory="25%", misses="cpu", emulated_link_bytes_per_s=1e8)
    full = logits(load(checkpoint, memory="100%"))
    for _ in range(2):  # at first nothing is in host memory
        found = logits(model)
    torch.testing.assert_close(found[:, 0], full[:, 0], rtol=0.05, atol=0.1)
    assert vismoe.runtime_of(model).pager.metrics.snapshot().total("computed_on_host") > 0
