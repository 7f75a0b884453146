"""Does the server leak? `vismoe eval soak --clients 32 --minutes 3` (or `python -m vismoe.eval.studies.soak`).

Runs a server with the bundled model, and clients in another process that ask, stream, hang up and send nonsense (`soak_clients`).
Meanwhile it samples memory, open files, threads and the engine's load, and reads /metrics. At the end no request may be running
or waiting, the pager's state must be consistent, no counter may ever have decreased, and memory must be flat after the caches
were full. Prints a table, and one JSON object as the last line; the exit code is 1 if a check failed.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from vismoe.app.options import ServeOptions
from vismoe.config import format_bytes
from vismoe.engine.engine import Engine, demo_model, load
from vismoe.errors import VisMoEError
from vismoe.eval.report import study_parser

SAMPLE_S = 1.0
SCRAPE_SAMPLES = 5  # /metrics is read at every fifth sample
SETTLE_S = 60.0  # time for the last requests to end
WARM_SAMPLES = 60  # least samples of a run for a check of growth
OF_TOOLS = """{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}
{{- '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n' }}{% endif %}
"""
TURN_ENDS = "{{- '<|im_end|>\\n' }}"
OF_CALLS = """{%- for call in message.tool_calls or () %}
{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}
"""
GROWTH_BYTES = 32 * 2**20  # limit between the second and the last third; leaking one prompt's cache per request would be far more


@dataclass(frozen=True)
class Sample:
    """The server's process at one moment."""

    at_s: float
    memory_bytes: int
    files: int
    threads: int
    running: int
    waiting: int
    context_tokens: int


