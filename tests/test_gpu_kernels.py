"""The GPU kernels without a GPU: interpreted against float64 oracles, and compiled for GPUs that are not here.

Triton decides at import whether it interprets, so both are processes of their own, one for all files of either: a start takes
longer than most tests. `make test` installs Triton beside the environment. With a GPU the first of them runs there instead of
being interpreted.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from searching import SEARCHING

from vismoe.formats.encodings import ENCODINGS

HERE = Path(__file__).parent
BESIDE = Path(sys.prefix) / "triton"
FILES = ("gpu_kernels.py", "gpu_attention.py", "gpu_rows.py", "gpu_graphs.py")
HERE_TOO = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not (HERE_TOO or (BESIDE / "triton").is_dir()), reason="no Triton here: make test installs it")


def run(*arguments: str | Path, **environment: str) -> str:
    """A Python process that has Triton; what it printed."""
    paths = [str(HERE), *([] if HERE_TOO else [str(BESIDE)]), os.environ.get("PYTHONPATH", "")]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    both = {**outer, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    ran = subprocess.run([sys.executable, *arguments], env=both, capture_output=True, text=True, cwd=HERE.parent)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.budget(math.inf)
def test_the_programs_compute_what_the_oracles_do(request):
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    same = [f"--{name}" for name in ("quick", "store-seconds") if request.config.getoption(name.replace("-", "_"))]
    # A GPU waits for the host, which compiles. The plugin is beside this file.
    alone = ("-p", "no:xdist", "-p", "hasty_interpreter") if interpreted else ("-n", "8")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *alone, *same, *(HERE / file for file in FILES), **interpreted)


@pytest.mark.budget(60)
def test_the_programs_compile_for_gpus_that_are_not_here_as_they_were_meant(tmp_path):
    """In the shapes of Qwen3-30B-A3B. Nothing is spilled, and the shared memory of a consumer's GPU suffices. Our own formats are
    loaded 16 bytes at once. Products use the one instruction whose order of additions all tiles share. No multiplication is
    fused with an addition, which would depend on the compiler. Attention is compiled once for any number of tokens, its
    combination once more for a number that the host does not know.
    """
    capabilities, rows, formats = [90], "16", "raw,int4,q4_k,nvfp4_divided"
    if SEARCHING:
        capabilities, rows, formats = [80, 90, 100], "8,16,32", ",".join(["raw", "int8", "int4", "int2", *ENCODINGS])
    asked = ",".join(map(str, capabilities))
    found = json.loads(run(HERE / "gpu_compile.py", asked, rows, formats, TRITON_CACHE_DIR=str(tmp_path)))
    assert {made["capability"] for made in found} == set(capabilities)
    for made in found:
        assert made["spilled_bytes"] == made["other matrix instructions"] == made["fused"] == 0, made
        assert made["shared_bytes"] <= 99 * 1024 and made["registers"] <= 168, made
        if made["program"] in ("up", "down"):
            wide = made["format"] in ("raw", "int8", "int4") and made["rows"] > 8
            assert made["mma.sync"] > 0 and (made["16-byte loads"] >= 8 or not wide), made
        if made["program"] in ("attend", "attend_in_place"):
            assert made["mma.sync"] > 0 and made["16-byte loads"] >= 16, made
    attention = [made["program"] for made in found if made["format"] == "attention"]
    assert attention == ["attend", "attend_in_place", "combine", "combine"] * len(capabilities)
