"""Decode passes of one sequence as CUDA graphs: the host queues a decoder by a few calls, instead of one for each operation.

On a GPU a token of a large model is hundreds of small operations, which the host takes far longer to queue than the GPU to
compute. So after some passes one more is captured, by transformers' own code: one graph for the whole decoder where every expert
is resident for good; otherwise a graph for what lies between two layers' experts, which are brought in as in any other pass, and
one for the experts of each layer, where they lie in slabs together. The graphs are good for every later pass of one token,
whatever its cache: the keys' and values' addresses and lengths are read on the device, by the attention program that other
passes use as well.

What was captured is compared with the pass before it, which computed the same token: the decoder's output, and where experts are
demanded every router's input and choice, bit for bit; a graph of a layer's experts is compared with launches when it is first
replayed. Where they differ, where something cannot be captured, or where a module has a hook that listens,
the modules compute. `about` says what was decided, and why.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import ModelOutput

from vismoe.lookahead import gate
from vismoe.models.family.caches import CACHE_NAMES, cache_in, windows
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.moe.captured_decoder import CapturedDecoder, CudaGraphs, Example
from vismoe.models.moe.captured_pass import as_captured
from vismoe.models.moe.decoder_layers import EVERYWHERE, Things, listens
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.models.moe.own_forward import give_forward, was_given
from vismoe.models.moe.step_context import StepContext
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.pools.readback import Readback
from vismoe.types import Phase, stack_of

logger = logging.getLogger(__name__)

WARM_PASSES = 3  # before one is captured: by then every program is compiled, and short answers pay nothing
MASK = "attention_mask"
POSITIONS = ("position_ids", "cache_position")  # inputs that change from pass to pass, beside the token


class DecodeGraphs:
    """Of one decoder: captures when it pays, and replays what fits. `about` is told what was decided."""

    def __init__(self, context: StepContext, about: Callable[[str], None], graphs: Any):
        self._context, self._about, self._graphs = context, about, graphs
        self._captured: CapturedDecoder | None = None
        self._of: tuple[bool, int] | None = None  # whether all experts were resident, and how many tokens there may be
        self._passes = 0  # of this kind so far; below 0: there will be no graphs
        self._hooks: list[Any] = []  # of the modules that were captured, and how many there were
        self._listening: list[int] = []
        self._parts: Things | None = None
        self._hides_nothing = Readback(torch.ones((), dtype=torch.bool, device=context.device))  # a mask
        self._hid = False  # that of the newest pass did hide something
        self._memory: list[torch.Tensor] = []  # of what was captured: graphs read it, wherever its tensors have gone since

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The decoder's output for the pass under way; None: its modules shall compute it."""
        step, cache = self._context.step, cache_in(kwargs)
        if step.phase is not Phase.DECODE or step.tokens != 1 or args or not self._fits(step, cache):
            return None
        of = step.resident is not None, self._context.serving.plan.context + self._context.more_tokens
        if of != self._of:
            self.drop()
            self._of = of
        given = _inputs(module, kwargs) if self._passes >= 0 else None
        if given is None:
            return None
        mask = given.pop(MASK, None)
        if self._captured is None:
            if mask is not None and not bool(mask.all()):
                return None
            self._passes += 1
            return self._first(module, kwargs, given, cache) if self._passes > WARM_PASSES else None
        if not self._captured.takes(given) or not (self._captured.is_placed(cache) or self._can_place(given, cache)):
            return None
        if self._hid and mask is not None and not bool(mask.all()):  # as that of the pass before
            return None
        return self._replayed(self._captured, given, cache, mask)

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def count(self) -> None:
        """What the pass before demanded is counted now: this one is not replayed."""
        self._context.serving.pager.metrics.settle(of_all_threads=True)

    def drop(self) -> None:
        """Forget what was captured: other experts will serve."""
        self._captured, self._of, self._passes = None, None, 0
        self._parts, self._memory = None, []

    def _fits(self, step: Any, cache: Any) -> bool:
        plain = not (step.beside or step.padded or step.fewer or step.drafts or step.kept is not None)
        return (
            plain
            and (self._context.pruner is None or self._context.pruner.idle)
            and type(cache) is DynamicCache
            and self._context.recorder is None
            and not torch.is_grad_enabled()
            and isinstance(self._context.serving.backend, GpuExperts)
        )

    def _is_heard(self) -> bool:
        """Whether something listens to a module that did not when the decoder was captured."""
        return list(map(len, self._hooks)) != self._listening or any(map(listens, filter(None, EVERYWHERE)))

    def _is_as_captured(self) -> bool:
        """Every module, weight and forward is the one that was there, where it was."""
        assert self._parts is not None
        return self._parts.stay_in_place()

    def _can_place(self, given: Mapping[str, Any], cache: Any) -> bool:
        captured = self._captured
        assert captured is not None
        if len(cache.layers) != len(captured.places) or not _makes_room(given, cache, captured.most_tokens):
            return False
        captured.place(cache)
        return True

    def _is_sound(self, mask: torch.Tensor | None) -> bool:
        """Whether the pass is the one that was captured, and its mask, which was sent, hides nothing. The host looks while the
        device computes, and before anything but keys and values behind the cache's was written: for large models looking takes
        as long as a layer or two."""
        if not self._is_as_captured():
            if self._context.device.type == "cuda":
                torch.cuda.current_stream(self._context.device).synchronize()  # nothing is freed under a graph
            self.drop()
            return False
        self._hid = mask is not None and not bool(self._hides_nothing.read())
        return not (self._hid or self._is_heard())

    def _remember(self, modules: list[nn.Module]) -> None:
        """What `_is_heard` and `_is_as_captured` compare."""
        self._listening = list(map(len, self._hooks))
        held = [(part, name) for m in modules for part in (m._parameters, m._buffers, m._modules) for name in part]
        held += [(m.__dict__, "forward") for m in modules]
        self._parts = Things([part for part, _ in held], [name for _, name in held])
        self._memory = [tensor.detach() for tensor in self._parts.tensors]

    def _first(self, module: Any, kwargs: dict[str, Any], given: dict[str, Any], cache: Any) -> Any:
        """An ordinary pass; then the same is captured, and compared with it: what the decoder does with token ids beside looking
        up their embeddings, or with a mask, shows."""
        context, example = self._context, Example()
        modules = [one for one in module.modules() if one is not module]
        self._hooks = [hooks for one in modules for hooks in (one._forward_pre_hooks, one._forward_hooks)]
        shown = [hook for hooks in self._hooks for hook in hooks.values() if type(hook) is not gate.Capture]
        if listens(dict(enumerate(shown))):
            return None
        kinds = {f"a {type(layer).__name__} in its cache" for layer in cache.layers if not isinstance(layer, GrowingLayer)}
        kinds |= windows(module.config)
        assert self._of is not None
        (resident, most), backend = self._of, context.serving.backend
        if kinds or not _makes_room(given, cache, most):
            return self._give_up(f"there is {min(kinds)}") if kinds else None
        forward = type(module).forward.__get__(module)
        with as_captured(example), example.beside(_embeddings(module)), example:
            output = forward(**kwargs)
        if example.masked:
            return output
        if example.waits is not None:
            self._give_up(f"the host waits for {example.waits}")
            return output
        if not isinstance(output, ModelOutput) or not output.keys() <= {"last_hidden_state", *CACHE_NAMES}:
            self._give_up("the decoder returns more than hidden states")
            return output
        assert isinstance(backend, GpuExperts)
        device = context.device
        captured = CapturedDecoder(self._graphs, backend, device, len(cache.layers), most, resident)
        try:
            captured.capture(forward, given, cache, example)
            captured.place(cache, before=1)
            why_not = captured.differs(example, output)
        except Exception as error:  # whatever CUDA or a model's code raise where it cannot be captured; the pass itself is over
            why_not = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if why_not is not None:
            self._give_up(why_not)
            return output
        self._remember(modules)
        self._captured = captured
        graphs = len(captured.segments)
        self._about("one CUDA graph for a token" if graphs == 1 else f"{graphs} CUDA graphs for a token, between its experts")
        return output

    def _give_up(self, why_not: str) -> None:
        self._passes = -1
        self._about(f"no CUDA graph: {why_not}")
        logger.info("decode passes are not replayed as CUDA graphs: %s", why_not)

    def _replayed(self, captured: CapturedDecoder, given: dict[str, Any], cache: Any, mask: torch.Tensor | None) -> Any:
        if mask is not None:
            self._hides_nothing.send(mask.all())
        if not captured.replay(given, is_sound=lambda: self._is_sound(mask)):
            return None
        if captured.choices is not None:
            assert self._context.step.resident is not None, "all experts were resident for good"
            self._context.step.resident.replayed(captured.choices)
        for layer in cache.layers:
            layer.one_more()
        return captured.give_back(cache)


