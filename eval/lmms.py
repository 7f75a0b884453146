"""Connects lmms-eval with VisMoE: the manifest for its entry point, the folder of VisMoE's tasks, and its command with both.

    lmms-eval --model vismoe --model_args memory=25%,keep=0.5 --tasks pope             the model comes from the entry point
    python -m vismoe.eval.lmms --model vismoe --tasks scenes_pope --limit 40           the same command with VisMoE's tasks
    accelerate launch -m vismoe.eval.lmms --model vismoe --tasks scenes_pope           in several processes

`python -m vismoe.eval.lmms` also works with a torchvision that was built for another torch, where `lmms-eval` does not start.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks"  # the value for --include_path of lmms-eval
MODELS = "vismoe.eval.lmms_model"


def manifest() -> Any:
    """The `ModelManifest` of `--model vismoe`, for the entry point group `lmms_eval.models`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("vismoe", simple_class_path=f"{MODELS}.VisMoE", chat_class_path=f"{MODELS}.VisMoEChat")


def main(arguments: Sequence[str] | None = None) -> None:
    """lmms-eval's own command, which also looks for tasks in VisMoE's folder, unless `--include_path` names another one."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not any(argument.split("=")[0] == "--include_path" for argument in arguments):
        arguments = ["--include_path", str(TASKS), *arguments]
    sys.argv = ["lmms-eval", *arguments]  # lmms-eval reads them from there
    from lmms_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
