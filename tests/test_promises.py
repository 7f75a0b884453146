"""Promises: the buffer against a plain dict, every rule of eviction and copying at each event of random rounds, the pager with
threads, and the same rounds in virtual time."""

import contextlib
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st
from searching import SEARCHING, examples
from test_below import copying
from test_pager import NumberStore, interrupt_everywhere, lent_by, make_pager, until
from test_replay import SECOND, Stepped, decisions

from vismoe.errors import ClosedError, TransferError
from vismoe.paging import pager as pager_module
from vismoe.paging import transfer as transfer_module
from vismoe.paging.demand import Demand
from vismoe.paging.pager import Pager
from vismoe.paging.promises import COUNTERS, MOST, SPARE, Promises, Stage
from vismoe.paging.residency import Residency
from vismoe.paging.streaming import Verdict
from vismoe.paging.transfer import DiskMover
from vismoe.pools.pool import SlabPool
from vismoe.pools.slabs import Slabs
from vismoe.simulate.demands import Conditions
from vismoe.simulate.rounds import demands_of
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.steps import DraftedRound
from vismoe.trace.synthetic import drafted_rounds, inventory_of
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

RECORD = 64  # bytes of a record of NumberStore


# -- the buffer, which is pure
LAYERS, EXPERTS = 4, 6
calls = st.lists(  # (layer, experts of one token, weights); a layer that is not above the one before begins a pass
    st.tuples(
        st.integers(0, LAYERS - 1),
        st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2, unique=True),
        st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.9]), min_size=2, max_size=2),
    ),
    max_size=30,
)


def buffer() -> Promises:
    """Two geometries: layers 0 and 2, and layers 1 and 3. Experts have 10 and 100 bytes."""
    return Promises([np.repeat([0, 2], EXPERTS), np.repeat([1, 3], EXPERTS)], [10, 100])


def number(layer: int, expert: int) -> int:
    return layer % 2 * 2 * EXPERTS + layer // 2 * EXPERTS + expert


def promised(promises: Promises, named) -> dict[int, tuple[int, int, float]]:
    """Name all that, and return what a dict makes of it: number -> (rows, first step, confidence)."""
    entries, step, last = {}, 0, LAYERS
    promises.begin()
    for layer, experts, weights in named:
        step, last = step + (layer <= last), layer
        promises.name(layer, np.array([[number(layer, e) for e in experts]]), np.array([weights], np.float32))
        for expert, weight in zip(experts, weights, strict=True):
            rows, first, confidence = entries.get(number(layer, expert), (0, min(step, MOST), 0.0))
            entries[number(layer, expert)] = rows + 1, first, max(confidence, float(np.float32(weight)))
    return entries


def layer_of(expert: int) -> int:
    return expert // (2 * EXPERTS) + 2 * (expert // EXPERTS % 2)


def by_deadline(entries) -> list[int]:
    def key(expert: int):
        rows, step, confidence = entries[expert]
        return layer_of(expert), -min(rows, MOST), step, -confidence, expert

    return sorted(entries, key=key)


@given(calls, st.tuples(st.integers(0, 14), st.integers(0, 14)), st.sets(st.integers(0, 4 * EXPERTS - 1)))
def test_the_buffer_is_the_dict_that_its_rules_describe(named, slabs, absent):
    promises = buffer()
    entries = promised(promises, named)
    found = np.flatnonzero(promises.rows)
    noted = zip(found.tolist(), promises.rows[found], promises.first_step[found], promises.confidence[found], strict=True)
    assert {expert: (rows, step, confidence) for expert, rows, step, confidence in noted} == entries
    assert promises.deadline(found).argsort().tolist() == [found.tolist().index(expert) for expert in by_deadline(entries)]
    for geometry, count in enumerate(slabs):
        promises.keep(geometry, count)
        mine = [expert for expert in by_deadline(entries) if layer_of(expert) % 2 == geometry]
        widest = max((sum(layer_of(e) == layer for e in mine) for layer in range(LAYERS)), default=0)
        kept = mine[: max(0, count - widest - SPARE)]
        assert sorted(kept) == (np.flatnonzero(promises.kept[promises.parts[geometry]]) + promises.parts[geometry].start).tolist()
        lacking = np.array([e in absent for e in range(4 * EXPERTS)])[promises.parts[geometry]]
        assert sorted(absent.intersection(kept)) == promises.may_copy(geometry, lacking).tolist()


