"""Reads from disk while libraries are imported: what a model needs of its checkpoint.

To import torch and transformers takes seconds of one core, in which the disk and other cores have nothing to do. Threads read
large tensors beside the routed experts meanwhile, into the memory that they stay in: neither their bytes nor its pages are waited
for later. Other threads let memory for slabs have its pages (`pools/backing.py`), as much as the plan will probably want; and
experts are read there (`early_experts.py`), of each layer as many as will probably fit. Loading does not depend on any of it. It
asks here for each tensor before it reads one (`tensor_reads.read_new`), gets those whose file is still in the state in which it
was read, and finds what is wrong with a file by itself.
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vismoe.config import NO_STORE, Budget
from vismoe.errors import CheckpointError, ConfigError
from vismoe.machine.hardware import cores, host_memory
from vismoe.pair import BITS, Format
from vismoe.planning.case import AUTO_SHARE
from vismoe.pools.advice import in_huge_pages
from vismoe.pools.backing import LEAST_BYTES, EarlyMemory, addresses_are_free, give_way
from vismoe.pools.pool import Filled
from vismoe.store.early_experts import DRAFTS, EXPERTS, EarlyRecords, early_records
from vismoe.store.expert_store import Lies
from vismoe.store.file_state import FileState
from vismoe.store.files import CheckpointFiles, OpenFiles
from vismoe.store.gguf_header import GGUF, GgufHeader, read_gguf_headers
from vismoe.store.packed import find_store
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry, read_header

LARGE_BYTES = 2**20  # of a tensor that is worth it
SHARE = 0.5  # of free memory to read into, before a plan says what it is for
BESIDE_BYTES = 2**29  # of a plan's memory, for keys, values and what a prompt computes; slabs probably get the rest
THREADS = 3  # for each: while some wait for a core, or for the interpreter lock, the disk has work
PIECE_BYTES = 2**26  # between two of them a thread can be told to give up
AT_ONCE_BYTES = 2**20  # that a thread asks the disk for: behind 128 MB in one call a file that is imported waits for 0.1 s
RECORDS_BYTES = 2**27  # that one call reads: each return waits for the interpreter lock, which imports hold
# Beside routed experts, routers and embeddings, which loading may make others of or leave on disk, and the layer that drafts.
LEFT_OUT = re.compile(rf"{EXPERTS.pattern}|mlp\.gate\.|embed_tokens|{DRAFTS.pattern}")
LAYER = re.compile(r"\blayers\.(\d+)\.")
SIXTEEN = 16  # bits of a number that formats make smaller
ROOM = 1.25  # of a record's bytes, what a slab may take: blocks of a disk, and scales of integers
MOST_DIMENSIONS = 2  # experts may have any name, but those of a layer in one tensor have three
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Loading says what is wrong; torch raises RuntimeError where it gets no memory, ConfigError: the kernels are not built.
FAILURES = (CheckpointError, ConfigError, OSError, RuntimeError, MemoryError)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_READING: ContextVar["ReadAhead | None"] = ContextVar("what reads ahead of loading", default=None)

Key = tuple[FileState, int, int]  # of a tensor: its file in one state, its offset and its bytes


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model, and what it makes of them. dtype: of the model's numbers, e.g. bfloat16, into which those of
    safetensors files are cast; layers: of its decoder, behind which a file may have more. None: not known. memory, format: as
    in `Settings`, of which slabs are made. in_place: slabs will hold experts as these files have them; roomy: with room, where a
    disk can write there then."""

    paths: tuple[Path, ...] = ()
    dtype: str | None = None
    layers: int | None = None
    memory: str | int = "auto"
    format: str = "auto"
    in_place: bool = True
    roomy: bool = True

    @classmethod
    def of(
        cls,
        model: str | None,
        *,
        revision: str | None = None,
        gguf: str | None = None,
        mmproj: str | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        backbone: str = "own",
        memory: str | int = "auto",
        format: str = "auto",
        store: str | None = None,
        kernels: str = "auto",
        reads: str = "auto",
        policy: str = "exact",
        deterministic: bool = False,
    ) -> "WeightFiles":
        """Of a folder, a hub name or a GGUF file, as far as they are on this machine; loading looks more closely. None: the
        bundled model, which is small. None of them for another device, or with linear layers from a packed store."""
        if device != "cpu" or backbone != "own":
            return cls()
        # What is resident when a deterministic run begins must not depend on time.
        in_place = store in (None, NO_STORE) and format in ("auto", Format.RAW) and policy == "exact" and not deterministic
        slabs = memory, format, in_place and reads != "cached", kernels != "torch"
        gguf = model if model is not None and model.endswith(GGUF) else gguf
        try:
            if gguf is not None:
                paths = tuple(Path(name).expanduser() for name in (gguf, mmproj) if name is not None)
                return cls(paths, None, None, *slabs)._unless_packed(store)
            folder = _folder_of(model, revision)
            if folder is None:
                return cls()
            if (folder / INDEX).is_file():
                names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
            else:
                names = [SINGLE]
            config = json.loads((folder / "config.json").read_bytes())
            text = {**config, **(config.get("text_config") or {})}
            stated = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
            paths = tuple(folder / name for name in names)
            return cls(paths, dtype or stated, text.get("num_hidden_layers"), *slabs)._unless_packed(store)
        # Loading says what is wrong with these files; RuntimeError: a home that is not known, JSON that is too deep.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
            return cls()

    def _unless_packed(self, store: str | None) -> "WeightFiles":
        packed = store is None and bool(self.paths) and find_store(self.paths[0]) is not None
        return replace(self, in_place=self.in_place and not packed)

    def large_tensors(self, headers: Sequence[SafetensorsHeader], most_bytes: int) -> list[tuple[int, TensorEntry]]:
        """(file, tensor) of what is worth to be read ahead, in the order of the files, as far as `most_bytes` go."""
        found, left_bytes = list[tuple[int, TensorEntry]](), most_bytes
        for file, header in enumerate(headers):
            for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].offset_bytes):
                if entry.nbytes <= left_bytes and self._stays(name, entry, isinstance(header, GgufHeader)):
                    left_bytes -= entry.nbytes
                    found.append((file, entry))
        return found

    def slab_bytes(self, headers: Sequence[SafetensorsHeader], tensor_bytes: int, free_bytes: int) -> tuple[int, int]:
        """(the most that slabs of the experts can take, what the plan will probably give them) where other tensors take so many
        bytes and so many are free."""
        tensors = [tensor for header in headers for tensor in header.tensors.items()]
        experts_bytes = sum(entry.nbytes for name, entry in tensors if EXPERTS.search(name) or len(entry.shape) > MOST_DIMENSIONS)
        try:
            bits = BITS[None if self.format == "auto" else Format(self.format)] or SIXTEEN
            budget = Budget() if self.memory == "auto" else Budget.parse(self.memory)
        except (ConfigError, ValueError):  # loading says what is wrong
            return 0, 0
        held_bytes = int(experts_bytes * min(bits / SIXTEEN, budget.expert_share or 1))
        all_bytes = min(free_bytes, budget.total_bytes or int(AUTO_SHARE * free_bytes))
        wanted_bytes = max(0, min(held_bytes, all_bytes - tensor_bytes - BESIDE_BYTES))
        return min(int(held_bytes * ROOM), all_bytes), wanted_bytes

    def _stays(self, name: str, entry: TensorEntry, in_gguf: bool) -> bool:
        """Whether the model holds the bytes of this tensor, and they are many."""
        if entry.nbytes < LARGE_BYTES or len(entry.shape) > MOST_DIMENSIONS or LEFT_OUT.search(name):
            return False
        layer = LAYER.search(name)
        if layer is not None and self.layers is not None and int(layer[1]) >= self.layers:
            return False
        return in_gguf or entry.dtype not in FLOATS or self.dtype in (None, str(entry.dtype).removeprefix("torch."))


