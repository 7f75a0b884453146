"""The suite's worker process: started with its first job, started again after it died; it never outlives the suite.

It runs in its own session, so that Ctrl-C reaches only the suite, which decides what to keep.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "vismoe.eval.suite_worker")
LOG_LINES = 3  # log lines shown for a worker that died without an answer


class JobFailed(Exception):
    """A job failed; the message gives the reason."""


class Worker:
    """One process that does jobs in turn. Its output goes to `log`."""

    def __init__(self, log: Path):
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, do: str, on_part: Callable[[Any], None] = lambda part: None, **job: Any) -> dict[str, Any]:
        """The result of a job; `on_part` receives partial results. Raises JobFailed."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **job}) + "\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise JobFailed(self._how_it_died()) from error
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # it died in the middle of a message
            message = json.loads(line)
            if "part" in message:
                on_part(message["part"])
            elif "error" in message:
                raise JobFailed(message["error"])
            else:
                result: dict[str, Any] = message["result"]
                return result
        raise JobFailed(self._how_it_died())

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
                )
        return self._process

    def _how_it_died(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = "; Linux ends processes this way when memory runs out" if code == -signal.SIGKILL else ""
        last = " ".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        return f"the process ended with {how}{why}. Last output: {last or 'none'}"

    def close(self) -> None:
        """End the process, even during a job."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # unsent data
                pipe.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
