"""Forms say how an expert is computed. Checked against the module's own arithmetic, for every family that has experts."""

import pytest
import reference
import tiny_models
import torch
from family_zoo import families
from models_page import refusal_of

from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.models.family.forms import form_of, forms_of, transposed_sections
from vismoe.models.load.locate import inventory_of
from vismoe.models.moe.adapters import adapt
from vismoe.models.moe.eager import expert_output
from vismoe.types import Activation, ExpertForm, Gate

# Families whose experts the kernels do not compute, and a word of the reason.
FORMLESS = {
    "dbrx": "arithmetic of its own",
    **dict.fromkeys(("inkling2", "inkling2_loop"), "activation other than"),
    "muse_spark": "normalises each expert",
}
RUNNING = [family for family in families() if refusal_of(family) is None]


@pytest.fixture(scope="module", params=RUNNING)
def model(request):
    built = tiny_models.build(request.param)
    adapt(built)
    return request.param, built


def width(up: torch.Tensor, form: ExpertForm) -> int:
    """Of the rows that an expert takes: the hidden size, or a narrower one."""
    return up.shape[0 if form.transposed else 1]


def test_a_form_computes_what_the_module_computes(model):
    family, built = model
    inventory = inventory_of(built, torch.float32)
    forms = forms_of(built, inventory)
    for layer, (_, module) in zip(inventory.layers, expert_modules(built), strict=True):
        form = forms[layer.geometry]
        if isinstance(form, str):
            assert FORMLESS[family] in form
            continue
        weights = {name: p[1].detach() for name, p in expert_parameters(module).items()}
        rows = 4 * torch.randn(5, width(weights[form.up], form), generator=torch.Generator().manual_seed(1))
        expected = expert_output(module, weights, rows)
        torch.testing.assert_close(reference.expert(form, weights, rows, torch.float32), expected, rtol=1e-4, atol=1e-5)


def test_an_experts_rows_in_blocks_give_the_same_numbers_in_their_place(model):
    _, built = model
    inventory = inventory_of(built, torch.float32)
    forms = forms_of(built, inventory)
    for layer, (_, module) in zip(inventory.layers, expert_modules(built), strict=True):
        weights = {name: p[1].detach() for name, p in expert_parameters(module).items()}
        form = forms[layer.geometry]
        first = next(iter(weights.values()))
        wide = first.shape[1] if isinstance(form, str) else width(weights[form.up], form)
        rows = 4 * torch.randn(21, wide, generator=torch.Generator().manual_seed(1))
        expected = expert_output(module, weights, rows)
        assert expected.shape == rows.shape and expected.dtype == rows.dtype
        blocks = expert_output(module, weights, rows, 8)
        assert blocks.data_ptr() == rows.data_ptr()
        torch.testing.assert_close(blocks, expected, rtol=1e-4, atol=1e-5)


def test_transposed_matrices_are_named(model):
    _, built = model
    inventory = inventory_of(built, torch.float32)
    for names, layout in zip(transposed_sections(built, inventory), inventory.layouts, strict=True):
        shapes = {section.name: section.shape for section in layout.sections}
        inputs = {name: shape[0 if name in names else 1] for name, shape in shapes.items() if len(shape) == 2}
        outputs = {name: shape[1 if name in names else 0] for name, shape in shapes.items() if len(shape) == 2}
        last = "w2" if "w2" in inputs else "down_proj"
        first = next(name for name in inputs if name != last)
        assert inputs[first] == outputs[last], "the hidden size goes in and comes out"


def test_gpt_oss_has_interleaved_gates_and_a_clamp():
    built = tiny_models.build("gpt_oss")
    form = forms_of(built, inventory_of(built, torch.float32))[0]
    assert isinstance(form, ExpertForm)
    assert (form.gate, form.activation, form.transposed) == (Gate.INTERLEAVED, Activation.CLAMPED_SWIGLU, True)
    assert (form.alpha, form.limit) == (1.702, 7.0)


def test_an_unknown_activation_has_no_form():
    built = tiny_models.build("qwen3_moe")
    _, module = next(iter(expert_modules(built)))
    module.act_fn = torch.nn.Tanh()
    assert "activation" in str(form_of(module, inventory_of(built, torch.float32).layouts[0]))


def test_layers_that_differ_have_no_common_form():
    built = tiny_models.build("qwen3_moe")
    *_, (_, last) = expert_modules(built)
    last.act_fn = torch.nn.GELU()
    assert "differs" in str(forms_of(built, inventory_of(built, torch.float32))[0])
