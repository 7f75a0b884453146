"""The learned lookahead's arithmetic: targets and features against numbers worked by hand, and the folded network against
torch's.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.errors import CheckpointError
from vismoe.lookahead.features import Features, FeatureSizes, History, share_of_tokens, targets
from vismoe.lookahead.network import FLOOR, PARTS, Folded, Predictor, Shape, load, predictor_bytes, save_folded
from vismoe.predictor_training.prompts import is_validation
from vismoe.predictor_training.samples import Samples
from vismoe.predictor_training.train import GAMMA, Batches, TrainingRecipe, train

SIZES = FeatureSizes(layers=4, experts=3, hidden=5, visual=2, window=2)


def test_targets_decay_with_the_distance_and_end_with_the_model():
    use = np.zeros((1, 4, 3), np.float32)
    use[0, 1, 0] = use[0, 2, 2] = use[0, 3, 1] = 1  # layer 1 uses expert 0, layer 2 expert 2, layer 3 expert 1
    seen = np.ones((1, 4), bool)
    wanted, mask = targets(use, seen, 0, window=2, gamma=0.8)
    np.testing.assert_allclose(wanted[0], [[1, 0, 0], [0, 0, 0.8]])
    assert mask.all()
    wanted, mask = targets(use, seen, 2, window=2, gamma=0.8)
    np.testing.assert_allclose(wanted[0], [[0, 1, 0], [0, 0, 0]])
    assert mask.tolist() == [[True, False]], "there is no layer after the last"
    seen[0, 2] = False
    assert targets(use, seen, 0, 2, 0.8)[1].tolist() == [[True, False]], "what was not recorded teaches nothing"


def random_samples(count=40, seed=0):
    random = np.random.default_rng(seed)
    s = SIZES
    expected = random.dirichlet(np.ones(s.experts), (count, s.layers, 2, s.window))
    return Samples(
        s,
        random.integers(0, 2, (count, s.layers, s.experts)).astype(np.float16),
        random.random((count, s.layers, s.experts)).astype(np.float16),
        random.normal(3, 2, (count, s.layers, s.hidden)).astype(np.float16),
        np.concatenate([np.zeros((1, s.visual)), random.normal(size=(6, s.visual))]).astype(np.float16),
        random.integers(0, 7, (count, s.layers)).astype(np.int32),
        expected.astype(np.float16),
        np.ones((count, s.layers), bool),
        (np.arange(count) // 2).astype(np.int32),
        tuple(f"train/kind/{number}@1" for number in range(-(-count // 2))),
    )


def test_batches_teach_what_the_targets_say_and_the_merged_form_takes_the_largest():
    samples = random_samples()
    rows = np.arange(len(samples))
    wanted, mask = Batches(samples, Shape(SIZES), GAMMA, torch.device("cpu")).targets(rows)
    for layer in range(SIZES.layers - 1):
        by_hand, counts = targets(samples.present.astype(np.float32), samples.seen, layer, SIZES.window, GAMMA)
        np.testing.assert_allclose(wanted[layer] * mask[layer], by_hand, rtol=1e-6)
        np.testing.assert_array_equal(mask[layer, ..., 0], counts)
    merged, _ = Batches(samples, Shape(SIZES, merged=True), GAMMA, torch.device("cpu")).targets(rows)
    np.testing.assert_allclose(merged[:, :, 0], (wanted * mask).amax(2))  # equation 9


@given(
    seed=st.integers(0, 10**6), merged=st.booleans(), parts=st.sampled_from([PARTS, PARTS[:3], ("hidden",), ("history", "gate")])
)
def test_the_folded_network_is_the_trained_one(seed, merged, parts):
    torch.manual_seed(seed)
    samples = random_samples(seed=seed)
    shape = Shape(SIZES, parts, bottleneck=7, merged=merged)
    model = Predictor(shape, dropout=0.3)
    batches = Batches(samples, shape, GAMMA, torch.device("cpu"))
    rows = np.arange(len(samples))
    with torch.no_grad():
        batches.standardise(model, rows)
        for tensor in (*model.parameters(), *(norm for name, norm in model.named_buffers() if "running" in name)):
            tensor.uniform_(0.2, 1.5)
        wanted = model.eval()(*batches.inputs(rows)).numpy()
    folded = model.folded()
    for row in (0, 17):
        for layer in range(SIZES.layers - 1):
            said = folded.logits(layer, features_of(samples, row, layer))
            np.testing.assert_allclose(said, wanted[layer, row], rtol=2e-3, atol=2e-3)


def features_of(samples, row, layer):
    ahead = np.zeros((SIZES.window, SIZES.experts), np.float32)
    there = samples.use[row, layer + 1 : layer + 1 + SIZES.window]
    ahead[: len(there)] = there
    visual = samples.visuals[samples.visual_of[row, layer]]
    arrays = (samples.present[row, layer], ahead, samples.hidden[row, layer], visual, samples.expected[row, layer])
    return Features(*(np.asarray(array, np.float32) for array in arrays))


def test_an_untrained_network_ranks_experts_as_the_routers_do():
    samples = random_samples()
    folded = Predictor(Shape(SIZES), dropout=0.0).eval().folded()
    features = features_of(samples, 3, 0)
    said = folded.probabilities(0, features, GAMMA)
    expected = features.expected[0] + np.log(np.maximum(features.expected[1], FLOOR))
    assert (said.argsort(-1) == expected.argsort(-1)).all()
    assert folded.probabilities(SIZES.layers - 2, features, GAMMA).shape == (1, SIZES.experts), "only one layer is left"


def test_history_is_the_decayed_share_of_the_tokens_and_belongs_to_the_layer():
    history = History(SIZES)
    history.observe(1, np.array([[0, 2]]))  # one token, top-2
    history.observe(1, np.array([[0, 1], [0, 2], [7, 7], [7, 7]]))  # four tokens; 7 is no expert
    np.testing.assert_allclose(history.ahead(0), [[0.8 * 0.2 + 0.2 * 0.5, 0.2 * 0.25, 0.8 * 0.2 + 0.2 * 0.25], [0, 0, 0]])
    np.testing.assert_allclose(history.ahead(2), np.zeros((2, 3)))
    np.testing.assert_allclose(share_of_tokens(np.array([[0, 1], [0, 2]]), 3), [1, 0.5, 0.5])


def test_history_that_nobody_asked_for_stays_small_and_forgets_only_what_weighs_nothing():
    asked, unasked = History(SIZES), History(SIZES)
    random = np.random.default_rng(0)
    for _ in range(200):
        chosen = random.integers(0, 3, (1, 2))
        asked.observe(2, chosen)
        asked.ahead(0)
        unasked.observe(2, chosen)
    np.testing.assert_allclose(unasked.ahead(0), asked.ahead(0), atol=2e-3)


def test_a_predictor_comes_back_from_its_file_and_says_how_much_memory_it_takes(tmp_path):
    folded = Predictor(Shape(SIZES, bottleneck=4), dropout=0.0).eval().folded()
    path = tmp_path / "predictor.safetensors"
    path.write_bytes(save_folded({"decode": folded, "prefill": folded}))
    networks = load(path)
    assert networks.keys() == {"decode", "prefill"} and networks["decode"].shape == folded.shape
    for name, array in folded.arrays.items():
        np.testing.assert_allclose(networks["decode"].arrays[name], array, rtol=1e-3, atol=1e-6)
    held = sum(array.nbytes for network in networks.values() for array in network.arrays.values())
    assert predictor_bytes(path) == held
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="vismoe calibrate again"):
        load(path)


def test_training_finds_what_decides_and_repeats_itself():
    """Expert 0 of the next layer is used exactly where channel 0 of the hidden state is positive: no router says so."""
    samples = random_samples(count=400)
    positive = samples.hidden[:, 0, 0] > 3
    samples.present[:, 1, 0] = positive
    recipe = TrainingRecipe(bottleneck=16, epochs=25, batch=32, patience=25, rate=2e-2)
    losses = []
    first = train(samples, recipe, lambda epoch, loss, validation: losses.append(validation))
    assert losses[-1] < losses[0]
    scores = np.array([first.probabilities(0, features_of(samples, row, 0), GAMMA)[0, 0] for row in range(100)])
    assert ((scores > 0.5) == positive[:100]).mean() > 0.85
    again = train(samples, recipe)
    np.testing.assert_array_equal(again.arrays["w1"], first.arrays["w1"])
    assert isinstance(first, Folded)


def test_one_prompt_is_on_one_side_of_the_split_whatever_was_kept_of_it():
    names = [f"train/count/{number}" for number in range(500)]
    assert all(is_validation(f"{name}@1") == is_validation(f"{name}@0.5") for name in names)
    assert 20 < sum(map(is_validation, names)) < 90
