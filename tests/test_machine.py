"""The machine: facts from made-up files, rates on small files, the kept profile, and what is chosen from it."""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.errors import InputError, TransferError
from vismoe.kernels.cpu import ExpertKernel
from vismoe.machine import disk as disk_module
from vismoe.machine import facts as facts_module
from vismoe.machine import profile as profile_module
from vismoe.machine import rates as rates_module
from vismoe.machine.ceilings import EXAMPLES, miss_bytes_per_s, resident_tokens_per_s, spare_bytes, tokens_per_s
from vismoe.machine.choices import Choices, choose
from vismoe.machine.disk import disk_rates, filesystem_key, rate_past_cache
from vismoe.machine.facts import cpu_of, facts, machine_key, pci_link
from vismoe.machine.hardware import cpu_quota
from vismoe.machine.measure import measure, measure_disk
from vismoe.machine.profile import Profile, disk_of, load_profile, merged, profile_file, save_profile
from vismoe.machine.rates import (
    QUICK,
    DiskRate,
    DiskRates,
    DramRates,
    Effort,
    LinkRate,
    LinkRates,
    dram_rates,
    expert_rates,
    link_rates,
)
from vismoe.pools.pool import SlabPool
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

GIB, MIB = 2**30, 2**20
SMALL = Effort((4096, 65536), (1, 2), 0.01, 1, MIB, MIB)

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse4_2 fma f16c avx avx2 avx512f avx512bw avx512vl avx_vnni avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another one
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes asimdhp cpuid asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


# ------------------------------------------------------------------ facts
def test_an_x86_cpu_has_its_name_and_the_features_our_kernels_use():
    name, features = cpu_of(X86)
    assert name == "Intel(R) Xeon(R) Platinum 8480+"
    expected = "avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16"
    assert set(features) == set(expected.split())


def test_an_arm_cpu_has_its_maker_and_features_under_common_names():
    name, features = cpu_of(ARM)
    assert name == "ARM core, part 0xd40"
    assert set(features) == {"neon", "dotprod", "fp16", "sve", "i8mm", "bf16"}


def test_a_cpuinfo_that_says_nothing_gives_nothing():
    assert cpu_of("") == (None, ())


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_version_2_quota_counts(tmp_path):
    (tmp_path / "self").write_text("0::/outer/inner\n")
    write(tmp_path / "outer", cpu__max="150000 100000")
    write(tmp_path / "outer/inner", cpu__max="max 100000")
    assert cpu_quota(tmp_path, tmp_path / "self") == 1.5
    write(tmp_path / "outer/inner", cpu__max="50000 100000")
    assert cpu_quota(tmp_path, tmp_path / "self") == 0.5


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_version_1_quota_counts_and_minus_one_is_none(tmp_path, mount):
    (tmp_path / "self").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n")
    write(tmp_path / mount, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / mount / "job", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(tmp_path, tmp_path / "self") is None
    write(tmp_path / mount / "job", cpu__cfs_quota_us="400000")
    assert cpu_quota(tmp_path, tmp_path / "self") == 4


def test_in_a_container_the_group_of_the_host_is_looked_for_at_the_root(tmp_path):
    (tmp_path / "self").write_text("3:cpu,cpuacct:/docker/0123\n")
    write(tmp_path / "cpu", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    assert cpu_quota(tmp_path, tmp_path / "self") == 2.5


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "self") is None


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (2, 4.0, 2), (8, 0.5, 1)])
def test_usable_cores_are_the_fewer_of_affinity_and_quota_and_at_least_one(affinity, quota, usable):
    assert dataclasses.replace(facts(), affinity_cores=affinity, quota_cores=quota).usable_cores == usable


def test_a_pci_link_is_read_and_may_be_missing(tmp_path):
    assert pci_link(tmp_path) is None
    write(tmp_path, current_link_speed="32.0 GT/s PCIe", current_link_width="16")
    assert pci_link(tmp_path) == "32.0 GT/s x16"


def test_this_machine_is_described_and_its_key_is_stable():
    found = facts()
    assert found.usable_cores >= 1 and 0 < found.ram_free_bytes <= found.ram_total_bytes <= found.ram_bytes
    assert found.versions["torch"] == torch.__version__
    assert machine_key(found) == machine_key(facts())


