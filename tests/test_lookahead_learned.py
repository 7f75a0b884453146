"""The learned lookahead in a running model: what it is shown, where it is evaluated, and that no guess can change an output.

Oracles: the full model's tokens and logits; a recorded trace, from which the same inputs can be made a second time.
"""

import dataclasses
import gc
import json
import threading
import time
import weakref

import numpy as np
import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.engine.engine import demo_model
from vismoe.errors import CheckpointError, ConfigError
from vismoe.lookahead.background import BackgroundLookahead
from vismoe.lookahead.calibration import FOLDER, JSON, PREDICTOR, Calibration, geometry_of, router_digest
from vismoe.lookahead.features import FeatureSizes
from vismoe.lookahead.learned import LearnedLookahead
from vismoe.lookahead.lookahead import Seen
from vismoe.lookahead.network import PARTS, Predictor, Shape, save_folded
from vismoe.predictor_training.samples import read_samples
from vismoe.predictor_training.train import Batches
from vismoe.trace.files import Trace, TraceWriter
from vismoe.types import Phase

WITHOUT_GATE = "ernie4_5_vl_moe"  # its routers cannot be asked


def save_calibration(folder, model, out=None, parts=PARTS, **changes):
    """A predictor of random weights for a loaded model."""
    inventory = vismoe.runtime_of(model).store.inventory
    hidden = model.config.get_text_config().hidden_size
    sizes = FeatureSizes(len(inventory.layers), inventory.layers[0].num_experts, hidden, hidden, 5)
    torch.manual_seed(0)
    networks = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        predictor = Predictor(Shape(sizes, parts, bottleneck=8), dropout=0.0).eval()
        torch.nn.init.normal_(predictor.wo)
        networks[str(phase)] = predictor.folded()
    about = {"routers": router_digest(model, inventory), "geometry": geometry_of(inventory, hidden), "lookahead": "learned"}
    calibration = Calibration(out or folder / FOLDER, model="tiny", has_predictor=True, **{**about, **changes})
    calibration.save(networks)
    return networks


def load(folder, memory="50%", **settings):
    config = VisMoEConfig(memory=memory, context=512, **settings)
    return tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_models.save("qwen3_vl_moe", tmp_path_factory.mktemp("learned"))
    model = load(folder)
    save_calibration(folder, model)
    vismoe.runtime_of(model).pager.close()
    return folder


@pytest.fixture
def shipped():
    """What the JSON of the demo model's calibration says."""
    return json.loads((demo_model() / FOLDER / JSON).read_text())


@pytest.fixture(scope="module")
def reference(folder):
    return tiny_models.greedy(tiny_models.reference(folder), tiny_models.prompt("qwen3_vl_moe"), 12)


def assert_same(one, other):
    assert torch.equal(one.sequences, other.sequences)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


@pytest.mark.parametrize("settings", [{}, {"lookahead": "gate"}, {"deterministic": True}, {"emulated_link_bytes_per_s": 3e6}])
@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_no_guess_changes_an_output_bit_however_late_the_worker_is(folder, reference, settings, delay_s, monkeypatch):
    model = load(folder, "30%", **settings)
    runtime = vismoe.runtime_of(model)
    evaluated = []
    evaluate = runtime.lookahead.evaluate

    def slowed(snapshot):
        time.sleep(delay_s)
        evaluated.append(threading.current_thread().name)
        return evaluate(snapshot)

    monkeypatch.setattr(runtime.lookahead, "evaluate", slowed)
    for _ in range(2):
        assert_same(reference, tiny_models.greedy(model, tiny_models.prompt("qwen3_vl_moe"), 12))
    wanted = {"MainThread"} if settings.get("deterministic") else {"vismoe-lookahead"}
    assert set(evaluated) == wanted, "off the critical path, but in line where a run must repeat itself"
    runtime.pager.check_integrity()
    runtime.pager.close()


def test_what_wins_is_used_by_itself_and_what_the_network_sees_is_what_was_recorded(folder, tmp_path):
    model = load(folder, "100%")
    runtime = vismoe.runtime_of(model)
    assert isinstance(runtime.lookahead, LearnedLookahead) and "it was best" in runtime.backends["lookahead"]
    assert runtime.plan.bytes_of("lookahead predictor") > 0
    shown = []
    probabilities = runtime.lookahead._networks["decode"].__class__.probabilities

    def watched(network, layer, features, gamma):
        shown.append((layer, network.inputs(features)))
        return probabilities(network, layer, features, gamma)

    networks = runtime.lookahead._networks
    with pytest.MonkeyPatch.context() as patch, TraceWriter(tmp_path / "t", runtime.store.inventory, for_training=True) as writer:
        patch.setattr(type(networks["decode"]), "probabilities", watched)
        writer.request("train/x/0")
        runtime.context.record_to(writer)
        tiny_models.greedy(model, tiny_models.prompt("qwen3_vl_moe"), 6)
        runtime.context.record_to(None)
    samples = read_samples([Trace.open(tmp_path / "t")])
    layers = len(runtime.store.inventory.layers)
    rows = [x for phase in (Phase.PREFILL, Phase.DECODE) for x in inputs_of(samples[phase], networks[phase], layers)]
    assert len(shown) == len(rows) == 6 * (layers - 1)
    for (_, seen), recorded in zip(shown, rows, strict=True):
        np.testing.assert_allclose(seen, recorded, rtol=5e-3, atol=5e-3)
    assert samples[Phase.DECODE].visual_of.all(), "the visual summary of the prompt is reused throughout decode"
    runtime.pager.close()


