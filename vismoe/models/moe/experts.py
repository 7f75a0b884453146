"""The experts implementation that transformers calls instead of its own, and the hooks that tell it what is running.

What is computed, and in which order, is the arithmetic's business (compute.py); here a layer's experts are demanded.
Shapes: hidden `[T, H]`, top_k_index `[T, K]` int64, top_k_weights `[T, K]`. One device-to-host read per layer: the routing.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from vismoe.config import format_bytes
from vismoe.errors import BusyError, ClosedError, ContextError, UnsupportedModelError
from vismoe.lookahead.lookahead import Lookahead
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules, stack_of
from vismoe.models.family.token_kinds import token_kinds
from vismoe.models.moe.compute import ExpertBackend
from vismoe.models.moe.format_choice import FormatChooser, LayerRows
from vismoe.models.moe.lookahead_inputs import LookaheadInputs
from vismoe.models.visual.prune import VisualPruner
from vismoe.paging.pager import Pager
from vismoe.planning.needs import mask_bytes
from vismoe.planning.plan import Plan
from vismoe.planning.sizes import size_up
from vismoe.precision.hotness import Hotness
from vismoe.store.expert_store import ExpertStore
from vismoe.types import Evidence, Format, Phase, TokenKind

IMPLEMENTATION = "vismoe"
SHORT_STEP_TOKENS = 8  # new tokens on top of a KV cache that still count as decode: drafts being verified, not a prompt


class RoutingRecorder(Protocol):
    """What a trace writer must offer."""

    def step(self, phase: Phase, kinds: np.ndarray) -> None: ...

    def layer(
        self,
        layer: int,
        expert_ids: np.ndarray,
        weights: np.ndarray,
        scores: np.ndarray | None = None,
        kept: np.ndarray | None = None,
        evidence: Evidence | None = None,
    ) -> None: ...


class Interrupted(Exception):
    """The request was cancelled between two layers; not an error of anybody's."""


@dataclass
class Step:
    """The forward pass under way: B sequences of S new tokens each."""

    phase: Phase = Phase.PREFILL
    batch: int = 1
    tokens: int = 0  # B * S
    thread: int = 0  # the thread that began it; nobody else may run layers of this step
    kinds: np.ndarray | None = None  # uint8 [B * S] of TokenKind; None: all text
    padded: bool = False  # some of the tokens are padding
    kept: np.ndarray | None = None  # int32 [tokens]: which of the pass's tokens are left, -1 for pad slots; None: all
    fewer: bool = False  # some tokens get fewer experts than the router chose: pad slots none, visual ones with visual_top_k


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


@dataclass(frozen=True)
class ExpertBackends:
    """What experts are served by, for as long as one plan holds."""

    pager: Pager
    backend: ExpertBackend
    plan: Plan
    store: ExpertStore  # of the more precise format, where there are two
    formats: tuple[Format, ...]  # that slabs hold
    chooser: FormatChooser | None = None  # who chooses between them; None: there is nothing to choose

    @property
    def names(self) -> tuple[str, ...]:
        """The formats, by precision."""
        return tuple(str(format) for format in self.formats)

    def close(self) -> None:
        """Stop copies, and give the model back as it was."""
        self.pager.close()
        if self.chooser is not None:
            self.chooser.close()


