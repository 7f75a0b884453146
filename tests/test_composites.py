"""Composites: classes that take their text model from the configuration, with one that has experts.

What publishers combine is in the zoo and is tested like the families. Of every other class that takes any text model, the plan of
one combination is made here on the meta device, with a tiny text model and the tower as transformers has it by default.
"""

import pytest
import tiny_models
import torch
from family_zoo import COMBINED, composites, families, possible_composites
from models_page import UNTRIED, possible
from searching import is_oldest
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as READS_IMAGES

from vismoe.config import Settings
from vismoe.models.family.families import expert_modules, refuse_unsupported
from vismoe.models.load.footprint import footprint
from vismoe.models.load.locate import inventory_of
from vismoe.models.moe.adapters import adapt

CONTEXT = 48
IMPORTED_WITH_A_TOWER = {"fast_vlm", "perception_lm"}  # timm, which takes seconds


def on_meta(name: str) -> PreTrainedModel:
    found = possible_composites()[name]
    with torch.device("meta"):
        return found.model_class(found.model_class.config_class(text_config=tiny_models.tiny_text(found.text))).eval()


def test_composites_are_found_by_inspection_and_no_row_is_stale():
    takers = {name.split(" + ")[0] for name in (*composites(), *possible_composites())}
    assert COMBINED.keys() <= takers <= READS_IMAGES.keys()
    assert "kimi_k25 + deepseek_v3" in composites(), "a class whose usual text model has experts is in no table"
    assert is_oldest() or UNTRIED.keys() <= {name.split(" + ")[0] for name in possible_composites()}
    assert not takers & families().keys()
    for name, found in composites().items():
        model = tiny_models.build(name)
        (stack,) = {path.rpartition(".layers.")[0] for path, _ in expert_modules(model)}
        assert model.get_submodule(stack).config.model_type == found.text


@pytest.mark.parametrize("name", possible())
def test_experts_of_a_possible_composite_are_found_and_its_plan_is_made(name):
    model = on_meta(name)
    adapt(model)
    refuse_unsupported(model)
    inventory = inventory_of(model, model.dtype)
    assert len(inventory.layers) > 1
    needs = footprint(model, inventory, Settings(context=CONTEXT))
    assert needs.max_image_tokens == CONTEXT or getattr(model.config, "vision_config", None) is None
    assert needs.cache_bytes(CONTEXT) > 0 and needs.prefill(CONTEXT) > 0


@pytest.mark.parametrize("name", sorted(set(possible_composites()) - set(possible())))
def test_what_is_in_no_list_could_not_be_planned(name):
    """Otherwise its row is stale."""
    if name.split(" + ")[0] in IMPORTED_WITH_A_TOWER:
        return
    with pytest.raises(Exception):  # noqa: B017  # of transformers, in whatever way
        model = on_meta(name)
        footprint(model, inventory_of(model, model.dtype), Settings(context=CONTEXT))
