"""Run by test_gpu_kernels.py: decode passes as CUDA graphs, on a GPU, or simulated with interpreted programs.

They are to have the bits of passes without graphs, whatever is resident and whichever cache they are for.
"""

import gc
import random
import weakref
from functools import cache

import pytest
import simulated_graphs
import tiny_models
import torch
from gpu_kernels import DEVICE, load
from gpu_kernels import wide_tiles as wide_tiles
from searching import SEARCHING
from transformers.utils import output_capturing

import vismoe
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.forms import forms_of
from vismoe.models.load import opening, runtime
from vismoe.models.moe import attention, decode_graph
from vismoe.models.moe.captured_decoder import CapturedDecoder, CudaGraphs
from vismoe.models.moe.compute import FastExperts
from vismoe.models.moe.decode_graph import is_served, serve_decode_graphs
from vismoe.models.moe.experts_call import ExpertsCall
from vismoe.models.visual import growing_cache
from vismoe.paging.miss import Rates, Ways
from vismoe.paging.pager import Pager
from vismoe.paging.residency import Queued
from vismoe.paging.transfer import DiskMover, EmulatedLinkMover
from vismoe.types import ExpertId

WARM, STEPS = 1, 5
ON_GPU = DEVICE.type == "cuda"
GRAPHS = CudaGraphs if ON_GPU else simulated_graphs.SimulatedGraphs
WAITS = {"misses": "wait"} if ON_GPU else {}  # what the CPU computes rounds otherwise


