"""Policies on whole models: what they compute equals an independent account of it, and they can be changed while a model runs.

The account of `importance` with skipped experts is plain transformers with eager attention: weights of choices that are not
critical are set to zero, by loops that read like the paper's equations.
"""

import contextlib
import gc
import math
import os
import shutil
import threading
import time

import numpy as np
import pytest
import tiny_models
import torch
from family_zoo import families
from PIL import Image

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.engine.engine import demo_model
from vismoe.errors import BudgetError, CheckpointError, ClosedError, ConfigError, InputError, TransferError
from vismoe.models.family.families import expert_modules
from vismoe.pools.pool import SlabPool
from vismoe.store.packed import PackedStore
from vismoe.types import Phase

DEMO = demo_model().parent / "images" / "demo.png"
RETENTION = 0.6


def ask(text="What is in the picture?"):
    return [{"role": "user", "content": [{"type": "image", "image": Image.open(DEMO)}, {"type": "text", "text": text}]}]


def said(engine, text="What is in the picture?", **options):
    reply = engine.chat(ask(text), max_tokens=10, **options)
    return "".join(reply), reply.figures


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The demo model with its experts in int4 and int2."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    shutil.copytree(demo_model(), folder)
    assert main(["pack", str(folder), "--formats", "int4,int2"]) == 0
    return folder


def load(packed, policy, **settings):
    return vismoe.load(packed, device="cpu", context=512, **{"memory": "45%", "policy": policy, **settings})


# ------------------------------------------------------------------ importance, against plain transformers
class Account:
    """Zeroes the weights of choices that are not critical, in the experts modules of a plain model."""

    def __init__(self, model, retention):
        self.least, self.asked, self.left = 2 * retention - 1, 0, 0
        modules = [module for _, module in expert_modules(model)]
        layers = [m for m in model.modules() if hasattr(m, "self_attn") and any(e in set(m.modules()) for e in modules)]
        self.attention = None
        for number, (layer, experts) in enumerate(zip(layers, modules, strict=True)):
            ratio = (1 - self.least) * (math.cos(math.pi * number / (len(modules) - 1)) + 1) / 2 + self.least
            layer.self_attn.register_forward_hook(self._attended)
            experts.register_forward_pre_hook(self._choose(ratio))

    def _attended(self, module, arguments, output):
        self.attention = output[1]  # [B, heads, queries, keys]

    def _choose(self, ratio):
        def choose(module, arguments):
            hidden, index, weights = arguments
            decoding = self.attention.shape[2] == 1
            critical = self._by_gate(index, weights, ratio) if decoding else self._by_load(index, weights, ratio)
            self.asked, self.left = self.asked + critical.numel(), self.left + int((~critical).sum())
            kept = torch.where(critical, weights, torch.zeros_like(weights))
            remaining = kept.sum(1, keepdim=True)
            scale = torch.where(remaining > 0, weights.sum(1, keepdim=True) / remaining, 1.0)
            return hidden, index, kept * scale

        return choose

    def _by_gate(self, index, weights, ratio):
        critical = torch.zeros_like(index, dtype=torch.bool)
        for token in range(len(index)):
            best = sorted(range(index.shape[1]), key=lambda choice: (-float(weights[token, choice]), int(index[token, choice])))
            critical[token, best[: math.ceil(ratio * index.shape[1] - 1e-9)]] = True
        return critical

    def _by_load(self, index, weights, ratio):
        attention = self.attention[0].mean(0)  # one sequence
        queries = attention.shape[0]
        last = range(max(0, queries - 64), queries)
        columns = [[float(attention[q, t]) for q in last] for t in range(queries)]  # 0 where t is masked, by a window too
        received = [sum(column) / max(1, sum(weight > 0 for weight in column)) for column in columns]
        hitters = sorted(range(queries), key=lambda t: (-received[t], t))[: math.ceil(0.2 * queries - 1e-9)]
        experts = sorted(set(index.flatten().tolist()))
        tokens = {e: [t for t in range(queries) if e in index[t].tolist()] for e in experts}
        mass = {e: float(weights[index == e].sum()) for e in experts}
        load = {e: sum(t in hitters for t in tokens[e]) for e in experts}
        best = sorted(experts, key=lambda e: (-load[e], -len(tokens[e]), -mass[e], e))
        return torch.isin(index, torch.tensor(best[: math.ceil(ratio * len(experts) - 1e-9)]))


