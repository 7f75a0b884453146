"""The misses of one demand that the CPU computes from the host tier, below the device: chosen, lent and taken back.

They take no slab. Only what lies in host memory is chosen; it is held while it is computed, and what has left host memory before
its turn came is waited for after all.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from vismoe.paging.lent import Group
from vismoe.paging.miss import Miss, Way, Ways
from vismoe.paging.residency import Residency
from vismoe.types import HIGH, ExpertId


class HostCompute:
    """`experts`: those that are still to be computed there."""

    def __init__(self, core: Residency, layer: int, ways: Ways):
        self._core, self._layer, self._ways = core, layer, ways
        self._host, self._table = core.hosts[0], core.table_of[layer]
        self._geometry = core.inventory.layers[layer].geometry
        self.experts: set[int] = set()
        self._tokens: Mapping[int, int] = {}

    def choose(self, missing: Sequence[int], on_their_way: Collection[int], tokens: Mapping[int, int]) -> None:
        """Of `missing` (absent or on their way), take what is computed here. `tokens`: how many chose each, one by default."""
        self._tokens = tokens
        here = self._host.has(ExpertId(self._layer, expert) for expert in missing)
        asked = [expert for expert, has in zip(missing, here) if has]
        misses = [Miss(tokens.get(expert, 1), expert in on_their_way) for expert in asked]
        nbytes = self._table.pool.record_bytes[HIGH]
        ahead_bytes = self._core.queued_bytes() + nbytes * (len(missing) - len(asked))
        chosen = self._ways.choose(self._geometry, nbytes, misses, ahead_bytes)
        self.experts = {expert for expert, way in zip(asked, chosen) if way is Way.CPU}

    def seconds(self) -> float:
        """What computing them takes by the rates that the choice was made with."""
        rates, nbytes = self._ways.rates[self._geometry], self._table.pool.record_bytes[HIGH]
        return sum(rates.cpu_s(nbytes, self._tokens.get(expert, 1)) for expert in sorted(self.experts))

    def lend(self, todo: Sequence[int], in_order: bool) -> tuple[Group, set[int]]:
        """(What is computed next, held; what has left host memory and is not ours any more). In order: only what `todo` begins
        with."""
        mine = self.experts.__contains__
        wanted = list(itertools.takewhile(mine, todo) if in_order else filter(mine, todo))
        held = self._host.hold(ExpertId(self._layer, expert) for expert in wanted)
        gone = {expert for expert in wanted if ExpertId(self._layer, expert) not in held}
        self.experts -= gone
        ready = list(itertools.takewhile(lambda e: e not in gone, wanted)) if in_order else [e for e in wanted if e not in gone]
        if not ready:
            self._host.let_go()  # a thread that waits for a copy must hold nothing
        slabs = np.array([held[ExpertId(self._layer, expert)] for expert in ready], dtype=np.int64)
        return Group(ready, self._host.pools[self._geometry], slabs, on_host=True), gone

    def computed(self, experts: Sequence[int], counted: Collection[int] | None) -> None:
        """A copy that was under way, or has arrived, stays: it is an ordinary resident now."""
        core, table = self._core, self._table
        self._host.let_go()
        table.used_on_host(np.add(experts, table.base[self._layer]))
        self.experts.difference_update(experts)
        count = len(experts) if counted is None else sum(expert in counted for expert in experts)
        core.metrics.add("computed_on_host", core.phase, self._layer, count)
        core.metrics.add("bytes_computed_on_host", core.phase, self._layer, len(experts) * table.pool.record_bytes[HIGH])
        core.link.wake()  # some of it may be worth a slab
