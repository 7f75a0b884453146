"""One worker process: `python -m vismoe.bench.worker RESULT WAY [FILES]` imports what that way to run a model needs, and no
more, reads a job from stdin and writes its answer to the file RESULT.

VisMoE reads ahead while it imports, as its commands do: FILES are the arguments of `WeightFiles.of` in JSON. The result appears
complete or not at all, so a killed worker leaves none. The parent redirects the output of libraries.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vismoe.bench.job import COLD, PROGRAMS, WARM, Answer, Job
from vismoe.bench.limits import drop_caches
from vismoe.bench.process import die_with_parent, difference, disk_bytes, peak_rss_bytes, release_mapped
from vismoe.flags import quick_imports


def answer(job: Job, load: Callable[[Job], Any], import_s: float = 0.0, before: int | None = None) -> tuple[Answer, Any]:
    """(the answer, the runner): load, drop the pages that loading cached, time the cold and the warm requests. import_s:
    seconds that the process took to import, before: bytes that it had read when it began to; otherwise neither counts."""
    before, began_s = disk_bytes() if before is None else before, time.perf_counter()
    runner = load(job)
    load_s, read = time.perf_counter() - began_s, difference(disk_bytes(), before)
    offloaded = Path(job.offload_folder).rglob("*") if job.offload_folder else ()
    files = [*map(Path, job.files), *(path for path in offloaded if path.is_file())]
    release_mapped(files)
    cached_bytes = drop_caches(files)
    requests = [runner.request(COLD), *(runner.request(WARM) for _ in range(job.warm_requests))]
    requests += [runner.request(WARM, tokens) for tokens in job.first_tokens]
    parallel = tuple(runner.parallel(rows) for rows in job.parallel)
    files_bytes = sum(file.stat().st_size for file in files)
    peak_bytes = peak_rss_bytes()
    moe_s = runner.moe_s() if job.moe_time else None
    token_time = runner.token_time() if job.token_time else None
    about = files_bytes, runner.notes, runner.logits
    found = Answer(load_s, tuple(requests), peak_bytes, cached_bytes, *about, parallel, moe_s, token_time, read, import_s)
    return found, runner


def _loader_of(way: str, files: str | None, reading: contextlib.ExitStack) -> Callable[[Job], Any]:
    """What loads; until then is read ahead, within `reading`."""
    if PROGRAMS[way].package == "llama_cpp":
        from vismoe.bench import llama_runner

        return llama_runner.LOADERS[way]
    with quick_imports():
        import torch

        if files is not None:
            from vismoe.store.read_ahead import WeightFiles, reading_ahead

            reading.enter_context(reading_ahead(WeightFiles.of(**json.loads(files))))
        from vismoe.bench import contestants

    def load(job: Job) -> Any:
        torch.set_num_threads(job.threads)
        return contestants.LOADERS[way](job)

    return load


def _leave(file: Path, result: dict[str, Any]) -> None:
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(json.dumps(result))
    os.replace(unfinished, file)


def main(argv: list[str]) -> int:
    """Exit codes: 0; 1 for an error, which the result contains as `{"error": ...}`. A timeline is written after the result."""
    die_with_parent()
    before, began_s = disk_bytes(), time.perf_counter()
    try:
        with contextlib.ExitStack() as reading:
            load = _loader_of(argv[1], argv[2] if argv[2:] else None, reading)
            import_s = time.perf_counter() - began_s
            job = Job.from_json(sys.stdin.read())
            found, runner = answer(job, load, import_s, before)
    except Exception as error:  # the process boundary; the parent reports the error
        _leave(Path(argv[0]), {"error": f"{type(error).__name__}: {error}"})
        return 1
    _leave(Path(argv[0]), dataclasses.asdict(found))
    if job.trace:
        runner.trace(job.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
