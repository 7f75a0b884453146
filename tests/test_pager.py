"""The pager against its invariants: 10,000 random steps, an integrity check after each, and what must happen in small cases.

With HYPOTHESIS_PROFILE=searching it is 10^5 steps.
"""

import contextlib
import functools
import gc
import itertools
import linecache
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FunctionType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import SEARCHING

from vismoe.errors import BusyError, ClosedError, TransferError
from vismoe.paging import pager as pager_module
from vismoe.paging.pager import Lease, Pager
from vismoe.paging.transfer import FILLING_S, DiskMover
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

EVERY = 1 if SEARCHING else 13  # interrupts strike before every so many lines


class NumberStore:
    """A store whose record says which expert it is; can be told to fail."""

    scratch_bytes = 0
    fingerprint = "numbers"

    def __init__(self, experts: list[int], geometries: list[int]):
        layouts = tuple(RecordLayout.of({"w": (n,)}, {"w": torch.int64}) for n in (2, 4))[: max(geometries) + 1]
        self.inventory = ExpertInventory(
            tuple(MoELayer(i, f"layers.{i}", e, 2, g) for i, (e, g) in enumerate(zip(experts, geometries, strict=True))), layouts
        )
        self.broken: set[ExpertId] = set()
        self.reads = 0

    def reading(self, expert: ExpertId, address: int) -> None:
        """Not by native threads."""

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        self.reads += 1
        if expert in self.broken:
            raise OSError(5, "input/output error")
        record.view(torch.int64)[:2] = torch.tensor(expert)
        return record.numel()

    def close(self) -> None: ...


def make_pager(store: NumberStore, slabs: list[int], **kw) -> Pager:
    pools = tuple(SlabPool(layout, n) for layout, n in zip(store.inventory.layouts, slabs, strict=True))
    return Pager(store.inventory, pools, DiskMover(store), **kw)


def check(expert: ExpertId, weights: dict[str, torch.Tensor]) -> None:
    assert tuple(weights["w"][:2].tolist()) == expert, "a slab was lent that holds another expert"


def lent_by(demand: Lease, layer: int, in_order: bool = False) -> Iterator[int]:
    """The experts one by one, each checked to be what it should be, at the address it should have."""
    for group in demand.groups(in_order):
        assert group and len({lent.on_host for lent in group}) == 1
        for lent, address in zip(group, group.addresses.tolist()):
            check(ExpertId(layer, lent.expert), lent.weights)
            assert lent.weights["w"].data_ptr() == address
            yield lent.expert


