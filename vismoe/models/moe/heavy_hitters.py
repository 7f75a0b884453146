"""How much attention each token of a prefill receives in the layers with routed experts; the most attended are heavy hitters.

DyMoE, equation 1: the mean over heads of the attention weight that a token receives. Here it is computed from the last `QUERIES`
real queries of a sequence only, and divided by the number of those that could see the token, so that tokens near the end have the
same scale.

Between `begin()` and `end()` the attention modules of those layers look up a function of this module in place of their own: it
sums the weights of a few queries and then calls their own function. It uses the queries and keys that the layer computes anyway,
and outputs are the same bit for bit. Outside of that interval nothing is installed. `source` says which attention counts for
which MoE layer, or why none does.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from vismoe.models.family.components import OUR_ATTENTION, is_vision
from vismoe.models.moe.attended import attended_bytes, attention_received, last_real
from vismoe.models.visual.saliency import allowed as allowed_by
from vismoe.models.visual.saliency import eager_function, own_function
from vismoe.types import MoELayer

QUERIES = 64  # per sequence, the last ones of a pass
IMPLEMENTATION = "vismoe_heavy_hitters"
HEARD_BY = "_vismoe_heavy_hitters"  # attribute of an attention module that holds its HeavyHitters
WRAPPED = ("sdpa", "eager", OUR_ATTENTION)  # implementations whose masks say which query sees which key
# By the decoder's model type: the reason.
UNUSABLE = {"deepseek_v4": "most of what its tokens attend to are summaries of several tokens"}
UNHEARD = ("softcap", "cache")  # attention arguments that would change the sums
DECODER_LAYER = re.compile(r"(.*?\w+)\.(\d+)\.")  # at the beginning of a module's path: (list of layers, index)
Places = slice | torch.Tensor


class Listened(str):
    """The name of an attention implementation, equal to the original name in comparisons, but with another hash.

    Some families compute other masks for unknown names, so the name must stay; a lookup, which hashes first, finds the function
    here.
    """

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) or other == IMPLEMENTATION

    def __hash__(self) -> int:
        return hash(IMPLEMENTATION)


class HeavyHitters:
    """Made by `HeavyHitters.of`; bound to one model, one pass at a time. `source` describes the observed layers."""

    def __init__(self, attends: dict[str, list[Any]], layers: dict[int, str], source: str):
        self.source = source
        self._attends = attends  # attention modules by the path of their decoder layer
        self._layers = layers  # for each MoE layer, the decoder layer whose attention counts
        self._real: np.ndarray | None = None
        self._asking: list[Places] | None = None  # the queries that are summed, per sequence
        self._latest: tuple[str, torch.Tensor] | None = None
        self._undo: list[Callable[[], object]] = []

    @classmethod
    def of(cls, model: Any, layers: tuple[MoELayer, ...]) -> "HeavyHitters | str":
        """The object for the given MoE layers, or the reason why their attention cannot be observed.

        A layer without such attention (for example with linear attention) uses the nearest one before it; vision towers are left
        out.
        """
        config = model.config.get_text_config()
        if config.model_type in UNUSABLE:
            return f"{config.model_type}: {UNUSABLE[config.model_type]}"
        attends = _attention_by_layer(model)
        decoder = [layer for layer in layers if not is_vision(layer.stack)]
        nearest = {layer.index: found for layer in decoder if (found := _nearest(attends, layer.path))}
        if not nearest:
            return "its decoder does not attend through transformers' interface"
        used = {path: attends[path] for path in nearest.values()}
        names = {module.config._attn_implementation for modules in used.values() for module in modules}
        if not names <= set(WRAPPED):
            return f"the decoder attends by {', '.join(sorted(names - set(WRAPPED)))}, which does not show its masks"
        own = sum(nearest.get(layer.index) == _decoder_layer(layer.path) for layer in decoder)
        source = f"attention received from the last {QUERIES} queries in {own} of {len(decoder)} MoE layers"
        if len(nearest) > own:
            source += f"; {len(nearest) - own} use the attention of the nearest layer before them"
        if len(decoder) > len(nearest):
            source += f"; the first {len(decoder) - len(nearest)} have no such layer"
        return cls(used, nearest, source)

    def begin(self, real: np.ndarray | None = None) -> None:
        """Begin to observe a prefill. `real` bool `[T]`: which of the B * S new tokens are not padding; None: all."""
        self.end()
        self._real = real
        configs: dict[int, Any] = {}
        for path, modules in self._attends.items():
            for module in modules:
                config = module.config
                name = config._attn_implementation
                if name not in WRAPPED:
                    continue
                function = own_function(module)
                if id(config) not in configs:  # layers share it; the model's own config is not changed
                    configs[id(config)] = copy.copy(config)
                    configs[id(config)]._attn_implementation_internal = Listened(name)
                module.config = configs[id(config)]
                setattr(module, HEARD_BY, (self, path, function))
                self._undo.append(partial(_give_back, module, config))

    def narrow(self, kept: np.ndarray) -> None:
        """From now on the layers of this pass see only `kept` int32 `[T]` of its tokens, -1 for pad slots."""
        self._real, self._asking = kept >= 0, None
        if self._latest is not None:
            path, received = self._latest
            rows = torch.from_numpy(kept).to(received.device).long()
            self._latest = path, received[rows.clamp(min=0)].masked_fill_(rows < 0, 0.0)

    def received(self, layer: int) -> np.ndarray | None:
        """Attention that the tokens of this pass received, float32 `[T]`, 0 for padding; None if nothing was observed.

        Call it when the experts of MoE layer `layer` run: the latest attention counts.
        """
        if self._latest is None or self._latest[0] != self._layers.get(layer):
            return None
        received = self._latest[1].cpu().numpy()
        # Zero if a cache has free slots after the new tokens, which were then not observed.
        return received if received.any() else None

    def end(self) -> None:
        """Stop observing, undo the changes to the model, and discard the sums."""
        while self._undo:
            self._undo.pop()()
        self._real = self._asking = self._latest = None

    def hear(
        self, path: str, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, options: dict[str, Any]
    ) -> None:
        """Sums the attention of the decoder layer at `path`; arguments as for attention functions, `causal` if `mask` is None."""
        batch, _, new, width = query.shape
        others = self._real is not None and self._real.size != batch * new
        if others or any(options.get(name) is not None for name in UNHEARD):
            return
        if self._asking is None:
            real = np.ones((batch, new), bool) if self._real is None else self._real.reshape(batch, new)
            self._asking = [_places(rows, query.device) for rows in last_real(real, QUERIES)]
        if mask is None and causal and new > 1:
            key = key[:, :, :new]  # torch's causal mask begins at the first key; free slots of a cache may follow
        scaling = options.get("scaling") or width**-0.5
        parts = []
        for row, asking in enumerate(self._asking):
            asked = _of_row(query, row, asking) * scaling
            allowed = _lower(asking, new, key, causal) if mask is None else allowed_by(_of_row(mask, row, asking))
            bias, sinks = (_of_row(options.get(name), row, asking) for name in ("position_bias", "sinks"))
            if options.get("s_aux") is not None:
                sinks = options["s_aux"].view(-1, 1, 1)
            parts.append(attention_received(asked, key[row], allowed, new, bias, sinks))
        self._latest = path, torch.cat(parts)


def hitters_bytes(model: Any, context_tokens: int) -> int:
    """The most bytes held in a prefill of up to so many tokens, if attention can be observed."""
    config: Any = model.config.get_text_config()
    counts = [count for name, count in vars(config).items() if "attention_heads" in name]  # some families differ between layers
    heads = max(int(np.max(count)) for count in (config.num_attention_heads, *counts))
    widths = [width for name, width in vars(config).items() if name.endswith("head_dim") and isinstance(width, int)]
    width = max(widths, default=config.hidden_size // config.num_attention_heads)
    summed = torch.float32.itemsize * 4 * context_tokens  # sums, counts, results
    return attended_bytes(heads, width, QUERIES, context_tokens, model.dtype.itemsize) + summed


def listening_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Returns the result of the module's own function; query `[B, heads, S, D]`, key `[B, key heads, n, D]`, then the mask."""
    hitters, path, function = getattr(module, HEARD_BY)
    mask = args[0] if args else options.get("attention_mask")
    causal = options.get("is_causal")
    with torch.no_grad():
        hitters.hear(path, query, key, mask, getattr(module, "is_causal", True) if causal is None else causal, options)
    return function(module, query, key, value, *args, **options)


