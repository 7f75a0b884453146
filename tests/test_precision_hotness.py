"""Hotness scores against equation 2 of DynaExq written as loops, and the file that keeps them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import CheckpointError, ConfigError
from vismoe.precision import correlation as correlation_module
from vismoe.precision.correlation import Correlation
from vismoe.precision.hotness import Hotness, profile_bytes

EXPERTS = (5, 3, 4)  # of the layers


def routed(rng, tokens, top_k=2):
    """Routing and weights of every layer, sentinels among them."""
    ids = [rng.permuted(np.tile(np.arange(count + 1), (tokens, 1)), axis=1)[:, :top_k] for count in EXPERTS]
    return ids, [rng.random((tokens, top_k)).astype(np.float32) for _ in EXPERTS]


def slow_update(scores, routing, weights, real, decay, tokens):
    """Equation 2 and the passive decay of algorithm 1, expert by expert."""
    share = decay**tokens
    for expert in range(len(scores)):
        rows = [row for row in range(len(routing)) if real[row]]
        selected = sum(float(weights[row][routing[row] == expert].sum()) for row in rows)
        probability = selected / len(rows) if rows else 0.0
        scores[expert] = share * scores[expert] + (1 - share) * probability


def test_one_token_moves_its_experts_up_and_all_others_down():
    hotness = Hotness([4], 0.9, 100)
    hotness.scores[0] = [0.5, 0.5, 0.0, 0.0]
    hotness.observe(0, np.array([[1, 2]]), np.array([[0.75, 0.25]], np.float32))
    hotness.end_step(1)
    assert hotness.scores[0].tolist() == pytest.approx([0.45, 0.9 * 0.5 + 0.1 * 0.75, 0.1 * 0.25, 0.0])


def test_a_prompt_is_one_update_with_the_mean_of_its_tokens_that_weighs_at_most_a_period():
    hotness = Hotness([4], 0.9, 2)
    routing = np.array([[0, 1], [0, 2], [0, 1], [0, 3]])
    hotness.observe(0, routing, np.full((4, 2), 0.5, np.float32))
    assert hotness.end_step(4)
    assert hotness.scores[0].tolist() == pytest.approx(((1 - 0.9**2) * np.array([0.5, 0.25, 0.125, 0.125])).tolist())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), decay=st.sampled_from([0.5, 0.9, 0.99]), steps=st.integers(1, 8), padded=st.booleans())
def test_the_scores_are_equation_2_written_as_loops(seed, decay, steps, padded):
    rng, period = np.random.default_rng(seed), 6
    hotness, expected = Hotness(EXPERTS, decay, period), [np.zeros(count) for count in EXPERTS]
    for _ in range(steps):
        tokens = int(rng.choice([1, 1, 1, 3, 9]))
        routing, weights = routed(rng, tokens)
        real = rng.random(tokens) < 0.7 if padded else np.ones(tokens, bool)
        for layer in rng.permutation(len(EXPERTS)):
            hotness.observe(layer, routing[layer], weights[layer], real if padded else None)
            slow_update(expected[layer], routing[layer], weights[layer], real, decay, min(int(real.sum()), period))
        hotness.end_step(int(real.sum()))
    for layer, count in enumerate(EXPERTS):
        assert hotness.scores[layer, :count] == pytest.approx(expected[layer], abs=1e-12)
        assert not hotness.scores[layer, count:].any()  # the sentinel of a small layer is an id that a larger layer has


def test_an_update_is_due_every_period_and_makes_the_scores_warm():
    hotness = Hotness([4], 0.9, 4)
    assert [hotness.end_step(1) for _ in range(3)] == [False] * 3 and not hotness.warm
    assert [hotness.end_step(1) for _ in range(6)] == [True, False, False, False, True, False] and hotness.warm
    assert hotness.end_step(1000) and not hotness.end_step(2) and hotness.end_step(1)  # a prompt counts as one period


def test_the_plan_knows_what_a_profile_keeps():
    tracemalloc.start()
    hotness = Hotness([300] * 8, 0.9, 4, correlated=True)
    hotness.correlation.observe(np.zeros((8, 2), np.int64), np.ones((8, 2), np.float32))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes == pytest.approx(profile_bytes([300] * 8, correlated=True), rel=0.01)


def test_a_layer_that_was_not_reached_and_a_pass_without_real_tokens_change_nothing():
    hotness = Hotness([4, 4], 0.5, 4)
    hotness.scores[:] = 0.25
    hotness.observe(1, np.array([[0]]), np.ones((1, 1), np.float32))
    hotness.end_step(1)
    assert hotness.scores[0].tolist() == [0.25] * 4 and hotness.scores[1, 0] == 0.625
    before = hotness.scores.copy()
    nobody = np.zeros(2, bool)
    for layer in range(2):
        hotness.observe(layer, np.array([[0, 1], [2, 3]]), np.ones((2, 2), np.float32), nobody)
    assert not hotness.end_step(0) and np.array_equal(hotness.scores, before)
    hotness.observe(0, np.empty((0, 2), np.int64), np.empty((0, 2), np.float32))
    hotness.end_step(0)
    assert np.array_equal(hotness.scores, before)


def test_a_pass_that_was_given_up_is_replaced_by_the_next_one():
    hotness, clean = Hotness([4, 4], 0.5, 4), Hotness([4, 4], 0.5, 4)
    prompt = np.zeros((9, 1), np.int64)
    hotness.observe(0, prompt, np.ones((9, 1), np.float32))
    for one in (hotness, clean):
        for layer in range(2):
            one.observe(layer, np.array([[3]]), np.ones((1, 1), np.float32))
        one.end_step(1)
    assert np.array_equal(hotness.scores, clean.scores)


def test_weights_that_overflowed_do_not_stay_in_the_scores():
    hotness = Hotness([4, 4], 0.5, 4)
    hotness.scores[:] = 0.25
    for bad in (np.nan, np.inf):
        for layer in range(2):
            hotness.observe(layer, np.array([[0, 1]]), np.array([[bad, 0.5]], np.float32))
        hotness.end_step(1)
        assert np.array_equal(hotness.scores, np.full((2, 4), 0.25))


# ------------------------------------------------------------------ from layer to layer
def test_a_gain_flows_on_to_the_experts_that_serve_the_same_tokens():
    correlation = Correlation(2, 4)
    for _ in range(5):
        correlation.observe(np.array([[0, 1], [2, 3]]), np.array([[0.5, 0.5], [0.75, 0.25]], np.float32))
        correlation.observe(np.array([[2, 3], [0, 1]]), np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
    gains = np.array([[0.2, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    assert correlation.flow(gains) == pytest.approx(np.array([[0, 0, 0, 0], [0, 0, 0.15, 0.05]]))
    assert not Correlation(2, 4).flow(gains).any()  # nothing was seen
    assert not Correlation(1, 4).flow(gains[:1]).any()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), halving=st.sampled_from([4, 1000]))
def test_the_flow_is_that_of_sums_over_the_tokens_of_which_the_old_ones_count_less(seed, halving):
    rng, correlation, sums = np.random.default_rng(seed), Correlation(3, 5), np.zeros((2, 5, 5))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(correlation_module, "HALVING_TOKENS", halving)
        for token in range(20):
            routing = np.stack([rng.permutation(5)[:2] for _ in range(3)]).astype(np.int16)  # as a trace holds them
            weights = rng.random((3, 2)).astype(np.float32)
            correlation.observe(routing, weights)
            for layer in range(2):
                for a in range(2):
                    for b in range(2):
                        sums[layer, routing[layer, a], routing[layer + 1, b]] += weights[layer, a] * weights[layer + 1, b]
            if (token + 1) % halving == 0:
                sums /= 2
    gains = rng.random((3, 5))
    expected = np.zeros((3, 5))
    for layer in range(2):
        for expert in np.flatnonzero(sums[layer].sum(axis=1)):
            expected[layer + 1] += gains[layer, expert] * sums[layer, expert] / sums[layer, expert].sum()
    assert correlation.flow(gains) == pytest.approx(expected, abs=1e-5)


def test_decode_teaches_the_correlation_and_a_prompt_or_a_sentinel_does_not():
    hotness, gains = Hotness([4, 4], 0.9, 4, correlated=True), np.ones((2, 4))
    for ids in ([[0, 1], [2, 3]], [[0, 4]]):  # two tokens; one with an expert that is skipped
        for layer in range(2):
            hotness.observe(layer, np.array(ids), np.full(np.shape(ids), 0.5, np.float32))
        hotness.end_step(len(ids))
    assert not hotness.correlation.flow(gains).any()
    for layer in range(2):
        hotness.observe(layer, np.array([[0, 1]]), np.full((1, 2), 0.5, np.float32))
    hotness.end_step(1)
    assert hotness.correlation.flow(gains)[1].tolist() == pytest.approx([1, 1, 0, 0])


# ------------------------------------------------------------------ the file
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), warm=st.booleans())
def test_a_restarted_server_has_the_same_scores(tmp_path_factory, seed, warm):
    file = tmp_path_factory.mktemp("state") / "hotness"
    saved, loaded = Hotness(EXPERTS, 0.9, 4), Hotness(EXPERTS, 0.5, 64)
    saved.scores, saved.warm = np.random.default_rng(seed).random(saved.scores.shape), warm
    saved.save(file, "a model")
    saved.save(file, "a model")  # over an earlier one
    loaded.load(file, "a model")
    assert np.array_equal(loaded.scores, saved.scores) and loaded.warm is warm
    loaded.observe(0, np.array([[0]]), np.ones((1, 1), np.float32))
    loaded.end_step(1)  # its arrays can be written to
    assert sorted(path.name for path in file.parent.iterdir()) == ["hotness"]


def test_the_file_of_another_model_is_refused(tmp_path):
    Hotness(EXPERTS, 0.9, 4).save(tmp_path / "state", "a model")
    with pytest.raises(ConfigError, match=r"another model.*Fix: another file"):
        Hotness(EXPERTS, 0.9, 4).load(tmp_path / "state", "another model")
    with pytest.raises(ConfigError, match=r"\[3, 5\].*\[3, 6\]"):
        Hotness((6, 3, 4), 0.9, 4).load(tmp_path / "state", "a model")


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("state") / "hotness"
    hotness = Hotness(EXPERTS, 0.9, 4)
    hotness.save(file, "a model")
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="Fix: delete it"):
        hotness.load(file, "a model")


def test_a_folder_that_is_not_there_is_named_and_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    hotness = Hotness(EXPERTS, 0.9, 4)
    with pytest.raises(ConfigError, match=r"cannot be written: No such file.*--hotness-state"):
        hotness.save(tmp_path / "nowhere" / "state", "a model")
    with pytest.raises(CheckpointError, match="cannot be read"):
        hotness.load(tmp_path, "a model")
    hotness.save(tmp_path / "state", "a model")
    before = (tmp_path / "state").read_bytes()
    hotness.scores[:] = 1.0

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ConfigError, match="No space left"):
        hotness.save(tmp_path / "state", "a model")
    assert (tmp_path / "state").read_bytes() == before
