"""`vismoe gpu-check` without a GPU: stages that end in every way, the report after each, and what the figures become."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from vismoe.bench.gpu_check import contest, runner, stages, summary
from vismoe.bench.gpu_check import machine as gpu_machine
from vismoe.bench.gpu_check import rates as gpu_rates
from vismoe.bench.gpu_check.stages import NAMES, STAGES, CheckStage, chosen
from vismoe.bench.gpu_check.tests import run_tests
from vismoe.bench.subject import GeneratedModel, generate
from vismoe.cli import gpu_check as command
from vismoe.cli.main import command_parser, main
from vismoe.errors import ConfigError

OPTIONS = {"shares": (100.0, 25.0), "prompts": (24, 8), "layers": 2, "small_layers": 2, "device": "cpu", "geometry": "tiny"}
FAKE = """
import json, os, pathlib, signal, subprocess, sys, time
what, file = sys.argv[1:]
options = json.load(sys.stdin)
keep = lambda found: pathlib.Path(file).write_text(json.dumps(found))
"""
WAYS = {
    "good": "keep({'rows': [], 'folder': options['folder']})",
    "fails": "keep({'failures': ['one', 'two']})",
    "crashes": "keep({'kept': 1}); print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    "breaks": "keep({'kept': 1, 'error': 'ValueError: no'}); sys.exit(1)",
    "late": "keep({'kept': 1}); child = subprocess.Popen(['sleep', '60']); "
    "pathlib.Path(options['folder'], 'child').write_text(str(child.pid)); time.sleep(60)",
    "interrupts": "keep({'kept': 1}); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)",
    "skips": "keep({'passed': 0, 'skipped': 3, 'failed': 0, 'reasons': ['no triton'], 'failures': []})",
}


def worker() -> tuple[str, ...]:
    """A stage process that does what its stage's `calls` names."""
    return sys.executable, "-c", FAKE + f"exec({WAYS!r}[what])"


def fake(name: str, checkpoint: str | None = None, deadline_s: float = 30) -> CheckStage:
    return CheckStage(name, deadline_s, "a fake", name, checkpoint=checkpoint)


def run(tmp_path, *fakes, **options):
    report = {"stages": []}
    out = tmp_path / "out.json"
    whole = runner.run_stages(fakes, {"folder": str(tmp_path), **options}, out, report, worker=worker())
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    return report["stages"], whole


# ------------------------------------------------------------------ the runner
def test_every_end_of_a_stage_has_its_status_and_keeps_what_was_found(tmp_path):
    rows, whole = run(tmp_path, *(fake(name) for name in ("good", "fails", "crashes", "breaks", "skips")))
    assert whole and [row["status"] for row in rows] == ["done", "failed", "failed", "failed", "skipped"]
    good, fails, crashes, breaks, _ = rows
    assert good["result"] == {"rows": [], "folder": str(tmp_path)} and good["failed"] is None and good["log"] == []
    assert fails["failed"] == "one; two"
    assert crashes["failed"] == "signal SIGSEGV" and crashes["result"] == {"kept": 1} and crashes["log"] == ["last words"]
    assert breaks["failed"] == "ValueError: no" and breaks["result"] == {"kept": 1}


def test_a_late_stage_is_killed_with_its_children_and_the_next_one_runs(tmp_path, monkeypatch):
    """The deadline passes when the stage has a child, however slow this machine is."""
    wait, child = subprocess.Popen.wait, tmp_path / "child"

    def until_late(process, timeout=None):
        while timeout == 5 and not (child.exists() and child.read_text()):
            time.sleep(0.02)
        return wait(process, 0 if timeout == 5 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_late)
    rows, whole = run(tmp_path, fake("late", deadline_s=5), fake("good"))
    assert whole and [row["status"] for row in rows] == ["late", "done"] and rows[0]["result"] == {"kept": 1}
    for _ in range(100):  # until init has taken note of its end
        status = Path(f"/proc/{child.read_text()}/status")
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"process {child.read_text()} outlived its stage")


