"""The first promise, end to end: with experts paged through a few slabs, every family's logits are those of the full model.

Every family that the installed transformers has, found by inspection: bit for bit, in float32 and bfloat16, over a prefill (with
an image where the family has one) and greedy decode steps; the oracle is transformers' eager experts with every parameter in
fresh memory. What cannot run has a row in `REFUSED` and is refused by name; a family on neither side fails here.

Two more things are seen on the same checkpoints. The gate lookahead asks the right routers about the right vector: about the
residual stream of its own layer, a router must choose what the layer then uses. And with kernels="auto", ours where they fit and
torch's elsewhere, logits are as near to float32 as eager's: oracle is eager in float32 on the same bfloat16 weights, eager in
bfloat16 says what rounding costs, and medians are compared, because a router's near tie may fall the other way.
"""

import dataclasses
import re
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from family_zoo import families, zoo
from models_page import ALONE, BY_MIXER, FAILS_IN_OLDEST, PREFILL_ONLY, ROUNDED, refusal_of
from searching import SEARCHING, is_oldest
from shared_rows import Sequences
from transformers import AutoConfig, GenerationMixin

import vismoe
from vismoe import VisMoEConfig
from vismoe.config import Settings
from vismoe.errors import UnsupportedModelError
from vismoe.lookahead.gate import _predict
from vismoe.models.family import families as tables
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.load import opening
from vismoe.models.load.locate import inventory_of
from vismoe.models.moe.adapters import adapt
from vismoe.models.moe.experts import PagedLayer
from vismoe.models.moe.rows import why_not_given_up
from vismoe.planning.plan import Footprint
from vismoe.types import ExpertInventory

STEPS = 4
MANY = 48  # tokens of text: with an image more than what sparse attention keeps
RUNNING = tiny_models.ZOO
TO_DO = (
    "Make it pass, with a row in tests/tiny_models.py where only the tiny configuration is wrong, or refuse it in "
    "vismoe/models/family/families.py with the reason; then run `make models`"
)
WITHOUT_LOOKAHEAD = set(
    "afmoe beam cohere2_moe dbrx deepseek_v4 diffusion_gemma dots3_note ernie4_5_vl_moe flex_olmo gemma4 longcat_flash "
    "muse_spark nemotron_h qwen4_exp zaya".split()
)
FAST = {"qwen3_vl_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gemma4", "nemotron_h"}  # some that must not fall back
GROUPED = {"qwen3_vl_moe", "qwen3_moe", "mixtral"}  # some whose attention of one token is ours
SPARSE = {"deepseek_v32", "glm_moe_dsa"}  # some that ask for the name of their attention, to mask it
WITH_OUR_KERNELS = tiny_models.FAMILIES  # of all with the newest transformers; with the oldest the ways that differ
if is_oldest():
    WITH_OUR_KERNELS = sorted((FAST | GROUPED | SPARSE) & set(RUNNING))


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small gain nothing from a second thread and lose much where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Specimen:
    """The tiny checkpoints of a family, and what is loaded from them, each made once and when it is asked for."""

    def __init__(self, family: str, folder: Path):
        self.family, self.folder = family, folder
        self.checkpoint, self.reference, self.paged = cache(self._checkpoint), cache(self._reference), cache(self._paged)
        self.two_slabs = cache(self._two_slabs)
        self._prompt = cache(partial(tiny_models.prompt, family))
        self.opened: list[Any] = []
        self.needs: Footprint | None = None
        self._measure = opening.footprint
        longest = self._prompt(tokens=MANY), self._prompt(batch=2)
        self.context = 3 * max(inputs["input_ids"].numel() for inputs in longest)  # for three prompts that decode together

    def prompt(self, dtype: torch.dtype, **how: int) -> dict[str, Any]:
        return {name: as_type(value, dtype) for name, value in deepcopy(self._prompt(**how)).items()}

    def measured(self, model: Any, inventory: ExpertInventory, settings: Settings, **options: Any) -> Footprint:
        """What the family needs beside its experts, measured in the type that is loaded first: slabs decide what is seen here."""
        self.needs = self.needs or self._measure(model, inventory, settings, **options)
        return dataclasses.replace(self.needs, inventory=inventory, dtype=str(model.dtype).removeprefix("torch."))

    def _checkpoint(self, dtype: torch.dtype) -> Path:
        return tiny_models.save(self.family, self.folder / str(dtype), dtype=dtype)

    def _reference(self, dtype: torch.dtype) -> Any:
        return tiny_models.reference(self.checkpoint(dtype), dtype)

    def _two_slabs(self) -> float:
        """The share of the experts that two of each geometry are, which is the same in every type."""
        experts = inventory(self.checkpoint(torch.float32), torch.float32)
        assert len(experts.layers) > 1, "the tiny model has fewer than two MoE layers"
        return 2 * sum(layout.record_bytes for layout in experts.layouts) / experts.total_bytes

    def load(self, dtype: torch.dtype, **settings: Any) -> Any:
        folder, config = self.checkpoint(dtype), VisMoEConfig(context=self.context, **settings)
        model = tiny_models.model_class(folder).from_pretrained(folder, dtype=dtype, quantization_config=config)
        self.opened.append(vismoe.runtime_of(model).pager)
        return model

    def _paged(self, dtype: torch.dtype) -> Any:
        """With two slabs per geometry: fewer than one token's experts in two layers, far fewer than a prefill's in one."""
        model = self.load(dtype, memory=f"{100 * self.two_slabs() + 1e-6}%", pinned_layers=0)
        runtime = vismoe.runtime_of(model)
        assert runtime.plan.slabs == (2,) * len(runtime.pager.inventory.layouts)
        return model


