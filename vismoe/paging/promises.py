"""What drafted tokens will demand when they are verified: promises, with deadlines (MoE-SpeQ, the lookahead buffer).

A round drafts some tokens with a cheap model, one pass after the other, and verifies them in one pass of the model. The routers
of the draft passes name experts that verification will demand with near certainty, since every drafted token is verified,
accepted or not. An expert is promised once, whatever number of tokens chose it: (rows, first step, confidence). The earliest
deadline comes first: the lowest layer, then the most rows, the earliest step, and the highest confidence. A promised resident
stays. An absent expert is copied as soon as it is promised: to wait for later passes, or for the end of drafting where a router
was not sure, would save some bytes, which the link has time for, and leave more layers with a miss. A promise ends when the
router of its layer has spoken in verification, and with the round.

`Promises` is pure: which experts are where, the page tables alone say. Promises have an account of their own, which is settled
once per round, and take no part in the ledger of guesses (speculation.py).
"""

import enum
import itertools
from collections.abc import Sequence

import numpy as np

COUNTERS = ("promised", "foreseen", "promised_bytes", "wasted_promised_bytes")  # of `vismoe.metrics`, in the account's order
PROMISED, FORESEEN, COPIED_BYTES, WASTED_BYTES = range(len(COUNTERS))
SPARE = 2  # slabs that promises leave beside those for all promised experts of one layer
MOST = 15  # rows, and draft passes, that the order of deadlines tells apart
SHADES = 2**12  # of confidence


class Stage(enum.Enum):
    """Of a round."""

    NONE = enum.auto()  # there is no round
    DRAFTING = enum.auto()
    DRAFTED = enum.auto()  # the pass that verifies has not begun
    VERIFYING = enum.auto()


