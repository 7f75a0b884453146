"""Peak of live tensor memory of a forward on the meta device: what the same forward would hold on a real device.

Every storage an operation returns is counted from birth to death, so the figure needs no formula per family. Three things
are replaced while measuring: fused attention (its meta kernel would materialise N x N), routed experts (one expert that gets
all tokens is the worst case), and tensors of constants that a model makes on the CPU (moved to meta).
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import _config as symbolic
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from vismoe.models.family.families import expert_parameters
from vismoe.models.moe.eager import expert_output

META = torch.device("meta")
# All rows are chosen by a mask or by nonzero(): the most it can be.
all_chosen = partial(symbolic.patch, meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


class LiveMemory(TorchDispatchMode):
    """Counts bytes of meta storages made inside the `with` block that are still alive, and their peak.

    Layers repeat each other, and torch computes shapes in Python, 0.2 ms per operation. So an operation on tensors of known
    shapes makes results like its first ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._results: dict[Any, tuple[Any, ...]] = {}  # of an operation and all that its results' shapes depend on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps `__torch_dispatch__` against being compiled, which does not happen here; each call takes a third longer."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        leaves: list[torch.Tensor] = []
        signature = (func, described(args, leaves), *kwargs, described(kwargs.values(), leaves))
        on_meta = [leaf.is_meta for leaf in leaves]
        if any(on_meta) and not all(on_meta):  # a constant of the CPU meets a meta tensor
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), (args, dict(kwargs)))
        repeatable = _makes_new_tensors(func) and (not leaves or any(on_meta))
        if repeatable and (like := self._results.get(signature)):
            with torch._C.DisableTorchFunction():
                made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in like]
            for tensor in made:
                self.count(tensor)
            return made[0] if len(made) == 1 else tuple(made)
        result = func(*args, **kwargs)
        known = {leaf.untyped_storage()._cdata for leaf in leaves}
        new = [tensor for tensor in tensors_in(result) if tensor.is_meta and tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            self.count(tensor)
        if repeatable and len(new) == len(func._schema.returns):
            self._results[signature] = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in new)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count this tensor's storage, once."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self.live_bytes -= nbytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@functools.cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether the operation neither changes a tensor nor returns a view, and each of its results is one tensor."""
    schema = func._schema
    each = [*schema.arguments, *schema.returns]
    return all(one.alias_info is None for one in each) and all(str(one.type) == "Tensor" for one in schema.returns)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the results of an operation, which torch nests in nothing else."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def described(values: Iterable[Any], leaves: list[torch.Tensor]) -> tuple[Any, ...]:
    """All that the shapes of an operation's results can depend on; equal numbers of other types are other values. The tensors
    among its arguments are added to `leaves`."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            leaves.append(value)
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            found.append(described(value, leaves))
        else:
            found += (type(value), value)
    return tuple(found)


class FusedAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by what its fused kernels hold: output, row sums, and a mask in the query's dtype.

    `padded_peak_bytes` is the peak inside attention if there were an explicit mask, without that mask: shared heads are repeated.
    """

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self.memory, self.padded_peak_bytes = memory, 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
        held = [torch.empty(query.shape[:-1], dtype=torch.float32, device=META)]
        if mask is not None and mask.dtype == torch.bool:
            held.append(torch.empty_like(mask, dtype=query.dtype))
        output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=META)
        if mask is None and query.shape[-2] > 1:
            heads = query.shape[:2].numel() if key.shape[1] != query.shape[1] else 0
            rows = sum(tensor.shape[-2:].numel() for tensor in (key, value))
            repeated_bytes = heads * rows * query.element_size()
            self.padded_peak_bytes = max(self.padded_peak_bytes, self.memory.live_bytes + repeated_bytes)
        return output


class ExpertsMemory:
    """Runs the experts of a measured forward as our kernels compute them, and beside that measures what torch would take.

    Kernels add into one float32 output and keep a workspace of their own, which is planned for apart.
    """

    def __init__(self, memory: LiveMemory, most_rows: int | None):
        """most_rows: of an expert, that torch computes at once."""
        self.torch_peak_bytes = 0

        def function(module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            peak_bytes, memory.peak_bytes = memory.peak_bytes, memory.live_bytes
            one_expert_for_all(module, hidden_states, index, weights, most_rows)
            self.torch_peak_bytes, memory.peak_bytes = max(self.torch_peak_bytes, memory.peak_bytes), peak_bytes
            return torch.zeros(hidden_states.shape, dtype=torch.float32, device=META).to(hidden_states.dtype)

        self.function = function


def one_expert_for_all(
    module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, most_rows: int | None = None
) -> torch.Tensor:
    """What the experts function holds at most: one expert that every token chose, as eager computes it. [T, H] -> [T, H]

    most_rows: of them, that are computed at once. Blocks are a little smaller; so no shorter prompt takes more than a longer one.
    """
    order, _ = torch.sort(index.flatten())
    out = torch.zeros_like(hidden_states)
    rows = torch.empty_like(hidden_states[: -(-len(hidden_states) // getattr(module, "row_groups", 1))])
    result = expert_output(module, {name: p[0] for name, p in expert_parameters(module).items()}, rows[:most_rows])
    result = rows if len(result) < len(rows) else result  # whose place the output takes
    result = result * torch.empty(len(rows), 1, dtype=weights.dtype, device=META)
    out[: len(rows)].add_(result.to(out.dtype))
    del order
    return out


@contextmanager
def forwards_replaced(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Run these experts modules with another function inside the block; their own comes back after it."""
    replaced = [(module, "run_experts" if hasattr(module, "run_experts") else "forward") for module in modules]
    for module, name in replaced:
        setattr(module, name, forward.__get__(module))
    try:
        yield
    finally:
        for module, name in replaced:
            delattr(module, name)
