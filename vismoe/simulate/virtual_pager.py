"""The pager in virtual time: its page tables, victim choice, prefetch order and speculation cap over slabs that hold nothing.

Follows paging/pager.py and paging/demand.py decision by decision; a test holds the two against each other. What is simpler is
time: one link that carries demands before guesses and finishes what it began, and a layer that computes when its last expert has
arrived, so transfers of a prefill chunk do not overlap with its own compute: first its experts one by one, as long as the tokens
take, then a fixed time for the rest of a decoder layer. What the CPU computes below the device takes as long as its rates say,
beside the link. Without a link rate copies take no time.
"""

from dataclasses import dataclass

import numpy as np

from vismoe.errors import ConfigError
from vismoe.metrics import Metrics
from vismoe.paging.miss import Miss, Way, Ways
from vismoe.paging.page_table import LOADING, RESIDENT, PageTable, Room
from vismoe.paging.speculation import Ledger, prefetch_order
from vismoe.pools.pool import SlabPool
from vismoe.simulate.demands import Conditions, RecordedDemand
from vismoe.types import HIGH, ExpertInventory, MoELayer, Phase

__all__ = ["VirtualPager"]


@dataclass
class Serving:
    """A demand being served; experts by their flat index in the table."""

    demand: RecordedDemand
    table: PageTable
    todo: list[int]  # not computed yet, in the order of computation
    absent: list[int]  # no slab yet, ascending
    keep: set[int] | None  # None: all may enter the cache
    below: list[int]  # computed below the device
    began_s: float
    cpu_s: float  # what that takes
    copies: int = 0
    behind_s: float = 0.0  # until the guess on the link has arrived


