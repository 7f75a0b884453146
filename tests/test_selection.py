"""Selection of visual tokens: against the paper's algorithm line by line, examples by hand, and what must always hold."""

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import ConfigError, InputError
from vismoe.vision.selection import RULES, Pruning, select

ANY = tuple(RULES)
NO_ROUTING = np.zeros((4, 0), int)


@st.composite
def cases(draw):
    """(saliency [N] with ties, active [N, A] with gaps and repetitions, pairs): shares in steps of a hundredth."""
    tokens, wide, pairs = draw(st.integers(1, 24)), draw(st.integers(0, 6)), draw(st.integers(1, 20))
    saliency = np.array(draw(st.lists(st.integers(-4, 4), min_size=tokens, max_size=tokens)), np.float32) / 3
    addresses = draw(st.lists(st.integers(-1, pairs - 1), min_size=tokens * wide, max_size=tokens * wide))
    return saliency, np.array(addresses, int).reshape(tokens, wide), pairs


shares = st.integers(1, 100).map(lambda percent: percent / 100)
lambdas = st.sampled_from([0.0, 0.5, 2.0, 10.0])


def floor_of(share, tokens):
    """floor(share * N) with the share as it is written, in decimal arithmetic."""
    return math.floor(Decimal(str(share)) * tokens)


def algorithm_1(saliency, active, alpha, beta, weight):
    """Algorithm 1 of the paper line by line, with sets and loops; alpha is at most beta, and one token is kept at least."""
    n = len(saliency)
    low, high = min(saliency), max(saliency)
    salient = [(float(s) - float(low)) / (float(high) - float(low)) if high > low else 0.0 for s in saliency]
    k_core, k_keep = floor_of(min(alpha, beta), n), max(1, floor_of(beta, n))
    core = sorted(range(n), key=lambda i: (-salient[i], i))[:k_core]
    experts = [{int(address) for address in row if address >= 0} for row in active]
    target = set().union(*(experts[i] for i in core))
    expansion, score = {}, {}
    for i in set(range(n)) - set(core):
        expansion[i] = len(experts[i] - target) / len(experts[i]) if experts[i] else 0.0
        score[i] = salient[i] - weight * expansion[i]
    extra = sorted(score, key=lambda i: (-score[i], i))[: k_keep - k_core]
    return sorted(core + extra), target, expansion


def mean(values):
    return sum(values) / len(values) if values else None


@settings(max_examples=300)
@given(cases(), shares, shares, lambdas)
def test_affinity_is_algorithm_1(case, alpha, beta, weight):
    saliency, active, pairs = case
    found = select(Pruning(beta, "affinity", alpha, weight), saliency, active, pairs)
    if beta == 1.0:
        assert list(found.kept) == list(range(len(saliency))) and found.coverage is None
        return
    kept, target, expansion = algorithm_1(saliency, active, alpha, beta, weight)
    assert list(found.kept) == kept
    if not active.shape[1]:
        assert found.coverage is found.mean_expansion is found.kept_expansion is None
        return
    assert found.coverage == len(target) / pairs
    assert found.mean_expansion == pytest.approx(mean(list(expansion.values())))
    assert found.kept_expansion == pytest.approx(mean([expansion[i] for i in kept if i in expansion]))


@settings(max_examples=150)
@given(cases(), shares, shares, lambdas)
def test_the_controls_are_algorithm_1_on_what_the_other_selections_build_on(case, alpha, beta, weight):
    """With distinctness only the caller's saliency differs; with VisionZip's merging it picks the dominant tokens."""
    saliency, active, pairs = case
    features = np.outer(saliency, [1.0, 2.0]) + 1
    plain, distinct, zipped = (
        select(Pruning(beta, name, alpha, weight), saliency, active, pairs, features)
        for name in ("affinity", "affinity-distinct", "affinity-visionzip")
    )
    assert (distinct.kept == plain.kept).all()
    if zipped.merged_into is not None and (zipped.merged_into >= 0).any():
        dominant = np.flatnonzero(zipped.merged_into == -1)
        assert set(dominant) <= set(plain.kept) and len(dominant) == len(zipped.kept) - round(10 / 64 * len(zipped.kept))


