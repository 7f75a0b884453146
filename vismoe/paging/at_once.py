"""A layer of one token in one step: slabs for what it lacks, copies that the device queues, and the computation behind them.

What a demand does (demand.py), where that takes no more than this: slabs hold one format, host memory holds every expert for
good, and nothing else is on its way. The state and the counters come out alike. While the host decides, the link has nothing to
do; so here little comes before the first copy is queued, and the rest while the link is busy.
"""

import numpy as np

from vismoe.errors import TransferError
from vismoe.paging.eviction import MOST_AT_ONCE, Taken
from vismoe.paging.residency import Residency
from vismoe.types import HIGH, Phase


def fits(core: Residency, layer: int, experts: int) -> bool:
    """Whether a demand of so many experts of a layer takes no more than slabs and copies, as far as is known before its router
    speaks."""
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    if core.phase is not Phase.DECODE or core.promises or experts > MOST_AT_ONCE or not core.nothing_comes(layer):
        return False
    if not core.link.can_queue(geometry):
        return False
    measured = core.link.bytes_per_s, core.cpu_pace.slowness(core.phase)
    return core.ways is None or core.ways.all_wait(geometry, experts, table.pool.record_bytes[HIGH], *measured)


def take(core: Residency, layer: int, ids: np.ndarray) -> Taken | None:
    """Slabs for all experts int64 `[n]` that one token wants of the layer, with their copies queued: what is queued from now on
    may compute them; then say `computed`. None: they must be demanded, and nothing has changed. Raises TransferError."""
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    named, base = ids.tolist(), table.base[layer]
    known = min(named) >= 0 and max(named) < core.inventory.layers[layer].num_experts
    if not (known and fits(core, layer, len(named)) and core.link.can_queue(geometry, ids + base)):
        return None
    taken = table.take_slabs(layer, ids, core.window)
    if taken is None:
        return None
    for flat in taken.evicted:
        core.metrics.add("evictions", core.phase, table.id_of[flat].layer)
    for flat in taken.unused:
        core.count_wasted(table.id_of[flat])
    if not taken.missing:
        core.link.arrive(geometry, taken.slabs)
        return taken
    missing = np.array([taken.experts[i] for i in taken.missing]) + base
    try:
        began_s, ended_s, nbytes = core.link.queue_all(geometry, missing, taken.slabs[taken.missing])
    except TransferError:
        table.demanded[taken.slabs] = False
        for flat in missing.tolist():
            table.end_load(flat, succeeded=False)
        core.link.wake()
        raise
    core.metrics.add("bytes_copied", core.phase, layer, nbytes)
    if ended_s > began_s:  # else the link's rate is not known yet
        streaming, copies = core.streaming[geometry], len(missing)
        streaming.copied(began_s, ended_s, copies)
        streaming.stall_s += ended_s - began_s
        core.ledger.waited(ended_s - began_s, copies, 0.0)
    return taken


def computed(core: Residency, layer: int, taken: Taken) -> None:
    """The computation is queued."""
    core.enter(layer, taken.experts)
    core.count(layer, taken.experts, [taken.experts[i] for i in taken.missing], 0)
    core.table_of[layer].loaded(taken, core.tick)
    core.link.released(core.inventory.layers[layer].geometry, taken.slabs)
