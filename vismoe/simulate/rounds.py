"""Rounds of drafted tokens in virtual time: with promises, or by demand alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vismoe.metrics import Snapshot
from vismoe.simulate.demands import Conditions, RecordedDemand, demands_of_step
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.steps import DraftedRound
from vismoe.types import ExpertInventory


@dataclass(frozen=True)
class RoundsResult:
    """Figures of a replay of rounds."""

    counters: Snapshot
    seconds: float  # virtual time
    layer_passes: int  # times that a layer ran in a pass that verifies
    covered: int  # of these, those that found every expert resident

    @property
    def coverage(self) -> float:
        return self.covered / max(1, self.layer_passes)

    @property
    def stall_s(self) -> float:
        return self.counters.total("stall_seconds")


def demands_of(inventory: ExpertInventory, rounds: Sequence[DraftedRound]) -> Iterator[tuple[DraftedRound, list[RecordedDemand]]]:
    """Each round with the demands of the pass that verifies."""
    request = 0
    for number, each in enumerate(rounds):
        request += number > 0 and each.verified.request != rounds[number - 1].verified.request
        yield each, list(demands_of_step(inventory, number, request, each.verified))


def replay_rounds(
    inventory: ExpertInventory,
    rounds: Sequence[DraftedRound],
    slabs: tuple[int, ...],
    *,
    draft_s: float,
    promises: bool = True,
    order: str = "lfu",
    settled: int = 0,
    conditions: Conditions,
) -> RoundsResult:
    """Replays rounds whose draft passes take `draft_s` each; the first `settled` ones, which fill the slabs, are not counted.
    Without `promises` the link rests while tokens are drafted."""
    pager = VirtualPager(inventory, slabs, order, conditions)
    before, began_s, layer_passes, covered = pager.metrics.snapshot(), 0.0, 0, 0
    for number, (each, verified) in enumerate(demands_of(inventory, rounds)):
        if number == settled:
            before, began_s, layer_passes, covered = pager.metrics.snapshot(), pager.now_s, 0, 0
        layer_passes += len(verified)
        covered += pager.run_round(each.drafts, draft_s, verified, promises)
    pager.end_request()
    return RoundsResult(pager.metrics.snapshot() - before, pager.now_s - began_s, layer_passes, covered)
