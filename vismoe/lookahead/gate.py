"""The `gate` lookahead: runs the next layers' own routers on the current residual stream. Needs no training.

After the attention of layer l, the residual stream already resembles the one that layers l+1 ... l+W will route (DyMoE, equation
6, looks one layer ahead; this module looks W ahead). Families whose decoder layers are not `norm -> router` on the residual
stream have no gate lookahead; `of` returns the reason.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vismoe.lookahead.lookahead import PREFILL_LAYERS, Seen, rows_of
from vismoe.pools.readback import on_host
from vismoe.types import ExpertInventory

NORMS = ("post_attention_layernorm", "ffn_norm", "pre_ff_layernorm")  # the norm between the residual stream and the MoE block
OTHER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # if these exist, the norms above serve another purpose
ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class Residual:
    """The residual stream of some tokens at one layer, after attention."""

    layer: int
    decoding: bool
    rows: torch.Tensor  # [n, H]


@dataclass(frozen=True)
class RoutedLayer:
    norm: nn.Module
    router: nn.Module
    biases: dict[str, torch.Tensor]  # arguments of some routers beside the hidden states, e.g. lfm2_moe's expert_bias
    top_k: int
    num_experts: int
    dtype: torch.dtype  # of the router's input; norms, routers and the residual stream may have other types


class GateLookahead:
    """Scores of the next W MoE layers from their own norms and routers. Made by `GateLookahead.of`."""

    remembers = False
    memory = None

    def __init__(self, layers: list[RoutedLayer], window: int):
        self._layers, self.window = layers, window
        self._residual: tuple[int, torch.Tensor] | None = None
        self._plain = PlainRouters.of(layers)
        for index, layer in enumerate(layers):
            layer.norm.register_forward_pre_hook(Capture(self, index))

    @classmethod
    def of(cls, model: Any, inventory: ExpertInventory, window: int) -> "GateLookahead | str":
        """The lookahead of a loaded model, or the reason why its family has none."""
        layers = []
        for moe in inventory.layers:
            block_path = moe.path.rpartition(".")[0]
            decoder_path, _, rest = moe.path.rpartition(".layers.")
            if not decoder_path:
                return f"{moe.path} is not inside a stack of decoder layers"
            decoder_layer = model.get_submodule(f"{decoder_path}.layers.{rest.split('.')[0]}")
            block = model.get_submodule(block_path)
            norms = [getattr(decoder_layer, name) for name in NORMS if hasattr(decoder_layer, name)]
            routers = [getattr(block, name) for name in ROUTERS if isinstance(getattr(block, name, None), nn.Module)]
            if len(norms) != 1 or len(routers) != 1 or any(hasattr(decoder_layer, name) for name in OTHER_NORMS):
                return f"{type(decoder_layer).__name__} does not have one norm and one router before its experts"
            biases = biases_of(block, routers[0])
            layers.append(RoutedLayer(norms[0], routers[0], biases, moe.top_k, moe.num_experts, model.dtype))
        if len({id(layer.norm) for layer in layers}) != len(layers):
            return "several experts modules share a decoder layer"
        for layer in layers:
            try:
                weight = next(layer.norm.parameters())
                _predict(layer, torch.zeros(1, weight.shape[-1], dtype=layer.dtype, device=weight.device))
            except (RuntimeError, TypeError, ValueError, IndexError, StopIteration) as error:
                return f"the router of {layer.router.__class__.__name__} cannot run on its own ({error})"
        return cls(layers, window)

    def capture(self, layer: int, residual: torch.Tensor) -> None:
        """The residual stream `[.., H]` at `layer`, after attention."""
        self._residual = layer, residual

    def begin_request(self) -> None:
        self._residual = None

    def observe(self, layer: int, chosen: np.ndarray) -> None:
        """Stores nothing; `Capture` keeps the residual stream."""

    def residual(self, layer: int) -> torch.Tensor | None:
        """The residual stream `[T, H]` at `layer`; None if the latest one is that of another layer."""
        if self._residual is None or self._residual[0] != layer:
            return None
        return self._residual[1].reshape(-1, self._residual[1].shape[-1])

    def forget(self) -> None:
        """Release the residual stream, which this layer no longer needs."""
        self._residual = None

    def snapshot(self, seen: Seen) -> Residual | None:
        residual = self.residual(seen.layer)
        if residual is None or seen.layer + 1 >= len(self._layers):
            return None
        return Residual(seen.layer, seen.decoding, rows_of(residual, seen))

    @torch.inference_mode()
    def evaluate(self, snapshot: Residual) -> np.ndarray:
        """Decode: 1 + probability for the experts that each router would choose now, the maximum over tokens. Prefill, which uses
        nearly all experts: only one layer ahead, the share of the tokens that would choose the expert."""
        chosen, probability = self._ask(snapshot.layer, snapshot.rows, self.window if snapshot.decoding else PREFILL_LAYERS)
        scores = (chosen * (1 + probability)).amax(dim=1) if snapshot.decoding else chosen.mean(dim=1)
        return on_host(scores)[0]

    @torch.inference_mode()
    def expected(self, layer: int, rows: torch.Tensor, experts: int) -> np.ndarray:
        """What the next W layers' routers predict for `rows` [n, H]: `[2, W, experts]`, the share of the rows that would choose
        each expert, and its mean probability; zeros past the last layer."""
        said = np.zeros((2, self.window, experts), np.float32)
        if layer + 1 == len(self._layers):
            return said
        chosen, probability = self._ask(layer, rows, self.window)
        said[:, : len(chosen), : chosen.shape[-1]] = on_host(chosen.mean(dim=1), probability.mean(dim=1))
        return said

    def _ask(self, layer: int, rows: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the routers of the next layers on `rows` [n, H]: (1 if a router would choose the expert, its probability), both
        `[W', n, E]` float32."""
        first, last = layer + 1, min(layer + 1 + window, len(self._layers))
        if self._plain is not None:
            return self._plain.ask(first, last, rows)
        most = max(routed.num_experts for routed in self._layers[first:last])
        said = torch.zeros(2, last - first, len(rows), most, device=rows.device)
        for chosen, probability, routed in zip(said[0], said[1], self._layers[first:last], strict=True):
            ids, likely = _predict(routed, rows)
            chosen.scatter_(1, ids, 1.0)
            probability[:, : routed.num_experts] = likely
        return said[0], said[1]


