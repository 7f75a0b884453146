"""A window that wraps over the end of the model: what it would win to copy the next token's first layers ahead (VisMMoE 3.4.1).

The pager's window ends with the last MoE layer, since what the next token will want is not known before it is. Here, in virtual
time only, the link copies experts of the next token's first layers while the last layer is computed: those that it will want
(`oracle`, the most that there is to win) or those used most in this request, each pass counting 0.8 of the one after it (`use`).
"""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from vismoe.paging.speculation import Wanted, prefetch_order
from vismoe.paging.tickets import Ticket
from vismoe.simulate.demands import Conditions, Demands, RecordedDemand
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.types import ExpertId, Phase

Wrapped = Literal["none", "use", "oracle"]
WRAPPED = get_args(Wrapped)
FADED = 0.8


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
        self._next.begin_step()
        super()._begin_step(first)

    def end_request(self) -> None:
        self._next.begin_step()
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
