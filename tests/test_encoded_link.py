"""Lossless records that cross the link encoded: what is settled, planned and copied, on a made-up GPU."""

import contextlib
import dataclasses

import pytest
import tiny_models
import torch
from simulated_cuda import SimulatedCuda, SimulatedPool
from test_packed_slabs import folder as folder
from test_page_lock import cuda_with

from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import TransferError
from vismoe.formats.lossless import content_bytes
from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.lossless import FastLossless
from vismoe.models.load import host_rates, opening, runtime
from vismoe.models.load.opening import Configuration, open_model
from vismoe.models.load.preview import describe
from vismoe.paging.pager import Pager
from vismoe.planning.needs import Hardware
from vismoe.planning.throughput import NOMINAL_LINK_BYTES_PER_S
from vismoe.types import ExpertId, Phase

DEVICE = torch.device("cuda", 0)
NO_TRITON = "the GPU kernels need Triton, which is not installed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded")
    tiny_models.save("qwen3_moe", folder, dtype=torch.bfloat16)
    assert main(["pack", str(folder), "--formats", "lossless,int4"]) == 0
    return folder


@pytest.fixture
def cuda(monkeypatch) -> SimulatedCuda:
    """A GPU of 8 GiB whose kernels and copies are simulated, and Triton."""
    cuda = SimulatedCuda(late="copies")
    hardware = Hardware("cuda", 2**33, 2**33, 2**33)
    monkeypatch.setattr(opening, "probe", lambda device: hardware)
    monkeypatch.setattr(gpu, "missing", lambda device, dtype: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    cuda.install(monkeypatch)
    return cuda


def opened(folder, memory="50%", **settings) -> Configuration:
    model, files = describe(folder)
    return open_model(model, files, Settings.of(memory=memory, **{"kernels": "auto", **settings}), DEVICE)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "misses='auto'; with misses='wait' (--misses wait) they stay encoded"),
        ({"misses": "wait"}, NO_TRITON),
    ],
    ids=str,
)
def test_records_are_decoded_in_host_memory_where_the_gpu_cannot_and_the_plan_says_why(
    checkpoint, cuda, settings, why, monkeypatch
):
    if why == NO_TRITON:
        monkeypatch.setattr(gpu, "missing", lambda device, dtype: NO_TRITON)
    found = opened(checkpoint, **settings)
    assert not found.experts.encoded and found.plan.bytes_of("encoded copies") == 0 < found.plan.bytes_of("staging")
    assert f"lossless records lie decoded in host memory ({why})" in found.plan.table()
    found.close()


def test_both_ways_of_a_miss_are_measured_beside_a_gpu_unless_choices_follow_from_bytes_alone(checkpoint, cuda, monkeypatch):
    """When a model serves, not when it is planned. Where the system locks no pages the link's rate stays nominal."""
    monkeypatch.setattr(host_rates, "load_profile", lambda: None)
    monkeypatch.setattr(host_rates, "link_rate", lambda device, request_bytes: 1e6)
    monkeypatch.setattr(host_rates, "expert_rates", lambda kernel, slab, dtype, nbytes: (3e9, 5e-6))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def here(**settings):
        found = opened(checkpoint, **settings)
        experts = found.experts
        found.close()
        assert experts.ways is None or experts.ways.rates[0].link_bytes_per_s == NOMINAL_LINK_BYTES_PER_S
        return host_rates.ways_here(experts.ways, experts.inventory, experts.host_kernels, DEVICE, torch.bfloat16)

    ways, about = here()
    measured = ways.rates[0]
    assert (measured.link_bytes_per_s, measured.cpu_bytes_per_s, measured.cpu_s_per_token) == (1e6, 3e9, 5e-6)
    assert measured.cpu_call_s > 0 < measured.cpu_saves and about.startswith("auto (measured: the link brings experts at ")
    nominal, _ = here(deterministic=True)
    by_cpu, _ = here(misses="cpu")
    assert nominal.rates == by_cpu.rates and nominal.rates[0].link_bytes_per_s == NOMINAL_LINK_BYTES_PER_S
    assert ways.step_rates and not (ways.in_steps_only or nominal.step_rates or by_cpu.step_rates)
    assert here(misses="wait") == (None, "wait")

    def refused(device, request_bytes):
        raise TransferError("no pages are locked. Fix: ulimit -l unlimited")

    monkeypatch.setattr(host_rates, "link_rate", refused)
    monkeypatch.setattr(host_rates, "expert_rates", lambda kernel, slab, dtype, nbytes: (1e15, 1e-15))
    monkeypatch.setattr(host_rates, "CPU_CALL_S", 0.0)
    assert here()[0].rates[0].link_bytes_per_s == NOMINAL_LINK_BYTES_PER_S
    monkeypatch.setattr(host_rates, "expert_rates", lambda kernel, slab, dtype, nbytes: (1e10, 5e-6))
    with monkeypatch.context() as far:
        far.setattr(host_rates, "CPU_CALL_S", 1e3)  # what is demanded is copied sooner
        far.setattr(host_rates, "STEP_CALL_S", 0.0)
        far.setattr(host_rates, "expert_rates", lambda kernel, slab, dtype, nbytes: (1e15, 1e-15))
        ways, about = here()
    assert ways.in_steps_only and ways.step_rates and about.startswith("auto for single tokens, else wait (measured: ")
    copies_are_sooner = "wait (measured: the link brings experts at 25.0 GB/s, the CPU computes them at 10.0 GB/s)"
    assert here() == (None, copies_are_sooner)