@settings(max_examples=150)
@given(cases(), shares, shares, lambdas, st.sampled_from(ANY))
def test_what_holds_for_every_selection(case, alpha, beta, weight, selection):
    saliency, active, pairs = case
    features = np.outer(saliency, [1.0, 2.0]) + 1
    found = select(Pruning(beta, selection, alpha, weight), saliency, active, pairs, features)
    assert found.kept.dtype == np.int64 and len(found.kept) == max(1, floor_of(beta, len(saliency)))
    assert (np.diff(found.kept) > 0).all() and found.kept[0] >= 0 and found.kept[-1] < len(saliency)
    again = select(Pruning(beta, selection, alpha, weight), saliency.copy(), active.copy(), pairs, features)
    assert (found.kept == again.kept).all()
    scaled = select(Pruning(beta, selection, alpha, weight), 8 * saliency, active, pairs, features)
    assert (found.kept == scaled.kept).all()  # exact in floating point, so min-max gives the same


@settings(max_examples=150)
@given(cases(), shares, shares, lambdas)
def test_without_a_weight_affinity_is_saliency_and_with_one_it_lowers_the_expansion(case, alpha, beta, weight):
    saliency, active, pairs = case
    plain = select(Pruning(beta, "saliency", alpha), saliency, active, pairs)
    assert (select(Pruning(beta, "affinity", alpha, 0.0), saliency, active, pairs).kept == plain.kept).all()
    found = select(Pruning(beta, "affinity", alpha, weight), saliency, active, pairs)
    core = np.argsort(-saliency, kind="stable")[: floor_of(min(alpha, beta), len(saliency))]
    assert set(core) <= set(found.kept) and set(core) <= set(plain.kept)
    if found.kept_expansion is not None:
        assert found.kept_expansion <= plain.kept_expansion + 1e-12


@given(cases(), shares, shares)
def test_more_saliency_keeps_what_less_kept(case, one, other):
    saliency, active, pairs = case
    fewer, more = (select(Pruning(share, "saliency"), saliency, active, pairs).kept for share in sorted((one, other)))
    assert set(fewer) <= set(more)


def test_an_example_by_hand():
    """Core: token 4 (experts 0 and 5). Token 3 is most salient of the rest but asks for two new experts, token 1 for none."""
    saliency = np.array([0.0, 2.0, 3.0, 8.0, 10.0])
    active = np.array([[1, 2], [0, 5], [0, 3], [1, 4], [0, 5]])
    found = select(Pruning(0.6, "affinity", 0.2, 2.0), saliency, active, pairs=8)
    assert list(found.kept) == [1, 2, 4]  # scores 0 - 2, .2 - 0, .3 - 1, .8 - 2
    assert found.coverage == 2 / 8
    assert found.mean_expansion == (1 + 0 + 0.5 + 1) / 4 and found.kept_expansion == (0 + 0.5) / 2
    assert list(select(Pruning(0.6, "saliency", 0.2), saliency, active, 8).kept) == [2, 3, 4]


def test_experts_are_counted_by_layer_and_once():
    """Addresses 1 and 9 are one index in two layers of eight: not the same expert. Chosen twice counts once, -1 never."""
    active = np.array([[1, 1, -1], [9, 9, 1], [1, -1, -1]])
    found = select(Pruning(0.7, "affinity", 0.34, 2.0), np.array([3.0, 2.0, 1.0]), active, pairs=16)
    assert list(found.kept) == [0, 2] and found.mean_expansion == (0.5 + 0) / 2


def test_ties_go_to_the_first_and_equal_saliency_counts_as_nothing():
    same = np.full(4, 7.0)
    for selection in ("affinity", "saliency"):
        assert list(select(Pruning(0.5, selection), same, NO_ROUTING, 0).kept) == [0, 1]
    active = np.array([[0], [1], [1], [0]])  # the core, token 0, uses expert 0
    assert list(select(Pruning(0.5, "affinity", 0.25), same, active, 2).kept) == [0, 3]


def test_shares_are_the_decimal_numbers_that_were_written():
    saliency = np.arange(100.0)
    for percent in range(1, 100):
        assert len(select(Pruning(percent / 100, "saliency"), saliency, np.zeros((100, 0), int), 0).kept) == percent


@pytest.mark.parametrize("selection", ANY)
def test_an_image_of_one_token_keeps_it_and_one_of_none_has_none(selection):
    one = select(Pruning(0.1, selection), np.array([0.5]), np.array([[3]]), 8, np.ones((1, 2)))
    assert list(one.kept) == [0]
    assert not len(select(Pruning(0.1, selection), np.zeros(0), np.zeros((0, 2), int), 8, np.ones((0, 2))).kept)


