"""What the gate lookahead makes of the routers' answers, and where it is refused; test_families.py asks the routers."""

import numpy as np
import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import ConfigError
from vismoe.lookahead.gate import GateLookahead
from vismoe.lookahead.lookahead import Seen


def load(family, folder, **settings):
    tiny_models.save(family, folder)
    return tiny_models.model_class(folder).from_pretrained(
        folder, quantization_config=VisMoEConfig(memory="50%", context=512, **settings)
    )


def test_a_family_whose_routers_cannot_be_asked_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match="lookahead='gate' does not fit"):
        load("afmoe", tmp_path, lookahead="gate")


def seen(layer, decoding):
    return Seen(layer, decoding, np.zeros((1, 2), np.int64), torch.zeros(1, 64))


def scores(lookahead, layer, decoding, stream):
    lookahead._residual = (layer, stream)
    snapshot = lookahead.snapshot(seen(layer, decoding))
    return None if snapshot is None else lookahead.evaluate(snapshot)


def test_scores_cover_the_window_and_end_with_the_model(tmp_path):
    model = load("qwen3_moe", tmp_path, window=5)
    runtime = vismoe.runtime_of(model)
    lookahead, layers = runtime.lookahead, len(runtime.pager.inventory.layers)
    experts = runtime.pager.inventory.layers[0].num_experts
    assert isinstance(lookahead, GateLookahead)
    decode = scores(lookahead, 0, decoding=True, stream=torch.randn(1, 1, 64))
    assert decode.shape == (layers - 1, experts)
    assert ((decode > 1).sum(axis=1) == 2).all() and ((decode > 0).sum(axis=1) == 2).all(), "top-2 of each layer, no more"
    prefill = scores(lookahead, 0, decoding=False, stream=torch.randn(1, 1, 64))
    assert prefill.shape == (1, experts) and np.isclose(prefill.sum(), 2)
    assert scores(lookahead, layers - 1, decoding=True, stream=torch.randn(1, 1, 64)) is None
    assert lookahead.snapshot(seen(0, decoding=True)) is None, "a residual of another layer says nothing about this one"
    runtime.pager.close()