@given(calls, st.data())
def test_the_account_of_a_round_is_what_counting_by_hand_gives(named, data):
    promises = buffer()
    entries = promised(promises, named)
    some = st.sets(st.sampled_from(sorted(entries))) if entries else st.just(set())
    copied, failed, evicted = data.draw(some), data.draw(some), data.draw(some)
    account = dict.fromkeys(COUNTERS, 0)
    account["promised"] = len(entries)
    nbytes = {expert: 100 if layer_of(expert) % 2 else 10 for expert in entries}
    for expert in copied:
        promises.copy_begins(expert)
    account["promised_bytes"] = sum(nbytes[expert] for expert in copied)
    for expert in failed & copied:
        promises.copy_failed(expert)
    for expert in evicted:
        promises.evicted(expert)
    wasted = copied & (failed | evicted)
    promises.stage = Stage.VERIFYING
    for layer in range(data.draw(st.integers(0, LAYERS))):
        demanded = data.draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1))
        promises.demand(layer, np.array(sorted(number(layer, expert) for expert in demanded)))
        foreseen = {number(layer, expert) for expert in demanded} & entries.keys()
        account["foreseen"] += len(foreseen)
        copied = copied - foreseen
        assert not promises.rows[[number(layer, expert) for expert in range(EXPERTS)]].any(), "it outlives its layer"
    account["wasted_promised_bytes"] = sum(nbytes[expert] for expert in wasted | copied)
    assert dict(zip(COUNTERS, promises.end().sum(axis=1).tolist(), strict=True)) == account
    promises.check_integrity([9, 9], -1)
    assert not promises


# -- the core, event by event
def one_geometry(layers: int, experts: int) -> ExpertInventory:
    return inventory_of(layers, experts, 2, record_bytes=RECORD)


