"""Experts read in place from safetensors files: the store that needs no conversion.

Which bytes make up an expert is plain data (`Locator`), built from the model by `vismoe/models/load/locate.py`. Promises: one
read per stretch that is contiguous on disk, straight into the record where type and orientation match; no byte of another expert
reaches a record. Offsets are absolute, in bytes.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from vismoe.errors import CheckpointError
from vismoe.store.arrangement import SAME
from vismoe.store.expert_store import StoreOnDisk, naming_expert
from vismoe.store.files import OpenFiles, ThreadBuffer, bounce_bytes
from vismoe.store.safetensors_header import SafetensorsHeader
from vismoe.store.tensors import TensorPart
from vismoe.types import ALIGNMENT_BYTES, ExpertId, ExpertInventory, RecordLayout

Locator = tuple[tuple[TensorPart, ...], ...]  # one expert's parts, for each section of its record


class _Stretch(NamedTuple):
    """Bytes contiguous on disk that go unchanged to `pieces` (start, stop) of the record, in disk order."""

    file: int
    offset_bytes: int
    pieces: tuple[tuple[int, int], ...]


class _Bounce(NamedTuple):
    """A part that is read as `dtype` and `shape`, then cast or rearranged into bytes start..stop of the record."""

    part: TensorPart
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


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
        self._reads = [
            [_compile(inventory.layout(layer.index), locator) for locator in locators[layer.index]] for layer in inventory.layers
        ]
        every = [reads for layer in self._reads for reads in layer]
        self.scratch_bytes = max((bounce.part.nbytes for _, bounces in every for bounce in bounces), default=0)
        stretches = (sum(stop - start for start, stop in stretch.pieces) for direct, _ in every for stretch in direct)
        self.stretch_bytes = max((self.scratch_bytes, *stretches))
        self.bounce_bytes = bounce_bytes(self.stretch_bytes)
        self.stored_bytes = sum(part.nbytes for layer in locators for locator in layer for parts in locator for part in parts)
        digest = hashlib.sha256(config_json)  # over config, headers, sizes and mtimes; a packed store identifies its source by it
        for header in self.headers:
            digest.update(f"{header.path.name} {header.sha256} {header.file_bytes} {header.mtime_ns}\n".encode())
        self.fingerprint = digest.hexdigest()
        self._scratch = ThreadBuffer(partial(torch.empty, self.scratch_bytes, dtype=torch.uint8))

    def read(self, expert: ExpertId, record: torch.Tensor) -> int:
        """Fill `record` (uint8 `[record_bytes]`, CPU, 64-byte aligned) with one expert; return its bytes on disk."""
        layout = self.inventory.layout(expert.layer)
        assert record.dtype is torch.uint8 and record.is_contiguous() and record.numel() >= layout.record_bytes, record.shape
        assert record.data_ptr() % ALIGNMENT_BYTES == 0, f"record at {record.data_ptr():#x} is not {ALIGNMENT_BYTES}-byte aligned"
        stretches, bounces = self._reads[expert.layer][expert.expert]
        into, files = record.numpy(), self._files.hold()
        nbytes = 0
        try:
            for stretch in stretches:
                pieces = [into[start:stop] for start, stop in stretch.pieces]
                nbytes += files.fill(stretch.file, stretch.offset_bytes, pieces)
            for bounce in bounces:
                nbytes += self._rearrange(files, bounce, record)
        except CheckpointError as error:
            raise naming_expert(expert, error) from error
        return nbytes

    def _rearrange(self, files: OpenFiles, bounce: _Bounce, record: torch.Tensor) -> int:
        """Read a part into this thread's scratch, then rearrange and cast it into the record in one copy."""
        scratch, part = self._scratch.memory, bounce.part
        nbytes = files.fill(part.file, part.offset_bytes, [scratch.numpy()[: part.nbytes]])
        on_disk = scratch[:nbytes].view(part.dtype).view(part.shape)
        into = record[bounce.start : bounce.stop].view(bounce.dtype).view(bounce.shape)
        part.arrangement.copy(on_disk, into)
        return nbytes


def _compile(layout: RecordLayout, locator: Locator) -> tuple[tuple[_Stretch, ...], tuple[_Bounce, ...]]:
    """Turn one expert's parts into as few reads as possible: stretches sorted by file and offset, then the bounced parts."""
    direct: list[tuple[int, int, int, int]] = []  # file, offset on disk, start and stop in the record
    bounces = []
    for section, parts in zip(layout.sections, locator, strict=True):
        start = section.offset_bytes
        for part in parts:
            shape = part.result
            stop = start + math.prod(shape) * section.dtype.itemsize
            if part.dtype == section.dtype and part.arrangement is SAME:
                direct.append((part.file, part.offset_bytes, start, stop))
            elif part.arrangement.whole:
                end = section.offset_bytes + section.nbytes
                bounces.append(_Bounce(part, section.offset_bytes, end, section.dtype, section.shape))
            else:
                bounces.append(_Bounce(part, start, stop, section.dtype, shape))
            start = stop
        assert start == section.offset_bytes + section.nbytes, f"the parts of {section.name} do not fill it"
    return tuple(_stretches(direct)), tuple(bounces)


def _stretches(direct: list[tuple[int, int, int, int]]) -> Iterable[_Stretch]:
    """Group pieces that are adjacent on disk: one preadv reads them, wherever they go in the record."""
    group: list[tuple[int, int, int, int]] = []
    for piece in sorted(direct):
        if group:
            file, offset_bytes, start, stop = group[-1]
            if piece[:2] != (file, offset_bytes + stop - start):
                yield _Stretch(*group[0][:2], tuple(p[2:] for p in group))
                group = []
        group.append(piece)
    if group:
        yield _Stretch(*group[0][:2], tuple(p[2:] for p in group))
