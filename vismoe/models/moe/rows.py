"""One decode pass for several sequences that keep caches of their own: each is a row of one token.

The batch is a view (`RowsCache`): norms, projections, routers, experts and the head compute all rows at once, and what mixes
tokens goes row by row, over the row's own keys and values, as if it were alone. So no cache is padded or copied when a sequence
comes or goes. Where a layer's cache is more than keys and values (linear attention, a sparse index), its mixer is called row by
row as a whole.

Several rows may be consecutive tokens of one sequence (drafts being verified): they have the same cache, each row adds its token
to what the rows before it have added, and `RowsCache.back_to` gives up the tokens behind a row.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from vismoe.errors import UnsupportedModelError
from vismoe.models.family.caches import CACHE, CACHE_NAMES
from vismoe.models.family.components import is_vision
from vismoe.models.family.mtp import of_mtp
from vismoe.models.inputs.prompts import TOKEN_KINDS
from vismoe.models.moe.captured_pass import captured_pass
from vismoe.models.moe.own_forward import give_forward
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.models.visual.pruned_cache import PrunedLayer

PLAIN = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer, PrunedLayer)  # layers that hold keys and values, and nothing else
_running = threading.local()


def running_rows() -> "RowsCache | None":
    """The rows of the pass that this thread runs; None: it is an ordinary pass."""
    return getattr(_running, "rows", None)


class RowsLayer(DynamicLayer):
    """One decoder layer's keys and values of several sequences. `rows`: the layer of each row's own cache.

    kept: whether the rows keep what `update` adds; a trial leaves them as they are. note: gets each row's layer once it has its
    token.
    """

    def __init__(self, rows: Sequence[Any], kept: bool, note: Callable[[Any], None]):
        super().__init__()
        self.rows, self.is_sliding, self.is_initialized = rows, bool(getattr(rows[0], "is_sliding", False)), True
        self.kept, self.note = kept, note
        self._now: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Each row takes its own token `[1, heads, 1, D]`; returned are the new tokens `[B, heads, 1, D]`, `taken` has all."""
        self._now = []
        for b, row in enumerate(self.rows if self.kept else _each_once(copy.copy, self.rows)):
            self._now.append(row.update(key_states[b : b + 1], value_states[b : b + 1], *args, **kwargs))
            self.note(row)
        return key_states, value_states

    def one_more(self) -> None:
        """Each row's new token has been written behind its last one."""
        for row in self.rows:
            row.one_more()
            self.note(row)

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) `[1, heads, S, D]` of each row, once after each update."""
        now, self._now = self._now, None
        assert now is not None, "attention without new keys and values"
        return now

    def get_seq_length(self) -> int:
        return max(row.get_seq_length() for row in self.rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(row.get_mask_sizes(query_length) for row in self.rows)


class RowsCache(Cache):
    """The caches of several sequences, as one. `kept` False: a trial, which leaves them as they are."""

    def __init__(self, caches: Sequence[Any], kept: bool = True, whole: bool = False):
        """caches: of each row; the same one for consecutive tokens of a sequence. whole: each mixer is called row by row,
        whatever its cache is."""
        rows = list(caches) if kept else _each_once(partial(_for_trial, whole=whole), caches)
        plain = [not whole and all(type(layer) in PLAIN for layer in layers) for layers in zip(*(cache.layers for cache in rows))]
        self._one_each = len({id(cache) for cache in rows}) == len(rows)
        self._left: list[list[dict[str, Any]]] = [[] for _ in rows[0].layers]  # by layer: what each row has left of its cache
        layers = [
            RowsLayer([cache.layers[index] for cache in rows], kept, partial(self.note, index)) if is_plain else layer
            for index, (layer, is_plain) in enumerate(zip(rows[0].layers, plain, strict=True))
        ]
        super().__init__(layers=layers)
        self.caches, self._plain = rows, plain

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(int(cache.get_seq_length()) for cache in {id(cache): cache for cache in self.caches}.values())

    def note(self, index: int, layer: Any) -> None:
        """The next row has its token in this layer of its cache. Layers make new tensors, or views of more of the same memory,
        when they grow, so a reference is all it takes to go back."""
        if not self._one_each:
            self._left[index].append(vars(layer).copy())

    def back_to(self, row: int) -> None:
        """The row's sequence gives up the tokens of later rows; after the pass, whose rows were of plain layers."""
        for layer, left in zip(self.caches[row].layers, self._left, strict=True):
            vars(layer).update(left[row])

    def by_attention(self, layer: int) -> bool:
        """Whether the layer's attention goes row by row; otherwise its whole mixer does."""
        return self._plain[layer]


def _each_once(made: Callable[[Any], Any], things: Sequence[Any]) -> list[Any]:
    """What is made of each thing; of the same one the same."""
    found = {id(thing): thing for thing in things}
    for key, thing in found.items():
        found[key] = made(thing)
    return [found[id(thing)] for thing in things]


