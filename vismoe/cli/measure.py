"""`vismoe plan` and `vismoe replay`: results without running a model, as tables or as one JSON object."""

from argparse import ArgumentParser, Namespace
from typing import Any

from vismoe import flags
from vismoe.config import ENGINE_DEFAULTS, Settings
from vismoe.errors import InputError

CPU_BYTES_PER_S = 40e9  # the read rate of two cores with two memory channels


def replay_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe replay`."""
    parser.add_argument("trace", metavar="TRACE", help="a folder that vismoe chat --trace recorded")
    flags.add(parser, "--slots N", "cache sizes to compare: slabs, or a share such as 25%%", nargs="+", required=True)
    flags.add(parser, "--window W", "number of next MoE layers whose experts eviction protects (default: 5)", flags.at_least_one)
    flags.add(
        parser, "--pinned-layers LAYERS", "first MoE layers whose experts are never evicted (default: 0)", flags.at_least_one
    )
    flags.add(parser, "--prefetch", "prefetch the experts that the recorded lookahead predicts, within the byte limit")
    flags.add(parser, "--link SIZE", "bytes per second between the tiers, to compute stalls", flags.bytes_per_s)
    flags.add(parser, "--layer-seconds S", "compute time of an MoE layer, during which the link can prefetch", float)
    flags.add(parser, "--token-seconds S", "further compute time of the layer per prompt token", float)
    flags.add(parser, "--lookahead-seconds S", "time of the lookahead per layer", float)
    flags.add(parser, "--pinned-curve", "bytes and time by number of pinned layers, with the default eviction order")
    flags.add(parser, "--misses", "compare ways to serve a miss: wait for the copy, compute on the CPU, or whichever is sooner")
    flags.add(
        parser,
        "--cpu SIZE",
        f"with --misses: weights that the CPU reads per second while it computes (default: {CPU_BYTES_PER_S / 1e9:.0f}GB)",
        flags.bytes_per_s,
    )
    flags.add(parser, "--cpu-token-seconds S", "with --misses: CPU compute time per token and expert", float)
    flags.add(parser, "--json", "one JSON object with all rows")


def replay_conditions(arguments: Namespace) -> dict[str, Any]:
    """The flags by the field names of Conditions."""
    names = {
        "window": "window",
        "pinned_layers": "pinned_layers",
        "link": "link_bytes_per_s",
        "layer_seconds": "compute_s_per_layer",
        "token_seconds": "compute_s_per_token",
        "lookahead_seconds": "lookahead_s",
    }
    given = {field: getattr(arguments, flag) for flag, field in names.items() if getattr(arguments, flag) is not None}
    return {**given, "prefetch": arguments.prefetch}


def run_replay(arguments: Namespace) -> int:
    """Replays every eviction order and the oracle at every size; with --misses every way to serve a miss."""
    if not arguments.misses and (arguments.cpu is not None or arguments.cpu_token_seconds is not None):
        raise InputError("--cpu and --cpu-token-seconds apply to --misses only. Fix: add --misses, or leave them out")
    replay = replay_misses if arguments.misses else replay_pinned if arguments.pinned_curve else replay_orders
    found, text = replay(arguments)
    if arguments.json:
        flags.print_json(arguments, {"trace": arguments.trace, **found})
    else:
        print(text)
    return 0


def replay_orders(arguments: Namespace) -> tuple[dict[str, Any], str]:
    """Replays every eviction order and the oracle at every size; returns results for JSON and as text."""
    from vismoe.simulate.replay import compare, format_table
    from vismoe.trace.files import Trace

    rows = compare(Trace.open(arguments.trace), [_slots(text) for text in arguments.slots], **replay_conditions(arguments))
    return {"rows": [row.to_json() for row in rows]}, format_table(rows)


def replay_pinned(arguments: Namespace) -> tuple[dict[str, Any], str]:
    """Replays every number of pinned layers that fits, at every size."""
    from vismoe.simulate.demands import Demands
    from vismoe.simulate.pinned import best_depth, format_curves, pinned_curve
    from vismoe.trace.files import Trace

    if arguments.pinned_layers is not None:
        raise InputError("--pinned-curve tries every number of pinned layers. Fix: leave out --pinned-layers")
    demands, conditions = Demands.of(Trace.open(arguments.trace)), replay_conditions(arguments)
    curves = {size: pinned_curve(demands, _slots(size), **conditions) for size in arguments.slots}
    timed = arguments.link is not None
    best = {size: best_depth(points, timed) for size, points in curves.items()}
    text = f"{format_curves(curves, timed)}\nbest: {', '.join(f'{layers} at {size}' for size, layers in best.items())}"
    return {"best": best, "curves": {size: [vars(point) for point in points] for size, points in curves.items()}}, text


def replay_misses(arguments: Namespace) -> tuple[dict[str, Any], str]:
    """Replays every way to serve a miss, at every size and link rate."""
    from vismoe.simulate.misses import LINKS_BYTES_PER_S, compare_misses, format_misses
    from vismoe.trace.files import Trace

    if arguments.pinned_curve:
        raise InputError("--misses and --pinned-curve are two different comparisons. Fix: leave one of them out")
    conditions = replay_conditions(arguments)
    link = conditions.pop("link_bytes_per_s", None)
    if arguments.cpu_token_seconds is not None:
        conditions["cpu_s_per_token"] = arguments.cpu_token_seconds
    compared = compare_misses(
        Trace.open(arguments.trace),
        [_slots(text) for text in arguments.slots],
        LINKS_BYTES_PER_S if link is None else (link,),
        cpu_bytes_per_s=arguments.cpu or CPU_BYTES_PER_S,
        **conditions,
    )
    return {"time": "virtual", **compared.to_json()}, format_misses(compared)


def _slots(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def plan_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe plan`."""
    flags.add_one_model(parser)
    flags.add(parser, "--json", "one JSON object, sizes in bytes")
    flags.add_model_flags(parser)
    flags.add_settings(parser)


def run_plan(arguments: Namespace) -> int:
    """Prints the plan that loading would follow; loads nothing and downloads no weights."""
    model = flags.one_model(arguments)
    settings = Settings.of(**{**ENGINE_DEFAULTS, **flags.given_settings(arguments)})
    from rich.console import Console

    from vismoe.cli.print import print_plan

    with flags.quick_imports():
        from vismoe.models.load.preview import preview

    plan = preview(model, settings, **flags.model_options(arguments))
    if arguments.json:
        flags.print_json(arguments, plan.to_json())
    else:
        print_plan(Console(), plan)
    return 0


PLAN = flags.Command(
    "show how memory would be divided, before any weight is loaded",
    plan_arguments,
    run_plan,
    """\
  vismoe plan                                                    the bundled demo model
  vismoe plan Qwen/Qwen3-VL-30B-A3B-Instruct --memory 8GiB --context 8192
  vismoe plan Qwen/Qwen3-VL-30B-A3B-Instruct --memory 16GiB --policy hotness --formats 4/2
  vismoe plan ./my-model --memory 25% --json | jq .slabs""",
)
REPLAY = flags.Command(
    "compute what each eviction order, and the oracle, would have read for a recorded trace",
    replay_arguments,
    run_replay,
    """\
  vismoe chat --image photo.jpg --trace routing "What is this?"  records the folder routing
  vismoe replay routing --slots 32 64 25% --json
  vismoe replay routing --slots 25% --misses --cpu 40GB            the link rate above which copying beats the CPU""",
)
