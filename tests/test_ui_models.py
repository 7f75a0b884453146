"""The choice of a model on the chat page, without a browser: what is listed, planned, loaded, refused and given back."""

import gc
import io
import json
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import gguf
import gguf_files
import pytest
from fake_engine import PLAN, FakeEngine
from hub_cache import COMMIT, copy_of_demo, put
from tiny_models import FAMILIES, save, tiny_of
from transformers.utils import logging as transformers_logging

from vismoe.app import choosing, ui_models
from vismoe.app import loaded as loaded_module
from vismoe.app.choosing import DEMO, Catalog, ModelChoice, Proposal, fix_of, machine_words, offered_formats
from vismoe.app.loaded import Loader
from vismoe.app.on_disk import counts_experts
from vismoe.app.page import Page, PageTurn
from vismoe.app.ui_models import asked_choice, precision_of
from vismoe.app.widgets import PAIRS
from vismoe.cli import main as cli
from vismoe.engine.engine import demo_model, load
from vismoe.errors import BudgetError, BusyError, CheckpointError, ClosedError, ConfigError, UnsupportedModelError
from vismoe.pair import Format
from vismoe.planning.needs import Hardware

CONTROLS = {"model": DEMO, "other": "", "kind": "auto", "size": "", "policy": "exact", "formats": "auto", "context": 4096}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, of a person without other models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


def soon(true) -> bool:
    """Whether it becomes so; a busy machine is not a failure."""
    until_s = time.monotonic() + 60
    while not (now := true()) and time.monotonic() < until_s:
        time.sleep(0.01)
    return bool(now)


def looked(catalog: Catalog, plan=ModelChoice.plan) -> dict[str, Proposal]:
    """What the catalog lists once it has looked at everything."""
    catalog.look(plan)
    catalog._looking.join(60)
    return catalog.found


# ------------------------------------------------------------------ the list
def test_the_demo_model_comes_first_then_models_of_experts_with_weights_in_the_cache(cache):
    put(cache, "acme/Sees", copy_of_demo)
    put(cache, "acme/Reads", lambda folder: save("qwen3_moe", folder))
    put(cache, "acme/NoWeights", lambda folder: tiny_of("qwen3_moe").save_pretrained(folder))
    dense = json.dumps({"model_type": "llama", "num_experts": 1})
    put(cache, "acme/Dense", lambda folder: [(folder / n).write_text(dense) for n in ("config.json", "model.safetensors")])
    put(cache, "acme/Broken", lambda folder: [(folder / n).write_text("{") for n in ("config.json", "model.safetensors")])
    found = looked(Catalog())
    assert list(found) == [DEMO, "acme/Reads", "acme/Sees"]
    assert found["acme/Sees"].words().startswith("Sees pictures, 25.1 MiB on disk. Fits whole; about ")
    assert found["acme/Reads"].words().startswith("Text only, ") and "answers at once" in found[DEMO].words()


def test_what_cannot_be_served_is_not_listed_and_what_does_not_fit_says_why(cache):
    for name in ("Refused", "Large", "Fine"):
        put(cache, f"acme/{name}", copy_of_demo)

    def plan(choice):
        if choice.name == "acme/Refused":
            raise UnsupportedModelError("no")
        if choice.name == "acme/Large":
            raise BudgetError("memory=auto takes 99 GiB", "a machine with 99GiB")
        return PLAN

    catalog = Catalog()
    found = looked(catalog, plan)
    assert list(found) == [DEMO, "acme/Fine", "acme/Large"]
    assert "Not with these settings: memory=auto takes 99 GiB." in found["acme/Large"].words()
    number = catalog.number
    assert looked(catalog, plan) == found and catalog.number > number  # the refused one was looked at again
    assert catalog.choice_of("acme/Fine").model.startswith(str(cache))


