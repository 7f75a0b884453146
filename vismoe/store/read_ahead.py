"""Reads from disk while libraries are imported: what a model needs of its checkpoint beside the routed experts.

To import torch and transformers takes seconds of one core, in which the disk and other cores have nothing to do. Threads read
large tensors meanwhile, into the memory that they will stay in: neither their bytes nor its pages are waited for later. Loading
does not depend on it. It asks here for each tensor before it reads one (`tensor_reads.read_new`), gets those whose file is still
in the state in which it was read, and finds what is wrong with a file by itself.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from vismoe.errors import CheckpointError
from vismoe.kernels.read import Stretch, piece_of
from vismoe.machine.hardware import host_memory
from vismoe.pools.advice import in_huge_pages
from vismoe.store.file_state import FileState
from vismoe.store.files import CheckpointFiles, OpenFiles
from vismoe.store.gguf_header import GGUF, read_gguf_headers
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry, read_header

LARGE_BYTES = 2**20  # of a tensor that is worth it
SHARE = 0.5  # of free memory to read into, before a plan says what it is for
THREADS = 2  # one copies out of its bounce buffer while the disk fills the other's
CAST = (torch.float32, torch.float64)  # a model may hold it in another type, which is made of the file's
# Routed experts, embeddings, which may stay on disk, and the layer that drafts.
LEFT_OUT = re.compile(r"\.experts\.|_exps\.|embed_tokens|\bmtp\.")
MOST_DIMENSIONS = 2  # experts may have any name, but those of a layer in one tensor have three
_READING: ContextVar["ReadAhead | None"] = ContextVar("what reads ahead of loading", default=None)

Key = tuple[FileState, int, int]  # of a tensor: its file in one state, its offset and its bytes


class ReadAhead:
    """Threads that read large tensors of weight files, as many as fit into `most_bytes`, until they are stopped."""

    def __init__(self, paths: Sequence[Path], most_bytes: int):
        self._stopped = threading.Event()
        self._found: dict[Key, torch.Tensor] = {}
        self._threads: list[threading.Thread] = []
        self._start(self._run, paths, most_bytes)

    def stop(self) -> None:
        """When this returns, nothing is read ahead any more."""
        self._stopped.set()
        for thread in self._threads:  # the first one may add another while it is waited for
            thread.join()

    def held_bytes(self) -> int:
        """Of what was read, and not taken yet. Nothing is read ahead any more."""
        self.stop()
        return sum(tensor.nbytes for tensor in self._found.values())

    def take(self, key: Key) -> torch.Tensor | None:
        """uint8 `[bytes]`, once. Nothing is read ahead any more: the caller reads the rest."""
        self.stop()
        return self._found.pop(key, None)

    def _run(self, paths: Sequence[Path], most_bytes: int) -> None:
        with contextlib.suppress(CheckpointError):  # loading says what is wrong
            headers = [header for path in paths for header in headers_of(path)]
            wanted = iter(large_tensors(headers, most_bytes))
            files = CheckpointFiles(headers).for_loading(True, 1)
            for _ in range(THREADS - 1):
                self._start(self._read, files, wanted)
            self._read(files, wanted)

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=work, args=given, name="vismoe-read-ahead", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self, files: OpenFiles, wanted: Iterator[tuple[int, TensorEntry]]) -> None:
        with contextlib.suppress(CheckpointError, RuntimeError):  # the latter: torch gets no more memory
            for file, entry in wanted:
                if self._stopped.is_set():
                    return
                into = in_huge_pages(torch.empty(entry.nbytes, dtype=torch.uint8))
                files.fill_all([Stretch(file, entry.offset_bytes, [piece_of(into.numpy())])])  # in one call, without the lock
                self._found[files.states[file], entry.offset_bytes, entry.nbytes] = into


def weights_here(model: str | None, revision: str | None, gguf: str | None, mmproj: str | None) -> list[Path]:
    """The weight files of a folder, a hub name or a GGUF file, as far as they are on this machine; loading looks more closely."""
    gguf = model if model is not None and model.endswith(GGUF) else gguf
    if gguf is not None:
        return [Path(name).expanduser() for name in (gguf, mmproj) if name is not None]
    if model is None:  # the bundled one is small
        return []
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # not a name on the hub
            config = try_to_load_from_cache(model, "config.json", revision=revision)
            folder = Path(config).parent if isinstance(config, str) else folder
    return sorted(folder.glob("*.safetensors"))


def headers_of(path: Path) -> Sequence[SafetensorsHeader]:
    """Of a weight file, with all parts of a split one. Raises CheckpointError."""
    return read_gguf_headers(path) if path.suffix == GGUF else [read_header(path)]


def large_tensors(headers: Sequence[SafetensorsHeader], most_bytes: int) -> list[tuple[int, TensorEntry]]:
    """(file, tensor) of what is worth to be read ahead, in the order of the files, as far as `most_bytes` go."""
    found, left_bytes = list[tuple[int, TensorEntry]](), most_bytes
    for file, header in enumerate(headers):
        for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].offset_bytes):
            if entry.nbytes < LARGE_BYTES or len(entry.shape) > MOST_DIMENSIONS or LEFT_OUT.search(name):
                continue
            if entry.dtype in CAST:
                continue
            left_bytes -= entry.nbytes
            if left_bytes < 0:
                return found
            found.append((file, entry))
    return found


@contextlib.contextmanager
def reading_ahead(paths: Sequence[Path], most_bytes: int | None = None) -> Iterator[None]:
    """Within, large tensors of these files are read, until loading asks for them. most_bytes: half of what is free."""
    if not paths:
        yield
        return
    reading = ReadAhead(paths, int(SHARE * host_memory()[0]) if most_bytes is None else most_bytes)
    before = _READING.set(reading)
    try:
        yield
    finally:
        _READING.reset(before)
        reading.stop()


def held_bytes() -> int:
    """Of what was read ahead in this context, and is not any more: memory of this process that loading will use."""
    reading = _READING.get()
    return reading.held_bytes() if reading is not None else 0


def take(state: FileState, offset_bytes: int, nbytes: int) -> torch.Tensor | None:
    """uint8 `[bytes]` of a file in this state, in memory of its own, if it was read ahead in this context."""
    reading = _READING.get()
    return reading.take((state, offset_bytes, nbytes)) if reading is not None else None
