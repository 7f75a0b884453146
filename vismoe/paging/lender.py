"""What a demand asks of the pager that it belongs to. Pager makes demands, so a demand does not import Pager."""

from collections.abc import Sequence
from typing import Protocol

from vismoe.locks import RunningCall
from vismoe.metrics import Metrics
from vismoe.paging.changes import Changes
from vismoe.paging.page_table import PageTable, Room
from vismoe.paging.speculation import Ledger
from vismoe.paging.transfer import Ticket, Transfer
from vismoe.paging.upgrades import Upgrades
from vismoe.pools.host_tier import HostTier
from vismoe.timeline import Timeline
from vismoe.types import HIGH, ExpertId, ExpertInventory, Phase

__all__ = ["Lender"]


class Lender(Protocol):
    """The part of Pager that Demand and Below use; all methods in a change."""

    inventory: ExpertInventory
    table_of: tuple[PageTable, ...]
    tickets: dict[ExpertId, Ticket]
    changes: Changes
    transfer: Transfer
    ledger: Ledger
    metrics: Metrics
    upgrades: Upgrades | None
    timeline: Timeline | None
    phase: Phase
    tick: int
    misses_this_layer: int
    misses_this_step: int

    @property
    def host(self) -> HostTier | None: ...

    @property
    def hosts(self) -> Sequence[HostTier]: ...

    def open_demand(self, layer: int, serving: RunningCall) -> None: ...

    def is_open(self, serving: RunningCall) -> bool: ...

    def close_demand(self) -> None: ...

    def repair(self) -> None: ...

    def make_room(self, layer: int, streaming: bool, must: bool = False, precision: int = HIGH) -> Room | None: ...

    def start_load(self, expert: ExpertId, room: Room, borrowed: bool = False) -> Ticket: ...

    def guess_on_the_way(self) -> Ticket | None: ...

    def queued_bytes(self) -> int: ...
