"""How many operators a MoE layer of one decoded token takes: on a GPU each is a kernel launch that the processor pays for.

Counted on the CPU: torch dispatches the same operators there. Views move nothing and launch nothing, so they do not count.
"""

import dataclasses
from collections import Counter, defaultdict

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import vismoe
from vismoe import VisMoEConfig
from vismoe.bench.roofline import HEAD_LAUNCHES, PAGED, RESIDENT, TORCH
from vismoe.kernels import gpu as gpu_kernels
from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.gpu.lossless import DecodingRing, ring_slots
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.forms import forms_of
from vismoe.models.load import opening
from vismoe.models.moe import experts as moe_experts
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.paging.pager import Pager

LAYERS, TOP_K = 4, 8
MOST = 12  # in the experts of a layer that are all resident, by the GPU kernels
WAYS = {"torch": TORCH, "GPU kernels": PAGED, "GPU kernels, every expert resident": RESIDENT}


def storages(value):
    """Addresses of the memory of the tensors in an operator's arguments or results."""
    if torch.is_tensor(value):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(storages, value)) if isinstance(value, list | tuple) else set()


class Launches(TorchDispatchMode):
    """Counts operators that compute or copy, inside the routed experts and outside. A result in an argument's memory is a view,
    unless the operator's name ends with `_`: it was computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside, self.in_experts = Counter[str](), Counter[str](), False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2]
        viewed = not name.endswith("_") and storages(result) <= storages(args)
        if not viewed and not name.startswith(("empty", "new_empty")):
            (self.inside if self.in_experts else self.outside)[name] += 1
        return result


class StandIns:
    """Instead of the Triton programs: counts their launches."""

    def __init__(self, count: Launches):
        self._count = count

    def __getattr__(self, program: str):
        def launched(*given, **constants) -> None:
            self._count.inside[program] += 1

        return defaultdict(lambda: launched)


def by_gpu_kernels(model, count: Launches, monkeypatch, decoding: bool) -> None:
    """Let the GPU kernels compute, on the CPU: what crosses to a GPU or back there is counted too. `decoding`: as if slabs held
    lossless records."""
    runtime = vismoe.runtime_of(model)
    experts, context = runtime.configuration.experts, runtime.context
    kernels = opening._gpu_kernels(forms_of(model, experts.inventory), experts.inventory, experts.formats, torch.bfloat16)
    raw, layers = experts.inventory.raw_layouts, experts.inventory.layers
    ring = DecodingRing(raw, ring_slots(layers), torch.device("cpu")) if decoding else None
    context.now_serving = dataclasses.replace(context.serving, backend=GpuExperts(experts.inventory, kernels, ring=ring))
    upload, read = gpu.upload, moe_experts.on_host

    def uploaded(*given):
        count.inside["upload"] += count.in_experts
        return upload(*given)

    def read_back(*given):
        count.inside["readback"] += count.in_experts
        return read(*given)

    monkeypatch.setattr(gpu, "_programs", lambda: (StandIns(count), False))
    monkeypatch.setattr(gpu_kernels, "programs", StandIns(count), raising=False)
    monkeypatch.setattr(gpu, "upload", uploaded)
    monkeypatch.setattr(moe_experts, "on_host", read_back)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=TOP_K, norm_topk_prob=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("launches")
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def decoded_layer(folder, monkeypatch, way: str, decoding: bool = False) -> Launches:
    """The operators of one decoded token with every expert that it uses resident."""
    config = VisMoEConfig(memory="100%", lookahead="none", kernels="torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    ids, run, count = torch.arange(16)[None], PagedLayer.run, Launches()

    def counted(self, *args):
        count.in_experts = True
        try:
            return run(self, *args)
        finally:
            count.in_experts = False

    with torch.inference_mode():
        output = model(ids, use_cache=True)
        for _ in range(3):  # until every expert that the token uses is there
            output = model(ids[:, :1], use_cache=True, **{CACHE: cache_in(output)})
        if way != "torch":
            by_gpu_kernels(model, count, monkeypatch, decoding)
            for layer in vismoe.runtime_of(model).pager.inventory.layers:  # the stand-ins' outputs choose any
                list(vismoe.runtime_of(model).pager._bring_in(layer, None))
            if "every expert" not in way:
                monkeypatch.setattr(Pager, "addresses", lambda pager: None)
            model(ids[:, :1], use_cache=True, **{CACHE: cache_in(output)})  # uploads the table of addresses
        count.inside.clear()
        monkeypatch.setattr(PagedLayer, "run", counted)
        with count:
            model(ids[:, :1], use_cache=True, **{CACHE: cache_in(output)})
    vismoe.runtime_of(model).pager.close()
    return count


@pytest.mark.parametrize("way", WAYS)
def test_a_decoded_layer_takes_as_many_launches_as_the_roofline_says(way, checkpoint, monkeypatch):
    """If fewer are enough, lower the numbers there: they are a bar, and docs/gpu.md is made from them."""
    count, known = decoded_layer(checkpoint, monkeypatch, way), WAYS[way]
    inside, outside = sum(count.inside.values()), sum(count.outside.values())
    assert inside == LAYERS * known.experts, count.inside
    assert inside <= LAYERS * MOST or way == "torch"
    assert outside == pytest.approx(LAYERS * known.rest + HEAD_LAUNCHES, rel=0.1), (
        count.outside
    )  # transformers' own; versions differ


@pytest.mark.parametrize("way", [way for way in WAYS if way != "torch"])
def test_decoding_the_experts_of_a_layer_before_they_are_computed_is_one_launch_more(way, checkpoint, monkeypatch):
    count = decoded_layer(checkpoint, monkeypatch, way, decoding=True)
    assert count.inside["decode_many"] == LAYERS and sum(count.inside.values()) == LAYERS * (WAYS[way].experts + 1), count.inside
