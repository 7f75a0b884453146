"""The short way through layers whose experts are all resident: the same bits, counters and page table as by demands."""

import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from transformers import DynamicCache

import vismoe
from vismoe import VisMoEConfig
from vismoe.metrics import COUNTERS
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.load import runtime
from vismoe.models.moe.compute import LONG_PROMPT
from vismoe.models.moe.resident import ResidentLayers
from vismoe.models.moe.step_context import Interrupted
from vismoe.paging.pager import Pager
from vismoe.timeline import Timeline

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    tiny_models.save(FAMILY, folder, dtype=torch.bfloat16)
    return folder


def load(folder: Path, **more):
    config = VisMoEConfig(**{"kernels": "fast", "deterministic": True, "lookahead": "none", "memory": "100%", **more})
    with pytest.MonkeyPatch.context() as patch:  # copies are made by the thread that waits: which slab comes next is no race
        patch.setattr(runtime, "Pager", lambda *args, **options: Pager(*args, **{**options, "threads": 0}))
        return tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


@pytest.mark.parametrize(
    ("settings", "fills"),
    [
        ({}, True),
        ({"reads": "direct"}, True),
        ({"kernels": "torch"}, True),
        ({"deterministic": True}, False),
        ({"memory": "60%"}, False),
        ({"emulated_link_bytes_per_s": 1e9}, False),
    ],
)
def test_experts_that_all_have_a_slab_are_brought_in_before_a_token_asks(checkpoint, settings, fills, monkeypatch):
    monkeypatch.setattr(runtime, "FILLED_BYTES", 1)
    config = VisMoEConfig(**{"lookahead": "none", "memory": "100%", **settings})
    model = tiny_models.model_class(checkpoint).from_pretrained(checkpoint, dtype=torch.bfloat16, quantization_config=config)
    pager = vismoe.runtime_of(model).pager
    assert (pager.core.filling_at_once > 0) == fills
    end_s = time.monotonic() + 20
    while pager.addresses() is None and fills:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert (pager.addresses() is not None) == fills
    if fills:
        prompt = torch.randint(5, 90, (1, 12), generator=torch.Generator().manual_seed(2))
        model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        counts = pager.metrics.snapshot()
        assert counts.total("misses") == counts.total("stall_seconds") == counts.total("wasted_prefetch_bytes") == 0


def test_too_few_experts_to_wait_for_are_brought_in_as_they_are_demanded(checkpoint):
    model = load(checkpoint, deterministic=False)
    assert not vismoe.runtime_of(model).pager.core.filling_at_once


class Twin:
    """A model that takes the short way where it can, or (`short` False) never does. whole: one call computes decoder layers.
    straight: passes of one token run no code of transformers' between these (test_token_passes.py)."""

    def __init__(self, folder: Path, short: bool, whole: bool = False, straight: bool = False, **more):
        with pytest.MonkeyPatch.context() as patch:
            if not whole:
                patch.setattr(runtime, "serve_decoder_layers", lambda model: (0, 0))
            if not straight:
                patch.setattr(runtime, "serve_token_passes", lambda model: False)
            self.model = load(folder, **more)
        self.runtime = vismoe.runtime_of(self.model)
        self.context, self.pager = self.runtime.context, self.runtime.pager
        assert isinstance(self.context._short, ResidentLayers)
        self.shortly: list[bool] = []  # of each layer, whether it took that way
        own, shortly = self.context._short.run, self.shortly

        def run(*given):  # must not refer to this twin: threads hold it, and would keep the twin and its model
            out = own(*given)
            shortly.append(out is not None)
            return out

        self.context._short.run = run
        if not short:
            self.context._short = None

    @torch.inference_mode()
    def passes(self, prompts: torch.Tensor, steps: list[int], begun: bool = False) -> list[torch.Tensor]:
        """Logits of a prompt `[B, S]` and of steps of so many tokens each, with their positions. begun: with a cache from the
        start, as generate() gives it."""
        begins = {CACHE: DynamicCache(config=self.model.config.get_text_config())} if begun else {}
        out = self.model(prompts, use_cache=True, **begins)
        logits, cache = [out.logits], cache_in(out)
        for tokens in steps:
            following = logits[-1][:, -1].argmax(-1, keepdim=True).expand(-1, tokens).contiguous()
            at = torch.arange(tokens)[None] + cache.get_seq_length()
            given = {"position_ids": at.expand(len(prompts), -1), CACHE: cache}
            logits.append(self.model(following, use_cache=True, **given).logits)
        return logits

    def state(self) -> dict[str, np.ndarray]:
        """Everything that decides or is counted, but for seconds."""
        self.pager.check_integrity()
        values = self.pager.metrics.snapshot().values[
            :, :, [i for i, name in enumerate(COUNTERS) if not name.endswith("seconds")]
        ]
        core, table = self.pager.core, self.pager.tables[0]
        numbers = [core.tick, core.running_layer, core.misses_this_step, core.misses_last_step, core.misses_this_layer]
        arrays = {name: value.copy() for name, value in vars(table).items() if isinstance(value, np.ndarray)}
        return arrays | dict(
            values=values, core=np.array(numbers), demanded=self.pager.metrics.demanded, missed=self.pager.metrics.missed
        )


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.array_equal(array, other[name]), name


