"""Drafts by n-grams, against a search by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vismoe.speculate.ngram import LONGEST, propose


def by_hand(ids: list[int], most: int, barred: set[int], shortest: int) -> list[int]:
    """Every suffix, every place, from the end; what follows is copied token by token and may be copied again."""
    for length in range(LONGEST, shortest - 1, -1):
        suffix = ids[-length:]
        for start in range(len(ids) - length - 1, -1, -1):
            if length < len(ids) and ids[start : start + length] == suffix:
                written = list(ids)
                for _ in range(most):
                    token = written[start + length + len(written) - len(ids)]
                    if token in barred:
                        break
                    written.append(token)
                return written[len(ids) :]
    return []


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(0, 7),
    st.sets(st.integers(0, 4), max_size=2),
    st.integers(1, LONGEST),
)
def test_proposes_what_followed_the_longest_suffix_last(ids, most, barred, shortest):
    assert propose(np.array(ids, np.int64), most, barred, shortest) == by_hand(ids, most, barred, shortest)


def test_a_longer_suffix_goes_before_a_later_one():
    ids = np.array([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    assert propose(ids, 2) == [4, 9]
    assert propose(ids[1:-1], 3) == []  # one token is too little
    assert propose(ids[4:], 3, barred=[1]) == [5]


def test_nothing_is_proposed_without_a_precedent():
    assert propose(np.array([1, 2, 3]), 7) == []
    assert propose(np.array([], np.int64), 7) == []
