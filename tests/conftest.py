"""What holds for every test: no time limits inside hypothesis, and nothing of what this user's machine was measured to be.

A busy machine is not a failure; neither is a change that is judged by examples nobody saw before: they are the same in every run,
unless HYPOTHESIS_PROFILE=searching looks for new ones. A test must not depend on a profile that `vismoe doctor` left in the home
directory; and Ctrl-C means the same where a script started the suite in the background, with the signal ignored.
"""

import dataclasses
import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from quick import BUDGET_S, Stopwatch, leave_out

import vismoe  # noqa: F401  # before any file's transformers, which imports a torchvision that this mends

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
CACHE = tempfile.TemporaryDirectory(prefix="vismoe-test-cache-")
os.environ["VISMOE_CACHE"] = CACHE.name
signal.signal(signal.SIGINT, signal.default_int_handler)
# Files that take longest, of those with few tests too: they start first, so that no worker is left alone with one at the end.
LONGEST = (
    "families", "gpu_kernels", "browser", "memory_agreement", "examples", "precision_engine", "precision_quality", "cli_demo",
    "bench_checkpoint", "request_memory", "lmms", "transitions", "deepseek_vl2", "answer_length", "serving_engine", "suite",
    "formats_quality", "ui_serving", "bench_cli", "kernels", "serve_hostile", "serve_demo", "calibrate", "published_models",
    "shared_passes", "engine", "image_cache", "qwen_images", "gguf_models", "pack_kills", "cli", "packaging", "bench_process",
    "replay", "store", "browser_models",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out what takes long, as `make test` does (tests/quick.py)")
    parser.addoption("--budget", type=float, default=BUDGET_S, help="seconds that a test may take then")
    parser.addoption("--store-seconds", action="store_true", help="store how long tests take, in tests/seconds.json")


def pytest_configure(config):
    if config.getoption("store_seconds") and not hasattr(config, "workerinput"):  # the workers report to the one that is none
        config.pluginmanager.register(Stopwatch())


def pytest_sessionstart():
    """What is imported stays: the garbage collector need not look through millions of objects again and again."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    gc.enable()


def pytest_collection_modifyitems(items, config):
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=leave_out(items, config.getoption("budget")))


@pytest.fixture(scope="module", autouse=True)
def leave_the_past_alone():
    """What earlier files imported and keep is not looked through again, whenever loading a model collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_the_machine():
    """Which files run before which in a worker depends on how fast they are; what one of them measured is not for the next."""
    yield
    for profile in Path(CACHE.name).glob("machine-*.json"):
        profile.unlink()


@pytest.fixture
def one_thread():
    """Torch with one thread and without gradients: results that are compared bit for bit, and two tests on two cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def measured_once():
    """A worker measures what a model needs beside its experts at its first load; tests of the measurement call it themselves."""
    from vismoe.models.load import footprint, opening

    gc.freeze()
    needs = {}

    def measured(model, inventory, settings, **options):
        key = (type(model), described(model.config), footprint._has_tokenizer(model), model.dtype, settings.context)
        key = (*key, footprint.mtp_of(model) is not None, *sorted(options.items()))
        if key not in needs:
            needs[key] = footprint.footprint(model, inventory, settings, **options)
        entries = footprint.kernel_cache_entries(settings.kernels)
        held = footprint.kernel_cache_bytes(needs[key].dtype, entries)
        backbone = footprint.backbone_bytes(model)  # less where a checkpoint encodes it
        return dataclasses.replace(needs[key], inventory=inventory, backbone=backbone, kernel_entries=entries, kernel_bytes=held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "footprint", measured)
        patch.setattr("transformers.PreTrainedConfig.__repr__", object.__repr__)  # made at each load, for a line nobody logs
        yield


def described(config):
    """All that a configuration says about a model, and not where it lies."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    values = {name: value for name, value in config.to_dict().items() if name not in ("quantization_config", "_name_or_path")}
    return str((values, [getattr(part, "_attn_implementation", None) for part in (config, *parts)]))