def random_walk(
    seed: int, steps: int, experts: list[int], geometries: list[int], slabs: list[int], make=make_pager, **kw
) -> Pager:
    """Drive a pager through random demands, guesses (half of them right), failing reads and loops left early."""
    rng = random.Random(seed)
    store = NumberStore(experts, geometries)
    pager = make(store, slabs, **kw)
    plans = [sorted(rng.sample(range(n), rng.randint(1, min(n, 6)))) for n in experts]
    try:
        layer = len(experts)
        for _ in range(steps):
            if layer >= len(experts):
                pager.begin_step(rng.choice([Phase.PREFILL, Phase.DECODE]))
                layer = 0
                plans = [sorted(rng.sample(range(n), rng.randint(1, min(n, 6)))) for n in experts]
                if rng.random() < 0.1:
                    pager.end_request()
                store.broken = {ExpertId(rng.randrange(len(experts)), 0)} if rng.random() < 0.02 else set()
            if rng.random() < 0.3:
                scores = np.zeros((3, max(experts)), dtype=np.float32)
                for row, ahead in enumerate(plans[layer : layer + 3]):  # what comes next, and as much that does not
                    scores[row, ahead] = 1.5
                    scores[row, rng.randrange(experts[layer + row])] = 1.2
                pager.look_ahead(layer - 1, scores)
            else:
                wanted = plans[layer]
                prefill = pager.core.phase is Phase.PREFILL
                keep = rng.sample(wanted, len(wanted) // 3) if prefill else None
                seen = []
                tokens = [rng.randint(1, 3) for _ in wanted]
                with contextlib.suppress(TransferError), pager.demand(layer, wanted, keep, tokens=tokens) as demand:
                    for expert in lent_by(demand, layer, in_order=prefill):
                        seen.append(expert)
                        pager.check_integrity()
                        if rng.random() < 0.02:
                            break  # a request that is left half-way gives everything back
                    else:
                        assert sorted(seen) == wanted
                        assert not prefill or seen == wanted
                layer += 1
            pager.check_integrity()
            if pager.host is not None:
                pager.host.check_integrity()
                assert not pager.host._held, "something is held although nothing is computed"
    finally:
        pager.close()
    pager.check_integrity()
    assert not any(table.demanded.any() for table in pager.tables)
    return pager


@pytest.mark.budget(5)
@pytest.mark.parametrize(
    ("slabs", "order", "threads"),
    [([2], "lfu", 2), ([3], "lru", 1), ([16], "lfu", 2), ([40], "lfu", 3)],
)
def test_random_steps_keep_every_invariant(slabs, order, threads):
    steps = 25_000 if SEARCHING else 2_500
    pager = random_walk(7, steps, [8] * 6, [0] * 6, slabs, order=order, threads=threads)
    counts = pager.metrics.snapshot()
    assert counts.total("hits") + counts.total("misses") > steps
    assert counts.total("evictions") > 500
    if slabs != [2]:  # a guess always leaves a slab for a demand, so of two it rarely gets one
        assert counts.total("prefetched_bytes") > 50 * pager.core.ledger.unit_bytes
        assert counts.total("wasted_prefetch_bytes") > 0


def make_filling(store: NumberStore, slabs: list[int], **kw) -> Pager:
    pager = make_pager(store, slabs, **kw)
    pager.fill(kw["threads"])
    until(lambda: pager.metrics.snapshot().total("prefetched_bytes") > 0)  # else a busy machine could be done before
    return pager


@pytest.mark.parametrize("rest_s", [0.0, 1000.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_random_steps_keep_every_invariant_while_slabs_are_filled(monkeypatch, threads, rest_s):
    monkeypatch.setattr(pager_module, "REST_S", rest_s)
    for seed in range(20):
        random_walk(seed, 40, [8] * 6, [0] * 6, [48], make=make_filling, order="lfu", threads=threads)


@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(2, 9), st.sampled_from(["lru", "lfu"]))
@settings(max_examples=25, deadline=None)
def test_two_geometries_of_any_small_size(seed, first, second, order):
    random_walk(seed, 60, [4, 9, 4, 9], [0, 1, 0, 1], [first, second], order=order, window=2)


def test_resident_experts_come_first_in_decode_and_ids_ascend_in_prefill():
    store = GatedStore([8], {ExpertId(0, 1)})
    pager = make_pager(store, [6])
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [5, 7]) as demand:
        assert set(lent_by(demand, 0)) == {5, 7}
    with pager.demand(0, [1, 5, 7]) as demand:
        lent = iter(lent_by(demand, 0))
        assert [next(lent), next(lent)] == [5, 7]
        store.gates[ExpertId(0, 1)].set()
        assert list(lent) == [1]
    with pager.demand(0, [0, 1, 2, 3, 5, 7], keep=()) as demand:
        assert list(lent_by(demand, 0, in_order=True)) == [0, 1, 2, 3, 5, 7]
    counts = pager.metrics.snapshot()
    assert (counts.total("hits"), counts.total("misses")) == (5, 6)
    pager.close()


@pytest.mark.parametrize("in_order", [False, True])
def test_a_layer_whose_experts_are_all_resident_is_one_group_and_otherwise_slabs_are_freed_one_by_one(in_order):
    pager = make_pager(NumberStore([8], [0]), [6])
    pager.begin_step(Phase.PREFILL if in_order else Phase.DECODE)
    for _ in range(2):
        with pager.demand(0, [1, 3, 5, 7], [1, 3, 5, 7] if in_order else None) as demand:
            groups = [[lent.expert for lent in group] for group in demand.groups(in_order)]
    assert groups == [[1, 3, 5, 7]]
    with pager.demand(0, list(range(8)), [] if in_order else None) as demand:
        sizes = [len(group) for group in demand.groups(in_order)]
    assert sum(sizes) == 8 and sizes[:2] == [1, 1]
    pager.close()


@pytest.mark.parametrize(("slabs", "largest"), [(16, 1), (64, 2), (160, 4)])
def test_a_prompt_computes_at_most_a_quarter_of_the_ring_at_a_time(slabs, largest):
    """Copies go on into the other slabs; what waits for no slab is one group."""
    experts = slabs + 24
    pager = make_pager(NumberStore([experts], [0]), [slabs], threads=1)
    pager.begin_step(Phase.PREFILL)
    for keep in (list(range(slabs)), []):
        sizes = []
        with pager.demand(0, list(range(experts)), keep=keep) as demand:
            for group in demand.groups(in_order=True):
                time.sleep(0.001)  # several have arrived when the next group is asked for
                sizes.append((len(group), bool(demand.demand.absent)))
        waiting = [size for size, absent in sizes if absent]
        assert sum(size for size, _ in sizes) == experts and max(waiting) <= largest
    assert largest == 1 or max(waiting) > 1, "groups of one only"
    pager.close()


class GatedStore(NumberStore):
    """Reads of `held` experts wait for their gate; `order` says in which order reads began."""

    def __init__(self, experts: list[int], held: set[ExpertId]):
        super().__init__(experts, [0] * len(experts))
        self.order: list[ExpertId] = []
        self.gates = {expert: threading.Event() for expert in held}

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        self.order.append(expert)
        if expert in self.gates:
            assert self.gates[expert].wait(20), f"{expert} was never let through"
        return super().read(expert, record)


def until(happened: Callable[[], bool]) -> None:
    with deadline(20, "it does not happen"):
        while not happened():
            time.sleep(0.001)


def test_every_refresh_of_the_lookahead_puts_what_is_worth_most_now_in_front():
    first, old, new, demanded = ExpertId(1, 0), ExpertId(1, 5), ExpertId(2, 3), ExpertId(1, 7)
    store = GatedStore([8] * 4, {first, new})
    pager = make_pager(store, [16], threads=1)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1]) as demand:
        list(lent_by(demand, 0))

    def scores(worth: dict[ExpertId, float]) -> np.ndarray:
        table = np.zeros((3, 8), dtype=np.float32)
        for expert, score in worth.items():
            table[expert.layer - 1, expert.expert] = score
        return table

    pager.look_ahead(0, scores({first: 1.9, old: 1.5}))
    until(lambda: first in store.order)
    pager.look_ahead(0, scores({new: 1.9, old: 1.2}))  # while the only worker copies
    store.gates[first].set()
    until(lambda: len(store.order) == 3)
    assert store.order[-1] == new, "the copy begun next is what was worth most before the refresh"
    with pager.demand(1, [7]) as demand:
        assert list(lent_by(demand, 1)) == [7]  # past the guess that is under way
    store.gates[new].set()
    assert store.order[3] == demanded, "a demand waited for guesses"
    pager.close()
    pager.check_integrity()


