"""The first promise, end to end: with experts paged through a few slabs, every family's logits are those of the full model.

Every family that the installed transformers has, found by inspection: bit for bit, in float32 and bfloat16, over a prefill (with
an image where the family has one) and greedy decode steps; the oracle is transformers' eager experts with every parameter in
fresh memory. What cannot run has a row in `REFUSED` and is refused by name; a family on neither side fails here.
"""

from pathlib import Path

import pytest
import tiny_models
import torch
from family_zoo import families
from models_page import FAILS_IN_OLDEST, PREFILL_ONLY, is_oldest, refusal_of
from transformers import AutoConfig, GenerationMixin

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import UnsupportedModelError
from vismoe.models import families as tables
from vismoe.models.adapters import adapt
from vismoe.models.locate import inventory_of
from vismoe.types import ExpertInventory

STEPS = 4
TO_DO = (
    "Make it pass, with a row in tests/tiny_models.py where only the tiny configuration is wrong, or refuse it in "
    "vismoe/models/families.py with the reason; then run `make models`"
)


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small gain nothing from a second thread and lose much where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inventory(folder: Path, dtype: torch.dtype) -> ExpertInventory:
    with torch.device("meta"):
        described = tiny_models.model_class(folder)._from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    adapt(described)
    return inventory_of(described, dtype)


def load_paged(folder: Path, dtype: torch.dtype, context: int):
    """With two slabs per geometry: fewer than one token's experts in two layers, far fewer than a prefill's in one."""
    experts = inventory(folder, dtype)
    assert len(experts.layers) > 1, "the tiny model has fewer than two MoE layers"
    share = 2 * sum(layout.record_bytes for layout in experts.layouts) / experts.total_bytes
    settings = VisMoEConfig(memory=f"{100 * share + 1e-6}%", pinned_layers=0, context=context)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=settings)
    assert vismoe.runtime_of(model).plan.slabs == (2,) * len(experts.layouts)
    return model


def first(output) -> torch.Tensor:
    """The logits, or the hidden states of a model without a head."""
    return output[0]


def check(family: str, dtype: torch.dtype, folder: Path) -> None:
    tiny_models.save(family, folder, dtype=dtype)
    inputs = tiny_models.prompt(family, dtype=dtype, batch=2)
    inputs["attention_mask"][0, :2] = 0  # the first row is the shorter one
    context = inputs["input_ids"].numel() + 2 * STEPS
    reference, model = tiny_models.reference(folder, dtype), load_paged(folder, dtype, context)
    with torch.inference_mode():
        expected, actual = (first(m(**inputs, return_dict=True)) for m in (reference, model))
    assert torch.equal(expected, actual), f"prefill: off by {(expected - actual).abs().max()}"
    assert expected.isfinite().all() and expected.std() > 0, "the tiny model computes nothing"
    if family not in PREFILL_ONLY:
        logits = (tiny_models.greedy(which, inputs, STEPS).logits for which in (reference, model))
        for step, (expected, actual) in enumerate(zip(*logits, strict=True)):
            assert torch.equal(expected, actual), f"step {step}: off by {(expected - actual).abs().max()}"
    runtime = vismoe.runtime_of(model)
    assert runtime.pager.metrics.snapshot().total("evictions") > 0, "the budget did not bite"
    runtime.pager.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in families() if not refusal_of(family)])
def test_logits_are_bit_identical_to_the_full_model(family, dtype, tmp_path):
    if is_oldest() and str(dtype) == f"torch.{FAILS_IN_OLDEST.get(family)}":
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            tiny_models.reference(tiny_models.save(family, tmp_path), dtype)(**tiny_models.prompt(family, dtype=dtype))
        return
    try:
        check(family, dtype, tmp_path)
    except Exception as error:
        error.add_note(f"{family} is in the installed transformers. {TO_DO}")
        raise


@pytest.mark.parametrize("family", [family for family in families() if refusal_of(family)])
def test_a_refused_family_is_refused_by_name_and_would_not_run(family, tmp_path, monkeypatch):
    folder = tiny_models.save(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"^{family}: .*Instead: "):
        tiny_models.model_class(folder).from_pretrained(folder, quantization_config=VisMoEConfig(memory="50%"))
    monkeypatch.delitem(tables.REFUSED, family, raising=False)
    with pytest.raises(Exception):  # noqa: B017  # however it fails: a row that is not needed is stale
        check(family, torch.float32, tmp_path)


def test_families_that_are_only_prefilled_do_not_generate_token_by_token():
    for family in set(PREFILL_ONLY) & families().keys():
        assert not issubclass(families()[family].model_class, GenerationMixin)