class Driven:
    """A core without threads, whose events are chosen at random; each is followed by all checks."""

    def __init__(self, seed: int, slabs: int, layers: int = 4, experts: int = 6, geometries: int = 1):
        self.random = random.Random(seed)
        moe = tuple(MoELayer(i, f"layers.{i}", experts, 2, i % geometries) for i in range(layers))
        layouts = tuple(RecordLayout((), RECORD * (g + 1)) for g in range(geometries))
        self.core = core = Residency(
            ExpertInventory(moe, layouts), [SlabPool(layout, slabs, aliased=True) for layout in layouts], may_stream=False
        )
        self.carried = []  # copies under way
        self.layer, self.maker = layers, "demand"
        self.seen = dict.fromkeys(("kept from promises", "promised that left", "copied", "rounds"), 0)
        if seed % 2:  # more than is kept otherwise, so that demands have to take promised experts
            core.promises.room = lambda geometry, slabs: max(0, slabs - 1)
        for table in core.tables:
            self._watch(table)

    def _watch(self, table) -> None:
        """Check every eviction against the rules, by who wants the slab."""
        evict, choose = table.evict, table.room_for_promise

        def room_for_promise():
            self.maker = "promise"
            try:
                room = choose()
            finally:
                self.maker = "demand"
            left = table.pool.free + int(table.evictable().sum())
            assert room is None or left >= 1, "a promise took the last slab that a demand could have"
            return room

        def checked(slab):
            evictable = np.flatnonzero(table.evictable())
            kept = table.promised[table.expert_in[evictable]]
            assert not table.demanded[slab]
            if table.promised[table.expert_in[slab]]:
                assert self.maker == "demand", "a promised expert left for something that nothing demanded"
                assert kept.all(), "a promised expert left although another could"
                assert table.layer_in[slab] == table.layer_in[evictable].max(), "not the farthest layer"
                self.seen["promised that left"] += 1
            elif self.maker == "promise":
                least = table.worth[evictable[~kept & ~table.streamed[evictable]]].min(initial=np.inf)
                assert table.streamed[slab] or table.worth[slab] == least, "not the one that is worth least"
                self.seen["kept from promises"] += bool(kept.any())
            return evict(slab)

        table.evict, table.room_for_promise = checked, room_for_promise

    # -- events
    def event(self) -> None:
        event = self.random.choices(
            [self.run_layer, self.begin_round, self.promise, self.verify, self.carry, self.land, self.guess, self.other],
            [4, 4, 3, 2, 6, 6, 1, 0.1],
        )[0]
        event()
        self.check()

    def run_layer(self) -> None:
        core, layers = self.core, len(self.core.inventory.layers)
        if core.promises.stage is Stage.DRAFTING:
            return
        if self.layer >= layers:
            if self.random.random() < 0.1:
                core.end_drafting()
            core.begin_step(self.random.choice([Phase.DECODE] * 5 + [Phase.PREFILL]), 0.0)
            self.layer = 0
            self.check()
        layer, table = self.layer, core.table_of[self.layer]
        here = [e for e in range(core.inventory.layers[layer].num_experts) if core.promises.rows[core._numbered(layer) + e]]
        wanted = sorted({*self.random.sample(range(6), self.random.choice([1, 6])), *here[: self.random.randint(0, 4)]})
        self.layer += 1
        slabs = table.slab_of[np.add(wanted, table.base[layer])]
        if core.nothing_comes(layer) and (slabs >= 0).all() and (table.state[slabs] == 2).all():
            core.hit(layer, wanted)
            return
        prefill = core.phase is Phase.PREFILL
        demand = Demand(core, layer, wanted, wanted[:1] if prefill else None)
        demand.open(0.0)
        assert not (table.promised & (table.layer_of == layer)).any()
        with contextlib.suppress(TransferError):
            while demand.todo:
                self.check()
                group = demand.next_group(prefill)
                if group:
                    demand.computed(group)
                    if self.random.random() < 0.1:
                        break
                    continue
                waiting = demand.awaited(prefill) or demand.any_copies()
                while waiting and not any(ticket.done for ticket in waiting):
                    if not self.carried or self.random.random() < 0.3:
                        self.carry()
                    self.land()
                demand.waited(0.1)
        demand.close(1.0)

    def begin_round(self) -> None:
        if self.layer >= len(self.core.inventory.layers) and self.core.promises.stage in (Stage.NONE, Stage.VERIFYING):
            self.core.begin_drafting()
            assert not self.core.promises or self.core.running_layer == -1
            self.drafted = itertools.cycle(range(len(self.core.inventory.layers)))
            self.seen["rounds"] += 1

    def promise(self) -> None:
        for _ in range(self.random.randint(1, 6) if self.core.promises.stage is Stage.DRAFTING else 0):
            experts = np.array([self.random.sample(range(6), 2)])
            self.core.promise(next(self.drafted), experts, np.array([[self.random.random(), self.random.random()]], np.float32))
            self.check()

    def verify(self) -> None:
        self.core.begin_verifying()

    def carry(self) -> None:
        core, speculative = self.core, sum(ticket.speculative for ticket in self.core.tickets.values())
        ticket = core.next_copy()
        if ticket is None:
            return
        if ticket.promised:
            self.seen["copied"] += 1
            assert speculative == 0 or core.promises.stage is not Stage.VERIFYING, "several promises while there are demands"
            flat = core._numbered(ticket.expert.layer) + ticket.expert.expert
            others = [n for g, table in enumerate(core.tables) if table.pool.free > 1 for n in core._absent_promises(g).tolist()]
            assert all(core.promises.deadline(np.array([flat])) < core.promises.deadline(np.array([n])) for n in others)
        self.carried.append(ticket)

    def land(self) -> None:
        if self.carried:
            ticket = self.carried.pop(self.random.randrange(len(self.carried)))
            ticket.done = True
            if self.random.random() < 0.05:
                ticket.error = OSError("broken")
            self.core.ended(ticket)

    def guess(self) -> None:
        if self.layer < len(self.core.inventory.layers):
            self.core.ledger.allowance_bytes = 10 * RECORD
            self.core.look_ahead(self.layer - 1, np.array(self.random.choices([0.0, 0.5, 1.0], k=6), np.float32)[None])

    def other(self) -> None:
        what = self.random.choice(["end_request", "repair", "end_drafting", "end_drafting"])
        if what == "repair":
            self.core.repair(self.carried)
        else:
            getattr(self.core, what)()
        assert not self.core.promises and not any(table.promised.any() for table in self.core.tables)

    def check(self) -> None:
        self.core.check_integrity()
        values = {name: self.core.metrics.snapshot().total(name) for name in COUNTERS}
        assert values["foreseen"] <= values["promised"] and values["wasted_promised_bytes"] <= values["promised_bytes"]


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 20), st.sampled_from([1, 1, 2]))
def test_every_rule_holds_after_every_event(seed, slabs, geometries):
    driven = Driven(seed, slabs, geometries=geometries)
    for _ in range(100):
        driven.event()
    target(float(driven.seen["promised that left"]))


def test_what_the_rules_are_about_does_happen():
    driven = Driven(3, 9)
    for _ in range(1500):
        driven.event()
    assert min(driven.seen.values()) > 2, driven.seen
    count = driven.core.metrics.snapshot().total
    assert count("promised") > count("foreseen") > 50
    assert count("promised_bytes") > count("wasted_promised_bytes") > 0


# -- small cases by hand
def named(core: Residency | Pager, *layers: list[int], weights: tuple[float, ...] = (0.5, 0.5)) -> None:
    """A draft pass over all layers, of one token."""
    for layer, experts in enumerate(layers):
        core.promise(layer, np.array([experts], np.int64), np.array([weights[: len(experts)]], np.float32))


