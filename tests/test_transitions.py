"""The mechanism of two formats against its invariants: who is computed in which format, who waits, and where everybody ends up.

Random demands, guesses, promotions and demotions over small pools, with reads that fail, demands that are left early and Ctrl-C;
the books are checked after every step, and each record that is lent says which expert it is, and in which format.
With HYPOTHESIS_PROFILE=searching there are ten times as many steps.
"""

import contextlib
import random
import threading
import time
from collections.abc import Collection, Iterator
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import SEARCHING
from test_below import FAST_LINK, CopyMover
from test_pager import EVERY, interrupt_at_random, interrupt_everywhere

from vismoe.errors import ClosedError, TransferError
from vismoe.metrics import Snapshot
from vismoe.paging.miss import Rates, Upgrades, Ways
from vismoe.paging.page_table import READY
from vismoe.paging.pager import Lease, Pager
from vismoe.paging.transfer import DiskMover
from vismoe.pair import Format, FormatPair
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.precision.policy import Policy
from vismoe.types import HIGH, LOW, ExpertId, ExpertInventory, MoELayer, Phase, RecordLayout

MORE = 10 if SEARCHING else 1
NUMBERS = ((6, 4), (8, 5))  # in a record, by geometry and format
FREE_OF_CHARGE = Rates(link_bytes_per_s=1e18, cpu_bytes_per_s=1.0)  # whatever is copied is there before anything is computed
NEVER_IN_TIME = Rates(link_bytes_per_s=1e-6, cpu_bytes_per_s=1e18)


class Failing:
    """Which reads fail: of `broken` (expert, format)."""

    def __init__(self) -> None:
        self.broken: set[tuple[ExpertId, int]] = set()

    def change(self, broken: set[tuple[ExpertId, int]]) -> None:
        self.broken = broken

    def may_fail(self, expert: ExpertId, precision: int) -> bool:
        return (expert, precision) in self.broken


class FormatStore:
    """The experts in one format. A record says which expert it is, and in which format, from its first to its last number."""

    scratch_bytes = 0
    fingerprint = "numbers"

    def __init__(self, inventory: ExpertInventory, precision: int, failing: Failing):
        self.inventory, self._precision, self._failing = inventory, precision, failing
        self.reads = self.failures = 0
        self.most_s = 0.0  # that a read may take longer
        self.gate: threading.Event | None = None  # reads wait for it

    def reading(self, expert: ExpertId, address: int) -> None:
        return None

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        self.reads += 1
        numbers = record.view(torch.int64)
        numbers.fill_(-1)
        if self.gate is not None:
            assert self.gate.wait(20), f"{expert} was never let through"
        if self.most_s:
            time.sleep(random.uniform(0, self.most_s))
        if (expert, self._precision) in self._failing.broken:
            self.failures += 1
            raise OSError(5, "input/output error")
        numbers[:3] = torch.tensor([*expert, self._precision])
        numbers[3:] = expert.expert
        return record.numel()

    def close(self) -> None: ...


