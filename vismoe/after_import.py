"""Runs a function when a module is first imported: registration with parts of transformers that take long to import."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(module: str, function: Callable[[], object]) -> None:
    """Calls `function` once: now if `module` is imported, otherwise after its import. Imports nothing itself."""
    if module in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _After(module, function))


class _After(MetaPathFinder):
    """An import finder for one module, which it leaves to the others and follows with the function."""

    def __init__(self, module: str, function: Callable[[], object]):
        self._module, self._function = module, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)  # the search below would find this finder again
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)  # until the import has succeeded
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_follow(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._function()

            spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec
