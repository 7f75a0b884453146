"""What is done about an expert whose resident format may not be the wanted one: the cache rules of DyMoE 4.4.2, and who waits.

An expert has one resident format (no duplication). A resident copy serves whoever wants the same or less (conservative reuse):
with ABSENT as the lowest, a copy serves where `resident <= wanted`. Wanting more than is resident is a miss (precision
promotion). Who waits for it: under `importance` those who want it; under `hotness` nobody, the last stable copy serves (DynaExq
3.3); combined, those for whom waiting costs nothing, by a copy that is borrowed for the layer and leaves residency alone.
Pure functions of codes, bytes and rates.
"""

import enum
from collections.abc import Sequence

from vismoe.pair import HIGH, LOW
from vismoe.precision.policy import Policy

__all__ = ["ABSENT", "Serve", "serve", "upgrades_in_time"]

ABSENT = 2  # beside HIGH and LOW: nothing is resident


class Serve(enum.Enum):
    """How one demanded expert is served."""

    USE = "use"  # the resident copy, which is what is wanted or better
    LOWER = "lower"  # the resident low copy, although the high one is wanted
    WAIT = "wait"  # for a copy in the wanted format; a resident low one is dropped when the new one is registered
    BORROW = "borrow"  # for a high copy in the transient buffer, given back after the layer; the low one stays resident


def serve(resident: int, wanted: int, policy: Policy, in_time: bool = False) -> Serve:
    """What is done about one expert.

    resident: HIGH, LOW or ABSENT; wanted: HIGH or LOW, what this layer's tokens want of it; in_time: its high copy would be there
    before the layer's other work is done (`upgrades_in_time`), which decides where hotness and importance are combined.
    """
    if resident == ABSENT:
        return Serve.WAIT
    if resident == HIGH or wanted == LOW:
        return Serve.USE
    if not policy.importance:
        return Serve.LOWER
    if not policy.hotness:
        return Serve.WAIT
    return Serve.BORROW if in_time else Serve.LOWER


def upgrades_in_time(
    copies_bytes: Sequence[float], link_bytes_per_s: float, link_ahead_bytes: float, work_s: float, compute_s: float
) -> list[bool]:
    """Which of a layer's upgrades cost nothing: whose copy is there before the layer's other work is done.

    copies_bytes: what is still to be copied of each one, the most important first (less than a record where a copy is on its
    way); link_ahead_bytes go before all of them, the layer's misses included; work_s: the layer's other experts, misses included,
    are computed by then; compute_s: of one high expert, which keeps the layer busy for those behind it. Nominal rates and no
    bytes ahead make the answer independent of time.
    """
    taken = []
    for nbytes in copies_bytes:
        arrives_s = (link_ahead_bytes + nbytes) / link_bytes_per_s
        taken.append(arrives_s <= work_s)
        if taken[-1]:
            link_ahead_bytes, work_s = link_ahead_bytes + nbytes, work_s + compute_s
    return taken
