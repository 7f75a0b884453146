"""The `gate` lookahead: ask the next layers' own routers about the present residual stream. Needs no training.

After attention of layer l, the residual stream already resembles what layers l+1 ... l+W will route (DyMoE, equation 6, looks one
layer ahead; we look W). Families whose decoder layers are not `norm -> router` on the residual stream have none, and say so.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vismoe.types import ExpertInventory

NORMS = ("post_attention_layernorm", "ffn_norm", "pre_ff_layernorm")  # the norm between the residual stream and the MoE block
OTHER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # then the ones above norm something else
ROUTERS = ("gate", "router")


@dataclass(frozen=True)
class RoutedLayer:
    norm: nn.Module
    router: nn.Module
    biases: dict[str, torch.Tensor]  # what some routers take beside the hidden states, e.g. lfm2_moe's expert_bias
    top_k: int
    num_experts: int


class GateLookahead:
    """Scores of the next W MoE layers from their own norms and routers. Made by `GateLookahead.of`."""

    def __init__(self, layers: list[RoutedLayer], window: int):
        self._layers, self._window = layers, window
        self._residual: tuple[int, torch.Tensor] | None = None
        for index, layer in enumerate(layers):
            layer.norm.register_forward_pre_hook(self._capture(index))

    @classmethod
    def of(cls, model: nn.Module, inventory: ExpertInventory, window: int) -> "GateLookahead | str":
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
            layers.append(RoutedLayer(norms[0], routers[0], _biases(block, routers[0]), moe.top_k, moe.num_experts))
        if len({id(layer.norm) for layer in layers}) != len(layers):
            return "several experts modules share a decoder layer"
        try:
            probe = next(layers[0].norm.parameters())
            _predict(layers[0], torch.zeros(1, probe.shape[-1], dtype=probe.dtype, device=probe.device))
        except (RuntimeError, TypeError, ValueError, IndexError, StopIteration) as error:
            return f"the router of {layers[0].router.__class__.__name__} cannot be asked on its own ({error})"
        return cls(layers, window)

    def _capture(self, index: int) -> Any:
        def hook(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._residual = (index, args[0])

        return hook

    @torch.no_grad()
    def scores(self, layer: int, decoding: bool) -> np.ndarray | None:
        """`[W, E]` float32 for the MoE layers after `layer` (fewer rows at the end), 0 where an expert is not expected.

        Decode: 1 + probability of the experts each router would choose now, the most over the tokens. Prefill, where nearly all
        experts are wanted: one layer ahead only, the share of the tokens that would choose the expert.
        """
        if self._residual is None or self._residual[0] != layer:
            return None
        residual = self._residual[1].reshape(-1, self._residual[1].shape[-1])
        ahead = self._layers[layer + 1 : layer + 1 + (self._window if decoding else 1)]
        if not ahead:
            return None
        most = max(routed.num_experts for routed in ahead)
        scores = torch.zeros(len(ahead), most, device=residual.device)
        for row, routed in zip(scores, ahead, strict=True):
            chosen, probability = _predict(routed, residual)
            if decoding:
                best = torch.zeros_like(probability).scatter_(1, chosen, 1.0) * (1 + probability)
                row[: routed.num_experts] = best.amax(dim=0)
            else:
                row[: routed.num_experts] = torch.bincount(chosen.reshape(-1), minlength=routed.num_experts) / len(residual)
        self._residual = None  # not needed any more
        return scores.cpu().numpy()


def _biases(block: nn.Module, router: nn.Module) -> dict[str, torch.Tensor]:
    """A router's further arguments, which its block owns under the same names."""
    owned = {**dict(block.named_buffers(recurse=False)), **dict(block.named_parameters(recurse=False))}
    return {name: owned[name] for name in inspect.signature(router.forward).parameters if name in owned}


def _predict(routed: RoutedLayer, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ids `[T, K]`, probabilities `[T, E]`) of one layer's router on a residual stream `[T, H]`.

    Routers return logits, weights and ids in an order that differs by family; types and shapes tell them apart. The ids are the
    router's own, since some families choose by more than the logits.
    """
    normed = type(routed.norm).forward(routed.norm, residual)  # past the hooks: nobody else asked for these calls
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
