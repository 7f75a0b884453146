"""The gate lookahead asks the right routers about the right vector.

Oracle: the model's own routing. Asked about the residual stream of its own layer, a router must choose what the layer then uses.
"""

import numpy as np
import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import ConfigError
from vismoe.lookahead.gate import GateLookahead, _predict
from vismoe.lookahead.lookahead import Seen
from vismoe.models.experts import ExpertRuntime

WITHOUT = set(
    "afmoe beam cohere2_moe dbrx deepseek_v4 diffusion_gemma dots3_note ernie4_5_vl_moe flex_olmo gemma4 longcat_flash "
    "muse_spark nemotron_h qwen4_exp zaya".split()
)


def load(family, folder, **settings):
    tiny_models.save(family, folder)
    return tiny_models.model_class(folder).from_pretrained(
        folder, quantization_config=VisMoEConfig(memory="50%", context=512, **settings)
    )


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_each_router_asked_about_its_own_layer_chooses_what_the_layer_uses(family, tmp_path, monkeypatch):
    model = load(family, tmp_path)
    runtime = vismoe.runtime_of(model)
    if runtime.lookahead is None:
        assert runtime.backends["lookahead"].startswith("none ("), "a family without a lookahead says why"
        assert family in WITHOUT, runtime.backends["lookahead"]
        if family == min(WITHOUT):
            with pytest.raises(ConfigError, match="lookahead='gate' does not fit"):
                load(family, tmp_path / "again", lookahead="gate")
        return
    assert family not in WITHOUT
    compared = 0
    run = ExpertRuntime.run

    def checked(self, layer, module, hidden, index, factors):
        nonlocal compared
        owner, residual = self.lookahead._residual
        assert owner == layer
        chosen, _ = _predict(self.lookahead._layers[layer], residual.reshape(-1, residual.shape[-1]))
        if family == "llama4":  # its adapter asks for the union of the experts
            assert torch.equal(chosen.unique(), index.unique())
        else:
            assert torch.equal(chosen.sort(-1).values, index.sort(-1).values)
        compared += 1
        return run(self, layer, module, hidden, index, factors)

    monkeypatch.setattr(ExpertRuntime, "run", checked)
    with torch.inference_mode():
        model(**tiny_models.prompt(family, batch=2))
    assert compared == len(runtime.pager.inventory.layers)
    runtime.pager.close()


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
