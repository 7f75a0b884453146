"""One benchmark from its options to its report: prepare the weights, refuse what is unfair, run the workers, collect results."""

import dataclasses
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vismoe.bench.control import measure_control
from vismoe.bench.environment import ceilings_of, commit
from vismoe.bench.fairness import Entry, FairConditions, does_not_fit, labels, refusals
from vismoe.bench.job import GGUF_TYPES, IN_PLACE, OURS, Contestant, Job, contestants_of
from vismoe.bench.limits import Groups, imports_bytes
from vismoe.bench.prompt import picture_tokens, random_ids
from vismoe.bench.report import Work, ceilings_json, observed, summary, warnings
from vismoe.bench.run import run_all
from vismoe.bench.subject import (
    GeneratedModel,
    GgufFile,
    Store,
    Subject,
    generate,
    gguf_file,
    gguf_of,
    packed,
    refuse_unusable,
    sketch,
    store_folder,
    subject_of,
)
from vismoe.config import ENGINE_DEFAULTS, Settings, format_bytes, parse_bytes
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, ConfigError, InputError
from vismoe.machine.facts import facts, package_versions
from vismoe.machine.hardware import cores, host_memory, torch_device
from vismoe.models.family.families import positions_of
from vismoe.models.inputs.images import open_image
from vismoe.models.inputs.prompts import PromptBuilder
from vismoe.models.load.preview import preview
from vismoe.planning.needs import decode_read_bytes
from vismoe.planning.plan import Plan
from vismoe.planning.sizes import size_up
from vismoe.store.index import files_of
from vismoe.store.packed import find_store, formats_in