def _for_trial(cache: Any, whole: bool) -> Any:
    """A cache that may change while `cache` stays. Plain layers need no deep copy: a shallow one grows in memory of its own, and
    `RowsLayer` makes that itself."""
    trial = copy.copy(cache)
    trial.layers = [
        copy.deepcopy(layer) if type(layer) not in PLAIN else copy.copy(layer) if whole else layer for layer in cache.layers
    ]
    return trial


def why_not_rows(model: nn.Module, cache: Any) -> str | None:
    """Why a sequence with this cache cannot share decode passes; None where it can."""
    config: Any = model.config
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}"
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if any("chunk" in str(kind) for kind in kinds):
        return "its layers attend to chunks"
    return None


def why_not_given_up(cache: Any) -> str | None:
    """Why a sequence cannot give up its latest tokens again; None where it can."""
    for index, layer in enumerate(cache.layers):
        if type(layer) not in PLAIN:
            return f"layer {index} keeps a {type(layer).__name__}, which cannot give up tokens"
    return None


@contextlib.contextmanager
def giving_up(cache: Any) -> Iterator[None]:
    """What passes within add to a cache of plain layers is given up at the end."""
    layers, left = list(cache.layers), [vars(layer).copy() for layer in cache.layers]
    try:
        yield
    finally:
        cache.layers[:] = layers
        for layer, before in zip(layers, left, strict=True):
            vars(layer).update(before)


@contextlib.contextmanager
def shared_pass(model: nn.Module, rows: RowsCache) -> Iterator[None]:
    """Within, the model's pass is one of these rows."""
    _serve_mixers(model)
    _running.rows = rows
    try:
        yield
    finally:
        _running.rows = None


@torch.inference_mode()
def rows_that_differ(model: Any, rows: int) -> str | None:
    """A product that torch computes for this model with so many rows otherwise than with each alone; None: random numbers show
    none. Each shape of a weight beside the experts is tried, and one for the experts, unless our kernels compute it."""
    config = model.config.get_text_config()
    ours = {id(module._parameters.get("weight")) for module in model.modules() if "forward" in vars(module)} - {id(None)}
    held = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - ours
    weights = {
        (tuple(weight.shape), weight.dtype, weight.device): weight
        for path, weight in model.named_parameters()
        if weight.ndim == 2
        and weight.is_floating_point()
        and id(weight) not in ours | held
        and not (is_vision(path) or of_mtp(path))
    }
    if not ours:
        some = torch.randn(config.hidden_size, config.hidden_size, dtype=model.dtype, device=model.device)
        weights[tuple(some.shape), some.dtype, some.device] = some
    chance = torch.Generator().manual_seed(rows)
    for (shape, dtype, device), weight in weights.items():
        x = torch.randn(rows, shape[1], generator=chance).to(device, dtype)
        together, alone = nn.functional.linear(x, weight), [nn.functional.linear(row[None], weight) for row in x]
        if not torch.equal(together, torch.cat(alone)):
            return f"torch's product of {rows} rows with {shape[0]} x {shape[1]} {dtype} weights has other bits than that of one"
    return None


# -- attention by row
Attention = Callable[..., tuple[torch.Tensor, Any]]


def by_row(alone: Attention, together: Callable[..., torch.Tensor | None]) -> Attention:
    """An attention function for transformers: `alone` in ordinary passes; in a shared one `together` for all rows, or where that
    returns None, `alone` for each."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        rows = running_rows()
        index = getattr(module, "layer_idx", None)
        if rows is None or index is None or len(query) != len(rows.caches) or not rows.by_attention(index):
            return alone(module, query, key, value, attention_mask, **options)
        layer = rows.layers[index]
        own = [(*taken, mask_alone(row, taken[0])) for taken, row in zip(layer.taken(), layer.rows, strict=True)]
        out = together(query, own, options)
        if out is None:
            out = torch.cat([alone(module, query[b : b + 1], *one, **options)[0] for b, one in enumerate(own)])
        return out, None

    return attention


def mask_alone(layer: Any, keys: torch.Tensor) -> torch.Tensor | None:
    """The mask of one new token, as transformers makes it for a sequence alone: none, or at a full window one that shows all."""
    window = getattr(layer, "sliding_window", None)
    if not getattr(layer, "is_sliding", False) or window is None or keys.shape[-2] < window:
        return None
    return torch.ones(1, 1, 1, keys.shape[-2], dtype=torch.bool, device=keys.device)


def rows_mask(*args: Any, **kwargs: Any) -> Any:
    """transformers' mask function; in a shared pass there is none, each row makes its own."""
    if running_rows() is not None:
        return None
    captured = captured_pass()
    return sdpa_mask(*args, **kwargs) if captured is None else captured.mask(partial(sdpa_mask, *args, **kwargs))


