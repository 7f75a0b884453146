"""A window that wraps over the end of the model, in virtual time. The figures in docs/orchestrator.md are of larger traces."""

from vismoe.eval.studies.wrapping import WRAPPED, WrappingPager, decoded
from vismoe.simulate.demands import Conditions, Demands, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.synthetic import skewed_trace

DEMANDS = Demands.of(skewed_trace(8, 16, 3, requests=2, prompt_tokens=12, tokens=40, window=5, score_noise=1.0))
CONDITIONS = Conditions(prefetch=True, link_bytes_per_s=4 * 1024 / 1e-3, compute_s_per_layer=1e-3, streams=False)


def test_a_wrapping_window_wins_most_of_what_it_can_only_by_knowing_the_next_token():
    slabs = slabs_per_geometry("25%", DEMANDS.inventory)
    plain = decoded(VirtualPager(DEMANDS.inventory, slabs, "lfu", CONDITIONS), DEMANDS)
    none, use, oracle = (decoded(WrappingPager(DEMANDS, slabs, "lfu", CONDITIONS, wrapped), DEMANDS) for wrapped in WRAPPED)
    assert none == plain
    assert 0.88 < oracle[0] / plain[0] < 0.95 and oracle[2] < 0.6 * plain[2]
    assert 0.95 < use[0] / plain[0] < 1.0
