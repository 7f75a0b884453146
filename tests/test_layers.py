"""Which file may import which: every import, also those inside functions and for types alone, against the architecture's rows.

A file imports from its own row or from rows above it (smaller numbers), and files of one row import each other in no circle.
Checked by reading the sources, so a circle that only shows at run time, or an import hidden in a function, is found too.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "types": 0, "pair": 0, "errors": 0, "metrics": 0, "config": 0, "options": 0, "ranges": 0, "timeline": 0, "threads": 0,
    "locks": 0, "torchvision_operators": 0, "after_import": 0,
    "formats": 1,
    "store": 2, "pools": 2, "planning": 2, "kernels": 2, "machine": 2, "precision": 2, "vision": 2,
    "paging": 3, "speculate": 3, "trace": 3,
    "models": 4, "lookahead": 4, "simulate": 4,
    "engine": 5, "flags": 5, "words": 5,
    "bench": 6, "cli": 6, "app": 6, "eval": 6, "predictor_training": 6,
}  # fmt: skip
MODELS = ("family", "inputs", "visual", "moe", "load")  # the packages of models/: each imports from those before it
FOLDERS = {"vismoe": "vismoe", "app": "vismoe.app", "eval": "vismoe.eval", "predictor_training": "vismoe.predictor_training"}
# Never needed to import the package: each lives behind an extra, or is a build of torch that a user may lack, or of use later.
OPTIONAL = {
    "torchvision", "gradio", "matplotlib", "lmms_eval", "fastapi", "triton", "uvicorn", "gguf", "llama_cpp", "starlette",
    "openai", "prometheus_client", "httpx", "httpcore", "pydantic", "ray", "qwen_vl_utils", "requests", "av", "pypdfium2",
}  # fmt: skip

# The files that are such a package's own: whoever imports one does so inside a function, or is one of them.
BEHIND_AN_EXTRA = {
    "vismoe/kernels/gpu/attention_programs.py",
    "vismoe/kernels/gpu/row_programs.py",
    "vismoe/kernels/gpu/programs.py",
    "vismoe/models/inputs/remote_images.py",
    *(
        f"app/{name}.py"
        for name in "ui ui_serving answers api api_errors callers completions guard images messages responses".split()
    ),
    *(f"app/{name}.py" for name in "known_hosts request_memory schemas serving".split()),
    "eval/lmms_model.py",
    "eval/studies/soak_clients.py",
}


def module_name(file: Path) -> str:
    """`eval/scenes.py` -> `vismoe.eval.scenes`: the name under which the package table installs a file."""
    folder, *rest = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that `source` imports; `from vismoe import store` and `import vismoe.store` are alike."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{target}.{alias.name}") for alias in node.names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module` imports from below its own row."""
    parts = module.split(".")
    if len(parts) == 1:
        return []  # vismoe/__init__.py is the public surface: it re-exports from any row
    own = ROWS.get(parts[1])
    assert own is not None, f"{module}: no row for {parts[1]!r}; add it to the table here and in docs/architecture.md"
    found = []
    for line, name in imported_modules(source, module, is_package):
        target = name.split(".")
        if target[0] != "vismoe" or len(target) == 1:
            continue
        row = ROWS.get(target[1])
        if row is not None and row > own:
            found.append(f"{module}:{line} (row {own}) imports {name} (row {row})")
        elif target[1] == "cli" and parts[1] != "cli":
            found.append(f"{module}:{line} imports {name}, which only a person uses")
        elif (
            len(parts) > 2
            and parts[1] == target[1] == "models"
            and len(target) > 2
            and MODELS.index(target[2]) > MODELS.index(parts[2])
        ):
            found.append(f"{module}:{line} imports {name}, of a package after its own")
    return found