def test_settings_say_whether_records_stay_encoded(checkpoint, cuda):
    found = opened(checkpoint, misses="wait")
    largest = max(record.nbytes for record in found.stores.by_precision[0]._index.records)
    assert [layout.record_bytes for layout in found.experts.encoded] == [largest]
    assert found.plan.bytes_of("encoded copies") == 2 * largest and found.plan.bytes_of("staging") == 0
    assert found.plan.bytes_of("host tier") == sum(found.plan.host_slabs) * largest
    assert "lossless records stay encoded in host memory, the GPU decodes them" in found.plan.table()
    other = found.with_settings(describe(checkpoint)[0], Settings.of(memory="50%"))
    assert not other.experts.encoded and other.plan.bytes_of("encoded copies") == 0
    other.close_stores(), found.close()


def test_a_gpu_holds_records_packed_where_not_all_experts_fit_decoded(folder, cuda, monkeypatch):
    """From the first layer on, or beside raw layers; the ring and the copies' staging are planned where they are needed."""
    for memory, first in (("50%", 0), ("90%", 1), ("100%", None)):
        found = opened(folder, misses="wait", memory=memory, packed_slabs="always")
        plan, experts = found.plan, found.experts
        largest = max(layout.record_bytes for layout in experts.encoded)
        assert plan.packed_from == first and ("just before they are computed" in plan.kernels) == (first is not None)
        assert plan.bytes_of("encoded copies") == (0 if first == 0 else 2 * largest)
        ring = 16 * experts.inventory.raw_layouts[0].record_bytes  # as many as a layer has
        assert plan.bytes_of("decoding ring") == (ring if first is not None else 0)
        assert sum(plan.host_slabs) == plan.total_experts == 48 and plan.bytes_of("staging") == 0
        assert [bool(slab.sections) for slab in experts.inventory.layouts] == {0: [False], 1: [True, False], None: [True]}[first]
        assert all(type(kernel) is gpu.GpuKernel for kernels in experts.gpu_kernels for kernel in kernels)
        monkeypatch.setattr(runtime, "SlabPool", lambda layout, slabs, device: SimulatedPool(cuda, layout, max(1, slabs)))
        monkeypatch.setattr(runtime, "GpuDecoder", lambda raw, device: ("decoder of", raw))
        cuda_with(monkeypatch)
        decoders = runtime._mover(found, [])._decoding.decoders
        assert [decoder is not None for decoder in decoders] == [bool(slab.sections) for slab in experts.inventory.layouts]
        backend = runtime._backend(experts, torch.device("cpu"))
        rings = [backend.ring_of(layer.index) for layer in experts.inventory.layers]
        assert [of is not None for of in rings] == [first is not None and layer >= first for layer in range(3)]
        assert first is None or rings[-1].nbytes == plan.bytes_of("decoding ring")
        found.close()


