"""Lets one call of the CPU kernels compute what single tokens, and the tokens of short prompts, pass through in decoder layers.

The call makes the same numbers as the layer's own modules, which the kernels compute by then, bit for bit: they are compared on
tokens of made-up numbers. Where they differ, or a pass is of another kind, or a hook listens to a module in between, the layer
runs its own code. If the feed-forward block is a router that the kernels know and its experts, and these are resident, the call
computes them, too; otherwise the experts are demanded, or the block's module runs.

For single tokens, a layer's call with its experts goes on to the layers behind it, as long as all experts are resident and
nothing listens between the layers: behind 85 MB of weights, which push the interpreter's memory out of the caches, Python takes
0.9 ms between two of them. Each of these hands out its output when the decoder calls it, if its input has the bits that the call
has computed with, and angles and cache are still those; its token counts as cached from then on. Otherwise the layer computes
again, which counts its experts again, and for the next RETRY_CALLS calls it is not computed ahead.
"""

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
from vismoe.kernels.decoder_layer import Cached, CalledLayer, DecoderLayer, run_layers
from vismoe.lookahead.gate import Capture
from vismoe.models.family.caches import CACHE
from vismoe.models.family.components import OUR_ATTENTION, is_vision
from vismoe.models.family.mtp import of_mtp
from vismoe.models.moe.decoder_parts import DecoderParts
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.heavy_hitters import HEARD_BY
from vismoe.models.moe.linears import served
from vismoe.models.moe.own_forward import give_forward, was_given
from vismoe.models.moe.rows import RowsCache, RowsLayer, running_rows, served_by_row
from vismoe.models.visual.growing_cache import GrowingLayer

ANGLES, MASK = "position_embeddings", "attention_mask"  # of the rotary embedding; which keys each token sees
KNOWN = frozenset({CACHE, MASK, ANGLES, "position_ids", "use_cache"})  # what a layer may be given
EVERYWHERE = (everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks)  # hooks of all modules
MOST_LAYERS = 64  # of one call, which nothing interrupts
RETRY_CALLS = 500  # after which a layer is computed ahead again that was so in vain
MOST_ANGLES = 4  # that a decoder makes for a pass, for several kinds of layers


def serve_decoder_layers(model: nn.Module) -> tuple[int, int]:
    """Make one call compute the decoder's layers for single tokens and short prompts; returns how many layers these are, and how
    many with their experts. The modules within must be served before."""
    served: list[tuple[nn.Module, ServedLayer]] = []
    decoders: list[str] = []
    with torch.inference_mode():
        for path, module in model.named_modules():
            if "forward" in module.__dict__ or is_vision(path) or of_mtp(path):
                continue
            if (layer := ServedLayer.of(module)) is not None:
                served.append((module, layer))
                decoders.append(path.rpartition(".")[0])
    layers = [layer for _, layer in served]
    watch, ahead = LayerWatch(layers), LayersAhead(layers, decoders)
    give_forward(((module, layer, watch, ahead) for module, layer in served), _forward)
    return len(served), sum(layer.experts is not None for _, layer in served)


def served_layers(model: nn.Module) -> Iterator["ServedLayer"]:
    """Those of `serve_decoder_layers`."""
    for module in model.modules():
        if (served := served_by(module)) is not None:
            yield served[0]


def served_by(module: nn.Module) -> "tuple[ServedLayer, LayerWatch, LayersAhead] | None":
    """What computes a decoder layer; None: the module is none that is served."""
    return module.__dict__["forward"].args[1:] if _is_served(module) else None


def _is_served(module: nn.Module) -> bool:
    return was_given(module, _forward)


