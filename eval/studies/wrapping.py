"""A window that wraps over the end of the model: what it would win to copy the next token's first layers ahead (VisMMoE 3.4.1).

The pager's window ends with the last MoE layer, since what the next token will want is not known before it is. Here, in virtual
time only, the link copies experts of the next token's first layers while the last layer is computed: those that it will want
(`oracle`, the most that there is to win) or those used most in this request, each pass counting 0.8 of the one after it (`use`).
`python -m vismoe.eval.studies.wrapping [TRACE ...]`: recorded traces with scores, or generated ones. One JSON object.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from vismoe.eval.report import study_parser, told
from vismoe.paging.speculation import Wanted, prefetch_order
from vismoe.paging.tickets import Ticket
from vismoe.simulate.demands import Conditions, Demands, RecordedDemand, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.files import Trace
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import ExpertId, Phase

Wrapped = Literal["none", "use", "oracle"]
WRAPPED = get_args(Wrapped)
FADED = 0.8
LAYER_S, COPIES = 1e-3, (0.25, 1, 4, 16)  # of a layer's computing, and copies of experts that the link does meanwhile
GENERATED = ((8, 32, 4), (24, 64, 6))  # layers, experts of one, experts of a token
COLUMNS = ("routing", "experts in memory", "copies per layer's compute", "time, by use", "bytes read, by use", "time, oracle")


class WrappingPager(VirtualPager):
    """A VirtualPager whose guesses in the last layer go on with the next token's first layers."""

    def __init__(self, demands: Demands, slabs: tuple[int, ...], order: str, conditions: Conditions, wrapped: Wrapped):
        super().__init__(demands.inventory, slabs, order, conditions)
        self._wrapped = wrapped
        self._at: Mapping[tuple[int, int], RecordedDemand] = {(each.step, each.layer): each for each in demands}
        layers = demands.inventory.layers
        self._use = np.zeros((len(layers), max(layer.num_experts for layer in layers)))
        self._next, self._guess = Wanted(), self.core._next_guess
        self.core._next_guess = self._guess_on  # type: ignore[method-assign]

    def _begin_step(self, first: RecordedDemand) -> None:
        self._next.replace([])
        super()._begin_step(first)

    def end_request(self) -> None:
        self._next.replace([])
        self._use[:] = 0
        super().end_request()

    def _look_ahead(self, recorded: RecordedDemand) -> float:
        use = self._use[recorded.layer]
        use *= FADED
        use[recorded.experts] += 1
        if recorded.layer == len(self._use) - 1 and recorded.phase is Phase.DECODE and self.core.may_guess:
            self._next.replace(self._of_next_token(recorded))
        return super()._look_ahead(recorded)

    def _of_next_token(self, recorded: RecordedDemand) -> list[tuple[ExpertId, float]]:
        """The absent experts of the next token's first layers, the best first, with their scores."""
        if self._wrapped == "none" or (recorded.step + 1, 0) not in self._at:
            return []
        if self._at[recorded.step + 1, 0].request != recorded.request:
            return []
        window, core = min(self.conditions.window, len(self._use)), self.core
        scores, absent = np.zeros((window, self._use.shape[1]), np.float32), np.zeros((window, self._use.shape[1]), bool)
        for layer in range(window):
            table, experts = core.table_of[layer], self.inventory.layers[layer].num_experts
            absent[layer, :experts] = table.slab_of[table.base[layer] : table.base[layer] + experts] < 0
            if self._wrapped == "oracle":
                wanted = self._at[recorded.step + 1, layer].experts
                scores[layer, wanted] = 1 / len(wanted)
            else:
                scores[layer] = self._use[layer] / max(self._use[layer].sum(), 1)
        count = -(-core.ledger.allowance_bytes // core.ledger.unit_bytes)
        chosen = zip(*prefetch_order(scores, absent, count), strict=True)
        return [(ExpertId(int(layer), int(expert)), float(scores[layer, expert])) for layer, expert in chosen]

    def _guess_on(self) -> Ticket | None:
        """A guess of this token, else one of the next, before whose first layer nothing runs."""
        core = self.core
        ticket = self._guess()
        if ticket is None and self._next:
            own, running = core.wanted, core.running_layer
            core.wanted, core.running_layer = self._next, -1
            try:
                ticket = self._guess()
            finally:
                core.wanted, core.running_layer = own, running
        return ticket


def decoded(pager: VirtualPager, demands: Demands) -> tuple[float, float, float]:
    """(virtual seconds, bytes read, misses) of decoding."""
    last = None
    for demand in demands:
        if last is not None and demand.request != last:
            pager.end_request()
        pager.run(demand)
        last = demand.request
    pager.end_request()
    found = pager.metrics.snapshot()
    seconds, nbytes, misses = (found.total(name, Phase.DECODE) for name in ("layer_seconds", "bytes_read", "misses"))
    return seconds, nbytes, misses


def rows_of(name: str, demands: Demands) -> Iterator[list[Any]]:
    """COLUMNS: time and bytes over those of a window that does not wrap."""
    record_bytes = demands.inventory.layouts[0].record_bytes
    for share in ("25%", "50%"):
        slabs = slabs_per_geometry(share, demands.inventory)
        for copies in COPIES:
            link = copies * record_bytes / LAYER_S
            conditions = Conditions(prefetch=True, link_bytes_per_s=link, compute_s_per_layer=LAYER_S, streams=False)
            none, use, oracle = (decoded(WrappingPager(demands, slabs, "lfu", conditions, way), demands) for way in WRAPPED)
            yield [name, share, copies, round(use[0] / none[0], 3), round(use[1] / none[1], 3), round(oracle[0] / none[0], 3)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = study_parser(None, __doc__ or "")
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="recorded with scores (default: two that are generated)")
    asked = parser.parse_args(arguments)

    def study() -> dict[str, Any]:
        recorded = {path: Demands.of(Trace.open(path)) for path in asked.traces}
        made = recorded or {
            f"synthetic, {layers} x {experts}, top-{top_k}": Demands.of(
                skewed_trace(
                    layers, experts, top_k, requests=4, prompt_tokens=30, tokens=80, window=5, score_noise=1.0, zipf=False
                )
            )
            for layers, experts, top_k in GENERATED
        }
        return {"columns": COLUMNS, "rows": [row for name, demands in made.items() for row in rows_of(name, demands)]}

    return told(study)


if __name__ == "__main__":
    sys.exit(main())
