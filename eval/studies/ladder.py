"""The gain of each part of the system, added one by one (VisMMoE, table 4): `python -m vismoe.eval.studies.ladder`.

Rungs: `base` pages experts with LRU, waits for every miss, and neither prunes nor predicts; `+ compression` keeps half of the
visual tokens; `+ prediction` prefetches what the lookahead predicts; `+ orchestrator` uses the default eviction order and the
number of pinned layers that is best in replay; `+ below` may compute misses in host memory. Streaming of prompts and the limit on
unused prefetch belong to the engine and are active on every rung.

Two setups: the bundled model over an emulated slow link (its last rung is `+ below`), and a generated vision-language checkpoint
that is larger than its share of memory, read from the disk past the page cache. Results are medians of alternating turns, each
with a freshly loaded model. The last line is one JSON object.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vismoe.config import Settings, format_bytes, parse_bytes
from vismoe.eval.report import study_parser, told
from vismoe.eval.studies import timed
from vismoe.eval.studies.timed import Run, TokenRequests, ask_scenes, ask_tokens, held_out, medians, take_turns
from vismoe.simulate.demands import Demands
from vismoe.simulate.pinned import best_pinned
from vismoe.simulate.replay import aligned_columns
from vismoe.trace.files import Trace

LINK_BYTES_PER_S = 60e6  # an expert of the bundled model (72 KiB) takes 1.2 ms, about the compute time of one of its layers
LAYERS, EXPERTS = 6, 48
VISION_DEPTH, VOCABULARY = 4, 32768  # a small tower and vocabulary, so that the experts dominate


@dataclass(frozen=True)
class LadderSetup:
    """A setup in which the rungs are compared; `turn` runs one of them, and records a trace if given a folder."""

    name: str
    settings: dict[str, Any]  # of every rung
    turn: Callable[..., Run]
    lookahead: str
    has_host_tier: bool
    link_bytes_per_s: float | None  # None: the speed of the first turn


def rungs(place: LadderSetup, keep: float, pinned_layers: int) -> dict[str, dict[str, Any]]:
    """Settings of each rung, by name, from the lowest up."""
    base: dict[str, Any] = dict(keep=1.0, lookahead="none", eviction="lru", pinned_layers=0, misses="wait")
    steps: dict[str, dict[str, Any]] = {
        "base": {},
        "+ compression": {"keep": keep},
        "+ prediction": {"lookahead": place.lookahead},
        "+ orchestrator": {"eviction": Settings.eviction, "pinned_layers": pinned_layers},
    }
    if place.has_host_tier:
        steps["+ below"] = {"misses": "auto"}
    found, settings = {}, {**base, **place.settings}
    for name, changed in steps.items():
        settings = settings | changed
        found[name] = settings
    return found


def calibrated_prefix(place: LadderSetup, keep: float, folder: Path) -> int:
    """The number of pinned layers that is best in replay of one recorded turn of the third rung."""
    trace = folder / f"trace-{place.name}"
    run = place.turn(rungs(place, keep, 0)["+ prediction"], trace=trace)
    demands, total = Demands.of(Trace.open(trace)), run.counters.total
    moved_bytes, stalled_s = total("bytes_read") + total("bytes_copied"), total("stall_seconds")
    others_s = max(0.0, run.prefill_s + run.decode_s - stalled_s) / max(1, total("steps"))
    return best_pinned(
        demands,
        place.settings["memory"],
        link_bytes_per_s=place.link_bytes_per_s or moved_bytes / max(stalled_s, 1e-9),
        compute_s_per_layer=others_s,
        prefetch=demands.have_scores,
    )


def climb(place: LadderSetup, keep: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Measures and prints all rungs of one setup; returns JSON."""
    pinned = calibrated_prefix(place, keep, folder)
    settings = rungs(place, keep, pinned)
    runs = take_turns({name: partial(place.turn, each) for name, each in settings.items()}, rounds)
    rows = {name: medians(each) for name, each in runs.items()}
    print(f"\n{place.name}: {settings['base']['memory']} of the experts, {rounds} turns of each rung")
    print(table(rows))
    print("settings: " + "; ".join(f"{name}: {_changed(settings, name)}" for name in settings))
    return {"place": place.name, "rounds": rounds, "rungs": {n: {**row, "settings": settings[n]} for n, row in rows.items()}}


