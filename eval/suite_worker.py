"""The process in which a suite runs a model: `python -m vismoe.eval.suite_worker`, a job per line on stdin, messages on stdout.

A job is `{"do": NAME, ...}`; the worker answers with `{"part": ...}` meanwhile and `{"result": ...}` or `{"error": text}` at the
end. Output of libraries goes to stderr. Bytes and seconds; None if this system does not provide a value.
"""

import gc
import json
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial, reduce
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from vismoe.bench.process import die_with_parent, peak_rss_bytes
from vismoe.errors import InputError, UnsupportedModelError, VisMoEError
from vismoe.flags import quick_imports

with quick_imports():
    import torch

    from vismoe.engine.engine import Engine, demo_model, load
    from vismoe.engine.generate import Figures
    from vismoe.eval import asking
    from vismoe.eval.accuracy import ask, figures_of, messages
    from vismoe.eval.answer_file import Key, program_digest, questions
    from vismoe.eval.pruned_answers import FEWER_EXPERTS, PROGRAM, draw_of
    from vismoe.eval.scoring import score
    from vismoe.eval.suite_rows import Answered, SpeedTurn
    from vismoe.machine.facts import facts
    from vismoe.models.load.preview import experts_in_place, model_class, read_config
    from vismoe.store.pack import pack, refuse_small_disk
    from vismoe.store.packed import contents_of, find_store, formats_in
    from vismoe.types import Format, Phase

Tell = Callable[[Any], None]
SPEED_KIND, SPEED_SEED = "describe", 7  # one picture each, and the longest answers
CLEAR = Path("/proc/self/clear_refs")


def describe(tell: Tell, model: str | None, options: Mapping[str, str], data: str) -> dict[str, Any]:
    """What answers belong to, and the conditions of the measurement."""
    source, _ = experts_in_place(model, options.get("revision"))
    machine = facts()
    with closing(source):
        beside = find_store(source.paths[0])
        return {
            "model": model or "the bundled demo model",
            "store": str(beside) if beside else None,
            "packed": [str(format) for format in formats_in(beside)] if beside else [],
            "fingerprint": source.fingerprint,
            "program": program_digest([*PROGRAM, *FEWER_EXPERTS, asking, sys.modules[__name__], *PROGRAMS[data]()]),
            "experts_bytes": source.inventory.total_bytes,
            "machine": {"cpu": machine.cpu, "cores": machine.usable_cores, "gpus": [gpu.name for gpu in machine.gpus]},
            "versions": machine.versions,
        }


def pack_format(tell: Tell, model: str | None, options: Mapping[str, str], format: str, folder: str) -> dict[str, Any]:
    """Packs the experts, unless they are packed; parts are shares of the work."""
    source, transposed = experts_in_place(model, options.get("revision"))
    with closing(source):
        contents = contents_of(source, Format(format), transposed)
        refuse_small_disk(source, Path(folder), [contents])
        total_bytes = source.inventory.total_bytes
        return asdict(pack(source, Path(folder), contents, on_bytes=lambda nbytes: tell(nbytes / total_bytes)))


def answer(
    tell: Tell,
    model: str | None,
    options: Mapping[str, str],
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
    batches: Sequence[Sequence[Key]],
) -> dict[str, Any]:
    """Answers every batch; a part is `[[kind, number, fields of Answered], ...]` of one batch."""
    with load(model, **{"parallel": data["batch"], **options, **settings}, deterministic=True) as engine:
        if not hasattr(engine.processor, "image_processor"):
            why = f"{engine.name} is a text model, but the questions are about pictures"
            raise UnsupportedModelError(f"{why}. Instead: use a vision-language model")
        for keys in batches:
            before = engine.metrics.snapshot()
            rows = ASK[data["data"]](engine, [(kind, number) for kind, number in keys], data)
            counts = (engine.metrics.snapshot() - before).computed_in(engine.format_names)
            computed = {format: count / len(rows) for format, count in counts.items()}
            tell([[*key, asdict(replace(row, computed=computed))] for key, row in rows.items()])
    return {}


def _ask_scenes(engine: Engine, keys: Sequence[Key], data: Mapping[str, Any]) -> dict[Key, Answered]:
    talks = dict(zip(keys, questions(keys[0][0], [number for _, number in keys], data["seed"]), strict=True))
    asked = ((key, partial(ask, engine, talk, draw_of(key))) for key, talk in talks.items())
    said = {key: reply.text for key, reply in asking.answered(engine, asked, len(keys))}
    turns = {key: talk.turns[-1] for key, talk in talks.items()}
    return {key: Answered(turn.question, turn.answer, said[key], score(turn, said[key]), {}) for key, turn in turns.items()}


