"""What torch may take of a GPU while models are open there, with a made-up GPU."""

import contextlib
import dataclasses

import pytest
import tiny_models
import torch
from simulated_cuda import SimulatedCuda
from test_page_lock import cuda_with

import vismoe
from vismoe import VisMoEConfig
from vismoe.machine.hardware import host_memory, probe
from vismoe.models.load.runtime import _mover
from vismoe.pools.gpu_limit import lift, limit

TOTAL = 1000
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def shares(monkeypatch):
    shares: dict[torch.device, float] = {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (400, TOTAL))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.update({device: share}))
    return shares


def test_the_limit_is_what_was_there_before_and_the_budgets_of_open_models(shares):
    limit("a", FIRST, held_bytes=50, budget_bytes=300)
    assert shares == {FIRST: 0.35}
    limit("b", FIRST, held_bytes=120, budget_bytes=200)  # 70 of them are the first one's
    limit("c", SECOND, held_bytes=0, budget_bytes=5000)
    assert shares == {FIRST: 0.55, SECOND: 1.0}
    limit("a", FIRST, held_bytes=50, budget_bytes=310)  # another plan of the same model
    assert shares[FIRST] == 0.56
    lift("a")
    assert shares[FIRST] == 0.32
    lift("a"), lift("b"), lift("c")
    assert shares == {FIRST: 1.0, SECOND: 1.0}


def test_a_configuration_for_a_gpu_limits_torch_there_and_registers_its_host_memory_once(shares, tmp_path, monkeypatch):
    """What loading does with CUDA beside tensors, on a machine that may have none."""
    tiny_models.save("qwen3_moe", tmp_path)
    config = VisMoEConfig(memory="50%", emulated_link_bytes_per_s=1e9)  # plans a host tier
    model = tiny_models.model_class(tmp_path).from_pretrained(tmp_path, quantization_config=config)
    for name, found in {"memory_reserved": 100, "is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    SimulatedCuda().install(monkeypatch)
    registered = cuda_with(monkeypatch).registered
    hardware = probe(None)
    assert (hardware.free_bytes, hardware.total_bytes, hardware.held_bytes) == (400, TOTAL, 100)
    assert hardware.total_host_bytes == host_memory()[1]
    emulated = vismoe.runtime_of(model).configuration
    plan = dataclasses.replace(emulated.plan, budget_bytes=300)
    gpu = dataclasses.replace(
        emulated,
        device=SECOND,
        hardware=hardware,
        settings=dataclasses.replace(emulated.settings, emulated_link_bytes_per_s=None),
        reading=dataclasses.replace(emulated.reading, plan=plan),
    )
    gpu.limit_gpu()
    assert shares == {SECOND: 0.4}
    mover = _mover(gpu, [])
    tier = mover.hosts[0]
    once = dict(registered)
    assert sum(once.values()) == tier.pools[0].nbytes > 0
    assert _mover(gpu, [(gpu.stores.by_precision[0], tier)]).hosts == (tier,) and registered == once
    del mover, tier
    assert not registered, "nothing else keeps it"
    gpu.close()
    assert shares == {SECOND: 1.0}
