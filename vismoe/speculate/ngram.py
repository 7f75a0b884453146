"""Drafts out of prompt and answer, which repeat themselves: what followed the latest tokens before may follow again."""

from collections.abc import Collection

import numpy as np

LONGEST, SHORTEST = 3, 2  # tokens of a suffix that is looked for; what follows a single one is right half as often


def propose(ids: np.ndarray, most: int, barred: Collection[int] = (), shortest: int = SHORTEST) -> list[int]:
    """The tokens that may follow `ids`, at most `most`, cut before the first of `barred`; empty without a precedent.

    They followed the latest earlier occurrence of the longest suffix of `ids` (of LONGEST to `shortest` tokens) that occurred
    before. An occurrence that reaches into the suffix repeats itself: after `a b a b` comes `a b a b a b ...`, as in LZ77.

    ids: `[n]`, prompt and answer. The search reads them once: 10 us of 8,000 tokens.
    """
    end = len(ids)
    if not end or most < 1:
        return []
    matched, at = 1, np.flatnonzero(ids[: end - 1] == ids[end - 1])  # where occurrences end, ascending
    while at.size and matched < LONGEST:
        longer = at[at >= matched]
        longer = longer[ids[longer - matched] == ids[end - 1 - matched]] if matched < end else longer[:0]
        if not longer.size:
            break
        matched, at = matched + 1, longer
    if not at.size or matched < shortest:
        return []
    first = int(at[-1]) + 1
    proposed = []
    for token in np.resize(ids[first : first + most], most).tolist():
        if token in barred:
            break
        proposed.append(token)
    return proposed