BASELINE_PACKAGES = ("accelerate", "llama_cpp_python", "gguf")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of the command line."""

    model: str | None  # None: the geometry, or the demo model
    geometry: str | None
    layers: int | None
    skew: float
    seed: int
    folder: Path
    prompt: str | None
    prompt_tokens: int
    new_tokens: int
    picture: tuple[int, int] | None
    repeats: int
    warm: int
    baselines: tuple[str, ...]
    parallel: tuple[int, ...]  # numbers of requests that are also decoded at once
    formats: tuple[str, ...]  # VisMoE's formats, each a contestant; empty: the engine's default
    kernels: tuple[str, ...]  # VisMoE's kernels, each a contestant; empty: the engine's default
    limit: int | None
    warm_cache: bool
    gguf: str | None
    threads: int | None
    trace: str | None
    control: bool
    moe_time: bool
    token_time: bool
    dtype: str | None
    revision: str | None
    device: str | None
    settings: dict[str, Any]  # other settings than format and kernels
    command: tuple[str, ...]
    quiet: bool


def run(order: BenchOptions, progress: Callable[[int, bool], AbstractContextManager[Callable[[str], None]]]) -> dict[str, Any]:
    """Returns the report, the object of `--json`. All checks come before a gigabyte is written. `progress` gives a bar of so
    many steps, quiet or not; each call of what it yields begins the next one.

    Raises ConfigError for an unfair comparison, with every reason, and for a measurement that is impossible here.
    """
    several = order.kernels if len(order.kernels) > 1 else ()
    contestants = contestants_of(order.baselines, order.formats or (IN_PLACE,), several)
    groups = Groups(order.limit)
    _refuse_impossible(order, contestants)
    subject, stores = _subject(order, contestants)
    task = _task(order, subject, contestants)
    unfit = {entry.name: reason for entry in task.entries if (reason := does_not_fit(entry, task.conditions))}
    jobs = {one.name: _job_of(one, task.job, order, subject) for one in contestants if one.name not in unfit}
    jobs[contestants[0].name] = replace(jobs[contestants[0].name], trace=order.trace)
    ceilings = ceilings_of(subject.files[0].parent, task.job.device, Settings.of(**task.job.settings), progress=not order.quiet)
    control = _control(subject) if order.control else None
    began_s = time.time()
    with progress(order.repeats * len(jobs), order.quiet) as begin:
        outcome = run_all(jobs, order.repeats, groups, begin)
    prompt_tokens = len(task.job.token_ids) + picture_tokens(subject.config, order.picture)
    uniform = order.geometry is not None and not order.skew
    work = observed(Work.of(subject.backbone, subject.inventory, prompt_tokens, uniform), outcome.runs)
    works = {}
    for one in contestants:
        fixed = decode_read_bytes(backbone_of(subject.backbone, [run for run in outcome.runs if run["contestant"] == one.name]))
        works[one.name] = work.with_experts_of(subject.expert_share(one.expert_type)).with_backbone_of(fixed)
    unstarted = [{"contestant": name, "failed": reason} for name, reason in unfit.items()]
    figures = summary([*outcome.runs, *unstarted], contestants, works, ceilings, len(subject.inventory.layers))
    machine = dataclasses.asdict(facts())
    return {
        "command": list(order.command),
        "commit": commit(),
        "versions": machine.pop("versions") | package_versions(BASELINE_PACKAGES),
        "hardware": machine,
        "model": subject.to_json(),
        "stores": [dataclasses.asdict(store) for store in stores],
        "conditions": _conditions_json(order, task.job, task.conditions, groups),
        "labels": [
            *labels(task.entries, task.conditions),
            *_routing_label(order),
            *ceilings.doubts,
            *warnings(figures),
            *(f"no timeline was written: {run['trace_failed']}" for run in outcome.runs if "trace_failed" in run),
        ],
        "ceilings": ceilings_json(ceilings, work, outcome.runs),
        "control": control,
        "timeline": None if order.trace is None else _phases_of(Path(order.trace), began_s),
        "contestants": figures,
        "runs": [{name: value for name, value in run.items() if name not in ("notes", "logits")} for run in outcome.runs],
        "interrupted": outcome.interrupted,
    }


def _phases_of(trace: Path, began_s: float) -> dict[str, Any] | None:
    """What a timeline says of the phases of its request: `vismoe.timeline.Occupancy` by name; None: none was written since
    `began_s`, of time.time, or not all of it."""
    try:
        return json.loads(trace.read_text())["otherData"]["phases"] if trace.stat().st_mtime >= began_s else None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class _Task:
    """A benchmark that is possible and fair."""

    job: Job
    entries: tuple[Entry, ...]
    conditions: FairConditions


def _refuse_impossible(order: BenchOptions, contestants: Sequence[Contestant]) -> None:
    """Raises for options that are impossible with any model."""
    if order.threads and order.threads > cores():
        raise ConfigError(f"--threads {order.threads}: this process may use {cores()} cores. Fix: --threads {cores()} or fewer")
    if order.trace and not Path(order.trace).absolute().parent.is_dir():
        raise InputError(f"--trace {order.trace}: the folder {Path(order.trace).absolute().parent} is missing. Fix: create it")
    if order.gguf and not _gguf_types(contestants):
        raise ConfigError("Only llama.cpp reads --gguf. Fix: add: --baseline llama.cpp, or leave it out")
    if order.gguf and _gguf_types(contestants) != ["bf16"]:
        raise ConfigError(
            "--gguf names one file, but a lossy format is compared with another file of quantised experts, which VisMoE only "
            "makes from generated checkpoints. Fix: --formats raw, lossless or both"
        )
    if any(one.way == "accelerate" for one in contestants):
        refuse_unusable(order.folder)


def _gguf_types(contestants: Sequence[Contestant]) -> list[str]:
    """The types of experts in the GGUF files that contestants read."""
    reading = (one for one in contestants if one.package == "llama_cpp" or one.format in GGUF_TYPES)
    return list(dict.fromkeys(one.expert_type for one in reading))


def _subject(order: BenchOptions, contestants: Sequence[Contestant]) -> tuple[Subject, list[Store]]:
    """(the model, its packed stores). A generated model is written only after its configuration passed all checks."""
    twins = _gguf_types(contestants) if order.gguf is None else []
    if order.geometry is None:
        subject = subject_of(order.model or str(demo_model()), order.revision, order.dtype)
        if twins:
            _task(order, subject, contestants)
        for experts in twins:
            gguf_of(subject, experts, quiet=order.quiet)
        return subject, []
    model = GeneratedModel(order.geometry, order.layers, order.skew, order.seed, mtp=order.settings.get("draft") == "mtp")
    with sketch(model) as planned:
        _task(order, planned, contestants)
    wanted = list(dict.fromkeys(one.setting for one in contestants if _is_packed(one, order)))
    subject = generate(order.folder, model, gguf=twins, formats=wanted, quiet=order.quiet)
    if not order.quiet:
        kept = "kept for later benchmarks (vismoe bench --clean deletes it)"
        print(f"{subject.name}: {format_bytes(subject.weights_bytes)}, {kept}", file=sys.stderr)
    return subject, packed(subject, wanted, quiet=order.quiet)


def _task(order: BenchOptions, subject: Subject, contestants: Sequence[Contestant]) -> _Task:
    """The benchmark to run; raises if it is impossible with this model, or unfair."""
    for experts in _gguf_types(contestants) if order.gguf is None else ():
        gguf_file(subject, experts)
    job, plans = _job(order, subject, contestants)
    entries, conditions = _entries(contestants, subject, job, order.gguf), _conditions(order, plans)
    if unfair := refusals(entries, conditions):
        raise ConfigError("the comparison would be unfair and was not measured: " + "\n".join(unfair))
    return _Task(job, tuple(entries), conditions)


def _job(order: BenchOptions, subject: Subject, contestants: Sequence[Contestant]) -> tuple[Job, list[Plan]]:
    """The options that the workers share, and VisMoE's plans."""
    ids = _prompt_ids(order, subject)
    longest = len(ids) + picture_tokens(subject.config, order.picture) + order.new_tokens
    positions = positions_of(subject.config)
    if positions and longest > positions:
        fewer = ["fewer --new-tokens", "a shorter --prompt" if order.prompt else "fewer --prompt-tokens"]
        fewer += ["a smaller --image"] if order.picture else []
        message = f"prompt and answer have {longest} tokens, but the model has {positions} positions. Fix: {', or '.join(fewer)}"
        raise ConfigError(message)
    rows = max(order.parallel, default=1)
    together = rows * (longest + order.new_tokens) if rows > 1 else longest  # they are decoded at once, and then by turns
    settings = {"context": together, "parallel": rows, **order.settings}
    if settings["context"] < together:
        raise ConfigError(
            f"--context {settings['context']}: prompts and answers have {together} tokens. Fix: --context {together}"
        )
    device = str(torch_device(order.device))
    if settings.get("memory", "auto") == "auto" and order.limit is not None and device == "cpu":
        settings["memory"] = max(1, order.limit - imports_bytes())
    plans = [_plan(order, subject, _settings(one, settings, order, subject), device) for one in contestants if one.is_ours]
    job = Job(
        way=OURS,
        model=subject.name,
        dtype=subject.dtype,
        device=device,
        token_ids=ids,
        new_tokens=order.new_tokens,
        warm_requests=order.warm,
        threads=order.threads or cores(),
        held_bytes=max(subject.held_bytes(plan) for plan in plans),
        io_threads=max(plan.io_threads for plan in plans),
        settings=settings,
        revision=subject.revision,
        picture=order.picture,
        files=tuple(map(str, subject.files)),
        moe_time=order.moe_time,
        parallel=order.parallel,
        prompts=tuple(random_ids(subject.config, len(ids), order.seed + row) for row in range(max(order.parallel, default=0))),
    )
    return job, plans


