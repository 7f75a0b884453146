"""Workers in turn: who runs when, what is left of one that fails, is killed or interrupted, and how runs become figures."""

import dataclasses
import io
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.bench import run as runs
from vismoe.bench import worker
from vismoe.bench.benchmark import backbone_of
from vismoe.bench.job import COLD, WARM, BenchRequest, Contestant, Job, TokenTime, contestants_of
from vismoe.bench.limits import Groups
from vismoe.bench.report import Ceilings, Work, agreement, ceilings_json, measures, observed, spread, summary, warnings
from vismoe.bench.run import ReadyWorker, run_all, run_job
from vismoe.bench.turns import rotating
from vismoe.errors import ConfigError
from vismoe.store.read_ahead import WeightFiles

JOB = Job("vismoe", "model", "bfloat16", "cpu", (1, 2), 3, 2, 1, 0)
DONE = "import json, os, pathlib, signal, sys, time; job = json.loads(sys.stdin.read()); out = pathlib.Path(sys.argv[1]); "


def script(body: str) -> tuple[str, ...]:
    """A worker that runs `body` after reading its job."""
    return (sys.executable, "-c", DONE + body)


# ------------------------------------------------------------------ order
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.integers(1, 7))
def test_every_repeat_runs_everyone_once_and_begins_with_another(names, repeats):
    order = list(rotating(names, repeats))
    turns = [[name for turn, name in order if turn == repeat] for repeat in range(repeats)]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    assert [turn[0] for turn in turns] == [names[repeat % len(names)] for repeat in range(repeats)]


def names(*asked):
    return [one.name for one in contestants_of(*asked)]


def test_baselines_are_words_or_ways_and_ours_comes_first():
    assert names(["transformers"]) == ["vismoe", "transformers", "transformers-eager"]
    assert names(["transformers-eager", "accelerate"]) == ["vismoe", "transformers-eager", "accelerate"]
    with pytest.raises(ConfigError, match=r"no such baseline\. Fix: choose among transformers, accelerate, llama\.cpp"):
        contestants_of(["vllm"])


