"""How expert memory is divided over three places: raw in slabs, packed (lossless records in slabs), and on disk. Pure.

FluxMoE's rule (its equation 8: by bandwidth) holds only while no place is full. Here memory is, so a small program is solved.
Of all experts, x are raw, y packed and z on disk:

    minimise y d + z k    with    x + y + z = 1,  x + rho y <= m

m is what memory holds of all raw experts, rho a packed record's bytes over a raw one's, d the seconds of decoding one, and k the
seconds of reading a packed record. A raw expert saves k for one unit of memory, a packed one k - d for rho: packed goes first iff
d < (1 - rho) k.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Shares(NamedTuple):
    """Of all experts."""

    raw: float
    packed: float
    disk: float

    def cost(self, decode_s: float, read_s: float) -> float:
        """Seconds of decoding and reading per demanded expert, where all are demanded equally often."""
        return self.packed * decode_s + self.disk * read_s


@dataclass(frozen=True)
class PackedRates:
    """By which it is decided. `unmeasured`: which of them are nominal."""

    decode_bytes_per_s: float  # of raw experts, on all cores
    read_bytes_per_s: float  # of records; from the page cache, where that holds them
    unmeasured: tuple[str, ...] = ()

    def seconds(self, raw_bytes: int, packed_bytes: int) -> tuple[float, float]:
        """(d, k) for experts of these sizes."""
        return raw_bytes / self.decode_bytes_per_s, packed_bytes / self.read_bytes_per_s

    def says(self, shares: Shares) -> str:
        """What was decided, and by which rates."""
        parts = ", ".join(f"{share:.0%} {name}" for name, share in shares._asdict().items())
        rates = f"{self.decode_bytes_per_s / 1e9:.1f} GB/s, reading {self.read_bytes_per_s / 1e9:.1f} GB/s"
        source = f"{' and '.join(self.unmeasured)} not measured; run vismoe doctor" if self.unmeasured else "measured"
        return f"experts: {parts}; decoding {rates} ({source})"


def divide(memory: float, rho: float, decode_s: float, read_s: float) -> Shares:
    """The cheapest division of `memory` (m above)."""
    if memory >= 1 or decode_s >= (1 - rho) * read_s:
        raw = min(1.0, memory)
        return Shares(raw, 0.0, 1.0 - raw)
    if memory <= rho:
        return Shares(0.0, memory / rho, 1.0 - memory / rho)
    raw = (memory - rho) / (1 - rho)
    return Shares(raw, 1.0 - raw, 0.0)


def in_one_format(memory: float, rho: float, decode_s: float, read_s: float) -> Shares:
    """The same for slabs that are all raw or all packed: what it would keep raw is packed as well, if that still pays."""
    raw = min(1.0, memory)
    without = Shares(raw, 0.0, 1.0 - raw)
    if not divide(memory, rho, decode_s, read_s).packed:
        return without
    packed = min(1.0, memory / rho)
    return min(without, Shares(0.0, packed, 1.0 - packed), key=lambda shares: shares.cost(decode_s, read_s))
