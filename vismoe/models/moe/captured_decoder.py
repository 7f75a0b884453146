"""One decode pass as CUDA graphs: captured from the decoder's own code, compared with the pass before, replayed for later ones.

`decode_graph.py` decides when. Attention and experts find out by `captured_pass` that they are captured.
"""

import contextlib
import gc
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from vismoe.errors import UnsupportedModelError
from vismoe.kernels import cpu
from vismoe.kernels.gpu import attention
from vismoe.kernels.gpu.experts import upload
from vismoe.lookahead import gate
from vismoe.models.family.caches import CACHE_NAMES
from vismoe.models.moe.captured_pass import as_captured
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.experts_call import ExpertsCall, Graph, OnHost, page_locked_like
from vismoe.models.moe.gpu_experts import GpuExperts
from vismoe.models.moe.step_context import ChosenExperts

logger = logging.getLogger(__name__)

WAITS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.nonzero, torch.ops.aten.masked_select}
TOKENS = operator.attrgetter("tokens")  # of a cache's layer
COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.to}


class CudaGraphs:
    """Makes graphs of one decoder, within `capturing`; those of a capture share their memory."""

    def __init__(self, device: torch.device):
        self._device = device

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Within, graphs are begun and ended, on a stream of their own."""
        self._pool = torch.cuda.graph_pool_handle()  # a new one: that of an earlier capture ends with its graphs
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def new(self) -> Graph:
        return _CudaGraph(self._pool)

    def failed(self, graph: Graph) -> None:
        """End a capture that failed. torch then still takes its random numbers for captured ones; an empty capture ends that."""
        with contextlib.suppress(RuntimeError):
            graph.end()
        with contextlib.suppress(RuntimeError):
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()


class _CudaGraph:
    def __init__(self, pool: Any):
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # threads that copy go on meanwhile

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class _CapturedLayer(DynamicLayer):
    """Of the cache of a captured pass: it hands on what is new, and the attention program adds that to the real one."""

    def __init__(self, tokens: int):
        super().__init__()
        self.is_initialized, self.tokens, self.asked = True, tokens, False
        self.handed: tuple[Any, Any] | None = None  # keys and values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.handed = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        self.asked = True
        return self.tokens

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        return self.tokens + 1, 0


@dataclass
class _Segment:
    graph: Graph
    heard: list[tuple[Any, torch.Tensor]] = field(default_factory=list)  # hooks of the lookahead, and what they were shown
    call: ExpertsCall | None = None  # what follows; None: it is the last one, or computes its experts itself


class Example(TorchDispatchMode):
    """An ordinary pass, of which every experts' call is kept, and the operation of the rest for which the host would wait: a
    capture that meets one fails, and leaves torch's random numbers unusable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, ...]] = []  # (hidden, index, factors, out)
        self.waits: str | None = None
        self.masked = False
        self._looks = True

    @contextlib.contextmanager
    def beside(self, embeddings: nn.Module | None) -> Iterator[None]:
        """Within, what this module does is not looked at: it is asked before a pass that is replayed."""
        hooks = []
        if embeddings is not None:
            hooks = [
                embeddings.register_forward_pre_hook(lambda *_: setattr(self, "_looks", False)),
                embeddings.register_forward_hook(lambda *_: setattr(self, "_looks", True), always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if self._looks and self.waits is None and (function.overloadpacket in WAITS or _crosses(function, args, out)):
            self.waits = str(function.overloadpacket)
        return out

    def attend(self, *args: Any) -> None:
        return None

    def mask(self, made: Callable[[], Any]) -> Any:
        with _disable_current_modes():
            mask = made()
        self.masked |= mask is not None
        return mask

    def experts(self, paged: PagedLayer, module: Any, *given: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            out = paged.computed(module, *given)
        self.calls.append((*(tensor.clone() for tensor in given), out.clone()))
        return out


def _crosses(function: Any, args: Any, out: Any) -> bool:
    """Whether an operation copies numbers from one memory into another. Those of a Python number, which lie nowhere, do not."""
    if function.overloadpacket not in COPIES:
        return False
    places = {t.device.type for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)}
    return len(places) > 1


class CapturedDecoder:
    """A pass of one token through a decoder, captured. `resident`: with its experts, all of which are resident."""

    def __init__(self, graphs: Any, backend: GpuExperts, device: torch.device, layers: int, most_tokens: int, resident: bool):
        self._graphs, self._backend, self._resident, self.most_tokens = graphs, backend, resident, most_tokens
        self.segments: list[_Segment] = []
        self.inputs: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):  # later passes may run in another mode than this one
            self.places = torch.zeros(layers, 4, dtype=torch.int64, device=device)
            self.lengths = torch.zeros(layers, dtype=torch.int64, device=device)
        self._there: list[int] | None = None  # what `lengths` holds; None: not known
        self._behind: list[int] = []  # what it will hold behind the next replay
        self._held: list[Any] = []  # weak references to the memory that `places` are about
        self._noted, self._room = object(), 0  # what layers with that memory carry, and for how many tokens they have memory
        self.output: Any = None
        self.choices: ChosenExperts | None = None  # of layers computed within
        self._ids: list[tuple[int, int, torch.Tensor]] = []  # (layer, experts, ids)
        self._attended = 0
        self._layers: list[_CapturedLayer] = []
        self._readable: Iterator[tuple[torch.Tensor, ...]] = iter(())  # of the layers to come: what the host reads
        self._held_by_graphs: list[torch.Tensor] = []  # what only these read and write
        self._heard: list[tuple[Any, torch.Tensor]] = []

    # -- capturing
    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self, forward: Callable[..., Any], given: Mapping[str, Any], cache: Any, example: Example) -> None:
        """Capture `forward(**given)`, whose tensors become this pass's own; the `example` was the same. Raises what cannot be
        captured."""
        self.inputs = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
        captured = DynamicCache()
        captured.layers = self._layers = [_CapturedLayer(layer.get_seq_length()) for layer in cache.layers]
        self._backend.in_order(self.places.device)
        # Page-locked memory for what the host reads between graphs: none can be taken within a capture.
        calls = [] if self._resident else [(index, hidden, factors) for hidden, index, factors, _ in example.calls]
        self._readable = iter([tuple(map(page_locked_like, call)) for call in calls])
        named = {name: self.inputs.get(name, captured if name in CACHE_NAMES else value) for name, value in given.items()}
        with self._graphs.capturing(), as_captured(self), gate.hearing() as self._heard:
            try:
                self._begin_segment()
                self.output = forward(**named)
                self.lengths.add_(1)
                ids = torch.cat([index.reshape(-1) for _, _, index in self._ids]) if self._ids else None
                self._end_segment()
            except BaseException:
                self._graphs.failed(self._open)
                raise
        self.choices = ChosenExperts(self._ids, ids) if ids is not None else None
        updates = sum(layer.handed is not None for layer in self._layers)
        if updates != self._attended:
            raise UnsupportedModelError(f"{updates - self._attended} of {updates} layers have attention of their own kind")
        if any(layer.asked for layer in self._layers[1:]):  # the decoder itself asks the first one
            raise UnsupportedModelError("its layers ask how many tokens there are")

    def _begin(self) -> Graph:
        self._open: Graph = self._graphs.new()
        self._open.begin()
        return self._open

    def _begin_segment(self) -> None:
        self.segments.append(_Segment(self._begin()))

    def _end_segment(self) -> None:
        self._open.end()
        self.segments[-1].heard, self._heard[:] = list(self._heard), []

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.Tensor:
        row = getattr(module, "layer_idx", -1)
        handed = self._layers[row].handed if 0 <= row < len(self._layers) else None
        if handed is None or key is not handed[0] or value is not handed[1] or not attention.takes(query, key, value):
            raise UnsupportedModelError(f"attention of {tuple(query.shape)} over {tuple(key.shape)} is not captured")
        self._attended += 1
        scale = options.get("scaling")
        return attention.attend_in_place(
            query, key, value, self.places, row, self.lengths[row : row + 1], self.most_tokens,
            query.shape[3] ** -0.5 if scale is None else scale,
        )  # fmt: skip

    def mask(self, made: Callable[[], Any]) -> None:
        return None

    def experts(
        self, paged: PagedLayer, module: Any, hidden: torch.Tensor, index: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        if self._resident:
            self._ids.append((paged.layer, module.num_experts, index))
            return self._backend.of_residents(paged.layer, hidden, index, factors)
        layer, given = paged.layer, (hidden, index, factors)
        ids, *of_cpu = next(self._readable)
        by_graph = self._backend.one_format(layer) and self._backend.few_enough(layer, index)
        kernel = self._backend.on_host(layer) if by_graph and paged.may_ask_cpu else None
        for here, tensor in zip((ids, *of_cpu), (index, hidden, factors) if kernel is not None else (index,)):
            here.copy_(tensor, non_blocking=True)
        self._end_segment()
        told = torch.zeros(module.num_experts, dtype=torch.int64, pin_memory=hidden.is_cuda)
        table, out = torch.zeros_like(told, device=hidden.device), torch.empty_like(hidden)
        self._held_by_graphs.append(table)
        graph, on_host = None, None
        if by_graph:
            graph = self._begin()
            table.copy_(told, non_blocking=True)
            out = self._backend.of_table(layer, *given, table)
            graph.end()
        if kernel is not None:
            rows = torch.zeros(index.numel(), kernel.hidden, dtype=torch.float32, pin_memory=hidden.is_cuda)
            there = torch.zeros_like(rows, device=hidden.device)
            self._held_by_graphs.append(there)
            before = self._begin()
            table.copy_(told, non_blocking=True)
            parts = self._backend.parts_of_table(layer, *given, table)
            before.end()
            behind = self._begin()
            there.copy_(rows, non_blocking=True)
            self._backend.sum_of(parts, out, there)
            behind.end()
            on_host = OnHost(cpu.TokenExperts(kernel, of_cpu[0], len(rows)), of_cpu[1], rows, before, behind, parts)
        ended = self.segments[-1]
        self._begin_segment()
        ended.call = ExpertsCall(paged, module, given, out, graph, told, ids, on_host, self.segments[-1].graph)
        return out

    # -- replaying
    def takes(self, given: Mapping[str, Any]) -> bool:
        """Whether these are inputs of the kind that was captured."""
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        return tensors.keys() == self.inputs.keys() and all(
            value.shape == self.inputs[name].shape and value.dtype == self.inputs[name].dtype for name, value in tensors.items()
        )

    def is_placed(self, cache: Any) -> bool:
        """Whether the next pass adds its token to this cache as things are: it is the one of the pass before, with room."""
        if self._there is None or any(getattr(layer, "noted", None) is not self._noted for layer in cache.layers):
            return False
        return list(map(TOKENS, cache.layers)) == self._there and max(self._there) < self._room

    def place(self, cache: Any, before: int = 0) -> None:
        """The next pass adds its token to this cache, or `before`: writes the last one again."""
        held = [layer.place(-before) for layer in cache.layers]
        memory = [part for keys, values, _ in held for part in (keys, values)]
        if len(memory) != len(self._held) or any(one is not held() for one, held in zip(memory, self._held)):
            rows = [(k.data_ptr(), v.data_ptr(), k.stride(1), v.stride(1)) for k, v, _ in held]
            self.places.copy_(upload([np.array(rows, dtype=np.int64)], self.places.device)[0])
            self._held, self._noted = list(map(weakref.ref, memory)), object()
            self._room = min(self.most_tokens, *(part.shape[2] for part in memory))
        for layer in cache.layers:
            layer.noted = self._noted
        lengths = [tokens - 1 for _, _, tokens in held]
        if lengths != self._there:
            self.lengths.copy_(upload([np.array(lengths, dtype=np.int64)], self.lengths.device)[0])
        self._there, self._behind = lengths, [tokens + 1 for tokens in lengths]

    def replay(
        self,
        given: Mapping[str, Any],
        experts: Callable[[ExpertsCall], bool] = ExpertsCall.compute,
        is_sound: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Leave the decoder's output in `hidden`, which the next pass overwrites. `experts` computes what lies between two
        graphs, and says whether it has replayed the second one. False: the first one was queued, and then the host found that
        what was captured is not sound."""
        assert self._there is not None, "the cache is placed"
        self._behind, self._there = [tokens + 1 for tokens in self._there], None
        for name, tensor in self.inputs.items():
            tensor.copy_(given[name])
        gone_on = False
        for number, segment in enumerate(self.segments):
            if not gone_on:
                segment.graph.replay()
            if number == 0 and not is_sound():
                return False
            for hook, residual in segment.heard:
                hook.look(residual)
            gone_on = segment.call is not None and experts(segment.call)
        self._there = self._behind
        return True

    @property
    def hidden(self) -> torch.Tensor:
        hidden: torch.Tensor = self.output.last_hidden_state
        return hidden

    def differs(self, example: Example, output: Any) -> str | None:
        """What of a replay of the example's token has other bits than the example; None: nothing. The cache is placed."""
        calls, newest = iter(example.calls), [part.clone() for part in self._newest()]

        def compared(call: ExpertsCall) -> bool:
            *given, out = next(calls)
            for what, one, other in zip(("input", "choice", "weights"), given, call.given):
                if not torch.equal(one, other):
                    raise UnsupportedModelError(f"the {what} of the experts of MoE layer {call.paged.layer} has other bits")
            call.out.copy_(out)
            return False

        try:
            self.replay(self.inputs, compared)
            why_not = None if torch.equal(self.hidden, output.last_hidden_state) else "its output has other bits"
        except UnsupportedModelError as error:
            why_not = str(error)
        for part, before in zip(self._newest(), newest) if why_not else ():
            part.copy_(before)
        return why_not

    def _newest(self) -> list[torch.Tensor]:
        """The keys and values of the token that the latest replay adds."""
        places = zip([held() for held in self._held], [after - 1 for after in self._behind for _ in range(2)])
        return [memory[..., at, :] for memory, at in places if memory is not None]

    def give_back(self, cache: Any) -> Any:
        """The output of a pass that was replayed, with the caller's cache."""
        named = {name: cache if name in CACHE_NAMES else value for name, value in self.output.items()}
        named["last_hidden_state"] = self.hidden.clone()
        return type(self.output)(**named)