@pytest.fixture(scope="module", params=[("100%", "lfu"), ("100%", "lru"), ("60%", "lfu")], ids="-".join)
def twins(checkpoint, request) -> tuple[Twin, Twin]:
    memory, eviction = request.param
    return tuple(Twin(checkpoint, short, memory=memory, eviction=eviction) for short in (True, False))


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.lists(st.sampled_from([1, 1, 1, 4, 11]), max_size=9), st.integers(0, 2**31))
def test_everything_comes_out_as_by_demands(twins, batch, tokens, steps, seed):
    prompts = torch.randint(3, 500, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    short, long = twins
    for ours, theirs in zip(short.passes(prompts, steps), long.passes(prompts, steps), strict=True):
        assert torch.equal(ours, theirs)
    assert_same(short.state(), long.state())
    assert not steps or any(short.shortly)


def test_a_resident_layer_makes_no_demand_and_one_with_a_miss_does(checkpoint, monkeypatch):
    twin, demands = Twin(checkpoint, True), []
    prompts = torch.arange(3, 60)[None]
    twin.passes(prompts, [1, 1])
    demand = twin.pager.demand
    monkeypatch.setattr(twin.pager, "demand", lambda layer, *args: demands.append(layer) or demand(layer, *args))
    twin.passes(prompts, [1] * 4)
    layers = len(twin.pager.inventory.layers)
    assert demands == list(range(layers))  # those of the prompt
    table = twin.pager.tables[0]
    for slab in table.slab_of[table.slab_of >= 0].tolist():
        table.evict(slab)
        table.pool.give_back(slab)
    demands.clear()
    twin.passes(prompts[:, :2], [1])
    assert len(demands) > layers and twin.pager.metrics.snapshot().total("misses") > 0


def with_all_experts(twin: Twin) -> Twin:
    for seed in range(20):
        twin.passes(torch.randint(3, 500, (1, 100), generator=torch.Generator().manual_seed(seed)), [])
    assert twin.pager.addresses() is not None
    return twin


def test_short_prompts_demand_nothing_where_all_experts_stay(checkpoint, monkeypatch):
    twins, demands = [with_all_experts(Twin(checkpoint, short)) for short in (True, False)], []
    layers, most = len(twins[0].pager.inventory.layers), LONG_PROMPT * 12 // 2  # tokens: of 12 experts each chooses 2
    demand = twins[0].pager.demand
    monkeypatch.setattr(twins[0].pager, "demand", lambda layer, *args: demands.append(layer) or demand(layer, *args))
    for sequences, tokens, demanded in ((1, 57, []), (3, 40, []), (1, most - 1, []), (1, most, list(range(layers)))):
        demands.clear()
        prompts = torch.randint(3, 500, (sequences, tokens), generator=torch.Generator().manual_seed(tokens))
        assert all(map(torch.equal, *(twin.passes(prompts, [1, 11]) for twin in twins)))
        assert demands == demanded
    assert_same(*(twin.state() for twin in twins))


@pytest.mark.parametrize("whole", [True, False])
def test_a_short_prompt_can_be_cancelled_between_its_layers(checkpoint, whole, monkeypatch):
    twin, prompts = with_all_experts(Twin(checkpoint, True, whole)), torch.arange(3, 15)[None]
    before = twin.passes(prompts, [1], begun=True)
    ended, ends = [], twin.context.prompt_left
    monkeypatch.setattr(twin.context, "prompt_left", lambda layer: ended.append(layer) or ends(layer))
    monkeypatch.setattr(twin.context, "cancelled", lambda: len(ended) == 2)
    with pytest.raises(Interrupted):
        twin.passes(prompts, [1], begun=True)
    assert ended == [0, 1]
    monkeypatch.undo()
    assert all(map(torch.equal, twin.passes(prompts, [1], begun=True), before))


def test_a_guess_that_is_used_is_demanded(checkpoint):
    twin = Twin(checkpoint, True)
    twin.passes(torch.arange(3, 60)[None], [1])
    layer, table = twin.context._short._layers[0], twin.pager.tables[0]
    experts = twin.pager.inventory.layers[0].num_experts
    hidden, factors = torch.randn(1, 64, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    index, uses = torch.tensor([[1, 3]]), table.uses.copy()
    table.speculative[table.slab_of[3]] = True
    assert layer.run(hidden, index, factors, 1.0, 5) is None and np.array_equal(table.uses, uses)
    assert layer.run(hidden, torch.full((1, 2), experts), factors, 1.0, 5) is None  # sentinels only
    table.speculative[:] = False
    out, count = layer.run(hidden, index, factors, 1.0, 5)
    assert out.shape == hidden.shape and count == 2 and layer.demanded(2) == [1, 3] and table.uses.sum() == uses.sum() + 2


def test_an_interrupt_in_the_call_is_repaired(checkpoint, monkeypatch):
    twin, prompts = Twin(checkpoint, True), torch.arange(3, 60)[None]
    before = twin.passes(prompts, [1, 1])

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(twin.context._short._layers[1], "run", interrupted)
        twin.passes(prompts, [1, 1])
    twin.pager.check_integrity()
    assert all(map(torch.equal, twin.passes(prompts, [1, 1]), before))


@pytest.mark.parametrize("settings", [dict(kernels="torch"), dict(emulated_link_bytes_per_s=1e9)], ids=str)
def test_other_arithmetic_and_other_tiers_demand(checkpoint, settings):
    assert vismoe.runtime_of(load(checkpoint, **settings)).context._short is None


class Seen:
    """A recorder that counts layers."""

    layers = 0

    def step(self, phase, kinds):
        pass

    def layer(self, *args):
        self.layers += 1


def test_passes_that_are_recorded_demand(checkpoint):
    twin, recorder = Twin(checkpoint, True), Seen()
    twin.passes(torch.arange(3, 60)[None], [1])
    twin.context.record_to(recorder)
    twin.passes(torch.arange(3, 9)[None], [1, 1])
    assert recorder.layers == 3 * len(twin.pager.inventory.layers)


def test_the_timeline_shows_the_same_spans(checkpoint):
    spans = []
    for short in (True, False):
        twin = Twin(checkpoint, short)
        twin.passes(torch.arange(3, 60)[None], [1])
        twin.pager.timeline = Timeline()
        twin.passes(torch.arange(3, 60)[None], [1, 1])
        spans.append([(span.track, span.name, span.details) for span in twin.pager.timeline.spans])
    assert sorted(spans[0], key=str) == sorted(spans[1], key=str) and len(spans[0]) > 6
