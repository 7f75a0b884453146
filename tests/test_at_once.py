"""A layer of one token served in one step has the state and the counters of a demand, and stands aside where that does more; or
the CPU computes some of its misses."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vismoe.errors import TransferError
from vismoe.paging.miss import Rates, Ways
from vismoe.paging.pager import Pager
from vismoe.paging.residency import Queued
from vismoe.paging.tickets import Moved
from vismoe.paging.transfer import Mover
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

LAYERS, EXPERTS, TOP_K = 4, 8, 3
LAYOUT = RecordLayout.of({"w": (4,)}, {"w": torch.float32})
INVENTORY = ExpertInventory(tuple(MoELayer(i, f"layers.{i}", EXPERTS, TOP_K, 0) for i in range(LAYERS)), (LAYOUT,))
TABLE = "slab_of expert_in layer_in state demanded ring streamed speculative borrowed left_for displaced uses worth".split()


class Queueing(Mover):
    """A device that queues every copy; each takes a second."""

    by_demander = False

    def __init__(self, at_once, hosts=()):
        self.at_once, self.hosts, self.copies, self.refuses = at_once, hosts, [], False

    def move(self, ticket, pool):
        return Moved(link_bytes=LAYOUT.record_bytes)

    def queue(self, ticket, pool):
        self.copies.append((ticket.expert.layer * EXPERTS + ticket.expert.expert, ticket.slab))
        ticket.began_s, ticket.ended_s = len(self.copies) - 1.0, float(len(self.copies))
        return Moved(link_bytes=LAYOUT.record_bytes)

    def can_queue(self, geometry, experts=None):
        assert experts is None or ((experts >= 0).all() and (experts < LAYERS * EXPERTS).all())
        return self.at_once

    def queue_all(self, geometry, experts, slabs, pool):
        if self.refuses:
            raise RuntimeError("made up")
        began_s = float(len(self.copies))
        self.copies += zip(experts.tolist(), slabs.tolist())
        return Queued(began_s, float(len(self.copies)), len(slabs) * LAYOUT.record_bytes)


class EveryRecord:
    """A tier below the device that has all experts for good, each in the slab of its number."""

    def __init__(self):
        self.pools = (SlabPool(LAYOUT, LAYERS * EXPERTS),)

    def has(self, experts):
        return [True for _ in experts]

    def places_for_good(self, geometry, experts):
        return experts

    def close(self):
        pass


def pager_of(at_once, slabs, order="lfu", hosts=(), **options):
    return Pager(INVENTORY, (SlabPool(LAYOUT, slabs),), Queueing(at_once, hosts), order=order, threads=0, **options)


class Computed:
    """A computation by a function of (what the device computes, what the CPU does, or None)."""

    def __init__(self, compute):
        self.compute, self.below = compute, None

    def begin_on_host(self, below):
        self.below = below

    def begin(self, group):
        self.made = self.compute(group, self.below)

    def end(self):
        return self.made

    def abandon(self):
        self.made = None


def at_once(pager, layer, ids, compute=lambda group, below: group.experts):
    return pager.at_once(layer, np.array(ids), Computed(compute), 0.0)


def serve(pager, layer, ids) -> tuple[bool, list[int]]:
    """(whether it was served at once, the experts in the order that they were computed in)."""
    assert pager.may_serve_at_once(layer, len(ids)) == pager.transfer._mover.at_once
    computed = at_once(pager, layer, ids)
    if computed is not None:
        return True, computed
    with pager.demand(layer, sorted(ids)) as demand:
        computed = [expert for group in demand.groups(in_order=False) for expert in group.experts]
    pager.layer_ended(Phase.DECODE, layer, 0.0, 1, len(ids))  # as the experts function does
    return False, computed


def state(pager):
    table, metrics = pager.tables[0], pager.metrics
    values = metrics.snapshot().values.copy()
    values[..., [metrics._column[name] for name in metrics._column if name.endswith("seconds")]] = 0
    core = pager.core
    counted = [metrics.demanded, metrics.missed, values, core.tick, core.misses_this_step, core.misses_this_layer]
    learnt = [core.ledger.miss_s[Phase.DECODE], core.streaming[0].stall_s, core.streaming[0]._busy_s, core.streaming[0]._copies]
    return [getattr(table, name).copy() for name in TABLE] + counted + learnt + [pager.transfer._mover.copies]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), order=st.sampled_from(["lfu", "lru"]), slabs=st.integers(TOP_K, LAYERS * EXPERTS - 1))
def test_state_and_counters_are_those_of_demands(data, order, slabs):
    """Once no slab is free, all is served at once."""
    pagers = [pager_of(queues, slabs, order, may_stream=False) for queues in (True, False)]
    for pager in pagers:
        pager.begin_step(Phase.DECODE)
        for layer, first in itertools.product(range(LAYERS), (0, TOP_K, EXPERTS - TOP_K)):
            serve(pager, layer, range(first, first + TOP_K))
    for _ in range(data.draw(st.integers(1, 5), label="passes")):
        for pager in pagers:
            pager.begin_step(Phase.DECODE)
        for layer in range(LAYERS):
            ids = data.draw(st.permutations(range(EXPERTS)), label="ids")[:TOP_K]
            (served, computed), (never, wanted) = (serve(pager, layer, ids) for pager in pagers)
            assert served == (pagers[0].tables[0].pool.free == 0) and not never
            assert sorted(computed) == sorted(wanted) == sorted(ids)
            for one, other in zip(*map(state, pagers)):
                assert np.array_equal(one, other)
            for pager in pagers:
                pager.check_integrity()


@pytest.fixture
def full():
    """A pager whose slabs are all taken, at the begin of a pass."""
    pager = pager_of(at_once=True, slabs=2 * TOP_K)
    pager.begin_step(Phase.DECODE)
    for layer in range(2):
        assert not serve(pager, layer, range(TOP_K))[0], "free slabs are taken by a demand"
    pager.begin_step(Phase.DECODE)
    return pager


def test_what_takes_more_than_evictions_is_demanded(full):
    assert at_once(full, 0, [0, 1, 2]) == [0, 1, 2]
    assert at_once(full, 0, [0, 0, 2]) is None, "an expert twice"
    assert at_once(full, 0, [0, 1, EXPERTS]) is None, "an expert that is none"
    full.core.wanted.replace([(ExpertId(1, 5), 1.0)])
    assert at_once(full, 0, [0, 1, 2]) is None, "a guess is to be copied"
    full.core.wanted.replace([])
    full.begin_step(Phase.PREFILL)
    assert at_once(full, 0, [0, 1, 2]) is None and not full.may_serve_at_once(0, TOP_K), "a prompt"


def test_what_the_link_refuses_fails_the_request_and_nothing_else(full):
    full.transfer._mover.refuses = True
    with pytest.raises(TransferError, match="2 experts could not be brought in: made up"):
        at_once(full, 0, [0, 6, 7])
    full.check_integrity()
    assert full.tables[0].pool.free == 2 and not full.tables[0].demanded.any()
    full.transfer._mover.refuses = False
    assert sorted(serve(full, 0, [0, 6, 7])[1]) == [0, 6, 7]


def test_an_interrupt_leaves_nothing_that_was_not_copied(full):
    def interrupted(group, below):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        at_once(full, 0, [0, 6, 7], interrupted)
    full.begin_step(Phase.DECODE)
    full.check_integrity()
    table = full.tables[0]
    assert table.slab_of[6] < 0 and table.slab_of[7] < 0 and not table.demanded.any()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), slabs=st.integers(TOP_K, LAYERS * EXPERTS - 1))
def test_the_cpu_computes_the_misses_that_were_used_least(data, slabs):
    """By rates that give it as many as the link, rounded down; what it computes takes no slab, and is worth more afterwards."""
    ways = Ways("auto", (Rates(1.0, 1e-9),), step_rates=(Rates(1.0, 0.9),), in_steps_only=True)
    pager = pager_of(True, slabs, hosts=(EveryRecord(),), ways=ways)
    table, copies, computed_there = pager.tables[0], pager.transfer._mover.copies, 0
    pager.begin_step(Phase.DECODE)
    for layer, first in itertools.product(range(LAYERS), (0, TOP_K, EXPERTS - TOP_K)):
        with pager.demand(layer, range(first, first + TOP_K)) as demand:
            assert not any(group.on_host for group in demand.groups(in_order=False)), "what is demanded waits"
    for _ in range(data.draw(st.integers(1, 5), label="passes")):
        pager.begin_step(Phase.DECODE)
        for layer in range(LAYERS):
            ids = data.draw(st.permutations(range(EXPERTS)), label="ids")[:TOP_K]
            flat = {expert: layer * EXPERTS + expert for expert in ids}
            missing = sorted(expert for expert in ids if table.slab_of[flat[expert]] < 0)
            by_use = sorted(missing, key=lambda expert: (table.uses[flat[expert]], expert))
            expected, before, uses = sorted(by_use[: len(missing) // 2]), len(copies), table.uses.copy()

            def compute(group, below, expected=expected, ids=ids, flat=flat):
                on_host = [] if below is None else below.experts
                assert on_host == expected and group.experts == sorted(set(ids) - set(expected))
                if below is not None:
                    assert below.on_host and below.slabs.tolist() == [flat[expert] for expert in on_host]
                    below.spans = [(0.0, ways.step_s(0, len(below), LAYOUT.record_bytes))]
                return on_host

            assert pager.may_serve_at_once(layer, TOP_K, by_cpu=True) and not pager.may_serve_at_once(layer, TOP_K)
            assert at_once(pager, layer, ids, compute) == expected
            assert sorted(expert for expert, _ in copies[before:]) == [flat[e] for e in missing if e not in expected]
            assert all(table.slab_of[flat[expert]] < 0 < table.uses[flat[expert]] - uses[flat[expert]] for expert in expected)
            computed_there += len(expected)
            pager.check_integrity()
    counts = pager.metrics.snapshot()
    assert counts.total("computed_on_host") == computed_there
    assert counts.total("bytes_computed_on_host") == computed_there * LAYOUT.record_bytes


def test_one_expert_at_least_is_left_to_the_device():
    pager = pager_of(True, TOP_K, hosts=(EveryRecord(),), ways=Ways("auto", (Rates(1e-9, 1.0),), in_steps_only=True))
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, range(TOP_K)) as demand:
        list(demand.groups(in_order=False))
    for layer in (1, 2):
        assert len(at_once(pager, layer, range(TOP_K))) == 1
        pager.check_integrity()


def test_misses_that_are_all_to_be_computed_by_the_cpu_are_demanded():
    pager = pager_of(True, TOP_K, hosts=(EveryRecord(),), ways=Ways("cpu", (Rates(1.0, 1.0),)))
    pager.begin_step(Phase.DECODE)
    assert not pager.may_serve_at_once(0, TOP_K, by_cpu=True) and not pager.asks_cpu(0, TOP_K)


@pytest.mark.parametrize("asked", [True, False])
def test_choices_that_follow_from_bytes_alone_are_those_of_demands(asked):
    """So what the CPU would compute is demanded, and its pace does not count."""
    rates = Rates(1.0, 0.9 if asked else 0.1)
    pager = pager_of(True, TOP_K, hosts=(EveryRecord(),), ways=Ways("auto", (rates,), deterministic=True))
    pager.core.step_pace.took(Phase.DECODE, 1e-9, 1.0)
    pager.begin_step(Phase.DECODE)
    assert pager.may_serve_at_once(0, TOP_K, by_cpu=True) != asked == pager.asks_cpu(0, TOP_K)


def test_a_computation_that_cannot_go_on_is_abandoned(full):
    computation = Computed(lambda group, below: group.experts)
    full.transfer._mover.refuses = True
    with pytest.raises(TransferError):
        full.at_once(0, np.array([0, 6, 7]), computation, 0.0)
    assert computation.made is None


def test_another_thread_may_not_run_the_model_meanwhile(full):
    seen = []
    other = threading.Thread(target=lambda: seen.append(full.residency()))

    def compute(group, below):
        other.start()
        other.join(0.1)
        return not seen

    assert at_once(full, 0, [0, 6, 7], compute), "it waits until the step is over"
    other.join(10)
    assert len(seen) == 1
