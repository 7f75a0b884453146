"""Routing sorted for the kernels: checked against numpy's stable sort."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vismoe.kernels.cpu import route


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_pairs_come_by_expert_then_in_the_order_of_the_routing(tokens, choices, num_experts, seed):
    routing = np.random.default_rng(seed).integers(-1, num_experts + 2, (tokens, choices))  # -1 and the last two are sentinels
    experts, starts, owners, places = route(routing, num_experts)
    flat = routing.ravel()
    order = np.argsort(flat, kind="stable")
    order = order[(flat[order] >= 0) & (flat[order] < num_experts)]
    assert experts == sorted(set(flat[order].tolist()))
    assert places.tolist() == order.tolist() and owners.tolist() == (order // choices).tolist()
    assert starts.tolist() == [int(np.searchsorted(flat[order], e)) for e in experts] + [len(order)]