def source_files() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def imports_within(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Module -> the modules among `sources` that it imports; sources: module -> (text, whether it is a package)."""

    def home(name: str) -> str:
        return name if name in sources else name.rpartition(".")[0]

    found = {}
    for module, (text, is_package) in sources.items():
        names = {home(name) for _, name in imported_modules(text, module, is_package)}
        found[module] = names & (sources.keys() - {module})
    return found


def in_circles(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of `imports` without modules that import nothing of the rest, and those that nothing of the rest imports."""
    while True:
        imported = set().union(*imports.values())
        left = {module: targets & imports.keys() for module, targets in imports.items() if targets & imports.keys()}
        left = {module: targets for module, targets in left.items() if module in imported}
        if left == imports:
            return left
        imports = left


@pytest.mark.budget(10)  # every file
@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_from_its_own_row_or_above(file):
    assert not violations(file.read_text(), module_name(file), file.name == "__init__.py")


@pytest.mark.budget(10)  # every file
@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_optional_packages_are_imported_inside_functions_only(file):
    statements = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    source = "\n".join(map(ast.unparse, statements))
    names = {name.split(".")[0] for _, name in imported_modules(source, module_name(file), file.name == "__init__.py")}
    if str(file.relative_to(ROOT)) not in BEHIND_AN_EXTRA:
        assert not names & OPTIONAL


def test_no_modules_import_each_other_in_a_circle():
    """Neither inside functions nor for types alone."""
    sources = {module_name(file): (file.read_text(), file.name == "__init__.py") for file in source_files()}
    assert in_circles(imports_within(sources)) == {}


def test_a_public_class_name_has_one_meaning():
    homes: dict[str, list[str]] = {}
    for file in source_files():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module_name(file))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_the_type_checker_reads_every_folder_under_its_installed_name():
    """`make types` links what the package table installs; the recipe in assets/ is checked under its own names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert {folder: name.replace("/", ".") for name, folder in table.items() if folder != "assets"} == FOLDERS
    linked = re.findall(r"^FOLDERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert {"vismoe", *linked} == FOLDERS.keys()


def test_the_command_line_imports_without_any_extra():
    """The test above allows some files what others may not have: nobody gets at them on the way to a command."""
    blocked = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(OPTIONAL))
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}import vismoe, vismoe.cli.main"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vismoe.store.checkpoint", "from vismoe.paging.pager import Pager"),
        ("vismoe.types", "import vismoe.formats.raw"),
        ("vismoe.models.inputs.images", "def late():\n    from vismoe import engine"),
        ("vismoe.paging.pager", "from ..models import families"),
        ("vismoe.engine.engine", "from ..cli.chat import chat"),
        ("vismoe.lookahead.gate", "from vismoe.eval.scenes import random_scene"),
    ],
)
def test_the_reader_sees_imports_in_functions_and_relative_ones(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    "back",
    [
        "from vismoe.paging import demand",
        "def late():\n    import vismoe.paging.demand",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .demand import Demand",
    ],
)
def test_a_circle_is_found_however_it_is_closed(back):
    imports = imports_within(
        {
            "vismoe.paging": ("", True),
            "vismoe.paging.demand": ("from vismoe.paging.lent import Group", False),
            "vismoe.paging.lent": ("from . import pager", False),
            "vismoe.paging.pager": (f"import numpy as np\nfrom vismoe.types import Phase\n{back}", False),
            "vismoe.types": ("", False),
            "vismoe.engine": ("from vismoe.paging.pager import Pager", False),
        }
    )
    assert in_circles(imports) == {
        "vismoe.paging.demand": {"vismoe.paging.lent"},
        "vismoe.paging.lent": {"vismoe.paging.pager"},
        "vismoe.paging.pager": {"vismoe.paging.demand"},
    }
    assert in_circles(imports | {"vismoe.paging.pager": {"vismoe.types"}}) == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vismoe.cli.chat", "from vismoe.engine.engine import Engine\nimport torch"),
        ("vismoe.models.inputs.images", "from vismoe.errors import InputError\nfrom . import locate"),
        ("vismoe.eval.scenes", "from .world import NOUNS"),
        ("vismoe.paging", "from vismoe.pools.pool import Pool"),
    ],
)
def test_imports_from_the_own_row_or_above_pass(module, source):
    assert not violations(source, module, is_package=module == "vismoe.paging")
