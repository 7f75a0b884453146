"""Whether drafts are taken where they are faster, in virtual time: `python -m vismoe.eval.studies.draft_replay`.

The routing of held-out answers, and what the experts in int4 or int2 would have drafted, are recorded once. They are
replayed with every share of the experts in memory and every rate of the link, at equal memory: without drafts, and with a draft
pool in the place of as many bytes of experts. A drafted token is right with probability alpha, whatever was recorded. Drafts
of 1, 3 and 7 tokens are compared with those that the governor chooses, and with `auto`: the governor, with the draft pool that
`worth` promises most of, or none. Each figure is virtual time per token over that without drafts.

Computing takes what the demo model does on one core (v(n) = 3.15 + 1.6 n ms, d = 2.9 ms). Prints a table, then one JSON object.
"""

import argparse
import dataclasses
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vismoe.config import MOST_DRAFTED
from vismoe.engine.engine import demo_model
from vismoe.eval.report import add_several, folder_of, study_parser, told
from vismoe.eval.studies.draft_coverage import recorded
from vismoe.eval.studies.precision_speed import pack_experts
from vismoe.predictor_training.drafts import SHARES, Rounds, missing_experts, one_pass
from vismoe.simulate.demands import Conditions, demands_of_step, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.speculate.governor import NONE, Governor, MeasuredRound
from vismoe.speculate.worth import LEAST, DraftCurves, Fidelity, RoundRates, worth
from vismoe.trace.steps import DraftedRound, LayerRouting, Routed, TraceStep
from vismoe.types import ExpertInventory, Format, Phase

DRAFT_S, PASS_S, ROW_S = 2.9e-3, 3.15e-3, 1.6e-3
POOLS = {"int4": 0.27, "int2": 0.16}  # of the experts' bytes in bfloat16
SETTLING = 0.2  # share of the tokens that fill the slabs, and are not counted


@dataclass(frozen=True)
class Token:
    """A pass of its own, and what a draft of it would route to at every layer."""

    alone: TraceStep
    drafted: list[Routed]

    @property
    def request(self) -> str:
        return self.alone.request


def tokens_of(rounds: Sequence[DraftedRound]) -> list[Token]:
    """The rows of rounds one after the other. What a draft of a round's last row would choose was not recorded: as the model."""
    tokens = []
    for each in rounds:
        for row in range(len(each.drafts) + 1):
            layers, mine = each.verified.layers, slice(row, row + 1)
            of = [LayerRouting(one.layer, one.expert_ids[mine], one.weights[mine]) for one in layers]
            drafted = each.drafts[row] if row < len(each.drafts) else [(one.expert_ids, one.weights) for one in of]
            kinds = each.verified.kinds[mine]
            tokens.append(Token(TraceStep(each.verified.request, Phase.DECODE, kinds, of), drafted))
    return tokens


def token_s(
    inventory: ExpertInventory, tokens: Sequence[Token], share: float, link: float, alpha: float, governor: Governor | None
) -> float:
    """Virtual seconds per token. governor: chooses the length of drafts; None: there are none."""
    layers = len(inventory.layers)
    conditions = Conditions(
        link_bytes_per_s=link, compute_s_per_layer=PASS_S / layers, compute_s_per_token=ROW_S / layers, streams=False
    )
    pager = VirtualPager(inventory, slabs_per_geometry(f"{100 * share:g}%", inventory), "lfu", conditions)
    mine, chance, expert_bytes = None, random.Random(0), inventory.layouts[0].record_bytes
    at, began_at, began_s = 0, 0, 0.0
    while at < len(tokens) - MOST_DRAFTED:
        if not began_at and at >= SETTLING * len(tokens):
            began_at, began_s = at, pager.now_s
        if governor is not None and (mine is None or tokens[at].request != tokens[at - 1].request):
            mine = governor.begin_request()
        left = next((n for n in range(1, MOST_DRAFTED + 1) if tokens[at + n].request != tokens[at].request), MOST_DRAFTED + 1) - 1
        k = mine.choose({"self": left})[1] if mine is not None else 0
        verified = one_pass([token.alone for token in tokens[at : at + k + 1]])
        demands = list(demands_of_step(inventory, at, int(tokens[at].request.split("-")[1]), verified))
        before, began = pager.metrics.snapshot(), pager.now_s
        if k:
            pager.run_round([token.drafted for token in tokens[at : at + k]], DRAFT_S, demands)
        else:
            for demand in demands:
                pager.run(demand)
        accepted = next((n for n in range(k) if chance.random() >= alpha), k)
        if mine is not None:
            happened = (pager.metrics.snapshot() - before).total
            drafted_s = k * DRAFT_S
            verify_s = pager.now_s - began - drafted_s
            mine.ended(MeasuredRound.of(happened, expert_bytes, "self" if k else NONE, k, accepted, drafted_s, verify_s))
        at += accepted + 1
    return (pager.now_s - began_s) / (at - began_at)


