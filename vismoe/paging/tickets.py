"""A copy in flight."""

from dataclasses import dataclass, field
from typing import NamedTuple

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
    speculative: bool = False  # nothing had demanded it when it began
    promised: bool = False  # to the round that is drafted or verified; it is speculative too
    transition: bool = False  # of a resident expert to the other format, which nothing waits for
    runner: int | None = None  # the thread that copies
    began_s: float = 0.0
    ended_s: float = 0.0  # 0 until it is done
    done: bool = False
    queued: bool = False  # on the device, which lets what reads the slab wait; `began_s` and `ended_s` are estimates
    error: BaseException | None = None
    lane: str = ""  # of a timeline; empty: the thread that says that it has ended
    reading: NativeRead | None = None  # how the thread that waits for it lets native threads read it; None: a worker copies it
    moved: Moved = field(default_factory=Moved)