def _changed(settings: Mapping[str, Mapping[str, Any]], name: str) -> str:
    names = list(settings)
    if name == names[0]:
        return ", ".join(f"{key}={value}" for key, value in settings[name].items())
    before = settings[names[names.index(name) - 1]]
    return ", ".join(f"{key}={value}" for key, value in settings[name].items() if before[key] != value) or "nothing changes"


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A line per rung; seconds also as shares of those of the lowest rung."""
    lines = [
        ["rung", "seconds", "of base", "prefill s", "decode s", "prefill read", "decode read", "prefill hits", "decode hits"]
    ]
    base = next(iter(rows.values()))
    for name, row in rows.items():
        shares = f"{row['seconds'] / base['seconds']:.0%}"
        seconds = [f"{row[key]:.2f}" for key in ("prefill_s", "decode_s")]
        moved = [format_bytes(row[key]) for key in ("prefill_bytes", "decode_bytes")]
        hits = [f"{row[key]:.1%}" for key in ("prefill_hit_rate", "decode_hit_rate")]
        lines.append([name, f"{row['seconds']:.2f}", shares, *seconds, *moved, *hits])
    return aligned_columns(lines, left=1)


def bundled(arguments: argparse.Namespace) -> LadderSetup:
    """The bundled model on held-out questions over an emulated link."""
    prompts = held_out(arguments.questions)
    link = {"emulated_link_bytes_per_s": arguments.link}
    return LadderSetup(
        "emulated link",
        {"memory": arguments.memory, "kernels": "fast", **link},
        partial(ask_scenes, prompts=prompts, max_tokens=arguments.tokens),
        arguments.lookahead,
        True,
        arguments.link,
    )


def generated(arguments: argparse.Namespace, folder: Path) -> LadderSetup:
    """A checkpoint of published experts with random weights, on the disk."""
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 4}
    written = timed.generated_checkpoint(folder / "checkpoint", LAYERS, VOCABULARY, VISION_DEPTH, **sizes)
    print(f"generated: {format_bytes(written.expert_bytes)} of experts, {format_bytes(written.total_bytes)} in all")
    requests = TokenRequests(new_tokens=arguments.tokens)
    return LadderSetup(
        "disk",
        {"memory": arguments.memory, "kernels": "fast", "reads": "direct"},
        lambda settings, trace=None: ask_tokens(written.folder, settings, requests, trace),
        "gate",  # there is no predictor for random weights
        False,
        None,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval ladder", __doc__)
    parser.add_argument("--places", nargs="+", choices=("link", "disk"), default=["link", "disk"])
    parser.add_argument("--memory", default="25%", help="share of the experts in memory (default: 25%%)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the visual tokens kept (default: 0.5)")
    parser.add_argument(
        "--link", type=parse_bytes, default=LINK_BYTES_PER_S, metavar="SIZE", help="bytes per second of the emulated link"
    )
    parser.add_argument(
        "--lookahead", choices=("auto", "gate", "learned"), default="auto", help="lookahead of the bundled model (default: auto)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each rung (default: 5)")
    parser.add_argument("--questions", type=int, default=18, help="questions to the bundled model (default: 18)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: 24)")
    parser.add_argument(
        "--folder", type=Path, help="folder for the generated checkpoint; removed at the end (default: a temporary one)"
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vismoe-ladder-", dir=arguments.folder) as folder:
        make = {"link": lambda: bundled(arguments), "disk": lambda: generated(arguments, Path(folder))}
        return told(
            lambda: {"ladder": [climb(make[name](), arguments.keep, arguments.rounds, Path(folder)) for name in arguments.places]}
        )


if __name__ == "__main__":
    sys.exit(main())