def _forward(
    reference: Any,
    served: "ServedLayer",
    watch: "LayerWatch",
    ahead: "LayersAhead",
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    made = served.run(hidden_states, kwargs, ahead) if not args and watch.fit(kwargs) else None
    if made is None:
        module = reference()
        made = type(module).forward(module, hidden_states, *args, **kwargs)
    if ahead.events is not None:
        ahead.events.append(Event(reference(), (hidden_states, *args), kwargs, made))
    return made


class Event(NamedTuple):
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


class NewTokens(NamedTuple):
    """Where the keys and values of each sequence's new tokens go, and what to call when they are there. at: by which these places
    are known within a pass, without holding the memory: a request's ends with it."""

    places: Sequence[Cached]
    written: Callable[[], None]
    at: tuple[tuple[int, int], ...]


class Watched(NamedTuple):
    """What a pass gives to its layers, and whether all fits. cache, mask: weak; nothing is to change a mask during a pass."""

    angles: tuple[torch.Tensor, torch.Tensor]
    cache: Callable[[], Any]
    mask: Callable[[], torch.Tensor | None]
    fits: bool


class LayerWatch:
    """Looks once for each pass whether the layers' modules would do what was compared: nothing listens to them, none has been
    replaced, and what they are given is known. A pass is told by its angles, which a decoder makes once for all layers."""

    def __init__(self, layers: Sequence["ServedLayer"]):
        self._attentions = [(layer.attention, layer.native.scale) for layer in layers]
        self._natives = list({layer.native.shape: layer.native for layer in layers}.values())
        self._norms = [layer.behind for layer in layers]
        silent = [module for layer in layers for module in layer.silent]
        heard = [*silent, *self._norms]
        self._forwards = Things([module.__dict__ for module in heard], ["forward"] * len(heard))
        self._listeners = [hooks for module in silent for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._listeners += [layer.behind._forward_hooks for layer in layers]
        places = [place for layer in layers for place in layer.places]
        self._parts = Things([held for held, _ in places], [name for _, name in places])
        self._seen: dict[int, Watched] = {}  # by the identity of angles

    def fit(self, given: Mapping[str, Any]) -> bool:
        angles, cache, mask = given.get(ANGLES), given.get(CACHE), given.get(MASK)
        if cache is None or type(angles) is not tuple or len(angles) != 2:
            return False
        seen = self._seen.get(id(angles))
        if seen is None:
            if not all(native.takes_angles(*angles) for native in self._natives):  # of long prompts, which are not kept
                return False
            if len(self._seen) >= MOST_ANGLES:
                self._seen.clear()
            of_mask = _no_mask if mask is None else weakref.ref(mask)
            seen = self._seen[id(angles)] = Watched(angles, weakref.ref(cache), of_mask, self._look(given))
        return seen.fits and cache is seen.cache() and mask is seen.mask()

    def _look(self, given: Mapping[str, Any]) -> bool:
        if torch.is_grad_enabled() or cpu.setup().isa == "portable" or not _sees_all_before(given):
            return False
        return (
            all(name in KNOWN or value is None or value is False for name, value in given.items())
            and not any(map(listens, filter(None, (*self._listeners, *EVERYWHERE))))
            and all(type(hook) is Capture for norm in self._norms for hook in norm._forward_pre_hooks.values())
            and all(_as_compared(attention, scale) for attention, scale in self._attentions)
            and (given[ANGLES][0].shape[1] == 1 or all(getattr(one, "is_causal", True) for one, _ in self._attentions))
            and (self._forwards.stay() or all(map(_same_forward, self._forwards.now(), self._forwards.there)))
            and self._parts.stay_in_place()
        )


def _no_mask() -> None:
    return None


def _sees_all_before(given: Mapping[str, Any]) -> bool:
    """Whether each token sees all before it: there is no mask, or one that says so of several tokens of a sequence."""
    tokens, mask = given[ANGLES][0].shape[1], given.get(MASK)
    if mask is None:
        return True
    known = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.is_cpu and mask.ndim == 4
    if not known or tokens == 1 or mask.shape[:3] != (1, 1, tokens) or mask.shape[3] < tokens:
        return False
    return torch.equal(mask[0, 0], torch.ones_like(mask[0, 0]).tril(mask.shape[3] - tokens))


def listens(hooks: Mapping[Any, Any]) -> bool:
    """Whether one of the hooks does something now. Those with which transformers collects outputs stay when it has them."""
    return any(
        not isinstance(hook, FunctionType)
        or hook.__module__ != output_capturing.__name__
        or bool(output_capturing._active_collector.get())
        for hook in hooks.values()
    )


class Ahead(NamedTuple):
    """What a call has computed of a layer that the decoder had not called yet, with these angles, and new tokens there.
    out `[n, 1, H]`, None: only the first half."""

    angles: Any
    at: tuple[tuple[int, int], ...]  # as of `NewTokens`
    out: torch.Tensor | None


class LayersAhead:
    """Calls of layers one after another, and what they have computed ahead. Of one thread at a time, which runs the pass."""

    def __init__(self, layers: Sequence["ServedLayer"], decoders: Sequence[str]):
        """decoders: where each layer is."""
        at = [(decoder, layer.index) for decoder, layer in zip(decoders, layers, strict=True)]
        self._behind = {layer: _following(layers[place:], at[place:]) for place, layer in enumerate(layers)}
        self._ahead: dict[ServedLayer, Ahead] = {}  # in the decoder's order
        self._calls, self._at_once = 0, 1  # so far; layers that the next one tries
        self._alone_until: dict[ServedLayer, int] = {}  # the call with which a layer is computed ahead again
        self.alone = False  # layers are computed one by one
        self.events: list[Event] | None = None  # gets every layer that is called; None: nothing does

    def made(self, layer: "ServedLayer", hidden: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor | None:
        """The layer's output where an earlier call has computed it for the only sequence, whose token counts as cached then;
        `output` does the same for any pass, but looks at the cache anew."""
        found = self._ahead.get(layer)
        if found is None or found.out is None or found.angles is not given[ANGLES]:
            return None
        only = given[CACHE].layers[layer.index]
        if not (isinstance(only, GrowingLayer) and only.has_room(1) and found.at == (only.next_at(),)):
            return None
        if not (layer.native.takes(hidden) and layer.native.was_given(hidden)):
            return None
        del self._ahead[layer]
        only.one_more()
        return found.out

    def begun(self, layer: "ServedLayer", angles: Any, at: tuple[int, int]) -> None:
        """This thread's latest call of the layer has computed its first half, for the only sequence."""
        self._ahead = {layer: Ahead(angles, (at,), None)}

    def output(
        self, layer: "ServedLayer", paged: PagedLayer, hidden: torch.Tensor, given: Mapping[str, Any], new: "NewTokens"
    ) -> torch.Tensor | None:
        """The layer's output, of this call or of an earlier one; None: of its first half alone, see `DecoderLayer.first_half`."""
        angles, found = given[ANGLES], self._ahead.pop(layer, None)
        if found is not None and found.at == new.at:
            if found.angles is angles and layer.native.was_given(hidden):
                return found.out
            self._leave_alone(layer)
        elif self._ahead:  # what the decoder has passed over, or has not come to
            self._leave_alone(next(iter(self._ahead)))
        self._ahead, calls = {}, self._calls_from(layer, paged, hidden, given, new)
        outs, begun = paged.run_layers([(one.layer, each.native, new.places) for each, one, new in calls], hidden, angles)
        self._calls += 1
        if hidden.shape[1] > 1:
            pass  # tokens of a prompt say nothing about decoding
        elif len(outs) < len(calls):
            self._at_once = max(len(outs), 1)
        else:
            self._at_once = max(self._at_once, min(2 * len(calls), MOST_LAYERS))
        made: list[torch.Tensor | None] = [*outs, *([None] if begun else [])]
        if not made:
            run_layers([CalledLayer(layer.native, new.places)], hidden, *angles)
            return None
        self._ahead = {each: Ahead(angles, tokens.at, out) for (each, _, tokens), out in zip(calls[1:], made[1:])}
        return made[0]

    def forget(self, layer: "ServedLayer") -> None:
        """The layer is computed otherwise."""
        self._ahead.pop(layer, None)

    def _leave_alone(self, layer: "ServedLayer") -> None:
        self._alone_until[layer] = self._calls + RETRY_CALLS

    def _calls_from(
        self, layer: "ServedLayer", paged: PagedLayer, hidden: torch.Tensor, given: Mapping[str, Any], new: "NewTokens"
    ) -> list[tuple["ServedLayer", PagedLayer, "NewTokens"]]:
        calls = [(layer, paged, new)]
        alone = self.alone or hidden.shape[1] > 1  # a prompt can be cancelled between its layers
        for later in self._behind[layer][: 0 if alone else self._at_once - 1]:
            if self._alone_until.get(later, 0) > self._calls or not later.is_unheard or not _nothing_between(calls[-1][0], later):
                break
            other, tokens = later.paged, later.new_tokens(hidden, given)
            if other is None or tokens is None or other.context is not paged.context:
                break
            calls.append((later, other, tokens))
        return calls


def _following(layers: Sequence["ServedLayer"], places: Sequence[tuple[str, int]]) -> Sequence["ServedLayer"]:
    """What the decoder of the first of these layers calls next, one after another, by the places of all."""
    decoder, index = places[0]
    expected = ((decoder, index + later) for later in range(1, MOST_LAYERS))
    count = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(places[1:], expected)))
    return layers[1 : 1 + count]


def _nothing_between(layer: "ServedLayer", later: "ServedLayer") -> bool:
    """Whether nothing runs from one layer to the next but the decoder's own code."""
    before, after = layer.module(), later.module()
    if before is None or after is None or not (_is_served(before) and _is_served(after)):  # wrapped, or no longer served
        return False
    return not any(map(listens, filter(None, (before._forward_hooks, after._forward_pre_hooks))))


class Things:
    """What dictionaries hold by these names, `there` at first; looked at once for each token, so without a loop in Python."""

    def __init__(self, held: Sequence[Any], names: Sequence[str]):
        self._held, self._names = held, names
        self.there = list(self.now())
        self.tensors = [thing for thing in self.there if isinstance(thing, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))

    def now(self) -> Iterator[Any]:
        return map(dict.get, self._held, self._names)

    def stay(self) -> bool:
        return all(map(operator.is_, self.now(), self.there))

    def stay_in_place(self) -> bool:
        """Whether tensors also lie where they did: a model that is moved keeps its parameters."""
        return self.stay() and list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses


def _same_forward(now: Any, forward: Any) -> bool:
    """Whether a module with this forward computes as when it was compared with that one, or so by row in shared passes."""
    return now is forward or (forward is not None and served_by_row(now) is forward)


def _as_compared(attention: Any, scale: float) -> bool:
    config = object.__getattribute__(attention.config, "__dict__")  # past transformers' own lookup, which is slow
    usual = config["_attn_implementation_internal"] == OUR_ATTENTION and HEARD_BY not in attention.__dict__
    return usual and not attention.training and attention.scaling == scale


@dataclass(frozen=True, eq=False)
class ServedLayer:
    """A decoder layer whose first half `native` computes."""

    module: Callable[[], nn.Module | None]  # a weak reference
    native: DecoderLayer
    index: int  # of its keys and values in a cache
    attention: nn.Module
    behind: nn.Module  # the norm before the block
    block: nn.Module
    experts: nn.Module | None  # of a block that is nothing but the router of `native` and these
    silent: tuple[nn.Module, ...]  # modules that do not run
    places: tuple[tuple[Mapping[str, Any], str], ...]  # where modules hold modules and weights, and their names
    of_prompts: bool  # it also computes several tokens of a sequence

    @classmethod
    def of(cls, layer: nn.Module) -> "ServedLayer | None":
        """Of a decoder layer that is norm, attention, residual, norm, block and residual; None for any other module."""
        parts = DecoderParts.of(layer)
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
            module, of_prompts = weakref.ref(layer), parts.agrees_on_prompts(layer, native)
            held = parts.attention, behind, parts.block, experts
            return cls(module, native, index, *held, tuple(silent), tuple(places), of_prompts)
        return None

    def run(self, hidden: torch.Tensor, given: Mapping[str, Any], ahead: LayersAhead) -> torch.Tensor | None:
        """The layer's output `[n, 1, H]` for the latest tokens of n sequences, or `[1, n, H]` for those of one; None: its modules
        must compute it."""
        paged, whole = self.paged, self.is_unheard
        if paged is not None and not paged.is_mine:
            return None
        if paged is not None and whole and (out := ahead.made(self, hidden, given)) is not None:
            paged.computed_short(self.native.chosen)
            return out
        new = self.new_tokens(hidden, given)
        if new is None:
            return None
        if hidden.shape[1] == 1:
            return self._computed(hidden, given, ahead, new)
        try:
            return self._computed(hidden, given, ahead, new)
        finally:
            self.native.release()

    def _computed(
        self, hidden: torch.Tensor, given: Mapping[str, Any], ahead: LayersAhead, new: NewTokens
    ) -> torch.Tensor | None:
        paged, whole, out = self.paged, self.is_unheard, None
        if paged is not None and whole:
            out = ahead.output(self, paged, hidden, given, new)
        else:
            ahead.forget(self)
            run_layers([CalledLayer(self.native, new.places)], hidden, *given[ANGLES])
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
        return residual + demanded(normed.view(-1, normed.shape[2]), ids, weights).view_as(residual)

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

    def make_room(self, kept: Any, tokens: int = 1) -> bool:
        """Whether the call reads a sequence's keys and values of this layer, and may add so many tokens; makes room for them."""
        if not isinstance(kept, GrowingLayer):
            return False
        there = kept.has_room(tokens)
        keys, values = kept.place()[:2] if there else (kept.keys, kept.values)
        return keys is not None and self.native.takes_cached(keys, values) and (there or kept.make_room(tokens))

    def new_tokens(self, hidden: torch.Tensor, given: Mapping[str, Any]) -> NewTokens | None:
        """Where the new keys and values of each sequence go, for which room is made; None: hidden states or a cache that are the
        modules' business."""
        cache: Any = given.get(CACHE)
        (count, each, _), running, index = hidden.shape, running_rows(), self.index
        if not self.native.takes(hidden) or given[ANGLES][0].shape[:2] != (count, each):
            return None
        if each > 1:
            return self._new_of_prompt(each, given) if running is None else None
        if running is None and type(cache) is DynamicCache and count == 1 and index < len(cache.layers):
            only = cache.layers[index]
            return NewTokens((Cached(*only.place()),), only.one_more, (only.next_at(),)) if self.make_room(only) else None
        if running is not cache or type(cache) is not RowsCache:
            return None
        layer = cache.layers[index]
        if type(layer) is not RowsLayer or len(layer.rows) != count or not layer.kept:
            return None
        if not all(self.make_room(row, count) for row in layer.rows):
            return None
        before: Counter[int] = Counter()  # rows of the same sequence so far
        places, at = [], []
        for row in layer.rows:
            places.append(Cached(*row.place(before[id(row)])))
            at.append(row.next_at(before[id(row)]))
            before[id(row)] += 1
        return NewTokens(places, layer.one_more, tuple(at))

    def _new_of_prompt(self, tokens: int, given: Mapping[str, Any]) -> NewTokens | None:
        """The same for so many tokens of one sequence."""
        cache, mask, shape = given[CACHE], given.get(MASK), self.native.shape
        if not (self.of_prompts and served(tokens)) or type(cache) is not DynamicCache or self.index >= len(cache.layers):
            return None
        only, before = cache.layers[self.index], 0 if mask is None else mask.shape[3] - tokens
        if type(only) is GrowingLayer and not only.is_initialized:
            sizes = (1, shape.groups, 0, shape.columns), (1, shape.groups, 0, shape.value_columns)
            keys, values = (torch.empty(size, dtype=self.native.dtype) for size in sizes)
            has_room = not before and only.begin(keys, values, tokens)
        else:
            has_room = isinstance(only, GrowingLayer) and only.tokens == before and self.make_room(only, tokens)
        if not has_room:
            return None
        return NewTokens((Cached(*only.place(tokens - 1)),), partial(only.more, tokens), (only.next_at(tokens - 1),))