# -- whole mixers by row
def _serve_mixers(model: nn.Module) -> None:
    """Let every token mixer of the decoder run row by row when a shared pass says so; done once."""
    if model.__dict__.get("_vismoe_mixers"):
        return
    give_forward(((mixer, vars(mixer).get("forward")) for mixer in _mixers(model)), _mixed)
    model.__dict__["_vismoe_mixers"] = True


def served_by_row(forward: Any) -> Any:
    """The forward that `_serve_mixers` has replaced by this one; None: it is none of these."""
    return forward.args[1] if isinstance(forward, partial) and forward.func is _mixed else None


def _mixers(model: nn.Module) -> Iterator[Any]:
    """Modules that take a cache and know their layer, without those inside them, and without the decoder layers around them."""
    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and not isinstance(module, GradientCheckpointingLayer):
            inside = any(path.startswith(f"{outer}.") for outer in found)
            if not inside and set(CACHE_NAMES) & set(inspect.signature(type(module).forward).parameters):
                found.append(path)
                yield module


def _mixed(reference: Any, replaced: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """`replaced`: the forward that the module had of its own, None: that of its class."""
    mixer, rows = reference(), running_rows()
    forward, index = replaced or partial(type(mixer).forward, mixer), mixer.layer_idx
    if rows is None or rows.by_attention(index):
        return forward(*args, **kwargs)
    results = []
    for b, cache in enumerate(rows.caches):
        own = partial(_row_of, b, rows)
        kwargs_of = {name: own(value, name) for name, value in kwargs.items()}
        if (mask := kwargs.get("attention_mask")) is not None and hasattr(cache.layers[index], "get_mask_sizes"):
            kwargs_of["attention_mask"] = _mask_of_mixer(mask, cache.layers[index])
        results.append(forward(*(own(value, "") for value in args), **kwargs_of))
        rows.note(index, cache.layers[index])
    return _joined(results)


def _mask_of_mixer(given: Any, layer: Any) -> Any:
    """The mask of one row, as transformers makes it for a sequence alone, where the pass of all rows has the mask `given`."""
    if isinstance(given, dict):
        return {name: one if one is None else _mask_of_mixer(one, layer) for name, one in given.items()}
    length = layer.get_mask_sizes(1)[0]
    if getattr(layer, "is_sliding", False) and length < layer.sliding_window:
        return None
    return given.new_full((1, 1, 1, length), given.dtype == torch.bool)  # all are visible: True, or nothing to add


def _row_of(b: int, rows: RowsCache, value: Any, name: str) -> Any:
    """Row `b` of an argument."""
    if value is rows:
        return rows.caches[b]
    if isinstance(value, tuple | list):
        return type(value)(_row_of(b, rows, one, name) for one in value)
    if isinstance(value, dict):
        return {key: _row_of(b, rows, one, name) for key, one in value.items()}
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    of_each_axis = (name, value.ndim) in (("position_ids", 3), ("position_embeddings", 4))  # of time, height and width
    axis = 1 if of_each_axis else 0
    return value.narrow(axis, b, 1) if value.shape[axis] == len(rows.caches) else value


def _joined(results: Sequence[Any]) -> Any:
    """What the mixer returns for all rows, from what it returned for each."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_joined(each) for each in zip(*results, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    # What differs in length are the weights of attention, which the model does not use.
    return torch.cat(list(results)) if all(one.shape == first.shape for one in results) else None


# -- the model's inputs
def joined_inputs(inputs: Sequence[Mapping[str, Any]], rows: RowsCache, of_images: frozenset[str]) -> dict[str, Any]:
    """The inputs of one shared pass from those that each row would have alone, none of which is padded.

    of_images: names of what no text token needs.

    Raises UnsupportedModelError for inputs that cannot be joined.
    """
    names = {name for one in inputs for name, value in one.items() if value is not None} - of_images
    joined: dict[str, Any] = {CACHE: rows}
    for name in sorted(names - {CACHE, "attention_mask"}):
        values: list[Any] = [one.get(name) for one in inputs]
        if name in TOKEN_KINDS:  # older releases hand on those of all tokens
            values = [value if value is None else value[..., -1:] for value in values]
        if all(isinstance(value, torch.Tensor) and value.ndim for value in values):
            axis = 1 if name == "position_ids" and values[0].ndim == 3 else 0
            if any(value.shape[axis] != 1 for value in values):
                raise UnsupportedModelError(f"its input {name} is not one row per sequence")
            joined[name] = torch.cat(values, dim=axis)
        elif all(type(value) is type(values[0]) and value == values[0] for value in values):
            joined[name] = values[0]
        else:
            raise UnsupportedModelError(f"its input {name} differs from sequence to sequence")
    if "position_ids" not in joined:
        raise UnsupportedModelError("it counts positions by itself, one count for all sequences")
    return joined