def loaded(folder):
    config = VisMoEConfig(memory="50%", policy="importance", formats="16/0", retention=RETENTION)
    return tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "mixtral", "deepseek_v3"])
@torch.inference_mode()
def test_experts_that_are_not_critical_are_left_out_as_the_paper_says(family, tmp_path):
    tiny_models.save(family, tmp_path)
    plain = tiny_models.reference(tmp_path)
    plain.set_attn_implementation("eager")
    account = Account(plain, RETENTION)
    inputs = tiny_models.prompt(family, tokens=90)
    ours = loaded(tmp_path)
    torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits, rtol=1e-3, atol=1e-4)
    expected = plain.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    assert torch.equal(ours.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12), expected)
    counts = vismoe.runtime_of(ours).pager.metrics.snapshot()
    assert counts.total("skipped") == account.left > 0
    assert counts.total("computed_high") + counts.total("skipped") == account.asked


@torch.inference_mode()
def test_a_batch_changes_nothing_for_any_of_its_requests(tmp_path):
    """Each row is judged by itself, in prefill and in decode, whoever shares the batch."""
    tiny_models.save("qwen3_moe", tmp_path)
    model = loaded(tmp_path)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 490, (length,), generator=generator) for length in (70, 31, 12)]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    mask = (torch.arange(width) >= torch.tensor([width - len(row) for row in rows])[:, None]).long()
    together = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    for row, answer in zip(rows, together, strict=True):
        alone = model.generate(input_ids=row[None], do_sample=False, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(answer[width:], alone[0, len(row) :])


@torch.inference_mode()
def test_with_all_experts_critical_not_a_bit_changes(packed):
    with load(packed, "exact", kernels="torch") as engine:
        expected, _ = said(engine)
    with load(packed, "importance", formats="16/4", retention=1.0, kernels="torch") as engine:
        answer, figures = said(engine)
        assert answer == expected and figures.formats == {"raw": 1.0}


PAIRS = {"lossless/int8": "hotness", "16/4": "importance", "8/4": "hotness", "8/2": "importance", "4/2": "hotness+importance",
         "16/2": "hotness", "4/0": "importance"}  # fmt: skip


def test_every_pair_is_served_from_a_store_of_all_formats(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model(), folder)
    assert main(["pack", str(folder), "--formats", "lossless,int8,int4,int2"]) == 0
    with load(folder, "exact", memory="70%", deterministic=True) as engine:
        answer, _ = said(engine)
        for formats, policy in PAIRS.items():
            engine.change(policy=policy, formats=formats, retention=0.6)
            high, low = str(engine.precision.formats).split("/")
            found, figures = said(engine)
            assert set(figures.formats) <= {"lossless" if high == "raw" else high, low}
            assert sum(figures.formats.values()) == pytest.approx(1)
            assert found.split()[:3] == answer.split()[:3], (formats, found)  # no format garbles what the model says
            engine.check_integrity()


def test_formats_that_are_computed_are_those_that_are_said(packed):
    """Wanted in int4 and there in int4, or better; never worse. The shares add up, and they are counted once."""
    with load(packed, "importance", formats="16/2", memory="30%", lookahead="gate") as engine:
        for text in ("What is in the picture?", "How many objects are there?"):
            _, figures = said(engine, text)
            assert set(figures.formats) == {"raw", "int2"} and sum(figures.formats.values()) == pytest.approx(1)
            assert figures.formats["raw"] >= 0.7, "three quarters of the experts are critical, and each is their heaviest"
            assert figures.precision.retention == 0.75 and figures.counters.total("served_lower") == 0
        computed = engine.metrics.computed_in
        assert computed[Phase.DECODE, "raw"] > computed[Phase.DECODE, "int2"] > 0
        assert set(np.unique(engine.formats())) <= {0, 1, 2}
        engine.check_integrity()


@pytest.mark.budget(4)
@torch.inference_mode()
@pytest.mark.parametrize(("formats", "retention"), [("4/0", 0.75), ("4/2", 1.0)])
def test_misses_computed_below_change_no_bit_of_a_policy(packed, formats, retention):
    """Whoever is absent is wanted in one format, whichever way it is served; in these two, also whoever is there."""
    with vismoe.load(packed, device="cpu", context=512, memory="100%") as engine:
        inputs = engine.processor.apply_chat_template(ask(), add_generation_prompt=True, tokenize=True, return_dict=True,
                                                      return_tensors="pt")  # fmt: skip
    found, below = {}, {}
    for misses in ("wait", "cpu", "auto"):
        link = dict(emulated_link_bytes_per_s=2e7, misses=misses)
        with load(packed, "importance", formats=formats, retention=retention, memory="10%", kernels="fast", **link) as engine:
            out = engine.model.generate(
                **inputs, do_sample=False, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
            )
            counts = vismoe.runtime_of(engine.model).pager.metrics.snapshot()
            found[misses], below[misses] = torch.cat(out.logits), counts.total("computed_on_host")
            assert counts.total("misses") >= below[misses]
            engine.check_integrity()
    assert torch.equal(found["wait"], found["cpu"]) and torch.equal(found["wait"], found["auto"])
    assert below["wait"] == 0 < below["auto"] and below["cpu"] > 0


def test_wanted_in_less_precision_a_miss_is_computed_below_in_less(packed):
    with load(
        packed, "importance", formats="4/2", retention=0.6, memory="10%", misses="cpu", emulated_link_bytes_per_s=2e7
    ) as engine:
        _, figures = said(engine)
        assert sum(figures.formats.values()) == pytest.approx(1) and figures.formats["int2"] > 0.2
        assert figures.counters.total("computed_on_host") > 0 and figures.counters.total("served_lower") == 0
        engine.check_integrity()


# ------------------------------------------------------------------ hotness
def test_under_hotness_nobody_ever_waits_and_the_plan_holds(packed):
    with load(packed, "hotness", formats="16/4") as engine:
        slabs, quota = engine.plan.slabs[0], np.array(engine.plan.hot_quota)
        assert slabs == quota.sum() + engine.plan.transient[0] and slabs + engine.plan.low_slabs[0] >= engine.plan.total_experts
        for text in ("What is in the picture?", "How many objects are there?", "What is printed?"):
            _, figures = said(engine, text)
            assert figures.counters.total("misses") == figures.counters.total("stall_seconds") == 0
            formats = engine.formats()
            assert (formats > 0).all(), "everybody is resident"
            assert (formats == 1).sum() <= slabs
            engine.check_integrity()
        assert engine.metrics.snapshot().total("promotions") > 0
        pools = engine._runtime.pager.tables[0].pool.pools
        held = sum(pool.nbytes for pool in pools)
        assert held == engine.plan.bytes_of("expert pool raw") + engine.plan.bytes_of("expert pool int4")


def test_what_was_hot_is_hot_again_after_a_restart(packed, tmp_path):
    file = tmp_path / "hot.npz"
    with load(packed, "hotness", formats="16/4", deterministic=True, hotness_state=str(file)) as engine:
        said(engine), said(engine, "How many objects are there?")
        hot, promotions = engine.formats() == 1, engine.metrics.snapshot().total("promotions")
        targets = engine._runtime.context.serving.chooser.precision.targets.copy()
    assert file.is_file() and promotions > 0
    with load(packed, "hotness", formats="16/4", deterministic=True, hotness_state=str(file)) as engine:
        warm = engine.formats() == 1
        overlap = (warm & targets).sum() / targets.sum()
        assert overlap >= 0.8, "the hot set is there before the first token"
        assert warm.sum() == hot.sum()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="delete it"):
        load(packed, "hotness", formats="16/4", hotness_state=str(file))


