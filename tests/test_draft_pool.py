"""Drafts out of a copy of the experts: the bits of the model in that format, unnoticed by the experts that serve."""

import copy
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from searching import examples
from transformers import CONFIG_MAPPING

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import BudgetError, CheckpointError, ConfigError, ContextError, UnsupportedModelError
from vismoe.metrics import COUNTERS, PHASES
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.load import opening, runtime
from vismoe.models.load.opening import arrange_experts
from vismoe.models.load.preview import preview
from vismoe.models.moe.draft_pool import drafted_layers
from vismoe.paging.pager import Pager
from vismoe.store.packed import store_beside
from vismoe.types import Format, Phase

PROMPT = torch.arange(5, 30)[None]
FAMILIES = [
    "qwen3_vl_moe",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
    "dots3_note",
]  # plain, shared, biased, other routers, a tower's
NEEDS = {"dots3_note": pytest.mark.skipif("dots3_note" not in CONFIG_MAPPING, reason="this transformers has no dots3_note")}


def packed(folder: Path, family: str = "qwen3_moe") -> Path:
    tiny_models.save(family, folder, dtype=torch.bfloat16)
    assert main(["pack", str(folder), "--formats", "int8,int4,int2"]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return packed(tmp_path_factory.mktemp("drafts"))


class Promises(list):
    """What draft passes promised, instead of copies of it: (layer, experts `[T, K]`, weights `[T, K]`)."""

    def __call__(self, layer: int, experts: np.ndarray, weights: np.ndarray) -> None:
        self.append((layer, experts.copy(), weights.copy()))


def load(folder: Path, **settings):
    config = VisMoEConfig(**{"memory": "40%", "kernels": "fast", "deterministic": True, "context": 128, **settings})
    with pytest.MonkeyPatch.context() as patch:  # copies are made by the thread that waits: which slab comes next is no race
        patch.setattr(runtime, "Pager", lambda *args, **options: Pager(*args, **{**options, "threads": 0}))
        model = tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()
    vismoe.runtime_of(model).pager.promise = Promises()
    return model


def held(cache) -> list[torch.Tensor]:
    """Every tensor of a cache."""
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in tensors]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


@torch.inference_mode()
def drafts_like(drafting, other, batch: int = 1, steps: tuple[int, ...] = (1, 1, 3, 1)) -> torch.Tensor:
    """Passes of so many tokens out of the draft pool, behind a prompt, with the bits of `other` -> the first logits."""
    context = vismoe.runtime_of(drafting).context
    out = drafting(PROMPT.expand(batch, -1).contiguous(), use_cache=True)
    cache, others, first = cache_in(out), copy.deepcopy(cache_in(out)), None
    for tokens in steps:
        following = out.logits[:, -1:].argmax(-1).expand(-1, tokens).contiguous()
        with context.drafting():
            out = drafting(following, use_cache=True, **{CACHE: cache})
        theirs = other(following, use_cache=True, **{CACHE: others})
        assert torch.equal(out.logits, theirs.logits)
        assert_same(held(cache), held(others))
        first = out.logits if first is None else first
    return first


# ------------------------------------------------------------------ the bits of the format
@pytest.mark.parametrize("kernels", ["fast", "torch"])
@pytest.mark.parametrize("format", ["int4", "int2"])
def test_a_draft_pass_has_the_bits_of_the_model_in_that_format(folder, format, kernels):
    model, other = load(folder, draft="self", draft_format=format, kernels=kernels), load(folder, format=format, kernels=kernels)
    drafted = drafts_like(model, other)
    drafts = vismoe.runtime_of(model).drafts
    layers = drafts.inventory.layers
    assert (
        drafts.format == format and drafts.nbytes == sum(n.num_experts for n in layers) * drafts.inventory.layouts[0].record_bytes
    )
    assert vismoe.runtime_of(model).backends["drafts"].endswith(f"drafts (self, {drafts.about})")
    with torch.inference_mode():
        out = model(PROMPT, use_cache=True)
        exact = model(out.logits[:, -1:].argmax(-1), **{CACHE: cache_in(out)}).logits
    assert not torch.equal(drafted, exact)
    drafts_like(model, other, batch=3, steps=(1, 1))


@pytest.mark.parametrize("family", [pytest.param(family, marks=NEEDS.get(family, ())) for family in FAMILIES])
def test_so_it_has_in_other_families(family, tmp_path):
    packed(tmp_path, family)
    usual = {"kernels": "auto", "memory": "60%"}
    drafts_like(load(tmp_path, draft="self", **usual), load(tmp_path, format="int4", **usual), steps=(1, 1))