class Capture:
    """A forward pre-hook of the norm behind a layer's attention. It only looks at what the norm is given; code that computes
    the norm without its module calls `look`."""

    def __init__(self, gate: GateLookahead, layer: int):
        self._gate, self._layer = gate, layer

    def __call__(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.look(args[0])

    def look(self, residual: torch.Tensor) -> None:
        self._gate.capture(self._layer, residual)
        if (heard := getattr(_hearing, "heard", None)) is not None:
            heard.append((self, residual))


_hearing = threading.local()


@contextlib.contextmanager
def hearing() -> Iterator[list[tuple[Capture, torch.Tensor]]]:
    """What this thread's hooks were shown within, for passes that are replayed without calling any: they `look` again."""
    _hearing.heard = heard = list[tuple[Capture, torch.Tensor]]()
    try:
        yield heard
    finally:
        _hearing.heard = None


class PlainRouters:
    """All routers in one call, if each is a linear layer and a softmax after a root-mean-square norm: a tenth of the calls, which
    matters while a model runs. `of` makes it, and compares it with the modules themselves."""

    def __init__(self, norms: torch.Tensor, eps: float, weights: Sequence[torch.Tensor], top_k: int, dtype: torch.dtype):
        self._norms, self._eps, self._weights, self._top_k, self._dtype = norms, eps, weights, top_k, dtype

    @classmethod
    def of(cls, layers: list[RoutedLayer]) -> "PlainRouters | None":
        """None for other kinds of routers, and if layers differ in their parts."""
        norms = [list(layer.norm.parameters()) for layer in layers]
        weights = [list(layer.router.parameters()) for layer in layers]
        epsilons = {getattr(layer.norm, "variance_epsilon", getattr(layer.norm, "eps", None)) for layer in layers}
        eps = epsilons.pop()
        if any(len(found) != 1 for found in (*norms, *weights)) or epsilons or not isinstance(eps, float):
            return None
        shapes = {
            (layer.num_experts, layer.top_k, *norm.shape, *weight.shape)
            for layer, [norm], [weight] in zip(layers, norms, weights)
        }
        if len(shapes) != 1 or weights[0][0].ndim != 2:
            return None
        with torch.no_grad():
            stacked, routers = torch.stack([norm for [norm] in norms])[:, None], [weight for [weight] in weights]
            plain = cls(stacked, eps, routers, layers[0].top_k, layers[0].dtype)
        return plain if plain._agrees(layers) else None

    @torch.no_grad()
    def _agrees(self, layers: list[RoutedLayer]) -> bool:
        """Whether every router gives the same result for some vectors as its modules."""
        probe = torch.randn(4, self._norms.shape[-1], generator=torch.Generator().manual_seed(0))
        probe = probe.to(self._norms.device, self._dtype)
        try:
            chosen, probability = self.ask(0, len(layers), probe)
        except RuntimeError:
            return False
        for layer, mine, likely in zip(layers, chosen, probability, strict=True):
            ids, wanted = _predict(layer, probe)
            if not torch.equal(torch.zeros_like(mine).scatter_(1, ids, 1.0), mine) or not torch.allclose(
                likely, wanted, atol=1e-3
            ):
                return False
        return True

    def ask(self, first: int, last: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(1 if the routers of layers first ... last - 1 would choose an expert, its probability), `[W', n, E]` float32."""
        rows = nn.functional.rms_norm(rows.float(), rows.shape[-1:], eps=self._eps).to(self._dtype)
        normed = (self._norms[first:last] * rows).to(self._dtype)  # [W', n, H]
        weights = self._weights[first:last]
        logits = torch.stack([nn.functional.linear(x.to(weight.dtype), weight) for x, weight in zip(normed, weights)])
        probability = logits.float().softmax(-1)
        ids = probability.topk(self._top_k, dim=-1).indices
        return torch.zeros_like(probability).scatter_(-1, ids, 1.0), probability


def biases_of(block: nn.Module, router: nn.Module) -> dict[str, torch.Tensor]:
    """A router's further arguments, which are attributes of its block under the same names."""
    owned = {**dict(block.named_buffers(recurse=False)), **dict(block.named_parameters(recurse=False))}
    return {name: owned[name] for name in inspect.signature(type(router).forward).parameters if name in owned}


def _predict(routed: RoutedLayer, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ids `[T, K]`, probabilities `[T, E]`) of one layer's router on a residual stream `[T, H]`.

    Routers return logits, weights and ids in an order that differs by family; types and shapes tell them apart. The ids are the
    router's own, since some families choose by more than the logits.
    """
    # Bypasses the hooks, which are for the model's own calls.
    normed = type(routed.norm).forward(routed.norm, residual).to(routed.dtype)
    result = type(routed.router).forward(routed.router, normed, **routed.biases)
    tensors = [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]
    logits = next((t for t in tensors if t.is_floating_point() and t.shape[-1] == routed.num_experts), None)
    ids = next((t for t in tensors if not t.is_floating_point() and t.shape[-1] == routed.top_k), None)
    if logits is None:
        raise ValueError(f"it returns no scores over {routed.num_experts} experts")
    probability = logits.reshape(-1, routed.num_experts).float().softmax(-1)
    if ids is None:
        ids = probability.topk(routed.top_k, dim=-1).indices
    return ids.reshape(-1, routed.top_k), probability