@pytest.fixture(autouse=True)
def recorded_programs(monkeypatch):
    monkeypatch.setattr(decode_graph, "WARM_PASSES", WARM)
    if not ON_GPU:
        simulated_graphs.install(monkeypatch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("graphs"), {}
    for family in ("qwen3_moe", "qwen3_vl_moe"):
        found[family] = tiny_models.without_windows(tiny_models.save(family, folder / family, dtype=torch.bfloat16))
    found["sliding"] = tiny_models.save("qwen3_vl_moe", folder / "sliding", dtype=torch.bfloat16)
    return found


class Served:
    """A model whose decoder is captured, or not; `replays` are counted."""

    def __init__(self, checkpoints, family="qwen3_moe", graphs=True, **settings):
        self.about, self.made, self.replays, self.family = [], [], 0, family
        self.model = load(checkpoints[family], context=64, **{**WAITS, **settings})  # few chunks of attention
        self.runtime = vismoe.runtime_of(self.model)
        if not ON_GPU:
            assert attention.group_queries(self.model) is None
        for module in filter(is_served, self.model.modules()):
            del module.forward
        if graphs:
            serve_decode_graphs(self.model, self.runtime.context, self.about.append, self._graphs)

    def _graphs(self, device):
        self.made.append(GRAPHS(device))
        return self.made[-1]

    def all_resident(self):
        self.runtime.pager.fill(1)  # as it is with a GPU
        self.logits(1, 2)
        while self.runtime.pager.addresses() is None:
            pass

    @property
    def graphs(self):
        return next(vars(module)["forward"].args[1] for module in self.model.modules() if is_served(module))

    @torch.inference_mode()
    def logits(self, tokens=5, steps=STEPS) -> torch.Tensor:
        family = self.family if self.family in tiny_models.ZOO else "qwen3_vl_moe"
        inputs = {name: t.to(DEVICE) for name, t in tiny_models.prompt(family, tokens, dtype=torch.bfloat16).items()}
        return torch.stack(tiny_models.greedy(self.model, inputs, steps).logits, dim=1).cpu()


@pytest.fixture(scope="module")
def plain(checkpoints):
    """Logits without graphs, by family, tokens and steps."""
    models = cache(lambda family: Served(checkpoints, family, graphs=False, memory="20%"))
    return cache(lambda family="qwen3_moe", tokens=5, steps=STEPS: models(family).logits(tokens, steps))


@pytest.fixture
def replays(monkeypatch):
    """How often a pass was replayed, not for comparison."""
    found, replay = [], CapturedDecoder.replay

    def counted(decoder, given, *experts, **named):
        found.append(replay(decoder, given, *experts, **named) and not experts)
        return found[-1] or bool(experts)

    monkeypatch.setattr(CapturedDecoder, "replay", counted)
    return lambda: sum(found)


@pytest.mark.budget(30)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("memory", ["100%", "20%"])
def test_graphs_have_the_bits_of_passes_without_them(family, memory, checkpoints, plain, replays):
    """All resident: one graph; few slabs: for each layer of experts two more. Another prompt goes through the same."""
    served = Served(checkpoints, family, memory=memory)
    layers, passes = len(served.runtime.pager.inventory.layers), WARM + 1
    if memory == "100%":
        served.all_resident()
        passes -= served.graphs._passes
    for number, tokens in enumerate((5, 9)):
        assert torch.equal(served.logits(tokens), plain(family, tokens)), tokens
        assert replays() == (STEPS - 1) * (1 + number) - passes, "every pass but the first ones is replayed"
    about = "one CUDA graph for a token" if memory == "100%" else f"{layers + 1} CUDA graphs for a token, between its experts"
    assert served.about == [about]
    assert ON_GPU or len(served.made[0].made) == (1 if memory == "100%" else 2 * layers + 1)
    served.runtime.pager.check_integrity()


@pytest.mark.budget(20)
def test_layers_that_are_served_in_one_step_have_the_same_bits(checkpoints, plain, monkeypatch):
    """Without a GPU the disk is read in place of copies that a device queues."""
    if not ON_GPU:
        monkeypatch.setattr(DiskMover, "can_queue", lambda mover, *given: True)
        monkeypatch.setattr(DiskMover, "queue_all", read_all)
    served = Served(checkpoints, memory="20%", lookahead="none")
    pager, made = served.runtime.pager, []
    monkeypatch.setattr(pager, "at_once", lambda *given: made.append(Pager.at_once(pager, *given)) or made[-1])
    at_once = 0
    for tokens in (5, 9) * 5:  # a layer is served so when its experts once came together, and were read from the disk
        assert torch.equal(served.logits(tokens), plain(tokens=tokens))
        at_once = sum(out is not None for out in made)
        if at_once >= len(pager.inventory.layers) * (STEPS - 2):
            break
    assert at_once >= len(pager.inventory.layers) * (STEPS - 2), (at_once, len(made))
    pager.check_integrity()


def read_all(mover, geometry, experts, slabs, pool):
    """Of one geometry, as the models here have."""
    of = [ExpertId(layer.index, e) for layer in mover._stores[0].inventory.layers for e in range(layer.num_experts)]
    nbytes = sum(mover._stores[0].read(of[flat], pool.record(slab)) for flat, slab in zip(experts.tolist(), slabs.tolist()))
    return Queued(0.0, 0.0, nbytes)


class QueueingLink(EmulatedLinkMover):
    """It brings records at once, as far as what is queued behind them can tell."""

    def can_queue(self, geometry, experts=None):
        return experts is None or self.hosts[0].places_for_good(geometry, experts) is not None

    def queue_all(self, geometry, experts, slabs, pool):
        host = self.hosts[0]
        for slab, place in zip(slabs.tolist(), host.places_for_good(geometry, experts).tolist()):
            pool.alias(slab, host.pools[geometry], place)
        return Queued(0.0, 0.0, len(slabs) * pool.record_bytes[0])


@pytest.mark.budget(20)
def test_the_cpu_computes_misses_of_a_step_and_all_are_added_in_ascending_order(checkpoints, plain, monkeypatch):
    """The sums are compared bit by bit; what the CPU computes rounds otherwise, so the logits are only near those of the GPU."""
    monkeypatch.setattr(runtime, "EmulatedLinkMover", QueueingLink)
    link = {"misses": "auto"} if ON_GPU else {"emulated_link_bytes_per_s": 1e12}
    served = Served(checkpoints, memory="20%", lookahead="none", **link)
    if not ON_GPU:
        experts = served.runtime.configuration.experts
        kernels = opening._kernels(forms_of(served.model, experts.inventory), experts.inventory, experts.formats)
        served.runtime.context.serving.backend.host = FastExperts(experts.inventory, kernels)
    pager, end, of = served.runtime.pager, ExpertsCall.end, set()
    pager.core.ways, pager.ways = Ways("auto", (Rates(1.0, 1.0),), in_steps_only=True), None
    monkeypatch.setattr(Ways, "in_step", lambda ways, geometry, misses, *given: misses // 2)  # whatever is measured

    def compared(call):
        out, on_host, below = end(call), call.on_host, call.below
        if below is None:
            return out
        ids, (parts, tiles, _) = call.ids.flatten().tolist(), on_host.parts
        of.add(len(below))
        assert tiles[2].tolist() == [int(expert not in below.experts) for expert in ids]
        expected = torch.zeros(out.shape[1])
        for expert in sorted(ids):
            rows = on_host.rows if expert in below.experts else parts.cpu()
            expected += rows[ids.index(expert)]
        assert torch.equal(out[0].cpu(), expected.to(out.dtype))
        return out

    monkeypatch.setattr(ExpertsCall, "end", compared)
    for tokens in (5, 9) * 3:
        found = served.logits(tokens)[:, : 2 + WARM]  # greedy tokens may part later
        assert (found - plain(tokens=tokens)[:, : 2 + WARM]).abs().max() < 0.1 * plain(tokens=tokens).std()
    counts = pager.metrics.snapshot()
    assert of and counts.total("computed_on_host") >= len(of) and counts.total("evictions")
    assert "CUDA graphs for a token" in served.about[0]
    pager.check_integrity()


@pytest.mark.parametrize("seed", range(2 if SEARCHING else 1))
def test_experts_that_do_not_come_together_are_computed_between_the_graphs(seed, checkpoints, plain, replays, monkeypatch):
    """Some of a layer's may be on their way, or computed by the CPU; here it is drawn which. The first ones have no graph."""
    served = Served(checkpoints, memory="20%")
    draw, whole, asked = random.Random(seed), ExpertsCall.whole, []

    def sometimes(call, group):
        asked.append(len(asked) == 3 or (len(asked) > 3 and draw.random() < 0.5))
        return whole(call, group) if asked[-1] else None

    monkeypatch.setattr(ExpertsCall, "whole", sometimes)
    assert torch.equal(served.logits(steps=7), plain(steps=7)) and replays()
    assert len(set(asked)) == 2


def test_graphs_hold_no_request_no_model_and_nothing_of_an_earlier_plan(checkpoints, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    (graphs,), context = served.runtime.context.captured, served.runtime.context
    gc.collect()
    assert replays() and graphs._captured._held and not any(memory() is not None for memory in graphs._captured._held)
    context.stop_serving()
    assert graphs._captured is None
    model, served.model, served.runtime = weakref.ref(served.model), None, None
    del graphs, context
    gc.collect()
    assert model() is None


def test_layers_with_a_sliding_window_are_not_captured(checkpoints, replays):
    served = Served(checkpoints, "sliding", memory="20%")
    served.logits()
    assert served.about == ["no CUDA graph: there is a DynamicSlidingWindowLayer in its cache"] and not replays()


def test_a_cache_that_grows_and_a_hook_that_listens_send_passes_through_the_modules(checkpoints, plain, replays, monkeypatch):
    monkeypatch.setattr(growing_cache, "GROWTH_TOKENS", 3)
    served = Served(checkpoints, memory="20%")
    assert torch.equal(served.logits(steps=7), plain(steps=7))
    grown = replays()
    assert grown == 7 - 1 - WARM - 1
    heard = []
    hook = served.model.model.layers[1].self_attn.register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(served.logits(), plain()) and len(heard) == STEPS and replays() == grown
    hook.remove()
    assert torch.equal(served.logits(), plain()) and replays() > grown


def test_one_graph_that_was_queued_before_the_host_saw_a_hook_leaves_no_trace(checkpoints, plain, replays):
    """Neither in the cache nor in the counters, which count the pass before while the device computes."""
    served = Served(checkpoints, memory="100%")
    served.all_resident()
    served.logits()
    metrics, before = served.runtime.pager.metrics, replays()
    demanded = metrics.snapshot().total("hits")
    assert torch.equal(served.logits(), plain()) and replays() == before + STEPS - 1
    each = metrics.snapshot().total("hits") - demanded
    heard = []
    hook = served.model.model.layers[1].self_attn.register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(served.logits(), plain()) and len(heard) == STEPS and replays() == before + STEPS - 1
    hook.remove()
    assert torch.equal(served.logits(), plain()) and replays() == before + 2 * (STEPS - 1)
    assert metrics.snapshot().total("hits") == demanded + 3 * each > demanded


def test_hidden_states_that_are_asked_for_come_from_the_modules(checkpoints, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    before = replays()
    assert before
    with torch.inference_mode():
        ids = torch.randint(5, 400, (1, 4), device=DEVICE)
        cache = cache_in(served.model(input_ids=ids, use_cache=True))
        asked = served.model(input_ids=ids[:, :1], **{CACHE: cache}, use_cache=True, output_hidden_states=True)
    assert len(asked.hidden_states) == served.model.config.num_hidden_layers + 1 and replays() == before
    assert not output_capturing._active_collector.get()


@pytest.mark.parametrize(
    ("memory", "why"), [("20%", "the input of the experts of MoE layer 0 has other bits"), ("100%", "its output has other bits")]
)
def test_what_differs_from_the_pass_before_is_not_replayed(memory, why, checkpoints, plain, replays, monkeypatch):
    """A captured pass with other numbers, here of another scale in attention. The cache has what the pass before wrote."""
    attend = CapturedDecoder.attend
    monkeypatch.setattr(
        CapturedDecoder, "attend", lambda decoder, module, q, k, v, options: attend(decoder, module, q, k, v, {"scaling": 0.5})
    )
    served = Served(checkpoints, memory=memory)
    if memory == "100%":
        served.all_resident()
    assert torch.equal(served.logits(steps=7), plain(steps=7)) and not replays()
    assert served.about == [f"no CUDA graph: {why}"]


def test_a_prompt_of_one_token_goes_through_the_modules(checkpoints, plain, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    before = replays()
    assert torch.equal(served.logits(tokens=1, steps=1), plain(tokens=1, steps=1)) and replays() == before


def test_a_decoder_that_was_changed_is_captured_again(checkpoints, plain, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    before, attention_of = replays(), served.model.model.layers[0].self_attn
    forward = attention_of.forward
    attention_of.forward = lambda *given, **named: forward(*given, **named)  # as the first pass of several sequences does
    assert torch.equal(served.logits(), plain()) and replays() == before + STEPS - 1 - 1 - WARM - 1
    assert len(served.about) == 2
    weight = served.model.model.norm.weight
    with torch.no_grad():
        weight.data = weight.data.clone()  # as a model that is moved away and back
    assert torch.equal(served.logits(), plain()) and len(served.about) == 3


@torch.inference_mode()
def test_a_padded_sequence_keeps_its_mask(checkpoints, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    before = replays()
    ids = torch.randint(5, 400, (1, 6), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]], device=DEVICE)
    steps = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    plain = Served(checkpoints, graphs=False, memory="20%").model
    for skipped, replayed in ((0, 0), (2, STEPS - 1)):
        given = {"input_ids": ids[:, skipped:], "attention_mask": mask[:, skipped:]}
        answer = served.model.generate(**given, **steps)
        assert torch.equal(answer, plain.generate(**given, **steps))
        assert replays() == before + replayed, "the padded one is not replayed"
        assert served.graphs._hid == (not replayed), "and not tried for each token"


def test_passes_in_another_mode_of_inference_are_replayed_too(checkpoints, plain, replays):
    served = Served(checkpoints, memory="20%")
    served.logits()
    before = replays()
    inputs = {name: t.to(DEVICE) for name, t in tiny_models.prompt(served.family, 5, dtype=torch.bfloat16).items()}
    with torch.no_grad():
        logits = torch.stack(tiny_models.greedy(served.model, inputs, STEPS).logits, dim=1).cpu()
    assert torch.equal(logits, plain()) and replays() == before + STEPS - 1


def test_a_decoder_that_reads_token_ids_otherwise_is_not_replayed(checkpoints, replays, monkeypatch):
    """Captured is what it does with a token's embedding."""
    served = Served(checkpoints, memory="20%")
    decoder = type(served.model.model)
    forward = decoder.forward

    def doubled(module, input_ids=None, inputs_embeds=None, **given):
        embedded = inputs_embeds if input_ids is None else 2 * module.embed_tokens(input_ids)
        return forward(module, inputs_embeds=embedded, **given)

    monkeypatch.setattr(decoder, "forward", doubled)
    served.logits()
    assert served.about == ["no CUDA graph: the input of the experts of MoE layer 0 has other bits"] and not replays()


def test_a_pass_that_cannot_be_captured_says_why(checkpoints, plain, replays, monkeypatch):
    served = Served(checkpoints, memory="20%")
    norm = served.model.model.layers[0].input_layernorm
    forward = norm.forward

    def reads(x):
        float(x.sum())  # the host waits for a number
        return forward(x)

    monkeypatch.setattr(norm, "forward", reads)
    assert torch.equal(served.logits(), plain()) and not replays()
    assert served.about == ["no CUDA graph: the host waits for aten.item"] or "scalar_dense" in served.about[0]
    assert torch.rand(3, device=DEVICE).isfinite().all()
