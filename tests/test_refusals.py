"""Models that cannot run under VisMoE are refused by name, with what to use instead, and never run silently without it."""

import re
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers as T

from vismoe.errors import UnsupportedModelError
from vismoe.models.family.families import (
    SUMS_IN_FLOAT32,
    SUMS_IN_ROUTING_TYPE,
    expert_modules,
    refuse_unsupported,
    top_k_of,
)
from vismoe.models.moe.adapters import adapt

BASE = tiny_models.BASE
TOP_K = {"llama4": 1, "longcat_flash": 3, "zaya": 1}
SEQ2SEQ = dict(vocab_size=64, d_model=32, num_experts=4)
FOREIGN = {
    "jetmoe": lambda: T.JetMoeForCausalLM(
        T.JetMoeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, kv_channels=8, intermediate_size=48)
    ),
    "switch_transformers": lambda: T.SwitchTransformersForConditionalGeneration(
        T.SwitchTransformersConfig(**SEQ2SEQ, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
    ),
    "nllb-moe": lambda: T.NllbMoeForConditionalGeneration(
        T.NllbMoeConfig(
            **SEQ2SEQ, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_sparse_step=1, decoder_sparse_step=1,
        )
    ),
    "doge": lambda: T.DogeForCausalLM(T.DogeConfig(**BASE, is_moe=True, num_experts=16, num_experts_per_tok=2)),
}  # fmt: skip


@pytest.mark.parametrize("family", FOREIGN)
def test_a_mixture_of_experts_that_is_not_on_the_interface_is_refused_by_name(family):
    with torch.device("meta"):
        model = FOREIGN[family]()
    with pytest.raises(UnsupportedModelError, match=rf"^{family}: .*experts.*Instead: "):
        refuse_unsupported(model)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_on_the_interface_passes(family):
    with torch.device("meta"):
        model = tiny_models.BUILDERS[family]()
    adapt(model)
    refuse_unsupported(model)
    assert {top_k_of(model, path) for path, _ in expert_modules(model)} == {TOP_K.get(family, 2)}


def test_aria_passes_exactly_where_transformers_has_put_it_on_the_interface():
    with torch.device("meta"):
        model = T.AriaTextForCausalLM(T.AriaTextConfig(**BASE, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1))
    if list(expert_modules(model)):
        refuse_unsupported(model)
    else:  # transformers 5.17
        with pytest.raises(UnsupportedModelError, match=r"^aria_text: .*newer transformers"):
            refuse_unsupported(model)


class ParallelExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8, 8))


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("local_experts", lambda: torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))),
        ("input_linear", ParallelExperts),
    ],
)
def test_a_model_of_which_only_some_experts_are_on_the_interface_is_refused(name, experts):
    with torch.device("meta"):
        model = tiny_models.BUILDERS["qwen2_moe"]()
        refuse_unsupported(model)
        model.model.layers[1].add_module(name, experts())
    with pytest.raises(UnsupportedModelError, match=rf"^qwen2_moe: the experts at model\.layers\.1\.{name}"):
        refuse_unsupported(model)


def test_a_dense_model_is_refused_as_having_nothing_to_page():
    with torch.device("meta"):
        model = T.Qwen3ForCausalLM(T.Qwen3Config(**BASE, head_dim=16))
    with pytest.raises(UnsupportedModelError, match=r"qwen3 is a dense model.*without VisMoE"):
        refuse_unsupported(model)


def test_families_with_a_row_of_their_own_say_why():
    with torch.device("meta"):
        model = FOREIGN["doge"]()
    with pytest.raises(UnsupportedModelError, match=r"^doge: its experts are rows of an embedding"):
        refuse_unsupported(model)


def test_a_model_of_several_models_names_the_one_to_load():
    model = torch.nn.Module()
    model.config = T.Qwen3OmniMoeConfig()
    with pytest.raises(UnsupportedModelError, match=r"^qwen3_omni_moe: .*Instead: its thinker.*Qwen3OmniMoeThinker"):
        refuse_unsupported(model)


def test_experts_in_the_configuration_but_nowhere_in_the_model_are_refused():
    with torch.device("meta"):
        model = T.Qwen3ForCausalLM(T.Qwen3Config(**BASE, head_dim=16))
    model.config.num_experts = 64
    with pytest.raises(UnsupportedModelError, match="has 64 experts, but none of its modules"):
        refuse_unsupported(model)


def eager_sums() -> dict[str, str]:
    """Class on the experts interface -> what its eager forward adds into, read from the installed sources."""
    found = {}
    for file in Path(T.__file__).parent.glob("models/*/modeling_*.py"):
        source = file.read_text()
        for match in re.finditer(r"@use_experts_implementation.*\nclass (\w+)[\s\S]*?zeros_like\(hidden_states(.*)\)", source):
            found[match[1]] = match[2]
    return found


def test_every_eager_forward_adds_up_in_the_type_that_we_believe():
    sums = eager_sums()
    assert len(sums) > 50
    others = {name: what for name, what in sums.items() if what and "dtype=hidden_states.dtype" not in what}
    in_float32 = {name for name, what in others.items() if "torch.float32" in what}
    in_routing_type = {name for name, what in others.items() if "top_k_weights.dtype" in what}
    assert in_float32 - {"OpenAIPrivacyFilterExperts"} <= SUMS_IN_FLOAT32
    assert in_routing_type <= SUMS_IN_ROUTING_TYPE
    assert others.keys() == in_float32 | in_routing_type


def test_a_model_that_does_not_say_how_many_experts_a_token_uses_is_refused():
    with torch.device("meta"):
        model = tiny_models.BUILDERS["deepseek_v2"]()
    for module in model.modules():
        if hasattr(module, "top_k"):
            del module.top_k
    model.config.num_experts_per_tok = None  # DeepSeek-V2's default
    path, _ = next(expert_modules(model))
    with pytest.raises(UnsupportedModelError, match=r"deepseek_v2: .*num_experts_per_tok"):
        top_k_of(model, path)
