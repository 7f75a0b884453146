"""Loading without experts, and owning every byte afterwards: against vanilla loading and the kernel's list of mappings."""

import gc
import os
import re
from collections import Counter

import pytest
import tiny_models
import torch
from searching import SEARCHING
from test_store import on_meta
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.models.load import stripping
from vismoe.models.load.stripping import own_memory, strip_experts
from vismoe.models.moe.adapters import adapt
from vismoe.store.files import CheckpointFiles, OpenFiles
from vismoe.store.safetensors_header import read_header


class StripOnlyConfig(QuantizationConfigMixin):
    def __init__(self):
        self.quant_method = "strip-only"


class StripOnly(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, model, **kwargs):
        adapt(model)
        strip_experts(model)

    def is_serializable(self, *args, **kwargs):
        return False

    @property
    def is_trainable(self):
        return False


@pytest.fixture
def load_stripped(monkeypatch):
    """from_pretrained with nothing of ours but strip_experts; returns the model and transformers' loading report."""
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "strip-only", StripOnly)
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "strip-only", StripOnlyConfig)

    def load(folder, dtype=torch.float32):
        model_class = tiny_models.model_class(folder)
        return model_class.from_pretrained(folder, dtype=dtype, quantization_config=StripOnlyConfig(), output_loading_info=True)

    return load


def expert_names(model) -> set[str]:
    return {f"{path}.{name}" for path, module in expert_modules(model) for name in expert_parameters(module)}


def mapped_checkpoints() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "safetensors" in line and ".so" not in line}


@pytest.mark.parametrize("family", tiny_models.FAMILIES if SEARCHING else tiny_models.FAMILIES[::4])
def test_everything_but_the_experts_loads_as_before_and_nothing_is_reported(family, tmp_path, load_stripped):
    tiny_models.save(family, tmp_path)
    reference = tiny_models.reference(tmp_path)
    model, report = load_stripped(tmp_path)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    adapt(reference)
    experts = expert_names(reference)
    assert experts
    expected = {name: value for name, value in reference.state_dict().items() if name not in experts}
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    for _, module in expert_modules(model):
        assert not expert_parameters(module)


@pytest.mark.parametrize("family", ["gpt_oss", "ernie4_5_vl_moe", "nemotron_h"])
def test_the_number_of_stripped_elements_is_that_of_all_experts(family, tmp_path):
    tiny_models.save(family, tmp_path)
    model = on_meta(tmp_path)
    names = expert_names(model)
    expected = sum(model.get_parameter(name).numel() for name in names)
    assert strip_experts(model) == expected
    patterns = model._keys_to_ignore_on_load_unexpected
    assert all(any(re.search(pattern, name) for pattern in patterns) for name in names)
    assert strip_experts(model) == 0


def test_a_loaded_model_maps_the_checkpoint_until_it_owns_its_memory(tmp_path, load_stripped):
    tiny_models.save("qwen3_vl_moe", tmp_path)
    model, _ = load_stripped(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert str(file) in mapped_checkpoints()  # otherwise this test would show nothing
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: id(parameter) for name, parameter in model.named_parameters()}
    copied_bytes = own_memory(model)
    gc.collect()
    assert str(file) not in mapped_checkpoints()
    os.truncate(file, 0)  # would kill the process at the next touch of a mapped page
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert pointers == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
    distinct = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    assert copied_bytes == sum(tensor.nbytes for tensor in distinct)


@pytest.mark.parametrize("written", [False, True])
def test_large_weights_that_lie_mapped_are_read_from_the_files_unless_they_differ(written, tmp_path, load_stripped, monkeypatch):
    monkeypatch.setattr(stripping, "LARGE_BYTES", 4096)
    tiny_models.save("qwen3_vl_moe", tmp_path, max_shard_size="200KB")
    model, _ = load_stripped(tmp_path)
    if written:
        with torch.no_grad():
            max(model.parameters(), key=torch.numel).add_(1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    (tmp_path / "elsewhere").symlink_to(tmp_path)  # as in the cache of the hub, where names are links
    paths = sorted((tmp_path / "elsewhere").glob("*.safetensors"))
    files = CheckpointFiles([read_header(path) for path in paths]).for_loading(past_cache=False, threads=2)
    read, fill = [], OpenFiles.fill_large
    monkeypatch.setattr(OpenFiles, "fill_large", lambda self, *what: read.append(len(what[2])) or fill(self, *what))
    large = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters() if tensor.nbytes >= 4096}
    own_memory(model, files)
    assert len(paths) > 1 < len(read) and not Counter(read) - Counter(large.values())
    assert (sorted(read) == sorted(large.values())) is not written
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert not set(map(str, paths)) & set(mapped_checkpoints())


def test_ties_stay_whether_by_object_or_by_memory():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embedding.weight
    storage = torch.randn(6, 4)
    model.register_buffer("whole", storage)
    model.register_buffer("same", storage.view(6, 4))
    model.register_buffer("part", storage[2:])
    values, address = [model.whole.clone(), model.part.clone()], storage.data_ptr()
    assert own_memory(model) == 10 * 4 * 4 + 6 * 4 * 4 + 4 * 4 * 4
    assert model.head.weight is model.embedding.weight
    assert model.whole.data_ptr() == model.same.data_ptr() != address
    assert torch.equal(model.whole, values[0]) and torch.equal(model.part, values[1])


def test_the_peak_while_owning_is_one_tensor_more(monkeypatch):
    model = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))
    alive: list[int] = []
    storages = [parameter.untyped_storage()._weak_ref() for parameter in model.parameters()]
    empty_like = torch.empty_like

    def counting(tensor, **kwargs):
        alive.append(sum(not torch.UntypedStorage._expired(reference) for reference in storages))
        return empty_like(tensor, **kwargs)

    monkeypatch.setattr(torch, "empty_like", counting)
    own_memory(model)
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]  # each old tensor is gone before the next copy is made
    for reference in storages:
        torch.UntypedStorage._free_weak_ref(reference)
