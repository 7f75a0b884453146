"""`vismoe doctor`: advice case by case, and the command with measuring scripted."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vismoe.cli import main as cli
from vismoe.cli.doctor_print import _link, age_of
from vismoe.engine.engine import demo_model
from vismoe.machine import rates as measuring
from vismoe.machine.advice import advise
from vismoe.machine.ceilings import EXAMPLES
from vismoe.machine.disk import filesystem_key
from vismoe.machine.facts import Facts, Gpu, facts, machine_key
from vismoe.machine.profile import Profile, load_profile, save_profile
from vismoe.machine.rates import DiskRate, DiskRates, DramRates, LinkRate, LinkRates, packed_extra
from vismoe.models.load.preview import decode_size, describe
from vismoe.pair import Format

GIB, MIB = 2**30, 2**20
HEALTHY = dataclasses.replace(
    facts(),
    machine_cores=8,
    affinity_cores=8,
    quota_cores=None,
    ram_bytes=64 * GIB,
    ram_total_bytes=64 * GIB,
    ram_free_bytes=48 * GIB,
    swap_used_bytes=0,
    memory_lock_limit_bytes=8 * MIB,
    huge_pages="madvise",
    steal_share=0.0,
    load_average=0.1,
    omp_threads=None,
    gpus=(),
    cuda_build=None,
    nvidia_driver=False,
)
GPU = Gpu("NVIDIA H200", 141 * GIB, "9.0", "32.0 GT/s x16")


def disk(best_bytes_per_s: float, key: str = "here", folder: str = "/models") -> DiskRates:
    rates = (DiskRate(True, MIB, 2, best_bytes_per_s), DiskRate(False, MIB, 2, best_bytes_per_s / 2))
    return DiskRates(key, folder, "ext4 on /dev/sda", 1e9, rates, 1e10, None)


def profile(*disks: DiskRates, links: tuple[LinkRates, ...] = (), found: Facts = HEALTHY) -> Profile:
    return Profile("m", 1e9, found, DramRates(GIB, 8, 1e11, 2e10), disks, links)


def link(locked: float | None) -> LinkRates:
    rates = (LinkRate(False, MIB, 3e9), *([LinkRate(True, MIB, locked)] if locked else []))
    return LinkRates("cuda:0", rates, 3e12, None if locked else "cudaHostAlloc failed", registered=True)


# ------------------------------------------------------------------ advice
def test_a_healthy_machine_gets_no_advice():
    fast = disk(3e9)
    on_gpu = dataclasses.replace(HEALTHY, gpus=(GPU,), cuda_build="12.8", nvidia_driver=True, omp_threads="8")
    assert advise(HEALTHY, None, None) == ()
    assert advise(HEALTHY, profile(fast), fast) == ()
    assert advise(on_gpu, profile(fast, links=(link(5e10),)), fast) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ram_total_bytes": 4 * GIB}, ("control group", "4.00 GiB of 64.00 GiB", "--memory")),
        ({"swap_used_bytes": 3 * GIB}, ("3.00 GiB are in swap",)),
        ({"huge_pages": "never"}, ("Transparent huge pages", "madvise")),
        ({"quota_cores": 2.5}, ("2.5 of 8 cores", "OMP_NUM_THREADS=2")),
        ({"affinity_cores": 2}, ("2 of 8 cores", "taskset")),
        ({"omp_threads": "16"}, ("OMP_NUM_THREADS=16", "8 cores", "wait for each other")),
        ({"omp_threads": "1"}, ("OMP_NUM_THREADS=1", "8 cores", "idle")),
        ({"steal_share": 0.07}, ("7%", "virtual machines")),
        ({"nvidia_driver": True}, ("NVIDIA driver", "without CUDA")),
        ({"nvidia_driver": True, "cuda_build": "12.8"}, ("sees no GPU", "CUDA_VISIBLE_DEVICES")),
    ],
)
def test_each_flaw_of_a_machine_is_named_with_its_numbers_and_a_remedy(change, words):
    (said,) = advise(dataclasses.replace(HEALTHY, **change), None, None)
    assert all(word in said for word in words)


def test_a_slow_disk_is_named_and_a_faster_one_that_was_measured():
    slow = disk(3e8)
    (said,) = advise(HEALTHY, profile(slow, disk(3.5e8, "too")), slow)
    assert "/models reads 0.3 GB/s" in said and "NVMe" in said
    (said,) = advise(HEALTHY, profile(slow, disk(4e9, "there", "/mnt/nvme"), disk(3.5e8, "too")), slow)
    assert "move the checkpoint to /mnt/nvme, which reads 4.0 GB/s" in said


def test_page_locking_that_was_refused_names_the_limit():
    (said,) = advise(HEALTHY, profile(links=(link(None),)), None)
    assert "cudaHostAlloc failed" in said and "8.0 MiB: ulimit -l" in said
    (said,) = advise(dataclasses.replace(HEALTHY, memory_lock_limit_bytes=None), profile(links=(link(None),)), None)
    assert "ulimit" not in said


def test_a_slow_link_is_named():
    (said,) = advise(HEALTHY, profile(links=(link(2.5e9),)), None)
    assert "cuda:0 copies 2.5 GB/s" in said and "PCIe" in said


def test_rates_of_a_busy_machine_are_doubted():
    busy = dataclasses.replace(HEALTHY, load_average=7.5)
    (said,) = advise(HEALTHY, profile(found=busy), None)
    assert "load 7.5 on 8" in said and "--refresh" in said


# ------------------------------------------------------------------ the command
@pytest.fixture
def measured(tmp_path, monkeypatch) -> list[str]:
    """Takes the place of measuring; what was asked for is in the list. The cache is a folder of the test's own."""
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []

    def made_up(path):
        return dataclasses.replace(disk(1e9 * (len(asked) + 1), filesystem_key(path), str(path)), measured_unix_s=time.time())

    def measure(path, quick=True, progress=False):
        asked.append(f"all {'quick' if quick else 'full'}")
        found = facts()
        return Profile(machine_key(found), time.time(), found, DramRates(GIB, 2, 4e10, 2e10), (made_up(path),), ())

    def measure_disk(path, quick=True, progress=False):
        asked.append("disk")
        return made_up(path)

    monkeypatch.setattr("vismoe.machine.measure.measure", measure)
    monkeypatch.setattr("vismoe.machine.measure.measure_disk", measure_disk)
    return asked