def test_gguf_files_are_found_where_llama_cpp_lm_studio_and_the_hub_keep_them_each_with_its_own_vision_tower(cache, monkeypatch):
    llama, studio = cache.parent / ".cache" / "llama.cpp", cache.parent / ".lmstudio" / "models" / "acme" / "Sees-GGUF"
    model = gguf_files.write(studio, "qwen3_vl_moe", lambda tensor: "Q8_0")
    gguf_files.write_mmproj(studio / "mmproj-F32.gguf", model)
    gguf_files.write_mmproj(studio / "mmproj-F16.gguf", model, "F16")
    gguf_files.write_mmproj(studio / "mmproj-other.gguf", model, "F16", "gemma3")
    (studio / "mmproj-cut.gguf").write_bytes(b"GGUF")
    gguf_files.write(llama, "qwen3_moe", lambda tensor: "Q8_0")
    (llama / "acme_Text-GGUF_text-Q8_0.gguf").hardlink_to(llama / "model.gguf")
    (llama / "cut.gguf").write_bytes((llama / "model.gguf").read_bytes()[:4000])
    dense = gguf.GGUFWriter(llama / "dense.gguf", "llama")
    dense.write_header_to_file()
    dense.close()
    put(cache, "acme/Text-GGUF", lambda folder: [shutil.copy(file, folder) for file in llama.iterdir()])
    (cache / "models--acme--Text-GGUF" / "snapshots" / COMMIT / "model.gguf").unlink()
    found = looked(Catalog())
    named = ["acme/Text-GGUF: acme_Text-GGUF_text-Q8_0", "acme_Text-GGUF_text-Q8_0", "model", "acme/Sees-GGUF: model"]
    assert list(found) == [DEMO, *named]
    assert all(found[name].words().startswith("Text only, ") and found[name].plan for name in named[:3])
    sees = found[named[3]]
    assert sees.words().startswith("Sees pictures, ") and sees.choice.settings["mmproj"] == str(studio / "mmproj-F16.gguf")
    by_path = Catalog().choice_of(sees.choice.model)
    assert by_path.name == "model.gguf" and by_path.settings == sees.choice.settings
    assert list(looked(Catalog.of(None, {"gguf": str(llama / "model.gguf")}, {}))).count("model") == 0, "listed once"
    monkeypatch.setenv("LLAMA_CACHE", str(cache.parent / "nowhere"))
    assert list(looked(Catalog())) == [DEMO, named[0], named[3]]


def test_a_cache_that_is_not_there_lists_the_demo_model_alone(cache):
    assert list(looked(Catalog(), lambda choice: PLAN)) == [DEMO]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_of_every_family_counts_its_experts(family):
    assert counts_experts(tiny_of(family).to_dict())


def test_a_share_of_the_experts_is_said():
    import dataclasses

    half = Proposal(ModelChoice("x", "x"), 0, dataclasses.replace(PLAN, resident_experts=4))
    assert half.fit() == "50% of its experts fit in memory, the others are read as needed."


def test_the_machine_is_described_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("VISMOE_CACHE", str(tmp_path))  # where no vismoe doctor of another test has been
    assert "memory free" in machine_words() and machine_words().endswith("disk not measured (vismoe doctor)")
    monkeypatch.setattr(choosing, "load_profile", lambda: SimpleNamespace(best_disk_bytes_per_s=lambda folder: 1.14e9))
    assert machine_words().endswith("disk 1.1 GB/s")


def test_what_the_command_line_asked_for_holds_for_every_model_but_for_what_is_one_models_own():
    settings = {"memory": "50%", "store": "/stores/a", "image_cache": "64MiB"}
    catalog = Catalog.of("/models/a", settings, {"device": "cpu", "revision": "v2"})
    assert catalog.given == ModelChoice("/models/a", "/models/a", settings, {"device": "cpu", "revision": "v2"})
    other = catalog.choice_of("/models/b")
    assert other.settings == {"memory": "50%", "image_cache": "64MiB"} and other.options == {"device": "cpu"}
    of_file = Catalog.of(None, {"gguf": "a.gguf"}, {}).given
    assert of_file.model == "a.gguf" and "gguf" not in of_file.settings
    assert Catalog.of(None, {}, {}).given is None


# ------------------------------------------------------------------ the choice
def test_the_controls_become_settings_and_replace_those_of_before():
    catalog = Catalog.of(None, {"memory": "50%", "policy": "hotness", "formats": "8/4", "io_threads": 3}, {})
    assert asked_choice(catalog, {**CONTROLS, "model": "", "other": " /m "}).settings == {"context": 4096, "io_threads": 3}
    asked = {**CONTROLS, "model": "", "other": "/m", "kind": "size", "size": " 8GiB ", "policy": "importance", "formats": "4/2"}
    choice = asked_choice(catalog, asked)
    assert choice.model == "/m" and choice.settings == {
        "memory": "8GiB", "context": 4096, "policy": "importance", "formats": "4/2", "io_threads": 3
    }  # fmt: skip
    assert asked_choice(catalog, {**asked, "policy": "exact", "formats": "int8"}).settings["format"] == "int8"
    with pytest.raises(ConfigError, match="no model is named"):
        asked_choice(catalog, {**asked, "other": " "})


