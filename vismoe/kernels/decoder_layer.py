"""What the latest token of each sequence, or several consecutive tokens of one, pass through in decoder layers, one or several in
one call.

Norm, projections of queries, keys and values, their norms, rotary embedding, attention over keys and values where they lie, the
output's projection, residual, norm, the choice of experts, and if they are resident the experts and their residual: each as the
function that computes it alone (`rows`, `cpu`, `attention`, `resident`), with its bits. Numbers are of one type, sums of products
float32.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vismoe.kernels import cpu
from vismoe.kernels.library import function
from vismoe.kernels.resident import MOST_PAIRS, Outcome, ResidentLayer
from vismoe.kernels.rows import NUMBER_OF

_SIZE, _PLACE, _NUMBER, _FLOAT, _DOUBLE = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_double
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [_PLACE, _PLACE, _SIZE]
_decoder_layers = function("vismoe_decoder_layers", [_PLACE, _SIZE, _PLACE, _SIZE, _PLACE, _PLACE, _SIZE], _SIZE)
_layer_chain = function(
    "vismoe_layer_chain",
    [_PLACE, _SIZE, *[_PLACE] * 3, _SIZE, ctypes.c_int64, *[_PLACE] * 2, _DOUBLE, *[_PLACE] * 3, _NUMBER],
    _SIZE,
)
MOST_TOKENS = 128  # of one sequence in a call: its thread keeps memory for them, 4 to 8 MB in models of 30 to 235 billion weights
PARTS = ("norms", "linears", "rotations", "cache", "attention", "routers", "experts")  # in the order of csrc/decoder_layer.cpp


class Weight(NamedTuple):
    """A weight `[out, in]` in any encoding, as `cpu.matrix_of` describes it; `held` keeps its memory."""

    matrix: cpu._Matrix
    base: int
    held: tuple[Tensor, ...]


class RowNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * (unit + weight), the mean over rows of `width` numbers."""

    weight: Tensor | None
    eps: float
    unit: float
    width: int


class Router(NamedTuple):
    """Chooses the `chosen` largest logits; their weights are a softmax over all, or if `normalised` over these, in `dtype`."""

    weight: Weight
    chosen: int
    normalised: bool
    dtype: torch.dtype


class Cached(NamedTuple):
    """Memory of one sequence's keys `[1, groups, room, D]` and values `[1, groups, room, E]`, contiguous, of which the first
    `tokens` are in use once its new ones are there."""

    keys: Tensor
    values: Tensor
    tokens: int


class Asked(NamedTuple):
    """The experts of the layer, each use of which counts `weight` at `tick`, and how they are added up (resident.py)."""

    layer: ResidentLayer
    weight: float
    tick: int
    outcome: Outcome = Outcome.APART


class CalledLayer(NamedTuple):
    """A layer of a call, where the keys and values of each sequence's new tokens go, and its experts, if these are asked for."""

    layer: "DecoderLayer"
    places: Sequence[Cached]
    asked: Asked | None = None


class FirstHalf(NamedTuple):
    """`residual`, shaped as the hidden states: these and attention; `normed`: its norm. Weights and ids `[n, K]`: what a router
    chose."""

    residual: Tensor
    normed: Tensor
    weights: Tensor | None
    ids: Tensor | None


@dataclass(frozen=True)
class HeadShape:
    """Query heads in groups that share the heads of keys (`columns` wide) and values."""

    inputs: int
    groups: int
    heads: int  # of a group
    columns: int
    value_columns: int


class _RowNorm(ctypes.Structure):
    _fields_ = [("weight", _PLACE), ("eps", _FLOAT), ("unit", _FLOAT), ("width", ctypes.c_int64)]

    @classmethod
    def of(cls, norm: RowNorm | None) -> "_RowNorm":
        if norm is None:
            return cls(None, -1.0, 0.0, 0)
        return cls(None if norm.weight is None else norm.weight.data_ptr(), *norm[1:])


