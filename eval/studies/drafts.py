"""What drafts cost and save, timed in the real engine with the bundled model: `python -m vismoe.eval.studies.drafts`.

Rows of one setup take turns within one process, each with a freshly loaded model; figures are medians of the turns, ratios are to
the setup's first row. All rows of a setup give the same answers, which is checked.

`link`: experts arrive over an emulated link, at the same cache for all rows (the copy that drafts comes on top). `memory`: the
same at equal memory, where the copy takes its room from the cache. `wrong`: drafts that are never right, with the governor, and
what a fixed length would cost without it. `text`: looking up what followed before, on answers that repeat an earlier turn
(copying) and on others, everything resident. `disk`: experts read past the page cache. The last line is one JSON object.

`mtp`, `mtp-link`, `mtp-disk`: by the layer that publishers train for it, everything resident, over the link, and from disk, with
as many slabs in all rows. They want --mtp-model, which `python assets/train_mtp_layer.py` makes of the bundled model.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from vismoe.bench.turns import KeptTurns
from vismoe.config import NO_CALIBRATION, parse_bytes
from vismoe.engine.drafting import Drafter
from vismoe.engine.engine import load
from vismoe.errors import VisMoEError
from vismoe.eval.accuracy import figures_of, messages
from vismoe.eval.questions import conversation
from vismoe.eval.report import add_several, folder_of, study_parser, told
from vismoe.eval.studies.precision_speed import pack_experts
from vismoe.types import Format, Phase

FORMATS = ("int4", "int2")
POOL_SHARE = 0.278  # of the experts' bytes: the bundled model's records of both formats have the same size
SEED = 9_200_000  # of the pictures
NONE, SETUPS = "none", ("link", "memory", "wrong", "text", "disk")
OF_MTP = {"mtp": 100.0, "mtp-link": 25.0, "mtp-disk": 50.0}  # percent of the experts that are resident
MTP_LAYERS = 8 / 9  # of the bundled model, over those with the one that drafts
Conversation = list[dict[str, Any]]
Row = dict[str, Any]  # settings; `_wrong`: its drafts are never right


def rows_of(setup: str, link_bytes_per_s: float) -> dict[str, Row]:
    """Settings of each row, by its name; the first one is what the others are compared with."""
    link: Row = {"emulated_link_bytes_per_s": link_bytes_per_s, "misses": "wait"}
    itself = {
        f"{kind} {k}": {"draft": "self", "draft_format": kind, "draft_tokens": k} for kind in FORMATS for k in (3, 6, "auto")
    }
    ngram = {"draft": "ngram"}
    rows: dict[str, Row]
    if setup == "link":
        rows = {NONE: {}, "no lookahead": {"lookahead": "none"}, "ngram": ngram, **itself}
        common = {"memory": "25%", **link}
    elif setup == "memory":
        room = {"memory": f"{50 - 100 * POOL_SHARE:.1f}%"}
        rows, common = {NONE: {"memory": "50%"}, **{name: room | row for name, row in itself.items()}}, link
    elif setup == "wrong":
        wrong: dict[str, Row] = {"ngram": ngram, "int4 auto": itself["int4 auto"], "ngram 3": {**ngram, "draft_tokens": 3}}
        rows = {NONE: {}, **{name: {**row, "_wrong": True} for name, row in wrong.items()}}
        common = {"memory": "25%"}
    elif setup in OF_MTP:
        share = OF_MTP[setup]
        room = {"memory": f"{share if share == 100 else MTP_LAYERS * share:.2f}%", "draft": "mtp"}
        rows = {NONE: {"memory": f"{share}%"}, "ngram": {"memory": f"{share}%", **ngram}}
        rows |= {f"mtp {k}": {**room, "draft_tokens": k} for k in (1, 2, 3, "auto")}
        of_setup: dict[str, Row] = {"mtp-link": link, "mtp-disk": {"reads": "direct"}}
        common = {"calibration": NO_CALIBRATION} | of_setup.get(setup, {})
    elif setup == "text":
        rows, common = {NONE: {}, "ngram": ngram}, {"memory": "100%"}
    else:
        rows = {NONE: {}, "ngram": ngram, "int4 auto": itself["int4 auto"]}
        common = {"memory": "50%", "reads": "direct"}
    return {name: common | row for name, row in rows.items()}


@contextmanager
def never_right() -> Iterator[None]:
    """Within, whatever drafts says other tokens than the model; what is looked up is found always."""
    by_itself = Drafter._by_itself

    def looked_up(drafter: Drafter, loop: Any, most: int) -> list[int]:
        return [1] * most

    def wrong(drafter: Drafter, loop: Any, count: int) -> list[int]:
        return [1 for _ in by_itself(drafter, loop, count)]

    with mock.patch.object(Drafter, "_looked_up", looked_up), mock.patch.object(Drafter, "_by_itself", wrong):
        yield


def turn(row: Row, conversations: Mapping[str, Sequence[Conversation]], tokens: int) -> dict[str, Any]:
    """One turn of a row: by group of conversations, decode seconds per token and what drafts did; and the answers."""
    settings = {name: value for name, value in row.items() if not name.startswith("_")}
    with load(**settings) as engine, never_right() if row.get("_wrong") else nullcontext():
        kind, found, answers, over_time = settings.get("draft", NONE), {}, [], {}
        first = next(iter(conversations.values()))[0]
        figures_of(engine, first, tokens, draft=kind)  # trials, and the first reads
        for name, group in conversations.items():
            figures = [figures_of(engine, one, tokens, draft=kind) for one in group]
            answers += [one.answer for one in figures]
            drafts = [one.drafts for one in figures if one.drafts is not None]
            decoded, rounds = sum(one.decode_tokens for one in figures), sum(one.rounds for one in drafts)
            accepted = sum(one.accepted for one in drafts)
            passes = [sum(each.phase is Phase.DECODE for each in one.passes) for one in figures]
            over_time[name] = [
                round(one.drafts.drafted / max(1, of), 2) for one, of in zip(figures, passes, strict=True) if one.drafts
            ]
            found[name] = {
                "token_s": sum(one.decode_seconds for one in figures) / max(1, decoded),
                "tokens_per_pass": decoded / max(1, decoded - accepted),
                "rounds": rounds,
                "drafted": sum(one.drafted for one in drafts),
                "accepted": accepted,
                "promised": sum(one.promised for one in drafts),
                "foreseen": sum(one.foreseen for one in drafts),
                "misses_per_token": sum(one.counters.total("misses", Phase.DECODE) for one in figures) / max(1, decoded),
            }
        return {"groups": found, "answers": answers, "over_time": over_time}


def conversations_of(setup: str, count: int) -> dict[str, list[Conversation]]:
    talks = [messages(conversation("describe", "held-out", SEED + number)) for number in range(count)]
    if setup != "text":
        return {"scenes": talks}
    again = []
    for talk in talks:  # the same is asked again, behind its answer: a copying task
        with load(memory="100%") as engine:
            answer = figures_of(engine, talk, 64, draft=NONE).answer
        again.append([*talk, {"role": "assistant", "content": [{"type": "text", "text": answer}]}, talk[-1]])
    return {"scenes": talks, "copying": again}


def measured(setup: str, arguments: Any, store: str) -> dict[str, Any]:
    """Medians of a setup's rows, by row and group; ratios of times to the first row. Raises VisMoEError for other answers."""
    rows = rows_of(setup, arguments.link)
    common: Row = {"device": "cpu", "context": 2048}
    common |= {"model": str(arguments.mtp_model)} if setup in OF_MTP else {"store": store}
    talks = conversations_of(setup, arguments.prompts)
    jobs = {name: (None, partial(turn, common | row, talks, arguments.tokens)) for name, row in rows.items()}
    turns = KeptTurns().take(jobs, arguments.rounds)
    answers = turns[NONE][0]["answers"]
    for name, taken in turns.items():
        if any(one["answers"] != answers for one in taken):
            raise VisMoEError(f"{setup}: {name} answered otherwise than without drafts")
    found: dict[str, Any] = {}
    for name, taken in turns.items():
        for group in talks:
            each = [one["groups"][group] for one in taken]
            figures = {key: median(one[key] for one in each) for key in each[0]}
            base = [one["groups"][group]["token_s"] for one in turns[NONE]]
            figures["time_ratio"] = median(one["token_s"] / other for one, other in zip(each, base, strict=True))
            figures["guessed_per_pass"] = taken[-1]["over_time"][group]  # by conversation, in order
            found.setdefault(name, {})[group] = figures
    return {"settings": rows, "rows": found}