def test_the_report_is_there_after_each_stage(tmp_path, monkeypatch):
    written, write = [], runner.write
    monkeypatch.setattr(runner, "write", lambda out, report: (write(out, report), written.append(json.loads(out.read_text()))))
    run(tmp_path, fake("good"), fake("fails"))
    assert [[row["stage"] for row in report["stages"]] for report in written] == [["good"], ["good", "fails"]]


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    rows, whole = run(tmp_path, fake("good"), fake("interrupts"), fake("good"))
    assert not whole and [row["status"] for row in rows] == ["done", "interrupted"] and rows[1]["result"] == {"kept": 1}


def test_a_stage_is_waited_for_where_no_signal_interrupts(tmp_path, monkeypatch):
    """Ctrl-C between two steps of `Popen.wait` would leave its lock taken, and the runner waiting for ever."""
    waited, wait = [], subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *given: waited.append(threading.current_thread()) or wait(*given))
    rows, _ = run(tmp_path, fake("late", deadline_s=1), fake("interrupts"))
    assert [row["status"] for row in rows] == ["late", "interrupted"]
    assert len(waited) == 2 and threading.main_thread() not in waited


def test_generated_weights_are_deleted_after_the_last_stage_that_needs_them_and_nothing_else_is(tmp_path):
    def make(name):
        folder = tmp_path / name / "tiny-2-layers-skew-0-seed-0"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "mine.txt").write_text("not generated")
        return folder

    small, large = make("small"), make("large")
    run(tmp_path, fake("good", "small"), fake("good", "large"), keep=True)
    assert small.exists() and large.exists()
    run(tmp_path, fake("good", "large"))
    assert small.exists() and not large.exists() and (tmp_path / "large" / "mine.txt").exists()
    rows, _ = run(tmp_path, fake("fails", "small"), fake("good", "small"))
    assert not small.exists() and rows[0]["status"] == "failed"


# ------------------------------------------------------------------ stages
def test_the_deadlines_leave_nine_minutes():
    assert sum(stage.deadline_s for stage in STAGES) < 9 * 60
    assert {stage.checkpoint for stage in STAGES if stage.checkpoint} == set(stages.STORES)


def test_stages_are_chosen_by_name_and_by_what_is_there():
    assert [stage.name for stage in chosen(["rates", "facts"], has_gpu=True)] == ["facts", "rates"]
    assert [stage.name for stage in chosen([], has_gpu=False)] == ["facts", "kernels", "streams"]
    with pytest.raises(ConfigError, match=r"--stages rats: no such stage\. Fix: choose among facts"):
        chosen(["rats"], has_gpu=True)
    with pytest.raises(ConfigError, match="--stages rates need a GPU, and torch sees none here"):
        chosen(["rates"], has_gpu=False)


def test_each_stage_calls_a_function_that_is_there():
    import importlib

    for stage in STAGES:
        module, _, function = stage.calls.partition(":")
        assert callable(getattr(importlib.import_module(f"vismoe.bench.gpu_check.{module}"), function))


