"""`vismoe simulate`: how fast a model would be on a machine that one does not have, in virtual time."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe import flags
from vismoe.config import SETTINGS, Settings
from vismoe.errors import InputError

if TYPE_CHECKING:
    from vismoe.simulate.find import Found
    from vismoe.simulate.predict import Prediction

TAKEN = {
    "memory",
    "context",
    "parallel",
    "format",
    "policy",
    "formats",
    "retention",
    "hotness_decay",
    "hotness_period",
    "misses",
    "draft",
    "draft_tokens",
    "draft_format",
    "eviction",
    "reads",
}
SPARE_TOKENS = 64  # of each row's context, beyond its prompt


def simulate_arguments(parser: ArgumentParser) -> None:
    """The flags of `vismoe simulate`."""
    parser.add_argument(
        "words", nargs="*", metavar="MODEL", help="a published geometry (vismoe bench --help), folder or hub name"
    )
    flags.add(parser, "--model MODEL", "the model, given as a flag")
    flags.add(parser, "--revision REV", "branch, tag or commit of a hub model")
    flags.add(
        parser, "--machine PARTS", "parts by name, e.g. 'rtx4060-8gb, ddr5-5600 64GB, pcie4x8, nvme 5GB/s'; here: this one's"
    )
    flags.add(parser, "--machines FILE", "another table of parts: an edited copy of vismoe/simulate/machines.toml")
    flags.add(parser, "--parts", "list the parts and routings of the table, and end")
    flags.add(parser, "--routing NAME", "how unevenly experts are chosen: uniform, olmoe (default), qwen3, demo", default="olmoe")
    flags.add(parser, "--trace FOLDER", "replay the decode steps of this recording instead (vismoe chat --trace)")
    flags.add(parser, "--prompt-tokens N", "tokens of each row's prompt, a text (default: 512)", flags.at_least_one, 512)
    flags.add(parser, "--accepted SHARE", "with --draft: the chance that a drafted token is right", float)
    flags.add(parser, "--find TOKENS_PER_S", "the smallest memory, and the cheapest upgrade, that reach this speed", float)
    flags.add(parser, "--seed S", "of the generated routing (default: 0)", int, 0)
    flags.add(parser, "--json", "one JSON object, sizes in bytes")
    flags.add_settings(parser, {"parallel": "1", "context": "what the rows need, at least 4096"}, [*(SETTINGS.keys() - TAKEN)])


def run_simulate(arguments: Namespace) -> int:
    """Prints the prediction, or what `--find` finds."""
    from vismoe.simulate.machines import PartsTable

    table = PartsTable(arguments.machines)
    if arguments.parts:
        return _print_parts(arguments, table)
    name = flags.one_model(arguments)
    if name is None or arguments.machine is None:
        raise InputError("a model and a machine are simulated. Fix: vismoe simulate MODEL --machine 'rtx4060-8gb, nvme 5GB/s'")
    given = {"parallel": 1, **flags.given_settings(arguments)}
    rows = given["parallel"]
    need = rows * (arguments.prompt_tokens + SPARE_TOKENS) if isinstance(rows, int) else 0
    settings = Settings.of(**{"context": max(4096, need), **given})
    if settings.context < need:
        raise InputError(f"{rows} rows of {arguments.prompt_tokens} tokens need a context of {need}. Fix: --context {need}")
    machine = table.machine(arguments.machine, name if Path(name).is_dir() else ".")
    with flags.quick_imports():
        from vismoe.bench.simulated import described
        from vismoe.simulate.find import find
        from vismoe.simulate.predict import predict

    model, work = described(name, arguments.revision), workload(arguments, table)
    if arguments.find is not None:
        found = find(model, machine, table, settings, work, arguments.find)
        _report(arguments, found.to_json(), found_text(found, arguments.find))
    else:
        told = predict(model, machine, settings, work)
        further = {"assumed": list(machine.assumed), "routing": arguments.trace or arguments.routing}
        _report(arguments, {**told.to_json(), **further}, prediction_text(told, machine.assumed, further["routing"]))
    return 0


def workload(arguments: Namespace, table: Any) -> Any:
    """What the flags ask for. Raises InputError, TraceError."""
    from vismoe.simulate.predict import Workload
    from vismoe.trace.files import Trace
    from vismoe.types import Phase

    routing = table.routing.get(arguments.routing)
    if routing is None:
        raise InputError(f"no such routing: {arguments.routing!r}. Fix: {', '.join(table.routing)}")
    if arguments.accepted is not None and not 0 <= arguments.accepted < 1:
        raise InputError(f"--accepted {arguments.accepted}: a share from 0 to below 1. Fix: --accepted 0.8")
    trace = tuple(s for s in Trace.open(arguments.trace) if s.phase is Phase.DECODE) if arguments.trace else ()
    return Workload(
        prompt_tokens=arguments.prompt_tokens,
        skew=routing["skew"],
        zipf=routing["zipf"],
        accepted=arguments.accepted,
        trace=trace,
        seed=arguments.seed,
    )


def prediction_text(told: "Prediction", assumed: tuple[str, ...], routing: str) -> str:
    """The prediction for people."""
    from vismoe.config import format_bytes

    times = {"memory": told.memory_s, "arithmetic": told.arithmetic_s, "waiting": told.waiting_s}
    below = {"link": told.link_bytes, "disk": told.disk_bytes}
    moved = [f"{format_bytes(int(size))} over the {name}" for name, size in below.items() if size]
    rows = f"{told.rows} row{'s' * (told.rows > 1)}"
    shares = f"{told.resident:.0%} of the experts there, {told.hit_rate:.1%} hits"
    shares += f", {told.high:.0%} of the computations in the better format" if told.high is not None else ""
    reads = f"a token reads {format_bytes(int(told.memory_bytes_read))} there"
    lines = [
        f"simulated, not measured: {told.model} on {told.machine}; routing {routing}",
        f"  {told.tokens_per_s:.3g} tokens/s of {rows}, first token after {told.first_token_s:.3g} s",
        f"  limited by {told.limit}; a token: " + ", ".join(f"{1e3 * s:.3g} ms {name}" for name, s in times.items()),
        f"  memory {format_bytes(told.memory_bytes)}, {shares}; {reads}" + "".join(f", {each}" for each in moved),
    ]
    return "\n".join([*lines, *([f"  assumed: {', '.join(assumed)}"] if assumed else [])])


def found_text(found: "Found", wanted: float) -> str:
    """The answer of `--find` for people."""
    from vismoe.config import format_bytes

    lines = [f"simulated, not measured: {found.now.model} on {found.now.machine}, {found.now.tokens_per_s:.3g} tokens/s"]
    if found.memory_bytes is not None:
        lines.append(f"  {wanted:g} tokens/s: from --memory {format_bytes(found.memory_bytes)} on")
    else:
        lines.append(f"  {wanted:g} tokens/s: not with all memory of this machine")
        up = found.upgrade
        fast = f"; {found.upgraded.tokens_per_s:.3g} tokens/s" if found.upgraded is not None else ""
        lines.append(f"  cheapest upgrade that reaches it: {up}{fast}" if up else "  no single part of the table reaches it")
    return "\n".join(lines)


def _print_parts(arguments: Namespace, table: Any) -> int:
    import dataclasses

    parts = [dataclasses.asdict(part) for part in table.parts.values()]
    lines = [f"{table.path}:", *(f"  {p['kind']:<5} {p['name']:<16} {p['gb_per_s']:g} GB/s" for p in parts if p["kind"] != "cpu")]
    lines += [f"  cpu   {p['name']:<16} {p['cores']} cores" for p in parts if p["kind"] == "cpu"]
    lines += [f"  routing {name}: {entry['source']}" for name, entry in table.routing.items()]
    _report(arguments, {"parts": parts, "routing": table.routing}, "\n".join(lines))
    return 0


def _report(arguments: Namespace, value: dict[str, Any], text: str) -> None:
    if arguments.json:
        flags.print_json(arguments, value)
    else:
        print(text)


SIMULATE = flags.Command(
    "tell how fast a model would be on a machine you do not have, in virtual time",
    simulate_arguments,
    run_simulate,
    """\
  vismoe simulate qwen3-30b-a3b --machine "rtx4060-8gb, ddr5-5600 64GB, pcie4x8, nvme 5GB/s" --format int4
  vismoe simulate mixtral-8x7b --machine "ddr5-5600 32GB, nvme4" --format int4 --parallel 8 --json
  vismoe simulate qwen3-30b-a3b --machine "rtx4060-8gb, ddr5-5600 64GB" --format int4 --find 20
  vismoe simulate qwen3-30b-a3b --machine "rtx4060-8gb, ddr5-5600 64GB" --policy importance --formats 4/2
  vismoe simulate ./my-model --machine here                      this machine, by what vismoe doctor measured
  vismoe simulate --parts                                        the table of parts""",
)
