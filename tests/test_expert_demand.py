"""Expert demand: statistics against numbers worked out by hand, numpy's own, and what renumbering experts must not change."""

import dataclasses
import json

import numpy as np
import pytest

from vismoe.eval.studies import expert_demand
from vismoe.eval.studies.expert_demand import (
    alone,
    deepest,
    differences,
    main,
    pair_measures,
    prefill_loads,
    recorded,
    rivals,
    shape,
)
from vismoe.eval.studies.pruning import PruningContestant
from vismoe.eval.studies.routing import (
    LayerLoad,
    LoadTransitions,
    active_experts,
    coverage,
    coverage_curve,
    index_similarity,
    load,
    most,
    prompt_layers,
    structure_similarity,
)
from vismoe.simulate.replay import replay
from vismoe.trace.files import Trace
from vismoe.trace.steps import LayerRouting, TraceStep
from vismoe.trace.synthetic import inventory_of, skewed_trace
from vismoe.types import Phase, TokenKind
from vismoe.vision.selection import Pruning

T, V, P = TokenKind.TEXT, TokenKind.VISUAL, TokenKind.PAD


def layer(experts, tokens=None, visual=None) -> LayerLoad:
    experts = np.array(experts)
    tokens = np.arange(len(experts)) if tokens is None else np.array(tokens)
    return LayerLoad(experts, tokens, np.zeros(len(experts), bool) if visual is None else np.array(visual), False)


def random_layer(rng, tokens=12, experts=8, top_k=3) -> LayerLoad:
    return layer([rng.permutation(experts)[:top_k] for _ in range(tokens)])


def renumbered(routed: LayerLoad, order: np.ndarray) -> LayerLoad:
    return dataclasses.replace(routed, experts=order[routed.experts])


def test_a_recorded_prefill_is_read_with_its_pads_left_out_and_its_kept_tokens_in_place():
    step = TraceStep(
        "0",
        Phase.PREFILL,
        np.array([[P, T, V, V, T]], np.uint8),
        [
            LayerRouting(0, np.array([[7, 7], [0, 1], [2, 3], [4, 5], [6, 0]], np.int16), np.ones((5, 2), np.float16)),
            LayerRouting(1, np.array([[1, 2], [3, 4], [5, 6]], np.int16), np.ones((3, 2), np.float16), kept=np.array([1, 3, 4])),
        ],
    )
    first, second = prompt_layers(step)
    assert not first.pruned and second.pruned
    assert (first.tokens.tolist(), first.visual.tolist()) == ([1, 2, 3, 4], [False, True, True, False])
    assert (second.tokens.tolist(), second.visual.tolist()) == ([1, 3, 4], [False, True, False])
    assert load(first, 8).tolist() == [2, 1, 1, 1, 1, 1, 1, 0]
    assert load(second.only(second.visual), 8).tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_demand_of_a_layer_is_what_can_be_counted_by_hand():
    loads = load(layer([[0, 1], [0, 2], [0, 1], [0, 4]]), 4)  # expert 4 of 4 does not exist: a token that chose one expert
    assert loads.tolist() == [4, 2, 1, 0] and active_experts(loads) == 3
    assert coverage_curve(loads) == pytest.approx([4 / 7, 6 / 7, 1, 1])
    assert coverage(loads, most(loads, 2)) == pytest.approx(6 / 7) and coverage(loads, np.array([1, 3])) == pytest.approx(2 / 7)
    assert most(np.array([1, 3, 3, 0]), 2).tolist() == [1, 2]
    assert index_similarity(np.array([3, 4, 0]), np.array([4, 3, 0])) == pytest.approx(24 / 25)


def test_structure_is_the_correlation_of_pairs_and_does_not_care_how_experts_are_numbered():
    rng = np.random.default_rng(0)
    here, other = random_layer(rng), random_layer(rng)
    shared = [
        [len({*routed.experts[a]} & {*routed.experts[b]}) for a in range(12) for b in range(a + 1, 12)]
        for routed in (here, other)
    ]
    found = structure_similarity(here, other, 8)
    assert found == pytest.approx(np.corrcoef(*shared)[0, 1])
    order = rng.permutation(8)
    assert structure_similarity(here, renumbered(other, order), 8) == pytest.approx(found)
    assert structure_similarity(here, renumbered(here, order), 8) == pytest.approx(1)
    assert index_similarity(load(here, 8), load(renumbered(here, order), 8)) < 0.99


def test_structure_looks_at_the_tokens_that_reached_both_layers_and_needs_pairs_that_differ():
    rng = np.random.default_rng(1)
    here = random_layer(rng)
    some = here.only(np.arange(12) % 2 == 0)
    assert structure_similarity(here, some, 8) == pytest.approx(1)
    assert structure_similarity(here, layer([[0, 1]] * 12), 8) == 0
    assert structure_similarity(here, here.only(np.zeros(12, bool)), 8) == 0


