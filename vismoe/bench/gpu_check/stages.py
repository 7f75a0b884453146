"""The stages of `vismoe gpu-check`, in their order. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vismoe.errors import ConfigError

WITHOUT_GPU_FACTOR = 4  # on the deadlines where there is no GPU: the interpreter is slow, and most stages do not run


@dataclass(frozen=True)
class CheckStage:
    """One stage: what it calls, and for how long at most. `checkpoint` names the generated weights that it needs."""

    name: str
    deadline_s: float
    what: str
    calls: str  # "module:function" of this package
    options: dict[str, Any] = field(default_factory=dict)
    needs_gpu: bool = True
    checkpoint: str | None = None


def _tests(*files: str) -> dict[str, Any]:
    return {"files": [f"test_{file}.py" for file in files]}


STAGES = (
    CheckStage("facts", 10, "driver, memory, NUMA, PCI link, context, page-locking", "machine:facts_of_gpu", needs_gpu=False),
    CheckStage("cuda", 40, "the tests that need a GPU", "tests:run_tests", _tests("cuda")),
    CheckStage("families", 35, "every family, eager on the GPU against ours", "tests:run_tests", _tests("cuda_families")),
    CheckStage(
        "kernels", 60, "the GPU kernels, interpreted without a GPU, and compiled", "tests:run_tests", _tests("gpu_kernels"), False
    ),
    CheckStage("streams", 30, "copies on simulated streams", "tests:run_tests", _tests("simulated_cuda"), False),
    CheckStage("rates", 15, "copies, launches, waits", "rates:measure_rates"),
    CheckStage("contest", 109, "8 of 48 layers, against transformers and accelerate", "contest:contest", checkpoint="contest"),
    CheckStage("resident", 65, "every expert on the device, 4 of 48 layers", "contest:resident", checkpoint="small"),
    CheckStage("policies", 50, "two formats at once, 4 of 48 layers", "contest:policies", checkpoint="small"),
    CheckStage("image", 40, "a question about a picture, end to end", "contest:image", checkpoint="small"),
    CheckStage("whole", 85, "as many of 48 layers as the disk holds, raw and int4", "contest:whole", checkpoint="whole"),
)
STORES = {"contest": (), "small": ("int4", "int2"), "whole": ("int4",)}  # packed beside each checkpoint
NAMES = tuple(stage.name for stage in STAGES)


def chosen(names: Sequence[str], has_gpu: bool) -> tuple[CheckStage, ...]:
    """The stages of these names (empty: all), in the table's order; without a GPU those that need none.

    Raises ConfigError for an unknown name, and for names that leave nothing to run.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--stages {','.join(unknown)}: no such stage. Fix: choose among {', '.join(NAMES)}")
    found = tuple(stage for stage in STAGES if (stage.name in names or not names) and (has_gpu or not stage.needs_gpu))
    if not found:
        free = ", ".join(stage.name for stage in STAGES if not stage.needs_gpu)
        raise ConfigError(f"--stages {','.join(names)} need a GPU, and torch sees none here. Fix: choose among {free}")
    return found
