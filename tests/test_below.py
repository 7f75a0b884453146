"""Misses that are computed below the device: the right bytes, nothing held behind, and the same sums as by waiting."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from test_pager import EVERY, NumberStore, check, deadline, interrupt_at_random, interrupt_everywhere, lent_by, random_walk

from vismoe.errors import ClosedError
from vismoe.paging.miss import Rates, Ways
from vismoe.paging.pager import Pager
from vismoe.paging.tickets import Moved, Ticket
from vismoe.paging.transfer import EmulatedLinkMover, Mover
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.simulate.demands import Conditions, Demands
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import ExpertId, Phase

FAST_LINK = Rates(1e9, 1e9)  # of records of a few bytes: copies take next to nothing


class CopyMover(Mover):
    """What DeviceMover does, without a device: the slab gets a copy, so the host tier may be smaller than the model."""

    by_demander = False

    def __init__(self, *hosts):
        self.hosts = hosts

    def move(self, ticket, pool):
        with self.hosts[pool.precision_of(ticket.slab)].lease(ticket.expert) as lease:
            pool.record(ticket.slab).copy_(lease.pool.record(lease.slab))
        return Moved(lease.disk_bytes, pool.bytes_of(ticket.slab))

    def released(self, geometry, slabs):
        """Copies are over when they return."""


class NoBytes(Mover):
    """A host tier and a device without bytes: everything is in host memory, and the thread that waits does the copies."""

    by_demander = True

    def __init__(self, inventory):
        self.hosts = (self,)
        self.pools = tuple(SlabPool(layout, 1, aliased=True) for layout in inventory.layouts)

    def move(self, ticket, pool):
        return Moved(disk_bytes=pool.bytes_of(ticket.slab))

    def released(self, geometry, slabs): ...
    def has(self, experts):
        return [True for _ in experts]

    def hold(self, experts):
        return dict.fromkeys(experts, 0)

    def let_go(self): ...
    def close(self): ...


def copying(store, slabs, *, host_records, policy, rates=FAST_LINK, **kw):
    """A pager over real copies out of a host tier of so many records per geometry."""
    host = HostTier(store, tuple(host_records for _ in slabs), page_locked=False)
    pools = tuple(SlabPool(layout, n) for layout, n in zip(store.inventory.layouts, slabs, strict=True))
    return Pager(store.inventory, pools, CopyMover(host), ways=Ways(policy, (rates,) * len(slabs)), **kw)


def emulated(store, slabs, *, policy, link_bytes_per_s, rates=None, **kw):
    """A pager over an emulated link; the host tier is filled lazily and holds everything."""
    counts = [sum(layer.num_experts for layer in store.inventory.layers_of(g)) for g in range(len(slabs))]
    pools = tuple(SlabPool(layout, n, aliased=True) for layout, n in zip(store.inventory.layouts, slabs, strict=True))
    mover = EmulatedLinkMover(HostTier(store, tuple(counts), page_locked=False), bytes_per_s=link_bytes_per_s)
    ways = None if policy == "wait" else Ways(policy, (rates or Rates(link_bytes_per_s, link_bytes_per_s),) * len(slabs))
    return Pager(store.inventory, pools, mover, ways=ways, **kw)


def warm(pager):
    """Fill the host tier with as much as it takes."""
    for layer in pager.inventory.layers:
        for expert in range(layer.num_experts):
            with pager.host.lease(ExpertId(layer.index, expert)):
                pass


# -- every invariant
@pytest.mark.budget(4)
@pytest.mark.parametrize("policy", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("experts", "slabs", "host_records", "threads", "steps"),
    [(3, 2, 3, 1, 4000), (3, 3, 5, 2, 800), (8, 16, 24, 2, 800), (8, 24, 48, 3, 800)],  # in the first, few are there in time
)
def test_random_steps_keep_every_invariant_also_where_host_memory_is_small(policy, experts, slabs, host_records, threads, steps):
    options = dict(make=copying, host_records=host_records, policy=policy, threads=threads)
    with deadline(120, "somebody waits for ever"):
        pager = random_walk(3, steps, [experts] * 6, [0] * 6, [slabs], **options)
    counts = pager.metrics.snapshot()
    least = host_records if policy == "cpu" else -1  # auto computes where a copy would be late, which is up to the machine
    assert least < counts.total("computed_on_host") < counts.total("misses")
    assert counts.total("evictions") > 100
    assert counts.total("bytes_computed_on_host") >= counts.total("computed_on_host") * pager.core.ledger.unit_bytes


@pytest.mark.parametrize("policy", ["cpu", "auto"])
def test_random_steps_over_an_emulated_link_and_two_geometries(policy):
    with deadline(120, "somebody waits for ever"):
        pager = random_walk(
            5, 1_000, [4, 9, 4, 9], [0, 1, 0, 1], [3, 5], make=emulated, policy=policy, link_bytes_per_s=1e8, window=2
        )
    assert pager.metrics.snapshot().total("computed_on_host") > (150 if policy == "cpu" else 20)


# -- what is computed
def layer_sums(pager, plans, phase):
    """A stand-in for arithmetic: float32 sums whose bits depend on the order, added in ascending id."""
    sums = []
    for plan in plans:
        pager.begin_step(phase)
        for layer, experts in enumerate(plan):
            with pager.demand(layer, experts, None if phase is Phase.DECODE else experts[-1:]) as demand:
                parts = {
                    lent.expert: lent.weights["w"][:2].float().sum() / 3
                    for group in demand.groups(in_order=phase is Phase.PREFILL)
                    for lent in group
                }
            total = torch.zeros(())
            for expert in sorted(parts):
                total += parts[expert]
            sums.append(float(total))
    return sums


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_every_way_gives_the_same_sums(phase):
    rng = random.Random(1)
    plans = [[sorted(rng.sample(range(16), 6)) for _ in range(4)] for _ in range(40)]
    results, counts = {}, {}
    for policy in ("wait", "cpu", "auto"):
        pager = emulated(NumberStore([16] * 4, [0] * 4), [16], policy=policy, link_bytes_per_s=1e7)
        warm(pager)
        results[policy] = layer_sums(pager, plans, phase)
        counts[policy] = pager.metrics.snapshot()
        pager.check_integrity()
        pager.close()
    assert results["wait"] == results["cpu"] == results["auto"]
    assert counts["wait"].total("computed_on_host") == 0
    misses = counts["cpu"].total("misses")  # a few arrive by themselves before their turn
    assert 0.9 * misses < counts["cpu"].total("computed_on_host") <= misses
    assert 0 < counts["auto"].total("computed_on_host") < counts["auto"].total("misses")


def test_what_lies_on_the_device_comes_first_and_what_is_computed_below_takes_no_slab():
    pager = emulated(NumberStore([8], [0]), [4], policy="cpu", link_bytes_per_s=1e9, threads=0)
    warm(pager)
    table = pager.tables[0]
    for expert in (2, 5):
        slab = table.pool.take()
        table.begin_load(expert, slab)
        table.end_load(expert, succeeded=True)
        with pager.host.lease(ExpertId(0, expert)) as lease:
            table.pool.alias(slab, lease.pool, lease.slab)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2, 5, 7]) as demand:
        groups = [[(lent.expert, lent.on_host) for lent in group] for group in demand.groups(in_order=False)]
    assert groups == [[(2, False), (5, False)], [(1, True), (7, True)]]
    pager.begin_step(Phase.PREFILL)
    with pager.demand(0, [1, 2, 5, 7], keep=[7]) as demand:
        groups = [[(lent.expert, lent.on_host) for lent in group] for group in demand.groups(in_order=True)]
    assert groups == [[(1, True)], [(2, False), (5, False)], [(7, True)]]
    assert table.pool.free == 2 and pager.metrics.snapshot().total("misses") == 4
    pager.close()


def test_what_is_not_in_host_memory_is_waited_for():
    pager = copying(NumberStore([8], [0]), [4], host_records=8, policy="cpu")
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2]) as demand:
        assert not any(lent.on_host for group in demand.groups(in_order=False) for lent in group)
    with pager.host.lease(ExpertId(0, 5)):
        pass
    with pager.demand(0, [5, 6]) as demand:
        assert {lent.expert: lent.on_host for group in demand.groups(in_order=False) for lent in group} == {5: True, 6: False}
    pager.close()


@pytest.mark.parametrize("in_order", [False, True])
def test_what_leaves_host_memory_before_its_turn_is_waited_for_after_all(in_order):
    pager = copying(NumberStore([8], [0]), [4], host_records=3, policy="cpu")
    for expert in (1, 2):
        with pager.host.lease(ExpertId(0, expert)):
            pass
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2]) as demand:
        for expert in (5, 6, 7):  # others read until the records of 1 and 2 are gone
            with pager.host.lease(ExpertId(0, expert)):
                pass
        assert sorted(lent_by(demand, 0, in_order)) == [1, 2]
    assert pager.metrics.snapshot().total("computed_on_host") == 0
    pager.check_integrity()
    pager.close()


def test_who_waits_for_a_copy_holds_nothing_in_host_memory():
    """1 has left, 2 is still there and comes later: the copy of 1 needs the record of 2."""
    pager = copying(NumberStore([8], [0]), [4], host_records=2, policy="cpu", threads=1)
    for expert in (1, 2):
        with pager.host.lease(ExpertId(0, expert)):
            pass
    pager.begin_step(Phase.PREFILL)
    with deadline(20, "the copy waits for ever"), pager.demand(0, [1, 2], keep=[2]) as demand, pager.host.lease(ExpertId(0, 5)):
        assert list(lent_by(demand, 0, in_order=True)) == [1, 2]
    pager.close()


def guess(pager, expert):
    """A copy of an expert of layer 0 that nobody demanded, begun and not carried out."""
    with pager.lock:
        ticket = Ticket(ExpertId(0, expert), 0, pager.tables[0].pool.take(), speculative=True, runner=-1)
        pager.tables[0].begin_load(expert, ticket.slab)
        pager.core.tickets[ticket.expert] = ticket
    return ticket


def ends(pager, ticket, error=None):
    """What a worker does at the end of a copy."""
    pager.tables[0].pool.record(ticket.slab).view(torch.int64)[:2] = torch.tensor(ticket.expert)
    with pager.lock:
        ticket.done, ticket.error = True, error
        pager._finished(ticket)
        pager.transfer.wake()


def test_a_copy_that_arrives_before_its_expert_is_computed_below_can_give_its_slab_up():
    """Both slabs hold experts of this layer that come later, and the first one needs one."""
    pager = copying(NumberStore([8], [0]), [2], host_records=4, policy="cpu", threads=1)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [2]) as demand:
        assert list(lent_by(demand, 0)) == [2]
    with pager.host.lease(ExpertId(0, 3)):
        pass
    ticket = guess(pager, 3)
    pager.begin_step(Phase.PREFILL)
    with deadline(20, "somebody waits for ever"), pager.demand(0, [1, 2, 3], keep=[]) as demand:
        ends(pager, ticket)
        assert list(lent_by(demand, 0, in_order=True)) == [1, 2, 3]
    assert not pager.tables[0].demanded.any()
    assert pager.metrics.snapshot().total("computed_on_host") == 1
    pager.check_integrity()
    pager.close()


def test_a_guess_that_fails_after_its_expert_left_host_memory_is_asked_for_properly():
    pager = copying(NumberStore([8], [0]), [4], host_records=2, policy="cpu", threads=1)
    with pager.host.lease(ExpertId(0, 3)):
        pass
    ticket = guess(pager, 3)
    pager.begin_step(Phase.DECODE)
    with deadline(20, "somebody waits for ever"), pager.demand(0, [3]) as demand:
        for expert in (5, 6):
            with pager.host.lease(ExpertId(0, expert)):
                pass
        threading.Timer(0.05, ends, (pager, ticket, OSError(5, "input/output error"))).start()
        assert list(lent_by(demand, 0)) == [3]
    pager.check_integrity()
    pager.close()


def test_padding_is_computed_and_not_counted():
    pager = emulated(NumberStore([8], [0]), [4], policy="cpu", link_bytes_per_s=1e9)
    warm(pager)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2, 3], counted={2}) as demand:
        assert list(lent_by(demand, 0)) == [1, 2, 3]
    counts = pager.metrics.snapshot()
    assert (counts.total("misses"), counts.total("computed_on_host")) == (1, 1)
    pager.close()


# -- who comes up
def test_what_is_computed_below_often_enough_comes_up_by_itself():
    pager = emulated(NumberStore([32], [0]), [4], policy="cpu", link_bytes_per_s=1e9)
    warm(pager)
    rng = random.Random(0)
    for _ in range(200):
        pager.begin_step(Phase.DECODE)
        with pager.demand(0, sorted({0, 1, 2, rng.randrange(3, 32)})) as demand:
            list(lent_by(demand, 0))
        pager.begin_step(Phase.DECODE)  # the running layer's own experts wait for its end
        with pager.lock:
            pager.transfer.wake()
        time.sleep(0.001)
    assert (pager.tables[0].slab_of[:3] >= 0).all()
    assert pager.metrics.snapshot().total("hits") > 400
    pager.check_integrity()
    pager.close()


def test_only_what_is_worth_clearly_more_comes_up_and_never_into_the_running_layer():
    pager = emulated(NumberStore([4, 4], [0, 0]), [2], policy="cpu", link_bytes_per_s=1e9, threads=0)
    table = pager.tables[0]
    for flat in (0, 1):
        table.begin_load(flat, table.pool.take())
        table.end_load(flat, succeeded=True)
    table.uses[:] = [1.0, 5.0, 1.2, 0, 0, 0, 9.0, 0]  # layer 0, then layer 1
    assert table.admission(running_layer=1, window=1) is None
    table.uses[2] = 1.3
    flat, room = table.admission(running_layer=1, window=1)
    assert (flat, room.evicted.expert) == (2, ExpertId(0, 0))
    pager.close()


def test_pinning_waits_for_copies_whatever_the_ways():
    pager = emulated(NumberStore([4, 4], [0, 0]), [6], policy="cpu", link_bytes_per_s=1e9, pinned_layers=1)
    warm(pager)
    pager.begin_step(Phase.DECODE)
    assert len(list(pager.pin_prefix())) == 4
    assert pager.tables[0].pinned.sum() == 4 and (pager.tables[0].slab_of[:4] >= 0).all()
    pager.close()


def test_a_record_that_cannot_be_read_is_not_tried_for_ever():
    store = NumberStore([8], [0])
    pager = copying(store, [4], host_records=4, policy="cpu")
    warm(pager)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [4, 5]) as demand:
        list(lent_by(demand, 0))
    store.broken = {ExpertId(0, expert) for expert in range(8)}
    pager.tables[0].uses[:4] = 9.0  # hot, and no longer in host memory
    reads = store.reads
    for _ in range(5):
        pager.begin_step(Phase.DECODE)
        with pager.lock:
            pager.core.tick += 1
            pager.transfer.wake()
        time.sleep(0.01)
    assert reads < store.reads <= reads + 10
    pager.check_integrity()
    pager.close()


@pytest.mark.parametrize("policy", ["cpu", "auto"])
@pytest.mark.parametrize("prompt", [0, 12])
def test_replay_divides_misses_as_the_pager_does(policy, prompt):
    """Without workers nothing happens behind the demands' backs, on neither side."""
    demands = Demands.of(skewed_trace(4, 12, 3, requests=2, prompt_tokens=prompt, tokens=30, batch=2, seed=2))
    rates = Rates(1000.0, 1100.0, 0.7)
    (layout,) = demands.inventory.layouts
    pool = SlabPool(layout, 14, aliased=True)
    pager = Pager(demands.inventory, (pool,), NoBytes(demands.inventory), threads=0, ways=Ways(policy, (rates,)))
    step = None
    for demand in demands:
        if demand.step != step:
            step = demand.step
            pager.begin_step(demand.phase)
        decoding = demand.phase is Phase.DECODE
        keep = None if decoding else set(demand.last.tolist())
        with pager.demand(demand.layer, demand.experts.tolist(), keep, tokens=demand.tokens.tolist()) as lent:
            for _ in lent.groups(in_order=not decoding):
                pass
    conditions = Conditions(misses=policy, link_bytes_per_s=1000.0, cpu_bytes_per_s=1100.0, cpu_s_per_token=0.7)
    virtual = VirtualPager(demands.inventory, (14,), "lfu", conditions)
    virtual.core._next_admission = lambda: None
    for demand in demands:
        virtual.run(demand)
    np.testing.assert_array_equal(virtual.tables[0].slab_of, pager.tables[0].slab_of)
    for counter in ("hits", "misses", "computed_on_host", "bytes_computed_on_host", "evictions", "bytes_read"):
        assert virtual.metrics.snapshot().total(counter) == pager.metrics.snapshot().total(counter), counter
    assert pager.metrics.snapshot().total("computed_on_host") > 20