class Bench:
    """A pager over experts of two formats, and what can be said of it from outside.

    slabs: (high, low) of each geometry. below: how misses are served from two tiers of host memory of `host_records` each, "cpu"
    or "auto"; None: there are none.
    """

    def __init__(
        self,
        experts: list[int],
        geometries: list[int],
        slabs: list[tuple[int, int]],
        *,
        hotness: bool = False,
        importance: bool = False,
        rates: Rates = NEVER_IN_TIME,
        deterministic: bool = False,
        below: Literal["cpu", "auto"] | None = None,
        host_records: int = 0,
        **kw,
    ):
        layouts = [
            tuple(RecordLayout.of({"w": (NUMBERS[g][p],)}, {"w": torch.int64}) for g in range(len(slabs))) for p in (HIGH, LOW)
        ]
        layers = tuple(MoELayer(i, f"layers.{i}", e, 2, g) for i, (e, g) in enumerate(zip(experts, geometries, strict=True)))
        self.experts, self.slabs = experts, slabs
        self.inventory = ExpertInventory(layers, layouts[HIGH], low_layouts=layouts[LOW])
        self.failing = Failing()
        self.stores = tuple(FormatStore(self.inventory, precision, self.failing) for precision in (HIGH, LOW))
        self.pools = tuple(
            tuple(SlabPool(layouts[p][g], n) for p, n in zip((HIGH, LOW), both, strict=True)) for g, both in enumerate(slabs)
        )
        policy = Policy(FormatPair(Format.INT4, Format.INT2), hotness, importance)
        upgrades = Upgrades(policy, (rates,) * len(slabs), deterministic)
        self.hosts = [
            HostTier(store, (host_records,) * len(slabs), False, of_format) for store, of_format in zip(self.stores, layouts)
        ]
        mover = CopyMover(*self.hosts) if below else DiskMover(*self.stores)
        ways = Ways(below, (FAST_LINK,) * len(slabs)) if below else None
        self.pager = Pager(self.inventory, self.pools, mover, upgrades=upgrades, deterministic=deterministic, ways=ways, **kw)
        self._addresses = [table.pool.addresses.copy() for table in self.pager.tables]
        self._memory = [pool.buffer.data_ptr() for pools in self.pools for pool in pools]

    @property
    def everybody(self) -> list[ExpertId]:
        return [ExpertId(layer, expert) for layer, n in enumerate(self.experts) for expert in range(n)]

    def mask(self, experts: Collection[ExpertId]) -> np.ndarray:
        """bool `[L, E]`, True for `experts`."""
        high = np.zeros((len(self.experts), max(self.experts)), dtype=bool)
        for expert in experts:
            high[expert] = True
        return high

    def formats(self) -> dict[ExpertId, int | None]:
        """The resident format of every expert; None: absent."""
        found = {}
        with self.pager.lock:
            for layer in range(len(self.experts)):
                for expert, code in enumerate(self.pager.core.table_of[layer].precisions(layer).tolist()):
                    found[ExpertId(layer, expert)] = None if code == 0 else code - 1
        assert len(found) == len(self.everybody)
        return found

    def in_high(self) -> set[ExpertId]:
        return {expert for expert, precision in self.formats().items() if precision == HIGH}

    def lent_by(self, demand: Lease, layer: int, in_order: bool = False) -> Iterator[tuple[int, int]]:
        """(expert, its format) one by one: the right record at the right address, as long as it is lent."""
        for group in demand.groups(in_order):
            assert group and (self.pager.ways is not None or not group.on_host)
            assert not group.on_host or len(set(group.precisions.tolist())) == 1, "a group is in one format"
            there = []
            for lent, address, precision in zip(group, group.addresses.tolist(), group.precisions.tolist()):
                assert lent.weights["w"].data_ptr() == address and lent.precision == precision
                there.append((lent.expert, precision, lent.weights["w"]))
            for expert, precision, _ in there:
                yield expert, precision
            for expert, precision, numbers in there:
                expected = [layer, expert, precision] + [expert] * (len(numbers) - 3)
                assert numbers.tolist() == expected, "a slab was lent that holds, or came to hold, something else"

    def serve(self, layer: int, wanted: list[int], high: np.ndarray | None = None, **kw) -> dict[int, int]:
        """A demand from its beginning to its end: the format in which each expert was lent."""
        with self.pager.demand(layer, wanted, high=high, **kw) as demand:
            lent = dict(self.lent_by(demand, layer, in_order=self.pager.core.phase is Phase.PREFILL))
        assert sorted(lent) == wanted
        return lent

    def check(self, between_demands: bool = True) -> None:
        """The books; between two demands, nothing is protected, and no finished copy waits for anybody."""
        pager = self.pager
        pager.check_integrity()
        assert pager.core.closed or all(thread.is_alive() for thread in pager.transfer._threads), "a worker has died"
        for table, addresses in zip(pager.tables, self._addresses, strict=True):
            assert (table.pool.addresses == addresses).all(), "a slab has moved"
        assert [pool.buffer.data_ptr() for pools in self.pools for pool in pools] == self._memory
        for host in self.hosts:
            host.check_integrity()
            assert not (between_demands and host._held), "something is held although nothing is computed"
        if between_demands:
            with pager.lock:
                for table in pager.tables:
                    assert not table.demanded.any(), "protected although nothing is demanded"
                    assert not (table.state == READY).any(), "complete, and neither registered nor given back"

    def rest(self) -> None:
        """Wait until nothing is under way."""
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            with self.pager.lock:
                if not self.pager.core.tickets and not self.pager.core.queue:
                    return
            time.sleep(0.0005)
        raise AssertionError("copies do not end")

    @contextlib.contextmanager
    def running(self) -> Iterator["Bench"]:
        try:
            yield self
        finally:
            self.pager.close()
        self.check()