@NEEDS["dots3_note"]
def test_a_towers_experts_are_not_copied(tmp_path):
    packed(tmp_path, "dots3_note")
    drafts, plan = (found := vismoe.runtime_of(load(tmp_path, draft="self", kernels="auto", memory="60%"))).drafts, found.plan
    layers, drafted = drafts.inventory.layers, drafted_layers(drafts.inventory)
    assert 0 < len(drafted) < len(layers)
    assert drafts.nbytes == sum(layer.num_experts * drafts.inventory.layout(layer.index).record_bytes for layer in drafted)
    assert plan.bytes_of("draft pool (int4)") == drafts.nbytes


def test_a_layer_promises_what_its_router_chose(folder):
    model = load(folder, draft="self")
    found, chosen = vismoe.runtime_of(model), []
    for _, module in opening.expert_modules(model):
        module.register_forward_pre_hook(lambda _, given: chosen.append(given[1:]))
    with torch.inference_mode():
        cache = cache_in(model(PROMPT, use_cache=True))
        chosen.clear()
        with found.context.drafting():
            model(torch.tensor([[7, 8]]), **{CACHE: cache})
    promises = found.pager.promise
    assert [layer for layer, _, _ in promises] == list(range(len(chosen))) and chosen
    for (_, experts, weights), (index, factors) in zip(promises, chosen, strict=True):
        assert (experts.dtype, weights.dtype) == (np.int64, np.float32)
        assert np.array_equal(experts, index.numpy()) and np.array_equal(weights, factors.float().numpy())


# ------------------------------------------------------------------ and nothing else
def state(found, drafted: bool) -> dict[str, np.ndarray]:
    """Everything that decides or is counted about the experts that serve, but for seconds."""
    found.pager.check_integrity()
    counted = [i for i, name in enumerate(COUNTERS) if not name.endswith("seconds")]
    values = found.metrics.snapshot().values
    assert values[PHASES.index(Phase.DRAFT)].any() == drafted
    core, table = found.pager.core, found.pager.tables[0]
    numbers = [core.tick, core.running_layer, core.misses_this_step, core.misses_last_step, core.misses_this_layer]
    arrays = {name: value.copy() for name, value in vars(table).items() if isinstance(value, np.ndarray)}
    others = [PHASES.index(phase) for phase in PHASES if phase is not Phase.DRAFT]
    return arrays | dict(
        values=values[others][:, :, counted],
        core=np.array(numbers),
        demanded=found.metrics.demanded,
        missed=found.metrics.missed,
    )


class Recorder:
    """Keeps what a trace would."""

    def __init__(self):
        self.seen = []

    def step(self, phase, kinds):
        self.seen.append((phase, kinds.tolist()))

    def layer(self, layer, expert_ids, *more):
        self.seen.append((layer, expert_ids.tolist()))


@pytest.fixture(scope="module", params=["lfu", "lru"])
def twins(folder, request):
    return [load(folder, draft="self", eviction=request.param, lookahead="none") for _ in range(2)]


@runs(max_examples=examples(8), deadline=None)
@given(st.integers(1, 2), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.booleans(), st.integers(0, 2**31))
def test_the_experts_that_serve_do_not_notice_drafts(twins, batch, drafts, recorded, seed):
    """Between the passes of one of two equal models, drafts that are thrown away."""
    prompt = torch.randint(3, 500, (batch, 9), generator=torch.Generator().manual_seed(seed))
    for found in map(vismoe.runtime_of, twins):
        found.metrics._values[PHASES.index(Phase.DRAFT)] = 0
    told = [passes(model, prompt, drafts if number else [0] * len(drafts), recorded) for number, model in enumerate(twins)]
    for ours, theirs in zip(*(logits for logits, _ in told), strict=True):
        assert torch.equal(ours, theirs)
    assert told[0][1] == told[1][1] and bool(told[0][1]) == recorded
    ours, theirs = (state(vismoe.runtime_of(model), bool(number and any(drafts))) for number, model in enumerate(twins))
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name


@torch.inference_mode()
def passes(model, prompt: torch.Tensor, drafts: list[int], recorded: bool) -> tuple[list[torch.Tensor], list]:
    """(logits, what a recorder saw) of a prompt and of one token after each of so many drafted ones."""
    context, recorder = vismoe.runtime_of(model).context, Recorder()
    context.record_to(recorder if recorded else None)
    out = model(prompt, use_cache=True)
    logits, cache = [out.logits], cache_in(out)
    for count in drafts:
        following = logits[-1][:, -1:].argmax(-1)
        marked, token = copy.copy(cache), following
        marked.layers = [copy.copy(layer) for layer in cache.layers]
        with context.drafting():
            for _ in range(count):
                token = model(token, use_cache=True, **{CACHE: marked}).logits[:, -1:].argmax(-1)
        logits.append(model(following, use_cache=True, **{CACHE: cache}).logits)
    context.record_to(None)
    return logits, recorder.seen