def test_every_format_is_a_contestant_and_llama_cpp_runs_in_its_partners(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    asked = ["accelerate", "llama.cpp-mmap"]
    assert names(asked, ["raw", "lossless", "int8", "int2"]) == [
        "vismoe", "vismoe lossless", "vismoe int8", "vismoe int2", "accelerate", "llama.cpp-mmap", "llama.cpp-mmap q8_0"
    ]  # fmt: skip
    assert names(asked, ["int4"]) == ["vismoe int4", "accelerate", "llama.cpp-mmap q4_0"]
    assert names([], ["packed", "int4"], ["torch", "fast"]) == [
        "vismoe packed torch", "vismoe packed fast", "vismoe int4 torch", "vismoe int4 fast"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no type comparable to int2\. Fix: --formats with raw, int8, int4"):
        names(asked, ["int2"])


def test_a_baseline_that_is_not_installed_is_refused_with_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        contestants_of(["llama.cpp"])


# ------------------------------------------------------------------ workers
def test_a_job_survives_json():
    job = Job(
        "accelerate", "m", "bfloat16", "cpu", (1, 2), 3, 2, 1, 9, {"memory": "25%"}, None, (64, 32), ("a",), None, "f", "t", True
    )
    assert Job.from_json(job.to_json()) == job
    assert Job.from_json(JOB.to_json()) == JOB


def test_a_worker_gets_its_job_and_threads_and_its_result_comes_back():
    body = "out.write_text(json.dumps({'echo': job['way'], 'threads': os.environ['OMP_NUM_THREADS']}))"
    found = run_job(JOB, Groups(None), script(body))
    assert found == {"echo": "vismoe", "threads": "1", "peak_bytes": None}


def test_a_worker_waits_for_its_job_and_ends_without_one(tmp_path):
    """It is started before the job is known; however the caller leaves, it does not outlive that."""
    with ReadyWorker("vismoe", 3, Groups(None), script("out.write_text(json.dumps({'model': job['model']}))")) as ready:
        assert ready.answer(replace(JOB, model="known later")) == {"model": "known later", "peak_bytes": None}
    pid = tmp_path / "pid"
    waiting = f"import os, pathlib, sys; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); sys.stdin.read()"
    with pytest.raises(OSError, match="no space"), ReadyWorker("vismoe", 1, Groups(None), (sys.executable, "-c", waiting)):
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        raise OSError("no space")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIG_DFL)
    with ReadyWorker("vismoe", 1, Groups(None), script("time.sleep(600)")) as ready:
        assert ready.answer(JOB, 0.5)["failed"] == "the worker was killed after 0 s"


def test_a_worker_that_breaks_is_reported_with_its_last_words():
    assert run_job(JOB, Groups(None), script("sys.exit('no such model')"))["failed"].endswith("exit code 1:\nno such model")
    killed = run_job(JOB, Groups(None), script("os.kill(os.getpid(), signal.SIGKILL)"))
    assert "signal SIGKILL" in killed["failed"]
    refused = run_job(JOB, Groups(None), script("out.write_text(json.dumps({'error': 'BudgetError: too small'}))"))
    assert refused["failed"] == "BudgetError: too small"


def test_who_failed_is_not_tried_again_and_the_others_go_on():
    body = "out.write_text(json.dumps({'error': 'no'} if job['way'] == 'a' else {'x': 1}))"
    jobs = {name: replace(JOB, way=name) for name in "ab"}
    begun = []
    outcome = run_all(jobs, 2, Groups(None), begun.append, script(body))
    assert [(run["contestant"], run["repeat"]) for run in outcome.runs] == [("a", 0), ("b", 0), ("b", 1)]
    assert len(begun) == 3 and not outcome.interrupted


def test_everybodys_files_are_dropped_before_each_worker(monkeypatch):
    """Or the weights that one contestant read fill the RAM of the next."""
    dropped = []
    monkeypatch.setattr(runs, "drop_caches", lambda files: dropped.append(set(files)))
    jobs = {name: replace(JOB, way=name, files=(f"{name}.bin", "shared.bin")) for name in "ab"}
    run_all(jobs, 2, Groups(None), worker=script("out.write_text(json.dumps({'x': 1}))"))
    assert dropped[0] == {"a.bin", "b.bin", "shared.bin"} and len(dropped) == 4 and len(set(map(frozenset, dropped))) == 1


def test_a_timeline_that_fails_does_not_lose_what_was_measured():
    measured = "out.write_text(json.dumps({'x': 1})); sys.exit('no space left')"
    found = run_job(replace(JOB, trace="t.json"), Groups(None), script(measured))
    assert found["x"] == 1 and "failed" not in found and found["trace_failed"].endswith("no space left")


def test_the_result_is_there_before_the_timeline_is_written(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "_loader_of", lambda way, files, reading: Runner)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(Runner, "trace", lambda self, path: seen.append((tmp_path / "result").exists()))
    monkeypatch.setattr(sys, "stdin", io.StringIO(replace(JOB, trace="t.json").to_json()))
    assert worker.main([str(tmp_path / "result"), "vismoe"]) == 0 and seen == [True]


def test_ctrl_c_ends_the_worker_and_keeps_what_was_measured(tmp_path):
    body = (
        "job['way'] == 'a' and (out.write_text('{\"x\": 1}'), sys.exit()); "
        "pathlib.Path(job['model']).write_text(str(os.getpid())); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    )
    jobs = {name: replace(JOB, way=name, model=str(tmp_path / "pid")) for name in "ab"}
    began_s = time.monotonic()
    outcome = run_all(jobs, 3, Groups(None), worker=script(body))
    assert outcome.interrupted and [run["contestant"] for run in outcome.runs] == ["a"]
    assert time.monotonic() - began_s < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIG_DFL)


def test_only_the_last_repeat_writes_a_timeline_and_the_offload_folder_goes(tmp_path):
    body = "out.write_text(json.dumps({'trace': job['trace'], 'there': os.path.isdir(job['offload_folder'])}))"
    folder = tmp_path / "offload"
    job = replace(JOB, offload_folder=str(folder), trace="t.json")
    outcome = run_all({"vismoe": job}, 2, Groups(None), worker=script(body))
    assert [(run["trace"], run["there"]) for run in outcome.runs] == [(None, True), ("t.json", True)]
    assert not folder.exists()


TIMED = TokenTime(
    2, 0.5, 0.1, {"experts": {"calls": 4, "seconds": 0.2, "bytes": 0}, "norms": {"calls": 8, "seconds": 0.1, "bytes": 20}}
)


class Runner:
    """A contestant that remembers what it was asked."""

    notes = {"experts": "none"}
    logits = (0.5, 0.25)

    def __init__(self, job):
        self.asked = []

    def request(self, state):
        self.asked.append(state)
        return request(state)

    def moe_s(self):
        self.asked.append("experts")
        return {"prefill": 0.5, "decode": 0.25}

    def token_time(self):
        self.asked.append("parts")
        return TIMED

    def trace(self, path):
        self.asked.append(path)


def request(state=WARM, decode_s=2.0, ids=(5, 6, 7), counters=None, prompt_tokens=4) -> BenchRequest:
    return BenchRequest(state, 0.0, 1.0, prompt_tokens, 0, decode_s, 2, ids, 100, 300, counters)


def test_a_worker_asks_cold_then_warm_and_drops_the_files_before(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(worker, "drop_caches", lambda paths: dropped.extend(map(str, paths)) or 5)
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "w").touch()
    (tmp_path / "weights").write_bytes(b"weights")
    job = replace(JOB, files=(str(tmp_path / "weights"),), offload_folder=str(tmp_path / "offload"), trace="t.json")
    answer, runner = worker.answer(job, Runner)
    assert [one.state for one in answer.requests] == [COLD, WARM, WARM]
    assert runner.asked == [COLD, WARM, WARM]
    assert dropped == [str(tmp_path / "weights"), str(tmp_path / "offload" / "w")]
    assert (answer.cached_bytes, answer.files_bytes, answer.logits, answer.moe_s) == (5, 7, (0.5, 0.25), None)


def test_bytes_that_loading_reads_are_counted(monkeypatch):
    counts = iter([100, 350, 400])
    monkeypatch.setattr(worker, "disk_bytes", lambda: next(counts))
    assert worker.answer(JOB, Runner)[0].load_disk_bytes == 250
    answer, _ = worker.answer(JOB, Runner, 2.0, 90)
    assert (answer.load_disk_bytes, answer.import_s) == (310, 2.0), "since the process began"


def test_the_worker_of_vismoe_is_told_what_to_read_ahead_while_it_imports():
    """As its commands: on the CPU, what the checkpoint has as it will be held."""
    body = "out.write_text(json.dumps({'said': sys.argv[3:]}))"
    settings = {"gguf": "m.gguf", "memory": "25%", "format": "int8", "context": 256}

    def files(**other):
        return [WeightFiles.of(**json.loads(said)) for said in run_job(replace(JOB, **other), Groups(None), script(body))["said"]]

    assert files(settings=settings) == [WeightFiles((Path("m.gguf"),), memory="25%", format="int8", in_place=False)]
    assert files(settings={**settings, "backbone": "int8"}) == files(settings=settings, device="cuda:0") == [WeightFiles()]
    assert files(settings=settings, way="accelerate") == []


def test_a_cold_open_is_compared_with_the_disk_and_the_computation():
    """1 s of imports and loading, 500 B, and 1 s to the first token, 100 B; 600 B take 1 s, and a prompt computes for 0.25 s."""
    (run,) = runs_of("vismoe", [4.0, 2.0], load_disk_bytes=500)
    for one, stall_s in zip(run["requests"], (0.5, 0.75), strict=True):
        one["counters"] = {phase: COUNTERS | {"stall_seconds": stall_s} for phase in ("prefill", "decode")}
    found = figures_of([run])["vismoe"]["cold_open"]
    medians = {name: one["median"] for name, one in found.items()}
    assert medians == {"seconds": 2.0, "bytes": 600, "compute_s": 0.25, "ratio": 2.0 / 1.25}
    assert figures_of([{**run, "load_disk_bytes": None}])["vismoe"]["cold_open"] is None
    assert figures_of(list(runs_of("accelerate", [4.0], load_disk_bytes=500)))["accelerate"]["cold_open"] is None


def test_experts_are_timed_after_the_requests_that_count():
    answer, runner = worker.answer(replace(JOB, moe_time=True), Runner)
    assert runner.asked == [COLD, WARM, WARM, "experts"] and answer.moe_s == {"prefill": 0.5, "decode": 0.25}


def test_the_parts_of_a_token_are_timed_last_and_add_up():
    answer, runner = worker.answer(replace(JOB, moe_time=True, token_time=True), Runner)
    assert runner.asked[-2:] == ["experts", "parts"] and answer.token_time is TIMED
    runs = runs_of("vismoe", [4.0, 2.0], [4.0, 1.0], token_time=dataclasses.asdict(TIMED))
    found = figures_of(list(runs))["vismoe"]["token_ms"]
    assert list(found) == ["experts", "norms", "between", "timing", "token"]
    assert sum(found[part]["ms"] for part in ("experts", "norms", "between")) == pytest.approx(found["token"]["ms"]) == 200.0
    assert found["norms"] == {"ms": 50.0, "calls": 4.0, "bytes": 10.0, "bytes_per_s": 200.0, "memory_share": 2.0}
    assert (
        found["experts"]["bytes"] == WORK.decode_bytes - WORK.backbone_bytes
        and found["token"]["bytes"] == found["experts"]["bytes"] + 10
    )
    assert figures_of(list(runs_of("vismoe", [1.0])))["vismoe"]["token_ms"] is None


def test_an_error_of_a_contestant_is_the_workers_result(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(replace(JOB, model=str(tmp_path)).to_json()))
    assert worker.main([str(tmp_path / "result"), "vismoe"]) == 1
    assert "CheckpointError" in json.loads((tmp_path / "result").read_text())["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


# ------------------------------------------------------------------ figures
WORK = Work(prefill_bytes=600, decode_bytes=50, backbone_bytes=100, expert_bytes=10)
CEILINGS = Ceilings(100.0, 600.0, None, "by hand")
COUNTERS = dict(hits=3, misses=1, late=0, bytes_read=40, bytes_copied=0, stall_seconds=0.5, wasted_prefetch_bytes=8)
CONTESTANTS = tuple(map(Contestant, ("vismoe", "transformers", "transformers-eager", "accelerate", "llama.cpp-mmap")))
COUNTERS |= dict(layer_seconds=1.25, compute_seconds=0.625, steps=4)


def figures_of(runs, contestants=CONTESTANTS, work=WORK, ceilings=CEILINGS):
    return summary(runs, contestants, {one.name: work for one in contestants}, ceilings, moe_layers=2)


def runs_of(name, *answers, **fields):
    """One run per answer; an answer is its decode times, the first of them cold."""
    for repeat, times in enumerate(answers):
        requests = [vars(request(COLD if not i else WARM, seconds)) for i, seconds in enumerate(times)]
        run = dict(
            contestant=name,
            repeat=repeat,
            import_s=0.5,
            load_s=0.5,
            peak_bytes=None,
            peak_rss_bytes=7,
            cached_bytes=0,
            files_bytes=1000,
            moe_s=None,
            logits=(),
            notes={},
        )
        yield {**run, "requests": requests, **fields}


def test_the_figures_of_a_request():
    figures = measures(vars(request(counters={"decode": COUNTERS})), WORK, CEILINGS)
    assert figures["decode_tokens_per_s"] == 1.0 and figures["prefill_tokens_per_s"] == 4.0
    assert figures["decode_memory_share"] == 2 * 50 / 2.0 / 100.0
    assert figures["decode_disk_share"] == 300 / 2.0 / 600.0 and figures["decode_disk_bytes_per_token"] == 150
    assert figures["decode_hit_rate"] == 0.75 and figures["decode_stall_share"] == 0.25
    assert figures["decode_control_us_per_layer"] == 1e6 * 0.125 / 4
    assert figures["decode_link_share"] is None and figures["encode_s"] is None
    assert "prefill_hit_rate" not in figures


def test_the_disk_is_measured_before_and_after_each_worker_and_its_shares_are_of_that(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("small", "large")]
    for file, size in zip(files, (5, 9)):
        file.write_bytes(b"x" * size)
    rates, asked = iter((200.0, 400.0, None, 500.0, None, None)), []
    monkeypatch.setattr(runs, "rate_past_cache", lambda *given: asked.append(given) or next(rates))
    job = replace(JOB, files=tuple(map(str, files)), read_bytes=7, io_threads=3)
    done = run_all({"vismoe": job}, 3, Groups(None), worker=script("out.write_text(json.dumps({'x': 1}))")).runs
    assert [run["disk_bytes_per_s"] for run in done] == [300.0, 500.0, None] and set(asked) == {(str(files[1]), 7, 3)}
    for unmeasured in (replace(job, io_threads=0), replace(job, read_bytes=0), replace(job, files=())):
        (run,) = run_all({"vismoe": unmeasured}, 1, Groups(None), worker=script("out.write_text(json.dumps({'x': 1}))")).runs
        assert run["disk_bytes_per_s"] is None and len(asked) == 6

    measured = figures_of([*runs_of("vismoe", [2.0, 2.0], disk_bytes_per_s=300.0), *runs_of("accelerate", [2.0, 2.0])])
    assert measured["vismoe"]["warm"]["decode_disk_share"]["median"] == 300 / 2.0 / 300.0
    assert measured["accelerate"]["warm"]["decode_disk_share"]["median"] == 300 / 2.0 / 600.0, "of the profile"
    said = ceilings_json(CEILINGS, WORK, [{"disk_bytes_per_s": 200.0}, {"disk_bytes_per_s": 300.0}, {}])
    assert said["disk_beside"] == {"median": 250.0, "min": 200.0, "max": 300.0, "n": 2} and said["disk_bytes_per_s"] == 600.0


def test_medians_with_extremes_cold_and_warm_apart():
    found = figures_of([*runs_of("vismoe", (4.0, 2.0, 1.0), (8.0, 2.0, 0.5)), *runs_of("accelerate", (16.0, 8.0))])
    assert list(found) == ["vismoe", "accelerate"]
    ours = found["vismoe"]
    assert ours["cold"]["decode_tokens_per_s"] == {"median": statistics.median([0.5, 0.25]), "min": 0.25, "max": 0.5, "n": 2}
    assert ours["warm"]["decode_tokens_per_s"] == {"median": 2.0, "min": 1.5, "max": 2.5, "n": 2}  # of processes
    assert ours["peak_bytes"] == 7 and ours["repeats"] == 2
    times = ours["times_as_fast_as"]["accelerate"]
    assert times["same_precision"] and times["cold"]["decode"] == 0.375 / 0.125 and times["warm"]["decode"] == 2.0 / 0.25
    assert ours["first_answer_s"]["median"] == 2.0 and ours["moe_us"] is times["moe"]["decode"] is None
    assert set(ours) - set(found["accelerate"]) == {"times_as_fast_as"}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("field", "value", "reason"), [("cached_bytes", 51, "stayed in the page cache"), ("disk", 149, "read 299 B of")]
)
def test_who_was_not_really_cold_gets_no_cold_ratio_and_the_reason(field, value, reason):
    (ours,), (theirs,) = runs_of("vismoe", (4.0, 2.0)), runs_of("transformers", (4.0, 2.0))
    if field == "disk":
        theirs["requests"][0] |= dict(prefill_disk_bytes=value, decode_disk_bytes=150)
    else:
        theirs[field] = value
    found = figures_of([ours, theirs])
    times = found["vismoe"]["times_as_fast_as"]["transformers"]
    assert reason in found["transformers"]["not_cold"] and times["cold"]["decode"] is None and times["warm"]["decode"] == 1.0


FORMATS = tuple(
    Contestant(way, format)
    for way, format in (("vismoe", "int8"), ("vismoe", "raw"), ("accelerate", "raw"), ("llama.cpp-mmap", "int8"))
)


def test_each_of_ours_is_held_against_its_precision_and_whoever_keeps_every_bit():
    found = figures_of([run for one in FORMATS for run in runs_of(one.name, (4.0, 2.0))], FORMATS)
    assert list(found) == ["vismoe", "accelerate", "vismoe int8", "llama.cpp-mmap q8_0"]
    assert found["vismoe"]["times_as_fast_as"].keys() == {"accelerate"}
    same = {name: times["same_precision"] for name, times in found["vismoe int8"]["times_as_fast_as"].items()}
    assert same == {"accelerate": False, "llama.cpp-mmap q8_0": True}


def test_the_routed_experts_time_is_by_layer_and_token_and_compared():
    ours, theirs = (
        next(runs_of(name, (4.0, 2.0), moe_s={"prefill": factor * 0.8, "decode": factor * 0.4}))
        for name, factor in (("vismoe", 1), ("accelerate", 3))
    )
    found = figures_of([ours, theirs])
    assert found["vismoe"]["moe_us"]["prefill"]["median"] == pytest.approx(1e6 * 0.8 / 2 / 4)  # two layers, four tokens
    assert found["vismoe"]["moe_us"]["decode"]["median"] == pytest.approx(1e6 * 0.4 / 2 / 2)
    assert found["vismoe"]["times_as_fast_as"]["accelerate"]["moe"] == pytest.approx({"prefill": 3, "decode": 3})


def test_smaller_experts_are_less_work_and_the_backbone_stays():
    assert WORK.with_experts_of(0.5) == Work(prefill_bytes=350, decode_bytes=75, backbone_bytes=100, expert_bytes=5)
    assert replace(WORK, prefill_bytes=None).with_experts_of(0.5).prefill_bytes is None
    assert WORK.with_backbone_of(40) == replace(
        WORK, prefill_bytes=WORK.prefill_bytes - 60, decode_bytes=WORK.decode_bytes - 60, backbone_bytes=40
    )


def test_a_backbone_counts_as_its_contestant_held_it():
    """In int8, say; where a contestant does not say, as the checkpoint has it."""
    backbone = [("attention", 10), ("lm head", 20)]
    plan = {"parts": [{"name": "lm head", "bytes": 7}, {"name": "KV cache", "bytes": 5}]}
    assert backbone_of(backbone, [{"failed": "x"}, {"notes": {"plan": plan}}]) == [("attention", 10), ("lm head", 7)]
    assert backbone_of(backbone, [{"notes": {}}]) == backbone_of(backbone, []) == backbone


def test_prefill_is_what_vismoe_counted_and_unknown_where_routing_is_not_uniform():
    counted = {"contestant": "vismoe", "requests": [vars(request(counters={"prefill": COUNTERS}))]}
    assert observed(WORK, [counted, {"contestant": "accelerate", "failed": "no"}]).prefill_bytes == 100 + 4 * 10
    unknown = replace(WORK, prefill_bytes=None)
    assert observed(unknown, []) == unknown and measures(vars(request()), unknown, CEILINGS)["prefill_memory_share"] is None


def test_nothing_in_common_other_answers_and_shares_above_a_ceiling_are_warnings():
    runs = [*runs_of("vismoe", (4.0, 2.0)), *runs_of("accelerate", (4.0, 0.4), (4.0, 2.0))]
    ample = Ceilings(10_000.0, 600.0, None, "by hand")
    (above,) = warnings(figures_of(runs, ceilings=ample))
    assert "accelerate is above a ceiling (warm decode disk share 125%)" in above  # 300 bytes in 0.4 s, 600 bytes per second
    runs[1]["requests"][0]["token_ids"] = (9, 9, 9)
    runs[0]["requests"][0]["token_ids"] = (1, 1, 1)
    said = "\n".join(warnings(figures_of(runs, ceilings=ample)))
    assert "vismoe did not give the same tokens" in said and "vismoe has no new token in common with accelerate" in said


def test_a_contestant_that_failed_keeps_its_reason_and_what_it_measured_before():
    runs = [*runs_of("vismoe", (4.0, 2.0)), {"contestant": "vismoe", "repeat": 1, "failed": "killed"}]
    found = figures_of(runs)["vismoe"]
    assert found["failed"] == "killed" and found["repeats"] == 1 and found["cold"]["decode_tokens_per_s"]["n"] == 1
    only_failed = figures_of(runs[1:])["vismoe"]
    assert only_failed["failed"] == "killed" and only_failed["cold"] == {} and only_failed["load_s"] is None


def test_answers_are_held_against_eager_if_it_ran():
    def answered(name, *ids, prompt_tokens=4):
        return dict(contestant=name, requests=[vars(request(ids=one, prompt_tokens=prompt_tokens)) for one in ids])

    runs = [
        answered("vismoe", (1, 2, 3), (1, 2, 3)),
        answered("transformers", (1, 2, 9)),
        answered("transformers-eager", (1, 2, 3)),
        answered("llama.cpp-mmap", (1, 2, 3), prompt_tokens=2),
        answered("accelerate", (4, 2, 3), (1, 2, 3)),
        dict(contestant="llama.cpp-resident", failed="no"),
    ]
    found = agreement(runs, CONTESTANTS)
    assert {name: row["equal_tokens"] for name, row in found.items()} == {
        "vismoe": 3, "transformers": 2, "transformers-eager": 3, "llama.cpp-mmap": None, "accelerate": 0
    }  # fmt: skip
    assert {row["with"] for row in found.values()} == {"transformers-eager"}
    assert [name for name, row in found.items() if not row["same_every_time"]] == ["accelerate"]


def test_logits_that_have_nothing_to_do_with_the_references_are_a_warning():
    logits = {
        "vismoe": (1, 2, 3, 4.5),
        "vismoe int8": (4, 3, 2, 1),
        "accelerate": (1, 2, 3, 4),
        "llama.cpp-mmap q8_0": (1, 2, 3, 5),
    }
    found = figures_of([run for one in FORMATS for run in runs_of(one.name, (4.0, 2.0), logits=logits[one.name])], FORMATS)
    assert found["accelerate"]["agreement"]["correlation"] == pytest.approx(1)
    (said,) = [text for text in warnings(found) if "correlate" in text]
    assert "the first logits of vismoe int8 correlate with those of accelerate by -1.000" in said


def test_what_is_not_known_is_left_out_of_a_spread():
    assert spread([None, 2.0, None]) == {"median": 2.0, "min": 2.0, "max": 2.0, "n": 1}
    assert spread([None]) is None
