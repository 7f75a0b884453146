"""`vismoe gpu-check`: what is to be found out on the day a GPU is there, in one command; without one, what can be known."""

import math
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vismoe import flags
from vismoe.bench.gpu_check.stages import NAMES, STORES, WITHOUT_GPU_FACTOR, CheckStage, chosen
from vismoe.cli.bench import comma_list
from vismoe.config import format_bytes
from vismoe.errors import ConfigError, InputError

FAILED = 2  # a test or a stage failed, or a stage was late
GEOMETRY = "qwen3-vl-30b-a3b"
# Percent of the experts on the device, the most telling first; tokens of prompts, the longest first; layers of checkpoints.
FULL = {"shares": (25.0, 100.0, 50.0, 12.5), "prompts": (2048, 512), "layers": 8, "small_layers": 4}
QUICK = {"shares": (25.0, 100.0), "prompts": (512, 128), "layers": 4, "small_layers": 2}
SPARE_BYTES = 2**30  # of the disk


def gpu_check_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe gpu-check`."""
    flags.add(parser, "--stages LIST", f"only these: {', '.join(NAMES)}", comma_list, [])
    flags.add(parser, "--quick", "fewer layers and rows, without the stage whole")
    flags.add(parser, "--out FILE", "report, replaced after each stage (default: gpu-check.json)", Path, Path("gpu-check.json"))
    flags.add(parser, "--folder DIR", "where weights are generated (default: bench/gpu-check in vismoe's cache folder)", Path)
    flags.add(parser, "--geometry NAME", f"shapes of the generated weights (default: {GEOMETRY})", str, GEOMETRY)
    flags.add(parser, "--keep", "keep the generated weights for the next time")
    flags.add(parser, "--roofline", "print what published rates of four cards allow, and do nothing else")
    flags.add(parser, "--json", "print only one JSON line")


def run_gpu_check(arguments: Namespace) -> int:
    """Runs the stages; Ctrl-C keeps what was measured. FAILED if a test or a stage failed, or a stage was late."""
    from vismoe.bench import roofline

    if arguments.roofline:
        if arguments.json:
            flags.print_json(arguments, roofline.report())
        else:
            print(roofline.markdown())
        return 0
    if not arguments.out.absolute().parent.is_dir():
        raise InputError(f"--out {arguments.out}: its folder is missing. Fix: create it")
    with flags.quick_imports():
        import torch

        from vismoe.bench.environment import commit
        from vismoe.bench.gpu_check.runner import GOOD, run_stages, write
        from vismoe.bench.gpu_check.summary import printed, summarise
        from vismoe.bench.subject import bench_folder

    has_gpu = torch.cuda.is_available()
    names = arguments.stages or [name for name in NAMES if not (arguments.quick and name == "whole")]
    stages = chosen(names, has_gpu)
    folder = arguments.folder or bench_folder() / "gpu-check"
    options = {**(QUICK if arguments.quick else FULL), "device": "cuda:0", "geometry": arguments.geometry, "keep": arguments.keep}
    options |= {"folder": str(folder)} | with_room(options, stages, folder)
    running = [stage.name for stage in stages]
    absent = [name for name in names if name not in running]
    absent = [f"{', '.join(absent)}: torch {torch.__version__} sees no GPU here"] if absent else []
    report: dict[str, Any] = {"command": sys.argv, "commit": commit(), "options": options, "not_done": absent, "stages": []}
    with flags.signals_call(signal.default_int_handler, signal.SIGTERM):  # so that no stage outlives this process
        whole = run_stages(stages, options, arguments.out, report, 1 if has_gpu else WITHOUT_GPU_FACTOR, tell)
    report["interrupted"] = not whole
    report["not_done"] += [f"{name}: not reached" for name in running[len(report["stages"]) :]]
    summarise(report)
    write(arguments.out, report)
    if not arguments.json:
        print(printed(report) if has_gpu else f"{roofline.markdown()}\n\n{printed(report)}")
    flags.print_json(arguments, report)
    if not whole:
        return flags.INTERRUPTED
    return 0 if all(row["status"] in GOOD for row in report["stages"]) else FAILED


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def with_room(options: Mapping[str, Any], stages: Sequence[CheckStage], folder: Path) -> dict[str, Any]:
    """`whole_layers`, as many as the disk of `folder` holds, and `disk_bytes`; says both before anything is written.

    Raises ConfigError if a checkpoint does not fit, or would leave fewer layers than the contest has.
    """
    wanted = dict.fromkeys(stage.checkpoint for stage in stages if stage.checkpoint)
    if not wanted:
        return {"disk_bytes": 0}
    from vismoe.bench.geometry import geometry_config
    from vismoe.bench.gpu_check.contest import needed_bytes
    from vismoe.machine.disk import nearest_folder

    geometry, most = options["geometry"], geometry_config(options["geometry"]).get_text_config().num_hidden_layers
    layers = {"contest": options["layers"], "small": options["small_layers"], "whole": most}
    needs = {name: needed_bytes(geometry, layers[name], STORES[name]) for name in wanted}
    free = shutil.disk_usage(nearest_folder(folder)).free - SPARE_BYTES
    free += sum(file.stat().st_size for name in wanted for file in (folder / name).rglob("*") if file.is_file())
    others = [needs[name] for name in wanted if name != "whole"]
    room = free - sum(others) if options["keep"] else free
    if "whole" in needs and needs["whole"] > room:
        one = (needs["whole"] - needed_bytes(geometry, 1, STORES["whole"])) / max(1, most - 1)
        layers["whole"] = most - math.ceil((needs["whole"] - room) / one)
        needs["whole"] = needed_bytes(geometry, max(1, layers["whole"]), STORES["whole"])
    total = sum(needs.values()) if options["keep"] else max(needs.values())
    if total > free or layers["whole"] < layers["contest"]:
        raise ConfigError(
            f"the generated weights take {format_bytes(total)} at a time, and {folder} has {format_bytes(max(0, free))}. "
            "Fix: --folder on a larger disk, --quick, or --stages without contest and whole"
        )
    how = "kept" if options["keep"] else "deleted after the last stage that needs them"
    fewer = f"; the stage whole has {layers['whole']} of {most} layers" if "whole" in needs else ""
    tell(f"weights: at most {format_bytes(total)} at a time in {folder}, {how}{fewer}")
    return {"disk_bytes": total, "whole_layers": layers["whole"]}


GPU_CHECK = flags.Command(
    "check and measure this machine's GPU in less than nine minutes",
    gpu_check_arguments,
    run_gpu_check,
    """\
  vismoe gpu-check                                               everything; without a GPU what needs none
  vismoe gpu-check --quick --stages facts,rates,contest --out first.json
  vismoe gpu-check --roofline                                    what published rates of four cards allow""",
)
