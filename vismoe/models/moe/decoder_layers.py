"""Lets one call of the CPU kernels compute what single tokens pass through in decoder layers.

The call makes the same numbers as the layer's own modules, which the kernels compute by then, bit for bit: they are compared on
a token of made-up numbers. Where they differ, or a pass is of another kind, or a hook listens to a module in between, the layer
runs its own code. If the feed-forward block is a router that the kernels know and its experts, and these are resident, the call
computes them, too; otherwise the experts are demanded, or the block's module runs.

With its experts, a layer's call goes on to the layers behind it: the interpreter, whose memory the weights have pushed out of the
caches, takes as long between two layers as a tenth of a layer. Each of these hands out its output when the decoder calls it, if
the decoder gives it what the call has computed with, to the bit; its token counts as cached from then on. Otherwise it computes
again, and calls end before it from then on.
"""

import copy
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules import module as everywhere
from transformers import DynamicCache
from transformers.utils import output_capturing

from vismoe.kernels import cpu
from vismoe.kernels.attention import COLUMNS
from vismoe.kernels.decoder_layer import Cached, CalledLayer, DecoderLayer, HeadShape, Router, RowNorm, Weight, run_layers
from vismoe.kernels.rows import NUMBER_OF
from vismoe.lookahead.gate import Capture
from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.family.mtp import of_mtp
from vismoe.models.moe.attention import IMPLEMENTATION
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.heavy_hitters import HEARD_BY
from vismoe.models.moe.linears import EncodedLinear
from vismoe.models.moe.norms import norm_form
from vismoe.models.moe.own_forward import give_forward
from vismoe.models.moe.rotary import is_served
from vismoe.models.moe.routers import chosen_by
from vismoe.models.moe.rows import RowsCache, RowsLayer, running_rows, served_by_row
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.types import Format

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")
KNOWN = frozenset({CACHE, "attention_mask", "position_embeddings", "position_ids", "use_cache"})  # what a layer may be given
EVERYWHERE = (everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks)  # hooks of all modules
MOST_LAYERS = 16  # of one call, which nothing interrupts
MOST_ANGLES = 4  # that a decoder makes for a pass, for several kinds of layers
CACHED_TOKENS = 5  # before the token that layers are compared on


def serve_decoder_layers(model: nn.Module) -> tuple[int, int]:
    """Make one call compute the decoder's layers for single tokens; returns how many layers these are, and how many with their
    experts. The modules within must be served before."""
    served: list[tuple[nn.Module, ServedLayer]] = []
    decoders: list[str] = []
    with torch.inference_mode():
        for path, module in model.named_modules():
            if "forward" in module.__dict__ or is_vision(path) or of_mtp(path):
                continue
            if (layer := ServedLayer.of(module)) is not None:
                served.append((module, layer))
                decoders.append(path.rpartition(".")[0])
    watch = LayerWatch([layer for _, layer in served], decoders)
    give_forward(((module, layer, watch) for module, layer in served), _forward)
    return len(served), sum(layer.experts is not None for _, layer in served)


def served_layers(model: nn.Module) -> Iterator["ServedLayer"]:
    """Those of `serve_decoder_layers`."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            yield forward.args[1]


def _forward(
    reference: Any, served: "ServedLayer", watch: "LayerWatch", hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not args and watch.fit(kwargs) and (made := served.run(hidden_states, kwargs, watch)) is not None:
        return made
    module = reference()
    return type(module).forward(module, hidden_states, *args, **kwargs)


class NewTokens(NamedTuple):
    """Where the keys and values of each sequence's new token go, and what to call when they are there."""

    places: Sequence[Cached]
    written: Callable[[], None]


class Ahead(NamedTuple):
    """What a call has computed of a layer that the decoder had not called yet: in a pass with these angles, with these places for
    new tokens. out `[n, 1, H]`, None: only the first half."""

    angles: Any
    places: Sequence[Cached]
    out: torch.Tensor | None


