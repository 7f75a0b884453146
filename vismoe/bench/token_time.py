"""Where a decoded token's time goes: calls, seconds and bytes of each part of the model.

Functions of the parts are timed where transformers calls them, and by the kernels' own clock where one call computes a layer.
Parts never overlap: what one calls inside itself belongs to it, its own Python included. What is left of a token lies between the
parts: Python, transformers' and ours, and torch's small operations.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vismoe.bench.job import TokenTime
from vismoe.kernels import rows
from vismoe.kernels.decoder_layer import DecoderLayer
from vismoe.models.family.components import component_of, is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.moe.decoder_layers import served_layers
from vismoe.models.moe.linears import EncodedLinear

EMPTY_CALLS = 20_000  # that the cost of timing is measured with
Bytes = Callable[[tuple[Any, ...]], int]  # that a call with such arguments reads


class TokenTimer:
    """Sums up what is called after `begin`."""

    def __init__(self, layers: Sequence[DecoderLayer] = ()) -> None:
        """layers: those that the kernels time."""
        self.parts: dict[str, dict[str, float]] = {}
        self._layers, self._before = layers, [layer.spent() for layer in layers]
        self._running = self._inside = False

    def begin(self) -> None:
        """From the first call on."""
        if not self._running:
            self._running, self._before = True, [layer.spent() for layer in self._layers]

    def timed(self, part: str, function: Callable[..., Any], nbytes: Bytes) -> Callable[..., Any]:
        """The same function, whose calls count for the part."""
        sums = self.parts.setdefault(part, _nothing())

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._running or self._inside:
                return function(*args, **kwargs)
            self._inside, began_s = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                sums["seconds"] += time.perf_counter() - began_s
                sums["calls"] += 1
                sums["bytes"] += nbytes(args)
                self._inside = False

        return call

    def result(self, tokens: int, seconds: float) -> TokenTime:
        """Of so many tokens, which took so many seconds."""
        calls = sum(sums["calls"] for sums in self.parts.values())
        parts = {name: dict(sums) for name, sums in self.parts.items()}
        for layer, before in zip(self._layers, self._before):
            for name, spent in layer.spent().items():
                sums = parts.setdefault(name, _nothing())
                for figure, now, then in zip(("seconds", "calls", "bytes"), spent, before[name]):
                    sums[figure] += now - then
        found = {name: sums for name, sums in parts.items() if sums["calls"]}
        return TokenTime(tokens, seconds, calls * _seconds_of_timing(), found)


@contextlib.contextmanager
def token_timer(model: Any) -> Iterator[TokenTimer]:
    """Within, the parts of the model's decoder are timed."""
    timer = TokenTimer([layer.native for layer in served_layers(model)])
    with contextlib.ExitStack() as stack:
        for layer in served_layers(model):
            if layer.experts is not None:
                paged: Any = layer.experts._vismoe_layer
                paged.demanded = timer.timed("experts", paged.demanded, partial(_always, 0))
                stack.callback(delattr, paged, "demanded")
        for part, module in _modules(model):
            own = vars(module).get("forward")
            module.forward = timer.timed(part, module.forward, partial(_always, _held_bytes(part, module)))
            stack.callback(_give_back, module, own)
        name = model.config.get_text_config()._attn_implementation
        if name in ALL_ATTENTION_FUNCTIONS:
            attention = timer.timed("attention", ALL_ATTENTION_FUNCTIONS[name], partial(_of_two, 2))
            ALL_ATTENTION_FUNCTIONS[name] = attention
            stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, name)
        patched = (transformers.Cache, "update", "cache", 1), (rows, "rotate", "rotations", 0)
        for owner, function, part, first in patched:
            own = getattr(owner, function)
            setattr(owner, function, timer.timed(part, own, partial(_of_two, first)))
            stack.callback(setattr, owner, function, own)
        yield timer


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """(part, module) of the decoder, none inside another."""
    head, experts = model.get_output_embeddings(), dict(expert_modules(model))
    # Given a forward of their own, these would be called, where otherwise one call computes the layer.
    silent = {module for layer in served_layers(model) for module in (*layer.silent, layer.behind)}
    blocks = {path.rpartition(".")[0]: module.num_experts for path, module in experts.items()}
    for path, module in model.named_modules():
        if is_vision(path) or module in silent or any(path.startswith(f"{outer}.") for outer in experts):
            continue
        name, weight = type(module).__name__.lower(), module._parameters.get("weight")
        outputs = 0 if weight is None or weight.ndim != 2 else len(weight)
        if path in experts:
            yield "experts", module
        elif module is head:
            yield "head", module
        elif outputs and outputs == blocks.get(path.rpartition(".")[0]):
            yield "routers", module
        elif isinstance(module, nn.Linear | EncodedLinear):
            yield "linears", module
        elif next(module.children(), None) is None and component_of(f"{path}.") == "embeddings":
            yield "embeddings", module
        elif next(module.children(), None) is None and ("norm" in name or "rotary" in name):
            yield "norms" if "norm" in name else "rotations", module


def _nothing() -> dict[str, float]:
    return {"calls": 0, "seconds": 0.0, "bytes": 0}


def _held_bytes(part: str, module: nn.Module) -> int:
    """Of its weights, which a call reads; of embeddings it reads one row, and of experts what their pager lends."""
    if part in ("experts", "embeddings"):
        return 0
    return _bytes(*module.parameters(), *module.buffers())


def _always(nbytes: int, args: tuple[Any, ...]) -> int:
    return nbytes


def _of_two(first: int, args: tuple[Any, ...]) -> int:
    """Of two tensors among the arguments, from `first` on."""
    return _bytes(*args[first : first + 2])


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _give_back(module: Any, own: Any) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own


def _seconds_of_timing() -> float:
    """Of one call, beyond the function's own."""
    timer = TokenTimer()
    empty = timer.timed("empty", lambda x: x, lambda args: 0)
    timer.begin()
    began_s = time.perf_counter()
    for _ in range(EMPTY_CALLS):
        empty(0)
    return (time.perf_counter() - began_s) / EMPTY_CALLS
