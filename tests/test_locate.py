"""Finding experts through transformers' conversion table: against its own operations, and in checkpoints that do not fit."""

import json

import pytest
import torch
import transformers as T
from calls import counting_calls
from safetensors.torch import load_file, save_file
from test_store import on_meta, store_of
from tiny_models import save
from transformers import conversion_mapping
from transformers import core_model_loading as loading

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.models.load.conversion import DECODING, MERGING, OPERATIONS, ExpertParameter, rows_of
from vismoe.models.load.locate import locate_experts
from vismoe.store.checkpoint import CheckpointStore, TensorPart
from vismoe.store.safetensors_header import read_header
from vismoe.types import ExpertId, ExpertInventory, MoELayer, RecordLayout

EXPERTS, ROW = 4, (6, 10)


def table() -> dict[str, loading.WeightConverter]:
    """Every distinct conversion of expert weights in the installed transformers, by its sources and operations."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    return {
        f"{'+'.join(c.source_patterns)} {c.operations}": c
        for transforms in mapping.values()
        for c in transforms
        if isinstance(c, loading.WeightConverter)
        and any(target.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")) for target in c.target_patterns)
    }


class Skeleton(torch.nn.Module):
    """What the operations ask a model for: the shape of the target."""

    config = None

    def get_parameter(self, name):
        return torch.empty(EXPERTS, *ROW, device="meta")


@pytest.mark.parametrize("name", [name for name, c in table().items() if not isinstance(c.operations[0], DECODING)])
def test_rows_equal_what_the_operations_of_transformers_make(name, tmp_path):
    converter = table()[name]
    targets = len(converter.target_patterns)
    merging = any(isinstance(operation, MERGING) for operation in converter.operations)
    shape = (ROW[0] // len(converter.source_patterns), ROW[1])
    if any(isinstance(o, loading.Transpose) for o in converter.operations):
        shape = shape[::-1]
    torch.manual_seed(0)
    tensors, collected, keys = {}, {}, {}
    for pattern in converter.source_patterns:
        count = EXPERTS * targets if merging else 1
        keys[pattern] = [f"{pattern}.{i}" for i in range(count)]
        collected[pattern] = [torch.randn(shape if merging else (EXPERTS, *shape)) for _ in range(count)]
        tensors |= dict(zip(keys[pattern], collected[pattern]))
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    parts = {key: TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype) for key, entry in header.tensors.items()}

    for operation in converter.operations:  # the oracle
        collected = operation.convert(
            collected,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name="x",
            model=Skeleton(),
            config=None,
        )
    for index, target in enumerate(converter.target_patterns):
        parameter = ExpertParameter(
            "x", (EXPERTS, *ROW), keys, converter.source_patterns, converter.operations, share=(index, targets)
        )
        layout = RecordLayout.of({"w": ROW}, {"w": torch.float32})
        inventory = ExpertInventory((MoELayer(0, "x", EXPERTS, 1, 0),), (layout,))
        store = CheckpointStore([header], inventory, [[(row,) for row in rows_of(parameter, parts)]])
        expected = collected[target]
        for e in range(EXPERTS):
            record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
            store.read(ExpertId(0, e), record)
            assert torch.equal(layout.views(record)["w"], (expected[0] if isinstance(expected, list) else expected)[e])


def test_the_table_has_every_operation_that_we_implement():
    used = {type(operation) for converter in table().values() for operation in converter.operations}
    assert used == set(OPERATIONS)


@pytest.mark.skipif(not DECODING, reason="no operation decodes experts in this transformers")
def test_experts_that_an_operation_would_decode_are_read_where_they_are_plain_and_refused_by_name_where_not():
    row = TensorPart(0, 0, (EXPERTS, *ROW), torch.float32)
    for operation in (kind() for kind in DECODING):
        plain = ExpertParameter("x", (EXPERTS, *ROW), {"w": ["w"]}, ["w", "scale", "amax"], [operation])
        assert rows_of(plain, {"w": row}) == [(row.row(e),) for e in range(EXPERTS)]
        codes = ExpertParameter("x", (EXPERTS, *ROW), {"w": ["w"], "scale": ["scale"]}, ["w", "scale", "amax"], [operation])
        with pytest.raises(UnsupportedModelError, match=type(operation).__name__):
            rows_of(codes, {"w": row, "scale": row})


def test_an_operation_that_we_do_not_know_is_refused_by_name(tmp_path, monkeypatch):
    save("qwen3_moe", tmp_path)
    monkeypatch.delitem(OPERATIONS, loading.Concatenate)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj: .*Concatenate.*Instead:"):
        store_of(tmp_path)


@pytest.mark.parametrize(
    "operations",
    [
        [loading.Interleave(dim=1, inverse=True)],
        [loading.Interleave(dim=2)],
        [loading.Transpose(0, 1)],
        [loading.Concatenate(dim=2)],
        [loading.Concatenate(dim=1), loading.Transpose(1, 2)],
    ],
    ids=repr,
)
def test_a_known_operation_used_in_another_way_is_refused_and_not_guessed(operations):
    parts = {name: TensorPart(0, 0, (EXPERTS, *ROW), torch.float32) for name in ("gate", "up")}
    sources = list(parts) if isinstance(operations[0], loading.Concatenate) else ["up"]
    parameter = ExpertParameter("x", (EXPERTS, *ROW), {name: [name] for name in sources}, sources, operations)
    with pytest.raises(UnsupportedModelError, match=type(operations[-1]).__name__):
        rows_of(parameter, parts)


def without(folder, *fragments: str):
    """Remove all tensors whose name contains a fragment."""
    (file,) = folder.glob("*.safetensors")
    tensors = {key: value for key, value in load_file(file).items() if not any(fragment in key for fragment in fragments)}
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize(
    ("family", "lost", "complaint"),
    [
        ("qwen3_moe", [".experts."], r"no weights for 6 of 6 .*first model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("qwen3_moe", ["2.mlp.experts.3.up_proj"], r"missing are mlp\.experts\.3\.up_proj\.weight"),
        ("qwen3_moe", ["experts.5."], r"has 11 tensors .*the model wants 12; missing are mlp\.experts\.5\.gate_proj\.weight"),
        ("ernie4_5_vl_moe", ["experts.1.down"], r"has 11 tensors .*the model wants 12"),
        (
            "gpt_oss",
            ["1.mlp.experts.down_proj_bias"],
            r"no weights for 1 of 12 .*first model\.layers\.1\.mlp\.experts\.down_proj_b",
        ),
    ],
)
def test_experts_missing_from_the_checkpoint_are_named(family, lost, complaint, tmp_path):
    save(family, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{complaint}.*Fix: check that all files"):
        store_of(without(tmp_path, *lost))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("change", ["experts", "width"])
def test_a_config_that_does_not_belong_to_the_files_is_noticed(family, change, tmp_path):
    save(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = {"experts": ("num_experts", "num_local_experts"), "width": ("moe_intermediate_size", "intermediate_size")}[change]
    config |= {key: config[key] - 2 for key in name if key in config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        store_of(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_expert_weights_that_need_a_scale_are_refused_and_never_cast(dtype, tmp_path):
    save("qwen3_moe", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({key: v.to(dtype) if "experts.2." in key else v for key, v in load_file(file).items()}, file)
    with pytest.raises(UnsupportedModelError, match=r"experts\.2\.gate_proj\.weight is neither stored as bf16.*Instead"):
        store_of(tmp_path)


def test_a_checkpoint_in_another_file_format_is_refused(tmp_path):
    save("qwen3_moe", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"qwen3_moe: .*pytorch_model\.bin.*Instead"):
        locate_experts(on_meta(tmp_path), [tmp_path / "pytorch_model.bin"], torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_inner_model_finds_its_experts_in_the_checkpoint_of_the_whole_model(family, tmp_path):
    save(family, tmp_path)
    whole = on_meta(tmp_path)
    with torch.device("meta"):
        inner = T.AutoModel.from_config(whole.config)
    stores = [locate_experts(model, tmp_path.glob("*.safetensors"), torch.float32) for model in (whole, inner)]
    assert [layer.path for layer in stores[1].inventory.layers] == [f"layers.{i}.mlp.experts" for i in range(3)]
    assert stores[0].locators == stores[1].locators


def test_layers_know_their_path_their_experts_and_how_many_a_token_uses(tmp_path):
    save("ernie4_5_vl_moe", tmp_path)
    inventory = store_of(tmp_path).inventory
    paths = [f"model.language_model.layers.{i}.mlp.{kind}_moe.experts" for i in (1, 2) for kind in ("text", "vision")]
    assert [layer.path for layer in inventory.layers] == paths
    assert [layer.geometry for layer in inventory.layers] == [0, 1, 0, 1]  # text experts are wider than vision experts
    assert {(layer.num_experts, layer.top_k) for layer in inventory.layers} == {(6, 2)}
    assert inventory.total_bytes == 2 * 6 * sum(3 * 64 * width * 4 for width in (24, 12))


def calls_to_locate(layers: int, folder) -> int:
    """For a checkpoint of 128 experts in each layer, three keys an expert."""
    config = T.Qwen3MoeConfig(
        vocab_size=8, hidden_size=8, intermediate_size=4, moe_intermediate_size=2, num_experts=128, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = T.Qwen3MoeForCausalLM(config)
    shapes = {"gate_proj": (2, 8), "up_proj": (2, 8), "down_proj": (8, 2)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for layer in range(layers) for e in range(128) for name, shape in shapes.items()
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    calls, store = counting_calls(lambda: locate_experts(model, [folder / "model.safetensors"], torch.bfloat16))
    assert len(store.inventory.layers) == layers
    store.close()
    return calls


def test_eight_times_the_keys_take_eight_times_the_work_and_not_the_square(tmp_path):
    calls_to_locate(6, tmp_path)  # what is imported and compiled once
    assert calls_to_locate(48, tmp_path) < 12 * calls_to_locate(6, tmp_path)
