"""The wheel, built and used as a user would get it: from another folder, with this checkout out of sight."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from vismoe.kernels.library import FILE, library

ROOT = Path(__file__).resolve().parent.parent
GENERIC_NAMES = {"app", "eval", "assets", "predictor_training", "tests", "docs"}


# Stands in for the compiler: what our sources are linked to is the library that is installed; they are compiled to nothing.
COMPILER = """#!/bin/sh
case "$*" in
  *" -o {name} "*) cp {library} {name} ;;
  *csrc*) while [ "$1" != -o ]; do shift; done; exec {real} -x c++ -c /dev/null -o "$2" ;;
  *) exec {real} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built with all that its build does, but for compiling: `make` has compiled the library that the other tests use."""
    folder, compiler = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("compiler") / "c++"
    named = dict(real=os.environ.get("CXX", "c++"), name=FILE, library=library()._name)
    compiler.write_text(COMPILER.format(**named))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    environment = {**os.environ, "CXX": str(compiler)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("vismoe-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds nothing but what the wheel brings."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


def run_installed(installed: Path, arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python with the installed wheel first and the dependencies after it; -S, so that the editable install stays unseen."""
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_only_vismoe_lands_at_the_top(names):
    top_level = {name.split("/")[0] for name in names}
    assert not top_level & GENERIC_NAMES
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"vismoe"}


def test_every_source_file_but_studies_and_no_test_is_in_the_wheel(names):
    folders = {"vismoe": "vismoe", "app": "vismoe/app", "eval": "vismoe/eval", "predictor_training": "vismoe/predictor_training"}
    expected = {
        f"{target}/{file.relative_to(ROOT / folder)}"
        for folder, target in folders.items()
        for file in (ROOT / folder).rglob("*.py")
        if not file.is_relative_to(ROOT / "eval" / "studies")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert f"vismoe/kernels/{FILE}" in names


def test_the_licences_of_everything_bundled_are_in_the_wheel(names):
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert "vismoe/assets/sprites/LICENSE" in names


def test_the_wheel_is_small_enough_to_download(wheel):
    assert wheel.stat().st_size < 100 * 2**20


def test_the_folders_import_under_the_library_name_alone(installed, tmp_path):
    program = "import json, vismoe, vismoe.eval, vismoe.cli.main\nprint(json.dumps([vismoe.__file__, vismoe.eval.__file__]))"
    done = run_installed(installed, ["-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(installed) for file in json.loads(done.stdout))
    assert [name for name in GENERIC_NAMES if list(installed.glob(f"{name}*"))] == []
    assert (installed / "vismoe" / "app" / "ui.css").is_file() and list((installed / "vismoe" / "eval" / "tasks").glob("*.yaml"))


def test_the_demo_answers_from_the_installed_wheel(installed, tmp_path):
    picture = installed / "vismoe" / "assets" / "images" / "demo.png"
    chat = ["-m", "vismoe.cli", "chat", "--memory", "25%", "--image", str(picture), "--max-tokens", "16", "--json"]
    done = run_installed(installed, [*chat, "What is this?"], tmp_path)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert reply["answer"].strip()
    assert reply["decode"]["tokens"] > 0


def test_a_study_says_that_the_wheel_does_not_hold_it(installed, tmp_path):
    done = run_installed(installed, ["-m", "vismoe.cli", "eval", "ladder"], tmp_path)
    assert done.returncode == 2
    assert "ladder is not installed" in done.stderr and "Fix: run vismoe eval in a clone" in done.stderr


def test_an_editable_install_sees_the_same_folders():
    """The suite itself runs from one; the folders of the checkout are reached under the library's name."""
    program = "import vismoe.eval, vismoe.app.options; print(vismoe.eval.__file__, vismoe.app.options.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(ROOT) for file in done.stdout.split())
