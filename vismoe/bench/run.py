"""Runs jobs in turn: every repeat of every contestant in a fresh process, inside a fresh control group, with cold files.

The order rotates from repeat to repeat, so that no contestant is always first. Ctrl-C ends the running worker and keeps earlier
results.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vismoe.bench.job import OURS, Job
from vismoe.bench.limits import Groups, drop_caches
from vismoe.bench.turns import rotating
from vismoe.config import READ_AHEAD_BY, format_bytes
from vismoe.flags import signals_call
from vismoe.machine.disk import rate_past_cache
from vismoe.threads import without_us

WORKER = (sys.executable, "-m", "vismoe.bench.worker")
LOG_LINES = 12  # log lines kept of a failed worker


@dataclass(frozen=True)
class BenchOutcome:
    """The results: one row per worker, `{"contestant", "repeat"}` and either the answer's fields or `failed`."""

    runs: tuple[dict[str, Any], ...]
    interrupted: bool


def run_all(
    jobs: Mapping[str, Job],
    repeats: int,
    groups: Groups,
    progress: Callable[[str], None] = lambda doing: None,
    worker: Sequence[str] = WORKER,
) -> BenchOutcome:
    """Run every job `repeats` times; a contestant that failed once does not run again. `progress` receives the next step."""
    runs: list[dict[str, Any]] = []
    failed: set[str] = set()
    files = {file for job in jobs.values() for file in job.files}  # also files of other contestants, which would fill the RAM
    try:
        for repeat, name in rotating(list(jobs), repeats):
            if name in failed:
                continue
            progress(f"{name}, repeat {repeat + 1} of {repeats}")
            drop_caches(files)
            before = _disk_rate(jobs[name])
            job = jobs[name] if repeat == repeats - 1 else replace(jobs[name], trace=None)  # one timeline, of the last repeat
            runs.append({"contestant": name, "repeat": repeat, **run_job(job, groups, worker)})
            known = [rate for rate in (before, _disk_rate(job)) if rate is not None]
            runs[-1]["disk_bytes_per_s"] = statistics.mean(known) if known else None
            if "failed" in runs[-1]:
                failed.add(name)
    except KeyboardInterrupt:
        return BenchOutcome(tuple(runs), interrupted=True)
    return BenchOutcome(tuple(runs), interrupted=False)


def _disk_rate(job: Job) -> float | None:
    """Of the worker's largest file, read as VisMoE reads experts; None: not measured."""
    if not (job.files and job.read_bytes and job.io_threads):
        return None
    return rate_past_cache(max(job.files, key=os.path.getsize), job.read_bytes, job.io_threads)


def run_job(job: Job, groups: Groups, worker: Sequence[str] = WORKER) -> dict[str, Any]:
    """Runs one worker from cold files to its answer: what `ReadyWorker.answer` returns."""
    with ReadyWorker(job.way, job.threads, groups, worker, _read_ahead(job)) as ready:
        return ready.answer(job)


def _read_ahead(job: Job) -> dict[str, Any] | None:
    """What VisMoE's worker reads ahead, as its commands do; None: nothing."""
    if job.way != OURS:
        return None
    settings: dict[str, Any] = {name: job.settings[name] for name in READ_AHEAD_BY if name in job.settings}
    return {"model": job.model, "revision": job.revision, "dtype": job.dtype, "device": job.device, **settings}


class ReadyWorker:
    """The process of one job, which may be started before the job is known: it imports what `way` needs, reads ahead
    meanwhile (`files`: the arguments of `WeightFiles.of`), and waits. It does not outlive a `with`."""

    def __init__(
        self, way: str, threads: int, groups: Groups, worker: Sequence[str] = WORKER, files: Mapping[str, Any] | None = None
    ):
        self._limit_bytes = groups.limit_bytes
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vismoe-bench-")))
            self._group = groups.make()
            stack.callback(self._group.remove)
            numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
            usual = dict(os.environ) if way == OURS else without_us(os.environ)
            environment = {**usual, **numbers, "GGML_NO_BACKTRACE": "1"}  # otherwise a backtrace would fill the end of the log
            said = [] if files is None else [json.dumps(files)]
            command, early = self._group.command([*worker, str(self._folder / "result"), way, *said]), list[int]()
            with (self._folder / "log").open("w") as log, _held_back(early):  # or Ctrl-C left a process that is not known yet
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                    text=True,
                )  # fmt: skip
                stack.callback(self._end)
            if early:
                raise KeyboardInterrupt
            self._stack = stack.pop_all()

    def __enter__(self) -> "ReadyWorker":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def answer(self, job: Job, limit_s: float | None = None) -> dict[str, Any]:
        """The fields of Answer, or `failed` with the reason, and `peak_bytes` of the group; `trace_failed` if only the timeline
        after the answer failed. The worker is killed after `limit_s`."""
        with contextlib.ExitStack() as stack:
            if job.offload_folder:
                Path(job.offload_folder).mkdir(parents=True, exist_ok=True)
                stack.callback(shutil.rmtree, job.offload_folder, ignore_errors=True)
            stack.callback(self._end)
            try:
                self._process.communicate(job.to_json(), limit_s)
            except subprocess.TimeoutExpired:
                return {"failed": f"the worker was killed after {limit_s:.0f} s", "peak_bytes": None}
            report, code = self._group.report(), self._process.returncode
        found, lines = self._folder / "result", (self._folder / "log").read_text(errors="replace").splitlines()
        result = json.loads(found.read_text()) if found.exists() else {}
        if "error" in result:
            result = {"failed": result["error"]}
        elif code or not result:
            log = "\n".join(lines[-LOG_LINES:])
            how = _how_it_ended(code, report.kills, report.peak_bytes, self._limit_bytes, log)
            result = {**result, "trace_failed": how} if result else {"failed": how}
        return {**result, "peak_bytes": report.peak_bytes}


def _held_back(arrived: list[int]) -> contextlib.AbstractContextManager[None]:
    """Within, Ctrl-C and SIGTERM are noted in `arrived`, and nothing else. Only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return signals_call(lambda number, frame: arrived.append(number), signal.SIGINT, signal.SIGTERM)


def _how_it_ended(code: int, kills: int | None, peak_bytes: int | None, limit_bytes: int | None, log: str) -> str:
    """Why a worker left no result."""
    if limit_bytes is not None and (kills or (kills is None and code == -signal.SIGKILL)):
        peak = f", peak {format_bytes(peak_bytes)}" if peak_bytes else ""
        return f"killed by the memory limit of {format_bytes(limit_bytes)}{peak}"
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"the worker ended with {ended}:\n{log}"