def inputs_of(samples, network, layers):
    x, _ = Batches(samples, network.shape, 1.0, torch.device("cpu")).inputs(np.arange(len(samples)))
    return [x[layer, row].numpy() for row in range(len(samples)) for layer in range(layers - 1)]


def test_nothing_is_evaluated_while_nothing_misses(folder, monkeypatch):
    model = load(folder, "100%")
    runtime = vismoe.runtime_of(model)
    inputs = tiny_models.prompt("qwen3_vl_moe")
    for _ in range(2):  # the first run brings everything in; the second forgets what its last step missed
        tiny_models.greedy(model, inputs, 12)
    before = runtime.pager.metrics.snapshot().total("misses")
    monkeypatch.setattr(runtime.lookahead, "snapshot", lambda seen: pytest.fail("nothing misses"))
    tiny_models.greedy(model, inputs, 12)
    assert runtime.pager.metrics.snapshot().total("misses") == before
    runtime.pager.close()


def test_a_family_whose_routers_cannot_be_asked_learns_without_them(tmp_path):
    folder = tiny_models.save(WITHOUT_GATE, tmp_path / "model")
    with pytest.raises(ConfigError, match="vismoe calibrate"):
        load(folder, lookahead="learned")
    model = load(folder)
    save_calibration(folder, model, parts=("history", "hidden", "visual"))
    vismoe.runtime_of(model).pager.close()
    model = load(folder, "30%", deterministic=True)
    runtime = vismoe.runtime_of(model)
    told = []
    look_ahead = runtime.pager.look_ahead
    runtime.pager.look_ahead = lambda layer, scores, high: (told.append(layer), look_ahead(layer, scores, high))
    expected = tiny_models.greedy(tiny_models.reference(folder), tiny_models.prompt(WITHOUT_GATE), 4)
    assert_same(expected, tiny_models.greedy(model, tiny_models.prompt(WITHOUT_GATE), 4))
    assert told
    runtime.pager.close()


def test_a_calibration_of_another_model_or_of_other_weights_is_refused(folder, tmp_path):
    model = load(folder)
    save_calibration(folder, model, tmp_path / "weights", routers="0" * 64)
    inventory = vismoe.runtime_of(model).store.inventory
    other = geometry_of(inventory, 4096)
    save_calibration(folder, model, tmp_path / "shape", geometry=other)
    vismoe.runtime_of(model).pager.close()
    for name, reason in (("weights", "other router weights"), ("shape", "hidden=4096")):
        with pytest.raises(ConfigError, match=reason) as refused:
            load(folder, calibration=str(tmp_path / name))
        assert "--calibration none" in str(refused.value)
    with pytest.raises(ConfigError, match=r"has no calibration.json"):
        load(folder, calibration=str(tmp_path))
    (tmp_path / "calibration.json").write_text('{"format": "vismoe-calibration"')
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder, calibration=str(tmp_path))
    model = load(folder, calibration="none")  # the fix that the message names
    assert vismoe.runtime_of(model).backends["lookahead"].startswith("gate")
    vismoe.runtime_of(model).pager.close()


def untrained(sizes, phases=("prefill", "decode")):
    return {phase: Predictor(Shape(sizes, bottleneck=8), dropout=0.0).eval().folded() for phase in phases}