def filled_after_one_demand(store: NumberStore, slabs: list[int], at_once: int) -> Pager:
    """A pager after one expert was demanded, and everything else that was to be copied is there."""
    pager = make_pager(store, slabs, threads=2)
    pager.fill(at_once)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1]) as demand:
        assert list(lent_by(demand, 0)) == [1]
    until(lambda: not pager.core.tickets)
    return pager


def test_as_many_slabs_are_filled_at_once_as_was_said_those_of_the_next_layers_first():
    experts = [ExpertId(layer, expert) for layer in range(3) for expert in range(4)]
    store = GatedStore([4] * 3, set(experts))
    pager = make_pager(store, [12], threads=3)
    pager.begin_step(Phase.DECODE)
    store.gates[experts[5]].set()
    with pager.demand(1, [1]) as demand:
        assert list(lent_by(demand, 1)) == [1]
    pager.fill(2)
    until(lambda: len(store.order) == 3)
    time.sleep(0.02)  # a third thread has nothing to do
    assert store.order == [experts[5], experts[8], experts[9]] and sum(t.fills for t in pager.core.tickets.values()) == 2
    for gate in store.gates.values():
        gate.set()
    until(lambda: pager.addresses() is not None)
    assert {expert.layer for expert in store.order[5:9]} == {0}, "then those before it"
    pager.close()


