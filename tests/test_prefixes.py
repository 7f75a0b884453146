"""Prefixes: the longest beginning is found, what is kept stays within bounds, and an earlier conversation is not changed by a
later one. Caches are transformers' own, with numbers in them that say which token they belong to.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from vismoe.engine.prefix_cache import LEAST_TOKENS, Prefix, PrefixCache, common
from vismoe.models.visual.growing_cache import grow_in_place, held_tokens
from vismoe.vision.selection import KeptImage, Selection

ids = st.lists(st.integers(0, 3), max_size=12)


def cache_of(numbers):
    cache = DynamicCache()
    states = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)
    for layer in range(2):
        cache.update(states + layer, states, layer)
    return cache


def prefix(numbers, kept=()):
    return Prefix(np.array(numbers), cache_of(numbers), kept)


def held(cache):
    return [layer.keys.flatten().tolist() for layer in cache.layers]


def test_room_for_further_tokens_is_given_up_before_a_conversation_is():
    books, numbers = PrefixCache(), list(range(40))
    caches = [cache_of([*numbers, last]) for last in (1, 2)]
    for cache, last in zip(caches, (1, 2), strict=True):
        grow_in_place(cache, 1000)
        for layer in range(2):
            cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), layer)
        books.keep(Prefix(np.array([*numbers, last, 0]), cache))
    before = held(caches[0])
    books.shrink(42 + held_tokens(caches[1]))
    assert books.tokens == 84 and held_tokens(caches[0]) == 0 and held_tokens(caches[1]) > 42
    assert caches[0].layers[0].keys.untyped_storage().nbytes() == 42 * 4 and held(caches[0]) == before
    books.shrink(84)
    assert books.tokens == 84 and held_tokens(caches[1]) == 0
    books.shrink(83)
    assert books.tokens == 42


@given(ids, ids)
def test_the_common_beginning_is_as_long_as_it_is(one, other):
    slow = next((n for n in range(min(len(one), len(other))) if one[n] != other[n]), min(len(one), len(other)))
    assert common(np.array(one), np.array(other)) == slow


@given(ids.filter(len), ids.filter(len))
def test_a_sequence_takes_the_place_of_what_it_went_on_from_and_of_nothing_else(one, other):
    """Also where the last token alone differs."""
    books = PrefixCache()
    books.keep(prefix(one))
    books.keep(prefix(other))
    kept = [list(each.numbers) for each in books._kept]
    assert kept == ([other] if other[: len(one)] == one else [one, other])


def test_the_longest_beginning_is_taken_and_leaves_one_token_to_compute():
    books, long = PrefixCache(), list(range(100, 140))
    books.keep(prefix(long[:20] + [7, 8]))
    books.keep(prefix(long))
    taken = books.take(np.array(long[:30] + [1, 2, 3]), 1000)
    assert taken.tokens == 30 and held(taken.cache) == [long[:30], [number + 1 for number in long[:30]]]
    assert books.take(np.array(long), 1000).tokens == len(long) - 1
    assert books.take(np.array([1, 2, 3] * 10), 1000) is None
    assert books.take(np.array(long[: LEAST_TOKENS - 1] + [1]), 1000) is None, "a template's first words are not worth it"


def test_an_earlier_conversation_can_still_go_on_from_where_it_was():
    books, whole = PrefixCache(), list(range(40))
    books.keep(prefix(whole))
    taken = books.take(np.array(whole[:20] + [77] * 10), 1000)
    for layer in range(2):
        taken.cache.update(torch.full((1, 1, 10, 1), 77.0), torch.full((1, 1, 10, 1), 77.0), layer)
    again = books.take(np.array([*whole, 5]), 1000)
    assert again.tokens == 40 and held(again.cache)[0] == whole


def test_a_conversation_that_went_on_replaces_itself():
    books, whole = PrefixCache(), list(range(40))
    books.keep(prefix(whole[:20]))
    books.keep(prefix(whole))
    books.keep(prefix([9] * 20))
    assert books.tokens == 60


def test_what_was_used_least_recently_goes_first_and_what_is_wanted_last():
    books = PrefixCache()
    for first in (0, 100, 200):
        books.keep(prefix(list(range(first, first + 30))))
    taken = books.take(np.array([*range(100, 130), 1]), 60)
    assert taken.tokens == 30 and books.tokens == 60
    assert books.take(np.array([*range(30), 1]), 60) is None, "it was used least recently"
    moved = books.take(np.array([*range(200, 230), 1]), 0)
    assert moved.tokens == 30 and books.tokens == 0, "where there is no room it is handed over"
    books.keep(moved)
    books.shrink(0)
    assert books.tokens == 0


@given(st.lists(st.tuples(st.sampled_from(["keep", "take"]), st.integers(0, 3), st.integers(16, 40)), max_size=20))
def test_the_books_never_hold_more_than_they_may(steps):
    books, bound = PrefixCache(), 60
    for what, family, length in steps:
        numbers = np.arange(length) + 1000 * family
        if what == "keep":
            books.shrink(bound - length)
            books.keep(prefix(numbers.tolist()))
        else:
            taken = books.take(np.append(numbers, -1), bound)
            assert taken is None or held(taken.cache)[0] == numbers[: taken.tokens].tolist()
        assert books.tokens <= bound


def test_a_cache_that_forgets_is_only_handed_over_whole():
    books, numbers = PrefixCache(), list(range(40))
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(8)]
    cache.update(torch.zeros(1, 1, 40, 1), torch.zeros(1, 1, 40, 1), 0)
    books.keep(Prefix(np.array(numbers), cache))
    assert books.take(np.array(numbers[:30] + [1]), 1000) is None
    taken = books.take(np.array([*numbers, 1]), 1000)
    assert taken.cache is cache and books.tokens == 0, "nobody else may have it"


@pytest.mark.parametrize(("tokens", "images"), [(30, 1), (21, 1), (20, 0)])
def test_what_was_kept_of_images_comes_along_as_far_as_they_do(tokens, images):
    books, numbers = PrefixCache(), list(range(40))
    selection = Selection(np.arange(3))
    books.keep(prefix(numbers, (KeptImage(0, 20, None, selection, 5), KeptImage(0, 35, None, selection, 5))))
    assert len(books.take(np.array(numbers[:tokens] + [-1, -2]), 1000).kept) == images
