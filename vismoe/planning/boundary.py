"""The boundary between experts and keys and values while requests run: when it moves, and what released bytes pay for. Pure.

FluxMoE's slow loop: rho = T_c / T_l of a decode pass. Above 1 the pass is bound by computing, and a row is worth more than the
experts whose room it takes; below 0.9 it is bound by reading. Experts give up memory only for a request that waits for it.
"""

import bisect
import enum

from vismoe.planning.needs import Footprint

RELEASE_ABOVE, TAKE_BELOW = 1.0, 0.9  # of rho


class Move(enum.Enum):
    RELEASE = "release"  # a slab of each layer, to keys and values
    TAKE_BACK = "take back"
    STAY = "stay"


def next_move(rho: float, waits: bool, released_bytes: int) -> Move:
    """waits: a request waits for places, and could join a pass."""
    if waits and rho > RELEASE_ABOVE:
        return Move.RELEASE
    return Move.TAKE_BACK if released_bytes and (not waits or rho < TAKE_BELOW) else Move.STAY


def bytes_beyond(need: Footprint, context: int, rows: int, tokens: int) -> int:
    """Bytes that `tokens` more than the planned context need, in passes of `rows`: keys and values, and what decoding them takes.
    No single request is longer than the planned context, so no prompt takes more."""
    keys = need.cache_bytes(context + tokens, rows) - need.cache_bytes(context, rows)
    return keys + max(0, need.decode(context + tokens) - need.decode(context))


def tokens_for(need: Footprint, context: int, rows: int, released_bytes: int) -> int:
    """The most tokens beyond the planned context that these bytes pay for, at most as many as the planned context."""
    return bisect.bisect_right(range(1, context + 1), released_bytes, key=lambda n: bytes_beyond(need, context, rows, n))