def test_slabs_are_not_filled_where_their_memory_gets_no_pages(monkeypatch):
    monkeypatch.setattr(SlabPool, "has_pages", property(lambda pool: False))  # its threads have found no memory free
    store = NumberStore([4, 6], [0, 0])
    pager = filled_after_one_demand(store, [10], at_once=2)
    time.sleep(0.12)
    assert store.reads == 1 and not pager.core.filling_waits
    pager.close()


@pytest.mark.parametrize("at_once", [1, 2])
def test_where_every_expert_has_a_slab_those_that_nothing_demanded_are_brought_in_too(at_once):
    pager = filled_after_one_demand(NumberStore([4, 6, 3], [0, 0, 1]), [10, 3], at_once)
    until(lambda: pager.addresses() is not None)
    first, second = pager.addresses()
    assert len(set(first.tolist())) == 10 and len(set(second.tolist())) == 3
    counts = pager.metrics.snapshot()
    assert counts.total("evictions") == counts.total("wasted_prefetch_bytes") == 0
    copied_for_the_demand = counts.total("misses") - counts.total("late")  # none if filling was there first, or under way
    assert counts.total("prefetched_bytes") + 64 * copied_for_the_demand == 13 * 64 == counts.total("bytes_read"), "64 each"
    for layer, experts in enumerate([4, 6, 3]):
        with pager.demand(layer, range(experts)) as demand:
            assert list(lent_by(demand, layer)) == list(range(experts))
    pager.core.end_request()
    after = pager.metrics.snapshot()
    assert after.total("misses") == counts.total("misses") <= 1, "it may have been there already"
    assert after.total("wasted_prefetch_bytes") == 0, "they are no guesses"
    pager.close()
    pager.check_integrity()


@pytest.mark.parametrize(("slabs", "at_once"), [([9, 3], 2), ([10, 3], 0)])
def test_pools_that_lack_one_slab_are_not_filled_nor_any_unless_asked(slabs, at_once):
    store = NumberStore([4, 6, 3], [0, 0, 1])
    pager = filled_after_one_demand(store, slabs, at_once)
    assert store.reads == 1 and pager.addresses() is None
    pager.close()


def test_filling_ends_at_the_first_failure_and_a_demand_still_gets_what_it_wants():
    store = NumberStore([8], [0])
    store.broken = {ExpertId(0, 4)}
    pager = filled_after_one_demand(store, [8], at_once=1)
    until(lambda: not pager.core.filling_at_once and not pager.core.tickets)
    store.broken = set()
    with pager.demand(0, range(8)) as demand:
        assert list(lent_by(demand, 0, in_order=True)) == list(range(8))
    pager.close()
    pager.check_integrity()


def test_filling_waits_for_memory_to_get_its_pages_and_a_demand_does_not(monkeypatch):
    lack = True
    monkeypatch.setattr(SlabPool, "gets_pages", property(lambda pool: lack))
    monkeypatch.setattr(SlabPool, "has_pages", property(lambda pool: not lack))
    store = NumberStore([4, 6], [0, 0])
    pager = filled_after_one_demand(store, [10], at_once=2)
    until(lambda: pager.core.filling_waits)
    assert store.reads == 1
    lack = False
    until(lambda: pager.addresses() is not None)  # nothing else happens that would tell its threads
    until(lambda: not pager.core.filling_waits)
    pager.close()
    pager.check_integrity()


