"""The table of geometries against what the models' cards say, and its configurations with fewer layers."""

import pytest
import torch

from vismoe.bench.geometry import GEOMETRIES, geometry_config, model_class_of
from vismoe.errors import ConfigError

# Total parameters as published, in billions, rounded as the cards round them; without the layers for multi-token prediction.
PUBLISHED = {
    "qwen3-vl-30b-a3b": 31.1,
    "qwen3-vl-235b-a22b": 235.7,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "qwen3.5-35b-a3b": 35.1,
    "qwen3-next-80b-a3b": 79.7,
    "qwen1.5-moe-a2.7b": 14.3,
    "mixtral-8x7b": 46.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-vl2-tiny": 3.4,
    "deepseek-vl2-small": 16.1,
    "deepseek-vl2": 27.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "glm-4.5-air": 106.9,
    "olmoe-1b-7b": 6.9,
}


def parameters(name: str, layers: int | None = None) -> int:
    with torch.device("meta"):
        model = model_class_of(name)._from_config(geometry_config(name, layers), dtype=torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_geometry_has_as_many_parameters_as_published(name):
    assert round(parameters(name) / 1e9, 1) == PUBLISHED[name]


def test_every_geometry_but_ours_is_checked_against_its_card():
    assert set(GEOMETRIES) - set(PUBLISHED) == {"tiny"}


def test_layers_are_decoder_layers_and_dense_ones_stay_in_front():
    config = geometry_config("deepseek-v2-lite", 4)
    with torch.device("meta"):
        model = model_class_of("deepseek-v2-lite")._from_config(config)
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == [False, True, True, True]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_two_more_layers_of_a_kind_add_the_same_each_time(name):
    step = GEOMETRIES[name].least_layers
    sizes = [parameters(name, layers) for layers in (step, 2 * step, 3 * step)] if 3 * step <= GEOMETRIES[name].layers else []
    if name in ("deepseek-v2-lite", "glm-4.5-air"):
        assert sizes[0] < sizes[1] - sizes[0]  # the first step has a dense layer in it
    elif sizes:
        assert sizes[2] - sizes[1] == sizes[1] - sizes[0]


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("qwen3-vl-30b", None, "Fix: .*qwen3-vl-30b-a3b"),
        ("zzz", None, "one of qwen3-vl-30b-a3b"),
        ("deepseek-v2-lite", 1, "from 2 to 27"),
        ("mixtral-8x7b", 33, "from 1 to 32"),
        ("qwen3.5-35b-a3b", 0, "from 4 to 40"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name, layers, message):
    with pytest.raises(ConfigError, match=message):
        geometry_config(name, layers)
