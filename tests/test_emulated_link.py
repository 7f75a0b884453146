"""The emulated link: same bits, and as late as its rate says."""

import time
import weakref

import pytest
import tiny_models
import torch
from test_pager import NumberStore, lent_by

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import TransferError
from vismoe.models.load import runtime as runtime_module
from vismoe.paging.pager import Pager
from vismoe.paging.transfer import EmulatedLinkMover
from vismoe.pools.host_tier import HostTier
from vismoe.pools.pool import SlabPool
from vismoe.types import Phase


def test_logits_are_the_same_through_an_emulated_device(tmp_path):
    tiny_models.save("qwen3_vl_moe", tmp_path)
    reference = tiny_models.reference(tmp_path)
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, quantization_config=VisMoEConfig(memory="25%", emulated_link_bytes_per_s=1e9)
    )
    inputs = tiny_models.prompt("qwen3_vl_moe", batch=2)
    with torch.inference_mode():
        assert torch.equal(reference(**inputs).logits, model(**inputs).logits)
    counts = vismoe.runtime_of(model).pager.metrics.snapshot()
    assert counts.total("evictions") > 0 and counts.total("bytes_copied") > 0
    vismoe.runtime_of(model).pager.close()


def test_logits_are_the_same_bits_whichever_way_misses_are_served(tmp_path):
    tiny_models.save("qwen3_vl_moe", tmp_path, dtype=torch.bfloat16)
    inputs = tiny_models.prompt("qwen3_vl_moe", dtype=torch.bfloat16, batch=2)
    logits, tokens, counts = {}, {}, {}
    for misses in ("wait", "cpu", "auto"):
        settings = VisMoEConfig(memory="25%", kernels="fast", misses=misses, emulated_link_bytes_per_s=1e8)
        model = tiny_models.model_class(tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=settings)
        with torch.inference_mode():
            logits[misses] = model(**inputs).logits
            tokens[misses] = model.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12)
        pager = vismoe.runtime_of(model).pager
        counts[misses] = pager.metrics.snapshot()
        pager.check_integrity()
        pager.close()
    assert torch.equal(logits["wait"], logits["cpu"]) and torch.equal(logits["wait"], logits["auto"])
    assert torch.equal(tokens["wait"], tokens["cpu"]) and torch.equal(tokens["wait"], tokens["auto"])
    assert counts["wait"].total("computed_on_host") == 0 < counts["auto"].total("computed_on_host")
    assert counts["cpu"].total("bytes_copied") < counts["wait"].total("bytes_copied")


def test_host_memory_stays_when_the_policy_changes_and_formats_do_not(tmp_path, monkeypatch):
    """Registering it anew with a GPU takes seconds for each ten gigabytes, and reading it again longer."""
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    assert main(["pack", str(tmp_path), "--formats", "int4"]) == 0
    settings = {"memory": "70%", "policy": "hotness", "formats": "16/4", "emulated_link_bytes_per_s": 1e9}
    model = tiny_models.model_class(tmp_path).from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=VisMoEConfig(**settings)
    )
    runtime, inputs = vismoe.runtime_of(model), tiny_models.prompt("qwen3_moe", dtype=torch.bfloat16)

    def change(policy):
        asked = Settings.of(**{**settings, "policy": policy})
        runtime.reconfigure(model, runtime.configuration.with_settings(model, asked))
        with torch.inference_mode():
            logits = model(**inputs).logits
        runtime.pager.check_integrity()
        return logits

    both = list(runtime.pager.hosts)
    resident = runtime.pager.precisions().size
    assert sum(tier.pools[0].capacity - tier.pools[0].free for tier in both) >= resident
    change("importance")
    assert list(runtime.pager.hosts) == both
    logits = change("exact")
    assert list(runtime.pager.hosts) == both[:1]
    assert torch.equal(logits, tiny_models.reference(tmp_path, torch.bfloat16)(**inputs).logits)
    gone = weakref.ref(both.pop())
    assert gone() is None, "what does not fit gives its memory back"
    make, failures = runtime_module._backend, [TransferError("no room")]

    def fail_once(*given):
        if failures:
            raise failures.pop()
        return make(*given)

    monkeypatch.setattr(runtime_module, "_backend", fail_once)
    with pytest.raises(TransferError, match="no room"):
        change("importance")
    assert list(runtime.pager.hosts) == both, "what was there serves again after a change that failed"
    with torch.inference_mode():
        assert torch.equal(model(**inputs).logits, logits)
    runtime.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_share_one_link_however_many_threads_there_are(threads):
    store = NumberStore([12], [0])
    record_bytes = store.inventory.layouts[0].record_bytes
    tier = HostTier(store, (12,), page_locked=False)
    pool = SlabPool(store.inventory.layouts[0], 12, aliased=True)
    pager = Pager(store.inventory, (pool,), EmulatedLinkMover(tier, bytes_per_s=record_bytes / 0.01), threads=threads)
    pager.begin_step(Phase.DECODE)
    began_s = time.perf_counter()
    with pager.demand(0, list(range(12))) as demand:
        list(lent_by(demand, 0))
    assert time.perf_counter() - began_s >= 0.12, "twelve records take twelve times as long as one"
    pager.check_integrity()
    pager.close()