def test_slabs_are_not_filled_while_passes_find_all_their_experts(monkeypatch):
    monkeypatch.setattr(pager_module, "REST_S", 1000.0)
    store = NumberStore([8] * 3, [0] * 3)
    pager = make_pager(store, [24], threads=2)

    def step(*wanted: int) -> None:
        pager.begin_step(Phase.DECODE)
        for layer in range(3):
            with pager.demand(layer, wanted) as demand:
                assert sorted(lent_by(demand, layer)) == sorted(wanted)

    step(1)
    step(1)
    assert not pager.tables[0].pool.rests, "the pass before missed some"
    step(1)
    assert pager.tables[0].pool.rests
    pager.fill(2)
    until(lambda: pager.core.filling_waits)
    step(1)
    time.sleep(2.5 * FILLING_S)
    assert store.reads == 3
    with pager.demand(0, [1, 2]) as demand:
        assert sorted(lent_by(demand, 0)) == [1, 2]
    assert not pager.tables[0].pool.rests
    until(lambda: pager.addresses() is not None)
    pager.close()
    pager.check_integrity()


def test_slabs_are_filled_once_no_request_computes(monkeypatch):
    monkeypatch.setattr(pager_module, "REST_S", 0.2)
    store = NumberStore([8], [0])
    pager = make_pager(store, [8], threads=2)
    for _ in range(3):
        pager.begin_step(Phase.DECODE)
        with pager.demand(0, [1]) as demand:
            assert list(lent_by(demand, 0)) == [1]
    assert pager.tables[0].pool.rests
    pager.fill(1)
    until(lambda: pager.addresses() is not None)  # nothing else happens
    pager.close()


def test_the_first_pass_does_not_let_threads_rest_though_its_first_layers_find_all():
    """What was read ahead of loading lies in the first layers, and those behind are on their way while it computes."""
    pager = make_pager(NumberStore([4] * 3, [0] * 3), [12], threads=1)
    pager.start_with({ExpertId(layer, 1): (layer, 0) for layer in range(3)})
    pool = pager.tables[0].pool
    for rests in (False, True):
        pager.begin_step(Phase.PREFILL)
        assert pool.rests == rests, "from the beginning of the next pass on"
        for layer in range(3):
            pager.without_demand([layer], lambda uses: [(None, [1])])
            assert pool.rests == rests
    pager.begin_step(Phase.DECODE)
    with pager.demand(1, [2]) as demand:
        list(lent_by(demand, 1))
    assert not pool.rests
    pager.close()


def test_only_the_missing_expert_stalls():
    slow = ExpertId(0, 2)
    store = GatedStore([8], {slow})
    pager = make_pager(store, [8], threads=1)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1, 5]) as demand:
        list(lent_by(demand, 0))
    seen = []
    with pager.demand(0, [1, 2, 3, 5]) as demand:
        until(lambda: slow in store.order)  # the worker copies it, and goes nowhere
        for expert in lent_by(demand, 0):
            seen.append(expert)
            if len(seen) == 3:
                store.gates[slow].set()
    assert seen == [1, 5, 3, 2], "residents first, then what arrives, and the late one last"
    pager.close()


def test_what_a_guess_saved_and_cost_comes_from_the_pagers_clock():
    """A used guess saved one miss, and nobody waited for it. Beside what a miss is said to cost, no measured time counts."""
    store = NumberStore([8] * 3, [0] * 3)
    pager = make_pager(store, [4], threads=1)
    told = pager.core.ledger
    told.miss_s[Phase.DECODE] = 1e6  # beside which nothing that is measured here counts
    pager.begin_step(Phase.DECODE)
    for layer in range(2):
        with pager.demand(layer, [0, 1]) as demand:
            list(lent_by(demand, layer))
    before = told.caps[Phase.DECODE].credit_bytes
    pager.begin_step(Phase.DECODE)
    told.miss_s[Phase.DECODE] = 1e6
    with pager.demand(0, [0, 1]) as demand:
        list(lent_by(demand, 0))
    scores = np.zeros((2, 8), dtype=np.float32)
    scores[0, 5] = 1.5
    pager.look_ahead(0, scores)
    until(lambda: store.reads == 5 and not pager.core.tickets)
    with pager.demand(1, [0, 5]) as demand:
        list(lent_by(demand, 1))
    pager.begin_step(Phase.DECODE)
    assert told.caps[Phase.DECODE].credit_bytes - before == pytest.approx(pager.core.ledger.unit_bytes, rel=0.01)
    pager.close()


