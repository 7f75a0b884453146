"""Traces on disk: a round trip of every field, and refusal of what is damaged, foreign or newer."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import ClosedError, TraceError
from vismoe.trace.files import Trace, TraceWriter
from vismoe.trace.steps import LayerRouting, TraceStep
from vismoe.types import Evidence, ExpertInventory, MoELayer, Phase, RecordLayout, TokenKind

TEXT, VISUAL, PAD = TokenKind
LAYOUTS = tuple(
    RecordLayout.of({"up": (rows, 8), "down": (8, rows)}, {"up": dtype, "down": torch.float32})
    for rows, dtype in ((5, torch.bfloat16), (9, torch.float16))
)
INVENTORY = ExpertInventory(
    (MoELayer(0, "text.0.experts", 16, 2, 0), MoELayer(1, "vision.0.experts", 6, 3, 1), MoELayer(2, "text.1.experts", 16, 2, 0)),
    LAYOUTS,
)


def random_step(random, phase, shape, request="r"):
    kinds = random.integers(0, 3, shape).astype(np.uint8)
    layers = []
    for layer in INVENTORY.layers:
        kept = None if random.random() < 0.5 else np.sort(random.permutation(kinds.size)[: kinds.size // 2]).astype(np.int32)
        size = (kinds.size if kept is None else len(kept), layer.top_k)
        ids = random.integers(0, layer.num_experts, size).astype(np.int16)
        scores = random.random((2, 16)).astype(np.float16) if random.random() < 0.5 else None
        layers.append(LayerRouting(layer.index, ids, random.random(size).astype(np.float16), scores, kept))
    return TraceStep(request, phase, kinds, layers)


def write(writer, step):
    writer.request(step.request)
    writer.step(step.phase, step.kinds)
    for routing in step.layers:
        writer.layer(routing.layer, routing.expert_ids, routing.weights, routing.scores, routing.kept)


def assert_same(left, right):
    assert (left.request, left.phase) == (right.request, right.phase)
    np.testing.assert_array_equal(left.kinds, right.kinds, strict=True)
    for a, b in zip(left.layers, right.layers, strict=True):
        assert a.layer == b.layer
        for name in ("expert_ids", "weights", "scores", "kept"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            if x is not None:
                np.testing.assert_array_equal(x, y, strict=True)


def a_trace(path, steps=5, **options):
    random = np.random.default_rng(0)
    wanted = [random_step(random, Phase.PREFILL, (1, 4), "first")]
    wanted += [random_step(random, Phase.DECODE, (1, 1), "first") for _ in range(steps - 1)]
    with TraceWriter(path, INVENTORY, model="toy", fingerprint="f", **options) as writer:
        for step in wanted:
            write(writer, step)
    return wanted


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), flush_bytes=st.sampled_from([1, 200, 10**6]))
def test_steps_come_back_as_they_were_written_however_often_shards_are_flushed(tmp_path_factory, seed, flush_bytes):
    random, path = np.random.default_rng(seed), tmp_path_factory.mktemp("trace") / "t"
    steps = []
    for i in range(random.integers(0, 8)):
        phase = list(Phase)[random.integers(3)]
        shape = (int(random.integers(1, 4)), 1 if phase is Phase.DECODE else int(random.integers(1, 6)))
        steps.append(random_step(random, phase, shape, f"request {i // 2}"))
    with TraceWriter(path, INVENTORY, model="toy", flush_bytes=flush_bytes) as writer:
        for step in steps:
            write(writer, step)
    trace = Trace.open(path)
    assert trace.inventory == INVENTORY and trace.model == "toy" and trace.complete and len(trace) == len(steps)
    for written, read in zip(steps, trace, strict=True):
        assert_same(written, read)


def test_the_recorder_holds_no_more_than_it_was_told_however_long_it_records(tmp_path):
    limit, ids, weights = 2**20, np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32)
    with TraceWriter(tmp_path / "t", INVENTORY, flush_bytes=limit) as writer:
        tracemalloc.start()
        for _ in range(3000):
            writer.step(Phase.DECODE, np.zeros(1, np.uint8))
            for layer in (0, 2):
                writer.layer(layer, ids, weights)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < limit and peak < 2 * limit  # packing a shard adds its own arrays for a moment


def test_one_dimension_of_kinds_is_one_sequence_or_one_token_each_in_decode(tmp_path):
    with TraceWriter(tmp_path / "t", INVENTORY) as writer:
        writer.step(Phase.PREFILL, np.array([TEXT, VISUAL, PAD]))
        writer.step(Phase.DECODE, np.array([TEXT, TEXT, PAD]))
    assert [step.kinds.shape for step in Trace.open(tmp_path / "t")] == [(1, 3), (3, 1)]


def test_demand_leaves_out_padding_and_sentinels_and_knows_the_last_tokens():
    kinds = np.array([[PAD, TEXT, VISUAL], [TEXT, TEXT, PAD], [PAD, PAD, PAD]], np.uint8)
    ids = np.array([[9, 9], [1, 2], [3, 16], [4, 4], [6, 5], [9, 9], [9, 9], [9, 9], [9, 9]], np.int16)
    routing = LayerRouting(0, ids, np.ones_like(ids, np.float16))
    experts, tokens, last = TraceStep("r", Phase.PREFILL, kinds, [routing]).demand(routing, num_experts=16)
    assert experts.tolist() == [1, 2, 3, 4, 5, 6] and last.tolist() == [3, 5, 6]
    assert tokens.tolist() == [1, 1, 1, 2, 1, 1]


def test_demand_follows_the_tokens_that_reached_a_pruned_layer():
    kinds = np.array([[VISUAL, VISUAL, TEXT], [PAD, TEXT, TEXT]], np.uint8)
    routing = LayerRouting(
        0, np.array([[1], [2], [3], [4]], np.int16), np.ones((4, 1), np.float16), kept=np.array([1, 2, 3, 4], np.int32)
    )
    experts, tokens, last = TraceStep("r", Phase.PREFILL, kinds, [routing]).demand(routing, num_experts=16)
    assert experts.tolist() == [1, 2, 4] and tokens.tolist() == [1, 1, 1] and last.tolist() == [2, 4]


def test_recording_to_the_same_folder_again_appends(tmp_path):
    first, second = a_trace(tmp_path / "t"), a_trace(tmp_path / "t")
    trace = Trace.open(tmp_path / "t")
    assert len(trace) == len(first) + len(second)
    for written, read in zip(first + second, trace, strict=True):
        assert_same(written, read)


def test_a_crash_keeps_the_shards_that_were_written_and_recording_can_go_on(tmp_path):
    random = np.random.default_rng(0)
    writer = TraceWriter(tmp_path / "t", INVENTORY, model="toy", fingerprint="f", flush_bytes=1)
    for _ in range(3):  # a shard is written when the next step begins: the third step is lost
        write(writer, random_step(random, Phase.DECODE, (1, 1)))
    (tmp_path / "t" / "steps-000002.safetensors.partial").write_bytes(b"half a sh")
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete and len(list(trace)) == len(trace) == 2
    a_trace(tmp_path / "t")
    assert len(list(Trace.open(tmp_path / "t"))) == 2 + 5


def test_the_recorder_keeps_copies_of_the_callers_buffers(tmp_path):
    ids, weights, kinds = np.ones((1, 2), np.int64), np.ones((1, 2), np.float32), np.zeros(1, np.uint8)
    with TraceWriter(tmp_path / "t", INVENTORY) as writer:
        writer.step(Phase.DECODE, kinds)
        writer.layer(0, ids, weights)
        ids[:], weights[:], kinds[:] = 7, 7, PAD
    (step,) = Trace.open(tmp_path / "t")
    assert step.kinds.tolist() == [[TEXT]] and step.layers[0].expert_ids.tolist() == [[1, 1]]


def test_another_model_or_a_folder_with_other_things_is_refused(tmp_path):
    a_trace(tmp_path / "t")
    with pytest.raises(TraceError, match="another model"):
        TraceWriter(tmp_path / "t", INVENTORY, model="other", fingerprint="f")
    with pytest.raises(TraceError, match="other files"):
        TraceWriter(tmp_path, INVENTORY)


def truncate_a_shard(path):
    shard = path / "steps-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def remove_a_middle_shard(path):
    (path / "steps-000001.safetensors").unlink()


def remove_the_last_shard(path):
    max(path.glob("*.safetensors")).unlink()


def bring_in_a_foreign_shard(path):
    a_trace(path.parent / "foreign", flush_bytes=1)
    (path.parent / "foreign" / "steps-000001.safetensors").rename(path / "steps-000001.safetensors")


def remove_the_header(path):
    (path / "trace.json").unlink()


def cut_the_header(path):
    (path / "trace.json").write_text((path / "trace.json").read_text()[:50])


def change_header(**changes):
    def change(path):
        header = json.loads((path / "trace.json").read_text())
        (path / "trace.json").write_text(json.dumps({**header, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_a_shard, "truncated"),
        (remove_a_middle_shard, "shards are missing"),
        (remove_the_last_shard, "shards are missing"),
        (bring_in_a_foreign_shard, "another trace"),
        (remove_the_header, "not a routing trace"),
        (cut_the_header, "not a routing trace"),
        (change_header(format="something"), "not a routing trace"),
        (change_header(version=2), "version 2.*up to 1.*update"),
    ],
)
def test_what_is_damaged_foreign_or_newer_is_refused_by_name(tmp_path, damage, message):
    a_trace(tmp_path / "t", flush_bytes=1)
    damage(tmp_path / "t")
    with pytest.raises(TraceError, match=message):
        Trace.open(tmp_path / "t")


def test_a_closed_recorder_takes_no_more_steps(tmp_path):
    writer = TraceWriter(tmp_path / "t", INVENTORY)
    writer.close()
    writer.close()
    with pytest.raises(ClosedError):
        writer.step(Phase.DECODE, np.zeros(1))


def evidence_of(random, visual):
    return Evidence(
        random.random(5).astype(np.float16),
        random.random(4).astype(np.float16) if visual else None,
        random.random((2, 3, 16)).astype(np.float16) if random.random() < 0.7 else None,
    )


def test_what_a_predictor_is_trained_on_comes_back_and_other_readers_do_without(tmp_path):
    random = np.random.default_rng(0)
    steps = [random_step(random, Phase.PREFILL, (1, 3), f"request {number}") for number in range(4)]
    shown = {}
    with TraceWriter(tmp_path / "t", INVENTORY, for_training=True, flush_bytes=1) as writer:
        for number, step in enumerate(steps):
            writer.request(step.request)
            writer.step(step.phase, step.kinds)
            for routing in step.layers:
                evidence = shown[number, routing.layer] = None if random.random() < 0.3 else evidence_of(random, number % 2)
                writer.layer(routing.layer, routing.expert_ids, routing.weights, routing.scores, routing.kept, evidence)
    trace = Trace.open(tmp_path / "t")
    assert trace.requests == [step.request for step in steps]
    for number, (read, wrote) in enumerate(zip(trace, steps, strict=True)):
        assert_same(read, wrote)
        for routing in read.layers:
            one, other = routing.evidence, shown[number, routing.layer]
            assert (one is None) == (other is None)
            for name in ("hidden", "visual", "expected") if other is not None else ():
                x, y = getattr(one, name), getattr(other, name)
                assert (x is None) == (y is None) and (y is None or np.array_equal(x, y))


def test_a_training_trace_that_is_interrupted_holds_whole_requests_only(tmp_path):
    random = np.random.default_rng(0)
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t", INVENTORY, for_training=True) as writer:
        for number in range(3):
            write(writer, random_step(random, Phase.PREFILL, (1, 3), f"request {number}"))
            if number < 2:
                write(writer, random_step(random, Phase.DECODE, (1, 1), f"request {number}"))
        raise KeyboardInterrupt
    assert Trace.open(tmp_path / "t").requests == ["request 0", "request 1"]
