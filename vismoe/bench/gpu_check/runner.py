"""Runs the stages one after the other, each in a fresh process that is killed at its deadline, and writes the report after each.

A stage's row in the report has `status`: `done`; `skipped`, if all its tests were, or are missing; `failed`, if it found failures
or broke; `late`, if it was killed at its deadline; `interrupted` by Ctrl-C. `result` has what it had kept by then.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vismoe.bench.gpu_check.stages import CheckStage
from vismoe.bench.subject import clean

STAGE = (sys.executable, "-m", "vismoe.bench.gpu_check.stage")
GOOD = ("done", "skipped")
LOG_LINES = 12  # kept of a stage that did not end well


def run_stages(
    stages: Sequence[CheckStage],
    options: dict[str, Any],
    out: Path,
    report: dict[str, Any],
    factor: float = 1.0,
    progress: Callable[[str], None] = lambda line: None,
    worker: Sequence[str] = STAGE,
) -> bool:
    """Runs `stages` with `factor` times their deadlines, and adds a row for each to `report["stages"]`; False after Ctrl-C.

    `options` are joined with those of the stage; `options["folder"]/CHECKPOINT` holds a stage's generated weights, which are
    deleted after the last stage that needs them unless `options["keep"]`. `out` is replaced after each stage.
    """
    for number, stage in enumerate(stages):
        limit_s = factor * stage.deadline_s
        progress(f"[{number + 1}/{len(stages)}] {stage.name}: {stage.what}, at most {limit_s:.0f} s")
        folder = Path(options["folder"]) / (stage.checkpoint or "")
        done = _run(stage, {**options, **stage.options, "folder": str(folder)}, limit_s, worker)
        report["stages"].append({"stage": stage.name, "limit_s": limit_s, **done})
        later = () if done["status"] == "interrupted" else stages[number + 1 :]
        if stage.checkpoint and not options.get("keep") and all(other.checkpoint != stage.checkpoint for other in later):
            clean(folder)
        write(out, report)
        why = f": {done['failed']}" if done["failed"] else ""
        progress(f"      {done['status']} after {done['seconds']:.0f} s{why}")
        if done["status"] == "interrupted":
            return False
    return True


def write(out: Path, report: dict[str, Any]) -> None:
    """Replaces the report in one step."""
    new = out.with_name(out.name + ".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(new, out)


def _run(stage: CheckStage, options: dict[str, Any], limit_s: float, worker: Sequence[str]) -> dict[str, Any]:
    """`status`, `seconds`, `failed` (why, or None), `result`, and `log`: the last lines if it did not end well."""
    began_s, status = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="vismoe-gpu-check-") as name:
        scratch = Path(name)
        (scratch / "options").write_text(json.dumps(options))
        with (scratch / "options").open() as given, (scratch / "log").open("w") as log:
            process = subprocess.Popen(
                [*worker, stage.calls, str(scratch / "result")], stdin=given, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            # By a thread that no signal interrupts: Ctrl-C within `wait` can leave its lock taken, and the next one waiting.
            waiting = threading.Thread(target=process.wait, daemon=True)
            try:
                waiting.start()
                waiting.join(limit_s)
                status = "late" if waiting.is_alive() else ""
            except KeyboardInterrupt:
                status = "interrupted"
            finally:  # its children too, however this ends
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.killpg(process.pid, signal.SIGKILL)
                if waiting.ident is not None:
                    waiting.join()
            code = 0 if status else process.returncode
        found = scratch / "result"
        result = json.loads(found.read_text()) if found.exists() else {}
        lines = (scratch / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    failed = result.pop("error", None) or "; ".join(result.get("failures", ())) or None
    if code and not failed:
        failed = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    status = status or ("failed" if failed else "skipped" if result.get("passed") == 0 else "done")
    seconds = round(time.monotonic() - began_s, 1)
    return {"status": status, "seconds": seconds, "failed": failed, "result": result, "log": [] if status in GOOD else lines}
