"""Streamed passes: the rule by hand, what stays, its bars in virtual time, and every invariant of the pager while it streams."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import SimulatedCuda
from test_pager import NumberStore, interrupt_everywhere, lent_by, make_pager, random_walk
from test_serving_engine import REQUESTS, said
from test_shared_passes import LOADED, equal, seen  # noqa: F401  (a fixture)
from test_simulated_cuda import wrong_reads

import vismoe
from vismoe.paging import residency
from vismoe.paging.page_table import PageTable
from vismoe.paging.streaming import Passes, StreamEstimate, Streaming, Verdict, fixed_residents
from vismoe.simulate.demands import Conditions, Demands
from vismoe.simulate.oracle import oracle_misses
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.trace.synthetic import skewed_trace
from vismoe.types import ExpertId, MoELayer, Phase


# -- the rule
@pytest.mark.parametrize(
    ("differs", "ring", "seconds", "first", "later"),
    [
        ({}, 6, (64.75, 81.36), Verdict.STREAMED, Verdict.STREAMED),  # a link much slower than computation
        ({"missed": 0.52}, 6, (64.75, 68.56), Verdict.NO_GAIN, Verdict.STREAMED),  # within a tenth
        ({"missed": 0.48}, 6, (64.75, 63.44), Verdict.NO_GAIN, Verdict.NO_GAIN),
        ({"waited": 0.5}, 6, (64.75, 41.68), Verdict.NO_GAIN, Verdict.NO_GAIN),  # copies behind computation cost nothing
        ({"wanted": 0.5}, 6, (33.375, 81.36), Verdict.STREAMED, Verdict.STREAMED),  # of two copied in time, one in vain
        ({"compute_s": 100.0}, 104, (100.0, 179.36), Verdict.STREAMED, Verdict.STREAMED),
        ({"compute_s": 300.0}, 128, (300.0, 379.36), Verdict.STREAMED, Verdict.STREAMED),  # two layers' absent experts
        ({"compute_s": 300.0, "slabs": 128}, 132, (300.0, 379.36), Verdict.SMALL_POOL, Verdict.SMALL_POOL),
        ({"missed": 0.0}, 6, (64.75, 2.0), Verdict.NO_GAIN, Verdict.NO_GAIN),
        ({"wanted": 0.49}, 6, (32.7475, 81.36), Verdict.NO_GAIN, Verdict.NO_GAIN),  # most of what comes unasked is in vain
        ({"in_flight": 0}, 2, (64.25, 81.36), Verdict.STREAMED, Verdict.STREAMED),  # a slab more of the ring is a copy more
        ({"in_flight": 0, "compute_s": 0.0}, 1, (64.125, 79.36), Verdict.STREAMED, Verdict.STREAMED),
    ],
)
def test_the_rule_by_hand(differs, ring, seconds, first, later):
    given = dict(layers=8, experts=128, slabs=512, copy_s=1.0, compute_s=2.0, wanted=1.0, missed=0.62, in_flight=4) | differs
    estimate = StreamEstimate(**given)
    assert estimate.ring == ring and (estimate.streamed_s, estimate.demanded_s) == pytest.approx(seconds)
    assert (estimate.verdict(streaming=False), estimate.verdict(streaming=True)) == (first, later)


@given(
    st.tuples(st.integers(1, 48), st.integers(2, 128), st.integers(2, 6000)),
    st.tuples(st.floats(1e-4, 1), st.floats(0, 9)),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)
def test_the_ring_stays_within_two_layers_and_what_streams_goes_on_while_nothing_changes(sizes, seconds, shares):
    layers, experts, slabs = sizes
    estimate = StreamEstimate(layers, experts, min(slabs, layers * experts), *seconds, *shares)
    absent = -(-max(0, layers * experts - slabs) // layers)
    assert 0 <= estimate.ring <= 2 * absent
    assert estimate.streamed_s >= estimate.compute_s
    if estimate.verdict(streaming=False) is Verdict.STREAMED:
        assert estimate.verdict(streaming=True) is Verdict.STREAMED and estimate.streamed_s < 0.9 * estimate.demanded_s


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 10**6))
def test_what_stays_is_the_same_share_of_every_layer_and_the_most_used_of_it(sizes, share, seed):
    rng = np.random.default_rng(seed)
    uses, resident = rng.integers(0, 8, sum(sizes)).astype(float), rng.random(sum(sizes)) < 0.5
    slabs = int(share * sum(sizes))
    fixed, start = fixed_residents(uses, resident, sizes, slabs), 0
    assert np.count_nonzero(fixed) == slabs
    for size in sizes:
        mine = slice(start, start + size)
        assert abs(np.count_nonzero(fixed[mine]) - slabs * size / sum(sizes)) < 1
        if fixed[mine].any() and not fixed[mine].all():
            stays, leaves = fixed[mine], ~fixed[mine]
            assert not (resident[mine] & leaves & (uses[mine] > uses[mine][stays].min())).any()
            newcomers = uses[mine][stays & ~resident[mine]]
            if newcomers.size and (resident[mine] & leaves).any():
                assert newcomers.min() >= 1.5 * uses[mine][resident[mine] & leaves].max()
        start += size


def test_a_size_of_passes_is_measured_by_demand_paging_first_and_not_while_the_pool_fills():
    streaming = Streaming([MoELayer(i, "", 8, 4, 0) for i in range(2)], possible=True)

    def a_pass(tokens: int, full: bool = True, missed: int = 4, phase: Phase = Phase.DECODE) -> Verdict:
        streaming.begin_pass(phase, tokens, slabs=12, full=full, compute_s=0.5 * a_pass.slower)
        verdict = streaming.verdict
        a_pass.slower = 1 if full else 8  # the first write to memory
        late = 1 if streaming.on else missed  # which says nothing of demand paging
        for _ in range(2):
            streaming.demand(8, late)
            streaming.stall_s += late * 0.5
        for number in range(2 * missed):  # two at a time, each of a second
            began_s = a_pass.now_s + number // 2 * a_pass.slower
            streaming.copied(began_s, began_s + a_pass.slower)
        a_pass.now_s += 100
        return verdict

    a_pass.now_s, a_pass.slower = 0.0, 1
    assert [a_pass(16, full=False) for _ in range(3)] == [Verdict.UNMEASURED] * 3
    assert [a_pass(16) for _ in range(3)] == [Verdict.UNMEASURED, Verdict.STREAMED, Verdict.STREAMED]
    assert a_pass(32) is Verdict.UNMEASURED, "nothing is known of passes of another size"
    assert a_pass(17) is Verdict.STREAMED
    assert [a_pass(16, phase=Phase.ENCODE) for _ in range(3)] == [Verdict.UNMEASURED] * 3
    streaming.begin_pass(Phase.ENCODE, 16, slabs=12, full=True, compute_s=0.5)
    nearly = pytest.approx(1.0, abs=1e-4)
    assert streaming._known[Phase.DECODE, 5] == Passes(nearly, 0.5, 0.5, 1.0, streamed=True, wanted_absent=nearly)
    assert streaming._copy_s == 0.5


# -- in virtual time
def replayed(demands: Demands, slots: int, streams: bool, **conditions: float) -> tuple[VirtualPager, list[tuple[int, float]]]:
    """The pager, and after every demand the fetched bytes and the time."""
    pager = VirtualPager(demands.inventory, (slots,), "lfu", Conditions(streams=streams, **conditions))
    after = []
    for demand in demands:
        pager.run(demand)
        after.append((int(pager.metrics.snapshot().total("bytes_read")), pager.now_s))
    pager.core.check_integrity()
    return pager, after


@pytest.mark.parametrize("slots", [256, 512, 768])
def test_where_nearly_everything_is_wanted_streaming_fetches_hardly_more_than_the_oracle(slots):
    """Or than can be done without foresight: routing is uniform, and an expert that stays until the next pass takes a slab all
    the time, so at most `slots` stay, of which the next pass wants no larger share than of all."""
    layers, steps, warm = 8, 12, 5
    demands = Demands.of(skewed_trace(layers, 128, 8, tokens=steps, batch=64, skew=0.0, seed=1))
    assert np.mean([len(demand.experts) for demand in demands]) / 128 >= 0.95
    pager, after = replayed(demands, slots, True, link_bytes_per_s=1024, compute_s_per_layer=2.0)
    assert pager.metrics.snapshot().total("streamed") == (steps - 2) * layers  # but the cold pass, and the one that is measured
    wanted = [demand.experts + 128 * demand.layer for demand in demands]
    fewest = sum(oracle_misses(wanted, slots)[warm * layers :])
    unforeseen = sum(map(len, wanted[warm * layers :])) * (1 - slots / (128 * layers))
    fetched = (after[-1][0] - after[warm * layers - 1][0]) / 1024
    assert fetched <= 1.03 * max(fewest, unforeseen) and (slots > 512 or fetched <= 1.03 * fewest)


@pytest.mark.parametrize(("skew", "compute_s"), [(1.0, 0.1), (0.0, 2.0), (1.0, 12.0), (0.0, 40.0)])
def test_streaming_is_never_slower_than_demand_paging(skew, compute_s):
    """Seconds are copies of an expert."""
    streamed = []
    for batch, prompts in ((1, {}), (4, {}), (24, {}), (2, {"requests": 6, "prompt_tokens": 24})):
        tokens = 3 if prompts else 14
        demands = Demands.of(skewed_trace(5, 32, 4, tokens=tokens, batch=batch, skew=skew, zipf=True, seed=batch, **prompts))
        for slots in (48, 80, 120):
            conditions = dict(link_bytes_per_s=1024, compute_s_per_layer=compute_s)
            pager, on = replayed(demands, slots, True, **conditions)
            _, off = replayed(demands, slots, False, **conditions)
            streamed.append(pager.metrics.snapshot().total("streamed"))
            assert on[-1][1] <= 1.01 * off[-1][1], (batch, prompts, slots)
    assert any(streamed[:-3]) and (any(streamed[-3:]) or compute_s < 1), "rows, and prompts"


@pytest.mark.parametrize("trace", [{"tokens": 10, "batch": 24}, {"requests": 9, "prompt_tokens": 48, "tokens": 1}])
def test_what_stays_is_not_evicted_while_passes_are_streamed(trace):
    """Not even for one that is to stay as well: it waits for the ring."""
    demands = Demands.of(skewed_trace(6, 32, 4, skew=0.3, seed=3, **trace))
    pager = VirtualPager(demands.inventory, (90,), "lfu", Conditions(link_bytes_per_s=1024, compute_s_per_layer=16.0))
    (table,), evict, evicted = pager.tables, pager.tables[0].evict, []

    def noted(slab: int):
        if pager.core.streaming[0].on:
            evicted.append(bool(table.fixed[table.expert_in[slab]]))
        return evict(slab)

    table.evict = noted
    for demand in demands:
        pager.run(demand)
    assert len(evicted) > 300 and not any(evicted)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("compute_s", [16.0, 64.0, 160.0])
def test_a_streamed_prompt_takes_hardly_longer_than_its_computation_or_its_copies(share, compute_s):
    """Of every layer the same share stays, so that the link has as much to do while each is computed; and it begins with the
    pass. Seconds are copies of an expert."""
    layers, experts, requests = 8, 128, 5
    trace = skewed_trace(layers, experts, 8, requests=requests, prompt_tokens=512, tokens=1, skew=0.0, seed=2)
    demands = Demands.of(trace)
    conditions = dict(link_bytes_per_s=1024, compute_s_per_layer=compute_s)
    pager, after = replayed(demands, int(share * layers * experts), True, **conditions)
    prompt = slice(-2 * layers, -layers)  # of the last request, whose one token comes after it
    assert {demand.phase for demand in demands[prompt]} == {Phase.PREFILL}
    fetched, seconds = np.subtract(after[-layers - 1], after[-2 * layers - 1]) / layers / (1024, 1)
    if share == 0.25 and compute_s == 160.0:
        assert not pager.metrics.snapshot().total("streamed"), "its ring would be more than half of the slabs"
    else:
        assert seconds <= 1.12 * max(compute_s, fetched) and fetched <= (1 - share) * experts + 20, (seconds, fetched)


def test_the_last_tokens_experts_of_a_streamed_prompt_stay_and_every_layer_keeps_its_share():
    layers, experts = 6, 32
    trace = skewed_trace(layers, experts, 4, requests=6, prompt_tokens=64, tokens=1, skew=0.0, seed=4)
    pager = VirtualPager(trace.inventory, (96,), "lfu", Conditions(link_bytes_per_s=1024, compute_s_per_layer=16.0))
    (table,), streamed = pager.tables, 0
    for demand in Demands.of(trace):
        pager.run(demand)
        if pager.core.streaming[0].on and demand.phase is Phase.PREFILL:
            streamed += 1
            there = pager.core.of_all(PageTable.residency)
            assert (there[demand.layer, demand.last] != 0).all()
            fixed = [int(np.count_nonzero(table.fixed_of(layer))) for layer in range(layers)]
            assert max(fixed) - min(fixed) <= 1 and sum(fixed) == 96 - table.streamed_ring
            leaves = table.ring[table.slab_of[table.base[demand.layer] + demand.last]]
            assert not leaves.any(), "the ring takes them"
            pager.core.check_integrity()
    assert streamed >= 4 * layers


# -- prompts that are not streamed
def test_prompts_copy_ahead_while_nearly_all_that_layers_lack_is_wanted():
    layers = [MoELayer(i, "", 8, 4, 0) for i in range(2)]
    streaming, never = (Streaming(layers, possible=True, prompts_ahead=ahead) for ahead in (True, False))

    def a_pass(tokens: int, lacked: int = 0, wanted: int = 0, phase: Phase = Phase.PREFILL) -> bool:
        for one in (streaming, never):
            one.begin_pass(phase, tokens, slabs=12, full=True, compute_s=0.5)
            one.lacks(lacked, wanted)
        assert not never.ahead and not streaming.on
        return streaming.ahead

    assert not a_pass(4), "1 - (1 - 4/8)^4 of 8 experts are wanted"
    assert a_pass(64) and not a_pass(64, phase=Phase.DECODE)
    assert [a_pass(64, 8, 8), a_pass(64, 8, 5), a_pass(64, 8, 8)] == [True, True, False], "what lacks is what few tokens choose"
    assert [a_pass(64, 8, 8) for _ in range(4)] == [False, False, False, True], "it is measured all the same"
    assert a_pass(1000), "passes of each size by themselves"


@pytest.mark.parametrize("tokens", [64, 1])
def test_a_prompt_copies_for_the_next_layer_before_its_router_has_spoken(tokens):
    pager = make_pager(NumberStore([8] * 3, [0] * 3), [12], threads=0)
    core, (table,) = pager.core, pager.tables
    for layer in range(3):  # which follows which
        with pager.demand(layer, list(range(8)), keep={7}) as demand:
            list(lent_by(demand, layer, in_order=True))
    absent = np.flatnonzero(table.slab_of[8:16] < 0).tolist()
    pager.begin_step(Phase.PREFILL, tokens=tokens)
    assert core.copies_ahead == (tokens > 1) and not core.streaming[0].on
    with pager.demand(0, list(range(8)), keep={7}) as demand:
        assert list(lent_by(demand, 0, in_order=True)) == list(range(8))
    ticket = pager.transfer.take()
    assert (ticket is not None) == (tokens > 1)
    if ticket is not None:
        assert ticket.expert == ExpertId(1, absent[0]) and ticket.speculative, "the first that will be computed"
        pager.transfer.run(ticket)
        assert table.ring[ticket.slab], "it does not stay"
    wanted = [absent[0], *absent[3:]]
    with pager.demand(1, wanted, keep={wanted[-1]}) as demand:
        assert list(lent_by(demand, 1, in_order=True)) == wanted
    assert pager.metrics.snapshot().total("wasted_prefetch_bytes") == 0
    pager.close()
    pager.check_integrity()


def resident_of(pager, layer: int) -> set[int]:
    """What stays of a layer after a prompt."""
    (table,) = pager.tables
    return {e for e in range(16) if (slab := table.slab_of[table.base[layer] + e]) >= 0 and not table.ring[slab]}


def prompt_of(pager, rng: random.Random, layers: int, count: int = 16) -> list[tuple[set[int], list[int]]]:
    """So many experts are wanted -> of each layer, the last token's, and how many tokens chose each."""
    pager.begin_step(Phase.PREFILL, tokens=64)
    asked = []
    for layer in range(layers):
        wanted, tokens = sorted(rng.sample(range(16), count)), [rng.randint(1, 60) for _ in range(count)]
        keep = set(rng.sample(wanted, 2))
        with pager.demand(layer, wanted, keep=keep, tokens=tokens) as demand:
            assert list(lent_by(demand, layer, in_order=True)) == wanted
        asked.append((keep, tokens))
        pager.check_integrity()
    return asked


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_first_prompt_leaves_every_layer_its_share_with_what_most_tokens_chose(threads, seed, monkeypatch):
    """And later ones keep the shares: what the last token chose takes the place of others of its layer."""
    monkeypatch.setattr("vismoe.paging.streaming.GAIN", 0.0)  # no pass is streamed
    rng, layers, share, ring = random.Random(seed), 8, 5, 5
    pager = make_pager(NumberStore([16] * layers, [0] * layers), [layers * share + ring], threads=threads, window=1)
    assert pager.tables[0].ring_limits == (ring,)
    for layer, (keep, tokens) in enumerate(prompt_of(pager, rng, layers)):
        hottest = sorted(set(range(16)) - keep, key=lambda expert: (-tokens[expert], expert))
        assert resident_of(pager, layer) == keep | set(hottest[: share - len(keep)])
    (table,), evict, taken = pager.tables, pager.tables[0].evict, []  # taken: what had not passed through the ring
    table.evict = lambda slab: (table.streamed[slab] or taken.append(slab), evict(slab))[1]
    for number in range(24):
        for layer, (keep, _tokens) in enumerate(prompt_of(pager, rng, layers, 16 if number < 12 else 9)):
            assert keep <= resident_of(pager, layer)
        there = [len(resident_of(pager, layer)) for layer in range(layers)]
        if threads == 0 or number < 12:
            assert there == [share] * layers and not taken
        assert sum(there) == layers * share - len(taken), "the ring grows where all of it waits for an expert that has no slab"
        assert table.ring.sum() <= ring + len(taken)
    pager.close()