def test_deterministic_formats_depend_on_tokens_alone(packed):
    seen = []
    for threads in (1, 3):
        with load(packed, "hotness+importance", formats="16/2", deterministic=True, io_threads=threads) as engine:
            figures = [said(engine, text)[1] for text in ("What is in the picture?", "What is printed?")]
            seen.append(([one.formats for one in figures], [one.answer for one in figures], engine.formats().tolist()))
    assert seen[0] == seen[1]


# ------------------------------------------------------------------ changing at run time
@pytest.mark.budget(5)
def test_policies_and_formats_change_while_the_engine_runs(packed):
    with load(packed, "exact") as engine:
        exact, _ = said(engine)
        budget, counted = engine.plan.budget_bytes, engine.metrics.snapshot().total("hits")
        for policy, formats, names in (
            ("importance", "16/2", {"raw", "int2"}),
            ("hotness", "16/4", {"raw", "int4"}),
            ("importance", "4/0", {"int4", "skip"}),
            ("hotness+importance", "16/2", {"raw", "int2"}),
            ("importance", "4/2", {"int4"}),  # all of them fit, and what is there in int4 is used
        ):
            plan = engine.change(policy=policy, formats=formats)
            assert plan == engine.plan and plan.total_bytes <= max(budget, plan.budget_bytes)
            _, figures = said(engine)
            assert set(figures.formats) == names and figures.precision.policy == policy == engine.precision.policy
            engine.check_integrity()
        engine.change(formats="16/0", retention=1.0)
        assert set(said(engine)[1].formats) == {"raw"}
        engine.change(policy="exact")
        answer, figures = said(engine)
        assert answer == exact and figures.precision is None and figures.formats == {"raw": 1.0}
        assert engine.metrics.snapshot().total("hits") > counted, "counters go on"
        names = {name for _, name in engine.metrics.computed_in}
        assert names == {"raw", "int4", "int2", "skip"}