def test_uniform_is_even_and_random_is_a_function_of_seed_and_size():
    def kept(selection, tokens, share, seed=0):
        pruning = Pruning(share, selection, seed=seed)
        return list(select(pruning, np.random.default_rng(1).random(tokens), np.zeros((tokens, 0), int), 0).kept)

    assert kept("uniform", 12, 0.25) == [2, 6, 10] and kept("uniform", 10, 0.5) == [1, 3, 5, 7, 9]
    gaps = np.diff(kept("uniform", 100, 0.3))
    assert gaps.min() >= 3 and gaps.max() <= 4
    assert kept("random", 64, 0.5) == kept("random", 64, 0.5) != kept("random", 64, 0.5, seed=1)
    often = np.bincount(np.concatenate([kept("random", 32, 0.5, seed) for seed in range(200)]), minlength=32)
    assert often.min() > 60 and often.max() < 140  # 100 expected, a standard deviation of 7


def test_visionzip_merges_every_token_that_is_not_dominant():
    """64 kept of 128: 54 dominant, 10 contextual. Features lie on 10 axes, so that each token has one place to join."""
    saliency = np.concatenate([np.full(54, 1.0), np.linspace(0.5, 0.1, 74)])
    contextual = 54 + (2 * np.arange(10) + 1) * 74 // 20
    axis = np.searchsorted(contextual, np.arange(128)).clip(0, 9)
    features = np.eye(10)[axis] * np.linspace(1, 3, 128)[:, None]
    found = select(Pruning(0.5, "visionzip"), saliency, np.zeros((128, 0), int), 0, features)
    assert list(found.kept) == [*range(54), *contextual]
    assert found.merged_into.dtype == np.int64
    assert (found.merged_into[:54] == -1).all()
    assert list(found.merged_into[54:]) == list(54 + axis[54:])
    with pytest.raises(AssertionError, match="features"):
        select(Pruning(0.5, "visionzip"), saliency, np.zeros((128, 0), int), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_saliency_that_is_not_finite_is_refused(bad):
    with pytest.raises(InputError, match=r"1 of 4 visual tokens .*Fix: .*keep=1.0"):
        select(Pruning(0.5), np.array([1.0, bad, 2.0, 3.0]), NO_ROUTING, 0)
    assert len(select(Pruning(1.0), np.array([1.0, bad, 2.0, 3.0]), NO_ROUTING, 0).kept) == 4  # the fix works


@pytest.mark.parametrize(
    "setting",
    [dict(keep=0.0), dict(keep=1.5), dict(keep=math.nan), dict(selection="best"), dict(core_share=-0.1), dict(core_share=1.1),
     dict(expansion_weight=-1.0), dict(expansion_weight=math.nan), dict(expansion_weight=math.inf), dict(seed=-1)],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Pruning(**setting)


# -- where affinity pays: routing with the property that VisMMoE builds on, planted
def deep_demand(kept, selection, tokens):
    """Experts that a deep layer's tokens demand when half of an image's tokens are kept, a mean: of 32 experts, of Zipf
    popularity 2, four to a token. A share `kept` of the tokens routes to its favourites in every layer, each of which numbers
    experts in its own way; the others draw anew. Two layers are known to the selection, four lie behind it; saliency is by
    chance."""
    experts, known, layers, found = 32, 2, 6, []
    for seed in range(8):
        random = np.random.default_rng(seed)

        def drawn(random=random):
            return (2 * np.log(np.arange(1, experts + 1)) - random.gumbel(size=(tokens, experts))).argsort(axis=1)[:, :4]

        favourites, keeps = drawn(), random.random((tokens, 1)) < kept
        routed = [random.permutation(experts)[np.where(keeps, favourites, drawn())] for _ in range(layers)]
        active = np.concatenate([layer * experts + routed[layer] for layer in range(known)], axis=1)
        chosen = select(Pruning(0.5, selection, seed=seed), random.random(tokens), active, known * experts).kept
        found += [len(np.unique(each[chosen])) for each in routed[known:]]
    return np.mean(found)


def test_affinity_shrinks_deep_demand_where_tokens_keep_their_experts_and_only_there():
    """The numbers in docs/visual-tokens.md. More tokens weaken it: those of the core alone then demand nearly all experts."""
    rivals = ("random", "saliency")
    assert 13.8 < deep_demand(0.9, "affinity", 64) < 14.8
    assert all(18.7 < deep_demand(0.9, rival, 64) < 20.3 for rival in rivals)
    assert 17.7 < deep_demand(0.3, "affinity", 64) < 18.7
    assert all(18.1 < deep_demand(0.0, name, 64) < 19.7 for name in ("affinity", *rivals))
    ratios = [deep_demand(0.9, "affinity", tokens) / deep_demand(0.9, "random", tokens) for tokens in (64, 256, 1024)]
    assert ratios == sorted(ratios) and ratios[0] < 0.78 and ratios[1] > 0.82 and ratios[2] > 0.93
