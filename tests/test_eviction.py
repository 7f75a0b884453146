"""Evictions against a slow reference written from the docstring: sort every takeable slab by (class, ..., worth, slab)."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.paging.eviction import Eviction, TableArrays
from vismoe.paging.page_table import FREE, LOADING, RESIDENT

STREAMED, EXPIRED, SPECULATIVE, PROTECTED, PROMISED = range(5)


@dataclasses.dataclass(frozen=True)
class SlabView:
    """A pool: arrays `[S]`."""

    layer: np.ndarray  # int32: MoE layer of the resident expert
    evictable: np.ndarray  # bool: resident, not pinned, not waited for by the running layer
    streamed: np.ndarray  # bool
    speculative: np.ndarray  # bool
    promised: np.ndarray  # bool
    priority: np.ndarray  # float32: of the lookahead
    worth: np.ndarray  # float64

    def arrays(self) -> TableArrays:
        """As a page table has them. What is not evictable is free, loading, pinned or demanded."""
        size, kept = len(self.layer), ~self.evictable
        which, by_expert = np.arange(size, dtype=np.int32), np.arange(size)[::-1]
        state = np.where(kept & (which % 4 == 0), FREE, np.where(kept & (which % 4 == 1), LOADING, RESIDENT)).astype(np.uint8)
        expert_in = np.where(state == FREE, -1, which[::-1]).astype(np.int32)
        none = np.zeros(size, dtype=bool)
        return TableArrays(
            expert_in, self.layer.astype(np.int32), np.full(size, -1, np.int32), state, kept & (which % 4 == 2),
            kept & (which % 4 == 3), none, self.streamed, self.speculative, none, self.worth, which[::-1].copy(),
            np.full(size, -1, np.int32), self.promised[by_expert], none, self.priority.astype(np.float32)[by_expert],
            np.zeros(size),
        )  # fmt: skip


def choose_victim(slabs, running_layer, window, prefetch_priority=None, free=9):
    return eviction(slabs.arrays()).victim(running_layer, window, prefetch_priority, free=free)


def eviction(arrays):
    return Eviction(arrays, None, RESIDENT, LOADING, by_tick=False)


def class_of(slabs, slab, running_layer, window):
    if slabs.promised[slab]:
        return PROMISED
    if slabs.streamed[slab]:
        return STREAMED
    if not running_layer < slabs.layer[slab] <= running_layer + window:
        return EXPIRED
    return SPECULATIVE if slabs.speculative[slab] else PROTECTED


def reference(slabs, running_layer, window, prefetch_priority):
    def key(slab):
        kind = class_of(slabs, slab, running_layer, window)
        farthest_first = -int(slabs.layer[slab]) if kind >= PROTECTED else 0
        return kind, farthest_first, float(slabs.worth[slab]), slab

    def may_take(slab):
        if not slabs.evictable[slab]:
            return False
        if prefetch_priority is None:
            return True
        kind = class_of(slabs, slab, running_layer, window)
        return kind < SPECULATIVE or (kind == SPECULATIVE and slabs.priority[slab] < prefetch_priority)

    return sorted(filter(may_take, range(len(slabs.layer))), key=key)


def victims(slabs, running_layer, window, prefetch_priority=None):
    """All that may be taken, one after the other."""
    chosen, evictable = [], slabs.evictable.copy()
    while (
        slab := choose_victim(dataclasses.replace(slabs, evictable=evictable), running_layer, window, prefetch_priority)
    ) is not None:
        chosen.append(slab)
        evictable[slab] = False
    return chosen


@st.composite
def pools(draw, largest=24):
    """Few distinct layers, priorities and scores, so that every class and every tie comes up."""
    size = draw(st.integers(0, largest))

    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype)

    few = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return SlabView(
        layer=column(st.integers(-1, 9), np.int32),
        evictable=column(st.booleans(), bool),
        streamed=column(st.booleans(), bool),
        speculative=column(st.booleans(), bool),
        promised=column(st.booleans(), bool),
        priority=column(few, np.float32),
        worth=column(few | st.floats(-1e6, 1e6), np.float64),
    )


@pytest.mark.budget(6)
@settings(max_examples=500, deadline=None)
@given(
    slabs=pools(),
    running_layer=st.integers(-1, 9),
    window=st.integers(0, 6),
    prefetch_priority=st.none() | st.sampled_from([0.0, 0.25, 0.3, 2.0]),
)
def test_victims_are_those_of_the_reference_in_the_same_order(slabs, running_layer, window, prefetch_priority):
    chosen = victims(slabs, running_layer, window, prefetch_priority)
    assert chosen == reference(slabs, running_layer, window, prefetch_priority)


@settings(max_examples=200, deadline=None)
@given(slabs=pools(), running_layer=st.integers(-1, 9), window=st.integers(0, 6))
def test_a_demand_finds_as_many_victims_as_are_evictable(slabs, running_layer, window):
    chosen = victims(slabs, running_layer, window)
    assert sorted(chosen) == np.flatnonzero(slabs.evictable).tolist()


@settings(max_examples=100, deadline=None)
@given(slabs=pools(), running_layer=st.integers(-1, 9), priority=st.sampled_from([None, 0.3]))
def test_the_pool_is_only_read(slabs, running_layer, priority):
    arrays = slabs.arrays()
    before = {name: array.copy() for name, array in vars(arrays).items()}
    eviction(arrays).victim(running_layer, 3, priority)
    assert all(np.array_equal(before[name], array) for name, array in vars(arrays).items())


def one_of_each_class(**columns):
    """Slab i is of class i (running layer 2, window 3), all evictable, equal in everything else."""
    defaults = dict(
        layer=np.array([4, 1, 4, 4, 3], np.int32),
        evictable=np.ones(5, bool),
        streamed=np.array([True, False, False, False, True]),
        speculative=np.array([False, False, True, False, True]),
        promised=np.array([False, False, False, False, True]),
        priority=np.zeros(5, np.float32),
        worth=np.zeros(5),
    )
    return SlabView(**{**defaults, **columns})


def test_classes_come_before_scores():
    slabs = one_of_each_class(worth=np.array([9.0, 8.0, 7.0, 6.0, 5.0]))
    assert victims(slabs, running_layer=2, window=3) == [STREAMED, EXPIRED, SPECULATIVE, PROTECTED, PROMISED]


@pytest.mark.parametrize(("priority", "taken"), [(0.5, [0, 1, 2]), (0.2, [0, 1])])
def test_a_prefetch_takes_a_guess_only_from_a_lower_priority_and_never_what_was_demanded_or_promised(priority, taken):
    slabs = one_of_each_class(priority=np.full(5, 0.3, np.float32))
    assert victims(slabs, running_layer=2, window=3, prefetch_priority=priority) == taken


def test_the_window_does_not_wrap_over_the_end_of_the_model():
    slabs = SlabView(
        np.array([0, 7], np.int32), *(np.array([value] * 2) for value in (True, False, False, False)), np.zeros(2), np.zeros(2)
    )
    assert choose_victim(slabs, running_layer=6, window=5) == 0  # layer 0 is next token's, so it has expired


def test_a_prefetch_leaves_a_slab_that_a_demand_can_take():
    one = SlabView(np.array([0], np.int32), np.array([True]), *(np.array([False]) for _ in range(3)), np.zeros(1), np.zeros(1))
    assert choose_victim(one, 2, 3, prefetch_priority=9.0, free=0) is None
    assert choose_victim(one, 2, 3, prefetch_priority=9.0, free=1) == 0 == choose_victim(one, 2, 3, free=0)