class _Spent(ctypes.Structure):
    _fields_ = [("seconds", _DOUBLE), ("calls", ctypes.c_int64), ("bytes", ctypes.c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("matrices", _PLACE * 4),
        ("weights", _PLACE * 4),
        *((name, _RowNorm) for name in ("before", "of_queries", "of_keys", "behind")),
        ("router", _PLACE),
        ("router_weight", _PLACE),
        *((name, ctypes.c_int64) for name in ("inputs", "groups", "heads", "columns", "value_columns", "chosen")),
        ("scale", _FLOAT),
        *((name, _NUMBER) for name in ("dtype", "normalised", "weights_dtype")),
        ("spent", _Spent * len(PARTS)),
        ("first_half_s", _DOUBLE),
        ("experts_s", _DOUBLE),
    ]


class _CachedRow(ctypes.Structure):  # with _Layer and _Call as csrc/decoder_layer.cpp has them
    _fields_ = [("keys", _PLACE), ("values", _PLACE), *((name, ctypes.c_int64) for name in ("key_head", "value_head", "tokens"))]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _PLACE) for name in ("layer", "cached", "given", "residual", "normed", "weights", "ids", "experts")),
        ("weight", _DOUBLE),
        ("tick", _DOUBLE),
        ("demanded", _PLACE),
        ("out", _PLACE),
        *((name, _NUMBER) for name in ("found", "together", "outcome")),
    ]


WeakPair = tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]  # the keys and values that a row was told
_UNKNOWN: WeakPair = (lambda: None, lambda: None)


class _Room:
    """What a call for tokens `[n, 1]` of n sequences, or `[1, n]` of one, says and writes of a layer."""

    @torch.inference_mode(False)  # whose tensors nothing may write into outside of it
    def __init__(self, layer: int, tokens: tuple[int, int], inputs: int, router: Router | None, dtype: torch.dtype):
        (sequences, each), n = tokens, tokens[0] * tokens[1]
        self.tokens, self.rows = tokens, (_CachedRow * sequences)()
        self._known = [_UNKNOWN] * sequences
        self.given = torch.empty(n, 1, inputs, dtype=dtype) if each == 1 else None  # to the layer
        self.first_half = FirstHalf(
            torch.empty(*tokens, inputs, dtype=dtype),
            torch.empty(*tokens, inputs, dtype=dtype),
            None if router is None else torch.empty(n, router.chosen, dtype=router.dtype),
            None if router is None else torch.empty(n, router.chosen, dtype=torch.int64),
        )
        places = [None if part is None else part.data_ptr() for part in (self.given, *self.first_half)]
        self.call = _Call(layer, ctypes.addressof(self.rows), *places, together=each > 1)
        self.at = ctypes.addressof(self.call)
        self.ids = None if self.first_half.ids is None else self.first_half.ids.numpy()

    def say(self, places: Sequence[Cached], asked: Asked | None) -> None:
        assert len(places) == len(self.rows), (len(places), self.tokens)
        for place, (keys, values, tokens) in enumerate(places):
            row, (known_keys, known_values) = self.rows[place], self._known[place]
            if known_keys() is not keys or known_values() is not values:  # mostly they stay from token to token
                self._known[place] = _UNKNOWN  # until all is said: Ctrl-C may come in between
                row.keys, row.values = keys.data_ptr(), values.data_ptr()
                row.key_head, row.value_head = keys.stride(1), values.stride(1)
                self._known[place] = weakref.ref(keys), weakref.ref(values)
            row.tokens = tokens
        call = self.call
        call.experts = None
        if asked is not None:
            layer, call.weight, call.tick, call.outcome = asked
            call.experts, call.demanded = layer.at, layer.experts_at


