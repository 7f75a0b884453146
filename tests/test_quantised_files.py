"""Quantised checkpoints as files: what is refused and how, how many reads an expert takes, and that records mean the formulas."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as quantised
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from searching import SEARCHING
from test_store import every_expert, record_for, store_of
from transformers.integrations.finegrained_fp8 import FP8Experts

from vismoe.config import Settings
from vismoe.errors import CheckpointError, UnsupportedModelError, VisMoEError
from vismoe.formats.encoded import Encoded
from vismoe.models.load.locate import as_stored
from vismoe.models.load.preview import preview
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.files import OpenFiles
from vismoe.store.safetensors_header import read_header
from vismoe.store.tensors import tensors_of
from vismoe.types import ExpertId, ExpertInventory, MoELayer, RecordLayout

UP = "model.layers.1.mlp.experts.2.up_proj"
State = dict[str, torch.Tensor]


# ------------------------------------------------------------------ what is refused
def put(suffix: str, change) -> Any:
    def apply(state: State) -> None:
        state[UP + suffix] = change(state[UP + suffix])

    return apply


def every(suffix: str, change) -> Any:
    def apply(state: State) -> None:
        for name in [name for name in state if ".experts." in name and name.endswith(suffix)]:
            change(state, name)

    return apply


def drop(suffix: str) -> Any:
    return lambda state: state.pop(UP + suffix)


def smaller(state: State) -> None:
    state[f"{UP}.weight"] = state[f"{UP}.weight"][:64].clone()
    state[f"{UP}.weight_scale_inv"] = state[f"{UP}.weight_scale_inv"][:1].clone()


def decoded(state: State) -> None:
    state[f"{UP}.weight"] = state[f"{UP}.weight"].bfloat16()
    del state[f"{UP}.weight_scale_inv"]


def of_blocks(size: tuple[int, int], dtype: torch.dtype) -> Any:
    def change(state: State, name: str) -> None:
        rows, columns = state[name.removesuffix("_scale_inv")].shape
        state[name] = torch.zeros(-(-rows // size[0]), -(-columns // size[1]), dtype=dtype)

    return every("weight_scale_inv", change)


def as_bitsandbytes(state: State, name: str) -> None:
    packed = state.pop(name).view(torch.uint8).flatten()
    del state[f"{name}_scale_inv"]
    state |= {
        name: packed[: len(packed) // 2, None].clone(),
        f"{name}.absmax": torch.zeros(768),
        f"{name}.quant_map": torch.zeros(16),
    }


def without_scale(state: State, name: str) -> None:
    del state[f"{name}_scale_inv"]


def nothing(state: State) -> None:
    pass


FIRST = r"experts\.0\.\w+_proj\."
HERE = r"layers\.1\.mlp\.experts\.2\.up_proj\."
DOCS = r".*Instead: .*docs/formats\.md"
FAULTS: dict[str, tuple[str, Any, dict[str, Any], type[VisMoEError], str]] = {
    "no scale": ("fp8", drop(".weight_scale_inv"), {}, UnsupportedModelError, HERE + "weight is neither stored" + DOCS),
    "no scales": ("fp8", every(".weight", without_scale), {}, UnsupportedModelError, FIRST + "weight is neither" + DOCS),
    "a scale of another shape": (
        "fp8",
        put(".weight_scale_inv", lambda s: s[:, :1]),
        {},
        CheckpointError,
        HERE + r"weight .*\(192, 256\).*weight_scale_inv .*\(2, 1\)" + DOCS,
    ),
    "a scale for the tensor, where others have blocks": (
        "fp8",
        put(".weight_scale_inv", lambda s: torch.tensor(1.0)),
        {},
        CheckpointError,
        r"gate_up_proj: the scale .*\(384, 1\), \(384, 2\).*Fix",
    ),
    "a scale of another type": (
        "fp8",
        put(".weight_scale_inv", lambda s: s.int()),
        {},
        UnsupportedModelError,
        HERE + "weight: .*int32" + DOCS,
    ),
    "blocks of another size": (
        "fp8",
        of_blocks((64, 64), torch.float32),
        {},
        CheckpointError,
        FIRST + "weight .*do not fit" + DOCS,
    ),
    "MXFP8": ("fp8", of_blocks((1, 32), torch.uint8), {}, CheckpointError, FIRST + "weight .*do not fit" + DOCS),
    "E5M2": (
        "fp8",
        put(".weight", lambda w: w.view(torch.float8_e5m2)),
        {},
        UnsupportedModelError,
        HERE + "weight is neither" + DOCS,
    ),
    "codes of another shape": (
        "fp8",
        smaller,
        {},
        CheckpointError,
        r"layers\.1\..*gate_up_proj: .*\(256, 256\), \(384, 256\).*Fix: ",
    ),
    "gate encoded and up not": (
        "fp8",
        decoded,
        {},
        UnsupportedModelError,
        r"layers\.1\..*gate_up_proj: .*stored differently.*fp8.*bfloat16.*Instead",
    ),
    "bitsandbytes": (
        "fp8",
        every(".weight", as_bitsandbytes),
        dict(quant_method="bitsandbytes"),
        UnsupportedModelError,
        FIRST + "weight is neither" + DOCS,
    ),
    "an unknown method": (
        "fp8",
        nothing,
        dict(quant_method="frobnicate"),
        UnsupportedModelError,
        FIRST + "weight: .*frobnicate" + DOCS,
    ),
    "GPTQ by activations": (
        "gptq",
        every(".g_idx", lambda state, name: state.update({name: state[name].flip(0)})),
        dict(desc_act=True),
        CheckpointError,
        FIRST + "g_idx: input 0 is in group 3, not in 0.*desc_act" + DOCS,
    ),
    "GPTQ by activations without their order": (
        "gptq",
        every(".g_idx", lambda state, name: state.pop(name)),
        dict(desc_act=True),
        UnsupportedModelError,
        FIRST + "qweight: .*desc_act, and no g_idx" + DOCS,
    ),
    "GPTQ with an order of other inputs": (
        "gptq",
        put(".g_idx", lambda order: order[:64]),
        {},
        CheckpointError,
        HERE + r"qweight .*g_idx is torch.int32 of \(64,\)" + DOCS,
    ),
    "GPTQ of 8 bits": ("gptq", nothing, dict(bits=8), UnsupportedModelError, FIRST + "qweight: .*8 bits" + DOCS),
    "GPTQ of 3 bits": ("gptq", nothing, dict(bits=3), UnsupportedModelError, FIRST + "qweight: .*3 bits" + DOCS),
    "GPTQ of 3 bits that does not say so": (
        "gptq",
        every(".qweight", lambda state, name: state.update({name: state[name][: len(state[name]) * 3 // 4].clone()})),
        dict(bits=None),
        CheckpointError,
        FIRST + "qweight .*do not fit" + DOCS,
    ),
    "marlin": ("gptq", nothing, dict(checkpoint_format="marlin"), UnsupportedModelError, FIRST + "qweight: .*marlin" + DOCS),
    "AWQ for gemv": ("awq", nothing, dict(version="gemv"), UnsupportedModelError, FIRST + "qweight: .*gemv" + DOCS),
    "AWQ without zero points": ("awq", drop(".qzeros"), {}, CheckpointError, HERE + r"qweight: .* no .*up_proj\.qzeros.*Fix"),
    "inputs in another order": (
        "w4",
        lambda state: state.update({f"{UP}.weight_g_idx": torch.arange(256).int()}),
        {},
        UnsupportedModelError,
        HERE + "weight_packed: .*weight_g_idx" + DOCS,
    ),
    "8 bits with zero points": (
        "int8 per channel",
        lambda state: state.update({f"{UP}.weight_zero_point": torch.ones(192, 1, dtype=torch.int8)}),
        {},
        UnsupportedModelError,
        HERE + "weight: .*does not know what weight_zero_point" + DOCS,
    ),
    "inputs that are scaled before": (
        "nvfp4 of modelopt",
        lambda state: state.update({f"{UP}.pre_quant_scale": torch.ones(256)}),
        {},
        UnsupportedModelError,
        HERE + "weight: .*does not know what pre_quant_scale" + DOCS,
    ),
    "compressed-tensors of 8 bits": (
        "w4",
        nothing,
        dict(config_groups={"group_0": {"weights": {"num_bits": 8}}}),
        UnsupportedModelError,
        FIRST + "weight_packed: .*8 bits" + DOCS,
    ),
    "integers as scales": (
        "w4",
        put(".weight_scale", lambda s: s.int()),
        {},
        CheckpointError,
        HERE + "weight_packed .*weight_scale is torch.int32" + DOCS,
    ),
    "words of 64 bits": (
        "w4",
        put(".weight_packed", lambda w: w.long()),
        {},
        CheckpointError,
        HERE + "weight_packed is torch.int64" + DOCS,
    ),
    "no global scale": (
        "nvfp4",
        drop(".weight_global_scale"),
        {},
        CheckpointError,
        HERE + r"weight_packed: .* no .*weight_global_scale.*Fix",
    ),
    "NVFP4 with another scale": (
        "nvfp4",
        put(".weight_scale", lambda s: s.float()),
        {},
        CheckpointError,
        HERE + "weight_packed .*weight_scale is torch.float32" + DOCS,
    ),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each kind that a fault begins with."""
    folder = tmp_path_factory.mktemp("originals")
    kinds = sorted({kind for kind, *_ in FAULTS.values()})
    for kind in kinds:
        quantised.write(folder / kind, kind)
    return {kind: folder / kind for kind in kinds}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_tensor(fault, originals, tmp_path):
    kind, change, about, error, message = FAULTS[fault]
    state = load_file(originals[kind] / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    config = json.loads((originals[kind] / "config.json").read_text())
    config["quantization_config"] |= about
    (tmp_path / "config.json").write_text(json.dumps(config))
    names, opened = sorted(os.listdir(tmp_path)), len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        store_of(tmp_path, torch.bfloat16)
    assert sorted(os.listdir(tmp_path)) == names
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_truncated_file_is_refused_with_the_bytes_that_lack(originals, tmp_path):
    whole = (originals["fp8"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    (tmp_path / "config.json").write_bytes((originals["fp8"] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is truncated: expected {len(whole)} bytes.*Fix"):
        store_of(tmp_path, torch.bfloat16)


def test_odd_settings_do_not_hide_what_the_tensors_say(originals, tmp_path):
    """config.json is written by many programs; groups of other bits belong to other modules."""
    (tmp_path / "model.safetensors").write_bytes((originals["w4"] / "model.safetensors").read_bytes())
    config = json.loads((originals["w4"] / "config.json").read_text())
    four = {"weights": {"num_bits": 4}}
    for groups in ([1], {"a": None, "b": {"weights": None}}, {"a": {"weights": {"num_bits": 8}}, "b": four}):
        config["quantization_config"]["config_groups"] = groups
        (tmp_path / "config.json").write_text(json.dumps(config))
        store_of(tmp_path, torch.bfloat16).close()


def test_codes_that_lie_as_in_out_are_refused(tmp_path):
    """The formats have rows of inputs; scales of rows mean nothing for columns."""
    quantised.write(tmp_path, "fp8 per tensor", "qwen3_vl_moe", names="stacked")
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(".experts.down_proj")]:
        state[name] = state[name].view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"experts\.down_proj: .*\(192, 256\).*\[outputs, inputs\], \(256, 192\).*Instead"
    ):
        store_of(tmp_path, torch.bfloat16)


def test_inputs_in_another_order_are_refused_when_their_expert_is_read(originals, tmp_path):
    """What config.json says of the order does not count: `g_idx` is there. The first expert of a layer is looked at before."""
    state = load_file(originals["gptq"] / "model.safetensors")
    state[f"{UP}.g_idx"] = state[f"{UP}.g_idx"].flip(0)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((originals["gptq"] / "config.json").read_bytes())
    store = store_of(tmp_path, torch.bfloat16)
    for expert in every_expert(store):
        if (expert.layer, expert.expert) != (1, 2):
            store.read(expert, record_for(store, expert))
            continue
        with pytest.raises(CheckpointError, match=r"expert 2 of MoE layer 1: .*" + HERE + "g_idx: input 0 is in group 3"):
            store.read(expert, record_for(store, expert))
    store.close()


# ------------------------------------------------------------------ reads
READS = {
    "fp8": 2, "w4": 2, "nvfp4": 3, "nvfp4 of modelopt": 5, "awq": 2, "gptq": 2, "fp8 per channel": 2, "mxfp4": 6, "fp8 ue8m0": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_an_expert_takes_a_read_for_each_stretch_of_its_file(kind, tmp_path, monkeypatch):
    """safetensors sorts tensors by the width of their types, then by name. modelopt has `input_scale` between its factors,
    which no expert needs."""
    family, names = ("gpt_oss", "stacked") if kind == "mxfp4" else ("qwen3_moe", "expert first")
    quantised.write(tmp_path, kind, family, names=names)
    store = store_of(tmp_path, torch.bfloat16)
    expert = ExpertId(1, 3)
    read, reads = OpenFiles._read, []
    monkeypatch.setattr(OpenFiles, "_read", lambda self, *args: reads.extend(*args) or read(self, *args))
    record = record_for(store, expert)
    nbytes = store.read(expert, record)
    assert len(reads) == READS[kind]
    assert nbytes == sum(part.nbytes for parts in store.locators[1][3] for part in parts)
    again = record_for(store, expert)
    store.read_past_cache()
    store.read(expert, again)
    assert torch.equal(record, again)
    store.close()


# ------------------------------------------------------------------ records
@settings(max_examples=2000 if SEARCHING else 60)
@given(kind=st.sampled_from(quantised.PER_EXPERT), data=st.data())
def test_a_record_means_what_the_formula_says_and_nothing_beside_it_is_written(kind, data, tmp_path_factory):
    """Two experts of any shape, gate and up in one section; one expert's bytes never show in the other."""
    any_shape = kind.startswith(("fp8", "int8"))
    sizes = st.integers(1, 300) if any_shape else st.integers(1, 4).map(lambda n: 64 * n)
    rows = data.draw(st.integers(1, 300) if any_shape else st.integers(1, 30).map(lambda n: 8 * n))
    inputs = data.draw(sizes)
    make, about = quantised.KINDS[kind]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    state, expected = {}, []
    for e in range(2):
        halves = []
        for name in ("gate", "up"):
            tensors, values = make(torch.randn(rows, inputs))
            state |= {f"experts.{e}.{name}{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            halves.append(values)
        expected.append(torch.cat(halves))
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(state, path)
    header = read_header(path)
    tensors = tensors_of([header], about)
    column = [(tensors[f"experts.{e}.gate.weight"], tensors[f"experts.{e}.up.weight"]) for e in range(2)]
    raw = RecordLayout.of({"w": (2 * rows, inputs)}, {"w": torch.bfloat16})
    inventory = ExpertInventory((MoELayer(0, "x", 2, 1, 0),), (raw,))
    inventory, locators = as_stored(inventory, {"x.w": column}, (frozenset(),))
    store = CheckpointStore([header], inventory, locators)
    (own,) = inventory.own_layouts
    for expert in every_expert(store):
        around = torch.full((own.record_bytes + 128,), 0xA5, dtype=torch.uint8)
        record = around[64:-64]
        store.read(expert, record)
        free = torch.ones(len(around), dtype=torch.bool)
        for section in own.sections:
            free[64 + section.offset_bytes : 64 + section.offset_bytes + section.nbytes] = False
        assert (around[free] == 0xA5).all()
        restored = torch.zeros(raw.record_bytes, dtype=torch.uint8)
        Encoded(raw, own).restore(record, restored)
        assert torch.equal(raw.views(restored)["w"], expected[expert.expert])
    store.close()


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize("kind", ["fp8", "w4", "nvfp4", "awq"])
def test_a_percentage_of_memory_is_one_of_the_bytes_that_the_checkpoint_has(kind, tmp_path):
    quantised.write(tmp_path, kind)
    store = store_of(tmp_path, torch.bfloat16)
    whole = store.inventory.total_bytes
    in_file = store.stored_bytes
    in_16_bits = sum(2 * 3 * quantised.HIDDEN * quantised.INTERMEDIATE * layer.num_experts for layer in store.inventory.layers)
    store.close()
    assert in_file <= whole <= 1.1 * in_file, "scales of blocks are repeated for each row"
    assert whole < (0.6 if kind == "fp8" else 0.35) * in_16_bits
    all_of_it, half = (preview(tmp_path, Settings(memory=memory, kernels="torch")) for memory in ("100%", "50%"))
    experts = quantised.EXPERTS * quantised.LAYERS
    assert all_of_it.resident_experts == experts and half.resident_experts == experts // 2
    record = store.inventory.layouts[0].record_bytes
    assert all_of_it.budget_bytes - half.budget_bytes == pytest.approx(whole / 2, abs=record)


def test_stacked_fp8_lies_as_in_the_module_of_transformers(tmp_path):
    """It cannot save a model on a CPU, so its parameters' names, shapes and types are compared with those of the files here."""
    quantised.write(tmp_path, "fp8 float32 scales", names="stacked")
    written = {
        name.rpartition(".experts.")[2]: (tensor.shape, tensor.dtype)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if "layers.0.mlp.experts." in name
    }
    with torch.device("meta"):
        module = FP8Experts(quantised.config_of("qwen3_moe"), block_size=(128, 128))
    assert written == {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
