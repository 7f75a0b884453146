"""Experts read in place from safetensors files: the store that needs no conversion.

Which bytes make up an expert is plain data (`Locator`), built from the model by `vismoe/models/load/locate.py`. Promises: one
read per stretch that is contiguous on disk, straight into the record where type and orientation match and into the thread's
scratch where not; no byte of another expert reaches a record. Offsets are absolute, in bytes.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from vismoe.errors import CheckpointError
from vismoe.kernels.read import Stretch
from vismoe.store.arrangement import SAME
from vismoe.store.expert_store import StoreOnDisk, naming_expert
from vismoe.store.files import ThreadBuffer, bounce_bytes
from vismoe.store.safetensors_header import SafetensorsHeader
from vismoe.store.tensors import TensorPart
from vismoe.types import ALIGNMENT_BYTES, ExpertId, ExpertInventory, RecordLayout, Section, aligned

Locator = tuple[tuple[TensorPart, ...], ...]  # one expert's parts, for each section of its record


class _Bounce(NamedTuple):
    """A part that is read into bytes `at` .. of the scratch as `part.dtype` and `part.shape`, then cast or rearranged into bytes
    start .. stop of the record."""

    part: TensorPart
    at: int
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Stretch(NamedTuple):
    """Bytes contiguous on disk that go to `pieces`, in disk order: each (whether in the scratch, start, stop)."""

    file: int
    offset_bytes: int
    pieces: Sequence[tuple[bool, int, int]]
    bounces: Sequence[_Bounce]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def into(self, addresses: Sequence[int]) -> Stretch:
        """The same, to be read into a record and a scratch at these addresses."""
        pieces = [(addresses[in_scratch] + start, stop - start) for in_scratch, start, stop in self.pieces]
        return Stretch(self.file, self.offset_bytes, pieces)

    @property
    def scratch_bytes(self) -> int:
        return max((stop for in_scratch, _, stop in self.pieces if in_scratch), default=0)


class CheckpointStore(StoreOnDisk):
    """An ExpertStore over the files of a checkpoint."""

    def __init__(
        self,
        headers: Sequence[SafetensorsHeader],
        inventory: ExpertInventory,
        locators: Sequence[Sequence[Locator]],  # [layer][expert]
        config_json: bytes = b"",
    ):
        super().__init__(headers)
        self.inventory = inventory
        self.locators = locators
        self.headers = tuple(headers)
        compiled = stretches_of(inventory, locators)
        self._reads = [[_at_once(stretches) for stretches in layer] for layer in compiled]
        every = [stretch for layer in compiled for stretches in layer for stretch in stretches]
        self.scratch_bytes = max((stretch.scratch_bytes for stretch in every), default=0)
        self.stretch_bytes = max((stretch.nbytes for stretch in every), default=0)
        self.bounce_bytes = bounce_bytes(self.stretch_bytes)
        self.stored_bytes = sum(part.nbytes for layer in locators for locator in layer for parts in locator for part in parts)
        digest = hashlib.sha256(config_json)  # over config, headers, sizes and mtimes; a packed store identifies its source by it
        for header in self.headers:
            digest.update(f"{header.path.name} {header.sha256} {header.file_bytes} {header.mtime_ns}\n".encode())
        self.fingerprint = digest.hexdigest()
        self._scratch = ThreadBuffer(partial(torch.empty, self.scratch_bytes, dtype=torch.uint8))

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """As ExpertStore.read."""
        layout = self.inventory.layout(expert.layer)
        assert record.dtype is torch.uint8 and record.is_contiguous() and record.numel() >= layout.record_bytes, record.shape
        address, begins = record.data_ptr(), (0, self.begins(expert) % ALIGNMENT_BYTES)
        assert address % ALIGNMENT_BYTES in begins, f"record at {address:#x} is not {ALIGNMENT_BYTES}-byte aligned"
        memories, files = (record, self._scratch.memory), self._files.hold()
        addresses = [memory.data_ptr() for memory in memories]
        nbytes = 0
        try:
            for reads in self._reads[expert.layer][expert.expert]:
                nbytes += files.fill_all([stretch.into(addresses) for stretch in reads])
                for bounce in reads[-1].bounces:
                    _rearrange(bounce, *memories)
        except CheckpointError as error:
            raise naming_expert(expert, error) from error
        return nbytes

    def _stretches(self, expert: ExpertId) -> Sequence[Stretch]:
        calls = self._reads[expert.layer][expert.expert]
        if any(stretch.bounces for call in calls for stretch in call):
            return ()
        return [stretch.into((0, 0)) for call in calls for stretch in call]


def _rearrange(bounce: _Bounce, record: torch.Tensor, scratch: torch.Tensor) -> None:
    """Rearrange and cast a part from this thread's scratch into the record in one copy."""
    part = bounce.part
    on_disk = scratch[bounce.at : bounce.at + part.nbytes].view(part.dtype).view(part.shape)
    into = record[bounce.start : bounce.stop].view(bounce.dtype).view(bounce.shape)
    part.arrangement.copy(on_disk, into)


def _at_once(stretches: Sequence[_Stretch]) -> tuple[tuple[_Stretch, ...], ...]:
    """Stretches to read in one call each: only the last of them uses the scratch."""
    calls: list[tuple[_Stretch, ...]] = []
    begun: tuple[_Stretch, ...] = ()
    for stretch in stretches:
        begun += (stretch,)
        if stretch.bounces:
            calls, begun = [*calls, begun], ()
    return (*calls, begun) if begun else tuple(calls)


def stretches_of(inventory: ExpertInventory, locators: Sequence[Sequence[Locator]]) -> list[list[tuple[_Stretch, ...]]]:
    """The reads of each layer's experts."""
    return [[_compile(inventory.layout(layer.index), locator) for locator in locators[layer.index]] for layer in inventory.layers]


def _compile(layout: RecordLayout, locator: Locator) -> tuple[_Stretch, ...]:
    """Turn one expert's parts into as few reads as possible, sorted by file and offset."""
    parts: list[tuple[TensorPart, int, int, Section]] = []  # with start and stop in the record
    for section, of_section in zip(layout.sections, locator, strict=True):
        start = section.offset_bytes
        for part in of_section:
            stop = start + math.prod(part.result) * section.dtype.itemsize
            parts.append((part, start, stop, section))
            start = stop
        assert start == section.offset_bytes + section.nbytes, f"the parts of {section.name} do not fill it"
    stretches: list[_Stretch] = []
    end: tuple[int, int] | None = None  # of the last stretch
    for part, start, stop, section in sorted(parts, key=lambda each: each[0][:2]):
        if (part.file, part.offset_bytes) != end:
            pieces: list[tuple[bool, int, int]] = []
            bounces: list[_Bounce] = []
            scratch_bytes = 0
            stretches.append(_Stretch(part.file, part.offset_bytes, pieces, bounces))
        if part.dtype == section.dtype and part.arrangement is SAME:
            pieces.append((False, start, stop))
        else:
            at, scratch_bytes = scratch_bytes, aligned(scratch_bytes + part.nbytes)
            pieces.append((True, at, at + part.nbytes))
            if part.arrangement.whole:
                start, stop = section.offset_bytes, section.offset_bytes + section.nbytes
            shape = section.shape if part.arrangement.whole else part.result
            bounces.append(_Bounce(part, at, start, stop, section.dtype, shape))
        end = part.file, part.offset_bytes + part.nbytes
    return tuple(stretches)
