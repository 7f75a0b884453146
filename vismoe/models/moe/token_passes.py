"""Passes of one token through a whole model without transformers' code between its modules.

That code takes 1 ms and 50 us a layer, since a token's weights have pushed the interpreter's memory out of the caches. The first
such pass with a cache runs it and is watched: embeddings of the token go to the layers, one after another, with the angles that a
rotary embedding makes of the positions; their output goes to a norm, and on to the head. If every module got what the one before
it had made, bit for bit, later passes with this cache call these modules alone, and before the decoder the hooks of ours.

Transformers' code runs where a pass has other arguments, no positions, a mask that hides a token or a cache without room, and
after a module, a forward, a hook or a setting of the model has changed.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import ModelOutput

from vismoe.errors import VisMoEError
from vismoe.kernels.decoder_layer import Ending, RowNorm
from vismoe.kernels.rows import NUMBER_OF
from vismoe.models.family.caches import CACHE, CACHE_NAMES, cache_in, windows
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.family.mtp import of_mtp
from vismoe.models.inputs.prompts import TOKEN_KINDS
from vismoe.models.moe import linears, norms
from vismoe.models.moe.decoder_layers import (
    ANGLES,
    EVERYWHERE,
    Event,
    LayerWatch,
    Things,
    listens,
    served_by,
)
from vismoe.models.moe.decoder_parts import weight_of
from vismoe.models.moe.own_forward import give_forward
from vismoe.models.moe.straight_layers import StraightLayers
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.types import stack_of

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
CHANGING = frozenset({IDS, MASK, POSITIONS, *CACHE_NAMES})  # arguments that differ from token to token
OF_PASS = frozenset({POSITIONS, ANGLES, *CACHE_NAMES})  # those of layers that do
OUTPUTS = frozenset({"logits", "rope_deltas", *CACHE_NAMES})  # deltas are those of the latest prompt, and made into positions
# What a model's config says where no argument does.
SETTINGS = ("output_hidden_states", "output_attentions", "output_router_logits", "return_dict", "use_cache")
WATCHES = 3  # of passes with a cache, until one shows a course
Row = Callable[[torch.Tensor], torch.Tensor]
# What a rotary embedding may get of positions `[1, 1]`, and of `[n, 1, 1]` that may have those of text before others.
ROWS: Mapping[int, Sequence[Row]] = {
    2: (lambda positions: positions, lambda positions: positions[None].expand(3, -1, -1)),
    3: (lambda positions: positions, lambda positions: positions[0], lambda positions: positions[1:]),
}


@dataclass(frozen=True)
class ModelEnding:
    """Norm and head of a model. native: the call that computes them; None: the kernels do not, or have made other logits."""

    norm: nn.Module
    head: nn.Module
    native: Ending | None
    parts: Things  # forwards and weights
    forms: Sequence[Any]  # of the weights

    @classmethod
    def of(cls, norm: nn.Module, head: nn.Module, hidden: torch.Tensor, logits: torch.Tensor) -> "ModelEnding":
        """Of modules that have made these logits `[1, 1, V]` of hidden `[1, 1, H]`."""
        held = [(one.__dict__, name) for one in (norm, head) for name in ("forward", "encoding")]
        for one in (norm, head):
            held += [(places, name) for places in (one._parameters, one._buffers) for name in {"weight", "bias", *places}]
        parts = Things([holder for holder, _ in held], [name for _, name in held])
        try:
            native = _native(norm, head, hidden, logits)
        except VisMoEError:  # no memory: the modules' own calls say so if they have none either
            native = None
        return cls(norm, head, native, parts, _forms(parts))

    @property
    def stays(self) -> bool:
        return self.parts.stay_in_place() and _forms(self.parts) == self.forms


def _native(norm: nn.Module, head: nn.Module, hidden: torch.Tensor, logits: torch.Tensor) -> Ending | None:
    form, weight, dtype = norms.served_form(norm), norm._parameters.get("weight"), hidden.dtype
    if form is None or not linears.is_served(head) or (found := weight_of(head)) is None or dtype not in NUMBER_OF:
        return None
    width = hidden.shape[-1]
    fits = weight is None or (weight.shape == (width,) and weight.dtype is dtype and weight.is_contiguous() and weight.is_cpu)
    if not fits or hidden.shape != (1, 1, width) or found.matrix.inputs != width or logits.shape != (1, 1, found.matrix.rows):
        return None
    native = Ending(RowNorm(None if weight is None else weight.detach(), *form, width), found, dtype)
    return native if _same(native.logits(hidden.contiguous()), logits) else None


def _forms(parts: Things) -> list[Any]:
    return [(weight.shape, weight.stride(), weight.dtype) for weight in parts.tensors]


@dataclass(frozen=True)
class Course:
    """How the passes with a cache go. given: the arguments that stay; of_layers: those of every layer."""

    given: Mapping[str, Any]
    of_layers: Mapping[str, Any]
    embed: nn.Module
    rotary: nn.Module
    positions: torch.Size  # of the model
    row: Row  # of these
    ending: ModelEnding
    output: Callable[..., ModelOutput]
    parts: Things  # modules, their forwards, and settings
    hooks: Sequence[Mapping[Any, Any]]  # of modules that would run


@dataclass(frozen=True)
class TokenPasses:
    """Of one model on a CPU. begins: the decoder's own hooks, which a pass calls."""

    path: str  # of the decoder
    decoder: nn.Module
    watch: LayerWatch
    begins: Sequence[Callable[..., Any]]
    straight: StraightLayers
    endings: list[ModelEnding] = field(default_factory=list)  # at most one, the latest: courses of further caches share it
    # By their cache; before there is a course, how many passes were watched.
    courses: "weakref.WeakKeyDictionary[Any, Course | int]" = field(default_factory=weakref.WeakKeyDictionary)

    def run(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """The model's output; None: its own code must run."""
        cache = cache_in(kwargs)
        if torch.is_grad_enabled() or not _is_one_token(kwargs, cache):
            return None
        course = self.courses.get(cache, 0)
        if isinstance(course, int):
            self.courses[cache] = course + 1
            return self._watched(model, kwargs, cache) if course < WATCHES else None
        positions = kwargs[POSITIONS]
        same = positions.shape == course.positions and _alike(course.given, _staying(kwargs)) and self._is_as_watched(course)
        if not same:
            return None
        if not course.ending.stays:  # weights of norm or head have moved, and nothing holds the old ones any longer
            self.courses[cache] = 1
            return self._watched(model, kwargs, cache)
        hidden = course.embed.forward(kwargs[IDS])
        angles = course.rotary.forward(hidden, course.row(positions))
        of_layers = {**course.of_layers, CACHE: cache, ANGLES: angles}
        if not self.watch.fit(of_layers) or not self.straight.takes(hidden, of_layers):
            return None
        for begin in self.begins:
            begin(self.decoder, (), {"inputs_embeds": hidden, CACHE: cache})
        hidden, logits = self.straight.through(hidden, of_layers, course.ending.native)
        if logits is None:
            logits = course.ending.head.forward(course.ending.norm.forward(hidden))
        return course.output(logits=logits, **{CACHE: cache})

    def _is_as_watched(self, course: Course) -> bool:
        heard = any(map(listens, filter(None, (*course.hooks, *EVERYWHERE))))
        return not heard and course.parts.stay() and list(self.decoder._forward_pre_hooks.values()) == self.begins

    def _watched(self, model: Any, kwargs: dict[str, Any], cache: Any) -> Any:
        """A pass by transformers' code, which may set the course of those that follow."""
        events = list[Event]()

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            events.append(Event(module, args, kwargs, output))

        beside = dict.fromkeys((model.get_input_embeddings(), model.get_output_embeddings(), *self.decoder.children()))
        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in beside]
        self.straight.ahead.events = events
        try:
            output = type(model).forward(model, **kwargs)
        finally:
            self.straight.ahead.events = None
            for hook in hooks:
                hook.remove()
        if (course := self._course(model, kwargs, events, output)) is not None:
            self.courses[cache] = course
        return output

    def _course(self, model: Any, given: Mapping[str, Any], events: Sequence[Event], output: Any) -> Course | None:
        """How passes go, if every module got what the one before it had made, and nothing else came out."""
        layers, cache = [layer.module() for layer in self.straight.layers], cache_in(given)
        through = [event for event in events if event.module in layers]
        around = [event for event in events if event.module not in layers]
        if [event.module for event in through] != layers or len(around) != 4 or not isinstance(output, ModelOutput):
            return None
        embed, rotary, norm, head = around
        ends = embed.module is model.get_input_embeddings() and head.module is model.get_output_embeddings()
        plain = _same(embed.args, (given[IDS],)) and not (embed.kwargs or norm.kwargs or head.kwargs)
        straight = all(_same(later.args, (before.output,)) for before, later in itertools.pairwise((embed, *through, norm, head)))
        turned = all(one.kwargs.get(ANGLES) is rotary.output and cache_in(one.kwargs) is cache for one in through)
        of_layers, *of_others = ({name: one.kwargs[name] for name in one.kwargs.keys() - OF_PASS} for one in through)
        alike = all(_alike(of_layers, of_other) for of_other in of_others) and self.watch.fit(through[0].kwargs)
        returned = output.keys() <= OUTPUTS and _same(output.logits, head.output) and cache_in(output) is cache
        row = _row_given(rotary, embed.output, given[POSITIONS])
        if row is None or not (ends and plain and straight and turned and alike and returned):
            return None
        more = {name: value for name, value in output.items() if name == "rope_deltas"}
        made: Callable[..., Any] = type(output)
        parts, hooks = self._parts(model, [event.module for event in events])
        return Course(
            given=_staying(given),
            of_layers=of_layers,
            embed=embed.module,
            rotary=rotary.module,
            positions=given[POSITIONS].shape,
            row=row,
            ending=self._ending(norm.module, head.module, through[-1].output, output.logits),
            output=functools.partial(made, **more),
            parts=parts,
            hooks=hooks,
        )

    def _ending(self, norm: nn.Module, head: nn.Module, hidden: torch.Tensor, logits: torch.Tensor) -> ModelEnding:
        if not any(found.norm is norm and found.head is head and found.stays for found in self.endings):
            self.endings[:] = [ModelEnding.of(norm, head, hidden, logits)]
        return self.endings[0]

    def _parts(self, model: nn.Module, called: Sequence[nn.Module]) -> tuple[Things, Sequence[Mapping[Any, Any]]]:
        """(modules on the way to these, their forwards, and settings of the model; all their hooks)."""
        names = self.path.split(".")
        within = [model.get_submodule(".".join(names[: n + 1])) for n in range(len(names))]
        lists = [one for one in self.decoder.children() if isinstance(one, nn.ModuleList)]
        held = [(one._modules, name) for one in (model, *within, *lists) for name in one._modules]
        held += [(one.__dict__, "forward") for one in (*within, *called)]
        configs = (vars(one.config) for one in (model, self.decoder))
        held += [(config, name) for config in configs for name in dict.fromkeys((*config, *SETTINGS))]
        hooks = [one._forward_hooks for one in (*within, *called)]
        hooks += [one._forward_pre_hooks for one in (*within, *called) if one is not self.decoder]
        return Things([holder for holder, _ in held], [name for _, name in held]), hooks