@torch.inference_mode()
def test_drafts_ask_neither_the_pager_nor_the_lookahead(folder, monkeypatch):
    model = load(folder, draft="self", lookahead="gate")
    context = vismoe.runtime_of(model).context
    cache = cache_in(model(PROMPT, use_cache=True))
    asked = []
    for owner, names in ((context.serving.pager, ("begin_step", "demand", "without_demand", "look_ahead", "asked")),
                         (context.lookahead_inputs, ("begin_step", "at_layer", "at_resident_layer"))):  # fmt: skip
        for name in names:
            own = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *given, name=name, own=own, **more: asked.append(name) or own(*given, **more))
    with context.drafting():
        model(torch.tensor([[7]]), **{CACHE: cache})
    assert not asked
    model(torch.tensor([[7]]), **{CACHE: cache})
    assert {"begin_step", "demand", "at_layer"} <= set(asked)


def test_draft_passes_are_counted_apart(folder):
    model = load(folder, draft="self")
    found = vismoe.runtime_of(model)
    with torch.inference_mode():
        cache = cache_in(model(PROMPT, use_cache=True))
        before = found.metrics.snapshot()
        with found.context.drafting():
            for _ in range(2):
                model(torch.tensor([[7]]), **{CACHE: cache})
    happened = found.metrics.snapshot() - before
    per_phase = happened.to_json()["per_phase"]
    assert set(per_phase) == {"draft"} and per_phase["draft"]["steps"] == 2 * len(found.pager.inventory.layers)
    assert 0 < per_phase["draft"]["compute_seconds"] <= per_phase["draft"]["layer_seconds"]
    assert {name for name, value in per_phase["draft"].items() if value} == {"steps", "compute_seconds", "layer_seconds"}


@torch.inference_mode()
def test_what_no_draft_can_be_is_refused(folder):
    model = load(folder, draft="self")
    context = vismoe.runtime_of(model).context
    with context.drafting(), pytest.raises(UnsupportedModelError, match="outside of drafting"):
        model(PROMPT)
    cache = cache_in(model(torch.randint(3, 500, (1, 127)), use_cache=True))
    with context.drafting():
        model(torch.tensor([[7]]), **{CACHE: cache})
        with pytest.raises(ContextError, match="context of 128"):
            model(torch.tensor([[7]]), **{CACHE: cache})
    undrafted = load(folder)
    assert vismoe.runtime_of(undrafted).drafts is None and vismoe.runtime_of(undrafted).backends["drafts"] == "none"
    with pytest.raises(ConfigError, match="--draft self"), vismoe.runtime_of(undrafted).context.drafting():
        pass


def test_gradients_stop_at_drafts_as_they_do_at_experts(folder):
    model = load(folder, draft="self")
    with torch.no_grad():
        cache = cache_in(model(PROMPT, use_cache=True))
    with vismoe.runtime_of(model).context.drafting():
        out = model(torch.tensor([[7]]), **{CACHE: cache}).logits
    with pytest.raises(UnsupportedModelError, match="cannot be trained"):
        out.sum().backward()


# ------------------------------------------------------------------ settings, plan, changes
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"format": "int4"}, "so that guessing takes as long.*--draft-format int2"),
        ({"format": "int2"}, "so that guessing takes as long.*--draft ngram"),
        ({"format": "int8"}, None),
        ({"store": "none"}, "draft='self' with draft_format='int4': .*needs packed experts.*vismoe pack MODEL --formats int4"),
    ],
)
def test_a_copy_must_be_packed_and_smaller_than_the_experts(folder, settings, says):
    asked = Settings.of(**{"draft": "self", "memory": "40%", "kernels": "auto", **settings})
    if says is None:
        assert preview(folder, asked).bytes_of("draft pool (int4)") > 0
        return
    with pytest.raises(ConfigError, match=says):
        preview(folder, asked)


def test_a_store_without_the_format_says_how_to_pack_it(tmp_path):
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    assert main(["pack", str(tmp_path), "--formats", "lossless,int4"]) == 0
    assert preview(tmp_path, Settings.of(draft="self", memory="50%")).bytes_of("draft pool (int4)") > 0
    with pytest.raises(ConfigError, match=re.escape("holds lossless, int4. Fix: vismoe pack MODEL --formats int2")):
        preview(tmp_path, Settings.of(draft="self", draft_format="int2", memory="50%"))