class LayerWatch:
    """Looks once for each pass whether the layers' modules would do what was compared: nothing listens to them, none has been
    replaced, and what they are given is known. A pass is told by its angles, which a decoder makes once for all layers."""

    def __init__(self, layers: Sequence["ServedLayer"], decoders: Sequence[str]):
        """decoders: where each layer is."""
        self._attentions = [(layer.attention, layer.native.scale) for layer in layers]
        self._natives = list({layer.native.shape: layer.native for layer in layers}.values())
        self._norms = [layer.behind for layer in layers]
        silent = [module for layer in layers for module in layer.silent]
        heard = [*silent, *self._norms]
        self._forwards = _Things([module.__dict__ for module in heard], ["forward"] * len(heard))
        self._listeners = [hooks for module in silent for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._listeners += [layer.behind._forward_hooks for layer in layers]
        places = [place for layer in layers for place in layer.places]
        self._parts = _Things([held for held, _ in places], [name for _, name in places])
        self._tensors = [thing for thing in self._parts.there if isinstance(thing, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        # By the identity of angles: these, their cache (weak), whether all fits.
        self._seen: dict[int, tuple[Any, Any, bool]] = {}
        at = [(decoder, layer.index) for decoder, layer in zip(decoders, layers, strict=True)]
        self._behind = {layer: _following(layers[place:], at[place:]) for place, layer in enumerate(layers)}
        self._apart: set[ServedLayer] = set()  # are given something else than the output of the layer before
        self._ahead: dict[ServedLayer, Ahead] = {}
        self._at_once = 1  # layers that the next call tries

    def fit(self, given: Mapping[str, Any]) -> bool:
        angles, cache = given.get("position_embeddings"), given.get(CACHE)
        if cache is None or given.get("attention_mask") is not None or type(angles) is not tuple or len(angles) != 2:
            return False
        seen = self._seen.get(id(angles))
        if seen is None:
            if not all(native.takes_angles(*angles) for native in self._natives):  # of prompts, which are not kept
                return False
            if len(self._seen) >= MOST_ANGLES:
                self._seen.clear()
            seen = self._seen[id(angles)] = angles, weakref.ref(cache), self._look(given)
        return seen[2] and cache is seen[1]()

    def computed(
        self, layer: "ServedLayer", paged: PagedLayer, hidden: torch.Tensor, given: Mapping[str, Any], new: "NewTokens"
    ) -> torch.Tensor | None:
        """The layer's output, of this call or of an earlier one; None: of its first half alone, see `DecoderLayer.first_half`."""
        angles, found = given["position_embeddings"], self._ahead.pop(layer, None)
        if found is not None and found.angles is angles:
            if all(map(_same_place, found.places, new.places)) and layer.native.was_given(hidden):
                return found.out
            self._apart.add(layer)
        calls = [(layer, paged, new.places)]
        for later in self._behind[layer][: self._at_once - 1]:
            other, more = later.paged, later.new_tokens(hidden, given)
            if other is None or more is None or other.context is not paged.context:
                break
            if later in self._apart or not later.is_unheard:
                break
            calls.append((later, other, more.places))
        self._ahead = {}
        outs, begun = paged.run_layers([(one.layer, each.native, places) for each, one, places in calls], hidden, angles)
        self._at_once = min(2 * len(calls), MOST_LAYERS) if len(outs) == len(calls) else max(len(outs), 1)
        made: list[torch.Tensor | None] = [*outs, *([None] if begun else [])]
        if not made:
            run_layers([CalledLayer(layer.native, new.places)], hidden, *angles)
            return None
        self._ahead = {each: Ahead(angles, places, out) for (each, _, places), out in zip(calls[1:], made[1:])}
        return made[0]

    def _look(self, given: Mapping[str, Any]) -> bool:
        if torch.is_grad_enabled() or cpu.setup().isa == "portable":
            return False
        return (
            all(name in KNOWN or value is None or value is False for name, value in given.items())
            and not any(map(_listens, filter(None, (*self._listeners, *EVERYWHERE))))
            and all(type(hook) is Capture for norm in self._norms for hook in norm._forward_pre_hooks.values())
            and all(_as_compared(attention, scale) for attention, scale in self._attentions)
            and (self._forwards.stay() or all(map(_same_forward, self._forwards.now(), self._forwards.there)))
            and self._parts.stay()
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
        )


def _following(layers: Sequence["ServedLayer"], places: Sequence[tuple[str, int]]) -> Sequence["ServedLayer"]:
    """What the decoder of the first of these layers calls next, one after another, by the places of all."""
    decoder, index = places[0]
    expected = ((decoder, index + later) for later in range(1, MOST_LAYERS))
    count = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(places[1:], expected)))
    return layers[1 : 1 + count]


def _same_place(one: Cached, other: Cached) -> bool:
    return one.keys is other.keys and one.values is other.values and one.tokens == other.tokens


def _listens(hooks: Mapping[Any, Any]) -> bool:
    """Whether one of the hooks does something now. Those with which transformers collects outputs stay when it has them."""
    return any(
        not isinstance(hook, FunctionType)
        or hook.__module__ != output_capturing.__name__
        or bool(output_capturing._active_collector.get())
        for hook in hooks.values()
    )


class _Things:
    """What dictionaries hold by these names, `there` at first; looked at once for each token, so without a loop in Python."""

    def __init__(self, held: Sequence[dict[str, Any]], names: Sequence[str]):
        self._held, self._names = held, names
        self.there = list(self.now())

    def now(self) -> Iterator[Any]:
        return map(dict.get, self._held, self._names)

    def stay(self) -> bool:
        return all(map(operator.is_, self.now(), self.there))


def _same_forward(now: Any, forward: Any) -> bool:
    """Whether a module with this forward computes as when it was compared with that one, or so by row in shared passes."""
    return now is forward or (forward is not None and served_by_row(now) is forward)


def _as_compared(attention: Any, scale: float) -> bool:
    config = object.__getattribute__(attention.config, "__dict__")  # past transformers' own lookup, which is slow
    usual = config["_attn_implementation_internal"] == IMPLEMENTATION and HEARD_BY not in attention.__dict__
    return usual and not attention.training and attention.scaling == scale


@dataclass(frozen=True, eq=False)
class ServedLayer:
    """A decoder layer whose first half `native` computes."""

    native: DecoderLayer
    index: int  # of its keys and values in a cache
    attention: nn.Module
    behind: nn.Module  # the norm before the block
    block: nn.Module
    experts: nn.Module | None  # of a block that is nothing but the router of `native` and these
    silent: tuple[nn.Module, ...]  # modules that do not run
    places: tuple[tuple[Mapping[str, Any], str], ...]  # where modules hold modules and weights, and their names

    @classmethod
    def of(cls, layer: nn.Module) -> "ServedLayer | None":
        """Of a decoder layer that is norm, attention, residual, norm, block and residual; None for any other module."""
        parts = _Parts.of(layer)
        if parts is None:
            return None
        for before, behind in (parts.norms, parts.norms[::-1]):
            native = parts.native(before, behind, None)
            if native is None or (given := parts.agrees(layer, native)) is None:
                continue
            router, experts = parts.routed(given) or (None, None)
            if router is not None:
                native = parts.native(before, behind, router)
            assert native is not None
            silent = [before, parts.attention, *parts.attention.children()]
            if router is not None:
                silent += [parts.block, *(module for module in parts.block.children() if module is not experts)]
            places = [
                (held, name)
                for module in (*silent, behind)
                for held in (module._parameters, module._buffers, module._modules)
                for name in held
            ]
            children = (before, behind, parts.attention, parts.block)
            places += [(layer._modules, name) for name, child in layer.named_children() if child in children]
            index = int(parts.attention.layer_idx)  # type: ignore[arg-type]
            return cls(native, index, parts.attention, behind, parts.block, experts, tuple(silent), tuple(places))
        return None

    def run(self, hidden: torch.Tensor, given: Mapping[str, Any], watch: LayerWatch) -> torch.Tensor | None:
        """The layer's output `[n, 1, H]` for the latest tokens of n sequences; None: its modules must compute it."""
        new, paged = self.new_tokens(hidden, given), self.paged
        if new is None or (paged is not None and not paged.is_mine):
            return None
        out, whole = None, self.is_unheard
        if paged is not None and whole:
            out = watch.computed(self, paged, hidden, given, new)
        else:
            run_layers([CalledLayer(self.native, new.places)], hidden, *given["position_embeddings"])
        new.written()
        if paged is not None and out is not None:
            paged.computed_short(self.native.chosen)
            return out
        residual, normed, weights, ids = self.native.first_half()
        self._look(residual)
        if self.experts is None:
            return residual + self.block(normed)
        assert weights is not None and ids is not None
        demanded = self.experts if paged is None or not whole else partial(paged.demanded, self.experts)
        return residual + demanded(normed[:, 0], ids, weights)[:, None]

    @property
    def paged(self) -> PagedLayer | None:
        """What computes the experts of `native`'s router, if these are paged."""
        return None if self.experts is None else cast("PagedLayer | None", self.experts.__dict__.get("_vismoe_layer"))

    @property
    def is_unheard(self) -> bool:
        """Whether nothing listens to the experts' module."""
        return self.experts is None or not (self.experts._forward_pre_hooks or self.experts._forward_hooks)

    def _look(self, residual: torch.Tensor) -> None:
        for hook in self.behind._forward_pre_hooks.values():
            assert isinstance(hook, Capture)  # `LayerWatch` has looked
            hook.look(residual)

    def new_tokens(self, hidden: torch.Tensor, given: Mapping[str, Any]) -> NewTokens | None:
        """Where the new keys and values of each sequence go; None: hidden states or a cache that are the modules' business."""
        cache: Any = given.get(CACHE)
        count, running, index = hidden.shape[0], running_rows(), self.index
        if not self.native.takes(hidden) or given["position_embeddings"][0].shape[0] != count:
            return None
        if running is None and type(cache) is DynamicCache and count == 1 and index < len(cache.layers):
            only = cache.layers[index]
            fits = isinstance(only, GrowingLayer) and only.has_room(1)
            return NewTokens((Cached(*only.place()),), only.one_more) if fits else None
        if running is not cache or type(cache) is not RowsCache:
            return None
        layer = cache.layers[index]
        if type(layer) is not RowsLayer or len(layer.rows) != count or not layer.kept:
            return None
        if not all(isinstance(row, GrowingLayer) and row.has_room(count) for row in layer.rows):
            return None
        before: Counter[int] = Counter()  # rows of the same sequence so far
        places = []
        for row in layer.rows:
            places.append(Cached(*row.place(before[id(row)])))
            before[id(row)] += 1
        return NewTokens(places, layer.one_more)


@dataclass(frozen=True)
class _Parts:
    """What a decoder layer is made of, as far as its modules' names and shapes say."""

    attention: nn.Module
    block: nn.Module
    norms: tuple[nn.Module, nn.Module]  # in either order
    projections: tuple[nn.Module, ...]
    of_heads: tuple[RowNorm | None, ...]
    shape: HeadShape
    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: nn.Module) -> "_Parts | None":
        attentions = [child for child in layer.children() if all(name in child._modules for name in PROJECTIONS)]
        others = [child for child in layer.children() if child not in attentions]
        norms = [child for child in others if norm_form(child) is not None]
        blocks = [child for child in others if child not in norms]
        if (len(attentions), len(norms), len(blocks)) != (1, 2, 1):
            return None
        attention = attentions[0]
        projections = tuple(attention.get_submodule(name) for name in PROJECTIONS)
        columns, scale, index = (vars(attention).get(name) for name in ("head_dim", "scaling", "layer_idx"))
        known = {type(module) for module in projections} <= {nn.Linear, EncodedLinear}
        if not known or not isinstance(columns, int) or not isinstance(scale, float) or not isinstance(index, int):
            return None
        all_weights: list[Any] = [module.weight for module in projections]
        dtypes = {weight.dtype for weight in all_weights}
        (queries, inputs), (keys, _), (values, _), (outputs, attended) = (weight.shape for weight in all_weights)
        groups, heads = keys // columns, queries // columns
        whole = groups > 0 and keys == groups * columns and queries == heads * columns and values % groups == heads % groups == 0
        if not whole or len(dtypes) > 1 or outputs != inputs or columns % COLUMNS or values // groups % COLUMNS:
            return None
        shape = HeadShape(inputs, groups, heads // groups, columns, values // groups)
        more = [name for name in attention._modules if name not in PROJECTIONS]
        of_heads = [
            _row_norm(attention._modules.get(name), columns, outputs)
            for name, outputs in zip(NORMS_OF_HEADS, (queries, keys), strict=True)
        ]
        if attended != heads * shape.value_columns or not set(more) <= set(NORMS_OF_HEADS):
            return None
        if any(norm is None and attention._modules.get(name) is not None for norm, name in zip(of_heads, NORMS_OF_HEADS)):
            return None
        if not is_served(attention):
            return None
        return cls(attention, blocks[0], (norms[0], norms[1]), projections, tuple(of_heads), shape, scale, dtypes.pop())

    def native(self, before: nn.Module, behind: nn.Module, router: Router | None) -> DecoderLayer | None:
        norms = [_row_norm(norm, self.shape.inputs) for norm in (before, behind)]
        weights = [weight_of(module) for module in self.projections]
        if norms[0] is None or norms[1] is None or None in weights or self.dtype not in NUMBER_OF:
            return None
        made = [weight for weight in weights if weight is not None]
        return DecoderLayer(self.shape, made, (norms[0], *self.of_heads, norms[1]), router, self.scale, self.dtype)  # type: ignore[arg-type]

    def agrees(self, layer: nn.Module, native: DecoderLayer) -> torch.Tensor | None:
        """What the block is given for a token of made-up numbers, if the modules and `native` agree to the bit. None: they
        do not, or the layer is called otherwise."""
        chance, shape = torch.Generator().manual_seed(1), self.shape

        def numbers(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=chance).to(self.dtype)

        hidden, room = numbers(1, 1, shape.inputs), CACHED_TOKENS + 2
        angles = numbers(1, 1, shape.columns), numbers(1, 1, shape.columns)
        held = numbers(1, shape.groups, room, shape.columns), numbers(1, shape.groups, room, shape.value_columns)
        theirs, ours = _cache_layer(held), _cache_layer(held)
        index = int(self.attention.layer_idx)  # type: ignore[arg-type]
        cache = DynamicCache()
        cache.layers = [copy.copy(theirs) for _ in range(index)] + [theirs]
        stub = _Stub(numbers(1, 1, shape.inputs))
        name = next(name for name, child in layer.named_children() if child is self.block)
        position_ids = torch.full((1, 1), CACHED_TOKENS)
        named: dict[str, Any] = {CACHE: cache, "attention_mask": None, "position_ids": position_ids, "use_cache": True}
        layer._modules[name] = stub
        try:
            out = type(layer).forward(layer, hidden, position_embeddings=angles, **named)
        except ERRORS:
            return None
        finally:
            layer._modules[name] = self.block
        if not isinstance(out, torch.Tensor) or stub.given is None or stub.given[0].shape != hidden.shape:
            return None
        run_layers([CalledLayer(native, (Cached(*ours.place()),))], hidden, *angles)
        ours.one_more()
        residual, normed, *_ = native.first_half()
        same = torch.equal(normed, stub.given[0]) and torch.equal(out, residual + stub.result)
        kept = all(torch.equal(a, b) for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)))
        return stub.given[0] if same and kept else None

    def routed(self, given: torch.Tensor) -> tuple[Router, nn.Module] | None:
        """The router and the experts of a block that is nothing else, compared on `given` `[1, 1, H]`; None: it is more."""
        experts = [(name, module) for name, module in expert_modules(self.block) if "." not in name]
        routers = [module for module in self.block.children() if chosen_by(module) is not None]
        if len(experts) != 1 or len(routers) != 1:
            return None
        (name, module), gate = experts[0], routers[0]
        chosen, normalised, dtype = chosen_by(gate)  # type: ignore[misc]
        weight = weight_of(gate)
        if weight is None or gate.weight.dtype is not self.dtype:
            return None
        stub = _Stub(given[0].flip(-1).contiguous())
        self.block._modules[name] = stub
        try:
            out = self.block(given)
        except ERRORS:
            return None
        finally:
            self.block._modules[name] = module
        _, weights, ids = gate(given[0])
        same = stub.given is not None and len(stub.given) == 3 and isinstance(out, torch.Tensor)
        if (
            not same
            or not all(map(torch.equal, stub.given or (), (given[0], ids, weights)))
            or not torch.equal(out[0], stub.result)
        ):
            return None
        return Router(weight, chosen, normalised, dtype), module


ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)