def test_few_tokens_alone_do_not_make_layers_look_alike():
    rng = np.random.default_rng(2)
    for tokens in (6, 60):
        unrelated = [
            structure_similarity(random_layer(rng, tokens, 32, 4), random_layer(rng, tokens, 32, 4), 32) for _ in range(150)
        ]
        assert abs(np.mean(unrelated)) < 0.06


def test_what_one_layer_says_about_the_next_is_learned_and_popularity_cannot_say_it():
    rng, order = np.random.default_rng(3), np.roll(np.arange(32), 5)
    prompts = []
    for _ in range(60):  # every prompt uses eight experts of its own; the next layer uses the same under other numbers
        favoured = rng.permutation(32)[:8]
        here = layer([rng.permutation(favoured)[:4] for _ in range(20)])
        prompts.append((here, renumbered(here, order)))
    found = pair_measures(prompts, 32)
    assert found["predicted_coverage"].mean() > 0.8 and found["popular_coverage"].mean() < 0.5
    alone = [(layer([[expert]]), layer([[order[expert]]])) for expert in range(32)]
    assert [most(LoadTransitions(alone, 32).expected(load(here, 32)), 1)[0] for here, _ in alone] == order.tolist()
    swapped = pair_measures([(here, layer(next_one.experts)) for here, next_one in prompts[::-1]], 32)
    assert swapped["structure_similarity"] == pytest.approx(found["structure_similarity"][::-1])


def test_a_prompt_is_not_predicted_from_itself():
    rng = np.random.default_rng(4)
    first = random_layer(rng, 40, 32, 4), random_layer(rng, 40, 32, 4)
    rest = [(layer([[0, 1, 2, 3]] * 5), layer([[0, 1, 2, 3]] * 5))] * 3
    alone = pair_measures([first, *rest], 32)
    assert alone["popular_coverage"][0] == pytest.approx(coverage(load(first[1], 32), np.arange(8)))


def test_means_are_over_the_layers_after_the_pruning():
    prompts = [
        [layer([[0, 1], [2, 3], [4, 5], [6, 7]]), layer([[0, 1], [2, 3], [4, 5]]), layer([[0, 1], [2, 3]])] for _ in range(4)
    ]
    values, by_layer = shape(prompts, [8, 8, 8], deep=[1, 2])
    assert values["active_experts"].tolist() == [5.0] * 4 and by_layer["active_experts"] == [8, 6, 4]
    assert values["coverage"] == pytest.approx([(1 / 3 + 1 / 2) / 2] * 4)
    assert by_layer["coverage_curve"][:3] == pytest.approx([(1 / 6 + 1 / 4) / 2, (2 / 6 + 2 / 4) / 2, (3 / 6 + 3 / 4) / 2])
    assert differences(values, values)["coverage"].tolist() == [0.0] * 4
    pruned = [dataclasses.replace(routed, pruned=index > 0) for index, routed in enumerate(prompts[0])]
    assert deepest({1: [pruned]}) == {1: [1, 2]}


def test_loads_of_prefill_are_those_of_the_replay_prompt_by_prompt():
    trace = skewed_trace(4, 16, 2, requests=6, prompt_tokens=9, tokens=7)
    found, whole = prefill_loads(trace), replay(trace, "25%", "lfu")
    assert len(found["loads"]) == 6 and found["loads"].sum() == whole.counters.total("misses", Phase.PREFILL)
    assert found["loads"][0] == sum(len(np.unique(routing.expert_ids)) for routing in trace.steps[0].layers)  # nothing was there
    assert ((found["hit_rate"] >= 0) & (found["hit_rate"] < 1)).all() and found["hit_rate"][0] == 0


def test_everybody_is_compared_at_the_same_share_and_layer():
    affinity = PruningContestant(Pruning(0.5, "affinity", 0.1), 2)
    assert rivals(affinity) == {
        "all tokens": PruningContestant(Pruning(), 2),
        "random": PruningContestant(Pruning(0.5, "random"), 2),
        "saliency": PruningContestant(Pruning(0.5, "saliency"), 2),
    }
    assert rivals(PruningContestant(Pruning(), 3, 2)) == {"all experts": PruningContestant(Pruning(), 3)}


def test_a_recorded_batch_is_taken_apart_into_its_sequences():
    whole = TraceStep(
        "what 0",
        Phase.PREFILL,
        np.array([[P, T, V], [V, V, T]], np.uint8),
        [
            LayerRouting(0, np.arange(6, dtype=np.int16)[:, None], np.ones((6, 1), np.float16)),
            LayerRouting(1, np.array([[7], [6], [5]], np.int16), np.ones((3, 1), np.float16), kept=np.array([1, 4, 5])),
        ],
    )
    first, second = alone([whole])
    assert first.request != second.request
    assert [each.tokens.tolist() for each in prompt_layers(first)] == [[1, 2], [1]]
    assert [each.tokens.tolist() for each in prompt_layers(second)] == [[0, 1, 2], [1, 2]]
    assert [each.experts.ravel().tolist() for each in prompt_layers(first)] == [[1, 2], [7]]
    assert [each.experts.ravel().tolist() for each in prompt_layers(second)] == [[3, 4, 5], [6, 5]]
    assert prompt_layers(second)[1].visual.tolist() == [True, False]