def core_with(resident: dict[int, list[int]], slabs: int, layers: int = 3, **options) -> Residency:
    """Experts by layer are resident; later ones of a layer were used more."""
    core = Residency(one_geometry(layers, 8), [SlabPool(RecordLayout((), RECORD), slabs, aliased=True)], **options)
    for layer, experts in resident.items():
        for expert in experts:
            core.place(ExpertId(layer, expert), core.tables[0].pool.take())
            core.tables[0].worth[core.tables[0].slab_of[core.tables[0].flat(ExpertId(layer, expert))]] = expert
    core.begin_step(Phase.DECODE, 0.0)
    return core


def copies(core: Residency, most: int = 99) -> list[ExpertId]:
    """What is begun to be copied now, one after the other; all of it arrives."""
    begun = list(itertools.takewhile(lambda ticket: ticket is not None, (core.next_copy() for _ in range(most))))
    for ticket in begun:
        ticket.done = True
        core.ended(ticket)
    return [ticket.expert for ticket in begun]


def test_the_earliest_deadline_is_copied_first_then_what_most_rows_want_then_what_the_first_does_then_what_is_surest():
    core = core_with({}, slabs=20)
    core.begin_drafting()
    for experts in ([5, 7], [5, 4], [3, 4], [1, 6]):
        named(core, experts, experts, weights=(0.2, 0.8) if 6 in experts else (0.5, 0.5))
    assert copies(core) == [(layer, expert) for layer in (0, 1) for expert in (5, 4, 7, 3, 6, 1)]
    core.begin_verifying()
    assert copies(core) == []


def test_promises_that_find_no_slabs_leave_those_of_one_layer_and_two_more():
    core = core_with({}, slabs=8)
    core.begin_drafting()
    for experts in ([5, 6], [4, 3]):
        named(core, experts, experts, experts)
    core.begin_verifying()
    assert copies(core) == [(0, 5), (0, 6)], "8 slabs less 4 experts of a layer less 2: the two of the earliest deadline"
    assert core.tables[0].pool.free == 6


def test_a_promise_takes_the_least_used_that_is_not_promised_wherever_it_is_and_leaves_one_slab():
    core = core_with({0: [1, 2], 1: [3, 4], 2: [5, 6]}, slabs=6)
    core.begin_drafting()
    named(core, [1, 2], [7], weights=(0.5, 0.5))
    core.begin_verifying()
    assert core.promises.room(0, 6) == 2, "1 and 2 of layer 0 are kept, and layer 1's 7 has to wait"
    assert copies(core) == []
    core.begin_step(Phase.DECODE, 0.0)
    demand = Demand(core, 0, [1, 2])
    demand.open(0.0)
    assert copies(core) == [(1, 7)]
    assert core.tables[0].residency(1).tolist() == [0, 0, 0, 0, 1, 0, 0, 1], "3 of layer 1 was worth least of what could leave"


def test_a_demand_takes_promised_experts_last_and_of_them_the_farthest_layer_first():
    core = core_with({0: [7], 1: [6], 2: [0], 3: [1, 5]}, slabs=5, layers=4)
    core.promises.begin()
    named(core, [7], [6], [0], [5])
    core.promises.kept[core.promises.rows > 0] = True  # more than pools of this size keep, so that there is a choice
    left = [core.make_room(0, False).evicted.expert for _ in range(5)]
    assert left == [(3, 1), (3, 5), (2, 0), (1, 6), (0, 7)]


def test_after_its_layer_a_promise_protects_nothing():
    core = core_with({0: [1, 2], 1: [3, 4]}, slabs=8)
    core.begin_drafting()
    named(core, [1, 2], [3, 4])
    core.begin_verifying()
    core.begin_step(Phase.DECODE, 0.0)
    assert core.tables[0].promised.nonzero()[0].tolist() == [1, 2, 8 + 3, 8 + 4]
    core.hit(0, [1])
    assert core.tables[0].promised.nonzero()[0].tolist() == [8 + 3, 8 + 4]
    core.hit(1, [3, 4])
    assert not core.tables[0].promised.any()
    core.end_drafting()
    count = core.metrics.snapshot().total
    assert (count("promised"), count("foreseen")) == (4, 3), "without a demand too"
    assert count("promised_bytes") == count("wasted_promised_bytes") == 0, "nothing was copied"