class ExpertRuntime:
    """Computes a model's routed experts out of the pager's slabs. Bound to one model; one forward pass at a time."""

    def __init__(
        self, serving: ExpertBackends, device: torch.device, lookahead_inputs: LookaheadInputs, backends: dict[str, str]
    ):
        self.now_serving: ExpertBackends | None = serving  # None while its plan changes
        self.device, self.lookahead_inputs, self.backends = device, lookahead_inputs, backends
        self.recorder: RoutingRecorder | None = None
        self.pruner: VisualPruner | None = None  # drops visual tokens in prefill, where the family allows it
        self.visual_top_k: int | None = None  # experts that a visual token uses in prefill; None: as many as the router chose
        self.cancelled: Callable[[], bool] = lambda: False  # asked between the layers of a prefill, which can take minutes
        self.encodes_with_experts = False  # a vision tower has routed experts
        self._left_out = self._skipped = 0  # choices of the running layer that its policy left out: of padding, of real tokens
        self.reading_prompt = False  # whatever comes is a prompt, or what an earlier one has left of it
        self.step = Step()
        self._kinds: np.ndarray | None = None

    @property
    def serving(self) -> ExpertBackends:
        if self.now_serving is None:
            raise ClosedError("nothing serves this model's experts since a change of its plan failed; load the model again")
        return self.now_serving

    @property
    def pager(self) -> Pager:
        return self.serving.pager

    @property
    def plan(self) -> Plan:
        return self.serving.plan

    @property
    def store(self) -> ExpertStore:
        return self.serving.store

    @property
    def chooser(self) -> FormatChooser | None:
        return self.serving.chooser

    @property
    def hotness(self) -> Hotness | None:
        """What was learned about hot experts, where they are looked for."""
        return self.chooser.precision.hotness if self.chooser is not None else None

    def close(self) -> None:
        """Stop copies; requests fail from now on."""
        if self.now_serving is not None:
            self.now_serving.close()

    def stop_serving(self) -> None:
        """Close what serves and let go of it, until `serve` is called."""
        self.serving.close()
        self.now_serving = None
        self.lookahead_inputs.serve(None, None)

    def serve(self, serving: ExpertBackends) -> None:
        """Go on with another plan, between two requests. What served before is closed, or to be closed, by who made it."""
        self.now_serving = serving
        self.step = Step()
        serving.pager.metrics.name_formats(serving.names)
        chooser = serving.chooser
        by_importance = chooser is not None and chooser.precision.policy.importance
        self.lookahead_inputs.serve(serving.pager, chooser.ahead if chooser is not None and by_importance else None)

    @property
    def lookahead(self) -> Lookahead | None:
        return self.lookahead_inputs.lookahead

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedModelError("a model with paged experts cannot be copied or pickled. Fix: load it a second time")

    __reduce_ex__ = __deepcopy__

    def bind(self, model: nn.Module) -> None:
        """Let the model's experts modules find this runtime, and watch its forward passes."""
        if self.pruner is not None:
            self.pruner.on_pruned = self._note_pruned
        modules = list(expert_modules(model))
        self.encodes_with_experts = any(is_vision(stack_of(path)) for path, _ in modules)
        for layer, (_, module) in enumerate(modules):
            module._vismoe_binding = (self, layer)  # type: ignore[assignment]
        model.register_forward_pre_hook(self._note_token_kinds, with_kwargs=True)
        for path in dict.fromkeys(stack_of(path) for path, _ in modules):
            begin = self._begin_encode if is_vision(path) else self._begin_step
            model.get_submodule(path).register_forward_pre_hook(begin, with_kwargs=True)

    # -- hooks
    def _note_token_kinds(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which tokens are visual and which are padding, as far as the outermost call shows it."""
        kinds = token_kinds(model.config, args, kwargs)
        self._kinds = None if kinds is None else kinds.reshape(-1).cpu().numpy()

    def _note_pruned(self, kept: np.ndarray) -> None:
        """From here on the layers of this pass see `kept` int32 `[tokens]` of its tokens, -1 for pad slots."""
        step, pads = self.step, kept < 0
        kinds = None if step.kinds is None else np.where(pads, TokenKind.PAD, step.kinds[kept]).astype(np.uint8)
        padded = bool(pads.any())
        self.step = dataclasses.replace(step, tokens=len(kept), kinds=kinds, padded=padded, kept=kept, fewer=step.fewer or padded)
        if self.chooser is not None:
            self.chooser.narrow(kept)

    def _begin_step(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or tokens.device.type == "meta":
            return
        batch, new = tokens.shape[:2]
        cache = kwargs.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        if batch * (past + new) > self.plan.context:
            raise ContextError(
                f"{batch} x {past + new} tokens are more than the context of {self.plan.context} that memory was planned for. "
                f"Fix: load with context={batch * (past + new)} or more (--context), or shorten the input"
            )
        kinds = self._kinds if self._kinds is not None and self._kinds.size == batch * new else None
        decoding = not self.reading_prompt and (new == 1 or (past > 0 and new <= SHORT_STEP_TOKENS))
        phase = Phase.DECODE if decoding else Phase.PREFILL
        padded = kinds is not None and bool((kinds == TokenKind.PAD).any())
        if new > 1 and (past or padded):
            self._refuse_large_mask(batch, new, past + new)
        if self.chooser is not None:
            real = kinds != TokenKind.PAD if kinds is not None and padded else None
            self.chooser.begin_step(self.pager, decoding, batch * new, real)
        self.pager.begin_step(phase, new_sequence=past == 0)
        fewer = self.visual_top_k is not None and not decoding and kinds is not None and bool((kinds == TokenKind.VISUAL).any())
        self.step = Step(phase, batch, batch * new, threading.get_ident(), kinds, padded, fewer=fewer)
        dropping = self.pruner is not None and self.pruner.dropping
        self.lookahead_inputs.begin_step(kwargs.get("inputs_embeds"), kinds, past == 0, dropping, self.recorder)
        if self.recorder is not None:
            recorded = kinds if kinds is not None else np.full(batch * new, TokenKind.TEXT, dtype=np.uint8)
            self.recorder.step(self.step.phase, recorded.reshape(batch, new))

    def _refuse_large_mask(self, batch: int, new: int, all: int) -> None:
        nbytes = mask_bytes(batch, new, all, self.plan.dtype)
        if nbytes > self.plan.mask_bytes:
            size = size_up(nbytes)
            raise ContextError(
                f"attention of {batch} x {new} tokens, some of them padding or behind earlier ones, needs masks of "
                f"{format_bytes(nbytes)}; memory was planned for {format_bytes(self.plan.mask_bytes)}. Fix: load with "
                f"mask_memory='{size}' (--mask-memory {size}), or smaller batches"
            )

    def _begin_encode(self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A vision tower with routed experts of its own: its rows are patches, of which the tokens are made later."""
        self.pager.begin_step(Phase.ENCODE)
        self.step = Step(Phase.ENCODE, thread=threading.get_ident())

    # -- one MoE layer
    def run(self, layer: int, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The layer's output `[T, H]`."""
        if hidden.shape[0] == 0:
            return torch.zeros_like(hidden)
        if hidden.device != self.device:
            raise UnsupportedModelError(
                f"the model was moved to {hidden.device}, its experts are served on {self.device}. "
                f"Fix: load it with device={hidden.device}"
            )
        if self.step.phase is Phase.PREFILL and self.cancelled():
            raise Interrupted
        if self.step.thread != threading.get_ident():
            raise BusyError(
                "two threads run this model at the same time; its experts serve one forward pass at a time. "
                "Fix: use Engine.chat, which queues requests, or put a lock around generate()"
            )
        began_s, choices = time.perf_counter(), 0
        self._left_out = self._skipped = 0
        graph = torch.is_grad_enabled() and (hidden.requires_grad or factors.requires_grad)
        try:
            with torch.no_grad() if graph else contextlib.nullcontext():
                result = self._compute(layer, module, hidden, index, factors)
            choices = index.numel() - self._left_out
        finally:
            skipped = self._skipped if choices else 0
            self.pager.layer_ended(self.step.phase, layer, began_s, hidden.shape[0], choices, skipped)
        return _NoBackward.apply(hidden, factors, result) if graph else result

    def _compute(self, layer: int, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Demand the experts, compute them as they come, add them up in ascending id."""
        routing, weights = self._on_host(index, factors)
        decoding = self.step.phase is Phase.DECODE
        if self.step.fewer:
            routing, factors = self._fewer(layer, routing, factors, module.num_experts)
            weights = None
        routed, factors_of_routed, high = routing, factors, None
        first: tuple[int, ...] = ()
        if self.chooser is not None:
            routing, factors, high, first = self._chosen(self.chooser, layer, module.num_experts, routing, factors, weights)
        work = self.serving.backend.begin(layer, module, routing, hidden, factors)
        keep = None if decoding else self._last_tokens_experts(routing)
        tokens = work.tokens if self.pager.ways is not None or high is not None else None
        with self.pager.demand(layer, work.experts, keep, self._real_tokens_experts(routing), tokens, high, first) as demand:
            if self.step.phase is not Phase.ENCODE:
                scores, evidence = self._look_ahead(layer, routed, hidden)
                if self.recorder is not None:
                    self._record(layer, routed, factors_of_routed, scores, evidence)
            return work.run(demand, in_order=not decoding)

    def _on_host(self, index: torch.Tensor, factors: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """Routing int64 and, where a policy wants them, weights float32 `[T, K]`: one read from a device."""
        if self.chooser is None:
            return np.ascontiguousarray(index.cpu().numpy()), None
        if index.device.type == "cpu":
            return np.ascontiguousarray(index.numpy()), factors.detach().float().numpy()
        both = torch.cat([index.float(), factors.float()], dim=1).cpu().numpy()  # ids are small: exact in float32
        ids, weights = np.split(both, 2, axis=1)
        return np.ascontiguousarray(ids, dtype=np.int64), np.ascontiguousarray(weights)

    def _chosen(
        self,
        chooser: FormatChooser,
        layer: int,
        experts: int,
        routing: np.ndarray,
        factors: torch.Tensor,
        weights: np.ndarray | None,
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray | None, tuple[int, ...]]:
        """Routing and factors without what the policy skips, who is wanted in the more precise format, bool `[E]` (None: there is
        one format), and who of them first. `weights`: the factors on the host, where they were read."""
        step = self.step
        if weights is None:
            weights = factors.detach().float().cpu().numpy()
        known = len(routing) == step.tokens  # some families' experts see a part of the tokens only
        real = step.kinds != TokenKind.PAD if known and step.padded and step.kinds is not None else None
        if not known and step.batch > 1 and chooser.precision.policy.importance and step.phase is Phase.PREFILL:
            raise UnsupportedModelError(
                f"importance does not fit batches of this family: {len(routing)} of {step.tokens} tokens reach MoE layer "
                f"{layer}, and whose they are is not known. Fix: one sequence at a time, or policy='hotness'"
            )
        rows = LayerRows(step.phase is Phase.DECODE, step.batch if known else 1, real, step.phase is Phase.ENCODE)
        choice = chooser.at_layer(layer, rows, routing, weights)
        if choice.routing is not routing:
            skipped = choice.routing != routing
            self._skipped = int(np.count_nonzero(skipped if real is None else skipped[real]))
            self._left_out = int(np.count_nonzero(skipped)) - self._skipped
            factors = torch.from_numpy(choice.weights).to(factors)
        if len(self.serving.formats) == 1:
            return choice.routing, factors, None, ()
        high = np.ones(experts, bool) if choice.high is None else choice.high
        if choice.upgrades:
            high = high.copy()
            high[list(choice.upgrades)] = True
        return choice.routing, factors, high, choice.upgrades

    def _fewer(self, layer: int, routing: np.ndarray, factors: torch.Tensor, none: int) -> tuple[np.ndarray, torch.Tensor]:
        """Routing and weights with `none`, an id that no expert has, where a token shall not get the expert.

        Pad slots get none. Visual tokens get their `visual_top_k` best, whose weights are scaled to the sum of all before: what a
        family makes of that sum, 1 or not, stays.
        """
        kinds, top_k = self.step.kinds, self.visual_top_k
        if len(routing) != self.step.tokens:
            if top_k is None:
                return routing, factors
            raise UnsupportedModelError(
                f"visual_top_k does not fit this family: {len(routing)} of {self.step.tokens} tokens reach MoE layer {layer}, "
                "and which of them are visual is not known. Fix: leave visual_top_k out"
            )
        routing = routing.copy()
        if top_k is not None and kinds is not None and top_k < routing.shape[1]:
            visual = torch.from_numpy(kinds == TokenKind.VISUAL).to(factors.device)[:, None]
            order = factors.argsort(dim=1, descending=True, stable=True)
            dropped = visual & torch.zeros_like(visual).expand_as(factors).scatter(1, order[:, top_k:], True)
            left = factors.masked_fill(dropped, 0.0)
            factors = torch.where(visual, left * (factors.sum(1, keepdim=True) / left.sum(1, keepdim=True)), factors)
            routing[dropped.cpu().numpy()] = none
        if self.step.kept is not None:
            routing[self.step.kept < 0] = none
        return routing, factors

    def _record(
        self, layer: int, routing: np.ndarray, factors: torch.Tensor, scores: np.ndarray | None, evidence: Evidence | None
    ) -> None:
        assert self.recorder is not None
        if len(routing) != self.step.tokens:
            raise UnsupportedModelError(
                f"routing of this family cannot be recorded: {len(routing)} of {self.step.tokens} tokens reach "
                f"MoE layer {layer}, and a trace needs to know which. Fix: run without recording"
            )
        kept, weights = self.step.kept, factors.float().cpu().numpy()
        if kept is not None:
            real = kept >= 0
            routing, weights, kept = routing[real], weights[real], kept[real]
        self.recorder.layer(layer, routing, weights, scores, kept, evidence)

    def _look_ahead(self, layer: int, routing: np.ndarray, hidden: torch.Tensor) -> tuple[np.ndarray | None, Evidence | None]:
        """Show the layer to the lookahead; -> what a recorder keeps of it."""
        kinds = self.step.kinds if self.step.kinds is not None and self.step.kinds.size == len(routing) else None
        return self.lookahead_inputs.at_layer(
            layer, self.step.phase is Phase.DECODE, routing, hidden, kinds, self.step.kept, self.recorder
        )

    def _last_tokens_experts(self, routing: np.ndarray) -> set[int]:
        """What the last token of each sequence uses: the best guess at what decode will want."""
        if len(routing) != self.step.tokens:  # experts that see a part of the tokens only (ernie4_5_vl_moe)
            return set(routing[-1].tolist())
        last = np.full(self.step.batch, self.step.tokens // self.step.batch - 1)
        if self.step.kinds is not None:
            real = self.step.kinds.reshape(self.step.batch, -1) != TokenKind.PAD
            last -= real[:, ::-1].argmax(axis=1)
        rows = np.arange(self.step.batch) * (self.step.tokens // self.step.batch) + last
        return set(routing[rows].ravel().tolist())

    def _real_tokens_experts(self, routing: np.ndarray) -> Collection[int] | None:
        kinds = self.step.kinds
        if not self.step.padded or kinds is None or kinds.size != len(routing):
            return None
        return set(routing[kinds != TokenKind.PAD].ravel().tolist())


def paged_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function registered with transformers' experts interface."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "torch.compile cannot trace expert paging, which decides on the host. Fix: run the model uncompiled"
        )
    runtime, layer = module._vismoe_binding
    return runtime.run(layer, module, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(IMPLEMENTATION, paged_experts)
