"""The experts implementation that transformers calls instead of its own: a layer's experts are demanded, computed and added up.

What is computed, and in which order, is the backend's business (compute.py); what is running is noted by step_context.py.
Shapes: hidden `[T, H]`, index `[T, K]` int64, factors `[T, K]` (transformers' top_k_index and top_k_weights). One device-to-host
read per layer: the routing.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from vismoe.errors import BusyError, UnsupportedModelError
from vismoe.kernels.decoder_layer import Cached, DecoderLayer
from vismoe.models.family.families import expert_modules
from vismoe.models.moe.captured_pass import captured_pass
from vismoe.models.moe.compute import PAIRS_PER_CALL, FastWork
from vismoe.models.moe.draft_pool import DraftPool
from vismoe.models.moe.format_choice import FormatChooser
from vismoe.models.moe.gpu_experts import GpuExperts, GpuWork
from vismoe.models.moe.resident import ResidentLayers
from vismoe.models.moe.step_context import ExpertService, Interrupted, Step, StepContext
from vismoe.paging.lent import Computation, Group
from vismoe.pools.readback import on_host
from vismoe.timeline import COMPUTE
from vismoe.types import Phase, TokenKind

IMPLEMENTATION = "vismoe"


class _NoBackward(torch.autograd.Function):
    """The layer's output where gradients are recorded: right going forward, refused going back.

    A graph over slabs would silently use whatever expert lies in them by the time of the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, factors: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UnsupportedModelError("paged experts cannot be trained. Fix: load the model without VisMoE, or use torch.no_grad()")