def test_a_prefill_chunk_does_not_flush_what_decode_left():
    store = NumberStore([32, 32], [0, 0])
    pager = make_pager(store, [16])
    pager.begin_step(Phase.DECODE)
    for layer in (0, 1):
        with pager.demand(layer, list(range(8))) as demand:
            list(lent_by(demand, layer))
    pager.begin_step(Phase.PREFILL)
    for layer in (0, 1):
        with pager.demand(layer, list(range(8, 32)), keep=[31]) as demand:
            list(lent_by(demand, layer, in_order=True))
    held = pager.tables[0].slab_of >= 0
    assert held[31] and held[32 + 31], "the last token's experts enter the cache"
    assert held[:8].sum() + held[32:40].sum() >= 11, "more than a ring's worth of the cache was flushed"
    assert store.reads == 16 + 48, "each expert is read once per chunk"
    pager.close()


def test_a_prefill_chunk_with_lookahead_does_not_flush_it_either():
    store = NumberStore([32] * 4, [0] * 4)
    pager = make_pager(store, [32])
    pager.begin_step(Phase.DECODE)
    for layer in range(4):
        with pager.demand(layer, list(range(8))) as demand:
            list(lent_by(demand, layer))
    for _ in range(3):
        pager.begin_step(Phase.PREFILL)
        for layer in range(4):
            with pager.demand(layer, list(range(8, 32)), keep=[31]) as demand:
                pager.look_ahead(layer, np.ones((1, 32), dtype=np.float32))
                assert list(lent_by(demand, layer, in_order=True)) == list(range(8, 32))
            time.sleep(0.005)  # attention of the next layer: the link is idle and guesses begin
            pager.check_integrity()
    held = pager.tables[0].slab_of >= 0
    kept = sum(int(held[32 * layer : 32 * layer + 8].sum()) for layer in range(4))
    assert pager.metrics.snapshot().total("prefetched_bytes") > 0, "nothing was guessed"
    assert kept >= 32 - 4 - pager.tables[0].ring_limits[0], "more than a ring's worth and the last token's experts was flushed"
    pager.close()