def _folder_of(model: str | None, revision: str | None) -> Path | None:
    if model is None or Path(model).is_dir():
        return Path(model) if model is not None else None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)  # ValueError: not a name on the hub
    return Path(config).parent if isinstance(config, str) else None


class ReadAhead:
    """Threads that read large tensors of weight files, as many as fit into `most_bytes`, until they are stopped, and memory for
    slabs, which gets its pages until then, and experts until it is used."""

    def __init__(self, weights: WeightFiles, most_bytes: int):
        self._stopped, self._given_up, self._filled_enough = threading.Event(), threading.Event(), threading.Event()
        self._found: dict[Key, torch.Tensor] = {}
        self._slabs: EarlyMemory | None = None
        self._records: EarlyRecords | None = None  # that are read into these slabs
        self._filled: dict[int, Lies] = {}  # by slab
        self._taken: torch.Tensor | None = None  # the slabs, which threads go on to fill
        self._filling: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []
        self._start(self._threads, self._run, weights, most_bytes)

    def stop(self) -> None:
        """When this returns, what was begun is there, and no memory is taken any more: into slabs that have their pages, threads
        go on reading."""
        self._stopped.set()
        for thread in self._threads:  # the first one may have added another before it ended
            thread.join()
        if self._slabs is not None:
            self._slabs.stop()

    def give_up(self) -> None:
        """Stop, and forget what was read and not taken."""
        self._given_up.set()
        self._filled_enough.set()
        self.stop()
        self._fill_no_more()
        self._found.clear()
        if self._slabs is not None:
            self._slabs.free()

    def held_bytes(self) -> int:
        """Of tensors that were read, and not taken yet. No more are read ahead."""
        self.stop()
        return sum(tensor.nbytes for tensor in self._found.values())

    def backed_bytes(self) -> int:
        """Of memory for slabs that has its pages, and was not taken yet. No more gets any."""
        self.stop()
        return self._slabs.backed_bytes() if self._slabs is not None else 0

    def _fill_no_more(self) -> None:
        self._filled_enough.set()
        for thread in self._filling:
            thread.join()
        self._taken = None

    def take_memory(self, nbytes: int, slab_bytes: int) -> tuple[torch.Tensor, Callable[[], Filled]] | None:
        """uint8 `[bytes]` for slabs of `slab_bytes` each, once, if there is as much; and what lies in them, which ends reading
        them ahead, and has to be asked for before they are used."""
        self.stop()
        memory, records = self._slabs, self._records
        if memory is None:
            return None
        if records is not None and records.layout.record_bytes != slab_bytes:
            records = None  # a wrong guess
        if records is None or len(records.experts) * slab_bytes > nbytes:
            self._fill_no_more()  # what threads write to must stay
        taken = memory.take(nbytes)
        if taken is None:
            self._fill_no_more()
            memory.free()
            return None
        self._taken = taken
        return taken, self._lying if records is not None else dict

    def _lying(self) -> Filled:
        self._fill_no_more()
        filled, self._filled, records = self._filled, {}, self._records
        assert records is not None
        return {lies: (slab, records.begin(slab)) for slab, lies in filled.items()}

    def take(self, key: Key) -> torch.Tensor | None:
        """uint8 `[bytes]`, once. No more tensors are read ahead: the caller reads the rest."""
        self.stop()
        return self._found.pop(key, None)

    def _start(self, threads: list[threading.Thread], work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, name="vismoe-read-ahead", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads may be started
            thread.start()
            threads.append(thread)

    def _run(self, weights: WeightFiles, most_bytes: int) -> None:
        with contextlib.suppress(*FAILURES):
            headers = [header for path in weights.paths for header in headers_of(path)]
            tensors = weights.large_tensors(headers, most_bytes)
            wanted, files = iter(tensors), CheckpointFiles(headers).for_loading(True, 1, AT_ONCE_BYTES)
            slabs = iter(self._begin_slabs(weights, headers, files, sum(entry.nbytes for _, entry in tensors)))
            for _ in range(THREADS):
                self._start(self._filling, self._fill, files, slabs)
            give_way()  # this thread, and those that it starts: the first write to memory takes a core, which imports need
            for _ in range(THREADS - 1):
                self._start(self._threads, self._read_tensors, files, wanted)
            self._read_tensors(files, wanted)

    def _begin_slabs(
        self, weights: WeightFiles, headers: Sequence[SafetensorsHeader], files: OpenFiles, tensor_bytes: int
    ) -> Sequence[Sequence[int]]:
        """Memory for slabs that the plan will probably make gets pages now, where that is worth it. Returns the slabs to fill,
        some at a time: of every layer as many experts of the largest group as will probably be resident."""
        most_bytes, wanted_bytes = weights.slab_bytes(headers, tensor_bytes, host_memory()[0])
        alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"  # else the plan has a share of the memory
        worth_it = wanted_bytes >= LEAST_BYTES and cores() > 1 and alone and sys.platform == "linux" and addresses_are_free()
        boundary = files.memory_bytes if weights.roomy and files.past_cache else 0
        about = headers, weights.dtype, weights.layers, boundary, wanted_bytes
        records = early_records(*about) if worth_it and weights.in_place else None
        each_bytes = records.layout.record_bytes if records is not None else 1
        slabs = range(min(len(records.experts), most_bytes // each_bytes) if records is not None else 0)
        with contextlib.suppress(OSError):  # there are no addresses
            self._slabs = EarlyMemory(most_bytes, max(wanted_bytes, len(slabs) * each_bytes)) if worth_it else None
        if self._slabs is None:
            return ()
        self._records, at_once = records, max(1, RECORDS_BYTES // each_bytes)
        return [slabs[first : first + at_once] for first in slabs[::at_once]]

    def _fill(self, files: OpenFiles, slabs: Iterator[Sequence[int]]) -> None:
        with contextlib.suppress(*FAILURES):
            for some in slabs:
                records, memory = self._records, self._slabs
                assert records is not None and memory is not None
                place = some[0] * records.layout.record_bytes, len(some) * records.layout.record_bytes
                if not memory.wait_for_pages(*place) or self._filled_enough.is_set():
                    return
                stretches = records.stretches(some, memory.address)
                if not files.are_on_disk(stretches):
                    give_way()  # to copy what the page cache has takes a core
                files.fill_all(stretches)
                self._filled.update({slab: records.lies(slab, files.states) for slab in some})

    def _read_tensors(self, files: OpenFiles, wanted: Iterator[tuple[int, TensorEntry]]) -> None:
        with contextlib.suppress(*FAILURES):
            for file, entry in wanted:
                if self._stopped.is_set():
                    return
                into = in_huge_pages(torch.empty(entry.nbytes, dtype=torch.uint8))
                memory = into.numpy()
                for begin in range(0, entry.nbytes, PIECE_BYTES):  # each in one call, without the interpreter lock
                    if self._given_up.is_set():
                        return
                    files.fill(file, entry.offset_bytes + begin, memory[begin : begin + PIECE_BYTES])
                self._found[files.states[file], entry.offset_bytes, entry.nbytes] = into


def headers_of(path: Path) -> Sequence[SafetensorsHeader]:
    """Of a weight file, with all parts of a split one. Raises CheckpointError."""
    return read_gguf_headers(path) if path.suffix == GGUF else [read_header(path)]


@contextlib.contextmanager
def reading_ahead(weights: WeightFiles, most_bytes: int | None = None) -> Iterator[None]:
    """Within, large tensors are read, until loading asks for them, and experts. most_bytes: of tensors; None: half of what is
    free."""
    if not weights.paths:
        yield
        return
    reading = ReadAhead(weights, int(SHARE * host_memory()[0]) if most_bytes is None else most_bytes)
    before = _READING.set(reading)
    try:
        yield
    finally:
        _READING.reset(before)
        reading.give_up()


def is_reading() -> bool:
    """Whether something is, or was, read ahead in this context."""
    return _READING.get() is not None


def held_bytes() -> int:
    """As `ReadAhead.held_bytes`, in this context."""
    reading = _READING.get()
    return reading.held_bytes() if reading is not None else 0


def backed_bytes() -> int:
    """As `ReadAhead.backed_bytes`, in this context."""
    reading = _READING.get()
    return reading.backed_bytes() if reading is not None else 0


def take_memory(nbytes: int, slab_bytes: int) -> tuple[torch.Tensor, Callable[[], Filled]] | None:
    """As `ReadAhead.take_memory`, in this context."""
    reading = _READING.get()
    return reading.take_memory(nbytes, slab_bytes) if reading is not None else None


def take(state: FileState, offset_bytes: int, nbytes: int) -> torch.Tensor | None:
    """uint8 `[bytes]` of a file in this state, in memory of its own, if it was read ahead in this context."""
    reading = _READING.get()
    return reading.take((state, offset_bytes, nbytes)) if reading is not None else None


def forget() -> None:
    """Free what loading did not take, of which it made something else."""
    if (reading := _READING.get()) is not None:
        reading.give_up()