def _ask_task(engine: Engine, keys: Sequence[Key], data: Mapping[str, Any]) -> dict[Key, Answered]:
    """The documents of one task, as many of `keys` as it has."""
    from vismoe.eval.lmms_run import run_tasks

    task = keys[0][0]
    rows = run_tasks(engine, [task], len(keys), batch_size=data["batch"])["answers"]
    if any(row["score"] is None for row in rows):
        raise InputError(
            f"{task} scores its answers together, but rows are compared answer by answer. Fix: another task (--data)"
        )
    return {
        (task, row["document"]): Answered(row.get("question", ""), str(row["target"]), str(row["answer"]), row["score"], {})
        for row in rows
    }


def _program_of_tasks() -> list[ModuleType]:
    from vismoe.eval import lmms_model, lmms_run

    return [lmms_run, lmms_model]


ASK: dict[str, Callable[..., dict[Key, Answered]]] = {"scenes": _ask_scenes, "tasks": _ask_task}
PROGRAMS: dict[str, Callable[[], list[ModuleType]]] = {"scenes": list, "tasks": _program_of_tasks}


def speed(
    tell: Tell, model: str | None, options: Mapping[str, str], settings: Mapping[str, Any], requests: int, max_tokens: int
) -> dict[str, Any]:
    """A Turn."""
    # Imported before the baseline of memory is taken.
    model_class(read_config(str(model or demo_model()), revision=options.get("revision")))
    asked = [messages(talk) for talk in questions(SPEED_KIND, range(requests + 1), SPEED_SEED)]
    before_bytes, began_s = _peak_from_here(), time.perf_counter()
    with load(model, **options, **settings) as engine:
        load_s = time.perf_counter() - began_s
        _, *counted = [figures_of(engine, each, max_tokens) for each in asked]
        device = torch.device(engine.plan.device)
        grown_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _grown_bytes(before_bytes)
        return asdict(_turn(load_s, counted, grown_bytes))


def _peak_from_here() -> int | None:
    """The memory of this process now; its peak is measured from here on. None if the system has no such counter."""
    if not CLEAR.exists():
        return None
    CLEAR.write_text("5")
    return peak_rss_bytes()


def _grown_bytes(before_bytes: int | None) -> int | None:
    return None if before_bytes is None else peak_rss_bytes() - before_bytes


def _turn(load_s: float, counted: Sequence[Figures], grown_bytes: int | None) -> SpeedTurn:
    tokens, seconds = sum(each.decode_tokens for each in counted), sum(each.decode_seconds for each in counted)
    counters = reduce(operator.add, (each.counters for each in counted))
    moved = "bytes_copied" if counters.total("bytes_copied") else "bytes_read"
    prefill_bytes, decode_bytes = (counters.total(moved, phase) for phase in (Phase.PREFILL, Phase.DECODE))
    return SpeedTurn(
        load_s=load_s,
        first_token_s=median(each.encode_seconds + each.prefill_seconds for each in counted),
        prefill_s=median(each.prefill_seconds for each in counted),
        decode_tokens_per_s=tokens / seconds if tokens and seconds else None,
        prefill_bytes=prefill_bytes / len(counted),
        decode_bytes_per_token=decode_bytes / tokens if tokens else None,
        prefill_hit_rate=counters.hit_rate(Phase.PREFILL),
        decode_hit_rate=counters.hit_rate(Phase.DECODE),
        expert_bytes=counted[0].capacity["bytes"],
        planned_bytes=counted[0].plan.total_bytes,
        grown_bytes=grown_bytes,
    )


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"describe": describe, "pack": pack_format, "answer": answer, "speed": speed}


def main() -> int:
    """Works until there are no more jobs."""
    die_with_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=out, flush=True)

        for line in sys.stdin:
            job = json.loads(line)
            try:
                result = JOBS[job.pop("do")](lambda part: say({"part": part}), **job)
            except VisMoEError as error:
                say({"error": str(error)})
            except Exception as error:  # the process boundary; the suite reports the error
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})
            else:
                say({"result": result})
            gc.collect()  # a model is a cycle of objects; frees it before the next one is loaded
    return 0


if __name__ == "__main__":
    sys.exit(main())
