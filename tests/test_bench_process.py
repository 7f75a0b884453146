"""Real workers: cold requests that read from storage, memory that is the worker's own, and no worker that outlives its parent."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vismoe.bench import process
from vismoe.bench.job import Job
from vismoe.bench.limits import Groups, cached_bytes, drop_caches, imports_bytes
from vismoe.bench.process import disk_bytes, release_mapped
from vismoe.bench.run import run_job
from vismoe.bench.subject import GeneratedModel, generate, gguf_of
from vismoe.config import Settings
from vismoe.errors import ConfigError
from vismoe.models.load.preview import preview

MIB = 2**20
ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="read from Linux's /proc")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A generated checkpoint whose experts are stacked on disk, so that transformers maps them."""
    return generate(tmp_path_factory.mktemp("bench"), GeneratedModel("tiny", 4), quiet=True)


def job_of(contestant, subject, **fields):
    settings = {"memory": "50%", "context": 40}
    job = Job(contestant, subject.name, "bfloat16", "cpu", tuple(range(20, 52)), 4, 1, 1, 0, settings)
    return replace(job, files=tuple(map(str, subject.files)), **fields)


def printed(code: str) -> str:
    """What Python says about `code`, in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def skip_where_reads_are_not_counted(file: Path) -> None:
    before = disk_bytes()
    if before is None or drop_caches([file]):
        pytest.skip(f"{file} cannot be made cold here, or nobody counts what is read")
    file.read_bytes()
    if not (disk_bytes() or 0) - before:
        pytest.skip(f"reads from the file system of {file} are not counted")


@pytest.fixture(scope="module")
def limit(tiny) -> Groups | ConfigError:
    """Leaves VisMoE no more than its imports beside the budget; or why there is none."""
    plan = preview(tiny.name, Settings.of(memory="50%", context=40, kernels="auto"))
    try:
        return Groups(plan.budget_bytes + imports_bytes())
    except ConfigError as error:
        return error


@pytest.fixture(scope="module")
def within_the_limit(tiny, limit):
    """What a worker of VisMoE found there, or without a limit where there is none."""
    return run_job(job_of("vismoe", tiny), limit if isinstance(limit, Groups) else Groups(None))


@pytest.mark.parametrize("contestant", ["vismoe", "transformers", "llama.cpp-mmap"])
def test_a_cold_request_reads_its_experts_from_storage_and_a_warm_one_does_not_read_more(contestant, tiny, request):
    skip_where_reads_are_not_counted(tiny.files[0])
    job = job_of(contestant, tiny)
    if contestant.startswith("llama"):
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by hand")
        pytest.importorskip("gguf")
        file = str(gguf_of(tiny, quiet=True))
        job = replace(job, gguf=file, files=(file,))
    found = request.getfixturevalue("within_the_limit") if contestant == "vismoe" else run_job(job, Groups(None))
    assert "failed" not in found, found["failed"]
    assert found["cached_bytes"] <= 0.05 * found["files_bytes"] and found["files_bytes"] > tiny.inventory.total_bytes
    cold, warm = found["requests"]
    assert cold["prefill_disk_bytes"] > 0.5 * tiny.inventory.total_bytes
    assert warm["prefill_disk_bytes"] < cold["prefill_disk_bytes"]


@linux
def test_pages_that_this_process_has_mapped_are_released_and_private_copies_stay(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(4 * MIB))
    os.sync()
    if drop_caches([file]):
        pytest.skip(f"{file} cannot be made cold here")
    with file.open("rb") as opened:
        read_only = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        private = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert sum(read_only[::4096]) == sum(private[::4096])
    private[:5] = b"mine!"
    if drop_caches([file]) < 4 * MIB:
        pytest.skip("pages in use can be dropped here as they are")
    release_mapped([file])
    assert drop_caches([file]) == cached_bytes(file) <= MIB
    assert private[:5] == b"mine!" and private[5:] == read_only[5:]


@linux
def test_memory_that_takes_the_place_of_a_mapping_is_not_released(tmp_path, monkeypatch):
    """A file is mapped while it is asked for what is cached, and other memory may lie there at once: one waits for the other."""
    file, asking = tmp_path / "weights", []
    file.write_bytes(os.urandom(MIB))

    def advise(*place):
        asking.append(threading.Thread(target=cached_bytes, args=[file]))
        asking[-1].start()
        asking[-1].join(0.5)
        assert asking[-1].is_alive()

    monkeypatch.setattr(process, "advise", advise)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ):
        release_mapped([file])
    for thread in asking:
        thread.join()
    assert asking


@linux
def test_the_peak_is_not_that_of_a_fat_parent():
    child = "from vismoe.bench.process import peak_rss_bytes; print(peak_rss_bytes())"
    fat = f"hog = bytearray(b'x') * {300 * MIB}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 2 * MIB < int(printed(fat)) < 200 * MIB


@linux
def test_a_worker_ends_with_its_parent_however_that_ends():
    child = (
        "from vismoe.bench.process import die_with_parent; import time; "
        "die_with_parent(); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        orphan = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    until_s = time.monotonic() + 20
    while _runs(orphan) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not _runs(orphan)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_worker_of_llama_cpp_carries_neither_torch_nor_transformers():
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source, by hand")
    code = (
        "import contextlib, sys; from vismoe.bench import worker; import llama_cpp; "
        "worker._loader_of('llama.cpp-mmap', None, contextlib.ExitStack()); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), 'vismoe.bench.llama_runner' in sys.modules)"
    )
    assert printed(code).strip() == "[] True"


def test_vismoe_finishes_under_a_limit_that_leaves_no_more_than_its_imports_beside_the_budget(limit, within_the_limit):
    if isinstance(limit, ConfigError):
        pytest.skip(f"no control group can be made here: {limit}")
    assert "failed" not in within_the_limit, within_the_limit["failed"]
