"""Experts that a layer wants in more precision than they are there in: which are waited for, borrowed, or taken as they are.

A pure function of the policy, bytes, tokens and rates (`vismoe.precision.rules`), for the few experts of a layer that need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.paging.miss import Rates
from vismoe.pair import HIGH, LOW
from vismoe.precision.policy import Policy
from vismoe.precision.rules import Serve, serve, upgrades_in_time

__all__ = ["Upgrades"]


@dataclass(frozen=True)
class Upgrades:
    """What a policy does about them. `rates` by geometry: of what copies come over, and of computing."""

    policy: Policy
    rates: tuple[Rates, ...]
    deterministic: bool = False  # what is queued does not count

    def choose(
        self, geometry: int, wanting: Sequence[int], high_bytes: int, others_s: float, queued_bytes: int, borrowable: int
    ) -> dict[int, Serve]:
        """What is done about each of `wanting`, the most important first. high_bytes: of a record in the more precise format;
        others_s: what the layer's other experts take; queued_bytes: on their way before any of these; borrowable: slabs that a
        copy could be borrowed in.
        """
        rates = self.rates[geometry]
        in_time: set[int] = set()
        if self.policy.hotness and self.policy.importance:
            first = wanting[:borrowable]
            ahead = 0 if self.deterministic else queued_bytes
            compute_s = rates.cpu_s(high_bytes, 1)
            there = upgrades_in_time([high_bytes] * len(first), rates.link_bytes_per_s, ahead, others_s, compute_s)
            in_time = {expert for expert, is_there in zip(first, there, strict=True) if is_there}
        return {expert: serve(LOW, HIGH, self.policy, expert in in_time) for expert in wanting}