def _settings(one: Contestant, settings: dict[str, Any], order: BenchOptions, subject: Subject) -> dict[str, Any]:
    """The settings of a VisMoE contestant. Packed experts of a generated checkpoint are in a folder that settings must name."""
    kernels = one.kernels or next(iter(order.kernels), None)
    found = {**settings, **({"kernels": kernels} if kernels else {}), **({"format": one.setting} if order.formats else {})}
    if one.format in GGUF_TYPES:
        file = gguf_file(subject, one.format)
        return {**found, "gguf": str(file)} if file.exists() else {**found, "format": "int8" if one.format == "q8_0" else "int4"}
    return {**found, "store": str(store_folder(subject))} if _is_packed(one, order) else found


def _is_packed(one: Contestant, order: BenchOptions) -> bool:
    """Whether it is a VisMoE contestant that reads the store which benchmarks create."""
    return (
        one.is_ours and one.format not in (IN_PLACE, *GGUF_TYPES) and order.geometry is not None and "store" not in order.settings
    )


def _plan(order: BenchOptions, subject: Subject, settings: dict[str, Any], device: str) -> Plan:
    planned = Settings.of(**{**ENGINE_DEFAULTS, **settings})
    try:
        return preview(subject.name, planned, device=device, revision=subject.revision, dtype=subject.dtype)
    except BudgetError as error:
        needed = re.fullmatch(r"--memory (\S+)", error.fix)
        if order.limit is None or "memory" in order.settings or needed is None:
            raise
        least = size_up(parse_bytes(needed[1]) + imports_bytes())
        raise ConfigError(
            f"--limit {format_bytes(order.limit)} is too small: VisMoE needs {needed[1]} for this model, and "
            f"{format_bytes(imports_bytes())} are needed by the process itself. Fix: --limit {least} or more"
        ) from error