def print_rows(console: Console, setup: str, rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    table = Table(title=setup, title_justify="left", box=None)
    for name in ("row", "of", "time", "ms a token", "tokens a pass", "guessed", "right", "foreseen", "misses a token"):
        table.add_column(name, justify="left" if name in ("row", "of") else "right")
    for name, groups in rows.items():
        for group, one in groups.items():
            foreseen = f"{one['foreseen'] / one['promised']:.1%}" if one["promised"] else "-"
            counts = [f"{one['drafted']:.0f}", f"{one['accepted']:.0f}", foreseen, f"{one['misses_per_token']:.2f}"]
            speed = [f"{one['time_ratio']:.3f}", f"{1000 * one['token_s']:.1f}", f"{one['tokens_per_pass']:.2f}"]
            table.add_row(name, group, *speed, *counts)
    console.print(table)


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    parser = study_parser(program, __doc__)
    add_several(parser, "--setups", SETUPS, "NAME", f"which of {', '.join((*SETUPS, *OF_MTP))} (default: all but those of mtp)")
    parser.add_argument("--mtp-model", type=Path, metavar="FOLDER", help="the bundled model with a layer that drafts")
    parser.add_argument(
        "--link", type=parse_bytes, default=parse_bytes("60MB"), metavar="SIZE", help="bytes per second (default: 60MB)"
    )
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="conversations of each group (default: 4)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="longest answer (default: 48)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each row (default: 5)")
    parser.add_argument("--keep-in", type=Path, metavar="FOLDER", help="keep the packed experts here")
    chosen = parser.parse_args(arguments)
    if chosen.mtp_model is None and set(chosen.setups) & set(OF_MTP):
        parser.error("setups of mtp want --mtp-model: python assets/train_mtp_layer.py --out FOLDER makes it")

    def study() -> dict[str, Any]:
        with folder_of(chosen.keep_in) as folder:
            store = str(folder / "store")
            if set(chosen.setups) - set(OF_MTP):
                pack_experts(None, folder / "store", [Format(name) for name in FORMATS])
            found = {}
            for setup in chosen.setups:
                found[setup] = measured(setup, chosen, store)
                print_rows(Console(width=140), setup, found[setup]["rows"])
            return {"study": "drafts", "link_bytes_per_s": chosen.link, "setups": found}

    return told(study)


if __name__ == "__main__":
    sys.exit(main())