def growth_bytes(samples: Sequence[Sample]) -> float:
    """How much more memory the last third of the run used than the second; caches and arenas fill in the first."""
    third = max(1, len(samples) // 3)
    later = [sample.memory_bytes for sample in samples]
    return median(later[-third:]) - median(later[third : 2 * third] or later[:1])


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[tuple[Any, str]]:
    """(the application, its address) of a server in its own thread."""
    from vismoe.app.api import create_app
    from vismoe.app.serving import Server, listening

    options = ServeOptions(port=0, max_waiting=256)
    with listening(options) as listener:
        app = create_app(engine, options)
        server = Server(app, options, app.state.callers)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield app, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def model_with_tools() -> Iterator[Path]:
    """The demo model with a chat template that also writes tools and calls, in the form of Qwen's."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "demo-model"
        shutil.copytree(demo_model(), model, copy_function=os.symlink)
        template = model / "chat_template.jinja"
        text = template.read_text()
        template.unlink()
        template.write_text(OF_TOOLS + text.replace(TURN_ENDS, OF_CALLS + TURN_ENDS, 1))
        yield model


def study(clients: int, minutes: float, seed: int, **settings: Any) -> dict[str, Any]:
    """Results of a soak: counts of the clients, samples, and `failures`, a sentence for each failed check."""
    with model_with_tools() as model, load(model, **settings) as engine, serving(engine) as (app, url):
        before = _sample(engine, 0.0)
        asking = [sys.executable, "-m", "vismoe.eval.studies.soak_clients", url, "--clients", str(clients), "--seed", str(seed)]
        with subprocess.Popen([*asking, "--seconds", str(60 * minutes)], stdout=subprocess.PIPE, text=True) as process:
            samples, scrapes = _watch(engine, url, process)
            told = json.loads(process.communicate()[0].splitlines()[-1]) if process.wait() == 0 else None
        settled_s = _settle(engine, app)
        after = _sample(engine, samples[-1].at_s + settled_s)
        scrapes.append(_scrape(url))
        ended = engine.load
        failures = [
            *_of_clients(told),
            *_of_server(before, samples, after),
            *_of_metrics(scrapes, ended.requests),
            *_of_books(engine),
        ]
        return {
            "clients": clients,
            "minutes": minutes,
            "settings": settings,
            "told": told,
            "requests": asdict(ended),
            "growth_bytes": growth_bytes(samples),
            "settled_s": settled_s,
            "most_running": max(sample.running for sample in samples),
            "before": asdict(before),
            "after": asdict(after),
            "samples": [asdict(sample) for sample in samples],
            "failures": failures,
        }


def _watch(engine: Engine, url: str, process: "subprocess.Popen[str]") -> tuple[list[Sample], list[dict[str, float]]]:
    """Samples and scrapes until the clients are done."""
    began_s, samples, scrapes = time.monotonic(), [], []
    while process.poll() is None:
        samples.append(_sample(engine, time.monotonic() - began_s))
        if len(samples) % SCRAPE_SAMPLES == 0:
            scrapes.append(_scrape(url))
        time.sleep(SAMPLE_S)
    return samples, scrapes


def _sample(engine: Engine, at_s: float) -> Sample:
    load_now, process = engine.load, psutil.Process()
    files = len(os.listdir("/proc/self/fd"))
    memory_bytes = process.memory_info().rss
    return Sample(at_s, memory_bytes, files, process.num_threads(), load_now.running, load_now.waiting, load_now.context_tokens)


def _scrape(url: str) -> dict[str, float]:
    """Every counter in /metrics, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    counters = (sample for family in families if family.type == "counter" for sample in family.samples)
    return {f"{sample.name} {sorted(sample.labels.items())}": sample.value for sample in counters}


def _settle(engine: Engine, app: Any) -> float:
    """Seconds until no request is running or waiting; after SETTLE_S a request counts as lost."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + SETTLE_S and (len(app.state.callers) or engine.load.running or engine.load.waiting):
        time.sleep(0.01)
    return time.monotonic() - began_s


# -- the checks: a sentence for each failed one
def _of_clients(told: dict[str, Any] | None) -> Iterator[str]:
    if told is None:
        yield "the process of the clients failed"
        return
    if told["wrong"]:
        yield f"{told['wrong']} answers were wrong, the first: {told['first_wrong'][0]}"
    if not min(told[kind] for kind in ("answered", "cancelled", "refused")):
        yield f"not every kind of request occurred: {told}"


def _of_server(before: Sample, samples: Sequence[Sample], after: Sample) -> Iterator[str]:
    if after.running or after.waiting or after.context_tokens:
        yield f"{after.running} requests run and {after.waiting} wait at the end, with {after.context_tokens} tokens of context"
    if len(samples) >= WARM_SAMPLES and growth_bytes(samples) > GROWTH_BYTES:
        yield f"memory grew by {format_bytes(int(growth_bytes(samples)))} between the second and the last third"
    for what, allowed in (("files", 24), ("threads", 24)):  # open connections and thread pools that fill once
        if getattr(after, what) > getattr(before, what) + allowed:
            yield f"{getattr(before, what)} {what} before, {getattr(after, what)} after"


def _of_metrics(scrapes: Sequence[dict[str, float]], requests: int) -> Iterator[str]:
    for earlier, later in itertools.pairwise(scrapes):
        yield from (f"/metrics: {name} went down" for name, value in earlier.items() if later[name] < value)
    if scrapes[-1]["vismoe_requests_total []"] != requests:
        yield f"/metrics counts {scrapes[-1]['vismoe_requests_total []']:.0f} requests, the engine {requests}"


def _of_books(engine: Engine) -> Iterator[str]:
    if failed := engine.load.failed:
        yield f"{failed} requests failed in the engine, perhaps those of clients that hung up; the log has the errors"
    try:
        engine.check_integrity()
    except AssertionError as error:
        yield f"the pager's state is inconsistent: {error}"


def print_table(figures: dict[str, Any]) -> None:
    told, console = figures["told"] or {}, Console()
    table = Table(title=f"{figures['clients']} clients for {figures['minutes']:g} minutes", show_header=False)
    for name in ("answered", "other doors", "with a video", "called", "cancelled", "refused", "sent away", "wrong"):
        table.add_row(f"requests {name}", f"{told.get(name, 0):,}")
    table.add_row(
        "answers compared with those alone", f"{told.get('compared', 0):,} of {told.get('requests_alone', 0):,} requests"
    )
    table.add_row("median and longest answer", f"{told.get('median_s', 0):.2f} s, {told.get('longest_s', 0):.2f} s")
    table.add_row("requests at the same time, at most", str(figures["most_running"]))
    for name, shown in (("memory_bytes", format_bytes), ("files", str), ("threads", str)):
        table.add_row(
            f"{name.removesuffix('_bytes')} before, after", f"{shown(figures['before'][name])}, {shown(figures['after'][name])}"
        )
    table.add_row("growth from the second to the last third", f"{figures['growth_bytes'] / 2**20:+.1f} MiB")
    table.add_row("books", "right" if not figures["failures"] else "see below")
    console.print(table)
    for failure in figures["failures"]:
        console.print(f"failed: {failure}", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = study_parser("vismoe eval soak", __doc__)
    parser.add_argument("--clients", type=int, default=32, help="clients at the same time (default: 32)")
    parser.add_argument("--minutes", type=float, default=3.0, help="(default: 3)")
    parser.add_argument("--memory", default="25%", help="memory of the engine (default: 25%%)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all choices of the clients (default: 0)")
    parser.add_argument("--json", action="store_true", help="no table")
    chosen = parser.parse_args(argv)
    try:
        figures = study(chosen.clients, chosen.minutes, chosen.seed, memory=chosen.memory, context=4096, image_cache="8MiB")
    except VisMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not chosen.json:
        print_table(figures)
    print(json.dumps(figures))
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
