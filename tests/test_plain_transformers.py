"""A paged model in the hands of plain transformers code: what else the library offers works the same, or is refused by name.

Oracle: transformers' eager experts, every parameter in fresh memory.
"""

import copy
import os
import pickle
import threading
import time

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import BudgetError, BusyError, UnsupportedModelError
from vismoe.trace.files import TraceWriter
from vismoe.types import Phase


def load(folder, family="qwen3_moe", **settings):
    if not (folder / "config.json").exists():
        tiny_models.save(family, folder)
    settings = {"memory": "50%", **settings}
    kwargs = {"device_map": settings.pop("device_map")} if "device_map" in settings else {}
    return tiny_models.model_class(folder).from_pretrained(folder, quantization_config=VisMoEConfig(**settings), **kwargs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return tiny_models.reference(folder)


@torch.no_grad()
def test_recorded_outputs_are_those_of_the_full_model_although_the_lookahead_asks_routers_too(model, reference):
    inputs = tiny_models.prompt("qwen3_moe", batch=2)
    vismoe.runtime_of(model).pager.core.misses_last_step = 1  # the lookahead is on
    wanted = {"output_router_logits": True, "output_hidden_states": True}
    expected, actual = reference(**inputs, **wanted), model(**inputs, **wanted)
    assert torch.equal(expected.aux_loss, actual.aux_loss)
    for one, other in zip(
        (*expected.router_logits, *expected.hidden_states), (*actual.router_logits, *actual.hidden_states), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}, {"prompt_lookup_num_tokens": 3}])
def test_other_ways_to_generate_give_the_full_models_tokens(model, reference, options):
    inputs = tiny_models.prompt("qwen3_moe")
    tokens = [m.generate(**inputs, do_sample=False, max_new_tokens=12, **options) for m in (reference, model)]
    assert torch.equal(*tokens)
    vismoe.runtime_of(model).pager.check_integrity()


def test_a_backward_pass_is_refused_and_never_silently_wrong(model):
    inputs = tiny_models.prompt("qwen3_moe")
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    with pytest.raises(UnsupportedModelError, match="cannot be trained"):
        loss.backward()


def test_two_threads_on_one_model_are_told_and_harm_nothing(model, reference):
    inputs = tiny_models.prompt("qwen3_moe")
    slow = model.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.01))
    outcomes = []

    def generate():
        try:
            outcomes.append(model.generate(**inputs, do_sample=False, max_new_tokens=20, min_new_tokens=20))
        except BusyError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    slow.remove()
    expected = reference.generate(**inputs, do_sample=False, max_new_tokens=20, min_new_tokens=20)
    finished = [outcome for outcome in outcomes if isinstance(outcome, torch.Tensor)]
    assert len(outcomes) == 3 and any(isinstance(outcome, BusyError) for outcome in outcomes)
    assert all(torch.equal(tokens, expected) for tokens in finished)
    assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=20, min_new_tokens=20), expected)
    vismoe.runtime_of(model).pager.check_integrity()


def test_a_copy_or_a_pickle_is_refused_by_name(model, tmp_path):
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedModelError, match="load it a second time"):
            attempt(model)
    with pytest.raises(ValueError, match="vismoe"):
        model.save_pretrained(tmp_path)


def test_device_map_auto_means_one_device(folder):
    model = load(folder, device_map="auto")
    place = "cuda" if torch.cuda.is_available() else "cpu"
    assert vismoe.runtime_of(model).configuration.device.type == place == model.device.type


def test_a_refused_load_gives_its_files_back(folder):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    for _ in range(3):
        with pytest.raises(BudgetError):
            load(folder, memory="1MiB")
    assert open_files() == before


def test_the_model_thread_is_free_again_when_a_model_is_dropped(folder):
    before = set(threading.enumerate())
    model = load(folder)
    mine = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("vismoe-transfer")]
    assert mine
    del model
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and any(thread.is_alive() for thread in mine):
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in mine)


def test_drafts_being_verified_count_as_decode_and_a_prompt_as_prefill(folder):
    model = load(folder)
    runtime = vismoe.runtime_of(model)
    inputs = tiny_models.prompt("qwen3_moe", tokens=20)
    before = runtime.pager.metrics.snapshot()
    model.generate(**inputs, do_sample=False, max_new_tokens=10, prompt_lookup_num_tokens=3)
    layers = len(runtime.pager.inventory.layers)
    counts = runtime.pager.metrics.snapshot() - before
    assert counts.total("steps", Phase.PREFILL) == layers and counts.total("steps", Phase.DECODE) > layers


def test_recording_a_family_whose_experts_see_a_part_of_the_tokens_is_refused(tmp_path):
    model = load(tmp_path / "ernie", "ernie4_5_vl_moe")
    runtime = vismoe.runtime_of(model)
    with TraceWriter(tmp_path / "trace", runtime.pager.inventory) as writer, torch.no_grad():
        runtime.context.record_to(writer)
        with pytest.raises(UnsupportedModelError, match="cannot be recorded"):
            model(**tiny_models.prompt("ernie4_5_vl_moe"))
        runtime.context.record_to(None)
    runtime.pager.check_integrity()


@pytest.mark.parametrize("link", [None, 1e9], ids=["slabs", "host memory below slabs"])
def test_a_model_that_was_loaded_in_inference_mode_runs_in_it_and_outside(link, folder, reference):
    """A tensor that was made in that mode refuses every write from a thread outside it, such as a copying one."""
    with torch.inference_mode():
        model = load(folder, emulated_link_bytes_per_s=link, kernels="torch")
    pager = vismoe.runtime_of(model).pager
    pools = [pool for table in pager.tables for pool in table.pool.pools] if link is None else pager.host.pools
    assert not any(tensor.is_inference() for pool in pools for tensor in (pool.record(0), *pool.weights(0).values()))
    inputs = tiny_models.prompt("qwen3_moe")
    generating = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    expected = reference.generate(**inputs, **generating)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            assert torch.equal(model.generate(**inputs, **generating), expected)
    assert pager.metrics.snapshot().total("misses") > 0