@pytest.mark.parametrize(
    "over",
    [
        lambda core: core.end_drafting(),
        lambda core: core.end_request(),
        lambda core: core.begin_step(Phase.PREFILL, 0.0),
        lambda core: core.begin_step(Phase.ENCODE, 0.0),
        lambda core: core.repair([]),
        lambda core: core.begin_drafting(),
        lambda core: [core.begin_step(Phase.DECODE, 0.0) for _ in range(2)],
    ],
)
@pytest.mark.parametrize("verifying", [False, True])
def test_a_round_that_is_over_is_forgotten_and_its_account_is_settled_once(over, verifying):
    core = core_with({0: [1, 2]}, slabs=12)
    core.begin_drafting()
    named(core, [1, 2], [3, 4])
    copied = len(copies(core))
    named(core, [1, 2], [3, 5])
    if verifying:
        core.begin_verifying()
        copied += len(copies(core))
    for _ in range(2):
        over(core)
        assert not core.tables[0].promised.any() and not (core.promises.rows > 0).any()
        assert copies(core) == []
    core.end_drafting()
    count = core.metrics.snapshot().total
    assert copied > 0 and count("promised") == 5 and count("foreseen") == 0
    assert count("promised_bytes") == count("wasted_promised_bytes") == copied * RECORD


def test_the_first_pass_after_drafting_verifies_and_only_that():
    core = core_with({}, slabs=12)
    core.begin_drafting()
    named(core, [1, 2], [3, 4])
    core.begin_step(Phase.DECODE, 0.0)
    assert not core.promises, "drafting was not over, so this pass is another one"
    core.begin_drafting()
    named(core, [1, 2], [3, 4])
    core.begin_verifying()
    core.begin_step(Phase.DECODE, 0.0, tokens=4)
    assert core.promises.stage is Stage.VERIFYING
    assert copies(core, 1) == [(0, 1)]


def test_promises_do_not_touch_the_books_of_guesses():
    core = core_with({0: [1, 2]}, slabs=8)
    core.ledger.miss_s[Phase.DECODE] = 2.0
    before = core.ledger._balance_s
    core.begin_drafting()
    named(core, [1, 2], [3, 4])
    core.begin_verifying()
    first, second = core.next_copy(), core.next_copy()
    core.begin_step(Phase.DECODE, 0.0)
    core.nothing_comes(0)
    demand = Demand(core, 1, [3, 5])
    demand.open(0.0)
    for ticket in (first, second, core.next_copy()):
        ticket.done = True
        core.ended(ticket)
    demand.waited(50.0)
    demand.computed(demand.next_group(False))
    demand.close(50.0)
    core.end_drafting()
    assert core.ledger._balance_s == before == 0.0 and core.ledger.miss_s[Phase.DECODE] == 2.0
    count = core.metrics.snapshot().total
    assert count("prefetched_bytes") == count("wasted_prefetch_bytes") == 0
    assert (count("promised_bytes"), count("wasted_promised_bytes")) == (2 * RECORD, RECORD)
    assert (count("misses"), count("late")) == (2, 1)


def test_a_layer_without_misses_needs_no_demand_while_promises_wait_for_a_slab_but_not_while_one_is_copied():
    core = core_with({0: [1, 2], 1: [3, 4]}, slabs=4, layers=2)
    core.begin_drafting()
    named(core, [1], [6], weights=(0.5,))
    core.begin_verifying()
    core.begin_step(Phase.DECODE, 0.0)
    assert core.nothing_comes(0)
    core.hit(0, [1, 2])
    ticket = core.next_copy()
    assert ticket.expert == (1, 6) and not core.nothing_comes(1)
    core.ended(ticket)
    assert core.nothing_comes(1)


def test_promises_leave_the_last_slab_free():
    core = core_with({}, slabs=6, layers=1)
    core.promises.room = lambda geometry, slabs: slabs  # more than are kept otherwise
    core.begin_drafting()
    for experts in ([0, 1], [2, 3], [4, 5]):
        named(core, experts)
    begun = [core.next_copy() for _ in range(6)]
    assert [ticket and ticket.expert.expert for ticket in begun] == [0, 1, 2, 3, 4, None]


def test_threads_look_again_when_a_layer_leaves_a_slab_that_a_promise_waits_for():
    core = core_with({0: [1, 2, 3]}, slabs=4, layers=2)
    core.begin_drafting()
    named(core, [], [6])
    core.begin_verifying()
    core.begin_step(Phase.DECODE, 0.0)
    demand = Demand(core, 0, [1, 2, 3])
    demand.open(0.0)
    assert core.next_copy() is None
    woken = []
    core.link.wake = lambda: woken.append(True)
    demand.computed(demand.next_group(False))
    assert woken and core.next_copy().expert == (1, 6)


