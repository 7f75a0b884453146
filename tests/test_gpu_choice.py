"""What computes the experts on a GPU, and what is said about it, with made-up GPUs."""

import importlib.util

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.kernels.gpu import experts as gpu
from vismoe.models.load.opening import Experts, arrange_experts
from vismoe.models.moe.gpu_experts import PAIRS_PER_CALL
from vismoe.models.moe.lookahead_inputs import choose_lookahead
from vismoe.types import Format

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """Say what the GPU is, and whether Triton is installed."""
    find = importlib.util.find_spec

    def of(capability=(8, 9), triton=True, failure=None) -> None:
        found = {"triton": object() if triton else None}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: found[name] if name in found else find(name, *more))
        monkeypatch.setattr(gpu, "_failure", lambda device: failure)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Example 4000")

    of()
    return of


def arranged(folder, family: str, dtype: torch.dtype, **settings) -> Experts:
    """For a GPU, whether or not there is one."""
    tiny_models.save(family, folder, dtype=dtype)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=VisMoEConfig(memory="100%"))
    inventory = vismoe.runtime_of(model).pager.inventory
    vismoe.runtime_of(model).pager.close()
    return arrange_experts(model, inventory, Settings.of(**{"kernels": "auto", "misses": "wait", **settings}), GPU)


def test_the_kernels_compute_where_the_gpu_and_the_family_allow_it(machine, tmp_path):
    experts = arranged(tmp_path, "qwen3_moe", torch.bfloat16)
    assert experts.backend == "fast (Triton, Example 4000)" and experts.kernels is None
    (kernels,) = experts.gpu_kernels
    assert [kernel.format for kernel in kernels] == [Format.RAW]
    assert experts.workspace_bytes == PAIRS_PER_CALL * (2 * kernels[0].intermediate + 4 * kernels[0].hidden)
    pair = arranged(tmp_path, "qwen3_moe", torch.bfloat16, policy="importance", formats="16/4")
    assert [kernel.format for kernel in pair.gpu_kernels[0]] == [Format.RAW, Format.INT4]


@pytest.mark.parametrize(
    ("why", "family", "dtype", "made"),
    [
        ("the GPU kernels need Triton, which is not installed", "qwen3_moe", torch.bfloat16, {"triton": False}),
        ("the GPU has compute capability 7.5; the GPU kernels need 8.0", "qwen3_moe", torch.bfloat16, {"capability": (7, 5)}),
        ("Triton cannot run here: no compiler", "qwen3_moe", torch.bfloat16, {"failure": "Triton cannot run here: no compiler"}),
        ("the model computes in torch.float32; the GPU kernels compute in bfloat16 and float16", "qwen3_moe", torch.float32, {}),
        ("DbrxExpertGLU has arithmetic of its own", "dbrx", torch.bfloat16, {}),
    ],
)
def test_where_they_cannot_torch_computes_and_the_plan_says_why(why, family, dtype, made, machine, tmp_path):
    machine(**made)
    experts = arranged(tmp_path, family, dtype)
    assert experts.gpu_kernels is None and experts.backend == f"torch (bit-identical to eager experts; {why})"
    with pytest.raises(ConfigError, match=r"kernels='fast': .*Fix: kernels='auto'"):
        arranged(tmp_path, family, dtype, kernels="fast")


def test_torch_is_used_where_it_was_asked_for(machine, tmp_path):
    experts = arranged(tmp_path, "qwen3_moe", torch.bfloat16, kernels="torch")
    assert experts.gpu_kernels is None and experts.backend == "torch (bit-identical to eager experts)"


def test_no_lookahead_is_asked_on_a_gpu_unless_it_is_named(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path)
    model = tiny_models.model_class(tmp_path).from_pretrained(tmp_path, quantization_config=VisMoEConfig(memory="50%"))
    inventory = vismoe.runtime_of(model).pager.inventory
    chosen = {name: choose_lookahead(model, inventory, Settings.of(lookahead=name), None, GPU) for name in ("auto", "gate")}
    assert chosen["auto"][0] is None and chosen["auto"][2].startswith("none: on a GPU") and chosen["gate"][0] is not None
    assert choose_lookahead(model, inventory, Settings.of(lookahead="auto"), None, torch.device("cpu"))[0] is not None
    vismoe.runtime_of(model).pager.close()
