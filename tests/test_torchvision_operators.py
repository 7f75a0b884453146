"""torchvision beside a torch it was not built for: a made-up one of that kind, in fresh processes, and the installed one."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REGISTRATIONS = 'import torch\n@torch.library.register_fake("torchvision::{name}")\ndef meta(boxes):\n    return boxes\n'


def installed(folder: Path, *, library: bytes | None) -> Path:
    """A torchvision in `folder` that describes an operator as it is imported, as the real one does."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import _meta_registrations\nfrom . import transforms\n")
    (package / "_meta_registrations.py").write_text(REGISTRATIONS.format(name="nms_of_a_test"))
    (package / "transforms.py").write_text("works = True\n")
    if library is not None:
        (package / "_C.so").write_bytes(library)
    return folder


def run(program: str, path: Path) -> str:
    """What a fresh process prints last: its answer, or the error that ended it."""
    program = f"import sys; sys.path.insert(0, {str(path)!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


IMPORT = "import torchvision; print(torchvision.transforms.works)"


def test_it_cannot_be_imported_alone_and_can_be_once_vismoe_is(tmp_path):
    folder = installed(tmp_path, library=b"built for another torch")
    assert "nms_of_a_test does not exist" in run(IMPORT, folder)
    assert run(f"import vismoe\n{IMPORT}", folder) == "True"


def test_where_the_library_loads_nothing_is_defined(tmp_path):
    """torch's own library stands for one that fits; then an operator that nobody defines stays an error."""
    folder = installed(tmp_path, library=None)
    loads = next((Path(find_spec("torch").origin).parent / "lib").glob("libtorch_global_deps.*"))
    (folder / "torchvision" / "_C.so").symlink_to(loads)
    assert "nms_of_a_test does not exist" in run(f"import vismoe\n{IMPORT}", folder)


def test_importing_vismoe_imports_neither_torch_nor_torchvision_and_leaves_no_finder_behind(tmp_path):
    folder = installed(tmp_path, library=None)
    after = "finders = [f for f in sys.meta_path if type(f).__module__ == 'vismoe.torchvision_operators']; print("
    assert run(f"import vismoe, vismoe\n{after}len(finders), 'torch' in sys.modules)", folder) == "1 False"
    assert run(f"import vismoe, torchvision\n{after}finders)", folder) == "[]"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_the_installed_one_resizes_images():
    import torch

    import vismoe  # noqa: F401

    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    assert functional.resize(torch.rand(3, 8, 8), [4, 4]).shape == (3, 4, 4)