class VirtualPager:
    """Feed it demands in order with `run`, then `end_request`; figures are in `metrics` and `now_s`."""

    def __init__(self, inventory: ExpertInventory, slabs: tuple[int, ...], order: str, conditions: Conditions):
        self.inventory, self.conditions = inventory, conditions
        self.tables = tuple(
            PageTable(inventory.layers_of(g), SlabPool(layout, slabs[g], aliased=True), order)
            for g, layout in enumerate(inventory.layouts)
        )
        self.metrics = Metrics(len(inventory.layers))
        self.now_s = 0.0
        self._ways: Ways | None = None
        rates = conditions.rates()
        if rates is not None and conditions.misses != "wait":
            self._ways = Ways(conditions.misses, (rates,) * len(inventory.layouts))
        self._s_per_byte = 1 / conditions.link_bytes_per_s if conditions.link_bytes_per_s else 0.0
        self._link_idle_at_s = 0.0
        self._in_flight: tuple[PageTable, int] | None = (
            None  # what nobody demanded on the link (table, flat expert), until it is idle
        )
        self._guesses: list[tuple[int, int, float]] = []  # (layer, expert, score), best last
        self.ledger = Ledger(inventory)
        self._step_began_s = 0.0
        self._tick = self._misses_last_step = self._misses_this_step = self._misses_of_layer = 0
        self._last: RecordedDemand | None = None
        for layer in inventory.layers[: conditions.pinned_layers]:
            self._pin(layer)

    def run(self, demand: RecordedDemand) -> None:
        """One MoE layer of one step: serve the demand, refresh the lookahead, compute while the link prefetches."""
        if self._last is not None and demand.request != self._last.request:
            self.end_request()
        if self._last is None or demand.step != self._last.step:
            self._begin_step(demand.phase)
        self._last, began_s = demand, self.now_s
        serving = self._enter(demand)
        asked_s = self._look_ahead(demand)
        while serving.absent:  # larger than the pool, or streaming: slabs are taken again as soon as they are computed
            self._compute_next(serving)
        self._wait(serving)
        self.now_s = max(self.now_s, began_s + asked_s)  # asked while copies were under way
        tokens = int(demand.tokens.sum()) / self.inventory.layers[demand.layer].top_k
        expert_s = tokens * self.conditions.compute_s_per_token / max(1, len(serving.todo))
        while serving.todo:
            self._use_link_until(self.now_s + expert_s, demand.layer)
            self._compute_next(serving)
        self._computed_below(serving)
        self._use_link_until(self.now_s + self.conditions.compute_s_per_layer, demand.layer)
        self._add("layer_seconds", self.now_s - began_s)

    def end_request(self) -> None:
        """Guesses nobody used by now were wasted; what is resident stays."""
        self._land()
        self._guesses.clear()
        for table in self.tables:
            for expert in table.give_up_guesses():
                self._count_wasted(expert.layer)

    def _begin_step(self, phase: Phase) -> None:
        self.ledger.begin_step(phase, self.now_s - self._step_began_s)
        self._step_began_s = self.now_s
        if self.conditions.prefetch_bytes_per_step is not None:
            self.ledger.allowance_bytes = self.conditions.prefetch_bytes_per_step
        self._misses_last_step, self._misses_this_step = self._misses_this_step, 0
        self._guesses.clear()
        for table in self.tables:
            table.begin_step()

    def _pin(self, layer: MoELayer) -> None:
        """Every expert of the layer is here from the start; not counted."""
        table = self._table(layer.index)
        for flat in range(table.base[layer.index], table.base[layer.index] + layer.num_experts):
            slab = table.pool.take()
            if slab is None or table.pool.free < 2:
                raise ConfigError(
                    f"{self.conditions.pinned_layers} pinned layers leave less than two of {table.pool.capacity} slabs; "
                    "pin fewer layers, or give more slots"
                )
            table.begin_load(flat, slab)
            table.end_load(flat, succeeded=True)
            table.pinned[slab] = True

    def _table(self, layer: int) -> PageTable:
        return self.tables[self.inventory.layers[layer].geometry]

    def _add(self, counter: str, amount: float, layer: int | None = None) -> None:
        assert self._last is not None
        self.metrics.add(counter, self._last.phase, self._last.layer if layer is None else layer, amount)

    # -- a demand
    def _enter(self, demand: RecordedDemand) -> Serving:
        """Count it, protect what is here, and take slabs for what is not."""
        table = self._table(demand.layer)
        base = table.base[demand.layer]
        wanted = (demand.experts + base).tolist()
        slabs = table.slab_of[wanted]
        here = slabs[slabs >= 0]
        decoding = demand.phase is Phase.DECODE
        keep = None if decoding else set((demand.last + base).tolist())
        table.enter_layer(demand.layer)
        behind_s = self._guess_ends_s() - self.now_s
        present = [flat for flat, slab in zip(wanted, slabs, strict=True) if slab >= 0]
        late = {flat for flat in present if table.state[table.slab_of[flat]] == LOADING}
        guesses = table.enter_demand(here, np.array([keep is None or flat in keep for flat in present], dtype=bool))
        if guesses:
            self.ledger.used(guesses, guesses * table.pool.record_bytes[HIGH])
        self._tick += 1
        absent = [flat for flat, slab in zip(wanted, slabs, strict=True) if slab < 0]
        self._misses_of_layer = len(absent) + len(late)
        self._misses_this_step += self._misses_of_layer
        for counter, amount in (
            ("steps", 1),
            ("hits", len(here) - len(late)),
            ("misses", len(absent) + len(late)),
            ("late", len(late)),
        ):
            self._add(counter, amount)
        tokens = dict(zip(wanted, demand.tokens.tolist(), strict=True))
        below, cpu_s = self._choose_below(demand.layer, sorted([*absent, *late]), late, tokens)
        absent, late = [flat for flat in absent if flat not in below], late - below
        if absent:
            self.ledger.displaced(int(np.count_nonzero(table.displaced[absent])))
        order = [*present, *absent] if decoding else wanted
        todo = [flat for flat in order if flat not in below]
        serving = Serving(demand, table, todo, absent, keep, sorted(below), self.now_s, cpu_s)
        if late or absent:  # the link finishes the guess it carries; a late one has arrived then
            serving.behind_s = behind_s
            self.now_s = max(self.now_s, self._link_idle_at_s)
            self._land()
        self._issue(serving)
        return serving

    def _choose_below(self, layer: int, missing: list[int], late: set[int], tokens: dict[int, int]) -> tuple[set[int], float]:
        """What of `missing` is computed below the device, and the seconds it takes."""
        if self._ways is None or not missing:
            return set(), 0.0
        geometry = self.inventory.layers[layer].geometry
        nbytes, rates = self.inventory.layouts[geometry].record_bytes, self._ways.rates[geometry]
        ahead_bytes = self._in_flight[0].pool.record_bytes[HIGH] if self._in_flight else 0
        misses = [Miss(tokens[flat], on_its_way=flat in late) for flat in missing]
        ways = self._ways.choose(geometry, nbytes, misses, ahead_bytes)
        below = [flat for flat, way in zip(missing, ways, strict=True) if way is Way.CPU]
        return set(below), sum(rates.cpu_s(nbytes, tokens[flat]) for flat in below)

    def _issue(self, serving: Serving, must: bool = False) -> None:
        """Take slabs for absent experts, in id order, as far as they can be had; with `must` for one at any price."""
        table, absent = serving.table, serving.absent
        while absent:
            streaming = serving.keep is not None and absent[0] not in serving.keep
            room = self._make_room(serving, streaming)
            if room is None and must:
                room = self._make_room(serving, streaming, must=True) or self._give_up_last(serving, streaming)
            if room is None:
                return
            must = False
            flat = absent.pop(0)
            table.begin_load(flat, room.slab, ring=room.ring, demanded=True)
            table.end_load(flat, succeeded=True)
            serving.copies += 1

    def _make_room(self, serving: Serving, streaming: bool, must: bool = False) -> Room | None:
        return self._settled(serving.table.make_room(serving.demand.layer, self.conditions.window, streaming, must))

    def _give_up_last(self, serving: Serving, streaming: bool) -> Room | None:
        """The demanded resident that is computed last makes room and is read again."""
        table = serving.table
        for flat in reversed(serving.todo[1:]):
            slab = table.slab_of[flat]
            if slab >= 0 and table.demanded[slab]:
                table.demanded[slab] = False
                serving.absent.append(flat)
                serving.absent.sort()
                return self._make_room(serving, streaming, must=True)
        return None

    def _compute_next(self, serving: Serving) -> None:
        table, flat = serving.table, serving.todo[0]
        if table.slab_of[flat] < 0:
            self._issue(serving, must=True)
        slab = int(table.slab_of[flat])
        assert table.state[slab] == RESIDENT, "no slab can be taken: the pool is too small"
        table.leave_demand(np.array([slab]))
        table.used(np.array([slab]), self._tick)
        serving.todo.pop(0)
        self._issue(serving)

    def _wait(self, serving: Serving) -> None:
        """For the copies, and for what is computed below beside them; the link may be idle before that."""
        nbytes = serving.copies * serving.table.pool.record_bytes[HIGH]
        self._add("bytes_read", nbytes)
        self.now_s += nbytes * self._s_per_byte
        if nbytes:
            self._link_idle_at_s = self.now_s
        cpu_done_s = serving.began_s + serving.cpu_s
        stall_s = max(0.0, self.now_s - cpu_done_s)
        self._add("stall_seconds", stall_s)
        self.ledger.waited(stall_s, serving.copies, serving.behind_s)
        self._use_link_until(cpu_done_s, serving.demand.layer)

    def _computed_below(self, serving: Serving) -> None:
        """A copy that was under way, or has arrived, stays: it is an ordinary resident now."""
        if not serving.below:
            return
        slabs = serving.table.slab_of[serving.below]
        serving.table.leave_demand(slabs[slabs >= 0])
        serving.table.used_below(np.array(serving.below))
        self._add("computed_on_host", len(serving.below))
        self._add("bytes_computed_on_host", len(serving.below) * serving.table.pool.record_bytes[HIGH])
        self._add("compute_seconds", serving.cpu_s)

    def _settled(self, room: Room | None) -> Room | None:
        """Count the eviction that made the room."""
        if room is not None and room.evicted is not None:
            self._add("evictions", 1, room.evicted.expert.layer)
            if room.evicted.unused_prefetch:
                self._count_wasted(room.evicted.expert.layer)
        return room

    def _count_wasted(self, layer: int) -> None:
        self.ledger.wasted()
        self._add("wasted_prefetch_bytes", self.inventory.layout(layer).record_bytes, layer)

    # -- lookahead and prefetch
    def _look_ahead(self, demand: RecordedDemand) -> float:
        """Recorded scores become priorities and guesses; returns the seconds of asking. Off while nothing misses, and where
        nothing may be guessed."""
        guessing = self.conditions.prefetch and self.ledger.may_guess
        if demand.scores is None or not (self._misses_last_step or self._misses_this_step) or not guessing:
            return 0.0
        layers = self.inventory.layers[demand.layer + 1 : demand.layer + 1 + len(demand.scores)]
        scores = demand.scores[: len(layers)].astype(np.float32)
        absent = np.zeros(scores.shape, bool)
        for row, layer in enumerate(layers):
            table = self._table(layer.index)
            start, end = table.base[layer.index], table.base[layer.index] + layer.num_experts
            table.scores[start:end] = scores[row, : layer.num_experts]
            absent[row, : layer.num_experts] = table.slab_of[start:end] < 0
        rows, experts = prefetch_order(scores, absent, -(-self.ledger.allowance_bytes // self.ledger.unit_bytes))
        self._guesses = [(demand.layer + 1 + int(r), int(e), float(scores[r, e])) for r, e in zip(rows[::-1], experts[::-1])]
        self.ledger.asked(self.conditions.lookahead_s, self._misses_of_layer)
        return self.conditions.lookahead_s

    def _use_link_until(self, end_s: float, running_layer: int) -> None:
        """Time passes; whenever the link is idle, it carries what is worth most of all that nobody has demanded."""
        while self._link_idle_at_s < end_s:
            self._land()
            if not (self._start_guess(running_layer) or self._start_admission(running_layer)):
                break
        self.now_s = max(self.now_s, end_s)
        if self._link_idle_at_s <= self.now_s:
            self._land()

    def _start_admission(self, running_layer: int) -> bool:
        """The most used absent expert, where misses are computed below and it is worth more than who leaves."""
        assert self._last is not None
        if self._ways is None or self._last.phase is not Phase.DECODE:
            return False
        for table in self.tables:
            found = table.admission(running_layer, self.conditions.window)
            if found is not None:
                flat, room = found
                self._settled(room)
                table.begin_load(flat, room.slab)
                self._carry(table, flat)
                return True
        return False

    def _carry(self, table: PageTable, flat: int) -> None:
        """The link begins to copy what nobody has demanded."""
        nbytes = table.pool.record_bytes[HIGH]
        self._in_flight = (table, flat)
        self._link_idle_at_s = max(self._link_idle_at_s, self.now_s) + nbytes * self._s_per_byte
        self._add("bytes_read", nbytes, table.id_of[flat].layer)

    def _start_guess(self, running_layer: int) -> bool:
        """The best guess still absent takes a slab and the link; False when there is none or the cap is reached."""
        assert self._last is not None
        streaming = self._last.phase is Phase.PREFILL
        while self._guesses:
            layer, expert, score = self._guesses.pop()
            table = self._table(layer)
            flat, nbytes = table.base[layer] + expert, table.pool.record_bytes[HIGH]
            if table.slab_of[flat] >= 0 or layer <= running_layer:
                continue
            if nbytes > self.ledger.allowance_bytes:
                return False
            room = self._settled(table.room_for_guess(running_layer, self.conditions.window, score, streaming))
            if room is None:  # nothing may be taken now; later, perhaps
                self._guesses.append((layer, expert, score))
                return False
            self.ledger.started(nbytes)
            table.begin_guess(flat, room)
            self._carry(table, flat)
            self._add("prefetched_bytes", nbytes, layer)
            return True
        return False

    def _guess_ends_s(self) -> float:
        """When the link is idle again, if it carries a guess; otherwise now."""
        if self._in_flight is None or not self._in_flight[0].speculative[self._in_flight[0].slab_of[self._in_flight[1]]]:
            return self.now_s
        return max(self.now_s, self._link_idle_at_s)

    def _land(self) -> None:
        """The guess on the link, if any, has arrived."""
        if self._in_flight is not None:
            table, flat = self._in_flight
            table.end_load(flat, succeeded=True)
            self._in_flight = None