def test_a_change_holds_for_whoever_asks_after_it(packed):
    with load(packed, "exact") as engine:
        running = engine.chat(ask("Describe the image."), max_tokens=16)
        change = threading.Thread(target=engine.change, kwargs={"policy": "importance", "formats": "16/4"})
        change.start()
        while engine.precision is None:
            time.sleep(0.001)
        later = [engine.chat(ask(), max_tokens=4) for _ in range(2)]
        assert "".join(running) and running.figures.precision is None
        assert [("".join(reply), reply.figures.precision.policy)[1] for reply in later] == ["importance"] * 2
        change.join()
        assert engine.with_model(lambda model: vismoe.runtime_of(model).format_names) == ("raw", "int4")


def test_what_was_learned_survives_another_policy(packed):
    with load(packed, "hotness", formats="16/4") as engine:
        said(engine)
        learned = engine._runtime.hotness
        assert learned.warm
        said(engine, policy="importance")
        said(engine)
        assert engine._runtime.hotness is learned


def test_closing_in_the_middle_of_a_change_leaves_nothing_running(packed):
    threads = {thread.name for thread in threading.enumerate()}
    engine = load(packed, "exact")
    reply = engine.chat(ask(), max_tokens=4, policy="hotness", formats="16/4")
    time.sleep(0.02)
    engine.close()
    with contextlib.suppress(ClosedError, ConfigError):
        "".join(reply)
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not [name for name in left if name.startswith(("vismoe-transfer", "vismoe-model"))]
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    assert not [file for file in files if str(packed) in file], "files of the model are still open"


def test_requests_that_ask_for_other_policies_take_turns(packed):
    names = {"4/2": "int4/int2", "16/4": "raw/int4", "4/0": "int4/skip"}
    wanted = [("importance", "4/2"), (None, None), ("hotness", "16/4"), ("importance", "4/2"), ("importance", "4/0")]
    with load(packed, "exact") as engine:
        exact, _ = said(engine)
        replies = [engine.chat(ask(), max_tokens=10, policy=policy, formats=formats) for policy, formats in wanted]
        for (policy, formats), reply in zip(wanted, replies, strict=True):
            answer, precision = "".join(reply), reply.figures.precision
            if policy is None:
                assert answer == exact and precision is None
            else:
                assert (precision.policy, precision.formats) == (policy, names[formats])
        assert engine.precision is None, "a request's wish is not the engine's"
        engine.check_integrity()


def test_retention_belongs_to_the_request(packed):
    with load(packed, "importance", formats="16/0", memory="100%") as engine:
        replies = {r: engine.chat(ask("Describe the image."), max_tokens=10, retention=r) for r in (0.5, 0.75, 1.0)}
        skipped = {r: ("".join(reply), reply.figures.formats.get("skip", 0.0))[1] for r, reply in replies.items()}
        assert skipped[0.5] > skipped[0.75] > skipped[1.0] == 0
        for r, share in skipped.items():  # by turns as alone
            assert said(engine, "Describe the image.", retention=r)[1].formats.get("skip", 0.0) == share


