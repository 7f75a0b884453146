"""Several guesses on their way at once, in virtual time. The figures in docs/orchestrator.md are of larger traces."""

import pytest
from test_wrapping import CONDITIONS, DEMANDS

from vismoe.eval.studies.in_flight import OverlappingPager, best
from vismoe.eval.studies.wrapping import decoded
from vismoe.simulate.demands import slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager

SLABS = slabs_per_geometry("25%", DEMANDS.inventory)
COPY_S = 0.25e-3  # of an expert, by CONDITIONS


def decode(latency_s: float, at_once: int):
    return decoded(OverlappingPager(DEMANDS, SLABS, "lfu", CONDITIONS, latency_s, at_once), DEMANDS)


def test_without_latency_one_at_a_time_is_the_replay_of_the_pager():
    plain = decoded(VirtualPager(DEMANDS.inventory, SLABS, "lfu", CONDITIONS), DEMANDS)
    assert decode(0.0, 1) == pytest.approx(plain, rel=1e-9)


def test_several_at_once_win_only_where_a_copy_waits_for_its_first_byte():
    assert decode(0.0, 16)[0] >= decode(0.0, 1)[0]
    slow = decode(4 * COPY_S, 1)[0]
    assert slow > decode(0.0, 1)[0] and decode(4 * COPY_S, 4)[0] < slow


def test_the_summary_is_of_each_latency():
    rows = [["a", "25%", 1, 0.0, 1.0, 1.1, 1.2, 1.3], ["a", "25%", 4, 0.0, 1.0, 0.9, 1.4, 1.5]]
    rows += [["a", "25%", 1, latency, 1.0, 1.0, 1.0, 1.0] for latency in (0.05, 0.2, 1.0)]
    assert best(rows)[:2] == [[0.0, 1, 1.0, 1.0, 1.0], [0.0, 2, 0.9, 1.0, 1.1]]
