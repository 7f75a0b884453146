"""The middle tier: bounded, LRU, correct under threads, and unharmed by failed reads."""

import random
import threading

import pytest
import torch
from test_pager import NumberStore, check

from vismoe.pools.host_tier import HostTier
from vismoe.types import ExpertId


def test_threads_always_lease_the_expert_they_asked_for_from_a_tier_smaller_than_the_model():
    store = NumberStore([16, 16], [0, 0])
    tier = HostTier(store, (5,), page_locked=False)
    failures = []

    def lease_many(seed):
        rng = random.Random(seed)
        try:
            for _ in range(2000):
                expert = ExpertId(rng.randrange(2), rng.randrange(16))
                with tier.lease(expert) as lease:
                    check(expert, lease.pool.weights(lease.slab))
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=lease_many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    tier.check_integrity()


def test_the_least_recently_used_record_leaves_first_and_a_second_lease_reads_nothing():
    store = NumberStore([8], [0])
    tier = HostTier(store, (2,), page_locked=False)
    for expert in (0, 1, 0, 2):
        with tier.lease(ExpertId(0, expert)):
            pass
    with tier.lease(ExpertId(0, 0)) as lease:
        assert lease.disk_bytes == 0
    with tier.lease(ExpertId(0, 1)) as lease:
        assert lease.disk_bytes > 0
    assert store.reads == 4


def test_a_failed_read_gives_its_record_back():
    store = NumberStore([8], [0])
    tier = HostTier(store, (2,), page_locked=False)
    store.broken.add(ExpertId(0, 3))
    for _ in range(5):
        with pytest.raises(OSError), tier.lease(ExpertId(0, 3)):
            pass
    tier.check_integrity()
    store.broken.clear()
    with tier.lease(ExpertId(0, 3)) as lease:
        assert torch.equal(lease.pool.weights(lease.slab)["w"][:2], torch.tensor([0, 3]))
