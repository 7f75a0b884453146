"""The fewest fetches any paging could do on a recorded trace: Belady's MIN for sequences of demand sets.

A demand set is read with what is resident; once its layer is computed, any of the resident and the just fetched experts may
stay, up to the slots (so an expert may be used without being kept: bypass). Keeping those whose next use is nearest is optimal
for records of one size. No paging that does not know the future, prefetches included, fetches less with as many slabs.
"""

import heapq

import numpy as np

NEVER = np.iinfo(np.int64).max


def next_uses(demands: list[np.ndarray]) -> list[np.ndarray]:
    """For every member of every set, the index of the next set that has it (NEVER if none)."""
    if not demands:
        return []
    flat = np.concatenate(demands)
    sets = np.repeat(np.arange(len(demands)), [len(demand) for demand in demands])
    order = np.lexsort((sets, flat))
    following = np.full(len(flat), NEVER)
    same = flat[order[1:]] == flat[order[:-1]]
    following[order[:-1][same]] = sets[order[1:][same]]
    return np.split(following, np.cumsum([len(demand) for demand in demands])[:-1])


def oracle_misses(demands: list[np.ndarray], slots: int) -> list[int]:
    """Fetches at each demand set (arrays of ids, each id once per set), starting empty. O(N log N); ties leave by id."""
    next_use: dict[int, int] = {}  # of the resident experts
    farthest: list[tuple[int, int]] = []  # heap of (-next use, id); entries whose next use has changed are stale
    misses = []
    for experts, following in zip(demands, next_uses(demands), strict=True):
        ids = experts.tolist()
        misses.append(sum(expert not in next_use for expert in ids))
        for expert, use in zip(ids, following.tolist(), strict=True):
            if use == NEVER:
                next_use.pop(expert, None)
            else:
                next_use[expert] = use
                heapq.heappush(farthest, (-use, expert))
        while len(next_use) > slots:
            use, expert = heapq.heappop(farthest)
            if next_use.get(expert) == -use:
                del next_use[expert]
    return misses
