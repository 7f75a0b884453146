"""Families with a loop of their own: what the run over all families (test_families.py) does not reach."""

import pytest
import tiny_models
import torch
from searching import SEARCHING
from test_families import Specimen

from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.models.moe.adapters import ADAPTERS, adapt

ADAPTED = ("dbrx", "llama4", "longcat_flash", "step3p7")


def test_every_adapter_belongs_to_a_class_of_the_installed_transformers():
    classes = {type(module).__name__ for family in ADAPTED for module in tiny_models.build(family).modules()}
    assert ADAPTERS.keys() <= classes


@pytest.mark.parametrize("family", ADAPTED)
def test_adapting_twice_changes_nothing_and_the_experts_have_a_row_each(family):
    with torch.device("meta"):
        model = tiny_models.BUILDERS[family]()
    assert not list(expert_modules(model))
    adapt(model)
    once = [type(module) for module in model.modules()]
    adapt(model)
    assert [type(module) for module in model.modules()] == once
    for _, module in expert_modules(model):
        assert {p.shape[0] for p in expert_parameters(module).values()} == {6}


@torch.inference_mode()
def test_tokens_that_choose_nothing_but_identities_need_no_expert(tmp_path):
    specimen = Specimen("longcat_flash", tmp_path)
    reference, model = specimen.reference(torch.float32), specimen.paged(torch.float32)
    for router in (*reference.modules(), *model.modules()):
        if type(router).__name__ == "LongcatFlashTopkRouter":
            router.top_k = 2
            router.e_score_correction_bias[:] = -100.0
            router.e_score_correction_bias[-2:] = 100.0
    inputs = tiny_models.prompt("longcat_flash", batch=2)
    assert torch.equal(reference(**inputs).logits, model(**inputs).logits)


MANY = [(20, 3), (20, 20), (70, 9), (12, 3), (33, 5)]


@pytest.mark.parametrize(("experts", "top_k"), MANY if SEARCHING else MANY[:3])
@torch.inference_mode()
def test_many_llama4_experts_of_a_token_are_added_as_eager_adds_them(tmp_path, monkeypatch, experts, top_k):
    """Eager sums over all experts, in blocks of 16 rows: where an addend lies decides about its rounding."""
    overrides = tiny_models.OVERRIDES["llama4"]
    text = overrides["text_config"] | {"num_local_experts": experts, "num_experts_per_tok": top_k}
    monkeypatch.setitem(tiny_models.OVERRIDES, "llama4", overrides | {"text_config": text})
    specimen = Specimen("llama4", tmp_path)
    reference, model = specimen.reference(torch.float32), specimen.paged(torch.float32)
    for batch in (1, 2):
        inputs = tiny_models.prompt("llama4", batch=batch)
        assert torch.equal(reference(**inputs).logits, model(**inputs).logits)
        logits = (tiny_models.greedy(which, inputs, 4).logits for which in (reference, model))
        assert all(torch.equal(*step) for step in zip(*logits, strict=True))
