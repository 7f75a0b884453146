"""Layers that find all their experts resident when drafted tokens are verified: `python -m vismoe.eval.studies.draft_coverage`.

The model drafts with its own experts in int4 or int2 and verifies with the exact ones, greedily, on held-out scenes; an accepted
draft goes on, a wrong one is replaced by the model's own token. What the routers choose in draft passes and in verification is
recorded, as rounds of k draft passes, and replayed in virtual time: with promises, and by demand alone (LFU), in as many slabs.
A draft pass takes as long as some copies of an expert (`--copies`), so that the link has that much time for promises. Synthetic
rounds have a given fidelity: the probability that a choice of a draft pass is the row's own.

`rows` are those that verification demands: k + 1, of which the last is a token whose routing no draft pass has seen, or only k.
Coverage is the share of layers of verification without a miss. Prints a table, then one JSON object on the last line.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from vismoe.engine.engine import demo_model, load
from vismoe.eval.accuracy import messages
from vismoe.eval.questions import KINDS, conversation
from vismoe.eval.report import add_several, folder_of, study_parser, told
from vismoe.eval.studies.precision_speed import pack_experts
from vismoe.models.inputs.images import fetch_image
from vismoe.models.inputs.prompts import PromptBuilder
from vismoe.models.load.runtime import runtime_of
from vismoe.predictor_training.drafts import rounds_of
from vismoe.simulate.demands import Conditions, slabs_per_geometry
from vismoe.simulate.replay import aligned_columns
from vismoe.simulate.rounds import replay_rounds
from vismoe.trace.steps import DraftedRound, LayerRouting, TraceStep
from vismoe.trace.synthetic import drafted_rounds
from vismoe.types import ExpertInventory, Format

LAYER_COPIES = 0.6  # a layer of the model computes for so many copies of an expert: the demo model at 120 MB/s
MOST_TOKENS = 60  # of an answer
SETTLING = 0.2  # share of the rounds that fill the slabs, and are not counted


def with_rows(rounds: Sequence[DraftedRound], rows: int) -> list[DraftedRound]:
    """The same rounds, of whose verified tokens only the first `rows` are demanded."""

    def cut(step: TraceStep) -> TraceStep:
        layers = [LayerRouting(each.layer, each.expert_ids[:rows], each.weights[:rows]) for each in step.layers]
        return TraceStep(step.request, step.phase, step.kinds[:rows], layers)

    return [DraftedRound(each.drafts, cut(each.verified)) for each in rounds]


def recorded(
    folder: str, store: str, format: Format, drafts: int, count: int
) -> tuple[ExpertInventory, list[DraftedRound], float]:
    """(the model's experts, `count` rounds over held-out scenes, the share of their drafts that was accepted)."""

    def rounds(model: Any) -> tuple[ExpertInventory, list[DraftedRound], float]:
        builder, made, accepted = PromptBuilder(engine.processor, model.config.image_token_id), list[DraftedRound](), 0
        for number in itertools.count():
            talk = conversation(KINDS[number % len(KINDS)], "held-out", 9_000_000 + number)
            inputs = builder.build(messages(talk), fetch_image).inputs.to(model.device)
            for one, right in rounds_of(model, dict(inputs), drafts, MOST_TOKENS, f"question-{number}"):
                made.append(one)
                accepted += right
                if len(made) == count:
                    return runtime_of(model).store.inventory, made, accepted / (drafts * count)
        raise AssertionError

    settings: dict[str, Any] = {"memory": "100%", "store": store, "calibration": "none", "device": "cpu"}
    with load(folder, draft="self", draft_format=str(format), **settings) as engine:
        return engine.with_model(rounds)


def measure(
    inventory: ExpertInventory, rounds: Sequence[DraftedRound], budgets: Sequence[str], copies: float, rows: int
) -> list[dict[str, Any]]:
    """One row for each budget."""
    found, chosen = [], with_rows(rounds, rows)
    rate = float(max(layout.record_bytes for layout in inventory.layouts))  # an expert takes one second
    conditions = Conditions(link_bytes_per_s=rate, compute_s_per_layer=LAYER_COPIES, streams=False)
    for budget in budgets:
        slabs = slabs_per_geometry(budget, inventory)
        settled = int(SETTLING * len(rounds))
        by_demand, promised = (
            replay_rounds(inventory, chosen, slabs, draft_s=copies, promises=promises, settled=settled, conditions=conditions)
            for promises in (False, True)
        )
        count = promised.counters.total
        found.append(
            {
                "budget": budget,
                "rows": rows,
                "by_demand": by_demand.coverage,
                "promised": promised.coverage,
                "misses_by_demand": by_demand.counters.total("misses") / by_demand.layer_passes,
                "misses_promised": count("misses") / promised.layer_passes,
                "stall_ratio": promised.stall_s / max(by_demand.stall_s, 1e-9),
                "bytes_ratio": count("bytes_read") / max(by_demand.counters.total("bytes_read"), 1.0),
                "foreseen": count("foreseen") / max(1.0, count("hits") + count("misses")),
                "useless": 1 - count("foreseen") / max(1.0, count("promised")),
                "wasted": count("wasted_promised_bytes") / max(1.0, count("promised_bytes")),
            }
        )
    return found


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    formats, folder = [Format(name) for name in arguments.formats], arguments.model or str(demo_model())
    traces: list[tuple[dict[str, Any], ExpertInventory, list[DraftedRound]]] = []
    progress, kinds = Console(stderr=True), list(itertools.product(arguments.drafts, formats))
    with folder_of(None) as store:
        pack_experts(folder, store, formats)
        for k, format in track(kinds, "recording", console=progress, transient=True):
            inventory, rounds, accepted = recorded(folder, str(store), format, k, arguments.rounds)
            traces.append(({"drafts": str(format), "k": k, "accepted": accepted}, inventory, rounds))
    for k, fidelity in itertools.product(arguments.drafts, arguments.fidelities):
        inventory, rounds = drafted_rounds(rounds=arguments.rounds, drafts=k, fidelity=fidelity, seed=k)
        traces.append(({"drafts": f"synthetic {fidelity:g}", "k": k, "accepted": 1.0}, inventory, rounds))
    rows = []
    for about, inventory, rounds in track(traces, "replaying", console=progress, transient=True):
        for verified in (about["k"], about["k"] + 1):
            rows += [about | each for each in measure(inventory, rounds, arguments.budgets, arguments.copies, verified)]
    print(table(rows))
    return {"study": "draft-coverage", "rounds": arguments.rounds, "copies": arguments.copies, "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as aligned text; misses are those of a layer, stall and bytes shares of those by demand."""
    head = "drafts k rows budget LFU promises times misses then stall bytes foreseen wasted".split()
    shares = ("stall_ratio", "bytes_ratio", "foreseen", "wasted")
    cells = [head]
    for row in rows:
        times = f"{row['promised'] / row['by_demand']:.2f}" if row["by_demand"] else "-"
        coverage = [f"{row['by_demand']:.3f}", f"{row['promised']:.3f}", times]
        misses = [f"{row[name]:.2f}" for name in ("misses_by_demand", "misses_promised")]
        which = [row["drafts"], str(row["k"]), str(row["rows"]), row["budget"]]
        cells.append([*which, *coverage, *misses, *(f"{row[name]:.2f}" for name in shares)])
    return aligned_columns(cells, left=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval draft-coverage", __doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder (default: the bundled demo model)")
    add_several(parser, "--budgets", ["25%", "50%", "75%"], "SHARE", "shares of the experts in memory")
    add_several(parser, "--drafts", [3, 6], "K", "draft passes of a round", int)
    add_several(parser, "--formats", ["int4", "int2"], "FORMAT", "formats of the experts that draft")
    add_several(parser, "--fidelities", [0.97, 0.9], "SHARE", "fidelities of synthetic drafts", float)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each kind (default: 100)")
    parser.add_argument("--copies", type=float, default=8.0, help="copies of an expert in the time of a draft pass (default: 8)")
    arguments = parser.parse_args(argv)
    return told(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
