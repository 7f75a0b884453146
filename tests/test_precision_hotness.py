"""Hotness scores against equation 2 of DynaExq written as loops, and the file that keeps them."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import CheckpointError, ConfigError
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
    hotness = Hotness([3000] * 8, 0.9, 4)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert hotness.scores.nbytes <= held_bytes == pytest.approx(profile_bytes([3000] * 8), rel=0.1)


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

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        hotness.save(tmp_path / "state", "a model")
    assert (tmp_path / "state").read_bytes() == before