def test_json_is_one_object_with_facts_rates_choices_and_advice(measured, tmp_path, capsys):
    assert cli.main(["doctor", "--path", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["facts"]["cpu"] == facts().cpu and said["facts"]["usable_cores"] >= 1
    assert said["rates"]["dram"]["bytes_per_s"] == 4e10 and said["rates"]["disk"]["folder"] == str(tmp_path)
    assert said["rates"]["lossless"] == {"decoded_bytes_per_s": None, "packed_extra_s_per_byte": None}  # not in this profile
    assert [model["name"] for model in said["models"]] == [size.name for size in EXAMPLES]
    for model in said["models"]:
        assert isinstance(model["direct_reads"], bool) and 1 <= model["io_threads"] <= 8
        assert set(model["reasons"]) == {"direct_reads", "io_threads"}
        assert 0 < model["missing_tokens_per_s"]["50%"] <= model["missing_tokens_per_s"]["25%"] <= model["resident_tokens_per_s"]
    assert isinstance(said["advice"], list)


def test_figures_are_kept_shown_with_their_age_and_measured_again_when_asked(measured, tmp_path, capsys):
    assert cli.main(["doctor", "--path", str(tmp_path)]) == 0
    assert cli.main(["doctor", "--path", str(tmp_path)]) == 0
    assert measured == ["all full"]
    kept = load_profile()
    save_profile(dataclasses.replace(kept, measured_unix_s=time.time() - 7300))
    capsys.readouterr()
    assert cli.main(["doctor", "--path", str(tmp_path)]) == 0
    assert "measured 2 hours ago" in capsys.readouterr().out
    assert cli.main(["doctor", "--path", str(tmp_path), "--refresh", "--quick"]) == 0
    assert measured == ["all full", "all quick"]
    assert "measured just now" in capsys.readouterr().out


def test_kept_figures_are_shown_without_transformers(measured, tmp_path):
    assert cli.main(["doctor", "--path", str(tmp_path)]) == 0
    program = (
        "import sys; from vismoe.cli.main import main; "
        f"assert main(['doctor', '--path', {str(tmp_path)!r}]) == 0; "
        "assert not {'transformers', 'PIL', 'scipy', 'vismoe.engine', 'vismoe.models.load'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_disk_is_measured_alone_and_added(measured, tmp_path, monkeypatch, capsys):
    first = Profile(machine_key(facts()), 5.0, facts(), DramRates(GIB, 2, 1e9, 1e9), (disk(1e9, "elsewhere"),), ())
    save_profile(first)
    assert cli.main(["doctor", "--path", str(tmp_path), "--json"]) == 0
    assert measured == ["disk"]
    kept = load_profile()
    assert {each.key for each in kept.disks} == {"elsewhere", filesystem_key(tmp_path)} and kept.dram == first.dram
    assert cli.main(["doctor", "--path", str(tmp_path), "--refresh", "--json"]) == 0
    assert {each.key for each in load_profile().disks} == {"elsewhere", filesystem_key(tmp_path)}


def test_ctrl_c_while_measuring_keeps_what_was_kept(measured, tmp_path, monkeypatch, capsys):
    cli.main(["doctor", "--path", str(tmp_path), "--json"])
    before = load_profile()
    monkeypatch.setattr("vismoe.machine.measure.measure", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert cli.main(["doctor", "--path", str(tmp_path), "--refresh"]) == 130
    assert load_profile() == before


def test_a_cache_that_cannot_be_written_is_said_and_the_figures_are_shown(measured, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path / "file/cache"))
    assert cli.main(["doctor", "--path", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rates"]["dram"] and "Fix: set VISMOE_CACHE" in said.err


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path / "cache"))
    assert cli.main(["doctor", "--path", str(tmp_path / "nowhere"), "--json"]) == 2
    assert "neither a file nor a folder" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_tables_name_sizes_rates_choices_and_reasons(measured, tmp_path, capsys):
    save_profile(
        Profile(
            machine_key(facts()),
            5.0,
            facts(),
            DramRates(GIB, 2, 4e10, 2e10),
            (disk(2e9, filesystem_key(tmp_path)),),
            (link(5e10),),
            lossless_bytes_per_s=2.4e10,
            packed_extra_s_per_byte=9e-12,
        )
    )
    assert cli.main(["doctor", "--path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in ("40.0 GB/s with 2 threads", "50.0 GB/s page-locked", "1.0 MiB", "2.00", "Mixtral-8x7B", "O_DIRECT: 2.0 GB/s"):
        assert text in out
    assert "24.0 GB/s of bfloat16 are decoded" in out and "computed 9 us longer for each MB" in out


@pytest.mark.parametrize(("from_records_s", "extra_s"), [(0.5, 0.3), (0.1, 0.0)])
def test_computing_from_records_is_timed_beside_computing_from_weights(from_records_s, extra_s, monkeypatch):
    now_s, whole = 0.0, measuring.ExpertKernel.parts

    def parts(kernel, addresses, *rest):
        nonlocal now_s
        now_s += from_records_s if kernel.formats == (Format.LOSSLESS,) else 0.2
        whole(kernel, addresses, *rest)

    monkeypatch.setattr(measuring.ExpertKernel, "parts", parts)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now_s)
    expert_bytes = 2 * 3 * measuring.HIDDEN * measuring.INNER
    assert packed_extra(4 * expert_bytes) == pytest.approx(extra_s / (2 * expert_bytes))


def test_a_link_that_was_measured_another_way_than_the_pager_copies_says_so():
    found = link(5e10)
    assert "--refresh" not in _link(found)
    assert "50.0 GB/s page-locked (allocated so, not as the pager's: --refresh" in _link(
        dataclasses.replace(found, registered=False)
    )


def test_a_model_is_sized_from_its_configuration_as_the_example_says(measured, tmp_path, capsys):
    described, _ = describe(demo_model())
    assert decode_size("demo model", described) == EXAMPLES[0]
    assert cli.main(["doctor", str(demo_model()), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path(said["path"]) == Path(demo_model()) and said["models"][0]["expert_bytes"] == 73728


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "just now"), (60, "1 minute ago"), (7300, "2 hours ago"), (9e5, "10 days ago")]
)
def test_ages_are_said_in_one_unit(seconds, words):
    assert age_of(seconds) == words