@pytest.fixture(scope="module", params=RUNNING)
def specimen(request, tmp_path_factory, measured_once):
    made = Specimen(request.param, tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "footprint", made.measured)
        yield made
    for pager in made.opened:
        pager.close()


def inventory(folder: Path, dtype: torch.dtype) -> ExpertInventory:
    with torch.device("meta"):
        described = tiny_models.model_class(folder)._from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    adapt(described)
    return inventory_of(described, dtype)


def as_type(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value


def first(output) -> torch.Tensor:
    """The logits, or the hidden states of a model without a head."""
    return output[0]


def check(specimen: Specimen, dtype: torch.dtype) -> None:
    inputs = specimen.prompt(dtype, batch=2)
    inputs["attention_mask"][0, :2] = 0  # the first row is the shorter one
    reference, model = specimen.reference(dtype), specimen.paged(dtype)
    with torch.inference_mode():
        expected, actual = (first(m(**inputs, return_dict=True)) for m in (reference, model))
    assert torch.equal(expected, actual), f"prefill: off by {(expected - actual).abs().max()}"
    assert expected.isfinite().all() and expected.std() > 0, "the tiny model computes nothing"
    if specimen.family not in PREFILL_ONLY:
        logits = (tiny_models.greedy(which, inputs, STEPS).logits for which in (reference, model))
        for step, (expected, actual) in enumerate(zip(*logits, strict=True)):
            assert torch.equal(expected, actual), f"step {step}: off by {(expected - actual).abs().max()}"
    runtime = vismoe.runtime_of(model)
    assert runtime.pager.metrics.snapshot().total("evictions") > 0, "the budget did not bite"
    runtime.pager.check_integrity()


def of_the_newest(family: str, dtype: torch.dtype) -> bool:
    """Whether only the newest transformers runs this family in this type: the oldest is another one in any of them."""
    return is_oldest() and dtype is not torch.float32 and family not in {*WITH_OUR_KERNELS, *FAILS_IN_OLDEST}


@pytest.mark.budget(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_bit_identical_to_the_full_model(specimen, dtype):
    family = specimen.family
    if of_the_newest(family, dtype):
        return
    if is_oldest() and str(dtype) == f"torch.{FAILS_IN_OLDEST.get(family)}":
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            specimen.reference(dtype)(**tiny_models.prompt(family, dtype=dtype))
        return
    try:
        check(specimen, dtype)
    except Exception as error:
        error.add_note(f"{family} is in the installed transformers. {TO_DO}")
        raise


def needs_of(specimen: Specimen) -> Footprint:
    """As measured in float32, whatever the family was loaded in first."""
    specimen.paged(torch.float32)
    if specimen.needs is None or specimen.needs.dtype != "float32":
        specimen.needs = None
        specimen.load(torch.float32, memory="50%")
    assert specimen.needs is not None
    return specimen.needs


@pytest.mark.joins("specimen")
def test_the_kv_cache_is_what_generation_really_holds(specimen):
    needs, context = needs_of(specimen), specimen.context
    assert needs.cache_bytes(context) == tiny_models.held_by_cache(tiny_models.build(specimen.family), context)


@pytest.mark.joins("specimen")
@pytest.mark.parametrize("specimen", [name for name in RUNNING if zoo()[name].with_images], indirect=True)
def test_vision_towers_are_run_and_their_features_are_held(specimen):
    need = needs_of(specimen)
    assert need.max_image_tokens == specimen.context
    row_bytes = specimen.prompt(torch.float32)["pixel_values"].nbytes // tiny_models.image_tokens(specimen.family)
    assert need.image_token_bytes >= row_bytes + 64 * 4  # its pixels, and a row of features
    assert need.encode(specimen.context) >= need.encode(8) > 8 * need.image_token_bytes // 2


@pytest.mark.joins("specimen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_each_router_asked_about_its_own_layer_chooses_what_the_layer_uses(specimen, dtype, monkeypatch):
    family = zoo()[specimen.family].text or specimen.family
    seen = family != specimen.family or not (SEARCHING or family in FAST | SPARSE)
    if of_the_newest(specimen.family, dtype) or (dtype is torch.float16 and (family in WITHOUT_LOOKAHEAD or seen)):
        return  # a third checkpoint would only be made to hear the same reason again, or to see one kind of router more often
    model = specimen.paged(dtype)
    runtime = vismoe.runtime_of(model)
    if runtime.lookahead is None:
        assert runtime.backends["lookahead"].startswith("none ("), "a family without a lookahead says why"
        assert family in WITHOUT_LOOKAHEAD, runtime.backends["lookahead"]
        return
    assert family not in WITHOUT_LOOKAHEAD
    compared = 0
    run, lookahead = PagedLayer.run, runtime.lookahead

    def checked(self, module, hidden, index, factors):
        nonlocal compared
        layer = self.layer
        owner, residual = lookahead._residual
        assert owner == layer
        chosen, _ = _predict(lookahead._layers[layer], residual.reshape(-1, residual.shape[-1]))
        if family == "llama4":  # its adapter asks for the union of the experts
            assert torch.equal(chosen.unique(), index.unique())
        else:
            assert torch.equal(chosen.sort(-1).values, index.sort(-1).values)
        ahead = lookahead._layers[layer + 1 : layer + 1 + lookahead.window]
        share, likely = lookahead.expected(layer, residual.reshape(-1, residual.shape[-1]), module.num_experts)
        assert share.sum(1)[: len(ahead)] == pytest.approx([routed.top_k for routed in ahead], rel=1e-3)
        assert (likely >= 0).all()
        compared += 1
        return run(self, module, hidden, index, factors)

    monkeypatch.setattr(PagedLayer, "run", checked)
    with torch.inference_mode():
        model(**specimen.prompt(dtype, batch=2))
    assert compared == len(runtime.pager.inventory.layers)


@pytest.mark.budget(8)
@pytest.mark.parametrize("specimen", WITH_OUR_KERNELS, indirect=True)
@torch.inference_mode()
def test_with_kernels_of_ours_logits_are_as_near_to_float32_as_eagers(specimen):
    family = specimen.family
    model = specimen.load(torch.bfloat16, memory="50%", kernels="auto")
    runtime = vismoe.runtime_of(model)
    assert family not in FAST or runtime.plan.kernels.startswith("fast ("), runtime.plan.kernels
    assert family not in GROUPED or model.config.get_text_config()._attn_implementation == OUR_ATTENTION
    assert family not in SPARSE or model.config.get_text_config()._attn_implementation == "sdpa"
    inputs = specimen.prompt(torch.bfloat16, tokens=MANY, batch=2)  # in one, a few tokens near a tie of two experts decide
    eager = specimen.reference(torch.bfloat16)(**inputs).logits.float()
    exact_inputs = {name: as_type(value, torch.float32) for name, value in inputs.items()}
    exact = deepcopy(specimen.reference(torch.bfloat16)).float()(**exact_inputs).logits
    ours = model(**inputs).logits.float()
    assert ours.isfinite().all()
    assert (ours - exact).abs().median() <= 2 * (eager - exact).abs().median() + 1e-6
    if family not in PREFILL_ONLY:
        check_shared_passes(specimen, model)
        check_verification(specimen, model)
    runtime.pager.check_integrity()


def check_shared_passes(specimen: Specimen, model: Any) -> None:
    """Sequences of different lengths that decode in one pass have the bits of being alone; those that cannot say why."""
    prompts = [specimen.prompt(torch.bfloat16, tokens=tokens) for tokens in (5, 34, 11)]  # one beyond a window
    sequences = Sequences(model, prompts)
    if why := ALONE.get(specimen.family):
        assert not all(map(sequences.passes.takes, sequences.loops)) or sequences.tried() is None
        assert why[0] in sequences.passes.refused, sequences.passes.refused
        return
    assert all(map(sequences.passes.takes, sequences.loops)), sequences.passes.refused
    expected, before = sequences.alone(), [loop.cache.get_seq_length() for loop in sequences.loops]

    def same(logits: torch.Tensor | None) -> bool:
        assert logits is not None, sequences.passes.refused
        return torch.allclose(logits, expected, atol=1e-5) if specimen.family in ROUNDED else torch.equal(logits, expected)

    assert same(sequences.tried()) and [loop.cache.get_seq_length() for loop in sequences.loops] == before
    for _ in range(2):
        assert same(together := sequences.together()), (together - expected).abs().max()
        expected = sequences.alone()
    assert is_oldest() or (specimen.family in BY_MIXER) == sequences.passes.by_mixer


def check_verification(specimen: Specimen, model: Any) -> None:
    """Tokens that follow one another are rows of one pass with the bits of single passes, also after some were given up again;
    where a cache cannot give them up, its layer is named."""
    for tokens in (5, 34):  # within a window, and beyond one
        sequences = Sequences(model, [specimen.prompt(torch.bfloat16, tokens=tokens)])
        if specimen.family in ALONE:
            continue
        if why := why_not_given_up(sequences.loops[0].cache):
            assert re.fullmatch(r"layer \d+ keeps a \w+, which cannot give up tokens", why)
            continue
        drafted = [7, 3, 11]
        alone = sequences.one_by_one(drafted)
        assert torch.equal(sequences.verified(drafted, keep=2), alone)
        assert torch.equal(sequences.alone(), alone[2:3])


@pytest.mark.parametrize("family", [family for family in families() if refusal_of(family)])
def test_a_refused_family_is_refused_by_name_and_would_not_run(family, tmp_path, monkeypatch):
    specimen = Specimen(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"^{family}: .*Instead: "):
        specimen.load(torch.float32, memory="50%")
    monkeypatch.delitem(tables.REFUSED, family, raising=False)
    with pytest.raises(Exception):  # noqa: B017  # however it fails: a row that is not needed is stale
        check(specimen, torch.float32)


def test_families_that_are_only_prefilled_do_not_generate_token_by_token():
    for family in set(PREFILL_ONLY) & families().keys():
        assert not issubclass(families()[family].model_class, GenerationMixin)
