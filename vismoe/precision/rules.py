"""How to serve an expert whose resident format may not be the needed one: the cache rules of DyMoE 4.4.2, and what waits.

An expert has one resident format (no duplication). A resident copy serves every demand for the same format or a lower one
(conservative reuse): HIGH is 0, LOW 1 and ABSENT 2, so a copy serves if `resident <= wanted`. Demand for a higher format than
the resident one is a miss (precision promotion). Under `importance` such a demand waits for the better copy. Under `hotness` no
demand waits; the last stable copy serves (DynaExq 3.3). With both, a demand waits only if that costs no time, for a copy that is
borrowed for the layer and leaves residency unchanged. Pure functions of codes, bytes and rates.
"""

import enum
from collections.abc import Sequence

from vismoe.pair import HIGH, LOW
from vismoe.precision.policy import Policy

ABSENT = 2  # beside HIGH and LOW: nothing is resident


class Serve(enum.Enum):
    """How one demanded expert is served."""

    USE = "use"  # the resident copy, which has the needed format or a better one
    LOWER = "lower"  # the resident low copy, although the high one is needed
    WAIT = "wait"  # for a copy in the needed format; registering it drops a resident low copy
    BORROW = "borrow"  # a high copy in the transient buffer, freed after the layer; the low copy stays resident


def serve(resident: int, wanted: int, policy: Policy, in_time: bool = False) -> Serve:
    """How to serve one expert.

    resident: HIGH, LOW or ABSENT; wanted: HIGH or LOW, the format that this layer's tokens need; in_time: the high copy would
    arrive before the layer's other work is done (`upgrades_in_time`), which decides if hotness and importance are combined.
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
    """Which of a layer's upgrades cost no time: those whose copy arrives before the layer's other work is done.

    copies_bytes: the bytes still to copy for each upgrade, the most important first (less than a record if a copy is under way);
    link_ahead_bytes: bytes that the link copies before all of them, including the layer's misses; work_s: the time until the
    layer's other experts, misses included, are computed; compute_s: the time of one high expert, which keeps the layer busy for
    the upgrades after it. With nominal rates and no bytes ahead the answer does not depend on time.
    """
    taken = []
    for nbytes in copies_bytes:
        arrives_s = (link_ahead_bytes + nbytes) / link_bytes_per_s
        taken.append(arrives_s <= work_s)
        if taken[-1]:
            link_ahead_bytes, work_s = link_ahead_bytes + nbytes, work_s + compute_s
    return taken