def test_tests_are_counted_and_missing_ones_named(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.bench.gpu_check.tests.cores", lambda: 1)
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n@pytest.mark.skip(reason='no GPU')\ndef test_c(): pass\n"
    )
    found = run_tests({"files": ["test_some.py", "test_none.py"]}, lambda result: None, folder)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["missing"] == ["test_none.py"] and found["reasons"] == ["no GPU"]
    assert found["failures"][0].startswith("test_b: ") and "1 == 2" in found["failures"][0]
    none = run_tests({"files": ["test_none.py"]}, lambda result: None, folder)
    assert none["passed"] == 0 and none["reasons"] == [f"test_none.py is not in {folder}"]
    installed = run_tests({"files": ["test_some.py"]}, lambda result: None, tmp_path / "site-packages" / "tests")
    assert "an installed package has no tests" in installed["reasons"][0]
    (folder / "test_some.py").write_text("import pytest\npytest.importorskip('nothing_of_this_name', reason='no triton')\n")
    (folder / "test_wrong.py").write_text("import nothing_of_this_name\n")
    skipped = run_tests({"files": ["test_some.py"]}, lambda result: None, folder)
    assert (skipped["passed"], skipped["failed"], skipped["skipped"]) == (0, 0, 1) and "no triton" in skipped["reasons"][0]
    assert run_tests({"files": ["test_wrong.py"]}, lambda result: None, folder)["failed"] == 1
    (folder.parent / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    with pytest.raises(RuntimeError, match=r"pytest ended with exit code 4: .*--no-such-flag"):
        run_tests({"files": ["test_some.py"]}, lambda result: None, folder)


class Lane:
    """Stands in for a stream and for an event of torch.cuda."""

    def record_event(self):
        return self

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


def test_every_rate_is_measured_and_kept_as_it_comes(monkeypatch):
    """The logic, with the CPU in place of the GPU: each kind of memory, size and number of streams has its row."""
    locked = []
    library = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: locked.append(nbytes) or 0, cudaHostUnregister=lambda address: 0
    )
    stand_ins = {"Stream": Lane, "current_stream": Lane, "synchronize": lambda device=None: None, "cudart": lambda: library}
    stand_ins |= {"stream": lambda lane: contextlib.nullcontext(), "mem_get_info": lambda device: (2**26, 2**26)}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    for name, value in {"SIZES_BYTES": (4096, 8192), "POINT_S": 1e-4, "CALLS": 3}.items():
        monkeypatch.setattr(gpu_rates, name, value)
    monkeypatch.setattr(gpu_rates, "driver_function", str)
    monkeypatch.setattr("vismoe.machine.rates.LINK_REQUESTS_BYTES", (4096,))
    monkeypatch.setattr("vismoe.machine.rates._gpu_seconds", lambda work, device: work() is None or 0.5)
    kept = {}
    found = gpu_rates.measure_rates({"device": "cpu"}, kept.update)
    rows = [(row["kind"], row["request_bytes"], row["streams"]) for row in kept["copies"]]
    assert rows == list(itertools.product(gpu_rates.KINDS, (4096, 8192), gpu_rates.STREAMS))
    assert all(row["bytes_per_s"] > 0 for row in kept["copies"]) and locked[:2] == [8 * 4096, 8 * 8192]
    assert kept["link"]["registered"] and kept["batch_copy"] == "the driver has cuMemcpyBatchAsync_v2"
    assert len(found["delays_us"]) == 5 and all(us > 0 for us in found["delays_us"].values())


def test_facts_of_a_gpu_are_read(monkeypatch, tmp_path):
    """With the CPU in place of the GPU and a script in place of nvidia-smi, which counts 512 MiB more the second time."""
    (tmp_path / "0000:18:00.0").mkdir()
    (tmp_path / "0000:18:00.0" / "numa_node").write_text("1\n")
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/calls\n"
        f'echo "570.1, 5, 5, 16, 16, 00000000:18:00.0, $(($(wc -l < {tmp_path}/calls) * 512))"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_machine, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(gpu_machine, "GIB", 2**16)
    status = [0, 0, 0, 2]
    library = SimpleNamespace(cudaHostRegister=lambda *_: status.pop(0), cudaHostUnregister=lambda address: 0)
    stand_ins = {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "mem_get_info": lambda: (3, 5),
        "cudart": lambda: library,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    kept = {}
    found = gpu_machine.facts_of_gpu({"device": "cpu"}, kept.update)
    assert kept["nvidia_smi"]["driver_version"] == "570.1" and kept["numa_node"] == 1
    assert kept["context_bytes"] == 512 * 2**20 and (kept["device_used_bytes"], kept["total_bytes"]) == (2, 5)
    assert set(found["page_lock_s_per_gib"]) == {"untouched", "touched", "by the pager"}
    with pytest.raises(RuntimeError, match=r"was not page-locked \(CUDA error 2\)\. Fix: ulimit"):
        gpu_machine.facts_of_gpu({"device": "cpu"}, kept.update)


# ------------------------------------------------------------------ contest
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("weights"), GeneratedModel("tiny", 2), quiet=True)


def test_a_contest_is_run_by_the_workers_of_the_benchmark(tiny, tmp_path):
    """On the CPU, ours alone: the row has every figure that needs no GPU, and rows of one format must agree."""
    kept = []
    found = contest._run([contest.ours(OPTIONS, 25.0)], OPTIONS | {"folder": str(tmp_path)}, kept.append, "layers")
    (row,) = found["rows"]
    assert found["failures"] == [] and kept[-1]["rows"] == [row] and row["name"] == "vismoe raw 25%"
    assert set(row["first_token_s"]) == {"24", "8"} and len(row["token_ids"]) == contest.NEW_TOKENS
    rate = row["decode_tokens_per_s"]
    assert 0 < rate["low"] <= rate["median"] <= rate["high"] and 0 < row["hits"] < 1 and row["link_bytes_per_token"] == 0
    assert row["decode_bytes"] == contest.decode_bytes(tiny, contest.ours(OPTIONS, 100.0))
    assert contest.other_answers([row, {**row, "name": "b"}]) == []
    assert contest.other_answers([row, {**row, "name": "b", "token_ids": [1]}]) == ["b gave other tokens than vismoe raw 25%"]
    by_the_cpu = {**row, "token_ids": [1], "computed_on_host": 1}
    assert contest.other_answers([row, by_the_cpu]) == contest.other_answers([by_the_cpu, row]) == []


