"""The curve over pinned layers against plain replays, the choice by hand, and the programs that print them on a small scale."""

import json

import pytest

from vismoe.bench.checkpoint import write_checkpoint
from vismoe.bench.geometry import geometry_config, model_class_of
from vismoe.cli.main import main as cli
from vismoe.errors import ConfigError
from vismoe.eval.studies import ladder, orchestrator
from vismoe.eval.studies.timed import TokenRequests, ask_tokens, medians, take_turns
from vismoe.simulate.demands import Demands
from vismoe.simulate.pinned import PinnedPoint, best_depth, best_pinned, pinned_curve
from vismoe.simulate.replay import replay
from vismoe.trace.files import TraceWriter
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import Phase

TIMED = dict(link_bytes_per_s=20_000.0, compute_s_per_layer=0.05)


def record(trace, folder):
    with TraceWriter(folder, trace.inventory) as writer:
        for step in trace:
            writer.request(step.request)
            writer.step(step.phase, step.kinds)
            for routing in step.layers:
                writer.layer(routing.layer, routing.expert_ids, routing.weights, routing.scores)
    return folder


def test_every_point_of_the_curve_is_a_replay_with_so_many_pinned_layers():
    demands = Demands.of(skewed_trace(5, 16, 2, prompt_tokens=6, tokens=30, window=3))
    points = pinned_curve(demands, "50%", prefetch=True, **TIMED)
    assert [point.pinned_layers for point in points] == [0, 1, 2]  # 40 slabs; a third layer would leave none
    for point in points:
        result = replay(demands, "50%", "lfu", pinned_layers=point.pinned_layers, prefetch=True, **TIMED)
        assert point.seconds == pytest.approx(result.seconds) and point.fetched_bytes == result.fetched_bytes
        assert point.decode_s == pytest.approx(result.phase_s(Phase.DECODE)) and 0 < point.prefill_bytes < point.fetched_bytes


def test_the_curve_ends_where_a_plan_would_refuse_the_prefix():
    """Four layers of eight, three for a token: beside the prefix, three slabs for each of the next two layers (window 1)."""
    demands = Demands.of(skewed_trace(4, 8, 3, tokens=2))
    deepest = [len(pinned_curve(demands, slots, window=1)) - 1 for slots in (8, 13, 14, 22, 27, 32)]
    assert deepest == [0, 0, 1, 2, 3, 3]
    assert len(pinned_curve(demands, 32, window=1, most=2)) == 3
    with pytest.raises(ConfigError, match="sets them itself"):
        pinned_curve(demands, 16, pinned_layers=1)


def test_a_prefix_is_chosen_only_where_it_clearly_saves():
    def points(*costs):
        return [PinnedPoint(depth, 0.0, cost, 0, int(1000 * cost)) for depth, cost in enumerate(costs)]

    assert best_depth(points(10.0, 9.95, 9.92), timed=True) == 0
    assert best_depth(points(10.0, 9.95, 9.8, 9.75, 12.0), timed=True) == 2
    assert best_depth(points(10.0, 11.0, 7.0), timed=False) == 2


def test_pinning_wins_where_early_layers_are_used_evenly_and_later_ones_hardly_vary():
    even, narrow = skewed_trace(6, 12, 3, tokens=80, skew=0.0, seed=1), skewed_trace(6, 12, 3, tokens=80, skew=3.0, seed=1)
    for step, other in zip(even, narrow, strict=True):
        step.layers[2:] = other.layers[2:]
    assert best_pinned(even, "75%") == 2
    assert best_pinned(skewed_trace(6, 12, 3, tokens=80, skew=1.0), "50%") == 0, "memory serves every layer better"


def test_vismoe_replay_prints_the_curve(tmp_path, capsys):
    folder = record(skewed_trace(3, 8, 2, tokens=20), tmp_path / "trace")
    assert cli(["replay", str(folder), "--slots", "66%", "--pinned-curve", "--link", "20KB", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["best"].keys() == {"66%"} and len(shown["curves"]["66%"]) == 2
    assert cli(["replay", str(folder), "--slots", "66%", "--pinned-curve", "--pinned-layers", "1"]) == 2


def test_the_study_of_combinations_names_a_winner_for_recorded_traces(tmp_path, capsys):
    folder = record(skewed_trace(4, 16, 2, requests=2, prompt_tokens=5, tokens=20, window=3, score_noise=0.2), tmp_path / "trace")
    options = ["--shares", "25%", "50%", "--links", "20KB", "--layer-seconds", "0.05", "--figures", str(tmp_path / "figures")]
    assert orchestrator.main(["--trace", f"small={folder}", *options]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert min(result["times_best"].values()) >= 1.0 and len(result["times_best"]) == 4
    assert {(c["lookahead"], c["order"]) for c in result["combinations"]} >= {("none", "oracle"), ("recorded", "lfu")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"orchestrator-combinations.png", "pinned-layers.png"}
    assert orchestrator.main(["--trace", "nameless"]) == 2


def test_rungs_add_one_thing_each_and_turns_of_a_generated_checkpoint_with_pictures_are_counted(tmp_path):
    folder = write_checkpoint(geometry_config("tiny"), model_class_of("tiny"), tmp_path / "tiny", skew=1.0, progress=False).folder
    place = ladder.LadderSetup("disk", {"memory": "50%", "kernels": "torch", "reads": "direct"}, None, "gate", False, None)
    settings = ladder.rungs(place, keep=0.5, pinned_layers=1)
    for (_, lower), (_, higher) in zip(list(settings.items()), list(settings.items())[1:]):
        assert lower.keys() == higher.keys() and 1 <= sum(lower[key] != higher[key] for key in lower) <= 2
    requests = TokenRequests(count=2, side=128, text_tokens=12, new_tokens=4)
    runs = take_turns({name: lambda each=each: ask_tokens(folder, each, requests) for name, each in settings.items()}, rounds=1)
    rows = {name: medians(each) for name, each in runs.items()}
    assert list(rows) == ["base", "+ compression", "+ prediction", "+ orchestrator"]
    for row in rows.values():
        assert row["prefill_bytes"] > 0 and 0 < row["decode_hit_rate"] < 1
        assert row["seconds"] == pytest.approx(row["prefill_s"] + row["decode_s"])
    assert runs["base"][0].decode_tokens == 6
    assert ladder.table(rows).splitlines()[1].split()[2] == "100%"
