"""The boundary between experts and keys and values: never more bytes than were planned, no slab taken that is lent, and back."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_pager import NumberStore, make_pager, random_walk
from test_plan import footprint, inventory

import vismoe
from vismoe.engine import boundary as boundary_module
from vismoe.engine.boundary import Boundary
from vismoe.engine.pace import Pace
from vismoe.errors import BusyError
from vismoe.paging.page_table import FREE, UNBACKED
from vismoe.planning.boundary import Move, bytes_beyond, next_move, tokens_for
from vismoe.planning.needs import CacheLayer
from vismoe.pools.advice import whole_pages
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertId, ExpertInventory, Phase, RecordLayout

RECORD = RecordLayout.of({"w": (1600,)}, {"w": torch.int64})  # three pages and an eighth
NEED = footprint(inventory([(16, 2, 0)] * 4, [100]), token_bytes=512)


class LargeNumberStore(NumberStore):
    def __init__(self, experts):
        super().__init__(experts, [0] * len(experts))
        self.inventory = ExpertInventory(self.inventory.layers, (RECORD,))


def large_pager(store, slabs, **kw):
    return make_pager(LargeNumberStore([layer.num_experts for layer in store.inventory.layers]), slabs, **kw)


def resident_bytes(pool):
    """Of the pool's whole slabs, from the kernel's own account of its pages."""
    found = []
    with open("/proc/self/pagemap", "rb") as file:
        for slab in range(pool.capacity):
            first, end = whole_pages(int(pool.addresses[slab]), pool.layout.record_bytes)
            file.seek(first // 4096 * 8)
            entries = np.frombuffer(file.read((end - first) // 4096 * 8), np.uint64)
            found.append(int((entries >> np.uint64(63)).sum()) * 4096)
    return found


def test_a_slab_that_gave_its_pages_back_has_none_until_it_is_written():
    pool = SlabPool(RECORD, 4)
    pool.buffer.fill_(7)
    held = [pool.take() for _ in range(3)]
    assert pool.unback(held[1])
    pages = [pool.page_bytes(slab) for slab in range(4)]
    assert resident_bytes(pool) == [0 if slab == held[1] else nbytes for slab, nbytes in enumerate(pages)]
    others = [slab for slab in range(4) if slab != held[1]]
    assert all((pool.record(slab) == 7).all() for slab in others)  # also in the pages that slabs share
    pool.record(held[1]).fill_(9)
    assert resident_bytes(pool) == pages and (pool.record(held[1]) == 9).all()
    with pytest.raises(AssertionError, match="free"):
        pool.unback(next(slab for slab in range(4) if slab not in held))
    assert not SlabPool(RECORD, 2, aliased=True).elastic


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([(17,), (24,), (40,)]))
def test_random_steps_between_which_slabs_give_their_memory_and_get_it_back(seed, slabs):
    rng, seen = random.Random(seed), []

    def make(store, slabs, **kw):
        pager = large_pager(store, slabs, **kw)
        begin = pager.begin_step

        def begin_step(phase, **named):
            table = pager.tables[0]
            before = table.state.copy()
            lent = pager.lend_memory(rng.random() < 0.5)
            seen.append(lent)
            pager.check_integrity()
            unbacked = np.flatnonzero(table.state == UNBACKED)
            assert lent == sum(table.pool.pools[0].page_bytes(slab) for slab in unbacked)
            assert np.count_nonzero(np.abs((table.state == UNBACKED) ^ (before == UNBACKED))) <= 3  # one for each layer
            assert table.pool.capacity - unbacked.size >= 2 * table.ring_limits[0]
            begin(phase, **named)

        pager.begin_step = begin_step
        return pager

    random_walk(seed, 120, [9, 16, 12], [0, 0, 0], list(slabs), make=make)
    assert slabs == (17,) or any(seen)


def test_no_slab_is_given_that_is_lent_or_pinned_and_nothing_moves_in_the_middle_of_a_demand():
    pager = make_pager(LargeNumberStore([16, 16]), [32], pinned_layers=1)
    list(pager.pin_prefix())
    pager.begin_step(Phase.DECODE)
    with pager.demand(1, range(16)) as lease:
        for number, group in enumerate(lease.groups(False)):
            table = pager.tables[0]
            pager.core.release()  # as nobody may: the core itself keeps what is demanded and pinned
            unbacked = np.flatnonzero(table.state == UNBACKED)
            assert not set(unbacked) & set(group.slabs.tolist())
            assert number or not unbacked.size  # none was free, and all were wanted
            pager.core.take_back()
    assert table.pinned.sum() == 16
    for _ in range(40):
        pager.lend_memory(True)
    pager.check_integrity()
    assert table.pinned.sum() == 16 and not (table.pinned & (table.state == UNBACKED)).any()
    pager.repair()
    pager.check_integrity()
    assert (table.state == UNBACKED).sum() == 32 - 16  # the floor is less
    for _ in range(40):
        pager.lend_memory(False)
    assert pager.core.released_bytes == 0 and (table.state == FREE).sum() == table.pool.free == 16
    pager.close()


def test_another_thread_in_the_middle_of_a_pass_keeps_the_boundary_where_it_is():
    pager = make_pager(LargeNumberStore([16]), [32])
    pager.begin_step(Phase.DECODE)
    from concurrent.futures import ThreadPoolExecutor

    with pager.demand(0, [1, 2]) as lease, ThreadPoolExecutor(1) as other:
        groups = lease.groups(False)
        next(groups)
        with pytest.raises(BusyError):
            other.submit(pager.lend_memory, True).result()
        list(groups)
    pager.close()


@given(st.floats(0, 10), st.booleans(), st.integers(0, 5))
def test_memory_is_given_only_to_who_waits_and_comes_back_when_nobody_does(rho, waits, released):
    move = next_move(rho, waits, released)
    assert (move is Move.RELEASE) == (waits and rho > 1)
    if released and move is not Move.RELEASE:
        assert (move is Move.TAKE_BACK) == (not waits or rho < 0.9)
    if not released:
        assert move is not Move.TAKE_BACK


@given(st.integers(1, 500), st.integers(1, 8), st.integers(0, 2**20), st.sampled_from([None, 64]))
def test_released_bytes_pay_for_as_many_tokens_as_fit(context, rows, released, window):
    need = SimpleNamespace(
        cache_bytes=lambda tokens, rows: CacheLayer(300, 700, window).nbytes(tokens, rows) + 100 * tokens,
        decode=lambda tokens: 900 + 30 * tokens,
    )
    assert bytes_beyond(need, context, rows, 7) == need.cache_bytes(context + 7, rows) - need.cache_bytes(context, rows) + 7 * 30
    tokens = tokens_for(need, context, rows, released)
    assert bytes_beyond(need, context, rows, tokens) <= released
    assert tokens == context or bytes_beyond(need, context, rows, tokens + 1) > released


def serving(context: int) -> SimpleNamespace:
    """What the boundary needs of a runtime: four layers of 16 experts, all of which have a slab."""
    store = LargeNumberStore([16] * 4)
    return SimpleNamespace(
        plan=SimpleNamespace(context=context, rows=4),
        pager=make_pager(store, [64]),
        context=SimpleNamespace(more_tokens=0),
        configuration=SimpleNamespace(needs=NEED, experts=SimpleNamespace(inventory=store.inventory)),
    )


def test_a_new_plan_begins_with_its_own_context_and_with_pools_that_lent_nothing():
    runtime, other = serving(100), serving(50)
    moving = Boundary(runtime)
    for _ in range(boundary_module.ROUNDS_A_MOVE):
        assert moving.context_tokens == 100, "not in every round"
        places = moving.between(2.0, True, 0)
    assert places == 100 + runtime.context.more_tokens > 100 and moving.released_bytes == runtime.pager.core.released_bytes > 0
    runtime.pager.close()
    runtime.plan, runtime.pager = other.plan, other.pager
    assert moving.between(2.0, False, 0) == 50 and runtime.context.more_tokens == moving.released_bytes == 0
    other.pager.close()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 3), st.lists(st.integers(1, 60), max_size=3), st.integers(0, 3)), max_size=60))
@example([(2.0, [50, 50], 0), (2.0, [10], 0), (0.5, [], 0), (0.5, [9], 1)])
def test_slabs_and_keys_and_values_together_never_exceed_the_plan(rounds):
    """Requests of these tokens arrive, and so many of those that run end, round by round."""
    context = 100
    runtime = serving(context)
    pager = runtime.pager
    pool, moving = pager.tables[0].pool.pools[0], Boundary(runtime)
    planned = pool.nbytes + NEED.cache_bytes(context, 4)
    waiting, running, places, grew = [], [], context, False
    for rho, arriving, ending in rounds:
        waiting += arriving
        del running[:ending]
        moving._rounds = boundary_module.ROUNDS_A_MOVE
        waits = bool(waiting) and waiting[0] > places - sum(running)
        before, places = places, moving.between(rho, waits, places - sum(running))
        assert places <= before or (waits and rho > 1)
        while waiting and waiting[0] <= places - sum(running):
            running.append(waiting.pop(0))
        pager.check_integrity()
        assert sum(running) <= places == context + runtime.context.more_tokens
        slabs = pool.nbytes - pager.core.released_bytes
        assert slabs + NEED.cache_bytes(max(sum(running), context), 4) <= planned
        grew |= places > context
    for _ in range(40):  # everybody has left
        moving._rounds = boundary_module.ROUNDS_A_MOVE
        places = moving.between(2.0, False, places)
    assert places == context and not pager.core.released_bytes
    pager.close()


def test_requests_that_wait_get_the_memory_of_experts_and_the_bits_that_they_have_alone(monkeypatch):
    """Rows are worth more than experts here, however long this machine takes for either."""
    monkeypatch.setattr(boundary_module, "ROUNDS_A_MOVE", 2)
    monkeypatch.setattr(Pace, "rho", lambda self, rows: 2.0)
    moved, between = [(0, 0)], Boundary.between

    def noted(self, *given):
        places = between(self, *given)
        moved.append((places, self.released_bytes))
        return places

    monkeypatch.setattr(Boundary, "between", noted)
    with vismoe.load(None, memory="100%", context=100, parallel=8) as engine:
        messages = [{"role": "user", "content": "Describe a photograph of a cat. " * 3}]
        alone = "".join(engine.chat(messages, max_tokens=30, reuse=False))
        replies = [engine.chat(messages, max_tokens=30) for _ in range(6)]  # whose keys and values are kept, as places allow
        assert ["".join(reply) for reply in replies] == [alone] * 6
        places, lent = max(moved)
        assert places > engine.plan.context and lent > 0
        engine.check_integrity()
        assert max(one.rows for reply in replies for one in reply.figures.passes) == 2  # more tokens than the plan has places
        assert 2 * replies[0].figures.prompt_tokens > engine.plan.context
        list(engine.chat(messages, max_tokens=30))  # nobody waits: experts have their memory again
        assert engine.pace.released_bytes < lent
        engine.check_integrity()


def test_a_failed_read_into_a_slab_that_came_back_leaves_nothing_lost():
    store = LargeNumberStore([16])
    pager = make_pager(store, [16])
    for more in (True, True, False):
        pager.lend_memory(more)
    store.broken = {ExpertId(0, 3)}
    pager.begin_step(Phase.DECODE)
    with pytest.raises(vismoe.errors.TransferError), pager.demand(0, [3]) as lease:
        list(lease.groups(False))
    pager.check_integrity()
    assert pager.tables[0].pool.free + (pager.tables[0].state == UNBACKED).sum() == 16
    pager.close()