def test_packed_slabs_get_records_as_they_are(folder, cuda, monkeypatch):
    found = opened(folder, misses="wait", memory="90%", packed_slabs="always")
    inventory, store = found.experts.inventory, found.stores.by_precision[0]
    codec = FastLossless(inventory.raw_layouts[0])

    def decode(encoded, record):
        cuda.launch(lambda: codec.decode(encoded.bytes, record.bytes))

    monkeypatch.setattr(runtime, "SlabPool", lambda layout, slabs, device: SimulatedPool(cuda, layout, slabs))
    monkeypatch.setattr(runtime, "GpuDecoder", lambda raw, device: decode)
    cuda_with(monkeypatch)
    mover = runtime._mover(found, [])
    pager = Pager(inventory, [[SimulatedPool(cuda, layout, 8)] for layout in inventory.layouts], mover, threads=1)
    pager.begin_step(Phase.DECODE)
    stored, raw = torch.zeros(2, inventory.raw_layouts[0].record_bytes, dtype=torch.uint8)
    for layer in inventory.layers:
        with pager.demand(layer.index, [0, 2, 3]) as demand:
            for group in demand.groups(in_order=False):
                for expert, address in zip(group.experts, group.addresses.tolist(), strict=True):
                    table = pager.tables[layer.geometry]
                    record = table.pool.record(list(table.pool.addresses).index(address)).bytes
                    nbytes = store.read(ExpertId(layer.index, expert), stored)
                    found.source.read(ExpertId(layer.index, expert), raw)
                    if layer.index == 0:
                        assert torch.equal(record, raw)
                    else:
                        end = content_bytes(stored)
                        assert end <= nbytes and torch.equal(record[:end], stored[:end])
    assert [len(there) for there in mover.hosts[0]._slab_of] == [3, 6], "host memory has the geometries of the slabs"
    pager.close(), found.close()


@pytest.mark.parametrize("settings", [{}, {"policy": "importance", "formats": "lossless/int4"}], ids=["exact", "a pair"])
def test_a_pager_brings_every_expert_over_the_link_as_it_is(checkpoint, cuda, settings, monkeypatch):
    found = opened(checkpoint, misses="wait", **settings)
    inventory, copied = found.experts.inventory, []
    codec = FastLossless(inventory.raw_layouts[0])

    def decode(encoded, record):
        copied.append(encoded.bytes.numel())
        cuda.launch(lambda: codec.decode(encoded.bytes, record.bytes))

    monkeypatch.setattr(runtime, "SlabPool", lambda layout, slabs, device: SimulatedPool(cuda, layout, slabs))
    monkeypatch.setattr(runtime, "GpuDecoder", lambda raw, device: decode)
    registered = cuda_with(monkeypatch).registered
    mover = runtime._mover(found, [])
    assert sum(registered.values()) == found.plan.bytes_of("host tier") and mover.hosts[0].layouts == found.experts.encoded
    pools = [SimulatedPool(cuda, layouts[0], 8) for layouts in (inventory.layouts, inventory.low_layouts) if layouts]
    pager = Pager(inventory, [pools], mover, threads=1)
    pager.begin_step(Phase.DECODE)
    raw = torch.empty(inventory.raw_layouts[0].record_bytes, dtype=torch.uint8)
    for layer in inventory.layers:
        with pager.demand(layer.index, [0, 2, 3]) as demand:
            for lent in (lent for group in demand.groups(in_order=False) for lent in group):
                found.source.read(ExpertId(layer.index, lent.expert), raw)
                expected = inventory.raw_layouts[0].views(raw)
                assert all(torch.equal(lent.weights[name], expected[name]) for name in expected)
    assert len(copied) == 3 * len(inventory.layers) and pager.metrics.snapshot().total("bytes_copied") == sum(copied)
    assert max(copied) <= found.experts.encoded[0].record_bytes == pager.core.copied_bytes(0)
    pager.close()

    tiers = list(zip(found.stores.by_precision, mover.hosts, strict=True))
    assert runtime._mover(found, tiers).hosts == mover.hosts, "what fits serves again"
    decoded = dataclasses.replace(found, experts=dataclasses.replace(found.experts, encoded=()))
    assert runtime._mover(decoded, tiers).hosts[0] is not mover.hosts[0], "but not encoded records where decoded ones are wanted"
    found.close()