# -- interrupts, errors, closing
@pytest.mark.parametrize(("phase", "policy"), [(Phase.PREFILL, "cpu"), (Phase.DECODE, "auto")])
def test_ctrl_c_at_every_line_lets_go_of_host_memory(phase, policy):
    def make():
        pager = copying(NumberStore([8] * 3, [0, 1, 0]), [3, 3], host_records=6, policy=policy, threads=1)
        warm(pager)
        return pager

    interrupt_everywhere(phase, make, 300 // EVERY, every=EVERY)


def test_ctrl_c_at_any_moment_leaves_a_pager_that_works():
    pager = copying(NumberStore([16] * 4, [0] * 4), [10], host_records=12, policy="auto")

    def nothing_is_held():
        pager.host.check_integrity()
        assert not pager.host._held

    assert interrupt_at_random(pager, times=150, check_more=nothing_is_held) > 110
    assert pager.metrics.snapshot().total("computed_on_host") > 0


def test_an_error_while_computing_below_lets_go_of_host_memory():
    pager = emulated(NumberStore([8], [0]), [4], policy="cpu", link_bytes_per_s=1e9)
    warm(pager)
    pager.begin_step(Phase.DECODE)
    with pytest.raises(ZeroDivisionError), pager.demand(0, [1, 2]) as demand:
        for group in demand.groups(in_order=False):
            assert group.on_host and pager.host._held
            raise ZeroDivisionError
    assert not pager.host._held
    with pager.demand(0, [1, 2]) as demand:
        assert sorted(lent_by(demand, 0)) == [1, 2]
    pager.close()


def test_closing_while_host_memory_is_held_ends_who_waits_for_room_there(monkeypatch):
    """By the thread that computes, while a worker waits for the room that this very thread holds."""
    lent_there, move = threading.Event(), CopyMover.move

    def held_back(mover, ticket, pool):  # else the worker may take the room of 1 or 2 before they are lent
        assert lent_there.wait(20)
        return move(mover, ticket, pool)

    monkeypatch.setattr(CopyMover, "move", held_back)
    pager = copying(NumberStore([8], [0]), [4], host_records=2, policy="cpu", threads=1)
    for expert in (1, 2):
        with pager.host.lease(ExpertId(0, expert)):
            pass
    pager.begin_step(Phase.DECODE)
    with deadline(20, "closing hangs"), pytest.raises(ClosedError), pager.demand(0, [1, 2, 3]) as demand:
        for group in demand.groups(in_order=False):
            assert [lent.expert for lent in group] == [1, 2]
            lent_there.set()
            time.sleep(0.05)  # the worker has come to where it needs room for 3
            assert not any(ticket.done for ticket in pager.core.tickets.values())
            pager.close()
            for lent in group:
                check(ExpertId(0, lent.expert), lent.weights)
    pager.check_integrity()
    pager.host.check_integrity()


def test_closing_by_another_thread_while_host_memory_is_held():
    pager = emulated(NumberStore([8], [0]), [4], policy="cpu", link_bytes_per_s=1e9)
    warm(pager)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 2]) as demand:
        for group in demand.groups(in_order=False):
            closing = threading.Thread(target=pager.close)
            closing.start()
            closing.join(10)
            assert not closing.is_alive()
            for lent in group:
                check(ExpertId(0, lent.expert), lent.weights)
    with pytest.raises(ClosedError):
        pager.begin_step(Phase.DECODE)
    assert not pager.host._held