def test_a_copy_that_had_to_leave_was_wasted_although_its_expert_was_foreseen():
    core = core_with({0: [1, 2, 3]}, slabs=4, layers=2)
    core.begin_drafting()
    named(core, [], [6])
    assert copies(core) == [(1, 6)]
    core.begin_verifying()
    core.begin_step(Phase.DECODE, 0.0)
    demand = Demand(core, 0, [1, 2, 3])
    demand.open(0.0)
    assert core.make_room(0, False).evicted.expert == (1, 6)
    core.enter(1, [6])
    core.end_drafting()
    count = core.metrics.snapshot().total
    assert (count("foreseen"), count("promised_bytes"), count("wasted_promised_bytes")) == (1, RECORD, RECORD)


def test_layers_that_never_leave_need_no_promise():
    core = core_with({0: list(range(8))}, slabs=16)
    for expert in range(8):
        core.pin(ExpertId(0, expert))
    core.begin_drafting()
    for _ in range(2):
        named(core, [1, 2], [1, 2])
    assert core.tables[0].promised.nonzero()[0].tolist() == [8 + 1, 8 + 2]
    assert core.promises.step == 2 and core.metrics.snapshot().total("promised") == 0
    core.end_drafting()
    assert core.metrics.snapshot().total("promised") == 2


def test_a_copy_that_fails_is_not_tried_again_and_a_demand_asks_for_it_itself():
    core = core_with({}, slabs=8)
    core.begin_drafting()
    named(core, [1])
    core.begin_verifying()
    ticket = core.next_copy()
    ticket.done, ticket.error = True, OSError("broken")
    core.ended(ticket)
    assert core.next_copy() is None
    core.begin_step(Phase.DECODE, 0.0)
    demand = Demand(core, 0, [1])
    demand.open(0.0)
    assert copies(core) == [(0, 1)]
    core.end_drafting()
    assert core.metrics.snapshot().total("wasted_promised_bytes") == RECORD


def test_a_lookahead_of_the_pass_before_guesses_nothing_while_tokens_are_drafted():
    core = core_with({}, slabs=8)
    core.look_ahead(0, np.ones((1, 8), np.float32))
    tick = core.tick
    core.begin_drafting()
    assert core.tick != tick and core.next_copy() is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: core_with({}, 8), None),
        (lambda: core_with({}, 8, deterministic=True), "determinism"),
        (lambda: core_with({layer: list(range(8)) for layer in range(3)}, 24), "every expert is resident"),
    ],
)
def test_where_nothing_is_promised_it_says_why_and_the_calls_do_nothing(make, why):
    core = make()
    assert (core.promises_why_not is None) if why is None else why in core.promises_why_not
    core.begin_drafting()
    assert bool(core.promises) == (why is None)
    named(core, [1, 2], [3, 4])
    core.begin_verifying()
    assert bool(copies(core)) == (why is None)
    core.end_drafting()
    core.check_integrity()


def test_slabs_of_two_formats_hold_no_promises():
    pools = [SlabPool(RecordLayout((), RECORD), 4, aliased=True), SlabPool(RecordLayout((), RECORD // 2), 4, aliased=True)]
    core = Residency(one_geometry(2, 8), [Slabs.of(pools)])
    assert "two formats" in core.promises_why_not
    core.begin_drafting()
    assert not core.promises


def test_streamed_passes_have_no_promises():
    core = core_with({}, slabs=12)
    core.begin_drafting()
    named(core, [1, 2])
    core.begin_verifying()
    streaming = core.streaming[0]
    streaming.begin_pass = lambda *given: setattr(streaming, "verdict", Verdict.STREAMED) or 2
    core.begin_step(Phase.DECODE, 0.0, tokens=8)
    assert streaming.on and core.copies_ahead and not core.promises and "streamed" in core.promises_why_not
    core.begin_drafting()
    assert not core.promises
    core.phase = Phase.PREFILL  # a prompt was
    core.begin_drafting()
    assert core.promises and not core.copies_ahead


# -- the pager, with its threads
class Together(NumberStore):
    """Reads wait until so many are under way at a time, or for good until they are let go."""

    def __init__(self, experts: list[int], together: int):
        super().__init__(experts, [0] * len(experts))
        self.under_way, self.most, self._together = 0, 0, together
        self._changed = threading.Condition()

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        with self._changed:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._together, 20)
        try:
            return super().read(expert, record)
        finally:
            self.under_way -= 1


def test_all_threads_copy_promises_while_nothing_demands():
    store = Together([8] * 3, together=3)
    pager = make_pager(store, [16], threads=3)
    pager.begin_step(Phase.DECODE)
    pager.begin_drafting()
    named(pager, [0, 1], [0, 1], [0, 1])
    until(lambda: store.reads == 6 and not pager.core.tickets)
    assert store.most == 3
    named(pager, [0, 2], [0, 2], [0, 2])
    pager.begin_verifying()
    until(lambda: store.reads == 9 and not pager.core.tickets)
    pager.begin_step(Phase.DECODE, tokens=3)
    for layer in range(3):
        with pager.demand(layer, [0, 1, 2]) as demand:
            assert sorted(lent_by(demand, layer)) == [0, 1, 2]
        pager.check_integrity()
    pager.end_drafting()
    count = pager.metrics.snapshot().total
    assert (count("misses"), count("promised"), count("foreseen")) == (0, 9, 9)
    assert (count("promised_bytes"), count("wasted_promised_bytes")) == (9 * RECORD, 0)
    pager.close()


def test_a_resident_layer_takes_the_short_way_in_a_round_and_its_promises_end_there():
    pager = make_pager(NumberStore([8] * 2, [0] * 2), [12], threads=1)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2]) as demand:
        list(lent_by(demand, 0))
    pager.begin_drafting()
    named(pager, [1, 2])
    pager.begin_verifying()
    pager.begin_step(Phase.DECODE, tokens=2)
    asked = []
    assert pager.without_demand([0, 1], lambda uses: asked.extend(uses) or [("computed", [1, 2])]) == [("computed", [1, 2])]
    assert len(asked) == 1  # the promises that this layer ends may begin copies
    pager.end_drafting()
    pager.end_drafting()
    assert pager.metrics.snapshot().total("foreseen") == 2
    pager.close()
    pager.end_drafting()
    with pytest.raises(ClosedError):
        pager.begin_drafting()


