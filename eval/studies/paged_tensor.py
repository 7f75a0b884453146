"""What binding experts under one range of addresses costs: `python -m vismoe.eval.studies.paged_tensor [--json]`.

A block of one expert of Qwen3-30B-A3B (9 MiB) is bound and unbound, against copying as many bytes and against looking up the
address of a slab, and a slab's memory is given back and written anew. Medians over places in random order, in microseconds per
MiB; the lookup is per expert.
"""

import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from vismoe.flags import SuggestingParser
from vismoe.pools.paged_tensor import HostMemory, PagedTensor
from vismoe.pools.pool import SlabPool
from vismoe.types import RecordLayout

EXPERT_BYTES, EXPERTS, ROUNDS = 3 * 2048 * 768 * 2, 64, 5


def median_us(calls: Callable[[int], object], before: Callable[[int], object] = lambda place: None) -> float:
    """Of one call of `calls(place)`; `before(place)` is not timed."""
    taken = []
    for _ in range(ROUNDS):
        for place in random.Random(0).sample(range(EXPERTS), EXPERTS):
            before(place)
            began_s = time.perf_counter()
            calls(place)
            taken.append(time.perf_counter() - began_s)
    return statistics.median(taken) * 1e6


def measure() -> dict[str, float]:
    """Microseconds by what is done: per MiB, the lookup per expert."""
    mib = EXPERT_BYTES / 2**20
    pool = SlabPool(RecordLayout((), EXPERT_BYTES), EXPERTS)
    pool.buffer.fill_(1)
    source = torch.ones(EXPERTS, EXPERT_BYTES, dtype=torch.uint8)
    while pool.take() is not None:
        pass
    found = {"copy an expert into a slab": median_us(lambda e: pool.record(e).copy_(source[e])) / mib}
    tensor = PagedTensor(1, EXPERTS, EXPERT_BYTES, EXPERTS, HostMemory())
    for block in range(EXPERTS):
        tensor.bind(0, block, block)
    window = tensor.window(0)
    window.fill_(1)

    def unbound(place: int) -> None:
        if tensor.bound(0, place) is not None:
            tensor.unbind(0, place)

    found["bind a block that was written before"] = median_us(lambda e: tensor.bind(0, e, e), unbound) / mib
    found["unbind it"] = median_us(lambda e: tensor.unbind(0, e), lambda e: tensor.bind(0, e, e)) / mib
    found["give a slab's memory back"] = median_us(pool.unback, lambda e: pool.record(e).fill_(1)) / mib
    found["write it anew, with new pages"] = median_us(lambda e: pool.record(e).fill_(1), pool.unback) / mib
    found["write a slab that has its pages"] = median_us(lambda e: pool.record(e).fill_(1)) / mib
    addresses, slabs = pool.addresses, np.arange(EXPERTS)[::-1].copy()
    found["look up the address of an expert's slab"] = median_us(lambda e: ctypes.c_void_p(int(addresses[slabs[e]])))
    tensor.close()
    return found


def main() -> None:
    parser = SuggestingParser(prog="python -m vismoe.eval.studies.paged_tensor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the last line")
    arguments, found = parser.parse_args(), measure()
    if not arguments.json:
        for what, us in found.items():
            print(f"{what:42} {us:9.2f} us")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