def test_a_picture_is_timed_where_the_bundled_model_cannot_be_asked(tmp_path, monkeypatch):
    missing = ConfigError("images of Qwen models need the package qwen-vl-utils. Fix: pip install qwen-vl-utils")
    monkeypatch.setattr(contest, "load", Mock(side_effect=missing))

    def ran(entrants, *rest, meanwhile):
        meanwhile()
        return {"rows": [one.name for one in entrants], "failures": []}

    monkeypatch.setattr(contest, "_run", ran)
    found = contest.image(OPTIONS | {"folder": str(tmp_path)}, lambda kept: None)
    assert found["rows"] == ["vismoe raw 25% with a picture"]
    assert found["failures"] == [f"the bundled model was not asked: {missing}"]


def test_a_share_is_one_of_the_experts_whatever_their_format():
    assert contest.ours(OPTIONS, 100.0).settings["memory"] == "100%"
    assert contest.ours(OPTIONS, 25.0).settings["memory"] == "25.001%"
    waiting = contest.ours(OPTIONS, 25.0, waiting=True)
    assert waiting.name == "vismoe raw 25%, misses wait" and waiting.settings["misses"] == "wait"
    int4 = contest.ours(OPTIONS, 50.0, "int4")
    assert int4.settings == {"memory": "13.282%", "format": "int4"} and int4.prompts == (24, 8)


def test_jobs_differ_only_where_programs_do(tiny, tmp_path):
    options = OPTIONS | {"folder": str(tmp_path)}
    job = contest.job_of(contest.ours(options, 25.0, "int4"), tiny, options)
    assert job.settings["context"] == 24 + contest.NEW_TOKENS and job.settings["store"].endswith(".store")
    assert job.first_tokens == (8, 8) and len(job.token_ids) == 24 and job.files == ()
    theirs = contest.job_of(contest.CheckEntrant("accelerate", (8,), "accelerate", new_tokens=4), tiny, options)
    assert theirs.settings == {} and theirs.offload_folder.startswith(str(tmp_path)) and theirs.new_tokens == 4
    assert 0 < theirs.held_bytes < tiny.weights_bytes and theirs.token_ids == job.token_ids[:8]


# ------------------------------------------------------------------ figures
def row(name, way="vismoe", rate=10.0, first=1.0, **more):
    figures = {"decode_tokens_per_s": {"low": rate, "median": rate, "high": rate}, "first_token_s": {"512": first, "2048": 9.0}}
    return {"name": name, "way": way, "failed": None, "format": "raw", "decode_bytes": 1e9, **figures, **more}


def a_report():
    ours = row("vismoe raw 25%", hits=0.25, link_bytes_per_token=2e9, peak_reserved_bytes=7e9, planned_bytes=7e9)
    accelerate = row("accelerate", "accelerate", 0.4) | {"first_token_s": {"2048": 36.0}}
    rows = [ours, row("transformers", "transformers", 20.0), accelerate, row("vismoe raw 100%", rate=20.0)]
    rows.append(ours | {"name": "vismoe raw 25%, misses wait"})
    alike = [row("vismoe raw 100%", rate=9.0), row("transformers", rate=5.0), row("transformers-compiled", rate=10.0)]
    alike.append(row("vismoe int4 100%", rate=13.5))
    link = {"rates": [{"page_locked": True, "bytes_per_s": 5e10}, {"page_locked": False, "bytes_per_s": 9e10}]}
    rates = {"link": link | {"device_read_bytes_per_s": 1e12}, "copies": [], "batch_copy": "none"}
    results = {"facts": {"context_bytes": 5e8, "machine": {"gpus": []}}, "rates": rates, "contest": {"rows": rows, "layers": 16}}
    results["resident"] = {"rows": alike, "layers": 4}
    done = {"status": "done", "seconds": 1.0, "failed": None}
    return {
        "stages": [{"stage": name, "result": found, **done} for name, found in results.items()],
        "not_done": ["whole: not reached"],
    }