def serve_token_passes(model: nn.Module) -> bool:
    """Let passes of one token go straight through a model whose decoder's layers are served; returns whether they may."""
    paths = {stack_of(path) for path, _ in expert_modules(model) if not of_mtp(path)}
    stacks = [path for path in paths if path and not is_vision(path)]
    if len(stacks) != 1 or "forward" in model.__dict__ or model.get_output_embeddings() is None:  # type: ignore[operator]
        return False
    decoder, signature = model.get_submodule(stacks[0]), inspect.signature(model.forward)
    layers = [layer for one in decoder.children() if isinstance(one, nn.ModuleList) for layer in one]
    served = [found for found in map(served_by, layers) if found is not None]
    if not served or len(served) < len(layers) or windows(decoder.config) or next(iter(signature.parameters)) != IDS:
        return False
    if decoder._forward_pre_hooks.keys() != decoder._forward_pre_hooks_with_kwargs.keys():
        return False
    (_, watch, ahead), begins = served[0], list(decoder._forward_pre_hooks.values())
    straight = StraightLayers([layer for layer, _, _ in served], ahead)
    give_forward([(model, TokenPasses(stacks[0], decoder, watch, begins, straight))], _forward)
    model.forward.__signature__ = signature  # type: ignore[attr-defined]  # generate() asks for the names of arguments
    return True


