"""Generated checkpoints, run on the device by the workers of `vismoe bench`: ours at several shares, and others beside it."""

import contextlib
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vismoe.bench.gpu_check.summary import WAITS
from vismoe.bench.job import BITS_PER_WEIGHT, COLD, OURS, Job
from vismoe.bench.limits import Groups
from vismoe.bench.prompt import picture_tokens, random_ids
from vismoe.bench.report import Work
from vismoe.bench.run import ReadyWorker
from vismoe.bench.subject import GeneratedModel, Subject, generate, packed, sketch, store_folder
from vismoe.config import ENGINE_DEFAULTS, Settings
from vismoe.engine.engine import demo_model, load
from vismoe.errors import VisMoEError
from vismoe.machine.hardware import cores
from vismoe.models.load.preview import preview

HELD_LIKE = "25%"  # the share whose device bytes accelerate gets
NEW_TOKENS, ACCELERATE_TOKENS = 32, 4  # accelerate moves every weight for every token
WORKER_S = 75.0  # the longest that one worker may take
PICTURE = (448, 448)
QUESTION = "What is in the picture?"
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class CheckEntrant:
    """One row of a contest: a worker that answers the first of `prompts` (tokens) twice, and then the others."""

    name: str
    prompts: tuple[int, ...]
    way: str = OURS
    settings: dict[str, Any] = field(default_factory=dict)
    format: str | None = "raw"  # of the experts; None: several
    new_tokens: int = NEW_TOKENS
    picture: tuple[int, int] | None = None


def ours(options: Mapping[str, Any], share: float, format: str = "raw", waiting: bool = False) -> CheckEntrant:
    """VisMoE with `share` percent of the experts on the device. `memory` is a share of their bytes in bfloat16, which smaller
    formats take less of; the plan rounds down to whole experts, hence a little more. waiting: the CPU computes none of them."""
    bits = BITS_PER_WEIGHT.get(format, 16.0)
    memory = "100%" if share == 100 and format == "raw" else f"{share * bits / 16 + 1e-3:.3f}%"
    settings = {"memory": memory, "format": format, **({"misses": "wait"} if waiting else {})}
    name = f"vismoe {format} {share:g}%{WAITS if waiting else ''}"
    return CheckEntrant(name, tuple(options["prompts"]), OURS, settings, format)