def test_a_predictor_that_does_not_fit_the_model_or_its_json_is_refused(folder, tmp_path):
    model = load(folder)
    save_calibration(folder, model, tmp_path)
    runtime = vismoe.runtime_of(model)
    runtime.pager.close()
    calibration, inventory = Calibration.read(tmp_path), runtime.store.inventory
    right = next(iter(calibration.networks().values())).shape.sizes
    LearnedLookahead.of(model, inventory, calibration)
    for networks in (
        untrained(dataclasses.replace(right, layers=right.layers + 1)),
        untrained(dataclasses.replace(right, experts=right.experts + 1)),
        untrained(dataclasses.replace(right, hidden=right.hidden // 2)),
        untrained(right, ("decode",)),
        untrained(right, ("prefill",)) | untrained(dataclasses.replace(right, window=2), ("decode",)),
    ):
        calibration.save(networks)
        with pytest.raises(ConfigError, match=r"networks for .* this model needs prefill and decode with .* again"):
            LearnedLookahead.of(model, inventory, Calibration.read(tmp_path))
    (tmp_path / PREDICTOR).write_bytes(save_folded(untrained(right)))  # of another run, whose JSON never came
    with pytest.raises(CheckpointError, match=r"not the predictor that calibration\.json beside it was saved with"):
        load(folder, calibration=str(tmp_path))
    (tmp_path / PREDICTOR).unlink()
    with pytest.raises(CheckpointError, match="vismoe calibrate again"):
        Calibration.read(tmp_path).networks()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3), ("routers", None), ("predictor", 3), ("lookahead", "foo"), ("lookahead", ["gate"]),
        ("has_predictor", "yes"), ("has_predictor", False), ("gamma", 0), ("gamma", 1.1), ("gamma", "x"),
        ("prune_layer", 0), ("prune_layer", "x"), ("prune_layer", 2.5), ("prune_layer", True),
        ("least_probability", -0.1), ("least_probability", 2), ("selection", "foo"), ("selection", {}),
        ("pinned_layers", []), ("pinned_layers", {"25": 1}), ("pinned_layers", {"25%": 1.5}),
        ("pinned_layers", {"25%": -1}), ("pinned_layers", {"x%": 1}),
    ],
)  # fmt: skip
def test_a_calibration_with_a_value_that_none_has_is_damaged(shipped, tmp_path, name, value):
    (tmp_path / JSON).write_text(json.dumps(shipped))
    assert Calibration.read(tmp_path) is not None
    (tmp_path / JSON).write_text(json.dumps({**shipped, name: value}))
    with pytest.raises(CheckpointError, match="damaged"):
        Calibration.read(tmp_path)


def test_the_digest_is_of_the_routers_alone_and_of_any_dtype(folder):
    halves = tiny_models.reference(folder, torch.bfloat16)
    model = load(folder)
    inventory = vismoe.runtime_of(model).store.inventory
    digest = router_digest(model, inventory)
    assert router_digest(halves, inventory) == digest
    halves.model.language_model.layers[0].self_attn.q_proj.weight.data += 1
    assert router_digest(halves, inventory) == digest
    halves.model.language_model.layers[1].mlp.gate.weight.data[0, 0] += 1
    assert router_digest(halves, inventory) != digest
    vismoe.runtime_of(model).pager.close()


class Slow:
    """A lookahead that says the layer's number when it is let go."""

    def __init__(self):
        self.go, self.error = threading.Event(), None

    def snapshot(self, seen):
        return seen.layer

    def evaluate(self, snapshot):
        self.go.wait(10)
        if self.error:
            raise self.error
        return np.full((1, 1), snapshot)


def seen(layer):
    return Seen(layer, True, np.zeros((1, 2), np.int64), torch.zeros(1, 4))


def until(done):
    for _ in range(1000):
        if done():
            return
        time.sleep(0.01)


def test_only_the_newest_layer_is_evaluated_and_close_ends_the_worker():
    slow, told, charged = Slow(), [], []
    ahead = BackgroundLookahead(slow, lambda tick, layer, scores: told.append((tick, layer)), inline=False, charge=charged.append)
    for layer in range(5):
        ahead.ask(seen(layer), tick=10 + layer)
        time.sleep(0.05 if layer == 0 else 0)  # the worker takes the first
    slow.go.set()
    until(lambda: len(told) == 2)
    ahead.close()
    ahead.close()
    assert told == [(10, 0), (14, 4)], "what came between was stale before it began"
    assert len(charged) == 2 and all(0 < core_s < 1 for core_s in charged), "time of a core, not of waiting"
    assert not [thread for thread in threading.enumerate() if thread.name == "vismoe-lookahead"]


def test_an_error_in_the_worker_is_raised_at_the_next_layer_and_asking_goes_on():
    slow, told = Slow(), []
    slow.error = ValueError("no such expert")
    slow.go.set()
    ahead = BackgroundLookahead(slow, lambda tick, layer, scores: told.append(layer), inline=False)
    ahead.ask(seen(0), 1)
    until(lambda: ahead._failed is not None)
    slow.error = None
    with pytest.raises(RuntimeError, match="no such expert"):
        ahead.ask(seen(1), 2)
    ahead.ask(seen(2), 3)
    until(lambda: told)
    ahead.close()
    assert told == [2]


def test_scores_that_come_after_the_next_demand_are_dropped(folder):
    model = load(folder)
    lookahead_inputs, pager = vismoe.runtime_of(model).context.lookahead_inputs, vismoe.runtime_of(model).pager
    told = []
    pager.look_ahead = lambda layer, scores, high: told.append(layer)
    lookahead_inputs._tell(pager.core.tick, 3, np.zeros((1, 4), np.float32))
    pager.core.tick += 1
    lookahead_inputs._tell(pager.core.tick - 1, 3, np.zeros((1, 4), np.float32))
    assert told == [3]
    pager.close()


def test_a_model_that_is_dropped_takes_its_worker_along(folder):
    model = load(folder, "30%")
    tiny_models.greedy(model, tiny_models.prompt("qwen3_vl_moe"), 3)
    worker = next(thread for thread in threading.enumerate() if thread.name == "vismoe-lookahead")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    worker.join(5)
    assert not worker.is_alive()
