"""Reads that fail, by schedule: a request fails by its own reads only, and once they work again the next one is answered.

With HYPOTHESIS_PROFILE=searching there are twenty times as many requests.
"""

import random
import re
import threading
import time

import numpy as np
import pytest
import torch
from searching import SEARCHING
from test_pager import NumberStore, elsewhere, lent_by, make_pager

from vismoe.errors import TransferError
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import DiskMover
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertId, Phase

REQUESTS = 6000 if SEARCHING else 300


class WorkersOnly(DiskMover):
    """Nobody copies while it waits."""

    by_demander = False


class Gated(NumberStore):
    """Reads of some experts wait for `gate`, and fail if the expert was broken when they began."""

    def __init__(self, experts: list[int]):
        super().__init__(experts, [0] * len(experts))
        self.gate, self.waiting, self.begun = threading.Event(), set[ExpertId](), set[ExpertId]()

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        broken = expert in self.broken
        self.begun.add(expert)
        if expert in self.waiting:
            assert self.gate.wait(20)
        if broken:
            raise OSError(5, "input/output error")
        return super().read(expert, record)


def gated_pager(store: Gated, slabs: int, threads: int = 3) -> Pager:
    pools = (SlabPool(store.inventory.layouts[0], slabs),)
    return Pager(store.inventory, pools, WorkersOnly(store), threads=threads)


def until(what) -> None:
    end_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_a_read_that_a_failed_request_left_behind_fails_nobody_else(by_another_thread):
    store = Gated([8])
    first, second = ExpertId(0, 1), ExpertId(0, 2)
    store.broken, store.waiting = {first, second}, {second}
    pager = gated_pager(store, 4)
    pager.begin_step(Phase.DECODE)
    with pytest.raises(TransferError, match="expert 1 of MoE layer 0"), pager.demand(0, [1, 2]) as demand:
        until(lambda: second in store.begun)
        list(lent_by(demand, 0))
    assert second in pager.core.tickets, "its read is under way"
    store.broken = set()  # restored

    def next_request() -> None:
        pager.begin_step(Phase.DECODE)
        with pager.demand(0, [1, 2]) as demand:
            store.gate.set()
            assert set(lent_by(demand, 0)) == {1, 2}

    elsewhere(next_request) if by_another_thread else next_request()
    pager.check_integrity()
    pager.close()


def test_a_guess_that_fails_is_asked_for_once_more():
    store = Gated([4, 8])
    guess = ExpertId(1, 5)
    store.broken, store.waiting = {guess}, {guess}
    pager = gated_pager(store, 6, threads=1)
    pager.begin_step(Phase.DECODE)
    with pager.demand(0, [1]) as demand:
        pager.look_ahead(0, np.eye(1, 8, 5, dtype=np.float32))
        assert list(lent_by(demand, 0)) == [1]
    until(lambda: guess in store.begun)
    store.broken = set()
    with pager.demand(1, [5]) as demand:
        store.gate.set()
        assert list(lent_by(demand, 1)) == [5]
    pager.check_integrity()
    pager.close()


@pytest.mark.parametrize("workers_only", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_request_fails_by_what_is_broken_while_it_runs_only(seed, workers_only):
    """Experts break and are restored between requests, never within; reads that began before may end at any time."""
    rng, experts = random.Random(seed), [8, 8]
    store = NumberStore(experts, [0, 0])
    read = store.read

    def slow(expert: ExpertId, record: torch.Tensor) -> int:
        broken = expert in store.broken
        time.sleep(rng.choice([0, 0, 0.002]))
        if broken:
            raise OSError(5, "input/output error")
        return read(expert, record)

    store.read = slow
    pools = (SlabPool(store.inventory.layouts[0], 6),)
    pager = Pager(store.inventory, pools, WorkersOnly(store), threads=3) if workers_only else make_pager(store, [6])
    everybody, failures = [ExpertId(layer, e) for layer in range(2) for e in range(8)], 0
    for _ in range(REQUESTS):
        store.broken = set(rng.sample(everybody, rng.choice([0, 1, 3])))
        pager.begin_step(rng.choice([Phase.PREFILL, Phase.DECODE]))
        for layer in range(2):
            wanted = sorted(rng.sample(range(8), rng.randint(1, 5)))
            try:
                with pager.demand(layer, wanted) as demand:
                    if layer == 0:
                        pager.look_ahead(0, np.array([[rng.random() for _ in range(8)]], dtype=np.float32))
                    assert sorted(lent_by(demand, layer)) == wanted
            except TransferError as error:
                found = re.search(r"expert (\d+) of MoE layer (\d+)", str(error))
                assert found and ExpertId(int(found[2]), int(found[1])) in store.broken, f"{error}; broken: {store.broken}"
                failures += 1
            pager.check_integrity()
    pager.close()
    assert failures > REQUESTS // 20, "nothing was tried"
