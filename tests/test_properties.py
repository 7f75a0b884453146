"""Properties of a model before pruning and precision: against numbers counted by hand, and the command on the demo model."""

import json

import numpy as np
import pytest

from vismoe.eval.studies.properties import main, of_prompt
from vismoe.eval.studies.routing import LayerLoad, expansions


def layer(experts, visual) -> LayerLoad:
    return LayerLoad(np.array(experts), np.arange(len(experts)), np.array(visual, bool), False)


def test_expansion_is_the_share_of_experts_that_the_core_does_not_use():
    layers = [layer([[0, 1], [1, 2], [3, 4]], [1, 1, 1]), layer([[0, 1], [0, 1], [1, 9]], [1, 1, 1])]
    assert expansions(layers, np.array([True, False, False]), 8).tolist() == [0, 0.25, 0.75]


def test_properties_of_a_prompt_are_what_can_be_counted_by_hand():
    visual = np.array([1] * 40 + [0] * 10)
    rng = np.random.default_rng(3)
    usual = rng.integers(0, 4, (50, 2))
    rare = np.arange(50) % 5 == 0
    usual[rare & (visual == 1)] += 4  # the same tokens have experts of their own in every layer
    usual[visual == 0] = 15
    measured = of_prompt([layer(usual, visual)] * 4, before=2, experts=16, random=rng)
    assert measured["text"] == 1 / 16 and measured["visual"] == len(np.unique(usual[visual == 1])) / 16
    assert measured["prefix"] == pytest.approx(1)
    counts = np.sort(np.bincount(usual.ravel(), minlength=16))
    assert measured["skew"] == pytest.approx(counts[-4:].sum() / 100)
    alone = of_prompt([layer(usual[:10], visual[:10])] * 4, before=2, experts=16, random=rng)
    assert alone["text"] == 0


def test_the_command_says_which_properties_a_model_has(tmp_path, capsys):
    assert main(["--questions", "9", "--work", str(tmp_path), "--seed", "7"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    properties = result["properties"]
    assert (result["world"], result["questions"], list(properties)) == ("demo", 9, ["skew", "text", "prefix", "int2"])
    assert 0.4 < properties["skew"]["value"] < 0.85 and not properties["skew"]["reached"]
    assert properties["text"]["value"] > 0.4 and not properties["text"]["reached"]
    assert any("top quarter" in line and "no" in line.split() for line in shown)