class Promises:
    """The promises of one round. Experts have one numbering: those of the first geometry by their flat index, then the next's.

    Arrays are `[N]`, one entry per expert. `kept`: the promises that slabs are held and sought for, earliest deadline first, as
    far as the slabs reach.
    """

    def __init__(self, layers: Sequence[np.ndarray], nbytes: Sequence[int]):
        """By geometry: the MoE layer of each expert, ascending, and the bytes that copying an expert moves."""
        ends = np.cumsum([0, *map(len, layers)]).tolist()
        self.parts = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self._layer = np.concatenate(layers).astype(np.int64)
        self._nbytes = np.repeat(np.asarray(nbytes, np.int64), [len(part) for part in layers])
        count = len(self._layer)
        self.rows, self.first_step = np.zeros(count, np.uint8), np.zeros(count, np.uint8)  # rows: tokens that chose it; 0: none
        self.confidence = np.zeros(count, np.float32)  # the largest weight that a router gave it
        self.kept, self._copied, self._failed = (np.zeros(count, bool) for _ in range(3))
        self.stage, self.step = Stage.NONE, 0  # step: the draft pass, from 1
        self._last_layer = 0
        self._layers = [np.unique(part) for part in layers]
        self._named = np.zeros(int(self._layer.max(initial=-1)) + 1, np.int64)  # promises of each layer
        self._account = np.zeros((len(COUNTERS), len(self._named)), np.int64)

    def __bool__(self) -> bool:
        """A round is under way."""
        return self.stage is not Stage.NONE

    # -- a round
    def begin(self) -> None:
        assert not self
        self.stage, self.step, self._last_layer = Stage.DRAFTING, 0, len(self._layer)

    def name(self, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        """A draft pass has routed tokens at this layer to `experts` `[T, K]`, different ones in a row, with the router's
        `weights` `[T, K]`."""
        self.step += layer <= self._last_layer
        self._last_layer = layer
        for chosen, confidence in zip(experts, weights, strict=True):
            new = chosen[self.rows[chosen] == 0]
            self.first_step[new] = min(self.step, MOST)
            self.rows[chosen] += 1
            self.confidence[chosen] = np.maximum(self.confidence[chosen], confidence)
            self._named[layer] += len(new)
            self._account[PROMISED, layer] += len(new)

    def demand(self, layer: int, experts: np.ndarray) -> None:
        """The router of `layer` has spoken, in the model's own pass: it demands `experts` `[n]`."""
        foreseen = experts[self.rows[experts] > 0]
        self._account[FORESEEN, layer] += len(foreseen)
        self._copied[foreseen] = False  # used
        self._expire(np.flatnonzero((self.rows > 0) & (self._layer <= layer)))
        self._named[: layer + 1] = 0

    def end(self) -> np.ndarray:
        """The round is over, and what is left expires. The account, int64 `[counter, layer]`."""
        self._expire(slice(None))
        self._named[:] = 0
        self.stage = Stage.NONE
        account, self._account = self._account, np.zeros_like(self._account)
        return account

    def _expire(self, experts: np.ndarray | slice) -> None:
        self._waste(experts)
        for array in (self.rows, self.confidence, self.kept, self._failed):
            array[experts] = 0

    def _waste(self, experts: np.ndarray | slice) -> None:
        """What was copied of these was copied for nothing."""
        copied = self._copied[experts]
        np.add.at(self._account[WASTED_BYTES], self._layer[experts][copied], self._nbytes[experts][copied])
        self._copied[experts] = False

    # -- order
    def keep(self, geometry: int, slabs: int) -> None:
        """Of a geometry that has so many slabs for experts that may leave: hold and seek those for which there are enough."""
        part, room = self.parts[geometry], self.room(geometry, slabs)
        self.kept[part] = self.rows[part] > 0
        if self._named[self._layers[geometry]].sum() > room:
            named = part.start + np.flatnonzero(self.kept[part])
            self.kept[named[np.argpartition(self.deadline(named), room)[room:]]] = False

    def room(self, geometry: int, slabs: int) -> int:
        """How many promises are kept at most: those of one layer, and two more slabs, are left for its demand."""
        return max(0, slabs - int(self._named[self._layers[geometry]].max(initial=0)) - SPARE)

    def deadline(self, experts: np.ndarray) -> np.ndarray:
        """int64 `[n]`, different for each expert; the least comes first."""
        rows = MOST - np.minimum(self.rows[experts], MOST).astype(np.int64)
        doubt = (SHADES * (1 - np.minimum(self.confidence[experts], 1))).astype(np.int64)
        return ((self._layer[experts] << 8 | rows << 4 | self.first_step[experts]) * SHADES * 2 + doubt) << 24 | experts

    def may_copy(self, geometry: int, absent: np.ndarray) -> np.ndarray:
        """Which of the experts that are `absent` bool `[F]` of a geometry are to be copied `[n]`."""
        part = self.parts[geometry]
        return part.start + np.flatnonzero(self.kept[part] & ~self._failed[part] & absent)

    # -- copies
    def copy_begins(self, expert: int) -> None:
        self._copied[expert] = True
        self._account[COPIED_BYTES, self._layer[expert]] += self._nbytes[expert]

    def copy_failed(self, expert: int) -> None:
        """It is not tried again in this round."""
        self._failed[expert] = self.rows[expert] > 0
        self._waste(np.array([expert]))

    def evicted(self, expert: int) -> None:
        """A demand had to take its slab."""
        self._waste(np.array([expert]))

    def check_integrity(self, slabs: Sequence[int], running_layer: int) -> None:
        """`slabs` by geometry, as of `keep`."""
        named = self.rows > 0
        assert self or not (named | (self._account != 0).any()).any(), "a promise without a round"
        assert not ((self.kept | self._copied | self._failed) & ~named).any(), "something is noted of what is not promised"
        assert (self._account[WASTED_BYTES] <= self._account[COPIED_BYTES]).all()
        assert (self._account[FORESEEN] <= self._account[PROMISED]).all()
        counted = np.bincount(self._layer[named], minlength=len(self._named))
        assert np.array_equal(counted, self._named), "promises of a layer are miscounted"
        assert not named.any() or self._layer[named].min() > running_layer, "a promise outlives its layer"
        for geometry, part in enumerate(self.parts):
            room = self.room(geometry, slabs[geometry])
            assert np.count_nonzero(self.kept[part]) == min(room, np.count_nonzero(named[part])), "promises for more than slabs"
