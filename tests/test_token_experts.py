"""One token's experts, computed by the other threads while this one goes on: the same bits, whatever comes between."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismoe.kernels import cpu
from vismoe.pools.pool import SlabPool
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

HIDDEN, INNER, EXPERTS = 512, 256, 5  # more than one thread computes alone
RAW = RecordLayout.of({"up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}, dict.fromkeys(("up", "down"), torch.bfloat16))


@pytest.fixture(scope="module", params=[1, 2, 8])
def threads(request):
    before = cpu.setup()
    cpu.start(request.param)
    yield request.param
    cpu.start(before.threads, before.isa)


@pytest.fixture(scope="module")
def there():
    kernel = cpu.ExpertKernel.of(Format.RAW, RAW, RAW, ExpertForm("up", "down", False, Gate.CONCATENATED, Activation.SILU))
    pool = SlabPool(RAW, EXPERTS)
    pool.buffer.copy_((0.05 * torch.randn(pool.buffer.numel() // 2)).bfloat16().view(torch.uint8).view_as(pool.buffer))
    return kernel, pool


def wanted(kernel, pool, hidden, which, factors):
    """By a call of its own."""
    out, starts = torch.empty(len(which), HIDDEN), np.arange(len(which) + 1, dtype=np.int32)
    kernel.parts(pool.addresses[which].view(np.uint64), starts, np.zeros(len(which), np.int32), factors, hidden, out)
    return out.numpy()


@given(data=st.data())
def test_rows_are_those_of_one_call_whatever_comes_between(threads, there, data):
    kernel, pool = there
    hidden = torch.zeros(1, HIDDEN, dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32]), label="type"))
    token = cpu.TokenExperts(kernel, hidden, EXPERTS)
    for _ in range(data.draw(st.integers(1, 3), label="tokens")):
        which = data.draw(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True), label="which")
        factors = np.float32(data.draw(st.lists(st.floats(0, 1, width=32), min_size=EXPERTS, max_size=EXPERTS), label="factors"))
        hidden.copy_(torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(len(which))))
        expected = wanted(kernel, pool, hidden, which, factors[: len(which)])
        token.records[: len(which)], token.factors[:] = pool.addresses[which], factors
        token.rows[:] = np.nan
        between = data.draw(st.sampled_from(["nothing", "another call", "woken", "new threads"]), label="between")
        if data.draw(st.booleans(), label="woken before"):
            cpu.rouse()
        began_s = time.perf_counter()
        token.begin(len(which), pool)
        if between == "another call":  # as after an interrupt
            assert np.array_equal(wanted(kernel, pool, hidden, which, factors[: len(which)]), expected)
        elif between == "woken":
            cpu.rouse()
        elif between == "new threads":
            cpu.start(threads)
        assert began_s <= token.end() <= time.perf_counter()
        assert np.array_equal(token.rows[: len(which)], expected) and np.isnan(token.rows[len(which) :]).all()


def test_what_was_begun_and_left_is_ended_by_the_next_call_of_any_thread(threads, there):
    kernel, pool = there
    hidden, found = torch.randn(1, HIDDEN).bfloat16(), []
    token = cpu.TokenExperts(kernel, hidden, EXPERTS)
    token.records[:], token.factors[:] = pool.addresses, 1.0
    token.begin(EXPERTS, pool)
    factors = np.ones(1, np.float32)
    other = threading.Thread(target=lambda: found.append(wanted(kernel, pool, hidden, [2], factors)))
    other.start()
    other.join(60)
    assert np.array_equal(found[0][0], token.rows[2])
    assert token.end() > 0 == token.end(), "since when it is done; nothing is left to do"
    token.begin(1, pool)
    token.begin(2, pool)  # as if the one before had been interrupted
    del_of_others = cpu.TokenExperts(kernel, hidden, EXPERTS)
    del del_of_others
    token.end()
    assert np.array_equal(token.rows[:2], wanted(kernel, pool, hidden, [0, 1], np.ones(2, np.float32)))
