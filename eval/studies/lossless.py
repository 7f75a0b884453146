"""The size and speed of the lossless format: `python -m vismoe.eval.studies.lossless [MODEL]`.

Sizes are of a model's experts (default: the demo model's) and of Gaussian weights of the 30B geometry, as shares of 16 bit. They
are compared with Huffman coding of every section's exponents, and with their entropy, which no code of exponents beats. Speeds
are of one core over a working set in DRAM, in bytes of bfloat16 per second, the median of several passes. Every record is first
compared bit for bit. The last line on stdout is one JSON object.
"""

import heapq
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vismoe.flags import SuggestingParser
from vismoe.formats.lossless import content_bytes, packable
from vismoe.kernels.lossless import FastLossless, available
from vismoe.types import ExpertId, RecordLayout

GEOMETRY_30B = RecordLayout.of(
    {"gate_up_proj": (1536, 2048), "down_proj": (2048, 768)}, dict.fromkeys(["gate_up_proj", "down_proj"], torch.bfloat16)
)
GAUSSIAN_EXPERTS = 8
WORKING_SET_BYTES = 2**29  # of decoded records: well above any cache
PASSES = 5

Counts = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class LosslessSizes:
    """Shares of 16 bit."""

    experts: int
    raw_bytes: int
    ratio: float  # encoded content
    ratio_on_disk: float  # rounded up to whole disk blocks, against raw records
    huffman: float
    entropy: float


@dataclass(frozen=True)
class Speeds:
    """Bytes of bfloat16 per second."""

    copy_bytes_per_s: float  # a copy of the same decoded bytes, as the limit of memory
    encode_bytes_per_s: float
    decode_bytes_per_s: dict[str, float]  # by instruction set
    decode_shared_bytes_per_s: float  # each record decoded by as many threads as there are cores