def test_a_machine_with_other_cores_or_memory_has_another_key():
    found = facts()
    others = [
        dataclasses.replace(found, affinity_cores=found.affinity_cores + 1, quota_cores=None),
        dataclasses.replace(found, ram_bytes=found.ram_bytes * 2),
        dataclasses.replace(found, cpu="another"),
    ]
    assert len({machine_key(each) for each in (found, *others)}) == 4


def test_without_proc_and_sys_facts_are_still_found(monkeypatch, tmp_path):
    for name in ("CPUINFO", "HUGE_PAGES", "DRIVER"):
        monkeypatch.setattr(facts_module, name, tmp_path / name)
    found = facts()
    assert found.cpu and found.features == () and found.huge_pages is None and not found.nvidia_driver


# ------------------------------------------------------------------ measuring
def test_a_disk_is_measured_at_every_point_and_the_scratch_file_has_no_name(tmp_path):
    listed = []
    measured = disk_rates(tmp_path, SMALL, lambda: listed.extend(tmp_path.iterdir()))
    assert listed == [] and list(tmp_path.iterdir()) == []
    ways = (False,) if measured.direct_refused else (True, False)
    points = set(itertools.product(ways, SMALL.requests_bytes, SMALL.depths))
    assert {(rate.direct, rate.request_bytes, rate.depth) for rate in measured.rates} == points
    assert all(rate.bytes_per_s > 0 for rate in measured.rates) and measured.cached_bytes_per_s > 0
    assert measured.key == filesystem_key(tmp_path)


def test_the_threads_share_the_offsets_and_stop_when_the_time_is_over(tmp_path, monkeypatch):
    seen: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: seen.append(offset) or real(fd, buffers, offset))
    (tmp_path / "file").write_bytes(bytes(MIB))
    offsets = list(range(0, MIB, 4096))
    with open(tmp_path / "file", "rb") as file:
        disk_module._reading(file.fileno(), offsets, 4096, 3, math.inf)
        assert sorted(seen) == offsets
        seen.clear()
        disk_module._reading(file.fileno(), offsets, 4096, 3, 0.0)
        assert len(seen) == 3