def contest(options: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """Ours at four shares, at the first also without the CPU, transformers with all weights on the device, accelerate with the
    device bytes of ours at 25%."""
    prompts = tuple(options["prompts"])
    first, *others = (ours(options, share) for share in options["shares"])
    resident = CheckEntrant("transformers", prompts, "transformers")
    offloaded = CheckEntrant("accelerate", prompts[:1], "accelerate", new_tokens=ACCELERATE_TOKENS)
    waiting = ours(options, options["shares"][0], waiting=True)
    return _run([first, resident, offloaded, waiting, *others], options, keep, "layers")


def resident(options: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """All experts on the device: ours in bfloat16 and int4, transformers as it comes and compiled."""
    prompts = tuple(options["prompts"][-1:])
    others = [CheckEntrant(way, prompts, way) for way in ("transformers-compiled", "transformers")]
    return _run([ours(options, 100.0), ours(options, 100.0, "int4"), *others], options, keep, "small_layers", ["int4"])


def whole(options: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """Ours at four shares and transformers with all weights on the device, of as many layers as fit; then ours in int4."""
    resident = CheckEntrant("transformers", tuple(options["prompts"]), "transformers")
    first, *others = (ours(options, share) for share in options["shares"])
    raw = _run([first, resident, *others], options, keep, "whole_layers")
    again = [ours(options, share, "int4") for share in options["shares"]]
    return _run(again, options, keep, "whole_layers", ["int4"], raw["rows"])


def policies(options: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """Two formats at once: hotness with 16/4 at half, and with 4/2 at a fifth of the bytes in bfloat16."""
    prompts = tuple(options["prompts"][-1:])
    settings = [{"policy": "hotness", "formats": pair, "memory": memory} for pair, memory in (("16/4", "50%"), ("4/2", "20%"))]
    entrants = [CheckEntrant(f"vismoe hotness {one['formats']}", prompts, OURS, one, None) for one in settings]
    return _run(entrants, options, keep, "small_layers", ["int4", "int2"])


def image(options: dict[str, Any], keep: Keep) -> dict[str, Any]:
    """The bundled model's answer about a picture, against the one that is right; and a picture for the large geometry, timed."""
    failures = list[str]()

    def ask() -> None:
        pictures = demo_model().parent / "images"
        right = json.loads((pictures / "pictures.json").read_text())["demo.png"]["answer"]
        content = [{"type": "image", "image": str(pictures / "demo.png")}, {"type": "text", "text": QUESTION}]
        try:
            with load(device=options["device"], memory="25%") as engine:
                said = "".join(engine.chat([{"role": "user", "content": content}])).strip()
            if said != right:
                failures.append(f"the bundled model said {said!r} instead of {right!r}")
        except VisMoEError as error:  # a package may be missing, which the second picture does not need
            said = None
            failures.append(f"the bundled model was not asked: {error}")
        keep({"answer": said, "failures": failures})

    one = ours(options, 25.0)
    one = replace(one, name=f"{one.name} with a picture", picture=PICTURE, prompts=one.prompts[-1:])
    found = _run([one], options, keep, "small_layers", meanwhile=ask)
    return found | {"failures": failures + found["failures"]}


def needed_bytes(geometry: str, layers: int, stores: Sequence[str] = ()) -> int:
    """Disk for a generated checkpoint of `layers` and packed stores of its experts."""
    with sketch(GeneratedModel(geometry, layers)) as planned:
        return planned.weights_bytes + int(sum(planned.expert_share(format) * planned.expert_bytes for format in stores))


def _run(
    entrants: Sequence[CheckEntrant],
    options: Mapping[str, Any],
    keep: Keep,
    layers: str,
    formats: Sequence[str] = (),
    before: Sequence[dict[str, Any]] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`rows`, those of `before` among them, and `failures` of ours; what was measured is kept after each. The weights, of
    `options[layers]` layers and packed in these formats, are made while the workers import what they need, and so is what
    `meanwhile` does."""
    rows = list(before)
    with contextlib.ExitStack() as stack:
        ready = [stack.enter_context(ReadyWorker(entrant.way, cores(), Groups(None))) for entrant in entrants]
        meanwhile()
        model = GeneratedModel(options["geometry"], options[layers])
        subject = generate(Path(options["folder"]), model, quiet=True)
        if formats:
            packed(subject, list(formats), quiet=True)
        for entrant, worker in zip(entrants, ready, strict=True):
            run = worker.answer(job_of(entrant, subject, options), WORKER_S)
            rows.append(row_of(entrant, run, decode_bytes(subject, entrant)))
            keep({"rows": rows, "layers": len(subject.inventory.layers)})
    ours_of = [row for row in rows if row["way"] == OURS]
    failures = [f"{row['name']}: {row['failed']}" for row in ours_of if row["failed"]]
    return {"rows": rows, "failures": failures + other_answers([row for row in ours_of if not row["failed"]])}


def other_answers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of ours whose tokens differ from those of the first row of the same format: a budget changed the answer. Where the CPU
    computed some misses it may, since it rounds otherwise."""
    first: dict[str, Mapping[str, Any]] = {}
    rows = [row for row in rows if row["format"] and not row["computed_on_host"]]
    for row in rows:
        first.setdefault(row["format"], row)
    found = [(row, first[row["format"]]) for row in rows]
    return [f"{row['name']} gave other tokens than {one['name']}" for row, one in found if row["token_ids"] != one["token_ids"]]


def job_of(entrant: CheckEntrant, subject: Subject, options: Mapping[str, Any]) -> Job:
    """The job of a row's worker. It names no files: what is measured is warm, so the page cache may keep the weights."""
    longest = max(entrant.prompts)
    context = longest + picture_tokens(subject.config, entrant.picture) + entrant.new_tokens
    settings = {"context": context, **entrant.settings}
    if entrant.way == OURS and settings.get("format") != "raw":
        settings["store"] = str(store_folder(subject))
    held = 0
    if entrant.way == "accelerate":  # in memory, what ours holds there with a quarter of the experts
        planned = Settings.of(**{**ENGINE_DEFAULTS, "memory": HELD_LIKE, "context": context})
        held = subject.held_bytes(preview(subject.name, planned, device=options["device"]))
    return Job(
        way=entrant.way,
        model=subject.name,
        dtype=subject.dtype,
        device=options["device"],
        token_ids=random_ids(subject.config, longest, 0),
        new_tokens=entrant.new_tokens,
        warm_requests=1,
        threads=cores(),
        held_bytes=held,
        settings=settings if entrant.way == OURS else {},
        picture=entrant.picture,
        offload_folder=str(Path(options["folder"]) / f"offload-{os.getpid()}") if entrant.way == "accelerate" else None,
        first_tokens=entrant.prompts[1:] * 2,  # the first one of a length compiles and loads programs
    )


def decode_bytes(subject: Subject, entrant: CheckEntrant) -> float | None:
    """Bytes of weights that one decoded token must read on the device; None if experts are in several formats."""
    if entrant.format is None:
        return None
    work = Work.of(subject.backbone, subject.inventory, max(entrant.prompts), uniform=True)
    return work.with_experts_of(subject.expert_share(entrant.format)).decode_bytes


def row_of(entrant: CheckEntrant, run: Mapping[str, Any], token_bytes: float | None) -> dict[str, Any]:
    """The figures of a worker's warm requests, or why it failed. `token_bytes`: what a decoded token reads on the device."""
    row: dict[str, Any] = {"name": entrant.name, "way": entrant.way, "format": entrant.format, "failed": run.get("failed")}
    row["decode_bytes"] = token_bytes
    if row["failed"]:
        return row
    warm = [request for request in run["requests"] if request["state"] != COLD]
    rates = [1 / seconds for request in warm for seconds in request["token_s"]]
    row["decode_tokens_per_s"] = _quartiles(rates)
    row["first_token_s"] = {str(request["prompt_tokens"]): request["encode_s"] + request["prefill_s"] for request in warm}
    row["first_request_s"] = run["requests"][0]["encode_s"] + run["requests"][0]["prefill_s"]
    row["load_s"] = run["load_s"]
    row["peak_reserved_bytes"] = run["notes"].get("peak_reserved_bytes")
    row["token_ids"] = list(run["requests"][0]["token_ids"])
    if entrant.way == OURS:
        plan, decoding = run["notes"]["plan"], [(request["counters"] or {}).get("decode", {}) for request in warm]
        names = ("hits", "misses", "bytes_copied", "bytes_computed_on_host")
        hits, misses, link, by_cpu = (sum(one.get(name, 0) for one in decoding) for name in names)
        tokens = sum(request["decode_tokens"] for request in warm)
        row |= {"hits": hits / (hits + misses) if hits + misses else None}
        row |= {"link_bytes_per_token": link / tokens, "cpu_bytes_per_token": by_cpu / tokens}
        row |= {"planned_bytes": plan["total_bytes"], "kernels": plan["kernels"], "backends": run["notes"]["backends"]}
        row["counters"] = [request["counters"] or {} for request in run["requests"]]
        row["computed_on_host"] = sum(of.get("computed_on_host", 0) for one in row["counters"] for of in one.values())
    return row


def _quartiles(rates: Sequence[float]) -> dict[str, float] | None:
    if len(rates) < 2:
        return None
    low, median, high = statistics.quantiles(rates, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}
