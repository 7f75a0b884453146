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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from vismoe.engine.engine import demo_model
from vismoe.eval.accuracy import prompts
from vismoe.eval.questions import KINDS, conversation
from vismoe.eval.report import add_several, study_parser, told
from vismoe.eval.studies.format_quality import SIXTEEN_BIT, ExpertWeights, FormatContestant
from vismoe.models.family.families import expert_parameters
from vismoe.models.inputs.processor import load_processor
from vismoe.models.load.locate import inventory_of
from vismoe.simulate.demands import Conditions, slabs_per_geometry
from vismoe.simulate.replay import aligned_columns
from vismoe.simulate.rounds import replay_rounds
from vismoe.trace.steps import DraftedRound, LayerRouting, TraceStep
from vismoe.trace.synthetic import drafted_rounds
from vismoe.types import ExpertInventory, Format, Phase, TokenKind

LAYER_COPIES = 0.6  # a layer of the model computes for so many copies of an expert: the demo model at 120 MB/s
MOST_TOKENS = 60  # of an answer
SETTLING = 0.2  # share of the rounds that fill the slabs, and are not counted


def with_rows(rounds: Sequence[DraftedRound], rows: int) -> list[DraftedRound]:
    """The same rounds, of whose verified tokens only the first `rows` are demanded."""

    def cut(step: TraceStep) -> TraceStep:
        layers = [LayerRouting(each.layer, each.expert_ids[:rows], each.weights[:rows]) for each in step.layers]
        return TraceStep(step.request, step.phase, step.kinds[:rows], layers)

    return [DraftedRound(each.drafts, cut(each.verified)) for each in rounds]


class SelfDrafts:
    """Rounds of a model that drafts with its own experts in another format, recorded by plain transformers."""

    def __init__(self, folder: str, drafts: Sequence[Format]):
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", experts_implementation="eager").eval()
        self.processor = load_processor(folder)
        self.inventory = inventory_of(self.model, None)
        exact_and_drafts = [SIXTEEN_BIT, *map(FormatContestant, drafts)]
        weights = ExpertWeights(self.model, exact_and_drafts)
        self._modules, self._weights = weights.modules, {}
        for contestant in exact_and_drafts:
            weights.put(contestant)
            copies = [{name: each.detach().clone() for name, each in expert_parameters(m).items()} for m in weights.modules]
            self._weights[contestant.format] = copies
        self._routed: list[tuple[np.ndarray, np.ndarray]] = []
        for module in self._modules:
            module.register_forward_pre_hook(self._note)

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        self._routed.append((args[1].numpy().copy(), args[2].float().numpy().copy()))

    def _compute_in(self, format: Format) -> None:
        for module, copies in zip(self._modules, self._weights[format], strict=True):
            for name, parameter in expert_parameters(module).items():
                parameter.data = copies[name]

    def _routing(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """By layer, of the passes since the last call."""
        routed, self._routed = self._routed, []
        return routed

    @torch.inference_mode()
    def rounds(self, format: Format, drafts: int, count: int) -> tuple[list[DraftedRound], float]:
        """(`count` rounds, of whose drafts this share was accepted)."""
        made: list[DraftedRound] = []
        accepted, asked = 0, self._questions()
        while len(made) < count:
            number, inputs = next(asked)
            self._compute_in(Format.RAW)
            if hasattr(self.model.model, "rope_deltas"):
                self.model.model.rope_deltas = None
            out = self.model(**inputs, use_cache=True)
            cache, tokens = out.past_key_values, [int(out.logits[0, -1].argmax())]
            ends = np.atleast_1d(self.model.generation_config.eos_token_id).tolist()
            while len(tokens) < MOST_TOKENS and tokens[-1] not in ends and len(made) < count:
                each, ids, targets = self._round(format, drafts, cache, tokens[-1], number)
                made.append(each)
                right = next((i for i in range(drafts) if targets[i] != ids[i + 1]), drafts)
                if right < drafts:
                    cache.crop(right - drafts)
                new = targets[: right + 1]
                ended = next((i for i, token in enumerate(new) if token in ends), None)
                tokens += new if ended is None else new[: ended + 1]
                accepted += right
        return made, accepted / (drafts * len(made))

    def _round(
        self, format: Format, drafts: int, cache: Any, last: int, request: int
    ) -> tuple[DraftedRound, list[int], list[int]]:
        """(a round, its tokens, what the model says after each)."""
        ids, passes = [last], []
        self._compute_in(format)
        self._routing()
        for _ in range(drafts):
            out = self.model(input_ids=torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True)
            ids.append(int(out.logits[0, -1].argmax()))
            passes.append(self._routing())
        cache.crop(-drafts)
        self._compute_in(Format.RAW)
        out = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        layers = [
            LayerRouting(layer, experts.astype(np.int16), weights.astype(np.float16))
            for layer, (experts, weights) in enumerate(self._routing())
        ]
        kinds = np.full((len(ids), 1), TokenKind.TEXT, np.uint8)
        verified = TraceStep(f"question-{request}", Phase.DECODE, kinds, layers)
        return DraftedRound(passes, verified), ids, out.logits[0].argmax(-1).tolist()

    def _questions(self) -> Iterator[tuple[int, Any]]:
        for number in itertools.count():
            talk = conversation(KINDS[number % len(KINDS)], "held-out", 9_000_000 + number)
            yield number, prompts(self.processor, [talk])


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
    formats = [Format(name) for name in arguments.formats]
    model = SelfDrafts(arguments.model or str(demo_model()), formats)
    traces: list[tuple[dict[str, Any], ExpertInventory, list[DraftedRound]]] = []
    progress, kinds = Console(stderr=True), list(itertools.product(arguments.drafts, formats))
    for k, format in track(kinds, "recording", console=progress, transient=True):
        rounds, accepted = model.rounds(format, k, arguments.rounds)
        traces.append(({"drafts": str(format), "k": k, "accepted": accepted}, model.inventory, rounds))
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
