"""A layer of one token in one step: slabs for what it lacks, copies that the device queues, and the computation behind them.

What a demand does (demand.py), where that takes no more than this: slabs hold one format, host memory holds every expert for
good, and nothing else is on its way. The state and the counters come out alike. While the host decides, link and CPU have
nothing to do; so here little comes before both begin, and the rest while they are busy.

Where link and CPU together are sooner, the CPU computes some of the misses from host memory: those that were used least, since
what is copied has a slab from then on.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vismoe.errors import TransferError
from vismoe.paging.eviction import MOST_AT_ONCE, Taken
from vismoe.paging.lent import Group
from vismoe.paging.residency import Residency
from vismoe.types import HIGH, Phase


class OneStep(NamedTuple):
    """taken: of the experts that the device computes; below: those that the CPU computes, None: none."""

    taken: Taken
    below: Group | None


def fits(core: Residency, layer: int, experts: int, by_cpu: bool) -> bool:
    """Whether a demand of so many experts of a layer takes no more than slabs and copies, or (by_cpu) the CPU, as far as is known
    before its router speaks."""
    geometry = core.inventory.layers[layer].geometry
    if core.phase is not Phase.DECODE or core.promises or experts > MOST_AT_ONCE or not core.nothing_comes(layer):
        return False
    if core.ways is not None and not (by_cpu and core.ways.policy == "auto"):
        return False
    if core.ways is not None and core.ways.deterministic and asked(core, layer, experts):
        return False  # where an expert is computed may not depend on whether it was demanded
    return core.link.can_queue(geometry)


def asked(core: Residency, layer: int, missing: int) -> int:
    """How many of so many misses of one token the CPU computes."""
    if core.ways is None or core.ways.policy != "auto":
        return 0
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    measured = core.link.bytes_per_s, core.step_pace.slowness(core.phase)
    return core.ways.in_step(geometry, missing, table.pool.record_bytes[HIGH], *measured)


def take(core: Residency, layer: int, ids: np.ndarray, begin_on_host: Callable[[Group], None]) -> OneStep | None:
    """Slabs for the experts int64 `[n]` that one token wants of the layer, with copies queued of those that are missing: what is
    queued from now on may compute them; then say `computed`. None: they must be demanded, and nothing has changed. Raises
    TransferError. begin_on_host: of those that the CPU computes, which begins before the link, as it takes longer."""
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    named, flat = ids.tolist(), ids + table.base[layer]
    known = min(named) >= 0 and max(named) < core.inventory.layers[layer].num_experts and len(set(named)) == len(named)
    if not (known and fits(core, layer, len(named), by_cpu=True) and core.link.can_queue(geometry, flat)):
        return None
    on_host = _on_host(core, layer, named, flat) if core.ways is not None else []
    if on_host:
        ids = np.array([expert for expert in named if expert not in on_host])
    taken = table.take_slabs(layer, ids, core.window)
    if taken is None:
        return None
    below = _lying_on_host(core, layer, on_host) if on_host else None
    if below is not None:
        begin_on_host(below)
    if taken.missing:
        _queue(core, layer, taken)
    else:
        core.link.arrive(geometry, taken.slabs)
    return OneStep(taken, below)


def _queue(core: Residency, layer: int, taken: Taken) -> None:
    """The link begins with what is missing, or raises TransferError; then the counters follow."""
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    missing = np.array([taken.experts[i] for i in taken.missing]) + table.base[layer]
    try:
        began_s, ended_s, nbytes = core.link.queue_all(geometry, missing, taken.slabs[taken.missing])
    except TransferError:
        _count_evicted(core, layer, taken)
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


def _count_evicted(core: Residency, layer: int, taken: Taken) -> None:
    id_of = core.table_of[layer].id_of
    for flat in taken.evicted:
        core.metrics.add("evictions", core.phase, id_of[flat].layer)
    for flat in taken.unused:
        core.count_wasted(id_of[flat])


def _on_host(core: Residency, layer: int, named: list[int], flat: np.ndarray) -> list[int]:
    """Which of a token's experts the CPU computes, ascending. One at least is left to the device."""
    table = core.table_of[layer]
    missing = [expert for expert, slab in zip(named, table.slab_of[flat].tolist()) if slab < 0]
    count = min(asked(core, layer, len(missing)), len(named) - 1)
    if not count:
        return []
    uses = dict(zip(named, table.uses[flat].tolist()))
    return sorted(sorted(missing, key=lambda expert: (uses[expert], expert))[:count])


def _lying_on_host(core: Residency, layer: int, experts: list[int]) -> Group:
    """Experts in host memory, which they never leave."""
    host, geometry = core.hosts[HIGH], core.inventory.layers[layer].geometry
    places = host.places_for_good(geometry, np.array(experts) + core.table_of[layer].base[layer])
    assert places is not None, "the link could have queued their copies"
    return Group(experts, host.pools[geometry], places, on_host=True)


def computed(core: Residency, layer: int, step: OneStep) -> None:
    """The computation is queued, and the CPU has begun."""
    taken, below = step
    table, geometry = core.table_of[layer], core.inventory.layers[layer].geometry
    _count_evicted(core, layer, taken)
    missing, wanted = [taken.experts[i] for i in taken.missing], taken.experts
    if below is not None:
        wanted, missing = sorted(wanted + below.experts), sorted(missing + below.experts)
        core.metrics.add("computed_on_host", core.phase, layer, len(below))
        core.metrics.add("bytes_computed_on_host", core.phase, layer, len(below) * table.pool.record_bytes[HIGH])
        table.used_on_host(np.add(below.experts, table.base[layer]))
    core.enter(layer, wanted)
    core.count(layer, wanted, missing, 0)
    table.loaded(taken, core.tick)
    core.link.released(geometry, taken.slabs)
    core.admit_none()  # the misses that were used most have just been copied


def computed_below(core: Residency, layer: int, below: Group) -> None:
    """What the CPU computes is there."""
    assert core.ways is not None
    geometry, nbytes = core.inventory.layers[layer].geometry, core.table_of[layer].pool.record_bytes[HIGH]
    core.step_pace.took(core.phase, below.computed_s, core.ways.step_s(geometry, len(below), nbytes))
