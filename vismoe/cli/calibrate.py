"""`vismoe calibrate`: runs a model on real prompts and stores what it learns: a predictor of the next experts, and where and by
which selection to drop visual tokens.
"""

import argparse
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe import flags
from vismoe.config import SETTINGS, format_bytes
from vismoe.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from vismoe.predictor_training.calibrate import Calibrated

SCENE_PROMPTS = 1000
NAMES = SETTINGS["selection"].choices


def calibrate_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe calibrate`."""
    flags.add_one_model(parser)
    data = parser.add_argument_group("prompts")
    flags.add(
        data,
        "--data FOLDER",
        'a folder with your prompts: *.jsonl with lines {"image": "photo.jpg", "prompt": "What is this?"} (image '
        'optional, or a list) or {"messages": [...]}, images, and text files',
    )
    flags.add(data, "--scenes", "use generated scenes of a bundled model's world")
    flags.add(data, "--world WORLD", "with --scenes: demo (default), or gallery, which the larger model knows", default="demo")
    flags.add(
        data,
        "--prompts N",
        f"with --scenes: number of scenes to train on (default: {SCENE_PROMPTS})",
        flags.at_least_one,
        SCENE_PROMPTS,
    )
    flags.add(data, "--unseen KIND", "a kind of prompt to exclude from training (default with --scenes: text)")
    training = parser.add_argument_group("training")
    flags.add(training, "--epochs N", "most epochs; training usually stops earlier", flags.at_least_one)
    flags.add(training, "--bottleneck N", "width of the network", flags.at_least_one)
    flags.add(training, "--seed S", "the same seed gives the same predictor (default: 0)", int, 0)
    flags.add(training, "--train-device DEVICE", "where the networks are trained (default: cpu)", default="cpu")
    tokens = parser.add_argument_group(
        "visual tokens", "settings for recording answers at keep 0.5; calibration finds the best ones itself"
    )
    flags.add(tokens, "--prune-layer LAYER", "decoder layer from which tokens are dropped", flags.at_least_one, argparse.SUPPRESS)
    tokens.add_argument("--selection", choices=NAMES, default=argparse.SUPPRESS, help="how the kept tokens are selected")
    flags.add(parser, "--out DIR", "folder for the result (default: vismoe-calibration beside the checkpoint's files)")
    flags.add(parser, "--work DIR", "folder for the traces, which are then kept (default: in the cache, deleted at the end)")
    flags.add(parser, "--json", "one JSON object with all figures")
    flags.add_model_flags(parser)
    memory = parser.add_argument_group("memory")
    flags.add(memory, "--memory SIZE|PERCENT", "memory for the model while it answers the prompts", default=argparse.SUPPRESS)
    flags.add(memory, "--context TOKENS", "prompt and answer together", flags.at_least_one, argparse.SUPPRESS)


def run_calibrate(arguments: Namespace) -> int:
    """Runs all steps; an interrupt keeps what was collected."""
    if bool(arguments.data) == arguments.scenes:
        raise InputError("no prompts were given. Fix: --data FOLDER with your own, or --scenes for generated ones")
    try:
        return _calibrate(arguments)
    except KeyboardInterrupt:
        print("\ninterrupted: what was collected is kept, and the same command continues from there", file=sys.stderr)
        return flags.INTERRUPTED


def _calibrate(arguments: Namespace) -> int:
    import shutil

    from rich.console import Console

    with flags.quick_imports():
        from vismoe.machine.profile import profile_file
        from vismoe.predictor_training.calibrate import calibrate, refuse_unwritable
        from vismoe.predictor_training.collect import progress_bar, work_name
        from vismoe.predictor_training.prompts import UNSEEN_KIND, folder_prompts, scene_prompts
        from vismoe.predictor_training.train import TrainingRecipe, refuse_device, refuse_too_few

    refuse_device(arguments.train_device)
    model = flags.one_model(arguments)
    out = Path(arguments.out).expanduser() if arguments.out else _beside(model, arguments.revision)
    refuse_unwritable(out)
    if arguments.scenes:
        unseen = arguments.unseen or UNSEEN_KIND
        prompts = scene_prompts(arguments.prompts, max(8, arguments.prompts // 6), unseen, arguments.world)
    else:
        prompts = folder_prompts(arguments.data, arguments.unseen)
    refuse_too_few([prompt.name for prompt in prompts])
    given = {name: getattr(arguments, name) for name in ("epochs", "bottleneck") if getattr(arguments, name) is not None}
    recipe = TrainingRecipe(seed=arguments.seed, **given)
    arguments.calibration = "none"  # do not use the result of an earlier run
    with flags.load_engine(arguments, model) as engine, progress_bar() as bar:
        cached = profile_file("any").parent / "calibrate" / work_name(engine)
        work = Path(arguments.work).expanduser() if arguments.work else cached
        tasks: dict[str, Any] = {}

        def told(doing: str, done: int, total: int | None) -> None:
            if doing not in tasks:
                tasks[doing] = bar.add_task(doing, total=total)
            bar.update(tasks[doing], completed=done, total=total)

        result = calibrate(engine, prompts, work, out, recipe, told, arguments.train_device)
    if not arguments.work:
        shutil.rmtree(work)
    if arguments.json:
        flags.print_json(arguments, result.to_json())
    else:
        print_result(Console(), result)
    return 0


def _beside(model: str | None, revision: str | None) -> Path:
    """The folder in which loading looks for a calibration."""
    from vismoe.lookahead.calibration import FOLDER
    from vismoe.models.family.checkpoint_files import demo_model
    from vismoe.models.load.preview import checkpoint_files

    name = model or str(demo_model())
    files = checkpoint_files(name, revision=revision)
    if not files:
        raise CheckpointError(f"{name} is not on this machine. Fix: download it first, e.g. hf download {name}")
    return files[0].parent / FOLDER


def print_result(console: Any, result: "Calibrated") -> None:
    """Prints the result as tables and sentences."""
    from rich.table import Table

    from vismoe.predictor_training.evaluate import print_judgements

    print_judgements(console, result.judged)
    if result.depths:
        table = Table(title="where visual tokens can be dropped", title_justify="left")
        for head in ("from decoder layer", "rank correlation of expansion", "same answers at keep 0.5", "same beginning"):
            table.add_column(head, justify="right")
        changed = {row.prune_layer: row for row in result.changed}
        for depth in result.depths:
            row = changed.get(depth.prune_layer)
            cells = ("-", "-") if row is None else (f"{row.same_answers:.0%}", f"{row.same_beginning:.0%}")
            mark = " <" if depth.prune_layer == result.calibration.prune_layer else ""
            table.add_row(f"{depth.prune_layer}{mark}", f"{depth.correlation:.3f}", *cells)
        console.print(table)
    if result.costs:
        table = Table(title="nats per answer token that half of the visual tokens cost", title_justify="left")
        for head in ("selection", "nats", "standard error", "against the default", "standard error"):
            table.add_column(head, justify="left" if head == "selection" else "right")
        for cost in result.costs:
            mark = " <" if cost.selection == result.calibration.selection else ""
            figures = (cost.nats, cost.error, cost.against_default, cost.against_error)
            table.add_row(f"{cost.selection}{mark}", *(f"{figure:.4f}" for figure in figures))
        console.print(table)
    if (drafts := result.calibration.drafts) is not None and drafts.formats:
        table = Table(title="drafts by a copy of the experts, of the first to the last token", title_justify="left")
        for head in ("format", "right tokens", "the same experts", "experts of a check foreseen", "named in vain"):
            table.add_column(head, justify="left" if head == "format" else "right")
        for name, of in drafts.formats.items():
            pairs = ((shares[0], shares[-1]) for shares in (of.acceptance, of.same_set, of.foreseen, of.unused))
            table.add_row(name, *(f"{first:.0%} to {last:.0%}" for first, last in pairs))
        console.print(table)
    for name, why in result.drafts_left_out.items():
        console.print(f"drafts in {name} were not measured: {why}", soft_wrap=True)
    if result.recorded_otherwise:
        console.print(result.recorded_otherwise)
    times = ", ".join(f"{name} {share:.1%}" for name, share in result.contest.relative_s.items())
    console.print(f"virtual time of the lookaheads: {times}")
    pinned = ", ".join(f"{layers} at {share}" for share, layers in result.calibration.pinned_layers.items())
    console.print(f"pinned layers that save time, by the share of the experts in memory: {pinned}")
    folder = result.calibration.folder
    size = format_bytes(sum(file.stat().st_size for file in folder.iterdir()))
    console.print(f"{folder}: {size}; lookahead {result.calibration.lookahead}, used from now on if --lookahead is auto")


CALIBRATE = flags.Command(
    "learn from a model's answers which experts come next, and where and how to drop visual tokens",
    calibrate_arguments,
    run_calibrate,
    """\
  vismoe calibrate --scenes                                      the demo model on its own scenes: some minutes
  vismoe calibrate Qwen/Qwen3-VL-30B-A3B-Instruct --data ./my-prompts --memory 20GiB
  vismoe calibrate ./my-model --data ./my-prompts --out ./found    then: vismoe chat ./my-model --calibration ./found

Some hundred prompts like those of your users are enough; calibration validates on a tenth of them and evaluates on a fifth.
Traces of 1,000 short answers of the demo model take 300 MB. After an interrupt, a kill or a full disk the same command continues
from there. A calibration is valid only for the weights that it was made with: VisMoE refuses it for others.""",
)