@pytest.mark.parametrize(("experts", "slabs"), [([4], 2), ([6, 4], 3), ([4, 4], 2)])
def test_a_prefill_that_finds_only_its_own_layer_in_the_ring_still_ends(experts, slabs):
    """Every slab is in the ring and demanded again: the one that is computed last is given up and read again."""
    store = NumberStore(experts, [0] * len(experts))
    pager = make_pager(store, [slabs], threads=1)
    everything = list(range(2 * slabs))
    for wanted in (everything[:slabs], everything[slabs:], everything):
        pager.begin_step(Phase.PREFILL)
        with pager.demand(0, wanted, keep=[]) as demand:
            seen = list(lent_by(demand, 0, in_order=True))
        assert seen == wanted
        pager.check_integrity()
    pager.close()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_at_every_line_of_the_pager_is_repaired(phase):
    interrupt_everywhere(phase, lambda: make_pager(NumberStore([8] * 3, [0, 1, 0]), [3, 3], threads=1), 300 // EVERY, every=EVERY)


def serve_three_layers(pager: Pager, phase: Phase) -> None:
    pager.begin_step(phase)
    for layer in range(3):
        with pager.demand(layer, list(range(4)), None if phase is Phase.DECODE else [3]) as demand:
            for group in demand.groups(in_order=phase is Phase.PREFILL):
                for lent in group:
                    check(ExpertId(layer, lent.expert), lent.weights)


TOOL = 4  # of sys.monitoring, which nobody else takes
OURS = ("vismoe/paging", "vismoe/pools/host_tier.py", "vismoe/locks.py")


@functools.cache
def lines_with_with(filename: str) -> set[int]:
    """They are announced again on leaving, where CPython handles no signal before `__exit__` has run."""
    return {n for n, text in enumerate(linecache.getlines(filename), 1) if text.lstrip().startswith("with ")}


class Strike:
    """KeyboardInterrupt before the `moment`-th line or opcode of paging and host tier, where given only inside calls of functions
    named `inside`; not before lines with `with`. A context manager: of this thread.

    Opcodes are watched by sys.monitoring where there is one: from Python 3.12 on a tracer misses some.
    """

    def __init__(self, moment: int, event: str, inside: Collection[str] = ()):
        self.left, self._event, self._inside = moment, event, inside
        self._thread = threading.get_ident()
        self._monitoring = getattr(sys, "monitoring", None) if event == "opcode" else None

    def __enter__(self) -> "Strike":
        if self._monitoring:
            self._monitoring.use_tool_id(TOOL, "interrupts")
            self._monitoring.register_callback(TOOL, self._monitoring.events.INSTRUCTION, self._watch)
            self._monitor(self._monitoring.events.INSTRUCTION)
        else:
            self._before = sys.gettrace()
            sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        if self._monitoring:
            self._monitor(0)
            self._monitoring.free_tool_id(TOOL)
        else:
            sys.settrace(self._before)

    def _monitor(self, events: int) -> None:
        for code in our_codes():
            self._monitoring.set_local_events(TOOL, code, events)

    def _watch(self, code, offset) -> None:
        if threading.get_ident() == self._thread and self._is_inside(sys._getframe(1)):
            self._count()

    def _enter(self, frame, what, arg):
        if not is_ours(frame.f_code) or not self._is_inside(frame):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._strike

    def _strike(self, frame, what, arg):
        if what == self._event and (what == "opcode" or frame.f_lineno not in lines_with_with(frame.f_code.co_filename)):
            self._count()
        return self._strike

    def _is_inside(self, frame) -> bool:
        return not self._inside or any(outer.f_code.co_name in self._inside for outer in callers(frame))

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def is_ours(code: CodeType) -> bool:
    return any(part in code.co_filename for part in OURS)


@functools.cache
def our_codes() -> set[CodeType]:
    """Of all functions of paging and host tier, and of what is inside them."""
    gc.unfreeze()  # what is frozen is not among the objects
    found, new = set(), {f.__code__ for f in gc.get_objects() if type(f) is FunctionType and is_ours(f.__code__)}
    gc.freeze()
    while new:
        found |= new
        new = {const for code in new for const in code.co_consts if isinstance(const, CodeType)} - found
    return found


def callers(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def elsewhere(work: Callable[[], None]) -> None:
    """Run `work` in another thread, and wait for it."""
    with ThreadPoolExecutor(1) as other:
        other.submit(work).result()


def interrupt_everywhere(
    phase: Phase,
    make: Callable[[], Pager],
    at_least: int,
    serve: Callable[[Pager, Phase], None] = serve_three_layers,
    every: int = 1,
    event: str = "line",
    inside: Collection[str] = (),
) -> None:
    """KeyboardInterrupt before the n-th line (or opcode) of paging and host tier that the model's thread runs, for every n there
    is, or `every` so many. What is run is `serve`; after the interrupt again, first by another thread, then by this one.
    """
    interrupted = swallowed = 0
    for moment in itertools.count(every, every):
        pager = make()
        strike = Strike(moment, event, inside)
        try:
            with strike:
                serve(pager, phase)
            if strike.left > 0:
                break
            swallowed += 1  # by a finaliser
        except KeyboardInterrupt:
            interrupted += 1

        def go_on(pager: Pager = pager, moment: int = moment) -> None:
            pager.begin_step(phase)
            assert pager.host is None or not pager.host._held, f"an interrupt before {event} {moment} leaves records held"
            serve(pager, phase)
            pager.check_integrity()
            if pager.host is not None:
                pager.host.check_integrity()

        with deadline(20, f"the pager hangs after an interrupt before {event} {moment}"):
            elsewhere(go_on)
            go_on()
            pager.close()
    pager.close()
    assert interrupted > at_least and swallowed <= 2 + interrupted // 10


@contextlib.contextmanager
def deadline(seconds: float, what: str):
    def late(number, frame):
        raise AssertionError(what)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def serve_four_layers(pager: Pager, rng: random.Random) -> None:
    pager.begin_step(Phase.DECODE)
    for layer in range(4):
        with pager.demand(layer, sorted(rng.sample(range(16), 5))) as demand:
            list(lent_by(demand, layer))


def interrupt_at_random(
    pager: Pager,
    times: int,
    check_more: Callable[[], None] = lambda: None,
    serve: Callable[[Pager, random.Random], None] = serve_four_layers,
) -> int:
    """KeyboardInterrupt lands between any two bytecodes of the model's thread; the next step repairs what it broke.

    `serve` runs again and again; the default wants 4 layers of 16 experts. Returns how often the interrupt came through; the
    rest was swallowed by finalisers.
    """
    rng, interrupted = random.Random(3), 0

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 2e-3))
                end_s = time.monotonic() + 0.5  # an interrupt inside a finaliser is swallowed by Python
                while time.monotonic() < end_s:
                    serve(pager, rng)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            serve(pager, rng)
            pager.check_integrity()
            check_more()
    finally:
        signal.signal(signal.SIGALRM, before)
        pager.close()
    return interrupted


