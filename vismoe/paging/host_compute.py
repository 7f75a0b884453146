"""The misses of one demand that the CPU computes from the host tier, below the device: chosen, lent and taken back.

They take no slab. Only what lies in host memory is chosen; it is held while it is computed, and what has left host memory before
its turn came is waited for after all.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from vismoe.paging.lent import Group
from vismoe.paging.miss import Miss, Way, Ways
from vismoe.paging.residency import Residency
from vismoe.types import HIGH, ExpertId


class HostCompute:
    """`experts`: those that are still to be computed there. `precision`: in which format of a pair an expert is wanted."""

    def __init__(self, core: Residency, layer: int, ways: Ways, precision: Callable[[int], int] | None):
        self._core, self._layer, self._ways, self._wanted_in = core, layer, ways, precision
        self._table = core.table_of[layer]
        self._geometry = core.inventory.layers[layer].geometry
        self.experts: set[int] = set()
        self._tokens: Mapping[int, int] = {}

    def _precision(self, expert: int) -> int:
        return HIGH if self._wanted_in is None else self._wanted_in(expert)

    def _bytes(self, expert: int) -> int:
        return self._table.pool.record_bytes[self._precision(expert)]

    def choose(self, missing: Sequence[int], on_their_way: Collection[int], tokens: Mapping[int, int]) -> None:
        """Of `missing` (absent or on their way), take what is computed here. `tokens`: how many chose each, one by default."""
        self._tokens = tokens
        asked = list[int]()
        for precision, host in enumerate(self._core.hosts):
            mine = [expert for expert in missing if self._precision(expert) == precision]
            here = host.has(ExpertId(self._layer, expert) for expert in mine)
            asked.extend(itertools.compress(mine, here))
        asked.sort()
        misses = [Miss(self._bytes(expert), tokens.get(expert, 1), expert in on_their_way) for expert in asked]
        ahead_bytes = self._core.queued_bytes() + sum(map(self._bytes, set(missing) - set(asked)))
        core = self._core
        measured = core.link.bytes_per_s, core.cpu_pace.slowness(core.phase)
        chosen = self._ways.choose(self._geometry, misses, ahead_bytes, *measured)
        self.experts = {expert for expert, way in zip(asked, chosen) if way is Way.CPU}

    def seconds(self, experts: Sequence[int] | None = None) -> float:
        """What computing them takes, or some of them, by the rates that are not measured on the way."""
        rates, experts = self._ways.rates[self._geometry], sorted(self.experts) if experts is None else experts
        return sum(rates.cpu_s(self._bytes(expert), self._tokens.get(expert, 1)) for expert in experts)

    def lend(self, todo: Sequence[int], in_order: bool) -> tuple[Group, set[int]]:
        """(What is computed next, held, in one format; what has left host memory and is not ours any more). In order: only what
        `todo` begins with."""
        mine = list(itertools.takewhile(self.experts.__contains__, todo) if in_order else filter(self.experts.__contains__, todo))
        precision = self._precision(mine[0]) if mine else HIGH
        host = self._core.hosts[precision]
        alike = [self._precision(expert) == precision for expert in mine]
        wanted = list(itertools.compress(mine, itertools.takewhile(bool, alike) if in_order else alike))
        held = host.hold(ExpertId(self._layer, expert) for expert in wanted)
        gone = {expert for expert in wanted if ExpertId(self._layer, expert) not in held}
        self.experts -= gone
        ready = list(itertools.takewhile(lambda e: e not in gone, wanted)) if in_order else [e for e in wanted if e not in gone]
        if not ready:
            host.let_go()  # a thread that waits for a copy must hold nothing
        slabs = np.array([held[ExpertId(self._layer, expert)] for expert in ready], dtype=np.int64)
        pool = host.pools[self._geometry]
        return Group(ready, pool, slabs, on_host=True, precision=None if self._wanted_in is None else precision), gone

    def computed(self, experts: Sequence[int], counted: Collection[int] | None, seconds: float | None) -> None:
        """A copy that was under way, or has arrived, stays: it is an ordinary resident now. seconds: what it took, if known."""
        core, table = self._core, self._table
        if seconds is not None:
            expected_s = self.seconds(experts) + self._ways.rates[self._geometry].cpu_call_s
            core.cpu_pace.took(core.phase, seconds, expected_s)
        for host in core.hosts:
            host.let_go()
        table.used_on_host(np.add(experts, table.base[self._layer]))
        self.experts.difference_update(experts)
        count = len(experts) if counted is None else sum(expert in counted for expert in experts)
        core.metrics.add("computed_on_host", core.phase, self._layer, count)
        core.metrics.add("bytes_computed_on_host", core.phase, self._layer, sum(map(self._bytes, experts)))
        core.link.wake()  # some of it may be worth a slab
