"""How close a packed store's reads come to the disk's rate: `python -m vismoe.eval.studies.store_reads DIR`.

In alternating rounds: random records through PackedStore (read, verified, decoded if the format needs it, as for a miss), and
plain sequential O_DIRECT reads of the same request size over the same files, with one thread and with as many as the store. All
reads bypass the page cache. The share is the store's rate over the better plain rate, in bytes on disk; the goal is 90%. The last
line is one JSON object.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vismoe.errors import ConfigError
from vismoe.eval.report import study_parser, told
from vismoe.machine.choices import choose, format_rate
from vismoe.machine.hardware import cores
from vismoe.machine.profile import load_profile
from vismoe.pools.advice import block_buffer
from vismoe.pools.pool import SlabPool
from vismoe.store.index import read_index
from vismoe.store.packed import PackedStore, formats_in
from vismoe.types import Format

GOAL = 0.9


def main() -> int:
    parser = study_parser(None, __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a store from vismoe pack, preferably larger than memory")
    parser.add_argument("--format", type=Format, choices=list(Format), help="format to read (default: the first in the store)")
    parser.add_argument("--threads", type=int, help="threads (default: as many as serving would use)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each measurement")
    arguments = parser.parse_args()
    return told(lambda: measure(arguments))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints; returns JSON."""
    format = arguments.format or next(iter(formats_in(arguments.folder)), Format.RAW)
    store = PackedStore(arguments.folder, read_index(arguments.folder, format))
    if refused := store.read_past_cache():
        raise ConfigError(f"{refused}: this would only measure memory. Fix: use a store on another disk")
    threads = arguments.threads or planned_threads(store)
    reads = {
        "store": (threads, random_records(store)),
        "plain_1": (1, sequential_reads(store)),
        f"plain_{threads}": (threads, sequential_reads(store)),
    }
    rates: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(arguments.rounds):
        for name, (depth, next_read) in reads.items():
            rates[name].append(bytes_per_s(next_read, depth, arguments.seconds))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    share = medians["store"] / max(rate for name, rate in medians.items() if name != "store")
    print(
        f"{format}, {store.stretch_bytes:,} bytes at once, {threads} threads, {arguments.rounds} rounds of {arguments.seconds} s"
    )
    for name, rate in medians.items():
        print(f"  {name:<10} {format_rate(rate):>12}   {min(rates[name]) / 1e9:.2f} to {max(rates[name]) / 1e9:.2f} GB/s")
    print(f"  share      {share:.1%} of the better plain reader (goal {GOAL:.0%})")
    return {"format": format, "threads": threads, "bytes_per_s": medians, "share": share, "goal": GOAL}


def planned_threads(store: PackedStore) -> int:
    """The number of threads for a model whose experts do not fit the page cache."""
    return choose(
        load_profile(),
        expert_bytes=store.stretch_bytes,
        checkpoint_bytes=store.stored_bytes,
        spare_bytes=0,
        cores=cores(),
        device="cpu",
        path=store.paths[0].parent,
    ).io_threads


def random_records(store: PackedStore) -> Callable[[], Callable[[], int]]:
    """Gives each thread a function that reads one more record into its own slabs; no record repeats before all were read."""
    experts = list(store.contents.experts)
    random.Random(0).shuffle(experts)
    order = itertools.cycle(experts)

    def reader() -> Callable[[], int]:
        slabs = [SlabPool(layout, 1).record(0) for layout in store.inventory.layouts]

        def read() -> int:
            expert = next(order)
            return store.read(expert, slabs[store.inventory.layers[expert.layer].geometry])

        return read

    return reader


def sequential_reads(store: PackedStore) -> Callable[[], Callable[[], int]]:
    """Gives each thread a function that reads the next request of the files, in order."""
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in store.paths]
    nbytes = store.stretch_bytes
    places = [(each, at) for each in descriptors for at in range(0, os.fstat(each).st_size - nbytes + 1, nbytes)]
    order = itertools.cycle(places)

    def reader() -> Callable[[], int]:
        buffer = block_buffer(nbytes)

        def read() -> int:
            descriptor, offset = next(order)
            return os.preadv(descriptor, [buffer.data], offset)

        return read

    return reader


def bytes_per_s(reader: Callable[[], Callable[[], int]], threads: int, seconds: float) -> float:
    """The rate of `threads` readers together; memory is touched before the measurement."""
    reads = [reader() for _ in range(threads)]
    for read in reads:
        read()
    began_s = time.perf_counter()

    def work(read: Callable[[], int]) -> int:
        done = 0
        while time.perf_counter() - began_s < seconds:
            done += read()
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, reads))
    return done / (time.perf_counter() - began_s)


if __name__ == "__main__":
    sys.exit(main())
