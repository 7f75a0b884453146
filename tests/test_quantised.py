"""Quantised checkpoints: their experts, paged as they lie, compute what transformers computes with restored ones."""

import json
import re

import pytest
import quantised_checkpoints as quantised
import tiny_models
import torch
from transformers import AutoConfig

import vismoe
from vismoe.cli.main import main as run
from vismoe.models.load.preview import model_class, preview
from vismoe.models.load.quantizer import VisMoEConfig


def logits(model, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids).logits


def opened(folder, memory: str = "40%"):
    cls = model_class(AutoConfig.from_pretrained(folder))
    return cls.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=VisMoEConfig(memory=memory, kernels="torch", context=256),
        attn_implementation="eager",
    )


def expects(model, expected) -> None:
    expected.set_experts_implementation("eager")
    expected.set_attn_implementation("eager")
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("memory", ["100%", "40%"])
@pytest.mark.parametrize("kind", quantised.PER_EXPERT)
def test_logits_with_torch_are_those_of_restored_weights(kind, memory, tmp_path):
    expected = quantised.write(tmp_path, kind)
    expects(opened(tmp_path, memory), expected)


@pytest.mark.parametrize(
    "family,kind,names",
    [
        ("gpt_oss", "mxfp4", "stacked"),
        ("qwen3_vl_moe", "fp8", "expert first"),
        ("qwen3_vl_moe", "nvfp4 of modelopt", "matrix first"),
        ("qwen3_vl_moe", "nvfp4 of modelopt", "stacked"),
        ("qwen3_vl_moe", "fp8 per tensor", "stacked"),
        ("qwen3_moe", "fp8", "stacked"),  # as transformers saves it
        ("qwen3_moe", "fp8 per half", "stacked"),
    ],
)
def test_experts_are_found_under_the_names_of_their_writers(family, kind, names, tmp_path):
    expected = quantised.write(tmp_path, kind, family, names=names)
    for memory in ("100%", "30%"):
        expects(opened(tmp_path, memory), expected)


FAMILIES = "deepseek_v3 glm4_moe glm4v_moe minimax_m2 mixtral qwen3_5_moe ernie4_5_moe".split()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_experts_of_any_family_are_paged(family, tmp_path):
    tiny_models.save(family, tmp_path / "restored", dtype=torch.bfloat16)
    quantised.requantise(tmp_path / "restored", quantised.fp8, tmp_path / "fp8")
    expected = model_class(AutoConfig.from_pretrained(tmp_path / "restored")).from_pretrained(
        tmp_path / "restored", dtype=torch.bfloat16
    )
    expects(opened(tmp_path / "fp8"), expected)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """(folder with int2 and int4 packed beside it, the model with restored weights)."""
    folder = tmp_path_factory.mktemp("fp8")
    model = quantised.write(folder, "fp8")
    assert run(["pack", str(folder), "--formats", "int4,int2"]) == 0
    return folder, model


def test_a_policy_takes_the_checkpoints_own_format_for_the_better_one(fp8):
    folder, model = fp8
    config = VisMoEConfig(memory="70%", policy="importance", formats="own/4", kernels="torch")
    paged = type(model).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    runtime = vismoe.runtime_of(paged)
    assert runtime.format_names == ("fp8", "int4")
    assert "fp8, in place" in runtime.plan.experts and "int4, packed" in runtime.plan.experts
    found, expected = logits(paged), logits(model)
    assert not torch.equal(found, expected) and torch.cosine_similarity(found, expected, dim=-1).min() > 0.9


def test_packed_formats_hold_the_restored_weights(fp8):
    """The same integers as those packed from a 16-bit checkpoint with the restored weights."""
    folder, model = fp8
    from_16_bits = folder.parent / f"{folder.name}-16"
    model.save_pretrained(from_16_bits)
    assert run(["pack", str(from_16_bits), "--formats", "int4"]) == 0
    found, expected = (
        [path.read_bytes() for path in sorted(there.glob("vismoe-store/experts.int4.*.bin"))] for there in (folder, from_16_bits)
    )
    assert found and found == expected


def test_a_percentage_is_of_the_bytes_that_the_checkpoint_has(fp8):
    folder, _ = fp8
    plan = preview(folder, vismoe.Settings(memory="50%", context=256, store="none"))
    assert plan.resident_experts == plan.total_experts // 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["pack", "{}"], "in fp8 already"),
        (["pack", "{}", "--formats", "lossless"], "in fp8 already"),
        (["plan", "{}", "--policy", "importance", "--formats", "own/8"], "formats='raw/int8'.*own/2"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(fp8, arguments, says, capsys):
    assert run([argument.format(fp8[0]) for argument in arguments]) != 0
    assert re.search(says, capsys.readouterr().err)


def test_gptq_that_was_made_by_activations_and_has_its_inputs_in_order_is_served(tmp_path):
    expected = quantised.write(tmp_path, "gptq", backbone=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    expects(opened(tmp_path), expected)


@pytest.mark.parametrize(("kind", "other"), [("fp8", None), ("w4", "fp8 per channel"), ("nvfp4", "awq")])
def test_layers_may_be_encoded_differently(kind, other, tmp_path):
    """modules_to_not_convert, config_groups: a geometry for each."""
    expected = quantised.write(tmp_path, kind, layers={1: other})
    expects(opened(tmp_path), expected)