class PagedLayer:
    """Computes the routed experts of one MoE layer out of the pager's slabs."""

    def __init__(self, context: StepContext, layer: int):
        self.context, self.layer = context, layer
        self.whole: Callable[[Group], torch.Tensor | None] | None = (
            None  # a graph that computes the layer, if one group has its experts
        )
        self._left_out = self._skipped = 0  # choices of this pass that the policy left out: of padding, of real tokens

    def run(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The layer's output `[T, H]`."""
        captured = captured_pass()
        if captured is not None:
            return captured.experts(self, module, hidden, index, factors)
        return self.computed(module, hidden, index, factors)

    def computed(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The same, in any pass."""
        short = self.short()
        if short is not None:
            self._refuse_cancelled()
            out = short.run(self.context.step.phase, self.layer, hidden, index, factors)
            if out is not None:
                self.computed_short(index.numpy)
                return out
        return self.demanded(module, hidden, index, factors)

    @property
    def may_ask_cpu(self) -> bool:
        """Whether the CPU may ever compute some of its experts in `at_once`."""
        ways = self.context.serving.pager.core.ways
        return ways is not None and ways.policy == "auto" and not ways.deterministic

    def asks_cpu(self, experts: int) -> bool:
        """Whether the CPU computes any of so many experts in `at_once`, if all are missing."""
        return self.context.serving.pager.asks_cpu(self.layer, experts)

    def at_once(
        self, choices: int, read: Callable[[], np.ndarray], computation: Computation[torch.Tensor], by_cpu: bool
    ) -> torch.Tensor | None:
        """The layer's output for one token, by this computation, in one step with its copies; None: its experts must be demanded.
        `read` waits for its choices, int64 `[K]`. by_cpu: the CPU can compute some of them."""
        context, step, pager = self.context, self.context.step, self.context.serving.pager
        began_s, silent = time.perf_counter(), context.lookahead_inputs.lookahead is None and context.recorder is None
        plain = step.drafts is None and context.serving.chooser is None and not step.fewer
        if not (silent and plain and self.is_mine and pager.may_serve_at_once(self.layer, choices, by_cpu)):
            return None
        return pager.at_once(self.layer, read(), computation, began_s)

    def run_layers(
        self,
        layers: Sequence[tuple[int, DecoderLayer, Sequence[Cached]]],
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[list[torch.Tensor], bool]:
        """As `ResidentLayers.run_layers`, for this layer and those that follow it."""
        short = self.short()
        if short is None:
            return [], False
        self._refuse_cancelled()
        return short.run_layers(self.context.step.phase, layers, hidden, angles)

    @property
    def is_mine(self) -> bool:
        """Whether this thread runs the pass; another one is refused by `run`."""
        return self.context.step.thread == threading.get_ident()

    def short(self) -> ResidentLayers | None:
        """What computes this layer without a demand if all its experts are resident; None: nothing may now."""
        context, step = self.context, self.context.step
        silent = step.beside or not context.lookahead_inputs.asks
        return step.short if silent and self.is_mine else None

    def computed_short(self, read: Callable[[], np.ndarray]) -> None:
        """`read` makes the ids of the layer's experts, int64 `[T, K]`."""
        context, step = self.context, self.context.step
        if not step.beside:
            context.lookahead_inputs.at_resident_layer(self.layer, read, step.kinds)
        if step.phase is Phase.PREFILL:
            context.prompt_left(self.layer)

    def _refuse_cancelled(self) -> None:
        if self.context.step.phase is Phase.PREFILL and self.context.cancelled():
            raise Interrupted

    def demanded(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The same by a demand."""
        context, step = self.context, self.context.step
        if hidden.shape[0] == 0:
            return torch.zeros_like(hidden)
        if hidden.device != context.device:
            raise UnsupportedModelError(
                f"the model was moved to {hidden.device}, its experts are served on {context.device}. "
                f"Fix: load it with device={hidden.device}"
            )
        self._refuse_cancelled()
        if step.thread != threading.get_ident():
            raise BusyError(
                "two threads run this model at the same time; its experts serve one forward pass at a time. "
                "Fix: use Engine.chat, which queues requests, or put a lock around generate()"
            )
        pager = context.serving.pager
        began_s, choices = time.perf_counter(), 0
        self._left_out = self._skipped = 0
        graph = torch.is_grad_enabled() and (hidden.requires_grad or factors.requires_grad)
        try:
            with torch.no_grad() if graph else contextlib.nullcontext():
                if step.drafts is not None:
                    result = self._drafted(step.drafts, module, hidden, index, factors)
                else:
                    result = self._compute(context.serving, step, module, hidden, index, factors)
                    choices = index.numel() - self._left_out
        finally:
            skipped = self._skipped if choices else 0
            pager.layer_ended(step.phase, self.layer, began_s, hidden.shape[0], choices, skipped)
            if step.phase is Phase.PREFILL:
                context.prompt_left(self.layer)
        return _NoBackward.apply(hidden, factors, result) if graph else result

    def _drafted(
        self, drafts: DraftPool, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """Promise the experts to the pager, and compute their copies in the draft pool."""
        context, layer = self.context, self.layer
        routing, weights = _on_host(index, factors, with_factors=True)
        assert weights is not None
        context.promise(layer, routing, weights)
        began_s = time.perf_counter()
        out = drafts.compute(layer, module, hidden, index, factors, routing)
        ended_s = time.perf_counter()
        pager = context.serving.pager
        pager.metrics.add("steps", Phase.DRAFT, layer)
        pager.metrics.add("compute_seconds", Phase.DRAFT, layer, ended_s - began_s)
        if pager.timeline is not None:
            pager.timeline.span(COMPUTE, f"draft of layer {layer}", began_s, ended_s)
        return out

    def _compute(
        self,
        serving: ExpertService,
        step: Step,
        module: Any,
        hidden: torch.Tensor,
        index: torch.Tensor,
        factors: torch.Tensor,
    ) -> torch.Tensor:
        """Demand the experts, compute them as they come, add them up in ascending id."""
        layer, pager, chooser = self.layer, serving.pager, serving.chooser
        resident, backend = step.resident, serving.backend
        if resident is not None and isinstance(backend, GpuExperts) and backend.few_enough(layer, index):
            began_s = time.perf_counter()
            out = backend.of_residents(layer, hidden, index, factors)
            ended_s = time.perf_counter()
            resident.computed(layer, module.num_experts, index, ended_s - began_s)
            if pager.timeline is not None:
                pager.timeline.span(COMPUTE, f"layer {layer}", began_s, ended_s)
            return out
        routing, weights = _on_host(index, factors, with_factors=chooser is not None)
        decoding = step.phase in (Phase.DECODE, Phase.DRAFT)
        if step.fewer:
            routing, factors = self._fewer(step, routing, factors, module.num_experts)
            weights = None
        routed, factors_of_routed, high = routing, factors, None
        first: tuple[int, ...] = ()
        if chooser is not None:
            routing, factors, high, first = self._chosen(chooser, step, module.num_experts, routing, factors, weights)
            if not pager.inventory.low_layouts:
                high, first = None, ()  # there is one format
        work = serving.backend.begin(layer, module, routing, hidden, factors)
        if self.whole is not None and chooser is None and not step.fewer and isinstance(work, GpuWork):
            work.whole = self.whole
        if isinstance(work, FastWork):
            work.sequences = step.batch
        keep = None if decoding else _last_tokens_experts(step, routing)
        may_stay = not (decoding or pager.inventory.low_layouts)  # in slabs that a prompt finds free
        tokens = work.tokens if may_stay or pager.ways is not None or high is not None else None
        by_reading = isinstance(work, FastWork) and decoding and len(work) <= PAIRS_PER_CALL
        real = _real_tokens_experts(step, routing)
        with pager.demand(layer, work.experts, keep, real, tokens, high, first, by_reading) as lease:
            if step.phase is not Phase.ENCODE and not step.beside:
                self._show(step, routed, factors_of_routed, hidden)
            return work.run(lease, in_order=not decoding)

    def _chosen(
        self,
        chooser: FormatChooser,
        step: Step,
        experts: int,
        routing: np.ndarray,
        factors: torch.Tensor,
        weights: np.ndarray | None,
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray, tuple[int, ...]]:
        """Routing and factors without what the policy skips, which experts are wanted in the more precise format, bool `[E]`, and
        which of them first. `weights`: the factors on the host, where they were read."""
        if weights is None:
            weights = on_host(factors.float())[0]
        known = len(routing) == step.tokens  # some families' experts see a part of the tokens only
        real = step.kinds != TokenKind.PAD if known and step.padded and step.kinds is not None else None
        if not known and step.batch > 1 and chooser.precision.policy.importance and step.phase is Phase.PREFILL:
            raise UnsupportedModelError(
                f"importance does not fit batches of this family: {len(routing)} of {step.tokens} tokens reach MoE layer "
                f"{self.layer}, and whose they are is not known. Fix: one sequence at a time, or policy='hotness'"
            )
        choice = chooser.at_layer(self.layer, step.phase, step.batch if known else 1, real, routing, weights)
        if choice.routing is not routing:
            skipped = choice.routing != routing
            self._skipped = int(np.count_nonzero(skipped if real is None else skipped[real]))
            self._left_out = int(np.count_nonzero(skipped)) - self._skipped
            factors = torch.from_numpy(choice.weights).to(factors)
        high = np.ones(experts, bool) if choice.high is None else choice.high
        if choice.upgrades:
            high = high.copy()
            high[list(choice.upgrades)] = True
        return choice.routing, factors, high, choice.upgrades

    def _fewer(self, step: Step, routing: np.ndarray, factors: torch.Tensor, none: int) -> tuple[np.ndarray, torch.Tensor]:
        """Routing and weights with `none`, an id that no expert has, where a token shall not get the expert.

        Pad slots get none. Visual tokens get their `visual_top_k` best, whose weights are scaled to the sum of all before: what a
        family makes of that sum, 1 or not, stays.
        """
        kinds, top_k = step.kinds, self.context.visual_top_k
        if len(routing) != step.tokens:
            if top_k is None:
                return routing, factors
            raise UnsupportedModelError(
                f"visual_top_k does not fit this family: {len(routing)} of {step.tokens} tokens reach MoE layer {self.layer}, "
                "and which of them are visual is not known. Fix: leave visual_top_k out"
            )
        routing = routing.copy()
        if top_k is not None and kinds is not None and top_k < routing.shape[1]:
            visual = torch.from_numpy(kinds == TokenKind.VISUAL).to(factors.device)[:, None]
            order = factors.argsort(dim=1, descending=True, stable=True)
            dropped = visual & torch.zeros_like(visual).expand_as(factors).scatter(1, order[:, top_k:], True)
            left = factors.masked_fill(dropped, 0.0)
            factors = torch.where(visual, left * (factors.sum(1, keepdim=True) / left.sum(1, keepdim=True)), factors)
            routing[on_host(dropped)[0]] = none
        if step.kept is not None:
            routing[step.kept < 0] = none
        return routing, factors

    def _show(self, step: Step, routing: np.ndarray, factors: torch.Tensor, hidden: torch.Tensor) -> None:
        """Show the layer to the lookahead and to the recorder, while its experts come."""
        recorder = self.context.recorder
        kinds = step.kinds if step.kinds is not None and step.kinds.size == len(routing) else None
        scores, evidence = self.context.lookahead_inputs.at_layer(
            self.layer, step.phase is Phase.DECODE, routing, hidden, kinds, step.kept, recorder
        )
        if recorder is None:
            return
        if len(routing) != step.tokens:
            raise UnsupportedModelError(
                f"routing of this family cannot be recorded: {len(routing)} of {step.tokens} tokens reach "
                f"MoE layer {self.layer}, and a trace needs to know which. Fix: run without recording"
            )
        kept, weights = step.kept, on_host(factors.float())[0]
        if kept is not None:
            real = kept >= 0
            routing, weights, kept = routing[real], weights[real], kept[real]
        recorder.layer(self.layer, routing, weights, scores, kept, evidence)


def _on_host(index: torch.Tensor, factors: torch.Tensor, with_factors: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Routing int64 and, where a policy wants them, weights float32 `[T, K]`: one wait for a device."""
    ids, *weights = map(np.ascontiguousarray, on_host(index, *([factors.float()] if with_factors else [])))
    return ids, weights[0] if weights else None


def _last_tokens_experts(step: Step, routing: np.ndarray) -> set[int]:
    """What the last token of each sequence uses: the best guess at what decode will want."""
    if len(routing) != step.tokens:  # experts that see a part of the tokens only (ernie4_5_vl_moe)
        return set(routing[-1].tolist())
    last = np.full(step.batch, step.tokens // step.batch - 1)
    if step.kinds is not None:
        real = step.kinds.reshape(step.batch, -1) != TokenKind.PAD
        last -= real[:, ::-1].argmax(axis=1)
    rows = np.arange(step.batch) * (step.tokens // step.batch) + last
    return set(routing[rows].ravel().tolist())


def _real_tokens_experts(step: Step, routing: np.ndarray) -> Collection[int] | None:
    if not step.padded or step.kinds is None or step.kinds.size != len(routing):
        return None
    return set(routing[step.kinds != TokenKind.PAD].ravel().tolist())


def paged_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function registered with transformers' experts interface."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "torch.compile cannot trace expert paging, which decides on the host. Fix: run the model uncompiled"
        )
    return module._vismoe_layer.run(module, hidden_states, top_k_index, top_k_weights)


def bind(model: nn.Module, context: StepContext) -> None:
    """Let the model's experts modules find their paged layers, and the context note the model's forward passes."""
    for layer, (_, module) in enumerate(expert_modules(model)):
        module._vismoe_layer = PagedLayer(context, layer)  # type: ignore[assignment]
    context.watch(model)


ExpertsInterface.register(IMPLEMENTATION, paged_experts)