# -- the pager, whatever the rule says
class Always(Streaming):
    """Streams nearly every pass, through rings of any size that leaves some of the pool."""

    rng = random.Random(5)

    def begin_pass(self, phase, tokens, slabs, full, compute_s):
        super().begin_pass(phase, tokens, slabs, full, compute_s)
        on = slabs > 2 and self.possible and self.rng.random() < 0.9
        self.verdict = Verdict.STREAMED if on else Verdict.NO_GAIN
        return self.rng.randint(1, slabs - 1) if on else 0


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(residency, "Streaming", Always)


@pytest.mark.parametrize(("slabs", "order", "threads"), [([3], "lru", 1), ([16], "lfu", 2), ([40], "lfu", 3)])
def test_random_steps_keep_every_invariant_while_passes_are_streamed(always, slabs, order, threads):
    pager = random_walk(7, 700, [8] * 6, [0] * 6, slabs, order=order, threads=threads)
    counts = pager.metrics.snapshot()
    assert counts.total("streamed") > 0.7 * counts.total("steps") and counts.total("evictions") > 150
    assert slabs == [3] or counts.total("prefetched_bytes") > 10 * pager.core.ledger.unit_bytes


@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(2, 9), st.sampled_from(["lru", "lfu"]))
@settings(max_examples=15, deadline=None)
def test_two_geometries_of_any_small_size_are_streamed(seed, first, second, order):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "Streaming", Always)
        random_walk(seed, 60, [4, 9, 4, 9], [0, 1, 0, 1], [first, second], order=order, window=2)


