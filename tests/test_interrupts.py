"""Ctrl-C at many bytecodes of a demand's beginning and end, and at some of all others: what another thread finds afterwards.

That one must be able to go on at once. With HYPOTHESIS_PROFILE=searching it is every bytecode there is.
"""

import pytest
from searching import SEARCHING
from test_below import copying, warm
from test_pager import NumberStore, check, interrupt_everywhere, make_pager

from vismoe.paging.pager import Pager
from vismoe.types import ExpertId, Phase

EVERY = 1 if SEARCHING else 199  # so many bytecodes apart, where there are too many


def serve_a_layer(pager: Pager, phase: Phase) -> None:
    """All are missing at first, and one more is wanted than there are slabs."""
    pager.begin_step(phase)
    with pager.demand(0, [1, 2, 3], None if phase is Phase.DECODE else [3]) as demand:
        for group in demand.groups(in_order=phase is Phase.PREFILL):
            for lent in group:
                check(ExpertId(0, lent.expert), lent.weights)


@pytest.mark.parametrize(("phase", "every"), [(Phase.PREFILL, 1 if SEARCHING else 11), (Phase.DECODE, 1 if SEARCHING else 5)])
def test_ctrl_c_at_bytecodes_of_beginning_and_end_of_a_demand_lets_other_threads_go_on(phase, every):
    def make() -> Pager:
        return make_pager(NumberStore([4], [0]), [2], threads=1)

    interrupt_everywhere(phase, make, 700 // every, serve_a_layer, every, "opcode", inside=("__enter__", "__exit__"))


@pytest.mark.budget(4)
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_at_many_bytecodes_of_a_pass_lets_other_threads_go_on(phase):
    def make() -> Pager:
        return make_pager(NumberStore([8] * 3, [0, 1, 0]), [3, 3], threads=1)

    interrupt_everywhere(phase, make, 5000 // EVERY, every=EVERY, event="opcode")


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_at_many_bytecodes_while_host_memory_is_held_lets_other_threads_go_on(phase):
    def make() -> Pager:
        pager = copying(NumberStore([8] * 3, [0, 1, 0]), [3, 3], host_records=6, policy="auto", threads=1)
        warm(pager)
        return pager

    interrupt_everywhere(phase, make, 5000 // EVERY, every=EVERY, event="opcode")