def backbone_of(backbone: Sequence[tuple[str, int]], runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """(component, bytes) as these runs of a contestant held them, where they said it; otherwise as the checkpoint has them."""
    plans = [run["notes"]["plan"] for run in runs if "plan" in run.get("notes", ())]
    held = {part["name"]: part["bytes"] for plan in plans[-1:] for part in plan["parts"]}
    return [(name, held.get(name, nbytes)) for name, nbytes in backbone]


def _prompt_ids(order: BenchOptions, subject: Subject) -> tuple[int, ...]:
    if order.prompt is None:
        return random_ids(subject.config, order.prompt_tokens, order.seed)
    prompts = PromptBuilder.of(types.SimpleNamespace(config=subject.config), subject.name, subject.revision)
    return tuple(prompts.build([{"role": "user", "content": order.prompt}], open_image).inputs["input_ids"][0].tolist())


def _job_of(one: Contestant, job: Job, order: BenchOptions, subject: Subject) -> Job:
    """The job of one contestant: it drops only its own files, and only VisMoE has settings."""
    job = replace(job, read_bytes=subject.matrix_bytes(one.expert_type))
    if one.package == "llama_cpp":
        gguf = order.gguf or str(gguf_file(subject, one.expert_type))
        return replace(job, way=one.way, settings={}, files=(gguf,), gguf=gguf)
    if not one.is_ours:
        offload = str(order.folder / f"offload-{os.getpid()}") if one.package == "accelerate" else None
        return replace(job, way=one.way, settings={}, offload_folder=offload)
    settings = _settings(one, job.settings, order, subject)
    files = (settings["gguf"],) if "gguf" in settings else job.files
    files = (*files, *_store_files(files[0], settings))
    return replace(job, settings=settings, files=files, token_time=order.token_time)


def _store_files(file: str, settings: dict[str, Any]) -> list[str]:
    """Files of packed experts that VisMoE may read with these settings, of the checkpoint that has this file."""
    folder = Path(settings["store"]) if "store" in settings else find_store(Path(file))
    if folder is None:
        return []
    return [
        str(path)
        for format in formats_in(folder)
        if settings.get("format", format) == format
        for path in files_of(folder, format)
    ]


def _entries(contestants: Sequence[Contestant], subject: Subject, job: Job, gguf: str | None) -> list[Entry]:
    """`gguf` is the file that the user named; a GGUF file from a benchmark has the weights of the subject."""
    theirs = GgufFile.read(Path(gguf), subject.dtype) if gguf else None
    if theirs and (reason := theirs.difference(subject)):
        raise ConfigError(f"--gguf {gguf} is another model ({reason}). Fix: name a file with the weights of this model")
    entries = []
    for one in contestants:
        llama = one.package == "llama_cpp"
        smaller = (1 - subject.expert_share(one.expert_type)) * subject.expert_bytes
        whole = (theirs.tensor_bytes if theirs else subject.language_bytes) if llama else subject.weights_bytes
        dtype = theirs.precision if llama and theirs else subject.dtype
        entries.append(Entry(one, dtype, whole - int(smaller), "cpu" if llama else job.device))
    return entries


def _conditions(order: BenchOptions, plans: Sequence[Plan]) -> FairConditions:
    return FairConditions(
        memory_bytes=max(plan.budget_bytes if plan.device == "cpu" else plan.host_bytes for plan in plans),
        imports_bytes=imports_bytes() if order.limit is not None or order.baselines else 0,
        limit_bytes=order.limit,
        ram_bytes=host_memory()[1],
        warm_cache=order.warm_cache,
        emulated_link="emulated_link_bytes_per_s" in order.settings,
        picture=order.picture is not None,
    )


def _conditions_json(order: BenchOptions, job: Job, conditions: FairConditions, groups: Groups) -> dict[str, Any]:
    ids = len(job.token_ids)
    prompt = f"a prompt of {ids} tokens" if order.prompt is not None else f"{ids} random ids (seed {order.seed})"
    picture = f" after a picture of {order.picture[0]} x {order.picture[1]}" if order.picture else ""
    return {
        **dataclasses.asdict(conditions),
        "held_bytes": job.held_bytes,
        "limited_by": groups.how,
        "prompt": prompt + picture,
        "prompt_tokens": ids,
        "picture": order.picture,
        "new_tokens": order.new_tokens,
        "repeats": order.repeats,
        "warm_requests": order.warm,
        "threads": job.threads,
        "device": job.device,
        "settings": job.settings,
    }


def _routing_label(order: BenchOptions) -> list[str]:
    """Notes for random ids and weights, which do not route like words and trained weights."""
    if order.prompt is not None:
        return []
    if order.geometry is not None:
        routing = f"skewed with Zipf exponent {order.skew:g}" if order.skew else "uniform"
        return [
            f"random weights: routing is {routing} (--skew), and equally likely tokens let answers in half precision part early"
        ]
    return ["random ids: routing differs from that of real text. Fix: --prompt TEXT"]


def _control(subject: Subject) -> dict[str, Any]:
    layers = subject.inventory.layers
    most_experts, top_k = max(layer.num_experts for layer in layers), max(layer.top_k for layer in layers)
    return measure_control(len(layers), most_experts, top_k).to_json()