def entropy_bits(counts: Counts) -> float:
    """Bits per symbol of a memoryless source with these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def huffman_bits(counts: Counts) -> float:
    """Bits per symbol of a Huffman code for these counts; its words have at least one bit."""
    heap = [int(count) for count in counts if count]
    if len(heap) == 1:
        return 1.0
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        bits += merged  # the code of every symbol below gets one bit longer
        heapq.heappush(heap, merged)
    return bits / int(counts.sum())


def exponent_counts(words: Tensor) -> Counts:
    """bfloat16 weights -> count of each of the 256 exponents."""
    return np.bincount(words.contiguous().view(torch.uint16).numpy().reshape(-1) >> 7 & 255, minlength=256)


def experts_of(model: str | None) -> tuple[RecordLayout, list[Tensor]]:
    """(layout of the model's first geometry, records of all experts of that geometry)."""
    from vismoe.models.load.preview import experts_in_place

    store, _ = experts_in_place(model)
    with closing(store):
        raw, records = store.inventory.raw_layouts[0], []
        for layer in store.inventory.layers_of(0):
            for expert in range(layer.num_experts):
                records.append(torch.zeros(raw.record_bytes, dtype=torch.uint8))
                store.read(ExpertId(layer.index, expert), records[-1])
    return raw, records


def gaussian_experts(raw: RecordLayout, experts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    records = [torch.zeros(raw.record_bytes, dtype=torch.uint8) for _ in range(experts)]
    for view in itertools.chain(*(raw.views(record).values() for record in records)):
        view.copy_(torch.empty(view.shape).normal_(0, 0.02, generator=generator))
    return records


def sizes_of(codec: FastLossless, records: Sequence[Tensor], encoded: Sequence[Tensor]) -> LosslessSizes:
    """Unpacked sections (biases in float32) count completely in all shares."""
    raw_bytes = len(records) * codec.raw.payload_bytes
    huffman = entropy = 0.0
    for record in records:
        for section, weights in zip(codec.raw.sections, codec.raw.views(record).values()):
            counts = exponent_counts(weights) if packable(section) else None
            huffman += section.nbytes if counts is None else weights.numel() * (8 + huffman_bits(counts)) / 8
            entropy += section.nbytes if counts is None else weights.numel() * (8 + entropy_bits(counts)) / 8
    return LosslessSizes(
        experts=len(records),
        raw_bytes=raw_bytes,
        ratio=sum(map(content_bytes, encoded)) / raw_bytes,
        ratio_on_disk=sum(each.numel() for each in encoded) / (len(records) * codec.slab.record_bytes),
        huffman=huffman / raw_bytes,
        entropy=entropy / raw_bytes,
    )


def verify(codec: FastLossless, records: Sequence[Tensor], encoded: Sequence[Tensor]) -> None:
    """Compares every record bit for bit, with every instruction set."""
    for isa in available():
        decoder, slab = FastLossless(codec.raw, isa), torch.empty(codec.slab.record_bytes, dtype=torch.uint8)
        for number, (record, each) in enumerate(zip(records, encoded)):
            decoder.decode(each, slab)
            for section in codec.raw.sections:
                payload = slice(section.offset_bytes, section.offset_bytes + section.nbytes)
                assert torch.equal(slab[payload], record[payload]), f"record {number}, {section.name}, {isa}"


def speeds_of(codec: FastLossless, records: Sequence[Tensor], encoded: Sequence[Tensor], threads: int) -> Speeds:
    """Speeds over the records, repeated until their decoded bytes fill the working set."""
    number = max(2, math.ceil(WORKING_SET_BYTES / codec.raw.payload_bytes))
    slabs = [torch.zeros(codec.slab.record_bytes, dtype=torch.uint8) for _ in range(number)]
    sources = [each.clone() for each in itertools.islice(itertools.cycle(encoded), number)]
    inputs = list(itertools.islice(itertools.cycle(records), number))

    def decode(decoder: FastLossless) -> None:
        for source, slab in zip(sources, slabs):
            decoder.decode(source, slab)

    def share(pool: ThreadPoolExecutor) -> None:
        for source, slab in zip(sources, slabs):
            for done in [pool.submit(codec.decode, source, slab, part, threads) for part in range(threads)]:
                done.result()

    def copy() -> None:
        for source, slab in zip(slabs[1:], slabs):
            slab.copy_(source)

    def encode() -> None:
        for record in inputs:
            codec.encode(record)

    with ThreadPoolExecutor(threads) as pool:
        nbytes = number * codec.raw.payload_bytes
        return Speeds(
            copy_bytes_per_s=(number - 1) * codec.slab.record_bytes / seconds(copy),
            encode_bytes_per_s=nbytes / seconds(encode),
            decode_bytes_per_s={isa: nbytes / seconds(partial(decode, FastLossless(codec.raw, isa))) for isa in available()},
            decode_shared_bytes_per_s=nbytes / seconds(partial(share, pool)),
        )


def seconds(work: Callable[[], None]) -> float:
    """The median of several runs, after one that does not count."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(1 + PASSES)][1:])


def table(results: dict[str, tuple[LosslessSizes, Speeds]], threads: int) -> Iterator[str]:
    """Lines for people."""
    sizes, speeds = zip(*results.values())

    def line(name: str, values: Iterable[str]) -> str:
        return f"{name:44}" + "".join(f"{value:>24}" for value in values)

    def gigabytes(name: str, rates: Iterable[float]) -> str:
        return line(name, (f"{rate / 1e9:.1f}" for rate in rates))

    yield line("", results)
    yield line("experts", (str(each.experts) for each in sizes))
    yield line("share of 16 bit: lossless", (f"{each.ratio:.4f}" for each in sizes))
    yield line("  rounded up to whole disk blocks", (f"{each.ratio_on_disk:.4f}" for each in sizes))
    yield line("  if exponents were coded with Huffman", (f"{each.huffman:.4f}" for each in sizes))
    yield line("  entropy bound", (f"{each.entropy:.4f}" for each in sizes))
    for isa in available():
        yield gigabytes(f"decode, GB/s of bf16, one core, {isa}", (each.decode_bytes_per_s[isa] for each in speeds))
    yield gigabytes(f"  each record shared by {threads} threads", (each.decode_shared_bytes_per_s for each in speeds))
    yield gigabytes("copy of the decoded bytes, GB/s, one core", (each.copy_bytes_per_s for each in speeds))
    yield gigabytes("encode, GB/s of bf16, one core", (each.encode_bytes_per_s for each in speeds))


def main() -> None:
    parser = SuggestingParser(description=__doc__.partition(":")[0])
    parser.add_argument("model", nargs="?", help="a checkpoint in bfloat16; default: the demo model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that the copy also uses one core
    threads = len(os.sched_getaffinity(0))
    subjects = {arguments.model or "demo model": experts_of(arguments.model)}
    subjects["Gaussian, 30B geometry"] = (GEOMETRY_30B, gaussian_experts(GEOMETRY_30B, GAUSSIAN_EXPERTS))
    results = {}
    for name, (raw, records) in subjects.items():
        codec = FastLossless(raw)
        encoded = [codec.encode(record) for record in records]
        verify(codec, records, encoded)
        results[name] = (sizes_of(codec, records, encoded), speeds_of(codec, records, encoded, threads))
    print(*table(results, threads), sep="\n")
    print(json.dumps({name: asdict(sizes) | asdict(speeds) for name, (sizes, speeds) in results.items()}))


if __name__ == "__main__":
    main()
