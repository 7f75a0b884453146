"""Records the training data of a predictor: the routing of real answers, prompts and decoding, in the trace schema of `vismoe
replay`.

One trace per share of kept visual tokens, `keep-1` and `keep-0.5`; shards hold whole requests, so an interrupted or killed run
continues with the first missing request. Memory: one request and the shard being filled.

`python -m vismoe.predictor_training.collect FOLDER --scenes`
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vismoe.engine.engine import Engine, load
from vismoe.errors import ConfigError, InputError, VisMoEError
from vismoe.flags import SuggestingParser
from vismoe.models.load.runtime import runtime_of
from vismoe.predictor_training.prompts import UNSEEN_KIND, CalibrationPrompt, folder_prompts, scene_prompts
from vismoe.trace.files import Trace, TraceWriter

KEEPS = (1.0, 0.5)
ANSWER_TOKENS = 32
# Settings that decide what is recorded.
RECORDED = "window lookahead prune_layer selection core_share expansion_weight visual_top_k kernels format".split()

Report = Callable[[int, int], None]  # (done, in all)


class _Recorder:
    """The runtime's recorder: the writer, except that the collector sets the names of requests."""

    for_training = True

    def __init__(self, writer: TraceWriter):
        self.step, self.layer = writer.step, writer.layer


def recorded_settings(engine: Engine) -> dict[str, Any]:
    """The settings that distinguish collections of one model, besides prompts and keeps; stored in the traces' headers."""
    return {name: getattr(engine.settings, name) for name in RECORDED} | {"dtype": str(engine.model.dtype)}


def work_name(engine: Engine) -> str:
    """Name of a folder for the traces of this model with these settings, so that a run continues only matching traces."""
    settings = hashlib.sha256(json.dumps(recorded_settings(engine), sort_keys=True).encode()).hexdigest()
    return f"{runtime_of(engine.model).store.fingerprint[:16]}-{settings[:8]}"


def trace_folder(folder: str | Path, keep: float) -> Path:
    return Path(folder) / f"keep-{keep:g}"


def collect(
    engine: Engine,
    prompts: Sequence[CalibrationPrompt],
    folder: str | Path,
    keeps: Sequence[float] = KEEPS,
    report: Report = lambda done, total: None,
) -> list[Trace]:
    """Answers every prompt at every keep and records the routing; -> the traces, in the order of `keeps`.

    A model whose visual tokens cannot be dropped is recorded at keep 1 only. A prompt that the model refuses (too long, a damaged
    image) is left out with a warning on stderr; if it refuses every prompt, InputError. A folder that cannot be written, or with
    traces of another model or other settings, raises TraceError.
    """
    keeps = [keep for keep in keeps if keep == 1 or engine.can_prune]
    runtime, total, done, refused = runtime_of(engine.model), len(prompts) * len(keeps), 0, list[str]()
    store, settings = runtime.store, recorded_settings(engine)
    for keep in keeps:
        path = trace_folder(folder, keep)
        there = set(Trace.open(path).requests) if (path / "trace.json").exists() else set[str]()
        done += sum(prompt.name in there for prompt in prompts)
        report(done, total)
        todo = [prompt for prompt in prompts if prompt.name not in there]
        with TraceWriter(path, store.inventory, engine.name, store.fingerprint, for_training=True, settings=settings) as writer:
            for prompt in todo:
                writer.request(prompt.name)
                try:
                    _answer(engine, runtime, writer, prompt, keep)
                except InputError as error:
                    refused.append(f"{prompt.name}: {error}")
                done += 1
                report(done, total)
    for line in refused[:3]:
        print(f"left out: {line}", file=sys.stderr)
    if len(refused) == total:
        raise InputError(f"the model refused all of {total} prompts, the first because: {refused[0]}")
    return [Trace.open(trace_folder(folder, keep)) for keep in keeps]


def _answer(engine: Engine, runtime: Any, writer: TraceWriter, prompt: CalibrationPrompt, keep: float) -> None:
    """Records one answer. Ctrl-C ends the generation before it propagates."""
    reply = None
    runtime.context.record_to(_Recorder(writer))
    try:
        reply = engine.chat(prompt.messages(), max_tokens=ANSWER_TOKENS, keep=keep)
        for _ in reply:
            pass
    except BaseException:
        if reply is not None:
            reply.cancel()
            for _ in reply:
                pass
        raise
    finally:
        runtime.context.record_to(None)


def progress_bar() -> Progress:
    """A progress bar on stderr, removed at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose prompts."""
    parser.add_argument("--data", metavar="FOLDER", help="folder with your prompts: *.jsonl lines, images, text files")
    parser.add_argument("--scenes", action="store_true", help="use generated scenes")
    parser.add_argument("--world", default="demo", metavar="WORLD", help="with --scenes: what they show (default: demo)")
    parser.add_argument("--prompts", type=int, default=1000, metavar="N", help="with --scenes: training prompts (default: 1000)")
    parser.add_argument(
        "--unseen", metavar="KIND", help="a kind of prompt to leave out of training, for evaluation (scenes: text)"
    )


def prompts_of(arguments: argparse.Namespace) -> list[CalibrationPrompt]:
    """The prompts that the flags choose."""
    if bool(arguments.data) == arguments.scenes:
        raise ConfigError("no prompts were given. Fix: --data FOLDER with your own, or --scenes for generated ones")
    if arguments.scenes:
        unseen = arguments.unseen or UNSEEN_KIND
        return scene_prompts(arguments.prompts, max(8, arguments.prompts // 6), unseen, arguments.world)
    return folder_prompts(arguments.data, arguments.unseen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = SuggestingParser(prog="python -m vismoe.predictor_training.collect", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", metavar="FOLDER", help="folder of the traces; an interrupted collection in it continues")
    parser.add_argument("--model", metavar="MODEL", help="hub name or folder (default: the bundled demo model)")
    parser.add_argument("--memory", default="100%", metavar="SIZE|PERCENT", help="(default: 100%%)")
    add_data_flags(parser)
    given = parser.parse_args(arguments)
    try:
        prompts = prompts_of(given)
        with load(given.model, memory=given.memory, calibration="none") as engine, progress_bar() as bar:
            task = bar.add_task("collecting", total=None)
            traces = collect(
                engine, prompts, given.folder, report=lambda done, total: bar.update(task, completed=done, total=total)
            )
    except VisMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for trace in traces:
        print(f"{trace.path}: {len(trace.requests)} requests, {len(trace)} forward passes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
