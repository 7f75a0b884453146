"""Which expert is evicted when a slab is needed: a pure function of arrays.

The order (VisMMoE 3.4.2): *streamed* (read for one prefill chunk and used up), then *expired* (its layer is not among the
next W MoE layers, whichever token brought it in), then *speculative* (in the window, prefetched,
not yet demanded), then *window-protected* (in the window and demanded before), farthest layer first. Within a class the
lowest score goes first; ties by slab index. The window does not wrap over the end of the model.

An expert that is promised to the running round (promises.py) leaves only when a demand finds no other, farthest layer first.

Never taken: free slabs (there is nothing in them), loading or pinned ones, and what the running layer still has to compute.
A prefetch may take only the first three classes, and a speculative slab only from a lower priority than its own; never what is
promised.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SlabView:
    """What eviction may know of a pool. All arrays are `[S]`, one entry per slab, and are only read."""

    layer: np.ndarray  # int32: MoE layer of the resident expert
    evictable: np.ndarray  # bool: resident, not pinned, not waited for by the running layer
    streamed: np.ndarray  # bool: passed through the ring, for one prefill chunk or streamed pass, and was computed
    speculative: np.ndarray  # bool: prefetched and not yet demanded
    promised: np.ndarray  # bool: the running round will want it
    priority: np.ndarray  # float32: the lookahead's score of the resident expert for this token
    worth: np.ndarray  # float64: what the order inside a class says it is worth (lru: last use, lfu: uses)


def choose_victim(slabs: SlabView, running_layer: int, window: int, prefetch_priority: float | None = None) -> int | None:
    """The slab to take next; None when none may be taken.

    `running_layer` is the MoE layer being computed (-1 before the first); layers `running_layer + 1 .. + window` are protected.
    `prefetch_priority` is None for a demand; for a prefetch it is the priority of the expert that wants in.
    """
    candidates = np.flatnonzero(slabs.evictable & ~slabs.promised)
    if candidates.size == 0:
        return _farthest(slabs, np.flatnonzero(slabs.evictable)) if prefetch_priority is None else None
    streamed = slabs.streamed[candidates]
    if streamed.any():
        return _least(slabs.worth, candidates[streamed])
    layer = slabs.layer[candidates]
    in_window = (layer > running_layer) & (layer <= running_layer + window)
    if not in_window.all():
        return _least(slabs.worth, candidates[~in_window])
    guessed = candidates[slabs.speculative[candidates]]
    if prefetch_priority is not None:
        guessed = guessed[slabs.priority[guessed] < prefetch_priority]
    if guessed.size:
        return _least(slabs.worth, guessed)
    return _farthest(slabs, candidates) if prefetch_priority is None else None


def _farthest(slabs: SlabView, candidates: np.ndarray) -> int | None:
    """Of the farthest layer the one with the lowest score."""
    layer = slabs.layer[candidates]
    return _least(slabs.worth, candidates[layer == layer.max()]) if layer.size else None


def _least(score: np.ndarray, members: np.ndarray) -> int:
    """The first of `members` (slabs) with the lowest score."""
    return int(members[score[members].argmin()])