def serve_decode_graphs(
    model: nn.Module, context: StepContext, about: Callable[[str], None], graphs: Callable[[torch.device], Any] = CudaGraphs
) -> None:
    """Let the decoders of a model on a GPU, whose experts the GPU kernels compute, be captured and replayed."""
    stacks = dict.fromkeys(stack_of(path) for path, _ in expert_modules(model))
    decoders = [model.get_submodule(stack) for stack in stacks if not is_vision(stack)]
    served = [(one, DecodeGraphs(context, about, graphs(context.device))) for one in decoders]
    context.captured = [graphs_of for _, graphs_of in served]
    give_forward(served, _forward)


def is_served(module: nn.Module) -> bool:
    """Whether it is a decoder of `serve_decode_graphs`."""
    return was_given(module, _forward)


def _forward(reference: Any, graphs: DecodeGraphs, *args: Any, **kwargs: Any) -> Any:
    module = reference()
    made = graphs.run(module, args, kwargs)
    if made is None:
        graphs.count()
        made = type(module).forward(module, *args, **kwargs)
    return made


def _inputs(module: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a pass as they are captured, with the token's embedding, and a mask `[1, S]` beside them, which must hide
    nothing; None for a pass with more."""
    given = dict(kwargs)
    mask, ids, positions = given.get(MASK), given.pop("input_ids", None), given.get("position_ids")
    if not isinstance(positions, torch.Tensor) or given.get("return_dict") is False:
        return None
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return None
    if given.get("inputs_embeds") is None:
        embed = _embeddings(module)
        if ids is None or embed is None:
            return None
        given["inputs_embeds"] = embed(ids)
    known = {"inputs_embeds", MASK, *POSITIONS, *CACHE_NAMES}
    plain = all(name in known or value is None or value is False or name == "use_cache" for name, value in given.items())
    return given if plain else None


def _embeddings(module: Any) -> nn.Module | None:
    embed: nn.Module | None = getattr(module, "get_input_embeddings", lambda: None)()
    return embed


def _makes_room(given: Mapping[str, Any], cache: Any, most_tokens: int) -> bool:
    """Whether all layers of a cache take one more token, and are what the attention program reads, where the pass is computed."""

    def takes(layer: Any) -> bool:
        if not isinstance(layer, GrowingLayer) or not layer.make_room(1):
            return False
        keys, _, tokens = layer.place()
        return tokens <= most_tokens and keys.device == given["inputs_embeds"].device

    return bool(cache.layers) and all(map(takes, cache.layers))
