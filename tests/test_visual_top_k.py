"""Fewer experts for visual tokens in prefill: against transformers' eager experts, which are handed other routing weights.

The oracle goes through the tokens one by one: the weights of all but the best experts of a visual token become 0, those that are
left are scaled to the same sum. Families whose weights sum to 1 and such whose weights do not are treated alike.
"""

from collections import Counter

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import UnsupportedModelError
from vismoe.models.family.families import expert_modules
from vismoe.types import Phase

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def paged(folder, top_k, kernels="torch", dtype=torch.float32):
    settings = VisMoEConfig(memory="50%", context=512, kernels=kernels)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=settings)
    vismoe.runtime_of(model).context.visual_top_k = top_k
    return model


def give_fewer(model, inputs, top_k):
    """Hooks that hand the model's experts what visual tokens shall use; -> the demand of each call as sets of ids."""
    visual, demands = (inputs["input_ids"] == tiny_models.IMAGE_TOKEN).flatten().tolist(), []

    def hook(experts, args):
        hidden, index, weights = args
        weights, wanted = weights.clone(), Counter()
        for row in range(len(index)):
            best = sorted(range(index.shape[1]), key=lambda choice: -float(weights[row, choice]))
            if len(index) == len(visual) and visual[row]:
                total = weights[row].sum()
                weights[row, best[top_k:]] = 0.0
                weights[row] *= total / weights[row].sum()
                best = best[:top_k]
            wanted.update(index[row, best].tolist())
        demands.append(wanted)
        return hidden, index, weights

    for _, module in expert_modules(model):
        module.register_forward_pre_hook(hook)
    return demands


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", torch.float32), ("fast", torch.bfloat16)])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "deepseek_ocr2"])
def test_logits_and_demands_are_those_of_the_best_experts(family, kernels, dtype, tmp_path, monkeypatch):
    folder = tiny_models.save(family, tmp_path, dtype=dtype)
    inputs = tiny_models.prompt(family, dtype=dtype, batch=2)
    whole, reference = tiny_models.reference(folder, dtype), tiny_models.reference(folder, dtype)
    model = paged(folder, 1, kernels, dtype)
    demands, demanded, runtime = give_fewer(reference, inputs, 1), [], vismoe.runtime_of(model)
    demand = runtime.pager.demand
    monkeypatch.setattr(runtime.pager, "demand", lambda layer, *args: demanded.append(args[0]) or demand(layer, *args))
    expected, actual, other = (which(**inputs).logits.float() for which in (reference, model, whole))
    error, effect = (expected - actual).square().mean().sqrt(), (expected - other).square().mean().sqrt()
    assert error < effect * (1e-5 if kernels == "torch" else 0.2) and effect > 1e-2
    if kernels == "torch":  # bfloat16 may round two routers' scores apart
        assert demanded == [sorted(wanted) for wanted in demands]
        expected, actual = (tiny_models.greedy(which, inputs, STEPS) for which in (reference, model))
        assert torch.equal(expected.sequences, actual.sequences), "a step of decode uses all experts"
        torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)


def test_it_cuts_what_prefill_asks_for(tmp_path):
    folder, asked = tiny_models.save("qwen3_vl_moe", tmp_path), {}
    for top_k in (1, 2, None):
        model = paged(folder, top_k)
        model(**tiny_models.prompt("qwen3_vl_moe", 2))
        counts = vismoe.runtime_of(model).pager.metrics.snapshot()
        asked[top_k] = counts.total("hits", Phase.PREFILL) + counts.total("misses", Phase.PREFILL)
    assert asked[1] < asked[2] == asked[None], "a token uses two experts"


def test_a_family_that_hides_which_rows_are_visual_is_refused(tmp_path):
    model = paged(tiny_models.save("ernie4_5_vl_moe", tmp_path), 1)
    with pytest.raises(UnsupportedModelError, match=r"visual_top_k does not fit this family.*Fix: leave visual_top_k out"):
        model(**tiny_models.prompt("ernie4_5_vl_moe"))
