"""How many requests should decode in one pass: more rows share what is read, and take memory from the experts. Pure.

FluxMoE's planner on this core, per pass of B rows. S(B) of the experts are resident, what B rows need beside them being taken:

    S(B) = (M - fixed - B row_bytes - kv) / slab_bytes            kv: of the planned context, which all rows share
    u(B) = 1 - (1 - K/E)^B                                        share of a layer's E experts that B rows of K choices want
    T_c(B), T_l(B, S) = computing, reading u (1 - S) E experts    of a layer
    X(B) = B / sum_l max(T_c, T_l)                                the sum instead of max where nothing overlaps

X is not largest for the most rows: where a row takes many experts' room, further rows read more than they share.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# As they are reached, where nothing was measured.
NOMINAL_LINK_BYTES_PER_S = 25e9  # PCIe 4.0 x16
NOMINAL_CPU_BYTES_PER_S = 40e9  # two channels of DDR5
NOMINAL_DISK_BYTES_PER_S = 2e9  # an NVMe disk of few years
NOMINAL_GPU_BYTES_PER_S = 1e12  # of weights that a GPU reads from its own memory
NOMINAL_CPU_FLOP_PER_S, NOMINAL_GPU_FLOP_PER_S = 1e11, 1e14


@dataclass(frozen=True)
class MachineRates:
    """How fast a machine computes and reads. `assumed`: which of these were not measured, for people."""

    weights_bytes_per_s: float = NOMINAL_CPU_BYTES_PER_S  # of weights that are there, to compute with them
    flop_per_s: float = NOMINAL_CPU_FLOP_PER_S
    missing_bytes_per_s: float = NOMINAL_DISK_BYTES_PER_S  # of experts that are not, in bytes of their slabs
    overlaps: bool = True  # reading goes on while the cores compute
    layer_s: float = 3e-4  # of a layer, beside its arithmetic: control, launches; measured with the demo model
    row_s: float = 6e-5  # of a row in it: its attention, which runs row by row
    assumed: tuple[str, ...] = ()


UNMEASURED = MachineRates()


@dataclass(frozen=True)
class PassLayer:
    """What one MoE layer of a pass computes and reads, its share of everything else included."""

    experts: int  # E
    top_k: int  # K
    expert_bytes: int  # of a slab; of a raw one, where it holds a lossless record
    resident: float  # share of the experts, 0 to 1: how many of the wanted ones are hits, if all are wanted alike
    other_bytes: int  # weights beside the experts that a pass reads once
    row_flop: float  # arithmetic of one row
    decode_s: float = 0.0  # of each wanted expert, whose slab holds its lossless record (hierarchy.py)
    restore_s: float = 0.0  # of each missing one, whose record is decoded into its slab


@dataclass(frozen=True)
class ExpectedPass:
    """What a pass of `rows` takes. `bound`: what takes longer, over all layers."""

    rows: int
    compute_seconds: float
    reading_seconds: float
    seconds: float

    @property
    def bound(self) -> Literal["compute", "reading"]:
        return "reading" if self.reading_seconds > self.compute_seconds else "compute"

    @property
    def tokens_per_s(self) -> float:
        """X(B), of all rows together."""
        return self.rows / self.seconds


def wanted_share(rows: int, experts: int, top_k: int) -> float:
    """u(B): the share of a layer's experts that `rows` want, each `top_k` different ones, all alike."""
    return 1 - (1 - min(1.0, top_k / experts)) ** rows


def layer_seconds(rows: int, layer: PassLayer, rates: MachineRates) -> tuple[float, float]:
    """(T_c, T_l) of one layer in a pass of `rows`."""
    wanted = wanted_share(rows, layer.experts, layer.top_k) * layer.experts
    read = (layer.other_bytes + wanted * layer.expert_bytes) / rates.weights_bytes_per_s + wanted * layer.decode_s
    arithmetic = rates.layer_s + rows * (rates.row_s + layer.row_flop / rates.flop_per_s)
    missing_s = layer.expert_bytes / rates.missing_bytes_per_s + layer.restore_s
    return read + arithmetic, wanted * (1 - layer.resident) * missing_s


def expected(rows: int, layers: Iterable[PassLayer], rates: MachineRates) -> ExpectedPass:
    """What a pass of `rows` through these layers takes."""
    both = [layer_seconds(rows, layer, rates) for layer in layers]
    compute, reading = (sum(column) for column in zip(*both, strict=True))
    return ExpectedPass(rows, compute, reading, sum(map(max, both)) if rates.overlaps else compute + reading)


def best_of(passes: Sequence[ExpectedPass], latency_s: float | None = None) -> ExpectedPass:
    """The pass with the most tokens per second, of equal ones the one with the fewest rows.

    latency_s: only of passes that take no longer; where all do, the one that takes the shortest time.
    """
    in_time = [one for one in passes if latency_s is None or one.seconds <= latency_s]
    if not in_time:
        return min(passes, key=lambda one: (one.seconds, one.rows))
    return max(in_time, key=lambda one: (one.tokens_per_s, -one.rows))


def best_rows(
    most: int, loads: Callable[[int], Sequence[PassLayer] | None], rates: MachineRates, latency_s: float | None
) -> ExpectedPass:
    """The argmax of X(B) over B = 1 .. `most`. loads(B): the layers with the share of experts that B rows leave room for; None:
    so many rows, and more, leave too little. One row always has loads."""
    passes = []
    for rows in range(1, most + 1):
        layers = loads(rows)
        if layers is None:
            break
        passes.append(expected(rows, layers, rates))
    return best_of(passes, latency_s)
