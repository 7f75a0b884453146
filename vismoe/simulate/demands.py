"""What a replay is given: the demands of a trace (one per step and layer), slots as slabs per geometry, and conditions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from vismoe.config import Budget
from vismoe.errors import ConfigError
from vismoe.paging.miss import Rates
from vismoe.trace.steps import TraceStep
from vismoe.types import ExpertId, ExpertInventory, Phase


class Routing(Protocol):
    """A recorded or synthetic trace."""

    @property
    def inventory(self) -> ExpertInventory: ...

    def __iter__(self) -> Iterator[TraceStep]: ...


@dataclass(frozen=True)
class Moves:
    """What hotness changes between two steps: which experts belong in the more precise format, and which of them move first."""

    high: np.ndarray  # bool [L, E]
    promote: tuple[ExpertId, ...]
    demote: tuple[ExpertId, ...]


@dataclass(frozen=True)
class RecordedDemand:
    """What one MoE layer needs in one step; ids ascend, experts that only padding chose are left out."""

    step: int
    request: int  # counts changes of the request
    phase: Phase
    layer: int
    experts: np.ndarray  # int64
    tokens: np.ndarray  # int64, of each of `experts`: how many tokens chose it
    last: np.ndarray  # int64: of each sequence's last token; in decode the same as `experts`
    scores: np.ndarray | None = None  # [W, E] float16
    # under a policy of two formats (simulate/precision.py)
    high: np.ndarray | None = None  # bool [E], wanted in the more precise format; None: all
    first: tuple[int, ...] = ()  # which get it first where not all can
    moves: Moves | None = None  # what was decided after the step before; of the first demand of a step
    reached: int | None = None  # real tokens that reached the layer; None: as many as chose all their experts


class Demands(list[RecordedDemand]):
    """All demands of a trace in order; about 1 KiB and the scores of each (step, layer) stay in memory."""

    def __init__(self, inventory: ExpertInventory, demands: Iterable[RecordedDemand]):
        super().__init__(demands)
        self.inventory = inventory
        self.have_scores = any(demand.scores is not None for demand in self)

    @classmethod
    def of(cls, trace: Routing) -> "Demands":
        return cls(trace.inventory, _read(trace))


def _read(trace: Routing) -> Iterator[RecordedDemand]:
    request, name = 0, None
    for number, step in enumerate(trace):
        request += name is not None and step.request != name
        name = step.request
        yield from demands_of_step(trace.inventory, number, request, step)


def demands_of_step(inventory: ExpertInventory, number: int, request: int, step: TraceStep) -> Iterator[RecordedDemand]:
    """Of one step, which is the `number`-th of the trace and of the `request`-th request."""
    for routing in step.layers:
        experts, tokens, last = step.demand(routing, inventory.layers[routing.layer].num_experts)
        yield RecordedDemand(number, request, step.phase, routing.layer, experts, tokens, last, routing.scores)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What eviction and prefetching look at, and what things cost in virtual time."""

    window: int = 5  # W: layers that eviction protects
    pinned_layers: int = 0  # leading MoE layers that never leave; their experts count as slots, their first copy is free
    streams: bool = True  # passes are streamed where that is sooner (paging/streaming.py), which a link's rate decides
    prefetch: bool = False
    prefetch_bytes_per_step: int | None = None  # that may lie unused; None: the pager's own cap, which opens and closes itself
    link_bytes_per_s: float | None = None  # None: transfers take no time
    compute_s_per_layer: float = 0.0  # everything of one decoder layer but waiting and what grows with the tokens
    compute_s_per_token: float = 0.0  # that each token adds while the layer's experts are computed
    compute_s_per_choice: float = 0.0  # that each expert of a token adds
    weights_bytes_per_s: float | None = None  # at which the device reads the experts that it computes; None: it takes no time
    overlaps: bool = False  # decode computes what is on the device while the rest is copied
    lookahead_s: float = 0.0  # of asking the lookahead at one layer
    misses: Literal["wait", "cpu", "auto"] = "wait"  # wait for copies, compute them below, or what is done sooner
    cpu_bytes_per_s: float | None = None  # of expert weights that the CPU reads and computes with, at one token
    cpu_s_per_token: float = 0.0  # arithmetic of one token in one expert, which decides where there are many

    def __post_init__(self) -> None:
        if self.prefetch and self.link_bytes_per_s is None:
            raise ConfigError("prefetch=True needs link_bytes_per_s: when a guess arrives depends on the link")
        if self.link_bytes_per_s is not None and self.link_bytes_per_s <= 0:
            raise ConfigError(f"link_bytes_per_s={self.link_bytes_per_s}: must be above zero")
        if self.misses != "wait" and (self.link_bytes_per_s is None or self.cpu_bytes_per_s is None):
            raise ConfigError(f"misses={self.misses!r} needs link_bytes_per_s and cpu_bytes_per_s: the ways differ in time only")

    def rates(self) -> Rates | None:
        """Of link and CPU, where misses may be computed below."""
        if self.misses == "wait":
            return None
        assert self.link_bytes_per_s is not None and self.cpu_bytes_per_s is not None
        return Rates(self.link_bytes_per_s, self.cpu_bytes_per_s, self.cpu_s_per_token)


def slabs_per_geometry(slots: int | str, inventory: ExpertInventory) -> tuple[int, ...]:
    """Slabs of each geometry's pool: `slots` is a number of slabs in all or a share of all experts (`"25%"`).

    Bytes are split in proportion to expert bytes, so every geometry gets the same share of its experts, rounded down, and
    at least two slabs (or all its experts, if it has fewer). Raises ConfigError for slots that cannot be.
    """
    experts = [sum(layer.num_experts for layer in inventory.layers_of(g)) for g in range(len(inventory.layouts))]
    if str(slots).strip().endswith("%"):
        share = Budget.parse(slots).expert_share
        assert share is not None
        slabs = [int(share * count + 1e-9) for count in experts]
    else:
        try:
            total = int(slots)
        except ValueError as error:
            raise ConfigError(f"slots={slots!r}: a number of slabs, or a share of all experts such as 25%") from error
        slabs = [total * count // sum(experts) for count in experts]
        if not 2 * len(experts) <= total:
            raise ConfigError(f"slots={slots}: at least {2 * len(experts)} (two per geometry)")
    return tuple(min(max(2, slab), count) for slab, count in zip(slabs, experts, strict=True))
