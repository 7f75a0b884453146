"""Lets torchvision be imported if its compiled library was built for another torch.

PyPI's torchvision belongs to PyPI's torch, which includes CUDA. Beside a CPU-only torch its library cannot be loaded, and `import
torchvision` fails, because it describes operators that are not defined; transformers and lmms-eval fail with it. Once operators
of these names exist, the import works, and so does everything in it that is Python (resizing, normalising). Calling one of the
operators themselves (nms, roi_align, ...) is still an error.

`mend_on_import` acts at the first import of torchvision; if the library loads, it changes nothing.
"""

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

DESCRIBED = re.compile(r"""register_(?:fake|meta|autograd)\(\s*"(?:torchvision::)?(\w+)\"""")
_libraries: list[Any] = []  # the definitions exist as long as these objects


def mend_on_import() -> None:
    """Makes the first import of torchvision check its library first. Imports nothing itself."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


class _BeforeTorchvision(MetaPathFinder):
    """An import finder that finds nothing, but runs before the others."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                folder = Path(spec.submodule_search_locations[0])
                if not _library_loads(folder):
                    _define(folder)
        return None


def _library_loads(folder: Path) -> bool:
    """Whether the compiled library fits the installed torch."""
    import torch

    try:
        for library in (*folder.glob("_C*.so"), *folder.glob("_C*.pyd")):
            torch.ops.load_library(library)
            return True
    except (ImportError, OSError):
        pass
    return False


def _define(folder: Path) -> None:
    """Defines operators of all names that torchvision describes, without implementations."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name in sorted({name for file in folder.glob("_*_registrations.py") for name in DESCRIBED.findall(file.read_text())}):
        library.define(f"{name}(Tensor x) -> Tensor")
