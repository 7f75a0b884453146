"""The compiled library: what is said where it is missing, was built from other sources, or cannot be built."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import vismoe.kernels
from vismoe.errors import ConfigError
from vismoe.kernels import library as module

ROOT = Path(__file__).resolve().parent.parent


def test_sources_without_an_installation_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(vismoe.kernels, "__path__", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"only the sources were imported\. Fix: pip install"):
        module.library.__wrapped__()


def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(module, "INTERFACE", module.INTERFACE + 1)
    with pytest.raises(ConfigError, match=r"built from other sources.* Fix: pip install"):
        module.library.__wrapped__()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake, which the build brings along but does not leave")
def test_without_a_compiler_the_build_says_what_to_install(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "uname", "sh", "ninja", "make"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")} | {"PATH": str(tools)}
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "need a C++17 compiler, and none was found. Fix: install one" in said