class Stub:
    """Engines that record one step for each batch of prompts, and may stop."""

    fingerprint, processor, inventory = "", None, inventory_of(1, 8, 2)

    def __init__(self, monkeypatch, stop_at=None):
        self.asked, self.stop_at = 0, stop_at
        self.model = self.context = self
        self.recorder = None
        monkeypatch.setattr(expert_demand, "runtime_of", lambda model: model)
        monkeypatch.setattr(expert_demand, "prompts", lambda _, talks: len(talks))

    def of(self, contestant):
        return self

    def record_to(self, recorder):
        self.recorder = recorder

    def answers(self, contestant, inputs, seed, most_tokens):
        if self.asked == self.stop_at:
            raise KeyboardInterrupt
        self.asked += 1
        self.recorder.step(Phase.PREFILL, np.full((inputs, 1), T))
        self.recorder.layer(0, np.array([[seed % 8, 7]] * inputs), np.ones((inputs, 2)))


def test_a_whole_trace_is_recorded_once_and_a_part_of_one_anew(tmp_path, monkeypatch):
    contestant = PruningContestant(Pruning(0.5), 3)
    with pytest.raises(KeyboardInterrupt):
        recorded(Stub(monkeypatch, stop_at=2), contestant, "what", 25, 0, "demo", tmp_path)
    (part,) = tmp_path.iterdir()
    engines = Stub(monkeypatch)
    trace = recorded(engines, contestant, "what", 25, 0, "demo", tmp_path)
    assert engines.asked == 3 and [len(step.kinds) for step in trace] == [10, 10, 5]
    assert len(list(tmp_path.iterdir())) == 1 and part.name == f"{trace.path.name}.partial"
    assert len(recorded(engines, contestant, "what", 25, 0, "demo", tmp_path)) == 3 and engines.asked == 3
    recorded(engines, contestant, "what", 25, 1, "demo", tmp_path)  # other questions
    recorded(engines, contestant, "where", 25, 0, "demo", tmp_path)
    recorded(engines, dataclasses.replace(contestant, prune_layer=2), "what", 25, 0, "demo", tmp_path)
    assert engines.asked == 12 and len(list(tmp_path.iterdir())) == 4


def test_the_command_measures_the_demo_model_and_draws(tmp_path, capsys, monkeypatch):
    def few(layer: int) -> list[PruningContestant]:
        return [PruningContestant(Pruning(0.5, name), layer) for name in ("affinity", "random")]

    study = dataclasses.replace(expert_demand.STUDIES["selection"], contestants=few)
    monkeypatch.setitem(expert_demand.STUDIES, "selection", study)
    monkeypatch.setattr(expert_demand, "KINDS", ("exists", "text", "compare"))
    assert main(["--questions", "3", "--work", str(tmp_path / "work"), "--figures", str(tmp_path)]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert any("against random" in line for line in tables)
    rows = result["contestants"]
    everything, *pruned = rows.values()
    first = everything["deep_layers"][0]
    tokens = {row["prompt_tokens"] for row in pruned}
    assert len(tokens) == 1 and tokens.pop() < everything["prompt_tokens"]
    for row in pruned:
        for group in ("all", "visual", "text"):
            active = row["by_layer"][group]["active_experts"]
            assert active[:first] == everything["by_layer"][group]["active_experts"][:first]  # nothing was dropped yet
        assert row["against"]["all tokens"]["active_experts"]["value"] < 0
        assert all(np.diff(row["by_layer"]["all"]["coverage_curve"]) >= 0)
    (ceiling,) = result["ceilings"].values()
    text = np.mean(everything["by_layer"]["text"]["active_experts"][first:])
    assert ceiling["active_experts"]["value"] == pytest.approx(text) and any(line.startswith("ceiling") for line in tables)
    spared = [row["against"]["all tokens"]["loads"]["value"] for row in (ceiling, *pruned)]
    assert spared[0] == min(spared) < 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"expert-demand.png", "layer-similarity.png"}
    assert all(path.stat().st_size < 60_000 for path in tmp_path.glob("*.png"))
    assert all(Trace.open(path).complete for path in (tmp_path / "work").iterdir())


def test_bytes_that_a_prefill_loads_are_printed_as_kibibytes():
    assert expert_demand.number("loaded_bytes", 3 * 2**20) == "3,072" and expert_demand.number("hit_rate", 0.25) == "25.0%"
