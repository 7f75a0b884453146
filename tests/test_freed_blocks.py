"""What long passes free stays in the heap until they end, and then goes back to the system."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_models
import torch

from vismoe import VisMoEConfig
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.load.runtime import runtime_of
from vismoe.models.load.vision_memory import patch_numbers
from vismoe.pools import malloc
from vismoe.pools.malloc import FreedBlocks

HEAP = r"""
import ctypes, json, resource, sys, threading
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 4 KiB are counted
import torch
from vismoe.pools import malloc

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024

def work():
    before, last = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, []
    for turn in range(20):  # each tensor outlives the next one
        for megabytes in (8, 3, 12, 2, 30):
            last = [torch.ones(megabytes * 2**18), *last[:1]]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    work()
    found["returned"], before = work(), resident()
    malloc.keep_freed_blocks("one")
    malloc.keep_freed_blocks("another")
    malloc.return_freed_blocks("one")
    work()
    found["kept"], found["held"] = work(), resident() - before
    malloc.return_freed_blocks("another")
    found["left"], found["again"] = resident() - before, work()

found = {}
malloc.return_large_blocks()
malloc.share_one_heap()
if sys.argv[1] == "main":
    measure()
else:
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(malloc.ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
@pytest.mark.parametrize("thread", ["main", "another"])
def test_the_heap_keeps_what_is_freed_until_the_last_keeper_returns_it(thread):
    env = {name: value for name, value in os.environ.items() if name not in malloc.VARIABLES}
    done = subprocess.run([sys.executable, "-c", HEAP, thread], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["returned"] > 20 * found["kept"]  # pages that the system gave again
    assert found["held"] > 30 * 2**20 > 3 * 2**20 > found["left"]
    assert found["again"] > 10 * found["kept"]


def test_a_user_who_has_set_up_the_heap_keeps_that(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=pytest.fail, malloc_trim=pytest.fail))
    malloc.return_large_blocks()
    malloc.share_one_heap()
    malloc.keep_freed_blocks("one")
    malloc.return_freed_blocks("one")


@pytest.fixture
def heap(monkeypatch):
    """What was asked of the heap, in a process of `held` bytes."""
    heap = SimpleNamespace(asked=[], held=1000)
    monkeypatch.setattr(malloc, "keep_freed_blocks", lambda keeper: heap.asked.append("keep"))
    monkeypatch.setattr(malloc, "return_freed_blocks", lambda keeper: heap.asked.append("return"))
    monkeypatch.setattr(malloc, "_held_bytes", lambda: heap.held)
    return heap


def test_a_pass_keeps_until_the_process_has_grown_by_what_was_planned(heap):
    freed, long = FreedBlocks(), malloc.LEAST_PASS_BYTES
    freed.begin(long - 1, 10**9)
    freed.check()
    freed.end()
    assert heap.asked == []  # it would take longer to return than to free
    freed.begin(long, 500)
    heap.held = 1500
    freed.check()
    assert heap.asked == ["keep"]
    heap.held = 1501
    freed.check()
    freed.check()
    assert heap.asked == ["keep", "return"]
    freed.end()
    freed.end()
    assert heap.asked == ["keep", "return", "return"]


@pytest.mark.parametrize("next_bytes", [10, malloc.LEAST_PASS_BYTES])
def test_a_pass_that_failed_is_ended_by_the_next_one(heap, next_bytes):
    freed = FreedBlocks()
    freed.begin(malloc.LEAST_PASS_BYTES, 10**9)
    freed.begin(next_bytes, 10**9)
    assert heap.asked[:2] == ["keep", "return"]


def test_a_system_that_does_not_say_what_a_process_holds_keeps_nothing(heap):
    freed, heap.held = FreedBlocks(), None
    freed.begin(malloc.LEAST_PASS_BYTES, 10**9)
    freed.check()
    freed.end()
    assert heap.asked == []


@pytest.fixture
def family():
    return "qwen3_vl_moe"


@pytest.fixture
def served(tmp_path, heap, monkeypatch, family):
    """A model with images, planned for 64 tokens, and the passes that it took for long, with how often each was checked."""
    folder = tiny_models.save(family, tmp_path / "model")
    settings = VisMoEConfig(memory="100%", context=64)
    model = tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.float32, quantization_config=settings).eval()
    plan, freed, passes = runtime_of(model).plan, runtime_of(model).context.freed, []
    monkeypatch.setattr(malloc, "LEAST_PASS_BYTES", plan.bytes_of("prefill") * 8 // 64)

    def noted(name, method):
        def note():
            passes.append(name)
            method()

        return note

    for name in ("check", "end"):
        monkeypatch.setattr(freed, name, noted(name, getattr(freed, name)))
    return model, heap.asked, passes


@torch.inference_mode()
def test_prompts_are_long_by_their_tokens_and_end_behind_the_last_experts(served):
    model, asked, passes = served
    layers = len(runtime_of(model).pager.inventory.layers)
    first = model(torch.ones(1, 9, dtype=torch.long), use_cache=True)
    assert asked == ["keep", "return"] and passes == ["end", *["check"] * (layers - 1), "end"]
    for tokens, cache in ((1, cache_in(first)), (7, None)):
        model(torch.ones(1, tokens, dtype=torch.long), use_cache=True, **{CACHE: cache})
    assert asked == ["keep", "return"]


@pytest.mark.parametrize("family", sorted({"ernie4_5_vl_moe", "dots3_note"} & set(tiny_models.FAMILIES)))
@torch.inference_mode()
def test_prompts_end_where_the_last_experts_are_those_of_pictures(served):
    model, asked, _ = served
    model(torch.full((1, 9), 7), use_cache=True)
    assert asked == ["keep", "return"]


@pytest.mark.parametrize("closes", [False, True], ids=["token", "end of the model"])
@torch.inference_mode()
def test_a_prompt_that_failed_is_ended_by_the_next(served, closes):
    model, asked, _ = served
    cache = cache_in(model(torch.ones(1, 1, dtype=torch.long), use_cache=True))
    broken = model.model.language_model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 12, dtype=torch.long), use_cache=True)
    assert asked == ["keep"]
    broken.remove()
    if closes:
        runtime_of(model).close()
        assert asked == ["keep", "return"]
        return
    model(torch.ones(1, 1, dtype=torch.long), use_cache=True, **{CACHE: cache})
    assert asked == ["keep", "return"]


@torch.inference_mode()
def test_pictures_are_long_by_their_patches(served, monkeypatch):
    model, asked, passes = served
    config, tower = model.config.vision_config, model.model.visual
    merge, width = config.spatial_merge_size, 3 * config.temporal_patch_size * config.patch_size**2
    monkeypatch.setattr(malloc, "LEAST_PASS_BYTES", (2 * merge) ** 2 * patch_numbers(tower, config) * 4)
    for side, wanted in ((2 * merge, ["keep", "return"]), (merge, [])):
        asked.clear(), passes.clear()
        model.get_image_features(torch.randn(side**2, width), torch.tensor([[1, side, side]]))
        assert asked == wanted and passes.count("check") >= config.depth and passes[-1] == "end"
