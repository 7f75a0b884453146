"""Packs a checkpoint's experts into a store, one format at a time, and verifies every record of a store.

Promises: bounded memory (`memory_bound_bytes`, whatever the size of the checkpoint); the same bytes for the same checkpoint,
format and version, with any number of threads, interrupted or not; one process at a time in a folder; a store that opens is
complete.
"""

import contextlib
import fcntl
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch

from vismoe.config import format_bytes
from vismoe.errors import CheckpointError, ConfigError
from vismoe.kernels.restore import FastEncoded
from vismoe.machine.disk import nearest_folder
from vismoe.machine.hardware import cores
from vismoe.pools.malloc import return_large_blocks
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.expert_store import naming_expert
from vismoe.store.file_state import FileChangedError
from vismoe.store.index import Contents, files_of, read_index, remedy
from vismoe.store.packed import PackedStore, formats_in, refuse_other
from vismoe.store.safetensors_header import refuse_changed
from vismoe.store.unfinished import UnfinishedFormat, journal_path
from vismoe.types import ExpertId

MEMORY_BYTES = 2 * 2**30  # limits the number of cores that encode, to no fewer than one
EXPERTS_PER_WORKER = 5  # buffers: read, encoded, decoded again to compare, rearranged, waiting to be written
WORKER_BYTES = 16 * 2**20  # what an encoder uses beside records
SPARE_BYTES = 64 * 2**20  # memory that allocators keep
AHEAD = 2  # encoded records that may wait to be written, beside one for each worker
SPARE_DISK_BYTES = 2**28  # disk space left free for other programs
SAMPLES = 4  # experts that are encoded to estimate a format without a fixed size
SAMPLE_MARGIN = 1.02
LOCK = "pack.lock"
Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Packed:
    """The result of packing one format."""

    records: int
    stored_bytes: int
    resumed_records: int  # records from earlier calls; all of them if nothing was left to do


def memory_bound_bytes(contents: Contents, workers: int) -> int:
    """The most memory that packing needs, beside the libraries and the description of the model."""
    largest_bytes = _largest_bytes(contents)
    return workers * (EXPERTS_PER_WORKER * largest_bytes + WORKER_BYTES) + AHEAD * largest_bytes + SPARE_BYTES


def workers_for(contents: Contents) -> int:
    """Threads that encode: one for each core, as far as `MEMORY_BYTES` allows."""
    allowed = (workers for workers in range(cores(), 1, -1) if memory_bound_bytes(contents, workers) <= MEMORY_BYTES)
    return next(allowed, 1)


def _largest_bytes(contents: Contents) -> int:
    return max(max(codec.slab.record_bytes, codec.raw.record_bytes, codec.most_bytes) for codec in contents.codecs)


def pack(
    source: CheckpointStore,
    folder: Path,
    contents: Contents,
    *,
    workers: int | None = None,
    on_bytes: Progress = lambda nbytes: None,
) -> Packed:
    """Pack `contents` of `source` into `folder`. Continues an unfinished attempt, and does nothing for a complete format.

    `on_bytes` receives the bytes of finished experts, in the model's dtype: first those of earlier attempts, then after each one.
    Raises CheckpointError for a checkpoint that cannot be read or changes meanwhile, and for a folder of another checkpoint;
    ConfigError for a full disk, a folder that cannot be written, and a second process at the same time.
    """
    with alone(folder):
        refuse_foreign(folder, contents)
        if contents.format in formats_in(folder):
            journal_path(folder, contents.format).unlink(missing_ok=True)  # left by an attempt that died in its last step
            return _complete(folder, contents)
        with contextlib.closing(UnfinishedFormat(folder, contents)) as unfinished:
            resumed = unfinished.done
            sizes = [contents.codec(expert.layer).raw.record_bytes for expert in contents.experts]
            done_bytes = list(itertools.accumulate(sizes, initial=0))
            on_bytes(done_bytes[resumed])
            left = contents.experts[resumed:]
            return_large_blocks()
            with _one_torch_thread(), naming_changes(source, remedy(folder, contents.format)):
                encoded = _in_order(lambda expert: _encode(source, contents, expert), left, workers or workers_for(contents))
                for record in encoded:
                    unfinished.append(record)
                    on_bytes(done_bytes[unfinished.done])
            index = unfinished.finish()
        return Packed(len(index.records), sum(index.file_bytes), resumed)


def verify(store: PackedStore, *, workers: int | None = None, on_bytes: Progress = lambda nbytes: None) -> list[str]:
    """Read every record, past the page cache if possible, and compare checksums; returns a sentence for each bad record.

    `on_bytes` receives the number of bytes read so far.
    """
    store.read_past_cache()

    def check(expert: ExpertId) -> tuple[int, str | None]:
        try:
            return store.check(expert), None
        except CheckpointError as error:
            return 0, str(error)

    found, done_bytes = [], 0
    for nbytes, bad in _in_order(check, store.contents.experts, workers or cores()):
        on_bytes(done_bytes := done_bytes + nbytes)
        found += [bad] if bad else []
    return found


def refuse_foreign(folder: Path, contents: Contents) -> None:
    """Raises CheckpointError if `folder` holds experts of another checkpoint, in any format."""
    if contents.format in formats_in(folder):
        refuse_other(folder, read_index(folder, contents.format).contents, contents)
    refuse_foreign_folder(folder, contents.fingerprint)