class DecoderLayer:
    """Made for one layer's weights, which it holds.

    linears: of queries, keys, values and of the output. norms: before attention, of queries, of keys (of each head, or of all of
    a token; None: there is none), and behind attention. scale: of the products of queries and keys. dtype: of everything but the
    weights of experts.
    """

    def __init__(
        self,
        shape: HeadShape,
        linears: Sequence[Weight],
        norms: tuple[RowNorm, RowNorm | None, RowNorm | None, RowNorm],
        router: Router | None,
        scale: float,
        dtype: torch.dtype,
    ):
        self.shape, self.scale, self.dtype, self.router = shape, scale, dtype, router
        self._linears, self._norms = tuple(linears), norms  # held, for the addresses below
        places = [ctypes.addressof(weight.matrix) for weight in self._linears]
        chosen = (0, False, torch.float32) if router is None else router[1:]
        self._layer = _Layer(
            (_PLACE * 4)(*places),
            (_PLACE * 4)(*(weight.base for weight in self._linears)),
            *map(_RowNorm.of, norms),
            None if router is None else ctypes.addressof(router.weight.matrix),
            None if router is None else router.weight.base,
            *(shape.inputs, shape.groups, shape.heads, shape.columns, shape.value_columns, chosen[0]),
            scale,
            *(NUMBER_OF[dtype], chosen[1], NUMBER_OF[chosen[2]]),
        )
        self._at = ctypes.addressof(self._layer)
        self._rooms = threading.local()

    def _room(self, tokens: tuple[int, int]) -> "_Room":
        """This thread's memory for such tokens, which every call writes anew: allocating it would take as long as a norm."""
        room: _Room | None = getattr(self._rooms, "room", None)
        if room is None or room.tokens != tokens:
            room = self._rooms.room = _Room(self._at, tokens, self.shape.inputs, self.router, self.dtype)
        return room

    def release(self) -> None:
        """Give up this thread's memory, as after a call of many tokens."""
        self._rooms.room = None

    def takes(self, hidden: Tensor) -> bool:
        """Whether `run_layers` computes hidden `[n, 1, H]` or `[1, n, H]`: contiguous, in the layer's type, on the CPU."""
        shape = hidden.shape
        fits = len(shape) == 3 and shape[2] == self.shape.inputs and hidden.dtype is self.dtype
        if not fits or not _go_together(shape):
            return False
        few = self.router is None or shape[0] * shape[1] * self.router.chosen <= MOST_PAIRS
        return few and hidden.is_contiguous() and hidden.is_cpu

    def takes_cached(self, keys: Tensor, values: Tensor) -> bool:
        """The same of what a sequence has cached, keys `[1, groups, S, D]` and values `[1, groups, S, E]`."""
        shape = self.shape
        fits = (
            keys.ndim == values.ndim == 4
            and keys.shape[:2] == values.shape[:2] == (1, shape.groups)
            and (keys.shape[3], values.shape[3]) == (shape.columns, shape.value_columns)
        )
        return fits and all(part.dtype is self.dtype and part.is_cpu for part in (keys, values))

    def takes_angles(self, cos: Tensor, sin: Tensor) -> bool:
        """The same of angles `[n, 1, R]` or `[1, n, R]`, R even; n must be that of the hidden states."""
        shape = cos.shape
        fits = len(shape) == 3 and shape[2] <= self.shape.columns and not shape[2] % 2 and shape == sin.shape
        if not fits or not _go_together(shape):
            return False
        return all(part.dtype is self.dtype and part.is_contiguous() and part.is_cpu for part in (cos, sin))

    def was_given(self, hidden: Tensor) -> bool:
        """Whether these, which it `takes`, are the bits that this thread's latest `run_layers` has computed its output of. It has
        not noted those of several tokens of a sequence."""
        room: _Room | None = self._rooms.room
        given = None if room is None else room.given
        if given is None:
            return False
        nbytes = given.nbytes
        return hidden.nbytes == nbytes and not _memcmp(hidden.data_ptr(), given.data_ptr(), nbytes)

    def take_over(self, room: "_Room") -> None:
        """Copy what a call for one token wrote there to where `first_half` and `was_given` of this thread look."""
        own = self._room((1, 1))
        assert own.given is not None and room.given is not None
        own.given.copy_(room.given)
        for ours, theirs in zip(own.first_half, room.first_half):
            if ours is not None and theirs is not None:
                ours.copy_(theirs)

    def first_half(self) -> FirstHalf:
        """Of this thread's latest `run_layers`, in memory of its own; once, for several tokens of a sequence."""
        room: _Room = self._rooms.room
        if room.given is None:
            self.release()
            return room.first_half
        return FirstHalf(*(None if part is None else part.clone() for part in room.first_half))  # type: ignore[arg-type]

    def chosen(self) -> np.ndarray:
        """The ids int64 `[n, K]` of experts of this thread's latest `run_layers`."""
        return self._rooms.room.ids.copy()

    @property
    def spent_s(self) -> tuple[float, float]:
        """Seconds of the latest `run_layers` before the experts, and of these if it computed them."""
        return self._layer.first_half_s, self._layer.experts_s

    def spent(self) -> dict[str, tuple[float, int, int]]:
        """What each of PARTS has taken so far: seconds, calls, and bytes of weights, keys and values (but for experts)."""
        return {part: (sums.seconds, sums.calls, sums.bytes) for part, sums in zip(PARTS, self._layer.spent, strict=True)}


