"""Footprints measured on the meta device, checked against the same model with real tensors and shapes worked out by hand.

test_families.py compares the cache and the towers of every family, which it measures anyway.
"""

from dataclasses import replace

import family_zoo
import pytest
import torch
import transformers as T
from calls import counting_calls
from tiny_models import BUILDERS, FAMILIES, OVERRIDES, WITH_IMAGES, ZOO, build, held_by_cache, save

from vismoe.config import Settings
from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.models.family.components import backbone_bytes, component_of
from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.models.load import footprint as load_footprint
from vismoe.models.load import live_memory
from vismoe.models.load.footprint import footprint
from vismoe.models.load.locate import inventory_of
from vismoe.models.load.preview import describe, preview
from vismoe.models.load.repeated_layers import RepeatedLayers
from vismoe.models.moe.adapters import adapt
from vismoe.planning.needs import mask_bytes
from vismoe.planning.plan import Footprint

CONTEXT = 48


def on_meta(family: str) -> T.PreTrainedModel:
    with torch.device("meta"):
        model = BUILDERS[family]()
    adapt(model)
    return model


def measured(family: str, context: int = CONTEXT) -> Footprint:
    model = on_meta(family)
    return footprint(model, inventory_of(model, model.dtype), Settings(context=context))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("family", ZOO)
def test_every_tensor_of_the_backbone_is_counted_once(family):
    model = build(family)
    adapt(model)
    experts = sum({id(p): nbytes(p) for _, module in expert_modules(model) for p in expert_parameters(module).values()}.values())
    everything = sum(nbytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert sum(size for _, size in backbone_bytes(model)) == everything - experts
    assert dict(backbone_bytes(on_meta(family))) == dict(backbone_bytes(model))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_a_model_of_linear_attention_alone_is_refused_by_name_since_transformers_gives_it_no_cache(family, tmp_path, monkeypatch):
    own, linear = OVERRIDES.get(family, {}), {"layer_types": ["linear_attention"] * 3}
    several = "text_config" in own
    monkeypatch.setitem(OVERRIDES, family, own | ({"text_config": own["text_config"] | linear} if several else linear))
    with pytest.raises(ValueError, match="get_seq_length"):
        held_by_cache(build(family), CONTEXT)
    refused = rf"{family}.*: none of its 3 layers has keys and values.*Instead: .* use_cache=False"
    with pytest.raises(UnsupportedModelError, match=refused):
        measured(family)
    with pytest.raises(UnsupportedModelError, match=refused):
        preview(save(family, tmp_path), Settings(context=CONTEXT), device="cpu")


@pytest.mark.parametrize("family", [*sorted(set(FAMILIES) & set(WITH_IMAGES))[::4], "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_results_of_repeated_operations_are_those_that_torch_makes(family, monkeypatch):
    needs = measured(family)
    monkeypatch.setattr(live_memory, "_makes_new_tensors", lambda func: False)
    assert measured(family) == needs


REPEATING = ["qwen3_moe", "qwen3_vl_moe", "qwen2_moe", "afmoe", "deepseek_v3", "deepseek_vl_v2 + deepseek_v2", "qwen3_next"]


@pytest.mark.parametrize(("family", "context"), [*((family, 600) for family in REPEATING), ("qwen2_moe", 3000), ("afmoe", 3000)])
def test_layers_that_repeat_each_other_need_not_all_be_run(family, context, monkeypatch):
    """Where masks or other layers take most, too: those of afmoe and qwen2_moe do with 3,000 tokens."""
    monkeypatch.setattr(family_zoo, "TEXT", family_zoo.TEXT | {"num_hidden_layers": 9})
    model = on_meta(family)
    layers = RepeatedLayers.of(model).layers
    runs = load_footprint._runs_of(model, context, None)
    assert all(run.repeated.layers is layers and len(run.repeated.kept) < 9 for run in runs)
    assert [run.measured for run in runs] == [run.measured for run in load_footprint._runs(model, context, None, None)]
    assert RepeatedLayers.of(model).layers is layers and not layers[-1]._forward_pre_hooks, "the model is as it was"


def test_layers_that_differ_or_are_measured_otherwise_are_all_run(monkeypatch):
    monkeypatch.setattr(family_zoo, "TEXT", family_zoo.TEXT | {"num_hidden_layers": 9})
    assert RepeatedLayers.of(on_meta("gemma4")) is None and RepeatedLayers.of(on_meta("dbrx")) is None
    monkeypatch.setattr(RepeatedLayers, "like", lambda layers, index: 0)
    runs = load_footprint._runs_of(on_meta("afmoe"), 600, None)  # whose first layer has a window
    assert len(runs) == 2 and all(run.repeated is None for run in runs)


def test_sliding_windows_keep_no_more_than_their_window():
    need = measured("gemma4")
    sliding, full, other = need.cache_layers
    assert sliding.window_tokens == 31 and full.window_tokens is None
    assert need.cache_bytes(1000) == 31 * sliding.token_bytes + 1000 * (full.token_bytes + other.token_bytes)


def test_live_memory_of_a_prefill_counts_what_a_layer_holds_by_hand():
    """Mixtral: the peak lies in one expert that got all tokens, or in the norms; both are a few rows of H per token."""
    need = measured("mixtral", context=400)
    hidden, item = 64, 4
    per_token = need.prefill(400) / 400
    assert 6 * hidden * item < per_token < 20 * hidden * item
    assert need.prefill(200) <= (need.prefill(400) + need.prefill(4)) // 2 + 1000


def test_measuring_leaves_the_model_as_it_was():
    model = on_meta("qwen3_vl_moe")
    footprint(model, inventory_of(model, model.dtype), Settings(context=CONTEXT))
    assert all("forward" not in vars(module) for module in model.modules())


def test_eager_attention_is_counted_with_its_square():
    model = on_meta("qwen3_moe")
    fused = footprint(model, inventory_of(model, model.dtype), Settings(context=2000)).prefill(2000)
    model.set_attn_implementation("eager")
    eager = footprint(model, inventory_of(model, model.dtype), Settings(context=2000)).prefill(2000)
    assert eager - fused > 4 * 2000 * 2000 * 4  # heads x N x N in float32


def test_a_padded_batch_needs_little_beside_its_mask():
    model = on_meta("qwen3_moe")
    needs = footprint(model, inventory_of(model, model.dtype), Settings(context=4000))
    assert needs.padding(4000) < mask_bytes(2, 2000, 2000, "bfloat16") / 10
    assert mask_bytes(2, 2000, 2000, "bfloat16") == 2 * 2000 * 2000 * (1 + 2), "booleans, and in the model's type"


def test_more_layers_take_as_much_more_work_to_measure_whatever_the_experts_take():
    """24 layers of 128 experts are 61 GB of weights in float32, of which none is made."""
    measure_layers(1)  # what is imported and tried once
    (few_calls, few), (many_calls, many) = measure_layers(3), measure_layers(24)
    assert many_calls < 12 * few_calls
    assert many == 8 * few == 24 * 2 * 4 * 128 * 4 * 8192


def measure_layers(layers: int) -> tuple[int, int]:
    """(calls that measuring made, bytes of the cache of 8192 tokens)."""
    text = dict(
        vocab_size=1000, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128
    )
    with torch.device("meta"):
        model = T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**text, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8))
    inventory = inventory_of(model, model.dtype)
    calls, need = counting_calls(lambda: footprint(model.eval(), inventory, Settings(context=8192)))
    return calls, need.cache_bytes(8192)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("model.visual.blocks.3.attn.qkv.weight", "vision tower"),
        ("model.resampler_model.spatial_linear.0.weight", "vision tower"),
        ("model.language_model.embed_tokens.weight", "embeddings"),
        ("model.layers.0.self_attn.q_norm.weight", "attention"),
        ("model.layers.0.linear_attn.conv1d.weight", "attention"),
        ("backbone.layers.1.mixer.shared_experts.up_proj.weight", "dense and shared MLPs"),
        ("model.layers.0.mlp.gate.weight", "norms and routers"),
        ("model.layers.0.mlp.gate_proj.weight", "dense and shared MLPs"),
        ("model.layers.0.post_attention_layernorm.weight", "norms and routers"),
        ("model.norm.weight", "norms and routers"),
        ("lm_head.weight", "lm head"),
        ("model.something_new.weight", "other"),
    ],
)
def test_names_belong_to_components(name, component):
    assert component_of(name) == component


