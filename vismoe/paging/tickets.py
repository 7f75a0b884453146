"""A copy in flight."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vismoe.kernels.read import Arrival
from vismoe.store.expert_store import NativeRead
from vismoe.types import ExpertId


class Moved(NamedTuple):
    """Bytes that one copy moved over each tier boundary."""

    disk_bytes: int = 0
    link_bytes: int = 0


@dataclass(eq=False)
class Ticket:
    """A record on its way into a slab. `done` with `error` None means that the slab holds the expert, in the slab's format."""

    expert: ExpertId
    geometry: int
    slab: int
    speculative: bool = False  # a guess: nothing had demanded it when it began
    promised: bool = False  # to the round that is drafted or verified; it is speculative too
    transition: bool = False  # of a resident expert to the other format, which nothing waits for
    fills: bool = False  # a slab that no other expert wants
    runner: int | None = None  # the thread that copies
    began_s: float = 0.0
    ended_s: float = 0.0  # 0 until it is done
    done: bool = False
    queued: bool = False  # on the device, which lets what reads the slab wait; `began_s` and `ended_s` are estimates
    error: BaseException | None = None
    lane: str = ""  # of a timeline; empty: the thread that says that it has ended
    reading: NativeRead | None = None  # how native threads read it, if they do
    moved: Moved = field(default_factory=Moved)

    @property
    def unasked(self) -> bool:
        """Nothing had demanded it when it began."""
        return self.speculative or self.transition or self.fills

    @property
    def without_worker(self) -> bool:
        """Native threads read it for the demand itself."""
        return self.reading is not None and not self.began_s


def arrivals_of(tickets: Iterable[Ticket]) -> list[Arrival]:
    """Of those that native threads read."""
    return [ticket.reading.arrival for ticket in tickets if ticket.reading is not None]