def test_a_gpu_has_no_draft_pool_yet(folder):
    model = load(folder)
    inventory = vismoe.runtime_of(model).pager.inventory
    arranged = arrange_experts(model, inventory, Settings.of(draft="self"), torch.device("cpu"))
    assert arranged.draft.formats == (Format.INT4,) and "not packed yet" in arranged.draft.where
    with pytest.raises(ConfigError, match="--draft ngram"):
        arrange_experts(model, inventory, Settings.of(draft="self"), torch.device("cuda"))


def test_a_percentage_does_not_count_the_pool_and_a_budget_does(folder):
    def planned(**settings):
        return preview(folder, Settings.of(**{"kernels": "fast", "context": 128, **settings}))

    plain, drafting = planned(memory="50%"), planned(memory="50%", draft="self")
    pool = drafting.bytes_of("draft pool (int4)")
    assert pool > 0 and plain.slabs == drafting.slabs
    assert drafting.budget_bytes - plain.budget_bytes == drafting.total_bytes - plain.total_bytes >= pool
    enough = planned(memory=drafting.total_bytes, draft="self")
    assert enough.slabs == drafting.slabs and enough.total_bytes == drafting.total_bytes
    tight = planned(memory=drafting.total_bytes - drafting.bytes_of("expert pool") // 2, draft="self")
    assert tight.slabs < drafting.slabs and tight.bytes_of("draft pool (int4)") == pool
    with pytest.raises(BudgetError) as refused:
        planned(memory=plain.minimum_bytes + pool // 2, draft="self")
    assert refused.value.fix.startswith("--memory")


@pytest.mark.parametrize(("tokens", "rows"), [("auto", 8), (3, 4)])
@pytest.mark.parametrize("draft", ["ngram", "auto", "self"])
def test_rows_that_check_a_draft_are_planned_and_their_keys_and_values_are_not(folder, draft, tokens, rows):
    def planned(**settings):
        return preview(folder, Settings.of(**{"memory": "50%", "parallel": 1, **settings}))

    plain, drafting = planned(), planned(draft=draft, draft_tokens=tokens)
    assert drafting.bytes_of("logits") == rows * plain.bytes_of("logits")
    assert drafting.bytes_of("KV cache") == plain.bytes_of("KV cache")
    assert drafting.bytes_of("decode") > plain.bytes_of("decode")
    assert bool(drafting.bytes_of("draft pool (int4)")) == (draft == "self")
    assert planned(parallel=16).bytes_of("logits") == 16 * plain.bytes_of("logits")


def test_a_new_configuration_keeps_drops_or_reads_the_pool_anew(folder, monkeypatch):
    model = load(folder, draft="self", parallel=1)
    found, other = vismoe.runtime_of(model), load(folder, format="int2")
    reads = []
    monkeypatch.setattr(
        runtime, "filled_pools", lambda *given, own=runtime.filled_pools: reads.append(given[0].format) or own(*given)
    )

    def change(**settings) -> None:
        asked = dataclasses.replace(found.configuration.settings, **settings)
        found.reconfigure(model, found.configuration.with_settings(model, asked))
        found.pager.promise = Promises()

    buffers = [pool.buffer.data_ptr() for pool in found.drafts.pools]
    change(memory="60%")
    assert [pool.buffer.data_ptr() for pool in found.drafts.pools] == buffers and not reads
    change(draft_format="int2")
    drafts_like(model, other, steps=(1, 1))
    assert reads == ["int2"] and found.plan.bytes_of("draft pool (int2)") == found.drafts.nbytes
    kept = found.drafts.pools
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no slabs"):
        patch.setattr(runtime, "pools_of", lambda configuration, own=runtime.pools_of: once(configuration, own))
        failing = iter([RuntimeError("no slabs")])

        def once(configuration, own):
            for error in failing:
                raise error
            return own(configuration)

        change(memory="50%")
    found.pager.promise = Promises()
    assert found.drafts.pools == kept and found.refused == "no slabs"
    change(draft="none")
    assert found.drafts is None and found.configuration.stores.draft is None and found.backends["drafts"] == "none"
    with pytest.raises(ConfigError, match="policy='exact'"):
        change(draft="self", policy="importance")
    change(draft="self")
    drafts_like(model, other, steps=(1,))
    assert reads == ["int2", "int2"]


def test_a_damaged_record_is_found_when_the_pool_is_read(tmp_path):
    packed(tmp_path)
    (shard,) = [file for file in store_beside(tmp_path / "x").iterdir() if "int4" in file.name and file.stat().st_size > 50_000]
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"expert \d+ of MoE layer \d"):
        load(tmp_path, draft="self")