def test_a_layer_that_follows_itself_is_not_copied_ahead_of_its_own_demand(always):
    """The only one, or the one at which the pass before ended early."""
    rng, pager = random.Random(3), make_pager(NumberStore([12], [0]), [5], threads=3)
    for _ in range(800):
        pager.begin_step(Phase.DECODE)
        wanted = sorted(rng.sample(range(12), 8))
        with pager.demand(0, wanted) as demand:
            assert sorted(lent_by(demand, 0)) == wanted
        pager.check_integrity()
    pager.close()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_ctrl_c_at_lines_of_a_streamed_pass_is_repaired(always, phase):
    interrupt_everywhere(phase, lambda: make_pager(NumberStore([8] * 3, [0, 1, 0]), [4, 4], threads=1), 20, every=17)


def test_no_kernel_reads_a_wrong_byte_of_a_streamed_pass(always, monkeypatch):
    for late in ("kernels", "copies"):
        assert not wrong_reads(SimulatedCuda(late=late), monkeypatch)
    for seed in range(6):
        assert not wrong_reads(SimulatedCuda(seed), monkeypatch)


def test_the_next_layer_is_copied_hottest_first_and_what_its_router_does_not_choose_is_dropped(monkeypatch):
    monkeypatch.setattr(Always, "begin_pass", lambda self, *given: setattr(self, "verdict", Verdict.STREAMED) or 4)
    monkeypatch.setattr(residency, "Streaming", Always)
    pager = make_pager(NumberStore([8] * 2, [0, 0]), [10], threads=0)
    core, (table,) = pager.core, pager.tables
    for wanted in (list(range(8)), [1, 3, 5, 6], [1, 6]):
        pager.begin_step(Phase.DECODE)
        with pager.demand(1, wanted) as demand:
            list(lent_by(demand, 1))
    pager.begin_step(Phase.DECODE)
    assert np.count_nonzero(table.fixed) == 6 and [np.count_nonzero(table.fixed_of(layer)) for layer in range(2)] == [3, 3]
    assert table.fixed_of(1)[[1, 6]].all()
    with pager.demand(0, list(range(8))) as demand:
        list(lent_by(demand, 0))
        begun = [pager.transfer.take() for _ in range(2)]
        assert all(ticket is not None and ticket.expert.layer == 1 for ticket in begun)
        for ticket in begun:
            pager.transfer.run(ticket)
        waiting = {table.id_of[flat] for flat in core.ahead}
        assert waiting and {expert.layer for expert in waiting} == {1}
        uses = [table.uses[table.flat(expert)] for expert in (*(ticket.expert for ticket in begun), *waiting)]
        assert min(uses[:2]) >= max(uses[2:])
    unwanted = begun[0].expert
    wanted = [e for e in range(8) if e != unwanted.expert and ExpertId(1, e) not in waiting]
    wasted = pager.metrics.snapshot().total("wasted_prefetch_bytes")
    with pager.demand(1, wanted) as demand:
        assert not waiting & {table.id_of[flat] for flat in core.ahead}, "the router has spoken"
        slab = table.slab_of[table.flat(unwanted)]
        assert slab < 0 or table.streamed[slab], "what came in vain leaves first"
        assert list(lent_by(demand, 1)) == wanted
    assert pager.metrics.snapshot().total("wasted_prefetch_bytes") > wasted
    pager.close()
    pager.check_integrity()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_the_copies_of_a_passs_first_layer_begin_with_the_pass(monkeypatch, phase):
    monkeypatch.setattr(Always, "begin_pass", lambda self, *given: setattr(self, "verdict", Verdict.STREAMED) or 4)
    monkeypatch.setattr(residency, "Streaming", Always)
    pager = make_pager(NumberStore([8] * 3, [0] * 3), [12], threads=0)
    (table,), in_order = pager.tables, phase is Phase.PREFILL
    for _ in range(2):
        pager.begin_step(phase)
        for layer in range(3):
            with pager.demand(layer, list(range(8)), keep=set() if in_order else None) as demand:
                list(lent_by(demand, layer, in_order))
    pager.begin_step(phase)
    absent = np.flatnonzero(table.slab_of[:8] < 0).tolist()
    ticket = pager.transfer.take()
    assert absent and ticket is not None and ticket.expert.layer == 0
    assert ticket.expert.expert == absent[0] or not in_order, "prompts are computed by id"
    pager.transfer.run(ticket)
    pager.close()
    pager.check_integrity()


# -- answers
@pytest.mark.budget(4)
def test_answers_of_streamed_passes_have_the_same_bits_and_say_so(seen, always):  # noqa: F811
    with vismoe.load(**LOADED) as engine:
        plain = Always.begin_pass
        Always.begin_pass = Streaming.begin_pass
        requests = [(messages, {**options, "max_tokens": 7}) for messages, options in REQUESTS]
        try:
            alone = [said(engine, messages, **options, reuse=False)[0] for messages, options in requests]
        finally:
            Always.begin_pass = plain
        replies = [engine.chat(messages, **options, reuse=False) for messages, options in requests]
        assert ["".join(reply) for reply in replies] == alone
        engine.check_integrity()
    passes = [one for reply in replies for one in reply.figures.passes]
    assert np.mean([one.streamed for one in passes]) > 0.5
    assert {one.rows > 1 for one in passes if one.streamed} == {True, False}
    assert sum(reply.figures.to_json()["cache"]["streamed"] for reply in replies) > 0
    assert equal(seen, 20)
