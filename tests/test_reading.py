"""How experts will be read: what is asked for wins, what is measured comes next, and the plan counts the buffers."""

import pytest
import tiny_models
import torch

import vismoe
from vismoe import VisMoEConfig
from vismoe.errors import ConfigError
from vismoe.store.checkpoint import CheckpointStore

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(FAMILY, tmp_path_factory.mktemp("reading"))


def load(folder, **settings):
    config = VisMoEConfig(memory="25%", **settings)
    return tiny_models.model_class(folder).from_pretrained(folder, quantization_config=config)


def test_a_checkpoint_that_fits_the_free_ram_is_read_through_the_page_cache(folder):
    plan = vismoe.runtime_of(load(folder)).plan
    assert plan.reading[0].startswith("page cache: the experts") and "fit" in plan.reading[0]
    assert "thread" in plan.reading[1] and plan.reading[0] in plan.table()


def test_reading_past_the_page_cache_is_planned_for_said_and_exact(folder):
    if refused := vismoe.runtime_of(load(folder)).store.read_past_cache():
        pytest.skip(refused)
    model = load(folder, reads="direct", io_threads=3)
    runtime = vismoe.runtime_of(model)
    assert runtime.plan.reading == ("O_DIRECT: asked for", "3 threads: asked for")
    assert "O_DIRECT" in runtime.backends["reads"]
    assert runtime.plan.bytes_of("staging") == 2 * 4 * runtime.store.bounce_bytes > 0  # a native thread reads beside each
    assert runtime.plan.bytes_of("staging") > vismoe.runtime_of(load(folder, reads="cached")).plan.bytes_of("staging") == 0
    inputs = tiny_models.prompt(FAMILY)
    with torch.inference_mode():
        assert torch.equal(model(**inputs).logits, tiny_models.reference(folder)(**inputs).logits)


def test_o_direct_asked_for_where_there_is_none_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "read_past_cache", lambda store, only_cold: "the filesystem of x has no O_DIRECT")
    with pytest.raises(ConfigError, match=r"reads='direct': the filesystem of x has no O_DIRECT. Fix: reads='cached'"):
        load(folder, reads="direct")


@pytest.mark.parametrize("bad", [0, -1, "many", 1.5])
def test_io_threads_are_a_number_or_auto(bad):
    with pytest.raises(ConfigError, match="io_threads"):
        VisMoEConfig(io_threads=bad)