# ---------------------------------------------------------------------- a model without its weights
def test_a_preview_reads_headers_only_and_agrees_with_the_loaded_model(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.models.load.opening.footprint", footprint)  # both are measured
    folder = save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16, transposed=True)
    made = preview(folder, Settings(memory="50%", context=CONTEXT), device="cpu")
    assert made.dtype == "bfloat16" and made.resident_experts == made.total_experts // 2
    from vismoe.models.load.quantizer import VisMoEConfig
    from vismoe.models.load.runtime import runtime_of

    loaded = T.Qwen3VLMoeForConditionalGeneration.from_pretrained(
        folder, dtype="auto", quantization_config=VisMoEConfig(memory="50%", context=CONTEXT)
    )
    loaded_plan = runtime_of(loaded).plan
    assert replace(loaded_plan, reading=()) == replace(made, reading=())  # free RAM changes from one moment to the next


def test_what_cannot_be_described_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        describe(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="neither a folder here nor a model"):
        describe("nobody/nothing-of-this-name")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModelError, match="does not know this model"):
        describe(tmp_path)
    T.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no class of it that generates"):
        describe(tmp_path)
    T.Qwen3Config(hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="dense model"):
        describe(tmp_path)


def test_a_checkpoint_that_lacks_a_file_is_named(tmp_path):
    folder = save("qwen3_moe", tmp_path, max_shard_size="100KB")
    missing = sorted(folder.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(CheckpointError, match=missing.name):
        describe(folder)