def refuse_foreign_folder(folder: Path, fingerprint: str) -> None:
    """The same for a checkpoint that is known by its fingerprint."""
    for format in formats_in(folder):
        if read_index(folder, format).contents.fingerprint != fingerprint:
            raise CheckpointError(
                f"{folder} holds {format} experts of another checkpoint, or of this one before its files changed. "
                f"Fix: {remedy(folder, format)}, or choose another folder (--out)"
            )


def refuse_small_disk(source: CheckpointStore, folder: Path, wanted: Sequence[Contents]) -> None:
    """Raises ConfigError unless the formats that `folder` lacks fit on the disk; sizes of formats without a fixed size are
    estimated."""
    place = nearest_folder(folder)
    free = psutil.disk_usage(str(place)).free
    missing = {contents.format: _missing_bytes(source, folder, contents) for contents in wanted}
    needed = sum(missing.values())
    if needed and free < needed + SPARE_DISK_BYTES:
        parts = ", ".join(f"{format} {format_bytes(nbytes)}" for format, nbytes in missing.items())
        raise ConfigError(
            f"{place} has {format_bytes(free)} of free disk; packing needs {format_bytes(needed)} ({parts}) and leaves "
            f"{format_bytes(SPARE_DISK_BYTES)} free. Fix: fewer formats (--formats), another disk (--out), or free space"
        )


def _missing_bytes(source: CheckpointStore, folder: Path, contents: Contents) -> int:
    if contents.format in formats_in(folder):
        return 0
    there = sum(path.stat().st_size for path in files_of(folder, contents.format))
    sizes = [_expected_bytes(source, contents, geometry) for geometry in range(len(contents.codecs))]
    return max(0, sum(layer.num_experts * sizes[layer.geometry] for layer in contents.layers) - there)


def _expected_bytes(source: CheckpointStore, contents: Contents, geometry: int) -> int:
    """Bytes of a record: the fixed size, or the estimate from a few experts over all layers."""
    fixed = contents.codecs[geometry].fixed_bytes
    if fixed is not None:
        return fixed
    layers = source.inventory.layers_of(geometry)
    samples = [ExpertId(layer.index, 0) for layer in layers[:: -(-len(layers) // SAMPLES)]]
    nbytes = [len(_encode(source, contents, expert)) for expert in samples]
    return int(SAMPLE_MARGIN * sum(nbytes) / len(nbytes))


def _encode(source: CheckpointStore, contents: Contents, expert: ExpertId) -> np.ndarray:
    """One expert as it is stored; asserts that a record that readers decode does decode to the original."""
    codec = contents.codec(expert.layer)
    record = torch.zeros(codec.raw.record_bytes, dtype=torch.uint8)  # zeros, because gaps are stored too
    if source.inventory.own_layouts:
        geometry = contents.layers[expert.layer].geometry
        own = FastEncoded(codec.raw, source.inventory.own_layouts[geometry], contents.transposed[geometry])
        in_place = torch.empty(own.slab.record_bytes, dtype=torch.uint8)
        source.read(expert, in_place)
        own.restore(in_place, record)
    else:
        source.read(expert, record)
    try:
        encoded = codec.encode(record)
    except CheckpointError as error:
        raise naming_expert(expert, error) from error
    if codec.fixed_bytes is None:
        decoded = torch.zeros(codec.slab.record_bytes, dtype=torch.uint8)
        codec.decode(encoded, decoded)
        assert torch.equal(decoded[: len(record)], record), f"{contents.format} did not give {expert} back"
    return encoded.numpy()


def _complete(folder: Path, contents: Contents) -> Packed:
    """The result for a format that is already complete; opening the store checks that the files are whole."""
    index = read_index(folder, contents.format)
    PackedStore(folder, index).close()
    return Packed(len(index.records), sum(index.file_bytes), len(index.records))


@contextlib.contextmanager
def naming_changes(source: CheckpointStore, again: str) -> Iterator[None]:
    """Raises CheckpointError if the files of the checkpoint changed after they were opened; `again` is the advice in the
    message."""
    try:
        yield
    except FileChangedError:
        refuse_changed(source.headers, "packed", again)
        raise
    refuse_changed(source.headers, "packed", again)


def _in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Results of `work` in the order of the items, computed by `workers` threads that run at most `AHEAD` results ahead."""
    waiting: deque[Future[Result]] = deque()
    left = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="vismoe-pack") as pool:
        try:
            waiting.extend(pool.submit(work, item) for item in itertools.islice(left, workers + AHEAD))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in itertools.islice(left, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Within it, torch uses one thread for each of the worker threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Creates `folder` and locks it against other packing processes. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}. Fix: --out with a writable folder") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = f"Another process is packing into {folder}"
            raise ConfigError(f"{why}. Fix: wait for it, or choose another folder (--out)") from error
        except OSError as error:
            why = f"{folder} cannot be locked against a second process: {error.strerror}"
            raise ConfigError(f"{why}. Fix: --out with a folder on a filesystem that has locks, such as a local disk") from error
        yield
    finally:
        os.close(descriptor)
