"""`vismoe bench`: times of encode, prefill and decode, cold and warm, compared with other ways to run the same weights."""

import contextlib
import re
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe import flags
from vismoe.bench.geometry import GEOMETRIES
from vismoe.bench.job import GGUF_TYPES, IN_PLACE, OURS, PACKED
from vismoe.config import format_bytes
from vismoe.errors import InputError

if TYPE_CHECKING:
    from vismoe.bench.benchmark import BenchOptions

FAILED = 2  # VisMoE could not be measured; the baselines may have been
TABLE_COLUMNS = 110  # width of the tables if no terminal gives one
PICTURE = re.compile(r"(\d+)x(\d+)")


def bench_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe bench`."""
    flags.add_one_model(parser)
    group = parser.add_argument_group("generated checkpoint, instead of MODEL")
    flags.add(group, "--geometry NAME", "random weights in the shapes of a published model, e.g. qwen3-30b-a3b")
    flags.add(group, "--layers N", "decoder layers of the checkpoint (default: all)", flags.at_least_one)
    flags.add(group, "--skew S", "Zipf exponent of its routing (default: 0, uniform)", float, 0.0)
    flags.add(group, "--folder DIR", "folder of generated checkpoints (default: bench in vismoe's cache folder)")
    flags.add(group, "--clean", "delete the files of earlier benchmarks in DIR, and do nothing else")
    group = parser.add_argument_group("the request")
    flags.add(group, "--prompt TEXT", "a prompt as text (default: random token ids)")
    flags.add(group, "--prompt-tokens N", "number of random token ids (default: 256)", flags.at_least_one, 256)
    flags.add(group, "--new-tokens N", "tokens to generate, greedily (default: 32)", two_or_more, 32)
    flags.add(group, "--image WxH", "a synthetic picture before the prompt, e.g. 512x512", picture_size)
    flags.add(group, "--seed S", "seed of random ids and random weights (default: 0)", int, 0)
    group = parser.add_argument_group("the measurement")
    flags.add(group, "--repeats N", "processes per contestant (default: 3)", flags.at_least_one, 3)
    flags.add(group, "--warm N", "warm requests after the cold one, per process (default: 2)", flags.at_least_one, 2)
    flags.add(group, "--baseline LIST", "what to compare with: transformers,accelerate,llama.cpp", comma_list, [])
    flags.add(group, "--limit SIZE", "memory limit of each process, page cache included", flags.size)
    flags.add(group, "--warm-cache", "allow a comparison without --limit: the page cache serves all")
    flags.add(group, "--gguf FILE", "the same weights for llama.cpp (default: converted)")
    flags.add(group, "--threads N", "threads of each process (default: the cores of this process)", flags.at_least_one)
    flags.add(group, "--trace FILE", "write a timeline of one further request, for chrome://tracing or Perfetto")
    flags.add(group, "--parallel LIST", "also decode so many prompts at once, e.g. 4,16", counts, (), dest="parallel_list")
    flags.add(group, "--control", "also time the Python code that controls this model's layers")
    flags.add(group, "--moe-time", "also time the routed experts alone, in further requests")
    flags.add(group, "--token-time", "also show where VisMoE's time of a decoded token goes, in a further request")
    flags.add(group, "--json", "print only one JSON line")
    flags.add_model_flags(parser)
    flags.add_settings(parser, without=("gguf", "mmproj", "parallel"))
    parser.conflict_handler = "resolve"  # replaces the settings of these names by lists
    group = parser.add_argument_group("VisMoE, measured with each value")
    group.add_argument(
        "--formats",
        "--format",
        dest="format_list",
        type=words_of(IN_PLACE, PACKED, "lossless", "int8", "int4", "int2", *GGUF_TYPES),
        default=[],
        metavar="LIST",
        help="formats of the experts: raw (in place), packed (raw, from a store), lossless, int8, int4, int2; "
        f"{', '.join(GGUF_TYPES)}: from the GGUF file that llama.cpp reads",
    )
    group.add_argument(
        "--kernels",
        dest="kernels_list",
        type=words_of("auto", "torch", "fast"),
        default=[],
        metavar="LIST",
        help="kernels that compute the experts: auto, torch, fast (default: auto)",
    )


def comma_list(text: str) -> list[str]:
    """`"a, b"` -> ["a", "b"]."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def counts(text: str) -> tuple[int, ...]:
    """`"4,16"` -> (4, 16)."""
    return tuple(flags.at_least_one(word) for word in comma_list(text))


def words_of(*known: str) -> Callable[[str], list[str]]:
    """A reader for lists of the known words."""

    def words(text: str) -> list[str]:
        if unknown := [word for word in comma_list(text) if word not in known]:
            raise ArgumentTypeError(f"{', '.join(unknown)}: choose among {', '.join(known)}")
        return list(dict.fromkeys(comma_list(text)))

    return words


def two_or_more(text: str) -> int:
    """An integer of at least 2: prefill gives the first new token, so decoding begins with the second."""
    if flags.at_least_one(text) < 2:
        raise ArgumentTypeError("at least 2, because prefill gives the first new token")
    return int(text)


def picture_size(text: str) -> tuple[int, int]:
    """`640x480` -> (640, 480)."""
    match = PICTURE.fullmatch(text)
    if not match or not (int(match[1]) and int(match[2])):
        raise ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, e.g. 512x512")
    return int(match[1]), int(match[2])


def run_bench(arguments: Namespace) -> int:
    """Prepare, refuse unfair comparisons, run, report. Ctrl-C reports what was measured so far. FAILED if VisMoE failed."""
    model, settings = flags.one_model(arguments), flags.given_settings(arguments)
    settings.pop("gguf")  # of llama.cpp
    refuse_contradictions(arguments, model)
    if arguments.clean:
        refuse_more_than_clean(arguments)
    with flags.quick_imports():
        from vismoe.bench import benchmark
        from vismoe.bench.subject import bench_folder, clean

    folder = Path(arguments.folder) if arguments.folder else bench_folder()
    if arguments.clean:
        deleted, nbytes = clean(folder)
        if arguments.json:
            flags.print_json(arguments, {"folder": str(folder), "deleted": [str(path) for path in deleted], "bytes": nbytes})
        else:
            print(f"{folder}: {len(deleted)} deleted, {format_bytes(nbytes)}")
        return 0
    order = order_of(arguments, model, settings, folder)
    with flags.signals_call(signal.default_int_handler, signal.SIGTERM):  # so that no worker and no control group remains
        report = benchmark.run(order, progress_bar)
    if not arguments.json:
        from rich.console import Console

        from vismoe.bench.table import print_report

        console = Console()
        print_report(console if console.is_terminal else Console(width=TABLE_COLUMNS), report)
    flags.print_json(arguments, report)
    if report["interrupted"]:
        return flags.INTERRUPTED
    return FAILED if any(row["way"] == OURS and row["failed"] for row in report["contestants"].values()) else 0


def refuse_more_than_clean(arguments: Namespace) -> None:
    """Raises InputError for --clean with other flags, since it measures nothing."""
    parser = ArgumentParser()
    bench_arguments(parser)
    usual = vars(parser.parse_args([])) | {name: getattr(arguments, name) for name in ("folder", "json", "clean", "stdout")}
    if more := [name for name, value in vars(arguments).items() if name not in usual or usual[name] != value]:
        raise InputError(
            f"--clean only deletes files, so {', '.join(more)} have no effect. Fix: use --clean only with --folder and --json"
        )


def refuse_contradictions(arguments: Namespace, model: str | None) -> None:
    """Raises InputError for flags that exclude each other."""
    if model and arguments.geometry:
        raise InputError(f"--geometry {arguments.geometry} replaces the model {model}. Fix: leave out one of them")
    if arguments.moe_time and arguments.limit:
        raise InputError("--moe-time needs extra memory, which would count towards --limit. Fix: leave out one of them")
    if not arguments.geometry and (arguments.layers or arguments.skew):
        raise InputError("--layers and --skew describe a generated checkpoint. Fix: add --geometry NAME, or leave them out")
    if arguments.geometry and (arguments.prompt or arguments.dtype or arguments.revision):
        raise InputError(
            "a generated checkpoint has bfloat16 weights, no tokenizer and no revisions. "
            "Fix: leave out --prompt, --dtype and --revision"
        )


def order_of(arguments: Namespace, model: str | None, settings: dict[str, Any], folder: Path) -> "BenchOptions":
    """The flags as options of a benchmark."""
    from vismoe.bench.benchmark import BenchOptions

    given = {name: getattr(arguments, name) for name in BenchOptions.__dataclass_fields__ if name in arguments}
    lists = {"baselines": arguments.baseline, "formats": arguments.format_list, "kernels": arguments.kernels_list}
    lists["parallel"] = arguments.parallel_list
    given |= {name: tuple(words) for name, words in lists.items()}
    given |= {"model": model, "folder": folder, "picture": arguments.image, "settings": settings, "quiet": arguments.json}
    return BenchOptions(**given, command=tuple(sys.argv))


@contextlib.contextmanager
def progress_bar(steps: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr unless `quiet`; each call begins the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task, begun = bar.add_task("benchmark", total=steps), 0

        def begin(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description, completed=begun)
            begun += 1

        yield begin


BENCH = flags.Command(
    "measure encode, prefill and decode, also of other programs with the same weights",
    bench_arguments,
    run_bench,
    f"""\
  vismoe bench                                                   the bundled demo model
  vismoe bench --geometry qwen3-30b-a3b --layers 4 --memory 2GiB --limit 3GiB --baseline accelerate,llama.cpp
  vismoe bench --geometry qwen3-30b-a3b --layers 4 --memory 100% --formats raw,int8,int4 --baseline llama.cpp-resident --moe-time
  vismoe bench --geometry qwen3-vl-30b-a3b --layers 4 --memory 25% --image 512x512 --trace timeline.json
  vismoe bench ./my-model --memory 8GiB --limit 9GiB --baseline llama.cpp --gguf my-model.gguf --prompt "Why is the sky blue?"
  vismoe bench --clean                                           delete the generated checkpoints

geometries: {", ".join(GEOMETRIES)}""",
)