def test_ctrl_c_at_any_moment_leaves_a_pager_that_works():
    assert interrupt_at_random(make_pager(NumberStore([16] * 4, [0] * 4), [10]), times=200) > 175


def test_a_second_thread_in_the_middle_of_a_demand_is_refused_and_harms_nothing():
    store = NumberStore([8], [0])
    pager = make_pager(store, [4])
    pager.begin_step(Phase.DECODE)
    refusals = []

    def intrude():
        for call in (lambda: pager.begin_step(Phase.DECODE), lambda: pager.demand(0, [5]).__enter__()):
            try:
                call()
            except BusyError as error:
                refusals.append(error)

    with pager.demand(0, [1, 2, 3]) as demand:
        for number, _ in enumerate(lent_by(demand, 0)):
            if number == 1:
                intruder = threading.Thread(target=intrude)
                intruder.start()
                intruder.join()
    assert len(refusals) == 2
    pager.check_integrity()
    pager.close()


def test_a_failed_read_fails_the_request_and_not_the_engine():
    store = NumberStore([8], [0])
    pager = make_pager(store, [4])
    pager.begin_step(Phase.DECODE)
    store.broken.add(ExpertId(0, 3))
    with pytest.raises(TransferError, match=r"expert 3 of MoE layer 0.*input/output error"), pager.demand(0, [1, 3]) as demand:
        list(lent_by(demand, 0))
    pager.check_integrity()
    store.broken.clear()
    with pager.demand(0, [1, 3]) as demand:
        assert set(lent_by(demand, 0)) == {1, 3}
    pager.check_integrity()
    pager.close()


def test_closing_with_copies_in_flight_ends_them_and_says_so():
    store = NumberStore([64], [0])
    gate = threading.Event()
    read = store.read
    store.read = lambda expert, record: (gate.wait(), read(expert, record))[1]
    pager = make_pager(store, [64])
    pager.begin_step(Phase.DECODE)
    failures = []

    def serve():
        try:
            with pager.demand(0, list(range(64))) as demand:
                list(lent_by(demand, 0))
        except ClosedError as error:
            failures.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    closing = threading.Thread(target=pager.close)
    closing.start()
    while not pager.core.closed:
        time.sleep(0.001)
    gate.set()
    closing.join(10)
    serving.join(10)
    assert not closing.is_alive() and not serving.is_alive() and failures
    pager.check_integrity()
    with pytest.raises(ClosedError):
        pager.begin_step(Phase.DECODE)


def test_a_demand_keeps_nothing_of_its_caller_alive():
    """Its caller holds a layer's tensors, which must not wait for the garbage collector."""

    class Tensors:
        pass

    def serve() -> weakref.ref[Tensors]:
        tensors = Tensors()
        with pager.demand(0, [0, 1]) as demand:
            assert sorted(lent_by(demand, 0)) == [0, 1]
        return weakref.ref(tensors)

    pager = make_pager(NumberStore([4], [0]), [2])
    gc.disable()
    try:
        assert serve()() is None
    finally:
        gc.enable()
        pager.close()