def test_keys_and_values_of_another_retention_are_not_taken_over(packed):
    with load(packed, "importance", formats="16/0", memory="100%") as engine:
        said(engine, retention=0.6, reuse=True)
        assert said(engine, retention=0.9, reuse=True)[1].reused_tokens == 0
        assert said(engine, retention=0.9, reuse=True)[1].reused_tokens > 0


def test_what_cannot_be_changed_to_is_refused_and_changes_nothing(packed):
    with load(packed, "importance", formats="4/2", memory="25%") as engine:
        before = said(engine)[0], engine.plan
        with pytest.raises(BudgetError, match=r"--formats|--memory"):
            engine.change(policy="hotness", formats="16/4")
        with pytest.raises(ConfigError, match="int8"):
            engine.change(formats="8/2")  # not packed
        with pytest.raises(ConfigError, match="retention"):
            engine.chat(ask(), retention=0.3)
        with pytest.raises(InputError, match="formats"):
            engine.chat(ask(), policy="exact", formats="4/2")
        with pytest.raises(InputError, match="retention"):
            engine.chat(ask(), policy="hotness", formats="4/2", retention=0.9)
        assert engine.plan == before[1] and engine.precision.formats == "int4/int2"
        engine.check_integrity()
        assert said(engine)[1].answer_tokens > 1


def slab_bytes():
    """Of all pools that are alive."""
    gc.collect()
    return sum(thing.nbytes for thing in gc.get_objects() if isinstance(thing, SlabPool))


def test_a_change_that_fails_half_way_is_undone(packed, monkeypatch):
    """Experts in the new formats cannot be read: the old plan serves again in the same memory, and who waited is told."""
    others = slab_bytes()
    with load(packed, "importance", formats="16/4") as engine:
        real, failing = PackedStore.read, threading.Event()

        def read(store, expert, record):
            if failing.is_set() and store.format == "int2":
                raise CheckpointError("the disk is gone")
            return real(store, expert, record)

        monkeypatch.setattr(PackedStore, "read", read)
        failing.set()
        reply = engine.chat(ask(), max_tokens=4, policy="hotness", formats="16/2")
        with pytest.raises(ConfigError, match="the disk is gone"):
            "".join(reply)
        assert engine.precision.formats == "raw/int4" and said(engine)[1].precision.formats == "raw/int4"
        engine.check_integrity()
        with pytest.raises(TransferError, match="the disk is gone"):
            engine.change(policy="hotness", formats="16/2")
        assert engine.precision.policy == "importance"
        planned = sum(part.bytes for part in engine.plan.parts if part.name.startswith("expert pool"))
        assert slab_bytes() - others <= planned, "what was to come holds memory"
        failing.clear()
        assert said(engine, policy="hotness", formats="16/2")[1].precision.formats == "raw/int2"


# ------------------------------------------------------------------ families
OF_THEIR_OWN_KIND = {"dots3_note", "ernie4_5_vl_moe", "gpt_oss", "gemma4", "qwen3_5_moe"}  # the first is newer than 5.17


@pytest.mark.parametrize("family", sorted(OF_THEIR_OWN_KIND & set(families())))
@torch.inference_mode()
def test_families_of_their_own_kind_run_under_importance(family, tmp_path):
    """Vision experts, two experts modules in a layer, transposed weights, linear attention: all is served, the tower whole."""
    tiny_models.save(family, tmp_path)
    model, inputs = loaded(tmp_path), tiny_models.prompt(family)
    out = model(**inputs, use_cache=True)
    assert torch.isfinite(out.logits).all()
    counts = vismoe.runtime_of(model).pager.metrics.snapshot()
    assert counts.total("skipped", Phase.PREFILL) > 0 == counts.total("skipped", Phase.ENCODE)
    assert (counts.total("computed_high", Phase.ENCODE) > 0) == (family == "dots3_note")
    vismoe.runtime_of(model).pager.check_integrity()


def test_a_family_whose_experts_get_weighed_tokens_has_no_importance(tmp_path):
    tiny_models.save("llama4", tmp_path)
    with pytest.raises(ConfigError, match="hotness"):
        loaded(tmp_path)
