"""What is running: hooks on a model note each forward pass, and its MoE layers (experts.py) read what was noted.

One forward pass runs at a time. B sequences of S new tokens each are T = B * S tokens.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from vismoe.config import format_bytes
from vismoe.errors import ClosedError, ConfigError, ContextError, UnsupportedModelError
from vismoe.metrics import Metrics
from vismoe.models.family.caches import cache_in
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.family.mtp import of_mtp
from vismoe.models.family.token_kinds import token_kinds
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.draft_pool import DraftPool
from vismoe.models.moe.format_choice import FormatChooser
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.models.moe.lookahead_inputs import LookaheadInputs
from vismoe.models.moe.resident import ResidentLayers
from vismoe.models.moe.rows import RowsCache
from vismoe.models.visual.growing_cache import grow_in_place
from vismoe.models.visual.prune import VisualPruner
from vismoe.paging.pager import Pager
from vismoe.planning.needs import mask_bytes
from vismoe.planning.plan import Plan
from vismoe.planning.sizes import size_up
from vismoe.pools.malloc import FreedBlocks
from vismoe.pools.readback import Readback
from vismoe.types import Evidence, Phase, TokenKind, decoder_layer_of, stack_of

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
    """The request was cancelled between two layers; this is not an error."""


@dataclass
class Step:
    """The forward pass under way: B sequences of S new tokens each."""

    phase: Phase = Phase.PREFILL
    batch: int = 1
    tokens: int = 0  # B * S
    thread: int = 0  # the thread that began it; no other one may run layers of this step
    kinds: np.ndarray | None = None  # uint8 [B * S] of TokenKind; None: all text
    padded: bool = False  # some of the tokens are padding
    kept: np.ndarray | None = None  # int32 [tokens]: which of the pass's tokens are left, -1 for pad slots; None: all
    resident: "ResidentPass | None" = None  # it goes without the pager, because every expert is resident
    short: ResidentLayers | None = None  # computes the layers that find all their experts resident; None: every layer demands
    fewer: bool = False  # some tokens get fewer experts than the router chose: pad slots none, visual ones with visual_top_k
    drafts: DraftPool | None = None  # computes every layer, with experts of its own; None: the experts that serve do
    beside: bool = False  # it is of a layer beside the model's own, of which no lookahead and no recorder hears


class ChosenExperts(Readback):
    """Which experts the layers of a pass without the pager chose."""

    def __init__(self, of_layers: Sequence[tuple[int, int, torch.Tensor]], ids: torch.Tensor):
        """of_layers: (MoE layer, its number of experts, its choices); ids: those of all, one after another; of a captured
        pass in memory that every replay writes."""
        super().__init__(ids)
        self.ids = ids
        layers, experts, counts = zip(*((layer, experts, index.numel()) for layer, experts, index in of_layers), strict=True)
        self.layers, self.experts = np.array(layers), np.array(experts)
        self.rows = np.repeat(np.arange(len(layers)), counts)  # of which of the layers each choice is


class ResidentPass:
    """Counts what a pass without the pager demanded, when the device has computed it. All of it would have been hits.

    A lookahead that remembers does not hear of such passes, nor does the eviction order: neither is needed until a new plan.
    """

    def __init__(self, phase: Phase, metrics: Metrics):
        self._phase, self._metrics = phase, metrics
        self._computed: list[tuple[int, int, torch.Tensor]] = []

    def computed(self, layer: int, experts: int, index: torch.Tensor, seconds: float) -> None:
        """A layer of so many experts has queued the computation of index `[T, K]`, which took the host so long."""
        self._metrics.add("compute_seconds", self._phase, layer, seconds)
        self._computed.append((layer, experts, index.reshape(-1)))
        if len(self._computed) == 1:
            self._metrics.defer(self._count)

    def replayed(self, choices: ChosenExperts) -> None:
        """All layers are queued. Those of the pass before are counted while the device computes."""
        self._metrics.settle(of_all_threads=True)
        choices.send(choices.ids)
        self._metrics.defer(lambda: self._count_hits(choices))

    def _count(self) -> None:
        choices = ChosenExperts(self._computed, torch.cat([index for _, _, index in self._computed]))
        choices.send(choices.ids)
        self._count_hits(choices)
        self._computed.clear()

    def _count_hits(self, choices: ChosenExperts) -> None:
        """Those that were sent."""
        ids, rows = choices.read(), choices.rows
        real = (ids >= 0) & (ids < choices.experts[rows])
        demanded = np.zeros((len(choices.layers), self._metrics.demanded.shape[1]), dtype=bool)
        demanded[rows[real], ids[real]] = True
        self._metrics.count_hits(self._phase, choices.layers, demanded)


@dataclass(frozen=True)
class ExpertService:
    """What serves a model's experts for as long as one plan holds."""

    pager: Pager
    backend: TorchExperts | FastExperts | GpuExperts  # `begin` prepares a layer of a pass, `run` computes it as experts come
    plan: Plan
    chooser: FormatChooser | None = None  # chooses between two formats; None: there is one
    drafts: DraftPool | None = None  # computes draft passes; None: there are none, or they are not the model's

    def close(self) -> None:
        """Stop copies, and give the model back as it was."""
        self.pager.close()
        if self.chooser is not None:
            self.chooser.close()


