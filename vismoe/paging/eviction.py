"""Who leaves when a slab is needed: a pure function of arrays, shared by the pager and by replay on traces.

The order (VisMMoE 3.4.2): *streamed* (read for one prefill chunk and used up), then *expired* (its layer is not among the
next W MoE layers of this token; what an earlier token left there counts), then *speculative* (in the window, prefetched,
not yet demanded), then *window-protected* (in the window and demanded before), farthest layer first. Within a class the
lowest score goes first; ties by slab index. The window does not wrap over the end of the model.

Never taken: free slabs (there is nothing in them), loading or pinned ones, and what the running layer still has to compute.
A prefetch may take only the first three classes, and a speculative slab only from a lower priority than its own.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["SlabView", "choose_victims"]


@dataclass(frozen=True)
class SlabView:
    """What eviction may know of a pool. All arrays are `[S]`, one entry per slab, and are only read."""

    layer: np.ndarray  # int32: MoE layer of the resident expert
    evictable: np.ndarray  # bool: resident, not pinned, not waited for by the running layer
    streamed: np.ndarray  # bool: came in for one prefill chunk only and was computed
    speculative: np.ndarray  # bool: prefetched and not yet demanded
    priority: np.ndarray  # float32: the lookahead's score of the resident expert for this token
    score: np.ndarray  # float64: what the order inside a class says it is worth (lru: last use, lfu: uses)


def choose_victims(
    slabs: SlabView, count: int, running_layer: int, window: int, prefetch_priority: float | None = None
) -> np.ndarray:
    """Up to `count` slab indices (int64), best victim first.

    `running_layer` is the MoE layer being computed (-1 before the first); layers `running_layer + 1 .. + window` are protected.
    `prefetch_priority` is None for a demand; for a prefetch it is the priority of the expert that wants in.
    Fewer than `count` come back only when no more may be taken.
    """
    candidates = np.flatnonzero(slabs.evictable)
    if count <= 0 or candidates.size == 0:
        return candidates[:0]
    ahead = slabs.layer[candidates] - running_layer
    in_window = (ahead >= 1) & (ahead <= window)
    streamed = slabs.streamed[candidates]
    chosen: list[np.ndarray] = []

    def take(members: np.ndarray) -> bool:
        """Add the lowest scores among `members` (slab indices); True when there are enough."""
        wanted = count - sum(part.size for part in chosen)
        if members.size > wanted:
            if wanted == 1:
                members = members[[np.argmin(slabs.score[members])]]
            else:
                members = members[np.argsort(slabs.score[members], kind="stable")[:wanted]]
        elif members.size > 1:
            members = members[np.argsort(slabs.score[members], kind="stable")]
        chosen.append(members)
        return members.size == wanted

    if streamed.any() and take(candidates[streamed]):
        return chosen[0]
    if take(candidates[~in_window & ~streamed]):
        return np.concatenate(chosen)
    window_members = in_window & ~streamed
    speculative = slabs.speculative[candidates]
    guessed = candidates[window_members & speculative]
    if prefetch_priority is not None:
        take(guessed[slabs.priority[guessed] < prefetch_priority])
        return np.concatenate(chosen)
    if take(guessed):
        return np.concatenate(chosen)
    protected = candidates[window_members & ~speculative]
    order = np.lexsort((slabs.score[protected], -slabs.layer[protected]))
    wanted = count - sum(part.size for part in chosen)
    return np.concatenate([*chosen, protected[order[:wanted]]])