def test_the_controls_of_precision_begin_with_what_was_asked_for():
    policy, formats = precision_of({"policy": "importance", "formats": "8/4"})
    assert policy["value"] == "importance" and formats["value"] == "8/4"
    assert formats["choices"] == [("8 bit, the rest 4 bit", "8/4")]
    policy, formats = precision_of({"format": "int4"})
    assert policy["value"] == "exact" and formats["choices"] == [("4 bit, all of them", "int4")]


def test_formats_are_offered_that_are_packed():
    assert offered_formats((), PAIRS) == {"exact": ["auto"]}
    offered = offered_formats((Format.INT4, Format.INT2), PAIRS)
    assert offered["exact"] == ["auto", "int4", "int2"]
    assert offered["hotness"] == ["16/4", "16/2", "4/2"] and offered["importance"] == ["16/4", "16/2", "4/2", "4/0"]


def test_packed_experts_are_found_beside_the_model_or_in_the_given_store(tmp_path):
    assert cli.main(["pack", "--formats", "int4", "--out", str(tmp_path / "store")]) == 0
    demo = str(demo_model())
    assert ModelChoice("demo", demo).packed() == ()
    assert ModelChoice("demo", demo, {"store": str(tmp_path / "store")}).packed() == (Format.INT4,)
    assert ModelChoice("demo", demo).files()
    with pytest.raises(CheckpointError, match="neither a folder here"):
        ModelChoice("no", "/no/such").packed()


def test_a_download_is_announced_with_its_size_and_a_silent_hub_is_said(monkeypatch):
    files = [SimpleNamespace(rfilename=name, size=2**30) for name in ("a.safetensors", "b.safetensors", "README.md")]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, **asked: SimpleNamespace(siblings=files))
    assert ui_models._download(ONE) == "Download 2.00 GiB and load"

    def unreachable(self, name, **asked):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    assert ui_models._download(ONE) == "Download (the hub does not say how much) and load"


def test_a_fix_is_taken_over_where_the_page_has_these_settings():
    assert fix_of(BudgetError("too small", "--memory 518MiB")) == {"memory": "518MiB"}
    assert fix_of(BudgetError("", "--memory 1GiB --context 512")) == {"memory": "1GiB", "context": "512"}
    for fix in ("a machine with 9GiB of free memory and --memory 9GiB --context 512, or a smaller model", "--draft none"):
        assert fix_of(BudgetError("", fix)) == {}
    assert fix_of(ConfigError("nothing")) == {}


def test_a_plan_that_is_refused_works_with_its_fix():
    small = ModelChoice("demo", str(demo_model()), {"memory": "300MiB"})
    with pytest.raises(BudgetError, match="is too small") as refused:
        small.plan()
    assert small.with_settings(**fix_of(refused.value)).plan().resident_experts > 0


# ------------------------------------------------------------------ loading
def loads(monkeypatch, *engines) -> list:
    """`load` gives these one after the other, or raises them; -> what it was asked for."""
    asked, left = [], list(engines)

    def fake(model, **given):
        asked.append((model, given))
        engine = left.pop(0)
        if isinstance(engine, Exception):
            raise engine
        return engine() if callable(engine) else engine

    monkeypatch.setattr(loaded_module, "load", fake)
    return asked


ONE, TWO = ModelChoice("one", "/one", {"memory": "1GiB"}, {"device": "cpu"}), ModelChoice("two", "/two")


def test_a_model_is_loaded_in_place_of_none_and_another_in_place_of_it_once_it_is_closed(monkeypatch):
    first, page = FakeEngine(), Page()
    second = lambda: FakeEngine() if first.closed and page.engine is None else pytest.fail("two at a time")  # noqa: E731
    asked, loader = loads(monkeypatch, first, second), Loader(page)
    assert loader.state.phase == "none"
    loader.begin(ONE)
    assert soon(lambda: loader.state.phase == "ready") and page.engine is first and "one" in page.head()
    loader.begin(TWO)
    assert soon(lambda: loader.state.phase == "ready" and loader.state.choice == TWO) and page.engine is not first
    assert asked == [("/one", {"device": "cpu", "memory": "1GiB"}), ("/two", {})]


def test_what_cannot_be_loaded_is_said_and_the_earlier_one_is_remembered(monkeypatch):
    page = Page(FakeEngine())
    loads(monkeypatch, CheckpointError("a file is missing"), ValueError("odd"), FakeEngine())
    loader = Loader(page, ONE)
    for error in ("a file is missing", "ValueError: odd"):
        loader.begin(TWO)
        assert soon(lambda: loader.state.phase == "failed")
        assert (loader.state.error, loader.state.earlier, page.engine) == (error, ONE, None)
    with pytest.raises(ClosedError, match="no model is loaded"):
        list(page.answer(PageTurn("Hi", (), ()), (), "me"))
    assert "No model" in page.heat() and "no model is loaded" in page.head() and page.running == {}
    loader.begin(ONE)
    assert soon(lambda: loader.state.phase == "ready") and loader.state.earlier is None