def test_ratios_and_shares_by_hand():
    report = a_report()
    summary.summarise(report)
    ours, resident, *_ = report["stages"][2]["result"]["rows"]
    assert ours["ceiling_share"] == pytest.approx(10 * 2e9 / 5e10)  # the link binds, at its page-locked rate
    assert resident["ceiling_share"] == pytest.approx(20 * 1e9 / 1e12) and resident["bytes_over_plan"] is None
    assert ours["bytes_over_plan"] == 5e8
    assert [(goal["ratio"], goal["reached"]) for goal in report["goals"]] == [
        (25.0, True), (0.25, True), (0.5, True), (0.4, False), (0.9, True), (1.5, True)
    ]  # fmt: skip
    text = summary.printed(report)
    for word in ("vismoe raw 25%", "40%", "2.00 GB", "0.50 GB", ">= 20", "reached", "whole: not reached", "25%"):
        assert word in text


def test_a_missing_row_leaves_its_ratios_unknown():
    report = a_report()
    report["stages"][2]["result"]["rows"][2] |= {"failed": "out of memory", "decode_tokens_per_s": None, "first_token_s": None}
    summary.summarise(report)
    assert [goal["reached"] for goal in report["goals"]] == [None, None, True, False, True, True]
    assert "failed" in summary.printed(report)


# ------------------------------------------------------------------ the command
def test_without_a_gpu_it_runs_what_needs_none(tmp_path, monkeypatch, capsys):
    """Reduced to the stage of facts; the tests of kernels and streams run in the suite itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(["gpu-check", "--stages", "facts,contest", "--out", "first.json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads((tmp_path / "first.json").read_text()) and not report["interrupted"]
    assert [(one["stage"], one["status"]) for one in report["stages"]] == [("facts", "done")]
    assert report["stages"][0]["result"]["machine"]["ram_bytes"] > 0
    assert report["not_done"] == [f"contest: torch {torch.__version__} sees no GPU here"]
    assert "Routing: uniform" in printed.out and "[1/1] facts" in printed.err


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("skipped", 0), ("failed", 2), ("late", 2)])
def test_exit_codes(status, code, tmp_path, monkeypatch, capsys):
    def run_stages(stages, options, out, report, factor, progress):
        report["stages"] = [{"stage": "facts", "status": status, "seconds": 1.0, "failed": None, "result": {}}]
        return True

    monkeypatch.setattr(runner, "run_stages", run_stages)
    monkeypatch.chdir(tmp_path)
    assert main(["gpu-check", "--stages", "facts", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["stages"][0]["status"] == status


def test_room_on_the_disk_is_stated_before_anything_is_written(tmp_path, monkeypatch, capsys):
    def disk(free):
        monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free + command.SPARE_BYTES))

    options = OPTIONS | {"geometry": "qwen3-vl-30b-a3b", "layers": 16, "small_layers": 4, "keep": False}
    large = [stage for stage in STAGES if stage.checkpoint]
    disk(200e9)
    assert command.with_room(options, large, tmp_path)["whole_layers"] == 48
    assert "weights: at most 72.2" in (said := capsys.readouterr().err) and "deleted after the last stage" in said, said
    disk(50e9)
    found = command.with_room(options, large, tmp_path)
    assert 16 < found["whole_layers"] < 48 and found["disk_bytes"] <= 50e9
    assert f"{found['whole_layers']} of 48 layers" in capsys.readouterr().err
    disk(10e9)
    with pytest.raises(ConfigError, match="Fix: --folder on a larger disk"):
        command.with_room(options, large, tmp_path)
    assert command.with_room(options, [STAGES[0]], tmp_path) == {"disk_bytes": 0}


def test_help_names_every_stage(capsys):
    with pytest.raises(SystemExit):
        command_parser("gpu-check").parse_args(["--help"])
    words = capsys.readouterr().out.replace("\n", " ")
    assert all(name in words for name in NAMES)
    assert main(["gpu-check", "--out", os.path.join("nowhere", "x.json")]) == 2