def _go_together(shape: Sequence[int]) -> bool:
    """Whether it is one token of each sequence, or few of one: `[n, 1, ...]`, `[1, n, ...]`."""
    return shape[1] == 1 or shape[0] == 1 < shape[1] <= MOST_TOKENS


def run_layers(calls: Sequence[CalledLayer], hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[tuple[Tensor, int]], bool]:
    """([(the output of a layer, how many experts were demanded)] of the first layers, up to one whose experts are not asked for,
    or not all resident; whether that one's `first_half` was computed).

    hidden: of the first layer, `[n, 1, H]` of the latest tokens of n sequences, or `[1, n, H]` of those of one, which attend as a
    prompt's do; outputs are shaped alike. New keys and values are written into the sequences' memory. cos, sin: `[n, 1, R]` or
    `[1, n, R]`. Raises BudgetError, CheckpointError for the first layer; a later one that fails is left out.
    """
    cpu.setup()
    (sequences, each, _), rooms, outs = hidden.shape, [], []
    n = sequences * each
    for layer, places, asked in calls:
        room = layer._room((sequences, each))
        room.say(places, asked)
        rooms.append(room)
        if asked is not None:
            outs.append(out := torch.empty_like(hidden))
            room.call.out = out.data_ptr()
    at = (_PLACE * len(calls))(*(room.at for room in rooms))
    made = _decoder_layers()(at, len(calls), hidden.data_ptr(), n, cos.data_ptr(), sin.data_ptr(), cos.shape[2])
    begun = made < len(calls) and rooms[made].call.found == -1
    if made == 0 and not begun:
        cpu.refuse(-1 - rooms[0].call.found)
    return [(out, room.call.found) for out, room in zip(outs[:made], rooms)], begun


class _Ending(ctypes.Structure):  # as csrc/decoder_layer.cpp has it
    _fields_ = [
        ("norm", _RowNorm),
        *((name, _PLACE) for name in ("head", "head_weight", "normed", "logits")),
        ("seconds", _DOUBLE),
        ("ended", _NUMBER),
    ]