def _forward(reference: Any, passes: TokenPasses, *args: Any, **kwargs: Any) -> Any:
    model = reference()
    named = {**kwargs, **dict(zip((IDS,), args))}  # often the only argument without a name
    output = passes.run(model, named) if len(named) == len(args) + len(kwargs) else None
    return type(model).forward(model, *args, **kwargs) if output is None else output


def _is_one_token(given: Mapping[str, Any], cache: Any) -> bool:
    """Whether the pass is of one token behind others of one sequence, all of which it sees."""
    ids, mask, positions = given.get(IDS), given.get(MASK), given.get(POSITIONS)
    if type(cache) is not DynamicCache or not isinstance(ids, torch.Tensor) or ids.shape != (1, 1) or not ids.is_cpu:
        return False
    if not isinstance(positions, torch.Tensor) or positions.ndim not in ROWS or positions.shape[-2:] != (1, 1):
        return False
    layers = cache.layers
    tokens = layers[0].tokens if layers and type(layers[0]) is GrowingLayer else 0
    if not tokens or not all(type(layer) is GrowingLayer and layer.tokens == tokens for layer in layers):
        return False
    return mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (1, tokens + 1) and bool(mask.all()))


def _staying(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are the same for all tokens; of the kinds of a sequence's tokens, which some releases hand on at full
    length, that of the token."""
    kept = {name: value for name, value in given.items() if name not in CHANGING and value is not None}
    return {name: value[..., -1:] if name in TOKEN_KINDS else value for name, value in kept.items()}


def _row_given(rotary: Event, embedded: torch.Tensor, positions: torch.Tensor) -> Row | None:
    """Which of the model's positions a rotary embedding got with the embeddings; None: it got something else."""
    named = dict(rotary.kwargs)
    args = (*rotary.args, named.pop(POSITIONS)) if POSITIONS in named else rotary.args
    if named or len(args) != 2 or not _same(args[0], embedded):
        return None
    return next((row for row in ROWS[positions.ndim] if _same(args[1], row(positions))), None)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether tensors, or tuples of them, have the same bits."""
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    typed = isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and ours.dtype is theirs.dtype
    if not typed or ours.shape != theirs.shape:
        return False
    bits = [part.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for part in (ours, theirs)]
    return ours.device == theirs.device and torch.equal(*bits)


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether arguments have the same names and values, as far as these can be compared."""

    def same(one: Any, other: Any) -> bool:
        return one is other or _same(one, other) or (isinstance(one, bool | int | float | str) and bool(one == other))

    return ours.keys() == theirs.keys() and all(same(value, theirs[name]) for name, value in ours.items())