class _Stub(nn.Module):
    """Stands for a module: notes what it is given, and returns `result`."""

    def __init__(self, result: torch.Tensor):
        super().__init__()
        self.result = result
        self.given: tuple[torch.Tensor, ...] | None = None

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        self.given = given
        return self.result


def _cache_layer(held: Sequence[torch.Tensor]) -> GrowingLayer:
    """Keys and values with room, which are in use up to CACHED_TOKENS; memory of its own."""
    layer = GrowingLayer()
    keys, values = (memory.clone() for memory in held)
    layer.lazy_initialization(keys, values)
    layer._held, layer.room = (keys, values), keys.shape[-2]
    layer.keys, layer.values = keys[..., :CACHED_TOKENS, :], values[..., :CACHED_TOKENS, :]
    return layer


def _row_norm(module: nn.Module | None, *widths: int) -> RowNorm | None:
    """The norm of rows of one of these widths that a module is, without a weight of the first; None: it is none."""
    form = None if module is None else norm_form(module)
    if module is None or form is None:
        return None
    weight = module._parameters.get("weight")
    if weight is None:
        return RowNorm(None, *form, widths[0])
    fits = len(weight) in widths and weight.is_contiguous()
    return RowNorm(weight.detach(), *form, len(weight)) if fits else None


def weight_of(module: Any) -> Weight | None:
    """The weight of a linear layer as the kernels read it, with its bias; None: they do not read it."""
    bias = module._parameters.get("bias")
    if isinstance(module, EncodedLinear):
        kind, parts, inputs = module.encoding.name, module.parts, module.in_features
    else:
        weight = module.weight.detach()
        if weight.dtype not in cpu.DTYPES[:2] or not weight.is_contiguous() or not weight.is_cpu:
            return None
        kind, parts, inputs = Format.RAW, {"codes": weight}, weight.shape[1]
    bias = None if bias is None else bias.detach()
    if any(not part.is_cpu for part in (*parts.values(), *([] if bias is None else [bias]))):
        return None
    matrix, base = cpu.matrix_of(kind, parts, inputs, bias)
    return Weight(matrix, base, (*parts.values(), *([] if bias is None else [bias])))