class StepContext:
    """The step under way, and what its layers are served by. Bound to one model (`watch`).

    pruner: drops visual tokens in prefill, where the family allows it; visual_top_k: experts that a visual token uses in prefill,
    None: as many as the router chose.
    """

    def __init__(
        self,
        device: torch.device,
        lookahead_inputs: LookaheadInputs,
        pruner: VisualPruner | None = None,
        visual_top_k: int | None = None,
    ):
        self.device, self.lookahead_inputs, self.pruner, self.visual_top_k = device, lookahead_inputs, pruner, visual_top_k
        self.now_serving: ExpertService | None = None  # None while the plan changes
        self._short: ResidentLayers | None = None
        self.step = Step()
        self.recorder: RoutingRecorder | None = None
        self.cancelled: Callable[[], bool] = lambda: False  # asked between the layers of a prefill, which can take minutes
        self.encodes_with_experts = False  # a vision tower has routed experts
        self.more_tokens = 0  # than the planned context, that all sequences of a pass may have: experts gave them their memory
        self.captured: list[Any] = []  # graphs of decode passes, to `drop` when other experts serve
        self.freed = FreedBlocks()
        self._last_layers = set[int]()  # MoE layers inside the last decoder layer that has any
        self._reading_prompt = False
        self._drafts: DraftPool | None = None  # of the passes that are drafts now
        self._kinds: np.ndarray | None = None

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedModelError("a model with paged experts cannot be copied or pickled. Fix: load it a second time")

    __reduce_ex__ = __deepcopy__

    @property
    def serving(self) -> ExpertService:
        if self.now_serving is None:
            raise ClosedError("nothing serves this model's experts since a change of its plan failed; load the model again")
        return self.now_serving

    def serve(self, service: ExpertService) -> None:
        """Go on with this, between two requests."""
        self.now_serving = service
        self._short = None if service.chooser is not None else ResidentLayers.of(service.pager, service.backend)
        self.step = Step()
        self.look_ahead_by(self.lookahead_inputs)

    def stop_serving(self) -> None:
        """Close what serves and let go of it, until `serve` is called."""
        self.serving.close()
        self.now_serving = self._short = None
        for graphs in self.captured:
            graphs.drop()
        self.step = Step()
        self.lookahead_inputs.serve(None, None)

    def begin(self, step: Step) -> None:
        """A forward pass begins."""
        self.step = step

    # -- what a request, a recording or a study sets
    def switch(self, memory: Any, retention: float, cancelled: Callable[[], bool]) -> Any:
        """The passes of another request follow -> the lookahead's memory of the one before.

        memory: the lookahead's, of the request that follows, None where it begins; retention: of importance.
        """
        self.freed.end()  # of a prompt that was cancelled
        before, self.lookahead_inputs.memory = self.lookahead_inputs.memory, memory
        if self.now_serving is not None and self.now_serving.chooser is not None:
            self.now_serving.chooser.precision.retention = retention
        self.cancelled = cancelled
        return before

    @contextlib.contextmanager
    def reading_prompt(self) -> Iterator[None]:
        """Within, every pass is one of a prompt, or of what an earlier one has left of it."""
        self._reading_prompt = True
        try:
            yield
        finally:
            self._reading_prompt = False

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """Within, every pass is a draft: it computes experts out of the draft pool, and promises to the pager those that it has
        routed tokens to. Of the experts that serve it demands, counts, guesses and records nothing. Raises ConfigError."""
        if self.serving.drafts is None:
            raise ConfigError("no copy of the experts was loaded to draft with. Fix: load with draft='self' (--draft self)")
        self._drafts = self.serving.drafts
        try:
            yield
        finally:
            self._drafts = None

    def begin_beside(self, tokens: int) -> None:
        """A pass over so many tokens begins, of a layer that hangs beside the model's own (family/mtp.py)."""
        phase = Phase.DRAFT if tokens <= SHORT_STEP_TOKENS else Phase.ENCODE
        serving = self.serving
        serving.pager.metrics.settle()
        serving.pager.begin_step(phase, tokens=tokens)
        short = self._short if phase is Phase.DRAFT else None
        self.begin(Step(phase, 1, tokens, threading.get_ident(), short=short, beside=True))

    def prompt_left(self, layer: int) -> None:
        """The experts of this layer have been computed for a prompt."""
        if layer in self._last_layers:
            self.freed.end()
        else:
            self.freed.check()

    def promise(self, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """A draft pass has routed tokens to these experts, int64 and float32 `[T, K]`, at this layer: they will be demanded."""
        self.serving.pager.promise(layer, experts, weights)

    def record_to(self, recorder: RoutingRecorder | None) -> None:
        """From now on the recorder gets the routing of every pass; None: no recorder does."""
        self.recorder = recorder

    def prune_by(self, pruner: VisualPruner) -> None:
        """Another pruner of the same model drops its visual tokens from now on."""
        self.pruner, pruner.on_pruned = pruner, self._note_pruned

    def look_ahead_by(self, lookahead_inputs: LookaheadInputs) -> None:
        """Show the model to this lookahead from now on."""
        pager, chooser = self.serving.pager, self.serving.chooser
        by_importance = chooser is not None and chooser.precision.policy.importance
        lookahead_inputs.serve(pager, chooser.ahead if chooser is not None and by_importance else None)
        self.lookahead_inputs = lookahead_inputs

    # -- hooks
    def watch(self, model: nn.Module) -> None:
        """Note the forward passes of a model."""
        if self.pruner is not None:
            self.prune_by(self.pruner)
        paths = [path for path, _ in expert_modules(model)]
        stacks = dict.fromkeys(map(stack_of, paths))
        last = next((decoder_layer_of(path) for path in reversed(paths) if not is_vision(path) and not of_mtp(path)), None)
        self._last_layers = {layer for layer, path in enumerate(paths) if decoder_layer_of(path) == last}
        self.encodes_with_experts = any(map(is_vision, stacks))
        model.register_forward_pre_hook(self._note_token_kinds, with_kwargs=True)
        for path in stacks:
            begin = self._begin_encode if is_vision(path) else self._begin_step
            model.get_submodule(path).register_forward_pre_hook(begin, with_kwargs=True)

    def _note_token_kinds(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which tokens are visual and which are padding, as far as the outermost call shows it."""
        kinds = token_kinds(model.config, args, kwargs)
        self._kinds = None if kinds is None else kinds.reshape(-1).cpu().numpy()

    def _note_pruned(self, kept: np.ndarray) -> None:
        """From here on the layers of this pass see `kept` int32 `[tokens]` of its tokens, -1 for pad slots."""
        step, pads = self.step, kept < 0
        kinds = None if step.kinds is None else np.where(pads, TokenKind.PAD, step.kinds[kept]).astype(np.uint8)
        padded = bool(pads.any())
        fewer = step.fewer or padded
        self.step = dataclasses.replace(step, tokens=len(kept), kinds=kinds, padded=padded, kept=kept, short=None, fewer=fewer)
        if self.serving.chooser is not None:
            self.serving.chooser.narrow(kept)

    def _begin_step(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or tokens.device.type == "meta":
            return
        batch, new = tokens.shape[:2]
        cache = cache_in(kwargs)
        past = int(cache.get_seq_length()) if cache is not None else 0
        serving = self.serving
        tokens_in_all = cache.tokens + batch if isinstance(cache, RowsCache) else batch * (past + new)
        if tokens_in_all > serving.plan.context + self.more_tokens:
            raise ContextError(
                f"{batch} x {past + new} tokens are more than the context of {serving.plan.context} that memory was planned for. "
                f"Fix: load with context={tokens_in_all} or more (--context), or shorten the input"
            )
        kinds = self._kinds if self._kinds is not None and self._kinds.size == batch * new else None
        decoding = not self._reading_prompt and (new == 1 or (past > 0 and new <= SHORT_STEP_TOKENS))
        phase = Phase.PREFILL if not decoding else Phase.DECODE if self._drafts is None else Phase.DRAFT
        if isinstance(serving.backend, FastExperts | GpuExperts) and type(cache) is DynamicCache:
            _let_grow(cache, (serving.plan.context + self.more_tokens) // batch)
        if self._drafts is not None:
            self._begin_draft(phase, batch, batch * new)
            return
        padded = kinds is not None and bool((kinds == TokenKind.PAD).any())
        if new > 1 and (past or padded):
            _refuse_large_mask(serving.plan, batch, new, past + new)
        if serving.chooser is not None:
            real = kinds != TokenKind.PAD if kinds is not None and padded else None
            serving.chooser.begin_step(serving.pager, decoding, batch * new, real)
        if not (decoding and any(graphs.is_captured for graphs in self.captured)):  # else counted while the device computes
            serving.pager.metrics.settle(of_all_threads=True)
        serving.pager.begin_step(phase, new_sequence=past == 0, tokens=batch * new)
        if decoding:
            self.freed.end()  # of a prompt that failed
        elif self.device.type == "cpu":
            plan = serving.plan
            self.freed.begin(plan.bytes_of("prefill") * batch * new // plan.context, plan.bytes_of("activations"))
        fewer = self.visual_top_k is not None and not decoding and kinds is not None and bool((kinds == TokenKind.VISUAL).any())
        plain = not padded and not fewer and self.recorder is None
        resident = self._resident_pass(phase) if plain and decoding else None
        stays = decoding or (self._short is not None and serving.pager.addresses() is not None)  # all of it, whatever is read
        short = self._short if plain and stays else None
        self.begin(Step(phase, batch, batch * new, threading.get_ident(), kinds, padded, None, resident, short, fewer))
        dropping = self.pruner is not None and self.pruner.dropping
        self.lookahead_inputs.begin_step(kwargs.get("inputs_embeds"), kinds, past == 0, dropping, self.recorder)
        if self.recorder is not None:
            recorded = kinds if kinds is not None else np.full(batch * new, TokenKind.TEXT, dtype=np.uint8)
            self.recorder.step(self.step.phase, recorded.reshape(batch, new))

    def _begin_draft(self, phase: Phase, batch: int, tokens: int) -> None:
        if phase is Phase.PREFILL:
            raise UnsupportedModelError(
                f"a draft goes on behind the tokens of a cache, by up to {SHORT_STEP_TOKENS} at once, and this pass is a prompt. "
                "Fix: read prompts outside of drafting()"
            )
        self.serving.pager.core.check_open()
        self.begin(Step(phase, batch, tokens, threading.get_ident(), drafts=self._drafts))

    def _resident_pass(self, phase: Phase) -> ResidentPass | None:
        """For a pass that needs nothing of the pager, on a GPU: the host would wait for the routing of each layer."""
        serving = self.serving
        if not isinstance(serving.backend, GpuExperts) or serving.chooser is not None:
            return None
        resident = serving.backend.all_resident(serving.pager, self.device)
        return ResidentPass(phase, serving.pager.metrics) if resident else None

    def _begin_encode(self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A vision tower with routed experts of its own: its rows are patches, of which the tokens are made later."""
        self.serving.pager.begin_step(Phase.ENCODE)
        self.begin(Step(Phase.ENCODE, thread=threading.get_ident()))


def _let_grow(cache: DynamicCache, room: int) -> None:
    """Let a caller's cache grow in place, as the engine's do: transformers copies it for every token."""
    if not torch.is_grad_enabled() and any(type(layer) is DynamicLayer for layer in cache.layers):
        grow_in_place(cache, room)


def _refuse_large_mask(plan: Plan, batch: int, new: int, all: int) -> None:
    nbytes = mask_bytes(batch, new, all, plan.dtype)
    if nbytes > plan.mask_bytes:
        size = size_up(nbytes)
        raise ContextError(
            f"attention of {batch} x {new} tokens, some of them padding or behind earlier ones, needs masks of "
            f"{format_bytes(nbytes)}; memory was planned for {format_bytes(plan.mask_bytes)}. Fix: load with "
            f"mask_memory='{size}' (--mask-memory {size}), or smaller batches"
        )