def test_answers_under_way_are_stopped_and_keep_what_was_written(monkeypatch):
    engine = FakeEngine(script=[(word for word in iter(lambda: time.sleep(0.02) or "word ", None))])
    page = Page(engine)
    loads(monkeypatch, FakeEngine())
    loader, answer = Loader(page, ONE), page.answer(PageTurn("Count", (), ()), (), "me")
    while not next(answer).history[0].answer:
        pass
    rest = []
    reading = threading.Thread(target=lambda: rest.extend(answer))
    reading.start()
    loader.begin(TWO)
    reading.join(20)
    assert rest[-1].finished is not None and rest[-1].history[0].answer.startswith("word ")
    assert soon(lambda: loader.state.phase == "ready") and engine.closed


@pytest.fixture(params=[True, False], ids=["bars", "no bars"])
def bars(request, monkeypatch):
    """Whether transformers shows progress bars: HF_HUB_DISABLE_PROGRESS_BARS, and `vismoe chat`, turn them off."""
    monkeypatch.setattr(transformers_logging, "_tqdm_active", request.param)
    return request.param


def test_one_model_is_loaded_at_a_time_and_progress_is_said(monkeypatch, bars):
    go = threading.Event()
    loads(monkeypatch, lambda: go.wait(20) and FakeEngine())
    loader = Loader(Page())
    loader.begin(ONE)
    with pytest.raises(BusyError, match="being loaded"):
        loader.begin(TWO)
    assert loader.progress().startswith("reading its files (0 s")
    bar = transformers_logging.tqdm(range(8), desc="Loading weights", file=io.StringIO())  # as transformers makes it
    bar.update(3)
    assert loader.progress().startswith("loading weights, 3 of 8 tensors (" if bars else "reading its files (")
    go.set()
    assert soon(lambda: loader.state.phase == "ready") and loader.state.choice == ONE


def test_a_plan_counts_on_what_was_free_before_the_loaded_model(monkeypatch):
    seen = []
    monkeypatch.setattr(choosing, "preview", lambda model, settings, **given: seen.append(given["hardware"]))
    free = Hardware("cpu", 5, 5, 5)
    Loader(Page(FakeEngine(hardware=free)), ONE).plan(TWO)
    Loader(Page()).plan(TWO)
    assert seen == [free, None]


def test_a_loaded_model_gives_its_memory_back_before_the_next_one(monkeypatch):
    page, memory = Page(load(context=256)), "100%"
    gone = weakref.ref(page.engine), weakref.ref(page.engine.model)
    choice = ModelChoice(DEMO, str(demo_model()), {"memory": memory, "context": 256})
    loader, found = Loader(page, ONE), []
    free, planned = page.engine.hardware, loader.plan(choice)
    assert planned.total_experts == 256 and free is not None
    monkeypatch.setattr(loaded_module, "load", lambda *a, **k: found.append([ref() for ref in gone]) or load(*a, **k))
    *_, last = page.answer(PageTurn("Hi", (), ()), (), "me")
    assert last.history
    gc.collect()
    loader.begin(choice)
    assert soon(lambda: loader.state.phase in ("ready", "failed")) and loader.state.error == ""
    assert found == [[None, None]] and page.engine.plan.memory == memory
    *_, last = page.answer(PageTurn("Hello?", (), ()), last.history, "me")
    assert len(last.history) == 2, "the conversation goes on"
    page.engine.close()


# ------------------------------------------------------------------ the command
def test_the_command_without_a_model_loads_nothing_and_with_one_loads_it_first(monkeypatch):
    pytest.importorskip("gradio", reason='gradio is missing: pip install "vismoe[serve]"')
    from vismoe.app import ui_serving

    served, engine = [], FakeEngine()
    monkeypatch.setattr(ui_serving, "serve", lambda page, port, catalog: served.append((page.engine, catalog)) or 0)
    monkeypatch.setattr("vismoe.flags.load_engine", lambda arguments, model, further: engine)
    assert cli.main(["ui", "--port", "0", "--memory", "25%"]) == 0
    assert cli.main(["ui", "/some/model", "--port", "0"]) == 0
    (none, catalog), (loaded, with_model) = served
    assert none is None and catalog.given is None and catalog.usual["memory"] == "25%" and catalog.usual["image_cache"] == "64MiB"
    assert loaded is engine and with_model.given.model == "/some/model"
