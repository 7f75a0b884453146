"""What holds for every test: no time limits inside hypothesis, and nothing of what this user's machine was measured to be.

A busy machine is not a failure; neither is a change that is judged by examples nobody saw before: they are the same in every run,
unless HYPOTHESIS_PROFILE=searching looks for new ones. A test must not depend on a profile that `vismoe doctor` left in the home
directory; and Ctrl-C means the same where a script started the suite in the background, with the signal ignored.
"""

import dataclasses
import os
import signal
import tempfile

import pytest
from hypothesis import settings

import vismoe  # noqa: F401  # before any file's transformers, which imports a torchvision that this mends

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
CACHE = tempfile.TemporaryDirectory(prefix="vismoe-test-cache-")
os.environ["VISMOE_CACHE"] = CACHE.name
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread():
    """Torch with one thread and without gradients: results that are compared bit for bit, and two tests on two cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured_once():
    """For tests of what comes after the plan: what a model needs beside its experts is measured at its first load only."""
    from vismoe.models.load import opening as loading

    needs, measure = {}, loading.footprint

    def footprint(model, inventory, settings, device):
        described = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        key = str(described), model.config._name_or_path, model.dtype, settings.context
        if key not in needs:
            needs[key] = measure(model, inventory, settings, device=device)
        return dataclasses.replace(needs[key], inventory=inventory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "footprint", footprint)
        yield
