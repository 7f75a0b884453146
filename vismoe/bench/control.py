"""Times the control path: Python and dispatch per MoE layer and token, with all experts resident and synthetic routing.

The experts have a few kilobytes each, so their arithmetic costs almost nothing and the time is that of everything else. The same
arithmetic, written as plainly as torch allows, is timed alongside; the difference is VisMoE's cost.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vismoe.formats.raw import Raw
from vismoe.models.moe.compute import TorchExperts
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.lookahead_inputs import LookaheadInputs
from vismoe.models.moe.step_context import ExpertService, Step, StepContext
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import DiskMover
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

HIDDEN, INTERMEDIATE = 64, 24
ROUNDS = 7


@dataclass(frozen=True)
class ControlTime:
    """Microseconds per MoE layer and token, medians over rounds."""

    layers: int
    experts: int
    top_k: int
    us_per_layer: float  # the whole experts function, its tiny arithmetic included
    parts: dict[str, float]  # the parts of the time; they add up to `us_per_layer`

    @property
    def control_us_per_layer(self) -> float:
        """The time without the arithmetic that any implementation would dispatch."""
        return self.us_per_layer - self.parts["arithmetic"]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "control_us_per_layer": self.control_us_per_layer}


class _Random:
    """An expert store without a disk."""

    scratch_bytes = 0
    fingerprint = "random"

    def __init__(self, inventory: ExpertInventory):
        self.inventory = inventory

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        values = record.view(torch.float32)
        torch.randn(values.shape, generator=torch.Generator().manual_seed(hash(expert)), out=values)
        return record.numel()

    def reading(self, expert: ExpertId, address: int) -> None:
        """There is nothing for native threads to read."""

    def begins(self, expert: ExpertId) -> int:
        return 0

    def close(self) -> None:
        pass


def measure_control(layers: int = 48, experts: int = 128, top_k: int = 8, steps: int = 40) -> ControlTime:
    """Run `steps` decode steps of one token through the experts function alone, `ROUNDS` times."""
    module: Any = Qwen3MoeExperts(
        Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=experts, num_experts_per_tok=top_k)
    )
    parameters = dict(module.named_parameters())
    layout = RecordLayout.of({n: tuple(p.shape[1:]) for n, p in parameters.items()}, dict.fromkeys(parameters, torch.float32))
    inventory = ExpertInventory(
        tuple(MoELayer(i, f"layers.{i}.mlp.experts", experts, top_k, 0) for i in range(layers)), (layout,)
    )
    store = _Random(inventory)
    pager = Pager(inventory, (SlabPool(layout, layers * experts),), DiskMover(store), threads=1)
    try:
        for layer in range(layers):
            with pager.demand(layer, range(experts)) as demand:
                for _ in demand.groups(in_order=False):
                    pass
        backend = TorchExperts(inventory, ((Raw(layout),),), torch.device("cpu"))
        nothing_asks_for_a_plan: Any = None
        cpu = torch.device("cpu")
        context = StepContext(cpu, LookaheadInputs(inventory, pager.window, None, None, inline=True, device=cpu))
        context.serve(ExpertService(pager, backend, nothing_asks_for_a_plan))
        return _measure(context, module, steps)
    finally:
        pager.close()


@torch.inference_mode()
def _measure(context: StepContext, module: Any, steps: int) -> ControlTime:
    pager, layers = context.serving.pager, context.serving.pager.inventory.layers
    paged = [PagedLayer(context, layer) for layer in range(len(layers))]
    generator = torch.Generator().manual_seed(0)
    shape = (steps, len(layers), layers[0].num_experts)
    routing = torch.rand(shape, generator=generator).topk(layers[0].top_k).indices[:, :, None]  # [steps, L, 1, K]
    factors = torch.full((1, layers[0].top_k), 1 / layers[0].top_k)
    columns = factors.unbind(1)
    hidden = torch.randn(1, HIDDEN, generator=generator)
    pool, slab_of = pager.tables[0].pool, pager.tables[0].slab_of.tolist()
    weights_of = [[pool.weights(slab) for slab in slab_of[b : b + layers[0].num_experts]] for b in pager.tables[0].base.values()]

    def us_per_layer(act: Callable[[int, torch.Tensor], Any]) -> float:
        """Microseconds of `act(layer, index)` per call, over all steps and layers."""
        began_s = time.perf_counter()
        for step in routing:
            pager.begin_step(Phase.DECODE)
            context.begin(Step(Phase.DECODE, batch=1, tokens=1, thread=threading.get_ident()))
            for layer, index in enumerate(step):
                act(layer, index)
        return 1e6 * (time.perf_counter() - began_s) / (steps * len(layers))

    def page(layer: int, index: torch.Tensor) -> None:
        with pager.demand(layer, sorted(index[0].tolist())) as demand:
            for _ in demand.groups(in_order=False):
                pass

    def read(layer: int, index: torch.Tensor) -> list[int]:
        return index.cpu().numpy()[0].tolist()

    def compute(layer: int, index: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert, factor in sorted(zip(read(layer, index), columns)):  # ids differ, so no tensors are compared
            weights = weights_of[layer][expert]
            up = torch.nn.functional.linear(hidden, weights["gate_up_proj"])
            out += torch.nn.functional.linear(module._apply_gate(up), weights["down_proj"]) * factor
        return out

    context.begin(Step(Phase.DECODE, batch=1, tokens=1, thread=threading.get_ident()))
    for layer, index in enumerate(routing[0]):
        assert torch.equal(paged[layer].run(module, hidden, index, factors), compute(layer, index)), "the arithmetic differs"
    acts = {
        "loop": lambda layer, index: None,
        "whole": lambda layer, index: paged[layer].run(module, hidden, index, factors),
        "arithmetic": compute,
        "paging": page,
        "reading": read,
    }
    rounds = [{name: us_per_layer(act) for name, act in acts.items()} for _ in range(ROUNDS)]  # in turn, so noise affects all
    loop, whole, backend, paging, reading = (statistics.median(each[name] for each in rounds) for name in acts)
    parts = {
        "arithmetic": backend - reading,
        "reading the routing": reading - loop,
        "paging": paging - reading,
        "rows, weighing and combining": whole - backend - paging + reading,
    }
    return ControlTime(len(layers), layers[0].num_experts, layers[0].top_k, whole - loop, parts)