def walk(pager: Pager, store: NumberStore, seed: int, rounds: int) -> tuple[int, int]:
    """Random rounds, of which some are left early; reads fail now and then. Gives what whole rounds promised and foresaw.

    A streamed pass reads all, promised or not: counts are constant where `may_stream` is not."""
    counted = lambda: np.array([pager.metrics.snapshot().total(name) for name in ("promised", "foreseen")])  # noqa: E731
    whole = np.zeros(2)
    layers, experts = len(store.inventory.layers), store.inventory.layers[0].num_experts
    try:
        for number in range(rounds):
            rng = random.Random(1000 * seed + number)  # where a read fails early, the next rounds are the same all the same
            rows = [[rng.sample(range(experts), 2) for _ in range(layers)] for _ in range(rng.randint(2, 4))]
            store.broken = {ExpertId(rng.randrange(layers), rng.randrange(experts))} if rng.random() < 0.1 else set()
            before = counted()
            with contextlib.suppress(TransferError):
                pager.begin_drafting()
                for drafted in rows[:-1]:
                    for layer, chosen in enumerate(drafted):
                        wrong = chosen if rng.random() < 0.7 else rng.sample(range(experts), 2)
                        pager.promise(layer, np.array([wrong]), np.array([[rng.random(), rng.random()]], np.float32))
                        pager.check_integrity()
                if rng.random() < 0.1:
                    continue
                pager.begin_verifying()
                pager.begin_step(Phase.DECODE, tokens=len(rows))
                for layer in range(layers):
                    wanted = sorted({expert for row in rows for expert in row[layer]})
                    with pager.demand(layer, wanted) as demand:
                        for _ in lent_by(demand, layer):
                            pager.check_integrity()
                    pager.check_integrity()
                pager.end_drafting()
                if not store.broken:
                    whole += counted() - before
            if rng.random() < 0.1:
                pager.end_request()
    finally:
        pager.close()
    pager.end_drafting()
    pager.check_integrity()
    return int(whole[0]), int(whole[1])


@pytest.mark.parametrize(
    ("slabs", "more"),
    [([2], {}), ([9], {}), ([24], {"threads": 3}), ([40], {"threads": 1}), ([48], {"fill": True})],
)
@pytest.mark.parametrize("geometries", [1, 2])
def test_random_rounds_with_threads_keep_every_invariant(slabs, more, geometries):
    store = NumberStore([8] * 6, [i % geometries for i in range(6)])
    pager = make_pager(store, slabs * geometries, may_stream=False, **more)
    promised, foreseen = walk(pager, store, 5, 600 if SEARCHING else 30)
    count = pager.metrics.snapshot().total
    assert count("hits") + count("misses") > 300
    if geometries == 1 and 9 < slabs[0] < 48:
        assert count("promised_bytes") > 20 * RECORD and foreseen > 0.7 * promised > 200


@pytest.mark.parametrize("policy", ["wait", "auto", "cpu"])
def test_random_rounds_over_a_host_tier_keep_every_invariant(policy):
    store = NumberStore([8] * 4, [0] * 4)
    pager = copying(store, [16], host_records=6, policy=policy)
    walk(pager, store, 6, 30)
    pager.host.check_integrity()
    assert pager.metrics.snapshot().total("promised_bytes") > 10 * RECORD