class Ending:
    """The norm behind the last layer and the head `[V, H]`, whose weights it holds. dtype: of hidden states, of the norm's weight
    and of logits. Of one thread at a time."""

    def __init__(self, norm: RowNorm, head: Weight, dtype: torch.dtype):
        assert head.matrix.inputs == norm.width, (head.matrix.inputs, norm.width)
        assert norm.weight is None or norm.weight.dtype is dtype, (norm.weight.dtype, dtype)
        self._held, self.outputs, self.dtype = (norm, head), int(head.matrix.rows), dtype
        with torch.inference_mode(False):
            self._normed = torch.empty(norm.width, dtype=dtype)
        at = ctypes.addressof(head.matrix), head.base, self._normed.data_ptr(), None
        self._call = _Ending(_RowNorm.of(norm), *at, 0.0, 0)
        self.at = ctypes.addressof(self._call)

    def room(self) -> Tensor:
        """Memory for the logits `[1, 1, V]` of the next call."""
        logits = torch.empty(1, 1, self.outputs, dtype=self.dtype)
        self._call.logits = logits.data_ptr()
        return logits

    @property
    def has_ended(self) -> bool:
        """Whether the latest call has computed the logits."""
        return bool(self._call.ended)

    @property
    def seconds(self) -> float:
        """Of the latest call."""
        return float(self._call.seconds)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `[1, 1, V]` of hidden `[1, 1, H]`, which is contiguous. Raises BudgetError."""
        assert hidden.dtype is self.dtype and hidden.numel() == len(self._normed), (hidden.dtype, hidden.shape)
        cpu.setup()
        logits, none = self.room(), [None] * 2
        _layer_chain()(None, 0, hidden.data_ptr(), *none, 0, 0, *none, 0.0, *none, self.at, NUMBER_OF[self.dtype])
        cpu.refuse(not self.has_ended)
        return logits


class LayerChain:
    """Decoder layers with their experts, one behind the other, for tokens of one sequence: what a call says of all layers stays
    as long as keys and values lie where they did, so that a token costs no time for each layer.

    places: of its next token, in each layer. tables: the number of each layer's page table. room: tokens for which all layers
    have memory. Of one thread at a time.
    """

    def __init__(self, layers: Sequence[tuple[DecoderLayer, ResidentLayer]], places: Sequence[Cached], tables: Sequence[int]):
        self._layers, self._rooms = layers, list[_Room]()
        self.room = min(keys.shape[2] for keys, _, _ in places)
        with torch.inference_mode(False):
            self._outs = torch.empty(len(layers), 1, 1, layers[0][0].shape.inputs, dtype=layers[0][0].dtype)
        for (native, experts), place, out in zip(layers, places, self._outs, strict=True):
            room = _Room(native._at, (1, 1), native.shape.inputs, native.router, native.dtype)
            room.say([place], Asked(experts, 0.0, 0))
            room.call.out = out.data_ptr()
            self._rooms.append(room)
        self._calls = (_PLACE * len(layers))(*(room.at for room in self._rooms))
        self.found = np.zeros(len(layers), dtype=np.int32)  # how many experts each layer wanted
        self.seconds = np.zeros((len(layers), 2))  # before its experts, and of these
        self._tables = np.array(tables, dtype=np.int32)
        self._arrays = [(each.ctypes.data, each.strides[0]) for each in (self._tables, self.found, self.seconds)]

    def run(
        self,
        first: int,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        tokens: int,
        weights: Sequence[float],
        tick: int,
        ending: Ending | None,
    ) -> tuple[int, bool, Tensor | None]:
        """(how many layers from `first` on have an output, whether the first half of the next one was computed, whose experts are
        not all resident, the logits `[1, 1, V]` of that ending if the last layer has an output). hidden `[1, 1, H]` is given to
        the layer `first`, by the sequence's token number `tokens`, with angles cos and sin `[1, 1, R]`; each use of an expert
        counts the weight of its layer's table, at `tick` in that layer and one later in each behind it. Raises BudgetError,
        CheckpointError for the layer `first`; a later one that fails is left out. If the ending fails, there are no logits."""
        cpu.setup()
        assert ending is None or ending.dtype is hidden.dtype, (ending.dtype, hidden.dtype)
        cos, sin = angles
        calls, count = ctypes.addressof(self._calls) + first * ctypes.sizeof(_PLACE), len(self._rooms) - first
        tables, *results = (at + first * stride for at, stride in self._arrays)
        given = hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[2]
        logits, at = (None, None) if ending is None else (ending.room(), ending.at)
        uses = (_DOUBLE * len(weights))(*weights), tables, tick
        made: int = _layer_chain()(calls, count, *given, tokens, *uses, *results, at, NUMBER_OF[hidden.dtype])
        begun = made < count and bool(self.found[first + made] == -1)
        if made == 0 and not begun:
            cpu.refuse(-1 - int(self.found[first]))
        return made, begun, logits if ending is not None and ending.has_ended else None

    def output(self, place: int) -> Tensor:
        """Of the layer at this place `[1, 1, H]`, in memory that the next call writes anew."""
        return self._outs[place]

    def chosen(self, place: int) -> np.ndarray:
        """The ids int64 `[1, K]` of its experts."""
        ids = self._rooms[place].ids
        assert ids is not None
        return ids.copy()

    def leave(self, place: int) -> None:
        """The layer at this place, of which the first half was computed, goes on as after `run_layers`."""
        self._layers[place][0].take_over(self._rooms[place])
