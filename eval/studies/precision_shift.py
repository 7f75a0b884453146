"""Hot experts when the workload changes half-way (DynaExq): `python -m vismoe.eval.studies.precision_shift`.

A stream of requests to the bundled model: first pictures with the first half of its icons, then something else (`icons`: the
other half; `kinds`: printed words and two pictures; `text`: no picture). Policy hotness, in memory for a quarter of the experts
in the better format. After every request the study records how many experts of an oracle's choice are in the better format: the
oracle ranks experts by equation 2 without forgetting, on the half's own routing, which is recorded beforehand with exact experts.
Hot sets have followed when that share reaches 90% of its final level, or, more strictly, when it has changed by 90% of the
difference.

Rivals on the same requests: all experts in the lower format (`all low`), all in the better one within the same memory (`all high,
paged`) and with room for all (`all high`); hotness that begins with the state of an earlier run (`warm`). `--storms` times
decoding while experts move as fast as the link allows, against the same sets without moves. Links are emulated. With --keep-in an
interrupted run continues. The last line is one JSON object.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from vismoe.bench.turns import KeptTurns
from vismoe.config import parse_bytes
from vismoe.engine.engine import Engine, load
from vismoe.eval.accuracy import figures_of, messages
from vismoe.eval.plots import Panel, Series, grid_figure
from vismoe.eval.questions import THANKS, Conversation, conversation
from vismoe.eval.report import folder_of, study_parser, told
from vismoe.eval.scenes import Split
from vismoe.eval.studies.precision_speed import pack_experts, sizes
from vismoe.eval.world import NOUNS
from vismoe.planning.pair_split import TRANSIENT_SLABS
from vismoe.simulate.replay import aligned_columns
from vismoe.trace.files import Trace
from vismoe.types import ExpertInventory, Format

PERIOD_TOKENS = 32  # T
HOT_SHARE = 0.25
REACHED = 0.9
SPLIT: Split = "held-out"
FIRST_KINDS = ("exists", "what", "where", "count", "describe")
SHIFTS = {"icons": "other icons", "kinds": "printed words, two pictures", "text": "no pictures"}
AFTER = 8  # number of requests that count as the shift
HALVES = FIRST, SECOND = "first", "second"
STILL, USUAL, STORM = "standing still", "as usual", "storm"
NEVER_TOKENS = 10**9  # a period that does not end
STORM_DECAY = 0.05  # the last token alone decides which experts are hot
SUMMED = ("tokens", "promotions", "copied_bytes", "prefill_s", "decode_s", "stall_s")
LINK_BYTES_PER_S = 60e6  # a promotion takes 1.2 ms, about the compute time of a layer

Asked = list[dict[str, Any]]  # the messages of one request
Turn = dict[str, Any]


# -- the requests
def stream(shift: str, requests: int) -> tuple[list[Asked], list[Asked]]:
    """The first half and the second, `requests` each; deterministic."""
    first = _pictures(FIRST_KINDS, NOUNS[: len(NOUNS) // 2])
    second = {
        "icons": lambda: _pictures(FIRST_KINDS, NOUNS[len(NOUNS) // 2 :]),
        "kinds": lambda: (messages(conversation(kind, SPLIT, n)) for n in itertools.count() for kind in ("text", "compare")),
        "text": _texts,
    }[shift]()
    return list(itertools.islice(first, requests)), list(itertools.islice(second, requests))


def _pictures(kinds: Sequence[str], nouns: Sequence[str]) -> Iterator[Asked]:
    """Questions about pictures that show only these icons, and no text."""

    def fits(talk: Conversation) -> bool:
        return all(scene.label is None and set(scene.nouns) <= set(nouns) for scene in talk.scenes)

    for kind, number in zip(itertools.cycle(kinds), itertools.count(), strict=False):
        tried = (conversation(kind, SPLIT, number * 1000 + attempt) for attempt in itertools.count())
        yield messages(next(talk for talk in tried if fits(talk)))


def _texts() -> Iterator[Asked]:
    """Greetings, and questions whose picture is missing."""
    for number in itertools.count():
        hello, _ = THANKS[number % len(THANKS)]
        yield [{"role": "user", "content": hello}]
        yield [{"role": "user", "content": conversation("choice", SPLIT, number).turns[0].question}]


# -- one run over a stream
def run(settings: Mapping[str, Any], asked: Sequence[Asked], most_tokens: int, state: Path | None = None) -> Turn:
    """Sends every request once; returns results by request. `state`: a file with which hotness begins, which is not changed."""
    with tempfile.TemporaryDirectory() as folder:
        begun = {}
        if state is not None:
            begun["hotness_state"] = str(shutil.copy(state, Path(folder) / "state"))
        with load(**settings, **begun) as engine:
            rows = [_request(engine, one, most_tokens) for one in asked]
            plan = engine.plan
            return {
                "rows": rows,
                "hot_quota": plan.hot_quota,
                "resident": plan.resident_experts,
                "expert_bytes": plan.total_bytes,
            }


def _request(engine: Engine, asked: Asked, most_tokens: int) -> Turn:
    before = engine.formats() == 1
    figures = figures_of(engine, asked, most_tokens)
    after = engine.formats() == 1
    total = figures.counters.total
    high, low = total("computed_high"), total("computed_low")
    return {
        "tokens": sum(one.tokens for one in figures.passes),
        "counted_tokens": sum(min(one.tokens, PERIOD_TOKENS) for one in figures.passes),
        "answer_tokens": figures.answer_tokens,
        "prefill_s": figures.prefill_seconds,
        "decode_s": figures.decode_seconds,
        "decode_tokens": figures.decode_tokens,
        "stall_s": total("stall_seconds"),
        "promotions": total("promotions"),
        "demotions": total("demotions"),
        "copied_bytes": total("bytes_copied") or total("bytes_read"),
        "high_share": high / (high + low),
        "high_before": _packed(before),
        "high": _packed(after),
    }


def _packed(high: np.ndarray) -> str:
    return np.packbits(high).tobytes().hex()


def _unpacked(high: str, shape: tuple[int, int]) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(high), np.uint8), count=shape[0] * shape[1])
    return bits.reshape(shape).astype(bool)


# -- the oracle
def oracle(settings: Mapping[str, Any], asked: Sequence[Asked], most_tokens: int) -> Turn:
    """The hotness of every expert over all these requests, with exact experts: `{"scores": [L][E]}`."""
    with tempfile.TemporaryDirectory() as folder, load(**settings) as engine:
        with engine.record(Path(folder) / "trace"):
            for one in asked:
                _request(engine, one, most_tokens)
        trace = Trace.open(Path(folder) / "trace")
        return {"scores": scores_of(trace, trace.inventory).tolist()}


def scores_of(trace: Any, inventory: ExpertInventory) -> np.ndarray:
    """float64 `[L, E]`: equation 2 without forgetting. As in hotness, a pass counts as at most PERIOD_TOKENS tokens."""
    scores = np.zeros((len(inventory.layers), max(layer.num_experts for layer in inventory.layers)))
    for step in trace:
        for routing in step.layers:
            real = step.real(routing)
            ids, weights = routing.expert_ids[real].ravel(), routing.weights[real].ravel().astype(np.float64)
            chosen = (ids >= 0) & (ids < inventory.layers[routing.layer].num_experts)
            mass = np.bincount(ids[chosen], weights[chosen], minlength=scores.shape[1])
            scores[routing.layer] += mass * min(real.sum(), PERIOD_TOKENS) / real.sum()
    return scores


def hottest(scores: np.ndarray, quotas: Sequence[int]) -> np.ndarray:
    """bool `[L, E]`: the hottest of each layer, as many as its quota."""
    found = np.zeros(scores.shape, bool)
    for layer, quota in enumerate(quotas):
        found[layer, np.argsort(-scores[layer], kind="stable")[:quota]] = True
    return found


# -- the results of a run
@dataclass(frozen=True)
class Followed:
    """How hot sets follow the demand of a half. Levels are shares of the oracle's choice, tokens count from the half's
    beginning."""

    before: float  # when the half begins
    final: float  # mean of its last third
    tokens: int | None  # until 90% of the final level
    way_tokens: int | None  # until 90% of the way from the level before to the final one
    periods: float | None  # of T tokens as hotness counts them, until 90% of the way


def followed(levels: Sequence[float], tokens: Sequence[int], counted: Sequence[int]) -> Followed:
    """levels: before the half's first request, and after each; tokens, counted: of each request, in all and as hotness counts."""
    before, after = levels[0], levels[1:]
    final = mean(after[-max(1, len(after) // 3) :])

    def reached(level: float) -> int | None:
        """The number of requests until the level is reached."""
        return next((number for number, found in enumerate(levels) if found >= level), None)

    simply, way = reached(REACHED * final), reached(before + REACHED * (final - before))
    return Followed(
        before,
        final,
        None if simply is None else sum(tokens[:simply]),
        None if way is None else sum(tokens[:way]),
        None if way is None else sum(counted[:way]) / PERIOD_TOKENS,
    )


def overlap(row: str, wanted: np.ndarray) -> float:
    """The share of `wanted` that is in the better format."""
    return float((_unpacked(row, wanted.shape) & wanted).sum() / wanted.sum())


def levels_of(rows: Sequence[Turn], wanted: np.ndarray) -> list[float]:
    """The levels before the first request and after each."""
    return [overlap(rows[0]["high_before"], wanted), *(overlap(row["high"], wanted) for row in rows)]


def tokens_per_s(rows: Sequence[Turn]) -> float:
    """Tokens of answers divided by seconds of prefill and decode."""
    return sum(row["answer_tokens"] for row in rows) / sum(row["prefill_s"] + row["decode_s"] for row in rows)


def decode_tokens_per_s(rows: Sequence[Turn]) -> float:
    return sum(row["decode_tokens"] for row in rows) / sum(row["decode_s"] for row in rows)


# -- shifts
@dataclass(frozen=True)
class Setup:
    """Common to all runs: settings of every engine, the pair, tokens of an answer, requests of a half."""

    common: dict[str, Any]
    formats: str
    link_bytes_per_s: float
    most_tokens: int
    requests: int

    @property
    def link(self) -> dict[str, Any]:
        return self.common | {"emulated_link_bytes_per_s": self.link_bytes_per_s, "misses": "wait", "lookahead": "none"}

    @property
    def exact(self) -> dict[str, Any]:
        return self.common | {"memory": "100%", "deterministic": True}

    def hotness(self, memory: str, **more: Any) -> dict[str, Any]:
        return self.link | {"policy": "hotness", "formats": self.formats, "memory": memory} | more

    def identity(self, *more: Any) -> list[Any]:
        return [self.formats, self.link_bytes_per_s, self.most_tokens, self.requests, *more]


def shift_study(shift: str, setup: Setup, memory: str, rounds: int, kept: KeptTurns) -> dict[str, Any]:
    """Runs, times and prints one change of workload; returns JSON."""
    halves = dict(zip(HALVES, stream(shift, setup.requests), strict=True))
    scores = {name: oracle_scores(setup, shift, name, half, kept) for name, half in halves.items()}
    both = [*halves[FIRST], *halves[SECOND]]
    low = f"int{setup.formats.partition('/')[2]}"
    settings = {
        "all low": setup.link | {"format": low, "memory": memory, "pinned_layers": 0},
        "hotness": setup.hotness(memory),
        "all high, paged": setup.link | {"format": "raw", "memory": memory, "pinned_layers": 0},
        "all high": setup.link | {"format": "raw", "memory": "100%", "pinned_layers": 0},
    }
    jobs = {name: (setup.identity(shift, one), partial(run, one, both, setup.most_tokens)) for name, one in settings.items()}
    turns = kept.take(jobs, rounds)
    hotness = [turn["rows"] for turn in turns["hotness"]]
    quotas = turns["hotness"][0]["hot_quota"]
    wanted = {name: hottest(each, quotas) for name, each in scores.items()}
    parts = {FIRST: slice(setup.requests), SECOND: slice(setup.requests, None)}
    result = {
        "shift": shift,
        "formats": setup.formats,
        "hot_quota": quotas,
        "halves_agree": float((wanted[FIRST] & wanted[SECOND]).sum() / wanted[FIRST].sum()),
        "followed": {name: [vars(_follow(rows[part], wanted[name])) for rows in hotness] for name, part in parts.items()},
        "throughput": _throughput(turns, setup.requests),
        "series": _series(hotness[0], wanted, setup.requests),
        "stall_s": sum(row["stall_s"] for rows in hotness for row in rows),
        "high_share": {
            name: median(mean(row["high_share"] for row in rows[part]) for rows in hotness) for name, part in parts.items()
        },
    }
    _print_shift(result, rounds)
    return result


def oracle_scores(setup: Setup, shift: str, name: str, half: Sequence[Asked], kept: KeptTurns) -> np.ndarray:
    """The oracle's scores `[L, E]` of a half."""
    job = (setup.identity(shift, name), partial(oracle, setup.exact, half, setup.most_tokens))
    (turn,) = kept.take({f"oracle of {name}": job}, 1)[f"oracle of {name}"]
    return np.array(turn["scores"])


def _follow(rows: Sequence[Turn], wanted: np.ndarray) -> Followed:
    return followed(levels_of(rows, wanted), [row["tokens"] for row in rows], [row["counted_tokens"] for row in rows])


def _throughput(turns: Mapping[str, Sequence[Turn]], requests: int) -> dict[str, Any]:
    """For each rival, medians: tokens per second overall and through the shift; relative to all low, medians of ratios within
    rounds."""
    parts = {"overall": slice(None), "through the shift": slice(requests, requests + AFTER)}
    rates = {
        name: {part: [tokens_per_s(turn["rows"][where]) for turn in each] for part, where in parts.items()}
        | {"decode": [decode_tokens_per_s(turn["rows"]) for turn in each]}
        for name, each in turns.items()
    }
    return {
        name: {
            **{part: median(values) for part, values in own.items()},
            **{f"{part}, of all low": _ratio(values, rates["all low"][part]) for part, values in own.items()},
            "copied_bytes": median(sum(row["copied_bytes"] for row in turn["rows"]) for turn in turns[name]),
        }
        for name, own in rates.items()
    }


def _ratio(own: Sequence[float], base: Sequence[float]) -> float:
    """The median of ratios within rounds."""
    return median(a / b for a, b in zip(own, base, strict=True))


def _series(rows: Sequence[Turn], wanted: Mapping[str, np.ndarray], requests: int) -> dict[str, list[float]]:
    """For one run, after each request: tokens from the shift, shares of both oracles' choices, and of computations."""
    ends = np.cumsum([row["tokens"] for row in rows])
    return {
        "tokens": (ends - ends[requests - 1]).tolist(),
        **{half: [overlap(row["high"], its) for row in rows] for half, its in wanted.items()},
        **{name: [row[name] for row in rows] for name in ("high_share", "promotions")},
    }


def _print_shift(result: dict[str, Any], rounds: int) -> None:
    print(f"\nshift to {SHIFTS[result['shift']]}, {result['formats']}, {sum(result['hot_quota'])} hot experts, {rounds} rounds")
    print(
        f"the halves' oracles agree in {result['halves_agree']:.0%} of their choice; stalls of hotness: {result['stall_s']:.3f} s"
    )
    lines = [["half", "before", "final", "tokens to 90% of it", "tokens, 90% of the way", "periods", "computed in the better"]]
    for half, each in result["followed"].items():
        middle = {key: _median([one[key] for one in each]) for key in each[0]}
        levels = [f"{middle[key]:.0%}" for key in ("before", "final")]
        counts = [_count(middle[key]) for key in ("tokens", "way_tokens", "periods")]
        lines.append([half, *levels, *counts, f"{result['high_share'][half]:.0%}"])
    print(aligned_columns(lines, left=1))
    lines = [["", "tokens/s", "of all low", "through the shift", "of all low", "decode", "of all low", "MiB copied"]]
    for name, row in result["throughput"].items():
        cells = [
            text
            for part in ("overall", "through the shift", "decode")
            for text in (f"{row[part]:.1f}", f"{row[f'{part}, of all low']:.1%}")
        ]
        lines.append([name, *cells, f"{row['copied_bytes'] / 2**20:.1f}"])
    print(aligned_columns(lines, left=1))


def _count(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


# -- warm and cold
def start_study(setup: Setup, memory: str, rounds: int, kept: KeptTurns, folder: Path) -> dict[str, Any]:
    """The first half from a cold start, and from the state that an earlier run over similar requests has left."""
    asked, _ = stream("icons", setup.requests)
    state = _state(setup, memory, folder)
    scores = oracle_scores(setup, "icons", FIRST, asked, kept)
    jobs = {
        name: (setup.identity("start", memory), partial(run, setup.hotness(memory), asked, setup.most_tokens, begun))
        for name, begun in (("cold", None), ("warm", state))
    }
    turns = kept.take(jobs, rounds)
    wanted = hottest(scores, turns["cold"][0]["hot_quota"])
    result = {name: _start(each, wanted) for name, each in turns.items()}
    lines = [["start", "before", "final", "tokens to 90% of it", f"first {AFTER} in the better", "all in the better"]]
    for name, row in result.items():
        shares = [f"{row[key]:.0%}" for key in ("early_high_share", "high_share")]
        lines.append([name, f"{row['before']:.0%}", f"{row['final']:.0%}", _count(row["tokens"]), *shares])
    print(f"\nstart, {setup.formats}, {rounds} rounds\n{aligned_columns(lines, left=1)}")
    return {"formats": setup.formats, "starts": result}


def _start(turns: Sequence[Turn], wanted: np.ndarray) -> dict[str, Any]:
    follows = [_follow(turn["rows"], wanted) for turn in turns]
    shares = [[row["high_share"] for row in turn["rows"]] for turn in turns]
    return {
        "before": median(one.before for one in follows),
        "final": median(one.final for one in follows),
        "tokens": _median([one.tokens for one in follows]),
        "early_high_share": median(mean(share[:AFTER]) for share in shares),
        "high_share": median(mean(share) for share in shares),
        "levels": levels_of(turns[0]["rows"], wanted),
    }


def _state(setup: Setup, memory: str, folder: Path) -> Path:
    """The file of hotness after requests like those of the first half, none of which is repeated."""
    file = folder / f"state-{setup.formats.replace('/', '-')}"
    if not file.exists():
        pictures = _pictures(FIRST_KINDS, NOUNS[: len(NOUNS) // 2])
        earlier = list(itertools.islice(pictures, setup.requests, 2 * setup.requests))
        run(setup.hotness(memory, hotness_state=str(file)), earlier, setup.most_tokens)
    return file


# -- storms
def storm_study(setup: Setup, memory: str, rounds: int, kept: KeptTurns, folder: Path) -> dict[str, Any]:
    """Decoding while experts move all the time, over the emulated link and from the disk's cache."""
    asked = list(itertools.islice(_pictures(("describe",), NOUNS), setup.requests))
    state = _state(setup, memory, folder)
    ways: dict[str, dict[str, Any]] = {
        STILL: {"hotness_period": NEVER_TOKENS},
        USUAL: {},
        STORM: {"hotness_period": 1, "hotness_decay": STORM_DECAY},
    }
    result: list[dict[str, Any]] = []
    for where, link in (("emulated link", setup.link_bytes_per_s), ("page cache", None)):
        jobs = {}
        for name, way in ways.items():
            settings = setup.hotness(memory, **way) | {"emulated_link_bytes_per_s": link}
            jobs[name] = (setup.identity("storm", settings), partial(run, settings, asked, setup.most_tokens, state))
        result.append({"where": where, "rows": _storm_rows(kept.take(jobs, rounds))})
        print(f"\nexperts that move, {setup.formats}, {where}, {rounds} rounds\n{_storm_table(result[-1]['rows'])}")
    return {"formats": setup.formats, "storms": result}


def _storm_rows(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Turn]:
    """Medians over rounds; ratios within rounds."""
    each_s = {
        name: {
            "token": [1 / decode_tokens_per_s(turn["rows"]) for turn in each],
            "prefill": [mean(row["prefill_s"] for row in turn["rows"]) for turn in each],
        }
        for name, each in turns.items()
    }
    rows: dict[str, Turn] = {}
    for name, each in turns.items():
        sums = [{key: sum(row[key] for row in turn["rows"]) for key in SUMMED} for turn in each]
        rows[name] = {
            **{f"{part}_s": median(own) for part, own in each_s[name].items()},
            **{f"{part}_ratio": _ratio(own, each_s[STILL][part]) for part, own in each_s[name].items()},
            "promotions_per_token": median(one["promotions"] / one["tokens"] for one in sums),
            "moved_bytes_per_s": median(one["copied_bytes"] / (one["prefill_s"] + one["decode_s"]) for one in sums),
            "stall_s": sum(one["stall_s"] for one in sums),
            "high_share": median(mean(row["high_share"] for row in turn["rows"]) for turn in each),
        }
    return rows


def _storm_table(rows: Mapping[str, Turn]) -> str:
    lines = [["", "token ms", "ratio", "prefill ms", "ratio", "promotions/token", "MiB/s moved", "stalls s", "in the better"]]
    for name, row in rows.items():
        times = [
            text for part in ("token", "prefill") for text in (f"{1e3 * row[f'{part}_s']:.2f}", f"{row[f'{part}_ratio']:.2f}")
        ]
        moved = [f"{row['promotions_per_token']:.2f}", f"{row['moved_bytes_per_s'] / 2**20:.1f}"]
        lines.append([name, *times, *moved, f"{row['stall_s']:.3f}", f"{row['high_share']:.0%}"])
    return aligned_columns(lines, left=1)


# -- everything
def memory_of(formats: str, share: float) -> str:
    """Memory for `share` of the experts in the better format, all others in the other one, and copies in flight."""
    of = sizes(None, formats)
    hot = round(share * of["experts"])
    nbytes = (hot + TRANSIENT_SLABS) * of["high_bytes"] + (of["experts"] - hot) * of["low_bytes"]
    return f"{100 * nbytes / of['experts'] / of['raw_bytes'] + 1e-4:.4f}%"


def study(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs and prints everything; returns JSON."""
    store, kept = folder / "demo-store", KeptTurns(arguments.keep_in and folder / "shift-turns.jsonl")
    pack_experts(None, store, [Format.INT4, Format.INT2])
    shifts, starts, storms = [], [], []
    for formats in arguments.formats:
        common = {"store": str(store), "kernels": "fast", "keep": 1.0}
        setup = Setup(common, formats, arguments.link, arguments.tokens, arguments.requests)
        memory = memory_of(formats, arguments.hot)
        print(f"{formats}: {memory} of the experts' bytes, an emulated link of {arguments.link / 1e6:g} MB/s")
        shifts += [shift_study(shift, setup, memory, arguments.rounds, kept) for shift in arguments.shifts]
        if arguments.starts:
            starts.append(start_study(setup, memory, arguments.rounds, kept, folder))
        if arguments.storms:
            storms.append(storm_study(setup, memory, arguments.rounds, kept, folder))
    if arguments.figures and shifts:
        draw(shifts, arguments.figures / "precision-shift.png")
    return {"shifts": shifts, "starts": starts, "storms": storms}


def draw(shifts: Sequence[dict[str, Any]], file: Path) -> None:
    """For each change of workload, a panel of what hot sets contain, over tokens from the change."""
    names = {
        "first": "of the first half's hottest",
        "second": "of the second half's hottest",
        "high_share": "computations in the better format",
    }
    panels = []
    for one in shifts:
        series = [Series(name, one["series"]["tokens"], one["series"][key]) for key, name in names.items()]
        title = f"{one['formats']}, then {SHIFTS[one['shift']]}"
        panels.append(Panel(series, "tokens from the change", "share", title, percent=True, y_limits=(0, 1.02)))
    grid_figure(file, panels, columns=min(3, len(panels)))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval precision-shift", __doc__)
    parser.add_argument("--shifts", nargs="*", choices=list(SHIFTS), default=list(SHIFTS))
    parser.add_argument("--formats", nargs="+", default=["16/4", "16/2"], metavar="PAIR", help="default: 16/4 and 16/2")
    parser.add_argument("--hot", type=float, default=HOT_SHARE, help="share of the experts in the better format (default: 0.25)")
    parser.add_argument("--link", type=parse_bytes, default=LINK_BYTES_PER_S, metavar="SIZE", help="bytes per second, emulated")
    parser.add_argument("--requests", type=int, default=24, help="requests of each half (default: 24)")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each rival (default: 3)")
    parser.add_argument("--starts", action="store_true", help="compare a cold start with one from a stored state")
    parser.add_argument("--storms", action="store_true", help="measure the time of a token while experts move all the time")
    parser.add_argument("--keep-in", type=Path, metavar="FOLDER", help="folder that keeps stores and turns for later runs")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="folder for the plot, e.g. assets/figures")
    arguments = parser.parse_args(argv)
    with folder_of(arguments.keep_in) as folder:
        return told(lambda: study(arguments, folder))


if __name__ == "__main__":
    sys.exit(main())