def serve_a_round(pager: Pager, phase: Phase) -> None:
    pager.begin_drafting()
    named(pager, [0, 1], [0, 1], [0, 1])
    named(pager, [0, 2], [0, 2], [0, 2], weights=(0.9, 0.1))
    pager.begin_verifying()
    pager.begin_step(phase, tokens=2)
    for layer in range(3):
        with pager.demand(layer, [0, 1, 3]) as demand:
            assert sorted(lent_by(demand, layer)) == [0, 1, 3]
    pager.end_drafting()


def test_ctrl_c_at_every_line_of_a_round_is_repaired():
    every = 1 if SEARCHING else 41
    make = lambda: make_pager(NumberStore([8] * 3, [0, 1, 0]), [9, 6], threads=1)  # noqa: E731
    interrupt_everywhere(Phase.DECODE, make, 300 // every, serve_a_round, every=every)


# -- the same rounds in virtual time
class SteppedRounds(Stepped):
    """The pager on a virtual clock, round by round."""

    def run_round(self, round_: DraftedRound, draft_s: float, verified) -> None:
        if self.last is not None and verified[0].request != self.last.request:
            self.end_request()
            self.last = None
        self.pager.begin_drafting()
        for layers in round_.drafts:
            for layer, (experts, weights) in enumerate(layers):
                self.pager.promise(layer, experts, weights)
                self.use_link_until(self.now_s + draft_s / len(layers))
        self.pager.begin_verifying()
        for demand in verified:
            self.run(demand)
        self.pager.end_drafting()


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(2, 40),
    drafts=st.integers(1, 5),
    fidelity=st.sampled_from([0.0, 0.7, 1.0]),
    draft_copies=st.sampled_from([0.0, 1.7, 12.0]),
    copies_per_layer=st.sampled_from([0.3, 1, 3.7]),
    window=st.integers(1, 4),
)
def test_replay_does_what_the_pager_does(seed, slots, drafts, fidelity, draft_copies, copies_per_layer, window):
    """Every eviction and copy in one order, and every counter. A draft pass takes as long as so many copies."""
    inventory, rounds = drafted_rounds(4, 12, 3, rounds=8, drafts=drafts, fidelity=fidelity, requests=2, seed=seed)
    conditions = Conditions(window=window, link_bytes_per_s=SECOND * copies_per_layer / 0.1, compute_s_per_layer=0.1)
    draft_s = draft_copies * 0.1 / copies_per_layer
    virtual = VirtualPager(inventory, (slots,), "lfu", conditions)
    live = SteppedRounds(inventory, slots, "lfu", conditions)
    seen = [decisions(driver.core) for driver in (virtual, live.pager)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (pager_module, transfer_module):
            patch.setattr(module, "time", live)
        for round_, verified in demands_of(inventory, rounds):
            virtual.run_round(round_.drafts, draft_s, verified)
            live.run_round(round_, draft_s, verified)
            assert seen[0] == seen[1]
            virtual.core.check_integrity()
            live.pager.check_integrity()
    np.testing.assert_array_equal(virtual.tables[0].slab_of, live.pager.tables[0].slab_of)
    counts = [driver.metrics.snapshot() for driver in (virtual, live.pager)]
    for counter in ("steps", "hits", "misses", "late", "evictions", "bytes_read", "prefetched_bytes", *COUNTERS):
        assert counts[0].total(counter) == counts[1].total(counter), counter
    assert counts[0].total("stall_seconds") == pytest.approx(counts[1].total("stall_seconds"))
    target(counts[0].total("promised_bytes"))


def test_where_drafts_are_right_and_the_link_is_fast_every_layer_finds_what_it_promised():
    inventory, rounds = drafted_rounds(4, 12, 3, rounds=20, drafts=4, rows=4, fidelity=1.0, seed=2)
    conditions = Conditions(link_bytes_per_s=1e9, compute_s_per_layer=0.1)
    pager = VirtualPager(inventory, (45,), "lfu", conditions)
    for round_, verified in demands_of(inventory, rounds):
        pager.run_round(round_.drafts, 1.0, verified)
    count = pager.metrics.snapshot().total
    assert count("misses") == 0 and count("foreseen") == count("promised") > 0
    assert count("wasted_promised_bytes") == 0


def test_a_closed_pager_takes_no_promises():
    pager = Pager(one_geometry(1, 2), (SlabPool(RecordLayout((), RECORD), 2, aliased=True),), DiskMover(), threads=0)
    pager.begin_drafting()
    pager.close()
    named(pager, [0, 1])
    pager.begin_verifying()
    assert pager.transfer.take() is None
    pager.end_drafting()
