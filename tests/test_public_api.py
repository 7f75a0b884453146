"""The public surface is `vismoe.__all__`, about ten names: what it lists is there, and importing it needs no optional package."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import vismoe


def test_every_public_name_is_there():
    assert sorted(vismoe.__all__) == sorted(set(vismoe.__all__))
    assert [name for name in vismoe.__all__ if not hasattr(vismoe, name)] == []


def test_everything_that_is_there_is_public():
    assert sorted(vismoe._HOMES) == sorted(vismoe.__all__)
    modules = {name for name, value in vars(vismoe).items() if isinstance(value, types.ModuleType)}
    visible = {name for name in vars(vismoe) if not name.startswith("_")}
    assert visible - modules - {"Any", "TYPE_CHECKING"} <= set(vismoe.__all__)


def test_what_type_checkers_see_is_what_is_imported():
    (guarded,) = [node for node in ast.parse(Path(vismoe.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert seen == vismoe._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = vismoe.lode


def test_dir_offers_the_public_names():
    assert set(vismoe.__all__) <= set(dir(vismoe))


@pytest.mark.budget(12)
def test_the_package_imports_where_no_optional_package_is_installed():
    blocked = ["torchvision", "gradio", "lmms_eval", "fastapi", "triton", "uvicorn"]
    program = (
        f"import gc, sys; gc.disable(); sys.modules.update(dict.fromkeys({blocked}))\n"
        "import vismoe\n"
        "for name in vismoe.__all__: getattr(vismoe, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
