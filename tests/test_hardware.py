"""What the machine can give, read from made-up control groups and from this machine."""

import pytest
import torch

from vismoe import VisMoEConfig
from vismoe.errors import ConfigError
from vismoe.machine.hardware import group_limits, host_memory, probe, torch_device
from vismoe.models.load.quantizer import VisMoEQuantizer


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_version_2_group_and_its_parents_limit_and_cache_is_not_use(tmp_path):
    (tmp_path / "self").write_text("0::/outer/inner\n")
    write(tmp_path / "outer", memory__max=8000, memory__current=5000, memory__stat="anon 1000\ninactive_file 1500")
    write(tmp_path / "outer/inner", memory__max="max", memory__current=100, memory__stat="inactive_file 0")
    assert group_limits(tmp_path, tmp_path / "self") == [(8000, 3500)]


def test_a_version_1_memory_group_limits(tmp_path):
    (tmp_path / "self").write_text("5:devices:/\n4:cpu,memory:/job\n0::/\n")
    job = {"memory__limit_in_bytes": 4000, "memory__usage_in_bytes": 3000, "memory__stat": "total_inactive_file 2000"}
    write(tmp_path / "memory/job", **job)
    write(tmp_path / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=9000)
    assert group_limits(tmp_path, tmp_path / "self") == [(4000, 1000)]


def test_a_system_without_control_groups_has_no_limits(tmp_path):
    assert group_limits(tmp_path, tmp_path / "self") == []


def test_this_machine_has_free_memory_and_cores(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found = probe("cpu")
    free, total = host_memory()
    assert 0 < found.free_bytes == found.free_host_bytes <= total and free > 0
    assert found.cores >= 1 and found.local_world_size == 3 and found.device == "cpu"


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="choose cpu or cuda"):
        probe("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            probe("cuda")


@pytest.mark.parametrize(
    ("asked", "rank", "index"),
    [("cuda", None, 1), ("cuda", "0", 0), ("cuda", "7", 1), ("cuda:0", "1", 0), (None, "0", 0), (None, None, 1)],
)
def test_a_gpu_has_the_index_that_its_tensors_will_have(asked, rank, index, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert torch_device(asked) == torch.device("cuda", index)
    loading = VisMoEQuantizer(VisMoEConfig())
    for device_map in ["auto"] if asked is None else [{"": asked}, {"model": asked, "lm_head": torch.device(asked)}]:
        assert loading.update_device_map(device_map) == {"": torch.device("cuda", index)}
    assert loading.update_device_map(None) is None and loading.update_device_map({"": 1}) == {"": torch.device("cuda", 1)}