def fidelity_of(rounds: Sequence[DraftedRound]) -> Fidelity:
    measured = Rounds(MOST_DRAFTED)
    for each in rounds:
        measured.add(each, MOST_DRAFTED)
    return measured.fidelity()


def study(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = arguments.model or str(demo_model())
    with folder_of(None) as store:
        pack_experts(folder, store, [Format(name) for name in POOLS])
        found = {name: recorded(folder, str(store), Format(name), MOST_DRAFTED, arguments.rounds) for name in POOLS}
    inventory = found["int4"][0]
    tokens = {name: tokens_of(rounds) for name, (_, rounds, _) in found.items()}
    fidelities = {name: fidelity_of(rounds) for name, (_, rounds, _) in found.items()}
    missing = missing_experts(inventory, (token.alone for token in tokens["int4"]))
    rows = []
    for share, link, alpha in itertools.product(arguments.shares, arguments.links, arguments.alphas):
        rate, right = 1e6 * link, (alpha,) * MOST_DRAFTED
        curves = DraftCurves(
            SHARES, missing, {of: dataclasses.replace(each, acceptance=right) for of, each in fidelities.items()}
        )
        rates = RoundRates(DRAFT_S, lambda rows: PASS_S + rows * ROW_S, inventory.layouts[0].record_bytes, rate)
        none_s = token_s(inventory, tokens["int4"], share, rate, alpha, None)
        row: dict[str, Any] = {"share": share, "link": link, "alpha": alpha, "none_ms": 1e3 * none_s}
        promised = {}
        for name, pool in POOLS.items():
            if share - pool < SHARES[0]:
                continue
            of_pool = [token_s(inventory, tokens[name], share - pool, rate, alpha, Governor(fixed=k)) for k in (1, 3, 7)]
            governed = token_s(inventory, tokens[name], share - pool, rate, alpha, Governor())
            promised[name] = worth(curves, name, rates, share, pool).gain
            row |= {f"{name}_fixed": min(of_pool) / none_s, name: governed / none_s, f"{name}_promised": promised[name]}
        best = max(promised, key=promised.__getitem__, default="")
        row["auto"] = row[best] if promised and promised[best] >= LEAST else 1.0
        row["best"] = min([1.0, *(row[name] for name in promised), *(row[f"{name}_fixed"] for name in promised)])
        rows.append(row)
    print_table(Console(), rows)
    return {"study": "draft-replay", "rounds": arguments.rounds, "rows": rows}


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "share",
        "MB/s",
        "alpha",
        "none ms",
        *(f"{n} {w}" for n in POOLS for w in ("fixed", "governed", "promised")),
        "auto / best",
    )
    for row in rows:
        cells = [row.get(f"{name}{what}") for name in POOLS for what in ("_fixed", "", "_promised")]
        figures = [f"{cell:.2f}" if cell is not None else "-" for cell in cells]
        about = (f"{row['share']:.0%}", f"{row['link']:g}", f"{row['alpha']:g}", f"{row['none_ms']:.2f}")
        table.add_row(*about, *figures, f"{row['auto'] / row['best']:.3f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval draft-replay", __doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder (default: the bundled demo model)")
    add_several(parser, "--shares", [0.3, 0.5, 0.75, 0.9], "SHARE", "shares of the experts in memory", float)
    add_several(parser, "--links", [15, 60, 120, 240, 480], "RATE", "rates of the link, MB/s", float)
    add_several(parser, "--alphas", [0.5, 0.8, 1.0], "SHARE", "probabilities that a drafted token is right", float)
    parser.add_argument("--rounds", type=int, default=60, help="recorded rounds of 8 tokens (default: 60)")
    arguments = parser.parse_args(argv)
    return told(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
