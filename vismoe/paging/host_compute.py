"""The misses of one demand that the CPU computes from the host tier, below the device: chosen, lent and taken back.

They take no slab. Only what lies in host memory is chosen; it is held while it is computed, and what has left host memory before
its turn came is waited for after all. All of this runs under the pager's lock.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from vismoe.paging.lender import Lender
from vismoe.paging.lent import Group
from vismoe.paging.miss import Miss, Way, Ways
from vismoe.types import HIGH, ExpertId


class Below:
    """`experts`: those that are still to be computed there."""

    def __init__(self, pager: Lender, layer: int):
        self._pager, self._layer = pager, layer
        self._table = pager.table_of[layer]
        self._geometry = pager.inventory.layers[layer].geometry
        self.experts: set[int] = set()

    def choose(self, ways: Ways, missing: Sequence[int], on_their_way: Collection[int], tokens: Mapping[int, int]) -> None:
        """Of `missing` (absent or on their way), take what is computed here. `tokens`: how many chose each, one by default."""
        pager, layer = self._pager, self._layer
        assert pager.host is not None
        here = pager.host.has(ExpertId(layer, expert) for expert in missing)
        asked = [expert for expert, has in zip(missing, here) if has]
        misses = [Miss(tokens.get(expert, 1), expert in on_their_way) for expert in asked]
        nbytes = self._table.pool.record_bytes[HIGH]
        ahead_bytes = pager.queued_bytes() + nbytes * (len(missing) - len(asked))
        chosen = ways.choose(self._geometry, nbytes, misses, ahead_bytes)
        self.experts = {expert for expert, way in zip(asked, chosen) if way is Way.CPU}

    def lend(self, todo: Sequence[int], in_order: bool) -> tuple[Group, set[int]]:
        """(What is computed next, held; what has left host memory and is not ours any more). In order: only what `todo` begins
        with."""
        host = self._pager.host
        assert host is not None
        mine = self.experts.__contains__
        wanted = list(itertools.takewhile(mine, todo) if in_order else filter(mine, todo))
        held = host.hold(ExpertId(self._layer, expert) for expert in wanted)
        gone = {expert for expert in wanted if ExpertId(self._layer, expert) not in held}
        self.experts -= gone
        ready = list(itertools.takewhile(lambda e: e not in gone, wanted)) if in_order else [e for e in wanted if e not in gone]
        if not ready:
            host.let_go()  # whoever waits for a copy must hold nothing
        slabs = np.array([held[ExpertId(self._layer, expert)] for expert in ready], dtype=np.int64)
        return Group(ready, host.pools[self._geometry], slabs, on_host=True), gone

    def take_back(self, computed: list[int], counted: Collection[int] | None) -> None:
        """Computed. A copy that was under way, or has arrived, stays: it is an ordinary resident now."""
        pager, table = self._pager, self._table
        assert pager.host is not None
        pager.host.let_go()
        table.used_below(np.add(computed, table.base[self._layer]))
        self.experts.difference_update(computed)
        count = len(computed) if counted is None else sum(expert in counted for expert in computed)
        pager.metrics.add("computed_on_host", pager.phase, self._layer, count)
        pager.metrics.add("bytes_computed_on_host", pager.phase, self._layer, len(computed) * table.pool.record_bytes[HIGH])
        pager.transfer.wake()  # some of it may be worth a slab