# -- importance: misses, and who wants more than is there waits
def walk(seed: int, steps: int, bench: Bench) -> Bench:
    """Random demands with random wishes, guesses, failing reads and loops left early, by importance: who wants HIGH gets it."""
    rng, pager, experts = random.Random(seed), bench.pager, bench.experts
    layers = len(experts)

    def plan() -> tuple[list[list[int]], np.ndarray]:
        wanted = [sorted(rng.sample(range(n), rng.randint(1, min(n, 6)))) for n in experts]
        share = rng.choice([0.0, 0.3, 0.7, 1.0])
        return wanted, np.array([[rng.random() < share for _ in range(max(experts))] for _ in experts])

    with bench.running():
        layer = layers
        for _ in range(steps):
            if layer >= layers:
                pager.begin_step(rng.choice([Phase.PREFILL, Phase.DECODE]), new_sequence=rng.random() < 0.1)
                plans, high = plan()
                layer = 0
                some = {(rng.choice(bench.everybody), rng.choice([HIGH, LOW])) for _ in range(2)}
                bench.failing.change(some if rng.random() < 0.05 else set())
            if rng.random() < 0.3:
                scores = np.zeros((3, max(experts)), dtype=np.float32)
                for row, ahead in enumerate(plans[layer : layer + 3]):  # what comes next, and as much that does not
                    scores[row, ahead] = 1.5
                    scores[row, rng.randrange(experts[layer + row])] = 1.2
                wishes = np.zeros_like(scores, dtype=bool)
                wishes[: len(high[layer : layer + 3])] = high[layer : layer + 3]
                pager.look_ahead(layer - 1, scores, wishes)
                if rng.random() < 0.3:
                    time.sleep(1e-4)  # so that the guesses begin
            else:
                prefill = pager.core.phase is Phase.PREFILL
                keep = rng.sample(plans[layer], len(plans[layer]) // 3) if prefill else None
                tokens = [rng.randint(1, 3) for _ in plans[layer]]
                seen = {}
                with (
                    contextlib.suppress(TransferError),
                    pager.demand(layer, plans[layer], keep, tokens=tokens, high=high[layer]) as demand,
                ):
                    for expert, precision in bench.lent_by(demand, layer, in_order=prefill):
                        seen[expert] = precision
                        if high[layer, expert] and precision == LOW:
                            assert bench.failing.may_fail(ExpertId(layer, expert), HIGH), "computed in LOW, wanted in HIGH"
                        bench.check(between_demands=False)
                        if rng.random() < 0.02:
                            break
                    else:
                        assert sorted(seen) == plans[layer] and (not prefill or list(seen) == plans[layer])
                layer += 1
            bench.check()
    return bench


@pytest.mark.budget(3)
@pytest.mark.parametrize(
    ("slabs", "order", "threads"),
    [((2, 2), "lfu", 2), ((3, 2), "lru", 1), ((2, 5), "lfu", 2), ((9, 7), "lfu", 1), ((20, 24), "lfu", 3)],
)
def test_importance_computes_everybody_in_the_format_it_wants(slabs, order, threads):
    steps = 1000 * MORE
    bench = walk(11, steps, Bench([8] * 6, [0] * 6, [slabs], importance=True, order=order, threads=threads))
    counts = bench.pager.metrics.snapshot()
    assert counts.total("hits") + counts.total("misses") > steps
    assert counts.total("evictions") > 100
    assert counts.total("served_lower") <= bench.stores[HIGH].failures, "what was not there was taken as it is"
    assert counts.total("promotions") + counts.total("demotions") == 0, "nothing moves unasked"


@pytest.mark.budget(8)
@pytest.mark.parametrize("below", ["cpu", "auto"])
@pytest.mark.parametrize(("slabs", "host_records"), [((2, 2), 3), ((3, 5), 12), ((9, 7), 48)])
def test_importance_computes_misses_below_in_the_format_it_wants(slabs, host_records, below):
    steps = (2500 if host_records == 3 else 1000) * MORE  # three records are seldom there when asked for
    bench = walk(12, steps, Bench([8] * 6, [0] * 6, [slabs], importance=True, below=below, host_records=host_records, threads=2))
    counts = bench.pager.metrics.snapshot()
    least = host_records if below == "cpu" else -1  # auto computes where a copy would be late, which is up to the machine
    assert least < counts.total("computed_on_host") < counts.total("misses")
    sizes = [pool.layout.record_bytes for pool in bench.pools[0]]
    assert counts.total("bytes_computed_on_host") <= counts.total("computed_on_host") * max(sizes)
    assert counts.total("served_lower") <= bench.stores[HIGH].failures, "what was not there was taken as it is"


def test_one_group_from_below_is_in_one_format_and_what_is_there_in_less_is_waited_for():
    bench = Bench([6], [0], [(4, 2)], importance=True, below="cpu", host_records=6, threads=1)
    with bench.running():
        bench.pager.begin_step(Phase.DECODE)
        assert bench.serve(0, [5], np.zeros(6, dtype=bool)) == {5: LOW}, "nothing is in host memory yet, so it is copied"
        for host in bench.hosts:
            for expert in range(6):
                with host.lease(ExpertId(0, expert)):
                    pass
        bench.pager.begin_step(Phase.DECODE)
        wishes = np.array([True, False, True, False, True, False])
        with bench.pager.demand(0, [0, 1, 2, 3], high=wishes) as demand:
            groups = [(group.on_host, group.experts, group.precisions.tolist()) for group in demand.groups(in_order=False)]
        assert groups == [(True, [0, 2], [HIGH, HIGH]), (True, [1, 3], [LOW, LOW])]
        counts = bench.pager.metrics.snapshot()
        assert (counts.total("computed_high"), counts.total("computed_low"), counts.total("computed_on_host")) == (2, 3, 4)
        record_bytes = [pool.layout.record_bytes for pool in bench.pools[0]]
        assert counts.total("bytes_computed_on_host") == 2 * sum(record_bytes)
        with bench.pager.demand(0, [5], high=np.ones(6, dtype=bool)) as demand:
            assert [(group.on_host, group.precisions.tolist()) for group in demand.groups(in_order=False)] == [(False, [HIGH])]


@given(st.integers(0, 10**6), st.lists(st.integers(2, 6), min_size=4, max_size=4), st.sampled_from(["lru", "lfu"]))
@settings(max_examples=25, deadline=None)
def test_importance_over_two_geometries_of_any_small_size(seed, sizes, order):
    slabs = [(sizes[0], sizes[1]), (sizes[2], sizes[3])]
    walk(seed, 40, Bench([4, 9, 4, 9], [0, 1, 0, 1], slabs, importance=True, order=order, window=2))


# -- hotness: everybody is there in one format or the other, and nobody waits
def hot_bench(experts: list[int], geometries: list[int], quotas: list[int], transient: int, **kw) -> Bench:
    """Every expert has a slab in the format it belongs in at first; `transient` more in HIGH. quotas: of each geometry."""
    totals = [sum(n for n, g in zip(experts, geometries, strict=True) if g == geometry) for geometry in range(len(quotas))]
    slabs = [(quota + transient, total - quota) for quota, total in zip(quotas, totals, strict=True)]
    return Bench(experts, geometries, slabs, hotness=True, **kw)


def some_targets(rng: random.Random, bench: Bench, quotas: list[int], full: bool = True) -> set[ExpertId]:
    """As many of each geometry as its quota says, or fewer."""
    chosen: set[ExpertId] = set()
    for geometry, quota in enumerate(quotas):
        its = [e for e in bench.everybody if bench.inventory.layers[e.layer].geometry == geometry]
        chosen |= set(rng.sample(its, quota if full else rng.randint(0, quota)))
    return chosen


def storm(rng: random.Random, bench: Bench, targets: set[ExpertId]) -> None:
    """Retarget: those who move in any order, some of them named twice, in the wrong list, or although they stay."""
    promote = [e for e in bench.everybody if e in targets]
    demote = [e for e in bench.everybody if e not in targets]
    named = [rng.sample(some, rng.randint(0, len(some))) for some in (promote, demote)]
    wrong = [rng.choices(bench.everybody, k=rng.randint(0, 2)) for _ in named]
    bench.pager.retarget(bench.mask(targets), named[0] + wrong[0], named[1] + wrong[1] + named[1][:1])


def serve_random(rng: random.Random, bench: Bench, targets: set[ExpertId], steps: int) -> None:
    """Forward passes in which nobody may wait: each expert is lent at once, all of a layer in one group."""
    pager = bench.pager
    for _ in range(steps):
        pager.begin_step(rng.choice([Phase.PREFILL, Phase.DECODE]))
        for layer, n in enumerate(bench.experts):
            wanted = sorted(rng.sample(range(n), rng.randint(1, n)))
            in_order = pager.core.phase is Phase.PREFILL
            with pager.demand(layer, wanted, [] if in_order else None, high=bench.mask(targets)[layer]) as demand:
                assert demand.demand.all_slabs is not None, "somebody is waited for"
                left = rng.randrange(2 * len(wanted))
                for count, _ in enumerate(bench.lent_by(demand, layer, in_order)):
                    if count == left:
                        break
                    if rng.random() < 0.1:
                        bench.check(between_demands=False)
            bench.check()
            assert None not in bench.formats().values(), "an expert is gone"


def nobody_waited(bench: Bench, since: Snapshot) -> None:
    counts = bench.pager.metrics.snapshot() - since
    assert counts.total("misses") == counts.total("stall_seconds") == counts.total("evictions") == 0
    assert counts.total("hits") > 0


def arrives(bench: Bench, happened) -> None:
    end_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end_s, "experts do not get where they belong"
        time.sleep(0.0005)


HOT = pytest.mark.parametrize(
    ("experts", "geometries", "quotas", "transient", "threads"),
    [
        ([6] * 4, [0] * 4, [5], 1, 1),
        ([6] * 4, [0] * 4, [12], 2, 3),
        ([4, 9, 4, 9], [0, 1, 0, 1], [3, 6], 2, 2),
        ([3, 3], [0, 1], [1, 3], 1, 2),
    ],
)


@HOT
@pytest.mark.parametrize("full", [True, False])
def test_hotness_storms_keep_everybody_there_and_end_where_everybody_belongs(
    experts, geometries, quotas, transient, threads, full
):
    """With fewer targets than there is room for, others may stay in HIGH as well."""
    rng = random.Random(5)
    bench = hot_bench(experts, geometries, quotas, transient, threads=threads)

    def arrived() -> bool:
        return bench.in_high() == targets if full else bench.in_high() >= targets

    with bench.running():
        targets = some_targets(rng, bench, quotas, full)
        assert sorted(bench.pager.bring_in_all(bench.mask(targets))) == bench.everybody
        assert arrived()
        reads, since = [store.reads for store in bench.stores], bench.pager.metrics.snapshot()
        for _ in range(60 * MORE):
            for store in bench.stores:
                store.most_s = rng.choice([0.0, 0.0005])
            for _ in range(rng.randint(1, 4)):
                targets = some_targets(rng, bench, quotas, full)
                storm(rng, bench, targets)
                serve_random(rng, bench, targets, rng.randint(0, 3))
            if rng.random() < 0.5:
                arrives(bench, arrived)
        arrives(bench, arrived)
        bench.rest()
        nobody_waited(bench, since)
        counts = bench.pager.metrics.snapshot()
        moved = [store.reads - before for store, before in zip(bench.stores, reads, strict=True)]
    assert counts.total("promotions") > 5 and counts.total("demotions") > 5 and counts.total("failed_transitions") == 0
    assert moved[LOW] == counts.total("demotions")
    assert moved[HIGH] == counts.total("promotions")


@HOT
def test_a_move_that_fails_changes_nothing_and_is_tried_again_with_the_next_targets(
    experts, geometries, quotas, transient, threads
):
    rng = random.Random(6)
    bench = hot_bench(experts, geometries, quotas, transient, threads=threads)
    with bench.running():
        targets = some_targets(rng, bench, quotas)
        list(bench.pager.bring_in_all(bench.mask(targets)))
        since = bench.pager.metrics.snapshot()
        for _ in range(40 * MORE):
            bench.failing.change({(rng.choice(bench.everybody), rng.choice([HIGH, LOW])) for _ in range(rng.randint(1, 4))})
            for _ in range(rng.randint(1, 4)):
                targets = some_targets(rng, bench, quotas)
                storm(rng, bench, targets)
                serve_random(rng, bench, targets, rng.randint(0, 3))
            if rng.random() < 0.5:
                bench.rest()
                bench.failing.change(set())
                bench.pager.retarget(bench.mask(targets))
                arrives(bench, lambda: bench.in_high() == targets)  # noqa: B023
        bench.rest()
        nobody_waited(bench, since)
        failed = sum(store.failures for store in bench.stores)
        assert bench.pager.metrics.snapshot().total("failed_transitions") == failed > 3
        bench.failing.change(set())
        bench.pager.retarget(bench.mask(targets))
        arrives(bench, lambda: bench.in_high() == targets)


@HOT
@pytest.mark.parametrize("fails", [False, True])
def test_settled_deterministically_the_same_calls_give_the_same_formats(experts, geometries, quotas, transient, threads, fails):
    def formats_of(threads: int) -> list[dict[ExpertId, int | None]]:
        rng, found = random.Random(7), []
        bench = hot_bench(experts, geometries, quotas, transient, threads=threads, deterministic=True)
        with bench.running():
            targets = some_targets(rng, bench, quotas)
            list(bench.pager.bring_in_all(bench.mask(targets)))
            for _ in range(12 * MORE):
                if fails:
                    bench.failing.change({(rng.choice(bench.everybody), rng.choice([HIGH, LOW])) for _ in range(2)})
                targets = some_targets(rng, bench, quotas, full=rng.random() < 0.5)
                storm(rng, bench, targets)
                before = bench.formats()
                serve_random(rng, bench, targets, 1)
                assert bench.formats() == before, "somebody moved unasked"
                bench.pager.settle()
                found.append(bench.formats())
                assert fails or bench.in_high() >= targets
        return found

    assert formats_of(1) == formats_of(threads) == formats_of(4)


# -- hotness and importance: what a request wants in HIGH is borrowed for a layer, where waiting for it is free
@pytest.mark.parametrize("rates", [FREE_OF_CHARGE, NEVER_IN_TIME])
@pytest.mark.parametrize(
    ("experts", "geometries", "quotas", "transient", "threads"),
    [([6] * 4, [0] * 4, [5], 1, 1), ([6] * 4, [0] * 4, [12], 3, 3), ([4, 9, 4, 9], [0, 1, 0, 1], [3, 6], 4, 2)],
)
def test_what_is_borrowed_is_given_back_and_moves_nobody(experts, geometries, quotas, transient, threads, rates):
    rng = random.Random(8)
    bench = hot_bench(experts, geometries, quotas, transient, threads=threads, importance=True, rates=rates)
    pager, lower = bench.pager, 0
    with bench.running():
        targets = some_targets(rng, bench, quotas)
        list(pager.bring_in_all(bench.mask(targets)))
        since = pager.metrics.snapshot()
        for step in range(60 * MORE):
            for store in bench.stores:
                store.most_s = rng.choice([0.0, 0.0, 0.0005])
            some = {(rng.choice(bench.everybody), HIGH) for _ in range(3)}
            bench.failing.change(some if rng.random() < 0.2 else set())
            if rng.random() < 0.3:
                targets = some_targets(rng, bench, quotas)
                storm(rng, bench, targets)
            pager.begin_step(rng.choice([Phase.PREFILL, Phase.DECODE]))
            for layer, n in enumerate(experts):
                wanted = sorted(rng.sample(range(n), rng.randint(1, n)))
                high = bench.mask(targets | set(rng.sample(bench.everybody, 6)))[layer]
                in_order, leaves = pager.core.phase is Phase.PREFILL, rng.random() < 0.1
                with pager.demand(layer, wanted, [] if in_order else None, high=high) as demand:
                    for count, (expert, precision) in enumerate(bench.lent_by(demand, layer, in_order)):
                        lower += bool(high[expert]) and precision == LOW
                        bench.check(between_demands=False)
                        if leaves and count == 1:
                            break
                bench.check()
                assert None not in bench.formats().values(), "an expert is gone"
            if step % 10 == 0:
                bench.rest()  # a copy that is under way and fails later would not be tried again
                bench.failing.change(set())
                pager.retarget(bench.mask(targets))
                arrives(bench, lambda: bench.in_high() == targets)  # noqa: B023
                bench.rest()
                for table, transient_too in zip(pager.tables, bench.slabs, strict=True):
                    assert table.pool.free_of(HIGH) == transient and table.pool.free_of(LOW) == 0, transient_too
        counts = pager.metrics.snapshot() - since
    assert counts.total("misses") == counts.total("evictions") == 0
    assert lower <= counts.total("served_lower") and counts.total("promotions") > 5
    borrowed = bench.stores[HIGH].reads - counts.total("promotions") - counts.total("failed_transitions") - sum(quotas)
    if rates is NEVER_IN_TIME:
        assert counts.total("stall_seconds") == 0
        assert lower > 50, "the sooner the targets are reached the fewer; about 110 where they are reached at once"
    else:
        assert borrowed > 5


# -- small cases
LAYER_LOW = [ExpertId(0, expert) for expert in range(4)]


def gated(bench: Bench, precision: int) -> threading.Event:
    """Reads of one format wait from now on."""
    bench.stores[precision].gate = gate = threading.Event()
    return gate


def until_reading(bench: Bench, precision: int, reads: int) -> None:
    arrives(bench, lambda: bench.stores[precision].reads == reads)


def importance_bench(**kw) -> Bench:
    """Two layers; 0, 1 of the first in HIGH and 2, 3 in LOW, the second like it."""
    bench = Bench([4, 4], [0, 0], [(4, 4)], importance=True, threads=1, **kw)
    bench.pager.begin_step(Phase.DECODE)
    for layer in (0, 1):
        assert bench.serve(layer, [0, 1, 2, 3], np.array([True, True, False, False])) == {0: HIGH, 1: HIGH, 2: LOW, 3: LOW}
    return bench


def combined_bench(rates: Rates = FREE_OF_CHARGE, **kw) -> Bench:
    """One layer of four; 0 and 1 belong in HIGH, and two slabs of HIGH are transient."""
    bench = hot_bench([4], [0], [2], 2, importance=True, rates=rates, threads=1, **kw)
    list(bench.pager.bring_in_all(bench.mask(LAYER_LOW[:2])))
    bench.pager.begin_step(Phase.DECODE)
    return bench


EVERYBODY, NOBODY = np.ones(4, dtype=bool), np.zeros(4, dtype=bool)


@pytest.mark.parametrize("high", [EVERYBODY, None])
def test_whoever_wants_more_than_is_there_waits_and_whoever_wants_less_does_not(high):
    bench = importance_bench()
    with bench.running():
        since = bench.pager.metrics.snapshot()
        assert bench.serve(0, [0, 1], NOBODY) == {0: HIGH, 1: HIGH}, "there in more precision than was wanted"
        counts = bench.pager.metrics.snapshot() - since
        assert (counts.total("hits"), counts.total("misses")) == (2, 0)
        assert bench.serve(0, [1, 3], high) == {1: HIGH, 3: HIGH}
        counts = bench.pager.metrics.snapshot() - since
        assert (counts.total("hits"), counts.total("misses"), counts.total("served_lower")) == (3, 1, 0)
        assert (counts.total("computed_high"), counts.total("computed_low")) == (4, 0)
        assert bench.formats()[ExpertId(0, 3)] == HIGH, "and is not there twice"


def test_an_upgrade_that_fails_leaves_the_copy_that_is_there():
    bench = importance_bench()
    with bench.running():
        bench.failing.change({(ExpertId(0, 3), HIGH)})
        assert bench.serve(0, [1, 2, 3], EVERYBODY) == {1: HIGH, 2: HIGH, 3: LOW}
        assert bench.pager.metrics.snapshot().total("served_lower") == 1
        bench.failing.change(set())
        assert bench.serve(0, [1, 2, 3], EVERYBODY) == {1: HIGH, 2: HIGH, 3: HIGH}


def guess(bench: Bench, expert: int) -> None:
    """The lookahead of the first layer says that the second will want this expert in HIGH."""
    scores = np.zeros((1, 4), dtype=np.float32)
    scores[0, expert] = 1.5
    bench.pager.look_ahead(0, scores, scores > 0)


def test_a_guess_that_is_under_way_when_it_is_wanted_is_waited_for_and_used():
    bench = importance_bench()
    with bench.running():
        bench.pager.begin_step(Phase.DECODE)
        bench.serve(0, [0], EVERYBODY)
        reads, gate = bench.stores[HIGH].reads, gated(bench, HIGH)
        guess(bench, 3)
        until_reading(bench, HIGH, reads + 1)
        with bench.pager.demand(1, [0, 3], high=EVERYBODY) as demand:
            lent = bench.lent_by(demand, 1)
            assert next(lent) == (0, HIGH)
            gate.set()
            bench.rest()
            guess(bench, 2)  # whom the one that has come must not leave for
            bench.rest()
            assert list(lent) == [(3, HIGH)]
        counts = bench.pager.metrics.snapshot()
        assert counts.total("late") == 1 and bench.stores[HIGH].reads == reads + 1
        bench.pager.end_request()
        assert bench.pager.metrics.snapshot().total("wasted_prefetch_bytes") == 0


def test_a_guess_that_fails_is_asked_for_properly():
    bench = importance_bench()
    with bench.running():
        bench.pager.begin_step(Phase.DECODE)
        bench.serve(0, [0], EVERYBODY)
        reads, gate = bench.stores[HIGH].reads, gated(bench, HIGH)
        bench.failing.change({(ExpertId(1, 3), HIGH)})
        guess(bench, 3)
        until_reading(bench, HIGH, reads + 1)
        with bench.pager.demand(1, [0, 3], high=EVERYBODY) as demand:
            lent = bench.lent_by(demand, 1)
            assert next(lent) == (0, HIGH)
            gate.set()
            bench.rest()
            bench.failing.change(set())
            assert list(lent) == [(3, HIGH)]


def test_a_demand_left_early_protects_neither_the_old_copy_nor_the_new_one():
    bench = importance_bench()
    with bench.running():
        reads, gate = bench.stores[HIGH].reads, gated(bench, HIGH)
        with bench.pager.demand(0, [0, 3], high=EVERYBODY) as demand:
            assert next(bench.lent_by(demand, 0)) == (0, HIGH)
            until_reading(bench, HIGH, reads + 1)
        bench.check()
        gate.set()
        bench.rest()
        bench.check()
        assert bench.formats()[ExpertId(0, 3)] == HIGH, "what had been asked for is an ordinary resident"


def retarget_meanwhile(bench: Bench, targets: set[ExpertId]) -> None:
    """As if a copy of what was asked for before the demand had taken its time."""
    with bench.pager.lock:
        bench.pager.core.transitions.retarget(bench.mask(targets), (), ())
        bench.pager.transfer.wake()


def test_the_old_copy_is_computed_to_the_end_and_then_leaves_its_slab_to_who_waits_for_it():
    bench = hot_bench([4], [0], [1], 1, threads=1)
    with bench.running():
        list(bench.pager.bring_in_all(bench.mask({ExpertId(0, 0)})))
        bench.pager.begin_step(Phase.DECODE)
        with bench.pager.demand(0, [3], high=NOBODY) as demand:
            lent = bench.lent_by(demand, 0)
            assert next(lent) == (3, LOW)
            demoted = bench.stores[LOW].reads
            retarget_meanwhile(bench, {ExpertId(0, 3)})
            until_reading(bench, HIGH, 2)
            bench.rest()
            assert bench.formats()[ExpertId(0, 3)] == LOW and bench.stores[LOW].reads == demoted
            assert list(lent) == []
        arrives(bench, lambda: bench.in_high() == {ExpertId(0, 3)})


def test_a_change_of_mind_while_a_copy_is_under_way_is_carried_out_behind_it():
    bench = hot_bench([4], [0], [1], 1, threads=1)
    first, other = ExpertId(0, 0), ExpertId(0, 3)
    with bench.running():
        list(bench.pager.bring_in_all(bench.mask({first})))
        gate = gated(bench, HIGH)
        bench.pager.retarget(bench.mask({other}), [other], [first])
        until_reading(bench, HIGH, 2)
        bench.pager.retarget(bench.mask({first}))
        gate.set()
        arrives(bench, lambda: not bench.pager.core.tickets and bench.in_high() == {first})
        assert bench.pager.metrics.snapshot().total("promotions") == bench.pager.metrics.snapshot().total("demotions") == 1


def test_who_is_named_first_moves_first_whatever_another_geometry_waits_for():
    bench = hot_bench([6, 6], [0, 1], [3, 3], 1, threads=2)
    with bench.running():
        before = [ExpertId(layer, expert) for layer in (0, 1) for expert in (0, 1, 2)]
        list(bench.pager.bring_in_all(bench.mask(before)))
        moved: list[ExpertId] = []
        reads, gate, read = bench.stores[HIGH].reads, gated(bench, HIGH), bench.stores[HIGH].read
        bench.stores[HIGH].read = lambda expert, record: (moved.append(expert), read(expert, record))[1]
        promote = [ExpertId(*some) for some in ((0, 4), (0, 3), (1, 5), (0, 5), (1, 3), (1, 4))]
        bench.pager.retarget(bench.mask(promote), promote, before)
        until_reading(bench, HIGH, reads + 2)  # one of each geometry, whose only slab to spare that takes
        gate.set()
        arrives(bench, lambda: bench.in_high() == set(promote))
        for layer in (0, 1):
            assert [e for e in moved if e.layer == layer] == [e for e in promote if e.layer == layer]


def test_a_borrowed_copy_serves_one_layer_and_leaves_residency_alone():
    bench = combined_bench()
    with bench.running():
        for times in (1, 2):
            assert bench.serve(0, [0, 1, 2, 3], EVERYBODY) == dict.fromkeys(range(4), HIGH)
            assert bench.in_high() == set(LAYER_LOW[:2]) and bench.pager.tables[0].pool.free_of(HIGH) == 2
            assert bench.stores[HIGH].reads == 2 + 2 * times
        assert bench.serve(0, [2, 3], EVERYBODY) == {2: LOW, 3: LOW}, "with nothing else to compute, waiting is not free"
        counts = bench.pager.metrics.snapshot()
        assert counts.total("misses") == counts.total("promotions") == 0 and counts.total("served_lower") == 2


def test_who_waits_for_a_slab_that_is_borrowed_moves_when_it_is_given_back():
    bench = combined_bench()
    with bench.running():
        with bench.pager.demand(0, [0, 1, 2, 3], high=EVERYBODY) as demand:
            for number, _ in enumerate(bench.lent_by(demand, 0)):
                if number == 0:
                    bench.rest()
                    retarget_meanwhile(bench, set(LAYER_LOW[2:]))
                    assert not bench.pager.core.tickets
        arrives(bench, lambda: bench.in_high() == set(LAYER_LOW[2:]))


def test_nothing_is_borrowed_where_waiting_costs_something():
    bench = combined_bench(NEVER_IN_TIME)
    with bench.running():
        assert bench.serve(0, [0, 1, 2, 3], EVERYBODY) == {0: HIGH, 1: HIGH, 2: LOW, 3: LOW}
        assert bench.pager.metrics.snapshot().total("stall_seconds") > 0 == bench.pager.metrics.snapshot().total("promotions")
        assert bench.stores[HIGH].reads == 2


def test_a_borrowed_copy_that_fails_leaves_the_resident_one_to_serve():
    bench = combined_bench()
    with bench.running():
        bench.failing.change({(ExpertId(0, 3), HIGH)})
        assert bench.serve(0, [0, 1, 2, 3], EVERYBODY) == {0: HIGH, 1: HIGH, 2: HIGH, 3: LOW}
        assert bench.pager.tables[0].pool.free_of(HIGH) == 2
        assert bench.pager.metrics.snapshot().total("served_lower") == 1


def test_a_copy_that_was_borrowed_by_a_demand_left_early_is_given_back_when_it_comes():
    bench = combined_bench()
    with bench.running():
        gate = gated(bench, HIGH)
        with bench.pager.demand(0, [0, 3], high=EVERYBODY) as demand:
            assert next(bench.lent_by(demand, 0)) == (0, HIGH)
            until_reading(bench, HIGH, 3)
        bench.check()
        assert bench.serve(0, [0, 3], EVERYBODY) == {0: HIGH, 3: LOW}, "nobody waits for what nobody borrows any more"
        gate.set()
        bench.rest()
        bench.check()
        assert bench.in_high() == set(LAYER_LOW[:2]) and bench.pager.tables[0].pool.free_of(HIGH) == 2


def test_a_copy_that_was_borrowed_by_an_interrupted_demand_is_given_back_when_it_comes():
    bench = combined_bench()
    with bench.running():
        gate = gated(bench, HIGH)
        with pytest.raises(KeyboardInterrupt), bench.pager.demand(0, [0, 3], high=EVERYBODY) as demand:
            assert next(bench.lent_by(demand, 0)) == (0, HIGH)
            until_reading(bench, HIGH, 3)
            raise KeyboardInterrupt
        gate.set()
        bench.rest()
        bench.check()
        assert bench.in_high() == set(LAYER_LOW[:2]) and bench.pager.tables[0].pool.free_of(HIGH) == 2


# -- interrupts, and the end
def test_closing_in_the_middle_of_moves_ends_them():
    bench = hot_bench([8], [0], [4], 2, threads=2)
    with bench.running():
        list(bench.pager.bring_in_all(bench.mask([ExpertId(0, e) for e in range(4)])))
        gate = gated(bench, HIGH)
        bench.pager.retarget(bench.mask([ExpertId(0, e) for e in range(4, 8)]))
        until_reading(bench, HIGH, 6)
        closing = threading.Thread(target=bench.pager.close)
        closing.start()
        arrives(bench, lambda: bench.pager.core.closed)
        gate.set()
        closing.join(10)
        assert not closing.is_alive()
    assert None not in bench.formats().values() and not bench.pager.core.tickets
    with pytest.raises(ClosedError):
        bench.pager.settle()


def test_closing_while_moves_are_settled_ends_both():
    bench = hot_bench([8], [0], [4], 2, threads=1, deterministic=True)
    failures = []

    def settle() -> None:
        try:
            bench.pager.settle()
        except ClosedError as error:
            failures.append(error)

    with bench.running():
        list(bench.pager.bring_in_all(bench.mask([ExpertId(0, e) for e in range(4)])))
        gate = gated(bench, HIGH)
        bench.pager.retarget(bench.mask([ExpertId(0, e) for e in range(4, 8)]))
        settling = threading.Thread(target=settle)
        settling.start()
        until_reading(bench, HIGH, 5)
        closing = threading.Thread(target=bench.pager.close)
        closing.start()
        arrives(bench, lambda: bench.pager.core.closed)
        gate.set()
        for thread in (settling, closing):
            thread.join(10)
            assert not thread.is_alive()
        assert len(failures) == 1
    assert None not in bench.formats().values()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_at_every_line_of_a_demand_that_upgrades_is_repaired(phase):
    def serve(pager: Pager, phase: Phase) -> None:
        pager.begin_step(phase)
        for layer, experts, wishes in ((0, [0, 1, 3], NOBODY), (0, [0, 1, 2, 3], EVERYBODY)):
            with pager.demand(layer, experts, None if phase is Phase.DECODE else [3], high=wishes) as demand:
                for group in demand.groups(in_order=phase is Phase.PREFILL):
                    for lent in group:
                        assert lent.weights["w"][:3].tolist() == [layer, lent.expert, lent.precision]
                        assert lent.precision == HIGH or not wishes[lent.expert]

    interrupt_everywhere(phase, lambda: Bench([4], [0], [(3, 2)], importance=True, threads=1).pager, 900 // EVERY, serve, EVERY)


def test_ctrl_c_at_every_line_while_experts_move_is_repaired():
    """Nobody is lost, and with the next targets everybody gets where they belong."""
    first, second = (np.array([[True, False, True, False]]) == wanted for wanted in (True, False))

    def serve(pager: Pager, phase: Phase) -> None:
        for targets in (second, first):
            pager.begin_step(phase)
            pager.retarget(targets, [ExpertId(0, 1)], [ExpertId(0, 0)])
            pager.settle()
            assert pager.tables[0].precisions(0).tolist() == [1 + (LOW, HIGH)[not low] for low in ~targets[0]]
        with pager.demand(0, [0, 1, 2, 3], high=EVERYBODY) as demand:
            for group in demand.groups(in_order=False):
                for lent in group:
                    assert lent.weights["w"][:3].tolist() == [0, lent.expert, lent.precision]

    def make() -> Pager:
        bench = hot_bench([4], [0], [2], 2, importance=True, rates=FREE_OF_CHARGE, threads=1, deterministic=True)
        list(bench.pager.bring_in_all(first))
        return bench.pager

    interrupt_everywhere(Phase.DECODE, make, 900 // EVERY, serve, EVERY)


def test_ctrl_c_at_any_moment_while_experts_move_leaves_a_pager_that_works():
    bench = hot_bench([16] * 4, [0] * 4, [20], 3, importance=True, rates=FREE_OF_CHARGE, threads=2)
    targets = some_targets(random.Random(1), bench, [20])
    list(bench.pager.bring_in_all(bench.mask(targets)))

    def serve(pager: Pager, rng: random.Random) -> None:
        nonlocal targets
        pager.begin_step(Phase.DECODE)
        targets = some_targets(rng, bench, [20])
        pager.retarget(bench.mask(targets))
        if rng.random() < 0.3:
            pager.settle()
        for layer in range(4):
            bench.serve(layer, sorted(rng.sample(range(16), 5)), np.array([rng.random() < 0.5 for _ in range(16)]))

    def everybody_is_there() -> None:
        bench.check()
        assert None not in bench.formats().values(), "an expert is gone"
        bench.pager.retarget(bench.mask(targets))
        arrives(bench, lambda: bench.in_high() == targets)

    assert interrupt_at_random(bench.pager, 200 * MORE, everybody_is_there, serve) > 150 * MORE