def test_cold_reads_drop_the_files_pages_and_cover_the_file_in_random_order(tmp_path, monkeypatch):
    dropped, orders = [], []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[1:]))
    monkeypatch.setattr(disk_module, "_reading", lambda fd, offsets, *_, **__: orders.append(offsets) or 1.0)
    measured = disk_rates(tmp_path, SMALL)
    cold, (warming, cached) = orders[:-2], orders[-2:]
    assert len(dropped) == len(cold) == len(measured.rates)
    assert set(dropped) == {(0, 0, os.POSIX_FADV_DONTNEED)}
    assert all(sorted(order) == list(range(0, MIB, MIB // len(order))) != order for order in cold)
    assert warming == cached


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_filesystem_that_refuses_o_direct_is_reported_and_measured_without(tmp_path, monkeypatch, where):
    direct = set()
    real_open, real_read = os.open, os.preadv

    def opens(name, flags, *rest, **named):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = real_open(name, flags, *rest, **named)
        direct.discard(descriptor)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def reads(descriptor, *rest):
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_read(descriptor, *rest)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    measured = disk_rates(tmp_path, SMALL)
    assert "O_DIRECT: Invalid argument" in measured.direct_refused
    assert measured.rates and not any(rate.direct for rate in measured.rates)


def test_a_system_without_fadvise_has_only_the_rate_of_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "O_DIRECT")
    measured = disk_rates(tmp_path, SMALL)
    assert measured.rates == () and measured.cached_bytes_per_s > 0 and "no O_DIRECT" in measured.direct_refused


def test_ctrl_c_while_measuring_leaves_neither_a_file_nor_a_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with pytest.raises(KeyboardInterrupt):
        disk_rates(tmp_path, SMALL, lambda: signal.raise_signal(signal.SIGINT))
    assert list(tmp_path.iterdir()) == []
    assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_while_writing_the_scratch_file_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        disk_rates(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_rate_of_one_file_is_that_past_the_page_cache_or_none(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(4 * MIB))
    assert rate_past_cache(file, MIB, 2, 0.02) is None, "too small to say anything"
    assert rate_past_cache(tmp_path / "gone", MIB, 2, 0.02) is None
    monkeypatch.setattr(disk_module, "LEAST_EXISTING_BYTES", MIB)
    rate = rate_past_cache(file, MIB, 2, 0.02)
    assert (rate is None) == bool(disk_rates(file, SMALL).direct_refused) and (rate is None or rate > 0)
    assert rate_past_cache(file, MIB, 8, 0.02) is None, "fewer places than threads"


def test_a_large_weights_file_is_read_in_place_of_a_scratch_file(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "LEAST_EXISTING_BYTES", MIB)
    monkeypatch.setattr(disk_module, "_fill", lambda *_: pytest.fail("wrote a scratch file"))
    weights = tmp_path / "model-00001.safetensors"
    weights.write_bytes(os.urandom(MIB + 100))
    before = weights.stat()
    for path in (tmp_path, weights):
        assert disk_rates(path, SMALL).rates
    assert weights.stat().st_mtime_ns == before.st_mtime_ns and list(tmp_path.iterdir()) == [weights]


@pytest.mark.parametrize("case", ["missing", "full", "small", "unwritable", "write"])
def test_a_place_that_cannot_be_measured_is_refused_with_a_fix(tmp_path, monkeypatch, case):
    path = tmp_path
    if case == "missing":
        path = tmp_path / "nowhere"
    elif case == "small":
        path = tmp_path / "small.safetensors"
        path.write_bytes(b"x")
    elif case == "full":
        usage = type("Usage", (), {"free": MIB})
        monkeypatch.setattr(disk_module.psutil, "disk_usage", lambda folder: usage)
    elif case == "unwritable":

        def refuse(**_):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(disk_module.tempfile, "NamedTemporaryFile", refuse)
    else:

        def no_space(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(InputError, match="Fix: "):
        disk_rates(path, QUICK)


def test_memory_is_read_by_all_threads_and_by_one():
    measured = dram_rates(3, MIB)
    assert measured.threads == 3 and measured.bytes_per_s > 0 and measured.single_thread_bytes_per_s > 0


def test_what_the_cpu_takes_for_experts_is_measured_by_the_kernels_that_compute_them():
    """At one token and at many, with slabs of the kernel's own format and the default type that loading a model sets; one more
    token never takes longer than a call for one."""
    names = {"up": (128, 64), "down": (64, 64)}
    raw = RecordLayout.of(names, dict.fromkeys(names, torch.bfloat16))
    kernel = ExpertKernel.of(Format.RAW, raw, raw, ExpertForm("up", "down", False, Gate.CONCATENATED, Activation.SILU))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        bytes_per_s, token_s = expert_rates(kernel, raw, torch.bfloat16, MIB)
        assert expert_rates(kernel, raw, torch.bfloat16, raw.record_bytes) and not expert_rates(kernel, raw, torch.bfloat16, 1)
    finally:
        torch.set_default_dtype(before)
    assert 0 < token_s < raw.record_bytes / bytes_per_s


def test_a_path_that_is_not_there_yet_lies_where_its_folder_does(tmp_path):
    assert filesystem_key(tmp_path / "later/model.safetensors") == filesystem_key(tmp_path)


def test_measuring_gives_a_profile_and_touches_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.machine.measure.QUICK", SMALL)
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path / "cache"))
    profile = measure(tmp_path)
    assert profile.machine == machine_key(facts())
    assert profile.dram_bytes_per_s > 0 and profile.best_disk_bytes_per_s(tmp_path) > 0
    assert not (tmp_path / "cache").exists()
    assert measure_disk(tmp_path).key == profile.disks[0].key


@pytest.fixture
def small_link(monkeypatch):
    """The CPU in place of a GPU: what is left is the logic of the measurement."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * MIB, 64 * MIB))
    monkeypatch.setattr(rates_module, "LINK_REQUESTS_BYTES", (4096, 8192))
    monkeypatch.setattr(rates_module, "_gpu_seconds", lambda work, device: work() or 0.5)


def test_the_link_is_measured_as_the_pager_uses_it(small_link, monkeypatch):
    """Registered slabs, several copies at a time."""
    registered = []
    library = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: registered.append(nbytes) or 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    measured, copies = link_rates("cpu"), rates_module.LINK_COPIES
    points = list(itertools.product((False, True), (4096, 8192)))
    assert [(rate.page_locked, rate.request_bytes) for rate in measured.rates] == points
    assert all(rate.bytes_per_s == copies * rate.request_bytes / 0.5 for rate in measured.rates)
    assert registered == [copies * 4096, copies * 8192]
    assert measured.registered and measured.page_lock_refused is None and measured.device_read_bytes_per_s > 0


def test_page_locking_that_is_refused_is_reported(small_link, monkeypatch):
    def pool(layout, slabs, device="cpu", page_locked=False):
        if page_locked:
            raise TransferError("4 KiB could not be page-locked. Fix: ulimit -l")
        return SlabPool(layout, slabs, device)

    monkeypatch.setattr(rates_module, "SlabPool", pool)
    measured = link_rates("cpu")
    assert [(rate.page_locked, rate.request_bytes) for rate in measured.rates] == [(False, 4096), (False, 8192)]
    assert measured.page_lock_refused == "4 KiB could not be page-locked" and measured.device_read_bytes_per_s > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_link_to_a_gpu_is_measured():
    measured = link_rates("cuda:0")
    assert measured.page_lock_refused is None
    assert {rate.page_locked for rate in measured.rates} == {True, False}
    assert all(rate.bytes_per_s > 0 for rate in measured.rates) and measured.device_read_bytes_per_s > 0


# ------------------------------------------------------------------ the kept profile
def disk(*rates: DiskRate, key: str = "here", refused: str | None = None, folder: str = "/models") -> DiskRates:
    return DiskRates(key, folder, "ext4 on /dev/sda", 1.5e9, rates, 1e10, refused)


def made_up(*disks: DiskRates, links: tuple[LinkRates, ...] = (), machine: str | None = None) -> Profile:
    found = facts()
    return Profile(machine or machine_key(found), 1.7e9, found, DramRates(GIB, 2, 4e10, 2.5e10), disks, links)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_comes_back_as_it_was_kept(cache):
    link = LinkRates("cuda:0", (LinkRate(True, MIB, 2.5e10),), 3e12, None)
    profile = made_up(disk(DiskRate(True, MIB, 2, 2e9)), disk(key="there", refused="tmpfs"), links=(link,))
    assert load_profile() is None
    assert save_profile(profile).parent == cache
    assert load_profile() == profile
    assert [file.suffix for file in cache.iterdir()] == [".json"]


def test_a_profile_from_before_links_were_measured_as_the_pager_uses_them_is_still_read(cache):
    profile = made_up(disk(), links=(LinkRates("cuda:0", (LinkRate(True, MIB, 2.5e10),), 3e12, None, registered=True),))
    file = save_profile(profile)
    value = json.loads(file.read_text())
    del value["links"][0]["registered"]
    file.write_text(json.dumps(value))
    assert load_profile().links == (dataclasses.replace(profile.links[0], registered=False),)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VISMOE_CACHE", "/a")
    assert profile_file("k") == Path("/a/machine-k.json")
    monkeypatch.delenv("VISMOE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert profile_file("k") == Path("/b/vismoe/machine-k.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert profile_file("k") == Path("/c/.cache/vismoe/machine-k.json")


def damaged(text: str, damage: str) -> str:
    value = json.loads(text)
    return {
        "cut off": text[: len(text) // 2],
        "no JSON": "\x00\x01",
        "another kind": "[]",
        "older schema": json.dumps({**value, "schema": 0}),
        "no schema": json.dumps({name: field for name, field in value.items() if name != "schema"}),
        "wrong type": json.dumps({**value, "measured_unix_s": "yesterday"}),
        "missing field": json.dumps({name: field for name, field in value.items() if name != "dram"}),
        "unknown field": json.dumps({**value, "more": 1}),
        "wrong inner type": json.dumps({**value, "disks": [{**value["disks"][0], "rates": [1]}]}),
        "another machine": json.dumps({**value, "machine": "0" * 16}),
    }[damage]


DAMAGES = (
    "cut off",
    "no JSON",
    "another kind",
    "older schema",
    "no schema",
    "wrong type",
    "missing field",
    "unknown field",
    "wrong inner type",
    "another machine",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_left_aside_with_a_warning(cache, caplog, damage):
    file = save_profile(made_up(disk(DiskRate(True, MIB, 2, 2e9))))
    file.write_text(damaged(file.read_text(), damage))
    with caplog.at_level(logging.WARNING):
        assert load_profile() is None
    assert "vismoe doctor --refresh" in caplog.text


def test_two_machines_that_share_a_home_keep_a_file_each(cache):
    save_profile(made_up(machine="f" * 16))
    assert load_profile() is None
    save_profile(made_up())
    assert load_profile() is not None and len(list(cache.iterdir())) == 2


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(cache, monkeypatch):
    before = made_up()
    save_profile(before)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(profile_module.json, "dump", full)
    with contextlib.suppress(OSError):
        save_profile(dataclasses.replace(before, measured_unix_s=1.0))
    assert load_profile() == before and len(list(cache.iterdir())) == 1


def test_the_rates_of_a_path_are_those_of_its_filesystem(tmp_path):
    here = disk(DiskRate(True, MIB, 1, 1e9), DiskRate(False, MIB, 4, 3e9), key=filesystem_key(tmp_path))
    profile = made_up(disk(key="elsewhere"), here)
    assert disk_of(profile, tmp_path / "model") == here
    assert profile.best_disk_bytes_per_s(tmp_path) == 3e9
    assert made_up(disk(key="elsewhere")).best_disk_bytes_per_s(tmp_path) is None
    assert made_up(disk(key=filesystem_key(tmp_path))).best_disk_bytes_per_s(tmp_path) is None


def test_measuring_again_keeps_the_other_disks():
    old = made_up(disk(key="a"), disk(key="b"))
    new = made_up(disk(DiskRate(True, MIB, 1, 1e9), key="a"))
    assert merged(old, new).disks == (new.disks[0], old.disks[1])


# ------------------------------------------------------------------ choices
CURVES = (
    DiskRate(True, MIB, 1, 0.8e9),
    DiskRate(True, MIB, 2, 1.0e9),
    DiskRate(True, MIB, 8, 1.1e9),
    DiskRate(True, 16 * MIB, 1, 1.2e9),
    DiskRate(True, 16 * MIB, 2, 2.3e9),
    DiskRate(True, 16 * MIB, 4, 2.4e9),
    DiskRate(False, MIB, 1, 1.5e9),
    DiskRate(False, MIB, 4, 3.0e9),
    DiskRate(False, 16 * MIB, 1, 0.9e9),
    DiskRate(False, 16 * MIB, 4, 1.1e9),
)


def chosen(profile: Profile | None, path: Path, **changes: object) -> Choices:
    given = {"expert_bytes": 9 * MIB, "checkpoint_bytes": 54 * GIB, "spare_bytes": 4 * GIB, "cores": 2, "device": "cpu"}
    return choose(profile, path=path, **(given | changes))


@pytest.fixture
def measured(tmp_path) -> Profile:
    return made_up(disk(*CURVES, key=filesystem_key(tmp_path)))


def test_large_experts_that_do_not_fit_are_read_past_the_page_cache_where_that_is_faster(tmp_path, measured):
    found = chosen(measured, tmp_path)
    assert found.direct_reads and found.io_threads == 2
    assert found.reasons["direct_reads"] == (
        "O_DIRECT: 2.4 GB/s at 16.0 MiB and depth 4, against 1.1 GB/s through the page cache; "
        "the experts (54.00 GiB) do not fit the 4.00 GiB of RAM beyond the plan"
    )
    assert found.reasons["io_threads"] == "2 threads: 2.3 GB/s at 16.0 MiB, and the best of up to 8 is 2.4 GB/s"


def test_the_request_size_that_is_nearest_by_ratio_counts(tmp_path, measured):
    assert chosen(measured, tmp_path, expert_bytes=5 * MIB).direct_reads
    assert not chosen(measured, tmp_path, expert_bytes=3 * MIB).direct_reads


def test_where_the_page_cache_is_faster_even_cold_it_is_used(tmp_path, measured):
    found = chosen(measured, tmp_path, expert_bytes=MIB)
    assert not found.direct_reads and found.io_threads == 4
    assert "3.0 GB/s at 1.0 MiB and depth 4 when cold, against 1.1 GB/s with O_DIRECT" in found.reasons["direct_reads"]


def test_experts_that_fit_beyond_the_plan_stay_in_the_page_cache(tmp_path, measured):
    found = chosen(measured, tmp_path, spare_bytes=60 * GIB)
    assert not found.direct_reads and "fit the 60.00 GiB" in found.reasons["direct_reads"]
    assert chosen(measured, tmp_path, spare_bytes=55 * GIB).direct_reads, "10% of margin"
    assert chosen(None, tmp_path, spare_bytes=60 * GIB).direct_reads is False


@pytest.mark.parametrize(("expert_bytes", "cold_direct"), [(9 * MIB, True), (MIB, False)])
def test_of_experts_that_fit_what_is_cold_is_read_past_the_page_cache_where_that_is_nearly_as_fast(
    tmp_path, measured, expert_bytes, cold_direct
):
    found = chosen(measured, tmp_path, spare_bytes=60 * GIB, expert_bytes=expert_bytes)
    assert found.cold_direct is cold_direct and not found.direct_reads
    said = "what it lacks is read past it the first time: O_DIRECT: 2.4 GB/s at 16.0 MiB and depth 4, against 1.1 GB/s"
    assert (said in found.reasons["direct_reads"]) is cold_direct
    assert chosen(None, tmp_path, spare_bytes=60 * GIB, expert_bytes=expert_bytes).cold_direct, "MIB or more"
    assert not chosen(None, tmp_path, spare_bytes=60 * GIB, expert_bytes=MIB - 1).cold_direct
    unmeasured = made_up(disk(*(rate for rate in CURVES if not rate.direct), key=filesystem_key(tmp_path), refused="refused"))
    assert not chosen(unmeasured, tmp_path, spare_bytes=60 * GIB).cold_direct


@pytest.mark.parametrize(("past", "direct"), [(1.82e9, True), (1.78e9, False)])
def test_nine_tenths_of_the_rate_suffice_past_the_page_cache_since_that_saves_a_copy(tmp_path, past, direct):
    disks = made_up(disk(DiskRate(True, MIB, 1, past), DiskRate(False, MIB, 1, 2e9), key=filesystem_key(tmp_path)))
    cold = chosen(disks, tmp_path, spare_bytes=60 * GIB)
    assert (cold.cold_direct, cold.io_threads) == (direct, 1 + direct), "a second thread reads while the first copies"
    assert chosen(disks, tmp_path).direct_reads is direct


def test_copies_out_of_the_page_cache_take_no_more_threads_than_cores(tmp_path, measured):
    assert chosen(measured, tmp_path, expert_bytes=MIB, spare_bytes=60 * GIB, cores=2).io_threads == 1
    assert chosen(measured, tmp_path, expert_bytes=MIB, spare_bytes=60 * GIB, cores=4).io_threads == 4
    many = chosen(measured, tmp_path, expert_bytes=MIB, spare_bytes=60 * GIB, cores=64)
    assert many.io_threads == 4 and "up to 8" in many.reasons["io_threads"]


@pytest.mark.parametrize(("expert_bytes", "direct"), [(MIB, True), (MIB - 1, False)])
def test_without_a_profile_the_size_of_an_expert_decides(tmp_path, expert_bytes, direct):
    for profile in (None, made_up(disk(*CURVES, key="elsewhere"))):
        found = chosen(profile, tmp_path, expert_bytes=expert_bytes)
        assert found.direct_reads is direct and found.io_threads == 2
        assert all("run vismoe doctor" in reason for reason in found.reasons.values())


def test_a_filesystem_without_o_direct_is_read_through_the_page_cache(tmp_path):
    profile = made_up(disk(*(rate for rate in CURVES if not rate.direct), key=filesystem_key(tmp_path), refused="refused here"))
    found = chosen(profile, tmp_path)
    assert not found.direct_reads and "refused here" in found.reasons["direct_reads"]


def test_no_more_threads_than_the_link_to_the_gpu_can_use(tmp_path, measured):
    link = LinkRates("cuda:0", (LinkRate(False, MIB, 5e8), LinkRate(True, MIB, 1.2e9)), 3e12, None)
    found = chosen(dataclasses.replace(measured, links=(link,)), tmp_path, device="cuda")
    assert found.io_threads == 2 and "link copies 1.2 GB/s" in found.reasons["io_threads"]
    assert "a second thread reads while the first copies" in found.reasons["io_threads"]
    assert chosen(dataclasses.replace(measured, links=(link,)), tmp_path, device="cuda:1").io_threads == 2


BASE = made_up()
RATES = st.lists(
    st.builds(
        DiskRate,
        st.booleans(),
        st.sampled_from([4096, 65536, MIB, 16 * MIB]),
        st.integers(1, 64),
        st.floats(1e3, 1e11),
    ),
    max_size=12,
)


@given(
    rates=st.none() | RATES,
    link=st.none() | st.floats(1e3, 1e12),
    expert_bytes=st.integers(1, 2**40),
    checkpoint_bytes=st.integers(1, 2**44),
    spare_bytes=st.integers(-(2**40), 2**44),
    cores=st.integers(1, 512),
)
def test_any_choice_has_one_to_eight_threads_and_a_reason_for_each_field(
    rates, link, expert_bytes, checkpoint_bytes, spare_bytes, cores
):
    links = (LinkRates("cuda:0", (LinkRate(True, MIB, link),), 1e12, None),) if link else ()
    profile = None if rates is None else dataclasses.replace(BASE, disks=(disk(*rates, key=filesystem_key("/")),), links=links)
    sizes = {"expert_bytes": expert_bytes, "checkpoint_bytes": checkpoint_bytes}
    found = choose(profile, **sizes, spare_bytes=spare_bytes, cores=cores, device="cuda", path="/")
    assert 1 <= found.io_threads <= 8
    assert set(found.reasons) == {"direct_reads", "io_threads"} and all(found.reasons.values())
    more = choose(profile, **sizes, spare_bytes=2 * checkpoint_bytes, cores=cores, device="cuda", path="/")
    assert not more.direct_reads, "with room for all experts the page cache always wins"
    assert found.cold_direct or not found.direct_reads
    if (found.cold_direct or more.cold_direct) and rates:
        assert any(rate.direct for rate in rates)


# ------------------------------------------------------------------ ceilings
def test_a_resident_model_is_bound_by_its_memory_and_a_missing_one_by_the_disk(tmp_path, measured):
    qwen = next(size for size in EXAMPLES if size.name == "Qwen3-30B-A3B")
    assert qwen.experts_bytes == 54 * GIB and qwen.token_experts_bytes == 48 * 8 * 9 * MIB
    resident = resident_tokens_per_s(measured, qwen, "cpu")
    assert resident == pytest.approx(4e10 / (qwen.token_experts_bytes + qwen.dense_bytes))
    arrives = miss_bytes_per_s(measured, qwen, chosen(measured, tmp_path), 20 * GIB, str(tmp_path))
    assert arrives == 2.4e9
    quarter, half = (tokens_per_s(measured, qwen, "cpu", share, arrives) for share in (0.25, 0.5))
    assert quarter == pytest.approx(2 * half) == pytest.approx(2.4e9 / (0.25 * qwen.token_experts_bytes))
    assert tokens_per_s(measured, qwen, "cpu", 0.25, 1e15) == resident


def test_a_model_that_fits_twice_misses_into_the_page_cache(tmp_path, measured):
    demo = EXAMPLES[0]
    assert miss_bytes_per_s(measured, demo, chosen(measured, tmp_path), GIB, str(tmp_path)) == 1e10
    assert miss_bytes_per_s(BASE, demo, chosen(measured, tmp_path), GIB, str(tmp_path)) is None


def test_on_a_gpu_its_own_memory_bounds_a_resident_model():
    link = LinkRates("cuda:0", (), 3e12, None)
    assert resident_tokens_per_s(dataclasses.replace(BASE, links=(link,)), EXAMPLES[2], "cuda") == pytest.approx(
        3e12 / (EXAMPLES[2].token_experts_bytes + EXAMPLES[2].dense_bytes)
    )


def test_what_is_spare_is_what_auto_leaves():
    assert spare_bytes(EXAMPLES[1], 100 * GIB) == 100 * GIB - (EXAMPLES[1].experts_bytes + EXAMPLES[1].dense_bytes)
    assert spare_bytes(EXAMPLES[1], 10 * GIB) == 10 * GIB - int(8 * GIB)