def _places(rows: np.ndarray, device: torch.device) -> Places:
    """Ascending rows int64 as an index, which copies nothing if they are adjacent."""
    together = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else torch.from_numpy(rows).to(device)


def _of_row(value: Any, row: int, asking: Places) -> Any:
    """Of a tensor `[1 or B, 1 or heads, S, ...]` (or None), the part `[1 or heads, asking, ...]` of one sequence."""
    return None if value is None else value[row if len(value) > 1 else 0][:, asking]


def _lower(asking: Places, new: int, key: torch.Tensor, causal: bool) -> torch.Tensor:
    """Which query sees which key without a mask: bool `[1, Q, n]`; the last of the keys `[B, key heads, n, D]` are the new
    tokens."""
    places = torch.arange(key.shape[2], device=key.device)
    last = places[places.numel() - new :][asking] if causal else places[-1:].expand(new)[asking]
    return (places <= last[:, None])[None]


def _attention_by_layer(model: nn.Module) -> dict[str, list[Any]]:
    """Modules that attend to tokens through transformers' interface, by the path of their decoder layer, in model order. (Some
    families attend to the outputs of earlier layers, too, in modules that belong to no layer of the cache.)"""
    found: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if (
            hasattr(module, "config")
            and hasattr(module, "layer_idx")
            and eager_function(type(module).forward)
            and (path := _decoder_layer(name))
        ):
            found.setdefault(path, []).append(module)
    return found


def _decoder_layer(path: str) -> str | None:
    """`model.layers.3` for a module at `model.layers.3.self_attn`."""
    found = DECODER_LAYER.match(path)
    return found and found.group(0)[:-1]


def _nearest(attends: dict[str, list[Any]], path: str) -> str | None:
    """The last decoder layer that attends, up to and including the one that contains the module at `path`."""
    stack, _, place = str(_decoder_layer(path)).rpartition(".")
    places = [int(other.rpartition(".")[2]) for other in attends if other.rpartition(".")[0] == stack]
    return max(((n, f"{stack}.{n}") for n in places if n <= int(place)), default=(0, None))[1]


def _give_back(module: Any, config: Any) -> None:
    module.config = config
    delattr(module, HEARD_BY)


AttentionInterface.register(IMPLEMENTATION, listening_attention)
